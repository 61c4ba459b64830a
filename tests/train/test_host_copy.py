"""The copy of a state in host memory, which a save in the background writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memtop.train import host_copy
from memtop.train.host_copy import HostCopy
from memtop.train.state_files import stored


def whole(saved: Any) -> bytes:
    """The bytes that the file of a state gets."""
    return b"".join(saved.pieces)


def copied(copy: HostCopy, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    assert copy.reserve(sum(tensor.numel() * 4 + 8 for tensor in tensors.values())) is None
    return dict(copy.of(iter([("x", tensors)])))["x"]


def test_the_copy_has_the_bytes_that_are_saved() -> None:
    tensors = {
        "step": torch.tensor(3.0),
        "codes": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(5, 3).to(torch.bfloat16),
        "turned": torch.randn(4, 6).t(),
        "none": torch.zeros(0, 4),
        # Larger than one block of memory.
        "large": torch.arange(20_000_001, dtype=torch.float32),
    }
    copy = HostCopy(pin=False)
    expected = {kind: stored(tensor.clone()) for kind, tensor in tensors.items()}
    for _ in range(2):  # The second copy is in the memory of the first.
        found = copied(copy, tensors)
        for kind, tensor in expected.items():
            assert (found[kind].dtype, found[kind].shape) == (tensor.dtype, tensor.shape)
            assert whole(found[kind]) == whole(tensor), kind
    tensors["large"].add_(1)
    assert whole(found["large"]) == whole(expected["large"])


@pytest.mark.parametrize(("free", "pinned"), [(8 << 30, True), (1 << 30, False)])
def test_only_a_small_part_of_host_memory_is_page_locked(monkeypatch: pytest.MonkeyPatch, free: int, pinned: bool) -> None:
    class Stream:
        waits = 0

        def synchronize(self) -> None:
            Stream.waits += 1

    locked: list[int] = []
    empty = torch.empty

    def allocate(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        locked.append(size)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(host_copy, "addressable_bytes", lambda: free)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    copy = HostCopy(pin=True)
    assert copy.reserve(300 << 20) is None
    tensor = torch.arange(1000.0)
    found = dict(copy.of(iter([("x", {"weight": tensor})])))["x"]["weight"]
    assert whole(found) == whole(stored(tensor))
    # Powers of two, because torch rounds page-locked memory up to them.
    assert locked == ([64 << 20] * 5 if pinned else [])
    assert Stream.waits == (1 if pinned else 0), "a copy to page-locked memory has ended only then"


def test_page_locked_memory_that_is_refused_is_replaced_by_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    given, freed = list[int](), list[bool]()
    empty = torch.empty

    def allocate(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        given.append(size)
        if len(given) == 3:
            raise torch.AcceleratorError("CUDA error: operation not supported")
        return empty(size, dtype=dtype)

    monkeypatch.setattr(host_copy, "addressable_bytes", lambda: 8 << 30)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: freed.append(True))
    copy = HostCopy(pin=True)
    tensor = torch.arange(1000.0)
    for _ in range(2):
        assert copy.reserve(300 << 20) is None
        found = dict(copy.of(iter([("x", {"weight": tensor})])))["x"]["weight"]
        assert whole(found) == whole(stored(tensor))
        monkeypatch.setattr(host_copy, "addressable_bytes", lambda: 1 << 20)
        copy.release()
        monkeypatch.setattr(host_copy, "addressable_bytes", lambda: 8 << 30)
    # Later saves do not ask for it again.
    assert (len(given), len(freed)) == (3, 1)


def test_the_memory_of_the_copy_is_given_back_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 8 << 30
    monkeypatch.setattr(host_copy, "addressable_bytes", lambda: free)
    copy = HostCopy(pin=False)
    assert copy.reserve(300 << 20) is None
    copy.release()
    # What it holds need not be free.
    free = 600 << 20
    assert copy.reserve(300 << 20) is None
    free = 100 << 20
    copy.release()
    free = 600 << 20
    assert copy.reserve(300 << 20) == (
        "a copy of the state needs 300 MiB of host memory and leaves 512 MiB free, but 600 MiB are free"
    )
    # As much as it takes stays free.
    free = 3 << 30
    assert copy.reserve(2 << 30) is not None
    free = 4 << 30
    assert copy.reserve(2 << 30) is None
