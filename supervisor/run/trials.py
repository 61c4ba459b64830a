"""Tries a change for speed: measures a stretch of updates, changes, measures as many again, keeps the change or undoes it.

What may be tried is decided in `recovery/batch_trial.py`. A trial is remembered as events of the kind `trial`, each
with the whole trial in it: a supervisor that takes over in the middle of one undoes it.

From the change on, until it is kept, the run's settings are not proven. `before` has those that are: whatever starts meanwhile
starts from them, and a run that ends meanwhile has them again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from memtop.presets.fields import LIVE
from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.recovery.batch_trial import Update, measured, verdict
from memtop.supervisor.run.change import live_values
from memtop.supervisor.run.record.configurations import same
from memtop.supervisor.run.reports import Oom, Report, SettingsChanged, Step
from memtop.supervisor.run.trying import come_back_with, proposed, put_back, title_of, why_not
from memtop.supervisor.wire import Change, Phase, Trial

if TYPE_CHECKING:
    from memtop.supervisor.run.supervisor import Supervisor

UPDATES = 20
"""How many updates are measured before the change, and as many after it."""
WARM_UP = 3
"""Updates right after the change that are not measured: new buffers, autotuning, a loader that fills."""
_LOOK_SECONDS = 0.1
# After a change of supervisors agents connect again within so long.
_AGENTS_RETURN_SECONDS = 10.0
_UNFINISHED = ("measuring before", "measuring after")
_AT_THE_END = "the run is at its last update"
_ORPHANED = "its supervisor ended in the middle of it"


class _Disturbed(Exception):
    """The stretch cannot be measured; the message says why. `undo`: the program is still ours to change back."""

    def __init__(self, why: str, *, undo: bool = True) -> None:
        super().__init__(why)
        self.undo = undo


class Trials:
    """At most one at a time."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.newest: Trial | None = None
        self._task: asyncio.Task[None] | None = None
        self._updates: asyncio.Queue[Step] = asyncio.Queue()
        self.before: Settings | None = None
        """The settings before those on trial; None where no settings on trial are in place."""
        self._undo: Change | None = None
        """What takes the program back to them."""
        self._own: Change | None = None
        """The restart that the trial itself has asked for."""
        self._expected: Settings | None = None
        self._attempt = 0
        self._trouble: _Disturbed | None = None
        self._last_words: str | None = None

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    # --- what comes in ----------------------------------------------------------------------------------------------------

    def begin(self, change: Change | None) -> Trial:
        """Begin one; None: what the advice proposes first. MemtopError (UsageError) says why it is not done."""
        supervisor = self._supervisor
        if supervisor.settings is None:
            raise UsageError("this run's program is your own: its settings are not memtop's to change")
        if supervisor.phase is not Phase.TRAINING:
            raise MemtopError(f"run {supervisor.folder.name!r} is not training: it is {supervisor.phase.value}")
        if supervisor.progress.at_the_end:
            raise MemtopError(f"nothing can be tried any more: {_AT_THE_END}")
        if self.running:
            raise MemtopError(f"a trial is under way: {self.newest.title if self.newest else ''}")
        change = proposed(supervisor) if change is None else change
        before, after = supervisor.settings, supervisor.foreseen(change)
        assert after is not None
        title = title_of(before, after)
        if not title:
            raise UsageError("nothing changes: the run has these settings")
        self.newest = Trial(title=title, started=time.time(), state="measuring before")
        reason = why_not(supervisor, before, after)
        if reason is not None:
            self._set("refused", reason)
            raise MemtopError(reason)
        present = supervisor.survival.configurations.present
        assert present is not None, "a run that trains has a configuration"
        self._undo = Change(configuration=present.configuration.number, reason=f"trial undone: {title}")
        self._trouble = self._last_words = None
        self._expected, self._attempt = before, supervisor.state().attempt
        self._go(self._run(change, before, after))
        return self.newest

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for the task: what it dies of has to be told here."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._set("failed", _unexpected(error))

    async def finished(self) -> Trial:
        """The trial under way, when it is over."""
        if self._task is not None:
            await asyncio.wait({self._task})
        assert self.newest is not None
        return self.newest

    def report(self, rank: int, report: Report) -> None:
        """A rank has reported something."""
        if not self.running:
            return
        if isinstance(report, Oom):
            why = f"memory ran out at update {report.update}: {report.message}"
            if report.survived:
                self._trouble = _Disturbed(why)
            else:
                # It is dying of it. When it is dead, there is something to start again.
                self._last_words = why
        elif isinstance(report, SettingsChanged) and rank == 0:
            self._changed(str(report.reason))
        elif isinstance(report, Step) and rank == 0:
            self._updates.put_nowait(report)

    def _changed(self, reason: str) -> None:
        """The program goes on with other settings, which are the run's already."""
        if reason != "asked":
            self._trouble = self._trouble or _Disturbed(f"the settings changed meanwhile: {reason}")
        elif not same(self._supervisor.settings, self._expected):
            # A person's edit, which started from the settings before: nothing on trial is in place any more.
            self.before = None
            self._trouble = _Disturbed("the settings were changed meanwhile", undo=False)

    def begun(self, change: Change) -> None:
        """An attempt was started with this change; if not by the trial, then from the settings before it."""
        if change is not self._own:
            self.before = None

    def take_up(self) -> None:
        """After this supervisor took over a run, ended or not: a trial that the one before left unfinished is undone."""
        supervisor = self._supervisor
        events = [event for event in supervisor.ledger.events() if event.kind == "trial"]
        if not events:
            return
        try:
            self.newest = msgspec.convert(events[-1].data.get("trial"), Trial)
            self._undo = msgspec.convert(events[-1].data.get("undo"), Change | None)
        except msgspec.ValidationError as error:
            supervisor.event("warning", f"the run's last trial cannot be understood: {error}")
            return
        if self.newest.state not in _UNFINISHED:
            return
        if self._undo is not None:
            number = self._undo.configuration
            rows = supervisor.survival.configurations.rows
            self.before = next((row.settings for row in rows if row.number == number), None)
        self._attempt = supervisor.state().attempt
        if supervisor.phase.final:
            self._put_back()
            self._set("undone" if self._undo is not None else "refused", _ORPHANED)
        else:
            self._go(self._take_back())

    async def _take_back(self) -> None:
        """Undo what an earlier supervisor tried, once the program can be asked."""
        supervisor = self._supervisor
        deadline = None
        while supervisor.phase in (Phase.STARTING, Phase.TRAINING) and supervisor.pending is None:
            if supervisor.phase is Phase.TRAINING:
                deadline = deadline or time.monotonic() + _AGENTS_RETURN_SECONDS
                if 0 in supervisor.agents.ranks or time.monotonic() > deadline:
                    break
            await asyncio.sleep(_LOOK_SECONDS)
        await self._give_up(_ORPHANED)

    # --- the trial ----------------------------------------------------------------------------------------------------------

    async def _run(self, change: Change, before: Settings, after: Settings) -> None:
        ask, failed = True, False
        try:
            kept, reason = await self._measure(change, before, after)
            if kept:
                self._set("kept", reason)
                return
        except (_Disturbed, MemtopError) as error:
            reason, ask = str(error), not isinstance(error, _Disturbed) or error.undo
        except Exception as error:  # noqa: BLE001
            # Whatever it was: what was changed must not stay because of it.
            reason, failed = _unexpected(error), True
        await self._give_up(reason, ask=ask, failed=failed)

    async def _measure(self, change: Change, before: Settings, after: Settings) -> tuple[bool, str]:
        """Measure, change, measure again; whether the change is to be kept, and why."""
        self._set("measuring before", data={"undo": None})
        self._set_measured(before=measured(await self._stretch(before, 0)))
        assert self.newest is not None
        self._check()
        await self._save_first()
        self._check()
        self.before, self._expected = before, after
        self._set("measuring after", data={"undo": msgspec.to_builtins(self._undo)})
        first = await self._apply(replace(change, reason=f"trial of {self.newest.title}"), after)
        self._set_measured(after=measured(await self._stretch(after, first + WARM_UP)))
        assert self.newest is not None
        return verdict(self.newest.before, self.newest.after)

    async def _save_first(self) -> None:
        """Should the program die of the change, nothing that it has learnt is lost."""
        supervisor = self._supervisor
        if "checkpoint" in (supervisor.progress.offers or ()) and 0 in supervisor.agents.ranks:
            answers = await supervisor.agents.call("checkpoint", {0})
            if not answers or not answers[0].ok:
                why = answers[0].message if answers else "the training process is gone"
                raise _Disturbed(f"the state could not be saved before the change: {why}", undo=False)

    async def _give_up(self, reason: str, *, ask: bool = True, failed: bool = False) -> None:
        """Go back to the settings before, if others are in place: with the program if it can be asked, else without it."""
        if self.before is None:
            self._set("failed" if failed else "refused", reason)
            return
        if ask:
            try:
                await self._ask_back()
            except (_Disturbed, MemtopError) as error:
                reason += f"; not taken back at once: {error}"
                ask = False
            except Exception as error:  # noqa: BLE001 (as above)
                reason += f"; not taken back at once: {_unexpected(error)}"
                ask, failed = False, True
                self._set("measuring after", reason, {"undo": msgspec.to_builtins(self._undo)})
        if not ask:
            await self._until_over()
            self._put_back()
            reason += "; what comes next starts from the settings before"
        self._set("failed" if failed else "undone", reason)

    async def _ask_back(self) -> None:
        assert self._undo is not None
        settings = self._supervisor.foreseen(self._undo)
        assert settings is not None
        self._trouble = None
        self._expected = settings
        try:
            await self._apply(self._undo, settings)
        except MemtopError:
            # It does not take them while it runs.
            await self._restart(self._undo)
        # The answer comes sooner than the report that makes them the run's again.
        while not same(self._supervisor.settings, settings) and self._supervisor.phase is Phase.TRAINING:
            await asyncio.sleep(_LOOK_SECONDS)

    async def _until_over(self) -> None:
        """Until the run has ended, or somebody has started it again from the settings before."""
        supervisor = self._supervisor
        while self.before is not None and not (supervisor.phase.final and supervisor.survival.comeback is None):
            await asyncio.sleep(_LOOK_SECONDS)

    def _put_back(self) -> None:
        """The run has ended: the settings before are its own again."""
        if self.before is not None and self.newest is not None:
            put_back(self._supervisor, self.before, f"trial undone: {self.newest.title}")

    async def _stretch(self, settings: Settings, since: int) -> list[Update]:
        """The next updates with these settings, from that one on."""
        self._updates = asyncio.Queue()
        found: list[Update] = []
        while len(found) < UPDATES:
            self._check()
            try:
                report = await asyncio.wait_for(self._updates.get(), _LOOK_SECONDS)
            except asyncio.TimeoutError:
                continue
            if (report.batch or settings.batch) != settings.batch:
                if report.update >= since:
                    self._check()  # which knows why
                    raise _Disturbed("the settings were changed meanwhile")
            elif report.update >= since and report.step_seconds:
                found.append(self._update(report, settings))
        return found

    def _update(self, report: Step, settings: Settings) -> Update:
        machine = self._supervisor.watch.machine
        return Update(
            number=report.update,
            samples=settings.effective_batch,
            seconds=report.step_seconds or 0.0,
            tokens=report.tokens,
            peak_bytes=report.peak_reserved_bytes or report.peak_bytes,
            host_bytes=self._supervisor.watch.run_rss_bytes,
            swap_bytes=machine.host.swap_used_bytes if machine is not None else None,
        )

    def _check(self) -> None:
        """Raise if the stretch is no longer what it is meant to be."""
        if self._trouble is not None:
            raise self._trouble
        phase = self._supervisor.phase
        if self._supervisor.survival.comeback is not None or phase is Phase.FAILED:
            raise _Disturbed(self._last_words or f"the program died: {self._supervisor.lifecycle.reason or 'no reason known'}")
        if phase is not Phase.TRAINING:
            # Stopped, restarted with other settings, or finished: somebody else has decided.
            raise _Disturbed(f"the run is {phase.value}", undo=False)
        if self._supervisor.state().attempt != self._attempt:
            raise _Disturbed("the run was restarted meanwhile", undo=False)
        if self._supervisor.progress.at_the_end:
            # No more updates come to be measured, and it may wait for room for a long time.
            raise _Disturbed(_AT_THE_END, undo=False)

    async def _apply(self, change: Change, after: Settings) -> int:
        """At the next update boundary where the program can do it, else by a restart; the first update with it."""
        supervisor = self._supervisor
        try:
            # The program may be ahead of what it has told: where nothing seems to differ, all is said.
            values = live_values(supervisor.settings, after) or {name: getattr(after, name) for name in LIVE}
        except UsageError:
            return await self._restart(change)
        if supervisor.phase is not Phase.TRAINING or supervisor.pending is not None or 0 not in supervisor.agents.ranks:
            return await self._restart(change)
        answers = await supervisor.agents.call("change", {0}, values)
        if not answers or not answers[0].ok:
            raise MemtopError(answers[0].message if answers else "the training process is gone")
        return int(answers[0].result["update"])

    async def _restart(self, change: Change) -> int:
        supervisor = self._supervisor
        self._refuse_restart()
        before = supervisor.state().attempt
        self._own = change
        if supervisor.survival.comeback is not None:
            # It can be called off, and waits for what the dead program held.
            come_back_with(supervisor, change)
        else:
            supervisor.begin_restart(change)
        while supervisor.state().attempt == before or supervisor.phase is Phase.STARTING:
            if supervisor.phase.final and supervisor.state().attempt == before and supervisor.survival.comeback is None:
                raise _Disturbed(f"the run is {supervisor.phase.value}", undo=False)
            await asyncio.sleep(_LOOK_SECONDS)
        if self.before is None:
            raise _Disturbed("the run was restarted meanwhile", undo=False)
        self._attempt = supervisor.state().attempt
        return supervisor.progress.start_update + 1

    def _refuse_restart(self) -> None:
        """Raise where a person has stopped or restarted the run, where it ended for another reason than the trial, or where its
        work is done: a restart would lose what could not be saved yet."""
        supervisor, phase = self._supervisor, self._supervisor.phase
        died = supervisor.survival.comeback is not None or phase is Phase.FAILED
        proposal = supervisor.survival.proposal
        if died and self._last_words is None and proposal is None:
            raise _Disturbed("the program died, and not of memory", undo=False)
        if died and proposal is not None and proposal.diagnosis.kind is Kind.DISK_FULL:
            raise _Disturbed("the disk is full, and no other settings would mend that", undo=False)
        if supervisor.pending is not None:
            raise _Disturbed("the run is about to be restarted", undo=False)
        if not died and phase not in (Phase.STARTING, Phase.TRAINING):
            raise _Disturbed(f"the run is {phase.value}", undo=False)
        if not died and supervisor.progress.at_the_end:
            raise _Disturbed(_AT_THE_END, undo=False)

    # --- what is said -------------------------------------------------------------------------------------------------------

    def _set_measured(self, **values: dict[str, float]) -> None:
        assert self.newest is not None
        self.newest = replace(self.newest, **values)

    def _set(self, state: str, reason: str | None = None, data: dict[str, Any] | None = None) -> None:
        assert self.newest is not None
        if state not in _UNFINISHED:
            self.before = None
        self.newest = replace(self.newest, state=state, reason=reason)
        text = f"trial of {self.newest.title}: {state}" + (f": {reason}" if reason else "")
        self._supervisor.event("trial", text, {"trial": msgspec.to_builtins(self.newest), **(data or {})})


def _unexpected(error: BaseException) -> str:
    return f"an error of memtop's own: {type(error).__name__}: {error}"
