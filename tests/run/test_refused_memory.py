"""External commands whose allocation of host memory is refused: the named cause, and the
remedies."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memtop.supervisor.run.post_mortem.evidence import AttemptEvidence, address_space
from tests.conftest import Runs

LIMIT_KIB = 2 << 20
# Five seconds in which the supervisor reads its limit; then more than the limit allows, and far
# less than the machine has.
WANTS_MORE = "import time; time.sleep(5); bytearray(3 << 30)"
LEAKS = """
import resource, time
import torch
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (400 << 20), resource.RLIM_INFINITY))
kept = []
while True:
    (weight * 2).sum().backward()
    optimizer.step()
    kept.append(torch.ones(2 << 18))
    time.sleep(0.05)
"""


def died(runs: Runs, *program: str) -> tuple[dict[str, Any], str]:
    """The document of the run, and what `show` prints of it."""
    runs.memtop("train", "--name", "a", "--headless", "--", *program, status=1)
    return runs.show("a")["proposal"], runs.memtop("show", "a").stdout


def message_of(runs: Runs, kind: str) -> str:
    """The words of the run's first event of that kind."""
    return runs.events("a", kind)[0].message


def test_a_limit_of_address_space_is_named_and_swap_is_not_offered(runs: Runs) -> None:
    limited = f'ulimit -v {LIMIT_KIB}; exec "{sys.executable}" -c "{WANTS_MORE}"'
    proposal, shown = died(runs, "bash", "-c", limited)
    assert proposal["diagnosis"]["kind"] == "host_oom_alloc"
    assert proposal["diagnosis"]["address_space_bytes"] == LIMIT_KIB << 10
    assert "the program's address space is limited to 2.00 GiB (ulimit -v)" in shown
    # No remedy is for a part that this program lacks: it has no loader, no GPU and no offload.
    assert [one["id"] for one in proposal["remedies"]] == ["address_space", "host_level"]
    assert "ulimit -v unlimited\n" in shown
    assert "swap" not in shown
    assert "memtop does nothing by itself: --on-oom ask; you can do one of these:" in shown
    assert "consent" not in shown


def test_more_than_all_memory_is_a_fault_of_the_program(runs: Runs) -> None:
    proposal, shown = died(runs, sys.executable, "-c", "import numpy; numpy.zeros(10 ** 14)")
    assert proposal["diagnosis"]["requested_bytes"] == pytest.approx(8e14, rel=0.01)
    (cause,) = proposal["causes"]
    assert cause.startswith("no setting of the machine helps: one request was for 728.0 TiB, and the machine has")
    assert proposal["remedies"] == []
    assert cause in shown
    assert "8 GiB of swap" not in shown


def test_the_leak_that_was_seen_is_the_first_thing_said(runs: Runs) -> None:
    proposal, shown = died(runs, sys.executable, "-c", LEAKS)
    (cause,) = proposal["causes"]
    assert cause.startswith("anonymous memory of rank 0 grew by 2.0 MiB per update until the end: a leak")
    assert "a smaller batch does not fix it" in cause
    assert "the address space (ulimit -v) is full in" in message_of(runs, "trend")
    assert shown.index(cause) < shown.index("memtop does nothing by itself")
    # Every other remedy would only delay the failure.
    assert proposal["remedies"] == []


def test_the_limit_is_that_of_the_program_as_it_was_last_seen(tmp_path: Path) -> None:
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)); print('set', flush=True); input()"
    program = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        assert program.stdout.readline() == "set\n"
        assert address_space(program.pid) == 1 << 40
        seen = AttemptEvidence(tmp_path, 0.0)
        seen.look(program.pid)
        assert seen.address_space_bytes == 1 << 40
    finally:
        program.communicate("\n", timeout=60)
    with pytest.raises(OSError, match="No such"):
        address_space(program.pid)
    # It has ended: what was seen of it stays, for the next supervisor, too.
    seen.look(program.pid)
    assert seen.address_space_bytes == 1 << 40
    assert AttemptEvidence(tmp_path, 0.0).address_space_bytes == 1 << 40


def test_a_program_without_a_limit_has_none(tmp_path: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        pytest.skip("this test process has a limit of its own (ulimit -v)")
    assert address_space(os.getpid()) is None
    assert AttemptEvidence(tmp_path, 0.0).address_space_bytes is None
