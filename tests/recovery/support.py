"""Runs, failures and peaks as values, with the measurements of real runs."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from memtop.presets import Settings, load_presets, load_recipes, resolve
from memtop.supervisor.diagnosis.environment import Place
from memtop.supervisor.diagnosis.values import Diagnosis, Kind, Logits
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.remedies import Ladder, ladder
from memtop.supervisor.recovery.situation import HostFacts, situation_of
from memtop.supervisor.recovery.values import Forecast, Peak, Remedy

GIB = 1 << 30
# Without the allocator option that all presets set, so that it is among the remedies. Where a 4-bit
# model needs it, it stays.
PRESETS = {
    name: preset if preset.family == "qlora" else replace(preset, allocator="") for name, preset in load_presets().items()
}
RECIPES = load_recipes()
CARD = round(19.58 * GIB)
"""A 20 GB GPU, as torch reports its size."""
ROOMY = HostFacts(limit_bytes=64 * GIB, available_bytes=48 * GIB)

T5 = replace(resolve(RECIPES["pretrain-t5"], preset=PRESETS["standard"]), batch=32, accumulation=2, world_size=3)
"""A run on three GPUs with effective batch 192."""
LORA = resolve(RECIPES["sft-lora"], preset=PRESETS["standard"], whole=False)
QLORA = replace(
    resolve(RECIPES["sft-qlora"], preset=PRESETS["qlora-16g-safe"], whole=False),
    batch=2,
    accumulation=8,
    seq_len=2048,
    workers=4,
)
FIRST = resolve(RECIPES["first-run"], preset=PRESETS["standard"])


def gib(value: float) -> int:
    return round(value * GIB)


def peak(settings: Settings, batch: int, size_gib: float, *, failed: bool = False, on_gpu: bool | None = None) -> Peak:
    key = settings_key(settings, on_gpu=on_gpu)
    return Peak(batch=batch, bytes=gib(size_gib), updates=50, failed=failed, settings_key=key)


def measured(settings: Settings = T5) -> tuple[Peak, ...]:
    """Measured at B 16, failed at B 32."""
    return peak(settings, 16, 11.49), peak(settings, 32, 19.73, failed=True)


def died(kind: Kind = Kind.GPU_OOM, **fields: Any) -> Diagnosis:
    """A failure of a program that uses PyTorch on CUDA, if nothing else is said."""
    known = {"confidence": 0.95, "summary": "out of memory", "phase": "backward", "environment": (Place.CUDA, Place.PYTORCH)}
    return Diagnosis(**{"kind": kind, **known, **fields})


T5_OOM = died(
    requested_bytes=32 * 252 * 40960 * 4,
    requested_for=str(Logits(32, 252, 40960, 4)),
    requested_logits=Logits(32, 252, 40960, 4),
    total_bytes=CARD,
    free_bytes=gib(1.06),
    process_bytes=gib(18.50),
    allocated_bytes=gib(14.94),
    reserved_unallocated_bytes=gib(3.18),
    context_bytes=gib(0.38),
    phase="forward",
)
"""The complete message of that run at B 32."""


def climb(diagnosis: Diagnosis, settings: Settings, **more: Any) -> Ladder:
    return ladder(situation_of(diagnosis, settings, **more))


def ids(found: Ladder | tuple[Remedy, ...]) -> list[str]:
    return [remedy.id for remedy in (found.remedies if isinstance(found, Ladder) else found)]


def named(found: Ladder | tuple[Remedy, ...], id: str) -> Remedy:
    (remedy,) = [one for one in (found.remedies if isinstance(found, Ladder) else found) if one.id == id]
    return remedy


def forecast_of(found: Ladder, id: str) -> Forecast:
    """The forecast of a remedy that has one."""
    forecast = named(found, id).forecast
    assert forecast is not None
    return forecast


def why_not(found: Ladder, words: str) -> str:
    (line,) = [line for line in found.left_out if words in line]
    return line


def words(remedies: tuple[Remedy, ...]) -> str:
    """Everything that they say."""
    return "\n".join("\n".join([one.title, one.why, *one.instructions]) for one in remedies)
