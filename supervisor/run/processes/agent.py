"""Whether memtop's agent can be in the processes of a program that has reported nothing, and why
not."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from memtop.supervisor.monitor.processes.proc import PROC, ProcessId, command_words, environment
from memtop.supervisor.run.events import Absence, NotHeard
from memtop.supervisor.run.processes.members import named

# On PYTHONPATH, its sitecustomize loads the agent into the training process. This is a path and no
# import, because the supervisor does not import the trainer.
AGENT_SITE = Path(__file__).resolve().parents[3] / "train" / "agent" / "site"
ATTEMPT_VARIABLE = "MEMTOP_ATTEMPT_DIR"
SILENT_SECONDS = 600.0
"""A program with the agent that reports no update for so long uses no torch optimizer."""
# Python's options that take the next word.
_WITH_VALUE = "WX"


def not_heard(processes: Iterable[ProcessId], seconds: float) -> NotHeard | None:
    """Why a program has reported nothing for so many seconds; None if it may still do so."""
    found: list[NotHeard] = []
    closed: list[ProcessId] = []
    for process in processes:
        try:
            python = _is_python(process.pid)
        except PermissionError:
            closed.append(process)
            continue
        if not python:
            continue
        variables = environment(process.pid)
        words = command_words(process.pid)
        if variables is None or words is None:
            return None  # it ends, or what it is cannot be read: nothing is known
        absence = _absence(variables, words)
        if absence is None:
            return NotHeard(Absence.NO_UPDATE) if seconds >= SILENT_SECONDS else None
        found.append(NotHeard(absence, named(process)))
    if closed and not found:
        # The newest: sudo itself is the first.
        return NotHeard(Absence.OTHER_USER, named(closed[-1]))
    return found[0] if found else NotHeard(Absence.NO_PYTHON)


def _is_python(pid: int) -> bool:
    """Whether this process runs Python. PermissionError for a process of another user."""
    try:
        return os.readlink(f"{PROC}/{pid}/exe").rpartition("/")[2].startswith("python")  # noqa: PTH115 - a name alone
    except PermissionError:
        raise
    except OSError:
        return False


def _absence(variables: dict[str, str], words: Sequence[str]) -> Absence | None:
    """Why Python does not load the agent in this process; None if it does."""
    if ATTEMPT_VARIABLE not in variables:
        return Absence.ENVIRONMENT
    if str(AGENT_SITE) not in variables.get("PYTHONPATH", "").split(os.pathsep):
        return Absence.PYTHONPATH
    return Absence.ISOLATED if any(letter in "IES" for letter in _options(words)) else None


def _options(words: Sequence[str]) -> Iterator[str]:
    """The letters of Python's own options in a command line."""
    following = iter(words[1:])
    for word in following:
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return
        for place, letter in enumerate(word[1:], start=1):
            if letter in "cm":
                return
            yield letter
            if letter in _WITH_VALUE:
                if place == len(word) - 1:
                    next(following, None)
                break
