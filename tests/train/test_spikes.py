"""Spikes of the loss: which curves have one, what is saved meanwhile, and going back without the
samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memtop.presets import SettingsError, edit_settings
from memtop.train import TrainingError
from memtop.train.order import count_kept, plan_updates, sample_digest
from memtop.train.spikes import DriftDetector, Seen, Spike, SpikeDetector
from memtop.train.state_files import newest_update
from tests.train.support import TINY, Training, edited

N = 600
Noise = np.random.Generator
Curve = Callable[[Noise], tuple[np.ndarray, np.ndarray | None]]
STEPS = np.arange(N)


def falling(first: float, last: float, speed: float = 80.0) -> np.ndarray:
    return last + (first - last) * np.exp(-STEPS / speed)


def noisy(loss: np.ndarray, noise: Noise, share: float) -> np.ndarray:
    return loss * np.exp(share * noise.standard_normal(N))


def norms(noise: Noise, share: float = 0.25) -> np.ndarray:
    return np.exp(share * noise.standard_normal(N))


def jumps(*levels: float) -> np.ndarray:
    """Equally long stretches of these levels."""
    return np.repeat(levels, -(-N // len(levels)))[:N]


CURVES: dict[str, Curve] = {
    "falls smoothly": lambda n: (noisy(falling(10, 3), n, 0.01), norms(n)),
    "warm-up with a plateau first": lambda n: (noisy(np.where(STEPS < 60, 10.5, falling(10, 3)), n, 0.01), norms(n)),
    "warm-up that rises first": lambda n: (noisy(falling(10, 3) + 2 * np.exp(-(((STEPS - 20) / 8) ** 2)), n, 0.01), norms(n)),
    "plateau": lambda n: (noisy(np.full(N, 2.2), n, 0.005), norms(n)),
    "plateau, then a sudden fall": lambda n: (noisy(jumps(6.9, 3.1), n, 0.01), norms(n)),
    "noisy small batches": lambda n: (noisy(falling(9, 2.5), n, 0.25), norms(n, 0.6)),
    "batch of one": lambda n: (noisy(falling(6, 1.5), n, 0.5), norms(n, 0.8)),
    "single bad batches": lambda n: (noisy(falling(8, 2), n, 0.03) * np.where(n.random(N) < 0.02, 3, 1), norms(n)),
    "pairs of bad batches": lambda n: (noisy(falling(8, 2), n, 0.03) * np.where(STEPS % 90 > 87, 2.5, 1), norms(n)),
    "single huge gradients": lambda n: (noisy(falling(8, 2), n, 0.03), norms(n) * np.where(n.random(N) < 0.03, 30, 1)),
    "restart with half the batch": lambda n: (
        np.where(STEPS < 300, noisy(falling(8, 2), n, 0.02), noisy(falling(8, 2), n, 0.2)),
        norms(n, 0.5),
    ),
    "cosine restarts": lambda n: (noisy(falling(8, 2) * (1 + 0.25 * np.exp(-(STEPS % 150) / 20)), n, 0.02), norms(n)),
    "steep cosine restarts": lambda n: (
        noisy(falling(8, 2) * np.where(STEPS % 150 < 6, 1.5, 1), n, 0.02),
        norms(n) * np.where(STEPS % 150 < 6, 2.5, 1),
    ),
    "LoRA": lambda n: (noisy(falling(2.2, 0.9, 40), n, 0.12), norms(n)),
    "LoRA of short answers": lambda n: (noisy(falling(1.2, 0.08, 40), n, 0.6), norms(n, 0.7)),
    "curriculum of harder samples": lambda n: (noisy(jumps(1.6, 2.2, 2.9), n, 0.02), norms(n) * jumps(1, 1.3, 1.6)),
    "curriculum that doubles the loss": lambda n: (noisy(jumps(1.0, 2.0), n, 0.03), norms(n) * jumps(1.0, 2.2)),
    "epochs of a small data set": lambda n: (noisy(falling(5, 0.4) * (1 - 0.15 * (STEPS // 100)), n, 0.05), norms(n)),
    "groups of long and short samples": lambda n: (noisy(np.where(STEPS // 20 % 2, 3.4, 2.4), n, 0.03), norms(n)),
    "ZeRO without a known norm": lambda n: (noisy(falling(9, 2.5), n, 0.15), None),
}


def seen(losses: np.ndarray, gradients: np.ndarray | None, size: int = 8) -> list[Seen]:
    pairs = zip(losses.tolist(), [None] * N if gradients is None else gradients.tolist(), strict=True)
    return [Seen(n, (n - 1) * size, n * size, loss, norm) for n, (loss, norm) in enumerate(pairs, start=1)]


def spikes(updates: list[Seen]) -> list[Spike]:
    detector = SpikeDetector()
    return [found for one in updates if (found := detector(one, 8)) is not None]


@pytest.mark.parametrize("name", CURVES)
def test_an_ordinary_curve_has_no_spike(name: str) -> None:
    for number in range(20):
        losses, gradients = CURVES[name](np.random.default_rng(number))
        assert spikes(seen(losses, gradients)) == [], number


@pytest.mark.parametrize("name", ["falls smoothly", "plateau", "LoRA", "noisy small batches", "ZeRO without a known norm"])
def test_a_loss_that_jumps_and_stays_high_is_a_spike(name: str) -> None:
    for number in range(20):
        losses, gradients = CURVES[name](np.random.default_rng(number))
        losses[400:] = losses[400:] * 6 + 2
        if gradients is not None:
            gradients[399:] *= 20
        (found,) = spikes(seen(losses, gradients))
        # With much noise, a first high loss may look like an ordinary one.
        assert 400 <= found.before.update <= (420 if "noisy" in name else 400), number
        assert [one.update - found.before.update for one in found.high] == [1, 2, 3]


def drifts(updates: list[Seen]) -> list[tuple[int, int]]:
    detector = DriftDetector()
    found = (detector(one, 8) for one in updates)
    return [(first.update, last.update) for first, last in filter(None, found)]


@pytest.mark.parametrize("name", CURVES)
def test_an_ordinary_curve_does_not_rise_slowly(name: str) -> None:
    for number in range(20):
        losses, gradients = CURVES[name](np.random.default_rng(number))
        assert drifts(seen(losses, gradients)) == [], number


SLOWLY_HARDER = 1 + 0.5 * STEPS / N


@pytest.mark.parametrize(
    "rise",
    [
        pytest.param(np.where(STEPS < 300, 1, 1.8), id="a jump"),
        pytest.param(1 + 0.3 * np.sin(STEPS / 95), id="waves"),
        pytest.param(SLOWLY_HARDER, id="samples that become harder"),
    ],
)
def test_other_rises_are_not_slow_ones(rise: np.ndarray) -> None:
    for number in range(20):
        noise = np.random.default_rng(number)
        assert drifts(seen(noisy(2.2 * rise, noise, 0.03), norms(noise))) == [], number


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25])
@pytest.mark.parametrize("known", [True, False])
def test_a_loss_that_rises_over_hundreds_of_updates_is_said_once(share: float, known: bool) -> None:
    for number in range(20):
        noise = np.random.default_rng(number)
        rise = 1 + 1.2 * np.maximum(0, STEPS - 150) / (N - 150)
        updates = seen(noisy(2.0 * rise, noise, share), norms(noise) * rise if known else None)
        assert spikes(updates) == [], "it is no spike"
        ((first, last),) = drifts(updates)
        assert 50 <= first < last == first + 350


def test_losses_that_are_not_finite_are_a_spike() -> None:
    losses, gradients = CURVES["plateau"](np.random.default_rng(0))
    losses[100:] = math.nan
    (found,) = spikes(seen(losses, gradients))
    assert found.before.update == 100


def test_another_effective_batch_begins_anew() -> None:
    losses, gradients = CURVES["plateau"](np.random.default_rng(0))
    losses[100:] *= 4
    detector = SpikeDetector()
    assert gradients is not None
    gradients[99:] *= 20
    found = [detector(one, 8 if one.update <= 100 else 16) for one in seen(losses, gradients)]
    assert found == [None] * N


# --- samples that are left out
# --------------------------------------------------------------------------------------------------


def test_left_out_positions_are_in_no_update_and_every_other_one_is_in_one() -> None:
    class Positions:
        def take(self, position: int, count: int) -> list[tuple[int, int]]:
            return [(number, 0) for number in range(position, position + count)]

    order: Any = Positions()
    left_out = ((8, 16), (21, 30), (60, 99))
    plans = list(plan_updates(order, updates=5, position=3, target=64, effective_batch=8, left_out=left_out))
    ids = [number for plan in plans for number in plan.ids]
    assert ids == [*range(3, 8), *range(16, 21), *range(30, 60)]
    assert [plan.number for plan in plans] == list(range(6, 6 + len(plans)))
    assert [len(plan.ids) for plan in plans] == [8] * 5
    assert [(plan.position, plan.end) for plan in plans][:2] == [(3, 19), (19, 36)]
    assert count_kept(left_out, 3, 64) == len(ids)


@pytest.mark.parametrize("text", ["8", "16-8", "8-16,12-20", "a-b", "8-8"])
def test_positions_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^leave_out "):
        edit_settings(TINY, assignments={"leave_out": text})
    assert edit_settings(TINY, assignments={"leave_out": "16-24,8-12"}).leave_out == ((8, 12), (16, 24))


# --- in a training
# --------------------------------------------------------------------------------------------------


def diverging(folder: Path, at: int, **changes: Any) -> Training:
    """A training whose weights are broken by the step of update `at`: all later losses are high."""
    training = Training(folder / "state", edited(target_samples=8 * 60, **changes))
    trainer: Any = training.trainer
    read = trainer._read_results

    def results(norm: Any) -> tuple[float, float | None]:
        loss, length = read(norm)
        high = trainer.position.updates + 1 > at
        return (loss * 5 + 3, 50 * (length or 1)) if high else (loss, length)

    trainer._read_results = results
    return training


def test_a_spike_is_reported_with_its_samples_and_the_state_before_it_is_kept(tmp_path: Path) -> None:
    training = diverging(tmp_path, 40, save_every=2)
    assert training.run() == "finished"
    (report,) = training.channel.of("spike")
    assert (report["first_update"], report["update"], report["state_update"]) == (40, 43, 38)
    assert (report["begin"], report["end"], report["samples"], report["action"]) == (39 * 8, 43 * 8, 32, "ask")
    assert report["sample_digest"] == sample_digest(report["sample_ids"])
    # The saves went on, and the one before the spike is still there.
    assert newest_update(tmp_path / "state") == 60
    assert newest_update(tmp_path / "state.before_spike") == 38
    saved = [one["updates"] for one in training.channel.of("checkpoint")]
    assert 40 in saved
    assert 42 not in saved, "while it was not clear whether it is a spike, nothing was saved"


@pytest.mark.parametrize("action", ["stop", "back"])
def test_a_training_that_ends_because_of_a_spike_saves_nothing_after_it(tmp_path: Path, action: str) -> None:
    training = diverging(tmp_path, 40, save_every=2, on_spike=action)
    with pytest.raises(TrainingError, match=r"^the loss rose from .* at update 41 and stayed high; ended, "):
        training.run()
    assert newest_update(tmp_path / "state") == 40
    assert newest_update(tmp_path / "state.previous") == 38
    (report,) = training.channel.of("spike")
    assert (report["state_update"], report["problem"]) == (38, None)


def test_going_back_leaves_out_exactly_the_named_samples(tmp_path: Path) -> None:
    whole = Training(tmp_path / "whole", edited(target_samples=80))
    whole.run()
    training = Training(tmp_path / "state", edited(target_samples=80, leave_out=((24, 40),)))
    assert training.trainer.total_updates == 8
    assert training.run() == "finished"
    assert training.digests == [*whole.digests[:3], *whole.digests[5:]]
    assert training.trainer.position.samples_seen == 80


def test_a_spike_without_an_earlier_state_says_so(tmp_path: Path) -> None:
    training = diverging(tmp_path, 40, save_every=1000, on_spike="back")
    with pytest.raises(TrainingError):
        training.run()
    (report,) = training.channel.of("spike")
    assert (report["state_update"], report["problem"]) == (None, "no state from before update 41 is saved")


def test_a_slow_rise_is_a_warning_and_nothing_else(tmp_path: Path) -> None:
    training = Training(tmp_path / "state", edited(batch=1, accumulation=1, target_samples=460, save_every=1000))
    trainer: Any = training.trainer
    read = trainer._read_results

    def results(norm: Any) -> tuple[float, float | None]:
        read(norm)
        rise = trainer.position.updates / 200
        return 2 + rise, 1 + rise

    trainer._read_results = results
    assert training.run() == "finished"
    (warning,) = training.channel.of("warning")
    assert warning["message"].startswith("the loss has risen slowly, from 2.123 at update 50 to 3.873 at update 400, without")
    assert training.channel.of("spike") == []


def test_the_weights_do_not_depend_on_the_watch(tmp_path: Path) -> None:
    weights = []
    for action in ("ask", "stop"):
        training = Training(tmp_path / action, edited(on_spike=action))
        training.run()
        weights.append(training.weights())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
