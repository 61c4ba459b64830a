"""Decides which GPU processes are left over from memtop runs, and which of them this user may end.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

import msgspec

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.processes.facts import ProcessFacts
from memtop.supervisor.monitor.processes.proc import ProcessId
from memtop.supervisor.monitor.processes.signals import user_name
from memtop.supervisor.monitor.values import GpuProcess, MachineSnapshot

UNFREED_ADVICE = (
    "end the processes that share its GPU context (parent, workers); if none has the GPU open, only a reset frees it"
)
NOT_YOURS = "it is not yours"

GPU_SERVICES = frozenset(
    {
        "dcgm-exporter",
        "gnome-shell",
        "kwin_wayland",
        "nv-hostengine",
        "nvidia-cuda-mps-control",
        "nvidia-cuda-mps-server",
        "nvidia-fabricmanager",
        "nvidia-persistenced",
        "Xorg",
        "Xwayland",
    }
)
"""Programs that serve the whole machine. Ending one also ends other users' work or the desktop
session."""
# The kernel keeps 15 characters of a name, and the command line may not show the rest.
_CUT_SERVICES = frozenset(name[:15] for name in GPU_SERVICES if len(name) > 15)
_CLOCK_SECONDS = 2.0


class RecordedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that a run's folder recorded for one attempt, on this machine and since it was
    booted."""

    number: int
    over: bool
    """Another attempt has followed, or the whole run is over."""
    processes: frozenset[ProcessId] = frozenset()
    """The program and its shim."""
    leader: ProcessId | None = None
    """The program, which leads its own session."""
    ended_ticks: int | None = None
    """When the leader ended, in clock ticks since boot. None if it still runs or its end is not
    recorded."""


class KnownRun(msgspec.Struct, frozen=True, kw_only=True):
    """What the search for strays needs to know about a run, read from its folder."""

    name: str
    folder: str
    """Absolute path, as in MEMTOP_RUN."""
    id: str = ""
    """As in MEMTOP_RUN_ID."""
    alive: bool
    """True while a supervisor holds the folder's lock or the recorded trainer still runs. Training
    goes on after a supervisor has died, so such a run is not over."""
    attempt: int | None = None
    """Number of the newest attempt."""
    created: float | None = None
    """Seconds since the epoch. A process that started earlier belongs to an earlier run with this
    name."""
    recorded: tuple[RecordedAttempt, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """What memtop concludes about one process on a GPU. See `judge`."""

    run: str | None
    stray: bool
    choosable: bool
    reason: str


class _Bond(msgspec.Struct, frozen=True):
    """How a process is related to a run: whether it is proven to be a stray, whether a live run
    needs it, and the reason."""

    run: str | None = None
    stray: bool = False
    live: bool = False
    story: str = ""


def judge(process: ProcessFacts, kind: str, runs: Sequence[KnownRun], *, own_uid: int, protected: frozenset[int]) -> Verdict:
    """Judge one process that the driver reports on a GPU.

    A process is stray only if it provably belongs to a memtop run (or attempt) that is over. Proof
    is the run's marker in its environment, the run's record of its pid and start time, or the
    session that the run created for its program.

    A process is choosable if this user may select it to be ended. This is never a suggestion to end
    it.

    `kind` is as in GpuProcess. `protected` are the pids that can never be selected: memtop itself
    and its ancestors.
    """
    if process.identity is None or process.uid is None:
        why = next(iter(process.unknown.values()), "nothing is known about it")
        return Verdict(None, False, False, why)
    bond = _bond(process, runs)
    obstacle = _obstacle(process, kind, own_uid, protected)
    if obstacle is not None:
        story = f"{bond.story}; {obstacle}" if bond.story else obstacle
        return Verdict(bond.run, bond.stray, False, story)
    if bond.live:
        return Verdict(bond.run, False, False, f"{bond.story}: end it with `memtop stop {bond.run}`")
    story = bond.story or "your own process, not started by a memtop run"
    if kind == "mps":
        story += "; it shares the GPU through MPS: ending it may disturb the server's other programs"
    return Verdict(bond.run, bond.stray, True, story)


def _bond(process: ProcessFacts, runs: Sequence[KnownRun]) -> _Bond:
    """A process that a live run needs is never stray.

    Otherwise its marker decides, then the run's records.
    """
    needed = next((bond for run in runs if (bond := _needed(process, run)) is not None), None)
    if needed is not None:
        return needed
    marked = _marked(process, runs)
    if marked.stray:
        return marked
    recorded = next((bond for run in runs if (bond := _left_over(process, run)) is not None), None)
    return recorded or marked


def _needed(process: ProcessFacts, run: KnownRun) -> _Bond | None:
    if not run.alive:
        return None
    for attempt in run.recorded:
        # The session number alone proves that a process is needed. It does not prove that a process
        # is stray.
        of_session = attempt.leader is not None and process.session == attempt.leader.pid
        if not attempt.over and (process.identity in attempt.processes or of_session):
            return _Bond(run.name, live=True, story=f"part of run {run.name}, which is running")
    if process.run_folder != run.folder or process.run_elsewhere or _is_of_another(process, run):
        return None
    if process.attempt is None:
        # The marker has no attempt number: the records may prove that the attempt is over.
        newest = _left_over(process, run) is None
    else:
        newest = run.attempt is None or process.attempt >= run.attempt
    return _Bond(run.name, live=True, story=f"part of run {run.name}, which is running") if newest else None


def _marked(process: ProcessFacts, runs: Sequence[KnownRun]) -> _Bond:
    """What the marker in the environment proves."""
    folder = process.run_folder
    if folder is None:
        return _Bond(story="memtop cannot find out whether it belongs to a run" if "run" in process.unknown else "")
    name = PurePosixPath(folder).name
    if process.run_elsewhere:
        return _Bond(name, story=f"started for the run in {folder} of its container, which memtop cannot see")
    run = next((known for known in runs if known.folder == folder), None)
    if run is None:
        return _Bond(name, story=f"started for the run in {folder}, which memtop does not know")
    if _is_of_another(process, run):
        return _Bond(name, story=f"started for an earlier run in {folder}, which memtop does not know")
    if run.alive and process.attempt is None:
        return _Bond(run.name)  # the records decide
    if not run.alive:
        if process.attempt is not None and run.attempt is not None and process.attempt > run.attempt:
            return _Bond(name, story=f"started for attempt {process.attempt} of run {name}, which is not recorded yet")
        return _Bond(run.name, stray=True, story=f"left over from run {run.name}, which is over")
    story = f"left over from attempt {process.attempt} of run {run.name}, which is now at attempt {run.attempt}"
    return _Bond(run.name, stray=True, story=story)


def _left_over(process: ProcessFacts, run: KnownRun) -> _Bond | None:
    """What the run's records prove about a process without a marker.

    A program that writes a title overwrites its marker.
    """
    for attempt in run.recorded:
        if not attempt.over:
            continue
        story = f"left over from attempt {attempt.number} of run {run.name}, which is over"
        if process.identity in attempt.processes:
            return _Bond(run.name, stray=True, story=f"{story}: recorded by the run")
        if _is_of_session(process, attempt):
            return _Bond(run.name, stray=True, story=f"{story}: in the session that the run created")
    return None


def _is_of_session(process: ProcessFacts, attempt: RecordedAttempt) -> bool:
    """Whether the process provably belongs to the attempt's session: it was started while the
    leader had its pid.

    The kernel reuses pids, but not while a session with that number has members. So if a process
    with the leader's pid lives, it leads another session.
    """
    leader, ended = attempt.leader, attempt.ended_ticks
    if process.identity is None or leader is None or ended is None or process.session != leader.pid or process.session_led:
        return False
    return process.identity.pid != leader.pid and leader.started_ticks <= process.identity.started_ticks < ended


def _is_of_another(process: ProcessFacts, run: KnownRun) -> bool:
    """Whether another run had this run's folder when the process was started."""
    if process.run_id != run.id:
        return True
    return process.started is not None and run.created is not None and process.started < run.created - _CLOCK_SECONDS


def _obstacle(process: ProcessFacts, kind: str, own_uid: int, protected: frozenset[int]) -> str | None:
    """Why the user must not select the process, or None."""
    if process.pid in protected:
        return "memtop itself, or a program that it runs in"
    if process.pid <= 1 or process.kernel:
        return "a part of the system"
    if process.uid != own_uid:
        return f"belongs to {process.user or f'uid {process.uid}'}: ask them, memtop does not end other users' processes"
    if process.effective_uid is not None and process.effective_uid != own_uid:
        return f"has the rights of {user_name(process.effective_uid)}: memtop ends only processes that are entirely yours"
    if kind not in ("compute", "mps"):
        return "draws on the screen (graphics): ending it may end the desktop session"
    if process.name is not None and (process.name in GPU_SERVICES or process.name in _CUT_SERVICES):
        return "a service of the machine"
    return None


def forbidden(rows: Iterable[GpuProcess]) -> Mapping[int, str]:
    """Why a process must not be ended, by pid.

    A process has one row on each of its GPUs. One row that forbids it, for example because it is
    graphics, is enough.
    """
    found: dict[int, str] = {}
    for row in rows:
        if not row.choosable:
            found.setdefault(row.pid, row.reason or NOT_YOURS)
    return found


def agreed(by_gpu: Sequence[tuple[GpuProcess, ...]]) -> tuple[tuple[GpuProcess, ...], ...]:
    """The rows of all GPUs, where a process is choosable on all of its rows or on none."""
    reasons = forbidden(row for rows in by_gpu for row in rows)
    return tuple(tuple(overruled(row, reasons) for row in rows) for rows in by_gpu)


def overruled(row: GpuProcess, reasons: Mapping[int, str]) -> GpuProcess:
    """The row, not choosable if another row of its process forbids it, with that row's reason."""
    if not row.choosable or row.pid not in reasons:
        return row
    return msgspec.structs.replace(row, choosable=False, reason=reasons[row.pid])


def rows_of(snapshot: MachineSnapshot) -> Iterable[GpuProcess]:
    """The process rows of all GPUs."""
    return (row for gpu in snapshot.gpus for row in gpu.processes)


def choose(snapshot: MachineSnapshot, pids: Iterable[int]) -> list[ProcessId]:
    """The processes that the user selected by pid.

    Raises RefusedError for the first one that is not on a GPU or must not be ended; none may be
    ended then.
    """
    listed = {row.pid: row for row in rows_of(snapshot)}
    reasons = forbidden(rows_of(snapshot))
    chosen = []
    for pid in dict.fromkeys(pids):
        row = listed.get(pid)
        if row is None:
            raise RefusedError(f"process {pid} is not on a GPU")
        if pid in reasons or row.started_ticks is None:
            raise RefusedError(f"process {pid} cannot be ended from here: {reasons.get(pid, row.reason)}")
        chosen.append(ProcessId(pid, row.started_ticks))
    return chosen
