"""A restart that waits: for a moment in which it can be called off, for what the dead program held to be free again, or for
room on the disk. Then it goes, or finds that it cannot and says why."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from memtop.supervisor import units
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.wire import Change

NOTICE_SECONDS = 3.0
"""Time to call it off."""
WATCHED_NOTICE_SECONDS = 10.0
"""The same where a dashboard shows it: somebody may want to read the card first."""
VRAM_SECONDS = 50.0
"""Drivers take a while to give back what a killed process held; whoever holds it after that will go on holding it."""
DISK_SECONDS = 24 * 3600.0
_TOLERANCE_BYTES = 64 << 20

Verdict = Literal["wait", "go", "ask"]


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A restart that was decided and has not begun: what `state.json` keeps of it for the next supervisor."""

    change: Change
    gpus_before: dict[str, int] = {}
    """By uuid, bytes that were taken of the run's GPUs before it took its part."""
    forecast: Forecast | None = None
    disk_bytes: int | None = None
    """What must be free on the run's disk first; None: it waits for no room."""


class Comeback:
    """Decides at each look whether the restart may begin. `problem` says who or what is in its way.

    One that a supervisor left behind begins its waiting anew: it can be called off once more.
    """

    def __init__(
        self, waiting: Waiting, folder: Path, monotonic: Callable[[], float], notice_seconds: float = NOTICE_SECONDS
    ) -> None:
        """`folder`: the run's, whose disk may have to be waited for."""
        self.notice_seconds = notice_seconds
        self.waiting = waiting
        self.problem: str | None = None
        self._folder = folder
        self._monotonic = monotonic
        self._began = monotonic()

    @property
    def change(self) -> Change:
        return self.waiting.change

    def begin_with(self, change: Change) -> None:
        """Wait as before, then restart with this change, of which no peak is foreseen."""
        self.waiting = replace(self.waiting, change=change, forecast=None)

    def look(self, machine: MachineSnapshot | None) -> Verdict:
        waited = self._monotonic() - self._began
        if waited < self.notice_seconds:
            return "wait"
        if self.waiting.disk_bytes is not None:
            return self._look_at_disk(self._folder, self.waiting.disk_bytes, waited)
        taken = self._still_taken(machine)
        if not taken:
            self.problem = None
            return "go"
        self.problem = "; ".join(_holders(gpu, more) for gpu, more in taken)
        if waited < VRAM_SECONDS:
            return "wait"
        forecast = self.waiting.forecast
        wanted = forecast.peak_bytes if forecast is not None else None
        if wanted is not None and any(gpu.free_bytes is not None and gpu.free_bytes < wanted for gpu, _ in taken):
            self.problem += f"; the next try is expected to need {units.size(wanted)}"
            return "ask"
        return "go"

    def _look_at_disk(self, folder: Path, needed: int, waited: float) -> Verdict:
        free = free_bytes(folder)
        if isinstance(free, str):
            self.problem = free
        elif free >= needed:
            self.problem = None
            return "go"
        else:
            self.problem = f"{folder}: {units.size(free)} free, {units.size(needed)} needed; free some space"
        return "wait" if waited < DISK_SECONDS else "ask"

    def _still_taken(self, machine: MachineSnapshot | None) -> list[tuple[GpuSample, int]]:
        """The run's GPUs of which more is taken than before the run, and how much more."""
        gpus: Iterable[GpuSample] = machine.gpus if machine is not None else ()
        found = []
        for gpu in gpus:
            before = self.waiting.gpus_before.get(gpu.uuid or "")
            if before is not None and gpu.used_bytes is not None and gpu.used_bytes > before + _TOLERANCE_BYTES:
                found.append((gpu, gpu.used_bytes - before))
        return found


def free_bytes(folder: Path) -> int | str:
    """What is free where a folder lies, or why that is not known."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder}: its free space cannot be read: {error.strerror}"


def _holders(gpu: GpuSample, more: int) -> str:
    rows = sorted((row for row in gpu.processes if not row.gone), key=lambda row: -(row.used_bytes or 0))
    who = ", ".join(f"{row.name or row.command or '?'} (pid {row.pid}, {units.size(row.used_bytes)})" for row in rows[:4])
    who = who or "nobody that the driver names"
    return f"GPU {gpu.index} has {units.size(more)} more taken than before the run, held by {who}"
