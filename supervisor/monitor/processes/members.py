"""The living processes of a run, found by the marker in their environment, and the host memory that they take."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from memtop.supervisor.monitor.processes.proc import ATTEMPT_VARIABLE, PROC, RUN_VARIABLE, ProcessId, environment, stat_fields


class RunProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One living process of a run. Bytes; `rss_bytes` counts shared pages in each process that maps them."""

    identity: ProcessId
    parent_pid: int
    name: str
    command: str
    rss_bytes: int | None
    anonymous_bytes: int | None
    """Private to the process: what its death gives back."""
    shared_bytes: int | None
    """Shared memory (data-loader batches in /dev/shm), counted in each process that maps it."""
    attempt: int | None = None


def run_marker(pid: int, proc_root: Path = PROC) -> str | None:
    """The run folder that the process was started for, or None where it carries no marker or may not be read."""
    found = environment(pid, proc_root)
    return None if found is None else found.get(RUN_VARIABLE) or None


def number(text: str | None) -> int | None:
    """A whole number from a variable of the environment; None where it is none (nobody counts further than nine digits)."""
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 10 else None


def run_processes(run_folder: str, proc_root: Path = PROC) -> list[RunProcess]:
    """All living processes, in order of pid, that were started for this run (and that we may look at)."""
    found = []
    for entry in os.scandir(proc_root):
        if not entry.name.isdecimal():
            continue
        pid = int(entry.name)
        marks = environment(pid, proc_root)
        if marks is not None and marks.get(RUN_VARIABLE) == run_folder:
            process = _run_process(pid, marks, proc_root)
            if process is not None:
                found.append(process)
    return sorted(found, key=lambda process: process.identity)


def _run_process(pid: int, marks: dict[str, str], proc_root: Path) -> RunProcess | None:
    fields = stat_fields(pid, proc_root)
    if fields is None or fields[0] in "ZXx":
        return None
    try:
        status = (proc_root / str(pid) / "status").read_text(errors="replace")
        words = (proc_root / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None  # it ended while we looked
    rows = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return RunProcess(
        identity=ProcessId(pid, int(fields[19])),
        parent_pid=int(fields[1]),
        name=rows.get("Name", ""),
        command=words.decode(errors="replace").replace("\0", " ").strip(),
        rss_bytes=_kilobytes(rows.get("VmRSS")),
        anonymous_bytes=_kilobytes(rows.get("RssAnon")),
        shared_bytes=_kilobytes(rows.get("RssShmem")),
        attempt=number(marks.get(ATTEMPT_VARIABLE)),
    )


def _kilobytes(text: str | None) -> int | None:
    return None if text is None else int(text.split()[0]) * 1024


def tree_rss_bytes(run_folder: str, proc_root: Path = PROC) -> int | None:
    """Resident bytes of a run: private pages of every process plus the largest shared part once, so that data-loader
    batches in shared memory are not counted once per worker. None where no process of it is to be seen."""
    processes = run_processes(run_folder, proc_root)
    if not processes:
        return None
    private = sum((process.rss_bytes or 0) - (process.shared_bytes or 0) for process in processes)
    return private + max(process.shared_bytes or 0 for process in processes)
