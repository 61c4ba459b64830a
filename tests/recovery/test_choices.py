"""The guides' schemes and presets, with the numbers that they come to. Rows are those of the seeds' checklist."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.supervisor.recovery.choices import Choice, choices, epoch_seconds, samples_per_second, steps_at
from tests.recovery.support import CARD, FIRST, GIB, QLORA, T5, measured


def of(name: str, **more: object) -> Choice:
    (found,) = [choice for choice in choices(T5, measured(), CARD, **more) if choice.name == name]  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("name", "batch", "accumulation", "effective", "words", "peak", "percent"),
    [
        ("plan 1", 24, 2, 144, "192 -> 144 (-25.0 %)", 15.61, 79.7),
        ("plan 2", 20, 2, 120, "192 -> 120 (-37.5 %)", 13.55, 69.2),
        ("plan 3", 24, 3, 216, "192 -> 216 (+12.5 %)", 15.61, 79.7),
        ("exact", 16, 4, 192, "192, as it is", 11.49, 58.7),
        ("preset A", 24, 2, 144, "192 -> 144 (-25.0 %)", 15.61, 79.7),
        ("preset C", 24, 3, 216, "192 -> 216 (+12.5 %)", 15.61, 79.7),
    ],
)
def test_rows_5_6_7_and_10_of_s1(
    name: str, batch: int, accumulation: int, effective: int, words: str, peak: float, percent: float
) -> None:
    found = of(name)
    assert (found.settings.batch, found.settings.accumulation, found.effective_batch) == (batch, accumulation, effective)
    assert found.effective_text == words
    assert found.keeps_math == (effective == 192)
    assert found.forecast is not None
    assert found.forecast.peak_bytes / GIB == pytest.approx(peak, abs=0.02)
    assert found.forecast.fraction == pytest.approx(percent / 100, abs=0.002)


def test_row_7_what_was_headed_as_keeping_the_batch_is_told() -> None:
    assert "which it raises by an eighth" in of("plan 3").guide
    # More accumulation makes an update longer, and no sample slower.
    assert of("plan 3").epoch_factor == of("plan 1").epoch_factor


def test_row_8_of_s1_plan_4() -> None:
    found = of("plan 4")
    assert found.settings == replace(T5, gradient_checkpointing=True)
    assert found.keeps_math
    assert found.forecast is not None
    assert found.forecast.peak_bytes / GIB == pytest.approx(14.79, abs=0.02)
    assert found.epoch_factor == pytest.approx(1 / 0.75)


def test_row_9_of_s1_plan_5() -> None:
    found = of("plan 5")
    assert (found.settings.seq_len, found.keeps_math, found.effective_batch) == (192, False, 192)
    assert found.forecast is not None
    assert found.forecast.peak_bytes / GIB == pytest.approx(15.61, abs=0.02)
    assert found.epoch_factor is not None
    assert found.epoch_factor < 1


def test_row_10_of_s1_preset_b_is_shorter_too() -> None:
    found = of("preset B")
    assert (found.settings.batch, found.settings.accumulation, found.settings.seq_len, found.effective_batch) == (
        20,
        2,
        192,
        120,
    )
    assert found.forecast is not None
    assert found.forecast.peak_bytes / GIB == pytest.approx(3.25 + 0.515 * 20 * 0.75, abs=0.02)
    assert 10 <= found.forecast.peak_bytes / GIB <= 12, "the guide's own 10 to 12"
    assert (found.preset, found.resumable) == ("t5-conservative", "new run")


def test_row_5_of_s1_the_time_of_an_epoch_measured_or_called_a_guess() -> None:
    guess = of("plan 1")
    assert (round(guess.epoch_factor or 0, 3), guess.epoch_basis) == (1.081, "the guide's guess")
    known = of("plan 1", speeds={32: 100.0, 24: 80.0})
    assert (known.epoch_factor, known.epoch_basis) == (1.25, "measured")
    assert of("exact").epoch_factor is None
    assert of("plan 5", speeds={32: 100.0}).epoch_basis == "the guide's guess"


def test_row_20_of_s1_and_4_3_an_epoch_at_another_batch() -> None:
    assert steps_at(51_000, 32, 24) == 68_000
    seconds = epoch_seconds(51_000, 32, 24, 1.05)
    assert seconds / 3600 == pytest.approx(19.8, abs=0.05)
    assert seconds / (51_000 * 1.0) == pytest.approx(1.40, abs=0.001), "not the guide's 1.27"


def test_3_3_row_14_and_4_3_speed_is_in_samples() -> None:
    assert samples_per_second(200, 204, 16, 3) == pytest.approx(47.1, abs=0.05)
    aim = samples_per_second(1, 0.6, 32, 3)
    assert aim == 160
    assert aim / samples_per_second(200, 204, 16, 3) == pytest.approx(3.4, abs=0.01), "not 1.7"
    assert steps_at(183_605, 16, 32) == pytest.approx(91_800, abs=5)


def test_3_4_rows_5_and_6_the_plans_of_s3() -> None:
    found = {choice.name: choice for choice in choices(QLORA)}
    assert set(found) == {"plan 1", "plan 3"}
    for name, length, r in (("plan 1", 1024, 32), ("plan 3", 512, 16)):
        after = found[name].settings
        assert (after.batch, after.accumulation, after.seq_len) == (1, 16, length)
        assert after.lora is not None
        assert (after.lora.r, after.lora.alpha) == (r, 2 * r)
        assert found[name].effective_text == "16, as it is"
        assert not found[name].keeps_math
        assert found[name].resumable == "new run"
        assert found[name].forecast is None
        assert found[name].forecast_unknown
    assert "accumulation of 32 doubles the effective batch" in found["plan 3"].guide


def test_without_peaks_a_choice_says_so() -> None:
    for choice in choices(T5):
        assert choice.forecast is None
        assert choice.forecast_unknown == "nothing was measured yet under these settings"


def test_no_estimate_where_something_else_changes() -> None:
    longer = {choice.name: choice for choice in choices(replace(T5, seq_len=192), measured(replace(T5, seq_len=192)), CARD)}
    assert longer["preset A"].forecast is None
    assert longer["preset A"].forecast_unknown == "T 256 is longer than what was measured"
    on = replace(T5, gradient_checkpointing=True)
    undone = {choice.name: choice for choice in choices(on, measured(on), CARD)}["preset A"]
    assert undone.forecast_unknown == "without checkpointing nothing was measured"


def test_other_runs_have_none() -> None:
    assert choices(FIRST) == ()
