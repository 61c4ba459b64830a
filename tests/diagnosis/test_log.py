"""Lines of logs that are easily misread, most of them next to their opposite."""

from __future__ import annotations

import pytest

from memtop.supervisor import units
from memtop.supervisor.diagnosis.finding import parse_size
from memtop.supervisor.diagnosis.values import Kind, size
from memtop.supervisor.recovery.external import remedies_for_command
from tests.diagnosis.logs import GIB, MESSAGE, PRINTED, RAISED, STEPS, of


def test_a_complete_message_gives_all_its_figures() -> None:
    found = of(MESSAGE, batch=32, seq_len=252, vocabulary=40960)
    assert found.kind is Kind.GPU_OOM_FRAGMENTED
    assert found.requested_for == "the logits (B 32 x T 252 x V 40960, fp32)"
    assert found.context_bytes is not None
    assert found.context_bytes / GIB == pytest.approx(0.38, abs=0.005)
    assert found.other_process_bytes is not None
    assert found.other_process_bytes / GIB == pytest.approx(0.02, abs=0.005)
    assert found.summary == (
        "GPU 0 ran out of memory: it requested 1.23 GiB for the logits (B 32 x T 252 x V 40960, fp32), 1.06 GiB was free of "
        "19.58 GiB; the process held 18.50 GiB (94.5 %); 3.18 GiB was reserved but unallocated (fragmentation)."
    )


def test_a_message_with_only_the_request() -> None:
    found = of("CUDA out of memory. Tried to allocate 2.32 GiB", batch=2, seq_len=2048, vocabulary=151936)
    assert found.kind is Kind.GPU_OOM
    assert found.requested_bytes == 2491081032
    assert found.requested_for == "the logits (B 2 x T 2048 x V 151936, fp32)"
    assert found.total_bytes is None


@pytest.mark.parametrize(
    ("batch", "seq_len", "vocabulary", "name"),
    [
        (32, 251, 40960, "T 252"),
        (64, 252, 40960, "16 bit"),
        (32, 252, 32000, None),
        (None, 252, 40960, None),
        (0, 0, 0, None),
    ],
)
def test_logits_are_named_only_where_the_size_fits(batch: int | None, seq_len: int, vocabulary: int, name: str | None) -> None:
    found = of(MESSAGE, batch=batch, seq_len=seq_len, vocabulary=vocabulary)
    assert (name is None and found.requested_for is None) or (name is not None and name in (found.requested_for or ""))


def _message(others: str, *, allocated: str = "14.04 GiB", spare: str = "509.85 MiB") -> str:
    return (
        f"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 11.06 MiB is free. "
        f"{others}Of the allocated memory {allocated} is allocated by PyTorch, "
        f"and {spare} is reserved by PyTorch but unallocated."
    )


def test_the_named_process_can_be_the_run_itself() -> None:
    assert of(_message("Process 3258 has 14.73 GiB memory in use. ")).other_process_pids == ()
    both = of(_message("Process 3258 has 14.73 GiB memory in use. Process 77 has 9.00 GiB memory in use. "))
    assert both.other_process_pids == (77,)
    other = of(_message("Process 77 has 22.00 GiB memory in use. ", allocated="1.00 GiB", spare="0 bytes"))
    assert (other.kind, other.other_process_pids) == (Kind.GPU_OOM_OTHER_PROCESS, (77,))
    named = of(
        _message(
            "Process 77 has 9.00 GiB memory in use. Including non-PyTorch memory, this process has 14.73 GiB memory in use. "
        )
    )
    assert named.other_process_pids == (77,)


def test_figures_larger_than_the_gpu_give_no_share() -> None:
    wrapped = of(MESSAGE.replace("18.50 GiB", "17179869184.00 GiB"))
    assert wrapped.process_bytes is None
    spilled = of(MESSAGE.replace("18.50 GiB", "25.00 GiB").replace("14.94 GiB", "24.00 GiB"))
    assert "%" not in spilled.summary


def test_a_request_that_is_refused_although_memory_is_free() -> None:
    capped = of(
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 4.00 GiB is free. "
        "4.20 GiB allowed; Of the allocated memory 3.90 GiB is allocated by PyTorch, "
        "and 18.74 MiB is reserved by PyTorch but unallocated."
    )
    assert capped.allowed_bytes == parse_size("4.20GiB")
    assert "the program is limited to 4.20 GiB" in capped.summary
    assert (
        "although that much was free"
        in of(
            "XPU out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 4.00 GiB is free."
        ).summary
    )


def test_the_first_of_several_ranks_counts_and_a_rank_is_not_a_device() -> None:
    text = "".join(f"[rank{rank}]: {MESSAGE.replace('GPU 0', f'GPU {device}')}\n" for rank, device in ((3, 1), (1, 0)))
    found = of(text)
    assert (found.rank, found.device_index) == (3, 1)


def test_interleaved_messages_of_two_ranks() -> None:
    def rows(rank: int, request: str) -> list[str]:
        text = MESSAGE.replace("1.23 GiB", request)
        return [f"[rank{rank}]: {text[at : at + 70]}" for at in range(0, len(text), 70)]

    mixed = [row for pair in zip(rows(0, "1.23 GiB"), rows(1, "7.77 GiB"), strict=True) for row in pair]
    found = of("\n".join(mixed))
    assert (found.rank, found.requested_bytes) == (0, parse_size("1.23GiB"))
    assert found.reserved_unallocated_bytes == parse_size("3.18GiB")


def test_pinned_memory_is_host_memory() -> None:
    outer = (
        "RuntimeError: Caught RuntimeError in pin memory thread for device 1.\nOriginal Traceback (most recent call last):\n"
    )
    frame = '  File "/v/torch/utils/data/_utils/pin_memory.py", line 64, in pin_memory\n    return data.pin_memory(device)\n'
    pinned = of(f"{outer}{frame}RuntimeError: CUDA error: out of memory\n")
    assert (pinned.kind, pinned.device_index, pinned.phase) == (Kind.PINNED_HOST_OOM, 1, "data")
    other = of(f"{outer}{frame}RuntimeError: CUDA error: device-side assert triggered\n")
    assert (other.kind, other.reason) == (Kind.NOT_MEMORY, "device_side_assert")
    device = of('  File "/v/model.py", line 3, in forward\nRuntimeError: CUDA error: out of memory\n')
    assert device.kind is Kind.GPU_OOM


def test_no_space_in_shared_memory_or_on_the_disk() -> None:
    assert of("RuntimeError: unable to write to file </torch_12_34_5>: No space left on device (28)").kind is Kind.SHM_EXHAUSTED
    assert of("OSError: [Errno 28] No space left on device: '/data/run/step_100.pt'").kind is Kind.DISK_FULL
    frame = '  File "/usr/lib/python3.11/multiprocessing/synchronize.py", line 57, in __init__\n'
    semaphores = f"{frame}OSError: [Errno 28] No space left on device\n"
    assert of(semaphores).kind is Kind.SHM_EXHAUSTED
    writer = "RuntimeError: PytorchStreamWriter failed writing file data/3: file write failed"
    assert of(writer).kind is Kind.DISK_FULL
    assert of(writer, disk_free_bytes=0).confidence > 0.9
    assert of(writer, disk_free_bytes=900 * GIB).confidence < 0.5


@pytest.mark.parametrize("text", ["RuntimeError: received 0 items of ancdata", "OSError: [Errno 24] Too many open files: 'x'"])
def test_file_descriptors_are_not_shared_memory(text: str) -> None:
    assert of(text).reason == "fd_limit"


def test_an_error_of_ray_is_traced_to_its_cause() -> None:
    outer = "ray.exceptions.RayTaskError(OutOfMemoryError): ray::train() (pid=1, ip=10.0.0.1)\n"
    assert of(outer + MESSAGE).requested_bytes == parse_size("1.23GiB")
    host = of("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n")
    assert host.kind is Kind.HOST_OOM_KILLED


def test_on_chip_memory_of_a_kernel() -> None:
    text = "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 229440, Hardware limit: 101376. "
    assert of(text + "Reducing block sizes or `num_stages` may help.").reason == "triton_shared_memory"


def test_a_worker_killed_during_the_run_and_after_its_end() -> None:
    line = "RuntimeError: DataLoader worker (pid 130823) is killed by signal: Killed.\n"
    assert of(STEPS + line).kind is Kind.HOST_OOM_KILLED
    assert of(STEPS + "Training completed.\n" + line).reason == "teardown_noise"
    assert of(STEPS + line, exit_status=0).reason == "teardown_noise"


def test_the_kernels_victim_can_be_another_program() -> None:
    line = "Out of memory: Killed process 4167877 ({name}) total-vm:78782016kB, anon-rss:49186560kB\n"
    assert of(STEPS + line.format(name="MATLAB")).reason == "oom_kill_of_other_process"
    assert of(STEPS + line.format(name="python3")).kind is Kind.HOST_OOM_KILLED
    # Where the run's pids are known, they decide, not the name.
    assert of(line.format(name="python3"), member_pids=frozenset({12})).reason == "oom_kill_of_other_process"
    assert of(line.format(name="trn"), member_pids=frozenset({4167877})).kind is Kind.HOST_OOM_KILLED


@pytest.mark.parametrize(("words", "reason"), [("PREEMPTION", "preempted"), ("TIME LIMIT", "time_limit")])
def test_a_scheduler_ends_the_job(words: str, reason: str) -> None:
    text = f"slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-01-02T03:04:05 DUE TO {words} ***\n"
    for status in (None, 137, -9):
        assert of(STEPS + text + "srun: error: n1: task 0: Killed\n", exit_status=status).reason == reason


def test_asynchronous_errors_have_no_phase() -> None:
    frame = '  File "/v/torch/optim/adamw.py", line 600, in _multi_tensor_adamw\n'
    assert of(frame + "RuntimeError: CUDA error: an illegal memory access was encountered\n").phase == "unknown"
    assert of(frame + MESSAGE).phase == "optimizer"


@pytest.mark.parametrize(
    "text",
    [
        "Epoch: [14]  [ 420/1251]  lr: 0.000150  loss: 1.2  time: 0.6931  max mem: 30412\n",
        "NvMapMemAllocInternalTagged: 1075072515 error 12\nValueError: x\n",
        "    Max Memory :     25600 MB\n    Total Requested Memory :   25600.00 MB\nExited with exit code 1.\n",
        "usage: --oom-retries N  how often to try again after a CUDA out of memory error\n",
        "If you run into CUDA out of memory errors, reduce the batch size.\n",
        "try:\n    step()\nexcept torch.cuda.OutOfMemoryError:\n    pass\n",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n",
        '            "OOMKilled": false,\n            "ExitCode": 1,\n',
        "skilled labour, filled buffers, zoom, bloom, room\n",
    ],
)
def test_mentions_of_memory_are_not_a_failure(text: str) -> None:
    found = of(text)
    assert found.kind is Kind.NOT_MEMORY
    assert found.requested_bytes is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("273.GiB", 273 * GIB),
        ("17179869184.00GiB", None),
        ("0bytes", 0),
        ("1.5KiB", 1536),
        ("8,589,934,592bytes", 8589934592),
        ("11.4TiB", 12534432556646),
        ("4.4GB", 4724464026),
        ("2359296", 2359296),
        ("9" * 40 + "GiB", None),
        (".GiB", None),
    ],
)
def test_printed_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("memory allocation of memory allocation of 20971522097152 bytes failed\n bytes failed\n", Kind.HOST_OOM_ALLOC, None),
        ("syncedmem.cpp:56] Check failed: error == cudaSuccess (2 vs. 0)  out of memory\n", Kind.GPU_OOM, None),
        ("RuntimeError: CUDA out of the memory. Tried to allocate 360.00 MiB\n", Kind.GPU_OOM, None),
        ("  exits with return code = -9\n2024-01-01 next line begins with a digit\n", Kind.HOST_OOM_KILLED, None),
        ("exit code: 1371\n", Kind.NOT_MEMORY, "no_evidence"),
        ("zsh: killed     python train.py\n", Kind.HOST_OOM_KILLED, None),
        ("dlerror: libnvinfer.so.7: cannot open shared object file\n" + RAISED, Kind.GPU_OOM_FRAGMENTED, None),
        ("ModuleNotFoundError: No module named 'flash_attn' (falling back)\n" + RAISED, Kind.GPU_OOM_FRAGMENTED, None),
        ('{"log":"' + MESSAGE + '\\n","stream":"stderr"}\n', Kind.GPU_OOM_FRAGMENTED, None),
        (f"[ERROR] failed: {MESSAGE}\nwandb:   train/loss 2.1\nwandb:   epoch 3 loss 1\n", Kind.GPU_OOM_FRAGMENTED, None),
        (RAISED + "wandb: Network error, entering retry loop.\nretrying request in 1.0s\n", Kind.GPU_OOM_FRAGMENTED, None),
        (
            "^CKeyboardInterrupt\nRuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n",
            Kind.NOT_MEMORY,
            "keyboard_interrupt",
        ),
        ("RuntimeError: DataLoader worker (pid(s) 20027) exited unexpectedly\n", Kind.NOT_MEMORY, "worker_died"),
    ],
)
def test_other_wordings(text: str, kind: Kind, reason: str | None) -> None:
    found = of(text)
    assert (found.kind, found.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("text", "reason", "option"),
    [
        ("Caused by: java.lang.OutOfMemoryError: Java heap space\n\tat scala.x(Y.scala:3)\n", "java_heap", "-Xmx"),
        ("java.lang.OutOfMemoryError: GC overhead limit exceeded\n", "java_heap", "-Xmx"),
        (
            "FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory\n",
            "node_heap",
            "--max-old-space-size",
        ),
        ("FATAL ERROR: Reached heap limit Allocation fai", "node_heap", "--max-old-space-size"),
    ],
)
def test_a_heap_that_its_program_limits(text: str, reason: str, option: str) -> None:
    for status in (None, 1, 134):
        found = of(text, exit_status=status)
        assert (found.kind, found.reason) == (Kind.HOST_OOM_ALLOC, reason)
        (only,) = remedies_for_command(found)
        assert option in only.why
        assert option.lstrip("-").split("=")[0] in (only.command or "")


def test_java_without_threads_is_no_lack_of_memory() -> None:
    found = of("java.lang.OutOfMemoryError: unable to create native thread: possibly out of memory or process limits reached\n")
    assert (found.kind, found.reason) == (Kind.NOT_MEMORY, "thread_limit")


@pytest.mark.parametrize(
    ("bytes_", "exact", "rough"),
    [
        (728 << 40, "728.0 TiB", "728.0 TiB"),
        (3 << 50, "3.0 PiB", "3.0 PiB"),
        (1023 << 30, "1023.00 GiB", "1023.0 GiB"),
        (389 << 20, "389 MiB", "389 MiB"),
    ],
)
def test_sizes_have_units_that_fit(bytes_: int, exact: str, rough: str) -> None:
    assert (size(bytes_), units.size(bytes_)) == (exact, rough)


@pytest.mark.parametrize("fold", ["\n", "\\\n", "\\\r\n", " \\\n    "])
def test_a_message_is_read_over_a_fold_in_a_word_and_up_to_a_cut_in_a_word(fold: str) -> None:
    message = f"RuntimeError: {PRINTED}".replace("already", f"alre{fold}ady").replace(")\n", "; 12.00 MiB fr")
    found = of(message)
    assert (found.kind, found.allocated_bytes, found.free_bytes) == (Kind.GPU_OOM, 15 << 29, 12 << 20)
