"""One training process from its settings to its end."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator

from memtop.presets import Settings, SettingsError
from memtop.presets.editing import check
from memtop.train.channel import Channel, open_channel
from memtop.train.checkpoint import load_state
from memtop.train.control import Control
from memtop.train.data import load_samples
from memtop.train.errors import BadInputError, TrainingError
from memtop.train.loop import Trainer
from memtop.train.manifest import BrokenStateError, Manifest, newest_complete
from memtop.train.model import build_model


def train(settings_path: Path, state_dir: Path, *, resume: bool) -> str:
    """Train to the target or to a stop; "finished" or "stopped". TrainingError for what a person can mend."""
    channel = open_channel()
    try:
        outcome = _train(read_settings(settings_path), state_dir, resume, channel)
    except Exception as error:
        text = str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
        channel.report("end", outcome="failed", message=text.splitlines()[0] if text else type(error).__name__)
        channel.flush()
        raise
    channel.report("end", outcome=outcome, message="")
    channel.flush()
    return outcome


def _train(settings: Settings, state_dir: Path, resume: bool, channel: Channel) -> str:
    channel.report("phase", phase="loading")
    accelerator = _accelerator(settings)
    control = Control(channel, accelerator)
    control.catch_signals()
    samples = load_samples(settings.data, settings.seq_len)
    model = build_model(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    trainer = Trainer(settings, accelerator, model, optimizer, samples, state_dir, channel)
    found = _find_state(state_dir) if resume else None
    if found is not None:
        folder, manifest = found
        load_state(folder, model, optimizer)
        trainer.updates, trainer.samples_seen = manifest.updates, manifest.samples_seen
        _say_resumed(folder, manifest, settings, channel)
    left = max(0, settings.target_samples - trainer.samples_seen)
    channel.report(
        "plan",
        total_updates=trainer.updates + math.ceil(left / settings.effective_batch),
        target_samples=settings.target_samples,
        updates=trainer.updates,
        samples_seen=trainer.samples_seen,
        resumed=found is not None,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dataset_samples=len(samples),
        device=str(accelerator.device),
        device_uuid=_device_uuid(accelerator.device),
    )
    channel.report("phase", phase="training")
    return trainer.run(control)


def read_settings(path: Path) -> Settings:
    """The settings, checked again: the file may have been edited by hand."""
    try:
        return check(msgspec.json.decode(path.read_bytes(), type=Settings))
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, SettingsError) as error:
        raise BadInputError(f"{path}: {error}") from None


def _accelerator(settings: Settings) -> Accelerator:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise BadInputError("device cuda: torch sees no CUDA device; give --set device=auto or cpu")
    precision = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}[settings.precision]
    if settings.precision == "fp16" and not (torch.cuda.is_available() and settings.device != "cpu"):
        raise BadInputError("precision fp16: needs a GPU; give --set precision=bf16 or fp32")
    accelerator = Accelerator(mixed_precision=precision, cpu=settings.device == "cpu" or not torch.cuda.is_available())
    if accelerator.num_processes != settings.world_size:
        raise BadInputError(
            f"world_size {settings.world_size}: {accelerator.num_processes} processes were launched; use memtop train"
        )
    return accelerator


def _find_state(state_dir: Path) -> tuple[Path, Manifest] | None:
    try:
        found = newest_complete(state_dir)
    except BrokenStateError as error:
        raise BadInputError(
            f"{error}; no whole state is left to resume from: move {state_dir.parent} aside, or start anew with --fresh"
        ) from None
    if found is None:
        return None
    folder, manifest, problem = found
    if problem is not None:
        print(f"memtop: {problem}; resuming from the state before it, {folder}", flush=True)
    return folder, manifest


def _say_resumed(folder: Path, manifest: Manifest, settings: Settings, channel: Channel) -> None:
    position = f"update {manifest.updates}, {manifest.samples_seen} samples"
    print(f"memtop: resumed from {folder} at {position}", flush=True)
    if manifest.seq_len != settings.seq_len:
        text = (
            f"seq_len {manifest.seq_len} -> {settings.seq_len} cuts the text into other samples: "
            f"the order goes on at position {manifest.samples_seen}, but samples may repeat or be left out in this epoch"
        )
        channel.report("warning", message=text)
        print(f"memtop: {text}", flush=True)
    _warn_if_other_order(manifest.settings, settings, channel)


def _warn_if_other_order(before: dict[str, Any], settings: Settings, channel: Channel) -> None:
    for field in ("seed", "data"):
        if before.get(field) != getattr(settings, field):
            channel.report("warning", message=f"{field} changed: from here on the samples come in another order")


def _device_uuid(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def launched_alone() -> bool:
    """True for the only or the first process: the one that speaks to the person."""
    return os.environ.get("RANK", "0") == "0"
