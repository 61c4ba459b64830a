"""What a fast run takes: a program reports 1,000 updates a second and prints 10 MB a second.

    python -m bench.growth [SECONDS]

Prints the space of its ledger, journal and log and the supervisor's memory and CPU share now and
then, and in the end how long a new supervisor takes to begin and what `show --json --metrics`
needs.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.common import report

# As the agent writes them: twenty times a second, with the fields of an external command.
_PROGRAM = """
import json, os, sys, time
path = os.environ["MEMTOP_ATTEMPT_DIR"] + "/rank-0.jsonl"
update, line = 0, "x" * 999 + "\\n"
start = time.monotonic()
while True:
    behind = int((time.monotonic() - start) * 1000) - update
    reports = []
    for _ in range(behind):
        update += 1
        values = {"type": "step", "time": time.time(), "update": update, "loss": 1.0, "learning_rate": 1e-4,
                  "step_seconds": 0.001, "data_wait_seconds": 0.0001, "rss_bytes": 1 << 30, "samples_seen": 8 * update,
                  "anonymous_bytes": 1 << 29, "sample_digest": "%064x" % update}
        reports.append(json.dumps(values) + "\\n")
    with open(path, "a") as file:
        file.write("".join(reports))
    for _ in range(10 * behind):
        sys.stdout.write(line)
    time.sleep(0.05)
"""
_ROWS = 8


def on_disk(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob(pattern))


def measure(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="memtop-") as name:
        folder = Path(name)
        folder.chmod(0o700)
        environment = {**os.environ, "MEMTOP_SOCKET_DIR": name, "MEMTOP_RUNS_DIR": str(folder / "runs")}

        def memtop(*arguments: str) -> str:
            command = [sys.executable, "-m", "memtop", *arguments]
            return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

        memtop("train", "--detach", "--name", "a", "--", sys.executable, "-c", _PROGRAM)
        run = folder / "runs" / "a"
        try:
            supervisor = psutil.Process(json.loads(memtop("show", "a", "--json"))["supervisor_pid"])
            rows = []
            for _ in range(_ROWS):
                before, began = sum(supervisor.cpu_times()[:2]), time.monotonic()
                time.sleep(seconds / _ROWS)
                used = (sum(supervisor.cpu_times()[:2]) - before) / (time.monotonic() - began)
                sizes = {"ledger": "ledger.sqlite*", "journal": "attempts/*/rank-0.jsonl", "log": "attempts/*/output.log"}
                row: dict[str, Any] = {"updates": json.loads(memtop("show", "a", "--json"))["updates"]}
                row |= {f"{key}_bytes": on_disk(run, pattern) for key, pattern in sizes.items()}
                row |= {"resident_bytes": supervisor.memory_info().rss, "cpu_fraction_of_a_core": round(used, 3)}
                print(json.dumps(row), flush=True)
                rows.append(row)
            supervisor.kill()
            supervisor.wait()
            began = time.monotonic()
            memtop("watch", "a", "--once")
            begins = time.monotonic() - began
        finally:
            memtop("stop", "a")
        lines = memtop("show", "a", "--json", "--metrics").count("sample_digest")
        # The largest of all commands so far, which this one is.
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {"rows": rows, "new_supervisor_seconds": round(begins, 2), "metric_rows": lines, "largest_command_bytes": peak}


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 240.0
    report("growth", measure(seconds))


if __name__ == "__main__":
    main()
