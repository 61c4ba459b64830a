"""Memory groups of the kernel for tests: real limits, real kills, version 1 and 2."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")
_ROOM = 64 << 20
_STEP = 16 << 20
# Grows until the kernel has killed a process. The others may need memory before this one has
# stopped. Then the kernel kills once more, and this score makes it choose this process.
_BALLAST = """
import os, time

def kills():
    rows = dict(line.split() for line in open({events!r}))
    return int(rows["oom_kill"])

with open("/proc/self/oom_score_adj", "w") as score:
    score.write("900")
held, before = [], kills()
while kills() == before and not os.path.exists({stop!r}):
    held.append(bytearray(os.urandom(1 << 12)) * 256)
    time.sleep(0.002)
"""


class MemoryGroup:
    """A group with a limit."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self._limit = path / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        self._events = path / ("memory.events" if version == 2 else "memory.oom_control")
        self._usage = path / ("memory.current" if version == 2 else "memory.usage_in_bytes")
        self._swap = path / ("memory.swap.max" if version == 2 else "memory.memsw.limit_in_bytes")

    def limit(self, size: int) -> None:
        if not self._swap.exists():
            self._limit.write_text(str(size))
        elif self._swap.name == "memory.swap.max":
            self._limit.write_text(str(size))
            self._swap.write_text("0")  # or the machine's swap would take what does not fit
        else:
            # Version 1 limits memory, and memory with swap; the second is never below the first.
            rises = size > int(self._limit.read_text())
            for path in (self._swap, self._limit) if rises else (self._limit, self._swap):
                path.write_text(str(size))

    def squeeze(self, size: int) -> None:
        """Leave the group so many bytes less than it uses now, step by step; swap takes them."""
        goal = int(self._usage.read_text()) - size
        for _ in range(200):
            wanted = max(goal, int(self._usage.read_text()) - _STEP)
            try:
                self._limit.write_text(str(wanted))
            except OSError as error:
                assert error.errno == errno.EBUSY  # noqa: PT017 - not yet: the pages are on their way out
            if wanted == goal:
                return
            time.sleep(0.05)
        raise AssertionError(f"the group still uses more than {goal} bytes")

    @property
    def enter(self) -> str:
        """For `Program(prepare=...)`: the new process goes into the group first."""
        return f"import os; open('{self.path}/cgroup.procs', 'w').write(str(os.getpid()))"

    def inside(self, *command: str) -> tuple[str, ...]:
        """The command, in the group. It does not run if the group is gone: it may take all memory
        that it gets."""
        return ("sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", *command)

    def pids(self) -> list[int]:
        return [int(word) for word in (self.path / "cgroup.procs").read_text().split()]

    def kills(self) -> int:
        rows = dict(line.split() for line in self._events.read_text().splitlines())
        return int(rows["oom_kill"])

    def make_the_kernel_kill(self, pid: int, stop: Path, seconds: float = 120) -> int:
        """Let the group run out of memory, so that the kernel kills this process. Returns how many
        processes it killed, without the one that takes the memory."""
        for other in self.pids():
            with contextlib.suppress(PermissionError, ProcessLookupError, FileNotFoundError):
                # Never the supervisor, even if the kernel needs memory a third time.
                Path(f"/proc/{other}/oom_score_adj").write_text("1000" if other == pid else "-900")
        self.limit(int(self._usage.read_text()) + _ROOM)
        before = self.kills()
        ballast = subprocess.Popen(self.inside(sys.executable, "-c", _BALLAST.format(events=str(self._events), stop=str(stop))))
        try:
            deadline = time.monotonic() + seconds
            while self.kills() == before:
                assert time.monotonic() < deadline, "the kernel killed nobody"
                time.sleep(0.02)
        finally:
            stop.touch()
            status = ballast.wait(timeout=120)
        assert status in (0, -signal.SIGKILL), status
        return self.kills() - before - (status == -signal.SIGKILL)


def memory_group() -> Iterator[MemoryGroup]:
    """A group of its own; skips the test where this user may make none."""
    version = 1 if (ROOT / "memory" / "memory.limit_in_bytes").exists() or (ROOT / "memory").is_dir() else 2
    path = (ROOT / "memory" if version == 1 else ROOT) / f"memtop-test-{uuid.uuid4().hex[:8]}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"memory cgroups cannot be written here: {path}: {error.strerror}")
    if not (path / ("memory.max" if version == 2 else "memory.limit_in_bytes")).exists():
        path.rmdir()
        pytest.skip(f"memory cgroups cannot be written here: {path} has no memory controller")
    group = MemoryGroup(path, version)
    yield group
    deadline = time.monotonic() + 120
    while True:
        try:
            path.rmdir()
        except OSError:
            for pid in group.pids():
                os.kill(pid, 9)  # only what the test itself has put there
            assert time.monotonic() < deadline, f"{path} cannot be removed"
            time.sleep(0.1)
        else:
            return
