"""What a program leaves when it ends: the last lines of its output, with torchrun's list of failed
ranks, and torchrun's error files."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import msgspec

from memtop.supervisor.killed import signal_status
from memtop.supervisor.run.record.folder import open_to_read

_TAIL_BYTES = 16_384
_WORKERS_BYTES = 262_144
"""Each of several workers may write a long traceback."""
_LINES = 8
_ROOT_CAUSE = "Root Cause (first observed failure):"
_KILLED = (-signal.SIGKILL, -signal.SIGBUS, -signal.SIGSEGV)


class LogEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a program's output."""

    lines: tuple[str, ...] = ()
    """The last lines that are not empty."""
    first_dead_rank: tuple[int, int] | None = None
    """The rank that ended first of several and its exit status, as torchrun reports it."""
    rank_lines: tuple[str, ...] = ()
    """torchrun's lines about that rank."""
    own_error: str | None = None
    """The newest error that the program printed. Only set if the last line comes from a launcher
    (`accelerate launch`) and names the program's exit status."""

    def fatal_signal(self, status: int | None) -> int | None:
        """The signal that ended the program, or the first of its ranks that died; None without one.
        `status`: the program's exit status."""
        ended = signal_status(self.first_dead_rank[1] if self.first_dead_rank is not None else status)
        return -ended if ended is not None and ended < 0 else None


class DeadWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The worker after whose end torchrun started all of them again."""

    pid: int
    local_rank: int
    exit_status: int
    message: str | None = None
    """The last line of its error."""


_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_OF_LAUNCHER = "subprocess.CalledProcessError:"
_ERROR = re.compile(r"^(?:\[rank(\d+)\]: ?)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b.*)$", re.M)


def dead_worker(log: Path) -> DeadWorker | None:
    """The worker that torchrun has named last; None if it has named none."""
    text = _tail(log, _WORKERS_BYTES)
    found = list(_FAILED.finditer(text))
    if not found:
        return None
    status, rank, pid = map(int, found[-1].groups())
    # torch begins the lines of a traceback with the rank where there is a process group.
    errors = list(_ERROR.finditer(text, found[-2].end() if len(found) > 1 else 0, found[-1].start()))
    own = [match[2] for match in errors if match[1] == str(rank)] or [match[2] for match in errors if match[1] is None]
    return DeadWorker(pid=pid, local_rank=rank, exit_status=status, message=own[-1].strip() if own and status > 0 else None)


def read_log_end(log: Path) -> LogEnd:
    text = _tail(log)
    lines = [line for line in (line.strip() for line in text.splitlines()) if line]
    return LogEnd(
        lines=tuple(lines[-_LINES:]),
        first_dead_rank=_first_dead_rank(text),
        rank_lines=tuple(_rank_lines(text)),
        own_error=_own_error(text) if lines and lines[-1].startswith(_OF_LAUNCHER) else None,
    )


def _own_error(text: str) -> str | None:
    errors = [error for match in _ERROR.finditer(text) if not (error := match[2].strip()).startswith(_OF_LAUNCHER)]
    return errors[-1] if errors else None


def first_dead_rank(log: Path) -> tuple[int, int] | None:
    """The rank that ended first of several, and its exit status, from torchrun's summary at the end
    of the log."""
    return _first_dead_rank(_tail(log))


def _first_dead_rank(text: str) -> tuple[int, int] | None:
    return _rank_and_status(_first_block(text))


def _rank_and_status(block: str) -> tuple[int, int] | None:
    rank, status = re.search(r"^\s*rank\s*: (\d+)", block, re.M), re.search(r"^\s*exitcode\s*: (-?\d+)", block, re.M)
    return (int(rank[1]), int(status[1])) if rank and status else None


def _first_block(text: str) -> str:
    """torchrun's lines about the rank that ended first.

    A rank that loses the connection to a killed one may exit so soon that torchrun notices both
    together and names the wrong one. A killed rank in its list was not killed by torchrun, which
    lists only ranks that ended before it stopped the others.
    """
    before, found, root = text.rpartition(_ROOT_CAUSE)
    if not found:
        return ""
    ended = _rank_and_status(root)
    if ended is not None and ended[1] > 0:
        others = re.split(r"^\[\d+\]:$", before.rpartition("Failures:")[2], flags=re.M)
        for block in others:
            other = _rank_and_status(block)
            if other is not None and other[1] in _KILLED:
                return block
    return root


def _rank_lines(text: str) -> list[str]:
    block = _first_block(text)
    lines = [line.strip() for line in block.splitlines()]
    return [line for line in lines if line.strip("=-")][:_LINES]


def _tail(log: Path, size: int = _TAIL_BYTES) -> str:
    try:
        with open_to_read(log) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode(errors="replace").replace("\r", "\n")
    except OSError as error:
        return f"{log}: cannot be read: {error.strerror}"


_NAME = "error.json"
"""The error file of the program itself. torchrun writes the error of the first rank that failed."""
_RANKS = "torchelastic"
"""The folder in which torchrun creates a folder with an error file for each rank."""
_TRIES = "attempt_*"
_BYTES = 1 << 18
_MOST = 64


def rank_logs(attempt_folder: Path) -> Path:
    """Where torchrun writes the logs of its ranks, unless its command says otherwise."""
    return attempt_folder / _RANKS


def error_file_environment(attempt_folder: Path) -> dict[str, str]:
    """The environment variables that make torchrun, and programs that use its `record`, write their
    error files here.

    Variables that the user has set stay unchanged.
    """
    wanted = {
        "TORCHELASTIC_ERROR_FILE": str(attempt_folder / _NAME),
        # The default of torchrun's --log-dir, with one folder for each rank.
        "PET_LOG_DIR": str(rank_logs(attempt_folder)),
    }
    return {name: value for name, value in wanted.items() if not os.environ.get(name)}


def error_files(folder: Path) -> list[str]:
    """The texts of all error files, the program's own first.

    If torchrun itself has restarted the ranks, only the files of its last try count."""
    last = [max(run.glob(_TRIES), key=_number, default=run) for run in sorted((folder / _RANKS).glob("*"))]
    paths = [folder / _NAME, *(path for tried in last for path in sorted(tried.glob(f"**/{_NAME}")))]
    found = []
    for path in paths[:_MOST]:
        try:
            with open_to_read(path) as file:
                found.append(file.read(_BYTES).decode(errors="replace"))
        except OSError:
            continue  # no such file was written
    return found


def worker_restarts(folder: Path) -> int:
    """How often torchrun has started the workers of this attempt again, by the folders that it
    makes for them."""
    return max((_number(tried) for tried in (folder / _RANKS).glob(f"*/{_TRIES}")), default=0)


def _number(folder: Path) -> int:
    digits = folder.name.rpartition("_")[2]
    return int(digits) if digits.isdecimal() else -1
