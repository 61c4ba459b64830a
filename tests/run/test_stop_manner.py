"""How a program with a profile is stopped: its signal, the answer to its question, and the time
that it gets to save. No process; the test sets the clock."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memtop.presets.program_profiles import Detect, ProgramProfile, Resume, StopRule
from memtop.supervisor.run.effects import Signal, SignalTarget, TypeAnswer
from memtop.supervisor.run.events import SavedChecked, States
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.rules import stopping
from memtop.supervisor.wire import Checkpoint, Phase
from tests.run.brain import Brain, stop, training


def trains(manner: StopRule) -> Brain:
    never = Resume(how="never", why="it has no way to")
    profile = ProgramProfile(name="p", title="p", detect=Detect(scripts=("p.py",)), stop=manner, resume=never)
    return training(settings=None, grip=Grip(profile=profile))


def sent(brain: Brain, after: float = 0.2) -> list[tuple[str, str]]:
    brain.effects.clear()
    brain.tick(after=after)
    return [(one.name, one.target.value) for one in brain.asked(Signal) if one.target is not SignalTarget.STOPPED]


@pytest.mark.parametrize(
    ("manner", "signals"),
    [
        (StopRule(), [("SIGINT", "group"), ("SIGTERM", "program"), ("SIGKILL", "all")]),
        (StopRule(signal="SIGTERM", to="program", saves=True), [("SIGTERM", "program"), ("SIGKILL", "all")]),
        (StopRule(signal="SIGUSR1", to="program"), [("SIGUSR1", "program"), ("SIGTERM", "program"), ("SIGKILL", "all")]),
    ],
)
def test_the_signal_of_the_profile_comes_first(manner: StopRule, signals: list[tuple[str, str]]) -> None:
    brain = trains(manner)
    stop(brain)
    words = brain.answers()[0].message
    assert words.startswith(f"stopping: memtop sends {manner.signal} to the program, ")
    assert words.endswith("waits while it saves" if manner.saves else "which does not save then")
    assert [one for after in (0.2, 70.0, 70.0)[: len(signals)] for one in sent(brain, after)] == signals


SAVED = Checkpoint(path="/out/checkpoint-5", updates=5, complete=True)


def trainer(**values: Any) -> Brain:
    """A program with Hugging Face's Trainer that memtop cannot ask to save."""
    return training(settings=None, grip=Grip(output_dir="/out", **values), states=States(program=SAVED))


def test_a_trainer_that_saves_on_sigterm_gets_that_first_and_time_to_save() -> None:
    brain = trainer(saves_on_sigterm=True)
    stop(brain)
    assert brain.answers()[0].message == "stopping: memtop sends SIGTERM to the program, and waits while it saves"
    assert [sent(brain, after) for after in (0.2, 35.0, 10.0)] == [[("SIGTERM", "program")], [], [("SIGKILL", "all")]]


@pytest.mark.parametrize(
    ("can", "words"), [(False, "; with enable_jit_checkpoint=True in its arguments it would save"), (None, "")]
)
def test_another_trainer_says_what_a_stop_loses(can: bool | None, words: str) -> None:
    brain = trainer(saves_on_sigterm=can)
    stop(brain)
    assert brain.answers()[0].message == (
        "stopping: memtop sends SIGINT to the program; the 2 updates since update 5 are lost, unless it saves then" + words
    )
    assert sent(brain) == [("SIGINT", "group")]


def test_the_answer_is_typed_until_the_next_signal() -> None:
    brain = trains(StopRule(saves=True, asks="save?", answer="y"))
    stop(brain)
    assert brain.answers()[0].message == (
        "stopping: memtop sends SIGINT to the program, answers its question with 'y', and waits while it saves"
    )
    assert sent(brain) == [("SIGINT", "group")]
    assert brain.asked(TypeAnswer) == [TypeAnswer("y")]
    # Each rank may ask: it is typed again.
    assert [len(brain.asked(TypeAnswer)) for _ in range(4) if sent(brain, 1.0) == []] == [0, 1, 0, 1]
    assert sent(brain, 70.0) == [("SIGTERM", "program")]
    sent(brain, 10.0)
    assert brain.asked(TypeAnswer) == []


def saves(brain: Brain, *, complete: bool) -> None:
    brain.tell(SavedChecked(Checkpoint(path="/out/ckpt.pt", complete=complete)))


def test_it_gets_time_as_long_as_its_files_change() -> None:
    brain = trains(StopRule(saves=True))
    stop(brain)
    sent(brain)
    for _ in range(5):
        assert sent(brain, 50.0) == []
        saves(brain, complete=False)
    assert sent(brain, 59.0) == []
    assert sent(brain, 2.0) == [("SIGTERM", "program")]

    brain = trains(StopRule(saves=True))
    stop(brain)
    sent(brain)
    saves(brain, complete=True)
    assert sent(brain, 14.0) == []
    assert sent(brain, 2.0) == [("SIGTERM", "program")]

    brain = trains(StopRule(saves=True))
    stop(brain)
    sent(brain)
    # It never gets done.
    seconds = 0
    while sent(brain, 30.0) == []:
        saves(brain, complete=False)
        seconds += 30
    assert 1700 < seconds < 1900


def test_the_first_signal_waits_for_a_save() -> None:
    def ticks(brain: Brain, *after: float) -> list[str]:
        brain.effects.clear()
        for seconds in after:
            brain.tick(after=seconds, saving="/out/ckpt.pt")
        return [one.name for one in brain.asked(Signal)]

    brain = trains(StopRule())
    stop(brain)
    assert ticks(brain, 0.2, 100.0, 1600.0) == []
    says = "the program is saving /out/ckpt.pt: SIGINT follows when it has saved"
    assert brain.messages("stop") == [says]
    assert [answer.message for answer in brain.answers()] == [says]
    assert sent(brain) == [("SIGINT", "group")]
    # It saves on no signal: the next one does not wait.
    assert ticks(brain, 16.0)[0] == "SIGTERM"

    brain = trains(StopRule())
    stop(brain)
    assert ticks(brain, 1700.0, 101.0)[0] == "SIGINT"  # a save that never ends
    brain = trains(StopRule())
    brain.model = replace(stopping.stop_unsaved(brain.model), effects=())
    assert ticks(brain, 0.2)[0] == "SIGINT"


@pytest.mark.parametrize(("signal", "first"), [("SIGINT", "SIGTERM"), ("SIGTERM", "SIGKILL")])
def test_a_program_that_must_not_save_does_not_get_the_signal_on_which_it_does(signal: str, first: str) -> None:
    brain = trains(StopRule(signal=signal, saves=True, asks="save?", answer="y"))  # type: ignore[arg-type]
    brain.model = stopping.stop_unsaved(brain.model)
    brain.model = replace(brain.model, effects=())
    assert brain.model.phase is Phase.STOPPING
    assert [name for name, _ in sent(brain)] == [first]
    assert brain.asked(TypeAnswer) == []
