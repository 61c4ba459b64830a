"""A run whose state is larger than its disk. The disk is enlarged while the run waits."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, create_run
from memtop.supervisor.run.starting import start_supervisor
from tests.conftest import Runs

# 1.4 million parameters: a state of 18 MiB, on a disk of 12.
RECIPE = """
[recipes.wide]
title = "t"
description = "d"
preset = "standard"
batch = 8
accumulation = 1
seq_len = 32
max_updates = 12
save_every = 3
learning_rate = 2e-3
[recipes.wide.model.config]
model_type = "llama"
vocab_size = 260
hidden_size = 256
intermediate_size = 512
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 256
[recipes.wide.data]
source = "python-stdlib"
max_bytes = 300000
"""


@pytest.fixture
def cramped(runs: Runs, small_disk: Path) -> Iterator[Runs]:
    """Runs whose folder lies on the small disk."""
    runs.path = small_disk / "runs"
    runs.environment["MEMTOP_RUNS_DIR"] = str(runs.path)
    (runs.root / "memtop.toml").write_text(RECIPE)
    yield runs
    runs.end_everything()  # while their folder can be seen


def fill(disk: Path) -> None:
    """Leave no space."""
    with (disk / "fill").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while os.statvfs(disk).f_bavail:  # the training writes, too
            file.write(bytes(4096))
    assert os.statvfs(disk).f_bavail == 0


def test_a_start_without_space_names_the_disk(cramped: Runs, small_disk: Path) -> None:
    fill(small_disk)
    done = cramped.memtop("train", "--headless", "--name", "a", "--", "true", status=1)
    assert f"{cramped.path}/a/run.json: cannot be written: No space left on device; free some space\n" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (cramped.path / "a").exists(), "a name that could not be used stays free"


def test_a_supervisor_that_cannot_even_say_why_it_does_not_start_names_the_disk(
    cramped: Runs, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is there; there is no space for the ledger, nor for a line in supervisor.log."""
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", cramped.environment["MEMTOP_SOCKET_DIR"])
    spec = RunSpec(name="a", created=1.0, settings=None, command=("true",), cwd="/", memtop_version="0")
    folder = create_run(cramped.path, spec, fresh=False)
    fill(small_disk)
    with pytest.raises(RunFolderError) as refused:
        start_supervisor(folder)
    assert str(refused.value) == f"{folder.path}: the disk is full: 0 KiB free; free some space, or set --runs-dir"
    assert folder.supervisor_log.read_bytes() == b""


def test_a_full_disk_keeps_no_supervisor_from_taking_over(
    cramped: Runs, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot write state.json. So it must be asked whether it has begun."""
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", cramped.environment["MEMTOP_SOCKET_DIR"])
    cramped.memtop("train", "--name", "a", "--detach", "--", "sleep", "600")
    document = cramped.wait("a", lambda d: d["trainer_pid"] is not None)
    os.kill(document["supervisor_pid"], signal.SIGKILL)
    fill(small_disk)
    assert start_supervisor(RunFolder(cramped.path / "a")) != document["supervisor_pid"]
    stopped = cramped.memtop("stop", "a")
    assert f"stopped as requested; SIGINT sent to pid {document['trainer_pid']} (sleep)" in stopped.stdout


def enlarge(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=80m", str(disk)], check=True)


def waits(document: dict[str, Any]) -> bool:
    return any("waiting for disk space" in warning for warning in document["warnings"])


def test_a_run_waits_for_room_and_finishes_with_every_sample_once(cramped: Runs, small_disk: Path) -> None:
    follower = cramped.start("train", "wide", "--name", "a", "--headless", stderr=subprocess.PIPE)
    assert follower.stderr is not None
    said = []
    for line in follower.stderr:
        said.append(line)
        if "waiting for disk space" in line:
            break
    wanted = f"18 MiB needed, 11 MiB free in {cramped.path / 'a'}"
    assert said[-1] == f"memtop: finished update 12, waiting for disk space: {wanted}; free some space or stop the run\n", said
    assert any(f"update 3 not saved: {wanted}; nothing saved yet; free some space" in line for line in said), said
    document = cramped.wait("a", waits)
    assert (document["state"], document["alive"], document["checkpoint"]) == ("training", True, None)
    for command in (("show", "a"), ("watch", "a", "--once")):
        assert "waiting for disk space: 18 MiB needed" in cramped.memtop(*command).stdout
    enlarge(small_disk)
    rest = follower.stderr.read()
    assert follower.wait(timeout=120) == 0, rest
    document = cramped.show("a", metrics=True)
    assert (document["state"], len(document["attempts"]), document["warnings"]) == ("finished", 1, [])
    assert [row["update"] for row in document["metrics"]] == list(range(1, 13))
    assert len({row["sample_digest"] for row in document["metrics"]}) == 12
    assert document["checkpoint"]["updates"] == 12


def test_a_stop_ends_the_wait_and_a_restart_says_what_is_done_again(cramped: Runs, small_disk: Path) -> None:
    cramped.memtop("train", "wide", "--name", "a", "--detach")
    cramped.wait("a", waits)
    stopped = cramped.memtop("stop", "a", status=1)
    words = f"finished update 12, not saved: 18 MiB needed, 11 MiB free in {cramped.path / 'a'}; nothing saved yet"
    assert words in stopped.stderr
    document = cramped.show("a")
    assert (document["state"], document["reason"], document["exit_status"]) == ("failed", words, 1)
    assert document["warnings"] == [], "nobody waits any more"
    again = "12 updates since the last saved state (none) are done again"
    assert again in cramped.memtop("restart", "a", "--detach").stderr
    cramped.wait("a", lambda d: len(d["attempts"]) == 2 and waits(d))
    # Once more, now while it waits: that would throw the updates away.
    refused = cramped.memtop("restart", "a", "--detach", status=1).stderr
    assert f"not restarted: update 12 not saved: 18 MiB needed, 11 MiB free in {cramped.path / 'a'}" in refused
    enlarge(small_disk)
    document = cramped.wait("a", lambda d: d["state"] == "finished")
    assert document["checkpoint"]["updates"] == 12
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["failed", "finished"]


ENDLESS = ("train", "wide", "--name", "a", "--max-updates", "1000000", "--set", "save_every=1000000")


def test_a_training_that_cannot_save_is_neither_restarted_nor_stopped_unasked(cramped: Runs, small_disk: Path) -> None:
    cramped.memtop(*ENDLESS, "--detach")
    cramped.wait("a", lambda d: (d["updates"] or 0) >= 2)
    fill(small_disk)
    refused = cramped.memtop("restart", "a", "--batch", "4", "--detach", status=1).stderr
    assert "not restarted: update" in refused
    assert f"18 MiB needed, 0 MiB free in {cramped.path / 'a'}; nothing saved yet; free some space" in refused
    assert refused.splitlines()[-1].startswith("memtop: not restarted: ")
    asked = cramped.memtop("stop", "a", status=1).stderr
    assert "not stopped: update" in asked
    assert "stop it again: it ends without saving then" in asked
    document = cramped.show("a")
    assert (document["state"], document["alive"], len(document["attempts"])) == ("training", True, 1)
    # The trainer cannot even report how it ended.
    ended = cramped.memtop("stop", "a", status=1).stderr
    assert re.search(r"stopped as requested: exit status 1; \d+ updates since the last saved state \(none\) are lost", ended)
    (small_disk / "fill").unlink()
    assert cramped.wait("a", lambda d: d["state"] == "stopped")["checkpoint"] is None


def test_a_training_restarts_once_it_can_save(cramped: Runs, small_disk: Path) -> None:
    cramped.memtop(*ENDLESS, "--detach")
    before = cramped.wait("a", lambda d: (d["updates"] or 0) >= 2)["updates"]
    cramped.memtop("restart", "a", "--batch", "4", "--detach", status=1)
    enlarge(small_disk)
    cramped.memtop("restart", "a", "--batch", "4", "--detach")
    document = cramped.wait("a", lambda d: len(d["attempts"]) == 2 and (d["updates"] or 0) > before)
    assert document["attempts"][0]["outcome"] == "restarted"
    assert document["checkpoint"]["updates"] >= before
    cramped.memtop("stop", "a")


def test_a_second_interrupt_ends_a_training_that_cannot_save(cramped: Runs) -> None:
    follower = cramped.start(*ENDLESS, "--headless", stderr=subprocess.PIPE)
    assert follower.stderr is not None
    follower.stderr.readline()  # the run is there
    cramped.wait("a", lambda d: (d["updates"] or 0) >= 2)
    follower.send_signal(signal.SIGINT)
    for line in follower.stderr:
        if "not stopped: update" in line:
            break
    cramped.wait("a", lambda d: any("not stopped" in warning for warning in d["warnings"]))
    follower.send_signal(signal.SIGINT)
    rest = follower.stderr.read()
    assert follower.wait(timeout=120) == 1, rest
    assert re.search(r"run a: failed \(stopped at update \d+, not saved: 18 MiB needed", rest), rest


@pytest.mark.long  # tests/train/test_disk_wait.py has the trainer alone
def test_a_signal_from_outside_ends_the_wait_for_good(cramped: Runs) -> None:
    cramped.memtop("train", "wide", "--name", "a", "--detach")
    document = cramped.wait("a", waits)
    os.kill(document["trainer_pid"], signal.SIGTERM)
    document = cramped.wait("a", lambda d: d["state"] not in ("training", "starting"))
    assert (document["state"], document["exit_status"], len(document["attempts"])) == ("failed", 1, 1)
    assert document["reason"].startswith("finished update 12, not saved: 18 MiB needed")
    assert document["attempts"][0]["diagnosis"]["kind"] == "disk_full"


@pytest.mark.long  # tests/train/test_disk_wait.py has the trainer alone
def test_a_run_that_only_reports_does_not_wait(cramped: Runs) -> None:
    done = cramped.memtop("train", "wide", "--name", "a", "--headless", "--on-oom", "stop", status=1)
    assert "run a: failed (finished update 12, not saved: 18 MiB needed" in done.stderr
    assert "waiting for disk space" not in done.stderr
    document = cramped.show("a")
    assert (document["state"], document["exit_status"]) == ("failed", 1)
    assert document["attempts"][0]["diagnosis"]["kind"] == "disk_full"
