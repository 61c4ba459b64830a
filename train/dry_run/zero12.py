"""DeepSpeed's ZeRO-1 and 2 on tensors without contents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._utils import _flatten_dense_tensors as flatten

from memtop.train.dry_run.build import DTYPES, Training
from memtop.train.dry_run.zero import (
    FP32,
    Memory,
    OptimizerOf,
    configuration,
    flat_weights,
    has_inf_or_nan,
    scaled,
    trained,
)


class _Piece(NamedTuple):
    """A part of a parameter, and the process that updates it."""

    rank: int
    start: int
    length: int


class ZeroStages1And2:
    def __init__(
        self,
        training: Training,
        model: Any,
        memory: Memory,
        optimizer_of: OptimizerOf,
        free: Callable[[], int | None],
    ) -> None:
        config = configuration(training, model.config)
        self._training = training
        self._memory = memory
        self._trained = trained(model)
        self._partitions_gradients = training.zero.stage == 2
        self._offloads = training.zero.offload_optimizer
        self._world, self._rank = training.world_size, training.rank
        self._scales = config["gradient_clipping"] > 0 or training.weights == "fp16"
        self._checks = training.weights != "fp32"
        self._bucket_size: int = config["zero_optimization"]["reduce_bucket_size"]
        self._dtype = DTYPES[training.weights]
        self._sum_dtype = DTYPES[config["data_types"]["grad_accum_dtype"]]
        # ZeRO-1 sums the gradients of micro-batches beside those of the parameters.
        self._separate = self._sum_dtype != self._dtype and not self._partitions_gradients
        # This process sums its part of the gradients in one fp32 tensor.
        self._compact = self._sum_dtype == FP32 != self._dtype
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._flat: torch.Tensor | None = None
        self._all: list[torch.Tensor] | None = None
        self._averaged: list[torch.Tensor] | None = None
        self._copies: torch.Tensor | None = None
        self._copied = 0
        self._on_host: dict[torch.Tensor, torch.Tensor] = {}
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        self._bucket: torch.Tensor | None = None
        self._in_bucket: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._elements = 0
        self._is_last = self._reduced = False
        self._micro_batch = -1
        self._flatten_weights(free)
        self._master = self._master_weights()
        self._optimizer = optimizer_of([self._master])
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    # --- before the first update ------------------------------------------------------------------

    @torch.no_grad()
    def _flatten_weights(self, free: Callable[[], int | None]) -> None:
        """All trained weights become views of one tensor."""
        memory, shapes = self._memory, [one.shape for one in self._trained]
        left = free()
        size = sum(map(torch.Size.numel, shapes)) + 2 * self._world
        if left is None or left >= size * self._dtype.itemsize:
            self._weights = flat_weights(self._trained, self._world)
        else:
            # They leave the GPU meanwhile.
            for one in self._trained:
                one.data = memory.to_host(one.data, self._dtype)
            with memory.trace.placed("host"):
                weights = flat_weights(self._trained, self._world)
            self._weights = memory.to_gpu(weights, "weights")
            del weights
        memory.trace.count(self._weights, "weights")
        self._starts: dict[torch.Tensor, int] = {}
        start = 0
        for one, shape in zip(self._trained, shapes, strict=True):
            one.data = self._weights.narrow(0, start, shape.numel()).view(shape)
            self._starts[one] = start
            start += shape.numel()
        self._size = len(self._weights) // self._world
        self._part = self._weights.narrow(0, self._rank * self._size, self._size)
        own: Any = ((one, piece) for one in self._trained for piece in self._pieces(one) if piece.rank == self._rank)
        self._own: dict[torch.Tensor, _Piece] = dict(own)

    def _pieces(self, parameter: torch.Tensor) -> list[_Piece]:
        start = self._starts[parameter]
        end = start + parameter.numel()
        found = []
        for rank in range(start // self._size, -(-end // self._size)):
            first, last = max(start, rank * self._size), min(end, (rank + 1) * self._size)
            found.append(_Piece(rank, first - start, last - first))
        return found

    @torch.no_grad()
    def _master_weights(self) -> torch.Tensor:
        """This process's part in fp32, and what an offloaded optimizer needs."""
        memory = self._memory
        master = self._part.clone()
        if not self._offloads:
            master = master.to(FP32)
            memory.trace.count(master, "master weights")
            torch.zeros(self._size, dtype=FP32)
            return master.requires_grad_()
        master = memory.to_host(master, FP32)
        memory.trace.count(master, "master weights")
        if memory.pins:
            master = memory.page_locked(master, "master weights")
        self._updated = memory.on_host(self._size, self._dtype, "weights")
        largest = max(one.numel() for one in self._trained)
        self._one_on_host = memory.on_host(largest, self._dtype, "gradients")
        self._one_on_gpu = memory.empty(largest, self._dtype, "gradients")
        master.grad = memory.on_host(self._size, FP32, "gradients")
        return master.requires_grad_()

    # --- gradients --------------------------------------------------------------------------------

    def before_forward(self) -> None:
        if self._reduced:
            self._sums.clear()
        self._reduced = False

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return scaled(self._training, loss)

    def before_backward(self, *, last: bool) -> None:
        self._is_last = last

    @torch.no_grad()
    def after_backward(self) -> None:
        if self._partitions_gradients:
            self._end_reduction()
        elif self._is_last:
            for parameter in self._trained:
                if self._gradient(parameter) is not None:
                    self._put_in_bucket(parameter)
            self._end_reduction()

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self._sums.get(parameter) if self._separate else parameter.grad

    def _drop(self, parameter: torch.Tensor) -> None:
        if self._separate:
            self._sums.pop(parameter, None)
        else:
            parameter.grad = None

    @torch.no_grad()
    def _accumulated(self, parameter: torch.Tensor) -> None:
        """The backward pass has added to this parameter's gradient."""
        if self._bucket is None:
            self._micro_batch += 1
            dtype = self._sum_dtype if self._separate else self._dtype
            self._bucket = self._memory.empty(self._bucket_size, dtype, "buckets")
        gradient = parameter.grad
        assert gradient is not None
        self._memory.trace.count(gradient, "gradients")
        if self._separate:
            self._add_to_sum(parameter, gradient)
        if self._partitions_gradients:
            del gradient
            self._put_in_bucket(parameter)

    def _add_to_sum(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        found = gradient.to(self._sum_dtype)
        if parameter in self._sums:
            self._sums[parameter].add_(found)
        else:
            self._memory.trace.count(found, "gradients")
            self._sums[parameter] = found
        parameter.grad = None

    def _put_in_bucket(self, parameter: torch.Tensor) -> None:
        gradient, count = self._gradient(parameter), parameter.numel()
        assert gradient is not None
        assert self._bucket is not None
        if self._elements + count > self._bucket_size:
            self._reduce()
        if count <= self._bucket_size:
            copy = self._bucket.narrow(0, self._elements, count)
            copy.copy_(gradient.view(-1))
            gradient.data = copy.view_as(gradient)
        elif self._offloads:
            gradient.data = gradient.detach().clone(memory_format=torch.contiguous_format)
        self._elements += count
        self._in_bucket.append((parameter, gradient))

    def _reduce(self) -> None:
        """Average what is in the bucket over the processes, or a gradient larger than that."""
        if not self._in_bucket:
            return
        assert self._bucket is not None
        oversized = self._elements > self._bucket_size
        whole = self._in_bucket[0][1].view(-1) if oversized else self._bucket.narrow(0, 0, self._elements)
        self._average(whole)
        for parameter, _ in self._in_bucket:
            if parameter in self._own:
                self._copy_to_partition(parameter)
            elif self._partitions_gradients:
                self._drop(parameter)
        self._in_bucket.clear()
        self._elements = 0

    def _average(self, whole: torch.Tensor) -> None:
        found: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []
        start = 0
        merged: list[tuple[int, int, int, torch.Tensor | None]] = []
        for parameter, _ in self._in_bucket:
            for piece in self._pieces(parameter):
                sums = self._own_sums(parameter) if piece.rank == self._rank and self._compact else None
                if sums is None and merged and merged[-1][0] == piece.rank:
                    merged[-1] = (piece.rank, merged[-1][1], merged[-1][2] + piece.length, None)
                else:
                    merged.append((piece.rank, start, piece.length, sums))
                start += piece.length
        whole.div_(self._world)
        elements = 0
        for rank, begin, length, sums in merged:
            found.append((rank, whole.narrow(0, begin, length), sums))
            elements += length
            if elements > self._bucket_size:
                self._all_reduce(found)
                found, elements = [], 0
        if found:
            self._all_reduce(found)

    def _all_reduce(self, pieces: list[tuple[int, torch.Tensor, torch.Tensor | None]]) -> None:
        reduced = self._communicated([piece for _, piece, _ in pieces])
        start = 0
        for rank, piece, sums in pieces:
            received = reduced.narrow(0, start, piece.numel())
            start += piece.numel()
            if rank == self._rank:
                if sums is not None:
                    sums.add_(received.to(sums.dtype))
                piece.copy_(received)

    def _communicated(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        whole: torch.Tensor = flatten(pieces)  # type: ignore[no-untyped-call]
        sent = whole.to(self._dtype)
        if sent is not whole:
            whole.copy_(sent)
        return sent

    def _own_sums(self, parameter: torch.Tensor) -> torch.Tensor:
        """Where this process sums its part of a parameter's gradient."""
        own = self._own[parameter]
        start = self._starts[parameter] + own.start - self._rank * self._size
        return self._own_flat().narrow(0, start, own.length)

    def _own_flat(self) -> torch.Tensor:
        if self._flat is None:
            self._flat = torch.zeros(self._size, dtype=self._sum_dtype)
            self._memory.trace.count(self._flat, "gradients")
        return self._flat

    def _copy_to_partition(self, parameter: torch.Tensor) -> None:
        gradient = self._gradient(parameter)
        assert gradient is not None
        if self._offloads:
            self._offload(parameter, gradient.view(-1))
        elif self._compact:
            if self._separate:
                self._drop(parameter)
        else:
            if self._copies is None:
                size = sum(one.numel() for one in self._own)
                self._copies, self._copied = self._memory.empty(size, self._dtype, "gradients"), 0
            copy = self._copies.narrow(0, self._copied, parameter.numel())
            copy.copy_(gradient.view(-1))
            gradient.data = copy.view_as(gradient)
            self._copied += parameter.numel()

    def _offload(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._micro_batch > 0 or not self._is_last:
            if parameter not in self._on_host:
                self._on_host[parameter] = self._memory.on_host(parameter.numel(), self._dtype, "gradients")
            if self._micro_batch > 0:
                before = self._one_on_gpu.narrow(0, 0, parameter.numel())
                before.copy_(self._on_host[parameter])
                gradient.add_(before)
            self._on_host[parameter].copy_(gradient)
        if self._is_last:
            own = self._own[parameter]
            part = gradient.narrow(0, own.start, own.length)
            self._norms[parameter] = part.to(torch.float64).norm(2)
            has_inf_or_nan(gradient)
            assert self._master.grad is not None
            start = self._starts[parameter] + own.start - self._rank * self._size
            self._master.grad.narrow(0, start, own.length).copy_(part.to(FP32))
            self._drop(parameter)

    def _end_reduction(self) -> None:
        self._reduce()
        if self._compact and self._is_last:
            self._own_flat()
        if not self._compact and not self._offloads:
            self._collect()
        self._bucket = self._copies = None
        for parameter in self._trained:
            parameter.grad = None
        self._reduced = True

    def _collect(self) -> None:
        """Keep this process's gradients, which are views of one tensor for each micro-batch."""
        found = []
        for one in self._own:
            gradient = self._gradient(one)
            found.append(torch.zeros_like(one, dtype=self._sum_dtype) if gradient is None else gradient)
        if self._all is None:
            self._all = found
        else:
            torch._foreach_add_(self._all, found)
        if not self._is_last:
            return
        own = zip(self._all, self._own.values(), strict=True)
        self._averaged = [one.contiguous().view(-1).narrow(0, piece.start, piece.length) for one, piece in own]
        missing = self._size - sum(piece.length for piece in self._own.values())
        if missing:
            self._averaged.append(torch.zeros(missing, dtype=self._sum_dtype))
        self._all = None

    # --- the update -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        self._micro_batch = -1
        if self._offloads:
            self._step_on_host()
        else:
            self._step_on_gpu()
        self._sums.clear()
        for parameter in self._trained:
            parameter.grad = None

    def _step_on_gpu(self) -> None:
        gradients = self._averaged
        if self._compact:
            gradients = [self._own_sums(one) for one in self._own] + self._padding()
        assert gradients is not None
        if self._checks:
            bad = torch.zeros([1])
            for one in gradients:
                bad += has_inf_or_nan(one)
            del bad
        # DeepSpeed's norms are those of copies in fp64.
        norms = [torch.linalg.vector_norm(one.to(torch.float64)) for one, _ in zip(gradients, self._own, strict=False)]
        total = torch.stack(norms).pow(2).sum().float().pow(0.5)
        del norms
        flat: torch.Tensor = self._own_flat().view(-1) if self._compact else flatten(gradients)  # type: ignore[no-untyped-call]
        self._master.grad = flat.to(FP32)
        self._memory.trace.count(self._master.grad, "gradients")
        del flat, gradients
        self._sums.clear()
        self._flat = self._averaged = self._all = None
        if self._scales:
            self._master.grad.mul_(1.0 / total)
        self._optimizer.step()
        self._master.grad = None
        self._part.copy_(self._master)

    def _padding(self) -> list[torch.Tensor]:
        used = sum(piece.length for piece in self._own.values())
        return [self._own_flat().narrow(0, used, self._size - used)] if used < self._size else []

    def _step_on_host(self) -> None:
        assert self._master.grad is not None
        with self._memory.trace.placed("host"):
            if self._scales:
                self._master.grad.mul_(1.0 / torch.ones(()))
            self._optimizer.step()
            self._updated.copy_(self._master)
        self._part.copy_(self._updated)
        self._norms.clear()
