"""`memtop watch`: the dashboard, one snapshot as text or JSON, a stream, or a Prometheus
endpoint."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from memtop.cli import completion, dashboard
from memtop.cli.common import Unreadable, find_run, run_line, state_of, summary
from memtop.cli.configuration import default_runs_dir
from memtop.cli.gpus import watched
from memtop.cli.options import RUN_HELP, SECONDS, WHOLE, runs_dir_option
from memtop.cli.output import print_json, print_lines, print_message, row
from memtop.supervisor import units
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.language import Verbatim, current
from memtop.supervisor.monitor.values import Band, GpuSample, MachineSnapshot, mark, only_gpus, why_incomplete_on
from memtop.supervisor.observed.values import Observed
from memtop.supervisor.run import view
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ownership import require_own
from memtop.supervisor.run.runs import run_folders
from memtop.supervisor.wire import Phase, RunState

_CSV_HELP = (
    "CSV, one row per sample and GPU, with the columns of the host (and of the run) repeated; the columns stay the same "
    "when GPUs appear or vanish; unknown values are empty"
)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `memtop watch`."""

    runs_dir: Path
    run_name: str | None
    pid: int | None
    gpus: str | None
    once: bool
    form: str | None
    """json | csv"""
    follow: bool
    count: int | None
    prometheus: str | None
    serve: str | None
    allow_actions: bool
    interval: float
    read_only: bool

    @property
    def streams(self) -> bool:
        return self.form == "csv" or self.follow or self.prometheus is not None

    def check(self, *, demo: bool, replay: bool) -> None:
        """UsageError for options that do not go together."""
        if not 0.2 <= self.interval <= 10:
            raise UsageError(f"--interval {self.interval}: give 0.2 to 10 seconds")
        self._check_serving()
        if demo or replay:
            self._check_alone(demo=demo, replay=replay)
        if self.form == "json" and not (self.once or self.follow):
            raise UsageError("--json: goes with --once or --follow")
        if self.once and (self.form == "csv" or self.follow or self.prometheus is not None):
            raise UsageError(
                "--once: cannot be combined with --csv, --follow or --prometheus; --csv without --follow prints one sample"
            )
        if self.follow and self.form is None:
            raise UsageError("--follow: goes with --json or --csv")
        if self.count is not None and not self.follow:
            raise UsageError("--count: goes with --follow")
        if self.count is not None and self.count < 1:
            raise UsageError(f"--count {self.count}: give 1 or more")
        if self.pid is not None and self.form is not None and not self.once:
            raise UsageError("--pid: goes with --once or the dashboard")
        if self.pid is not None and self.run_name is not None and not self.once:
            raise UsageError("--pid and RUN: give one of them; the dashboard of a run follows its processes")
        if self.prometheus is not None and self.form == "csv" and not self.follow:
            raise UsageError("--prometheus with --csv: needs --follow too")

    def _check_serving(self) -> None:
        if self.serve is None:
            if self.allow_actions:
                raise UsageError("--allow-actions: goes with --serve")
            return
        if self.once or self.form or self.follow or self.prometheus is not None:
            raise UsageError("--serve: cannot be combined with --once, --json, --csv, --follow or --prometheus")
        if self.read_only and self.allow_actions:
            raise UsageError("--read-only and --allow-actions: give one of them")

    def _check_alone(self, *, demo: bool, replay: bool) -> None:
        others = self.once or self.form or self.follow or self.prometheus is not None
        if replay and self.run_name is None:
            raise UsageError("--replay: name the run, or `latest`")
        if replay and (demo or others or self.pid is not None or self.gpus is not None):
            raise UsageError("--replay: cannot be combined with other forms of watching, --pid or --gpus")
        if demo and (others or self.run_name is not None or self.pid is not None or self.gpus is not None):
            raise UsageError("--demo: cannot be combined with other forms of watching, RUN, --pid or --gpus")


@click.command(epilog=RUN_HELP)
@click.argument("run_name", required=False, metavar="[RUN]", shell_complete=completion.runs)
@click.option(
    "--pid",
    type=WHOLE,
    metavar="PID",
    help="show this process and its children; the training too, if it is one that memtop did not start",
)
@click.option(
    "--gpus",
    metavar="0,2|visible",
    help="show only these GPUs, or those of CUDA_VISIBLE_DEVICES",
    shell_complete=completion.gpus_to_show,
)
@click.option("--once", is_flag=True, help="print one snapshot and exit")
@click.option("--json", "as_json", is_flag=True, help="with --once or --follow: print JSON documents and nothing else")
@click.option("--csv", "as_csv", is_flag=True, help=_CSV_HELP)
@click.option("--follow", is_flag=True, help="with --json or --csv: print one document or sample per --interval")
@click.option("--count", type=WHOLE, metavar="N", help="with --follow: exit after N samples")
@click.option("--prometheus", metavar="[HOST:]PORT", help="serve metrics over HTTP at this address [host 127.0.0.1]")
@click.option(
    "--serve", metavar="[HOST:]PORT", help="show the dashboard in a browser, read-only, at this address [host 127.0.0.1]"
)
@click.option("--allow-actions", is_flag=True, help="with --serve: the browser may also act (restart, stop, kill, ...)")
@click.option("--tab", type=int, hidden=True)
@click.option(
    "--replay", is_flag=True, help="replay RUN from its ledger: space pauses, < > change the speed, arrows jump a minute"
)
@click.option("--interval", type=SECONDS, default=1.0, metavar="SECONDS", help="time between two samples, 0.2 to 10 [1]")
@click.option("--read-only", is_flag=True, help="only watch: no actions")
@click.option("--demo", is_flag=True, help="play a recorded run with two scripted GPUs")
@runs_dir_option
def watch(
    run_name: str | None,
    pid: int | None,
    gpus: str | None,
    once: bool,
    as_json: bool,
    as_csv: bool,
    follow: bool,
    count: int | None,
    prometheus: str | None,
    serve: str | None,
    allow_actions: bool,
    tab: int | None,
    replay: bool,
    interval: float,
    read_only: bool,
    demo: bool,
    runs_dir: Path | None,
) -> int:
    """Open the dashboard on a run or on the machine.

    Without RUN it shows the newest run in progress, or the machine if there is none.
    """
    options = Options(
        runs_dir=runs_dir or default_runs_dir(),
        run_name=run_name,
        pid=pid,
        gpus=gpus,
        once=once,
        form="json" if as_json else "csv" if as_csv else None,
        follow=follow,
        count=count,
        prometheus=prometheus,
        serve=serve,
        allow_actions=allow_actions,
        interval=interval,
        read_only=read_only,
    )
    if as_json and as_csv:
        raise UsageError("--json and --csv: give one of them")
    options.check(demo=demo, replay=replay)
    if serve is not None:
        return _serve(options, ["--demo"] if demo else ["--replay"] if replay else [])
    if replay:
        return dashboard.open_replay(options.runs_dir, str(run_name), interval)
    if demo:
        return dashboard.open_demo(interval)
    return print_once(options) if once else _show_or_stream(options, tab)


def _serve(options: Options, play: list[str]) -> int:
    """Serve the dashboard to browsers. `play`: --demo or --replay."""
    if importlib.util.find_spec("textual_serve") is None:
        from memtop.cli.installing import install_extra

        raise MemtopError(f"--serve: needs the package textual-serve; install it with: {install_extra('serve')}")
    from memtop.cli.http_server import parse_address
    from memtop.cli.serve.server import serve
    from memtop.supervisor.monitor.sampler import Sampler

    host, port = parse_address("--serve", str(options.serve))
    # Wrong words are said here, and not in each tab.
    folder = None if options.run_name is None else find_run(options.run_name, options.runs_dir)
    gpus = watched(options.gpus)
    if options.pid is not None:
        dashboard.tree_of(options.pid)
    if folder is not None and options.allow_actions:
        require_own(folder.path)
    runs_dir = options.runs_dir if folder is None else folder.path.parent
    arguments = ["--lang", current(), *play, "--runs-dir", str(options.runs_dir), "--interval", str(options.interval)]
    arguments += [] if options.allow_actions else ["--read-only"]
    arguments += [] if gpus is None else ["--gpus", ",".join(map(str, sorted(gpus)))]
    arguments += [] if options.pid is None else ["--pid", str(options.pid)]
    arguments += [] if options.run_name is None else ["--", options.run_name]
    return serve(
        host, port, arguments, lambda: Sampler(lambda: view.known_runs(runs_dir)), options.interval, acts=options.allow_actions
    )


def _show_or_stream(options: Options, tab: int | None) -> int:
    """The dashboard or a stream, with the Prometheus endpoint if one was requested."""
    # Look for the run before a port is opened or a line is written.
    folder = None if options.run_name is None else find_run(options.run_name, options.runs_dir)
    if not options.streams:
        dashboard.need_terminal()
    look = dashboard.WatchOptions(options.interval, read_only=options.read_only)
    if tab is None:
        look = look._replace(gpus=watched(options.gpus))
    else:
        from memtop.cli.serve.sampling import TabSampler

        # The server has checked and numbered them.
        chosen = None if options.gpus is None else frozenset(map(int, options.gpus.split(",")))
        look = look._replace(gpus=chosen, samples=TabSampler(tab))
    if not options.streams:
        return dashboard.open_dashboard(options.runs_dir, folder, look, pid=options.pid)
    from memtop.cli.streams import stream

    count = options.count if options.follow or options.form is None else 1
    if options.prometheus is None:
        return stream(options.runs_dir, folder, look, form=options.form, count=count)
    from memtop.cli.http_server import is_loopback, parse_address
    from memtop.cli.prometheus import Endpoint

    screen = options.form is None and sys.stdin.isatty() and sys.stdout.isatty()
    if options.pid is not None and not screen:
        raise UsageError("--pid: goes with --once or the dashboard, which needs a terminal")
    host, port = parse_address("--prometheus", options.prometheus)
    endpoint = Endpoint(host, port)
    if not is_loopback(host):
        warning = f"anyone who can reach {host} can read the names of commands and users"
        print_message(f"memtop: --prometheus {options.prometheus}: {warning}")
    try:
        if screen:
            return dashboard.open_dashboard(options.runs_dir, folder, look, pid=options.pid, endpoint=endpoint)
        shown = f"[{host}]" if ":" in host else host
        print_message(f"memtop: metrics at http://{shown}:{port}/metrics; stop with SIGINT or SIGTERM")
        return stream(options.runs_dir, folder, look, form=options.form, count=count, endpoint=endpoint)
    finally:
        endpoint.close()


# --- one snapshot ---------------------------------------------------------------------------------


def print_once(options: Options) -> int:
    """Print one snapshot of the machine and its runs."""
    from memtop.supervisor.monitor.nvml.thread import ONCE_SECONDS
    from memtop.supervisor.monitor.sampler import Sampler, snapshot_json
    from memtop.supervisor.observed.shown import line_of, lines_of

    pid, runs_dir = options.pid, options.runs_dir
    tree = None if pid is None else dashboard.tree_of(pid)
    states = _states(options)
    sampler = Sampler(lambda: view.known_runs(runs_dir), patience=ONCE_SECONDS)
    machine = sampler.sample()
    chosen = watched(options.gpus, machine)
    if chosen is not None:
        machine = only_gpus(machine, chosen)
    observed = _observed(options, machine)
    if options.form == "json":
        document = {**snapshot_json(machine), "runs": [summary(state) for state in states]}
        document["observed"] = msgspec.to_builtins(observed)
        if tree is not None:
            document["tree"] = msgspec.to_builtins(tree)
        print_json(document)
        return 0
    lines = list(_machine_lines(machine))
    if tree is not None:
        rss = units.size(sum(process.rss_bytes or 0 for process in tree))
        lines.append(f"pid {pid}: {units.processes(len(tree))}, {rss} resident: {tree[0].command}")
    for seen in observed:
        lines += [line_of(seen)] if tree is None else lines_of(seen)
    for state in reversed(states):
        if isinstance(state, Unreadable):
            lines.append(run_line(state))
        elif options.run_name or state.alive or state.state is Phase.QUEUED:
            lines.append(_waiting_line(state) if state.state is Phase.QUEUED else run_line(state))
            lines += [f"  warning: {warning}" for warning in state.warnings]
    print_lines(*lines)
    return 0


def _waiting_line(state: RunState) -> str:
    """A run that waits, and what for: other runs, or who uses its GPUs."""
    return row((Verbatim(state.name), 20), (state.word, 10), (state.reason or "", 0))


def _observed(options: Options, machine: MachineSnapshot) -> list[Observed]:
    """The training programs that memtop did not start; with --pid, the one of that process."""
    if options.run_name is not None:
        return []
    from memtop.supervisor.observed.observer import Observers, observer_of

    if options.pid is None:
        return Observers().look(machine.time, machine)
    observer = observer_of(options.pid)
    return [] if observer is None else [observer.look(machine.time, machine)]


def _states(options: Options) -> list[RunState | Unreadable]:
    """The named run, or all runs. Unless --read-only is given, a run whose supervisor died gets a
    new one."""
    if options.run_name:
        folder = find_run(options.run_name, options.runs_dir)
        if not options.read_only:
            from memtop.supervisor.run.starting import revive

            revive(folder.path)
        return [view.read_state(folder)]
    folders = run_folders(options.runs_dir)
    return [state_of(folder) if options.read_only else _revived(folder) for folder in folders]


def _revived(folder: RunFolder) -> RunState | Unreadable:
    state = state_of(folder)
    if isinstance(state, Unreadable):
        return state
    from memtop.supervisor.run.starting import revive

    try:
        revive(folder.path)
    except MemtopError as error:
        # Print the other runs too, and what is known about this one.
        print_message(f"memtop: run {folder.name}: {error}")
        return state
    return state_of(folder)


def _machine_lines(machine: MachineSnapshot) -> Iterator[str]:
    for gpu in machine.gpus:
        yield from _gpu_lines(gpu)
    if machine.gpus and machine.gpu_age_seconds is not None:
        yield f"the driver has not answered for {units.duration(machine.gpu_age_seconds)}: the numbers of the GPUs are that old"
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
        f"GPU {gpu.index}  {units.gib(gpu.taken_bytes)} / {units.size(gpu.total_bytes)}  {_banded(gpu.used_fraction, gpu.band)}"
        f"  util {units.percent(gpu.utilization_fraction, 0)}  {temperature} C  {gpu.name or '?'}"
    )
    for process in gpu.processes:
        stray = "stray: " if process.stray else ""
        who = f"{process.pid:>8} {process.user or '?':<10} {units.size(process.used_bytes):>9}"
        yield f"  {who}  {stray}{process.command or process.name or process.reason or '?'}"
    if why := why_incomplete_on(gpu):
        yield f"  {why}"


def _banded(fraction: float | None, band: Band) -> str:
    return f"{units.percent(fraction)}  {mark(band)} {band.value}"
