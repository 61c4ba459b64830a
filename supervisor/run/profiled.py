"""How a program with a profile is started: its command, new files, and what memtop then knows of
it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from memtop.presets.program_profiles import KNOB_NAMES, ByFlag, ProgramProfile
from memtop.supervisor.errors import UsageError
from memtop.supervisor.profile.command import LAUNCHERS, PYTHON, last, parsed
from memtop.supervisor.profile.detection import starter_of
from memtop.supervisor.profile.reading import Changed, ProgramFiles, Reading, changed, read
from memtop.supervisor.program import Knob, Knobs
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.processes.attempt import Invocation
from memtop.supervisor.run.processes.environment import SOURCES_VARIABLE, START_VARIABLE
from memtop.supervisor.run.record.folder import RunSpec
from memtop.supervisor.wire import Checkpoint

_OF_RESTART = "memtop restart"


def program_of(profile: ProgramProfile, spec: RunSpec) -> ProgramFiles:
    return ProgramFiles(spec.command, spec.cwd, starter_of(profile, spec.command))


def grip_of(spec: RunSpec, run: Path, knobs: dict[str, Any], known: Grip | None) -> Grip | None:
    """What the command and the files of the program say, with these settings of memtop; None
    without a profile."""
    profile = spec.profile
    if profile is None:
        return None
    program = program_of(profile, spec)
    reading = read(profile, program, str(run))
    processes = reading.processes or (known.processes if known is not None else 1)
    given: dict[str, Knob] = {
        name: Knob(value=value, name=_name(reading, name), source=_OF_RESTART) for name, value in knobs.items()
    }
    found: dict[str, Knob] = {name: knob for name in KNOB_NAMES if (knob := getattr(reading.knobs, name)) is not None}
    used: dict[str, Any] = found | given
    numbers: dict[str, Any] = {name: knob.value for name, knob in used.items()}
    return Grip(
        profile=profile,
        why=spec.profile_why,
        cwd=spec.cwd,
        values=reading.values | {name: str(value) for name, value in numbers.items()},
        fixed=reading.fixed,
        knobs=Knobs(**used),
        since=None if _continues(profile, program) else spec.created,
        processes=processes,
        resumes=known.resumes if known is not None else None,
        seen=known.seen if known is not None else (),
        **numbers,
    )


def _name(reading: Reading, knob: str) -> str | None:
    known: Knob | None = getattr(reading.knobs, knob)
    return known.name if known is not None else None


def _continues(profile: ProgramProfile, program: ProgramFiles) -> bool:
    """Whether the user's own command continues from a checkpoint that is there already."""
    if profile.resume.how != "flag" or program.command is None:
        return profile.resume.how == "automatic"
    for word in profile.resume.words:
        name, _, value = word.partition("=")
        if name.startswith("-") or value:
            given = last(program.command.words, ByFlag(names=(name,)), program.command.begins, program.script)
            if given is None and name not in program.command.arguments:
                return False
            if given is not None and value and "{" not in value and given.value != value:
                return False
    return True


def prepared(grip: Grip, spec: RunSpec, run: Path, attempt: Path, knobs: dict[str, Any], at: Checkpoint | None) -> Invocation:
    """How the program is started with these settings, from this checkpoint. UsageError if that is
    impossible."""
    if grip.profile is None or (not knobs and at is None):
        return Invocation(command=spec.command)
    program = program_of(grip.profile, spec)
    try:
        path = at.path if at is not None else None
        new: Changed = changed(grip.profile, program, knobs, attempt, checkpoint=path, run=str(run))
    except UsageError as error:
        raise UsageError(f"{error} (profile {grip.profile.name})") from None
    environment = {SOURCES_VARIABLE: msgspec.json.encode(new.imports).decode()} if new.imports else {}
    if at is not None and at.updates:
        environment[START_VARIABLE] = str(at.updates)
    return Invocation(command=new.words, files=new.files, environment=environment)


def python_of(spec: RunSpec) -> str | None:
    """The program's own Python, as its command names it; None if that cannot be seen."""
    command = parsed(spec.command)
    for word in spec.command[: command.begins] if command is not None else ():
        name = word.rpartition("/")[2]
        if PYTHON.fullmatch(name):
            # A path is relative to the program's folder.
            return shutil.which(str(Path(spec.cwd, word)) if "/" in word else word)
        if name in LAUNCHERS and (found := shutil.which(word)) is not None:
            beside = Path(found).resolve().parent / "python"
            return str(beside) if beside.exists() else None
    return None
