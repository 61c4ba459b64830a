"""Bars on a fixed scale, charts with labelled lines, and text that is fitted into a width."""

from __future__ import annotations

from typing import Any

import pytest

from memtop.tui.charts import Point, Share, curve, history, memory_bar, nice_bounds, progress_bar
from memtop.tui.line import fit, join_fitting, line, plain, spread, wrap
from memtop.tui.words import age
from tests.tui.support import text_of


@pytest.mark.parametrize(
    ("width", "shares", "options", "text"),
    [
        pytest.param(20, [(0.5, "█")], {}, "██████████       ┊┊ ", id="lines-at-85-and-90-in-the-free-part"),
        pytest.param(
            10, [(0.14, "█"), (0.14, "▓"), (0.12, "░")], {"limits": False}, "█▓▓░      ", id="the-sum-is-rounded-once"
        ),
        pytest.param(8, [(0.9, "█"), (0.9, "░")], {}, "███████░", id="never-wider-than-its-width"),
        pytest.param(10, [(0.2, "█")], {"peak": 0.55, "limits": False}, "██   ┆    ", id="peak-mark-beyond-the-filled-part"),
    ],
)
def test_a_bar(width: int, shares: list[tuple[float, str]], options: dict[str, Any], text: str) -> None:
    assert plain(memory_bar(width, [Share(part, glyph, "alloc") for part, glyph in shares], **options)) == text


@pytest.mark.parametrize(("fraction", "text"), [(None, "────"), (0.0, "────"), (0.5, "━━──"), (0.6, "━━╸─"), (1.0, "━━━━")])
def test_progress(fraction: float | None, text: str) -> None:
    assert plain(progress_bar(4, fraction)) == text


def test_history_draws_both_band_lines_and_the_newest_value_at_the_right() -> None:
    rows = [plain(one) for one in history(28, 5, [None, 0.5, 1.0])]
    assert "85-90 %" in rows[0]
    assert rows[-1].rstrip().endswith("0 %")
    assert rows[0][19] == "⢸"
    assert rows[0][:18] == "┄" * 18


def test_a_curve_has_labelled_axes_and_marks_the_new_attempt() -> None:
    rows = text_of(curve(50, 8, [Point(n, 4 - n / 20, 1 if n < 30 else 2) for n in range(1, 61)]))
    assert "4.00" in rows
    assert "update 1" in rows
    assert "60" in rows
    assert "┊ a new attempt" in rows


def test_a_curve_without_values_says_so() -> None:
    assert "no loss reported yet" in text_of(curve(50, 8, []))
    assert "no loss reported yet" in text_of(curve(50, 8, [Point(1, float("nan"))]))


def test_curve_bounds_are_round_and_hold_the_values() -> None:
    assert nice_bounds(1.3, 3.9) == (1.0, 4.0)
    low, high = nice_bounds(2.0, 2.0)
    assert low <= 2.0 <= high
    assert low < high


def test_fit_and_spread_count_cells() -> None:
    assert plain(fit(line("abcdef"), 4)) == "abc…"
    assert plain(spread(line("ab"), line("yz"), 8)) == "ab    yz"
    assert plain(spread(line("abcdef"), line("yz"), 7)) == "abcdef "


def test_parts_that_do_not_fit_are_left_out_whole() -> None:
    assert plain(join_fitting([line("alloc 1"), line("cache 2"), line("context 3")], 18)) == "alloc 1  cache 2"


def test_wrap_breaks_at_words_and_breaks_words_too_long() -> None:
    assert [plain(one) for one in wrap("one two three", 7)] == ["one two", "three"]
    assert [plain(one) for one in wrap("abcdefghij", 4)] == ["abcd", "efgh", "ij"]


@pytest.mark.parametrize(("seconds", "words"), [(12, "12 s"), (240, "4 min"), (9_400, "3 h"), (900_000, "10 days")])
def test_ages(seconds: float, words: str) -> None:
    assert age(seconds) == words
