"""One thing that a log says, and the shapes by which it is recognised."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from memtop.supervisor.diagnosis.page import View
from memtop.supervisor.diagnosis.values import Kind


class Weight(IntEnum):
    """What may have caused what: the heaviest finding is the cause, of equals the first."""

    HINT = 0
    """Shown beside a failure, seldom one itself."""
    TERMINATED = 10
    """SIGTERM: how a launcher ends the others when one has failed."""
    KILLED = 20
    """SIGKILL without a word about who sent it."""
    BROKEN = 30
    """What the other ranks see when one has failed: timeouts, lost connections."""
    ERROR = 40
    """Any error, and an end from outside."""
    CAUSE = 50
    """A failure that says itself what it is."""


@dataclass(frozen=True)
class Figures:
    """What a message prints, in bytes."""

    device_index: int | None = None
    requested: int | None = None
    total: int | None = None
    free: int | None = None
    process: int | None = None
    allocated: int | None = None
    reserved_unallocated: int | None = None
    allowed: int | None = None
    other_pids: tuple[int, ...] = ()
    other: int | None = None
    """Held by other processes; inferred."""
    context: int | None = None
    """Held by the process beside its allocator; inferred."""

    @property
    def known(self) -> int:
        return sum(value is not None for value in (self.requested, self.total, self.free, self.allocated, self.process))


NO_FIGURES = Figures()


@dataclass(frozen=True)
class Finding:
    line: int
    kind: Kind
    reason: str | None
    weight: Weight
    confidence: float
    phase: str | None = None
    """None: to be read from the lines before."""
    figures: Figures = NO_FIGURES
    last_line: int = 0


@dataclass(frozen=True)
class Shape:
    """A pattern over text without white space. It is written with single spaces for the reader; they are dropped. It repeats
    nothing without an end, so that no text costs it more than its length."""

    pattern: re.Pattern[str]
    kind: Kind
    reason: str | None
    weight: Weight
    confidence: float
    phase: str | None
    at_start: bool
    needle: str
    asserted: bool

    def find(self, view: View) -> Iterator[Finding]:
        if self.needle and self.needle not in view.text:
            return
        yield from both_ends(list(self.pattern.finditer(view.text)), lambda match: self._accepted(view, match))

    def _accepted(self, view: View, match: re.Match[str]) -> Finding | None:
        if self.at_start and not view.starts_line(match.start()):
            return None
        before = view.before(match.start(), _BEFORE)
        if _SUPPOSED.search(before) or (self.asserted and not _ASSERTED.search(before)):
            return None
        if _cuts_number(view, match.end()):
            return None
        groups = match.groupdict()
        figures = Figures(
            device_index=_device(view, match) if groups.get("gpu") else None,
            requested=None if not groups.get("size") else parse_size(groups["size"]),
        )
        line = view.line_at(match.start())
        last = max(line, view.line_at(match.end() - 1))
        return Finding(line, self.kind, self.reason, self.weight, self.confidence, self.phase, figures, last)


def _cuts_number(view: View, end: int) -> bool:
    """Whether a match that ends in a digit ends within a number: `exitcode: -9` is not in `exitcode: -93`, but the next line
    may well begin with a digit."""
    around = view.text[end - 1 : end + 1]
    return len(around) == 2 and around.isdigit() and not view.starts_line(end)


def _device(view: View, match: re.Match[str]) -> int | None:
    """A number at the end of a message must not go on into the next line."""
    text = match["gpu"]
    for length in range(1, len(text)):
        if view.starts_line(match.start("gpu") + length):
            text = text[:length]
            break
    return int(text) if len(text) <= 4 else None


MOST_OF_A_KIND = 40
_TRIES = 1000
"""How many candidates of either end are looked at: a log may hold a hundred thousand that are none."""
_BEFORE = 80
"""Characters in front of a match that say whether it is meant."""

Candidate = TypeVar("Candidate")


def both_ends(
    candidates: Sequence[Candidate], accepted: Callable[[Candidate], Finding | None], most: int = MOST_OF_A_KIND
) -> list[Finding]:
    """What is accepted of the candidates, in order: of many the first and the last, half of `most` each. A log may tell of a
    hundred failures that were survived before the one that ended the program."""
    front: list[Finding] = []
    back: list[Finding] = []
    taken = 0
    while taken < min(len(candidates), _TRIES) and len(front) < most // 2:
        finding = accepted(candidates[taken])
        taken += 1
        if finding is not None:
            front.append(finding)
    for index in range(len(candidates) - 1, max(taken, len(candidates) - _TRIES) - 1, -1):
        if len(back) >= most // 2:
            break
        finding = accepted(candidates[index])
        if finding is not None:
            back.append(finding)
    return front + back[::-1]


# At the beginning of what is said: of a line, after an error's class, in quotes; or as what something failed with.
_ASSERTED = re.compile(
    r"(?:^|[:\"'`(\[>=!\].,;*–—-]|\b(?:failed|crashed|died|aborted|stopped|ended|killed)\b.{0,30})\s*$", re.IGNORECASE
)

# "try this if you run out of memory" names no failure.
_SUPPOSED = re.compile(
    r"\b(?:if|avoid|avoids|prevent|prevents|may|might|can|could|would|when|whenever|in case of|to fix|reduces?|lest|without|"
    r"instead of|help|helps|helpful|except|catch|catches|catching|handle|handles|handling|handler|detects?|check(?:s|ing)? for|"
    r"against|likely|risk(?:s|ing)?|no|not|isinstance|class|def|import|assertRaises|pytest\.raises)\W{0,3}"
    r"(?:(?:you|we|it|the|an?|any|this|run|runs|running|get|see|hit|encounter|getting|of|possible"
    r"|potential|torch\.(?:cuda\.)?)\W{0,2}){0,4}$",
    re.IGNORECASE,
)


def shape(
    pattern: str,
    kind: Kind,
    reason: str | None = None,
    *,
    weight: Weight = Weight.CAUSE,
    confidence: float = 0.9,
    phase: str | None = None,
    at_start: bool = False,
    needle: str = "",
    asserted: bool = False,
) -> Shape:
    """`needle` is a plain part of every text that can match: a fast way to say no. `asserted`: only where the line says it, not
    where it speaks about it."""
    compiled = re.compile(bounded(pattern.replace(" ", "").replace("SIZE", SIZE)))
    return Shape(compiled, kind, reason, weight, confidence, phase, at_start, needle.replace(" ", ""), asserted)


def bounded(pattern: str) -> str:
    """The pattern with numbers and names of a length that numbers and names have: one of any length costs the square of the
    text's length where it stands beside another, and a text without white space can be one number from end to end."""
    for token, longest in (("\\d", 20), ("\\w", 80)):
        pattern = pattern.replace(f"{token}+", f"{token}{{1,{longest}}}").replace(f"{token}*", f"{token}{{0,{longest}}}")
    return pattern


def not_memory(
    pattern: str,
    reason: str,
    *,
    weight: Weight = Weight.ERROR,
    confidence: float = 0.9,
    phase: str | None = None,
    at_start: bool = False,
    needle: str = "",
) -> Shape:
    """Mostly of the weight of any error, since many are warnings of something that a program does without: a lack of memory
    that follows weighs more."""
    return shape(
        pattern, Kind.NOT_MEMORY, reason, weight=weight, confidence=confidence, phase=phase, at_start=at_start, needle=needle
    )


SIZE = r"\d[\d,]{0,24}(?:\.\d{0,6})?(?:[KMGTP]i?[Bb]|[KMGT](?![A-Za-z])|[Bb]ytes?|B(?![A-Za-z]))"
_SIZE_PARTS = re.compile(r"([\d,]+(?:\.\d*)?)([A-Za-z]*)")
_SHIFTS = {"k": 10, "m": 20, "g": 30, "t": 40, "p": 50}
_WRAPPED = 1 << 60
"""Larger than any memory: an unsigned number that went below zero."""


def parse_size(text: str) -> int | None:
    """Bytes of a printed size, rounded half up; GB is 2**30 as GiB is, since the programs that print it mean that. None where
    it is no size."""
    parts = _SIZE_PARTS.match(text)
    if parts is None:
        return None
    whole, _, decimals = parts[1].replace(",", "").partition(".")
    if not whole or len(whole) > 24:
        return None
    decimals = decimals[:9]
    shift = _SHIFTS.get(parts[2][:1].lower(), 0)
    # In whole numbers: a float rounds 17179869184.00 GiB and its like.
    scale = 10 ** len(decimals)
    size = (2 * (int(whole) * scale + int(decimals or 0)) * (1 << shift) + scale) // (2 * scale)
    return None if size >= _WRAPPED else size
