"""Sends random events through the rules of a run and kills the supervisor at random points; counts
events, and their rate.

    python -m bench.run_rules [EVENTS]

Stops with an error if an invariant of `tests/run/world.py` does not hold: never two programs at
once; a configuration that ran out of memory is not tried again automatically; a stop always ends;
an accepted restart happens once or is cancelled; an external command is never restarted unchanged
automatically.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from bench.common import report
from tests.run.life import ACTIONS, drive

_EVENTS_EACH = 120


def measure(wanted: int) -> dict[str, Any]:
    happened: Counter[str] = Counter()
    events = runs = kills = starts = 0
    started = time.monotonic()
    while events < wanted:
        world = drive(runs, _EVENTS_EACH)
        events, runs = events + world.steps, runs + 1
        happened += world.happened
        kills, starts = kills + world.kills, starts + sum(world.starts.values())
    seconds = time.monotonic() - started
    return {
        "events": events,
        "runs": runs,
        "supervisors_killed": kills,
        "programs_started": starts,
        "effects": {name: count for name, count in sorted(happened.items()) if name not in ACTIONS},
        "seconds": round(seconds, 1),
        "microseconds_per_event": round(1e6 * seconds / events, 1),
    }


def main() -> None:
    report("run_rules", measure(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000))


if __name__ == "__main__":
    main()
