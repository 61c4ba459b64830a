"""What grows, on the panels and in the notice; the marks of the events about memory; what the store keeps of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.supervisor import wire
from memtop.tui.draw.gpu import draw_gpu
from memtop.tui.draw.host import draw_host
from memtop.tui.draw.line import Line, plain
from memtop.tui.draw.training import draw_events, notice
from memtop.tui.feed import Connected, Replayed
from memtop.tui.keymap import BY_ID, obstacle, offered
from memtop.tui.store import Store, fold
from tests.tui.dying import CONFIGURATIONS, PROPOSAL, dead
from tests.tui.support import NOW, RecordingFeed, dashboard, gpu, running, screen_text, settle

LEAK = wire.Trend(
    what="GPU 0 reserved",
    bytes_per_second=2e6,
    bytes_per_update=2.3e6,
    confidence=0.97,
    full_in_seconds=840.0,
    full_at_update=1520,
    message="GPU 0 reserved grows 2.2 MiB per update: full in 14 min, at update 1 520",
)
WORKERS = replace(LEAK, what="anonymous memory of the loader workers", full_in_seconds=5400.0, full_at_update=None)
SWAP = replace(LEAK, what="swap-in", full_in_seconds=None, full_at_update=None, message="swap-in grows to 12 MiB/s")


def text_of(lines: list[Line]) -> str:
    return "\n".join(plain(one) for one in lines)


def store_of(*trends: wire.Trend, **fields: object) -> Store:
    return fold(fold(Store(), Connected()), running(gpu(0), gpu(1), trends=trends, **fields))


def test_the_gpu_that_grows_says_when_it_is_full_and_at_which_update() -> None:
    store = store_of(LEAK, WORKERS)
    assert "^ full in 14 min (update 1 520) at this rate" in text_of(draw_gpu(store, store.gpus[0], 100, 8))
    assert "full in" not in text_of(draw_gpu(store, store.gpus[1], 100, 8))
    ten = gpu(10)
    assert "full in" not in text_of(draw_gpu(store, ten, 100, 8))
    one = store_of(replace(LEAK, what="GPU 1"))
    assert "full in" in text_of(draw_gpu(one, one.gpus[1], 100, 8))
    assert "full in" not in text_of(draw_gpu(one, ten, 100, 8))


def test_of_two_trends_of_one_card_the_urgent_one_is_told() -> None:
    store = store_of(replace(LEAK, what="GPU 0", full_in_seconds=9000.0), LEAK)
    assert "full in 14 min" in text_of(draw_gpu(store, store.gpus[0], 100, 8))
    endless = store_of(replace(LEAK, full_in_seconds=None))
    assert "^ grows 2 MiB/s" in text_of(draw_gpu(endless, endless.gpus[0], 100, 8))


@pytest.mark.parametrize("width", [54, 76])
def test_the_hosts_trends_are_on_its_panel_even_where_room_is_short(width: int) -> None:
    store = store_of(LEAK, WORKERS, SWAP)
    for height in (5, 12):
        text = text_of(draw_host(store, width, height))
        assert "^ anonymous memory of the loader workers: full in" in text
        assert "^ swap-in grows to 12 MiB/s" in text
        assert "GPU 0 reserved" not in text


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
async def test_the_most_urgent_one_is_in_the_notice(size: tuple[int, int]) -> None:
    app = dashboard(RecordingFeed(running(gpu(), trends=(WORKERS, LEAK, SWAP), warnings=("an old warning",))))
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        assert (
            screen_text(app).splitlines()[1].strip().startswith("^ GPU 0 reserved: full in 14 min (update 1 520) at this rate")
        )


def test_the_notice_puts_a_death_before_a_trend_and_a_trend_before_a_trial() -> None:
    trial = wire.Trial(title="batch 8 -> 10", started=NOW, state="measuring before")
    assert notice(store_of(trial=trial)) == "… trial of batch 8 -> 10: measuring before"
    assert notice(store_of(LEAK, trial=trial)).startswith("^ GPU 0 reserved")
    assert notice(store_of(trial=replace(trial, state="kept"), warnings=("w",))) == "! w"
    died = fold(fold(Store(), Connected()), dead(trends=(LEAK,)))
    assert notice(died).endswith("0.5 GiB free (w: what can be done)")
    # Once it is started again, the death is past.
    again = fold(died, dead(state=wire.Phase.STARTING))
    assert "what can be done" not in notice(again)


LOOKS = {
    "oom": ("✗", "bad"),
    "survived": ("✓", "good"),
    "remedy": ("↻", "accent"),
    "settings": ("▸", "accent"),
    "trial": ("◌", "accent"),
    "trend": ("^", "edge"),
    "pressure": ("^", "edge"),
}


@pytest.mark.parametrize(("kind", "look"), LOOKS.items())
def test_events_about_memory_have_a_mark_and_a_colour(kind: str, look: tuple[str, str]) -> None:
    event = wire.Event(id=1, time=NOW, attempt=1, kind=kind, message="what happened")
    (line,) = draw_events(fold(Store(), wire.EventRows(rows=(event,))), 60, 5)
    sign, role = look
    assert (f"{sign:<2} ", role) in line
    assert line[-1] == ("what happened", role)


def test_the_store_keeps_the_newest_telling_of_all_configurations_and_forgets_it_going_back() -> None:
    store = fold(Store(), CONFIGURATIONS)
    assert store.configurations == CONFIGURATIONS.rows
    fewer = fold(store, wire.ConfigurationRows(rows=CONFIGURATIONS.rows[:1]))
    assert len(fewer.configurations) == 1
    assert fold(store, Replayed("replay", rewound=True)).configurations == ()


def test_a_proposal_counts_only_while_the_run_lies_dead_or_waits() -> None:
    for state, expected in (
        (wire.Phase.FAILED, True),
        (wire.Phase.RESTARTING, True),
        (wire.Phase.STARTING, False),
        (wire.Phase.TRAINING, False),
    ):
        store = fold(fold(Store(), Connected()), dead(state=state))
        assert (store.proposal is PROPOSAL) is expected
        assert (obstacle(BY_ID["way_out"], store) is None) is expected
    # An announced restart can be replaced by another; one that is under way cannot.
    assert obstacle(BY_ID["restart"], fold(fold(Store(), Connected()), dead(state=wire.Phase.RESTARTING))) is None
    under_way = fold(fold(Store(), Connected()), dead(None, state=wire.Phase.RESTARTING))
    assert obstacle(BY_ID["restart"], under_way) == "a restart is under way already"


def test_scenes_are_offered_in_the_demo_only_and_screens_of_a_run_with_one_only() -> None:
    assert not offered(BY_ID["scene"], store_of())
    assert offered(BY_ID["scene"], replace_staged(store_of()))
    for name in ("way_out", "configurations", "faster", "undo"):
        assert offered(BY_ID[name], store_of())
        assert not offered(BY_ID[name], Store())


def replace_staged(store: Store) -> Store:
    from dataclasses import replace as changed

    return changed(store, staged=True)
