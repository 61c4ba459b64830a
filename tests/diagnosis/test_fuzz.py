"""No log raises anything, however mangled; and a change that leaves its content alone does not
change the diagnosis.

1,000 mutations by default; MEMTOP_FUZZ sets another number.
"""

from __future__ import annotations

import os
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtop.supervisor.diagnosis.diagnose import diagnose
from memtop.supervisor.diagnosis.values import Diagnosis, Evidence, Kind
from tests.diagnosis import logs
from tests.diagnosis.mutations import HARMLESS, among_ordinary, behind_ordinary, mutate
from tests.forking import LONG

LOGS = logs.read("failure_logs.jsonl")
ALL_LOGS = [*LOGS, *logs.read("more_logs.jsonl")]
# One message on several lines: a line between them parts it.
IN_PARTS = {
    "allowed-oumi-a100",
    "other-rocm-zero-free",
    "hip-strix-128g",
    "triton-smem-mxfp4",
    "re-torchelastic-sigterm-then-9",
}
MUTATIONS = int(os.environ.get("MEMTOP_FUZZ", "4000" if LONG else "400"))


def valid(found: Diagnosis) -> None:
    """Check it after a round trip through JSON, as it is sent and stored."""
    assert msgspec.json.decode(msgspec.json.encode(found), type=Diagnosis) == found
    assert 0 < found.confidence < 1
    assert found.summary
    assert (found.kind is Kind.NOT_MEMORY) == (found.reason is not None)
    sizes = (found.requested_bytes, found.total_bytes, found.free_bytes, found.process_bytes, found.allocated_bytes)
    assert all(size is None or 0 <= size < 1 << 60 for size in sizes)
    assert all(len(line) < 1000 for line in found.evidence)


def test_mutations_raise_nothing() -> None:
    texts = [log.text for log in LOGS]
    for seed in range(MUTATIONS):
        rng = random.Random(seed)
        index = rng.randrange(len(texts))
        names, data = mutate(texts, index, rng)
        try:
            valid(diagnose([data], Evidence(exit_status=LOGS[index].exit_code)))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {names} of {LOGS[index].id}") from error


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_harmless_mutations_keep_the_kind(name: str) -> None:
    wrong = []
    for seed in range(2):
        rng = random.Random(seed)
        for log in LOGS:
            found = diagnose([HARMLESS[name](log.text, rng)], Evidence(exit_status=log.exit_code))
            if found.kind.value != log.kind:
                wrong.append(f"{log.id} (seed {seed}): {found.kind.value}, {found.reason}")
    assert len(wrong) <= 2 * len(LOGS) * 0.03, wrong


@pytest.mark.parametrize("log", ALL_LOGS, ids=[log.id for log in ALL_LOGS])
def test_lines_of_a_healthy_program_change_no_answer(log: logs.Log) -> None:
    for status in {log.exit_code, None}:
        alone, behind, among = (
            msgspec.structs.replace(diagnose([data], Evidence(exit_status=status)), evidence=(), summary="", environment=())
            for data in (log.data, behind_ordinary(log.text), among_ordinary(log.text))
        )
        assert behind == alone
        assert among == alone or (log.id in IN_PARTS and among.of_memory is alone.of_memory)


@settings(max_examples=150 if LONG else 60, deadline=None)
@given(st.binary(max_size=3000))
def test_any_bytes(data: bytes) -> None:
    valid(diagnose([data]))


@settings(max_examples=150 if LONG else 60, deadline=None)
@given(st.text(max_size=600), st.integers(-300, 300))
def test_any_text_and_status(text: str, status: int) -> None:
    valid(diagnose([text.encode("utf-8", "surrogatepass")], Evidence(exit_status=status)))
