"""The remedies for a lack of host memory, shared memory, pinned memory or disk space. Pure
functions.

In training on a GPU, a smaller micro-batch helps none of them, because it is on the GPU. In
training on the CPU it does.
"""

from __future__ import annotations

from collections.abc import Iterator

from memtop.presets import edit_settings
from memtop.presets.schema import HostLevel
from memtop.supervisor import units
from memtop.supervisor.diagnosis.environment import MANAGED, Place
from memtop.supervisor.diagnosis.values import Diagnosis, Kind, size
from memtop.supervisor.monitor.values import EDGE_FROM
from memtop.supervisor.recovery.advice import advice, raised
from memtop.supervisor.recovery.configuration import optimizer_on_gpu
from memtop.supervisor.recovery.gpu_ladder import (
    Rung,
    checkpointing,
    chunked_loss,
    eval_batch,
    offload_bytes,
    rungs_that_change_training,
    smaller_split,
)
from memtop.supervisor.recovery.peak_line import PeakLine
from memtop.supervisor.recovery.policy import SURE
from memtop.supervisor.recovery.situation import HostFacts, Situation, restart_command, to_do, train_command
from memtop.supervisor.recovery.values import Remedy

_NEXT_LEVEL: dict[HostLevel, HostLevel] = {"standard": "low", "low": "extreme"}


def host_ladder(situation: Situation) -> Iterator[Rung]:
    """Rungs for a shortage of host memory, the cheapest first."""
    if situation.diagnosis.confidence < SURE:
        yield "a smaller configuration: a lack of memory is not proven"
        yield from advice("who_killed", situation.diagnosis.environment)
        return
    limited = situation.diagnosis.address_space_bytes is not None
    if limited:
        # The limit is the cause: what saves memory only puts the failure off.
        yield from more_host_memory(situation.diagnosis, situation.host)
    if situation.on_gpu:
        yield "a smaller micro-batch: it saves GPU memory, not host memory"
    elif situation.diagnosis.phase not in ("data", "load"):
        if situation.diagnosis.phase == "evaluation":
            yield eval_batch(situation)
        yield smaller_split(situation)
        yield checkpointing(situation)
        yield chunked_loss(situation)
    if limited:
        yield "loader workers: each process has its own limit of address space"
    else:
        yield no_workers(situation, "each has its own copy of the data that it reads")
    if situation.on_gpu:
        yield pin_off(situation)
    yield host_level(situation)
    yield offload_off(situation)
    yield fewer_processes(situation)
    if not situation.on_gpu:
        yield from rungs_that_change_training(situation)
    if not limited:
        yield from more_host_memory(situation.diagnosis, situation.host)


def more_host_memory(diagnosis: Diagnosis, host: HostFacts | None) -> Iterator[Remedy | str]:
    """What a person can do about the limit that was reached, or about the machine."""
    beyond = beyond_all_memory(diagnosis, host)
    if beyond is not None:
        yield beyond
    elif diagnosis.address_space_bytes is not None:
        limit = raised(diagnosis.address_space_bytes, diagnosis.requested_bytes)
        yield from advice("address_space", diagnosis.environment, limit=limit)
        yield "swap: the address space is limited, not the memory"
    else:
        if _is_limited(diagnosis, host):
            limit = raised(_reached(diagnosis, host), diagnosis.requested_bytes)
            yield from advice("limit", diagnosis.environment, limit=limit)
        yield from advice("machine", diagnosis.environment)


def _reached(diagnosis: Diagnosis, host: HostFacts | None) -> int | None:
    """The memory limit of the job, pod or container that was reached, if it is known. A program
    that is refused memory names a limit of its own."""
    if diagnosis.kind is Kind.HOST_OOM_KILLED and diagnosis.allowed_bytes is not None:
        return diagnosis.allowed_bytes
    return host.limit_bytes if host is not None and host.in_cgroup else None


def _is_limited(diagnosis: Diagnosis, host: HostFacts | None) -> bool:
    """Whether the program has a memory limit below the machine's memory.

    Schedulers always set one. Containers have one only if it was requested.
    """
    managers = MANAGED.intersection(diagnosis.environment)
    known = diagnosis.allowed_bytes is not None or Place.CGROUP in diagnosis.environment
    if managers - {Place.DOCKER} or known:
        return True
    return bool(managers) if host is None else host.in_cgroup


def beyond_all_memory(diagnosis: Diagnosis, host: HostFacts | None) -> str | None:
    """A sentence if one request was larger than all memory of the machine; None if it was not, or
    is not known."""
    requested, memory = diagnosis.requested_bytes, host.memory_bytes if host is not None else None
    if diagnosis.kind is not Kind.HOST_OOM_ALLOC or requested is None or memory is None or requested <= memory:
        return None
    return (
        f"no setting of the machine helps: one request was for {size(requested)}, and the machine has {size(memory)} of memory "
        "and swap in all: look for a wrong size in the program"
    )


def shm_ladder(situation: Situation) -> Iterator[Rung]:
    yield no_workers(situation, "batches then do not use /dev/shm")
    yield from advice("shm", situation.diagnosis.environment)


def pinned_ladder(situation: Situation) -> Iterator[Rung]:
    yield pin_off(situation)
    yield offload_off(situation)
    yield from advice("pinned", situation.diagnosis.environment)


def disk_ladder(situation: Situation) -> Iterator[Rung]:
    """memtop deletes nothing: it shows what uses the disk."""
    yield fewer_states(situation)
    yield free_disk(situation)
    command = train_command(situation.settings, {}, "--runs-dir", "/PATH/WITH/ROOM")
    yield to_do("runs_dir", "another disk for the runs", "start a new run there; this one stays unchanged", command)


def no_workers(situation: Situation, why: str) -> Rung:
    settings = situation.settings
    if not settings.workers:
        return "loader workers: the run has none"
    count = settings.workers * settings.world_size
    ranks = f" in each of {settings.world_size} ranks" if settings.world_size > 1 else ""
    return situation.rung(
        "workers",
        f"{count} worker process{'es' if count > 1 else ''} less: {why}; the training process then reads the data itself",
        {"workers": "0"},
        title=f"loader workers {settings.workers} -> 0{ranks}",
        unforeseen=_NOT_FORESEEN,
    )


_NOT_FORESEEN = "how much host memory this saves was not measured"


def pin_off(situation: Situation) -> Rung:
    if situation.settings.pin_memory is False:
        return "pinned buffers: already off"
    return situation.rung(
        "pin_memory",
        "page-locked buffers use host memory that cannot be swapped; without them, copies to the GPU are a little slower",
        {"pin_memory": "false"},
        title="no page-locked buffers",
        unforeseen=_NOT_FORESEEN,
    )


def host_level(situation: Situation) -> Rung:
    level = _NEXT_LEVEL.get(situation.settings.host_level)
    if level is None:
        return "host memory level: already the lowest"
    return situation.rung(
        "host_level",
        "the data are read in smaller pieces, and fewer of them are kept",
        {"host_level": level},
        title=f"host memory level {situation.settings.host_level} -> {level}",
        unforeseen=_NOT_FORESEEN,
    )


def offload_off(situation: Situation) -> Rung:
    """The optimizer state back on the GPU, if it is forecast to fit there."""
    settings, needed = situation.settings, offload_bytes(situation)
    if not settings.zero.offload_optimizer:
        return None
    if needed is None:
        return _NOT_KNOWN
    line, values, estimate = situation.line(), optimizer_on_gpu(settings), None
    if isinstance(line, PeakLine):
        share = needed // settings.world_size
        estimate = line.shifted(share, f"the optimizer's {units.size(share)} return to the GPU")
    found = situation.foresee(edit_settings(settings, assignments=values), estimate)
    if isinstance(found, str) or found.fraction is None:
        return _NOT_KNOWN
    if found.fraction >= EDGE_FROM:
        return f"optimizer back on the GPU: it would be {units.percent(found.fraction)} full"
    return situation.rung(
        "offload_off",
        f"saves {units.size(needed)} of host memory, and is faster",
        values,
        title="optimizer state back on the GPU",
        estimate=estimate,
    )


_NOT_KNOWN = "optimizer back on the GPU: whether it fits is not known"


def fewer_processes(situation: Situation) -> Rung:
    """Half as many ranks with twice the accumulation."""
    settings = situation.settings
    if settings.world_size == 1:
        return None
    if settings.rank_splits:
        return "fewer processes: each has a batch of its own, which names its GPU"
    fewer = settings.world_size // 2 if settings.world_size % 2 == 0 else 1
    accumulation = settings.accumulation * settings.world_size // fewer
    gpus = ",".join(settings.gpus.split(",")[:fewer]) if settings.gpus else f"free:{fewer}"
    return to_do(
        "processes",
        f"processes {settings.world_size} -> {fewer}, accumulation {settings.accumulation} -> {accumulation}: "
        f"effective batch stays {settings.effective_batch}",
        "every rank has its own copy of the program and its data; the run resumes",
        restart_command(situation.run, {"accumulation": str(accumulation)}, gpus=gpus),
    )


def fewer_states(situation: Situation) -> Rung:
    limit = situation.settings.save_total_limit
    if limit <= 2:
        return "fewer saved states: the newest two are always kept"
    sizes = [state.size_bytes for state in situation.host.states]
    room = f": {units.size(sum(sizes[2:]))} less on disk" if len(sizes) > 2 else ""
    return situation.rung(
        "save_total_limit",
        f"older states are deleted at the next save{room}; the best state is kept separately",
        {"save_total_limit": "2"},
        title=f"saved states {limit} -> 2",
        speed=1.0,
        unforeseen="it saves disk space, not memory",
    )


def free_disk(situation: Situation) -> Remedy:
    states = situation.host.states
    listed = ", ".join(f"{state.path} {units.size(state.size_bytes)}" for state in states[:6])
    free = situation.host.disk_free_bytes
    room = f"{units.size(free)} are free" if free is not None else "the disk is full"
    return to_do(
        "free_disk",
        "free disk space",
        f"{room}" + (f"; this run's saved states are {listed}" if listed else "") + "; memtop deletes nothing by itself",
        f"du -xh --max-depth=2 {_folder_of(situation)} | sort -h | tail",
    )


def _folder_of(situation: Situation) -> str:
    states = situation.host.states
    return states[0].path.rpartition("/")[0] or "." if states else "."
