"""Every screen at three sizes, light and dark, as it was approved: tests/tui/pictures/*.svg.

After a change of the screens: MEMTOP_DRAW_PICTURES=1 python -m pytest tests/tui/test_pictures.py,
then look at the pictures that git lists as changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from textual.pilot import Pilot

from memtop.supervisor import language
from memtop.supervisor.language.catalogue import Catalogue, read_catalogue
from memtop.supervisor.wire import Phase
from memtop.tui import runs
from memtop.tui.app import DashboardApp
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.demo import RECORDING
from memtop.tui.replay import StreamRecording
from memtop.tui.runs import RunsScreen
from tests.tui.pictures import (
    CHINESE,
    HERE,
    SCENES,
    SIZES,
    THEMES,
    Picture,
    Scene,
    Still,
    difference,
    feed_of,
    opened,
    shown,
    svg,
)
from tests.tui.support import machine, settle
from tests.tui.test_runs import NOW, stored

DRAW = bool(os.environ.get("MEMTOP_DRAW_PICTURES"))
EVERY = [(scene, theme) for scene in SCENES for theme in THEMES]


@pytest.fixture(scope="module")
def recording() -> StreamRecording:
    return StreamRecording(RECORDING)


@pytest.fixture
def compared(tmp_path: Path) -> Iterator[list[str]]:
    """Collects the pictures that differ, so that one run names all of them."""
    differing: list[str] = []
    yield differing
    assert not differing, "\n".join([f"these pictures have changed; the new ones are in {tmp_path}", *differing])


async def compare(
    pilot: Pilot[DashboardResult],
    picture: Picture,
    theme: str,
    folder: Path,
    differing: list[str],
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> None:
    """Take the picture at every size, and compare each with the approved one."""
    assert isinstance(pilot.app, DashboardApp)
    for columns, rows in sizes:
        await pilot.resize_terminal(columns, rows)
        await settle(pilot)
        name, found = f"{picture.name}-{columns}x{rows}-{theme}.svg", svg(pilot.app)
        approved = HERE / name
        if DRAW:
            HERE.mkdir(exist_ok=True)
            approved.write_text(found, encoding="utf-8")
        elif not approved.exists():
            differing.append(f"{name}: there is no approved picture")
        elif (expected := approved.read_text(encoding="utf-8")) != found:
            (folder / name).write_text(found, encoding="utf-8")
            differing.append(f"{name}\n{difference(expected, found)}")


@pytest.mark.parametrize(("scene", "theme"), EVERY, ids=[f"{scene.name}-{theme}" for scene, theme in EVERY])
async def test_the_screens_look_as_approved(
    scene: Scene,
    theme: str,
    recording: StreamRecording,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compared: list[str],
) -> None:
    async with shown(feed_of(scene, recording), THEMES[theme], monkeypatch) as pilot:
        for picture in scene.pictures:
            await pilot.resize_terminal(*SIZES[0])
            await settle(pilot)
            await opened(pilot, picture)
            await compare(pilot, picture, theme, tmp_path, compared)
            while not scene.failed and pilot.app.screen is not pilot.app.get_default_screen():
                await pilot.press("escape")
                await settle(pilot)


@pytest.mark.parametrize("scene", CHINESE, ids=lambda scene: scene.name)
async def test_the_screens_look_as_approved_in_chinese(
    scene: Scene, recording: StreamRecording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: list[str]
) -> None:
    monkeypatch.setattr(language, "_catalogue", Catalogue(read_catalogue("zh")))
    async with shown(feed_of(scene, recording), THEMES["dark"], monkeypatch) as pilot:
        for picture in scene.pictures:
            await pilot.resize_terminal(*SIZES[-1])
            await settle(pilot)
            await opened(pilot, picture)
            await compare(pilot, picture, "dark", tmp_path, compared, SIZES[-1:])


@pytest.mark.parametrize("theme", THEMES)
async def test_the_list_of_runs_looks_as_approved(
    theme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # No path of this machine, and no present time.
    runs_dir = Path("runs")
    for place, state in enumerate((Phase.FINISHED, Phase.FAILED, Phase.STOPPED, Phase.FINISHED)):
        why = "out of GPU memory" if state is Phase.FAILED else None
        stored(runs_dir, f"qwen-sft-lr-{place}e-5", NOW - 7000 * place, state, loss=1.5 + place / 7, reason=why)
    monkeypatch.setattr(runs, "time", SimpleNamespace(time=lambda: NOW + 60))
    monkeypatch.setattr(runs, "living_elsewhere", lambda path: [])
    async with shown(Still([machine()]), THEMES[theme], monkeypatch, runs_dir=runs_dir, begins_with_runs=True) as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, RunsScreen)
        while len(screen.rows) < 4:
            await pilot.pause(0.02)
        await pilot.press("down", "space")
        await settle(pilot)
        await compare(pilot, Picture("runs"), theme, tmp_path, compared)
        queue = Picture("queue", ("u",))
        await opened(pilot, queue)
        await compare(pilot, queue, theme, tmp_path, compared)
