"""Performs what the rules in `trial.py` ask for, for one supervisor."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.recovery import batch_trial
from memtop.supervisor.run import explain, trial
from memtop.supervisor.run.record.configurations import same
from memtop.supervisor.run.reports import Oom, Report, SettingsChanged, Step
from memtop.supervisor.run.trial_state import (
    Action,
    AskChange,
    AskSave,
    PutBack,
    Record,
    ReplaceRestart,
    RequestRestart,
    Result,
    RunFacts,
    TrialState,
)
from memtop.supervisor.wire import Change, Trial

if TYPE_CHECKING:
    from memtop.supervisor.run.supervisor import Supervisor


class Trials:
    """At most one at a time."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.state: TrialState | None = None
        self._over = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    @property
    def newest(self) -> Trial | None:
        return self.state.trial if self.state is not None else None

    @property
    def before(self) -> Settings | None:
        """The settings before those on trial; None where no settings on trial are in place."""
        return self.state.proven if self.state is not None else None

    def begin(self, change: Change | None) -> Trial:
        """Begin a trial; None: of the first proposal. MemtopError (UsageError) if it cannot begin."""
        supervisor, facts = self._supervisor, self.facts()
        trial.check_request(supervisor.folder.name, facts, self.state)
        prevention = supervisor.prevention
        change = batch_trial.proposed(prevention.advice) if change is None else change
        after = supervisor.foreseen(change)
        assert supervisor.settings is not None
        assert after is not None
        refused = batch_trial.refusal(supervisor.settings, after, prevention.forecast, prevention.failed_batches())
        self._over.clear()
        self._take(trial.begin(change, after, facts, time.time(), refused=refused))
        if refused is not None:
            raise MemtopError(refused)
        assert self.state is not None
        return self.state.trial

    async def finished(self) -> Trial:
        """The present trial, when it is over."""
        await self._over.wait()
        assert self.state is not None
        return self.state.trial

    def report(self, rank: int, report: Report) -> None:
        """A rank has reported something."""
        if self.state is None or not self.state.running:
            return
        facts = self.facts()
        if isinstance(report, Oom):
            self._take(trial.oom_reported(self.state, facts, report))
        elif isinstance(report, SettingsChanged) and rank == 0:
            self._take(trial.settings_reported(self.state, facts, report))
        elif isinstance(report, Step) and rank == 0:
            self._take(trial.step_reported(self.state, facts, report))

    def begun(self, change: Change) -> None:
        """An attempt was started with this change."""
        if self.state is not None:
            self._take(trial.attempt_begun(self.state, self.facts(), change))

    def tick(self) -> None:
        if self.state is not None and self.state.running:
            self._take(trial.tick(self.state, self.facts()))

    def take_up(self) -> None:
        """Undo a trial that an earlier supervisor left unfinished."""
        supervisor = self._supervisor
        events = [event for event in supervisor.ledger.events() if event.kind == "trial"]
        if not events:
            return
        found = trial.taken_over(events[-1].data, self.facts())
        if isinstance(found, str):
            supervisor.event("warning", found)
        else:
            self._take(found)

    def facts(self) -> RunFacts:
        supervisor, machine = self._supervisor, self._supervisor.watch.machine
        proposal, offers = supervisor.survival.proposal, supervisor.progress.offers
        present = supervisor.survival.configurations.present
        return RunFacts(
            phase=supervisor.phase,
            reason=supervisor.lifecycle.reason,
            attempt=supervisor.attempt.number if supervisor.attempt is not None else 0,
            configuration=present.configuration.number if present is not None else None,
            settings=supervisor.settings,
            start_update=supervisor.progress.start_update,
            restart_requested=supervisor.pending is not None,
            restart_waiting=supervisor.survival.comeback is not None,
            at_the_end=supervisor.progress.at_the_end,
            connected=0 in supervisor.agents.ranks,
            saves_on_request="checkpoint" in (offers or ()),
            died_of=proposal.diagnosis.kind if proposal is not None else None,
            host_bytes=supervisor.watch.run_rss_bytes,
            swap_bytes=machine.host.swap_used_bytes if machine is not None else None,
            monotonic=time.monotonic(),
        )

    def _take(self, result: Result) -> None:
        self.state, actions = result
        for action in actions:
            self._perform(action)
        if not self.state.running:
            self._over.set()

    def _perform(self, action: Action) -> None:
        supervisor = self._supervisor
        match action:
            case Record(message, data):
                supervisor.event("trial", message, data)
            case AskSave():
                self._ask("checkpoint")
            case AskChange(values):
                self._ask("change", values)
            case RequestRestart(change):
                try:
                    supervisor.begin_restart(change)
                except MemtopError as error:
                    assert self.state is not None
                    self._take(trial.restart_refused(self.state, self.facts(), str(error)))
            case ReplaceRestart(change):
                self._replace_restart(change)
            case PutBack(settings, reason):
                self._put_back(settings, reason)

    def _ask(self, command: str, values: dict[str, object] | None = None) -> None:
        async def ask() -> None:
            answers = await self._supervisor.agents.call(command, {0}, values)
            problem = "the training process is gone" if not answers else None if answers[0].ok else answers[0].message
            assert self.state is not None
            update = answers[0].result.get("update") if answers and problem is None else None
            self._take(trial.answered(self.state, self.facts(), problem, update))

        self._asking = asyncio.get_running_loop().create_task(ask())

    def _replace_restart(self, undo: Change) -> None:
        """The program has died in a trial and its restart waits: begin it with the settings before the trial instead."""
        supervisor, survival = self._supervisor, self._supervisor.survival
        assert survival.comeback is not None
        assert self.state is not None
        known = survival.comeback.change == undo
        survival.comeback.begin_with(undo)
        if known:
            return  # an earlier supervisor has recorded it
        if survival.proposal is not None:
            remedies = (trial.undo_remedy(self.state, supervisor.folder.name), *survival.proposal.remedies)
            survival.proposal = replace(survival.proposal, remedies=remedies)
        supervisor.event("remedy", f"instead: {explain.restart_reason(undo)}")
        supervisor.save_state()
        supervisor.publisher.changed()

    def _put_back(self, before: Settings, reason: str) -> None:
        """Give the ended run these settings again, as a configuration without an update."""
        supervisor, now = self._supervisor, self._supervisor.settings
        if now is None or same(now, before):
            return
        settings = replace(before, target_samples=now.target_samples, epochs=now.epochs)
        configurations = supervisor.survival.configurations
        last = configurations.present
        assert last is not None, "a trial began with a configuration"
        done = last.configuration.until_update or supervisor.state().updates or 0
        died = last.configuration.outcome if last.died_of_memory else None
        saved = last.starts[-1].saved_after
        said = (last.newest_attempt, time.time())
        configurations.change(done + 1, reason, settings, died=died, saved=saved, changed_by=said)
        configurations.end(supervisor.phase.value, None, saved)
        supervisor.settings = settings
        supervisor.publisher.changed()
