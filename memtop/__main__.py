"""The front door: `memtop`, and `python -m memtop`."""

import os
import sys


def main() -> int:
    """Run the command line; the exit status."""
    _open_closed_streams()
    from memtop.cli import run

    return run(sys.argv[1:])


def _open_closed_streams() -> None:
    """Who starts us with a closed stdin, stdout or stderr (`>&-`, some daemons) wants nothing from there. Left closed, the
    next file that is opened would take its number, and be written to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


if __name__ == "__main__":
    sys.exit(main())
