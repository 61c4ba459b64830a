"""Writes another position into a copy of a checkpoint. What torch has saved is changed by the
user's Python (`train/position.py`), in a process of its own with a time limit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from memtop.presets.program_profiles import Counter
from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.interpreters import TRAINER_PATH
from memtop.supervisor.run.record.whole_files import numbers_in

SECONDS = 600.0
"""A large checkpoint on a slow disk takes minutes."""
_SCRIPT = TRAINER_PATH.parent / "position.py"


def write_position(checkpoint: Path, counter: Counter | None, step: int, python: str | None) -> None:
    """Write this step into the copy. RunFolderError if that is not possible."""
    if counter is None or counter.key is None:
        raise RunFolderError(f"{checkpoint}: the profile does not say where its position is")
    if counter.read == "name":
        return  # the copy has another name
    file = checkpoint if counter.file is None else checkpoint / counter.file
    problem = _write_json(file, counter.key, step) if counter.read == "json" else _write_torch(file, counter.key, step, python)
    written = None
    try:
        written = numbers_in(file, (counter.key,)).get(counter.key)
    except (OSError, ValueError) as error:
        problem = problem or str(error)
    if written != step:
        raise RunFolderError(f"{file}: its position could not be converted: {problem or f'it is {written} instead of {step}'}")


def _write_json(file: Path, key: str, step: int) -> str | None:
    """Why that is not possible; None if it was written."""
    try:
        document = json.loads(file.read_bytes())
        *levels, last = key.split(".")
        inside = document
        for level in levels:
            inside = inside[level]
        inside[last] = step
        file.write_text(json.dumps(document))
    except (OSError, ValueError, LookupError, TypeError) as error:
        return repr(error)
    return None


def _write_torch(file: Path, key: str, step: int, python: str | None) -> str | None:
    """What the process said; None if nothing."""
    if python is None:
        return "torch is needed for that, and memtop does not know which Python of yours has it; --python names it"
    # Without the variables of memtop's own environment, and outside the working directory.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    try:
        done = subprocess.run(
            [python, str(_SCRIPT), str(file), key, str(step)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
            cwd=file.parent,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"{python} did not do it within {SECONDS:.0f} s"
    except OSError as error:
        return f"{python} cannot be started: {error.strerror}"
    # Its exit status may have gone to the loop, which collects all children.
    words = done.stderr.strip().splitlines()
    return f"{python}: {words[-1]}" if words else None
