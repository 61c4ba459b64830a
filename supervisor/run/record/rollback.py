"""Goes back to an earlier kept state: what came after it is moved aside with a time stamp, nothing is deleted.

A run that is stopped for this saves once more, and the oldest kept state may have to go for it. So the chosen one is held fast
beside, by hard links (copies where the file system has none), before the run is asked to stop.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.run.record.checkpoints import kept_states, newest_until, read_checkpoint
from memtop.supervisor.wire import Checkpoint

# What file systems say that have no hard links, or none across their parts.
_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def state_at(latest: Path, update: int) -> Checkpoint:
    """The newest kept state at or before that update; UsageError if there is none."""
    return newest_until(kept_states(latest), update)


def hold(latest: Path, update: int) -> None:
    """Keep the state that will be gone back to, whatever the stopping program saves."""
    chosen, held = Path(state_at(latest, update).path), _held(latest)
    if chosen == held:
        return
    beside = held.with_name(f"{held.name}.new")
    try:
        for leftover in (beside, held):
            shutil.rmtree(leftover, ignore_errors=True)  # of our own: what a link leads to stays
        shutil.copytree(chosen, beside, copy_function=_link_or_copy)
        beside.rename(held)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise RunFolderError(f"{chosen}: cannot be held fast: {_why(error)}") from None


def let_go(latest: Path) -> None:
    """Nobody goes back any more: what was held for it is given up, as the trainer would have done."""
    shutil.rmtree(_held(latest), ignore_errors=True)


@contextlib.contextmanager
def gone_back(latest: Path, update: int | None) -> Iterator[Path | None]:
    """Makes the newest state at or before that update the newest of all (None: leaves all as it is), and gives the folder where
    the others are now, None if none came after it. If the block does not succeed, everything is where it was.

    The run must not be running. RunFolderError if something cannot be moved.
    """
    moves: list[tuple[Path, Path]] = []
    aside = latest.with_name(f"set-aside.{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        if update is not None:
            _move(latest, update, aside, moves)
        yield aside if any(here.parent == aside for _, here in moves) else None
    except BaseException:
        _move_back(moves, aside)
        raise
    let_go(latest)


def _move(latest: Path, update: int, aside: Path, moves: list[tuple[Path, Path]]) -> None:
    """Go back; `moves` is told what was moved, from where to where."""
    chosen = Path(state_at(latest, update).path)

    def move(there: Path, here: Path) -> None:
        there.rename(here)
        moves.append((there, here))

    try:
        for folder in (latest, *_others(latest), latest.with_name("best_state")):
            state = read_checkpoint(folder)
            if state is None or folder == chosen or (state.complete and (state.updates or 0) <= update):
                continue
            aside.mkdir(exist_ok=True)
            move(folder, aside / folder.name)
        if chosen != latest:
            if latest.is_dir():
                # An older whole state lies there: it stays kept, behind the chosen one.
                move(latest, latest.with_name(f"{latest.name}.{time.time_ns()}"))
            move(chosen, latest)
    except OSError as error:
        raise RunFolderError(f"{error.filename or latest}: cannot be moved: {_why(error)}") from None


def _move_back(moves: list[tuple[Path, Path]], aside: Path) -> None:
    for there, here in reversed(moves):
        try:
            here.rename(there)
        except OSError as error:
            raise RunFolderError(f"{here}: cannot be moved back to {there}: {_why(error)}; move it by hand") from error
    if aside.is_dir() and not any(aside.iterdir()):
        aside.rmdir()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)


def _why(error: OSError) -> str:
    # What copytree collects is a list of (from, to, why), without an errno of its own.
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        return "; ".join(str(why) for *_, why in error.args[0][:2])
    return error.strerror or str(error)


def _held(latest: Path) -> Path:
    return latest.with_name(f"{latest.name}.held")


def _others(latest: Path) -> list[Path]:
    return sorted(path for path in latest.parent.glob(f"{latest.name}.*") if path.is_dir() and path != _held(latest))
