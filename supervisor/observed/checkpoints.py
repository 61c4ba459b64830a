"""The newest checkpoint that a program has saved since its start, in the folders that it uses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from memtop.supervisor.run.record import program_checkpoints
from memtop.supervisor.run.record.copies import size_of
from memtop.supervisor.run.record.whole_files import why_no_whole_folder, why_not_whole
from memtop.supervisor.wire import Checkpoint

_DEPTH, _MOST_ENTRIES = 3, 3000
_SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".safetensors"})
_NOT_SEARCHED = frozenset({"node_modules", "site-packages", "__pycache__", "wandb", "data", "dataset", "datasets"})


def newest_checkpoint(folders: Iterable[Path], since: float, *, of_trainer: bool = False) -> Checkpoint | None:
    """The newest complete one: a folder of Hugging Face's Trainer, or a whole file of weights
    unless `of_trainer`."""
    found: dict[Path, float] = {}
    for folder in folders:
        for entry in (entry for _, entries in _searched(folder) for entry in entries):
            saved = _saved_at(entry)
            wanted = program_checkpoints.is_name(entry.name) or not of_trainer
            if wanted and saved is not None and saved >= since:
                found[Path(entry.path)] = saved
    for path in sorted(found, key=lambda one: found[one], reverse=True):
        checkpoint = program_checkpoints.read(path) if program_checkpoints.is_name(path.name) else _whole(path)
        if checkpoint is not None and checkpoint.complete:
            return checkpoint
    return None


def folders_of(command: Sequence[str], folder: Path) -> list[Path]:
    """The working directory, and the folders that the command line names."""
    values = [word.rpartition("=")[2] for word in command[1:]]
    named = [path for value in values if value and len(value) < 1000 and (path := folder / value).is_dir()]
    return list(dict.fromkeys([folder, *(path.resolve() for path in named)]))


def folders_below(top: Path) -> list[Path]:
    """The folders that are searched below this one."""
    return [Path(folder) for folder, _ in _searched(top)][1:]


def _searched(top: Path) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """The folder and those below it, with what may be a checkpoint: not deep, and not among very
    many entries."""
    waiting, left = [(str(top), 0)], _MOST_ENTRIES
    while waiting and left > 0:
        folder, depth = waiting.pop(0)
        try:
            entries = list(os.scandir(folder))[:left]
        except OSError:
            continue
        left -= len(entries)
        found = []
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _NOT_SEARCHED:
                continue
            if program_checkpoints.is_name(entry.name) or Path(entry.name).suffix in _SUFFIXES:
                found.append(entry)
            elif depth + 1 < _DEPTH and entry.is_dir(follow_symlinks=False):
                waiting.append((entry.path, depth + 1))
        yield folder, found


def _saved_at(entry: os.DirEntry[str]) -> float | None:
    try:
        return entry.stat().st_mtime
    except OSError:
        return None


def _whole(path: Path) -> Checkpoint | None:
    """The file, or the folder of Lightning, if its end has been written; None otherwise."""
    if (why_no_whole_folder(path) if path.is_dir() else why_not_whole(path)) is not None:
        return None
    with contextlib.suppress(OSError):
        saved = path.stat().st_mtime
        return Checkpoint(path=str(path), saved_at=saved, size_bytes=size_of(path), complete=True)
    return None
