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
from msgspec.structs import replace
from textual.pilot import Pilot

from memtop.supervisor import language
from memtop.supervisor.language.catalogue import Catalogue, read_catalogue
from memtop.supervisor.run.record.folder import RunFolder, create_run
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.record.output_log import OutputLog
from memtop.supervisor.wire import Event, Phase
from memtop.tui import runs
from memtop.tui.app import DashboardApp
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.demo import RECORDING
from memtop.tui.replay import StreamRecording
from memtop.tui.runs import RunsScreen
from memtop.tui.whole_log import WholeLogScreen
from tests.run.brain import spec
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
from tests.tui.support import SETTINGS, gpu, machine, running, screen_text, settle
from tests.tui.test_runs import NOW, stored
from tests.tui.test_spike import SPIKE

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


LOG = (
    (1, 0, "memtop: GPU 0: NVIDIA RTX A4500, 20.0 GiB"),
    *((1, 20 + 2 * n, f"update {n}  loss {4 - n / 20:.4f}  lr 0.0002  31.2 samples/s") for n in range(1, 13)),
    (1, 46, "memtop: update 13: out of GPU memory in backward: 3.25 GiB requested, 2.81 GiB free"),
    (2, 70, "memtop: resumed from train_latest_state at update 10, 320 samples"),
    *((2, 70 + 2 * n, f"update {n}  loss {4 - n / 20:.4f}  lr 0.0002  29.4 samples/s") for n in range(11, 16)),
)
"""Attempt, seconds after the start, and line."""
HAPPENED = (
    (1, 40, "checkpoint", "update 10 saved, 1.2 GiB"),
    (1, 43, "band", "GPU 0: safe -> danger, 97.4 %"),
    (1, 47, "oom", "attempt 1: gpu_oom at update 13"),
    (2, 66, "remedy", "it goes on with: batch 8 -> 4, accumulation 4 -> 8"),
    (2, 95, "band", "GPU 0: safe -> edge, 86.2 %"),
)


def logged(runs_dir: Path) -> RunFolder:
    """A run that has survived once, with its output, the times of its lines, and its events."""
    folder = create_run(runs_dir, spec("qwen-sft", NOW), fresh=False)
    ledger = Ledger(folder.ledger_path)
    ledger.add_attempt(1, "start", SETTINGS, NOW)
    ledger.update_attempt(1, ended=NOW + 48, outcome="failed", updates=12)
    ledger.add_attempt(2, "out of GPU memory", replace(SETTINGS, batch=4, accumulation=8), NOW + 65)
    for number, second, kind, message in HAPPENED:
        ledger.add_event(Event(time=NOW + second, attempt=number, kind=kind, message=message))
    ledger.close()
    for number, second, text in LOG:
        path = folder.attempt(number) / "output.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{text}\n")
        OutputLog(path).mark(NOW + second)
    return folder


@pytest.mark.parametrize("theme", THEMES)
async def test_the_whole_log_looks_as_approved(
    theme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = logged(Path("runs"))
    feed = Still([running(gpu(), name="qwen-sft", folder=str(folder.path))])
    async with shown(feed, THEMES[theme], monkeypatch) as pilot:
        whole_log = Picture("whole-log", ("L",))
        await opened(pilot, whole_log)
        screen = pilot.app.screen
        assert isinstance(screen, WholeLogScreen)
        while not screen.page.logs:
            await pilot.pause(0.02)
        await compare(pilot, whole_log, theme, tmp_path, compared)
        found = Picture("whole-log-search", ("slash", *"safe", "enter"))
        await opened(pilot, found)
        while "match 2 of 2" not in screen_text(pilot.app):
            await pilot.pause(0.02)
        await compare(pilot, found, theme, tmp_path, compared)


@pytest.mark.parametrize("theme", THEMES)
async def test_the_question_after_a_spike_looks_as_approved(
    theme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: list[str]
) -> None:
    async with shown(Still([running(gpu(), spike=SPIKE)]), THEMES[theme], monkeypatch) as pilot:
        await compare(pilot, Picture("spike"), theme, tmp_path, compared)
