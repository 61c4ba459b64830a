"""How much memory a run would take, and which other settings would fit. Pure rules: what a
configuration takes is asked from functions that the caller gives."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from memtop.presets import Settings
from memtop.presets.choosing import COMMUNICATION_BYTES, CONTEXT_BYTES
from memtop.presets.comparison import Pace, only_rounds_moments, other_changes, pace, trains_the_same
from memtop.presets.decoding import decoder_of
from memtop.presets.estimate import estimate
from memtop.presets.measured import GpuKind
from memtop.presets.parameters import least_size, stored_config
from memtop.presets.states import UnknownMemoryError, least_bytes
from memtop.supervisor.monitor.values import EDGE_FROM, Band, GpuSample, band_of

Basis = Literal["dry run", "estimate"]
SURE: dict[str, tuple[float, float]] = {"dry run": (0.93, 1.07), "estimate": (0.82, 1.18), "calibrated": (0.86, 1.13)}
"""The true size divided by the foreseen one, at the least and at the most: the largest errors of
`bench.predict`, of the dry run against measurements and of the estimate against the dry run, for
trainings that need 2 GiB or more, those with few layers among them.
`calibrated`: of an estimate that a known peak scales."""
GENERATION = 80
"""Of a GPU that does not say it: Ampere."""
MOST_WAYS = 6
_LESS = 0.95
"""A need below this part of another one is less."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU of a plan."""

    total_bytes: int | None
    """None: not known, then nothing is said about what fits."""
    others_bytes: int = 0
    """What other programs hold of it."""
    generation: int
    """Its compute capability without the point."""
    context_bytes: int = CONTEXT_BYTES
    """The CUDA context of a process with its libraries."""
    context_measured: bool = False
    """By an earlier run on such a GPU; else it is an assumption."""
    communication_bytes: int = 0
    """NCCL's buffers, if there are several processes; 0 if they are in a measured context."""
    kind: GpuKind | None = None
    """None: not known which GPU it is."""

    @property
    def outside_bytes(self) -> int:
        """What a process holds outside torch's memory."""
        return self.context_bytes + self.communication_bytes

    @property
    def torch_bytes(self) -> int | None:
        """What torch can reserve there."""
        return None if self.total_bytes is None else max(1, self.total_bytes - self.others_bytes - self.outside_bytes)

    @classmethod
    def of(cls, gpu: GpuSample, *, others_bytes: int | None = None) -> Card:
        """With a usual context. None: all that is taken now is of other programs."""
        others = gpu.taken_bytes if others_bytes is None else others_bytes
        text = (gpu.details.compute_capability or "").replace(".", "")
        return cls(
            total_bytes=gpu.total_bytes,
            others_bytes=others or 0,
            generation=int(text) if text.isdecimal() else GENERATION,
            kind=gpu_kind(gpu),
        )

    def with_processes(self, processes: int, measured: int | None) -> Card:
        """For one of so many processes.

        `measured`: what one was seen to hold outside torch's memory (of several, with NCCL's
        buffers); None: not measured.
        """
        if measured is None:
            return replace(self, communication_bytes=COMMUNICATION_BYTES if processes > 1 else 0)
        return replace(self, context_bytes=measured, communication_bytes=0, context_measured=True)

    def fraction(self, peak_bytes: int) -> float | None:
        return None if self.total_bytes is None else (peak_bytes + self.others_bytes) / self.total_bytes


def gpu_kind(gpu: GpuSample) -> GpuKind | None:
    """None if its name or its memory is not known."""
    return GpuKind(gpu.name, gpu.total_bytes) if gpu.name and gpu.total_bytes else None


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What torch allocates at the least, bytes, where more is not known. It can show that a run
    does not fit, never that it does."""

    bytes: int
    components: Mapping[str, int]
    counted: str
    """What was counted of the model."""

    def is_too_much(self, card: Card) -> bool:
        """Whether it is known that the run does not fit."""
        room = card.total_bytes
        return room is not None and self.bytes + card.others_bytes > room


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What torch reserves at the most, bytes."""

    reserved: int
    phase: str
    components: Mapping[str, int]
    """What is allocated at the peak."""
    basis: Basis
    sure: tuple[float, float] | None = None
    """The true size divided by this one, at the least and at the most; None: as of its basis."""
    calibrated: str | None = None
    """By what, if measured peaks scale it."""
    peaks: Mapping[str, int] = {}
    """What is allocated at the most in each phase; empty if not known."""


class PlannedPeak(msgspec.Struct, frozen=True, kw_only=True):
    """What the process takes of the GPU at the most."""

    bytes: int
    least: int
    """The true peak is hardly below it, and hardly above `most`."""
    most: int
    phase: str
    components: Mapping[str, int]
    fraction: float | None
    """With what other programs hold."""
    band: Band
    basis: Basis
    calibrated: str | None = None
    """As in `Need`."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """Other settings for the same training."""

    settings: Settings
    peak: PlannedPeak
    changes: list[str]
    unchanged: bool
    """The training's result is the same."""
    nearly: bool
    """It differs only by moments in 8 bits."""
    pace: Pace
    """Compared with the settings that were asked for."""


Ask = Callable[[Settings], Need | None]
"""None: it cannot be foreseen for these settings."""


def estimated(settings: Settings, card: Card, config: Mapping[str, Any] | None = None) -> Need | str:
    """By the estimate without torch, in a few milliseconds; or why it cannot be estimated.

    `config`: the model's configuration, if it is known; else its file is read.
    """
    config = stored_config(settings) if config is None else config
    if config is None:
        return "what the model is made of is not known before it is loaded"
    room = card.torch_bytes
    # The same question is asked again and again, while other programs take a little more or less.
    capacity = None if room is None else max(1, room - room % _CAPACITY_STEP)
    question = _Question(settings=_on_gpu(settings), config=dict(config), generation=card.generation, capacity=capacity)
    return _estimated(msgspec.json.encode(question))


def bound_of(settings: Settings, card: Card) -> Bound | str:
    """Of a model of any architecture, from its files or its configuration; or what is missing."""
    size = least_size(settings)
    if isinstance(size, str):
        return size
    precision = settings.precision if settings.precision != "auto" else ("bf16" if card.generation >= GENERATION else "fp16")
    try:
        components = least_bytes(settings, size, None if precision == "fp32" else precision)
    except UnknownMemoryError as error:
        return str(error)
    if not any(components.values()):
        return "all that it counts is in host memory"
    return Bound(bytes=sum(components.values()), components=components, counted=size.counted)


_CAPACITY_STEP = 64 << 20


def _on_gpu(settings: Settings) -> Settings:
    """The settings without what shapes no GPU memory, so that presets that differ in nothing else
    are one question. How large A is makes no difference."""
    accumulation = settings.accumulation if settings.rank_splits else min(2, settings.accumulation)
    same: dict[str, Any] = {"recipe": "", "preset": "", "workers": 0, "pin_memory": None, "host_level": "standard"}
    return replace(settings, accumulation=accumulation, **same)


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    config: dict[str, Any]
    generation: int
    capacity: int | None


@lru_cache(maxsize=512)
def _estimated(question: bytes) -> Need | str:
    asked = decoder_of(_Question).decode(question)
    try:
        found = estimate(asked.settings, asked.config, generation=asked.generation, capacity=asked.capacity)
    except UnknownMemoryError as error:
        return str(error)
    components = {str(name): size for name, size in found.components.items()}
    peaks = {str(phase): size for phase, size in found.peaks.items()}
    return Need(reserved=found.reserved, phase=found.peak_phase, components=components, basis="estimate", peaks=peaks)


def peak_of(need: Need, card: Card) -> PlannedPeak:
    size = need.reserved + card.outside_bytes
    least, most = (round(need.reserved * part) + card.outside_bytes for part in need.sure or SURE[need.basis])
    fraction = card.fraction(size)
    components = {**need.components, "unused": need.reserved - sum(need.components.values()), "context": card.context_bytes}
    if card.communication_bytes:
        components["communication"] = card.communication_bytes
    return PlannedPeak(
        bytes=size,
        least=least,
        most=most,
        phase=need.phase,
        components=components,
        fraction=fraction,
        band=band_of(fraction),
        basis=need.basis,
        calibrated=need.calibrated,
    )


def is_safe(need: Need | None, card: Card) -> bool:
    """Whether it is known to stay below the edge band."""
    if need is None:
        return False
    fraction = card.fraction(need.reserved + card.outside_bytes)
    return fraction is not None and fraction < EDGE_FROM


def splits_of(settings: Settings) -> list[tuple[int, int]]:
    """All B and A with the same effective batch, the largest B first."""
    each = settings.effective_batch // settings.world_size
    if settings.effective_batch % settings.world_size:
        return [(settings.batch, settings.accumulation)]
    found = [number for number in range(1, math.isqrt(each) + 1) if each % number == 0]
    return [(batch, each // batch) for batch in sorted({*found, *(each // number for number in found)}, reverse=True)]


def with_split(settings: Settings, batch: int, accumulation: int) -> Settings:
    return replace(settings, batch=batch, accumulation=accumulation, rank_splits=())


SHORTEST = 128
"""Tokens: no shorter sample is proposed."""


def halvings(length: int) -> list[int]:
    """The half of a sample's length, its quarter, and so on: down to `SHORTEST`, but at least the
    half."""
    found = [length // 2] if length > 1 else []
    while found and found[-1] // 2 >= SHORTEST:
        found.append(found[-1] // 2)
    return found


def largest_safe(settings: Settings, card: Card, quick: Ask, sure: Ask) -> tuple[Settings, Need] | None:
    """The settings with the largest B that is safe and keeps the effective batch.

    `quick` finds it; `sure` decides.
    """
    splits = splits_of(settings)

    def fits(place: int) -> bool:
        return is_safe(quick(with_split(settings, *splits[place])), card)

    # A smaller B needs less, but with A = 1 no gradients stay between micro-batches.
    first = 0 if fits(0) else bisect_left(range(len(splits)), True, lo=1, key=fits)
    if first == len(splits):
        if quick is sure:
            return None
        first = 0
    for split in splits[first:]:
        tried = with_split(settings, *split)
        need = sure(tried)
        if need is not None and is_safe(need, card):
            return tried, need
    return None


def can_fit(settings: Settings, card: Card, quick: Ask) -> bool:
    """Whether a batch that keeps the effective batch is foreseen to be safe: the largest one, with
    which no gradients stay, or the smallest one."""
    splits = splits_of(settings)
    return any(is_safe(quick(with_split(settings, *split)), card) for split in {splits[0], splits[-1]})


def smallest(settings: Settings, card: Card, quick: Ask) -> tuple[Settings, PlannedPeak] | None:
    """The split of the same effective batch that needs the least; None if that is not known. With
    A > 1 gradients stay, so a smaller micro-batch may need more."""
    tried = (with_split(settings, *split) for split in splits_of(settings))
    known = [(one, need) for one in tried if (need := quick(one)) is not None]
    if not known:
        return None
    # What torch reserves beyond what is allocated, it gives back if memory is short.
    found, need = min(known, key=lambda one: (sum(one[1].components.values()), one[1].reserved))
    return found, peak_of(need, card)


def ways(settings: Settings, others: Iterable[Settings], card: Card, quick: Ask, *, host_suffices: bool = True) -> list[Way]:
    """Other settings that are safe, each with the largest B that is: those that need less memory
    than the present ones, or allow a larger B (but none that is slower, if the present ones are
    safe), and none that another one beats. Training unchanged comes first, then what only has
    moments in 8 bits, then the faster ones, then the order of `others`. `host_suffices`: for the
    present settings; if not, all that are safe gain something."""
    own = largest_safe(settings, card, quick, quick) if host_suffices else None
    asked = quick(settings) if host_suffices else None
    least = None if own is None else own[1].reserved
    fits = asked is not None and is_safe(asked, card)
    if asked is not None and least is not None and fits:
        least = min(least, asked.reserved)
    found: list[Way] = []
    for other in others:
        best = None if other == settings else largest_safe(other, card, quick, quick)
        if best is None:
            continue
        tried, need = best
        if own is not None and least is not None and need.reserved > _LESS * least:
            larger = tried.batch > own[0].batch
            if not larger or (fits and pace(settings, tried).is_slower):
                # The largest B gains nothing; the present one may need less.
                tried = with_split(other, settings.batch, settings.accumulation)
                less = quick(tried)
                if less is None or not is_safe(less, card) or less.reserved > _LESS * least:
                    continue
                need = less
        if tried in [way.settings for way in found]:
            continue
        found.append(_way(settings, tried, peak_of(need, card)))
    unbeaten: list[Way] = []
    for way in found:
        if not any(_is_as_good(one, way) for one in unbeaten):
            unbeaten = [*(one for one in unbeaten if not _is_as_good(way, one)), way]
    return sorted(unbeaten, key=lambda way: (not way.unchanged, not way.nearly, way.pace.rank))[:MOST_WAYS]


def confirmed(settings: Settings, found: list[Way], card: Card, quick: Ask, sure: Ask) -> list[Way]:
    """The ways without those at the beginning that are not safe by `sure`, so that the first one
    is. One is kept with a smaller batch if that is safe."""
    for place, way in enumerate(found):
        tried, need = way.settings, sure(way.settings)
        if not is_safe(need, card) and can_fit(tried, card, quick):
            tried, need = largest_safe(tried, card, quick, sure) or (tried, None)
        if need is not None and is_safe(need, card):
            return [_way(settings, tried, peak_of(need, card)), *found[place + 1 :]]
    return []


def _way(settings: Settings, tried: Settings, peak: PlannedPeak) -> Way:
    return Way(
        settings=tried,
        peak=peak,
        changes=other_changes(settings, tried),
        unchanged=trains_the_same(settings, tried),
        nearly=only_rounds_moments(settings, tried),
        pace=pace(settings, tried),
    )


def _is_as_good(one: Way, other: Way) -> bool:
    """Whether the one is as good as the other in all that counts. A speed that is not known is
    compared only with another one, and of two that change training each may be the better one."""
    mine, its = one.settings, other.settings
    return (
        (one.unchanged or trains_the_same(mine, its))
        and one.peak.bytes <= other.peak.bytes
        and mine.batch >= its.batch
        and one.unchanged >= other.unchanged
        and (one.pace.speed is None) == (other.pace.speed is None)
        and one.pace.rank <= other.pace.rank
        and not pace(its, mine).is_slower
        and mine.zero.offload_optimizer <= its.zero.offload_optimizer
        and mine.zero.offload_parameters <= its.zero.offload_parameters
    )
