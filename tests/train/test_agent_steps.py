"""What the agent reports of a program: each step, its memory, its waits for data, and its
offers."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from tests.train.test_agent import CUDA, TORCH, reports, run
from tests.train.test_processes import python

TWO = """
Cuda.allocated, Cuda.reserved = [0, 30], [0, 50]
def mem_get_info(self, device):
    asked.append(device)
    return (device * 100 + 1, device * 100 + 99)
asked = []
Cuda.mem_get_info = mem_get_info
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
    failures = [report for report in reports(tmp_path) if report["type"] == "oom"]
    assert [[report[name] for name in names] for report in failures] == [
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such setting")
def test_freed_memory_is_kept_until_the_cache_is_freed(tmp_path: Path) -> None:
    code = """
import resource
from memtop_agent import memory
def use(): return [b"x" * (8 << 20) for _ in range(4)]
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
memory.keep_freed_memory()
use()
held, before = memory.rss_bytes(), faults()
for _ in range(20): use()
print(faults() - before, held, memory.rss_bytes(), memory.free_cache()["returned_host_bytes"])
"""
    faults, held, later, freed = (int(word) for word in run(code, tmp_path).split())
    assert faults < 1000  # With the default it is 20 x 32 MiB / 4 KiB = 160,000.
    assert held <= later + (8 << 20)
    assert freed >= 24 << 20


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


HELD = "Cuda.peaks = property(lambda self: {'peak': 20 if self.resets else 33})\n"


def test_the_reserved_peak_is_reported_before_it_is_reset(tmp_path: Path) -> None:
    code = "import memtop_agent as a\na.offer('stop')\nprint([a.readings()['peak_reserved_bytes'] for _ in range(2)])"
    assert run(CUDA + HELD + code, tmp_path) == "[33, 20]\n"


def test_an_external_command_reports_its_reserved_peak_with_each_step(tmp_path: Path) -> None:
    run(CUDA + HELD + TORCH + "optimizer.step()", tmp_path)
    assert [report["peak_reserved_bytes"] for report in reports(tmp_path)[1:]] == [33]


def test_a_torch_without_peaks_leaves_them_unknown(tmp_path: Path) -> None:
    run(CUDA + TORCH + "optimizer.step()", tmp_path)
    assert [report["peak_reserved_bytes"] for report in reports(tmp_path)[1:]] == [None]


def test_retries_of_the_allocator_are_reported_and_unknown_without_it(tmp_path: Path) -> None:
    others = "Cuda.others = {'num_alloc_retries': 4, 'other': 1}\n"
    run(CUDA + others + TORCH + "optimizer.step()", tmp_path)
    assert [report["allocation_retries"] for report in reports(tmp_path)[1:]] == [4]
    (tmp_path / "none").mkdir()
    run(TORCH + "optimizer.step()", tmp_path / "none")
    assert [report["allocation_retries"] for report in reports(tmp_path / "none")[1:]] == [None]


def test_anonymous_memory_excludes_mapped_files(tmp_path: Path) -> None:
    code = """
import mmap, os, time, memtop_agent as a
SIZE = 64 << 20
def anonymous():
    time.sleep(0.2)  # a reading is kept for a tenth of a second
    return a.readings()["anonymous_bytes"]
first, resident = anonymous(), a.readings()["rss_bytes"]
shared = mmap.mmap(-1, SIZE)
for page in range(0, SIZE, 4096):
    shared[page] = 1
second = anonymous()
private = bytearray(os.urandom(1) * SIZE)
third = anonymous()
print(first <= resident, abs(second - first) < SIZE // 4, third - second > SIZE // 2)
"""
    assert run(code, tmp_path) == "True True True\n"


def test_a_failure_is_reported_with_the_memory_of_the_gpu(tmp_path: Path) -> None:
    card = "Cuda.mem_get_info = lambda self, device: (5, 100)\n"
    code = "import memtop_agent as a\na.oom(MemoryError('x' * 9000), update=3, phase='forward', survived=True)"
    run(CUDA + card + code, tmp_path)
    record = reports(tmp_path)[1]
    names = ("allocated_bytes", "reserved_bytes", "free_bytes", "total_bytes", "device_uuid")
    assert [record[name] for name in names] == [10, 20, 5, 100, "GPU-of-card-0"]
    assert (record["message"], record["error"], record["update"]) == ("x" * 4000, "MemoryError", 3)
    # A GPU that no longer answers: unknown values are null, and the report is still written.
    sick = "def gone(self, *_): raise RuntimeError('CUDA error')\nCuda.mem_get_info = Cuda.get_device_properties = gone\n"
    (tmp_path / "sick").mkdir()
    run(CUDA + sick + code, tmp_path / "sick")
    record = reports(tmp_path / "sick")[1]
    assert [record[name] for name in names] == [10, 20, None, None, None]


def test_offers_after_the_greeting_are_reported(tmp_path: Path) -> None:
    """A trainer reports that it is loading long before it offers commands."""
    code = "import memtop_agent as a\na.report('phase', phase='loading')\na.flush()\na.offer('stop', 'change')"
    run(code, tmp_path)
    offers = [report for report in reports(tmp_path) if "offers" in report]
    assert [(report["type"], report["offers"]) for report in offers] == [
        ("hello", ["free_cache"]),
        ("offers", ["free_cache", "stop", "change"]),
    ]


def test_immediate_offers_are_in_the_greeting(tmp_path: Path) -> None:
    run("import memtop_agent as a\na.offer('stop')", tmp_path)
    (hello,) = [report for report in reports(tmp_path) if "offers" in report]
    assert hello["offers"] == ["free_cache", "stop"]


# A real loader whose batches take 30 ms, and one that another thread reads during the training.
LOADER = """
import threading, time, torch
from torch.utils.data import DataLoader
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 3
    def __getitem__(self, at): time.sleep(0.03); return torch.ones(1)
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
def train(batches):
    for batch in batches:
        (weight * batch).sum().backward()
        optimizer.step()
"""


def test_the_time_inside_a_data_loader_is_reported_with_each_step(tmp_path: Path) -> None:
    run(LOADER + "train(DataLoader(Slow()))", tmp_path)
    steps = [report for report in reports(tmp_path) if report["type"] == "step"]
    assert len(steps) == 3
    assert [step["batch"] for step in steps] == [1, 1, 1]
    for step in steps[1:]:
        assert 0.03 <= step["data_wait_seconds"] <= step["step_seconds"]


def test_a_program_without_a_loader_has_no_data_wait(tmp_path: Path) -> None:
    run(LOADER + "train([torch.ones(1)] * 3)", tmp_path)
    steps = [report for report in reports(tmp_path) if report["type"] == "step"]
    assert [(step["data_wait_seconds"], step["batch"]) for step in steps] == [(None, None)] * 3


def test_a_prefetching_thread_is_not_a_data_wait(tmp_path: Path) -> None:
    ahead = """
batches = []
fetcher = threading.Thread(target=lambda: batches.extend(DataLoader(Slow())))
fetcher.start(); fetcher.join()
train(batches)
"""
    run(LOADER + ahead, tmp_path)
    steps = [report for report in reports(tmp_path) if report["type"] == "step"]
    assert [step["data_wait_seconds"] for step in steps] == [None, None, None]


def test_a_failing_loader_fails_as_without_the_agent(tmp_path: Path) -> None:
    failing = """
class Broken(Slow):
    def __getitem__(self, at): raise KeyError("row 7")
try:
    train(DataLoader(Broken()))
except KeyError as error:
    print(error)
"""
    assert run(LOADER + failing, tmp_path) == "'row 7'\n"


PLAIN = """
import hashlib, torch
import memtop_agent, memtop_agent.hooks as hooks, memtop_agent.memory as memory
if FAULT:
    place, name = FAULT
    def fail(*_, **__): raise ValueError("made to fail")
    setattr(eval(place), name, fail)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2, shuffle=True):
    model(x).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""
FAULTS = (
    ("memtop_agent.Agent", "adopt"),
    ("memtop_agent.Agent", "readings"),
    ("memtop_agent.Agent", "report"),
    ("memtop_agent.Agent", "take_commands"),
    ("hooks.LoaderWatch", "taken"),
    ("hooks.LoaderWatch", "drawn"),
    ("hooks", "learning_rate"),
    ("memory", "device_uuid"),
)


def test_a_fault_anywhere_in_a_step_leaves_the_weights_as_without_the_agent(tmp_path: Path) -> None:
    code = PLAIN.replace("import memtop_agent, memtop_agent.hooks as hooks, memtop_agent.memory as memory\n", "")
    wanted = python(code.replace("FAULT", "None"), dict(os.environ))
    for number, fault in enumerate((None, *FAULTS)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert run(PLAIN.replace("FAULT", repr(fault)), folder) == wanted, fault
        found = [report["type"] for report in reports(folder)] if (folder / "rank-0.jsonl").exists() else []
        # A step is reported before its commands are taken.
        assert found.count("step") == (6 if fault is None else 1 if fault[1] == "take_commands" else 0), fault
        assert found.count("warning") == (fault is not None and fault[1] != "report"), fault


LOADERS = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def draw(batches, batch, per_update):
    for number, x in enumerate(DataLoader(torch.randn(batches * batch, 4), batch_size=batch), 1):
        model(x).sum().backward()
        if number % per_update == 0:
            optimizer.step()
            with torch.no_grad():
                list(DataLoader(torch.randn(6, 4), batch_size=3))
"""


def test_the_batches_of_an_update_are_those_drawn_with_gradients(tmp_path: Path) -> None:
    run(LOADERS + "draw(9, 2, 2)\ndraw(2, 8, 1)\ndraw(3, 4, 1)", tmp_path)
    found = [report for report in reports(tmp_path) if report["type"] == "loop"]
    # After an epoch of four updates and a rest, two updates with another loader are too few.
    assert [loop["effective_batch"] for loop in found] == [4, 4]
    settings = [{name: knob["value"] for name, knob in loop["knobs"].items()} for loop in found]
    assert settings == [{"batch": 2, "accumulation": 2}, {"batch": 4, "accumulation": 1}]


def test_what_was_drawn_is_not_known_with_several_optimizers(tmp_path: Path) -> None:
    code = "other = torch.optim.SGD(model.parameters(), lr=0.1)\noptimizer.step()\nother.step()\ndraw(9, 2, 1)"
    run(LOADERS + code, tmp_path)
    assert not [report for report in reports(tmp_path) if report["type"] == "loop"]
