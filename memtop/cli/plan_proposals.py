"""What `memtop plan` proposes besides the settings that were asked for, and the options that give
it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from memtop.cli.plan_host import PlannedHost
from memtop.cli.plan_question import METHODS, Added, Question, added, settings_of
from memtop.presets import Settings, load_presets
from memtop.presets.comparison import other_changes, outlook
from memtop.presets.fields import FIELDS
from memtop.presets.files import usable
from memtop.presets.schema import Zero
from memtop.supervisor.errors import UsageError
from memtop.supervisor.plan import Need, PlannedPeak, Way, halvings
from memtop.supervisor.profile.trainer_command import TrainerCommand, added_options, trainer_command


class OwnProgram(NamedTuple):
    """A command of the user's, and what it trains."""

    words: tuple[str, ...]
    read: TrainerCommand
    given: Mapping[str, Any]
    """What the options of the plan give in place of the command's, as `trainer_command` takes
    it."""
    values: Mapping[str, str]
    """The settings among them."""


class Proposal(NamedTuple):
    """Other settings, what they need of the host's memory, and the options that give them."""

    way: Way
    host: PlannedHost
    options: Sequence[str] | None
    """To add to those of the plan, or to the command; None: no options give them."""


class Largest(NamedTuple):
    """The settings with the largest safe batch that keeps the effective batch."""

    settings: Settings
    need: Need
    options: Sequence[str] | None
    """As in `Proposal`."""


def largest(settings: Settings, need: Need, question: Question, program: OwnProgram | None) -> Largest:
    found = options_of(settings, question, program)
    return Largest(settings, need, None if found is None else found.options)


def proposed(way: Way, host: PlannedHost, question: Question, program: OwnProgram | None) -> Proposal:
    found = options_of(way.settings, question, program)
    if found is None:
        return Proposal(way, host, None)
    return Proposal(replace(way, settings=found.settings), host, found.options)


def options_of(wanted: Settings, question: Question, program: OwnProgram | None) -> Added | None:
    """The options that give these settings; None if none do."""
    return added(question, wanted) if program is None else _added_to_command(wanted, question, program)


def _added_to_command(wanted: Settings, question: Question, program: OwnProgram) -> Added | None:
    now, _ = settings_of(question)
    words = added_options(program.words, str(Path.cwd()), now, wanted)
    if words is None:
        return None
    try:
        read = trainer_command((*program.words, *words), str(Path.cwd()), **program.given)
        after, _ = settings_of(question._replace(values={**read.values, **program.values}))
    except UsageError:
        return None
    return Added(words, after) if after == wanted else None


def of_named_preset(question: Question, settings: Settings) -> str:
    """What `--preset NAME` would change of settings for which memtop chose that preset: it takes
    the values of the guide, too, and has its own batch. Empty: nothing that changes training or its
    memory."""
    try:
        whole, _ = settings_of(question._replace(preset=settings.preset))
    except UsageError:
        return ""  # the preset does not go with the user's values if it is taken whole
    minor = [name for name, field in FIELDS.items() if not field.changes_training and field.shapes != "peak"]
    split = [] if settings.split_text == whole.split_text else [f"split {settings.split_text} -> {whole.split_text}"]
    return ", ".join([*split, *other_changes(settings, whole, but=minor)])


class Instead(NamedTuple):
    """Another method of which some settings fit GPU and host."""

    settings: Settings
    peak: PlannedPeak
    host_bytes: int
    options: Sequence[str]
    """All of a plan for it, but for those of the machine."""


def other_methods(question: Question, settings: Settings) -> Iterator[Question]:
    """The same plan with each method that trains less of the model."""
    methods = list(METHODS)
    if question.model is not None and settings.task != "seq2seq":
        for method in methods[methods.index(settings.method) + 1 :]:
            yield question._replace(recipe=None, method=method, preset=None)


def tried_in_vain(settings: Settings, *, estimated: bool) -> list[str]:
    """What `others` tries if these settings do not fit, in words. `estimated`: whether there is an
    estimate of this model."""
    found = ["smaller batches", "gradient checkpointing", "the presets"]
    if estimated and settings.optimizer in _FP32_MOMENTS:
        found.append("8-bit AdamW and Adafactor")
    lengths = halvings(settings.seq_len)[: None if estimated else 1]
    return [*found, f"T down to {lengths[-1]}"] if lengths else found


Fits = Callable[[Settings], bool]
"""Whether a batch that keeps the effective batch is foreseen to be safe, and the host has enough
memory."""


def others(settings: Settings, question: Question, fits: Fits, *, own: bool) -> Iterator[Settings]:
    """Settings that need less memory, or work faster, than these. If these do not fit, more is
    tried that changes training. `own`: of the user's program, which has no presets."""
    kept = list(_other_strategies(settings, own=own))
    yield from kept
    # ZeRO-3 cannot shard a base in 4 bits.
    quantized = [replace(settings, method="qlora", preset="standard", zero=Zero())] if settings.method == "lora" else []
    lengths = halvings(settings.seq_len)
    if fits(settings):
        yield from (replace(settings, seq_len=length) for length in lengths[:1])
        yield from quantized
        return
    if not own:
        yield from _named_presets(settings, question)
    yield from quantized
    eight_bit: list[Settings] = []
    if settings.optimizer in _FP32_MOMENTS:
        # ZeRO shards neither 8-bit optimizers nor Adafactor.
        plain = replace(settings, zero=Zero())
        if settings.zero.stage and not own:
            plain = outlook(settings, load_presets()["standard"]).kept
        bases = {True: replace(plain, gradient_checkpointing=True), plain.gradient_checkpointing: plain}.values()
        eight_bit = [replace(one, optimizer="adamw_8bit") for one in bases]
        yield from eight_bit
        if not any(map(fits, eight_bit)):
            yield from (replace(one, optimizer="adafactor") for one in bases)
    # The longest samples with which anything fits, and those with which the present strategy does.
    strategies = [settings, *_unlike(kept), *eight_bit, *quantized]
    left = strategies[:1] if any(map(fits, strategies)) else strategies
    for length in lengths:
        possible = [one for one in (replace(one, seq_len=length) for one in left) if fits(one)]
        yield from possible
        if possible and possible[0] == replace(settings, seq_len=length):
            return
        left = strategies[:1] if possible else left


_FP32_MOMENTS = ("adamw", "cpu_adam")
"""Optimizers with two moments in fp32."""


def _other_strategies(settings: Settings, *, own: bool) -> Iterator[Settings]:
    """The same training with another memory strategy."""
    if not settings.gradient_checkpointing:
        yield replace(settings, gradient_checkpointing=True)
    for preset in () if own else usable(load_presets(), settings.recipe).values():
        look = outlook(settings, preset)
        if look.switch != "refused":
            yield look.kept


def _named_presets(settings: Settings, question: Question) -> Iterator[Settings]:
    """The presets that are meant for the recipe alone, with the values of their guides."""
    for name, preset in usable(load_presets(), settings.recipe).items():
        if preset.recipes:
            try:
                yield settings_of(question._replace(preset=name))[0]
            except UsageError:
                continue  # it does not go with the user's values


def _unlike(strategies: Iterable[Settings]) -> list[Settings]:
    """One of those that are alike on the GPU."""
    return list({(one.zero, one.gradient_checkpointing): one for one in strategies}.values())
