"""What memtop knows about a program that is not its own trainer, and how it knows it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated

import msgspec
from msgspec import Meta

# Programs report these values, so they have bounds.
_Whole = Annotated[int, Meta(ge=0, le=1 << 53)]
_Name = Annotated[str, Meta(max_length=1000)]


class Knob(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of a program that is not memtop's trainer."""

    value: _Whole | None = None
    name: _Name | None = None
    """What the program calls it: `per_device_train_batch_size`."""
    source: _Name | None = None
    """Where the value was found: `TrainingArguments`."""


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of such a program that is on or off."""

    value: bool | None = None
    name: _Name | None = None
    source: _Name | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of such a program that is a word."""

    value: _Name | None = None
    name: _Name | None = None
    source: _Name | None = None


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a program that memtop knows; None for those that it does not know."""

    batch: Knob | None = None
    """Samples of one process in one forward pass."""
    accumulation: Knob | None = None
    seq_len: Knob | None = None
    eval_batch: Knob | None = None
    gradient_checkpointing: Switch | None = None
    optimizer: Choice | None = None


def known(knobs: Knobs) -> dict[str, int | bool | str] | None:
    """The values of the known settings, by the names of `--set`; None if none is known."""
    found = ((name, getattr(knobs, name)) for name in knobs.__struct_fields__)
    return {name: knob.value for name, knob in found if knob is not None and knob.value is not None} or None


def first_known(*knobs: Knobs) -> Knobs:
    """Each setting from the first that knows it."""
    names = Knobs.__struct_fields__
    return Knobs(**{name: next((knob for one in knobs if (knob := getattr(one, name)) is not None), None) for name in names})


def name_of(command: Sequence[str]) -> str:
    """What a person calls this program: its script, after interpreters and launchers; else what it
    starts first."""
    script = next((word for word in command if word.endswith((".py", ".sh"))), None)
    modules = [word for before, word in itertools.pairwise(command) if before == "-m"]
    if script is None and modules:
        return modules[-1]
    return PurePosixPath(script or command[0]).name


class ProgramCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint that a program has reported."""

    path: str
    update: int | None = None
    complete: bool = False
    """Whether what the program writes last is there and can be read."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What memtop knows about a program that is not its own trainer, and how."""

    grip: str | None = None
    """hooks (the framework calls memtop's callback) | profile | output | optimizer (memtop counts
    the steps of a torch optimizer). None before the first report."""
    profile: str | None = None
    why: str | None = None
    """Why this grip, in one line."""
    knobs: Knobs = Knobs()
    resumes: bool | None = None
    """Whether the program continues from its checkpoint when it is started again. None if that is
    not known."""
    checkpoint: ProgramCheckpoint | None = None


def start_is_known(program: Program | None, recorded: int | None) -> bool:
    """Whether a later attempt of the program began after this update. A program that may have
    resumed by itself counts from 0 for memtop, or has printed its first line somewhat later."""
    grip = None if program is None else program.grip
    return grip in ("hooks", "profile") or (grip != "output" and recorded != 0)
