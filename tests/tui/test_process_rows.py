"""The process list without a screen: grouping, tree, order, filter, columns."""

from __future__ import annotations

import msgspec
import pytest

from memtop.supervisor.monitor.values import GpuProcess, Job, MachineSnapshot
from memtop.tui.line import plain
from memtop.tui.processes.filter import Filter, parse
from memtop.tui.processes.rows import Order, ProcessRow, ProcessView, arranged, rows_of
from memtop.tui.processes.table import columns_for, draw_row, heading, roles_in_words
from memtop.tui.processes.trails import KEPT, Trails, trail_key
from tests.tui.support import GIB, HOST, NOW, gpu, process

RANKS = tuple(
    process(pid, used_bytes=(pid - 99) * GIB, parent_pid=90, job="run a", role=f"rank {pid - 100}", run="a", user="ada")
    for pid in (100, 101)
)
BOB = process(
    50,
    user="bob",
    used_bytes=9 * GIB,
    sm_fraction=0.4,
    container="docker 3f2a",
    command="python serve.py",
    parent_pid=1,
    choosable=False,
)
SILENT = process(60, used_bytes=None, stray=True)
JOB = Job(
    key="run a",
    name="a",
    run="a",
    user="ada",
    leader_pid=90,
    pids=(90, 100, 101, 110, 111),
    roles={"launcher": 1, "rank": 2, "loader worker": 2},
    gpu_indices=(0, 1),
    used_bytes=3 * GIB,
    host_rss_bytes=8 * GIB,
)


def snapshot(*on_first: GpuProcess) -> MachineSnapshot:
    gpus = (gpu(0, processes=(RANKS[0], BOB, *on_first)), gpu(1, processes=(RANKS[1], SILENT)))
    return MachineSnapshot(time=NOW, gpus=gpus, host=HOST, jobs=(JOB,))


def pids(rows: list[ProcessRow]) -> list[int]:
    return [row.pid for row in rows]


def test_a_job_stands_above_its_processes_with_its_sums() -> None:
    rows = arranged(rows_of(snapshot()), ProcessView.JOBS, Order())
    assert [(row.pid, row.depth) for row in rows] == [(50, 0), (90, 0), (101, 1), (100, 1), (60, 0)]
    head = rows[1]
    assert head.number("vram") == 3 * GIB
    assert head.where == "0,1"
    assert roles_in_words(head.job) == "launcher, 2 ranks, 2 loader workers"


def test_a_job_of_which_a_part_is_not_known_shows_what_is_known() -> None:
    part = msgspec.structs.replace(JOB, used_bytes=None, used_at_least_bytes=int(10.7 * GIB))
    rows = arranged(rows_of(msgspec.structs.replace(snapshot(), jobs=(part,))), ProcessView.JOBS, Order())
    assert [row.pid for row in rows][:3] == [90, 101, 100], "sorted by what is known"
    assert "≥ 10.7 GiB" in plain(draw_row(rows[0], columns_for(120, rows), ticked=False, followed=False, search=""))


def test_a_folded_job_keeps_its_row_only() -> None:
    rows = arranged(rows_of(snapshot()), ProcessView.JOBS, Order(), folded={"run a"})
    assert pids(rows) == [50, 90, 60]
    assert rows[1].folded is True


def test_the_tree_puts_a_launcher_without_a_gpu_above_its_ranks() -> None:
    child = process(51, parent_pid=50, used_bytes=GIB)
    rows = arranged(rows_of(snapshot(child)), ProcessView.TREE, Order())
    assert [(row.pid, row.depth) for row in rows] == [(50, 0), (51, 1), (90, 0), (101, 1), (100, 1), (60, 0)]


def test_a_cycle_of_parents_loses_no_process() -> None:
    odd = (process(7, parent_pid=8), process(8, parent_pid=7), process(9, parent_pid=9))
    machine = MachineSnapshot(time=NOW, gpus=(gpu(0, processes=odd),), host=HOST)
    assert sorted(pids(arranged(rows_of(machine), ProcessView.TREE, Order()))) == [7, 8, 9]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (Order("vram", descending=True), [50, 101, 100, 60]),
        (Order("vram", descending=False), [100, 101, 50, 60]),
        (Order("pid", descending=False), [50, 60, 100, 101]),
        (Order("user", descending=False), [60, 100, 101, 50]),
        (Order("sm", descending=True), [50, 60, 100, 101]),
    ],
)
def test_sorting_puts_what_is_not_known_last(order: Order, expected: list[int]) -> None:
    assert pids(arranged(rows_of(snapshot()), ProcessView.FLAT, order)) == expected


def test_a_frozen_order_stays_and_takes_newcomers_at_its_end() -> None:
    before = arranged(rows_of(snapshot()), ProcessView.FLAT, Order())
    keys = [row.key for row in before]
    giant = process(70, used_bytes=99 * GIB)
    after = arranged(rows_of(snapshot(giant)), ProcessView.FLAT, Order(), frozen=keys)
    assert pids(after) == [*pids(before), 70]


def test_a_pid_used_again_is_another_row() -> None:
    first, second = (rows_of(snapshot(process(70, started_ticks=ticks)))[2] for ticks in (5, 6))
    assert first.pid == second.pid
    assert first.key != second.key


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {50, 60, 100, 101}),
        ("bob", {50}),
        ("user:bob", {50}),
        ("gpu:1", {60, 101}),
        ("gpu:1 -is:stray", {101}),
        ("vram>2g", {50}),
        ("vram>=2048m", {50, 101}),
        ("vram<2", {100}),
        ("-vram>2g", {100, 101}),
        ("kind:compute", {50, 60, 100, 101}),
        ("-kind:compute", set()),
        ("sm>30%", {50}),
        ("job:a", {100, 101}),
        ("run:a role:rank", {100, 101}),
        ("container:docker", {50}),
        ("pid:10", set()),
        ("SERVE.py", {50}),
        ("time>5m", {50, 60, 100, 101}),
        ("time>1h", set()),
    ],
)
def test_the_filter(text: str, expected: set[int]) -> None:
    found = parse(text)
    assert isinstance(found, Filter)
    assert {row.pid for row in rows_of(snapshot()) if found.matches(row)} == expected


@pytest.mark.parametrize(("text", "expected"), [("gpu:0", {1, 2}), ("gpu:2", set()), ("gpu:0:2", {2})])
def test_a_mig_instance_is_no_gpu_of_that_number(text: str, expected: set[int]) -> None:
    card = gpu(0, processes=(process(1, mig_instance=0), process(2, mig_instance=2)))
    found = parse(text)
    assert isinstance(found, Filter)
    rows = rows_of(MachineSnapshot(time=NOW, gpus=(card,), host=HOST))
    assert {row.pid for row in rows if found.matches(row)} == expected
    assert [row.where for row in rows] == ["0:0", "0:2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("usr:bob", "no key 'usr'; there are user"), ("size>2", "'size' is no number; there are vram"), ("sm>2g", "no unit 'g'")],
)
def test_a_filter_that_is_not_understood_says_what_there_is(text: str, words: str) -> None:
    assert words in str(parse(text))


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_columns_leave_room_for_the_command(width: int) -> None:
    rows = arranged(rows_of(snapshot()), ProcessView.JOBS, Order())
    columns = columns_for(width, rows)
    head, places = heading(columns, Order(), width)
    assert sum(column.width + 1 for column in columns) + 2 <= width - 24
    assert "VRAM▾" in plain(head)
    assert plain(head)[places[-1].start :].startswith("command")
    assert [column.id for column in columns][:1] == ["pid"]
    line = plain(draw_row(rows[0], columns, ticked=True, followed=False, search=""))
    assert line.startswith(" ✓")
    assert line.endswith("python serve.py")


def test_a_dash_stands_for_a_share_that_is_not_known() -> None:
    row = next(row for row in rows_of(snapshot()) if row.pid == 60)
    line = plain(draw_row(row, columns_for(120, [row]), ticked=False, followed=False, search=""))
    assert "0 %" not in line
    assert "–" in line
    assert "! stray" in line
    known = next(row for row in rows_of(snapshot()) if row.pid == 50)
    assert " %" in plain(draw_row(known, columns_for(120, [known]), ticked=False, followed=False, search=""))


def test_trails_keep_gaps_and_forget_the_dead() -> None:
    trails = Trails()
    for n in range(KEPT + 100):
        used = None if n == KEPT + 98 else n
        trails.take(MachineSnapshot(time=NOW + n, gpus=(gpu(0, processes=(process(5, used_bytes=used),)),), host=HOST))
    key = trail_key(process(5), gpu(0).uuid)
    values = trails.values(key, "used_bytes")
    assert len(values) == KEPT
    assert list(values[-3:]) == [KEPT + 97, None, KEPT + 99]
    trails.take(MachineSnapshot(time=NOW, gpus=(gpu(0),), host=HOST))
    assert trails.values(key, "used_bytes") == ()
