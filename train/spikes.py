"""Notices when the loss jumps and stays high, and keeps the state before it; and when it rises
slowly, which is only said.

A single high loss is no spike: noisy batches, another curriculum and a warm restart of the learning
rate have them. `SpikeDetector` and `DriftDetector` decide from values alone; all ranks give them
the same ones.
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


_BLOCK = 50
"""A slow rise is found in the medians of so many updates each."""
_BLOCKS = 8
"""The loss rises slowly if it does so over so many blocks ..."""
_DRIFT_RISE, _DRIFT_FLOOR = 0.15, 0.15
"""... by this share of the lowest median, and by so many nats, ..."""
_DRIFT_SPREADS = 6.0
"""... and by so many spreads of a median; ..."""
_STEADY = 0.5
"""... if no step from one block to the next is more than this share of it; ..."""
_DRIFT_NORM_RISE = 1.3
"""... and if the gradient's norm has risen by this factor, too: harder samples raise it less."""
_DRIFT_ALONE = 0.5
"""If no norm is known, the share of the lowest median that counts."""


class Block(msgspec.Struct, frozen=True):
    """The medians of `_BLOCK` updates in a row."""

    update: int
    """The last one."""
    loss: float
    norm: float | None
    spread: float
    """How far the median of such losses lies from the true one."""


class DriftDetector:
    """Finds a loss that rises slowly, over hundreds of updates, in the losses of one attempt."""

    def __init__(self) -> None:
        self._updates: list[Seen] = []
        self._blocks: deque[Block] = deque(maxlen=_BLOCKS)
        self._lowest = math.inf
        self._size = 0
        self._said = False

    def __call__(self, seen: Seen, effective_batch: int) -> tuple[Block, Block] | None:
        """The first and the last block of a rise that this update makes certain; None without one.

        A rise is found once; again only if the loss has been near its lowest median since.
        """
        if effective_batch != self._size or not math.isfinite(seen.loss):
            self._updates.clear()
            self._blocks.clear()
            self._lowest, self._size = math.inf, effective_batch
            if not math.isfinite(seen.loss):
                return None
        self._updates.append(seen)
        if len(self._updates) < _BLOCK:
            return None
        newest = _block(self._updates)
        self._updates.clear()
        self._blocks.append(newest)
        self._lowest = min(self._lowest, newest.loss)
        if newest.loss - self._lowest < _DRIFT_FLOOR / 2:
            self._said = False
        if self._said or not self._rises():
            return None
        self._said = True
        return self._blocks[0], newest

    def _rises(self) -> bool:
        if len(self._blocks) < _BLOCKS:
            return False
        first, last, pairs = self._blocks[0], self._blocks[-1], list(pairwise(self._blocks))
        rise, spread = last.loss - first.loss, max(one.spread for one in self._blocks)
        share = _DRIFT_RISE
        if first.norm is None or last.norm is None:
            share = _DRIFT_ALONE
        elif last.norm < _DRIFT_NORM_RISE * first.norm:
            return False
        if rise < max(share * abs(self._lowest), _DRIFT_FLOOR, _DRIFT_SPREADS * spread):
            return False
        steps = [after.loss - before.loss for before, after in pairs]
        return min(steps) > -spread and max(steps) <= _STEADY * rise


def _block(updates: list[Seen]) -> Block:
    losses = [one.loss for one in updates]
    norms = [one.norm for one in updates if one.norm is not None and math.isfinite(one.norm)]
    middle = statistics.median(losses)
    spread = 1.4826 * statistics.median(abs(loss - middle) for loss in losses)
    norm = statistics.median(norms) if norms else None
    # The standard error of a median.
    return Block(updates[-1].update, middle, norm, 1.2533 * spread / math.sqrt(len(losses)))


class SpikeWatch:
    """Reports a spike and does what `--on-spike` says. All ranks call it together."""

    def __init__(self, channel: Channel, state_dir: Path, *, first: bool) -> None:
        self._detector = SpikeDetector()
        self._drift = DriftDetector()
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
        seen = Seen(plan.number, plan.position, plan.end, loss, norm)
        rise = self._drift(seen, settings.effective_batch)
        if rise is not None and self._first:
            self._channel.report("warning", message=_words_of(*rise))
        spike = self._detector(seen, settings.effective_batch)
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


def _words_of(first: Block, last: Block) -> str:
    """A slow rise in a sentence."""
    return (
        f"the loss has risen slowly, from {first.loss:.4g} at update {first.update} to {last.loss:.4g} at update "
        f"{last.update}, without a jump; memtop changes nothing: a lower learning rate may help, or an earlier state"
    )
