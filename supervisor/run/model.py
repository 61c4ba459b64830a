"""The run as one frozen value, and the few helpers with which rules change it.

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
from memtop.supervisor.run.effects import AddEvent, AskRanks, Effect, SaveState
from memtop.supervisor.run.events import AgentAnswer, Now, Sampled
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.wire import Change, Checkpoint, Event, Phase, Proposal

_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.CREATED: frozenset({Phase.STARTING, Phase.FAILED, Phase.STOPPED}),
    Phase.STARTING: frozenset({Phase.TRAINING, Phase.STOPPING, Phase.RESTARTING, Phase.FINISHED, Phase.STOPPED, Phase.FAILED}),
    Phase.TRAINING: frozenset({Phase.STOPPING, Phase.RESTARTING, Phase.FINISHED, Phase.STOPPED, Phase.FAILED}),
    # A stop may come while a restart waits for the program to end, and the other way round.
    Phase.STOPPING: frozenset({Phase.RESTARTING, Phase.FINISHED, Phase.STOPPED, Phase.FAILED}),
    # A restart may turn out to be impossible when the program has stopped.
    Phase.RESTARTING: frozenset({Phase.STARTING, Phase.STOPPING, Phase.STOPPED, Phase.FAILED}),
    # Final until someone restarts the run.
    Phase.FINISHED: frozenset({Phase.STARTING}),
    Phase.STOPPED: frozenset({Phase.STARTING}),
    Phase.FAILED: frozenset({Phase.STARTING}),
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What never changes about a run."""

    name: str
    folder: str
    created: float
    command: tuple[str, ...] = ()
    """The external command; empty for the built-in trainer."""
    on_oom: str = "stop"
    """auto | ask | stop"""


class Stage(str, Enum):
    """Where an attempt is."""

    RUNNING = "running"
    CLEARING = "clearing"
    """The program has ended; what it left behind is being ended."""
    EXAMINING = "examining"
    """The post-mortem reads its log."""
    OVER = "over"


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """The newest attempt whose program was started."""

    number: int
    started: float
    """Seconds since the epoch."""
    stage: Stage = Stage.RUNNING
    ended: float | None = None
    exit_status: int | None = None


class Purpose(str, Enum):
    """Why the ranks were asked to do something."""

    STOP = "stop"
    FREE = "free"
    CHECKPOINT = "checkpoint"
    EDIT = "edit"
    SAVE_BEFORE_LEAK = "save before leak"
    SAVE_BEFORE_TRIAL = "save before trial"
    TRIAL = "trial"
    """Change the settings for a trial, or back."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A command that ranks were asked to carry out and have not answered."""

    purpose: Purpose
    attempt: int
    client: int | None = None
    request: int = 0


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """All that the supervisor knows of a run, at one moment."""

    run: Run
    now: Now = Now(0.0, 0.0)
    effects: tuple[Effect, ...] = ()
    """What the rules have asked for since the event came in; `step` hands it out and leaves it empty."""
    phase: Phase = Phase.CREATED
    reason: str | None = None
    settings: Settings | None = None
    attempt: Attempt | None = None
    adopted: bool = False
    progress: Progress = Progress()
    checkpoint: Checkpoint | None = None
    """The newest saved state."""
    pending: Change | None = None
    """A restart that was asked for; it begins when the program has ended."""
    proposal: Proposal | None = None
    stalled: str | None = None
    """The words after which the program stood still, where it is being ended for that."""
    allocator: str = ""
    """Allocator options that memtop gives to an external command."""
    agents: frozenset[int] = frozenset()
    """Ranks whose agent is connected."""
    asks: dict[int, Ask] = {}
    newest_ask: int = 0
    sample: Sampled | None = None
    """The machine, as it was last sampled."""
    warnings: dict[str, str] = {}
    """By topic."""
    announced: frozenset[tuple[str, float]] = frozenset()
    """Events that an earlier supervisor made of this attempt's reports: their kind, and the report's time."""


def emit(model: Model, *effects: Effect) -> Model:
    """Ask for effects, to be performed in this order."""
    return replace(model, effects=(*model.effects, *effects))


def note(model: Model, kind: str, message: str, data: dict[str, Any] | None = None) -> Model:
    """Write a line of the run's log and send it to the viewers."""
    number = model.attempt.number if model.attempt is not None else 0
    return emit(model, AddEvent(Event(time=model.now.time, attempt=number, kind=kind, message=message, data=data or {})))


def move(model: Model, phase: Phase, reason: str | None = None) -> Model:
    """Go to the next phase and write it to state.json: what was decided outlives this supervisor."""
    assert phase in _NEXT[model.phase], f"{model.phase.value} cannot become {phase.value}"
    return emit(replace(model, phase=phase, reason=reason), SaveState())


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
    """Send a command to the agents of these ranks; `Answered` comes back with the number of the ask."""
    assert model.attempt is not None
    number = model.newest_ask + 1
    pending = Ask(purpose=purpose, attempt=model.attempt.number, client=client, request=request)
    model = replace(model, newest_ask=number, asks={**model.asks, number: pending})
    return emit(model, AskRanks(ask=number, name=name, ranks=ranks, values=values))


def warn(model: Model, topic: str, text: str | None) -> Model:
    """Set the warning of a topic, or take it away."""
    if model.warnings.get(topic) == text:
        return model
    others = {name: words for name, words in model.warnings.items() if name != topic}
    return replace(model, warnings=others if text is None else {**others, topic: text})


def is_connected(model: Model, command: str) -> bool:
    """Whether rank 0 can be asked for this command now."""
    return 0 in model.agents and (model.progress.offers is None or command in model.progress.offers)


def refused(answers: tuple[AgentAnswer, ...]) -> str | None:
    """Why what was asked for was not done; None where it was."""
    if not answers:
        return "the training process is gone"
    return next((answer.message for answer in answers if not answer.ok), None)
