"""The first remedy for a full GPU: a smaller micro-batch with the same effective batch."""

from __future__ import annotations

import shlex
from typing import Literal

import pytest
from msgspec.structs import replace

from memtop.presets import edit_settings, load_presets
from memtop.presets.edits import resolve
from memtop.presets.files import load_recipes
from memtop.presets.schema import with_splits
from memtop.supervisor.monitor.values import Band
from memtop.supervisor.recovery.configuration import applied
from memtop.supervisor.recovery.situation import train_command
from tests.recovery.support import (
    CARD,
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


def test_a_smaller_batch_leaves_each_process_its_share() -> None:
    uneven = with_splits(replace(T5, world_size=2), [(6, 4), (2, 4)])
    found = named(climb(T5_OOM, uneven), "smaller_batch")
    assert found.assignments == {"batch": "3x8,2x4", "accumulation": "8"}
    assert found.title == "split 6+2 x 4 -> 3 x 8 + 2 x 4: effective batch stays 32"
    assert found.command == "memtop restart RUN --batch 3x8,2x4 --accum 8"
    assert applied(uneven, found).splits == ((3, 8), (2, 4))
    assert "--batch 6,2 --accum 4" in train_command(uneven, {})


@pytest.mark.parametrize(("device", "kept"), [("cpu", True), ("cuda", True), ("auto", False)])
def test_the_command_of_a_new_run_keeps_the_device(device: Literal["auto", "cpu", "cuda"], kept: bool) -> None:
    assert (f"--set device={device}" in train_command(replace(T5, device=device), {})) is kept


def test_the_command_of_a_new_run_gives_what_differs_from_its_recipe_and_preset() -> None:
    recipe = load_recipes()["sft-lora"]
    plain = resolve(recipe, preset=load_presets()["standard"])
    start = "memtop train sft-lora --name NEW --preset standard"
    own = "--batch 4 --accum 4 --seq-len 1024"
    assert train_command(plain, {}) == f"{start} {own} --set model.path={plain.model['path']}"
    values = {"learning_rate": "0.0003", "save_every": "7", "on_spike": "back", "lora.r": "4"}
    edited = edit_settings(plain, assignments={**values, "lora.targets": "q_proj"}, max_updates=77)
    words = shlex.split(train_command(edited, {"seq_len": "512"}))
    for one in (
        "--max-updates 77",
        "--on-spike back",
        "--set learning_rate=0.0003",
        "--set lora.targets=q_proj",
        "--seq-len 512",
    ):
        first, second = one.split()
        assert words[words.index(second) - 1] == first
    # The recipe's file is gone: the split stays.
    assert train_command(replace(plain, recipe="gone"), {}) == f"memtop train gone --name NEW --preset standard {own} " + (
        f"--set model.path={plain.model['path']}"
    )


def test_effective_batch_192_on_three_gpus_is_kept_as_16_x_4() -> None:
    split = named(climb(T5_OOM, T5, peaks=measured()), "smaller_batch")
    assert split.assignments == {"batch": "16", "accumulation": "4"}
    assert split.title == "batch 32 -> 16, accumulation 2 -> 4: effective batch stays 192"
    assert (split.keeps_math, split.resumable, split.needs_consent) == (True, "resumes", False)
    assert split.command == "memtop restart RUN --batch 16 --accum 4"
    assert split.forecast is not None
    assert (split.forecast.peak_bytes, split.forecast.basis) == (gib(11.49), "measured at B 16")
    assert split.predicted_band == "safe"
    assert "need 630 MiB at B 16" in split.why


@pytest.mark.parametrize(
    ("batch", "accumulation", "world", "then"),
    [
        *(
            (32, 4, 3, (16, 8)),
            (16, 8, 3, (8, 16)),
            (64, 2, 3, (16, 8)),
            (32, 3, 3, (24, 4)),
            (30, 4, 1, (24, 5)),
            (27, 2, 1, (18, 3)),
        ),
        *((32, 1, 1, (16, 2)), (29, 1, 1, (1, 29))),
    ],
)
def test_the_largest_exact_divisor_that_fits(batch: int, accumulation: int, world: int, then: tuple[int, int]) -> None:
    """At most 26 samples fit: 24 where it divides the effective batch, otherwise less."""
    before = replace(T5, batch=batch, accumulation=accumulation, world_size=world)
    line = (peak(before, 16, 11.49), peak(before, 32, 19.73))
    split = named(climb(died(total_bytes=CARD), before, peaks=line), "smaller_batch")
    after = applied(before, split)
    assert (after.batch, after.accumulation) == then
    assert after.effective_batch == before.effective_batch


def test_without_a_forecast_the_batch_is_halved() -> None:
    unknown = climb(died(), T5)
    split = named(unknown, "smaller_batch")
    assert split.assignments["batch"] == "16"
    assert split.forecast is None
    assert split.forecast_unknown == "nothing was measured with these settings yet"
    assert named(climb(died(), replace(T5, batch=30, accumulation=2)), "smaller_batch").assignments["batch"] == "15"


def test_a_failure_alone_does_not_show_that_more_than_half_fits() -> None:
    before = replace(T5, batch=24, accumulation=2, world_size=1)
    lone = climb(replace(T5_OOM, process_bytes=gib(16)), before, base_bytes=gib(3.24))
    split = named(lone, "smaller_batch")
    assert split.assignments["batch"] == "12"
    assert split.forecast is not None
    assert split.forecast.basis.startswith("at least: the failure at B 24")


def test_the_split_is_left_out_if_not_even_one_sample_fits() -> None:
    lines = (peak(T5, 1, 20.0), peak(T5, 32, 40.0))
    found = climb(died(total_bytes=CARD), T5, peaks=lines)
    assert "smaller_batch" not in ids(found)
    assert why_not(found, "even B 1 is forecast at 102.1 %")
    edge = climb(died(total_bytes=CARD), T5, peaks=(peak(T5, 1, 17.0), peak(T5, 32, 40.0)))
    split = named(edge, "smaller_batch")
    assert (split.assignments["batch"], split.predicted_band) == ("1", Band.EDGE.value)


def test_a_split_that_failed_before_is_skipped() -> None:
    failed = [replace(T5, batch=16, accumulation=4), replace(T5, batch=8, accumulation=2)]
    split = named(climb(died(total_bytes=CARD), T5, failed=tuple(failed)), "smaller_batch")
    assert split.assignments == {"batch": "4", "accumulation": "16"}
    one = climb(died(), replace(T5, batch=1, accumulation=64))
    assert why_not(one, "micro-batch is already 1")
    assert ids(one)[0] == "checkpointing"


def test_memory_of_other_processes_counts() -> None:
    crowded = climb(T5_OOM, T5, peaks=measured(), others_bytes=gib(6))
    split = named(crowded, "smaller_batch")
    assert split.assignments["batch"] == "8"
    assert split.forecast is not None
    assert split.forecast.basis.endswith("other processes hold 6.0 GiB")
    assert split.forecast.fraction == pytest.approx((split.forecast.peak_bytes + gib(6)) / CARD)


def test_a_limit_that_was_set_on_purpose_is_the_limit() -> None:
    half = climb(replace(T5_OOM, allowed_bytes=gib(10)), T5, peaks=measured())
    forecast = forecast_of(half, "smaller_batch")
    assert forecast.total_bytes == gib(10)


def test_effective_batch_16_is_kept_and_accumulation_never_doubles_alone() -> None:
    found = climb(died(requested_bytes=2 * 2048 * 151936 * 4), QLORA, host=ROOMY)
    split = named(found, "smaller_batch")
    assert split.assignments == {"batch": "1", "accumulation": "16"}
    at_one = climb(died(), replace(QLORA, batch=1, accumulation=16))
    for remedy in (*found.remedies, *at_one.remedies):
        assert remedy.assignments.get("accumulation") != "32"
    assert ids(at_one)[-3:] == ["seq_len", "lora_rank", "smaller_model"]


def test_the_fullest_gpu_decides() -> None:
    cards = (11.49, 9.37, 9.11)
    peaks = [*(peak(T5, 16, size) for size in cards), peak(T5, 32, 19.73, failed=True)]
    split = forecast_of(climb(T5_OOM, T5, peaks=tuple(peaks)), "smaller_batch")
    assert split.peak_bytes == gib(max(cards))
