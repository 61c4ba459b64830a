"""ASCII mode: when it is used, and that every character keeps its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtop.tui import filters
from memtop.tui.app import DashboardApp
from memtop.tui.demo import RECORDING
from memtop.tui.filters import to_ascii, wanted
from memtop.tui.replay import StreamRecording
from tests.tui.pictures import MARKS, OF_THE_PERSON, SCENES, STORED, Scene, feed_of, opened, shown
from tests.tui.support import resize, screen_text


@pytest.mark.parametrize(
    ("environment", "encoding", "expected"),
    [
        ({}, "utf-8", False),
        ({}, "UTF8", False),
        ({}, "iso8859-1", True),
        ({}, "no-such-encoding", True),
        ({"MEMTOP_ASCII": "1"}, "utf-8", True),
        ({"MEMTOP_ASCII": "0"}, "ascii", False),
    ],
)
def test_when(environment: dict[str, str], encoding: str, expected: bool) -> None:
    assert wanted(environment, encoding) is expected


def test_every_sign_stays_as_wide_as_it_was() -> None:
    assert to_ascii("│ 62 °C ▸ █▓▒░┆ ⣿⠁ │") == "| 62  C > #=%:| #. |"
    assert to_ascii("日本ü") == "?????"


def test_marks_and_signs_mean_the_same_as_before() -> None:
    marks = "✓ survived  ✗ failed  ↻ remedy  ▸ settings  ! warning"
    assert to_ascii(marks) == "+ survived  X failed  @ remedy  > settings  ! warning"
    # "~" stands for a prediction, and ">" alone excludes the value itself.
    assert to_ascii("≥ 10.7 GiB  12.1 ± 0.3") == ">=10.7 GiB  12.1+/-0.3"


DRAWN = {("smallest", "end-failed"), ("smallest", "six-runs")}
"""What `make test` draws in ASCII. test_pictures.py checks the characters of all other screens."""


@pytest.mark.parametrize(
    ("scene", "sizes"),
    [
        pytest.param(scene, sizes, id=f"{name}-{scene.name}", marks=[] if (name, scene.name) in DRAWN else pytest.mark.long)
        for scene in (*SCENES, *STORED)
        for name, sizes in (("smallest", slice(-1, None)), ("larger", slice(-1)))
    ],
)
async def test_every_screen_is_ascii(scene: Scene, sizes: slice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of memtop's own characters is drawn as a question mark."""
    monkeypatch.setenv("MEMTOP_ASCII", "1")
    monkeypatch.chdir(tmp_path)
    unknown = set[str]()

    def drawn(text: str) -> str:
        unknown.update(character for character in text if to_ascii(character) == "?" != character)
        return to_ascii(text)

    monkeypatch.setattr(filters, "to_ascii", drawn)
    async with shown(scene, feed_of(scene, StreamRecording(RECORDING)), "memtop", monkeypatch) as pilot:
        assert isinstance(pilot.app, DashboardApp)
        for picture in scene.pictures:
            await opened(pilot, picture)
            for columns, rows in picture.sizes[sizes]:
                await resize(pilot, columns, rows)
                text = screen_text(pilot.app)
                assert text.isascii(), (picture.name, sorted({c for c in text if not c.isascii()}))
                assert [row for row in text.splitlines() if len(row) != columns] == [], picture.name
                for words in MARKS.get(picture.name, ()):
                    assert words in text, picture.name
    assert unknown <= OF_THE_PERSON
