"""What the dashboard writes to the terminal when a part of it changes is what a whole picture would
show."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pyte
import pytest
from rich.cells import cell_len
from rich.console import RenderableType
from textual._compositor import Compositor, CompositorUpdate, LayoutUpdate
from textual.pilot import Pilot
from textual.screen import Screen

from memtop.supervisor import language
from memtop.tui.app import DashboardApp
from memtop.tui.compositor import Rows
from memtop.tui.dashboard.result import DashboardResult
from tests.tui.support import RecordingFeed, dashboard, gpu, render_frame, resize, running, settle

WORDS = {"en": "the checkpoint of update 24 was saved", "zh": "第 24 次更新的检查点已保存在磁盘上"}


@pytest.fixture(params=["zh", pytest.param("en", marks=pytest.mark.long)], autouse=True)
def lang(request: pytest.FixtureRequest) -> Iterator[str]:
    language.use(request.param)
    yield request.param
    language.use("en")


class WideCells(pyte.Screen):
    """Half of a wide character cannot stay: as in real terminals, a blank takes its place."""

    def draw(self, data: str) -> None:
        for character in data:
            row, x = self.buffer[self.cursor.y], self.cursor.x
            if x and not row[x].data:
                row[x - 1] = row[x - 1]._replace(data=" ")
            end = x + max(1, cell_len(character))
            if end < self.columns and not row[end].data:
                row[end] = row[end]._replace(data=" ")
            super().draw(character)


class Terminal:
    """A terminal that shows all that the app has written to it."""

    def __init__(self, app: DashboardApp) -> None:
        self._app = app
        self._resized()
        self.partial = 0
        """How many pictures showed only what had changed."""

    def _resized(self) -> None:
        self._size = self._app.size
        self._screen = WideCells(*self._size)
        self._stream = pyte.Stream(self._screen)

    def show(self, screen: Screen[object], update: RenderableType | None) -> None:
        """In the place of `App._display`, which writes nothing without a terminal."""
        if self._size != self._app.size:
            self._resized()
        if isinstance(update, CompositorUpdate) and not self._app._batch_count:
            self._stream.feed(update.render_segments(self._app.console))
            self.partial += isinstance(update, Rows)

    def check(self) -> None:
        """What is shown, with its colours, is the whole picture."""
        compositor = self._app.screen._compositor
        whole = WideCells(*self._size)
        rows = LayoutUpdate([[strip] for strip in compositor.render_strips()], compositor.size.region)
        pyte.Stream(whole).feed(rows.render_segments(self._app.console))
        for row in range(self._size.height):
            shown, wanted = ([screen.buffer[row][x] for x in range(self._size.width)] for screen in (self._screen, whole))
            assert "".join(one.data for one in shown) == "".join(one.data for one in wanted), row
            assert shown == wanted, row


@asynccontextmanager
async def shown(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[DashboardApp, Pilot[DashboardResult], RecordingFeed, Terminal]]:
    monkeypatch.setattr(Compositor, "render_update", render_frame)
    feed = RecordingFeed(running(gpu()))
    app = dashboard(feed)
    async with app.run_test(size=size, notifications=True, tooltips=True) as pilot:
        terminal = Terminal(app)
        monkeypatch.setattr(app, "_display", terminal.show)
        app.screen.refresh()
        await settle(pilot)
        terminal.check()
        yield app, pilot, feed, terminal


async def changes(app: DashboardApp, pilot: Pilot[DashboardResult], feed: RecordingFeed, terminal: Terminal) -> None:
    """Numbers and lines of the log change a few times."""
    for n in range(1, 4):
        feed.send(running(gpu(0, 0.5 + 0.1 * n), loss=1.5 - 0.1 * n, updates=24 + 7 * n))
        app.dashboard.log_panel.append([f"{WORDS[lang]}: {n} {'汉字' * n}{'a' * n}" for lang in WORDS])
        await settle(pilot)
        terminal.check()


SIZES = [(120, 35), pytest.param((121, 34), marks=pytest.mark.long), pytest.param((80, 24), marks=pytest.mark.long)]


@pytest.mark.parametrize("size", SIZES)
async def test_numbers_and_lines_change(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    async with shown(size, monkeypatch) as (app, pilot, feed, terminal):
        await changes(app, pilot, feed, terminal)
        assert terminal.partial > 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("blanks", [0, 1])
async def test_a_toast_comes_and_goes(size: tuple[int, int], blanks: int, lang: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shown(size, monkeypatch) as (app, pilot, feed, terminal):
        app.dashboard.log_panel.append([f"{'a' * n}{'汉字' * 60}" for n in range(40)])
        await settle(pilot)
        app.notify(f"{WORDS[lang]}{' a' * blanks}", timeout=600)
        await settle(pilot)
        assert len(app.screen.query("Toast")) == 1
        terminal.check()
        await changes(app, pilot, feed, terminal)
        app.clear_notifications()
        await settle(pilot)
        assert not app.screen.query("Toast")
        terminal.check()
        await changes(app, pilot, feed, terminal)


@pytest.mark.parametrize("size", SIZES)
async def test_a_tooltip_comes_and_goes(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    async with shown(size, monkeypatch) as (app, pilot, feed, terminal):
        app.dashboard.log_panel.append([f"{'a' * n}{'汉字' * 60}" for n in range(40)])
        buttons = [button for button in app.dashboard.action_bar.children if button.display and button.region]
        assert len(buttons) > 1
        for button in buttons[:2]:
            while not app.screen.query_one("#textual-tooltip").display:
                await pilot.hover(button)
                await pilot.pause(1.5 * app.TOOLTIP_DELAY)
            await settle(pilot)
            terminal.check()
            await changes(app, pilot, feed, terminal)
        await pilot.hover(app.dashboard.log_panel)
        await settle(pilot)
        terminal.check()


async def test_the_terminal_is_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shown((120, 35), monkeypatch) as (app, pilot, feed, terminal):
        for size in ((121, 36), (80, 24), (60, 15), (50, 12), (160, 50)):
            await resize(pilot, *size)
            terminal.check()
            await changes(app, pilot, feed, terminal)


@pytest.mark.parametrize("size", SIZES)
async def test_the_log_scrolls(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    async with shown(size, monkeypatch) as (app, pilot, feed, terminal):
        log = app.dashboard.log_panel
        log.append([f"{'a' * (n % 5)}{'汉字' * n}" for n in range(200)])
        await settle(pilot)
        terminal.check()
        for y in (0, 1, 7, 8, 150, 3):
            log.scroll_to(y=y, animate=False)
            await settle(pilot)
            terminal.check()
        await changes(app, pilot, feed, terminal)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.long
async def test_a_panel_is_hidden_and_shown(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    async with shown(size, monkeypatch) as (app, pilot, feed, terminal):
        app.dashboard.log_panel.append([f"{'a' * n}{'汉字' * 60}" for n in range(40)])
        for panel in [one for one in app.dashboard.query("LinePanel") if one.display and one.region]:
            for shows in (False, True):
                panel.display = shows
                await settle(pilot)
                terminal.check()
                await changes(app, pilot, feed, terminal)
