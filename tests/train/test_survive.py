"""Memory runs out inside an update: the update is repeated with a smaller micro-batch, and nothing
else changes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from memtop.train import TrainingError
from memtop.train.agent.failures import is_allocation_failure
from memtop.train.batch_sizer import OomGuard, larger_split, smaller_split
from memtop.train.channel import Unsupervised
from memtop.train.engine import PlainEngine
from memtop.train.exchange import GradientSum
from tests.forking import LONG
from tests.train.failing import (
    TOO_MUCH,
    Failing,
    Failure,
    Scripted,
    distance,
    drawn,
    fails_above,
    following,
    fresh,
    measured,
    small,
    splits_of,
)
from tests.train.support import Training, held_out, tensors

UPDATES, FAILURES = (200, 30) if LONG else (100, 15)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small is faster with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def disturbed(folder: Path, dropout: float) -> Training:
    """Updates with failures at random micro-steps, growing back in between."""
    settings = small(dropout=dropout, batch=16, accumulation=1, target_samples=16 * UPDATES)
    training = measured(folder, settings, Scripted(), patience=1)
    failing = Failing(training, drawn(3, FAILURES, UPDATES))
    assert training.run() == "finished"
    assert failing.left == 0
    assert len(training.channel.of("oom")) == FAILURES
    return training


def test_many_failures_end_with_the_weights_of_a_run_with_the_same_splits(tmp_path: Path) -> None:
    training = disturbed(tmp_path / "disturbed", 0.1)
    assert {record["phase"] for record in training.channel.of("oom")} == {"forward", "backward"}
    splits = splits_of(training.channel)
    assert len(set(splits.values())) >= 3, "otherwise this test proves little"
    calm = following(tmp_path / "calm", training.settings, {update: (split,) for update, split in splits.items()})
    calm.run()
    assert splits_of(calm.channel) == splits
    assert calm.losses == training.losses
    assert calm.digests == training.digests
    for name, weight in calm.weights().items():
        assert torch.equal(training.weights()[name], weight), name


def test_many_failures_change_only_rounding_without_dropout(tmp_path: Path) -> None:
    training = disturbed(tmp_path / "disturbed", 0.0)
    undisturbed = fresh(tmp_path / "undisturbed", training.settings)
    undisturbed.run()
    assert training.digests == undisturbed.digests
    assert distance(training.weights(), undisturbed.weights()) < 1e-5


def test_a_failure_and_the_smaller_split_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = fresh(tmp_path, small(dropout=0.1, batch=6, accumulation=2, target_samples=12 * 4))
    Failing(training, [Failure(3, 0.9, True)])
    training.run()
    (record,) = training.channel.of("oom")
    assert {name: record[name] for name in ("update", "phase", "survived", "batch", "accumulation", "error")} == {
        "update": 3,
        "phase": "backward",
        "survived": True,
        "batch": 6,
        "accumulation": 2,
        "error": "RuntimeError",
    }
    assert "DefaultCPUAllocator: can't allocate memory" in record["message"]
    (change,) = training.channel.of("settings")
    # The largest divisor of 12 that is at most 3.
    assert change == {
        "type": "settings",
        "update": 3,
        "changes": {"batch": 3, "accumulation": 4},
        "reason": "allocation failure",
        "total_updates": 4,
    }
    assert "memtop: from update 3 on: batch 6 -> 3, accumulation 2 -> 4 (allocation failure)\n" in capsys.readouterr().out
    assert splits_of(training.channel) == {1: (6, 2), 2: (6, 2), 3: (3, 4), 4: (3, 4)}


def test_failures_in_the_same_update_halve_again_and_the_smaller_split_is_saved(tmp_path: Path) -> None:
    training = fresh(tmp_path, small(dropout=0.1, batch=8, accumulation=1, target_samples=8 * 3))
    # Memory for two samples: anything larger fails.
    fails_above(training, 2)
    training.run()
    assert [record["batch"] for record in training.channel.of("oom")] == [8, 4]
    assert set(splits_of(training.channel).values()) == {(2, 4)}
    saved = msgspec.json.decode((tmp_path / "train_latest_state" / "manifest.json").read_bytes())
    assert (saved["settings"]["batch"], saved["settings"]["accumulation"]) == (2, 4)
    assert (training.trainer.settings.batch, training.trainer.settings.accumulation) == (2, 4)


def test_at_batch_one_the_failure_is_reported_and_ends_the_training(tmp_path: Path) -> None:
    training = fresh(tmp_path, small(dropout=0.1, batch=2, accumulation=1, target_samples=2 * 5))
    training.model.register_forward_pre_hook(
        lambda *_: torch.empty(TOO_MUCH) if training.trainer.position.updates == 2 else None
    )
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate"):
        training.run()
    assert [(record["batch"], record["survived"]) for record in training.channel.of("oom")] == [(2, True), (1, False)]
    assert len(training.losses) == 2


def test_a_failure_in_the_optimizer_step_ends_the_training(tmp_path: Path) -> None:
    training = fresh(tmp_path, small(dropout=0.1, target_samples=80))
    training.optimizer.register_step_pre_hook(lambda *_: torch.empty(TOO_MUCH))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate"):
        training.run()
    (record,) = training.channel.of("oom")
    assert (record["phase"], record["survived"], record["update"]) == ("optimizer", False, 1)
    assert training.channel.of("settings") == []


def test_under_zero_the_failure_is_reported_and_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memtop.train.zero import ZeroEngine

    assert not ZeroEngine.retries
    monkeypatch.setattr(PlainEngine, "retries", ZeroEngine.retries)
    training = fresh(tmp_path, small(dropout=0.1, target_samples=80))
    Failing(training, [Failure(2, 0.9, True)])
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate"):
        training.run()
    (record,) = training.channel.of("oom")
    assert (record["phase"], record["survived"], record["batch"]) == ("backward", False, 4)
    assert training.channel.of("settings") == []


def test_a_failure_while_samples_are_fetched_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = fresh(tmp_path / "a", small(dropout=0.1, target_samples=80))
    original, asked = type(training.samples).__getitem__, []

    def short(data: object, key: tuple[int, int]) -> object:
        asked.append(key)
        if len(asked) == 13:
            bytearray(1 << 60)
        return original(data, key)  # type: ignore[arg-type]

    monkeypatch.setattr(type(training.samples), "__getitem__", short)
    training.run()
    (record,) = training.channel.of("oom")
    assert (record["phase"], record["error"], record["update"]) == ("data", "MemoryError", 2)
    undisturbed = fresh(tmp_path / "b", training.settings)
    undisturbed.run()
    assert training.digests == undisturbed.digests
    assert splits_of(training.channel)[2] == (2, 4)


def test_another_error_is_not_an_allocation_failure(tmp_path: Path) -> None:
    training = fresh(tmp_path, small(dropout=0.1, target_samples=80))

    def wrong(*_: object) -> None:
        raise RuntimeError("NCCL error: Cuda failure 2 'out of memory'")

    training.model.register_forward_pre_hook(wrong)
    with pytest.raises(RuntimeError, match="NCCL error"):
        training.run()
    assert training.channel.of("oom") == []


def test_a_failed_attempt_leaves_no_tensors(tmp_path: Path) -> None:
    settings = small(dropout=0.1, target_samples=8 * 4, gradient_checkpointing=True)
    training = fresh(tmp_path, settings)
    failing = Failing(training, [Failure(2, 0.9, True), Failure(3, 0.9, False)])
    kept: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def seen(hidden: torch.Tensor) -> None:
        kept.append(weakref.ref(hidden))
        kept.extend(weakref.ref(p.grad) for p in training.model.parameters() if p.grad is not None)

    def at_next_try(module: object, args: object) -> None:
        alive.append(sum(reference() is not None for reference in kept))

    failing.seen = seen
    gc.disable()
    try:
        training.model.register_forward_pre_hook(at_next_try)
        training.run()
    finally:
        gc.enable()
    assert len(kept) > 4, "including gradients of the micro-batch before"
    assert alive == [0] * len(alive)


# --- evaluation
# --------------------------------------------------------------------------------------------------


def test_an_evaluation_that_does_not_fit_is_repeated_with_half_its_batch(tmp_path: Path) -> None:
    settings = small(dropout=0.1, target_samples=8 * 4, eval_every=2, eval_batch=8)
    training = fresh(tmp_path / "a", settings, evaluation=held_out())
    fails_above(training, 4)
    training.run()
    (record,) = training.channel.of("oom")
    assert (record["phase"], record["batch"], record["accumulation"], record["survived"]) == ("evaluation", 8, None, True)
    assert [change["changes"] for change in training.channel.of("settings")] == [{"eval_batch": 4}]
    undisturbed = fresh(tmp_path / "b", settings, evaluation=held_out())
    undisturbed.run()
    assert training.losses == undisturbed.losses
    found, wanted = ([e["loss"] for e in t.channel.of("evaluation")] for t in (training, undisturbed))
    assert len(found) == 2
    assert found == pytest.approx(wanted, rel=1e-5)


def test_an_evaluation_that_fits_at_no_batch_ends_the_training(tmp_path: Path) -> None:
    settings = small(dropout=0.1, target_samples=8 * 4, eval_every=2)
    training = fresh(tmp_path, settings, evaluation=held_out())
    training.model.register_forward_pre_hook(lambda module, args: None if module.training else torch.empty(TOO_MUCH))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        training.run()
    assert [record["batch"] for record in training.channel.of("oom")] == [4, 2, 1]
    assert [record["survived"] for record in training.channel.of("oom")] == [True, True, False]


# --- splits and messages
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "accumulation", "smaller"),
    [(8, 4, (4, 8)), (6, 2, (3, 4)), (7, 3, (3, 7)), (5, 1, (1, 5)), (1, 9, None), (9, 1, (3, 3))],
)
def test_the_next_smaller_split_keeps_the_effective_batch(batch: int, accumulation: int, smaller: object) -> None:
    assert smaller_split((batch, accumulation)) == smaller


def test_the_next_larger_split_never_exceeds_the_request() -> None:
    assert larger_split((2, 12), 24) == (3, 8)
    assert larger_split((2, 12), 3) == (3, 8)
    assert larger_split((2, 12), 2) is None
    assert larger_split((3, 4), 5) == (4, 3)


class OutOfMemoryError(RuntimeError):
    """Named like torch's error."""


_EVERY_CUDA_ERROR = """CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (OutOfMemoryError("HIP out of memory"), True),
        (torch.OutOfMemoryError("XPU out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError(f"CUDA error: out of memory\n{_EVERY_CUDA_ERROR}"), True),
        (RuntimeError(f"CUDA error: device-side assert triggered\n{_EVERY_CUDA_ERROR}"), False),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error: CUDA error: out of memory"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("CUDA error: out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_that_count_as_an_allocation_failure(error: BaseException, memory: bool) -> None:
    assert is_allocation_failure(error) is memory


def test_the_other_ranks_end_with_one_line() -> None:
    with pytest.raises(TrainingError, match=r"^update 7: another rank is out of memory, and no smaller batch is left$"):
        OomGuard(Unsupervised(), retries=True).give_up("update 7")


def test_one_process_allocates_nothing_to_sum_gradients(tmp_path: Path) -> None:
    training = fresh(tmp_path, small(dropout=0.0))
    before = {id(tensor) for tensor in tensors()}
    alone = GradientSum(training.engine.accelerator, training.model)
    assert sum(tensor.numel() for tensor in tensors() if id(tensor) not in before) == 0
    assert alone.missing() == 0
