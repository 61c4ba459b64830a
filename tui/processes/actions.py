"""Ending GPU processes that the user chose, and reading their environment.

Behind one small protocol, so that tests and the demo touch no real one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.values import GpuProcess, MachineSnapshot

T = TypeVar("T")


class Told(NamedTuple):
    """What became of an ending, in one line for a person."""

    text: str
    good: bool
    """Every chosen process is over."""


@runtime_checkable
class Hands(Protocol):
    """Whatever ends processes. `machine` is the newest picture of all: what may be ended is decided on it once more.

    A feed whose processes are not this machine's real ones is its own hands (the demo's processes are invented).
    """

    async def end_processes(self, chosen: Sequence[GpuProcess], machine: MachineSnapshot) -> Told: ...

    async def environment_of(self, process: GpuProcess) -> dict[str, str]:
        """The environment variables that it was started with. Raises RefusedError with the reason."""
        ...


@runtime_checkable
class Eyes(Protocol):
    """A feed that can look closer where somebody wants to know: some values cost the driver too much to read all the time."""

    def look_closely(self) -> None:
        """A GPU's details are on the screen: read what is dear, too, for the next seconds."""
        ...


class RealHands:
    """Ends real processes through the monitor, which checks identity and owner of each once more."""

    async def end_processes(self, chosen: Sequence[GpuProcess], machine: MachineSnapshot) -> Told:
        return await beside(lambda: _end(tuple(chosen), machine))

    async def environment_of(self, process: GpuProcess) -> dict[str, str]:
        return await asyncio.to_thread(_environment, process)


async def beside(work: Callable[[], T]) -> T:
    """What `work` gives, done on a daemon thread: unlike one of asyncio's it does not hold up leaving the dashboard."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, failure: BaseException | None) -> None:
        if answer.cancelled():
            return
        if failure is not None:
            answer.set_exception(failure)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the answer
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run, name="memtop-hands", daemon=True).start()
    return await answer


def _environment(process: GpuProcess) -> dict[str, str]:
    from memtop.supervisor.monitor.processes.proc import ProcessId, environment_of

    if process.started_ticks is None:
        raise RefusedError(f"environment of process {process.pid}: its start time is not known, it could be another one by now")
    found = environment_of(ProcessId(process.pid, process.started_ticks))
    if isinstance(found, str):
        raise RefusedError(found)
    return found


def _end(chosen: tuple[GpuProcess, ...], machine: MachineSnapshot) -> Told:
    from memtop.supervisor.monitor.processes.proc import ProcessId
    from memtop.supervisor.monitor.strays import choose
    from memtop.supervisor.monitor.termination import end_and_measure

    known, refused = [], []
    for process in chosen:
        try:
            (now,) = choose(machine, [process.pid])
            # A pid without its start time could be another program by now.
            if process.started_ticks is None:
                raise RefusedError(f"process {process.pid}: its start time is not known, it could be another one by now")
            if now.started_ticks != process.started_ticks:
                raise RefusedError(f"process {process.pid} is not the one that was chosen: its pid was reused")
            known.append(ProcessId(process.pid, process.started_ticks))
        except RefusedError as refusal:
            refused.append(str(refusal))
    if not known:
        return Told("; ".join(refused), good=False)
    report = end_and_measure(known, machine)
    good = not refused and all(process.is_over for process in report.processes)
    return Told("; ".join([report.text, *refused]), good)
