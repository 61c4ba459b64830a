"""What the recovery card draws: bars of memory, predicted peaks, the last line."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.monitor.values import Band
from memtop.supervisor.recovery.values import Forecast, Remedy
from memtop.tui.line import plain
from memtop.tui.recovery import memory_lines, outlook
from memtop.tui.remedies import predicted_line, remedy_lines
from memtop.tui.store import Store, fold
from tests.tui.support import (
    ALLOCATOR,
    BY_HAND,
    DIAGNOSIS,
    GIB,
    HOST,
    NOW,
    PROPOSAL,
    SMALLER,
    dead,
    machine,
)


def drawn(diagnosis: Diagnosis, store: Store | None = None, width: int = 70) -> list[str]:
    return [plain(one).rstrip() for one in memory_lines(diagnosis, store or Store(), width)]


def test_the_bar_ends_where_the_numbers_do() -> None:
    bar = next(plain(one) for one in memory_lines(DIAGNOSIS, Store(), 80) if "█" in plain(one))
    assert (bar.count("█"), bar.count("▓"), bar.count("▒"), bar.count("░"), bar.count(" ")) == (68, 4, 2, 4, 2)


def test_unknown_parts_are_named_and_not_spread_over_the_others() -> None:
    lines = drawn(replace(DIAGNOSIS, context_bytes=None, other_process_bytes=None), width=90)
    assert "▒ context –" in lines[2]
    assert "░ others –" in lines[2]
    assert "? unknown 1.5" in lines[2]
    none_free = drawn(replace(DIAGNOSIS, free_bytes=None), width=90)
    assert "? unknown, or free 0.5" in " ".join(none_free)
    assert "free –" in " ".join(none_free)


def test_the_snapshot_of_the_memory_is_named() -> None:
    assert drawn(replace(DIAGNOSIS, snapshot_file="/runs/my run/rank-0-memory.pickle"), width=100)[-1] == (
        "Which layers held the memory: memtop diagnose '/runs/my run/rank-0-memory.pickle'"
    )


def test_without_the_cards_size_there_is_no_bar() -> None:
    lines = drawn(replace(DIAGNOSIS, total_bytes=None))
    assert "its whole size is not known" in lines[0]
    assert not any("██" in line for line in lines)


def test_a_death_of_host_memory_has_a_bar_of_host_memory() -> None:
    diagnosis = Diagnosis(
        kind=Kind.HOST_OOM_KILLED,
        confidence=0.98,
        summary="killed",
        allowed_bytes=16 * GIB,
        process_bytes=12 * GIB,
        free_bytes=GIB,
    )
    lines = drawn(diagnosis, width=80)
    assert lines[0] == "its memory limit at that moment, measured, 16.0 GiB"
    assert (lines[1].count("█"), lines[1].count("░")) == (60, 15)
    assert "this run 12.0  ░ others 3.0  free 1.0 GiB" in lines[2]
    # Without a report of that moment the line names the highest sample, and the parts are unknown.
    bare = Diagnosis(kind=Kind.HOST_OOM_KILLED, confidence=0.9, summary="killed")
    died = dead(ended=NOW + 5)
    there = fold(fold(fold(Store(), machine(time=NOW)), died), machine(host=replace(HOST, used_fraction=0.1), time=NOW + 9))
    seen = drawn(bare, there, 90)
    assert seen[0] == "host memory, the highest sample in the minute before: 75.0 % of 32.0 GiB"
    assert seen[2] == "? how much each program held is not known"
    # A dashboard that starts later sees a machine that has its memory back, which proves nothing.
    late = fold(fold(Store(), replace(died, machine=None)), machine(time=NOW + 9))
    assert drawn(bare, late, 100)[0].startswith("? host memory at that moment is not known")


@pytest.mark.parametrize(("kind", "name"), [(Kind.SHM_EXHAUSTED, "/dev/shm"), (Kind.DISK_FULL, "the disk")])
def test_other_kinds_of_room_have_their_own_bar_or_none(kind: Kind, name: str) -> None:
    diagnosis = Diagnosis(kind=kind, confidence=1.0, summary="full", total_bytes=8 * GIB, free_bytes=0)
    lines = drawn(diagnosis)
    assert lines[0] == f"{name} at that moment, measured, 8.0 GiB"
    assert lines[1] == "█" * 70
    assert "is not known" in drawn(replace(diagnosis, free_bytes=None))[0]


def test_predicted_measured_and_unknown_look_different() -> None:
    assert SMALLER.forecast is not None
    predicted = predicted_line(SMALLER.forecast, 80)
    assert plain(predicted).count("╍") > 3
    assert "█" not in plain(predicted)
    assert "~12.0 of 20.0 GiB" in plain(predicted)
    assert "▴" in plain(predicted)
    unknown = " ".join(plain(one) for one in remedy_lines(1, ALLOCATOR, 80, alive=False))
    assert "? peak not known: the pieces were not counted" in unknown
    assert not {"╍", "█", "~"} & set(unknown)


def test_a_forecast_beyond_the_card_is_in_danger_and_keeps_its_place() -> None:
    over = Forecast(peak_bytes=22 * GIB, total_bytes=20 * GIB, fraction=1.1, band=Band.DANGER, basis="line")
    for width in (30, 60, 120):
        assert len(plain(predicted_line(over, width))) <= max(width, 38)
    assert "110.0 % !! danger" in plain(predicted_line(over, 80))
    bare = Forecast(peak_bytes=22 * GIB, basis="line")
    assert plain(predicted_line(bare, 40)).strip() == "~22.0 GiB predicted"


@pytest.mark.parametrize("width", [40, 56, 70, 96, 150])
def test_no_line_of_a_remedy_is_wider_than_its_room(width: int) -> None:
    for remedy in PROPOSAL.remedies:
        for one in remedy_lines(1, remedy, width, alive=True):
            assert len(plain(one)) <= width, plain(one)


def test_a_live_change_is_called_that_only_while_the_run_lives() -> None:
    def price(*, alive: bool) -> str:
        return " ".join(plain(one) for one in remedy_lines(1, SMALLER, 120, alive=alive))

    assert "at the next update, no restart" in price(alive=True)
    assert "training unchanged, resumes" in price(alive=False)


def test_nothing_is_said_to_resume_that_is_not_known_to() -> None:
    shown = " ".join(plain(one) for one in remedy_lines(1, ALLOCATOR, 120, alive=False, resumes=False))
    assert "training unchanged" in shown
    assert "resumes" not in shown


def test_the_last_line_says_what_enter_does_with_the_marked_one() -> None:
    def words(marked: Remedy | None, *, can_act: bool = True) -> str:
        return plain(outlook(PROPOSAL, marked, NOW, can_act=can_act))

    assert "Enter applies ▸" in words(SMALLER)
    assert "Enter copies the command of ▸" in words(BY_HAND)
    assert "▸ only you can do" in words(replace(BY_HAND, command=None))
    for line in (words(None), words(SMALLER, can_act=False)):
        assert line == "· Esc closes; the run stays failed"


def test_remedies_for_a_person_have_neither_forecast_nor_question() -> None:
    own = Remedy(
        id="workers",
        title="no data-loader workers, in your program's own options",
        keeps_math=True,
        resumable="none",
        needs_consent=True,
        forecast_unknown="no peaks of this program",
    )
    assert [plain(one).strip() for one in remedy_lines(1, own, 80, alive=False)] == [
        "1  no data-loader workers, in your program's own options",
        "only you can do this",
    ]


def test_the_outlook_never_counts_below_zero() -> None:
    late = plain(outlook(replace(PROPOSAL, begins=NOW), SMALLER, NOW + 3, can_act=False))
    assert late == "… remedy 1 begins in 0 s by itself"


def test_a_remedy_without_any_number_says_so() -> None:
    bare = Remedy(id="x", title="x", keeps_math=True, resumable="resumes", preset="low")
    text = " ".join(plain(one) for one in remedy_lines(1, bare, 100, alive=False))
    assert "no measurement allows a forecast" in text
    assert "speed not known" in text
