"""Which GPU processes are left over from memtop runs, and which of them this user may end. Decides over values only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

import msgspec

from memtop.supervisor.monitor.choosing import choose
from memtop.supervisor.monitor.ending import Ended, EndReport, end_and_measure, end_processes
from memtop.supervisor.monitor.processes import ProcessFacts, ProcessId, own_family, user_name

__all__ = [
    "GPU_SERVICES",
    "EndReport",
    "Ended",
    "KnownRun",
    "RecordedAttempt",
    "Verdict",
    "choose",
    "end_and_measure",
    "end_processes",
    "judge",
    "own_family",
    "stray_count",
]

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
"""Programs that serve the whole machine; ending them takes other people's work or the screen along."""
# The kernel keeps 15 letters of a name, and a command line may hide the rest.
_CUT_SERVICES = frozenset(name[:15] for name in GPU_SERVICES if len(name) > 15)
_CLOCK_SECONDS = 2.0


class RecordedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's folder has on the processes of one attempt, checked to be of this machine and this boot."""

    number: int
    over: bool
    """Another attempt has followed, or the whole run is over."""
    processes: frozenset[ProcessId] = frozenset()
    """The program and its shim."""
    leader: ProcessId | None = None
    """The program: the leader of a session of its own."""
    ended_ticks: int | None = None
    """When the leader ended, in clock ticks since boot; None where it lives or that is not recorded."""


class KnownRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's folder says, as far as strays are concerned."""

    name: str
    folder: str
    """Absolute path, as in MEMTOP_RUN."""
    alive: bool
    """True while a supervisor holds the folder's lock, or the recorded trainer (pid and start time) still lives: after
    a supervisor's death training goes on, and such a run is not over."""
    attempt: int | None = None
    """Number of the newest attempt."""
    created: float | None = None
    """Seconds since the epoch: what started before belongs to an earlier run of that name."""
    recorded: tuple[RecordedAttempt, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """What is thought of one process on a GPU."""

    run: str | None
    stray: bool
    choosable: bool
    reason: str


class _Bond(msgspec.Struct, frozen=True):
    """What ties a process to runs: the name, whether it is proven stray, whether the run needs it, in words."""

    run: str | None = None
    stray: bool = False
    live: bool = False
    story: str = ""


def judge(process: ProcessFacts, kind: str, runs: Sequence[KnownRun], *, own_uid: int, protected: frozenset[int]) -> Verdict:
    """Judge one process that the driver reports on a GPU.

    Stray is what provably belongs to a memtop run (or attempt) that is over; without proof it is not. Proof is the run's
    marker in its environment, the run's record of its pid and start time, or the session that the run had made for its
    program. Choosable is what this user may pick to be ended; being choosable is never a suggestion. `kind` is as in
    GpuProcess; `protected` are the pids that must never be picked: memtop itself and its ancestors.
    """
    if process.identity is None or process.uid is None:
        why = next(iter(process.unknown.values()), "nothing is known of it")
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
        story += "; it shares the GPU through MPS: the server's other programs may suffer from its end"
    return Verdict(bond.run, bond.stray, True, story)


def _bond(process: ProcessFacts, runs: Sequence[KnownRun]) -> _Bond:
    """What is needed by a living run is never stray, whatever else speaks for it; then the marker, then the records."""
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
        # The session's number alone is enough to let a process live; to call it stray takes more.
        of_session = attempt.leader is not None and process.session == attempt.leader.pid
        if not attempt.over and (process.identity in attempt.processes or of_session):
            return _Bond(run.name, live=True, story=f"part of run {run.name}, which is running")
    if process.run_folder != run.folder or process.run_elsewhere or _is_older(process, run):
        return None
    if process.attempt is None:
        # The marker does not say which attempt: the records may know that it is one that is over.
        newest = _left_over(process, run) is None
    else:
        newest = run.attempt is None or process.attempt >= run.attempt
    return _Bond(run.name, live=True, story=f"part of run {run.name}, which is running") if newest else None


def _marked(process: ProcessFacts, runs: Sequence[KnownRun]) -> _Bond:
    """What the marker in its environment says."""
    folder = process.run_folder
    if folder is None:
        return _Bond(story="it cannot be told whether it belongs to a run" if "run" in process.unknown else "")
    name = PurePosixPath(folder).name
    if process.run_elsewhere:
        return _Bond(name, story=f"started for the run in {folder} of its container, of which nothing is known here")
    run = next((known for known in runs if known.folder == folder), None)
    if run is None:
        return _Bond(name, story=f"started for the run in {folder}, of which nothing is known here")
    if _is_older(process, run):
        return _Bond(name, story=f"started for an earlier run in {folder}, of which nothing is known here")
    if run.alive and process.attempt is None:
        return _Bond(run.name)  # the records say what it is
    if not run.alive:
        if process.attempt is not None and run.attempt is not None and process.attempt > run.attempt:
            return _Bond(name, story=f"started for attempt {process.attempt} of run {name}, which is not recorded yet")
        return _Bond(run.name, stray=True, story=f"left over from run {run.name}, which is over")
    story = f"left over from attempt {process.attempt} of run {run.name}, which is now at attempt {run.attempt}"
    return _Bond(run.name, stray=True, story=story)


def _left_over(process: ProcessFacts, run: KnownRun) -> _Bond | None:
    """What the run's records prove of a process without a marker (programs that write their own title lose theirs)."""
    for attempt in run.recorded:
        if not attempt.over:
            continue
        story = f"left over from attempt {attempt.number} of run {run.name}, which is over"
        if process.identity in attempt.processes:
            return _Bond(run.name, stray=True, story=f"{story}: recorded by the run")
        if _is_of_session(process, attempt):
            return _Bond(run.name, stray=True, story=f"{story}: of the session that the run made")
    return None


def _is_of_session(process: ProcessFacts, attempt: RecordedAttempt) -> bool:
    """Only who was started while the leader had the number is proven to be of its session: numbers are used again. As long
    as a session has members, nobody else gets its number: a living process of that number leads another session."""
    leader, ended = attempt.leader, attempt.ended_ticks
    if process.identity is None or leader is None or ended is None or process.session != leader.pid or process.session_led:
        return False
    return process.identity.pid != leader.pid and leader.started_ticks <= process.identity.started_ticks < ended


def _is_older(process: ProcessFacts, run: KnownRun) -> bool:
    return process.started is not None and run.created is not None and process.started < run.created - _CLOCK_SECONDS


def _obstacle(process: ProcessFacts, kind: str, own_uid: int, protected: frozenset[int]) -> str | None:
    """Why the process must not be picked, or None."""
    if process.pid in protected:
        return "memtop itself, or a program that it runs in"
    if process.pid <= 1 or process.kernel:
        return "a part of the system"
    if process.uid != own_uid:
        return f"belongs to {process.user or f'uid {process.uid}'}: ask them, memtop does not end other users' processes"
    if process.effective_uid is not None and process.effective_uid != own_uid:
        return f"acts with the rights of {user_name(process.effective_uid)}: memtop ends only what is wholly your own"
    if kind not in ("compute", "mps"):
        return "draws on the screen (graphics): ending it may end the desktop session"
    if process.name is not None and (process.name in GPU_SERVICES or process.name in _CUT_SERVICES):
        return "a service of the machine"
    return None


def stray_count(verdicts: Iterable[Verdict]) -> int:
    """How many may be offered at once as strays: proven and this user's."""
    return sum(verdict.stray and verdict.choosable for verdict in verdicts)
