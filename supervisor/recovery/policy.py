"""What to do about a death, decided from values alone: restart smaller, wait for room, ask a
person, or stop.

A configuration that ran out of memory is never tried again by itself; two restarts in a row without
a newer saved update end in a question; and nothing but a death of memory that is sure leads to a
smaller configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.values import Remedy

ON_OOM = ("auto", "ask", "stop")
SURE = 0.5
"""The confidence from which on something is done."""
FRUITLESS = 2
"""So many restarts in a row without a newer saved update, and a person is asked."""
_BY_ITSELF = ("live", "resumes")


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt under one configuration of the run's past, oldest first."""

    key: str
    """What makes two configurations the same."""
    died_of_memory: bool = False
    attempt: int | None = None
    """Its number: a program that changes its own settings has several configurations in one
    attempt. None: of its own."""
    by_memtop: bool = False
    """memtop had restarted the run, nobody asked."""
    saved_before: int | None = None
    """The newest saved update when the attempt began, and ..."""
    saved_after: int | None = None
    """... when it ended, or went on with another configuration."""

    @property
    def fruitless(self) -> bool:
        return self.by_memtop and (self.saved_after or 0) <= (self.saved_before or 0)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A remedy, and the key of the configuration that it leads to; None where it leads to none that
    memtop could start."""

    remedy: Remedy
    key: str | None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """`restart` has a remedy; `wait` is for room on the disk, then the same configuration goes
    on."""

    action: Literal["restart", "wait", "ask", "stop"]
    why: str
    """One line for a person."""
    remedy: Remedy | None = None


def decide(
    diagnosis: Diagnosis,
    past: Sequence[Tried],
    candidates: Sequence[Candidate],
    on_oom: str,
    *,
    otherwise: str | None = None,
) -> Decision:
    """What follows the newest death; `past` ends with the configuration that died of it.
    `otherwise`: why nothing is done where none of the candidates can be, None: told by the
    candidates."""
    if not diagnosis.of_memory:
        return Decision(action="stop", why="it did not die of memory: nothing is changed for that")
    if diagnosis.confidence < SURE:
        return Decision(action="stop", why="it is not certain enough that memory was the reason: nothing is changed for that")
    if on_oom == "stop":
        return Decision(action="stop", why="--on-oom stop")
    if on_oom == "ask":
        return Decision(action="ask", why="--on-oom ask")
    newest = _attempts(past)[-FRUITLESS:]
    if len(newest) == FRUITLESS and all(attempt.fruitless for attempt in newest):
        return Decision(action="ask", why=f"{FRUITLESS} restarts in a row brought no newer saved update")
    if diagnosis.kind is Kind.DISK_FULL:
        return Decision(action="wait", why="it goes on by itself as soon as there is room on the disk")
    failed = {tried.key for tried in past if tried.died_of_memory}
    for candidate in candidates:
        if candidate.key is not None and candidate.key not in failed and _may_be_applied(candidate.remedy):
            return Decision(action="restart", why=candidate.remedy.title, remedy=candidate.remedy)
    return Decision(action="ask", why=otherwise or _nothing_left(candidates, failed))


def _attempts(past: Sequence[Tried]) -> list[Tried]:
    """The past with one entry for each attempt: what changes in the running program is neither a
    restart nor its success."""
    found: list[Tried] = []
    for tried in past:
        if found and tried.attempt is not None and tried.attempt == found[-1].attempt:
            found[-1] = msgspec.structs.replace(found[-1], saved_after=tried.saved_after)
        else:
            found.append(tried)
    return found


def _may_be_applied(remedy: Remedy) -> bool:
    """Without asking only what changes nothing of what is learnt, and takes up the run where it
    stood."""
    return not remedy.needs_consent and remedy.keeps_math and remedy.resumable in _BY_ITSELF


def _nothing_left(candidates: Sequence[Candidate], failed: set[str]) -> str:
    if not candidates:
        return "no remedy is left that memtop knows"
    open_ones = [candidate for candidate in candidates if candidate.key not in failed]
    if not open_ones:
        return "every configuration that it could lead to has failed already"
    if any(candidate.remedy.needs_consent or not candidate.remedy.keeps_math for candidate in open_ones):
        return "what is left changes what is learnt, and needs your consent"
    return "what is left is for you to do"
