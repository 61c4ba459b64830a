"""One of two ranks that train on the CPU while memory runs out on one of them; torchrun starts it.

    torchrun --nproc-per-node 2 -m tests.train.survive_worker FOLDER [waits]

Runs several trainings in separate folders and writes `rank-R.json`: each one's reports, and a
digest of its weights. With `waits`: the first rank is slow to check and write a state, and the file
tells what each rank got.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from memtop.train import TrainingError, batches, checkpoint, run
from memtop.train.exchange import GradientSum
from tests.train.failing import Failing, Failure, Scripted, drawn, following, fresh, measured, small, splits_of
from tests.train.support import Training
from tests.train.test_evaluation import held_out

LIMIT = 2.0
"""Seconds that a rank waits for another one in the main group, in `waits`."""
UPDATES, FAILURES = 100, 20
FEWER_UPDATES, FEWER_FAILURES = 50, 10


def failures_of(rank: int, count: int, updates: int) -> list[Failure]:
    """This rank's failures: each one hits one rank, every fourth in the backward pass of the last
    micro-batch.
    """
    chosen = drawn(3, count, updates)
    chosen = [Failure(f.update, 0.999, True) if number % 4 == 0 else f for number, f in enumerate(chosen)]
    hit = random.Random(11)
    return [failure for failure in chosen if hit.randrange(2) == rank]


def disturbed(folder: Path, dropout: float, count: int, updates: int) -> Training:
    settings = small(dropout=dropout, batch=16, accumulation=1, world_size=2, target_samples=32 * updates)
    training = measured(folder, settings, Scripted(), patience=1)
    failing = Failing(training, failures_of(Accelerator().process_index, count, updates))
    training.run()
    assert failing.left == 0
    return training


def outcome_of(training: Training) -> dict[str, Any]:
    """What is compared between the ranks and between trainings."""
    digest = hashlib.sha256()
    for name, weight in sorted(training.weights().items()):
        digest.update(name.encode() + weight.numpy().tobytes())
    return {
        "losses": training.losses,
        "digests": training.digests,
        "splits": sorted(splits_of(training.channel).items()),
        "oom": [(record["update"], record["phase"], record["survived"]) for record in training.channel.of("oom")],
        "settings": [(r["update"], r["changes"], r["reason"]) for r in training.channel.of("settings")],
        "answers": training.channel.answers,
        "evaluations": [report["loss"] for report in training.channel.of("evaluation")],
        "weights": digest.hexdigest(),
    }


def one_rank_is_full(folder: Path, rank: int) -> Training:
    """Both ranks shrink; only one of them has the memory to grow back."""
    settings = small(dropout=0.1, batch=8, accumulation=1, world_size=2, target_samples=16 * 12)
    training = measured(folder, settings, Scripted(limit=1_000_000 if rank else 200), patience=2)
    Failing(training, [Failure(2, 0.0, False)] if rank else [])
    training.run()
    return training


def evaluated(folder: Path, rank: int) -> Training:
    """An evaluation that does not fit on the second rank, and an edit that only the first one
    receives.
    """
    settings = small(dropout=0.1, batch=4, accumulation=2, world_size=2, target_samples=16 * 6, eval_every=3, eval_batch=4)
    training = fresh(folder, settings, evaluation=held_out())

    def short(module: torch.nn.Module, args: Any, values: Any) -> None:
        if rank and not module.training and len(values["input_ids"]) > 2:
            torch.empty(2**46)

    training.model.register_forward_pre_hook(short, with_kwargs=True)
    if rank == 0:
        training.channel.commands[1] = [
            (1, "change", {"batch": 2, "accumulation": 4, "gradient_checkpointing": "true"}),
            (2, "change", {"batch": 0}),
        ]
    training.run()
    return training


def nothing_smaller(folder: Path, rank: int) -> list[Any]:
    """The second rank's memory runs out at batch 1: how each rank ends."""
    settings = small(dropout=0.1, batch=1, accumulation=4, world_size=2, target_samples=8 * 5)
    training = fresh(folder, settings)
    Failing(training, [Failure(3, 0.999, True)] if rank else [])
    try:
        training.run()
    except (RuntimeError, TrainingError) as error:
        return [type(error).__name__, str(error).splitlines()[0], training.channel.of("oom")]
    raise AssertionError("it trained on")


def short_of_memory_for_missing(folder: Path, rank: int) -> Training:
    """In update 2 the second rank lacks a gradient that the first one has, and twice it has no
    memory for the missing one: once before the ranks share which are missing, and once after.
    """
    settings = small(dropout=0.1, batch=4, accumulation=1, world_size=2, target_samples=8 * 4)
    training = fresh(folder, settings)
    if rank == 0:
        training.run()
        return training
    engine, parameter = training.engine, next(iter(training.model.parameters()))
    backward, tensor, zeros_like = engine.backward, torch.tensor, torch.zeros_like
    count = sum(p.requires_grad for p in training.model.parameters())
    left = {"before": 1, "after": 1}

    def with_gap(loss: torch.Tensor, *, last: bool) -> None:
        backward(loss, last=last)
        if last and training.trainer.position.updates == 1:
            parameter.grad = None

    def short(when: str) -> None:
        if left[when]:
            left[when] -= 1
            raise MemoryError

    def no_flags(data: Any, *args: Any, **options: Any) -> torch.Tensor:
        if isinstance(data, list) and len(data) == count:
            short("before")
        return tensor(data, *args, **options)

    def no_zeros(like: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if like is parameter and training.trainer.position.updates == 1:
            short("after")
        return zeros_like(like, *args, **options)

    engine.backward, torch.tensor, torch.zeros_like = with_gap, no_flags, no_zeros
    try:
        training.run()
    finally:
        torch.tensor, torch.zeros_like = tensor, zeros_like
    assert left == {"before": 0, "after": 0}
    return training


def check_connected() -> None:
    """The largest all-reduce and smaller ones ran when the training began."""
    model = torch.nn.Module()
    for number, shape in enumerate([(3,), (200, 100), (64,)]):
        model.register_parameter(f"p{number}", torch.nn.Parameter(torch.zeros(shape)))
    exchanged, all_reduce = [], torch.distributed.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        exchanged.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    torch.distributed.all_reduce = noted
    try:
        exchange = GradientSum(Accelerator(), model, bucket_bytes=8192)
        at_start = list(exchanged)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        exchange()
    finally:
        torch.distributed.all_reduce = all_reduce
    assert at_start[0] == max(exchanged) == 20_000
    assert at_start[-1] < 8


def check_exchange(rank: int) -> None:
    """Gradients of every shape are summed; a gradient that only one rank has is zero on the
    other."""
    draw = torch.Generator().manual_seed(5)
    model = torch.nn.Module()
    shapes = [(3,), (40, 30), (7, 5), (1,), (200, 100), (64,), (2, 2)]
    for number, shape in enumerate(shapes):
        model.register_parameter(f"p{number}", torch.nn.Parameter(torch.full(shape, float(rank))))
    model.register_buffer("flags", torch.tensor([rank == 0, True]))
    # Buckets of 8 KB: some gradients are larger, and several fit into one bucket.
    exchange = GradientSum(Accelerator(), model, bucket_bytes=8192)
    assert all(bool((p == 0).all()) for p in model.parameters()), "the first rank's weights"
    assert model.get_buffer("flags").tolist() == [True, True]
    parts = [[torch.randn(shape, generator=draw) for shape in shapes] for _ in range(2)]
    for number, parameter in enumerate(model.parameters()):
        # p2 only on the first rank, p6 on none; p1 with its dimensions stored in the other order.
        if number == 6 or (number == 2 and rank == 1):
            continue
        mine = parts[rank][number]
        parameter.grad = mine.t().contiguous().t() if number == 1 else mine.clone()
    assert exchange.missing() == (1 if rank == 0 else 2)
    exchange.share_missing()
    exchange.fill_missing()
    held = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    exchange()
    assert held == [p.grad.data_ptr() for p in model.parameters() if p.grad is not None], "summed in place"
    for number, parameter in enumerate(model.parameters()):
        if number == 6:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None
        expected = parts[0][2] if number == 2 else parts[0][number] + parts[1][number]
        assert torch.equal(parameter.grad, expected), number


class NotOnThisRank(Exception):
    """The state was copied where nothing is written."""


def waits(folder: Path) -> dict[str, Any]:
    """The first rank takes longer than the main group's time limit to read the host's memory, to
    write a state and to check it.
    """
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=LIMIT))])
    first = accelerator.is_main_process

    def slow(module: Any, name: str) -> None:
        """Only the first rank calls it."""
        real = getattr(module, name)

        def slowly(*args: Any, **options: Any) -> Any:
            assert first
            threading.Event().wait(LIMIT * 1.25)
            return real(*args, **options)

        setattr(module, name, slowly)

    slow(batches, "host_plan")
    slow(checkpoint, "ShardWriter")
    slow(run, "newest_complete")
    settings = small(dropout=0.0, batch=2, accumulation=1, world_size=2)
    training = fresh(folder, settings)
    if not first:
        training.engine.saved_tensors = lambda: (_ for _ in ()).throw(NotOnThisRank)
    saved, _ = training.trainer.save()
    found = run.find_state(folder / "train_latest_state", accelerator)
    assert found is not None
    workers = batches.agree_on_host_plan(settings, accelerator).workers
    return {"saved": saved, "updates": found[1].updates, "workers": workers}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["waits"]:
        found = waits(folder)
        (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
        return
    rank = Accelerator(cpu=True).process_index
    check_exchange(rank)
    check_connected()
    found = {}
    first = disturbed(folder / "disturbed", 0.1, FAILURES, UPDATES)
    found["disturbed"] = outcome_of(first)
    calm = following(folder / "calm", first.settings, splits_of(first.channel))
    if rank:
        # Only the first rank gets commands.
        calm.channel.commands.clear()
    calm.run()
    found["calm"] = outcome_of(calm)
    for name, count in (("plain-disturbed", FEWER_FAILURES), ("plain", 0)):
        training = disturbed(folder / name, 0.0, count, FEWER_UPDATES)
        found[name] = outcome_of(training)
        if rank == 0:
            torch.save(training.weights(), folder / f"{name}.pt")
    found["full"] = outcome_of(one_rank_is_full(folder / "full", rank))
    found["evaluated"] = outcome_of(evaluated(folder / "evaluated", rank))
    found["gaps"] = outcome_of(short_of_memory_for_missing(folder / "gaps", rank))
    found["ended"] = nothing_smaller(folder / "ended", rank)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
