"""The first and the last seconds of a run in a real terminal: its stages in words, and how it has
ended, live and later."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import Runs
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
