"""Tests that need a real NVIDIA GPU, its driver and a torch that can use it. Elsewhere they are
skipped.

With MEMTOP_GPU_TESTS=cpu the tests of the trainer are rehearsed on the CPU: the same code with
simulated memory. `bench/first_half_hour.py` runs them either way.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.train.recipes import Train, trainer_in

REHEARSAL = os.environ.get("MEMTOP_GPU_TESTS") == "cpu"


@pytest.fixture(scope="session")
def card() -> None:
    """A GPU that torch can use."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device to train on: "cuda", and in the rehearsal "cpu"."""
    if REHEARSAL:
        return "cpu"
    request.getfixturevalue("card")
    return "cuda"


@pytest.fixture
def train(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Training in this process."""
    yield from trainer_in(tmp_path, monkeypatch)


@pytest.fixture
def own_state() -> Iterator[None]:
    """A process has a fixed precision, and these tests need several."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
