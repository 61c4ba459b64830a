"""`python -m memtop.train --settings FILE --state-dir FOLDER [--resume auto|never]`: the built-in trainer.

Exit status: 0 finished or stopped as asked (the journal says which), 1 failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from memtop.train.errors import TrainingError


def main() -> int:
    parser = argparse.ArgumentParser(prog="memtop.train")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--resume", choices=("auto", "never"), default="auto")
    arguments = parser.parse_args()

    from memtop.train.output import outlive_a_full_disk
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
