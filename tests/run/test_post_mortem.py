"""How the evidence of an attempt's end is gathered: on written files."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.run.post_mortem import evidence as evidence_files
from memtop.supervisor.run.post_mortem import examine as examination
from memtop.supervisor.run.post_mortem.evidence import RELATED_SECONDS, AttemptEvidence
from memtop.supervisor.run.post_mortem.examine import AttemptEnd, evidence_of, examine
from memtop.supervisor.run.reports import Oom
from tests.conftest import Runs

LOGITS = 8 * 252 * 40960 * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "attempt"
    folder.mkdir()
    (folder / "output.log").write_text("step 1/9 loss 2.0\n")
    return folder


def end_of(folder: Path, **about: Any) -> AttemptEnd:
    known: dict[str, Any] = {
        "folder": folder,
        "log": folder / "output.log",
        "state_folder": folder,
        "ended": time.time(),
        "status": 1,
        "asked_to_stop": False,
        "settings": None,
        "reports": (),
    }
    return AttemptEnd(**{**known, **about})


def settings_of(batch: int) -> Settings:
    return Settings(
        recipe="first-run",
        preset="standard",
        batch=batch,
        accumulation=32 // batch,
        seq_len=252,
        save_every=10,
        learning_rate=2e-3,
        model={"config": {"vocab_size": 40960}},
    )


def oom(**about: Any) -> Oom:
    message = f"CUDA out of memory. Tried to allocate {LOGITS / (1 << 20):.2f} MiB."
    return Oom(**{"time": 1.0, "error": "torch.OutOfMemoryError", "message": message, "survived": False, **about})


def test_a_failure_is_reported_with_the_batch_that_failed(folder: Path) -> None:
    """The rank's report names the batch that failed. The settings may have changed since then, and
    an evaluation has a batch of its own."""
    failure = end_of(folder, settings=settings_of(32), reports=((0, oom(batch=8)),))
    found = examine(failure, AttemptEvidence(folder, time.time()))
    assert (found.kind, found.requested_for) == (Kind.GPU_OOM, "the logits (B 8 x T 252 x V 40960, fp32)")
    # Where it does not say, those count that the program last reported.
    silent = end_of(folder, settings=settings_of(8), reports=((0, oom(batch=None)),))
    assert examine(silent, AttemptEvidence(folder, time.time())).requested_for == found.requested_for


def test_a_failure_in_a_thread_counts_only_where_no_update_came_after_it(folder: Path) -> None:
    """Only later updates show that the program can do without the thread."""
    early = ((1, oom(survived=None, time=50.0)),)
    last_words = end_of(folder, reports=early, newest_step=49.0)
    found = examine(last_words, AttemptEvidence(folder, time.time()))
    assert (found.kind, found.rank, found.confidence < 0.99) == (Kind.GPU_OOM, 1, True)
    went_on = end_of(folder, reports=early, newest_step=51.0)
    assert examine(went_on, AttemptEvidence(folder, time.time())).kind is Kind.NOT_MEMORY
    # What surely ended it comes first, whenever it was.
    both = end_of(folder, reports=(*early, (0, oom(time=60.0))), newest_step=49.0)
    found = examine(both, AttemptEvidence(folder, time.time()))
    assert (found.rank, found.confidence) == (0, 0.99)


def test_a_log_that_is_replaced_while_it_is_examined_is_not_opened_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe in its place would make the supervisor wait for ever."""
    other = folder / "other"
    other.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")

    def open_to_read(path: Path) -> BinaryIO:
        file = path.open("rb")
        if path == folder / "output.log" and other.exists():
            other.replace(path)
        return file

    monkeypatch.setattr(examination, "open_to_read", open_to_read)
    assert examine(end_of(folder), AttemptEvidence(folder, time.time())).kind is not Kind.GPU_OOM
    assert not other.exists()


def test_an_error_of_ours_is_a_diagnosis_that_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such\nshape")

    monkeypatch.setattr(examination, "diagnose_file", broken)
    found = examine(end_of(folder), AttemptEvidence(folder, time.time()))
    assert (found.kind, found.reason) == (Kind.NOT_MEMORY, "not_examined (ValueError: no such shape)")
    assert found.confidence < 0.5
    assert str(folder / "output.log") in found.summary
    assert "in broken" in found.evidence[0]
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_error_of_ours_does_not_end_it_either_where_nothing_can_be_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(examination, "evidence_of", broken)
    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115 - closing it fails, too
    monkeypatch.setattr("sys.stderr", full)
    found = examine(end_of(folder), AttemptEvidence(folder, time.time()))
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        full.close()
    assert found.reason == "not_examined (MemoryError)"


def test_a_log_that_is_gone_leaves_the_rest_of_the_evidence(folder: Path) -> None:
    (folder / "output.log").unlink()
    found = examine(end_of(folder, status=-9), AttemptEvidence(folder, time.time()))
    assert (found.kind, found.reason) == (Kind.NOT_MEMORY, "killed_by_something")


def test_only_torchruns_last_attempt_counts(folder: Path) -> None:
    """With --max-restarts torchrun restarts the ranks after a failure, and keeps the folders of all
    attempts."""
    for place, words in (
        ("torchelastic/none_x1/attempt_2/0", "MemoryError: "),
        ("torchelastic/none_x1/attempt_10/1", "KeyError: 'labels'"),
    ):
        (folder / place).mkdir(parents=True)
        (folder / place / "error.json").write_text(json.dumps({"message": words}))
    found = examine(end_of(folder), AttemptEvidence(folder, time.time()))
    assert (found.source, found.reason) == ("error_file", "python_error")
    (folder / "torchelastic/none_x1/attempt_10/1/error.json").unlink()
    assert evidence_of(end_of(folder), AttemptEvidence(folder, time.time())).error_files == ()


def test_only_the_end_of_the_kernels_log_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour ago the kernel may have killed a worker that the program has replaced: that kill did
    not end it."""
    asked: list[tuple[float, float]] = []
    monkeypatch.setattr(examination, "kernel_lines", lambda since, until, now: asked.append((since, until)) or ())
    ended = time.time()
    evidence_of(end_of(folder, ended=ended), AttemptEvidence(folder, ended - 3600))
    assert asked == [(ended - RELATED_SECONDS, ended)]


def test_only_a_kill_near_the_end_is_evidence_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group, proc = tmp_path / "cgroup/all", tmp_path / "proc"
    group.mkdir(parents=True)
    (proc / "77").mkdir(parents=True)
    (proc / "77/cgroup").write_text("0::/all\n")
    (group / "memory.events").write_text("oom_kill 2\n")
    monkeypatch.setattr(evidence_files, "PROC", proc)
    monkeypatch.setattr(evidence_files, "CGROUPS", tmp_path / "cgroup")
    seen = AttemptEvidence(folder, time.time())
    seen.look(77)
    (group / "memory.events").write_text("oom_kill 3\n")
    now = end_of(folder, status=-9)
    evidence = evidence_of(now, seen)
    assert (evidence.cgroup_oom_kills, evidence.cgroup_killed_near_end, evidence.killed_in_own_group) == (1, True, False)
    assert examine(now, seen).kind is Kind.HOST_OOM_KILLED
    later = examine(end_of(folder, status=-9, ended=time.time() + 3600), seen)
    assert (later.kind, later.reason) == (Kind.NOT_MEMORY, "killed_by_something")


_BROKEN = """
import sys
if "memtop.supervisor" in sys.orig_argv:
    from memtop.supervisor.run.post_mortem import examine as examination
    def broken(*_):
        raise ValueError("no such shape")
    examination.diagnose_file = broken
"""


def test_an_end_that_could_not_be_examined_is_a_warning_of_the_run(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_BROKEN)
    runs.environment["PYTHONPATH"] = str(tmp_path)
    runs.memtop("train", "--headless", "--name", "a", "--", sys.executable, "-c", "raise SystemExit(3)", status=1)
    warnings = [event.message for event in runs.events("a", "warning")]
    assert len(warnings) == 1
    assert "an error occurred while it read" in warnings[0]
    assert "(ValueError: no such shape)" in warnings[0]


def test_the_snapshot_that_the_failed_rank_has_kept_is_named(folder: Path) -> None:
    failure = end_of(folder, reports=((0, oom(survived=True)), (1, oom())))
    assert examine(failure, AttemptEvidence(folder, time.time())).snapshot_file is None
    for rank in (0, 1):
        (folder / f"rank-{rank}-memory.pickle").write_bytes(b"")
    found = examine(failure, AttemptEvidence(folder, time.time())).snapshot_file
    assert found == str(folder / "rank-1-memory.pickle"), "rank 0 has survived its failure"


def test_a_failure_of_host_memory_names_no_snapshot(folder: Path) -> None:
    (folder / "rank-0-memory.pickle").write_bytes(b"")
    failure = end_of(folder, reports=((0, oom(error="MemoryError", message="Unable to allocate 2 GiB")),))
    assert examine(failure, AttemptEvidence(folder, time.time())).snapshot_file is None
