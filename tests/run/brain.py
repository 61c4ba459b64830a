"""Drives `step` with values: a model at some moment, the events given to it, and the effects that
it requests."""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec.structs import replace

from memtop.presets import load_presets, load_recipes, resolve
from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.run.effects import AddEvent, ClearLeftovers, Effect, Reply
from memtop.supervisor.run.events import (
    Examined,
    LeftoversCleared,
    Now,
    Occurrence,
    ProgramEnded,
    RemedyFacts,
    Replayed,
    Reported,
    Requested,
    States,
    SupervisorStarted,
    Tick,
)
from memtop.supervisor.run.model import CurrentAttempt, Model, Run
from memtop.supervisor.run.post_mortem.log_end import LogEnd
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.record.configurations import Configurations
from memtop.supervisor.run.record.folder import RunSpec, StateFile
from memtop.supervisor.run.record.ledger import Attempt
from memtop.supervisor.run.reports import Step
from memtop.supervisor.run.state import run_state
from memtop.supervisor.run.step import step
from memtop.supervisor.wire import Answer, Change, Checkpoint, Phase, Proposal, Restart, RunState, Stop
from tests.run.reported import reported

SETTINGS = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])
HALF = replace(SETTINGS, batch=SETTINGS.batch // 2, accumulation=SETTINGS.accumulation * 2)
MIB, GIB = 1 << 20, 1 << 30
RUN = Run(name="a", folder="/runs/a", created=1.0, settings=SETTINGS, on_oom="auto")
START = 900.0
WALL = 1e6
"""The wall clock minus the monotonic clock: a rule that mixes them up must fail."""

# What a program reports in its first update, in which memory runs out once.
HELLO = {"type": "hello", "time": 10.0, "rank": 0, "pid": 2, "offers": []}
PLAN = {"type": "plan", "time": 11.0, "updates": 0, "total_updates": 9, "device_uuid": None}
OOM = {
    "type": "oom",
    "time": 12.0,
    "survived": True,
    "update": 1,
    "message": "no memory",
    "error": "MemoryError",
    "rss_bytes": 300 * MIB,
}
SPLIT = {
    "type": "settings",
    "time": 13.0,
    "update": 1,
    "reason": "allocation failure",
    "changes": {"batch": HALF.batch, "accumulation": HALF.accumulation},
}
STEP = {
    "type": "step",
    "time": 14.0,
    "update": 1,
    "samples_seen": SETTINGS.effective_batch,
    "loss": 2.0,
    "rss_bytes": 200 * MIB,
}
# Its first configuration.
BEGUN = Configurations().begin_attempt(1, "start", SETTINGS, 9.0)

E = TypeVar("E")


def checkpoint(updates: int, size_bytes: int = MIB) -> Checkpoint:
    seen = updates * SETTINGS.effective_batch
    return Checkpoint(path=f"/s{updates}", updates=updates, samples_seen=seen, size_bytes=size_bytes, complete=True)


def states(*updates: int) -> States:
    """Kept states after these updates, the newest first."""
    kept = tuple(checkpoint(update) for update in updates)
    return States(newest=kept[0] if kept else None, kept=kept)


class Brain:
    """A run and what its rules have asked for so far."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.effects: list[Effect] = []
        self.now = 1000.0

    @property
    def wall(self) -> float:
        """The time that the wall clock shows."""
        return self.now + WALL

    def tell(self, event: Occurrence, *, after: float = 0.0) -> list[Effect]:
        """What the rules ask for when this happens, so many seconds later."""
        self.now += after
        self.model, effects = step(self.model, event, Now(self.wall, self.now))
        self.effects += effects
        return list(effects)

    def report(self, *values: dict[str, Any], rank: int = 0) -> list[Effect]:
        return [effect for one in values for effect in self.tell(Reported(rank=rank, report=reported(one)))]

    def tick(self, after: float = 0.2, **values: Any) -> list[Effect]:
        return self.tell(Tick(alive=True, **values), after=after)

    def asked(self, kind: type[E]) -> list[E]:
        """All effects of that kind so far."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def messages(self, kind: str) -> list[str]:
        """The lines of that kind in the run's log."""
        return [effect.event.message for effect in self.asked(AddEvent) if effect.event.kind == kind]

    def answers(self) -> list[Answer]:
        return [effect.answer for effect in self.asked(Reply)]


def training(update: int = 7, *, settings: Settings | None = SETTINGS, **values: Any) -> Brain:
    """A run that trains, after so many updates, with saved states after 5 and 3."""
    begun = Configurations().begin_attempt(1, "start", settings, START).saved()
    seen = update * SETTINGS.effective_batch
    known: dict[str, Any] = {
        "run": replace(RUN, settings=settings),
        "phase": Phase.TRAINING,
        "settings": settings,
        "attempt": CurrentAttempt(number=1, started=START, since=START),
        "alive": True,
        "newest_number": 1,
        "configurations": begun,
        "states": states(5, 3),
        "progress": Progress(
            step=Step(update=update, samples_seen=seen, time=990.0 + WALL, step_seconds=0.5), last_heard=990.0
        ),
    }
    return Brain(Model(**{**known, **values}))


def state_of(phase: Phase, attempt: int = 1, reason: str | None = None, **values: Any) -> StateFile:
    """What an earlier supervisor had written to state.json."""
    run = RunState(name="a", folder="/runs/a", state=phase, reason=reason, created=1.0, attempt=attempt)
    return StateFile(run=run, socket="", **values)


def row(number: int = 1, settings: Settings | None = SETTINGS, **values: Any) -> Attempt:
    return Attempt(
        number=number, reason=values.pop("reason", "start"), settings=settings, started=values.pop("started", 9.0), **values
    )


def taken_over(*rows: Attempt, reports: tuple[dict[str, Any], ...] = (), **values: Any) -> Brain:
    """A new supervisor of a run whose ledger has these attempts. `reports`: those that the
    supervisor before it has read."""
    brain = Brain(Model(run=RUN, settings=SETTINGS, supervisor_pid=7))
    brain.tell(SupervisorStarted(attempts=rows, **values))
    for one in reports:
        brain.tell(Reported(rank=0, report=reported(one), replayed=True))
    brain.tell(Replayed())
    return brain


def stop(brain: Brain) -> None:
    brain.tell(Requested(client=1, request=Stop(id=3), states=brain.model.states))


def restart(brain: Brain, change: Change | None = None, number: int = 1) -> None:
    brain.tell(Requested(client=1, request=Restart(id=number, change=change or Change()), states=brain.model.states))


def end(brain: Brain, status: int | None = 0, *kept: int) -> None:
    """The program ends, and so does what it left behind."""
    brain.tell(ProgramEnded(ended=brain.wall, status=status))
    assert brain.asked(ClearLeftovers)
    brain.tell(LeftoversCleared(log=LogEnd(lines=("boom",)), states=states(*kept) if kept else brain.model.states))


def proposal(brain: Brain) -> Proposal:
    shown = run_state(brain.model).proposal
    assert shown is not None
    return shown


def die(brain: Brain, kind: Kind = Kind.GPU_OOM, facts: RemedyFacts | None = None, problem: str | None = None) -> None:
    end(brain, 1)
    found = Diagnosis(kind=kind, confidence=0.97, summary=f"it died of {kind.value}")
    brain.tell(Examined(diagnosis=found, facts=facts or RemedyFacts(), problem=problem))


def spec(name: str, created: float = 1.0) -> RunSpec:
    return RunSpec(name=name, created=created, settings=SETTINGS, cwd="/", memtop_version="0")
