"""The order of evidence: record, error file, kernel, log, samples, exit status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memtop.supervisor.diagnosis.diagnose import diagnose
from memtop.supervisor.diagnosis.values import PROVEN, SAID, Evidence, Kind, OomRecord
from memtop.supervisor.recovery.external import remedies_for_command
from memtop.supervisor.recovery.policy import SURE
from tests.diagnosis.logs import GIB, of

DISK = "OSError: [Errno 28] No space left on device: '/data/x'\n"


def record(**about: Any) -> OomRecord:
    message = "CUDA out of memory. Tried to allocate 1.23 GiB."
    return OomRecord(**({"rank": 2, "time": 10.0, "message": message, "error": "torch.OutOfMemoryError"} | about))


def error_file(message: str, time: int = 100, stack: str = "") -> str:
    return json.dumps({"message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": str(time)}}})


def test_the_order_of_evidence() -> None:
    whole: dict[str, Any] = {
        "exit_status": -9,
        "records": (record(),),
        "error_files": (error_file("MemoryError: "),),
        "cgroup_oom_kills": 1,
        "host_peak_fraction": 0.99,
    }
    assert of(DISK, **whole, asked_to_stop=True).reason == "asked_to_stop"
    found = of(DISK, **whole)
    assert (found.source, found.kind, found.rank) == ("record", Kind.GPU_OOM, 2)
    del whole["records"]
    found = of(DISK, **whole)
    assert (found.source, found.kind) == ("error_file", Kind.HOST_OOM_ALLOC)
    del whole["error_files"]
    found = of(DISK, **whole)
    assert (found.source, found.kind) == ("kernel", Kind.HOST_OOM_KILLED)
    assert found.confidence > 0.95
    whole["cgroup_oom_kills"] = 0
    found = of(DISK, **whole)
    assert (found.source, found.kind) == ("words", Kind.DISK_FULL)
    del whole["cgroup_oom_kills"]
    found = of("step 1/9 loss 2.0\n", **whole)
    assert (found.source, found.kind) == ("samples", Kind.HOST_OOM_KILLED)
    del whole["host_peak_fraction"]
    found = of("step 1/9 loss 2.0\n", **whole)
    assert (found.source, found.kind, found.reason) == ("exit_status", Kind.NOT_MEMORY, "killed_by_something")


@pytest.mark.parametrize("status", [-9, 137])
@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", False),
        ("step 3/9 loss 1.0\nValueError: caught before\n" * 3, False),
        ("Killed\n", True),
        ("  exitcode  : -9 (pid: 8158)\n", True),
        ("ValueError: caught before\nline 3:  438 Killed  python train.py\n", True),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n", True),
    ],
)
def test_sigkill_alone_is_unexplained_and_a_suspicion_if_the_log_reports_it(status: int, text: str, reported: bool) -> None:
    """Neither makes a setting smaller."""
    alone = of(text, exit_status=status)
    assert (alone.kind, alone.reason) == (
        (Kind.HOST_OOM_KILLED, None) if reported else (Kind.NOT_MEMORY, "killed_by_something")
    )
    assert not alone.of_memory or alone.confidence < SURE
    assert "by hand" in alone.summary
    assert all(remedy.id == "who_killed" for remedy in remedies_for_command(alone))
    for known in ({"cgroup_oom_kills": 0}, {"host_peak_fraction": 0.41}, {"cgroup_oom_kills": 0, "host_peak_fraction": 0.99}):
        found = of(text, exit_status=status, **known)
        assert (found.kind, found.reason) == (Kind.NOT_MEMORY, "killed_by_something"), known
    near = of(text, exit_status=status, host_peak_fraction=0.97)
    assert near.kind is Kind.HOST_OOM_KILLED
    assert near.confidence > 0.5
    between = of(text, exit_status=status, host_peak_fraction=0.9)
    assert (between.kind, between.confidence) == (alone.kind, alone.confidence)


COMPILER = (
    "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n"
    "ninja: build stopped: subcommand failed.\nRuntimeError: Error building extension 'fused_adam'\n"
)


@pytest.mark.parametrize(
    "text",
    [
        COMPILER,
        "c++: internal compiler error: Killed (program cc1plus)\nPlease submit a full bug report\n",
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)\nninja: build stopped: subcommand failed.\n",
        "collect2: fatal error: ld terminated with signal 9 [Killed]\ncompilation terminated.\n",
        "clang++: error: unable to execute command: Killed\n",
        "make: *** [Makefile:3: all] Error 137\n",
        "  process didn't exit successfully: `rustc --crate-name tokenizers` (signal: 9, SIGKILL: kill)\n",
    ],
)
def test_a_compiler_that_was_killed_is_a_suspicion_that_evidence_settles(text: str) -> None:
    """It was SIGKILL, not SIGTERM, and it precedes the failure of the build."""
    alone = of(text, exit_status=1)
    assert (alone.kind, alone.source, alone.confidence < SURE) == (Kind.HOST_OOM_KILLED, "words", True)
    counted = of(text, exit_status=1, cgroup_oom_kills=1, cgroup_killed_near_end=True)
    assert (counted.kind, counted.source, counted.confidence >= 0.95) == (Kind.HOST_OOM_KILLED, "kernel", True)
    assert of(text, exit_status=1, host_peak_fraction=0.97).confidence > SURE
    assert of(text, exit_status=1, cgroup_oom_kills=0).reason == "killed_by_something"


def test_a_program_that_trains_without_the_extension_that_was_not_built() -> None:
    steps = "".join(f"step {number}/9000 loss 2.0\n" for number in range(500))
    assert of(COMPILER + steps + "KeyError: 'labels'\n", exit_status=1).reason == "python_error"
    assert of(COMPILER + steps, exit_status=-9).reason == "killed_by_something"
    assert of(steps + COMPILER + "KeyError: 'labels'\n", exit_status=1).kind is Kind.HOST_OOM_KILLED


def test_sigterm_is_not_taken_for_sigkill() -> None:
    for text in ("signal: terminated\n", "exit status 143\n", "[1]+  Terminated    python train.py\n"):
        assert of(text).reason == "sigterm"


@pytest.mark.parametrize(("status", "name"), [(-14, "SIGALRM"), (128 + 24, "SIGXCPU"), (-10, "SIGUSR1"), (-34, "SIGRTMIN")])
def test_another_signal_is_named(status: int, name: str) -> None:
    found = of("", exit_status=status)
    assert found.reason == "killed_by_something"
    assert name in found.summary
    assert "SIGKILL" not in found.summary


def test_a_reported_oom_kill_outweighs_samples() -> None:
    line = "slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch. Some of the step tasks have been OOM Killed.\n"
    assert of(line, exit_status=-9, cgroup_oom_kills=0, host_peak_fraction=0.2).kind is Kind.HOST_OOM_KILLED


def test_a_record_that_was_survived_is_no_cause() -> None:
    survived = record(survived=True)
    assert of("KeyError: 'labels'\n", exit_status=1, records=(survived,)).reason == "python_error"
    assert of(exit_status=0, records=(survived,)).reason == "finished"
    found = of(exit_status=1, records=(survived, record(time=30.0, rank=1), record(time=20.0, rank=0)))
    assert found.rank == 0, "the first fatal one"


def test_a_record_adds_what_its_message_does_not_print() -> None:
    figures = {"total_bytes": 20 * GIB, "free_bytes": GIB, "allocated_bytes": 14 * GIB, "reserved_bytes": 18 * GIB}
    found = of(records=(record(**figures, phase="backward", device_uuid="GPU-1"),), batch=32, seq_len=252, vocabulary=40960)
    assert found.kind is Kind.GPU_OOM_FRAGMENTED
    assert found.reserved_unallocated_bytes == 4 * GIB
    assert (found.phase, found.device_uuid, found.total_bytes) == ("backward", "GPU-1", 20 * GIB)
    assert found.requested_for is not None
    other = of(records=(record(**{**figures, "allocated_bytes": GIB, "reserved_bytes": GIB}),))
    assert (other.kind, other.other_process_bytes) == (Kind.GPU_OOM_OTHER_PROCESS, 18 * GIB)


@pytest.mark.parametrize(
    ("error", "message", "kind"),
    [
        ("MemoryError", "", Kind.HOST_OOM_ALLOC),
        (
            "numpy._core._exceptions._ArrayMemoryError",
            "Unable to allocate 8.00 GiB for an array with shape (1,)",
            Kind.HOST_OOM_ALLOC,
        ),
        (
            "RuntimeError",
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
            Kind.HOST_OOM_ALLOC,
        ),
        ("torch.AcceleratorError", "CUDA error: out of memory", Kind.GPU_OOM),
        ("torch.OutOfMemoryError", "", Kind.GPU_OOM),
        # Words of no pattern: the class decides.
        ("frob.OutOfMemoryError", "not enough memory for a block of 3 GiB", Kind.GPU_OOM),
    ],
)
def test_records_of_every_class(error: str, message: str, kind: Kind) -> None:
    found = of(records=(record(error=error, message=message, total_bytes=8 * GIB, free_bytes=GIB),))
    assert found.kind is kind
    assert (found.total_bytes is None) == (kind is Kind.HOST_OOM_ALLOC)


def test_the_earliest_error_file_that_names_a_cause() -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    late = error_file(oom, 200, 'Traceback (most recent call last):\n  File "/v/torch/_tensor.py", line 5, in backward\n')
    early = error_file("torch.distributed.DistBackendError: NCCL error: unhandled system error", 100)
    found = of(error_files=(late, early), exit_status=1)
    assert (found.kind, found.source, found.phase) == (Kind.GPU_OOM, "error_file", "backward")
    first = of(error_files=(late, error_file("ValueError: bad label", 100)), exit_status=1)
    assert (first.kind, first.reason) == (Kind.NOT_MEMORY, "python_error")


@pytest.mark.parametrize(
    "broken", ["", "{", "[1, 2]", '"MemoryError"', '{"message": 3}', '{"message": {"extraInfo": []}}', "\x00\ud800"]
)
def test_broken_error_files_are_no_evidence(broken: str) -> None:
    found = of(DISK, error_files=(broken,), exit_status=1)
    assert found.kind in (Kind.DISK_FULL, Kind.HOST_OOM_ALLOC)
    assert (found.source == "error_file") == ("MemoryError" in broken)


def test_kernel_records_are_compared_by_pid() -> None:
    line = "Memory cgroup out of memory: Killed process 30211 (pt_data_worker) total-vm:118220340kB, anon-rss:66012344kB"
    ours = of(exit_status=1, kernel_lines=(line,), member_pids=frozenset({30211}))
    assert (ours.kind, ours.source, ours.phase) == (Kind.HOST_OOM_KILLED, "kernel", "data")
    assert line in ours.evidence
    strangers = of("KeyError: 'x'\n", exit_status=1, kernel_lines=(line,), member_pids=frozenset({5}))
    assert strangers.reason == "python_error"


RAISED = "Traceback (most recent call last):\n  File \"train.py\", line 9, in <module>\nKeyError: 'labels'\n"
WORKER = "RuntimeError: DataLoader worker (pid 5120) is killed by signal: Killed. \n"
PEER = (
    "[rank0]: Traceback (most recent call last):\n"
    "[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:31\n"
    "E1003 12:00:00 123 api.py:869] failed (exitcode: -9) local_rank: 1 (pid: 438) of binary: python\n"
)


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (RAISED, 1, "python_error"),
        ("", 1, "no_evidence"),
        ("", -9, "killed_by_something"),
        ("Killed\n", 137, "killed_by_something"),
        (WORKER, 1, "killed_by_something"),
        ("", -11, "segfault"),
    ],
)
def test_an_earlier_kill_is_not_the_cause_of_the_end(text: str, status: int, reason: str) -> None:
    """The counter rose an hour ago, for a helper or for another program of a shared group."""
    for own in (False, True):
        found = of(text, exit_status=status, cgroup_oom_kills=2, cgroup_killed_near_end=False, killed_in_own_group=own)
        assert (found.kind, found.reason) == (Kind.NOT_MEMORY, reason)


@pytest.mark.parametrize(("text", "status"), [("", -9), ("Killed\n", 137), (WORKER, 1), (PEER, 1), ("", 1), (RAISED, -9)])
def test_a_kill_shortly_before_an_end_that_fits_is_proven(text: str, status: int) -> None:
    """The kernel may have killed only a loader worker or one rank: the program ends by itself
    seconds later."""
    found = of(text, exit_status=status, cgroup_oom_kills=1, cgroup_killed_near_end=True, host_peak_fraction=0.4)
    assert (found.kind, found.source, found.confidence) == (Kind.HOST_OOM_KILLED, "kernel", 0.98)
    assert "shortly before the end" in found.evidence[0]


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (RAISED, 1, "python_error"),
        ("CUDA error: an illegal memory access was encountered\n", 1, "illegal_memory_access"),
        ("", -11, "segfault"),
        ("", -15, "sigterm"),
    ],
)
def test_an_end_with_its_own_cause_is_not_blamed_on_a_kill(text: str, status: int, reason: str) -> None:
    """In a shared group the kill may concern another program; in the run's group, or with its pid,
    it was the run's."""
    near: dict[str, Any] = {"exit_status": status, "cgroup_oom_kills": 1, "cgroup_killed_near_end": True}
    found = of(text, **near)
    assert (found.kind, found.reason) == (Kind.NOT_MEMORY, reason)
    assert any("the kernel killed 1 process" in line for line in found.evidence), "a person can decide"
    assert of(text, **near, killed_in_own_group=True).kind is Kind.HOST_OOM_KILLED
    line = "Memory cgroup out of memory: Killed process 30211 (python3) total-vm:118220340kB"
    assert of(text, **near, kernel_lines=(line,), member_pids=frozenset({30211})).kind is Kind.HOST_OOM_KILLED
    assert of(text, **near, kernel_lines=(line,), member_pids=frozenset({7})).kind is Kind.NOT_MEMORY


@pytest.mark.parametrize(
    ("text", "status", "confidence"), [("", -9, 0.98), (PEER, 1, 0.8), (WORKER, 1, 0.8), (RAISED, 1, None), ("", -11, None)]
)
def test_a_kill_at_an_unknown_time(text: str, status: int, confidence: float | None) -> None:
    found = of(text, exit_status=status, cgroup_oom_kills=1)
    assert (found.confidence if found.of_memory else None) == confidence


@pytest.mark.parametrize(
    "message", ["RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", "RuntimeError: not enough GPU memory"]
)
def test_a_suspicion_in_an_error_file_stays_one(message: str) -> None:
    file = (error_file(message),)
    assert of(error_files=file, exit_status=1).confidence < 0.8
    killed = of(error_files=file, exit_status=1, cgroup_oom_kills=0)
    assert killed.of_memory == ("GPU" in message)


def test_samples_are_weighed_against_an_error_file() -> None:
    """A writer failed although the disk has room: the message alone would mean a full disk."""
    file = (error_file("RuntimeError: PytorchStreamWriter failed writing file data/3: file write failed"),)
    assert of(error_files=file, exit_status=1, disk_free_bytes=900 * GIB).confidence < 0.5
    full = of(error_files=file, exit_status=1, disk_free_bytes=0)
    assert (full.kind, full.confidence >= 0.95) == (Kind.DISK_FULL, True)
    sure = of(
        error_files=(error_file("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),), exit_status=1
    )
    assert (sure.kind, sure.source, sure.confidence >= 0.95) == (Kind.GPU_OOM, "error_file", True)
    worker = (error_file(WORKER.strip()),)
    proven = of(error_files=worker, exit_status=1, cgroup_oom_kills=1, cgroup_killed_near_end=True)
    assert (proven.kind, proven.source) == (Kind.HOST_OOM_KILLED, "kernel")


def test_the_context_of_the_process_is_not_another_process() -> None:
    """20 GiB, 0.5 free, 18 reserved: the rest is the process's context, not another program."""
    figures = {"total_bytes": 20 * GIB, "free_bytes": GIB // 2, "allocated_bytes": 17 * GIB, "reserved_bytes": 18 * GIB}
    found = of(records=(record(**figures),))
    assert (found.kind, found.other_process_bytes) == (Kind.GPU_OOM, None)


def test_the_runs_other_ranks_on_the_gpu_are_not_other_processes() -> None:
    figures = {"total_bytes": 20 * GIB, "free_bytes": GIB, "allocated_bytes": 6 * GIB, "reserved_bytes": 6 * GIB}
    shared = record(**figures, device_uuid="GPU-1")
    assert of(records=(shared,)).kind is Kind.GPU_OOM_OTHER_PROCESS
    found = of(records=(shared,), gpu_run_bytes={"GPU-1": 18 * GIB, "GPU-2": 3 * GIB})
    assert found.kind is Kind.GPU_OOM
    strangers = of(records=(shared,), gpu_run_bytes={"GPU-1": 7 * GIB, "GPU-2": 3 * GIB})
    assert (strangers.kind, strangers.other_process_bytes) == (Kind.GPU_OOM_OTHER_PROCESS, 12 * GIB)


def test_processes_in_a_message_can_belong_to_the_run() -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "24.00 GiB of which 1.00 GiB is free. Process 77 has 16.00 GiB memory in use. Including non-PyTorch memory, this "
        "process has 7.00 GiB memory in use. Of the allocated memory 6.00 GiB is allocated by PyTorch, and 0.50 GiB is "
        "reserved by PyTorch but unallocated."
    )
    offline = of(text, exit_status=1)
    assert (offline.kind, offline.other_process_pids) == (Kind.GPU_OOM_OTHER_PROCESS, (77,))
    found = of(text, exit_status=1, member_pids=frozenset({77, 78}), gpu_run_bytes={"GPU-1": 23 * GIB})
    assert (found.kind, found.other_process_pids, found.other_process_bytes) == (Kind.GPU_OOM, (), 0)


def test_the_batch_of_the_work_that_failed_names_the_logits() -> None:
    """The run's settings can differ: an evaluation has another batch."""
    known: dict[str, Any] = {"batch": 32, "seq_len": 252, "vocabulary": 40960}
    request = record(message="CUDA out of memory. Tried to allocate 315.00 MiB.", batch=8)
    assert of(records=(request,), **known).requested_for == "the logits (B 8 x T 252 x V 40960, fp32)"
    assert of(records=(record(message=request.message),), **known).requested_for is None


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (-15, "sigterm"),
        (143, "sigterm"),
        (130, "keyboard_interrupt"),
        (-11, "segfault"),
        (134, "aborted"),
        (3, "no_evidence"),
        (-7, "bus_error"),
    ],
)
def test_an_exit_status_alone(status: int, reason: str) -> None:
    found = of("step 1/9 loss 2.0\n", exit_status=status)
    assert (found.kind, found.reason) == (Kind.NOT_MEMORY, reason)


def test_a_bus_error_with_a_full_shm() -> None:
    assert of(exit_status=-7, shm_free_bytes=4096).kind is Kind.SHM_EXHAUSTED
    assert of(exit_status=-7, shm_free_bytes=4 * GIB).reason == "bus_error"
    launcher = "  exitcode  : -7 (pid: 8158)\n  traceback : Signal 7 (SIGBUS) received by PID 8158\n"
    assert of(launcher, exit_status=1).reason == "bus_error"
    assert of(launcher, exit_status=1, shm_free_bytes=4096).kind is Kind.SHM_EXHAUSTED


@pytest.mark.parametrize(("status", "reason"), [(-6, "aborted"), (-11, "segfault"), (-15, "sigterm")])
def test_a_launcher_reports_the_signal(status: int, reason: str) -> None:
    for words in (
        f"failed (exitcode: {status}) local_rank: 0 (pid: 438) of binary: python",
        f"exits with return code = {status}",
    ):
        assert of(words + "\n2024 next line\n", exit_status=1).reason == reason


def test_an_empty_log() -> None:
    found = diagnose([])
    assert (found.kind, found.reason, found.evidence) == (Kind.NOT_MEMORY, "no_evidence", ())


REFUSED = "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 14155776 bytes. Error code 12 (Cannot allocate memory)"  # noqa: E501


@pytest.mark.parametrize(
    ("limit", "fullest", "named"), [(4 << 30, 0.12, True), (4 << 30, None, True), (4 << 30, 0.97, False), (None, 0.12, False)]
)
def test_a_limit_of_address_space_refuses_while_there_is_memory(limit: int | None, fullest: float | None, named: bool) -> None:
    evidence = Evidence(exit_status=1, address_space_bytes=limit, host_peak_fraction=fullest)
    found = diagnose([REFUSED.encode()], evidence)
    assert found.kind is Kind.HOST_OOM_ALLOC
    assert found.address_space_bytes == (limit if named else None)
    words = ": the program's address space is limited to 4.00 GiB (ulimit -v)."
    assert found.summary == "An allocation of 14 MiB of host memory failed" + (words if named else ".")


def test_a_limit_of_address_space_does_not_concern_the_gpu() -> None:
    card = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 19.58 GiB"
    found = diagnose([card.encode()], Evidence(exit_status=1, address_space_bytes=4 << 30))
    assert found.kind.of_gpu
    assert found.address_space_bytes is None


@pytest.mark.parametrize(
    ("error", "device", "source"),
    [
        ("RuntimeError", None, "words"),
        ("RuntimeError", "GPU-0", "record"),
        ("OutOfMemoryError", None, "record"),
        ("torch.OutOfMemoryError", None, "record"),
    ],
)
def test_only_its_words_say_that_a_process_without_a_gpu_ran_out_of_gpu_memory(
    error: str, device: str | None, source: str
) -> None:
    message = "CUDA out of memory. Tried to allocate 2.00 GiB"
    record = OomRecord(rank=0, time=1.0, error=error, message=message, survived=False, device_uuid=device)
    found = diagnose([f"{error}: {message}".encode()], Evidence(exit_status=1, records=(record,)))
    assert found.kind is Kind.GPU_OOM
    assert (found.source, found.confidence >= PROVEN) == (source, source == "record")
    assert found.summary.endswith("only the words of its error name one.") == (source == "words")
    # Where a line has no room, only the beginning is left.
    assert found.summary.startswith("The program says that the GPU ran out of memory") == (source == "words")
    assert found.name_at(3) == f"gpu_oom at update 3{SAID if source == 'words' else ''}"


@pytest.mark.parametrize(("has_gpu", "begins"), [(False, "The program says that GPU 0 ran out of"), (True, "GPU 0 ran out of")])
def test_a_log_that_names_a_gpu_where_there_is_none_is_only_said(has_gpu: bool, begins: str) -> None:
    log = b"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 19.58 GiB of which 1.06 GiB is free."
    found = diagnose([log], Evidence(exit_status=1, has_gpu=has_gpu))
    assert found.by_words
    assert found.summary.startswith(begins)
    assert found.summary.endswith("memtop has seen no GPU here: only the words of the program name one.") != has_gpu
