"""The effects that the rules request for each event. No process, no file; the test sets the
clock."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.errors import UsageError
from memtop.supervisor.monitor.values import HostSample, MachineSnapshot
from memtop.supervisor.run import explain
from memtop.supervisor.run.effects import (
    AskRanks,
    ClearLeftovers,
    Examine,
    HoldState,
    Launch,
    ReleaseState,
    SaveState,
    Signal,
    Target,
    UpdateAttempt,
)
from memtop.supervisor.run.events import (
    AgentAnswer,
    Answered,
    Examined,
    Launched,
    LaunchRefused,
    LeftoversCleared,
    LeftoversFound,
    NamedProcess,
    ProgramEnded,
    RemedyFacts,
    Requested,
    Sampled,
    SamplingFailed,
    Signalled,
    StateHeld,
    StoodStill,
)
from memtop.supervisor.run.model import AttemptStage, CurrentAttempt, Model, move
from memtop.supervisor.run.pending_restart import NOTICE_SECONDS, PendingRestart, Waiting
from memtop.supervisor.run.post_mortem.log_end import LogEnd
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.rules.attempts import foreseen
from memtop.supervisor.run.state import run_state
from memtop.supervisor.run.stop_ladder import Waits
from memtop.supervisor.run.stop_ladder import begin as begin_ladder
from memtop.supervisor.wire import (
    Change,
    CheckpointNow,
    Outcome,
    Phase,
    Proposal,
    Restart,
    Stop,
    Trend,
    TrendKind,
    TrendSubject,
)
from tests.run.brain import GIB, HALF, MIB, RUN, SETTINGS, Brain, states, training
from tests.run.reported import heard

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


# --- phases ---------------------------------------------------------------------------------------


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
        (Phase.RESTARTING, Phase.FINISHED),
        (Phase.TRAINING, Phase.STARTING),
    ],
)
def test_impossible_transitions_are_refused(phase: Phase, impossible: Phase) -> None:
    with pytest.raises(AssertionError, match=impossible.value):
        move(Model(run=RUN, phase=phase), impossible)


# --- stopping -------------------------------------------------------------------------------------


def rungs(brain: Brain, *waits: float) -> list[str]:
    """The signals that are sent at these moments, each counted from the one before."""
    sent = []
    for wait in waits:
        for effect in brain.tick(after=wait):
            if isinstance(effect, Signal) and effect.target is not Target.STOPPED:
                sent.append(effect.name)
                brain.tell(Signalled(name=effect.name, processes=(NamedProcess(5, "python"),)))
    return sent


def stop(brain: Brain) -> None:
    brain.tell(Requested(client=1, request=Stop(id=3), states=brain.model.states))


def test_the_ladder_climbs_only_as_time_passes() -> None:
    ladder = begin_ladder(Waits(graceful=60, terminate=40), 0.0, asked=True)
    names = []
    for now in (0.0, 59.9, 60.0, 61.0, 99.9, 100.0, 5000.0):
        ladder, rung = ladder.next(now)
        names.append(rung.name if rung else None)
    assert names == [None, None, "SIGTERM", None, None, "SIGKILL", "SIGKILL"]


def test_a_stop_waits_for_a_save_as_long_as_they_have_taken() -> None:
    plain = Waits()
    assert plain.stretched(1.0, 2.0) == plain.stretched(1.0, 2.0, saves_on_sigterm=True) == plain
    assert plain.stretched(100.0).graceful == 230.0
    external = plain.stretched(1.0, 150.0)
    assert (external.graceful, external.terminate) == (330.0, plain.terminate)
    ours = plain.stretched(1.0, 150.0, saves_on_sigterm=True)
    assert (ours.graceful, ours.terminate, ours.interrupt, ours.kill) == (330.0, 330.0, plain.interrupt, plain.kill)
    assert ours.why == "a save or an evaluation has taken it 150 s"
    # A program that hangs is ended, however long it has been silent before.
    assert plain.stretched(1.0, 1e9, saves_on_sigterm=True).terminate == 30.0 + 2 * 1800.0
    assert plain.stretched(5000.0, 1e9).graceful == 30.0 + 2 * 5000.0


@pytest.mark.parametrize("work", ["checkpoint", "evaluation"])
def test_a_trainer_that_saves_for_long_is_not_killed_in_the_middle_of_it(work: str) -> None:
    brain = training(agents=frozenset({0}))
    if work == "checkpoint":
        # The supervisor may have begun after the update before it.
        progress = heard(replace(brain.model.progress, step=None), {"type": "checkpoint", "updates": 7, "seconds": 150.0})
    else:
        progress = heard(brain.model.progress, {"type": "evaluation", "update": 7, "time": 90000.0, "clock": 1140.0})
    brain.model = replace(brain.model, progress=replace(progress, offers=frozenset({"stop"})))
    stop(brain)
    assert [ask.name for ask in brain.asked(AskRanks)] == ["stop"]
    assert rungs(brain, 329.0, 1.0, 329.0, 1.0) == ["SIGTERM", "SIGKILL"]
    assert brain.messages("stop")[0].endswith("SIGTERM follows in 330 s (a save or an evaluation has taken it 150 s)")


@pytest.mark.parametrize("why", ["external command", "stands still"])
def test_a_program_that_does_not_save_on_a_signal_is_not_given_longer(why: str) -> None:
    brain = training(settings=None if why == "external command" else SETTINGS)
    brain.model = replace(brain.model, progress=replace(brain.model.progress, longest_pause=150.0))
    if why == "stands still":
        brain.tell(StoodStill("CUDA out of memory"))
    else:
        stop(brain)
    assert rungs(brain, 0.0, 15.0, 40.0) == ["SIGINT", "SIGTERM", "SIGKILL"]


def test_a_program_that_declines_to_stop_gets_signals_at_once_but_only_once() -> None:
    brain = training(agents=frozenset({0}))
    stop(brain)
    no = Answered(ask=brain.asked(AskRanks)[0].ask, answers=(AgentAnswer(rank=0, ok=False, message="no"),))
    brain.tell(no)
    brain.tell(no)
    assert rungs(brain, 0.2, 0.2) == ["SIGINT"]
    assert brain.messages("stop")[-1] == "SIGINT sent to pid 5 (python); SIGTERM follows in 15 s"


def test_a_stop_says_what_it_did_and_answers_even_if_the_program_survives_it() -> None:
    brain = training(settings=None)
    stop(brain)
    assert rungs(brain, 0.0, 15.0, 40.0) == ["SIGINT", "SIGTERM", "SIGKILL"]
    said = [(answer.outcome, answer.message) for answer in brain.answers()]
    assert said[-1] == (Outcome.ACCEPTED, "SIGKILL sent to pid 5 (python)")
    survivor = copy.deepcopy(brain)
    end(brain, -9)
    last = brain.answers()[-1]
    assert (last.outcome, last.message) == (
        Outcome.DONE,
        "stopped: killed by signal 9 (SIGKILL); SIGKILL sent to pid 5 (python)",
    )
    # A process that waits for a device does not end, whoever asks.
    assert rungs(survivor, 29.0, 1.0, 30.0, 30.0) == ["SIGKILL"] * 3
    assert survivor.answers()[-1].outcome is Outcome.FAILED
    assert "has not ended after SIGKILL" in survivor.answers()[-1].message
    assert len(survivor.messages("warning")) == 1
    stop(survivor)
    assert rungs(survivor, 30.0) == ["SIGKILL"]
    assert [answer.outcome for answer in survivor.answers()[-2:]] == [Outcome.ACCEPTED, Outcome.FAILED]
    end(survivor, -9)
    assert (survivor.model.phase, survivor.model.warnings) == (Phase.STOPPED, {})


def test_a_stopped_program_is_named_and_carries_out_nothing() -> None:
    brain = training(agents=frozenset({0}))
    brain.tick(stopped=(5,), trainer_pid=5)
    words = "the program (pid 5) is stopped (SIGSTOP or Ctrl-Z): `kill -CONT 5` lets it continue"
    assert run_state(brain.model).warnings == (words,)
    brain.tell(Requested(client=1, request=CheckpointNow(id=3), states=brain.model.states))
    assert (brain.answers()[-1].outcome, brain.answers()[-1].message) == (Outcome.REFUSED, words)
    brain.tick(trainer_pid=5)
    assert brain.model.warnings == {}
    brain.tell(Requested(client=1, request=CheckpointNow(id=4), states=brain.model.states))
    assert brain.answers()[-1].outcome is Outcome.ACCEPTED


def test_a_stopped_rank_is_named_and_nothing_is_asked_of_the_program() -> None:
    brain = training(agents=frozenset({0}))
    brain.tick(stopped=(7, 8), trainer_pid=5)
    words = "ranks of the program (pids 7, 8) are stopped (SIGSTOP or Ctrl-Z): `kill -CONT 7 8` lets them continue"
    assert run_state(brain.model).warnings == (words,)
    brain.tell(Requested(client=1, request=CheckpointNow(id=3), states=brain.model.states))
    assert (brain.answers()[-1].outcome, brain.answers()[-1].message) == (Outcome.REFUSED, words)


@pytest.mark.parametrize(
    ("pids", "words"),
    [
        ((5,), "the program (pid 5) is stopped (SIGSTOP or Ctrl-Z): `kill -CONT 5` lets it continue"),
        ((7,), "a rank of the program (pid 7) is stopped (SIGSTOP or Ctrl-Z): `kill -CONT 7` lets it continue"),
        (
            (5, 7),
            "the program (pid 5) and a rank of it (pid 7) are stopped (SIGSTOP or Ctrl-Z): `kill -CONT 5 7` lets them continue",
        ),
        (
            (3, 5, 7),
            "the program (pid 5) and ranks of it (pids 3, 7) are stopped (SIGSTOP or Ctrl-Z): "
            "`kill -CONT 3 5 7` lets them continue",
        ),
    ],
)
def test_all_that_is_stopped_is_named(pids: tuple[int, ...], words: str) -> None:
    assert explain.program_stopped(pids, 5) == words


def test_nothing_is_said_of_a_stop_in_which_nothing_was_stopped() -> None:
    brain = training(settings=None)
    stop(brain)
    brain.tick()
    before = brain.messages("stop")
    brain.tell(Signalled(name="SIGCONT", processes=()))
    assert brain.messages("stop") == before


@pytest.mark.parametrize("asked", [False, True])
def test_a_stopped_program_is_continued_once_before_it_is_ended(asked: bool) -> None:
    brain = training(agents=frozenset({0} if asked else ()))
    brain.model = replace(brain.model, progress=replace(brain.model.progress, offers=frozenset({"stop"})))
    if not asked:
        brain.tick(stopped=(5,), trainer_pid=5)
    stop(brain)
    found: list[str] = []
    for after in (0.2, 0.2, 60.0, 40.0):
        sent = [one for one in brain.tick(after, stopped=(5,), trainer_pid=5) if isinstance(one, Signal)]
        for signal in sent:
            found.append(signal.name)
            brain.tell(Signalled(name=signal.name, processes=(NamedProcess(5, "python"),)))
    first = ["SIGCONT"] if asked else ["SIGINT", "SIGCONT"]
    assert found == [*first, "SIGTERM", "SIGCONT", "SIGKILL"]
    assert brain.messages("stop").count("stopped by a signal (SIGSTOP or Ctrl-Z): SIGCONT sent to pid 5 (python)") == 2
    assert brain.model.signalled == "SIGKILL sent to pid 5 (python)"


def test_a_program_that_is_stopped_between_two_signals_is_continued_once() -> None:
    brain = training(settings=None)
    stop(brain)
    found = [
        [one.name for one in brain.tick(stopped=stopped, trainer_pid=5) if isinstance(one, Signal)]
        for stopped in ((), (), (5,), (5,), (5, 7), (), (5,))
    ]
    assert found == [["SIGINT", "SIGCONT"], [], ["SIGCONT"], [], ["SIGCONT"], [], []]


def test_a_signal_that_the_kernel_refuses_is_reported_with_the_reason() -> None:
    brain = training(settings=None)
    stop(brain)
    brain.tick()
    brain.tell(Signalled(name="SIGINT", processes=(), refused=("process 5: the kernel refused SIGINT: not permitted",)))
    words = "SIGINT sent to no process; not sent: process 5: the kernel refused SIGINT: not permitted"
    assert brain.messages("stop")[-1].startswith(words)


def test_what_a_program_leaves_behind_is_named() -> None:
    brain = training(settings=None)
    brain.tell(ProgramEnded(ended=brain.wall, status=0))
    left = tuple(NamedProcess(pid, "worker") for pid in range(10, 18))
    brain.tell(LeftoversFound(name="SIGTERM", processes=left))
    brain.tell(LeftoversFound(name="SIGKILL", processes=left[:1]))
    brain.tell(LeftoversFound(name=None, processes=left[:1]))
    assert brain.messages("leftovers") == [
        "SIGTERM to what the program left behind: " + ", ".join(f"pid {pid} (worker)" for pid in range(10, 16)) + " and 2 more",
        "SIGKILL to what the program left behind: pid 10 (worker)",
        "left behind by the program and still there after SIGKILL: pid 10 (worker)",
    ]
    brain.tell(LeftoversCleared(log=LogEnd(), states=brain.model.states))
    assert brain.model.phase is Phase.FINISHED
    assert brain.model.reason is not None
    words = "the main program ended; memtop ended the processes that it left behind: pid 10 (worker), pid 11"
    assert brain.model.reason.startswith(words)


@pytest.mark.parametrize("reported_end", [False, True])
def test_a_run_whose_rank_was_ended_in_the_background_has_not_finished(reported_end: bool) -> None:
    brain = training(settings=None)
    brain.report({"type": "hello", "rank": 0, "pid": 11, "offers": []})
    if reported_end:
        brain.report({"type": "end", "outcome": "finished", "saved": True})
    brain.tell(ProgramEnded(ended=brain.wall, status=0))
    brain.tell(LeftoversFound(name="SIGTERM", processes=(NamedProcess(10, "bash"), NamedProcess(11, "python"))))
    brain.tell(LeftoversCleared(log=LogEnd(lines=("step 7",)), states=brain.model.states))
    if reported_end:
        assert brain.model.phase is Phase.FINISHED
        return
    found = Diagnosis(kind=Kind.NOT_MEMORY, reason="no_evidence", confidence=0.0, summary="nothing is known")
    brain.tell(Examined(diagnosis=found, facts=RemedyFacts()))
    assert brain.model.phase is Phase.FAILED
    assert brain.model.reason is not None
    assert brain.model.reason.startswith("the main program ended while pid 11 (python) was still training, so memtop")
    assert brain.asked(Launch) == []


def test_a_finished_program_that_waits_for_space_is_not_ended() -> None:
    brain = training()
    words = "finished update 7, waiting for space"
    brain.report({"type": "save_failed", "update": 7, "message": words, "waiting": True})
    brain.tell(StoodStill(words))
    assert (brain.model.stalled, brain.model.ladder) == (None, None)
    brain.report({"type": "checkpoint", "updates": 7})
    brain.tell(StoodStill(words))
    assert brain.model.stalled == words
    assert brain.model.ladder is not None


# --- restarting -----------------------------------------------------------------------------------


def restart(brain: Brain, change: Change | None = None, number: int = 1) -> None:
    brain.tell(Requested(client=1, request=Restart(id=number, change=change or Change()), states=brain.model.states))


def end(brain: Brain, status: int | None = 0, *kept: int) -> None:
    """The program ends, and so does what it left behind."""
    brain.tell(ProgramEnded(ended=brain.wall, status=status))
    assert brain.asked(ClearLeftovers)
    brain.tell(LeftoversCleared(log=LogEnd(lines=("boom",)), states=states(*kept) if kept else brain.model.states))


def proposal(brain: Brain) -> Proposal:
    shown = run_state(brain.model).proposal
    assert shown is not None
    return shown


def die(brain: Brain, kind: Kind = Kind.GPU_OOM, facts: RemedyFacts | None = None, problem: str | None = None) -> None:
    end(brain, 1)
    found = Diagnosis(kind=kind, confidence=0.97, summary=f"it died of {kind.value}")
    brain.tell(Examined(diagnosis=found, facts=facts or RemedyFacts(), problem=problem))


def test_a_forecast_for_a_live_run_starts_where_it_will_stop() -> None:
    model = training().model
    for updates in (1, 6, 7):
        with pytest.raises(UsageError, match=f"max_updates {updates}: the run will have done 8 when it stops"):
            foreseen(model, Change(max_updates=updates))
    settings = foreseen(model, Change(max_updates=10))
    assert settings is not None
    assert settings.target_samples == 10 * SETTINGS.effective_batch
    assert foreseen(move(model, Phase.STOPPED), Change(max_updates=6)) is not None


def test_a_restart_begins_when_the_program_has_ended_and_happens_once() -> None:
    brain = training()
    restart(brain, Change(assignments={"batch": "1"}))
    assert (brain.model.phase, brain.asked(Launch)) == (Phase.RESTARTING, [])
    restart(brain, number=2)
    assert brain.answers()[-1].message == "a restart is under way already"
    end(brain)
    (launch,) = brain.asked(Launch)
    assert (launch.number, launch.settings and launch.settings.batch) == (2, 1)
    assert [effect.values["outcome"] for effect in brain.asked(UpdateAttempt) if "outcome" in effect.values] == ["restarted"]
    brain.tell(Launched(number=2, started=brain.wall, states=states(5)))
    assert (brain.model.phase, brain.model.number, brain.model.pending) == (Phase.STARTING, 2, None)
    assert [answer.message for answer in brain.answers() if answer.outcome is Outcome.DONE] == [
        "attempt 2 started; 2 updates since the last saved state (at update 5) are done again"
    ]


def test_a_change_that_turns_out_impossible_leaves_a_stopped_run() -> None:
    brain = training(5)
    restart(brain, Change(max_updates=7))
    end(brain, 0, 9)
    assert brain.model.phase is Phase.STOPPED
    assert brain.model.reason == "max_updates 7: 9 updates are done already; give more"
    assert brain.asked(Launch) == []
    assert brain.asked(UpdateAttempt)[-1].values == {"outcome": "stopped"}


@pytest.mark.parametrize("recorded", [False, True])
def test_an_attempt_that_cannot_be_started_changes_nothing(recorded: bool) -> None:
    brain = training(
        phase=Phase.FAILED, reason="died", attempt=CurrentAttempt(number=1, started=1.0, stage=AttemptStage.OVER, exit_status=3)
    )
    before = brain.model
    restart(brain, Change(assignments={"batch": "2"}))
    brain.tell(LaunchRefused(number=2, why="no space", recorded=recorded))
    after = replace(brain.model, now=before.now, states=before.states)
    assert replace(after, newest_number=1) == before
    assert [answer.outcome for answer in brain.answers()] == [Outcome.REFUSED]
    restart(brain, number=2)
    assert brain.asked(Launch)[-1].number == (3 if recorded else 2)


def test_a_restart_says_what_becomes_of_the_effective_batch() -> None:
    brain = training(phase=Phase.STOPPED, attempt=CurrentAttempt(number=1, started=1.0, stage=AttemptStage.OVER))
    restart(brain, Change(assignments={"batch": "1"}))
    assert brain.answers() == [], "it is accepted once it has begun"
    brain.tell(Launched(number=2, started=5.0, states=states(5)))
    split = f"effective batch {SETTINGS.effective_batch} -> {SETTINGS.accumulation}"
    accepted, done = brain.answers()
    assert (accepted.outcome, done.outcome) == (Outcome.ACCEPTED, Outcome.DONE)
    assert split in accepted.message
    assert split in brain.messages("attempt")[0]
    assert explain.split_change(SETTINGS, SETTINGS) == ""


def test_a_change_that_cannot_be_is_refused_as_wrong_usage() -> None:
    brain = training()
    wrong = (
        Change(assignments={"batch": "0"}),
        Change(preset="no-such"),
        Change(assignments={"nothing": "1"}),
        Change(max_updates=3),
        Change(state_before=2),
    )
    for change in wrong:
        restart(brain, change)
        assert (brain.answers()[-1].outcome, brain.answers()[-1].usage) == (Outcome.REFUSED, True)
    stop(brain)
    restart(brain)
    assert (brain.answers()[-1].outcome, brain.answers()[-1].usage) == (Outcome.REFUSED, False)


def test_the_state_of_a_rollback_is_held_before_the_program_is_stopped() -> None:
    brain = training()
    restart(brain, Change(state_before=4))
    assert (brain.asked(HoldState), brain.model.ladder, brain.answers()) == ([HoldState(4)], None, [])
    brain.tell(StateHeld(problem="/s3: cannot be held"))
    assert (brain.model.phase, brain.answers()[-1].message) == (Phase.TRAINING, "/s3: cannot be held")
    restart(brain, Change(state_before=4), number=2)
    brain.tell(StateHeld())
    assert brain.model.phase is Phase.RESTARTING
    assert brain.answers()[-1].outcome is Outcome.ACCEPTED


@pytest.mark.parametrize("then", ["stop", "another restart"])
def test_a_held_state_is_released_when_the_run_does_not_roll_back(then: str) -> None:
    brain = training()
    restart(brain, Change(state_before=4))
    brain.tell(StateHeld())
    before = len(brain.asked(ReleaseState))
    if then == "stop":
        stop(brain)
    else:
        brain.model = replace(brain.model, phase=Phase.TRAINING, pending=None, ladder=None)
        restart(brain)
    assert len(brain.asked(ReleaseState)) == before + 1
    assert brain.model.pending == (None if then == "stop" else Change())


def test_updates_are_counted_from_the_restored_state() -> None:
    brain = training(
        40, phase=Phase.STOPPED, states=states(40, 30), attempt=CurrentAttempt(number=1, started=1.0, stage=AttemptStage.OVER)
    )
    restart(brain, Change(state_before=30, max_updates=20))
    assert brain.answers()[-1].usage
    restart(brain, Change(state_before=30, max_updates=35))
    (launch,) = brain.asked(Launch)
    assert launch.settings is not None
    assert (launch.state_before, launch.settings.target_samples) == (30, 35 * SETTINGS.effective_batch)
    brain.tell(Launched(number=2, started=5.0, states=states(30), set_aside="/runs/a/set-aside"))
    assert brain.messages("rollback") == ["states after update 30 moved to /runs/a/set-aside"]
    assert brain.model.repeated is None, "nothing is lost that was not given up on purpose"


def test_a_stop_cancels_a_restart_requested_from_an_earlier_supervisor() -> None:
    """`memtop restart` had started this supervisor while the program was being stopped."""
    brain = training(phase=Phase.STOPPING, pending=Change(assignments={"batch": "1"}))
    stop(brain)
    end(brain)
    assert (brain.model.phase, brain.asked(Launch)) == (Phase.STOPPED, [])


# --- the end --------------------------------------------------------------------------------------


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
        "killed by signal 9 (SIGKILL)",
    )
    assert brain.messages("warning") == ["why is not known"]


@pytest.mark.parametrize("external", [False, True])
def test_a_full_disk_is_waited_for_unless_the_command_would_begin_anew(external: bool) -> None:
    brain = training(settings=None if external else SETTINGS)
    die(brain, Kind.DISK_FULL, RemedyFacts(disk_free_bytes=0))
    if external:
        assert (brain.model.restart, brain.model.phase) == (None, Phase.FAILED)
        assert "which memtop does not start again by itself" in brain.messages("remedy")[0]
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
    assert (
        proposal(brain).waiting == "it is your own command, which memtop does not start again by itself: it may begin from zero"
    )
    brain.tick(after=100.0, disk_free=100 * GIB)
    assert brain.asked(Launch) == []


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


# --- reports --------------------------------------------------------------------------------------


def test_a_failure_on_the_cpu_is_the_peak_and_ends_the_configuration() -> None:
    brain = training(progress=Progress(), phase=Phase.STARTING)
    brain.report({"type": "hello", "time": 990.0, "pid": 2}, PLAN, OOM, SPLIT)
    first, second = brain.model.configurations.rows
    assert (first.outcome, first.until_update, first.since_update) == ("host_oom_alloc", 0, 1)
    assert first.peak is not None
    assert (first.peak.bytes, first.peak.batch, first.peak.failed) == (300 * MIB, SETTINGS.batch, True)
    assert (second.settings, second.since_update, second.outcome) == (HALF, 1, None)
    assert brain.model.settings == HALF


def test_the_plan_shows_that_what_was_sampled_is_the_peak() -> None:
    """On the CPU. The failure may come before the next sample."""
    brain = training(progress=Progress(), resident_bytes=250 * MIB)
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


def test_settings_that_are_not_possible_are_a_warning() -> None:
    brain = training()
    brain.report({**SPLIT, "changes": {"batch": "many"}})
    assert brain.model.settings == SETTINGS
    assert "the program reports settings that are not possible" in brain.messages("warning")[0]


def test_reports_that_are_not_understood_harm_nothing() -> None:
    brain = training()
    brain.report({"type": "of the future", "time": 1.0}, {"type": "step", "update": "seven"}, {"no": "type"})
    assert (brain.model.phase, brain.model.progress.update, brain.model.progress.heard) == (Phase.TRAINING, 7, 3)


# --- samples and leaks ----------------------------------------------------------------------------


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


# --- a restart that waits -------------------------------------------------------------------------


def test_the_wait_for_memory_is_announced_once() -> None:
    waiting = Waiting(change=Change(assignments={"batch": "1"}), disk_bytes=GIB)
    over = CurrentAttempt(number=1, started=1.0, stage=AttemptStage.OVER)
    restart_ = PendingRestart(waiting=waiting, began=0.0, begins=0.0)
    brain = training(phase=Phase.RESTARTING, attempt=over, restart=restart_)
    for free in (MIB, 2 * MIB, 3 * MIB):
        brain.tick(disk_free=free)
    assert brain.messages("remedy") == ["waiting: /runs/a: 1 MiB free, 1.0 GiB needed; free some space"]
