"""Records what operations on fake tensors allocate and release, and for what."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memtop.presets.estimate import Component as Estimated
from memtop.presets.sequence import Phase
from memtop.train.dry_run.results import result

Component = Literal[Estimated, "cached"]
"""With ZeRO: weights gathered from all processes, fp32 weights that the optimizer updates, and the
buckets of gradients that are reduced together. Cached: page-locked memory that nothing uses."""
Place = Literal["gpu", "host", "pinned"]
"""Where memory is; pinned: page-locked host memory."""
Hidden = Callable[..., list[int]]
"""Maps an operation's arguments to the bytes of what its CUDA kernel allocates and releases."""
_ELSEWHERE = -1
"""In place of the number of an allocation that is not counted."""
aten = torch.ops.aten
_HAS_COUNTS = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")
"""Whether this torch says how many references there are. Otherwise each sum is a new tensor."""
_KEPT_BY: dict[Phase, Component] = {"forward": "activations", "optimizer": "optimizer"}
"""What temporary memory of a phase is if it outlives the phase."""


class Allocation(msgspec.Struct):
    size: int
    operation: str
    component: Component
    place: Place = "gpu"
    stream: int = 0
    """Of CUDA. Each stream has unused blocks of its own."""


class Recorded(NamedTuple):
    """What a training allocates and releases."""

    allocations: list[Allocation]
    events: list[int]
    """In their order: n where allocation n begins, ~n where it ends."""
    phases: list[tuple[int, Phase]]
    """Where in `events` each phase begins."""


class Kernels(msgspec.Struct, frozen=True):
    """What CUDA kernels allocate that is not a result."""

    before: Mapping[Any, Hidden]
    """By operation, what exists before its results do."""
    after: Mapping[Any, Hidden]
    """By operation, what exists while its results do."""
    products: frozenset[Any]
    """The operations that use cuBLAS."""
    workspace: int
    """What cuBLAS keeps from its first product in a thread on; the backward pass has a thread of
    its own."""


class _Death(weakref.ref[Any]):
    """Says which allocation has lost its storage."""

    __slots__ = ("key", "number")
    key: int
    number: int


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records while it is entered, inside a FakeTensorMode. Only tensors count whose storage is
    new: views and in-place operations allocate nothing.

    `vocabulary` is the number of logits of a token: tensors with so many columns are logits.
    """

    def __init__(self, kernels: Kernels, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded = Recorded([], [], [])
        self.live_bytes = 0
        self._kernels = kernels
        self._vocabulary = vocabulary
        self._phase: Phase = "load"
        self._first = 0
        self._live: dict[int, None] = {}
        self._storages: dict[int, _Death] = {}
        self._with_workspace: set[Phase] = set()
        self._counts = True
        self._place: Place = "gpu"
        self._stream = 0
        self._collects = False
        self._references: tuple[int, int, int] | None = None

    def __enter__(self) -> Trace:
        # Reference counts alone decide when a tensor is released: always at the same place.
        self._collects = gc.isenabled()
        gc.disable()
        self.recorded.phases.append((0, "load"))
        super().__enter__()  # type: ignore[no-untyped-call]
        self._notice_sums()
        return self

    def _notice_sums(self) -> None:
        """See how many references there are to a gradient that only autograd knows, to which it
        adds another one."""
        with self.elsewhere(), torch.enable_grad():
            one = torch.empty(2, 2, requires_grad=True)
            one.mul(2.0).add(one.mul(3.0)).mul(4.0).backward(torch.empty(2, 2))  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        # What is released from now on is the end of the dry run, not of the training.
        self._storages.clear()
        if self._collects:
            gc.enable()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        self.recorded.phases.append((len(self.recorded.events), name))
        self._phase, self._first = name, len(self.recorded.allocations)
        yield
        kept = _KEPT_BY.get(name)
        for number in reversed(self._live):
            if number < self._first or kept is None:
                break
            if self.recorded.allocations[number].component == "temporary":
                self.recorded.allocations[number].component = kept

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is allocated in here is not counted: it is not in memory that torch allocates."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    @contextmanager
    def placed(self, place: Place = "gpu", stream: int = 0) -> Iterator[None]:
        """Where what is allocated in here is, and on which stream."""
        before = self._place, self._stream
        self._place, self._stream = place, stream
        try:
            yield
        finally:
            self._place, self._stream = before

    def count(self, tensor: torch.Tensor, component: Component) -> None:
        """Record a tensor that no operation has made, or change what a recorded one is for."""
        storage = tensor.untyped_storage()
        known = self._storages.get(id(storage))
        if known is None:
            self._keep(storage, component, str(aten.empty.memory_format))
        elif known.number >= 0:
            self.recorded.allocations[known.number].component = component

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled in here; the wrapper against that costs a tenth of the time.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            # Most operations are this question; asking the FakeTensorMode takes long.
            return args[0].fake_device
        # What is asked of tensors in here needs no answer of CUDA's.
        with torch._C.DisableTorchFunction():
            return self._done(func, args, kwargs or {})

    def _done(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten.add.Tensor and self._is_sum(*args, **kwargs):
            func = aten.add_.Tensor
        before = self._kernels.before.get(func)
        held = [] if before is None else [self._allocate(size, str(func), "temporary") for size in before(*args, **kwargs)]
        found = result(func, args, kwargs)
        # A number that Python turns into a tensor stays in host memory.
        if func is not torch.ops.aten.lift_fresh.default:
            self._track(func, found)
        after = self._kernels.after.get(func)
        if after is not None:
            held += [self._allocate(size, str(func), "temporary") for size in after(*args, **kwargs)]
        for number in held:
            self._release(number)
        if func in self._kernels.products and self._phase in ("forward", "backward"):
            self._open_workspace()
        return found

    def _is_sum(self, total: Any, more: Any, alpha: Any = 1) -> bool:
        """Whether autograd adds a gradient to the sum of others, which nothing else knows. It does
        so in place, but not while tensors or operations are watched as here."""
        in_autograd = torch._C._current_autograd_node() is not None and not torch.is_grad_enabled()
        if not _HAS_COUNTS or not in_autograd or not _are_alike(total, more):
            return False
        storage = torch._C._storage_Use_Count(total.untyped_storage()._cdata)
        references = total._use_count(), sys.getrefcount(total), storage
        if self._references is None:
            self._references = references
        return references == self._references

    def _track(self, func: Any, found: Any) -> None:
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            if id(storage) not in self._storages:
                self._keep(storage, self._component(found), str(func))
        elif isinstance(found, tuple | list):
            for part in found:
                self._track(func, part)

    def _component(self, tensor: torch.Tensor) -> Component:
        if self._phase not in ("forward", "backward"):
            return "temporary"
        if tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary and tensor.is_floating_point():
            return "logits"
        # Backward functions run without gradients: what runs with them computes activations again.
        return "activations" if self._phase == "backward" and torch.is_grad_enabled() else "temporary"

    def _keep(self, storage: Any, component: Component, operation: str) -> None:
        death = _Death(storage, self._forget)
        death.key = id(storage)
        # What is elsewhere must be known, too: later operations give views of it.
        death.number = self._allocate(storage.nbytes(), operation, component) if self._counts else _ELSEWHERE
        self._storages[death.key] = death

    def _forget(self, death: Any) -> None:
        del self._storages[death.key]
        if death.number >= 0:
            self._release(death.number)

    def _open_workspace(self) -> None:
        if self._phase not in self._with_workspace and self._place == "gpu":
            self._with_workspace.add(self._phase)
            self._allocate(self._kernels.workspace, "cuBLAS", "workspace")

    def _allocate(self, size: int, operation: str, component: Component) -> int:
        number = len(self.recorded.allocations)
        self.recorded.allocations.append(Allocation(size, operation, component, self._place, self._stream))
        self.recorded.events.append(number)
        self._live[number] = None
        if self._place == "gpu":
            self.live_bytes += size
        return number

    def _release(self, number: int) -> None:
        self.recorded.events.append(~number)
        del self._live[number]
        released = self.recorded.allocations[number]
        if released.place == "gpu":
            self.live_bytes -= released.size


def _are_alike(one: Any, other: Any) -> bool:
    """Whether both are tensors of the same shape and precision, and the first is dense."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape):
        return False
    size = 1
    for stride, length in sorted(zip(one.stride(), one.shape, strict=True)):
        if length != 1 and stride != size:
            return False
        size *= length
    return one.dtype == other.dtype
