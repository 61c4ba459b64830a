"""What the rules want done, as values: only `performer.py` acts on them.

Every effect may be performed twice: a supervisor may be killed right after it, and the next one
decides again from what was written.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from memtop.presets.schema import Settings
from memtop.supervisor.monitor.values import GpuSample
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.record.configurations import ConfigurationRecord
from memtop.supervisor.wire import Answer, Change, Checkpoint, Configuration, Event


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag="launch"):
    """Write the attempt into the ledger, go back to an earlier state if `state_before` asks for it,
    start the program.

    Answered by `Launched` or `LaunchRefused`; a launch that is refused leaves the saved states
    where they were.
    """

    number: int
    reason: str
    change: Change
    """The change with which the attempt begins."""
    settings: Settings | None
    """None for an external command."""
    allocator: str = ""
    """Allocator options for an external command."""
    state_before: int | None = None
    """Go back to the newest kept state at or before this update."""
    grip: Grip | None = None
    """How memtop holds the user's own program. None if memtop does not make it resume."""
    knobs: dict[str, Any] = {}
    """The settings that such a program is given."""


class SignalTarget(str, Enum):
    """Who gets a signal."""

    GROUP = "group"
    """The program's process group, which Ctrl-C in a terminal reaches."""
    PROGRAM = "program"
    """The program alone. Launchers forward the signal to their ranks."""
    ALL = "all"
    """All processes of the attempt."""
    STOPPED = "stopped"
    """Those that a signal has stopped: SIGSTOP, Ctrl-Z. They handle no signal but SIGKILL."""


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag="signal"):
    """Answered by `Signalled`."""

    name: str
    """`SIGINT`, `SIGTERM`, `SIGCONT`, `SIGKILL`"""
    target: SignalTarget


class TypeAnswer(msgspec.Struct, frozen=True, tag="type_answer"):
    """Type this, and the line's end, on the program's terminal: the answer to its question."""

    text: str


class ClearLeftovers(msgspec.Struct, frozen=True, kw_only=True, tag="clear_leftovers"):
    """End the processes that a program left behind. Answered by `LeftoversCleared`."""

    untouched_seconds: float
    """Time to save for processes that were interrupted together with the program."""
    terminate_seconds: float
    """Time for all of them after SIGTERM."""
    saved: Checkpoint | None = None
    """The newest checkpoint that the user's own program has reported: look whether it is there."""


class Examine(msgspec.Struct, frozen=True, kw_only=True, tag="examine"):
    """Find out why the program ended. Answered by `Examined`."""

    ended: float
    """Seconds since the epoch."""
    status: int | None
    """None if unknown, or if the status proves nothing."""
    stop_requested: bool
    settings: Settings | None


class KeepCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag="keep_checkpoint"):
    """Keep the newest complete checkpoint of the user's own program, because the program may delete
    or overwrite it while it stops. Answered by `CheckpointKept`."""

    grip: Grip
    after: Grip
    """The program as it is to go on."""


class ReadStates(msgspec.Struct, frozen=True, tag="read_states"):
    """Answered by `StatesRead`."""


class CheckSaved(msgspec.Struct, frozen=True, tag="check_saved"):
    """Find out whether the checkpoint that a program has reported is complete. Answered by
    `SavedChecked`.
    """

    reported: Checkpoint


class HoldState(msgspec.Struct, frozen=True, tag="hold_state"):
    """Keep the state to which the run will return: later saves do not remove it. Answered by
    `StateHeld`.
    """

    update: int


class ReleaseState(msgspec.Struct, frozen=True, tag="release_state"):
    """End the protection of a held state: the run will not return to it."""


class DiscardBeforeSpike(msgspec.Struct, frozen=True, tag="discard_before_spike"):
    """Delete the state from before a spike of the loss: a person goes on from after it."""


class AskRanks(msgspec.Struct, frozen=True, kw_only=True, tag="ask_ranks"):
    """Send a command to the agents of these ranks. Answered by `Answered`."""

    ask: int
    name: str
    """free_cache | checkpoint | stop | change"""
    ranks: frozenset[int]
    values: dict[str, Any] | None = None


class SaveState(msgspec.Struct, frozen=True, tag="save_state"):
    """Write state.json from the model after the event."""


class CloseUnstarted(msgspec.Struct, frozen=True, kw_only=True, tag="close_unstarted"):
    """Mark an attempt in the ledger whose program was never started, so that it discards no
    updates.
    """

    number: int
    why: str


class AddEvent(msgspec.Struct, frozen=True, tag="add_event"):
    """Write an event into the ledger and send it to the dashboards."""

    event: Event


class UpdateAttempt(msgspec.Struct, frozen=True, kw_only=True, tag="update_attempt"):
    """Set columns of an attempt's row in the ledger."""

    number: int
    values: dict[str, Any]


class SaveConfigurations(msgspec.Struct, frozen=True, tag="save_configurations"):
    """Write these configurations into the ledger, and send all to the dashboards."""

    records: tuple[ConfigurationRecord, ...]


class Foresee(msgspec.Struct, frozen=True, kw_only=True, tag="foresee"):
    """Predict the peak of this configuration. Answered by `Foreseen`."""

    number: int
    settings: Settings
    gpu: GpuSample
    """The smallest one that it uses."""
    earlier: tuple[Configuration, ...]
    """The configurations before it."""


class FollowWorkers(msgspec.Struct, frozen=True, tag="follow_workers"):
    """The workers of the program have begun again: their output goes back."""


class DropRows(msgspec.Struct, frozen=True, tag="drop_rows"):
    """Dashboards discard the metric rows from this update on: a restart resumed before it.
    Answered by `RowsDropped`.
    """

    update: int


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """Answer a client. Ignored if it has disconnected."""

    client: int
    answer: Answer


class GiveUp(msgspec.Struct, frozen=True, kw_only=True, tag="give_up"):
    """The supervisor cannot do what it was started for: it exits with this error."""

    why: str
    usage: bool = False


Effect = (
    Launch
    | Signal
    | TypeAnswer
    | ClearLeftovers
    | Examine
    | KeepCheckpoint
    | ReadStates
    | CheckSaved
    | HoldState
    | ReleaseState
    | DiscardBeforeSpike
    | AskRanks
    | SaveState
    | CloseUnstarted
    | AddEvent
    | UpdateAttempt
    | SaveConfigurations
    | DropRows
    | Foresee
    | FollowWorkers
    | Reply
    | GiveUp
)
