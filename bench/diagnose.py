"""Measures how well and how fast logs are diagnosed: the failure logs, mutations of them, and a log
of 200 MB. And in how much memory a snapshot of the GPU's memory of 500 MB is read.

python -m bench.diagnose [--size-mb 200] [--mutations 20000] > bench/results/DATE-diagnose.json
python -m bench.diagnose --snapshots [--snapshot-mb 500] > bench/results/DATE-snapshot.json
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from bench.common import report
from memtop.supervisor.diagnosis.diagnose import diagnose
from memtop.supervisor.diagnosis.text import BLOCK
from memtop.supervisor.diagnosis.values import Evidence
from tests.diagnosis import logs
from tests.diagnosis.logs import Log
from tests.diagnosis.mutations import HARMLESS, mutate

_MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.23 GiB. GPU 0 has a total capacity of 19.58 GiB "
    "of which 1.06 GiB is free. Including non-PyTorch memory, this process has 18.50 GiB memory in use. Of the allocated "
    "memory 14.94 GiB is allocated by PyTorch, and 3.18 GiB is reserved by PyTorch but unallocated."
)
_MEASURE = """
import json, resource, sys, time
from pathlib import Path
from memtop.supervisor.diagnosis.diagnose import diagnose, diagnose_file
from memtop.supervisor.diagnosis.values import Evidence
diagnose([b"warm"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
begun, processor = time.perf_counter(), time.process_time()
with Path(sys.argv[1]).open("rb") as log:
    found = diagnose_file(log, Evidence(exit_status=1))
spent = {"seconds": time.perf_counter() - begun, "processor_seconds": time.process_time() - processor}
print(json.dumps({name: round(value, 2) for name, value in spent.items()} | {
    "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "rss_before_bytes": before,
    "kind": found.kind.value, "phase": found.phase, "requested_bytes": found.requested_bytes}))
"""


_MEASURE_SNAPSHOT = """
import json, resource, sys, time
from pathlib import Path
from memtop.supervisor.diagnosis.diagnose import chunks_of
from memtop.supervisor.diagnosis.snapshot import read_snapshot
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
begun = time.process_time()
with Path(sys.argv[1]).open("rb") as file:
    snapshot, found = read_snapshot(chunks_of(file))
memory = snapshot.devices[0]
parts = [*(holder.held_bytes for holder in memory.holders), memory.other_holders_bytes, memory.unknown_bytes]
print(json.dumps({"processor_seconds": round(time.process_time() - begun, 1),
    "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "rss_before_bytes": before,
    "kind": found.kind.value, "requested_bytes": found.requested_bytes, "allocated_bytes": memory.allocated_bytes,
    "sum_of_holders_bytes": sum(parts)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = {"few_stacks": 400, "a_stack_each": 0, "no_stacks": None}
    parser.add_argument("--snapshots", nargs="*", choices=kinds, help="these kinds; without one, all")
    parser.add_argument("--snapshot-mb", type=int, default=500)
    parser.add_argument("--size-mb", type=int, default=200)
    parser.add_argument("--mutations", type=int, default=20_000)
    arguments = parser.parse_args()
    if arguments.snapshots is not None:
        chosen = arguments.snapshots or list(kinds)
        report("snapshot", {name: snapshot(arguments.snapshot_mb, kinds[name]) for name in chosen})
        return
    report(
        "diagnose",
        {
            "failure_logs": score(logs.read("failure_logs.jsonl")),
            "failure_logs_without_exit_status": score(logs.read("failure_logs.jsonl"), with_status=False),
            "more_logs": score(logs.read("more_logs.jsonl")),
            "mutations": mutations(logs.read("failure_logs.jsonl"), arguments.mutations),
            "lines_without_end": lines_without_end(),
            "one_line": one_line(arguments.size_mb),
            "large_log": large(arguments.size_mb),
        },
    )


def score(read: list[Log], *, with_status: bool = True) -> dict[str, Any]:
    """For each part of a diagnosis, the fraction of logs in which it is right; and the logs with
    errors."""
    right: Counter[str] = Counter()
    misses = []
    fields = wrong_fields = called_memory = 0
    for log in read:
        found = diagnose([log.data], Evidence(exit_status=log.exit_code if with_status else None))
        wrong = log.wrong_bytes(found)
        fields += len(logs.BYTES)
        wrong_fields += len(wrong)
        called_memory += log.kind == "not_memory" and found.of_memory
        parts = {
            "kind": found.kind.value == log.kind,
            "reason": log.reason is None or found.reason == log.reason,
            "phase": found.phase == log.phase,
            "device": found.device_index == log.expected.device_index,
            "other_processes": found.other_process_pids == log.expected.other_process_pids,
        }
        right.update(name for name, good in parts.items() if good)
        if wrong or not all(parts.values()):
            missed = [name for name, good in parts.items() if not good]
            misses.append(
                {"id": log.id, "missed": missed + wrong, "diagnosis": f"{found.kind.value} {found.reason} {found.phase}"}
            )
    shares = {f"{name}_right_fraction": round(count / len(read), 4) for name, count in right.items()}
    return {
        "logs": len(read),
        **shares,
        "bytes_right_fraction": round(1 - wrong_fields / fields, 4),
        "not_memory_called_memory": called_memory,
        "misses": misses,
    }


def mutations(read: list[Log], count: int) -> dict[str, Any]:
    """Exceptions over random mutations, and the fraction of kinds that harmless mutations keep."""
    texts = [log.text for log in read]
    raised: list[str] = []
    longest = 0.0
    begun = time.process_time()
    for seed in range(count):
        rng = random.Random(seed)
        index = rng.randrange(len(texts))
        names, data = mutate(texts, index, rng)
        started = time.process_time()
        try:
            diagnose([data], Evidence(exit_status=read[index].exit_code))
        except Exception as error:  # noqa: BLE001 - the benchmark counts exceptions
            raised.append(f"seed {seed}: {names} of {read[index].id}: {error!r}")
        longest = max(longest, time.process_time() - started)
    spent = time.process_time() - begun
    return {
        "count": count,
        "raised": len(raised),
        "first_raised": raised[:5],
        "processor_seconds": round(spent, 1),
        "longest_seconds": round(longest, 3),
        "kind_kept_fraction": {name: _kept(read, name) for name in sorted(HARMLESS)},
    }


def lines_without_end() -> dict[str, dict[str, float]]:
    """Processor seconds for logs of 1 and 2 MB that repeat the beginning of a pattern on one line.

    Twice the log must take at most twice the time. Words that name a failure are everywhere, so
    that the excerpt is as large as it can be.
    """
    found = {}
    for unit in ("1", " ", "line1", "│ ", "step 1 ", "Killed ", "CUDA out of memory", "Aa.", "pid=1 ", "Tried to allocate 2"):
        spent = []
        for size in (1_000_000, 2_000_000):
            part = unit * (60_000 // len(unit)) + "\nKilled by a line"
            started = time.process_time()
            diagnose([(part * (size // len(part))).encode()], Evidence(exit_status=1))
            spent.append(time.process_time() - started)
        found[unit] = {"seconds_1_mb": round(spent[0], 2), "seconds_2_mb": round(spent[1], 2)}
    return found


def one_line(size_mb: int) -> dict[str, float]:
    """Processor seconds for a log that is one line of many millions of characters."""
    block = (b"loss 2.31 " * (BLOCK // 10 + 1))[:BLOCK]
    count = max(1, size_mb * 1_000_000 // BLOCK)
    started = time.process_time()
    diagnose((block for _ in range(count)), Evidence(exit_status=1))
    spent = time.process_time() - started
    return {"bytes": count * BLOCK, "processor_seconds_per_100_mb": round(spent * 1e8 / (count * BLOCK), 2)}


def _kept(read: list[Log], name: str, rounds: int = 5) -> float:
    kept = 0
    for seed in range(rounds):
        rng = random.Random(seed)
        for log in read:
            found = diagnose([HARMLESS[name](log.text, rng)], Evidence(exit_status=log.exit_code))
            kept += found.kind.value == log.kind
    return round(kept / rounds / len(read), 4)


def large(size_mb: int) -> dict[str, Any]:
    """Reads a log of progress bars and steps three times. It has a survived failure in the middle
    and one at the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "output.log"
        write_large(path, size_mb * 1_000_000)
        command = [sys.executable, "-c", _MEASURE, str(path)]
        runs = [json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(3)]
        fastest = min(runs, key=lambda run: run["seconds"])
        size = path.stat().st_size
    return {
        "bytes": size,
        **fastest,
        "seconds_per_100_mb": round(fastest["seconds"] * 1e8 / size, 2),
        "processor_seconds_per_100_mb": round(fastest["processor_seconds"] * 1e8 / size, 2),
        "seconds_of_each_run": [run["seconds"] for run in runs],
        "other_load": "other programs ran on the machine" if _busy() else "nothing else ran",
    }


def write_large(path: Path, size: int) -> None:
    written = number = 0
    in_the_middle = False
    with path.open("wb") as file:
        while written < size:
            rows = []
            for number in range(number + 1, number + 2001):  # noqa: B020 - continues where the last block ended
                rows.append(
                    f"\rEpoch 3:  37%|███▋      | {number}/3000000 [06:11<10:33,  2.98it/s, loss=2.31, lr=1e-4, gpu_mem=12.3G]"
                )
                if number % 5 == 0:
                    rows.append(
                        f"\n2026-03-25 10:34:07,123 INFO trainer.py:88] step {number}/3000000 | loss 3.22 | max mem 12.3 GiB\n"
                    )
            written += file.write("".join(rows).encode())
            if not in_the_middle and written > size // 2:
                in_the_middle = True
                file.write(f"\n[WARNING] evaluation skipped: {_MESSAGE.replace('1.23', '9.99')}\n".encode())
        frame = '  File "/v/lib/python3.11/site-packages/torch/_tensor.py", line 492, in backward\n'
        file.write(f"\nTraceback (most recent call last):\n{frame}{_MESSAGE}\n".encode())


def snapshot(size_mb: int, stacks: int | None) -> dict[str, Any]:
    """Reads a snapshot whose history is nearly the whole file, as in a run that records it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        blocks, entries = write_snapshot(path, size_mb * 1_000_000, stacks)
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE_SNAPSHOT, str(path)], capture_output=True, text=True, check=True
        ).stdout
        return {"bytes": path.stat().st_size, "blocks": blocks, "history_entries": entries, **json.loads(done)}


class _Pickle:
    """Writes a pickle of protocol 4 piece by piece: a value of this size does not fit into memory
    as Python objects."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._memo: dict[str, int] = {}
        self._count = 0
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += self._file.write(data)

    def begin(self, opcode: bytes) -> int:
        """An empty list or dictionary; its number in the memo."""
        self.write(opcode + b"\x94(")
        self._count += 1
        return self._count - 1

    def get(self, number: int) -> None:
        self.write(b"h" + bytes((number,)) if number < 256 else b"j" + number.to_bytes(4, "little"))

    def text(self, text: str, *, again: bool = True) -> None:
        """`again`: refer to the text if it was written before, as to the same object."""
        if again and text in self._memo:
            self.get(self._memo[text])
            return
        data = text.encode()
        self.write(b"\x8c" + bytes((len(data),)) + data + b"\x94")
        self._memo[text] = self._count
        self._count += 1

    def number(self, value: int) -> None:
        self.write(b"K" + bytes((value,)) if value < 256 else b"\x8a\x08" + value.to_bytes(8, "little"))

    def pairs(self, **values: int | str) -> None:
        for key, value in values.items():
            self.text(key)
            if isinstance(value, str):
                self.text(value, again=key != "compile_context")
            else:
                self.number(value)


def write_snapshot(path: Path, size: int, stacks: int | None) -> tuple[int, int]:
    """Blocks and history entries. `stacks`: how many different ones there are; 0: each entry has
    its own; None: no history of the program's lines."""
    rng = random.Random(5)
    blocks, entries = 20_000, 0
    with path.open("wb") as file:
        out = _Pickle(file)
        out.write(b"\x80\x04")
        out.begin(b"}")
        known: list[bytes] = []
        paths: dict[int, bytes] = {}

        def stack(number: int) -> None:
            out.text("frames")
            out.begin(b"]")
            if stacks is not None and len(known) < 3000:
                for _ in range(60):
                    known.append(b"j" + out.begin(b"}").to_bytes(4, "little"))
                    file_name = f"/v/lib/python3.11/site-packages/transformers/models/m{len(known)}/modeling.py"
                    out.pairs(name="forward", filename=file_name, line=len(known) % 2000)
                    out.write(b"u")
            elif stacks:
                if number % stacks not in paths:
                    paths[number % stacks] = b"".join(rng.choices(known, k=60))
                out.write(paths[number % stacks])
            elif known:
                out.write(b"".join(rng.choices(known, k=60)))
            out.write(b"e")

        out.text("segments")
        out.begin(b"]")
        for number in range(blocks):
            out.begin(b"}")
            out.pairs(device=0, address=number << 30, total_size=3 << 20, stream=0)
            out.text("blocks")
            out.begin(b"]")
            out.begin(b"}")
            out.pairs(address=number << 30, size=3 << 20, requested_size=3 << 20, state="active_allocated")
            stack(number)
            out.write(b"ueu")
            if number % 1000 == 999:
                out.write(b"e(")
        out.write(b"e")
        out.text("device_traces")
        out.begin(b"]")
        out.begin(b"]")
        while out.written < size:
            entries += 1
            action = "oom" if out.written > size - 1000 else "alloc"
            out.begin(b"}")
            out.pairs(action=action, **{"device_free" if action == "oom" else "addr": entries << 20}, size=1 << 31, stream=0)
            out.pairs(time_us=entries << 20, compile_context="N/A", user_metadata="")
            stack(entries)
            out.write(b"u")
            if entries % 1000 == 0:
                out.write(b"e(")
        out.write(b"eeu.")
    return blocks, entries


def _busy() -> bool:
    return float(Path("/proc/loadavg").read_text().split()[0]) > 1.5


if __name__ == "__main__":
    main()
