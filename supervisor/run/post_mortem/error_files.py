"""torchrun's error files: what makes programs write them into the attempt's folder, and what they say."""

from __future__ import annotations

import os
from pathlib import Path

_NAME = "error.json"
"""Of the program itself, where it writes one (torchrun: of the rank that failed first)."""
_RANKS = "torchelastic"
"""Where torchrun puts a folder for each rank, with an error file of its own."""
_BYTES = 1 << 18
_MOST = 64


def error_file_environment(attempt_folder: Path) -> dict[str, str]:
    """What makes torchrun and programs that use its `record` write their error files where we look. What the user has set
    himself stays."""
    wanted = {
        "TORCHELASTIC_ERROR_FILE": str(attempt_folder / _NAME),
        # The default of torchrun's --log-dir: below it every rank has a folder of its own.
        "PET_LOG_DIR": str(attempt_folder / _RANKS),
    }
    return {name: value for name, value in wanted.items() if not os.environ.get(name)}


def error_files(folder: Path) -> list[str]:
    """The text of those that there are, the program's own first. Where torchrun itself has started the ranks again, those of
    its last try: the program went on after the others."""
    last = [max(run.glob("attempt_*"), key=_number, default=run) for run in sorted((folder / _RANKS).glob("*"))]
    paths = [folder / _NAME, *(path for tried in last for path in sorted(tried.glob(f"**/{_NAME}")))]
    found = []
    for path in paths[:_MOST]:
        try:
            with path.open("rb") as file:
                found.append(file.read(_BYTES).decode(errors="replace"))
        except OSError:
            continue  # none was written
    return found


def _number(folder: Path) -> int:
    digits = folder.name.rpartition("_")[2]
    return int(digits) if digits.isdecimal() else -1
