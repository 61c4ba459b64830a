"""One of two ranks that check the exchange of gradients, on the CPU; torchrun starts it.

    torchrun --nproc-per-node 2 -m tests.train.exchange_worker FOLDER [waits]

Writes `rank-R.json`: what happened to a training in which memory runs out at every place of an
update. With `waits`: what each rank got while another one was slow.
"""

from __future__ import annotations

import json
import sys
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as recomputed

from memtop.train import checkpoint, engine, host_memory, run
from memtop.train.exchange import RING, GradientSum, plan_buckets
from tests.train import support
from tests.train.failing import TOO_MUCH, Counting, Scripted, following, fresh, measured, rank_splits_of, small
from tests.train.support import Training, tensors
from tests.train.survive_worker import outcome_of

BUCKET = 6144
"""Bytes. The training's gradients fill several buckets."""
LIMIT = 2.0
"""Seconds that a rank waits for another one in the main group, in `waits`."""
SHAPES = [(3,), (40, 30), (7, 5), (1,), (200, 100), (64,), (2, 2)]


class NothingLeft(TorchDispatchMode):
    """No operation can allocate more than a number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known and tensor.numel() > 1:
                raise MemoryError(str(func))
        return found


def shaped(rank: int) -> torch.nn.Module:
    """Some gradients are larger than a bucket of 8 KB, and several fit into one."""
    model = torch.nn.Module()
    for number, shape in enumerate(SHAPES):
        model.register_parameter(f"p{number}", torch.nn.Parameter(torch.full(shape, float(rank))))
    model.register_buffer("flags", torch.tensor([rank == 0, True]))
    return model


def check_sums(rank: int) -> None:
    """Gradients of every shape are summed in place, without allocating; a gradient that only one
    rank has gets to the other."""
    draw = torch.Generator().manual_seed(5)
    model = shaped(rank)
    before = {id(tensor) for tensor in tensors()}
    exchange = GradientSum(Accelerator(), model, bucket_bytes=8192)
    made = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors() if id(t) not in before}
    assert 8192 < sum(made.values()) <= RING * 8192 + 8 * (2 * len(SHAPES) + 9)
    assert all(bool((p == 0).all()) for p in model.parameters()), "the first rank's weights"
    assert model.get_buffer("flags").tolist() == [True, True]
    for lacking, owner in ((2, 0), (4, 1), (None, 0)):
        # One only on one rank (a small and a large one), p6 on none; p1 with its dimensions stored
        # in the other order.
        parts = [[torch.randn(shape, generator=draw) for shape in SHAPES] for _ in range(2)]
        for number, parameter in enumerate(model.parameters()):
            mine = parts[rank][number]
            absent = number == 6 or (number == lacking and rank != owner)
            parameter.grad = None if absent else mine.t().contiguous().t() if number == 1 else mine.clone()
        with NothingLeft():
            exchange.begin()
            exchange.end()
        assert exchange.missing() == (1 if rank == owner or lacking is None else 2)
        exchange.share_missing()
        assert exchange.fill_missing() == (0 if rank == owner or lacking is None else 1)
        held = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
        exchange()
        assert held == [p.grad.data_ptr() for p in model.parameters() if p.grad is not None], "summed in place"
        for number, parameter in enumerate(model.parameters()):
            if number == 6:
                assert parameter.grad is None
                continue
            assert parameter.grad is not None
            expected = parts[owner][number] if number == lacking else parts[0][number] + parts[1][number]
            assert torch.equal(parameter.grad, expected), (lacking, number)


def noted(exchanged: list[int]) -> pytest.MonkeyPatch:
    """Until it is undone, note the elements of every all-reduce of the main group."""
    patch, all_reduce = pytest.MonkeyPatch(), torch.distributed.all_reduce

    def noting(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if options.get("group") is None:
            exchanged.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    patch.setattr(torch.distributed, "all_reduce", noting)
    return patch


def check_connected(rank: int) -> None:
    """The largest all-reduce and smaller ones ran when the training began. A rank that fails takes
    part in the same all-reduces as one that does not, and allocates nothing."""
    model, exchanged = shaped(rank), list[int]()
    patch = noted(exchanged)
    exchange = GradientSum(Accelerator(), model, bucket_bytes=8192)
    at_start = list(exchanged)
    rounds = []
    for _ in range(2):
        exchanged.clear()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if rank:
            with NothingLeft():
                exchange.abandon()
        else:
            exchange.begin()
            exchange.end()
        exchange.finish()
        rounds.append(list(exchanged))
    patch.undo()
    assert at_start[0] == max(rounds[0]) == 2048
    assert at_start[-1] < 8
    assert rounds[0] == rounds[1]
    assert sum(rounds[0]) == sum(p.numel() for p in model.parameters())


def check_overlap() -> None:
    """From the second update on, all-reduces begin while gradients are still computed."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
    exchanged: list[int] = []
    begun = []
    exchange = GradientSum(Accelerator(), layers, bucket_bytes=256)
    next(layers.parameters()).register_hook(lambda gradient: begun.append(len(exchanged)))
    patch = noted(exchanged)
    for last in (True, False, True):
        exchanged.clear()
        if last:
            exchange.begin()
        layers(torch.ones(2, 8)).sum().backward()
        if not last:
            continue
        exchange.end()
        exchange()
        layers.zero_grad()
    patch.undo()
    # Six weights, and six biases of 32 bytes in one bucket. In the last pass, the first layer's
    # weight is missing, and its bias, which the bucket of all biases waits for.
    assert begun == [0, 0, 5]
    assert exchanged == [64] * 6 + [48]


def check_parts(rank: int) -> None:
    """A gradient that is computed in several parts is exchanged when it is complete."""
    layer = torch.nn.Linear(4, 4)
    exchange = GradientSum(Accelerator(), layer, bucket_bytes=16)

    def exchanged(*, reentrant: bool) -> torch.Tensor:
        layer.zero_grad()
        value = torch.full((2, 4), rank + 1.0, requires_grad=True)
        exchange.begin()
        for _ in range(2):
            value = recomputed(layer, value, use_reentrant=True) if reentrant else layer(value)
        value.sum().backward()
        exchange.end()
        exchange()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    first = exchanged(reentrant=True)
    torch.testing.assert_close(exchanged(reentrant=True), first)
    torch.testing.assert_close(exchanged(reentrant=False), first)
    # A model that begins to do so later is refused: its sums would be wrong.
    exchange = GradientSum(Accelerator(), layer := torch.nn.Linear(4, 4), bucket_bytes=16)
    torch.testing.assert_close(exchanged(reentrant=False), exchanged(reentrant=False))
    with pytest.raises(RuntimeError, match="changed after it was exchanged"):
        exchanged(reentrant=True)
    exchange.abandon()
    exchange.finish()


def overflowing(folder: Path, rank: int) -> dict[str, Any]:
    """In fp16, a gradient is too large on one rank: all of them leave out the step."""

    def with_scaler(**options: Any) -> Accelerator:
        accelerator = Accelerator(**options)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0)
        accelerator.scaler = scaler
        return accelerator

    support.Accelerator = with_scaler  # type: ignore[attr-defined]
    settings = small(dropout=0.0, batch=2, accumulation=2, world_size=2, clip_norm=0.0, target_samples=8 * 4)
    training = fresh(folder, settings)
    support.Accelerator = Accelerator  # type: ignore[attr-defined]
    before = training.weights()
    steps = []

    def too_large(gradient: torch.Tensor) -> torch.Tensor:
        update = training.trainer.position.updates
        if update != len(steps):
            return gradient
        steps.append(any(not torch.equal(before[name], weight) for name, weight in training.weights().items()))
        before.update(training.weights())
        return gradient * torch.inf if rank and update == 1 else gradient

    next(iter(training.model.parameters())).register_hook(too_large)
    training.run()
    return {"scale": training.engine.loss_scale().scale, "changed": steps, "weights": outcome_of(training)["weights"]}


class Place(msgspec.Struct, frozen=True):
    """Where memory runs out in an update of two micro-batches."""

    micro: int
    phase: str
    """forward, backward, or end: after the last backward pass."""
    gradient: int = 0
    """Backward: before the gradient of this parameter."""


class FailingAt(Counting):
    """Memory runs out once at each place, on this rank."""

    def __init__(self, training: Training, places: dict[int, Place]) -> None:
        super().__init__(training)
        self.places = places
        for number, parameter in enumerate(training.model.parameters()):
            parameter.register_hook(partial(self._backward, number))
        self._count = training.engine.missing_gradients
        training.engine.missing_gradients = self._end

    def passed(self, hidden: torch.Tensor) -> None:
        self._fail_at(Place(self.micro, "forward"))

    def _backward(self, number: int, gradient: torch.Tensor) -> None:
        self._fail_at(Place(self.micro, "backward", number))

    def _end(self) -> int:
        self._fail_at(Place(self.micro, "end"))
        return int(self._count())

    def _fail_at(self, place: Place) -> None:
        if self.places.get(self.update) == place:
            del self.places[self.update]
            self.update = 0
            torch.empty(TOO_MUCH)


def placed(folder: Path, rank: int) -> tuple[Training, list[int]]:
    """The training, and the numbers of places, of buckets, and of failures on this rank.

    Memory runs out at every place of an update: on the first rank, on the second, and on both of
    them, at different places. Two updates for each; the second one has the whole batch again.
    """
    engine.GradientSum = partial(GradientSum, bucket_bytes=BUCKET)  # type: ignore[attr-defined]
    settings = small(dropout=0.1, batch=4, accumulation=2, world_size=2)
    buckets = plan_buckets(list(fresh(folder / "counted", settings).model.parameters()), BUCKET)
    # Before the first gradient of every bucket. The pieces of a large gradient begin together.
    before = list(dict.fromkeys(bucket.numbers[0] for bucket in buckets))
    places = [Place(1, "backward", number) for number in before] + [Place(0, "backward", number) for number in before[::5]]
    places += [Place(0, "forward"), Place(1, "forward"), Place(1, "end")]
    mine: dict[int, Place] = {}
    for number, (one, other) in enumerate(zip(places, reversed(places), strict=True)):
        for which in range(3):
            # The first update does not overlap.
            update = 2 + 2 * (3 * number + which)
            if which != 1 - rank:
                mine[update] = one if rank == 0 or which < 2 else other
    updates = 2 + 6 * len(places)
    training = measured(
        folder / "placed", msgspec.structs.replace(settings, target_samples=16 * updates), Scripted(), patience=1
    )
    failing = FailingAt(training, mine)
    failures = len(mine)
    training.run()
    assert failing.places == {}
    return training, [len(places), len(before), failures]


class NotOnThisRank(Exception):
    """The state was copied where nothing is written."""


def slow(module: Any, name: str) -> None:
    """Replace a function by one that takes longer than the main group's time limit."""
    real = getattr(module, name)

    def slowly(*args: Any, **options: Any) -> Any:
        threading.Event().wait(LIMIT * 1.25)
        return real(*args, **options)

    setattr(module, name, slowly)


def waits(folder: Path) -> dict[str, Any]:
    """The first rank takes longer than the main group's time limit to read the host's memory, to
    write a state and to check it. Then the second one fails long before the first one gets to its
    last backward pass.
    """
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=LIMIT))])
    first = accelerator.is_main_process
    if first:
        slow(host_memory, "host_plan")
        slow(checkpoint, "ShardWriter")
        slow(run, "take_newest")
    settings = small(dropout=0.0, batch=2, accumulation=1, world_size=2)
    training = fresh(folder, settings)
    if not first:
        training.engine.saved_tensors = lambda: (_ for _ in ()).throw(NotOnThisRank)
    training.trainer.save()
    found = run.find_state(folder / "train_latest_state", accelerator, training.channel)
    assert found is not None
    workers = host_memory.agree_on_host_plan(settings, accelerator).workers
    exchange = GradientSum(accelerator, torch.nn.Linear(4, 4))
    if first:
        slow(exchange, "begin")
        exchange.begin()
        exchange.end()
    else:
        exchange.abandon()
    exchange.finish()
    return {"updates": found[1].updates, "workers": workers}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["waits"]:
        found = waits(folder)
        (folder / f"rank-{Accelerator().process_index}.json").write_text(json.dumps(found))
        return
    rank = Accelerator(cpu=True).process_index
    check_sums(rank)
    check_connected(rank)
    check_overlap()
    check_parts(rank)
    overflow = overflowing(folder / "overflow", rank)
    training, counts = placed(folder, rank)
    calm = following(folder / "calm", training.settings, rank_splits_of(training.settings, training.channel))
    calm.run()
    found = {"counts": counts, "placed": outcome_of(training), "calm": outcome_of(calm), "overflow": overflow}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
