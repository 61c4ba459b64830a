"""Thousands of random machines against an oracle: no wrong process gets a signal, and every
provable stray is found.

The decisions are the real ones (`judge`, `choose`, `end_processes`). Only the kernel is a model:
its processes end, change their user, or are replaced under the same pid between the reading and the
signal.
"""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.processes.facts import ProcessFacts
from memtop.supervisor.monitor.processes.proc import Owners, ProcessId
from memtop.supervisor.monitor.processes.signals import Kernel
from memtop.supervisor.monitor.strays import KnownRun, RecordedAttempt, choose, judge
from memtop.supervisor.monitor.termination import end_processes
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, MachineSnapshot
from tests.forking import LONG

TABLES = 10_000 if LONG else 4_000
ME, OTHER = 1000, 1001
NAMES = ("python", "python", "python", "pt_main_thread", "Xorg", "nvidia-cuda-mps-server", "nvidia-cuda-mps")
KINDS = ("compute", "compute", "compute", "mps", "graphics", "compute+graphics")


@dataclass(eq=False)
class Truth:
    """The true state of a process. The oracle decides by this alone."""

    pid: int
    ticks: int
    real: int
    effective: int
    name: str
    run: str | None = None
    attempt: int = 0
    marker_tells_attempt: bool = True
    is_of_it: bool = True
    """It belongs to this run, not to a container's or an earlier run with the same folder name."""
    elsewhere: bool = False
    in_session: bool = False
    """It is in the session of the attempt's leader, not in a later session with the same number."""
    session_led: bool = False
    session: int = 0
    recorded: bool = False
    marker_readable: bool = True
    visible: bool = True
    """False for a pid of the host that does not exist in this container."""
    kernel: bool = False
    family: bool = False
    sent: list[signal.Signals] = field(default_factory=list)
    ends_on: signal.Signals = signal.SIGINT

    @property
    def identity(self) -> ProcessId:
        return ProcessId(self.pid, self.ticks)


@dataclass
class TruthRun:
    name: str
    folder: str
    alive: bool
    attempt: int
    created: float
    leaders: dict[int, ProcessId]
    ends: dict[int, int | None]

    def is_over(self, attempt: int | None) -> bool:
        return not self.alive or (attempt is not None and attempt < self.attempt)


class ModelKernel(Kernel):
    """Pids and descriptors of a table that changes at random moments."""

    def __init__(self, table: dict[int, Truth], own_uid: int, dice: random.Random) -> None:
        self.table = table
        self.dice = dice
        self.uid = own_uid
        self.open_: dict[int, Truth] = {}
        self.dead: set[int] = set()
        self.signalled: list[tuple[Truth, Owners]] = []
        self._next = 100

    def _happens(self) -> None:
        """Between two calls, sometimes a process ends, changes its user, or its pid is reused."""
        if self.dice.random() > 0.15 or not self.table:
            return
        pid = self.dice.choice(list(self.table))
        process = self.table[pid]
        what = self.dice.randrange(3)
        if what == 2:
            process.real, process.effective = self.dice.choice(((OTHER, OTHER), (self.uid, 0), (0, 0)))
            return
        self.dead.add(id(process))
        del self.table[pid]
        if what == 1:
            fresh = replace(process, ticks=process.ticks + self.dice.randrange(1, 500), sent=[], run=None, recorded=False)
            fresh.real = fresh.effective = self.dice.choice((self.uid, OTHER))
            self.table[pid] = fresh

    def pidfd_open(self, pid: int) -> int:
        self._happens()
        if pid not in self.table:
            raise ProcessLookupError(errno.ESRCH, "No such process")
        if self.dice.random() < 0.01:
            raise OSError(errno.EMFILE, "Too many open files")
        self._next += 1
        self.open_[self._next] = self.table[pid]
        return self._next

    def started_ticks(self, pid: int) -> int | None:
        self._happens()
        found = self.table.get(pid)
        return None if found is None else found.ticks

    def owners(self, pid: int) -> Owners | None:
        self._happens()
        found = self.table.get(pid)
        # A moment passes between the answer and its use, in which a process can end but not gain
        # what the kernel itself would let it keep: no program can detect a change of user after
        # this.
        return None if found is None else Owners(found.real, found.effective)

    def own_uid(self) -> int:
        return self.uid

    def own_family(self) -> frozenset[int]:
        return frozenset({0, 1, *(pid for pid, process in self.table.items() if process.family)})

    def send(self, descriptor: int, number: signal.Signals) -> None:
        process = self.open_[descriptor]
        if id(process) in self.dead:
            raise ProcessLookupError(errno.ESRCH, "No such process")
        process.sent.append(number)
        self.signalled.append((process, Owners(process.real, process.effective)))
        if number >= process.ends_on or number == signal.SIGKILL:
            self.dead.add(id(process))
            self.table.pop(process.pid, None)

    def wait(self, descriptors: Collection[int], seconds: float) -> set[int]:
        self._happens()
        return {descriptor for descriptor in descriptors if id(self.open_[descriptor]) in self.dead}

    def has_ended(self, descriptor: int) -> bool:
        self._happens()
        return id(self.open_[descriptor]) in self.dead

    def close(self, descriptor: int) -> None:
        del self.open_[descriptor]


def make_runs(dice: random.Random) -> list[TruthRun]:
    runs = []
    for place in range(dice.randrange(4)):
        attempts = dice.randrange(1, 4)
        base = 1000 * (place + 1)
        leaders = {number: ProcessId(200 + 10 * place + number, base + 100 * number) for number in range(1, attempts + 1)}
        alive = dice.random() < 0.5
        ends: dict[int, int | None] = {number: base + 100 * number + 80 for number in leaders}
        if alive:
            ends[attempts] = None
        if dice.random() < 0.2:
            ends[1] = None  # its shim was killed: no exit file
        runs.append(TruthRun(f"r{place}", f"/runs/r{place}", alive, attempts, base / 100, leaders, ends))
    return runs


def make_process(dice: random.Random, pid: int, runs: list[TruthRun], own_uid: int) -> Truth:
    real = dice.choice((own_uid, own_uid, own_uid, OTHER))
    process = Truth(
        pid=pid,
        ticks=dice.randrange(900, 6000),
        real=real,
        effective=real if dice.random() < 0.9 else dice.choice((0, OTHER)),
        name=dice.choice(NAMES),
        session=dice.choice((pid, 77, 300)),
        kernel=dice.random() < 0.03,
        family=dice.random() < 0.05,
        visible=dice.random() < 0.9,
        ends_on=dice.choice((signal.SIGINT, signal.SIGTERM, signal.SIGKILL)),
    )
    if not runs or dice.random() > 0.75:
        return process
    run = dice.choice(runs)
    number = dice.randrange(1, run.attempt + 1)
    leader, end = run.leaders[number], run.ends[number]
    process.marker_readable = dice.random() < 0.6
    fate = dice.random()
    if fate < 0.1 and end is not None:
        # Not of the run: another program got the leader's pid and made a new session.
        process.session, process.ticks = leader.pid, end + dice.randrange(100)
        if dice.random() < 0.5:
            # Or the run was in a container, where the pid belonged to another process at the same
            # time.
            process.ticks, process.session_led = leader.started_ticks + dice.randrange(80), True
        return process
    process.run, process.attempt = run.folder, number
    process.marker_tells_attempt = dice.random() < 0.85
    process.ticks = leader.started_ticks + dice.randrange(150)
    if fate < 0.2:
        process.is_of_it, process.elsewhere = False, True
    elif fate < 0.3:
        process.is_of_it = False
        process.ticks = dice.randrange(int(run.created * 100) - 250)
    elif dice.random() < 0.6:
        process.session, process.in_session = leader.pid, True
    return process


def look(process: Truth, runs: list[TruthRun]) -> ProcessFacts:
    """What the monitor can see of the process."""
    if not process.visible:
        return ProcessFacts(pid=process.pid, unknown={"name": "not visible from this container"})
    marked = process.run is not None and process.marker_readable
    return ProcessFacts(
        pid=process.pid,
        identity=process.identity,
        uid=process.real,
        effective_uid=process.effective,
        user=str(process.real),
        name=process.name,
        started=process.ticks / 100,
        session=process.session,
        session_led=process.session_led,
        kernel=process.kernel,
        run_folder=process.run if marked else None,
        attempt=process.attempt if marked and process.marker_tells_attempt else None,
        run_elsewhere=marked and process.elsewhere,
        unknown={} if process.marker_readable else {"run": "the environment of the process may not be read"},
    )


def as_known(run: TruthRun, table: dict[int, Truth]) -> KnownRun:
    recorded = []
    for number, leader in run.leaders.items():
        here = {
            process.identity
            for process in table.values()
            if process.recorded and process.run == run.folder and process.attempt == number
        }
        recorded.append(
            RecordedAttempt(
                number=number,
                over=run.is_over(number),
                processes=frozenset({leader, *here}),
                leader=leader,
                ended_ticks=run.ends[number],
            )
        )
    return KnownRun(
        name=run.name,
        folder=run.folder,
        alive=run.alive,
        attempt=run.attempt,
        created=run.created,
        recorded=tuple(recorded),
    )


# --- the oracle ---


def run_of(process: Truth, runs: list[TruthRun]) -> TruthRun | None:
    """The run that the process really belongs to."""
    return next((run for run in runs if run.folder == process.run and process.is_of_it), None)


def must_live(process: Truth, runs: list[TruthRun], own_uid: int, kinds: set[str]) -> bool:
    """Whether no signal may ever reach it."""
    run = run_of(process, runs)
    # A process without any sign of its run looks like any other program of the user.
    evident = process.marker_readable or process.in_session or process.recorded
    needed = run is not None and evident and not run.is_over(process.attempt)
    service = process.name in ("Xorg", "nvidia-cuda-mps-server", "nvidia-cuda-mps")
    foreign = process.real != own_uid or process.effective != own_uid
    graphics = bool(kinds & {"graphics", "compute+graphics"})
    return needed or service or foreign or graphics or process.kernel or process.family or not process.visible


def is_provable(process: Truth, runs: list[TruthRun]) -> bool:
    run = run_of(process, runs)
    if run is None or not process.visible or not run.is_over(process.attempt):
        return False
    if process.recorded:
        return True
    if process.marker_readable and (process.marker_tells_attempt or not run.alive):
        return True
    end = run.ends[process.attempt]
    return process.in_session and end is not None and process.ticks < end


# --- the test ---


def one_machine(seed: str) -> tuple[int, int]:
    """Judge, choose and signal the processes of one random machine. Returns the numbers of signals
    and strays."""
    dice = random.Random(seed)
    own_uid = dice.choice((ME, ME, 0))
    runs = make_runs(dice)
    table = {pid: make_process(dice, pid, runs, own_uid) for pid in dice.sample(range(300, 340), dice.randrange(1, 12))}
    for process in table.values():
        process.recorded = process.run is not None and process.is_of_it and dice.random() < 0.2
    known = [as_known(run, table) for run in runs]
    family = frozenset({0, 1, *(pid for pid, process in table.items() if process.family)})
    gpus, kinds = [], {pid: set[str]() for pid in table}
    for index in range(dice.randrange(1, 4)):
        rows = []
        for pid in dice.sample(list(table), dice.randrange(len(table) + 1)):
            kind = dice.choice(KINDS)
            kinds[pid].add(kind)
            facts = look(table[pid], runs)
            verdict = judge(facts, kind, known, own_uid=own_uid, protected=family)
            assert verdict.stray == is_provable(table[pid], runs), f"{seed}: stray {table[pid]}: {verdict}"
            ticks = None if facts.identity is None else facts.identity.started_ticks
            rows.append(GpuProcess(pid=pid, kind=kind, choosable=verdict.choosable, reason=verdict.reason, started_ticks=ticks))
        gpus.append(GpuSample(index=index, processes=tuple(rows)))
    snapshot = MachineSnapshot(time=0.0, gpus=tuple(gpus))
    seen = dict(table)
    chosen = []
    for pid in dice.sample(list(table), len(table)):
        try:
            chosen += choose(snapshot, [pid])
        except RefusedError:
            # A provable stray that may be ended must not be refused.
            on_gpu = bool(kinds[pid])
            wanted = is_provable(table[pid], runs) and not must_live(table[pid], runs, own_uid, kinds[pid])
            assert not (on_gpu and wanted), f"{seed}: {table[pid]} was refused"
    picked = {identity: seen[identity.pid] for identity in chosen}
    spared = {id(process) for process in seen.values() if must_live(process, runs, own_uid, kinds[process.pid])}
    kernel = ModelKernel(table, own_uid, dice)
    # A choice by pid can come from an old list.
    stale = [ProcessId(identity.pid, identity.started_ticks - 1) for identity in chosen if dice.random() < 0.1]
    # memtop's own processes are refused, too.
    stale += [process.identity for process in seen.values() if process.family]
    end_processes([*chosen, *stale], waits=(0.0, 0.0, 0.0), kernel=kernel)
    for process, owners in kernel.signalled:
        assert picked.get(process.identity) is process, f"{seed}: {process} was never chosen"
        assert id(process) not in spared, f"{seed}: {process} had to live"
        assert owners == Owners(own_uid, own_uid), f"{seed}: {process} had become {owners}"
    assert not kernel.open_, f"{seed}: descriptors were left open"
    return len(kernel.signalled), sum(is_provable(process, runs) for process in seen.values())


def test_no_wrong_signal_and_every_provable_stray_is_found() -> None:
    base = os.environ.get("MEMTOP_MODEL_SEED") or (str(random.SystemRandom().randrange(10**9)) if LONG else "1")
    print(f"MEMTOP_MODEL_SEED={base}")
    signals = strays = 0
    for number in range(TABLES):
        sent, found = one_machine(f"{base}-{number}")
        signals += sent
        strays += found
    # The random machines did have strays, and signals were sent.
    assert signals > TABLES / 2
    assert strays > TABLES / 2
