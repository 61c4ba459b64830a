"""The tables of patterns: which ones `compiled` refuses, and that the cost of each grows only with
the text's length."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memtop.supervisor.diagnosis import allocator, kills, phase, text
from memtop.supervisor.diagnosis.diagnose import diagnose
from memtop.supervisor.diagnosis.finding import Pattern, compiled
from memtop.supervisor.diagnosis.log import PATTERNS
from memtop.supervisor.diagnosis.values import Evidence, Kind

# The parser of regular expressions has no public name.
_parser: Any = importlib.import_module("re._parser" if hasattr(re, "_parser") else "sre_parse")

# Searched in the text of all lines without white space, which can be a megabyte without a break.
OF_A_VIEW = [
    *(pattern.regex for pattern in PATTERNS),
    *(value for value in vars(allocator).values() if isinstance(value, re.Pattern)),
    kills.VICTIM,
]
# Tried at every position of a line.
SEARCHED = [text.RIGHT_BORDER, text.BAR, text.COLOUR, *(pattern for _, pattern in phase.RULES)]


# --- what the compiled form means -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("exit code = -9", "exitcode=-9", "exit code = -9"),
        ("(?:exitcode:?|code =) -7", "code=-7", "-7"),
        (r"line \d+: \w*x", "line12:abcx", "line:abcx"),
        ("allocate (SIZE)", "allocate1.5GiB", "allocate"),
    ],
)
def test_a_pattern_is_compiled_without_its_spaces(pattern: str, matching: str, other: str) -> None:
    assert compiled(pattern).fullmatch(matching)
    assert not compiled(pattern).search(other)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?:exitcode:?|return code =) ?-7", "repeats a space"),
        ("Timed? ?out", "repeats a space"),
        ("a {0,3}b", "repeats a space"),
        ("out[- ]of[- ]memory", "names white space"),
        (r"x[^\s]y", "names white space"),
        (r"gloo/\S{0,80}? failed", "no meaning"),
        (r"Error\b", "no meaning"),
        ("^Killed", "no meaning"),
        ("Killed$", "no meaning"),
        ("a\\ b", "no meaning"),
        ("ab*c", "no upper bound"),
        ("(?:ab)+", "no upper bound"),
        (r"[\d,]{1,}", "no upper bound"),
    ],
)
def test_a_pattern_that_would_mean_something_else_without_spaces_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        compiled(pattern)


def test_numbers_and_names_get_an_upper_bound() -> None:
    assert compiled(r"line \d+: \w*x").pattern == r"line\d{1,20}:\w{0,80}x"


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Llama-6B", "gpt-15b", "model-11b", "checkpoint-9"])
def test_a_model_name_is_not_a_signal(name: str) -> None:
    """A bare -7 once matched as exit code -7, because a repeated space lost its space."""
    found = diagnose([f"loading org/{name}-Instruct\nKilled\n".encode()], Evidence(exit_status=137))
    assert (found.kind, found.reason) == (Kind.HOST_OOM_KILLED, None)


@pytest.mark.parametrize(
    ("line", "kind", "reason"),
    [
        ("The replica workerpool0-0 ran out of memory and exited with a non-zero status of 9", "host_oom_killed", None),
        ("The replica workerpool0-0 ran out-of-memory and exited", "host_oom_killed", None),
        ("Some of your processes may have been killed by the cgroup out of memory handler.", "host_oom_killed", None),
        ("Some of your processes were killed by the cgroup out-of-memory handler.", "host_oom_killed", None),
        ("job 3: loss is inf stopping training", "not_memory", "loss_nan"),
        ("loss is informative", "not_memory", "no_evidence"),
        ("requests.exceptions.ReadTimeout\nretrying later", "not_memory", "network"),
        ("class HTTPErrorHandler registered", "not_memory", "no_evidence"),
        ("slurmstepd: Detected 0 oom_kill events in StepId=7.0", "not_memory", "no_evidence"),
        ("progress 3 exceeded limit 2 of the member", "not_memory", "no_evidence"),
        ("team member exceeded limit of uploads", "not_memory", "no_evidence"),
        ("mem 67108932kb exceeded limit 67108864kb", "host_oom_killed", None),
    ],
)
def test_words_with_hyphens_or_at_the_end_of_a_line_are_found(line: str, kind: str, reason: str | None) -> None:
    found = diagnose([f"{line}\n".encode()], Evidence(exit_status=1))
    assert (found.kind.value, found.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("pattern", "needles"),
    [
        ("allocate (SIZE) on a device", ("onadevice",)),
        (r"os error \(12\)|ab?cdefg", ("oserror(12)", "cdefg")),
        ("(?i:oom) kill(?:ed)?|(?:one|two)", ()),
        ("(?=before)exit code:? [0-9]", ("exitcode",)),
        ("key|lock", ()),
    ],
)
def test_needles_are_the_longest_plain_part_of_each_alternative(pattern: str, needles: tuple[str, ...]) -> None:
    assert Pattern(pattern, Kind.GPU_OOM).needles == needles


@pytest.mark.parametrize(
    "pattern", [pattern for pattern in PATTERNS if pattern.needles], ids=lambda pattern: pattern.pattern[:40]
)
def test_every_text_that_matches_holds_a_needle(pattern: Pattern) -> None:
    @settings(max_examples=5, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.from_regex(pattern.regex))
    def holds(text: str) -> None:
        assert any(needle in text for needle in pattern.needles)

    holds()


def test_no_alternative_of_a_pattern_is_so_short_that_it_matches_anywhere() -> None:
    shortest = {pattern.pattern: _parser.parse(pattern.regex.pattern).getwidth()[0] for pattern in PATTERNS}
    assert {pattern: width for pattern, width in shortest.items() if width < 6} == {}


# --- what a pattern costs -------------------------------------------------------------------------


def endless(tree: Any) -> Iterator[Any]:
    """The repeats of a parsed pattern that have no upper bound."""
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


def test_patterns_over_a_text_without_breaks_have_no_endless_repeat() -> None:
    assert [pattern.pattern for pattern in OF_A_VIEW if endless_in(pattern.pattern)] == []


@pytest.mark.parametrize("pattern", SEARCHED, ids=lambda pattern: pattern.pattern[:40])
def test_searched_patterns_do_not_begin_with_an_endless_repeat(pattern: re.Pattern[str]) -> None:
    """Otherwise a run of the repeated character would be scanned again from each of its
    positions."""
    operation, about = _parser.parse(pattern.pattern)[0]
    assert not ("REPEAT" in str(operation) and about[1] is _parser.MAXREPEAT)


@pytest.mark.parametrize("unit", ["1", " ", "│ ", "pid: ", "Aa.", "[1", "step 1 "])
def test_a_megabyte_on_one_line_is_read(unit: str) -> None:
    """Time that grows with the square of the length would be hours."""
    line = "line" + unit * (1_000_000 // len(unit))
    assert diagnose([f"{line} Killed by X\nValueError: x\n".encode()]).reason == "python_error"
