"""Acts before memory runs out: restarts a run whose leak would end it, and advises on speed."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.monitor.vram import RankMemory, placed, ranks_on
from memtop.supervisor.plan import with_split
from memtop.supervisor.recovery.batch_trial import upper_bound
from memtop.supervisor.recovery.bottleneck import Measured, OwnSplit, advise
from memtop.supervisor.recovery.configuration import configuration_key
from memtop.supervisor.recovery.forecast import Estimates, estimates_on
from memtop.supervisor.recovery.host_forecast import HostEstimates, host_estimates_on
from memtop.supervisor.recovery.leaks import must_act
from memtop.supervisor.recovery.peak_line import PeakLine, line_through, peaks_of
from memtop.supervisor.recovery.values import Forecast, Peak
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
        estimates=_estimates(model),
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
    """The peak with another micro-batch and the same effective batch: from the line of this run's
    measured peaks, else by the estimate, else at the most; None if nothing allows a forecast.
    """
    settings = model.settings
    peaks, present = _like_the_present(model)
    total, taken = _capacity(model)
    others = _others_bytes(present, taken)
    after = None
    if settings is not None:
        after = with_split(settings, batch, max(1, settings.effective_batch // settings.world_size // batch))
    line = line_through(peaks)
    # With A = 1 it would be another line.
    same = settings is None or after is None or settings.accumulates == after.accumulates
    if isinstance(line, PeakLine) and same:
        return line.forecast(batch, total, others)
    if present is None or total is None:
        return None
    estimates = _estimates(model) if model.on_gpu else _host_estimates(model, total, others)
    if after is not None and estimates is not None:
        found = estimates.forecast(after)
        if isinstance(found, Forecast):
            return found
    return upper_bound(present.bytes, present.batch, batch, total, others or 0)


def _like_the_present(model: Model) -> tuple[tuple[Peak, ...], Peak | None]:
    """The peaks that were measured with the present settings except the micro-batch, and that of
    the present ones."""
    settings, grip = model.settings, model.grip
    measured = [row.peak for row in model.configurations.rows if row.peak is not None]
    if settings is not None:
        peaks, batch = peaks_of(settings, measured, on_gpu=model.on_gpu), settings.batch
    elif grip is not None and grip.batch is not None:
        key = _own_key(model, grip)
        peaks, batch = tuple(peak for peak in measured if peak.settings_key == key), grip.batch
    else:
        return (), None
    return peaks, next((peak for peak in reversed(peaks) if peak.batch == batch and not peak.failed), None)


def _estimates(model: Model) -> Estimates | None:
    """For the run's fullest GPU; None on the CPU, or as long as no peak of the present settings is
    measured: then what other processes hold is not known."""
    gpu, (_, present) = _fullest(model), _like_the_present(model)
    if gpu is None or present is None or model.sample is None:
        return None
    others = _others_bytes(present, _capacity(model)[1])
    rows = model.configurations.rows
    return estimates_on(gpu, rows, others_bytes=others or 0, config=model.sample.model_config)


def _host_estimates(model: Model, total: int, others: int | None) -> HostEstimates:
    config = model.sample.model_config if model.sample is not None else None
    return host_estimates_on(total, others, model.configurations.rows, config or None)


def _others_bytes(present: Peak | None, taken: int | None) -> int | None:
    """All used memory that does not belong to the run."""
    return max(0, taken - present.bytes) if present is not None and taken is not None else None


def _own_key(model: Model, grip: Grip) -> str:
    return shape_key(grip, model.knobs, model.allocator, on_gpu=model.on_gpu)


def _capacity(model: Model) -> tuple[int | None, int | None]:
    """Size and used bytes of the memory in which the run trains: its fullest GPU, or the host."""
    if model.sample is None:
        return None, None
    if not model.on_gpu:
        host = model.sample.machine.host
        return (host.total_bytes if host.limit_bytes is None else host.limit_bytes), host.used_bytes
    gpu = _fullest(model)
    if gpu is None or gpu.total_bytes is None or gpu.free_bytes is None:
        return None, None
    return gpu.total_bytes, gpu.total_bytes - gpu.free_bytes


def _fullest(model: Model) -> GpuSample | None:
    if model.sample is None or not model.on_gpu:
        return None
    gpus = own_gpus(model.sample.machine, model.progress.rank_memory())
    known = [gpu for gpu in gpus if gpu.total_bytes and gpu.free_bytes is not None]
    return max(known, key=lambda gpu: gpu.used_fraction or 0.0, default=None)


def own_gpus(machine: MachineSnapshot, ranks: Iterable[RankMemory]) -> list[GpuSample]:
    """The GPUs that the run's ranks use."""
    where = placed(ranks, machine.gpus)
    return [gpu for gpu in machine.gpus if ranks_on(gpu, where)]
