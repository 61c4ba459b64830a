"""Puts what is known of a run before `supervisor.recovery`: which remedies there are, and which one, if any, is applied."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from memtop.presets import SettingsError
from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis
from memtop.supervisor.recovery.advice import last_advice
from memtop.supervisor.recovery.applying import applied, changes_nothing
from memtop.supervisor.recovery.applying import key as key_of
from memtop.supervisor.recovery.host_ladder import beyond_all_memory
from memtop.supervisor.recovery.leaks import cause_of_death, that_filled
from memtop.supervisor.recovery.own_program import Seen
from memtop.supervisor.recovery.policy import Candidate, Decision, Tried, decide
from memtop.supervisor.recovery.remedies import HostFacts, KeptState, remedies, situation_of
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.run.post_mortem.examine import model_config
from memtop.supervisor.run.processes.launch import inherited_allocator
from memtop.supervisor.run.record.checkpoints import kept_states
from memtop.supervisor.run.record.configurations import Record
from memtop.supervisor.wire import Proposal

if TYPE_CHECKING:
    from memtop.supervisor.run.supervisor import Supervisor


_OWN = "it is your own program, in which memtop changes nothing but the allocator: what is left is for you to do"


def propose(supervisor: Supervisor, diagnosis: Diagnosis) -> tuple[Proposal, Decision]:
    """What can be done about this death, and what is done about it by itself."""
    records = supervisor.survival.configurations.records
    found = _remedies(supervisor, diagnosis, records)
    settings, allocator = supervisor.settings, supervisor.survival.allocator
    candidates = [Candidate(remedy=remedy, key=_key_after(settings, remedy)) for remedy in found]
    beyond = beyond_all_memory(diagnosis, _host(supervisor))
    otherwise = _OWN if settings is None else None
    past = tried(records, settings, allocator)
    decision = decide(diagnosis, past, candidates, supervisor.spec.on_oom, otherwise=otherwise)
    if decision.remedy is not None:
        # The first one shown is the one that is applied.
        found = (decision.remedy, *(remedy for remedy in found if remedy is not decision.remedy))
    fitting = any(not remedy.needs_consent and remedy.resumable in ("live", "resumes", "converts") for remedy in found)
    advice = () if fitting else _last_advice(supervisor, diagnosis, records)
    causes = cause_of_death(supervisor.prevention.trends, diagnosis.kind)
    if beyond is not None:
        causes = (beyond, *causes)
    waiting = None if decision.action == "restart" else decision.why
    return Proposal(diagnosis=diagnosis, causes=causes, remedies=found, last_advice=advice, waiting=waiting), decision


def tried(records: Sequence[Record], settings: Settings | None, allocator: str) -> list[Tried]:
    """The run's past, oldest first, as the policy looks at it."""
    return [
        Tried(
            key=_own_key(record.allocator) if record.configuration.settings is None else key_of(record.configuration.settings),
            died_of_memory=record.died_of_memory,
            attempt=start.attempt,
            by_memtop=start.by_memtop,
            saved_before=start.saved_before,
            saved_after=start.saved_after,
        )
        for record in records
        for start in record.starts
    ]


def _own_key(allocator: str) -> str:
    """Of a program of the user's own memtop knows no more than what it gave it."""
    return f"own program, allocator {allocator or 'as it is'}"


def _key_after(settings: Settings | None, remedy: Remedy) -> str | None:
    if changes_nothing(remedy):
        return None
    if settings is None:
        return _own_key(remedy.assignments["allocator"]) if set(remedy.assignments) == {"allocator"} else None
    try:
        return key_of(applied(settings, remedy))
    except SettingsError:
        return None


def _remedies(supervisor: Supervisor, diagnosis: Diagnosis, records: Iterable[Record]) -> tuple[Remedy, ...]:
    settings, survival = supervisor.settings, supervisor.survival
    if settings is None:
        present = ",".join(filter(None, (inherited_allocator(os.environ), survival.allocator)))
        name, seen = supervisor.folder.name, _seen(supervisor, diagnosis)
        return remedies(diagnosis, None, run=name, seen=seen, allocator=present, host=_host(supervisor))
    return remedies(
        diagnosis,
        settings,
        peaks=[peak for record in records if (peak := record.configuration.peak) is not None],
        total_bytes=_total_bytes(supervisor),
        run=supervisor.folder.name,
        host=_host(supervisor),
        base_bytes=survival.base_bytes(),
        others_bytes=_others_bytes(supervisor, diagnosis),
        failed=_failed(records),
        on_gpu=survival.on_gpu,
        deepspeed=importlib.util.find_spec("deepspeed") is not None,
        allocator=inherited_allocator(os.environ),
        model_config=model_config(settings),
    )


def _seen(supervisor: Supervisor, diagnosis: Diagnosis) -> Seen:
    """What is known of a program of the user's own."""
    return Seen(
        command=tuple(supervisor.spec.command),
        loader_workers="loader worker" in supervisor.watch.roles.values(),
        on_gpu=supervisor.survival.on_gpu,
        leaks=tuple(trend.subject for trend in that_filled(supervisor.prevention.trends, diagnosis.kind)),
    )


def _last_advice(supervisor: Supervisor, diagnosis: Diagnosis, records: Iterable[Record]) -> tuple[str, ...]:
    if supervisor.settings is None:
        return ()
    return last_advice(
        situation_of(
            diagnosis,
            supervisor.settings,
            run=supervisor.folder.name,
            total_bytes=_total_bytes(supervisor),
            others_bytes=_others_bytes(supervisor, diagnosis),
            host=_host(supervisor),
            on_gpu=supervisor.survival.on_gpu,
            failed=tuple(_failed(records)),
            model_config=model_config(supervisor.settings),
        )
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
