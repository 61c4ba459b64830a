"""The drawings of the machine: GPUs and host memory with their bands, and who uses them."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from memtop.supervisor import wire
from memtop.supervisor.monitor.values import Band, GpuDetails, GpuTrouble, Job, MigInstance
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run_memory import RoleMemory
from memtop.supervisor.wire import Configuration, ConfigurationRows
from memtop.tui.dashboard.overview import draw_compact_machine, draw_processes
from memtop.tui.line import plain
from memtop.tui.machine.gpu import draw_gpu, draw_gpu_note, draw_gpu_row, draw_gpu_table, gpu_title
from memtop.tui.machine.gpu_details import draw_gpu_details
from memtop.tui.machine.host import draw_host
from memtop.tui.machine.vram import vram_legend
from tests.tui.support import GIB, HOST, NOW, SETTINGS, gpu, machine, process, run_state, running, store_of, text_of


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
    assert "17.0 / 20.0 GiB" in text, "with the driver's reserve, so that it divides to the percentage"
    bar = text.splitlines()[0]
    assert [bar.count(glyph) for glyph in "█▓▒░"] == [35, 11, 3, 11]


def test_what_was_foreseen_stands_beside_what_is_in_use_on_the_cards_of_the_run() -> None:
    cards = gpu(0, 0.5), gpu(1, 0.5)
    rank = RankMemory(rank=0, pid=7, connected=True, device_uuid=cards[0].uuid)
    found = Forecast(peak_bytes=15 * GIB, total_bytes=20 * GIB, fraction=0.75, band=Band.SAFE, basis="estimate")
    rows = (Configuration(number=1, attempt=1, started=0, reason="start", settings=SETTINGS, foreseen=found),)
    store = store_of(running(*cards, ranks=(rank,)), ConfigurationRows(rows=rows))
    own, other = (text_of(draw_gpu(store, card, 90, 5)) for card in cards)
    assert "▴ foreseen ~15.0" in own
    assert own.splitlines()[0].index("▴") > own.splitlines()[0].index("░")
    assert "▴" not in other
    ended = store_of(running(*cards, ranks=(rank,), alive=False), ConfigurationRows(rows=rows))
    assert "▴" not in text_of(draw_gpu(ended, cards[0], 90, 5))


def test_unknown_shares_are_dashes_and_not_zeros() -> None:
    card = gpu(processes=(process(7, run="tiny", used_bytes=None),))
    store = store_of(running(card))
    assert "alloc –  ▓ cache –  ▒ context –" in text_of(draw_gpu(store, card, 76, 4))


def test_a_run_whose_allocator_is_not_known_is_one_part_and_looks_used() -> None:
    card = gpu(fraction=0.5, processes=(process(7, run="tiny", used_bytes=10 * GIB),), total_bytes=20 * GIB)
    bar, _, legend, *_ = text_of(draw_gpu(store_of(running(card)), card, 76, 5)).splitlines()
    assert "█ this run 10.0  ░ others 0.0" in legend
    assert bar.count("█") > 25
    assert "▒" not in bar


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
    assert plain(draw_gpu_note(store, 80, 1)[0]) == "no NVIDIA GPU: no NVIDIA driver found - training on CPU"


def test_host_memory_shows_limit_swap_and_pressure() -> None:
    limited = replace(HOST, limit_bytes=16 * GIB)
    store = store_of(wire.StateUpdate(run=run_state(), machine=machine(host=limited)))
    text = text_of(draw_host(store, 60, 12))
    assert "limit 16.0 of 32.0" in text
    assert "Swap" in text
    assert "0.5 / 4.0 GiB" in text
    assert "memory pressure 0.0 %" in text
    assert "this run, RSS 9.0" in text


def test_a_machine_without_swap_says_none() -> None:
    store = store_of(machine(host=replace(HOST, swap_total_bytes=0)))
    assert "Swap  none" in text_of(draw_host(store, 60, 5))


def test_compact_machine_has_one_line_each() -> None:
    store = store_of(running(gpu(0), gpu(1, 0.95, Band.DANGER)))
    rows = [plain(one) for one in draw_compact_machine(store, 78, 4)]
    assert len(rows) == 4
    assert "95.0 % !! danger" in rows[1]
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


def test_processes_are_listed_strays_first() -> None:
    card = gpu(processes=(process(5, used_bytes=9 * GIB), process(6, stray=True)))
    rows = [plain(one) for one in draw_processes(store_of(machine(card)), 100, 8)]
    assert "6" in rows[1]
    assert "! stray" in rows[1]
    assert "9.0 GiB" in rows[2]


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
        RoleMemory(role="rank", processes=1, pss_bytes=int(9.8 * GIB)),
        RoleMemory(role="loader worker", processes=6, pss_bytes=int(11.6 * GIB), shm_bytes=int(0.4 * GIB)),
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


@pytest.mark.parametrize("width", [36, 60, 120])
def test_a_run_that_holds_nothing_of_a_gpu_has_no_zeros_there(width: int) -> None:
    card = gpu(processes=(process(5),))
    on_cpu = RankMemory(rank=0, pid=7, connected=True, rss_bytes=GIB)
    elsewhere = replace(on_cpu, device_uuid="GPU-other", allocated_bytes=GIB, reserved_bytes=GIB)
    connected = replace(on_cpu, rss_bytes=None)
    # 9 GiB have no known owner: before its ranks report, they may be the run's; those of one's own
    # program always, because only torch's GPUs are known of it.
    for ranks, settings, words in (
        ((on_cpu,), SETTINGS, "run on the CPU: see RAM"),
        ((on_cpu,), None, "this run –"),
        ((on_cpu, connected), SETTINGS, "this run –"),
        ((connected,), SETTINGS, "this run –"),
        ((elsewhere,), SETTINGS, "nothing of this run"),
        ((elsewhere, connected), SETTINGS, "this run –"),
        ((), SETTINGS, "this run –"),
    ):
        store = store_of(wire.StateUpdate(run=run_state(ranks=ranks, settings=settings), machine=machine(card)))
        legend = plain(vram_legend(store, card, width))
        assert legend.startswith(words)
        assert "alloc" not in text_of([*draw_gpu(store, card, width, 8), *draw_gpu_details(store, card, width)])
    listed = gpu(processes=(process(7, used_bytes=None, run=None),))
    store = store_of(wire.StateUpdate(run=run_state(ranks=(on_cpu,)), machine=machine(listed)))
    assert plain(vram_legend(store, listed, width)).startswith("this run –"), "the driver lists its process there"
    here = replace(elsewhere, device_uuid=card.uuid)
    store = store_of(wire.StateUpdate(run=run_state(ranks=(here,)), machine=machine(card)))
    assert plain(vram_legend(store, card, width)).startswith("█ alloc 1.0")


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
