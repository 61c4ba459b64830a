"""What the supervisor does about memory that runs out: sees it coming to its end, finds out why, decides, and comes back.

Deciding is `supervisor.recovery`'s, explaining `supervisor.diagnosis`'s; here both meet the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.configuration import change_for, settings_key
from memtop.supervisor.recovery.policy import SURE, Decision
from memtop.supervisor.run import explain, proposing
from memtop.supervisor.run.pending_restart import NOTICE_SECONDS, WATCHED_NOTICE_SECONDS, Comeback, Waiting, free_bytes
from memtop.supervisor.run.post_mortem import examine as autopsy
from memtop.supervisor.run.post_mortem.evidence import Witness
from memtop.supervisor.run.post_mortem.examine import End
from memtop.supervisor.run.post_mortem.stall import StallWatch
from memtop.supervisor.run.processes.attempt import ExitFile
from memtop.supervisor.run.record.configurations import Configurations, Record
from memtop.supervisor.run.record.folder import StateFile
from memtop.supervisor.run.record.ledger import Attempt
from memtop.supervisor.run.reports import Oom, Plan, Report, SettingsChanged, Step, values
from memtop.supervisor.wire import Change, Proposal

if TYPE_CHECKING:
    from memtop.supervisor.run.supervisor import Supervisor

# A state that is written needs its own size once more, and a little for everything beside it.
_DISK_MARGIN, _DISK_BYTES = 1.1, 1 << 20
# Weights and two moments in fp32.
_STATE_BYTES = 12
# Events that tell of a report, each once.
_TOLD = ("oom", "survived", "settings")
# Where no state was ever written and the program has not said how large its model is, nobody knows how large one is.
_DISK_UNKNOWN_BYTES = 1 << 30


class Survival:
    """Belongs to one supervisor, which calls it at each turn of the run's life."""

    def __init__(self, supervisor: Supervisor, monotonic: Callable[[], float]) -> None:
        self._supervisor = supervisor
        self._monotonic = monotonic
        self.configurations = Configurations((), lambda record: True, lambda: None)
        self.proposal: Proposal | None = None
        self.comeback: Comeback | None = None
        self.allocator = ""
        """Options that memtop gives to a program of the user's own."""
        self.waited_at: int | None = None
        """The newest saved update when a restart last had room on the disk again."""
        self.witness: Witness | None = None
        self.stalled: str | None = None
        """After which words the program stood still, where memtop ended it for that."""
        self._stall: StallWatch | None = None
        self._resident: int | None = None
        """What the run's processes last held of host memory in this attempt."""
        self._told: set[tuple[str, float]] = set()
        """What an earlier supervisor has told of this attempt: kinds of events, and the times of their reports."""
        self._said: str | None = None
        self._keyed: tuple[Settings | None, bool, str] = None, False, ""

    # --- the run's life -------------------------------------------------------------------------------------------------

    def open(self, records: Iterable[Record], save: Callable[[Record], bool], tell: Callable[[], None]) -> None:
        """Go on with the configurations that the ledger knows; see `Configurations`."""
        self.configurations = Configurations(records, save, tell)

    def remember(self, attempt: Attempt, state: StateFile | None) -> None:
        """Know again what an earlier supervisor knew of the run's newest attempt; `replay` tells the rest."""
        if state is not None and state.run.attempt == attempt.number:
            self.proposal, self.stalled = state.run.proposal, state.stalled
        self.waited_at = state.waited_at if state is not None else None
        folder = self._supervisor.folder.attempt(attempt.number)
        self.witness = Witness(folder, attempt.started)
        self._stall = StallWatch(folder / "output.log", self._monotonic)
        self._told = self._supervisor.ledger.told(attempt.number, _TOLD)
        if attempt.ended is None and not self.configurations.has_begun(attempt.number):
            self._begin_untold(attempt, state)
        present = self.configurations.present
        if present is not None:
            self.allocator = present.allocator

    def _begin_untold(self, attempt: Attempt, state: StateFile | None) -> None:
        """An earlier supervisor has started the attempt and died before it could say with which configuration."""
        waiting = state.waiting.change if state is not None and state.waiting is not None else None
        asked = state.pending if state is not None else None
        cause = next((one for one in (waiting, asked) if one and explain.restart_reason(one) == attempt.reason), None)
        present = self.configurations.present
        before = present.allocator if present is not None else ""
        self.configurations.begin_attempt(
            attempt.number,
            attempt.reason,
            attempt.settings,
            allocator=cause.assignments.get("allocator", before) if cause is not None and attempt.settings is None else before,
            by_memtop=cause is not None and cause is waiting,
            saved=attempt.start_updates if attempt.start_updates is not None else self._saved(),
            started=attempt.started,
        )

    def replay(self, rank: int, report: Report) -> None:
        """A rank had said this to an earlier supervisor, which may have died before it had drawn its conclusions. What is known
        already stays as it is."""
        if not isinstance(report, Step):
            self.report(rank, report)

    def wait_again(self, waiting: Waiting) -> None:
        """Go on with a restart that an earlier supervisor had decided."""
        self._come_back(waiting)

    def begin(self, attempt: int, reason: str, change: Change, started: float, allocator: str) -> None:
        """An attempt was started, by the comeback if there is one."""
        supervisor, self.allocator = self._supervisor, allocator
        folder = supervisor.folder.attempt(attempt)
        self.witness = Witness(folder, started, supervisor.watch.machine)
        self._stall, self.stalled = StallWatch(folder / "output.log", self._monotonic), None
        self._resident, self._told = None, set()
        comes_back = self.comeback is not None and self.comeback.change is change
        if comes_back and self.comeback is not None and self.comeback.waiting.disk_bytes is not None:
            self.waited_at = self._saved() or 0
        self.configurations.begin_attempt(
            attempt,
            reason,
            supervisor.settings,
            allocator=self.allocator,
            by_memtop=comes_back,
            saved=self._saved(),
        )
        self.comeback, self._said = None, None

    def look(self) -> None:
        """Between samples: the program may enter a memory group of its own, and be killed there, within a second."""
        attempt = self._supervisor.attempt
        if self.witness is not None and attempt is not None and attempt.trainer is not None:
            self.witness.look(attempt.trainer.pid)

    def sample(self, keep: bool) -> None:
        """The machine was sampled; `keep` from time to time."""
        watch, attempt = self._supervisor.watch, self._supervisor.attempt
        if self.witness is None or attempt is None or watch.machine is None or self._supervisor.phase.final:
            return
        if self.comeback is None and attempt.trainer is not None:
            self.witness.sample(watch.machine, watch.member_pids, attempt.trainer.pid)
        self._resident = watch.run_rss_bytes or self._resident
        if self._trains_on_the_cpu():
            self.configurations.note_host(watch.run_rss_bytes, self._key())
        self._look_for_a_stall()
        if keep:
            self.configurations.keep()

    def _trains_on_the_cpu(self) -> bool:
        """Whether it is certain: before the trainer has said where it trains, its host memory is not its peak."""
        progress = self._supervisor.progress
        reported = progress.plan if self._supervisor.settings is not None else progress.step
        return reported is not None and not self.on_gpu

    def _look_for_a_stall(self) -> None:
        supervisor = self._supervisor
        if self._stall is None or supervisor.ladder is not None or self.comeback is not None:
            return
        if supervisor.progress.waits_for_space:
            return
        progress, settings = supervisor.progress, supervisor.settings
        words = self._stall.look(
            progress.heard,
            progress.step_seconds,
            longest_pause=progress.longest_pause,
            aside=settings is None or progress.is_aside(settings),
        )
        if words is not None and self._stall.is_of_memory():
            self.stalled = words
            supervisor.event("stalled", f"nothing has come from the program since: {words}; it is ended")
            # Of our own signal, then: whoever comes after this supervisor must know.
            supervisor.save_state()
            supervisor.begin_stop(asked=False)

    def report(self, rank: int, report: Report) -> None:
        """A rank has reported something."""
        if isinstance(report, Step):
            base = self._supervisor.watch.gpu_base_bytes.get(self._supervisor.progress.devices.get(rank, ""))
            self.configurations.note_step(rank, report, base, self._key())
            if self.proposal is not None and rank == 0:
                self.proposal = None
        elif isinstance(report, Oom):
            self._note_failure(rank, report)
            self._tell("survived" if report.survived else "oom", explain.oom_text(rank, report), report)
        elif isinstance(report, SettingsChanged) and rank == 0:
            self._changed(report)
        elif isinstance(report, Plan) and rank == 0:
            self.configurations.resumed(report.updates)
            if self._trains_on_the_cpu():
                # The first allocation after this may be the one that fails, long before the next sample.
                self.configurations.note_host(self._resident, self._key())

    def _note_failure(self, rank: int, report: Oom) -> None:
        """On the CPU what is held at the failure is the peak: no sample may ever have seen it."""
        present, held = self.configurations.present, report.rss_bytes
        if present is None or held is None or not self._trains_on_the_cpu():
            return
        if (report.time or 0.0) < present.configuration.started:
            return  # an earlier one's, which an earlier supervisor has dealt with
        others = sum(other.rss_bytes or 0 for other in self._supervisor.progress.rank_memory() if other.rank != rank)
        self.configurations.note_host(held + others, self._key())

    def _tell(self, kind: str, text: str, report: Report) -> None:
        """An event that comes of a report, unless it was told already."""
        if report.time is None or (kind, report.time) not in self._told:
            self._supervisor.event(kind, text, values(report))

    def _changed(self, report: SettingsChanged) -> None:
        """The running program goes on with other settings: they are the run's from now on."""
        supervisor = self._supervisor
        if supervisor.settings is None:
            return
        try:
            after = msgspec.convert({**msgspec.to_builtins(supervisor.settings), **report.changes}, Settings)
        except msgspec.ValidationError as error:
            supervisor.event("warning", f"the program reports settings that cannot be: {error}")
            return
        text = explain.settings_text(supervisor.settings, after, report)
        supervisor.settings = after
        died = self._kind_of_failure(report.update) if report.reason == "allocation failure" else None
        assert supervisor.attempt is not None
        said = supervisor.attempt.number, report.time or 0.0
        self.configurations.change(report.update, text, after, died=died, saved=self._saved(), changed_by=said)
        self._tell("settings", text, report)

    def _kind_of_failure(self, update: int) -> str:
        """What the trainer, which went on with less from this update on, ran out of. The journals are read one after the other:
        the failure may be in one that comes later, and then it is that of where the run trains."""
        failures = [report for _, report in self._supervisor.progress.failures if (report.update or 0) >= update - 1]
        on_gpu = any(report.device_uuid for report in failures[-1:]) if failures else self.on_gpu
        return str(Kind.GPU_OOM.value if on_gpu else Kind.HOST_OOM_ALLOC.value)

    # --- its end --------------------------------------------------------------------------------------------------------

    async def examine(self, ended: ExitFile, status: int | None, *, asked: bool, meanwhile: Callable[[], None]) -> Diagnosis:
        """Why the attempt ended. Its log may be large: it is read beside, `meanwhile` is called every now and then."""
        supervisor = self._supervisor
        assert supervisor.attempt is not None
        witness = self.witness or Witness(supervisor.attempt.folder, supervisor.started or ended.ended)
        end = End(
            folder=supervisor.attempt.folder,
            log=supervisor.attempt.log_path,
            state_folder=supervisor.folder.path,
            ended=ended.ended,
            status=status,
            asked_to_stop=asked,
            settings=supervisor.settings,
            reports=tuple(supervisor.progress.failures),
            newest_step=supervisor.progress.step.time if supervisor.progress.step else None,
        )
        work = asyncio.ensure_future(asyncio.to_thread(autopsy.examine, end, witness))
        while not work.done():
            await asyncio.wait({work}, timeout=0.2)
            meanwhile()
        try:
            return work.result()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the evidence: that the run has ended is recorded
            why = f"why attempt {supervisor.attempt.number} ended could not be found out: {error!r}"
            supervisor.event("warning", why)
            return Diagnosis(kind=Kind.NOT_MEMORY, reason="no_evidence", confidence=0.0, summary=why)

    def ended(self, outcome: str, diagnosis: Diagnosis | None) -> None:
        """The attempt is over: so is its configuration."""
        update = self._supervisor.progress.update
        died = diagnosis is not None and diagnosis.of_memory and diagnosis.confidence >= SURE
        # A full disk is nothing that a smaller configuration would mend: it may be tried again when there is room.
        room = diagnosis is not None and diagnosis.kind is Kind.DISK_FULL
        name = diagnosis.kind.value if died and diagnosis is not None else outcome
        self.configurations.end(name, update, self._saved(), died_of_memory=died and not room)

    def decide(self, diagnosis: Diagnosis) -> Decision | None:
        """What follows a death: a comeback that waits its turn, or a question; None where memory was not the reason."""
        if not diagnosis.of_memory or diagnosis.confidence < SURE:
            return None
        try:
            proposal, decision = proposing.propose(self._supervisor, diagnosis)
        except Exception as error:  # noqa: BLE001 - a run without a remedy has ended all the same, and is to be told so
            self._supervisor.event("warning", f"what can be done about it could not be worked out: {error!r}")
            return None
        if decision.action == "wait" and (why := self._no_use_to_wait()) is not None:
            decision = replace(decision, action="ask", why=why)
            proposal = replace(proposal, waiting=why)
        self.proposal = proposal
        if decision.action in ("restart", "wait"):
            self._prepare(diagnosis, decision)
        return decision

    def _no_use_to_wait(self) -> str | None:
        """Why room on the run's own disk would not help; None where it would."""
        saved = self._saved() or 0
        if self.waited_at is not None and saved <= self.waited_at:
            return "it has waited for room on the disk before, and nothing newer could be saved since"
        free = free_bytes(self._supervisor.folder.path)
        if isinstance(free, int) and free >= self._room_needed():
            return f"the disk of the run has {units.size(free)} free: another one is full, or a quota is used up"
        return None

    def _prepare(self, diagnosis: Diagnosis, decision: Decision) -> None:
        supervisor = self._supervisor
        update = supervisor.progress.update
        reason = f"{diagnosis.kind.value} at update {update}" if update is not None else diagnosis.kind.value
        change = Change(reason=reason) if decision.remedy is None else change_for(decision.remedy, reason=reason)
        uuids = set(supervisor.progress.devices.values())
        before = self.witness.baseline.gpu_used_bytes if self.witness is not None else {}
        self._come_back(
            Waiting(
                change=change,
                gpus_before={uuid: taken for uuid, taken in before.items() if uuid in uuids},
                forecast=decision.remedy.forecast if decision.remedy is not None else None,
                disk_bytes=self._room_needed() if decision.action == "wait" else None,
            )
        )

    def _come_back(self, waiting: Waiting) -> None:
        notice = WATCHED_NOTICE_SECONDS if self._supervisor.is_watched else NOTICE_SECONDS
        self.comeback = Comeback(waiting, self._supervisor.folder.path, self._monotonic, notice)
        self._said = None
        if self.proposal is not None:
            self.proposal = replace(self.proposal, begins=time.time() + notice)

    def tick(self) -> None:
        """While a comeback waits."""
        supervisor, comeback = self._supervisor, self.comeback
        assert comeback is not None
        verdict = comeback.look(supervisor.watch.machine)
        if comeback.problem is not None and comeback.problem != self._said:
            # Who holds the memory, once for each answer; the numbers of a disk that fills and empties are no news each.
            if self._said is None or verdict != "wait":
                supervisor.event("remedy", f"waiting: {comeback.problem}" if verdict == "wait" else comeback.problem)
            self._said = comeback.problem
        if verdict == "go":
            supervisor.come_back(comeback.change)
        elif verdict == "ask":
            self.call_off(comeback.problem or "it cannot be restarted by itself")

    def call_off(self, why: str) -> None:
        """No comeback: the run lies as it died, until a person says what to do."""
        self.comeback = None
        if self.proposal is not None:
            self.proposal = replace(self.proposal, waiting=why, begins=None)
        self._supervisor.fail(why)

    # --- numbers --------------------------------------------------------------------------------------------------------

    def _saved(self) -> int | None:
        saved = self._supervisor.checkpoint
        return saved.updates if saved is not None and saved.complete else None

    def _room_needed(self) -> int:
        saved = self._supervisor.checkpoint
        known = saved.size_bytes if saved is not None and saved.complete else None
        if known is None:
            plan = self._supervisor.progress.plan
            trained = plan.trained_parameters if plan is not None else None
            known = None if trained is None else trained * _STATE_BYTES
        return int(known * _DISK_MARGIN) + _DISK_BYTES if known else _DISK_UNKNOWN_BYTES

    @property
    def on_gpu(self) -> bool:
        return bool(self._supervisor.progress.devices)

    def _key(self) -> str:
        settings, on_gpu = self._supervisor.settings, self.on_gpu
        if settings is None:
            return ""
        # Asked for at every update: it is worked out once for each settings.
        known, where, key = self._keyed
        if known is not settings or where is not on_gpu:
            key = settings_key(settings, on_gpu=on_gpu)
            self._keyed = settings, on_gpu, key
        return key

    def disk_free_bytes(self) -> int | None:
        return autopsy.free_bytes(self._supervisor.folder.path)

    def base_bytes(self) -> int | None:
        """What the fullest GPU of the run holds without a batch: contexts, weights, optimizer, as measured between updates."""
        watch, progress = self._supervisor.watch, self._supervisor.progress
        held = [
            watch.gpu_base_bytes[rank.device_uuid] + rank.allocated_bytes
            for rank in progress.rank_memory()
            if rank.device_uuid in watch.gpu_base_bytes and rank.device_uuid and rank.allocated_bytes is not None
        ]
        return max(held, default=None)
