"""DeepSpeed's ZeRO-3 on tensors without contents, as `zero.py` does ZeRO-1 and 2.

Gradients are reduced on a stream of their own, so what that allocates is in that stream's memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch._utils import _flatten_dense_tensors as flatten

from memtop.train.dry_run.build import DTYPES, Training
from memtop.train.dry_run.gathering import Coordinator, Weight, add_hooks, is_leaf, watch_reads
from memtop.train.dry_run.trace import Place
from memtop.train.dry_run.zero import FP32, Memory, OptimizerOf, configuration, scaled

_REDUCING = 2
"""The stream."""
_NORM_ELEMENTS = 250_000_000
"""How many elements of an offloaded gradient are copied to fp64 at one time for its norm."""


class _Linear(torch.autograd.Function):
    """DeepSpeed's: it keeps the parameter for the backward pass, not a view of what is gathered."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight, bias)
        if inputs.dim() == 2 and bias is not None:
            return torch.addmm(bias, inputs, weight.t())
        found = inputs.matmul(weight.t())
        if bias is not None:
            found += bias
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight, bias = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        of_inputs = gradient.matmul(weight) if needs_inputs else None
        of_weight = of_bias = None
        if needs_weight:
            of_weight = gradient.reshape(-1, gradient.shape[-1]).t().matmul(inputs.reshape(-1, inputs.shape[-1]))
        if bias is not None and needs_bias:
            of_bias = gradient.sum(list(range(gradient.dim() - 1)))
        return of_inputs, of_weight, of_bias


def _linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    return _Linear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]


FUNCTIONS: Mapping[Any, Any] = {F.linear: _linear}
"""What DeepSpeed calls in place of torch's functions."""


class ZeroStage3:
    def __init__(
        self, training: Training, root: torch.nn.Module, model: Any, memory: Memory, optimizer_of: OptimizerOf
    ) -> None:
        """`root` has the model and the loss."""
        config = configuration(training, model.config)
        self._training = training
        zero = config["zero_optimization"]
        self._memory, self._world, self._rank = memory, training.world_size, training.rank
        self._dtype = DTYPES[training.weights]
        self._offloads, self._offloads_weights = training.zero.offload_optimizer, training.zero.offload_parameters
        self._bucket_size: int = zero["reduce_bucket_size"]
        self._weights = {one: Weight(one, n, self._world) for n, one in enumerate(model.parameters())}
        self._in_bucket: list[Weight] = []
        self._elements = self._micro_batch = 0
        self._is_last = self._reduced = False
        self._norms: dict[Weight, torch.Tensor] = {}
        with torch.no_grad():
            self._partition(arrive=training.sharded_when_read)
            threshold: int = zero["stage3_param_persistence_threshold"]
            self._persistent = [one for one in self._weights.values() if one.count <= threshold]
            for one in self._persistent:
                one.persists = True
            self._coordinator = Coordinator(memory, self._weights, zero, self._world, keeps=not self._offloads_weights)
            add_hooks(root, self._coordinator)
            watch_reads(root, self._coordinator)
            self._trained = [one for one in self._weights.values() if one.parameter.requires_grad and one.count]
            self._groups = list(_groups(self._trained, zero["sub_group_size"]))
            self._flats = self._flat_weights()
            self._masters = self._master_weights()
            self._bucket = memory.empty(self._bucket_size, self._dtype, "buckets")
            self._gradients = self._gradient_sums()
        self._optimizer = optimizer_of(self._masters)
        leaves = {leaf: [one for one in leaf.parameters() if one.requires_grad] for leaf in root.modules() if is_leaf(leaf)}
        late = {parameter for parameters in leaves.values() for parameter in parameters}
        for one in self._trained:
            # With its whole size, which autograd then expects of the gradient.
            with torch.no_grad():
                self._coordinator.gather_now([one])
            if one.parameter not in late:
                one.parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            one.release()
        for leaf in [leaf for leaf, parameters in leaves.items() if parameters]:
            leaf.register_full_backward_hook(self._leaf_is_done)

    # --- before the first update ------------------------------------------------------------------

    def _partition(self, *, arrive: bool) -> None:
        """`arrive`: each weight comes to the GPU only now."""
        for one in self._weights.values():
            dtype = one.parameter.dtype
            whole = self._memory.empty(one.count, dtype, "temporary") if arrive else None
            make = self._memory.on_host if self._offloads_weights else self._memory.empty
            one.part = make(one.part_count, dtype, "weights")
            one.parameter.data = torch.empty(0, dtype=dtype)
            del whole
            # The trainer reads it.
            one.parameter.ds_numel = one.count  # type: ignore[attr-defined]

    def _flat_weights(self) -> list[torch.Tensor]:
        """The parts of the trained weights become views of one tensor, of which each group of the
        optimizer has a piece."""
        memory = self._memory
        size = sum(one.part_count for one in self._trained)
        with memory.trace.placed("host"):
            flat = memory.empty(size, self._dtype, "weights")
        if self._offloads_weights:
            # Always page-locked.
            flat = memory.page_locked(flat, "weights")
        else:
            for one in self._trained:
                one.part = torch.empty(0, dtype=self._dtype)
            flat = memory.to_gpu(flat, "weights")
        start, found = 0, []
        for group in self._groups:
            begin = start
            for one in group:
                one.part = flat.narrow(0, start, one.part_count)
                start += one.part_count
            found.append(flat.narrow(0, begin, start - begin))
        return found

    def _master_weights(self) -> list[torch.Tensor]:
        memory, found = self._memory, []
        place: Place = "host" if self._offloads else "gpu"
        for flat in self._flats:
            converted = self._converted(flat)
            with memory.trace.placed(place):
                master = converted.clone()
            memory.trace.count(master, "master weights")
            found.append(master)
        del converted
        with memory.trace.placed(place):
            unused = torch.zeros(max(one.numel() for one in found), dtype=FP32)
        for master in found:
            if self._offloads:
                master.grad = memory.on_host(master.numel(), FP32, "gradients")
            master.requires_grad_()
        del unused
        return found

    def _converted(self, flat: torch.Tensor) -> torch.Tensor:
        if self._offloads == self._offloads_weights:
            with self._memory.trace.placed("host" if self._offloads else "gpu"):
                return flat.to(FP32)
        if self._offloads:
            return self._memory.to_host(flat, FP32)
        with self._memory.trace.placed("host"):
            on_host = flat.to(FP32)
        return self._memory.to_gpu(on_host, "master weights")

    def _gradient_sums(self) -> dict[Weight, torch.Tensor]:
        make = self._memory.on_host if self._offloads else self._memory.empty
        flat = make(sum(one.part_count for one in self._trained), FP32, "gradients")
        parts = torch.split(flat, [one.part_count for one in self._trained])
        return dict(zip(self._trained, parts, strict=True))

    # --- gradients --------------------------------------------------------------------------------

    def before_forward(self) -> None:
        self._micro_batch += self._reduced
        self._reduced = False
        self._coordinator.in_forward = True
        with torch.no_grad():
            self._coordinator.begin()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return scaled(self._training, loss)

    def before_backward(self, *, last: bool) -> None:
        self._is_last = last
        self._coordinator.in_forward = False

    @torch.no_grad()
    def after_backward(self) -> None:
        self._reduce()
        self._reduced = True
        self._coordinator.release_rest()

    @torch.no_grad()
    def _accumulated(self, parameter: torch.Tensor) -> None:
        """The backward pass has added to this parameter's gradient."""
        gradient = parameter.grad
        assert gradient is not None
        self._memory.trace.count(gradient, "gradients")
        count = gradient.numel()
        if self._elements + count > self._bucket_size and self._in_bucket:
            self._reduce()
        if self._elements + count <= self._bucket_size:
            copy = self._bucket.narrow(0, self._elements, count).view_as(gradient)
            copy.copy_(gradient)
            gradient.data = copy
        self._in_bucket.append(self._weights[parameter])
        self._elements += count

    def _leaf_is_done(self, leaf: torch.nn.Module, *_: Any) -> None:
        for parameter in leaf.parameters():
            if parameter.requires_grad:
                self._accumulated(parameter)

    def _reduce(self) -> None:
        """Average what is in the bucket over the processes, each of which gets a part."""
        if not self._in_bucket:
            return
        with self._memory.trace.placed(stream=_REDUCING):
            self._in_bucket.sort(key=lambda one: one.number)
            self._add_up(self._scattered())
        self._in_bucket.clear()
        self._elements = 0

    def _scattered(self) -> list[torch.Tensor]:
        """This process's parts of the gradients in the bucket."""
        whole = [one.parameter.grad.view(-1) for one in self._in_bucket if one.parameter.grad is not None]
        if len(whole) == 1 and whole[0].numel() % self._world == 0:
            sent = whole[0]
        else:
            parts = []
            for rank, (one, gradient) in itertools.product(range(self._world), zip(self._in_bucket, whole, strict=True)):
                part = gradient[rank * one.part_count : (rank + 1) * one.part_count]
                parts.append(part)
                if part.numel() < one.part_count:
                    parts.append(torch.empty(one.part_count - part.numel(), dtype=part.dtype))
            sent = torch.cat(parts)
        sent.div_(self._world)
        received = sent.chunk(self._world)[self._rank]
        start, found = 0, []
        for one in self._in_bucket:
            length = min(one.part_count, max(0, one.count - self._rank * one.part_count))
            found.append(received.narrow(0, start, length))
            start += one.part_count
        return found if self._dtype == FP32 else [part.to(FP32) for part in found]

    def _add_up(self, parts: list[torch.Tensor]) -> None:
        for one, part in zip(self._in_bucket, parts, strict=True):
            if part.numel():
                self._add(one, part)
            one.parameter.grad = None

    def _add(self, one: Weight, part: torch.Tensor) -> None:
        sums = self._gradients[one].narrow(0, 0, part.numel())
        if not self._offloads:
            sums.copy_(part) if self._micro_batch == 0 else sums.add_(part)
            return
        if self._micro_batch == 0:
            sums.copy_(part)
        on_gpu = self._memory.to_gpu(sums, "temporary")
        if self._micro_batch:
            on_gpu.add_(part)
            sums.copy_(on_gpu)
        if self._is_last:
            parts = torch.split(on_gpu, _NORM_ELEMENTS)
            self._norms[one] = torch.stack([some.to(torch.float64).norm(2) for some in parts]).sum()

    # --- the update -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        self._micro_batch, self._reduced = 0, False
        self._coordinator.release_all()
        place: Place = "host" if self._offloads else "gpu"
        if self._dtype == torch.float16:
            with self._memory.trace.placed(place, 0 if self._offloads else _REDUCING):
                flat = next(iter(self._gradients.values()))
                whole = flat.as_strided((sum(one.part_count for one in self._trained),), (1,), 0)
                torch.isinf(whole).any()
                torch.isnan(whole).any()
        if not self._offloads:
            for group in self._groups:
                torch.stack([self._gradients[one].to(torch.float64).norm(2) for one in group]).pow(2).sum()
        for group, flat, master in zip(self._groups, self._flats, self._masters, strict=True):
            self._update(group, flat, master, place)
        self._norms.clear()
        if self._persistent:
            self._coordinator.gather_now(self._persistent)

    def _update(self, group: list[Weight], flat: torch.Tensor, master: torch.Tensor, place: Place) -> None:
        with self._memory.trace.placed(place):
            if not self._offloads:
                gradient = flatten([self._gradients[one] for one in group])  # type: ignore[no-untyped-call]
                self._memory.trace.count(gradient, "gradients")
                master.grad = gradient
                del gradient
            assert master.grad is not None
            master.grad.mul_(1.0 / torch.ones(()))
            self._optimizer.param_groups[0]["params"] = [master]
            self._optimizer.step()
            flat.copy_(master)
        if not self._offloads:
            master.grad = None


def _groups(weights: Iterable[Weight], size: int) -> Iterator[list[Weight]]:
    """The weights that are updated together."""
    group: list[Weight] = []
    elements = 0
    for one in weights:
        group.append(one)
        elements += one.part_count
        if elements >= size:
            yield group
            group, elements = [], 0
    if group:
        yield group
