"""Start-up times of memtop: `--help`, `watch --once`, and the first screen of `memtop watch` in a
terminal.

python -m bench.startup
"""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import tempfile
import time

from bench.common import median_seconds, report, user_environment

RUNS = 7


def seconds_of(*arguments: str) -> float:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as runs:
        environment = {**user_environment(), "MEMTOP_RUNS_DIR": runs}
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
        return time.perf_counter() - started


def first_paint_seconds() -> float:
    """Seconds from the start of the process until the last word of the action bar is on the
    terminal."""
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    terminal = {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    environment = {**user_environment(), **terminal, "MEMTOP_RUNS_DIR": "/nonexistent"}
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "memtop", "watch"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
    )
    os.close(slave)
    seen = b""
    while b"Help" not in seen:
        if not select.select([master], [], [], 10)[0]:
            raise RuntimeError(f"nothing painted within 10 s: {seen[-200:]!r}")
        seen += os.read(master, 65536)
    elapsed = time.perf_counter() - started
    process.kill()
    process.wait()
    os.close(master)
    return elapsed


def main() -> None:
    report(
        "startup",
        {
            "unit": "seconds",
            "bare_interpreter": median_seconds(lambda: seconds_of("-c", "pass"), RUNS),
            "help": median_seconds(lambda: seconds_of("-m", "memtop", "--help"), RUNS),
            "watch_once": median_seconds(lambda: seconds_of("-m", "memtop", "watch", "--once"), RUNS),
            "watch_first_paint": median_seconds(first_paint_seconds, RUNS),
        },
    )


if __name__ == "__main__":
    main()
