"""A run without processes and files: effects are carried out on plain values, and the supervisor
can be killed at any point.

The ledger, state.json, the program and the saved states are plain values. After each effect the
invariants are checked; what may happen to a run is in `life.py`.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter, deque
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from memtop.presets import load_presets, load_recipes, resolve
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.configuration import configuration_key as key_of
from memtop.supervisor.run import effects as do
from memtop.supervisor.run import events as on
from memtop.supervisor.run import reports as said
from memtop.supervisor.run.model import AttemptStage, Cause, Model, Run
from memtop.supervisor.run.record.checkpoints import newest_until
from memtop.supervisor.run.record.configurations import ConfigurationRecord
from memtop.supervisor.run.record.folder import StateFile
from memtop.supervisor.run.record.ledger import Attempt
from memtop.supervisor.run.record.outbox import Outbox
from memtop.supervisor.run.rules.taking_over import newest_started
from memtop.supervisor.run.state import state_file
from memtop.supervisor.run.step import step
from memtop.supervisor.wire import Change, Checkpoint, Event, Outcome, Phase

SETTINGS = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])
GIB = 1 << 30
LAST_UPDATE = 200


class Killed(Exception):
    """The supervisor was killed here."""


class MemoryLedger:
    """The ledger as values. `full` refuses every write, as a full disk does."""

    path = Path("/runs/a/ledger.sqlite")

    def __init__(self) -> None:
        self.full = False
        self.rows: dict[int, Attempt] = {}
        self.events: list[Event] = []
        self.records: dict[int, ConfigurationRecord] = {}

    def _check(self) -> None:
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")

    def add_event(self, event: Event) -> Event:
        self._check()
        self.events.append(replace(event, id=len(self.events) + 1))
        return self.events[-1]

    def update_attempt(self, number: int, **values: Any) -> None:
        self._check()
        self.rows[number] = replace(self.rows[number], **values)

    def save_configuration(self, record: ConfigurationRecord) -> None:
        self._check()
        self.records[record.configuration.number] = record

    def add_attempt(self, row: Attempt) -> None:
        self._check()
        assert row.number not in self.rows, "a number is given once"
        self.rows[row.number] = row


class Program:
    """One start of the training program."""

    def __init__(self, effect: do.Launch, update: int) -> None:
        self.number, self.settings, self.allocator = effect.number, effect.settings, effect.allocator
        self.knobs = effect.knobs
        """Of one that is built on Hugging Face's Trainer."""
        self.update = update
        self.resumes_after = update
        """If it begins before this, its agent ends it."""
        self.alive = True
        self.journal: list[said.Report] = []
        self.stored = 0
        """How far the ledger has the journal."""
        self.loaded = self.connected = self.leftovers = False
        self.asked_to_stop = False
        self.status: int | None = None
        self.ended = 0.0
        self.cause = Kind.NOT_MEMORY


class World:
    """Everything outside of the model. `kill_after` counts down effects until the supervisor is
    killed."""

    def __init__(self, seed: int = 0, *, external: bool = False, trainer: bool = False, on_oom: str = "auto") -> None:
        """`external`: the program is the user's own; `trainer`: and built on Hugging Face's
        Trainer."""
        self.random = random.Random(seed)
        self.external, self.trainer = external, trainer
        self.run = Run(
            name="a", folder="/runs/a", created=1.0, settings=None if external else SETTINGS, on_oom=on_oom, command=("train",)
        )
        self.time = 1000.0
        self.shift = 1e6
        """The wall clock minus the monotonic clock; act_time sets the wall clock now and then."""
        self.ledger = MemoryLedger()
        self.state: StateFile | None = None
        self.program: Program | None = None
        self.kept: list[int] = []
        self.held: int | None = None
        self.aside: list[int] = []
        self.disk_full = False
        self.began_again = False
        """The user's own program has begun from zero when it was to resume."""
        self.failed: set[str] = set()
        """The configurations that ran out of memory, by key."""
        self.begun: set[int] = set()
        """The numbers of the attempts whose program was started."""
        self.starts: Counter[str] = Counter()
        """By the token in its reason, how often a restart was carried out."""
        self.model: Model | None = None
        self.later: deque[on.Occurrence] = deque()
        """Results that are still to come."""
        self.kill_after: int | None = None
        self.read = 0
        self.requests = 0
        self.stops: set[int] = set()
        self.accepted: dict[str, int] = {}
        """Restarts that were accepted: the number of events written until then."""
        self.happened: Counter[str] = Counter()
        self.steps = self.kills = 0

    @property
    def wall(self) -> float:
        """The time that the wall clock shows."""
        return self.time + self.shift

    # --- the supervisor ---------------------------------------------------------------------------

    def start(self, change: Change | None = None) -> None:
        """A supervisor begins; `change`: it was started in order to restart the run."""
        assert self.model is None
        rows = tuple(self.ledger.rows.values())
        unstarted = frozenset(row.number for row in rows if row.ended is None and not self._has_program(row.number))
        newest = newest_started(rows, unstarted)
        self.outbox = Outbox(self.ledger)  # type: ignore[arg-type] - the same methods on plain values
        self.later.clear()
        self.read = 0
        self.model = Model(run=self.run, settings=self.run.settings, supervisor_pid=7)
        announced = {
            (event.kind, event.data["time"])
            for event in self.ledger.events
            if newest is not None and event.attempt == newest.number and event.data.get("time") is not None
        }
        trials = [event.data for event in self.ledger.events if event.kind == "trial"]
        opened = on.SupervisorStarted(
            attempts=rows,
            unstarted=unstarted,
            state=self.state,
            records=tuple(self.ledger.records.values()),
            announced=frozenset(announced),
            trial=trials[-1] if trials else None,
            states=self.states(),
            change=change,
        )
        try:
            self._handle(opened)
            if newest is not None:
                program = self.program
                if program is not None and program.number == newest.number:
                    for report in program.journal[: program.stored]:
                        self._handle(on.Reported(rank=0, report=report, replayed=True))
                    self.read = program.stored
                    if newest.ended is not None:
                        self._read_reports()
                self._handle(on.Replayed())
        except Killed:
            self._forget()

    def handle(self, event: on.Occurrence) -> None:
        try:
            self._handle(event)
        except Killed:
            self._forget()

    def _forget(self) -> None:
        """The supervisor is gone, with all that it had not written."""
        self.model, self.kill_after = None, None
        self.kills += 1
        self.later.clear()
        if self.program is not None:
            self.program.connected = False

    def _handle(self, event: on.Occurrence) -> None:
        events = deque([event])
        while events:
            assert self.model is not None
            self.steps += 1
            self.model, effects = step(self.model, events.popleft(), on.Now(self.wall, self.time))
            assert self.model.effects == ()
            for effect in effects:
                self.happened[type(effect).__name__] += 1
                following = self._perform(effect)
                self.check()
                if following is not None:
                    events.append(following)
                self._maybe_kill()

    def _maybe_kill(self) -> None:
        if self.kill_after is not None:
            self.kill_after -= 1
            if self.kill_after <= 0:
                raise Killed

    def _has_program(self, number: int) -> bool:
        return number in self.begun

    def states(self) -> on.States:
        found = sorted({*self.kept, *([self.held] if self.held is not None else [])}, reverse=True)
        kept = tuple(checkpoint(update) for update in found)
        if self.trainer:
            return on.States(program=checkpoint(self.kept[-1]) if self.kept else None)
        return on.States(newest=checkpoint(self.kept[-1]) if self.kept else None, kept=kept)

    # --- effects ----------------------------------------------------------------------------------

    def _perform(self, effect: do.Effect) -> on.Occurrence | None:
        assert self.model is not None
        match effect:
            case do.AddEvent(event=event):
                self.outbox.add_event(event)
            case do.SaveState():
                return self._save_state()
            case do.UpdateAttempt(number=number, values=values):
                self.outbox.update_attempt(number, values)
            case do.SaveConfigurations(records=records):
                self.outbox.save_configurations(records)
            case do.CloseUnstarted(number=number, why=why):
                self.outbox.close_unstarted(number, why, self.wall)
            case do.Launch():
                return self._launch(effect)
            case do.Signal(name=name, target=target):
                return self._signal(name, target)
            case do.ClearLeftovers():
                if self.program is not None:
                    self.program.leftovers = False
                self.later.append(on.LeftoversCleared(log=on.LogEnd(lines=("bye",)), states=on.States()))
            case do.Examine():
                self.later.append(self._examined())
            case do.ReadStates():
                return on.StatesRead(self.states())
            case do.HoldState(update=update):
                self.held = newest_until(self.states().kept, update).updates
                return on.StateHeld()
            case do.KeepCheckpoint():
                self.later.append(on.CheckpointKept(problem="no space" if self.disk_full else None))
            case do.ReleaseState():
                self.held = None
            case do.AskRanks(ask=number, name=name, values=values):
                self.later.append(self._asked(number, name, values or {}))
            case do.Reply(answer=answer):
                if answer.outcome is Outcome.ACCEPTED and answer.id in self.stops:
                    self.accepted.clear()  # all that was asked for before is called off
                elif answer.outcome is Outcome.ACCEPTED and answer.id > 0:
                    self.accepted[f"r{answer.id}"] = len(self.ledger.events)
            case do.GiveUp():
                raise Killed
        return None

    def _save_state(self) -> on.WriteChecked | None:
        assert self.model is not None
        problem = "state.json: cannot be written" if self.disk_full else None
        if problem is None:
            self.state = state_file(self.model, "/tmp/s", 1)
        known = self.model.warnings.get("state")
        return None if known == problem else on.WriteChecked(topic="state", problem=problem)

    def _launch(self, effect: do.Launch) -> on.Occurrence:
        """The ledger, the states, the command and the shim: the supervisor may be killed between
        any two of them."""
        assert self.model is not None
        self.outbox.retry()
        row = Attempt(
            number=effect.number, reason=effect.reason, settings=effect.settings, started=self.wall, change=effect.change
        )
        try:
            self.ledger.add_attempt(row)
        except sqlite3.Error as error:
            return on.LaunchRefused(number=effect.number, why=str(error))
        self._maybe_kill()
        moved: list[int] = []
        if effect.state_before is not None:
            update = newest_until(self.states().kept, effect.state_before).updates
            moved = [state for state in self.kept if state > (update or 0)]
            self.kept = sorted({*(state for state in self.kept if state <= (update or 0)), update or 0})
            self.aside += moved
        self._maybe_kill()
        if self.disk_full:
            self.kept, self.aside = sorted({*self.kept, *moved}), [state for state in self.aside if state not in moved]
            self.outbox.close_unstarted(effect.number, "no space", self.wall)
            return on.LaunchRefused(number=effect.number, why="command.json: no space", recorded=True)
        self._check_start(effect)
        resumed = self.kept[-1] if self.kept and (effect.grip is not None or not self.external) else 0
        self.program = Program(effect, resumed)
        if self.trainer and resumed and self.random.random() < 0.1:
            self.program.update = 0
        self.read = 0
        self.begun.add(effect.number)
        self.starts[token(effect.reason)] += 1
        self._maybe_kill()
        aside = "set-aside" if moved else None
        program = checkpoint(resumed) if self.trainer and resumed else None
        return on.Launched(number=effect.number, started=self.wall, states=self.states(), set_aside=aside, resumed=program)

    def _signal(self, name: str, target: do.SignalTarget) -> on.Signalled:
        program = self.program
        if program is None or not program.alive or target is do.SignalTarget.STOPPED:
            return on.Signalled(name=name, processes=())
        if name == "SIGKILL":
            self._end(-9)
        elif self.random.random() < 0.5:
            self._end(-2 if name == "SIGINT" else -15)
        return on.Signalled(name=name, processes=(on.NamedProcess(1, "python"),))

    def _asked(self, number: int, name: str, values: dict[str, Any]) -> on.Answered:
        program = self.program
        if program is None or not program.connected:
            return on.Answered(ask=number, answers=())
        ok = self.random.random() < 0.8
        result: dict[str, Any] = {"update": program.update + 1}
        if ok and name == "checkpoint":
            ok = self._save()
        if values.get("only_saved") and self.disk_full:
            ok, result = False, {"unsaved": True}
        if ok and name == "stop":
            program.asked_to_stop = True
        return on.Answered(ask=number, answers=(on.AgentAnswer(rank=0, ok=ok, message="" if ok else "no", result=result),))

    def _examined(self) -> on.Examined:
        program = self.program
        kind = program.cause if program is not None else Kind.NOT_MEMORY
        if program is not None and program.settings is not None and kind not in (Kind.NOT_MEMORY, Kind.DISK_FULL):
            self.failed.add(key_of(program.settings))
        if self.trainer and program is not None and kind not in (Kind.NOT_MEMORY, Kind.DISK_FULL):
            self.failed.add(own_key(program.knobs))
        diagnosis = Diagnosis(kind=kind, confidence=0.99, summary=f"it died of {kind.value}", source="record")
        free = 0 if self.disk_full else 100 * GIB
        facts = on.RemedyFacts(kept_states=self.states().kept, disk_free_bytes=free, deepspeed=True)
        return on.Examined(diagnosis=diagnosis, facts=facts)

    def tick(self) -> None:
        """As `Supervisor` does it."""
        if self.model is None:
            return
        try:
            if not self.disk_full:
                self.outbox.retry()
            if self.outbox.problem != self.model.warnings.get("ledger"):
                self._handle(on.WriteChecked(topic="ledger", problem=self.outbox.problem))
            attempt, program = self.model.attempt, self.program
            if attempt is not None and attempt.stage is not AttemptStage.OVER and program is not None:
                self._read_reports()
                if attempt.stage is AttemptStage.RUNNING and not program.alive:
                    self._handle(on.ProgramEnded(ended=program.ended, status=program.status))
            model = self.model
            waits = model.restart is not None and model.restart.waiting.disk_bytes is not None
            free = (0 if self.disk_full else 100 * GIB) if waits else None
            alive = program is not None and program.alive
            self._handle(on.Tick(alive=alive, trainer_pid=1 if alive else None, disk_free=free))
            self._save_state()
        except Killed:
            self._forget()

    def _read_reports(self) -> None:
        program = self.program
        assert program is not None
        while self.read < len(program.journal):
            report = program.journal[self.read]
            self.read += 1
            if not self.disk_full:
                program.stored = self.read
            self._handle(on.Reported(rank=0, report=report))

    # --- invariants -------------------------------------------------------------------------------

    def _check_start(self, effect: do.Launch) -> None:
        assert self.model is not None
        assert self.model.launching is not None
        assert self.program is None or not self.program.alive, "two programs at once"
        assert self.program is None or not self.program.leftovers, "what the program left behind still holds its memory"
        if self.model.launching.cause is not Cause.DEATH:
            return
        if self.trainer:
            assert effect.grip is not None, "a program that memtop does not hold is started again by itself"
            assert self.kept, "a program without a checkpoint is started again by itself"
            assert not self.began_again, "a program that has begun from zero is started again by itself"
            assert own_key(effect.knobs) not in self.failed, "settings that ran out of memory are tried again by itself"
            return
        assert effect.settings is not None, "an external command is started again by itself"
        assert key_of(effect.settings) not in self.failed, "a configuration that ran out of memory is tried again by itself"

    def check(self) -> None:
        """What holds after every effect."""
        assert all(count <= 1 for name, count in self.starts.items() if name), f"a restart was carried out twice: {self.starts}"
        model = self.model
        assert model is None or model.phase is not Phase.FINISHED or model.proposal is None, "what finished needs no remedy"
        if model is None or model.phase.final or model.opening is not None or model.phase is Phase.CREATED:
            return
        program = self.program
        assert model.attempt is None or model.attempt.stage is not AttemptStage.OVER or model.restart or model.launching, (
            model.phase
        )
        if model.attempt is not None and model.attempt.stage is AttemptStage.RUNNING and model.launching is None:
            assert program is not None
            assert program.number == model.attempt.number

    def check_promises(self) -> None:
        """When nothing is under way any more, every accepted restart was carried out or called off
        by name."""
        for name, written in self.accepted.items():
            if self.starts[name] == 0:
                kinds = {event.kind for event in self.ledger.events[written:]}
                assert kinds & {"failed", "stopped", "finished", "attempt", "warning"}, f"{name} was forgotten"


def token(reason: str) -> str:
    """`r12` of `r12: restart with batch 4`; empty for a restart that no client asked for."""
    word = reason.partition(":")[0]
    return word if word[:1] in ("r", "c") and word[1:].isdigit() else ""


def own_key(knobs: dict[str, Any]) -> str:
    """Of what memtop gave to the user's own program."""
    return " ".join(f"{name}={value}" for name, value in sorted(knobs.items()))


def checkpoint(update: int) -> Checkpoint:
    return Checkpoint(path=f"/s{update}", updates=update, samples_seen=32 * update, size_bytes=GIB, complete=True)
