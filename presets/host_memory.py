"""How much host memory training may take: the thresholds are data (`host_memory.toml`), the decision a pure function."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from memtop.presets.fields import HOST_LEVELS
from memtop.presets.loading import PresetFileError, parse
from memtop.presets.schema import HostLevel, Settings

_FILE = Path(__file__).with_name("host_memory.toml")
_GIB = 1 << 30


class HostRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From `from_gib` GiB of available memory on."""

    from_gib: float
    level: HostLevel
    workers: int
    pin: bool


class HostPlan(msgspec.Struct, frozen=True):
    """What a run does about host memory: the same on every rank."""

    level: HostLevel
    workers: int
    """Loader workers per process."""
    pin_memory: bool
    available_bytes: int | None
    reason: str


@cache
def host_rows() -> tuple[HostRow, ...]:
    """The thresholds, most memory first."""
    try:
        rows = msgspec.convert(parse(_FILE)["rows"], list[HostRow])
    except msgspec.ValidationError as error:
        raise PresetFileError(f"{_FILE}: {error}") from None
    return tuple(sorted(rows, key=lambda row: -row.from_gib))


def host_plan(settings: Settings, available_bytes: int | None, *, on_gpu: bool) -> HostPlan:
    """The decision for all ranks: never more than the settings ask for, and less where memory is short.

    The batch and the accumulation are not touched: what is trained does not depend on what else runs on the machine.
    """
    if available_bytes is None:
        pin = on_gpu and settings.pin_memory is not False
        return HostPlan(settings.host_level, settings.workers, pin, None, "available memory is not known: as the settings say")
    row = next(row for row in host_rows() if available_bytes >= row.from_gib * _GIB or row.from_gib == 0)
    level = max(settings.host_level, row.level, key=HOST_LEVELS.index)
    workers = min(settings.workers, row.workers // settings.world_size)
    pin = on_gpu and settings.pin_memory is not False and (row.pin or settings.pin_memory is True)
    border = f"{available_bytes / _GIB:.1f} GiB available, at least {row.from_gib:g}"
    return HostPlan(level, workers, pin, available_bytes, border)
