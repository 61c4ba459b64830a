"""Tries a change for speed: measures a stretch of updates, changes, measures as many again, keeps the change or undoes it.

What is tried and when it is kept is decided in `recovery/growth.py`. A trial is remembered as events of the kind `trial`, each
with the whole trial in it: a supervisor that takes over in the middle of one undoes it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from memtop.presets.comparing import changes
from memtop.presets.schema import Settings
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.recovery.applying import change_for
from memtop.supervisor.recovery.growth import Split, Update, measured, verdict, why_not
from memtop.supervisor.run import explain
from memtop.supervisor.run.change import live_values
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


class _Disturbed(Exception):
    """The stretch cannot be measured; the message says why. `undo`: the change must be taken back."""

    def __init__(self, why: str, *, undo: bool = True) -> None:
        super().__init__(why)
        self.undo = undo


class Trials:
    """At most one at a time."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.newest: Trial | None = None
        self._task: asyncio.Task[None] | None = None
        self._updates: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._trouble: str | None = None
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
        if self.running:
            raise MemtopError(f"a trial is under way: {self.newest.title if self.newest else ''}")
        change = self._proposed() if change is None else change
        before, after = supervisor.settings, supervisor.foreseen(change)
        assert after is not None
        title = ", ".join(_title(before, after))
        if not title:
            raise UsageError("nothing changes: the run has these settings")
        self.newest = Trial(title=title, started=time.time(), state="measuring before")
        reason = self._why_not(before, after)
        if reason is not None:
            self._set("refused", reason)
            raise MemtopError(reason)
        present = supervisor.survival.configurations.present
        assert present is not None, "a run that trains has a configuration"
        undo = Change(configuration=present.configuration.number, reason=f"trial undone: {title}")
        self._trouble = self._last_words = None
        self._task = asyncio.get_running_loop().create_task(self._run(change, undo, before, after))
        return self.newest

    async def finished(self) -> Trial:
        """The trial under way, when it is over."""
        if self._task is not None:
            await asyncio.wait({self._task})
        assert self.newest is not None
        return self.newest

    def report(self, rank: int, report: dict[str, Any]) -> None:
        """A rank has said something."""
        if not self.running:
            return
        kind = report.get("type")
        if kind == "oom":
            why = f"memory ran out at update {report.get('update')}: {report.get('message')}"
            if report.get("survived"):
                self._trouble = why
            else:
                # It is dying of it. When it is dead, there is something to start again.
                self._last_words = why
        elif kind == "settings" and rank == 0 and report.get("reason") != "asked":
            self._trouble = self._trouble or f"the settings changed meanwhile: {report.get('reason')}"
        elif kind == "step" and rank == 0:
            self._updates.put_nowait(report)

    def take_up(self) -> None:
        """After this supervisor took over a running program: a trial that the one before left unfinished is undone."""
        events = [event for event in self._supervisor.ledger.events() if event.kind == "trial"]
        if not events:
            return
        self.newest = msgspec.convert(events[-1].data["trial"], Trial)
        if self.newest.state in _UNFINISHED:
            undo = events[-1].data.get("undo")
            change = None if undo is None else msgspec.convert(undo, Change)
            self._task = asyncio.get_running_loop().create_task(self._take_back(change))

    async def _take_back(self, undo: Change | None) -> None:
        """Undo what an earlier supervisor tried, once the program can be asked."""
        deadline = time.monotonic() + _AGENTS_RETURN_SECONDS
        while 0 not in self._supervisor.agents.ranks and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)
        await self._give_up("its supervisor ended in the middle of it", undo)

    # --- what may be tried --------------------------------------------------------------------------------------------------

    def _proposed(self) -> Change:
        advice = self._supervisor.prevention.advice
        if advice is None:
            raise MemtopError("nothing to try yet: the run has not been measured for long enough")
        for remedy in advice.proposals:
            if remedy.assignments and remedy.resumable in ("live", "resumes") and not remedy.needs_consent:
                return change_for(remedy, reason="trial")
        why = f"; {advice.refused[0]}" if advice.refused else ""
        raise MemtopError(f"nothing to try: {advice.summary}{why}")

    def _why_not(self, before: Settings, after: Settings) -> str | None:
        if before.effective_batch != after.effective_batch:
            return f"a trial changes nothing of what is learnt{explain.split_change(before, after)}"
        if after.batch > before.batch:
            split = Split(batch=after.batch, accumulation=after.accumulation)
            prevention = self._supervisor.prevention
            return why_not(before, split, prevention.forecast(after.batch), prevention.failed_batches())
        return None

    # --- the trial ----------------------------------------------------------------------------------------------------------

    async def _run(self, change: Change, undo: Change, before: Settings, after: Settings) -> None:
        undo_with: Change | None = None
        try:
            self._set("measuring before", data={"undo": None})
            self._set_measured(before=measured(await self._stretch(before, 0)))
            assert self.newest is not None
            await self._save_first()
            undo_with = undo
            self._set("measuring after", data={"undo": msgspec.to_builtins(undo)})
            first = await self._apply(replace(change, reason=f"trial of {self.newest.title}"), after)
            self._set_measured(after=measured(await self._stretch(after, first + WARM_UP)))
            assert self.newest is not None
            kept, reason = verdict(self.newest.before, self.newest.after)
            if kept:
                self._set("kept", reason)
            else:
                await self._give_up(reason, undo)
        except (_Disturbed, MemtopError) as error:
            wanted = not isinstance(error, _Disturbed) or error.undo
            await self._give_up(str(error), undo_with if wanted else None)

    async def _save_first(self) -> None:
        """Should the program die of the change, nothing that it has learnt is lost."""
        supervisor = self._supervisor
        if "checkpoint" in (supervisor.progress.offers or ()) and 0 in supervisor.agents.ranks:
            answers = await supervisor.agents.call("checkpoint", {0})
            if not answers or not answers[0].ok:
                why = answers[0].message if answers else "the training process is gone"
                raise _Disturbed(f"the state could not be saved before the change: {why}", undo=False)

    async def _give_up(self, reason: str, undo: Change | None) -> None:
        """Go back to the settings before; without `undo` nothing was changed, or it is not ours to change back."""
        if undo is None:
            self._set("refused", reason)
            return
        self._trouble = None
        try:
            settings = self._supervisor.foreseen(undo)
            assert settings is not None
            await self._apply(undo, settings)
        except (_Disturbed, MemtopError) as error:
            self._set("refused", f"{reason}; it could not be undone: {error}")
        else:
            self._set("undone", reason)

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
            if report.get("batch", settings.batch) != settings.batch:
                if report["update"] >= since:
                    raise _Disturbed("the settings were changed meanwhile", undo=False)
            elif report["update"] >= since and report.get("step_seconds"):
                found.append(self._update(report, settings))
        return found

    def _update(self, report: dict[str, Any], settings: Settings) -> Update:
        machine = self._supervisor.watch.machine
        return Update(
            number=report["update"],
            samples=settings.effective_batch,
            seconds=report["step_seconds"],
            tokens=report.get("tokens"),
            peak_bytes=report.get("peak_reserved_bytes") or report.get("peak_bytes"),
            host_bytes=self._supervisor.watch.run_rss_bytes,
            swap_bytes=machine.host.swap_used_bytes if machine is not None else None,
        )

    def _check(self) -> None:
        """Raise if the stretch is no longer what it is meant to be."""
        if self._trouble is not None:
            raise _Disturbed(self._trouble)
        phase = self._supervisor.phase
        if self._supervisor.survival.comeback is not None or phase is Phase.FAILED:
            raise _Disturbed(self._last_words or f"the program died: {self._supervisor.lifecycle.reason or 'no reason known'}")
        if phase is not Phase.TRAINING:
            # Stopped, restarted with other settings, or finished: somebody else has decided.
            raise _Disturbed(f"the run is {phase.value}", undo=False)

    async def _apply(self, change: Change, after: Settings) -> int:
        """At the next update boundary where the program can do it, else by a restart; the first update with it."""
        supervisor = self._supervisor
        try:
            values = live_values(supervisor.settings, after)
        except UsageError:
            return await self._restart(change)
        if supervisor.phase is not Phase.TRAINING or 0 not in supervisor.agents.ranks:
            return await self._restart(change)
        answers = await supervisor.agents.call("change", {0}, values)
        if not answers or not answers[0].ok:
            raise MemtopError(answers[0].message if answers else "the training process is gone")
        return int(answers[0].result["update"])

    async def _restart(self, change: Change) -> int:
        supervisor = self._supervisor
        self._refuse_restart()
        before = supervisor.state().attempt
        supervisor.begin_restart(change)
        while supervisor.state().attempt == before or supervisor.phase is Phase.STARTING:
            if supervisor.phase.final and supervisor.state().attempt == before and supervisor.survival.comeback is None:
                raise _Disturbed(f"the run is {supervisor.phase.value}", undo=False)
            await asyncio.sleep(_LOOK_SECONDS)
        return int(supervisor.progress.plan.get("updates") or 0) + 1

    def _refuse_restart(self) -> None:
        """Raise where a person has stopped or restarted the run, or where it ended for another reason than the trial."""
        supervisor, phase = self._supervisor, self._supervisor.phase
        died = supervisor.survival.comeback is not None or phase is Phase.FAILED
        if died and self._last_words is None and supervisor.survival.proposal is None:
            raise _Disturbed("the program died, and not of memory", undo=False)
        if not died and phase not in (Phase.STARTING, Phase.TRAINING):
            raise _Disturbed(f"the run is {phase.value}", undo=False)

    # --- what is said -------------------------------------------------------------------------------------------------------

    def _set_measured(self, **values: dict[str, float]) -> None:
        assert self.newest is not None
        self.newest = replace(self.newest, **values)

    def _set(self, state: str, reason: str | None = None, data: dict[str, Any] | None = None) -> None:
        assert self.newest is not None
        self.newest = replace(self.newest, state=state, reason=reason)
        text = f"trial of {self.newest.title}: {state}" + (f": {reason}" if reason else "")
        self._supervisor.event("trial", text, {"trial": msgspec.to_builtins(self.newest), **(data or {})})


def _title(before: Settings, after: Settings) -> list[str]:
    """`batch 16 -> 20`, `accumulation 5 -> 4`; other changes as they are told everywhere."""
    numbers = ("batch", "accumulation")
    split = [
        f"{name} {getattr(before, name)} -> {getattr(after, name)}"
        for name in numbers
        if getattr(before, name) != getattr(after, name)
    ]
    rest = changes(before, replace(after, batch=before.batch, accumulation=before.accumulation))
    return [*split, *rest]
