"""How an attempt ended, what it had done, and the words for it."""

from __future__ import annotations

import json
import re
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memtop.cli import run
from memtop.supervisor.killed import describe_status, state_word
from memtop.supervisor.run import explain
from memtop.supervisor.run.post_mortem.log_end import LogEnd, read_log_end
from memtop.supervisor.run.processes.attempt import ExitFile, ProcessFile
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.rebuild import open_ledger
from memtop.supervisor.run.record.configurations import ConfigurationRecord, ConfigurationStart
from memtop.supervisor.run.record.folder import RunFolder, write_json
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.report.facts import read_facts
from memtop.supervisor.run.report.page import html
from memtop.supervisor.run.reports import End
from memtop.supervisor.run.view import read_state
from memtop.supervisor.wire import Change, Checkpoint, Configuration, Event, Phase
from tests.run.reported import heard, reported
from tests.tui.support import SETTINGS
from tests.tui.test_runs import stored


def step(update: int, loss: float = 1.0) -> dict[str, Any]:
    return {"type": "step", "update": update, "loss": loss, "sample_digest": f"d{update}", "time": 1.0}


def test_speed_is_that_of_the_newest_updates() -> None:
    progress = Progress()
    assert progress.speed() == (None, None, None)
    for n in range(1, 40):
        seconds = n if n < 19 else 18 + (n - 18) * 2
        progress = progress.after(
            0,
            reported({"type": "step", "update": n, "samples_seen": n * 8, "tokens": 80, "time": float(seconds), "loss": 1 / n}),
        )
    samples, tokens, pace = progress.speed()
    assert samples == pytest.approx(4.0)
    assert (tokens, pace) == (pytest.approx(40.0), 2.0)
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


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (
            "Traceback (most recent call last):\n  raise X\nmy.DataError: row 3 is empty\n",
            "exit status 1: my.DataError: row 3 is empty",
        ),
        (
            "step 1\n",
            "exit status 1: subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.",
        ),
    ],
)
def test_the_error_of_the_program_comes_before_that_of_its_launcher(tmp_path: Path, before: str, reason: str) -> None:
    """As `accelerate launch` prints it, and `trl sft`, which calls that."""
    log = tmp_path / "output.log"
    command = "Command '['python', 'train.py']' returned non-zero exit status 1."
    log.write_text(f"{before}Traceback (most recent call last):\n  raise Y\nsubprocess.CalledProcessError: {command}\n")
    assert explain.outcome(read_log_end(log), None, 1, Phase.TRAINING, external=True)[1] == reason


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
    assert describe_status(-signal.SIGSEGV) == "ended by signal 11 (SIGSEGV)"
    assert describe_status(None).startswith("exit status unknown")


@pytest.mark.parametrize(
    ("state", "ended_by", "word"),
    [
        ("failed", signal.SIGKILL, "killed"),
        ("failed", signal.SIGTERM, "killed"),
        ("failed", signal.SIGXCPU, "killed"),
        ("failed", signal.SIGSEGV, "failed"),
        ("failed", signal.SIGABRT, "failed"),
        ("failed", signal.SIGALRM, "failed"),  # a timer of its own
        ("failed", None, "failed"),
        ("stopped", signal.SIGINT, "stopped"),
        ("restarting", signal.SIGKILL, "restarting"),
    ],
)
def test_only_a_failure_by_a_signal_from_outside_is_a_kill(state: str, ended_by: int | None, word: str) -> None:
    assert state_word(state, ended_by) == word


@pytest.mark.parametrize(
    ("first_dead", "status", "number"),
    [
        (None, -9, 9),
        (None, 137, 9),  # what a shell makes of it
        (None, 139, 11),
        (None, 142, 14),
        (None, 265, 9),  # a batch system
        (None, 150, None),  # the program's own number
        (None, 1, None),
        (None, None, None),
        ((1, -9), 1, 9),
        ((1, 1), -15, None),  # torchrun was ended after its rank had failed by itself
    ],
)
def test_the_signal_of_the_end_is_that_of_the_rank_that_died_first(
    first_dead: tuple[int, int] | None, status: int | None, number: int | None
) -> None:
    assert LogEnd(first_dead_rank=first_dead).fatal_signal(status) == number


def test_a_killed_run_says_so_to_people_and_keeps_its_state_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, number in (("a", signal.SIGKILL), ("b", signal.SIGSEGV)):
        folder = stored(tmp_path, name, 1.0, Phase.FAILED, reason=describe_status(-number), ended_by=int(number))
        with closing(Ledger(folder.ledger_path)) as ledger:
            values = {"outcome": "failed", "exit_status": -number, "diagnosis": {"summary": "s", "ended_by": int(number)}}
            ledger.update_attempt(1, **values)
            ledger.add_event(Event(time=60.0, attempt=1, kind="failed", message="m", data={"ended_by": int(number)}))
            ended = {"outcome": "failed", "ended_by": int(number), "reason": "start", "settings": SETTINGS}
            for configuration in (1, 2):
                one = Configuration(number=configuration, attempt=1, started=1.0, **ended)
                ledger.save_configuration(ConfigurationRecord(configuration=one, starts=(ConfigurationStart(attempt=1),)))
    read = {
        "runs": ["runs"],
        "show": ["show", "a"],
        "compare": ["compare", "a", "b"],
        "markdown": ["report", "a", "--markdown", "-"],
    }
    shown = {}
    for place, arguments in read.items():
        assert run([*arguments, "--runs-dir", str(tmp_path)]) == 0
        shown[place] = capsys.readouterr().out
    shown["html"] = html(read_facts(RunFolder(tmp_path / "a")))
    assert [line.split()[:2] for line in shown["runs"].splitlines()[1:]] == [["b", "failed"], ["a", "killed"]]
    assert shown["show"].split()[:2] == ["a", "killed"]
    assert "start: killed, exit status -9" in shown["show"]
    assert shown["show"].count("killed (start)") == 2, "its configurations"
    assert "failed" not in shown["show"]
    assert ["state", "killed", "failed"] in [line.split() for line in shown["compare"].splitlines()]
    for place in ("markdown", "html"):
        assert "killed: ended by signal 9 (SIGKILL)" in shown[place]
        assert "killed, exit status -9" in shown[place]
        assert re.search(r"killed(?: \| |</td><td>)m\b", shown[place]), "the event of its end"
        assert "failed" not in shown[place].replace("Why it failed", "")
    for arguments in (["runs"], ["show", "a"], ["compare", "a", "b"]):
        assert run([*arguments, "--json", "--runs-dir", str(tmp_path)]) == 0
        document = json.loads(capsys.readouterr().out)
        one = document if arguments[0] == "show" else (document if arguments[0] == "runs" else document["runs"])[0]
        assert (one["state"], one["ended_by"]) == ("failed", 9)


def test_a_kill_that_no_supervisor_saw_is_a_kill(tmp_path: Path) -> None:
    folder = stored(tmp_path, "a", 1.0, Phase.TRAINING)
    folder.attempt(1).mkdir(parents=True)
    write_json(folder.attempt(1) / "exit.json", ExitFile(status=-9, ended=2.0))
    found = read_state(folder)
    assert (found.state, found.word, found.exit_status) == (Phase.FAILED, "killed", -9)
    folder = stored(tmp_path, "b", 1.0, Phase.STOPPING)
    folder.attempt(1).mkdir(parents=True)
    write_json(folder.attempt(1) / "exit.json", ExitFile(status=-9, ended=2.0))
    assert read_state(folder).word == "failed", "memtop may have sent it"


def test_a_program_that_memtop_ends_for_hanging_is_not_killed(tmp_path: Path) -> None:
    folder = stored(tmp_path, "a", 1.0, Phase.TRAINING)
    folder.attempt(1).mkdir(parents=True)
    write_json(folder.attempt(1) / "exit.json", ExitFile(status=-9, ended=2.0))
    file = folder.state()
    assert file is not None
    write_json(folder.state_path, replace(file, stalled="Bus error"))
    assert read_state(folder).word == "failed"
    # It was the attempt before that hung.
    folder.attempt(2).mkdir()
    write_json(folder.attempt(2) / "process.json", ProcessFile(1, 0, 1, 0))
    write_json(folder.attempt(2) / "exit.json", ExitFile(status=-9, ended=3.0))
    assert read_state(folder).word == "killed"


def test_a_kill_survives_the_loss_of_the_ledger(tmp_path: Path) -> None:
    for name, ended_by in (("a", 9), ("b", None)):
        folder = stored(tmp_path, name, 1.0, Phase.FAILED, reason="why", ended_by=ended_by)
        folder.attempt(1).mkdir(parents=True)
        write_json(folder.attempt(1) / "exit.json", ExitFile(status=-9, ended=2.0))
        folder.ledger_path.unlink()
        with closing(open_ledger(folder)[0]) as ledger:
            (attempt,) = ledger.attempts()
        assert (attempt.outcome, attempt.word) == ("failed", "killed" if ended_by else "failed")
        assert run(["show", name, "--runs-dir", str(tmp_path)]) == 0


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
