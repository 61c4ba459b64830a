"""Gives `supervisor.recovery` what is known of a run that has died: which remedies there are, and
which one is applied.
"""

from __future__ import annotations

from collections.abc import Sequence

from memtop.presets import SettingsError
from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis
from memtop.supervisor.recovery.configuration import applied, changes_nothing, configuration_key
from memtop.supervisor.recovery.external_command import ExternalCommand, remedies_for_command
from memtop.supervisor.recovery.host_ladder import beyond_all_memory
from memtop.supervisor.recovery.leaks import cause_of_death, that_filled
from memtop.supervisor.recovery.policy import Candidate, Decision, Tried, decide
from memtop.supervisor.recovery.remedies import last_advice, remedies
from memtop.supervisor.recovery.situation import HostFacts, KeptState, Situation, situation_of
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.run.events import Facts
from memtop.supervisor.run.model import Model
from memtop.supervisor.run.record.configurations import ConfigurationRecord
from memtop.supervisor.wire import Proposal

_EXTERNAL = "memtop can change only the allocator of an external command; you can apply the other remedies yourself"


def propose(model: Model, diagnosis: Diagnosis, facts: Facts) -> tuple[Proposal, Decision]:
    """What can be done about this death, and what is done about it without asking."""
    records, settings = model.configurations.records, model.settings
    host = _host(model, facts)
    situation = None if settings is None else _situation(model, settings, diagnosis, facts, host)
    command = _command(model, diagnosis, facts, host)
    found = remedies_for_command(diagnosis, command) if situation is None else remedies(situation)
    candidates = [Candidate(remedy=remedy, key=_key_after(settings, remedy)) for remedy in found]
    beyond = beyond_all_memory(diagnosis, host)
    otherwise = _EXTERNAL if settings is None else None
    decision = decide(diagnosis, tried(records), candidates, model.run.on_oom, otherwise=otherwise)
    if decision.remedy is not None:
        # The remedy that is applied is shown first.
        found = (decision.remedy, *(remedy for remedy in found if remedy is not decision.remedy))
    fitting = any(not remedy.needs_consent and remedy.resumable in ("live", "resumes", "converts") for remedy in found)
    advice = () if fitting or situation is None else last_advice(situation)
    causes = cause_of_death(model.trends, diagnosis.kind)
    if beyond is not None:
        causes = (beyond, *causes)
    waiting = None if decision.action == "restart" else decision.why
    return Proposal(diagnosis=diagnosis, causes=causes, remedies=found, last_advice=advice, waiting=waiting), decision


def tried(records: Sequence[ConfigurationRecord]) -> list[Tried]:
    """The run's past, oldest first, as the policy looks at it."""
    return [
        Tried(
            key=_external_key(record.allocator) if settings is None else configuration_key(settings),
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


def _external_key(allocator: str) -> str:
    """Of an external command memtop knows only the allocator options that it gave it."""
    return f"external command, allocator {allocator or 'unchanged'}"


def _key_after(settings: Settings | None, remedy: Remedy) -> str | None:
    if changes_nothing(remedy):
        return None
    if settings is None:
        return _external_key(remedy.assignments["allocator"]) if set(remedy.assignments) == {"allocator"} else None
    try:
        return configuration_key(applied(settings, remedy))
    except SettingsError:
        return None


def _situation(model: Model, settings: Settings, diagnosis: Diagnosis, facts: Facts, host: HostFacts) -> Situation:
    records = model.configurations.records
    return situation_of(
        diagnosis,
        settings,
        peaks=[peak for record in records if (peak := record.configuration.peak) is not None],
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
    )


def _command(model: Model, diagnosis: Diagnosis, facts: Facts, host: HostFacts) -> ExternalCommand:
    return ExternalCommand(
        run=model.run.name,
        command=model.run.command,
        allocator=",".join(filter(None, (facts.inherited_allocator, model.allocator))),
        host=host,
        loader_workers=facts.has_loader_workers,
        on_gpu=model.on_gpu,
        leaks=tuple(trend.subject for trend in that_filled(model.trends, diagnosis.kind)),
    )


def _failed(records: Sequence[ConfigurationRecord]) -> list[Settings]:
    return [
        record.configuration.settings
        for record in records
        if record.died_of_memory and record.configuration.settings is not None
    ]


def _total_bytes(model: Model) -> int | None:
    """The memory of the run's smallest GPU; without one the host's limit counts, which `HostFacts`
    has.
    """
    uuids = set(model.progress.devices.values())
    gpus = model.sample.machine.gpus if model.sample is not None else ()
    return min((gpu.total_bytes for gpu in gpus if gpu.uuid in uuids and gpu.total_bytes is not None), default=None)


def _base_bytes(model: Model) -> int | None:
    """What the fullest GPU of the run holds without a batch: contexts, weights, optimizer, as
    measured between updates.
    """
    bases = model.sample.gpu_base_bytes if model.sample is not None else {}
    held = [
        bases[rank.device_uuid] + rank.allocated_bytes
        for rank in model.progress.rank_memory()
        if rank.device_uuid is not None and rank.device_uuid in bases and rank.allocated_bytes is not None
    ]
    return max(held, default=None)


def _others_bytes(model: Model, diagnosis: Diagnosis, facts: Facts) -> int | None:
    """What other programs hold where the run trains: of a GPU what was taken before the run, of the
    host what is taken now.
    """
    if model.on_gpu:
        if diagnosis.other_process_bytes is not None:
            return diagnosis.other_process_bytes
        uuids = set(model.progress.devices.values())
        return max((taken for uuid, taken in facts.gpu_used_before_bytes.items() if uuid in uuids), default=None)
    if model.sample is None or facts.in_own_group:
        return None
    return model.sample.machine.host.used_bytes


def _host(model: Model, facts: Facts) -> HostFacts:
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
