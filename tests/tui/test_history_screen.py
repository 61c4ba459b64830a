"""The History screen: which moment is drawn where, and where the values come from."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from memtop.supervisor import wire
from memtop.supervisor.monitor.history import Bucket, History
from memtop.supervisor.monitor.values import GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.run.record.folder import create_run
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import Step
from memtop.supervisor.units import GIB
from memtop.tui.history.drawing import Curve, HistoryView, draw, reading
from memtop.tui.history.screen import HistoryScreen
from memtop.tui.line import plain
from tests.run.brain import spec
from tests.tui.support import RecordingFeed, click, opened, press, run_state, screen_text, settle

START = 1_760_000_400.0


def values(*spans: tuple[float, float, float]) -> list[Bucket]:
    return [Bucket(START + begin, length, value, value, value) for begin, length, value in spans]


def test_a_gap_is_empty_and_a_peak_is_a_dot_at_its_height() -> None:
    peak = Bucket(START + 80, 10, 0.1, 0.2, 1.0)
    curve = Curve("VRAM GPU 0", "memory", [*values((0, 40, 0.5)), peak])
    lines = draw([curve], HistoryView(START, START + 100), 59, 13)
    rows = [plain(one)[:50] for one in lines[2:-2]]
    assert {row[20:40].strip("┄ ") for row in rows} == {""}
    # From 10 % to 100 %: the peak goes over the whole height.
    assert [row[:20] for row in rows if row[:20].strip("┄ ")] == ["⣀" * 20]
    assert [row[40:45] for row in rows] == ["⣿" * 5] * len(rows)
    labels = [plain(one)[50:].strip() for one in lines[2:-2]]
    assert [label for label in labels if label] == ["100 %", "85-90 %", "10 %"]


def test_the_cursor_reads_least_mean_and_most() -> None:
    curve = Curve("swap", "bytes", [Bucket(START, 50, 0, 1024, 2048), *values((50, 50, 5.0))])
    view = HistoryView(START, START + 100, cursor=START + 20)
    assert plain(reading(curve, view, 59)) == "at the cursor  mean 1 KiB  least 0 B  most 2 KiB"
    for width, words in ((50, "mean 1 KiB  least 0 B  most 2 KiB"), (36, "mean 1 KiB  most 2 KiB"), (30, "mean 1 KiB")):
        longer = replace(curve, title="swap of both")
        assert plain(reading(longer, view, width)) == words
        assert plain(draw([longer], view, width, 20)[1]) == f"swap of both{words:>{width - 12}}"
    assert plain(reading(curve, HistoryView(START, START + 100), 59)) == "5 B"
    assert plain(reading(curve, HistoryView(START, START + 200), 59)) == "not known"


def test_attempts_and_events_are_marked_at_their_moments() -> None:
    events = [
        wire.Event(id=n, time=START + moment, attempt=1, kind=kind, message=f"{kind}!")
        for n, (moment, kind) in enumerate(((0, "attempt"), (50, "band"), (60, "memory")))
    ]
    view = HistoryView(START, START + 100, cursor=START + 45, events=events)
    lines = [plain(one) for one in draw([Curve("RAM", "memory", values((0, 100, 0.5)))], view, 59, 12)]
    assert (lines[0][0], lines[0][25]) == ("┊", "▾")
    assert lines[0].count("▾") == 1
    assert "band!" in lines[-1]


def machine(moment: float, fraction: float) -> MachineSnapshot:
    gpu = GpuSample(index=0, uuid="GPU-a", used_fraction=fraction, used_bytes=1, power_watts=200.0)
    return MachineSnapshot(time=START + moment, gpus=(gpu,), host=HostSample(used_fraction=0.5))


async def test_without_a_run_it_shows_the_samples_of_this_dashboard() -> None:
    feed = RecordingFeed(machine(0, 0.25))
    async with opened(feed, "h", size=(100, 30)) as (app, pilot):
        text = screen_text(app)
        assert "25.0 %" in text, "a single value is shown at once"
        assert "last 5 min" in text, "a young dashboard begins close"
        assert "since this dashboard started" in text
        assert "VRAM GPU 0" in text
        assert "power" in text
        assert "power GPU 0" not in text
        assert "cursor " not in text.replace("← → cursor ", "")
        feed.send(*(machine(second, 0.25) for second in range(1, 5)))
        await settle(pilot)
        await click(pilot, "#history", offset=(70, 5))
        assert "cursor " in screen_text(app).replace("← → cursor ", "")
        await press(pilot, "question_mark")
        assert "Keys of this screen" in screen_text(app)
        await press(pilot, "escape")
        await press(pilot, "w", "v", "minus", "minus", "minus")
        text = screen_text(app)
        assert "power GPU 0" in text
        assert "200 W" in text
        assert "VRAM GPU 0" not in text
        assert "last hour" in text, "without a ledger there is no more"
        await press(pilot, "escape")
        assert not isinstance(app.screen, HistoryScreen)


async def test_for_a_run_it_reads_older_values_from_the_ledger(tmp_path: Path) -> None:
    folder = create_run(tmp_path, spec("tiny", START), fresh=False)
    ledger = Ledger(folder.ledger_path)
    for second in range(-7200, -3600, 10):
        ledger.recorder.add(machine(second, 0.95 if second == -5000 else 0.5), 3)
        ledger.recorder.write(machine(second, 0.5), 1)
    ledger.add_reports(
        1, 0, [Step(update=n, time=START - 7000 + n * 80, loss=4 - n / 20, peak_bytes=GIB) for n in range(1, 41)], 1
    )
    ledger.close()
    run = run_state(name="tiny", folder=str(folder.path), attempt=1)
    async with opened(RecordingFeed(wire.StateUpdate(run=run, machine=machine(0, 0.25))), size=(100, 30)) as (app, pilot):
        await pilot.press("H")
        screen = app.screen
        assert isinstance(screen, HistoryScreen)
        assert "whole run" in screen_text(app), "it opens on the run's own age"
        while max(bucket.high for bucket in screen.curves()[0].buckets) < 0.94:
            await asyncio.sleep(0.01)  # the ledger is read in a thread
        (curve, *_) = screen.curves()
        assert curve.title == "VRAM GPU 0"
        assert curve.buckets[-1].mean == 0.25
        await settle(pilot)
        assert "whole run" in screen_text(app)
        await press(pilot, "home")
        text = screen_text(app)
        assert "50.0 %" in text
        assert "cursor " in text
        await press(pilot, "end", "p", "m")
        text = screen_text(app)
        assert "peak memory" in text
        assert "1.0 GiB" in text
        (loss,) = [row for row in text.splitlines() if row.startswith("│loss ")]
        assert loss.strip("│ ").endswith(" 2"), "the newest loss, which was long ago"


async def test_the_last_hour_comes_from_the_supervisor() -> None:
    ring = History()
    for second in range(10):
        ring.append(machine(second, 0.75))
    rows = [wire.HistoryRows(key=k, gpu_index=n, label="", times=t, columns=c) for k, n, t, c in ring.dump()]
    async with opened(RecordingFeed(*rows, wire.StateUpdate(run=run_state(), machine=machine(10, 0.25))), size=(100, 30)) as (
        app,
        _,
    ):
        found = app.dashboard.history.series("GPU-a", "used_fraction")
        assert [value for _, value in found] == [0.75] * 10 + [0.25]


async def test_several_gpus_have_a_curve_of_their_mean() -> None:
    def two(moment: float) -> MachineSnapshot:
        gpus = tuple(
            GpuSample(index=n, uuid=f"GPU-{n}", used_fraction=share, utilization_fraction=share, power_watts=9.0)
            for n, share in enumerate((0.25, 0.75))
        )
        return MachineSnapshot(time=START + moment, gpus=gpus, host=HostSample(used_fraction=0.5))

    async with opened(RecordingFeed(*(two(second) for second in range(5))), "h", "u", "w", size=(100, 40)) as (app, _):
        screen = app.screen
        assert isinstance(screen, HistoryScreen)
        titles = [curve.title for curve in screen.curves()]
        assert [title for title in titles if "all 2 GPUs" in title] == ["VRAM of all 2 GPUs, mean", "use of all 2 GPUs, mean"]
        assert "mean 50.0 %  least 25.0 %  most 75.0 %" in screen_text(app)


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
async def test_the_keys_to_leave_and_to_zoom_are_shown_at_any_width_and_what_is_missing_is_marked(
    size: tuple[int, int],
) -> None:
    async with opened(RecordingFeed(wire.StateUpdate(run=run_state(), machine=machine(0, 0.25))), "h", size=size) as (app, _):
        keys = screen_text(app).splitlines()[-2]
        assert "Esc back" in keys
        assert "+ - zoom" in keys
        assert ("End newest" in keys) != ("…" in keys)
