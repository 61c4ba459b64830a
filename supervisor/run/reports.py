"""What the ranks report: one tagged union, decoded once where a journal is read.

The agent in each rank appends one JSON object a line to `attempts/NNNN/rank-R.jsonl` (see
`train/agent/__init__.py`). Any training program may write such lines, so fields that this version
does not know are ignored, and a report that cannot be understood becomes `Unknown`. Every report
has `time`, seconds since the epoch, or None if its program left it out.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first report of each process."""

    time: float | None = None
    pid: int | None = None
    program_rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    python: str | None = None
    offers: tuple[str, ...] = ()
    """The commands that the program carries out."""


class Offers(msgspec.Struct, frozen=True, kw_only=True, tag="offers"):
    """The program offers more commands than its first report named."""

    time: float | None = None
    offers: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """The built-in trainer has loaded everything and is about to train."""

    time: float | None = None
    updates: int = 0
    """The update that it resumes after."""
    total_updates: int | None = None
    samples_seen: int | None = None
    target_samples: int | None = None
    resumed: bool = False
    trained_parameters: int | None = None
    device_uuid: str | None = None
    """None on the CPU."""


class PhaseChanged(msgspec.Struct, frozen=True, kw_only=True, tag="phase"):
    """loading | training"""

    time: float | None = None
    phase: str


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One update. Bytes are those of this rank; device bytes are None on the CPU."""

    time: float | None = None
    update: int
    samples_seen: int | None = None
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    tokens: int | None = None
    sample_digest: str | None = None
    """SHA-256 of the sorted sample ids of the whole effective batch."""
    dropped: int | None = None
    """Reports lost so far because the journal could not be written."""
    batch: int | None = None
    accumulation: int | None = None
    step_seconds: float | None = None
    data_wait_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    """The most that was allocated during this update (of a program without memtop's commands:
    ever).
    """
    peak_reserved_bytes: int | None = None
    allocation_retries: int | None = None
    """How often the allocator had to free its cache and try again, since the process began."""
    rss_bytes: int | None = None
    anonymous_bytes: int | None = None
    device_uuid: str | None = None


class Oom(msgspec.Struct, frozen=True, kw_only=True, tag="oom"):
    """An allocation failed; bytes are what was held then."""

    time: float | None = None
    update: int | None = None
    phase: str = "unknown"
    """forward | backward | optimizer | evaluation | data | load | save | unknown"""
    error: str | None = None
    """The error's class."""
    message: str | None = None
    survived: bool | None = False
    """True where the trainer repeats the work in smaller pieces, False where the failure ends the
    process, None where it ended one thread: only the program knows what that means."""
    batch: int | None = None
    accumulation: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    rss_bytes: int | None = None
    device_uuid: str | None = None


class SettingsChanged(msgspec.Struct, frozen=True, kw_only=True, tag="settings"):
    """From this update on the built-in trainer runs with these values."""

    time: float | None = None
    update: int = 0
    changes: dict[str, Any] = {}
    reason: str | None = None
    """allocation failure | pressure | asked | grown back"""
    total_updates: int | None = None


class Pressure(msgspec.Struct, frozen=True, kw_only=True, tag="pressure"):
    """In two consecutive updates the allocator found memory only after it had freed its cache."""

    time: float | None = None
    update: int | None = None
    allocation_retries: int | None = None


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint"):
    """A state was written."""

    time: float | None = None
    updates: int | None = None
    samples_seen: int | None = None
    seconds: float | None = None
    size_bytes: int | None = None


class SaveFailed(msgspec.Struct, frozen=True, kw_only=True, tag="save_failed"):
    """A state could not be written for lack of space."""

    time: float | None = None
    update: int | None = None
    message: str | None = None
    waiting: bool = False
    """True at the end of training: the trainer waits until there is space or until it is stopped.
    """


class Warned(msgspec.Struct, frozen=True, kw_only=True, tag="warning"):
    """Something that the person should know."""

    time: float | None = None
    message: str | None = None


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True, tag="memory"):
    """Memory at a stage of the training, such as "after model load"."""

    time: float | None = None
    message: str | None = None
    stage: str | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


class Evaluated(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation"):
    """An evaluation; `loss` in nats per token."""

    time: float | None = None
    update: int | None = None
    loss: float | None = None
    samples: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    peak_reserved_bytes: int | None = None


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The program's last report."""

    time: float | None = None
    outcome: str | None = None
    """finished | stopped | failed"""
    saved: bool = True
    """False where the program could not save its state; `message` says why."""
    message: str | None = None


class Unknown(msgspec.Struct, frozen=True, kw_only=True, tag="unknown"):
    """A report of a kind that this version does not know, or with values of other types than it
    expects.
    """

    time: float | None = None
    kind: str
    problem: str


Report = (
    Hello
    | Offers
    | Plan
    | PhaseChanged
    | Step
    | Oom
    | SettingsChanged
    | Pressure
    | Saved
    | SaveFailed
    | Warned
    | MemoryRecord
    | Evaluated
    | End
    | Unknown
)

_DECODER = msgspec.json.Decoder(Report)


def decode(line: bytes) -> Report | None:
    """The report in one line of a journal; None if the line is no JSON object (a full disk cuts
    lines).
    """
    try:
        report: Report = _DECODER.decode(line)
    except msgspec.ValidationError as error:
        return _not_understood(line, str(error))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return report


def _not_understood(line: bytes, problem: str) -> Unknown | None:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(found, dict):
        return None
    time: Any = found.get("time")
    return Unknown(time=float(time) if type(time) in (int, float) else None, kind=str(found.get("type")), problem=problem)


def values(report: Report) -> dict[str, Any]:
    """What an event or a diagnosis keeps of a report: all its values but its type and its words."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    return {name: value for name, value in found.items() if name not in ("type", "message")}
