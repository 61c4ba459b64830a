"""The metrics screen: exact ranges of long curves, a record that goes back, several runs, and the
screen at every size."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from pathlib import Path

import pytest
from textual.pilot import Pilot

from memtop.supervisor import wire
from memtop.supervisor.monitor.history import Bucket
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import Step
from memtop.tui.app import DashboardApp
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.metrics.curves import Range, RunCurves, Track
from memtop.tui.metrics.drawing import METRICS, MetricsView, draw, smoothed, with_values
from memtop.tui.metrics.screen import MetricsScreen
from tests.tui.support import NOW, SETTINGS, RecordingFeed, gpu, opened, press, resize, running, screen_text, settle, text_of

SIZES = ((80, 24), (120, 35), (160, 50))
LOSS = [kind for kind in METRICS if kind.name == "loss"]


def expected(values: list[float]) -> Range | None:
    known = [value for value in values if not math.isnan(value)]
    return Range(min(known), math.fsum(known) / len(known), max(known)) if known else None


def test_ranges_are_those_of_all_points_while_the_track_grows_and_goes_back() -> None:
    chance = random.Random(1)
    values: list[float] = []
    xs: array[float] = array("d")
    track = Track({"update": xs}, array("d"))
    for _ in range(60):
        if chance.random() < 0.3 and values:
            keep = chance.randrange(len(values))
            del values[keep:], xs[keep:]
            track.cut(keep)
        for _ in range(chance.randrange(200)):
            values.append(math.nan if chance.random() < 0.1 else chance.uniform(-5, 5))
            xs.append(float(len(xs)))
            track.ys.append(values[-1])
        start = chance.uniform(0, len(values) + 1)
        width, count = chance.choice((0.5, 7.3, 64.0, 90.5, 700.0)), chance.randrange(1, 12)
        found = track.columns("update", start, start + width * count, count)
        means = track.columns("update", start, start + width * count, count, ranges=False)
        assert [one and one.mean for one in means] == [one and one.mean for one in found]
        borders = [min(len(values), max(0, math.ceil(start + number * width))) for number in range(count + 1)]
        # Parts with many points end with a block, which is at most an eighth of a part.
        block = next(size for size in (512, 64, 8, 1) if size == 1 or size * 8 <= (borders[-1] - borders[0]) // count)
        for number, one in enumerate(found):
            first, last = (borders[at] // block * block for at in (number, number + 1))
            wanted = expected(values[first:last])
            assert (one is None) == (wanted is None)
            assert one is None or wanted is None or tuple(one) == pytest.approx(tuple(wanted))


def row(update: int, attempt: int = 1, **values: float | int | None) -> wire.Metric:
    known = {"loss": 3.0 - update / 100, "samples_seen": update * 32, "tokens": 1000, "step_seconds": 0.5, "time": NOW + update}
    return wire.Metric(update=update, attempt=attempt, **{**known, **values})  # type: ignore[arg-type]


def curves(*rows: wire.Metric, name: str = "a") -> RunCurves:
    run = RunCurves(name)
    run.take(rows)
    return run


def test_updates_that_are_done_again_replace_those_behind_them() -> None:
    run = curves(*(row(n) for n in range(1, 41)))
    run.take([row(21, 2, loss=9.0), row(22, 2)])
    loss = run.track("loss")
    assert loss is not None
    assert (run.updates.tolist(), loss.at("update", 21), len(loss.ys)) == (list(range(1, 23)), 9.0, 22)
    assert run.beginnings("update") == [21.0]


def test_speed_and_axes_come_from_counts_also_of_merged_updates() -> None:
    run = curves(row(1, updates=10), row(11, updates=10), row(21), row(22))
    samples, tokens = run.track("samples_per_second"), run.track("tokens_per_second")
    assert samples is not None
    assert tokens is not None
    assert [samples.at("update", x) for x in (11, 21, 22)] == [64.0, 64.0, 64.0]
    assert tokens.at("update", 22) == 2000.0
    assert run.extent("tokens") == (10_000.0, 22_000.0)
    assert run.extent("time") == (0.0, 21.0)
    assert curves(*(wire.Metric(update=n, attempt=1, loss=1.0) for n in (1, 2))).extent("tokens") is None


def test_evaluations_that_were_taken_back_are_left_out_and_memory_is_placed_by_time() -> None:
    run = curves(*(row(n) for n in range(1, 41)))
    run.take_evaluations(
        wire.Event(time=NOW, attempt=1, kind="evaluation", message="", data={"update": update, "loss": loss})
        for update, loss in ((10, 3.0), (20, 2.5), (30, 2.0), (20, 2.4))
    )
    run.take_memory([Bucket(NOW + 5, 1.0, 7.0, 8.0, 9.0), Bucket(NOW + 900, 1.0, 1.0, 1.0, 1.0)])
    evaluation, memory = run.track("evaluation_loss"), run.track("run_bytes")
    assert evaluation is not None
    assert memory is not None
    assert evaluation.ys.tolist() == [3.0, 2.4]
    assert (memory.ys.tolist(), memory.at("update", 5), memory.at("update", 4)) == ([9.0], 9.0, None)


def view(**values: object) -> MetricsView:
    return MetricsView(**{"axis": "update", "start": 1.0, "end": 40.5, **values})  # type: ignore[arg-type]


def test_a_metric_without_a_value_takes_no_room_from_the_others() -> None:
    """The peak of device memory on the CPU."""
    kinds = [kind for kind in METRICS if kind.name in ("loss", "learning_rate", "samples_per_second", "peak_bytes")]
    cpu, gpu_run = curves(row(1, learning_rate=1e-3), row(2)), curves(row(1, peak_bytes=5), row(2))
    assert [kind.name for kind in with_values(kinds, [cpu])] == ["loss", "learning_rate", "samples_per_second"]
    assert with_values(kinds, [cpu, gpu_run]) == kinds
    only = [kind for kind in kinds if kind.name == "peak_bytes"]
    assert with_values(only, [cpu]) == only, "then its chart says that it is not reported"


async def test_an_axis_that_the_run_does_not_report_offers_updates() -> None:
    rows = tuple(wire.Metric(update=n, attempt=1, loss=1.0 / n, time=NOW + n) for n in range(1, 9))
    feed = RecordingFeed(running(gpu()), wire.MetricRows(rows=rows))
    async with opened(feed, "v", "x", size=(80, 24)) as (app, pilot):
        await settle(pilot)
        assert "this run does not report the samples of its updates: u draws over updates" in screen_text(app)
        await press(pilot, "u")
        assert "by update" in screen_text(app)
        assert "does not report" not in screen_text(app)


def test_a_chart_has_a_fitted_scale_the_value_at_the_cursor_and_the_numbers_of_the_runs() -> None:
    runs = [curves(*(row(n) for n in range(1, 41)), name="one"), curves(*(row(n, loss=5.0) for n in range(1, 41)), name="two")]
    lines, count = draw(LOSS, runs, view(cursor=20.0), 80, 22)
    text = text_of(lines)
    assert (count, len(lines)) == (1, 22)
    assert "1 one   2 two" in text
    assert "1 2.8  2 5" in text, "the values at the cursor"
    ends = [one.rstrip()[-1] for one in text.splitlines() if one.rstrip()[-2:] in (" 1", " 2")]
    assert ends == ["2", "1"], "the higher curve first"
    assert "cursor 20" in text
    assert "┤" in text


def test_the_event_next_to_the_cursor_says_killed_of_a_kill() -> None:
    drawn = {}
    for number in (9, 11):
        event = wire.Event(time=NOW + 40, attempt=1, kind="failed", message="it ended", data={"ended_by": number})
        lines, _ = draw(LOSS, [curves(*(row(n) for n in range(1, 41)))], view(events=(event,)), 80, 22)
        drawn[number] = text_of(lines)
    assert "killed: it ended" in drawn[9]
    assert "failed: it ended" in drawn[11]


def ledger_of_two_attempts(path: Path) -> RunFolder:
    """40 updates: the first attempt runs out of memory after update 25 and goes on at update 21."""
    folder = run_folder(path, 25, 2.5)
    ledger = Ledger(folder.ledger_path)
    ledger.add_event(wire.Event(time=NOW + 9.5, attempt=1, kind="checkpoint", message="update 9 saved"))
    ledger.add_event(wire.Event(time=NOW + 25.5, attempt=1, kind="oom", message="out of GPU memory at update 26"))
    ledger.add_event(wire.Event(time=NOW + 26, attempt=2, kind="memory", message="never marked"))
    ledger.add_attempt(2, "out of GPU memory", SETTINGS, NOW + 30)
    ledger.update_attempt(2, start_updates=20)
    ledger.add_reports(2, 0, [Step(update=n, loss=1.5, time=NOW + 20 + n) for n in range(21, 41)], 1)
    ledger.close()
    return folder


async def test_attempts_and_events_are_marked_at_their_updates(tmp_path: Path) -> None:
    own = ledger_of_two_attempts(tmp_path / "runs/own")
    feed = RecordingFeed(running(gpu(), name="own", folder=str(own.path)))
    async with opened(feed, "v", "r", "s", "p", size=(80, 24)) as (app, pilot):
        text = await until(app, pilot, " 40 ", "oom: out of GPU memory at update 26")
        rows = text.splitlines()
        # The frame and the labels take 11 cells, the 66 cells after them show the updates 1 to 40.
        places = [11 + int((update - 1) / 39 * 66) for update in (10, 21)]
        (marks,) = [row for row in rows if "▾" in row]
        assert [place for place, sign in enumerate(marks) if sign == "▾"] == places
        began = [[place for place, sign in enumerate(row) if sign == "┊"] for row in rows]
        assert sum(found == [places[1]] for found in began) > 4, "the new attempt is a line through the chart"
        assert {place for found in began for place in found} == {places[1]}
        await press(pilot, "end", "pageup", "pageup", "pageup", "pageup", "pageup")
        assert "checkpoint: update 9 saved" in screen_text(app)


def test_an_event_after_the_newest_update_is_marked_at_it() -> None:
    event = wire.Event(time=NOW + 99, attempt=1, kind="failed", message="it ended")
    before = wire.Event(time=NOW - 99, attempt=1, kind="failed", message="before the first update")
    (marks, *_), _ = draw(LOSS, [curves(*(row(n) for n in range(1, 41)))], view(events=(before, event)), 80, 22)
    assert [place for place, sign in enumerate(text_of([marks])) if sign == "▾"] == [10 + int(39 / 39.5 * 68)]


def test_log_scale_and_smoothing() -> None:
    run = curves(*(row(n, loss=10.0 ** (-n)) for n in range(1, 41)))
    text = text_of(draw(LOSS, [run], view(log_scale=True), 80, 22)[0])
    assert "e-" in text
    assert "nothing above 0" in text_of(
        draw(LOSS, [curves(row(1, loss=0.0), row(40, loss=-1.0))], view(log_scale=True), 80, 22)[0]
    )
    assert "not reported" in text_of(draw(LOSS, [curves(row(1, loss=None), row(2, loss=None))], view(), 80, 22)[0])
    steps = [Range(v, v, v) for v in (0.0, 1.0)] + [None] * 200 + [Range(1.0, 1.0, 1.0)]
    found = smoothed(steps, 8)
    assert found[1] == pytest.approx(Range(*[2 / 9] * 3))
    assert found[-1] == pytest.approx(Range(1.0, 1.0, 1.0)), "after a long gap the past does not count"


def run_folder(path: Path, updates: int, loss: float) -> RunFolder:
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    folder = RunFolder(path)
    ledger = Ledger(folder.ledger_path)
    ledger.add_attempt(1, "start", SETTINGS, NOW)
    steps = [Step(update=n, loss=loss, samples_seen=n * 8, time=NOW + n, gradient_norm=0.5) for n in range(1, updates + 1)]
    ledger.add_reports(1, 0, steps, 1)
    ledger.close()
    return folder


async def until(app: DashboardApp, pilot: Pilot[DashboardResult], *words: str) -> str:
    """The text of the screen as soon as it has these words: ledgers are read in a thread."""
    while not all(word in screen_text(app) for word in words):
        if isinstance(app.screen, MetricsScreen):
            app.screen._read()
        await asyncio.sleep(0.02)
        await settle(pilot)
    return screen_text(app)


@pytest.mark.parametrize("mode", ["colour", "NO_COLOR", "MEMTOP_ASCII"])
async def test_the_screen_shows_a_run_alone_and_with_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str) -> None:
    if mode != "colour":
        monkeypatch.setenv(mode, "1")
    own = run_folder(tmp_path / "runs/own", 50, 2.5)
    run_folder(tmp_path / "runs/other", 80, 1.25)
    async with opened(RecordingFeed(running(gpu(), name="own", folder=str(own.path))), "v", size=(80, 24)) as (app, pilot):
        for size in SIZES:
            await resize(pilot, *size)
            # Every key is there at each size, with a short name if need be.
            await until(app, pilot, "Metrics of own", " 2.5 ", "m RAM")
        await press(pilot, "a", "space", "enter")
        await until(app, pilot, "1 own   2 other", "1 2.5  2 1.25")
        await press(pilot, "x")
        assert "samples 8" in screen_text(app)
        await press(pilot, "o", "y", "plus", "left")
        text = screen_text(app)
        assert "by samples, smoothed over 8 dots, log scale" in text
        assert "cursor 6" in text
        await press(pilot, "l", "r", "s", "p")
        assert "no curve is chosen" in screen_text(app)
        await press(pilot, "escape")
        assert app.screen is app.dashboard


async def test_new_updates_appear_and_updates_that_do_not_count_any_more_go(tmp_path: Path) -> None:
    own = run_folder(tmp_path / "runs/own", 30, 2.5)
    async with opened(RecordingFeed(running(gpu(), name="own", folder=str(own.path))), "v", size=(120, 35)) as (app, pilot):
        await until(app, pilot, " 30 ", " 2.5 ")
        ledger = Ledger(own.ledger_path)
        ledger.add_reports(1, 0, [Step(update=31, loss=7.5, time=NOW + 31)], 2)
        await until(app, pilot, " 31 ", " 7.5 ")
        ledger.add_attempt(2, "restart", SETTINGS, NOW + 40)
        ledger.update_attempt(2, start_updates=10)
        ledger.add_reports(2, 0, [Step(update=11, loss=0.75, time=NOW + 41)], 1)
        ledger.close()
        assert " 7.5 " not in await until(app, pilot, " 11 ", " 0.75 ")


async def test_without_a_folder_the_newest_updates_of_the_dashboard_are_drawn() -> None:
    rows = wire.MetricRows(rows=tuple(row(n) for n in range(1, 20)))
    async with opened(RecordingFeed(running(gpu()), rows), "v", size=(80, 24)) as (app, pilot):
        assert "2.81" in screen_text(app)
        await press(pilot, "a")
        assert "cannot be added" in screen_text(app)
