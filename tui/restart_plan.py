"""From the fields of the restart form to the change to send, or to the first error. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memtop.presets import SettingsError, edit_settings
from memtop.presets.comparison import compatibility, describe_cut, describe_split, other_changes, risk
from memtop.presets.edits import is_for_each
from memtop.presets.fields import ZERO, can_change_live
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.run import explain
from memtop.supervisor.wire import Change, Checkpoint, Phase, RunState

NUMBER_FIELDS = ("batch", "accumulation", "seq_len")


@dataclass(frozen=True)
class RestartPlan:
    """The judged form. Exactly one of `change` and `problem` is set."""

    change: Change | None
    after: Settings | None
    problem: str | None
    wrong_field: str | None
    lines: tuple[str, ...]
    """The consequences: effective batch, data."""


def restart_plan(
    before: Settings,
    texts: dict[str, str],
    preset: str,
    failed: Sequence[Settings] = (),
    run: RunState | None = None,
) -> RestartPlan:
    """Judge the form.

    `texts` holds the text of the number fields, `preset` the selected preset, `failed` the settings
    with which the run has run out of memory, and `run` what it has done.
    """
    values: dict[str, str] = {}
    for field in NUMBER_FIELDS:
        text = texts[field].strip().replace(" ", "")
        each = field == "batch" and is_for_each(text)
        # int() would accept "1_0" and digits of other scripts.
        if not each and not (text.isascii() and text.removeprefix("-").isdigit()):
            return _wrong(field, f"{field} {text!r}: must be a whole number")
        values[field] = text if each else str(int(text))
    try:
        base = edit_settings(before, preset=preset if preset != before.preset else None, failed=failed)
        changes = {name: text for name, text in values.items() if text != number_text(base, name)}
        after = edit_settings(base, assignments=changes)
    except SettingsError as error:
        return _wrong(error.field, str(error))
    change = Change(preset=preset if preset != before.preset else None, assignments=changes)
    found = risk(after, failed)
    warning = () if found is None else (f"! {found}",)
    return RestartPlan(change, after, None, None, (*_consequences(before, base, after, run), *warning))


def number_text(settings: Settings, field: str) -> str:
    """The text of a number field; of the batch, one size for each process if they differ."""
    return settings.batch_text if field == "batch" else str(getattr(settings, field))


def _wrong(field: str, problem: str) -> RestartPlan:
    return RestartPlan(None, None, problem, field, ())


def data_consequences(before: Settings, after: Settings) -> tuple[str, ...]:
    """What an edit does to the samples of an update and to their length, in lines."""
    lines = [describe_split(before, after)]
    if after.seq_len != before.seq_len:
        lines.append(describe_cut(before, after))
    return tuple(lines)


_EXPLAINED = (*ZERO, "gradient_checkpointing", "optimizer", "seq_len")
"""Changes that have a line of their own."""


def _consequences(before: Settings, base: Settings, after: Settings, run: RunState | None) -> tuple[str, ...]:
    """`base`: the settings after the preset, `after`: after the typed values, too."""
    if after == before:
        return ("nothing changed: restarts with the same settings",)
    lines = [*data_consequences(before, after)]
    if run is not None and (moved := explain.length_change(before, after, where_it_goes_on(run), run.total_updates)):
        lines.append(moved)
    if base.splits != after.splits and base.preset != before.preset:
        lines.append(f"batch and accumulation stay as typed; preset {after.preset} alone gives {base.split_text}")
    if after.gradient_checkpointing != before.gradient_checkpointing:
        word = "on" if after.gradient_checkpointing else "off"
        lines.append(f"gradient checkpointing {word}: {'less memory, slower' if word == 'on' else 'more memory, faster'}")
    if after.zero != before.zero:
        lines.append(f"{before.zero.words} -> {after.zero.words}: {_zero_words(before, after)}")
    if after.optimizer != before.optimizer:
        lines.append(f"optimizer {before.optimizer} -> {after.optimizer}")
    if others := other_changes(before, after, but=_EXPLAINED):
        lines.append("; ".join(others))
    fit, reason = compatibility(before, after)
    if fit != "resumes":
        lines.append(f"{fit}: {reason}")
    return tuple(lines)


def where_it_goes_on(run: RunState) -> Checkpoint | None:
    """From where the run goes on after a restart: an update in progress is done before it."""
    if not run.alive or run.updates is None or run.settings is None:
        return run.checkpoint
    seen = None if run.samples_seen is None else run.samples_seen + run.settings.effective_batch
    return Checkpoint(path="", updates=run.updates + 1, samples_seen=seen, complete=True)


def _zero_words(before: Settings, after: Settings) -> str:
    if after.zero.offload_optimizer and not before.zero.offload_optimizer:
        return "less GPU memory, more host memory, slower"
    if before.zero.offload_optimizer and not after.zero.offload_optimizer:
        return "more GPU memory, less host memory, faster"
    if after.world_size == 1:
        return "with one process sharding saves nothing"
    return "less memory per GPU" if after.zero.stage > before.zero.stage else "more memory per GPU"


def nothing_left(run: RunState, at: Checkpoint | None) -> str | None:
    """Why a run that is complete cannot be restarted with its length; None if it is not. `at`: from
    where it goes on."""
    total, by_memtop = run.total_updates, run.program is None or run.program.profile is None
    if run.state is not Phase.FINISHED or at is None or not at.complete or at.updates is None or total is None:
        return None
    done = at.updates if run.settings is not None else max(at.updates, run.updates or 0)
    return explain.nothing_left(run.name, done, total, by_memtop=by_memtop) if done >= total else None


def nothing_left_with(run: RunState, settings: Settings | None) -> str | None:
    """Why these settings leave nothing to train in a run of a recipe: it is complete, and they have
    its length. None if that is not so, or not known."""
    now = run.settings
    if now is None or settings is None or (settings.target_samples, settings.epochs) != (now.target_samples, now.epochs):
        return None
    return nothing_left(run, run.checkpoint)


def where_it_resumes(run: RunState) -> str:
    """One sentence on the update from which the restarted run resumes."""
    checkpoint = run.checkpoint
    if (complete := nothing_left(run, checkpoint)) is not None:
        return complete
    if run.alive:
        return "the run finishes its update, saves and resumes there; no sample is repeated or skipped"
    if checkpoint is None:
        return "starts at the first update: nothing has been saved yet"
    if not checkpoint.complete:
        return explain.none_whole(checkpoint)
    seen = units.count(checkpoint.samples_seen)
    return f"resumes at update {units.count(checkpoint.updates)}, {seen} samples; no sample is repeated or skipped"


def not_live_yet(before: Settings, after: Settings, run: RunState) -> bool:
    """Whether these settings could be taken up without a stop if the first update were done."""
    return run.alive and run.state is Phase.STARTING and after != before and can_change_live(before, after)


def can_be_live(before: Settings, after: Settings, run: RunState) -> bool:
    """Whether the running trainer can take these settings up at its next update."""
    if run.state is not Phase.TRAINING or not run.alive or after == before:
        return False
    return can_change_live(before, after)
