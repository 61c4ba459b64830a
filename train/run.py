"""One training process from its settings to its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from memtop.presets import Settings, SettingsError
from memtop.presets.checks import check
from memtop.presets.host_memory import HostPlan
from memtop.train import BadInputError, TrainingError, UnsavedError
from memtop.train.agent.failures import is_allocation_failure
from memtop.train.agent.memory import keep_freed_memory
from memtop.train.channel import Channel, Control, MemoryRecorder, Tracking, open_channel, tracking_options, warn_from_first
from memtop.train.checkpoint import load_weights, take_newest
from memtop.train.compile_lock import Enter
from memtop.train.data import OpenedData, open_data
from memtop.train.devices import (
    allocate_first,
    check_resumed,
    choose_device,
    device_uuid,
    disable_missing_transfers,
    give_index,
)
from memtop.train.engine import Engine, PlainEngine, count_parameters, trained_parameters
from memtop.train.exchange import Ranks
from memtop.train.host_memory import agree_on_host_plan
from memtop.train.model import accelerate_name, blaming_config, build_model, compile_layers, tokens_and_config
from memtop.train.objective import Objective
from memtop.train.optimizers import build_optimizer
from memtop.train.order import Position
from memtop.train.packing import use_packing
from memtop.train.state_files import BrokenStateError, Cut, Manifest, ShardReader, UnreadStateError
from memtop.train.trainer import Trainer
from memtop.train.zero import ZeroEngine, open_deepspeed


def train(settings_path: Path, state_dir: Path, *, resume: bool, trackers: Sequence[GeneralTracker] = ()) -> str:
    """Train to the target or a requested stop; return "finished" or "stopped", the state saved.

    `trackers` get the metrics in addition to those that the settings name. TrainingError if the
    user can solve the problem, UnsavedError if the state did not fit on the disk.
    """
    channel = open_channel()
    try:
        outcome, problem = _train(read_settings(settings_path), state_dir, resume, channel, trackers)
    except Exception as error:
        if is_allocation_failure(error):
            # Failures during the training itself are already reported, with their phase.
            values = {"update": None, "batch": None, "accumulation": None}
            channel.oom(error, phase="load", survived=False, **values)
        text = str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
        channel.report("end", outcome="failed", message=text.splitlines()[0] if text else type(error).__name__)
        channel.flush()
        raise
    channel.report("end", outcome=outcome, saved=problem is None, message=problem or "")
    channel.flush()
    if problem is not None:
        raise UnsavedError(problem)
    return outcome


def _train(
    settings: Settings, state_dir: Path, resume: bool, channel: Channel, trackers: Sequence[GeneralTracker]
) -> tuple[str, str | None]:
    """Return the outcome, and why the last state is not saved or None.

    Only the first rank knows the exact reason.
    """

    def enter(phase: str) -> None:
        channel.report("phase", phase=phase)

    enter("loading")
    chosen = choose_device(settings)
    if chosen.problem is not None:
        settings = msgspec.structs.replace(settings, device="cpu")
    tokens, config = tokens_and_config(settings)
    folder = Path(os.environ.get("MEMTOP_ATTEMPT_DIR") or state_dir.parent)
    accelerator = open_accelerator(settings, config, tracking_options(settings, folder, trackers), enter=enter)
    notify = _Notifier(channel, accelerator)
    for warning in filter(None, (chosen.warning, allocate_first(accelerator.device))):
        notify(warning)
    record = MemoryRecorder(channel, accelerator)
    record("before model load")
    control = Control(channel, accelerator)
    control.catch_signals()
    found = find_state(state_dir, accelerator, channel) if resume else None
    check_resumed(chosen, was_on_gpu=found is not None and found[1].on_gpu)
    engine, position = open_engine(settings, accelerator, config, found, tell=partial(notify, warning=False), enter=enter)
    record("after model load")
    host = agree_on_host_plan(settings, accelerator)
    enter("data")
    data = open_data(settings, tokens, level=host.level)
    record("after data load")
    for note in (*data.notes, *_host_notes(settings, host), *_evaluation_notes(settings, data)):
        notify(note)
    trainer = Trainer(
        settings,
        engine,
        data.train,
        position,
        state_dir,
        channel,
        tokens.pad,
        host=host,
        evaluation=data.evaluation,
        tokens=tokens,
        wait_for_disk=os.environ.get("MEMTOP_ON_OOM") != "stop",
    )
    if found is not None:
        _notify_resumed(*found, settings, notify)
    epoch_samples = len(data.train.table(settings.seq_len))
    _report_plan(channel, trainer, engine, host, epoch_samples=epoch_samples, resumed=found is not None)
    tracking = Tracking(accelerator)
    tracking.start(settings, folder)
    enter("training")
    return _run(trainer, control, accelerator, tracking), trainer.unsaved


def _run(trainer: Trainer, control: Control, accelerator: Accelerator, tracking: Tracking) -> str:
    """Run the training loop; return the outcome when all ranks have ended it."""
    try:
        outcome = trainer.run(control)
    except BaseException:
        tracking.end()
        raise
    # All ranks leave together: one that ends while the others still communicate is aborted, and the
    # run would count as failed.
    Ranks(accelerator).wait()
    # Also flushes the trackers.
    accelerator.end_training()
    return outcome


def _report_plan(
    channel: Channel, trainer: Trainer, engine: Engine, host: HostPlan, *, epoch_samples: int, resumed: bool
) -> None:
    device = engine.accelerator.device
    channel.report(
        "plan",
        total_updates=trainer.total_updates,
        target_samples=trainer.target_samples,
        updates=trainer.position.updates,
        samples_seen=trainer.position.samples_seen,
        resumed=resumed,
        parameters=count_parameters(engine.model.parameters()),
        trained_parameters=count_parameters(trained_parameters(engine.model).values()),
        epoch_samples=epoch_samples,
        strategy=str(engine.strategy()),
        loss_chunk=engine.loss_chunk,
        host=msgspec.to_builtins(host),
        device=str(device),
        device_uuid=device_uuid(device),
    )


class _Notifier:
    """Notifies the user, from the first rank: in the log and, as a warning, the supervisor."""

    def __init__(self, channel: Channel, accelerator: Accelerator) -> None:
        self._channel = channel
        self._accelerator = accelerator

    def __call__(self, text: str, *, warning: bool = True) -> None:
        if warning:
            warn_from_first(self._channel, self._accelerator, text)
        elif self._accelerator.is_main_process:
            print(f"memtop: {text}", flush=True)


def _host_notes(settings: Settings, host: HostPlan) -> list[str]:
    notes = []
    if host.workers != settings.workers:
        notes.append(f"loader workers {settings.workers} -> {host.workers}: host memory is short ({host.reason})")
    if host.level != settings.host_level:
        notes.append(f"host memory level {settings.host_level} -> {host.level} ({host.reason})")
    return notes


def _evaluation_notes(settings: Settings, data: OpenedData) -> list[str]:
    if settings.eval_every and data.evaluation is None:
        return [f"eval_every {settings.eval_every}: no evaluation is done without data for it; give --set data.eval=FILE"]
    return []


def open_engine(
    settings: Settings,
    accelerator: Accelerator,
    config: Any,
    found: tuple[Path, Manifest] | None,
    *,
    tell: Callable[[str], None] = lambda text: None,
    enter: Enter | None = None,
) -> tuple[Engine, Position]:
    """Model and optimizer under the settings' strategy, resumed from a state if there is one.

    `tell` gets notes for the user, and `enter` the phases that a report shows.
    """
    model = build_model(settings, config, mixed=accelerator.mixed_precision)
    position = Position(cuts=(Cut(0, settings.seq_len),))
    read = None
    if found is not None:
        folder, manifest = found
        read = ShardReader(folder, manifest.files)
        load_weights(read, model, folder)
        position = _position(manifest, settings)
    with blaming_config(settings):
        objective = Objective(model, seq2seq=settings.task == "seq2seq", chunk=settings.loss_chunk)
    if settings.compile:
        compile_layers(model)
    kind: Any = ZeroEngine if settings.zero.stage else PlainEngine
    if not settings.zero.stage and accelerator.device.type == "cuda":
        objective.to(accelerator.device)
    if settings.packing and (reason := use_packing(settings, model, accelerator)) is not None:
        tell(f"packing: {reason}; samples of similar length share a micro-batch instead")
    optimizer = build_optimizer(settings, model.parameters(), enter)
    # The engine communicates at once, and the ranks read the model at different speeds.
    Ranks(accelerator).wait()
    engine: Engine = kind(accelerator, objective, optimizer, settings)
    if engine.strategy() != settings.zero:
        raise TrainingError(f"zero: requested {settings.zero}, but DeepSpeed runs {engine.strategy()}")
    if found is not None and read is not None:
        engine.load_moments(read)
        if (scale := found[1].loss_scale) is not None:
            engine.set_loss_scale(scale)
    return engine, position


def _position(manifest: Manifest, settings: Settings) -> Position:
    cuts = manifest.cuts
    if cuts[-1].seq_len != settings.seq_len:
        # A second change at the same position replaces the first.
        kept = tuple(cut for cut in cuts if cut.position < manifest.samples_seen)
        cuts = (*kept, Cut(manifest.samples_seen, settings.seq_len))
    return Position(updates=manifest.updates, samples_seen=manifest.samples_seen, cuts=cuts)


def read_settings(path: Path) -> Settings:
    """The settings of a file, which may be edited by hand; BadInputError if they are wrong."""
    try:
        return check(msgspec.json.decode(path.read_bytes(), type=Settings))
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, SettingsError) as error:
        raise BadInputError(f"{path}: {error}") from None


def open_accelerator(
    settings: Settings, config: Any, tracking: dict[str, Any] | None = None, *, enter: Enter | None = None
) -> Accelerator:
    """Accelerate, with DeepSpeed for ZeRO; BadInputError if this machine cannot do it.

    `tracking` are the Accelerator's arguments for trackers. `enter` gets the phases that a report
    shows.
    """
    tracking = tracking or {}
    on_gpu = choose_device(settings).on_gpu
    precision = _precision(settings, on_gpu)
    if on_gpu and precision == "fp32":
        # Matrix products on tensor cores (TF32): fp32's range, with 10 bits after the point.
        torch.set_float32_matmul_precision("high")
    if on_gpu:
        disable_missing_transfers()
    else:
        keep_freed_memory()
    if settings.zero.stage:
        accelerator = open_deepspeed(settings, config, precision, on_gpu, tracking, enter)
    else:
        accelerator = Accelerator(mixed_precision=accelerate_name(precision), cpu=not on_gpu, **tracking)
    give_index(accelerator)
    if accelerator.num_processes != settings.world_size:
        raise BadInputError(
            f"world_size {settings.world_size}: {accelerator.num_processes} processes were started; use memtop train"
        )
    return accelerator


def _precision(settings: Settings, on_gpu: bool) -> str:
    if settings.precision == "auto":
        if not on_gpu:
            return "fp32"
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if settings.precision == "fp16" and not on_gpu:
        raise BadInputError("precision fp16: requires a GPU; give --set precision=bf16 or fp32")
    return settings.precision


def find_state(state_dir: Path, accelerator: Accelerator, channel: Channel) -> tuple[Path, Manifest] | None:
    """The state to resume from. The first rank checks every byte and broadcasts the result."""
    answer: tuple[Manifest, str | None] | str | None = None
    if accelerator.is_main_process:
        try:
            answer = take_newest(state_dir)
        except UnreadStateError as error:
            answer = f"{error}; it stays in its place: start again when it can be read, or move its folder aside"
        except BrokenStateError as error:
            answer = (
                f"{error}; no complete state is left to resume from; move {state_dir.parent} aside or start again with --fresh"
            )
        except OSError as error:
            where = error.filename or state_dir.parent
            answer = f"{where}: cannot be made ready: {error.strerror}; start again when that is possible"
    answer = Ranks(accelerator).from_first(answer)
    if isinstance(answer, str):
        raise BadInputError(answer)
    if answer is None:
        return None
    manifest, problem = answer
    if problem is not None and accelerator.is_main_process:
        text = f"{problem}; resuming from the newest complete state, of update {manifest.updates}"
        channel.report("warning", message=text, topic="damaged")
        print(f"memtop: {text}", flush=True)
    return state_dir, manifest


def _notify_resumed(folder: Path, manifest: Manifest, settings: Settings, notify: _Notifier) -> None:
    notify(f"resumed from {folder} at update {manifest.updates}, {manifest.samples_seen} samples", warning=False)
    if manifest.seq_len != settings.seq_len and settings.task == "causal":
        notify(
            f"seq_len {manifest.seq_len} -> {settings.seq_len}: the rest of this epoch is cut again from sample "
            f"{manifest.samples_seen} on; no token is left out or repeated"
        )
    if manifest.optimizer != settings.optimizer:
        notify(f"optimizer {manifest.optimizer} -> {settings.optimizer}: its moments are converted as closely as possible")
    for field in ("seed", "data"):
        if manifest.settings.get(field) != msgspec.to_builtins(getattr(settings, field)):
            notify(f"{field} changed: from here on the samples have another order")


def is_first_process() -> bool:
    """Whether this is the first or only process, the one that prints to the user."""
    return os.environ.get("RANK", "0") == "0"
