"""`memtop config`: each value of the configuration, and where it comes from."""

from __future__ import annotations

import os

import click
import msgspec

from memtop.cli.configuration import KEYS, Value, read_layers, unknown_keys, value_of, variable_of
from memtop.cli.options import json_option
from memtop.cli.output import print_json, print_lines, print_message, row
from memtop.presets.files import user_config
from memtop.supervisor.language import Verbatim


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
        for key, found in values.items():
            where = found.where or found.source
            value = Verbatim(found.value or "-")
            print_lines(row((Verbatim(key), 17), (value, 32), (where, 28), (f"{KEYS[key].what}; {variable_of(key)}", 0)))
        folder = user_config()
        if folder is not None and not any(layer.source == "user" for layer in layers):
            print_lines(f"{folder / 'config.toml'}: no such file yet")
        print_message(*(f"memtop: {line}" for line in problems))
    return 0


def _shown(key: str, found: Value) -> Value:
    is_secret = KEYS[key].is_private and found.value is not None
    return msgspec.structs.replace(found, value="(set)") if is_secret else found
