"""The first and the last seconds of a real run: its stages in words and how it has ended, in a
terminal, live and later; and for what a stop waits."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import Runs, wait_for_file
from tests.recovery.injected import PACED, TINY, inject
from tests.terminal import Terminal

HELD = (
    PACED
    + """
    import os, sysconfig
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    def hold(name):
        while not os.path.exists(name):
            time.sleep(0.02)
    def holding(function, name):
        def held(*arguments, **options):
            hold(name)
            return function(*arguments, **options)
        return held
    hold("import")
    torch.nn.Embedding.__init__ = holding(torch.nn.Embedding.__init__, "model")
    plain_path, read = sysconfig.get_path, holding(lambda: None, "data")
    sysconfig.get_path = lambda name, *more: (read() if name == "stdlib" else None, plain_path(name, *more))[1]
    steps = [0]
    def count(*_):
        steps[0] += 1
        if steps[0] in (1, 8):
            hold(f"update-{steps[0]}")
    register_optimizer_step_pre_hook(count)
"""
)
"""Each stage of the trainer, and its eighth update, lasts until its folder has the file."""


@contextmanager
def terminal(runs: Runs, *arguments: str, columns: int = 160, rows: int = 50) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "memtop", *arguments]
    screen = Terminal(command, columns=columns, rows=rows, cwd=str(runs.root), environment=runs.environment)
    try:
        yield screen
    finally:
        screen.close()


def banner(screen: Terminal, beginning: str) -> str:
    """The line below the header that begins like this."""
    (found,) = (row.strip() for row in screen.wait_for(beginning).splitlines() if row.strip().startswith(beginning))
    return found


def go_on(runs: Runs, *names: str) -> None:
    for name in names:
        (Path(runs.root) / name).touch()


def test_stages_in_words_then_killed_resumed_and_finished_with_what_to_do_next(runs: Runs) -> None:
    inject(runs, HELD)
    start = ("train", "first-run", *TINY, "--max-updates", "12", "--set", "save_every=5", "--name", "a", "--on-oom", "stop")
    with terminal(runs, *start) as screen:
        for file, stage in (
            ("import", "◌ importing torch"),
            ("model", "◌ loading the model"),
            ("data", "◌ reading the data"),
            ("update-1", "◌ first update"),
        ):
            screen.wait_for(stage, "Training", "Log")
            go_on(runs, file)
        screen.wait_for("● training")
        running = runs.wait("a", lambda run: run["updates"] == 7)
        runs.kill(running["trainer_pid"])
        killed = banner(screen, "✗ killed at update 7 after ")
        assert re.search(r"after [0-9:]+: .*SIGKILL.*; r resumes at update 5; memtop export a DIR writes the model$", killed), (
            killed
        )
        screen.keys("q")
        assert screen.wait() == 1
    with terminal(runs, "watch", "a") as screen:
        assert banner(screen, "✗ killed at") == killed
        go_on(runs, "update-8")
        screen.keys("r")
        screen.wait_for("Enter goes to Restart")
        screen.keys("\r")
        screen.wait_for("Enter does it")
        screen.keys("\r")
        finished = banner(screen, "✓ finished at update 12 after ")
        assert finished.endswith(" in all; memtop export a DIR writes the model")
        screen.keys("q")
        assert screen.wait() == 0
    with terminal(runs, "watch", "a") as screen:
        assert banner(screen, "✓ finished at") == finished


FAILS = "import os, sys, time\nwhile not os.path.exists('go'): time.sleep(0.02)\nsys.exit(3)"


def test_a_failed_program_says_its_exit_status_live_and_later(runs: Runs) -> None:
    with terminal(runs, "train", "--name", "b", "--", sys.executable, "-c", FAILS) as screen:
        screen.wait_for("Log")
        runs.wait("b", lambda run: run["trainer_pid"] is not None)
        go_on(runs, "go")
        failed = banner(screen, "✗ failed after ")
        assert re.search(r"after [0-9:]+: exit status 3; r starts it again", failed), failed
        screen.keys("q")
        assert screen.wait() == 1
    with terminal(runs, "watch", "b") as screen:
        assert banner(screen, "✗ failed after ") == failed


SLOW_SAVES = (
    PACED
    + """
    import os
    plain = os.fsync
    def slow(file):
        time.sleep(1)
        plain(file)
    os.fsync = slow
    def pause(*_):
        while os.path.exists("pause"):
            open("paused", "w").close()
            time.sleep(0.02)
    register_optimizer_step_post_hook(pause)
"""
)
"""Each file of a saved state takes a second, and no update is done while the folder has `pause`."""
SHORT_WAITS = """
    import functools
    from memtop.supervisor.run import supervisor
    from memtop.supervisor.run.stop_ladder import Waits
    short = Waits(graceful=0.5)
    supervisor.Supervisor.__init__ = functools.partialmethod(supervisor.Supervisor.__init__, waits=short)
"""


def why_it_waits(runs: Runs) -> str:
    """The reason that the newest stop of run a has given for its patience."""
    runs.memtop("stop", "a")
    asked = [one.message for one in runs.events("a", "stop") if "SIGTERM follows" in one.message][-1]
    found = re.fullmatch(r"asked to finish the update, save and exit; SIGTERM follows in \d+ s \((.*)\)", asked)
    assert found is not None, asked
    return found[1]


@pytest.mark.long  # tests/run/test_stopping.py has the reasons, one by one
def test_a_real_run_says_for_what_its_stop_waits(runs: Runs) -> None:
    inject(runs, SLOW_SAVES, SHORT_WAITS)
    settings = (*TINY, "--set", "save_every=100000", "--max-updates", "200000")
    runs.memtop("train", "first-run", *settings, "--name", "a", "--detach")
    runs.wait("a", lambda d: (d["updates"] or 0) >= 2)
    runs.memtop("checkpoint", "a")
    # The trainer answers before the supervisor reads its report of the save.
    runs.wait("a", lambda _: runs.events("a", "checkpoint"))
    why = why_it_waits(runs)
    saved = runs.events("a", "checkpoint")[0].message
    took = re.search(r" in ([\d.]+) s, training stopped", saved)
    assert took is not None, saved
    assert why == f"its newest save took {float(took[1]):.0f} s"
    # The second attempt has saved nothing yet when it is stopped.
    runs.memtop("restart", "a", "--detach")
    before = runs.wait("a", lambda d: d["state"] == "training" and len(d["attempts"]) == 2)["updates"]
    runs.wait("a", lambda d: d["updates"] >= before + 3)
    (runs.root / "pause").touch()
    wait_for_file(runs.root / "paused")
    at = runs.show("a")["updates"]
    time.sleep(3)
    (runs.root / "pause").unlink()
    runs.wait("a", lambda d: d["updates"] >= at + 5)
    silent = re.fullmatch(r"it has been silent for up to (\d+) s", why_it_waits(runs))
    assert silent is not None
    assert int(silent[1]) >= 3
