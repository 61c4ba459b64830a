"""Where a GPU's memory went: what the driver counts, joined with what the run's ranks say of torch's allocator.

Pure functions of one sample. The sources were not read at the same moment: the driver's process list may be 2 s older than
its totals, a rank's report as old as its newest update. The totals are taken for true, and what does not fit into them is
cut off, with a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from memtop.supervisor.monitor.values import GpuProcess, GpuSample, MigInstance


class RankUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank said of its device at its newest update. Bytes; None where it has not said it."""

    pid: int
    device_uuid: str | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_reserved_bytes: int | None = None


class JobVram(msgspec.Struct, frozen=True, kw_only=True):
    """A job of somebody else (or another one of ours) on the GPU. `used_bytes` is None where the driver does not tell it."""

    name: str
    used_bytes: int | None


class VramParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one GPU's memory, in bytes. Those that are known add up to `total_bytes` exactly; what cannot be put
    down to anyone is `unaccounted_bytes`. None: not known, with the reason in `unknown`."""

    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    """Tensors of this run."""
    cached_bytes: int | None = None
    """What torch's allocator keeps beside them: emptying its cache gives back at most that."""
    context_bytes: int | None = None
    """The CUDA contexts of this run: the least that it has held beside the allocator."""
    other_own_bytes: int | None = None
    """What else this run's processes hold: NCCL, library workspaces; with the contexts, while those are not known apart."""
    jobs: tuple[JobVram, ...] = ()
    """Living processes that are not this run's, by job, the largest first."""
    driver_reserved_bytes: int | None = None
    gone_bytes: int | None = None
    """Listed under processes that have ended."""
    unlisted_bytes: int | None = None
    """In use, but listed under no process."""
    unlisted_by: str | None = None
    """Who may hold that, in words."""
    unaccounted_bytes: int | None = None
    """In use, but the driver tells too little to say by whom."""
    rest_of_machine_bytes: int | None = None
    """Unified memory only: what the machine uses beside the GPU's processes."""
    notes: tuple[str, ...] = ()
    """Where the sources contradict each other, in words."""
    unknown: dict[str, str] = {}


_NO_RESERVE = "the driver tells its own reserve only as part of what is used"
_NO_TOTALS = "the driver does not tell this GPU's memory"
_STALE = "the ranks' last report is older than what the driver says now: it counted more memory than they hold"
_TOO_MUCH = "the driver's process list is older than its totals: it adds up to more than is in use"
_NO_PROCESS_MEMORY = "the driver does not tell memory per process here"
_NOT_SEEN = "the driver's processes are not visible from this container: they may be this run's or others'"
_NOBODY = "held by no living process"
_ELSEWHERE = "held by processes that the driver does not list here (other containers), or by none that lives"


def ranks_on(gpu: GpuSample, ranks: Iterable[RankUse], *, mig: MigInstance | None = None) -> list[RankUse]:
    """The ranks whose device is this GPU (or this MIG instance of it). See `placed` for those that have not named it."""
    uuids = [mig.uuid] if mig is not None else [gpu.uuid, *(instance.uuid for instance in gpu.mig)]
    bare = {_bare(uuid) for uuid in uuids if uuid is not None}
    return [rank for rank in ranks if rank.device_uuid is not None and _bare(rank.device_uuid) in bare]


def placed(ranks: Iterable[RankUse], gpus: Sequence[GpuSample]) -> list[RankUse]:
    """The ranks, each with a device: what it named, else where the driver sees it hold the most (a process may have a
    small context on every card). A rank that is nowhere to be seen keeps None."""
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
    """CUDA names a MIG instance as it names a whole GPU; the driver does not."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def vram_parts(
    gpu: GpuSample,
    ranks: Iterable[RankUse] = (),
    *,
    run: str | None = None,
    own_pids: Iterable[int] = (),
    base_bytes: int | None = None,
    job_names: Mapping[str, str] | None = None,
    mig: MigInstance | None = None,
    all_pids_visible: bool = False,
) -> VramParts:
    """Where the memory of this GPU (or of this MIG instance of it) went.

    `run` and `own_pids` say which of the listed processes are this run's, beside its ranks; `base_bytes` is what its
    contexts take (RunState.gpu_base_bytes); `job_names` maps GpuProcess.job to words; `all_pids_visible` says that no
    process of the machine is hidden from us.
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
    split = _Split(total - free)
    split.set("driver_reserved_bytes", source.reserved_bytes, source.unknown.get("reserved_bytes", _NO_RESERVE))
    _own_parts(split, here, own, base_bytes)
    jobs = _job_parts(split, [row for row in listed if not row.gone], job_names or {})
    _set_rows(split, "gone_bytes", [row for row in listed if row.gone])
    _rest(split, gpu, source.reserved_bytes is None, rows, hidden)
    if split.parts.get("unlisted_bytes"):
        alone = all_pids_visible and not gpu.unified and not any(row.gone for row in rows) and _are_listed(here, rows)
        split.unlisted_by = _NOBODY if alone else _ELSEWHERE
    return VramParts(
        total_bytes=total,
        free_bytes=free,
        jobs=jobs,
        unlisted_by=split.unlisted_by,
        notes=tuple(split.notes),
        unknown=split.unknown,
        **split.parts,
    )


def step_peak_bytes(parts: VramParts, ranks: Sequence[RankUse]) -> int | None:
    """The most that was in use on the card during the newest update, the driver's reserve included, as the ranks on it
    (see `ranks_on`) tell: their allocators' peaks in place of what those hold now. None where a rank has not told its
    peak. Ranks that share a card may not have peaked together: then it is an upper bound."""
    peaks = [rank.peak_reserved_bytes for rank in ranks]
    if not peaks or parts.total_bytes is None or parts.free_bytes is None:
        return None
    if parts.cached_bytes is None:
        return None
    beside = parts.total_bytes - parts.free_bytes - (parts.allocated_bytes or 0) - parts.cached_bytes
    peak = 0
    for told in peaks:
        if told is None:
            return None
        peak += told
    return min(parts.total_bytes, max(beside + peak, parts.total_bytes - parts.free_bytes))


class _Split:
    """What is in use, being given out part by part; never more than there is."""

    def __init__(self, used: int) -> None:
        self.left = used
        self.parts: dict[str, int] = {}
        self.unknown: dict[str, str] = {}
        self.notes: dict[str, None] = {}
        self.unlisted_by: str | None = None

    def take(self, wanted: int, note: str = _TOO_MUCH) -> int:
        given = min(max(0, wanted), self.left)
        if given < wanted:
            self.notes[note] = None
        self.left -= given
        return given

    def set(self, field: str, wanted: int | None, reason: str) -> None:
        """Give this part what it wants; where that is not known, say why."""
        if wanted is None:
            self.unknown[field] = reason
        else:
            self.parts[field] = self.take(wanted)


def _nothing(reason: str) -> VramParts:
    plain = ("jobs", "notes", "unknown", "unlisted_by")
    return VramParts(unknown={field: reason for field in VramParts.__struct_fields__ if field not in plain})


def _rows(gpu: GpuSample, mig: MigInstance | None) -> tuple[GpuProcess, ...]:
    return gpu.processes if mig is None else tuple(row for row in gpu.processes if row.mig_instance == mig.position)


def _are_listed(ranks: Sequence[RankUse], rows: Sequence[GpuProcess]) -> bool:
    return {rank.pid for rank in ranks} <= {row.pid for row in rows}


def _hidden(rows: Sequence[GpuProcess], own: Sequence[GpuProcess], ranks: Sequence[RankUse]) -> list[GpuProcess]:
    """Rows that may be our own ranks under another number: the driver counts pids of the machine, not of a container."""
    if _are_listed(ranks, rows):
        return []
    return [row for row in rows if row.started_ticks is None and not row.gone and row not in own]


def _sum(values: Iterable[int | None]) -> int | None:
    """All of them together; None where one is not known."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += max(0, value)
    return total


def _own_parts(split: _Split, ranks: Sequence[RankUse], own: Sequence[GpuProcess], base: int | None) -> None:
    """What this run holds: by its ranks' words inside of torch's allocator, by the driver's beside it."""
    if not ranks and not own:
        for field in ("allocated_bytes", "cached_bytes", "context_bytes", "other_own_bytes"):
            split.parts[field] = 0
        return
    held = _sum(row.used_bytes for row in own) if own and _are_listed(ranks, own) else None
    reserved = _sum(rank.reserved_bytes for rank in ranks) if ranks else None
    if held is not None and held > split.left:
        split.notes[_TOO_MUCH] = None
        held = split.left
    if reserved is None:
        _unreported(split, held, own)
        return
    inside = reserved if held is None else min(reserved, held)
    if inside < reserved:
        split.notes[_STALE] = None
    inside = split.take(inside, _STALE)
    allocated = _sum(rank.allocated_bytes for rank in ranks)
    if allocated is None:
        split.unknown["allocated_bytes"] = "the ranks tell only what their allocators hold in all: it is under cached_bytes"
    else:
        split.parts["allocated_bytes"] = min(allocated, inside)
    split.parts["cached_bytes"] = inside - split.parts.get("allocated_bytes", 0)
    if held is None:
        reason = _NO_PROCESS_MEMORY if _are_listed(ranks, own) else "the driver does not list this run's processes here"
        split.unknown |= dict.fromkeys(("context_bytes", "other_own_bytes"), reason)
        return
    beside = held - inside
    context = None if base is None else min(max(0, base), beside)
    split.set("context_bytes", context, "not measured yet in this attempt: it is under other_own_bytes")
    split.set("other_own_bytes", beside - (context or 0), "")


def _unreported(split: _Split, held: int | None, own: Sequence[GpuProcess]) -> None:
    """No rank has told what its allocator holds: all is in one part, as far as the driver tells it."""
    reason = "no rank of the run has told it yet" + ("" if held is None else ": it is under other_own_bytes")
    split.unknown |= dict.fromkeys(("allocated_bytes", "cached_bytes", "context_bytes"), reason)
    missing = _NO_PROCESS_MEMORY if own else "the driver does not list this run's processes here"
    split.set("other_own_bytes", held, missing)


def _job_parts(split: _Split, rows: Sequence[GpuProcess], names: Mapping[str, str]) -> tuple[JobVram, ...]:
    by_job: dict[str, list[GpuProcess]] = {}
    for row in rows:
        by_job.setdefault(row.job or row.run or f"pid {row.pid}", []).append(row)
    jobs = []
    for key, members in by_job.items():
        used = _sum(row.used_bytes for row in members)
        name = names.get(key) or members[0].run or members[0].name or key
        jobs.append(JobVram(name=name, used_bytes=None if used is None else split.take(used)))
    return tuple(sorted(jobs, key=lambda job: -(job.used_bytes or 0)))


def _set_rows(split: _Split, field: str, rows: Sequence[GpuProcess]) -> None:
    split.set(field, _sum(row.used_bytes for row in rows), _NO_PROCESS_MEMORY)


def _rest(
    split: _Split, gpu: GpuSample, reserve_inside: bool, rows: Sequence[GpuProcess], hidden: Sequence[GpuProcess]
) -> None:
    """What is left is listed under nobody, if everything that could be listed is; else nobody can say whose it is."""
    why: str | None = "the pool's use is counted by the machine, not by the driver"
    if gpu.unified:
        split.set("rest_of_machine_bytes", gpu.other_pool_bytes, gpu.unknown.get("other_pool_bytes", _NO_TOTALS))
    else:
        split.parts["rest_of_machine_bytes"] = 0
        why = _why_unaccounted(gpu, reserve_inside, rows)
    unseen = sum(row.used_bytes or 0 for row in hidden)
    reported = split.parts.get("allocated_bytes", 0) + split.parts.get("cached_bytes", 0)
    # Among the rows that we cannot see are our own ranks, whose allocators have been counted already.
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
    return "the driver's own reserve is part of it: this driver does not tell it apart" if reserve_inside else None
