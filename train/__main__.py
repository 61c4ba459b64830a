"""`python -m memtop.train --settings FILE --state-dir FOLDER [--resume auto|never]`: the trainer.

Exit status: 0 finished or stopped as requested (the journal says which), 1 failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import atexit
import io
import os
import sys
from pathlib import Path
from typing import Any

from memtop.train import DISK_FULL, TrainingError


def main() -> int:
    parser = argparse.ArgumentParser(prog="memtop.train")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--resume", choices=("auto", "never"), default="auto")
    arguments = parser.parse_args()
    # Loading torch takes seconds; a wrong argument is reported before.
    from memtop.train.run import is_first_process, train

    survive_full_disk()
    try:
        outcome = train(arguments.settings, arguments.state_dir, resume=arguments.resume == "auto")
    except TrainingError as error:
        if is_first_process():
            print(f"memtop: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    if is_first_process():
        print(f"memtop: {outcome}", flush=True)
    return 0


def survive_full_disk() -> None:
    """Make `print` drop text instead of raising when the disk behind standard output is full.

    Each line is written at once.
    """
    before = sys.stdout
    before.flush()
    # Unbuffered, like `python -u`.
    raw: Any = _DroppingFile(before.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(raw, encoding=before.encoding, errors=before.errors, write_through=True)


class _DroppingFile(io.FileIO):
    """Drops what does not fit on the disk. The line after one that was cut starts on a new line."""

    _cut = False

    def write(self, data: Any) -> int:
        text = b"\n" + data if self._cut else bytes(data)
        try:
            written = super().write(text)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
        else:
            self._cut = written < len(text)
        return len(data)


def leave_at_once(finished: list[int]) -> None:
    """After all other handlers: end a program that succeeded, without tearing the interpreter down.

    With torch's modules that takes a second of CPU time, for which a restart would wait. It frees
    nothing but memory, which the kernel frees too.
    """
    if finished == [0]:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    # Handlers run in reverse order, so the first one is the last to run.
    status: list[int] = []
    atexit.register(leave_at_once, status)
    status.append(main())
    sys.exit(status[0])
