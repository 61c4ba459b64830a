"""The exchange of gradients over two ranks, and waits between them (`exchange_worker.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from memtop.train.exchange import GradientSum, plan_buckets
from tests.train.launching import two_ranks


def test_buckets_hold_every_element_once_and_the_last_parameters_first() -> None:
    shapes = [(5,), (300,), (4, 4), (0,), (1000,), (7,), (10, 10), (3,)]
    parameters = [torch.zeros(shape, dtype=torch.bfloat16 if 2 < at < 6 else torch.float32) for at, shape in enumerate(shapes)]
    plan = plan_buckets(parameters, 512)
    elements: dict[int, list[int]] = {number: [] for number in range(len(shapes))}
    for bucket in plan:
        assert 0 < bucket.size_bytes <= 512
        assert {parameters[number].dtype for number in bucket.numbers} == {bucket.dtype}
        if len(bucket.numbers) == 1:
            elements[bucket.numbers[0]] += range(bucket.start, bucket.start + bucket.length)
        else:
            assert bucket.length == sum(parameters[number].numel() for number in bucket.numbers)
            for number in bucket.numbers:
                elements[number] += range(parameters[number].numel())
    assert all(found == list(range(parameters[number].numel())) for number, found in elements.items())
    assert [bucket.numbers for bucket in plan] == [(6,), (4,), (4,), (4,), (4,), (1,), (1,), (1,), (5, 3), (7, 2, 0)]


class Queues:
    """Stands for torch.cuda's streams and NCCL; notes what is queued where, and what waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[str] = []
        self._running = ["backward"]
        copy, zeros = torch._foreach_copy_, torch.zeros

        def copied(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
            self.note(f"copy {len(targets)}")
            copy(targets, sources)

        @contextmanager
        def running(stream: Queue) -> Iterator[None]:
            self._running.append(stream.name)
            yield
            self._running.pop()

        for name, stand_in in {
            "new_group": lambda **options: None,
            "get_backend": lambda: "nccl",
            "broadcast": lambda tensor, src: None,
            "all_reduce": self._all_reduce,
        }.items():
            monkeypatch.setattr(torch.distributed, name, stand_in)
        monkeypatch.setattr(torch, "_foreach_copy_", copied)
        monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Queue(self, "exchange"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Queue(self, self._running[-1]))
        monkeypatch.setattr(torch.cuda, "stream", running)

    def _all_reduce(self, tensor: torch.Tensor, **options: Any) -> Reduction:
        if "group" in options:
            # On the CPU: this rank is here.
            assert tensor.numel() == 1
            return Reduction(lambda: None)
        self.note(f"sum {tensor.numel()}")
        return Reduction(lambda: self.note("wait for the sum"))

    def note(self, what: str) -> None:
        self.noted.append(f"{self._running[-1]}: {what}")


class Queue(NamedTuple):
    queues: Queues
    name: str

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:0")

    def wait_stream(self, other: Queue) -> None:
        self.queues.noted.append(f"{self.name}: wait for {other.name}")


class Reduction(NamedTuple):
    wait: Callable[[], None]


def test_on_a_gpu_sums_run_during_the_backward_pass_and_after_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = Queues(monkeypatch)
    accelerator: Any = SimpleNamespace(num_processes=2, process_index=0, device=torch.device("cuda:0"))
    model = torch.nn.Module()
    for number, size in enumerate((3, 100, 5)):
        model.register_parameter(f"p{number}", torch.nn.Parameter(torch.zeros(size)))
    exchange = GradientSum(accelerator, model, bucket_bytes=256)
    queues.noted.clear()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    exchange.begin()
    exchange.end()
    queues.note("the host is here")
    exchange.finish()
    large = ["exchange: wait for backward", "exchange: sum {}", "exchange: wait for the sum"]
    small = [
        "exchange: wait for backward",
        "exchange: copy 2",
        "exchange: sum 8",
        "exchange: wait for the sum",
        "exchange: copy 2",
    ]
    begun = [line.format(length) for length in (64, 36) for line in large] + small
    assert queues.noted == [*begun, "backward: the host is here", "backward: wait for exchange"]


def test_each_row_of_the_ring_holds_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd number of bf16 values leaves no place where fp32 values may begin."""
    Queues(monkeypatch)
    accelerator: Any = SimpleNamespace(num_processes=2, process_index=0, device=torch.device("cuda:0"))
    model = torch.nn.Module()
    for number, (size, dtype) in enumerate([(1, torch.float32), (2, torch.float32), (3, torch.bfloat16), (4, torch.bfloat16)]):
        model.register_parameter(f"p{number}", torch.nn.Parameter(torch.zeros(size, dtype=dtype)))
    exchange = GradientSum(accelerator, model, bucket_bytes=256)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    places: list[int] = []
    summed = torch.distributed.all_reduce

    def noted(tensor: torch.Tensor, **options: Any) -> Any:
        places.append(tensor.data_ptr() % 16)
        return summed(tensor, **options)

    monkeypatch.setattr(torch.distributed, "all_reduce", noted)
    for _ in range(2):
        exchange.begin()
        places.clear()
        exchange.end()
        assert places == [0, 0]
        exchange.finish()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks("tests.train.exchange_worker", tmp_path_factory.mktemp("exchange"))


def test_a_failure_at_every_place_of_an_update_blocks_no_rank(ranks: list[dict[str, Any]]) -> None:
    first, second = (result["placed"] for result in ranks)
    places, buckets, _ = ranks[0]["counts"]
    assert places > buckets > 5
    for result, (_, _, failures) in zip((first, second), (rank["counts"] for rank in ranks), strict=True):
        assert failures == len(result["oom"]) == 2 * places
        assert all(survived for _, _, survived in result["oom"])
    # Each update with a failure ran with half the micro-batch, the others with the whole one.
    assert [min(batch for batch, _ in splits) for _, splits in first["splits"]] == [4, *[2, 4] * (3 * places), 4]
    for name in ("weights", "losses", "digests", "splits", "settings"):
        assert first[name] == second[name], name


def test_failures_at_every_place_change_nothing(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["calm"]["oom"] == []
        for name in ("weights", "losses", "digests", "splits"):
            assert result["placed"][name] == result["calm"][name], name


def test_an_overflow_on_one_rank_leaves_out_the_step_on_all(ranks: list[dict[str, Any]]) -> None:
    first, second = (result["overflow"] for result in ranks)
    assert first == second
    # The weights at the beginning of each update: update 2, the second one, changed nothing.
    assert first["scale"] == 128
    assert first["changed"] == [False, True, False, True]


def test_ranks_wait_for_a_slow_rank_beyond_the_time_limit_of_the_exchange(tmp_path: Path) -> None:
    first, second = two_ranks("tests.train.exchange_worker", tmp_path, "waits")
    assert first == second
    assert first["updates"] == 0
