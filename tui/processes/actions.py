"""Ending GPU processes that the user chose, and reading their environment.

A small protocol hides the real system calls, so that tests touch no real process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.values import GpuProcess, MachineSnapshot

T = TypeVar("T")


class EndingReport(NamedTuple):
    """The outcome of ending processes, in one line for a person."""

    text: str
    good: bool
    """Every chosen process has ended."""


class ProcessActions(Protocol):
    """Ends processes.

    `machine` is the newest snapshot: whether a process may be ended is checked on it again.
    """

    async def end_processes(self, chosen: Sequence[GpuProcess], machine: MachineSnapshot) -> EndingReport: ...

    async def environment_of(self, process: GpuProcess) -> dict[str, str]:
        """The environment variables that the process was started with.

        Raises RefusedError with the reason.
        """
        ...


class RealProcessActions:
    """Ends real processes through the monitor, which checks the identity and owner of each
    again.
    """

    async def end_processes(self, chosen: Sequence[GpuProcess], machine: MachineSnapshot) -> EndingReport:
        return await in_daemon_thread(lambda: _end(tuple(chosen), machine))

    async def environment_of(self, process: GpuProcess) -> dict[str, str]:
        return await asyncio.to_thread(_environment, process)


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread.

    Unlike asyncio's threads, it does not delay the end of the program.
    """
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
        except BaseException as error:  # noqa: BLE001 - raised again where the answer is awaited
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run, name="memtop-process-actions", daemon=True).start()
    return await answer


def _environment(process: GpuProcess) -> dict[str, str]:
    from memtop.supervisor.monitor.processes.proc import ProcessId, environment_of

    if process.started_ticks is None:
        raise RefusedError(
            f"environment of process {process.pid}: its start time is not known, so it could be another process by now"
        )
    found = environment_of(ProcessId(process.pid, process.started_ticks))
    if isinstance(found, str):
        raise RefusedError(found)
    return found


def _end(chosen: tuple[GpuProcess, ...], machine: MachineSnapshot) -> EndingReport:
    from memtop.supervisor.monitor.processes.proc import ProcessId
    from memtop.supervisor.monitor.strays import choose
    from memtop.supervisor.monitor.termination import end_and_measure

    known, refused = [], []
    for process in chosen:
        try:
            (now,) = choose(machine, [process.pid])
            # A pid without its start time could be another program by now.
            if process.started_ticks is None:
                raise RefusedError(f"process {process.pid}: its start time is not known, so it could be another process by now")
            if now.started_ticks != process.started_ticks:
                raise RefusedError(f"process {process.pid} is not the one that was chosen: its pid was reused")
            known.append(ProcessId(process.pid, process.started_ticks))
        except RefusedError as refusal:
            refused.append(str(refusal))
    if not known:
        return EndingReport("; ".join(refused), good=False)
    report = end_and_measure(known, machine)
    good = not refused and all(process.is_over for process in report.processes)
    return EndingReport("; ".join([report.text, *refused]), good)
