"""Waits for processes that compile an extension of torch; removes the lock of a killed one; reports
that this process compiles. Keeps imports from loading torch's compiler of models.

During a compilation torch keeps a file `lock` in the extension's folder, and it waits silently and
forever while such a file exists (`torch.utils.file_baton`). The owner has the file open, and the
kernel grants a lease on a file only if no other process has it open, in any container. The
compilers outlive a killed owner, but they work inside that folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from memtop.train import BadInputError

LONGEST_SECONDS = 30 * 60.0
"""The longest wait for a compilation; a few minutes are usual."""
_LOOK_SECONDS = 1.0
# File systems on which no other machine can have a file open.
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "tmpfs"}


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """For imports of libraries: functions that they give to `torch.compile` stay as they are.

    DeepSpeed's Muon optimizer and bitsandbytes' kernels for other devices are such functions.
    memtop calls none of them, but each process would load torch's compiler for them, for seconds.
    """
    import torch

    def unchanged(model: Any = None, **_: Any) -> Any:
        return model if model is not None else unchanged

    before = torch.compile
    torch.compile = unchanged
    try:
        yield
    finally:
        torch.compile = before


def extension_folder(name: str) -> Path:
    """Where torch compiles the extension of this name."""
    # Imported here because it is slow and needs setuptools.
    from torch.utils import cpp_extension

    where: Any = cpp_extension._get_build_directory
    return Path(where(name, verbose=False))


def is_compiled(name: str) -> bool:
    """Whether the extension of this name was compiled before."""
    folder = extension_folder(name)
    return (folder / f"{name}.so").is_file() and not (folder / "lock").exists()


Enter = Callable[[str], None]
"""Reports the phase that begins: what the training process does before its first update."""


@contextlib.contextmanager
def compiling(name: str, *, what: str, enter: Enter | None) -> Iterator[None]:
    """Around a block that loads the extension: wait as `await_compiled` does, and report the phase
    `compiling` if the extension is not compiled yet."""
    told = None if is_compiled(name) else enter
    if told is not None:
        told("compiling")
    await_compiled(name, what=what)
    yield
    if told is not None:
        told("loading")


def _find_ninja() -> None:
    """Append the interpreter's folder to PATH: torch runs `ninja`, which may be installed only
    there."""
    if not sys.executable:
        return  # an embedded interpreter
    folder = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if folder not in folders:
        os.environ["PATH"] = os.pathsep.join([*folders, folder])


def await_compiled(
    name: str, *, what: str, longest: float = LONGEST_SECONDS, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Return when the extension can be compiled or loaded without waiting forever.

    `what` names it in messages. If `ninja` is installed only next to the interpreter, PATH is
    extended.

    BadInputError after `longest` seconds.
    """
    _find_ninja()
    lock = extension_folder(name) / "lock"
    before, notified, waited = None, False, 0.0
    while (found := unused_lock(lock)) is not None:
        # Looked at twice: an owner that has finished closes the file a moment before it removes it.
        if found and found == before:
            _remove(lock, found)
            continue
        if before is not None and not found and not notified:
            print(f"memtop: {what}: waiting until another process has compiled it in {lock.parent}", flush=True)
            notified = True
        if waited >= longest:
            raise BadInputError(
                f"{what}: {lock} is still there after {longest / 60:.0f} min: "
                "end the process that compiles there, or delete the file if there is none"
            )
        before = found
        sleep(_LOOK_SECONDS)
        waited += _LOOK_SECONDS


def unused_lock(lock: Path) -> int | None:
    """The lock's inode if it is certainly unused, 0 if it may be in use; None without a lock."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except (BlockingIOError, PermissionError):
        # Another process holds the lease of this check, or the file belongs to another user.
        return 0
    try:
        unused = _leased(descriptor) and file_system(lock) in _LOCAL and not _in_use(lock.parent)
        return os.fstat(descriptor).st_ino if unused else 0
    finally:
        os.close(descriptor)


def _leased(descriptor: int) -> bool:
    """Whether the kernel grants a lease on the open file, which ends when the file is closed."""
    # A process that opens the file now makes the kernel signal this one; the default signal would
    # end it.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        # Open elsewhere, another user's file, or a file system without leases.
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _in_use(folder: Path) -> bool:
    """Whether the folder is the working directory of any process."""
    where = str(folder.resolve())
    for process in psutil.process_iter():
        # The process may have ended, or belong to another user.
        with contextlib.suppress(psutil.Error):
            if process.cwd() == where:
                return True
    return False


def file_system(path: Path) -> str:
    """The type of the file system of a path; empty if it is not known."""
    whole = path.resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in whole.parents if parent in mounts), "")


def _remove(lock: Path, inode: int) -> None:
    folder = os.open(lock.parent, os.O_RDONLY)
    try:
        # One rank at a time: the next one must not remove the lock of a compilation that has begun.
        fcntl.flock(folder, fcntl.LOCK_EX)
        if unused_lock(lock) == inode:
            lock.unlink()
            print(f"memtop: removed {lock}, left by a compilation that was killed", flush=True)
    finally:
        os.close(folder)
