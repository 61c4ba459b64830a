"""The history screen: curves with a zoom and a cursor, from the last hour in memory and, for a run,
its ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp

from memtop.supervisor import units
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.monitor.history import HOST, KEPT_SECONDS, Bucket, label_of, resample
from memtop.supervisor.monitor.values import DANGER_ABOVE, EDGE_FROM, Band, band_of
from memtop.supervisor.wire import Event
from memtop.tui.charts import merged, nice_bounds
from memtop.tui.line import MUTED, Line, fact, fit, join, join_fitting, line, spread
from memtop.tui.panel import LinePanel
from memtop.tui.screen import Dashboard, FullScreen
from memtop.tui.store import Store

_ZOOMS = ((300.0, "last 5 min"), (KEPT_SECONDS, "last hour"), (86_400.0, "last 24 h"), (0.0, "whole run"))
# Key: (words, series, unit, of the host).
_CHOICES = {
    "v": ("VRAM", "used_fraction", "memory", False),
    "m": ("RAM", "used_fraction", "memory", True),
    "s": ("swap", "swap_used_bytes", "bytes", True),
    "u": ("use", "utilization_fraction", "fraction", False),
    "w": ("power", "power_watts", "watts", False),
    "r": ("run RSS", "run_rss_bytes", "bytes", True),
}
# With several GPUs these also have a curve of the mean of all GPUs.
_TOGETHER = "vu"
_REREAD_SECONDS = 10.0
# The newest value is drawn from its own time on, so the axis ends a little later.
_NEWEST_STANDS = 1.0
_Series = dict[str, dict[str, list[Bucket]]]


def _tips() -> list[tuple[str, tuple[str, str, str, bool], str]]:
    return [(key, choice, f"Show or hide {choice[0]}") for key, choice in _CHOICES.items()]


class HistoryScreen(FullScreen):
    """Draws the dashboard's history of the last hour, and the run's ledger, which it reads in a
    thread.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("h,H,q", "leave", "Close", show=False),
        Binding("plus,equals_sign", "zoom(-1)", "Zoom", key_display="+ -", tooltip="5 minutes, an hour, a day, the whole run"),
        Binding("minus,underscore", "zoom(1)", "Further", show=False),
        Binding("left", "move(-1)", "Cursor", key_display="← →", tooltip="Reads values off; or click; PgUp and PgDn leap"),
        Binding("right", "move(1)", "On", show=False),
        Binding("shift+left,pageup", "move(-10)", "Back", show=False),
        Binding("shift+right,pagedown", "move(10)", "On", show=False),
        Binding("home", "move(-100000)", "To the beginning", show=False),
        Binding("end", "newest", "Newest", key_display="End", tooltip="The cursor off: the newest values; Home: the oldest"),
        Binding("down", "scroll_curves(1)", "Next curve", key_display="↑ ↓", tooltip="Curves that do not fit; or the wheel"),
        Binding("up", "scroll_curves(-1)", "Curve before", show=False),
        *(Binding(key, f"choose('{key}')", words, tooltip=tip) for key, (words, *_), tip in _tips()),
    ]

    def __init__(self, dashboard: Dashboard) -> None:
        super().__init__(dashboard)
        self._chosen = {"v", "m"}
        start, end = dashboard.history.start, dashboard.history.end
        # With only a few minutes of data, an hour would be nearly empty.
        self._zoom = 0 if start is None or end is None or end - start <= _ZOOMS[0][0] else 1
        self._cursor: float | None = None
        self._first = 0
        self._stored: _Series = {}
        self._sources: dict[str, int | None] = {}
        self._extent: tuple[float, float] | None = None
        self._problem = ""
        self._reading = False

    def compose(self) -> ComposeResult:
        yield LinePanel(self._draw, title=self._panel_title, id="history", classes="panel")

    def on_mount(self) -> None:
        self.set_interval(1.0, self._show_when_possible)
        self.set_interval(_REREAD_SECONDS, self._read)
        self._show()
        self._read()

    def _show_when_possible(self) -> None:
        if not self.dashboard.pace.wait():
            self._show()

    def _show(self) -> None:
        self.query_one("#history", LinePanel).show(self.dashboard.store)

    # --- what there is ----------------------------------------------------------------------------

    @property
    def _folder(self) -> Path | None:
        run = self.dashboard.store.run
        # A recorded run has no folder.
        return None if run is None or not Path(run.folder).is_dir() else Path(run.folder)

    def _span(self) -> tuple[float, float] | None:
        """The start and end of the shown time, seconds since the epoch; None without any data."""
        ring, seconds = self.dashboard.history, _ZOOMS[self._zoom][0]
        run = self.dashboard.store.run
        newest = [moment for moment in (ring.end, self._extent and self._extent[1]) if moment is not None]
        if not newest:
            return None
        if seconds:
            end = (ring.end if ring.end is not None else newest[-1]) + _NEWEST_STANDS
            return end - seconds, end
        starts = [moment for moment in (ring.start, self._extent and self._extent[0]) if moment is not None]
        # For a run that is over, the axis ends with its ledger.
        over = run is not None and run.state.final and self._extent is not None
        start, end = self._extent if over and self._extent else (min(starts), max(newest))
        return start, max(end + _NEWEST_STANDS, start + 10)

    @work(group="history", exclusive=True)
    async def _read(self) -> None:
        folder = self._folder
        if folder is None or self._reading:
            return
        self._reading = True
        try:
            self._extent, self._sources, self._stored = await asyncio.to_thread(_stored, folder, self._zoom, self._span())
            self._problem = ""
        except (MemtopError, OSError) as error:
            self._problem = str(error)
        finally:
            self._reading = False
        self._show_when_possible()

    def _buckets(self, key: str, name: str) -> list[Bucket]:
        """The ledger's values up to the start of the last hour, then the values in memory."""
        live = self.dashboard.history.buckets(key, name)
        begins = live[0].time if live else float("inf")
        old = [bucket for bucket in self._stored.get(key, {}).get(name, ()) if bucket.time + bucket.seconds <= begins]
        return old + live

    def curves(self) -> list[Curve]:
        """The chosen curves: GPUs in their order, then the host."""
        ring = self.dashboard.history
        sources = {**self._sources, **{key: ring.gpu_index(key) for key in ring.keys}}
        gpus = sorted((key for key in sources if key != HOST), key=lambda key: sources[key] or 0)
        found = []
        for letter, (words, name, unit, of_host) in _CHOICES.items():
            if letter not in self._chosen:
                continue
            if of_host:
                found.append(Curve(words, unit, self._buckets(HOST, name)))
                continue
            each = [Curve(f"{words} {label_of(sources[key])}", unit, self._buckets(key, name)) for key in gpus]
            if len(each) > 1 and letter in _TOGETHER:
                # All values in one curve: the mean over time and cards, least and most of any card.
                every = [bucket for curve in each for bucket in curve.buckets]
                found.append(Curve(f"{words} of all {len(each)} GPUs, mean", unit, every))
            found += each
        return found

    # --- how it looks -----------------------------------------------------------------------------

    def _panel_title(self, store: Store) -> str:
        zoom = _ZOOMS[self._zoom][1]
        if self._folder is None:
            return f"History: {zoom}, since this dashboard started"
        return f"History of {store.run.name if store.run else ''}: {zoom}"

    def _draw(self, store: Store, width: int, height: int) -> list[Line]:
        span = self._span()
        if span is None:
            return [line(("there is no data yet", "muted"))]
        curves = self.curves()
        self._first = min(self._first, max(0, len(curves) - 1))
        view = HistoryView(*span, self._cursor, store.events)
        lines = draw(curves[self._first :], view, width, height - 1)
        return [*lines, *[()] * (height - 1 - len(lines)), self._keys(width)]

    def _keys(self, width: int) -> Line:
        if self._problem:
            return fit(line((self._problem, "bad")), width)
        parts = [
            line((f"{k} ", "accent"), (words, "strong" if k in self._chosen else "muted"))
            for k, (words, *_) in _CHOICES.items()
            if k != "r" or self.dashboard.store.run is not None
        ]
        hints = (("Esc", "back"), ("+ -", "zoom"), ("← →", "cursor"), ("?", "help"), ("End", "newest"))
        return join_fitting([*parts, *(line((f"{keys} ", "accent"), (words, "muted")) for keys, words in hints)], width)

    # --- keys -------------------------------------------------------------------------------------

    def action_zoom(self, step: int) -> None:
        # Without a ledger there is only the hour in memory.
        most = len(_ZOOMS) - 1 if self._folder is not None else 1
        self._zoom = min(most, max(0, self._zoom + step))
        self._cursor = None
        self._read()
        self._show()

    def action_move(self, step: int) -> None:
        span = self._span()
        if span is None:
            return
        start, end = span
        each = (end - start) / cells(self.query_one("#history", LinePanel).size.width)
        here = end - each / 2 if self._cursor is None else self._cursor
        self._cursor = min(end - each / 2, max(start + each / 2, here + step * each))
        self._show()

    def on_click(self, event: Click) -> None:
        panel, span = self.query_one("#history", LinePanel), self._span()
        inside = event.get_content_offset_capture(panel)
        count = cells(panel.size.width)
        if span is not None and 0 <= inside.x < count and 0 <= inside.y < panel.size.height - 1:
            start, end = span
            self._cursor = start + (inside.x + 0.5) * (end - start) / count
            self._show()

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        self.action_scroll_curves(1)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        self.action_scroll_curves(-1)

    def action_newest(self) -> None:
        self._cursor = None
        self._show()

    def action_scroll_curves(self, step: int) -> None:
        self._first = max(0, self._first + step)
        self._show()

    def action_choose(self, key: str) -> None:
        self._chosen ^= {key}
        self._show()


def _stored(
    folder: Path, zoom: int, span: tuple[float, float] | None
) -> tuple[tuple[float, float] | None, dict[str, int | None], _Series]:
    """Extent, sources and values of the ledger for the shown time. Runs in a thread."""
    from memtop.supervisor.run.record.folder import RunFolder
    from memtop.supervisor.run.record.ledger import reading_ledger

    with reading_ledger(RunFolder(folder)) as ledger:
        if ledger is None:
            return None, {}, {}
        extent, sources = ledger.extent(), ledger.sources()
        if extent is None:
            return None, sources, {}
        start, end = span or extent
        if not _ZOOMS[zoom][0]:
            start, end = min(start, extent[0]), max(end, extent[1])
        return extent, sources, {key: ledger.history(key, start, end) for key in sources}


LABEL_WIDTH = 9
SMALLEST = 4
"""Rows of one curve, including its title."""
_ROLES = {Band.SAFE: "hist", Band.EDGE: "histedge", Band.DANGER: "histdanger", Band.UNKNOWN: "unknown"}
_BITS = ((0x40, 0x80), (0x04, 0x20), (0x02, 0x10), (0x01, 0x08))
"""The dots of a braille cell: rows from the bottom, columns from the left."""
# The kinds of events that are marked.
_LIFE = ("attempt", "adopted", "checkpoint", "warning", "band", "finished", "stopped", "failed", "stop")
_MEMORY = ("oom", "survived", "remedy", "settings", "batch_search", "trend", "pressure", "trial")
MARKED = frozenset((*_LIFE, *_MEMORY))


@dataclass(frozen=True)
class Curve:
    """One series to be drawn."""

    title: str
    unit: str
    """fraction | memory (a fraction with the bands' lines) | bytes | watts"""
    buckets: Sequence[Bucket]


@dataclass(frozen=True)
class HistoryView:
    """The shown time, the cursor and the events."""

    start: float
    end: float
    cursor: float | None = None
    """None: at the newest value."""
    events: Sequence[Event] = ()


def cells(width: int) -> int:
    """The cells of a curve on a screen of this width."""
    return max(1, width - LABEL_WIDTH)


def draw(curves: Sequence[Curve], view: HistoryView, width: int, height: int) -> list[Line]:
    """As many curves as fit below each other, with event marks above and times below."""
    room = height - 3
    if not curves or room < SMALLEST or width < LABEL_WIDTH + 20:
        return [line(("no curve is chosen, or there is no room for one", MUTED))]
    shown = curves[: max(1, room // SMALLEST)]
    each = room // len(shown)
    lines = [_marks(view, width)]
    for curve in shown:
        lines += _curve(curve, view, width, each)
    hidden = len(curves) - len(shown)
    # Spare lines are left empty above the axis, so that the last lines keep their places.
    lines += [()] * (height - 2 - len(lines))
    return [*lines, _axis(view, width), _words(view, width, hidden)]


def value_words(unit: str, value: float) -> str:
    """One value as text."""
    if unit in ("fraction", "memory"):
        return units.percent(value)
    return f"{value:.0f} W" if unit == "watts" else units.size(value)


def reading(curve: Curve, view: HistoryView, width: int) -> Line:
    """The curve's value at the cursor."""
    count = cells(width)
    each = (view.end - view.start) / count
    start = view.start + _column(view, count) * each
    (bucket,) = resample(curve.buckets, start, start + each, 1)
    if bucket is None:
        return line(("not known", MUTED))
    mean, high = value_words(curve.unit, bucket.mean), value_words(curve.unit, bucket.high)
    if mean == high:
        return line((mean, "strong"))
    return join((fact("mean", mean), fact("least", value_words(curve.unit, bucket.low)), fact("most", high)))


def _column(view: HistoryView, count: int) -> int:
    if view.cursor is None:
        return count - 1
    return min(count - 1, max(0, int((view.cursor - view.start) / (view.end - view.start) * count)))


def _curve(curve: Curve, view: HistoryView, width: int, height: int) -> list[Line]:
    count = cells(width)
    known = resample(curve.buckets, view.start, view.end, count * 2)
    top = 1.0
    if curve.unit not in ("fraction", "memory"):
        top = nice_bounds(0.0, max((b.high for b in known if b is not None), default=1.0))[1]
    cursor = None if view.cursor is None else _column(view, count)
    lines = [spread(line((curve.title, "strong")), reading(curve, view, width), width)]
    rows = height - 1
    for row in reversed(range(rows)):
        limits = [m for m in (EDGE_FROM, DANGER_ABOVE) if curve.unit == "memory" and row / rows <= m < (row + 1) / rows]
        parts = [
            _cell(known[2 * n : 2 * n + 2], top, rows, row, curve.unit, limit=bool(limits), cursor=n == cursor)
            for n in range(count)
        ]
        lines.append((*merged(parts), *_label(curve.unit, top, rows, row, limits)))
    return lines


def _cell(
    pair: Sequence[Bucket | None], top: float, rows: int, row: int, unit: str, *, limit: bool, cursor: bool
) -> tuple[str, str]:
    bits = 0
    for column, bucket in enumerate(pair):
        if bucket is None:
            continue
        filled = round(bucket.mean / top * rows * 4) - row * 4
        peak = max(1, round(bucket.high / top * rows * 4)) - 1 - row * 4
        for dot in range(4):
            if dot < filled or dot == peak:
                bits |= _BITS[dot][column]
    if cursor:
        return (chr(0x2800 + bits) if bits else "│", "match")
    if not bits:
        return ("┄", "limit") if limit else (" ", MUTED)
    highest = max(bucket.high for bucket in pair if bucket is not None)
    return (chr(0x2800 + bits), _ROLES[band_of(highest)] if unit == "memory" else "curve")


def _label(unit: str, top: float, rows: int, row: int, limits: Sequence[float]) -> Line:
    text = ""
    if limits:
        text = "-".join(f"{m * 100:.0f}" for m in limits) + " %"
    elif row == rows - 1:
        text = value_words(unit, top)
    elif row == 0:
        text = "0"
    return line((f" {text:<{LABEL_WIDTH - 1}}", MUTED))


def _marks(view: HistoryView, width: int) -> Line:
    """Where events happened: ┊ an attempt begins, ▾ anything else."""
    count = cells(width)
    signs = [" "] * count
    for event in view.events:
        if event.kind in MARKED and view.start <= event.time < view.end:
            place = int((event.time - view.start) / (view.end - view.start) * count)
            signs[place] = "┊" if event.kind == "attempt" or signs[place] == "┊" else "▾"
    return fit(line(("".join(signs), "attempt")), width)


def _axis(view: HistoryView, width: int) -> Line:
    days = view.end - view.start > 86_400
    left, right = (_clock(moment, days=days) for moment in (view.start, view.end))
    middle = f"cursor {_clock(view.cursor, days=days)}" if view.cursor is not None else ""
    room = cells(width) - len(left) - len(right)
    return line((f"{left}{middle:^{max(0, room)}}{right}", MUTED))


def _clock(moment: float, *, days: bool) -> str:
    return time.strftime("%m-%d %H:%M" if days else "%H:%M:%S", time.localtime(moment))


def _words(view: HistoryView, width: int, hidden: int) -> Line:
    """The event nearest to the cursor, and the number of hidden curves."""
    parts: list[Line] = []
    if hidden:
        parts.append(line((f"{hidden} more below (down)", "accent")))
    near = [event for event in view.events if event.kind in MARKED and view.start <= event.time < view.end]
    if near:
        at = view.end if view.cursor is None else view.cursor
        event = min(near, key=lambda one: abs(one.time - at))
        parts.append(line((f"{_clock(event.time, days=False)} ", MUTED), event.message))
    return join_fitting(parts, width) or fit(join(parts), width)
