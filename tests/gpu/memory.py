"""A memory limit under which a micro-batch does not fit: real on a GPU, simulated in the
rehearsal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memtop.presets import Settings
from tests.train.failing import Scripted, fails_above
from tests.train.support import TINY, Recorder, Training, edited

_WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
}


def sized(device: str, **changes: Any) -> Settings:
    """A llama whose activations are most of the peak on a GPU: about 2 GB at B 16."""
    # Each sample has a row of its own, so that the rows of a micro-batch give its size.
    changes = {"packing": False, **changes}
    if device == "cpu":
        return edited(**{"seq_len": 16, **changes, "device": "cpu"})
    model = {"config": {**TINY.model["config"], **_WIDE}}
    return edited(**{"seq_len": 512, "model": model, **changes, "device": "cuda"})


class Measuring(Recorder):
    """A recorder whose readings are those of the GPU. `after` has what to do after an update."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.after: dict[int, Callable[[], None]] = {}
        self._device = device

    def readings(self) -> dict[str, int | None]:
        if self._device == "cpu":
            return {}
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "allocated_bytes": torch.cuda.memory_allocated(),
        }

    def report(self, kind: str, **values: Any) -> None:
        super().report(kind, **values)
        if kind == "step" and values["update"] in self.after:
            self.after[values["update"]]()

    def largest(self, name: str) -> int:
        return max(int(step[name]) for step in self.of("step"))


class Limit:
    """Memory for `below` samples and not for twice as many, until `lift`."""

    def __init__(self, device: str, below: int, peaks: tuple[int, int] | None) -> None:
        self._device = device
        self._below, self._lifted = below, False
        self.memory: Scripted | None = None
        """What the trainer measures in the rehearsal; on a GPU it measures itself."""
        if device == "cpu":
            self.memory = Scripted(limit=1)
        else:
            assert peaks is not None
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(sum(peaks) / 2 / total)

    def apply(self, training: Training) -> None:
        """In the rehearsal, a larger micro-batch fails in its forward pass."""
        if self.memory is None:
            return
        self.memory.trainer = training.trainer
        fails_above(training, self._below, when=lambda: not self._lifted)

    def lift(self) -> None:
        if self.memory is None:
            torch.cuda.set_per_process_memory_fraction(1.0)
        else:
            self._lifted, self.memory.limit = True, 1_000_000
