"""Waits until nobody else compiles an extension of torch, and removes the lock that a killed compilation has left.

torch takes a file `lock` in the extension's folder for the time of a compilation and waits, without a word and for ever, while
there is one (`torch.utils.file_baton`). Who has taken it has it open, and the kernel grants a lease on a file only where nobody
else has it open, in whatever container. The compilers themselves, which outlive whoever is killed, work inside that folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from memtop.train import BadInputError

LONGEST_SECONDS = 30 * 60.0
"""So long is waited for a compilation: a few minutes are usual."""
_LOOK_SECONDS = 1.0
# Where no other machine can have a file open.
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "tmpfs"}


def extension_folder(name: str) -> Path:
    """Where torch compiles the extension of this name."""
    # Here: it is slow to import, and needs setuptools.
    from torch.utils import cpp_extension

    where: Any = cpp_extension._get_build_directory
    return Path(where(name, verbose=False))


def await_compiled(
    name: str, *, what: str, longest: float = LONGEST_SECONDS, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Return when the extension can be compiled or loaded without waiting for ever; `what` needs it, for the messages.

    BadInputError after `longest` seconds.
    """
    lock = extension_folder(name) / "lock"
    before, told, waited = None, False, 0.0
    while (found := _unused(lock)) is not None:
        # Twice: who is done closes the file a moment before it removes it.
        if found and found == before:
            _remove(lock, found)
            continue
        if before is not None and not found and not told:
            print(f"memtop: {what}: waits until another process has compiled it in {lock.parent}", flush=True)
            told = True
        if waited >= longest:
            raise BadInputError(
                f"{what}: {lock} is still there after {longest / 60:.0f} min: "
                "end the process that compiles there, or delete that file if there is none"
            )
        before = found
        sleep(_LOOK_SECONDS)
        waited += _LOOK_SECONDS


def _unused(lock: Path) -> int | None:
    """The lock's inode if certainly nobody compiles under it, 0 if somebody does or may; None if there is no lock."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except (BlockingIOError, PermissionError):
        # Another process is asking the same; somebody else's file.
        return 0
    try:
        unused = _leased(descriptor) and _file_system(lock) in _LOCAL and not _inhabited(lock.parent)
        return os.fstat(descriptor).st_ino if unused else 0
    finally:
        os.close(descriptor)


def _leased(descriptor: int) -> bool:
    """Whether the kernel grants a lease on the open file; it ends when that is closed."""
    # Whoever opens the file in this moment makes the kernel signal us, by default with one that ends the process.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        # Open elsewhere, somebody else's file, or a file system without leases.
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _inhabited(folder: Path) -> bool:
    """Whether any process works in that folder."""
    where = str(folder.resolve())
    for process in psutil.process_iter():
        # One that has ended meanwhile, or another user's.
        with contextlib.suppress(psutil.Error):
            if process.cwd() == where:
                return True
    return False


def _file_system(path: Path) -> str:
    """The type of the file system that a path lies on; empty if it cannot be told."""
    whole = path.resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in whole.parents if parent in mounts), "")


def _remove(lock: Path, inode: int) -> None:
    folder = os.open(lock.parent, os.O_RDONLY)
    try:
        # One rank at a time: the next one must not remove the lock of one that compiles already.
        fcntl.flock(folder, fcntl.LOCK_EX)
        if _unused(lock) == inode:
            lock.unlink()
            print(f"memtop: removed {lock}, which a compilation that was killed had left", flush=True)
    finally:
        os.close(folder)
