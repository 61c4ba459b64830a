"""The configuration that a remedy or a change leads to, and which configurations have failed
before. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.presets import SettingsError, edit_settings
from memtop.presets.fields import LIVE, SPLIT, differing, memory_shape, not_live
from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.errors import UsageError
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import Change, Checkpoint, Configuration

OWN_PROGRAM = (
    "this run's program is your own, and memtop does not know where it takes its settings from: it can change only the "
    "allocator settings (PYTORCH_CUDA_ALLOC_CONF), with `--set allocator=...`; `memtop restart RUN` starts the same command "
    "again, `memtop train -- COMMAND` another one; a profile tells memtop more: see docs/profiles.md"
)

STILL_LOADING = (
    "this run's program is your own and is still loading, so memtop does not know yet which of its settings it can change: "
    "repeat this when it trains"
)


def change_for(remedy: Remedy, *, reason: str = "") -> Change:
    """The edit of a restart (or a live edit) that applies the remedy. Empty if the remedy is only a
    command to copy."""
    return Change(preset=remedy.preset, assignments=dict(remedy.assignments), reason=reason)


def changes_nothing(remedy: Remedy) -> bool:
    """Whether no edit of the run applies the remedy: it is something for a person to do."""
    return not remedy.assignments and remedy.preset is None


def applied(settings: Settings, remedy: Remedy) -> Settings:
    """The settings after the remedy. Raises SettingsError if they are invalid."""
    return edit_settings(settings, preset=remedy.preset, assignments=dict(remedy.assignments))


def optimizer_on_gpu(settings: Settings) -> dict[str, str]:
    """The edit that takes the optimizer's offload back. On one process it ends ZeRO, too, unless
    parameters are offloaded: sharding saves nothing there, and only a run without ZeRO survives a
    lack of memory in its process."""
    values = {"zero.offload_optimizer": "false"}
    if not replace(settings.zero, offload_optimizer=False).saves_memory(settings.world_size):
        values["zero.stage"] = "0"
    if settings.optimizer == "cpu_adam":
        values["optimizer"] = "adamw"
    return values


def configuration_key(settings: Settings) -> str:
    """A key of all settings that shape memory or disk use. Two settings with one key count as the
    same configuration, which is never tried again once it has failed."""
    values = memory_shape(settings, "peak", "host", "disk")
    if settings.eval_every:
        values["eval_batch"] = settings.eval_batch or settings.batch
    return _digest(values, 12)


def settings_key(settings: Settings, *, on_gpu: bool | None = None) -> str:
    """A key of all settings that shape the peak, except the micro-batch: only peaks with one key
    lie on one line.

    `on_gpu`: whether the peak is of GPU memory; None: as the settings' device says. In host memory,
    loader workers count.
    """
    on_gpu = settings.device != "cpu" if on_gpu is None else on_gpu
    values = memory_shape(settings, "peak") if on_gpu else memory_shape(settings, "peak", "host")
    del values["batch"]
    # A sharded state depends on the number of processes; communication buffers only on whether
    # there are several.
    values["processes"] = settings.world_size if settings.zero.stage else min(2, settings.world_size)
    values["accumulates"] = settings.accumulates
    words = [f"T {settings.seq_len}", settings.precision, settings.method, str(settings.zero), settings.optimizer]
    if settings.gradient_checkpointing:
        words.append("checkpointing")
    return f"{', '.join(words)} #{_digest(values, 6)}"


def _digest(values: dict[str, Any], size: int) -> str:
    import hashlib  # loads OpenSSL: 4 MiB

    return hashlib.blake2b(msgspec.json.encode(values, order="deterministic"), digest_size=size).hexdigest()


# If other processes held the GPU, or /dev/shm was full, the settings were not the cause.
_NOT_BY_SETTINGS = (Kind.NOT_MEMORY, Kind.DISK_FULL, Kind.SHM_EXHAUSTED, Kind.GPU_OOM_OTHER_PROCESS)
_OUT_OF_MEMORY = frozenset(kind.value for kind in Kind if kind not in _NOT_BY_SETTINGS)


def failed_settings(rows: Iterable[Configuration]) -> tuple[Settings, ...]:
    """The settings that ran out of memory (the run ended, or went on with smaller ones), oldest
    first."""
    return tuple(row.settings for row in rows if row.settings is not None and row.outcome in _OUT_OF_MEMORY)


def edited(
    settings: Settings | None, change: Change, checkpoint: Checkpoint | None, rows: Sequence[Configuration] = ()
) -> Settings | None:
    """The settings that a change gives, counted from that checkpoint if it is complete; UsageError
    if it cannot be.

    `rows`: the run's configurations, to one of which the change may go back.
    """
    if settings is None:
        if replace(change, assignments={}, reason="") != Change() or set(change.assignments) - {"allocator"}:
            raise UsageError(OWN_PROGRAM)
        return None
    done = checkpoint if checkpoint is not None and checkpoint.complete else None
    try:
        return edit_settings(
            _base(settings, change, done, rows),
            preset=change.preset,
            max_updates=change.max_updates,
            assignments=change.assignments,
            gpus=change.gpus,
            updates_done=(done.updates or 0) if done else 0,
            samples_seen=(done.samples_seen or 0) if done else 0,
            failed=failed_settings(rows),
        )
    except SettingsError as error:
        raise UsageError(str(error)) from None


def _base(settings: Settings, change: Change, done: Checkpoint | None, rows: Sequence[Configuration]) -> Settings:
    """What is edited: the present settings, or those of an earlier configuration. The run keeps its
    present length if it would have nothing left to do with the earlier one, as far as that is
    known.
    """
    number = change.configuration
    if number is None:
        return settings
    row = next((row for row in rows if row.number == number), None)
    if row is None or row.settings is None:
        there = f"there are 1 to {rows[-1].number}" if rows else "there is none yet"
        raise UsageError(f"configuration {number}: this run has no such configuration; {there}")
    if row.settings.target_samples:
        left = done is None or (done.samples_seen or 0) < row.settings.target_samples
    else:  # in epochs: what that is in samples is not known
        left = change.state_before is not None and row.outcome != "finished"
    return row.settings if left else replace(row.settings, target_samples=settings.target_samples, epochs=settings.epochs)


def kept_length(change: Change, after: Settings | None, rows: Iterable[Configuration]) -> str | None:
    """That a return to an earlier configuration leaves the length of the run as it is; None if it
    does not, or if that configuration has the same length."""
    earlier = next((row.settings for row in rows if row.number == change.configuration), None)
    if earlier is None or after is None or (earlier.target_samples, earlier.epochs) == (after.target_samples, after.epochs):
        return None
    return "the run keeps its present length"


def live_values(before: Settings | None, after: Settings | None, also: Collection[str] = ()) -> dict[str, object]:
    """The values that the running program must set; UsageError, with the reason, if the change
    takes a restart.

    Batch and accumulation are always set together: the program may have changed its split itself.
    `also`: fields that are set even if `before` and `after` have the same value.
    """
    if before is None or after is None:
        raise UsageError(
            "this program is your own, and memtop cannot change it while it runs; leave out --live, and it is restarted"
        )
    fields = differing(before, after)
    if fixed := not_live(before, fields):
        why = "cannot change while the program runs"
        if before.zero.stage and set(fixed) <= set(LIVE):
            why = f"cannot change while {before.zero} runs, whose engine is built for one split"
        raise UsageError(f"{', '.join(fixed)}: {why}; restart it instead")
    if fields:
        fields += [name for name in also if name in LIVE and name not in fields]
    if set(SPLIT) & set(fields):
        # A batch without `rank_splits` is that of every process.
        split = SPLIT if after.rank_splits else SPLIT[:2]
        fields = [*split, *(name for name in fields if name not in SPLIT)]
    return {name: getattr(after, name) for name in fields}
