"""The history screen: curves with a zoom and a cursor, from the last hour in memory and, for a run,
its ledger.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp

from memtop.supervisor.errors import MemtopError
from memtop.supervisor.language import tr
from memtop.supervisor.monitor.history import HOST, KEPT_SECONDS, Bucket, label_of
from memtop.supervisor.names import shortened
from memtop.tui.history.drawing import Curve, HistoryView, cells, draw
from memtop.tui.line import Line, fit, join, join_fitting, line, width_of
from memtop.tui.metrics.curves import RunCurves
from memtop.tui.metrics.record import new_in
from memtop.tui.panel import LinePanel
from memtop.tui.screen import TITLE_NAME, Dashboard, FullScreen
from memtop.tui.store import Store

_ZOOMS = ((300.0, "last 5 min"), (KEPT_SECONDS, "last hour"), (86_400.0, "last 24 h"), (0.0, "whole run"))
# Key: (words, series, unit, what it is a value of).
_CHOICES = {
    "v": ("VRAM", "used_fraction", "memory", "gpu"),
    "m": ("RAM", "used_fraction", "memory", "host"),
    "s": ("swap", "swap_used_bytes", "bytes", "host"),
    "u": ("use", "utilization_fraction", "fraction", "gpu"),
    "w": ("power", "power_watts", "watts", "gpu"),
    "r": ("run RAM", "run_pss_bytes", "bytes", "host"),
    "l": ("loss", "loss", "number", "update"),
    "p": ("peak memory", "peak_bytes", "bytes", "update"),
    "t": ("tokens/s", "tokens_per_second", "rate", "update"),
}
_OF_A_RUN = "rlpt"
# With several GPUs these also have a curve of the mean of all GPUs.
_TOGETHER = "vu"
_REREAD_SECONDS = 10.0
# The newest value is drawn from its own time on, so the axis ends a little later.
_NEWEST_STANDS = 1.0
_WHOLE = len(_ZOOMS) - 1
_Series = dict[str, dict[str, list[Bucket]]]


def _tips() -> list[tuple[str, tuple[str, str, str, str], str]]:
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
        self._chosen = {"v", "m", "l"}
        start, end = dashboard.history.start, dashboard.history.end
        # With only a few minutes of data, an hour would be nearly empty.
        self._zoom = 0 if start is None or end is None or end - start <= _ZOOMS[0][0] else 1
        if self._folder is not None:
            self._zoom = _WHOLE
        self._updates: RunCurves | None = None
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
            known = self._updates
            found = await asyncio.to_thread(new_in, folder, None if known is None else known.newest)
            self._updates = found.fresh or known
            assert self._updates is not None
            self._updates.take(found.rows)
            self._problem = ""
        except (MemtopError, OSError) as error:
            self._problem = str(error)
        finally:
            self._reading = False
        if self.is_open:
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
        for letter, (words, name, unit, of) in _CHOICES.items():
            if letter not in self._chosen:
                continue
            if of == "update":
                found += self._update_curve(words, unit, name)
                continue
            if of == "host":
                if letter == "r" and not self._buckets(HOST, name):
                    words, name = "run RSS", "run_rss_bytes"  # the kernel reports no PSS
                found.append(Curve(words, unit, self._buckets(HOST, name)))
                continue
            each = [Curve(f"{tr(words)} {label_of(sources[key])}", unit, self._buckets(key, name)) for key in gpus]
            if len(each) > 1 and letter in _TOGETHER:
                # All values in one curve: the mean over time and cards, least and most of any card.
                every = [bucket for curve in each for bucket in curve.buckets]
                found.append(Curve(tr(f"{words} of all {len(each)} GPUs, mean"), unit, every))
            found += each
        return found

    def _update_curve(self, words: str, unit: str, name: str) -> list[Curve]:
        """A value that the run reports with its updates; none before the first update."""
        store, run = self.dashboard.store, self._updates
        if self._folder is None and store.run is not None:
            # Of a recorded or observed run there are only the newest updates.
            run = RunCurves(store.run.name)
            run.take(store.metrics)
        # Without their times they have no place here.
        track = None if run is None or not run.times or not run.times[0] else run.track(name)
        return [] if run is None or track is None else [Curve(words, unit, track=track, begins=run.times[0])]

    # --- how it looks -----------------------------------------------------------------------------

    def _panel_title(self, store: Store) -> str:
        zoom = _ZOOMS[self._zoom][1]
        if self._folder is None:
            return f"History: {zoom}, since this dashboard started"
        return f"History of {shortened(store.run.name, TITLE_NAME) if store.run else ''}: {zoom}"

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
            if k not in _OF_A_RUN or self.dashboard.store.run is not None
        ]
        hints = (("Esc", "back"), ("+ -", "zoom"), ("← →", "cursor"), ("?", "help"), ("End", "newest"))
        keys = [line((f"{key} ", "accent"), (words, "muted")) for key, words in hints]
        whole = join([*parts, *keys])
        # Without room for all, how to leave, to zoom and to get help is first, and a mark says that
        # there is more.
        if width_of(whole) <= width:
            return whole
        more = line((" …", "muted"))
        return (*join_fitting([*keys[:2], keys[3], *parts], width - width_of(more)), *more)

    # --- keys -------------------------------------------------------------------------------------

    def action_zoom(self, step: int) -> None:
        # Without a ledger there is only the hour in memory.
        most = _WHOLE if self._folder is not None else 1
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
