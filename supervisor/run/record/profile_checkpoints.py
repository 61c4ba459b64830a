"""The checkpoints of a program with a profile: the newest complete one, the copy that memtop keeps
of it, and what the program resumes from.

Many programs save over their only checkpoint, in place. So the run's folder has a copy of the
newest complete one, with a record of how its position counts. If the program is killed while it
saves, the copy is put back. A position that counts another split is converted in a further copy.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
import threading
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from memtop.presets.program_profiles import CheckpointRule, Position, filled
from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.positions import Split, converted, updates_at
from memtop.supervisor.run.record.checkpoints import why
from memtop.supervisor.run.record.convert import write_position
from memtop.supervisor.run.record.copies import copy, remove, size_of, stamps
from memtop.supervisor.run.record.folder import read_derived, write_json
from memtop.supervisor.run.record.program_checkpoints import KEPT
from memtop.supervisor.run.record.whole_files import (
    LIGHTNING,
    Stamp,
    numbers_in,
    values_file,
    why_no_whole_folder,
    why_not_whole,
)
from memtop.supervisor.wire import Checkpoint

_RECORD = "kept.json"
_CONVERTED = "converted"
"""The folder in KEPT with the checkpoint that the program is given, if its position was converted.
"""
_SAVING_SECONDS = 3.0
"""A save that has written nothing for so long does not go on."""

# One thread looks for new checkpoints, another prepares a restart.
_alone = threading.Lock()


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a program saves, and what its checkpoints are."""

    paths: tuple[str, ...]
    """Absolute paths with `*`."""
    rule: CheckpointRule
    position: Position
    given: bool = False
    """The program is given the path of the checkpoint; otherwise it reads `paths` itself."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """`program_checkpoint/kept.json`."""

    name: str
    origin: str
    """Where the program had saved it."""
    source: dict[str, Stamp]
    """What was copied: as long as it is the same, the copy is new enough."""
    split: Split | None = None
    """By which the program counted."""
    given: dict[str, Stamp] = {}
    """What memtop has put in its place for the program: not a checkpoint of the program."""


def place_of(grip: Grip) -> Place | None:
    """None if the profile names no checkpoints, or contains a value that is not known, and its
    agent has seen none."""
    profile = grip.profile
    if profile is None or profile.checkpoint is None:
        return None
    paths = [filled(path, {name: glob.escape(text) for name, text in grip.values.items()}) for path in profile.checkpoint.paths]
    known = tuple(os.path.normpath(Path(grip.cwd, path)) for path in paths if path is not None)
    given = any("{checkpoint}" in word for word in profile.resume.words)
    if given:
        known = (*known, *grip.seen)
    return Place(paths=known, rule=profile.checkpoint, position=profile.position, given=given) if known else None


def newest_for(run: Path, place: Place, since: float | None = None, split: Split | None = None) -> Checkpoint | None:
    """The checkpoint from which the program would resume: the newest complete one, the kept copy
    included; an incomplete one if there is no other; None if there is none.

    `since`: older ones are not of this run. `split`: by which the program counts now.
    """
    record = record_of(run)
    found = list(_found(place, since, split, record))
    kept = None if record is None else _kept(run, place, record)
    return max((*found, *([] if kept is None else [kept])), key=_rank, default=None)


def newest_of(place: Place, since: float | None = None, split: Split | None = None) -> Checkpoint | None:
    """The same without the copy: what the program itself has saved."""
    return max(_found(place, since, split, None), key=_rank, default=None)


def _rank(found: Checkpoint) -> tuple[bool, float]:
    return found.complete, found.saved_at or 0.0


def being_saved(place: Place) -> str | None:
    """The path of a checkpoint that is not complete and has changed just now: an exception in the
    program would leave it so."""
    now = time.time()
    incomplete = (one for one in _found(place, None, None, None) if not one.complete and one.saved_at is not None)
    return next((one.path for one in incomplete if abs(now - (one.saved_at or 0.0)) < _SAVING_SECONDS), None)


def _found(place: Place, since: float | None, split: Split | None, record: Kept | None) -> list[Checkpoint]:
    names = (name for pattern in place.paths for name in glob.iglob(pattern))  # noqa: PTH207 - they are absolute
    all_paths = {Path(name) for name in names}
    read_ones = [read(path, place, split) for path in all_paths]
    new = [one for one in read_ones if since is None or (one.saved_at or 0.0) >= since]
    return new if record is None else [one for one in new if not is_given(Path(one.path), record)]


def is_given(path: Path, record: Kept) -> bool:
    """Whether this is what memtop has put there."""
    try:
        return bool(record.given) and str(path) == record.origin and stamps(path) == record.given
    except OSError:
        return False


def _kept(run: Path, place: Place, record: Kept) -> Checkpoint | None:
    path = run / KEPT / record.name
    return read(path, place, record.split) if path.exists() else None


def record_of(run: Path) -> Kept | None:
    return read_derived(run / KEPT / _RECORD, Kept)


def read(path: Path, place: Place, split: Split | None) -> Checkpoint:
    """What the checkpoint at this path says."""
    empty = f"{path}: it was removed meanwhile, or is empty"
    try:
        files = stamps(path)
        problem = _problem(path, place.rule.needs) if files else empty
        saved_at = max((time_ns for _, _, time_ns in files.values()), default=path.stat().st_mtime_ns) / 1e9
        size = size_of(path)
    except (OSError, ValueError):
        return Checkpoint(path=str(path), complete=False, problem=empty)
    found = Checkpoint(path=str(path), saved_at=saved_at, size_bytes=size, complete=problem is None, problem=problem)
    if problem is not None:
        return found
    try:
        step, epoch = _position(path, place)
    except (OSError, ValueError) as error:
        return replace(found, problem=f"{path}: its position cannot be read: {error}")
    if step is None:
        return found
    updates = updates_at(place.position, step, epoch, split)
    return replace(found, updates=updates, step=step if place.position.counts != "updates" else None, epoch=epoch)


def _problem(path: Path, needs: tuple[str, ...]) -> str | None:
    """Why the checkpoint is not complete."""
    if not path.is_dir():
        return why_not_whole(path)
    if not needs:
        return why_no_whole_folder(path) if path.suffix == LIGHTNING else None
    names = [str(Path(folder, name).relative_to(path)) for folder, _, inside in os.walk(path) for name in inside]
    times: list[int] = []
    last = 0
    for need in needs:
        # `a|b`: one of them. `../latest` is beside the folder.
        wanted = need.split("|")
        fitting = [name for name in names if any(fnmatch.fnmatch(name, one) for one in wanted)]
        fitting += [one for one in wanted if one.startswith("../") and (path / one).is_file()]
        if not fitting:
            return f"{path}: it has no {' or '.join(wanted)}: the save was interrupted, or is not one to resume from"
        problems = (why_not_whole(path / name) for name in fitting)
        if (problem := next((one for one in problems if one is not None), None)) is not None:
            return problem
        last = max((path / name).stat().st_mtime_ns for name in fitting)
        times.append(last)
    if times and last < max(times):
        return f"{path}: {needs[-1]} is older than the rest: the save was interrupted, or goes on"
    return None


def _position(path: Path, place: Place) -> tuple[int | None, int | None]:
    """Step and epoch, in the program's own counting."""
    counter = place.rule.step
    if counter is None or counter.key is None:
        return None, None
    if counter.read == "name":
        match = re.search(counter.key, path.name)
        groups = {} if match is None else match.groupdict()
        step, epoch = groups.get("step"), groups.get("epoch")
        if step is None:
            return None, None
        return int(step), None if epoch is None else int(epoch)
    file = values_file(path) if counter.file is None else path / counter.file
    keys = (counter.key,) if counter.epoch_key is None else (counter.key, counter.epoch_key)
    numbers = numbers_in(file, keys)
    if counter.key not in numbers:
        raise ValueError(f"it has no whole number {counter.key}")
    return numbers[counter.key], numbers.get(counter.epoch_key or "")


def keep(checkpoint: Checkpoint, run: Path, place: Place, split: Split | None = None) -> Checkpoint:
    """Keep a copy of this checkpoint in the run's folder, in place of an older one. `split`: by
    which its position counts. RunFolderError if that is not possible."""
    with _alone:
        return _keep(checkpoint, run, place, split)


def _keep(checkpoint: Checkpoint, run: Path, place: Place, split: Split | None) -> Checkpoint:
    source, record = Path(checkpoint.path), record_of(run)
    target = run / KEPT / source.name
    if source == target:
        return checkpoint
    try:
        present = stamps(source)
        if record is not None and target.exists() and record.source == present and record.origin == str(source):
            return read(target, place, record.split)
        target.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{source}: cannot be kept in {target.parent}: {why(error)}") from None
    old = None if record is None else _kept(run, place, record)
    _require_no_worse(checkpoint, old)
    new = target.with_name(f".new-{target.name}")
    remove(new)
    copy(source, new)
    try:
        _require_no_worse(replace(read(new, place, split), path=str(source)), old)
    except RunFolderError:
        remove(new)
        raise
    _replace(new, target)
    write_json(target.parent / _RECORD, Kept(name=target.name, origin=str(source), source=present, split=split))
    for other in target.parent.iterdir():
        # Deletes memtop's copies only.
        if other.name not in (target.name, _RECORD):
            remove(other)
    return read(target, place, split)


def _require_no_worse(found: Checkpoint, old: Checkpoint | None) -> None:
    """RunFolderError if this checkpoint is not complete, or its position cannot be read while that
    of the old copy can."""
    if not found.complete:
        raise RunFolderError(f"{found.path}: cannot be kept: {found.problem}")
    if found.problem is not None and old is not None and old.complete and old.problem is None:
        raise RunFolderError(f"{found.problem}; the copy {old.path} stays: to resume from it, move {found.path} away")


def _replace(new: Path, target: Path) -> None:
    """Give the copy its name, in one step if it is a file."""
    try:
        if target.is_dir():
            remove(target)
        new.replace(target)
    except OSError as error:
        remove(new)
        raise RunFolderError(f"{target}: cannot be replaced: {why(error)}") from None


def prepared(
    checkpoint: Checkpoint,
    run: Path,
    place: Place,
    *,
    before: Split | None,
    after: Split | None,
    python: str | None = None,
) -> Checkpoint:
    """What the program resumes from: the kept copy, or a further one with the position converted
    from the split before to the one after. Where the program always reads the same path, it is put
    there, and what memtop has no copy of gets another name.

    `python`: the program's own Python, which has torch. RunFolderError if that is not possible.
    """
    with _alone:
        return _prepared(checkpoint, run, place, before, after, python)


def _prepared(
    checkpoint: Checkpoint, run: Path, place: Place, before: Split | None, after: Split | None, python: str | None
) -> Checkpoint:
    kept = _keep(checkpoint, run, place, before)
    record = record_of(run)
    if record is None:
        raise RunFolderError(f"{run / KEPT / _RECORD}: cannot be read")
    source = Path(kept.path)
    step, new = _steps(kept, place, record.split or before, after)
    if place.given and new == step:
        return kept
    if place.given:
        target = source.parent / _CONVERTED / _named(source.name, place, new)
    else:
        target = Path(record.origin)
        if new == step and _same(target, record):
            return read(target, place, after)
    made = target.with_name(f".memtop-{target.name}")
    remove(made)
    copy(source, made)
    if new != step and new is not None:
        write_position(made, place.rule.step, new, python)
    if not place.given:
        _move_aside(target, place, record)
    _replace(made, target)
    found = read(target, place, after)
    if not found.complete:
        raise RunFolderError(f"{target}: {found.problem}")
    if not place.given:
        write_json(source.parent / _RECORD, replace(record, given=stamps(target)))
    return found


def _steps(kept: Checkpoint, place: Place, before: Split | None, after: Split | None) -> tuple[int | None, int | None]:
    """The program's step in the kept checkpoint, and the one with the split after. RunFolderError
    if that is not known."""
    step = kept.step if kept.step is not None else kept.updates
    if not place.rule.convert or before == after or after is None:
        return step, step
    if step is None or before is None:
        why_not = kept.problem or f"{kept.path}: the batch with which it was saved is not known"
        raise RunFolderError(f"its position cannot be converted: {why_not}")
    return step, converted(place.position, step, before, after)


def try_conversion(run: Path, place: Place, before: Split | None, after: Split | None, python: str | None) -> None:
    """Convert a copy of the kept checkpoint, and delete it. RunFolderError if that is not possible:
    better before the program is stopped than afterwards."""
    with _alone:
        record = record_of(run)
        kept = None if record is None else _kept(run, place, record)
        if record is None or kept is None:
            return
        step, new = _steps(kept, place, record.split or before, after)
        if new == step or new is None:
            return
        trial = run / KEPT / f".trial-{record.name}"
        remove(trial)
        try:
            copy(Path(kept.path), trial)
            write_position(trial, place.rule.step, new, python)
        finally:
            remove(trial)


def _same(target: Path, record: Kept) -> bool:
    """Whether the program's own checkpoint is still the one that was copied."""
    try:
        return stamps(target) == record.source
    except OSError:
        return False


def _named(name: str, place: Place, step: int | None) -> str:
    """The name of a converted checkpoint: where the name has the position, the new one."""
    counter = place.rule.step
    if counter is None or counter.read != "name" or (match := re.search(counter.key or "", name)) is None:
        return name
    start, end = match.span("step")
    return f"{name[:start]}{step}{name[end:]}"


def _move_aside(target: Path, place: Place, record: Kept) -> None:
    """Rename what memtop has no copy of: a checkpoint that is not complete, or one that somebody
    has put there. Nothing is deleted."""
    if not os.path.lexists(target) or _same(target, record) or is_given(target, record):
        return
    word = "replaced" if _problem(target, place.rule.needs) is None else "incomplete"
    ends = itertools.chain((word,), (f"{word}.{number}" for number in itertools.count(2)))
    aside = next(path for end in ends if not os.path.lexists(path := target.with_name(f"{target.name}.{end}")))
    try:
        target.rename(aside)
    except OSError as error:
        raise RunFolderError(f"{target}: cannot be renamed: {why(error)}") from None
