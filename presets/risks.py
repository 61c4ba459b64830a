"""Whether settings lead back to what a run has died of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memtop.presets.schema import Settings


def risk(after: Settings, failed: Sequence[Settings]) -> str | None:
    """That settings like these have died of memory in this run, in one line; None where they ask for less than each of
    those. `failed`: the settings of the run's deaths."""
    for one in reversed(failed):
        less = {name for name, saves in _SAVINGS if saves(after, one)}
        if after.batch > one.batch:
            less &= _SUBSTANTIAL
        if not less and after.batch >= one.batch:
            split = f"batch {one.batch}{', checkpointing' if one.gradient_checkpointing else ''}"
            same = "the same" if after.batch == one.batch else f"more than that ({after.batch})"
            return f"the run has died of memory with {split}: this is {same}, and saves nothing more"
    return None


_LEVELS = ("standard", "low", "extreme")
# What asks for less memory, by its name: whether the first settings have it and the second have not.
_SAVINGS: tuple[tuple[str, Callable[[Settings, Settings], bool]], ...] = (
    ("checkpointing", lambda one, other: one.gradient_checkpointing and not other.gradient_checkpointing),
    ("T", lambda one, other: one.seq_len < other.seq_len),
    ("ZeRO", lambda one, other: _sharding(one) > _sharding(other)),
    ("optimizer", lambda one, other: one.optimizer != other.optimizer and one.optimizer != "adamw"),
    ("loss", lambda one, other: one.loss_chunk != other.loss_chunk and one.loss_chunk != 0),
    ("model", lambda one, other: one.model != other.model or one.lora != other.lora),
    ("processes", lambda one, other: one.world_size != other.world_size),
    ("evaluation", lambda one, other: (one.eval_every, one.eval_batch) != (other.eval_every, other.eval_batch)),
    ("allocator", lambda one, other: one.allocator != other.allocator),
    ("workers", lambda one, other: one.workers < other.workers),
    ("host level", lambda one, other: _LEVELS.index(one.host_level) > _LEVELS.index(other.host_level)),
    ("pinning", lambda one, other: one.pin_memory is False and other.pin_memory is not False),
)
_SUBSTANTIAL = {"checkpointing", "T", "ZeRO", "optimizer", "loss", "model", "processes"}
"""What may make up for a larger micro-batch."""


def _sharding(settings: Settings) -> tuple[int, bool, bool]:
    return settings.zero.stage, settings.zero.offload_optimizer, settings.zero.offload_parameters
