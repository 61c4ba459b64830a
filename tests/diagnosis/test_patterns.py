"""No log costs more than its length: patterns repeat nothing without an end where a text can be one word from end to end."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from memtop.supervisor.diagnosis import allocator, cleaning, ending_words, phase
from memtop.supervisor.diagnosis.engine import diagnose
from memtop.supervisor.diagnosis.finding import bounded
from memtop.supervisor.diagnosis.reading import SHAPES

# Public only since Python 3.11, and not under a name of its own.
_parser: Any = importlib.import_module("re._parser" if hasattr(re, "_parser") else "sre_parse")

# Of the text of all lines, white space taken out: a megabyte without a break.
OF_A_VIEW = [
    *(shape.pattern for shape in SHAPES),
    *(value for value in vars(allocator).values() if isinstance(value, re.Pattern)),
    ending_words._VICTIM,
]
# Looked for at every place of a line.
SEARCHED = [cleaning._RIGHT_BORDER, cleaning._BAR, cleaning._COLOUR, *(pattern for _, pattern in phase._RULES)]


def endless(tree: Any) -> Iterator[Any]:
    """The repeats of a parsed pattern that have no end."""
    for operation, about in tree:
        parts: list[Any] = []
        if "REPEAT" in str(operation):
            if about[1] is _parser.MAXREPEAT:
                yield about
            parts = [about[2]]
        elif str(operation) in ("SUBPATTERN", "ATOMIC_GROUP", "ASSERT", "ASSERT_NOT"):
            parts = [about[-1] if isinstance(about, tuple) else about]
        elif str(operation) == "BRANCH":
            parts = about[1]
        for part in parts:
            yield from endless(part)


def endless_in(pattern: str) -> int:
    return len(list(endless(_parser.parse(pattern))))


def test_the_check_itself_sees_an_endless_repeat() -> None:
    for pattern in (r"a+", r"(?:x|(?P<n>\d*))", r"(?=\w+?b)", r"(?i:[ab]{3,})"):
        assert endless_in(pattern) == 1
    assert endless_in(r"a{1,9}(?:b{0,300}?|c)?") == 0


@pytest.mark.parametrize("pattern", OF_A_VIEW, ids=lambda pattern: pattern.pattern[:40])
def test_what_reads_a_text_without_breaks_repeats_nothing_endlessly(pattern: re.Pattern[str]) -> None:
    assert endless_in(pattern.pattern) == 0


@pytest.mark.parametrize("pattern", SEARCHED, ids=lambda pattern: pattern.pattern[:40])
def test_what_is_searched_for_does_not_begin_with_an_endless_repeat(pattern: re.Pattern[str]) -> None:
    """Else a run of what it repeats is walked through from each of its places."""
    operation, about = _parser.parse(pattern.pattern)[0]
    assert not ("REPEAT" in str(operation) and about[1] is _parser.MAXREPEAT)


def test_numbers_and_names_have_an_end() -> None:
    assert bounded(r"line\d+:\w*x") == r"line\d{1,20}:\w{0,80}x"


@pytest.mark.parametrize("unit", ["1", " ", "│ ", "pid: ", "Aa.", "[1", "step 1 "])
def test_a_megabyte_on_one_line_is_read(unit: str) -> None:
    """With the square of its length this would take hours."""
    line = "line" + unit * (1_000_000 // len(unit))
    assert diagnose([f"{line} Killed by nobody\nValueError: x\n".encode()]).reason == "python_error"
