"""Commands for a person to type: edits of the run, and the suggestions of
`suggested_commands.toml`, which memtop never runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from memtop.presets.fields import OPTIONS
from memtop.presets.files import PresetFileError, parse
from memtop.presets.schema import Settings
from memtop.supervisor.recovery.values import Remedy

_FILE = Path(__file__).with_name("suggested_commands.toml")


class Suggestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    why: str
    commands: tuple[str, ...]


@cache
def suggestions() -> dict[str, Suggestion]:
    """By name: swap, shm, shm_container, memlock, memory_limit, address_space, who_killed."""
    try:
        return msgspec.convert(parse(_FILE), dict[str, Suggestion])
    except msgspec.ValidationError as error:
        raise PresetFileError(f"{_FILE}: {error}") from None


def suggested(name: str) -> Remedy:
    """The suggestion of that name as a remedy that only a person can apply."""
    found = suggestions()[name]
    return to_do(name, found.title, found.why, "\n".join(found.commands))


def to_do(id: str, title: str, why: str, command: str | None, *, keeps_math: bool = True) -> Remedy:
    """Something for a person to do: memtop shows the command and never runs it."""
    return Remedy(
        id=id,
        title=title,
        why=why,
        keeps_math=keeps_math,
        resumable="none",
        needs_consent=True,
        forecast_unknown="you run this command, not memtop, so there is no forecast",
        command=command,
    )


def restart_command(run: str, assignments: Mapping[str, str], preset: str | None = None) -> str:
    """For example `memtop restart RUN --batch 4 --accum 8`."""
    words = ["memtop", "restart", run, *(("--preset", preset) if preset else ()), *_edits(assignments)]
    return shlex.join(words)


def train_command(settings: Settings, assignments: Mapping[str, str], *extra: str) -> str:
    """A new run with these settings and assignments; `NEW` stands for its name."""
    own = {name: str(getattr(settings, name)) for name in OPTIONS}
    data = {f"data.{name}": str(settings.data[name]) for name in ("train", "eval") if settings.data.get(name)}
    path = {"model.path": str(settings.model["path"])} if settings.model.get("path") else {}
    values = {**own, **data, **path, **assignments}
    words = ["memtop", "train", settings.recipe, "--name", "NEW", "--preset", settings.preset, *extra, *_edits(values)]
    return shlex.join(words)


def _edits(assignments: Mapping[str, str]) -> list[str]:
    options = [word for name, option in OPTIONS.items() if name in assignments for word in (option, assignments[name])]
    rest = [word for name, text in assignments.items() if name not in OPTIONS for word in ("--set", f"{name}={text}")]
    return [*options, *rest]
