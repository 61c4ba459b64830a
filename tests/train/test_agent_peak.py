"""The allocator's peak, as the agent reports it."""

from __future__ import annotations

from pathlib import Path

from tests.train.test_agent import CUDA, TORCH, reports, run

HELD = "Cuda.peaks = property(lambda self: {'peak': 20 if self.resets else 33})\n"


def test_the_reserved_peak_is_reported_before_it_is_reset(tmp_path: Path) -> None:
    code = "import memtop_agent as a\na.offer('stop')\nprint([a.readings()['peak_reserved_bytes'] for _ in range(2)])"
    assert run(CUDA + HELD + code, tmp_path) == "[33, 20]\n"


def test_an_external_command_reports_its_rank_with_each_step(tmp_path: Path) -> None:
    run(CUDA + HELD + TORCH + "optimizer.step()", tmp_path)
    assert [report["peak_reserved_bytes"] for report in reports(tmp_path)[1:]] == [33]


def test_a_torch_without_uuids_leaves_them_unknown(tmp_path: Path) -> None:
    run(CUDA + TORCH + "optimizer.step()", tmp_path)
    assert [report["peak_reserved_bytes"] for report in reports(tmp_path)[1:]] == [None]


def test_retries_of_the_allocator_are_reported_and_unknown_without_it(tmp_path: Path) -> None:
    told = "Cuda.others = {'num_alloc_retries': 4, 'other': 1}\n"
    run(CUDA + told + TORCH + "optimizer.step()", tmp_path)
    assert [report["allocation_retries"] for report in reports(tmp_path)[1:]] == [4]
    (tmp_path / "none").mkdir()
    run(TORCH + "optimizer.step()", tmp_path / "none")
    assert [report["allocation_retries"] for report in reports(tmp_path / "none")[1:]] == [None]


def test_anonymous_memory_excludes_mapped_files(tmp_path: Path) -> None:
    code = """
import mmap, os, memtop_agent as a
SIZE = 64 << 20
def anonymous(): return a.readings()["anonymous_bytes"]
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
