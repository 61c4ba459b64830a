"""`memtop strays`: the processes that hold GPU memory, and the end of those that the user
chooses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from memtop.cli.configuration import default_runs_dir
from memtop.cli.options import WHOLE, json_option, runs_dir_option
from memtop.cli.output import print_json, print_lines, print_message
from memtop.supervisor import units
from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.environment import ASLEEP
from memtop.supervisor.monitor.nvml.thread import ONCE_SECONDS
from memtop.supervisor.monitor.processes.proc import ProcessId
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.strays import choose, forbidden, rows_of
from memtop.supervisor.monitor.termination import end_and_measure
from memtop.supervisor.monitor.values import GpuProcess, MachineSnapshot, why_incomplete, why_incomplete_on
from memtop.supervisor.run.view import known_runs

_SECOND_SAMPLE_SECONDS = 0.6
# Without a driver, and while the GPUs sleep, no process can use them, so none is hidden.
_UNUSABLE = (ASLEEP, codes.no_gpu_note(codes.LIBRARY_NOT_FOUND), codes.no_gpu_note(codes.DRIVER_NOT_LOADED))


@click.command()
@json_option
@click.option("--kill", type=WHOLE, multiple=True, metavar="PID", help="end this process; repeatable")
@runs_dir_option
def strays(as_json: bool, kill: tuple[int, ...], runs_dir: Path | None) -> int:
    """List the processes that hold GPU memory, and end your own.

    Strays are processes that an ended run left behind.
    """
    return list_or_end(runs_dir or default_runs_dir(), as_json=as_json, kill=list(kill))


def list_or_end(runs_dir: Path, *, as_json: bool, kill: list[int]) -> int:
    """List the GPU processes, strays first; or end the processes in `kill`.

    The exit status is 1 if a process was refused or survived, or if the driver lists no processes
    at all. The reasons why some may be missing go to stderr.
    """
    sampler = Sampler(lambda: known_runs(runs_dir), patience=ONCE_SECONDS)
    machine = _sample(sampler, kill)
    if kill:
        return _end([_chosen(pid, machine) for pid in kill], machine, as_json)
    # Without usable GPUs an empty JSON list is complete.
    for reason in [] if as_json and _no_usable_gpu(machine) else why_incomplete(machine):
        print_message(reason)
    status = 1 if _nothing_listed(machine) else 0
    rows = sorted(_rows(machine), key=lambda row: (not row[1].stray, row[0], row[1].pid))
    if as_json:
        print_json([_document(gpu, process, machine) for gpu, process in rows])
        return status
    for gpu, process in rows:
        print_lines(_line(gpu, process, machine))
    _print_summary([process for _, process in rows])
    return status


def _no_usable_gpu(machine: MachineSnapshot) -> bool:
    """Whether no process can use a GPU: there is no driver, it finds no GPU, or all of them
    sleep."""
    return not machine.gpus and (machine.gpu_note in _UNUSABLE or machine.driver_version is not None)


def _nothing_listed(machine: MachineSnapshot) -> bool:
    """Whether the driver lists the processes of no GPU, although one may be in use."""
    if not machine.gpus:
        return not _no_usable_gpu(machine)
    return all(why_incomplete_on(gpu) and not gpu.processes for gpu in machine.gpus)


def _sample(sampler: Sampler, kill: list[int]) -> MachineSnapshot:
    """One sample; a second one if a listed process does not exist.

    Only the second shows whether it has just ended or the driver still lists memory under it.
    """
    machine = sampler.sample()
    if kill or all(process.started is not None for _, process in _rows(machine)):
        return machine
    time.sleep(_SECOND_SAMPLE_SECONDS)
    sampler.nvml.refresh()
    return sampler.sample()


def _end(chosen: list[ProcessId], machine: MachineSnapshot, as_json: bool) -> int:
    report = end_and_measure(chosen, machine)
    if as_json:
        print_json(msgspec.to_builtins(report) | {"text": report.text})
    else:
        # One line per process, then the memory.
        for ended in report.processes:
            print_lines(f"{ended.identity.pid:>8} {ended.outcome:<9} {ended.reason}")
        print_lines(report.memory_text)
    return 0 if all(ended.is_over for ended in report.processes) else 1


def _document(gpu: int, process: GpuProcess, machine: MachineSnapshot) -> dict[str, Any]:
    age = None if process.started is None else round(machine.time - process.started, 1)
    return {"gpu": gpu, **msgspec.to_builtins(process), "age_seconds": age}


def _line(gpu: int, process: GpuProcess, machine: MachineSnapshot) -> str:
    word = "stray" if process.stray else "gone" if process.gone else "yours" if process.choosable else "-"
    age = units.duration(None if process.started is None else machine.time - process.started)
    who = f"{process.pid:>8} {process.user or '?':<12} {units.size(process.used_bytes):>9} {age:>12}"
    job = next((job for job in machine.jobs if job.key == process.job), None)
    # For a job of one process the command says the same.
    part = f"[{job.name}: {process.role}]  " if job is not None and len(job.pids) > 1 else ""
    place = f"[{process.container}]  " if process.container else ""
    return f"{word:<6} GPU {gpu} {who}  {part}{place}{process.command or process.name or '?'}  ({process.reason})"


def _print_summary(processes: list[GpuProcess]) -> None:
    """Print the command that ends this user's strays."""
    pids = sorted({process.pid for process in processes if process.stray and process.choosable})
    if pids:
        held = sum(process.used_bytes or 0 for process in processes if process.pid in pids)
        options = " ".join(f"--kill {pid}" for pid in pids)
        print_lines(f"{units.size(held)} held by strays: memtop strays {options}")


def _rows(machine: MachineSnapshot) -> list[tuple[int, GpuProcess]]:
    return [(gpu.index, process) for gpu in machine.gpus for process in gpu.processes]


def _chosen(pid: int, machine: MachineSnapshot) -> ProcessId:
    """The process with that pid; RefusedError if no GPU lists it or this user must not end it."""
    if all(row.pid != pid for row in rows_of(machine)):
        why = "" if _no_usable_gpu(machine) else "; ".join(why_incomplete(machine))
        raise RefusedError(f"--kill {pid}: no GPU lists this process{f' ({why})' if why else ''}; see `memtop strays`")
    reason = forbidden(rows_of(machine)).get(pid)
    if reason is not None:
        raise RefusedError(f"--kill {pid}: you cannot end it: {reason}")
    # If the kernel gives the pid to another process after this sample, the signal is refused.
    return choose(machine, [pid])[0]
