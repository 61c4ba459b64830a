"""Acts before memory runs out: restarts a run whose leak would end it, and advises on speed."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.monitor.vram import RankMemory, placed, ranks_on
from memtop.supervisor.recovery.batch_trial import upper_bound
from memtop.supervisor.recovery.bottleneck import Measured, OwnSplit, advise
from memtop.supervisor.recovery.configuration import configuration_key
from memtop.supervisor.recovery.leaks import must_act
from memtop.supervisor.recovery.peak_line import PeakLine, line_through, peaks_of
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run.events import Answered
from memtop.supervisor.run.grip import Grip, shape_key
from memtop.supervisor.run.model import Ask, Cause, Model, Purpose, ask, note, refused
from memtop.supervisor.run.reports import Pressure
from memtop.supervisor.run.rules import restart
from memtop.supervisor.wire import Change, Phase


def under_pressure(model: Model, rank: int, report: Pressure) -> Model:
    """torch's allocator had to free its cache and retry. The next allocation may fail."""
    retries = report.allocation_retries
    text = f"update {report.update}: the allocator of rank {rank} was refused memory and had to empty its cache first"
    return note(model, "pressure", f"{text} ({retries} times so far)", {"rank": rank, "retries": retries})


def tick(model: Model) -> Model:
    """Restart the built-in trainer before a leak ends it; for an external command the leak is only
    reported.
    """
    if model.leak_handled or not model.own_trends or model.phase is not Phase.TRAINING or model.pending is not None:
        return model
    if model.progress.unsaved is not None:
        # A restart would lose all updates since the last save. The failed save is reported already.
        return model
    settings = model.settings
    trend = must_act(
        model.own_trends,
        update=model.progress.update,
        start_update=model.progress.start_update,
        seconds=model.now.monotonic - model.attempt.since if model.attempt is not None else 0.0,
        save_every=settings.save_every if settings is not None else None,
    )
    if trend is None:
        return model
    model = replace(model, leak_handled=True)
    if settings is None or model.run.on_oom != "auto":
        why = "it is an external command" if settings is None else f"--on-oom {model.run.on_oom}"
        return note(model, "leak", f"{trend.message}; nothing is done about it: {why}")
    model = note(model, "leak", f"{trend.message}; saving and restarting with the same settings before that")
    return ask(replace(model, leak_reason=trend.message), "checkpoint", frozenset({0}), Purpose.LEAK)


def answered(model: Model, pending: Ask, event: Answered) -> Model:
    """Restart if the state was saved; otherwise leave the program running."""
    if pending.attempt != model.number or model.phase is not Phase.TRAINING or model.pending is not None:
        return model  # another decision came first
    if (why := refused(event.answers)) is not None:
        return note(model, "leak", f"not restarted: its state could not be saved: {why}")
    return restart.begin(model, Change(reason=f"leak: {model.leak_reason}"), Cause.PENDING)


def advised(model: Model, measured: Measured) -> Model:
    """Renew the advice from new medians."""
    found = advise(
        measured,
        model.settings,
        lambda batch: forecast(model, batch),
        failed_batches(model),
        run=model.run.name,
        own=_own_split(model.grip),
    )
    return replace(model, advice=found)


def _own_split(grip: Grip | None) -> OwnSplit | None:
    """What a restart can change in the user's own program; None if it is nothing."""
    if grip is None or not grip.batch or not grip.accumulation or not grip.effective_batch:
        return None
    if {"batch", "accumulation"} & grip.fixed.keys():
        return None
    each = grip.processes if grip.of_all("accumulation") else 1
    return OwnSplit(
        batch=grip.batch, accumulation=grip.accumulation, effective_batch=grip.effective_batch, accumulation_of=each
    )


def failed_batches(model: Model) -> set[int]:
    """Micro-batches that ran out of memory in this run under settings like the present ones."""
    present = model.settings
    if model.grip is not None and present is None:
        key = _own_key(model, model.grip)
        records = [record for record in model.configurations.records if record.died_of_memory]
        return {
            peak.batch for record in records if (peak := record.configuration.peak) is not None and peak.settings_key == key
        }
    return {
        settings.batch
        for record in model.configurations.records
        if record.died_of_memory and (settings := record.configuration.settings) is not None
        if present is not None and configuration_key(replace(settings, batch=present.batch)) == configuration_key(present)
    }


def forecast(model: Model, batch: int) -> Forecast | None:
    """The peak with another micro-batch, by this run's measurements; None if they do not allow a
    forecast.
    """
    settings, sample, grip = model.settings, model.sample, model.grip
    measured = [row.peak for row in model.configurations.rows if row.peak is not None]
    if sample is None:
        return None
    if settings is not None:
        peaks, present = peaks_of(settings, measured, on_gpu=model.on_gpu), settings.batch
    elif grip is not None and grip.batch is not None:
        key = _own_key(model, grip)
        peaks, present = tuple(peak for peak in measured if peak.settings_key == key), grip.batch
    else:
        return None
    total, taken = _capacity(model, sample.machine)
    own = next((peak for peak in reversed(peaks) if peak.batch == present and not peak.failed), None)
    # All used memory that does not belong to the run.
    others = max(0, taken - own.bytes) if own is not None and taken is not None else None
    line = line_through(peaks)
    if isinstance(line, PeakLine):
        return line.forecast(batch, total, others)
    if own is None or total is None:
        return None
    return upper_bound(own.bytes, own.batch, batch, total, others or 0)


def _own_key(model: Model, grip: Grip) -> str:
    return shape_key(grip, model.knobs, model.allocator, on_gpu=model.on_gpu)


def _capacity(model: Model, machine: MachineSnapshot) -> tuple[int | None, int | None]:
    """Size and used bytes of the memory in which the run trains: its fullest GPU, or the host."""
    if not model.on_gpu:
        host = machine.host
        return (host.total_bytes if host.limit_bytes is None else host.limit_bytes), host.used_bytes
    gpus = [gpu for gpu in own_gpus(machine, model.progress.rank_memory()) if gpu.total_bytes and gpu.free_bytes is not None]
    fullest = max(gpus, key=lambda gpu: gpu.used_fraction or 0.0, default=None)
    if fullest is None or fullest.total_bytes is None or fullest.free_bytes is None:
        return None, None
    return fullest.total_bytes, fullest.total_bytes - fullest.free_bytes


def own_gpus(machine: MachineSnapshot, ranks: Iterable[RankMemory]) -> list[GpuSample]:
    """The GPUs that the run's ranks use."""
    where = placed(ranks, machine.gpus)
    return [gpu for gpu in machine.gpus if ranks_on(gpu, where)]
