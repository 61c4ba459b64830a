"""The list of runs: what a row says, which columns fit, and what can be done with a run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot
from textual.widgets import Input

from memtop.supervisor import language, wire
from memtop.supervisor.names import shortened
from memtop.supervisor.run import starting
from memtop.supervisor.run.notices import targets_of
from memtop.supervisor.run.processes.environment import kept_by
from memtop.supervisor.run.record.folder import RunFolder, StateFile, create_run, write_json
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import Step
from memtop.supervisor.run.runs import COLUMNS, living_elsewhere, placed, row_of, table
from memtop.supervisor.units import GIB
from memtop.supervisor.wire import Phase, RunState
from memtop.tui import run_feed
from memtop.tui import runs as runs_screen
from memtop.tui.app import DashboardApp
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.metrics.screen import MetricsScreen
from memtop.tui.queue import QueueDialog
from memtop.tui.runs import RunsScreen
from memtop.tui.screen import ConfirmDialog
from tests.conftest import Runs
from tests.forking import Program
from tests.forking import run as run_forked
from tests.recovery.injected import PACED, TINY, inject
from tests.run.brain import spec
from tests.run.test_rollback import state
from tests.terminal import Terminal
from tests.tui.support import SETTINGS, RecordingFeed, machine, press, running, screen_text, settle

NOW = 1_790_000_000.0
SIZES = [(80, 24), *(pytest.param(size, marks=pytest.mark.long) for size in ((120, 35), (160, 50)))]


@pytest.fixture(autouse=True)
def no_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list has only the runs of the test, whatever else runs on this machine."""
    monkeypatch.setattr(runs_screen, "living_elsewhere", lambda path: [])


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list starts forks, which have imported torch already."""

    def run(command: list[str], *, check: bool, **options: Any) -> subprocess.CompletedProcess[str]:
        return run_forked(command, **options)

    monkeypatch.setattr(runs_screen, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(starting, "subprocess", SimpleNamespace(Popen=Program, DEVNULL=subprocess.DEVNULL))


def stored(runs_dir: Path, name: str, created: float, state: Phase = Phase.FINISHED, **fields: object) -> RunFolder:
    """A run that is over, with 20 updates."""
    folder = create_run(runs_dir, spec(name, created), fresh=False)
    known = {"settings": SETTINGS, "updates": 20, "total_updates": 40, "loss": 2.5, "samples_per_second": 31.25}
    run = RunState(name=name, folder=str(folder.path), state=state, attempt=1, created=created, **{**known, **fields})  # type: ignore[arg-type]
    write_json(folder.state_path, StateFile(run=run, socket="none"))
    ledger = Ledger(folder.ledger_path)
    ledger.add_attempt(1, "start", SETTINGS, created)
    ledger.update_attempt(1, peak_bytes=2 * GIB, ended=created + 60)
    ledger.add_reports(1, 0, [Step(update=n, loss=4 - n / 20, time=created + n) for n in range(1, 21)], 1)
    ledger.add_energy(1, {"GPU-0": 0.0})
    ledger.add_energy(1, {"GPU-0": 36 * 3600.0})
    ledger.close()
    return folder


def test_a_row_has_the_values_of_the_whole_run(tmp_path: Path) -> None:
    row = row_of(stored(tmp_path, "tiny", NOW - 7200))
    (head, line) = table([row], NOW)
    assert head.split() == ["name", "state", "program", "age", "update", "loss", "peak", "samples/s", "energy"]
    assert line.split("  ")[0] == "tiny"
    assert " ".join(line.split()) == "tiny finished first-run 2 h 20/40 2.5000 2.0 GiB 31.2 36 Wh"


def test_what_is_not_known_is_a_dash_and_an_unreadable_run_says_why(tmp_path: Path) -> None:
    new = row_of(create_run(tmp_path, spec("new", NOW), fresh=False))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{")
    lines = list(table([new, row_of(RunFolder(tmp_path / "bad"))], NOW + 5))
    assert " ".join(lines[1].split()) == "new created first-run 5 s – – – – –"
    assert lines[2].startswith("bad   unreadable: ")


def test_a_time_that_is_not_known_has_no_age_and_is_the_last(tmp_path: Path) -> None:
    """A record may be damaged. 0 is no date."""
    row = row_of(stored(tmp_path, "old", 0.0))
    age = next(column for column in COLUMNS if column.id == "age")
    assert (age.text(row, NOW), age.key(row)) == ("–", None)


def test_a_run_of_another_folder_is_marked_with_it(tmp_path: Path) -> None:
    here, there = tmp_path / "runs", tmp_path / "a-project-with-a-long-name" / "runs"
    rows = [row_of(stored(here, "mine", NOW)), row_of(stored(there, "far", NOW))]
    assert not any("folder" in line for line in table(rows, NOW)), "they are of one folder"
    rows[1] = rows[1]._replace(elsewhere=True)
    for width in (200, 80, 70):
        head, mine, far = table(rows, NOW, width)
        assert head.endswith("other folder")
        assert far.endswith("/runs")
        assert not mine.endswith("/runs")
        assert max(map(cell_len, (head, mine, far))) <= width


@pytest.mark.parametrize(
    ("words", "width", "text"),
    [
        ("short", 5, "short"),
        ("a-very-long-name", 9, "a-ve…name"),
        ("模型微调实验一", 9, "模型…验一"),
        ("abc", 1, "…"),
        ("abc", 0, ""),
    ],
)
def test_a_name_is_shortened_in_its_middle(words: str, width: int, text: str) -> None:
    assert shortened(words, width) == text
    assert cell_len(text) <= width


@pytest.mark.parametrize("name", ["n" * 60, "模型" * 30])
def test_names_are_shortened_before_states_and_columns_leave_in_order(tmp_path: Path, name: str) -> None:
    folder = stored(tmp_path, "a", NOW).path.rename(tmp_path / name)
    rows = [row_of(RunFolder(folder)), row_of(stored(tmp_path, "b", NOW, Phase.STOPPED))]
    seen = []
    for width in (200, 120, 80, 60, 40):
        columns = placed(rows, NOW, width)
        lines = list(table(rows, NOW, width))
        assert all(cell_len(line) <= width for line in lines) or width == 40
        assert all("finished" in line or "stopped" in line for line in lines[1:])
        seen.append([one.column.id for one in columns])
    assert seen[0] == ["name", "state", "program", "age", "update", "loss", "peak", "samples/s", "energy"]
    assert seen[-1] == ["name", "state", "update", "loss"]
    assert [set(more) >= set(fewer) for more, fewer in pairwise(seen)] == [True] * 4


@pytest.fixture(autouse=True)
def only_runs_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests that run at the same time have living runs, too."""

    def ours(runs_dir: Path) -> list[RunFolder]:
        return [one for one in living_elsewhere(runs_dir) if one.path.is_relative_to(tmp_path)]

    monkeypatch.setattr("memtop.tui.runs.living_elsewhere", ours)


@asynccontextmanager
async def listed(
    runs_dir: Path, *messages: object, size: tuple[int, int] = (120, 35), first: bool = False, wanted: int = 3
) -> AsyncIterator[tuple[DashboardApp, Pilot[DashboardResult], RunsScreen]]:
    """The list, after all runs were read."""
    feed = RecordingFeed(*(messages or (machine(),)))  # type: ignore[arg-type]
    app = DashboardApp(feed, runs_dir=runs_dir, begins_with_runs=first)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        if not first:
            await press(pilot, "a")
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        while len(screen.rows) < wanted:
            await pilot.pause(0.02)
        await settle(pilot)
        yield app, pilot, screen


def words(app: DashboardApp) -> str:
    """The text of a dialog without its borders."""
    return " ".join(screen_text(app).replace("│", " ").split())


def names(screen: RunsScreen) -> list[str]:
    return [row.name for row in screen.rows]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    stored(tmp_path, "old", NOW, Phase.FAILED, reason="out of memory", loss=None)
    stored(tmp_path, "mid", NOW + 10, loss=1.5)
    stored(tmp_path, "new", NOW + 20, Phase.STOPPED, loss=3.5)
    return tmp_path


@pytest.mark.parametrize("size", SIZES)
async def test_the_list_is_sorted_and_filtered(three: Path, size: tuple[int, int]) -> None:
    async with listed(three, size=size) as (app, pilot, screen):
        assert names(screen) == ["new", "mid", "old"], "the newest first"
        text = screen_text(app)
        for words in ("Runs 3", "age▾", "stopped", "finished", "failed", "20/40", "3.5000", "Enter Open", "r Resume"):
            assert words in text, words
        await press(pilot, "end")
        assert "out of memory" in screen_text(app), "why, for the run under the cursor"
        while screen._column != "loss":
            await press(pilot, "right")
        assert names(screen) == ["new", "mid", "old"], "unknown values are last"
        await press(pilot, "i")
        assert names(screen) == ["mid", "new", "old"]
        await press(pilot, "slash", *"o fail")
        assert names(screen) == ["old"]
        assert "Runs 1 of 3" in screen_text(app)
        await press(pilot, "enter", "escape")
        assert len(names(screen)) == 3
        await press(pilot, "escape")
        assert app.screen is app.dashboard


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
async def test_the_screen_names_the_folder_of_a_run_of_another_one(
    three: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    far = stored(tmp_path_factory.mktemp("a-folder-with-a-long-name") / "runs", "far-away-" * 4, NOW + 30)
    monkeypatch.setattr(runs_screen, "living_elsewhere", lambda path: [far])
    async with listed(three, size=size, wanted=4) as (app, _, screen):
        rows = [line.rstrip() for line in screen_text(app).splitlines()]
        (heading,) = (line for line in rows if "age" in line)
        assert heading.endswith("other folder")
        marked = [line for line in rows if line.endswith("/runs")]
        assert len(marked) == 1
        assert "far-aw" in marked[0]
        assert [row.elsewhere for row in screen.rows] == [True, False, False, False]


async def test_the_cursor_is_on_the_run_one_came_from_else_on_the_first_of_this_folder(
    three: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = stored(tmp_path_factory.mktemp("elsewhere") / "runs", "far", NOW + 30)
    monkeypatch.setattr(runs_screen, "living_elsewhere", lambda path: [far])
    for messages, wanted in (((), "new"), ((running(folder=str(three / "mid")),), "mid")):
        async with listed(three, *messages, wanted=4) as (_, pilot, screen):
            assert names(screen)[0] == "far"
            while screen.row is None or screen.row.name != wanted:
                await pilot.pause(0.02)


async def test_a_killed_run_is_listed_and_found_as_killed(three: Path) -> None:
    stored(three, "gone", NOW + 30, Phase.FAILED, reason="ended by signal 9 (SIGKILL)", ended_by=9)
    async with listed(three, wanted=4) as (app, pilot, screen):
        assert "killed" in screen_text(app)
        await press(pilot, "slash", *"killed")
        assert names(screen) == ["gone"]


async def test_a_run_is_opened_in_place_of_the_dashboard(three: Path) -> None:
    async with listed(three) as (app, pilot, _):
        await press(pilot, "down", "enter")
    assert app.return_value == DashboardResult("open", opens=three / "mid")


async def test_the_run_that_is_shown_already_only_needs_the_list_to_close(three: Path) -> None:
    async with listed(three, running(folder=str(three / "new"))) as (app, pilot, _):
        await press(pilot, "enter")
        assert app.screen is app.dashboard


async def test_the_first_screen_is_left_by_its_key(three: Path) -> None:
    async with listed(three, first=True) as (app, pilot, _):
        await press(pilot, "q")
    assert app.return_value == DashboardResult("detach")


async def test_ticked_runs_are_compared(three: Path) -> None:
    async with listed(three) as (app, pilot, _):
        await press(pilot, "space", "space", "v")
        screen = app.screen
        assert isinstance(screen, MetricsScreen)
        while "2 mid" not in screen_text(app):
            await pilot.pause(0.02)
        assert "Metrics of new" in screen_text(app)


async def test_a_run_is_resumed_after_a_question(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    async def resume(folder: Path, request: wire.Restart) -> AsyncIterator[wire.Answer]:
        asked.append(folder)
        yield wire.Answer(id=request.id, outcome=wire.Outcome.DONE, message="the run resumes")

    monkeypatch.setattr(run_feed, "resume", resume)
    async with listed(three) as (app, pilot, _):
        await press(pilot, "r")
        assert isinstance(app.screen, ConfirmDialog)
        assert "starts at the first update: nothing has been saved yet" in words(app)
        await press(pilot, "n")
        assert asked == []
        await press(pilot, "r", "y")
        await settle(pilot)
        assert asked == [three / "new"]
        assert "new: the run resumes" in screen_text(app)


async def test_what_a_restart_means_is_said_before(three: Path) -> None:
    whole = stored(three, "whole", NOW + 60, updates=40)
    state(whole.latest_state, 40)
    async with listed(three, wanted=4) as (app, pilot, screen):
        await press(pilot, "r")
        assert app.screen is screen
        assert "nothing is left to train: 40 updates are done" in screen_text(app)
    stored(three, "own", NOW + 120, settings=None, command=("python", "train.py"))
    async with listed(three, wanted=5) as (app, pilot, _):
        await press(pilot, "r")
        assert isinstance(app.screen, ConfirmDialog)
        assert "starts again from update 0, unless it resumes by itself" in words(app)


async def test_a_run_that_was_restarted_is_read_again(three: Path) -> None:
    async with listed(three) as (app, pilot, screen):
        folder = RunFolder(three / "old")
        run = RunState(name="old", folder=str(folder.path), state=Phase.FINISHED, attempt=2, created=NOW)
        write_json(folder.state_path, StateFile(run=run, socket="none"))
        while "failed" in screen_text(app):
            await pilot.pause(0.02)
        assert [row.run.attempt for row in screen.rows if row.run is not None] == [1, 1, 2]


async def test_a_read_only_list_resumes_nothing(three: Path) -> None:
    feed = RecordingFeed(machine())
    feed.read_only = True
    app = DashboardApp(feed, runs_dir=three, begins_with_runs=True)
    async with app.run_test(size=(120, 35)) as pilot:
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        while len(screen.rows) < 3:
            await pilot.pause(0.02)
        await press(pilot, "r")
        assert "read-only" in screen_text(app)


async def test_a_name_is_not_translated_under_the_cursor_either(three: Path) -> None:
    stored(three, "killed", NOW + 60)
    language.use("zh")
    try:
        async with listed(three, wanted=4) as (app, pilot, screen):
            for key in ("home", "down"):
                await press(pilot, key)
                assert any(row.split()[:1] in (["killed"], ["▸"]) and "killed" in row for row in screen_text(app).splitlines())
                assert names(screen)[0] == "killed"
    finally:
        language.use("en")


@pytest.mark.parametrize("size", SIZES)
async def test_the_form_that_queues_a_run_says_what_it_will_do(three: Path, size: tuple[int, int]) -> None:
    async with listed(three, size=size) as (app, pilot, _):
        await press(pilot, "down", "u")
        assert isinstance(app.screen, QueueDialog)
        text = screen_text(app)
        for words in (
            "Queue a run like mid",
            "mid-2",
            "accumulation",
            "when no other run",
            "the same settings, from the first",
        ):
            assert words in text, words
        app.screen.query_one("#batch").focus()
        await press(pilot, "backspace", "4")
        assert "effective batch 32 -> 16" in screen_text(app)
        await press(pilot, "z")
        assert "must be a whole number" in screen_text(app)
        assert app.screen.query_one("#confirm").disabled
        await press(pilot, "backspace")
        app.screen.query_one("#name").focus()
        await press(pilot, "end", "backspace", "backspace")
        assert "mid: a run has this name already" in screen_text(app)
        await press(pilot, "escape")
        assert isinstance(app.screen, RunsScreen)
    assert sorted(path.name for path in three.iterdir()) == ["mid", "new", "old"]


@pytest.mark.parametrize(("there", "wanted"), [("mid-2", "mid-3"), ("lr-2e-5", "lr-2e-5-2")])
async def test_the_name_of_a_queued_run_goes_on_with_the_next_number(three: Path, there: str, wanted: str) -> None:
    stored(three, there, NOW + 60)
    async with listed(three, wanted=4) as (app, pilot, screen):
        assert names(screen)[0] == there
        await press(pilot, "u")
        assert app.screen.query_one("#name", Input).value == wanted


async def test_a_run_is_queued_after_the_selected_one(here: Runs) -> None:
    """Real supervisors: the new run waits for the one under the cursor."""
    own = ("--then", "echo over", "--notify", "desktop", "--notify", "command:cat")
    there = {**here.environment, "ONLY_THERE": "1"}  # not in this process, which shows the dashboard
    here.memtop("train", "--name", "first", *own, "--detach", "--", "sh", "-c", "sleep 600", env=there)
    async with listed(here.path, wanted=1) as (app, pilot, screen):
        await press(pilot, "u")
        assert isinstance(app.screen, QueueDialog)
        text = " ".join(screen_text(app).replace("│", " ").split())
        assert "--notify: notifies the same targets (2)" in text
        assert "--then: at its end it runs echo over" in text
        assert "! first runs that, too, when it ends: before this run begins" in text
        assert "after first" in screen_text(app)
        assert "the same command" in screen_text(app)
        await press(pilot, "enter")
        while names(screen) != ["first-2", "first"] or "first-2: it waits" not in screen_text(app):
            await pilot.pause(0.05)
        await press(pilot, "up", "n")
        while "waits for one run, not for its turn" not in screen_text(app):
            await pilot.pause(0.05)
    document = here.wait("first-2", lambda d: d["reason"] is not None and "waits for first to end" in d["reason"])
    assert document["command"] == ["sh", "-c", "sleep 600"]
    first, second = RunFolder(here.path / "first"), RunFolder(here.path / "first-2")
    assert second.spec().then == "echo over"
    assert targets_of(second) == targets_of(first) != []
    assert kept_by(second) == kept_by(first)
    assert b"ONLY_THERE=1" in Path(f"/proc/{document['supervisor_pid']}/environ").read_bytes().split(b"\0")
    assert "stopped before it began" in here.memtop("stop", "first-2").stdout


async def test_a_waiting_run_is_put_first_and_begins_at_once(here: Runs) -> None:
    here.memtop("train", "--name", "first", "--detach", "--", "sh", "-c", "sleep 600")
    for name in ("second", "third"):
        here.memtop("train", "--name", name, "--detach", "--queue", "--", "sh", "-c", f"touch {name}; sleep 600")
    async with listed(here.path, wanted=3) as (app, pilot, screen):
        assert names(screen)[0] == "third"
        await press(pilot, "n")
        while "third is the next of the waiting runs" not in screen_text(app):
            await pilot.pause(0.05)
        here.wait("second", lambda d: d["reason"] == "waits behind third" or "first" in d["reason"])
        await press(pilot, "r")
        assert "begins at once" in screen_text(app)
        await press(pilot, "y")
        while not (here.root / "third").exists():
            await pilot.pause(0.05)
    assert not (here.root / "second").exists()


async def test_a_report_is_written_into_the_present_folder(
    three: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(place)
    async with listed(three) as (app, pilot, _):
        await press(pilot, "w")
        while "written to" not in screen_text(app):
            await pilot.pause(0.05)
        assert "<title>new</title>" in (place / "new.html").read_text()


async def test_reports_of_all_ticked_runs_are_written(
    three: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(place)
    async with listed(three) as (app, pilot, _):
        await press(pilot, "space", "space", "w")
        while "2 reports written: new.html, mid.html" not in screen_text(app):
            await pilot.pause(0.05)
        assert sorted(page.name for page in place.iterdir()) == ["mid.html", "new.html"]


@pytest.mark.long
async def test_a_stopped_run_is_exported_and_resumed_from_the_list(here: Runs) -> None:
    """A real run: its model is written, and it goes on where it was saved."""
    inject(here, PACED)
    here.memtop("train", "first-run", *TINY, "--max-updates", "200000", "--name", "a", "--detach")
    here.wait("a", lambda d: (d["updates"] or 0) >= 3)
    here.memtop("stop", "a")
    saved = here.show("a")["checkpoint"]["updates"]
    async with listed(here.path, wanted=1) as (app, pilot, _):
        for words in (f"✓ written to a-model: exported update {saved}", "a-model: exists already"):
            await press(pilot, "x")
            assert "Export a model" in screen_text(app)
            await press(pilot, "y")
            while words not in screen_text(app):
                await pilot.pause(0.05)
        assert (here.root / "a-model/config.json").exists()
        await press(pilot, "r")
        assert f"resumes at update {saved}" in screen_text(app)
        await press(pilot, "y")
        again = await asyncio.to_thread(here.wait, "a", lambda d: len(d["attempts"]) == 2 and (d["updates"] or 0) > saved)
        assert again["attempts"][1]["start_updates"] == saved
        while "training" not in screen_text(app):
            await pilot.pause(0.05)


async def test_new_runs_appear_and_removed_ones_leave(three: Path) -> None:
    async with listed(three) as (_, pilot, screen):
        stored(three, "newest", NOW + 30)
        (three / "old").rename(three.parent / "moved-away")
        screen._read()
        while names(screen) != ["newest", "new", "mid"]:
            await pilot.pause(0.02)


def test_a_living_run_of_another_folder_is_found(tmp_path: Path) -> None:
    folder = create_run(tmp_path / "elsewhere", spec("far", NOW), fresh=False)
    code = "import sys; print('ready', flush=True); sys.stdin.readline()"
    command = [sys.executable, "-c", code, "memtop.supervisor", str(folder.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert folder.path in [one.path for one in living_elsewhere(tmp_path / "here")]
        assert folder.path not in [one.path for one in living_elsewhere(tmp_path / "elsewhere")], "it is in the list already"
    finally:
        process.communicate("\n")


def test_memtop_alone_opens_the_list_in_a_terminal_and_prints_help_elsewhere(runs: Runs) -> None:
    # Newer than any other run that lives on this machine, so that it is the first of the list.
    stored(Path(runs.path), "here", time.time() + 3600)
    screen = Terminal([sys.executable, "-m", "memtop"], columns=100, rows=30, cwd=str(runs.root), environment=runs.environment)
    try:
        screen.wait_for("▸  here")
        screen.keys("\r")
        screen.wait_for("finished at update 20")
        screen.keys("a")
        screen.wait_for("▸  here")
        screen.keys("q")
        screen.keys("q")
        assert screen.wait() == 0
    finally:
        screen.close()
    assert "Train:" in runs.memtop().stdout
