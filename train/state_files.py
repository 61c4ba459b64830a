"""The files of a saved state: safetensors files of limited size, and `manifest.json`, written last.

{"format": 2, "updates", "samples_seen", "epoch", "effective_batch", "seq_len", "saved_at",
"optimizer", "settings": {...},
 "cuts": [[position, seq_len], ...], "files": [{"name", "size_bytes", "sha256"}, ...], ...}

A folder without a valid manifest is not a state. Tensors are named `KIND/NAME`:
`weight/model.layers.0....`, `exp_avg/...`. All tensors of one parameter are in one file. They are
written and read one at a time, so the largest file bounds the memory.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import safe_open

T = TypeVar("T")
SavedTensors = Iterator[tuple[str, dict[str, torch.Tensor]]]
"""Each trained parameter's name, with weight, step and moments."""

MANIFEST_NAME = "manifest.json"
DAMAGED_NAME = "damaged.txt"
"""Says in a state's folder why it could not be loaded: the sizes of its files do not show that."""
SHARD_BYTES = 128 << 20
"""Tensors in one file, unless one parameter is larger. Files are checked in parallel."""
_BUFFER_BYTES = 4 << 20
_BLOCK_BYTES = 1 << 20
# FAT, some network and FUSE file systems; files of another user.
_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}


class CheckpointFile(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if self.name in ("", "..") or "\0" in self.name or self.name != Path(self.name).name:
            raise ValueError(f"{self.name!r} is no name of a file")


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """From this position (in samples) on, texts are cut into samples of `seq_len` tokens."""

    position: int
    seq_len: int


class LossScale(msgspec.Struct, frozen=True):
    """The factor on fp16 losses that keeps small gradients from vanishing, and its next change."""

    scale: float
    stable: int
    """Updates without overflow since the scale changed (DeepSpeed: since the last overflow)."""
    hysteresis: int | None = None
    """Overflows until DeepSpeed lowers the scale; None without DeepSpeed."""


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
    """The optimizer that the moments belong to."""
    precision: str
    """The precision that the training used: "no" (fp32), "bf16" or "fp16"."""
    on_gpu: bool = False
    """Whether it trained on a GPU."""
    loss_scale: LossScale | None = None
    """The scale of fp16 losses; None without fp16."""
    evaluation_loss: float | None = None
    """The newest evaluation's loss in nats per token."""
    saved_at: float
    settings: dict[str, Any]
    files: list[CheckpointFile]


class _Format(msgspec.Struct):
    format: int = 2


class BrokenStateError(Exception):
    """A state folder that cannot be loaded; the text names the file and the problem."""

    folders: Mapping[Path, str] = {}
    """If no state of a run can be loaded: each of them, with its problem."""


class UnreadStateError(BrokenStateError):
    """A state that may be whole: a file of it cannot be read now, or it has another format."""


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Do this in a thread; at once, in this thread, if none can be started.

    The interpreter waits for the thread before it ends.
    """
    future: Future[T] = Future()
    try:
        threading.Thread(target=_do, args=(work, future), name=name).start()
    except RuntimeError:
        _do(work, future)
    return future


def at_once(work: Callable[[], T]) -> Future[T]:
    """Do this in this thread; the result raises its error."""
    future: Future[T] = Future()
    _do(work, future)
    return future


def _do(work: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - `Future.result` raises it
        future.set_exception(error)


def describe_file(path: Path) -> CheckpointFile:
    """Name, size and checksum of a file, read in blocks."""
    digest = hashlib.sha256()
    size = 0
    if not stat.S_ISREG(path.stat().st_mode):
        raise FileNotFoundError
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return CheckpointFile(path.name, size, digest.hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """The manifest, after checking all files that it names. BrokenStateError if one is damaged;
    UnreadStateError if one cannot be read now, or if the manifest has another format.

    Each core checks files, because a checksum is slower than a read.
    """
    manifest = _decode(folder / MANIFEST_NAME)
    waiting = deque(manifest.files)
    problems: list[BrokenStateError] = []

    def check() -> None:
        while waiting and not problems:
            try:
                expected = waiting.popleft()
            except IndexError:
                return  # Another thread took the last one.
            path = folder / expected.name
            try:
                found = describe_file(path)
            except (FileNotFoundError, NotADirectoryError):
                problems.append(BrokenStateError(f"{path}: missing, or not a regular file"))
            except OSError as error:
                problems.append(UnreadStateError(f"{path}: cannot be read: {error.strerror}"))
            else:
                if found != expected:
                    problems.append(BrokenStateError(f"{path}: size or checksum differs from the manifest"))

    helpers = min(len(manifest.files), os.cpu_count() or 1) - 1
    others = [in_thread(check, "memtop-check") for _ in range(helpers)]
    check()
    for thread in others:
        thread.result()
    if problems:
        raise problems[0]
    return manifest


def _decode(path: Path) -> Manifest:
    try:
        text = path.read_bytes()
        # The fields of another format may be others.
        number = msgspec.json.decode(text, type=_Format).format
        if number != 2:
            raise UnreadStateError(f"{path}: format {number}, this memtop reads format 2")
        return msgspec.json.decode(text, type=Manifest)
    except FileNotFoundError:
        raise BrokenStateError(f"{path}: missing, so the save was cut short") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IsADirectoryError, NotADirectoryError) as error:
        raise BrokenStateError(f"{path}: cannot be read: {error}") from None
    except OSError as error:
        raise UnreadStateError(f"{path}: cannot be read: {error.strerror}") from None


def is_folder(path: Path) -> bool:
    """Whether it is there and a folder; UnreadStateError if that cannot be found out now."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UnreadStateError(f"{path}: cannot be read: {error.strerror}") from None


def previous_of(state_dir: Path) -> Path:
    """The folder of the state before the newest one."""
    return state_dir.with_name(state_dir.name + ".previous")


def older_states(state_dir: Path) -> list[Path]:
    """The states before the previous one, newest first.

    Their names end in the nanosecond at which they were replaced.
    """
    prefix = state_dir.name + "."
    found = [p for p in state_dir.parent.glob(prefix + "*") if p.name.removeprefix(prefix).isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix(prefix)), reverse=True)


def leftovers(folder: Path) -> list[Path]:
    """What killed saves of this folder have left: a complete state if all was written."""
    return sorted(folder.parent.glob(f"{folder.name}.tmp-*"))


def states_of(state_dir: Path) -> list[Path]:
    """Where a state of this run may be, the newest first."""
    return [state_dir, *leftovers(state_dir), previous_of(state_dir), *older_states(state_dir)]


def newest_complete(state_dir: Path) -> tuple[Path, Manifest, dict[Path, str]] | None:
    """The newest complete state, and newer ones with their problems; None if there is no state.

    BrokenStateError if there are states but none is complete; UnreadStateError if one that is newer
    than all complete ones may be whole.
    """
    problems: dict[Path, str] = {}
    half_written = leftovers(state_dir)
    for folder in states_of(state_dir):
        if not is_folder(folder):
            continue
        try:
            return folder, read_manifest(folder), problems
        except UnreadStateError:
            raise
        except BrokenStateError as error:
            if folder not in half_written:
                problems[folder] = str(error)
    if not problems:
        return None
    broken = BrokenStateError(next(iter(problems.values())))
    broken.folders = problems
    raise broken


def newest_update(state_dir: Path) -> int | None:
    """The update of the newest saved state, by its manifest alone; None without a state."""
    for folder in states_of(state_dir):
        try:
            return _decode(folder / MANIFEST_NAME).updates
        except BrokenStateError:
            continue  # A resume does not use it either.
    return None


def saved_before(state_dir: Path, update: int) -> tuple[Path, int] | None:
    """The newest saved state from before this update, by its manifest alone, and its update."""
    found = []
    for folder in (state_dir, previous_of(state_dir), *older_states(state_dir)):
        try:
            saved = _decode(folder / MANIFEST_NAME).updates
        except BrokenStateError:
            continue  # A resume does not use it either.
        if saved < update:
            found.append((folder, saved))
    return max(found, key=lambda pair: pair[1], default=None)


class Stored(msgspec.Struct, frozen=True):
    """A tensor as it is written: its bytes in order, in one or more pieces of host memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Sequence[memoryview]

    @property
    def size_bytes(self) -> int:
        return sum(len(piece) for piece in self.pieces)


def stored(tensor: torch.Tensor) -> Stored:
    """This tensor on the CPU in fp32 (8 bits stay), not copied if it is that already."""
    kept = tensor.detach().to("cpu", stored_dtype(tensor)).contiguous()
    return Stored(kept.dtype, tuple(kept.shape), [bytes_of(kept)])


def stored_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.uint8 if tensor.dtype == torch.uint8 else torch.float32


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class ShardWriter:
    """Writes a file for every `shard_bytes` of tensors; `close` writes the rest."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._limit = shard_bytes
        self._waiting: dict[str, Stored] = {}
        self._bytes = 0
        self._files: list[Future[CheckpointFile]] = []

    def add(self, name: str, tensors: dict[str, Stored]) -> None:
        """Add the tensors of one parameter.

        They are not copied, so nothing may change them before `close`.
        """
        size = sum(tensor.size_bytes for tensor in tensors.values())
        if self._waiting and self._bytes + size > self._limit:
            self._write()
        self._waiting |= {f"{kind}/{name}": tensor for kind, tensor in tensors.items()}
        self._bytes += size

    def close(self) -> list[CheckpointFile]:
        """Write the rest; return the files, in order, when all are on the disk."""
        if self._waiting:
            self._write()
        return [file.result() for file in self._files]

    def _write(self) -> None:
        path = self._folder / f"state-{len(self._files) + 1:05d}.safetensors"
        if self._files:
            # At most one file is flushed to the disk while the next one is written.
            self._files[-1].result()
        self._files.append(write_safetensors(path, self._waiting))
        self._waiting, self._bytes = {}, 0


def write_safetensors(path: Path, tensors: dict[str, Stored]) -> Future[CheckpointFile]:
    """Write one safetensors file: header length, JSON header, tensors.

    The result is its checksum, once it is on the disk. The library would first build the whole file
    in memory; this writes each tensor from its own memory, and computes the checksum meanwhile.
    """
    header, end = {}, 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.size_bytes
        header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # Readers map the file, so tensors begin at multiples of 8 bytes.
    text += b" " * (-len(text) % 8)
    pieces = [memoryview(len(text).to_bytes(8, "little") + text)]
    pieces += [piece for tensor in tensors.values() for piece in tensor.pieces]
    checksum = in_thread(lambda: _checksum(pieces), "memtop-checksum")
    with path.open("wb", buffering=_BUFFER_BYTES) as file:
        for piece in pieces:
            file.write(piece)
    size = 8 + len(text) + end

    def finished() -> CheckpointFile:
        sync(path)
        return CheckpointFile(path.name, size, checksum.result())

    return in_thread(finished, "memtop-sync")


def _checksum(pieces: Iterable[memoryview]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


class ShardReader:
    """The saved tensors of a state folder, by parameter. Each is read when it is requested."""

    def __init__(self, folder: Path, files: list[CheckpointFile]) -> None:
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

    def __call__(self, name: str) -> dict[str, torch.Tensor]:
        """All tensors of one parameter: weight, step and moments."""
        return {kind: self.get(name, kind) for kind in self._where[name]}

    def get(self, name: str, kind: str) -> torch.Tensor:
        with safe_open(self._where[name][kind], framework="pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(f"{kind}/{name}")
        return tensor


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy on file systems without hard links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        sync(target)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
