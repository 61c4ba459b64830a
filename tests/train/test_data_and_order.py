"""Which samples an update sees, at which rate it learns: pure functions, tested as such."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from memtop.presets import edit_settings, load_presets, load_recipes, resolve
from memtop.train.data import BEGIN, END, IGNORED, PAD, ByteSamples, collate, load_samples
from memtop.train.errors import BadInputError
from memtop.train.order import SampleOrder, plan_updates, sample_digest
from memtop.train.schedule import learning_rate

SETTINGS = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    first = SampleOrder(1000, seed=3).take(0, 2500)
    random.seed(1)
    torch.manual_seed(1)
    np.random.seed(1)
    order = SampleOrder(1000, seed=3)
    order.take(1700, 5)
    assert order.take(0, 2500) == first
    assert SampleOrder(1000, seed=4).take(0, 1000) != first[:1000]


def test_each_sample_comes_once_per_epoch_and_epochs_differ() -> None:
    ids = SampleOrder(100, seed=3).take(0, 300)
    for epoch in range(3):
        assert sorted(ids[epoch * 100 : epoch * 100 + 100]) == list(range(100))
    assert ids[:100] != ids[100:200] != ids[200:]


def test_any_stretch_is_the_same_however_it_is_taken() -> None:
    order = SampleOrder(37, seed=1)
    whole = order.take(0, 200)
    pieces, position = [], 0
    for count in (1, 36, 37, 38, 50, 38):
        pieces += SampleOrder(37, seed=1).take(position, count)
        position += count
    assert pieces == whole


@pytest.mark.parametrize("split", [(8, 1, 1), (4, 2, 1), (2, 4, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (1, 2, 4)])
def test_every_split_sees_the_same_samples_per_update(split: tuple[int, int, int]) -> None:
    batch, accumulation, world = split
    order = SampleOrder(21, seed=5)
    # 43 is no multiple of 8: the last update is short; and the epoch ends inside an update.
    plans = list(plan_updates(order, updates=0, position=0, target=43, effective_batch=8))
    assert [len(plan.ids) for plan in plans] == [8, 8, 8, 8, 8, 3]
    for plan in plans:
        per_rank = [plan.micro_batches(batch, world, rank) for rank in range(world)]
        assert len({len(mine) for mine in per_rank}) == 1, "ranks must step together"
        assert len(per_rank[0]) <= accumulation
        assert all(len(ids) <= batch for mine in per_rank for ids in mine)
        assert sorted(i for mine in per_rank for ids in mine for i in ids) == sorted(plan.ids)
    assert [i for plan in plans for i in plan.ids] == SampleOrder(21, seed=5).take(0, 43)


def test_a_run_taken_up_again_plans_the_rest_of_the_same_updates() -> None:
    whole = list(plan_updates(SampleOrder(21, 5), updates=0, position=0, target=80, effective_batch=8))
    rest = list(plan_updates(SampleOrder(21, 5), updates=4, position=32, target=80, effective_batch=8))
    assert rest == whole[4:]


def test_the_digest_is_what_the_contract_says() -> None:
    # sha256 of "2\n10\n33"
    assert sample_digest([33, 2, 10]) == "dcf6782a4621418854c439162e98a2a8c0e181105ce600ad799ec928275b934d"


def test_samples_give_back_the_bytes_of_their_files() -> None:
    texts = [b"hello world", b"x", bytes(range(256))]
    samples = ByteSamples(texts, seq_len=8)
    tokens = torch.cat([samples[i] for i in range(len(samples))]).tolist()
    expected = [token for text in texts for token in (BEGIN, *text, END)]
    assert tokens == expected
    assert max(len(samples[i]) for i in range(len(samples))) == 8
    assert min(len(samples[i]) for i in range(len(samples))) >= 2


def test_a_tail_of_one_token_is_no_sample() -> None:
    samples = ByteSamples([b"1234567"], seq_len=8)
    assert [samples[i].tolist() for i in range(len(samples))] == [[BEGIN, *b"1234567"]]


def test_predicted_tokens_are_counted_without_reading() -> None:
    samples = ByteSamples([b"a" * n for n in range(1, 40)], seq_len=16)
    ids = list(range(len(samples)))
    assert samples.label_tokens(ids) == sum(len(samples[i]) - 1 for i in ids)


def test_padding_is_masked() -> None:
    tokens, labels = collate([torch.tensor([1, 2, 3]), torch.tensor([4])])
    assert tokens.tolist() == [[1, 2, 3], [4, PAD, PAD]]
    assert labels.tolist() == [[1, 2, 3], [4, IGNORED, IGNORED]]


def test_the_text_is_the_machines_own_and_bounded() -> None:
    samples = load_samples({"source": "python-stdlib", "max_bytes": 50_000}, 64)
    total = sum(len(samples[i]) for i in range(len(samples)))
    assert 50_000 <= total < 52_000
    with pytest.raises(BadInputError, match=r"data.source 'moon': unknown; there is python-stdlib"):
        load_samples({"source": "moon"}, 64)


def test_the_rate_rises_then_falls_along_a_cosine() -> None:
    target, peak = SETTINGS.target_samples, SETTINGS.learning_rate
    warm = int(target * SETTINGS.warmup_fraction)
    assert learning_rate(SETTINGS, warm // 2) == pytest.approx(peak / 2, rel=0.02)
    assert learning_rate(SETTINGS, warm) == pytest.approx(peak, rel=0.01)
    middle = int(target * (0.5 + SETTINGS.warmup_fraction / 2))
    assert learning_rate(SETTINGS, middle) == pytest.approx(peak * (0.1 + 0.9 / 2), rel=0.01)
    assert learning_rate(SETTINGS, target) == pytest.approx(peak * 0.1)
    assert learning_rate(SETTINGS, target * 2) == pytest.approx(peak * 0.1)


def test_the_rate_does_not_depend_on_the_split() -> None:
    other = edit_settings(SETTINGS, batch=1, accumulation=32)
    assert [learning_rate(SETTINGS, n) for n in range(0, 4000, 32)] == [learning_rate(other, n) for n in range(0, 4000, 32)]
