"""What `memtop plan` proposes besides the settings that were asked for, and the options that give
it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from memtop.cli.plan_host import PlannedHost
from memtop.cli.plan_question import Added, Question, added, settings_of
from memtop.presets import Settings, load_presets
from memtop.presets.comparison import other_changes, outlook
from memtop.presets.fields import FIELDS
from memtop.presets.files import usable
from memtop.presets.schema import Zero
from memtop.supervisor.errors import UsageError
from memtop.supervisor.plan import Need, Way
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


def others(settings: Settings, *, own: bool) -> Iterator[Settings]:
    """Settings that need less memory, or work faster, than these. `own`: of the user's program,
    which has no presets."""
    if not settings.gradient_checkpointing:
        yield replace(settings, gradient_checkpointing=True)
    for preset in () if own else usable(load_presets(), settings.recipe).values():
        look = outlook(settings, preset)
        if look.switch != "refused":
            yield look.kept
    if settings.seq_len > 1:
        yield replace(settings, seq_len=settings.seq_len // 2)
    if settings.method == "lora":
        # ZeRO-3 cannot shard a base in 4 bits.
        yield replace(settings, method="qlora", preset="standard", zero=Zero())
