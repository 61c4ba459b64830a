"""The texts of the screens in Chinese: each has a translation, names and program output stay as
they are, tables line up, and Chinese can be typed."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len
from textual.binding import Binding
from textual.events import Paste
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input

import memtop.tui
from memtop.supervisor import language, wire
from memtop.supervisor.language import tr
from memtop.supervisor.monitor.values import Band, Job
from memtop.tui import configurations
from memtop.tui import help as help_page
from memtop.tui.bars import padded_tag
from memtop.tui.dashboard.overview import draw_processes
from memtop.tui.feed import LogLines
from memtop.tui.keymap import ACTIONS
from memtop.tui.line import plain, width_of
from memtop.tui.machine.vram import vram_legend
from memtop.tui.processes.kill import _heading, describe
from memtop.tui.processes.rows import Order, ProcessRow, rows_of
from memtop.tui.processes.table import columns_for, draw_row, heading
from memtop.tui.recovery import _to_type, evidence_lines
from memtop.tui.screen import ConfirmDialog
from memtop.tui.store import holders
from tests.tui import support
from tests.tui.chinese import SIZES, STAND_IN, check, columns_of, left_in_english
from tests.tui.support import (
    CONFIGURATIONS,
    GIB,
    PROPOSAL,
    RecordingFeed,
    gpu,
    machine,
    opened,
    press,
    process,
    running,
    screen_text,
    settle,
    store_of,
    text_of,
)
from tests.tui.test_samples import EVENTS


@pytest.fixture(autouse=True)
def in_chinese() -> Iterator[None]:
    language.use("zh")
    yield
    language.use("en")


FOLDER = Path(memtop.tui.__file__).parent


# --- the texts in the code ------------------------------------------------------------------------

VARIES = "\0"
NOT_SHOWN = ("out of memory", "killed by ", "bold underline", "bool | None", f"module {VARIES} has no attribute {VARIES}")
NOT_SHOWN += (f"not a feed message: {VARIES}",)
"""What is searched in a log or a reason, styles, types, and errors of memtop's own code."""


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
    counted = msgspec.structs.replace(quoted, source="kernel", evidence=("training; failed",))
    assert text_of(evidence_lines(counted, 100)) == "│ 训练中；已失败"


# --- widths ---------------------------------------------------------------------------------------


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


async def test_chinese_can_be_typed_and_pasted() -> None:
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
