"""What a redraw of the metrics screen costs: CPU time of the drawing alone.

    python -m bench.metrics [RUNS] [UPDATES]

Draws one metric and four metrics of each run (5 runs of 100,000 updates each) on 160x50 cells: all
updates and the last tenth, with and without smoothing. Each redraw has another range and cursor.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.common import report
from memtop.supervisor.wire import Metric
from memtop.tui.metrics.curves import RunCurves
from memtop.tui.metrics.drawing import METRICS, MetricsView, draw

_SHOWN = ("loss", "samples_per_second", "learning_rate", "peak_bytes")
_REDRAWS = 30


def _run(number: int, updates: int) -> RunCurves:
    chance, run = random.Random(number), RunCurves(f"run-{number}")
    run.take(
        Metric(
            update=n,
            attempt=1 + n * 3 // updates,
            loss=2 + 5 / (1 + n / 1000) + chance.gauss(0, 0.2),
            learning_rate=1e-3 * (1 - n / updates),
            samples_seen=n * 32,
            step_seconds=chance.uniform(0.4, 0.6),
            peak_bytes=chance.randrange(8 << 30, 9 << 30),
            time=n * 0.5,
        )
        for n in range(1, updates + 1)
    )
    return run


def _milliseconds(
    runs: Sequence[RunCurves], updates: int, charts: int, part: float = 1.0, smoothing: int = 0
) -> dict[str, float]:
    kinds = [kind for kind in METRICS if kind.name in _SHOWN[:charts]]
    each = []
    for number in range(_REDRAWS):
        cursor = updates * (1 - part) + updates * part * (number + 0.5) / _REDRAWS
        # Nothing is as it was at the redraw before.
        start = updates * (1 - part) + number
        view = MetricsView(axis="update", start=start, end=updates, cursor=cursor, smoothing=smoothing)
        started = time.process_time()
        draw(kinds, runs, view, 158, 46)
        each.append(1e3 * (time.process_time() - started))
    return {"median": round(statistics.median(each), 1), "most": round(max(each), 1)}


def measure(count: int, updates: int) -> dict[str, Any]:
    started = time.process_time()
    runs = [_run(number, updates) for number in range(count)]
    reading = time.process_time() - started
    _milliseconds(runs, updates, len(_SHOWN))  # sums up the blocks
    return {
        "runs": count,
        "updates_each": updates,
        "milliseconds_of_a_redraw": {
            "one chart": _milliseconds(runs, updates, 1),
            "one chart, smoothed": _milliseconds(runs, updates, 1, smoothing=32),
            "one chart, the last tenth": _milliseconds(runs, updates, 1, part=0.1),
            "four charts": _milliseconds(runs, updates, 4),
        },
        "seconds_to_take_in_a_run": round(reading / count, 2),
    }


def main() -> None:
    numbers = [int(word) for word in sys.argv[1:]]
    report("metrics", measure(*(numbers or (5, 100_000))))


if __name__ == "__main__":
    main()
