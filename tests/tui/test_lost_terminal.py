"""A dashboard whose terminal is gone ends by itself, also where no hang-up signal reaches it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

from memtop.tui.app import terminal_gone


def test_a_closed_terminal_is_distinguished_from_an_open_one() -> None:
    master, slave = pty.openpty()
    assert not terminal_gone(slave)
    os.close(master)
    assert terminal_gone(slave)
    os.close(slave)


def test_the_dashboard_does_not_outlive_its_terminal(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    # A session without a controlling terminal gets no signal.
    process = subprocess.Popen(
        [sys.executable, "-m", "memtop", "watch", "--demo"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
        start_new_session=True,
    )
    os.close(slave)
    try:
        seen = b""
        while b"Help" not in seen:
            assert select.select([master], [], [], 60)[0], "nothing was painted"
            seen += os.read(master, 65536)
        os.close(master)
        # 1 if a write to the lost terminal failed first.
        assert process.wait(60) in (0, 1)
    finally:
        process.kill()
        process.wait()
