"""Splits a GPU's used memory into parts, from the driver's numbers and the ranks' reports on
torch's allocator.

Pure functions of one sample. The sources are not read at the same moment: the driver's process list
may be 2 s older than its totals, and a rank's report is as old as its newest update. The totals are
taken as correct. Parts that exceed them are cut, with a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from memtop.supervisor.monitor.values import GpuProcess, GpuSample, MigInstance


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory and the times of one rank at its newest update, as the agent in it measured them.

    Device bytes are None on CPU.
    """

    rank: int
    pid: int
    connected: bool = False
    """Whether the agent is connected to the supervisor."""
    device_uuid: str | None = None
    allocated_bytes: int | None = None
    """Tensors."""
    reserved_bytes: int | None = None
    """What torch's allocator holds: tensors and its cache."""
    peak_bytes: int | None = None
    """The most allocated during that update. For external commands: ever."""
    peak_reserved_bytes: int | None = None
    """The most reserved during that update. The GPU must provide this in addition to the CUDA
    context."""
    rss_bytes: int | None = None
    pss_bytes: int | None = None
    """Host memory with shared pages divided among the processes that map them: the rank's part of
    the run's memory, when the supervisor last read it."""
    step_seconds: float | None = None
    """Of that update. Ranks that exchange gradients wait for the slowest, so theirs are alike."""
    data_wait_seconds: float | None = None
    """What of it the rank waited for data."""
    time: float | None = None
    """When the update was reported, in seconds since the epoch."""


class JobVram(msgspec.Struct, frozen=True, kw_only=True):
    """Another job on the GPU. `used_bytes` is None if the driver does not report it."""

    name: str
    used_bytes: int | None


class VramParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one GPU's memory, in bytes. The known parts add up to `total_bytes` exactly.

    A part that is None is unknown, with the reason in `unknown`; its memory is in
    `unaccounted_bytes`.
    """

    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    """Tensors of this run."""
    cached_bytes: int | None = None
    """Reserved by torch's allocator but not in use. Emptying the cache frees at most this."""
    context_bytes: int | None = None
    """The CUDA contexts of this run: the least that it has held outside the allocator."""
    other_own_bytes: int | None = None
    """What else this run's processes hold: NCCL buffers, library workspaces.

    Includes the contexts while their size is unknown.
    """
    jobs: tuple[JobVram, ...] = ()
    """Living processes of other jobs, by job, the largest first."""
    driver_reserved_bytes: int | None = None
    gone_bytes: int | None = None
    """Listed under processes that have ended."""
    unlisted_bytes: int | None = None
    """In use, but listed under no process."""
    unlisted_has_no_owner: bool = False
    """memtop sees all processes, so no living process holds `unlisted_bytes`. Else other containers
    may hold it."""
    unaccounted_bytes: int | None = None
    """In use, but the driver reports too little to find out by whom."""
    rest_of_machine_bytes: int | None = None
    """Unified memory only: what the machine uses in addition to the GPU's processes."""
    unknown: dict[str, str] = {}


_NO_RESERVE = "the driver reports its own reserve only as part of the used memory"
_NO_TOTALS = "the driver does not report this GPU's memory"
_NO_PROCESS_MEMORY = "the driver does not report memory per process here"
_NOT_SEEN = "the driver's processes are not visible from this container: they may belong to this run or to others"


def ranks_on(gpu: GpuSample, ranks: Iterable[RankMemory], *, mig: MigInstance | None = None) -> list[RankMemory]:
    """The ranks whose device is this GPU (or this MIG instance of it).

    See `placed` for ranks with an unknown device.
    """
    uuids = [mig.uuid] if mig is not None else [gpu.uuid, *(instance.uuid for instance in gpu.mig)]
    bare = {_bare(uuid) for uuid in uuids if uuid is not None}
    return [rank for rank in ranks if rank.device_uuid is not None and _bare(rank.device_uuid) in bare]


def placed(ranks: Iterable[RankMemory], gpus: Sequence[GpuSample]) -> list[RankMemory]:
    """The ranks with their devices: the one that the rank reported, else the one where the driver
    lists most of its memory.

    (A process may have a small context on every GPU.) A rank that the driver does not list keeps
    None.
    """
    found = []
    for rank in ranks:
        if rank.device_uuid is None:
            seen = [(row.used_bytes or 0, gpu, row) for gpu in gpus for row in gpu.processes if row.pid == rank.pid]
            if seen:
                _, gpu, row = max(seen, key=lambda one: one[0])
                part = next((mig for mig in gpu.mig if mig.position == row.mig_instance), None)
                rank = msgspec.structs.replace(rank, device_uuid=gpu.uuid if part is None else part.uuid)
        found.append(rank)
    return found


def _bare(uuid: str) -> str:
    """A UUID without its prefix: CUDA uses the same prefix for MIG instances as for GPUs, the
    driver does not."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def vram_parts(
    gpu: GpuSample,
    ranks: Iterable[RankMemory] = (),
    *,
    run: str | None = None,
    own_pids: Iterable[int] = (),
    base_bytes: int | None = None,
    job_names: Mapping[str, str] | None = None,
    mig: MigInstance | None = None,
    all_pids_visible: bool = False,
) -> VramParts:
    """Split the memory of this GPU (or of this MIG instance of it) into parts.

    The ranks, `run` and `own_pids` identify this run's processes. `base_bytes` is the size of its
    CUDA contexts (RunState.gpu_base_bytes). `job_names` maps GpuProcess.job to a name.
    `all_pids_visible`: we see all processes of the machine.
    """
    source = gpu if mig is None else mig
    total, free = source.total_bytes, source.free_bytes
    if not total or total < 0 or free is None:
        return _nothing(source.error or source.unknown.get("total_bytes") or _NO_TOTALS)
    free = min(max(0, free), total)
    here = ranks_on(gpu, ranks, mig=mig)
    pids = {rank.pid for rank in here} | set(own_pids)
    rows = _rows(gpu, mig)
    own = [row for row in rows if row.pid in pids or (run is not None and row.run == run)]
    hidden = _hidden(rows, own, here)
    listed = [row for row in rows if row not in own and row not in hidden]
    split = _Remainder(total - free)
    split.set("driver_reserved_bytes", source.reserved_bytes, source.unknown.get("reserved_bytes", _NO_RESERVE))
    _own_parts(split, here, own, base_bytes)
    jobs = _job_parts(split, [row for row in listed if not row.gone], job_names or {})
    _set_rows(split, "gone_bytes", [row for row in listed if row.gone])
    _rest(split, gpu, source.reserved_bytes is None, rows, hidden)
    sees_all = all_pids_visible and not gpu.unified and not any(row.gone for row in rows) and _are_listed(here, rows)
    return VramParts(
        total_bytes=total,
        free_bytes=free,
        jobs=jobs,
        unlisted_has_no_owner=sees_all and bool(split.parts.get("unlisted_bytes")),
        unknown=split.unknown,
        **split.parts,
    )


def step_peak_bytes(parts: VramParts, ranks: Sequence[RankMemory]) -> int | None:
    """The most memory that was in use on the GPU during the newest update, including the driver's
    reserve.

    `ranks` are those on this GPU (see `ranks_on`). Their allocators' peaks replace what the
    allocators hold now. If several ranks share the GPU, the result is an upper bound, because their
    peaks may be at different moments. None if the peak of a rank is unknown.
    """
    peaks = [rank.peak_reserved_bytes for rank in ranks]
    if not peaks or parts.total_bytes is None or parts.free_bytes is None:
        return None
    if parts.cached_bytes is None:
        return None
    outside = parts.total_bytes - parts.free_bytes - (parts.allocated_bytes or 0) - parts.cached_bytes
    peak = 0
    for one in peaks:
        if one is None:
            return None
        peak += one
    return min(parts.total_bytes, max(outside + peak, parts.total_bytes - parts.free_bytes))


class _Remainder:
    """Distributes the used memory to the parts, never more than there is."""

    def __init__(self, used: int) -> None:
        self.left = used
        self.parts: dict[str, int] = {}
        self.unknown: dict[str, str] = {}

    def take(self, wanted: int) -> int:
        given = min(max(0, wanted), self.left)
        self.left -= given
        return given

    def set(self, field: str, wanted: int | None, reason: str) -> None:
        """Give this part its memory. If its size is unknown, note the reason."""
        if wanted is None:
            self.unknown[field] = reason
        else:
            self.parts[field] = self.take(wanted)


def _nothing(reason: str) -> VramParts:
    plain = ("jobs", "unknown", "unlisted_has_no_owner")
    return VramParts(unknown={field: reason for field in VramParts.__struct_fields__ if field not in plain})


def _rows(gpu: GpuSample, mig: MigInstance | None) -> tuple[GpuProcess, ...]:
    return gpu.processes if mig is None else tuple(row for row in gpu.processes if row.mig_instance == mig.position)


def _are_listed(ranks: Sequence[RankMemory], rows: Sequence[GpuProcess]) -> bool:
    return {rank.pid for rank in ranks} <= {row.pid for row in rows}


def _hidden(rows: Sequence[GpuProcess], own: Sequence[GpuProcess], ranks: Sequence[RankMemory]) -> list[GpuProcess]:
    """Rows that may be our own ranks with another pid: the driver reports the machine's pids, not
    the container's."""
    if _are_listed(ranks, rows):
        return []
    return [row for row in rows if row.started_ticks is None and not row.gone and row not in own]


def _sum(values: Iterable[int | None]) -> int | None:
    """The sum. None if one value is unknown."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += max(0, value)
    return total


def _own_parts(split: _Remainder, ranks: Sequence[RankMemory], own: Sequence[GpuProcess], base: int | None) -> None:
    """What this run holds: in torch's allocator as the ranks report it, outside of it as the driver
    reports it."""
    if not ranks and not own:
        for field in ("allocated_bytes", "cached_bytes", "context_bytes", "other_own_bytes"):
            split.parts[field] = 0
        return
    held = _sum(row.used_bytes for row in own) if own and _are_listed(ranks, own) else None
    reserved = _sum(rank.reserved_bytes for rank in ranks) if ranks else None
    if held is not None:
        held = min(held, split.left)
    if reserved is None:
        _unreported(split, held, own)
        return
    inside = split.take(reserved if held is None else min(reserved, held))
    allocated = _sum(rank.allocated_bytes for rank in ranks)
    if allocated is None:
        split.unknown["allocated_bytes"] = "the ranks report only the total of their allocators: it is counted as cached_bytes"
    else:
        split.parts["allocated_bytes"] = min(allocated, inside)
    split.parts["cached_bytes"] = inside - split.parts.get("allocated_bytes", 0)
    if held is None:
        reason = _NO_PROCESS_MEMORY if _are_listed(ranks, own) else "the driver does not list this run's processes here"
        split.unknown |= dict.fromkeys(("context_bytes", "other_own_bytes"), reason)
        return
    outside = held - inside
    context = None if base is None else min(max(0, base), outside)
    split.set("context_bytes", context, "not measured yet in this attempt: it is counted as other_own_bytes")
    split.set("other_own_bytes", outside - (context or 0), "")


def _unreported(split: _Remainder, held: int | None, own: Sequence[GpuProcess]) -> None:
    """No rank has reported its allocator: all memory of the run that the driver reports goes into
    one part."""
    reason = "no rank has reported it yet" + ("" if held is None else ": it is counted as other_own_bytes")
    split.unknown |= dict.fromkeys(("allocated_bytes", "cached_bytes", "context_bytes"), reason)
    missing = _NO_PROCESS_MEMORY if own else "the driver does not list this run's processes here"
    split.set("other_own_bytes", held, missing)


def _job_parts(split: _Remainder, rows: Sequence[GpuProcess], names: Mapping[str, str]) -> tuple[JobVram, ...]:
    by_job: dict[str, list[GpuProcess]] = {}
    for row in rows:
        by_job.setdefault(row.job or row.run or f"pid {row.pid}", []).append(row)
    jobs = []
    for key, members in by_job.items():
        used = _sum(row.used_bytes for row in members)
        name = names.get(key) or members[0].run or members[0].name or key
        jobs.append(JobVram(name=name, used_bytes=None if used is None else split.take(used)))
    return tuple(sorted(jobs, key=lambda job: -(job.used_bytes or 0)))


def _set_rows(split: _Remainder, field: str, rows: Sequence[GpuProcess]) -> None:
    split.set(field, _sum(row.used_bytes for row in rows), _NO_PROCESS_MEMORY)


def _rest(
    split: _Remainder, gpu: GpuSample, reserve_inside: bool, rows: Sequence[GpuProcess], hidden: Sequence[GpuProcess]
) -> None:
    """The rest is unlisted if the driver lists and reports everything else.

    Otherwise its owner is unknown.
    """
    why: str | None = "the machine counts the use of this memory, not the driver"
    if gpu.unified:
        split.set("rest_of_machine_bytes", gpu.other_pool_bytes, gpu.unknown.get("other_pool_bytes", _NO_TOTALS))
    else:
        split.parts["rest_of_machine_bytes"] = 0
        why = _why_unaccounted(gpu, reserve_inside, rows)
    unseen = sum(row.used_bytes or 0 for row in hidden)
    reported = split.parts.get("allocated_bytes", 0) + split.parts.get("cached_bytes", 0)
    # The rows that we cannot see include our own ranks, whose allocators have already been counted.
    unseen = min(split.left, max(0, unseen - reported))
    if why is None:
        split.parts["unlisted_bytes"], split.parts["unaccounted_bytes"] = split.left - unseen, unseen
        if unseen:
            split.unknown["jobs"] = _NOT_SEEN
    else:
        split.unknown["unlisted_bytes"] = why
        split.parts["unaccounted_bytes"] = split.left
    split.left = 0


def _why_unaccounted(gpu: GpuSample, reserve_inside: bool, rows: Sequence[GpuProcess]) -> str | None:
    if any(row.used_bytes is None for row in rows):
        return _NO_PROCESS_MEMORY
    if not rows and "processes" in gpu.unknown:
        return gpu.unknown["processes"]
    return "it includes the driver's own reserve, which this driver does not report separately" if reserve_inside else None
