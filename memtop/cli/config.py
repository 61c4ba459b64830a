"""`memtop config`: each value of the configuration, and where it comes from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import click
import msgspec
from rich.cells import cell_len

from memtop.cli.configuration import KEYS, Value, read_layers, unknown_keys, value_of, variable_of
from memtop.cli.options import json_option
from memtop.cli.output import print_json, print_lines, print_message, row
from memtop.presets.files import user_config
from memtop.supervisor.language import Verbatim, tr


@click.command()
@json_option
def config(as_json: bool) -> int:
    """Show each value of the configuration and where it comes from.

    An option on the command line overrides it. Change a value in the user's file, in the project's
    memtop.toml or table [tool.memtop] of pyproject.toml, or with an environment variable.
    """
    layers = read_layers()
    values = {key: _shown(key, value_of(key, layers, os.environ)) for key in KEYS}
    problems = list(unknown_keys(layers))
    if as_json:
        files = [{"source": layer.source, "path": str(layer.path)} for layer in layers]
        print_json({"values": msgspec.to_builtins(values), "files": files, "unknown": problems})
    else:
        print_lines(*_table(values))
        folder = user_config()
        if folder is not None and not any(layer.source == "user" for layer in layers):
            print_lines(f"{folder / 'config.toml'}: no such file yet")
        print_message(*(f"memtop: {line}" for line in problems))
    return 0


_KEY, _VALUE, _WHERE = 17, 32, 28


def _table(values: Mapping[str, Value]) -> Iterator[str]:
    """A line for each key. A long value has the rest of its line; the columns go on below it."""
    for key, found in values.items():
        value, where = Verbatim(found.value or "-"), found.where or found.source
        what = f"{KEYS[key].what}; {variable_of(key)}"
        if cell_len(value) <= _VALUE and cell_len(tr(where)) <= _WHERE:
            yield row((Verbatim(key), _KEY), (value, _VALUE), (where, _WHERE), (what, 0))
            continue
        yield row((Verbatim(key), _KEY), (value, 0))
        if cell_len(tr(where)) > _WHERE:
            yield row(("", _KEY), ("", _VALUE), (where, 0))
            where = ""
        yield row(("", _KEY), ("", _VALUE), (where, _WHERE), (what, 0))


def _shown(key: str, found: Value) -> Value:
    is_secret = KEYS[key].is_private and found.value is not None
    return msgspec.structs.replace(found, value="(set)") if is_secret else found
