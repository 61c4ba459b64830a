"""The recovery card of a run that has run out of memory: when it opens, what it shows, and what its
keys do."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from textual.strip import Strip
from textual.widgets import Button

from memtop.supervisor import wire
from memtop.supervisor.diagnosis.environment import Place
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.monitor.values import Band
from memtop.supervisor.recovery.advice import table
from memtop.supervisor.recovery.values import Forecast, Remedy, Written
from memtop.supervisor.wire import Change, Restart, Stop
from memtop.tui import recovery as oom
from memtop.tui.app import DashboardApp
from memtop.tui.feed import Disconnected
from memtop.tui.line import plain
from memtop.tui.line_list import LineList
from memtop.tui.processes.screen import ProcessesScreen
from memtop.tui.recovery import OomCard, memory_lines, outlook
from memtop.tui.remedies import predicted_line, remedy_lines
from memtop.tui.screen import ConfirmDialog
from memtop.tui.store import Store, fold
from tests.tui.support import (
    ALLOCATOR,
    BY_HAND,
    DIAGNOSIS,
    GIB,
    HOST,
    NOW,
    PROPOSAL,
    SHORTER,
    SMALLER,
    RecordingFeed,
    click,
    dead,
    gpu,
    machine,
    opened,
    press,
    resize,
    running,
    screen_text,
    settle,
)

SIZES = [(80, 24), (160, 50)]


@pytest.fixture(autouse=True)
def _every_enter_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "DELIBERATE_SECONDS", 0.0)


def card(app: DashboardApp) -> OomCard:
    assert isinstance(app.screen, OomCard)
    return app.screen


def words(app: DashboardApp) -> str:
    """The dialog's text without its frame, so that sentences can be found across lines."""
    box = app.screen.query_one(".dialog").region
    rows = screen_text(app).splitlines()[box.y : box.bottom]
    return " ".join(" ".join(row[box.x : box.right] for row in rows).replace("│", " ").replace("▎", " ").split())


async def test_it_opens_by_itself_and_shows_what_happened_and_what_can_be_done() -> None:
    async with opened(RecordingFeed(running(gpu()), dead()), size=(80, 24)) as (app, pilot):
        for size in SIZES:
            await resize(pilot, *size)
            await press(pilot, "escape", "w")
            card(app)
            text = words(app)
            for expected in (
                "Out of GPU memory",
                "GPU 0 ran out of memory in the backward pass of update 24: 2.1 GiB asked, 0.5 GiB free.",
                "proven by the program's own record",
                "GPU 0 at that moment, measured, 20.0 GiB",
                "█ allocated 17.0 ▓ cached 1.0 ▒ context 0.5 ░ others 1.0 free 0.50 GiB",
                "asked for 2.1 GiB more: the logits (B 8 x T 128 x V 50 257, fp32)",
                "torch.OutOfMemoryError: CUDA out of memory.",
                "memtop does nothing by itself: --on-oom ask",
                "▸ 1 batch 8 -> 4, accumulation 4 -> 8: effective batch stays 32",
                "Enter applies ▸, Esc leaves the run failed",
            ):
                assert expected in text, (size, expected)
            for _ in range(4):
                await press(pilot, "down")
                text += " " + words(app)
            for expected in (
                "~12.0 of 20.0 GiB 60.0 % · safe",
                "training unchanged, resumes, speed about -10 %",
                "? peak not known: the pieces were not counted",
                "! needs your consent, changes training, resumes",
                "does not change the run: a command to copy",
                "type: sudo fallocate -l 8G /swapfile",
            ):
                assert expected in text, (size, expected)


async def test_enter_applies_the_first_and_the_answer_is_shown() -> None:
    feed = RecordingFeed(dead())
    feed.answers = ((wire.Outcome.ACCEPTED, "restarting"), (wire.Outcome.DONE, "attempt 3 trains"))
    async with opened(feed, "enter", size=(80, 24)) as (app, pilot):
        assert feed.requests == [
            Restart(id=1, change=Change(assignments={"batch": "4", "accumulation": "8"}, reason="gpu_oom at update 24"))
        ]
        for size in SIZES:
            await resize(pilot, *size)
            assert "✓ attempt 3 trains" in screen_text(app)
        # The same death does not open it once more; the key does.
        feed.send(dead())
        await settle(pilot)
        assert app.screen is app.dashboard
        await press(pilot, "w")
        card(app)


async def test_another_one_is_applied_by_the_cursor_or_by_a_click_and_the_button() -> None:
    feed = RecordingFeed(dead())
    async with opened(feed, size=(160, 50)) as (app, pilot):
        await pilot.press("down")
        await click(pilot, "#confirm")
        (request,) = feed.requests
        assert isinstance(request, Restart)
        assert request.change.assignments == ALLOCATOR.assignments
        await press(pilot, "w")
        page = card(app).query_one("#oom-page")
        (y,) = [n for n, row in enumerate(screen_text(app).splitlines()) if SHORTER.title in row]
        await click(pilot, page, offset=(6, y - page.region.y))
        assert f"▸ 3  {SHORTER.title}" in screen_text(app)


async def test_a_change_of_training_needs_consent_with_the_focus_on_cancel() -> None:
    feed = RecordingFeed(dead())
    async with opened(feed, "down", "down", "enter") as (app, pilot):
        assert isinstance(app.screen, ConfirmDialog)
        assert app.focused is not None
        assert app.focused.id == "cancel"
        assert "It sets seq_len=64." in screen_text(app)
        assert "changes training" in screen_text(app)
        await press(pilot, "enter")
        assert feed.requests == []
        # After Cancel the card is open again.
        card(app)
        await press(pilot, "down", "down", "enter")
        await press(pilot, "y")
        (request,) = feed.requests
        assert isinstance(request, Restart)
        assert request.change.assignments == {"seq_len": "64"}


async def test_a_command_is_shown_to_copy_and_never_run() -> None:
    feed = RecordingFeed(dead())
    async with opened(feed, "down", "down", "down", "enter") as (app, pilot):
        card(app)
        assert "memtop does not run this" in screen_text(app)
        assert app.clipboard == BY_HAND.command
        # A remedy that begins a new run is one, too.
        new = replace(SMALLER, id="rank", title="LoRA r 32 -> 16", resumable="new run", command="memtop train --set lora.r=16")
        feed.send(dead(replace(PROPOSAL, remedies=(new,)), attempt=3))
        await press(pilot, "escape")
        assert "begins a new run: a command to copy" in screen_text(app)
        await press(pilot, "enter")
        assert "memtop train --set lora.r=16" in screen_text(app)
        assert feed.requests == []


async def test_escape_leaves_the_run_failed_and_the_notice_names_the_key() -> None:
    feed = RecordingFeed(dead())
    async with opened(feed, "s", size=(80, 24)) as (app, pilot):
        # No restart is announced, so there is none to cancel.
        assert not card(app).query_one("#stay").display
        await press(pilot, "escape")
        assert app.screen is app.dashboard
        for size in SIZES:
            await resize(pilot, *size)
            notice = screen_text(app).splitlines()[1]
            assert "GPU 0 ran out of memory in the backward pass" in notice
            assert "w Recovery" in screen_text(app) or size == (80, 24)
        assert feed.requests == []


@pytest.mark.parametrize(("size", "by"), [((80, 24), "s"), ((160, 50), "#stay"), ((80, 24), "#stay")])
async def test_an_announced_restart_counts_down_and_can_be_cancelled(size: tuple[int, int], by: str) -> None:
    auto = replace(PROPOSAL, waiting=None, begins=NOW + 9)
    feed = RecordingFeed(dead(auto, state=wire.Phase.RESTARTING, on_oom="auto"))
    async with opened(feed, size=size) as (app, pilot):
        assert "remedy 1 begins in 9 s (Enter: ▸ now, s: stay stopped, Esc: close)" in words(app)
        update = dead(auto, state=wire.Phase.RESTARTING, on_oom="auto")
        feed.send(replace(update, machine=machine(gpu(), time=NOW + 5)))
        await settle(pilot)
        assert "remedy 1 begins in 4 s" in words(app)
        await (click(pilot, by) if by.startswith("#") else press(pilot, by))
        assert app.screen is app.dashboard
        assert feed.requests == [Stop(id=1)]


async def test_its_first_picture_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    painted: list[str] = []
    paint = LineList.render_line

    def painting(self: LineList, y: int) -> Strip:
        strip = paint(self, y)
        painted.append(strip.text)
        return strip

    monkeypatch.setattr(LineList, "render_line", painting)
    async with opened(RecordingFeed(dead()), size=(80, 24)) as _:
        assert painted[0].startswith("GPU 0 ran out of memory")


async def test_an_announced_restart_can_be_brought_forward() -> None:
    feed = RecordingFeed(dead(replace(PROPOSAL, begins=NOW + 9), state=wire.Phase.RESTARTING))
    async with opened(feed, "enter", size=(80, 24)) as _:
        assert [type(one) for one in feed.requests] == [Restart]


async def test_it_closes_when_the_run_goes_on_and_opens_after_the_screen_that_is_open() -> None:
    feed = RecordingFeed(dead())
    async with opened(feed, size=(80, 24)) as (app, pilot):
        card(app)
        # Another dashboard has restarted it; the supervisor drops the proposal only at the first
        # update.
        feed.send(dead(state=wire.Phase.STARTING, attempt=3, alive=True))
        await settle(pilot)
        assert app.screen is app.dashboard
        await press(pilot, "o")
        feed.send(dead(attempt=3))
        await settle(pilot)
        assert isinstance(app.screen, ProcessesScreen)
        await press(pilot, "escape")
        card(app)


async def test_enter_applies_nothing_until_the_card_has_been_visible_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "DELIBERATE_SECONDS", 3600.0)
    feed = RecordingFeed(dead())
    async with opened(feed, "enter", size=(80, 24)) as (app, pilot):
        card(app)
        assert feed.requests == []
        await press(pilot, "escape", "w", "enter")
        assert [type(one) for one in feed.requests] == [Restart]


async def test_read_only_shows_it_and_changes_nothing() -> None:
    feed = RecordingFeed(dead(), read_only=True)
    async with opened(feed, size=(80, 24)) as (app, pilot):
        for size in SIZES:
            await resize(pilot, *size)
            assert not card(app).query_one("#confirm", Button).display
            await press(pilot, "enter")
            assert "read-only: nothing can be changed from here" in screen_text(app)
            assert feed.requests == []


async def test_it_opens_on_a_run_whose_supervisor_has_left_and_takes_it_up_again() -> None:
    feed = RecordingFeed(dead(), Disconnected("the run is over (failed)", ended=True))
    async with opened(feed, "enter", size=(80, 24)) as _:
        assert [type(one) for one in feed.requests] == [Restart]


async def test_without_a_remedy_the_last_advice_is_given_in_order() -> None:
    advice = ("see who else holds the card: memtop strays", "a smaller model: 46.4 M parameters instead of 196.6 M")
    feed = RecordingFeed(running(gpu()))
    async with opened(feed, "w", size=(80, 24)) as (app, pilot):
        assert app.screen is app.dashboard
        assert "✗ Recovery: the run has not run out of memory" in screen_text(app)
        feed.send(dead(replace(PROPOSAL, remedies=(), last_advice=advice)))
        await settle(pilot)
        text = words(app)
        assert "memtop has no automatic remedy left 1. see who else" in text
        assert "2. a smaller model: 46.4 M" in text
        assert "Enter applies" not in text


async def test_of_several_commands_the_first_is_shown_and_enter_copies_all() -> None:
    swap = replace(BY_HAND, command="sudo swapon --show\nsudo fallocate -l 8G /swapfile\nsudo swapon /swapfile")
    feed = RecordingFeed(dead(replace(PROPOSAL, remedies=(swap,))))
    async with opened(feed, size=(80, 24)) as (app, pilot):
        for size in SIZES:
            await resize(pilot, *size)
            rows = screen_text(app).splitlines()
            assert len(rows) == size[1], "no line of a command breaks the screen"
            assert "type: sudo swapon --show and 2 more: Enter copies all" in words(app)
        await press(pilot, "enter")
        assert app.clipboard == swap.command
        assert len(screen_text(app).splitlines()) == SIZES[-1][1]
        assert feed.requests == []


async def test_enter_copies_exactly_what_goes_into_each_place() -> None:
    """The name of the place is shown, and is no part of what is copied."""
    wsl = replace(BY_HAND, command="wsl --shutdown", writes=(Written("%UserProfile%\\.wslconfig", "[wsl2]\nmemory=24GB"),))
    feed = RecordingFeed(dead(replace(PROPOSAL, remedies=(wsl,))))
    async with opened(feed, size=(80, 24)) as (app, pilot):
        assert "in %UserProfile%\\.wslconfig: [wsl2] and 1 more (1 of 2)" in words(app)
        assert "text to copy" in words(app)
        await press(pilot, "enter")
        assert app.clipboard == "[wsl2]\nmemory=24GB"
        assert "Copied 1 of 2, if your terminal allows that. Enter copies 2 of 2." in words(app)
        assert "type: wsl --shutdown (2 of 2)" in words(app)
        await press(pilot, "enter")
        assert app.clipboard == "wsl --shutdown"
        await press(pilot, "enter")
        assert app.clipboard == "[wsl2]\nmemory=24GB"
        assert feed.requests == []


def test_no_advice_has_the_name_of_its_place_in_what_is_copied() -> None:
    for row in table():
        for environment in ((), (Place.WINDOWS,)):
            copied = [text for _, text in row.remedy(environment).to_type]
            assert not [text for text in copied for one in text.splitlines() if one.startswith("in ")], row.title


# --- what is drawn --------------------------------------------------------------------------------


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
    assert seen[2] == "? how it was divided is not known"
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
