"""The restart form: changes while the run trains, the expected peak, and what has already
failed."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Button, Input, Select

from memtop.presets.measured import ENOUGH_UPDATES, GpuKind, Measured, model_key, remember
from memtop.presets.parameters import stored_config
from memtop.presets.schema import Settings, Zero
from memtop.supervisor import wire
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.plan import estimated
from memtop.supervisor.program import Knob, Knobs, Program
from memtop.supervisor.recovery import forecast
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.forecast import Forecaster, forecaster_of
from memtop.supervisor.recovery.values import Peak
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.record.folder import RunFolder, StateFile
from memtop.supervisor.wire import Change, Checkpoint, Configuration, ConfigurationRows, Edit, Phase, Restart, StateUpdate
from memtop.tui.app import DashboardApp
from memtop.tui.line import Line, plain
from memtop.tui.remedies import FORECAST, forecast_lines, what_if
from memtop.tui.restart import RestartDialog
from memtop.tui.restart_plan import can_be_live
from memtop.tui.store import Store, fold
from tests.recovery.support import T5
from tests.tui.support import (
    CONFIGURATIONS,
    GIB,
    NOW,
    PROPOSAL,
    SETTINGS,
    RecordingFeed,
    click,
    gpu,
    opened,
    press,
    resize,
    run_state,
    running,
    screen_text,
    settle,
)

SIZES = [(80, 24), (160, 50)]
HALF = replace(SETTINGS, batch=4, accumulation=8)
SHARDED = replace(SETTINGS, zero=Zero(stage=2), preset="mine")
LOW = replace(SETTINGS, batch=4, accumulation=8, gradient_checkpointing=True, preset="low")


def words(app: DashboardApp) -> str:
    return " ".join(screen_text(app).replace("│", " ").split())


async def test_another_split_can_be_applied_now_and_the_answer_is_shown() -> None:
    feed = RecordingFeed(running(gpu()))
    feed.answers = ((wire.Outcome.ACCEPTED, "at the next update"), (wire.Outcome.DONE, "changed from update 26 on"))
    async with opened(feed, size=(80, 24)) as (app, pilot):
        for number, size in enumerate(SIZES, 1):
            await resize(pilot, *size)
            app.dashboard.say("")
            await press(pilot, "r")
            live = app.screen.query_one("#live", Button)
            assert not live.display
            assert "Apply now" not in screen_text(app)
            assert "? VRAM peak cannot be predicted: nothing was measured with these settings yet" in words(app)
            assert "no estimate: model.config.model_type" in words(app)
            app.screen.query_one("#batch", Input).value = "4"
            app.screen.query_one("#accumulation", Input).value = "8"
            await settle(pilot)
            assert live.display
            assert "Apply now (Enter, then ←): from the next update on, without a stop." in words(app)
            await click(pilot, "#live")
            change = Change(assignments={"batch": "4", "accumulation": "8"})
            assert feed.requests[number - 1 :] == [Edit(id=number, change=change)]
            assert "✓ changed from update 26 on" in screen_text(app)


async def test_a_preset_chosen_afterwards_keeps_what_was_typed_and_lists_what_it_changes() -> None:
    feed = RecordingFeed(running(gpu()))
    async with opened(feed, "r", size=(160, 50)) as (app, pilot):
        batch, accumulation, preset = (app.screen.query_one(f"#{name}") for name in ("batch", "accumulation", "preset"))
        assert isinstance(batch, Input)
        assert isinstance(accumulation, Input)
        assert isinstance(preset, Select)
        preset.value = "extreme"
        await settle(pilot)
        assert (batch.value, accumulation.value) == ("1", "32"), "nothing was typed"
        batch.value, accumulation.value = "2", "16"
        for name in ("low", "minimal"):
            preset.value = name
            await settle(pilot)
            assert (batch.value, accumulation.value) == ("2", "16")
        assert "batch and accumulation stay as typed; preset minimal alone gives 1 x 32 x 1" in words(app)
        for change in (
            "gradient checkpointing on",
            "no ZeRO -> ZeRO-3 + optimizer and parameters offload",
            "allocator default -> expandable_segments:True",
        ):
            assert change in words(app)
        await resize(pilot, 80, 24)
        for name in ("confirm", "cancel"):
            assert app.screen.query_one(f"#{name}").region.bottom <= 24
        await click(pilot, "#confirm")
        change = Change(preset="minimal", assignments={"batch": "2", "accumulation": "16"})
        assert feed.requests == [Restart(id=1, change=change)]


@pytest.mark.parametrize("size", SIZES)
async def test_the_open_list_of_presets_covers_no_text(size: tuple[int, int]) -> None:
    async with opened(RecordingFeed(running(gpu())), "r", size=size) as (app, pilot):
        app.screen.query_one("#preset", Select).value = "extreme"
        await press(pilot, "tab", "tab", "tab")
        before = app.screen.query_one("#consequences").region
        await press(pilot, "enter")
        presets = app.screen.query_one("#preset SelectOverlay").region
        for name in ("consequences", "outlook", "resumes"):
            region = app.screen.query_one(f"#{name}").region
            assert region.bottom > presets.y, "they share lines, so one must stand beside the other"
            assert region.right <= presets.x
        assert "gradient checkpointing on: less memory, slower" in words(app)
        await press(pilot, "escape")
        assert app.screen.query_one("#consequences").region == before


@pytest.mark.parametrize(("size", "height"), [((80, 24), 4), ((160, 50), 6)])
async def test_a_long_forecast_shows_that_it_goes_on(
    size: tuple[int, int], height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Line] = [((f"line {number} of the forecast", "muted"),) for number in range(1, height + 2)]
    monkeypatch.setattr("memtop.tui.restart.forecast_lines", lambda *_: lines[: len(lines) - whole])
    for whole in (0, 1):
        async with opened(RecordingFeed(running(gpu())), "r", size=size) as (app, _):
            shown = screen_text(app)
            assert f"line {height} of the forecast{' …' * (not whole)} " in shown
            assert f"line {height + 1}" not in shown


async def test_another_sequence_length_says_the_tokens_per_update_and_not_that_nothing_changes() -> None:
    async with opened(RecordingFeed(running(gpu())), "r", size=(120, 35)) as (app, pilot):
        app.screen.query_one("#batch", Input).value = "4"
        app.screen.query_one("#accumulation", Input).value = "8"
        await settle(pilot)
        assert "effective batch 32 -> 32: training is unchanged" in words(app)
        app.screen.query_one("#seq_len", Input).value = "64"
        await settle(pilot)
        assert "effective batch 32 -> 32" in words(app)
        assert "tokens per update 4096 -> 2048" in words(app)
        assert "unchanged" not in words(app)
        assert "no sample is repeated or skipped" in words(app)
        app.screen.query_one("#seq_len", Input).value = "none"
        await settle(pilot)
        assert "no sample is repeated or skipped" not in words(app), "with a wrong value it does not resume"


@pytest.mark.parametrize("size", SIZES)
async def test_the_form_says_what_enter_does_and_does_it(size: tuple[int, int]) -> None:
    feed = RecordingFeed(running(gpu()))
    async with opened(feed, "r", size=size) as (app, pilot):
        assert "Enter goes to Restart" in words(app)
        await press(pilot, "tab", "x", "enter")
        accumulation = app.screen.query_one("#accumulation", Input)
        assert "✗ accumulation" in words(app)
        await press(pilot, "shift+tab")
        assert "Enter goes to the wrong field" in words(app)
        await press(pilot, "enter")
        assert app.focused is accumulation
        await press(pilot, "4", "enter")
        assert app.focused is app.screen.query_one("#confirm")
        assert "Enter does it" in words(app)
        assert feed.requests == []
        await press(pilot, "enter")
        assert [type(one) for one in feed.requests] == [Restart]


async def test_a_run_that_begins_to_train_while_the_form_is_open_can_be_changed_live_or_restarted() -> None:
    feed = RecordingFeed(running(gpu(), state=wire.Phase.STARTING))
    async with opened(feed, "r") as (app, pilot):
        app.screen.query_one("#batch", Input).value = "4"
        await settle(pilot)
        assert not app.screen.query_one("#live").display
        feed.send(running(gpu()))
        await settle(pilot)
        assert app.screen.query_one("#live").display
        assert app.screen.query_one("#batch", Input).value == "4"
        await click(pilot, "#confirm")
        assert feed.requests == [Restart(id=1, change=Change(assignments={"batch": "4"}))]


@pytest.mark.parametrize(
    ("before", "after", "fields", "live"),
    [
        (SETTINGS, HALF, {}, True),
        (SETTINGS, SETTINGS, {}, False),
        (SETTINGS, replace(HALF, seq_len=64), {}, False),
        (SETTINGS, replace(HALF, preset="low"), {}, False),
        (replace(SETTINGS, zero=Zero(stage=2)), replace(HALF, zero=Zero(stage=2)), {}, False),
        (SETTINGS, HALF, {"state": wire.Phase.STOPPED, "alive": False}, False),
        (SETTINGS, HALF, {"state": wire.Phase.STARTING}, False),
    ],
)
def test_settings_that_may_change_live(before: Settings, after: Settings, fields: dict[str, object], live: bool) -> None:
    assert can_be_live(before, after, run_state(**fields)) is live


async def test_the_form_shows_the_expected_peak() -> None:
    async with opened(RecordingFeed(running(gpu()), CONFIGURATIONS), "r", size=(80, 24)) as (app, pilot):
        for size in SIZES:
            await resize(pilot, *size)
            app.screen.query_one("#batch", Input).value = "8"
            await settle(pilot)
            assert "VRAM peak 10.0 GiB measured with these settings 50.0 % · safe" in screen_text(app)
            assert "predicted" not in screen_text(app), "nothing is changed"
            # Peaks of 6, 10 and 18 GiB at 4, 8 and 16: 2 GiB and 1 for each sample.
            for batch, expected, basis in (
                ("2", "VRAM peak 10.0 GiB measured -> ~4.0 GiB predicted 20.0 % · safe", "line through peaks at B 4 and B 8"),
                ("16", "-> 18.0 GiB measured at B 16 90.0 % ^ edge", None),
            ):
                app.screen.query_one("#batch", Input).value = batch
                await settle(pilot)
                assert expected in screen_text(app)
                assert basis is None or f"from: {basis}" in screen_text(app)
                assert (basis is None) == ("predicted" not in screen_text(app))


async def test_the_form_and_the_presets_show_the_estimate_before_anything_is_measured() -> None:
    settings = replace(T5, world_size=1)
    feed = RecordingFeed(running(gpu(), settings=settings))
    async with opened(feed, "r", size=(80, 24)) as (app, pilot):
        for size in SIZES:
            await resize(pilot, *size)
            ends = []
            for batch in ("8", "64"):
                app.screen.query_one("#batch", Input).value = batch
                await settle(pilot)
                text = screen_text(app)
                assert "GiB predicted" in text
                assert "GiB, from: estimate" in words(app)
                ends.append(text.splitlines()[next(n for n, row in enumerate(text.splitlines()) if "▴" in row)].index("▴"))
            assert ends[0] < ends[1], "the bar moves at once"
            app.screen.query_one("#batch", Input).value = "128"
            app.screen.query_one("#accumulation", Input).value = "1"
            await settle(pilot)
            assert re.search(r"(\d+) x (\d+) keeps the effective batch, safe at ~", words(app))
            app.screen.query_one("#accumulation", Input).value = "2"
        await press(pilot, "escape", "5")
        for size in SIZES:
            await resize(pilot, *size)
            (row,) = [row for row in screen_text(app).splitlines() if "▸" in row and "standard" in row]
            assert "GiB · safe" in row
            assert "Predicted peak ~" in words(app)
    assert feed.requests == [], "nothing was restarted"
    on_cpu = RecordingFeed(running(gpu(), settings=replace(settings, device="cpu")))
    async with opened(on_cpu, "r", size=(80, 24)) as (app, pilot):
        assert re.search(r"RAM peak ~\d+\.\d GiB predicted", words(app))
        await press(pilot, "escape", "5")
        assert "predicted peak" in screen_text(app)
        assert re.search(r"Predicted peak ~\d+\.\d / 32\.0 GiB, between .* estimate", words(app))


async def test_the_form_and_the_presets_know_earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = replace(T5, world_size=1)
    model, kind = model_key(stored_config(settings) or {}), GpuKind("NVIDIA RTX A4500", 20 * GIB)
    row = {
        "run": "/runs/earlier",
        "time": 1.0,
        "gpu": kind,
        "model": model,
        "outside_bytes": GIB // 4,
        "updates": ENOUGH_UPDATES,
    }
    remember(Measured(**row, settings=settings, reserved_bytes=12 * GIB))
    of_preset = replace(settings, batch=16, accumulation=4, allocator="expandable_segments:True")
    remember(Measured(**row, settings=of_preset, reserved_bytes=9 * GIB))
    feed = RecordingFeed(running(gpu(fraction=0.0), settings=replace(settings, batch=8, accumulation=8)))
    async with opened(feed, "r", size=(120, 35)) as (app, pilot):
        app.screen.query_one("#batch", Input).value = str(settings.batch)
        while "~12.2 GiB predicted" not in words(app):  # 12 GiB of torch, and the measured context
            await pilot.pause(0.02)  # it is read in a thread
        assert "from: estimate, calibrated by 1 earlier run with" in words(app)
        await press(pilot, "escape", "5")
        while "estimate, calibrated by 1 earlier run" not in words(app):
            await pilot.pause(0.02)


@pytest.mark.parametrize(("key", "before"), [("r", "VRAM peak …"), ("5", "…")])
async def test_a_screen_is_usable_while_peaks_are_foreseen(
    key: str, before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimates of a model with many layers take a second."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    go, begun, where = threading.Event(), threading.Event(), set[threading.Thread]()

    def slow(settings: Settings, *more: Any) -> Any:
        where.add(threading.current_thread())
        begun.set()
        assert go.wait(60)
        return estimated(settings, *more)

    monkeypatch.setattr(forecast, "estimated", slow)
    feed = RecordingFeed(running(gpu(fraction=0.0), settings=replace(T5, world_size=1, batch=8)))
    async with opened(feed, size=(160, 50)) as (app, pilot):

        async def begin() -> None:
            begun.clear()
            await pilot.press(key)
            while not begun.is_set():
                await pilot.pause(0.01)

        def workers() -> int:
            return sum(worker.group == FORECAST and not worker.is_finished for worker in app.workers)

        await begin()
        assert before in words(app)
        assert not re.search(r"~\d+\.\d GiB", words(app))
        await pilot.press("escape")
        while len(app.screen_stack) > 1:
            await pilot.pause(0.01)
        assert workers() == 0, "the screen has ended them"
        await begin()
        go.set()
        await settle(pilot)
        assert re.search(r"~\d+\.\d GiB", words(app))
        assert before not in words(app) or key == "5"
    assert where
    assert threading.main_thread() not in where, "keys are answered meanwhile"


class HeldBack(Widget):
    """It goes only after what its screen foresees, so the screen has lost all other widgets."""

    async def on_unmount(self) -> None:
        while any(worker.group == FORECAST and worker.is_running for worker in self.workers):
            await asyncio.sleep(0.01)


async def test_a_request_that_the_next_one_replaces_before_it_begins_is_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    async with opened(RecordingFeed(running(gpu()))) as (app, pilot):
        await press(pilot, "r")
        assert isinstance(app.screen, RestartDialog)
        for after in (LOW, HALF):
            app.screen._foresee(after)
        await settle(pilot)
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("key", ["r", "5"])
async def test_a_peak_may_be_foreseen_while_the_screen_loses_its_widgets(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Textual removes a screen's widgets before it ends what the screen does in a thread."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    begun, closes = threading.Event(), threading.Event()
    shown: list[Screen[Any]] = []

    def late(*_: Any) -> str:
        begun.set()
        assert closes.wait(60)
        while len(shown[0].children) > 1:
            time.sleep(0.001)
        return "no estimate"

    monkeypatch.setattr(forecast, "estimated", late)
    feed = RecordingFeed(running(gpu(fraction=0.0), settings=replace(T5, world_size=1, batch=8)))
    async with opened(feed, size=(160, 50)) as (app, pilot):
        await pilot.press(key)
        while not begun.is_set():
            await pilot.pause(0.01)
        shown.append(app.screen)
        await app.screen.mount(HeldBack())
        closes.set()
    assert not shown[0].children


def lines_of(forecaster: Forecaster, settings: Settings) -> list[Line]:
    return forecast_lines(forecaster, what_if(forecaster, settings), 200)


def test_the_smallest_card_that_the_run_uses_counts() -> None:
    cards = (gpu(0), gpu(1, total_bytes=12 * GIB), gpu(2, total_bytes=8 * GIB))
    ranks = tuple(RankMemory(rank=n, pid=n, connected=True, device_uuid=cards[n].uuid) for n in (0, 1))
    store = fold(Store(), running(*cards, ranks=ranks))
    forecaster = forecaster_of(store.run, (), store.gpus, store.host)
    assert (forecaster.on_gpu, forecaster.total_bytes) == (True, 12 * GIB)


def test_on_the_cpu_it_is_host_memory_within_its_limit() -> None:
    on_cpu = (RankMemory(rank=0, pid=1, connected=True),)
    trains = fold(Store(), running(gpu(), ranks=on_cpu))
    assert not forecaster_of(trains.run, (), trains.gpus, trains.host).on_gpu, "although there is a GPU"
    settings = replace(SETTINGS, device="cpu")
    store = fold(Store(), running(settings=settings))
    forecaster = forecaster_of(store.run, (), store.gpus, store.host)
    assert (forecaster.on_gpu, forecaster.total_bytes) == (False, 32 * GIB)
    peaks = (Peak(batch=4, bytes=GIB, updates=9, settings_key="another"),)
    (line,) = lines_of(Forecaster(peaks=peaks, total_bytes=32 * GIB), settings)
    assert plain(line) == "? RAM peak cannot be predicted: nothing was measured with these settings yet"


def test_before_its_first_update_a_configuration_has_no_peak() -> None:
    """Its program may just have begun to load the model."""
    settings = replace(SETTINGS, device="cpu")
    key = settings_key(settings, on_gpu=False)
    begun = Peak(batch=settings.batch, bytes=GIB, updates=0, settings_key=key)
    larger = Peak(batch=2 * settings.batch, bytes=4 * GIB, updates=3, settings_key=key)
    store = fold(Store(), running(settings=settings))

    def lines(newest: Peak) -> list[str]:
        rows = [
            Configuration(number=number, attempt=1, started=NOW, reason="start", settings=settings, peak=peak)
            for number, peak in enumerate((larger, newest), 1)
        ]
        return list(map(plain, lines_of(forecaster_of(store.run, rows, store.gpus, store.host), settings)))

    assert "1.0 GiB" not in " ".join(lines(begun))
    row, _bar, others = lines(replace(begun, updates=1))
    assert row.startswith("RAM peak 1.0 GiB measured with these settings")
    assert re.fullmatch(r"the percentage counts the \d+\.\d GiB of other processes, too", others)


def test_a_batch_that_was_measured_before_is_not_called_predicted() -> None:
    settings = replace(SETTINGS, device="cpu")
    key = settings_key(settings, on_gpu=False)
    peaks = tuple(
        Peak(batch=batch, bytes=size, updates=5, settings_key=key) for batch, size in ((4, GIB // 2), (8, GIB), (16, 2 * GIB))
    )
    forecaster = Forecaster(peaks=peaks, current=peaks[2], total_bytes=32 * GIB)
    earlier, _bar = map(plain, lines_of(forecaster, replace(settings, batch=8)))
    assert earlier.startswith("RAM peak 2.0 GiB measured -> 1.0 GiB measured at B 8")
    assert "predicted" not in earlier
    assert "~1.5 GiB predicted" in plain(lines_of(forecaster, replace(settings, batch=12))[0])
    shared = replace(forecaster, others_bytes=15 * GIB)
    earlier, _bar, others = (
        plain(one).rstrip() for one in forecast_lines(shared, what_if(shared, replace(settings, batch=8)), 74)
    )
    assert earlier == "RAM peak 2.0 GiB measured -> 1.0 GiB measured at B 8 50.0 % · safe"
    assert others == "the percentage counts the 15.0 GiB of other processes, too"


async def test_before_the_first_update_the_form_says_why_nothing_can_be_applied_at_once() -> None:
    feed = RecordingFeed(running(gpu(), state=wire.Phase.STARTING))
    async with opened(feed, "r", size=(80, 24)) as (app, pilot):
        assert "Apply now" not in screen_text(app)
        app.screen.query_one("#batch", Input).value = "4"
        app.screen.query_one("#accumulation", Input).value = "8"
        await settle(pilot)
        assert "Apply now, without a stop, is possible after the first update." in words(app)
        assert not app.screen.query_one("#live").display
        feed.send(running(gpu()))
        await settle(pilot)
        assert app.screen.query_one("#live").display
        await press(pilot, "enter", "left")
        assert app.focused is app.screen.query_one("#live"), "as the form says"


def died_at(settings: object, present: object) -> wire.ConfigurationRows:
    first = Configuration(number=1, attempt=1, started=NOW, reason="start", settings=settings, outcome="gpu_oom")  # type: ignore[arg-type]
    second = Configuration(number=2, attempt=2, started=NOW, reason="gpu_oom", settings=present)  # type: ignore[arg-type]
    return wire.ConfigurationRows(rows=(first, second))


async def test_presets_and_form_warn_of_settings_that_have_failed() -> None:
    began = replace(SETTINGS, allocator="expandable_segments:True")
    feed = RecordingFeed(running(gpu(), settings=SHARDED), died_at(began, SHARDED))
    async with opened(feed, "5", size=(160, 50)) as (app, pilot):
        assert "! the run has died of memory with batch 8: this is the same, and saves nothing more" in screen_text(app)
        await press(pilot, "7")
        assert "has died" not in screen_text(app)
        await press(pilot, "escape")
        unsaved = replace(LOW, gradient_checkpointing=False)
        feed.send(running(gpu(), settings=unsaved), died_at(began, unsaved))
        await settle(pilot)
        await press(pilot, "r")
        assert "has died of memory" not in screen_text(app)
        app.screen.query_one("#batch", Input).value = "9"
        await settle(pilot)
        assert "! the run has died of memory with batch 8: this is more than that (9)" in screen_text(app)


async def test_a_preset_is_shown_as_it_will_be_applied_after_a_failure() -> None:
    feed = RecordingFeed(running(gpu(), settings=LOW), died_at(SETTINGS, LOW))
    async with opened(feed, "5", size=(160, 50)) as (app, pilot):
        (row,) = [row for row in screen_text(app).splitlines() if "▸" in row and "standard" in row]
        assert "4 x 8 x 1" in row
        assert "checkpointing" not in row
        await press(pilot, "enter")
        assert feed.requests == [Restart(id=1, change=Change(preset="standard"))]


async def test_the_card_shows_the_cause_before_what_can_be_done() -> None:
    cause = "anonymous memory of rank 0 grew by 5.0 MiB per update until the end: a leak"
    proposal = replace(PROPOSAL, causes=(cause,))
    feed = RecordingFeed(running(gpu(), state=wire.Phase.FAILED, alive=False, proposal=proposal))
    async with opened(feed, size=(160, 50)) as (app, _):
        text = " ".join(screen_text(app).replace("│", " ").split())
        assert f"! {cause}" in text
        assert text.index(cause) < text.index("What can be done")


def own_run(folder: Path, grip: Grip, **values: object) -> StateUpdate:
    """A run of a program that memtop holds like that."""
    own: dict[str, object] = {"settings": None, "command": ("python", "train.py"), "folder": str(folder)}
    message = running(gpu(), **{**own, **values})
    RunFolder(folder).state_path.write_bytes(msgspec.json.encode(StateFile(run=message.run, socket="", grip=grip)))
    return message


async def test_a_program_of_ones_own_with_the_trainer_has_a_form_of_its_own(tmp_path: Path) -> None:
    saved = Checkpoint(path="/out/checkpoint-5", updates=5, complete=True)
    grip = Grip(output_dir="/out", batch=8, accumulation=2, seq_len=64, fixed_length=True)
    feed = RecordingFeed(own_run(tmp_path, grip, updates=7, checkpoint=saved, offers=()))
    async with opened(feed, size=(100, 30)) as (app, pilot):
        await press(pilot, "r")
        assert "the same settings as now" in words(app)
        again = "2 updates since update 5 are done again, unless the program saves when it is stopped"
        assert again in words(app)
        assert "resumes at update" not in words(app), "it is said once"
        app.screen.query_one("#batch", Input).value = "none"
        await settle(pilot)
        assert "batch none: must be a whole number from 1 on" in words(app)
        assert not app.screen.query_one("#resumes").display, "with a wrong value it does not resume"
        assert app.screen.query_one("#confirm", Button).disabled
        app.screen.query_one("#batch", Input).value = "4"
        await settle(pilot)
        assert "the effective batch changes from 16 to 8. The Trainer counts in updates, so about 40 samples" in words(app)
        assert "the learning rate continues as it was" in words(app)
        app.screen.query_one("#accumulation", Input).value = "4"
        await settle(pilot)
        assert again in words(app)
        assert "resumes at update" not in words(app)
        assert "batch 8 x 2 -> 4 x 4: the effective batch stays 16" in words(app)
        app.screen.query_one("#confirm", Button).press()
        await settle(pilot)
    (request,) = [one for one in feed.requests if isinstance(one, Restart)]
    assert request.change == Change(assignments={"batch": "4", "accumulation": "4"})


async def test_a_program_without_a_profile_says_why_its_known_settings_cannot_be_changed(tmp_path: Path) -> None:
    seen = Program(grip="optimizer", knobs=Knobs(batch=Knob(value=32), accumulation=Knob(value=1)))
    for program, says in (
        (seen, "memtop sees its settings but does not know how to set them; a profile says it: see docs/profiles.md."),
        (Program(grip="optimizer"), "Its settings are not known, so none can be changed here."),
        (Program(), "Its settings are not known yet, because the program is still loading."),
    ):
        own: dict[str, object] = {"settings": None, "command": ("python", "t.py"), "folder": str(tmp_path), "program": program}
        own |= {"state": Phase.STARTING} if program == Program() else {}
        async with opened(RecordingFeed(running(gpu(), **own)), size=(160, 50)) as (app, pilot):
            await press(pilot, "r")
            assert says in " ".join(screen_text(app).replace("│", " ").split())


async def test_the_form_counts_from_the_update_at_which_the_program_saves_when_it_stops(tmp_path: Path) -> None:
    saved = Checkpoint(path="/out/checkpoint-5", updates=5, complete=True)
    grip = Grip(output_dir="/out", batch=8, accumulation=2)
    feed = RecordingFeed(own_run(tmp_path, grip, updates=7, checkpoint=saved, offers=("stop",)))
    async with opened(feed, size=(100, 30)) as (app, pilot):
        await press(pilot, "r")
        app.screen.query_one("#batch", Input).value = "4"
        await settle(pilot)
        assert "about 56 samples are repeated" in words(app)
        assert "done again" not in words(app)


def own_rows(*uses: dict[str, int | bool | str]) -> tuple[Configuration, ...]:
    """The configurations of a program of one's own: what it used in each."""
    return tuple(
        Configuration(number=number, attempt=number, started=1.0, reason="start", uses=one)
        for number, one in enumerate(uses, start=1)
    )


async def test_the_form_refuses_settings_that_would_leave_nothing_to_train(tmp_path: Path) -> None:
    saved = Checkpoint(path="/out/checkpoint-5", updates=5, complete=True)
    grip = Grip(output_dir="/out", batch=8, accumulation=2)
    feed = RecordingFeed(own_run(tmp_path, grip, updates=7, total_updates=10, checkpoint=saved, offers=("stop",)))
    async with opened(feed, size=(100, 30)) as (app, pilot):
        await press(pilot, "r")
        for accumulation, is_refused in (("4", True), ("1", False)):
            app.screen.query_one("#accumulation", Input).value = accumulation
            await settle(pilot)
            words_then = "nothing would be left to train: 8 updates are done then, and the new length is 5"
            assert (words_then in words(app), app.screen.query_one("#confirm", Button).disabled) == (is_refused, is_refused)
        await press(pilot, "escape")
        feed.send(ConfigurationRows(rows=own_rows({"accumulation": 4}, {"accumulation": 2})))
        await settle(pilot)
        await press(pilot, "u", "u")
        assert words_then in " ".join(screen_text(app).split())
    over: dict[str, object] = {"state": Phase.FINISHED, "alive": False, "updates": 10, "total_updates": 10}
    feed = RecordingFeed(own_run(tmp_path, grip, checkpoint=saved, **over))
    async with opened(feed, size=(100, 30)) as (app, pilot):
        await press(pilot, "r")
        assert "nothing is left to train: 10 updates are done, and the length is 10" in words(app)
    feed = RecordingFeed(own_run(tmp_path, grip, checkpoint=None, **over))
    async with opened(feed, size=(100, 30)) as (app, pilot):
        await press(pilot, "r")
        assert "the length is 10; it has no complete checkpoint" in words(app)


async def test_the_form_follows_a_program_of_ones_own(tmp_path: Path) -> None:
    saved = Checkpoint(path="/out/checkpoint-5", updates=5, complete=True)
    grip = Grip(output_dir="/out", batch=8, accumulation=2)
    now = own_run(tmp_path, grip, updates=7, checkpoint=saved, offers=("stop",))
    feed = RecordingFeed(now)
    async with opened(feed, size=(100, 30)) as (app, pilot):
        await press(pilot, "r")
        assert "resumes at the update at which it is stopped, now 7" in words(app)
        feed.send(replace(now, run=replace(now.run, updates=9)))
        await settle(pilot)
        assert "resumes at the update at which it is stopped, now 9" in words(app)
