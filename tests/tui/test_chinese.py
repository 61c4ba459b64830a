"""The screens in Chinese: nothing is left in English, names and program output stay as they are,
and every row is exactly as wide as the terminal."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from rich.cells import cell_len
from textual.binding import Binding
from textual.events import Paste
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input

import memtop.tui
from memtop.presets import load_presets
from memtop.supervisor import language, wire
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.language import tr
from memtop.supervisor.monitor.values import Band, GpuTrouble, Job, MigInstance
from memtop.supervisor.program import Program
from memtop.supervisor.recovery.values import Trend, TrendKind, TrendSubject
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.wire import Phase, Stage
from memtop.tui import configurations, runs
from memtop.tui import help as help_page
from memtop.tui.app import DashboardApp
from memtop.tui.bars import padded_tag
from memtop.tui.dashboard.overview import draw_processes
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.demo import RECORDING
from memtop.tui.feed import Disconnected, FeedMessage, Followed, LogLines, ReplayPosition
from memtop.tui.keymap import ACTIONS
from memtop.tui.line import plain, width_of
from memtop.tui.machine.vram import vram_legend
from memtop.tui.processes.kill import _heading, describe
from memtop.tui.processes.rows import Order, ProcessRow, rows_of
from memtop.tui.processes.table import columns_for, draw_row, heading
from memtop.tui.recovery import DELIBERATE_SECONDS, _to_type, evidence_lines
from memtop.tui.replay import StreamRecording
from memtop.tui.screen import ConfirmDialog, KeyLine
from memtop.tui.store import holders
from tests.tui import pictures, support
from tests.tui.pictures import SCENES, Scene, feed_of, shown
from tests.tui.support import (
    CONFIGURATIONS,
    GIB,
    PROPOSAL,
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
    store_of,
    text_of,
)
from tests.tui.test_restart import own_run
from tests.tui.test_runs import NOW, stored
from tests.tui.test_samples import EVENTS
from tests.tui.test_speed import ADVICE, TRIAL

FOLDER = Path(memtop.tui.__file__).parent


@pytest.fixture(autouse=True)
def in_chinese() -> Iterator[None]:
    language.use("zh")
    yield
    language.use("en")


# --- what may stay in English ---------------------------------------------------------------------

NAMES = re.compile(
    r"memtop|GPUs?|CPU|CUDA|cuda|MIG|UUID|ECC|PCIe|NVLink|NVIDIA|RTX|Xid|SM|BAR|k?Wh|MHz|[KMGT]iB|B/s|ZeRO|LoRA|QLoRA"
    r"|RSS|shm|tmpfs|cgroup|pid|rank|tok|token|bf16|hub|Hugging|Face|HTML|SIG[A-Z]+|torch|torchrun|FILE|DIR|RUN|NAME"
    r"|Enter|Esc|PgUp|PgDn|Home|End|batch|accumulation|seq_len"
)
"""Names of things, units, keys, and the settings in a program's own spelling."""
PHRASES = re.compile(
    r"`[^`]*`|--[a-z][\w.-]*(?:[ =][\w./]+)?|memtop [a-z]+(?: --[a-z-]+)*(?: [A-Za-z0-9]+)?|sample\.(?:prompts|every)\S*"
    r"|/dev/shm|memory\.high|train_latest_state|expa\w*(?::\w*)?|ZeRO-\d(?: ?\+\w+)*|GPU-[\w-]+|[a-z]+:\w*|vram>2g"
    r"|-word|-job:old|\{name\}"
)
"""Options, commands and settings."""
PRESETS = tuple(load_presets())


@cache
def left_in_english(text: str, *names: str) -> list[str]:
    """The English words that a Chinese text still has."""
    for name in sorted((*PRESETS, *names), key=len, reverse=True):
        text = text.replace(name, " ")
    words = re.findall(r"[A-Za-z][A-Za-z_]+", PHRASES.sub(" ", text))
    return [word for word in words if NAMES.fullmatch(word) is None]


# --- the texts in the code ------------------------------------------------------------------------

VARIES = "\0"
NOT_SHOWN = ("out of memory", "bold underline", "bool | None", f"module {VARIES} has no attribute {VARIES}")
NOT_SHOWN += (f"not a feed message: {VARIES}",)
"""What is searched in a log, styles, types, and errors of memtop's own code."""


def modules() -> list[Path]:
    return sorted(path for path in FOLDER.rglob("*.py"))


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """Every text of a module except docstrings, with a sign for each part that varies."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node
    }
    skipped = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg in ("classes", "id", "group")
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in documents | inside | skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(one.value) if isinstance(one, ast.Constant) else VARIES for one in node.values)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_sentence_in_the_code_has_a_translation(path: Path) -> None:
    sentences = ((line, text) for line, text in literals(path) if re.search(r"[A-Za-z]{2,} (?:\S+ )*[A-Za-z]{2,}", text))
    left = {f"{line}: {text}" for line, text in sentences if text not in NOT_SHOWN and not is_translated(text)}
    assert left == set()


def is_translated(text: str) -> bool:
    """With a number or a mark in place of what varies."""
    return any(not left_in_english(tr(text.replace(VARIES, filler))) for filler in ("7", "✗"))


def test_every_key_and_its_tip_has_a_translation() -> None:
    texts = {text for action in ACTIONS for text in (action.label, action.short, action.description, action.shown_key)}
    texts |= {title for _, title in help_page._GROUPS}
    for found in pkgutil.walk_packages(memtop.tui.__path__, "memtop.tui."):
        importlib.import_module(found.name)
    own = [kind for kind in every_class(Widget) if kind.__module__.startswith("memtop.tui")]
    assert len([kind for kind in own if issubclass(kind, Screen)]) > 15
    for kind in own:
        for binding in kind.__dict__.get("BINDINGS", ()):
            if isinstance(binding, Binding):
                texts |= {binding.description, binding.tooltip, binding.key_display or ""}
    assert len(texts) > 150
    assert {text for text in texts if left_in_english(tr(text))} == set()


def every_class(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from every_class(one)


# --- the screens ----------------------------------------------------------------------------------

SIZES = ((160, 50), (80, 24))
FOREIGN = ("command", "job", "evidence", "name", "user", "device_name", "assignments")
"""Fields with names of other programs, and with quotes."""
OWN = ("label", "state", "stage", "kind", "role")
STAND_IN = "监督进程的句子"


def readable(value: Any, field: str = "") -> Any:
    """The value with a stand-in for every sentence of the supervisor that has no translation, and
    for program output: other tests look at those."""
    if isinstance(value, msgspec.Struct):
        parts = {name: (getattr(value, name), readable(getattr(value, name), name)) for name in value.__struct_fields__}
        changed = {name: after for name, (before, after) in parts.items() if after is not before}
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        after = tuple(readable(one, field) for one in value)
        return after if any(a is not b for a, b in zip(after, value, strict=True)) else value
    if isinstance(value, dict):
        return {key: readable(one, field or key) for key, one in value.items()}
    if isinstance(value, LogLines):
        return LogLines(("一行",) * len(value.rows))
    if not isinstance(value, str) or isinstance(value, Phase | Stage) or " " not in value:
        return value
    if field in FOREIGN and not value.startswith("NVIDIA"):
        return "x1"
    if field in ("texts", "prompts"):
        return value
    return STAND_IN if left_in_english(tr(value)) else value


def check(app: DashboardApp, *names: str) -> None:
    """Nothing is in English, and every row is as wide as the terminal."""
    rows = screen_text(app).splitlines()  # type: ignore[arg-type]
    assert [row for row in rows if cell_len(row) != app.size.width] == []
    known = ("tiny-llama", "tiny", "ada", "root", "1g.10gb", "plan", *names)
    left = {row.strip(): words for row in rows if (words := left_in_english(row, *known))}
    assert left == {}


@pytest.fixture(scope="module")
def recording() -> StreamRecording:
    return StreamRecording(RECORDING)


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
        await resize(pilot, *SIZES[0])
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
        while not scene.failed and app.screen is not app.get_default_screen():
            await press(pilot, "escape")
    return found


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
async def test_every_scene_is_in_chinese_and_nothing_is_cut_that_is_whole_in_english(
    scene: Scene, recording: StreamRecording, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    feed = feed_of(scene, recording)
    feed._messages = [readable(message) for message in feed._messages]  # type: ignore[attr-defined]
    for lang in ("zh", "en"):
        language.use(lang)
        async with shown(feed, "memtop", monkeypatch) as pilot:
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


@pytest.mark.parametrize("messages", OTHERS.values(), ids=OTHERS.keys())
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


@pytest.mark.parametrize(("messages", "keys"), KEYS.values(), ids=KEYS.keys())
async def test_what_every_key_opens_is_in_chinese(messages: tuple[FeedMessage, ...], keys: tuple[str, ...]) -> None:
    async with opened(RecordingFeed(*map(readable, messages)), size=SIZES[1]) as (app, pilot):
        if keys[-1:] == ("enter",) and app.screen is not app.dashboard:
            await pilot.pause(DELIBERATE_SECONDS)
        await press(pilot, *keys)
        await settle(pilot)
        for size in (SIZES[1], SIZES[0]):
            await resize(pilot, *size)
            check(app, "HOME", "HF_TOKEN", "home", "def main", "return", "Ärger", "sudo", "fallocate", "swapfile")


async def test_the_list_of_runs_is_in_chinese(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, state in enumerate(Phase):
        stored(tmp_path, f"r{place}", NOW - 7000 * place, state, reason=STAND_IN)
    monkeypatch.setattr(runs, "living_elsewhere", lambda path: [])
    monkeypatch.chdir(tmp_path)
    app = DashboardApp(RecordingFeed(machine(gpu())), runs_dir=tmp_path, begins_with_runs=True)
    async with app.run_test(size=SIZES[0]) as pilot:
        while len(app.screen.rows) < len(Phase):  # type: ignore[attr-defined]
            await pilot.pause(0.02)
        for keys in (("end", "space"), ("x",), ("escape", "home", "r"), ("escape", "slash", "r"), ("enter", "question_mark")):
            await press(pilot, *keys)
            for size in SIZES:
                await resize(pilot, *size)
                check(app, "first-run", "-model", str(tmp_path))


async def test_the_form_of_an_own_program_is_in_chinese(tmp_path: Path) -> None:
    grip = Grip(output_dir="/out", batch=8, accumulation=2, seq_len=64, fixed_length=True)
    feed = RecordingFeed(own_run(tmp_path, grip, updates=7))
    async with opened(feed, "r", size=SIZES[1]) as (app, pilot):
        check(app, "python train.py", "train.py", "python")
        await resize(pilot, 50, 12)
        check(app)


# --- what is not memtop's -------------------------------------------------------------------------


async def test_names_and_the_output_of_programs_stay_as_they_are() -> None:
    """All of them are words that have a translation."""
    held = process(11, user="main", command="loss data", job="j", run="cache", container="context")
    card = gpu(name="memory", processes=(held,))
    job = Job(key="j", name="workers", leader_pid=10, pids=(10, 11), used_bytes=GIB, gpu_indices=(0,))
    state = running(card, name="training", alive=True)
    state = msgspec.structs.replace(state, machine=msgspec.structs.replace(state.machine, jobs=(job,)))
    said = msgspec.structs.replace(EVENTS[0], data={**EVENTS[0].data, "prompts": ["loss"], "texts": ["  finished"]})
    feed = RecordingFeed(state, CONFIGURATIONS, wire.EventRows(rows=(said,)), LogLines(("update", "failed: loss")))
    async with opened(feed, size=(160, 50)) as (app, pilot):
        expected = {
            (): ("memtop   training  ", "GPU 0  memory", "failed: loss"),
            ("s",): ("停止 training？", "memtop restart training"),
            ("r",): ("重启 training ",),
            ("1",): ("training 的预设",),
            ("k",): (" main ", "loss data"),
            ("o",): (" main ", "workers", "loss data", "context"),
            ("o", "down", "enter"): (
                "命令        loss data",
                "用户        main",
                "运行        cache",
                "容器        context",
                "workers: ",
            ),
            ("o", "down", "k"): ("在 GPU 0 上： loss data", "运行 cache 会丢失"),
            ("g",): ("型号                 memory",),
            ("u",): ("training 的配置",),
            ("v",): ("training 的指标",),
            ("t",): ("training 写了什么", " loss ", "    finished"),
        }
        for keys, texts in expected.items():
            await press(pilot, *keys)
            await settle(pilot)
            shown = screen_text(app)
            assert [text for text in texts if text not in shown] == [], keys
            while app.screen is not app.dashboard:
                await press(pilot, "escape")


def test_jobs_commands_to_type_and_quoted_lines_stay_as_they_are() -> None:
    job = Job(key="j", name="workers", leader_pid=10, pids=(11,), used_bytes=GIB)
    card = gpu(processes=(process(11, job="j"),))
    legend = vram_legend(store_of(msgspec.structs.replace(machine(card), jobs=(job,))), card, 100)
    assert "█ workers 1.0  ░ 占用者未报告" in plain(legend)
    assert plain(_to_type(((None, "training"),), 0, 60)) == "输入： training"
    quoted = msgspec.structs.replace(PROPOSAL.diagnosis, evidence=("training: failed",))
    assert text_of(evidence_lines(quoted, 100)) == "│ training: failed"


# --- widths ---------------------------------------------------------------------------------------


def columns_of(text: str) -> list[str]:
    """The character in each cell; empty in the second cell of a wide one."""
    return [part for character in text for part in (character, *[""] * (cell_len(character) - 1))]


def test_the_columns_of_tables_line_up() -> None:
    store = store_of(machine(gpu(processes=(process(11, user="张三", run="实验一"), process(12, run="r")))), CONFIGURATIONS)
    overview = [plain(one) for one in draw_processes(store, 100, 9)]
    assert len({columns_of(one).index("1", 20) if n else columns_of(one).index("存") for n, one in enumerate(overview)}) == 2
    rows = rows_of(store.machine)
    columns = columns_for(120, rows)
    names, places = heading(columns, Order(), 120)
    lines = [columns_of(plain(names)), *(columns_of(plain(draw(row, columns))) for row in rows)]
    assert all(line[place.end - 1] == " " for line in lines for place in places[:-1])
    table, at = configurations.heading(100)
    below = [configurations.row(one, 100, present=False) for one in CONFIGURATIONS.rows]
    assert all(columns_of(plain(line))[place.end] == " " for line in (table, *below) for place in at)
    holder = holders(store.machine)[0]
    head, row = columns_of(_heading()), columns_of(f"[ ] {describe(holder, support.NOW, command_width=20)}")
    assert "".join(head[53:55]) == "命"
    assert "".join(row[53:]).startswith("python")


def draw(row: ProcessRow, columns: Any) -> Any:
    return draw_row(row, columns, ticked=False, followed=False, search="")


def test_a_band_is_as_wide_as_another() -> None:
    assert len({width_of(padded_tag(band)) for band in (Band.SAFE, Band.EDGE, Band.DANGER)}) == 1


# --- typing ---------------------------------------------------------------------------------------


async def test_chinese_can_be_typed_and_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (process(11, user="张三", command="python 微调.py", reason=STAND_IN), process(12, stray=True))
    async with opened(RecordingFeed(machine(gpu(processes=rows))), "o", "f", "张", "三", size=SIZES[1]) as (app, pilot):
        assert [row.pid for row in app.screen.rows] == [11]  # type: ignore[attr-defined]
        check(app, "python", "py")
        for pasted, pids in (("残留", [12]), ("user：张", [11]), ("ｐｉｄ＞11", [12])):
            app.screen.query_one(Input).value = ""
            app.post_message(Paste(pasted))
            await settle(pilot)
            assert app.screen.query_one(Input).value == pasted
            assert [row.pid for row in app.screen.rows] == pids, pasted  # type: ignore[attr-defined]
        assert cell_len(screen_text(app).splitlines()[0]) == 80
    async with opened(RecordingFeed(running(gpu())), "r", "四", size=SIZES[1]) as (app, pilot):
        assert "批大小 '四'：必须是整数" in screen_text(app)
        check(app)


async def test_what_is_long_is_wrapped_between_characters_and_stays_inside_its_dialog() -> None:
    text = "结束" * 60
    dialog = ConfirmDialog(text, [text, f"  {text}", "python train.py --long " * 9], confirm="End it")
    async with opened(RecordingFeed(machine(gpu())), size=SIZES[1]) as (app, pilot):
        app.push_screen(dialog)
        await settle(pilot)
        rows = screen_text(app).splitlines()
        assert {cell_len(row) for row in rows} == {80}
        inside = [row for row in rows if "结束" in row and "│" in row and "(y)" not in row]
        assert sum(row.count("结") for row in inside) == 120


async def test_a_log_line_of_wide_characters_is_as_wide_as_its_cells() -> None:
    feed = RecordingFeed(running(gpu()), LogLines(("中" * 60 + "尾",)))
    async with opened(feed, size=SIZES[1]) as (app, pilot):
        log = app.dashboard.log_panel
        assert log.virtual_size.width == 122
        assert "尾" not in screen_text(app)
        log.scroll_to(x=999, animate=False, immediate=True, force=True)
        await settle(pilot)
        assert "中尾" in screen_text(app)
        assert {cell_len(row) for row in screen_text(app).splitlines()} == {80}
