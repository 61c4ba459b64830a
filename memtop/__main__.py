"""The front door: `memtop`, and `python -m memtop`."""

import sys


def main() -> int:
    """Run the command line; the exit status."""
    from memtop.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
