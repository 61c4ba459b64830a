"""A GPU's memory as a bar and as a legend, in the same parts."""

from __future__ import annotations

from typing import NamedTuple

from memtop.supervisor import units
from memtop.supervisor.monitor.values import GpuSample, MigInstance
from memtop.tui.draw.bands import ROLES, padded_tag
from memtop.tui.draw.bars import Share, memory_bar
from memtop.tui.draw.line import MUTED, STRONG, Line, fact, fit, join, join_fitting, line, width_of
from memtop.tui.store import Store, gpu_key
from memtop.tui.vram import VramParts, vram_parts

_JOB_LOOKS = (("█", "alloc"), ("▓", "cache"), ("▒", "context"))
"""Without a run of its own on the screen, the largest jobs are told apart."""
_NAME_WIDTH = 14
_NAMED_JOBS = 3
_GONE_WORDS = "held by no living process"


class Part(NamedTuple):
    """One part of the bar and its words in the legend."""

    word: str
    size: int | None
    glyph: str
    role: str


def vram_bar(store: Store, gpu: GpuSample, width: int) -> Line:
    """The card's memory, split into what is known of it."""
    total = gpu.total_bytes
    if not total:
        return fit(line(("memory not known", "unknown")), width)
    peak_bytes = store.gpu_peak_bytes.get(gpu_key(gpu))
    peak = None if peak_bytes is None else (peak_bytes + (gpu.reserved_bytes or 0) + (gpu.other_pool_bytes or 0)) / total
    shares = [Share((part.size or 0) / total, part.glyph, part.role) for part in bar_parts(store, gpu)]
    return memory_bar(width, shares, peak=peak)


def vram_legend(store: Store, gpu: GpuSample, width: int) -> Line:
    """Who holds it: jobs by name where there is room, else all together; what does not fit is left out whole."""
    if gpu.unified:
        return join_fitting([_words(part) for part in (*_unified(gpu), Part("available", gpu.free_bytes, " ", "text"))], width)
    parts = vram_parts(gpu, store.run, store.machine)
    if store.run is None and not gpu.processes:
        return join_fitting([fact("processes", "none"), *_words_of(_rest(parts))], width)
    named = join(_words_of([*_own(store, parts), *_jobs(store, parts, _NAMED_JOBS), *_rest(parts)]))
    if width_of(named) <= width:
        return named
    # Alarming parts before those that only complete the sum.
    rest = sorted(_rest(parts), key=lambda part: part.role != "gone")
    short = [part._replace(word="gone") if part.role == "gone" else part for part in rest]
    return join_fitting(_words_of([*_own(store, _merged(parts)), *_jobs(store, parts, 0), *short]), width)


def bar_parts(store: Store, gpu: GpuSample) -> list[Part]:
    """All used parts from the left to the right; together they end where the percentage says."""
    if gpu.unified:
        return _unified(gpu)
    parts = vram_parts(gpu, store.run, store.machine)
    found = [*_own(store, parts), *_jobs(store, parts, _NAMED_JOBS), *_rest(parts)]
    if gpu.used_bytes is not None:
        # Where the driver lists less than it counts as used, the bar still ends where the percentage does.
        missing = gpu.used_bytes + (gpu.reserved_bytes or 0) - sum(part.size or 0 for part in found)
        found.append(Part("", max(0, missing), "░", "other"))
    return found


def all_parts(store: Store, gpu: GpuSample) -> list[Part]:
    """For the details: every part that is known or worth a word, every job by name."""
    if gpu.unified:
        return _unified(gpu)
    parts = vram_parts(gpu, store.run, store.machine)
    return [*_own(store, parts), *_jobs(store, parts, len(parts.jobs)), *_rest(parts)]


def _merged(parts: VramParts) -> VramParts:
    """All of the run's processes outside their allocators as one part."""
    if parts.other_in_process is None:
        return parts
    return parts._replace(context=(parts.context or 0) + parts.other_in_process, other_in_process=None)


def _own(store: Store, parts: VramParts) -> list[Part]:
    if store.run is None:
        return []
    own = [
        Part("alloc", parts.allocated, "█", "alloc"),
        Part("cache", parts.cached, "▓", "cache"),
        Part("context", parts.context, "▒", "context"),
    ]
    return own if parts.other_in_process is None else [*own, Part("in process", parts.other_in_process, "▒", "library")]


def _jobs(store: Store, parts: VramParts, named: int) -> list[Part]:
    looks = _JOB_LOOKS if store.run is None else ()
    found = []
    for number, (name, size) in enumerate(parts.jobs[:named]):
        glyph, role = looks[number] if number < len(looks) else ("░", "other")
        found.append(Part(name[:_NAME_WIDTH], size, glyph, role))
    rest = parts.jobs[named:]
    if rest or (not found and store.run is not None):
        known = [size for _, size in rest if size is not None]
        word = "others" if not named or not found else f"{len(rest)} more"
        # No other process is a known nothing; processes that do not tell their memory are not.
        found.append(Part(word, sum(known) if known or not rest else None, "░", "other"))
    return found


def _rest(parts: VramParts) -> list[Part]:
    found = []
    if parts.unlisted_bytes and parts.unlisted_bytes >= units.GIB // 100:
        found.append(Part("unlisted", parts.unlisted_bytes, "░", "other"))
    if parts.gone_bytes:
        found.append(Part(_GONE_WORDS, parts.gone_bytes, "░", "gone"))
    if parts.driver_reserved:
        found.append(Part("driver", parts.driver_reserved, "░", "driver"))
    return found


def _unified(gpu: GpuSample) -> list[Part]:
    return [
        Part("GPU processes", gpu.used_bytes, "█", "alloc"),
        Part("rest of the machine", gpu.other_pool_bytes, "░", "other"),
    ]


def _words_of(parts: list[Part]) -> list[Line]:
    return [_words(part) for part in parts]


def _words(part: Part) -> Line:
    alarming = part.role == "gone"
    value = fact(("! " if alarming else "") + part.word, units.gib(part.size), "edge" if alarming else "strong")
    return value if part.glyph == " " else line((part.glyph, part.role), " ", *value)


def mig_row(instance: MigInstance, width: int) -> Line:
    """One MIG instance on one line: position, profile, bar, numbers, band."""
    head = line((f"{instance.position:>2} ", MUTED), (f"{instance.name or '?':<9} ", STRONG))
    percent = units.percent(instance.used_fraction)
    numbers = f" {units.gib(instance.used_bytes)}/{units.gib(instance.total_bytes)} GiB "
    tail = line((numbers, STRONG), (f"{percent:>7} ", ROLES[instance.band]), *padded_tag(instance.band))
    room = max(4, width - width_of(head) - width_of(tail))
    if instance.total_bytes:
        bar = memory_bar(room, [Share(instance.used_fraction or 0.0, "█", "alloc")])
    else:
        bar = fit(line((instance.unknown.get("total_bytes", "memory not known"), "unknown")), room)
    return fit((*head, *bar, *tail), width)
