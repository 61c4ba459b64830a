"""`--batch auto` on a GPU: what the search forecasts and finds is what the training measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memtop.presets import Settings
from tests.gpu.memory import Measuring, sized
from tests.gpu.test_trainer import NEAR, possible
from tests.train.failing import Filled, distance, fresh, splits_of
from tests.train.support import Training

pytestmark = pytest.mark.usefixtures("own_state")
ALLOWED = 3 << 30
"""Bytes of the GPU that torch may use."""
EFFECTIVE = 128


def started(folder: Path, device: str, settings: Settings) -> Training:
    """A training under the limit; simulated in the rehearsal, where 16 samples do not fit."""
    gauge = Filled() if device == "cpu" else None
    training = fresh(folder, settings, channel=Measuring(device), memory=gauge)
    if gauge is not None:
        gauge.follow(training, fails_from=16)
    return training


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_largest_batch_is_found(
    tmp_path: Path,
    device: str,
    precision: str,
    optimizer: str,
    record_property: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    possible(precision, device)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(ALLOWED / torch.cuda.mem_get_info()[1])
    settings = sized(
        device,
        batch=4,
        accumulation=EFFECTIVE // 4,
        target_samples=4 * EFFECTIVE,
        precision=precision,
        optimizer=optimizer,
        learning_rate=1e-3,
        save_every=1000,
        auto_batch=True,
    )
    training = started(tmp_path / "found", device, settings)
    assert training.run() == "finished"
    channel = training.channel
    assert isinstance(channel, Measuring)
    (search,) = channel.of("batch_search")
    record_property("search", search)
    record_property("steps", channel.of("step"))
    assert channel.of("oom") == []
    # The search was right: no update has made the batch smaller.
    assert set(splits_of(channel).values()) == {(search["batch"], search["accumulation"])}
    assert 4 < search["batch"] < EFFECTIVE
    if device == "cuda":
        assert channel.largest("peak_reserved_bytes") < 0.85 * ALLOWED

    again = started(tmp_path / "again", device, settings)
    again.run()
    (remembered,) = again.channel.of("batch_search")
    assert (remembered["tried"], remembered["batch"]) == ([], search["batch"])
    assert again.digests == training.digests
    difference = distance(again.weights(), training.weights())
    record_property("distance", difference)
    assert difference < NEAR[precision]
