"""A program built on Hugging Face's Trainer: what a restart may change, and how its first update
shows the effect. Rules only; `test_trainer_restart.py` starts programs."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.monitor.values import GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.recovery.bottleneck import Measured
from memtop.supervisor.recovery.values import Advice, Peak
from memtop.supervisor.run.effects import KeepCheckpoint, Launch, Signal
from memtop.supervisor.run.events import CheckpointKept, Examined, Launched, RemedyFacts, Requested, Sampled
from memtop.supervisor.run.grip import Grip, consequences, rate_at, shape_key
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.rules.prevention import advised
from memtop.supervisor.run.state import state_file
from memtop.supervisor.wire import Change, Checkpoint, Outcome, Phase, Restart, Stop
from tests.run.brain import RUN, Brain, end, proposal, row, states, taken_over, training

GRIP = Grip(output_dir="/out", batch=8, accumulation=2, since=RUN.created)
FOUND = {"type": "trainer", "output_dir": "/out", "batch": 8, "accumulation": 2}
HALF = Change(assignments={"batch": "4", "accumulation": "4"})
NOTHING = Diagnosis(kind=Kind.NOT_MEMORY, confidence=0.9, summary="it failed")
SAVED = Checkpoint(path="/out/checkpoint-5", updates=5, complete=True)


def trains(**values: Any) -> Brain:
    return training(settings=None, **{"grip": GRIP, **values})


def request(brain: Brain, change: Change, saved: Checkpoint | None = SAVED) -> None:
    states = replace(brain.model.states, program=saved)
    brain.tell(Requested(client=1, request=Restart(id=1, change=change), states=states))


def ask(brain: Brain, change: Change = HALF, saved: Checkpoint | None = SAVED) -> str:
    """The answer to a request for a restart."""
    request(brain, change, saved)
    if brain.asked(KeepCheckpoint):
        brain.tell(CheckpointKept())
    return brain.answers()[-1].message


def launched(brain: Brain, saved: Checkpoint | None = SAVED) -> Launch:
    """The program has stopped, and the next attempt starts."""
    end(brain, -2)
    return starts(brain, saved)


def starts(brain: Brain, saved: Checkpoint | None = SAVED) -> Launch:
    """The next attempt starts."""
    launch = brain.asked(Launch)[-1]
    found = replace(states(), program=saved)
    brain.tell(Launched(number=launch.number, started=brain.wall, resumed=saved, states=found))
    return launch


def begins(brain: Brain, update: int = 5, **step: Any) -> None:
    plan = {"type": "plan", "updates": update, "resumed": update > 0}
    brain.report({**FOUND, "batch": 4, "accumulation": 4}, plan, {"type": "step", "update": update + 1, **step})


def test_a_restart_keeps_the_checkpoint_and_gives_the_settings_to_the_program() -> None:
    brain = training(settings=None)
    assert ask(brain).startswith("this run's program is your own")
    brain.report(FOUND)
    brain.effects.clear()
    words = ask(brain)
    assert words == (
        "restarting from the program's checkpoint at update 5, or a newer one; 2 updates since update 5 are done again, unless "
        "the program saves when it is stopped; batch 8 x 2 -> 4 x 4: the effective batch stays 16, and so do order and "
        "learning rate"
    )
    assert brain.asked(KeepCheckpoint) == [KeepCheckpoint(grip=GRIP, after=replace(GRIP, batch=4, accumulation=4))]
    launch = launched(brain)
    assert (launch.grip, launch.knobs) == (GRIP, {"batch": 4, "accumulation": 4})
    begins(brain, batch=4, accumulation=4)
    assert brain.messages("knob") == []
    assert brain.model.grip == replace(GRIP, batch=4, accumulation=4, resumes=True)
    rows = brain.model.configurations.rows
    assert [row.knobs for row in rows] == [{}, {"batch": "4", "accumulation": "4"}]
    # They stay, until another restart changes them or goes back.
    ask(brain, Change(assignments={"accumulation": "8"}))
    assert launched(brain).knobs == {"batch": 4, "accumulation": 8}
    begins(brain)
    ask(brain, Change(configuration=1))
    assert launched(brain).knobs == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            Change(assignments={"lora.r": "4"}),
            "lora.r: this program is your own and is built on Hugging Face's Trainer: memtop",
        ),
        (Change(assignments={"batch": "0"}), "batch 0: must be a whole number from 1 on"),
        (Change(assignments={"batch": "auto"}), "batch auto: must be a whole number"),
        (Change(assignments={"gradient_checkpointing": "2"}), "gradient_checkpointing 2: must be true or false"),
        (Change(assignments={"seq_len": "64"}), "seq_len: the arguments of this program's Trainer have no such field"),
        (Change(preset="low"), "this program is your own and is built on Hugging Face's Trainer: memtop can change only batch"),
        (Change(configuration=7), "configuration 7: this run has no such configuration; there are 1 to 1"),
    ],
)
def test_what_cannot_be_changed_is_refused_in_one_line(change: Change, words: str) -> None:
    brain = trains()
    ask(brain, change)
    (answer,) = brain.answers()
    assert (answer.outcome, answer.usage) == (Outcome.REFUSED, True)
    assert answer.message.startswith(words)
    assert "\n" not in answer.message
    assert brain.model.phase is Phase.TRAINING


def test_a_training_that_is_complete_goes_on_only_if_it_gets_longer() -> None:
    brain = trains()
    brain.report({"type": "plan", "updates": 0, "total_updates": 5}, {"type": "step", "update": 5})
    words = (
        "nothing is left to train: 5 updates are done, and the length is {}; `memtop restart a --max-updates N` trains longer"
    )
    assert ask(brain, Change(max_updates=5)) == words.format(5)
    end(brain, 0)
    assert brain.model.phase is Phase.FINISHED
    assert ask(brain) == ask(brain, Change()) == words.format(5)
    assert ask(brain, Change(max_updates=4)) == words.format(4)
    # The same, asked for in the last update.
    late = trains()
    late.report({"type": "plan", "updates": 0, "total_updates": 5}, {"type": "step", "update": 4})
    request(late, Change(), replace(SAVED, updates=4))
    late.tell(CheckpointKept())
    late.report({"type": "step", "update": 5})
    late.model = replace(late.model, states=replace(late.model.states, program=SAVED))
    end(late, 0)
    assert (late.model.phase, late.model.reason, late.asked(Launch)) == (Phase.FINISHED, words.format(5), [])
    # Half the batch needs twice as many updates for the same epochs.
    request(brain, Change(assignments={"batch": "4"}))
    assert brain.asked(Launch)[-1].knobs == {"batch": 4}


TOO_SHORT = (
    "nothing would be left to train: {0} updates are done then, and the new length is {1}; --max-updates N, with N above {0}, "
    "trains longer"
)


def at_update(update: int, *offers: str) -> Brain:
    """It has done so many of 10 updates, and can be asked for these commands."""
    brain = trains()
    plan = {"type": "plan", "updates": 0, "total_updates": 10}
    brain.report({"type": "hello", "pid": 2, "offers": offers}, plan, {"type": "step", "update": update})
    return brain


@pytest.mark.parametrize(
    ("change", "length"),
    [
        (Change(assignments={"accumulation": "4"}), 5),
        (Change(assignments={"batch": "16", "accumulation": "4"}), 3),
        (Change(max_updates=6), 6),
    ],
)
def test_settings_that_leave_nothing_to_train_are_refused_before_the_program_is_stopped(change: Change, length: int) -> None:
    brain = at_update(6, "stop")
    brain.effects.clear()
    assert ask(brain, change) == TOO_SHORT.format(7, length)
    assert (brain.answers()[-1].usage, brain.model.phase, brain.model.holding) == (True, Phase.TRAINING, None)
    # Its saved state is of update 5, and it saves no other one when it is stopped.
    earlier = replace(SAVED, updates=2)
    loses = at_update(6)
    assert ask(loses, Change(assignments={"accumulation": "4"}), earlier).startswith("restarting from")
    # Long enough with another length, or with less of a change.
    for other in (Change(assignments={"accumulation": "4"}, max_updates=8), Change(assignments={"accumulation": "1"})):
        assert ask(at_update(6, "stop"), other).startswith("restarting from")
    # It has been stopped meanwhile.
    stopped = at_update(6, "stop")
    end(stopped, 1)
    stopped.tell(Examined(diagnosis=NOTHING, facts=RemedyFacts()))
    assert ask(stopped, change, replace(SAVED, updates=7)) == TOO_SHORT.format(7, length)


def test_a_return_to_earlier_settings_that_leave_nothing_to_train_is_refused() -> None:
    knobs = {"batch": {"value": 8}, "accumulation": {"value": 2}}
    brain = trains()
    brain.report({"type": "plan", "updates": 0, "total_updates": 10, "knobs": knobs}, {"type": "step", "update": 5})
    ask(brain, Change(assignments={"accumulation": "1"}))
    launched(brain)
    plan = {"type": "plan", "updates": 5, "total_updates": 20, "resumed": True}
    hello = {"type": "hello", "pid": 3, "offers": ["stop"]}
    brain.report(hello, {**FOUND, "accumulation": 1}, plan, {"type": "step", "update": 12})
    assert ask(brain, Change(configuration=1)) == TOO_SHORT.format(13, 10)
    # Of the length that memtop gave to it, or that it has without, nothing is known then.
    ask(brain, Change(max_updates=30))
    launched(brain)
    longer = {**FOUND, "accumulation": 1, "fixed_length": True}
    brain.report(longer, {**plan, "total_updates": 30}, {"type": "step", "update": 6})
    assert ask(brain, Change(configuration=1)).startswith("restarting from")


def test_a_program_that_gets_too_far_while_it_is_stopped_has_not_finished() -> None:
    brain = at_update(3, "stop")
    request(brain, Change(assignments={"accumulation": "4"}), replace(SAVED, updates=3))
    brain.tell(CheckpointKept())
    brain.report({"type": "step", "update": 5})
    brain.model = replace(brain.model, states=replace(brain.model.states, program=SAVED))
    end(brain, 0)
    assert (brain.model.phase, brain.model.reason, brain.asked(Launch)) == (Phase.STOPPED, TOO_SHORT.format(5, 5), [])


def test_a_finished_training_is_complete_whatever_it_has_saved() -> None:
    brain = at_update(10)
    end(brain, 0)
    words = "nothing is left to train: 10 updates are done, and the length is 10; "
    words += "`memtop restart a --max-updates N` trains longer"
    assert ask(brain, Change()) == ask(brain, HALF) == words
    request(brain, Change(max_updates=12))
    assert brain.asked(Launch)[-1].knobs == {"max_updates": 12}
    # It has ended itself before its last update.
    early = at_update(8)
    end(early, 0)
    request(early, Change())
    assert len(early.asked(Launch)) == 1


def test_what_is_said_of_a_program_that_has_died_is_certain() -> None:
    brain = at_update(7)
    end(brain, -9)
    brain.tell(Examined(diagnosis=NOTHING, facts=RemedyFacts()))
    request(brain, Change())
    starts(brain)
    assert brain.answers()[0].message == (
        "restarting from the program's checkpoint at update 5; 2 updates since update 5 are done again"
    )


def test_what_failed_in_its_last_evaluation_is_restarted() -> None:
    brain = trains()
    brain.report({"type": "plan", "updates": 0, "total_updates": 5}, {"type": "step", "update": 5})
    end(brain, 0)
    brain.model = replace(brain.model, phase=Phase.FAILED)
    request(brain, Change(assignments={"eval_batch": "1"}), SAVED)
    assert brain.asked(Launch)[-1].knobs == {"eval_batch": 1}


AGAIN = (
    "nothing is left to train: 5 updates are done, and the length is 5; it has no complete checkpoint; `memtop restart a "
    "--set position=lost` trains it again from zero"
)


def test_a_training_that_is_complete_and_has_saved_nothing_begins_from_zero_only_if_a_person_says_so() -> None:
    brain = trains()
    plan, step = {"type": "plan", "updates": 0, "total_updates": 5}, {"type": "step", "update": 5}
    brain.report(plan, step, {"type": "end", "outcome": "finished"})
    assert ask(brain, Change(), None) == AGAIN  # the program runs on, after its training
    end(brain, 0)
    assert ask(brain, Change(assignments={"eval_batch": "1"}), None) == AGAIN
    request(brain, Change(assignments={"eval_batch": "1", "position": "lost"}), None)
    assert brain.asked(Launch)[-1].knobs == {"eval_batch": 1}
    # The same, asked for in the last update.
    late = trains()
    late.report(plan, {**step, "update": 4})
    request(late, Change(), None)
    late.tell(CheckpointKept())
    late.report(step, {"type": "end", "outcome": "finished"})
    end(late, -2)
    assert (late.model.phase, late.model.reason, late.asked(Launch)) == (Phase.FINISHED, AGAIN, [])


@pytest.mark.parametrize(("update", "saved", "words"), [(5, SAVED, "final save"), (3, None, "updates are missing")])
def test_a_stopped_program_is_not_finished_while_something_is_left_for_it(
    update: int, saved: Checkpoint | None, words: str
) -> None:
    """It can do the rest from its checkpoint, or its own handler ended its training early."""
    brain = trains()
    brain.report({"type": "plan", "updates": 0, "total_updates": 5}, {"type": "step", "update": update})
    brain.report({"type": "end", "outcome": "finished"})
    brain.tell(Requested(client=1, request=Stop(id=1), states=replace(brain.model.states, program=saved)))
    end(brain, -2)
    assert brain.model.phase is Phase.STOPPED, words
    if saved is not None:
        request(brain, Change(assignments={"eval_batch": "1"}), saved)
        assert brain.asked(Launch)[-1].knobs == {"eval_batch": 1}


def test_a_longer_training_keeps_its_new_length() -> None:
    brain = trains()
    brain.report({"type": "plan", "updates": 0, "total_updates": 5}, {"type": "step", "update": 5})
    end(brain, 0)
    request(brain, Change(max_updates=8))
    assert starts(brain).knobs == {"max_updates": 8}
    begins(brain)
    ask(brain)
    assert launched(brain).knobs == {"max_updates": 8, "batch": 4, "accumulation": 4}


def test_checkpoints_of_another_training_do_not_count() -> None:
    brain = training(settings=None)
    brain.report({**FOUND, "earlier": {"checkpoint-500": 12}}, {"type": "plan", "updates": 0})
    ask(brain, Change())
    earlier = replace(GRIP, earlier={"checkpoint-500": 12})
    assert brain.asked(KeepCheckpoint) == [KeepCheckpoint(grip=earlier, after=earlier)]
    launched(brain)
    # They do not become others in later attempts, nor what the program resumes from for memtop.
    brain.report(
        {**FOUND, "earlier": {"checkpoint-500": 12, "checkpoint-5": 20}}, {"type": "plan", "updates": 5, "resumed": True}
    )
    assert brain.model.grip == replace(GRIP, earlier={"checkpoint-500": 12})
    brain = training(settings=None)
    brain.report({**FOUND, "earlier": {"checkpoint-3": 12}}, {"type": "plan", "updates": 3, "resumed": True})
    assert brain.model.grip == replace(GRIP, earlier={"checkpoint-3": 12}, first=3)


def test_another_effective_batch_says_what_happens_to_order_and_learning_rate() -> None:
    smaller = consequences(GRIP, {"batch": "4"}, SAVED, None, 20)
    assert "the effective batch changes from 16 to 8" in smaller
    assert "about 40 samples are repeated" in smaller
    assert smaller.endswith("the learning rate now follows a schedule with 2 times as many updates")
    linear = replace(GRIP, peak_rate=4e-4, schedule="linear")
    words = "the learning rate there changes from 0.0003 to 0.00035"
    assert consequences(linear, {"batch": "4"}, SAVED, None, 20).endswith(words)
    # What does not change is left out.
    at_zero = consequences(linear, {"batch": "4"}, None, None, 20)
    assert at_zero.endswith("changes from 16 to 8; the learning rate now follows a schedule with 2 times as many updates")
    constant = replace(linear, schedule="constant")
    warm = replace(constant, schedule="constant_with_warmup", warmup=2)
    for unchanged in (constant, replace(constant, peak_rate=None), warm):
        for change in ({"batch": "4"}, {"max_updates": "40"}):
            assert consequences(unchanged, change, SAVED, None, 20).endswith("the learning rate stays the same")
    uneven = consequences(linear, {"batch": "4"}, SAVED, None, 30)
    assert uneven.endswith("the learning rate there changes from 0.000333 to 0.000367"), "three digits"
    fixed = replace(linear, fixed_length=True)
    assert "the learning rate continues as it was" in consequences(fixed, {"batch": "4"}, SAVED, None, 20)
    longer = consequences(linear, {"max_updates": "40"}, SAVED, None, 20)
    assert longer == "; 20 -> 40 updates: the learning rate there changes from 0.0003 to 0.00035"
    both = consequences(linear, {"max_updates": "40", "batch": "4"}, SAVED, None, 20)
    assert both.startswith(longer)
    assert both.endswith("about 40 samples are repeated")
    assert "about 80 samples are skipped" in consequences(GRIP, {"accumulation": "4"}, SAVED, None, None)
    assert consequences(GRIP, {}, SAVED, 5, None) == ""
    assert consequences(GRIP, {}, SAVED, 7, None, ended=True) == "; 2 updates since update 5 are done again"
    assert consequences(GRIP, {}, SAVED, 6, None, ended=True) == "; 1 update since update 5 is done again"
    assert consequences(replace(GRIP, seq_len=64), {"seq_len": "32"}, SAVED, 5, None).startswith("; ! seq_len 64 -> 32")


def test_settings_of_a_program_that_loads_are_not_known_yet() -> None:
    loading = training(settings=None, phase=Phase.STARTING, progress=Progress())
    assert "is still loading, so memtop does not know yet" in ask(loading)
    silent = training(settings=None, phase=Phase.STARTING, progress=Progress(), warnings={"silent": "it cannot report"})
    assert "memtop does not know where it takes its settings from" in ask(silent)


def test_a_knob_without_effect_is_an_event() -> None:
    brain = trains()
    ask(brain)
    launched(brain)
    begins(brain, batch=8, accumulation=4)
    assert brain.messages("knob") == ["this setting had no effect: batch 4 was asked for, the program uses 8"]
    assert brain.model.phase is Phase.TRAINING
    brain.report({"type": "step", "update": 7, "batch": 8})
    assert len(brain.messages("knob")) == 1


def test_a_program_that_begins_from_zero_is_stopped_with_signals() -> None:
    brain = trains()
    ask(brain)
    launched(brain)
    brain.effects.clear()
    begins(brain, update=0, batch=4, accumulation=4)
    (words,) = brain.messages("warning")
    assert words.startswith("the program did not resume: it began after update 0 instead of 5. It is stopped")
    assert brain.model.phase is Phase.STOPPING
    brain.tick()
    assert [signal.name for signal in brain.asked(Signal)][:1] == ["SIGINT"]
    assert brain.model.grip is not None
    assert not brain.model.grip.resumes


def test_an_exit_without_training_is_no_success() -> None:
    brain = trains()
    ask(brain, Change())
    launched(brain)
    end(brain, 0)
    brain.tell(Examined(diagnosis=NOTHING, facts=RemedyFacts()))
    assert brain.model.phase is Phase.FAILED
    assert brain.model.reason == "the program ended with exit status 0 before its first update"
    # One that had nothing left to do reports where it began.
    ask(brain, Change())
    starts(brain)
    brain.report(FOUND, {"type": "plan", "updates": 5, "total_updates": 5, "resumed": True})
    end(brain, 0)
    assert brain.model.phase is Phase.FINISHED


def test_settings_with_which_it_does_not_start_are_taken_back_once() -> None:
    brain = trains()
    ask(brain)
    launched(brain)
    failed(brain)
    assert brain.asked(Launch)[-1].knobs == {}
    assert "did not start with its new settings" in brain.asked(Launch)[-1].reason
    starts(brain)
    brain.effects.clear()
    failed(brain)
    assert brain.asked(Launch) == []
    assert brain.model.phase is Phase.FAILED


@pytest.mark.parametrize("why", ["nothing was changed", "it has no checkpoint", "it has trained"])
def test_otherwise_it_stays_ended(why: str) -> None:
    brain = trains()
    saved = None if why == "it has no checkpoint" else SAVED
    ask(brain, Change() if why == "nothing was changed" else HALF, saved)
    launched(brain, saved)
    if why == "it has trained":
        begins(brain)
    brain.effects.clear()
    failed(brain)
    assert brain.asked(Launch) == []
    assert brain.model.phase is Phase.FAILED


def failed(brain: Brain) -> None:
    end(brain, 1)
    brain.tell(Examined(diagnosis=NOTHING, facts=RemedyFacts()))


def test_the_next_supervisor_knows_what_was_asked_for() -> None:
    brain = trains()
    ask(brain)
    launched(brain)
    state = state_file(brain.model, "/s", 1)
    rows = (row(1, None, ended=9.5, outcome="restarted"), row(2, None))
    records = brain.model.configurations.records
    plan, step = {"type": "plan", "updates": 0}, {"type": "step", "update": 1, "batch": 8}
    after = taken_over(*rows, state=state, records=records)
    assert (after.model.grip, after.model.knobs) == (GRIP, {"batch": "4", "accumulation": "4"})
    after.report(plan, step)
    assert after.model.phase is Phase.STOPPING
    # Without state.json, the journal tells what the Trainer uses.
    assert taken_over(*rows, records=records, reports=(FOUND,)).model.grip == GRIP
    # What the supervisor before it has read was judged by that one.
    later = taken_over(*rows, state=state, records=records, reports=(plan, step))
    later.report({"type": "step", "update": 2})
    assert later.model.phase is Phase.TRAINING


def out_of_memory(source: str = "record", saved: Checkpoint | None = SAVED, **values: Any) -> Brain:
    brain = trains(**{"states": replace(states(), program=saved), **values})
    die(brain, Kind.HOST_OOM_ALLOC, source=source)
    return brain


def test_with_a_checkpoint_it_goes_on_with_half_the_batch() -> None:
    brain = out_of_memory()
    assert proposal(brain).remedies[0].title == "batch 8 -> 4, accumulation 2 -> 4: effective batch stays 16"
    assert [one.id for one in proposal(brain).remedies].count("smaller_batch") == 1
    brain.tick(after=30.0)
    (launch,) = brain.asked(Launch)
    assert launch.grip is not None
    assert (launch.grip.output_dir, launch.knobs) == ("/out", {"batch": 4, "accumulation": 4})
    starts(brain)
    brain.report({**FOUND, "batch": 4, "accumulation": 4}, {"type": "plan", "updates": 5}, {"type": "step", "update": 6})
    die(brain, Kind.HOST_OOM_ALLOC, source="record")
    brain.tick(after=30.0)
    assert brain.asked(Launch)[-1].knobs == {"batch": 2, "accumulation": 8}
    # It dies before its first update: the settings before ran out of memory, too.
    starts(brain)
    brain.report({**FOUND, "batch": 2, "accumulation": 8})
    die(brain, Kind.HOST_OOM_ALLOC, source="record")
    brain.tick(after=30.0)
    assert len(brain.asked(Launch)) == 2
    assert brain.model.phase is Phase.FAILED


def test_a_batch_that_has_no_half_gets_its_smallest_divisor() -> None:
    brain = out_of_memory(grip=replace(GRIP, batch=9))
    assert proposal(brain).remedies[0].assignments == {"batch": "3", "accumulation": "6"}
    assert "smaller_batch" not in {one.id for one in proposal(out_of_memory(grip=replace(GRIP, batch=1))).remedies}


GPU = "GPU-1"


def on_gpu(batch: int, peak: int) -> tuple[dict[str, Any], ...]:
    """What the ranks report of an attempt with this batch."""
    plan = {"type": "plan", "updates": 5, "resumed": True, "knobs": {"gradient_checkpointing": {"value": False}}}
    step = {"device_uuid": GPU, "peak_reserved_bytes": peak, "batch": batch}
    return {**FOUND, "batch": batch}, plan, *({"type": "step", "update": update, **step} for update in (6, 7))


def test_peaks_at_two_batches_foresee_the_one_that_fits() -> None:
    states_with = replace(states(), program=SAVED)
    brain = trains(run=replace(RUN, settings=None, on_oom="ask"), states=states_with)
    gpu = GpuSample(index=0, name="Test", uuid=GPU, total_bytes=400)
    brain.tell(Sampled(machine=MachineSnapshot(time=1.0, host=HostSample(), gpus=(gpu,))))
    brain.report(*on_gpu(8, 180))
    ask(brain, Change(assignments={"batch": "16", "accumulation": "1"}))
    launched(brain)
    brain.report(*on_gpu(16, 340))
    assert [row.peak.bytes for row in brain.model.configurations.rows if row.peak is not None] == [180, 340]
    ask(brain, Change(assignments={"batch": "48", "accumulation": "1"}))
    launched(brain)
    brain.report(*on_gpu(48, 399))
    die(brain, Kind.GPU_OOM, source="record")
    smaller, checkpointing = proposal(brain).remedies[:2]
    # Half of it, 24, would need 20 + 20 x 24 bytes.
    assert smaller.assignments == {"batch": "16", "accumulation": "6"}
    assert smaller.forecast is not None
    assert (smaller.forecast.peak_bytes, smaller.forecast.basis) == (340, "measured at B 16")
    assert checkpointing.assignments == {"gradient_checkpointing": "true"}
    assert checkpointing.command == "memtop restart a --set gradient_checkpointing=true"


def test_otherwise_half_the_batch_is_only_offered() -> None:
    half = {"batch": "4", "accumulation": "4"}
    cut = replace(SAVED, complete=False, problem="it was cut")
    cases = [
        (out_of_memory(run=replace(RUN, settings=None, on_oom="ask")), "--on-oom ask"),
        (out_of_memory(source="words"), "only words of the program's output say so, so you decide"),
        (
            out_of_memory(grip=replace(GRIP, resumes=False)),
            "it did not resume when it was started again, so only you can start it",
        ),
        (out_of_memory(saved=None), "there is no complete checkpoint of this run in /out, so it would begin from zero"),
        (
            out_of_memory(saved=cut),
            "there is no complete checkpoint of this run in /out (it was cut), so it would begin from zero",
        ),
    ]
    for brain, why in cases:
        assert brain.model.phase is Phase.FAILED
        assert proposal(brain).waiting == why
        remedy = proposal(brain).remedies[0]
        assert (remedy.assignments, remedy.command) == (half, "memtop restart a --batch 4 --accum 4")
        from_zero = "begin from zero" in why
        assert (remedy.needs_consent, remedy.resumable, remedy.title.endswith("from the first update")) == (
            (True, "none", True) if from_zero else (False, "resumes", False)
        )


def die(brain: Brain, kind: Kind, source: str) -> None:
    end(brain, 1)
    found = Diagnosis(kind=kind, confidence=0.97, summary="it died", source=source)
    brain.tell(Examined(diagnosis=found, facts=RemedyFacts()))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "constant_with_warmup"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_the_foreseen_rate_is_the_one_of_the_schedule(schedule: str, warmup: int) -> None:
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=4e-4)
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=20)
    grip = replace(GRIP, peak_rate=4e-4, schedule=schedule, warmup=warmup)
    for update in range(20):
        assert rate_at(grip, update, 20) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rate_at(replace(grip, schedule="polynomial"), 1, 20) is None


def measures(brain: Brain, peak: int) -> Advice:
    """The advice for a program that computes all the time, with this peak at its present batch."""
    sample = Sampled(machine=MachineSnapshot(time=1.0, host=HostSample(total_bytes=64 << 30, used_bytes=peak + (1 << 30))))
    brain.model = replace(brain.model, sample=sample)
    key = shape_key(GRIP, {}, "", on_gpu=False)
    (record,) = brain.model.configurations.records
    shown = replace(record.configuration, peak=Peak(batch=8, bytes=peak, updates=20, settings_key=key))
    after = replace(brain.model.configurations, records=(replace(record, configuration=shown),))
    brain.model = replace(brain.model, configurations=after)
    found = Measured(updates=20, on_gpu=False, step_seconds=1.0, data_wait_seconds=0.01, rank_cores=2.0)
    brain.model = advised(brain.model, found)
    assert brain.model.advice is not None
    return brain.model.advice


def test_the_advice_for_a_program_whose_batch_can_change_has_the_command_to_type() -> None:
    advice = measures(trains(), 8 << 30)
    (remedy,) = advice.proposals
    assert remedy.title == "batch 8 -> 16, accumulation 2 -> 1: effective batch stays 16"
    assert remedy.command == f"memtop restart {RUN.name} --batch 16 --accum 1"
    assert remedy.resumable == "none", "memtop does not try it by itself"
    assert remedy.forecast is not None
    assert remedy.forecast.peak_bytes == 16 << 30
    assert measures(trains(), 30 << 30).proposals == ()
    assert "predicted 95.3 %" in measures(trains(), 30 << 30).refused[0]
    nothing = measures(trains(grip=replace(GRIP, batch=16, accumulation=1)), 8 << 30)
    assert (nothing.proposals, nothing.refused) == ((), ("batch 16: it is already the whole effective batch of each process",))


def test_the_advice_for_any_other_program_says_why_there_is_no_command() -> None:
    advice = measures(training(settings=None), 8 << 30)
    assert advice.proposals == ()
    assert advice.refused == ("a larger micro-batch: memtop cannot set it in this program; its options or its script can",)
