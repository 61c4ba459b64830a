"""Adds to the reports of the optimizer hook what a program's own loop tells accelerate.

`Accelerator.backward` is wrapped: it counts the micro-batches of an update, and sees their loss and
the data loader in use. `save_state` and `load_state` tell about checkpoints. While a framework's
Trainer reports, which uses accelerate itself, nothing is added.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from types import ModuleType
from typing import Any, Callable, Iterator

from .frameworks import Split, Trainings, batch_of, number_on_cpu, report_checkpoint


def follow(module: ModuleType, trainings: Trainings) -> None:
    """Follow the class `Accelerator` of this module."""
    accelerator: Any = getattr(module, "Accelerator", None)
    if accelerator is None or trainings.agent.reports_steps:
        return
    version = getattr(sys.modules.get("accelerate"), "__version__", "")
    loop = Loop(trainings, ("accelerate %s" % version).strip())
    for name in ("backward", "save_state", "load_state"):
        setattr(accelerator, name, loop.told_by(getattr(accelerator, name)))
    trainings.watch.details = loop.details


class Loop:
    """The program's own loop: its methods are called after those of the Accelerator."""

    def __init__(self, trainings: Trainings, library: str) -> None:
        self._trainings = trainings
        self._library = library
        self._off = False
        self._split = Split(None, None, None)
        self._described: Split | None = None
        """What was reported last."""
        self._resumed = False
        self._samples: int | None = 0
        self._micro_batches = 0
        """Of the present update."""
        self._loss: float | None = 0.0
        """Their sum; None if one is not known."""

    def told_by(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method of the Accelerator, and afterwards the one of this name here."""

        @functools.wraps(method)
        def told(accelerator: Any, *given: Any, **named: Any) -> Any:
            began = time.monotonic()
            with self._saving() if method.__name__ == "save_state" else contextlib.nullcontext():
                result = method(accelerator, *given, **named)
            if not self._off and not self._trainings.watch.is_silent:
                try:
                    getattr(self, method.__name__)(accelerator, result, began, *given, **named)
                except Exception as error:  # noqa: BLE001 - the training must go on, whatever goes wrong here
                    self._give_up(error)
            return result

        return told

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Report when it begins to save, and when it has ended: a stop waits for it, and the first
        file may come late."""
        is_told = not self._off and not self._trainings.watch.is_silent
        if is_told:
            self._trainings.agent.report("phase", phase="save")
        try:
            yield
        finally:
            if is_told:
                self._trainings.agent.report("phase", phase="training")

    def _give_up(self, error: Exception) -> None:
        self._off = True
        with contextlib.suppress(Exception):
            self._trainings.agent.report("warning", message="no further reports by accelerate: %r" % (error,))

    def backward(self, accelerator: Any, result: Any, began: float, loss: Any = None, **_: Any) -> None:
        loader, ranks = accelerator.gradient_state.active_dataloader, accelerator.num_processes
        self._micro_batches += 1
        value = number_on_cpu(loss)
        self._loss = None if self._loss is None or value is None else self._loss + value
        accumulation = accelerator.gradient_accumulation_steps
        self._split = Split(batch_of(loader, ranks), accumulation, ranks)
        if self._samples is not None:
            self._samples = _after(self._samples, self._split, accelerator.gradient_state)

    def details(self) -> dict[str, Any]:
        """What the report of the update that has just ended contains."""
        if self._off or not self._micro_batches:
            return {}
        try:
            return self.details_of_update()
        except Exception as error:  # noqa: BLE001 - the training must go on, whatever goes wrong here
            self._give_up(error)
            return {}

    def details_of_update(self) -> dict[str, Any]:
        """Those; begin to count for the next one."""
        count, total = self._micro_batches, self._loss
        self._micro_batches, self._loss = 0, 0.0
        split = self._split
        if self._trainings.watch.has_others:
            self._samples = total = None
        elif split.accumulation == 1 and count > 1:
            # The program accumulates without accelerate's help. Whether it has divided the losses
            # is not known.
            split, total = split._replace(accumulation=count), None
        if split != self._described:
            self._described = split
            self._describe(split)
        found = {"batch": split.batch, "accumulation": split.accumulation, "samples_seen": self._samples}
        return found if total is None else dict(found, loss=total / count)

    def _describe(self, split: Split) -> None:
        own = self._split.accumulation == split.accumulation
        name, source = ("gradient_accumulation_steps", "Accelerator") if own else (None, "calls of backward")
        self._trainings.agent.report(
            "loop",
            framework=self._library,
            effective_batch=split.effective,
            resumed=self._resumed,
            knobs={
                "batch": {"value": split.batch, "name": "batch_size", "source": "DataLoader"},
                "accumulation": {"value": split.accumulation, "name": name, "source": source},
            },
        )

    def load_state(self, accelerator: Any, result: Any, began: float, *_: Any, **__: Any) -> None:
        # How many samples were used before is not known.
        self._resumed, self._samples = True, None

    def save_state(self, accelerator: Any, result: Any, began: float, output_dir: Any = None, *_: Any, **__: Any) -> None:
        folder = result if isinstance(result, (str, os.PathLike)) else output_dir
        if accelerator.is_main_process and folder is not None:
            done = None if self._resumed else self._trainings.watch.done
            path = os.path.abspath(os.fspath(folder))
            report_checkpoint(self._trainings.agent, done, self._samples, path, time.monotonic() - began)


def _after(samples: int, split: Split, state: Any) -> int | None:
    """The samples after another micro-batch."""
    if split.batch is None or split.ranks is None:
        return None
    # The last batch of an epoch may be smaller.
    is_rest = state.end_of_dataloader and state.remainder > 0
    return samples + (state.remainder if is_rest else split.batch * split.ranks)
