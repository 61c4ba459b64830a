"""One attempt: its processes, its journals, its exit status, and the signals that stop it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from memtop.supervisor.monitor.processes.proc import ProcessId, identify
from memtop.supervisor.run.processes.process import alive, members, reap_children, send
from memtop.supervisor.run.record.folder import RunFolder, read_json
from memtop.supervisor.run.record.journal import Journal, find_journals
from memtop.supervisor.run.reports import Report

# The exit file may just be renamed, and the shim of an adopted attempt may not have written its
# process file yet.
_GONE_SECONDS, _NEVER_SEEN_SECONDS = 1.0, 5.0
# Processes that an ended program leaves behind get SIGTERM, this much time, SIGKILL, and as much
# time again.
_LEFTOVER_SECONDS = 3.0
# Longer saves and evaluations do not count, so that a program that hangs is ended at last.
_MOST_ASIDE_SECONDS = 1800.0


class ProcessFile(msgspec.Struct, frozen=True):
    """`process.json`, written by the shim."""

    pid: int
    started_ticks: int
    shim_pid: int
    shim_started_ticks: int


class ExitFile(msgspec.Struct, frozen=True):
    """`exit.json`, written by the shim.

    `status` is negative for a signal. `ended` is in seconds since the epoch.
    """

    status: int
    ended: float


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait after each step of stopping, in seconds."""

    graceful: float = 60.0
    """After the request to finish the update, save and exit."""
    interrupt: float = 15.0
    """After SIGINT, for programs that accept no requests. Many save on it."""
    terminate: float = 40.0
    """After SIGTERM. Longer than torchrun's own 30 s."""
    kill: float = 5.0
    why: str = ""
    """Why the program gets more time than usual. Empty if it does not."""

    def stretched(self, update_seconds: float, aside_seconds: float = 0.0, *, saves_on_sigterm: bool = False) -> Waits:
        """The waits for a program with updates, saves or evaluations of this length.

        The program may have just begun one when it is stopped, and it saves afterwards. Of
        `aside_seconds`, at most half an hour counts. `saves_on_sigterm`: the program also finishes
        its update and saves on SIGTERM, and gets time for it.
        """
        aside = min(aside_seconds, _MOST_ASIDE_SECONDS)
        slowest = max(update_seconds, aside)
        needed = self.graceful / 2 + 2 * slowest
        if needed <= self.graceful and not saves_on_sigterm:
            return self
        what = "a save or an evaluation" if aside > update_seconds else "an update"
        return msgspec.structs.replace(
            self,
            graceful=max(self.graceful, needed),
            terminate=max(self.terminate, needed) if saves_on_sigterm and slowest else self.terminate,
            why=f"{what} has taken it {slowest:.0f} s" if needed > self.graceful else "",
        )


class RunningAttempt:
    """The processes and files of one attempt that this supervisor has started or adopted."""

    def __init__(self, folder: RunFolder, number: int, shim_pid: int | None) -> None:
        self.number = number
        self.folder = folder.attempt(number)
        self.log_path = self.folder / "output.log"
        self._run_folder = folder.path
        self._shim = None if shim_pid is None else identify(shim_pid)
        self._trainer: ProcessId | None = None
        self._journals: dict[Path, Journal] = {}
        self._reaped: dict[int, int] = {}
        self._gone_since: float | None = None

    @property
    def trainer(self) -> ProcessId | None:
        """The training program or its launcher. None until the shim has started it."""
        if self._trainer is None and (self.folder / "process.json").exists():
            found = read_json(self.folder / "process.json", ProcessFile)
            self._trainer = ProcessId(found.pid, found.started_ticks)
            self._shim = ProcessId(found.shim_pid, found.shim_started_ticks)
        return self._trainer

    def alive(self) -> bool:
        return alive(self.trainer)

    def note_reaped(self, ended: dict[int, int]) -> None:
        """Note children that have ended. One may be a trainer whose shim was killed."""
        self._reaped |= ended

    def ended(self) -> ExitFile | None:
        """How the program ended.

        None while it runs. The status is unknown only if the shim was killed, too.
        """
        if (self.folder / "exit.json").exists():
            return read_json(self.folder / "exit.json", ExitFile)
        if self.alive() or alive(self._shim):
            self._gone_since = None
            return None
        # Both are gone without an exit file: wait a moment for it, then return what is known.
        if self._gone_since is None:
            self._gone_since = time.monotonic()
        if time.monotonic() - self._gone_since < (_NEVER_SEEN_SECONDS if self._shim is None else _GONE_SECONDS):
            return None
        status = self._reaped.get(self._trainer.pid) if self._trainer is not None else None
        return ExitFile(UNKNOWN_STATUS if status is None else status, time.time())

    def journals(self, stored: Callable[[int], int]) -> list[Journal]:
        """The ranks' journals.

        `stored(rank)` is the offset up to which the ledger has a journal that is new to us.
        """
        for path in find_journals(self.folder):
            if path not in self._journals:
                journal = self._journals[path] = Journal(path)
                journal.offset = journal.stored = stored(journal.rank)
        return list(self._journals.values())

    def replay(self, known: Callable[[int], int], apply: Callable[[int, Report], None]) -> None:
        """Read again what an earlier supervisor has read, up to the offset `known(rank)`."""
        for journal in self.journals(known):
            at, until = 0, journal.stored
            while at < until:
                reports, end = journal.read(at, until)
                if end == at:
                    break
                for report in reports:
                    apply(journal.rank, report)
                at = end

    def processes(self) -> list[ProcessId]:
        """All living processes of this attempt: launcher, ranks, loader workers."""
        return members(self._run_folder, self.number)

    def group(self) -> list[ProcessId]:
        """The program and the processes in its process group: those that Ctrl-C in a terminal would
        signal."""
        if self.trainer is None:
            return []
        # The shim made the program the leader of its session and group. Each of torchrun's ranks
        # leads its own group.
        others = [p for p in self.processes() if p != self.trainer and _group_of(p.pid) == self.trainer.pid]
        return [self.trainer, *others]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


# No process can have this exit status.
UNKNOWN_STATUS = -(1 << 16)


class StopLadder:
    """Ends an attempt: request, SIGINT, SIGTERM, SIGKILL, each followed by a wait.

    Call `tick` until the attempt ends.
    """

    def __init__(
        self,
        attempt: RunningAttempt,
        *,
        asked: bool,
        monotonic: Callable[[], float],
        announce: Callable[[str], None],
        waits: Waits | None = None,
    ) -> None:
        """`asked`: the program has been requested to stop, which takes as long as its update.

        Otherwise the first step is a signal.
        """
        self._attempt = attempt
        self._monotonic = monotonic
        self._announce = announce
        waits = waits or Waits()
        self._rungs: list[tuple[signal.Signals, float]] = [
            *([] if asked else [(signal.SIGINT, waits.interrupt)]),
            (signal.SIGTERM, waits.terminate),
            (signal.SIGKILL, waits.kill),
        ]
        self._waits = waits
        self._asking = asked
        self._interrupted_until = 0.0
        self._deadline = monotonic() + (waits.graceful if asked else 0.0)
        if asked:
            why = f" ({waits.why})" if waits.why else ""
            announce(f"asked to finish the update, save and exit; SIGTERM follows in {waits.graceful:.0f} s{why}")

    def declined(self) -> None:
        """The program refused the request, or its agent is gone: signals begin at the next tick."""
        if self._asking:
            self._asking = False
            self._rungs.insert(0, (signal.SIGINT, self._waits.interrupt))
            self._deadline = self._monotonic()

    def tick(self) -> None:
        if self._monotonic() < self._deadline or not self._rungs:
            return
        self._asking = False
        number, wait = self._rungs.pop(0)
        self._deadline = self._monotonic() + wait
        if number is signal.SIGKILL:
            targets = self._attempt.processes()
        elif number is signal.SIGINT:
            # As Ctrl-C does. A shell waits for its script's program, and only that program can
            # save.
            targets = self._attempt.group()
            self._interrupted_until = self._deadline
        else:
            # Launchers pass the signal on to their ranks, which must not get it twice.
            targets = [self._attempt.trainer] if self._attempt.trainer else []
        reached = [target.pid for target in targets if send(target, number)]
        following = f"; {self._rungs[0][0].name} follows in {wait:.0f} s" if self._rungs else ""
        self._announce(f"{number.name} sent to {', '.join(map(str, reached)) or 'nobody'}{following}")

    def patience(self) -> tuple[float, float]:
        """Seconds for the processes that the program left behind: those of its group without a
        signal, then all of them after SIGTERM."""
        return max(0.0, self._interrupted_until - self._monotonic()), self._waits.terminate


async def clear_leftovers(
    attempt: RunningAttempt, announce: Callable[[str], None], ladder: StopLadder | None, meanwhile: Callable[[], None]
) -> None:
    """End the processes that a program left behind (ranks of a dead launcher, loader workers),
    because they hold memory.

    If the program was being stopped (`ladder`), they may still be saving and get the time that it
    would have had. `meanwhile` is called during the wait.
    """
    untouched, terminate = ladder.patience() if ladder is not None else (0.0, _LEFTOVER_SECONDS)

    async def wait(processes: list[ProcessId], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(alive(process) for process in processes):
            await asyncio.sleep(0.05)
            attempt.note_reaped(reap_children())
            meanwhile()

    if untouched:
        # They got SIGINT together with the program and may still be running.
        await wait([process for process in attempt.group() if alive(process)], untouched)
    for number, seconds in ((signal.SIGTERM, terminate), (signal.SIGKILL, _LEFTOVER_SECONDS)):
        leftovers = attempt.processes()
        if not leftovers:
            return
        announce(f"{number.name} to {len(leftovers)} processes that the program left behind")
        for process in leftovers:
            send(process, number)
        await wait(leftovers, seconds)
