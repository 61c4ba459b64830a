"""A restart that waits: so that it can be cancelled, for the memory of the dead program, or for
disk space. Then it begins, or reports why it cannot.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from memtop.supervisor import units
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.wire import Change

NOTICE_SECONDS = 3.0
"""Time in which the restart can be cancelled."""
WATCHED_NOTICE_SECONDS = 10.0
"""The same if a dashboard is open: a person may want to read the screen first."""
VRAM_SECONDS = 50.0
"""Drivers need a while to release the memory of a killed process; a process that still holds it
after this time will not release it.
"""
DISK_SECONDS = 24 * 3600.0
_TOLERANCE_BYTES = 64 << 20

Verdict = Literal["wait", "go", "ask"]


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A restart that was decided and has not begun: what `state.json` keeps of it for the next
    supervisor.
    """

    change: Change
    gpus_before: dict[str, int] = {}
    """By uuid, what other processes used of the run's GPUs when the attempt began, in bytes."""
    forecast: Forecast | None = None
    disk_bytes: int | None = None
    """Bytes that must be free on the run's disk; None: the restart does not wait for space."""


class PendingRestart(msgspec.Struct, frozen=True, kw_only=True):
    """A restart that waits. A new supervisor begins the wait again: it can be cancelled again."""

    waiting: Waiting
    began: float
    """On the monotonic clock."""
    begins: float
    """The end of the notice, in seconds since the epoch."""
    notice_seconds: float = NOTICE_SECONDS
    problem: str | None = None
    """What prevents the restart, in words."""
    announced: str | None = None
    """The problem that is already in the run's log."""

    @property
    def change(self) -> Change:
        return self.waiting.change

    def with_change(self, change: Change) -> PendingRestart:
        """Wait as before, then restart with this change, whose peak is not forecast."""
        return replace(self, waiting=replace(self.waiting, change=change, forecast=None))

    def look(
        self, now: float, machine: MachineSnapshot | None, disk_free: int | str | None, folder: str
    ) -> tuple[PendingRestart, Verdict]:
        """Whether it may begin. `disk_free`: bytes, or why they cannot be read; None: not read."""
        waited = now - self.began
        if waited < self.notice_seconds:
            return self, "wait"
        if self.waiting.disk_bytes is not None:
            if disk_free is None:
                return self, "wait"
            problem = _disk_problem(folder, disk_free, self.waiting.disk_bytes)
            verdict: Verdict = "go" if problem is None else "wait" if waited < DISK_SECONDS else "ask"
            return replace(self, problem=problem), verdict
        taken = self._still_taken(machine)
        if not taken:
            return replace(self, problem=None), "go"
        problem = "; ".join(_holders(gpu, more) for gpu, more in taken)
        if waited < VRAM_SECONDS:
            return replace(self, problem=problem), "wait"
        forecast = self.waiting.forecast
        wanted = forecast.peak_bytes if forecast is not None else None
        if wanted is not None and any(gpu.free_bytes is not None and gpu.free_bytes < wanted for gpu, _ in taken):
            problem += f"; the next attempt is expected to need {units.size(wanted)}"
            return replace(self, problem=problem), "ask"
        return replace(self, problem=problem), "go"

    def _still_taken(self, machine: MachineSnapshot | None) -> list[tuple[GpuSample, int]]:
        """The run's GPUs that are fuller than before the run, and by how many bytes."""
        found = []
        for gpu in machine.gpus if machine is not None else ():
            before = self.waiting.gpus_before.get(gpu.uuid or "")
            if before is not None and gpu.used_bytes is not None and gpu.used_bytes > before + _TOLERANCE_BYTES:
                found.append((gpu, gpu.used_bytes - before))
        return found


def free_bytes(folder: Path) -> int | str:
    """Bytes free on the disk of a folder, or why that cannot be read."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder}: its free space cannot be read: {error.strerror}"


def _disk_problem(folder: str, free: int | str, needed: int) -> str | None:
    if isinstance(free, str):
        return free
    if free >= needed:
        return None
    return f"{folder}: {units.size(free)} free, {units.size(needed)} needed; free some space"


def _holders(gpu: GpuSample, more: int) -> str:
    rows = sorted((row for row in gpu.processes if not row.gone), key=lambda row: -(row.used_bytes or 0))
    who = ", ".join(f"{row.name or row.command or '?'} (pid {row.pid}, {units.size(row.used_bytes)})" for row in rows[:4])
    who = who or "no process that the driver lists"
    return f"GPU {gpu.index} has {units.size(more)} more taken than before the run, held by {who}"
