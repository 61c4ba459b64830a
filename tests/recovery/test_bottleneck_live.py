"""Real runs on the CPU: the advice distinguishes waiting for data, computing and swapping, and a
larger batch is tried."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from memtop.supervisor.errors import MemtopError, RefusedError, UsageError
from memtop.supervisor.monitor.host import HostReader
from memtop.supervisor.recovery.bottleneck import Measured, advise
from memtop.supervisor.recovery.trend import Sustained
from memtop.supervisor.run.client import ask
from memtop.supervisor.run.record.folder import find_run
from memtop.supervisor.run.view import read_state
from memtop.supervisor.wire import Change, Try
from tests.conftest import Runs
from tests.groups import MemoryGroup

PROGRAM = str(Path(__file__).with_name("waiting.py"))
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
TINY = [word for key, value in SMALL.items() for word in ("--set", f"model.config.{key}={value}")]


def advised(runs: Runs, bottleneck: str) -> dict[str, Any]:
    """The output of `memtop advise --json` once it names this bottleneck."""
    folder = find_run("a", runs.path)

    def known(_: Any) -> bool:
        advice = read_state(folder).advice
        return advice is not None and advice.bottleneck == bottleneck

    runs.wait("a", known)
    return dict(json.loads(runs.memtop("advise", "a", "--json").stdout))


@pytest.mark.parametrize("kind", ["data", "compute"])
def test_the_bottleneck_of_an_external_command(runs: Runs, kind: str) -> None:
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, PROGRAM, kind, "100000")
    document = advised(runs, kind)
    assert document["proposals"] == []  # memtop cannot change its settings
    assert any("data wait" in text for text in document["evidence"])
    runs.kill(read_state(find_run("a", runs.path)).trainer_pid or 0)


def free_swap() -> int:
    rows = [line.split() for line in Path("/proc/swaps").read_text().splitlines()[1:]]
    return sum(int(size) - int(used) for _, _, size, used, _ in rows) << 10


def test_a_program_that_swaps(runs: Runs, group: MemoryGroup) -> None:
    if free_swap() < 768 << 20:
        pytest.skip("this machine has less than 768 MiB of free swap")
    runs.memtop("train", "--detach", "--name", "a", "--", *group.inside(sys.executable, PROGRAM, "swap", "100000"))
    runs.wait("a", lambda document: (document["updates"] or 0) > 10)
    group.squeeze(320 << 20)  # torch holds about 200 MiB that are never read again
    document = advised(runs, "swap")
    assert any("swap" in text for text in document["evidence"])
    runs.kill(read_state(find_run("a", runs.path)).trainer_pid or 0)


def test_swapping_is_neither_waiting_for_data_nor_computing(tmp_path: Path) -> None:
    """For machines without swap: the real reader reads a /proc/vmstat that counts 3000 pages per
    second."""
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
    return [event.data["trial"] for event in runs.events("a", "trial")]


def start_first_run(runs: Runs) -> None:
    """B 8 x A 5: the next exact split, 10 x 4, raises the micro-batch by a quarter."""
    runs.environment["OMP_NUM_THREADS"] = "1"
    split = ("--batch", "8", "--accum", "5", "--seq-len", "32", "--save-every", "1000")
    runs.memtop("train", "--detach", "--name", "a", *split, "--max-updates", "100000", *TINY)
    advised(runs, "compute")


def test_a_larger_batch_is_tried_measured_and_kept_or_undone(runs: Runs) -> None:
    start_first_run(runs)
    document = json.loads(runs.memtop("advise", "a", "--json").stdout)
    (proposal,) = [remedy for remedy in document["proposals"] if remedy["id"] == "larger_batch"]
    assert proposal["assignments"] == {"batch": "10", "accumulation": "4"}
    refuse_what_must_not_be_tried(runs)

    trial = json.loads(runs.memtop("advise", "a", "--try", "--json").stdout)
    assert trial["title"] == "batch 8 -> 10, accumulation 5 -> 4"
    assert trial["state"] in ("kept", "undone")
    for stretch in (trial["before"], trial["after"]):
        assert stretch["updates"] == 20
        assert stretch["samples_per_second"] > 0
        assert stretch["tokens_per_second"] > 0
        assert stretch["host_bytes"] > 0
        assert stretch["samples_per_second_spread"] >= 0
    # The run has the settings that follow from the outcome.
    batch = 10 if trial["state"] == "kept" else 8
    show = runs.wait("a", lambda document: document["settings"]["batch"] == batch)
    assert show["effective_batch"] == 40
    assert len(show["attempts"]) == 1  # nothing was restarted
    assert [row["state"] for row in trials(runs)][-3:] == ["measuring before", "measuring after", trial["state"]]
    # state.json is written later.
    runs.wait("a", lambda _: msgspec.to_builtins(read_state(find_run("a", runs.path)).trial) == trials(runs)[-1])
    text = runs.memtop("advise", "a").stdout
    assert "trial of batch 8 -> 10, accumulation 5 -> 4" in text
    runs.memtop("stop", "a")
    done = runs.memtop("advise", "a", status=1)
    assert done.stderr == "memtop: run 'a' is not running: it is stopped; advice needs a run in progress\n"


def refuse_what_must_not_be_tried(runs: Runs) -> None:
    """Each refusal is one line."""
    for assignments, error, words in (
        ({"batch": "10"}, RefusedError, "effective batch 40 -> 50"),
        ({"batch": "40", "accumulation": "1"}, RefusedError, "+400 %"),
        ({"batch": "8"}, UsageError, "nothing changes"),
        ({"batch": "0"}, UsageError, "batch"),
    ):
        request = Try(id=1, change=Change(assignments=assignments))
        with pytest.raises(MemtopError) as refusal:
            ask(find_run("a", runs.path), lambda number, request=request: replace(request, id=number))  # type: ignore[misc]
        assert isinstance(refusal.value, error)
        assert words in str(refusal.value)
        assert "\n" not in str(refusal.value)
