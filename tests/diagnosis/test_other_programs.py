"""Failures of programs that are not PyTorch: their codes and figures, words that no pattern knows,
and what only sounds like a lack of memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.recovery.policy import SURE
from tests.diagnosis.logs import DATA, GIB, MESSAGE, RAISED, STEPS, of

GPU, HOST = Kind.GPU_OOM, Kind.HOST_OOM_ALLOC


class Case(msgspec.Struct, frozen=True):
    text: str
    kind: Kind
    likely: bool
    """Words of no pattern: likely a lack of memory, but nothing to act on."""
    facts: dict[str, Any]


CASES = [msgspec.json.decode(line, type=Case) for line in (DATA / "other_programs.jsonl").read_bytes().splitlines()]
of_memory = [case for case in CASES if case.kind is not Kind.NOT_MEMORY]


def test_the_cases_are_there() -> None:
    assert (len(CASES), len(of_memory)) == (629, 398)


@pytest.mark.parametrize("case", CASES, ids=[case.text.splitlines()[-1][:60] for case in CASES])
def test_a_failure_of_another_program(case: Case) -> None:
    found = of(case.text)
    assert found.kind is case.kind
    assert {name: getattr(found, name) for name in case.facts} == case.facts
    if case.kind is not Kind.NOT_MEMORY:
        assert (found.confidence < SURE) is case.likely
        assert found.confidence < 0.95
    if case.likely and case.kind is not Kind.HOST_OOM_KILLED:
        assert "This is a guess" in found.summary


@pytest.mark.parametrize("case", [case for case in CASES if case.likely], ids=lambda case: case.text[-40:])
def test_words_that_no_pattern_knows_give_way_to_a_known_failure(case: Case) -> None:
    assert of(case.text + RAISED).kind is Kind.GPU_OOM_FRAGMENTED


def test_what_is_wrapped_weighs_more_than_what_wraps_it() -> None:
    outer = "ray.exceptions.RayTaskError(OutOfMemoryError): ray::f() (pid=1, ip=1.1.1.1)\n"
    assert of(outer).kind is GPU
    assert of(f"{outer}MemoryError: Unable to allocate 3.00 GiB for an array with shape (9,)\n").kind is HOST
    start = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    found = of(f"{start}(EngineCore pid=1) KeyError: 'x'\n")
    assert "KeyError" in found.evidence[0]
    assert of(start).reason == "python_error"


def test_two_messages_about_one_failure() -> None:
    """The first is logged, the second raised, and the program goes on after both."""
    logged = f"ERROR: training step failed: {MESSAGE}\n"
    assert of(logged + RAISED + STEPS).reason == "oom_handled"
    assert of(logged + RAISED + STEPS + RAISED).kind is Kind.GPU_OOM_FRAGMENTED
    found = of("cudaMalloc failed: out of memory\nx\nallocating 2.00 GiB on device 1: cudaMalloc failed: out of memory\n")
    assert (found.requested_bytes, found.device_index) == (2 * GIB, 1)


def test_a_retry_without_progress_before_a_failed_end() -> None:
    said = f"{RAISED}Decreasing batch size to: 16\n"
    found = of(said, exit_status=1)
    assert found.kind is Kind.GPU_OOM_FRAGMENTED
    assert found.confidence == 0.7
    assert of(said + STEPS, exit_status=1).reason == "oom_retried"


def test_a_process_that_the_driver_does_not_see() -> None:
    unseen = of(MESSAGE.replace("18.50 GiB", "0 bytes"))
    assert (unseen.kind, unseen.process_bytes, unseen.other_process_bytes) == (Kind.GPU_OOM_FRAGMENTED, None, None)


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (0xC0000005, Kind.NOT_MEMORY, "segfault"),
        (0xC0000005 - (1 << 32), Kind.NOT_MEMORY, "segfault"),
        (0xC00000FD, Kind.NOT_MEMORY, "segfault"),
        (0xC0000409, Kind.NOT_MEMORY, "aborted"),
        (0xC0000374 - (1 << 32), Kind.NOT_MEMORY, "aborted"),
        (0xC000013A, Kind.NOT_MEMORY, "keyboard_interrupt"),
        (0xC0000017, HOST, None),
        (0xC000012D - (1 << 32), HOST, None),
        (0xC0000142, Kind.NOT_MEMORY, "no_evidence"),
    ],
)
def test_status_codes_of_windows(status: int, kind: Kind, reason: str | None) -> None:
    found = of("step 1\n", exit_status=status)
    assert (found.kind, found.reason) == (kind, reason)


@pytest.mark.parametrize("status", [None, 1])
def test_words_alone_prove_nothing(status: int | None) -> None:
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch.\n"
    for text in (RAISED, killed, "MemoryError\n"):
        found = of(text, exit_status=status)
        assert found.source == "words"
        assert 0.9 <= found.confidence < 0.95
