"""Every field, option and key that docs/compared.md names exists."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import click
import msgspec
import pytest

from memtop.cli import app
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.tui.keymap import ACTIONS

TEXT = (Path(__file__).parents[1] / "docs" / "compared.md").read_text()
CODE = sorted(set(re.findall(r"`([^`]+)`", TEXT)))
FIELDS = [code for code in CODE if re.fullmatch(r"[a-z]{2,}(_[a-z0-9]+)*(\.[a-z0-9_]+)*", code) and code != "null"]
OPTIONS = sorted({word for code in CODE for word in code.split() if word.startswith("--")})


def struct_of(annotation: object) -> type[msgspec.Struct] | None:
    """The struct inside an annotation such as tuple[GpuSample, ...]."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    return next((found for inner in typing.get_args(annotation) if (found := struct_of(inner))), None)


@pytest.mark.parametrize("path", FIELDS)
def test_fields_exist(path: str) -> None:
    here: type[msgspec.Struct] | None = MachineSnapshot
    for name in path.split("."):
        assert here is not None, f"{path}: nothing is below {name}"
        hints = typing.get_type_hints(here)
        assert name in hints, f"{path}: {here.__name__} has no {name}"
        here = struct_of(hints[name])


@pytest.mark.parametrize("option", OPTIONS)
def test_options_exist(option: str) -> None:
    context = click.Context(app)
    commands = filter(None, (app.get_command(context, name) for name in app.list_commands(context)))
    known = {name for command in commands for parameter in command.params for name in parameter.opts}
    # The text quotes these options of nvitop.
    assert option in known | {"--only", "--only-visible"}


def test_keys_of_the_dashboard_exist() -> None:
    keys = {action.shown_key for action in ACTIONS}
    # Keys said to be of the process screen belong to that screen.
    for key in re.findall(r"key `(.)`(?! on the process screen)", TEXT):
        assert key in keys, f"no action has the key {key}"


def test_there_are_fields_and_options_to_check() -> None:
    assert len(FIELDS) > 50
    assert len(OPTIONS) > 5
