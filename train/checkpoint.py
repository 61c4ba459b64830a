"""Writes and reads `train_latest_state`: fp32 weights and optimizer moments per parameter name, and the manifest.

Written beside, fsynced, swapped in by renames; the state before it is kept. At every moment at least one whole state lies on
the disk, and no moment leaves a half-written one where a reader would take it for whole.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from memtop.presets import Settings
from memtop.train.errors import BadInputError
from memtop.train.manifest import FILE, Manifest, StateFile, describe_file, previous_of

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
# Headers and manifest beside the tensors.
_MARGIN_BYTES = 1 << 20


class NoSpaceError(Exception):
    """The disk cannot hold another state; the old ones are untouched."""


def save_state(
    state_dir: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    settings: Settings,
    updates: int,
    samples_seen: int,
    epoch: float,
) -> Manifest:
    """Write the state and make it the newest. NoSpaceError leaves everything as it was."""
    _check_space(state_dir, model)
    beside = state_dir.with_name(f"{state_dir.name}.tmp-{os.getpid()}")
    try:
        _sweep(state_dir)
        beside.mkdir()
        manifest = Manifest(
            updates=updates,
            samples_seen=samples_seen,
            epoch=epoch,
            effective_batch=settings.effective_batch,
            seq_len=settings.seq_len,
            saved_at=time.time(),
            settings=msgspec.to_builtins(settings),
            files=list(_write_tensors(beside, model, optimizer)),
        )
        (beside / FILE).write_bytes(msgspec.json.encode(manifest))
        _sync(beside / FILE)
        _sync(beside)
        _swap_in(beside, state_dir)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(f"{state_dir}: disk full while saving; the state before is kept, free some space") from None
        raise
    return manifest


def load_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a whole state into model and optimizer, one tensor at a time. BadInputError if it is another model's."""
    parameters = dict(model.named_parameters())
    with safe_open(folder / WEIGHTS, framework="pt") as weights:
        saved = set(weights.keys())
        if saved != parameters.keys():
            odd = sorted(saved ^ parameters.keys())[0]
            raise BadInputError(f"{folder}: holds another model (parameter {odd}); give another --name, or --fresh")
        with torch.no_grad():
            for name, parameter in parameters.items():
                tensor = weights.get_tensor(name)
                if tensor.shape != parameter.shape:
                    shapes = f"{list(tensor.shape)} there, {list(parameter.shape)} here"
                    raise BadInputError(f"{folder}: holds another model ({name} is {shapes}); give another --name, or --fresh")
                parameter.copy_(tensor)
    with safe_open(folder / OPTIMIZER, framework="pt") as moments:
        for name, parameter in parameters.items():
            # `step` stays on the CPU, as the optimizer itself has it; the moments lie where the parameter lies.
            optimizer.state[parameter] = {
                kind: moments.get_tensor(f"{kind}.{name}").to("cpu" if kind == "step" else parameter.device) for kind in MOMENTS
            }


def state_bytes(model: torch.nn.Module) -> int:
    """What a saved state takes on disk: weights and two moments in fp32."""
    return sum(parameter.numel() for parameter in model.parameters()) * 12 + _MARGIN_BYTES


def _check_space(state_dir: Path, model: torch.nn.Module) -> None:
    needed, free = state_bytes(model), shutil.disk_usage(state_dir.parent).free
    if free < needed:
        raise NoSpaceError(
            f"{state_dir}: not saved: {needed / 2**20:.0f} MiB needed, {free / 2**20:.0f} MiB free; "
            "the state before is kept, free some space"
        )


def _write_tensors(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[StateFile]:
    parameters = dict(model.named_parameters())
    weights = {name: _portable(parameter) for name, parameter in parameters.items()}
    yield _write(folder / WEIGHTS, weights)
    del weights
    moments = {
        f"{kind}.{name}": _portable(optimizer.state[parameter][kind])
        for name, parameter in parameters.items()
        for kind in MOMENTS
    }
    yield _write(folder / OPTIMIZER, moments)


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> StateFile:
    save_file(tensors, path)
    _sync(path)
    return describe_file(path)


def _portable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap_in(beside: Path, state_dir: Path) -> None:
    if state_dir.exists():
        previous = previous_of(state_dir)
        # The newest state and the one just written are both whole: the oldest may go.
        shutil.rmtree(previous, ignore_errors=True)
        state_dir.rename(previous)
    beside.rename(state_dir)
    _sync(state_dir.parent)


def _sweep(state_dir: Path) -> None:
    """Remove what a killed save left half-written."""
    for leftover in state_dir.parent.glob(f"{state_dir.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
