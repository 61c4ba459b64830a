"""`memtop diagnose` as people and scripts use it."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from memtop.cli import run
from tests.conftest import Runs
from tests.diagnosis.test_traps import MESSAGE, RAISED
from tests.test_architecture import HEAVY, loaded_after

# design: the public JSON.
KEYS = {
    *(
        "kind",
        "confidence",
        "summary",
        "phase",
        "device_index",
        "requested_bytes",
        "total_bytes",
        "free_bytes",
        "process_bytes",
    ),
    *(
        "allocated_bytes",
        "reserved_unallocated_bytes",
        "context_bytes",
        "other_process_bytes",
        "other_process_pids",
        "evidence",
    ),
    "remedies",
}
REMEDY_KEYS = {"id", "title", "keeps_math", "resumable", "predicted_peak_bytes", "predicted_band", "command"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(RAISED)
    return path


def test_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", str(log), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) >= KEYS
    assert told["kind"] == "gpu_oom_fragmented"
    assert told["reason"] is None
    assert told["requested_bytes"] == 1320702444
    assert told["remedies"][0]["id"] == "allocator"
    assert all(set(remedy) >= REMEDY_KEYS for remedy in told["remedies"])


def test_text(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", str(log)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpu_oom_fragmented\nGPU 0 ran out of memory: asked for 1.23 GiB")
    assert "19.58 GiB: tensors 14.94 GiB (76.3 %) | cached 3.18 GiB (16.2 %) | context 389 MiB (1.9 %)" in out
    assert MESSAGE in out
    assert "Confidence 0.97: proven." in out
    assert "expandable_segments:True" in out


@pytest.mark.parametrize("words", [["-"], []])
def test_standard_input(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(RAISED.encode()), isatty=lambda: False))
    assert run(["diagnose", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "gpu_oom_fragmented"


def test_the_exit_status_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.log"
    path.touch()
    for status, kind, reason in (
        ("137", "host_oom_killed", None),
        ("0", "not_memory", "finished"),
        ("-15", "not_memory", "sigterm"),
    ):
        assert run(["diagnose", str(path), "--exit-code", status, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["kind"], told["reason"]) == (kind, reason)
        assert told["remedies"] == [] or kind != "not_memory"


def test_a_program_that_failed_for_another_reason_is_offered_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.log"
    path.write_text("Traceback (most recent call last):\nKeyError: 'labels'\n")
    assert run(["diagnose", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("not_memory: python_error\nThe program failed with an error of its own: KeyError: 'labels'.\n")
    assert "What can be done" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such.log"], "LOG no-such.log: no such file"),
        (["."], "LOG .: is a folder; give a log file"),
        (["n" * 300], "cannot be read: File name too long"),
        (["x", "--exit-code", "one"], "'--exit-code': 'one' is not a whole number"),
    ],
)
def test_wrong_usage_is_one_line(runs: Runs, arguments: list[str], message: str) -> None:
    done = runs.memtop("diagnose", *arguments, status=2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_of_somebody_else(runs: Runs, log: Path) -> None:
    log.chmod(0)
    assert "cannot be read: Permission denied" in runs.memtop("diagnose", str(log), status=2).stderr


def test_it_loads_neither_torch_nor_textual(log: Path, tmp_path: Path) -> None:
    code = f"from memtop.cli import run; assert run(['diagnose', {str(log)!r}]) == 0"
    assert loaded_after(code, tmp_path).isdisjoint(HEAVY)
