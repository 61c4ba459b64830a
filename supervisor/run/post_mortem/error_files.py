"""torchrun's error files: makes programs write them into the attempt's folder, and reads them."""

from __future__ import annotations

import os
from pathlib import Path

_NAME = "error.json"
"""The error file of the program itself. torchrun writes the error of the first rank that failed."""
_RANKS = "torchelastic"
"""The folder in which torchrun creates a folder with an error file for each rank."""
_BYTES = 1 << 18
_MOST = 64


def error_file_environment(attempt_folder: Path) -> dict[str, str]:
    """The environment variables that make torchrun, and programs that use its `record`, write their
    error files here.

    Variables that the user has set stay unchanged.
    """
    wanted = {
        "TORCHELASTIC_ERROR_FILE": str(attempt_folder / _NAME),
        # The default of torchrun's --log-dir, with one folder for each rank.
        "PET_LOG_DIR": str(attempt_folder / _RANKS),
    }
    return {name: value for name, value in wanted.items() if not os.environ.get(name)}


def error_files(folder: Path) -> list[str]:
    """The texts of all error files, the program's own first.

    If torchrun itself has restarted the ranks, only the files of its last try count."""
    last = [max(run.glob("attempt_*"), key=_number, default=run) for run in sorted((folder / _RANKS).glob("*"))]
    paths = [folder / _NAME, *(path for tried in last for path in sorted(tried.glob(f"**/{_NAME}")))]
    found = []
    for path in paths[:_MOST]:
        try:
            with path.open("rb") as file:
                found.append(file.read(_BYTES).decode(errors="replace"))
        except OSError:
            continue  # no such file was written
    return found


def _number(folder: Path) -> int:
    digits = folder.name.rpartition("_")[2]
    return int(digits) if digits.isdecimal() else -1
