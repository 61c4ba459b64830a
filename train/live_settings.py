"""The settings in effect, and what changes them between two updates: memory, and live edits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from memtop.presets import Settings, SettingsError
from memtop.presets.comparison import edits_text
from memtop.presets.fields import LIVE, SPLIT
from memtop.presets.host_memory import HostPlan
from memtop.presets.schema import Split, with_splits
from memtop.train import BadInputError
from memtop.train.batch_search import BatchSearch
from memtop.train.batch_sizer import SAFE_FRACTION, BatchSizer, OomGuard, larger_split, smaller_split
from memtop.train.batches import Batches
from memtop.train.channel import Channel, edit_live
from memtop.train.engine import Engine
from memtop.train.exchange import Ranks
from memtop.train.host_memory import agree_on_host_plan
from memtop.train.model import set_checkpointing
from memtop.train.order import Position, count_kept


class LiveSettings:
    """The settings in effect now. A change never changes which samples the next update takes.

    All ranks call every method together.
    """

    def __init__(
        self,
        settings: Settings,
        position: Position,
        target_samples: int,
        *,
        engine: Engine,
        batches: Batches,
        channel: Channel,
        host: HostPlan,
        guard: OomGuard,
        sizer: BatchSizer,
        search: BatchSearch,
    ) -> None:
        self.now = settings
        self._target_samples = target_samples
        self._position = position
        self._engine = engine
        self._batches = batches
        self._channel = channel
        self._host = host
        self._guard = guard
        self._sizer = sizer
        self._search = search
        self._ranks = Ranks(engine.accelerator)
        self._largest = settings.splits

    @property
    def split(self) -> Split:
        """B and A of this rank."""
        return self.now.splits[self._engine.accelerator.process_index]

    @property
    def total_updates(self) -> int:
        """Updates of the whole run with the settings in effect now."""
        left = count_kept(self.now.leave_out, self._position.samples_seen, self._target_samples)
        return self._position.updates + math.ceil(left / self.now.effective_batch)

    def begin(self) -> None:
        """Search for the batch to start with if that is asked for; start the batches."""
        if self.now.auto_batch and self._use_found(self._search.find(self.now)):
            return
        # On this device there is no search; a restart on another one may search.
        self.now = msgspec.structs.replace(self.now, auto_batch=False)
        self._start_batches()

    def shrink(self, reason: str, *, here: bool) -> None:
        """Continue with the next smaller micro-batch on those ranks where `here` is true.

        Every rank keeps its samples. Raise the failure if a rank has no smaller micro-batch.
        """
        splits = list(self.now.splits)
        hit = [rank for rank, flag in enumerate(self._ranks.each(here)) if flag]
        for rank in hit:
            smaller = smaller_split(splits[rank])
            if smaller is None:
                self._guard.give_up(f"update {self._position.updates + 1}")
            else:
                splits[rank] = smaller
        if hit:
            self._sizer.failed(self.split[0])
            self._search.forget()
            self._change_splits(reason, splits)

    def adapt_batch(self) -> None:
        """Shrink the batch before memory runs out, or grow it after a stable stretch if it fits."""
        if not self._engine.retries or self._use_found(self._search.after_update(self.now)):
            return
        if self._sizer.pressed:
            self.shrink("pressure", here=self._sizer.pressed_here and smaller_split(self.split) is not None)
            return
        splits = self.now.splits
        larger = [larger_split(split, most) for split, (most, _) in zip(splits, self._largest, strict=True)]
        if not self._sizer.due or not any(larger):
            return
        own = larger[self._engine.accelerator.process_index]
        # Each rank decides for itself: its samples stay the same.
        fits = self._ranks.each(own is not None and self._sizer.fullness(own[0]) < SAFE_FRACTION)
        if any(fits):
            found = [new if new and fit else old for old, new, fit in zip(splits, larger, fits, strict=True)]
            self._change_splits("grown back", found)
        else:
            self._sizer.refused()

    def edit(self, values: dict[str, Any]) -> tuple[bool, str, dict[str, Any]]:
        """Apply a live edit from the next update on; return success, a message, and the details."""
        before, update = self.now, self._position.updates + 1
        try:
            after = edit_live(before, values)
            if after.gradient_checkpointing != before.gradient_checkpointing:
                set_checkpointing(self._engine.model, on=after.gradient_checkpointing)
        except (SettingsError, BadInputError) as error:
            return False, str(error), {}
        if after.splits != before.splits or values.get("batch") is not None:
            self._largest = after.splits
        changes = {name: getattr(after, name) for name in LIVE if getattr(after, name) != getattr(before, name)}
        if not changes:
            return True, "nothing to change: these are the present values", {"update": update, "changes": {}}
        self.change("asked", **changes)
        short = "workers" in changes and self._host.workers != after.workers
        note = f" ({self._host.workers} workers for now: host memory is short)" if short else ""
        text = f"from update {update} on: {edits_text(before, self.now, changes)}{note}"
        return True, text, {"update": update, "changes": changes}

    def change(self, reason: str, **changes: Any) -> None:
        """Use other settings from the next update on.

        It takes the same samples that it would have taken without them.
        """
        before, self.now = self.now, msgspec.structs.replace(self.now, **changes)
        accelerator = self._engine.accelerator
        if "workers" in changes:
            workers = agree_on_host_plan(self.now, accelerator).workers
            self._host = msgspec.structs.replace(self._host, workers=workers)
        # The cached blocks have the old split's sizes, and the peak so far is the old split's.
        self._sizer.memory.reset()
        if changes.keys() & set(SPLIT):
            self._sizer.changed(grown=reason == "grown back", forget=reason == "asked")
        elif "gradient_checkpointing" in changes:
            self._sizer.changed(forget=True)
        if changes.keys() & {*SPLIT, "workers"}:
            self._start_batches()
        update = self._position.updates + 1
        self._channel.report("settings", update=update, changes=changes, reason=reason, total_updates=self.total_updates)
        if accelerator.is_main_process:
            print(f"memtop: from update {update} on: {edits_text(before, self.now, changes)} ({reason})", flush=True)

    def _use_found(self, splits: tuple[Split, ...] | None) -> bool:
        """Use splits that the search has found, now and after a restart; False without any."""
        if splits is None:
            return False
        self._largest = splits
        self._change_splits("batch search", splits, auto_batch=False)
        return True

    def _change_splits(self, reason: str, splits: Sequence[Split], **more: Any) -> None:
        after = with_splits(self.now, splits)
        names = SPLIT if after.rank_splits != self.now.rank_splits else SPLIT[:2]
        self.change(reason, **{name: getattr(after, name) for name in names}, **more)

    def _start_batches(self) -> None:
        self._batches.start(self.now, self._host, self._position, self._target_samples)
