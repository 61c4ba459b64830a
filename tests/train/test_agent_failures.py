"""What the agent recognises as lack of memory, and how it reports one that ends a thread or the
program.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from memtop.train.agent import journal
from memtop.train.agent.failures import device_named, is_allocation_failure, is_lack_of_memory
from tests.train.test_agent import reports
from tests.train.test_processes import environment

RETRY, REPORT, NEITHER = (True, True), (False, True), (False, False)
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2251, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)


class OutOfResources(RuntimeError):
    """Triton's error for a kernel that is too large for the GPU."""


class XlaRuntimeError(RuntimeError):
    """JAX's error."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: can't allocate memory: you tried to"), RETRY),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried"), RETRY),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 7.43 GiB total capacity"), RETRY),
        (RuntimeError("CUDA driver error: out of memory"), RETRY),
        (RuntimeError("HIP error: out of memory"), RETRY),
        (RuntimeError("NPU out of memory. Tried to allocate 2.00 MiB"), RETRY),
        (RuntimeError("MPS backend out of memory (MPS allocated: 14.29 GiB, other allocations: 3.65 GiB)"), RETRY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), RETRY),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), RETRY),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), RETRY),
        (RuntimeError("Triton Error [CUDA]: out of memory"), RETRY),
        (RuntimeError("Error out of memory at line 380 in file /src/csrc/pythonInterface.c"), RETRY),
        (XlaRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 50677260416 bytes."), RETRY),
        (RuntimeError("std::bad_alloc"), RETRY),
        (MemoryError(), RETRY),
        (OSError(12, "Cannot allocate memory"), REPORT),
        (OSError("Cannot allocate memory (os error 12)"), REPORT),
        (RuntimeError("unable to mmap 18874496 bytes from file <filename not specified>: Cannot allocate memory (12)"), REPORT),
        (RuntimeError(NCCL + "Cuda failure 2 'out of memory'"), REPORT),
        (RuntimeError(NCCL + "Cuda failure 'out of memory'"), REPORT),
        # Look-alikes.
        (OutOfResources("out of resource: shared memory, Required: 147456, Hardware limit: 101376."), NEITHER),
        (XlaRuntimeError("RESOURCE_EXHAUSTED: grpc: received message larger than max (4194316 vs. 4194304)"), NEITHER),
        (RuntimeError(NCCL + "Cuda failure 719 'unspecified launch failure'"), NEITHER),
        (
            RuntimeError("NCCL error: System call (e.g. socket, malloc) or external library call failed"),
            NEITHER,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), NEITHER),
        (RuntimeError("CUDA error: device-side assert triggered"), NEITHER),
        (
            RuntimeError("unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)"),
            NEITHER,
        ),
        (OSError(28, "No space left on device"), NEITHER),
        (OSError(11, "Resource temporarily unavailable"), NEITHER),
        (OSError(2, "No such file or directory", "Cannot allocate memory.txt"), NEITHER),
        (ValueError("CUDA out of memory"), NEITHER),
    ],
)
def test_allocation_failures_are_retried_and_other_lack_of_memory_only_reported(
    error: BaseException, expected: tuple[bool, bool]
) -> None:
    assert (is_allocation_failure(error), is_lack_of_memory(error)) == expected


def test_the_device_in_an_errors_words() -> None:
    assert device_named("Tried to allocate 2.00 MiB (GPU 3; 7.43 GiB total capacity;") == 3
    assert device_named("GPU has a total capacity of 4 GiB") is None, "some builds print the number as a control byte"


def ends(folder: Path, code: str) -> tuple[int, str]:
    """How a program with the agent ends, and what it reports."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(folder), capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


# The kernel really refuses these: they exceed the program's limit of address space.
LIMIT = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
MAP = "import mmap\nmmap.mmap(-1, 1 << 40)\n"


@pytest.mark.parametrize(("request_", "error"), [("bytearray(1 << 40)", "MemoryError"), (MAP, "OSError")])
def test_a_failure_that_ends_the_program_is_reported_as_fatal(tmp_path: Path, request_: str, error: str) -> None:
    status, said = ends(tmp_path, LIMIT + request_)
    assert status == 1
    assert error in said, "the program's own error message is printed"
    record = reports(tmp_path)[1]
    assert (record["type"], record["error"], record["survived"]) == ("oom", error, False)


def test_a_thread_that_runs_out_of_memory_has_an_unknown_outcome(tmp_path: Path) -> None:
    thread = "import threading\nthread = threading.Thread(target=bytearray, args=(1 << 40,))\nthread.start(); thread.join()\n"
    status, said = ends(tmp_path, LIMIT + thread + "print('goes on')")
    assert status == 0
    assert "MemoryError" in said
    record = reports(tmp_path)[1]
    assert (record["type"], record["error"], record["survived"]) == ("oom", "MemoryError", None)


def open_sockets() -> int:
    targets = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(path.readlink()))
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return sum(target.startswith("socket:") for target in targets)


def test_an_absent_supervisor_uses_no_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[socket.socket] = []
    counted: list[int] = []
    enough = threading.Event()

    def made(*args: int) -> socket.socket:
        # A reference to each, because the garbage collector would close them.
        kept.append(socket.socket(*args))
        return kept[-1]

    def wait(seconds: float) -> None:
        if len(kept) == 50:
            counted.append(open_sockets())
            enough.set()
            threading.Event().wait()  # forever: the thread is a daemon

    monkeypatch.setattr(journal, "time", SimpleNamespace(sleep=wait))
    monkeypatch.setattr(journal, "socket", SimpleNamespace(socket=made, AF_UNIX=socket.AF_UNIX, SOCK_STREAM=socket.SOCK_STREAM))
    before = open_sockets()
    journal.Link(str(tmp_path / "missing.sock"), str(tmp_path), {}, lambda message: None).start()
    assert enough.wait(60)
    assert counted == [before]
