"""Bars on a fixed scale, charts with labelled lines, and text that is fitted into a width."""

from __future__ import annotations

from typing import Any

import pytest

from memtop.supervisor.monitor.values import Band
from memtop.tui.bars import Share, memory_bar, progress_bar
from memtop.tui.charts import Point, curve, curve_spark, history, memory_bounds, nice_bounds, spark
from memtop.tui.dashboard.events import draw_events
from memtop.tui.dashboard.training import draw_loss
from memtop.tui.line import fit, join_fitting, line, plain, spread, wrap
from memtop.tui.store import READING, ConnectionState, Store
from memtop.tui.words import age
from tests.tui.support import run_state, text_of


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


def test_memory_is_a_line_on_the_part_of_the_scale_that_it_needs() -> None:
    rows = [plain(one) for one in history(30, 6, [(None, Band.UNKNOWN), (0.5, Band.SAFE), (0.99, Band.DANGER)])]
    assert [row[21:].strip() for row in rows] == ["100 %", "85-90 %", "", "", "", "50 %"]
    assert rows[1][:19] == "┄" * 19
    # The newest value stands at the right, and is joined with the one before.
    assert [row[20] for row in rows] == ["⢸", "⢸", "⢸", "⢸", "⢸", "⣸"]
    assert history(30, 6, [(None, Band.UNKNOWN)]) == []


def test_an_unknown_value_interrupts_the_memory() -> None:
    values = [(share, Band.SAFE) for share in (0.4, 0.4, None, None, 0.4, 0.4)]
    assert plain(history(30, 3, values)[0])[18:21] == "⠉ ⠉"


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        pytest.param((0.31, 0.33), (0.25, 0.35), id="steps-of-5"),
        pytest.param((0.3, 0.3), (0.2, 0.3), id="at-least-10"),
        pytest.param((0.0, 0.0), (0.0, 0.1), id="nothing"),
        pytest.param((0.83, 0.85), (0.8, 1.0), id="near-the-limits-up-to-all"),
        pytest.param((1.0, 1.0), (0.9, 1.0), id="full"),
    ],
)
def test_the_scale_of_the_memory(values: tuple[float, float], ends: tuple[float, float]) -> None:
    assert memory_bounds(*values) == pytest.approx(ends)


def test_the_colour_of_the_memory_is_the_band_in_force_not_the_value() -> None:
    values = [(0.849 if n % 2 else 0.851, Band.SAFE if n < 20 else Band.EDGE) for n in range(42)]
    roles = {role for one in history(30, 4, values) for text, role in one if text.strip("┄ ") and role.startswith("hist")}
    assert roles == {"hist", "histedge"}
    (steady,) = {role for one in history(30, 4, values[:20]) for _, role in one if role.startswith("hist")}
    assert steady == "hist"


def test_a_sparkline_has_the_newest_values_and_gaps() -> None:
    assert spark([9.0, 0.0, None, 0.5, 1.0], 4, (0.0, 1.0)) == "▁ ▅█"
    assert spark([1.0], 2, (0.0, 1.0)) == "", "no room"
    points = [Point(n, 4 - n / 100) for n in range(300)]
    assert curve_spark(points, 10) == "█▇▆▆▅▄▃▃▂▁"
    assert curve_spark(points[:3], 10) == ""


def test_a_curve_has_labelled_axes_and_marks_the_new_attempt() -> None:
    rows = text_of(curve(50, 8, [Point(n, 4 - n / 20, 1 if n < 30 else 2) for n in range(1, 61)]))
    assert "4.00" in rows
    assert "update 1" in rows
    assert "60" in rows
    assert "┊ a new attempt" in rows


def test_a_curve_without_values_says_so() -> None:
    assert "no loss reported yet" in text_of(curve(50, 8, []))
    assert "no loss reported yet" in text_of(curve(50, 8, [Point(1, float("nan"))]))


@pytest.mark.parametrize(("link", "words"), [(ConnectionState.WAITING, READING), (ConnectionState.CONNECTED, None)])
def test_what_is_still_being_read_is_not_called_empty(link: ConnectionState, words: str | None) -> None:
    store = Store(run=run_state(), link=link)
    assert (words or "no loss reported yet") in text_of(draw_loss(store, 80, 8))
    assert (words or "nothing yet") in text_of(draw_events(store, 80, 8))


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
