"""In a line without room names are shortened, in the middle; states, marks and numbers stay."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from memtop.supervisor.wire import Phase
from memtop.tui.dashboard.header import draw_header
from memtop.tui.dashboard.notice import notice
from memtop.tui.dashboard.overview import draw_processes
from memtop.tui.line import MUTED, NAME, STRONG, fit, name_cell, plain, spread, width_of, with_short_names
from tests.tui.support import (
    NOW,
    RecordingFeed,
    gpu,
    opened,
    press,
    process,
    running,
    screen_text,
    store_of,
)

LONG = "qwen2-5-7b-instruct-qlora-on-two-consumer-cards-ablation-no-4"
WIDE = "张伟的训练任务在双卡上运行的第二次实验用户名很长"


@pytest.mark.parametrize("name", [LONG, WIDE])
@pytest.mark.parametrize("width", [24, 31, 50])
def test_a_line_without_room_shortens_its_name_and_nothing_else(name: str, width: int) -> None:
    of = (("run ", MUTED), (name, NAME), (" failed", STRONG))
    shown = plain(fit(of, width))
    assert cell_len(shown) == width
    assert shown.startswith(f"run {name[:2]}")
    assert shown.rstrip().endswith(f"{name[-2:]} failed")
    assert "…" in shown
    assert with_short_names(of, 200) == of


def test_a_name_keeps_twelve_cells_then_the_end_is_cut() -> None:
    shown = plain(fit(((LONG, NAME), (" failed at update 24", STRONG)), 24))
    assert shown == "qwen2-…-no-4 failed at …"
    assert plain(fit((("short", NAME), (" failed at update 24", STRONG)), 14)) == "short failed …"


def test_the_words_at_the_right_edge_stay_while_a_name_can_be_shortened() -> None:
    shown = spread(((LONG, NAME), ("  stopped", STRONG)), (("replay 60x ", MUTED),), 50)
    assert plain(shown).endswith("  stopped  replay 60x ")
    assert width_of(shown) == 50
    # Not even the shortest name leaves room for them.
    assert "replay" not in plain(spread(((LONG, NAME), ("  stopped", STRONG)), (("replay 60x ", MUTED),), 30))


@pytest.mark.parametrize(
    ("text", "shown"), [("ada", "ada     "), (LONG, "qwen…o-4"), (WIDE, "张伟…长 "), ("a\x1b[2Jb", "ab      ")]
)
def test_a_name_in_a_column_has_the_column_s_width_in_cells(text: str, shown: str) -> None:
    assert name_cell(text, 8) == shown
    assert cell_len(shown) == 8


def test_the_header_shows_the_state_the_attempt_and_the_run_time_of_a_run_with_a_long_name() -> None:
    for fields in ({}, {"state": Phase.FAILED, "alive": False}, {"state": Phase.RESTARTING}):
        store = store_of(running(gpu(), name=LONG, **fields))
        shown = plain(draw_header(store, 80, 1)[0])
        assert cell_len(shown) == 80
        state = fields.get("state", Phase.TRAINING)
        assert isinstance(state, Phase)
        assert "-no-4  attempt 2  " in shown
        assert f" {state.value}  this attempt 00:22:10 " in shown
    short = plain(draw_header(store_of(running(gpu())), 80, 1)[0])
    assert "8 x 4 x 1 = 32  this attempt 00:22:10" in short
    # With less room, the time of a later attempt is beside its number, and the batch stays.
    later = plain(draw_header(store_of(running(gpu(), name="first-run")), 80, 1)[0])
    assert "first-run  attempt 2 for 00:22:10  ● training" in later
    assert later.endswith("8 x 4 x 1 = 32  T 128 ")
    first = plain(draw_header(store_of(running(gpu(), attempt=1)), 80, 1)[0])
    assert "8 x 4 x 1 = 32  T 128  00:22:10" in first


def test_the_banner_of_an_ended_run_keeps_its_end_and_the_next_step() -> None:
    ended: dict[str, object] = {"alive": False, "ended": NOW + 60, "updates": 60, "earlier_seconds": 670.0}
    finished = store_of(running(gpu(), name=LONG, state=Phase.FINISHED, **ended))
    assert notice(finished, 79).startswith("✓ finished at update 60; memtop export qwen2-5-7")
    assert notice(finished, 79).endswith("-no-4 DIR writes the model")
    assert cell_len(notice(finished, 79)) <= 79
    assert notice(finished, 160).startswith(f"✓ finished at update 60 after 00:34:20 in all; memtop export {LONG} DIR")
    failed = store_of(running(gpu(), name=LONG, state=Phase.FAILED, reason="a reason " * 20, **ended))
    assert notice(failed, 79).startswith("✗ failed at update 60 after 00:34:20 in all: a re")
    assert notice(failed, 79).endswith("…; r resumes at update 20")


def test_users_and_runs_in_the_short_list_of_processes_keep_the_columns() -> None:
    held = (process(101, user=WIDE, run=LONG, stray=True), process(102, user="ada", run="tiny"))
    rows = [plain(row) for row in draw_processes(store_of(running(gpu(processes=held))), 79, 5)]
    assert "qwen2-5…n-no-4 ! stray python" in rows[1]
    assert cell_len(rows[1].partition("1.0 GiB")[0]) == cell_len(rows[2].partition("1.0 GiB")[0])


async def test_at_80_columns_no_long_name_hides_a_state_on_any_screen() -> None:
    ranks = tuple(
        process(pid, user=WIDE, job=LONG, role=f"rank {pid - 101}", run=LONG, command=f"python {WIDE}") for pid in (101, 102)
    )
    feed = RecordingFeed(running(gpu(processes=ranks), name=LONG))
    async with opened(feed, size=(80, 24)) as (app, pilot):
        assert "● training  this attempt 00:22:10" in screen_text(app)
        await press(pilot, "r")
        assert "-no-4 from train_latest_state" in screen_text(app)
        await press(pilot, "escape", "v")
        assert "-no-4  by update" in screen_text(app)
        await press(pilot, "escape", "o")
        rows = [row for row in screen_text(app).splitlines() if " 10" in row and "python" in row]
        assert len({cell_len(row[: row.index("0 ")]) for row in rows}) == 1
