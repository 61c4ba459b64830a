"""Real runs on the CPU: a program starved by its loader and one bound by compute are told apart, swapping is told from both,
and a growth step is tried, measured and kept or undone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memtop.supervisor.errors import MemtopError, RefusedError, UsageError
from memtop.supervisor.monitor.host import HostReader
from memtop.supervisor.recovery.bottleneck import Measured, advise
from memtop.supervisor.recovery.trend import Sustained
from memtop.supervisor.run.clients.client import ask
from memtop.supervisor.run.record.folder import find_run
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.record.view import read_state
from memtop.supervisor.wire import Change, Try
from tests.conftest import Runs
from tests.groups import MemoryGroup, memory_group

PROGRAM = str(Path(__file__).with_name("waiting.py"))
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
TINY = [word for key, value in SMALL.items() for word in ("--set", f"model.config.{key}={value}")]


def advised(runs: Runs, bottleneck: str) -> dict[str, Any]:
    """What `memtop advise --json` says once it is that."""
    folder = find_run("a", runs.path)

    def known(_: Any) -> bool:
        advice = read_state(folder).advice
        return advice is not None and advice.bottleneck == bottleneck

    runs.wait("a", known)
    return dict(json.loads(runs.memtop("advise", "a", "--json").stdout))


@pytest.mark.parametrize("kind", ["data", "compute"])
def test_what_a_program_of_somebodys_own_spends_its_time_on(runs: Runs, kind: str) -> None:
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, PROGRAM, kind, "100000")
    document = advised(runs, kind)
    assert document["proposals"] == []  # its settings are its own
    assert any("data wait" in text for text in document["evidence"])
    runs.kill(read_state(find_run("a", runs.path)).trainer_pid or 0)


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    yield from memory_group()


def free_swap() -> int:
    rows = [line.split() for line in Path("/proc/swaps").read_text().splitlines()[1:]]
    return sum(int(size) - int(used) for _, _, size, used, _ in rows) << 10


def test_a_program_that_swaps(runs: Runs, group: MemoryGroup) -> None:
    if free_swap() < 768 << 20:
        pytest.skip("this machine has no swap to use (768 MiB needed), and to make some is for root to decide")
    runs.memtop("train", "--detach", "--name", "a", "--", *group.inside(sys.executable, PROGRAM, "swap", "100000"))
    runs.wait("a", lambda document: (document["updates"] or 0) > 10)
    group.squeeze(320 << 20)  # torch itself has some 200 MiB that nobody reads again
    document = advised(runs, "swap")
    assert any("swap" in text for text in document["evidence"])
    runs.kill(read_state(find_run("a", runs.path)).trainer_pid or 0)


def test_a_machine_that_swaps_is_told_from_both(tmp_path: Path) -> None:
    """For machines without swap: /proc/vmstat as one writes it that reads 3000 pages a second back, through the real reader."""
    now, pages = [0.0], 0
    for name in ("meminfo", "stat", "loadavg", "uptime"):
        (tmp_path / name).write_text(Path("/proc", name).read_text())
    (tmp_path / "vmstat").write_text("pswpin 0\npswpout 0\n")
    reader, rate = HostReader(proc_root=tmp_path, monotonic=lambda: now[0]), Sustained()
    for _ in range(30):
        sample = reader.read()
        if sample.swap_in_bytes_per_second is not None:
            rate.add(sample.swap_in_bytes_per_second)
        now[0] += 1
        pages += 3000
        (tmp_path / "vmstat").write_text(f"pswpin {pages}\npswpout 0\n")
    for wait in (0.01, 0.4):
        measured = Measured(
            updates=20, on_gpu=False, step_seconds=0.5, data_wait_seconds=wait, swap_in_bytes_per_second=rate.value
        )
        assert advise(measured, None).bottleneck == "swap"
        assert advise(msgspec.structs.replace(measured, swap_in_bytes_per_second=0.0), None).bottleneck != "swap"


def trials(runs: Runs) -> list[dict[str, Any]]:
    ledger = Ledger(find_run("a", runs.path).ledger_path, read_only=True)
    try:
        return [event.data["trial"] for event in ledger.events() if event.kind == "trial"]
    finally:
        ledger.close()


def start_first_run(runs: Runs) -> None:
    """B 8 x A 5: the next exact split, 10 x 4, is a step of a quarter."""
    runs.environment["OMP_NUM_THREADS"] = "1"
    split = ("--batch", "8", "--accum", "5", "--seq-len", "32", "--save-every", "1000")
    runs.memtop("train", "--detach", "--name", "a", *split, "--max-updates", "100000", *TINY)
    advised(runs, "compute")


def test_a_next_split_is_tried_measured_and_kept_or_undone(runs: Runs) -> None:
    start_first_run(runs)
    document = json.loads(runs.memtop("advise", "a", "--json").stdout)
    (proposal,) = [remedy for remedy in document["proposals"] if remedy["id"] == "larger_batch"]
    assert proposal["assignments"] == {"batch": "10", "accumulation": "4"}

    trial = json.loads(runs.memtop("advise", "a", "--try", "--json").stdout)
    assert trial["title"] == "batch 8 -> 10, accumulation 5 -> 4"
    assert trial["state"] in ("kept", "undone")
    for stretch in (trial["before"], trial["after"]):
        assert stretch["updates"] == 20
        assert stretch["samples_per_second"] > 0
        assert stretch["tokens_per_second"] > 0
        assert stretch["host_bytes"] > 0
        assert stretch["samples_per_second_spread"] >= 0
    # It is as the rule says, and the run has the settings that follow from it.
    batch = 10 if trial["state"] == "kept" else 8
    show = runs.wait("a", lambda document: document["settings"]["batch"] == batch)
    assert show["effective_batch"] == 40
    assert len(show["attempts"]) == 1  # nothing was restarted
    assert [row["state"] for row in trials(runs)] == ["measuring before", "measuring after", trial["state"]]
    # state.json follows within moments.
    runs.wait("a", lambda _: msgspec.to_builtins(read_state(find_run("a", runs.path)).trial) == trials(runs)[-1])
    text = runs.memtop("advise", "a").stdout
    assert "trial of batch 8 -> 10, accumulation 5 -> 4" in text
    runs.memtop("stop", "a")


def test_what_must_not_be_tried_is_refused_in_one_line(runs: Runs) -> None:
    start_first_run(runs)
    folder = find_run("a", runs.path)
    for change, error, words in (
        (Change(assignments={"batch": "10"}), RefusedError, "effective batch 40 -> 50"),
        (Change(assignments={"batch": "40", "accumulation": "1"}), RefusedError, "+400%"),
        (Change(assignments={"batch": "8"}), UsageError, "nothing changes"),
        (Change(assignments={"batch": "0"}), UsageError, "batch"),
    ):
        with pytest.raises(MemtopError) as refusal:
            ask(folder, lambda number, change=change: Try(id=number, change=change))  # type: ignore[misc]
        assert isinstance(refusal.value, error)
        assert words in str(refusal.value)
        assert "\n" not in str(refusal.value)
    runs.memtop("stop", "a")
    done = runs.memtop("advise", "a", status=1)
    assert done.stderr == "memtop: run 'a' is not running: it is stopped; advice is about a run at work\n"
