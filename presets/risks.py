"""Whether settings lead back to what a run has died of."""

from __future__ import annotations

from collections.abc import Sequence

from memtop.presets.fields import saves_memory
from memtop.presets.schema import Settings


def risk(after: Settings, failed: Sequence[Settings]) -> str | None:
    """That settings like these have died of memory in this run, in one line; None where they ask for less than each of
    those. `failed`: the settings of the run's deaths."""
    for one in reversed(failed):
        if after.batch >= one.batch and not saves_memory(after, one, much=after.batch > one.batch):
            split = f"batch {one.batch}{', checkpointing' if one.gradient_checkpointing else ''}"
            same = "the same" if after.batch == one.batch else f"more than that ({after.batch})"
            return f"the run has died of memory with {split}: this is {same}, and saves nothing more"
    return None
