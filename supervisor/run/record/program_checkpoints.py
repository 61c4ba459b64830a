"""The checkpoints that Hugging Face's Trainer saves, and the copy from which a run resumes.

The Trainer writes `checkpoint-N` and deletes old ones. So memtop keeps the newest complete one in
the run's folder before it stops the program, and again before it starts it: with hard links, or
with copies if the file system has none. If N is not the number of the checkpoint's update, the
program will save over that folder; so memtop copies it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from memtop.presets.decoding import decoder_of
from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.record.checkpoints import link_or_copy, why
from memtop.supervisor.run.record.copies import copy
from memtop.supervisor.run.record.folder import open_to_read
from memtop.supervisor.run.reports import Count
from memtop.supervisor.wire import Checkpoint

_NAME = re.compile(r"checkpoint-(\d{1,15})")
_STATE = "trainer_state.json"
_INCOMPLETE = "checkpoint-is-incomplete.txt"
"""The Trainer's own mark of a checkpoint that it has not finished."""
_OPTIMIZER = ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step*", "optimizer.pt.*")
"""How the optimizer's state is named: plain, FSDP, DeepSpeed."""
KEPT = "program_checkpoint"
"""The folder in the run's folder."""


class _TrainerState(msgspec.Struct):
    global_step: Count


def is_name(name: str) -> bool:
    """Whether the Trainer gives such a name to a checkpoint's folder."""
    return _NAME.fullmatch(name) is not None


def newest_of(
    output_dir: Path, earlier: Mapping[str, int] | None = None, first: int | None = None, since: float | None = None
) -> Checkpoint | None:
    """The newest complete checkpoint in the Trainer's folder, else the newest one. None if there is
    none.

    `earlier`: the checkpoints that were there before the run, which are of another training, by
    name: when they were saved, in microseconds since the epoch. `since`: the same of those that
    are older, in seconds. `first`: the update of the one from which the run has begun nevertheless.
    """
    newest: Checkpoint | None = None
    for path in _folders(output_dir):
        found = read(path)
        is_older = earlier is not None and path.name in earlier and earlier[path.name] == _saved_at(path)
        is_older = is_older or (since is not None and (_saved_at(path) or math.inf) < since * 1e6)
        if is_older and found.updates != first:
            continue
        newest = newest or found
        if found.complete:
            return found
    return newest


def _saved_at(path: Path) -> int | None:
    try:
        return (path / _STATE).stat().st_mtime_ns // 1000
    except OSError:
        return None


def _folders(output_dir: Path) -> list[Path]:
    """The newest first."""
    try:
        names = os.listdir(output_dir)  # noqa: PTH208 - names alone
    except OSError:
        return []
    numbers = sorted((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), reverse=True)
    return [path for number in numbers if (path := output_dir / f"checkpoint-{number}").is_dir()]


def read(path: Path) -> Checkpoint:
    """What a checkpoint's folder says of it."""
    problem, update = None, None
    try:
        with open_to_read(path / _STATE) as file:
            update = decoder_of(_TrainerState).decode(file.read()).global_step
    except FileNotFoundError:
        problem = f"{path / _STATE} is missing: the save was interrupted"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        problem = f"{path / _STATE}: cannot be decoded: {error}"
    if problem is None and (path / _INCOMPLETE).exists():
        problem = f"{path}: the save was interrupted"
    if problem is None and not any(next(path.glob(name), None) is not None for name in _OPTIMIZER):
        problem = f"{path}: it has no state of the optimizer (save_only_model), so training cannot continue from it"
    with contextlib.suppress(OSError):
        saved_at, size = path.stat().st_mtime, _size(path)
        return Checkpoint(
            path=str(path), updates=update, saved_at=saved_at, size_bytes=size, complete=problem is None, problem=problem
        )
    return Checkpoint(path=str(path), updates=update, complete=False, problem=f"{path}: it was removed meanwhile")


def _size(path: Path) -> int:
    return sum((Path(folder) / name).stat().st_size for folder, _, names in os.walk(path) for name in names)


def keep(checkpoint: Checkpoint, run: Path) -> Checkpoint:
    """Keep this checkpoint in the run's folder, in place of an older one. RunFolderError if that is
    impossible."""
    source = Path(checkpoint.path)
    target = run / KEPT / source.name
    if source == target:
        return checkpoint
    new = target.with_name(f"{target.name}.new")
    try:
        shutil.rmtree(new, ignore_errors=True)
        target.parent.mkdir(exist_ok=True)
        if source.name == f"checkpoint-{checkpoint.updates}":
            shutil.copytree(source, new, copy_function=link_or_copy)
        else:
            # The program names its checkpoints itself, and may save over this one.
            copy(source, new)
        found = read(new)
        if not found.complete:
            raise OSError(errno.ENOENT, "it was removed meanwhile")
        shutil.rmtree(target, ignore_errors=True)
        new.rename(target)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise RunFolderError(f"{source}: cannot be kept in {target.parent}: {why(error)}") from None
    for other in _folders(target.parent):
        if other != target:
            # Deletes memtop's links only.
            shutil.rmtree(other, ignore_errors=True)
    return read(target)


def newest_for(run: Path, grip: Grip) -> Checkpoint | None:
    """The checkpoint from which the program would resume now: the newest complete one in its
    folder, or the kept one if that is newer or the only one."""
    there = newest_of(Path(grip.output_dir), grip.earlier, grip.first)
    below = newest_of(Path(grip.saves_in), first=grip.first, since=grip.since) if grip.saves_in else None
    # Of the same update the kept one: the program may have been ended while it saved over its own.
    found = [one for one in (newest_of(run / KEPT), there, below) if one is not None]
    return max(found, key=lambda one: (one.complete, one.updates or 0), default=None)
