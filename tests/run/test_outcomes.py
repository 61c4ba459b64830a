"""How an attempt ended, what it had done, and the words for it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from memtop.supervisor.run import explain
from memtop.supervisor.run.post_mortem.log_end import LogEnd, read_log_end
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.reports import End
from memtop.supervisor.wire import Change, Checkpoint, Phase
from tests.run.reported import heard, reported


def step(update: int, loss: float = 1.0) -> dict[str, Any]:
    return {"type": "step", "update": update, "loss": loss, "sample_digest": f"d{update}", "time": 1.0}


def test_speed_is_that_of_the_newest_updates() -> None:
    progress = Progress()
    assert progress.rates() == (None, None)
    for n in range(1, 40):
        seconds = n if n < 19 else 18 + (n - 18) * 2
        progress = progress.after(
            0,
            reported({"type": "step", "update": n, "samples_seen": n * 8, "tokens": 80, "time": float(seconds), "loss": 1 / n}),
        )
    samples, tokens = progress.rates()
    assert samples == pytest.approx(4.0)
    assert tokens == pytest.approx(40.0)
    assert progress.best_loss == pytest.approx(1 / 39)


@pytest.mark.parametrize(
    ("update", "total", "waits", "expected"),
    [(7, None, False, False), (7, 9, False, False), (7, 8, False, True), (8, 8, False, True), (7, None, True, True)],
)
def test_a_run_whose_last_update_has_begun_is_at_its_end(update: int, total: int | None, waits: bool, expected: bool) -> None:
    progress = Progress()
    assert not progress.at_the_end
    progress = heard(progress, {"type": "plan", "total_updates": total})
    progress = heard(progress, step(update))
    progress = heard(progress, {"type": "save_failed", "update": update, "message": "no room", "waiting": waits})
    assert progress.at_the_end is expected


@pytest.mark.parametrize(
    ("end", "status", "before", "own", "phase"),
    [
        (End(outcome="finished"), 0, Phase.TRAINING, False, Phase.FINISHED),
        (End(outcome="finished", message=""), 0, Phase.TRAINING, False, Phase.FINISHED),
        (End(outcome="finished", saved=False, message="loss is NaN"), 0, Phase.STOPPING, False, Phase.FAILED),
        (End(outcome="stopped", saved=False, message="loss is NaN"), 1, Phase.STOPPING, False, Phase.FAILED),
        (End(outcome="stopped"), 0, Phase.STOPPING, False, Phase.STOPPED),
        (End(outcome="stopped"), 0, Phase.TRAINING, False, Phase.STOPPED),
        (End(outcome="failed", message="loss is NaN"), 1, Phase.TRAINING, False, Phase.FAILED),
        (None, 0, Phase.TRAINING, False, Phase.FAILED),
        (None, 0, Phase.TRAINING, True, Phase.FINISHED),
        (None, -9, Phase.TRAINING, True, Phase.FAILED),
        (None, -15, Phase.STOPPING, True, Phase.STOPPED),
        (None, None, Phase.TRAINING, False, Phase.FAILED),
    ],
)
def test_how_an_attempt_ended(
    tmp_path: Path, end: End | None, status: int | None, before: Phase, own: bool, phase: Phase
) -> None:
    log = tmp_path / "output.log"
    log.write_text("step 1\nRuntimeError: boom\n")
    found, reason, diagnosis = explain.outcome(read_log_end(log), end, status, before, external=own)
    assert found is phase
    assert (diagnosis is not None) == (phase is Phase.FAILED)
    if end and end.message:
        assert reason is not None
        assert "loss is NaN" in reason


def test_a_state_that_could_not_be_saved_is_not_hidden(tmp_path: Path) -> None:
    words = "stopped at update 7, not saved: 16 MiB needed, 7 MiB free in /runs/a; nothing saved yet"
    end = End(outcome="stopped", saved=False, message=words)
    for phase in (Phase.STOPPING, Phase.TRAINING):
        # Whatever its exit status, which an older trainer has left at 0.
        for status in (0, 1):
            assert explain.outcome(LogEnd(), end, status, phase, external=False)[:2] == (Phase.FAILED, words)
    silent = End(outcome="finished", saved=False)
    finished = explain.outcome(LogEnd(), silent, 1, Phase.TRAINING, external=False)
    assert finished[:2] == (Phase.FAILED, "finished, not saved: no reason given")


@pytest.mark.parametrize(
    ("reached", "saved", "words"),
    [
        (12, None, "12 updates since the last saved state (none) are done again"),
        (12, 9, "3 updates since the last saved state (at update 9) are done again"),
        (10, 9, "1 update since the last saved state (at update 9) is done again"),
        (9, 9, None),
        (3, 9, None),
        (None, 9, None),
        (None, None, None),
    ],
)
def test_repeated_updates_are_counted(reached: int | None, saved: int | None, words: str | None) -> None:
    state = None if saved is None else Checkpoint(path="", updates=saved, complete=True)
    assert explain.done_again(reached, state) == words


def test_repeated_updates_are_unknown_for_an_incomplete_state() -> None:
    assert explain.done_again(12, Checkpoint(path="", updates=None, complete=False)) is None


def test_a_save_that_failed_is_known_until_one_works() -> None:
    progress = Progress()
    progress = progress.after(1, reported({"type": "save_failed", "message": "of another rank"}))
    assert progress.unsaved is None
    progress = heard(progress, {"type": "save_failed", "message": "update 3 not saved"})
    assert progress.unsaved == "update 3 not saved"
    progress = heard(progress, {"type": "checkpoint", "updates": 6})
    assert progress.unsaved is None


def test_a_restart_says_what_it_changes() -> None:
    change = Change(assignments={"batch": "4", "accumulation": "8", "seed": "1"})
    assert explain.restart_reason(change) == "restart with batch 4, accumulation 8, seed 1"
    assert explain.restart_reason(Change()) == "restart"


def test_signals_have_names() -> None:
    assert explain.describe_status(-signal.SIGSEGV) == "killed by signal 11 (SIGSEGV)"
    assert explain.describe_status(None).startswith("exit status unknown")


def test_a_killed_rank_is_named_although_torchrun_names_the_one_that_lost_it(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    lines = [
        "Failures:",
        "[1]:",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : -9 (pid: 12)  (SIGKILL)",
        "------------------------------",
        "Root Cause (first observed failure):",
        "[0]:",
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : 1 (pid: 11)",
        "==============================",
    ]
    log.write_text("\n".join(lines))
    end = read_log_end(log)
    assert end.first_dead_rank == (1, -9)
    assert end.rank_lines == ("rank      : 1 (local_rank: 1)", "exitcode  : -9 (pid: 12)  (SIGKILL)")
    log.write_text("\n".join(lines).replace("-9", "1"))
    assert read_log_end(log).first_dead_rank == (0, 1)
