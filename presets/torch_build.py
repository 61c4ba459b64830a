"""What the installed torch was built for, read from its files: torch itself takes seconds to
load."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

from memtop.presets.gpu_support import TorchBuild


def installed_build(torch: str | None = None) -> TorchBuild | None:
    """The build of the torch in this folder, or else of the torch of this Python; None if there is
    none, or its files say nothing."""
    found = importlib.util.find_spec("torch") if torch is None else None
    folders = (found.submodule_search_locations or ()) if found else ()
    for folder in folders if torch is None else (torch,):
        try:
            return read_build((Path(folder) / "version.py").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return None


def read_build(text: str) -> TorchBuild | None:
    """The build that the text of torch/version.py describes; None if it names no version."""
    values = {}
    for name, value in re.findall(r"^(\w+)(?: *:[^=\n]*)? *= *(.+)$", text, re.MULTILINE):
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            continue
    version, cuda = values.get("__version__"), values.get("cuda")
    if not isinstance(version, str) or "cuda" not in values:
        return None
    number = cuda if isinstance(cuda, str) and re.match(r"\d+\.\d+", cuda) else None
    return TorchBuild(version=version, cuda=number, rocm=values.get("hip") is not None)
