"""Every screen in Chinese: nothing is left in English, and every row is as wide as the terminal."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyte
import pytest
from textual._compositor import CompositorUpdate
from textual.geometry import Region
from textual.pilot import Pilot

from memtop.supervisor import language, wire
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.monitor.values import Band, GpuTrouble, MigInstance
from memtop.supervisor.program import Program
from memtop.supervisor.recovery.values import Trend, TrendKind, TrendSubject
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.wire import Phase, Stage
from memtop.tui import runs
from memtop.tui.app import DashboardApp
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.demo import RECORDING
from memtop.tui.feed import Disconnected, FeedMessage, Followed, ReplayPosition
from memtop.tui.queue import QueueDialog
from memtop.tui.recovery import DELIBERATE_SECONDS
from memtop.tui.replay import StreamRecording
from memtop.tui.screen import KeyLine
from memtop.tui.spike import SpikeDialog
from memtop.tui.whole_log import WholeLogScreen
from tests.forking import LONG
from tests.tui import pictures, support
from tests.tui.chinese import SIZES, STAND_IN, check, readable
from tests.tui.pictures import SCENES, Scene, feed_of, shown
from tests.tui.support import (
    CONFIGURATIONS,
    GIB,
    PROPOSAL,
    SETTINGS,
    RecordingFeed,
    dead,
    gpu,
    machine,
    opened,
    press,
    process,
    resize,
    running,
    screen_text,
    settle,
)
from tests.tui.test_restart import own_run
from tests.tui.test_runs import NOW, stored
from tests.tui.test_samples import EVENTS
from tests.tui.test_speed import ADVICE, TRIAL
from tests.tui.test_spike import NO_WAY_BACK, SPIKE


@pytest.fixture(autouse=True)
def in_chinese() -> Iterator[None]:
    language.use("zh")
    yield
    language.use("en")


@pytest.fixture(scope="module")
def recording() -> StreamRecording:
    return StreamRecording(RECORDING)


DRAWN = ("eight-gpus", "failed", "foreseen")
"""The scenes that `make test` draws in both languages. The dialogs of the others are below, and
test_pictures.py compares some in Chinese."""


class Fitting(NamedTuple):
    """What has room on a screen."""

    cut: int
    """Texts that end with an ellipsis."""
    buttons: frozenset[str]
    keys: int


async def fitting(pilot: Pilot[DashboardResult], scene: Scene, *, checked: bool) -> dict[str, Fitting]:
    """What has room on each picture of a scene, at each size."""
    found, app = {}, pilot.app
    assert isinstance(app, DashboardApp)
    for picture in scene.pictures:
        await pictures.opened(pilot, picture)
        for columns, rows in SIZES:
            await resize(pilot, columns, rows)
            if checked:
                check(app, "python")
            # Labels of buttons in the last row end with an ellipsis, too.
            cut = screen_text(app).rpartition("\n")[0].count("…")
            buttons = frozenset(str(button.id) for button in app.dashboard.action_bar.children if button.display)
            keys = sum(len(one._places) for one in app.screen.query(KeyLine))
            found[f"{picture.name} {columns}x{rows}"] = Fitting(cut, buttons, keys)
    return found


@pytest.mark.parametrize(
    "scene", [pytest.param(scene, id=scene.name, marks=[] if scene.name in DRAWN else pytest.mark.long) for scene in SCENES]
)
async def test_every_scene_is_in_chinese_and_nothing_is_cut_that_is_whole_in_english(
    scene: Scene, recording: StreamRecording, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    feed = feed_of(scene, recording)
    feed._messages = [readable(message) for message in feed._messages]  # type: ignore[attr-defined]
    for lang in ("zh", "en"):
        language.use(lang)
        async with shown(scene, feed, "memtop", monkeypatch) as pilot:
            found[lang] = await fitting(pilot, scene, checked=lang == "zh")
    for name, english in found["en"].items():
        chinese = found["zh"][name]
        assert chinese.cut <= english.cut, name
        assert chinese.buttons >= english.buttons, name
        assert chinese.keys >= english.keys, name


CARD = gpu(
    0,
    0.93,
    Band.DANGER,
    processes=(process(11), process(12, user="root", choosable=False, stray=True, run="r0")),
    mig=(MigInstance(position=0, name="1g.10gb", total_bytes=10 * GIB, used_bytes=GIB, used_fraction=0.1, band=Band.SAFE),),
    troubles=(GpuTrouble(time=support.NOW - 5, kind="xid", code=79, message=STAND_IN),),
    unknown={"temperature_celsius": STAND_IN},
)
OLD = msgspec.structs.replace(machine(CARD), gpu_age_seconds=12.0)
TREND = Trend(
    subject=TrendSubject(kind=TrendKind.GPU_RESERVED, gpu_index=0),
    what="GPU 0",
    bytes_per_update=float(GIB // 100),
    bytes_per_second=float(GIB // 50),
    confidence=0.99,
    full_in_seconds=840.0,
    full_at_update=1520,
    message=STAND_IN,
)
OTHERS = {
    "trends": (running(CARD, trends=(TREND,), total_updates=4000),),
    "machine": (machine(CARD, gpu(1)),),
    "old values": (OLD,),
    "no GPU": (machine(note=None),),
    "one process": (machine(CARD), Followed(7, "x1", frozenset((7, 8)), 3 * GIB)),
    "one process ended": (machine(CARD), Followed(7)),
    "queued": (running(gpu(), state=Phase.QUEUED, alive=False, reason=STAND_IN, updates=None, attempt=0),),
    "no checkpoint": (running(gpu(), checkpoint=None, loss=None, padding_fraction=0.2),),
    "own program": (running(gpu(), settings=None, command=("x1",), checkpoint=None, offers=()),),
    "replay": (running(gpu()), ReplayPosition("replay, 00:03:11 of 00:41:02, 60x", "replay 60x")),
    "replay at its end": (running(gpu()), ReplayPosition("replay, 00:41:02 of 00:41:02, at its end", "replay at its end")),
    "gone": (running(gpu()), Disconnected("supervisor is gone, training continues - reconnecting")),
    "unsaved": (running(gpu(), unsaved=STAND_IN),),
    "warnings": (running(gpu(), warnings=(STAND_IN, STAND_IN)),),
    **{f"stage {stage.value}": (running(gpu(), state=Phase.STARTING, stage=stage, updates=None),) for stage in Stage},
    **{
        f"{phase.value}, {updates}": (running(gpu(), state=phase, alive=False, updates=updates, ended=support.NOW),)
        for phase in Phase
        if phase.final
        for updates in (None, 40)
    },
}


USUAL = ("trends", "machine", "one process", "queued", "own program", "replay", "gone", "unsaved", "stage importing torch")
"""The states that `make test` draws. test_chinese_texts.py looks for every sentence."""


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(messages, id=name, marks=[] if name in USUAL or name.endswith(", 40") else pytest.mark.long)
        for name, messages in OTHERS.items()
    ],
)
async def test_every_state_of_the_dashboard_is_in_chinese(messages: tuple[FeedMessage, ...]) -> None:
    async with opened(RecordingFeed(*map(readable, messages)), size=SIZES[0]) as (app, pilot):
        for size in SIZES:
            await resize(pilot, *size)
            check(app)


def of_kind(kind: Kind) -> wire.Proposal:
    """Another memory that ran out."""
    return msgspec.structs.replace(PROPOSAL, diagnosis=msgspec.structs.replace(PROPOSAL.diagnosis, kind=kind))


TRAINING = (running(CARD, advice=ADVICE, trial=TRIAL), CONFIGURATIONS, wire.EventRows(rows=EVENTS))
OWN_PROGRAM = (running(gpu(), settings=None, command=("x1",), program=Program(), offers=()),)
KEYS: dict[str, tuple[tuple[FeedMessage, ...], tuple[str, ...]]] = {
    "samples": (TRAINING, ("t",)),
    "samples by prompt": (TRAINING, ("t", "p")),
    "keys of a screen": (TRAINING, ("h", "question_mark")),
    "keys of the processes": (TRAINING, ("o", "question_mark")),
    "filter": (TRAINING, ("o", "f")),
    "wrong filter": (TRAINING, ("o", "f", "i", "s", ":", "x")),
    "find": (TRAINING, ("o", "slash")),
    "process of another user": (TRAINING, ("o", "end", "k")),
    "environment": (TRAINING, ("o", "down", "e")),
    "end a process": (TRAINING, ("o", "down", "k")),
    "choose what to end": (TRAINING, ("k", "space")),
    "stop": (TRAINING, ("s",)),
    "undo": (TRAINING, ("U",)),
    "roll back": (TRAINING, ("u", "down", "enter")),
    "with its checkpoint": (TRAINING, ("u", "c")),
    "speed": (TRAINING, ("b", "pagedown")),
    "metrics": (TRAINING, ("v", "x", "o", "y")),
    "metrics with a cursor": (TRAINING, ("v", "left", "plus")),
    "history with a cursor": (TRAINING, ("h", "left", "s", "u", "w", "r")),
    "one panel": (TRAINING, ("z", "z", "z")),
    "machine": (TRAINING, ("g",)),
    "search in the log": (TRAINING, ("slash", "x", "enter")),
    "why not": (OWN_PROGRAM, ("c",)),
    "why no preset": (OWN_PROGRAM, ("1",)),
    "stop an own program": (OWN_PROGRAM, ("s",)),
    "restart an own program": (OWN_PROGRAM, ("r",)),
    "recovery": ((dead(),), ()),
    "recovery, a command": ((dead(),), ("end",)),
    "recovery, consent": ((dead(),), ("down", "down", "enter")),
    "recovery, a restart": ((dead(msgspec.structs.replace(PROPOSAL, begins=support.NOW + 9)),), ()),
    "recovery, fragments": ((dead(of_kind(Kind.GPU_OOM_FRAGMENTED)),), ()),
    "recovery, host": ((dead(of_kind(Kind.HOST_OOM_ALLOC)),), ()),
    "recovery, shm": ((dead(of_kind(Kind.SHM_EXHAUSTED)),), ()),
    "recovery, disk": ((dead(of_kind(Kind.DISK_FULL)),), ()),
}


FEW = (
    *("samples", "keys of a screen", "filter", "environment", "choose what to end", "undo", "speed", "metrics", "machine"),
    *("why not", "restart an own program", "recovery", "recovery, consent", "recovery, a restart", "recovery, host"),
)
"""What `make test` opens."""


@pytest.mark.parametrize(
    ("messages", "keys"),
    [pytest.param(*opened, id=name, marks=[] if name in FEW else pytest.mark.long) for name, opened in KEYS.items()],
)
async def test_what_every_key_opens_is_in_chinese(messages: tuple[FeedMessage, ...], keys: tuple[str, ...]) -> None:
    async with opened(RecordingFeed(*map(readable, messages)), size=SIZES[1]) as (app, pilot):
        if keys[-1:] == ("enter",) and app.screen is not app.dashboard:
            await pilot.pause(DELIBERATE_SECONDS)
        await press(pilot, *keys)
        await settle(pilot)
        for size in (SIZES[1], SIZES[0]):
            await resize(pilot, *size)
            check(app, "HOME", "HF_TOKEN", "home", "def main", "return", "Ärger", "sudo", "fallocate", "swapfile")


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose whole path fits into a dialog at 80 columns."""
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        yield Path(folder)


async def test_the_list_of_runs_is_in_chinese(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(short)
    for place, state in enumerate(Phase):
        stored(Path("runs"), f"r{place}", NOW - 7000 * place, state, reason=STAND_IN)
    monkeypatch.setattr(runs, "living_elsewhere", lambda path: [])
    app = DashboardApp(RecordingFeed(machine(gpu())), runs_dir=Path("runs"), begins_with_runs=True)
    async with app.run_test(size=SIZES[0]) as pilot:
        while len(app.screen.rows) < len(Phase):  # type: ignore[attr-defined]
            await pilot.pause(0.02)
        for keys in (("end", "space"), ("x",), ("escape", "home", "r"), ("escape", "slash", "r"), ("enter", "question_mark")):
            await press(pilot, *keys)
            # The long path of the test would be parted in a narrow dialog.
            for size in SIZES[:1] if keys == ("x",) else SIZES:
                await resize(pilot, *size)
                check(app, "first-run", "-model", "runs/", str(short))


async def test_the_form_of_an_own_program_is_in_chinese(tmp_path: Path) -> None:
    grip = Grip(output_dir="/out", batch=8, accumulation=2, seq_len=64, fixed_length=True)
    feed = RecordingFeed(own_run(tmp_path, grip, updates=7))
    async with opened(feed, "r", size=SIZES[1]) as (app, pilot):
        check(app, "python train.py", "train.py", "python")
        await resize(pilot, 50, 12)
        check(app)


REASONS = {
    "spike of the loss at update 43: restart with leave_out 96-224, the state at update 38": "第 43 步的损失突增：重启",
    "gpu_oom at update 12: restart with batch 2, accumulation 8": "第 12 步显存不足：重启，用批大小 2，累积 8",
    "found in the run's folder": "在运行的目录中找到",
}


async def test_the_log_of_all_attempts_is_in_chinese(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stored(short, "tiny", NOW, Phase.FAILED)
    with contextlib.closing(Ledger(folder.ledger_path)) as ledger:
        for number, reason in enumerate(REASONS, 2):
            ledger.add_attempt(number, reason, SETTINGS, NOW + 100 * number)
            ledger.update_attempt(number, ended=NOW + 100 * number + 60, outcome="failed", updates=20 + number)
            ledger.add_event(wire.Event(time=NOW + 100 * number + 50, attempt=number, kind="failed", message=STAND_IN))
    for number in range(1, 5):
        log = folder.attempt(number) / "output.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("1 2 3\n" * 3)
    app = DashboardApp(RecordingFeed(readable(running(gpu(), name="tiny", folder=str(folder.path)))))
    async with app.run_test(size=SIZES[0]) as pilot:
        await settle(pilot)
        await press(pilot, "L")
        assert isinstance(app.screen, WholeLogScreen)
        while len(app.screen.page.logs) < 4:
            await pilot.pause(0.02)
        await settle(pilot)
        text = screen_text(app)
        for words in REASONS.values():
            assert words in text
        for keys in ((), ("slash", "2"), ("enter",), ("escape",), ("question_mark",)):
            await press(pilot, *keys)
            for size in SIZES:
                await resize(pilot, *size)
                check(app, "leave_out")


@pytest.mark.parametrize("spike", [SPIKE, NO_WAY_BACK])
async def test_the_question_after_a_spike_is_in_chinese(spike: wire.Spike) -> None:
    async with opened(RecordingFeed(readable(running(gpu(), spike=spike))), size=SIZES[0]) as (app, pilot):
        assert isinstance(app.screen, SpikeDialog)
        assert "第 43 步" in screen_text(app)
        for size in SIZES:
            await resize(pilot, *size)
            check(app)


async def test_the_form_that_queues_a_run_is_in_chinese(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(short)
    stored(Path("runs"), "tiny", NOW)
    monkeypatch.setattr(runs, "living_elsewhere", lambda path: [])
    app = DashboardApp(RecordingFeed(machine(gpu())), runs_dir=Path("runs"), begins_with_runs=True)
    async with app.run_test(size=SIZES[0]) as pilot:
        while not app.screen.rows:  # type: ignore[attr-defined]
            await pilot.pause(0.02)
        await press(pilot, "u")
        await settle(pilot)
        assert isinstance(app.screen, QueueDialog)
        for size in SIZES:
            await resize(pilot, *size)
            check(app, "first-run", "runs/")


@pytest.mark.parametrize("key", ["question_mark", pytest.param("ctrl+p", marks=pytest.mark.long)])
async def test_a_change_below_a_dialog_cuts_no_character_of_it(key: str) -> None:
    """What is written to the terminal, wherever the changed part of the dashboard ends."""
    async with opened(RecordingFeed(running(gpu())), key, size=(120, 35)) as (app, _):
        dialog = app.screen
        compositor = dialog._compositor
        wanted = [strip.text.rstrip() for strip in compositor.render_strips()]
        assert any(map(language.has_wide, wanted))
        terminal = pyte.Screen(120, 35)
        stream = pyte.Stream(terminal)
        stream.feed(compositor.render_full_update().render_segments(app.console))
        for right in range(1, 121) if LONG else range(1, 121, 3):
            dialog.refresh(Region(0, 0, right, 35))
            compositor.update_widgets({dialog})
            update = support.render_frame(compositor, screen_stack=app._background_screens)
            assert isinstance(update, CompositorUpdate)
            stream.feed(update.render_segments(app.console))
            rows = ("".join(terminal.buffer[row][column].data for column in range(120)) for row in range(35))
            assert [row.rstrip() for row in rows] == wanted, right
