"""A restart that a person requests, with values: what is accepted, when the next attempt begins,
and with which settings and state."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.errors import UsageError
from memtop.supervisor.run import explain
from memtop.supervisor.run.effects import HoldState, Launch, ReleaseState, UpdateAttempt
from memtop.supervisor.run.events import Examined, Launched, LaunchRefused, RemedyFacts, StateHeld
from memtop.supervisor.run.model import AttemptStage, CurrentAttempt, move
from memtop.supervisor.run.pending_restart import NOTICE_SECONDS, PendingRestart, Waiting
from memtop.supervisor.run.record.configurations import Configurations
from memtop.supervisor.run.record.folder import StateFile
from memtop.supervisor.run.rules.attempts import foreseen
from memtop.supervisor.run.state import run_state
from memtop.supervisor.wire import Change, Outcome, Phase
from tests.run.brain import (
    BEGUN,
    GIB,
    HALF,
    MIB,
    PLAN,
    SETTINGS,
    STEP,
    Brain,
    end,
    restart,
    row,
    state_of,
    states,
    stop,
    taken_over,
    training,
)


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


COMPLETE = "nothing is left to train: 9 updates are done, and the length is 9; `memtop restart a --max-updates N` trains longer"


@pytest.mark.parametrize("length", [{"target_samples": 9 * SETTINGS.effective_batch}, {"target_samples": 0, "epochs": 2.0}])
def test_a_complete_run_is_restarted_only_if_it_gets_longer_or_goes_back(length: dict[str, float]) -> None:
    def finished() -> Brain:
        brain = training(settings=replace(SETTINGS, **length), agents=frozenset({0}))
        last = {**STEP, "update": 9, "samples_seen": 9 * SETTINGS.effective_batch}
        brain.report({**PLAN, "total_updates": 9}, last, {"type": "end", "outcome": "finished", "saved": True})
        end(brain, 0, 9, 5)
        assert brain.model.phase is Phase.FINISHED
        return brain

    for change in (Change(), Change(assignments={"batch": "4", "accumulation": "8"}), Change(max_updates=9)):
        brain = finished()
        restart(brain, change)
        assert (brain.answers()[-1].outcome, brain.answers()[-1].message) == (Outcome.REFUSED, COMPLETE)
        assert brain.asked(Launch) == []
    for change in (Change(max_updates=10), Change(assignments={"epochs": "3"}), Change(state_before=5)):
        brain = finished()
        restart(brain, change)
        assert len(brain.asked(Launch)) == 1


@pytest.mark.parametrize("length", [{"target_samples": 20 * SETTINGS.effective_batch}, {"target_samples": 0, "epochs": 2.0}])
def test_a_greater_length_says_what_becomes_of_the_learning_rate(length: dict[str, float]) -> None:
    settings = replace(SETTINGS, learning_rate=1.0, final_learning_rate_fraction=0.0, warmup_fraction=0.0, **length)
    brain = training(9, settings=settings, agents=frozenset({0}))
    brain.report({**PLAN, "total_updates": 20})
    restart(brain, Change(max_updates=40))
    # The update in progress is the 10th: the next one ends at 11 of 20, or of 40.
    words = "the run ends after update 40, not 20: the learning rate of update 11 changes from 0.4218 to 0.8247"
    assert brain.answers()[-1].message == f"restarting from train_latest_state; {words}"
    # The event of the attempt says it, too, of the update after the saved state.
    end(brain, 0, 10, 5)
    brain.tell(Launched(number=2, started=brain.wall, states=states(10, 5)))
    assert brain.messages("attempt")[-1] == f"attempt 2: restart with max_updates 40; {words}"


@pytest.mark.parametrize(
    ("earlier", "change", "ends", "says"),
    [
        # It is after update 7, and the update in progress is done first.
        (20, Change(configuration=1), 20, "the run ends after update 20, not 40: "),
        (8, Change(configuration=1), 40, "the run keeps its present length"),
        (0, Change(configuration=1), 40, "the run keeps its present length"),
        (20, Change(configuration=1, state_before=5), 20, "the run ends after update 20, not 40: "),
        (6, Change(configuration=1, state_before=5), 6, "the run ends after update 6, not 40: "),
        (5, Change(configuration=1, state_before=5), 40, "the run keeps its present length"),
        (0, Change(configuration=1, state_before=5), 0, "the run ends after 2 epochs: "),
    ],
)
def test_a_return_takes_the_length_of_that_time(earlier: int, change: Change, ends: int, says: str) -> None:
    each = SETTINGS.effective_batch
    first = replace(SETTINGS, target_samples=earlier * each, epochs=2.0)
    longer = replace(HALF, target_samples=40 * each)
    begun = Configurations().begin_attempt(1, "start", first, 1.0).begin_attempt(2, "longer", longer, 2.0)
    brain = training(settings=longer, configurations=begun)
    brain.report({**PLAN, "total_updates": 40})
    restart(brain, change)
    brain.tell(StateHeld())
    assert says in brain.answers()[-1].message
    end(brain, 0, 8, 5)
    settings = brain.asked(Launch)[-1].settings
    assert settings is not None
    assert (settings.batch, settings.target_samples) == (SETTINGS.batch, ends * each)


def test_an_attempt_that_finds_nothing_to_train_says_so() -> None:
    brain = training(5)
    restart(brain, Change(assignments={"batch": "1"}))
    end(brain, 0, 9)
    brain.tell(Launched(number=2, started=brain.wall, states=states(9)))
    brain.report({**PLAN, "updates": 9, "resumed": True}, {"type": "end", "outcome": "finished", "saved": True})
    end(brain, 0, 9)
    assert (brain.model.phase, brain.model.reason) == (Phase.FINISHED, "attempt 2 made no updates")


@pytest.mark.parametrize("length", [{"target_samples": 9 * SETTINGS.effective_batch}, {"target_samples": 0, "epochs": 2.0}])
def test_a_restart_asked_for_in_the_last_update_leaves_a_finished_run(length: dict[str, float]) -> None:
    def finished(change: Change) -> Brain:
        brain = training(8, settings=replace(SETTINGS, **length), agents=frozenset({0}))
        brain.report({**PLAN, "total_updates": 9})
        restart(brain, change)
        last = {**STEP, "update": 9, "samples_seen": 9 * SETTINGS.effective_batch}
        brain.report(last, {"type": "end", "outcome": "finished", "saved": True})
        end(brain, 0, 9, 5)
        return brain

    for change in (Change(), Change(assignments={"batch": "4", "accumulation": "8"})):
        brain = finished(change)
        shown = run_state(brain.model)
        assert (shown.state, shown.reason, shown.loss) == (Phase.FINISHED, COMPLETE, 2.0)
        assert brain.asked(Launch) == []
        assert [one.values["outcome"] for one in brain.asked(UpdateAttempt) if "outcome" in one.values] == ["finished"]
        assert (brain.answers()[-1].outcome, brain.answers()[-1].message) == (Outcome.FAILED, COMPLETE)
    assert len(finished(Change(max_updates=10)).asked(Launch)) == 1


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
    shorter = explain.split_change(SETTINGS, replace(SETTINGS, seq_len=SETTINGS.seq_len // 2))
    assert "tokens per update" in shorter
    assert shorter.endswith("(-50.0 %): changes training")


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


def test_the_wait_for_memory_is_announced_once() -> None:
    waiting = Waiting(change=Change(assignments={"batch": "1"}), disk_bytes=GIB)
    over = CurrentAttempt(number=1, started=1.0, stage=AttemptStage.OVER)
    restart_ = PendingRestart(waiting=waiting, began=0.0, begins=0.0)
    brain = training(phase=Phase.RESTARTING, attempt=over, restart=restart_)
    for free in (MIB, 2 * MIB, 3 * MIB):
        brain.tick(disk_free=free)
    assert brain.messages("remedy") == ["waiting: /runs/a: 1 MiB free, 1.0 GiB needed; free some space"]


KILLED = Diagnosis(kind=Kind.NOT_MEMORY, reason="killed_by_something", confidence=0.6, summary="it was killed")


def test_a_restart_that_is_refused_does_not_say_killed() -> None:
    brain = training()
    end(brain, -9)
    restart(brain)
    brain.tell(Examined(diagnosis=KILLED, facts=RemedyFacts()))
    brain.tell(LaunchRefused(number=2, why="no space"))
    shown = run_state(brain.model)
    assert (shown.state, shown.word, shown.reason) == (Phase.FAILED, "failed", "no space")


def test_a_restart_that_is_refused_to_the_next_supervisor_does_not_say_killed() -> None:
    killed = row(ended=10.0, outcome="failed", exit_status=-9, diagnosis={"summary": "killed", "ended_by": 9})
    brain = taken_over(killed, records=BEGUN.records, state=state_of(Phase.RESTARTING, pending=Change()))
    brain.tell(LaunchRefused(number=2, why="no space"))
    shown = run_state(brain.model)
    assert (shown.state, shown.word, shown.reason) == (Phase.FAILED, "failed", "no space")
    again = taken_over(killed, records=BEGUN.records, state=StateFile(run=shown, socket=""))
    assert run_state(again.model).word == "failed"


def test_a_restart_by_itself_that_is_refused_does_not_say_killed() -> None:
    brain = training()
    end(brain, -9)
    died = Diagnosis(kind=Kind.GPU_OOM, confidence=0.97, summary="no GPU memory")
    brain.tell(Examined(diagnosis=died, facts=RemedyFacts()))
    brain.tick(after=NOTICE_SECONDS + 1)
    brain.tell(LaunchRefused(number=2, why="no space"))
    shown = run_state(brain.model)
    assert (shown.state, shown.word, shown.reason) == (Phase.FAILED, "failed", "no space")
