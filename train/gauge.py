"""How full the device is: what decides whether a larger micro-batch would fit."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Gauge(Protocol):
    """The memory that micro-batches are computed in, of this rank. None: not known."""

    def peak_bytes(self) -> int | None:
        """The most that the allocator held since it was last reset, by this or by whoever else resets torch's counters."""

    def held_bytes(self) -> int | None:
        """What is in use of what the allocator holds now: between two updates that is what a batch of any size needs."""

    def share(self, peak_bytes: int) -> float | None:
        """How full the memory would be (0-1) if the allocator came to hold so much now, with all that others hold."""

    def retries(self) -> int | None:
        """How often the allocator had to free its cache and try again, since the process began."""

    def reset(self) -> None:
        """Count the peak anew from here on, without what is only cached: it would count as if the next work had taken it."""


class Unmeasured:
    """The CPU: what a micro-batch takes of the host's memory cannot be told from what everything else takes."""

    def peak_bytes(self) -> int | None:
        return None

    def held_bytes(self) -> int | None:
        return None

    def share(self, peak_bytes: int) -> float | None:
        return None

    def retries(self) -> int | None:
        return None

    def reset(self) -> None:
        """Nothing is counted."""


class CudaGauge:
    """A card, or the share of it that torch was allowed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_reserved(self._device)

    def held_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self._device)

    def share(self, peak_bytes: int) -> float | None:
        free, total = torch.cuda.mem_get_info(self._device)
        # The context of this process and all that others hold: on the card, but not in the allocator's hands.
        beside = total - free - torch.cuda.memory_reserved(self._device)
        # Newer than the oldest torch that we take.
        fraction: Any = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        allowed = 1.0 if fraction is None else float(fraction(self._device))
        return max((peak_bytes + beside) / total, peak_bytes / (allowed * total))

    def retries(self) -> int | None:
        found: int | None = torch.cuda.memory_stats(self._device).get("num_alloc_retries")
        return found

    def reset(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


def open_gauge(device: torch.device) -> Gauge:
    """The gauge of a device."""
    return CudaGauge(device) if device.type == "cuda" else Unmeasured()
