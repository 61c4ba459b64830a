"""Every screen at every size: taken from the demo's recording, from invented machines and runs, and
from stored runs."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from msgspec.structs import replace
from rich.color import Color
from textual.pilot import Pilot

from memtop.supervisor import wire
from memtop.supervisor.monitor.values import Band, MachineSnapshot
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.values import Forecast, Peak
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.record.folder import RunFolder, create_run
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.record.output_log import OutputLog
from memtop.supervisor.run.reports import Step
from memtop.supervisor.units import GIB
from memtop.supervisor.wire import Configuration, Event, Phase, Stage
from memtop.tui import recovery, runs
from memtop.tui.app import DashboardApp
from memtop.tui.choices import Choices
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.feed import Connected, Feed, FeedMessage
from memtop.tui.replay import StreamRecording
from tests.recovery.support import T5
from tests.run.brain import spec
from tests.terminal_svg import Piece, document, drawn
from tests.tui.support import (
    CONFIGURATIONS,
    NOW,
    SETTINGS,
    GpuSample,
    RecordingProcessActions,
    dead,
    gpu,
    machine,
    press,
    process,
    resize,
    running,
    screen_text,
    settle,
)
from tests.tui.test_restart import own_run
from tests.tui.test_runs import NOW as STORED_AT
from tests.tui.test_runs import stored
from tests.tui.test_samples import EVENTS
from tests.tui.test_spike import SPIKE

SIZES = ((160, 50), (120, 35), (80, 24))
THEMES = {"dark": "memtop", "light": "textual-light"}


class Picture(NamedTuple):
    """A screen and the keys that open it."""

    name: str
    keys: tuple[str, ...] = ()
    over: bool = False
    """It is drawn over the picture before it; for the first one, over what the dashboard opens."""
    shows: str = ""
    """The text that it waits for: records are read in threads."""
    sizes: tuple[tuple[int, int], ...] = SIZES


class Scene(NamedTuple):
    """Pictures of one dashboard."""

    name: str
    pictures: tuple[Picture, ...]
    gpus: int = 2
    failed: bool = False
    messages: Callable[[], Sequence[FeedMessage]] | None = None
    """What the feed sends, and what it needs is stored in `runs`. None: the demo's recording."""
    begins_with_runs: bool = False


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
    Scene("failed", (Picture("recovery", over=True),), failed=True),
    Scene("machine", (Picture("machine"),), messages=lambda: [_machine(second) for second in range(200)]),
    Scene(
        "foreseen",
        (
            Picture("foreseen"),
            Picture("phases", ("u",)),
            Picture("what-if", ("r", "backspace", "backspace", "6", "4")),
            Picture("preset-peaks", ("6",)),
        ),
        messages=lambda: _foreseen(),
    ),
)
"""Scenes that need no stored run."""


CHINESE = (
    Scene("training", (Picture("dashboard-zh"), Picture("restart-zh", ("r", "backspace", "4")))),
    Scene("failed", (Picture("recovery-zh", over=True),), failed=True),
    Scene("foreseen", (Picture("what-if-zh", ("r", "backspace", "backspace", "6", "4")),), messages=lambda: _foreseen()),
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
    if scene.messages is not None:
        return Still(list(scene.messages()))
    messages = recording.between(-math.inf, _moment(recording, scene))
    return Still([_with_gpus(message, scene.gpus) for message in messages])


def _machine(second: int) -> MachineSnapshot:
    """Four cards that fill up, one after the other."""
    cards: list[GpuSample] = []
    for index in range(4):
        share = min(0.95, 0.3 + 0.1 * index + 0.05 * math.sin(second / 9 + index) + 0.001 * second * (index == 3))
        cards.append(gpu(index, share, utilization_fraction=0.5 + 0.5 * math.sin(second / 20 + index)))
    return machine(*cards, time=1_790_000_000.0 + second)


def _foreseen() -> list[FeedMessage]:
    """A run with its first peak measured, near what was foreseen."""
    settings, card = replace(T5, world_size=1), gpu(0, 0.6)
    key = settings_key(settings, on_gpu=True)
    measured = {"forward": 8 * GIB, "backward": 11 * GIB, "optimizer": 5 * GIB}
    peak = Peak(batch=32, bytes=12 * GIB, updates=24, outside_bytes=GIB // 2, settings_key=key, phases=measured)
    phases = {"forward": 9 * GIB, "backward": 13 * GIB, "optimizer": 5 * GIB}
    found = Forecast(peak_bytes=14 * GIB, total_bytes=20 * GIB, fraction=0.7, band=Band.SAFE, basis="estimate", phases=phases)
    row = Configuration(number=1, attempt=1, started=NOW, reason="start", settings=settings, foreseen=found, peak=peak)
    ranks = (RankMemory(rank=0, pid=7, connected=True, device_uuid=card.uuid),)
    return [running(card, settings=settings, ranks=ranks), wire.ConfigurationRows(rows=(row,))]


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
        return replace(
            message,
            machine=replace(message.machine, gpus=(), gpu_note="no NVIDIA GPU: no NVIDIA driver found"),
        )
    added = [replace(cards[n % 2], index=n, uuid=f"GPU-{n}-demo", processes=()) for n in range(2, count)]
    return replace(message, machine=replace(message.machine, gpus=(*cards, *added)))


OF_THE_PERSON = set("Ä")
"""A prompt has it: no character of memtop's own, so ASCII has none for it."""
MARKS = {
    "stop": ("+ out of GPU memory at update 21, the run went on",),
    "end-failed": ("X failed at update 24",),
    "end-killed": ("X killed at update 24",),
    "end-finished": ("+ finished at update 60",),
    "end-stopped": ("# stopped at update 24",),
    "stage-loading-the-model": ("o loading the model",),
    "metrics-runs": ("6 2.045", "!"),
    "configurations": ("*",),
}
"""What some pictures show in ASCII."""


@asynccontextmanager
async def shown(scene: Scene, feed: Feed, theme: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pilot[DashboardResult]]:
    """The dashboard after it has drawn everything of the feed."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    # No present time, and no other runs of this machine.
    monkeypatch.setattr(runs, "time", SimpleNamespace(time=lambda: STORED_AT + 60))
    monkeypatch.setattr(runs, "living_elsewhere", lambda path: [])
    monkeypatch.setattr(recovery, "DELIBERATE_SECONDS", 0.0)
    # With an hour between samples no picture complains about the silence of a feed that stands
    # still.
    app = DashboardApp(
        feed,
        interval=3600.0,
        choices=Choices({"theme": theme}),
        process_actions=RecordingProcessActions(),
        runs_dir=Path("runs") if scene.begins_with_runs else None,
        begins_with_runs=scene.begins_with_runs,
    )
    async with app.run_test(size=SIZES[0]) as pilot:
        for _ in range(10):
            await settle(pilot)
        while scene.begins_with_runs and len(app.screen.rows) < 4:  # type: ignore[attr-defined]
            await pilot.pause(0.02)
        yield pilot


async def opened(pilot: Pilot[DashboardResult], picture: Picture) -> None:
    """Open a picture at the largest size. A blinking cursor would make it depend on the moment."""
    await resize(pilot, *SIZES[0])
    while not picture.over and pilot.app.screen is not pilot.app.get_default_screen():
        await press(pilot, "escape")
    for key in picture.keys:
        await press(pilot, key)
    assert isinstance(pilot.app, DashboardApp)
    while picture.shows not in screen_text(pilot.app):
        await pilot.pause(0.02)
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


# --- invented and stored runs ---------------------------------------------------------------------


def _listed() -> list[FeedMessage]:
    # No path of this machine.
    runs_dir = Path("runs")
    for place, state in enumerate((Phase.FINISHED, Phase.FAILED, Phase.STOPPED, Phase.FINISHED)):
        why = "out of GPU memory" if state is Phase.FAILED else None
        stored(runs_dir, f"qwen-sft-lr-{place}e-5", STORED_AT - 7000 * place, state, loss=1.5 + place / 7, reason=why)
    return [machine()]


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
    folder = create_run(runs_dir, spec("qwen-sft", STORED_AT), fresh=False)
    ledger = Ledger(folder.ledger_path)
    ledger.add_attempt(1, "start", SETTINGS, STORED_AT)
    ledger.update_attempt(1, ended=STORED_AT + 48, outcome="failed", updates=12)
    ledger.add_attempt(2, "out of GPU memory", replace(SETTINGS, batch=4, accumulation=8), STORED_AT + 65)
    for number, second, kind, message in HAPPENED:
        ledger.add_event(Event(time=STORED_AT + second, attempt=number, kind=kind, message=message))
    ledger.close()
    for number, second, text in LOG:
        path = folder.attempt(number) / "output.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{text}\n")
        OutputLog(path).mark(STORED_AT + second)
    return folder


def _logged() -> list[FeedMessage]:
    return [running(gpu(), name="qwen-sft", folder=str(logged(Path("runs")).path))]


RATES = ("1e-3", "5e-4", "2e-4", "1e-4", "5e-5", "2e-5")


def _six_runs() -> list[FeedMessage]:
    """Six learning rates; the second run is short, and the first one has survived."""
    folders = []
    for number, rate in enumerate(RATES):
        folder = create_run(Path("runs"), spec(f"qwen-lr-{rate}", STORED_AT + number), fresh=False)
        steps = [
            Step(
                update=n,
                loss=1.4 + 0.15 * number + 2.5 * math.exp(-n / (30 + 12 * number)) + 0.04 * math.sin(n * 1.7 + number),
                learning_rate=float(rate) * (1 - n / 400),
                samples_seen=n * 32,
                step_seconds=1.0 + 0.05 * number,
                peak_bytes=(12 + number) << 30,
                time=STORED_AT + n,
            )
            for n in range(1, 160 if number == 1 else 300)
        ]
        ledger = Ledger(folder.ledger_path)
        ledger.add_attempt(1, "start", SETTINGS, STORED_AT)
        ledger.add_reports(1, 0, steps[:120], 1)
        if number == 0:
            ledger.add_event(Event(time=STORED_AT + 121, attempt=1, kind="oom", message="attempt 1: gpu_oom at update 121"))
        ledger.add_attempt(2, "restart", SETTINGS, STORED_AT + 120)
        ledger.update_attempt(2, start_updates=120)
        ledger.add_reports(2, 0, steps[120:], 1)
        ledger.close()
        folders.append(folder.path)
    return [running(gpu(), name=folders[0].name, folder=str(folders[0]))]


def _own_program() -> list[FeedMessage]:
    folder = Path("runs/train")
    folder.mkdir(parents=True)
    saved = wire.Checkpoint(path="/out/checkpoint-20", updates=20, complete=True)
    grip = Grip(output_dir="/out", batch=8, accumulation=2, seq_len=512, fixed_length=True)
    return [own_run(folder, grip, name="train", checkpoint=saved, offers=())]


def _unknown_program() -> list[FeedMessage]:
    return [running(gpu(), name="train", settings=None, command=("python", "train.py", "--lr", "1e-4"), offers=())]


_CARD = gpu(
    0,
    0.93,
    Band.DANGER,
    processes=(process(11), process(12, user="root", choosable=False, stray=True, run="r0", reason="its run is over")),
)


def _trained() -> list[FeedMessage]:
    return [running(_CARD), CONFIGURATIONS, wire.EventRows(rows=EVENTS)]


def _in_stage(stage: Stage) -> list[FeedMessage]:
    """A run without a number yet."""
    numbers = ("updates", "samples_seen", "epoch", "loss", "best_loss", "learning_rate", "gradient_norm", "samples_per_second")
    unknown = dict.fromkeys((*numbers, "tokens_per_second", "step_seconds", "eta_seconds", "checkpoint"))
    return [running(gpu(0, 0.02), state=Phase.STARTING, stage=stage, attempt=1, started=NOW - 8, **unknown)]


def _ended(state: Phase, **fields: object) -> list[FeedMessage]:
    known: dict[str, object] = {"alive": False, "ended": NOW - 30, "name": "qwen-sft", "eta_seconds": None}
    return [running(gpu(0, 0.02), state=state, **{**known, **fields})]


_CUDA = "CUDA error: an illegal memory access was encountered"
STORED = (
    Scene(
        "runs",
        (Picture("runs", ("down", "space"), over=True), Picture("queue", ("u",), over=True)),
        messages=_listed,
        begins_with_runs=True,
    ),
    Scene(
        "runs-resume",
        (Picture("runs-resume", ("down", "r"), over=True, sizes=SIZES[-1:]),),
        messages=_listed,
        begins_with_runs=True,
    ),
    Scene("own-unknown", (Picture("restart-unknown", ("r",), sizes=SIZES[-1:]),), messages=_unknown_program),
    Scene(
        "log",
        (
            Picture("whole-log", ("L",), shows="update 15"),
            Picture("whole-log-search", ("slash", *"safe", "enter"), over=True, shows="match 2 of 2"),
        ),
        messages=_logged,
    ),
    Scene("spike", (Picture("spike", over=True),), messages=lambda: [running(gpu(), spike=SPIKE)]),
    Scene(
        "six-runs",
        (
            Picture("metrics-add", ("v", "a", "space")),
            Picture("metrics-runs", (*("down", "space") * 4, "enter"), over=True, shows="6 qwen-lr-5e-5"),
            Picture("metrics-one-chart", ("z", "o", *("left",) * 9, *("pageup",) * 3), over=True, shows="cursor "),
        ),
        messages=_six_runs,
    ),
    Scene("own-program", (Picture("restart-own", ("r", "backspace", "4")),), messages=_own_program),
    Scene(
        "questions",
        (
            Picture("samples", ("t",)),
            Picture("samples-by-prompt", ("p",), over=True, sizes=SIZES[-1:]),
            Picture("keys", ("h", "question_mark")),
            Picture("environment", ("o", "e")),
            Picture("end-process", ("o", "k")),
            Picture("stop", ("s",)),
            Picture("roll-back", ("u", "down", "enter")),
            Picture("undo", ("U",), sizes=SIZES[-1:]),
            Picture("too-small", sizes=((50, 12),)),
        ),
        messages=_trained,
    ),
    Scene("consent", (Picture("consent", ("down", "down", "enter"), over=True),), messages=lambda: [dead()]),
    *(
        Scene(
            f"stage-{stage.name.lower()}",
            (Picture(f"stage-{stage.value.replace(' ', '-')}", sizes=SIZES if stage is Stage.LOADING_MODEL else SIZES[-1:]),),
            messages=lambda stage=stage: _in_stage(stage),
        )
        for stage in Stage
        if stage not in (Stage.LOADING, Stage.COMPILING)
    ),
    *(
        Scene(f"end-{name}", (Picture(f"end-{name}"),), messages=lambda state=state, fields=fields: _ended(state, **fields))
        for name, state, fields in (
            ("failed", Phase.FAILED, {"reason": _CUDA}),
            ("killed", Phase.FAILED, {"ended_by": 9, "reason": "SIGKILL ended it; the kernel reports no lack of memory"}),
            ("finished", Phase.FINISHED, {"updates": 60}),
            ("stopped", Phase.STOPPED, {"attempt": 1}),
        )
    ),
)
"""Scenes of invented runs; what is stored of them is in `runs` in the present folder."""
