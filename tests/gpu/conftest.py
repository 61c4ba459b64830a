"""Tests that need a real NVIDIA GPU, its driver and a torch that can use it. Elsewhere they are
skipped with the reason."""

from __future__ import annotations

import pytest


def _why_not() -> str | None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        return "no NVIDIA GPU that torch can use"
    return None


@pytest.fixture(autouse=True, scope="session")
def real_gpu() -> None:
    """Skip everything here on a machine without a GPU."""
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)
