"""The metrics screen: exact ranges of long curves, a record that goes back, several runs, and the
screen at every size."""

from __future__ import annotations

import asyncio
import math
import random
import re
from array import array
from pathlib import Path

import pytest
from textual.events import MouseScrollDown, MouseScrollUp
from textual.pilot import Pilot

from memtop.supervisor import wire
from memtop.supervisor.monitor.history import Bucket
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import Step
from memtop.tui.app import DashboardApp
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.filters import to_ascii
from memtop.tui.metrics.curves import AXES, Range, RunCurves, Track
from memtop.tui.metrics.drawing import METRICS, RUN_ROLES, MetricsView, draw, smoothed, with_values
from memtop.tui.metrics.screen import MetricsScreen
from tests.tui.support import (
    NOW,
    SETTINGS,
    RecordingFeed,
    click,
    gpu,
    opened,
    press,
    resize,
    running,
    screen_text,
    settle,
    text_of,
)

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


def six(**values: float) -> list[RunCurves]:
    """Six runs of different lengths; the loss of each is one higher than that of the one before."""
    return [
        curves(*(row(n, loss=number + 1.0, **values) for n in range(1, 41 if number else 21)), name=f"qwen-sft-lr-{number}e-5")
        for number in range(6)
    ]


@pytest.mark.parametrize("width", [76, 156])
def test_six_runs_have_six_colours_and_their_numbers_on_the_curves_in_the_order_of_the_curves(width: int) -> None:
    runs = six()
    lines, _ = draw(LOSS, runs, view(), width, 30)
    legend, _, title, *rows = lines[:-2]
    for number, run in enumerate(runs, 1):
        assert f"{number} {run.name if width > 100 else run.name.replace('qwen-sft-lr-', '…')}" in text_of([legend])
        # Also without colours and in ASCII each curve has its number.
        drawn = [to_ascii(text_of([one]))[11:] for one in rows if str(number) in text_of([one])[11:]]
        assert len(drawn) == 1, "one row, because the loss never changes"
        assert drawn[0].count(str(number)) >= (1 if number == 1 else 2)
        assert any(role == RUN_ROLES[number - 1] for one in rows for text, role in one if text.strip())
    assert "  ".join(f"{n} {n}" for n in range(1, 7)) in text_of([title])
    ends = [text_of([one]).rstrip()[-1] for one in rows if len(text_of([one]).rstrip()) == width]
    assert ends == ["6", "5", "4", "3", "2"], "the highest curve first; the short one ends before"


def test_curves_that_end_together_keep_their_order_in_the_rows_beside_them() -> None:
    runs = [curves(*(row(n, loss=1 + number / 100 + 9 / n) for n in range(1, 41)), name=str(number)) for number in range(6)]
    for height, count in ((30, 6), (10, 5)):
        rows = text_of(draw(LOSS, runs, view(), 76, height)[0][3:-2]).splitlines()
        ends = [one.rstrip()[-1] for one in rows if len(one.rstrip()) == 76]
        assert ends == ["6", "5", "4", "3", "2", "1"][-count:]


def test_a_run_has_no_value_behind_its_end_and_readings_without_room_are_marked() -> None:
    runs = six(peak_bytes=12 << 30)
    peak = [kind for kind in METRICS if kind.name == "peak_bytes"]
    (*_, title) = draw(LOSS, runs, view(cursor=30.0), 76, 22)[0][:3]
    assert "1 –  2 2  3 3" in text_of([title])
    (*_, title) = draw(peak, runs, view(), 76, 22)[0][:3]
    assert text_of([title]).startswith("peak ")
    assert "5 12.0 GiB  6 12.0 GiB" in text_of([title])
    (*_, title) = draw(peak, runs, view(), 56, 22)[0][:3]
    assert text_of([title]).rstrip().endswith("4 12.0 GiB  …")


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
    ledger.add_event(wire.Event(time=NOW + 9.5, attempt=1, kind="checkpoint", message="checkpoint at update 9"))
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
        text = screen_text(app)
        assert "checkpoint at update 9" in text
        assert "checkpoint: " not in text


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


def drawn_range(app: DashboardApp) -> tuple[str, str]:
    """The first and the last value of the axis."""
    axes = [row.strip() for row in screen_text(app).splitlines() if row.strip().startswith(AXES)]
    first, *_, last = re.split(r"\s{2,}", axes[-1])
    return first.partition(" ")[2], last


def reported(count: int, **values: float) -> wire.MetricRows:
    return wire.MetricRows(rows=tuple(row(n, gradient_norm=0.5, peak_bytes=5 << 30, **values) for n in range(1, count + 1)))


async def test_each_key_of_the_axis_and_its_range() -> None:
    async with opened(RecordingFeed(running(gpu()), reported(801)), "v", size=(80, 24)) as (app, pilot):
        found = []
        for _ in range(4):
            found.append((drawn_range(app), "by " + screen_text(app).splitlines()[0].split("by ")[1].strip()))
            await press(pilot, "x")
        assert found == [
            (("1", "801"), "by update"),
            (("32", "25 632"), "by samples"),
            (("1 000", "801 000"), "by tokens"),
            (("00:00:00", "00:13:20"), "by time"),
        ]
        assert drawn_range(app) == ("1", "801"), "then updates again"
        await press(pilot, "plus")
        assert drawn_range(app) == ("401", "801"), "the newer half"
        await press(pilot, "equals_sign")
        assert drawn_range(app) == ("601", "801")
        await press(pilot, "minus")
        assert drawn_range(app) == ("401", "801")
        await press(pilot, *["pageup"] * 8)
        first, last = (int(value) for value in drawn_range(app))
        assert first < 401, "a cursor that goes over the edge takes the range with it"
        assert last - first == 400
        await press(pilot, *["shift+right"] * 9)
        assert drawn_range(app) == ("401", "801")
        await press(pilot, *["shift+left"] * 8, "end")
        assert drawn_range(app) == ("401", "801"), "End shows the newest values"
        assert "cursor" not in screen_text(app).replace("Cursor", "")
        await press(pilot, "underscore")
        assert drawn_range(app) == ("1", "801")
        await press(pilot, "x", "x", "u")
        assert drawn_range(app) == ("1", "801")
        assert "by update" in screen_text(app)


async def test_the_cursor_reads_values_by_key_and_by_click() -> None:
    async with opened(RecordingFeed(running(gpu()), reported(66)), "v", "r", "s", "p", size=(80, 24)) as (app, pilot):
        assert "2.34" in screen_text(app).splitlines()[2], "the newest loss"
        await press(pilot, "left", "left")
        text = screen_text(app)
        assert "cursor 63" in text
        assert "2.37" in text.splitlines()[2]
        await press(pilot, "right")
        assert "cursor 64" in screen_text(app)
        await click(pilot, "#metrics", offset=(1 + 10 + 33, 5))
        assert "cursor 33" in screen_text(app)
        assert "2.67" in screen_text(app).splitlines()[2]
        await click(pilot, "#metrics", offset=(3, 5))
        assert "cursor 33" in screen_text(app), "a click on the labels moves nothing"


async def test_each_metric_has_a_key_and_charts_without_room_are_counted() -> None:
    async with opened(RecordingFeed(running(gpu()), reported(40)), "v", size=(80, 24)) as (app, pilot):

        def shown() -> list[str]:
            names = {kind.words for kind in METRICS}
            rows = (one.split("  ")[0].strip() for one in screen_text(app).splitlines()[1:-3])
            return [name for name in rows if name in names]

        assert shown() == ["loss", "samples/s", "peak memory"] or shown() == ["loss", "samples/s", "peak memory"]
        for key, name in (("g", "gradient norm"), ("t", "tokens/s"), ("p", "peak memory"), ("s", "samples/s")):
            await press(pilot, *(kind.key for kind in METRICS if kind.words in shown()))
            assert shown() != [name]
            await press(pilot, key)
            assert shown() == [name]
        await press(pilot, "l", "g", "t", "p")
        assert shown() == ["loss", "gradient norm", "samples/s"]
        assert "2 more below" in screen_text(app)
        await press(pilot, "down", "down", "down")
        assert shown() == ["samples/s", "tokens/s", "peak memory"]
        assert "more below" not in screen_text(app)
        await press(pilot, "up")
        assert shown() == ["gradient norm", "samples/s", "tokens/s"]
        await pilot._post_mouse_events([MouseScrollUp], "#metrics", (20, 5))
        await settle(pilot)
        assert shown() == ["loss", "gradient norm", "samples/s"]
        await pilot._post_mouse_events([MouseScrollDown], "#metrics", (20, 5))
        await settle(pilot)
        assert shown() == ["gradient norm", "samples/s", "tokens/s"]
        await press(pilot, "z")
        assert shown() == ["gradient norm"], "one chart on the whole screen"
        await press(pilot, "down")
        assert shown() == ["samples/s"]
        await press(pilot, "z")
        assert shown() == ["samples/s", "tokens/s", "peak memory"]


async def test_one_chart_on_a_wide_screen_reads_values_over_its_whole_width() -> None:
    async with opened(RecordingFeed(running(gpu()), reported(147)), "v", "z", size=(160, 50)) as (app, pilot):
        await press(pilot, "left")
        assert "cursor 145" in screen_text(app), "one cell is one update"
        await press(pilot, "z", "down", "down", "down")
        await click(pilot, "#metrics", offset=(1 + 10 + 72, 5))
        assert "cursor" in screen_text(app)


async def test_smoothing_and_scale_go_round() -> None:
    async with opened(RecordingFeed(running(gpu()), reported(40)), "v", size=(80, 24)) as (app, pilot):
        for words in ("over 8 dots", "over 32 dots", "over 128 dots", ""):
            await press(pilot, "o")
            assert words in screen_text(app).splitlines()[0]
        assert "smoothed" not in screen_text(app)
        await press(pilot, "y")
        assert "log scale" in screen_text(app).splitlines()[0]
        await press(pilot, "y")
        assert "log scale" not in screen_text(app).splitlines()[0]


async def test_of_more_runs_than_colours_the_last_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    own = run_folder(tmp_path / "runs/own", 50, 2.5)
    for number in range(7):
        run_folder(tmp_path / f"runs/r{number}", 20 + 10 * number, 1.0 + number)
    async with opened(RecordingFeed(running(gpu(), name="own", folder=str(own.path))), "v", size=(80, 24)) as (app, pilot):
        await until(app, pilot, "Metrics of own", " 2.5 ")
        await press(pilot, "a", "space", *["down", "space"] * 6, "enter")
        text = await until(app, pilot, "1 own   2 r0   3 r1   4 r2   5 r3   6 r4")
        assert "2 runs are left out: at most 6 are shown" in text
        assert drawn_range(app) == ("1", "60"), "as long as the longest of them"
        await press(pilot, "a", "space", *["down", "space"] * 4, "enter")
        assert "1 own" not in screen_text(app), "alone it needs no number"
