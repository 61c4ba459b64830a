"""`memtop restart RUN --batch B --accum A` of real programs built on Hugging Face's Trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.conftest import Runs

PROGRAM = str(Path(__file__).with_name("trainer_program.py"))
HALF = ("--batch", "2", "--accum", "2")


def start(runs: Runs, *words: str) -> None:
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, PROGRAM, *words)
    runs.wait("a", lambda d: (d["updates"] or 0) >= 5)


def updates(runs: Runs) -> list[Any]:
    return [json.loads(line) for line in (runs.root / "updates.jsonl").read_text().splitlines()]


def test_another_split_continues_where_it_was(runs: Runs) -> None:
    start(runs)
    refused = runs.memtop("restart", "a", "--set", "lora.r=4", "--detach", status=2).stderr
    assert refused.startswith("memtop: lora.r: of a program built on Hugging Face's Trainer, memtop sets batch, accumulation,")
    answer = runs.memtop("restart", "a", *HALF, "--detach").stderr
    assert "batch 4 x 1 -> 2 x 2: the effective batch stays 4" in answer
    document = runs.wait("a", lambda d: d["state"] == "finished")
    rows = updates(runs)
    assert [update for update, _, _ in rows] == list(range(1, 49))
    batches = [batch for _, batch, _ in rows]
    assert (set(batches), batches == sorted(batches, reverse=True)) == ({4, 2}, True)
    samples = [at for _, _, seen in rows for at in seen]
    # Each epoch has each sample once, also the one with the restart.
    assert all(sorted(samples[epoch : epoch + 48]) == list(range(48)) for epoch in range(0, 192, 48))
    environment = json.loads((runs.path / "a/attempts/0002/command.json").read_text())["environment"]
    given = json.loads(environment["MEMTOP_TRAINER"])
    assert given["knobs"] == {"batch": 2, "accumulation": 2}
    assert Path(given["resume"]).parent == runs.path / "a/program_checkpoint"
    assert document["attempts"][1]["start_updates"] == len([batch for batch in batches if batch == 4])
    assert [row["knobs"] for row in document["configurations"]] == [{}, {"batch": "2", "accumulation": "2"}]
    assert document["program"]["resumes"]
    assert runs.events("a", "knob") == []


def test_a_program_that_ignores_all_is_found_out_and_stopped(runs: Runs) -> None:
    start(runs, "ignores-all")
    runs.memtop("restart", "a", *HALF, "--detach")
    runs.wait("a", lambda d: d["state"] == "stopped")
    (event,) = runs.events("a", "knob")
    assert event.message == "this knob had no effect: batch 2 was asked for, the program uses 4"
    assert any("the program did not resume" in event.message for event in runs.events("a", "warning"))
    (kept,) = (runs.path / "a/program_checkpoint").iterdir()
    assert json.loads((kept / "trainer_state.json").read_text())["global_step"] >= 5


def test_a_program_that_does_not_start_returns_to_the_settings_before(runs: Runs) -> None:
    start(runs, "fails-with-batch-2")
    runs.memtop("restart", "a", *HALF, "--detach")
    document = runs.wait("a", lambda d: d["state"] == "finished")
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["restarted", "failed", "finished"]
    assert [update for update, _, _ in updates(runs)] == list(range(1, 49))
    assert {batch for _, batch, _ in updates(runs)} == {4}
    runs.wait("a", lambda d: d["supervisor_pid"] is None)
    told = runs.memtop("restart", "a", "--batch", "1", "--detach").stderr
    assert "memtop: resumes at update 48; batch 4 x 1 -> 1 x 1: ! the effective batch changes from 4 to 1" in told
