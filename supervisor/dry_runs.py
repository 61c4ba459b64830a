"""Asks a Python with torch what memory a training would take (`train/dry_run`)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO, Any

import msgspec

from memtop.presets import Settings, user_cache
from memtop.supervisor.interpreters import environment_of


class Foreseen(msgspec.Struct, frozen=True, kw_only=True):
    """What a dry run says, in bytes: without the CUDA context and NCCL."""

    reserved: int
    peak_phase: str
    components: Mapping[str, int]
    """What is allocated at the peak."""


class _Answer(msgspec.Struct, frozen=True):
    foresight: Foreseen | None = None
    problem: str | None = None
    of_model: bool = True


class NotForeseenError(Exception):
    """The memory cannot be foreseen; the text is one line with the reason."""

    def __init__(self, reason: str, *, of_model: bool = True) -> None:
        """`of_model`: the settings may be right; the dry run cannot run the model."""
        super().__init__(reason)
        self.of_model = of_model


class DryRuns:
    """A process that answers one question after the other. End it with `close`."""

    def __init__(self, python: str) -> None:
        """`python`: the interpreter that would train; empty: memtop's own."""
        cache = user_cache()
        command = [python or sys.executable, "-m", "memtop.train.dry_run"]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            [*command, *([str(cache / "dry_runs")] if cache is not None else [])],
            env=environment_of(python),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def foresee(self, settings: Settings, *, generation: int, capacity: int | None) -> Foreseen:
        """The memory of a run with these settings; NotForeseenError with the reason."""
        answer = self._asked({"settings": settings, "generation": generation, "capacity": capacity})
        if answer.foresight is None:
            raise NotForeseenError(answer.problem or "the dry run gave no reason", of_model=answer.of_model)
        return answer.foresight

    def check(self, settings: Settings, *, generation: int) -> None:
        """NotForeseenError if a dry run would refuse these settings, whatever the GPU's memory."""
        answer = self._asked({"settings": settings, "generation": generation, "only_check": True})
        if answer.problem is not None:
            raise NotForeseenError(answer.problem, of_model=answer.of_model)

    def _asked(self, question: dict[str, Any]) -> _Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise NotForeseenError(self._death()) from None
        line = self._process.stdout.readline()
        if not line:
            raise NotForeseenError(self._death())
        return msgspec.json.decode(line, type=_Answer)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _death(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2].strip()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return f"the dry run {how}{f': {last}' if last else ''}"
