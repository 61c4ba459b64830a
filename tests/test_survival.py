"""Real runs that run out of memory under `memtop train`, on the CPU: each failure is recognised and
has its own remedy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import memtop
from memtop.supervisor.run.record.folder import RunSpec, create_run
from tests.conftest import Runs
from tests.forking import run
from tests.groups import MemoryGroup
from tests.recovery.injected import SOON_STALLED, inject
from tests.train.support import edited

MIB = 1 << 20
MODEL = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}


def toml(values: dict[str, Any]) -> str:
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items())


# One sample takes 3 MiB: a batch of 256 needs half a GiB more than one of 128.
RECIPE = f"""
[recipes.hungry]
title = "t"
description = "d"
preset = "standard"
batch = 256
accumulation = 1
seq_len = 64
max_updates = 2
save_every = 1
learning_rate = 2e-3
[recipes.hungry.data]
source = "python-stdlib"
max_bytes = 300000
[recipes.hungry.model.config]
{toml(MODEL)}
[recipes.small]
title = "t"
description = "d"
preset = "standard"
batch = 8
accumulation = 4
seq_len = 32
max_updates = 40
save_every = 5
learning_rate = 2e-3
[recipes.small.data]
source = "python-stdlib"
max_bytes = 300000
[recipes.small.model.config]
{toml(MODEL | {"hidden_size": 64, "intermediate_size": 128})}
"""
PROBE = """
import re, sys
def memory(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
began = memory("VmRSS")
sys.argv = ["train", "--settings", sys.argv[1], "--state-dir", sys.argv[2]]
from memtop.train.__main__ import main
assert main() == 0
print(memory("VmPeak"), memory("VmHWM") - began)
"""


SMALL_SHM = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
own_mounts, recursive_and_private = 1 << 17, 1 << 14 | 1 << 18
assert libc.unshare(own_mounts) == 0
assert libc.mount(b"none", b"/", None, recursive_and_private, None) == 0
assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=128k") == 0
"""
"""A /dev/shm of 128 KiB for the new process and its children."""


class Needs(NamedTuple):
    """What the hungry run takes at batch 128 and at 256, in bytes: of addresses, and of memory that
    it did not begin with."""

    addresses: tuple[int, int]
    memory: tuple[int, int]

    @property
    def addresses_between(self) -> int:
        return sum(self.addresses) // 2

    @property
    def memory_between(self) -> int:
        return sum(self.memory) // 2


def arguments(runs: Runs, recipe: str, *more: str, name: str = "a") -> tuple[str, ...]:
    (runs.root / "memtop.toml").write_text(RECIPE)
    return ("train", recipe, "--name", name, *more)


@pytest.fixture(scope="module")
def needs(tmp_path_factory: pytest.TempPathFactory) -> Needs:
    """This is measured because torch and its threads take a different size on every machine."""
    place = tmp_path_factory.mktemp("needs")
    measured = []
    for batch in (64, 128):
        settings = edited(batch=batch, accumulation=1, target_samples=batch, save_every=9, seq_len=64, model={"config": MODEL})
        (place / "settings.json").write_bytes(msgspec.json.encode(settings))
        command = [sys.executable, "-c", PROBE, str(place / "settings.json"), str(place / f"state-{batch}")]
        done = run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        measured.append([int(word) for word in done.stdout.split()[-2:]])
    # A line through the two: what comes beyond them grows with the batch.
    (small_addresses, small_memory), (addresses, memory) = measured
    return Needs((addresses, addresses + 2 * (addresses - small_addresses)), (memory, memory + 2 * (memory - small_memory)))


def assert_whole(document: dict[str, Any], updates: int, effective: int) -> None:
    """Every update once, each with its samples."""
    assert document["state"] == "finished"
    assert [row["update"] for row in document["metrics"]] == list(range(1, updates + 1))
    assert [row["samples_seen"] for row in document["metrics"]] == [effective * n for n in range(1, updates + 1)]
    assert len({row["sample_digest"] for row in document["metrics"]}) == updates


def test_an_address_space_limit_is_survived_in_the_process(runs: Runs, needs: Needs) -> None:
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({needs.addresses_between},) * 2)"
    done = runs.memtop(*arguments(runs, "hungry", "--headless"), prepare=limit, timeout=280)
    document = runs.show("a", metrics=True)
    assert_whole(document, 2, 256)
    assert len(document["attempts"]) == 1, "no restart was needed"
    first, *_, last = document["configurations"]
    assert (first["outcome"], first["settings"]["batch"], first["peak"]["failed"]) == ("host_oom_alloc", 256, True)
    assert last["outcome"] == "finished"
    assert last["settings"]["batch"] * last["settings"]["accumulation"] == 256
    # The run is what it has become: so a restart starts.
    assert document["settings"]["batch"] == last["settings"]["batch"] < 256
    assert "out of memory (rank 0" in done.stderr
    assert "allocation failure at update" in done.stderr


@pytest.mark.long
def test_what_the_documentation_lets_a_newcomer_try(runs: Runs) -> None:
    """Real processes: the limit of the shell is theirs."""
    page = (Path(__file__).resolve().parents[1] / "docs/surviving.md").read_text()
    commands = page.split("## Try it")[1].split("```sh\n")[1].split("```")[0]
    # A script for each command, as an environment that is active has them.
    place = runs.root / "bin"
    place.mkdir()
    for name, words in (("python", ""), ("memtop", "-m memtop ")):
        (place / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (place / name).chmod(0o755)
    environment = {**runs.environment, "PATH": f"{place}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=runs.root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert "memtop: out of memory (rank 0, update 1, in the " in done.stderr
    assert "memtop: allocation failure at update 1: batch 512 -> 256, accumulation 1 -> 2" in done.stderr
    document = runs.show("try", metrics=True)
    assert_whole(document, 3, 512)
    assert len(document["attempts"]) == 1
    assert document["configurations"][0]["outcome"] == "host_oom_alloc"


def test_a_kernel_kill_restarts_with_a_smaller_batch(runs: Runs, needs: Needs, group: MemoryGroup) -> None:
    # The supervisor and the command itself live in the group as well.
    group.limit(needs.memory_between + 100 * MIB)
    for name in "abc":
        words = arguments(runs, "hungry", "--headless", name=name)
        runs.memtop(*words, prepare=group.enter, timeout=280, status=None)
        document = runs.show(name, metrics=True)
        if document["state"] != "killed":
            break
        # The kernel killed the supervisor, too, before the trainer's memory was free. That is
        # another story.
    assert_whole(document, 2, 256)
    # Usually two attempts; where the kernel counts more for a process, the second one is killed as
    # well.
    first, second = document["attempts"][:2]
    assert (first["exit_status"], first["diagnosis"]["kind"], first["diagnosis"]["source"]) == (-9, "host_oom_killed", "kernel")
    assert (second["settings"]["batch"], second["settings"]["accumulation"]) == (128, 2)
    assert "host_oom_killed" in second["reason"]
    *died, last = [row["outcome"] for row in document["configurations"]]
    assert 1 <= len(died) <= 2, "a restart or two are enough"
    assert (set(died), last) == ({"host_oom_killed"}, "finished")
    assert document["proposal"] is None


def test_a_worker_killed_by_the_kernel_leads_to_no_workers(runs: Runs, group: MemoryGroup) -> None:
    words = arguments(runs, "small", "--detach", "--max-updates", "400", "--set", "workers=1")
    runs.memtop(*words, prepare=group.enter)
    document = runs.wait("a", lambda d: (d["updates"] or 0) >= 6)
    worker = child_of(document["trainer_pid"])
    group.make_the_kernel_kill(worker, runs.root / "enough")
    document = runs.wait("a", lambda d: d["settings"]["workers"] == 0 and (d["updates"] or 0) > 6)
    diagnosis = document["attempts"][0]["diagnosis"]
    assert (diagnosis["kind"], diagnosis["phase"], len(document["attempts"])) == ("host_oom_killed", "data", 2)
    assert document["settings"]["batch"] == 8, "the batch is not what it was about"
    runs.memtop("stop", "a")


@pytest.mark.timeout(1500)
def test_one_rank_of_two_killed_by_the_kernel(runs: Runs, group: MemoryGroup) -> None:
    for name in "abcde":
        supervisor, before, killed = kill_second_rank(runs, group, name)
        if killed == 1:
            break
        # Both ranks wanted memory at the same moment, and the kernel killed both. That is another
        # story.
        runs.memtop("stop", name)
        assert supervisor.wait(timeout=120) == 0
        group.limit(8 << 30)
    else:
        pytest.fail("the kernel killed both ranks five times")
    document = runs.wait(
        name, lambda d: len(d["attempts"]) == 2 and d["settings"] != before and (d["updates"] or 0) > 6, seconds=180
    )
    diagnosis = document["attempts"][0]["diagnosis"]
    assert (diagnosis["kind"], diagnosis["rank"]) == ("host_oom_killed", 1)
    assert document["settings"]["batch"] == before["batch"] // 2
    assert document["effective_batch"] == before["batch"] * before["accumulation"] * 2
    runs.memtop("stop", name)
    assert supervisor.wait(timeout=120) == 0


def kill_second_rank(runs: Runs, group: MemoryGroup, name: str) -> tuple[subprocess.Popen[Any], dict[str, Any], int]:
    """A run of two ranks in the group, of which the kernel has killed the second one: its
    supervisor, its settings, and how many processes were killed."""
    settings = edited(batch=4, accumulation=4, world_size=2, target_samples=32 * 2000, save_every=5, seq_len=32)
    spec = RunSpec(
        name=name, created=1.0, settings=settings, cwd=str(runs.root), on_oom="auto", memtop_version=memtop.__version__
    )
    folder = create_run(runs.path, spec, fresh=False)
    # `--gpus` is for GPUs: two ranks on the CPU are only started by hand.
    supervisor = runs.start(str(folder.path), module="memtop.supervisor", prepare=group.enter)
    document = runs.wait(name, lambda d: (d["updates"] or 0) >= 6 and len(d["ranks"]) == 2, seconds=180)
    killed = group.make_the_kernel_kill(document["ranks"][1]["pid"], runs.root / f"{name}-enough")
    return supervisor, dict(document["settings"]), killed


def child_of(pid: int) -> int:
    """The newest child of a process: of a trainer its loader worker."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert children, f"{pid} has no children"
    return int(children[-1])


def test_a_full_shm_leads_to_no_workers(runs: Runs) -> None:
    """A batch of 64 x 128 tokens is 64 KiB a tensor: it does not fit next to the locks of the
    worker's queues."""
    if os.getuid() != 0:
        pytest.skip("a /dev/shm of its own takes a mount namespace, which only root may make")
    if run([sys.executable, "-c", ""], prepare=SMALL_SHM, capture_output=True).returncode != 0:
        pytest.skip("a /dev/shm of its own cannot be mounted here")
    inject(runs, "    pass", supervisor=SOON_STALLED)
    words = arguments(runs, "small", "--headless", "--batch", "64", "--accum", "1", "--seq-len", "128", "--max-updates", "4")
    runs.memtop(*words, "--set", "workers=1", prepare=SMALL_SHM, timeout=280)
    document = runs.show("a", metrics=True)
    assert_whole(document, 4, 64)
    first, second = document["attempts"]
    assert first["diagnosis"]["kind"] == "shm_exhausted"
    assert (second["settings"]["workers"], second["settings"]["batch"]) == (0, 64)


@pytest.mark.long  # tests/test_full_disk.py has a run that waits until its disk grows
def test_a_full_disk_is_waited_for(runs: Runs, small_disk: Path) -> None:
    """After the first save the disk is full. The trainer keeps its state in memory, and saves it
    when somebody frees space."""
    place = str(small_disk / "runs")
    words = (*arguments(runs, "small"), "--runs-dir", place, "--max-updates", "30")
    follower = runs.start(*words, "--headless", stderr=subprocess.PIPE)
    filler = small_disk / "filler"
    filling = threading.Thread(target=fill, args=(filler, small_disk / "runs/a/train_latest_state/manifest.json"))
    filling.start()
    assert follower.stderr is not None
    said = []
    for line in follower.stderr:
        said.append(line)
        if re.search(
            r"finished update 30, waiting for disk space: .* needed, [01] MiB free in .*; free some space or stop the run", line
        ):
            break
    else:
        raise AssertionError("".join(said))
    filling.join()
    filler.unlink()
    rest = follower.stderr.read()
    assert follower.wait(timeout=120) == 0, rest
    document = json.loads(runs.memtop("show", "a", "--json", "--metrics", "--runs-dir", place).stdout)
    assert_whole(document, 30, 32)
    assert len(document["attempts"]) == 1, "nothing was lost, so nothing was done again"
    assert document["checkpoint"]["updates"] == 30
    assert document["warnings"] == []


def fill(path: Path, after: Path) -> None:
    """Take all that is free but 1.7 MiB, as soon as that other file is there."""
    while not after.exists():
        time.sleep(0.005)
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 65536)
        except OSError as full:
            print(f"filled: {full}")
        # What memtop itself writes still fits.
        file.truncate(file.tell() - MIB * 17 // 10)
