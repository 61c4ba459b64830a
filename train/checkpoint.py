"""Writes and reads `train_latest_state`: fp32 weights and optimizer moments per parameter name, and the manifest.

Nothing in it depends on batch, processes, ZeRO stage or offload: any of them resumes from any other. Written beside, fsynced,
swapped in by renames; the state before it is kept. At every moment at least one whole state lies on the disk, and no moment
leaves a half-written one where a reader would take it for whole.


When the state at the end of training does not fit on the disk: when to try again, and when to say that it is waited for."""

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
from memtop.train import NO_ROOM, BadInputError
from memtop.train.engine import Engine, trained_parameters
from memtop.train.state_files import FILE, SHARD_BYTES, Cut, Manifest, ShardReader, ShardWriter, older_states, previous_of, sync

# Headers and manifest beside the tensors.
_MARGIN_BYTES = 1 << 20


class NoSpaceError(Exception):
    """The disk cannot hold another state; the old ones are untouched. The text says how much is needed, free, and where."""

    def __init__(self, folder: Path, needed_bytes: int, why: str = "") -> None:
        free = shutil.disk_usage(folder).free
        # Rounded up and down: never as much needed as there is free.
        text = f"{-(-needed_bytes // 2**20)} MiB needed, {free // 2**20} MiB free in {folder}"
        super().__init__(f"{text} ({why})" if why else text)
        self.folder = folder
        """Where it would lie."""
        self.needed_bytes = needed_bytes
        self.hidden = bool(why) and free >= needed_bytes
        """True where the disk claims to have that room: a quota, or another limit."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands when its state is saved."""

    updates: int
    samples_seen: int
    epoch: float
    cuts: tuple[Cut, ...]
    target_samples: int
    evaluation_loss: float | None = None


def save_state(state_dir: Path, engine: Engine, progress: Progress, settings: Settings) -> Manifest | None:
    """Write the state and make it the newest; called by all ranks, the first one writes (the others get None).

    NoSpaceError (on the first rank) leaves everything as it was.
    """
    if not engine.accelerator.is_main_process:
        for _ in engine.saved_tensors():
            pass  # takes its part in gathering what is sharded
        return None
    tensors = engine.saved_tensors()
    try:
        # What a killed save has left would count as taken.
        _sweep(state_dir)
        _check_space(state_dir, state_bytes(engine.model))
        return _write_state(state_dir, tensors, progress, settings, engine)
    except (NoSpaceError, OSError):
        for _ in tensors:
            pass  # the others are gathering with us and must not wait for ever
        raise


def _write_state(
    state_dir: Path,
    tensors: Iterable[tuple[str, dict[str, torch.Tensor]]],
    progress: Progress,
    settings: Settings,
    engine: Engine,
) -> Manifest:
    beside = state_dir.with_name(f"{state_dir.name}.tmp-{os.getpid()}")
    try:
        beside.mkdir()
        writer = ShardWriter(beside, SHARD_BYTES)
        for name, parts in tensors:
            writer.add(name, parts)
        scale = engine.loss_scale()
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
            loss_scale=None if scale is None else scale.scale,
            loss_scale_stable=None if scale is None else scale.stable,
            loss_scale_hysteresis=None if scale is None else scale.hysteresis,
            saved_at=time.time(),
            settings=msgspec.to_builtins(settings),
            files=writer.close(),
        )
        (beside / FILE).write_bytes(msgspec.json.encode(manifest))
        sync(beside / FILE)
        sync(beside)
        _swap_in(beside, state_dir, keep=settings.save_total_limit)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        if error.errno in NO_ROOM:
            why = "the quota is used up" if error.errno == errno.EDQUOT else "the disk took no more while saving"
            raise NoSpaceError(state_dir.parent, state_bytes(engine.model), why) from None
        raise
    return manifest


def load_weights(read: ShardReader, model: torch.nn.Module, folder: Path) -> None:
    """Put the saved weights into the model, one at a time; BadInputError if they are another model's."""
    for _, parameter, tensor in saved_weights(read, model, folder):
        _put(parameter, tensor)


def saved_weights(
    read: ShardReader, model: torch.nn.Module, folder: Path
) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
    """Name, the model's parameter and what was saved of it, one at a time; BadInputError if they are another model's."""
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


def _put(parameter: Any, tensor: torch.Tensor) -> None:
    if not hasattr(parameter, "ds_id"):
        parameter.data.copy_(tensor)
        return
    import deepspeed

    # Sharded while the model was built: whole for this moment, the first rank's values count.
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            parameter.data.copy_(tensor)


def state_bytes(model: torch.nn.Module) -> int:
    """What a saved state takes on disk: weights and two moments in fp32."""
    sizes = (getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained_parameters(model).values())
    return sum(sizes) * 12 + _MARGIN_BYTES


def _check_space(state_dir: Path, needed: int) -> None:
    if shutil.disk_usage(state_dir.parent).free < needed:
        raise NoSpaceError(state_dir.parent, needed)


def _swap_in(beside: Path, state_dir: Path, *, keep: int) -> None:
    """Make the new state the newest. `keep` counts it and the ones before it; there are always two while there can be."""
    if state_dir.exists():
        previous = previous_of(state_dir)
        if previous.exists():
            _put_away(previous, state_dir, keep)
        state_dir.rename(previous)
    beside.rename(state_dir)
    sync(state_dir.parent)


def _put_away(previous: Path, state_dir: Path, keep: int) -> None:
    # The newest state and the one just written are both whole: older ones may go, down to the number that is kept.
    if keep > 2:
        previous.rename(state_dir.with_name(f"{state_dir.name}.{time.time_ns()}"))
    else:
        shutil.rmtree(previous, ignore_errors=True)
    for old in older_states(state_dir)[max(0, keep - 2) :]:
        shutil.rmtree(old, ignore_errors=True)


def best_state(state_dir: Path) -> Path:
    """Where the state with the lowest evaluation loss is kept."""
    return state_dir.with_name("best_state")


def best_loss(state_dir: Path) -> float | None:
    """The lowest evaluation loss so far, None without an evaluation."""
    folder = best_state(state_dir)
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Manifest).evaluation_loss
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, OSError) as error:
        raise BadInputError(f"{folder / FILE}: cannot be read: {error}; move {folder} aside") from None


def keep_best(state_dir: Path) -> None:
    """Keep the newest state as the best one: hard links, which cost hardly any space while both exist.

    NoSpaceError where even those do not fit; the best one before stays then.
    """
    target = best_state(state_dir)
    beside = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    for leftover in target.parent.glob(f"{target.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        beside.mkdir()
        for file in state_dir.iterdir():
            os.link(file, beside / file.name)
        sync(beside)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        if error.errno in NO_ROOM:
            raise NoSpaceError(target.parent, _MARGIN_BYTES, "no links to the best state can be made") from None
        raise
    if target.exists():
        shutil.rmtree(target)
    beside.rename(target)
    sync(target.parent)


def _sweep(state_dir: Path) -> None:
    """Remove what a killed save left half-written."""
    for leftover in state_dir.parent.glob(f"{state_dir.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


ROUND_SECONDS = 1.0
"""How often all ranks ask each other what to do: far less than the time after which a process group gives up."""
_AGAIN_SECONDS = 3.0
# The disk said that there was room, and yet it could not be written: a quota, or no file can be made. Only trying tells.
_HIDDEN_SECONDS = 30.0
_SAY_SECONDS = 60.0


class Room:
    """What the first rank knows of the room for a state; on the others nothing is ever due. `monotonic` gives seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._error: NoSpaceError | None = None
        self._tried = self._said_at = 0.0
        self._said: str | None = None

    def failed(self, error: NoSpaceError) -> None:
        """A save has just failed."""
        self._error, self._tried = error, self._monotonic()

    def due(self, *, at_once: bool = False) -> bool:
        """Whether another try may help now. `at_once`: it is the last one, so that it need not wait its turn."""
        error = self._error
        if error is None or shutil.disk_usage(error.folder).free < error.needed_bytes:
            return False
        since = self._monotonic() - self._tried
        return at_once or since >= (_HIDDEN_SECONDS if error.hidden else _AGAIN_SECONDS)

    def is_news(self, text: str) -> bool:
        """Whether this is to be said: something else than before, and not more often than once a minute."""
        now = self._monotonic()
        if text == self._said or (self._said is not None and now - self._said_at < _SAY_SECONDS):
            return False
        self._said, self._said_at = text, now
        return True
