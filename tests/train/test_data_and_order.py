"""Which samples an update uses and its learning rate, tested as pure functions."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtop.presets import Settings, edit_settings, load_presets, load_recipes, resolve
from memtop.train import BadInputError
from memtop.train.data import Data, OpenedData, byte_document, open_data
from memtop.train.data.samples import PackedText, collate
from memtop.train.data.tokens import BEGIN, END, PAD, VOCABULARY, ByteTokens, TokenStore
from memtop.train.objective import IGNORED, counted_positions
from memtop.train.order import Key, SampleOrder, Table, plan_updates, sample_digest
from memtop.train.state_files import Cut

SETTINGS = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])


def packed(texts: Iterable[bytes]) -> PackedText:
    return PackedText(TokenStore.from_arrays(map(byte_document, texts), VOCABULARY))


class Rows:
    """The rows of a table: the same samples for every sequence length."""

    recut = False

    def __init__(self, count: int) -> None:
        self.count = count

    def table(self, seq_len: int) -> Table:
        return Table(np.arange(self.count), np.zeros(self.count, np.int64))

    def cut_again(self, rest: Table, seq_len: int) -> Table:
        raise AssertionError("rows are not cut")

    def shuffled(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return generator.permutation(count)


def rows(count: int, seed: int) -> SampleOrder:
    return SampleOrder(Rows(count), seed, [Cut(0, 16)])


def ids(order: SampleOrder, position: int, count: int) -> list[int]:
    return [key[0] for key in order.take(position, count)]


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    first = ids(rows(1000, 3), 0, 2500)
    random.seed(1)
    torch.manual_seed(1)
    np.random.seed(1)
    order = rows(1000, 3)
    order.take(1700, 5)
    assert ids(order, 0, 2500) == first
    assert ids(rows(1000, 4), 0, 1000) != first[:1000]


def test_each_sample_comes_once_per_epoch_and_epochs_differ() -> None:
    found = ids(rows(100, 3), 0, 300)
    for epoch in range(3):
        assert sorted(found[epoch * 100 : epoch * 100 + 100]) == list(range(100))
    assert found[:100] != found[100:200] != found[200:]


def test_any_stretch_is_the_same_however_it_is_split() -> None:
    whole = ids(rows(37, 1), 0, 200)
    pieces, position = [], 0
    for count in (1, 36, 37, 38, 50, 38):
        pieces += ids(rows(37, 1), position, count)
        position += count
    assert pieces == whole


@pytest.mark.parametrize("split", [(8, 1, 1), (4, 2, 1), (2, 4, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (1, 2, 4)])
def test_every_split_sees_the_same_samples_per_update(split: tuple[int, int, int]) -> None:
    batch, accumulation, world = split
    # 43 is not a multiple of 8, so the last update is short; and the epoch ends inside an update.
    plans = list(plan_updates(rows(21, 5), updates=0, position=0, target=43, effective_batch=8))
    assert [len(plan.keys) for plan in plans] == [8, 8, 8, 8, 8, 3]
    for plan in plans:
        per_rank = [plan.micro_batches([(batch, accumulation)] * world, rank) for rank in range(world)]
        assert len({len(mine) for mine in per_rank}) == 1, "all ranks must have the same number of steps"
        assert len(per_rank[0]) <= accumulation
        assert all(len(keys) <= batch for mine in per_rank for keys in mine)
        assert sorted(key for mine in per_rank for keys in mine for key in keys) == sorted(plan.keys)
    assert [i for plan in plans for i in plan.ids] == ids(rows(21, 5), 0, 43)


@pytest.mark.parametrize("splits", [((3, 2), (1, 2)), ((1, 6), (1, 2)), ((2, 2), (1, 4)), ((1, 1), (5, 1), (2, 1))])
def test_ranks_with_splits_of_their_own_share_each_update(splits: tuple[tuple[int, int], ...]) -> None:
    whole = sum(b * a for b, a in splits)
    plans = list(plan_updates(rows(21, 5), updates=0, position=0, target=43, effective_batch=whole))
    for plan in plans:
        per_rank = [plan.micro_batches(splits, rank) for rank in range(len(splits))]
        for mine, (batch, accumulation) in zip(per_rank, splits, strict=True):
            assert 1 <= len(mine) <= accumulation
            assert all(len(keys) <= batch for keys in mine)
            if len(plan.keys) == whole:
                assert [len(keys) for keys in mine] == [batch] * accumulation
        assert sorted(key for mine in per_rank for keys in mine for key in keys) == sorted(plan.keys)
    assert [i for plan in plans for i in plan.ids] == ids(rows(21, 5), 0, 43)


def test_a_smaller_micro_batch_leaves_each_rank_its_samples() -> None:
    (plan,) = plan_updates(rows(21, 5), updates=0, position=0, target=16, effective_batch=16)

    def of(*splits: tuple[int, int]) -> list[list[Key]]:
        return [[key for keys in plan.micro_batches(splits, rank) for key in keys] for rank in range(len(splits))]

    assert of((3, 4), (1, 4)) == of((1, 12), (1, 4)) == of((6, 2), (4, 1))
    assert of((2, 4), (1, 8)) == of((4, 2), (8, 1))


def test_a_resumed_run_plans_the_rest_of_the_same_updates() -> None:
    whole = list(plan_updates(rows(21, 5), updates=0, position=0, target=80, effective_batch=8))
    rest = list(plan_updates(rows(21, 5), updates=4, position=32, target=80, effective_batch=8))
    assert rest == whole[4:]


def test_epochs_are_counted_and_found() -> None:
    order = rows(20, 1)
    assert [order.epoch_at(n) for n in (0, 10, 20, 25, 60)] == [0.0, 0.5, 1.0, 1.25, 3.0]
    assert [order.end_of(epochs) for epochs in (1.0, 2.5, 3.0)] == [20, 50, 60]


# --- a changed sequence length
# ------------------------------------------------------------------------------------------


def test_the_same_cuts_give_the_same_order_and_keep_earlier_samples() -> None:
    text = packed([bytes(range(200))] * 4)
    before = SampleOrder(text, 7, [Cut(0, 16)]).take(0, 20)
    cuts = [Cut(0, 16), Cut(20, 8)]
    assert SampleOrder(text, 7, cuts).take(0, 20) == before
    assert SampleOrder(text, 7, cuts).take(23, 40) == SampleOrder(text, 7, cuts).take(0, 63)[23:]


def test_the_epoch_does_not_fall_when_the_rest_is_cut_into_more_samples() -> None:
    text = packed([bytes(range(200))] * 4)
    half = SampleOrder(text, 7, [Cut(0, 16)]).end_of(1.0) // 2
    before, after = SampleOrder(text, 7, [Cut(0, 16)]), SampleOrder(text, 7, [Cut(0, 16), Cut(half, 8)])
    assert after.epoch_at(half) == before.epoch_at(half)
    # A sample of half the length is half as much of the epoch.
    growth = [order.epoch_at(half + 10) - order.epoch_at(half) for order in (before, after)]
    assert 0 < growth[1] == pytest.approx(growth[0] / 2, rel=0.2)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    first=st.integers(2, 24),
    changes=st.lists(st.tuples(st.integers(1, 12), st.integers(2, 24)), max_size=3),
)
def test_no_token_of_an_epoch_is_repeated_or_left_out_when_seq_len_changes(
    lengths: list[int], first: int, changes: list[tuple[int, int]]
) -> None:
    text = packed(map(bytes, lengths))
    cuts = [Cut(0, first)]
    for gap, seq_len in changes:
        cuts.append(Cut(cuts[-1].position + gap, seq_len))
    order = SampleOrder(text, 3, cuts)
    used = np.zeros(sum(lengths) + 2 * len(lengths), np.int64)
    position = 0
    before = 0.0
    while order.epoch_at(position) < 1.0:
        # Also where a shorter sequence makes more samples of the rest.
        assert order.epoch_at(position) >= before
        before = order.epoch_at(position)
        ((start, length),) = order.take(position, 1)
        longest = next(cut.seq_len for cut in reversed(cuts) if cut.position <= position)
        assert 2 <= length <= longest
        used[start : start + length] += 1
        position += 1
    assert order.end_of(1.0) == position
    assert used.max() == 1
    # Only a single token at the end of a stretch may be missing: it predicts nothing.
    assert (used == 0).sum() <= len(lengths) * (1 + sum(gap for gap, _ in changes))


def test_the_digest_follows_the_contract() -> None:
    # sha256 of "2\n10\n33"
    assert sample_digest([33, 2, 10]) == "dcf6782a4621418854c439162e98a2a8c0e181105ce600ad799ec928275b934d"


def test_samples_contain_the_bytes_of_their_texts() -> None:
    texts = [b"hello world", b"x", bytes(range(256))]
    text = packed(texts)
    table = text.table(8)
    samples = [text[key][0] for key in zip(table.ids.tolist(), table.lengths.tolist(), strict=True)]
    assert torch.cat(samples).tolist() == [token for t in texts for token in (BEGIN, *t, END)]
    assert max(map(len, samples)) == 8
    assert min(map(len, samples)) >= 2


def test_a_tail_of_one_token_is_left_out() -> None:
    text = packed([b"1234567"])
    assert text.table(8).lengths.tolist() == [8]
    assert text[0, 8][0].tolist() == [BEGIN, *b"1234567"]


def test_what_counts_is_predicted_at_the_position_before_it() -> None:
    labels = torch.tensor([[1, 2, 3, IGNORED], [IGNORED, IGNORED, 5, 6]])
    assert counted_positions(labels, seq2seq=False).tolist() == [0, 1, 5, 6]
    assert counted_positions(labels, seq2seq=True).tolist() == [0, 1, 2, 6, 7]


def test_padding_is_masked() -> None:
    ids_and_labels = [(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3])), (torch.tensor([4]), torch.tensor([7, 8]))]
    batch = collate(ids_and_labels, PAD)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, PAD, PAD]]
    assert batch["labels"].tolist() == [[1, 2, 3], [7, 8, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def content(data: Data) -> bytes:
    table = data.table(2**40)
    keys = zip(table.ids.tolist(), table.lengths.tolist(), strict=True)
    return b"".join(bytes(token for token in data[key][0].tolist() if token < 256) for key in keys)


def test_the_text_is_the_machines_own_and_bounded() -> None:
    def opened(**data: Any) -> OpenedData:
        return open_data(msgspec.structs.replace(SETTINGS, data=data), ByteTokens())

    found = opened(source="python-stdlib", max_bytes=50_000)
    assert 49_000 <= found.train.table(64).lengths.sum() < 52_000
    # The evaluation data follow the training data.
    assert found.evaluation is not None
    assert content(opened(source="python-stdlib", max_bytes=250_000).train) == content(found.train) + content(found.evaluation)
    with pytest.raises(BadInputError, match=r"data.source 'moon': unknown; use python-stdlib"):
        opened(source="moon")


def rate(samples_seen: int, of: Settings = SETTINGS) -> float:
    return of.rate_at(samples_seen, of.target_samples)


def test_the_rate_rises_then_falls_along_a_cosine() -> None:
    target, peak = SETTINGS.target_samples, SETTINGS.learning_rate
    warm = int(target * SETTINGS.warmup_fraction)
    assert rate(warm // 2) == pytest.approx(peak / 2, rel=0.02)
    assert rate(warm) == pytest.approx(peak, rel=0.01)
    middle = int(target * (0.5 + SETTINGS.warmup_fraction / 2))
    assert rate(middle) == pytest.approx(peak * (0.1 + 0.9 / 2), rel=0.01)
    assert rate(target) == pytest.approx(peak * 0.1)
    assert rate(target * 2) == pytest.approx(peak * 0.1)


def test_the_rate_does_not_depend_on_the_split() -> None:
    other = edit_settings(SETTINGS, assignments={"batch": "1", "accumulation": "32"})
    assert [rate(n) for n in range(0, 4000, 32)] == [rate(n, other) for n in range(0, 4000, 32)]


def test_a_warm_up_in_samples_counts_before_its_share() -> None:
    settings = msgspec.structs.replace(SETTINGS, warmup_samples=320)
    assert rate(160, settings) == pytest.approx(settings.learning_rate / 2)
    assert rate(320, settings) == pytest.approx(settings.learning_rate)
