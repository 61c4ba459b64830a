"""The commands that install what is missing.

No hint installs `memtop` by its name: on the package index, that is another project. Hints name the
folder, the wheel or the repository that this copy came from.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import memtop

_UNKNOWN = "FOLDER-OR-WHEEL-OF-MEMTOP"


def source() -> str | None:
    """Where this copy of memtop was installed from, as pip takes it; None if that is not known."""
    folder = Path(memtop.__file__).resolve().parents[1]
    if (folder / "pyproject.toml").is_file() and (folder / "memtop").is_dir():
        return str(folder)
    try:
        text = importlib.metadata.distribution("memtop").read_text("direct_url.json")
        return None if text is None else place_of(json.loads(text))
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None


def place_of(origin: dict[str, str | dict[str, str]]) -> str | None:
    """What direct_url.json says (PEP 610). None if it is a file that is no longer there."""
    url = str(origin["url"])
    repository = origin.get("vcs_info")
    if isinstance(repository, dict):
        return f"memtop @ {repository['vcs']}+{url}@{repository['commit_id']}"
    if not url.startswith("file:"):
        return f"memtop @ {url}"
    path = unquote(urlsplit(url).path)
    return path if Path(path).exists() else None


def install_extra(extra: str) -> str:
    """The command that installs further packages beside memtop: `train`, the trainer's; `serve`,
    those of `watch --serve`."""
    found = source() or _UNKNOWN
    name, sign, url = found.partition(" @ ")
    what = f"{name}[{extra}]{sign}{url}" if sign else f"{found}[{extra}]"
    return install(sys.executable, [what], has_pip=importlib.util.find_spec("pip") is not None)


def install(python: str, packages: Sequence[str], *, has_pip: bool) -> str:
    """The command that installs packages for this interpreter. Environments made by uv have no pip;
    where there is no uv either, pip comes first."""
    if not has_pip and shutil.which("uv") is not None:
        return shlex.join(["uv", "pip", "install", "--python", python, *packages])
    first = "" if has_pip else shlex.join([python, "-m", "ensurepip"]) + " && "
    return first + shlex.join([python, "-m", "pip", "install", *packages])
