"""The configuration: defaults for the options of the command line.

Each of these overrides the one before: the default, the user's file, the project's file, the
environment, the option on the command line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from memtop.cli.output import print_message
from memtop.presets.checks import did_you_mean
from memtop.presets.files import PresetFileError, parse, parse_text, project_file, user_config
from memtop.supervisor.errors import UsageError
from memtop.supervisor.interpreters import expanded
from memtop.supervisor.run.notices import TOPICS

Source = Literal["default", "user", "project", "environment"]
_TABLES = ("presets", "levels", "recipes", "programs")
"""Tables of the project's file that are not settings of the command line."""
_SAID = "memtop.configuration.said"
_OF_A_RUN = "MEMTOP_ON_OOM"
"""A run sets this variable for its program, too."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One key of the configuration. It has the name of its option."""

    what: str
    default: str | None = None
    is_path: bool = False
    is_number: bool = False
    needs_folder: bool = True
    """Whether a path without a slash is a path, too, and not a command's name."""
    is_private: bool = False
    """A project's file cannot set it, and its value is not shown: it may be secret, or start a
    command."""


KEYS = {
    "runs-dir": Key(what="the folder of the runs", default="runs", is_path=True),
    "python": Key(what="the Python that trains recipes", is_path=True, needs_folder=False),
    "preset": Key(what="the preset of new runs of a recipe"),
    "gpus": Key(what="the GPUs of new runs"),
    "on-oom": Key(what="what to do when memory runs out"),
    "on-spike": Key(what="what to do when the loss of a recipe jumps and stays high"),
    "program-profile": Key(what="the profile of your own programs: its name, auto or none", default="auto"),
    "save-every": Key(what="updates between two saves", is_number=True),
    "lang": Key(what="the language of screen and command line: en or zh"),
    "theme": Key(what="the colours of the dashboard: a theme's name"),
    "processes-sort": Key(what="the order of the dashboard's processes: a column, then down or up"),
    "processes-view": Key(what="how the dashboard groups processes: by job, tree or flat"),
    "runs-sort": Key(what="the order of the dashboard's list of runs: a column, then down or up"),
    "metrics-axis": Key(what="the x axis of the metrics screen: update, samples, tokens or time"),
    "metrics-smoothing": Key(what="dots over which the metrics screen smooths a curve: 0, 8, 32 or 128", is_number=True),
    "metrics-scale": Key(what="the y axis of the metrics screen: linear or log"),
    "energy-price": Key(what='what a kWh costs you, for example "0.30 EUR"'),
    "notify-on": Key(what="what you are notified of", default="end,failure,stall,survived,leak"),
    "notify-desktop": Key(what="how a dashboard's terminal notifies you: bell, osc9 or osc777"),
    "notify-ntfy": Key(what="the address of an ntfy topic", is_private=True),
    "notify-webhook": Key(what="the address of a webhook: Slack, Discord or your own", is_private=True),
    "notify-command": Key(what="a shell command that notifies you", is_private=True),
}


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a key, and where it comes from."""

    value: str | None
    source: Source
    where: str | None = None
    """The file or the environment variable; None for a default."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A file with a configuration."""

    source: Source
    path: Path
    where: str
    table: dict[str, Any]


def configured(key: str) -> Value:
    """The value of a key without the option on the command line.

    UsageError if it cannot be used. A message names unknown keys, once in a command.
    """
    layers = read_layers()
    context = click.get_current_context(silent=True)
    if context is not None and not context.meta.get(_SAID):
        context.meta[_SAID] = True
        print_message(*(f"memtop: {line}" for line in unknown_keys(layers)))
    return value_of(key, layers, os.environ)


def default_runs_dir() -> Path:
    """The folder of the runs if the command line names none."""
    return Path(str(configured("runs-dir").value))


def variable_of(key: str) -> str:
    return f"MEMTOP_{key.upper().replace('-', '_')}"


def read_layers() -> list[Layer]:
    """The files, the one that overrides the others last. UsageError for one that is not TOML."""
    found = []
    try:
        folder = user_config()
        if folder is not None and (folder / "config.toml").is_file():
            path = folder / "config.toml"
            found.append(Layer(source="user", path=path, where=str(path), table=parse(path)))
        project = project_file()
    except PresetFileError as error:
        raise UsageError(str(error)) from None
    if project is not None:
        table = {name: value for name, value in project.table.items() if name not in _TABLES}
        where = project.shown + (" [tool.memtop]" if project.prefix else "")
        found.append(Layer(source="project", path=project.path, where=where, table=table))
    return found


def value_of(key: str, layers: list[Layer], environment: Mapping[str, str]) -> Value:
    """The value of a key, with its source. UsageError if it is of the wrong kind."""
    name = variable_of(key)
    if environment.get(name) and not (name == _OF_A_RUN and "MEMTOP_RUN" in environment):
        return Value(value=_text(key, environment[name], name), source="environment", where=name)
    for layer in reversed(layers):
        if key in layer.table and not (KEYS[key].is_private and layer.source == "project"):
            text = _text(key, layer.table[key], layer.where)
            if layer.source == "project" and _is_relative(key, text):
                text = str(layer.path.parent / text)
            return Value(value=text, source=layer.source, where=layer.where)
    return Value(value=KEYS[key].default, source="default")


def notify_topics() -> set[str]:
    """What the user is notified of. UsageError for an unknown topic."""
    value = value_of("notify-on", read_layers(), os.environ)
    topics = {topic.strip() for topic in (value.value or "").split(",") if topic.strip()}
    for topic in sorted(topics - set(TOPICS)):
        hint = did_you_mean(topic, TOPICS) or f"; there are {', '.join(TOPICS)}"
        raise UsageError(f"{value.where}: notify-on {topic!r}: unknown{hint}")
    return topics


def write_user_key(key: str, value: str) -> Path:
    """Set a key in the user's file, and change nothing else in it. The result is the file.

    UsageError, with one line, if it cannot be written; then the file is as it was.
    """
    folder = user_config()
    if folder is None:
        raise UsageError("there is no home folder for the configuration")
    shown = folder / "config.toml"
    try:
        # The file that a link names is replaced, and the link stays.
        path = shown.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            before = path.read_bytes().decode("utf-8") if path.exists() else ""
            after = _with_key(before, key, value)
            if after is None:
                entry = _toml(key, value)
                raise UsageError(f"{shown}: cannot be changed here; write {key} = {entry} into it yourself")
            if after != before:
                _replace(path, after.encode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown}: not valid TOML: {error}") from None
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{shown}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return shown


def _with_key(text: str, key: str, value: str) -> str | None:
    """The TOML text with this key at its top; None if it has no place that changes nothing else."""
    try:
        wanted = {**parse_text(text), key: int(value) if KEYS[key].is_number else value}
    except ValueError:
        return None
    return next((found for found in _candidates(text, key, value) if _table_of(found) == wanted), None)


def _table_of(text: str) -> dict[str, Any] | None:
    try:
        return parse_text(text)
    except ValueError:
        return None


def _candidates(text: str, key: str, value: str) -> Iterator[str]:
    """Texts that may be right: a line that looks like the key's may be within a longer text."""
    entry = _toml(key, value)
    lines = text.split("\n")
    own = re.compile(rf"""(\s*(?:{key}|"{key}"|'{key}')\s*=\s*)("(?:[^"\\]|\\.)*"|'[^']*'|[^\s#]+)(.*)""", re.DOTALL)
    for number, row in enumerate(lines):
        if found := own.fullmatch(row):
            yield "\n".join([*lines[:number], f"{found[1]}{entry}{found[3]}", *lines[number + 1 :]])
    ending = "\r" if "\r\n" in text else ""
    for number, row in enumerate(lines):
        if row.lstrip().startswith("["):
            above = number
            # The comments above a table belong to it.
            while above and lines[above - 1].strip()[:1] in ("", "#"):
                above -= 1
            yield "\n".join([*lines[:above], f"{key} = {entry}{ending}", *lines[above:]])
    gap = f"{ending}\n" if lines[-1] else ""
    yield f"{text}{gap}{key} = {entry}{ending}\n"
    yield f"{key} = {entry}{ending}\n{text}"


def _toml(key: str, value: str) -> str:
    """The value as TOML: a number without quotes."""
    return value if KEYS[key].is_number else json.dumps(value, ensure_ascii=False)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one process at a time changes a file here, so that none loses the change of another."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Network file systems may lock no folder; two changes at the same moment are rare.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, content: bytes) -> None:
    """Replace the file in one step. Its permissions stay."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


def _text(key: str, value: Any, where: str) -> str:
    """The value as its option takes it."""
    if KEYS[key].is_number:
        if isinstance(value, bool) or not str(value).isascii() or not str(value).isdigit():
            raise UsageError(f"{where}: {key} {value!r}: give a whole number")
        return str(value)
    if key == "gpus":
        numbers = value if isinstance(value, list) else [value]
        if all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            return ",".join(map(str, numbers))
    if key == "notify-on" and isinstance(value, list) and all(isinstance(topic, str) for topic in value):
        return ",".join(value)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where}: {key} {value!r}: give text in quotes")
    return str(expanded(value)) if KEYS[key].is_path else value


def _is_relative(key: str, text: str) -> bool:
    row = KEYS[key]
    return row.is_path and not Path(text).is_absolute() and (row.needs_folder or os.sep in text)


def unknown_keys(layers: list[Layer]) -> Iterator[str]:
    """One line for each key that memtop does not know."""
    for layer in layers:
        for name in layer.table:
            if name not in KEYS:
                hint = did_you_mean(name, KEYS) or f"; there are {', '.join(KEYS)}"
                yield f"{layer.where}: {name}: unknown, and ignored{hint}"
            elif KEYS[name].is_private and layer.source == "project":
                yield f"{layer.where}: {name}: ignored here; only your own file or the environment can set it"
