"""What a log or other evidence says about a failure (`Finding`), and the patterns that find it in a
log (`Pattern`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal, TypeVar

from memtop.supervisor.diagnosis.text import JoinedLines
from memtop.supervisor.diagnosis.values import Kind

Source = Literal["record", "error_file", "kernel", "samples", "words", "exit_status"]
"""Where a finding comes from, the strongest evidence first."""


SUSPECTED = 0.4
"""The confidence in a lack of host memory that SIGKILL alone gives: `kill -9` by hand looks the
same."""


UNCERTAIN = 0.45
"""A confidence too low to act on."""


class Weight(IntEnum):
    """How likely a finding is the cause: the heaviest finding is the cause; of equals, the first
    one."""

    HINT = 0
    """Printed next to failures, seldom one itself."""
    TERMINATED = 10
    """SIGTERM: a launcher ends the other ranks with it when one has failed."""
    KILLED = 20
    """SIGKILL, with no word about who sent it."""
    DENIED = 25
    """SIGKILL, and the platform reports that it was not for memory."""
    BROKEN = 30
    """What the other ranks see when one has failed: timeouts, lost connections."""
    ERROR = 40
    """Any error, and an end that was ordered from outside."""
    LIKELY = 45
    """A lack of memory in words of an unknown program, and an error that only wraps the actual
    one."""
    CAUSE = 50
    """A failure whose message names its cause."""


@dataclass(frozen=True)
class Figures:
    """The numbers that a message prints. Memory is in bytes."""

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
    """Held by other processes (inferred)."""
    context: int | None = None
    """Held by the process outside its allocator (inferred)."""
    complete: bool = False
    """Whether all that the message prints has been read."""

    @property
    def known(self) -> int:
        return sum(value is not None for value in (self.requested, self.total, self.free, self.allocated, self.process))


NO_FIGURES = Figures()


@dataclass(frozen=True)
class Finding:
    """One failure that a log, a record, the kernel or the exit status reports."""

    kind: Kind
    reason: str | None = None
    confidence: float = 0.9
    """0-1."""
    weight: Weight = Weight.CAUSE
    phase: str | None = None
    """None: not known yet; `log.read` reads it from the traceback."""
    figures: Figures = NO_FIGURES
    line: int = 0
    """The index of the first of its lines in `LogText.lines`, if it is from a log."""
    last_line: int = 0
    source: Source = "words"
    evidence: tuple[str, ...] = ()
    """The lines (or the counters, as sentences) that prove it."""
    rank: int | None = None
    device_uuid: str | None = None
    batch: int | None = None
    """The micro-batch of the work that failed, if a rank reported it."""
    detail: str | None = None
    """What the program printed, for failures that have no sentence of their own."""
    caveat: str | None = None
    """A sentence that closes the summary."""


@dataclass(frozen=True)
class Pattern:
    """A regular expression over the text of a `JoinedLines`, and what a match means.

    It is written with single spaces for the reader. `compiled` removes them, because a view has no
    white space, and refuses whatever would then mean something else than what is written.
    """

    pattern: str
    kind: Kind
    confidence: float = 0.9
    reason: str | None = None
    weight: Weight = Weight.CAUSE
    phase: str | None = None
    """None: read from the traceback."""
    at_start: bool = False
    """Match only at the start of a line."""
    asserted: bool = False
    """Match only where the line states it, not where it only mentions it."""
    whole_word: bool = False
    """Match only where a word of the line ends with the match."""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Compiled when first wanted: most never are, and all of them take a third of the time in
        which a supervisor starts."""
        return compiled(self.pattern)

    @cached_property
    def needles(self) -> tuple[str, ...]:
        """Every match contains one of these plain strings, and searching for them rejects most
        texts."""
        return _needles(self.pattern)

    def find(self, view: JoinedLines) -> Iterator[Finding]:
        if self.needles and not any(needle in view.text for needle in self.needles):
            return
        yield from both_ends(list(self.regex.finditer(view.text)), lambda match: self._accepted(view, match))

    def _accepted(self, view: JoinedLines, match: re.Match[str]) -> Finding | None:
        if self.at_start and not view.starts_line(match.start()):
            return None
        if self.whole_word and not view.ends_word(match.end() - 1):
            return None
        before = view.before(match.start(), _BEFORE)
        if before[-1:].isalnum() and _CONTINUES.match(before[-1] + match[0][:1]):
            return None
        if is_supposed(before) or (self.asserted and not _ASSERTED.search(before)):
            return None
        if _cuts_number(view, match.end()) or view.text[match.end() : match.end() + 1] in _QUESTION_MARKS:
            return None
        figures = Figures(
            device_index=_device(view, match) if match.groupdict().get("gpu") else None,
            requested=_size(view, match, "size"),
            total=_size(view, match, "total"),
            free=_size(view, match, "free"),
            process=_size(view, match, "process"),
            allocated=_size(view, match, "allocated"),
            allowed=_size(view, match, "allowed"),
        )
        line = view.line_at(match.start())
        last = max(line, view.line_at(match.end() - 1))
        confidence, weight = self.confidence, self.weight
        if _PERHAPS.search(before):
            confidence, weight = min(confidence, UNCERTAIN), min(weight, Weight.LIKELY)
        elif not figures.known and self.kind in _STATABLE and not _is_stated(view.before(match.start(), _FAR_BEFORE), match[0]):
            confidence, weight = min(confidence, UNCERTAIN), min(weight, Weight.BROKEN)
        return Finding(self.kind, self.reason, confidence, weight, self.phase, figures, line, last)


def other(
    pattern: str,
    reason: str,
    confidence: float = 0.9,
    *,
    weight: Weight = Weight.ERROR,
    phase: str | None = None,
    at_start: bool = False,
    whole_word: bool = False,
) -> Pattern:
    """A pattern of a failure that is not a lack of memory.

    It weighs as much as any error: many such messages are warnings, and a lack of memory that
    follows must outweigh them.
    """
    return Pattern(pattern, Kind.NOT_MEMORY, confidence, reason, weight, phase, at_start, whole_word=whole_word)


# --- compiling ------------------------------------------------------------------------------------

SIZE = r"\d[\d,]{0,24}(?:\.\d{0,16})?(?:[KMGTPkmgt]i?[Bb]|[KMGT](?![A-Za-z])|(?:kilo|mega|giga)?[Bb]ytes?|B(?![A-Za-z]))"
_TOKEN = re.compile(r"SIZE|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:P<\w+>|P=|[a-z]+:|[:=!]|<[=!])|\{\d+,?\d*\}|.", re.DOTALL)
_QUANTIFIER = re.compile(r"[?*+]|\{\d+,?\d*\}")
# What stands for one character of a number or a name, and how long a number or a name can be.
_LONGEST = {r"\d": 20, r"\w": 80}


def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern for text without white space: without its spaces, and with SIZE standing for a
    printed size.

    `\\d+` and `\\w+` get an upper bound, as all other repeats must have one. A view can be one word
    from end to end, and two endless repeats next to each other would cost the square of its length.

    Raises ValueError where the compiled form would not be what is written: a repeated space (`code
    ?-7` would become `code?-7`), white space in a character class, an anchor or a word boundary,
    and a repeat without an upper bound.
    """
    tokens = _TOKEN.findall(pattern)
    parts: list[str] = []
    for at, token in enumerate(tokens):
        before = tokens[at - 1] if at else ""
        if before == " " and _QUANTIFIER.fullmatch(token):
            raise ValueError(f"pattern {pattern!r}: {token!r} repeats a space, and spaces are removed")
        if token[0] == "[" and re.search(r"\s|\\[sS]", token):
            raise ValueError(f"pattern {pattern!r}: {token!r} names white space, and the text has none")
        if token in (r"\s", r"\S", r"\b", r"\B", r"\A", r"\Z", r"\n", r"\t", r"\r", "\\ ", "^", "$"):
            raise ValueError(f"pattern {pattern!r}: {token!r} has no meaning in text without white space")
        if token in ("*", "+") and before in _LONGEST:
            token = f"{{{int(token == '+')},{_LONGEST[before]}}}"
        elif token in ("*", "+") or (token[0] == "{" and token.endswith(",}")):
            raise ValueError(f"pattern {pattern!r}: {before + token!r} has no upper bound")
        parts.append("" if token.isspace() else SIZE if token == "SIZE" else token)
    return re.compile("".join(parts))


_SHORTEST_NEEDLE = 4
_LITERAL = re.compile(r"[^\\.^$*+?{}\[\]|()\s]|\\[^A-Za-z0-9]")


def _needles(pattern: str) -> tuple[str, ...]:
    """The longest plain string outside groups of each alternative; () if one has none."""
    tokens = [token for token in _TOKEN.findall(pattern) if not token.isspace()]
    longest, run, depth = [""], "", 0
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        depth += (token[0] == "(") - (token == ")")
        plain = not depth and _LITERAL.fullmatch(token) and not _QUANTIFIER.fullmatch(following)
        run = run + token[-1] if plain else ""
        longest[-1] = max(longest[-1], run, key=len)
        if not depth and token == "|":
            longest.append("")
    return tuple(longest) if min(map(len, longest)) >= _SHORTEST_NEEDLE else ()


# --- matching -------------------------------------------------------------------------------------


def _cuts_number(view: JoinedLines, end: int) -> bool:
    """Whether a match ends within a number: `exitcode: -9` is not in `exitcode: -93`, but the next
    line can begin with a digit."""
    around = view.text[end - 1 : end + 1]
    return len(around) == 2 and around.isdigit() and not view.starts_line(end)


def _size(view: JoinedLines, match: re.Match[str], name: str) -> int | None:
    """The bytes that a group gives, if the pattern has it.

    A number without a unit must not continue into the next line.
    """
    text = match.groupdict().get(name)
    if not text:
        return None
    if text.isdecimal():
        text = _on_its_line(view, match.start(name), text)
    elif text[-1].isdecimal():
        text += _unit_behind(match, name)  # `7.2/23.68 GiB`
    return parse_size(text)


def _unit_behind(match: re.Match[str], name: str) -> str:
    found = re.compile(r"/[\d.]{1,12}([KMGT]i?B)").match(match.string, match.end(name))
    return "" if found is None else found[1]


def _on_its_line(view: JoinedLines, start: int, text: str) -> str:
    length = next((length for length in range(1, len(text)) if view.starts_line(start + length)), len(text))
    return text[:length]


def _device(view: JoinedLines, match: re.Match[str]) -> int | None:
    """The GPU's index, which must not continue into the next line."""
    text = _on_its_line(view, match.start("gpu"), match["gpu"])
    return int(text) if len(text) <= 4 else None


MOST_OF_A_KIND = 40
_TRIES = 1000
"""How many candidates at either end are examined: a log can hold a hundred thousand that are
rejected."""
_BEFORE, _FAR_BEFORE = 80, 400
"""How many characters in front of a match are read to see whether it is meant."""

Candidate = TypeVar("Candidate")


def both_ends(
    candidates: Sequence[Candidate], accepted: Callable[[Candidate], Finding | None], most: int = MOST_OF_A_KIND
) -> list[Finding]:
    """The accepted candidates in order; of many, the first and the last `most / 2`.

    A log can report a hundred failures that the program survived before the one that ended it.
    """
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


_STATABLE = (Kind.GPU_OOM, Kind.HOST_OOM_ALLOC, Kind.PINNED_HOST_OOM, Kind.DISK_FULL, Kind.SHM_EXHAUSTED)
_STATING = re.compile(
    r"error|exception|fatal|fail|abort|panic|terminat|critical|\b(?:internal|unavailable|resource.exhausted):"
    r"|crash|throw|what\(\)|cannot|can't|unable|warn|severe|assert"
    r"|killed|died|got |ran |\bsays?\b|\breturn(?:s|ed)?\b|result|status|[:=] ?[EF] |^[EF]\d{4} |\[E\]|</?torch_|ENOSPC"
    r"|could(?: not|n't)|exit code|\b(?:writ(?:e|ing)|open(?:ing)?|copying|saving) \S",
    re.IGNORECASE,
)
_STATING_MATCH = re.compile(
    r"fail|low on resource|cannot|couldn[o']t|can't|unable|error:|errno|tried|OutOfMemoryError", re.IGNORECASE
)
# A quotation within a sentence: `a common error is "CUDA out of memory"`.
_QUOTATION = re.compile(r"[a-z]{2,},? [\"'`\u201c\u2018](?:\w+(?:Error|Exception):\s*)?$")
_HAPPENED = re.compile(
    r"(?i)\b(?:fail\w*|raised?|rais\w+|got|died|crash\w*|abort\w*|threw|throw\w*|with|instance of|exception)\b"
)
_QUESTION_MARKS = ("?", "？")
_HEADING = re.compile(r"#{2,}\s")


def _is_stated(before: str, matched: str) -> bool:
    """Whether a line reports the message as an error that happened, and does not only name it: in a
    heading, a table, a definition or a sentence about errors."""
    if _QUOTATION.search(before) and not _HAPPENED.search(before):
        return False
    if _STATING.search(before) or (_STATING_MATCH.search(matched) and not matched.isupper()):
        return True
    return not before.strip(" \t'\"`*[]()<>-:.") and not _HEADING.match(before)


# "This might be caused by ..." is the program's own guess.
_PERHAPS = re.compile(
    r"\b(?:might|may|could|can|likely|probably|possibly|perhaps|maybe|usually|often)\W{1,2}(?:be |is |are )?"
    r"(?:caused by|due to|because of)(?: \w+){0,3}\W{0,3}$",
    re.IGNORECASE,
)

# A match that begins inside a word: `mem` in `item`. `Error` in `cudaError` begins a word.
_CONTINUES = re.compile(r"[a-zA-Z][a-z]|[A-Z][A-Z]|\d\d")

# What stands in front of a statement: a line's start, an error's class, a quotation mark, or the
# verb of a failure.
_ASSERTED = re.compile(
    r"(?:^|[:\"'`(\[>=!\].,;*–—-]|\b(?:failed|crashed|died|aborted|stopped|ended|killed)\b.{0,30})\s*$", re.IGNORECASE
)

# "try this if you run out of memory" reports no failure.
_SUPPOSED = re.compile(
    r"\b(?:if|avoid|avoids|prevent|prevents|may|might|can|could|would|when|whenever|in case of|to fix|reduces?|lest|without|"
    r"instead of|help|helps|helpful|except|catch|catches|catching|handle|handles|handling|handler|detects?|check(?:s|ing)? for|"
    r"against|likely|risk(?:s|ing)?|no|not|isinstance|class|def|import|assertRaises|pytest\.raises)\W{0,3}"
    r"(?:(?:you|we|it|the|an?|any|this|run|runs|running|const|get|see|hit|encounter|getting|of|possible"
    r"|potential|torch\.(?:cuda\.)?)\W{0,2}){0,4}$",
    re.IGNORECASE,
)


def is_supposed(before: str) -> bool:
    """Whether the words in front of a message show that it is only mentioned."""
    return _SUPPOSED.search(before) is not None


# --- sizes ----------------------------------------------------------------------------------------

_SIZE_PARTS = re.compile(r"([\d,]+(?:\.\d*)?)([A-Za-z]*)")
_SHIFTS = {"k": 10, "m": 20, "g": 30, "t": 40, "p": 50}
_WRAPPED = 1 << 60
"""Larger than any memory: an unsigned number that went below zero."""


def parse_size(text: str) -> int | None:
    """The bytes of a printed size, rounded half up; None if it is not a size.

    GB is 2**30, as GiB is: the programs that print it mean that.
    """
    parts = _SIZE_PARTS.match(text)
    if parts is None:
        return None
    whole, _, decimals = parts[1].replace(",", "").partition(".")
    if not whole or len(whole) > 24:
        return None
    decimals = decimals[:9]
    shift = _SHIFTS.get(parts[2][:1].lower(), 0)
    # In integers: a float would round 17179869184.00 GiB.
    scale = 10 ** len(decimals)
    size = (2 * (int(whole) * scale + int(decimals or 0)) * (1 << shift) + scale) // (2 * scale)
    return None if size >= _WRAPPED else size
