"""What a run shows of its program's output, and what the rules do with it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.supervisor.run import explain
from memtop.supervisor.run.effects import DropRows, UpdateAttempt
from memtop.supervisor.run.events import Absence, NamedProcess, NotHeard, OutputRead, States
from memtop.supervisor.run.model import CurrentAttempt
from memtop.supervisor.run.output.values import Seen
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.state import run_state
from memtop.supervisor.wire import Phase
from tests.run.brain import Brain, training

SEEN = Seen(
    attempt=1, first=1, step=20, update=20, total_updates=100, loss=2.5, best_loss=2.0, step_seconds=0.5, time=1.0, example="x"
)


def external(attempt: int = 1, phase: Phase = Phase.TRAINING) -> Brain:
    number = CurrentAttempt(number=attempt, started=1.0)
    return training(settings=None, progress=Progress(), attempt=number, phase=phase, states=States())


def test_without_an_agent_all_numbers_are_the_outputs() -> None:
    brain = external(phase=Phase.STARTING)
    brain.tell(OutputRead(SEEN))
    state = run_state(brain.model)
    assert state.state is Phase.TRAINING
    assert (state.updates, state.total_updates, state.loss, state.best_loss, state.step_seconds) == (20, 100, 2.5, 2.0, 0.5)
    assert state.program is not None
    assert state.program.grip == "output"
    assert state.program.why == "updates, total, loss, seconds of a step: read from the output, by lines like `x`"
    assert brain.messages("output") == ["values of the training are read from the output, by lines like `x`"]
    brain.tell(OutputRead(replace(SEEN, step=21, update=21)))
    assert len(brain.messages("output")) == 1
    assert brain.model.update == 21


def test_the_agents_values_come_first() -> None:
    brain = external()
    brain.report({"type": "step", "update": 30, "step_seconds": 0.25, "time": 1.0})
    brain.tell(OutputRead(replace(SEEN, step=29, update=30, agrees=True)))
    state = run_state(brain.model)
    assert (state.updates, state.total_updates, state.loss, state.step_seconds) == (30, 100, 2.5, 0.25)
    assert state.program is not None
    assert state.program.why == "total, loss: read from the output, by lines like `x`; updates: counted by memtop's agent"


def test_the_time_left_follows_from_the_newest_updates_together() -> None:
    brain = external()
    for update in range(1, 11):
        # The last update is a slow one.
        late = {"step_seconds": 20.0, "time": 120.0} if update == 10 else {"step_seconds": 1.0, "time": 100.0 + update}
        brain.report({"type": "step", "update": update, **late})
    brain.tell(OutputRead(replace(SEEN, step=10, update=10, agrees=True)))
    state = run_state(brain.model)
    assert (state.step_seconds, state.total_updates) == (20.0, 100)
    assert state.eta_seconds == pytest.approx(90 * (120.0 - 101.0) / 9)


def test_the_samples_of_a_loop_that_does_not_count_them_follow_from_its_updates() -> None:
    loop = {"type": "loop", "framework": "torch's DataLoader", "effective_batch": 32, "knobs": {}}

    def ran(attempt: int, **found: object) -> Brain:
        brain = external(attempt=attempt)
        for update in range(1, 83):
            # The first update has no update before it.
            seconds = {} if update == 1 else {"step_seconds": 0.5}
            brain.report({"type": "step", "update": update, "time": 100.0 + update, **seconds})
            if update == 3:
                brain.report({**loop, **found})
        return brain

    brain = ran(1)
    assert run_state(brain.model).samples_seen == 82 * 32
    assert brain.model.configurations.rows[-1].samples_per_second == pytest.approx(64.0)
    # An attempt may resume by itself: how many samples were seen before it is not known.
    assert run_state(ran(2).model).samples_seen is None
    assert run_state(ran(1, resumed=True).model).samples_seen is None
    assert run_state(ran(1, effective_batch=None).model).samples_seen is None


def test_a_total_in_other_units_is_not_shown_before_the_relation_is_known() -> None:
    brain = external()
    brain.report({"type": "step", "update": 3, "time": 1.0})
    brain.tell(OutputRead(SEEN))
    assert (run_state(brain.model).updates, run_state(brain.model).total_updates, run_state(brain.model).loss) == (3, None, 2.5)


def test_a_resumed_program_shows_its_own_counter() -> None:
    brain = external(attempt=2)
    brain.report({"type": "step", "update": 20, "time": 1.0})
    effects = brain.tell(OutputRead(replace(SEEN, attempt=2, first=501, step=520, update=520, total_updates=900, agrees=False)))
    assert (run_state(brain.model).updates, run_state(brain.model).total_updates) == (520, 900)
    assert UpdateAttempt(number=2, values={"start_updates": 500}) in effects
    assert DropRows(501) in effects
    assert run_state(brain.model).program is not None
    assert "memtop's agent has counted other updates" in str(run_state(brain.model).program)


def test_an_attempt_that_begins_inside_an_update_repeats_none_before_it() -> None:
    brain = external(attempt=2)
    brain.report({"type": "step", "update": 20, "time": 1.0})
    # 880 micro-batches are 110 updates.
    seen = replace(SEEN, attempt=2, first=881, step=888, update=111, steps_per_update=8, agrees=False)
    effects = brain.tell(OutputRead(seen))
    assert UpdateAttempt(number=2, values={"start_updates": 110}) in effects
    assert DropRows(111) in effects


def test_what_another_supervisor_has_read_is_not_announced_again() -> None:
    brain = external(attempt=2)
    effects = brain.tell(OutputRead(replace(SEEN, attempt=2, again=True)))
    assert not [effect for effect in effects if isinstance(effect, DropRows)]
    assert brain.messages("output") == []
    assert run_state(brain.model).updates == 20


def test_numbers_of_an_attempt_that_is_over_do_not_count() -> None:
    brain = external(attempt=2)
    brain.tell(OutputRead(SEEN))
    assert run_state(brain.model).updates is None


def test_a_loop_may_do_one_step_more_than_it_names() -> None:
    brain = external()
    for step, total in ((101, 101), (150, None)):
        brain.tell(OutputRead(replace(SEEN, step=step, update=step)))
        assert run_state(brain.model).total_updates == total


def test_a_loss_that_is_not_finite_is_a_warning() -> None:
    brain = external()
    brain.tell(OutputRead(replace(SEEN, loss=None, not_finite=True)))
    assert run_state(brain.model).warnings == ("the program prints a loss that is not finite, at step 20",)
    brain.tell(OutputRead(SEEN))
    assert run_state(brain.model).warnings == ()


def test_a_program_without_the_agent_is_told_apart_from_one_that_says_nothing() -> None:
    brain = external()
    brain.tell(OutputRead(SEEN))
    found = NotHeard(Absence.PYTHONPATH, NamedProcess(5, "python"))
    brain.tick(not_heard=found)
    assert run_state(brain.model).warnings == (
        "memtop is not inside the program: the step is read from its output, and more is not known: pid 5 (python) "
        "was started with a PYTHONPATH of its own: append the old one (PYTHONPATH=.:$PYTHONPATH)",
    )
    brain.tick(not_heard=NotHeard(Absence.NO_UPDATE))
    assert run_state(brain.model).warnings == ()
    assert explain.not_heard(found) != explain.not_heard(found, by_output=True)
