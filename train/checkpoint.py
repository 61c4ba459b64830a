"""Saves and loads `train_latest_state`: fp32 weights and moments by name, and a manifest.

The state depends on neither batch, processes, ZeRO stage nor offload: any of them resumes from any
other. A save writes a temporary folder, flushes it to the disk and renames it into place; the
previous state is kept. A resume moves damaged states aside, so that no save takes one for complete.
At every moment there is at least one complete state on the disk, and a folder that was only half
written is never taken for one.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from memtop.presets import Settings
from memtop.train import DISK_FULL, BadInputError
from memtop.train.engine import Engine, count_parameters, trained_parameters
from memtop.train.state_files import (
    DAMAGED_NAME,
    MANIFEST_NAME,
    BrokenStateError,
    Cut,
    Manifest,
    SavedTensors,
    ShardReader,
    ShardWriter,
    Stored,
    UnreadStateError,
    is_folder,
    leftovers,
    link_or_copy,
    newest_complete,
    older_states,
    previous_of,
    read_manifest,
    stored,
    sync,
)

SavedState = Iterable[tuple[str, dict[str, Stored]]]
"""`SavedTensors` as they are written."""

# File headers and the manifest, in addition to the tensors.
_MARGIN_BYTES = 1 << 20


class NoSpaceError(Exception):
    """The disk cannot hold another state; the existing ones are untouched.

    The text gives needed and free space, and where.
    """

    def __init__(self, folder: Path, needed_bytes: int, why: str = "") -> None:
        free = shutil.disk_usage(folder).free
        # Needed is rounded up and free down, so that the text never shows as much free as needed.
        text = f"{-(-needed_bytes // 2**20)} MiB needed, {free // 2**20} MiB free in {folder}"
        super().__init__(f"{text} ({why})" if why else text)
        self.folder = folder
        """The folder that the state would be written into."""
        self.needed_bytes = needed_bytes
        self.hidden = bool(why) and free >= needed_bytes
        """True if the disk reports enough free space: a quota or another limit stops the write."""


class SavedProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come when its state is saved: its `Position`, and more."""

    updates: int
    samples_seen: int
    epoch: float
    cuts: tuple[Cut, ...]
    target_samples: int
    evaluation_loss: float | None = None


def as_stored(tensors: SavedTensors) -> SavedState:
    """The tensors as they are written; each is moved to the CPU when it is its turn."""
    for name, parts in tensors:
        yield name, {kind: stored(tensor) for kind, tensor in parts.items()}


def manifest_of(engine: Engine, progress: SavedProgress, settings: Settings) -> Manifest:
    """The manifest of the present state, still without files."""
    return Manifest(
        **msgspec.structs.asdict(progress),
        effective_batch=settings.effective_batch,
        seq_len=settings.seq_len,
        optimizer=settings.optimizer,
        precision=engine.accelerator.mixed_precision,
        on_gpu=engine.accelerator.device.type == "cuda",
        loss_scale=engine.loss_scale(),
        saved_at=time.time(),
        settings=msgspec.to_builtins(settings),
        files=[],
    )


def make_room(state_dir: Path, needed: int) -> None:
    """Remove what a killed save left; NoSpaceError if the disk cannot hold this many bytes then."""
    # The leftovers would count as used space.
    _remove_leftovers(state_dir)
    if shutil.disk_usage(state_dir.parent).free < needed:
        raise NoSpaceError(state_dir.parent, needed)


def write_state(state_dir: Path, tensors: SavedState, manifest: Manifest, *, keep: int, needed: int) -> Manifest:
    """Write a state of `needed` bytes and make it the newest of `keep`; return its manifest.

    Uses neither the model nor a device, so a thread may do this while the training goes on.

    NoSpaceError leaves the existing states untouched.
    """
    temporary = state_dir.with_name(f"{state_dir.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir()
        writer = ShardWriter(temporary)
        for name, parts in tensors:
            writer.add(name, parts)
        manifest = msgspec.structs.replace(manifest, files=writer.close(), saved_at=time.time())
        (temporary / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
        sync(temporary / MANIFEST_NAME)
        sync(temporary)
        _move_into_place(temporary, state_dir, keep=keep)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in DISK_FULL:
            why = "the quota is used up" if error.errno == errno.EDQUOT else "the disk became full during the save"
            raise NoSpaceError(state_dir.parent, needed, why) from None
        raise
    return manifest


def load_weights(read: ShardReader, model: torch.nn.Module, folder: Path) -> None:
    """Copy the saved weights into the model, one by one; BadInputError for another model's."""
    for _, parameter, tensor in saved_weights(read, model, folder):
        _copy_into(parameter, tensor)


def saved_weights(
    read: ShardReader, model: torch.nn.Module, folder: Path
) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
    """Name, parameter and saved tensor, one by one; BadInputError for another model's."""
    parameters = trained_parameters(model)
    if read.names != parameters.keys():
        odd = sorted(read.names ^ parameters.keys())[0]
        raise BadInputError(f"{folder}: holds another model (parameter {odd}); give another --name, or --fresh")
    for name, parameter in parameters.items():
        tensor, shape = read.get(name, "weight"), getattr(parameter, "ds_shape", parameter.shape)
        if tensor.shape != shape:
            shapes = f"{list(tensor.shape)} there, {list(shape)} here"
            raise BadInputError(f"{folder}: holds another model ({name} is {shapes}); give another --name, or --fresh")
        yield name, parameter, tensor


def _copy_into(parameter: Any, tensor: torch.Tensor) -> None:
    if not hasattr(parameter, "ds_id"):
        parameter.data.copy_(tensor)
        return
    import deepspeed

    # DeepSpeed sharded it while the model was built. It is whole inside this block, and the first
    # rank's values count.
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            parameter.data.copy_(tensor)


def state_bytes(model: torch.nn.Module) -> int:
    """Bytes of a saved state on the disk: weights and two moments in fp32."""
    return 12 * count_parameters(trained_parameters(model).values()) + _MARGIN_BYTES


def take_newest(state_dir: Path) -> tuple[Manifest, str | None] | None:
    """Make the newest complete state `state_dir`, to resume from; None if there is no state. Also
    say what was wrong with a newer one, and where it is now.

    BrokenStateError if there are states but none is complete. They are marked and stay.
    UnreadStateError if the newest may be whole. Then no state is moved or marked.
    """
    for kept in (best_state(state_dir), _before_spike(state_dir)):
        _put_back(kept)
    try:
        found = newest_complete(state_dir)
    except BrokenStateError as error:
        for folder, problem in error.folders.items():
            _mark(folder, problem)
        raise
    if found is None:
        return None
    folder, manifest, problems = found
    for damaged in problems:
        aside = _aside(damaged)
        shutil.rmtree(aside, ignore_errors=True)
        damaged.rename(aside)
    if folder != state_dir:
        folder.rename(state_dir)
    (state_dir / DAMAGED_NAME).unlink(missing_ok=True)
    sync(state_dir.parent)
    if not problems:
        return manifest, None
    damaged, problem = next(iter(problems.items()))
    return manifest, f"{problem}; this state is now {_aside(damaged).name}"


def _aside(damaged: Path) -> Path:
    return damaged.with_name(f"damaged_{damaged.name}")


def _mark(folder: Path, problem: str) -> None:
    """Leave a note for those who do not compare checksums."""
    try:
        (folder / DAMAGED_NAME).write_text(problem)
    except OSError as error:
        print(f"memtop: {folder / DAMAGED_NAME}: cannot be written: {error.strerror}", flush=True)


def _put_back(folder: Path) -> None:
    """Finish what a kill between two renames has interrupted, and delete what else it has left:
    later, nothing tells whether somebody wants it."""
    for leftover in [] if is_folder(folder) else leftovers(folder):
        try:
            read_manifest(leftover)
        except UnreadStateError:
            raise
        except BrokenStateError:
            continue  # It is only half written.
        leftover.rename(folder)
        sync(folder.parent)
        break
    if not is_folder(folder) or _is_whole(folder):
        _remove_leftovers(folder)


def _is_whole(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except BrokenStateError:
        return False
    return True


def _move_into_place(temporary: Path, state_dir: Path, *, keep: int) -> None:
    """Make the new state the newest.

    `keep` counts all states, the new one included; at least two are kept.
    """
    if state_dir.exists():
        previous = previous_of(state_dir)
        if previous.exists():
            _retire(previous, state_dir, keep)
        state_dir.rename(previous)
    temporary.rename(state_dir)
    sync(state_dir.parent)


def _retire(previous: Path, state_dir: Path, keep: int) -> None:
    # The newest state and the one just written are both complete, so older ones may be deleted.
    if keep > 2:
        previous.rename(state_dir.with_name(f"{state_dir.name}.{time.time_ns()}"))
    else:
        shutil.rmtree(previous, ignore_errors=True)
    for old in older_states(state_dir)[max(0, keep - 2) :]:
        shutil.rmtree(old, ignore_errors=True)


def best_state(state_dir: Path) -> Path:
    """The folder of the state with the lowest evaluation loss."""
    return state_dir.with_name("best_state")


def best_loss(state_dir: Path) -> float | None:
    """The evaluation loss of the best state; None without one."""
    folder = best_state(state_dir)
    try:
        return msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=Manifest).evaluation_loss
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise BadInputError(f"{folder / MANIFEST_NAME}: cannot be read: {error}; move {folder} aside") from None


def keep_best(state_dir: Path) -> None:
    """Keep the newest state as the best one. NoSpaceError if it does not fit; the former best state
    remains.
    """
    _keep(state_dir, best_state(state_dir))


def keep_before_spike(state_dir: Path, found: Path) -> None:
    """Keep the state in the folder `found` while it is open whether the run goes back to it."""
    _keep(found, _before_spike(state_dir))


def _before_spike(state_dir: Path) -> Path:
    return state_dir.with_name(f"{state_dir.name}.before_spike")


def _keep(source: Path, target: Path) -> None:
    """Keep a state in another folder too, by hard links, which need hardly any space. File systems
    without hard links get a copy. NoSpaceError leaves the target as it was.
    """
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    _remove_leftovers(target)
    try:
        temporary.mkdir()
        for file in source.iterdir():
            link_or_copy(file, temporary / file.name)
        sync(temporary)
    except OSError as error:
        needed = _MARGIN_BYTES + _copied_bytes(source, temporary)
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in DISK_FULL:
            raise NoSpaceError(target.parent, needed, f"cannot make links or copies in {target.name}") from None
        raise
    # Its name sorts after the new one's: after a kill here, the new one is put back.
    former = temporary.with_name(f"{temporary.name}.former")
    if target.exists():
        target.rename(former)
    temporary.rename(target)
    sync(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def _copied_bytes(state_dir: Path, begun: Path) -> int:
    """How much space the copy needs that was begun there; 0 if its files are hard links."""
    if begun.is_dir() and any(file.stat().st_nlink == 1 for file in begun.iterdir()):
        return sum(file.stat().st_size for file in state_dir.iterdir())
    return 0


def _remove_leftovers(folder: Path) -> None:
    """Delete what a killed save of this folder left half written."""
    for leftover in leftovers(folder):
        shutil.rmtree(leftover, ignore_errors=True)
