"""Every screen at every size, light and dark: taken from the demo's recording, from invented
machines and from stored runs."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace
from rich.color import Color
from textual.pilot import Pilot

from memtop.supervisor import wire
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.tui.app import DashboardApp
from memtop.tui.choices import Choices
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.feed import Connected, Feed, FeedMessage
from memtop.tui.replay import StreamRecording
from tests.terminal_svg import Piece, document, drawn
from tests.tui.support import GpuSample, gpu, machine, settle

SIZES = ((160, 50), (120, 35), (80, 24))
THEMES = {"dark": "memtop", "light": "textual-light"}


class Picture(NamedTuple):
    """A screen and the keys that open it."""

    name: str
    keys: tuple[str, ...] = ()


class Scene(NamedTuple):
    """Pictures of one dashboard."""

    name: str
    pictures: tuple[Picture, ...]
    gpus: int = 2
    failed: bool = False


SCENES = (
    Scene(
        "training",
        (
            Picture("dashboard"),
            Picture("restart", ("r", "backspace", "4")),
            Picture("presets", ("6",)),
            Picture("processes", ("o", "down", "down")),
            Picture("process", ("o", "down", "enter")),
            Picture("gpu", ("g",)),
            Picture("host", ("m",)),
            Picture("history", ("h",)),
            Picture("metrics", ("v",)),
            Picture("one-panel", ("z",)),
            Picture("kill", ("k", "space")),
            Picture("configurations", ("u",)),
            Picture("speed", ("b",)),
            Picture("help", ("question_mark",)),
            Picture("palette", ("ctrl+p",)),
        ),
    ),
    Scene("no-gpu", (Picture("no-gpu"),), gpus=0),
    Scene("eight-gpus", (Picture("eight-gpus"),), gpus=8),
    Scene("failed", (Picture("recovery"),), failed=True),
    Scene("machine", (Picture("machine"),)),
)


CHINESE = (
    Scene("training", (Picture("dashboard-zh"), Picture("restart-zh", ("r", "backspace", "4")))),
    Scene("failed", (Picture("recovery-zh"),), failed=True),
)
"""In Chinese, on the smallest terminal, dark."""


class Still:
    """A feed that sends messages and then nothing, as if it were live: every action is offered."""

    read_only = False
    label: str | None = None

    def __init__(self, messages: list[FeedMessage]) -> None:
        self._messages = messages

    async def messages(self) -> AsyncIterator[FeedMessage]:
        yield Connected()
        for number, message in enumerate(self._messages):
            yield message
            if number % 50 == 0:
                await asyncio.sleep(0)
        await asyncio.Event().wait()

    async def request(self, make: Callable[[int], wire.Request]) -> AsyncIterator[wire.Answer]:
        yield wire.Answer(id=make(0).id, outcome=wire.Outcome.REFUSED, message="a recording")


def feed_of(scene: Scene, recording: StreamRecording) -> Feed:
    """The dashboard of a scene."""
    if scene.name == "machine":
        return Still([_machine(second) for second in range(200)])
    messages = recording.between(-math.inf, _moment(recording, scene))
    return Still([_with_gpus(message, scene.gpus) for message in messages])


def _machine(second: int) -> MachineSnapshot:
    """Four cards that fill up, one after the other."""
    cards: list[GpuSample] = []
    for index in range(4):
        share = min(0.95, 0.3 + 0.1 * index + 0.05 * math.sin(second / 9 + index) + 0.001 * second * (index == 3))
        cards.append(gpu(index, share, utilization_fraction=0.5 + 0.5 * math.sin(second / 20 + index)))
    return machine(*cards, time=1_790_000_000.0 + second)


def _moment(recording: StreamRecording, scene: Scene) -> float:
    """The last moment of training before the failure, or ten seconds after the failure."""
    states = [(row.time, row.message.run) for row in recording.rows if isinstance(row.message, wire.StateUpdate)]
    failure = next(moment for moment, run in states if run.proposal is not None)
    trained = (moment for moment, run in states if moment < failure and run.state is wire.Phase.TRAINING and run.updates)
    return failure + 10 if scene.failed else max(trained)


def _with_gpus(message: FeedMessage, count: int) -> FeedMessage:
    """Fewer or more cards than the recording has; the added ones are copies."""
    if not isinstance(message, wire.StateUpdate) or message.machine is None:
        return message
    cards = message.machine.gpus
    if count == 0:
        return replace(message, machine=replace(message.machine, gpus=(), gpu_note="no NVIDIA GPU: libnvidia-ml not found"))
    added = [replace(cards[n % 2], index=n, uuid=f"GPU-{n}-demo", processes=()) for n in range(2, count)]
    return replace(message, machine=replace(message.machine, gpus=(*cards, *added)))


@asynccontextmanager
async def shown(
    feed: Feed, theme: str, monkeypatch: pytest.MonkeyPatch, **options: object
) -> AsyncIterator[Pilot[DashboardResult]]:
    """The dashboard after it has drawn everything of the feed."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    # With an hour between samples no picture complains about the silence of a feed that stands
    # still.
    app = DashboardApp(feed, interval=3600.0, choices=Choices({"theme": theme}), **options)  # type: ignore[arg-type]
    async with app.run_test(size=SIZES[0]) as pilot:
        for _ in range(10):
            await settle(pilot)
        yield pilot


async def opened(pilot: Pilot[DashboardResult], picture: Picture) -> None:
    """Press the keys of a picture. A blinking cursor would make it depend on the moment."""
    for key in picture.keys:
        await pilot.press(key)
        await settle(pilot)
    for cursor in pilot.app.screen.query("Input"):
        cursor.cursor_blink = False  # type: ignore[attr-defined]


def svg(app: DashboardApp) -> str:
    """The screen now."""
    default = _hex(app.screen.rich_style.bgcolor, "#000000")
    rows = []
    for strip in app.screen._compositor.render_strips():
        row = []
        for segment in strip:
            style = segment.style
            front, back = (None, None) if style is None else (style.color, style.bgcolor)
            colours = [_hex(front, "#808080"), _hex(back, default)]
            if style is not None and style.reverse:
                colours.reverse()
            row.append(Piece(segment.text, *colours, bold=bool(style and style.bold), italic=bool(style and style.italic)))
        rows.append(row)
    width, height = app.size
    return document(drawn(rows, default), width, height, default)


def _hex(colour: Color | None, default: str) -> str:
    return default if colour is None or colour.is_default else colour.get_truecolor().hex


def difference(expected: str, found: str) -> str:
    """The first line in which two pictures differ."""
    for before, after in zip(expected.splitlines(), found.splitlines(), strict=False):
        if before != after:
            return f"before: {before}\nnow:    {after}"
    return "one of them is longer"


HERE = Path(__file__).with_name("pictures")
