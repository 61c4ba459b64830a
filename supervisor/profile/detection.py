"""Which profile fits a command, and why."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from memtop.presets.program_profiles import Detect, ProgramProfile
from memtop.supervisor.profile import python_source
from memtop.supervisor.profile.command import started_by
from memtop.supervisor.profile.reading import ProgramFiles, Read, text_of


class ProfileMatch(NamedTuple):
    """A profile that fits."""

    profile: ProgramProfile
    why: str


def starter_of(profile: ProgramProfile, words: tuple[str, ...]) -> str | None:
    """The words that start a program of this profile, if the command has them: `tune run`."""
    return next((one for one in profile.detect.commands if started_by(words, one) is not None), None)


def propose(profiles: Iterable[ProgramProfile], words: tuple[str, ...], cwd: str, read: Read = text_of) -> ProfileMatch | None:
    """The profile that fits best: the one with the most conditions, of several the last. None if
    none fits."""
    found: list[tuple[int, int, ProfileMatch]] = []
    script = ProgramFiles(words, cwd, read=read)
    for place, profile in enumerate(profiles):
        starter = starter_of(profile, words)
        program = script if starter is None else ProgramFiles(words, cwd, starter, read)
        reasons = _reasons(profile.detect, program, starter)
        if reasons is not None:
            found.append((_conditions(profile.detect), place, ProfileMatch(profile, ", ".join(reasons))))
    return max(found, key=lambda one: one[:2])[2] if found else None


def _conditions(detect: Detect) -> int:
    texts = [*detect.imports, *detect.texts, *detect.texts_any[:1], *detect.commands[:1]]
    return len(texts) + sum(1 + len(inside) for inside in detect.beside.values())


def _reasons(detect: Detect, program: ProgramFiles, starter: str | None) -> list[str] | None:
    """Why it fits, in words; None if it does not."""
    if program.command is None or (detect.commands and starter is None):
        return None
    reasons = [] if starter is None else [f"`{starter}` starts it"]
    if detect.scripts:
        name = program.command.module or Path(program.command.script or "").name
        if not any(fnmatch.fnmatch(name, one) for one in detect.scripts):
            return None
    shown = program.command.script or program.command.module or ""
    if detect.imports or detect.imports_not:
        imported = python_source.imports_of(program.tree) if program.tree is not None else set()
        if not set(detect.imports) <= imported or imported & set(detect.imports_not):
            return None
        if detect.imports:
            reasons.append(f"{shown} imports {_list(detect.imports)}")
    if not all(text in program.script for text in detect.texts):
        return None
    some = [text for text in detect.texts_any if text in program.script]
    if detect.texts_any and not some:
        return None
    if texts := (*detect.texts, *some[:1]):
        reasons.append(f"{shown} contains {_list(texts)}")
    for name, texts in detect.beside.items():
        text = program.text(program.folder / name)
        if text is None or not all(one in text for one in texts):
            return None
        reasons.append(f"{name} is beside it")
    return reasons or [f"its script is {shown}"]


def _list(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
