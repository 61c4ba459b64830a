"""Gathers sharded weights for each module that needs them, as DeepSpeed's ZeRO-3 does.

`Coordinator` does what DeepSpeed's `partitioned_param_coordinator.py` does: it gathers the weights
of a module before its forward and backward pass, and some of those that come next, and releases
them afterwards. That happens on a stream of its own, so the memory is that stream's. DeepSpeed also
tells the allocator that the computation uses them, so they come back a little later than here, by a
time that depends on the GPU's speed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from memtop.train.dry_run.zero import Memory

GATHERING = 1
"""The stream, beside 0 of the computation."""
_NEVER = -1
LEAVES = frozenset(
    {
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    }
)
"""DeepSpeed gathers all weights of these together: its `DEFAULT_LEAF_MODULE_CLASSES`."""


class Weight:
    """A parameter, of which this process keeps a part."""

    def __init__(self, parameter: torch.nn.Parameter, number: int, world: int) -> None:
        self.parameter, self.number = parameter, number
        self.shape, self.count = parameter.shape, parameter.numel()
        self.part_count = -(-self.count // world)
        self.part: torch.Tensor = parameter.data
        self.persists = self.available = self.in_flight = False
        self.used_by: set[torch.nn.Module] = set()

    def release(self) -> None:
        if self.available and not self.used_by:
            self.parameter.data = torch.empty(0, dtype=self.parameter.dtype)
            self.available = False


class _Gathering:
    """Weights that are being gathered together. What they arrive in exists until the last of them
    is needed."""

    def __init__(self, memory: Memory, weights: list[Weight], received: torch.Tensor | None, world: int) -> None:
        self._memory, self._weights, self._received, self._world = memory, weights, received, world
        self._is_complete = False

    def wait(self) -> None:
        if self._is_complete:
            return
        self._is_complete = True
        start = 0
        for one in self._weights:
            if self._received is not None:
                self._take(one, start)
            start += one.part_count
            one.in_flight, one.available = False, True

    def _take(self, one: Weight, start: int) -> None:
        assert self._received is not None
        parts = []
        for rank, all_of_rank in enumerate(self._received.chunk(self._world)):
            length = min(one.part_count, one.count - rank * one.part_count)
            if length > 0:
                parts.append(all_of_rank.narrow(0, start, length))
        one.parameter.data = torch.cat(parts).view(one.shape)
        self._memory.trace.count(one.parameter, "gathered weights")


class Coordinator:
    def __init__(
        self, memory: Memory, weights: dict[torch.Tensor, Weight], zero: dict[str, Any], world: int, keeps: bool
    ) -> None:
        """`keeps`: the parts of the weights are on the GPU."""
        self._memory, self._weights, self._world, self._keeps = memory, weights, world, keeps
        self._prefetch: int = zero["stage3_prefetch_bucket_size"]
        self._most: int = zero["stage3_max_live_parameters"]
        self._reuse: int = zero["stage3_max_reuse_distance"]
        self._of: dict[tuple[Any, ...], list[Weight]] = {}
        self._external: dict[torch.nn.Module, dict[Weight, None]] = {}
        self._running: list[torch.nn.Module] = []
        self.in_forward = False
        """As long as the whole model's forward pass runs, not its backward pass."""
        self._modules: list[torch.nn.Module] = []
        self._order: list[tuple[Weight, int]] = []
        self._state = "invalid"
        self._queue: deque[tuple[Weight, int]] = deque()
        self._fetched_for: dict[Weight, int] = {}
        self._in_flight: dict[Weight, _Gathering] = {}
        self._in_backward: dict[torch.nn.Module, None] = {}
        self._recomputed: dict[torch.nn.Module, set[Weight]] = {}
        self._step = self._live = 0
        self._to_release: dict[tuple[torch.nn.Module, int], set[Weight]] = {}

    def of(self, module: torch.nn.Module, whole: bool | None = None) -> list[Weight]:
        """Its own weights, as it is now, and those that it has read of other modules. `whole`: with
        its parts; None: if it is a leaf."""
        whole = is_leaf(module) if whole is None else whole
        # Adapters of experts take weights out of a module as long as it runs.
        key = (module, whole, *module._parameters)
        if key not in self._of:
            found = {self._weights[one]: None for one in module.parameters(recurse=whole)}
            self._of[key] = sorted(found | self._external.get(module, {}), key=lambda one: one.number)
        return self._of[key]

    def enter(self, module: torch.nn.Module) -> None:
        self._running.append(module)
        self.fetch(module, forward=True)

    def leave(self, module: torch.nn.Module) -> None:
        self._running.pop()
        self.release(module, forward=True)

    def read(self, parameter: torch.Tensor) -> None:
        """A module's code reads this weight. If it is not there, the module that runs needs it,
        from now on in each pass: adapters of experts read weights of modules that do not run."""
        one = self._weights.get(parameter)
        if one is None or one.available or one.in_flight or not self.in_forward:
            return
        self._external.setdefault(self._running[-1], {})[one] = None
        self._of.clear()
        with torch.no_grad():
            self.gather_now([one])

    def begin(self) -> None:
        """A forward pass begins. The first one is recorded with its backward pass; from the second
        one on, the order of modules is known."""
        self._land_all()
        if self._state == "recording":
            self._order = [(one, step) for step, module in enumerate(self._modules) for one in self.of(module)]
            self._state = "known"
        elif self._state == "invalid":
            self._state = "recording"
        self._queue = deque(self._order)
        self._fetched_for = {}
        self._step = self._live = 0

    def _land_all(self) -> None:
        for one, gathering in self._in_flight.items():
            gathering.wait()
            self._release(one)
        self._in_flight.clear()

    def _notice(self, module: torch.nn.Module) -> None:
        if self._state == "known" and self._modules[self._step : self._step + 1] != [module]:
            self._state, self._modules, self._order = "invalid", [], []
            self._queue.clear()
            self._fetched_for, self._to_release = {}, {}
            self._land_all()
        elif self._state == "recording":
            self._modules.append(module)

    def fetch(self, module: torch.nn.Module, *, forward: bool) -> None:
        self._notice(module)
        if not forward:
            self._in_backward[module] = None
        wanted = self.of(module)
        self._gather(wanted)
        recomputing = forward and torch._C._current_graph_task_id() != -1
        for one in wanted:
            one.used_by.add(module)
            if recomputing and self._in_backward and not one.parameter.requires_grad:
                user = next(reversed(self._in_backward))
                self._recomputed.setdefault(user, set()).add(one)
                one.used_by.add(user)
            gathering = self._in_flight.pop(one, None)
            if gathering is not None:
                with self._memory.trace.placed(stream=GATHERING):
                    gathering.wait()
        if self._state == "known":
            self._gather_ahead(wanted)
        self._step += 1

    def _gather_ahead(self, wanted: list[Weight]) -> None:
        new = {one for one in wanted if self._fetched_for.get(one, _NEVER) < self._step}
        passed: set[Weight] = set()
        while self._queue and len(passed) < len(new):
            one, step = self._queue.popleft()
            self._fetched_for[one] = step
            passed.add(one)
        most, elements = min(self._most - self._live, self._prefetch), 0
        ahead: dict[Weight, None] = {}
        while self._queue and elements < most:
            one, step = self._queue.popleft()
            self._fetched_for[one] = max(self._fetched_for.get(one, _NEVER), step)
            if not (one.available or one.in_flight or one in ahead):
                ahead[one] = None
                elements += one.count
        if elements:
            self._gather(list(ahead))

    def _gather(self, weights: Iterable[Weight]) -> None:
        missing = sorted((one for one in weights if not (one.available or one.in_flight)), key=lambda one: one.number)
        if not missing:
            return
        self._live += sum(one.count for one in missing)
        with self._memory.trace.placed(stream=GATHERING):
            found = self._begin(missing)
        for one in missing:
            one.in_flight = True
            self._in_flight[one] = found

    def _begin(self, missing: list[Weight]) -> _Gathering:
        if self._world == 1:
            for one in missing:
                one.parameter.data = self.local(one).view(one.shape)
            return _Gathering(self._memory, missing, None, 1)
        dtype = missing[0].part.dtype
        size = sum(one.part_count for one in missing) * self._world
        received = self._memory.empty(size, dtype, "gathered weights")
        sent = [self.local(one) for one in missing]
        if len(missing) > 1:
            return _Gathering(self._memory, missing, received, self._world)
        (one,) = missing
        one.parameter.data = received.narrow(0, 0, one.count).view(one.shape)
        del sent
        return _Gathering(self._memory, missing, None, self._world)

    def local(self, one: Weight) -> torch.Tensor:
        """This process's part, on the GPU."""
        return one.part if self._keeps else self._memory.to_gpu(one.part, "gathered weights")

    def release(self, module: torch.nn.Module, *, forward: bool) -> None:
        own = self.of(module)
        gone = self._unused(module) if self._state == "known" else set(own)
        touched = set(own)
        if not forward:
            again = self._recomputed.pop(module, set())
            gone = gone | {one for one in again if not one.persists}
            touched |= again
            self._in_backward.pop(module, None)
        for one in touched:
            one.used_by.discard(module)
            if one in gone:
                self._release(one)

    def _release(self, one: Weight) -> None:
        if one.available and not one.used_by:
            one.release()
            self._live -= one.count

    def _unused(self, module: torch.nn.Module) -> set[Weight]:
        """Which of a module's weights to release after this step."""
        key = (module, self._step)
        if key not in self._to_release:
            own = self.of(module)
            gone = {one for one in own if not one.persists and self._fetched_for.get(one, _NEVER) <= self._step}
            passed = 0
            for later in itertools.islice(self._modules, self._step, None):
                if passed >= self._reuse:
                    break
                # The parts of a leaf count only if a leaf releases: so does DeepSpeed.
                for one in self.of(later, is_leaf(module)):
                    gone.discard(one)
                    passed += one.count
            self._to_release[key] = gone
        return self._to_release[key]

    def release_rest(self) -> None:
        """Of modules whose backward pass has shown no end."""
        while self._in_backward:
            module, _ = self._in_backward.popitem()
            for one in {*self.of(module), *self._recomputed.pop(module, set())}:
                one.used_by.discard(module)
                if not one.persists:
                    self._release(one)

    def release_all(self) -> None:
        for one in self._weights.values():
            gathering = self._in_flight.pop(one, None)
            if gathering is not None:
                gathering.wait()
            one.used_by.clear()
            self._release(one)

    def gather_now(self, weights: Sequence[Weight]) -> None:
        """Gather outside of a pass, on the stream of the computation."""
        missing = [one for one in weights if not one.available]
        if len(missing) == 1:
            (one,) = missing
            received = self._memory.empty(one.part_count * self._world, one.part.dtype, "gathered weights")
            self.local(one)
            one.parameter.data = received.narrow(0, 0, one.count).view(one.shape)
        else:
            arrived = sent = [self.local(one) for one in missing]
            if self._world > 1:
                arrived = [self._memory.empty(one.numel() * self._world, one.dtype, "gathered weights") for one in sent]
            for one, tensor in zip(missing, arrived, strict=True):
                one.parameter.data = tensor.narrow(0, 0, one.count).view(one.shape)
        for one in missing:
            one.available = True


def is_leaf(module: torch.nn.Module) -> bool:
    """DeepSpeed gathers it with all its parts, and reduces their gradients after it."""
    return f"{type(module).__module__}.{type(module).__qualname__}" in LEAVES


class _Parameters(dict[str, torch.nn.Parameter | None]):
    """A module's parameters, which tells when one is read: DeepSpeed's `ZeROOrderedDict`."""

    def __init__(self, own: dict[str, torch.nn.Parameter | None], coordinator: Coordinator) -> None:
        super().__init__(own)
        self._coordinator = coordinator

    def __getitem__(self, name: str) -> torch.nn.Parameter | None:
        found = super().__getitem__(name)
        if found is not None:
            self._coordinator.read(found)
        return found


def watch_reads(root: torch.nn.Module, coordinator: Coordinator) -> None:
    for module in root.modules():
        module._parameters = _Parameters(module._parameters, coordinator)


def add_hooks(module: torch.nn.Module, coordinator: Coordinator) -> None:
    """As DeepSpeed's `_register_deepspeed_module`: from the bottom up, and again for each place
    where a module is."""
    for child in () if is_leaf(module) else module.children():
        add_hooks(child, coordinator)
    uses = 0
    left = 0

    class BeforeBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal uses
            uses += 1
            return output.detach()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            nonlocal uses
            if uses > 0:
                with torch.no_grad():
                    coordinator.fetch(module, forward=False)
                uses -= 1
            return gradients

    class AfterBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
            nonlocal left
            ctx.counts = inputs.requires_grad
            left += ctx.counts
            return inputs.detach()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                with torch.no_grad():
                    coordinator.release(module, forward=False)
            return gradients

    def before(module: torch.nn.Module, inputs: Any) -> None:
        with torch.no_grad():
            coordinator.enter(module)

    def count(module: torch.nn.Module, inputs: Any) -> Any:
        nonlocal left
        left = 0
        return _of_tensors(AfterBackward.apply, inputs)

    def after(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        with torch.no_grad():
            coordinator.leave(module)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    module.register_forward_hook(lambda module, inputs, output: _of_tensors(BeforeBackward.apply, output))
    module.register_forward_pre_hook(count)


def _of_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The value with each of its tensors replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        found = [_of_tensors(function, part) for part in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, dict):
        for key in value:
            value[key] = _of_tensors(function, value[key])
    return value
