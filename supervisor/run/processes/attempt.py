"""One attempt under supervision: its processes, its reports, its end; and the ladder that stops it."""

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

# An exit file may just be being renamed; and a shim that nobody here has started may not have written itself down yet.
_GONE_SECONDS, _NEVER_SEEN_SECONDS = 1.0, 5.0
# What a program that ended by itself leaves behind gets SIGTERM, so much time, SIGKILL, and as much again.
_LEFTOVER_SECONDS = 3.0
# However long its saves and evaluations have taken: a program that hangs is ended some day.
_MOST_ASIDE_SECONDS = 1800.0


class ProcessFile(msgspec.Struct, frozen=True):
    """`process.json`, written by the shim."""

    pid: int
    started_ticks: int
    shim_pid: int
    shim_started_ticks: int


class ExitFile(msgspec.Struct, frozen=True):
    """`exit.json`, written by the shim: status is negative for a signal; ended in seconds since the epoch."""

    status: int
    ended: float


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that each rung of the stop ladder is given before the next."""

    graceful: float = 60.0
    """The program was asked to finish its update, save and exit."""
    interrupt: float = 15.0
    """SIGINT, for programs that cannot be asked: many save on it."""
    terminate: float = 40.0
    """SIGTERM; longer than torchrun's own 30 s."""
    kill: float = 5.0
    why: str = ""
    """Why the program is given longer than others, in words; empty where it is not."""

    def stretched(self, update_seconds: float, aside_seconds: float = 0.0, *, saves_on_sigterm: bool = False) -> Waits:
        """The same for a program whose updates take so long, and its saves and evaluations `aside_seconds` (half an hour at
        most counts): whoever is asked to stop may be in the middle of one, and has a save before it.

        `saves_on_sigterm`: it finishes its update and saves on that signal too, and is given the time for it.
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
    """The processes and files of one attempt, whether this supervisor started it or adopted it."""

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
        """The training program (or its launcher); None until the shim has started it."""
        if self._trainer is None and (self.folder / "process.json").exists():
            found = read_json(self.folder / "process.json", ProcessFile)
            self._trainer = ProcessId(found.pid, found.started_ticks)
            self._shim = ProcessId(found.shim_pid, found.shim_started_ticks)
        return self._trainer

    def alive(self) -> bool:
        return alive(self.trainer)

    def note_reaped(self, ended: dict[int, int]) -> None:
        """Children of ours that ended; an orphaned trainer (its shim was killed) may be among them."""
        self._reaped |= ended

    def ended(self) -> ExitFile | None:
        """How the program ended; None while it runs. The status is only unknown if its shim was killed as well."""
        if (self.folder / "exit.json").exists():
            return read_json(self.folder / "exit.json", ExitFile)
        if self.alive() or alive(self._shim):
            self._gone_since = None
            return None
        # Both are gone without an exit file: wait a moment for it, then say what we know.
        if self._gone_since is None:
            self._gone_since = time.monotonic()
        if time.monotonic() - self._gone_since < (_NEVER_SEEN_SECONDS if self._shim is None else _GONE_SECONDS):
            return None
        status = self._reaped.get(self._trainer.pid) if self._trainer is not None else None
        return ExitFile(UNKNOWN_STATUS if status is None else status, time.time())

    def journals(self, stored: Callable[[int], int]) -> list[Journal]:
        """The ranks' journals; `stored(rank)` tells how far the ledger has one that is new to this supervisor."""
        for path in find_journals(self.folder):
            if path not in self._journals:
                journal = self._journals[path] = Journal(path)
                journal.offset = journal.stored = stored(journal.rank)
        return list(self._journals.values())

    def replay(self, known: Callable[[int], int], apply: Callable[[int, Report], None]) -> None:
        """Read again what an earlier supervisor had read, up to `known(rank)`: the ledger has it already."""
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
        """The program and what it started in its own process group: what Ctrl-C in a terminal would reach."""
        if self.trainer is None:
            return []
        # The shim made the program the leader of its session and group. torchrun's ranks lead groups of their own.
        others = [p for p in self.processes() if p != self.trainer and _group_of(p.pid) == self.trainer.pid]
        return [self.trainer, *others]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


# An exit status that no process can have.
UNKNOWN_STATUS = -(1 << 16)


class StopLadder:
    """Ends an attempt: ask, SIGINT, SIGTERM, SIGKILL, each with its wait. `tick` it until the attempt ends."""

    def __init__(
        self,
        attempt: RunningAttempt,
        *,
        asked: bool,
        monotonic: Callable[[], float],
        announce: Callable[[str], None],
        waits: Waits | None = None,
    ) -> None:
        """`asked`: the program is being asked to stop, which takes it as long as its update; else a signal is first."""
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
        """Whoever was asked has said that it will not stop, or is gone: the signals begin at the next tick."""
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
            # As Ctrl-C does: a shell waits for its script's program, which alone knows how to save.
            targets = self._attempt.group()
            self._interrupted_until = self._deadline
        else:
            # Launchers pass it on to their ranks; signalling those as well would reach them twice.
            targets = [self._attempt.trainer] if self._attempt.trainer else []
        reached = [target.pid for target in targets if send(target, number)]
        following = f"; {self._rungs[0][0].name} follows in {wait:.0f} s" if self._rungs else ""
        self._announce(f"{number.name} sent to {', '.join(map(str, reached)) or 'nobody'}{following}")

    def patience(self) -> tuple[float, float]:
        """Seconds for what the program left behind: those of its group without a signal, all of them after SIGTERM."""
        return max(0.0, self._interrupted_until - self._monotonic()), self._waits.terminate


async def clear_leftovers(
    attempt: RunningAttempt, announce: Callable[[str], None], ladder: StopLadder | None, meanwhile: Callable[[], None]
) -> None:
    """End what a program left behind (ranks of a dead launcher, loader workers): they would hold its memory.

    While it was being stopped (`ladder`) they may still be saving, and are given the time that the program would have had.
    `meanwhile` is called while we wait.
    """
    untouched, terminate = ladder.patience() if ladder is not None else (0.0, _LEFTOVER_SECONDS)

    async def wait(processes: list[ProcessId], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(alive(process) for process in processes):
            await asyncio.sleep(0.05)
            attempt.note_reaped(reap_children())
            meanwhile()

    if untouched:
        # They were interrupted together with the program, whose end is not theirs.
        await wait([process for process in attempt.group() if alive(process)], untouched)
    for number, seconds in ((signal.SIGTERM, terminate), (signal.SIGKILL, _LEFTOVER_SECONDS)):
        leftovers = attempt.processes()
        if not leftovers:
            return
        announce(f"{number.name} to {len(leftovers)} processes that the program left behind")
        for process in leftovers:
            send(process, number)
        await wait(leftovers, seconds)
