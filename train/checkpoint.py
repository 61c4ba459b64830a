"""Saves and loads `train_latest_state`: fp32 weights and moments by name, and a manifest.

The state depends on neither batch, processes, ZeRO stage nor offload: any of them resumes from any
other. A save writes a temporary folder, flushes it to the disk and renames it into place; the
previous state is kept. At every moment there is at least one complete state on the disk, and a
folder that was only half written is never taken for one.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from memtop.presets import Settings
from memtop.train import DISK_FULL, BadInputError
from memtop.train.channel import Channel
from memtop.train.engine import Engine, trained_parameters
from memtop.train.exchange import Ranks
from memtop.train.state_files import (
    MANIFEST_NAME,
    SHARD_BYTES,
    Cut,
    Manifest,
    ShardReader,
    ShardWriter,
    link_or_copy,
    newest_update,
    older_states,
    previous_of,
    sync,
)

ROUND_SECONDS = 1.0
"""While the last save waits for disk space, ranks meet this often, far below a group's time limit.
"""
_RETRY_SECONDS = 3.0
# The disk reports enough free space, yet the write fails: a quota, or no more inodes. Only another
# attempt can tell.
_HIDDEN_LIMIT_RETRY_SECONDS = 30.0
_REPEAT_MESSAGE_SECONDS = 60.0
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
    """How far a run has come when its state is saved."""

    updates: int
    samples_seen: int
    epoch: float
    cuts: tuple[Cut, ...]
    target_samples: int
    evaluation_loss: float | None = None


class DiskWait:
    """After a save that failed for lack of space: when to retry and when to repeat the message.

    Only the first rank writes, so on the other ranks no retry is ever due. `monotonic` returns
    seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._error: NoSpaceError | None = None
        self._tried_at = self._message_at = 0.0
        self._message: str | None = None

    def failed(self, error: NoSpaceError) -> None:
        """Note that a save has just failed."""
        self._error, self._tried_at = error, self._monotonic()

    def due(self, *, at_once: bool = False) -> bool:
        """Whether another attempt may succeed now.

        `at_once` skips the pause since the last one: it is the last chance.
        """
        error = self._error
        if error is None or shutil.disk_usage(error.folder).free < error.needed_bytes:
            return False
        since = self._monotonic() - self._tried_at
        return at_once or since >= (_HIDDEN_LIMIT_RETRY_SECONDS if error.hidden else _RETRY_SECONDS)

    def is_news(self, text: str) -> bool:
        """Whether to report this text: it is new, and the last one is a minute old."""
        now = self._monotonic()
        if text == self._message or (self._message is not None and now - self._message_at < _REPEAT_MESSAGE_SECONDS):
            return False
        self._message, self._message_at = text, now
        return True


class StateSaver:
    """Saves a training's state and reports the result.

    All ranks call its methods together; the first rank writes.
    """

    def __init__(
        self, state_dir: Path, engine: Engine, channel: Channel, ranks: Ranks, disk_wait: DiskWait, saved_update: int
    ) -> None:
        self._state_dir = state_dir
        self._engine = engine
        self._channel = channel
        self._ranks = ranks
        self._disk_wait = disk_wait
        self.saved_update = saved_update
        """The update whose state is on the disk."""
        self.best_loss = best_loss(state_dir)
        """The lowest evaluation loss whose state was saved; None without one."""
        self.problem: str | None = None
        """Why the last save failed; None if it did not fail, and on all ranks but the first."""

    def save(self, progress: SavedProgress, settings: Settings, *, best: bool, waiting: bool) -> tuple[bool, str]:
        """Write the state; return whether it worked, and a message.

        `best`: also keep it as the state with the lowest evaluation loss. `waiting`: if the disk is
        full, the training waits for space instead of ending.
        """
        self._ranks.wait()
        # The journal must contain every update that the checkpoint covers before the checkpoint
        # exists.
        self._channel.flush()
        started = time.perf_counter()
        done = (True, f"checkpoint at update {progress.updates}")
        try:
            manifest = save_state(self._state_dir, self._engine, progress, settings)
        except NoSpaceError as error:
            done = (False, self._report_no_space(error, progress.updates, waiting=waiting))
        else:
            self.problem = None
            if manifest is not None:
                done = (True, self._report_saved(manifest, time.perf_counter() - started))
                if best:
                    self._keep_best()
        # The first rank writes for all ranks, so all of them must know whether it worked.
        if not self._ranks.any(not done[0]):
            self.saved_update = progress.updates
            if best and progress.evaluation_loss is not None:
                self.best_loss = progress.evaluation_loss
        self._ranks.wait()
        return done

    def retry_due(self, *, at_once: bool) -> bool:
        """Whether another attempt may succeed now, on the first rank; False on the others."""
        return self._disk_wait.due(at_once=at_once)

    def _keep_best(self) -> None:
        try:
            keep_best(self._state_dir)
        except NoSpaceError as error:
            text = f"the state with the lowest evaluation loss is not kept: {error}"
            self._channel.report("warning", message=text)
            print(f"memtop: {text}", flush=True)

    def _report_no_space(self, error: NoSpaceError, update: int, *, waiting: bool) -> str:
        self._disk_wait.failed(error)
        kept = newest_update(self._state_dir)
        kept_words = "nothing saved yet" if kept is None else f"the state of update {kept} is kept"
        self.problem = f"{error}; {kept_words}"
        if waiting:
            text = f"finished update {update}, waiting for disk space: {error}; free some space or stop the run"
        else:
            text = f"update {update} not saved: {error}; {kept_words}; free some space"
        if not waiting or self._disk_wait.is_news(text):
            self._channel.report("save_failed", update=update, message=text, waiting=waiting)
            print(f"memtop: {text}", flush=True)
        return text

    def _report_saved(self, manifest: Manifest, seconds: float) -> str:
        size = sum(file.size_bytes for file in manifest.files)
        self._channel.report(
            "checkpoint",
            path=str(self._state_dir),
            updates=manifest.updates,
            samples_seen=manifest.samples_seen,
            seconds=seconds,
            size_bytes=size,
        )
        return f"checkpoint at update {manifest.updates}: {size / 2**20:.1f} MiB in {self._state_dir.name}"


def save_state(state_dir: Path, engine: Engine, progress: SavedProgress, settings: Settings) -> Manifest | None:
    """Write the state and make it the newest.

    All ranks call this; the first one writes, the others get None.

    NoSpaceError (on the first rank) leaves the existing states untouched.
    """
    if not engine.accelerator.is_main_process:
        if engine.sharded:
            for _ in engine.saved_tensors():
                pass  # Tensors are gathered from all ranks.
        return None
    tensors = engine.saved_tensors()
    try:
        # The leftovers of a killed save would count as used space.
        _remove_leftovers(state_dir)
        _check_space(state_dir, state_bytes(engine.model))
        return _write_state(state_dir, tensors, progress, settings, engine)
    except (NoSpaceError, OSError):
        if engine.sharded:
            for _ in tensors:
                pass  # The other ranks are gathering with this one and would wait forever.
        raise


def _write_state(
    state_dir: Path,
    tensors: Iterable[tuple[str, dict[str, torch.Tensor]]],
    progress: SavedProgress,
    settings: Settings,
    engine: Engine,
) -> Manifest:
    temporary = state_dir.with_name(f"{state_dir.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir()
        writer = ShardWriter(temporary, SHARD_BYTES)
        for name, parts in tensors:
            writer.add(name, parts)
        manifest = Manifest(
            updates=progress.updates,
            samples_seen=progress.samples_seen,
            epoch=progress.epoch,
            cuts=progress.cuts,
            target_samples=progress.target_samples,
            evaluation_loss=progress.evaluation_loss,
            effective_batch=settings.effective_batch,
            seq_len=settings.seq_len,
            optimizer=settings.optimizer,
            precision=engine.accelerator.mixed_precision,
            loss_scale=engine.loss_scale(),
            saved_at=time.time(),
            settings=msgspec.to_builtins(settings),
            files=writer.close(),
        )
        (temporary / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
        sync(temporary / MANIFEST_NAME)
        sync(temporary)
        _move_into_place(temporary, state_dir, keep=settings.save_total_limit)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in DISK_FULL:
            why = "the quota is used up" if error.errno == errno.EDQUOT else "the disk became full during the save"
            raise NoSpaceError(state_dir.parent, state_bytes(engine.model), why) from None
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
    sizes = (getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained_parameters(model).values())
    return sum(sizes) * 12 + _MARGIN_BYTES


def _check_space(state_dir: Path, needed: int) -> None:
    if shutil.disk_usage(state_dir.parent).free < needed:
        raise NoSpaceError(state_dir.parent, needed)


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
    """Keep the newest state as the best one, by hard links, which need hardly any space. File
    systems without hard links get a copy.

    NoSpaceError if it does not fit; the former best state remains.
    """
    target = best_state(state_dir)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    _remove_leftovers(target)
    try:
        temporary.mkdir()
        for file in state_dir.iterdir():
            link_or_copy(file, temporary / file.name)
        sync(temporary)
    except OSError as error:
        needed = _MARGIN_BYTES + _copied_bytes(state_dir, temporary)
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in DISK_FULL:
            raise NoSpaceError(target.parent, needed, "cannot make links to the best state, or copies of it") from None
        raise
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)
    sync(target.parent)


def _copied_bytes(state_dir: Path, begun: Path) -> int:
    """How much space the copy needs that was begun there; 0 if its files are hard links."""
    if begun.is_dir() and any(file.stat().st_nlink == 1 for file in begun.iterdir()):
        return sum(file.stat().st_size for file in state_dir.iterdir())
    return 0


def _remove_leftovers(folder: Path) -> None:
    """Delete what a killed save of this folder left half written."""
    for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
