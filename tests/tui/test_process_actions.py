"""Ending real processes, and reading the environment of a real process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.processes.proc import identify
from memtop.tui.processes.actions import EndingReport, RealProcessActions, in_daemon_thread
from tests.tui.support import gpu, machine, process

WAITING = "import sys; print('up', flush=True); sys.stdin.read()"


async def test_the_environment_of_a_living_process_and_of_one_that_has_ended() -> None:
    environment = {**os.environ, "MEMTOP_TEST_MARK": "a b=c"}
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    identity = identify(child.pid)
    assert identity is not None
    row = process(child.pid, started_ticks=identity.started_ticks)
    assert (await RealProcessActions().environment_of(row))["MEMTOP_TEST_MARK"] == "a b=c"
    with pytest.raises(RefusedError, match=f"process {child.pid} has ended"):
        await RealProcessActions().environment_of(process(child.pid, started_ticks=identity.started_ticks + 1))
    child.communicate()
    with pytest.raises(RefusedError, match="has ended"):
        await RealProcessActions().environment_of(row)


async def test_a_process_without_a_start_time_could_be_another() -> None:
    with pytest.raises(RefusedError, match="its start time is not known"):
        await RealProcessActions().environment_of(process(os.getpid(), started_ticks=None))


async def test_a_protected_row_is_not_ended_and_its_neighbour_is() -> None:
    """The last check before the signal, whatever the screen has offered."""
    programs = [
        subprocess.Popen([sys.executable, "-S", "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in "ab"
    ]
    try:
        rows = []
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == b"up\n"
            identity = identify(program.pid)
            assert identity is not None
            rows.append(process(program.pid, started_ticks=identity.started_ticks))
        drawing = process(rows[0].pid, choosable=False, kind="graphics", reason="draws on the screen")
        seen = machine(gpu(0, processes=tuple(rows)), gpu(1, processes=(drawing,)))
        report = await RealProcessActions().end_processes([rows[0]], seen)
        assert report == EndingReport(f"process {rows[0].pid} cannot be ended from here: draws on the screen", good=False)
        elsewhere = await RealProcessActions().end_processes([process(1 << 22)], seen)
        assert elsewhere == EndingReport(f"process {1 << 22} is not on a GPU", good=False)
        other = await RealProcessActions().end_processes([process(rows[1].pid, started_ticks=1)], seen)
        assert "its pid was reused" in other.text
        assert programs[1].poll() is None
        report = await RealProcessActions().end_processes(rows, seen)
        assert not report.good
        assert report.text.startswith("1 process ended")
        assert report.text.endswith("draws on the screen")
        assert programs[0].poll() is None
        assert programs[1].wait() != 0
    finally:
        for program in programs:
            program.kill()
            program.communicate()


async def test_a_stuck_action_does_not_delay_the_end_of_the_program() -> None:
    release = threading.Event()
    task = asyncio.create_task(in_daemon_thread(release.wait))
    while not any(thread.name == "memtop-process-actions" for thread in threading.enumerate()):
        await asyncio.sleep(0)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "memtop-process-actions")
    assert thread.daemon, "Python waits for all others before it ends"
    release.set()
    assert await task is True


async def test_an_error_in_the_thread_is_raised_to_the_caller() -> None:
    def fail() -> None:
        raise RefusedError("no")

    with pytest.raises(RefusedError, match="no"):
        await in_daemon_thread(fail)
