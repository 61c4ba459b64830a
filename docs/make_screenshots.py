"""Writes docs/screenshots/*.svg from the demo's recording: the same pictures every time, on any
machine.

python docs/make_screenshots.py [FOLDER]
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from msgspec.structs import replace
from textual.pilot import Pilot

from memtop.supervisor import wire
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.tui.app import DashboardApp
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.demo import RECORDING
from memtop.tui.feed import Connected, FeedMessage
from memtop.tui.replay import StreamRecording

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Picture:
    """One screenshot: terminal size, number of GPUs, the moment and the keys pressed before it is
    taken."""

    name: str
    size: tuple[int, int]
    gpus: int = 2
    keys: tuple[str, ...] = ()
    failed: bool = False
    """After the run has run out of memory; else while it trains."""


PICTURES = (
    Picture("dashboard", (160, 50)),
    Picture("dashboard-80x24", (80, 24)),
    Picture("no-gpu", (120, 40), gpus=0),
    Picture("eight-gpus", (160, 50), gpus=8),
    Picture("restart", (120, 40), keys=("r", "backspace", "4")),
    Picture("presets", (120, 40), keys=("6",)),
    Picture("processes", (120, 40), keys=("o", "down", "down")),
    Picture("process", (120, 40), keys=("o", "down", "enter")),
    Picture("gpu", (120, 50), keys=("g",)),
    Picture("history", (120, 40), keys=("h", "u")),
    Picture("kill-strays", (120, 40), keys=("k", "space")),
    Picture("recovery", (120, 40), failed=True),
    Picture("configurations", (120, 40), keys=("u",)),
    Picture("speed", (120, 40), keys=("b",)),
    Picture("metrics", (120, 40), keys=("v",)),
    Picture("palette", (120, 40), keys=("ctrl+p",)),
    Picture("help", (120, 40), keys=("question_mark",)),
)


class RecordedMoment:
    """A feed that sends the recording up to one moment as if it were live, so that every action is
    offered."""

    read_only = False
    label: str | None = None

    def __init__(self, recording: StreamRecording, picture: Picture) -> None:
        self._messages = recording.between(-math.inf, _moment(recording, picture))
        self._gpus = picture.gpus

    async def messages(self) -> AsyncIterator[FeedMessage]:
        yield Connected()
        for number, message in enumerate(self._messages):
            if isinstance(message, wire.StateUpdate) and message.machine is not None:
                message = replace(message, machine=_with_gpus(message.machine, self._gpus))
            yield message
            if number % 50 == 0:
                await asyncio.sleep(0)
        await asyncio.Event().wait()

    async def request(self, make: Callable[[int], wire.Request]) -> AsyncIterator[wire.Answer]:
        yield wire.Answer(id=make(0).id, outcome=wire.Outcome.REFUSED, message="a recording")


def _moment(recording: StreamRecording, picture: Picture) -> float:
    """The last moment of training before the failure, or ten seconds after the failure."""
    states = [(row.time, row.message.run) for row in recording.rows if isinstance(row.message, wire.StateUpdate)]
    failure = next(moment for moment, run in states if run.proposal is not None)
    trained = (moment for moment, run in states if moment < failure and run.state is wire.Phase.TRAINING and run.updates)
    return failure + 10 if picture.failed else max(trained)


def _with_gpus(machine: MachineSnapshot, count: int) -> MachineSnapshot:
    """Fewer or more cards than the recording has; the added ones are copies."""
    if count == 0:
        return replace(machine, gpus=(), gpu_note="no NVIDIA GPU: no NVIDIA driver found")
    added = [replace(machine.gpus[n % 2], index=n, uuid=f"GPU-{n}-demo", processes=()) for n in range(2, count)]
    return replace(machine, gpus=(*machine.gpus, *added))


async def take(pictures: Sequence[Picture], recording: StreamRecording) -> AsyncIterator[tuple[str, str]]:
    """Name and SVG of each picture. All show the same moment on the same GPUs, so one dashboard
    serves them all."""
    # With an hour between samples no picture complains about the silence of a feed that stands
    # still.
    app = DashboardApp(RecordedMoment(recording, pictures[0]), interval=3600.0)
    async with app.run_test(size=pictures[0].size) as pilot:
        await _settle(pilot, 30)
        for picture in pictures:
            await pilot.resize_terminal(*picture.size)
            await _settle(pilot)
            for key in picture.keys:
                await pilot.press(key)
                await _settle(pilot)
            # A blinking cursor would make the picture depend on the moment.
            app.screen.set_focus(app.focused, scroll_visible=False)
            for cursor in app.screen.query("Input"):
                cursor.cursor_blink = False  # type: ignore[attr-defined]
            await pilot.pause()
            # Textual's ids depend on chance.
            yield picture.name, re.sub(r"terminal-\d+", f"memtop-{picture.name}", app.export_screenshot(title="memtop"))
            while app.screen is not app.dashboard:
                await pilot.press("escape")
                await _settle(pilot)


async def _settle(pilot: Pilot[DashboardResult], rounds: int = 4) -> None:
    for _ in range(rounds):
        await pilot.pause()


async def write_all(folder: Path) -> None:
    recording = StreamRecording(RECORDING)
    for _, alike in groupby(sorted(PICTURES, key=_moment_and_gpus), key=_moment_and_gpus):
        async for name, svg in take(list(alike), recording):
            path = folder / f"{name}.svg"
            path.write_text(svg, encoding="utf-8")
            print(path, file=sys.stderr)


def _moment_and_gpus(picture: Picture) -> tuple[bool, int]:
    return picture.failed, picture.gpus


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TZ"] = "UTC"
    time.tzset()
    asyncio.run(write_all(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
