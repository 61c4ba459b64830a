"""Follows the optimizer of a program that knows nothing of memtop, through torch's own global hook.

How long a program that knows nothing of memtop waits for its data: the time inside torch's data loaders."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
import threading
import time
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Sequence

from . import memory

if TYPE_CHECKING:
    from . import Agent

_OPTIMIZERS = "torch.optim.optimizer"
_LOADERS = "torch.utils.data.dataloader"


class StepWatch:
    """Waits until the program imports torch's optimizers, then reports each step of the first one that steps."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._handle: Any = None
        self._removed = False
        self._first: Callable[[], Any] = _nobody
        self._updates = 0
        self._last: float | None = None
        self._loaders = LoaderWatch()

    def install(self) -> None:
        for name, then in ((_OPTIMIZERS, self._hook), (_LOADERS, self._hook_loaders)):
            if name in sys.modules:
                then(sys.modules[name])
            else:
                sys.meta_path.insert(0, _Finder(name, then))

    @property
    def present(self) -> int | None:
        """The update that is under way; None before the first one has ended."""
        return self._updates + 1 if self._updates else None

    def remove(self) -> None:
        """The program reports its steps itself."""
        self._removed = True
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _hook(self, module: ModuleType) -> None:
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if register is not None and not self._removed:
            try:
                self._handle = register(self._after_step)
            except Exception as error:  # noqa: BLE001 - a guest must not break its host's import, whatever goes wrong
                self._give_up(error)

    def _hook_loaders(self, module: ModuleType) -> None:
        if not self._removed:
            try:
                self._loaders.hook(module)
            except Exception as error:  # noqa: BLE001 - a guest must not break its host's import, whatever goes wrong
                self._give_up(error)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._removed:
            return
        try:
            self._stepped(optimizer)
        except Exception as error:  # noqa: BLE001 - a guest must not break its host's step, whatever goes wrong
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        # The hook is only made idle: torch is going through its hooks now, and must not find one of them missing.
        self._removed = True
        with contextlib.suppress(Exception):
            self._agent.report("warning", message="no reports of this program's steps from here on: %r" % (error,))

    def _stepped(self, optimizer: Any) -> None:
        if self._first() is None:
            # Several optimizers (a GAN's two, one per layer) step together: the first counts the updates, as long as it lives.
            self._agent.adopt()
            self._first = weakref.ref(optimizer)
            self._last = None
        if self._first() is not optimizer:
            return
        now, waited = time.monotonic(), self._loaders.taken()
        self._updates += 1
        readings = self._agent.readings()
        self._agent.report(
            "step",
            update=self._updates,
            learning_rate=_learning_rate(optimizer),
            step_seconds=None if self._last is None else now - self._last,
            data_wait_seconds=waited if self._last is not None else None,
            dropped=self._agent.dropped,
            device_uuid=memory.device_uuid(),
            **readings,
        )
        self._last = now
        # It offered nothing of its own, so whatever is handed over cannot be carried out.
        self._agent.take_commands()


def _nobody() -> None:
    """As a reference to what is gone."""


def _learning_rate(optimizer: Any) -> float | None:
    """That of the first group; None where it lies on a device: to read it would have the program wait for all that it has asked
    of the GPU, at each step, and is not allowed while a CUDA graph is recorded."""
    groups = getattr(optimizer, "param_groups", None) or [{}]
    rate = groups[0].get("lr")
    device = getattr(rate, "device", None)
    if rate is None or (device is not None and getattr(device, "type", "cpu") != "cpu"):
        return None
    return float(rate)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; has `then(module)` called once the module of that name has been imported by someone else."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        with contextlib.suppress(ValueError):
            # The program may have put its own list of finders there meanwhile.
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is as if it had been loaded without us.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)


# What all of torch's loader iterators have in common; private, so it may be gone one day: then nothing is told.
_ITERATOR = "_BaseDataLoaderIter"


class LoaderWatch:
    """Adds up the seconds that the program's main thread spends in `next(...)` of a data loader."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._inside = False

    def taken(self) -> float | None:
        """Seconds since the last call; None for a program that has asked no loader of torch's for a batch yet."""
        seconds = self._seconds
        if seconds is not None:
            self._seconds = 0.0
        return seconds

    def hook(self, module: ModuleType) -> None:
        """Follow the loaders of that module."""
        iterator = getattr(module, _ITERATOR, None)
        following = getattr(iterator, "__next__", None)
        if iterator is not None and following is not None:
            iterator.__next__ = self._timed(following)

    def _timed(self, following: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(following)
        def timed(iterator: Any) -> Any:
            # A thread that fetches ahead makes nobody wait; a loader inside a loader's own work is counted once.
            if self._inside or threading.current_thread() is not threading.main_thread():
                return following(iterator)
            self._inside, started = True, time.monotonic()
            try:
                return following(iterator)
            finally:
                self._inside = False
                self._seconds = (self._seconds or 0.0) + time.monotonic() - started

        return timed
