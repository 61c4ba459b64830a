"""Goes back to an earlier kept state: what came after it is moved aside with a time stamp, nothing is deleted.

A run that is stopped for this saves once more, and the oldest kept state may have to go for it. So the chosen one is held fast
beside, by hard links, before the run is asked to stop.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from memtop.supervisor.errors import RunFolderError, UsageError
from memtop.supervisor.run.manifest import kept_states, read_checkpoint
from memtop.supervisor.wire import Checkpoint


def state_at(latest: Path, update: int) -> Checkpoint:
    """The newest kept state at or before that update; UsageError if there is none."""
    states = kept_states(latest)
    fitting = [state for state in states if state.updates is not None and state.updates <= update]
    if not fitting:
        there = ", ".join(str(state.updates) for state in states) or "none"
        raise UsageError(f"--state: no kept state at or before update {update} (kept: {there}); without it the newest goes on")
    return max(fitting, key=lambda state: state.updates or 0)


def hold(latest: Path, update: int) -> None:
    """Keep the state that will be gone back to, whatever the stopping program saves."""
    chosen, held = Path(state_at(latest, update).path), _held(latest)
    if chosen == held:
        return
    beside = held.with_name(f"{held.name}.new")
    try:
        for leftover in (beside, held):
            shutil.rmtree(leftover, ignore_errors=True)  # links of our own: what they link to stays
        shutil.copytree(chosen, beside, copy_function=os.link)
        beside.rename(held)
    except OSError as error:
        raise RunFolderError(f"{chosen}: cannot be held fast: {error.strerror or error}") from None


def go_back(latest: Path, update: int) -> Path | None:
    """Make the newest state at or before that update the newest of all; where the others are now, None if none came after it.

    The run must not be running.
    """
    chosen = Path(state_at(latest, update).path)
    aside = latest.with_name(f"set-aside.{time.strftime('%Y%m%d-%H%M%S')}")
    moved = None
    try:
        for folder in (latest, *_others(latest), latest.with_name("best_state")):
            state = read_checkpoint(folder)
            if state is None or folder == chosen or (state.complete and (state.updates or 0) <= update):
                continue
            aside.mkdir(exist_ok=True)
            folder.rename(aside / folder.name)
            moved = aside
        if chosen != latest:
            if latest.is_dir():
                # An older whole state lies there: it stays kept, behind the chosen one.
                latest.rename(latest.with_name(f"{latest.name}.{time.time_ns()}"))
            chosen.rename(latest)
        shutil.rmtree(_held(latest), ignore_errors=True)
    except OSError as error:
        raise RunFolderError(f"{error.filename or latest}: cannot be moved: {error.strerror}") from None
    return moved


def _held(latest: Path) -> Path:
    return latest.with_name(f"{latest.name}.held")


def _others(latest: Path) -> list[Path]:
    return sorted(path for path in latest.parent.glob(f"{latest.name}.*") if path.is_dir() and path != _held(latest))
