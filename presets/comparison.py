"""Compares two settings: what differs, whether a run's state can continue with the other ones, and
what that risks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from memtop.presets.checks import SettingsError, check, longer_than_known
from memtop.presets.edits import apply_preset, draft, take_whole
from memtop.presets.fields import FIELDS, SPLIT, ZERO, differing, saves_memory, training_unchanged, value_of
from memtop.presets.schema import Optimizer, Preset, Recipe, Settings, nearest_splits

Fit = Literal["resumes", "converts", "new run"]

_EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")


def compatibility(before: Settings, after: Settings) -> tuple[Fit, str]:
    """Whether the state of a run with `before` can continue with `after`, and why not or what is
    lost, in one line."""
    for name in differing(before, after):
        if reason := FIELDS[name].new_run:
            return "new run", f"{_change(name, before, after)}: {reason}"
    lost = _lost_moments(before.optimizer, after.optimizer)
    if lost:
        return "converts", f"optimizer {before.optimizer} -> {after.optimizer}: {lost}"
    notes = list(_notes(before, after))
    return "resumes", "; ".join(notes) or "same state, same samples"


def _lost_moments(before: Optimizer, after: Optimizer) -> str | None:
    """What a change of the optimizer does to its moments; None if they are kept exactly."""
    kinds = [("8-bit" if one in _EIGHT_BIT else "adafactor" if one == "adafactor" else "fp32") for one in (before, after)]
    if kinds[0] == kinds[1]:
        return None
    return {
        ("fp32", "8-bit"): "moments are rounded to 8 bits",
        ("8-bit", "fp32"): "moments continue from 8-bit values",
        ("fp32", "adafactor"): "second moments are reduced to row and column means, first moments are dropped",
        ("8-bit", "adafactor"): "second moments are reduced to row and column means, first moments are dropped",
        ("adafactor", "fp32"): "second moments are rebuilt from row and column means, first moments start at 0",
        ("adafactor", "8-bit"): "second moments are rebuilt from row and column means in 8 bits, first moments start at 0",
    }[kinds[0], kinds[1]]


def trains_the_same(before: Settings, after: Settings) -> bool:
    """Whether every update stays what it was, up to rounding, and the optimizer keeps its moments
    as exactly."""
    return training_unchanged(before, after) and _lost_moments(before.optimizer, after.optimizer) is None


def only_rounds_moments(before: Settings, after: Settings) -> bool:
    """Whether training differs by nothing but moments in 8 bits."""
    rounds = after.optimizer in _EIGHT_BIT and before.optimizer in ("adamw", "cpu_adam")
    return rounds and training_unchanged(before, after)


def _notes(before: Settings, after: Settings) -> Iterator[str]:
    if before.seq_len != after.seq_len:
        yield describe_cut(before, after)
    if before.effective_batch != after.effective_batch:
        yield describe_split(before, after)


def describe_cut(before: Settings, after: Settings) -> str:
    """What another T does to the samples, in one line."""
    packed = before.task == "causal"
    rest = "the rest of the epoch is cut anew, nothing repeats" if packed else "rows are cut at another length"
    longer = longer_than_known(after)
    return f"T {before.seq_len} -> {after.seq_len}: other data: {rest}{f'; {longer}' if longer else ''}"


def describe_split(before: Settings, after: Settings) -> str:
    """What an edit does to the effective batch, in one line; if it changes, with the nearest splits
    that would keep it."""
    old, new = before.effective_batch, after.effective_batch
    tokens = ""
    if before.seq_len != after.seq_len:
        tokens = f", tokens per update {effective_change(old * before.seq_len, new * after.seq_len)}"
    if old == new and tokens:
        return f"effective batch {old} -> {new}{tokens}: changes training"
    if old == new:
        effect = "training is unchanged" if training_unchanged(before, after) else "the same samples per update"
        return f"effective batch {old} -> {new}: {effect}"
    pairs = ", ".join(f"{b} x {a}" for b, a in nearest_splits(old, after.world_size, after.batch))
    hint = f"; to keep {old}: {pairs} (batch x accumulation)" if pairs else ""
    return f"effective batch {effective_change(old, new)}{tokens}: changes training{hint}"


def describe_length(
    before: Settings, after: Settings, updates: int, samples_seen: int | None, total_updates: int | None
) -> str | None:
    """What another effective batch, or another length, does to the end of a run that goes on after
    so many updates and samples, in one line: a run keeps its number of samples unless another one
    is asked for. None if nothing, or if the end is not known.
    """
    old, new = before.effective_batch, after.effective_batch
    if (before.target_samples, before.epochs) != (after.target_samples, after.epochs):
        return _other_length(before, after, updates, samples_seen, total_updates)
    if old == new:
        return None
    left = None if total_updates is None else (total_updates - updates) * old
    if before.target_samples and samples_seen is not None and not after.leave_out:
        left = before.target_samples - samples_seen
    if left is None or left <= 0:
        return None
    was, now = math.ceil(left / old), math.ceil(left / new)
    if was == now:
        return None
    return (
        f"the run ends after update {updates + now}, not {updates + was}: it keeps its number of samples "
        f"(updates left: {now} of {new}, not {was} of {old})"
    )


def _other_length(before: Settings, after: Settings, updates: int, seen: int | None, total_updates: int | None) -> str | None:
    """What another number of samples does to the end of the run and to the learning rate."""
    old, new = before.effective_batch, after.effective_batch
    if seen is None:
        return None
    target = before.target_samples or (0 if total_updates is None else seen + (total_updates - updates) * old)
    if before.target_samples and not after.target_samples:
        return f"the run ends after {after.epochs:g} epochs: the schedule of the learning rate has another length, too"
    longer = after.target_samples or round(target * after.epochs / before.epochs)
    if not target or after.leave_out:
        return None
    was = updates + math.ceil(max(0, target - seen) / old) if total_updates is None else total_updates
    now = updates + math.ceil(max(0, longer - seen) / new)
    if was == now:
        return None
    rates = [f"{one.rate_at(seen + new, length):.4g}" for one, length in ((before, target), (after, longer))]
    text = f"the run ends after update {now}, not {was}"
    if rates[0] == rates[1]:
        return f"{text}: the learning rate of update {updates + 1} stays {rates[0]}"
    return f"{text}: the learning rate of update {updates + 1} changes from {rates[0]} to {rates[1]}"


def changes(before: Settings, after: Settings) -> list[str]:
    """What differs, in a few words each, the memory strategy first."""
    old, new = before.split_text, after.split_text
    split = [f"split {old} -> {new}"] if old != new else []
    return [*split, *_effective(before, after), *other_changes(before, after)]


def other_changes(before: Settings, after: Settings, but: Collection[str] = ()) -> list[str]:
    """What differs apart from the split and from the rows in `but`, in a few words each."""
    return _changes([name for name in differing(before, after) if name not in but], before, after)


def edits_text(before: Settings, after: Settings, names: Iterable[str]) -> str:
    """These settings by name: `batch 8 -> 4, accumulation 4 -> 8`; splits of single processes as
    one: `split 8 x 4 x 2 -> 8 x 4 + 4 x 8`."""
    changed = [name for name in names if getattr(before, name) != getattr(after, name)]
    split = []
    if set(changed) & set(SPLIT) and (before.rank_splits or after.rank_splits):
        split = [f"split {before.split_text} -> {after.split_text}"]
        changed = [name for name in changed if name not in SPLIT]
    return ", ".join([*split, *(f"{name} {getattr(before, name)} -> {getattr(after, name)}" for name in changed)])


_NOT_LISTED = ("recipe", "preset", "batch", "accumulation", "rank_splits", "world_size", "target_samples")


def _training_changes(before: Settings, after: Settings) -> list[str]:
    names = [name for name in differing(before, after) if FIELDS[name].changes_training]
    return [*_effective(before, after), *_changes(names, before, after)]


def _effective(before: Settings, after: Settings) -> list[str]:
    old, new = before.effective_batch, after.effective_batch
    return [] if old == new else [f"effective batch {effective_change(old, new)}"]


def _changes(names: Iterable[str], before: Settings, after: Settings) -> list[str]:
    lines = (_change(name, before, after, FIELDS[name].label) for name in names if name not in _NOT_LISTED)
    return list(dict.fromkeys(lines))  # The rows of ZeRO give the same line.


def _change(name: str, before: Settings, after: Settings, label: str | None = None) -> str:
    """One difference, such as `workers 2 -> 0`. Without a label the setting's name is used."""
    old, new = value_of(before, name), value_of(after, name)
    label = name if label is None else label
    if name in ZERO:
        return f"{before.zero.words} -> {after.zero.words}"
    if name == "pin_memory":
        return f"{label} {'where memory allows' if new is None else shown(new)}"
    if name == "lora.targets" and old and new and len(old) != len(new):
        return f"{label} {len(old)} -> {len(new)} modules"
    if name == "warmup_samples":
        return f"{label} {new // after.effective_batch} updates"
    if isinstance(new, bool):
        return f"{label} {shown(new)}"
    if isinstance(new, dict):
        return label
    return f"{label} {shown(old)} -> {shown(new)}"


def assignments_of_new_run(settings: Settings, recipe: Recipe, preset: Preset) -> dict[str, str]:
    """The assignments with which a new run of the recipe and the preset gets these settings, each
    as text. The split, the sequence length, and what differs; without model, data and processes.

    A new run keeps the recipe's number of updates unless it is given another.
    """
    fresh = draft(recipe, preset=preset)
    found = {"batch": settings.batch_text, "accumulation": str(settings.accumulation), "seq_len": str(settings.seq_len)}
    for name in differing(fresh, settings):
        if name in found or name.partition(".")[0] in _OF_THE_PLACE or not FIELDS[name].editable:
            continue
        value = value_of(settings, name)
        if value is not None:
            found[name] = given(value)
    return found


_OF_THE_PLACE = ("model", "data", "python", "gpus", "leave_out", "rank_splits")
"""What another run on another machine has of its own."""


def given(value: Any) -> str:
    """The value of a setting as `--set` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def shown(value: Any) -> str:
    """The value of a setting as people read it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    if value is None:
        return "none"
    return "default" if value == "" else str(value)


def effective_change(old: int, new: int) -> str:
    """`16 -> 18 (+12.5 %)`."""
    return f"{old} -> {new} ({(new - old) / old * 100:+.1f} %)"


def risk(after: Settings, failed: Sequence[Settings]) -> str | None:
    """A warning, in one line, that this run ran out of memory with settings like these; None if
    they need less than each of `failed`, the settings with which it ran out."""
    for one in reversed(failed):
        if after.batch >= one.batch and not saves_memory(after, one, much=after.batch > one.batch):
            split = f"batch {one.batch}{', gradient checkpointing' if one.gradient_checkpointing else ''}"
            same = "the same" if after.batch == one.batch else f"more than that ({after.batch})"
            return f"the run has died of memory with {split}: this is {same}, and saves nothing more"
    return None


Speed = Literal["faster", "about the same", "slower", "much slower"]
_ORDER: tuple[Speed, ...] = ("faster", "about the same", "slower", "much slower")


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """The samples per second that settings give, compared with those that others give."""

    speed: Speed | None
    """None: not known."""
    basis: tuple[str, ...]
    """What it follows from, or why it is not known."""

    @property
    def rank(self) -> int:
        """Its place among others, the fastest first, one that is not known last."""
        return len(_ORDER) if self.speed is None else _ORDER.index(self.speed)

    @property
    def is_slower(self) -> bool:
        """Whether it is known to be."""
        return self.speed in ("slower", "much slower")


def pace(before: Settings, after: Settings) -> Pace:
    """How fast `after` trains compared with `before`, by what is known of the settings that differ;
    nothing is measured."""
    known = dict(_paces(before, after))
    speeds = set(known.values()) - {"about the same"}
    names = differing(before, after)
    unknown = [f"the speed with another {FIELDS[name].label} is not known" for name in names if name in _NOT_PACED]
    if unknown:
        return Pace(speed=None, basis=tuple(unknown))
    if len(speeds) > 1 and "faster" in speeds:
        return Pace(speed=None, basis=("some of the changes make it faster, others slower", *known))
    if not speeds - {"faster"} and (slows := [FIELDS[name].label for name in names if name in _CAN_SLOW]):
        why = f"whether the data still come in time is not known with another value of {', '.join(slows)}"
        return Pace(speed=None, basis=(why,))
    return Pace(
        speed=max(speeds or {"about the same"}, key=_ORDER.index), basis=tuple(known) or ("nothing that it depends on",)
    )


def speed_words(speed: str | None) -> str:
    """A class of speed in a few words."""
    words = {None: "speed not known", "about the same": "about the same speed"}
    return words.get(speed) or str(speed)


_NOT_PACED = (
    *("precision", "optimizer", "method", "task", "model", "data", "device", "compile", "packing", "bf16_residual"),
    *("lora.r", "lora.targets", "loss_chunk", "world_size", "gpus", "rank_splits"),
)
"""What a change of them does to the speed depends on the GPU, the model or the data."""
_CAN_SLOW = ("workers", "host_level")


def _paces(before: Settings, after: Settings) -> Iterator[tuple[str, Speed]]:
    """Each difference that is known to change the speed, and how."""
    old, new = before.zero, after.zero
    if new.offload_parameters != old.offload_parameters:
        if new.offload_parameters:
            yield "all weights come from host memory in every pass", "much slower"
        else:
            yield "the weights stay on the GPU", "faster"
    if new.offload_optimizer != old.offload_optimizer:
        if new.offload_optimizer:
            yield "the optimizer works in host memory", "slower"
        else:
            yield "the optimizer works on the GPU", "faster"
    if (new.stage == 3) != (old.stage == 3) and after.world_size > 1:
        if new.stage == 3:
            yield "the processes gather the weights in every pass", "slower"
        else:
            yield "the processes do not gather weights", "faster"
    if after.gradient_checkpointing != before.gradient_checkpointing:
        if after.gradient_checkpointing:
            yield "activations are computed twice: 20 to 30 % slower", "slower"
        else:
            yield "activations are not computed twice", "faster"
    if after.batch < before.batch:
        yield "smaller micro-batches: 5 to 15 % slower", "slower"
    elif after.batch > before.batch:
        yield "larger micro-batches: little faster, if at all", "about the same"
    if after.seq_len != before.seq_len:
        if after.seq_len < before.seq_len:
            yield "a shorter sample takes less time", "faster"
        else:
            yield "a longer sample takes more time", "slower"


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What a preset would do to a run: kept (its memory strategy only) and whole (with its guide's
    values too)."""

    preset: Preset
    kept: Settings
    """The settings after a switch in a run in progress."""
    whole: Settings
    """The settings of a new run that takes the preset whole."""
    changes: list[str]
    """What a switch changes."""
    whole_changes: list[str]
    """What differs from the present settings if the preset is taken whole."""
    switch: Literal["resumes", "converts", "new run", "refused"]
    switch_whole: Literal["resumes", "converts", "new run", "refused"]
    reason: str
    """The reason for `switch`."""
    reason_whole: str
    pace: Pace
    """Of a switch."""
    risk: str | None = None
    """A warning, in one line, if this run has run out of memory with settings like these."""


def outlook(settings: Settings, preset: Preset, failed: Sequence[Settings] = ()) -> Outlook:
    """Compare one preset with the present settings. `failed`: settings with which the run ran out
    of memory."""
    kept, whole = apply_preset(settings, preset, failed), take_whole(settings, preset)
    switch, reason = _judged(settings, kept)
    switch_whole, reason_whole = _judged(settings, whole)
    beyond = list(_training_changes(kept, whole))
    if switch_whole in ("resumes", "converts") and beyond:
        # The state would fit, but these values are chosen when a run begins.
        switch_whole, reason_whole = "new run", f"other values of training: {', '.join(beyond)}"
    return Outlook(
        preset=preset,
        kept=kept,
        whole=whole,
        changes=changes(settings, kept),
        whole_changes=changes(settings, whole),
        switch=switch,
        switch_whole=switch_whole,
        reason=reason,
        reason_whole=reason_whole,
        pace=pace(settings, kept),
        risk=risk(kept, failed),
    )


def _judged(before: Settings, after: Settings) -> tuple[Literal["resumes", "converts", "new run", "refused"], str]:
    try:
        return compatibility(before, check(after))
    except SettingsError as error:
        return "refused", str(error)
