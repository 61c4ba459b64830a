"""A program with a profile: what a restart may change, and how its first lines show the effect.
Rules only; `test_profile_restart.py` starts programs."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memtop.presets.program_profiles import StopRule, load_profiles
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.program import Knob, Knobs, known
from memtop.supervisor.run.effects import Launch, Signal, UpdateAttempt
from memtop.supervisor.run.events import CheckpointKept, Examined, Launched, OutputRead, RemedyFacts, Requested
from memtop.supervisor.run.grip import Grip, consequences
from memtop.supervisor.run.output.values import Seen
from memtop.supervisor.run.reports import LoopFound
from memtop.supervisor.run.state import run_state
from memtop.supervisor.wire import Change, Checkpoint, Phase, Restart
from tests.run.brain import Brain, end, proposal, states, training

PROFILES = load_profiles()
SAVED = Checkpoint(path="/out/ckpt.pt", updates=20, complete=True)
HALF = {"batch": "4", "accumulation": "4"}


def grip(name: str = "nanogpt", **values: Any) -> Grip:
    first = {"batch": 8, "accumulation": 2, "seq_len": 16, "values": {"out_dir": "/out"}}
    return Grip(profile=PROFILES[name], why="because", **{**first, **values})


def trains(held: Grip) -> Brain:
    output = Seen(attempt=1, first=1, step=25, update=25, time=1.0)
    return training(settings=None, grip=held, output=output, states=replace(states(), program=SAVED))


def ask(brain: Brain, **assignments: str) -> str:
    now = replace(brain.model.states, program=SAVED)
    brain.tell(Requested(client=1, request=Restart(id=1, change=Change(assignments=assignments)), states=now))
    if not brain.answers():
        brain.tell(CheckpointKept())
    return brain.answers()[-1].message


def restarted(held: Grip, saved: Checkpoint | None = SAVED) -> Brain:
    """The next attempt has begun with half the batch."""
    brain = trains(held)
    ask(brain, **HALF)
    end(brain, -2)
    (launch,) = brain.asked(Launch)
    assert (launch.grip, launch.knobs) == (held, {"batch": 4, "accumulation": 4})
    after = replace(held, batch=4, accumulation=4)
    brain.tell(Launched(number=launch.number, started=brain.wall, resumed=saved, grip=after))
    return brain


def prints(brain: Brain, first: int, **values: Any) -> None:
    seen = Seen(attempt=2, first=first, step=first + 1, update=first + 1, time=2.0, **values)
    brain.tell(OutputRead(seen))


def test_a_complete_program_is_not_started_again_for_nothing() -> None:
    def asked(total: int | None, *, held: Grip | None = None, **assignments: str) -> str:
        brain = trains(held or grip())
        assert brain.model.output is not None
        brain.model = replace(brain.model, output=replace(brain.model.output, total_updates=total))
        end(brain, 0)
        assert brain.model.phase is Phase.FINISHED
        request = Restart(id=1, change=Change(assignments=assignments))
        brain.tell(Requested(client=1, request=request, states=brain.model.states))
        return "launched" if brain.asked(Launch) else brain.answers()[-1].message

    words = (
        "nothing is left to train: 20 updates are done, and the length is 20; `memtop train -- COMMAND` with a greater length"
    )
    assert asked(20).startswith(words)
    # What another batch leaves to do is not known; nor is the length, if it is not printed.
    assert asked(20, **HALF) == asked(25) == asked(None) == "launched"
    # It begins again.
    assert asked(20, held=grip("chatlm"), position="lost") == "launched"


def test_a_position_in_an_epoch_shows_that_a_program_is_complete() -> None:
    def asked(step: int, steps_of_epoch: int | None) -> str:
        """Two epochs with 24 micro-batches each, so 24 updates."""
        output = Seen(
            attempt=1,
            first=1,
            step=48,
            update=24,
            time=1.0,
            total_updates=24,
            steps_of_epoch=steps_of_epoch,
            steps_per_update=2,
        )
        saved = Checkpoint(path="/out/a.pth", step=step, epoch=1, complete=True)
        brain = training(settings=None, grip=grip("minimind"), output=output, states=replace(states(), program=saved))
        end(brain, 0)
        brain.tell(Requested(client=1, request=Restart(id=1, change=Change()), states=brain.model.states))
        return "launched" if brain.asked(Launch) else brain.answers()[-1].message

    assert asked(24, 24).startswith("nothing is left to train: 24 updates are done, and the length is 24; ")
    # Without the length of an epoch, it is not known.
    assert asked(20, 24) == asked(24, None) == "launched"


def test_the_public_state_names_profile_and_knobs() -> None:
    found = run_state(trains(grip()).model)
    assert found.program is not None
    assert (found.program.grip, found.program.profile, found.program.resumes) == ("profile", "nanogpt", True)
    assert found.effective_batch == 16
    lost = run_state(trains(grip("chatlm")).model).program
    assert lost is not None
    assert lost.resumes is False


@pytest.mark.parametrize(
    ("held", "assignments", "says"),
    [
        (grip(fixed={"seq_len": "it belongs to the model"}), {"seq_len": "8"}, "seq_len: it belongs to the model"),
        (
            grip(),
            {"lora.r": "8"},
            "lora.r: this program is your own and has the profile nanogpt: memtop can change only batch, ",
        ),
        (grip(), {"batch": "0"}, "batch 0: must be a whole number from 1 on"),
        (
            grip(processes=4),
            {"accumulation": "6"},
            "accumulation 6: the program divides it by its 4 processes",
        ),
        (grip("chatlm"), {"batch": "4"}, "this program would count its updates from zero (profile chatlm): it loads weights"),
        (grip("chatlm"), {"batch": "4", "position": "held"}, "position held: lost is the only value"),
    ],
)
def test_what_is_refused(held: Grip, assignments: dict[str, str], says: str) -> None:
    brain = trains(held)
    assert ask(brain, **assignments).startswith(says)
    assert brain.asked(Signal) == []


def test_the_effective_batch_follows_from_what_the_program_divides() -> None:
    assert grip(processes=2).effective_batch == 16
    assert grip("minimind", processes=2).effective_batch == 32


def test_what_a_restart_means_is_said_before() -> None:
    assert consequences(grip(), HALF, SAVED, 25) == (
        "; 5 updates since update 20 are done again; batch 8 x 2 -> 4 x 4: the effective batch stays 16; its samples are "
        "drawn at random; with a fixed seed the program draws those of its beginning again; the learning rate there is the "
        "same before and after"
    )
    profile = grip().profile
    assert profile is not None
    saves = replace(grip(), profile=replace(profile, stop=StopRule(saves=True)))
    again = "; 5 updates since update 20 are done again, unless the program saves when it is stopped"
    assert consequences(saves, {}, SAVED, 25) == again
    unknown = replace(SAVED, updates=None, step=8, epoch=1)
    text = consequences(grip("minimind"), HALF, unknown, 25)
    assert text.startswith("; batch 8 x 2 -> 4 x 4: the effective batch stays 16; its position is converted")
    assert "batch 8 x 2 -> 4 x 2; effective batch 16 -> 8 (-50.0 %): changes training; its samples are drawn at random" in (
        consequences(grip(), {"batch": "4"}, SAVED, 25)
    )


def test_what_memtop_has_seen_in_the_program_is_known_where_its_profile_says_nothing() -> None:
    """A profile with a batch only: torch's loader shows that an update has one micro-batch."""
    profile = replace(PROFILES["nanogpt"], accumulation=None)
    held = Grip(profile=profile, why="because", batch=32, knobs=Knobs(batch=Knob(value=32, name="--batch-size")))
    loop = LoopFound(
        framework="torch's DataLoader",
        effective_batch=32,
        knobs=Knobs(batch=Knob(value=32), accumulation=Knob(value=1, source="batches of an update")),
    )
    brain = trains(held)
    said = "batch 32 x 1 -> 16 x 1; effective batch 32 -> 16 (-50.0 %): changes training"
    assert said not in ask(brain, batch="16"), "before its first updates, nobody knows"
    brain = trains(held)
    brain.model = replace(brain.model, progress=replace(brain.model.progress, loop=loop))
    shown = run_state(brain.model)
    assert shown.program is not None
    assert (known(shown.program.knobs), shown.effective_batch) == ({"batch": 32, "accumulation": 1}, 32)
    assert said in ask(brain, batch="16")


def test_each_configuration_keeps_the_settings_that_its_program_used() -> None:
    brain = restarted(grip(knobs=Knobs(batch=Knob(value=4), accumulation=Knob(value=4), seq_len=Knob(value=16))))
    present = brain.model.configurations.rows[-1]
    assert (present.knobs, present.uses) == (HALF, {"batch": 4, "accumulation": 4, "seq_len": 16})
    assert present.since_update == 21, "after the checkpoint"
    report = {"knobs": {"batch": {"value": 2}, "accumulation": {"value": 8}}}
    plain = training(settings=None, grip=None)
    plain.report({"type": "loop", "framework": "torch's DataLoader", "effective_batch": 16, **report})
    assert plain.model.configurations.rows[-1].uses == {"batch": 2, "accumulation": 8}


def test_a_program_that_has_resumed_is_known_to_resume() -> None:
    brain = restarted(grip())
    prints(brain, 20, printed={"tokens": 256})
    assert brain.model.grip is not None
    assert brain.model.grip.resumes is True
    assert brain.messages("knob") == []
    # Where it begins is known from the checkpoint.
    assert not any("start_updates" in effect.values for effect in brain.asked(UpdateAttempt))


def test_a_knob_without_effect_is_an_event() -> None:
    brain = restarted(grip())
    prints(brain, 20, printed={"tokens": 512, "batch": 8})
    assert brain.messages("knob") == [
        "this setting had no effect: the number of tokens of an update 256 was asked for, the program uses 512",
        "this setting had no effect: batch 4 was asked for, the program uses 8",
    ]


def test_the_batch_of_its_data_loader_shows_that_a_knob_had_no_effect() -> None:
    brain = restarted(grip("minimind"))
    brain.report({"type": "step", "update": 21, "batch": 8}, {"type": "step", "update": 22, "batch": 8})
    assert brain.messages("knob") == ["this setting had no effect: batch 4 was asked for, the program uses 8"]


def test_a_program_that_begins_from_zero_is_stopped_if_its_lines_are_known() -> None:
    brain = restarted(grip())
    brain.effects.clear()
    prints(brain, 0)
    assert "its output begins with step 0 instead of 20. It is stopped" in brain.messages("warning")[-1]
    brain.tick()
    assert brain.asked(Signal)
    brain = restarted(grip("minimind"), replace(SAVED, updates=None, step=40, epoch=0))
    brain.effects.clear()
    prints(brain, 1)
    assert brain.messages("warning")[-1].startswith(
        "the program may not have resumed: its output begins with step 1 instead of 40"
    )
    brain.tick()
    assert brain.asked(Signal) == []


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (141, "the program has resumed: its output begins with step 41"),
        (101, "the program may not have resumed: its output begins with step 1 instead of 40"),
    ],
)
def test_a_program_that_begins_its_epoch_again_has_not_resumed(first: int, says: str) -> None:
    """Its counter begins again in each epoch; what memtop reads from the output does not."""
    brain = restarted(grip("minimind"), replace(SAVED, updates=None, step=40, epoch=1))
    prints(brain, first, steps_of_epoch=100)
    assert brain.messages("resume" if first == 141 else "warning")[-1].startswith(says)


def test_settings_with_which_it_does_not_start_are_taken_back() -> None:
    brain = restarted(grip())
    end(brain, 1)
    brain.tell(Examined(diagnosis=Diagnosis(kind=Kind.NOT_MEMORY, confidence=0.9, summary="no"), facts=RemedyFacts()))
    assert brain.asked(Launch)[-1].knobs == {}


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (grip(), None),
        (grip("minimind"), "it has not resumed under memtop yet, and its output would not show at once"),
        (grip("minimind", resumes=True), None),
        (grip(resumes=False), "it did not resume when it was started again"),
        (grip("chatlm", resumes=True), "this program would count its updates from zero"),
    ],
)
def test_when_it_runs_out_of_memory_it_goes_on_only_if_it_is_known_to_resume(held: Grip, why: str | None) -> None:
    brain = trains(held)
    end(brain, 1)
    found = Diagnosis(kind=Kind.HOST_OOM_ALLOC, confidence=0.97, summary="it died", source="record")
    brain.tell(Examined(diagnosis=found, facts=RemedyFacts()))
    brain.tick(after=30.0)
    if why is None:
        (launch,) = brain.asked(Launch)
        assert launch.knobs == {"batch": 4, "accumulation": 4}
    else:
        assert (brain.asked(Launch), brain.model.phase) == ([], Phase.FAILED)
        assert why in (proposal(brain).waiting or "")


def test_a_knob_that_cannot_be_changed_is_no_remedy() -> None:
    brain = trains(grip(fixed={"accumulation": "it is in the code"}))
    end(brain, 1)
    found = Diagnosis(kind=Kind.HOST_OOM_ALLOC, confidence=0.97, summary="it died", source="record")
    brain.tell(Examined(diagnosis=found, facts=RemedyFacts()))
    assert "smaller_batch" not in [one.id for one in proposal(brain).remedies]
