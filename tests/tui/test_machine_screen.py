"""GPU and host in full: every fact or its reason, cards that come and go, and where the screens are opened from."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.supervisor.monitor.values import Band, GpuDetails, GpuTrouble, HostSample, MigInstance
from memtop.supervisor.wire import RoleMemory, StateUpdate
from memtop.tui.machine.screen import MachineScreen
from memtop.tui.processes.screen import ProcessesScreen
from tests.tui.support import (
    GIB,
    HOST,
    NOW,
    RecordingFeed,
    click,
    dashboard,
    gpu,
    machine,
    opened,
    press,
    process,
    run_state,
    screen_text,
    settle,
)

TALL = (80, 90)
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


def silent(index: int = 0) -> object:
    """A GPU of which the driver tells next to nothing."""
    return gpu(index, used_bytes=None, utilization_fraction=None, unknown={"used_bytes": "the driver does not tell it"})


@pytest.mark.parametrize("size", [TALL, (160, 50)])
async def test_every_fact_or_the_reason_why_there_is_none(size: tuple[int, int]) -> None:
    trouble = GpuTrouble(time=NOW - 300, kind="xid", code=79, message="the GPU has fallen off the bus: reboot")
    instance = MigInstance(position=2, name="1g.10gb", total_bytes=10 * GIB, used_bytes=GIB, used_fraction=0.1, band=Band.SAFE)
    card = gpu(details=KNOWN, troubles=(trouble,), mig=(instance,), visible_index=3, pci_bus_id="00000000:65:00.0")
    async with opened(RecordingFeed(machine(card)), "g", size=size) as (app, _):
        text = " ".join(screen_text(app).split())
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


async def test_an_unknown_value_is_a_dash_with_its_reason_and_never_a_zero() -> None:
    app = dashboard(RecordingFeed(machine(silent())))  # type: ignore[arg-type]
    async with app.run_test(size=TALL) as pilot:
        await settle(pilot)
        await press(pilot, "g")
        text = " ".join(screen_text(app).split())
        assert "used – the driver does not tell it" in text
        assert "utilisation –" in text
        assert " 0 %" not in text


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


async def test_a_card_that_goes_is_waited_for_and_shown_when_it_returns() -> None:
    both = machine(gpu(0), gpu(1))
    feed = RecordingFeed(both)
    async with opened(feed) as (app, pilot):
        await pilot.press("g", "down")
        feed.say(machine(gpu(0)))
        await settle(pilot)
        assert "is missing at the moment" in screen_text(app)
        # It comes back under another index: it is the same card.
        feed.say(machine(gpu(0), replace(gpu(1), index=4)))
        await settle(pilot)
        assert "GPU 4" in screen_text(app)


async def test_a_lost_gpu_on_the_dashboard_returns() -> None:
    lost = gpu(0, error="GPU is lost: reboot", total_bytes=None, used_bytes=None, used_fraction=None)
    feed = RecordingFeed(machine(gpu(0)), machine(lost))
    async with opened(feed) as (app, pilot):
        assert "GPU is lost: reboot" in screen_text(app)
        feed.say(machine(gpu(0, 0.6)))
        await settle(pilot)
        assert "GPU is lost" not in screen_text(app)
        assert "60.0 %" in screen_text(app)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (160, 50)])
async def test_gpus_that_come_and_go_are_laid_out_anew(size: tuple[int, int]) -> None:
    feed = RecordingFeed()
    app = dashboard(feed)
    async with app.run_test(size=size) as pilot:
        for count in (2, 16, 0, 1):
            feed.say(machine(*(gpu(n, 0.3 + n / 50) for n in range(count)), note=None if count else "no NVIDIA GPU"))
            await settle(pilot)
            text = screen_text(app)
            assert ("no NVIDIA GPU" in text) == (count == 0)
            assert all(f"{30 + 2 * n:.1f}" in text for n in range(count))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_silent_driver_is_said_and_the_host_stays_live(size: tuple[int, int]) -> None:
    feed = RecordingFeed(replace(machine(gpu(0)), gpu_age_seconds=12.0))
    async with opened(feed, size=size) as (app, pilot):
        assert "driver has not answered for 12 s" in screen_text(app)
        panel = "#gpu-0" if size[0] > 100 else "#compact-machine"
        roles = [role for text, role in app.dashboard.query_one(panel).lines[0] if text.strip()]  # type: ignore[attr-defined]
        assert set(roles) == {"muted"}
        fuller = replace(HOST, used_bytes=28 * GIB, used_fraction=0.875, band=Band.EDGE)
        feed.say(replace(machine(gpu(0), host=fuller), gpu_age_seconds=13.0))
        await settle(pilot)
        assert "87.5 %" in screen_text(app)
        feed.say(machine(gpu(0)))
        await settle(pilot)
        assert "has not answered" not in screen_text(app)


async def test_the_host_in_full() -> None:
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
    async with opened(
        RecordingFeed(StateUpdate(run=run_state(run_memory=roles), machine=machine(gpu(0), host=host))), "m", size=TALL
    ) as (app, _):
        text = " ".join(screen_text(app).split())
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


async def test_a_machine_of_which_nothing_is_known_has_dashes_only() -> None:
    async with opened(
        RecordingFeed(machine(gpu(0), host=HostSample(unknown={"total_bytes": "/proc is not mounted"}))), "m", size=TALL
    ) as (app, _):
        text = " ".join(screen_text(app).split())
        assert "in the machine – /proc is not mounted" in text
        assert "0.0" not in text


async def test_the_feed_looks_closer_only_while_a_gpu_is_looked_at() -> None:
    looks: list[None] = []

    class SharpFeed(RecordingFeed):
        def look_closely(self) -> None:
            looks.append(None)

    feed = SharpFeed(machine(gpu(0)))
    async with opened(feed) as (_, pilot):
        feed.say(machine(gpu(0)))
        await settle(pilot)
        assert not looks
        await press(pilot, "g")
        assert looks
        await press(pilot, "down")
        before = len(looks)
        feed.say(machine(gpu(0)))
        await settle(pilot)
        assert len(looks) == before, "the host costs nothing"


async def test_a_low_terminal_scrolls_the_facts() -> None:
    async with opened(RecordingFeed(machine(gpu(0, details=KNOWN))), "g", size=(80, 24)) as (app, pilot):
        assert "more lines: PgDn" in screen_text(app)
        assert "Card" not in screen_text(app)
        for _ in range(5):
            await pilot.press("pagedown")
        await settle(pilot)
        assert "persistence mode" in screen_text(app)
        assert "more lines" not in screen_text(app)


@pytest.mark.parametrize(("panel", "title"), [("#gpu-1", "GPU 1"), ("#host", "Host")])
async def test_a_click_on_a_panel_opens_it_in_full(panel: str, title: str) -> None:
    async with opened(RecordingFeed(machine(gpu(0), gpu(1, processes=(process(5),))))) as (app, pilot):
        await click(pilot, panel, offset=(4, 2))
        assert isinstance(app.screen, MachineScreen)
        assert title in screen_text(app).splitlines()[0]


async def test_a_click_in_the_table_opens_that_gpu() -> None:
    async with opened(RecordingFeed(machine(*(gpu(n) for n in range(8))))) as (app, pilot):
        await click(pilot, "#gpu-table", offset=(6, 6))
        assert "GPU 5" in screen_text(app).splitlines()[0]
        await press(pilot, "escape")
        assert "▸ 5" in screen_text(app)


async def test_behind_a_full_screen_the_dashboard_is_brought_up_to_date_on_return() -> None:
    feed = RecordingFeed(machine(gpu(0, 0.2)))
    async with opened(feed) as (app, pilot):
        await pilot.press("m")
        feed.say(machine(gpu(0, 0.77)))
        await settle(pilot)
        await press(pilot, "escape")
        assert "77.0 %" in screen_text(app)
