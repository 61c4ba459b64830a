"""What the user chooses on the screens: later dashboards have it, and a wrong value is said."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from textual.pilot import Pilot

from memtop.cli.configuration import KEYS, variable_of
from memtop.cli.dashboard import remember, remembered
from memtop.supervisor.errors import UsageError
from memtop.tui.app import DashboardApp
from memtop.tui.choices import DEFAULTS, Choices, offered
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.metrics.screen import MetricsScreen
from memtop.tui.processes.rows import Order, ProcessView
from memtop.tui.processes.screen import ProcessesScreen
from memtop.tui.runs import RunsScreen
from tests.tui.support import RecordingFeed, gpu, press, process, running, screen_text, settle

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ONE_BY_ONE = (
    *("o", "right", "i", "t", "escape"),
    *("v", "x", "x", "o", "o", "y", "escape"),
    *("a", "right", "right", "escape"),
)
"""The keys of all choices but the theme."""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's configuration, which does not exist yet."""
    for key in KEYS:
        monkeypatch.delenv(variable_of(key), raising=False)
    monkeypatch.delenv("TEXTUAL_THEME", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "memtop/config.toml"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)


def dashboard(tmp_path: Path, choices: Choices, *, read_only: bool = False) -> DashboardApp:
    feed = RecordingFeed(running(gpu(processes=(process(7), process(8)))))
    feed.read_only = read_only
    return DashboardApp(feed, runs_dir=tmp_path / "runs", choices=choices)


async def pressed(app: DashboardApp, keys: Sequence[str]) -> None:
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot)
        await press(pilot, *keys)


async def told(pilot: Pilot[DashboardResult], text: str) -> None:
    """Wait for this text on the screen; a choice is saved a little later."""
    while text not in " ".join(screen_text(pilot.app).split()):  # type: ignore[arg-type]
        await pilot.pause(0.05)


async def chosen(pilot: Pilot[DashboardResult]) -> list[object]:
    """What the three screens begin with."""
    app, found = pilot.app, list[object]()
    await press(pilot, "o")
    assert isinstance(app.screen, ProcessesScreen)
    found += [app.screen._order, app.screen._view]
    await press(pilot, "escape", "v")
    assert isinstance(app.screen, MetricsScreen)
    found += [app.screen._axis, app.screen._smoothing, app.screen._scale]
    await press(pilot, "escape", "a")
    assert isinstance(app.screen, RunsScreen)
    found += [app.screen._column, app.screen._descending]
    await press(pilot, "escape")
    return found


async def test_a_message_says_once_that_choices_are_saved(file: Path, tmp_path: Path) -> None:
    app = dashboard(tmp_path, Choices(remembered()[0], remember))
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "v", "x")
        await told(pilot, f"metrics-axis samples: saved in {file}; later choices are saved, too")
        await press(pilot, "o")
        while "smoothing" not in file.read_text():
            await pilot.pause(0.05)
        await settle(pilot)
        assert "metrics-smoothing 8: saved" not in screen_text(app)


async def test_the_next_dashboard_begins_with_what_was_chosen(file: Path, tmp_path: Path) -> None:
    write(file, '# mine\non-oom = "ask"\n')
    await pressed(dashboard(tmp_path, Choices(remembered()[0], remember)), ONE_BY_ONE)
    assert file.read_text().startswith('# mine\non-oom = "ask"\n')
    assert tomllib.loads(file.read_text()) == {
        "on-oom": "ask",
        "processes-sort": "sm up",
        "processes-view": "tree",
        "metrics-axis": "tokens",
        "metrics-smoothing": 32,
        "metrics-scale": "log",
        "runs-sort": "loss down",
    }
    app = dashboard(tmp_path, Choices(remembered()[0], remember))
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot)
        assert await chosen(pilot) == [Order("sm", False), ProcessView.TREE, "tokens", 32, "log", "loss", True]
        await press(pilot, "v")
        assert "by tokens, smoothed over 32 dots, log scale" in screen_text(app)


@pytest.mark.parametrize(("web", "read_only"), [(True, True), (True, False), (False, True)])
async def test_only_a_read_only_browser_writes_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, web: bool, read_only: bool
) -> None:
    monkeypatch.setattr(DashboardApp, "is_web", property(lambda self: web))
    app = dashboard(tmp_path, Choices(remembered()[0], remember), read_only=read_only)
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot)
        await press(pilot, *ONE_BY_ONE)
        app.action_choose_theme("memtop-light")
        assert app.theme == "memtop-light"
        assert await chosen(pilot) == [Order("sm", False), ProcessView.TREE, "tokens", 32, "log", "loss", True], "here"
    assert file.exists() is not (web and read_only)


async def test_what_cannot_be_kept_is_said_and_used_all_the_same(file: Path, tmp_path: Path) -> None:
    def refuse(key: str, value: str) -> tuple[Path, str | None]:
        raise UsageError("config.toml: cannot be written: No space left on device")

    app = dashboard(tmp_path, Choices({}, refuse))
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "o", "t")
        await told(pilot, "processes-view tree: not saved:")
        await told(pilot, "No space left on device")
        await press(pilot, "escape", "o")
        assert isinstance(app.screen, ProcessesScreen)
        assert app.screen._view is ProcessView.TREE


async def test_keys_in_a_row_are_saved_once_and_never_by_the_thread_that_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = list[tuple[str, str]]()

    def save(key: str, value: str) -> tuple[Path, str | None]:
        assert threading.current_thread() is not threading.main_thread()
        saved.append((key, value))
        return Path("config.toml"), None

    monkeypatch.setattr("memtop.tui.screen.SAVE_SECONDS", 600.0)
    app = dashboard(tmp_path, Choices({}, save))
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "o", "right", "right", "i", "t", "t", "escape", "v", "y")
        assert saved == [], "the user may go on"
    assert sorted(saved) == [("metrics-scale", "log"), ("processes-sort", "bw up"), ("processes-view", "flat")], "at the end"


async def test_what_comes_first_is_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTOP_METRICS_AXIS", "time")
    app = dashboard(tmp_path, Choices(remembered()[0], remember))
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "v", "x")
        await told(pilot, f"metrics-axis update: saved in {file}; but MEMTOP_METRICS_AXIS comes first")
        await press(pilot, "y")
    assert remembered() == ({"metrics-axis": "time", "metrics-scale": "log"}, [])


def test_a_wrong_value_is_one_line_and_ignored(file: Path) -> None:
    write(
        file,
        'theme = 5\nprocesses-sort = "vram"\nprocesses-view = "job"\nruns-sort = "-age"\n'
        'metrics-axis = "updates"\nmetrics-smoothing = 9\nmetrics-scale = "logarithmic"\n',
    )
    values, lines = remembered()
    assert values == {}
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == list(DEFAULTS), "one line for each"
    assert lines[0] == f"{file}: theme 5: give text in quotes; it is ignored"
    assert "processes-sort 'vram': unknown, and ignored; did you mean vram " in lines[1]
    assert lines[4] == f"{file}: metrics-axis 'updates': unknown, and ignored; did you mean update?"
    assert lines[5] == f"{file}: metrics-smoothing '9': unknown, and ignored; there are 0, 8, 32, 128"
    write(file, 'metrics-smoothing = 32\nruns-sort = "loss up"\n')
    assert remembered() == ({"metrics-smoothing": "32", "runs-sort": "loss up"}, [])


@pytest.mark.parametrize("begins_with_runs", [False, True])
@pytest.mark.parametrize("size", [(80, 24), (160, 40)])
async def test_an_unknown_theme_is_said_once_in_the_dashboard(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], begins_with_runs: bool
) -> None:
    monkeypatch.setenv("TEXTUAL_THEME", "textual-ligth")
    values, ignored = remembered()
    choices = Choices(values, remember, ignored)
    for words in (True, False):
        app = DashboardApp(
            RecordingFeed(running(gpu())), runs_dir=tmp_path / "runs", choices=choices, begins_with_runs=begins_with_runs
        )
        async with app.run_test(size=size, notifications=True) as pilot:
            await settle(pilot)
            assert len(app.screen.query("Toast")) == words
            assert ("TEXTUAL_THEME: theme" in screen_text(app)) is words
            assert app.theme == "memtop"


def test_every_choice_is_a_key_of_the_configuration_and_its_default_can_be_chosen() -> None:
    assert set(DEFAULTS) <= set(KEYS)
    assert [key for key, value in DEFAULTS.items() if value not in offered(key)] == []
