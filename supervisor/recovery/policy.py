"""Decides what follows a failure: restart with a remedy, wait for disk space, ask a person, or
stop.

memtop never restarts by itself with a configuration that ran out of memory before. After two
restarts in a row without a newer saved update it asks a person. Only a certain lack of memory leads
to a smaller configuration. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.values import Remedy

ON_OOM = ("auto", "ask", "stop")
SURE = 0.5
"""The confidence from which on memtop acts on a diagnosis."""
FRUITLESS = 2
"""After so many restarts in a row without a newer saved update, a person is asked."""
_BY_ITSELF = ("live", "resumes")


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of the run's past, with one configuration."""

    key: str
    """The configuration's key (`configuration_key`)."""
    died_of_memory: bool = False
    attempt: int | None = None
    """The attempt's number. A program that changes its settings has several configurations in one
    attempt. None: it counts as a separate attempt."""
    by_memtop: bool = False
    """Whether memtop restarted the run by itself."""
    saved_before: int | None = None
    """The newest saved update when the attempt began, and ..."""
    saved_after: int | None = None
    """... when it ended, or went on with another configuration."""

    @property
    def fruitless(self) -> bool:
        return self.by_memtop and (self.saved_after or 0) <= (self.saved_before or 0)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A remedy and the key of the configuration that it leads to; None if memtop cannot start
    one."""

    remedy: Remedy
    key: str | None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """`restart` has a remedy; `wait` waits for disk space and then restarts with the same
    settings."""

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
    never: str | None = None,
) -> Decision:
    """What follows the newest failure; `past` ends with the configuration that failed.

    `never`: why memtop does not start this program again by itself; None if it may.
    """
    if not diagnosis.of_memory:
        return Decision(action="stop", why="it did not run out of memory, so no setting is changed")
    if diagnosis.confidence < SURE:
        return Decision(action="stop", why="a lack of memory is not certain enough to change a setting")
    if on_oom == "stop":
        return Decision(action="stop", why="--on-oom stop")
    if on_oom == "ask":
        return Decision(action="ask", why="--on-oom ask")
    if never is not None:
        return Decision(action="ask", why=never)
    newest = _attempts(past)[-FRUITLESS:]
    if len(newest) == FRUITLESS and all(attempt.fruitless for attempt in newest):
        return Decision(action="ask", why=f"{FRUITLESS} restarts in a row brought no newer saved update")
    if diagnosis.kind is Kind.DISK_FULL:
        return Decision(action="wait", why="it continues by itself once the disk has space")
    failed = {tried.key for tried in past if tried.died_of_memory}
    for candidate in candidates:
        if candidate.key is not None and candidate.key not in failed and _may_be_applied(candidate.remedy):
            return Decision(action="restart", why=candidate.remedy.title, remedy=candidate.remedy)
    return Decision(action="ask", why=_nothing_left(candidates, failed))


def _attempts(past: Sequence[Tried]) -> list[Tried]:
    """The past with one entry per attempt: a change in the running program is not a restart."""
    found: list[Tried] = []
    for tried in past:
        if found and tried.attempt is not None and tried.attempt == found[-1].attempt:
            found[-1] = msgspec.structs.replace(found[-1], saved_after=tried.saved_after)
        else:
            found.append(tried)
    return found


def _may_be_applied(remedy: Remedy) -> bool:
    """Whether no consent is needed: training is unchanged, and the run resumes exactly."""
    return not remedy.needs_consent and remedy.keeps_math and remedy.resumable in _BY_ITSELF


def _nothing_left(candidates: Sequence[Candidate], failed: set[str]) -> str:
    if not candidates:
        return "memtop knows no further remedy"
    open_ones = [candidate for candidate in candidates if candidate.key not in failed]
    if not open_ones:
        return "every configuration that the remedies lead to has failed before"
    if any(candidate.remedy.needs_consent or not candidate.remedy.keeps_math for candidate in open_ones):
        return "the remaining remedies change training and need your consent"
    return "you have to apply the remaining remedies yourself"
