"""A scripted feed that records its requests, values to show, and dashboards opened and read as
text."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace
from rich.console import RenderableType
from textual._compositor import Compositor
from textual._context import active_app
from textual.app import App
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widget import Widget

from memtop.presets.schema import Settings
from memtop.supervisor import units, wire
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.values import Band, GpuProcess, GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.values import Forecast, Peak, Remedy
from memtop.tui.app import DashboardApp
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.feed import Connected, Feed, FeedMessage
from memtop.tui.line import Line, plain
from memtop.tui.processes.actions import EndingReport
from memtop.tui.remedies import FORECAST
from memtop.tui.store import Store, fold

# Where there is no terminal, Textual renders each frame and drops it. That is a third of what a
# dashboard takes in these tests, so `settle` renders at once all that has changed. A tenth goes
# into the style sheets, which would be parsed again for each dashboard. See conftest.py.
render_frame = Compositor.render_update
_parse_rules = Stylesheet._parse_rules
_parsed: dict[tuple[Any, ...], list[RuleSet]] = {}


def render_later(self: Compositor, *given: Any, **named: Any) -> RenderableType | None:
    return None if active_app.get().is_headless else render_frame(self, *given, **named)


def parse_once(self: Stylesheet, *given: Any, **named: Any) -> list[RuleSet]:
    asked = (given, *sorted(named.items()), *sorted(self._variables.items()))
    if asked not in _parsed:
        _parsed[asked] = _parse_rules(self, *given, **named)
    return _parsed[asked]


# Textual's own waits until the process computes nothing for 20 ms, or for a second, and that twice
# for each key. Almost never must time pass.
_in_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, set[asyncio.Future[Any]]] = WeakKeyDictionary()
_run_in_executor = asyncio.BaseEventLoop.run_in_executor
_QUIET_TURNS = 3
_SOON = 0.02
"""Seconds: in this time Textual lays out a terminal of another size, and paints what changed."""
_IN_THREADS = 1.0
"""Seconds: a test may hold a thread for longer."""


def run_in_executor(self: asyncio.BaseEventLoop, *given: Any) -> asyncio.Future[Any]:
    """As the loop's own; `wait_for_idle` waits for what runs in threads."""
    found = _run_in_executor(self, *given)
    running = _in_threads.setdefault(self, set())
    running.add(found)
    found.add_done_callback(running.discard)
    return found


async def wait_for_idle(min_sleep: float = 0, max_sleep: float = 10) -> None:
    """Until the event loop has nothing to do, nothing runs in a thread, and no timer ends soon."""
    loop: Any = asyncio.get_running_loop()
    begin, quiet = loop.time(), 0
    while quiet < _QUIET_TURNS and loop.time() < begin + max_sleep:
        next_timer = min((one.when() for one in loop._scheduled if not one.cancelled()), default=math.inf)
        if next_timer <= begin + _SOON:
            await asyncio.sleep(max(0, next_timer - loop.time()))
        elif _in_threads.get(loop) and loop.time() < begin + _IN_THREADS:
            await asyncio.sleep(0.001)
        else:
            await asyncio.sleep(0)
            quiet += 1
            if not loop._ready:
                continue
        quiet = 0


GIB = units.GIB
NOW = 1_760_000_000.0

SETTINGS = Settings(
    recipe="first-run",
    preset="standard",
    batch=8,
    accumulation=4,
    seq_len=128,
    target_samples=1920,
    save_every=10,
    learning_rate=2e-3,
    model={"config": {"max_position_embeddings": 1024}},
)


def process(pid: int, **fields: object) -> GpuProcess:
    known: dict[str, object] = {
        "user": "ada",
        "command": f"python job-{pid}.py",
        "used_bytes": GIB,
        "reason": "your own process, not started by a memtop run",
        "choosable": True,
        "started": NOW - 600,
        "started_ticks": 1000 + pid,
    }
    return GpuProcess(pid=pid, **{**known, **fields})  # type: ignore[arg-type]


def gpu(index: int = 0, fraction: float = 0.5, band: Band = Band.SAFE, **fields: object) -> GpuSample:
    total = 20 * GIB
    used = int(total * fraction)
    reserved = int(fields.get("reserved_bytes") or 0)  # type: ignore[call-overload]
    known: dict[str, object] = {
        "uuid": f"GPU-{index:04x}-0000",
        "name": "NVIDIA RTX A4500",
        "total_bytes": total,
        "used_bytes": used,
        "free_bytes": total - used - reserved,
        "used_fraction": (used + reserved) / total,
        "band": band,
        "utilization_fraction": 0.97,
        "temperature_celsius": 62.0,
        "power_watts": 212.0,
        "power_limit_watts": 230.0,
    }
    return GpuSample(index=index, **{**known, **fields})  # type: ignore[arg-type]


HOST = HostSample(
    total_bytes=32 * GIB,
    used_bytes=24 * GIB,
    available_bytes=8 * GIB,
    used_fraction=0.75,
    band=Band.SAFE,
    swap_total_bytes=4 * GIB,
    swap_used_bytes=GIB // 2,
    swap_fraction=0.125,
    swap_band=Band.SAFE,
    swap_in_bytes_per_second=0.0,
    swap_out_bytes_per_second=0.0,
    pressure_fraction=0.0,
    cpu_fraction=0.4,
)


def machine(*gpus: GpuSample, note: str | None = None, host: HostSample = HOST, time: float = NOW) -> MachineSnapshot:
    return MachineSnapshot(time=time, gpus=gpus, gpu_note=note, host=host)


def run_state(**fields: object) -> wire.RunState:
    known: dict[str, object] = {
        "name": "tiny",
        "folder": "runs/tiny",
        "state": wire.Phase.TRAINING,
        "alive": True,
        "attempt": 2,
        "created": NOW - 2000,
        "started": NOW - 1330,
        "settings": SETTINGS,
        "effective_batch": 32,
        "updates": 24,
        "total_updates": 60,
        "samples_seen": 768,
        "target_samples": 1920,
        "epoch": 0.4,
        "loss": 1.842,
        "best_loss": 1.79,
        "learning_rate": 8.7e-5,
        "gradient_norm": 0.61,
        "samples_per_second": 31.2,
        "tokens_per_second": 55_900.0,
        "step_seconds": 1.15,
        "eta_seconds": 7890.0,
        "run_rss_bytes": 9 * GIB,
        "checkpoint": wire.Checkpoint(path="x", updates=20, samples_seen=640, saved_at=NOW - 12, size_bytes=GIB, complete=True),
    }
    return wire.RunState(**{**known, **fields})  # type: ignore[arg-type]


class RecordingFeed:
    """Sends the messages of the test, answers every request with `answers` and keeps the
    requests."""

    def __init__(self, *messages: FeedMessage, read_only: bool = False) -> None:
        self.read_only = read_only
        self.label: str | None = None
        self.requests: list[wire.Request] = []
        self.answers: Sequence[tuple[wire.Outcome, str]] = (
            (wire.Outcome.ACCEPTED, "begun"),
            (wire.Outcome.DONE, "Freed 1.1 GiB on the device, 0.3 GiB to the system"),
        )
        self._queue: asyncio.Queue[FeedMessage] = asyncio.Queue()
        for message in (Connected(), *messages):
            self._queue.put_nowait(message)

    def send(self, *messages: FeedMessage) -> None:
        for message in messages:
            self._queue.put_nowait(message)

    async def messages(self) -> AsyncIterator[FeedMessage]:
        while True:
            yield await self._queue.get()

    async def request(self, make: Callable[[int], wire.Request]) -> AsyncIterator[wire.Answer]:
        request = make(len(self.requests) + 1)
        self.requests.append(request)
        for outcome, message in self.answers:
            yield wire.Answer(id=request.id, outcome=outcome, message=message)


class RecordingProcessActions:
    """Ends nothing and keeps the processes it should have ended. `environment` None: reading it is
    refused."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.report = EndingReport("{} processes ended, 7.8 GiB returned", good=True)
        self.environment: dict[str, str] | None = {"HOME": "/home/ada", "HF_TOKEN": "hf_secret"}

    async def end_processes(self, chosen: Sequence[GpuProcess], machine: MachineSnapshot) -> EndingReport:
        self.ended += [one.pid for one in chosen]
        self.seen = machine
        return self.report._replace(text=self.report.text.format(len(chosen)))

    async def environment_of(self, process: GpuProcess) -> dict[str, str]:
        if self.environment is None:
            raise RefusedError(f"the environment of process {process.pid} cannot be read: it belongs to grace")
        return self.environment


def running(*gpus: GpuSample, **fields: object) -> wire.StateUpdate:
    """A state update of a training run on these GPUs."""
    note = None if gpus else "no NVIDIA GPU: no NVIDIA driver found"
    return wire.StateUpdate(run=run_state(**fields), machine=machine(*gpus, note=note))


def store_of(*messages: FeedMessage) -> Store:
    """The dashboard's state after these messages of a connected feed."""
    return reduce(fold, messages, fold(Store(), Connected()))


def text_of(lines: Iterable[Line]) -> str:
    return "\n".join(plain(one) for one in lines)


def screen_text(app: App[DashboardResult]) -> str:
    """The text on the terminal now, without colours."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


def screen_colours(app: App[DashboardResult]) -> list[list[tuple[str, str]]]:
    """The text on the terminal now, each piece with its style."""
    return [[(segment.text, str(segment.style)) for segment in strip] for strip in app.screen._compositor.render_strips()]


async def settle(pilot: Pilot[DashboardResult]) -> None:
    """Let the feed's messages arrive, and what they cause be foreseen and laid out."""
    await pilot.pause()
    while any(worker.group == FORECAST and not worker.is_finished for worker in pilot.app.workers):
        await pilot.pause(0.01)
    await pilot.pause()
    render_frame(pilot.app.screen._compositor, screen_stack=pilot.app._background_screens)


async def press(pilot: Pilot[DashboardResult], *keys: str) -> None:
    """Press keys, one after the other, and let what they cause be laid out."""
    await pilot.press(*keys)
    await settle(pilot)


async def click(pilot: Pilot[DashboardResult], widget: Widget | str, offset: tuple[int, int] = (0, 0)) -> None:
    """Click on a widget and let what this causes be laid out."""
    await pilot.click(widget, offset=offset)
    await settle(pilot)


async def resize(pilot: Pilot[DashboardResult], columns: int, rows: int) -> None:
    """Give the terminal another size. The screens below a dialog are laid out, too."""
    await pilot.resize_terminal(columns, rows)
    await settle(pilot)
    while not _is_laid_out(pilot.app):
        await pilot.pause(0.01)
        await settle(pilot)


def _is_laid_out(app: App[DashboardResult]) -> bool:
    """At its present size. Of a screen below another one, Textual lays out what can be seen."""
    if any(screen.size != app.size or _has_messages(screen) for screen in app.screen_stack):
        return False
    return app.screen._compositor.size == app.size


def _has_messages(screen: Screen[Any]) -> bool:
    return any(one.message_queue_size for one in (screen, *screen.walk_children()))


def dashboard(feed: Feed, process_actions: RecordingProcessActions | None = None) -> DashboardApp:
    return DashboardApp(feed, process_actions=process_actions or RecordingProcessActions())


@asynccontextmanager
async def opened(
    feed: Feed,
    *keys: str,
    size: tuple[int, int] = (120, 40),
    actions: RecordingProcessActions | None = None,
    notifications: bool = False,
) -> AsyncIterator[tuple[DashboardApp, Pilot[DashboardResult]]]:
    """A dashboard that has drawn what the feed reports, after these keys were pressed."""
    app = dashboard(feed, actions)
    async with app.run_test(size=size, notifications=notifications) as pilot:
        await settle(pilot)
        if keys:
            await press(pilot, *keys)
        yield app, pilot


DIAGNOSIS = Diagnosis(
    kind=Kind.GPU_OOM,
    confidence=0.99,
    summary="GPU 0 ran out of memory in the backward pass of update 24: 2.1 GiB asked, 0.5 GiB free.",
    phase="backward",
    rank=0,
    device_index=0,
    device_uuid="GPU-0000-0000",
    requested_bytes=int(2.1 * GIB),
    requested_for="the logits (B 8 x T 128 x V 50 257, fp32)",
    total_bytes=20 * GIB,
    free_bytes=GIB // 2,
    allocated_bytes=17 * GIB,
    reserved_unallocated_bytes=GIB,
    context_bytes=GIB // 2,
    other_process_bytes=GIB,
    source="record",
    evidence=("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.10 GiB.", "a second line"),
)
SMALLER = Remedy(
    id="smaller_batch",
    title="batch 8 -> 4, accumulation 4 -> 8: effective batch stays 32",
    why="Half the samples at a time, twice as often.",
    keeps_math=True,
    resumable="live",
    assignments={"batch": "4", "accumulation": "8"},
    forecast=Forecast(
        peak_bytes=12 * GIB, total_bytes=20 * GIB, fraction=0.6, band=Band.SAFE, basis="line through peaks at B 2 and B 8"
    ),
    speed=0.9,
)
ALLOCATOR = Remedy(
    id="allocator",
    title="allocator: expandable_segments:True",
    keeps_math=True,
    resumable="resumes",
    assignments={"allocator": "expandable_segments:True"},
    forecast_unknown="the pieces were not counted",
)
SHORTER = Remedy(
    id="seq_len",
    title="T 128 -> 64",
    why="Half the tokens of each sample.",
    keeps_math=False,
    resumable="resumes",
    needs_consent=True,
    assignments={"seq_len": "64"},
    forecast_unknown="nothing was measured at T 64",
)
BY_HAND = Remedy(
    id="swap",
    title="more swap",
    keeps_math=True,
    resumable="none",
    command="sudo fallocate -l 8G /swapfile",
)
PROPOSAL = wire.Proposal(diagnosis=DIAGNOSIS, remedies=(SMALLER, ALLOCATOR, SHORTER, BY_HAND), waiting="--on-oom ask")


def dead(proposal: wire.Proposal | None = PROPOSAL, **fields: object) -> wire.StateUpdate:
    """A run that has failed for lack of memory."""
    known: dict[str, object] = {"state": wire.Phase.FAILED, "alive": False, "on_oom": "ask", "proposal": proposal}
    return running(gpu(), **{**known, **fields})


def configuration(number: int, batch: int, **fields: object) -> wire.Configuration:
    settings = replace(SETTINGS, batch=batch, accumulation=32 // batch)
    known: dict[str, object] = {
        "attempt": number,
        "since_update": 10 * number,
        "until_update": 10 * number + 10,
        "started": NOW - 1000 + number,
        "reason": f"reason {number}",
        "settings": settings,
        "peak": Peak(
            batch=batch,
            bytes=(2 + batch) * GIB,
            updates=10,
            outside_bytes=GIB // 4,
            settings_key=settings_key(settings, on_gpu=True),
        ),
        "samples_per_second": 30.0 + number,
        "outcome": "replaced",
    }
    return wire.Configuration(number=number, **{**known, **fields})  # type: ignore[arg-type]


CONFIGURATIONS = wire.ConfigurationRows(
    rows=(
        configuration(1, 16, outcome="gpu_oom"),
        configuration(2, 4),
        configuration(3, 8, until_update=None, outcome=None, samples_per_second=None),
    )
)
