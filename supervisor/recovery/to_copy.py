"""Commands that a person may copy: advice as data (`to_copy.toml`), never run by memtop."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from memtop.presets.files import PresetFileError, parse
from memtop.supervisor.recovery.situation import to_do
from memtop.supervisor.recovery.values import Remedy

_FILE = Path(__file__).with_name("to_copy.toml")


class ToCopy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    why: str
    commands: tuple[str, ...]


@cache
def commands_to_copy() -> dict[str, ToCopy]:
    """By name: swap, shm, shm_container, memlock, memory_limit, address_space, who_killed."""
    try:
        return msgspec.convert(parse(_FILE), dict[str, ToCopy])
    except msgspec.ValidationError as error:
        raise PresetFileError(f"{_FILE}: {error}") from None


def copied(name: str) -> Remedy:
    """The advice of that name as a remedy that only a person can carry out."""
    advice = commands_to_copy()[name]
    return to_do(name, advice.title, advice.why, "\n".join(advice.commands))
