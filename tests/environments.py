"""Virtual environments for tests: with torch and without memtop, or the other way round."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = Path(torch.__file__).parents[1]
"""The packages that the tests run with."""


def make_environment(folder: Path, *paths: Path) -> Path:
    """An environment without pip that also imports from these folders. Returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages_of(folder) / "others.pth").write_text("".join(f"{path}\n" for path in paths))
    return folder / "bin/python"


def packages_of(folder: Path) -> Path:
    (found,) = folder.glob("lib/python3*/site-packages")
    return found


def make_tool_environment(folder: Path) -> Path:
    """An environment with memtop and its libraries, in which there is no torch."""
    python = make_environment(folder, ROOT)
    for path in LIBRARIES.iterdir():
        if path.suffix != ".pth" and not path.name.startswith(("torch", "memtop", "__editable__", "__pycache__")):
            (packages_of(folder) / path.name).symlink_to(path)
    return python


def add_module(folder: Path, name: str, code: str = "") -> None:
    """Add a module to an environment."""
    package = packages_of(folder) / name
    package.mkdir()
    (package / "__init__.py").write_text(code)
