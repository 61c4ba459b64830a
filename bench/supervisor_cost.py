"""The cost of the supervisor of a run: its CPU share at 1 Hz, with and without a viewer, and its
memory.

    python -m bench.supervisor_cost [SECONDS]

The run only sleeps. With a C compiler, the machine has eight scripted GPUs with eight processes
each; otherwise the real machine is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.common import report
from memtop.supervisor.run.client import AsyncRunClient
from memtop.supervisor.units import GIB
from memtop.supervisor.wire import Subscribe
from tests.nvml_double.double import Script, available, build

# Two reports per second, as of a training with steps of half a second.
_PROGRAM = """
import json, os, time
path = os.environ["MEMTOP_ATTEMPT_DIR"] + "/rank-0.jsonl"
for update in range(1, 100000):
    time.sleep(0.5)
    report = {"type": "step", "time": time.time(), "update": update, "samples_seen": update, "loss": 1.0}
    with open(path, "a") as file:
        file.write(json.dumps(report) + "\\n")
"""


def scripted_gpus(folder: Path) -> dict[str, str]:
    script = Script(folder / "script")
    for gpu in range(8):
        script.gpu(gpu, name="GPU", uuid=f"GPU-{gpu}", total=24 * GIB, used=12 * GIB, reserved=GIB, util=90, temp=60)
        for process in range(8):
            script.process(gpu, pid=2 + 8 * gpu + process, used=GIB)
    script.write()
    return script.env(build(folder))


def cpu_fraction(process: psutil.Process, seconds: float) -> float:
    before, started = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - started)


async def viewed(folder: Path, process: psutil.Process, seconds: float) -> float:
    client = await AsyncRunClient.connect(folder)
    await client.send(Subscribe(id=1))
    measuring = asyncio.create_task(asyncio.to_thread(cpu_fraction, process, seconds))
    while not measuring.done():
        receiving = asyncio.ensure_future(client.receive())
        await asyncio.wait({receiving, measuring}, return_when=asyncio.FIRST_COMPLETED)
        receiving.cancel()
    await client.close()
    return measuring.result()


def measure(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="memtop-") as name:
        folder = Path(name)
        folder.chmod(0o700)
        os.environ["MEMTOP_SOCKET_DIR"] = name
        gpus = scripted_gpus(folder) if available() else {}
        environment = {**os.environ, **gpus, "MEMTOP_RUNS_DIR": str(folder / "runs")}

        def memtop(*arguments: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "memtop", *arguments], env=environment, check=True, capture_output=True, text=True
            )
            return done.stdout

        memtop("train", "--detach", "--name", "a", "--", sys.executable, "-c", _PROGRAM)
        try:
            supervisor = psutil.Process(json.loads(memtop("show", "a", "--json"))["supervisor_pid"])
            time.sleep(3)
            alone = cpu_fraction(supervisor, seconds)
            with_viewer = asyncio.run(viewed(folder / "runs" / "a", supervisor, seconds))
            resident = supervisor.memory_info().rss
        finally:
            memtop("stop", "a")
    return {
        "scripted_gpus": 8 if gpus else 0,
        "cpu_fraction_of_a_core": round(alone, 5),
        "cpu_fraction_with_a_viewer": round(with_viewer, 5),
        "resident_bytes": resident,
    }


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    report("supervisor_cost", measure(seconds))


if __name__ == "__main__":
    main()
