"""`python -m memtop.supervisor RUN_FOLDER [--restart CHANGE | --after-kill]`: the detached
supervisor of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import msgspec

from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.run import starting
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.supervisor import Supervisor
from memtop.supervisor.wire import Change


def main() -> int:
    parser = argparse.ArgumentParser(prog="memtop.supervisor")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--restart", help="a Change as JSON")
    parser.add_argument(starting.AFTER_KILL, action="store_true", help="wait for the end of the program, then conclude the run")
    arguments = parser.parse_args()
    # A lost terminal or a Ctrl-C meant for someone else must not end it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        change = None if arguments.restart is None else _change(arguments.restart)
        folder = RunFolder(arguments.folder)
        if arguments.after_kill and not starting.wait_for_end(folder):
            return 0
        supervisor = Supervisor(folder, after_kill=arguments.after_kill)
        # Started in "/", so that nothing of the user's shadows a library. ./memtop.toml is read
        # here.
        with contextlib.suppress(FileNotFoundError):
            os.chdir(supervisor.spec.cwd)
        asyncio.run(supervisor.run(change))
    except MemtopError as error:
        print(json.dumps({"error": str(error)}), file=sys.stderr)  # noqa: T201 - the client reads it
        return error.exit_status
    return 0


def _change(text: str) -> Change:
    try:
        return msgspec.json.decode(text, type=Change)
    except msgspec.DecodeError as error:
        raise UsageError(f"the change of a restart is not understood: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
