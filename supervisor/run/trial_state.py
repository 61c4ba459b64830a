"""The values of a trial: its state, what it must know about the run, and the actions that it
requests. `trial.py` has the rules."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.presets.fields import LIVE, differing
from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.errors import UsageError
from memtop.supervisor.killed import state_word
from memtop.supervisor.recovery.batch_trial import Update
from memtop.supervisor.recovery.configuration import live_values
from memtop.supervisor.wire import Change, Phase, Trial

AT_THE_END = "the run is at its last update"
RESTARTED = "the run was restarted meanwhile"


class TrialStage(str, Enum):
    """What a trial waits for."""

    MEASURING_BEFORE = "measuring before"
    SAVING = "saving"
    """A save was requested, so that nothing is lost if the change ends the program."""
    CHANGING = "changing"
    """The change of the settings was requested from the agent."""
    RESTARTING = "restarting"
    """The change needs a restart, which was requested."""
    MEASURING_AFTER = "measuring after"
    TAKEN_OVER = "taken over"
    """A new supervisor has taken over the run: the trial is undone as soon as the agent can be
    asked."""
    UNDOING = "undoing"
    """Changing the settings back was requested from the agent."""
    UNDO_RESTARTING = "undo restarting"
    """The settings can only be changed back by a restart, which was requested."""
    SETTLING = "settling"
    """The agent has changed the settings back; the report that confirms it is still to come."""
    WAITING_FOR_END = "waiting for end"
    """The settings cannot be changed back now: they are when the run ends, or starts again."""
    OVER = "over"


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial needs to know about the run at the moment of an event."""

    phase: Phase
    reason: str | None = None
    """Why the run is in this phase."""
    ended_by: int | None = None
    """See `RunState`."""
    attempt: int = 0
    configuration: int | None = None
    """The number of the present configuration."""
    settings: Settings | None = None
    """The settings that the run reports to be in place."""
    start_update: int = 0
    """The update that the attempt resumed after."""
    restart_requested: bool = False
    """A restart was requested and has not begun."""
    restart_waiting: bool = False
    """The program died, and the restart after its death waits to begin."""
    at_the_end: bool = False
    """No update is left to begin."""
    connected: bool = False
    """The agent of rank 0 is connected."""
    saves_on_request: bool = False
    died_of: Kind | None = None
    """The kind of failure that the run's proposal is about; None if there is no proposal."""
    host_bytes: int | None = None
    """Resident memory of the run's processes."""
    swap_bytes: int | None = None
    """Swap in use on the machine."""
    monotonic: float = 0.0
    """Seconds."""

    @property
    def word(self) -> str:
        """The phase as people read it."""
        return state_word(self.phase.value, self.ended_by)

    @property
    def died(self) -> bool:
        return self.restart_waiting or self.phase is Phase.FAILED

    @property
    def is_over(self) -> bool:
        return self.phase.final and not self.restart_waiting

    def live_values(self, wanted: Settings) -> dict[str, object] | None:
        """What the agent must set for the running program to have these settings; None if that
        needs a restart."""
        if self.phase is not Phase.TRAINING or self.restart_requested or not self.connected or self.settings is None:
            return None
        wanted = replace(wanted, target_samples=self.settings.target_samples, epochs=self.settings.epochs)
        try:
            # The program may be ahead of its reports: if nothing seems to differ, set everything.
            return live_values(self.settings, wanted) or {name: getattr(wanted, name) for name in LIVE}
        except UsageError:
            return None

    def why_no_restart(self, *, dying: bool = False) -> str | None:
        """Why the trial must not restart the run; None if it may.

        A person has stopped or restarted it, or it ended for another reason than the trial, or its
        work is done: a restart would lose what could not be saved yet."""
        if self.died and not dying and self.died_of is None:
            return "the program died, and not of memory"
        if self.died and self.died_of is Kind.DISK_FULL:
            return "the disk is full, and other settings do not change that"
        if self.restart_requested:
            return "the run is about to be restarted"
        if not self.died and self.phase not in (Phase.STARTING, Phase.TRAINING):
            return f"the run is {self.word}"
        if not self.died and self.at_the_end:
            return AT_THE_END
        return None


class Trouble(msgspec.Struct, frozen=True):
    """Why the trial cannot go on."""

    reason: str
    undo: bool = True
    """The supervisor may still change the settings back; False if the run has ended, was
    restarted, or is at its last update."""


class TrialState(msgspec.Struct, frozen=True, kw_only=True):
    """One trial."""

    stage: TrialStage
    trial: Trial
    change: Change
    """What is tried."""
    undo: Change
    """The change that goes back to `before`."""
    before: Settings
    after: Settings
    requested: bool = False
    """The change was requested."""
    confirmed: bool = False
    """The program has reported the settings on trial."""
    settled: bool = False
    """All reports up to the moment when the settings were changed back have been read."""
    unproven: bool = False
    """The settings on trial may be in place."""
    attempt: int = 0
    """The attempt that is measured or was asked last."""
    since: int = 0
    """The first update that counts."""
    updates: tuple[Update, ...] = ()
    trouble: Trouble | None = None
    dying: str | None = None
    """An allocation failure that ends the program; it is acted on when the program has ended."""
    deadline: float | None = None
    reason: str = ""
    """Why the trial is undone."""
    failed: bool = False
    """An error in memtop ended the trial."""
    client: int | None = None
    """The client that waits for the result, and the number of its request."""
    request: int = 0

    @property
    def running(self) -> bool:
        return self.stage is not TrialStage.OVER

    @property
    def changed(self) -> list[str]:
        """The settings that the trial changes."""
        return differing(self.before, self.after)

    @property
    def proven(self) -> Settings | None:
        """The settings that changes start from while those on trial are in place; else None."""
        return self.before if self.unproven else None

    def is_gone(self, settings: Settings | None) -> bool:
        """Whether nothing on trial is in place. The program may have changed its split meanwhile,
        after an allocation failure."""
        return settings is not None and all(getattr(settings, name) != getattr(self.after, name) for name in self.changed)

    def trouble_in(self, facts: RunFacts) -> Trouble | None:
        """Why the trial cannot go on; None if it can."""
        if self.trouble is not None:
            return self.trouble
        if facts.died:
            return Trouble(self.dying or f"the program died: {facts.reason or 'no reason known'}")
        if facts.phase is not Phase.TRAINING:
            return Trouble(f"the run is {facts.word}", undo=False)
        if facts.attempt != self.attempt:
            return Trouble(RESTARTED, undo=False)
        if facts.at_the_end:
            # No more updates come, and the program may wait for disk space for a long time.
            return Trouble(AT_THE_END, undo=False)
        return None


# --- actions --------------------------------------------------------------------------------------


class Record(msgspec.Struct, frozen=True):
    """Record an event of kind `trial`."""

    message: str
    data: dict[str, Any]


class AskSave(msgspec.Struct, frozen=True):
    """Ask the agent of rank 0 to save; `answered` takes its answer."""


class AskChange(msgspec.Struct, frozen=True):
    """Ask the agent of rank 0 to set these values at the next update boundary; `answered` takes its
    answer."""

    values: dict[str, object]


class RequestRestart(msgspec.Struct, frozen=True):
    """Stop the attempt and start the next one with this change; an ended run starts at once."""

    change: Change


class ReplaceRestart(msgspec.Struct, frozen=True):
    """Begin the waiting restart with this change instead of the remedy."""

    change: Change


class PutBack(msgspec.Struct, frozen=True):
    """Give the ended run these settings again."""

    settings: Settings
    reason: str


Action = Record | AskSave | AskChange | RequestRestart | ReplaceRestart | PutBack
Result = tuple[TrialState, tuple[Action, ...]]
