"""The rules of a plan: the splits of a batch, which other settings gain something, and what is said
of a peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.cli import plan_output
from memtop.presets import Settings, load_presets, load_recipes, resolve
from memtop.presets.estimate import Estimate, estimate
from memtop.presets.schema import Zero
from memtop.supervisor.monitor.values import Band
from memtop.supervisor.plan import (
    Card,
    Need,
    confirmed,
    estimated,
    is_safe,
    largest_safe,
    peak_of,
    smallest,
    splits_of,
    ways,
)

MIB, GIB = 1 << 20, 1 << 30
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
}


def first_run(**changes: Any) -> Settings:
    settings = resolve(load_recipes()["first-run"], preset=load_presets()["standard"], whole=False)
    return replace(settings, **changes)


_known: dict[bytes, Estimate] = {}


def estimated_once(settings: Settings, config: Mapping[str, Any], *, generation: int, capacity: int | None = None) -> Estimate:
    """`estimate`, in place of it in tests that ask the same again and again."""
    question = msgspec.json.encode((settings, config, generation, capacity))
    if question not in _known:
        _known[question] = estimate(settings, config, generation=generation, capacity=capacity)
    return _known[question]


def linear(settings: Settings) -> Need:
    """100 MiB for each sample, half of it with checkpointing."""
    size = settings.batch * (50 if settings.gradient_checkpointing else 100) * MIB
    return Need(reserved=size, phase="backward", components={"activations": size}, basis="dry run")


CARD = Card(total_bytes=GIB, generation=80, context_bytes=0)


def test_splits_keep_the_effective_batch() -> None:
    assert splits_of(first_run(batch=3, accumulation=4)) == [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]
    assert splits_of(first_run(batch=2, accumulation=2, world_size=3)) == [(4, 1), (2, 2), (1, 4)]


def test_the_largest_safe_split_is_below_85_percent() -> None:
    found = largest_safe(first_run(batch=1, accumulation=16), CARD, linear, linear)
    assert found is not None
    assert (found[0].batch, found[0].accumulation) == (8, 2)
    assert not is_safe(linear(first_run(batch=16, accumulation=1)), CARD)
    full = replace(CARD, others_bytes=900 * MIB)
    assert largest_safe(first_run(), full, linear, linear) is None


def test_what_the_quick_answer_allows_is_checked_by_the_sure_one() -> None:
    def too_low(settings: Settings) -> Need:
        return replace(linear(settings), reserved=1)

    found = largest_safe(first_run(batch=1, accumulation=16), CARD, too_low, linear)
    assert found is not None
    assert found[0].batch == 8


def test_ways_are_those_that_gain_something_the_training_unchanged_first() -> None:
    settings = first_run(batch=16, accumulation=1)
    shorter, checkpointed, same = (
        replace(settings, seq_len=64, gradient_checkpointing=True),
        replace(settings, gradient_checkpointing=True),
        replace(settings, workers=1),
    )
    found = ways(settings, [shorter, same, checkpointed, settings], CARD, linear)
    assert [(way.settings.seq_len, way.settings.batch, way.unchanged) for way in found] == [(128, 16, True), (64, 16, False)]
    # 16 x 1 with checkpointing needs what 8 x 2 does, and is slower: 8 x 2 with it needs less.
    safe = replace(settings, batch=8, accumulation=2)
    assert [way.settings.batch for way in ways(safe, [same, checkpointed], CARD, linear)] == [8]


def test_of_ways_that_leave_training_as_it_is_the_faster_ones_come_first() -> None:
    settings = first_run(batch=8, accumulation=2, zero=Zero(stage=2, offload_optimizer=True))
    slowest, slower, faster = (
        replace(settings, zero=Zero(stage=3, offload_optimizer=True, offload_parameters=True)),
        replace(settings, gradient_checkpointing=True),
        replace(settings, zero=Zero(stage=2)),
    )

    def less(asked: Settings) -> Need:
        need = linear(asked)
        same = asked.zero == settings.zero and not asked.gradient_checkpointing
        divided_by = 16 if asked.zero.offload_parameters else 4 if asked.gradient_checkpointing else 3
        return need if same else replace(need, reserved=need.reserved // divided_by)

    found = ways(settings, [slowest, slower, faster], CARD, less)
    assert [way.pace.speed for way in found] == ["faster", "slower", "much slower"]
    assert found[0].pace.basis[0] == "the optimizer works on the GPU"


def test_a_way_that_another_one_beats_is_left_out() -> None:
    settings = first_run(batch=16, accumulation=1)
    checkpointed = replace(settings, gradient_checkpointing=True)
    like_it = replace(checkpointed, preset="low")
    offloaded = replace(checkpointed, zero=Zero(stage=2, offload_optimizer=True))
    lean = replace(checkpointed, zero=Zero(stage=3, offload_optimizer=True, offload_parameters=True))

    def need(asked: Settings) -> Need:
        found = linear(asked)
        return replace(found, reserved=found.reserved // (2 if asked.zero.offload_parameters else 1))

    # The offload gains nothing over checkpointing alone; that of the parameters halves the memory.
    found = ways(settings, [offloaded, lean, checkpointed, like_it], CARD, need)
    assert [way.settings for way in found] == [checkpointed, lean]

    def halved_by_offload(asked: Settings) -> Need:
        found = linear(asked)
        return replace(found, reserved=found.reserved // (2 if asked.zero.offload_optimizer else 1))

    # Both are slower, but the offload is the slower one.
    assert [way.settings for way in ways(settings, [offloaded, checkpointed], CARD, halved_by_offload)] == [
        offloaded,
        checkpointed,
    ]


def test_if_the_host_has_too_little_memory_each_safe_way_gains_something() -> None:
    settings = first_run(batch=8, accumulation=1, zero=Zero(stage=3, offload_optimizer=True, offload_parameters=True))
    without = replace(settings, zero=Zero(), learning_rate=1e-4)
    assert ways(settings, [without], CARD, linear) == []
    assert [way.settings for way in ways(settings, [without], CARD, linear, host_suffices=False)] == [without]


def test_the_first_way_is_safe_by_the_better_answer() -> None:
    settings = first_run(batch=16, accumulation=1)
    checkpointed, shorter = replace(settings, gradient_checkpointing=True), replace(settings, seq_len=64)

    def quick(tried: Settings) -> Need:
        return replace(linear(tried), reserved=linear(tried).reserved * tried.seq_len // 256)

    def better(tried: Settings) -> Need:
        return replace(linear(tried), reserved=quick(tried).reserved * 11 // 5 if tried.seq_len < 128 else 880 * MIB)

    found = ways(settings, [checkpointed, shorter], CARD, quick)
    assert [(way.settings.seq_len, way.settings.batch) for way in found] == [(128, 16), (64, 16)]
    # With checkpointing no batch is safe; of shorter samples only a smaller one.
    first = confirmed(settings, found, CARD, quick, better)[0]
    assert (first.settings.seq_len, first.settings.batch, first.settings.accumulation) == (64, 8, 2)
    assert (first.peak.basis, first.peak.band) == ("dry run", Band.SAFE)
    assert confirmed(settings, found, CARD, quick, quick) == found


def test_a_way_that_needs_more_than_what_is_safe_already_is_none() -> None:
    settings = first_run(batch=2, accumulation=4)
    assert is_safe(linear(settings), CARD)
    checkpointed = replace(settings, gradient_checkpointing=True)
    # 8 x 1 with checkpointing takes 400 MiB, the present 2 x 4 only 200, and 100 with it.
    assert [way.settings.batch for way in ways(settings, [checkpointed], CARD, linear)] == [2]
    assert ways(settings, [replace(settings, optimizer="adafactor")], CARD, linear) == []
    whole = replace(settings, batch=8, accumulation=1)
    assert [way.settings.batch for way in ways(whole, [checkpointed], CARD, linear)] == [8]


def test_parts_and_bounds_of_a_peak() -> None:
    need = Need(reserved=900 * MIB, phase="backward", components={"weights": 800 * MIB}, basis="dry run")
    peak = peak_of(need, replace(CARD, context_bytes=20 * MIB))
    assert sum(peak.components.values()) == peak.bytes == 920 * MIB
    assert peak.components["unused"] == 100 * MIB
    assert peak.least < peak.bytes < peak.most
    assert peak.band is Band.EDGE
    assert peak_of(need, replace(CARD, total_bytes=None)).band is Band.UNKNOWN


def test_a_safe_peak_that_may_be_in_danger_says_so() -> None:
    def first_line(reserved: int) -> str:
        need = Need(reserved=reserved, phase="backward", components={"weights": reserved}, basis="estimate")
        lines = list(plan_output.plan_text(first_run(), None, [], peak_of(need, CARD), CARD, None, None, [], None))
        return next(line for line in lines if line.startswith("GPU memory"))

    assert first_line(820 * MIB).endswith("80.1 % · safe; at most 94.5 % !! danger")
    assert first_line(400 * MIB).endswith("39.1 % · safe")
    assert first_line(1000 * MIB).endswith("97.7 % !! danger")


def test_several_processes_have_memory_to_communicate() -> None:
    several = replace(CARD, context_bytes=20 * MIB, communication_bytes=30 * MIB)
    assert several.torch_bytes == GIB - 50 * MIB
    need = Need(reserved=820 * MIB, phase="backward", components={"weights": 800 * MIB}, basis="dry run")
    peak = peak_of(need, several)
    assert peak.components["communication"] == 30 * MIB
    assert sum(peak.components.values()) == peak.bytes == 870 * MIB
    assert "communication" not in peak_of(need, CARD).components
    assert is_safe(need, CARD)
    assert not is_safe(replace(need, reserved=840 * MIB), several)


def test_the_smallest_split_is_not_one_that_keeps_gradients_for_nothing() -> None:
    """With one micro-batch there is no gradient during a forward pass."""
    wide = LLAMA | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    settings = first_run(model={"config": wide}, batch=4, accumulation=1, seq_len=16, device="cuda", precision="bf16")
    card = Card(total_bytes=1 << 30, generation=80)

    def quick(tried: Settings) -> Need | None:
        found = estimated(tried, card)
        return found if isinstance(found, Need) else None

    found = smallest(settings, card, quick)
    assert found is not None
    assert (found[0].batch, found[0].accumulation) == (4, 1)
