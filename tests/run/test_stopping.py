"""A stop: which signals go to the program and when, and what becomes of what it leaves behind. No
process; the test sets the clock."""

from __future__ import annotations

import copy

import pytest
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.run import explain
from memtop.supervisor.run.effects import AskRanks, Launch, Signal, SignalTarget
from memtop.supervisor.run.events import (
    AgentAnswer,
    Answered,
    Command,
    Examined,
    LeftoversCleared,
    LeftoversFound,
    NamedProcess,
    ProgramEnded,
    RemedyFacts,
    Requested,
    Signalled,
    States,
    StoodStill,
)
from memtop.supervisor.run.post_mortem.log_end import LogEnd
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.record.configurations import Configurations
from memtop.supervisor.run.state import run_state
from memtop.supervisor.run.stop_ladder import Waits
from memtop.supervisor.run.stop_ladder import begin as begin_ladder
from memtop.supervisor.wire import CheckpointNow, Outcome, Phase, Restart, Stop
from tests.run.brain import SETTINGS, Brain, die, end, restart, stop, training
from tests.run.reported import heard


def rungs(brain: Brain, *waits: float) -> list[str]:
    """The signals that are sent at these moments, each counted from the one before."""
    sent = []
    for wait in waits:
        for effect in brain.tick(after=wait):
            if isinstance(effect, Signal) and effect.target is not SignalTarget.STOPPED:
                sent.append(effect.name)
                brain.tell(Signalled(name=effect.name, processes=(NamedProcess(5, "python"),)))
    return sent


def refuse(brain: Brain) -> None:
    """The trainer answers that it could not save."""
    ask = brain.asked(AskRanks)[-1].ask
    unsaved = AgentAnswer(rank=0, ok=False, message="update 7 not saved: no space", result={"unsaved": True})
    brain.tell(Answered(ask=ask, answers=(unsaved,)))


def test_a_trainer_that_cannot_save_goes_on_until_it_is_stopped_again() -> None:
    brain = training(agents=frozenset({0}))
    stop(brain)
    refuse(brain)
    assert (brain.model.phase, brain.model.ladder) == (Phase.TRAINING, None)
    told = brain.answers()[-1]
    assert told.outcome is Outcome.FAILED
    assert told.message.startswith("not stopped: update 7 not saved: no space; ")
    assert rungs(brain, 100.0, 100.0) == []
    assert run_state(brain.model).warnings == (told.message,)
    stop(brain)
    assert [asked.values for asked in brain.asked(AskRanks)] == [{"only_saved": True}, None]
    assert run_state(brain.model).warnings == ()
    end(brain, 1)
    lost = "2 updates since the last saved state (at update 5) are lost"
    assert (brain.model.phase, brain.model.reason) == (Phase.STOPPED, f"stopped as requested: exit status 1; {lost}")
    assert (brain.answers()[-1].outcome, brain.answers()[-1].message) == (Outcome.FAILED, brain.model.reason)


def test_a_restart_does_not_end_a_trainer_that_cannot_save() -> None:
    brain = training(agents=frozenset({0}))
    restart(brain)
    refuse(brain)
    assert (brain.model.phase, brain.model.pending) == (Phase.TRAINING, None)
    assert brain.answers()[-1].outcome is Outcome.FAILED
    assert brain.messages("warning") == ["not restarted: update 7 not saved: no space; free some space"]
    assert rungs(brain, 100.0) == []


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
    assert ours.why == "its newest save took 150 s"
    assert plain.stretched(100.0, 0.9, 23.0).why == "an update takes it 100 s"
    silent = plain.stretched(1.0, 0.9, 123.0)
    assert (silent.graceful, silent.why) == (276.0, "it has been silent for up to 123 s"), "not the save, which took 0.9 s"
    # A program that hangs is ended, however long it has been silent before.
    assert plain.stretched(1.0, 1e9, saves_on_sigterm=True).terminate == 30.0 + 2 * 1800.0
    assert plain.stretched(5000.0, 1e9).graceful == 30.0 + 2 * 5000.0


@pytest.mark.parametrize("work", ["checkpoint", "evaluation"])
def test_a_trainer_that_saves_for_long_is_not_killed_in_the_middle_of_it(work: str) -> None:
    brain = training(agents=frozenset({0}))
    if work == "checkpoint":
        # The supervisor may have begun after the update before it.
        progress = heard(replace(brain.model.progress, step=None), {"type": "phase", "phase": "training"})
        progress = heard(progress, {"type": "checkpoint", "updates": 7, "seconds": 150.0})
    else:
        progress = heard(brain.model.progress, {"type": "evaluation", "update": 7, "time": 90000.0, "clock": 1140.0})
    brain.model = replace(brain.model, progress=replace(progress, offers=frozenset({"stop"})))
    stop(brain)
    assert [ask.name for ask in brain.asked(AskRanks)] == ["stop"]
    assert rungs(brain, 329.0, 1.0, 329.0, 1.0) == ["SIGTERM", "SIGKILL"]
    why = "its newest save took 150 s" if work == "checkpoint" else "it has been silent for up to 150 s"
    assert brain.messages("stop")[0].endswith(f"SIGTERM follows in 330 s ({why})")


def _asked_before_its_first_update(settings: Settings, rate: float | None, seconds: float, phase: str = "training") -> Brain:
    """A run with the speed of an earlier configuration, stopped so long after its newest report."""
    brain = training(settings=SETTINGS, agents=frozenset({0}))
    brain.now = 10_000.0
    begun = brain.model.configurations.present
    assert begun is not None
    measured = replace(begun, configuration=replace(begun.configuration, samples_per_second=rate))
    known = Configurations(records=(measured,)).begin_attempt(2, "restart", settings, 999.0)
    progress = heard(Progress(offers=frozenset({"stop"})), {"type": "phase", "phase": phase, "clock": brain.now - seconds})
    brain.model = replace(brain.model, settings=settings, configurations=known, progress=progress)
    stop(brain)
    return brain


LARGER = replace(SETTINGS, accumulation=SETTINGS.accumulation * 8)
LONGER = replace(LARGER, seq_len=SETTINGS.seq_len * 2)
SHORTER = replace(LARGER, seq_len=SETTINGS.seq_len // 2)


@pytest.mark.parametrize(
    ("settings", "rate", "seconds", "patience", "why"),
    [
        # 256 samples at 2 a second.
        (LARGER, 2.0, 5.0, 286.0, "an update is forecast to take it 128 s"),
        (LONGER, 2.0, 5.0, 542.0, "an update is forecast to take it 256 s"),
        (SHORTER, 2.0, 5.0, 286.0, "an update is forecast to take it 128 s"),
        (LARGER, 2.0, 300.0, 630.0, "it has been silent for up to 300 s"),
        (LARGER, None, 100.0, 230.0, "it has been silent for up to 100 s"),
        (LARGER, None, 5.0, 60.0, ""),
        # It may hang.
        (LARGER, None, 9000.0, 3630.0, "it has been silent for up to 1800 s"),
    ],
)
def test_the_first_update_of_an_attempt_is_given_the_time_that_it_needs(
    settings: Settings, rate: float | None, seconds: float, patience: float, why: str
) -> None:
    brain = _asked_before_its_first_update(settings, rate, seconds)
    because = f" ({why})" if why else ""
    assert brain.messages("stop")[0].endswith(f"SIGTERM follows in {patience:.0f} s{because}")
    assert rungs(brain, patience - 1.0, 1.0) == ["SIGTERM"]
    if why:
        assert rungs(brain, patience - 1.0, 1.0) == ["SIGKILL"], "it saves on SIGTERM, too"


@pytest.mark.parametrize("phase", ["loading", "compiling", "data"])
def test_a_program_that_loads_has_nothing_to_finish_however_long_it_is_silent(phase: str) -> None:
    brain = _asked_before_its_first_update(LARGER, 2.0, 9000.0, phase)
    assert brain.messages("stop")[0].endswith("SIGTERM follows in 60 s")
    assert rungs(brain, 59.0, 1.0, 39.0, 1.0) == ["SIGTERM", "SIGKILL"]


def test_a_live_change_that_makes_updates_longer_is_waited_for() -> None:
    brain = training(agents=frozenset({0}))
    begun = brain.model.configurations.present
    assert begun is not None
    measured = replace(begun, configuration=replace(begun.configuration, samples_per_second=2.0))
    changed = Configurations(records=(measured,)).change(8, "live", LARGER, died=None, saved=5, changed_by=(1, 999.0))
    progress = replace(brain.model.progress, offers=frozenset({"stop"}))
    brain.model = replace(brain.model, settings=LARGER, configurations=changed, progress=progress)
    stop(brain)
    assert brain.messages("stop")[0].endswith("SIGTERM follows in 286 s (an update is forecast to take it 128 s)")


@pytest.mark.parametrize("why", ["external command", "stands still"])
def test_a_program_that_does_not_save_on_a_signal_is_not_given_longer(why: str) -> None:
    brain = training(settings=None if why == "external command" else SETTINGS)
    brain.model = replace(brain.model, progress=replace(brain.model.progress, longest_pause=150.0))
    if why == "stands still":
        brain.tell(StoodStill("CUDA out of memory"))
    else:
        stop(brain)
    assert rungs(brain, 0.0, 15.0, 40.0) == ["SIGINT", "SIGTERM", "SIGKILL"]


@pytest.mark.parametrize(
    ("settings", "offers", "stopping", "saving", "restarting"),
    [
        (
            SETTINGS,
            None,
            "stopping: the program finishes its update, saves and exits",
            "the training process saves after the present update",
            "restarting from train_latest_state",
        ),
        (
            None,
            frozenset({"free_cache", "checkpoint", "stop"}),
            "stopping: the program finishes its update, saves and exits",
            "the training process saves after the present update",
            # A program that saves may still begin anew.
            f"restarting: the same command {explain.FROM_ZERO}",
        ),
        *(
            (
                None,
                offers,
                "stopping: memtop sends SIGINT to the program; what it saves is up to the program",
                "this program cannot save on request",
                f"restarting: the same command {explain.FROM_ZERO}",
            )
            for offers in (None, frozenset({"free_cache"}))
        ),
    ],
)
def test_only_a_program_that_is_known_to_save_is_promised_to(
    settings: Settings | None, offers: frozenset[str] | None, stopping: str, saving: str, restarting: str
) -> None:
    def told(request: Command) -> str:
        brain = training(settings=settings, agents=frozenset({0}))
        brain.model = replace(brain.model, progress=replace(brain.model.progress, offers=offers))
        brain.tell(Requested(client=1, request=request, states=brain.model.states))
        return brain.answers()[0].message

    assert told(Stop(id=1)) == stopping
    assert told(CheckpointNow(id=1)) == saving
    assert told(Restart(id=1)).split(";")[0] == restarting


def test_a_run_without_a_checkpoint_begins_at_its_first_update() -> None:
    brain = training()
    brain.model = replace(brain.model, states=States())
    die(brain, Kind.NOT_MEMORY)
    assert (brain.model.phase, brain.model.alive) == (Phase.FAILED, False)
    restart(brain)
    said = [waiter.accepts for waiter in brain.model.waiters]
    assert said == ["starting at the first update: nothing has been saved yet"]


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
        "stopped as requested: ended by signal 9 (SIGKILL); SIGKILL sent to pid 5 (python)",
    )
    # A process that waits for a device reacts to no signal.
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
