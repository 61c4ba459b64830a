"""A copy of a training's state in host memory, from which a thread can write it."""

from __future__ import annotations

import mmap

import torch

from memtop.train.agent.failures import is_lack_of_memory
from memtop.train.host_memory import addressable_bytes
from memtop.train.state_files import SavedTensors, Stored, bytes_of, stored_dtype

_BLOCK_BYTES = 64 << 20
# What stays free in addition to a copy of the state, at least: others need host memory meanwhile,
# and the run would be in danger. As much as the copy takes stays free, too.
_SPARE_BYTES = 512 << 20
# The share of free host memory that may be page-locked: the system cannot take it back.
_MOST_PINNED = 0.25


class HostCopy:
    """A copy of the state in host memory. Its memory is kept for the next save.

    `pin`: copy from a GPU to page-locked memory, if the state is small enough for that.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._pinned = False
        self._blocks: list[torch.Tensor] = []
        self._used = 0

    def reserve(self, needed: int) -> str | None:
        """Allocate this many bytes; return why that is not possible, or None."""
        free, held = addressable_bytes(), len(self._blocks) * _BLOCK_BYTES
        if free is None:
            return "how much host memory is free is not known"
        spare = max(_SPARE_BYTES, needed)
        why = f"a copy of the state needs {needed >> 20} MiB of host memory"
        if free < needed - held + spare:
            return f"{why} and leaves {spare >> 20} MiB free, but {free + held >> 20} MiB are free"
        if not self._blocks:
            self._pinned = self._pin and needed <= free * _MOST_PINNED
        try:
            self._allocate(needed)
        except (MemoryError, OSError, RuntimeError) as error:
            self._blocks.clear()
            if not is_lack_of_memory(error):
                raise
            return f"{why}, which the system refuses"
        return None

    def _allocate(self, needed: int) -> None:
        try:
            while len(self._blocks) * _BLOCK_BYTES < needed:
                self._blocks.append(self._new_block())
        except RuntimeError:
            if not self._pinned:
                raise
            # Some systems limit page-locked memory, or have none. Take ordinary memory from now on.
            self._blocks.clear()
            self._pin = self._pinned = False
            _free_page_locked()
            self._allocate(needed)

    def prepare(self, needed: int) -> None:
        """Allocate this memory and write to it: the system provides it only then."""
        if self.reserve(needed) is None:
            for block in self._blocks:
                block[: max(0, needed)].zero_()
                needed -= len(block)

    def release(self) -> None:
        """Give the memory back unless as much again is free. torch keeps page-locked memory."""
        free = addressable_bytes()
        if not self._pinned and (free is None or free < len(self._blocks) * _BLOCK_BYTES):
            self._blocks.clear()

    def of(self, tensors: SavedTensors) -> list[tuple[str, dict[str, Stored]]]:
        """Copy these tensors; they may change afterwards. The former copy is overwritten."""
        self._used = 0
        found = [(name, {kind: self._put(tensor) for kind, tensor in parts.items()}) for name, parts in tensors]
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        return found

    def _put(self, tensor: torch.Tensor) -> Stored:
        kept, flat = stored_dtype(tensor), tensor.reshape(-1)
        pieces, done = [], 0
        self._used += -self._used % 8
        while done < len(flat):
            number, start = divmod(self._used, _BLOCK_BYTES)
            count = min(len(flat) - done, (_BLOCK_BYTES - start) // kept.itemsize)
            target = self._blocks[number][start : start + count * kept.itemsize]
            # Precisions are converted in blocks, too: a GPU has no room for a second whole tensor.
            target.view(kept).copy_(flat[done : done + count], non_blocking=self._pinned)
            pieces.append(bytes_of(target))
            done, self._used = done + count, self._used + len(target)
        return Stored(kept, tuple(tensor.shape), pieces)

    def _new_block(self) -> torch.Tensor:
        if self._pinned:
            return torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        memory = mmap.mmap(-1, _BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Forked loader workers would keep the old content when the next copy overwrites it.
        memory.madvise(mmap.MADV_DONTFORK)
        return torch.frombuffer(memory, dtype=torch.uint8)


def _free_page_locked() -> None:
    """Give the page-locked memory that torch keeps for its next use back to the system."""
    # torch has another name for it in each of its versions, and none in the oldest ones.
    for module, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        if (free := getattr(module, name, None)) is not None:
            free()
            return
