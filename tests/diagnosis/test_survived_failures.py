"""Which of the failures in a log ended the program, and which it survived."""

from __future__ import annotations

import pytest

from memtop.supervisor.diagnosis.finding import parse_size
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.recovery.policy import SURE
from tests.diagnosis.logs import MESSAGE, PRINTED, RAISED, STEPS, of


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


def test_without_an_exit_status_ordinary_output_makes_a_message_uncertain() -> None:
    after = "serving request 18\nwaiting for requests\n"
    words = MESSAGE.partition("Error: ")[2]
    found = of(f"serving\n{words}\n{after}")
    assert found.kind.of_gpu
    assert found.confidence < 0.5
    assert "waiting for requests" in found.summary
    # An exception, an explanation and a known exit status leave no such doubt.
    for text in (f"{MESSAGE}\n{after}", f"{words}\nPlease use smaller batches.\n1. batch\n"):
        assert of(f"serving\n{text}").confidence > 0.5
    assert of(f"serving\n{words}\n{after}", exit_status=1).confidence > 0.5


def test_an_exception_that_was_logged_as_a_warning_is_uncertain() -> None:
    after = "Compilation time 35.1\npass\nloading model\n"
    logged = f"WARNING:common:no reference for the model, checking its cosine\n{RAISED}{after}"
    assert of(logged).confidence < 0.5
    assert of(logged, exit_status=1).confidence > 0.5
    assert of(f"{RAISED}{after}").confidence > 0.5
    assert of(f"WARNING:common:no reference for the model\n{RAISED}").confidence > 0.5


def test_the_last_of_messages_that_the_program_survived_is_uncertain() -> None:
    frames = "".join(
        f"frames:  99%|#####| {number}/1744 [08:43<00:03] [E] CUDA failure 2: out of memory ; GPU=0 ; line=175\n"
        for number in range(1732, 1736)
    )
    found = of(frames)
    assert found.confidence < 0.5
    assert of(frames, exit_status=1).confidence > 0.5


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
    assert of(PRINTED + after.format(traceback=traceback)).kind is kind
    raised = f"{traceback}RuntimeError: {PRINTED}"
    assert of(raised + after.format(traceback=traceback)).kind is Kind.GPU_OOM


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
    caught = f"2025-01-01 10:00:00 run[7] DEBUG {PRINTED}2025-01-01 10:00:00 run[7] WARNING skipping batch.\n"
    assert of(f"{caught}2025-01-01 10:00:06 run[7] DEBUG Batch loss: 0.0106\n").reason in ("oom_retried", "oom_handled")
    assert of(f"{caught}2025-01-01 10:00:06 run[7] DEBUG Batch loss_scale: on\n").kind is not Kind.NOT_MEMORY
