"""One of two ranks that train on the CPU while memory runs out on one of them; torchrun starts it.

    torchrun --nproc-per-node 2 -m tests.train.survive_worker FOLDER

Runs several trainings in separate folders and writes `rank-R.json`: each one's reports, and a
digest of its weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator

from memtop.presets import Settings
from memtop.presets.schema import with_splits
from memtop.train import TrainingError
from memtop.train.optimizers import bytes_of_first_step
from tests.forking import LONG
from tests.train.failing import (
    Clock,
    Failing,
    Failure,
    Filled,
    Scripted,
    drawn,
    fails_above,
    following,
    fresh,
    measured,
    rank_splits_of,
    small,
)
from tests.train.support import Training, held_out

UPDATES, FAILURES = (100, 20) if LONG else (40, 8)
FEWER_UPDATES, FEWER_FAILURES = (50, 10) if LONG else (20, 5)


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
        "splits": sorted(rank_splits_of(training.settings, training.channel).items()),
        "oom": [(record["update"], record["phase"], record["survived"]) for record in training.channel.of("oom")],
        "settings": [(r["update"], r["changes"], r["reason"]) for r in training.channel.of("settings")],
        "answers": training.channel.answers,
        "evaluations": [report["loss"] for report in training.channel.of("evaluation")],
        "weights": digest.hexdigest(),
    }


def one_rank_is_full(folder: Path, rank: int) -> Training:
    """Both ranks shrink; only the second one has the memory to grow back."""
    settings = small(dropout=0.1, batch=8, accumulation=1, world_size=2, target_samples=16 * 12)
    training = measured(folder, settings, Scripted(limit=1_000_000 if rank else 200), patience=2)
    Failing(training, [Failure(2, 0.0, False)])
    training.run()
    return training


def pressed(folder: Path, rank: int) -> Training:
    """The allocator of the second rank has to free its cache in two updates."""
    settings = small(dropout=0.1, batch=8, accumulation=1, world_size=2, target_samples=16 * 5)
    training = measured(folder, settings, Scripted(retrying={2, 3} if rank else ()), patience=100)
    training.run()
    return training


VECTORS = {
    "2,2": ((2, 3), (2, 3)),
    "3,1": ((3, 3), (1, 3)),
    "1,3": ((1, 3), (3, 3)),
    "1x9,3x1": ((1, 9), (3, 1)),
    "6,6": ((6, 1), (6, 1)),
}
STOP_AFTER = 2


def shared_unevenly(folder: Path, rank: int) -> dict[str, Any]:
    """The same training with several splits, and one that changes its split at restarts; the
    samples are not a multiple of the effective batch.

    The gradients of each update are saved by the first rank.
    """
    settings = small(dropout=0.0, world_size=2, target_samples=12 * 5 + 2, packing=False)
    found = {name: uneven(folder / name, with_splits(settings, splits), rank) for name, splits in VECTORS.items()}
    parts = []
    for name in ("3,1", "1x9,3x1", "2,2"):
        parts.append(uneven(folder / "restarted", with_splits(settings, VECTORS[name]), rank, stop=name != "2,2"))
    found["restarted"] = {"digests": [digest for part in parts for digest in part["digests"]]}
    padded = msgspec.structs.replace(settings, packing=True)
    found["padded"] = uneven(folder / "padded", with_splits(padded, VECTORS["1x9,3x1"]), rank)
    return found


def uneven(folder: Path, settings: Settings, rank: int, *, stop: bool = False) -> dict[str, Any]:
    return watched(fresh(folder, settings), folder, rank, stop=stop)


def watched(training: Training, folder: Path, rank: int, *, stop: bool = False) -> dict[str, Any]:
    """Run the training; return what it has computed. The first rank saves the gradients."""
    gradients: list[torch.Tensor] = []
    passes: list[int] = []

    def note(*_: Any) -> None:
        gradients.append(torch.cat([p.grad.double().flatten() for p in training.model.parameters() if p.grad is not None]))

    training.optimizer.register_step_pre_hook(note)
    training.model.register_forward_pre_hook(lambda *_: passes.append(training.trainer.position.updates))
    if stop and rank == 0:
        training.channel.commands[STOP_AFTER] = [(1, "stop", {})]
    begin = training.trainer.position.updates
    training.run()
    if rank == 0:
        before = torch.load(folder / "gradients.pt") if begin else []
        torch.save([*before, *gradients], folder / "gradients.pt")
    return {"digests": training.digests, "passes": [passes.count(update) for update in range(begin, begin + len(gradients))]}


SEARCHED = small(dropout=0.0, batch=2, accumulation=8, world_size=2, target_samples=32 * 4, auto_batch=True, packing=False)
FIXED_SECONDS = 0.1


def searching(folder: Path, clock: Clock, *, full: bool, each: float, extra: int = 0) -> Training:
    """A training with `--batch auto`. A rank that is `full` has memory for batch 4, others for any.
    A pass takes this rank `each` seconds for a sample. The optimizer holds `extra` bytes more than
    its moments.
    """
    # What a search remembers.
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    gauge = Filled(limit=100_000 if full else 1_000_000)
    training = measured(folder, SEARCHED, gauge, patience=100)
    gauge.follow(training, fails_from=8 if full else 1_000)
    clock.follow(training, lambda samples: each * (samples + FIXED_SECONDS))
    held = gauge.held + bytes_of_first_step(training.optimizer) + extra

    def stepped(*_: Any) -> None:
        gauge.held = held

    training.optimizer.register_step_post_hook(stepped)
    return training


def search_of(training: Training) -> dict[str, Any]:
    return {**outcome_of(training), "searches": training.channel.of("batch_search")}


def searches(folder: Path, rank: int) -> dict[str, Any]:
    """Searches on two ranks, with and without different memory and speed."""
    clock, before = Clock(), time.perf_counter
    time.perf_counter = clock
    try:
        found = {}
        for name, full, each in (
            ("full", not rank, 1.0),
            ("alike", False, 1.0 + 0.05 * rank),
            ("unlike", rank == 1, 1.0 + 2.0 * rank),
        ):
            training = searching(folder / name, clock, full=full, each=each)
            computed = watched(training, folder / name, rank, stop=name == "unlike")
            found[name] = {**computed, **search_of(training)}
        training = searching(folder / "corrected", clock, full=rank == 1, each=1.0, extra=20_000 * rank)
        training.run()
        found["corrected"] = search_of(training)
        resumed = searching(folder / "unlike", clock, full=rank == 1, each=1.0 + 2.0 * rank)
        found["again"] = {**watched(resumed, folder / "unlike", rank), **search_of(resumed)}
    finally:
        time.perf_counter = before
    even = msgspec.structs.replace(SEARCHED, batch=4, accumulation=4, auto_batch=False)
    found["even"] = uneven(folder / "even", even, rank)
    return found


def evaluated(folder: Path, rank: int) -> Training:
    """An evaluation that does not fit on the second rank, and an edit that only the first one
    receives.
    """
    split = {"batch": 4, "accumulation": 2, "world_size": 2, "target_samples": 16 * 6}
    # Each sample has a row of its own, so that the rows of a micro-batch give its size.
    settings = small(dropout=0.1, **split, eval_every=3, eval_batch=4, packing=False)
    training = fresh(folder, settings, evaluation=held_out())
    if rank:
        fails_above(training, 2, when=lambda: not training.model.training)
    else:
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


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    rank = Accelerator(cpu=True).process_index
    found: dict[str, Any] = {}
    first = disturbed(folder / "disturbed", 0.1, FAILURES, UPDATES)
    found["disturbed"] = outcome_of(first)
    calm = following(folder / "calm", first.settings, rank_splits_of(first.settings, first.channel))
    calm.run()
    found["calm"] = outcome_of(calm)
    for name, count in (("plain-disturbed", FEWER_FAILURES), ("plain", 0)):
        training = disturbed(folder / name, 0.0, count, FEWER_UPDATES)
        found[name] = outcome_of(training)
        if rank == 0:
            torch.save(training.weights(), folder / f"{name}.pt")
    found["full"] = outcome_of(one_rank_is_full(folder / "full", rank))
    found["pressed"] = outcome_of(pressed(folder / "pressed", rank))
    found["uneven"] = shared_unevenly(folder / "uneven", rank)
    found["searched"] = searches(folder / "searched", rank)
    found["evaluated"] = outcome_of(evaluated(folder / "evaluated", rank))
    found["gaps"] = outcome_of(short_of_memory_for_missing(folder / "gaps", rank))
    found["ended"] = nothing_smaller(folder / "ended", rank)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
