"""A real run under a real supervisor: its state shows host memory by role while its processes
live."""

from __future__ import annotations

import sys

from memtop.supervisor.run.record.folder import find_run
from memtop.supervisor.run.view import read_state
from tests.conftest import Runs

# A rank (the agent reports for it) with one loader worker.
PROGRAM = """
import os, time, memtop_agent
if not os.fork():
    while True: time.sleep(60)
for update in range(3000):
    memtop_agent.report("step", update=update + 1, samples_seen=update, **memtop_agent.readings())
    time.sleep(0.1)
"""


def test_the_state_reports_the_runs_memory_by_role(runs: Runs) -> None:
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, "-c", PROGRAM)
    folder = find_run("a", runs.path)

    # The first reading may come before the rank has spoken and forked; the next one is due ten
    # seconds later.
    runs.wait("a", lambda _: [part.role for part in read_state(folder).run_memory] == ["rank", "loader worker", "memtop"])
    state = read_state(folder)
    assert [part.processes for part in state.run_memory] == [1, 1, 1]
    for part in state.run_memory:
        assert part.pss_bytes is not None
        assert part.uss_bytes is not None
        assert part.pss_bytes >= part.uss_bytes > 0
    # No GPU process of this run: no base, rather than one of 0 bytes.
    assert state.gpu_base_bytes == {}
    runs.kill(state.trainer_pid or 0)
    runs.wait("a", lambda document: document["state"] == "failed")
    assert read_state(folder).run_memory == ()
