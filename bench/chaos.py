"""Sends SIGKILL at random times in short runs: to the trainer (also during a save), the supervisor,
a follower and a dashboard.

    python -m bench.chaos [--kills 100] [--seed 23333] [--seconds N] [--folder DIR]

Every run is restarted until it finishes. It must then have used the same samples in each update as
an undisturbed run (equal digests), and its final state must be equal, byte for byte.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common import report
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.monitor.processes.proc import identify
from memtop.supervisor.monitor.processes.signals import SignalRefused, signal_process
from memtop.supervisor.monitor.processes.table import run_processes
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.view import needs_supervisor, read_state
from memtop.supervisor.wire import Phase, RunState
from tests.conftest import Runs, make_runs
from tests.terminal import Terminal

UPDATES = 40
RECIPE = f"""
[recipes.chaos]
title = "t"
description = "d"
preset = "standard"
batch = 4
accumulation = 2
seq_len = 32
max_updates = {UPDATES}
save_every = 4
learning_rate = 2e-3
[recipes.chaos.model.config]
model_type = "llama"
vocab_size = 260
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 256
[recipes.chaos.data]
source = "python-stdlib"
max_bytes = 8000
"""
VICTIMS = ("trainer", "mid-save", "supervisor", "both", "follower", "dashboard")
WEIGHTS = (5, 4, 4, 2, 2, 2)
_WITHIN_SECONDS = 6.0
"""The most seconds between two kills, so that loading, training and the end are all hit."""
_MOST_KILLS_A_RUN = 8
_RUN_SECONDS = 900.0


class Chaos:
    """One series of runs under random kills."""

    def __init__(self, runs: Runs, seed: int, within: float) -> None:
        self.runs = runs
        self.within = within
        self.random = random.Random(seed)
        self.killed: Counter[str] = Counter()
        self.attempts = 0
        self.wrong: list[str] = []
        (runs.root / "memtop.toml").write_text(RECIPE)

    def reference(self) -> dict[str, Any]:
        """The outcome of an undisturbed run."""
        self.runs.memtop("train", "chaos", "--name", "reference", "--headless", timeout=_RUN_SECONDS)
        return self._outcome("reference")

    def _outcome(self, name: str) -> dict[str, Any]:
        metrics = self.runs.show(name, metrics=True)["metrics"]
        manifest = json.loads((self.runs.path / name / "train_latest_state" / "manifest.json").read_text())
        return {
            "updates": [row["update"] for row in metrics],
            "digests": [row["sample_digest"] for row in metrics],
            "samples_seen": [row["samples_seen"] for row in metrics],
            "losses": [row["loss"] for row in metrics],
            "files": [(file["name"], file["sha256"]) for file in manifest["files"]],
        }

    def run(self, name: str, kills: int, expected: dict[str, Any]) -> int:
        """One run with at most this many kills. Returns how many there were before it finished."""
        self.runs.memtop("train", "chaos", "--name", name, "--detach")
        folder, done = RunFolder(self.runs.path / name), 0
        deadline = time.monotonic() + _RUN_SECONDS
        while read_state(folder).state is not Phase.FINISHED:
            if time.monotonic() > deadline:
                self.wrong.append(f"{name}: not finished after {_RUN_SECONDS:.0f} s: {read_state(folder)}")
                return done
            if done < kills and self._kill(folder):
                done += 1
            self._take_up(folder)
            time.sleep(0.05)
        self._check(name, folder, expected)
        return done

    def _kill(self, folder: RunFolder) -> bool:
        (victim,) = self.random.choices(VICTIMS, WEIGHTS)
        patience = self.random.uniform(0, self.within)
        hit = {
            "trainer": lambda: self._after(patience, folder) and self._end(read_state(folder).trainer_pid),
            "mid-save": lambda: self._saving(folder) and self._end(read_state(folder).trainer_pid),
            "supervisor": lambda: self._after(patience, folder) and self._end(read_state(folder).supervisor_pid),
            "both": lambda: self._after(patience, folder) and self._both(read_state(folder)),
            "follower": lambda: self._viewer(folder, patience, terminal=False),
            "dashboard": lambda: self._viewer(folder, patience, terminal=True),
        }[victim]()
        if hit:
            self.killed[victim] += 1
        return bool(hit)

    @staticmethod
    def _after(seconds: float, folder: RunFolder) -> bool:
        """Wait; False if the run ends meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if read_state(folder).state.final:
                return False
            time.sleep(0.02)
        return True

    @staticmethod
    def _saving(folder: RunFolder) -> bool:
        """Wait until a state is being written; False if the run ends first."""
        while True:
            for _ in range(200):
                if any(folder.path.glob("train_latest_state.tmp-*")):
                    return True
                time.sleep(0.0005)
            if read_state(folder).state.final:
                return False

    @staticmethod
    def _end(pid: int | None) -> bool:
        found = identify(pid) if pid else None
        if found is None:
            return False
        try:
            signal_process(found, signal.SIGKILL)
        except (SignalRefused, ProcessLookupError, MemtopError):
            return False  # it ended first
        return True

    def _both(self, state: RunState) -> bool:
        # In this order no supervisor sees the trainer end.
        first = self._end(state.supervisor_pid)
        return self._end(state.trainer_pid) and first

    def _viewer(self, folder: RunFolder, seconds: float, *, terminal: bool) -> bool:
        """Start a viewer of the run, and kill it."""
        command = [sys.executable, "-m", "memtop", "watch", folder.name]
        if terminal:
            screen = Terminal(command, columns=100, rows=30, cwd=str(self.runs.root), environment=self.runs.environment)
            time.sleep(seconds)
            screen.close()  # sends SIGKILL
            return True
        command = ("watch", folder.name, "--follow", "--json")
        follower = self.runs.start(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        follower.kill()
        follower.wait()
        return True

    def _take_up(self, folder: RunFolder) -> None:
        """Restart a run that has ended or has no supervisor, as a user or a script does."""
        state = read_state(folder)
        if needs_supervisor(folder):
            self.runs.memtop("watch", folder.name, "--once", "--json", status=None)
        elif state.state in (Phase.FAILED, Phase.STOPPED):
            self.runs.memtop("restart", folder.name, "--detach", status=None)

    def _check(self, name: str, folder: RunFolder, expected: dict[str, Any]) -> None:
        found = self._outcome(name)
        self.wrong += [f"{name}: other {what} than undisturbed" for what in expected if found[what] != expected[what]]
        self.attempts += len(self.runs.show(name)["attempts"])
        until = time.monotonic() + 15
        while (left := run_processes(str(folder.path))) and time.monotonic() < until:
            time.sleep(0.1)
        self.wrong += [f"{name}: process {process.pid} is left over" for process in left]


def torment(
    runs: Runs, kills: int, seed: int, seconds: float = float("inf"), within: float = _WITHIN_SECONDS
) -> dict[str, Any]:
    """This many kills in as many runs as needed. Returns the document to print."""
    chaos, started, number = Chaos(runs, seed, within), time.monotonic(), 0
    expected = chaos.reference()
    if expected["updates"] != list(range(1, UPDATES + 1)):
        chaos.wrong.append("the undisturbed run is not whole")
    while sum(chaos.killed.values()) < kills and time.monotonic() - started < seconds:
        number += 1
        left = kills - sum(chaos.killed.values())
        done = chaos.run(f"run-{number}", min(left, chaos.random.randint(1, _MOST_KILLS_A_RUN)), expected)
        print(f"run {number}: {done} kills, {dict(chaos.killed)}, wrong: {chaos.wrong}", file=sys.stderr, flush=True)
    return {
        "seed": seed,
        "kills": sum(chaos.killed.values()),
        "killed": dict(sorted(chaos.killed.items())),
        "runs": number,
        "attempts": chaos.attempts,
        "updates_each": UPDATES,
        "epochs_each": _epochs(runs),
        "wrong": chaos.wrong,
        "seconds": round(time.monotonic() - started, 1),
    }


def _epochs(runs: Runs) -> float:
    row = json.loads((runs.path / "reference" / "train_latest_state" / "manifest.json").read_text())
    return round(float(row["epoch"]), 3)


@contextlib.contextmanager
def place(folder: Path | None) -> Iterator[Runs]:
    """The folder of the runs: the given one, or a temporary folder."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield from make_runs(folder)
        return
    with tempfile.TemporaryDirectory(prefix="memtop-chaos-") as name:
        yield from make_runs(Path(name))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=23333)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with place(arguments.folder) as runs:
        found = torment(runs, arguments.kills, arguments.seed, arguments.seconds)
    report("chaos", found)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
