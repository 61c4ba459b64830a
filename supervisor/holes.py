"""Holes in files (see fallocate(2)): a part of a file is removed while programs append to it.

Its space goes back to the disk, and all positions stay the same. In a hole, zeros are read.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02


def remove(path: Path, start: int, end: int, marker: bytes = b"") -> bool:
    """Remove these bytes of the file; `marker` then stands at `start`.

    False if the file system has no holes (some network file systems). Raises OSError otherwise.
    """
    # Without O_APPEND, which would put the marker at the end. A pipe in its place must not block.
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = ctypes.c_int(descriptor), ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE)
        if libc.fallocate(*arguments, ctypes.c_int64(start), ctypes.c_int64(end - start)) == 0:
            os.pwrite(descriptor, marker[: end - start], start)
            return True
        number = ctypes.get_errno()
    finally:
        os.close(descriptor)
    if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(number, os.strerror(number), str(path))


def data_after(descriptor: int, position: int) -> int:
    """The first position from here on that is not in a hole."""
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError:
        # The end of the file, or a file system that does not know.
        return position


def without_holes(descriptor: int, block: int) -> Iterator[bytes]:
    """The content of the file in blocks, without its holes."""
    position = 0
    while data := os.pread(descriptor, block, position := data_after(descriptor, position)):
        position += len(data)
        yield data
