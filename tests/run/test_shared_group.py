"""OOM kills by the kernel in a memory group that the run shares with others, as in a container."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.conftest import Runs
from tests.groups import MemoryGroup

# Waits for its turn, then ends of an error of its own.
BROKEN = "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.02)\nraise KeyError('labels')"
# Waits for its turn, and waits on.
PATIENT = "import time\nwhile True:\n    time.sleep(0.02)"
STRANGER = "import os, time\nheld = os.urandom(1 << 20) * 96\nprint('ready', flush=True)\ntime.sleep(600)"


def begin(runs: Runs, group: MemoryGroup, program: str) -> dict[str, Any]:
    """Everything in one group: memtop, its supervisor and the program."""
    command = ("train", "--name", "a", "--detach", "--", sys.executable, "-c", program)
    subprocess.run(
        group.inside(sys.executable, "-m", "memtop", *command),
        cwd=runs.root,
        env=runs.environment,
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=120,
    )
    state = runs.wait("a", lambda d: d["trainer_pid"] in group.pids())
    baseline = runs.path / "a/attempts/0001/baseline.json"
    runs.wait("a", lambda d: baseline.exists() and str(group.path) in baseline.read_text())
    assert state["supervisor_pid"] in group.pids()
    return state


def ended(runs: Runs) -> dict[str, Any]:
    document = runs.wait("a", lambda d: d["state"] == "failed" and d["attempts"][0]["diagnosis"] is not None)
    runs.end_everything()
    return dict(document["attempts"][0]["diagnosis"])


def test_a_stranger_that_the_kernel_kills_is_not_the_program_that_fails_next(runs: Runs, group: MemoryGroup) -> None:
    begin(runs, group, BROKEN)
    stranger = subprocess.Popen(group.inside(sys.executable, "-c", STRANGER), stdout=subprocess.PIPE, text=True)
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "ready\n"
    group.make_the_kernel_kill(stranger.pid, runs.root / "enough")
    assert stranger.wait(timeout=120) == -9
    (runs.root / "go").touch()
    diagnosis = ended(runs)
    assert (diagnosis["kind"], diagnosis["reason"]) == ("not_memory", "python_error")


def test_the_program_that_the_kernel_kills_in_a_shared_group(runs: Runs, group: MemoryGroup) -> None:
    state = begin(runs, group, PATIENT.replace("while", "import os\nheld = os.urandom(1 << 20) * 96\nwhile"))
    group.make_the_kernel_kill(state["trainer_pid"], runs.root / "enough")
    diagnosis = ended(runs)
    assert (diagnosis["kind"], diagnosis["source"]) == ("host_oom_killed", "kernel")
    # Proven by when the group's counter rose, or by the kernel's own line about this very process,
    # where it may be read.
    proofs = ("shortly before the end", f"Killed process {state['trainer_pid']} ")
    assert any(proof in line for proof in proofs for line in diagnosis["evidence"]), diagnosis["evidence"]
