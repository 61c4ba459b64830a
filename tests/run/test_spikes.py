"""What the supervisor does when the loss has jumped and stayed high. Rules only."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.run.effects import DiscardBeforeSpike, Launch
from memtop.supervisor.run.events import Requested
from memtop.supervisor.run.state import run_state
from memtop.supervisor.wire import AcceptSpike, Change, Outcome, Phase
from tests.run.brain import SETTINGS, Brain, die, restart, row, taken_over, training

SPIKE: dict[str, Any] = {
    "type": "spike",
    "time": 15.0,
    "update": 7,
    "first_update": 4,
    "begin": 96,
    "end": 224,
    "samples": 128,
    "sample_ids": list(range(128)),
    "sample_digest": "abc",
    "loss": 9.0,
    "usual_loss": 2.0,
    "state_update": 3,
    "action": "back",
    "message": "the loss rose from 2 to 9 at update 5",
}
FAILED = {"type": "end", "time": 16.0, "outcome": "failed", "message": "the loss rose"}


def spiked(brain: Brain, **values: Any) -> Brain:
    brain.report({**SPIKE, **values})
    return brain


def test_a_run_goes_back_by_itself_without_the_samples_that_it_names() -> None:
    brain = spiked(training())
    brain.report(FAILED)
    die(brain, Kind.NOT_MEMORY)
    (launch,) = brain.asked(Launch)
    assert launch.state_before == 3
    assert launch.settings is not None
    assert launch.settings.leave_out == ((96, 224),)
    (event,) = brain.messages("spike")
    assert "goes back to the state of update 3, without the 128 samples of the updates 4 to 7" in event
    assert brain.model.phase is Phase.RESTARTING


def test_a_second_spike_leaves_its_samples_out_too() -> None:
    brain = spiked(training(settings=replace(SETTINGS, leave_out=((0, 10), (90, 100)))))
    brain.report(FAILED)
    die(brain, Kind.NOT_MEMORY)
    (launch,) = brain.asked(Launch)
    assert launch.settings is not None
    assert launch.settings.leave_out == ((0, 10), (90, 224))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"action": "ask"}, "`memtop rollback a --before-spike` goes back to the state of update 3"),
        ({"action": "stop"}, "`memtop rollback a --before-spike` goes back to the state of update 3"),
        ({"problem": "samples were left out 3 times already"}, "(samples were left out 3 times already)"),
        ({"state_update": None, "problem": "no state from before update 4 is saved"}, "no state from before update 4 is saved"),
    ],
)
def test_otherwise_it_says_what_can_be_done_and_starts_nothing(values: dict[str, Any], words: str) -> None:
    brain = spiked(training(), **values)
    assert words in brain.messages("spike")[0]
    assert brain.messages("spike")[0] in run_state(brain.model).warnings
    brain.report(FAILED)
    die(brain, Kind.NOT_MEMORY)
    assert brain.asked(Launch) == []
    assert brain.model.phase is Phase.FAILED


def test_the_ledger_names_the_samples_and_the_event_comes_once() -> None:
    brain = training()
    (added,) = [effect.event for effect in spiked(brain).effects if getattr(effect, "event", None) is not None]
    assert (added.data["begin"], added.data["end"], added.data["sample_digest"]) == (96, 224, "abc")
    assert list(added.data["sample_ids"]) == SPIKE["sample_ids"]
    again = training(announced=frozenset({("spike", 15.0)}))
    assert spiked(again).messages("spike") == []


def test_a_run_that_someone_stops_does_not_go_back() -> None:
    brain = spiked(training(phase=Phase.STOPPING))
    brain.report(FAILED)
    die(brain, Kind.NOT_MEMORY)
    assert [effect.change for effect in brain.asked(Launch)] == []


# --- a person is asked ----------------------------------------------------------------------------


def accept(brain: Brain) -> None:
    brain.tell(Requested(client=1, request=AcceptSpike(id=9), states=brain.model.states))


def test_a_person_is_asked_and_goes_back() -> None:
    brain = spiked(training(), action="ask")
    spike = run_state(brain.model).spike
    assert spike is not None
    assert (spike.update, spike.back) == (7, Change(assignments={"leave_out": "96-224"}, state_before=3))
    assert spike.message == "update 7: the loss rose from 2 to 9 at update 5 and stayed high"
    assert spike.back_words == "the state of update 3, without the 128 samples of the updates 4 to 7"
    assert brain.asked(Launch) == [], "nothing happens by itself"
    restart(brain, spike.back)
    assert brain.model.holding is not None
    assert brain.model.holding.change == spike.back, "the state from before is kept while the run stops"


def test_a_person_who_goes_on_is_not_asked_again() -> None:
    brain = spiked(training(), action="ask")
    accept(brain)
    assert brain.answers()[-1].outcome is Outcome.DONE
    assert len(brain.asked(DiscardBeforeSpike)) == 1
    assert run_state(brain.model).spike is None
    assert run_state(brain.model).warnings == ()
    assert brain.model.phase is Phase.TRAINING
    accept(brain)
    assert (brain.answers()[-1].outcome, len(brain.asked(DiscardBeforeSpike))) == (Outcome.REFUSED, 1)
    # The next spike is another question.
    spiked(brain, action="ask", time=99.0, update=70)
    assert run_state(brain.model).spike is not None


@pytest.mark.parametrize("accepted", [True, False])
def test_a_new_supervisor_knows_the_answer(accepted: bool) -> None:
    known = {("spike", 15.0), *([("spike_accepted", 15.0)] if accepted else [])}
    brain = taken_over(row(), reports=({**SPIKE, "action": "ask"},), announced=frozenset(known))
    assert (run_state(brain.model).spike is None) is accepted
    assert (run_state(brain.model).warnings == ()) is accepted


@pytest.mark.parametrize(
    ("values", "asks", "can_go_back"),
    [
        ({"action": "back"}, False, False),
        ({"action": "stop"}, True, True),
        ({"action": "ask", "state_update": None, "problem": "no state from before update 4 is saved"}, True, False),
    ],
)
def test_what_is_asked(values: dict[str, Any], asks: bool, can_go_back: bool) -> None:
    spike = run_state(spiked(training(), **values).model).spike
    assert (spike is not None) is asks
    if spike is not None:
        assert (spike.back is not None) is can_go_back
        assert can_go_back or spike.back_words == "memtop cannot go back: no state from before update 4 is saved"
