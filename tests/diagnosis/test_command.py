"""`memtop diagnose` as people and scripts use it."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import random
import sqlite3
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from memtop.cli import run
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.tui.line import plain
from memtop.tui.recovery import happened_lines
from tests.conftest import Runs
from tests.diagnosis.logs import MESSAGE, RAISED
from tests.test_architecture import HEAVY, loaded_after

# The public JSON.
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
    *("allocated_bytes", "reserved_unallocated_bytes", "context_bytes", "other_process_bytes", "other_process_pids"),
    *("evidence", "remedies"),
}
REMEDY_KEYS = {"id", "title", "keeps_math", "resumable", "predicted_peak_bytes", "predicted_band", "command"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(RAISED)
    return path


@pytest.fixture
def diagnose(log: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command on a log with this content; returns its output."""

    def command(content: str | bytes, *options: str) -> str:
        log.write_bytes(content.encode() if isinstance(content, str) else content)
        assert run(["diagnose", str(log), *options]) == 0
        return capsys.readouterr().out

    return command


def test_json(diagnose: Callable[..., str]) -> None:
    document = json.loads(diagnose(RAISED, "--json"))
    assert set(document) >= KEYS
    assert document["kind"] == "gpu_oom_fragmented"
    assert document["reason"] is None
    assert document["requested_bytes"] == 1320702444
    assert document["remedies"][0]["id"] == "allocator"
    assert all(set(remedy) >= REMEDY_KEYS for remedy in document["remedies"])
    assert document["environment"] == ["cuda", "pytorch"]


def test_text(diagnose: Callable[..., str]) -> None:
    out = diagnose(RAISED)
    assert out.startswith("gpu_oom_fragmented\nGPU 0 ran out of memory: it requested 1.23 GiB")
    assert "19.58 GiB: tensors 14.94 GiB (76.3 %) | cached 3.18 GiB (16.2 %) | context 389 MiB (1.9 %)" in out
    assert MESSAGE in out
    assert "Confidence 0.94: very likely." in out
    assert "expandable_segments:True" in out
    assert "\nEnvironment: CUDA, PyTorch.\n" in out


@pytest.mark.parametrize(
    ("confidence", "words"),
    [
        *((1.0, "proven"), (0.95, "proven"), (0.94, "very likely"), (0.75, "very likely"), (0.74, "likely"), (0.5, "likely")),
        *((0.49, "a guess"), (0.0, "a guess")),
    ],
)
def test_the_word_for_a_confidence_at_its_borders(confidence: float, words: str) -> None:
    """The command and the recovery screen use the same words."""
    found = Diagnosis(kind=Kind.HOST_OOM_KILLED, confidence=confidence, summary="killed")
    assert found.certainty == words
    assert plain(happened_lines(found, 80)[-1]).startswith(f"{words} by ")


def test_only_the_exit_status_makes_this_log_proven(diagnose: Callable[..., str]) -> None:
    assert "\nConfidence 0.95: proven.\n" in diagnose("all is well\n", "--exit-code", "0")
    assert "\nConfidence 0.94: very likely.\n" in diagnose(RAISED, "--exit-code", "1")


@pytest.mark.parametrize("words", [["-"], []])
def test_standard_input(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(RAISED.encode()), isatty=lambda: False))
    assert run(["diagnose", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "gpu_oom_fragmented"


@pytest.mark.parametrize(
    ("status", "reason"), [("137", "killed_by_something"), ("271", "sigterm"), ("0", "finished"), ("-15", "sigterm")]
)
def test_the_exit_status_counts(diagnose: Callable[..., str], status: str, reason: str) -> None:
    document = json.loads(diagnose("", "--exit-code", status, "--json"))
    assert (document["kind"], document["reason"], document["remedies"]) == ("not_memory", reason, [])


def test_a_program_that_failed_for_another_reason_gets_no_remedy(diagnose: Callable[..., str]) -> None:
    out = diagnose("Traceback (most recent call last):\nKeyError: 'labels'\n")
    assert out.startswith("not_memory: python_error\nThe program raised an exception: KeyError: 'labels'.\n")
    assert "What can be done" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such.log"], "LOG no-such.log: no such file"),
        (["."], "LOG .: is a folder; give a log file"),
        (["/dev/zero"], "LOG /dev/zero: is a device that only gives zeros; give a log file"),
        (["n" * 300], "cannot be read: File name too long"),
        (["x", "--exit-code", "300"], "--exit-code 300: no program has this exit status; give 0 to 255, or -N for signal N"),
        (["x", "--exit-code", "-65"], "--exit-code -65: no program has this exit status"),
        (["x", "--exit-code", "256"], "--exit-code 256: no program has this exit status"),
        ([sys.executable], "is a binary file; give what the program printed, as text"),
        (["x", "--exit-code", "one"], "'--exit-code': 'one' is not a whole number"),
    ],
)
def test_wrong_usage_is_one_line(runs: Runs, arguments: list[str], message: str) -> None:
    done = runs.memtop("diagnose", *arguments, status=2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_of_another_user(runs: Runs, log: Path) -> None:
    log.chmod(0)
    assert "cannot be read: Permission denied" in runs.memtop("diagnose", str(log), status=2).stderr


@pytest.mark.parametrize("name", ["machine code", "floats", "database", "gzip", "xz"])
def test_a_binary_file_is_refused(name: str, tmp_path: Path, runs: Runs) -> None:
    rng = random.Random(3)
    path = tmp_path / "train.log"
    if name == "database":
        connection = sqlite3.connect(path)
        connection.execute("create table steps (number, loss, words)")
        rows = [(number, number / 3, f"step {number} No space left on device") for number in range(500)]
        connection.executemany("insert into steps values (?, ?, ?)", rows)
        connection.commit()
        connection.close()
    else:
        data = {
            "machine code": Path(sys.executable).resolve().read_bytes()[: 1 << 20],
            "floats": struct.pack("<20000f", *(rng.gauss(0, 1) for _ in range(20_000))),
            "gzip": gzip.compress(RAISED.encode()),
            "xz": lzma.compress(RAISED.encode()),
        }[name]
        path.write_bytes(data)
    document = runs.memtop("diagnose", str(path), status=2)
    assert f"LOG {path}: is " in document.stderr
    assert (" is compressed (" if name in ("gzip", "xz") else "binary file") in document.stderr
    assert len(document.stderr.splitlines()) == 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
@pytest.mark.parametrize(
    "name", ["plain", "a crash's NULs", "NULs first", "NULs only after", "colours", "bars", "a control byte"]
)
def test_a_log_in_any_state_is_read(diagnose: Callable[..., str], name: str, encoding: str) -> None:
    steps = "".join(f"step {number}/9000 | loss 2.{number}\n" for number in range(200))
    nuls = "\0" * 4096
    text = {
        "plain": steps + RAISED,
        "a crash's NULs": steps + nuls + "\n" + RAISED,
        "NULs first": nuls * 20 + "\n" + RAISED,
        "NULs only after": RAISED + nuls * 20,
        "colours": "\x1b[31mERROR\x1b[0m\x0f " * 300 + "\n" + RAISED,
        "bars": "".join(f"{number}%\b\b\b\b" for number in range(100)) + "\a\n" + RAISED,
        "a control byte": "GPU \x01 has what it has\n" * 3 + RAISED,
    }[name]
    if name == "NULs first" and encoding in ("utf-16-le", "utf-16-be"):
        pytest.skip("UTF-16 without its mark cannot be recognized behind thousands of NULs")
    assert json.loads(diagnose(text.encode(encoding), "--json"))["kind"] == "gpu_oom_fragmented"


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        *(("cp1251", "Обучение началось"), ("koi8-r", "Обучение началось"), ("cp932", "学習を開始しました")),
        *(("gb18030", "训练已经开始"), ("latin-1", "é à ü ß")),
    ],
)
def test_bytes_of_another_alphabet_are_text(diagnose: Callable[..., str], encoding: str, words: str) -> None:
    document = json.loads(diagnose((f"{words}\n" * 300 + RAISED).encode(encoding), "--json"))
    assert document["kind"] == "gpu_oom_fragmented"


def test_each_line_of_a_command_is_indented(diagnose: Callable[..., str]) -> None:
    out = diagnose("Unable to allocate 7.28 GiB for an array with shape (1,) and data type float64\n")
    assert out.splitlines()[1] == "An allocation of 7.28 GiB of host memory failed."
    advice = out.partition("What can be done")[2].splitlines()[1:]
    assert sum("swap" in line for line in advice) > 3
    assert all(line.startswith("  ") for line in advice)


def test_a_log_without_evidence_gives_no_guess(diagnose: Callable[..., str]) -> None:
    out = diagnose("step 1/9 loss 2.0\n")
    assert "No sign of a lack of memory was found; why the program ended is unknown." in out
    assert "guess" not in out


def test_it_loads_neither_torch_nor_textual(log: Path, tmp_path: Path) -> None:
    code = f"from memtop.cli import run; assert run(['diagnose', {str(log)!r}]) == 0"
    assert loaded_after(code, tmp_path).isdisjoint(HEAVY)
