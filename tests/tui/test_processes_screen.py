"""The process list on the screen: the cursor stays on its process, nothing moves under a question, and what keys do."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from memtop.supervisor.monitor.values import GpuProcess, MachineSnapshot
from memtop.supervisor.wire import Checkpoint, StateUpdate
from memtop.tui.app import DashboardApp, DashboardResult
from memtop.tui.screens.dialog import ConfirmDialog
from memtop.tui.screens.environment import EnvironmentDialog, is_secret
from memtop.tui.screens.process import ProcessScreen
from memtop.tui.screens.processes import ProcessesScreen
from memtop.tui.widgets.line_table import LineTable
from tests.tui.support import (
    GIB,
    NOW,
    RecordingFeed,
    RecordingHands,
    dashboard,
    gpu,
    machine,
    process,
    run_state,
    screen_text,
    settle,
)
from tests.tui.test_process_rows import BOB, JOB, RANKS

SIZE = (120, 30)


def small(*processes: GpuProcess) -> MachineSnapshot:
    return machine(gpu(processes=processes))


def grown(pid: int, gib: float) -> GpuProcess:
    return process(pid, used_bytes=int(gib * GIB))


async def opened(pilot: Pilot[DashboardResult], key: str = "o") -> ProcessesScreen:
    await settle(pilot)
    await pilot.press(key)
    await settle(pilot)
    screen = pilot.app.screen
    assert isinstance(screen, ProcessesScreen)
    return screen


def order_of(app: DashboardApp) -> list[int]:
    assert isinstance(app.screen, ProcessesScreen)
    return [row.pid for row in app.screen._rows]


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (160, 50)])
async def test_the_list_at_every_size(size: tuple[int, int]) -> None:
    shot = MachineSnapshot(time=NOW, gpus=(gpu(0, processes=(RANKS[0], BOB)), gpu(1, processes=(RANKS[1],))), jobs=(JOB,))
    app = dashboard(RecordingFeed(shot))
    async with app.run_test(size=size) as pilot:
        await opened(pilot)
        text = screen_text(app)
        for words in ("GPU processes 3", "pid", "VRAM▾", "▾ a  launcher", "python job-100", "Esc Back", "k End"):
            assert words in text
        await pilot.press("escape")
        await settle(pilot)
        assert app.screen is app.dashboard


async def test_the_cursor_stays_on_its_process_when_the_order_changes() -> None:
    feed = RecordingFeed(small(grown(1, 1), grown(2, 2), grown(3, 3)))
    app = dashboard(feed)
    async with app.run_test(size=SIZE) as pilot:
        screen = await opened(pilot)
        await pilot.press("down", "down")
        await settle(pilot)
        assert screen.row is not None
        assert screen.row.pid == 1
        (marked,) = [row for row in screen_text(app).splitlines() if row.startswith(" ▸")]
        assert "job-1.py" in marked
        feed.say(small(grown(1, 9), grown(2, 2), grown(3, 3)))
        await settle(pilot)
        assert order_of(app) == [1, 3, 2]
        assert screen.row is not None
        assert screen.row.pid == 1


async def test_a_process_that_ended_leaves_the_cursor_in_its_place() -> None:
    feed = RecordingFeed(small(grown(1, 3), grown(2, 2), grown(3, 1)))
    app = dashboard(feed)
    async with app.run_test(size=SIZE) as pilot:
        screen = await opened(pilot)
        await pilot.press("down")
        feed.say(small(grown(1, 3), grown(3, 1)))
        await settle(pilot)
        assert screen.row is not None
        assert screen.row.pid == 3


async def test_typing_a_filter_holds_the_order_still() -> None:
    feed = RecordingFeed(small(grown(1, 3), grown(2, 2), grown(3, 1)))
    app = dashboard(feed)
    async with app.run_test(size=SIZE) as pilot:
        screen = await opened(pilot)
        await pilot.press("f", *"job-")
        feed.say(small(grown(1, 3), grown(2, 2), grown(3, 9)))
        await settle(pilot)
        assert order_of(app) == [1, 2, 3]
        assert "order held still" in screen_text(app)
        await pilot.press("enter")
        await settle(pilot)
        assert order_of(app) == [3, 1, 2]
        assert "filter job-" in screen_text(app)
        await pilot.press("f", *" vram>5g", "enter")
        await settle(pilot)
        assert order_of(app) == [3]
        assert "GPU processes 1 of 3" in screen_text(app)
        await pilot.press("escape")
        assert screen.row is not None
        assert order_of(app) == [3, 1, 2]


async def test_a_filter_that_is_not_understood_says_so_and_keeps_the_list() -> None:
    app = dashboard(RecordingFeed(small(grown(1, 3))))
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        await pilot.press("f", *"usr:x")
        await settle(pilot)
        assert "no key 'usr'" in screen_text(app)
        await pilot.press("escape")
        await settle(pilot)
        assert "no key" not in screen_text(app)
        assert not app.screen.query_one("#processes-input", Input).display


async def test_search_goes_round() -> None:
    app = dashboard(RecordingFeed(small(grown(11, 3), grown(22, 2), grown(31, 1))))
    async with app.run_test(size=SIZE) as pilot:
        screen = await opened(pilot)
        await pilot.press("down", "slash", *"job-", "enter")
        places = []
        for key in ("n", "n", "N"):
            await pilot.press(key)
            assert screen.row is not None
            places.append(screen.row.pid)
        assert places == [31, 11, 31]


async def test_sorting_by_keys_and_by_clicks() -> None:
    app = dashboard(RecordingFeed(small(grown(1, 1), grown(2, 3), grown(3, 2))))
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        assert order_of(app) == [2, 3, 1]
        await pilot.press("i")
        assert order_of(app) == [1, 3, 2]
        await pilot.click("#processes-table", offset=(6, 0))
        await settle(pilot)
        assert order_of(app) == [1, 2, 3]
        assert "pid▴" in screen_text(app)
        await pilot.click("#processes-table", offset=(6, 0))
        await settle(pilot)
        assert order_of(app) == [3, 2, 1]


@pytest.mark.parametrize("read_only", [False, True])
async def test_help_lists_the_keys_of_the_list(read_only: bool) -> None:
    app = dashboard(RecordingFeed(small(grown(1, 1)), read_only=read_only))
    async with app.run_test(size=SIZE) as pilot:
        screen = await opened(pilot)
        await pilot.press("question_mark")
        await settle(pilot)
        text = screen_text(app)
        for words in ("Keys of this screen", "user:bob gpu:1 vram>2g", "Reverse the order", "One step back"):
            assert words in text
        assert ("asks first" in text) != read_only
        await pilot.press("escape")
        await settle(pilot)
        assert app.screen is screen


async def test_a_click_on_a_key_does_what_the_key_does() -> None:
    app = dashboard(RecordingFeed(small(grown(1, 1))))
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        at = screen_text(app).splitlines()[-1].index("Esc Back")
        await pilot.click("KeyLine", offset=(at + 1, 0))
        await settle(pilot)
        assert app.screen is app.dashboard


async def test_views_and_folding() -> None:
    shot = MachineSnapshot(time=NOW, gpus=(gpu(0, processes=(RANKS[0], BOB)), gpu(1, processes=(RANKS[1],))), jobs=(JOB,))
    app = dashboard(RecordingFeed(shot))
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        assert order_of(app) == [50, 90, 101, 100]
        await pilot.press("down", "enter")
        assert order_of(app) == [50, 90]
        assert "▸ a" in screen_text(app)
        await pilot.press("enter", "t")
        await settle(pilot)
        assert "tree" in screen_text(app)
        await pilot.press("t")
        await settle(pilot)
        assert order_of(app) == [50, 101, 100]
        assert "flat" in screen_text(app)


async def test_ending_asks_with_names_and_consequence_and_holds_the_order() -> None:
    saved = Checkpoint(path="x", updates=20, saved_at=NOW - 12, complete=True)
    mine = process(1, run="tiny", used_bytes=3 * GIB, command="python job-1.py --with-long --words-before --the-end last")
    update = StateUpdate(run=run_state(updates=24, checkpoint=saved), machine=small(mine, grown(2, 2)))
    feed, hands = RecordingFeed(update), RecordingHands()
    app = dashboard(feed, hands)
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        await pilot.press("k")
        await settle(pilot)
        assert isinstance(app.screen, ConfirmDialog)
        assert app.focused is not None
        assert app.focused.id == "cancel"
        text = screen_text(app)
        for words in (
            "ada",
            "3.0 GiB",
            "python job-1.py",
            "--the-end last",
            "memory is freed (3.0 GiB)",
            "Run tiny would lose 4 updates",
        ):
            assert words in text
        await pilot.press("enter")
        await settle(pilot)
        assert hands.ended == []
        await pilot.press("space", "space", "k")
        await settle(pilot)
        feed.say(small(mine, grown(2, 9)))
        await settle(pilot)
        await pilot.press("y")
        await settle(pilot)
        assert sorted(hands.ended) == [1, 2]
        assert "✓ 2 processes ended" in screen_text(app)


async def test_what_is_not_ones_own_cannot_be_ended_or_ticked() -> None:
    hands = RecordingHands()
    app = dashboard(RecordingFeed(small(process(5, user="grace", choosable=False, reason="belongs to grace"))), hands)
    async with app.run_test(size=SIZE) as pilot:
        screen = await opened(pilot)
        for key in ("k", "space"):
            await pilot.press(key)
            await settle(pilot)
            assert app.screen is screen
            assert "belongs to grace" in screen_text(app)
        assert not screen._ticked


async def test_read_only_has_no_keys_that_end() -> None:
    app = dashboard(RecordingFeed(small(grown(1, 1)), read_only=True))
    async with app.run_test(size=SIZE) as pilot:
        screen = await opened(pilot)
        text = screen_text(app)
        assert "End" not in text
        assert "Tick" not in text
        for key in ("k", "space"):
            await pilot.press(key)
            await settle(pilot)
            assert app.screen is screen
        assert not screen._ticked
        await pilot.press("enter")
        await settle(pilot)
        assert isinstance(app.screen, ProcessScreen)
        await pilot.press("k")
        await settle(pilot)
        assert isinstance(app.screen, ProcessScreen)
        assert "End" not in screen_text(app)


async def test_one_process_in_detail_until_it_ends() -> None:
    feed = RecordingFeed(*(small(process(1, used_bytes=n * GIB, host_rss_bytes=None)) for n in range(1, 6)))
    app = dashboard(feed)
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        await pilot.press("enter")
        await settle(pilot)
        assert isinstance(app.screen, ProcessScreen)
        text = screen_text(app)
        for words in ("process 1", "python job-1.py", "VRAM 5.0 GiB", "RSS –", "not known"):
            assert words in text
        feed.say(small())
        await settle(pilot)
        assert "it has ended or left the GPU" in screen_text(app)
        await pilot.press("k")
        await settle(pilot)
        assert "it has ended already" in screen_text(app)


async def test_secrets_of_the_environment_are_hidden_until_asked_for() -> None:
    hands = RecordingHands()
    app = dashboard(RecordingFeed(small(grown(1, 1))), hands)
    async with app.run_test(size=SIZE) as pilot:
        screen = await opened(pilot)
        await pilot.press("e")
        await settle(pilot)
        assert isinstance(app.screen, EnvironmentDialog)
        assert "HOME=/home/ada" in screen_text(app)
        assert "hf_secret" not in screen_text(app)
        await pilot.press("v")
        await settle(pilot)
        assert "hf_secret" in screen_text(app)
        await pilot.press("escape")
        hands.environment = None
        await settle(pilot)
        await pilot.press("e")
        await settle(pilot)
        assert app.screen is screen
        assert "it belongs to grace" in screen_text(app)


@pytest.mark.parametrize(("name", "secret"), [("WANDB_API_KEY", True), ("db_password", True), ("HOME", False), ("RANK", False)])
def test_secret_names(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


async def test_a_tick_without_news_repaints_no_row() -> None:
    feed = RecordingFeed(small(grown(1, 1), grown(2, 2)))
    app = dashboard(feed)
    async with app.run_test(size=SIZE) as pilot:
        screen = await opened(pilot)
        table = screen.query_one(LineTable)
        painted: list[object] = []
        table.refresh = lambda *regions, **kwargs: painted.extend(regions)  # type: ignore[method-assign, assignment]
        feed.say(small(grown(1, 1), grown(2, 2)))
        await settle(pilot)
        assert painted == []
        feed.say(small(grown(1, 1.5), grown(2, 2)))
        await settle(pilot)
        assert [region.y for region in painted] == [2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("by", ["click", "enter"])
async def test_the_short_list_opens_the_full_one(by: str) -> None:
    app = dashboard(RecordingFeed(small(grown(1, 1))))
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        if by == "click":
            await pilot.click("#processes", offset=(3, 2))
        else:
            app.dashboard.query_one("#processes").focus()
            await pilot.press("enter")
        await settle(pilot)
        assert isinstance(app.screen, ProcessesScreen)
