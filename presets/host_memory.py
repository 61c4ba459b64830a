"""How much host memory training may use. The thresholds are data (`host_memory.toml`), the decision
is a pure function."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from memtop.presets.decoding import decoder_of
from memtop.presets.fields import HOST_LEVELS
from memtop.presets.files import PresetFileError, parse
from memtop.presets.schema import HostLevel, Settings

_FILE = Path(__file__).with_name("host_memory.toml")
_GIB = 1 << 30


class HostRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One threshold: from `from_gib` GiB of available memory on, these limits apply."""

    from_gib: float
    level: HostLevel
    workers: int
    pin: bool


class HostPlan(msgspec.Struct, frozen=True):
    """How a run uses host memory; the same on all ranks."""

    level: HostLevel
    workers: int
    """Data-loader processes per training process."""
    pin_memory: bool
    reason: str


@cache
def host_rows() -> tuple[HostRow, ...]:
    """The thresholds in descending order of memory."""
    decoder_of(list[HostRow])  # two threads of the dashboard may be here at one time
    try:
        rows = msgspec.convert(parse(_FILE)["rows"], list[HostRow])
    except msgspec.ValidationError as error:
        raise PresetFileError(f"{_FILE}: {error}") from None
    return tuple(sorted(rows, key=lambda row: -row.from_gib))


def host_plan(settings: Settings, available_bytes: int | None, *, on_gpu: bool) -> HostPlan:
    """The plan for all ranks: never more than the settings allow, and less if memory is short.

    Batch and accumulation stay the same: what is trained does not depend on what else runs on the
    machine.
    """
    if available_bytes is None:
        pin = on_gpu and settings.pin_memory is not False
        return HostPlan(settings.host_level, settings.workers, pin, "available memory is not known: the settings apply")
    rows = host_rows()
    place = next(n for n, row in enumerate(rows) if available_bytes >= row.from_gib * _GIB or row.from_gib == 0)
    row = rows[place]
    level = max(settings.host_level, row.level, key=HOST_LEVELS.index)
    workers = min(settings.workers, row.workers // settings.world_size)
    pin = on_gpu and settings.pin_memory is not False and (row.pin or settings.pin_memory is True)
    # Rounded down: what is below a threshold is not shown as the threshold.
    shown = f"{available_bytes * 10 // _GIB / 10:.1f}"
    if row.from_gib:
        reason = f"{shown} GiB available, at least {row.from_gib:g}"
    elif place:
        reason = f"{shown} GiB available, less than {rows[place - 1].from_gib:g}"
    else:
        reason = f"{shown} GiB available"
    return HostPlan(level, workers, pin, reason)
