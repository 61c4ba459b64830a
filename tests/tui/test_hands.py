"""The real hands: the environment of a real process, and of one that has ended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.processes import identify
from memtop.tui.hands import RealHands
from tests.tui.support import process

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
    assert (await RealHands().environment_of(row))["MEMTOP_TEST_MARK"] == "a b=c"
    with pytest.raises(RefusedError, match=f"process {child.pid} has ended"):
        await RealHands().environment_of(process(child.pid, started_ticks=identity.started_ticks + 1))
    child.communicate()
    with pytest.raises(RefusedError, match="has ended"):
        await RealHands().environment_of(row)


async def test_a_process_without_a_start_time_could_be_another() -> None:
    with pytest.raises(RefusedError, match="its start time is not known"):
        await RealHands().environment_of(process(os.getpid(), started_ticks=None))
