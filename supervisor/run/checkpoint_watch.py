"""Looks for new checkpoints of a program with a profile, and keeps a copy of one that the program
will save over. It works in a thread: a disk may be slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.run.events import Occurrence, SavedChecked, WriteChecked
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.record import profile_checkpoints
from memtop.supervisor.run.record.profile_checkpoints import is_given, place_of, record_of
from memtop.supervisor.wire import Checkpoint

_SECONDS, _STOPPING_SECONDS = 3.0, 1.0
"""Between two looks; the second while the program is being stopped."""
_SHARE = 50
"""Copies take at most one second in so many."""


class CheckpointWatch:
    """Of one run. `post` gets what has changed."""

    def __init__(self, run: Path, post: Callable[[Occurrence], None]) -> None:
        self._run = run
        self._post = post
        self._task: asyncio.Task[None] | None = None
        self._due = 0.0
        self._keeps_from = 0.0
        self._shown: Checkpoint | None = None

    def tick(self, grip: Grip | None, *, stopping: bool) -> None:
        """Begin a look if one is due."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()
        now = time.monotonic()
        if grip is None or grip.profile is None or self._task is not None or now < self._due:
            return
        self._due = now + (_STOPPING_SECONDS if stopping else _SECONDS)
        self._task = asyncio.get_running_loop().create_task(self._look(grip))

    async def _look(self, grip: Grip) -> None:
        found, problem = await asyncio.to_thread(self.newest, grip)
        if found is not None and found != self._shown:
            self._shown = found
            self._post(SavedChecked(found))
        self._post(WriteChecked(topic="checkpoint", problem=problem))

    def newest(self, grip: Grip) -> tuple[Checkpoint | None, str | None]:
        """The newest checkpoint of the program, and why memtop has no copy of it; None if it has
        one or needs none."""
        place = place_of(grip)
        newest = None if place is None else profile_checkpoints.newest_of(place, grip.since, grip.split)
        # A path that the program is given has a name of its own in each checkpoint.
        if newest is None or place is None or not newest.complete or place.given or time.monotonic() < self._keeps_from:
            return newest, None
        record, begun = record_of(self._run), time.monotonic()
        if record is not None and is_given(Path(newest.path), record):
            return newest, None
        try:
            profile_checkpoints.keep(newest, self._run, place, grip.split)
        except RunFolderError as error:
            return newest, str(error)
        finally:
            took = time.monotonic() - begun
            self._keeps_from = time.monotonic() + _SHARE * took
        return newest, None
