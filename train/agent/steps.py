"""Follows the optimizer of a program that knows nothing of memtop, through torch's own global hook."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import time
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Sequence

from . import loading, memory

if TYPE_CHECKING:
    from . import Agent

TARGET = "torch.optim.optimizer"


class StepWatch:
    """Waits until the program imports torch's optimizers, then reports each step of the first one that steps."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._handle: Any = None
        self._removed = False
        self._first: Callable[[], Any] = _nobody
        self._updates = 0
        self._last: float | None = None
        self._loaders = loading.LoaderWatch()

    def install(self) -> None:
        for name, then in ((TARGET, self._hook), (loading.TARGET, self._hook_loaders)):
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
