"""Programs that run out of memory, and what the supervisor does about it: real processes and kernel
kills."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.view import read_state
from tests.conftest import UNTIL_GO, Runs
from tests.groups import MemoryGroup

# What a program that ran into fragmentation says, unless its allocator's option is set.
FRAGMENTED = """
import os, sys
if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
    print("done")
    sys.exit(0)
print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 19.58 GiB of "
      "which 512.00 MiB is free. Process 77 has 19.07 GiB memory in use. Of the allocated memory 15.00 GiB is allocated by "
      "PyTorch, and "
      "3.50 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
      "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.", file=sys.stderr)
sys.exit(1)
"""
GREEDY = """
held = []
while True:
    held.append(bytearray(os.urandom(1 << 12)) * 256)
    time.sleep(0.005)
"""


def own(runs: Runs, *options: str, program: tuple[str, ...], status: int) -> subprocess.CompletedProcess[str]:
    return runs.memtop("train", "--name", "a", "--headless", *options, "--", *program, status=status)


@pytest.mark.parametrize(("on_oom", "why"), [("auto", "your own command could begin from zero"), ("ask", "--on-oom ask")])
def test_without_permission_to_restart_the_remedy_is_only_named(runs: Runs, on_oom: str, why: str) -> None:
    done = own(runs, "--on-oom", on_oom, program=(sys.executable, "-c", FRAGMENTED), status=1)
    assert "GPU memory fragmented: The program says that GPU 0" in done.stderr
    assert f"memtop does nothing by itself: {why}" in done.stderr
    assert "memtop restart a --set allocator=expandable_segments:True" in done.stderr
    document = runs.show("a")
    assert (document["state"], len(document["attempts"]), document["on_oom"]) == ("failed", 1, on_oom)
    assert document["proposal"]["diagnosis"]["requested_bytes"] == int(1.5 * (1 << 30))
    # The remedy that is proposed is one that can be typed.
    runs.memtop("restart", "a", "--set", "allocator=expandable_segments:True", "--headless")
    after = runs.show("a")
    assert (after["state"], after["attempts"][1]["outcome"]) == ("finished", "finished")
    assert [row["outcome"] for row in after["configurations"]] == ["gpu_oom_fragmented", "finished"]


def test_a_wrong_word_is_one_line(runs: Runs) -> None:
    refused = runs.memtop("train", "--on-oom", "maybe", "--", "true", status=2)
    assert refused.stderr == "memtop: --on-oom maybe: give auto (continue with less), ask (propose it) or stop (report it)\n"


def test_a_kernel_kill_in_a_group_of_the_programs_own_is_proven(runs: Runs, group: MemoryGroup) -> None:
    group.limit(96 << 20)
    program = group.inside(sys.executable, "-c", f"import os, time\ntime.sleep(1)\n{GREEDY}")
    done = own(runs, program=program, status=1)
    assert group.kills() == 1
    document = runs.show("a")
    diagnosis = document["attempts"][0]["diagnosis"]
    assert (diagnosis["kind"], diagnosis["source"], document["exit_status"]) == ("host_oom_killed", "kernel", -9)
    assert diagnosis["confidence"] >= 0.9
    # memtop makes no external command smaller.
    assert len(document["attempts"]) == 1
    assert "memtop does nothing by itself" in done.stderr
    assert document["configurations"][0]["outcome"] == "host_oom_killed"
    assert "memtop: run a: killed; memtop show a" in done.stderr


def test_a_kill_by_hand_is_no_reason_to_change_anything(runs: Runs, group: MemoryGroup) -> None:
    group.limit(1 << 30)
    runs.memtop("train", "--name", "a", "--detach", "--", *group.inside(sys.executable, "-c", "import time; time.sleep(600)"))
    state = runs.wait("a", lambda d: d["trainer_pid"] in group.pids())
    runs.kill(state["trainer_pid"])
    document = runs.wait("a", lambda d: d["state"] == "failed")
    diagnosis = document["attempts"][0]["diagnosis"]
    assert (diagnosis["kind"], diagnosis["reason"]) == ("not_memory", "killed_by_something")
    assert document["proposal"] is None
    assert document["reason"] == "ended by signal 9 (SIGKILL)"
    assert runs.memtop("show", "a").stdout.split()[:2] == ["a", "killed"]


def test_a_kill_without_a_supervisor_is_proven_by_the_next_one(runs: Runs, group: MemoryGroup) -> None:
    group.limit(96 << 20)
    # Waits for the supervisor's end before it takes too much.
    runs.memtop("train", "--name", "a", "--detach", "--", *group.inside(sys.executable, "-c", UNTIL_GO + GREEDY))
    state = runs.wait("a", lambda d: d["trainer_pid"] in group.pids())
    baseline = runs.path / "a/attempts/0001/baseline.json"
    runs.wait("a", lambda d: baseline.exists() and str(group.path) in baseline.read_text())
    runs.kill(state["supervisor_pid"])
    (runs.root / "go").touch()
    runs.wait("a", lambda d: not d["alive"])
    runs.memtop("restart", "a", "--detach")
    first = runs.wait("a", lambda d: len(d["attempts"]) == 2)["attempts"][0]
    assert (first["diagnosis"]["kind"], first["diagnosis"]["source"]) == ("host_oom_killed", "kernel")


def test_a_long_log_does_not_keep_the_supervisor_from_answering(runs: Runs) -> None:
    """50 MB of output: the command that follows the run gets its end all the same."""
    program = "import os\nfor _ in range(50_000):\n    os.write(1, b'step 1 loss 2.0 ' * 64 + b'\\n')\nraise SystemExit(3)"
    done = own(runs, program=(sys.executable, "-c", program), status=1)
    assert "failed (exit status 3" in done.stderr
    assert os.path.getsize(runs.path / "a/attempts/0001/output.log") > 50_000_000  # noqa: PTH202 - a number, no path
    assert runs.show("a")["attempts"][0]["diagnosis"]["kind"] == "not_memory"


def test_a_failed_run_keeps_its_proposal_for_later_clients(runs: Runs) -> None:
    own(runs, "--on-oom", "ask", program=(sys.executable, "-c", FRAGMENTED), status=1)
    runs.wait("a", lambda d: d["supervisor_pid"] is None)
    state = read_state(RunFolder(Path(runs.path / "a")))
    assert state.proposal is not None
    assert state.proposal.remedies[0].id == "allocator"
    assert state.proposal.begins is None
