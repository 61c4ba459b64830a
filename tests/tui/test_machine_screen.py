"""Full screens of GPUs and the host: every fact or its reason, GPUs that come and go, and how the
screens open."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from memtop.supervisor.monitor.nvml.rates import PCIE_NOT_WANTED
from memtop.supervisor.monitor.values import Band, GpuDetails, GpuTrouble, HostSample, MigInstance
from memtop.supervisor.run_memory import RoleMemory
from memtop.supervisor.wire import StateUpdate
from memtop.tui.line import Line, plain
from memtop.tui.machine.gpu_details import draw_gpu_details
from memtop.tui.machine.host import draw_host_details
from memtop.tui.machine.screen import MachineScreen
from memtop.tui.panel import LinePanel
from memtop.tui.processes.screen import ProcessesScreen
from memtop.tui.store import Store, fold
from tests.tui.support import (
    GIB,
    HOST,
    NOW,
    RecordingFeed,
    click,
    gpu,
    machine,
    opened,
    press,
    process,
    resize,
    run_state,
    screen_text,
    settle,
)

KNOWN = GpuDetails(
    slowdown_temperature_celsius=98,
    sm_clock_megahertz=1650,
    sm_clock_limit_megahertz=2100,
    throttle_reasons=("power limit reached",),
    performance_state="P2",
    ecc_mode="on",
    ecc_uncorrected_errors=2,
    recovery_action="reset the GPU",
    pcie_generation=4,
    pcie_generation_limit=4,
    unknown={"fan_fraction": "a card without a fan", "nvlink_links": "this card has none"},
)


def text_of(lines: list[Line]) -> str:
    return " ".join(" ".join(plain(one) for one in lines).split())


@pytest.mark.parametrize("width", [80, 160])
def test_every_fact_or_the_reason_why_there_is_none(width: int) -> None:
    trouble = GpuTrouble(time=NOW - 300, kind="xid", code=79, message="the GPU has fallen off the bus: reboot")
    instance = MigInstance(position=2, name="1g.10gb", total_bytes=10 * GIB, used_bytes=GIB, used_fraction=0.1, band=Band.SAFE)
    card = gpu(details=KNOWN, troubles=(trouble,), mig=(instance,), visible_index=3, pci_bus_id="00000000:65:00.0")
    text = text_of(draw_gpu_details(fold(Store(), machine(card)), card, width))
    for words in (
        "1650 of 2100 MHz",
        "held down by power limit reached",
        "slows down at 98 °C",
        "uncorrected errors 2",
        "recovery action reset the GPU",
        "!! Xid 79 5 min ago: the GPU has fallen off the bus: reboot",
        "PCIe generation 4 of 4",
        "fan – a card without a fan",
        "NVLink, links up – this card has none",
        "2 1g.10gb",
        "1.0/10.0 GiB 10.0 % · safe",
        "CUDA calls it cuda:3",
    ):
        assert words in text


def test_a_replay_does_not_promise_what_was_not_recorded() -> None:
    card = gpu(details=replace(KNOWN, unknown={"pcie_sent_bytes_per_second": PCIE_NOT_WANTED}))
    live = fold(Store(), machine(card))
    assert f"PCIe from the GPU – {PCIE_NOT_WANTED}" in text_of(draw_gpu_details(live, card, 160))
    text = text_of(draw_gpu_details(dataclasses.replace(live, replaying=True), card, 160))
    assert "PCIe from the GPU – not recorded: nobody looked at the GPU's details" in text


def test_an_unknown_value_is_a_dash_with_its_reason_and_never_a_zero() -> None:
    card = gpu(
        used_bytes=None, free_bytes=None, utilization_fraction=None, unknown={"used_bytes": "the driver does not report it"}
    )
    text = text_of(draw_gpu_details(fold(Store(), machine(card)), card, 80))
    assert "used – the driver does not report it" in text
    assert "utilisation –" in text
    assert " 0 %" not in text


def test_the_host_in_full() -> None:
    host = replace(
        HOST,
        limit_bytes=16 * GIB,
        limit_path="/slurm/job_7",
        oom_kills=3,
        shm_total_bytes=8 * GIB,
        shm_used_bytes=int(7.2 * GIB),
        shm_fraction=0.9,
        cached_bytes=5 * GIB,
        load_average=(1.0, 2.0, 3.0),
        unknown={"huge_pages_total_bytes": "not in /proc/meminfo"},
    )
    roles = (RoleMemory(role="rank", processes=1, pss_bytes=10 * GIB, uss_bytes=9 * GIB),)
    update = StateUpdate(run=run_state(run_memory=roles), machine=machine(gpu(0), host=host))
    text = text_of(draw_host_details(fold(Store(), update), 80))
    for words in (
        "set by /slurm/job_7",
        "killed for memory 3",
        "/dev/shm 7.2 GiB of 8.0 GiB, 90.0 %, nearly full",
        "page cache 5.0 GiB, freed",
        "huge pages – not in /proc/meminfo",
        "1 x rank 10.0 GiB, 9.0 GiB of it private",
        "load 1, 5, 15 min 1.00 2.00 3.00",
        "swapped in 0 B/s",
    ):
        assert words in text


def test_a_host_whose_values_are_all_unknown_has_dashes_only() -> None:
    unknown = machine(gpu(0), host=HostSample(unknown={"total_bytes": "/proc is not mounted"}))
    text = text_of(draw_host_details(fold(Store(), unknown), 80))
    assert "in the machine – /proc is not mounted" in text
    assert "0.0" not in text


async def test_keys_go_through_the_gpus_to_the_host() -> None:
    async with opened(RecordingFeed(machine(gpu(0), gpu(1)))) as (app, pilot):
        await pilot.press("enter")
        titles = []
        for key in ("", "down", "down", "down", "up"):
            if key:
                await pilot.press(key)
            await settle(pilot)
            titles.append(screen_text(app).splitlines()[0].split("  ")[0:2][1])
        assert titles == [" GPU 0", " GPU 1", " Host", " Host", " GPU 1"]
        await press(pilot, "o")
        assert isinstance(app.screen, ProcessesScreen)
        assert "filter gpu:1" in screen_text(app)
        await press(pilot, "q", "escape")
        assert app.screen is app.dashboard


async def test_a_card_that_is_lost_or_missing_is_shown_again_when_it_returns() -> None:
    lost = gpu(0, error="GPU is lost: reboot", total_bytes=None, used_bytes=None, used_fraction=None)
    feed = RecordingFeed(machine(gpu(0)), machine(lost))
    async with opened(feed) as (app, pilot):
        assert "GPU is lost: reboot" in screen_text(app)
        feed.send(machine(gpu(0, 0.6), gpu(1)))
        await settle(pilot)
        assert "GPU is lost" not in screen_text(app)
        assert "60.0 %" in screen_text(app)
        await pilot.press("g", "down")
        feed.send(machine(gpu(0)))
        await settle(pilot)
        assert "is missing at the moment" in screen_text(app)
        # It comes back under another index: it is the same card.
        feed.send(machine(gpu(0), replace(gpu(1), index=4)))
        await settle(pilot)
        assert "GPU 4" in screen_text(app)


async def test_a_silent_driver_is_named_and_the_host_stays_live() -> None:
    feed = RecordingFeed(replace(machine(gpu(0)), gpu_age_seconds=12.0))
    async with opened(feed, size=(80, 24)) as (app, pilot):
        for size, panel in (((80, 24), "#compact-machine"), ((120, 40), "#gpu-0")):
            await resize(pilot, *size)
            assert "driver has not answered for 12 s" in screen_text(app)
            roles = [role for text, role in app.dashboard.query_one(panel, LinePanel).lines[0] if text.strip()]
            assert set(roles) == {"muted"}
        fuller = replace(HOST, used_bytes=28 * GIB, used_fraction=0.875, band=Band.EDGE)
        feed.send(replace(machine(gpu(0), host=fuller), gpu_age_seconds=13.0))
        await settle(pilot)
        assert "87.5 %" in screen_text(app)
        feed.send(machine(gpu(0)))
        await settle(pilot)
        assert "has not answered" not in screen_text(app)


async def test_the_feed_reads_closely_at_every_sample_while_a_gpu_is_shown() -> None:
    class DetailedFeed(RecordingFeed):
        looks = 0

        def look_closely(self) -> None:
            self.looks += 1

    feed = DetailedFeed(machine(gpu(0)))
    async with opened(feed) as (_, pilot):

        async def looks_at_a_sample(second: float) -> int:
            before = feed.looks
            feed.send(machine(gpu(0), time=NOW + second))
            await settle(pilot)
            return feed.looks - before

        assert await looks_at_a_sample(1) == 0
        await press(pilot, "g")
        assert await looks_at_a_sample(2) == 1
        await press(pilot, "down")
        assert await looks_at_a_sample(3) == 0, "the host costs nothing"
        await press(pilot, "up")
        assert await looks_at_a_sample(4) == 1
        await press(pilot, "escape")
        assert await looks_at_a_sample(5) == 0


async def test_a_low_terminal_scrolls_the_facts() -> None:
    async with opened(RecordingFeed(machine(gpu(0, details=KNOWN))), "g", size=(80, 24)) as (app, pilot):
        assert "more lines: PgDn" in screen_text(app)
        assert "Card" not in screen_text(app)
        for _ in range(5):
            await pilot.press("pagedown")
        await settle(pilot)
        assert "persistence mode" in screen_text(app)
        assert "more lines" not in screen_text(app)


async def test_a_click_on_a_panel_or_a_row_of_the_table_opens_it_in_full() -> None:
    feed = RecordingFeed(machine(gpu(0), gpu(1, processes=(process(5),))))
    async with opened(feed) as (app, pilot):
        for panel, title in (("#gpu-1", "GPU 1"), ("#host-big", "Host")):
            await click(pilot, panel, offset=(4, 2))
            assert isinstance(app.screen, MachineScreen)
            assert title in screen_text(app).splitlines()[0]
            await press(pilot, "escape")
        feed.send(machine(*(gpu(n) for n in range(8))))
        await settle(pilot)
        await click(pilot, "#gpu-table", offset=(6, 6))
        assert "GPU 5" in screen_text(app).splitlines()[0]
        await press(pilot, "escape")
        assert "▸ 5" in screen_text(app)


async def test_behind_a_full_screen_the_dashboard_is_brought_up_to_date_on_return() -> None:
    feed = RecordingFeed(machine(gpu(0, 0.2)))
    async with opened(feed) as (app, pilot):
        await pilot.press("m")
        feed.send(machine(gpu(0, 0.77)))
        await settle(pilot)
        await press(pilot, "escape")
        assert "77.0 %" in screen_text(app)
