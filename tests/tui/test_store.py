"""The store: a message and a state give the next state."""

from __future__ import annotations

import msgspec
import pytest

from memtop.supervisor import wire
from memtop.supervisor.monitor.vram import RankMemory
from memtop.tui.feed import LogLines
from memtop.tui.keymap import BY_ID, is_idle, label_of, obstacle, offered, stray_count
from memtop.tui.processes.kill import consequences
from memtop.tui.store import HISTORY_LENGTH, LOG_LINES_KEPT, Store, fold, holders, step_peak
from tests.tui.support import GIB, NOW, gpu, machine, process, run_state, running, store_of


def rows(*updates: int, attempt: int = 1) -> tuple[wire.Metric, ...]:
    return tuple(wire.Metric(update=n, attempt=attempt, loss=float(n)) for n in updates)


def test_a_restart_takes_metric_rows_back() -> None:
    store = fold(Store(), wire.MetricRows(rows=rows(1, 2, 3, 4)))
    store = fold(store, wire.MetricRows(rows=rows(3, attempt=2), reset_from=3))
    assert [(m.update, m.attempt) for m in store.metrics] == [(1, 1), (2, 1), (3, 2)]


def test_rows_repeated_after_a_reconnect_count_once() -> None:
    store = fold(Store(), wire.MetricRows(rows=rows(1, 2, 3)))
    store = fold(store, wire.MetricRows(rows=rows(1, 2, 3, 4)))
    assert [m.update for m in store.metrics] == [1, 2, 3, 4]


def test_a_loss_from_the_output_joins_the_update_of_the_agent() -> None:
    counted = tuple(wire.Metric(update=n, attempt=1, peak_bytes=n) for n in (1, 2, 3))
    store = fold(fold(Store(), wire.MetricRows(rows=counted)), wire.MetricRows(rows=rows(2)))
    assert [(m.update, m.loss, m.peak_bytes) for m in store.metrics] == [(1, None, 1), (2, 2.0, 2), (3, None, 3)]
    again = fold(store, wire.MetricRows(rows=rows(2, attempt=2)))
    assert [(m.loss, m.peak_bytes) for m in again.metrics if m.update == 2] == [(2.0, None)], "another attempt's values"


def test_events_repeated_after_a_reconnect_count_once() -> None:
    event = wire.EventRows(rows=(wire.Event(id=1, time=NOW, attempt=1, kind="x", message="m"),))
    assert len(fold(fold(Store(), event), event).events) == 1


def test_history_and_log_are_bounded() -> None:
    store = Store()
    for n in range(HISTORY_LENGTH + 5):
        store = fold(store, machine(gpu(), time=NOW + n))
    assert len(store.host_history) == HISTORY_LENGTH
    store = fold(store, LogLines(tuple("x" for _ in range(LOG_LINES_KEPT + 7))))
    assert (len(store.log), store.log_count) == (LOG_LINES_KEPT, LOG_LINES_KEPT + 7)


def test_the_peak_stays_when_memory_falls() -> None:
    store = fold(fold(Store(), machine(gpu(fraction=0.8))), machine(gpu(fraction=0.3)))
    assert store.gpu_peak_bytes["GPU-0000-0000"] == int(20 * GIB * 0.8)


def test_the_peak_is_never_below_the_peak_within_an_update() -> None:
    card = gpu(fraction=0.5, processes=(process(5, run="tiny", used_bytes=10 * GIB),))
    rank = RankMemory(
        rank=0, pid=5, device_uuid=card.uuid, allocated_bytes=6 * GIB, reserved_bytes=8 * GIB, peak_reserved_bytes=14 * GIB
    )
    store = fold(Store(), running(card, ranks=(rank,)))
    assert step_peak(store, store.gpus[0]) == 16 * GIB
    assert store.gpu_peak_bytes["GPU-0000-0000"] == 16 * GIB
    smaller = msgspec.structs.replace(rank, peak_reserved_bytes=9 * GIB)
    assert fold(store, running(card, ranks=(smaller,))).gpu_peak_bytes["GPU-0000-0000"] == 16 * GIB


def test_a_holder_of_which_a_part_is_not_known_says_at_least() -> None:
    both = machine(gpu(0, processes=(process(5, used_bytes=None),)), gpu(1, processes=(process(5),)))
    (holder,) = holders(both)
    assert (holder.used_bytes, holder.memory) == (None, "≥ 1.0 GiB")
    both = machine(gpu(0, processes=(process(5, used_bytes=None),)), gpu(1, processes=(process(5, used_bytes=0),)))
    (holder,) = holders(both)
    assert holder.memory == "–", "every sum is at least 0"
    assert "(an unknown amount)" in consequences([holder], Store())[0]


def test_a_process_on_two_gpus_is_one_row() -> None:
    both = machine(gpu(0, processes=(process(5, stray=True),)), gpu(1, processes=(process(5, stray=True),)))
    (holder,) = holders(both)
    assert holder.gpu_indices == (0, 1)
    assert holder.used_bytes == 2 * GIB
    assert stray_count(fold(Store(), both)) == 1


def test_the_kill_button_counts_strays_and_is_dimmed_while_nothing_can_be_chosen() -> None:
    kill, foreign = BY_ID["kill"], process(6, user="grace", choosable=False)
    for processes, words, idle in (
        ((), "Kill strays", True),
        ((foreign,), "Kill strays", True),
        ((foreign, process(7)), "Kill strays", False),
        ((foreign, process(7, stray=True)), "Kill strays (1)", False),
    ):
        store = fold(Store(), machine(gpu(0, processes=processes)))
        assert (label_of(kill, store, narrow=False), is_idle(kill, store)) == (words, idle)
        assert obstacle(kill, store) is None, "the list says why nothing can be chosen"


def test_folding_something_else_is_an_error() -> None:
    with pytest.raises(TypeError, match="not a feed message"):
        fold(Store(), "hello")  # type: ignore[arg-type]


@pytest.mark.parametrize("action", ["free", "checkpoint", "restart", "preset", "stop"])
def test_run_actions_need_a_run_and_a_link(action: str) -> None:
    assert not offered(BY_ID[action], fold(Store(), machine(gpu())))
    alone = fold(Store(), wire.StateUpdate(run=run_state()))
    assert offered(BY_ID[action], alone)
    assert obstacle(BY_ID[action], alone) == "waiting for the first sample"


@pytest.mark.parametrize(("action", "possible"), [("free", False), ("stop", False), ("restart", True), ("kill", True)])
def test_commands_for_a_run_that_is_over(action: str, possible: bool) -> None:
    store = store_of(running(gpu(), state=wire.Phase.STOPPED, alive=False))
    assert (obstacle(BY_ID[action], store) is None) is possible


def test_a_time_without_samples_stays_a_gap() -> None:
    store = Store()
    for moment in (0, 1, 2, 12, 13):
        store = fold(store, machine(gpu(), time=NOW + moment))
    for past in (store.host_history, store.gpu_history["GPU-0000-0000"]):
        assert [m.time - NOW for m in past] == list(range(14))
        assert [m.time - NOW for m in past if m.fraction is None] == list(range(3, 12))


def test_a_late_sample_or_a_slow_interval_is_no_gap() -> None:
    for moments in ((0, 1, 2, 6), (0, 10, 20, 50)):
        store = Store()
        for moment in moments:
            store = fold(store, machine(gpu(), time=NOW + moment))
        assert len(store.host_history) == len(moments)


def test_a_process_may_be_ended_only_where_each_of_its_rows_allows_it() -> None:
    drawing = process(5, choosable=False, kind="graphics", reason="draws on the screen")
    (holder,) = holders(machine(gpu(0, processes=(process(5),)), gpu(1, processes=(drawing,))))
    assert (holder.process.choosable, holder.process.reason) == (False, "draws on the screen")
    assert holder.where == "0,1"
