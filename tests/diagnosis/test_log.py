"""Lines of logs that are easily misread, most of them next to their opposite."""

from __future__ import annotations

import pytest

from memtop.supervisor import units
from memtop.supervisor.diagnosis.finding import parse_size
from memtop.supervisor.diagnosis.values import Kind, size
from memtop.supervisor.recovery.external import remedies_for_command
from memtop.supervisor.recovery.policy import SURE
from tests.diagnosis.logs import GIB, MESSAGE, RAISED, STEPS, of


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


@pytest.mark.parametrize(
    "after",
    [
        "[rank0]:[E1003 18:37:01 PG.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)\n",
        "W0408 10:36:26.015000 3327702 api.py:897] Sending process 3327820 closing signal SIGTERM\n",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n  exitcode  : -9 (pid: 8158)\n",
        "slurmstepd: error: *** JOB 25428400 ON node022 CANCELLED AT 2023-05-30T19:46:40 ***\n",
        "[2025-03-02 04:11:37,902] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 20411\n",
    ],
)
def test_the_first_cause_wins(after: str) -> None:
    full = "OSError: [Errno 28] No space left on device: '/data/x'\n"
    assert of(full + after).kind is Kind.DISK_FULL
    assert of("[rank2]: " + MESSAGE + "\n" + after).kind is Kind.GPU_OOM_FRAGMENTED
    assert of("[rank1]: KeyError: 'labels'\n" + after, exit_status=1).reason == "python_error"


@pytest.mark.parametrize(("words", "reason"), [("PREEMPTION", "preempted"), ("TIME LIMIT", "time_limit")])
def test_a_scheduler_ends_the_job(words: str, reason: str) -> None:
    text = f"slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-01-02T03:04:05 DUE TO {words} ***\n"
    for status in (None, 137, -9):
        assert of(STEPS + text + "srun: error: n1: task 0: Killed\n", exit_status=status).reason == reason


def test_a_complete_message_of_a_run_that_went_on() -> None:
    assert of(f"[WARNING] eval failed: {MESSAGE}\n{STEPS}").reason == "oom_handled"
    assert of(f"{RAISED}{STEPS}").reason == "oom_handled", "a traceback was logged, and 20 kB of steps follow"
    assert of(f"{RAISED}Decreasing batch size to: 16\n{STEPS}").reason == "oom_retried"
    assert of(RAISED, exit_status=0).reason == "oom_handled"
    # The same failure again, with nothing after it, ended the program.
    assert of(f"{RAISED}{STEPS}{RAISED}").kind is Kind.GPU_OOM_FRAGMENTED
    assert of(f"{RAISED}Decreasing batch size to: 1\n{RAISED}").kind is Kind.GPU_OOM_FRAGMENTED
    gave_up = "RuntimeError: No executable batch size found, reached zero.\n"
    assert of(f"{RAISED}Decreasing batch size to: 0\n{gave_up}", exit_status=1).kind.of_gpu


def test_a_transfer_or_one_line_is_no_progress() -> None:
    bar = "Downloading data:  37%|###7      | 139/375 [00:11<00:15, 12.2MB/s]\n"
    logged = "ggml_cuda: allocating 5120.00 MiB on device 0: cudaMalloc failed: out of memory\n"
    assert of(logged + bar * 2).kind is Kind.GPU_OOM
    assert of(logged + STEPS[:40]).kind is Kind.GPU_OOM
    assert of(logged + STEPS[:400]).reason == "oom_handled"


def test_buffered_output_after_a_traceback_is_not_progress() -> None:
    """A program whose standard output is a file writes its last lines after its error."""
    assert of(RAISED + STEPS[:4000], exit_status=1).kind is Kind.GPU_OOM_FRAGMENTED
    assert of(RAISED + STEPS[:4000]).kind is Kind.GPU_OOM_FRAGMENTED


def test_the_failure_that_ended_a_run_after_one_that_it_survived() -> None:
    found = of(f"[WARNING] skipped: {MESSAGE}\n{STEPS}Traceback (most recent call last):\nKeyError: 'labels'\n", exit_status=1)
    assert (found.kind, found.reason) == (Kind.NOT_MEMORY, "python_error")


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


def test_a_rank_that_fails_while_another_continues() -> None:
    """The other rank prints a few steps and then waits: thousands of lines of its watchdog are no
    progress."""
    others = "".join(f"[rank0]: step {number}/9 loss 2.0\n" for number in range(4))
    waiting = "[rank0]:[E1003 PG.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)\n" * 300
    found = of(f"[rank1]: Traceback (most recent call last):\n[rank1]: {MESSAGE}\n{others}{waiting}", exit_status=1)
    assert (found.kind, found.rank) == (Kind.GPU_OOM_FRAGMENTED, 1)


def test_a_lost_connection_of_the_other_rank_is_not_the_cause() -> None:
    """The pattern of this message wins over "some exception", although it has less weight."""
    lost = (
        "[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] "
        "Connection closed by peer [127.0.0.1]:5321\n"
    )
    alone = of(lost, exit_status=1)
    assert (alone.kind, alone.reason) == (Kind.NOT_MEMORY, "connection_lost")
    with_cause = of(f"{lost}[rank1]: KeyError: 'labels'\n", exit_status=1)
    assert (with_cause.reason, with_cause.rank) == ("python_error", 1)
    killed = of(f"{lost}  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 438)\n", exit_status=1)
    assert (killed.kind, killed.rank) == (Kind.HOST_OOM_KILLED, 1)


@pytest.mark.parametrize("count", [1, 19, 25, 100, 300])
def test_the_last_of_many_failures_ended_the_program(count: int) -> None:
    """Only the first and the last of them are read."""
    tried = f"[WARNING] skipping this batch: {MESSAGE}\n{STEPS[:300]}" * count
    deadly = MESSAGE.replace("1.23 GiB", "7.77 GiB")
    found = of(f"{tried}Traceback (most recent call last):\n{deadly}\n", exit_status=1)
    assert (found.kind, found.requested_bytes) == (Kind.GPU_OOM, parse_size("7.77GiB"))


def test_mentions_do_not_use_up_what_is_read() -> None:
    """Many lines that only mention a lack of memory, around the one that reports it."""
    mentions = "try a smaller batch to avoid CUDA out of memory in the next run\n" * 200
    assert of(f"{mentions}RuntimeError: CUDA out of memory\n{mentions}", exit_status=1).kind is Kind.GPU_OOM
    assert of(f"{mentions}KeyError: 'x'\n", exit_status=1).reason == "python_error"


def test_the_error_that_ended_it_after_hundreds_that_were_logged() -> None:
    logged = "".join(f"ValueError: bad row {number}\n{STEPS[:300]}" for number in range(200))
    found = of(f"{logged}Traceback (most recent call last):\nKeyError: 'labels'\n", exit_status=1)
    assert "KeyError" in found.evidence[0]


CAUGHT = f"caught: {MESSAGE}\n"


@pytest.mark.parametrize("end", ["epoch 1 done\n", "Training complete\n", "Epoch 7: completed in 3 min\n"])
def test_a_failure_that_was_logged_before_a_good_end_is_no_proof(end: str) -> None:
    """Without an exit status it is uncertain whether the failure ended the program."""
    found = of(CAUGHT + "some other words\n" + end)
    assert found.kind is Kind.GPU_OOM_FRAGMENTED
    assert found.confidence < SURE
    assert "if the program ended there" in found.summary
    assert end.strip() in found.summary
    well = of(CAUGHT + end, exit_status=0)
    assert (well.kind, well.reason) == (Kind.NOT_MEMORY, "oom_handled")
    # The program failed, and the log has no other cause.
    assert of(CAUGHT + end, exit_status=1).confidence > 0.9


@pytest.mark.parametrize(
    ("text", "sure"),
    [
        (RAISED, True),
        ("epoch 1 done\nTraining complete\n" + RAISED, True),
        # Standard output is flushed after the error.
        (RAISED + "epoch 1 done\n", True),
        (RAISED + "Training complete\n", False),
        ("OSError: [Errno 28] No space left on device\nTraining complete\n", False),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch.\nTraining complete\n", True),
    ],
)
def test_a_failure_that_the_program_may_have_survived(text: str, sure: bool) -> None:
    assert (of(text).confidence >= SURE) is sure


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


_PRINTED = "CUDA out of memory. Tried to allocate 30.00 MiB (GPU 0; 8.00 GiB total capacity; 7.50 GiB already allocated)\n"


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        ("reading the second file\n{traceback}ZeroDivisionError: division by zero\n", Kind.NOT_MEMORY),
        ("reading the second file\n{traceback}KeyError: 'loss'\n", Kind.NOT_MEMORY),
        ("{traceback}KeyError: 'loss'\n", Kind.GPU_OOM),
        ("{traceback}AttributeError: 'NoneType' object has no attribute 'backward'\n", Kind.GPU_OOM),
        ("reading the second file\n{traceback}UnboundLocalError: local variable 'loss' has no value\n", Kind.GPU_OOM),
        ("{traceback}RuntimeError: the training failed\n", Kind.GPU_OOM),
        ("{traceback}torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 30.00 MiB\n", Kind.GPU_OOM),
        ("ValueError: printed without a traceback\n", Kind.GPU_OOM),
        ("", Kind.GPU_OOM),
    ],
)
def test_a_message_that_the_program_printed_itself_and_a_fault_that_follows(after: str, kind: Kind) -> None:
    """A message without its class and traceback was caught, if the program went on. A traceback of
    another fault ended the program then."""
    traceback = 'Traceback (most recent call last):\n  File "main.py", line 9, in <module>\n    main()\n'
    assert of(_PRINTED + after.format(traceback=traceback)).kind is kind
    raised = f"{traceback}RuntimeError: {_PRINTED}"
    assert of(raised + after.format(traceback=traceback)).kind is Kind.GPU_OOM


@pytest.mark.parametrize("fold", ["\n", "\\\n", "\\\r\n", " \\\n    "])
def test_a_message_is_read_over_a_fold_in_a_word_and_up_to_a_cut_in_a_word(fold: str) -> None:
    message = f"RuntimeError: {_PRINTED}".replace("already", f"alre{fold}ady").replace(")\n", "; 12.00 MiB fr")
    found = of(message)
    assert (found.kind, found.allocated_bytes, found.free_bytes) == (Kind.GPU_OOM, 15 << 29, 12 << 20)


@pytest.mark.parametrize("state", ["State: OUT_OF_MEMORY (exit code 0)", "  Reason:       OOMKilled\n  Exit Code:    0"])
def test_a_platform_that_names_a_kill_counts_more_than_the_status_of_the_main_program(state: str) -> None:
    found = of(f"{STEPS}{state}\n", exit_status=0)
    assert (found.kind, found.confidence) == (Kind.HOST_OOM_KILLED, 0.45)
    assert of(f"{STEPS}Last State: Terminated\n{state}\n", exit_status=0).kind is Kind.NOT_MEMORY
    assert of(f"{STEPS}{state}\nTraining completed.\n", exit_status=0).kind is Kind.NOT_MEMORY
    assert of(f"{STEPS}error: 1 OOMKilled task was started again\n", exit_status=0).kind is Kind.NOT_MEMORY


@pytest.mark.parametrize(
    "text",
    [
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\nDone\n",
        "cudaMalloc failed: out of memory\nerror loading model\ndone\n",
        "main: caught exception: CUDA out of memory. Tried to allocate 8.00 GiB\nexiting with an error code\n",
    ],
)
def test_the_end_of_a_script_and_words_of_a_handler_take_no_failure_back(text: str) -> None:
    assert of(text).of_memory
    assert of(text, exit_status=1).of_memory


def test_a_loss_after_a_caught_failure_is_progress() -> None:
    caught = f"2025-01-01 10:00:00 run[7] DEBUG {_PRINTED}2025-01-01 10:00:00 run[7] WARNING skipping batch.\n"
    assert of(f"{caught}2025-01-01 10:00:06 run[7] DEBUG Batch loss: 0.0106\n").reason in ("oom_retried", "oom_handled")
    assert of(f"{caught}2025-01-01 10:00:06 run[7] DEBUG Batch loss_scale: on\n").kind is not Kind.NOT_MEMORY
