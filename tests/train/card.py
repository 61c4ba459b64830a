"""A simulated GPU: its numbers replace those of torch.cuda."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.train.support import Recorder


class Card:
    """What torch's allocator reports. `take` is work with this peak in bytes, which stays in the
    cache.
    """

    total = 1000
    held = 100
    """Weights and moments."""
    others = 0
    """What other programs hold."""

    def __init__(self) -> None:
        self.reserved = self.peak_reserved = self.peak_allocated = self.held
        self.retried = 0

    def take(self, peak: int) -> None:
        self.reserved = max(self.reserved, peak)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.peak_allocated = max(self.peak_allocated, peak)

    def empty_cache(self) -> None:
        self.reserved = self.held

    def reset(self) -> None:
        self.peak_reserved, self.peak_allocated = self.reserved, self.held


def put_in(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Make torch.cuda report this GPU."""
    card = Card()

    def of_device(answer: Callable[[], Any]) -> Callable[[torch.device], Any]:
        def found(device: torch.device) -> Any:
            # torch does so for some of them, and takes the current device for the others.
            if device.index is None:
                raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
            return answer()

        return found

    for name, found in {
        "max_memory_allocated": of_device(lambda: card.peak_allocated),
        "max_memory_reserved": of_device(lambda: card.peak_reserved),
        "memory_reserved": of_device(lambda: card.reserved),
        "memory_allocated": of_device(lambda: card.held),
        "mem_get_info": of_device(lambda: (card.total - card.reserved - card.others, card.total)),
        "memory_stats": of_device(lambda: {"num_alloc_retries": card.retried}),
        "get_per_process_memory_fraction": of_device(lambda: 1.0),
        "reset_peak_memory_stats": of_device(lambda: card.reset()),
        "get_device_name": of_device(lambda: "simulated"),
        "get_device_capability": of_device(lambda: (8, 6)),
        "empty_cache": card.empty_cache,
    }.items():
        monkeypatch.setattr(torch.cuda, name, found, raising=False)
    return card


class Reading(Recorder):
    """A channel that reads the GPU as the agent does: each reading resets the peak."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def readings(self) -> dict[str, int | None]:
        found: dict[str, int | None] = {
            "peak_bytes": self._card.peak_allocated,
            "peak_reserved_bytes": self._card.peak_reserved,
        }
        self._card.reset()
        return found
