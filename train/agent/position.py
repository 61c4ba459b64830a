"""Lets Hugging Face's Trainer resume inside an epoch with the samples that it would have used.

Some versions make two mistakes there, without memtop, too. Both are corrected for the training that
memtop resumes; versions without them are left as they are:

* accelerate 1.10 and older shuffle the rest of the epoch like the first epoch.
* transformers 4 counts the micro-batches of that epoch from where it resumes, and compares the
  count with those of the whole epoch. If the epoch's last update has fewer micro-batches than the
  others, it is joined with the first update of the next epoch, and all later updates come too
  early.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Callable, Iterator


@contextlib.contextmanager
def corrected(trainer: Any, told: Callable[[str], Any]) -> Iterator[None]:
    """While this Trainer trains. `told` returns a context manager that writes errors down."""
    module = sys.modules.get("transformers.trainer")
    skip = getattr(module, "skip_first_batches", None)
    if skip is None:
        yield
        return

    def skipping(loader: Any, *given: Any, **named: Any) -> Any:
        rest = skip(loader, *given, **named)
        with told("the order of the samples may be another one"):
            if getattr(rest, "iteration", None) == 0 and getattr(loader, "iteration", 0):
                rest.iteration = loader.iteration
            if _has_length(loader) and hasattr(trainer, "get_batch_samples"):
                _LastUpdate(trainer).install()
        return rest

    module.__dict__["skip_first_batches"] = skipping
    try:
        yield
    finally:
        module.__dict__["skip_first_batches"] = skip


def _has_length(loader: Any) -> bool:
    try:
        return len(loader) > 0
    except TypeError:
        return False


class _LastUpdate:
    """Makes the last update of the epoch in which the Trainer resumes end with the epoch.

    The Trainer ends an update if the number of micro-batches so far is a multiple of the
    accumulation. So the accumulation has a fitting value while it looks at the last one.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._accumulation = trainer.args.gradient_accumulation_steps
        self._done = 0
        """The micro-batches of this epoch so far."""
        self._left = 0
        """Those of its last update that do not train yet."""
        self._get: Callable[..., Any] = trainer.get_batch_samples
        self._train: Callable[..., Any] = trainer.training_step

    def install(self) -> None:
        self._trainer.get_batch_samples = self._getting
        self._trainer.training_step = self._training

    def _getting(self, batches: Any, wanted: int, *others: Any, **named: Any) -> Any:
        found = self._get(batches, wanted, *others, **named)
        size = len(found[0])
        self._done += size
        if size < wanted:
            # A version that counts right asks for as many as there are.
            self._left = size
            if size == 1:
                self._trainer.args.gradient_accumulation_steps = 1
        if not size:
            # The epoch is over.
            del self._trainer.get_batch_samples, self._trainer.training_step
        return found

    def _training(self, *given: Any, **named: Any) -> Any:
        if self._left == 1:
            self._trainer.args.gradient_accumulation_steps = self._accumulation
        self._left = max(0, self._left - 1)
        loss = self._train(*given, **named)
        if self._left == 1:
            self._trainer.args.gradient_accumulation_steps = self._done
        return loss
