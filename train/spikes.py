"""Notices when the loss jumps and stays high, and keeps the state before it.

A single high loss is no spike: noisy batches, another curriculum and a warm restart of the learning
rate have them. `SpikeDetector` decides from values alone; all ranks give it the same ones.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec

from memtop.presets import Settings
from memtop.train import TrainingError
from memtop.train.channel import Channel
from memtop.train.checkpoint import NoSpaceError, keep_before_spike
from memtop.train.order import UpdatePlan, sample_digest
from memtop.train.state_files import saved_before

WINDOW = 64
"""A loss is compared with those of at most so many updates before it."""
_LEAST = 32
"""At least so many; the newest so many say what is usual."""
_CONFIRMED = 3
"""So many high losses in a row are a spike."""
_SPREADS = 10.0
"""How many spreads above the median a loss is high."""
_RISE = 0.5
"""A high loss is larger than the median by this share of it, too, ..."""
_FLOOR = 0.3
"""... and by so many nats."""
_ABOVE_ALL = 1.15
"""It is larger than every usual loss by this factor."""
_NORM_RISE = 6.0
"""In a spike, the gradient's norm is so many times its median. Harder samples do not raise it so
far."""
_ALONE = 2.5
"""If no norm is known, the median loss times this."""
MOST_TIMES = 3
"""A training goes back by itself so often; then it stops."""
_IDS_NAMED = 10_000


class Seen(msgspec.Struct, frozen=True):
    """One update, as the detector sees it: its positions are [begin, end)."""

    update: int
    begin: int
    end: int
    loss: float
    norm: float | None


class Spike(msgspec.Struct, frozen=True):
    """The high updates, oldest first, and the one before them, whose step may have caused them."""

    before: Seen
    high: tuple[Seen, ...]
    usual_loss: float


class SpikeDetector:
    """Finds the spikes in the losses of one attempt. It begins anew with another effective batch,
    because that changes how much the loss varies."""

    def __init__(self) -> None:
        self._usual: deque[Seen] = deque(maxlen=WINDOW)
        self._high: list[Seen] = []
        self._size = 0

    @property
    def suspects(self) -> bool:
        """Whether the newest loss is high: it may be the beginning of a spike."""
        return bool(self._high)

    def __call__(self, seen: Seen, effective_batch: int) -> Spike | None:
        """The spike that this update makes certain; None without one."""
        if effective_batch != self._size:
            self._usual.clear()
            self._high, self._size = [], effective_batch
        if len(self._usual) < _LEAST or not self._is_high(seen.loss):
            # What was high for a moment belongs to the ordinary losses: then its repetition is
            # nothing new.
            self._usual.extend(one for one in (*self._high, seen) if math.isfinite(one.loss))
            self._high = []
            return None
        self._high.append(seen)
        if len(self._high) < _CONFIRMED:
            return None
        high, usual = tuple(self._high), statistics.median(one.loss for one in list(self._usual)[-_LEAST:])
        before = self._usual[-1]
        found = Spike(before, high, usual) if self._diverges(before, high, usual) else None
        self._usual.clear()
        self._high = []
        return found

    def _is_high(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        losses = [one.loss for one in self._usual]
        middle = statistics.median(losses[-_LEAST:])
        # By the changes from one update to the next: a loss that falls has no larger spread.
        spread = 1.4826 / math.sqrt(2) * statistics.median(abs(b - a) for a, b in pairwise(losses))
        rise = max(_SPREADS * spread, _RISE * abs(middle), _FLOOR)
        return loss > middle + rise and loss > _ABOVE_ALL * max(losses[-_LEAST:])

    def _diverges(self, before: Seen, high: tuple[Seen, ...], usual: float) -> bool:
        if any(not math.isfinite(one.loss) for one in high):
            return True
        norms = [one.norm for one in self._usual if one.norm is not None and math.isfinite(one.norm)]
        newest = [one.norm for one in (before, *high) if one.norm is not None]
        if not norms or not newest:
            return min(one.loss for one in high) > _ALONE * usual + _FLOOR
        return any(not norm <= _NORM_RISE * statistics.median(norms) for norm in newest)


class SpikeWatch:
    """Reports a spike and does what `--on-spike` says. All ranks call it together."""

    def __init__(self, channel: Channel, state_dir: Path, *, first: bool) -> None:
        self._detector = SpikeDetector()
        self._channel = channel
        self._state_dir = state_dir
        self._first = first
        self._plans: deque[UpdatePlan] = deque(maxlen=_CONFIRMED + 1)

    @property
    def suspects(self) -> bool:
        """Whether the newest loss is high: no state is saved by itself until that is clear."""
        return self._detector.suspects

    def __call__(self, plan: UpdatePlan, loss: float, norm: float | None, settings: Settings, wait: Callable[[], None]) -> None:
        """Count an update in. TrainingError if the training is to end because of a spike.

        `wait` waits for the save in progress.
        """
        self._plans.append(plan)
        spike = self._detector(Seen(plan.number, plan.position, plan.end, loss, norm), settings.effective_batch)
        if spike is None:
            return
        wait()
        words = f"the loss rose from {spike.usual_loss:.4g} to {spike.high[0].loss:.4g} at update {spike.high[0].update}"
        if self._first:
            self._report(spike, words, settings)
        if settings.on_spike != "ask":
            raise TrainingError(f"{words} and stayed high; ended, the last saved checkpoint is unchanged")

    def _report(self, spike: Spike, words: str, settings: Settings) -> None:
        # The update before the first high loss may have broken the weights. Without a state from
        # before that one, the first high one is left out first.
        cause = spike.before
        saved = saved_before(self._state_dir, cause.update)
        if saved is None:
            cause = spike.high[0]
            saved = saved_before(self._state_dir, cause.update)
        ids = [key for plan in self._plans if plan.number >= cause.update for key in plan.ids]
        problem = None
        if saved is None:
            problem = f"no state from before update {cause.update} is saved"
        elif settings.on_spike == "back" and len(settings.leave_out) >= MOST_TIMES:
            problem = f"samples were left out {len(settings.leave_out)} times already"
        elif settings.on_spike == "ask":
            try:
                keep_before_spike(self._state_dir, saved[0])
            except NoSpaceError as error:
                problem = f"the state of update {saved[1]} is kept only until the next saves: {error}"
        newest = spike.high[-1]
        self._channel.report(
            "spike",
            update=newest.update,
            first_update=cause.update,
            begin=cause.begin,
            end=newest.end,
            samples=len(ids),
            sample_ids=ids[:_IDS_NAMED],
            sample_digest=sample_digest(ids),
            loss=newest.loss,
            usual_loss=spike.usual_loss,
            state_update=None if saved is None else saved[1],
            action=settings.on_spike,
            problem=problem,
            message=words,
        )
        self._channel.flush()
