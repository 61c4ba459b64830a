"""Starts trainings as memtop does: one process, or torchrun. Starts workers of two ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch.utils.cpp_extension import get_default_build_root

from memtop.presets import Settings
from memtop.presets.schema import Zero
from memtop.supervisor.run.processes.attempt import launcher
from tests.forking import run

# Another cache for memtop's own files must not make DeepSpeed compile its parts again, for minutes,
# in every test.
COMPILED = os.environ.get("TORCH_EXTENSIONS_DIR") or str(
    Path(get_default_build_root()) / f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
)
ROOT = Path(__file__).resolve().parents[2]
LAUNCHED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""What torchrun sets for one process."""
STRATEGIES = {
    "plain": Zero(),
    "zero2": Zero(stage=2),
    "zero2-offload": Zero(stage=2, offload_optimizer=True),
    "zero3": Zero(stage=3),
    "zero3-offload": Zero(stage=3, offload_optimizer=True, offload_parameters=True),
}


def environment(device: str = "cpu") -> dict[str, str]:
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {**found, "DS_ACCELERATOR": "cpu"} if device == "cpu" else found


def ended(words: Sequence[str], env: dict[str, str], *, cwd: Path = ROOT, imported: tuple[str, ...] = ()) -> str:
    """What `python WORDS` prints. That it ends at all is part of the test."""
    command = [sys.executable, *words]
    done = run(command, imported=imported, env=env, cwd=cwd, capture_output=True, text=True, timeout=290)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(words)[-300:]}: {done.stdout[-3000:]}{done.stderr[-5000:]}")
    return str(done.stdout)


def printed_by(*words: str, imported: tuple[str, ...] = (), **variables: str) -> Any:
    """The JSON of the last line that `python WORDS` prints."""
    return json.loads(ended(words, environment() | variables, imported=imported).splitlines()[-1])


def libraries_of(settings: Settings) -> tuple[str, ...]:
    return ("deepspeed",) if settings.zero.stage else ()


def two_ranks(
    worker: str, folder: Path, *what: str, device: str = "cpu", imported: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """What each of two ranks of this module writes into the folder."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", worker)
    ended([*torchrun, str(folder), *what], environment(device), imported=imported)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def train_on(folder: Path, state: Path, settings: Settings, updates: int) -> dict[str, Any]:
    """Resume the state with these settings, train some updates, save; return the worker's
    report."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_bytes(msgspec.json.encode(settings))
    report = folder / "report.json"
    arguments = ("--settings", str(folder / "settings.json"), "--state-dir", str(state), "--report", str(report))
    command = [*launcher(settings), "-m", "tests.train.state_worker", *arguments, "--updates", str(updates)]
    ended(command, environment(settings.device), imported=libraries_of(settings))
    found: dict[str, Any] = json.loads(report.read_text())
    return found


class Launched(msgspec.Struct, frozen=True):
    """A whole training in separate processes, read from the journal of its first rank."""

    state_dir: Path
    strategy: str
    losses: list[float]


def run_trainer(folder: Path, settings: Settings) -> Launched:
    """`python -m memtop.train` as memtop starts it, but without a supervisor."""
    attempt, state = folder / "attempt", folder / "train_latest_state"
    attempt.mkdir(parents=True)
    (folder / "settings.json").write_bytes(msgspec.json.encode(settings))
    trainer = ("-m", "memtop.train", "--settings", str(folder / "settings.json"), "--state-dir", str(state))
    site = ROOT / "train" / "agent" / "site"
    surroundings = environment(settings.device) | {
        "MEMTOP_ATTEMPT_DIR": str(attempt),
        "MEMTOP_ATTEMPT": "1",
        "MEMTOP_RUN": str(folder),
        "MEMTOP_SOCKET": str(folder / "none"),
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TORCH_EXTENSIONS_DIR": COMPILED,
    }
    ended([*launcher(settings), *trainer], surroundings, cwd=folder, imported=libraries_of(settings))
    reports = [json.loads(line) for line in (attempt / "rank-0.jsonl").read_text().splitlines() if line]
    (plan,) = [report for report in reports if report["type"] == "plan"]
    return Launched(state, plan["strategy"], [report["loss"] for report in reports if report["type"] == "step"])
