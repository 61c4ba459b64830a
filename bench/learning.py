"""What forecasts learn from earlier runs: how often a peak is within the foreseen range, and what
reading takes.

    python -m bench.learning

Coverage: the trainings of `bench.predict --calibrated` stand for earlier runs, their dry runs for
what was measured. Of each architecture some are drawn; the range by them is compared with one more,
of which nothing was known. So there are fewer ties between the two than between runs of one model.
Cost: of a file with as many rows as are kept, and of a forecast by it. It needs no GPU.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.common import report
from memtop.presets import load_presets, load_recipes, resolve
from memtop.presets.measured import KEPT, GpuKind, Learned, Measured, learned, model_key, remember
from memtop.presets.parameters import stored_config
from memtop.supervisor.plan import Card
from memtop.supervisor.recovery.forecast import Estimates, spread

_RESULTS = Path(__file__).parent / "results" / "2026-11-29-calibrated.json"
_COUNTS = (1, 2, 4, 5, 8, 12)
_DRAWN = 300
_REPEATED = 50


def coverage() -> list[dict[str, Any]]:
    """By the number of known ratios: the share of others within the range, and its median width
    (the most divided by the least)."""
    by_model: dict[str, list[float]] = defaultdict(list)
    for row in json.loads(_RESULTS.read_text())["rows"]:
        by_model[row["model_type"]].append(1 / (1 + row["errors"]["plain"] / 100))
    draw, rows = random.Random(1), []
    for count in _COUNTS:
        within, widths = [], []
        for ratios in by_model.values():
            for _ in range(_DRAWN if len(ratios) > count else 0):
                *known, other = draw.sample(ratios, count + 1)
                least, most = spread(known)
                within.append(least <= other <= most)
                widths.append(most / least)
        rows.append({"known": count, "within": round(statistics.mean(within), 3), "width": round(statistics.median(widths), 3)})
    return rows


def cost() -> dict[str, float]:
    """Median milliseconds with a full file, all of it of the model that is asked about."""
    settings = resolve(load_recipes()["first-run"], preset=load_presets()["standard"], whole=False)
    config, gpu = stored_config(settings) or {}, GpuKind("a GPU", 24 << 30)
    row = Measured(run="/runs/a", time=0.0, gpu=gpu, model=model_key(config), settings=settings, reserved_bytes=1 << 30)
    for number in range(KEPT):
        remember(replace(row, settings=replace(settings, seq_len=64 + number)))
    known = learned(gpu)
    assert len(known.rows) == KEPT
    estimates = Estimates(card=Card(total_bytes=24 << 30, generation=86, kind=gpu), learned=known)
    plain, lengths = replace(estimates, learned=Learned()), iter(range(512, 4096))
    return {
        "read_ms": _milliseconds(lambda: learned(gpu)),
        "remember_ms": _milliseconds(lambda: remember(row)),
        "forecast_ms": _milliseconds(lambda: estimates.forecast(replace(settings, seq_len=next(lengths)))),
        "forecast_without_ms": _milliseconds(lambda: plain.forecast(replace(settings, seq_len=next(lengths)))),
    }


def _milliseconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATED):
        began = time.perf_counter()
        work()
        taken.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(taken), 2)


def main() -> None:
    rows = coverage()
    for row in rows:
        print(f"{row['known']} known: {row['within']:.1%} within the range, {row['width']:.2f} wide", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        times = cost()
    report("learning", {"coverage": rows, "cost": times})


if __name__ == "__main__":
    main()
