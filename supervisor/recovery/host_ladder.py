"""What can be done about short host memory, shared memory, pinned memory and disk. Pure.

On a GPU run none of them is helped by a smaller micro-batch: that lies on the card. In training on the CPU it does.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from memtop.presets.schema import HostLevel
from memtop.supervisor import units
from memtop.supervisor.diagnosis.sentences import size
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.monitor.bands import EDGE_FROM
from memtop.supervisor.recovery.gpu_ladder import Rung, checkpointing, chunked_loss, eval_batch, offload_bytes
from memtop.supervisor.recovery.learning import learning_rungs
from memtop.supervisor.recovery.situation import HostFacts, Situation, to_do, train_command
from memtop.supervisor.recovery.splits import smaller_split
from memtop.supervisor.recovery.to_copy import copied
from memtop.supervisor.recovery.values import Remedy

_NEXT_LEVEL: dict[HostLevel, HostLevel] = {"standard": "low", "low": "extreme"}
PROVEN = 0.5
"""Below this confidence nothing is made smaller: perhaps it was not memory at all."""


def host_ladder(situation: Situation) -> Iterator[Rung]:
    """Rungs for a shortage of host memory, the cheapest first."""
    if situation.diagnosis.confidence < PROVEN:
        yield "a smaller configuration: that it was memory is not proven"
        yield copied("who_killed")
        return
    if situation.on_gpu:
        yield "a smaller micro-batch: what it saves lies on the card, not in host memory"
    elif situation.diagnosis.phase not in ("data", "load"):
        if situation.diagnosis.phase == "evaluation":
            yield eval_batch(situation)
        yield smaller_split(situation)
        yield checkpointing(situation)
        yield chunked_loss(situation)
    limited = situation.diagnosis.address_space_bytes is not None
    if limited:
        yield "loader workers: a limit of address space counts for each process by itself"
    else:
        yield no_workers(situation, "each holds its own copy of what it touches")
    if situation.on_gpu:
        yield pin_off(situation)
    yield host_level(situation)
    yield offload_off(situation)
    yield fewer_processes(situation)
    if not situation.on_gpu:
        yield from learning_rungs(situation)
    yield from more_host_memory(situation.diagnosis, situation.host)


def more_host_memory(of: Diagnosis, host: HostFacts | None) -> Iterator[Remedy | str]:
    """What a person can do about the limit that was met, or about the machine."""
    beyond = beyond_all_memory(of, host)
    if beyond is not None:
        yield beyond
    elif of.address_space_bytes is not None:
        yield copied("address_space")
        yield "swap: it is the address space that is limited, not the memory"
    else:
        if of.allowed_bytes is not None or (host is not None and host.in_cgroup):
            yield copied("memory_limit")
        yield copied("swap")


def beyond_all_memory(of: Diagnosis, host: HostFacts | None) -> str | None:
    """That more was asked for at once than there is memory at all; None where that is not so, or not known."""
    asked, there = of.requested_bytes, host.memory_bytes if host is not None else None
    if of.kind is not Kind.HOST_OOM_ALLOC or asked is None or there is None or asked <= there:
        return None
    return (
        f"no setting of the machine helps: {size(asked)} were asked for at once, and all its memory and swap are "
        f"{size(there)}: look for a wrong size in the program"
    )


def shm_ladder(situation: Situation) -> Iterator[Rung]:
    yield no_workers(situation, "batches then do not pass through /dev/shm")
    yield copied("shm")
    yield copied("shm_container")


def pinned_ladder(situation: Situation) -> Iterator[Rung]:
    yield pin_off(situation)
    yield offload_off(situation)
    yield copied("memlock")


def disk_ladder(situation: Situation) -> Iterator[Rung]:
    """memtop deletes nothing: it says what takes the room."""
    yield fewer_states(situation)
    yield free_disk(situation)
    command = train_command(situation.settings, {}, "--runs-dir", "/PATH/WITH/ROOM")
    yield to_do("runs_dir", "another place for the runs", "a new run there; this one stays as it is", command)


def no_workers(situation: Situation, why: str) -> Rung:
    settings = situation.settings
    if not settings.workers:
        return "loader workers: there are none"
    count = settings.workers * settings.world_size
    ranks = f" in each of {settings.world_size} ranks" if settings.world_size > 1 else ""
    return situation.rung(
        "workers",
        f"{count} worker process{'es' if count > 1 else ''} less: {why}; data are then read by the training process itself",
        {"workers": "0"},
        title=f"loader workers {settings.workers} -> 0{ranks}",
        unforeseen=_NOT_FORESEEN,
    )


_NOT_FORESEEN = "how much host memory it gives back was not measured"


def pin_off(situation: Situation) -> Rung:
    if situation.settings.pin_memory is False:
        return "pinned buffers: off already"
    return situation.rung(
        "pin_memory",
        "page-locked buffers cannot be swapped and come out of host memory; off, copies to the card wait a little",
        {"pin_memory": "false"},
        title="no page-locked buffers",
        unforeseen=_NOT_FORESEEN,
    )


def host_level(situation: Situation) -> Rung:
    level = _NEXT_LEVEL.get(situation.settings.host_level)
    if level is None:
        return "data in smaller pieces: the smallest already"
    return situation.rung(
        "host_level",
        "data are read in smaller pieces and fewer of them are kept",
        {"host_level": level},
        title=f"host memory level {situation.settings.host_level} -> {level}",
        unforeseen=_NOT_FORESEEN,
    )


def offload_off(situation: Situation) -> Rung:
    """The optimizer back onto the card, where the card has room for it by forecast."""
    settings, needed = situation.settings, offload_bytes(situation)
    if not settings.zero.offload_optimizer:
        return None
    line, total = situation.line(), situation.total_bytes
    if isinstance(line, str) or needed is None or total is None:
        return "optimizer back onto the card: whether it has room is not known"
    share = needed // settings.world_size
    estimate = line.shifted(share, f"the optimizer's {units.size(share)} come back onto the card")
    fraction = (estimate.at(settings.batch) + (situation.others_bytes or 0)) / total
    if fraction >= EDGE_FROM:
        return f"optimizer back onto the card: it would be {units.percent(fraction)} full"
    values = {"zero.offload_optimizer": "false"}
    if settings.optimizer == "cpu_adam":
        values["optimizer"] = "adamw"
    return situation.rung(
        "offload_off",
        f"gives back {units.size(needed)} of host memory, and is faster",
        values,
        title="optimizer state back onto the card",
        estimate=estimate,
    )


def fewer_processes(situation: Situation) -> Rung:
    """Half as many ranks with twice the accumulation: W is a run's own, so this is a new one."""
    settings = situation.settings
    if settings.world_size == 1:
        return None
    fewer = settings.world_size // 2 if settings.world_size % 2 == 0 else 1
    accumulation = settings.accumulation * settings.world_size // fewer
    command = train_command(settings, {"accumulation": str(accumulation)}, "--gpus", f"free:{fewer}")
    return _as_new_run(
        to_do(
            "processes",
            f"processes {settings.world_size} -> {fewer}, accumulation {settings.accumulation} -> {accumulation}: "
            f"effective batch stays {settings.effective_batch}",
            "every rank holds its own copy of the program and its data; a new run",
            command,
        )
    )


def _as_new_run(remedy: Remedy) -> Remedy:
    return replace(remedy, resumable="new run", forecast_unknown=_NOT_FORESEEN)


def fewer_states(situation: Situation) -> Rung:
    limit = situation.settings.save_total_limit
    if limit <= 2:
        return "fewer kept states: the newest and the one before it are always kept"
    sizes = [state.size_bytes for state in situation.host.states]
    room = f": {units.size(sum(sizes[2:]))} less on disk" if len(sizes) > 2 else ""
    return situation.rung(
        "save_total_limit",
        f"older states go at the next save{room}; the best state is kept apart",
        {"save_total_limit": "2"},
        title=f"kept states {limit} -> 2",
        speed=1.0,
        unforeseen="about disk, not memory",
    )


def free_disk(situation: Situation) -> Remedy:
    states = situation.host.states
    listed = ", ".join(f"{state.path} {units.size(state.size_bytes)}" for state in states[:6])
    free = situation.host.disk_free_bytes
    room = f"{units.size(free)} are free" if free is not None else "the disk is full"
    return to_do(
        "free_disk",
        "make room on the disk",
        f"{room}" + (f"; this run keeps {listed}" if listed else "") + "; memtop deletes nothing by itself",
        f"du -xh --max-depth=2 {_folder_of(situation)} | sort -h | tail",
    )


def _folder_of(situation: Situation) -> str:
    states = situation.host.states
    return states[0].path.rpartition("/")[0] or "." if states else "."
