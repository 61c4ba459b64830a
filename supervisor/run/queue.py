"""What a run waits for before it begins: another run (`--after`), or a free place (`--queue`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from memtop.supervisor import units
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.run import starting, view
from memtop.supervisor.run.events import Queue
from memtop.supervisor.run.record.folder import RunFolder, RunSpec
from memtop.supervisor.wire import Phase, RunState

_LOOK_SECONDS = 2.0
_REVIVE_SECONDS = 60.0
_SMALL_BYTES = 300 << 20
"""A process with less on a GPU does not train there: a desktop, an idle notebook's context."""


class QueueWatch:
    """Looks again and again, in a thread, whether a run may begin."""

    def __init__(self, folder: RunFolder, spec: RunSpec, machine: Callable[[], MachineSnapshot | None]) -> None:
        self._folder, self._spec, self._machine = folder, spec, machine
        self._task: asyncio.Task[str | None] | None = None
        self._due = 0.0
        self._revived = time.monotonic()

    def look(self) -> Queue | None:
        """What was found since the last call; None if nothing new is known."""
        if self._task is None:
            if time.monotonic() >= self._due:
                self._task = asyncio.get_running_loop().create_task(asyncio.to_thread(self._ahead))
            return None
        if not self._task.done():
            return None
        found, self._task, self._due = self._task.result(), None, time.monotonic() + _LOOK_SECONDS
        return Queue(waits_for=found)

    def _ahead(self) -> str | None:
        if time.monotonic() - self._revived > _REVIVE_SECONDS:
            self._revived = time.monotonic()
            revive_queued(self._folder)
        return ahead(self._folder, self._spec, self._machine())


def ahead(folder: RunFolder, spec: RunSpec, machine: MachineSnapshot | None) -> str | None:
    """Why the run does not begin yet, in words; None if it may."""
    if spec.after is not None:
        other = RunFolder(Path(spec.after))
        state = _state_of(other)
        # A run that was renamed or deleted is over for those that wait for it.
        if state is not None and _goes_on(other, state):
            return f"waits for {other.name} to end ({state.state.value})"
    if not spec.queue:
        return None
    if machine is None:
        return "waits for the first look at the GPUs"
    mine = _cards(spec, machine)
    for other, theirs, state in _others(folder):
        if mine and not _share(mine, _cards(theirs, machine)):
            continue
        if state.state is not Phase.QUEUED:
            return f"waits for {other.name} to end ({state.state.value})"
        if (theirs.created, other.name) < (spec.created, folder.name):
            return f"waits behind {other.name}"
    return next((f"waits for GPU {gpu.index}: {why}" for gpu in mine if (why := _taken(gpu)) is not None), None)


def _others(folder: RunFolder) -> Iterator[tuple[RunFolder, RunSpec, RunState]]:
    """The runs of the same folder that go on, or wait themselves."""
    for known in view.known_runs(folder.path.parent):
        other = RunFolder(Path(known.folder))
        if not known.alive or other.path == folder.path:
            continue
        state = _state_of(other)
        if state is not None and _goes_on(other, state):
            yield other, other.spec(), state


def _state_of(folder: RunFolder) -> RunState | None:
    try:
        return view.read_state(folder)
    except (MemtopError, OSError):
        return None


def _goes_on(folder: RunFolder, state: RunState) -> bool:
    """Whether its training lives, or a supervisor that will start it."""
    return state.alive or (not state.state.final and view.supervisor_alive(folder))


def _cards(spec: RunSpec, machine: MachineSnapshot) -> tuple[GpuSample, ...]:
    """The GPUs of a run; all of the machine if it may use any."""
    named = spec.settings.gpus if spec.settings is not None else spec.gpus
    if not named:
        on_cpu = spec.settings is not None and spec.settings.device == "cpu"
        return () if on_cpu else machine.gpus
    names = {name.strip() for name in named.split(",")}
    return tuple(gpu for gpu in machine.gpus if str(gpu.index) in names or (gpu.uuid or "") in names)


def _share(mine: tuple[GpuSample, ...], theirs: tuple[GpuSample, ...]) -> bool:
    return bool({gpu.index for gpu in mine} & {gpu.index for gpu in theirs})


def _taken(gpu: GpuSample) -> str | None:
    """Who uses this GPU; None if nobody does."""
    rows = [row for row in gpu.processes if not row.gone and (row.used_bytes is None or row.used_bytes >= _SMALL_BYTES)]
    if not rows:
        return None
    row = max(rows, key=lambda one: one.used_bytes or 0)
    return f"{row.name or row.command or 'a process'} (pid {row.pid}) uses {units.size(row.used_bytes)}"


def revive_queued(folder: RunFolder) -> None:
    """Give each waiting run of the same folder a new supervisor if its own is gone."""
    for known in view.known_runs(folder.path.parent):
        other = RunFolder(Path(known.folder))
        if known.alive or known.attempt or other.path == folder.path:
            continue
        try:
            starting.revive(other.path)
        except (MemtopError, OSError):
            # Another user's, or it cannot be started now: whoever opens it sees why.
            continue
