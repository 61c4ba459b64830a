"""Carries out the effects of the rules. No other file acts on a run."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sqlite3
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from memtop.presets.measured import Learned
from memtop.presets.parameters import stored_config
from memtop.supervisor import interpreters
from memtop.supervisor.diagnosis.environment import CONTAINER_FILES, of_process
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.errors import MemtopError, RunFolderError, UsageError
from memtop.supervisor.monitor.processes.proc import ProcessId, identify
from memtop.supervisor.plan import gpu_kind
from memtop.supervisor.recovery.forecast import forecaster_on
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run.effects import (
    AddEvent,
    AskRanks,
    CheckSaved,
    ClearLeftovers,
    CloseUnstarted,
    DiscardBeforeSpike,
    DropRows,
    Effect,
    Examine,
    FollowWorkers,
    Foresee,
    GiveUp,
    HoldState,
    KeepCheckpoint,
    Launch,
    ReadStates,
    ReleaseState,
    Reply,
    SaveConfigurations,
    SaveState,
    Signal,
    SignalTarget,
    TypeAnswer,
    UpdateAttempt,
)
from memtop.supervisor.run.events import (
    Answered,
    CheckpointKept,
    Examined,
    Foreseen,
    Launched,
    LaunchRefused,
    LeftoversCleared,
    Occurrence,
    RemedyFacts,
    RowsDropped,
    SavedChecked,
    Signalled,
    StateHeld,
    States,
    StatesRead,
    WriteChecked,
)
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.measurements import Measurements
from memtop.supervisor.run.model import Model
from memtop.supervisor.run.output.intake import OutputIntake
from memtop.supervisor.run.output.rank_log import rank_log
from memtop.supervisor.run.post_mortem import examine as post_mortem
from memtop.supervisor.run.post_mortem.evidence import AttemptEvidence
from memtop.supervisor.run.post_mortem.log_end import rank_logs, read_log_end
from memtop.supervisor.run.processes.attempt import Invocation, RunningAttempt, clear_leftovers, launch
from memtop.supervisor.run.processes.environment import changes_for_trainer, inherited_allocator
from memtop.supervisor.run.processes.members import named, send
from memtop.supervisor.run.profiled import grip_of, prepared, python_of
from memtop.supervisor.run.record import checkpoints, grip_checkpoints
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, StateFile, write_json
from memtop.supervisor.run.record.journal import Intake
from memtop.supervisor.run.record.ledger import why_not_written
from memtop.supervisor.run.record.outbox import Outbox
from memtop.supervisor.run.sensors import Sensors
from memtop.supervisor.run.server import Agents, Peer, Publisher
from memtop.supervisor.run.state import state_file
from memtop.supervisor.wire import Checkpoint

Post = Callable[[Occurrence], None]


class Start(NamedTuple):
    """How an attempt of the user's own program is started."""

    resumed: Checkpoint | None = None
    """The checkpoint that it resumes from."""
    given: Invocation | None = None
    grip: Grip | None = None
    """With a profile: what memtop then knows of it."""


class Performer:
    """Of one supervisor."""

    def __init__(
        self,
        folder: RunFolder,
        spec: RunSpec,
        *,
        outbox: Outbox,
        publisher: Publisher,
        agents: Agents,
        sensors: Sensors,
        socket: Path,
        is_displaced: Callable[[], bool],
        post: Post,
        read_reports: Callable[[], None],
    ) -> None:
        """`is_displaced`: whether another run has the path of this one now. `post` takes events
        that come later; `read_reports` takes in all that the ranks have reported so far.
        """
        self.attempt: RunningAttempt | None = None
        self.intake: Intake | None = None
        self.output: OutputIntake | None = None
        """None for memtop's own trainer."""
        self.failure: MemtopError | None = None
        """Why this supervisor cannot begin; None if it can."""
        self.clients: dict[int, Peer] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self._folder, self._spec = folder, spec
        self._outbox, self._publisher, self._agents, self._sensors = outbox, publisher, agents, sensors
        self._socket = socket
        self._is_displaced = is_displaced
        self._post = post
        self._read_reports = read_reports
        me = identify(os.getpid())
        self._started_ticks = me.started_ticks if me else None
        self._measurements = Measurements()
        self._state_problem: str | None = None
        self._saved: StateFile | None = None
        """What state.json contains; None if it could not be written."""

    def perform(self, effect: Effect, model: Model) -> Occurrence | None:
        """Carry out one effect; return the event that follows at once, if any.

        `model`: the run after the event that led to the effect.
        """
        match effect:
            case AddEvent(event=event):
                if self.attempt is not None and self.attempt.number == event.attempt:
                    # What prevents it is reported when the log is noted the next time.
                    self.attempt.log.mark(event.time, at_once=True)
                self._publisher.add_event(self._outbox.add_event(event))
            case SaveState():
                return self.save_state(model)
            case UpdateAttempt(number=number, values=values):
                self._outbox.update_attempt(number, values)
            case SaveConfigurations(records=records):
                self._outbox.save_configurations(records)
                self._publisher.configurations_changed()
                if self._measurements.note(records, model):
                    self._begin(self._remember())
            case Foresee():
                self._begin(self._foresee(effect))
            case FollowWorkers():
                self._follow_workers()
            case DropRows(update=update):
                return self._drop_rows(update)
            case CloseUnstarted(number=number, why=why):
                self._outbox.close_unstarted(number, why, time.time())
            case Reply(client=client, answer=answer):
                if client in self.clients:
                    self.clients[client].send(answer)
            case _:
                return self._act(effect, model)
        return None

    def _act(self, effect: Effect, model: Model) -> Occurrence | None:
        match effect:
            case Launch(grip=None):
                return self._launch_new(effect)
            case Launch():
                self._begin(self._launch_own(effect))
            case Signal():
                return self._signal(effect)
            case TypeAnswer(text=text) if self.attempt is not None:
                self.attempt.type_answer(text)
            case ClearLeftovers():
                self._begin(self._clear_leftovers(effect, model.grip))
            case Examine():
                self._begin(self._examine(effect, model))
            case AskRanks():
                self._begin(self._ask(effect))
            case KeepCheckpoint():
                self._begin(self._keep_checkpoint(effect))
            case ReadStates():
                return StatesRead(read_states(self._folder, model.grip))
            case CheckSaved(reported=reported):
                return SavedChecked(checkpoints.checked(reported))
            case HoldState(update=update):
                return self._hold(update)
            case ReleaseState():
                checkpoints.discard_held(self._folder.latest_state)
            case DiscardBeforeSpike():
                checkpoints.discard_before_spike(self._folder.latest_state, alive=model.alive)
            case GiveUp(why=why, usage=usage):
                self.failure = UsageError(why) if usage else RunFolderError(why)
        return None

    def follow(self, number: int, started: float, shim_pid: int | None = None) -> None:
        """Make this the run's present attempt."""
        self.attempt = RunningAttempt(self._folder, number, shim_pid)
        self.intake = Intake(self.attempt.folder, number, self._outbox, self._publisher.add_steps)
        self.output = self._output_of(self.attempt) if self._spec.command else None
        self._sensors.follow(self.attempt, started, new=shim_pid is not None)

    def _output_of(self, attempt: RunningAttempt) -> OutputIntake:
        profile = self._spec.profile
        return OutputIntake(
            attempt.folder,
            attempt.number,
            self._outbox,
            pattern=self._spec.step_pattern or (profile.output.step if profile is not None else None),
            settings={} if profile is None else {str(name): text for name, text in profile.output.settings.items()},
            command=self._spec.command,
            on_steps=self._publisher.add_steps,
            on_own_counter=self._count_by_output,
            on_back=lambda update: self._post(self._drop_rows(update)),
        )

    def _drop_rows(self, update: int) -> RowsDropped:
        self._publisher.take_back_from(update)
        return RowsDropped(best_loss=self._outbox.ledger.best_loss(update))

    async def _foresee(self, effect: Foresee) -> None:
        """What was in use when the attempt began is of other programs. It reads files, and
        estimates."""
        gpu, settings, evidence = effect.gpu, effect.settings, self._sensors.evidence
        others = 0 if evidence is None else evidence.others_bytes(gpu)

        def found() -> Forecast | str:
            learned = interpreters.learned_on(gpu_kind(gpu), settings.python, without=str(self._folder.path))
            forecaster = forecaster_on(gpu, effect.earlier, others, learned)
            return forecaster.with_phases(forecaster.predicted(settings), settings)

        self._post(Foreseen(number=effect.number, found=await asyncio.to_thread(found)))

    async def _remember(self) -> None:
        """What was measured, for later runs, in a thread: the user's folders may be on a machine
        that does not answer."""
        while self._measurements.begin():
            await asyncio.to_thread(self._measurements.write)
            news = self._measurements.end()
            if news is not None:
                self._post(WriteChecked(topic="measurements", problem=news[0]))

    def _follow_workers(self) -> None:
        """The workers of the program have begun again, and their output with them."""
        if self.output is not None:
            self.output.begin_again()

    def own_log(self, grip: Grip | None) -> str | None:
        """Where the program writes what it does not print, with `*`: by its profile, or by
        torchrun's options."""
        if grip is not None and grip.log is not None:
            return grip.log
        if self.attempt is None:
            return None
        return rank_log(self._spec.command, self._spec.cwd, rank_logs(self.attempt.folder))

    def _count_by_output(self, new: bool) -> None:
        """The updates that the agent counts are not how far the training is: the output knows."""
        intake = self.intake
        if intake is None:
            return
        intake.counts = False
        if new:
            self._outbox.write(lambda: self._outbox.ledger.drop_updates(intake.number))
            self._publisher.send_rows_again()

    def save_state(self, model: Model, *, decided: bool = True) -> WriteChecked | None:
        """Write state.json; an event where it can be written and could not before, or the other way
        round.

        A decision (`decided`) is on the disk when this returns. Otherwise the file only gets newer
        values: it is not written if there are none, or if it contains a change to restart with,
        which a power cut could erase. It is written without fsync, which would block the event
        loop for seconds while the program writes a checkpoint.
        """
        self._publisher.state_file_written()
        if self._is_displaced():
            return None
        if model.alive and model.trainer_pid is None and self.attempt is not None and self.attempt.trainer is not None:
            # Reports may come in before the first tick has seen the program.
            model = replace(model, trainer_pid=self.attempt.trainer.pid)
        state, saved, problem = state_file(model, str(self._socket), self._started_ticks), self._saved, None
        if not decided and saved is not None and (saved == state or saved.restarts):
            return None
        self._saved = None
        try:
            write_json(self._folder.state_path, state, sync=decided or saved is None)
            self._saved = state
        except RunFolderError as error:
            problem = str(error)
        if problem == self._state_problem:
            return None
        self._state_problem = problem
        return WriteChecked(topic="state", problem=problem)

    # --- the program ------------------------------------------------------------------------------

    def _launch(self, effect: Launch, own: Start) -> Launched | LaunchRefused:
        """The ledger first: an attempt that it has and that has no program is closed by the next
        supervisor.
        """
        if self._is_displaced():
            return LaunchRefused(number=effect.number, why=f"another run is now in {self._folder.path}")
        if self.intake is not None:
            self.intake.store()
        self._outbox.retry()
        number, latest, started = effect.number, self._folder.latest_state, time.time()
        resumed, given, grip = own.resumed, own.given, own.grip
        # An external command counts its updates from its start, unless memtop makes it resume; the
        # built-in trainer reports where it resumes.
        start = (0 if resumed is None else resumed.updates) if effect.settings is None else None
        try:
            self._outbox.ledger.add_attempt(number, effect.reason, effect.settings, started, start, effect.change)
        except sqlite3.Error as error:
            why = why_not_written(self._folder.ledger_path, error)
            return LaunchRefused(number=number, why=why)
        try:
            with checkpoints.rolled_back(latest, effect.state_before) as aside:
                states = replace(read_states(self._folder), program=resumed)
                allocator, asks = effect.allocator, grip is not None and grip.asks
                shim = launch(
                    *(self._folder, number, self._spec, effect.settings, self._socket),
                    allocator=allocator,
                    given=given,
                    answers=asks,
                )
        except MemtopError as error:
            why = str(error)
            self._outbox.close_unstarted(number, why, time.time())
            return LaunchRefused(number=number, why=why, usage=isinstance(error, UsageError), recorded=True)
        self._agents.reset()
        self.follow(number, started, shim)
        moved = str(aside) if aside is not None else None
        return Launched(number=number, started=started, states=states, set_aside=moved, resumed=resumed, grip=grip)

    def _launch_new(self, effect: Launch) -> Launched | LaunchRefused:
        """Without a checkpoint of the user's own program."""
        try:
            return self._launch(effect, self._own_program(effect))
        except MemtopError as error:
            return LaunchRefused(number=effect.number, why=str(error), usage=isinstance(error, UsageError))

    async def _launch_own(self, effect: Launch) -> None:
        """Prepare the checkpoint in a thread: copies take time."""
        try:
            start = await asyncio.to_thread(self._own_program, effect)
        except (MemtopError, OSError) as error:
            self._post(LaunchRefused(number=effect.number, why=str(error), usage=isinstance(error, UsageError)))
        else:
            self._post(self._launch(effect, start))

    def _own_program(self, effect: Launch) -> Start:
        """How the user's own program is started."""
        held, run, spec = effect.grip, self._folder.path, self._spec
        if effect.settings is not None or (held is None and spec.profile is None):
            return Start()
        after = None if held is not None and held.profile is None else grip_of(spec, run, effect.knobs, held)
        resumed = None
        if held is not None:
            python = None if after is None else python_of(spec)
            resumed = grip_checkpoints.prepared(run, held, after or held, held.since, python)
        if after is None:
            return Start(
                resumed, Invocation(command=spec.command, environment=changes_for_trainer(held, effect.knobs, resumed))
            )
        return Start(resumed, prepared(after, spec, run, self._folder.attempt(effect.number), effect.knobs, resumed), after)

    async def _keep_checkpoint(self, effect: KeepCheckpoint) -> None:
        problem = None
        try:
            python = python_of(self._spec)
            await asyncio.to_thread(grip_checkpoints.keep_for, self._folder.path, effect.grip, effect.after, python)
        except (MemtopError, OSError) as error:
            problem = str(error)
        self._post(CheckpointKept(problem=problem))

    def _signal(self, effect: Signal) -> Signalled:
        targets: list[ProcessId] = []
        if self.attempt is not None and effect.target is SignalTarget.ALL:
            targets = self.attempt.processes()
        elif self.attempt is not None and effect.target is SignalTarget.STOPPED:
            targets = self.attempt.stopped()
        elif self.attempt is not None and effect.target is SignalTarget.GROUP:
            targets = self.attempt.group()
        elif self.attempt is not None and self.attempt.trainer is not None:
            targets = [self.attempt.trainer]
        number = signal.Signals[effect.name]
        reached, refused = [], []
        for target in targets:
            process = named(target)
            why = send(target, number)
            if why is None:
                reached.append(process)
            elif why:
                refused.append(why)
        return Signalled(name=effect.name, processes=tuple(reached), refused=tuple(refused))

    async def _clear_leftovers(self, effect: ClearLeftovers, grip: Grip | None) -> None:
        attempt = self.attempt
        assert attempt is not None
        await clear_leftovers(attempt, effect.untouched_seconds, effect.terminate_seconds, self._post)
        # One of them may have been the trainer, whose launcher had ended: its last reports count.
        self._read_reports()
        saved = None if effect.saved is None or os.path.lexists(effect.saved.path) else effect.saved
        self._post(LeftoversCleared(log=read_log_end(attempt.log_path), states=read_states(self._folder, grip), saved=saved))

    async def _examine(self, effect: Examine, model: Model) -> None:
        """Find out why the attempt ended, in a thread, because its log may be large."""
        attempt, progress = self.attempt, model.progress
        assert attempt is not None
        evidence = self._sensors.evidence or AttemptEvidence(attempt.folder, effect.ended)
        machine = self._sensors.machine_watch.machine
        end = post_mortem.AttemptEnd(
            folder=attempt.folder,
            log=attempt.log_path,
            state_folder=self._folder.path,
            ended=effect.ended,
            status=effect.status,
            asked_to_stop=effect.stop_requested,
            has_gpu=machine is not None and bool(machine.gpus),
            settings=effect.settings,
            reports=progress.failures,
            newest_step=progress.step.time if progress.step is not None else None,
        )
        problem = None
        try:
            diagnosis = await asyncio.to_thread(post_mortem.examine, end, evidence)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the evidence: that the run has ended is recorded
            problem = f"why attempt {attempt.number} ended could not be found out: {error!r}"
            diagnosis = Diagnosis(kind=Kind.NOT_MEMORY, reason="no_evidence", confidence=0.0, summary=problem)
        python = "" if effect.settings is None else effect.settings.python
        deepspeed = await asyncio.to_thread(interpreters.has, python, "deepspeed")
        kind = None if effect.settings is None or model.smallest_gpu is None else gpu_kind(model.smallest_gpu)
        learned = await asyncio.to_thread(interpreters.learned_on, kind, python, without=str(self._folder.path))
        facts = self._facts(effect, evidence, deepspeed=deepspeed, learned=learned)
        self._post(Examined(diagnosis=diagnosis, facts=facts, problem=problem))

    def _facts(self, effect: Examine, evidence: AttemptEvidence, *, deepspeed: bool, learned: Learned) -> RemedyFacts:
        return RemedyFacts(
            gpu_used_before_bytes=evidence.baseline.gpu_used_bytes,
            in_own_group=evidence.in_own_group,
            host_limit_bytes=evidence.host_limit_bytes,
            kept_states=read_states(self._folder).kept,
            disk_free_bytes=post_mortem.free_bytes(self._folder.path),
            deepspeed=deepspeed,
            inherited_allocator=inherited_allocator(os.environ),
            model_config=stored_config(effect.settings) if effect.settings is not None else None,
            learned=learned,
            has_loader_workers="loader worker" in self._sensors.machine_watch.roles.values(),
            environment=of_process(os.environ, platform.release(), in_container=any(map(os.path.exists, CONTAINER_FILES))),
        )

    # --- agents and states ------------------------------------------------------------------------

    async def _ask(self, effect: AskRanks) -> None:
        answers = await self._agents.call(effect.name, set(effect.ranks), effect.values)
        self._post(Answered(ask=effect.ask, answers=tuple(answers)))

    def _hold(self, update: int) -> StateHeld:
        try:
            checkpoints.hold(self._folder.latest_state, update)
        except MemtopError as error:
            return StateHeld(problem=str(error))
        return StateHeld()

    def collect(self) -> None:
        """Raise the error of a task that has failed."""
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.discard(task)
            task.result()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it while other events come in; the loop looks at what has failed."""
        self.tasks.add(asyncio.get_running_loop().create_task(work))


def read_states(folder: RunFolder, grip: Grip | None = None) -> States:
    """The saved states in a run's folder, and the checkpoint from which the user's own program
    (`grip`) would resume."""
    latest = folder.latest_state
    program = None if grip is None else grip_checkpoints.newest_for(folder.path, grip, grip.since)
    return States(newest=checkpoints.newest_checkpoint(latest), kept=tuple(checkpoints.kept_states(latest)), program=program)
