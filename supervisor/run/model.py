"""The run as one frozen value, and the helpers with which rules change it.

A rule is a function from a model to a model. It asks for effects with `emit`, `note`, `ask` and
`move`; `step` hands them out. Rules never read a file, a clock or a process: what they need is in
the model or in the event.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.killed import state_word
from memtop.supervisor.monitor.values import GpuSample
from memtop.supervisor.recovery.values import Advice, Trend
from memtop.supervisor.run.effects import AddEvent, AskRanks, Effect, SaveState
from memtop.supervisor.run.events import AgentAnswer, NamedProcess, Now, Requested, Sampled, States
from memtop.supervisor.run.grip import Asked, Grip
from memtop.supervisor.run.output.values import Seen
from memtop.supervisor.run.pending_restart import PendingRestart
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.record.configurations import Configurations
from memtop.supervisor.run.record.folder import StateFile
from memtop.supervisor.run.stop_ladder import StopLadder, Waits
from memtop.supervisor.run.trial_state import TrialState
from memtop.supervisor.wire import Change, Checkpoint, Event, Phase, Proposal

_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.CREATED: frozenset({Phase.QUEUED, Phase.STARTING, Phase.FAILED, Phase.STOPPED}),
    Phase.QUEUED: frozenset({Phase.STARTING, Phase.FAILED, Phase.STOPPED}),
    Phase.STARTING: frozenset({Phase.TRAINING, Phase.STOPPING, Phase.RESTARTING, Phase.FINISHED, Phase.STOPPED, Phase.FAILED}),
    Phase.TRAINING: frozenset({Phase.STOPPING, Phase.RESTARTING, Phase.FINISHED, Phase.STOPPED, Phase.FAILED}),
    # A stop may be requested while a restart waits for the program to end, and vice versa. The
    # trainer goes on if it cannot save.
    Phase.STOPPING: frozenset({Phase.TRAINING, Phase.RESTARTING, Phase.FINISHED, Phase.STOPPED, Phase.FAILED}),
    # A restart may turn out to be impossible when the program has stopped, or has done its last
    # update.
    Phase.RESTARTING: frozenset({Phase.STARTING, Phase.TRAINING, Phase.STOPPING, Phase.FINISHED, Phase.STOPPED, Phase.FAILED}),
    # Final until someone restarts the run.
    Phase.FINISHED: frozenset({Phase.STARTING}),
    Phase.STOPPED: frozenset({Phase.STARTING}),
    Phase.FAILED: frozenset({Phase.STARTING}),
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a run that never change."""

    name: str
    folder: str
    created: float
    settings: Settings | None = None
    """The settings with which the run was created."""
    command: tuple[str, ...] = ()
    """The external command; empty for the built-in trainer."""
    choice: str | None = None
    """Which preset and GPU memtop chose for it, and why."""
    on_oom: str = "stop"
    """auto | ask | stop"""
    waits: bool = False
    """Whether its first attempt waits for other runs or for a free GPU."""


class AttemptStage(str, Enum):
    """The stage of an attempt."""

    RUNNING = "running"
    CLEARING = "clearing"
    """The program has ended; leftover processes are being ended."""
    EXAMINING = "examining"
    """The post-mortem reads its log."""
    OVER = "over"


class CurrentAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The newest attempt whose program was started."""

    number: int
    started: float
    """Seconds since the epoch."""
    since: float = 0.0
    """On the monotonic clock: when this supervisor started or adopted the program."""
    earlier_seconds: float = 0.0
    """How long the attempts before it ran, together."""
    stage: AttemptStage = AttemptStage.RUNNING
    ended: float | None = None
    exit_status: int | None = None
    ended_by: int | None = None
    """See `RunState`."""

    def seconds_until(self, now: float) -> float:
        """How long this attempt and those before it ran, together."""
        return self.earlier_seconds + max(0.0, (now if self.ended is None else self.ended) - self.started)


class Purpose(str, Enum):
    """Why a command was sent to the ranks."""

    STOP = "stop"
    FREE = "free"
    CHECKPOINT = "checkpoint"
    EDIT = "edit"
    LEAK = "leak"
    """Save before the restart that ends a leak."""
    TRIAL = "trial"
    """Save before a trial, change the settings for it, or change them back."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A command that was sent to ranks and not answered yet."""

    purpose: Purpose
    attempt: int
    client: int | None = None
    request: int = 0


class Cause(str, Enum):
    """Why an attempt is started."""

    START = "start"
    """The run begins, or its supervisor was started in order to restart it."""
    QUEUE = "queue"
    """The run has waited, and its turn has come."""
    REQUEST = "request"
    """A client requested the restart of a run that is not running."""
    PENDING = "pending"
    """A restart was requested while the program ran."""
    INHERITED = "inherited"
    """The same, requested from an earlier supervisor, which ended before it could restart."""
    DEATH = "death"
    """The program ran out of memory and is restarted with a remedy."""
    TRIAL = "trial"


class Launching(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that is being started."""

    number: int
    cause: Cause
    change: Change
    reason: str
    settings: Settings | None
    allocator: str
    knobs: dict[str, str] = {}
    client: int | None = None
    request: int = 0


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """A restart that begins as soon as the state to which it returns is protected."""

    change: Change
    client: int | None = None
    request: int = 0


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What a new supervisor found, and acts on when all reports have been replayed."""

    change: Change | None
    state: StateFile | None
    is_open: bool
    """The ledger does not have the end of the newest attempt."""
    outcome: str | None
    summary: str | None
    """Why it ended, as far as the ledger knows."""
    trial: dict[str, Any] | None


class AttemptVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, according to its reports, its exit status and its last lines."""

    phase: Phase
    reason: str | None = None
    diagnosis: dict[str, Any] | None = None
    ended_by: int | None = None
    """See `RunState`."""


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """A client that waits for its request to be completed."""

    client: int
    request: int
    purpose: str
    """stop | restart"""
    attempt: int = 0
    """The attempt at the time of the request."""
    accepts: str | None = None
    """The answer to send as soon as the restart can certainly begin; None once it was sent."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """All that the supervisor knows about a run at one moment."""

    run: Run
    supervisor_pid: int = 0
    now: Now = Now(0.0, 0.0)
    effects: tuple[Effect, ...] = ()
    """The effects that rules have requested for this event. `step` returns and removes them."""
    phase: Phase = Phase.CREATED
    reason: str | None = None
    settings: Settings | None = None
    attempt: CurrentAttempt | None = None
    adopted: bool = False
    alive: bool = False
    """The training program exists."""
    trainer_pid: int | None = None
    torch_loaded: bool = False
    """Whether the program has loaded torch, as far as it was looked up: until its first update."""
    stopped: tuple[int, ...] = ()
    """The program or its ranks, as far as a signal has stopped them: SIGSTOP, Ctrl-Z."""
    watched: bool = False
    """A dashboard shows the run."""
    disk_free: int | str | None = None
    """Bytes free on the run's disk, or why that cannot be read; None while no rule needs it."""
    progress: Progress = Progress()
    output: Seen | None = None
    """What the output of the present attempt says; None for memtop's own trainer."""
    states: States = States()
    saved_by_program: Checkpoint | None = None
    """The newest checkpoint that an external command has reported, as it was found on the disk."""
    rate_at_save: float | None = None
    """The learning rate when it was found."""
    configurations: Configurations = Configurations()
    newest_number: int = 0
    """The number of the newest attempt in the ledger, started or not."""
    launching: Launching | None = None
    opening: Opening | None = None
    verdict: AttemptVerdict | None = None
    """Of the attempt whose end is being examined."""
    repeated: str | None = None
    """Which updates the present attempt repeats because they were not saved, in words."""
    waits: Waits = Waits()
    ladder: StopLadder | None = None
    """While the attempt is being stopped."""
    signalled: str | None = None
    """The last signal of the stop and the processes that it was sent to, in words."""
    left_over: tuple[NamedProcess, ...] = ()
    """Processes that the program left behind and that were ended."""
    restart: PendingRestart | None = None
    """A restart after a failure, which has not begun yet."""
    waited_at: int | None = None
    """The newest saved update when a restart last had space on the disk again; None if none has
    waited for that.
    """
    holding: Holding | None = None
    pending: Change | None = None
    """A requested restart; it begins when the program has ended."""
    proposal: Proposal | None = None
    stalled: str | None = None
    """If the program is being ended because it hangs: the words after which it hung."""
    allocator: str = ""
    """Allocator options that memtop gives to an external command."""
    grip: Grip | None = None
    """If the external command is built on Hugging Face's Trainer, what its agent reported."""
    knobs: dict[str, str] = {}
    """The settings that memtop gives to such a program, by the names of `--set`."""
    asked: Asked | None = None
    """What the first update of this attempt must show; None once it has, or if nothing was asked
    for."""
    agents: frozenset[int] = frozenset()
    """Ranks whose agent is connected."""
    asks: dict[int, Ask] = {}
    newest_ask: int = 0
    held: tuple[Requested, ...] = ()
    """Requests that wait until the program's ranks have connected to this supervisor."""
    waiters: tuple[Waiter, ...] = ()
    sample: Sampled | None = None
    """The newest sample of the machine."""
    host_bytes: int | None = None
    """The last known host memory of this attempt's processes, in bytes."""
    trends: tuple[Trend, ...] = ()
    own_trends: tuple[Trend, ...] = ()
    leak_handled: bool = False
    """Whether memtop has acted on a leak of this attempt."""
    leak_reason: str = ""
    advice: Advice | None = None
    trial: TrialState | None = None
    """The newest trial."""
    shape_key: tuple[Settings | None, Grip | None, bool, str] = (None, None, False, "")
    """What shapes the peak of these settings, or of the user's own program, on a GPU or not."""
    warnings: dict[str, str] = {}
    """By topic."""
    announced: frozenset[tuple[str, float]] = frozenset()
    """Events that an earlier supervisor added for this attempt's reports: their kind, and the
    report's time.
    """

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest saved state."""
        return self.states.newest

    @property
    def saved(self) -> int | None:
        """The newest saved update; None if there is no complete state."""
        newest = self.states.newest if self.grip is None else self.states.program
        return newest.updates if newest is not None and newest.complete else None

    @property
    def by_output(self) -> bool:
        """Whether the output tells how far the training is: no agent counts updates, or it counts
        other ones."""
        return self.output is not None and (self.progress.step is None or self.output.agrees is False)

    @property
    def update(self) -> int | None:
        """The newest update of this attempt; None before its first."""
        return self.output.update if self.by_output and self.output is not None else self.progress.update

    @property
    def total_updates(self) -> int | None:
        """As the program has reported it, or printed."""
        printed = self.output.total_updates if self.output is not None else None
        return printed if self.progress.total_updates is None else self.progress.total_updates

    @property
    def number(self) -> int:
        """Of the newest attempt whose program was started; 0 before the first."""
        return self.attempt.number if self.attempt is not None else 0

    @property
    def word(self) -> str:
        """The phase as people read it."""
        return state_word(self.phase.value, self.attempt.ended_by if self.attempt is not None else None)

    @property
    def on_gpu(self) -> bool:
        return bool(self.progress.devices)

    @property
    def smallest_gpu(self) -> GpuSample | None:
        """Of those that the run uses; None without one, or if its size is not known."""
        uuids = set(self.progress.devices.values())
        gpus = self.sample.machine.gpus if self.sample is not None else ()
        own = [gpu for gpu in gpus if gpu.uuid in uuids and gpu.total_bytes]
        return min(own, key=lambda one: one.total_bytes or 0, default=None)

    @property
    def proven(self) -> Settings | None:
        """The settings that every change starts from: during a trial those before it."""
        on_trial = self.trial.proven if self.trial is not None else None
        return on_trial or self.settings


def emit(model: Model, *effects: Effect) -> Model:
    """Request effects, which are carried out in this order."""
    return replace(model, effects=(*model.effects, *effects))


def note(model: Model, kind: str, message: str, data: dict[str, Any] | None = None) -> Model:
    """Add an event to the run's log and send it to the dashboards."""
    number = model.attempt.number if model.attempt is not None else 0
    return emit(model, AddEvent(Event(time=model.now.time, attempt=number, kind=kind, message=message, data=data or {})))


def move(model: Model, phase: Phase, reason: str | None = None) -> Model:
    """Enter a phase and write it to state.json, where the next supervisor finds it."""
    assert phase in _NEXT[model.phase], f"{model.phase.value} cannot become {phase.value}"
    return emit(replace(model, phase=phase, reason=reason), SaveState())


def not_by_signal(model: Model) -> Model:
    """A restart was refused: the run's state no longer says what ended its program."""
    return replace(model, attempt=replace(model.attempt, ended_by=None) if model.attempt is not None else None)


def ask(
    model: Model,
    name: str,
    ranks: frozenset[int],
    purpose: Purpose,
    values: dict[str, Any] | None = None,
    *,
    client: int | None = None,
    request: int = 0,
) -> Model:
    """Send a command to the agents of these ranks; the event `Answered` has the same
    number.
    """
    assert model.attempt is not None
    number = model.newest_ask + 1
    pending = Ask(purpose=purpose, attempt=model.attempt.number, client=client, request=request)
    model = replace(model, newest_ask=number, asks={**model.asks, number: pending})
    return emit(model, AskRanks(ask=number, name=name, ranks=ranks, values=values))


def warn(model: Model, topic: str, text: str | None) -> Model:
    """Set or remove the warning of a topic."""
    if model.warnings.get(topic) == text:
        return model
    others = {name: words for name, words in model.warnings.items() if name != topic}
    return replace(model, warnings=others if text is None else {**others, topic: text})


def is_connected(model: Model, command: str) -> bool:
    """Whether this command can be sent to rank 0 now."""
    return 0 in model.agents and (model.progress.offers is None or command in model.progress.offers)


def refused(answers: tuple[AgentAnswer, ...]) -> str | None:
    """Why a command was not carried out; None if it was."""
    if not answers:
        return "the training process is gone"
    return next((answer.message for answer in answers if not answer.ok), None)
