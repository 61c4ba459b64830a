"""Edits of a running program: the edit that was requested, the warnings before it, and what a
restart with the same edit would do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memtop.presets.schema import Settings, with_splits
from memtop.supervisor.recovery.configuration import edited, live_values
from memtop.supervisor.run.explain import settings_text
from memtop.supervisor.run.reports import SettingsChanged
from memtop.supervisor.wire import Change
from memtop.train.channel import edit_live
from tests.tui.support import SETTINGS


def taken_up(before: Settings, change: Change) -> Settings:
    """What the trainer makes of what the supervisor sends it."""
    after = edited(before, change, None)
    return edit_live(before, msgspec.json.decode(msgspec.json.encode(live_values(before, after))))


@pytest.mark.parametrize(
    ("present", "asked", "expected"),
    [
        ((4, 4), {"batch": 4, "accumulation": 8}, (4, 8)),
        ((2, 8), {"accumulation": 4}, (2, 4)),
        ((8, 2), {"batch": 3}, (3, 2)),
        ((8, 2), {"batch": 4, "accumulation": 2}, (4, 2)),
        ((8, 2), {"batch": 4, "accumulation": 4}, (4, 4)),
    ],
)
def test_what_was_given_is_what_comes(present: tuple[int, int], asked: dict[str, Any], expected: tuple[int, int]) -> None:
    before = replace(SETTINGS, batch=present[0], accumulation=present[1])
    after = taken_up(before, Change(assignments={name: str(value) for name, value in asked.items()}))
    assert (after.batch, after.accumulation) == expected


@given(
    st.integers(1, 16),
    st.integers(1, 16),
    st.none() | st.integers(1, 16),
    st.none() | st.integers(1, 16),
    st.booleans(),
)
def test_it_is_what_a_restart_would_make(b: int, a: int, batch: int | None, accumulation: int | None, workers: bool) -> None:
    before = replace(SETTINGS, batch=b, accumulation=a)
    given = {"batch": batch, "accumulation": accumulation, "workers": 2 if workers else None}
    change = Change(assignments={name: str(value) for name, value in given.items() if value is not None})
    after = edited(before, change, None)
    if after != before:
        assert taken_up(before, change) == after


def test_the_requested_split_is_applied_even_if_the_program_has_changed_its_own() -> None:
    """It may have halved its micro-batch after an allocation failure that was not reported yet."""
    before = replace(SETTINGS, batch=8, accumulation=2)
    values = live_values(before, edited(before, Change(assignments={"accumulation": "4"}), None))
    after = edit_live(replace(before, batch=4, accumulation=4), values)
    assert (after.batch, after.accumulation) == (8, 4)


TWO = replace(SETTINGS, batch=8, accumulation=4, world_size=2)
UNEVEN = with_splits(TWO, [(12, 4), (4, 4)])
SHRUNK = with_splits(TWO, [(8, 4), (2, 16)])


@pytest.mark.parametrize("before", [TWO, UNEVEN, SHRUNK])
@pytest.mark.parametrize(
    ("assignments", "splits"),
    [
        ({"batch": "12,4", "accumulation": "4"}, ((12, 4), (4, 4))),
        ({"batch": "8x4,2x16"}, ((8, 4), (2, 16))),
        ({"batch": "4", "accumulation": "8"}, ((4, 8), (4, 8))),
        ({"workers": "2"}, None),
    ],
)
def test_splits_of_single_processes_change_live(
    before: Settings, assignments: dict[str, str], splits: tuple[tuple[int, int], ...] | None
) -> None:
    change = Change(assignments=assignments)
    after = edited(before, change, None)
    assert after is not None
    assert after.splits == (splits or before.splits)
    if after != before:
        assert taken_up(before, change) == after
        for other in (TWO, UNEVEN, SHRUNK):
            # The program may have changed its split since it last reported one.
            if splits is not None and live_values(before, after).keys() >= {"batch"}:
                sent = msgspec.json.decode(msgspec.json.encode(live_values(before, after)))
                assert edit_live(other, sent).splits == splits


def test_a_process_that_shrinks_alone_is_told_as_a_change_of_the_split() -> None:
    report = SettingsChanged(update=3, changes={}, reason="allocation failure")
    text = settings_text(TWO, SHRUNK, report)
    assert text == "allocation failure at update 3: split 8 x 4 x 2 -> 8 x 4 + 2 x 16"
    assert settings_text(SHRUNK, TWO, report).endswith("split 8 x 4 + 2 x 16 -> 8 x 4 x 2")
