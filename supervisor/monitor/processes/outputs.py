"""The files into which a process writes its output."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from memtop.supervisor.monitor.processes.proc import PROC, readable

_STREAMS = (1, 2)
_PIPE = re.compile(r"pipe:\[\d+\]")
_DESCRIPTORS = 64
"""Of `tee`, so many open files are looked at."""


class OutputFile(NamedTuple):
    """A regular file that gets the output of a process."""

    path: Path
    """Can be opened by this user."""
    identity: tuple[int, int]
    """Device and inode."""


def output_files(pids: Iterable[int], tees: Iterable[int] = (), proc_root: Path = PROC) -> list[OutputFile] | str:
    """The files that get the output of the first of these processes that writes to files; each
    once. The reason, as the end of a sentence, if none does.

    `tees`: processes of the program `tee`, which may copy a pipe into files.
    """
    reason = "its processes have ended"
    for pid in pids:
        found, here = _of_process(pid, list(tees), proc_root)
        if found:
            return found
        reason = here if reason == "its processes have ended" else reason
    return reason


def _of_process(pid: int, tees: list[int], proc_root: Path) -> tuple[list[OutputFile], str]:
    found: dict[tuple[int, int], OutputFile] = {}
    reason = "its processes have ended"
    for stream in _STREAMS:
        link = proc_root / str(pid) / "fd" / str(stream)
        try:
            target, mode = str(link.readlink()), link.stat().st_mode
        except PermissionError:
            return [], "its output is another user's: only that user and root can read it"
        except OSError:
            continue
        if stat.S_ISREG(mode):
            file = _file(link, target)
            if isinstance(file, str):
                reason = file
            else:
                found.setdefault(file.identity, file)
        elif _PIPE.fullmatch(target):
            reason = "its output goes into a pipe, which only its reader can read"
            for tee in tees:
                found |= {file.identity: file for file in _copies(tee, target, proc_root)}
        else:
            reason = f"its output goes to {readable(target)}, which cannot be read"
    return list(found.values()), reason


def _file(link: Path, target: str) -> OutputFile | str:
    """The file by its name; by the descriptor if the name is that of another file, as after a
    deletion or in a container."""
    try:
        status = link.stat()
        identity = status.st_dev, status.st_ino
        for path in (Path(target), link):
            try:
                named = path.stat()
            except OSError:
                continue
            if (named.st_dev, named.st_ino) == identity and os.access(path, os.R_OK):
                return OutputFile(path, identity)
    except OSError:
        return "its processes have ended"
    return f"its output goes to {readable(target)}, which this user may not read"


def _copies(tee: int, pipe: str, proc_root: Path) -> list[OutputFile]:
    """The files that this `tee` writes, if it reads the pipe."""
    folder = proc_root / str(tee) / "fd"
    found = []
    try:
        if str((folder / "0").readlink()) != pipe:
            return []
        numbers = [name for name in os.listdir(folder) if name not in ("0", "1", "2")]  # noqa: PTH208 - names alone
    except OSError:
        return []
    for number in numbers[:_DESCRIPTORS]:
        link = folder / number
        try:
            is_file = stat.S_ISREG(link.stat().st_mode) and link.lstat().st_mode & stat.S_IWUSR
            file = _file(link, str(link.readlink())) if is_file else ""
        except OSError:
            continue
        if isinstance(file, OutputFile):
            found.append(file)
    return found
