"""What the agent reads at each step of a program that does not use it: which optimizer, which
device, and at no cost.
"""

from __future__ import annotations

from pathlib import Path

from tests.train.test_agent import CUDA, TORCH, reports, run

TWO = """
Cuda.allocated, Cuda.reserved = [0, 30], [0, 50]
def told(self, device):
    asked.append(device)
    return (device * 100 + 1, device * 100 + 99)
asked = []
Cuda.mem_get_info = told
"""
"""Everything is on the second GPU; torch's current device is the first."""


def test_the_device_that_holds_the_memory_is_read_and_named(tmp_path: Path) -> None:
    code = """
optimizer.step()
Cuda.allocated, Cuda.reserved = [70, 30], [90, 50]
for _ in range(60):
    optimizer.step()
"""
    run(CUDA + TWO + TORCH + code, tmp_path)
    steps = reports(tmp_path)[1:]
    first, last = steps[0], steps[-1]
    names = ("allocated_bytes", "reserved_bytes", "peak_bytes", "device_uuid")
    assert [first[name] for name in names] == [30, 50, 15, "GPU-of-card-1"]
    assert [last[name] for name in names] == [70, 90, 15, "GPU-of-card-0"], "checked again once in a while"
    for step in steps:
        assert (step["device_uuid"], step["reserved_bytes"]) in (("GPU-of-card-1", 50), ("GPU-of-card-0", 90))


def test_a_trainers_peak_is_reset_on_the_device_that_was_read(tmp_path: Path) -> None:
    code = """
import memtop_agent as a
Cuda.reset_peak_memory_stats = lambda self, device: asked.append(device)
a.offer("stop")
print(a.readings()["reserved_bytes"], asked)
"""
    assert run(CUDA + TWO + code, tmp_path) == "50 [1]\n"


def test_a_failure_reports_the_device_that_its_message_names(tmp_path: Path) -> None:
    code = """
import memtop_agent as a
class OutOfMemoryError(RuntimeError): pass
a.oom(OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB"), phase="load")
a.oom(OutOfMemoryError("HIP out of memory"), phase="load")
a.oom(OutOfMemoryError("CUDA out of memory. GPU 7 has"), phase="load")
print(asked)
"""
    assert run(CUDA + TWO + code, tmp_path) == "[0, 1, 1]\n"
    names = ("device_uuid", "reserved_bytes", "free_bytes", "total_bytes")
    assert [[report[name] for name in names] for report in reports(tmp_path)[1:]] == [
        ["GPU-of-card-0", 0, 1, 99],
        ["GPU-of-card-1", 50, 101, 199],
        ["GPU-of-card-1", 50, 101, 199],
    ]


def test_an_allocator_without_statistics_leaves_them_unknown(tmp_path: Path) -> None:
    code = """
def refuse(self, device): raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")
Cuda.memory_stats_as_nested_dict = refuse
optimizer.step()
optimizer.step()
"""
    run(CUDA + TORCH + code, tmp_path)
    steps = reports(tmp_path)[1:]
    assert [(step["update"], step["reserved_bytes"], step["peak_bytes"]) for step in steps] == [
        (1, None, None),
        (2, None, None),
    ]


def test_freed_cache_is_counted_on_all_devices(tmp_path: Path) -> None:
    code = """
from memtop_agent import memory
def empty(): Cuda.reserved = [0, 30]
Cuda.allocated, Cuda.reserved, cuda.empty_cache = [0, 30], [25, 50], empty
print(memory.free_cache()["returned_device_bytes"])
"""
    assert run(CUDA + code, tmp_path) == "45\n"


def test_a_learning_rate_on_a_device_is_not_read(tmp_path: Path) -> None:
    """Without a GPU, `meta` is the torch device whose tensors cannot be read."""
    code = """
import torch
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.5)
for rate in (0.5, torch.tensor(0.25), torch.tensor(0.1, device="meta"), 2):
    optimizer.param_groups[0].update(lr=rate, params=[])
    optimizer.step()
"""
    run(code, tmp_path)
    assert [report["learning_rate"] for report in reports(tmp_path)[1:]] == [0.5, 0.25, None, 2.0]


def test_the_first_living_optimizer_counts_the_updates(tmp_path: Path) -> None:
    code = """
class Weak(Optimizer): pass
first, second = Weak(), Weak()
first.step(); second.step(); first.step(); second.step()
del first
second.step()
third = Weak()
third.step(); second.step()
"""
    run(TORCH + code, tmp_path)
    steps = reports(tmp_path)[1:]
    assert [step["update"] for step in steps] == [1, 2, 3, 4]
    # The time between the last step of one optimizer and the first of the next is not a step's
    # time.
    assert [step["step_seconds"] is None for step in steps] == [True, False, True, False]


def test_an_optimizer_is_not_kept_alive(tmp_path: Path) -> None:
    code = """
import weakref
gone = weakref.ref(optimizer)
optimizer.step()
del optimizer
print(gone())
"""
    assert run(TORCH + code, tmp_path) == "None\n"
