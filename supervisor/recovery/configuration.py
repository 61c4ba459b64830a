"""The configuration that a remedy leads to, and which configurations have failed before. Pure
functions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from memtop.presets import edit_settings
from memtop.presets.fields import memory_shape
from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import Change, Configuration


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
    words = [f"T {settings.seq_len}", settings.precision, settings.method, str(settings.zero), settings.optimizer]
    if settings.gradient_checkpointing:
        words.append("checkpointing")
    return f"{', '.join(words)} #{_digest(values, 6)}"


def _digest(values: dict[str, Any], size: int) -> str:
    return hashlib.blake2b(msgspec.json.encode(values, order="deterministic"), digest_size=size).hexdigest()


# If other processes held the GPU, or /dev/shm was full, the settings were not the cause.
_NOT_BY_SETTINGS = (Kind.NOT_MEMORY, Kind.DISK_FULL, Kind.SHM_EXHAUSTED, Kind.GPU_OOM_OTHER_PROCESS)
_OUT_OF_MEMORY = frozenset(kind.value for kind in Kind if kind not in _NOT_BY_SETTINGS)


def failed_settings(rows: Iterable[Configuration]) -> tuple[Settings, ...]:
    """The settings that ran out of memory (the run ended, or went on with smaller ones), oldest
    first."""
    return tuple(row.settings for row in rows if row.settings is not None and row.outcome in _OUT_OF_MEMORY)
