"""The checkpoints of the user's own program, whether its Trainer or a profile says where they are.

These functions copy and read files: a disk may be slow, so they are called in a thread.
"""

from __future__ import annotations

from pathlib import Path

from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.record import profile_checkpoints, program_checkpoints
from memtop.supervisor.run.record.profile_checkpoints import place_of
from memtop.supervisor.wire import Checkpoint

_TRIES = 2


def newest_for(run: Path, grip: Grip, since: float | None = None) -> Checkpoint | None:
    """The checkpoint from which the program would resume: the newest complete one, memtop's copy
    included. `since`: with a profile, older ones are of an earlier training."""
    if grip.profile is None:
        return program_checkpoints.newest_for(run, grip)
    place = place_of(grip)
    return None if place is None else profile_checkpoints.newest_for(run, place, since, grip.split)


def keep_for(run: Path, before: Grip, after: Grip, python: str | None) -> None:
    """Keep the newest complete checkpoint in the run's folder before the program is stopped, and
    find out whether its position can be converted. RunFolderError if that is not possible."""
    kept, place = keep(run, before, before.since), place_of(before)
    if kept is not None and place is not None:
        profile_checkpoints.try_conversion(run, place, before.split, after.split, python)


def keep(run: Path, grip: Grip, since: float | None = None) -> Checkpoint | None:
    """Keep the newest complete checkpoint in the run's folder, before the program is stopped. None
    if there is none. RunFolderError if that is not possible."""
    if grip.profile is None and not _on_same_disk(Path(grip.output_dir), run):
        return None  # copying takes time in which the Trainer goes on; it saves before it stops
    problem: RunFolderError | None = None
    for _ in range(_TRIES):  # the program may delete it meanwhile, since it has saved a newer one
        newest = newest_for(run, grip, since)
        if newest is None or not newest.complete:
            return None
        try:
            return _kept(newest, run, grip)
        except RunFolderError as error:
            problem = error
    assert problem is not None
    raise problem


def _on_same_disk(one: Path, other: Path) -> bool:
    """Where links are possible."""
    try:
        return one.stat().st_dev == other.stat().st_dev
    except OSError:
        return False


def _kept(newest: Checkpoint, run: Path, grip: Grip) -> Checkpoint:
    place = place_of(grip)
    if place is None:
        return program_checkpoints.keep(newest, run)
    return profile_checkpoints.keep(newest, run, place, grip.split)


def prepared(run: Path, before: Grip, after: Grip, since: float | None = None, python: str | None = None) -> Checkpoint | None:
    """What the next attempt resumes from, in its place. None if there is no complete checkpoint, or
    if the program does not resume. RunFolderError if it cannot be copied or converted.

    `before` and `after`: the program as it counts in the newest checkpoint, and as it will.
    """
    newest = newest_for(run, before, since)
    place = place_of(before)
    if newest is None or not newest.complete or (before.profile is not None and before.profile.resume.how == "never"):
        return None
    if place is None:
        return program_checkpoints.keep(newest, run)
    splits = {"before": before.split, "after": after.split}
    return profile_checkpoints.prepared(newest, run, place, **splits, python=python)
