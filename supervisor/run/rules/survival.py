"""What follows a death of memory: a restart that waits its turn, or a question."""

from __future__ import annotations

from msgspec.structs import replace

from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.errors import UsageError
from memtop.supervisor.recovery.configuration import change_for
from memtop.supervisor.recovery.policy import SURE, Decision
from memtop.supervisor.run.events import Facts
from memtop.supervisor.run.model import Cause, Model, move, note
from memtop.supervisor.run.pending_restart import NOTICE_SECONDS, WATCHED_NOTICE_SECONDS, PendingRestart, Waiting
from memtop.supervisor.run.rules import attempts, configurations, proposal
from memtop.supervisor.wire import Change, Phase

# A state needs its own size once more to be written, and a little for everything else.
_DISK_MARGIN, _DISK_BYTES = 1.1, 1 << 20
# Weights and two moments in fp32.
_STATE_BYTES = 12
# Assumed where no state was ever written and the program has not reported the size of its model.
_DISK_UNKNOWN_BYTES = 1 << 30


def ended(model: Model, outcome: str, diagnosis: Diagnosis | None) -> Model:
    """The attempt is over: so is its configuration."""
    died = diagnosis is not None and diagnosis.of_memory and diagnosis.confidence >= SURE
    # A smaller configuration does not help against a full disk: this one may be tried again when
    # there is space.
    full = diagnosis is not None and diagnosis.kind is Kind.DISK_FULL
    name = diagnosis.kind.value if died and diagnosis is not None else outcome
    update = model.progress.update
    after = model.configurations.end(name, update, model.saved, died_of_memory=died and not full)
    return configurations.put(model, after)


def decide(model: Model, diagnosis: Diagnosis, facts: Facts) -> tuple[Model, Decision | None]:
    """What follows a death; None where memory was not the reason."""
    if not diagnosis.of_memory or diagnosis.confidence < SURE:
        return model, None
    try:
        proposed, decision = proposal.propose(model, diagnosis, facts)
    except Exception as error:  # noqa: BLE001 - a run without a remedy has ended all the same, and that must be recorded
        return note(model, "warning", f"what can be done about it could not be worked out: {error!r}"), None
    if decision.action == "wait" and (why := _no_use_to_wait(model, facts)) is not None:
        decision = replace(decision, action="ask", why=why)
        proposed = replace(proposed, waiting=why)
    model = replace(model, proposal=proposed)
    return (_prepare(model, diagnosis, decision, facts) if decision.action in ("restart", "wait") else model), decision


def _no_use_to_wait(model: Model, facts: Facts) -> str | None:
    """Why space on the run's own disk would not help; None where it would."""
    if model.settings is None:
        return "it is an external command, which would begin anew: restart it yourself when there is space"
    if model.waited_at is not None and (model.saved or 0) <= model.waited_at:
        return "it has waited for space on the disk before, and nothing newer could be saved since"
    free = facts.disk_free_bytes
    if free is not None and free >= _space_needed(model):
        return f"the disk of the run has {units.size(free)} free: another one is full, or a quota is used up"
    return None


def _space_needed(model: Model) -> int:
    newest = model.checkpoint
    known = newest.size_bytes if newest is not None and newest.complete else None
    if known is None:
        trained = model.progress.plan.trained_parameters if model.progress.plan is not None else None
        known = None if trained is None else trained * _STATE_BYTES
    return int(known * _DISK_MARGIN) + _DISK_BYTES if known else _DISK_UNKNOWN_BYTES


def _prepare(model: Model, diagnosis: Diagnosis, decision: Decision, facts: Facts) -> Model:
    update = model.progress.update
    reason = f"{diagnosis.kind.value} at update {update}" if update is not None else diagnosis.kind.value
    change = Change(reason=reason) if decision.remedy is None else change_for(decision.remedy, reason=reason)
    uuids = set(model.progress.devices.values())
    waiting = Waiting(
        change=change,
        gpus_before={uuid: taken for uuid, taken in facts.gpu_used_before_bytes.items() if uuid in uuids},
        forecast=decision.remedy.forecast if decision.remedy is not None else None,
        disk_bytes=_space_needed(model) if decision.action == "wait" else None,
    )
    return wait_for(model, waiting)


def wait_for(model: Model, waiting: Waiting) -> Model:
    """Give a person time to call the restart off."""
    notice = WATCHED_NOTICE_SECONDS if model.watched else NOTICE_SECONDS
    restart = PendingRestart(waiting=waiting, began=model.now.monotonic, notice_seconds=notice)
    proposed = model.proposal
    if proposed is not None:
        proposed = replace(proposed, begins=model.now.time + notice)
    return replace(model, restart=restart, proposal=proposed, disk_free=None)


def tick(model: Model) -> Model:
    """While a restart waits."""
    assert model.restart is not None
    machine = model.sample.machine if model.sample is not None else None
    restart, verdict = model.restart.look(model.now.monotonic, machine, model.disk_free, model.run.folder)
    problem, announced = restart.problem, restart.announced
    if problem is not None and problem != announced:
        # The holders of the memory are named once for each answer; that the free bytes of a disk
        # changed is no news.
        if announced is None or verdict != "wait":
            model = note(model, "remedy", f"waiting: {problem}" if verdict == "wait" else problem)
        restart = replace(restart, announced=problem)
    model = replace(model, restart=restart)
    if verdict == "go":
        try:
            return attempts.launch(model, restart.change, Cause.DEATH)
        except UsageError as error:
            return call_off(model, str(error))
    return call_off(model, problem or "it cannot be restarted by itself") if verdict == "ask" else model


def call_off(model: Model, why: str) -> Model:
    """No restart: the run stays as it died, until a person decides what to do."""
    proposed = model.proposal
    if proposed is not None:
        proposed = replace(proposed, waiting=why, begins=None)
    model = move(replace(model, restart=None, proposal=proposed), Phase.FAILED, why)
    return note(model, "failed", why)
