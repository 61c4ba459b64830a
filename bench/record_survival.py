"""Records docs/screenshots/survival.svg: a training that runs out of memory and goes on, as a
terminal shows it.

Everything in it is real: `memtop train` in a memory group of the kernel, keys that are typed, the
kernel's kill, the smaller batch. Only the waiting is shortened.

python -m bench.record_survival    (needs torch and the right to make memory cgroups; 3 minutes)
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from bench.record_demo import resident
from tests.groups import MemoryGroup, memory_group
from tests.terminal import Terminal
from tests.terminal_svg import Piece, document, row

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs" / "screenshots" / "survival.svg"
PLACE = Path("/tmp/survival")
COLUMNS, ROWS = 110, 34
MIB = 1 << 20
_SETTINGS = ("batch=8", "accumulation=4", "model.config.hidden_size=96", "save_every=5")
_FASTER = 1.4
"""How much faster than the recording the picture is."""
_LONGEST = 1.2
"""Seconds between two changes of the picture."""
_SHORTEST = 0.25
"""The same: screens that stay shorter are left out."""
_LAST = 4.0
"""Seconds that the last screen stays."""
_COLOURS = {"default": "#cdd9e5"}
_BACKGROUND = "#12171d"


class Frame(NamedTuple):
    """The screen at one moment."""

    time: float
    rows: tuple[tuple[Piece, ...], ...]


class Recorder:
    """Types, waits, and takes the screen whenever it has changed."""

    def __init__(self, screen: Terminal) -> None:
        self._screen = screen
        self.frames: list[Frame] = []

    def until(self, holds: Callable[[str], bool], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while True:
            text = self._screen.text()
            rows = tuple(tuple(_pieces(line)) for line in self._screen.cells())
            if not self.frames or self.frames[-1].rows != rows:
                self.frames.append(Frame(time.monotonic(), rows))
            if holds(text):
                return
            assert time.monotonic() < deadline, f"not shown within {seconds} s:\n{text}"
            time.sleep(0.1)

    def wait_for(self, words: str) -> None:
        self.until(lambda text: words in text)

    def rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda text: time.monotonic() > end)

    def type(self, *keys: str) -> None:
        for key in keys:
            self._screen.keys(key)
            self.rest(0.4)


def _pieces(line: list[tuple[str, str, str, bool, bool]]) -> Iterator[Piece]:
    for text, front, back, bold, reverse in line:
        colours = [_COLOURS.get(front, f"#{front}"), _BACKGROUND if back == "default" else f"#{back}"]
        if reverse:
            colours.reverse()
        yield Piece(text, *colours, bold=bold)


def record(group: MemoryGroup) -> list[Frame]:
    environment = {**os.environ, "COLORTERM": "truecolor", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    words = (
        "train",
        "first-run",
        "--name",
        "tiny",
        "--max-updates",
        "300",
        *(part for one in _SETTINGS for part in ("--set", one)),
    )
    command = group.inside(sys.executable, "-m", "memtop", *words)
    screen = Terminal(command, columns=COLUMNS, rows=ROWS, cwd=str(PLACE), environment=environment)
    recorder = Recorder(screen)
    try:
        recorder.wait_for("update 14")
        # Enough for this batch, too little for four times as much.
        group.limit(resident(group) + 130 * MIB)
        recorder.type("r")
        recorder.wait_for("accumulation")
        recorder.type("\x7f", "3", "2", "\t", "\x7f", "1")
        recorder.rest(3)
        recorder.type("\r", "\r")
        recorder.until(lambda text: any(f"attempt {number} " in text for number in (3, 4, 5)))
        recorder.wait_for("● training")
        recorder.rest(12)
        screen.keys("q")
    finally:
        screen.close()
    return recorder.frames


def animated(frames: list[Frame]) -> str:
    """The frames as an SVG that repeats itself. A row is drawn once for as long as it stays."""
    stays = [(after.time - before.time) / _FASTER for before, after in pairwise(frames)]
    frames = [*(frame for frame, seconds in zip(frames, stays, strict=False) if seconds >= _SHORTEST), frames[-1]]
    moments = [0.0]
    for before, after in pairwise(frames):
        moments.append(moments[-1] + min(_LONGEST, (after.time - before.time) / _FASTER))
    whole = moments[-1] + _LAST
    parts = [f'<rect width="0" height="0"><animate id="all" attributeName="x" dur="{whole:.1f}s" begin="0s;all.end"/></rect>\n']
    for y in range(ROWS):
        begin = 0
        for place in range(1, len(frames) + 1):
            if place < len(frames) and frames[place].rows[y] == frames[begin].rows[y]:
                continue
            drawn = "".join(row(frames[begin].rows[y], y, _BACKGROUND))
            end = whole if place == len(frames) else moments[place]
            if drawn:
                times = f'begin="all.begin+{moments[begin]:.2f}s" end="all.begin+{end:.2f}s"'
                parts.append(f'<g visibility="hidden"><set attributeName="visibility" to="visible" {times}/>{drawn}</g>\n')
            begin = place
    return document("".join(parts), COLUMNS, ROWS, _BACKGROUND)


def main() -> None:
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    for group in memory_group():
        frames = record(group)
    # A path of the same length.
    OUTPUT.write_text(animated(frames).replace(str(PLACE), "/home/ada/wrk"), encoding="utf-8")
    print(f"{OUTPUT}: {len(frames)} screens, {OUTPUT.stat().st_size // 1024} KiB", file=sys.stderr)


if __name__ == "__main__":
    main()
