"""The cost of the agent for the default recipe: step times with and without it, in turns within one
run.

    python -m bench.agent_cost [ROUNDS]

The agent's work per step (report, readings, commands) is also measured alone, because the
difference of two noisy step times is too inaccurate for so small a cost.
"""

from __future__ import annotations

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


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    arms: dict[str, list[float]] = {"without": [], "with": [], "control": []}
    for number in range(rounds):
        # In turns and in changing order, so that a drift of the machine's speed affects all arms.
        # The control arm is another run without the agent: its difference is the noise of the
        # machine.
        order = sorted(arms, reverse=bool(number % 2))
        for arm in order:
            arms[arm].append(step_seconds(agent=arm == "with"))
    alone = alone_seconds()
    report(
        "agent_cost",
        {
            "unit": "seconds per update of first-run",
            "without_agent": spread(arms["without"]),
            "with_agent": spread(arms["with"]),
            "ratio_of_pairs": ratios(arms["with"], arms["without"]),
            "ratio_of_pairs_without_against_without": ratios(arms["control"], arms["without"]),
            "agent_alone_seconds_per_step": round(alone, 7),
            "agent_alone_fraction_of_step": round(alone / statistics.median(arms["without"]), 6),
        },
    )


if __name__ == "__main__":
    main()
