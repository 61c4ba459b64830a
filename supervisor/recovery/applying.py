"""From a remedy to what a restart edits and to the settings that come of it; and which configurations count as tried. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from memtop.presets import SettingsError, edit_settings
from memtop.presets.fields import memory_shape
from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import Change, Configuration


def change_for(remedy: Remedy, *, reason: str = "") -> Change:
    """The edit of a restart (or of a live edit) that carries the remedy out. Empty for one that only has a command to copy."""
    return Change(preset=remedy.preset, assignments=dict(remedy.assignments), reason=reason)


def applied(settings: Settings, remedy: Remedy) -> Settings:
    """The settings after the remedy, checked; SettingsError says why it cannot be."""
    return edit_settings(settings, preset=remedy.preset, assignments=dict(remedy.assignments))


def applicable(remedies: Iterable[Remedy], settings: Settings) -> tuple[tuple[Remedy, ...], tuple[str, ...]]:
    """Those that the settings take, and for each of the others its title and the reason, in one line."""
    kept, refused = [], []
    for remedy in remedies:
        try:
            applied(settings, remedy)
        except SettingsError as error:
            refused.append(f"{remedy.title}: {error}")
        else:
            kept.append(remedy)
    return tuple(kept), tuple(refused)


def key(settings: Settings) -> str:
    """What makes two configurations the same for "never tried again": all that shapes memory or disk use, so not the
    accumulation, the learning rate or how often something is logged."""
    values = memory_shape(settings, "peak", "host", "disk")
    if settings.eval_every:
        values["eval_batch"] = settings.eval_batch or settings.batch
    return hashlib.blake2b(msgspec.json.encode(values, order="deterministic"), digest_size=12).hexdigest()


# Where others held the card, or the loader's shared memory was full, the micro-batch had no part in it.
_NOT_OF_THE_SETTINGS = (Kind.NOT_MEMORY, Kind.DISK_FULL, Kind.SHM_EXHAUSTED, Kind.GPU_OOM_OTHER_PROCESS)
_OUT_OF_MEMORY = frozenset(kind.value for kind in Kind if kind not in _NOT_OF_THE_SETTINGS)


def ran_out(rows: Iterable[Configuration]) -> tuple[Settings, ...]:
    """The settings with which a run has died (or went on smaller) for lack of memory, oldest first. A full disk or
    a full /dev/shm is no such death, nor is a card that others held."""
    return tuple(row.settings for row in rows if row.settings is not None and row.outcome in _OUT_OF_MEMORY)


def untried(remedies: Iterable[Remedy], failed: Sequence[Settings], settings: Settings) -> tuple[Remedy, ...]:
    """Those that do not lead to a configuration that has failed. `settings`: the present ones, which the remedies change.

    A remedy that is a command to copy changes nothing of the configuration and stays; one that the settings refuse does not.
    """
    gone = {key(one) for one in failed}
    kept = []
    for remedy in remedies:
        if changes_nothing(remedy):
            kept.append(remedy)
            continue
        try:
            after = applied(settings, remedy)
        except SettingsError:
            continue
        if key(after) not in gone:
            kept.append(remedy)
    return tuple(kept)


def changes_nothing(remedy: Remedy) -> bool:
    """It is something for a person to do: no edit of the run carries it out."""
    return change_for(remedy) == Change()


def with_allocator(options: str, wanted: str = "expandable_segments:True") -> str:
    """The allocator's options with one more; what was set stays."""
    name = wanted.partition(":")[0]
    present = [option for option in options.split(",") if option]
    return ",".join([*present, wanted]) if all(option.partition(":")[0] != name for option in present) else options
