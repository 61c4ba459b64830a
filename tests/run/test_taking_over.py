"""Supervisors that are killed at the worst moment: the next one has all that they read, decided or
began."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.monitor.processes.proc import identify
from memtop.supervisor.recovery.policy import decide
from memtop.supervisor.run.effects import AddEvent, AskRanks, CloseUnstarted, GiveUp, Launch, Signal
from memtop.supervisor.run.events import AgentConnected, Command, Launched, Requested, SupervisorStarted
from memtop.supervisor.run.model import Model
from memtop.supervisor.run.pending_restart import NOTICE_SECONDS, Waiting
from memtop.supervisor.run.processes.attempt import ProcessFile
from memtop.supervisor.run.record.configurations import ConfigurationStart
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, StateFile, create_run, find_run, write_json
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.rules.survival import tried
from memtop.supervisor.run.state import state_file
from memtop.supervisor.run.view import known_runs, needs_supervisor, read_state
from memtop.supervisor.wire import Change, CheckpointNow, Edit, FreeCache, Outcome, Phase, Proposal, Restart, RunState, Stop
from tests.conftest import UNTIL_GO, Runs
from tests.forking import run
from tests.recovery.injected import FATAL, TINY, inject
from tests.run.brain import BEGUN, HALF, HELLO, MIB, OOM, PLAN, RUN, SETTINGS, SPLIT, STEP, Brain, row, state_of, taken_over

# Dies where the first state.json of an attempt would be written.
KILLED = """
import asyncio, os, pathlib, signal, sys
from memtop.supervisor.run.performer import Performer
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.supervisor import Supervisor

plain = Performer.save_state

def save_state(self, model, **how):
    if model.number == 0:
        return plain(self, model, **how)
    os.kill(os.getpid(), signal.SIGKILL)

Performer.save_state = save_state
asyncio.run(Supervisor(RunFolder(pathlib.Path(sys.argv[1]))).run(None))
"""


# A restart by itself waits until the test has killed the supervisor.
PATIENT = """
    from memtop.supervisor.run.rules import survival
    survival.NOTICE_SECONDS = 600.0
"""


def test_a_restart_that_waits_outlives_its_supervisor(runs: Runs) -> None:
    inject(runs, FATAL, supervisor=PATIENT)
    words = ("--batch", "16", "--accum", "1", "--seq-len", "16", "--max-updates", "3")
    runs.memtop("train", "--name", "a", "--detach", *words, *TINY)
    document = runs.wait("a", lambda d: d["state"] == "restarting")
    assert document["proposal"]["begins"] is not None
    inject(runs, FATAL)
    runs.kill(document["supervisor_pid"])
    document = runs.wait("a", lambda d: d["supervisor_pid"] is None)
    assert (document["state"], document["alive"], len(document["attempts"])) == ("restarting", False, 1)
    assert document["reason"] == "a restart is pending, but the supervisor is gone: memtop watch a starts a new one"
    assert document["proposal"]["begins"] is None
    runs.memtop("watch", "a", "--once")
    document = runs.wait("a", lambda d: d["state"] == "finished" and d["supervisor_pid"] is None)
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["failed", "finished"]
    assert document["attempts"][1]["reason"].startswith("host_oom_alloc")
    assert document["settings"]["batch"] < 10
    ledger = Ledger(find_run("a", runs.path).ledger_path, read_only=True)
    assert [record.starts[0].by_memtop for record in ledger.configurations()] == [False, True]
    ledger.close()


def test_a_program_whose_supervisor_died_before_recording_it_is_found(runs: Runs) -> None:
    program = (sys.executable, "-c", UNTIL_GO)
    spec = RunSpec(name="a", created=1.0, settings=None, command=program, cwd=str(runs.root), memtop_version="0")
    folder = create_run(runs.path, spec, fresh=False)
    command = [sys.executable, "-c", KILLED, str(folder.path)]
    assert run(command, env=runs.environment, timeout=120).returncode == -signal.SIGKILL
    assert not folder.state_path.exists()
    document = runs.wait("a", lambda d: d["alive"])
    assert (document["supervisor_pid"], document["state"]) == (None, "starting")
    assert document["trainer_pid"] == json.loads((folder.attempt(1) / "process.json").read_text())["pid"]
    assert "the supervisor is gone, training continues" in document["reason"]
    # Nor does it look like something that nobody needs.
    (known,) = known_runs(runs.path)
    assert (known.alive, known.attempt, known.recorded[0].over) == (True, 1, False)
    runs.memtop("watch", "a", "--once")
    (runs.root / "go").touch()
    document = runs.wait("a", lambda d: d["state"] == "finished")
    assert (document["exit_status"], len(document["attempts"]), len(document["configurations"])) == (0, 1, 1)


@pytest.mark.parametrize(("status", "state"), [(0, "finished"), (3, "failed")])
def test_a_program_that_ended_without_a_supervisor_says_how(runs: Runs, status: int, state: str) -> None:
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, "-c", f"{UNTIL_GO}\nraise SystemExit({status})")
    runs.kill(runs.wait("a", lambda d: d["alive"] and d["supervisor_pid"] is not None)["supervisor_pid"])
    runs.wait("a", lambda d: d["supervisor_pid"] is None)
    (runs.root / "go").touch()
    document = runs.wait("a", lambda d: not d["alive"] and d["ended"] is not None)
    assert document["state"] == state
    words = f"the program ended, and no supervisor has recorded that (exit status {status}): memtop restart a goes on"
    assert document["reason"] == words


DEAD = BEGUN.end("host_oom_killed", 4, 3, died_of_memory=True)


def test_reports_that_a_supervisor_had_only_read_are_handled_by_the_next() -> None:
    """The ledger has the position in the journal, and nothing that the rules made of the
    reports."""
    reports = (HELLO, PLAN, OOM, SPLIT, STEP)
    known: dict[str, Any] = {"records": BEGUN.records}
    for again in range(2):  # the second finds all of it done
        brain = taken_over(row(), reports=reports, **known)
        assert brain.model.settings == HALF
        first, second = brain.model.configurations.rows
        assert (first.outcome, first.until_update, first.since_update) == ("host_oom_alloc", 0, 1)
        assert first.peak is not None
        assert (first.peak.bytes, first.peak.batch, first.peak.failed) == (300 * MIB, SETTINGS.batch, True)
        assert (second.settings, second.since_update, second.outcome) == (HALF, 1, None)
        written = [event.event for event in brain.asked(AddEvent) if event.event.kind != "adopted"]
        assert [event.kind for event in written] == ([] if again else ["survived", "settings"])
        announced = {(event.kind, event.data["time"]) for event in written}
        known = {"records": brain.model.configurations.records, "announced": frozenset(announced)}
        brain.report(STEP)
        assert brain.model.phase is Phase.TRAINING


def test_an_attempt_that_was_begun_and_not_written_about_has_its_configuration() -> None:
    change = Change(
        assignments={"batch": str(HALF.batch), "accumulation": str(HALF.accumulation)}, reason="host_oom_killed at update 4"
    )
    first = row(ended=10.0, outcome="failed")
    second = row(2, HALF, reason="restart", change=change, started=20.0, start_updates=3)
    pending = Change(assignments={"batch": "1"})
    state = state_of(Phase.RESTARTING, waiting=Waiting(change=change), waited_at=3, pending=pending)
    brain = taken_over(first, second, records=DEAD.records, state=state)
    found = brain.model.configurations
    assert [(one.attempt, one.settings, one.outcome) for one in found.rows] == [
        (1, SETTINGS, "host_oom_killed"),
        (2, HALF, None),
    ]
    assert found.records[-1].starts == (ConfigurationStart(attempt=2, by_memtop=True, saved_before=3),)
    # What state.json says about the attempt before no longer counts. What it says about the run
    # does.
    assert (brain.model.restart, brain.model.pending, brain.model.phase) == (None, None, Phase.STARTING)
    assert brain.model.waited_at == 3


def test_an_attempt_that_is_only_in_the_ledger_was_never_begun() -> None:
    """Its supervisor was killed before it could start the program. The next supervisor does what
    was decided."""
    waiting = Waiting(change=Change(assignments={"batch": "4", "accumulation": "8"}), disk_bytes=5)
    state = state_of(Phase.TRAINING, reason="died", waiting=waiting)
    first, second = row(ended=10.0, outcome="failed"), row(2, HALF, started=20.0)
    brain = taken_over(first, second, records=DEAD.records, state=state, unstarted=frozenset({2}))
    assert (brain.model.phase, brain.model.reason, brain.model.settings) == (Phase.RESTARTING, "died", SETTINGS)
    assert brain.model.restart is not None
    assert brain.model.restart.waiting == waiting
    assert [effect.number for effect in brain.asked(CloseUnstarted)] == [2]
    assert len(brain.model.configurations.rows) == 1
    # And again, if this one is killed as well.
    assert state_file(brain.model, "", None).waiting == waiting
    # The number of the attempt that never was is taken.
    brain.tick(after=NOTICE_SECONDS, disk_free=5)
    brain.tick(disk_free=5)
    assert [launch.number for launch in brain.asked(Launch)] == [3]


def test_a_restart_is_carried_out_although_its_attempt_was_never_begun() -> None:
    """The supervisor was killed between `command.json` and the shim."""
    state = state_of(Phase.RESTARTING, pending=Change(assignments={"batch": "1"}))
    first, second = row(ended=10.0, outcome="restarted"), row(2, replace(SETTINGS, batch=1), started=20.0)
    brain = taken_over(first, second, records=BEGUN.records, state=state, unstarted=frozenset({2}))
    (launch,) = brain.asked(Launch)
    assert (launch.number, launch.settings and launch.settings.batch) == (3, 1)


WAITING = state_of(Phase.RESTARTING, reason="died", waiting=Waiting(change=Change(assignments={"batch": "4"})))


def test_a_person_may_have_something_else_done_than_what_waits() -> None:
    change = Change(assignments={"batch": "2"})
    brain = taken_over(row(ended=10.0, outcome="failed"), records=DEAD.records, state=WAITING, change=change)
    (launch,) = brain.asked(Launch)
    assert launch.change == change
    brain.tell(Launched(number=2, started=20.0))
    assert state_file(brain.model, "", None).waiting is None


def test_a_cancelled_restart_is_not_resumed() -> None:
    brain = taken_over(row(ended=10.0, outcome="failed"), records=DEAD.records, state=WAITING)
    brain.tell(Requested(client=1, request=Stop(id=1)))
    kept = state_file(brain.model, "", None)
    assert (kept.restarts, kept.run.state, kept.run.reason) == (False, Phase.FAILED, "called off: it stays as it died")
    brain.tick(after=100.0)
    assert brain.asked(Launch) == []


OFFERS = {**HELLO, "offers": ["free_cache", "checkpoint", "stop", "change"]}


HALVED = Change(assignments={"batch": str(HALF.batch), "accumulation": str(HALF.accumulation)})


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (FreeCache(id=1), "free_cache"),
        (CheckpointNow(id=1), "checkpoint"),
        (Stop(id=1), "stop"),
        (Restart(id=1), "stop"),
        (Edit(id=1, change=HALVED), "change"),
    ],
)
@pytest.mark.parametrize("connects", [True, False])
def test_a_request_waits_until_the_ranks_have_connected_to_the_new_supervisor(
    request_: Command, name: str, connects: bool
) -> None:
    brain = taken_over(row(), records=BEGUN.records, reports=(OFFERS, PLAN, STEP), state=state_of(Phase.TRAINING))
    brain.tell(Requested(client=1, request=request_))
    assert (brain.answers(), brain.asked(AskRanks), brain.model.ladder) == ([], [], None)
    if connects:
        brain.tell(AgentConnected(0))
        assert [ask.name for ask in brain.asked(AskRanks)] == [name]
        assert brain.answers()[0].outcome is Outcome.ACCEPTED
        if isinstance(request_, Edit):
            words = f"from the next update on: {SETTINGS.split_text} -> {HALF.split_text}; effective batch"
            assert brain.answers()[0].message.startswith(words)
        return
    brain.tick(after=9.0)
    assert brain.answers() == []
    brain.tick(after=1.1)
    # None of them is there: it ends with signals, or is refused.
    expected = Outcome.ACCEPTED if isinstance(request_, Stop | Restart) else Outcome.REFUSED
    assert [answer.outcome for answer in brain.answers()][:1] == [expected]
    assert brain.model.held == ()


def test_a_request_that_the_program_cannot_carry_out_waits_for_nobody() -> None:
    brain = taken_over(row(settings=None), reports=(HELLO,), state=state_of(Phase.TRAINING))
    brain.tell(Requested(client=1, request=Stop(id=1)))
    assert brain.model.ladder is not None
    brain.tell(Requested(client=1, request=CheckpointNow(id=2)))
    assert brain.answers()[-1].outcome is Outcome.REFUSED


def test_a_death_that_the_ledger_could_not_take_is_no_stop() -> None:
    """The restart was decided and written although the disk was too full for the ledger; the
    attempt is still open there."""
    waiting = Waiting(change=Change(assignments={"batch": "4"}))
    brain = taken_over(row(), records=BEGUN.records, state=state_of(Phase.RESTARTING, reason="died", waiting=waiting))
    assert (brain.model.phase, brain.model.ladder, brain.model.pending) == (Phase.TRAINING, None, None)


def test_a_requested_restart_is_carried_out_by_the_next_supervisor() -> None:
    """The supervisor was killed after it had written the end of the attempt."""
    state = state_of(Phase.RESTARTING, pending=Change(assignments={"batch": "1"}))
    brain = taken_over(row(ended=10.0, outcome="restarted"), records=BEGUN.records, state=state)
    brain.tell(Launched(number=2, started=20.0))
    assert brain.model.settings is not None
    assert (brain.model.settings.batch, brain.model.phase) == (1, Phase.STARTING)
    kept = state_file(brain.model, "", None)
    assert (kept.run.attempt, kept.restarts) == (2, False)


@pytest.mark.parametrize("kind", ["pending", "waiting"])
def test_a_run_whose_restart_waits_needs_a_supervisor(tmp_path: Path, kind: str) -> None:
    spec = RunSpec(name="a", created=1.0, settings=SETTINGS, cwd="/", on_oom="auto", memtop_version="0")
    folder = create_run(tmp_path, spec, fresh=False)
    proposal = Proposal(diagnosis=Diagnosis(kind=Kind.GPU_OOM, confidence=1.0, summary="died"), begins=5.0)
    run = RunState(name="a", folder=str(folder.path), state=Phase.RESTARTING, created=1.0, attempt=1, proposal=proposal)
    folder.attempt(1).mkdir()
    change: Any = {"pending": Change(), "waiting": Waiting(change=Change())}[kind]
    write_json(folder.state_path, StateFile(run=run, socket="", **{kind: change}))
    assert needs_supervisor(folder)
    state = read_state(folder)
    assert state.state is Phase.RESTARTING
    assert state.reason == "a restart is pending, but the supervisor is gone: memtop watch a starts a new one"
    assert state.proposal is not None
    assert state.proposal.begins is None, "nobody is there who would do it"
    # Moved aside, it must not restart in addition to the run that took its place.
    aside = RunFolder(folder.path.rename(folder.path.with_name("b")))
    assert not needs_supervisor(aside)
    assert read_state(aside).state is Phase.FAILED


def test_a_program_that_was_being_ended_for_standing_still_is_ended() -> None:
    brain = taken_over(row(), records=BEGUN.records, state=state_of(Phase.TRAINING, stalled="Bus error"))
    assert brain.model.stalled == "Bus error"
    assert brain.model.ladder is not None


@pytest.mark.parametrize("phase", [Phase.STOPPING, Phase.RESTARTING])
def test_a_stop_that_was_begun_goes_on_with_signals(phase: Phase) -> None:
    brain = taken_over(row(), records=BEGUN.records, state=state_of(phase))
    assert brain.model.phase is phase
    assert [effect.name for effect in brain.tick() if isinstance(effect, Signal)] == ["SIGINT", "SIGCONT"]


def test_a_change_for_a_run_that_was_being_stopped_makes_it_a_restart() -> None:
    change = Change(assignments={"batch": "1"})
    brain = taken_over(row(), records=BEGUN.records, state=state_of(Phase.STOPPING), change=change)
    assert (brain.model.phase, brain.model.pending) == (Phase.RESTARTING, change)
    assert state_file(brain.model, "", None).pending == change


@pytest.mark.parametrize(("waits", "phase", "begins"), [(False, None, False), (True, None, True), (True, Phase.STOPPED, False)])
def test_after_a_kill_no_run_is_started_that_had_not_begun(waits: bool, phase: Phase | None, begins: bool) -> None:
    brain = Brain(Model(run=replace(RUN, waits=waits), settings=SETTINGS, supervisor_pid=7))
    state = state_of(phase, attempt=0) if phase is not None else None
    brain.tell(SupervisorStarted(state=state, after_kill=True))
    assert (brain.model.phase is Phase.QUEUED, bool(brain.asked(GiveUp))) == (begins, not begins)
    assert brain.asked(Launch) == []


def test_a_change_that_cannot_be_ends_the_supervisor_that_was_started_for_it() -> None:
    change = Change(assignments={"batch": "0"})
    brain = taken_over(row(ended=10.0, outcome="stopped"), records=BEGUN.records, change=change)
    (failure,) = brain.asked(GiveUp)
    assert failure.usage
    assert brain.asked(Launch) == []


def test_an_older_state_hides_no_living_trainer(tmp_path: Path) -> None:
    spec = RunSpec(name="a", created=1.0, settings=SETTINGS, cwd="/", memtop_version="0")
    folder = create_run(tmp_path, spec, fresh=False)
    state = RunState(
        name="a",
        folder=str(folder.path),
        state=Phase.FAILED,
        created=1.0,
        attempt=1,
        reason="died",
        exit_status=1,
        # Of one that was killed while it waited for room.
        unsaved="finished update 9, waiting for room",
        warnings=("something else", "finished update 9, waiting for room"),
    )
    write_json(folder.state_path, StateFile(run=state, socket=""))
    folder.attempt(1).mkdir()
    assert [run.alive for run in known_runs(tmp_path)] == [False]
    with subprocess.Popen(["sleep", "60"]) as trainer:
        found = identify(trainer.pid)
        assert found is not None
        folder.attempt(2).mkdir()
        assert read_state(folder).warnings == ("something else",)
        # The folder is there a moment before the program is.
        assert [run.alive for run in known_runs(tmp_path)] == [False]
        write_json(folder.attempt(2) / "process.json", ProcessFile(trainer.pid, found.started_ticks, trainer.pid, 0))
        assert needs_supervisor(folder)
        assert [(run.alive, run.attempt) for run in known_runs(tmp_path)] == [(True, 2)]
        now = read_state(folder)
        assert (now.state, now.alive, now.attempt, now.trainer_pid) == (Phase.STARTING, True, 2, trainer.pid)
        assert (now.exit_status, now.log_path) == (None, str(folder.attempt(2) / "output.log"))
        assert (now.unsaved, now.warnings) == (None, ("something else",))
        trainer.kill()
    assert not needs_supervisor(folder)


def test_a_split_within_the_program_is_neither_a_restart_nor_a_success() -> None:
    """Neither of two restarts saved a newer update, and each attempt first continued with a smaller
    batch by itself: memtop asks a person."""
    known = BEGUN.end("gpu_oom", 12, 10, died_of_memory=True)
    batches = iter((32, 16, 8, 4))
    for attempt in (2, 3):
        first, second = (replace(SETTINGS, batch=next(batches)) for _ in range(2))
        known = known.begin_attempt(attempt, "gpu_oom", first, 9.0, by_memtop=True, saved=10)
        known = known.change(11, "smaller", second, died="gpu_oom", saved=10, changed_by=(attempt, attempt * 100.0))
        known = known.end("gpu_oom", 11, 10, died_of_memory=True)
    assert [one.attempt for one in known.rows] == [1, 2, 2, 3, 3]
    past = tried(known.records)
    oom = Diagnosis(kind=Kind.GPU_OOM, confidence=0.97, summary="out of memory")
    found = decide(oom, past, (), "auto")
    assert (found.action, found.why) == ("ask", "2 restarts in a row brought no newer saved update")
    # One more saved update, and it may go on trying.
    last = known.records[-1]
    known = known.end("gpu_oom", 13, 12, died_of_memory=True)
    assert known.records[-1].starts != last.starts
    assert decide(oom, tried(known.records), (), "auto").why == "memtop knows no further remedy"
