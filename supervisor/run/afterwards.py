"""The command at the very end of a run (`--then`): shut a rented machine down, copy the results.

It runs once for each end. A claim is written before it starts, so that a new supervisor does not
start it again.
"""

from __future__ import annotations

import os
import subprocess
import time

import msgspec

from memtop.supervisor.run.events import CommandEnded
from memtop.supervisor.run.record.folder import RunFolder, read_derived, write_json
from memtop.supervisor.wire import Phase

FILE = "then.json"
_NOTICE_SECONDS = 3.0
"""After the end: a person may restart the run in this time."""


class ThenFile(msgspec.Struct, frozen=True, kw_only=True):
    """`then.json`: for the end of which attempt the command was started last."""

    attempt: int
    started: float


class Afterwards:
    """Starts the command of one run, and reports how it ended."""

    def __init__(self, folder: RunFolder, command: str | None, cwd: str) -> None:
        self._folder, self._command, self._cwd = folder, command, cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._over_since: tuple[int, float] | None = None
        self._given_up: int | None = None
        """The attempt after which the command could not be started: it is not tried again."""

    @property
    def busy(self) -> bool:
        """Whether the command works, or is about to."""
        return self._process is not None or (self._over_since is not None and not self._claimed(self._over_since[0]))

    def tick(self, attempt: int, phase: Phase, *, over: bool) -> CommandEnded | None:
        """`over`: nothing of the run is left to do. The event, if the command has just ended."""
        if self._process is not None:
            return self._ended()
        if self._command is None or not over:
            self._over_since = None
            return None
        now = time.monotonic()
        if self._over_since is None or self._over_since[0] != attempt:
            self._over_since = (attempt, now)
        if now - self._over_since[1] < _NOTICE_SECONDS or self._claimed(attempt):
            return None
        return self._start(attempt, phase)

    def _claimed(self, attempt: int) -> bool:
        if self._command is None or self._given_up == attempt:
            return True
        claim = read_derived(self._folder.path / FILE, ThenFile)
        return claim is not None and claim.attempt >= attempt

    def _start(self, attempt: int, phase: Phase) -> CommandEnded | None:
        assert self._command is not None
        environment = {**os.environ, "MEMTOP_RUN": str(self._folder.path), "MEMTOP_STATE": phase.value}
        try:
            write_json(self._folder.path / FILE, ThenFile(attempt=attempt, started=time.time()))
            with (self._folder.path / "then.log").open("ab") as log:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", self._command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd=self._cwd,
                    env=environment,
                )
        except OSError as error:
            self._given_up = attempt
            return CommandEnded(words=f"--then: cannot be started: {error.strerror}")
        return None

    def _ended(self) -> CommandEnded | None:
        assert self._process is not None
        status = self._process.poll()
        if status is None:
            return None
        self._process = None
        words = "has finished" if status == 0 else f"has failed with exit status {status}, see then.log"
        return CommandEnded(words=f"--then: {self._command}: {words}")
