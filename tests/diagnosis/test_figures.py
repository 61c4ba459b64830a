"""Which figures a message prints, in words that no table of patterns knows."""

from __future__ import annotations

from typing import Any

import pytest

from memtop.supervisor.diagnosis import figures
from tests.diagnosis.logs import GIB, of

MIB, KIB = 1 << 20, 1 << 10


def printed(text: str) -> dict[str, int]:
    """The figures of a text, without those that it does not print."""
    found = figures.read(text)
    named: dict[str, Any] = {name: getattr(found, name) for name in ("requested", "free", "total", "allocated", "allowed")}
    return {name: value for name, value in named.items() if value is not None}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The word stands in front of the size, behind it, or is its name.
        ("arena: cannot allocate 3.5 GiB", {"requested": 7 * GIB // 2}),
        ("unable to allocate 3. GiB for a table", {"requested": 3 * GIB}),
        ("3 GiB of device memory could not be allocated", {"requested": 3 * GIB}),
        ("the layer (4096 bytes) could not be reserved", {"requested": 4096}),
        ("2 GiB is free", {"free": 2 * GIB}),
        ("2 GiB of GPU memory is available", {"free": 2 * GIB}),
        ("8 GiB total capacity", {"total": 8 * GIB}),
        ("only 12 MB left", {"free": 12 * MIB}),
        ("1 GiB already allocated", {"allocated": GIB}),
        ("free memory: 2 GiB", {"free": 2 * GIB}),
        ("totalFreeSpace=2GB", {"free": 2 * GIB}),
        ('{"free_bytes": 2147483648, "total_bytes": 8589934592}', {"free": 2 * GIB, "total": 8 * GIB}),
        ("Currently allocated: 3.00 GiB | Requested: 1.50 GiB", {"allocated": 3 * GIB, "requested": 3 * GIB // 2}),
        ("wants more memory (5 GiB) than is available (3 GiB)", {"free": 3 * GIB}),
        ("needs more memory (5 GiB) than is available (3 GiB)", {"requested": 5 * GIB, "free": 3 * GIB}),
        ("needs 5 GiB but only 3 GiB is available", {"requested": 5 * GIB, "free": 3 * GIB}),
        ("allocation of 4 GiB failed (in use: 1 GiB)", {"requested": 4 * GIB, "allocated": GIB}),
        # Units, and none.
        ("cannot allocate 65536-byte block (131072 in use)", {"requested": 65536, "allocated": 131072}),
        ("failed to allocate 25,600,000 bytes", {"requested": 25600000}),
        ("failed to allocate 1.5e+09 bytes", {"requested": 1500000000}),
        ("failed to allocate 512 Mbytes", {"requested": 512 * MIB}),
        ("Total memory (GiB): 140.5", {"total": 281 * GIB // 2}),
        ("free_mb=512, largest_mb=256", {"free": 512 * MIB}),
        ("failed to allocate 7 kilobytes", {"requested": 7 * KIB}),
        ("failed to allocate buffer of size 1073741824", {"requested": GIB}),
        ("alloc size 1073741824, current free memory size: 12345 on card 0", {"requested": GIB, "free": 12345}),
        ("Available memory of 0 is less than the requested bytes of 4096000", {"free": 0, "requested": 4096000}),
        ("Used 41.5G of 16.0G hbm", {"total": 16 * GIB}),
        ("free memory on card 1 (3.0/4.0 GiB)", {"free": 3 * GIB, "total": 4 * GIB}),
        ("check failed: requested <= available, 300000 > 200000", {"requested": 300000, "free": 200000}),
        (
            "in use : 3000000 plus alloc size : 200000 is more than total mem size : 3100000.",
            {"allocated": 3000000, "requested": 200000, "total": 3100000},
        ),
        ("alloc fail type TemporaryBuffer dev 0 size 2048000 bytes", {"requested": 2048000}),
        ("not possible; current usage:\n* total: 9 GiB", {"allocated": 9 * GIB}),
        ("not possible; the card:\n* total: 9 GiB", {"total": 9 * GIB}),
        ("requested 8192000 bytes, but max alloc size of the card is 4096000 bytes", {"requested": 8192000}),
        ("device limit: 16 GiB, pool limit: 8 GiB", {"total": 16 * GIB, "allowed": 8 * GIB}),
    ],
)
def test_a_size_means_what_the_word_next_to_it_says(text: str, expected: dict[str, int]) -> None:
    assert printed(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "OOM when allocating tensor with shape[123008,500] and type float",
        "allocating tensor with shape (100000, 200000) failed",
        "requested 40000 tokens, 30000 available",
        "failed to allocate 70000 blocks",
        "cannot load a 7B model",
        "reading at 12.5 MB/s, 3 GB/s needed",
        "cannot allocate memory at alloc_cpu.cpp:114, line 20481",
        "largest free block: 2 GiB, peak usage: 3 GiB, max allocated: 4 GiB",
        "model size = 4.5 GiB, file size = 4.6 GiB",
        "weight size (3 GiB) and temporary buffer size (1 GiB)",
        "Total usage >= 22.5G",
        "cudaMalloc failed at 0x7f3a00000000, pid 123456, type = 20000, id: 30000",
        "fragmentation: 680.30MiB",
        "out of memory (usage: tensors) on card 0:NC 0, now:",
        "the max supported alloc size is 4096000 bytes",
        "calloc 2097152 / 10485760 bytes",
        "OutOfMemory Error in allocate: 0",
        "Out of memory. Requested 17476.75; Free 2255.5",
        "2024-10-22 11:24:55 allocation failed",
    ],
)
def test_numbers_that_are_no_sizes_of_the_failure(text: str) -> None:
    assert printed(text) == {}


RAN_OUT = "RuntimeError: CUDA error: out of memory\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # On lines of their own below, and in a sentence that a fold breaks.
        (f"{RAN_OUT}  Currently allocated : 3.00 GiB\n  Requested           : 1.00 GiB\n", (GIB, 3 * GIB, None)),
        (f"{RAN_OUT}- free: 40960\n- requested: 8192000\n", (8192000, None, 40960)),
        (
            "RuntimeError: CUDA error: out of memory: cannot get 2 GiB, available memory is only\n   3.5 MB.\n",
            (None, None, 3.5 * MIB),
        ),
        (f"{RAN_OUT}The cache is missing.\nFree memory (MiB): 3.5\n", (None, None, 7 * MIB // 2)),
        # What a healthy program prints, the next failure, a record of a logger and a line without a
        # size end the report.
        (f"{RAN_OUT}gpu memory 2 GiB of 9 GiB used, host 3 GiB free\n", (None, None, None)),
        (f"{RAN_OUT}ValueError: 3 GiB free\n", (None, None, None)),
        (f"{RAN_OUT}12:00:01 host: 3 GiB free\n", (None, None, None)),
        (f"{RAN_OUT}Traceback follows\n3 GiB free\n", (None, None, None)),
    ],
)
def test_the_report_of_a_failure_goes_on_below(text: str, expected: tuple[int | None, int | None, int | None]) -> None:
    found = of(text)
    assert (found.requested_bytes, found.allocated_bytes, found.free_bytes) == expected


def test_what_a_pattern_reads_is_not_read_again_as_something_else() -> None:
    """The total of CuPy's message is its pool's, not the card's."""
    found = of("cupy.cuda.memory.OutOfMemoryError: out of memory to allocate 4096000 bytes (total 8192000 bytes)\n")
    assert (found.requested_bytes, found.allocated_bytes, found.total_bytes) == (4096000, 8192000, None)


def test_a_refusal_for_lack_of_host_memory_is_one_of_a_budget() -> None:
    found = of("Error: model requires more system memory (8.0 GiB) than is available (2.0 GiB)\n")
    assert (found.kind.value, found.reason) == ("host_oom_alloc", "memory_budget")
    assert (found.requested_bytes, found.free_bytes) == (8 * GIB, 2 * GIB)
    assert "8.00 GiB was needed, 2.00 GiB was free" in found.summary


@pytest.mark.parametrize(
    ("text", "kind", "requested", "free"),
    [
        (
            "RuntimeError: the available GPU memory is 3.5 GB, which is less than the sum of weights (5 GB)",
            "gpu_oom",
            None,
            7 * GIB // 2,
        ),
        ("RuntimeError: No enough gpu memory for kv cache.", "gpu_oom", None, None),
        ("RuntimeError: Not enough memory to handle 9000 total tokens with 3 prefill tokens.", "gpu_oom", None, None),
        (
            'msg="model request too large for system" requested="8.0 GiB" available=2147483648',
            "host_oom_alloc",
            8 * GIB,
            2 * GIB,
        ),
    ],
)
def test_a_program_that_refuses_to_start(text: str, kind: str, requested: int | None, free: int | None) -> None:
    found = of(f"ERROR {text}\n")
    assert (found.kind.value, found.reason) == (kind, "memory_budget")
    assert (found.requested_bytes, found.free_bytes) == (requested, free)


def test_the_statistics_of_tensorflows_allocator_stand_below_its_blocks() -> None:
    blocks = "".join(
        f"I tensorflow/core/bfc_allocator.cc:661] Chunk at 0x7f{number:08x} of size 256\n" for number in range(400)
    )
    found = of(
        "W tensorflow/core/bfc_allocator.cc:275] Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.00GiB.\n"
        f"{blocks}I tensorflow/core/bfc_allocator.cc:702] Stats: \nLimit:   8589934592\nInUse:   6442450944\n"
        "MaxInUse:  7516192768\n"
    )
    assert (found.requested_bytes, found.allocated_bytes, found.total_bytes) == (2 * GIB, 6 * GIB, None)


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("CUDA error: out of memory on device 3", 3),
        ("CUDA error: out of memory (cuda:1, 24 GB)", 1),
        ("CUDA error: out of memory, device_id: 2, size: 4096000", 2),
        ("CUDA error: out of memory; /job:local/device:DML:1", 1),
        ("CUDA error: out of memory on GPU 0 and GPU 1", None),
        ("CUDA error: out of memory on a GPU 24 GB large", None),
        ("CUDA error: out of memory on a GPU 1.5 GB large", None),
        ("CUDA error: out of memory on the device: 80% in use", None),
    ],
)
def test_the_device_that_a_message_names(text: str, index: int | None) -> None:
    assert of(f"RuntimeError: {text}\n").device_index == index


def test_the_device_of_the_first_report_of_a_failure() -> None:
    warned = "host-1:12:34 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
    found = of(f"{warned}host-1:12:34 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 4096000 bytes\n")
    assert (found.device_index, found.requested_bytes) == (3, 4096000)


def test_the_same_sentence_about_host_memory() -> None:
    found = of("terminate called\n  what():  Error: CPU can't allocate memory. Tried to allocate 99.5 GB\n")
    assert (found.kind.value, found.requested_bytes) == ("host_oom_alloc", 199 * GIB // 2)


@pytest.mark.parametrize(
    ("text", "kind", "requested"),
    [
        ("Buffer size (8192000) exceeds the max buffer size limit (4096000).", "gpu_oom", 8192000),
        ("buffer 'data' size 8192000 is larger than buffer maximum of 4096000", "gpu_oom", 8192000),
        (
            "Out of Memory: Not enough space to allocate 8192000 B DRAM buffer across 4 banks, where each bank needs to"
            " store 2048000 B",
            "gpu_oom",
            8192000,
        ),
        ("Can't start. Failed to allocate a buffer of\nsize 8192000.", "host_oom_alloc", 8192000),
        ("GPU limit passed: requested 2305843008391495680 bytes, cannot allocate", "gpu_oom", None),
        (
            "store.cc:12: Failed to put object 64f in object store because it is full. Object size is 8192000 bytes.",
            "shm_exhausted",
            8192000,
        ),
        ("W0101 10:00:00.1 12 allocator.cc:1] Cannot allocate 8.0MB in GPU 0, available 1.0MB", "gpu_oom", 8 * MIB),
        ("ValueError: batch size (8192000) exceeds the max batch size limit (4096000).", "not_memory", None),
        ("ValueError: Not enough space to allocate 8192000 banners", "not_memory", None),
    ],
)
def test_refusals_of_a_buffer(text: str, kind: str, requested: int | None) -> None:
    found = of(f"{text}\n")
    assert (found.kind.value, found.requested_bytes) == (kind, requested)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Caused by: wgpu error\n    Not enough memory left\n", "gpu_oom"),
        ("fatal: not enough memory left\n", "host_oom_alloc"),
        ("[E:onnxruntime] DmlExecutionProvider\\a.cpp(1): Not enough memory resources\n", "gpu_oom"),
        ("ERROR: shell: cgroup out of memory: killed 3 tasks on node7\n", "host_oom_killed"),
        ("ERROR: shell: out of memory, 3 tasks\n", "host_oom_alloc"),
    ],
)
def test_whose_memory_an_unknown_program_means(text: str, kind: str) -> None:
    assert of(text).kind.value == kind


@pytest.mark.parametrize(
    ("text", "free"),
    [
        ("CUDA error: out of memory: cannot allocate 2 GB on device; free host memory 120 GB; free device memory 1 GB\n", GIB),
        ("RuntimeError: CUDA error: out of memory\nHost memory available: 120 GB\nGPU memory free: 1 GB\n", GIB),
        ("MemoryError: Unable to allocate 3 GB\nGPU memory free: 40 GB\nfree memory: 1 GB\n", GIB),
    ],
)
def test_what_is_free_elsewhere_is_no_figure_of_the_failure(text: str, free: int) -> None:
    assert of(text, exit_status=1).free_bytes == free


def test_a_share_of_a_size_is_of_a_total() -> None:
    assert printed("memory used: 80% of 24 GB") == {"total": 24 * GIB}
