"""Every action, by key and by button: the request that is sent and the answer that is shown."""

from __future__ import annotations

import dataclasses
import re

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot
from textual.widgets import Button, Input, Select

from memtop.presets import edit_settings, load_presets, load_recipes, presets_for, resolve
from memtop.presets.schema import Zero
from memtop.supervisor import wire
from memtop.supervisor.wire import Change, CheckpointNow, FreeCache, Restart, Stop
from memtop.tui import words as tui_words
from memtop.tui.dashboard.footer import ActionButton
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.dashboard.screen import DashboardScreen
from memtop.tui.help import HelpDialog
from memtop.tui.keymap import ACTIONS, BAR
from memtop.tui.line import plain
from memtop.tui.line_list import LineList
from memtop.tui.presets import PresetDialog
from memtop.tui.processes.kill import KillDialog, TickList
from memtop.tui.processes.screen import ProcessesScreen
from memtop.tui.restart import RestartDialog
from memtop.tui.screen import ConfirmDialog
from tests.tui.support import (
    CONFIGURATIONS,
    SETTINGS,
    RecordingFeed,
    RecordingProcessActions,
    click,
    dashboard,
    gpu,
    opened,
    press,
    process,
    resize,
    run_state,
    running,
    screen_text,
    settle,
)


def training_feed(**kwargs: object) -> RecordingFeed:
    return RecordingFeed(running(gpu(0), gpu(1)), **kwargs)  # type: ignore[arg-type]


def test_no_key_is_used_twice() -> None:
    keys = [key for action in ACTIONS for key in action.keys]
    assert len(keys) == len(set(keys))


async def act(pilot: Pilot[DashboardResult], by: str) -> None:
    """Press this key, or the button with this selector."""
    await (click(pilot, by) if by.startswith("#") else press(pilot, by))


async def test_actions_without_a_question() -> None:
    feed = training_feed()
    async with opened(feed) as (app, pilot):
        for number, (by, request) in enumerate(
            (("f", FreeCache), ("#action-free", FreeCache), ("c", CheckpointNow), ("#action-checkpoint", CheckpointNow)), 1
        ):
            app.dashboard.say("")
            await act(pilot, by)
            assert feed.requests[number - 1 :] == [request(id=number)]
            assert "✓ Freed 1.1 GiB on the device, 0.3 GiB to the system" in screen_text(app)
        app.dashboard.query_one("#action-checkpoint", ActionButton).focus()
        await press(pilot, "enter")
        assert feed.requests[4:] == [CheckpointNow(id=5)]
        feed.answers = ((wire.Outcome.REFUSED, "no training process is connected yet"),)
        await press(pilot, "f")
        assert "✗ no training process is connected yet" in screen_text(app)


async def test_stop_asks_with_the_focus_on_cancel() -> None:
    feed = training_feed()
    async with opened(feed) as (app, pilot):
        for by in ("s", "#action-stop"):
            await act(pilot, by)
            assert isinstance(app.screen, ConfirmDialog)
            assert app.focused is not None
            assert app.focused.id == "cancel"
            await press(pilot, "enter")
            assert feed.requests == []
        await press(pilot, "s")
        await click(pilot, "#confirm")
        assert feed.requests == [Stop(id=1)]


@pytest.mark.parametrize("own", [False, True])
async def test_a_stop_promises_only_what_the_program_is_known_to_do(own: bool) -> None:
    feed = RecordingFeed(running(gpu(), settings=None, command=("python", "mine.py"))) if own else training_feed()
    async with opened(feed) as (app, pilot):
        await press(pilot, "s")
        shown = " ".join(screen_text(app).split())
        assert ("finished and saved" in shown) is not own
        assert ("resumes it" in shown) is not own
        assert ("What it saves is up to the program" in shown) is own


async def test_escape_leaves_every_dialog_without_a_request() -> None:
    feed = training_feed()
    async with opened(feed) as (app, pilot):
        for key in ("s", "r", "k", "1", "question_mark"):
            await press(pilot, key)
            assert app.screen is not app.dashboard
            await press(pilot, "escape")
            assert app.screen is app.dashboard
        assert feed.requests == []


async def test_two_quick_presses_open_one_dialog() -> None:
    async with opened(training_feed()) as (app, pilot):
        app.dashboard.action_do("stop", "s")
        app.dashboard.action_do("restart", "r")
        await settle(pilot)
        assert len(app.screen_stack) == 2


async def test_a_key_that_is_pressed_while_the_run_is_read_takes_effect_after_that() -> None:
    feed = training_feed()
    arriving = [feed._queue.get_nowait() for _ in range(2)]
    app = dashboard(feed)
    app.dashboard.set_reactive(DashboardScreen.store, dataclasses.replace(app.dashboard.store, run=run_state()))
    async with app.run_test(size=(120, 40)) as pilot:
        await press(pilot, "s")
        assert app.screen is app.dashboard
        feed.send(*arriving)
        await settle(pilot)
        assert isinstance(app.screen, ConfirmDialog)
        await press(pilot, "escape")
        assert app.screen is app.dashboard


async def type_in(pilot: Pilot[DashboardResult], **values: str) -> None:
    """Fill in fields of the restart form."""
    for name, value in values.items():
        pilot.app.screen.query_one(f"#{name}", Input).value = value
    await settle(pilot)


async def test_restart_sends_the_edited_change() -> None:
    feed = training_feed()
    async with opened(feed) as (app, pilot):
        for by in ("r", "#action-restart"):
            feed.requests.clear()
            await act(pilot, by)
            assert isinstance(app.screen, RestartDialog)
            await type_in(pilot, batch="0")
            assert "✗ batch 0: must be at least 1" in screen_text(app)
            assert app.screen.query_one("#confirm", Button).disabled
            await type_in(pilot, batch="2", accumulation="16")
            assert "effective batch 32 -> 32: training is unchanged" in screen_text(app)
            assert not app.screen.query_one("#confirm", Button).disabled
            assert feed.requests == []
            await click(pilot, "#confirm")
            assert feed.requests == [Restart(id=1, change=Change(assignments={"batch": "2", "accumulation": "16"}))]


async def test_a_preset_in_the_form_fills_the_fields() -> None:
    feed = training_feed()
    async with opened(feed, "r") as (app, pilot):
        app.screen.query_one("#preset", Select).value = "extreme"
        await settle(pilot)
        assert app.screen.query_one("#batch", Input).value == "1"
        assert app.screen.query_one("#accumulation", Input).value == "32"
        await click(pilot, "#confirm")
        assert feed.requests == [Restart(id=1, change=Change(preset="extreme"))]


async def test_an_external_command_restarts_unchanged() -> None:
    feed = RecordingFeed(running(gpu(), settings=None, command=("python", "mine.py")))
    async with opened(feed, "2") as (app, pilot):
        assert "presets change a recipe; this is your own program" in screen_text(app)
        await press(pilot, "r")
        assert "python mine.py" in screen_text(app)
        await click(pilot, "#confirm")
        assert feed.requests == [Restart(id=1)]


async def test_a_digit_shows_the_preset_and_enter_applies_it() -> None:
    feed = training_feed()
    async with opened(feed) as (app, pilot):
        for number, (key, name) in enumerate((("2", "stage2_offload"), ("6", "low"), ("7", "extreme")), 1):
            await press(pilot, key)
            assert isinstance(app.screen, PresetDialog)
            assert app.screen.query_one(LineList).cursor == name
            assert "4 x 8 x 1" in screen_text(app)
            (at,) = [row for row in screen_text(app).splitlines() if re.search(r"▸[● ] \d ", row)]
            assert f"▸  {key}    {name} " in at
            (present,) = [row for row in screen_text(app).splitlines() if "●" in row and "│" in row]
            assert " ● 5    standard " in present
            await press(pilot, "enter")
            assert feed.requests[number - 1 :] == [Restart(id=number, change=Change(preset=name))]
        await press(pilot, "9")
        assert "no preset of the recipe first-run has key 9: there are 1 deepspeed, 2 stage2_offload" in screen_text(app)


@pytest.mark.parametrize("recipe", ["first-run", "pretrain-t5", "sft-qlora"])
async def test_the_presets_fit_on_a_small_terminal(recipe: str) -> None:
    settings = resolve(load_recipes()[recipe], preset=load_presets()["standard"], whole=False)
    async with opened(RecordingFeed(running(gpu(0), settings=settings)), "1", size=(80, 24)) as (app, pilot):
        for _ in presets_for(recipe):
            text = screen_text(app)
            box = app.screen.query_one(".dialog")
            assert box.max_scroll_y == 0
            assert "Cancel        Apply" in text
            assert re.search("Switch: (resumes|converts|refused)", text)
            await press(pilot, "down")
        if recipe == "first-run":
            await press(pilot, "4")
            rows = [row.strip("│ ") for row in screen_text(app).splitlines()]
            at = next(
                number for number, row in enumerate(rows) if "As a new run (memtop train --fresh --preset minimal)" in row
            )
            assert any(row.endswith("…") for row in rows[at : at + 4]), "the end that has no room is marked"


async def test_the_table_shows_what_a_switch_keeps_and_what_a_new_run_would_take() -> None:
    recipe = load_recipes()["sft-qlora"]
    settings = resolve(recipe, preset=load_presets()["qlora-16g-safe"], whole=False)
    async with opened(RecordingFeed(running(gpu(0), settings=settings)), size=(160, 50)) as (app, pilot):
        assert "1-9 Preset" in screen_text(app)
        await press(pilot, "9")
        text = screen_text(app)
        names = re.findall(r"[▸ ][● ] \d    (\S+)", text)
        assert names[:4] == ["deepspeed", "stage2_offload", "stage3", "minimal"]
        assert names[7:] == ["qlora-16g-safe", "qlora-16g-min"]
        assert "t5-balanced" not in text
        assert "Switch: resumes, workers 2 -> 1" in text
        assert "As a new run (memtop train --fresh --preset qlora-16g-min): T 1024 -> 512" in text
        await press(pilot, "3")
        assert "Switch: refused, zero.stage 3: a 4-bit base cannot be sharded" in screen_text(app)
        await press(pilot, "escape", "r")
        app.screen.query_one("#preset", Select).value = "minimal"
        await settle(pilot)
        assert "a 4-bit base cannot be sharded" in screen_text(app)
        assert app.screen.query_one("#confirm", Button).disabled


async def test_key_0_is_the_tenth_preset() -> None:
    settings = resolve(load_recipes()["pretrain-t5"], preset=load_presets()["t5-balanced"])
    feed = RecordingFeed(running(gpu(0), settings=settings))
    async with opened(feed) as (app, pilot):
        assert "1-0 Preset" in screen_text(app)
        await press(pilot, "0", "enter")
        assert feed.requests == [Restart(id=1, change=Change(preset="t5-aggressive"))]


async def test_the_preset_button_opens_the_table_at_the_current_one() -> None:
    now = edit_settings(SETTINGS, preset=SETTINGS.preset)
    feed = RecordingFeed(running(gpu(0), settings=now))
    async with opened(feed) as (app, pilot):
        await click(pilot, "#action-preset")
        assert "is on now" in screen_text(app)
        await press(pilot, "enter")
        assert feed.requests == []
        assert "the run already uses preset standard" in screen_text(app)
        # After another split it can be applied again.
        settings = edit_settings(now, assignments={"batch": "1", "accumulation": "2"})
        feed.send(running(gpu(0), settings=settings))
        await settle(pilot)
        await click(pilot, "#action-preset")
        (row,) = re.findall(r"▸● \d    (\S+) +(\d+ x \d+ x \d+) +\d+ +(\S+) ", screen_text(app))
        assert row[0] == settings.preset
        assert row[1] != "1 x 2 x 1"
        assert row[2] == "resumes"
        assert "is on now" not in screen_text(app)
        assert "Switch: resumes, split 1 x 2 x 1 -> " in screen_text(app)
        await press(pilot, "enter")
        assert feed.requests == [Restart(id=1, change=Change(preset=settings.preset))]
        # The supervisor makes of it what the table has shown.
        after = edit_settings(settings, preset=settings.preset, updates_done=1)
        assert f"{after.batch} x {after.accumulation} x 1" == row[1]


async def test_the_preset_table_cuts_no_column_and_its_keys_are_listed() -> None:
    split = replace(SETTINGS, rank_splits=((12, 2), (4, 1)), world_size=2)
    for settings in (SETTINGS, split, replace(split, zero=Zero(stage=3, offload_optimizer=True, offload_parameters=True))):
        async with opened(RecordingFeed(running(gpu(0), settings=settings)), "6", size=(80, 24)) as (app, pilot):
            for width, height in ((80, 24), (60, 15), (160, 50)):
                await resize(pilot, width, height)
                await press(pilot, "6")
                table = [row for row in screen_text(app).splitlines() if re.search(r"│ .[● ] \d |key  preset", row)]
                assert table
                for row in table:
                    assert "…" not in row or width == 160, "only the last column may be cut"
                    assert set(row) & set("▎▋▊▍▉") == set()
                assert ("what else" in table[0]) == (width == 160)
            await press(pilot, "question_mark")
            assert "Select the preset with this key; ● is the present one" in " ".join(screen_text(app).split())
            await press(pilot, "escape", "enter")


STRAY = process(51, stray=True, reason="left over from run old, which ended", used_bytes=5 << 30)
FOREIGN = process(52, user="grace", choosable=False, reason="belongs to grace")
OWN_RUN = process(53, run="tiny", choosable=False)


async def test_kill_names_each_process_and_asks_twice() -> None:
    actions = RecordingProcessActions()
    async with opened(RecordingFeed(running(gpu(processes=(STRAY, FOREIGN, OWN_RUN)))), actions=actions) as (app, pilot):
        assert "k Kill strays (1)" in screen_text(app)
        for by in ("k", "#action-kill"):
            actions.ended.clear()
            await act(pilot, by)
            assert isinstance(app.screen, KillDialog)
            text = screen_text(app)
            assert "! stray: left over from run old, which ended" in text
            assert "[ ]       51  ada" in text
            assert "cannot be chosen: belongs to grace" in text
            assert "job-53" not in text
            assert app.screen.query_one("#confirm", Button).disabled
            await press(pilot, "space")
            assert "[x]       51  ada" in screen_text(app)
            await click(pilot, "#confirm")
            assert isinstance(app.screen, ConfirmDialog)
            assert app.focused is not None
            assert app.focused.id == "cancel"
            text = screen_text(app)
            for expected in ("51", "ada", "5.0 GiB", "python job-51.py"):
                assert expected in text
            assert actions.ended == []
            await click(pilot, "#confirm")
            assert actions.ended == [51]
            assert "✓ 1 processes ended, 7.8 GiB returned" in screen_text(app)


async def test_without_a_gpu_there_is_nothing_to_tick() -> None:
    async with opened(RecordingFeed(running())) as (app, pilot):
        await press(pilot, "k")
        assert app.screen is app.dashboard
        assert "no process holds GPU memory: " in screen_text(app)


async def test_other_users_processes_cannot_be_ticked_and_enter_closes_a_list_of_them_alone() -> None:
    feed, actions = RecordingFeed(running(gpu(processes=(FOREIGN, STRAY)))), RecordingProcessActions()
    async with opened(feed, "k", actions=actions) as (app, pilot):
        rows = app.screen.query_one(TickList)
        for _ in range(3):
            await pilot.press("down", "space")
        await settle(pilot)
        assert {holder.process.pid for holder in rows.chosen} <= {51}
        assert rows.get_option_at_index(1).disabled
        feed.send(running(gpu(processes=(FOREIGN,))))
        await press(pilot, "escape")
        await press(pilot, "k")
        assert app.focused is not None
        assert app.focused.id == "cancel"
        await press(pilot, "enter")
        assert app.screen is app.dashboard
        assert actions.ended == []


@pytest.mark.parametrize("by", ["d", "q", "ctrl+q", "#action-detach"])
async def test_detach_leaves_the_run_alone(by: str) -> None:
    feed = training_feed()
    async with opened(feed) as (app, pilot):
        await act(pilot, by)
    assert app.return_value is not None
    assert app.return_value.action == "detach"
    assert "tiny continues" in app.return_value.message
    assert feed.requests == []


async def test_leaving_a_run_that_is_over() -> None:
    async with opened(RecordingFeed(running(gpu(), state=wire.Phase.FINISHED, alive=False))) as (app, pilot):
        assert "d Quit" in screen_text(app)
        await pilot.press("d")
    assert app.return_value is not None
    assert app.return_value.action == "ended"


async def test_a_complete_run_offers_no_restart_and_says_why() -> None:
    saved = wire.Checkpoint(path="x", updates=60, samples_seen=1920, complete=True)
    over = running(gpu(), state=wire.Phase.FINISHED, alive=False, updates=60, checkpoint=saved)
    words = "nothing is left to train: 60 updates are done, and the length is 60; `memtop restart tiny --max-updates N`"
    for size in ((80, 24), (160, 50)):
        feed = RecordingFeed(running(gpu()), CONFIGURATIONS)
        async with opened(feed, "r", size=size) as (app, pilot):
            feed.send(over)
            await settle(pilot)
            assert app.screen.query_one("#confirm", Button).disabled, "the run has ended while the form was open"
            await press(pilot, "escape")
            for name in ("free", "checkpoint", "stop", "undo"):
                assert not app.screen.query_one(f"#action-{name}").display
            for name in ("restart", "preset"):
                assert app.screen.query_one(f"#action-{name}").has_class("-unavailable")
            for keys in ("r", "5", "U"), ("u", "enter"):
                for key in keys:
                    await press(pilot, key)
                assert words in " ".join(screen_text(app).split())
            await press(pilot, "c")
            assert "Returns to the newest checkpoint" in screen_text(app), "from there something is left to train"
            await press(pilot, "escape", "escape", "s")
            assert "Stop: the run is finished" in screen_text(app)
            assert feed.requests == []


async def test_help_lists_every_action_and_opens_at_its_beginning_and_scrolls() -> None:
    async with opened(training_feed(), size=(120, 72)) as (app, pilot):
        await click(pilot, "#action-help")
        assert isinstance(app.screen, HelpDialog)
        text = screen_text(app)
        for action in ACTIONS:
            assert (action.label.rstrip("…") in text) is (action.group not in ("replay", "demo")), action
        await press(pilot, "escape")
        for size in ((80, 24), (60, 15), (120, 72)):
            await resize(pilot, *size)
            await press(pilot, "question_mark")
            text = screen_text(app)
            assert "The run" in text
            assert "Close" in text
            assert ("more lines: PgDn" in text) is (size[1] < 72)
            assert not [widget for widget in app.screen.query("*") if widget.show_vertical_scrollbar]
            await press(pilot, "end")
            text = screen_text(app)
            assert "✗ failed" in text
            assert ("lines above: PgUp" in text) is (size[1] < 72)
            assert "more lines" not in text
            assert "Close" in text
            await press(pilot, "enter")
            assert app.screen is app.dashboard
        await press(pilot, "ctrl+c")
        assert "d closes the dashboard, the run continues; s stops the run" in screen_text(app)


async def test_no_mark_in_the_help_is_cut() -> None:
    async with opened(training_feed(), "question_mark", "end", size=(80, 24)) as (app, _):
        shown = screen_text(app).partition("Bands")[2].partition("Close")[0]
        assert "…" not in shown
        assert isinstance(app.screen, HelpDialog)
        lines = app.screen.draw(app.screen.query_one(LineList).size.width)
        text = " ".join(" ".join(map(plain, lines)).split())
        for mark in ("▒ CUDA context and libraries", "? stand for what is not known", "▸ ▾ a job, folded and not"):
            assert mark in text
        assert "B x A x W = effective batch: samples in a micro-batch x accumulation x processes T: tokens of a sample" in text


async def test_a_message_takes_the_lines_that_it_needs_and_no_toast() -> None:
    feed = training_feed()
    async with opened(feed, notifications=True) as (app, pilot):
        panel = app.dashboard.query_one("#flash")
        for columns, rows, most in ((80, 24, 3), (60, 15, 2)):
            await resize(pilot, columns, rows)
            width = columns - 4
            for length, lines in ((width, 1), (width + 20, 2), (10 * width, most)):
                words = ("of " * length)[: length - 4].strip() + " end"
                feed.answers = ((wire.Outcome.DONE, words),)
                await press(pilot, "f")
                assert panel.size.height == lines
                shown = " ".join(" ".join(screen_text(app).splitlines()[panel.region.y : panel.region.bottom]).split())
                assert shown == f"✓ {words}" if length < 5 * width else shown.endswith("…")
                assert "f Free" in screen_text(app)
            assert not app.screen.query("Toast")
            # After a while it gives the log its lines back.
            app.dashboard.flash.fold()
            await settle(pilot)
            assert panel.size.height == 1


async def test_a_message_is_gone_before_it_is_no_longer_true(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MESSAGE_SECONDS", "BRIEF_SECONDS"):
        monkeypatch.setattr(tui_words, name, 0.2)
    feed = RecordingFeed(running(gpu(), state=wire.Phase.STARTING))
    async with opened(feed, "c") as (app, pilot):
        flash = app.dashboard.flash
        while flash.has_message:
            await pilot.pause(0.05)
        assert "is not training yet" not in screen_text(app)
        feed.answers = ((wire.Outcome.FAILED, "the disk is full"),)
        feed.send(running(gpu()))
        await settle(pilot)
        await press(pilot, "f")
        assert "✗ the disk is full" in screen_text(app)
        await pilot.pause(0.4)
        assert "✗ the disk is full" in screen_text(app), "a failure stays until the run changes its state"
        feed.send(running(gpu(), state=wire.Phase.STOPPED, alive=False))
        await settle(pilot)
        assert "the disk is full" not in screen_text(app), "it was about an earlier state"
        await press(pilot, "o")
        assert isinstance(app.screen, ProcessesScreen)
        app.screen.say("read-only", "bad")
        await settle(pilot)
        while "read-only" in screen_text(app):
            await pilot.pause(0.05)


async def test_a_note_and_a_success_end_before_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tui_words.message_seconds("note") == tui_words.message_seconds("good") == 10
    monkeypatch.setattr(tui_words, "BRIEF_SECONDS", 0.2)
    async with opened(training_feed(), "U") as (app, pilot):
        flash = app.dashboard.flash
        while flash.has_message:
            await pilot.pause(0.05)
        app.dashboard.say("checkpoint at update 40", "good")
        assert flash.has_message
        while flash.has_message:
            await pilot.pause(0.05)
        app.dashboard.say("it cannot be read", "bad")
        await pilot.pause(0.4)
        assert flash.has_message


async def test_a_failure_stays_although_the_state_changes_right_after_it() -> None:
    feed = RecordingFeed(running(gpu()))
    feed.answers = ((wire.Outcome.FAILED, "the disk is full"),)
    async with opened(feed, "f") as (app, pilot):
        feed.send(running(gpu(), state=wire.Phase.STOPPED, alive=False))
        await settle(pilot)
        assert "✗ the disk is full" in screen_text(app)


async def test_a_failure_under_another_screen_is_about_the_state_at_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tui_words, "MESSAGE_SECONDS", 0.2)
    feed = RecordingFeed(running(gpu()))
    async with opened(feed, "o") as (app, pilot):
        # The dashboard below is not drawn meanwhile.
        feed.send(running(gpu(), state=wire.Phase.STOPPING))
        await settle(pilot)
        app.dashboard.say("the disk is full", "failed")
        await press(pilot, "escape")
        await pilot.pause(0.4)
        assert "✗ the disk is full" in screen_text(app)


async def test_a_message_under_another_screen_is_a_toast() -> None:
    feed = training_feed()
    async with opened(feed, "o", notifications=True) as (app, pilot):
        assert isinstance(app.screen, ProcessesScreen)
        app.dashboard.say("checkpoint at update 40", "good")
        await settle(pilot)
        assert len(app.screen.query("Toast")) == 1
        assert "checkpoint at update 40" in screen_text(app)


async def test_a_command_that_a_program_does_not_support_has_no_button_and_its_key_shows_why() -> None:
    feed = RecordingFeed(running(gpu(), settings=None, offers=("free_cache",)))
    async with opened(feed, size=(160, 50)) as (app, pilot):
        for size in ((160, 50), (80, 24)):
            await resize(pilot, *size)
            shown = {action.id for action in BAR if app.dashboard.query_one(f"#action-{action.id}").display}
            assert not {"preset", "checkpoint"} & shown
            assert {"free", "stop", "restart"} <= shown
        await press(pilot, "c")
        assert "this program cannot save on request" in screen_text(app)
        await press(pilot, "1")
        assert "presets change a recipe; this is your own program" in screen_text(app)
        assert feed.requests == []
        # A program that offers it is asked.
        feed.send(running(gpu(), settings=None, offers=("checkpoint", "free_cache")))
        await settle(pilot)
        assert app.dashboard.query_one("#action-checkpoint").display
        await press(pilot, "c")
        assert [type(one) for one in feed.requests] == [wire.CheckpointNow]


async def test_an_action_that_makes_no_sense_now_says_why() -> None:
    feed = RecordingFeed(running(gpu(), state=wire.Phase.STOPPED, alive=False))
    async with opened(feed, "s") as (app, _):
        assert app.screen is app.dashboard
        assert "· Stop: the run is stopped" in screen_text(app)
        assert app.dashboard.query_one("#action-stop").has_class("-unavailable")


async def test_read_only_has_no_actions() -> None:
    feed = training_feed(read_only=True)
    async with opened(feed) as (app, pilot):
        text = screen_text(app)
        assert "read-only" in text
        shown = {action.id for action in BAR if app.dashboard.query_one(f"#action-{action.id}").display}
        nothing_to_show = {"recovery", "configurations", "speed", "samples", "whole_log"}
        assert shown == {action.id for action in BAR if action.group not in ("run", "machine")} - nothing_to_show
        assert {"detach", "help", "processes"} <= shown
        for key in ("f", "k", "r", "1", "c", "s"):
            app.dashboard.say("")
            await press(pilot, key)
            assert app.screen is app.dashboard
            assert ": read-only: nothing can be changed from here" in screen_text(app)
        assert feed.requests == []
