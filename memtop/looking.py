"""The commands that look: snapshots, runs and presets as text or JSON, and the way into the dashboard."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memtop.finding import Unreadable, find_run, readable_ledger, run_folders, state_of
from memtop.supervisor import units
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.monitor.bands import mark
from memtop.supervisor.monitor.nvml.thread import ONCE_SECONDS
from memtop.supervisor.monitor.sampler import Sampler, snapshot_json
from memtop.supervisor.monitor.values import Band, GpuSample, MachineSnapshot
from memtop.supervisor.run import view
from memtop.supervisor.run.client import revive
from memtop.supervisor.run.folder import RunFolder
from memtop.supervisor.run.process import TreeProcess, process_tree
from memtop.supervisor.wire import RunState

if TYPE_CHECKING:
    from memtop.prometheus import Endpoint
    from memtop.tui.feed import Feed


def print_once(runs_dir: Path, run_name: str | None, *, pid: int | None, as_json: bool, read_only: bool) -> int:
    """One snapshot of the machine and its runs on stdout."""
    tree = None if pid is None else _tree(pid)
    states: list[RunState | Unreadable]
    if run_name:
        folder = find_run(run_name, runs_dir)
        if not read_only:
            # A run whose supervisor died is found and looked after again.
            revive(folder.path)
        states = [view.read_state(folder)]
    else:
        states = [state_of(folder) if read_only else _revived(folder) for folder in run_folders(runs_dir)]
    sampler = Sampler(lambda: view.known_runs(runs_dir), patience=ONCE_SECONDS)
    machine = sampler.sample()
    if as_json:
        document = {**snapshot_json(machine), "runs": [_summary(state) for state in states]}
        if tree is not None:
            document["tree"] = msgspec.to_builtins(tree)
        print_json(document)
        return 0
    lines = list(_machine_lines(machine))
    if tree is not None:
        rss = units.size(sum(process.rss_bytes or 0 for process in tree))
        lines.append(f"pid {pid}: {len(tree)} processes, {rss} resident: {tree[0].command}")
    lines += [_run_line(state) for state in states if run_name or isinstance(state, Unreadable) or state.alive]
    print("\n".join(lines))
    return 0


def _revived(folder: RunFolder) -> RunState | Unreadable:
    state = state_of(folder)
    if isinstance(state, Unreadable):
        return state
    try:
        revive(folder.path)
    except MemtopError as error:
        # That nobody could be found to look after this run must not hide the others, nor what is known of it.
        print(f"memtop: run {folder.name}: {error}", file=sys.stderr)
        return state
    return state_of(folder)


def _tree(pid: int) -> list[TreeProcess]:
    # Beyond the kernel's PID_MAX_LIMIT there are none; psutil is not to be asked for those.
    tree = process_tree(pid) if 0 < pid <= 1 << 22 else None
    if tree is None:
        raise UsageError(f"--pid {pid}: no such process")
    return tree


def _summary(state: RunState | Unreadable) -> dict[str, Any]:
    return msgspec.structs.asdict(state) if isinstance(state, Unreadable) else view.summary(state)


def print_runs(runs_dir: Path, *, as_json: bool) -> int:
    states = [state_of(folder) for folder in run_folders(runs_dir)]
    if as_json:
        print_json([_summary(state) for state in states])
    elif not states:
        print(f"no runs in {runs_dir}", file=sys.stderr)
    else:
        print("\n".join(_run_line(state) for state in states))
    return 0


def print_run(folder: RunFolder, *, as_json: bool, metrics: bool) -> int:
    with readable_ledger(folder):
        document = view.show(folder, metrics=metrics)
    if as_json:
        print_json(document)
        return 0
    state = view.read_state(folder)
    print(_run_line(state))
    if state.reason:
        print(f"  reason      {state.reason}")
    print(f"  folder      {state.folder}")
    if state.settings is not None:
        s = state.settings
        split = f"{s.batch} x {s.accumulation} x {s.world_size} = {s.effective_batch}"
        print(f"  settings    {s.recipe}, preset {s.preset}, {split}, T {s.seq_len}, lr {s.learning_rate:g}")
    else:
        print(f"  program     {' '.join(state.command)}")
    saved = state.checkpoint
    if saved is None:
        print("  checkpoint  none yet")
    elif saved.complete:
        print(f"  checkpoint  update {saved.updates}, {units.size(saved.size_bytes)}, {saved.path}")
    else:
        print(f"  checkpoint  incomplete: {saved.problem}")
    for attempt in document["attempts"]:
        status = "" if attempt["exit_status"] is None else f", exit status {attempt['exit_status']}"
        where = "" if attempt["start_updates"] is None else f" from update {attempt['start_updates']}"
        print(f"  attempt {attempt['number']}   {attempt['reason']}{where}: {attempt['outcome'] or 'running'}{status}")
        if attempt["diagnosis"]:
            print(f"              {attempt['diagnosis']['summary']}")
    return 0


def check_watch_options(
    *,
    once: bool,
    as_json: bool,
    as_csv: bool,
    follow: bool,
    count: int | None,
    pid: int | None,
    prometheus: str | None,
    demo: bool,
) -> None:
    """UsageError for options of `watch` that do not go together."""
    if as_json and not (once or follow):
        raise UsageError("--json: goes with --once or --follow")
    if as_json and as_csv:
        raise UsageError("--json and --csv: give one of them")
    if once and (as_csv or follow or prometheus is not None):
        raise UsageError("--once: goes with neither --csv (one sample without --follow) nor --follow nor --prometheus")
    if follow and not (as_json or as_csv):
        raise UsageError("--follow: goes with --json or --csv")
    if count is not None and not follow:
        raise UsageError("--count: goes with --follow")
    if count is not None and count < 1:
        raise UsageError(f"--count {count}: give 1 or more")
    if pid is not None and (as_csv or follow):
        raise UsageError("--pid: goes with --once or the dashboard")
    if demo and (once or as_csv or follow or prometheus is not None):
        raise UsageError("--demo: invented numbers are for the dashboard alone")
    if prometheus is not None and as_csv and not follow:
        raise UsageError("--prometheus with --csv: needs --follow too")


def serve_or_stream(
    runs_dir: Path,
    run_name: str | None,
    *,
    form: str | None,
    interval: float,
    count: int | None,
    read_only: bool,
    prometheus: str | None,
    pid: int | None,
) -> int:
    """Documents or rows on stdout, a Prometheus endpoint, or both; the endpoint alone comes with the dashboard where there is
    a terminal to show it on."""
    from memtop.streaming import stream

    if prometheus is None:
        return stream(runs_dir, run_name, form=form, interval=interval, count=count, read_only=read_only)
    from memtop.prometheus import Endpoint, is_loopback, parse_address

    host, port = parse_address(prometheus)
    endpoint = Endpoint(host, port)
    if not is_loopback(host):
        print(f"memtop: --prometheus {prometheus}: whoever reaches {host} can read commands' names and users", file=sys.stderr)
    if form is None and sys.stdin.isatty() and sys.stdout.isatty():
        try:
            return open_dashboard(runs_dir, run_name, pid=pid, interval=interval, read_only=read_only, endpoint=endpoint)
        finally:
            endpoint.close()
    if pid is not None:
        endpoint.close()
        raise UsageError("--pid: goes with --once or the dashboard, which needs a terminal")
    shown = f"[{host}]" if ":" in host else host
    print(f"memtop: metrics at http://{shown}:{port}/metrics; SIGINT or SIGTERM ends it", file=sys.stderr)
    count = None if form is None else count
    return stream(runs_dir, run_name, form=form, interval=interval, count=count, read_only=read_only, endpoint=endpoint)


def open_dashboard(
    runs_dir: Path,
    run_name: str | None,
    *,
    pid: int | None,
    interval: float,
    read_only: bool,
    endpoint: Endpoint | None = None,
) -> int:
    """The dashboard on a run; without one named on the newest living run, else on the machine."""
    from memtop.tui.feed import LocalFeed

    if run_name is not None:
        return open_run(find_run(run_name, runs_dir), interval=interval, read_only=read_only, endpoint=endpoint)
    if pid is not None:
        _tree(pid)
    elif living := _living(runs_dir):
        return open_run(living[-1], interval=interval, read_only=read_only, endpoint=endpoint)
    feed = LocalFeed(lambda: Sampler(lambda: view.known_runs(runs_dir)), interval, read_only=read_only, pid=pid)
    return _dashboard(feed, interval, endpoint=endpoint)


def check_replay(run_name: str | None, *, once: bool, live: bool) -> None:
    """UsageError for options that do not go with --replay."""
    if run_name is None:
        raise UsageError("--replay: name the run, or `latest`")
    if once or live:
        raise UsageError("--replay: goes with no other way of watching")


def open_replay(runs_dir: Path, run_name: str, interval: float) -> int:
    """The dashboard on what a run's ledger remembers."""
    from memtop.tui.replay import ReplayFeed

    return _dashboard(ReplayFeed(find_run(run_name, runs_dir).path), interval, silent=True)


def _living(runs_dir: Path) -> list[RunFolder]:
    looks = [(folder, state_of(folder)) for folder in run_folders(runs_dir)]
    return [folder for folder, state in looks if isinstance(state, RunState) and state.alive]


def open_run(
    folder: RunFolder,
    *,
    interval: float = 1.0,
    read_only: bool = False,
    started_here: bool = False,
    endpoint: Endpoint | None = None,
) -> int:
    """The dashboard on a run. Who started it gets its failure as exit status; who only looked at it does not."""
    from memtop.tui.feed import RunFeed

    def sampler() -> Sampler:
        return Sampler(lambda: view.known_runs(folder.path.parent))

    feed = RunFeed(folder.path, read_only=read_only, interval=interval, sampler_factory=sampler)
    return _dashboard(feed, interval, started_here=started_here, endpoint=endpoint)


def open_demo(interval: float) -> int:
    from memtop.tui.demo import DemoFeed

    return _dashboard(DemoFeed(interval=interval), interval)


def _dashboard(
    feed: Feed, interval: float, *, started_here: bool = False, endpoint: Endpoint | None = None, silent: bool = False
) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("watch: the dashboard needs a terminal; `memtop watch --once` prints one snapshot without")
    if os.environ.get("TERM") == "dumb":
        raise UsageError("TERM=dumb: the dashboard needs a terminal that can move its cursor; try --once or --headless")
    from memtop.tui import run_dashboard

    if endpoint is not None:
        from memtop.prometheus import Tap

        feed = Tap(feed, endpoint)
    result = run_dashboard(feed, interval=interval)
    if result.message and not silent:
        print(f"memtop: {result.message}", file=sys.stderr)
    return 0 if result.action == "ended" and not started_here else result.exit_status


def _machine_lines(machine: MachineSnapshot) -> Iterator[str]:
    for gpu in machine.gpus:
        yield from _gpu_lines(gpu)
    if machine.gpu_note:
        yield machine.gpu_note
    host = machine.host
    limit = "" if host.limit_bytes is None else f"  limit {units.size(host.limit_bytes)}"
    whole = host.limit_bytes or host.total_bytes
    yield f"RAM    {units.gib(host.used_bytes)} / {units.size(whole)}  {_banded(host.used_fraction, host.band)}{limit}"
    if host.swap_total_bytes:
        used = f"{units.gib(host.swap_used_bytes)} / {units.size(host.swap_total_bytes)}"
        yield f"swap   {used}  {_banded(host.swap_fraction, host.swap_band)}"
    else:
        yield f"swap   {host.unknown.get('swap_fraction', 'none')}"


def _gpu_lines(gpu: GpuSample) -> Iterator[str]:
    if gpu.error:
        yield f"GPU {gpu.index}  {gpu.name or '?'}  {gpu.error}"
        return
    temperature = units.UNKNOWN if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:.0f}"
    yield (
        f"GPU {gpu.index}  {units.gib(gpu.used_bytes)} / {units.size(gpu.total_bytes)}  {_banded(gpu.used_fraction, gpu.band)}"
        f"  util {units.percent(gpu.utilization_fraction, 0)}  {temperature} C  {gpu.name or '?'}"
    )
    for process in gpu.processes:
        stray = "stray: " if process.stray else ""
        who = f"{process.pid:>8} {process.user or '?':<10} {units.size(process.used_bytes):>9}"
        yield f"  {who}  {stray}{process.command or process.name or process.reason or '?'}"


def _banded(fraction: float | None, band: Band) -> str:
    return f"{units.percent(fraction)}  {mark(band)} {band.value}"


def _run_line(state: RunState | Unreadable) -> str:
    if isinstance(state, Unreadable):
        return f"{state.name:<20} unreadable: {state.error}"
    total = "" if state.total_updates is None else f"/{state.total_updates}"
    loss = "" if state.loss is None else f"  loss {state.loss:.4f}"
    where = "no updates yet" if state.updates is None else f"update {state.updates}{total}{loss}"
    adopted = "  (adopted)" if state.adopted else ""
    return f"{state.name:<20} {state.state.value:<10} attempt {state.attempt}  {where}{adopted}"


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))
