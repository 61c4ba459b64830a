"""The process list: the cursor stays on its process, the order holds still under a question, and
what keys do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from memtop.supervisor.monitor.values import GpuProcess, MachineSnapshot
from memtop.supervisor.run.processes.environment import is_secret
from memtop.supervisor.wire import Checkpoint, StateUpdate
from memtop.tui.app import DashboardApp
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.feed import FeedMessage
from memtop.tui.line_list import LineList
from memtop.tui.processes.actions import EndingReport
from memtop.tui.processes.details import EnvironmentDialog, ProcessScreen
from memtop.tui.processes.screen import ProcessesScreen
from memtop.tui.screen import ConfirmDialog
from tests.tui.support import (
    GIB,
    NOW,
    RecordingFeed,
    RecordingProcessActions,
    click,
    gpu,
    machine,
    opened,
    press,
    process,
    resize,
    run_state,
    screen_text,
    settle,
)
from tests.tui.test_process_rows import BOB, JOB, RANKS

SIZE = (120, 30)


def small(*processes: GpuProcess) -> MachineSnapshot:
    return machine(gpu(processes=processes))


def grown(pid: int, gib: float) -> GpuProcess:
    return process(pid, used_bytes=int(gib * GIB))


@asynccontextmanager
async def process_list(
    content: FeedMessage | RecordingFeed, *, size: tuple[int, int] = SIZE, actions: RecordingProcessActions | None = None
) -> AsyncIterator[tuple[DashboardApp, Pilot[DashboardResult], ProcessesScreen]]:
    """The process list of this feed, or of a feed with this one message."""
    feed = content if isinstance(content, RecordingFeed) else RecordingFeed(content)
    async with opened(feed, "o", size=size, actions=actions) as (app, pilot):
        assert isinstance(app.screen, ProcessesScreen)
        yield app, pilot, app.screen


def order_of(app: DashboardApp) -> list[int]:
    assert isinstance(app.screen, ProcessesScreen)
    return [row.pid for row in app.screen.rows]


JOBS = MachineSnapshot(time=NOW, gpus=(gpu(0, processes=(RANKS[0], BOB)), gpu(1, processes=(RANKS[1],))), jobs=(JOB,))


async def test_the_list_at_every_size() -> None:
    async with process_list(JOBS, size=(80, 24)) as (app, pilot, _):
        for size in ((80, 24), (120, 40), (160, 50)):
            await resize(pilot, *size)
            text = screen_text(app)
            for words in ("GPU processes 3", "pid", "VRAM▾", "▾ a  launcher", "python job-100", "Esc Back", "k End"):
                assert words in text, (size, words)
        await press(pilot, "escape")
        assert app.screen is app.dashboard


async def test_a_process_on_two_gpus_is_one_process() -> None:
    on_both = MachineSnapshot(time=NOW, gpus=(gpu(0, processes=(RANKS[0], BOB)), gpu(1, processes=(BOB,))))
    async with process_list(on_both) as (app, _, _):
        assert "GPU processes 2 " in screen_text(app)


async def test_views_and_folding() -> None:
    async with process_list(JOBS) as (app, pilot, _):
        assert order_of(app) == [50, 90, 101, 100]
        await pilot.press("down", "enter")
        assert order_of(app) == [50, 90]
        assert "▸ a" in screen_text(app)
        await press(pilot, "enter", "t")
        assert "tree" in screen_text(app)
        await press(pilot, "t")
        assert order_of(app) == [50, 101, 100]
        assert "flat" in screen_text(app)


async def test_the_cursor_stays_on_its_process_when_the_order_changes() -> None:
    feed = RecordingFeed(small(grown(1, 1), grown(2, 2), grown(3, 3)))
    async with process_list(feed) as (app, pilot, screen):
        await press(pilot, "down", "down")
        assert screen.row is not None
        assert screen.row.pid == 1
        (marked,) = [row for row in screen_text(app).splitlines() if row.startswith("▸")]
        assert "job-1.py" in marked
        feed.send(small(grown(1, 9), grown(2, 2), grown(3, 3)))
        await settle(pilot)
        assert order_of(app) == [1, 3, 2]
        assert screen.row is not None
        assert screen.row.pid == 1
        # When its process ends, the cursor stays in its place.
        feed.send(small(grown(2, 2), grown(3, 3)))
        await settle(pilot)
        assert screen.row is not None
        assert screen.row.pid == 3


async def test_typing_a_filter_holds_the_order_still() -> None:
    feed = RecordingFeed(small(grown(1, 3), grown(2, 2), grown(3, 1)))
    async with process_list(feed) as (app, pilot, screen):
        await pilot.press("f", *"job-")
        feed.send(small(grown(1, 3), grown(2, 2), grown(3, 9)))
        await settle(pilot)
        assert order_of(app) == [1, 2, 3]
        assert "order frozen" in screen_text(app)
        await press(pilot, "enter")
        assert order_of(app) == [3, 1, 2]
        assert "filter job-" in screen_text(app)
        await press(pilot, "f", *" vram>5g", "enter")
        assert order_of(app) == [3]
        assert "GPU processes 1 of 3" in screen_text(app)
        await pilot.press("escape")
        assert screen.row is not None
        assert order_of(app) == [3, 1, 2]


async def test_sorting_and_searching_by_keys_and_by_clicks() -> None:
    async with process_list(small(grown(1, 1), grown(2, 3), grown(3, 2))) as (app, pilot, screen):
        assert order_of(app) == [2, 3, 1]
        await pilot.press("down", "slash", *"job-", "enter")
        places = []
        for key in ("n", "n", "N"):
            await pilot.press(key)
            assert screen.row is not None
            places.append(screen.row.pid)
        assert places == [1, 2, 1], "the search starts again at the top"
        await pilot.press("i")
        assert order_of(app) == [1, 3, 2]
        await click(pilot, "#processes-table", offset=(6, 0))
        assert order_of(app) == [1, 2, 3]
        assert "pid▴" in screen_text(app)
        await click(pilot, "#processes-table", offset=(6, 0))
        assert order_of(app) == [3, 2, 1]


def check_help(text: str, *, read_only: bool) -> None:
    for words in ("Keys of this screen", "user:bob gpu:1 vram>2g", "Reverse the order", "One step back"):
        assert words in text
    assert ("asks first" in text) != read_only


async def test_help_lists_the_keys_of_the_list_and_a_click_on_a_key_does_what_the_key_does() -> None:
    async with process_list(small(grown(1, 1))) as (app, pilot, screen):
        await press(pilot, "question_mark")
        check_help(screen_text(app), read_only=False)
        await press(pilot, "escape")
        assert app.screen is screen
        at = screen_text(app).splitlines()[-1].index("Esc Back")
        await click(pilot, "KeyLine", offset=(at + 1, 0))
        assert app.screen is app.dashboard


async def test_ending_asks_with_names_and_consequence_and_holds_the_order() -> None:
    saved = Checkpoint(path="x", updates=20, saved_at=NOW - 12, complete=True)
    mine = process(1, run="tiny", used_bytes=3 * GIB, command="python job-1.py --with-long --words-before --the-end last")
    update = StateUpdate(run=run_state(updates=24, checkpoint=saved), machine=small(mine, grown(2, 2)))
    feed, actions = RecordingFeed(update), RecordingProcessActions()
    async with process_list(feed, actions=actions) as (app, pilot, _):
        await press(pilot, "k")
        assert isinstance(app.screen, ConfirmDialog)
        assert app.focused is not None
        assert app.focused.id == "cancel"
        text = screen_text(app)
        for words in (
            "ada",
            "3.0 GiB",
            "python job-1.py",
            "--the-end last",
            "memory is freed (3.0 GiB)",
            "Run tiny would lose 4 updates",
        ):
            assert words in text
        await press(pilot, "enter")
        assert actions.ended == []
        await press(pilot, "space", "space", "k")
        feed.send(small(mine, grown(2, 9)))
        await settle(pilot)
        await press(pilot, "y")
        assert sorted(actions.ended) == [1, 2]
        assert "✓ 2 processes ended" in screen_text(app)


async def test_a_process_that_may_not_be_ended_can_be_neither_ticked_nor_ended() -> None:
    foreign = process(5, used_bytes=4 * GIB, user="grace", choosable=False, reason="belongs to grace")
    drawing = process(1, kind="graphics", choosable=False, reason="draws on the screen (graphics)")
    shown = machine(gpu(0, processes=(foreign, grown(1, 2))), gpu(1, processes=(drawing,)))
    actions = RecordingProcessActions()
    async with process_list(shown, actions=actions) as (app, pilot, screen):
        for reason in ("belongs to grace", "draws on the screen (graphics)"):
            for key in ("k", "space"):
                await press(pilot, key)
                assert app.screen is screen
                assert reason in screen_text(app)
            await press(pilot, "enter", "k")
            assert isinstance(app.screen, ProcessScreen)
            assert reason in screen_text(app)
            await press(pilot, "escape", "down")
        assert not screen.ticked
        assert actions.ended == []


async def test_read_only_has_no_keys_that_end() -> None:
    async with process_list(RecordingFeed(small(grown(1, 1)), read_only=True)) as (app, pilot, screen):
        text = screen_text(app)
        assert "End" not in text
        assert "Tick" not in text
        for key in ("k", "space"):
            await press(pilot, key)
            assert app.screen is screen
        assert not screen.ticked
        await press(pilot, "question_mark")
        check_help(screen_text(app), read_only=True)
        await press(pilot, "escape", "enter")
        assert isinstance(app.screen, ProcessScreen)
        await press(pilot, "k")
        assert isinstance(app.screen, ProcessScreen)
        assert "End" not in screen_text(app)


async def test_one_process_in_detail_until_it_ends() -> None:
    feed = RecordingFeed(*(small(process(1, used_bytes=n * GIB, host_rss_bytes=None)) for n in range(1, 6)))
    async with process_list(feed) as (app, pilot, _):
        await press(pilot, "enter")
        assert isinstance(app.screen, ProcessScreen)
        text = screen_text(app)
        for words in ("process 1", "python job-1.py", "VRAM 5.0 GiB", "RSS –", "not known"):
            assert words in text
        feed.send(small())
        await settle(pilot)
        assert "it has ended or left the GPU" in screen_text(app)
        await press(pilot, "k")
        assert "it has already ended" in screen_text(app)


async def test_secrets_of_the_environment_are_hidden_until_requested() -> None:
    actions = RecordingProcessActions()
    async with process_list(small(grown(1, 1)), actions=actions) as (app, pilot, screen):
        await press(pilot, "e")
        assert isinstance(app.screen, EnvironmentDialog)
        assert "HOME=/home/ada" in screen_text(app)
        assert "hf_secret" not in screen_text(app)
        await press(pilot, "v")
        assert "hf_secret" in screen_text(app)
        await pilot.press("escape")
        actions.environment = None
        await settle(pilot)
        await press(pilot, "e")
        assert app.screen is screen
        assert "it belongs to grace" in screen_text(app)


async def test_a_tick_without_news_repaints_no_row() -> None:
    feed = RecordingFeed(small(grown(1, 1), grown(2, 2)))
    async with process_list(feed) as (_, pilot, screen):
        table = screen.query_one(LineList)
        painted: list[object] = []
        table.refresh = lambda *regions, **kwargs: painted.extend(regions or ("all of it",))  # type: ignore[method-assign, assignment]
        feed.send(small(grown(1, 1), grown(2, 2)))
        await settle(pilot)
        assert painted == []
        feed.send(small(grown(1, 1.5), grown(2, 2)))
        await settle(pilot)
        assert [region.y for region in painted] == [2]  # type: ignore[attr-defined]


async def test_the_short_list_opens_the_full_one() -> None:
    async with opened(RecordingFeed(small(grown(1, 1))), size=SIZE) as (app, pilot):
        await click(pilot, "#processes", offset=(3, 2))
        assert isinstance(app.screen, ProcessesScreen)
        await press(pilot, "escape")
        app.dashboard.query_one("#processes").focus()
        await press(pilot, "enter")
        assert isinstance(app.screen, ProcessesScreen)


class SlowProcessActions(RecordingProcessActions):
    """Waits for `release` before it ends anything."""

    def __init__(self, report: EndingReport) -> None:
        super().__init__()
        self.report = report
        self.release = asyncio.Event()

    async def end_processes(self, chosen: Sequence[GpuProcess], machine: MachineSnapshot) -> EndingReport:
        await self.release.wait()
        return await super().end_processes(chosen, machine)


async def test_ending_goes_on_once_at_a_time_and_is_reported_after_its_screen_was_left() -> None:
    actions = SlowProcessActions(EndingReport("1 process ended, 7.8 GiB returned", good=True))
    async with process_list(small(grown(1, 1)), actions=actions) as (app, pilot, screen):
        await press(pilot, "k", "y", "k")
        assert app.screen is screen
        assert "· processes are being ended already" in screen_text(app)
        await press(pilot, "escape")
        for number, keys in enumerate(((), ("o", "k", "y", "q"), ("o", "enter", "k", "y", "escape", "escape")), 1):
            for key in keys:
                await press(pilot, key)
            assert app.screen is app.dashboard
            assert app.dashboard.ending_processes
            actions.release.set()
            await settle(pilot)
            assert actions.ended == [1] * number
            assert "✓ 1 process ended, 7.8 GiB returned" in screen_text(app)
            assert not app.dashboard.ending_processes
            actions.release.clear()
            app.dashboard.say("")


async def test_the_result_of_ending_a_process_is_marked_whole_and_stays() -> None:
    words = (
        "no process ended; process 1 does not react even to SIGKILL: it is stuck in the kernel or in the driver, see THE-END"
    )
    actions = RecordingProcessActions()
    actions.report = EndingReport(words, good=False)
    async with process_list(small(grown(1, 2), grown(2, 1)), actions=actions, size=(80, 24)) as (app, pilot, screen):
        await press(pilot, "k", "y")
        for _ in range(2):
            text = screen_text(app)
            assert "✗ no process ended" in text
            assert "THE-END" in text
            assert "✓" not in text
            await press(pilot, "down")
        assert "your own process" in screen_text(app), "the row under the cursor has its line, too"
        screen.say("something else")
        await settle(pilot)
        assert "THE-END" not in screen_text(app)


async def test_the_question_names_the_gpus() -> None:
    async with process_list(machine(gpu(0, processes=(grown(1, 2),)), gpu(3, processes=(grown(1, 2),)))) as (app, pilot, _):
        await press(pilot, "k")
        assert isinstance(app.screen, ConfirmDialog)
        assert "on GPU 0, 3: python job-1.py" in screen_text(app)


async def test_a_list_that_the_driver_refuses_is_not_called_empty() -> None:
    refused = gpu(0, unknown={"processes": "no permission: this user may not read it"})
    async with opened(RecordingFeed(machine(refused)), size=SIZE) as (app, pilot):
        words = "! GPU 0: not all of its processes are known: no permission"
        assert words in screen_text(app)
        assert "no process uses a GPU" not in screen_text(app)
        await press(pilot, "o")
        assert words in screen_text(app)
        assert "no process uses a GPU" not in screen_text(app)
        await press(pilot, "escape", "k")
        assert "GPU 0: not all of its processes are known" in screen_text(app)
        assert "uses a GPU" not in screen_text(app).partition("Cancel")[0].rpartition("Processes that hold")[2]


async def test_a_filter_with_an_error_names_it_and_is_not_used() -> None:
    async with process_list(small(grown(1, 3), process(2, kind="mps"))) as (app, pilot, _):
        await press(pilot, "f", *"usr:x")
        assert "no key 'usr'" in screen_text(app)
        await press(pilot, "escape")
        assert "no key" not in screen_text(app)
        assert not app.screen.query_one("#processes-input", Input).display
        await press(pilot, "f", *"kind:mps", "enter")
        assert order_of(app) == [2]
        await press(pilot, "f", *" usr:x", "enter")
        assert app.screen.query_one("#processes-input", Input).display
        assert "no key 'usr'" in screen_text(app)
        assert "usr:x" not in screen_text(app).splitlines()[0], "the title shows the filter in use"
        await press(pilot, "escape")
        assert order_of(app) == [1, 2]


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("WANDB_API_KEY", "", True),
        ("db_password", "", True),
        ("HOME", "", False),
        ("RANK", "", False),
        ("DATABASE_URL", "postgres://ada:s3cret@db/x", True),
        ("https_proxy", "http://ada:s3cret@proxy:3128", True),
        ("PIP_INDEX_URL", "https://ghp_token@github.com/x", True),
        ("https_proxy", "http://proxy:3128", False),
        ("MYSQL_PWD", "x", True),
        ("GPG_PASSPHRASE", "x", True),
        ("SENTRY_DSN", "x", True),
        ("SMTP_PASS", "x", True),
        ("PWD", "/home/ada", False),
        ("OLDPWD", "/home", False),
        ("PASSIVE", "1", False),
        ("HF_TOKEN", "x", True),
        ("MAX_TOKENS", "512", False),
        ("HF_TOKENS", "x", True),
        ("GH_PAT", "x", True),
        ("PATIENCE", "3", False),
        ("DBPASS", "x", True),
        ("TLS_BYPASS", "1", False),
        ("MY_CREDS", "x", True),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x", True),
        ("STORE", "https://a.blob.core.windows.net/b?sv=2022&sig=x", True),
        ("CALL", "Authorization: Bearer x", True),
        ("PLACE", "DefaultEndpointsProtocol=https;AccountKey=x", True),
        ("HOOK", "https://hooks.slack.com/services/T0000/B0000/" + "x1" * 12, True),
        ("WORD", "hf_" + "Ab3" * 11, True),
        ("GPU", "GPU-8c1e0f5a-1111-2222-3333-444455556666", False),
        ("DATA", "/data/experiments/llama_7b-finetune-2026-11-30_v2/train.jsonl", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
    ],
)
def test_secret_values(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value) is secret
