"""The effects that the rules request when a program ends or reports, and when memory grows. No
process, no file; the test sets the clock."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.monitor.processes.proc import has_loaded_torch
from memtop.supervisor.monitor.values import HostSample, MachineSnapshot
from memtop.supervisor.recovery.values import Trend, TrendKind, TrendSubject
from memtop.supervisor.run.effects import AddEvent, AskRanks, Examine, Launch, SaveState, UpdateAttempt
from memtop.supervisor.run.events import AgentAnswer, Answered, Examined, Launched, RemedyFacts, Sampled, SamplingFailed, States
from memtop.supervisor.run.model import CurrentAttempt, Model, move
from memtop.supervisor.run.notices import TOPICS, notices
from memtop.supervisor.run.pending_restart import NOTICE_SECONDS
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.state import run_state
from memtop.supervisor.run_memory import RoleMemory
from memtop.supervisor.wire import Change, Checkpoint, Outcome, Phase, Stage
from tests.run.brain import (
    GIB,
    HALF,
    HELLO,
    MIB,
    RUN,
    SETTINGS,
    STEP,
    Brain,
    die,
    end,
    proposal,
    restart,
    row,
    states,
    stop,
    taken_over,
    training,
)

OOM = {
    "type": "oom",
    "time": 991.0,
    "update": 1,
    "message": "no memory",
    "error": "E",
    "rss_bytes": 300 * MIB,
    "survived": True,
}


PLAN = {"type": "plan", "time": 990.5, "updates": 0, "total_updates": 9}


SPLIT = {
    "type": "settings",
    "time": 992.0,
    "update": 1,
    "reason": "allocation failure",
    "changes": {"batch": HALF.batch, "accumulation": HALF.accumulation},
}


def test_a_run_goes_through_its_life() -> None:
    model = Model(run=RUN)
    for phase in (Phase.STARTING, Phase.TRAINING, Phase.RESTARTING, Phase.STARTING, Phase.TRAINING, Phase.FINISHED):
        model = move(model, phase)
    assert model.phase is Phase.FINISHED
    assert model.effects.count(SaveState()) == 6, "each phase is written down"


@pytest.mark.parametrize(
    ("phase", "impossible"),
    [
        (Phase.CREATED, Phase.TRAINING),
        (Phase.FINISHED, Phase.TRAINING),
        (Phase.STOPPED, Phase.STOPPING),
        (Phase.RESTARTING, Phase.QUEUED),
        (Phase.TRAINING, Phase.STARTING),
    ],
)
def test_impossible_transitions_are_refused(phase: Phase, impossible: Phase) -> None:
    with pytest.raises(AssertionError, match=impossible.value):
        move(Model(run=RUN, phase=phase), impossible)


def test_a_decision_is_written_before_the_end_is() -> None:
    """Whenever the supervisor is killed, the next one finds either the attempt open or the restart
    waiting."""
    brain = training()
    die(brain)
    order = [type(effect) for effect in brain.effects if isinstance(effect, SaveState | UpdateAttempt)]
    assert order == [SaveState, UpdateAttempt, SaveState]
    assert brain.model.restart is not None
    assert brain.model.restart.change.assignments
    assert brain.model.phase is Phase.RESTARTING


def test_a_post_mortem_that_fails_does_not_keep_the_end_from_being_recorded() -> None:
    brain = training()
    end(brain, -9)
    assert brain.asked(Examine)
    nothing = Diagnosis(kind=Kind.NOT_MEMORY, reason="no_evidence", confidence=0.0, summary="why is not known")
    brain.tell(Examined(diagnosis=nothing, facts=RemedyFacts(), problem="why is not known"))
    values = brain.asked(UpdateAttempt)[-1].values
    assert (values["outcome"], values["exit_status"], values["diagnosis"]["reason"]) == ("failed", -9, "no_evidence")
    assert (brain.model.phase, brain.model.reason) == (
        Phase.FAILED,
        "ended by signal 9 (SIGKILL)",
    )
    assert brain.messages("warning") == ["why is not known"]


NOTHING = Diagnosis(kind=Kind.NOT_MEMORY, reason="killed_by_something", confidence=0.6, summary="it was killed")
BY_THE_KERNEL = Diagnosis(kind=Kind.HOST_OOM_KILLED, confidence=0.97, summary="killed for lack of memory")


@pytest.mark.parametrize(
    ("status", "found", "word", "ended_by"),
    [
        (-9, NOTHING, "killed", 9),
        (-9, BY_THE_KERNEL, "killed", 9),
        # The kernel has also killed what writes the exit status.
        (None, BY_THE_KERNEL, "killed", 9),
        (None, replace(BY_THE_KERNEL, confidence=0.4), "failed", None),
        # It has killed a data-loader worker, and the program has ended itself then.
        (1, replace(BY_THE_KERNEL, phase="data"), "failed", None),
        (-11, NOTHING, "failed", 11),
    ],
)
def test_a_kill_is_recorded_with_its_signal(status: int | None, found: Diagnosis, word: str, ended_by: int | None) -> None:
    brain = training(settings=None)
    end(brain, status)
    brain.tell(Examined(diagnosis=found, facts=RemedyFacts()))
    shown = run_state(brain.model)
    assert (shown.state, shown.word, shown.ended_by) == (Phase.FAILED, word, ended_by)
    values = brain.asked(UpdateAttempt)[-1].values
    assert (values["outcome"], values["diagnosis"].get("ended_by")) == ("failed", ended_by)
    (told,) = [one.event for one in brain.asked(AddEvent) if one.event.kind == "failed"]
    (notice,) = notices("a", [told], TOPICS, told.time)
    assert notice.title == ("a was killed" if word == "killed" else "a has failed")
    stop(brain)
    said = "was killed" if word == "killed" else "failed"
    assert re.fullmatch(rf"run 'a' {said} at [0-9-]{{10}} [0-9:]{{8}}; nothing to stop", brain.answers()[-1].message)
    # The next supervisor reads it from the ledger.
    again = taken_over(row(outcome="failed", ended=10.0, exit_status=status, diagnosis=values["diagnosis"]))
    assert run_state(again.model).word == word


def test_the_configuration_of_a_killed_attempt_says_so_until_it_goes_on() -> None:
    brain = taken_over(row(), reports=({"type": "step", "update": 7},))
    end(brain, -9)
    brain.tell(Examined(diagnosis=NOTHING, facts=RemedyFacts()))
    (ended,) = brain.model.configurations.rows
    assert (ended.outcome, ended.word, ended.ended_by) == ("failed", "killed", 9)
    restart(brain)
    brain.tell(Launched(number=2, started=20.0, states=states(7)))
    (again,) = brain.model.configurations.rows
    assert (again.word, again.ended_by) == (None, None)


@pytest.mark.parametrize("stalled", [False, True])
def test_a_program_that_memtop_ends_is_not_killed(stalled: bool) -> None:
    brain = training(settings=None, stalled="Bus error" if stalled else None)
    if not stalled:
        stop(brain)
        brain.report({"type": "end", "outcome": "stopped", "saved": False, "message": "not saved: no room"})
    end(brain, -9)
    brain.tell(Examined(diagnosis=NOTHING, facts=RemedyFacts()))
    shown = run_state(brain.model)
    assert (shown.state, shown.word, shown.ended_by) == (Phase.FAILED, "failed", None)


@pytest.mark.parametrize("external", [False, True])
def test_a_full_disk_is_waited_for_unless_the_command_would_begin_anew(external: bool) -> None:
    brain = training(settings=None if external else SETTINGS)
    die(brain, Kind.DISK_FULL, RemedyFacts(disk_free_bytes=0))
    if external:
        assert (brain.model.restart, brain.model.phase) == (None, Phase.FAILED)
        assert "so only you can start it again" in brain.messages("remedy")[0]
        return
    assert brain.model.restart is not None
    brain.tick(after=30.0, disk_free=0)
    assert brain.asked(Launch) == []
    brain.tick(disk_free=GIB)
    (launch,) = brain.asked(Launch)
    assert launch.settings == SETTINGS
    brain.tell(Launched(number=2, started=brain.wall, states=states(5)))
    # It had waited already, and nothing newer was saved: a person is asked.
    die(brain, Kind.DISK_FULL, RemedyFacts(disk_free_bytes=0))
    assert (brain.model.restart, brain.model.phase) == (None, Phase.FAILED)
    assert "has waited for space on the disk before" in brain.messages("remedy")[-1]


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.NOT_MEMORY])
def test_a_users_command_is_never_started_again_by_itself(kind: Kind) -> None:
    brain = training(settings=None)
    die(brain, kind, RemedyFacts(disk_free_bytes=100 * GIB))
    assert (brain.model.restart, brain.model.phase, brain.asked(Launch)) == (None, Phase.FAILED, [])
    assert proposal(brain).waiting == "your own command could begin from zero, so only you can start it again"
    brain.tick(after=100.0, disk_free=100 * GIB)
    assert brain.asked(Launch) == []


def test_a_restart_names_the_update_that_failed() -> None:
    brain = training(7)
    die(brain)
    assert brain.model.restart is not None
    assert (brain.model.restart.change.reason or "").startswith("gpu_oom at update 8")


def test_a_restart_that_waits_can_be_called_off_and_is_named() -> None:
    brain = training()
    die(brain)
    stop(brain)
    assert (brain.model.restart, brain.model.phase) == (None, Phase.FAILED)
    assert proposal(brain).begins is None
    assert brain.messages("failed")[-1] == "called off: it stays as it died"
    assert brain.tick(after=100.0) == []


@pytest.mark.parametrize("trains", [False, True])
def test_a_proposal_is_shown_until_the_next_attempt_has_come_further(trains: bool) -> None:
    brain = training()
    die(brain)
    assert proposal(brain).begins == brain.wall + NOTICE_SECONDS
    brain.tick(after=NOTICE_SECONDS)
    brain.tell(Launched(number=2, started=brain.wall, states=states(7)))
    assert proposal(brain).begins is None, "the restart has begun"
    if trains:
        brain.report({"type": "step", "time": brain.wall, "update": 8, "loss": 1.0})
    else:  # all updates had been done and saved
        brain.report({"type": "end", "time": brain.wall, "outcome": "finished", "saved": True})
        end(brain)
        assert brain.model.phase is Phase.FINISHED
    assert run_state(brain.model).proposal is None


def test_a_death_in_a_stop_is_not_followed_by_a_restart() -> None:
    brain = training()
    stop(brain)
    brain.report({"type": "end", "time": 999.0, "outcome": "stopped", "saved": False, "message": "not saved: disk full"})
    die(brain, Kind.DISK_FULL, RemedyFacts(disk_free_bytes=0))
    assert (brain.model.phase, brain.model.reason, brain.model.restart) == (Phase.FAILED, "not saved: disk full", None)
    assert brain.answers()[-1].outcome is Outcome.FAILED


def test_a_failure_on_the_cpu_is_the_peak_and_ends_the_configuration() -> None:
    brain = training(progress=Progress(), phase=Phase.STARTING)
    brain.report({"type": "hello", "time": 990.0, "pid": 2}, PLAN, OOM, SPLIT)
    first, second = brain.model.configurations.rows
    assert (first.outcome, first.until_update, first.since_update) == ("host_oom_alloc", 0, 1)
    assert first.peak is not None
    assert (first.peak.bytes, first.peak.batch, first.peak.failed) == (300 * MIB, SETTINGS.batch, True)
    assert (second.settings, second.since_update, second.outcome) == (HALF, 1, None)
    assert brain.model.settings == HALF


def test_a_failure_on_the_cpu_adds_what_has_grown_since_the_newest_sample() -> None:
    """The rank reports resident bytes, in which shared pages count in full."""
    roles = (
        RoleMemory(role="rank", processes=1, pss_bytes=180 * MIB),
        RoleMemory(role="loader worker", processes=1, pss_bytes=70 * MIB),
    )
    machine = MachineSnapshot(time=1.0, host=HostSample())
    brain = training(progress=Progress(), phase=Phase.STARTING)
    brain.report({"type": "hello", "time": 990.0, "pid": 2}, PLAN)
    brain.tell(Sampled(machine=machine, rss_bytes={2: 250 * MIB, 3: 140 * MIB}, run_memory=roles, pss_bytes={2: 180 * MIB}))
    (before,) = brain.model.configurations.rows
    assert before.peak is not None
    assert before.peak.bytes == (180 + 70) * MIB
    assert [rank.pss_bytes for rank in run_state(brain.model).ranks] == [180 * MIB]
    brain.report(OOM, SPLIT)
    first, _ = brain.model.configurations.rows
    assert first.peak is not None
    assert first.peak.bytes == (180 + 70 + 300 - 250) * MIB, "a loader worker has not grown"


def test_the_plan_shows_that_what_was_sampled_is_the_peak() -> None:
    """On the CPU. The failure may come before the next sample."""
    brain = training(progress=Progress(), host_bytes=250 * MIB)
    brain.report(PLAN)
    (row,) = brain.model.configurations.rows
    assert row.peak is not None
    assert row.peak.bytes == 250 * MIB


def test_a_failure_of_a_gpu_is_one_although_its_rank_is_read_later() -> None:
    brain = training(progress=Progress())
    brain.report({**PLAN, "device_uuid": "GPU-0"}, SPLIT)
    brain.report({**OOM, "device_uuid": "GPU-1"}, rank=1)
    first, _ = brain.model.configurations.rows
    assert (first.outcome, first.peak) == ("gpu_oom", None)


def test_samples_per_second_of_a_loop_that_counts_no_samples() -> None:
    brain = training(settings=None, progress=Progress())
    for update in range(1, 4):
        brain.report({"type": "step", "update": update, "step_seconds": 0.1, "time": 100.0 + 2 * update})
    assert run_state(brain.model).samples_per_second is None, "its batch is not known"
    brain.report({"type": "loop", "framework": "torch", "effective_batch": 12})
    state = run_state(brain.model)
    # Two seconds from one update to the next, whatever the step itself took.
    assert (state.pace_seconds, state.samples_per_second) == (2.0, 6.0)


def test_the_total_is_known_before_the_program_reports_it() -> None:
    """While torch is imported, from the saved state and the settings."""
    each = SETTINGS.effective_batch
    settings = replace(SETTINGS, target_samples=40 * each)
    begun = training(settings=settings, progress=Progress(), phase=Phase.STARTING, states=States())
    assert run_state(begun.model).total_updates == 40
    saved = Checkpoint(path="/x", updates=10, samples_seen=10 * each, complete=True)
    half = replace(settings, batch=SETTINGS.batch // 2)
    again = training(settings=half, progress=Progress(), phase=Phase.STARTING, states=States(newest=saved))
    assert run_state(again.model).total_updates == 10 + 60, "30 updates are left, each in two"
    for unknown in (replace(settings, target_samples=0, epochs=1.0), replace(settings, leave_out=((0, each),))):
        model = training(settings=unknown, progress=Progress(), phase=Phase.STARTING, states=States()).model
        assert run_state(model).total_updates is None


def test_settings_that_are_not_possible_are_a_warning() -> None:
    brain = training()
    brain.report({**SPLIT, "changes": {"batch": "many"}})
    assert brain.model.settings == SETTINGS
    assert "the program reports settings that are not possible" in brain.messages("warning")[0]


def test_reports_that_are_not_understood_harm_nothing() -> None:
    brain = training()
    brain.report({"type": "of the future", "time": 1.0}, {"type": "step", "update": "seven"}, {"no": "type"})
    assert (brain.model.phase, brain.model.progress.update, brain.model.progress.heard) == (Phase.TRAINING, 7, 3)


def test_sampling_that_fails_is_reported_once() -> None:
    brain = training()
    for _ in range(3):
        brain.tell(SamplingFailed("no driver"))
    assert (brain.messages("warning"), brain.model.warnings) == (["no driver"], {"sampling": "no driver"})
    brain.tell(Sampled(machine=MachineSnapshot(time=1.0, host=HostSample())))
    assert brain.model.warnings == {}


LEAK = Trend(
    what="anonymous memory of rank 0",
    subject=TrendSubject(kind=TrendKind.HOST_ANONYMOUS, rank=0),
    bytes_per_second=1e6,
    bytes_per_update=1e6,
    confidence=0.9999,
    full_in_seconds=60.0,
    full_at_update=9,
    message="anonymous memory of rank 0 grows",
)


def test_a_leak_ends_nothing_that_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtop.supervisor.run.rules.prevention.must_act", lambda *_, **__: LEAK)
    leaking: dict[str, Any] = {"trends": (LEAK,), "own_trends": (LEAK,)}
    brain = training(agents=frozenset({0}))
    # While saves fail, it is not even asked for one more.
    brain.report({"type": "save_failed", "update": 7, "message": "update 7 not saved"})
    brain.tick(**leaking)
    assert brain.asked(AskRanks) == []
    brain.report({"type": "checkpoint", "updates": 7})
    brain.tick(**leaking)
    (ask,) = brain.asked(AskRanks)
    no = AgentAnswer(rank=0, ok=False, message="not saved: 18 MiB needed, 3 MiB free")
    brain.tell(Answered(ask=ask.ask, answers=(no,)))
    assert brain.messages("leak")[-1] == "not restarted: its state could not be saved: not saved: 18 MiB needed, 3 MiB free"
    brain.tick(**leaking)
    assert (len(brain.asked(AskRanks)), brain.model.pending) == (1, None), "once in an attempt"
    brain.model = replace(brain.model, leak_handled=False)
    brain.tick(**leaking)
    brain.tell(Answered(ask=brain.asked(AskRanks)[-1].ask, answers=(replace(no, ok=True),)))
    assert brain.model.pending == Change(reason="leak: anonymous memory of rank 0 grows")


@pytest.mark.parametrize(
    ("settings", "on_oom", "why"),
    [(None, "auto", "it is an external command"), (SETTINGS, "ask", "--on-oom ask"), (SETTINGS, "stop", "--on-oom stop")],
)
def test_where_nothing_may_be_done_by_itself_a_leak_is_only_reported(
    monkeypatch: pytest.MonkeyPatch, settings: Settings | None, on_oom: str, why: str
) -> None:
    monkeypatch.setattr("memtop.supervisor.run.rules.prevention.must_act", lambda *_, **__: LEAK)
    brain = training(settings=settings, agents=frozenset({0}), run=replace(RUN, settings=settings, on_oom=on_oom))
    brain.tick(trends=(LEAK,), own_trends=(LEAK,))
    assert brain.messages("leak") == [f"anonymous memory of rank 0 grows; nothing is done about it: {why}"]
    assert (brain.asked(AskRanks), brain.model.pending) == ([], None)


def test_a_found_batch_is_shown_and_kept_by_a_restart() -> None:
    brain = training(settings=replace(SETTINGS, auto_batch=True))
    text = "batch auto: 4 fits (41 % of 24 GiB), 8 is too large (out of memory): 4 x 8"
    tried = [{"batch": 4, "share": 0.41, "own_share": 0.2}, {"batch": 8, "share": None, "own_share": None}]
    found = {"type": "batch_search", "message": text, "batch": 4, "accumulation": 8, "tried": tried}
    changes = {"batch": 4, "accumulation": 8, "auto_batch": False}
    settings = {"type": "settings", "time": 1.0, "update": 8, "reason": "batch search", "changes": changes}
    brain.report({**found, "message": "another rank's words"}, rank=1)
    assert run_state(brain.model).batch_search is None
    brain.report(found, settings)
    assert brain.messages("batch_search") == [text]
    shown = run_state(brain.model)
    assert shown.batch_search == text
    assert shown.settings == replace(SETTINGS, batch=4, accumulation=8)


def test_splits_that_were_found_for_unlike_gpus_are_shown_and_kept() -> None:
    settings = replace(SETTINGS, world_size=2, auto_batch=True)
    brain = training(settings=settings, run=replace(RUN, settings=settings))
    split = {"batch": 12, "accumulation": 2, "rank_splits": [[12, 2], [4, 2]]}
    found = {"type": "batch_search", "message": "batch auto: 12x2,4x2", **split, "samples_per_second": 31.2}
    changed = {
        "type": "settings",
        "time": 1.0,
        "update": 1,
        "reason": "batch search",
        "changes": {**split, "auto_batch": False},
    }
    brain.report(found, changed)
    (event,) = [effect.event for effect in brain.asked(AddEvent) if effect.event.kind == "batch_search"]
    assert (event.data["rank_splits"], event.data["samples_per_second"]) == (((12, 2), (4, 2)), 31.2)
    kept = run_state(brain.model).settings
    assert kept is not None
    assert (kept.splits, kept.auto_batch) == (((12, 2), (4, 2)), False)


# --- the stages before the first update -----------------------------------------------------------


def test_the_stages_of_memtops_own_trainer() -> None:
    brain = Brain(starting(SETTINGS))
    seen = [run_state(brain.model).stage]
    brain.tick(torch_loaded=True)
    seen.append(run_state(brain.model).stage)
    for phase in ("loading", "compiling", "data", "training"):
        brain.report({"type": "phase", "time": 10.0, "phase": phase})
        seen.append(run_state(brain.model).stage)
    words = ["starting", "importing torch", "loading the model", "compiling parts of DeepSpeed"]
    words += ["reading the data", "first update"]
    assert [stage and stage.value for stage in seen] == words
    brain.report(STEP)
    assert (run_state(brain.model).state, run_state(brain.model).stage) == (Phase.TRAINING, None)


@pytest.mark.parametrize(
    ("phase", "word"), [("evaluation", "evaluating"), ("sampling", "sampling"), ("save", "saving"), ("other", "training")]
)
def test_what_the_trainer_does_between_two_updates(phase: str, word: str) -> None:
    brain = training(20)
    brain.report({"type": "phase", "phase": phase})
    seen = run_state(brain.model)
    assert (seen.word, seen.state) == (word, Phase.TRAINING)
    brain.report({"type": "phase", "phase": "training"})
    assert run_state(brain.model).word == "training"
    brain.report({"type": "phase", "phase": phase})
    stop(brain)
    assert run_state(brain.model).word == "stopping"


def test_a_program_that_reports_no_stage_is_only_loading() -> None:
    brain = Brain(starting(None))
    assert run_state(brain.model).stage is Stage.STARTING
    brain.tick(torch_loaded=True)
    assert run_state(brain.model).stage is Stage.LOADING
    brain.report(HELLO, PLAN)
    assert run_state(brain.model).stage is Stage.FIRST_UPDATE, "its framework has told the plan"


def starting(settings: Settings | None) -> Model:
    attempt = CurrentAttempt(number=1, started=1.0)
    return Model(run=replace(RUN, settings=settings), settings=settings, phase=Phase.STARTING, attempt=attempt, alive=True)


def test_the_kernel_tells_whether_a_process_has_loaded_torch() -> None:
    code = "import sys; sys.stdin.read(1); import torch; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert not has_loaded_torch(program.pid)
        program.stdin.write(b"1")
        program.stdin.flush()
        program.stdout.readline()
        assert has_loaded_torch(program.pid)
        program.stdin.close()
    assert not has_loaded_torch(program.pid), "it is gone"
