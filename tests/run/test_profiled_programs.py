"""Programs with a profile, each with a trap: real programs and supervisors."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from memtop.supervisor.run.record.ledger import Ledger
from tests.conftest import Runs
from tests.run.profiled_programs import ASKS, EMPTY, MICRO, PROFILES


def start(runs: Runs, name: str, program: str, *words: str) -> None:
    (runs.root / "memtop.toml").write_text(PROFILES)
    (runs.root / f"{name}.py").write_text(program)
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, f"{name}.py", *words)


def batches(runs: Runs, attempt: int) -> list[tuple[int, int, list[int]]]:
    rows = [json.loads(line) for line in (runs.root / "samples.jsonl").read_text().splitlines()]
    return [(epoch, step, batch) for number, epoch, step, batch in rows if number == str(attempt)]


def saved(document: dict[str, Any]) -> Any:
    return document["program"]["checkpoint"]


def curve(runs: Runs) -> list[int]:
    ledger = Ledger(runs.path / "a/ledger.sqlite", read_only=True)
    try:
        return [metric.update for metric in ledger.final_history()]
    finally:
        ledger.close()


def test_micro_batches_are_converted_and_no_sample_is_left_out(runs: Runs) -> None:
    start(runs, "micro", MICRO)
    live = runs.wait("a", lambda d: saved(d) is not None and saved(d)["update"] == 6)
    assert saved(live) == {"path": str(runs.root / "out/state.pth"), "update": 6, "complete": True}
    answer = runs.memtop("restart", "a", "--batch", "2", "--accum", "4", "--detach").stderr
    assert "its position is converted in a copy of the checkpoint (micro-batches: 12 -> 24)" in answer
    assert "no sample is repeated or left out" in answer
    (runs.root / "go").touch()
    runs.wait("a", lambda d: d["state"] == "finished")
    before, after = batches(runs, 1), batches(runs, 2)
    assert [step for _, step, _ in before] == list(range(1, 13))
    assert after[0][:2] == (0, 25)
    samples = [(epoch, sample) for epoch, _, batch in before + after for sample in batch]
    assert sorted(samples) == [(epoch, sample) for epoch in (0, 1) for sample in range(96)]
    assert runs.events("a", "knob") == []
    assert torch.load(runs.path / "a/program_checkpoint/state.pth")["step"] > 0
    updates = curve(runs)
    assert updates[-1] == 24
    refused = runs.memtop("restart", "a", "--detach", status=2)
    assert "nothing is left to train: 24 updates are done, and the length is 24; `memtop train -- COMMAND`" in refused.stderr
    # What another split makes of its length is not known, and the last checkpoint does not say
    # after which update it was saved. What was trained before still counts.
    runs.memtop("restart", "a", "--batch", "4", "--accum", "2", "--detach")
    document = runs.wait("a", lambda d: len(d["attempts"]) == 3 and d["state"] == "finished")
    assert document["attempts"][2]["start_updates"] is None
    assert curve(runs) == updates


def test_a_checkpoint_that_was_cut_is_replaced_by_the_copy(runs: Runs) -> None:
    start(runs, "micro", MICRO)
    runs.wait("a", lambda d: saved(d) is not None and saved(d)["update"] == 6)
    runs.wait("a", lambda _: (runs.path / "a/program_checkpoint/kept.json").exists())
    # The next save is killed in the middle of it.
    (runs.root / "die-in-save").touch()
    (runs.root / "go").touch()
    document = runs.wait("a", lambda d: d["state"] == "failed")
    assert saved(document)["update"] == 6
    assert saved(document)["path"] == str(runs.path / "a/program_checkpoint/state.pth")
    runs.memtop("restart", "a", "--detach")
    runs.wait("a", lambda d: d["state"] == "finished")
    assert batches(runs, 2)[0][:2] == (0, 13)
    assert (runs.root / "out/state.pth.incomplete").stat().st_size == 9000
    # A supervisor that only refuses keeps what is known of the run.
    before = runs.wait("a", lambda d: d["supervisor_pid"] is None)
    torch.save({"step": torch.tensor(12)}, runs.root / "out/state.pth")
    refused = runs.memtop("restart", "a", "--batch", "2", "--accum", "4", "--detach", status=1).stderr
    assert "its position cannot be read: it has no whole number step; the copy " in refused
    after = runs.show("a")
    assert (before["updates"], len(after["attempts"])) == (after["updates"], 2)
    assert after["updates"] is not None


def test_a_program_that_asks_gets_its_answer_and_its_own_log_is_followed(runs: Runs) -> None:
    start(runs, "asks", ASKS)
    live = runs.wait("a", lambda d: (d["updates"] or 0) >= 5 and d["loss"] is not None)
    assert "logs/train-1.log, by lines like" in live["program"]["why"]
    told = runs.memtop("stop", "a").stderr
    assert "answers its question with 'y', and waits while it saves" in told
    document = runs.wait("a", lambda d: d["state"] == "stopped")
    assert document["exit_status"] == 0
    assert saved(document)["complete"]
    assert saved(document)["update"] >= 5
    assert "save? (y/n)" in (runs.path / "a/attempts/0001/output.log").read_text()
    runs.memtop("restart", "a", "--detach")
    last = saved(document)["update"]
    runs.wait("a", lambda d: d["state"] == "training" and d["updates"] > last)
    lines = (runs.root / "logs/train-1.log").read_text().splitlines()
    steps = [int(line.partition("step:")[2].partition(",")[0]) for line in lines]
    assert steps == list(range(1, len(steps) + 1)), "it went on where it was"
    runs.memtop("stop", "a")


def test_a_program_that_ends_without_training_returns_to_the_settings_before(runs: Runs) -> None:
    start(runs, "empty", EMPTY)
    runs.wait("a", lambda d: (d["updates"] or 0) >= 5 and saved(d) is not None)
    runs.memtop("restart", "a", "--batch", "2", "--detach")
    runs.wait("a", lambda d: len(d["attempts"]) == 3 and d["state"] == "training")
    document = runs.show("a")
    assert [attempt["outcome"] for attempt in document["attempts"][:2]] == ["restarted", "failed"]
    steps = (runs.path / "a/attempts/0003/output.log").read_text()
    assert "step 1/" not in steps
    runs.memtop("stop", "a")
