"""The command palette: what it lists, what a choice does, and keys that arrive all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.command import CommandInput, CommandList

from memtop.supervisor import language
from memtop.supervisor.errors import UsageError
from memtop.supervisor.wire import Phase
from memtop.tui.app import DashboardApp
from memtop.tui.choices import Choices
from memtop.tui.help import HelpDialog
from memtop.tui.keymap import ACTIONS, offered
from memtop.tui.palette import Palette
from memtop.tui.processes.screen import ProcessesScreen
from memtop.tui.restart import RestartDialog
from memtop.tui.screen import ConfirmDialog, KeysDialog
from memtop.tui.themes import NAMES
from tests.tui.support import RecordingFeed, gpu, machine, opened, press, process, resize, running, screen_text, settle
from tests.tui.test_keys_in_order import fields, type_at_once
from tests.tui.test_start import loaded_by


@pytest.fixture(autouse=True)
def in_english_again() -> Iterator[None]:
    yield
    language.use("en")


def listed(app: DashboardApp) -> list[str]:
    """The titles in the palette."""
    return [str(row.prompt).split("\n")[0] for row in app.screen.query_one(CommandList).options]


def test_a_start_does_not_load_it() -> None:
    assert "memtop.tui.palette" not in loaded_by("import memtop.tui.app, memtop.tui.feed")


async def test_it_lists_every_offered_action_and_every_theme() -> None:
    async with opened(RecordingFeed(running(gpu())), "ctrl+p") as (app, pilot):
        expected = [one.label.rstrip("…") for one in ACTIONS if one.id != "palette" and offered(one, app.dashboard.store)]
        assert listed(app) == [*expected, *(f"Theme: {name}" for name in NAMES)]
        assert "f  Give back memory" in screen_text(app)
        await press(pilot, "ctrl+p", *"zzz")
        assert app.screen.query_one(CommandInput).value == "zzz"
        assert listed(app) == ["nothing found"]
        await press(pilot, "enter")
        assert isinstance(app.screen, Palette)
        await press(pilot, "escape")
        assert app.screen is app.dashboard


async def test_a_read_only_dashboard_lists_nothing_that_changes_something() -> None:
    feed = RecordingFeed(running(gpu()))
    feed.read_only = True
    async with opened(feed, "ctrl+p") as (app, _):
        changing = {one.label.rstrip("…") for one in ACTIONS if one.group in ("run", "machine")}
        assert "Processes" in listed(app)
        assert not {title for title in listed(app) if any(title.startswith(label) for label in changing)}


async def test_a_word_of_a_description_is_found_below_the_titles() -> None:
    async with opened(RecordingFeed(running(gpu())), "ctrl+p", *"report") as (app, pilot):
        assert "All runs" in listed(app)
        await press(pilot, *["backspace"] * 6, *"history")
        assert listed(app)[0] == "History"


async def test_a_choice_does_what_the_key_does() -> None:
    async with opened(RecordingFeed(running(gpu())), "ctrl+p", *"stop", "enter") as (app, pilot):
        assert isinstance(app.screen, ConfirmDialog)
        await press(pilot, "escape", "ctrl+p", *"undo", "enter")
        assert app.screen is app.dashboard
        said = "Undo: the run has had only one configuration"
        assert said in screen_text(app)


async def test_an_action_that_cannot_be_done_says_why_as_its_key_does() -> None:
    feed = RecordingFeed(running(gpu(), state=Phase.STARTING))
    async with opened(feed, "c") as (app, pilot):
        reason = "Checkpoint: the run is not training yet; its state is starting"
        assert reason in screen_text(app)
        await press(pilot, "f")
        assert reason not in screen_text(app)
        await press(pilot, "ctrl+p", *"checkp", "enter")
        assert reason in screen_text(app)


async def test_what_is_typed_right_behind_it_takes_effect_in_order() -> None:
    async with opened(RecordingFeed(running(gpu()))) as (app, pilot):
        type_at_once(app, "ctrl+p", *"theme", *["backspace"] * 5, *"restart", "enter", "4", "tab", "8")
        # Each screen opens when the keys before it are done, which takes long on a busy machine.
        for _ in range(200):
            await settle(pilot)
            if isinstance(app.screen, RestartDialog) and fields(app) == ["4", "8", "128"]:
                break
            await asyncio.sleep(0.05)
        assert isinstance(app.screen, RestartDialog)
        assert fields(app) == ["4", "8", "128"]


async def test_other_screens_list_their_own_keys_and_the_actions_of_the_dashboard() -> None:
    feed = RecordingFeed(machine(gpu(processes=(process(7),))))
    async with opened(feed, "o", "ctrl+p", size=(80, 24)) as (app, pilot):
        assert {"Filter", "Reverse", "Keys of this screen", "Back", "History"} <= set(listed(app))
        await press(pilot, *"filter", "enter", *"user:x")
        assert isinstance(app.screen, ProcessesScreen)
        assert "user:x" in screen_text(app)
        await press(pilot, "ctrl+p", *"history", "enter")
        assert type(app.screen).__name__ == "HistoryScreen"
        assert len(app.screen_stack) == 2
        await press(pilot, "ctrl+p", *"back", "enter")
        assert app.screen is app.dashboard
        await press(pilot, "k", "ctrl+p")
        assert "History" not in listed(app), "the question first"


async def test_over_a_list_of_keys_it_offers_what_the_screen_below_does() -> None:
    feed = RecordingFeed(running(gpu(processes=(process(7),))))
    async with opened(feed, "ctrl+p") as (app, pilot):
        of_dashboard = listed(app)
        await press(pilot, "escape", "question_mark")
        assert isinstance(app.screen, HelpDialog)
        await press(pilot, "ctrl+p")
        assert listed(app) == of_dashboard
        await press(pilot, *"history", "enter")
        assert [type(screen).__name__ for screen in app.screen_stack[1:]] == ["HistoryScreen"]
        await press(pilot, "escape", "question_mark", "ctrl+p", *"restart", "enter")
        assert isinstance(app.screen, RestartDialog)
        await press(pilot, "escape", "o", "ctrl+p")
        of_processes = listed(app)
        await press(pilot, "escape", "question_mark")
        assert isinstance(app.screen, KeysDialog)
        await press(pilot, "ctrl+p")
        assert listed(app) == of_processes
        await press(pilot, *"filter", "enter", *"user:x")
        assert isinstance(app.screen, ProcessesScreen)
        assert "user:x" in screen_text(app)


async def test_a_chosen_theme_is_used_and_remembered_or_says_why_not() -> None:
    kept: list[tuple[str, str]] = []

    def save(key: str, value: str) -> tuple[Path, str | None]:
        if kept:
            raise UsageError("config.toml: cannot be written: No space left on device")
        kept.append((key, value))
        return Path("config.toml"), None

    app = DashboardApp(RecordingFeed(running(gpu())), choices=Choices({}, save))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "ctrl+p", *"blind-light", "enter")
        assert app.theme == "memtop-colour-blind-light"
        while "theme memtop-colour-blind-light: saved in config.toml" not in screen_text(app):
            await pilot.pause(0.05)
        assert kept == [("theme", app.theme)]
        await press(pilot, "ctrl+p", *"nord", "enter")
        assert app.theme == "nord"
        while "theme nord: not saved: config.toml: cannot be written: No space left on device" not in screen_text(app):
            await pilot.pause(0.05)


async def test_it_is_searched_in_chinese() -> None:
    language.use("zh")
    async with opened(RecordingFeed(running(gpu())), "ctrl+p", *"主题", "enter") as (app, _):
        assert app.theme == "memtop"
    async with opened(RecordingFeed(running(gpu())), "ctrl+p", *"停止") as (app, pilot):
        assert "停止" in listed(app)[0]
        await press(pilot, "enter")
        assert isinstance(app.screen, ConfirmDialog)


async def test_it_does_not_open_on_a_terminal_that_is_too_small() -> None:
    async with opened(RecordingFeed(running(gpu()))) as (app, pilot):
        await resize(pilot, 40, 10)
        await press(pilot, "ctrl+p")
        await resize(pilot, 120, 40)
        assert app.screen is app.dashboard
