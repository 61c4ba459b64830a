"""`memtop strays`: who holds GPU memory, and the end of those that the user names, each only if they are the user's own."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from memtop.supervisor import units
from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.environment import ASLEEP
from memtop.supervisor.monitor.nvml.thread import ONCE_SECONDS
from memtop.supervisor.monitor.processes.proc import ProcessId
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.snapshots import why_incomplete, why_incomplete_on
from memtop.supervisor.monitor.strays import choose, forbidden, rows_of
from memtop.supervisor.monitor.termination import end_and_measure
from memtop.supervisor.monitor.values import GpuProcess, MachineSnapshot
from memtop.supervisor.run.record.view import known_runs

_LOOK_AGAIN_SECONDS = 0.6
# Without a driver, and while the GPUs sleep, nobody computes on one: nothing is hidden then.
_NOBODY_CAN = (ASLEEP, codes.no_gpu_note(codes.LIBRARY_NOT_FOUND), codes.no_gpu_note(codes.DRIVER_NOT_LOADED))


def command(runs_dir: Path, *, as_json: bool, kill: list[int]) -> int:
    """List the GPU processes, strays first; or end the processes in `kill`. Exit status 1 if one was refused or survived,
    or if the driver told no list at all. Why some may be missing goes to stderr."""
    sampler = Sampler(lambda: known_runs(runs_dir), patience=ONCE_SECONDS)
    machine = _sample(sampler, kill)
    if kill:
        return _end([_chosen(pid, machine) for pid in kill], machine, as_json)
    # Without GPUs an empty document says it all.
    for reason in [] if as_json and _nobody_can(machine) else why_incomplete(machine):
        print(reason, file=sys.stderr)
    status = 1 if _nothing_listed(machine) else 0
    rows = sorted(_rows(machine), key=lambda row: (not row[1].stray, row[0], row[1].pid))
    if as_json:
        print(json.dumps([_document(gpu, process, machine) for gpu, process in rows], indent=2))
        return status
    for gpu, process in rows:
        print(_line(gpu, process, machine))
    _print_summary([process for _, process in rows])
    return status


def _nobody_can(machine: MachineSnapshot) -> bool:
    """Whether there is no GPU that anybody could use: no driver, none that it finds, or all asleep."""
    return not machine.gpus and (machine.gpu_note in _NOBODY_CAN or machine.driver_version is not None)


def _nothing_listed(machine: MachineSnapshot) -> bool:
    """Whether there is not one GPU whose processes are told, though somebody may use one."""
    if not machine.gpus:
        return not _nobody_can(machine)
    return all(why_incomplete_on(gpu) and not gpu.processes for gpu in machine.gpus)


def _sample(sampler: Sampler, kill: list[int]) -> MachineSnapshot:
    """One sample; two where a process was not to be seen: only the second look tells one that has just ended from memory
    that is still listed under an ended process."""
    machine = sampler.sample()
    if kill or all(process.started is not None for _, process in _rows(machine)):
        return machine
    time.sleep(_LOOK_AGAIN_SECONDS)
    sampler.nvml.refresh()
    return sampler.sample()


def _end(chosen: list[ProcessId], machine: MachineSnapshot, as_json: bool) -> int:
    report = end_and_measure(chosen, machine)
    if as_json:
        print(json.dumps(msgspec.to_builtins(report) | {"text": report.text}, indent=2))
    else:
        # What became of each on a line of its own, then the memory.
        for ended in report.processes:
            print(f"{ended.identity.pid:>8} {ended.outcome:<9} {ended.reason}")
        print(report.memory_text)
    return 0 if all(ended.is_over for ended in report.processes) else 1


def _document(gpu: int, process: GpuProcess, machine: MachineSnapshot) -> dict[str, Any]:
    age = None if process.started is None else round(machine.time - process.started, 1)
    return {"gpu": gpu, **msgspec.to_builtins(process), "age_seconds": age}


def _line(gpu: int, process: GpuProcess, machine: MachineSnapshot) -> str:
    word = "stray" if process.stray else "gone" if process.gone else "yours" if process.choosable else "-"
    age = units.duration(None if process.started is None else machine.time - process.started)
    who = f"{process.pid:>8} {process.user or '?':<12} {units.size(process.used_bytes):>9} {age:>12}"
    job = next((job for job in machine.jobs if job.key == process.job), None)
    # A job of one program says nothing that its command does not say.
    part = f"[{job.name}: {process.role}]  " if job is not None and len(job.pids) > 1 else ""
    place = f"[{process.container}]  " if process.container else ""
    return f"{word:<6} GPU {gpu} {who}  {part}{place}{process.command or process.name or '?'}  ({process.reason})"


def _print_summary(processes: list[GpuProcess]) -> None:
    """How to end the strays that are this user's, ready to be copied."""
    strays = sorted({process.pid for process in processes if process.stray and process.choosable})
    if strays:
        held = sum(process.used_bytes or 0 for process in processes if process.pid in strays)
        options = " ".join(f"--kill {pid}" for pid in strays)
        print(f"{units.size(held)} held by strays: memtop strays {options}")


def _rows(machine: MachineSnapshot) -> list[tuple[int, GpuProcess]]:
    return [(gpu.index, process) for gpu in machine.gpus for process in gpu.processes]


def _chosen(pid: int, machine: MachineSnapshot) -> ProcessId:
    """The process of that pid, if it holds a GPU and may be ended; RefusedError says why not."""
    if all(row.pid != pid for row in rows_of(machine)):
        why = "" if _nobody_can(machine) else "; ".join(why_incomplete(machine))
        raise RefusedError(f"--kill {pid}: no GPU lists this process{f' ({why})' if why else ''}; see `memtop strays`")
    reason = forbidden(rows_of(machine)).get(pid)
    if reason is not None:
        raise RefusedError(f"--kill {pid}: not yours to end: {reason}")
    # As sampled: a pid that goes to another process after this is refused when it comes to the signal.
    return choose(machine, [pid])[0]
