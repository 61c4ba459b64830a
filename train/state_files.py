"""What a saved state says about itself: `manifest.json`, written last. A folder without a valid one is no state.

{"format": 2, "updates", "samples_seen", "epoch", "effective_batch", "seq_len", "saved_at", "optimizer", "settings": {...},
 "cuts": [[position, seq_len], ...], "files": [{"name", "size_bytes", "sha256"}, ...], ...}


Tensors in safetensors files of a limited size: written and read one at a time, so memory is bounded by the largest file.

Keys are `KIND/NAME`: `weight/model.layers.0....`, `exp_avg/...`. All tensors of one parameter lie in one file.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open

FILE = "manifest.json"


class StateFile(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int
    sha256: str


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """From this position (in samples) on, texts are cut into samples of `seq_len` tokens."""

    position: int
    seq_len: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Progress in samples and updates; `saved_at` in seconds since the epoch."""

    format: int = 2
    updates: int
    samples_seen: int
    epoch: float
    effective_batch: int
    seq_len: int
    cuts: tuple[Cut, ...]
    target_samples: int
    optimizer: str = "adamw"
    """The kind that kept the moments."""
    precision: str = ""
    """What the settings' precision came to on that machine: "no" (fp32), "bf16" or "fp16"; empty in older states."""
    loss_scale: float | None = None
    """The scale of fp16 losses, where there was one."""
    loss_scale_stable: int | None = None
    """Updates without overflow since the scale changed; None in older states."""
    loss_scale_hysteresis: int | None = None
    """Overflows until DeepSpeed lowers the scale."""
    evaluation_loss: float | None = None
    """Of the newest evaluation, in nats per token."""
    saved_at: float
    settings: dict[str, Any]
    files: list[StateFile]


class BrokenStateError(Exception):
    """A state folder that cannot be loaded; the text names the file and what is wrong with it."""


def describe_file(path: Path) -> StateFile:
    """Name, size and checksum of a file, read in blocks."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return StateFile(path.name, size, digest.hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """The manifest, after every file it names was found whole; BrokenStateError says which is not."""
    manifest = _decode(folder / FILE)
    for expected in manifest.files:
        try:
            found = describe_file(folder / expected.name)
        except OSError as error:
            raise BrokenStateError(f"{folder / expected.name}: {error.strerror}") from None
        if found != expected:
            raise BrokenStateError(f"{folder / expected.name}: not what was saved (size or checksum differ)")
    return manifest


def _decode(path: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise BrokenStateError(f"{path}: missing, so the save was cut short") from None
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise BrokenStateError(f"{path}: cannot be understood: {error}") from None
    if manifest.format != 2:
        raise BrokenStateError(f"{path}: format {manifest.format}, this memtop reads format 2")
    return manifest


def previous_of(state_dir: Path) -> Path:
    """Where the state before the newest one is kept."""
    return state_dir.with_name(state_dir.name + ".previous")


def older_states(state_dir: Path) -> list[Path]:
    """Whole states from before the previous one, newest first (they carry the nanosecond they were put away at)."""
    prefix = state_dir.name + "."
    found = [p for p in state_dir.parent.glob(prefix + "*") if p.name.removeprefix(prefix).isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix(prefix)), reverse=True)


def newest_complete(state_dir: Path) -> tuple[Path, Manifest, str | None] | None:
    """The newest state that is whole, and what was wrong with a newer one; None if nothing was ever saved.

    BrokenStateError if there are states, but none is whole.
    """
    problem: str | None = None
    for folder in (state_dir, previous_of(state_dir), *older_states(state_dir)):
        if not folder.is_dir():
            continue
        try:
            return folder, read_manifest(folder), problem
        except BrokenStateError as error:
            problem = problem or str(error)
    if problem is None:
        return None
    raise BrokenStateError(problem)


def newest_update(state_dir: Path) -> int | None:
    """The update of the newest saved state, by its manifest alone; None if nothing was ever saved."""
    for folder in (state_dir, previous_of(state_dir), *older_states(state_dir)):
        try:
            return _decode(folder / FILE).updates
        except BrokenStateError:
            continue  # the one before it counts, as it does for who resumes
    return None


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
