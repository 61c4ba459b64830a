"""What memtop can change in the user's own program that is built on Hugging Face's Trainer."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from memtop.supervisor.errors import UsageError
from memtop.supervisor.wire import Checkpoint

WHOLE_NUMBERS = ("batch", "accumulation", "seq_len", "eval_batch")
KNOBS = (*WHOLE_NUMBERS, "gradient_checkpointing", "optimizer")
"""By the names of `--set`."""
_BOOLEANS = {"true": True, "false": False}


class Grip(msgspec.Struct, frozen=True, kw_only=True):
    """The Trainer of the program, as its agent has reported it."""

    output_dir: str
    """An absolute path."""
    batch: int | None = None
    """Of one process."""
    accumulation: int | None = None
    processes: int = 1
    seq_len: int | None = None
    """None if its arguments have no such field."""
    peak_rate: float | None = None
    schedule: str | None = None
    """Of the learning rate: `linear`, `cosine`, ..."""
    warmup: float = 0.0
    """Updates; a share of all if below 1."""
    fixed_length: bool = False
    """Whether its length is given in updates (max_steps), not in epochs."""
    earlier: dict[str, int] = {}
    """The checkpoints that were in this folder before the run: `program_checkpoints.newest_of`."""
    first: int | None = None
    """The update from which the run began, if its program resumed by itself."""
    resumes: bool | None = None
    """Whether a restart has shown that it continues from its checkpoint; None before the first."""

    @property
    def effective_batch(self) -> int | None:
        if self.batch is None or self.accumulation is None:
            return None
        return self.batch * self.accumulation * self.processes


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the first update of an attempt must show."""

    before: dict[str, str] = {}
    """The knobs of the attempt before, to which the run returns if the program does not start."""
    resumed: int | None = None
    """The update that it resumes after; None if there was no checkpoint."""


def shape_key(grip: Grip, knobs: dict[str, str], allocator: str, *, on_gpu: bool) -> str:
    """All that is known to shape the peak of memory but for the batch: peaks with the same key lie
    on one line over the batch."""
    others = {name: text for name, text in sorted(knobs.items()) if name not in ("batch", "accumulation", "eval_batch")}
    others["seq_len"] = str(grip.seq_len)
    words = [f"{name}={text}" for name, text in sorted(others.items())]
    return " ".join(["own", "gpu" if on_gpu else "cpu", f"processes={grip.processes}", *words, allocator])


def values_of(knobs: dict[str, str], grip: Grip) -> dict[str, Any]:
    """The values of the knobs; UsageError if one is not possible."""
    unknown = [name for name in knobs if name not in KNOBS]
    if unknown:
        raise UsageError(f"{', '.join(unknown)}: of a program built on Hugging Face's Trainer, memtop sets {', '.join(KNOBS)}")
    if "seq_len" in knobs and grip.seq_len is None:
        raise UsageError("seq_len: the arguments of this program's Trainer have no such field; change it in the script")
    return {name: _value(name, text) for name, text in knobs.items()}


def _value(name: str, text: str) -> int | bool | str:
    if name in WHOLE_NUMBERS:
        if not text.isdecimal() or not 0 < int(text) < 1 << 31:
            raise UsageError(f"{name} {text}: must be a whole number from 1 on")
        return int(text)
    if name == "gradient_checkpointing":
        if text.lower() not in _BOOLEANS:
            raise UsageError(f"{name} {text}: must be true or false")
        return _BOOLEANS[text.lower()]
    return text


def rate_at(grip: Grip, update: int, total: int) -> float | None:
    """The learning rate of the update after this one; None for a schedule that memtop does not
    know."""
    if grip.peak_rate is None or grip.schedule not in ("linear", "cosine", "constant", "constant_with_warmup"):
        return None
    warmup = math.ceil(grip.warmup * total) if grip.warmup < 1 else int(grip.warmup)
    if grip.schedule == "constant":
        return grip.peak_rate
    if update < warmup:
        return grip.peak_rate * update / warmup
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    if grip.schedule == "linear":
        return grip.peak_rate * (1 - done)
    return grip.peak_rate * (0.5 * (1 + math.cos(math.pi * done)) if grip.schedule == "cosine" else 1)


def consequences(
    grip: Grip, knobs: dict[str, str], at: Checkpoint | None, reached: int | None, total: int | None = None
) -> str:
    """What a restart with these knobs means for the position of the training, as the end of a
    sentence. `total`: how many updates the program does now."""
    values = values_of(knobs, grip)
    after = msgspec.structs.replace(grip, **{name: values[name] for name in ("batch", "accumulation") if name in values})
    text = _lost(at, reached)
    if (length := values.get("seq_len")) is not None and length != grip.seq_len:
        text += f"; ! seq_len {grip.seq_len} -> {length}: samples are cut at another length, which changes training"
    if grip.batch is None or grip.accumulation is None or (after.batch, after.accumulation) == (grip.batch, grip.accumulation):
        return text
    text += f"; batch {grip.batch} x {grip.accumulation} -> {after.batch} x {after.accumulation}"
    before, then = grip.effective_batch or 0, after.effective_batch or 0
    if before == then:
        return f"{text}: the effective batch stays {before}, and so do order and learning rate"
    done = (at.updates if at is not None and at.complete else None) or 0
    verb, moved = "repeated" if then < before else "skipped", abs(before - then) * done
    return (
        f"{text}: ! the effective batch changes from {before} to {then}. The Trainer counts in updates, so about {moved} "
        f"samples are {verb}; {_rates(grip, done, total, before / then)}"
    )


def _rates(grip: Grip, done: int, total: int | None, longer: float) -> str:
    """The learning rate there, before and after; `longer`: how many times as many updates an epoch
    has."""
    if grip.fixed_length:
        return "the learning rate continues as it was, because the length is given in updates"
    before = rate_at(grip, done, total) if total else None
    after = rate_at(grip, done, math.ceil(total * longer)) if total else None
    if before is None or after is None:
        return f"the schedule of the learning rate has {longer:g} times as many updates"
    return f"the learning rate there changes from {before:g} to {after:g}"


def _lost(at: Checkpoint | None, reached: int | None) -> str:
    """How many updates are done again, as far as that is known."""
    saved = (at.updates or 0) if at is not None and at.complete else 0
    if not reached or reached <= saved:
        return ""
    return f"; {reached - saved} updates since update {saved} are done again, unless the program saves when it is stopped"
