"""What a saved state says about itself: `manifest.json`, written last. A folder without a valid one is no state.

{"format": 2, "updates", "samples_seen", "epoch", "effective_batch", "seq_len", "saved_at", "optimizer", "settings": {...},
 "cuts": [[position, seq_len], ...], "files": [{"name", "size_bytes", "sha256"}, ...], ...}
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

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
    path = folder / FILE
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise BrokenStateError(f"{path}: missing, so the save was cut short") from None
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise BrokenStateError(f"{path}: cannot be understood: {error}") from None
    if manifest.format != 2:
        raise BrokenStateError(f"{path}: format {manifest.format}, this memtop reads format 2")
    for expected in manifest.files:
        try:
            found = describe_file(folder / expected.name)
        except OSError as error:
            raise BrokenStateError(f"{folder / expected.name}: {error.strerror}") from None
        if found != expected:
            raise BrokenStateError(f"{folder / expected.name}: not what was saved (size or checksum differ)")
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
