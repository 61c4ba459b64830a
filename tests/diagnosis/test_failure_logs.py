"""Every log of the data files has its diagnosis, whether or not the exit status is known."""

from __future__ import annotations

import re

import pytest

from memtop.supervisor.diagnosis.diagnose import diagnose
from memtop.supervisor.diagnosis.log import PATTERNS
from memtop.supervisor.diagnosis.values import REASONS, Diagnosis, Evidence, Kind
from tests.diagnosis import logs
from tests.diagnosis.logs import Log

LOGS = [*logs.read("failure_logs.jsonl"), *logs.read("more_logs.jsonl")]


def check(log: Log, found: Diagnosis) -> None:
    assert found.reason is None or found.reason in REASONS
    assert found.kind.value == log.kind, found
    assert log.wrong_bytes(found) == []
    assert found.device_index == log.expected.device_index
    assert found.other_process_pids == log.expected.other_process_pids
    assert found.phase == log.phase, found
    if log.reason is not None:
        assert found.reason == log.reason
    assert 0 < found.confidence < 1
    assert found.summary.endswith(".")
    assert "\n" not in found.summary


def test_the_files_are_there() -> None:
    assert len(LOGS) == 170
    assert sum(log.kind == "not_memory" for log in LOGS) > 50


@pytest.mark.parametrize("log", LOGS, ids=[log.id for log in LOGS])
def test_log_with_its_exit_status(log: Log) -> None:
    check(log, diagnose([log.data], Evidence(exit_status=log.exit_code)))


@pytest.mark.parametrize("log", LOGS[:130], ids=[log.id for log in LOGS[:130]])
def test_log_alone(log: Log) -> None:
    check(log, diagnose([log.data]))


@pytest.mark.parametrize("log", LOGS, ids=[log.id for log in LOGS])
def test_the_evidence_is_in_the_log(log: Log) -> None:
    """Each line of evidence is in the log, or is the exit status."""
    found = diagnose([log.data], Evidence(exit_status=log.exit_code))
    squeezed = "".join(re.sub(r"\x1b\[[\d;]*m", "", log.text).split())
    for line in found.evidence:
        if not line.startswith("exit status"):
            parts = [part for part in line.split() if "[" not in part and "\\n" not in part]
            assert all(part in squeezed for part in parts[:6]), line


def test_sigkill_alone_stays_a_suspicion() -> None:
    bare = [
        log for log in LOGS if "SIGKILL alone" in log.text or log.id in ("elastic-sigkill-vila", "re-deepspeed-launcher-minus9")
    ]
    assert len(bare) >= 2
    for log in bare:
        found = diagnose([log.data], Evidence(exit_status=log.exit_code))
        assert found.kind is Kind.HOST_OOM_KILLED
        assert found.confidence < 0.5
        assert "by hand" in found.summary


def test_every_reason_has_its_sentence() -> None:
    reasons = {pattern.reason for pattern in PATTERNS if pattern.reason is not None}
    assert reasons <= set(REASONS)
