"""The numbers and colours of GPU memory on the screen, from a scripted driver through the real
sampler."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.color import Color

from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.vram import RankMemory
from memtop.tui.app import DashboardApp
from tests.nvml_double.double import Script, driver, nvml_library  # noqa: F401 (fixtures)
from tests.tui.support import GIB, RecordingFeed, opened, running, screen_text, settle
from tests.tui.test_process_rows import JOB, snapshot

TOTAL, RESERVED = 20 * GIB, GIB // 2


@pytest.fixture
def sampler(driver: Script, tmp_path: Path) -> Iterator[Sampler]:  # noqa: F811
    reader = NvmlReader(environment={}, sys_root=tmp_path / "no-sys")
    yield Sampler(list, nvml=reader)
    reader.close()


def take(driver: Script, percent: float) -> None:  # noqa: F811
    """So much of the card is taken, the driver's own memory included."""
    used = round(TOTAL * percent / 100) - RESERVED
    driver.clear().gpu(0, total=TOTAL, used=used, reserved=RESERVED).write()


def colour(app: DashboardApp, role: str) -> Color | None:
    return app.get_component_styles(f"draw--{role}").partial_rich_style.color


def colours(app: DashboardApp, pattern: str) -> set[Color | None]:
    """The colours of the pieces of the screen that match."""
    strips = app.screen._compositor.render_strips()
    return {one.style.color for strip in strips for one in strip if one.style is not None and re.search(pattern, one.text)}


async def test_number_and_chart_have_the_colour_of_the_band_in_force(driver: Script, sampler: Sampler) -> None:  # noqa: F811
    feed = RecordingFeed()
    async with opened(feed, size=(160, 50)) as (app, pilot):
        for bands in (("safe", "edge", "danger"), ("hist", "histedge", "histdanger")):
            assert len({colour(app, role) for role in bands}) == 3

        async def seen(percent: float, words: str) -> None:
            take(driver, percent)
            # Samples of one moment would share a cell of the chart.
            feed.send(msgspec.structs.replace(sampler.sample(), time=float(next(times))))
            await settle(pilot)
            number = rf"{percent:.1f} %   {re.escape(words)}"
            assert colours(app, number) == {colour(app, words.split()[-1])}

        times = iter(range(1_000, 2_000))
        charted = "[\u2801-\u28ff]"
        for percent in (84.9, 85.1, 84.9, 85.1, 84.9, 85.1, 84.9):
            await seen(percent, "· safe")
        assert colour(app, "histedge") not in colours(app, charted), "no flicker"
        for percent in (85.1, 85.2):
            await seen(percent, "· safe")
        for percent in (85.1, 84.9, 85.1, 84.9):
            await seen(percent, "^ edge")
        assert {colour(app, "hist"), colour(app, "histedge")} <= colours(app, charted)
        await seen(92.0, "!! danger")
        assert colour(app, "histdanger") in colours(app, charted)


async def test_used_total_and_percent_divide_and_the_drivers_part_has_its_number(
    driver: Script,  # noqa: F811
    sampler: Sampler,
) -> None:
    take(driver, 83.0)
    feed = RecordingFeed(sampler.sample())
    async with opened(feed, size=(160, 50)) as (app, pilot):
        for percent in (83.0, 41.5, 96.0):
            take(driver, percent)
            feed.send(sampler.sample())
            await settle(pilot)
            found = re.search(r"([\d.]+) / 20\.0 GiB +([\d.]+) %", screen_text(app))
            assert found is not None
            assert float(found[2]) == percent
            assert abs(float(found[1]) / 20 * 100 - percent) <= 0.05 / 20 * 100 + 0.05, "rounded to 0.1 GiB"
            assert "░ driver 0.5" in screen_text(app)


async def test_the_step_peak_is_never_above_the_peak_beside_it(driver: Script, sampler: Sampler) -> None:  # noqa: F811
    take(driver, 60.0)
    (card,) = sampler.sample().gpus
    rank = RankMemory(rank=0, pid=7, connected=True, device_uuid=card.uuid, allocated_bytes=8 * GIB, reserved_bytes=9 * GIB)
    feed = RecordingFeed()
    async with opened(feed, size=(160, 50)) as (app, pilot):
        for peak in (9, 13, 10):
            now = msgspec.structs.replace(rank, peak_reserved_bytes=peak * GIB)
            feed.send(running(card, ranks=(now,)))
            await settle(pilot)
            found = re.search(r"step peak ([\d.]+) +┆ peak ([\d.]+) GiB", screen_text(app))
            assert found is not None, screen_text(app)
            # 12 GiB are taken, of which the allocator holds 9 now.
            assert (float(found[1]), float(found[2])) == (3 + peak, 12.0 if peak == 9 else 16.0)


async def test_a_job_with_an_unknown_part_says_at_least_how_much_it_has() -> None:
    part = msgspec.structs.replace(JOB, used_bytes=None, used_at_least_bytes=int(10.7 * GIB))
    feed = RecordingFeed(msgspec.structs.replace(snapshot(), jobs=(part,)))
    async with opened(feed, "o", size=(120, 35)) as (app, _):
        (row,) = (line for line in screen_text(app).splitlines() if "≥" in line)
        assert "≥ 10.7 GiB" in row
