"""Tensors in safetensors files of a limited size: written and read one at a time, so memory is bounded by the largest file.

Keys are `KIND/NAME`: `weight/model.layers.0....`, `exp_avg/...`. All tensors of one parameter lie in one file.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from memtop.train.manifest import StateFile, describe_file

SHARD_BYTES = 512 << 20


class ShardWriter:
    """Collects tensors and writes a file whenever `shard_bytes` are together; `close` writes the rest."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.files: list[StateFile] = []
        self._folder = folder
        self._limit = shard_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._bytes = 0

    def add(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of one parameter."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if self._waiting and self._bytes + size > self._limit:
            self._write()
        for kind, tensor in tensors.items():
            # A tensor of its own: the parameter goes on changing, and views would share memory.
            self._waiting[f"{kind}/{name}"] = tensor.detach().contiguous().clone()
        self._bytes += size

    def close(self) -> list[StateFile]:
        """Write what is left; the files, in order."""
        if self._waiting:
            self._write()
        return self.files

    def _write(self) -> None:
        path = self._folder / f"state-{len(self.files) + 1:05d}.safetensors"
        save_file(self._waiting, path)
        sync(path)
        self.files.append(describe_file(path))
        self._waiting, self._bytes = {}, 0


class ShardReader:
    """The saved tensors of a state folder, by parameter; each is read when it is asked for."""

    def __init__(self, folder: Path, files: list[StateFile]) -> None:
        self._where: dict[str, dict[str, Path]] = {}
        for file in files:
            path = folder / file.name
            if path.suffix != ".safetensors":
                continue
            with safe_open(path, framework="pt") as shard:
                for key in shard.keys():  # noqa: SIM118 - not a dict
                    kind, _, name = key.partition("/")
                    self._where.setdefault(name, {})[kind] = path

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def kinds(self, name: str) -> set[str]:
        return set(self._where[name])

    def __call__(self, name: str) -> dict[str, torch.Tensor]:
        """All tensors of one parameter: weight, step and moments."""
        return {kind: self.get(name, kind) for kind in self._where[name]}

    def get(self, name: str, kind: str) -> torch.Tensor:
        with safe_open(self._where[name][kind], framework="pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(f"{kind}/{name}")
        return tensor


def sync(path: Path) -> None:
    """Have the disk hold a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
