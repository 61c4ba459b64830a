"""Copies of what a program saves: at no cost where the file system can share blocks (FICLONE:
btrfs, XFS), otherwise real ones.

A hard link is not enough: most programs open the same file again and cut it, and a link is that
file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from memtop.supervisor import units
from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.run.record.checkpoints import why
from memtop.supervisor.run.record.whole_files import Stamp, stamp_of

_FICLONE = 0x40049409
_MARGIN_BYTES = 64 << 20
"""What must stay free on the disk."""
_TRIES = 3


def stamps(path: Path) -> dict[str, Stamp]:
    """Of the file, or of all files in the folder, by their names. Raises OSError."""
    if not path.is_dir():
        return {"": stamp_of(path)}
    inside = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    return {str(file.relative_to(path)): stamp_of(file) for file in inside}


def size_of(path: Path) -> int:
    """Bytes of the file, or of all files in the folder. Raises OSError."""
    return sum(size for _, size, _ in stamps(path).values())


def copy(source: Path, target: Path) -> None:
    """Copy a file or a folder to a path that is free. RunFolderError if that is not possible, or if
    it changes all the time while it is copied."""
    problem = f"{source}: it changes while it is copied: the program saves"
    for _ in range(_TRIES):
        try:
            before = stamps(source)
            _copy(source, target)
            if stamps(source) == before:
                return
        except FileNotFoundError as error:  # the program replaces it
            problem = f"{source}: cannot be copied to {target.parent}: {why(error)}"
        except OSError as error:
            remove(target)
            raise RunFolderError(f"{source}: cannot be copied to {target.parent}: {why(error)}") from None
        remove(target)
    raise RunFolderError(problem)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    if _shares_blocks(source, target.parent):
        copied = _clone
    else:
        needed, free = size_of(source), shutil.disk_usage(target.parent).free
        if needed + _MARGIN_BYTES > free:
            words = f"{units.size(needed)} are needed and {units.size(free)} are free there; free some space"
            raise RunFolderError(f"{source}: cannot be copied to {target.parent}: {words}")
        copied = _copy_bytes
    if source.is_dir():
        shutil.copytree(source, target, copy_function=copied)
    else:
        copied(str(source), str(target))


def _copy_bytes(source: str, target: str) -> None:
    """With the file's times, and on the disk when this returns."""
    shutil.copy2(source, target)
    with open(target, "rb") as file:  # noqa: PTH123 - copytree gives texts
        os.fsync(file.fileno())


def _clone(source: str, target: str) -> None:
    with open(source, "rb") as old, open(target, "wb") as new:  # noqa: PTH123 - copytree gives texts
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
    shutil.copystat(source, target)


def _shares_blocks(source: Path, folder: Path) -> bool:
    """Whether files there can share their blocks with the source: tried with its smallest file."""
    inside = [source] if source.is_file() else [file for file in source.rglob("*") if file.is_file()]
    first = min(inside, key=lambda file: file.stat().st_size, default=None)
    trial = folder / f".clone-{os.getpid()}"
    if first is None:
        return False
    try:
        _clone(str(first), str(trial))
    except OSError:  # the file system cannot, or the two are on different ones
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            trial.unlink()
    return True


def remove(path: Path) -> None:
    """Delete a copy, as far as it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
