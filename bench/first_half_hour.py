"""The first half hour on a machine with an NVIDIA GPU: the checks and measurements that no other
machine can do, the most important ones first.

    python -m bench.first_half_hour [--device cuda|cpu] [--results FILE] [--only PART]
                                    [--again PART] [--minutes N] [--list]

Every result is one JSON line with versions, GPU and date. It is appended to the file at once, so
that a machine which is taken away takes no result with it. After an interruption, call it again: it
skips what has a result (a part that ended, a command, a test, a pair of recipe and preset).
A part ends after 10 minutes at the latest, and all of them after `--minutes`.

`--device cpu` is the rehearsal: it runs the same parts with tiny models, so that no minute on a
GPU is lost to a mistake. What only a GPU has (a memory limit, its sensors) is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.common import machine, versions
from memtop.supervisor.monitor.nvml.thread import ONCE_SECONDS
from memtop.supervisor.monitor.sampler import Sampler

ROOT = Path(__file__).resolve().parents[1]
PART_SECONDS = 600
PATIENCE_SECONDS = 20
"""How long a part may clean up when its time is over."""
_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "bitsandbytes", "peft")
_FILE, _ABOUT = "MEMTOP_RESULTS", "MEMTOP_RESULTS_ABOUT"
REHEARSED = {"MEMTOP_GPU_TESTS": "cpu", "OMP_NUM_THREADS": "1"}
Row = dict[str, Any]


class Part(msgspec.Struct, frozen=True):
    """Commands whose JSON lines, JSON documents and tests are results. `minutes` is a plan."""

    name: str
    minutes: int
    about: str
    commands: tuple[tuple[str, ...], ...]


def checks(*files: str, options: Sequence[str] = ()) -> tuple[str, ...]:
    """The command that runs these tests; each test is a result."""
    return ("-m", "pytest", "-q", "-n", "0", "-p", "bench.first_half_hour", *options, *files)


def parts(device: str) -> tuple[Part, ...]:
    """All parts, in their order."""
    small = device == "cpu"
    given = ("--device", device)
    speed: tuple[str, ...] = ("-m", "bench.train", *given, "--rounds", "1")
    if small:
        real = [(*speed, "--case", case, "--updates", "1") for case in ("small_vocabulary", "small_lora")]
        pieces = [(*speed, "--case", "small_vocabulary", "--updates", "1", "--only", "memtop", "--set", "loss_chunk=64")]
    else:
        speed = (*speed, "--precision", "bf16")
        real = [(*speed, "--case", case) for case in ("half_billion", "half_billion_lora")]
        changes = [f"loss_chunk={tokens}" for tokens in (128, 512, 2048, 0)] + ["compile=true", "bf16_residual=true"]
        pieces = [(*speed, "--case", "half_billion", "--only", "memtop", "--set", change) for change in changes]
    short = ("-m", "bench.packing", *given, *(("--rounds", "1") if small else ("--precision", "bf16", "--case", "middle")))
    pairs = ("--only", "first-run") if small else ("--at-once", "3")
    # In the rehearsal one file stands for the suite.
    suite = checks("tests/test_presets.py") if small else checks("tests", options=("-n", "8", "--dist", "loadfile"))
    return (
        Part(
            "machine",
            3,
            "doctor; the monitor's values compared with those of nvidia-smi, idle and under load",
            (("-m", "memtop", "doctor", "--json"), checks("tests/gpu/test_monitor.py")),
        ),
        Part(
            "trainer",
            5,
            "recipes in each precision; shrink and grow back; batch auto; 4 and 8 bits",
            (checks("tests/gpu/test_trainer.py"), checks("tests/gpu/test_batch_search.py")),
        ),
        Part(
            "runs",
            4,
            "kill -9 and resume, free, restart --live, advise --try, forecasts",
            (checks("tests/gpu/test_runs.py"),),
        ),
        Part(
            "memory",
            10,
            "peaks of 35 trainings compared with the dry run and the estimate",
            (("-m", "bench.gpu_memory", *given, "--results", os.devnull),),
        ),
        Part("waits", 3, "what waits for the GPU in 3 updates, and how long it is idle", (("-m", "bench.waits", *given),)),
        Part("speed", 6, "compared with Hugging Face's Trainer at a real size, full and LoRA", tuple(real)),
        Part("states", 5, "resume plain, ZeRO and 8-bit from each other", (checks("tests/gpu/test_states.py"),)),
        Part("ranks", 2, "two ranks on one GPU over gloo; one runs out of memory", (checks("tests/gpu/test_ranks.py"),)),
        Part("logs", 1, "real failures through `memtop diagnose`", (checks("tests/gpu/test_failure_logs.py"),)),
        Part(
            "presets",
            8,
            "every recipe with every preset",
            (("-m", "bench.recipes_and_presets", *given, "--updates", "3", *pairs),),
        ),
        Part("pieces", 6, "the speed of other pieces of the loss, of compile and of bf16_residual", tuple(pieces)),
        Part("packing", 2, "short samples: padded, shared out by length, packed", (short,)),
        Part("start", 3, "first update and restart; a bare Trainer script", (("-m", "bench.first_update", *given),)),
        Part("suite", 10, "all other tests, where the driver sees a GPU", (suite,)),
    )


# --- the file of results --------------------------------------------------------------------------


class Results:
    """Appends lines to the file; `about` is in every line."""

    def __init__(self, path: Path, about: Row) -> None:
        self._path = path
        self._about = about

    def append(self, row: Row) -> None:
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S"), **row, **self._about})
        with self._path.open("a") as file:
            file.write(line + "\n")

    def rows(self) -> Iterator[Row]:
        """All whole lines; the last one may have been cut."""
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)

    def ended(self, device: str) -> set[str]:
        """The parts that ran to their end on this kind of device."""
        return {row["part"] for row in self.rows() if row["device"] == device and row.get("ended") in ("done", "failed")}

    def unfinished(self, part: str, device: str) -> list[Row]:
        """The results of a part since it last ended: what a call that was interrupted left."""
        found: list[Row] = []
        for row in self.rows():
            if (row["part"], row["device"]) == (part, device):
                found = [] if row.get("ended") in ("done", "failed") else [*found, row]
        return found


def about(device: str) -> Row:
    """What every line says: device, GPU and versions."""
    import torch

    sampler = Sampler(patience=ONCE_SECONDS)
    snapshot = sampler.sample()
    sampler.close()
    found: Row = {**versions(*_PACKAGES), "memtop": _commit()}
    found |= {"cuda": torch.version.cuda, "driver": snapshot.driver_version, "python": machine()["python"]}
    gpus = [{"name": gpu.name, "total_bytes": gpu.total_bytes} for gpu in snapshot.gpus]
    return {"device": device, "gpus": gpus, "versions": found}


def _commit() -> str | None:
    """The commit, with + if files differ from it; None in a copy without Git."""
    where = ("git", "-C", str(ROOT))
    try:
        head = subprocess.run((*where, "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=True).stdout
        changed = subprocess.run((*where, "status", "--porcelain"), capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("MEMTOP_COMMIT")
    return head.strip() + ("+" if changed else "")


# --- tests as results (this file is also a plugin of pytest) --------------------------------------


class TestResults:
    """Appends a line for each test, or in a large suite for each one that did not pass."""

    __test__ = False

    def __init__(self, results: Results, *, all_of_them: bool) -> None:
        self._results = results
        self._all = all_of_them
        self._counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        self._counts[outcome] += 1
        if not self._all and outcome in ("passed", "skipped"):
            return
        row: Row = {
            "test": report.nodeid,
            "outcome": outcome,
            "seconds": round(report.duration, 2),
            **dict(report.user_properties),
        }
        if outcome == "skipped" and isinstance(report.longrepr, tuple):
            row["reason"] = report.longrepr[2].removeprefix("Skipped: ")
        elif outcome != "passed":
            row["reason"] = report.longreprtext[-3000:]
        self._results.append(row)

    def pytest_sessionfinish(self) -> None:
        self._results.append({"tests": dict(self._counts)})


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin: only in the process that gets all reports, and not in workers."""
    if _FILE in os.environ and not hasattr(config, "workerinput"):
        results = Results(Path(os.environ[_FILE]), json.loads(os.environ[_ABOUT]))
        config.pluginmanager.register(TestResults(results, all_of_them=config.args != ["tests"]))


# --- running the parts ----------------------------------------------------------------------------


def run_part(part: Part, results: Path, common: Row, seconds: float) -> str:
    """Run the commands of a part; return how it ended: done, failed, limit."""
    lines = Results(results, {"part": part.name, **common})
    started, ended = time.monotonic(), "done"
    statuses: list[int | None] = []
    log = results.with_suffix(f".{part.name}.log")
    before = lines.unfinished(part.name, common["device"])
    have = [row["command"] for row in before if "command" in row]
    for command in part.commands:
        words = " ".join(command)
        if words in have:
            continue
        left = seconds - (time.monotonic() - started)
        status = run_command((*command, *without(command, before)), lines, {**common, "part": part.name}, results, log, left)
        statuses.append(status)
        if status is None:
            ended = "limit"
            break
        lines.append({"command": words, "exit_status": status})
        # pytest exits with 5 if every test has a result already.
        ended = "failed" if status not in (0, 5) else ended
    row: Row = {"ended": ended, "seconds": round(time.monotonic() - started, 1), "exit_statuses": statuses}
    if ended != "done":
        row["end_of_log"] = log.read_text(errors="replace")[-3000:]
    lines.append(row)
    return ended


def without(command: tuple[str, ...], before: list[Row]) -> list[str]:
    """The options with which a command leaves out what has a result."""
    if command[1] == "pytest":
        return [word for row in before if "test" in row for word in ("--deselect", row["test"])]
    if command[1] == "bench.recipes_and_presets":
        pairs = [f"{row['recipe']}/{row['preset']}" for row in before if "preset" in row]
        return [word for pair in pairs for word in ("--skip", pair)]
    return []


def run_command(command: tuple[str, ...], lines: Results, common: Row, results: Path, log: Path, seconds: float) -> int | None:
    """Run a command and append its JSON; return its exit status, or None if its time was over."""
    surroundings = os.environ | {
        _FILE: str(results),
        _ABOUT: json.dumps(common),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # On a GPU each program of a test starts as a user's would, and not as a fork.
        **(REHEARSED if common["device"] == "cpu" else {} if common["part"] == "suite" else {"MEMTOP_TESTS_EXEC": "1"}),
    }
    over = threading.Event()
    with log.open("a") as errors:
        errors.write(f"$ python {' '.join(command)}\n")
        errors.flush()
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=surroundings,
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(max(0.0, seconds), _end, (process, over))
        timer.start()
        try:
            assert process.stdout is not None
            _collect(process.stdout, lines, errors)
            status = process.wait()
        finally:
            timer.cancel()
            _kill(process, signal.SIGKILL)
    return None if over.is_set() else status


def _collect(output: Any, lines: Results, log: Any) -> None:
    """Append each line that is a JSON object, and a document that spans all other lines."""
    rest = []
    for line in output:
        log.write(line)
        log.flush()
        row = _json(line) if line.startswith("{") else None
        if isinstance(row, dict):
            lines.append(row)
        else:
            rest.append(line)
    document = _json("".join(rest))
    if document is not None:
        lines.append(document if isinstance(document, dict) else {"found": document})


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _end(process: subprocess.Popen[str], over: threading.Event) -> None:
    """Interrupt, so that tests can end the processes that they started; then kill."""
    over.set()
    _kill(process, signal.SIGINT)
    try:
        process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(process, signal.SIGKILL)


def _kill(process: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def main() -> int:
    # A shell starts its background jobs with SIGINT ignored, and the parts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    names = [part.name for part in parts("cuda")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, help="default: bench/results/DATE-gpu.jsonl")
    parser.add_argument("--only", choices=names, action="append", help="only this part; may be repeated")
    parser.add_argument("--again", choices=names, action="append", default=[], help="repeat a part that has ended")
    parser.add_argument("--minutes", type=float, default=30.0, help="the most for all parts")
    parser.add_argument("--list", action="store_true", help="print the parts")
    given = parser.parse_args()
    if given.list:
        for part in parts(given.device):
            print(f"{part.name:8} {part.minutes:2} min  {part.about}")
        return 0
    common = about(given.device)
    if given.device == "cuda" and not common["gpus"]:
        print("first_half_hour: no NVIDIA GPU is here; try --device cpu for a rehearsal", file=sys.stderr)
        return 2
    results = (given.results or ROOT / "bench" / "results" / f"{time.strftime('%Y-%m-%d')}-gpu.jsonl").resolve()
    deadline = time.monotonic() + 60 * given.minutes
    ended = Results(results, {}).ended(given.device) - set(given.again)
    failed = False
    for part in parts(given.device):
        left = deadline - time.monotonic()
        if part.name in ended or (given.only and part.name not in given.only) or left < 1:
            print(f"{part.name}: {'has results' if part.name in ended else 'left out'}", file=sys.stderr)
            continue
        print(f"{part.name}: {part.about} (about {part.minutes} min)", file=sys.stderr, flush=True)
        how = run_part(part, results, common, min(PART_SECONDS, left))
        print(f"{part.name}: {how}", file=sys.stderr, flush=True)
        failed |= how != "done"
    print(f"results: {results}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
