"""The cost of the agent in programs of each kind: step times with and without it.

    python -m bench.agent_cost [--rounds N] [--styles plain trainer ...] [--recipe ROUNDS]

In each program blocks of updates take turns: with the agent's hooks, without them, and without them
once more. The difference of the last two is the noise of the machine, which is larger than the cost
in an ordinary update. Therefore updates that compute almost nothing show what the agent adds to an
update, with the writing of its reports; this is compared with an ordinary update of about 30 ms.
Each process has one thread. Lightning is taken from this Python, or from the one that
MEMTOP_LIGHTNING_PYTHON names.

The agent's work per step of memtop's own trainer (report, readings, commands) is measured alone,
because it is too small for a difference of two step times. `--recipe` measures this difference,
too: trainings of the default recipe with and without the agent, one after another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
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
LAYERS = 4
"""Of the model in an ordinary update."""
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


def blocks(style: str, layers: int, rounds: int) -> dict[str, list[float]]:
    """The seconds of an update in each block of a program: see `bench/agent_programs.py`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if style == "torchrun" else []
    python = (os.environ.get("MEMTOP_LIGHTNING_PYTHON") if style == "lightning" else None) or sys.executable
    with tempfile.TemporaryDirectory() as name:
        done = subprocess.run(
            [python, *launcher, str(PROGRAMS), style, str(layers), str(rounds)],
            env={**environment(Path(name), agent=True), "OMP_NUM_THREADS": "1", "OUTPUT": name},
            cwd=name,
            capture_output=True,
            text=True,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise RuntimeError(done.stderr or "the program printed no times")
    found: dict[str, list[float]] = json.loads(lines[-1])
    return found


def style_cost(style: str, rounds: int) -> dict[str, object]:
    """What the agent adds to an update, and its share of an ordinary update."""
    small, ordinary = blocks(style, 0, 2 * rounds), blocks(style, LAYERS, rounds)
    added = statistics.median(_added(small, "with"))
    return {
        "added_microseconds": round(1e6 * added, 1),
        "added_microseconds_without_against_without": round(1e6 * statistics.median(_added(small, "control")), 1),
        "small_update_seconds": spread(small["without"]),
        "ordinary_update_seconds": spread(ordinary["without"]),
        "share_of_ordinary_update": round(added / statistics.median(ordinary["without"]), 5),
        "ordinary_ratio_of_pairs": ratios(ordinary["with"], ordinary["without"]),
        "ordinary_ratio_of_pairs_without_against_without": ratios(ordinary["control"], ordinary["without"]),
    }


def _added(times: dict[str, list[float]], arm: str) -> list[float]:
    return [one - other for one, other in zip(times[arm], times["without"], strict=True)]


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
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--styles", nargs="*", choices=STYLES, default=STYLES)
    parser.add_argument("--recipe", type=int, default=0, metavar="ROUNDS")
    options = parser.parse_args()
    found: dict[str, object] = {}
    for style in options.styles:
        print(f"{style} ...", file=sys.stderr, flush=True)
        try:
            found[style] = style_cost(style, options.rounds)
        except RuntimeError as error:
            found[style] = {"error": str(error).strip().splitlines()[-1]}
    if options.recipe:
        found["recipe"] = recipe_cost(options.recipe)
    alone = round(alone_seconds(), 7)
    report("agent_cost", {"unit": "seconds per update", **found, "agent_alone_seconds_per_step": alone})


if __name__ == "__main__":
    main()
