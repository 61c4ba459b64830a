"""The guides' own proposals as named choices, with the numbers that they come to: peak, effective batch, time per epoch. Pure.

A choice is what a guide wrote, so it may change the mathematics; the remedies hold them. It says what the guide got wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from memtop.presets import Settings, load_presets, take_whole
from memtop.presets.arithmetic import split_below
from memtop.presets.comparing import compatibility, effective_change
from memtop.supervisor.recovery.forecast import Line, foreseen, line_through, peaks_of
from memtop.supervisor.recovery.gpu_ladder import CHECKPOINTED
from memtop.supervisor.recovery.values import Class, Forecast, Peak


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One proposal of a guide, against the present settings."""

    name: str
    title: str
    guide: str
    """What the guide says of it, corrected where it is wrong."""
    settings: Settings
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
    """`measured`, or `the guide's guess`."""

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


def choices(
    settings: Settings,
    peaks: Iterable[Peak] = (),
    total_bytes: int | None = None,
    *,
    base_bytes: int | None = None,
    speeds: Mapping[int, float] | None = None,
) -> tuple[Choice, ...]:
    """The guides' proposals for runs of their kind: () for others. `speeds`: samples per second as measured, by batch."""
    line = line_through(peaks_of(settings, peaks), base_bytes=base_bytes)
    if settings.recipe == "pretrain-t5":
        return tuple(_of_t5(settings, line, total_bytes, speeds or {}))
    if settings.recipe == "sft-qlora":
        return tuple(_of_qlora(settings, line, total_bytes))
    return ()


def _of_t5(settings: Settings, line: Line | str, total_bytes: int | None, speeds: Mapping[int, float]) -> list[Choice]:
    found = []
    for scheme in _SCHEMES:
        names = ("batch", "accumulation", "seq_len", "gradient_checkpointing")
        after = replace(settings, **{name: value for name in names if (value := getattr(scheme, name)) is not None})
        found.append(_choice(scheme.name, scheme.title, scheme.guide, settings, after, line, total_bytes, scheme.speed, speeds))
    exact = split_below(settings.effective_batch, settings.world_size, min(24, settings.batch - 1))
    if exact is not None:
        after = replace(settings, batch=exact[0], accumulation=exact[1])
        title = f"batch {exact[0]}, accumulation {exact[1]}"
        guide = "not in the guide: what its third plan wanted, the effective batch held exactly"
        found.append(_choice("exact", title, guide, settings, after, line, total_bytes, None, speeds))
    presets = load_presets()
    for name, preset in _PRESETS.items():
        if preset in presets:
            after = take_whole(settings, presets[preset])
            title = f"{presets[preset].title} ({preset})"
            found.append(_choice(name, title, presets[preset].description, settings, after, line, total_bytes, None, speeds))
    return found


def _of_qlora(settings: Settings, line: Line | str, total_bytes: int | None) -> list[Choice]:
    presets = load_presets()
    return [
        _choice(
            name, presets[preset].title, guide, settings, take_whole(settings, presets[preset]), line, total_bytes, None, {}
        )
        for name, (preset, guide) in _QLORA.items()
        if preset in presets
    ]


def _choice(
    name: str,
    title: str,
    guide: str,
    before: Settings,
    after: Settings,
    line: Line | str,
    total_bytes: int | None,
    speed: float | None,
    speeds: Mapping[int, float],
) -> Choice:
    then = _forecast(before, after, line, total_bytes)
    factor, basis = _epoch(before, after, speed, speeds)
    held = before.effective_batch == after.effective_batch
    same = held and (before.seq_len, before.lora, before.learning_rate) == (after.seq_len, after.lora, after.learning_rate)
    effective = (
        f"{after.effective_batch}, as it is" if held else effective_change(before.effective_batch, after.effective_batch)
    )
    return Choice(
        name=name,
        title=title,
        guide=guide,
        settings=after,
        effective_batch=after.effective_batch,
        effective_text=effective,
        keeps_math=same,
        resumable=compatibility(before, after)[0],
        forecast=then if isinstance(then, Forecast) else None,
        forecast_unknown=then if isinstance(then, str) else None,
        epoch_factor=factor,
        epoch_basis=basis,
    )


def _forecast(before: Settings, after: Settings, line: Line | str, total_bytes: int | None) -> Forecast | str:
    if isinstance(line, str):
        return line
    if (before.zero, before.lora, before.optimizer) != (after.zero, after.lora, after.optimizer):
        return "another strategy or other adapters: nothing was measured of them"
    if after.gradient_checkpointing and not before.gradient_checkpointing:
        line = line.with_activations(CHECKPOINTED, f"base + {CHECKPOINTED:.0%} of what grows with the batch")
    elif before.gradient_checkpointing and not after.gradient_checkpointing:
        return "without checkpointing nothing was measured"
    if after.seq_len > before.seq_len:
        return f"T {after.seq_len} is longer than what was measured"
    if after.seq_len < before.seq_len:
        share = after.seq_len / before.seq_len
        line = line.with_activations(share, f"what grows with the batch shrinks at least with T to {share:.0%}")
    found = line.forecast(after.batch, total_bytes)
    return foreseen(found.peak_bytes, total_bytes, found.basis)


def _epoch(before: Settings, after: Settings, speed: float | None, speeds: Mapping[int, float]) -> tuple[float | None, str]:
    plain = replace(after, batch=before.batch, accumulation=before.accumulation) == before
    if plain and before.batch in speeds and after.batch in speeds:
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
