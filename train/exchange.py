"""What the ranks exchange: a few numbers and values (`Ranks`), and gradients (`GradientSum`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar

import torch
from accelerate import Accelerator

TIME_LIMIT = timedelta(days=1)
"""How long a rank waits for another one in `Ranks`: the first rank may write or check a large state
on a slow disk. When a rank ends, the others notice at once.
"""
BUCKET_BYTES = 16 << 20
"""The most that one all-reduce of gradients sums."""
RING = 2
"""Buckets in memory: so many all-reduces of small gradients run at one time."""
_SLOTS = 8
_ALIGNMENT = 512

Value = TypeVar("Value")


@lru_cache(maxsize=1)
def _host_group(world: torch.distributed.ProcessGroup) -> torch.distributed.ProcessGroup:
    """A process group of all ranks that communicates through host memory, made once."""
    group: torch.distributed.ProcessGroup = torch.distributed.new_group(backend="gloo", timeout=TIME_LIMIT)
    return group


class Ranks:
    """Brings all ranks together: adds up a few numbers, hands on a value, waits.

    It uses a process group of its own, on the CPU. So it never waits for work in the GPU's queue,
    and the short time limit of the group that exchanges gradients does not apply. The numbers are
    in memory allocated at the start, so it works when memory has run out.

    All ranks call every method together. With one process it returns what it was given.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._several = accelerator.num_processes > 1
        self._group = _host_group(torch.distributed.group.WORLD) if self._several else None
        self._rank, self._world = accelerator.process_index, accelerator.num_processes
        self._numbers = torch.zeros(max(_SLOTS, self._world), dtype=torch.float64)
        self._here = torch.zeros(1)

    def sums(self, *values: float) -> list[float]:
        """The sum over the ranks of each of up to eight values, or as many as there are ranks."""
        return self._reduce(values, torch.distributed.ReduceOp.SUM)

    def add_up(self, numbers: torch.Tensor) -> None:
        """Replace numbers on the device by their sums over the ranks.

        It is queued with the gradients' all-reduces, and the host does not wait for it.
        """
        if self._several:
            torch.distributed.all_reduce(numbers)

    def most(self, value: float) -> float:
        """The largest value of any rank."""
        return self._reduce((value,), torch.distributed.ReduceOp.MAX)[0]

    def each(self, flag: bool) -> list[bool]:
        """The flag of each rank."""
        return [found > 0 for found in self.sums(*(flag and rank == self._rank for rank in range(self._world)))]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.most(float(flag)) > 0

    def from_first(self, value: Value) -> Value:
        """The first rank's value."""
        shared = [value]
        if self._several:
            torch.distributed.broadcast_object_list(shared, src=0, group=self._group, device=torch.device("cpu"))
        return shared[0]

    def from_each(self, value: Value) -> list[Value]:
        """The value of each rank."""
        values = [value] * self._world
        if self._several:
            torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def wait(self) -> None:
        """Return when all ranks have called this."""
        if self._several:
            self.arrive().wait()

    def arrive(self) -> torch.distributed.Work:
        """Say that this rank is here, and go on; the result's `wait` returns when all ranks are."""
        # Not `barrier`: that allocates on the GPU if the main group is bound to one.
        work: torch.distributed.Work = torch.distributed.all_reduce(self._here, group=self._group, async_op=True)
        return work

    def least(self, numbers: torch.Tensor) -> None:
        """Replace each number by the smallest one of any rank; a tensor on the CPU."""
        if self._several:
            torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MIN, group=self._group)

    def _reduce(self, values: Sequence[float], operation: torch.distributed.ReduceOp.RedOpType) -> list[float]:
        if not self._several:
            return [float(value) for value in values]
        numbers = self._numbers[: len(values)]
        numbers.copy_(torch.tensor(values, dtype=torch.float64))
        torch.distributed.all_reduce(numbers, op=operation, group=self._group)
        return [float(number) for number in numbers.tolist()]


class Bucket(NamedTuple):
    """What one all-reduce sums: several small gradients, or a piece of a large one."""

    numbers: tuple[int, ...]
    """The parameters, by their number in the model."""
    length: int
    """Elements of all of them, or of the piece."""
    dtype: torch.dtype
    start: int = 0
    """Where the piece begins in its gradient."""

    @property
    def size_bytes(self) -> int:
        return self.length * self.dtype.itemsize


def plan_buckets(parameters: Sequence[torch.Tensor], bucket_bytes: int) -> list[Bucket]:
    """All gradients in buckets of at most this size, in the order of the all-reduces.

    The last parameters come first: the backward pass computes their gradients first. Gradients of
    at least a quarter of a bucket have buckets of their own, because they need not be copied.
    """
    plan = []
    open_buckets: dict[torch.dtype, Bucket] = {}
    for number in reversed(range(len(parameters))):
        count, dtype = parameters[number].numel(), parameters[number].dtype
        most = max(1, bucket_bytes // dtype.itemsize)
        if 4 * count >= most:
            plan += [Bucket((number,), min(most, count - start), dtype, start) for start in range(0, count, most)]
            continue
        before = open_buckets.pop(dtype, Bucket((), 0, dtype))
        if before.length + count > most:
            plan.append(before)
            before = Bucket((), 0, dtype)
        open_buckets[dtype] = Bucket((*before.numbers, number), before.length + count, dtype)
    return [*plan, *open_buckets.values()]


class _Contents(NamedTuple):
    """What an all-reduce sums."""

    whole: torch.Tensor
    memory: torch.Tensor | None = None
    """The part of the ring that it uses; None if a gradient is summed in place."""
    gradients: tuple[torch.Tensor, ...] = ()
    sums: tuple[torch.Tensor, ...] = ()
    """The parts of `whole` that are copied to the gradients afterwards."""


class _Flight(NamedTuple):
    """An all-reduce that has begun."""

    work: torch.distributed.Work
    contents: _Contents


class GradientSum:
    """Sums the gradients of a model over the ranks while the last backward pass computes them.

    Every update has the same all-reduces in the same order, whatever happens on a rank. A bucket's
    all-reduce begins when its gradients are complete and all buckets before it have begun. A rank
    that fails takes part in the rest of them with any numbers (`abandon`), so no rank waits for it.
    All ranks vote afterwards, and discard the sums together.

    Small gradients pass through a ring of buckets that is allocated at the start; nothing else is.
    All ranks call every method together, except `abandon`.
    """

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._several = accelerator.num_processes > 1
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self._several:
            return
        self._world, self._rank = accelerator.num_processes, accelerator.process_index
        self._ranks = Ranks(accelerator)
        _broadcast_from_first(model)
        self._plan = plan_buckets(self._parameters, bucket_bytes)
        self._buckets_of: dict[int, list[int]] = {number: [] for number in range(len(self._parameters))}
        for at, bucket in enumerate(self._plan):
            for number in bucket.numbers:
                self._buckets_of[number].append(at)
        size = max((bucket.size_bytes for bucket in self._plan), default=0)
        # The second row begins at an address that every dtype and every fast kernel takes.
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        ring = torch.zeros(min(RING, len(self._plan)), size, dtype=torch.uint8, device=accelerator.device)
        self._ring = deque(ring.unbind())
        self._holders = torch.zeros(2, len(self._parameters), dtype=torch.int64)
        on_gpu = accelerator.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(accelerator.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._nccl = torch.distributed.get_backend() == "nccl"
        self._flights: deque[_Flight] = deque()
        self._partial: list[tuple[int, int]] = []
        self._arrival: torch.distributed.Work | None = None
        self._fault: Exception | None = None
        self._in_last_pass = self._in_parts = self._overlaps = False
        self._start_over()
        self._connect()
        for number, parameter in enumerate(self._parameters):
            accumulated = partial(self._accumulated, number)
            parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    def _start_over(self) -> None:
        self._next = 0
        self._complete: set[int] = set()
        self._incomplete = [len(bucket.numbers) for bucket in self._plan]

    def _connect(self) -> None:
        """Reduce zeros once in every size up to the largest.

        At the first all-reduce of each kind, which depends on the size, NCCL connects the ranks and
        allocates memory. Here there is room for that; in the middle of an update that barely fits
        there may be none.
        """
        for dtype in dict.fromkeys(bucket.dtype for bucket in self._plan):
            length = max(bucket.length for bucket in self._plan if bucket.dtype == dtype)
            while length:
                torch.distributed.all_reduce(self._ring[0][: length * dtype.itemsize].view(dtype))
                length //= 8

    def begin(self) -> None:
        """Exchange each gradient from now on as soon as it is complete: the last backward pass of
        the update begins.
        """
        if self._several:
            # A rank that failed early waits for this, so its all-reduces do not begin long before
            # those of others: they have a time limit.
            self._arrival = self._ranks.arrive()
            self._in_last_pass = True

    def end(self) -> None:
        """Exchange the gradients that the last backward pass has not computed."""
        if not self._several:
            return
        self._in_last_pass = False
        while self._next < len(self._plan):
            self._launch(self._contents)
        # The first update shows whether each gradient is complete when it is first there.
        self._overlaps = not self._in_parts

    def abandon(self) -> None:
        """Take part in the rest of the exchange after a failure on this rank, with any numbers.

        Allocates nothing. The ranks that did not fail call `end` instead.
        """
        if not self._several:
            return
        if self._fault is not None:
            raise self._fault
        self._in_last_pass = False
        if self._arrival is None:
            self._arrival = self._ranks.arrive()
        self._arrival.wait()
        while self._next < len(self._plan):
            self._launch(self._anything)

    def __call__(self) -> None:
        """End the exchange: each gradient is its sum over the ranks.

        Parameters without a gradient on any rank stay without.
        """
        if not self._several:
            return
        partial_sums = self._partial
        self.finish()
        for number, rank in partial_sums:
            gradient = self._parameters[number].grad
            assert gradient is not None
            torch.distributed.broadcast(_flat(gradient), src=rank)

    def finish(self) -> None:
        """Wait for the exchange. The sums are in the gradients; if a rank failed, drop them."""
        if not self._several:
            return
        while self._flights:
            self._land(self._flights.popleft())
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        if self._arrival is not None:
            self._arrival.wait()
        self._arrival, self._partial = None, []
        self._start_over()

    def missing(self) -> int:
        """The number of parameters without a gradient on this rank; 0 with one process.

        Notes which ones they are, for `share_missing`. May run out of memory.
        """
        if not self._several:
            return 0
        held = [parameter.grad is not None for parameter in self._parameters]
        self._holders.fill_(self._rank)
        if not all(held):
            self._holders.masked_fill_(~torch.tensor(held), self._world)
        self._holders[1].neg_()
        return held.count(False)

    def share_missing(self) -> None:
        """Learn which parameters have a gradient on any rank.

        Call after `missing` on all ranks.
        """
        self._ranks.least(self._holders)

    def fill_missing(self) -> int:
        """Allocate zeros for gradients that only other ranks have; return how many.

        Call it after `share_missing`.

        May run out of memory, but never waits for another rank.
        """
        filled = 0
        first, negative_last = self._holders.tolist()
        for number, parameter in enumerate(self._parameters):
            if first[number] == self._world or -negative_last[number] < self._world:
                continue  # No rank has a gradient, or all have one.
            # A rank that has a gradient has its sum, too. `__call__` gives it to the others.
            self._partial.append((number, first[number]))
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                filled += 1
        return filled

    def _accumulated(self, number: int, parameter: torch.Tensor) -> None:
        """The backward pass has added to this gradient."""
        if not self._in_last_pass:
            return
        buckets = self._buckets_of[number]
        if number in self._complete:
            self._in_parts = True
            if min(buckets, default=self._next) < self._next:
                raise RuntimeError(
                    f"the gradient of parameter {number} {list(parameter.shape)} changed after it was exchanged: "
                    "the model computes it in several parts, and did not do so in the update before"
                )
            return
        self._complete.add(number)
        for bucket in buckets:
            self._incomplete[bucket] -= 1
        while self._overlaps and self._next < len(self._plan) and not self._incomplete[self._next]:
            self._launch(self._contents)

    def _launch(self, contents: Callable[[Bucket], _Contents]) -> None:
        """Begin the next all-reduce. With NCCL the host does not wait for it."""
        with self._aside():
            summed = contents(self._plan[self._next])
            try:
                work = torch.distributed.all_reduce(summed.whole, async_op=True)
            except Exception as error:
                # It is not known whether the other ranks see this all-reduce.
                self._fault = error
                raise
            self._next += 1
            self._flights.append(_Flight(work, summed))
            if self._nccl:
                self._land(self._flights.popleft())

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a GPU, what the block queues runs during the backward pass, after what is queued."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def _land(self, flight: _Flight) -> None:
        flight.work.wait()
        if flight.contents.sums:
            torch._foreach_copy_(flight.contents.gradients, flight.contents.sums)

    def _contents(self, bucket: Bucket) -> _Contents:
        """This rank's gradients; zeros for those that it does not have."""
        found = [self._parameters[number].grad for number in bucket.numbers]
        if len(found) == 1 and found[0] is not None:
            return _Contents(_flat(found[0])[bucket.start : bucket.start + bucket.length])
        whole, memory, _, _ = self._anything(bucket)
        if len(found) == 1:
            return _Contents(whole.zero_(), memory)
        parts = torch.split(whole, [self._parameters[number].numel() for number in bucket.numbers])
        for part, gradient in zip(parts, found, strict=True):
            if gradient is None:
                part.zero_()
        held = [(_flat(gradient), part) for gradient, part in zip(found, parts, strict=True) if gradient is not None]
        gradients, sums = tuple(gradient for gradient, _ in held), tuple(part for _, part in held)
        if held:
            torch._foreach_copy_(sums, gradients)
        return _Contents(whole, memory, gradients, sums)

    def _anything(self, bucket: Bucket) -> _Contents:
        """Memory of the bucket's size, with what is left in it."""
        memory = self._ring[0]
        self._ring.rotate(-1)
        while any(flight.contents.memory is memory for flight in self._flights):
            self._land(self._flights.popleft())
        return _Contents(memory[: bucket.size_bytes].view(bucket.dtype), memory)


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """A one-dimensional view.

    Gradients have no holes in memory, whatever the order of their dimensions.
    """
    return gradient.view(-1) if gradient.is_contiguous() else gradient.as_strided((gradient.numel(),), (1,))


def _broadcast_from_first(model: torch.nn.Module) -> None:
    """Give every rank the first rank's weights.

    They should be equal already; this makes it certain.
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            own = tensor.detach()
            whole = own.contiguous()
            torch.distributed.broadcast(whole, src=0)
            if whole is not own:
                tensor.copy_(whole)
