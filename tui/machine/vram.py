"""A GPU's memory in parts, as a bar and as a legend."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from memtop.supervisor import units
from memtop.supervisor.language import Verbatim
from memtop.supervisor.monitor.history import gpu_key
from memtop.supervisor.monitor.values import GpuSample, MigInstance, why_incomplete_on
from memtop.supervisor.monitor.vram import VramParts
from memtop.supervisor.names import shortened
from memtop.tui.bars import ROLES, Share, memory_bar, padded_tag
from memtop.tui.line import MUTED, STRONG, Line, fact, fit, foreign, join, join_fitting, line, width_of
from memtop.tui.store import Store, foreseen_on, trains_on_cpu, vram_parts

_JOB_LOOKS = (("█", "alloc"), ("▓", "cache"), ("▒", "context"))
"""Without a run on the screen, the largest jobs have different looks."""
_NAME_WIDTH = 14
_NAMED_JOBS = 3
_WORTH_A_WORD = units.GIB // 100


class Part(NamedTuple):
    """One part of the bar and its label in the legend."""

    word: str
    size: int | None
    glyph: str
    role: str
    at_least: bool = False
    """A part of it is not known."""


def vram_bar(store: Store, gpu: GpuSample, width: int) -> Line:
    """The card's memory as a bar of its known parts."""
    total = gpu.total_bytes
    if not total:
        return fit(line(("memory not known", "unknown")), width)
    peak_bytes = store.gpu_peak_bytes.get(gpu_key(gpu))
    peak = None if peak_bytes is None else peak_bytes / total
    shares = [Share((part.size or 0) / total, part.glyph, part.role) for part in bar_parts(store, gpu)]
    foreseen = foreseen_on(store, gpu)
    return memory_bar(width, shares, peak=peak, predicted=None if foreseen is None else foreseen.fraction)


def vram_legend(store: Store, gpu: GpuSample, width: int) -> Line:
    """The owners of the memory: jobs by name if there is room, else together.

    Parts that do not fit are dropped.
    """
    if gpu.unified:
        return join_fitting(_words_of([*_pool(gpu), Part("available", gpu.free_bytes, " ", "text")]), width)
    parts = vram_parts(store, gpu)
    own, absent = ([], ()) if store.run is None else (_own(parts), _absent(store, parts))
    named = join((absent, *_words_of([*own, *_jobs(store, parts, _NAMED_JOBS), *_rest(parts)])))
    if store.run is None and not gpu.processes:
        named = join((fact("processes", "not known" if why_incomplete_on(gpu) else "none"), named))
    if width_of(named) <= width:
        return named
    # Warnings come before parts that only complete the sum.
    rest = sorted(_rest(parts), key=lambda part: part.role != "gone")
    short = [part._replace(word="no owner") if part.role == "gone" else part for part in rest]
    shorter = join((absent, *_words_of([*own, *_jobs(store, parts, _NAMED_JOBS), *short])))
    if width_of(shorter) <= width:
        return shorter
    own = [] if store.run is None else _own(_merged(parts))
    return join_fitting((absent, *_words_of([*own, *_jobs(store, parts, 0), *short])), width)


def bar_parts(store: Store, gpu: GpuSample) -> list[Part]:
    """All used parts from left to right; together they end at the percentage."""
    found = _pool(gpu) if gpu.unified else all_parts(store, gpu, named=_NAMED_JOBS)
    whole = gpu.taken_bytes
    if whole is not None:
        # If the parts are not known, the bar still ends at the percentage.
        found.append(Part("", max(0, whole - sum(part.size or 0 for part in found)), "░", "other"))
    return found


def all_parts(store: Store, gpu: GpuSample, *, named: int | None = None) -> list[Part]:
    """All known parts that are large enough; the largest `named` jobs (default: all) by name."""
    parts = vram_parts(store, gpu)
    own = [] if store.run is None else _own(parts)
    return [*own, *_jobs(store, parts, len(parts.jobs) if named is None else named), *_rest(parts)]


def _pool(gpu: GpuSample) -> list[Part]:
    """The parts of unified memory that are in use."""
    return [
        Part("GPU processes", gpu.used_bytes, "█", "alloc"),
        Part("rest of the machine", gpu.other_pool_bytes, "░", "other"),
    ]


def _merged(parts: VramParts) -> VramParts:
    """The run's memory outside the allocators as one part."""
    if parts.context_bytes is None or parts.other_own_bytes is None:
        return parts
    return replace(parts, context_bytes=parts.context_bytes + parts.other_own_bytes, other_own_bytes=None)


def _is_absent(parts: VramParts) -> bool:
    """Whether the run holds nothing of this GPU."""
    return not any((parts.allocated_bytes, parts.cached_bytes, parts.other_own_bytes)) and parts.context_bytes == 0


def _absent(store: Store, parts: VramParts) -> Line:
    """Why the legend has no parts of the run; empty if it has."""
    if not _is_absent(parts):
        return ()
    run, on_cpu = store.run, trains_on_cpu(store)
    if run is not None and run.alive and parts.unaccounted_bytes:
        # Memory without a known owner may be the run's, until its processes say where they train.
        # One's own program may use a GPU without torch.
        elsewhere = run.ranks and all(rank.device_uuid is not None for rank in run.ranks)
        if not elsewhere and (not on_cpu or run.settings is None):
            return fact("this run", units.UNKNOWN)
    return line(("run on the CPU: see RAM" if on_cpu else "nothing of this run", MUTED))


def _own(parts: VramParts) -> list[Part]:
    if _is_absent(parts):
        return []
    context, outside = parts.context_bytes, parts.other_own_bytes
    if outside is not None and parts.allocated_bytes is None and parts.cached_bytes is None:
        # No rank has reported its allocator: the driver knows only the sum.
        return [Part("this run", outside, "█", "alloc")]
    if context is None:
        # The contexts alone are not measured yet: everything outside the allocator counts as
        # context.
        context, outside = outside, None
    own = [
        Part("alloc", parts.allocated_bytes, "█", "alloc"),
        Part("cache", parts.cached_bytes, "▓", "cache"),
        Part("context", context, "▒", "context"),
    ]
    return own if outside is None else [*own, Part("in process", outside, "▒", "library")]


def _jobs(store: Store, parts: VramParts, named: int) -> list[Part]:
    looks = _JOB_LOOKS if store.run is None else ()
    found = []
    for number, job in enumerate(parts.jobs[:named]):
        glyph, role = looks[number] if number < len(looks) else ("░", "other")
        found.append(Part(Verbatim(shortened(job.name, _NAME_WIDTH)), job.used_bytes, glyph, role))
    rest = parts.jobs[named:]
    if rest or (not found and store.run is not None and "jobs" not in parts.unknown):
        known = [job.used_bytes for job in rest if job.used_bytes is not None]
        word = "others" if not found else f"{len(rest)} more"
        if store.run is None and not found:
            word = f"{len(rest)} jobs" if len(rest) > 1 else Verbatim(shortened(rest[0].name, _NAME_WIDTH))
        # One word stands for several parts of the bar.
        glyph = "".join(look for look, _ in _JOB_LOOKS[: len(rest)]) if store.run is None and not found else "░"
        role = "alloc" if glyph != "░" else "other"
        # No other process means 0 bytes; processes that do not report their memory mean unknown.
        # Of several, at least 0 bytes is not known either.
        at_least = len(known) < len(rest)
        size = None if at_least and not any(known) else sum(known)
        found.append(Part(word, size, glyph, role, at_least=at_least))
    return found


def _rest(parts: VramParts) -> list[Part]:
    gone, unlisted = parts.gone_bytes or 0, parts.unlisted_bytes or 0
    if parts.unlisted_has_no_owner:
        gone, unlisted = gone + unlisted, 0
    found = [
        Part("rest of the machine", parts.rest_of_machine_bytes, "░", "other"),
        Part("unlisted", unlisted, "░", "other"),
        Part("owner not reported", parts.unaccounted_bytes, "░", "other"),
        Part("held by no living process", gone, "░", "gone"),
        Part("driver", parts.driver_reserved_bytes, "░", "driver"),
    ]
    return [part for part in found if (part.size or 0) >= _WORTH_A_WORD]


def _words_of(parts: list[Part]) -> list[Line]:
    return [_words(part) for part in parts]


def _words(part: Part) -> Line:
    alarming = part.role == "gone"
    size = units.gib(part.size) if part.size is None or not part.at_least else f"≥ {units.gib(part.size)}"
    value = fact(f"! {part.word}" if alarming else part.word, size, "edge" if alarming else "strong")
    if part.glyph == " ":
        return value
    looks = _JOB_LOOKS[: len(part.glyph)] if len(part.glyph) > 1 else ((part.glyph, part.role),)
    return line(*looks, " ", *value)


def mig_row(instance: MigInstance, width: int) -> Line:
    """One MIG instance on one line: position, profile, bar, numbers, band."""
    head = (*line((f"{instance.position:>2} ", MUTED)), *foreign((f"{instance.name or '?':<9} ", STRONG)))
    percent = units.percent(instance.used_fraction)
    numbers = f" {units.gib(instance.taken_bytes)}/{units.gib(instance.total_bytes)} GiB "
    tail = line((numbers, STRONG), (f"{percent:>7} ", ROLES[instance.band]), *padded_tag(instance.band))
    room = max(4, width - width_of(head) - width_of(tail))
    if instance.total_bytes:
        bar = memory_bar(room, [Share(instance.used_fraction or 0.0, "█", "alloc")])
    else:
        bar = fit(line((instance.unknown.get("total_bytes", "memory not known"), "unknown")), room)
    return fit((*head, *bar, *tail), width)
