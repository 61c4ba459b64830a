"""When memory runs out inside an update: it is reported, nothing of the try is kept, and the update is done again smaller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from memtop.presets import Settings
from memtop.presets.arithmetic import exact_splits, split_below
from memtop.train.agent.failures import is_allocation_failure
from memtop.train.agent.memory import free_cache
from memtop.train.channel import Channel
from memtop.train.errors import TrainingError

__all__ = ["Guard", "free_cache", "is_allocation_failure", "larger_split", "smaller_split"]

Found = TypeVar("Found")


def smaller_split(settings: Settings) -> tuple[int, int] | None:
    """The next smaller B and A with the same effective batch: B at most half; None at B 1."""
    return split_below(settings.effective_batch, settings.world_size, settings.batch // 2)


def larger_split(settings: Settings, most: int) -> tuple[int, int] | None:
    """The next larger B, at most `most`, and A with the same effective batch; None where there is none."""
    splits = exact_splits(settings.effective_batch, settings.world_size)
    return min((split for split in splits if settings.batch < split[0] <= most), default=None)


class Guard:
    """Runs the parts of an update and catches it when memory runs out in one of them."""

    def __init__(self, channel: Channel, *, retries: bool) -> None:
        self._channel = channel
        self._retries = retries
        self._fatal: Exception | None = None
        self.update: int | None = None
        """The update under way, for the reports."""
        self.phase = "unknown"
        """What is being done: data, forward, backward, optimizer, evaluation, save."""

    def attempt(self, work: Callable[[], Found], *, batch: int, accumulation: int | None) -> Found | None:
        """What `work` returns; None where memory ran out. Then the error is gone, and with it all that its frames held.

        With the split that `work` runs under: at batch 1 nothing smaller is left, and `give_up` raises the error when all ranks
        know of it. Where no update can be done again it is raised at once.
        """
        try:
            return work()
        except Exception as error:
            if not is_allocation_failure(error):
                raise
            smaller = self._retries and batch > 1
            self._tell(error, survived=smaller, batch=batch, accumulation=accumulation)
            if not self._retries:
                raise
            if not smaller:
                self._fatal = error
        return None

    def give_up(self, what: str) -> None:
        """Raise the error for which nothing smaller is left; on the other ranks a TrainingError that says so."""
        if self._fatal is not None:
            raise self._fatal
        raise TrainingError(f"{what}: another rank is out of memory, and no smaller batch is left")

    def tell(self, error: Exception) -> None:
        """Report an error that ends the training, if it is about memory and was not reported before."""
        if is_allocation_failure(error):
            self._tell(error, survived=False, batch=None, accumulation=None)

    def _tell(self, error: Exception, **values: Any) -> None:
        self._channel.oom(error, update=self.update, phase=self.phase, **values)
