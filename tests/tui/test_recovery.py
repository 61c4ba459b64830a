"""The recovery card of a run that has run out of memory: when it opens, what it shows, and what its
keys do."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from textual.strip import Strip
from textual.widgets import Button

from memtop.supervisor import wire
from memtop.supervisor.diagnosis.environment import Place
from memtop.supervisor.recovery.advice import table
from memtop.supervisor.recovery.values import Snippet
from memtop.supervisor.wire import Change, Restart, Stop
from memtop.tui import recovery as oom
from memtop.tui.app import DashboardApp
from memtop.tui.feed import Disconnected
from memtop.tui.keymap import BY_ID, obstacle
from memtop.tui.line_list import LineList
from memtop.tui.processes.screen import ProcessesScreen
from memtop.tui.recovery import OomCard
from memtop.tui.screen import ConfirmDialog
from memtop.tui.words import lack_of_memory
from tests.tui.support import (
    ALLOCATOR,
    BY_HAND,
    NOW,
    PROPOSAL,
    SHORTER,
    SMALLER,
    RecordingFeed,
    click,
    configuration,
    dead,
    gpu,
    machine,
    opened,
    press,
    resize,
    running,
    screen_text,
    settle,
    store_of,
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
                "only you can do this: a command to copy",
                "type: sudo fallocate -l 8G /swapfile",
            ):
                assert expected in text, (size, expected)


async def test_why_peaks_of_several_remedies_are_not_known_is_said_once() -> None:
    reason = "nothing was measured with these settings yet"
    alike = tuple(replace(ALLOCATOR, id=f"r{number}", title=f"r{number}", forecast_unknown=reason) for number in range(3))
    # memtop never foresees a remedy that is a command to copy, so it gives no reason there.
    by_hand = replace(BY_HAND, forecast_unknown=reason)
    for remedies, said in (
        (
            (*alike, SHORTER, by_hand),
            [f"peaks not known where none is given: {reason}", "peak not known: nothing was measured"],
        ),
        ((SMALLER, alike[0], SHORTER), [f"peak not known: {reason}", "peak not known: nothing was measured at T 64"]),
    ):
        async with opened(RecordingFeed(dead(replace(PROPOSAL, remedies=remedies))), size=(160, 50)) as (app, _):
            text = words(app)
            assert text.count("? peak") == len(said), text
            for expected in said:
                assert text.count(expected) == 1, text


async def test_enter_applies_the_first_and_the_answer_is_shown() -> None:
    feed = RecordingFeed(dead())
    feed.answers = ((wire.Outcome.ACCEPTED, "restarting"), (wire.Outcome.DONE, "attempt 3 trains"))
    async with opened(feed, "enter", size=(80, 24)) as (app, pilot):
        assert feed.requests == [
            Restart(id=1, change=Change(assignments={"batch": "4", "accumulation": "8"}, reason="gpu_oom at update 25"))
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
        assert "· Recovery: the run has not run out of memory" in screen_text(app)
        feed.send(dead(replace(PROPOSAL, remedies=(), last_advice=advice)))
        await settle(pilot)
        text = words(app)
        assert "memtop has no automatic remedy left 1. see who else" in text
        assert "2. a smaller model: 46.4 M" in text
        assert "Enter applies" not in text


def test_a_run_that_ended_for_another_reason_says_it_and_where_more_is() -> None:
    store = store_of(running(gpu(), name="tiny", state=wire.Phase.FAILED, alive=False, reason="ended by signal 9 (SIGKILL)"))
    why = "memory has not run out; the run ended otherwise: ended by signal 9 (SIGKILL); memtop show tiny says more"
    assert obstacle(BY_ID["recovery"], store) == why
    assert "had no spike" in str(obstacle(BY_ID["recovery"], store_of(running(gpu()))))


LACKED = (
    configuration(1, 16, outcome="gpu_oom", until_update=811),
    configuration(2, 8, attempt=2, until_update=None, outcome=None),
)
SURVIVED = "out of GPU memory at update 812, the run went on with 8 x 4 x 1"


@pytest.mark.parametrize("size", SIZES)
async def test_a_lack_of_memory_that_the_run_has_survived_is_named_below_the_header_and_by_the_key(
    size: tuple[int, int],
) -> None:
    feed = RecordingFeed(running(gpu()), wire.ConfigurationRows(rows=LACKED))
    async with opened(feed, size=size) as (app, pilot):
        assert f"✓ {SURVIVED} (u: more)" in screen_text(app).splitlines()[1]
        await press(pilot, "w")
        assert app.screen is app.dashboard
        assert f"· Recovery: {SURVIVED}" in screen_text(app)
        feed.send(running(gpu(), warnings=("the disk is slow",)))
        await settle(pilot)
        assert "! the disk is slow  (and 1 more)" in screen_text(app).splitlines()[1]
        # Another attempt by hand is not about it any more.
        later = configuration(3, 4, attempt=3, until_update=None, outcome=None)
        feed.send(running(gpu(), attempt=3), wire.ConfigurationRows(rows=(*LACKED, later)))
        await press(pilot, "w")
        assert "✓" not in screen_text(app).splitlines()[1]
        assert f"· Recovery: {SURVIVED}" in screen_text(app)


async def test_until_an_update_is_done_a_new_attempt_only_tries_to_go_on() -> None:
    feed = RecordingFeed(running(gpu(), attempt=2, state=wire.Phase.STARTING), wire.ConfigurationRows(rows=LACKED))
    async with opened(feed, size=(160, 45)) as (app, pilot):
        second = screen_text(app).splitlines()[1]
        assert "… out of GPU memory at update 812, attempt 2 tries 8 x 4 x 1 (u: more)" in second
        assert "✓" not in second
        await press(pilot, "w")
        assert "· Recovery: out of GPU memory at update 812, attempt 2 tries 8 x 4 x 1" in screen_text(app)
        feed.send(running(gpu(), attempt=2))
        await settle(pilot)
        assert f"✓ {SURVIVED} (u: more)" in screen_text(app).splitlines()[1]
    same = (configuration(1, 8, outcome="host_oom_killed"), configuration(2, 8))
    words = "killed for lack of host memory at update 21, attempt 2 tries to go on"
    assert lack_of_memory(same, starting=True) == (words, same[1])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((), None),
        ((configuration(1, 8),), None),
        ((configuration(1, 8, outcome="not_memory"), configuration(2, 8)), None),
        ((configuration(1, 8, outcome="disk_full", until_update=None),), "disk full, no remedy is known here"),
        (
            (configuration(1, 8, outcome="host_oom_killed"), configuration(2, 8)),
            "killed for lack of host memory at update 21, the run went on",
        ),
        (
            (configuration(1, 8, outcome="host_oom_alloc", settings=None), configuration(2, 8, settings=None)),
            "out of host memory at update 21, the run went on",
        ),
    ],
)
def test_the_newest_lack_of_memory_in_words(rows: tuple[wire.Configuration, ...], words: str | None) -> None:
    found = lack_of_memory(rows)
    assert (None if found is None else found[0]) == words


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
    wsl = replace(BY_HAND, command="wsl --shutdown", writes=(Snippet("%UserProfile%\\.wslconfig", "[wsl2]\nmemory=24GB"),))
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
