"""The cost of the agent in programs of each kind: step times with and without it.

    python -m bench.agent_cost [--pairs N] [--styles plain trainer ...] [--recipe ROUNDS]

Three processes of a program take turns by blocks of updates: one with the agent, two without it.
The difference of these two is the noise of the machine. Lightning is taken from this Python, or
from the one that MEMTOP_LIGHTNING_PYTHON names.

The agent's work per step of memtop's own trainer (report, readings, commands) is measured alone,
because it is too small for a difference of two step times. `--recipe` measures this difference,
too: trainings of the default recipe with and without the agent, one after another.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from bench.common import ratios, report, spread
from memtop.presets import edit_settings, load_presets, load_recipes, resolve

PROGRAMS = Path(__file__).with_name("agent_programs.py")
STYLES = ("plain", "trainer", "accelerate", "torchrun", "lightning")
BLOCK = 4
"""Updates between two turns."""
SITE = Path(__file__).resolve().parents[1] / "train" / "agent" / "site"
UPDATES = 30
_ALONE = """
import sys, time, memtop_agent as agent
agent.offer("checkpoint", "stop")
n = 2000
started = time.perf_counter()
for update in range(n):
    agent.report("step", update=update, samples_seen=update, loss=1.0, learning_rate=1e-3, tokens=4096, sample_digest="0" * 64,
                 step_seconds=0.1, data_wait_seconds=0.1, forward_seconds=0.1, backward_seconds=0.1, optimizer_seconds=0.1,
                 dropped=agent.dropped(), **agent.readings())
    agent.take_commands()
print((time.perf_counter() - started) / n)
"""


def settings_file(folder: Path) -> Path:
    settings = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])
    path = folder / "settings.json"
    path.write_bytes(msgspec.json.encode(edit_settings(settings, max_updates=UPDATES, assignments={"save_every": "10000"})))
    return path


def environment(folder: Path, *, agent: bool) -> dict[str, str]:
    added = {"HF_HUB_OFFLINE": "1"}
    if agent:
        # Without a supervisor the agent still writes its journal, and sometimes tries to connect.
        added |= {"PYTHONPATH": str(SITE), "MEMTOP_ATTEMPT_DIR": str(folder), "MEMTOP_SOCKET": str(folder / "no.sock")}
    return {**os.environ, **added}


def step_seconds(*, agent: bool) -> float:
    """Median seconds between the progress lines of one training of UPDATES updates."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "memtop.train", "--settings", str(settings_file(folder))]
        process = subprocess.Popen(
            [*command, "--state-dir", str(folder / "state")],
            env=environment(folder, agent=agent),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        moments = [time.perf_counter() for line in process.stdout if line.startswith("update ")]
        if process.wait() != 0 or len(moments) != UPDATES:
            raise RuntimeError(f"training ended with {process.returncode} after {len(moments)} updates")
        # The first updates warm up caches and threads.
        return statistics.median(b - a for a, b in itertools.pairwise(moments[5:]))


def alone_seconds() -> float:
    """Seconds of the agent's work for one step, including its journal thread."""
    with tempfile.TemporaryDirectory() as name:
        done = subprocess.run(
            [sys.executable, "-c", _ALONE], env=environment(Path(name), agent=True), capture_output=True, text=True, check=True
        )
        return float(json.loads(done.stdout))


class Gated:
    """A program that trains a block of updates on request."""

    def __init__(self, style: str, folder: Path, *, agent: bool) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if style == "torchrun" else []
        python = (os.environ.get("MEMTOP_LIGHTNING_PYTHON") if style == "lightning" else None) or sys.executable
        self._process = subprocess.Popen(
            [python, *launcher, str(PROGRAMS), style, str(BLOCK)],
            env={**environment(folder, agent=agent), "OMP_NUM_THREADS": "1", "OUTPUT": str(folder)},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "errors.txt").open("w"),
            text=True,
            start_new_session=True,
        )
        self._errors = folder / "errors.txt"

    def wait(self, word: str) -> str:
        """What follows this word in the program's next line with it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line[len(word) :]
        raise RuntimeError(f"the program has ended: {self._errors.read_text()[-2000:]}")

    def block(self) -> float:
        """The seconds of an update in the next block."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self.wait("block ")) / BLOCK

    def end(self) -> None:
        """It ends at the end of its input. torchrun ends the ranks that wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait()


def style_cost(style: str, pairs: int) -> dict[str, object]:
    """The step times of a program, with the agent, without it, and without it once more."""
    times: dict[str, list[float]] = {"without": [], "with": [], "control": []}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        programs = {}
        for arm in times:
            folder = Path(name) / arm
            folder.mkdir()
            programs[arm] = Gated(style, folder, agent=arm == "with")
            stack.callback(programs[arm].end)
        for program in programs.values():
            program.wait("ready")
        for number in range(pairs):
            # In changing order, so that a drift of the machine's speed affects all arms.
            order = [list(times), ["with", "control", "without"], ["control", "without", "with"]][number % 3]
            for arm in order:
                times[arm].append(programs[arm].block())
    added = [one - other for one, other in zip(times["with"], times["without"], strict=True)]
    return {
        "without_agent": spread(times["without"]),
        "with_agent": spread(times["with"]),
        "ratio_of_pairs": ratios(times["with"], times["without"]),
        "ratio_of_pairs_without_against_without": ratios(times["control"], times["without"]),
        "median_of_added_microseconds": round(1e6 * statistics.median(added), 1),
    }


def recipe_cost(rounds: int) -> dict[str, object]:
    """Whole trainings of the default recipe, one after another."""
    arms: dict[str, list[float]] = {"without": [], "with": [], "control": []}
    for number in range(rounds):
        for arm in sorted(arms, reverse=bool(number % 2)):
            arms[arm].append(step_seconds(agent=arm == "with"))
    return {
        "without_agent": spread(arms["without"]),
        "with_agent": spread(arms["with"]),
        "ratio_of_pairs": ratios(arms["with"], arms["without"]),
        "ratio_of_pairs_without_against_without": ratios(arms["control"], arms["without"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=48)
    parser.add_argument("--styles", nargs="*", choices=STYLES, default=STYLES)
    parser.add_argument("--recipe", type=int, default=0, metavar="ROUNDS")
    options = parser.parse_args()
    found: dict[str, object] = {}
    for style in options.styles:
        print(f"{style} ...", file=sys.stderr, flush=True)
        try:
            found[style] = style_cost(style, options.pairs)
        except RuntimeError as error:
            found[style] = {"error": str(error).strip().splitlines()[-1]}
    if options.recipe:
        found["recipe"] = recipe_cost(options.recipe)
    alone = round(alone_seconds(), 7)
    report("agent_cost", {"unit": "seconds per update", **found, "agent_alone_seconds_per_step": alone})


if __name__ == "__main__":
    main()
