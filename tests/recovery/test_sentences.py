"""Sentences and remedies after a failure: they state known facts and offer only applicable
remedies."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.recovery.bottleneck import Measured, advise
from memtop.supervisor.recovery.external import ExternalCommand, remedies_for_command
from memtop.supervisor.recovery.host_ladder import beyond_all_memory
from memtop.supervisor.recovery.leaks import cause_of_death, describe
from memtop.supervisor.recovery.policy import Candidate, decide
from memtop.supervisor.recovery.situation import HostFacts
from memtop.supervisor.recovery.values import Trend, TrendKind, TrendSubject
from memtop.supervisor.run import explain
from memtop.supervisor.run.reports import Oom
from tests.recovery.support import FIRST, GIB, T5_OOM, climb, died, ids, named, peak

CPU_RUN = replace(FIRST, workers=2, device="cpu", loss_chunk=0)
REFUSED = died(Kind.HOST_OOM_ALLOC, phase="forward")
LIMITED = replace(REFUSED, address_space_bytes=4 * GIB)
HOST = HostFacts(limit_bytes=24 * GIB, memory_bytes=26 * GIB)


RANK = TrendSubject(kind=TrendKind.HOST_ANONYMOUS, rank=0, role="rank")
WORKERS = TrendSubject(kind=TrendKind.HOST_ANONYMOUS, role="loader worker")
CARD = TrendSubject(kind=TrendKind.GPU_RESERVED, gpu_index=0, rank=0)


def trend(subject: TrendSubject, per_update: float | None = 5.0 * (1 << 20)) -> Trend:
    return Trend(
        subject=subject,
        what=describe(subject),
        bytes_per_second=1 << 20,
        bytes_per_update=per_update,
        confidence=0.99,
        message="it grows",
    )


# --- a leak ---------------------------------------------------------------------------------------


def test_the_leak_that_filled_the_memory_is_the_cause() -> None:
    rank, card, swapping = trend(RANK), trend(CARD, None), trend(TrendSubject(kind=TrendKind.SWAP_IN), None)
    (line,) = cause_of_death([rank, card, swapping], Kind.HOST_OOM_KILLED)
    assert line.startswith("anonymous memory of rank 0 grew by 5.0 MiB per update until the end: a leak")
    (line,) = cause_of_death([rank, card, swapping], Kind.GPU_OOM)
    assert line.startswith("GPU 0 reserved by rank 0 grew by 1.0 MiB/s until the end")
    assert cause_of_death([rank, card, swapping], Kind.DISK_FULL) == ()
    assert cause_of_death([], Kind.GPU_OOM) == ()


def test_a_leaking_program_is_offered_fewer_workers_only_if_they_leak() -> None:
    rank = ExternalCommand(command=("python", "t.py"), loader_workers=True, leaks=(RANK,))
    assert ids(remedies_for_command(REFUSED, rank)) == []
    workers = replace(rank, leaks=(WORKERS,))
    assert ids(remedies_for_command(REFUSED, workers)) == ["workers"]


# --- only remedies for parts that a program has ---------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (ExternalCommand(command=("python", "t.py")), ["smaller_batch", "host_level", "swap"]),
        (ExternalCommand(command=("python", "t.py"), loader_workers=True), ["workers", "smaller_batch", "host_level", "swap"]),
        (ExternalCommand(command=("python", "t.py", "--num_workers=4")), ["workers", "smaller_batch", "host_level", "swap"]),
        (ExternalCommand(command=("python", "t.py"), on_gpu=True), ["pin_memory", "host_level", "swap"]),
        (ExternalCommand(command=("deepspeed", "t.py")), ["smaller_batch", "offload_off", "host_level", "swap"]),
    ],
)
def test_a_command_is_offered_only_what_it_has(seen: ExternalCommand, expected: list[str]) -> None:
    assert ids(remedies_for_command(REFUSED, seen)) == expected


def test_a_lora_rank_is_only_for_programs_with_adapters() -> None:
    assert "lora_rank" not in ids(remedies_for_command(T5_OOM, ExternalCommand(command=("python", "t.py"))))
    assert "lora_rank" in ids(remedies_for_command(T5_OOM, ExternalCommand(command=("python", "t.py", "--lora_r", "16"))))


# --- a limit of address space, and more than all memory -------------------------------------------


def test_a_limit_of_address_space_is_raised_and_no_swap_is_added() -> None:
    found = climb(LIMITED, CPU_RUN, host=HostFacts(limit_bytes=24 * GIB, in_cgroup=True), peaks=(peak(CPU_RUN, 4, 2.0),))
    assert named(found, "address_space").command == "ulimit -v unlimited"
    assert not {"swap", "memory_limit", "workers"} & set(ids(found))
    # The fraction of host memory in use does not matter for a full address space.
    assert all(one.forecast is None or one.forecast.fraction is None for one in found.remedies)
    assert ids(remedies_for_command(LIMITED, ExternalCommand())) == ["address_space", "smaller_batch", "host_level"]


@pytest.mark.parametrize(("requested", "expected"), [(26 * GIB, False), (26 * GIB + 1, True), (None, False)])
def test_a_request_larger_than_all_memory_is_not_about_settings(requested: int | None, expected: bool) -> None:
    diagnosis = replace(REFUSED, requested_bytes=requested)
    assert (beyond_all_memory(diagnosis, HOST) is not None) is expected
    assert ("swap" in ids(climb(diagnosis, CPU_RUN, host=HOST))) is not expected
    assert (remedies_for_command(diagnosis, ExternalCommand(host=HOST)) == ()) is expected
    # In the built-in trainer the batch may be too large.
    assert "smaller_batch" in ids(climb(diagnosis, CPU_RUN, host=HOST))


def test_unknown_host_memory_is_not_mentioned() -> None:
    assert beyond_all_memory(replace(REFUSED, requested_bytes=1 << 60), None) is None
    assert beyond_all_memory(replace(T5_OOM, requested_bytes=1 << 60), HOST) is None


# --- reasons --------------------------------------------------------------------------------------


def test_what_is_never_restarted_by_itself_is_left_to_a_person() -> None:
    candidates = [Candidate(remedy=one, key=None) for one in remedies_for_command(REFUSED, ExternalCommand())]
    assert all(one.remedy.keeps_math for one in candidates)
    decision = decide(REFUSED, (), candidates, "auto", never="it is an external command")
    assert (decision.action, decision.why) == ("ask", "it is an external command")
    assert decide(REFUSED, (), candidates, "ask", never="it is an external command").why == "--on-oom ask"
    assert explain.decided(decision) == "nothing is done by itself: it is an external command"


def test_one_measured_peak_is_known_and_two_are_needed() -> None:
    found = climb(REFUSED, CPU_RUN, peaks=(peak(CPU_RUN, 8, 0.82, failed=True, on_gpu=False),), total_bytes=24 * GIB)
    known = "one measured peak is known, cut short by the failure (B 8); a forecast needs two whole ones"
    assert named(found, "smaller_batch").forecast_unknown == known
    checkpointed = named(found, "checkpointing").forecast_unknown
    assert checkpointed == f"nothing was measured with these settings yet; with the current ones: {known}"


def test_the_parts_of_an_update_add_up() -> None:
    measured = Measured(
        updates=50,
        on_gpu=False,
        step_seconds=1.0,
        data_wait_seconds=0.0,
        forward_seconds=0.27,
        backward_seconds=0.48,
        optimizer_seconds=0.01,
    )
    (line, *_) = advise(measured, CPU_RUN).evidence
    assert "optimizer 1 %, the rest (gradient clipping and all-reduce, reports, saves) 24 %" in line
    (line, *_) = advise(replace(measured, optimizer_seconds=None), CPU_RUN).evidence
    assert "backward 48 %, not reported 25 %" in line
    (line, *_) = advise(replace(measured, forward_seconds=0.51), CPU_RUN).evidence
    assert "the rest" not in line


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({"update": 404, "phase": "unknown"}, "out of memory (rank 0, update 404): no words"),
        ({"phase": "unknown"}, "out of memory (rank 0): no words"),
        (
            {"update": 3, "phase": "backward", "batch": 1, "accumulation": 4},
            "(rank 0, update 3, in the backward pass with batch 1 x 4)",
        ),
    ],
)
def test_unknown_facts_of_a_failure_are_left_out(report: dict[str, Any], words: str) -> None:
    assert words in explain.oom_text(0, Oom(**report))
