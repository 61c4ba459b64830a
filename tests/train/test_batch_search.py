"""`--batch auto`: the largest micro-batch that fits is found without changing the training."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from memtop.presets import Settings
from memtop.presets.estimate import estimate
from memtop.presets.measured import GpuKind, Measured, model_key, remember
from memtop.presets.parameters import stored_config
from memtop.train.batch_choice import Tried, first_size, next_size
from memtop.train.batch_search import longest_sample
from memtop.train.batch_sizer import CudaMemory
from memtop.train.objective import IGNORED
from memtop.train.optimizers import bytes_of_first_step
from memtop.train.order import Table
from tests.train.card import Card, Reading, put_in
from tests.train.failing import Failing, Failure, fails_above, fresh, small, splits_of
from tests.train.support import Training, samples

GPU = torch.device("cuda", 0)
HELD, EACH = 200_000, 50_000
"""Bytes of the model and of each sample in the simulated GPU, which has 1,000,000. The moments of
the model take about 80,000."""


class TooSmall(CudaMemory):
    """The simulated GPU has less memory than torch's workspaces alone: nothing can be foreseen for
    it."""

    def generation(self) -> int | None:
        return None


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Card:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    card = put_in(monkeypatch)
    card.total, card.held = 1_000_000, HELD
    card.empty_cache()
    card.reset()
    return card


def settings_of(**changes: Any) -> Settings:
    """Two updates of 48 samples at batch 4 and with a search, unless the changes say otherwise."""
    values = {"batch": 4, "accumulation": 12, "target_samples": 96, "auto_batch": True, "packing": False}
    return small(dropout=0.1, **{**values, **changes})


def on_card(
    folder: Path,
    card: Card,
    settings: Settings,
    *,
    fails_from: int = 1_000,
    extra: int = 0,
    peak: Callable[[int], int] = lambda batch: EACH * batch,
    foresees: bool = False,
) -> Training:
    """A training on the simulated GPU. Micro-batches from `fails_from` on do not fit; the optimizer
    holds `extra` bytes more than its moments.
    """
    training = fresh(folder, settings, channel=Reading(card), memory=CudaMemory(GPU) if foresees else TooSmall(GPU))
    moments = bytes_of_first_step(training.optimizer)

    def taken(module: torch.nn.Module, args: Any, values: Any) -> None:
        card.take(card.held + peak(len(values["input_ids"])))

    def stepped(*_: Any) -> None:
        card.held = HELD + moments + extra

    fails_above(training, fails_from - 1)
    training.model.register_forward_pre_hook(taken, with_kwargs=True)
    training.optimizer.register_step_post_hook(stepped)
    card.held = HELD
    return training


def tried_in(training: Training) -> dict[int, bool]:
    """The sizes that were tried, in their order, and whether they fit."""
    (report,) = training.channel.of("batch_search")
    return {one["batch"]: one["share"] is not None and one["share"] < 0.85 for one in report["tried"]}


# --- which sizes are tried ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fixed", "each", "expected"),
    [
        # Two peaks, then the largest size that the line through them allows.
        (0.1, 0.05, [4, 8, 12]),
        # Two peaks, and nothing larger is forecast to fit.
        (0.1, 0.09, [4, 8]),
        # The first size is too large: half of it, and the next ones.
        (0.1, 0.2, [4, 2, 3]),
        (0.1, 0.6, [4, 2, 1]),
        (0.9, 0.05, [4, 2, 1]),
        # Everything fits.
        (0.1, 0.001, [4, 8, 48]),
    ],
)
def test_few_sizes_are_tried(fixed: float, each: float, expected: list[int]) -> None:
    def full(size: int) -> float:
        return fixed + each * size

    tried: list[Tried] = []
    while (size := next_size([1, 2, 3, 4, 6, 8, 12, 16, 24, 48], 4, tried, full)) is not None:
        share = full(size) if full(size) <= 1 else None
        tried.append(Tried(size, share))
    assert [one.batch for one in tried] == expected


def test_it_begins_with_the_largest_size_that_is_foreseen_to_be_safe() -> None:
    sizes = [1, 2, 4, 8, 16]
    assert first_size(sizes, 4, lambda size: 0.1 * size) == 8
    assert first_size(sizes, 4, lambda size: 0.01 * size) == 16
    assert first_size(sizes, 4, lambda size: 0.9) == 1
    assert first_size(sizes, 4, lambda size: None) == 4


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # The estimate is right: one size is tried.
        (1.0, [8]),
        # It is too high, or too low: the scaled estimate chooses the next size.
        (0.4, [8, 16]),
        (1.3, [8, 4]),
        # Memory runs out: half of it, as without an estimate.
        (2.0, [8, 4]),
    ],
)
def test_with_an_estimate_fewer_sizes_are_tried(scale: float, expected: list[int]) -> None:
    tried: list[Tried] = []

    def full(size: int) -> float:
        return scale * (0.1 + 0.08 * size)

    while (size := next_size([1, 2, 4, 8, 16], 8, tried, full, by_one=True)) is not None:
        tried.append(Tried(size, full(size) if full(size) <= 1 else None))
    assert [one.batch for one in tried] == expected


def test_the_longest_sample_has_the_largest_size_of_the_data() -> None:
    text = samples()
    ids, labels = longest_sample(text, 16, "causal")
    assert len(ids) == len(labels) == 16 == text.table(16).lengths.max()
    assert len(longest_sample(text, 10_000, "causal")[0]) == text.table(10_000).lengths.max() < 10_000


class Rows:
    """Rows of one token, except for two, one of them with the longest input."""

    def __init__(self, count: int, *, pairs: bool) -> None:
        self._count = count
        self._pairs = pairs

    def table(self, seq_len: int) -> Table:
        return Table(np.arange(self._count), np.zeros(self._count, np.int64))

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = {0: (7, 2), self._count - 1: (3, 5)}.get(key[0], (1, 1))
        targets = torch.full((labels if self._pairs else inputs,), key[0])
        # The longest row of a causal model has a prompt of six tokens.
        targets[: 0 if self._pairs or key[0] else 6] = IGNORED
        return torch.full((inputs,), key[0]), targets


def test_rows_are_read_for_the_longest_and_unread_ones_may_be_as_long_as_allowed() -> None:
    ids, labels = longest_sample(Rows(100, pairs=False), 16, "sft")
    assert len(ids) == len(labels) == 7
    assert int((labels != IGNORED).sum()) == 3, "another row has more tokens that count"
    assert [len(part) for part in longest_sample(Rows(100, pairs=True), 16, "seq2seq")] == [7, 5]
    assert [len(part) for part in longest_sample(Rows(30_000, pairs=True), 16, "seq2seq")] == [16, 16]


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "adafactor"])
def test_the_bytes_of_the_moments_are_those_of_the_first_step(tmp_path: Path, kind: str) -> None:
    training = fresh(tmp_path, settings_of(optimizer=kind, auto_batch=False))
    expected = bytes_of_first_step(training.optimizer)
    training.run()
    tensors = {
        id(value): value
        for state in training.optimizer.state.values()
        for name, value in state.items()
        if torch.is_tensor(value) and not name.startswith("qmap")
    }
    assert expected == sum(tensor.nbytes for tensor in tensors.values())
    assert bytes_of_first_step(training.optimizer) == 0, "they are there"


# --- in a training --------------------------------------------------------------------------------


def test_the_training_is_the_one_with_the_found_batch(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path / "found", card, settings_of())
    seen: list[tuple[int, ...]] = []
    training.model.register_forward_pre_hook(
        lambda module, args, values: seen.append(tuple(values["input_ids"].shape)), with_kwargs=True
    )
    training.run()
    assert set(splits_of(training.channel).values()) == {(8, 6)}
    # Two passes with each size, because gradients exist during the second, all with T tokens.
    assert seen[:4] == [(4, 16), (4, 16), (8, 16), (8, 16)]
    direct = on_card(tmp_path / "direct", card, settings_of(batch=8, accumulation=6, auto_batch=False))
    direct.run()
    assert training.losses == direct.losses
    assert training.digests == direct.digests
    for name, weight in direct.weights().items():
        assert torch.equal(training.weights()[name], weight), name


def test_the_search_begins_where_the_estimate_says(tmp_path: Path, card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_of(batch=1, accumulation=48)
    probe = on_card(tmp_path / "probe", card, settings, foresees=True)
    config = probe.model.config.to_dict()

    def foreseen(batch: int) -> int:
        tried = msgspec.structs.replace(settings, batch=batch, accumulation=48 // batch)
        return estimate(tried, config, generation=86, capacity=card.total).reserved

    # The first batch is safe by the estimate, the next one is not. torch reserves whole segments.
    for begins, larger in itertools.pairwise((8, 12, 16, 24, 48)):
        card.total = 1 << 40
        card.total = int(foreseen(begins) / 0.84)
        if foreseen(larger) > 0.85 * card.total:
            break
    assert foreseen(larger) > 0.85 * card.total
    # The search counts the moments of the first update itself.
    less = HELD + bytes_of_first_step(probe.optimizer)
    training = on_card(tmp_path / "a", card, settings, peak=lambda batch: foreseen(batch) - less, foresees=True)
    training.run()
    assert tried_in(training) == {begins: True}
    assert set(splits_of(training.channel).values()) == {(begins, 48 // begins)}
    (report,) = training.channel.of("batch_search")
    assert report["forecast_batch"] == larger
    assert report["forecast_share"] > 0.85
    assert f"memtop: batch auto: begins with {begins}, foreseen at 8" in capsys.readouterr().out


def test_earlier_runs_of_the_model_correct_the_estimate(tmp_path: Path, card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_of(batch=1, accumulation=48)
    probe = on_card(tmp_path / "probe", card, settings, foresees=True)
    config = probe.model.config.to_dict()

    def estimated(batch: int) -> int:
        tried = msgspec.structs.replace(settings, batch=batch, accumulation=48 // batch)
        return estimate(tried, config, generation=86, capacity=card.total).reserved

    card.total = 1 << 40
    card.total = int(estimated(48) / 0.84)
    model = model_key(stored_config(settings) or {})
    row = {"run": "/runs/a", "time": 1.0, "gpu": GpuKind("simulated", card.total), "model": model}
    two = msgspec.structs.replace(settings, batch=2, accumulation=24)
    remember(Measured(**row, settings=two, reserved_bytes=round(1.05 * estimated(2))))
    training = on_card(tmp_path / "a", card, settings, peak=lambda batch: batch, foresees=True)
    training.run()
    first = training.channel.of("batch_search")[0]["tried"][0]
    largest = max(batch for batch in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48) if 1.05 * estimated(batch) < 0.85 * card.total)
    assert first["batch"] == largest < 48
    assert f"begins with {largest}, foreseen at " in capsys.readouterr().out


def test_a_buffer_that_passes_change_is_restored(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path, card, settings_of())
    training.model.register_buffer("passes", torch.zeros(1))
    training.model.register_forward_pre_hook(lambda module, args: module.passes.add_(1) and None)
    training.run()
    assert float(training.model.passes) == 2 * 6


def test_the_person_sees_what_was_tried(tmp_path: Path, card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    training = on_card(tmp_path, card, settings_of())
    training.run()
    (report,) = training.channel.of("batch_search")
    assert report["message"] == ("batch auto: 4 fits (47 % of 0.000931 GiB), 8 fits (67 %), 12 is forecast at 87 %: 8 x 6")
    assert [one["batch"] for one in report["tried"]] == [4, 8]
    assert report["tried"][0]["own_share"] == report["tried"][0]["share"] == pytest.approx(0.47, abs=0.01)
    assert (report["forecast_batch"], report["remembered"], report["total_bytes"]) == (12, False, 1_000_000)
    printed = capsys.readouterr().out
    for line in ("4 x 12: fits (47 %)", "8 x 6: fits (67 %)", report["message"].removeprefix("batch auto: ")):
        assert f"memtop: batch auto: {line}\n" in printed
    (change,) = training.channel.of("settings")
    assert (change["update"], change["reason"]) == (1, "batch search")
    # A restart with the settings of the run keeps the split.
    assert change["changes"] == {"batch": 8, "accumulation": 6, "auto_batch": False}


def test_memory_that_runs_out_in_a_pass_means_too_large(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path, card, settings_of(), fails_from=6)
    assert training.run() == "finished"
    assert tried_in(training) == {4: True, 8: False, 6: False}
    assert set(splits_of(training.channel).values()) == {(4, 12)}
    assert training.channel.of("oom") == [], "no update has failed"


def test_another_error_in_a_pass_is_not_taken_for_a_lack_of_memory(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path, card, settings_of())

    def broken(module: torch.nn.Module, args: Any) -> None:
        raise RuntimeError("broken")

    training.model.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="broken"):
        training.run()


def test_a_model_that_hardly_fits_trains_with_batch_1(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path, card, settings_of(), peak=lambda batch: 650_000 + batch)
    assert training.run() == "finished"
    assert tried_in(training) == {4: False, 2: False, 1: False}
    assert set(splits_of(training.channel).values()) == {(1, 48)}
    assert training.channel.of("batch_search")[0]["message"].endswith(": 1 x 48, although none stays below 85 %")


def test_a_wrong_estimate_of_the_moments_is_corrected_after_the_first_update(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path, card, settings_of(target_samples=48 * 3), extra=250_000)
    training.run()
    assert splits_of(training.channel) == {1: (8, 6), 2: (6, 8), 3: (6, 8)}
    assert [change["reason"] for change in training.channel.of("settings")] == ["batch search", "batch search"]
    direct = on_card(tmp_path / "direct", card, settings_of(target_samples=48 * 3, batch=8, accumulation=6, auto_batch=False))
    direct.run()
    assert direct.digests == training.digests


def test_the_next_start_remembers_and_tries_nothing(tmp_path: Path, card: Card) -> None:
    settings = settings_of(target_samples=48 * 4)
    first = on_card(tmp_path / "first", card, settings)
    first.run()
    second = on_card(tmp_path / "second", card, settings)
    passes: list[int] = []
    second.model.register_forward_pre_hook(
        lambda module, args, values: passes.append(len(values["input_ids"])) if module.training else None, with_kwargs=True
    )
    second.run()
    assert passes == [8] * 6 * 4
    (report,) = second.channel.of("batch_search")
    assert (report["tried"], report["remembered"], report["batch"]) == ([], True, 8)
    assert second.losses == first.losses
    # Other settings are searched anew.
    other = on_card(tmp_path / "other", card, msgspec.structs.replace(settings, gradient_checkpointing=True))
    other.run()
    assert tried_in(other) == {4: True, 8: True}


def test_a_remembered_batch_must_fit_into_what_is_free_now(tmp_path: Path, card: Card) -> None:
    settings = settings_of(target_samples=48 * 4)
    found = []
    # What another program holds of the same GPU at each start.
    for number, card.others in enumerate((0, 250_000, 0)):
        card.held = HELD
        training = on_card(tmp_path / str(number), card, settings)
        training.run()
        (report,) = training.channel.of("batch_search")
        found.append((report["batch"], report["remembered"]))
    assert found == [(8, False), (6, True), (8, True)]


def test_a_batch_that_was_found_while_others_held_memory_is_not_kept(tmp_path: Path, card: Card) -> None:
    settings = settings_of(target_samples=48 * 4)
    found = []
    for number, card.others in enumerate((250_000, 250_000, 0, 0)):
        card.held = HELD
        training = on_card(tmp_path / str(number), card, settings)
        training.run()
        (report,) = training.channel.of("batch_search")
        found.append((report["batch"], report["remembered"]))
    assert found == [(6, False), (6, True), (8, False), (8, True)]


def test_a_remembered_batch_that_fails_is_forgotten(tmp_path: Path, card: Card) -> None:
    settings = settings_of(target_samples=48 * 4)
    on_card(tmp_path / "first", card, settings).run()
    second = on_card(tmp_path / "second", card, settings)
    Failing(second, [Failure(1, 0.5, True)])
    second.run()
    assert splits_of(second.channel)[1] == (4, 12)
    third = on_card(tmp_path / "third", card, settings)
    third.run()
    assert tried_in(third) == {4: True, 8: True}


def test_a_file_that_cannot_be_used_or_written_does_not_stop_the_training(
    tmp_path: Path, card: Card, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(target_samples=48 * 4)
    on_card(tmp_path / "first", card, settings).run()
    (path,) = (tmp_path / "cache/memtop/batches").iterdir()
    path.write_text('{"batch": "many"}')
    second = on_card(tmp_path / "second", card, settings)
    second.run()
    assert tried_in(second) == {4: True, 8: True}
    path.unlink()
    path.mkdir()
    capsys.readouterr()
    assert on_card(tmp_path / "third", card, settings).run() == "finished"
    assert f"memtop: batch auto: cannot be remembered: {path}: Is a directory" in capsys.readouterr().out


def test_an_edit_ends_the_checks(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path, card, settings_of(target_samples=48 * 3), extra=250_000)
    training.channel.commands[1] = [(1, "change", {"batch": 12, "accumulation": 4})]
    training.run()
    assert splits_of(training.channel) == {1: (8, 6), 2: (12, 4), 3: (12, 4)}
    assert not (tmp_path / "cache/memtop/batches").exists()


def test_where_memory_cannot_be_measured_the_given_batch_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = fresh(tmp_path, settings_of())
    training.channel.commands[1] = [(1, "change", {"eval_batch": 2})]
    training.run()
    assert [(ok, text) for _, ok, text in training.channel.answers] == [(True, "from update 2 on: eval_batch 0 -> 2")]
    assert set(splits_of(training.channel).values()) == {(4, 12)}
    text = "batch auto: not available: the memory of this device cannot be measured; training with 4 x 12"
    assert [warning["message"] for warning in training.channel.of("warning")] == [text]
    assert f"memtop: {text}\n" in capsys.readouterr().out
    assert [change["changes"] for change in training.channel.of("settings")] == [{"eval_batch": 2}]


def test_a_restart_searches_again_if_asked_and_keeps_its_samples(tmp_path: Path, card: Card) -> None:
    settings = settings_of(target_samples=48 * 4, save_every=2)
    first = on_card(tmp_path, card, msgspec.structs.replace(settings, target_samples=96, auto_batch=False))
    moments = bytes_of_first_step(first.optimizer)
    first.run()
    resumed = on_card(tmp_path, card, settings)
    card.held = HELD + moments
    assert bytes_of_first_step(resumed.optimizer) == 0, "the moments were saved"
    resumed.run()
    assert splits_of(resumed.channel) == {3: (8, 6), 4: (8, 6)}
    assert resumed.channel.of("settings")[0]["update"] == 3
    whole = on_card(tmp_path / "whole", card, msgspec.structs.replace(settings, auto_batch=False))
    whole.run()
    assert resumed.digests == whole.digests[2:]
