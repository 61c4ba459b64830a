"""The entry point of `memtop` and `python -m memtop`."""

import gc
import os
import sys


def main() -> int:
    """Run the command line and return the exit status."""
    _open_closed_streams()
    # Imports make many objects and no garbage. Each command collects again once it is imported.
    gc.disable()
    from memtop.cli import run

    return run(sys.argv[1:])


def _open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr (`>&-`, some daemons).

    Otherwise the next file that is opened would get its number, and output would be written to it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


if __name__ == "__main__":
    sys.exit(main())
