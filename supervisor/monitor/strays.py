"""Which GPU processes are left over from memtop runs, and which of them this user may end. Decides over values only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

import msgspec

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.ending import Ended, EndReport, end_and_measure, end_processes
from memtop.supervisor.monitor.processes import ProcessFacts, ProcessId, own_family
from memtop.supervisor.monitor.values import MachineSnapshot

__all__ = [
    "GPU_SERVICES",
    "EndReport",
    "Ended",
    "KnownRun",
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


class Verdict(msgspec.Struct, frozen=True):
    """What is thought of one process on a GPU."""

    run: str | None
    stray: bool
    choosable: bool
    reason: str


def judge(process: ProcessFacts, kind: str, runs: Sequence[KnownRun], *, own_uid: int, protected: frozenset[int]) -> Verdict:
    """Judge one process that the driver reports on a GPU.

    Stray is what provably belongs to a memtop run (or attempt) that is over; without proof it is not. Choosable is what
    this user may pick to be ended; being choosable is never a suggestion. `kind` is as in GpuProcess; `protected` are
    the pids that must never be picked: memtop itself and its ancestors.
    """
    if process.identity is None or process.uid is None:
        why = next(iter(process.unknown.values()), "nothing is known of it")
        return Verdict(None, False, False, why)
    run, stray, story, live = _belongs(process, runs)
    obstacle = _obstacle(process, kind, own_uid, protected)
    if obstacle is not None:
        return Verdict(run, stray, False, f"{story}; {obstacle}" if story else obstacle)
    if live:
        return Verdict(run, False, False, f"{story}: end it with `memtop stop {run}`")
    return Verdict(run, stray, True, story or "your own process, not started by a memtop run")


def _belongs(process: ProcessFacts, runs: Sequence[KnownRun]) -> tuple[str | None, bool, str, bool]:
    """The run's name, whether the process is proven stray, the story in words, and whether it is part of a live run."""
    folder = process.run_folder
    if folder is None:
        story = "it cannot be told whether it belongs to a run" if "run" in process.unknown else ""
        return None, False, story, False
    run = next((known for known in runs if known.folder == folder), None)
    if run is None:
        name = PurePosixPath(folder).name
        return name, False, f"started for the run in {folder}, of which nothing is known here", False
    if not run.alive:
        return run.name, True, f"left over from run {run.name}, which is over", False
    if process.attempt is not None and run.attempt is not None and process.attempt < run.attempt:
        story = f"left over from attempt {process.attempt} of run {run.name}, which is now at attempt {run.attempt}"
        return run.name, True, story, False
    return run.name, False, f"part of run {run.name}, which is running", True


def _obstacle(process: ProcessFacts, kind: str, own_uid: int, protected: frozenset[int]) -> str | None:
    """Why the process must not be picked, or None."""
    if process.pid in protected:
        return "memtop itself, or a program that it runs in"
    if process.pid <= 1 or process.kernel:
        return "a part of the system"
    if process.uid != own_uid:
        return f"belongs to {process.user or f'uid {process.uid}'}: ask them, memtop does not end other users' processes"
    if kind != "compute":
        return "draws on the screen (graphics): ending it may end the desktop session"
    if process.name in GPU_SERVICES:
        return "a service of the machine"
    return None


def choose(snapshot: MachineSnapshot, pids: Iterable[int]) -> list[ProcessId]:
    """The identities of the processes that a user picked by number, as sampled. Raises RefusedError for the first that
    is not on a GPU or must not be ended, with the reason; then none is to be ended."""
    listed = {process.pid: process for gpu in snapshot.gpus for process in gpu.processes}
    # A process on several GPUs has a row on each; one that forbids it (graphics) is enough.
    forbidden = {row.pid: row.reason for gpu in snapshot.gpus for row in gpu.processes if not row.choosable}
    chosen = []
    for pid in dict.fromkeys(pids):
        row = listed.get(pid)
        if row is None:
            raise RefusedError(f"process {pid} is not on a GPU")
        if pid in forbidden or row.started_ticks is None:
            raise RefusedError(f"process {pid} is not to be ended from here: {forbidden.get(pid) or row.reason}")
        chosen.append(ProcessId(pid, row.started_ticks))
    return chosen


def stray_count(verdicts: Iterable[Verdict]) -> int:
    """How many may be offered at once as strays: proven and this user's."""
    return sum(verdict.stray and verdict.choosable for verdict in verdicts)
