"""Which processes belong to an attempt, their names, and the record of its ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from memtop.supervisor.errors import RefusedError, RunFolderError
from memtop.supervisor.monitor.processes.proc import (
    RUN_ID_VARIABLE,
    RUN_VARIABLE,
    ProcessId,
    ProcessStat,
    command_words,
    environment,
    full_name,
    identify,
    is_alive,
    own_family,
    read_stat,
)
from memtop.supervisor.monitor.processes.signals import ProcessGone, SignalRefused, signal_process
from memtop.supervisor.monitor.processes.table import all_pids, children_of, run_processes
from memtop.supervisor.run.events import NamedProcess
from memtop.supervisor.run.record.folder import RunFolder, StateFile, list_runs, read_derived, write_json

SHIM = Path(__file__).with_name("shim.py")
RANKS_FILE = "ranks.json"
_RANKS_KEPT = 1024
_SUPERVISOR = "memtop.supervisor"


class RanksFile(msgspec.Struct, frozen=True):
    """`ranks.json` of an attempt: the processes that have reported as ranks.

    It proves that a leftover rank belongs to the run if its environment cannot. Programs that write
    a title overwrite their environment.
    """

    processes: tuple[ProcessId, ...] = ()


def alive(process: ProcessId | None) -> bool:
    """True while this process runs. A zombie has ended."""
    return process is not None and is_alive(process)


def living_supervisor(file: StateFile | None) -> int:
    """The supervisor in state.json if it lives; else 0."""
    if file is None or file.run.supervisor_pid is None or file.supervisor_started_ticks is None:
        return 0
    pid = file.run.supervisor_pid
    return pid if is_alive(ProcessId(pid, file.supervisor_started_ticks)) else 0


def original_of(folder: RunFolder, file: StateFile | None) -> Path | None:
    """The run that this folder is a copy of, if that one has a supervisor now. None also if it
    cannot be read."""
    if file is None or file.run.folder == str(folder.path) or not (pid := living_supervisor(file)):
        return None
    original = Path(file.run.folder)
    try:
        is_same = original.samefile(folder.path)  # by another way
        return None if is_same or living_supervisor(RunFolder(original).state()) != pid else original
    except (OSError, RunFolderError):
        return None


def refused_copy(folder: RunFolder, original: Path) -> RefusedError:
    """For what is asked of a copy of a run that goes on."""
    return RefusedError(f"run {folder.name!r}: it is a copy of {original}, which runs; use that one")


def send(process: ProcessId, number: signal.Signals) -> str | None:
    """Signal this process. None if it got the signal, otherwise the reason why not; empty if it has
    ended."""
    try:
        signal_process(process, number)
    except ProcessGone:
        return ""
    except SignalRefused as error:
        return str(error)
    return None


def named(process: ProcessId) -> NamedProcess:
    """The process with the name of its program."""
    row = read_stat(process.pid)
    if row is None or row.identity != process:
        return NamedProcess(process.pid, "?")
    return NamedProcess(process.pid, full_name(row.comm, command_words(process.pid) or ()))


def marked(run: RunFolder, attempt: int) -> list[ProcessId]:
    """The living processes of an attempt whose environment proves it."""
    return run_processes(str(run.path), attempt, run_id=run.id)


def programs_at(path: Path) -> list[ProcessId]:
    """The caller's processes that belong to a run with this path, the oldest first.

    They write there for as long as they live, also if their run was renamed or deleted.
    """
    found, ours = run_processes(os.path.realpath(path)), own_family()
    rows = [row for one in found if one.pid not in ours and (row := read_stat(one.pid)) is not None]
    own = (row.identity for row in rows if row.file_uid == os.geteuid())
    return sorted(own, key=lambda one: (one.started_ticks, one.pid))


def refuse_used_path(path: Path) -> None:
    """RefusedError if a living program writes to this path, where a new run is to be."""
    programs = programs_at(path)
    if not programs:
        return
    pid, real = programs[0].pid, os.path.realpath(path)
    run_id = (environment(pid) or {}).get(RUN_ID_VARIABLE, "")
    owner = next((run for run in list_runs(path.parent) if run.id == run_id), None)
    if owner is not None and str(owner.path) == real:
        raise RefusedError(f"run {path.name!r} is in use by its program (pid {pid}): `memtop stop {path.name}` first")
    whose = "a run that was renamed or deleted" if owner is None else f"run {owner.name!r}, which was renamed"
    back = ""
    if owner is not None and not os.path.lexists(path):
        back = f"`mv -T {shlex.quote(str(owner.path))} {shlex.quote(real)}` moves it back, or "
    raise RefusedError(
        f"{path}: pid {pid} still saves to this path; it belongs to {whose}: {back}`kill {pid}` ends it; "
        "--name chooses another name"
    )


def family(
    run: RunFolder, attempt: int, *, shim: ProcessId | None, program: ProcessId | None, known: Collection[ProcessId]
) -> list[ProcessId]:
    """All living processes of an attempt. One of these facts proves it:

    * the marker in its environment;
    * its ancestors: the shim adopts orphans, so a daemon is still the shim's descendant;
    * its session, while the program that leads the session runs;
    * it was found before (`known`).

    A run that the program has started belongs to itself.
    """
    found = set(marked(run, attempt))
    rows = {pid: row for pid in all_pids() if (row := read_stat(pid)) is not None}
    candidates = set(known)
    roots = [root for root in (shim, program) if root is not None and _is_row(rows, root)]
    # Reads two files of /proc, and most processes are asked about twice.
    is_elsewhere = functools.cache(lambda pid: _is_elsewhere(pid, run))
    candidates.update(_below(roots, rows, is_elsewhere))
    if program is not None and _is_row(rows, program):
        candidates.add(program)
        candidates.update(row.identity for row in rows.values() if row.session == program.pid)
    found.update(one for one in candidates if _is_row(rows, one) and not is_elsewhere(one.pid))
    excluded = {os.getpid()} if shim is None else {os.getpid(), shim.pid}
    return sorted(one for one in found if one.pid not in excluded and not (one.pid in rows and rows[one.pid].is_dead))


def _is_row(rows: Mapping[int, ProcessStat], process: ProcessId) -> bool:
    row = rows.get(process.pid)
    return row is not None and row.identity == process


def _below(roots: Iterable[ProcessId], rows: Mapping[int, ProcessStat], is_elsewhere: Callable[[int], bool]) -> set[ProcessId]:
    """The descendants of these processes, without those of a run that one of them has started."""
    children = children_of(rows)
    found: set[ProcessId] = set()
    todo = [root.pid for root in roots]
    while todo:
        for child in children.get(todo.pop(), ()):
            if rows[child].identity not in found and not is_elsewhere(child):
                found.add(rows[child].identity)
                todo.append(child)
    return found


def _is_elsewhere(pid: int, run: RunFolder) -> bool:
    """Whether this process is a supervisor, another attempt's shim, or part of another run."""
    words = command_words(pid) or ()
    if _SUPERVISOR in words or str(SHIM) in words:
        return True
    variables = environment(pid) or {}
    if RUN_VARIABLE not in variables:
        return False
    return variables[RUN_VARIABLE] != str(run.path) or variables.get(RUN_ID_VARIABLE, "") != run.id


def recorded_ranks(attempt_folder: Path) -> tuple[ProcessId, ...]:
    """The processes that have reported as ranks; none if the record is missing or damaged."""
    with contextlib.suppress(RunFolderError):
        found = read_derived(attempt_folder / RANKS_FILE, RanksFile)
        return found.processes if found is not None else ()
    return ()


def record_rank(attempt_folder: Path, pid: int) -> None:
    """Record a rank that has just connected.

    `pid` is the peer of its socket, in our pid namespace.
    """
    process = identify(pid) if pid > 1 else None  # 0: the process is outside our pid namespace
    known = recorded_ranks(attempt_folder)
    if process is None or process in known:
        return
    with contextlib.suppress(RunFolderError):
        # A full disk loses the proof for one process, but does not affect the run. The next
        # connection of the rank tries again.
        write_json(attempt_folder / RANKS_FILE, RanksFile((*known, process)[-_RANKS_KEPT:]))
