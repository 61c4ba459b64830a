"""`memtop restart RUN --batch B --accum A` of real programs built on Hugging Face's Trainer."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Runs
from tests.run.test_program_checkpoints import save

PROGRAM = str(Path(__file__).with_name("trainer_program.py"))
HALF = ("--batch", "2", "--accum", "2")


def start(runs: Runs, *words: str, options: tuple[str, ...] = ()) -> None:
    runs.memtop("train", "--detach", "--name", "a", *options, "--", sys.executable, PROGRAM, *words)


def restart(runs: Runs, *words: str) -> str:
    """Start it, and restart it in its second epoch."""
    start(runs, *words)
    runs.wait("a", lambda d: (d["updates"] or 0) >= 15)
    return runs.memtop("restart", "a", *HALF, "--detach").stderr


def updates(runs: Runs) -> list[Any]:
    return [json.loads(line) for line in (runs.root / "updates.jsonl").read_text().splitlines()]


def has_trained_on_all(rows: list[Any]) -> bool:
    """Whether each epoch had each sample once, and the updates the right number."""
    samples = [at for _, _, seen in rows for at in seen]
    epochs = [sorted(samples[epoch : epoch + 46]) for epoch in range(0, 184, 46)]
    return epochs == [list(range(46))] * 4 and [update for update, _, _ in rows] == list(range(1, 49))


def test_another_split_continues_where_it_was(runs: Runs) -> None:
    answer = restart(runs)
    assert "batch 4 x 1 -> 2 x 2: the effective batch stays 4" in answer
    document = runs.wait("a", lambda d: d["state"] == "finished")
    rows = updates(runs)
    assert has_trained_on_all(rows)
    batches = [batch for _, batch, _ in rows]
    assert (set(batches), batches == sorted(batches, reverse=True)) == ({4, 2}, True)
    environment = json.loads((runs.path / "a/attempts/0002/command.json").read_text())["environment"]
    given = json.loads(environment["MEMTOP_TRAINER"])
    assert given["knobs"] == {"batch": 2, "accumulation": 2}
    assert Path(given["resume"]).parent == runs.path / "a/program_checkpoint"
    assert document["attempts"][1]["start_updates"] == given["update"] == len([batch for batch in batches if batch == 4])
    assert [row["knobs"] for row in document["configurations"]] == [{}, {"batch": "2", "accumulation": "2"}]
    assert document["program"]["resumes"]
    knobs = {name: knob["value"] for name, knob in document["program"]["knobs"].items() if knob is not None}
    others = {"eval_batch": 8, "gradient_checkpointing": False, "optimizer": "adamw_torch_fused"}
    assert knobs == {"batch": 2, "accumulation": 2, **others}
    assert runs.events("a", "knob") == []
    refused = runs.memtop("restart", "a", "--set", "lora.r=4", "--detach", status=2).stderr
    assert refused.startswith("memtop: lora.r: this program is your own and is built on Hugging Face's Trainer: memtop can")


def test_a_batch_that_the_program_sets_itself_is_found_out(runs: Runs) -> None:
    restart(runs, "ignores-batch")
    runs.wait("a", lambda d: d["state"] == "finished")
    (event,) = runs.events("a", "knob")
    assert event.message == "this setting had no effect: batch 2 was asked for, the program uses 4"


def test_a_program_that_begins_again_is_ended_before_it_trains(runs: Runs) -> None:
    restart(runs, "begins-again")
    document = runs.wait("a", lambda d: d["state"] == "failed")
    trained = [update for update, _, _ in updates(runs)]
    assert trained == list(range(1, len(trained) + 1))
    words = f"the program did not resume: it begins after update 0 instead of {trained[-1]}, so it was ended before it trained"
    assert document["reason"] == f"exit status 1: {words}"
    assert document["program"]["resumes"] is False
    assert len(document["attempts"]) == 2
    (kept,) = (runs.path / "a/program_checkpoint").iterdir()
    assert json.loads((kept / "trainer_state.json").read_text())["global_step"] == trained[-1]


def test_it_survives_a_lack_of_memory_with_half_the_batch(runs: Runs) -> None:
    start(runs, "runs-out", options=("--on-oom", "auto"))
    document = runs.wait("a", lambda d: d["state"] == "finished")
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["failed", "finished"]
    found = document["attempts"][0]["diagnosis"]
    assert (found["kind"], found["source"], found["requested_bytes"]) == ("host_oom_alloc", "record", 400 << 20)
    assert has_trained_on_all(updates(runs))
    assert [batch for _, batch, _ in updates(runs)] == [4] * 6 + [2] * 42


def test_a_program_without_a_checkpoint_is_not_started_again(runs: Runs) -> None:
    # It has gone on after a first lack of memory.
    start(runs, "runs-out", "catches", "never-saves", options=("--on-oom", "auto"))
    document = runs.wait("a", lambda d: d["state"] == "failed" and d["proposal"] is not None)
    assert (
        document["proposal"]["waiting"]
        == f"there is no complete checkpoint of this run in {runs.root}/out, so it would begin from zero"
    )
    remedy = document["proposal"]["remedies"][0]
    assert remedy["title"] == "batch 4 -> 2, accumulation 1 -> 2: effective batch stays 4, from the first update"
    assert (remedy["needs_consent"], remedy["command"]) == (True, "memtop restart a --batch 2 --accum 2")
    assert len(document["attempts"]) == 1
    assert [update for update, _, _ in updates(runs)] == list(range(1, 7))


@pytest.mark.long  # tests/run/test_profile_restart.py has it with a small program
def test_a_program_that_does_not_start_returns_to_the_settings_before(runs: Runs) -> None:
    restart(runs, "fails-with-batch-2")
    document = runs.wait("a", lambda d: d["state"] == "finished")
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["restarted", "failed", "finished"]
    assert has_trained_on_all(updates(runs))
    assert {batch for _, batch, _ in updates(runs)} == {4}
    runs.wait("a", lambda d: d["supervisor_pid"] is None)
    told = runs.memtop("restart", "a", "--detach", status=2).stderr
    words = "nothing is left to train: 48 updates are done, and the length is 48"
    assert told == f"memtop: {words}; `memtop restart a --max-updates N` trains longer\n"
    told = runs.memtop("restart", "a", "--batch", "1", "--max-updates", "50", "--detach").stderr
    assert "memtop: resumes at update 48; 48 -> 50 updates: the learning rate there changes from 0 to " in told
    assert "; batch 4 x 1 -> 1 x 1: ! the effective batch changes from 4 to 1" in told
    runs.wait("a", lambda d: d["state"] == "finished")
    assert [(update, batch) for update, batch, _ in updates(runs)][47:] == [(48, 4), (49, 1), (50, 1)]


def test_a_program_that_is_stopped_after_its_last_update_has_finished(runs: Runs) -> None:
    start(runs, "never-saves", "goes-on")
    log = runs.path / "a/attempts/0001/output.log"
    runs.wait("a", lambda d: d["updates"] == 48 and "trained" in log.read_text())
    stopped = runs.memtop("stop", "a")
    assert "SIGINT to the program; its training is complete, and what it still saves is up to it\n" in stopped.stderr
    assert stopped.stdout.startswith("finished: its training was complete before the program was stopped; SIGINT sent to pid")
    document = runs.wait("a", lambda d: d["supervisor_pid"] is None)
    assert (document["state"], document["updates"]) == ("finished", 48)
    told = runs.memtop("restart", "a", "--detach", status=2).stderr
    assert told == (
        "memtop: nothing is left to train: 48 updates are done, and the length is 48; it has no complete checkpoint; "
        "`memtop restart a --set position=lost` trains it again from zero\n"
    )
    assert [update for update, _, _ in updates(runs)] == list(range(1, 49))


def test_checkpoints_in_a_folder_below_that_of_the_arguments_are_found(runs: Runs) -> None:
    below = runs.root / "out/exp1"
    save(below, 40)  # of an earlier run
    os.utime(below / "checkpoint-40/trainer_state.json", (1e9, 1e9))
    answer = restart(runs, "saves-below")
    # Of saves that follow each other quickly, only some are examined.
    known = "program's checkpoint at update 1[0-9], or a newer one|checkpoint that the program saves now"
    assert re.match(f"restarting from the ({known}); ", answer)
    document = runs.wait("a", lambda d: d["state"] == "finished")
    assert has_trained_on_all(updates(runs))
    assert (document["checkpoint"]["path"], document["program"]["resumes"]) == (f"{below}/checkpoint-48", True)
