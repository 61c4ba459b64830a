"""A program with a profile: its checkpoint is copied before it is stopped. Rules only."""

from __future__ import annotations

from msgspec.structs import replace

from memtop.presets.program_profiles import CheckpointRule, Counter, Detect, KnobRule, ProgramProfile, Resume
from memtop.supervisor.run.effects import KeepCheckpoint, Launch, Signal
from memtop.supervisor.run.events import CheckpointKept, Launched, LaunchRefused, Requested, SavedChecked
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.output.values import Seen
from memtop.supervisor.wire import Change, Checkpoint, Outcome, Phase, Restart, Stop
from tests.run.brain import Brain, end, stop, training

SAVED = Checkpoint(path="/out/ckpt.pt", updates=5, complete=True)
NEVER = Resume(how="never", why="it has no option for that")
RULE = CheckpointRule(paths=("/out/ckpt.pt",), step=Counter(read="torch", key="step"))


def profile(resume: Resume | None = None) -> ProgramProfile:
    resume = resume or Resume(how="flag", words=("--resume",))
    return ProgramProfile(
        name="p",
        title="p",
        detect=Detect(scripts=("p.py",)),
        batch=KnobRule(),
        accumulation=KnobRule(),
        checkpoint=RULE,
        resume=resume,
    )


def trains(resume: Resume | None = None) -> Brain:
    grip = Grip(profile=profile(resume), batch=8, accumulation=2)
    output = Seen(attempt=1, first=1, step=7, update=7, time=1.0)
    return training(settings=None, grip=grip, output=output)


def ask(brain: Brain, **assignments: str) -> None:
    states = replace(brain.model.states, program=SAVED)
    brain.tell(Requested(client=1, request=Restart(id=1, change=Change(assignments=assignments)), states=states))


def outcomes(brain: Brain) -> list[Outcome]:
    return [answer.outcome for answer in brain.answers()]


def test_the_program_is_stopped_when_the_copy_is_there() -> None:
    brain = trains()
    ask(brain, batch="4", accumulation="4")
    assert len(brain.asked(KeepCheckpoint)) == 1
    brain.tick()
    assert (brain.asked(Signal), outcomes(brain), brain.model.phase) == ([], [], Phase.TRAINING)
    brain.tell(CheckpointKept())
    assert (outcomes(brain), brain.model.phase) == ([Outcome.ACCEPTED], Phase.RESTARTING)
    brain.tick()
    assert brain.asked(Signal)[0].name == "SIGINT"


def test_a_stop_calls_the_restart_off_also_if_the_program_has_ended_meanwhile() -> None:
    brain = trains()
    ask(brain, batch="4", accumulation="4")
    end(brain, 0)
    brain.tell(Requested(client=2, request=Stop(id=2), states=brain.model.states))
    assert [answer.message for answer in brain.answers()] == [
        "called off by a request to stop",
        "the restart is called off; the run is finished",
    ]
    brain.tell(CheckpointKept())
    assert brain.asked(Launch) == []


def test_a_restart_of_the_supervisor_before_is_carried_out_once() -> None:
    brain = trains()
    brain.model = replace(brain.model, pending=Change(assignments={"batch": "4", "accumulation": "4"}))
    brain.tick()
    assert len(brain.asked(KeepCheckpoint)) == 1
    end(brain, 0)
    (launch,) = brain.asked(Launch)
    brain.tell(Launched(number=launch.number, started=brain.wall, resumed=SAVED, grip=launch.grip))
    brain.effects.clear()
    brain.tell(CheckpointKept())
    assert brain.model.phase is Phase.STARTING
    assert brain.effects == []


def test_the_learning_rate_at_the_checkpoint_is_said() -> None:
    brain = trains()
    assert brain.model.output is not None
    brain.model = replace(brain.model, output=replace(brain.model.output, learning_rate=3e-4))
    brain.tell(SavedChecked(SAVED))
    ask(brain, batch="4", accumulation="4")
    brain.tell(CheckpointKept())
    (answer,) = brain.answers()
    assert "; the learning rate there (about 0.0003) is the same before and after" in answer.message


def test_without_a_copy_the_program_runs_on() -> None:
    brain = trains()
    ask(brain, batch="4", accumulation="4")
    brain.tell(CheckpointKept(problem="/out/ckpt.pt: cannot be copied: the disk is full"))
    (answer,) = brain.answers()
    assert (answer.outcome, answer.message) == (Outcome.REFUSED, "/out/ckpt.pt: cannot be copied: the disk is full")
    brain.tick()
    assert (brain.asked(Signal), brain.model.phase) == ([], Phase.TRAINING)


def test_a_program_that_ends_while_it_is_copied_is_started_again() -> None:
    brain = trains()
    ask(brain, batch="4", accumulation="4")
    end(brain, 0)
    brain.tell(CheckpointKept())
    (launch,) = brain.asked(Launch)
    assert launch.knobs == {"batch": 4, "accumulation": 4}
    assert outcomes(brain) == []
    brain.tell(Launched(number=launch.number, started=brain.wall, resumed=SAVED, grip=launch.grip))
    assert outcomes(brain) == [Outcome.ACCEPTED, Outcome.DONE]


def test_a_stop_that_comes_while_it_is_copied_wins() -> None:
    brain = trains()
    ask(brain, batch="4", accumulation="4")
    stop(brain)
    brain.tell(CheckpointKept())
    end(brain, -2)
    assert (brain.model.phase, brain.asked(Launch)) == (Phase.STOPPED, [])


def test_requests_wait_while_the_checkpoint_for_a_launch_is_copied() -> None:
    brain = trains()
    ask(brain, batch="4", accumulation="4")
    brain.tell(CheckpointKept())
    end(brain, -2)
    (launch,) = brain.asked(Launch)
    stop(brain)
    brain.tick()
    assert brain.model.phase is Phase.RESTARTING
    brain.tell(Launched(number=launch.number, started=brain.wall, resumed=SAVED, grip=launch.grip))
    brain.tick()
    assert brain.model.phase is Phase.STOPPING


def test_a_launch_that_is_refused_leaves_the_run_ended() -> None:
    brain = trains()
    ask(brain, batch="4", accumulation="4")
    brain.tell(CheckpointKept())
    end(brain, -2)
    brain.tell(LaunchRefused(number=2, why="its position could not be converted"))
    assert (brain.model.phase, brain.model.reason) == (Phase.FAILED, "its position could not be converted")


def test_a_program_that_never_resumes_is_not_started_from_zero() -> None:
    for assignments in ({"batch": "4", "accumulation": "4"}, {}):
        brain = trains(NEVER)
        ask(brain, **assignments)
        (answer,) = brain.answers()
        assert answer.outcome is Outcome.REFUSED
        assert answer.message.startswith("this program would begin from zero (profile p): it has no option for that")
        assert (brain.model.phase, brain.asked(KeepCheckpoint)) == (Phase.TRAINING, [])
    # A person may want that, and before its first update nothing is lost.
    brain = trains(NEVER)
    ask(brain, position="lost")
    brain.tell(CheckpointKept())
    assert outcomes(brain) == [Outcome.ACCEPTED]
    brain = trains(NEVER)
    brain.model = replace(brain.model, output=None, progress=replace(brain.model.progress, step=None))
    ask(brain)
    brain.tell(CheckpointKept())
    assert outcomes(brain) == [Outcome.ACCEPTED]
