"""The remedies for a full GPU: which are proposed, in which order, and which are left out."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.presets.schema import Lora, Zero
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.recovery.configuration import applied
from memtop.supervisor.recovery.remedies import remedies
from memtop.supervisor.recovery.situation import HostFacts, situation_of
from tests.recovery.support import (
    CARD,
    GIB,
    LORA,
    QLORA,
    ROOMY,
    T5,
    T5_OOM,
    climb,
    died,
    forecast_of,
    gib,
    ids,
    measured,
    named,
    peak,
    why_not,
)


def test_fragmentation_is_fixed_first_if_unused_memory_covers_the_request() -> None:
    found = climb(T5_OOM, T5, host=ROOMY, peaks=measured())
    first = found.remedies[0]
    assert (first.id, first.keeps_math, first.resumable, first.speed) == ("allocator", True, "resumes", 1.0)
    assert first.assignments == {"allocator": "expandable_segments:True"}
    assert first.why.startswith("3.2 GiB were reserved but unused, in pieces too small for the request of 1.2 GiB")
    assert first.command == "memtop restart RUN --set allocator=expandable_segments:True"
    assert applied(T5, first).allocator == "expandable_segments:True"


def test_the_allocators_own_options_stay() -> None:
    garbage = replace(T5, allocator="garbage_collection_threshold:0.8")
    assert named(climb(T5_OOM, garbage), "allocator").assignments == {
        "allocator": "garbage_collection_threshold:0.8,expandable_segments:True"
    }
    for where in ({"allocator": "expandable_segments:False"}, {}):
        found = climb(T5_OOM, replace(T5, **where), allocator="" if where else "max_split_size_mb:128,expandable_segments:True")
        assert "allocator" not in ids(found)
        assert why_not(found, "expandable_segments is already set in").endswith("the settings" if where else "the environment")


def test_the_allocator_comes_later_without_fragmentation() -> None:
    whole = replace(T5_OOM, reserved_unallocated_bytes=gib(0.4))
    order = ids(climb(whole, T5, host=ROOMY, peaks=measured()))
    assert order[:3] == ["smaller_batch", "checkpointing", "allocator"]
    assert ids(climb(replace(whole, kind=Kind.GPU_OOM_FRAGMENTED), T5))[0] == "allocator"


def test_remedies_that_keep_training_unchanged_come_first() -> None:
    found = climb(T5_OOM, replace(T5, eval_every=100), host=ROOMY, peaks=measured())
    order = ids(found)
    # With the offload, 93 % is forecast: what is forecast near the limit comes last.
    assert order == [
        *("allocator", "smaller_batch", "checkpointing", "eval_batch", "offload_optimizer", "seq_len", "smaller_model"),
    ]
    after = {one.id: applied(T5, one) for one in found.remedies}
    for remedy in found.remedies[:5]:
        assert remedy.keeps_math
        assert not remedy.needs_consent
        assert (after[remedy.id].effective_batch, after[remedy.id].seq_len) == (192, 256)
    assert all(remedy.needs_consent and not remedy.keeps_math for remedy in found.remedies[5:])


def test_a_remedy_that_is_forecast_to_run_out_again_comes_last_of_those_without_consent() -> None:
    one = replace(T5, batch=1, accumulation=64, eval_every=100)
    found = climb(
        replace(T5_OOM, phase="unknown"), one, host=ROOMY, peaks=(peak(one, 1, 30.0, failed=True),), base_bytes=gib(3)
    )
    assert ids(found) == ["allocator", "checkpointing", "offload_optimizer", "seq_len", "smaller_model"]
    fits = climb(replace(T5_OOM, phase="unknown"), replace(one, batch=2, accumulation=32), host=ROOMY, base_bytes=gib(3))
    assert ids(fits)[:3] == ["allocator", "smaller_batch", "checkpointing"]
    # With checkpointing alone the forecast is 22 of 19.6 GiB, so remedies that may fit come first.
    two = replace(T5, batch=2, accumulation=32, eval_every=100)
    tight = climb(
        replace(T5_OOM, phase="unknown"), two, host=ROOMY, peaks=(peak(two, 2, 30.0, failed=True),), base_bytes=gib(3)
    )
    order = ids(tight)
    assert order.index("smaller_batch") < order.index("eval_batch") < order.index("checkpointing") < order.index("seq_len")
    others = climb(
        replace(T5_OOM, kind=Kind.GPU_OOM_OTHER_PROCESS), one, peaks=(peak(one, 1, 30.0, failed=True),), base_bytes=gib(3)
    )
    assert ids(others)[0] == "strays"


def test_the_whole_ladder_in_order() -> None:
    everything = replace(LORA, loss_chunk=0, eval_every=100, seq_len=2048, preset="deepspeed", zero=Zero(stage=2))
    order = ids(climb(died(), everything, host=ROOMY))
    assert order == [
        *("smaller_batch", "checkpointing", "chunked_loss", "allocator", "offload_optimizer", "next_preset"),
        *("seq_len", "lora_rank", "smaller_model"),
    ]
    unsure = ids(climb(died(phase="unknown"), everything, host=ROOMY))
    assert unsure.index("next_preset") < unsure.index("eval_batch") < unsure.index("seq_len")


def test_checkpointing_is_estimated_for_activations_only() -> None:
    found = named(climb(T5_OOM, T5, peaks=measured()), "checkpointing")
    assert found.forecast is not None
    # 3.25 GiB stay, and 30 % of the other 16.48 are saved: not 30 % of the peak.
    assert found.forecast.peak_bytes / GIB == pytest.approx(3.25 + 0.7 * 16.48, abs=0.01)
    assert found.forecast.basis.startswith("estimate: base + 70 %")
    assert found.speed == 0.75
    measured_on = (
        peak(replace(T5, gradient_checkpointing=True), 16, 6.0),
        peak(replace(T5, gradient_checkpointing=True), 32, 9.0),
    )
    known = forecast_of(climb(T5_OOM, T5, peaks=(*measured(), *measured_on)), "checkpointing")
    assert (known.peak_bytes, known.basis) == (gib(9.0), "measured at B 32")


def test_checkpointing_that_is_already_on_is_left_out() -> None:
    found = climb(died(), QLORA)
    assert "checkpointing" not in ids(found)
    assert why_not(found, "checkpointing") == "gradient checkpointing: already on"
    assert why_not(climb(died(), T5, can_checkpoint=False), "checkpointing").endswith("cannot recompute its activations")


def test_a_chunked_loss_is_proposed_only_if_it_is_not_chunked_yet() -> None:
    whole = named(climb(T5_OOM, replace(T5, loss_chunk=0)), "chunked_loss")
    assert whole.assignments == {"loss_chunk": "-1"}
    assert "the request that failed (1.2 GiB) was for them" in whole.why
    for chunk in (-1, 512):
        found = climb(T5_OOM, replace(T5, loss_chunk=chunk))
        assert "chunked_loss" not in ids(found)
        assert why_not(found, "chunked loss")


def test_offload_is_proposed_only_if_host_memory_is_free() -> None:
    needed = 16 * 196_648_704
    roomy = named(climb(T5_OOM, T5, host=ROOMY, peaks=measured()), "offload_optimizer")
    assert roomy.assignments == {"zero.offload_optimizer": "true", "zero.stage": "2"}
    assert (roomy.keeps_math, roomy.resumable, roomy.needs_consent) == (True, "resumes", False)
    assert applied(T5, roomy).zero == Zero(stage=2, offload_optimizer=True)
    assert roomy.forecast is not None
    assert roomy.forecast.peak_bytes == pytest.approx(gib(19.73) - 8 * 196_648_704, rel=1e-3)
    border = HostFacts(limit_bytes=16 * GIB, available_bytes=needed + int(0.15 * 16 * GIB) + 16)
    assert "offload_optimizer" in ids(climb(T5_OOM, T5, host=border))
    full = climb(T5_OOM, T5, host=replace(border, available_bytes=needed))
    assert "offload_optimizer" not in ids(full)
    assert why_not(full, "optimizer offload").startswith("optimizer offload: it needs 2.9 GiB of host memory")
    assert named(climb(T5_OOM, T5), "offload_optimizer").needs_consent, "unknown host memory needs consent"
    assert why_not(climb(T5_OOM, T5, deepspeed=False), "DeepSpeed")
    odd = climb(T5_OOM, replace(T5, optimizer="adafactor"), host=ROOMY)
    assert why_not(odd, "cannot be sharded")


@pytest.mark.parametrize(
    ("world", "rungs"),
    [(4, ["deepspeed", "stage2_offload", "stage3", "minimal"]), (1, ["deepspeed", "stage2_offload", "minimal"])],
)
def test_presets_are_proposed_one_at_a_time(world: int, rungs: list[str]) -> None:
    """On one process, stage 3 without offload needs more GPU memory than stage 2 with offload."""
    now = replace(LORA, preset="deepspeed", zero=Zero(stage=2), world_size=world, batch=4, accumulation=4)
    seen = [now.preset]
    while next_one := [one for one in climb(died(), now, host=ROOMY).remedies if one.id == "next_preset"]:
        after = applied(now, next_one[0])
        assert after.effective_batch == now.effective_batch
        assert after.lora == now.lora
        assert (next_one[0].resumable, next_one[0].keeps_math) == ("resumes", True)
        now = after
        seen.append(now.preset)
    assert seen == rungs


def test_on_one_process_no_preset_is_proposed_that_only_shards() -> None:
    full = HostFacts(limit_bytes=16 * GIB, available_bytes=GIB // 2)
    small = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = {"config": {"model_type": "llama", "vocab_size": 32000, **small}}
    named_by_hand = replace(LORA, preset="deepspeed", zero=Zero(stage=2), model=config)
    found = climb(died(), named_by_hand, host=full)
    assert "next_preset" not in ids(found), "no host memory for an offload"
    assert why_not(found, "preset stage3") == "preset stage3: sharding saves nothing on one process"
    several = climb(died(), replace(named_by_hand, world_size=4), host=full)
    assert named(several, "next_preset").preset == "stage3"


def test_on_one_process_a_plain_run_keeps_surviving_until_it_must_offload() -> None:
    now, seen = replace(LORA, eval_every=0), []
    while found := [one for one in climb(died(), now, host=ROOMY).remedies if one.keeps_math and one.id != "allocator"]:
        now = applied(now, found[0])
        seen.append((now.batch, now.gradient_checkpointing, now.zero))
        assert not now.zero.stage or now.zero.saves_memory(1)
    offloaded = Zero(stage=2, offload_optimizer=True)
    assert seen[:2] == [(2, False, Zero()), (1, False, Zero())]
    assert seen[2:4] == [(1, True, Zero()), (1, True, offloaded)]
    assert seen[-1][2] == Zero(stage=3, offload_optimizer=True, offload_parameters=True)


def test_a_4_bit_base_is_never_sharded() -> None:
    for preset in ("deepspeed", "stage2_offload"):
        found = climb(died(), replace(QLORA, preset=preset, zero=Zero(stage=2, offload_optimizer=True)), host=ROOMY)
        assert "next_preset" not in ids(found)
        assert why_not(found, "a 4-bit base cannot be sharded")


def test_the_evaluation_batch_comes_first_if_the_evaluation_failed() -> None:
    evaluating = replace(T5, eval_every=100, eval_batch=48)
    found = climb(died(phase="evaluation"), evaluating)
    assert found.remedies[0].id == "eval_batch"
    assert found.remedies[0].assignments == {"eval_batch": "24"}
    assert found.remedies[0].keeps_math
    assert named(climb(died(phase="evaluation"), replace(T5, eval_every=100)), "eval_batch").assignments == {"eval_batch": "16"}
    assert "eval_batch" not in ids(climb(died(phase="backward"), evaluating))
    assert "eval_batch" not in ids(climb(died(phase="evaluation"), T5)), "nothing is evaluated"
    assert why_not(climb(died(phase="evaluation"), replace(evaluating, eval_batch=1)), "evaluation batch: already 1")


def test_a_failed_evaluation_is_not_a_peak_of_training() -> None:
    evaluating = replace(T5, eval_every=100)
    trained = (peak(evaluating, 16, 8.0), peak(evaluating, 32, 14.0))
    forecast = forecast_of(climb(replace(T5_OOM, phase="evaluation"), evaluating, peaks=trained), "smaller_batch")
    assert forecast.basis == "measured at B 16"
    assert situation_of(replace(T5_OOM, phase="evaluation"), evaluating, peaks=trained).peaks == trained
    assert len(situation_of(T5_OOM, evaluating, peaks=trained).peaks) == 3


def test_a_smaller_batch_is_not_proposed_for_a_model_that_does_not_load() -> None:
    found = climb(died(phase="load"), T5, host=ROOMY)
    assert not {"smaller_batch", "checkpointing", "chunked_loss", "eval_batch"} & set(ids(found))
    assert why_not(found, "while loading the model")


def test_in_the_optimizer_step_its_state_is_offloaded_first() -> None:
    order = ids(climb(died(phase="optimizer"), T5, host=ROOMY))
    assert order.index("offload_optimizer") < order.index("smaller_batch")


def test_other_processes_are_named_before_any_setting_changes() -> None:
    other = died(Kind.GPU_OOM_OTHER_PROCESS, other_process_bytes=gib(12), other_process_pids=(4242, 77), total_bytes=CARD)
    found = climb(other, T5, peaks=measured())
    first = found.remedies[0]
    assert (first.id, first.resumable, first.command, first.needs_consent) == ("strays", "none", "memtop strays", True)
    assert "12.0 GiB (pid 4242, 77)" in first.title
    assert first.assignments == {}
    second = forecast_of(found, "smaller_batch")
    assert second.fraction is not None
    assert second.fraction < 0.85


def test_remedies_are_live_if_the_trainer_runs_without_zero() -> None:
    runs = climb(T5_OOM, replace(T5, eval_every=10), host=ROOMY, alive=True)
    classes = {one.id: one.resumable for one in runs.remedies}
    assert classes["smaller_batch"] == classes["checkpointing"] == classes["eval_batch"] == "live"
    assert classes["allocator"] == classes["offload_optimizer"] == classes["seq_len"] == "resumes"
    sharded = climb(T5_OOM, replace(T5, zero=Zero(stage=2)), alive=True)
    assert named(sharded, "smaller_batch").resumable == "resumes"
    assert named(climb(T5_OOM, T5), "smaller_batch").resumable == "resumes", "a dead run has no update boundary"


@pytest.mark.parametrize(
    ("now", "then"), [(4096, 3072), (2048, 1536), (1792, 1536), (1024, 768), (768, 512), (600, 512), (512, 384), (256, 192)]
)
def test_the_next_usual_length_needs_consent(now: int, then: int) -> None:
    found = named(climb(died(), replace(LORA, seq_len=now)), "seq_len")
    assert found.assignments == {"seq_len": str(then)}
    assert (found.needs_consent, found.keeps_math) == (True, False)
    assert "the data are cut differently" in found.title
    assert found.command == f"memtop restart RUN --seq-len {then}"


def test_a_length_that_is_forecast_to_fit_is_chosen_but_none_below_512_from_above() -> None:
    long = replace(T5, seq_len=2048)
    lines = (peak(long, 16, 20.0), peak(long, 32, 36.0))
    found = named(climb(died(total_bytes=CARD), long, peaks=lines), "seq_len")
    assert found.assignments == {"seq_len": "768"}
    assert found.forecast is not None
    assert found.forecast.peak_bytes / GIB == pytest.approx(4 + 32 * 768 / 2048, abs=0.01)
    assert found.forecast.basis.startswith("estimate: the part that grows with the batch shrinks with T, 2048 -> 768")
    hopeless = (peak(long, 16, 100.0), peak(long, 32, 190.0))
    assert int(named(climb(died(total_bytes=CARD), long, peaks=hopeless), "seq_len").assignments["seq_len"]) >= 512


def test_the_estimate_for_a_shorter_length() -> None:
    found = named(climb(T5_OOM, T5, peaks=measured()), "seq_len")
    assert found.assignments == {"seq_len": "192"}
    assert found.forecast is not None
    assert found.forecast.peak_bytes / GIB == pytest.approx(15.61, abs=0.01)


@pytest.mark.parametrize(
    ("r", "alpha", "then"), [(64, 16, (32, 8)), (64, 128, (32, 64)), (48, 16, (24, 8)), (32, 64, (16, 32))]
)
def test_a_smaller_rank_keeps_alpha_over_r_and_is_a_new_run(r: int, alpha: int, then: tuple[int, int]) -> None:
    before = replace(LORA, lora=Lora(r=r, alpha=alpha))
    found = named(climb(died(), before), "lora_rank")
    after = applied(before, found)
    assert after.lora is not None
    assert (after.lora.r, after.lora.alpha) == then
    assert (found.resumable, found.keeps_math, found.needs_consent) == ("new run", False, True)
    assert found.command is not None
    assert found.command.startswith("memtop train sft-lora --name NEW --preset standard --batch 4 --accum 4 --seq-len 1024")
    assert f"--set lora.r={then[0]}" in found.command
    assert f"--set lora.alpha={then[1]}" in found.command
    assert f"--set model.path={LORA.model['path']}" in found.command


def test_a_new_run_has_as_many_processes() -> None:
    three = named(climb(died(), replace(LORA, world_size=3, gpus="0,1,2")), "lora_rank")
    assert three.command is not None
    assert " --gpus 0,1,2 " in three.command


def test_a_lora_rank_that_cannot_be_halved_with_its_scale_is_left_out() -> None:
    for lora in (Lora(r=16, alpha=1), Lora(r=1, alpha=2), Lora(r=9, alpha=18)):
        found = climb(died(), replace(LORA, lora=lora))
        assert "lora_rank" not in ids(found)
        assert why_not(found, "cannot be halved")


def test_the_smaller_model_is_named_with_its_size() -> None:
    found = named(climb(T5_OOM, T5), "smaller_model")
    assert "196.6 -> 46.4 M parameters, 2.2 GiB less" in found.why
    assert found.resumable == "new run"
    config = applied(T5, found).model["config"]
    assert (config["d_model"], config["d_ff"], config["num_heads"], config["num_layers"]) == (384, 1536, 6, 4)
    assert config["num_heads"] * config["d_kv"] == config["d_model"]
    assert config["num_decoder_layers"] == 10
    by_path = named(climb(died(), LORA), "smaller_model")
    assert (by_path.resumable, by_path.needs_consent, by_path.assignments) == ("new run", True, {})
    assert by_path.command is not None
    assert "model.path=SMALLER_MODEL" in by_path.command


def test_not_memory_has_no_remedy() -> None:
    assert remedies(situation_of(died(Kind.NOT_MEMORY, reason="nccl_timeout"), T5)) == ()


def test_a_change_of_the_effective_batch_changes_training_and_needs_consent() -> None:
    found = situation_of(T5_OOM, T5).rung("x", "why", {"batch": "24", "accumulation": "2"})
    assert not isinstance(found, str)
    assert (found.keeps_math, found.needs_consent) == (False, True)


def test_each_remedy_has_a_class_of_speed_and_what_it_follows_from() -> None:
    found = climb(T5_OOM, replace(T5, loss_chunk=0), host=HostFacts(available_bytes=64 * GIB), peaks=measured())
    classes = {one.id: one.speed_class for one in found.remedies}
    expected = {"smaller_batch": "slower", "checkpointing": "slower", "offload_optimizer": "slower", "seq_len": "faster"}
    assert {id: classes[id] for id in expected} == expected
    assert classes["chunked_loss"] is None
    assert "not known" in named(found, "chunked_loss").speed_basis[0]
    for one in found.remedies:
        if one.speed is not None:
            assert (one.speed_class == "slower") == (one.speed < 1), one.id
