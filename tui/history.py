"""The past on the whole screen: curves with a zoom and a cursor, from the hour in memory and, for a run, its ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp

from memtop.supervisor.errors import MemtopError
from memtop.supervisor.monitor.history import HOST, KEPT_SECONDS, Bucket
from memtop.tui import history_curves as drawing
from memtop.tui.full import FullScreen
from memtop.tui.line import Line, fit, join_fitting, line
from memtop.tui.panel import LinePanel
from memtop.tui.store import Store

if TYPE_CHECKING:
    from memtop.tui.dashboard.screen import DashboardScreen

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
# What there is one curve more of where there are several GPUs: the mean over all.
_TOGETHER = "vu"
_REREAD_SECONDS = 10.0
# So that the newest value, which stands from its own moment on, is seen.
_NEWEST_STANDS = 1.0
_Series = dict[str, dict[str, list[Bucket]]]


def _tips() -> list[tuple[str, tuple[str, str, str, bool], str]]:
    return [(key, choice, f"Show or hide {choice[0]}") for key, choice in _CHOICES.items()]


class HistoryScreen(FullScreen):
    """Opened over the dashboard, whose ring it reads; the run's ledger is read in a thread."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,h,H,q", "leave", "Close", show=False),
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

    def __init__(self, dashboard: DashboardScreen) -> None:
        super().__init__()
        self._dashboard = dashboard
        self._chosen = {"v", "m"}
        start, end = dashboard.history.start, dashboard.history.end
        # An hour of which a few minutes are known would be an empty page.
        self._zoom = 0 if start is None or end is None or end - start <= _ZOOMS[0][0] else 1
        self._cursor: float | None = None
        self._first = 0
        self._stored: _Series = {}
        self._labels: dict[str, str] = {}
        self._extent: tuple[float, float] | None = None
        self._problem = ""
        self._reading = False

    def compose(self) -> ComposeResult:
        yield LinePanel(self._draw, title=self._title, id="history", classes="panel")

    def on_mount(self) -> None:
        self.set_interval(1.0, self._show)
        self.set_interval(_REREAD_SECONDS, self._read)
        self._show()
        self._read()

    def _show(self) -> None:
        self.query_one("#history", LinePanel).show(self._dashboard.store)

    # --- what there is --------------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path | None:
        run = self._dashboard.store.run
        # The demo's run has no folder.
        return None if run is None or not Path(run.folder).is_dir() else Path(run.folder)

    def _span(self) -> tuple[float, float] | None:
        """The stretch of time that is shown; None while nothing is known at all."""
        ring, seconds = self._dashboard.history, _ZOOMS[self._zoom][0]
        run = self._dashboard.store.run
        newest = [moment for moment in (ring.end, self._extent and self._extent[1]) if moment is not None]
        if not newest:
            return None
        if seconds:
            end = (ring.end if ring.end is not None else newest[-1]) + _NEWEST_STANDS
            return end - seconds, end
        starts = [moment for moment in (ring.start, self._extent and self._extent[0]) if moment is not None]
        # A run that is over ends where its ledger does, whatever this dashboard has seen since.
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
            self._extent, self._labels, self._stored = await asyncio.to_thread(_stored, folder, self._zoom, self._span())
            self._problem = ""
        except (MemtopError, OSError) as error:
            self._problem = str(error)
        finally:
            self._reading = False
        self._show()

    def _buckets(self, key: str, name: str) -> list[Bucket]:
        """The ledger up to where the ring begins, then the ring."""
        live = self._dashboard.history.buckets(key, name)
        begins = live[0].time if live else float("inf")
        old = [bucket for bucket in self._stored.get(key, {}).get(name, ()) if bucket.time + bucket.seconds <= begins]
        return old + live

    def curves(self) -> list[drawing.Curve]:
        """All that are chosen, GPUs in their order, the host's after them."""
        ring = self._dashboard.history
        labels = {**self._labels, **{key: ring.label(key) for key in ring.keys}}
        gpus = sorted((key for key in labels if key != HOST), key=lambda key: (len(labels[key]), labels[key]))
        found = []
        for letter, (words, name, unit, of_host) in _CHOICES.items():
            if letter not in self._chosen:
                continue
            if of_host:
                found.append(drawing.Curve(words, unit, self._buckets(HOST, name)))
                continue
            each = [drawing.Curve(f"{words} {labels[key]}", unit, self._buckets(key, name)) for key in gpus]
            if len(each) > 1 and letter in _TOGETHER:
                # All their values in one: the mean is that over time and cards, least and most are of any card.
                every = [bucket for curve in each for bucket in curve.buckets]
                found.append(drawing.Curve(f"{words} of all {len(each)} GPUs, mean", unit, every))
            found += each
        return found

    # --- how it looks ---------------------------------------------------------------------------------------------------

    def _title(self, store: Store) -> str:
        zoom = _ZOOMS[self._zoom][1]
        if self._folder is None:
            return f"History: {zoom}, only what this dashboard has seen"
        return f"History of {store.run.name if store.run else ''}: {zoom}"

    def _draw(self, store: Store, width: int, height: int) -> list[Line]:
        span = self._span()
        if span is None:
            return [line(("nothing is known yet", "muted"))]
        curves = self.curves()
        self._first = min(self._first, max(0, len(curves) - 1))
        view = drawing.View(*span, self._cursor, store.events)
        lines = drawing.draw(curves[self._first :], view, width, height - 1)
        return [*lines, *[()] * (height - 1 - len(lines)), self._keys(width)]

    def _keys(self, width: int) -> Line:
        if self._problem:
            return fit(line((self._problem, "bad")), width)
        parts = [
            line((f"{k} ", "accent"), (words, "strong" if k in self._chosen else "muted"))
            for k, (words, *_) in _CHOICES.items()
            if k != "r" or self._dashboard.store.run is not None
        ]
        hints = (("Esc", "back"), ("+ -", "zoom"), ("← →", "cursor"), ("?", "help"), ("End", "newest"))
        return join_fitting([*parts, *(line((f"{keys} ", "accent"), (words, "muted")) for keys, words in hints)], width)

    # --- keys -----------------------------------------------------------------------------------------------------------

    def action_zoom(self, step: int) -> None:
        # Without a ledger there is nothing beyond the hour in memory.
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
        each = (end - start) / drawing.cells(self.query_one("#history", LinePanel).size.width)
        here = end - each / 2 if self._cursor is None else self._cursor
        self._cursor = min(end - each / 2, max(start + each / 2, here + step * each))
        self._show()

    def on_click(self, event: Click) -> None:
        panel, span = self.query_one("#history", LinePanel), self._span()
        inside = event.get_content_offset_capture(panel)
        count = drawing.cells(panel.size.width)
        if span is not None and 0 <= inside.x < count and 0 <= inside.y < panel.size.height - 1:
            start, end = span
            self._cursor = start + (inside.x + 0.5) * (end - start) / count
            self._show()

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        self.action_scroll_curves(1)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        self.action_scroll_curves(-1)

    def action_leave(self) -> None:
        self.dismiss(None)

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
) -> tuple[tuple[float, float] | None, dict[str, str], _Series]:
    """Extent, sources and values of the ledger for what is shown. Runs in a thread."""
    from memtop.supervisor.run.record.folder import RunFolder
    from memtop.supervisor.run.record.view import reading_ledger

    with reading_ledger(RunFolder(folder)) as ledger:
        if ledger is None:
            return None, {}, {}
        extent, labels = ledger.extent(), ledger.sources()
        if extent is None:
            return None, labels, {}
        start, end = span or extent
        if not _ZOOMS[zoom][0]:
            start, end = min(start, extent[0]), max(end, extent[1])
        return extent, labels, {key: ledger.history(key, start, end) for key in labels}
