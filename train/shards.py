"""Tensors in safetensors files of a limited size: written and read one at a time, so memory is bounded by the largest file.

Keys are `KIND/NAME`: `weight/model.layers.0....`, `exp_avg/...`. All tensors of one parameter lie in one file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open

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
            # Not copied: nothing trains while a state is written, and a model on the CPU would be held twice.
            self._waiting[f"{kind}/{name}"] = tensor.detach().contiguous()
        self._bytes += size

    def close(self) -> list[StateFile]:
        """Write what is left; the files, in order."""
        if self._waiting:
            self._write()
        return self.files

    def _write(self) -> None:
        path = self._folder / f"state-{len(self.files) + 1:05d}.safetensors"
        write_safetensors(path, self._waiting)
        self.files.append(describe_file(path))
        self._waiting, self._bytes = {}, 0


_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One safetensors file, on the disk when this returns: the length of the header, the header in JSON, then each tensor's
    bytes. The library builds the whole file in memory first; here tensors go to the file from where they lie.
    """
    header, end = {}, 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # Tensors begin at multiples of 8 bytes: readers map the file.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.reshape(-1).numpy().data)
        file.flush()
        os.fsync(file.fileno())


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
