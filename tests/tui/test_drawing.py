"""Drawing functions return text: bars on a fixed scale, bands with mark and word, charts with
labelled lines."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from memtop.supervisor import wire
from memtop.supervisor.monitor.values import Band, GpuDetails, GpuTrouble, Job, MigInstance
from memtop.supervisor.monitor.vram import RankMemory
from memtop.tui.charts import Point, Share, curve, history, memory_bar, nice_bounds, progress_bar
from memtop.tui.dashboard.overview import draw_compact_machine, draw_processes
from memtop.tui.dashboard.training import (
    PHASE_MARKS,
    draw_compact_training,
    draw_events,
    draw_header,
    draw_loss,
    draw_training,
    notice,
)
from memtop.tui.feed import Connected, Disconnected, Followed, ReplayPosition
from memtop.tui.line import fit, join_fitting, line, plain, spread, width_of, wrap
from memtop.tui.machine.gpu import draw_gpu, draw_gpu_note, draw_gpu_row, draw_gpu_table, gpu_title
from memtop.tui.machine.host import draw_host
from memtop.tui.machine.vram import vram_legend
from memtop.tui.store import Store, fold
from memtop.tui.words import age
from tests.tui.support import (
    GIB,
    HOST,
    NOW,
    gpu,
    machine,
    process,
    run_state,
    running,
    store_of,
    text_of,
)


@pytest.mark.parametrize(
    ("width", "shares", "options", "text"),
    [
        pytest.param(20, [(0.5, "█")], {}, "██████████       ┊┊ ", id="lines-at-85-and-90-in-the-free-part"),
        pytest.param(
            10, [(0.14, "█"), (0.14, "▓"), (0.12, "░")], {"limits": False}, "█▓▓░      ", id="the-sum-is-rounded-once"
        ),
        pytest.param(8, [(0.9, "█"), (0.9, "░")], {}, "███████░", id="never-wider-than-its-width"),
        pytest.param(10, [(0.2, "█")], {"peak": 0.55, "limits": False}, "██   ┆    ", id="peak-mark-beyond-the-filled-part"),
    ],
)
def test_a_bar(width: int, shares: list[tuple[float, str]], options: dict[str, Any], text: str) -> None:
    assert plain(memory_bar(width, [Share(part, glyph, "alloc") for part, glyph in shares], **options)) == text


@pytest.mark.parametrize(("fraction", "text"), [(None, "────"), (0.0, "────"), (0.5, "━━──"), (0.6, "━━╸─"), (1.0, "━━━━")])
def test_progress(fraction: float | None, text: str) -> None:
    assert plain(progress_bar(4, fraction)) == text


def test_history_draws_both_band_lines_and_the_newest_value_at_the_right() -> None:
    rows = [plain(one) for one in history(28, 5, [None, 0.5, 1.0])]
    assert "85-90 %" in rows[0]
    assert rows[-1].rstrip().endswith("0 %")
    assert rows[0][19] == "⢸"
    assert rows[0][:18] == "┄" * 18


def test_a_curve_has_labelled_axes_and_marks_the_new_attempt() -> None:
    rows = text_of(curve(50, 8, [Point(n, 4 - n / 20, 1 if n < 30 else 2) for n in range(1, 61)]))
    assert "4.00" in rows
    assert "update 1" in rows
    assert "60" in rows
    assert "┊ a new attempt" in rows


def test_a_curve_without_values_says_so() -> None:
    assert "no loss reported yet" in text_of(curve(50, 8, []))
    assert "no loss reported yet" in text_of(curve(50, 8, [Point(1, float("nan"))]))


def test_curve_bounds_are_round_and_hold_the_values() -> None:
    assert nice_bounds(1.3, 3.9) == (1.0, 4.0)
    low, high = nice_bounds(2.0, 2.0)
    assert low <= 2.0 <= high
    assert low < high


def test_fit_and_spread_count_cells() -> None:
    assert plain(fit(line("abcdef"), 4)) == "abc…"
    assert plain(spread(line("ab"), line("yz"), 8)) == "ab    yz"
    assert plain(spread(line("abcdef"), line("yz"), 7)) == "abcdef "


def test_parts_that_do_not_fit_are_left_out_whole() -> None:
    assert plain(join_fitting([line("alloc 1"), line("cache 2"), line("context 3")], 18)) == "alloc 1  cache 2"


def test_wrap_breaks_at_words_and_breaks_words_too_long() -> None:
    assert [plain(one) for one in wrap("one two three", 7)] == ["one two", "three"]
    assert [plain(one) for one in wrap("abcdefghij", 4)] == ["abcd", "efgh", "ij"]


def test_every_mark_is_one_cell() -> None:
    assert all(cell_len(mark) == 1 for mark, _ in PHASE_MARKS.values())


@pytest.mark.parametrize(
    ("fraction", "band", "words"),
    [(0.5, Band.SAFE, "· safe"), (0.87, Band.EDGE, "^ edge"), (0.95, Band.DANGER, "!! danger")],
)
def test_a_gpu_says_its_band_in_a_word_and_a_mark(fraction: float, band: Band, words: str) -> None:
    store = store_of(running(gpu(fraction=fraction, band=band)))
    text = text_of(draw_gpu(store, store.gpus[0], 60, 8))
    assert words in text
    assert f"{fraction * 100:.1f} %" in text
    assert "62 °C" in text
    assert "212/230 W" in text


def test_a_gpu_is_split_into_what_is_known() -> None:
    card = gpu(
        fraction=0.8,
        processes=(process(7, run="tiny", used_bytes=14 * GIB), process(8, used_bytes=2 * GIB)),
        reserved_bytes=GIB,
    )
    rank = RankMemory(
        rank=0,
        pid=7,
        connected=True,
        device_uuid=card.uuid,
        allocated_bytes=10 * GIB,
        reserved_bytes=13 * GIB,
        peak_bytes=12 * GIB,
    )
    store = store_of(running(card, ranks=(rank,)))
    text = text_of(draw_gpu(store, card, 76, 4))
    assert "█ alloc 10.0  ▓ cache 3.0  ▒ context 1.0  ░ pid 8 2.0  ░ driver 1.0" in text
    bar = text.splitlines()[0]
    assert [bar.count(glyph) for glyph in "█▓▒░"] == [35, 11, 3, 11]


def test_unknown_shares_are_dashes_and_not_zeros() -> None:
    card = gpu(processes=(process(7, run="tiny", used_bytes=None),))
    store = store_of(running(card))
    assert "alloc –  ▓ cache –  ▒ context –" in text_of(draw_gpu(store, card, 76, 4))


def test_a_lost_gpu_says_what_to_do() -> None:
    card = gpu(error="GPU is lost: reboot, or reset it with nvidia-smi --gpu-reset", total_bytes=None)
    store = store_of(running(card))
    text = text_of(draw_gpu(store, card, 40, 6))
    assert "!! cannot be read" in text
    assert "nvidia-smi" in text
    assert "cannot be read" in text_of(draw_gpu_table(store, 80, 4))


def test_growth_is_forecast_only_where_there_is_some() -> None:
    rising = [running(gpu(fraction=0.5 + n / 200)) for n in range(20)]
    messages = [
        wire.StateUpdate(run=m.run, machine=machine(gpu(fraction=0.5 + n / 200), time=NOW + n)) for n, m in enumerate(rising)
    ]
    alone = store_of(*(message.machine for message in messages if message.machine is not None))
    assert "full in" in text_of(draw_gpu(alone, alone.gpus[0], 70, 4))
    # For a run the supervisor decides: it distinguishes a warm-up and a sawtooth from a leak.
    watched = store_of(*messages)
    assert "full in" not in text_of(draw_gpu(watched, watched.gpus[0], 70, 4))
    still = store_of(*(machine(gpu(), time=NOW + n) for n in range(20)))
    assert "full in" not in text_of(draw_gpu(still, still.gpus[0], 70, 4))


def test_without_a_gpu_one_honest_line() -> None:
    store = store_of(running())
    assert plain(draw_gpu_note(store, 80, 1)[0]) == "no NVIDIA GPU: libnvidia-ml not found - training on CPU"


def test_host_memory_shows_limit_swap_and_pressure() -> None:
    limited = replace(HOST, limit_bytes=16 * GIB)
    store = store_of(wire.StateUpdate(run=run_state(), machine=machine(host=limited)))
    text = text_of(draw_host(store, 60, 12))
    assert "limit 16.0 of 32.0" in text
    assert "Swap" in text
    assert "0.5 / 4.0 GiB" in text
    assert "memory pressure 0.0 %" in text
    assert "this run 9.0" in text


def test_a_machine_without_swap_says_none() -> None:
    store = store_of(machine(host=replace(HOST, swap_total_bytes=0)))
    assert "Swap  none" in text_of(draw_host(store, 60, 5))


def test_compact_machine_has_one_line_each() -> None:
    store = store_of(running(gpu(0), gpu(1, 0.95, Band.DANGER)))
    rows = [plain(one) for one in draw_compact_machine(store, 78, 4)]
    assert len(rows) == 4
    assert "95.0% !! danger" in rows[1]
    assert rows[2].startswith("RAM")
    assert rows[3].startswith("Swap")


def test_sixteen_gpus_share_eight_lines_when_compact() -> None:
    store = store_of(running(*(gpu(n) for n in range(16))))
    assert len(draw_compact_machine(store, 78, 20)) == 10


def test_gpus_without_a_line_are_summarised_by_the_fullest() -> None:
    cards = [gpu(n, 0.3) for n in range(15)] + [gpu(15, 0.95, Band.DANGER)]
    rows = [plain(one) for one in draw_compact_machine(store_of(running(*cards)), 60, 5)]
    assert "12 more GPUs, the fullest is 15: 95.0 %   !! danger" in " ".join(rows[2].split(" ")).replace("  95", " 95")
    assert rows[3].startswith("RAM")


def test_training_numbers() -> None:
    store = store_of(running(gpu()))
    text = text_of(draw_training(store, 60, 10))
    for expected in ("update 24 / 60", "40 %", "ETA 02:11:30", "loss 1.842 best 1.790", "lr 8.7e-05", "55.9 k tok/s"):
        assert expected in text
    assert "checkpoint update 20  12 s ago  1.0 GiB" in text


def test_training_without_any_number_has_dashes() -> None:
    bare = wire.RunState(name="mine", folder="x", state=wire.Phase.STARTING, created=NOW, command=("python", "mine.py"))
    text = text_of(draw_training(store_of(wire.StateUpdate(run=bare)), 60, 10))
    assert "update – / –" in text
    assert "checkpoint none yet" in text
    assert "0.0" not in text


def test_an_incomplete_checkpoint_says_why() -> None:
    saved = wire.Checkpoint(path="x", complete=False, problem="model.safetensors is missing")
    text = text_of(draw_training(store_of(running(checkpoint=saved)), 70, 10))
    assert "! not complete: model.safetensors is missing" in text


def test_ranks_that_do_not_fit_are_counted() -> None:
    ranks = tuple(RankMemory(rank=n, pid=n, connected=n != 1) for n in range(8))
    text = text_of(draw_training(store_of(running(ranks=ranks)), 70, 9))
    assert "rank 1 CPU  ! its agent does not answer" in text
    assert "6 more ranks" in text
    over = text_of(draw_training(store_of(running(ranks=ranks, alive=False, state=wire.Phase.FINISHED)), 70, 9))
    assert "rank" not in over, "its ranks are gone: not silent"


@pytest.mark.parametrize("phase", list(wire.Phase))
def test_the_header_has_a_word_and_a_mark_for_every_state(phase: wire.Phase) -> None:
    store = store_of(running(gpu(), state=phase, total_updates=None))
    text = plain(draw_header(store, 160, 1)[0])
    assert f"{PHASE_MARKS[phase][0]} {phase.value}" in text
    assert "preset standard  8 x 4 x 1 = 32  T 128  00:22:10" in text
    assert width_of(draw_header(store, 60, 1)[0]) == 60


def test_the_header_distinguishes_a_first_update_from_loading() -> None:
    store = store_of(running(gpu(), state=wire.Phase.STARTING, total_updates=60))
    assert "◌ first update…" in plain(draw_header(store, 80, 1)[0])


def test_slow_runs_have_numbers_that_mean_something() -> None:
    slow = store_of(running(gpu(), samples_per_second=0.0268, tokens_per_second=1.5, step_seconds=194.55))
    for lines in (draw_training(slow, 70, 12), draw_compact_training(slow, 80, 3)):
        text = text_of(lines)
        assert "0.027 samples/s" in text
        assert "1.5 tok/s" in text
        assert "step 195 s" in text


def test_the_parts_of_an_update_add_up_to_the_update() -> None:
    split = wire.StepSplit(data_wait_seconds=0.0, forward_seconds=2.7, backward_seconds=4.8, optimizer_seconds=0.1)
    text = text_of(draw_training(store_of(running(gpu(), split=split, step_seconds=10.0)), 76, 12))
    assert "data 0 %  forward 27 %  backward 48 %  optimizer 1 %  other 24 %" in text


def test_small_memories_are_shown_in_mib() -> None:
    small = replace(
        HOST, shm_total_bytes=2**20, shm_used_bytes=2**20, shm_fraction=1.0, swap_total_bytes=512 * 2**20, swap_used_bytes=0
    )
    text = text_of(draw_host(store_of(running(gpu()), machine(gpu(), host=small)), 76, 12))
    assert "1 / 1 MiB" in text
    assert "0 / 512 MiB" in text
    limited = replace(HOST, limit_bytes=300 * 2**20, used_bytes=150 * 2**20, used_fraction=0.5)
    text = text_of(draw_host(store_of(running(gpu()), machine(gpu(), host=limited)), 76, 12))
    assert "150 / 300 MiB" in text
    assert "limit 300 MiB of 32.0 GiB" in text


def test_why_a_run_has_ended_goes_on_below_itself() -> None:
    why = "not saved: 16 MiB needed, 3 MiB free; the state before is kept, free some space, and what was lost is at the end"
    store = store_of(running(gpu(), state=wire.Phase.FAILED, alive=False, reason=why))
    for lines in (draw_training(store, 70, 13), draw_compact_training(store, 80, 3)):
        assert why in " ".join(text_of(lines).split())


def test_a_warning_of_a_card_goes_on_below_itself_where_there_is_room() -> None:
    trouble = GpuTrouble(
        time=NOW - 60,
        kind="xid",
        code=31,
        message="a program touched memory that it does not own; the program ends, the card is sound",
        fault_of_program=True,
    )
    card = gpu(troubles=(trouble,))
    store = store_of(running(card))
    assert "the card is sound" in text_of(draw_gpu(store, card, 76, 10))
    assert "…" in text_of(draw_gpu(store, card, 76, 6))


def test_the_header_of_a_followed_process() -> None:
    store = store_of(machine(gpu()), Followed(12, "python train.py", frozenset({12, 13}), 3 * GIB))
    assert "pid 12: 2 processes, 3.0 GiB resident: python train.py" in plain(draw_header(store, 120, 1)[0])
    gone = fold(store, Followed(12))
    assert "pid 12 has ended" in plain(draw_header(gone, 120, 1)[0])


def test_events_are_newest_first_and_go_on_below_themselves() -> None:
    rows = (
        wire.Event(id=1, time=NOW, attempt=1, kind="attempt", message="attempt 1 started"),
        wire.Event(id=2, time=NOW + 60, attempt=1, kind="band", message="GPU 0: edge -> danger, 91.0 %, cache grew"),
    )
    text = text_of(draw_events(store_of(wire.EventRows(rows=rows)), 40, 6)).splitlines()
    assert "!! GPU 0: edge -> danger" in text[0]
    assert text[1].startswith(" " * 12)
    assert "attempt 1 started" in text[-1]


def test_only_the_newest_of_consecutive_checkpoints_is_shown() -> None:
    kinds = ("attempt", "checkpoint", "checkpoint", "warning", "checkpoint", "checkpoint", "checkpoint")
    rows = tuple(
        wire.Event(id=n, time=NOW + n, attempt=1, kind=kind, message=f"{kind} {n}") for n, kind in enumerate(kinds, start=1)
    )
    text = text_of(draw_events(store_of(wire.EventRows(rows=rows)), 40, 6)).splitlines()
    assert [" ".join(row.split()[1:]) for row in text] == ["checkpoint 7", "! warning 4", "checkpoint 3", "attempt 1"]


def test_loss_comes_from_the_metrics() -> None:
    rows = tuple(wire.Metric(update=n, attempt=1, loss=3 - n / 100) for n in range(1, 50))
    assert "3.00" in text_of(draw_loss(store_of(wire.MetricRows(rows=rows)), 60, 8))


def test_processes_are_listed_strays_first() -> None:
    card = gpu(processes=(process(5, used_bytes=9 * GIB), process(6, stray=True)))
    rows = [plain(one) for one in draw_processes(store_of(machine(card)), 100, 8)]
    assert "6" in rows[1]
    assert "! stray" in rows[1]
    assert "9.0 GiB" in rows[2]


def test_the_notice_words_every_state_of_the_link() -> None:
    connected = store_of(running(gpu()))
    assert notice(connected) == ""
    assert notice(Store()) == "… waiting for the first sample"
    gone = fold(connected, Disconnected("supervisor is gone - reconnecting"))
    assert notice(gone) == "! supervisor is gone - reconnecting"
    assert notice(fold(gone, Connected())) == ""
    assert notice(store_of(running(gpu(), warnings=("disk is nearly full",)))) == "! disk is nearly full"


@pytest.mark.parametrize(("seconds", "words"), [(12, "12 s"), (240, "4 min"), (9_400, "3 h"), (900_000, "10 days")])
def test_ages(seconds: float, words: str) -> None:
    assert age(seconds) == words


def test_memory_outside_the_allocator_is_split_where_the_base_is_known() -> None:
    card = gpu(fraction=0.6, processes=(process(7, run="tiny", used_bytes=12 * GIB),))
    rank = RankMemory(
        rank=0,
        pid=7,
        connected=True,
        device_uuid=card.uuid,
        allocated_bytes=8 * GIB,
        reserved_bytes=9 * GIB,
        peak_reserved_bytes=10 * GIB,
    )
    store = store_of(running(card, ranks=(rank,), gpu_base_bytes={card.uuid: GIB}))
    text = text_of(draw_gpu(store, card, 90, 5))
    assert "▒ context 1.0  ▒ in process 2.0" in text
    # 12 GiB are in use, of which the allocator holds 9 now and held 10 at most.
    assert "step peak 13.0" in text
    narrow = text_of(draw_gpu(store, card, 58, 5))
    assert "▒ context 3.0" in narrow


def test_other_processes_are_named_by_their_job() -> None:
    jobs = (Job(key="j", name="sweep", leader_pid=8, pids=(8, 9)),)
    card = gpu(processes=(process(8, used_bytes=2 * GIB, job="j"), process(9, used_bytes=3 * GIB, job="j")), fraction=0.25)
    store = store_of(replace(machine(card), jobs=jobs))
    assert "█ sweep 5.0" in text_of(draw_gpu(store, card, 70, 5))


def test_memory_of_ended_and_unlisted_processes_is_shown() -> None:
    gone = process(8, used_bytes=2 * GIB, gone=True)
    card = gpu(fraction=0.5, processes=(gone, process(9, used_bytes=3 * GIB)), reserved_bytes=GIB)
    store = store_of(machine(card))
    text = text_of(draw_gpu(store, card, 100, 5))
    assert "! held by no living process 2.0" in text
    assert "unlisted 5.0" in text
    # If all processes are visible, memory that none is listed for is held by no living process.
    alone = gpu(fraction=0.5, processes=(process(9, used_bytes=3 * GIB),), reserved_bytes=GIB)
    store = dataclasses.replace(store_of(machine(alone)), all_pids_visible=True)
    assert "! held by no living process 7.0" in text_of(draw_gpu(store, alone, 100, 5))


def test_unified_memory_is_one_pool_of_three_parts() -> None:
    card = gpu(
        total_bytes=100 * GIB, used_bytes=30 * GIB, other_pool_bytes=20 * GIB, free_bytes=50 * GIB, fraction=0.5, unified=True
    )
    rows = [plain(one) for one in draw_gpu(store_of(machine(card)), card, 106, 5)]
    assert [rows[0].count(glyph) for glyph in "█░"] == [30, 20]
    assert "50.0 / 100.0 GiB" in rows[1]
    assert "unified" in rows[1]
    assert "GPU processes 30.0  ░ rest of the machine 20.0  available 50.0" in rows[2]
    assert "50.0/100 GiB" in plain(draw_gpu_row(store_of(machine(card)), card, 100, name_width=10))


def test_the_newest_trouble_is_a_warning_line_and_before_held_clocks() -> None:
    held = GpuDetails(throttle_reasons=("power limit reached",))
    card = gpu(details=held)
    store = store_of(machine(card))
    assert "^ clocks held down: power limit reached" in text_of(draw_gpu(store, card, 60, 5))
    troubles = (
        GpuTrouble(time=NOW - 7200, kind="xid", code=31, message="old"),
        GpuTrouble(time=NOW - 60, kind="lost", message="new"),
    )
    worse = gpu(details=held, troubles=troubles)
    text = text_of(draw_gpu(store_of(machine(worse)), worse, 60, 4))
    assert "!! lost 60 s ago: new" in text
    assert "power limit" not in text
    assert "0!" in plain(draw_gpu_row(store_of(machine(worse)), worse, 60))
    past = gpu(troubles=troubles[:1])
    assert "Xid" not in text_of(draw_gpu(store_of(machine(past)), past, 60, 6))


def test_the_title_says_what_cuda_calls_a_gpu_where_that_differs() -> None:
    assert gpu_title(gpu(3, visible_index=0)).startswith("GPU 3  cuda:0  RTX A4500")
    assert "cuda" not in gpu_title(gpu(3, visible_index=3)) + gpu_title(gpu(3))


def test_the_run_by_role_adds_up_with_shared_memory_apart() -> None:
    roles = (
        wire.RoleMemory(role="rank", processes=1, pss_bytes=int(9.8 * GIB)),
        wire.RoleMemory(role="loader worker", processes=6, pss_bytes=int(11.6 * GIB), shm_bytes=int(0.4 * GIB)),
    )
    store = store_of(running(run_memory=roles))
    text = text_of(draw_host(store, 60, 12))
    assert "run 21.4:  main 9.8  6 workers 11.2  shm 0.4" in text
    assert "this run 21.4" in text


def test_page_cache_is_the_lightest_part_and_not_in_the_band() -> None:
    store = store_of(machine(host=replace(HOST, cached_bytes=4 * GIB)))
    rows = [plain(one) for one in draw_host(store, 86, 8)]
    # Ten cells, in two of which the mark of the highest and the line of 85 % go before it.
    assert [rows[0].count(glyph) for glyph in "█·"] == [60, 8]
    assert "75.0 %   · safe" in rows[1]
    assert "page cache 4.0" in rows[2]
    # It does not hide the lines of the bands.
    full = store_of(machine(host=replace(HOST, cached_bytes=8 * GIB)))
    assert plain(draw_host(full, 86, 8)[0]).count("┊") == 2


def test_unusual_values_come_first() -> None:
    host = replace(
        HOST,
        shm_total_bytes=GIB,
        shm_used_bytes=int(0.9 * GIB),
        shm_fraction=0.9,
        oom_kills=2,
        pressure_full_fraction=0.01,
        huge_pages_total_bytes=8 * GIB,
        huge_pages_free_bytes=8 * GIB,
        load_average=(1.0, 2.0, 3.0),
    )
    store = store_of(machine(host=host))
    low = text_of(draw_host(store, 70, 5))
    assert "!! nearly full" in low
    assert "!! the kernel has killed 2 times for memory" in low
    assert "huge pages" not in low
    high = text_of(draw_host(store, 70, 12))
    for words in ("memory pressure some 0.0 %, full 1.0 %", "huge pages 8.0 (8.0 free)", "load 1.0 2.0 3.0"):
        assert words in high


def test_a_mig_gpu_shows_its_instances() -> None:
    instances = tuple(
        MigInstance(position=p, name="1g.10gb", total_bytes=10 * GIB, used_bytes=GIB, used_fraction=0.1, band=Band.SAFE)
        for p in (0, 2, 5)
    )
    card = gpu(mig=instances)
    text = text_of(draw_gpu(store_of(machine(card)), card, 70, 8))
    assert [row.split()[0] for row in text.splitlines()[4:]] == ["0", "2", "5"]
    assert "2 more MIG instances" in text_of(draw_gpu(store_of(machine(card)), card, 70, 6))


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize("name", ["tiny", "a-run-with-a-name-that-takes-the-whole-line-of-a-small-terminal"])
def test_a_replay_never_looks_live(width: int, name: str) -> None:
    update = running(gpu(), name=name, attempt=12, state=wire.Phase.RESTARTING)
    played = ReplayPosition("replay, 00:03:11 of 00:41:02, 60x", "replay 60x")
    (header,) = draw_header(dataclasses.replace(store_of(update, played), read_only=True), width, 1)
    assert "replay" in plain(header)
    assert "60x" in plain(header)
    assert width_of(header) <= width


def test_a_live_run_in_a_read_only_dashboard_says_so_at_80_columns() -> None:
    (header,) = draw_header(dataclasses.replace(store_of(running(gpu())), read_only=True), 80, 1)
    assert "read-only" in plain(header)


def test_no_process_is_shown_only_where_the_driver_lists_none() -> None:
    refused = gpu(0, unknown={"processes": "no permission"})
    lost = gpu(1, error="the GPU is lost")
    legend = {one.index: plain(vram_legend(store_of(machine(one)), one, 200)) for one in (refused, gpu(2))}
    assert "processes not known" in legend[0]
    assert "processes none" in legend[2]
    assert "no process uses a GPU" in text_of(draw_processes(store_of(machine(gpu(2))), 100, 5))
    text = text_of(draw_processes(store_of(machine(refused, lost, gpu(2))), 100, 5))
    assert "no process" not in text
    assert "GPU 0: not all of its processes are known: no permission" in text
    assert "GPU 1: its processes are not known: the GPU is lost" in text
    silent = replace(machine(gpu(2, processes=(process(5),))), gpu_age_seconds=75.0)
    text = text_of(draw_processes(store_of(silent), 100, 5))
    assert "the driver has not answered for 00:01:15" in text
    assert "job-5.py" in text
