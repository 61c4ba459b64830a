"""`memtop watch`: which of its ways of looking was asked for, and which of them go together."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from memtop import looking, opening
from memtop.finding import find_run
from memtop.gpus import watched
from memtop.streaming import stream
from memtop.supervisor.errors import UsageError


class Asked(msgspec.Struct, frozen=True, kw_only=True):
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
    interval: float
    read_only: bool

    @property
    def streams(self) -> bool:
        return self.form == "csv" or self.follow or self.prometheus is not None

    def check(self, *, demo: bool, replay: bool) -> None:
        """UsageError for options that do not go together."""
        if not 0.2 <= self.interval <= 10:
            raise UsageError(f"--interval {self.interval}: give 0.2 to 10 seconds")
        if demo or replay:
            self._check_alone(demo=demo, replay=replay)
        if self.form == "json" and not (self.once or self.follow):
            raise UsageError("--json: goes with --once or --follow")
        if self.once and (self.form == "csv" or self.follow or self.prometheus is not None):
            raise UsageError("--once: goes with neither --csv (one sample without --follow) nor --follow nor --prometheus")
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

    def _check_alone(self, *, demo: bool, replay: bool) -> None:
        others = self.once or self.form or self.follow or self.prometheus is not None
        if replay and self.run_name is None:
            raise UsageError("--replay: name the run, or `latest`")
        if replay and (demo or others or self.pid is not None or self.gpus is not None):
            raise UsageError("--replay: goes with no other way of watching, nor with --pid or --gpus")
        if demo and (others or self.run_name is not None or self.pid is not None or self.gpus is not None):
            raise UsageError("--demo: plays a recorded run in the dashboard, without RUN, --pid or --gpus")


def command(asked: Asked) -> int:
    """One snapshot, a stream or the dashboard."""
    runs_dir, run_name, read_only = asked.runs_dir, asked.run_name, asked.read_only
    if asked.once:
        as_json = asked.form == "json"
        return looking.print_once(runs_dir, run_name, pid=asked.pid, gpus=asked.gpus, as_json=as_json, read_only=read_only)
    # Before a port is taken and a line is written: what was asked for must be there.
    folder = None if run_name is None else find_run(run_name, runs_dir)
    if not asked.streams:
        opening.need_terminal()
    look = opening.Look(asked.interval, read_only=read_only, gpus=watched(asked.gpus))
    if not asked.streams:
        return opening.open_dashboard(runs_dir, folder, look, pid=asked.pid)
    count = asked.count if asked.follow or asked.form is None else 1
    if asked.prometheus is None:
        return stream(runs_dir, folder, look, form=asked.form, count=count)
    from memtop.prometheus import Endpoint, is_loopback, parse_address

    screen = asked.form is None and sys.stdin.isatty() and sys.stdout.isatty()
    if asked.pid is not None and not screen:
        raise UsageError("--pid: goes with --once or the dashboard, which needs a terminal")
    host, port = parse_address(asked.prometheus)
    endpoint = Endpoint(host, port)
    if not is_loopback(host):
        print(
            f"memtop: --prometheus {asked.prometheus}: whoever reaches {host} can read commands' names and users",
            file=sys.stderr,
        )
    try:
        if screen:
            return opening.open_dashboard(runs_dir, folder, look, pid=asked.pid, endpoint=endpoint)
        shown = f"[{host}]" if ":" in host else host
        print(f"memtop: metrics at http://{shown}:{port}/metrics; SIGINT or SIGTERM ends it", file=sys.stderr)
        return stream(runs_dir, folder, look, form=asked.form, count=count, endpoint=endpoint)
    finally:
        endpoint.close()
