"""What all benchmarks share: where they ran, and paired medians."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import memtop


def machine() -> dict[str, Any]:
    """The machine in numbers that matter here, without its name."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {"cores": os.cpu_count(), "cpu": model, "python": platform.python_version(), "memtop": memtop.__version__}


def report(name: str, results: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    print(json.dumps({"bench": name, "date": time.strftime("%Y-%m-%d"), "machine": machine(), **results}, indent=2))


def median_seconds(measure: Callable[[], float], runs: int) -> dict[str, float]:
    """Minimum, median and maximum of several runs; the first is not counted."""
    measure()
    values = [measure() for _ in range(runs)]
    return spread(values)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "minimum": round(min(values), 4),
        "median": round(statistics.median(values), 4),
        "maximum": round(max(values), 4),
        "runs": len(values),
    }
