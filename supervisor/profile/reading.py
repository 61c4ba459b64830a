"""The settings of a program with a profile, read from its command and its files, and the command
and files with which it is started with other settings."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.presets.checks import did_you_mean
from memtop.presets.program_profiles import (
    KNOB_NAMES,
    ByArgparse,
    ByFile,
    ByFlag,
    ByPython,
    ByScript,
    KnobRule,
    ProgramProfile,
    Setting,
    Way,
    filled,
)
from memtop.supervisor.errors import UsageError
from memtop.supervisor.profile import config_text, python_source
from memtop.supervisor.profile.command import Command, last, parsed, started_by, with_option, with_words
from memtop.supervisor.profile.config_text import ConfigTextError
from memtop.supervisor.program import Knob, Knobs

_LARGEST = 8 << 20
"""Bytes of a script or a configuration file that memtop reads."""
Read = Callable[[Path], str | None]


def text_of(path: Path) -> str | None:
    """The text of a file; None if it cannot be read."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def no_such_file(words: str, file: str, cwd: str = "") -> UsageError:
    """`words`: the command up to this file, which it names and which is not there."""
    path = Path(cwd).absolute() / file
    kind = "*.py" if path.suffix == ".py" else "*"
    near = [str(Path(file).parent / one.name) for one in files_in(path.parent) if one.match(kind) and _is_offered(one)]
    return UsageError(f"COMMAND {words}: no such file; looked for {path}{did_you_mean(file, near)}")


def _is_offered(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


def files_in(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []  # it is not there, or may not be read: it has no names to propose


class FoundValue(msgspec.Struct, frozen=True, kw_only=True):
    """Where a value was found."""

    value: str
    source: str
    name: str


class ProgramFiles:
    """A command, and the files that it names."""

    def __init__(self, words: tuple[str, ...], cwd: str, starter: str | None = None, read: Read = text_of) -> None:
        """`starter`: the words that start it, if it is no script: `tune run`."""
        self.cwd = Path(cwd)
        self.command: Command | None = parsed(words) if starter is None else started_by(words, starter)
        self._read = read
        self._texts: dict[Path, str | None] = {}
        self.script_path = self._script()
        self.script = (self.text(self.script_path) if self.script_path is not None else None) or ""
        self.tree = python_source.tree_of(self.script)

    def text(self, path: Path) -> str | None:
        if path not in self._texts:
            self._texts[path] = self._read(path)
        return self._texts[path]

    @property
    def folder(self) -> Path:
        """The script's."""
        return self.cwd if self.script_path is None else self.script_path.parent

    def _script(self) -> Path | None:
        command = self.command
        if command is None:
            return None
        if command.script is not None:
            return self.cwd / command.script
        if command.module is None:
            return None
        path = self.cwd.joinpath(*command.module.split("."))
        return path / "__main__.py" if (path / "__main__.py").is_file() else path.with_suffix(".py")

    def named_file(self, way: ByFile | ByPython) -> tuple[int, str, Path] | None:
        """The file in which this way looks: the index of the word that names it (-1: none does),
        its text in that word, and its path."""
        if isinstance(way, ByPython) and "*" not in way.file:
            path = filled(way.file, {"script": str(self.folder)})
            return None if path is None else (-1, path, self.cwd / path)
        assert self.command is not None
        words, begins = self.command.words, self.command.begins
        if isinstance(way, ByFile) and way.flags:
            given = last(words, ByFlag(names=way.flags), begins)
            return None if given is None else (given.at, given.value, self.cwd / given.value)
        pattern = way.file if isinstance(way, ByPython) else "*.json" if way.kind == "json" else "*.y*ml"
        for at in range(len(words) - 1, begins - 1, -1):
            word = words[at]
            is_value = at > begins and words[at - 1].startswith("--") and "=" not in words[at - 1]
            if not word.startswith("-") and "=" not in word and not is_value and fnmatch.fnmatch(word, pattern):
                return at, word, self.cwd / word
        return None

    def find(self, setting: Setting) -> FoundValue | None:
        """The value of a setting, and where it was found."""
        for way in setting.ways:
            if (found := self._by(way)) is not None:
                return found
        if setting.default is not None:
            return FoundValue(value=str(setting.default), source="default of the profile", name=_name_of(setting))
        return None

    def _by(self, way: Way) -> FoundValue | None:
        name = _first_name(way)
        match way:
            case ByFlag():
                given = None if self.command is None else last(self.command.words, way, self.command.begins, self.script)
                return None if given is None else FoundValue(value=given.value, source="command", name=name)
            case ByArgparse(names=names):
                value = None if self.tree is None else python_source.option_default(self.tree, names)
                where = self._shown(self.script_path)
            case ByScript(name=variable):
                value = None if self.tree is None else python_source.variable(self.tree, variable)
                where = self._shown(self.script_path)
            case ByFile() | ByPython():
                named = self.named_file(way)
                text = None if named is None else self.text(named[2])
                if named is None or text is None:
                    return None
                value, where = _in_text(text, way), self._shown(named[2])
        return None if value is None else FoundValue(value=str(value), source=where, name=name)

    def _shown(self, path: Path | None) -> str:
        if path is None:
            return "the program"
        return str(path.relative_to(self.cwd)) if path.is_relative_to(self.cwd) else str(path)


def _in_text(text: str, way: ByFile | ByPython) -> str | int | None:
    if isinstance(way, ByFile):
        return config_text.value_in(text, way.kind, way.key)
    tree = python_source.tree_of(text)
    return None if tree is None else python_source.variable(tree, way.name)


def _first_name(way: Way) -> str:
    match way:
        case ByFlag(names=names) | ByArgparse(names=names):
            return names[0].lstrip("-")
        case ByFile(key=key):
            return key
        case ByPython(name=name) | ByScript(name=name):
            return name


def _name_of(setting: Setting) -> str:
    return _first_name(setting.ways[0]) if setting.ways else ""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A program's settings as they are now."""

    knobs: Knobs = Knobs()
    values: dict[str, str] = {}
    fixed: dict[str, str] = {}
    """The knobs that a restart cannot change, and why."""
    processes: int | None = 1

    def value(self, knob: str) -> int | None:
        found: Knob | None = getattr(self.knobs, knob)
        return None if found is None else found.value


def read(profile: ProgramProfile, program: ProgramFiles, run: str = "") -> Reading:
    """What the program's command and files say now."""
    values = {"script": str(program.folder), "run": run}
    knobs: dict[str, Any] = {}
    fixed: dict[str, str] = {}
    for name, setting in profile.settings():
        found = program.find(setting)
        if found is not None:
            values[name] = found.value
        if isinstance(setting, KnobRule):
            if found is not None and found.value.strip().isdecimal():
                knobs[name] = Knob(value=int(found.value), name=found.name, source=found.source)
            if (why := _why_fixed(setting, program)) is not None:
                fixed[name] = why
    fixed |= {name: f"the profile {profile.name} has no such setting" for name in KNOB_NAMES if profile.knob(name) is None}
    processes = program.command.processes if program.command is not None else 1
    return Reading(knobs=Knobs(**knobs), values=values, fixed=fixed, processes=processes)


def _why_fixed(rule: KnobRule, program: ProgramFiles) -> str | None:
    if rule.fixed is not None:
        return rule.fixed
    if any(_can_write(way, program) for way in rule.ways):
        return None
    found = program.find(rule)
    where = f": {found.source} has {found.name} = {found.value} in its code" if found is not None else ""
    return f"memtop changes options of the command and configuration files, and this program takes it from neither{where}"


def _can_write(way: Way, program: ProgramFiles) -> bool:
    match way:
        case ByFlag(declared=True, names=names):
            given = program.command is not None and last(program.command.words, way, program.command.begins) is not None
            return given or (program.tree is not None and python_source.declared(program.tree, names) is not None)
        case ByFlag():
            return True
        case ByFile() | ByPython():
            named = program.named_file(way)
            text = None if named is None else program.text(named[2])
            if text is None or (isinstance(way, ByPython) and named is not None and named[0] < 0 and not way.imported):
                return False
            if isinstance(way, ByPython):
                return python_source.with_variable(text, way.name, "1") is not None
            return way.kind == "json" or config_text.has_key(text, way.kind, way.key)
    return False


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """A program with other settings."""

    words: tuple[str, ...]
    files: dict[str, str] = {}
    """New files, by their name."""
    imports: dict[str, str] = {}
    """By the path of a module: the name of the new file that is imported in its place."""


class _Change:
    """The command and the copies of files while they are being changed."""

    def __init__(self, program: ProgramFiles, folder: Path) -> None:
        assert program.command is not None
        self.program, self.folder = program, folder
        self.command = program.command
        self.copies: dict[Path, str] = {}
        """By the path of the user's file: the changed text."""
        self.named: dict[Path, tuple[int, str]] = {}
        """The word that names it: its index, and the file's name in it."""
        self.imported: set[Path] = set()

    def edit(self, way: ByFile | ByPython, named: tuple[int, str, Path], new: Callable[[str], str | None]) -> None:
        at, shown, path = named
        text = self.copies.get(path, self.program.text(path) or "")
        changed = new(text)
        if changed is None:
            raise UsageError(f"{path}: {_first_name(way)} cannot be changed there: it has no such variable")
        self.copies[path] = changed
        if at >= 0:
            self.named[path] = (at, shown)
        else:
            self.imported.add(path)

    def done(self) -> Changed:
        words, names = list(self.command.words), {}
        for number, path in enumerate(self.copies):
            names[path] = f"{path.stem}-{number}{path.suffix}" if number else path.name
        for path, (at, shown) in self.named.items():
            words[at] = words[at][: len(words[at]) - len(shown)] + str(self.folder / names[path])
        imports = {str(path): str(self.folder / names[path]) for path in self.imported}
        return Changed(words=tuple(words), files={names[path]: text for path, text in self.copies.items()}, imports=imports)


def changed(
    profile: ProgramProfile,
    program: ProgramFiles,
    knobs: dict[str, int],
    folder: Path,
    *,
    checkpoint: str | None = None,
    run: str = "",
) -> Changed:
    """The program with these settings; UsageError if that is impossible.

    `folder`: where the new files will be. `checkpoint`: what it resumes from; None if it begins as
    its command says.
    """
    if program.command is None:
        raise UsageError("its command has no Python script that memtop can find")
    reading = read(profile, program, run)
    refuse(profile, reading, knobs)
    change = _Change(program, folder)
    for name, value in knobs.items():
        rule = profile.knob(name)
        if rule is not None and reading.value(name) != value:
            _set(change, name, rule, value)
    _agree(change, profile, reading, knobs)
    if checkpoint is not None:
        values = {**reading.values, **{name: str(value) for name, value in knobs.items()}, "checkpoint": checkpoint}
        words = [filled(word, values) or word for word in profile.resume.words]
        change.command = with_words(change.command, words, program.script)
    return change.done()


def refuse(profile: ProgramProfile, reading: Reading, knobs: dict[str, int]) -> None:
    """UsageError if these knobs cannot have these values."""
    for name, value in knobs.items():
        if name in reading.fixed and reading.value(name) != value:
            raise UsageError(f"{name}: {reading.fixed[name]}")
        rule, processes = profile.knob(name), reading.processes or 1
        if rule is not None and rule.of == "all" and value % processes:
            raise UsageError(f"{name} {value}: the program divides it by its {processes} processes; give a multiple of them")


def _set(change: _Change, name: str, rule: KnobRule, value: int) -> None:
    program = change.program
    for way in rule.ways:
        if not _can_write(way, program):
            continue
        if isinstance(way, ByFlag):
            added = python_source.declared(program.tree, way.names) if way.declared and program.tree is not None else None
            files = [
                named[0] for one in rule.ways if isinstance(one, (ByFile, ByPython)) and (named := program.named_file(one))
            ]
            change.command = with_option(
                change.command, way, str(value), name=added, literals=program.script, after=max(files, default=-1)
            )
        elif isinstance(way, (ByFile, ByPython)):
            _edit(change, way, value)
        return
    raise UsageError(f"{name}: this program takes it neither from an option nor from a configuration file")


def _edit(change: _Change, way: ByFile | ByPython, value: int) -> None:
    named = change.program.named_file(way)
    assert named is not None

    def new(text: str) -> str | None:
        if isinstance(way, ByPython):
            return python_source.with_variable(text, way.name, str(value))
        try:
            return config_text.with_value(text, way.kind, way.key, value)
        except ConfigTextError as error:
            raise UsageError(f"{named[1]}: {error}") from None

    change.edit(way, named, new)


def _agree(change: _Change, profile: ProgramProfile, reading: Reading, knobs: dict[str, int]) -> None:
    """Change the keys of a file that follow from the knobs."""
    values = {name: reading.value(name) for name in KNOB_NAMES} | knobs
    values["processes"] = reading.processes
    if values["batch"] and values["accumulation"] and reading.processes:
        values["effective"] = values["batch"] * values["accumulation"] * reading.processes
    for name in knobs:
        rule = profile.knob(name)
        for way in rule.ways if rule is not None else ():
            named = change.program.named_file(way) if isinstance(way, ByFile) else None
            if not isinstance(way, ByFile) or named is None:
                continue
            for key, template in way.also.items():
                text = change.copies.get(named[2], change.program.text(named[2]) or "")
                value = filled(template, {one: str(number) for one, number in values.items() if number is not None})
                old = config_text.value_in(text, way.kind, key)
                if old is not None and value is not None and str(old) != value:
                    _edit(change, replace(way, key=key), int(value))
