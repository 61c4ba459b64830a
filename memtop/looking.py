"""The commands that look: one snapshot of the machine, runs, one run; as text or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from memtop.finding import Unreadable, find_run, readable_ledger, run_folders, state_of
from memtop.gpus import watched
from memtop.proposals import proposal_lines
from memtop.supervisor import units
from memtop.supervisor.diagnosis.sentences import OUTCOMES
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.monitor.bands import mark
from memtop.supervisor.monitor.nvml.thread import ONCE_SECONDS
from memtop.supervisor.monitor.processes.table import TreeProcess, process_tree
from memtop.supervisor.monitor.sampler import Sampler, snapshot_json
from memtop.supervisor.monitor.snapshots import only_gpus, why_incomplete_on
from memtop.supervisor.monitor.values import Band, GpuSample, MachineSnapshot
from memtop.supervisor.run.clients.client import revive
from memtop.supervisor.run.record import view
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.wire import RunState


def print_once(
    runs_dir: Path, run_name: str | None, *, pid: int | None, gpus: str | None, as_json: bool, read_only: bool
) -> int:
    """One snapshot of the machine and its runs on stdout."""
    tree = None if pid is None else tree_of(pid)
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
    chosen = watched(gpus, machine)
    if chosen is not None:
        machine = only_gpus(machine, chosen)
    if as_json:
        document = {**snapshot_json(machine), "runs": [summary(state) for state in states]}
        if tree is not None:
            document["tree"] = msgspec.to_builtins(tree)
        print_json(document)
        return 0
    lines = list(_machine_lines(machine))
    if tree is not None:
        rss = units.size(sum(process.rss_bytes or 0 for process in tree))
        lines.append(f"pid {pid}: {len(tree)} processes, {rss} resident: {tree[0].command}")
    for state in states:
        if run_name or isinstance(state, Unreadable) or state.alive:
            lines.append(_run_line(state))
            lines += [] if isinstance(state, Unreadable) else [f"  warning: {warning}" for warning in state.warnings]
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


def tree_of(pid: int) -> list[TreeProcess]:
    """The process and all below it; UsageError if there is none of that number."""
    # The kernel gives out no larger pids (PID_MAX_LIMIT).
    tree = process_tree(pid) if 0 < pid <= 1 << 22 else None
    if tree is None:
        raise UsageError(f"--pid {pid}: no such process")
    return tree


def summary(state: RunState | Unreadable) -> dict[str, Any]:
    """One run in JSON, or why it cannot be told."""
    return msgspec.structs.asdict(state) if isinstance(state, Unreadable) else view.summary(state)


def print_runs(runs_dir: Path, *, as_json: bool) -> int:
    states = [state_of(folder) for folder in run_folders(runs_dir)]
    if as_json:
        print_json([summary(state) for state in states])
    elif not states:
        print(f"no runs in {runs_dir}", file=sys.stderr)
    else:
        print("\n".join(_run_line(state) for state in states))
    return 0


def document(folder: RunFolder, *, metrics: bool = False) -> dict[str, Any]:
    """What `memtop show --json` prints, as builtin types. MemtopError if the run's folder or ledger cannot be read."""
    with readable_ledger(folder):
        told = view.show(folder, metrics=metrics)
    return told | _measured(view.read_state(folder))


def print_run(folder: RunFolder, *, as_json: bool, metrics: bool) -> int:
    if as_json:
        print_json(document(folder, metrics=metrics))
        return 0
    with readable_ledger(folder):
        told = view.show(folder, metrics=metrics)
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
    for warning in state.warnings:
        print(f"  warning     {warning}")
    for line in _memory_lines(state):
        print(f"  {line}")
    if len(told["configurations"]) > 1:
        for row in told["configurations"]:
            print(f"  {_configuration_line(row)}")
    for attempt in told["attempts"]:
        status = "" if attempt["exit_status"] is None else f", exit status {attempt['exit_status']}"
        where = "" if attempt["start_updates"] is None else f" from update {attempt['start_updates']}"
        print(f"  attempt {attempt['number']}   {attempt['reason']}{where}: {attempt['outcome'] or 'running'}{status}")
        if attempt["diagnosis"]:
            print(f"              {attempt['diagnosis']['summary']}")
    if state.proposal is not None:
        print("  what can be done")
        for line in proposal_lines(state.proposal):
            print(f"    {line}")
    return 0


def _configuration_line(row: dict[str, Any]) -> str:
    """One stretch under the same settings, as `memtop rollback` counts them."""
    settings, peak = row["settings"], row["peak"]
    parts = [f"{settings['batch']} x {settings['accumulation']}, T {settings['seq_len']}" if settings else "own program"]
    if row["since_update"] is not None:
        parts.append(f"from update {row['since_update']}")
    if peak is not None:
        parts.append(f"peak {units.size(peak['bytes'])}")
    if row["samples_per_second"] is not None:
        parts.append(f"{row['samples_per_second']:.1f} samples/s")
    outcome = row["outcome"]
    parts.append("present" if outcome is None else OUTCOMES.get(outcome, outcome))
    return f"configuration {row['number']}  {', '.join(parts)} ({row['reason']})"


def _measured(state: RunState) -> dict[str, Any]:
    """What was measured of the run: what it holds now (null once it holds nothing), and the newest update of each rank."""
    now = {name: msgspec.to_builtins(getattr(state, name)) if state.alive else None for name in ("run_rss_bytes", "run_memory")}
    names = ("epoch", "best_loss", "gradient_norm", "tokens_per_second", "step_seconds", "split", "ranks", "gpu_base_bytes")
    rest = {name: msgspec.to_builtins(getattr(state, name)) for name in (*names, "started", "ended", "log_path", "warnings")}
    return now | rest


def _memory_lines(state: RunState) -> Iterator[str]:
    if state.alive and state.run_memory:
        roles = [f"{role.processes} {role.role} {units.size(role.pss_bytes)}" for role in state.run_memory]
        yield f"memory      {', '.join(roles)}"
    for rank in state.ranks:
        if rank.peak_bytes is not None:
            base = state.gpu_base_bytes.get(rank.device_uuid or "")
            beside = "" if base is None else f", beside the allocator at least {units.size(base)} on its GPU"
            yield f"GPU memory  rank {rank.rank}: {units.size(rank.peak_bytes)} at most in its newest update{beside}"


def _machine_lines(machine: MachineSnapshot) -> Iterator[str]:
    for gpu in machine.gpus:
        yield from _gpu_lines(gpu)
    if machine.gpus and machine.gpu_age_seconds is not None:
        yield f"the driver has not answered for {units.duration(machine.gpu_age_seconds)}: the GPUs' numbers are as old"
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
    if why := why_incomplete_on(gpu):
        yield f"  {why}"


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
