"""Supervisors that are killed at the worst moment: what they had read, decided or begun is not lost to the next one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from memtop.presets import load_presets, load_recipes, resolve
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.monitor.processes.proc import identify
from memtop.supervisor.recovery.policy import decide
from memtop.supervisor.run.clients.client import ask
from memtop.supervisor.run.clients.publish import Publisher
from memtop.supervisor.run.clients.server import ControlServer
from memtop.supervisor.run.ending import finish
from memtop.supervisor.run.intake import read_reports
from memtop.supervisor.run.pending_restart import Waiting
from memtop.supervisor.run.post_mortem import examine as autopsy
from memtop.supervisor.run.processes.attempt import ExitFile, ProcessFile
from memtop.supervisor.run.proposing import tried
from memtop.supervisor.run.record.configurations import Start
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, StateFile, create_run, write_json
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.record.view import known_runs, needs_supervisor, read_state
from memtop.supervisor.run.reports import Step
from memtop.supervisor.run.supervisor import Supervisor
from memtop.supervisor.run.taking_over import take_over
from memtop.supervisor.wire import Change, Phase, RunState, Stop
from tests.conftest import Runs
from tests.run.reported import reported
from tests.run.test_deaths import FRAGMENTED

SETTINGS = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])
HALF = msgspec.structs.replace(SETTINGS, batch=SETTINGS.batch // 2, accumulation=SETTINGS.accumulation * 2)
MIB = 1 << 20


# --- killed for real ------------------------------------------------------------------------------------------------------

# Dies where the first state.json of an attempt would be written.
KILLED = """
import asyncio, os, pathlib, signal, sys
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.supervisor import Supervisor

class Killed(Supervisor):
    def save_state(self):
        if self.attempt is None or self.attempt.number == 1 < int(sys.argv[2]):
            return super().save_state()
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(Killed(RunFolder(pathlib.Path(sys.argv[1]))).run(None))
"""


def test_a_program_whose_supervisor_died_before_it_told_of_it_is_found(runs: Runs) -> None:
    program = (sys.executable, "-c", "import time; time.sleep(20)")
    spec = RunSpec(name="a", created=1.0, settings=None, command=program, cwd=str(runs.root), memtop_version="0")
    folder = create_run(runs.path, spec, fresh=False)
    command = [sys.executable, "-c", KILLED, str(folder.path), "1"]
    assert subprocess.run(command, env=runs.environment, check=False, timeout=60).returncode == -signal.SIGKILL
    assert not folder.state_path.exists()
    document = runs.wait("a", lambda d: d["alive"])
    assert (document["supervisor_pid"], document["state"]) == (None, "starting")
    assert document["trainer_pid"] == json.loads((folder.attempt(1) / "process.json").read_text())["pid"]
    assert "the supervisor is gone, training continues" in document["reason"]
    # Nor does it look like something that nobody needs.
    (known,) = known_runs(runs.path)
    assert (known.alive, known.attempt, known.recorded[0].over) == (True, 1, False)
    runs.memtop("watch", "a", "--once")
    document = runs.wait("a", lambda d: d["state"] == "finished")
    assert (document["exit_status"], len(document["attempts"]), len(document["configurations"])) == (0, 1, 1)


def waits_for_its_restart(runs: Runs) -> tuple[RunFolder, int]:
    """A run that died of a fragmented allocator and is to come back in a moment; its supervisor."""
    runs.memtop("train", "--name", "a", "--detach", "--", sys.executable, "-c", FRAGMENTED)
    folder, deadline = RunFolder(runs.path / "a"), time.monotonic() + 60
    while (state := folder.state()) is None or state.waiting is None:
        assert time.monotonic() < deadline, state
        time.sleep(0.02)
    assert state.run.supervisor_pid is not None
    return folder, state.run.supervisor_pid


def test_a_restart_that_waits_outlives_its_supervisor(runs: Runs) -> None:
    folder, supervisor = waits_for_its_restart(runs)
    runs.kill(supervisor)
    document = runs.wait("a", lambda d: d["supervisor_pid"] is None)
    assert (document["state"], document["alive"], len(document["attempts"])) == ("restarting", False, 1)
    assert document["reason"] == "a restart is pending, but the supervisor is gone: memtop watch a starts a new one"
    assert document["proposal"]["begins"] is None, "nobody is there who would do it"
    assert needs_supervisor(folder)
    runs.memtop("watch", "a", "--once")
    document = runs.wait("a", lambda d: d["state"] == "finished")
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["failed", "finished"]
    assert document["attempts"][1]["reason"].startswith("gpu_oom_fragmented: restart with allocator")
    assert not needs_supervisor(folder)


def test_a_person_may_have_something_else_done_about_it(runs: Runs) -> None:
    _, supervisor = waits_for_its_restart(runs)
    runs.kill(supervisor)
    runs.memtop("restart", "a", "--headless")
    # As it was, without the remedy: it dies again, and of that it comes back by itself.
    told = [(attempt["reason"].partition(":")[0], attempt["outcome"]) for attempt in runs.show("a")["attempts"]]
    assert told == [("start", "failed"), ("restart", "failed"), ("gpu_oom_fragmented", "finished")]


def test_what_was_called_off_is_not_taken_up(runs: Runs) -> None:
    folder, supervisor = waits_for_its_restart(runs)
    ask(folder, lambda number: Stop(id=number))
    runs.kill(supervisor)
    assert not needs_supervisor(folder)
    document = runs.show("a")
    assert (document["state"], document["reason"]) == ("failed", "called off: it stays as it died")


def test_a_remedy_that_was_just_begun_is_not_begun_twice(runs: Runs) -> None:
    """The supervisor dies after it has started the second attempt and before it has told of it."""
    program = (sys.executable, "-c", FRAGMENTED.replace('print("done")', "__import__('time').sleep(20)"))
    spec = RunSpec(name="a", created=1.0, settings=None, command=program, cwd=str(runs.root), on_oom="auto", memtop_version="0")
    folder = create_run(runs.path, spec, fresh=False)
    command = [sys.executable, "-c", KILLED, str(folder.path), "2"]
    assert subprocess.run(command, env=runs.environment, check=False, timeout=60).returncode == -signal.SIGKILL
    left = folder.state()
    assert left is not None
    assert (left.run.attempt, left.waiting is not None) == (1, True)
    document = runs.wait("a", lambda d: d["alive"])
    assert document["state"] == "starting"
    runs.memtop("watch", "a", "--once")
    document = runs.wait("a", lambda d: d["state"] == "finished" and d["supervisor_pid"] is None)
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["failed", "finished"]
    assert [row["outcome"] for row in document["configurations"]] == ["gpu_oom_fragmented", "finished"]
    ledger = Ledger(folder.ledger_path, read_only=True)
    assert [record.starts[0].by_memtop for record in ledger.configurations()] == [False, True]
    ledger.close()


# --- what lies in the folder ----------------------------------------------------------------------------------------------


def make_run(place: Path) -> RunFolder:
    spec = RunSpec(name="a", created=1.0, settings=SETTINGS, cwd="/", on_oom="auto", memtop_version="0")
    return create_run(place, spec, fresh=False)


def supervisor_of(folder: RunFolder) -> Supervisor:
    """A supervisor at its very beginning, without a loop."""
    supervisor = Supervisor(folder)
    supervisor.ledger = Ledger(folder.ledger_path)
    server = ControlServer(folder.path / "socket", on_request=AsyncMock(), on_agent=Mock(), on_gone=Mock())
    supervisor.publisher = Publisher(supervisor.ledger, server)
    survival = supervisor.survival
    survival.open(supervisor.ledger.configurations(), supervisor._save_configuration, lambda: None)
    return supervisor


def next_supervisor(folder: RunFolder, change: Change | None = None) -> Supervisor:
    supervisor = supervisor_of(folder)
    take_over(supervisor, change)
    return supervisor


def tell(folder: RunFolder, attempt: int, *reports: dict[str, Any]) -> int:
    """What rank 0 of an attempt has said; the length of its journal then."""
    folder.attempt(attempt).mkdir(parents=True, exist_ok=True)
    (folder.attempt(attempt) / "command.json").touch()
    journal = folder.attempt(attempt) / "rank-0.jsonl"
    with journal.open("a") as file:
        for report in reports:
            file.write(json.dumps(report) + "\n")
    return journal.stat().st_size


HELLO = {"type": "hello", "time": 10.0, "rank": 0, "pid": 2, "offers": []}
PLAN = {"type": "plan", "time": 11.0, "updates": 0, "total_updates": 9, "device_uuid": None}
OOM = {
    "type": "oom",
    "time": 12.0,
    "survived": True,
    "update": 1,
    "message": "no memory",
    "error": "MemoryError",
    "rss_bytes": 300 * MIB,
}
SPLIT = {
    "type": "settings",
    "time": 13.0,
    "update": 1,
    "reason": "allocation failure",
    "changes": {"batch": HALF.batch, "accumulation": HALF.accumulation},
}
STEP = {
    "type": "step",
    "time": 14.0,
    "update": 1,
    "samples_seen": SETTINGS.effective_batch,
    "loss": 2.0,
    "rss_bytes": 200 * MIB,
}


def test_what_a_supervisor_had_only_read_is_concluded_by_the_next(tmp_path: Path) -> None:
    """Its offset is in the ledger, nothing of what followed from it is."""
    folder = make_run(tmp_path)
    ledger = Ledger(folder.ledger_path)
    ledger.add_attempt(1, "start", SETTINGS, 9.0)
    ledger.add_reports(1, 0, [cast(Step, reported(STEP))], tell(folder, 1, HELLO, PLAN, OOM, SPLIT, STEP))
    ledger.close()
    for _ in range(2):  # the second finds all of it done
        supervisor = next_supervisor(folder)
        assert supervisor.settings == HALF
        first, second = supervisor.survival.configurations.rows
        assert (first.outcome, first.until_update, first.since_update) == ("host_oom_alloc", 0, 1)
        assert first.peak is not None
        assert (first.peak.bytes, first.peak.batch, first.peak.failed) == (300 * MIB, SETTINGS.batch, True)
        assert (second.settings, second.since_update, second.outcome) == (HALF, 1, None)
        told = [event.kind for event in supervisor.ledger.events() if event.kind != "adopted"]
        assert told == ["survived", "settings"]
        supervisor.ledger.close()


def test_an_attempt_that_was_begun_and_not_told_of_has_its_configuration(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    first = supervisor_of(folder)
    first.ledger.add_attempt(1, "start", SETTINGS, 9.0)
    first.survival.configurations.begin_attempt(1, "start", SETTINGS)
    first.survival.configurations.end("host_oom_killed", 4, 3, died_of_memory=True)
    first.ledger.update_attempt(1, ended=10.0, outcome="failed")
    change = Change(
        assignments={"batch": str(HALF.batch), "accumulation": str(HALF.accumulation)}, reason="host_oom_killed at update 4"
    )
    reason = f"host_oom_killed at update 4: restart with batch {HALF.batch}, accumulation {HALF.accumulation}"
    first.ledger.add_attempt(2, reason, HALF, 20.0, 3)
    tell(folder, 2, HELLO)
    first.ledger.close()
    state = RunState(name="a", folder=str(folder.path), state=Phase.RESTARTING, created=1.0, attempt=1)
    pending = Change(assignments={"batch": "1"})
    file = StateFile(run=state, socket="", waiting=Waiting(change=change), waited_at=3, pending=pending)
    write_json(folder.state_path, file)
    supervisor = next_supervisor(folder)
    configurations = supervisor.survival.configurations
    assert [(row.attempt, row.settings, row.outcome) for row in configurations.rows] == [
        (1, SETTINGS, "host_oom_killed"),
        (2, HALF, None),
    ]
    assert configurations.records[-1].starts == (Start(attempt=2, by_memtop=True, saved_before=3),)
    # What state.json says of the attempt before is done with; what it knows of the run is not.
    assert (supervisor.survival.comeback, supervisor.pending, supervisor.phase) == (None, None, Phase.STARTING)
    assert supervisor.survival.waited_at == 3


def test_an_attempt_that_is_only_in_the_ledger_was_never_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path)
    first = supervisor_of(folder)
    first.ledger.add_attempt(1, "start", SETTINGS, 9.0)
    tell(folder, 1, HELLO)
    first.survival.configurations.begin_attempt(1, "start", SETTINGS)
    first.survival.configurations.end("host_oom_killed", 4, 3, died_of_memory=True)
    first.ledger.update_attempt(1, ended=10.0, outcome="failed")
    first.ledger.add_attempt(2, "restart", HALF, 20.0)
    first.ledger.close()
    folder.attempt(2).mkdir()
    state = RunState(name="a", folder=str(folder.path), state=Phase.TRAINING, reason="died", created=1.0, attempt=1)
    waiting = Waiting(change=Change(assignments={"batch": "4", "accumulation": "8"}), disk_bytes=5)
    write_json(folder.state_path, StateFile(run=state, socket="", waiting=waiting))
    supervisor = next_supervisor(folder)
    assert (supervisor.phase, supervisor.lifecycle.reason, supervisor.settings) == (Phase.RESTARTING, "died", SETTINGS)
    assert supervisor.survival.comeback is not None
    assert supervisor.survival.comeback.waiting == waiting
    assert [attempt.outcome for attempt in supervisor.ledger.attempts()] == ["failed", "failed"]
    assert len(supervisor.survival.configurations.rows) == 1
    # And so on, if this one dies as well.
    supervisor.save_state()
    kept = folder.state()
    assert kept is not None
    assert kept.waiting == waiting
    # When it comes back, the number of the one that never was is taken.
    monkeypatch.setattr("memtop.supervisor.run.supervisor.start_program", lambda *_, **__: 1)
    supervisor.come_back(supervisor.survival.comeback.change)
    assert supervisor.attempt is not None
    assert supervisor.attempt.number == 3
    assert supervisor.phase is Phase.STARTING


def test_a_death_that_the_ledger_could_not_take_is_no_stop(tmp_path: Path) -> None:
    """The restart was decided and written down beside a full disk's ledger; the attempt is still open there."""
    folder = make_run(tmp_path)
    first = supervisor_of(folder)
    first.ledger.add_attempt(1, "start", SETTINGS, 9.0)
    tell(folder, 1, HELLO)
    first.survival.configurations.begin_attempt(1, "start", SETTINGS)
    first.ledger.close()
    state = RunState(name="a", folder=str(folder.path), state=Phase.RESTARTING, reason="died", created=1.0, attempt=1)
    write_json(folder.state_path, StateFile(run=state, socket="", waiting=Waiting(change=Change(assignments={"batch": "4"}))))
    supervisor = next_supervisor(folder)
    assert (supervisor.phase, supervisor.ladder, supervisor.pending) == (Phase.TRAINING, None, None)


def test_a_restart_that_was_asked_for_is_carried_out_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor died after it had written down the end of the attempt."""
    folder = make_run(tmp_path)
    first = supervisor_of(folder)
    first.ledger.add_attempt(1, "start", SETTINGS, 9.0)
    tell(folder, 1, HELLO)
    first.survival.configurations.begin_attempt(1, "start", SETTINGS)
    first.ledger.update_attempt(1, ended=10.0, outcome="restarted")
    first.ledger.close()
    state = RunState(name="a", folder=str(folder.path), state=Phase.RESTARTING, created=1.0, attempt=1)
    write_json(folder.state_path, StateFile(run=state, socket="", pending=Change(assignments={"batch": "1"})))
    assert needs_supervisor(folder)
    assert read_state(folder).state is Phase.RESTARTING
    # Moved aside, it is not to come back beside the run that took its place.
    aside = RunFolder(folder.path.rename(folder.path.with_name("b")))
    assert not needs_supervisor(aside)
    assert read_state(aside).state is Phase.FAILED
    aside.path.rename(folder.path)
    monkeypatch.setattr("memtop.supervisor.run.supervisor.start_program", lambda *_, **__: os.getpid())
    supervisor = next_supervisor(folder)
    assert supervisor.settings is not None
    assert (supervisor.settings.batch, supervisor.phase) == (1, Phase.STARTING)
    kept = folder.state()
    assert kept is not None
    assert (kept.run.attempt, kept.restarts) == (2, False)


def test_a_program_that_was_being_ended_for_standing_still_is_ended(tmp_path: Path) -> None:
    folder = training(tmp_path).folder
    state = RunState(name="a", folder=str(folder.path), state=Phase.TRAINING, created=1.0, attempt=1)
    write_json(folder.state_path, StateFile(run=state, socket="", stalled="Bus error"))
    supervisor = next_supervisor(folder)
    assert supervisor.survival.stalled == "Bus error"
    assert supervisor.ladder is not None


def test_an_older_state_hides_no_living_trainer(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
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


# --- one supervisor -------------------------------------------------------------------------------------------------------


def training(tmp_path: Path) -> Supervisor:
    """One whose first attempt runs, as far as it knows."""
    supervisor = supervisor_of(make_run(tmp_path))
    supervisor.ledger.add_attempt(1, "start", SETTINGS, 9.0)
    tell(supervisor.folder, 1, HELLO)
    supervisor.ledger.close()
    return next_supervisor(supervisor.folder)


def test_a_full_disk_hides_nothing_of_what_the_program_says(tmp_path: Path) -> None:
    supervisor = training(tmp_path)
    supervisor.ledger._db.execute("PRAGMA query_only=ON")
    end = {"type": "end", "time": 15.0, "outcome": "failed", "message": "no room"}
    size = tell(supervisor.folder, 1, PLAN, OOM, SPLIT, STEP, end)
    read_reports(supervisor, to_the_end=True)
    assert supervisor.progress.end is not None
    assert supervisor.progress.end.message == "no room"
    assert supervisor.settings == HALF
    assert supervisor.ledger.metrics() == []
    assert [event.kind for event in supervisor.ledger.events()] == ["adopted"]
    supervisor.ledger._db.execute("PRAGMA query_only=OFF")
    supervisor._pay()
    supervisor.survival.configurations.keep()
    assert [event.kind for event in supervisor.ledger.events()] == ["adopted", "plan", "survived", "settings"]
    assert [row.update for row in supervisor.ledger.metrics()] == [1]
    assert supervisor.ledger.journal_offset(1, 0) == size
    assert len(supervisor.ledger.configurations()) == 2
    heard = supervisor.progress.heard
    read_reports(supervisor, to_the_end=True)
    assert supervisor.progress.heard == heard, "nothing is acted upon twice"


def test_what_the_ledger_never_got_of_an_ended_run_is_read_when_it_is_taken_up(tmp_path: Path) -> None:
    supervisor = training(tmp_path)
    supervisor.ledger.update_attempt(1, ended=16.0, outcome="failed")
    supervisor.ledger.close()
    tell(supervisor.folder, 1, PLAN, SPLIT, STEP)
    following = next_supervisor(supervisor.folder)
    assert following.settings == HALF
    assert [row.update for row in following.ledger.metrics()] == [1]


def test_steps_that_come_with_their_plan_are_shown(tmp_path: Path) -> None:
    supervisor = training(tmp_path)
    peer = Mock(subscribed=True)
    supervisor.publisher._server.peers.add(peer)
    tell(supervisor.folder, 1, PLAN, STEP)
    read_reports(supervisor)
    supervisor.publisher.tick(supervisor.state, None)
    sent = b"".join(call.args[0] for call in peer.send_encoded.call_args_list)
    (rows,) = [json.loads(line) for line in sent.splitlines() if json.loads(line)["type"] == "metrics"]
    assert (rows["reset_from"], [row["update"] for row in rows["rows"]]) == (1, [1])


def test_the_plan_tells_that_what_was_sampled_is_the_peak(tmp_path: Path) -> None:
    """On the CPU. The failure may come before the next sample."""
    supervisor = training(tmp_path)
    supervisor.survival._resident = 250 * MIB
    tell(supervisor.folder, 1, PLAN)
    read_reports(supervisor)
    (row,) = supervisor.survival.configurations.rows
    assert row.peak is not None
    assert row.peak.bytes == 250 * MIB


def test_a_gpus_failure_is_one_although_its_rank_is_read_later(tmp_path: Path) -> None:
    supervisor = training(tmp_path)
    tell(supervisor.folder, 1, {**PLAN, "device_uuid": "GPU-0"}, SPLIT)
    other = supervisor.folder.attempt(1) / "rank-1.jsonl"
    other.write_text(json.dumps({**OOM, "device_uuid": "GPU-1"}) + "\n")
    read_reports(supervisor)
    first, _ = supervisor.survival.configurations.rows
    assert (first.outcome, first.peak) == ("gpu_oom", None)


async def test_an_autopsy_that_fails_does_not_keep_the_end_from_being_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = training(tmp_path)

    def fails(*_: object) -> None:
        raise ValueError("a log that nobody has thought of")

    monkeypatch.setattr(autopsy, "examine", fails)
    await finish(supervisor, ExitFile(-9, 20.0))
    (attempt,) = supervisor.ledger.attempts()
    assert (attempt.outcome, attempt.exit_status, supervisor.phase) == ("failed", -9, Phase.FAILED)
    assert attempt.diagnosis is not None
    assert attempt.diagnosis["reason"] == "no_evidence"
    assert supervisor.lifecycle.reason == "killed by signal 9 (SIGKILL)"
    assert [event.message for event in supervisor.ledger.events() if event.kind == "warning"] == [
        "why attempt 1 ended could not be found out: ValueError('a log that nobody has thought of')"
    ]


async def test_a_decision_is_written_down_before_the_end_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever moment the supervisor dies, the next one either finds the attempt open or the restart waiting."""
    supervisor = training(tmp_path)
    tell(supervisor.folder, 1, PLAN, STEP)
    oom = Diagnosis(kind=Kind.HOST_OOM_KILLED, confidence=0.97, summary="killed for memory")
    monkeypatch.setattr(autopsy, "examine", lambda *_: oom)
    at_the_end: list[StateFile | None] = []
    write = supervisor.ledger.update_attempt

    def update_attempt(number: int, **values: Any) -> None:
        if "ended" in values:
            at_the_end.append(supervisor.folder.state())
        write(number, **values)

    monkeypatch.setattr(supervisor.ledger, "update_attempt", update_attempt)
    await finish(supervisor, ExitFile(-9, 20.0))
    (kept,) = at_the_end
    assert kept is not None
    assert kept.waiting is not None
    assert kept.waiting.change.assignments
    assert supervisor.phase is Phase.RESTARTING


def test_a_split_within_the_program_is_neither_a_restart_nor_a_success(tmp_path: Path) -> None:
    """Two restarts without a newer saved update, each of which first went on smaller by itself: a person is asked."""
    supervisor = training(tmp_path)
    configurations = supervisor.survival.configurations
    configurations.end("gpu_oom", 12, 10, died_of_memory=True)
    batches = iter((32, 16, 8, 4))
    for attempt in (2, 3):
        first, second = (msgspec.structs.replace(SETTINGS, batch=next(batches)) for _ in range(2))
        configurations.begin_attempt(attempt, "gpu_oom", first, by_memtop=True, saved=10)
        configurations.change(11, "smaller", second, died="gpu_oom", saved=10, changed_by=(attempt, attempt * 100.0))
        configurations.end("gpu_oom", 11, 10, died_of_memory=True)
    assert [row.attempt for row in configurations.rows] == [1, 2, 2, 3, 3]
    past = tried(configurations.records, SETTINGS, "")
    oom = Diagnosis(kind=Kind.GPU_OOM, confidence=0.97, summary="out of memory")
    found = decide(oom, past, (), "auto")
    assert (found.action, found.why) == ("ask", "2 restarts in a row brought no newer saved update")
    # One more saved update, and it may go on trying.
    last = configurations.records[-1]
    configurations.end("gpu_oom", 13, 12, died_of_memory=True)
    assert configurations.records[-1].starts != last.starts
    assert decide(oom, tried(configurations.records, SETTINGS, ""), (), "auto").why == "memtop knows no further remedy"
