"""Keeps the list of the run's configurations up to date, and writes it when one begins or ends."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.program import first_known, known
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.forecast import foreseen_text
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run import explain
from memtop.supervisor.run.effects import Foresee, SaveConfigurations
from memtop.supervisor.run.grip import shape_key
from memtop.supervisor.run.model import Model, emit, note
from memtop.supervisor.run.record.configurations import Configurations, same
from memtop.supervisor.run.reports import LoopFound, Oom, Plan, Report, SettingsChanged, Step, values


def put(model: Model, configurations: Configurations) -> Model:
    """A configuration has begun or ended: write the changes and notify the dashboards."""
    if configurations is model.configurations:
        return model
    records = configurations.to_save()
    model = replace(model, configurations=configurations.saved())
    return emit(model, SaveConfigurations(records))


def keep(model: Model) -> Model:
    """Write the measurements taken since the last call."""
    if not model.configurations.unsaved:
        return model
    records = model.configurations.to_save()
    return emit(replace(model, configurations=model.configurations.saved()), SaveConfigurations(records))


def note_uses(model: Model) -> Model:
    """Keep what is known of the settings of the user's own program."""
    progress, grip = model.progress, model.grip
    if model.settings is not None:
        return model
    plan, loop = progress.plan, progress.loop
    uses = known(first_known(*(one.knobs for one in (plan, grip, loop) if one is not None)))
    return model if uses is None else put(model, model.configurations.note_uses(uses))


def after_report(model: Model, rank: int, report: Report) -> Model:
    """Update the present configuration from a report."""
    match report:
        case LoopFound() if rank == 0:
            return note_uses(model)
        case Step():
            uuid = model.progress.ranks[rank].device_uuid
            base = model.sample.gpu_base_bytes.get(uuid) if model.sample is not None and uuid is not None else None
            model = _with_key(model)
            each = None if model.progress.loop is None else model.progress.loop.effective_batch
            after = model.configurations.note_step(rank, report, base, model.shape_key[-1], _batch(model), each)
            return replace(model, configurations=after)
        case Oom():
            model = _note_failure(model, rank, report)
            kind = "survived" if report.survived else "oom"
            return announce(model, kind, explain.oom_text(rank, report), report)
        case SettingsChanged() if rank == 0:
            return foresee(_settings_changed(model, report))
        case Plan() if rank == 0:
            model = note_uses(put(model, model.configurations.resumed(report.updates)))
            # The first allocation after this may be the one that fails, long before the next
            # sample.
            return foresee(note_host(model, model.host_bytes))
    return model


def foresee(model: Model) -> Model:
    """Ask for the predicted peak of the present configuration on the smallest of its GPUs."""
    present, gpu = model.configurations.present, model.smallest_gpu
    settings = present.configuration.settings if present is not None else None
    if present is None or settings is None or gpu is None or present.configuration.foreseen is not None:
        return model
    number = present.configuration.number
    return emit(model, Foresee(number=number, settings=settings, gpu=gpu, earlier=model.configurations.rows[:-1]))


def foreseen(model: Model, number: int, found: Forecast | str) -> Model:
    """The predicted peak, which stands beside the measured one from now on."""
    if isinstance(found, str):
        return model
    after = put(model, model.configurations.note_foreseen(number, found))
    if after is model:
        return model
    return note(after, "foreseen", foreseen_text(found), {"configuration": number, **msgspec.to_builtins(found)})


def announce(model: Model, kind: str, text: str, report: Report) -> Model:
    """Add an event for a report, unless an earlier supervisor has already added it."""
    if report.time is not None and (kind, report.time) in model.announced:
        return model
    return note(model, kind, text, values(report))


def note_host(model: Model, host_bytes: int | None) -> Model:
    """On the CPU, the peak is the host memory of the run's processes."""
    if not _trains_on_the_cpu(model):
        return model
    model = _with_key(model)
    return replace(model, configurations=model.configurations.note_host(host_bytes, model.shape_key[-1], _batch(model)))


def _trains_on_the_cpu(model: Model) -> bool:
    """False before the trainer has reported its device: host memory does not count as the peak."""
    reported = model.progress.plan if model.settings is not None else model.progress.step
    return reported is not None and not model.on_gpu


def _with_key(model: Model) -> Model:
    settings, grip, on_gpu = model.settings, model.grip, model.on_gpu
    known, held, where, _ = model.shape_key
    if known is settings and held is grip and where is on_gpu:
        return model
    key = ""
    if settings is not None:
        key = settings_key(settings, on_gpu=on_gpu)
    elif grip is not None:
        key = shape_key(grip, model.knobs, model.allocator, on_gpu=on_gpu)
    return replace(model, shape_key=(settings, grip, on_gpu, key))


def _batch(model: Model) -> int | None:
    """The samples that one process has in memory at once."""
    present = model.configurations.present
    settings = present.configuration.settings if present is not None else None
    if settings is not None:
        return settings.batch
    return model.grip.batch if model.grip is not None else None


def _note_failure(model: Model, rank: int, report: Oom) -> Model:
    """On the CPU, the peak is the memory at the failure, which may fall between two samples."""
    present = model.configurations.present
    if present is None or report.rss_bytes is None:
        return model
    if (report.time or 0.0) < present.configuration.started:
        return model  # an earlier one's, which an earlier supervisor has dealt with
    failed = model.progress.ranks.get(rank)
    before = model.sample.rss_bytes.get(failed.pid or 0) if model.sample is not None and failed is not None else None
    held = model.sample.host_memory.size if model.sample is not None else None
    if held is not None and before is not None:
        # What the rank has more of than at the newest sample is its own.
        return note_host(model, held + max(0, report.rss_bytes - before))
    others = sum(other.rss_bytes or 0 for other in model.progress.rank_memory() if other.rank != rank)
    return note_host(model, report.rss_bytes + others)


def _settings_changed(model: Model, report: SettingsChanged) -> Model:
    """The running program has changed its settings: they become the settings of the run."""
    before = model.settings
    if before is None or model.attempt is None:
        return model
    try:
        after = msgspec.convert({**msgspec.to_builtins(before), **report.changes}, Settings)
    except msgspec.ValidationError as error:
        return note(model, "warning", f"the program reports settings that are not possible: {error}")
    text = explain.settings_text(before, after, report)
    died = _kind_of_failure(model, report.update) if report.reason == "allocation failure" else None
    reported = model.attempt.number, report.time or 0.0
    changed = model.configurations.change(report.update, text, after, died=died, saved=model.saved, changed_by=reported)
    model = put(replace(model, settings=after), changed)
    return announce(model, "settings", text, report)


def _kind_of_failure(model: Model, update: int) -> str:
    """Which memory the trainer ran out of before it continued with smaller settings at this update.

    Journals are read one after the other. If the failure is in a journal that was not read yet, the
    memory is that of the training device.
    """
    failures = [report for _, report in model.progress.failures if (report.update or 0) >= update - 1]
    on_gpu = failures[-1].device_uuid is not None if failures else model.on_gpu
    kind = Kind.GPU_OOM if on_gpu else Kind.HOST_OOM_ALLOC
    return str(kind.value)


def put_back(model: Model, before: Settings, reason: str) -> Model:
    """The run has ended with unproven settings: return to the settings before, as a configuration
    without an update.
    """
    now, last = model.settings, model.configurations.present
    if now is None or last is None or same(now, before):
        return model
    settings = replace(before, target_samples=now.target_samples, epochs=now.epochs)
    done = last.configuration.until_update or model.progress.update or 0
    died = last.configuration.outcome if last.died_of_memory else None
    saved = last.starts[-1].saved_after
    reported = (last.newest_attempt, model.now.time)
    changed = model.configurations.change(done + 1, reason, settings, died=died, saved=saved, changed_by=reported)
    return put(replace(model, settings=settings), changed.end(model.phase.value, None, saved))
