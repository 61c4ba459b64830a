"""Staying with a run that was just started: in the dashboard, or without it with progress on
stderr."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import Counter

from memtop.cli.common import proposal_lines
from memtop.cli.output import discard, print_lines, print_message
from memtop.supervisor import units
from memtop.supervisor.errors import NotRunningError, RefusedError, RunFolderError
from memtop.supervisor.language import Verbatim, tr
from memtop.supervisor.monitor.values import Band, MachineSnapshot
from memtop.supervisor.run import client, starting
from memtop.supervisor.run.record.folder import RunFolder, RunLock
from memtop.supervisor.run.view import read_state
from memtop.supervisor.wire import Answer, EventRows, Message, Outcome, Phase, RunState, StateUpdate, Stop, Subscribe

_PROGRESS_SECONDS = 5.0
RETRY_SECONDS = 0.3
"""How long to wait before connecting again after the supervisor has gone."""
# Another command can start the new supervisor first. This many failures in a row are an error.
_REVIVALS = 5
MOST_OF_A_KIND = 10
"""Events of one kind that are printed in five seconds. A program can report thousands a second."""
# Events that are printed as they happen; all are in the ledger.
_PRINTED = {
    *("attempt", "plan", "adopted", "warning", "band", "stop", "leftovers", "stalled"),
    *("oom", "survived", "settings", "foreseen", "remedy", "rollback", "workers", "spike", "spike_accepted", "queued", "then"),
}


def stay(folder: RunFolder, begun: float, *, headless: bool, detach: bool, told: int | None = None) -> int:
    """Stay with a run that was started at `begun` (Unix time), in the dashboard or without it; the
    exit status.

    With `detach`, only print the run's name. Without a terminal there is no dashboard. `told`: the
    configuration whose foreseen peak was printed already.
    """
    if detach:
        print_lines(folder.name, own=False)
        return 0
    if headless or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return follow(folder, since=begun, told=told)
    from memtop.cli.dashboard import open_run

    return open_run(folder, started_here=True)


def follow(folder: RunFolder, *, since: float, told: int | None = None) -> int:
    """Print the run's progress until it is over; the exit status is 0 if it finished or was
    stopped, 1 if it failed, 2 if the trainer refused its input, 130 if it was interrupted here.

    Events before `since` (Unix time) are not printed, nor is the foreseen peak of the configuration
    `told`.
    """
    return asyncio.run(_Follower(folder, since, told).run())


class _Follower:
    def __init__(self, folder: RunFolder, since: float, told: int | None) -> None:
        self._folder = folder
        self._told = told
        self._interrupts = 0
        self._stop_printed = False
        self._stop_sent = False
        self._silence_printed = False
        self._last_line = 0.0
        self._last_update: int | None = None
        self._last_event = since
        self._at_last_event: set[tuple[str, str]] = set()
        self._printed: Counter[str] = Counter()
        """How many events of each kind came since the last count."""
        self._counted = 0.0
        self._revival_failures = 0
        self._state: RunState | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        self._print(f"run {self._folder.name} in {self._folder.path}; from another terminal: memtop watch {self._folder.name}")
        while self._interrupts < 2:
            try:
                connection = await client.AsyncRunClient.connect(self._folder.path)
            except NotRunningError:
                if await self._over():
                    break
                continue
            if await self._listen(connection):
                break
        return self._exit_status()

    async def _over(self) -> bool:
        """Whether the run is over, after its supervisor did not answer.

        If the run is not over, its supervisor died: this process starts a new one, unless another
        process did so already.
        """
        if await asyncio.to_thread(self._revived):
            self._print("the supervisor was gone; a new one has taken over")
            return False
        self._state = read_state(self._folder)
        # A supervisor that starts or exits holds the lock: the state in the folder is not final
        # yet.
        if (self._state.state.final or self._state.state is Phase.CREATED) and not RunLock(self._folder).is_held():
            return True
        await asyncio.sleep(RETRY_SECONDS)
        return False

    def _revived(self) -> bool:
        try:
            revived = starting.revive(self._folder.path)
        except RunFolderError:
            self._revival_failures += 1
            if self._revival_failures >= _REVIVALS:
                raise
            return False
        self._revival_failures = 0
        return revived

    async def _listen(self, connection: client.AsyncRunClient) -> bool:
        """Print what the supervisor reports; True once the run is over or the user interrupts
        twice, False if the supervisor is gone."""
        try:
            await connection.send(Subscribe(id=1, history=0))
            return await self._report(connection)
        except ConnectionError:
            return False
        finally:
            await connection.close()

    async def _report(self, connection: client.AsyncRunClient) -> bool:
        stop_asked = False
        pending = asyncio.ensure_future(connection.receive())
        try:
            while self._interrupts < 2 or not stop_asked:
                done, _ = await asyncio.wait({pending}, timeout=0.2)
                if self._interrupts and not stop_asked:
                    # Send it to each new supervisor: the one before may have died before it stopped
                    # the run.
                    stop_asked = True
                    if not self._stop_printed:
                        self._print(f"stopping{self._what_it_saves()}; Ctrl+C again does not wait for that")
                    self._stop_printed = True
                    await connection.send(Stop(id=2))
                    self._stop_sent = True
                if not done:
                    continue
                finished, pending = pending, asyncio.ensure_future(connection.receive())
                if not self._can_answer(finished):
                    continue
                message = finished.result()
                if message is None:
                    return False
                if isinstance(message, Answer) and message.id == 2 and message.outcome is Outcome.FAILED:
                    # It could not save, and goes on: another Ctrl+C ends it without that.
                    stop_asked = self._stop_printed = self._stop_sent = False
                    self._interrupts = 0
                if isinstance(message, EventRows):
                    self._report_events(message)
                if isinstance(message, StateUpdate):
                    self._state = message.run
                    if message.run.state.final:
                        self._progress(message.run, message.machine, at_once=True)
                        return True
                    self._progress(message.run, message.machine)
            return True
        finally:
            pending.cancel()

    def _can_answer(self, received: asyncio.Future[Message | None]) -> bool:
        """False if the supervisor is stopped or hangs, which is printed once until it sends
        something."""
        why = received.exception()
        if not isinstance(why, RefusedError):
            self._silence_printed = False
            return True
        if not self._silence_printed:
            self._print(str(why))
        self._silence_printed = True
        return False

    def _interrupt(self) -> None:
        self._interrupts += 1

    def _report_events(self, message: EventRows) -> None:
        # A new supervisor sends the history again. Several events can have the same time.
        for event in message.rows:
            row = (event.kind, event.message)
            if event.time < self._last_event or (event.time == self._last_event and row in self._at_last_event):
                continue
            if event.time > self._last_event:
                self._last_event, self._at_last_event = event.time, set()
            self._at_last_event.add(row)
            if event.kind in _PRINTED and (event.kind != "foreseen" or event.data.get("configuration") != self._told):
                self._count_events()
                self._printed[event.kind] += 1
                if self._printed[event.kind] <= MOST_OF_A_KIND:
                    self._print(event.message)

    def _count_events(self, *, at_once: bool = False) -> None:
        """Every five seconds: say how many events were not printed, and begin to count again."""
        now = time.monotonic()
        if not at_once and now - self._counted < _PROGRESS_SECONDS:
            return
        self._counted = now
        for kind, count in self._printed.items():
            if count > MOST_OF_A_KIND:
                self._print(
                    f"{count - MOST_OF_A_KIND} more events like these ({kind}): memtop watch {self._folder.name} lists them"
                )
        self._printed.clear()

    def _progress(self, run: RunState, machine: MachineSnapshot | None, *, at_once: bool = False) -> None:
        self._count_events(at_once=at_once)
        due = at_once or time.monotonic() - self._last_line >= _PROGRESS_SECONDS
        if not due or run.updates is None or run.updates == self._last_update:
            return
        self._last_line, self._last_update = time.monotonic(), run.updates
        parts = [f"update {run.updates}"]
        if run.total_updates is not None:
            share = units.percent(run.updates / max(1, run.total_updates), 0)
            parts = [f"{tr(f'update {run.updates}/{run.total_updates}')} {share:>5}"]
        if run.loss is not None:
            parts.append(f"loss {run.loss:.4f}")
        if run.samples_per_second is not None:
            parts.append(f"{units.rate(run.samples_per_second)} samples/s")
        if run.eta_seconds is not None:
            parts.append(f"ETA {units.duration(run.eta_seconds)}")
        self._print("  ".join(parts + _memory(machine)))

    def _what_it_saves(self) -> str:
        if self._state is None:
            return ""
        saves = self._state.saves_when_stopped
        return ": the run finishes its update and saves" if saves else ": what it saves is up to the program"

    def _exit_status(self) -> int:
        state = self._state
        if state is None or (self._interrupts and not state.state.final):
            name = self._folder.name
            if self._stop_sent:
                self._print(f"run {name}: it is still being stopped; memtop show {name} shows how it ended")
            else:
                why = "its supervisor does not answer, so nothing was stopped"
                self._print(f"run {name} goes on: {why}; memtop stop {name} stops it")
            return 130
        why = f" ({state.reason.rstrip('.')})" if state.reason else ""
        if state.state is Phase.FAILED and state.proposal is not None:
            why = "" if state.reason == state.proposal.diagnosis.summary else why
            for line in proposal_lines(state.proposal, resumes=state.resumes):
                self._print(line)
        where = f"; memtop show {state.name}"
        if state.state is Phase.STOPPED:
            resumes = state.resumes and state.checkpoint is not None
            where += f"; memtop restart {state.name} {'resumes it' if resumes else 'starts it again'}"
        self._print(f"run {state.name}: {state.word}{why}{where}")
        if self._interrupts and state.state is not Phase.FINISHED:
            return 130
        if state.state in (Phase.FINISHED, Phase.STOPPED):
            return 0
        # The built-in trainer refused the input of a new run, which only its libraries can check.
        refused = state.settings is not None and state.exit_status == 2 and state.attempt == 1 and not state.updates
        return 2 if refused else 1

    @staticmethod
    def _print(text: str) -> None:
        try:
            print_message(Verbatim(f"memtop: {tr(text)}"))
        except BrokenPipeError:
            # This process stays, because a signal to it stops the run.
            discard(sys.stderr)


def _memory(machine: MachineSnapshot | None) -> list[str]:
    if machine is None:
        return []
    gauges = [(f"GPU {gpu.index}", gpu.used_fraction, gpu.band) for gpu in machine.gpus]
    gauges.append(("RAM", machine.host.used_fraction, machine.host.band))
    return [
        f"{tr(name)} {units.percent(fraction)} {tr(band.value)}" for name, fraction, band in gauges if band is not Band.UNKNOWN
    ]
