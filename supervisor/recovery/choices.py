"""The guides' own proposals as named choices, with the numbers that they come to: peak, effective batch, time per epoch. Pure.

A choice is what a guide wrote, so it may change the mathematics; the remedies hold them. It says what the guide got wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from memtop.presets import Settings, load_presets, take_whole
from memtop.presets.comparison import compatibility, effective_change
from memtop.presets.schema import split_below
from memtop.supervisor.recovery.forecast import Line, line_through, peaks_of
from memtop.supervisor.recovery.gpu_ladder import CHECKPOINTED
from memtop.supervisor.recovery.values import Class, Forecast, Peak


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One proposal of a guide, against the present settings."""

    name: str
    title: str
    guide: str
    """What the guide says of it, corrected where it is wrong."""
    settings: Settings
    preset: str | None = None
    """Taken whole, where the choice is one."""
    effective_batch: int
    effective_text: str
    """`192 -> 144 (-25.0 %)`, or `192, as it is`."""
    keeps_math: bool
    resumable: Class
    forecast: Forecast | None = None
    forecast_unknown: str | None = None
    epoch_factor: float | None = None
    """Time of an epoch over the present one's; None where neither a measurement nor a guide says."""
    epoch_basis: str
    """`measured`, `the guide's guess` or `not known`."""

    @property
    def assignments(self) -> dict[str, str]:
        """What a restart would set: batch, accumulation, length, checkpointing."""
        settings = self.settings
        return {
            "batch": str(settings.batch),
            "accumulation": str(settings.accumulation),
            "seq_len": str(settings.seq_len),
            "gradient_checkpointing": str(settings.gradient_checkpointing).lower(),
        }


class _Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the guide on the 20 GB T5 run (S1, plans 1 to 5)."""

    name: str
    title: str
    guide: str
    batch: int | None = None
    accumulation: int | None = None
    seq_len: int | None = None
    gradient_checkpointing: bool | None = None
    speed: float
    """Samples per second over the present ones, the middle of what the guide says."""


_SCHEMES = (
    _Scheme(
        name="plan 1",
        title="batch 24, accumulation 2",
        guide="14 to 16 GB, 5 to 10 % slower",
        batch=24,
        accumulation=2,
        speed=0.925,
    ),
    _Scheme(
        name="plan 2",
        title="batch 20, accumulation 2",
        guide="12 to 14 GB, 10 to 15 % slower",
        batch=20,
        accumulation=2,
        speed=0.875,
    ),
    _Scheme(
        name="plan 3",
        title="batch 24, accumulation 3",
        guide="headed as keeping the effective batch, which it raises by an eighth; the accumulation makes an update longer, "
        "not a sample slower",
        batch=24,
        accumulation=3,
        speed=0.925,
    ),
    _Scheme(
        name="plan 4",
        title="gradient checkpointing",
        guide="30 to 40 % less (of the activations, not of the peak), 20 to 30 % slower",
        gradient_checkpointing=True,
        speed=0.75,
    ),
    _Scheme(
        name="plan 5",
        title="sequence length 192",
        guide="20 to 30 % less, 10 to 15 % faster; long texts lose their ends",
        seq_len=192,
        speed=1.125,
    ),
)
_PRESETS = {"preset A": "t5-balanced", "preset B": "t5-conservative", "preset C": "t5-aggressive"}
_QLORA = {
    "plan 1": ("qlora-16g-safe", "10 to 12 GB"),
    "plan 3": ("qlora-16g-min", "8 to 10 GB; the guide's accumulation of 32 doubles the effective batch and saves nothing: 16"),
}


@dataclass(frozen=True, kw_only=True)
class _Present:
    """What every choice is compared with."""

    settings: Settings
    line: Line | str
    total_bytes: int | None
    speeds: Mapping[int, float]


def choices(
    settings: Settings,
    peaks: Iterable[Peak] = (),
    total_bytes: int | None = None,
    *,
    base_bytes: int | None = None,
    speeds: Mapping[int, float] | None = None,
    on_gpu: bool | None = None,
) -> tuple[Choice, ...]:
    """The guides' proposals for runs of their kind: () for others. `speeds`: samples per second as measured, by batch."""
    line = line_through(peaks_of(settings, peaks, on_gpu=on_gpu), base_bytes=base_bytes)
    present = _Present(settings=settings, line=line, total_bytes=total_bytes, speeds=speeds or {})
    makers = {"pretrain-t5": _of_t5, "sft-qlora": _of_qlora}
    return tuple(makers[settings.recipe](present)) if settings.recipe in makers else ()


def _of_t5(present: _Present) -> Iterator[Choice]:
    before = present.settings
    for scheme in _SCHEMES:
        names = ("batch", "accumulation", "seq_len", "gradient_checkpointing")
        values = {name: value for name in names if (value := getattr(scheme, name)) is not None}
        yield _choice(scheme.name, scheme.title, scheme.guide, replace(before, **values), present, speed=scheme.speed)
    exact = split_below(before.effective_batch, before.world_size, min(24, before.batch - 1))
    if exact is not None:
        after = replace(before, batch=exact[0], accumulation=exact[1])
        why = "not in the guide: what its third plan wanted, the effective batch held exactly"
        yield _choice("exact", f"batch {exact[0]}, accumulation {exact[1]}", why, after, present)
    presets = load_presets()
    for name, preset in _PRESETS.items():
        if preset in presets:
            words = presets[preset].description
            yield _choice(name, presets[preset].title, words, take_whole(before, presets[preset]), present, preset=preset)


def _of_qlora(present: _Present) -> Iterator[Choice]:
    presets = load_presets()
    for name, (preset, guide) in _QLORA.items():
        if preset in presets:
            after = take_whole(present.settings, presets[preset])
            yield _choice(name, presets[preset].title, guide, after, present, preset=preset)


def _choice(
    name: str,
    title: str,
    guide: str,
    after: Settings,
    present: _Present,
    *,
    speed: float | None = None,
    preset: str | None = None,
) -> Choice:
    before = present.settings
    then = _forecast(after, present)
    factor, basis = _epoch(after, present, speed)
    old, new = before.effective_batch, after.effective_batch
    same = old == new and all(getattr(before, name) == getattr(after, name) for name in ("seq_len", "lora", "learning_rate"))
    return Choice(
        name=name,
        title=title,
        guide=guide,
        settings=after,
        preset=preset,
        effective_batch=new,
        effective_text=f"{new}, as it is" if old == new else effective_change(old, new),
        keeps_math=same,
        # A preset taken whole sets values of training that belong to a run's beginning.
        resumable="new run" if preset is not None and not same else compatibility(before, after)[0],
        forecast=then if isinstance(then, Forecast) else None,
        forecast_unknown=then if isinstance(then, str) else None,
        epoch_factor=factor,
        epoch_basis=basis,
    )


def _forecast(after: Settings, present: _Present) -> Forecast | str:
    before, line = present.settings, present.line
    if isinstance(line, str):
        return line
    if (before.zero, before.lora, before.optimizer) != (after.zero, after.lora, after.optimizer):
        return "another strategy or other adapters: nothing was measured of them"
    if before.gradient_checkpointing and not after.gradient_checkpointing:
        return "without checkpointing nothing was measured"
    if after.gradient_checkpointing and not before.gradient_checkpointing:
        line = line.with_activations(CHECKPOINTED, f"base + {CHECKPOINTED:.0%} of what grows with the batch")
    if after.seq_len > before.seq_len:
        return f"T {after.seq_len} is longer than what was measured"
    if after.seq_len < before.seq_len:
        share = after.seq_len / before.seq_len
        line = line.with_activations(share, f"what grows with the batch shrinks at least with T to {share:.0%}")
    return line.forecast(after.batch, present.total_bytes)


def _epoch(after: Settings, present: _Present, speed: float | None) -> tuple[float | None, str]:
    before, speeds = present.settings, present.speeds
    only_the_split = replace(after, batch=before.batch, accumulation=before.accumulation) == before
    if only_the_split and before.batch in speeds and after.batch in speeds:
        return speeds[before.batch] / speeds[after.batch], "measured"
    return (None, "not known") if speed is None else (1 / speed, "the guide's guess")


def steps_at(steps: int, before_batch: int, after_batch: int) -> int:
    """How many micro-batches an epoch takes at another B, the last one perhaps not full."""
    return math.ceil(steps * before_batch / after_batch)


def epoch_seconds(steps: int, before_batch: int, after_batch: int, step_seconds: float) -> float:
    """The time of that epoch, where one micro-batch of the new size takes `step_seconds`."""
    return steps_at(steps, before_batch, after_batch) * step_seconds


def samples_per_second(steps: int, seconds: float, batch: int, world_size: int = 1) -> float:
    """The only speed that can be compared between batches: a step is not the same work."""
    return steps * batch * world_size / seconds
