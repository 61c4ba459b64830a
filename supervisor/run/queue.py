"""What a run waits for before it begins: another run (`--after`), or a free place (`--queue`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from memtop import __version__
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.errors import MemtopError, RefusedError
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.run import starting, view
from memtop.supervisor.run.events import Queue
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, read_derived, write_json
from memtop.supervisor.run.record.ownership import require_own
from memtop.supervisor.wire import Phase, RunState

_LOOK_SECONDS = 2.0
REVIVE_SECONDS = 60.0
"""Between two looks for waiting runs whose supervisor is gone."""
_PLACE_FILE = "queue.json"
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
        if time.monotonic() - self._revived > REVIVE_SECONDS:
            self._revived = time.monotonic()
            revive_queued(self._folder.path.parent)
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
        if (place_of(other, theirs), other.name) < (place_of(folder, spec), folder.name):
            return f"waits behind {other.name}"
    return next((f"waits for GPU {gpu.index}: {why}" for gpu in mine if (why := _taken(gpu)) is not None), None)


class _Place(msgspec.Struct, frozen=True):
    """`queue.json`: where a person has put a waiting run."""

    place: float
    """Seconds since the epoch, as if the run had been created then: the smallest is the next."""


def place_of(folder: RunFolder, spec: RunSpec) -> float:
    """The order of the runs that wait with `--queue`: the smallest is the next."""
    put = read_derived(folder.path / _PLACE_FILE, _Place)
    return spec.created if put is None else put.place


def begin_next(folder: RunFolder) -> str:
    """Put a waiting run before all other waiting runs of its folder. Returns what it means.

    RefusedError if it does not wait for free GPUs.
    """
    require_own(folder.path)
    state, spec = view.read_state(folder), folder.spec()
    if state.state is not Phase.QUEUED:
        raise RefusedError(f"run {folder.name!r} does not wait: it is {state.word}")
    if not spec.queue:
        raise RefusedError(
            f"run {folder.name!r} waits for one run, not for its turn: memtop restart {folder.name} begins it at once"
        )
    waiting = [place_of(other, theirs) for other, theirs, found in _others(folder) if found.state is Phase.QUEUED]
    write_json(folder.path / _PLACE_FILE, _Place(min([place_of(folder, spec), *(place - 1 for place in waiting)])))
    return f"{folder.name} is the next of the waiting runs"


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


def names_of(spec: RunSpec) -> frozenset[str] | None:
    """The GPUs that a run names, by number or uuid; None if it may use any."""
    named = spec.settings.gpus if spec.settings is not None else spec.gpus
    if named:
        return frozenset(name.strip() for name in named.split(","))
    on_cpu = spec.settings is not None and spec.settings.device == "cpu"
    return frozenset() if on_cpu else None


def _cards(spec: RunSpec, machine: MachineSnapshot) -> tuple[GpuSample, ...]:
    """The GPUs of a run; all of the machine if it may use any."""
    names = names_of(spec)
    if names is None:
        return machine.gpus
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


def revive_queued(runs_dir: Path) -> list[str]:
    """Give each waiting run of this folder a new supervisor if its own is gone.

    Returns the names of these runs.
    """
    revived = []
    for known in view.known_runs(runs_dir):
        if known.alive or known.attempt:
            continue
        try:
            if starting.revive(Path(known.folder)):
                revived.append(known.name)
        except (MemtopError, OSError):
            # It cannot be started now: its reason says that it has no supervisor. A user who opens
            # it sees why.
            continue
    return revived


def spec_like(folder: RunFolder, name: str, settings: Settings | None, after: Path | None) -> RunSpec:
    """A new run with the same recipe or command that waits for the run in `after`, or for free GPUs
    if that is None.

    `settings` are those of a recipe. The command for the very end is that of the old run.
    """
    return replace(
        folder.spec(),
        name=name,
        created=time.time(),
        settings=settings,
        choice=None,
        grip=None,
        after=None if after is None else str(after),
        queue=after is None,
        memtop_version=__version__,
    )
