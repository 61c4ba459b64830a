"""What follows when a run dies for lack of memory: `supervisor.recovery` finds the remedies, then
one is applied in a restart, or a person is asked."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from memtop.presets import SettingsError
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.diagnosis.environment import together
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.errors import UsageError
from memtop.supervisor.recovery import policy
from memtop.supervisor.recovery.configuration import applied, change_for, changes_nothing, configuration_key
from memtop.supervisor.recovery.external import ExternalCommand, remedies_for_command
from memtop.supervisor.recovery.forecast import Estimates, estimates_on
from memtop.supervisor.recovery.host_forecast import host_estimates_on
from memtop.supervisor.recovery.host_ladder import beyond_all_memory
from memtop.supervisor.recovery.leaks import cause_of_death, that_filled
from memtop.supervisor.recovery.policy import SURE, Candidate, Decision, Tried
from memtop.supervisor.recovery.remedies import last_advice, remedies
from memtop.supervisor.recovery.situation import HostFacts, KeptState, Situation, situation_of
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.run.events import RemedyFacts
from memtop.supervisor.run.model import Cause, Model, move, not_by_signal, note
from memtop.supervisor.run.pending_restart import NOTICE_SECONDS, WATCHED_NOTICE_SECONDS, PendingRestart, Waiting
from memtop.supervisor.run.record.configurations import ConfigurationRecord
from memtop.supervisor.run.rules import attempts, configurations, own_ladder
from memtop.supervisor.wire import Change, Phase, Proposal

# Writing a state needs its own size once more, and a little for everything else.
_DISK_MARGIN, _DISK_BYTES = 1.1, 1 << 20
# Weights and two moments in fp32.
_STATE_BYTES = 12
# Assumed if no state was ever written and the program has not reported the size of its model.
_DISK_UNKNOWN_BYTES = 1 << 30


def ended(model: Model, outcome: str, ended_by: int | None, diagnosis: Diagnosis | None) -> Model:
    """The attempt has ended, and so has its configuration."""
    died = diagnosis is not None and diagnosis.of_memory and diagnosis.confidence >= SURE
    # A smaller configuration does not help if the disk is full, so this one may be tried again
    # when there is space.
    full = diagnosis is not None and diagnosis.kind is Kind.DISK_FULL
    name, by_words = (diagnosis.kind.value, diagnosis.by_words) if died and diagnosis is not None else (outcome, False)
    update = model.update
    after = model.configurations.end(
        name, update, model.saved, ended_by=ended_by, died_of_memory=died and not full, by_words=by_words
    )
    return configurations.put(model, after)


def decide(model: Model, diagnosis: Diagnosis, facts: RemedyFacts) -> tuple[Model, Decision | None]:
    """Decide what follows a failure; the decision is None if memory was not the reason."""
    if not diagnosis.of_memory or diagnosis.confidence < SURE:
        return model, None
    try:
        proposed, decision = propose(model, diagnosis, facts)
    except Exception as error:  # noqa: BLE001 - a run without a remedy has ended all the same, and that must be recorded
        return note(model, "warning", f"what can be done about it could not be worked out: {error!r}"), None
    if decision.action == "wait" and (why := _no_use_to_wait(model, facts)) is not None:
        decision = replace(decision, action="ask", why=why)
        proposed = replace(proposed, waiting=why)
    model = replace(model, proposal=proposed)
    return (_prepare(model, diagnosis, decision, facts) if decision.action in ("restart", "wait") else model), decision


def _no_use_to_wait(model: Model, facts: RemedyFacts) -> str | None:
    """Why more space on the run's disk would not help; None if it would."""
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


def _prepare(model: Model, diagnosis: Diagnosis, decision: Decision, facts: RemedyFacts) -> Model:
    reason = diagnosis.name_at(None if model.update is None else model.update + 1)
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
    """Give a person time to cancel the restart."""
    notice = WATCHED_NOTICE_SECONDS if model.watched else NOTICE_SECONDS
    now = model.now
    restart = PendingRestart(waiting=waiting, began=now.monotonic, begins=now.time + notice, notice_seconds=notice)
    return replace(model, restart=restart, disk_free=None)


def tick(model: Model) -> Model:
    """Check a pending restart: begin it, report what prevents it, or give it up."""
    assert model.restart is not None
    machine = model.sample.machine if model.sample is not None else None
    restart, verdict = model.restart.look(model.now.monotonic, machine, model.disk_free, model.run.folder)
    problem, announced = restart.problem, restart.announced
    if problem is not None and problem != announced:
        # The processes that hold the memory are named once. A change of the free disk space is
        # not reported.
        if announced is None or verdict != "wait":
            model = note(model, "remedy", f"waiting: {problem}" if verdict == "wait" else problem)
        restart = replace(restart, announced=problem)
    model = replace(model, restart=restart)
    if verdict == "go":
        try:
            return attempts.launch(model, restart.change, Cause.DEATH)
        except UsageError as error:
            return call_off(not_by_signal(model), str(error))
    return call_off(model, problem or "it cannot be restarted by itself") if verdict == "ask" else model


def call_off(model: Model, why: str) -> Model:
    """Cancel the restart: the run stays failed until a person decides what to do."""
    proposed = model.proposal
    if proposed is not None:
        proposed = replace(proposed, waiting=why)
    model = move(replace(model, restart=None, proposal=proposed), Phase.FAILED, why)
    return note(model, "failed", why)


_EXTERNAL = "your own command could begin from zero, so only you can start it again"


def propose(model: Model, diagnosis: Diagnosis, facts: RemedyFacts) -> tuple[Proposal, Decision]:
    """The remedies for this failure, and what memtop does without asking."""
    diagnosis = replace(diagnosis, environment=together((*diagnosis.environment, *facts.environment)))
    records, settings = model.configurations.records, model.settings
    host = _host(model, facts)
    situation = None if settings is None else _situation(model, settings, diagnosis, facts, host)
    command = _command(model, diagnosis, facts, host)
    found = remedies_for_command(diagnosis, command) if situation is None else remedies(situation)
    candidates = [Candidate(remedy=one, key=_key_after(settings, one)) for one in found if settings is not None]
    beyond = beyond_all_memory(diagnosis, host)
    if settings is None and model.grip is not None and situation is None:
        measured = own_ladder.MemoryRoom(
            base_bytes=_base_bytes(model),
            total_bytes=_total_bytes(model) if model.on_gpu else host.limit_bytes,
            others_bytes=_others_bytes(model, diagnosis, facts),
        )
        candidates = own_ladder.candidates(model, model.grip, diagnosis, measured)
        ids = {one.remedy.id for one in candidates}
        found = (*(one.remedy for one in candidates), *(one for one in found if one.id not in ids))
        if diagnosis.address_space_bytes is not None:
            # The limit is the cause: a smaller batch only puts the failure off.
            found = tuple(sorted(found, key=lambda one: one.id != "address_space"))
    never = _never(model, diagnosis)
    decision = policy.decide(diagnosis, tried(records), candidates, model.run.on_oom, never=never)
    if decision.remedy is not None:
        # The applied remedy is shown first.
        found = (decision.remedy, *(remedy for remedy in found if remedy is not decision.remedy))
    fitting = any(not remedy.needs_consent and remedy.resumable in ("live", "resumes", "converts") for remedy in found)
    advice = () if fitting or situation is None else last_advice(situation)
    causes = cause_of_death(model.trends, diagnosis.kind)
    if beyond is not None:
        causes = (beyond, *causes)
    waiting = None if decision.action == "restart" else decision.why
    return Proposal(diagnosis=diagnosis, causes=causes, remedies=found, last_advice=advice, waiting=waiting), decision


def _never(model: Model, diagnosis: Diagnosis) -> str | None:
    """Why memtop does not start this program again by itself; None if it may."""
    if model.settings is not None:
        return None
    if model.grip is None:
        return _EXTERNAL
    if model.grip.resumes is False:
        return "it did not resume when it was started again, so only you can start it"
    if (why := own_ladder.without_checkpoint(model, model.grip)) is not None:
        return f"{why}, so it would begin from zero"
    if model.grip.profile is not None and model.grip.resumes is None and model.grip.profile.output.step is None:
        return "it has not resumed under memtop yet, and its output would not show at once that it did not, so you decide"
    if diagnosis.source == "words":
        return "only words of the program's output say so, so you decide"
    return None


def tried(records: Sequence[ConfigurationRecord]) -> list[Tried]:
    """The run's past attempts, oldest first, as values for the policy."""
    return [
        Tried(
            key=own_ladder.knobs_key(record.configuration.knobs) if settings is None else configuration_key(settings),
            died_of_memory=record.died_of_memory,
            attempt=start.attempt,
            by_memtop=start.by_memtop,
            saved_before=start.saved_before,
            saved_after=start.saved_after,
        )
        for record in records
        for settings in (record.configuration.settings,)
        for start in record.starts
    ]


def _key_after(settings: Settings, remedy: Remedy) -> str | None:
    if changes_nothing(remedy):
        return None
    try:
        return configuration_key(applied(settings, remedy))
    except SettingsError:
        return None


def _situation(model: Model, settings: Settings, diagnosis: Diagnosis, facts: RemedyFacts, host: HostFacts) -> Situation:
    records = model.configurations.records
    return situation_of(
        diagnosis,
        settings,
        peaks=[peak for record in records if (peak := record.configuration.peak) is not None],
        estimates=_estimates(model, facts),
        host_estimates=None if model.on_gpu else host_estimates_on(None, None, model.configurations.rows, facts.model_config),
        total_bytes=_total_bytes(model),
        run=model.run.name,
        host=host,
        base_bytes=_base_bytes(model),
        others_bytes=_others_bytes(model, diagnosis, facts),
        failed=tuple(_failed(records)),
        on_gpu=model.on_gpu,
        deepspeed=facts.deepspeed,
        allocator=facts.inherited_allocator,
        model_config=facts.model_config,
        seconds_left=_seconds_left(model, settings),
    )


def _seconds_left(model: Model, settings: Settings) -> float | None:
    """From the saved state to the end of the run, at the speed of its newest updates."""
    saved = model.checkpoint if model.checkpoint is not None and model.checkpoint.complete else None
    plan = model.progress.plan
    target = (plan.target_samples if plan is not None else None) or settings.target_samples
    rate = model.progress.speed(settings.effective_batch).samples_per_second
    if saved is None or saved.samples_seen is None or not target or not rate:
        return None
    return max(0, target - saved.samples_seen) / rate


def _estimates(model: Model, facts: RemedyFacts) -> Estimates | None:
    """For the run's smallest GPU; None if it is not known, or without a GPU."""
    gpu = model.smallest_gpu if model.on_gpu else None
    if gpu is None:
        return None
    rows, learned = model.configurations.rows, facts.learned
    return estimates_on(gpu, rows, config=facts.model_config, learned=learned)


def _command(model: Model, diagnosis: Diagnosis, facts: RemedyFacts, host: HostFacts) -> ExternalCommand:
    row = None if model.configurations.present is None else model.configurations.present.configuration
    return ExternalCommand(
        run=model.run.name,
        command=model.run.command,
        allocator=",".join(filter(None, (facts.inherited_allocator, model.allocator))),
        host=host,
        loader_workers=facts.has_loader_workers,
        on_gpu=model.on_gpu,
        has_tokens=row is not None and "seq_len" in {**row.uses, **row.knobs},
        leaks=tuple(trend.subject for trend in that_filled(model.trends, diagnosis.kind)),
    )


def _failed(records: Sequence[ConfigurationRecord]) -> list[Settings]:
    return [
        record.configuration.settings
        for record in records
        if record.died_of_memory and record.configuration.settings is not None
    ]


def _total_bytes(model: Model) -> int | None:
    """The memory of the run's smallest GPU; None if it is not known, or without a GPU: then
    `HostFacts` has the limit."""
    uuids = set(model.progress.devices.values())
    gpus = model.sample.machine.gpus if model.sample is not None else ()
    return min((gpu.total_bytes for gpu in gpus if gpu.uuid in uuids and gpu.total_bytes is not None), default=None)


def _base_bytes(model: Model) -> int | None:
    """Bytes on the run's fullest GPU without a batch (contexts, weights, optimizer), as measured
    between updates.
    """
    bases = model.sample.gpu_base_bytes if model.sample is not None else {}
    held = [
        bases[rank.device_uuid] + rank.allocated_bytes
        for rank in model.progress.rank_memory()
        if rank.device_uuid is not None and rank.device_uuid in bases and rank.allocated_bytes is not None
    ]
    return max(held, default=None)


def _others_bytes(model: Model, diagnosis: Diagnosis, facts: RemedyFacts) -> int | None:
    """Bytes that other programs hold: on a GPU those used when the attempt began, on the host those
    used now.
    """
    if model.on_gpu:
        if diagnosis.other_process_bytes is not None:
            return diagnosis.other_process_bytes
        uuids = set(model.progress.devices.values())
        return max((taken for uuid, taken in facts.gpu_used_before_bytes.items() if uuid in uuids), default=None)
    if model.sample is None or facts.in_own_group:
        return None
    return model.sample.machine.host.used_bytes


def _host(model: Model, facts: RemedyFacts) -> HostFacts:
    host = model.sample.machine.host if model.sample is not None else None
    limit = facts.host_limit_bytes
    if limit is None and host is not None:
        limit = host.limit_bytes or host.total_bytes
    return HostFacts(
        limit_bytes=limit,
        in_cgroup=limit is not None and host is not None and host.total_bytes is not None and limit < host.total_bytes,
        available_bytes=host.available_bytes if host is not None else None,
        memory_bytes=None if host is None or host.total_bytes is None else host.total_bytes + (host.swap_total_bytes or 0),
        disk_free_bytes=facts.disk_free_bytes,
        states=tuple(KeptState(path=state.path, size_bytes=state.size_bytes or 0) for state in facts.kept_states),
    )
