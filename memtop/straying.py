"""`memtop strays`: who holds GPU memory, and the end of those that the user names, each only if they are the user's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from memtop.supervisor import units
from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.processes import ProcessId
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.strays import choose, end_and_measure
from memtop.supervisor.monitor.values import GpuProcess, MachineSnapshot
from memtop.supervisor.run.view import known_runs


def command(runs_dir: Path, *, as_json: bool, kill: list[int]) -> int:
    """List the GPU processes, strays first; or end the processes in `kill`. Exit status 1 if one was refused or survived."""
    sampler = Sampler(lambda: known_runs(runs_dir))
    machine = sampler.sample()
    if kill:
        report = end_and_measure([_chosen(pid, machine) for pid in kill], sampler.nvml)
        if as_json:
            print(json.dumps(msgspec.to_builtins(report), indent=2))
        else:
            print(report.text)
        return 0 if all(ended.is_over for ended in report.processes) else 1
    rows = sorted(_rows(machine), key=lambda row: (not row[1].stray, row[0], row[1].pid))
    if as_json:
        print(json.dumps([{"gpu": gpu, **msgspec.to_builtins(process)} for gpu, process in rows], indent=2))
        return 0
    if machine.gpu_note:
        print(machine.gpu_note, file=sys.stderr)
    for gpu, process in rows:
        word = "stray" if process.stray else "yours" if process.choosable else "-"
        who = f"{process.pid:>8} {process.user or '?':<12} {units.size(process.used_bytes):>9}"
        print(f"{word:<6} GPU {gpu} {who}  {process.command or process.name or '?'}  ({process.reason})")
    return 0


def _rows(machine: MachineSnapshot) -> list[tuple[int, GpuProcess]]:
    return [(gpu.index, process) for gpu in machine.gpus for process in gpu.processes]


def _chosen(pid: int, machine: MachineSnapshot) -> ProcessId:
    """The process of that pid, if it holds a GPU and may be ended; RefusedError says why not."""
    found = [process for _, process in _rows(machine) if process.pid == pid]
    if not found:
        raise RefusedError(f"--kill {pid}: no GPU lists this process; see `memtop strays`")
    if not all(process.choosable for process in found):
        raise RefusedError(f"--kill {pid}: not yours to end: {found[0].reason}")
    # As sampled: a pid that goes to another process after this is refused when it comes to the signal.
    return choose(machine, [pid])[0]
