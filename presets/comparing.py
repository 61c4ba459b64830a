"""What separates two settings, and what that means for a run: does its state fit, is something lost, is it another run?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from memtop.presets.arithmetic import nearest_splits
from memtop.presets.checking import SettingsError, check
from memtop.presets.risks import risk
from memtop.presets.schema import Lora, Optimizer, Preset, Settings
from memtop.presets.strategies import apply_preset, take_whole

Fit = Literal["resumes", "converts", "new run"]

_NEW_RUN = {
    "task": "the training of another task",
    "model": "another model: its state does not fit",
    "data": "other data: the position in it means nothing there",
    "seed": "another order of the samples",
}
_EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")


def compatibility(before: Settings, after: Settings) -> tuple[Fit, str]:
    """Whether the state of a run with `before` goes on with `after`, and why (not), or what is lost."""
    if before.method != after.method:
        return "new run", f"method {before.method} -> {after.method}: other weights are trained"
    reason = _other_adapters(before.lora, after.lora)
    if reason:
        return "new run", reason
    for field, words in _NEW_RUN.items():
        if getattr(before, field) != getattr(after, field):
            return "new run", f"{field}: {words}"
    lost = _lost_moments(before.optimizer, after.optimizer)
    if lost:
        return "converts", f"optimizer {before.optimizer} -> {after.optimizer}: {lost}"
    notes = list(_notes(before, after))
    return "resumes", "; ".join(notes) or "same state, same samples"


def _other_adapters(before: Lora | None, after: Lora | None) -> str | None:
    if before is None or after is None:
        return None if before is after else "adapters appear or vanish: other weights are trained"
    if before.r != after.r:
        return f"lora.r {before.r} -> {after.r}: adapters of another shape"
    if set(before.targets) != set(after.targets):
        return f"lora.targets {','.join(before.targets)} -> {','.join(after.targets)}: other layers have adapters"
    return None


def _lost_moments(before: Optimizer, after: Optimizer) -> str | None:
    """What a change of the optimizer's kind does to its moments; None where nothing is lost."""
    kinds = [("8-bit" if one in _EIGHT_BIT else "adafactor" if one == "adafactor" else "fp32") for one in (before, after)]
    if kinds[0] == kinds[1]:
        return None
    return {
        ("fp32", "8-bit"): "moments are rounded to 8 bits",
        ("8-bit", "fp32"): "moments go on from 8-bit values",
        ("fp32", "adafactor"): "second moments are reduced to row and column means, first moments are dropped",
        ("8-bit", "adafactor"): "second moments are reduced to row and column means, first moments are dropped",
        ("adafactor", "fp32"): "second moments are rebuilt from row and column means, first moments begin at 0",
        ("adafactor", "8-bit"): "second moments are rebuilt from row and column means in 8 bits, first moments begin at 0",
    }[kinds[0], kinds[1]]


def _notes(before: Settings, after: Settings) -> Iterator[str]:
    if before.seq_len != after.seq_len:
        packed = before.task == "causal"
        rest = "the rest of the epoch is cut anew, nothing repeats" if packed else "rows are cut at another length"
        yield f"T {before.seq_len} -> {after.seq_len}: other data: {rest}"
    if before.effective_batch != after.effective_batch:
        yield describe_split(before, after)
    if before.lora is not None and after.lora is not None and before.lora.alpha != after.lora.alpha:
        scales = f"{before.lora.alpha / before.lora.r:g} -> {after.lora.alpha / after.lora.r:g}"
        yield f"adapter scale alpha / r {scales}: the adapters' effect jumps"


def describe_split(before: Settings, after: Settings) -> str:
    """One line on what an edit does to the effective batch, with the nearest exact pairs where it breaks it."""
    old, new = before.effective_batch, after.effective_batch
    if old == new:
        return f"effective batch {old} -> {new}: same mathematics"
    pairs = ", ".join(f"{b} x {a}" for b, a in nearest_splits(old, after.world_size, after.batch))
    hint = f"; exact pairs: {pairs}" if pairs else ""
    return f"effective batch {old} -> {new} ({(new - old) / old:+.1%}): other mathematics{hint}"


def changes(before: Settings, after: Settings) -> list[str]:
    """What differs, each in a few words, the memory strategy first."""
    return [*_strategy_changes(before, after), *_training_changes(before, after), *_keeping_changes(before, after)]


def _strategy_changes(before: Settings, after: Settings) -> Iterator[str]:
    old, new = (f"{s.batch} x {s.accumulation} x {s.world_size}" for s in (before, after))
    if old != new:
        yield f"split {old} -> {new}"
    if before.zero != after.zero:
        yield f"{before.zero} -> {after.zero}"
    if before.gradient_checkpointing != after.gradient_checkpointing:
        yield f"checkpointing {'on' if after.gradient_checkpointing else 'off'}"
    if before.workers != after.workers:
        yield f"workers {before.workers} -> {after.workers}"
    if before.host_level != after.host_level:
        yield f"host memory {before.host_level} -> {after.host_level}"
    if before.allocator != after.allocator:
        yield f"allocator {before.allocator or 'as torch has it'} -> {after.allocator or 'as torch has it'}"
    if before.pin_memory != after.pin_memory:
        words = {True: "on", False: "off", None: "where memory allows"}
        yield f"pinned buffers {words[after.pin_memory]}"
    if before.optimizer != after.optimizer:
        yield f"optimizer {before.optimizer} -> {after.optimizer}"


def _training_changes(before: Settings, after: Settings) -> Iterator[str]:
    if before.effective_batch != after.effective_batch:
        yield f"effective batch {effective_change(before.effective_batch, after.effective_batch)}"
    names = {"seq_len": "T", "learning_rate": "learning rate", "epochs": "epochs", "precision": "precision"}
    for field, name in names.items():
        old, new = getattr(before, field), getattr(after, field)
        if old != new:
            yield f"{name} {old:g} -> {new:g}" if isinstance(new, float) else f"{name} {old} -> {new}"
    if before.warmup_samples != after.warmup_samples:
        yield f"warm-up {after.warmup_samples // after.effective_batch} updates"
    if before.lora is not None and after.lora is not None and before.lora != after.lora:
        yield f"LoRA r {before.lora.r} -> {after.lora.r}, alpha {before.lora.alpha} -> {after.lora.alpha}"
        if len(before.lora.targets) != len(after.lora.targets):
            yield f"{len(before.lora.targets)} -> {len(after.lora.targets)} target modules"


def _keeping_changes(before: Settings, after: Settings) -> Iterator[str]:
    for field in ("save_every", "eval_every", "eval_batch", "save_total_limit", "load_best_at_end"):
        if getattr(before, field) != getattr(after, field):
            yield f"{field} {str(getattr(before, field)).lower()} -> {str(getattr(after, field)).lower()}"


def effective_change(old: int, new: int) -> str:
    """`16 -> 18 (+12.5 %)`."""
    return f"{old} -> {new} ({(new - old) / old * 100:+.1f} %)"


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What a preset would make of a run with given settings: kept (its strategy only) and whole (with its guide)."""

    preset: Preset
    kept: Settings
    """After a switch in a run in progress."""
    whole: Settings
    """What a new run would have."""
    changes: list[str]
    """What a switch changes."""
    whole_changes: list[str]
    """What differs from the present settings where the preset is taken whole."""
    switch: Literal["resumes", "converts", "new run", "refused"]
    switch_whole: Literal["resumes", "converts", "new run", "refused"]
    reason: str
    """Why the switch is what it is."""
    reason_whole: str
    risk: str | None = None
    """That a switch leads to what has died of memory in this run, in one line."""

    @property
    def effective_text(self) -> str:
        """The effective batch after a switch, with the guide's beside it where that differs: `16 (guide: 18, +12.5 %)`."""
        kept, guide = self.kept.effective_batch, self.whole.effective_batch
        return str(kept) if kept == guide else f"{kept} (guide: {guide}, {(guide - kept) / kept * 100:+.1f} %)"


def outlook(settings: Settings, preset: Preset, failed: Sequence[Settings] = ()) -> Outlook:
    """Judge one preset against the present settings. `failed`: those with which the run has died of memory."""
    kept, whole = apply_preset(settings, preset, failed), take_whole(settings, preset)
    switch, reason = _judged(settings, kept)
    switch_whole, reason_whole = _judged(settings, whole)
    beyond = list(_training_changes(kept, whole))
    if switch_whole in ("resumes", "converts") and beyond:
        # Its state would fit, but these values are set when a run begins: to take them all is to begin another.
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
        risk=risk(kept, failed),
    )


def _judged(before: Settings, after: Settings) -> tuple[Literal["resumes", "converts", "new run", "refused"], str]:
    try:
        return compatibility(before, check(after))
    except SettingsError as error:
        return "refused", str(error)
