"""Follows a program that does not use memtop: its steps and data waits, by hooks in torch."""

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
from typing import Any, Callable, NamedTuple, Protocol, Sequence

from . import memory

_OPTIMIZERS = "torch.optim.optimizer"
_LOADERS = "torch.utils.data.dataloader"
# The base class of torch's loader iterators. It is private; if it disappears, no waits are
# reported.
_ITERATOR = "_BaseDataLoaderIter"
_AGREE = 3
"""So many updates in a row must draw the same. The last one of an epoch may draw less."""


class Reporter(Protocol):
    """What `StepWatch` needs of the agent."""

    @property
    def dropped(self) -> int: ...

    def adopt(self) -> None: ...

    def readings(self) -> dict[str, int | None]: ...

    def report(self, kind: str, **values: Any) -> None: ...

    def take_commands(self) -> list[tuple[int, str, dict[str, Any]]]: ...


class StepWatch:
    """Reports each step of the first optimizer that steps, once torch is imported."""

    def __init__(self, agent: Reporter, start: int = 0) -> None:
        """`start`: how many updates the program had done when it was saved, if it resumes."""
        self._agent = agent
        self._start = start
        self._handle: Any = None
        self._removed = False
        self._first: Callable[[], Any] = _no_optimizer
        self._updates = 0
        self._silent = False
        self._last: float | None = None
        self._loaders = LoaderWatch()
        self._drawn: list[Drawn] = []
        self._described: Drawn | None = None
        self.has_others = False
        """Whether several optimizers step, so that not every backward pass is of this update."""
        self.details: Callable[[], dict[str, Any]] = dict
        """What a library knows about the update that has just ended. It must not raise."""

    def install(self) -> None:
        """Hook the modules now, or when the program imports them."""
        when_imported(_OPTIMIZERS, self._hook)
        when_imported(_LOADERS, self._hook_loaders)

    @property
    def present(self) -> int | None:
        """The update in progress; None before the first one has ended."""
        return self._start + self._updates + 1 if self._updates or self._silent else None

    @property
    def done(self) -> int:
        """How many updates have ended, with those before it was saved, if it resumes."""
        return self._start + self._updates

    @property
    def is_silent(self) -> bool:
        """Whether another hook reports the updates."""
        return self._silent or self._removed

    def follow(self, update: int) -> None:
        """Another hook has reported this update: count, but report nothing."""
        self._silent, self._updates, self._start = True, update, 0

    def resume(self) -> None:
        """Report steps again; the next update is the one after those of the other hook."""
        self._silent, self._last, self._first = False, None, _no_optimizer

    def data_wait(self) -> float | None:
        """Seconds in data loaders since the last call; None if there is no data loader."""
        return self._loaders.taken()

    def remove(self) -> None:
        """Stop reporting steps: the program reports them itself."""
        self._removed = True
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _hook(self, module: ModuleType) -> None:
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if register is not None and not self._removed:
            try:
                self._handle = register(self._after_step)
            except Exception as error:  # noqa: BLE001 - the program's import must succeed, whatever goes wrong here
                self._give_up(error)

    def _hook_loaders(self, module: ModuleType) -> None:
        if not self._removed:
            try:
                self._loaders.hook(module)
            except Exception as error:  # noqa: BLE001 - the program's import must succeed, whatever goes wrong here
                self._give_up(error)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._removed:
            return
        try:
            self._stepped(optimizer)
        except Exception as error:  # noqa: BLE001 - the program's step must succeed, whatever goes wrong here
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        # The hook stays registered but does nothing: torch is iterating over its hooks now.
        self._removed = True
        with contextlib.suppress(Exception):
            self._agent.report("warning", message="no further reports of this program's steps: %r" % (error,))

    def _stepped(self, optimizer: Any) -> None:
        if self._first() is None:
            # If several optimizers step together (a GAN's two, one per layer), the first one counts
            # the updates.
            self._agent.adopt()
            self._first = weakref.ref(optimizer)
            self._last = None
        if self._first() is not optimizer:
            self.has_others = True
            return
        self._updates += 1
        drawn = self._loaders.drawn()
        if self._silent:
            return
        now, waited = time.monotonic(), self._loaders.taken()
        values = dict(
            self._agent.readings(),
            update=self.done,
            learning_rate=learning_rate(optimizer),
            step_seconds=None if self._last is None else now - self._last,
            data_wait_seconds=waited if self._last is not None else None,
            batch=self._loaders.batch,
            dropped=self._agent.dropped,
            device_uuid=memory.device_uuid(),
        )
        details = self.details()
        self._agent.report("step", **dict(values, **details))
        self._last = now
        if not details:
            self._describe(drawn)
        # Executes the agent's own commands. The program has offered none, so there are no others.
        self._agent.take_commands()

    def _describe(self, drawn: Drawn | None) -> None:
        """Report how an update's samples are divided, once several updates in a row agree."""
        self._drawn = [] if drawn is None or self.has_others else [*self._drawn, drawn][-_AGREE:]
        if drawn is None or drawn == self._described or self._drawn != [drawn] * _AGREE:
            return
        self._described = drawn
        self._agent.report(
            "loop",
            framework="torch's DataLoader",
            effective_batch=None if drawn.ranks is None else drawn.batch * drawn.batches * drawn.ranks,
            resumed=False,
            knobs={
                "batch": {"value": drawn.batch, "name": "batch_size", "source": "DataLoader"},
                "accumulation": {"value": drawn.batches, "name": None, "source": "batches of an update"},
            },
        )


def _no_optimizer() -> None:
    """Like a weak reference whose object is gone."""


def learning_rate(optimizer: Any) -> float | None:
    """The first group's rate; None if it is on a device.

    Reading it there would make the program wait for the GPU at each step, which a CUDA graph
    capture forbids.
    """
    groups = getattr(optimizer, "param_groups", None) or [{}]
    rate = groups[0].get("lr")
    device = getattr(rate, "device", None)
    if rate is None or (device is not None and getattr(device, "type", "cpu") != "cpu"):
        return None
    return float(rate)


class Drawn(NamedTuple):
    """What a process has drawn from one data loader for an update."""

    batch: int
    batches: int
    ranks: int | None
    """Processes that train on different samples; None if not known."""


class LoaderWatch:
    """Adds up the main thread's seconds in `next(...)` of torch's data loaders."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._inside = False
        self.batch: int | None = None
        """The batch size of the loader that was used last; None if it has none."""
        self._count = 0
        self._sizes: set[tuple[int | None, int | None]] = set()
        """Batch size and ranks of each loader that was used with gradients since the last call of
        `drawn`. An evaluation computes none."""

    def taken(self) -> float | None:
        """Seconds since the last call; None if the program has not used a data loader yet."""
        seconds = self._seconds
        if seconds is not None:
            self._seconds = 0.0
        return seconds

    def drawn(self) -> Drawn | None:
        """What was drawn since the last call; None if that is not known, or from several
        loaders."""
        count, sizes, self._count, self._sizes = self._count, self._sizes, 0, set()
        if len(sizes) != 1:
            return None
        batch, ranks = sizes.pop()
        return None if batch is None else Drawn(batch, count, ranks)

    def hook(self, module: ModuleType) -> None:
        """Measure the loaders of this module."""
        iterator = getattr(module, _ITERATOR, None)
        following = getattr(iterator, "__next__", None)
        if iterator is not None and following is not None:
            iterator.__next__ = self._timed(following)

    def _timed(self, following: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(following)
        def timed(iterator: Any) -> Any:
            # Only the main thread's waits count. A loader inside another loader is counted once.
            if self._inside or threading.current_thread() is not threading.main_thread():
                return following(iterator)
            self._inside, started = True, time.monotonic()
            self.batch = _batch_size(iterator)
            try:
                batch = following(iterator)
                if _computes_gradients():
                    self._count += 1
                    self._sizes.add((self.batch, _ranks_of(iterator)))
                return batch
            finally:
                self._inside = False
                self._seconds = (self._seconds or 0.0) + time.monotonic() - started

        return timed


def _batch_size(iterator: Any) -> int | None:
    size = None
    with contextlib.suppress(Exception):
        # What it draws from: a sampler of batches has a size.
        size = iterator._index_sampler.batch_size
    return size if isinstance(size, int) and size > 0 else None


def _computes_gradients() -> bool:
    with contextlib.suppress(Exception):
        return bool(sys.modules["torch"].is_grad_enabled())
    return False


def _ranks_of(iterator: Any) -> int | None:
    """How many processes share the data of this loader; None if not known."""
    with contextlib.suppress(Exception):
        shared = getattr(getattr(iterator._index_sampler, "sampler", None), "num_replicas", None)
        distributed = sys.modules["torch"].distributed
        alone = not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1
        return int(shared) if isinstance(shared, int) else 1 if alone else None
    return None


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then(module)` now, or when the program has imported the module. It must not raise."""
    if name in sys.modules:
        then(sys.modules[name])
        return
    for finder in sys.meta_path:
        if isinstance(finder, _Finder) and finder.name == name:
            finder.then.append(then)
            return
    sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Calls each of `then` after another finder has imported the module of this name."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.then = [then]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        with contextlib.suppress(ValueError):
            # The program may have replaced the list of finders.
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.then)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, then: Sequence[Callable[[ModuleType], None]]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Restore the original loader, so that the module shows no trace of this one.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for then in self._then:
            then(module)
