"""Growing memory on the panels and in the notice, the marks of events about memory, and which
events the store keeps."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.supervisor import wire
from memtop.supervisor.program import Program
from memtop.supervisor.recovery.values import Trend, TrendKind, TrendSubject
from memtop.tui.dashboard.events import draw_events
from memtop.tui.dashboard.notice import draw_notice, notice
from memtop.tui.dashboard.training import draw_compact_training
from memtop.tui.feed import ReplayPosition
from memtop.tui.keymap import BY_ID, obstacle, offered
from memtop.tui.line import plain
from memtop.tui.machine.gpu import draw_gpu
from memtop.tui.machine.host import draw_host
from memtop.tui.store import Store, fold
from tests.tui.support import (
    CONFIGURATIONS,
    NOW,
    PROPOSAL,
    RecordingFeed,
    dead,
    gpu,
    opened,
    running,
    screen_text,
    store_of,
    text_of,
)

RESERVED = TrendSubject(kind=TrendKind.GPU_RESERVED, gpu_index=0, rank=0)
LEAK = Trend(
    subject=RESERVED,
    what="GPU 0 reserved",
    bytes_per_second=2e6,
    bytes_per_update=2.3e6,
    confidence=0.97,
    full_in_seconds=840.0,
    full_at_update=1520,
    message="GPU 0 reserved grows 2.2 MiB per update: full in 14 min, at update 1 520",
)
WORKERS = replace(
    LEAK,
    subject=TrendSubject(kind=TrendKind.HOST_ANONYMOUS, role="loader worker"),
    what="anonymous memory of the loader workers",
    full_in_seconds=5400.0,
    full_at_update=None,
)
SWAP = replace(
    LEAK,
    subject=TrendSubject(kind=TrendKind.SWAP_IN),
    what="swap-in",
    full_in_seconds=None,
    full_at_update=None,
    message="swap-in grows to 12 MiB/s",
)


def store_with(*trends: Trend, **fields: object) -> Store:
    known: dict[str, object] = {"total_updates": 10_000, **fields}
    return store_of(running(gpu(0), gpu(1), trends=trends, **known))


def test_the_gpu_that_grows_says_when_it_is_full_and_at_which_update() -> None:
    store = store_with(LEAK, WORKERS)
    assert "^ full in 14 min (update 1 520) at this rate" in text_of(draw_gpu(store, store.gpus[0], 100, 8))
    assert "full in" not in text_of(draw_gpu(store, store.gpus[1], 100, 8))
    ten = gpu(10)
    assert "full in" not in text_of(draw_gpu(store, ten, 100, 8))
    one = store_with(replace(LEAK, subject=TrendSubject(kind=TrendKind.GPU_USED, gpu_index=1), what="GPU 1"))
    assert "full in" in text_of(draw_gpu(one, one.gpus[1], 100, 8))
    assert "full in" not in text_of(draw_gpu(one, ten, 100, 8))


def test_the_more_urgent_of_two_trends_of_a_card_is_shown() -> None:
    store = store_with(replace(LEAK, what="GPU 0", full_in_seconds=9000.0), LEAK)
    assert "full in 14 min" in text_of(draw_gpu(store, store.gpus[0], 100, 8))
    endless = store_with(replace(LEAK, full_in_seconds=None))
    assert "^ grows 2 MiB/s" in text_of(draw_gpu(endless, endless.gpus[0], 100, 8))


@pytest.mark.parametrize("width", [54, 76])
def test_the_hosts_trends_are_on_its_panel_even_where_room_is_short(width: int) -> None:
    store = store_with(LEAK, WORKERS, SWAP)
    for height in (5, 12):
        text = text_of(draw_host(store, width, height))
        assert "^ memory of the loader workers: full in 90 min" in text
        assert "^ swap-in grows to 12 MiB/s" in text
        assert "GPU 0 reserved" not in text


def test_memory_that_is_full_only_after_the_runs_end_is_noted_without_a_banner() -> None:
    workers = replace(WORKERS, full_at_update=9_000)
    for fields in ({"total_updates": 1_200}, {"total_updates": None, "eta_seconds": 800.0}):
        unknown_update = replace(workers, full_at_update=None) if fields["total_updates"] is None else workers
        store = store_with(LEAK if fields["total_updates"] else replace(LEAK, full_at_update=None), unknown_update, **fields)
        assert notice(store) == ""
        for width in (54, 76):
            text = text_of(draw_host(store, width, 12))
            assert "^ memory of the loader workers" in text
            assert "not full before the run ends" in " ".join(text.split())
        assert "full before the run ends" in text_of(draw_gpu(store, store.gpus[0], 100, 8))
        assert "full in" not in text_of(draw_gpu(store, store.gpus[0], 100, 8))
    # If the end of the run is unknown, the leak counts.
    assert "full in 90 min" in notice(store_with(workers, total_updates=None, eta_seconds=None))
    # The last update still counts.
    assert "full in" in notice(store_with(workers, total_updates=9_000))


@pytest.mark.parametrize("width", [51, 60, 76])
def test_a_trends_line_is_shortened_or_wrapped_but_never_cut(width: int) -> None:
    long = replace(WORKERS, what="anonymous memory of the run's other processes", full_at_update=9_083)
    text = text_of(draw_host(store_with(long), width, 20))
    assert "…" not in text
    assert "full in 90 min" in " ".join(text.split())


def test_a_notice_of_a_trend_is_never_cut() -> None:
    long = replace(WORKERS, what="anonymous memory of the run's other processes", full_at_update=9_083)
    for width in (80, 100, 160):
        (line,) = draw_notice(store_with(long), width, 1)
        assert "…" not in plain(line)
        assert "full in 90 min" in plain(line)


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
async def test_the_most_urgent_one_is_in_the_notice(size: tuple[int, int]) -> None:
    async with opened(
        RecordingFeed(running(gpu(), total_updates=10_000, trends=(WORKERS, LEAK, SWAP), warnings=("an old warning",))),
        size=size,
    ) as (app, _):
        assert (
            screen_text(app).splitlines()[1].strip().startswith("^ GPU 0 reserved: full in 14 min (update 1 520) at this rate")
        )


def test_the_notice_puts_a_death_before_a_trend_and_a_trend_before_a_trial() -> None:
    trial = wire.Trial(title="batch 8 -> 10", started=NOW, state="measuring before")
    assert notice(store_with(trial=trial)) == "… trial of batch 8 -> 10: measuring before the change"
    assert notice(store_with(LEAK, trial=trial)).startswith("^ GPU 0 reserved")
    assert notice(store_with(trial=replace(trial, state="kept"), warnings=("w",))) == "! w"
    died = store_of(dead(trends=(LEAK,), total_updates=10_000))
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


UNSAVED = "update 9 not saved: 16 MiB needed, 3 MiB free in /home/ada/runs/tiny; nothing saved yet; free some space"


def test_a_save_that_failed_is_a_banner_until_one_succeeds() -> None:
    store = store_with(LEAK, checkpoint=None, unsaved=UNSAVED, warnings=("something else", UNSAVED))
    assert notice(store) == f"! {UNSAVED}"
    assert notice(store, 79) == "! update 9 not saved: 16 MiB needed, 3 MiB free; nothing saved yet; free some …"
    assert ("not yet", "bad") in draw_compact_training(store, 80, 3)[2]
    # Whether this program saves is not known.
    own = store_with(LEAK, checkpoint=None, program=Program(grip="optimizer"), settings=None)
    assert ("no checkpoint seen", "muted") in draw_compact_training(own, 80, 3)[2]
    assert not notice(store_with(LEAK, checkpoint=None)).startswith("! update")


def test_kinds_of_failure_are_shown_in_words() -> None:
    event = wire.Event(id=1, time=NOW, attempt=1, kind="attempt", message="attempt 2: host_oom_alloc: restart with workers 0")
    (line,) = draw_events(fold(Store(), wire.EventRows(rows=(event,))), 80, 5)
    assert line[-1][0] == "attempt 2: out of host memory: restart with workers 0"


def test_the_store_keeps_the_newest_list_of_configurations_until_a_replay_rewinds() -> None:
    store = fold(Store(), CONFIGURATIONS)
    assert store.configurations == CONFIGURATIONS.rows
    fewer = fold(store, wire.ConfigurationRows(rows=CONFIGURATIONS.rows[:1]))
    assert len(fewer.configurations) == 1
    assert fold(store, ReplayPosition("replay", "replay", rewound=True)).configurations == ()


def test_a_proposal_counts_only_while_the_run_has_failed_or_waits() -> None:
    for state, expected in (
        (wire.Phase.FAILED, True),
        (wire.Phase.RESTARTING, True),
        (wire.Phase.STARTING, False),
        (wire.Phase.TRAINING, False),
    ):
        store = store_of(dead(state=state))
        assert (store.proposal is PROPOSAL) is expected
        assert (obstacle(BY_ID["recovery"], store) is None) is expected
    # An announced restart can be replaced by another; one that is under way cannot.
    assert obstacle(BY_ID["restart"], store_of(dead(state=wire.Phase.RESTARTING))) is None
    under_way = store_of(dead(None, state=wire.Phase.RESTARTING))
    assert obstacle(BY_ID["restart"], under_way) == "a restart is already in progress"


def test_the_screens_of_a_run_are_offered_only_with_a_run() -> None:
    for name in ("recovery", "configurations", "speed", "undo"):
        assert offered(BY_ID[name], store_with())
        assert not offered(BY_ID[name], Store())
