"""Standard output on a disk that may be full: training goes on without the lines that it cannot take.

`python -m memtop.train --settings FILE --state-dir FOLDER [--resume auto|never]`: the built-in trainer.

Exit status: 0 finished or stopped as asked (the journal says which), 1 failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Any

from memtop.train import DISK_FULL, TrainingError


class _Passing(io.FileIO):
    """What does not fit is lost; the line after one that was cut stands alone again."""

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


def outlive_a_full_disk() -> None:
    """From now on `print` raises nothing where the disk behind standard output has no room. Each line is written at once."""
    before = sys.stdout
    before.flush()
    # As `python -u` has it: text straight onto the file.
    raw: Any = _Passing(before.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(raw, encoding=before.encoding, errors=before.errors, write_through=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="memtop.train")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--resume", choices=("auto", "never"), default="auto")
    arguments = parser.parse_args()

    from memtop.train.__main__ import outlive_a_full_disk
    from memtop.train.run import launched_alone, train

    outlive_a_full_disk()

    try:
        outcome = train(arguments.settings, arguments.state_dir, resume=arguments.resume == "auto")
    except TrainingError as error:
        if launched_alone():
            print(f"memtop: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    if launched_alone():
        print(f"memtop: {outcome}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
