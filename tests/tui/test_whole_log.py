"""The log of all attempts, and the wheel in the dashboard's log."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from textual.events import MouseScrollDown, MouseScrollUp
from textual.pilot import Pilot

from memtop.supervisor.run.effects import AddEvent
from memtop.supervisor.run.performer import Performer
from memtop.supervisor.run.processes.attempt import RunningAttempt
from memtop.supervisor.run.record.folder import RunFolder, create_run
from memtop.supervisor.run.record.ledger import Attempt, Ledger
from memtop.supervisor.run.record.output_log import OutputLog, OutputTimes, times_path
from memtop.supervisor.wire import Event
from memtop.tui.app import DashboardApp
from memtop.tui.attempt_log import AttemptLog, Section
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.line import plain
from memtop.tui.whole_log import WholeLogScreen, ending_of, sections_of
from tests.conftest import Runs
from tests.run.brain import spec
from tests.tui.support import SETTINGS, RecordingFeed, machine, press, resize, running, screen_text, settle

NOW = 1_790_000_000.0


def wrote(folder: RunFolder, number: int, text: bytes) -> Path:
    path = folder.attempt(number) / "output.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run whose first attempt ran out of memory and whose second one goes on."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    found = create_run(tmp_path, spec("tiny", NOW), fresh=False)
    with Ledger(found.ledger_path).transaction():
        pass
    ledger = Ledger(found.ledger_path)
    ledger.add_attempt(1, "start", SETTINGS, NOW)
    ledger.update_attempt(1, ended=NOW + 60, outcome="failed", updates=90)
    ledger.add_attempt(2, "out of memory", SETTINGS, NOW + 70)
    ledger.close()
    first = wrote(found, 1, b"".join(b"first %d\n" % n for n in range(50)))
    OutputLog(first).mark(NOW + 12)
    wrote(found, 2, b"".join(b"second %d\n" % n for n in range(50)) + b"Loss is NaN \x1b]52;c;aGk=\x07here\n")
    return found


def happened(folder: RunFolder, *events: tuple[int, float, str, str]) -> None:
    """Events in the ledger: attempt, seconds after the first start, kind and message."""
    ledger = Ledger(folder.ledger_path)
    for attempt, seconds, kind, message in events:
        ledger.add_event(Event(time=NOW + seconds, attempt=attempt, kind=kind, message=message))
    ledger.close()


@asynccontextmanager
async def opened(
    folder: RunFolder, size: tuple[int, int] = (100, 30)
) -> AsyncIterator[tuple[DashboardApp, Pilot[DashboardResult], WholeLogScreen]]:
    app = DashboardApp(RecordingFeed(machine(), running(folder=str(folder.path), name="tiny")))  # type: ignore[arg-type]
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        await press(pilot, "L")
        screen = app.screen
        assert isinstance(screen, WholeLogScreen)
        while not screen.page.logs:
            await pilot.pause(0.02)
        await settle(pilot)
        yield app, pilot, screen


@pytest.mark.parametrize("size", [(80, 24), (120, 35), (160, 50)])
async def test_all_attempts_with_their_times_and_ends(folder: RunFolder, size: tuple[int, int]) -> None:
    async with opened(folder, size) as (app, pilot, _):
        assert "second 49" in screen_text(app), "it opens at the end"
        await press(pilot, "left")
        assert "attempt 2  2026-09-21 14:14:30" in screen_text(app)
        await press(pilot, "home")
        text = screen_text(app)
        assert "attempt 1  2026-09-21 14:13:20" in text
        assert "14:13:32  first 0" in text, "the time that the supervisor noted"
        await press(pilot, "right")
        text = screen_text(app)
        assert "attempt 2" in text
        assert "–         second 0" in text, "no time is known yet"
        await press(pilot, "pageup")
        assert "attempt 1 failed at 14:14:20 after 00:01:00; update 90" in screen_text(app)


def test_the_end_of_an_attempt_that_was_killed_says_so() -> None:
    for signal, word in ((9, "killed"), (11, "failed")):
        ended = Attempt(
            number=1,
            reason="start",
            settings=None,
            started=NOW,
            ended=NOW + 60,
            outcome="failed",
            diagnosis={"ended_by": signal},
        )
        assert ending_of(ended).startswith(f"attempt 1 {word} at ")


async def test_search_finds_in_all_attempts_and_says_where(folder: RunFolder) -> None:
    async with opened(folder) as (app, pilot, _):
        await press(pilot, "slash", *"LOSS", "enter")
        while "match" not in screen_text(app):
            await pilot.pause(0.02)
        assert "match 1 of 1" in screen_text(app)
        await press(pilot, "slash", *" 7", "enter")
        while "of 2" not in screen_text(app):
            await pilot.pause(0.02)
        assert "match 2 of 2" in screen_text(app)
        assert "second 7" in screen_text(app)
        await press(pilot, "n")
        assert "match 1 of 2" in screen_text(app)
        assert "first 7" in screen_text(app)
        await press(pilot, "slash", *"nowhere", "enter")
        while "not found" not in screen_text(app):
            await pilot.pause(0.02)
        await press(pilot, "escape", "escape")
        assert app.screen is app.dashboard


async def test_lines_are_copied_by_osc_52_without_what_the_program_hid_in_them(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder) as (app, pilot, _):
        written: list[str] = []
        assert app._driver is not None
        monkeypatch.setattr(app._driver, "write", written.append)
        await press(pilot, "y")
        (sent,) = [text for text in written if "\x1b]52;c;" in text]
        copied = base64.b64decode(sent.split("\x1b]52;c;")[1].split("\a")[0]).decode()
        assert "\nsecond 49\n" in copied, "without the time"
        assert "Loss is NaN here" in copied
        assert "\x1b" not in copied
        assert f"copied {copied.count(chr(10)) + 1} lines" in screen_text(app)
        await pilot.mouse_down("#whole-log", offset=(12, 3))
        await pilot.hover("#whole-log", offset=(20, 5))
        await pilot.mouse_up("#whole-log", offset=(20, 5))
        await press(pilot, "y")
        assert "copied 3 marked lines" in screen_text(app)


def rows_of(screen: WholeLogScreen) -> list[str]:
    """The text of every row, without its time."""
    page = screen.page
    return [plain(page.text_of(number, with_time=False)) for number in range(page.virtual_size.height)]


async def test_events_stand_at_their_times_among_the_lines(folder: RunFolder) -> None:
    path = folder.attempt(2) / "output.log"
    path.write_bytes(b"early\n")
    OutputLog(path).mark(NOW + 80)
    path.write_bytes(b"early\nlate\n")
    OutputLog(path).mark(NOW + 90)
    path.write_bytes(b"early\nlate\nnewest\n")
    happened(
        folder,
        (0, -5, "queued", "waits for the run other"),
        (1, 11, "checkpoint", "before the first mark"),
        (1, 12, "checkpoint", "with the first mark"),
        (1, 60, "oom", "attempt 1: gpu_oom"),
        (2, 69, "remedy", "between the attempts"),
        (2, 85, "band", "GPU 0: safe -> edge, 86.2 %"),
        (2, 200, "checkpoint", "after every mark"),
    )
    async with opened(folder) as (app, pilot, screen):
        shown = rows_of(screen)
        assert shown[0] == "◆ waits for the run other"
        assert shown[1].startswith("── attempt 1 ")
        assert shown[2:4] == ["◆ before the first mark", "first 0"]
        assert shown[53:] == [
            "◆ with the first mark",
            "── attempt 1 failed at 14:14:20 after 00:01:00; update 90 ──",
            "◆ attempt 1: out of GPU memory",
            "◆ between the attempts",
            shown[57],
            "early",
            "◆ GPU 0: safe -> edge, 86.2 %",
            "late",
            "◆ after every mark",
            "newest",
        ]
        assert "14:14:45  ◆ GPU 0: safe -> edge, 86.2 %" in screen_text(app), "with its own time"
        happened(folder, (2, 300, "warning", "the disk is full"))
        while "the disk is full" not in screen_text(app):
            await pilot.pause(0.05)
        assert rows_of(screen)[-2:] == ["◆ the disk is full", "newest"]


async def test_events_are_searched_and_copied_with_the_lines(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    happened(folder, (1, 5, "oom", "gpu_oom at update 7"), (2, 100, "warning", "Loss is rising"))
    async with opened(folder) as (app, pilot, screen):
        written: list[str] = []
        assert app._driver is not None
        monkeypatch.setattr(app._driver, "write", written.append)
        await press(pilot, "slash", *"loss is", "enter")
        while "of 2" not in screen_text(app):
            await pilot.pause(0.02)
        assert "match 2 of 2" in screen_text(app), "the event; the line is above it"
        await press(pilot, "n")
        assert "match 1 of 2" in screen_text(app)
        await press(pilot, "y")
        (sent,) = [text for text in written if "\x1b]52;c;" in text]
        copied = base64.b64decode(sent.split("\x1b]52;c;")[1].split("\a")[0]).decode()
        assert "Loss is NaN here\n◆ Loss is rising" in copied
        await press(pilot, "slash", *"out of gpu", "enter")
        while "of 1" not in screen_text(app):
            await pilot.pause(0.02)
        assert "◆ out of GPU memory at update 7" in screen_text(app)
        happened(folder, (1, 1, "warning", "an earlier one"))
        while "◆ an earlier one" not in rows_of(screen):
            await pilot.pause(0.05)
        await press(pilot, "n")
        assert "◆ out of GPU memory at update 7" in screen_text(app), "found where it is now"


def test_a_row_is_found_where_it_stands(folder: RunFolder) -> None:
    ledger = Ledger(folder.ledger_path)
    attempt = ledger.attempts()[0]
    ledger.close()
    log = AttemptLog(folder, attempt)
    while log.extend():
        pass
    events = [Event(id=n, time=NOW + seconds, attempt=1, kind="", message="") for n, seconds in enumerate((99, -1, 12, 5))]
    section = Section(log, events)
    assert len(section) == 50 + 2 + 4
    assert [section.offset(section.at(offset)) for offset in range(len(section))] == list(range(len(section)))
    assert [event.id for event in section.events] == [1, 3, 2, 0]


def test_events_stand_behind_the_lines_if_no_time_was_noted(folder: RunFolder) -> None:
    ledger = Ledger(folder.ledger_path)
    attempt = ledger.attempts()[1]
    ledger.close()
    log = AttemptLog(folder, attempt)
    while log.extend():
        pass
    events = [Event(id=n, time=NOW + seconds, attempt=2, kind="", message="") for n, seconds in enumerate((69, 80, 71))]
    section = Section(log, events)
    assert [section.offset(row) for row in (events[0], -1, 50, events[2], events[1])] == [0, 1, 52, 53, 54]


async def test_a_new_run_in_the_folder_takes_the_place_of_the_old_one(folder: RunFolder) -> None:
    happened(folder, (1, 5, "warning", "of the old run"), (2, 100, "warning", "another of the old run"))
    async with opened(folder) as (app, pilot, screen):
        await press(pilot, "slash", *"nan", "enter")
        while "match 1 of 1" not in screen_text(app):
            await pilot.pause(0.02)
        create_run(folder.path.parent, spec("tiny", NOW + 1000), fresh=True)
        while screen.page.sections:
            await pilot.pause(0.05)
        await press(pilot, "n")
        assert "a new run has taken the place of this one: search again" in screen_text(app)
        with Ledger(folder.ledger_path).transaction():
            pass
        ledger = Ledger(folder.ledger_path)
        ledger.add_attempt(1, "start", SETTINGS, NOW + 1001)
        ledger.close()
        wrote(folder, 1, b"of the new run\n")
        happened(folder, (1, 1005, "warning", "the first event of the new run"))
        while "◆ the first event of the new run" not in screen_text(app):
            await pilot.pause(0.05)
        assert rows_of(screen)[1:] == ["of the new run", "◆ the first event of the new run"]


async def test_a_new_run_with_as_many_attempts_takes_the_place_of_the_old_one(folder: RunFolder) -> None:
    happened(folder, (1, 5, "warning", "of the old run"))
    async with opened(folder) as (_, pilot, screen):
        ledger = Ledger(folder.ledger_path)
        for number in (1, 2):
            ledger.update_attempt(number, started=NOW + 1000 * number, ended=None, outcome=None, updates=None)
            wrote(folder, number, b"new\n")
        ledger.close()
        while rows_of(screen)[-1] != "new":
            await pilot.pause(0.05)
        assert [row for row in rows_of(screen) if not row.startswith("──")] == ["◆ of the old run", "new", "new"]


async def test_only_what_has_changed_is_laid_out_again(folder: RunFolder) -> None:
    happened(folder, (1, 5, "warning", "early"))
    async with opened(folder) as (app, pilot, screen):
        first, second = screen.page.sections
        happened(folder, (2, 100, "warning", "the disk is full"))
        while "the disk is full" not in screen_text(app):
            await pilot.pause(0.05)
        assert screen.page.sections[0] is first
        assert screen.page.sections[1] is not second
        happened(folder, (1, 6, "warning", "a late one of attempt 1"))
        while screen.page.sections[0] is first:
            await pilot.pause(0.05)
        assert "◆ a late one of attempt 1" in rows_of(screen)


async def test_the_end_of_an_attempt_stays_while_its_log_grows(folder: RunFolder) -> None:
    async with opened(folder) as (_, _, screen):
        before = rows_of(screen)
        log = screen.page.logs[0]
        with log.path.open("ab") as file:
            file.write(b"after the end\n")
        while log.extend():
            pass
        assert len(log) == 51, "the page has not been laid out since"
        assert rows_of(screen) == before


async def test_it_stays_at_the_end_while_the_log_grows_and_where_the_user_scrolled(folder: RunFolder) -> None:
    async with opened(folder) as (app, pilot, screen):
        with (folder.attempt(2) / "output.log").open("ab") as file:
            file.write(b"later\n" * 40 + b"the newest")
        while "the newest" not in screen_text(app):
            await pilot.pause(0.05)
        await press(pilot, "home")
        with (folder.attempt(2) / "output.log").open("ab") as file:
            file.write(b" line\n")
        rows = screen.page._rows
        while screen.page._rows < rows:
            await pilot.pause(0.05)
        await pilot.pause(1.2)
        assert "first 0" in screen_text(app)


async def test_it_stays_at_the_end_when_the_terminal_becomes_smaller(folder: RunFolder) -> None:
    async with opened(folder, (100, 130)) as (app, pilot, _):
        assert "first 0" in screen_text(app), "everything fits"
        await resize(pilot, 100, 30)
        assert "Loss is NaN here" in screen_text(app)
        with (folder.attempt(2) / "output.log").open("ab") as file:
            file.write(b"later\n" * 40 + b"the newest\n")
        while "the newest" not in screen_text(app):
            await pilot.pause(0.05)
        await press(pilot, "home")
        await resize(pilot, 100, 20)
        assert "first 0" in screen_text(app), "where the user scrolled"


def test_a_long_log_with_a_hole_is_indexed_in_little_memory(tmp_path: Path, folder: RunFolder) -> None:
    path = folder.attempt(3) / "output.log"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.write(b"begin\n" * 1000)
        file.seek(2 << 30)
        file.write(b"after the hole\n" + b"end %d\n" % 7)
    with Ledger(folder.ledger_path).transaction():
        pass
    ledger = Ledger(folder.ledger_path)
    ledger.add_attempt(3, "start", SETTINGS, NOW + 100)
    attempt = ledger.attempts()[-1]
    ledger.close()
    log = AttemptLog(folder, attempt)
    while log.extend():
        pass
    log.extend()
    assert log.line(0) == "begin"
    assert log.line(len(log) - 2).endswith("after the hole")
    assert log.line(len(log) - 1) == "end 7"
    assert len(log) < 1100
    read = Path("/proc/self/io").read_text
    before = int(read().split()[1])
    assert log.line(1000) == "", "the line that the hole begins in"
    assert log.find("HOLE") == [len(log) - 2]
    assert int(read().split()[1]) - before < 32 << 20, "the hole is not read"


def test_a_match_across_two_parts_and_the_end_of_a_long_line_are_found(folder: RunFolder) -> None:
    path = wrote(folder, 2, b"x\n" * ((1 << 19) - 1) + b"needle\n" + b"bar 1%\r" * 20_000 + b"bar 100%\n")
    ledger = Ledger(folder.ledger_path)
    attempt = ledger.attempts()[1]
    ledger.close()
    log = AttemptLog(folder, attempt)
    assert log.path == path
    while log.extend():
        pass
    assert [log.line(number) for number in log.find("NEEDLE")] == ["needle"]
    assert log.line(len(log) - 1) == "bar 100%"


def test_times_survive_a_supervisor_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_bytes(b"one\n")
    OutputLog(path).mark(100.0)
    with times_path(path).open("ab") as file:
        file.write(b"half")
    path.write_bytes(b"one\ntwo\n")
    log = OutputLog(path)
    assert log.mark(200.0) is None
    path.write_bytes(b"one\ntwo\nthree\n")
    assert log.mark(203.0) is None, "not within the same seconds"
    times = OutputTimes(path)
    assert [times.at(4), times.at(8), times.at(9)] == [100.0, 200.0, None]


def test_an_event_stands_after_the_lines_that_it_follows(tmp_path: Path) -> None:
    """Although the size of the log was noted a moment before."""
    folder = create_run(tmp_path, spec("tiny", NOW), fresh=False)
    running = RunningAttempt(folder, 1, None)
    running.folder.mkdir(parents=True)
    mocks = {name: Mock() for name in ("outbox", "publisher", "agents", "sensors", "post", "read_reports")}
    performer = Performer(folder, Mock(), socket=tmp_path / "socket", is_displaced=lambda: False, **mocks)
    performer.attempt = running
    running.log_path.write_text("update 19\n")
    running.log.mark(NOW)
    saved = Event(id=1, time=NOW + 1.5, attempt=1, kind="checkpoint", message="checkpoint at update 20")
    running.log_path.write_text("update 19\nupdate 20\n")
    performer.perform(AddEvent(saved), Mock())
    running.log_path.write_text("update 19\nupdate 20\nupdate 21\n")
    running.log.mark(NOW + 6)
    log = AttemptLog(folder, Attempt(number=1, reason="start", settings=None, started=NOW - 1))
    log.extend()
    (section,) = sections_of([log], [saved])
    rows = [section.at(offset) for offset in range(len(section))]
    assert rows == [-1, 0, 1, saved, 2]


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_bytes(b"one\n")
    times_path(path).mkdir()
    assert "the times of the log's lines cannot be written" in (OutputLog(path).mark(1.0) or "")


def test_a_real_supervisor_notes_the_times(runs: Runs) -> None:
    begun = time.time()
    runs.memtop("train", "--name", "a", "--headless", "--", "sh", "-c", "echo hello; sleep 1.5; echo bye")
    times = OutputTimes(runs.path / "a" / "attempts" / "0001" / "output.log")
    moment = times.at(len("hello\n"))
    assert moment is not None
    assert begun <= moment <= time.time()


async def test_the_wheel_holds_the_dashboards_log(tmp_path: Path) -> None:
    app = DashboardApp(RecordingFeed(machine(), running()))  # type: ignore[arg-type]
    async with app.run_test(size=(120, 40)) as pilot:
        log = app.dashboard.log_panel
        log.append([f"line {n}" for n in range(200)])
        await settle(pilot)
        assert log.following
        await pilot._post_mouse_events([MouseScrollUp], "#log", (4, 2))
        await settle(pilot)
        assert not log.following
        held = log.scroll_offset.y
        log.append([f"more {n}" for n in range(50)])
        await settle(pilot)
        assert log.scroll_offset.y == held, "new lines do not move it"
        for _ in range(40):
            await pilot._post_mouse_events([MouseScrollDown], "#log", (4, 2))
        await settle(pilot)
        assert log.following


async def test_a_line_that_is_too_long_ends_at_a_word_and_is_whole_when_scrolled_sideways(folder: RunFolder) -> None:
    words = " ".join(f"value{n}={n * 1111}" for n in range(20))
    long = f"memtop: host memory level low -> extreme: {words} /a/path/{'x' * 120} 42.125 GiB"
    with (folder.attempt(2) / "output.log").open("a") as log:
        log.write(f"{long}\n")
    async with opened(folder, (80, 24)) as (app, pilot, screen):
        seen = [row for row in screen_text(app).splitlines() if "memtop: host memory" in row]
        assert seen[0].rstrip().endswith(" …")
        shown = seen[0].rstrip(" …").split("memtop: ")[1]
        assert long.startswith(f"memtop: {shown} "), "at the end of a word"
        place, whole = screen.page._rows - 1, f"{'–':<10}{long}"
        line = next(n for n in range(place, -1, -1) if "memtop: host" in plain(screen.page.text_of(n)))
        covered: set[int] = set()
        for _ in range(40):
            strip = screen.page.render_line(line - screen.page.scroll_offset.y).text.rstrip()
            aside = screen.page._aside
            for at, character in enumerate(strip):
                if character not in "… " and aside + at < len(whole):
                    assert whole[aside + at] == character
                    covered.add(aside + at)
            await press(pilot, "greater_than_sign")
        assert "42.125 GiB" in screen_text(app)
        assert covered >= {n for n, character in enumerate(whole) if character != " "}, "all of it can be read"
        await press(pilot, *["less_than_sign"] * 40)
        assert screen.page._aside == 0


async def test_the_dashboards_log_cuts_a_long_line_at_a_word_and_no_number() -> None:
    for text, end in (
        ("memtop: loader workers 2 -> 0: host memory is short, 12345.75 MiB of 23 456 789 MiB are free now, so it is", " …"),
        ("a" * 200, "a …"),
        ("一二三四五六七八九十" * 12, " …"),
    ):
        app = DashboardApp(RecordingFeed(machine(), running()))  # type: ignore[arg-type]
        async with app.run_test(size=(80, 24)) as pilot:
            for width in range(60, 110, 7):
                await resize(pilot, width, 24)
                log = app.dashboard.log_panel
                log.append([text])
                await settle(pilot)
                shown = next(
                    row
                    for y in range(log.scrollable_content_region.height)
                    if (row := log.render_line(y).text.rstrip()).startswith(text[:5])
                )
                if shown == text:
                    continue
                assert shown.endswith(end)
                kept = shown.removesuffix(" …")
                assert text.startswith(kept)
                assert not (kept[-1].isdigit() and text[len(kept)].isdigit())
