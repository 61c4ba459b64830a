"""The metrics screen: what a run reports with its updates, as curves with a zoom and a cursor,
alone or laid over other runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Click, MouseScrollDown, MouseScrollUp
from textual.widgets import Button, OptionList

from memtop.supervisor.clean import clean
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.language import separator, tr
from memtop.supervisor.wire import Event
from memtop.tui.choices import SCALES
from memtop.tui.line import MUTED, Line, line, width_of
from memtop.tui.metrics.curves import AXES, RunCurves
from memtop.tui.metrics.drawing import (
    METRICS,
    RUN_ROLES,
    SMOOTHINGS,
    MetricKind,
    MetricsView,
    cell_at,
    chart_width,
    draw,
    with_values,
)
from memtop.tui.metrics.record import new_in
from memtop.tui.panel import LinePanel
from memtop.tui.screen import Dashboard, Dialog, FullScreen, KeyLine, T, Words, named
from memtop.tui.store import Store

_READ_SECONDS = 2.0
_AT_FIRST = {"loss", "learning_rate", "samples_per_second", "peak_bytes"}
_SHORTEST = 8.0
"""The least part of an axis that is shown, in updates or their like."""


class MetricsScreen(FullScreen):
    """Reads the ledgers of the runs in a thread. Of a recorded or observed run there are only the
    newest updates, in the dashboard's store."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,v", "leave", "Back", show=False),
        *(Binding(key, f"choose('{name}')", words, show=False) for key, name, words, *_ in METRICS),
        Binding("x", "axis", "X axis", tooltip="Updates, samples, tokens or time"),
        Binding("u", "updates", "Over updates", show=False),
        Binding("plus,equals_sign", "zoom(0.5)", "Zoom", key_display="+ -", tooltip="Half or twice the range, at the cursor"),
        Binding("minus,underscore", "zoom(2)", "Further", show=False),
        Binding("left", "move(-1)", "Cursor", key_display="← →", tooltip="Reads values; or click; PgUp and PgDn leap"),
        Binding("right", "move(1)", "On", show=False),
        Binding("shift+left,pageup", "move(-10)", "Back", show=False),
        Binding("shift+right,pagedown", "move(10)", "On", show=False),
        Binding("end", "newest", "Newest", key_display="End", tooltip="No cursor, and the newest values at the right"),
        Binding("o", "smooth", "Smooth", tooltip="Average over 8, 32 or 128 dots; the values themselves stay visible"),
        Binding("y", "log", "Log scale", tooltip="A logarithmic y axis"),
        Binding("a", "add", "Add runs", tooltip="Lay other runs of the same folder over this one"),
        Binding("z", "alone", "One chart", tooltip="One chart on the whole screen, or all again; ↑ ↓ go to the others"),
        Binding("down", "scroll_charts(1)", "Charts", key_display="↑ ↓", tooltip="Charts that do not fit; or the wheel"),
        Binding("up", "scroll_charts(-1)", "Charts before", show=False),
    ]

    def __init__(self, dashboard: Dashboard, folders: Sequence[Path] = ()) -> None:
        """`folders`: the runs to show in place of the dashboard's; more than fit are left out."""
        super().__init__(dashboard, id="metrics-screen")
        self._given = folders[0] if folders else None
        self._chosen = set(_AT_FIRST)
        self._axis = dashboard.choices["metrics-axis"]
        self._part: tuple[float, float | None] | None = None
        """The length of the axis that is shown, and where it ends (None: at the newest update).
        None: all of it."""
        self._cursor: float | None = None
        self._smoothing = int(dashboard.choices["metrics-smoothing"])
        """Dots over which the curves are smoothed."""
        self._scale = dashboard.choices["metrics-scale"]
        self._first = 0
        self._shown = 0
        self._alone = False
        """Whether one chart has the whole screen."""
        self._folders: list[Path] = list(folders[1 : len(RUN_ROLES)])
        """Of the runs that were added."""
        self._runs: dict[Path | None, RunCurves] = {}
        self._events: list[Event] = []
        self._reading = False

    def compose(self) -> ComposeResult:
        yield self.title_panel()
        yield LinePanel(self._draw, id="metrics")
        yield self.message_panel()
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.follow(self.dashboard, self._take)
        self.set_interval(_READ_SECONDS, self._read)
        self._read()

    def headline(self, store: Store) -> Line:
        name = store.run.name if store.run is not None else ""
        return named("Metrics of {name}", name if self._given is None else self._given.name)

    def headline_right(self, store: Store) -> Line:
        parts = [f"by {self._axis}"]
        if self._smoothing:
            parts.append(f"smoothed over {self._smoothing} dots")
        if self._scale == "log":
            parts.append("log scale")
        return (*line((separator(", ").join(map(tr, parts)), MUTED)), *super().headline_right(store))

    def hint(self, store: Store, width: int) -> Line:
        def keys(short: bool) -> Line:
            named = ((kind, tr(kind.short if short else kind.words)) for kind in METRICS)
            return line(
                *(
                    part
                    for kind, words in named
                    for part in ((f"{kind.key} ", "accent"), (f"{words}  ", "strong" if kind.name in self._chosen else MUTED))
                )
            )

        whole = keys(short=False)
        return whole if width_of(whole) <= width else keys(short=True)

    # --- what there is ----------------------------------------------------------------------------

    @property
    def _own_folder(self) -> Path | None:
        """The folder of the dashboard's run; None if its numbers are in the store only."""
        if self._given is not None:
            return self._given
        store = self.dashboard.store
        if store.run is None or store.replaying or store.run.observed or not Path(store.run.folder).is_dir():
            return None
        return Path(store.run.folder)

    def _take(self, store: Store) -> None:
        if self._own_folder is None:
            name = "" if store.run is None else store.run.name
            fresh = RunCurves(name)
            fresh.take(store.metrics)
            fresh.take_evaluations(store.events)
            self._runs[None], self._events = fresh, list(store.events)
        self._show()

    @work(group="metrics", exclusive=True)
    async def _read(self) -> None:
        if self._reading:
            return
        self._reading = True
        try:
            own = self._own_folder
            for folder in [*([] if own is None else [own]), *self._folders]:
                known = self._runs.get(folder)
                after = None if known is None else known.newest
                found = await asyncio.to_thread(new_in, folder, after)
                run = found.fresh or known
                assert run is not None
                run.take(found.rows)
                run.take_evaluations(found.evaluations)
                run.take_memory(found.memory)
                self._runs[folder] = run
                if folder == own:
                    self._events = found.events
        except (MemtopError, OSError) as error:
            self.say(str(error), "bad")
        finally:
            self._reading = False
        if self.is_open:
            self._show()

    @property
    def _curves(self) -> list[RunCurves]:
        wanted = [self._own_folder, *self._folders]
        return [self._runs[folder] for folder in wanted if folder in self._runs]

    @property
    def _kinds(self) -> list[MetricKind]:
        """The chosen metrics that are drawn."""
        return with_values([kind for kind in METRICS if kind.name in self._chosen], self._curves)

    @property
    def _from_first(self) -> list[MetricKind]:
        """Those of them that are drawn if there is room."""
        kinds = self._kinds
        self._first = min(self._first, max(0, len(kinds) - 1))
        return kinds[self._first :][: 1 if self._alone else None]

    def _extent(self) -> tuple[float, float] | None:
        """The first and the last value of the axis in any run."""
        found = [extent for run in self._curves if (extent := run.extent(self._axis)) is not None]
        if not found:
            return None
        start, end = min(first for first, _ in found), max(last for _, last in found)
        return start, end + max(1e-9, (end - start) / 1e6)

    def _span(self) -> tuple[float, float] | None:
        """The part of the axis that is shown."""
        whole = self._extent()
        if whole is None or self._part is None:
            return whole
        length, end = self._part
        end = whole[1] if end is None else min(end, whole[1])
        return max(whole[0], end - length), end

    # --- how it looks -----------------------------------------------------------------------------

    def _show(self) -> None:
        self.show_panels(self.dashboard.store)

    def _draw(self, store: Store, width: int, height: int) -> list[Line]:
        runs, span = self._curves, self._span()
        if not runs:
            return [line(("reading the record of the run", MUTED))]
        if span is None:
            why = "no update is reported yet"
            if self._axis != "update" and any(run.extent("update") is not None for run in runs):
                why = f"this run does not report the {self._axis} of its updates: u draws over updates"
            return [line((why, MUTED))]
        view = MetricsView(
            axis=self._axis,
            start=span[0],
            end=span[1],
            cursor=self._cursor,
            smoothing=self._smoothing,
            log_scale=self._scale == "log",
            events=self._events,
        )
        lines, self._shown = draw(self._from_first, runs, view, width, height)
        return lines

    # --- keys -------------------------------------------------------------------------------------

    def action_choose(self, name: str) -> None:
        self._chosen ^= {name}
        self._show()

    def action_axis(self) -> None:
        self._over(_after(AXES, self._axis))

    def action_updates(self) -> None:
        self._over("update")

    def _over(self, axis: str) -> None:
        self._axis = axis
        self._part = self._cursor = None
        self.choose("metrics-axis", self._axis)
        self._show()

    def action_smooth(self) -> None:
        self._smoothing = _after(SMOOTHINGS, self._smoothing)
        self.choose("metrics-smoothing", str(self._smoothing))
        self._show()

    def action_log(self) -> None:
        self._scale = _after(SCALES, self._scale)
        self.choose("metrics-scale", self._scale)
        self._show()

    def action_zoom(self, factor: float) -> None:
        whole, span = self._extent(), self._span()
        if whole is None or span is None:
            return
        length = max(min(_SHORTEST, whole[1] - whole[0]), (span[1] - span[0]) * factor)
        if length >= whole[1] - whole[0]:
            self._part = None
        elif self._cursor is None:
            self._part = (length, self._part[1] if self._part is not None else None)
        else:
            self._part = (length, max(whole[0] + length, self._cursor + length / 2))
        self._show()

    def action_move(self, step: int) -> None:
        span = self._span()
        if span is None:
            return
        each = (span[1] - span[0]) / self._cells
        here = span[1] - each / 2 if self._cursor is None else self._cursor
        self._point_at(here + step * each, each)

    def _point_at(self, x: float, each: float) -> None:
        """Put the cursor there; at the edge of what is shown, show what is beyond."""
        whole, span = self._extent(), self._span()
        assert whole is not None
        assert span is not None
        self._cursor = min(whole[1] - each / 2, max(whole[0] + each / 2, x))
        if self._part is not None and not span[0] <= self._cursor < span[1]:
            end = span[1] + (self._cursor - (span[0] if self._cursor < span[0] else span[1] - each))
            self._part = (self._part[0], max(whole[0] + self._part[0], end))
        self._show()

    @property
    def _cells(self) -> int:
        panel = self.query_one("#metrics", LinePanel)
        return chart_width(panel.size.width, len(self._from_first))

    def on_click(self, event: Click) -> None:
        panel, span = self.query_one("#metrics", LinePanel), self._span()
        inside = event.get_content_offset_capture(panel)
        place = cell_at(inside.x, panel.size.width, len(self._from_first))
        if span is not None and place is not None and 0 <= inside.y < panel.size.height - 2:
            each = (span[1] - span[0]) / self._cells
            self._point_at(span[0] + (place + 0.5) * each, each)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        self.action_scroll_charts(1)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        self.action_scroll_charts(-1)

    def action_scroll_charts(self, step: int) -> None:
        count = len(self._kinds)
        most = max(0, count - self._shown) if step > 0 else count
        self._first = max(0, min(self._first + step, max(self._first, most)))
        self._show()

    def action_alone(self) -> None:
        self._alone = not self._alone
        self._show()

    def action_newest(self) -> None:
        self._cursor = None
        if self._part is not None:
            self._part = (self._part[0], None)
        self._show()

    @work(group="add")
    async def action_add(self) -> None:
        own = self._own_folder
        if own is None:
            self.say("other runs cannot be added to a recorded run or to a program that memtop only observes")
            return
        others = [path for path in sorted(own.parent.iterdir()) if (path / "run.json").is_file() and path != own]
        if not others:
            self.say(f"there is no other run in {own.parent}")
            return
        chosen = await self.app.push_screen_wait(RunsDialog(others, self._folders))
        if chosen is not None:
            self._folders = chosen[: len(RUN_ROLES) - 1]
            left_out = len(chosen) - len(self._folders)
            if left_out:
                self.say(f"{left_out} runs are left out: at most {len(RUN_ROLES)} are shown")
            else:
                self.clear_message()
            self._read()


def _after(values: Sequence[T], value: T) -> T:
    """The next value; after the last one comes the first."""
    return values[(values.index(value) + 1) % len(values)]


class RunsDialog(Dialog[list[Path]]):
    """Asks which runs to lay over the dashboard's run."""

    AUTO_FOCUS = "OptionList"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "tick", "Tick", show=False)]

    def __init__(self, folders: Sequence[Path], chosen: Sequence[Path]) -> None:
        super().__init__()
        self._all, self._chosen = list(folders), list(chosen)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = tr("Runs to lay over this one")
            yield OptionList(*map(self._prompt, self._all))
            yield Words(tr("Space ticks a run, Enter shows the ticked ones."), classes="muted")
            with Horizontal(classes="buttons"):
                yield Button(tr("Cancel"), id="cancel", compact=True)
                yield Button(tr("Show"), id="confirm", variant="primary", compact=True)

    def _prompt(self, folder: Path) -> Text:
        return Text(f"[{'x' if folder in self._chosen else ' '}] {clean(folder.name)}")

    def action_tick(self) -> None:
        rows = self.query_one(OptionList)
        if rows.highlighted is None:
            return
        folder = self._all[rows.highlighted]
        if folder in self._chosen:
            self._chosen.remove(folder)
        else:
            self._chosen.append(folder)
        rows.replace_option_prompt_at_index(rows.highlighted, self._prompt(folder))

    @on(OptionList.OptionSelected)
    @on(Button.Pressed, "#confirm")
    def _confirmed(self) -> None:
        self.dismiss(self._chosen)
