"""A simulated run for the rules of a trial: a program, unread reports, and a supervisor that may be
replaced."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.presets import load_presets, load_recipes, resolve
from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.recovery.configuration import live_values
from memtop.supervisor.run import trial
from memtop.supervisor.run.record.configurations import same
from memtop.supervisor.run.reports import Oom, SettingsChanged, Step
from memtop.supervisor.run.trial import RECONNECT_SECONDS
from memtop.supervisor.run.trial_state import (
    AskChange,
    AskSave,
    PutBack,
    Record,
    ReplaceRestart,
    RequestRestart,
    RunFacts,
    TrialState,
)
from memtop.supervisor.wire import Change, Phase

FIRST = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])
BEFORE = replace(FIRST, batch=4, accumulation=4, workers=0, eval_batch=1, save_total_limit=2)
LIVE = Change(assignments={"workers": "100"})
BY_RESTART = Change(assignments={"save_total_limit": "100"})


def changed(base: Settings, change: Change, rows: list[Settings]) -> Settings:
    """The settings that a change leads to, with whole numbers only."""
    if change.configuration is not None:
        base = rows[change.configuration - 1]
    return replace(base, **{name: int(value) for name, value in change.assignments.items()})


class World:
    """A run with its program, its reports that nobody has read yet, and a supervisor that may be
    replaced."""

    def __init__(self, *, saves: bool = True, auto: bool = True) -> None:
        self.facts = RunFacts(
            phase=Phase.TRAINING, attempt=1, configuration=1, settings=BEFORE, connected=True, saves_on_request=saves
        )
        self.auto = auto
        self.rows = [BEFORE]
        self.program: Settings | None = BEFORE
        self.update = 10
        self.commands: list[tuple[str, dict[str, Any], bool]] = []
        """Name, values, and whether the trial has asked."""
        self.unread: list[Step | Oom | SettingsChanged] = []
        self.answers: list[tuple[str | None, int | None]] = []
        self.pending: Change | None = None
        self.waiting: Change | None = None
        self.refuse_launch = False
        self.faster = True
        self.trial: TrialState | None = None
        self.recorded: dict[str, Any] | None = None
        self.asked: list[object] = []
        self.tried = 99
        self.proven: set[tuple[int, int]] = {(BEFORE.workers, BEFORE.save_total_limit)}

    # --- the supervisor

    def know(self, **values: Any) -> None:
        self.facts = replace(self.facts, **values)

    def take(self, result: trial.Result) -> None:
        self.trial, actions = result
        for action in actions:
            self.perform(action)
        if not self.trial.running and self.trial.trial.state == "kept":
            self.proven.add((self.trial.after.workers, self.trial.after.save_total_limit))

    def perform(self, action: trial.Action) -> None:
        self.asked.append(action)
        match action:
            case Record(_, data):
                # As the ledger keeps it.
                self.recorded = msgspec.json.decode(msgspec.json.encode(data))
            case AskSave():
                self.ask("save", {})
            case AskChange(values):
                self.ask("change", values)
            case RequestRestart(change):
                self.restart(change)
            case ReplaceRestart(change):
                assert self.waiting is not None
                self.waiting = change
            case PutBack(before, _):
                assert self.facts.phase.final
                self.change_settings(before)

    def ask(self, name: str, values: dict[str, Any]) -> None:
        if self.program is None or not self.facts.connected:
            self.answers.append(("the training process is gone", None))
        else:
            self.commands.append((name, values, True))

    def change_settings(self, after: Settings) -> None:
        if not same(after, self.facts.settings):
            self.rows.append(after)
            self.know(settings=after, configuration=len(self.rows))

    def base(self) -> Settings:
        proven = self.trial.proven if self.trial is not None else None
        assert self.facts.settings is not None
        return proven or self.facts.settings

    def restart(self, change: Change) -> None:
        if self.facts.phase.final or self.waiting is not None:
            self.launch(change)
        else:
            self.pending = change
            self.know(phase=Phase.RESTARTING, restart_requested=True)

    def launch(self, change: Change) -> None:
        own = self.trial is not None and change in (self.trial.change, self.trial.undo)
        if self.refuse_launch:
            self.refuse_launch, self.pending, self.waiting = False, None, None
            phase = self.facts.phase if self.facts.phase.final else Phase.FAILED
            self.know(phase=phase, restart_requested=False, restart_waiting=False)
            if own and self.trial is not None:
                self.take(trial.restart_refused(self.trial, self.facts, "no space"))
            return
        after = changed(self.base(), change, self.rows)
        if not own:
            self.check(after)
        self.pending = self.waiting = None
        self.program, self.unread, self.commands = after, [], []
        self.change_settings(after)
        self.know(
            phase=Phase.STARTING,
            attempt=self.facts.attempt + 1,
            start_update=self.update,
            restart_requested=False,
            restart_waiting=False,
            died_of=None,
            connected=True,
            at_the_end=False,
        )
        if self.trial is not None:
            self.take(trial.attempt_begun(self.trial, self.facts, change))

    def check(self, found: Settings) -> None:
        assert (found.workers, found.save_total_limit) in self.proven

    # --- what may happen

    def begin(self, faster: int = 0, live: bool | None = None) -> None:
        change = BY_RESTART if (faster % 2 if live is None else not live) else LIVE
        self.tried += 1
        change = replace(change, assignments=dict.fromkeys(change.assignments, str(self.tried)))
        if self.trial is not None and self.trial.running:
            return
        try:
            trial.check_request("a", self.facts, self.trial)
        except MemtopError:
            return
        self.faster = faster < 4
        self.take(trial.begin(change, changed(self.base(), change, self.rows), self.facts, 1.0))

    def train(self, updates: int = 1) -> None:
        """The program does updates; at each boundary it carries out what it was asked for."""
        for _ in range(updates):
            if self.program is None:
                return
            for name, values, own in self.commands:
                after = replace(self.program, **{name: value for name, value in values.items() if value is not None})
                if name == "change" and after != self.program:
                    changes = {name: value for name, value in values.items() if value != getattr(self.program, name)}
                    self.program = after
                    self.unread.append(SettingsChanged(update=self.update + 1, reason="asked", changes=changes))
                if own:
                    self.answers.append((None, self.update + 1))
            self.commands, self.update = [], self.update + 1
            fast = self.faster and (self.program.workers, self.program.save_total_limit) not in self.proven
            self.unread.append(Step(update=self.update, step_seconds=0.5 if fast else 1.0, batch=self.program.batch))
            if self.facts.phase in (Phase.STOPPING, Phase.RESTARTING):
                self.end(Phase.STOPPED)

    def read(self, count: int = 1000) -> None:
        for report in self.unread[: count + 1]:
            del self.unread[0]
            self.hear(report)

    def hear(self, report: Step | Oom | SettingsChanged) -> None:
        if isinstance(report, SettingsChanged):
            assert self.facts.settings is not None
            self.change_settings(replace(self.facts.settings, **report.changes))
        elif isinstance(report, Step) and self.facts.phase is Phase.STARTING:
            self.know(phase=Phase.TRAINING)
        if self.trial is None:
            return
        match report:
            case SettingsChanged():
                self.take(trial.settings_reported(self.trial, self.facts, report))
            case Oom():
                self.take(trial.oom_reported(self.trial, self.facts, report))
            case Step():
                self.take(trial.step_reported(self.trial, self.facts, report))

    def answer(self, refused: int = 0) -> None:
        if self.answers and self.trial is not None:
            problem, update = self.answers.pop(0)
            problem = "it cannot" if refused == 7 and problem is None else problem
            self.take(trial.answered(self.trial, self.facts, problem, update))

    def tick(self, seconds: float = 1.0) -> None:
        self.know(monotonic=self.facts.monotonic + seconds)
        if self.trial is not None:
            self.take(trial.tick(self.trial, self.facts))

    def go_on(self, updates: int = 5) -> None:
        """Some seconds in which nothing special happens."""
        for _ in range(updates):
            self.train()
            self.answer()
            self.read()
            self.tick()

    def edit(self, value: int = 3) -> None:
        if self.facts.phase is Phase.TRAINING and self.facts.connected and self.program is not None:
            on_trial = self.trial.changed if self.trial is not None and self.trial.unproven else ()
            target = replace(self.base(), eval_batch=2 + value)
            try:
                self.commands.append(("change", live_values(self.facts.settings, target, on_trial), False))
            except UsageError:
                return

    def restart_by_person(self, value: int = 3) -> None:
        if self.facts.phase is not Phase.STOPPING and (self.facts.phase is not Phase.RESTARTING or self.waiting is not None):
            self.restart(Change(assignments={"eval_batch": str(10 + value)}))

    def stop(self, _: int = 0) -> None:
        if self.waiting is not None:
            self.call_off()
        elif not self.facts.phase.final:
            self.pending = None
            self.know(phase=Phase.STOPPING, restart_requested=False)

    def call_off(self, _: int = 0) -> None:
        if self.waiting is not None:
            self.waiting = None
            self.know(phase=Phase.FAILED, restart_waiting=False)

    def survive(self, _: int = 0) -> None:
        if self.program is not None and self.program.batch > 1:
            self.program = replace(self.program, batch=self.program.batch // 2, accumulation=self.program.accumulation * 2)
            split = {"batch": self.program.batch, "accumulation": self.program.accumulation}
            self.unread.append(Oom(update=self.update + 1, message="out of memory", survived=True))
            self.unread.append(SettingsChanged(update=self.update + 1, reason="allocation failure", changes=split))

    def run_out(self, _: int = 0) -> None:
        self.die(Kind.GPU_OOM)

    def crash(self, _: int = 0) -> None:
        self.die(None)

    def finish(self, _: int = 0) -> None:
        self.end(Phase.FINISHED)

    def die(self, kind: Kind | None) -> None:
        if self.program is None:
            return
        if kind is not None:
            self.unread.append(Oom(update=self.update + 1, message="out of memory"))
        stopping = self.facts.phase in (Phase.STOPPING, Phase.RESTARTING)
        self.gone()
        if self.pending is not None:
            self.launch(self.pending)
        elif kind is not None and self.auto and not stopping:
            self.waiting = Change(assignments={"batch": "1"})
            self.know(phase=Phase.RESTARTING, restart_waiting=True, died_of=kind, reason="out of memory")
        else:
            self.know(phase=Phase.FAILED, died_of=kind, reason="it crashed")

    def gone(self) -> None:
        """The program has ended: what it still reported is read."""
        self.program = None
        self.answers += [("the training process is gone", None) for _, _, own in self.commands if own]
        self.commands = []
        self.know(connected=False)
        self.read()

    def end(self, phase: Phase) -> None:
        if self.program is None:
            return
        self.gone()
        if self.pending is not None:
            self.launch(self.pending)
        else:
            self.know(phase=phase)

    def begin_waiting(self, _: int = 0) -> None:
        if self.waiting is not None:
            self.launch(self.waiting)

    def disconnect(self, _: int = 0) -> None:
        self.answers += [("the training process is gone", None) for _, _, own in self.commands if own]
        self.commands = [(name, values, False) for name, values, _ in self.commands]
        self.know(connected=False)

    def connect(self, _: int = 0) -> None:
        self.know(connected=self.program is not None)

    def reach_the_end(self, _: int = 0) -> None:
        self.know(at_the_end=self.facts.phase is Phase.TRAINING)

    def refuse(self, _: int = 0) -> None:
        self.refuse_launch = True

    def replace_supervisor(self, _: int = 0) -> None:
        """The supervisor is killed, and the next one takes over. Answers are lost; recorded values
        and unread reports are not."""
        self.answers = []
        self.commands = [(name, values, False) for name, values, _ in self.commands]
        self.know(connected=False)
        if self.recorded is not None:
            found = trial.taken_over(self.recorded, self.facts)
            assert not isinstance(found, str)
            self.take(found)

    def settle(self) -> None:
        """Nothing more happens: the run is stopped, and everything is read."""
        for _ in range(6):
            self.stop()
            self.train()
            self.end(Phase.STOPPED)
            while self.answers and self.trial is not None:
                self.answer()
            self.read()
            self.tick(2 * RECONNECT_SECONDS)
