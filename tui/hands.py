"""Ending GPU processes that the user chose, and reading their environment.

Behind one small protocol, so that tests and the demo touch no real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.values import GpuProcess


@runtime_checkable
class Hands(Protocol):
    """Whatever ends processes. The answer is one line for a person.

    A feed whose processes are not this machine's real ones is its own hands (the demo's processes are invented).
    """

    async def end_processes(self, chosen: Sequence[GpuProcess]) -> str: ...

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

    async def end_processes(self, chosen: Sequence[GpuProcess]) -> str:
        return await asyncio.to_thread(_end, tuple(chosen))

    async def environment_of(self, process: GpuProcess) -> dict[str, str]:
        return await asyncio.to_thread(_environment, process)


def _environment(process: GpuProcess) -> dict[str, str]:

    from memtop.supervisor.monitor.processes import ProcessId, environment_of

    if process.started_ticks is None:
        raise RefusedError(f"environment of process {process.pid}: its start time is not known, it could be another one by now")
    found = environment_of(ProcessId(process.pid, process.started_ticks))
    if isinstance(found, str):
        raise RefusedError(found)
    return found


def _end(chosen: tuple[GpuProcess, ...]) -> str:
    from memtop.supervisor.monitor.nvml import NvmlReader
    from memtop.supervisor.monitor.processes import ProcessId
    from memtop.supervisor.monitor.strays import end_and_measure

    # A pid without its start time could be another program by now.
    known = [ProcessId(p.pid, p.started_ticks) for p in chosen if p.started_ticks is not None]
    doubtful = [str(p.pid) for p in chosen if p.started_ticks is None]
    reader = NvmlReader()
    try:
        text = end_and_measure(known, reader).text
    finally:
        reader.close()
    return f"{text}; left alone, start time not known: {', '.join(doubtful)}" if doubtful else text
