"""Shared by all benchmarks: the machine, arms in processes of their own, medians and ratios."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import memtop

MIDDLE_LLAMA = {
    "model.config.hidden_size": 1024,
    "model.config.intermediate_size": 2816,
    "model.config.num_hidden_layers": 16,
    "model.config.num_attention_heads": 16,
    "model.config.num_key_value_heads": 16,
}
"""A llama of 200 M parameters: on a GPU, tiny models measure launches only."""


def machine() -> dict[str, Any]:
    """The machine, without its name."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {"cores": os.cpu_count(), "cpu": model, "python": platform.python_version(), "memtop": memtop.__version__}


def versions(*packages: str) -> dict[str, str | None]:
    """Their installed versions; None: not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def device_options(parser: argparse.ArgumentParser) -> None:
    """The options of benchmarks that run on a CPU and on a GPU."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--threads", type=int, default=1)


def printed_by(*words: str, environment: Mapping[str, str] | None = None) -> str:
    """What `python WORDS` prints; RuntimeError with the end of its messages if it fails."""
    surroundings = os.environ if environment is None else environment
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=surroundings)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)[:200]}: {done.stderr[-4000:]}")
    return done.stdout


def user_environment() -> dict[str, str]:
    """The environment of a user, in which Python keeps compiled modules."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def one_gpu() -> dict[str, str]:
    """The variables with which a program sees the first visible GPU alone.

    Hugging Face's Trainer in one process would spread each batch over all of them.
    """
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}


def report(name: str, results: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    print(json.dumps({"bench": name, "date": time.strftime("%Y-%m-%d"), "machine": machine(), **results}, indent=2))


def median_seconds(measure: Callable[[], float], runs: int) -> dict[str, float]:
    """Minimum, median and maximum of several runs; the first is not counted."""
    measure()
    values = [measure() for _ in range(runs)]
    return spread(values)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "minimum": round(min(values), 4),
        "median": round(statistics.median(values), 4),
        "maximum": round(max(values), 4),
        "runs": len(values),
    }


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """The spread of the ratios of neighbours."""
    return spread([one / other for one, other in zip(above, below, strict=True)])


class Peak:
    """The peak of memory since the last `start`, above the memory at the creation of this object,
    in bytes.

    On the CPU it is the resident set, whose highest mark Linux keeps (VmHWM); on a GPU what torch
    has allocated there.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self.exact = True
        """False if the kernel does not reset the peak: then it counts from the start of the
        process."""
        self.base = self._gpu().memory_allocated() if self._on_gpu else _status_bytes("VmRSS")

    def start(self) -> None:
        """Forget the peak so far."""
        if self._on_gpu:
            self._gpu().reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.exact = False

    def growth(self) -> int:
        """The peak since `start`, beyond `base`."""
        highest = self._gpu().max_memory_allocated() if self._on_gpu else _status_bytes("VmHWM")
        return int(highest) - self.base

    @staticmethod
    def _gpu() -> Any:
        import torch

        return torch.cuda


def _status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024
