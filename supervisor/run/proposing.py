"""Puts what is known of a run before `supervisor.recovery`: which remedies there are, and which one, if any, is applied."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

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
from memtop.supervisor.run.post_mortem.examine import model_config
from memtop.supervisor.run.processes.launch import inherited_allocator
from memtop.supervisor.run.record.checkpoints import kept_states
from memtop.supervisor.run.record.configurations import Record
from memtop.supervisor.wire import Proposal

if TYPE_CHECKING:
    from memtop.supervisor.run.supervisor import Supervisor


_EXTERNAL = "memtop can change only the allocator of an external command; you can apply the other remedies yourself"


def propose(supervisor: Supervisor, diagnosis: Diagnosis) -> tuple[Proposal, Decision]:
    """What can be done about this failure, and what memtop does about it by itself."""
    records, settings = supervisor.survival.configurations.records, supervisor.settings
    host = _host(supervisor)
    situation = None if settings is None else _situation(supervisor, settings, diagnosis, records, host)
    found = remedies_for_command(diagnosis, _command(supervisor, diagnosis, host)) if situation is None else remedies(situation)
    candidates = [Candidate(remedy=remedy, key=_key_after(settings, remedy)) for remedy in found]
    otherwise = _EXTERNAL if settings is None else None
    past = tried(records, settings, supervisor.survival.allocator)
    decision = decide(diagnosis, past, candidates, supervisor.spec.on_oom, otherwise=otherwise)
    if decision.remedy is not None:
        # The remedy that is applied is shown first.
        found = (decision.remedy, *(remedy for remedy in found if remedy is not decision.remedy))
    fitting = any(not remedy.needs_consent and remedy.resumable in ("live", "resumes", "converts") for remedy in found)
    advice = () if fitting or situation is None else last_advice(situation)
    causes = cause_of_death(supervisor.prevention.trends, diagnosis.kind)
    beyond = beyond_all_memory(diagnosis, host)
    if beyond is not None:
        causes = (beyond, *causes)
    waiting = None if decision.action == "restart" else decision.why
    return Proposal(diagnosis=diagnosis, causes=causes, remedies=found, last_advice=advice, waiting=waiting), decision


def tried(records: Sequence[Record], settings: Settings | None, allocator: str) -> list[Tried]:
    """The run's past, oldest first, as the policy looks at it."""
    return [
        Tried(
            key=_external_key(record.allocator)
            if record.configuration.settings is None
            else configuration_key(record.configuration.settings),
            died_of_memory=record.died_of_memory,
            attempt=start.attempt,
            by_memtop=start.by_memtop,
            saved_before=start.saved_before,
            saved_after=start.saved_after,
        )
        for record in records
        for start in record.starts
    ]


def _external_key(allocator: str) -> str:
    """The key of an external command: memtop knows nothing about its configuration except the allocator options."""
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


def _situation(
    supervisor: Supervisor, settings: Settings, diagnosis: Diagnosis, records: Iterable[Record], host: HostFacts
) -> Situation:
    survival = supervisor.survival
    return situation_of(
        diagnosis,
        settings,
        peaks=[peak for record in records if (peak := record.configuration.peak) is not None],
        total_bytes=_total_bytes(supervisor),
        run=supervisor.folder.name,
        host=host,
        base_bytes=survival.base_bytes(),
        others_bytes=_others_bytes(supervisor, diagnosis),
        failed=tuple(_failed(records)),
        on_gpu=survival.on_gpu,
        deepspeed=importlib.util.find_spec("deepspeed") is not None,
        allocator=inherited_allocator(os.environ),
        model_config=model_config(settings),
    )


def _command(supervisor: Supervisor, diagnosis: Diagnosis, host: HostFacts) -> ExternalCommand:
    return ExternalCommand(
        run=supervisor.folder.name,
        command=tuple(supervisor.spec.command),
        allocator=",".join(filter(None, (inherited_allocator(os.environ), supervisor.survival.allocator))),
        host=host,
        loader_workers="loader worker" in supervisor.watch.roles.values(),
        on_gpu=supervisor.survival.on_gpu,
        leaks=tuple(trend.subject for trend in that_filled(supervisor.prevention.trends, diagnosis.kind)),
    )


def _failed(records: Iterable[Record]) -> list[Settings]:
    return [
        record.configuration.settings
        for record in records
        if record.died_of_memory and record.configuration.settings is not None
    ]


def _total_bytes(supervisor: Supervisor) -> int | None:
    """Of the smallest card of the run; in a run without one the host's limit counts, which `HostFacts` has."""
    machine, uuids = supervisor.watch.machine, set(supervisor.progress.devices.values())
    gpus = machine.gpus if machine is not None else ()
    return min((gpu.total_bytes for gpu in gpus if gpu.uuid in uuids and gpu.total_bytes is not None), default=None)


def _others_bytes(supervisor: Supervisor, diagnosis: Diagnosis) -> int | None:
    """What others hold where training happens: of a card what was taken before the run, of the host what is taken after it."""
    machine, witness = supervisor.watch.machine, supervisor.survival.witness
    if supervisor.survival.on_gpu:
        if diagnosis.other_process_bytes is not None or witness is None:
            return diagnosis.other_process_bytes
        uuids = set(supervisor.progress.devices.values())
        return max((taken for uuid, taken in witness.baseline.gpu_used_bytes.items() if uuid in uuids), default=None)
    if machine is None or witness is None or witness.in_own_group:
        return None
    return machine.host.used_bytes


def _host(supervisor: Supervisor) -> HostFacts:
    machine, witness = supervisor.watch.machine, supervisor.survival.witness
    host = machine.host if machine is not None else None
    limit = witness.host_limit_bytes if witness is not None and witness.host_limit_bytes is not None else None
    if limit is None and host is not None:
        limit = host.limit_bytes or host.total_bytes
    states = kept_states(supervisor.folder.latest_state)
    return HostFacts(
        limit_bytes=limit,
        in_cgroup=limit is not None and host is not None and host.total_bytes is not None and limit < host.total_bytes,
        available_bytes=host.available_bytes if host is not None else None,
        memory_bytes=None if host is None or host.total_bytes is None else host.total_bytes + (host.swap_total_bytes or 0),
        shm_total_bytes=host.shm_total_bytes if host is not None else None,
        disk_free_bytes=supervisor.survival.disk_free_bytes(),
        states=tuple(KeptState(path=state.path, size_bytes=state.size_bytes or 0) for state in states),
    )
