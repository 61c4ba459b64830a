"""The history of configurations: the table, going back, with and without the checkpoint, and one
key to undo."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.presets.program_profiles import load_profiles
from memtop.supervisor import wire
from memtop.supervisor.recovery.values import Peak
from memtop.supervisor.run import explain
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.wire import Change, Configuration, Restart
from memtop.tui import restart_own
from memtop.tui.configurations import (
    ConfigurationsScreen,
    consequences,
    differences,
    facts,
    heading,
    peak_words,
    rollback,
    row,
    undone,
)
from memtop.tui.line import plain
from memtop.tui.screen import ConfirmDialog
from memtop.tui.store import Store, fold
from tests.tui.support import (
    CONFIGURATIONS,
    GIB,
    RecordingFeed,
    configuration,
    gpu,
    opened,
    press,
    resize,
    running,
    screen_text,
    settle,
)

SIZES = [(80, 24), (160, 50)]
ROWS = CONFIGURATIONS.rows


def feed_of(*rows: wire.Configuration, **options: bool) -> RecordingFeed:
    return RecordingFeed(running(gpu()), wire.ConfigurationRows(rows=rows or ROWS), **options)


async def test_the_table_begins_with_the_newest_and_the_cursor_on_the_one_before() -> None:
    async with opened(feed_of(), "u", size=(80, 24)) as (app, pilot):
        for size in SIZES:
            await resize(pilot, *size)
            assert isinstance(app.screen, ConfigurationsScreen)
            lines = screen_text(app).splitlines()
            assert all(
                word in lines[1] for word in ("#", "att", "since", "B x A x W", "T", "peak", "samp/s", "outcome", "reason")
            )
            assert ("preset" in lines[1]) is (size[0] >= 110)
            assert lines[2].split()[:2] == ["●", "3"]
            assert all(word in lines[2] for word in ("8 x 4 x 1", "128", "10.0 GiB", "current"))
            assert lines[3].startswith("▸   2")
            assert all(word in lines[3] for word in ("4 x 8 x 1", "6.0 GiB", "32.0", "replaced"))
            assert all(word in lines[4] for word in ("16 x 2 x 1", "18.0 GiB", "out of VRAM"))
            text = "\n".join(lines)
            assert "configuration 2, from update 20  to update 30" in text
            assert "why: reason 2" in text
            assert "to go back: split 8 x 4 x 1 -> 4 x 8 x 1" in text
        await press(pilot, "escape")
        assert app.screen is app.dashboard


async def test_enter_rolls_back_after_a_question_that_names_the_consequences() -> None:
    feed = feed_of()
    async with opened(feed, "u", "down", size=(80, 24)) as (app, pilot):
        for size in SIZES:
            await resize(pilot, *size)
            await press(pilot, "enter")
            assert isinstance(app.screen, ConfirmDialog)
            assert app.focused is not None
            assert app.focused.id == "cancel"
            text = screen_text(app)
            for expected in (
                "with the settings of configuration 1?",
                "Changes: split 8 x 4 x 1 -> 16 x 2 x 1.",
                "Effective batch 32 -> 32: training is unchanged.",
                "Its peak was 18.0 GiB (measured).",
                "! It ended: out of GPU memory. That may happen again.",
            ):
                assert expected in text, expected
            await press(pilot, "enter")
            assert feed.requests == []
        await press(pilot, "enter")
        await press(pilot, "y")
        assert feed.requests == [Restart(id=1, change=Change(configuration=1))]
        assert app.screen is app.dashboard


async def test_with_its_checkpoint_the_state_is_restored_too() -> None:
    feed = feed_of()
    async with opened(feed, "u", "up", "enter") as (app, pilot):
        assert "· configuration 3 is the current one" in screen_text(app)
        assert feed.requests == []
        await press(pilot, "down", "c")
        text = " ".join(screen_text(app).replace("│", " ").split())
        assert "newest checkpoint kept at or before update 30" in text
        await press(pilot, "y")
        assert feed.requests == [Restart(id=1, change=Change(configuration=2, state_before=30))]


async def test_one_key_undoes_after_one_question() -> None:
    feed = feed_of(ROWS[2])
    async with opened(feed, "U", size=(80, 24)) as (app, pilot):
        assert "· Undo: the run has had only one configuration" in screen_text(app)
        assert app.screen is app.dashboard
        feed.send(CONFIGURATIONS)
        await settle(pilot)
        for number, keys in enumerate((("U",), ("u", "u")), 1):
            await press(pilot, *keys)
            assert "configuration 2?" in screen_text(app)
            await press(pilot, "y")
            assert feed.requests[number - 1 :] == [Restart(id=number, change=Change(configuration=2))]


async def test_a_configuration_that_begins_while_the_table_is_open_is_in_it() -> None:
    feed = feed_of()
    async with opened(feed, size=(80, 24)) as (app, pilot):
        await pilot.press("u")
        ended = replace(ROWS[2], outcome="replaced", until_update=40)
        feed.send(wire.ConfigurationRows(rows=(*ROWS[:2], ended, configuration(4, 2, outcome=None, until_update=None))))
        await settle(pilot)
        lines = screen_text(app).splitlines()
        assert lines[2].split()[:2] == ["●", "4"]
        # The cursor stays on its row.
        assert lines[4].startswith("▸   2")


async def test_read_only_shows_the_table_and_goes_nowhere() -> None:
    feed = feed_of(read_only=True)
    async with opened(feed, "U", "u", size=(80, 24)) as (app, pilot):
        for size in SIZES:
            await resize(pilot, *size)
            for keys in (("enter",), ("c", "u")):
                await press(pilot, *keys)
                assert "· read-only: nothing can be changed from here" in screen_text(app)
                assert isinstance(app.screen, ConfigurationsScreen)
        assert feed.requests == []


def test_a_peak_that_was_cut_short_is_a_lower_bound_and_an_unknown_one_a_dash() -> None:
    peak = Peak(batch=8, bytes=19 * GIB, updates=3, failed=True)
    assert peak_words(peak) == "≥ 19.0 GiB"
    assert peak_words(replace(peak, failed=False)) == "19.0 GiB"
    assert peak_words(None) == "–"


def test_columns_stand_below_their_names() -> None:
    for width in (80, 120, 160):
        head, places = heading(width)
        line = plain(row(ROWS[0], width, present=False))
        for place in places:
            assert plain(head)[place.start : place.end].strip()
            assert line[place.start - 1] == " "
        peak = next(place for place in places if place.id == "peak")
        assert line[peak.start : peak.end].strip() == "18.0 GiB"


def test_a_configuration_that_failed_in_its_first_update_has_done_none() -> None:
    failed = configuration(2, 4, since_update=1, until_update=0, outcome="host_oom_alloc")
    assert plain(facts(failed, None, 100)[0]).startswith("configuration 2, no update was done")
    # The last one of a run has no later one that says where it ended.
    assert "to its end" in plain(facts(replace(failed, until_update=None), None, 100)[0])
    assert "to now" in plain(facts(replace(failed, until_update=None, outcome=None), None, 100)[0])
    one = replace(failed, until_update=1)
    assert plain(facts(one, None, 100)[0]).startswith("configuration 2, from update 1  to update 1")


def test_the_settings_of_an_external_command_are_unknown() -> None:
    bare = wire.Configuration(number=1, attempt=1, started=0.0, reason="start")
    text = plain(row(bare, 120, present=True))
    assert text.count("–") >= 4
    assert "it is the current one" in plain(facts(bare, bare, 100)[-1])
    other = replace(bare, number=2)
    assert "this program's settings are unknown" in " ".join(plain(one) for one in facts(bare, other, 100))


def test_a_rollback_whose_end_is_not_known_cannot_choose_a_checkpoint() -> None:
    rows = (replace(ROWS[0], until_update=None), *ROWS[1:])
    assert rollback(rows[0], rows, with_state=False) == Change(configuration=1)
    answer = rollback(rows[0], rows, with_state=True)
    assert isinstance(answer, str)
    assert "is not known" in answer
    assert undone(ROWS) is ROWS[1]
    assert undone(ROWS[:1]) is None


def test_a_configuration_that_ended_by_a_kill_says_so() -> None:
    for signal, word in ((9, "killed"), (11, "failed"), (None, "failed")):
        ended = replace(ROWS[0], outcome="failed", ended_by=signal)
        assert word in plain(row(ended, 120, present=False)).split()
        store = fold(fold(Store(), running(gpu())), wire.ConfigurationRows(rows=(ended, *ROWS[1:])))
        assert f"! It ended: {word}. That may happen again." in consequences(ended, store, with_state=False)


def test_a_rollback_says_what_becomes_of_the_length() -> None:
    store = fold(Store(), running(gpu()))
    run = store.run
    assert run is not None
    assert run.settings is not None
    assert run.samples_seen is not None
    for samples, with_state, words in (
        (run.samples_seen + 10 * run.settings.effective_batch, False, "The run ends after update"),
        (run.samples_seen // 2, False, "The run keeps its present length."),
        (run.samples_seen // 2, True, "The run gets the length of that time again, unless"),
    ):
        earlier = replace(ROWS[0], settings=replace(run.settings, target_samples=samples))
        after = fold(store, wire.ConfigurationRows(rows=(earlier, *ROWS[1:])))
        assert [line for line in consequences(earlier, after, with_state=with_state) if line.startswith(words)]


def test_a_rollback_of_a_program_of_the_users_own_promises_no_save_that_it_may_not_do() -> None:
    store = fold(fold(Store(), running(gpu(), settings=None)), wire.ConfigurationRows(rows=ROWS))
    said = consequences(ROWS[0], store, with_state=False)
    assert not [line for line in said if "finishes its update" in line]
    assert f"{explain.FROM_ZERO[0].upper()}{explain.FROM_ZERO[1:]}." in said


def test_what_a_rollback_leaves_is_judged_only_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    run = fold(Store(), running(gpu(), settings=None)).run
    assert run is not None
    run = replace(run, state=wire.Phase.FINISHED, alive=False, updates=30, total_updates=30)
    saved = wire.Checkpoint(path="/out/checkpoint-30", updates=30, complete=True)
    monkeypatch.setattr(restart_own, "resumed_from", lambda _: saved)
    grip = Grip(output_dir="/out", batch=8, accumulation=2)
    monkeypatch.setattr(restart_own, "grip_of", lambda _: grip)
    row = replace(ROWS[0], settings=None, knobs={}, uses={"batch": 8, "accumulation": 2})
    assert "nothing is left to train" in (restart_own.why_not_back(run, row, row) or "")
    # Without the length that memtop gave it, the program has another one.
    assert restart_own.why_not_back(run, row, replace(row, knobs={"max_updates": "30"})) is None
    fixed = replace(grip, profile=load_profiles()["lightning"], batch=None, fixed={"batch": "in its code"})
    monkeypatch.setattr(restart_own, "grip_of", lambda _: fixed)
    assert restart_own.why_not_back(run, replace(row, uses={"batch": 4, "accumulation": 1}), row) is None


def test_a_survived_failure_is_named_before_a_rollback_to_it() -> None:
    peak = ROWS[1].peak
    assert peak is not None
    halved = replace(ROWS[1], peak=replace(peak, failed=True))
    store = fold(fold(Store(), running(gpu())), wire.ConfigurationRows(rows=(ROWS[0], halved, ROWS[2])))
    assert "! It ran out of memory then: that may happen again." in consequences(halved, store, with_state=False)


def test_the_settings_of_a_program_of_ones_own_are_named_where_they_are_known() -> None:
    own, changed = (Configuration(number=number, attempt=number, started=1.0, reason="start") for number in (1, 2))
    changed = replace(changed, knobs={"batch": "2", "seq_len": "64"}, uses={"batch": 2})
    assert differences(replace(own, uses={"batch": 4}), changed) == ["batch 2 -> 4", "seq_len 64 -> of its own"]
