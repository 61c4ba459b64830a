"""Whole runs with real training: launch, view, act, restart and resume. Nothing is replaced."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtop.tui.recovery import DELIBERATE_SECONDS
from tests.conftest import Runs, make_runs
from tests.recovery.injected import BROKEN, PACED, inject
from tests.terminal import Terminal

# Small enough for many runs and real in every part; the split and the number of updates are those
# of the contract.
TINY_RECIPE = """
[recipes.tiny]
title = "t"
description = "d"
preset = "standard"
batch = 8
accumulation = 4
seq_len = 32
max_updates = 40
save_every = 10
learning_rate = 2e-3
[recipes.tiny.model.config]
model_type = "llama"
vocab_size = 260
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 256
[recipes.tiny.data]
source = "python-stdlib"
max_bytes = 600000
"""


def tiny(runs: Runs, *arguments: str) -> tuple[str, ...]:
    (runs.root / "memtop.toml").write_text(TINY_RECIPE)
    inject(runs, PACED)
    return ("train", "tiny", *arguments)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """The metrics of a run that nothing disturbed."""
    for runs in make_runs(tmp_path_factory.mktemp("reference")):
        runs.memtop(*tiny(runs, "--headless", "--name", "ref"))
        yield runs.show("ref", metrics=True)["metrics"]


def assert_same_training(document: dict[str, Any], reference: list[dict[str, Any]]) -> None:
    metrics = document["metrics"]
    assert [row["update"] for row in metrics] == list(range(1, 41))
    assert [row["sample_digest"] for row in metrics] == [row["sample_digest"] for row in reference]
    assert [row["samples_seen"] for row in metrics] == [32 * n for n in range(1, 41)]
    assert [row["learning_rate"] for row in metrics] == [row["learning_rate"] for row in reference]
    for row, expected in zip(metrics, reference, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_an_undisturbed_run_learns(reference: list[dict[str, Any]]) -> None:
    assert len(reference) == 40
    assert reference[-1]["loss"] < reference[0]["loss"] - 1.0
    assert len({row["sample_digest"] for row in reference}) == 40


def test_restart_with_another_split_while_it_runs_changes_nothing_in_the_training(
    runs: Runs, reference: list[dict[str, Any]]
) -> None:
    runs.memtop(*tiny(runs, "--detach", "--name", "a"))
    runs.wait("a", lambda d: (d["updates"] or 0) >= 5)
    runs.memtop("restart", "a", "--batch", "4", "--accum", "8", "--headless")
    document = runs.show("a", metrics=True)
    assert document["state"] == "finished"
    first, second = document["attempts"]
    assert (first["outcome"], second["outcome"]) == ("restarted", "finished")
    assert (second["settings"]["batch"], second["settings"]["accumulation"]) == (4, 8)
    assert second["start_updates"] == first["updates"] > 0
    assert_same_training(document, reference)


def test_restart_after_kill_9_of_the_trainer_repeats_and_skips_nothing(runs: Runs, reference: list[dict[str, Any]]) -> None:
    runs.memtop(*tiny(runs, "--detach", "--name", "a"))
    running = runs.wait("a", lambda d: (d["updates"] or 0) >= 13)
    runs.kill(running["trainer_pid"])
    runs.wait("a", lambda d: d["state"] == "failed")
    runs.memtop("restart", "a", "--headless")
    document = runs.show("a", metrics=True)
    assert document["attempts"][1]["start_updates"] in (10, 20, 30)
    assert_same_training(document, reference)


def test_kill_9_of_supervisor_and_trainer_together_loses_nothing_that_was_saved(
    runs: Runs, reference: list[dict[str, Any]]
) -> None:
    runs.memtop(*tiny(runs, "--detach", "--name", "a"))
    running = runs.wait("a", lambda d: (d["updates"] or 0) >= 12)
    runs.kill(running["supervisor_pid"])
    runs.kill(running["trainer_pid"])
    gone = runs.wait("a", lambda d: not d["alive"] and d["supervisor_pid"] is None and d["ended"] is not None)
    assert gone["state"] == "failed"
    assert "no supervisor has recorded that (ended by signal 9 (SIGKILL))" in gone["reason"]
    assert gone["ended_by"] == 9
    runs.memtop("restart", "a", "--headless")
    assert_same_training(runs.show("a", metrics=True), reference)


def test_a_supervisor_killed_during_training_is_replaced_and_the_run_finishes(
    runs: Runs, reference: list[dict[str, Any]]
) -> None:
    runs.memtop(*tiny(runs, "--detach", "--name", "a"))
    running = runs.wait("a", lambda d: (d["updates"] or 0) >= 3)
    # The program stands still until it has a successor: on a busy machine it could end before.
    os.kill(running["trainer_pid"], signal.SIGSTOP)
    runs.kill(running["supervisor_pid"])
    deadline = time.monotonic() + 60
    while True:
        # It starts the successor. On a busy machine the killed one may still be leaving.
        (row,) = json.loads(runs.memtop("watch", "--once", "--json").stdout)["runs"]
        assert row["alive"]
        if row["adopted"]:
            break
        assert time.monotonic() < deadline, "no successor"
    os.kill(running["trainer_pid"], signal.SIGCONT)
    document = runs.wait("a", lambda d: d["state"] == "finished")
    assert len(document["attempts"]) == 1
    assert_same_training(runs.show("a", metrics=True), reference)


def test_commands_reach_the_training_process(runs: Runs) -> None:
    runs.memtop(*tiny(runs, "--detach", "--name", "a", "--max-updates", "20000"))
    runs.wait("a", lambda d: (d["updates"] or 0) >= 2)
    assert "returned to the system" in runs.memtop("free", "a").stdout
    assert "checkpoint at update" in runs.memtop("checkpoint", "a").stdout
    saved = runs.show("a")["checkpoint"]
    assert saved["complete"]
    assert saved["updates"] > 0
    assert runs.memtop("stop", "a").stdout == "stopped as requested, state saved\n"
    document = runs.show("a")
    assert (document["exit_status"], document["checkpoint"]["updates"]) == (0, document["updates"])


def test_a_preset_switch_keeps_the_run(runs: Runs) -> None:
    runs.memtop(*tiny(runs, "--headless", "--name", "a", "--max-updates", "10"))
    runs.memtop("restart", "a", "--preset", "extreme", "--max-updates", "12", "--headless")
    document = runs.show("a", metrics=True)
    settings = document["attempts"][1]["settings"]
    assert (settings["preset"], settings["batch"], settings["accumulation"]) == ("extreme", 1, 32)
    assert settings["gradient_checkpointing"]
    assert [row["attempt"] for row in document["metrics"]] == [1] * 10 + [2] * 2


def damage(path: Path) -> None:
    """Change one bit of the file."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_a_damaged_newest_state_is_named_and_the_one_before_it_used(runs: Runs) -> None:
    runs.memtop(*tiny(runs, "--headless", "--name", "a", "--max-updates", "20"))
    weights = runs.path / "a" / "train_latest_state" / "state-00001.safetensors"
    damage(weights)
    said = runs.memtop("restart", "a", "--max-updates", "21", "--headless").stderr
    words = f"{weights}: size or checksum differs from the manifest; this state is now damaged_train_latest_state"
    words += "; resuming from the newest complete state, of update 10"
    assert f"memtop: {words}\n" in said
    assert words in (runs.path / "a/attempts/0002/output.log").read_text()
    document = runs.show("a")
    assert (document["attempts"][1]["start_updates"], document["warnings"]) == (10, [words])
    assert words in runs.memtop("show", "a").stdout
    assert (runs.path / "a" / "damaged_train_latest_state").is_dir()
    # The next attempt begins with a complete state.
    runs.memtop("restart", "a", "--max-updates", "22", "--headless")
    assert runs.show("a")["warnings"] == []


def test_a_state_that_could_not_be_loaded_is_not_shown_as_complete(runs: Runs) -> None:
    runs.memtop(*tiny(runs, "--headless", "--name", "a", "--max-updates", "5"))
    weights = runs.path / "a" / "train_latest_state" / "state-00001.safetensors"
    damage(weights)
    runs.memtop("restart", "a", "--headless", "--max-updates", "6", status=1)
    shown = runs.memtop("show", "a").stdout
    assert f"checkpoint  incomplete: the trainer found it damaged: {weights}: size or checksum differs" in shown
    assert not runs.show("a")["checkpoint"]["complete"]


def test_no_whole_state_left_is_one_clear_line(runs: Runs) -> None:
    runs.memtop(*tiny(runs, "--headless", "--name", "a", "--max-updates", "5"))
    (runs.path / "a" / "train_latest_state" / "manifest.json").unlink()
    done = runs.memtop("restart", "a", "--headless", "--max-updates", "6", status=1)
    words = "it cannot resume, because no saved state seems whole: {}/train_latest_state/manifest.json is missing"
    assert words.format(runs.path / "a") in done.stderr
    assert "starting at the first update" not in done.stderr
    assert "manifest.json: missing, so the save was cut short; no complete state is left" in done.stderr
    assert runs.show("a")["attempts"][1]["exit_status"] == 2


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), pytest.param(160, 50, marks=pytest.mark.long)])
def test_a_person_drives_a_run_in_a_real_terminal(runs: Runs, columns: int, rows: int) -> None:
    command = [sys.executable, "-m", "memtop", *tiny(runs, "--name", "a", "--max-updates", "20000")]
    screen = Terminal(command, columns=columns, rows=rows, cwd=str(runs.root), environment=runs.environment)
    try:
        screen.wait_for("● training", "loss", "RAM", "Swap", "no NVIDIA GPU")
        screen.keys("f")
        screen.wait_for("cache freed")
        screen.keys("c")
        screen.wait_for("checkpoint at update")
        screen.keys("r")
        screen.wait_for("nothing changed: restarts with the same settings")
        screen.leave("nothing changed")
        screen.keys("k")
        screen.wait_for("GPU memory")
        screen.leave("GPU memory")
        screen.keys("7")
        screen.wait_for("extreme")
        screen.keys("\r")
        screen.wait_for("attempt 2", "1 x 32")
        screen.keys("d")
        assert screen.wait() == 0
        assert runs.show("a")["alive"]
    finally:
        screen.close()
    second = Terminal(
        [sys.executable, "-m", "memtop", "watch", "a"],
        columns=columns,
        rows=rows,
        cwd=str(runs.root),
        environment=runs.environment,
    )
    try:
        second.wait_for("attempt 2", "● training")
        second.keys("s")
        second.wait_for("Cancel")
        second.keys("y")
        runs.wait("a", lambda d: d["state"] == "stopped")
        second.wait_for("stopped", "d Quit")
        second.keys("d")
        assert second.wait() == 0
    finally:
        second.close()


def test_a_person_goes_back_to_before_a_spike_in_a_real_terminal(runs: Runs, reference: list[dict[str, Any]]) -> None:
    command = [sys.executable, "-m", "memtop", *tiny(runs, "--name", "a", "--max-updates", "20000", "--on-spike", "ask")]
    inject(runs, PACED + BROKEN)
    screen = Terminal(command, columns=80, rows=24, cwd=str(runs.root), environment=runs.environment)
    try:
        asked = screen.wait_for("The loss of a has jumped", "Later (Esc)", "Stop (s)", "Go on (g)", "Go back (b)")
        words = " ".join(asked.replace("│", " ").split())
        assert "Go back to the state of update 30, without the 128 samples of the updates 33 to 36." in words
        # Before, a key may have been meant for the dashboard, so it is no answer.
        time.sleep(DELIBERATE_SECONDS)
        screen.keys("b")
        screen.wait_for("attempt 2", "● training")
        runs.wait("a", lambda d: len(d["attempts"]) == 2 and (d["updates"] or 0) >= 40)
        assert "has jumped" not in screen.text()
        screen.keys("d")
        assert screen.wait() == 0
    finally:
        screen.close()
    runs.memtop("stop", "a")
    document = runs.show("a", metrics=True)
    assert document["attempts"][1]["settings"]["leave_out"] == [[32 * 32, 36 * 32]]
    digests = [row["sample_digest"] for row in reference]
    gone_back = [row["sample_digest"] for row in document["metrics"]][:36]
    assert gone_back == [*digests[:32], *digests[36:]], "every other sample is used once"


def test_a_killed_dashboard_takes_nothing_along(runs: Runs) -> None:
    command = [sys.executable, "-m", "memtop", *tiny(runs, "--name", "a", "--max-updates", "20000")]
    screen = Terminal(command, columns=100, rows=30, cwd=str(runs.root), environment=runs.environment)
    try:
        screen.wait_for("● training")
    finally:
        screen.close()
    before = runs.show("a")["updates"] or 0
    after = runs.wait("a", lambda d: (d["updates"] or 0) > before)
    assert (after["alive"], after["state"]) == (True, "training")


def test_a_terminal_that_is_too_small_says_so_and_recovers(runs: Runs) -> None:
    screen = Terminal(
        [sys.executable, "-m", "memtop", "watch"], columns=50, rows=12, cwd=str(runs.root), environment=runs.environment
    )
    try:
        screen.wait_for("terminal too small")
        screen.keys("q")
        assert screen.wait() == 0
    finally:
        screen.close()


@pytest.mark.long  # tests/test_full_disk.py has the other cases of a full disk
def test_a_full_disk_keeps_the_old_state_and_says_so(runs: Runs, small_disk: Path) -> None:
    place = str(small_disk / "runs")
    runs.memtop(*tiny(runs, "--headless", "--name", "a", "--max-updates", "10", "--runs-dir", place))
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 65536)
        except OSError as full:
            print(f"filled: {full}")
    done = runs.memtop("restart", "a", "--max-updates", "20", "--headless", "--runs-dir", place, status=None)
    filler.unlink()
    assert len(done.stderr.strip().splitlines()) >= 1
    document = json.loads(runs.memtop("show", "a", "--json", "--runs-dir", place).stdout)
    assert document["checkpoint"]["complete"]
    assert document["checkpoint"]["updates"] == 10
    runs.memtop("restart", "a", "--max-updates", "20", "--headless", "--runs-dir", place)
    document = json.loads(runs.memtop("show", "a", "--json", "--metrics", "--runs-dir", place).stdout)
    assert document["checkpoint"]["updates"] == 20
    assert [row["update"] for row in document["metrics"]] == list(range(1, 21))
