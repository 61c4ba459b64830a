"""The restart form's checks: it names the field that is wrong, and shows the effect on training and
data."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.presets.schema import Zero
from memtop.supervisor.wire import Change, Checkpoint, Phase
from memtop.tui.restart_plan import number_text, restart_plan, where_it_resumes
from memtop.tui.run_feed import _unsupervised
from tests.tui.support import NOW, SETTINGS, run_state

SAME = {"batch": "8", "accumulation": "4", "seq_len": "128"}


def test_untouched_fields_change_nothing() -> None:
    plan = restart_plan(SETTINGS, SAME, "standard")
    assert plan.change == Change()
    assert plan.problem is None
    assert plan.lines == ("nothing changed: restarts with the same settings",)


def test_an_exact_split_leaves_training_unchanged() -> None:
    plan = restart_plan(SETTINGS, {**SAME, "batch": "4", "accumulation": "8"}, "standard")
    assert plan.change == Change(assignments={"batch": "4", "accumulation": "8"})
    assert plan.lines == ("effective batch 32 -> 32: training is unchanged",)


def test_each_process_may_have_its_own_batch_and_keeps_it() -> None:
    two = replace(SETTINGS, world_size=2)
    plan = restart_plan(two, {**SAME, "batch": "12, 4"}, "standard")
    assert plan.change == Change(assignments={"batch": "12,4"})
    assert plan.after is not None
    assert plan.after.rank_splits == ((12, 4), (4, 4))
    shown = {field: number_text(plan.after, field) for field in SAME}
    assert shown == {**SAME, "batch": "12,4"}
    again = restart_plan(plan.after, shown, "standard")
    assert (again.change, again.after) == (Change(), plan.after)
    assert restart_plan(SETTINGS, {**SAME, "batch": "3,1"}, "standard").wrong_field == "batch"


def test_another_effective_batch_names_the_nearest_exact_pairs() -> None:
    plan = restart_plan(SETTINGS, {**SAME, "batch": "6"}, "standard")
    assert plan.change == Change(assignments={"batch": "6"})
    assert "32 -> 24 (-25.0 %): changes training; to keep 32: 4 x 8, 8 x 4 (batch x accumulation)" in plan.lines[0]


@pytest.mark.parametrize(
    ("done", "words"),
    [
        # 20 updates of 32 samples. The update in progress is done before the change.
        ({"updates": 4, "samples_seen": 128}, "the run ends after update 9, not 20"),
        ({"updates": 18, "samples_seen": 576}, None),
        ({"alive": False, "checkpoint": None}, "the run ends after update 5, not 20"),
        (
            {"alive": False, "checkpoint": Checkpoint(path="/s", updates=8, samples_seen=256, complete=True)},
            "the run ends after update 11, not 20",
        ),
    ],
)
@pytest.mark.parametrize("by_samples", [True, False])
def test_another_effective_batch_moves_the_end_of_the_run(done: dict[str, object], words: str | None, by_samples: bool) -> None:
    length = {"target_samples": 640} if by_samples else {"target_samples": 0, "epochs": 2.0}
    before = replace(SETTINGS, **length)
    run = run_state(**{"settings": before, "total_updates": 20, **done})
    plan = restart_plan(before, {**SAME, "accumulation": "16"}, "standard", run=run)
    assert [line.partition(":")[0] for line in plan.lines[1:]] == ([words] if words else [])
    if words is not None and run.alive:
        assert plan.lines[1].endswith("it keeps its number of samples (updates left: 4 of 128, not 15 of 32)")
    assert len(restart_plan(before, {**SAME, "batch": "4", "accumulation": "8"}, "standard", run=run).lines) == 1


def test_a_complete_run_is_not_said_to_resume() -> None:
    saved = Checkpoint(path="/s", updates=20, samples_seen=640, complete=True)
    run = run_state(state=Phase.FINISHED, alive=False, total_updates=20, checkpoint=saved)
    words = "nothing is left to train: 20 updates are done, and the length is 20; `memtop restart "
    assert where_it_resumes(run).startswith(words)
    assert where_it_resumes(replace(run, total_updates=21)).startswith("resumes at update 20")
    assert _unsupervised(run).reason == "the run is over (finished)"
    assert "r or memtop restart tiny" in _unsupervised(replace(run, total_updates=21)).reason


def test_all_that_a_preset_changes_is_listed() -> None:
    plan = restart_plan(SETTINGS, {**SAME, "batch": "4", "accumulation": "8"}, "deepspeed")
    assert "workers 0 -> 2; allocator default -> expandable_segments:True" in plan.lines
    typed = restart_plan(SETTINGS, SAME, "deepspeed")
    assert typed.change == Change(preset="deepspeed", assignments={"batch": "8", "accumulation": "4"})
    assert "batch and accumulation stay as typed; preset deepspeed alone gives 4 x 8 x 1" in typed.lines


def test_another_sequence_length_changes_the_data() -> None:
    plan = restart_plan(SETTINGS, {**SAME, "seq_len": "64"}, "standard")
    assert plan.change == Change(assignments={"seq_len": "64"})
    assert "T 128 -> 64: other data: the rest of the epoch is cut anew, nothing repeats" in plan.lines


def test_a_preset_brings_its_own_split_and_is_sent_by_name() -> None:
    plan = restart_plan(SETTINGS, {**SAME, "batch": "4", "accumulation": "8"}, "low")
    assert plan.change == Change(preset="low")
    assert plan.lines[0] == "effective batch 32 -> 32: training is unchanged"


def test_a_preset_that_moves_the_optimizer_says_so() -> None:
    plan = restart_plan(SETTINGS, {**SAME, "batch": "2", "accumulation": "16"}, "stage2_offload")
    assert plan.change == Change(preset="stage2_offload")
    assert "no ZeRO -> ZeRO-2 + optimizer offload: less GPU memory, more host memory, slower" in plan.lines
    offloaded = replace(SETTINGS, preset="stage2_offload", zero=Zero(stage=2, offload_optimizer=True), optimizer="cpu_adam")
    back = restart_plan(offloaded, SAME, "standard")
    assert "ZeRO-2 + optimizer offload -> no ZeRO: more GPU memory, less host memory, faster" in back.lines
    assert "optimizer cpu_adam -> adamw" in back.lines
    assert not any("converts" in line for line in back.lines)


def test_sharding_alone_saves_nothing_on_one_process() -> None:
    plan = restart_plan(SETTINGS, {**SAME, "batch": "4", "accumulation": "8"}, "deepspeed")
    assert "no ZeRO -> ZeRO-2: with one process sharding saves nothing" in plan.lines


def test_fields_edited_beyond_a_preset_are_sent_with_it() -> None:
    plan = restart_plan(SETTINGS, {**SAME, "batch": "2", "accumulation": "16"}, "low")
    assert plan.change == Change(preset="low", assignments={"batch": "2", "accumulation": "16"})


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("batch", "0", "must be at least 1"),
        ("batch", "-3", "must be at least 1"),
        ("batch", "eight", "must be a whole number"),
        ("batch", "1_0", "must be a whole number"),
        ("batch", "٣", "must be a whole number"),
        ("accumulation", "", "must be a whole number"),
        ("accumulation", "1.5", "must be a whole number"),
        ("seq_len", "1", "must be at least 2"),
        ("seq_len", "4096", "give at most 1024"),
    ],
)
def test_nonsense_is_refused_and_the_field_named(field: str, text: str, words: str) -> None:
    plan = restart_plan(SETTINGS, {**SAME, field: text}, "standard")
    assert plan.change is None
    assert plan.wrong_field == field
    assert plan.problem is not None
    assert plan.problem.startswith(field)
    assert words in plan.problem


def test_an_unknown_preset_is_refused() -> None:
    plan = restart_plan(SETTINGS, SAME, "gigantic")
    assert plan.wrong_field == "preset"


def test_where_it_resumes() -> None:
    assert "saves and resumes there" in where_it_resumes(run_state())
    stopped = run_state(alive=False)
    assert where_it_resumes(stopped) == "resumes at update 20, 640 samples; no sample is repeated or skipped"
    broken = Checkpoint(path="x", saved_at=NOW, complete=False, problem="cut off")
    words = "it cannot resume, because no saved state seems whole: cut off"
    assert where_it_resumes(run_state(alive=False, checkpoint=broken)) == words
    assert where_it_resumes(run_state(alive=False, checkpoint=None)) == "starts at the first update: nothing has been saved yet"
