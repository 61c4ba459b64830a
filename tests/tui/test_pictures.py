"""Every screen at three sizes, light and dark, as it was approved: tests/tui/pictures/*.svg.

`make test` compares most in dark, at the largest and the smallest size.

After a change of the screens: MEMTOP_DRAW_PICTURES=1 python -m pytest tests/tui/test_pictures.py,
then look at the pictures that git lists as changed.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.screen import Screen

import memtop.tui
from memtop.supervisor import language
from memtop.supervisor.language.catalogue import Catalogue, read_catalogue
from memtop.tui.app import DashboardApp
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.demo import RECORDING
from memtop.tui.filters import to_ascii
from memtop.tui.replay import StreamRecording
from tests.forking import LONG
from tests.tui.pictures import (
    CHINESE,
    HERE,
    MARKS,
    OF_THE_PERSON,
    SCENES,
    SIZES,
    STORED,
    THEMES,
    Picture,
    Scene,
    difference,
    feed_of,
    opened,
    shown,
    svg,
)
from tests.tui.support import resize, screen_text

DRAW = bool(os.environ.get("MEMTOP_DRAW_PICTURES"))
PICTURED: dict[type, list[str]] = {}
"""The names of the compared pictures, by class of screen."""
EVERY = [(scene, theme) for scene in (*SCENES, *STORED) for theme in THEMES]
LIGHT = ("machine", "failed", "spike")
"""The scenes whose light pictures `make test` compares."""


@pytest.fixture(scope="module")
def recording() -> StreamRecording:
    return StreamRecording(RECORDING)


@pytest.fixture
def compared(tmp_path: Path) -> Iterator[list[str]]:
    """Collects the pictures that differ, so that one run names all of them."""
    differing: list[str] = []
    yield differing
    assert not differing, "\n".join([f"these pictures have changed; the new ones are in {tmp_path}", *differing])


async def compare(pilot: Pilot[DashboardResult], picture: Picture, theme: str, folder: Path, differing: list[str]) -> None:
    """Take the picture at its sizes, and compare each with the approved one."""
    assert isinstance(pilot.app, DashboardApp)
    for columns, rows in picture.sizes if DRAW or LONG else dict.fromkeys((picture.sizes[0], picture.sizes[-1])):
        await resize(pilot, columns, rows)
        PICTURED.setdefault(type(pilot.app.screen), []).append(picture.name)
        if not language.in_use():  # nothing is drawn in ASCII in Chinese
            check_ascii(screen_text(pilot.app), picture.name)
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


def check_ascii(text: str, name: str) -> None:
    """A terminal without UTF-8 has a character for each of memtop's own."""
    assert {character for character in text if to_ascii(character) == "?" != character} <= OF_THE_PERSON, name
    assert [words for words in MARKS.get(name, ()) if words not in to_ascii(text)] == [], name


@pytest.mark.parametrize(
    ("scene", "theme"),
    [
        pytest.param(
            scene,
            theme,
            id=f"{scene.name}-{theme}",
            marks=[pytest.mark.long] if theme == "light" and scene.name not in LIGHT else [],
        )
        for scene, theme in EVERY
    ],
)
async def test_the_screens_look_as_approved(
    scene: Scene,
    theme: str,
    recording: StreamRecording,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compared: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    async with shown(scene, feed_of(scene, recording), THEMES[theme], monkeypatch) as pilot:
        for picture in scene.pictures:
            await opened(pilot, picture)
            await compare(pilot, picture, theme, tmp_path, compared)


@pytest.mark.parametrize("scene", CHINESE, ids=lambda scene: scene.name)
async def test_the_screens_look_as_approved_in_chinese(
    scene: Scene, recording: StreamRecording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: list[str]
) -> None:
    monkeypatch.setattr(language, "_catalogue", Catalogue(read_catalogue("zh")))
    async with shown(scene, feed_of(scene, recording), THEMES["dark"], monkeypatch) as pilot:
        for picture in scene.pictures:
            await opened(pilot, picture)
            await compare(pilot, picture._replace(sizes=SIZES[-1:]), "dark", tmp_path, compared)


def test_every_screen_is_pictured() -> None:
    """Those of the pictures above, in this process."""
    pictures = {picture.name for scene, _ in EVERY for picture in scene.pictures}
    if not pictures <= {name for names in PICTURED.values() for name in names}:
        pytest.skip("some pictures were not compared in this run")
    for module in pkgutil.walk_packages(memtop.tui.__path__, "memtop.tui."):
        importlib.import_module(module.name)
    own = {screen for screen in _below(Screen) if screen.__module__.startswith("memtop.tui.")}
    # The others are what these are made of.
    assert {screen for screen in own if not _below(screen)} - PICTURED.keys() == set()


def _below(kind: type) -> set[type]:
    return {one for child in kind.__subclasses__() for one in (child, *_below(child))}


def test_no_picture_is_left_of_a_screen_that_is_gone() -> None:
    english = {
        f"{picture.name}-{columns}x{rows}-{theme}.svg"
        for scene, theme in EVERY
        for picture in scene.pictures
        for columns, rows in picture.sizes
    }
    (columns, rows) = SIZES[-1]
    chinese = {f"{picture.name}-{columns}x{rows}-dark.svg" for scene in CHINESE for picture in scene.pictures}
    assert {path.name for path in HERE.glob("*.svg")} == english | chinese
