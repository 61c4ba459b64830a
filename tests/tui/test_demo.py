"""The demo lets people see what a run of their own may show them on a bad day: every key of it works on invented numbers."""

from __future__ import annotations

import asyncio

import pytest

from memtop.supervisor import wire
from memtop.supervisor.wire import Phase
from memtop.tui.app import DashboardApp
from memtop.tui.dashboard.training import notice
from memtop.tui.demo import DEMO_SETTINGS, DemoFeed
from memtop.tui.recovery import OomCard
from memtop.tui.store import Store, fold
from tests.tui.support import screen_text, settle

SIZES = [(80, 24), (160, 50)]


async def played(feed: DemoFeed) -> Store:
    """The picture once the script has come to its end."""
    store = Store(staged=True)

    async def play() -> None:
        nonlocal store
        async for message in feed.messages():
            store = fold(store, message)

    playing = asyncio.ensure_future(play())
    before = None
    while store is not before:
        before = store
        for _ in range(20):
            await asyncio.sleep(0)
    playing.cancel()
    return store


async def test_the_run_has_survived_a_shortage_and_remembers_all_of_it() -> None:
    store = await played(DemoFeed(interval=0, warm_up=150, ticks=0))
    assert [row.number for row in store.configurations] == [1, 2, 3]
    present = store.configurations[-1]
    assert (present.settings, present.outcome, present.until_update) == (DEMO_SETTINGS, None, None)
    assert {"survived", "settings", "trial"} <= {event.kind for event in store.events}
    assert store.run is not None
    assert store.run.advice is not None
    assert store.run.trends
    assert notice(store).startswith("^ memory of the loader workers: full in")


@pytest.mark.parametrize("tick", [150, 240, 500])
async def test_its_leak_is_that_of_its_machine_and_comes_before_its_end(tick: int) -> None:
    store = await played(DemoFeed(interval=0, warm_up=tick, ticks=0))
    run = store.run
    assert run is not None
    (trend,) = run.trends
    assert trend.full_at_update is not None
    assert run.total_updates is not None
    assert run.updates is not None
    assert run.updates < trend.full_at_update < run.total_updates
    assert trend.full_in_seconds is not None
    assert run.eta_seconds is not None
    assert trend.full_in_seconds < run.eta_seconds
    left = store.host.available_bytes
    assert trend.bytes_per_update is not None
    assert left == pytest.approx((trend.full_at_update - run.updates) * trend.bytes_per_update, rel=0.01)
    # As much as is said does it grow.
    later = await played(DemoFeed(interval=0, warm_up=tick + 60, ticks=0))
    assert later.run is not None
    assert later.run.run_rss_bytes is not None
    assert run.run_rss_bytes is not None
    updates = (later.run.updates or 0) - run.updates
    # The processes' shared pages count in each, and there is a wave on top.
    assert later.run.run_rss_bytes - run.run_rss_bytes == pytest.approx(updates * trend.bytes_per_update * 1.1, abs=0.7 * 2**30)


async def test_its_leak_ends_before_the_machine_does() -> None:
    store = await played(DemoFeed(interval=0, warm_up=700, ticks=0))
    assert store.run is not None
    assert store.run.trends == ()
    assert store.host.band.value != "danger"


async def test_its_recipe_is_one_that_its_name_can_have() -> None:
    app = DashboardApp(DemoFeed(interval=0.01, warm_up=20))
    async with app.run_test(size=(120, 40)) as pilot:
        while app.dashboard.store.run is None:
            await pilot.pause(0.01)
        await pilot.press("8")
        await settle(pilot)
        assert "no preset of the recipe sft-lora has key 8" in screen_text(app)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gpus", [0, 2])
async def test_a_key_lets_it_die_and_enter_brings_it_back(size: tuple[int, int], gpus: int) -> None:
    feed = DemoFeed(interval=0.01, warm_up=20, gpus=gpus)
    app = DashboardApp(feed)
    async with app.run_test(size=size) as pilot:
        while app.dashboard.store.run is None or app.dashboard.store.run.state is not Phase.TRAINING:
            await pilot.pause(0.01)
        await pilot.press("x")
        while not isinstance(app.screen, OomCard):
            await pilot.pause(0.01)
        await settle(pilot)
        assert ("Killed by the kernel" if gpus == 0 else "Out of GPU memory") in screen_text(app)
        # The first Enter after it opened by itself does not count.
        await pilot.press("escape", "w", "enter")
        while app.dashboard.store.run.state is not Phase.TRAINING:
            await pilot.pause(0.01)
        run = app.dashboard.store.run
        assert run.proposal is None
        assert run.settings is not None
        assert (run.settings.batch, run.settings.effective_batch) == (4, DEMO_SETTINGS.effective_batch)
        assert [row.outcome for row in app.dashboard.store.configurations[-2:]] == ["gpu_oom", None]


async def answers(feed: DemoFeed, request: wire.Request) -> list[str]:
    return [answer.message async for answer in feed.request(lambda number: request)]


async def test_it_carries_out_edits_trials_and_rollbacks() -> None:
    feed = DemoFeed(interval=0, warm_up=20, ticks=0)
    await played(feed)
    said = await answers(feed, wire.Edit(id=1, change=wire.Change(assignments={"batch": "4", "accumulation": "8"})))
    assert "split 8 x 4 x 2 -> 4 x 8 x 2" in said[1]
    assert "without a restart" in said[1]
    assert "undone" in (await answers(feed, wire.Try(id=2, change=wire.Change(assignments={"workers": "2"}))))[1]
    await answers(feed, wire.Restart(id=3, change=wire.Change(configuration=1)))
    assert feed._settings.batch == 2


async def test_a_batch_that_does_not_fit_dies_of_it() -> None:
    feed = DemoFeed(interval=0, warm_up=1, ticks=30)
    stream = feed.messages()
    store = Store()
    while store.run is None:
        store = fold(store, await anext(stream))
    await answers(feed, wire.Restart(id=1, change=wire.Change(assignments={"batch": "32", "accumulation": "1"})))
    while store.proposal is None:
        store = fold(store, await anext(stream))
    assert store.run is not None
    assert store.run.state is Phase.FAILED
    (first, *_) = store.proposal.remedies
    assert first.assignments == {"batch": "16", "accumulation": "2"}
