"""Sends SIGKILL at random times in short runs: to the trainer (also during a save), one of its
ranks, the supervisor, a follower and a dashboard.

    python -m bench.chaos [--workloads trainer,deepspeed,command] [--kills 70] [--seed 23333]
                          [--seconds N] [--folder DIR]

The workloads: the built-in trainer in one process, the same under DeepSpeed ZeRO-2 on two ranks,
and an external command that saves and loads its state. `--kills` counts for each of them.

Every run is restarted until it finishes. It must then have used the same samples in each update as
an undisturbed run (equal digests), and its final state must be equal, byte for byte. No attempt of
the external command may start its program twice, and no two programs may run at once.
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

import torch
from msgspec.structs import replace

from bench.common import report
from memtop import __version__
from memtop.presets import load_presets, load_recipes, resolve
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.monitor.processes.proc import identify
from memtop.supervisor.monitor.processes.signals import SignalRefused, signal_process
from memtop.supervisor.monitor.processes.table import run_processes
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, create_run
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
PROGRAM = f"""
import fcntl, hashlib, os, sys, time, torch

path = sys.argv[1]
lock = open(path + ".lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    open(path + ".two-at-once", "w")
    raise
with open(path + ".starts", "a") as starts:
    starts.write(os.environ["MEMTOP_ATTEMPT"] + "\\n")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
digests = []
if os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    digests = state["digests"]
for update in range(len(digests) + 1, {UPDATES} + 1):
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(update))
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    digests.append(hashlib.sha256(batch.numpy().tobytes()).hexdigest())
    time.sleep(0.1)
    if update % 4 == 0:
        torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "digests": digests}}, path + ".tmp")
        os.replace(path + ".tmp", path)
"""
VICTIMS = ("trainer", "rank", "mid-save", "supervisor", "both", "follower", "dashboard")
WEIGHTS = (4, 2, 4, 4, 2, 2, 2)
_WITHIN_SECONDS = 6.0
"""The most seconds between two kills, so that loading, training and the end are all hit."""
_MOST_KILLS_A_RUN = 8
_RUN_SECONDS = 900.0


class Workload:
    """What runs under the kills: here the built-in trainer in one process."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        (runs.root / "memtop.toml").write_text(RECIPE)

    def start(self, name: str) -> None:
        self.runs.memtop("train", "chaos", "--name", name, "--detach")

    def is_saving(self, folder: RunFolder) -> bool:
        return any(folder.path.glob("train_latest_state.tmp-*"))

    def outcome(self, name: str) -> dict[str, Any]:
        """What must be the same as in an undisturbed run."""
        metrics = self.runs.show(name, metrics=True)["metrics"]
        manifest = json.loads((self.runs.path / name / "train_latest_state" / "manifest.json").read_text())
        return {
            "updates": [row["update"] for row in metrics],
            "digests": [row["sample_digest"] for row in metrics],
            "samples_seen": [row["samples_seen"] for row in metrics],
            "losses": [row["loss"] for row in metrics],
            "files": [(file["name"], file["sha256"]) for file in manifest["files"]],
        }

    def faults(self, name: str) -> list[str]:
        """What went wrong although the outcome may be right."""
        return []


class DeepSpeed(Workload):
    """Two ranks under ZeRO-2. The command line starts several ranks on GPUs only."""

    def start(self, name: str) -> None:
        os.chdir(self.runs.root)  # has the recipe
        recipe, preset = load_recipes()["chaos"], load_presets()["deepspeed"]
        settings = replace(resolve(recipe, preset=preset, world_size=2), workers=1)
        spec = RunSpec(name=name, created=time.time(), settings=settings, cwd=str(self.runs.root), memtop_version=__version__)
        folder = create_run(self.runs.path, spec, fresh=False)
        self.runs.start(str(folder.path), module="memtop.supervisor", stderr=subprocess.DEVNULL)


class Command(Workload):
    """An external command, which saves and loads a state of its own."""

    def start(self, name: str) -> None:
        (self.runs.root / "program.py").write_text(PROGRAM)
        self.runs.memtop("train", "--name", name, "--detach", "--", sys.executable, "program.py", f"{name}.pt")

    def is_saving(self, folder: RunFolder) -> bool:
        return (self.runs.root / f"{folder.name}.pt.tmp").exists()

    def outcome(self, name: str) -> dict[str, Any]:
        state = torch.load(self.runs.root / f"{name}.pt")
        return {"digests": state["digests"], "weights": [value.tolist() for value in state["model"].values()]}

    def faults(self, name: str) -> list[str]:
        starts = Counter((self.runs.root / f"{name}.pt.starts").read_text().split())
        found = [f"attempt {number} was started {count} times" for number, count in starts.items() if count > 1]
        return found + ["two programs ran at once"] * (self.runs.root / f"{name}.pt.two-at-once").exists()


WORKLOADS = {"trainer": Workload, "deepspeed": DeepSpeed, "command": Command}


class Chaos:
    """One series of runs under random kills."""

    def __init__(self, workload: Workload, seed: int, within: float) -> None:
        self.workload = workload
        self.runs = workload.runs
        self.within = within
        self.random = random.Random(seed)
        self.killed: Counter[str] = Counter()
        self.attempts = 0
        self.wrong: list[str] = []

    def reference(self) -> dict[str, Any]:
        """The outcome of an undisturbed run."""
        self.workload.start("reference")
        self.runs.wait("reference", lambda document: document["state"] == "finished", _RUN_SECONDS)
        return self.workload.outcome("reference")

    def run(self, name: str, kills: int, expected: dict[str, Any]) -> int:
        """One run with at most this many kills. Returns how many there were before it finished."""
        self.workload.start(name)
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
            "rank": lambda: self._after(patience, folder) and self._rank(read_state(folder)),
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

    def _saving(self, folder: RunFolder) -> bool:
        """Wait until a state is being written; False if the run ends first."""
        while True:
            for _ in range(200):
                if self.workload.is_saving(folder):
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

    def _rank(self, state: RunState) -> bool:
        pids = [rank.pid for rank in state.ranks if rank.pid is not None]
        return bool(pids) and self._end(self.random.choice(pids))

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
        found = self.workload.outcome(name)
        self.wrong += [f"{name}: other {what} than undisturbed" for what in expected if found[what] != expected[what]]
        self.wrong += [f"{name}: {fault}" for fault in self.workload.faults(name)]
        self.attempts += len(self.runs.show(name)["attempts"])
        until = time.monotonic() + 15
        while (left := run_processes(str(folder.path))) and time.monotonic() < until:
            time.sleep(0.1)
        self.wrong += [f"{name}: process {process.pid} is left over" for process in left]


def torment(
    workload: Workload, kills: int, seed: int, seconds: float = float("inf"), within: float = _WITHIN_SECONDS
) -> dict[str, Any]:
    """This many kills in as many runs as needed. Returns the document to print."""
    chaos, started, number = Chaos(workload, seed, within), time.monotonic(), 0
    expected = chaos.reference()
    if len(set(expected["digests"])) != UPDATES:
        chaos.wrong.append("the undisturbed run is not whole")
    while sum(chaos.killed.values()) < kills and time.monotonic() - started < seconds:
        number += 1
        left = kills - sum(chaos.killed.values())
        done = chaos.run(f"run-{number}", min(left, chaos.random.randint(1, _MOST_KILLS_A_RUN)), expected)
        print(f"run {number}: {done} kills, {dict(chaos.killed)}, wrong: {chaos.wrong}", file=sys.stderr, flush=True)
    return {
        "kills": sum(chaos.killed.values()),
        "killed": dict(sorted(chaos.killed.items())),
        "runs": number,
        "attempts": chaos.attempts,
        "updates_each": UPDATES,
        "wrong": chaos.wrong,
        "seconds": round(time.monotonic() - started, 1),
    }


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
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="separated by commas [%(default)s]")
    parser.add_argument("--kills", type=int, default=70, help="of each workload [%(default)s]")
    parser.add_argument("--seed", type=int, default=23333)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run of a workload after so long")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found = {}
    for name in arguments.workloads.split(","):
        with place(arguments.folder and arguments.folder / name) as runs:
            found[name] = torment(WORKLOADS[name](runs), arguments.kills, arguments.seed, arguments.seconds)
    report("chaos", {"seed": arguments.seed, **found})
    return 1 if any(one["wrong"] for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
