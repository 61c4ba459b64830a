"""The decision after a failure: the restarts end, nothing that failed is repeated, and a run
becomes smaller only for lack of memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.policy import Candidate, Decision, Tried, decide
from memtop.supervisor.recovery.values import Remedy

OOM = Diagnosis(kind=Kind.GPU_OOM, confidence=0.97, summary="out of memory")


def remedy(name: str, *, consent: bool = False, math: bool = True, resumable: str = "resumes") -> Remedy:
    return Remedy(id=name, title=name, keeps_math=math, resumable=resumable, needs_consent=consent)  # type: ignore[arg-type]


def candidate(name: str, key: str | None = None, **how: bool | str) -> Candidate:
    return Candidate(remedy=remedy(name, **how), key=key or name)  # type: ignore[arg-type]


def died(key: str, **more: int | bool) -> Tried:
    return Tried(key=key, died_of_memory=True, **more)  # type: ignore[arg-type]


def test_the_first_remedy_that_may_be_is_applied() -> None:
    ladder = [candidate("shorter", consent=True), candidate("other", math=False), candidate("half"), candidate("quarter")]
    found = decide(OOM, [died("whole")], ladder, "auto")
    assert (found.action, found.remedy) == ("restart", ladder[2].remedy)


@pytest.mark.parametrize("resumable", ["none", "new run", "converts"])
def test_remedies_that_lose_something_or_need_a_person_are_not_automatic(resumable: str) -> None:
    assert decide(OOM, [died("whole")], [candidate("a", resumable=resumable)], "auto").action == "ask"


def test_a_configuration_that_failed_is_passed_over() -> None:
    found = decide(OOM, [died("half"), died("whole")], [candidate("half"), candidate("checkpointing")], "auto")
    assert found.remedy is not None
    assert found.remedy.id == "checkpointing"
    gone = decide(OOM, [died("half"), died("whole")], [candidate("half")], "auto")
    assert (gone.action, gone.why) == ("ask", "every configuration that the remedies lead to has failed before")


def test_two_restarts_without_a_newer_saved_update_end_in_a_question() -> None:
    first = died("whole", saved_before=0, saved_after=10)
    second = died("half", by_memtop=True, saved_before=10, saved_after=10)
    third = died("quarter", by_memtop=True, saved_before=10, saved_after=10)
    assert decide(OOM, [first, second], [candidate("quarter")], "auto").action == "restart"
    asked = decide(OOM, [first, second, third], [candidate("eighth")], "auto")
    assert (asked.action, asked.why) == ("ask", "2 restarts in a row brought no newer saved update")
    moved_on = died("quarter", by_memtop=True, saved_before=10, saved_after=20)
    assert decide(OOM, [first, second, moved_on], [candidate("eighth")], "auto").action == "restart"


def test_a_change_in_the_running_program_counts_as_no_restart() -> None:
    saved = {"saved_before": 10, "saved_after": 10}
    restarted = died("half", attempt=2, by_memtop=True, **saved)
    smaller = died("quarter", attempt=2, by_memtop=True, **saved)
    assert decide(OOM, [died("whole", attempt=1), restarted, smaller], [candidate("eighth")], "auto").action == "restart"
    # Nor is it what a person asked for, who would begin the counting anew.
    again = died("eighth", attempt=3, by_memtop=True, **saved)
    assert decide(OOM, [restarted, smaller, again], [candidate("sixteenth")], "auto").action == "ask"
    moved_on = died("eighth", attempt=3, by_memtop=True, saved_before=10, saved_after=12)
    assert decide(OOM, [restarted, smaller, moved_on], [candidate("sixteenth")], "auto").action == "restart"


@pytest.mark.parametrize("on_oom", ["ask", "stop"])
def test_nothing_is_done_by_itself_where_that_was_not_wanted(on_oom: str) -> None:
    assert decide(OOM, [died("whole")], [candidate("half")], on_oom).action == on_oom


def test_a_full_disk_waits_for_room_and_changes_nothing() -> None:
    full = Diagnosis(kind=Kind.DISK_FULL, confidence=0.9, summary="full")
    found = decide(full, [Tried(key="whole")], [candidate("fewer states")], "auto")
    assert (found.action, found.remedy) == ("wait", None)


ENDS = st.builds(
    Diagnosis,
    kind=st.sampled_from(Kind),
    confidence=st.floats(0, 1),
    summary=st.just("s"),
)
PAST = st.lists(
    st.builds(
        Tried,
        key=st.sampled_from("abcdef"),
        died_of_memory=st.booleans(),
        attempt=st.none() | st.integers(1, 3),
        by_memtop=st.booleans(),
        saved_before=st.none() | st.integers(0, 5),
        saved_after=st.none() | st.integers(0, 5),
    ),
    max_size=6,
)
LADDER = st.lists(
    st.builds(
        Candidate,
        remedy=st.builds(
            Remedy,
            id=st.just("r"),
            title=st.just("t"),
            keeps_math=st.booleans(),
            resumable=st.sampled_from(["none", "live", "resumes", "converts", "new run"]),
            needs_consent=st.booleans(),
        ),
        key=st.none() | st.sampled_from("abcdefgh"),
    ),
    max_size=8,
)
MODES = st.sampled_from(["auto", "ask", "stop"])


@given(ENDS, PAST, LADDER, MODES)
def test_whatever_happened_the_rules_hold(end: Diagnosis, past: list[Tried], ladder: list[Candidate], on_oom: str) -> None:
    found: Decision = decide(end, past, ladder, on_oom)
    assert found.why
    if not end.of_memory or end.confidence < 0.5:
        assert found.action == "stop"
    if found.action == "restart":
        assert on_oom == "auto"
        assert found.remedy is not None
        assert found.remedy.keeps_math
        assert not found.remedy.needs_consent
        (taken,) = {one.key for one in ladder if one.remedy is found.remedy}
        assert taken not in {one.key for one in past if one.died_of_memory}
    else:
        assert found.remedy is None


@given(LADDER, st.lists(st.booleans(), min_size=60, max_size=60))
def test_it_always_ends(ladder: list[Candidate], progress: list[bool]) -> None:
    """Every restart dies again; some of them have saved a newer update before."""
    past, saved, key, by_memtop = [], 0, "start", False
    for moved in progress:
        before, saved = saved, saved + moved
        past.append(died(key, by_memtop=by_memtop, saved_before=before, saved_after=saved))
        found = decide(OOM, past, ladder, "auto")
        if found.action != "restart":
            return
        (key,) = {str(one.key) for one in ladder if one.remedy is found.remedy}
        assert key not in {one.key for one in past}
        by_memtop = True
    raise AssertionError("it went on for ever")
