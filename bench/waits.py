"""What waits for the GPU during training, and how long the GPU is idle.

    python -m bench.waits [--device cuda|cpu] [--case NAME]

Prints a JSON line for each case (causal, full SFT, LoRA and T5). After a warm-up it trains 3
updates in which torch warns of each call that waits for the GPU
(`torch.cuda.set_sync_debug_mode("warn")`), and 3 updates under torch's profiler. `waits` counts the
warnings per update by the line of Python that caused them. `calls` counts what the profiler saw,
also waits that torch does not warn of. `busy_fraction` is the time in which the GPU computed or
copied; `gaps` are the longest times in between, with the kernel that ended each.

On a CPU torch warns of nothing and the operators stand for the kernels: this only tests the code.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.common import MIDDLE_LLAMA
from memtop.presets import Settings
from memtop.train.channel import Control, Unsupervised
from memtop.train.data import open_data
from memtop.train.model import tokens_and_config
from memtop.train.run import open_accelerator, open_engine
from memtop.train.trainer import Trainer
from tests.train.recipes import TINY_LLAMA, TINY_T5, pairs, settings_of, write_rows

WARM_UP, EACH = 3, 3
# What reads a value of the GPU, or waits for it.
_READING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::is_nonzero", "aten::masked_select")
_WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH")
_ROOT = str(Path(__file__).resolve().parents[1])
LONGEST = 8


def cases(device: str, folder: Path) -> dict[str, Settings]:
    """The settings of each case: a model of 200 M parameters on a GPU, a tiny one on a CPU."""
    data = write_rows(folder / "pairs.jsonl", pairs(400))
    # A configuration replaces the path of the model that a recipe would download.
    model = (TINY_LLAMA if device == "cpu" else MIDDLE_LLAMA) | {"model.config.model_type": "llama"}
    tuned = {
        **model,
        "model.config.vocab_size": 260,
        "model.config.max_position_embeddings": 2048,
        "data.tokenizer": "bytes",
        "data.train": data,
    }
    common: dict[str, Any] = {"device": device, "updates": WARM_UP + 2 * EACH, "save_every": 1000, "precision": "auto"}
    if device == "cpu":
        common |= {"seq_len": 32}
    lora = settings_of("sft-lora", **common, **tuned)
    return {
        "causal": settings_of("pretrain-causal", **common, **model),
        "sft": msgspec.structs.replace(lora, method="full", lora=None),
        "lora": lora,
        "t5": settings_of("pretrain-t5", **{"data.train": data}, **common, **(TINY_T5 if device == "cpu" else {})),
    }


class Watching(Unsupervised):
    """Turns the instruments on and off between updates."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._catching = warnings.catch_warnings(record=True)
        self._caught: list[warnings.WarningMessage] = []
        self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])])
        self.found: dict[str, Any] = {}

    def report(self, kind: str, **values: Any) -> None:
        if kind != "step":
            return
        if values["update"] == WARM_UP:
            self._caught = self._catching.__enter__() or []
            warnings.simplefilter("always")
            self._warn("warn")
        elif values["update"] == WARM_UP + EACH:
            self._warn("default")
            self._catching.__exit__(None, None, None)
            self.found = warned(self._caught)
            self._profile.start()
        elif values["update"] == WARM_UP + 2 * EACH:
            if self._on_gpu:
                torch.cuda.synchronize()
            self._profile.stop()
            self.found |= profiled(self._profile.events(), on_gpu=self._on_gpu)

    def _warn(self, mode: str) -> None:
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode(mode)


def warned(caught: Iterable[warnings.WarningMessage]) -> dict[str, Any]:
    """The warnings of torch per update, by place."""
    places = Counter(
        f"{one.filename.removeprefix(_ROOT + '/')}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)
    )
    return {
        "waits_per_update": round(places.total() / EACH, 2),
        "waits": {at: round(n / EACH, 2) for at, n in places.most_common()},
    }


def profiled(events: Any, *, on_gpu: bool) -> dict[str, Any]:
    """Calls per update, and the share of the time in which the device worked."""
    wanted = (*_READING, *_WAITING)
    calls = Counter(name for event in events if (name := next((w for w in wanted if event.name.startswith(w)), "")))
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    # Named ranges, such as an optimizer's step, contain the kernels and the gaps between them.
    work = [event for event in events if event.device_type == kind and not event.is_user_annotation]
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in work]
    return {"calls": {name: round(count / EACH, 2) for name, count in calls.most_common()}, **idle(spans)}


def idle(spans: list[tuple[float, float, str]]) -> dict[str, Any]:
    """From spans in microseconds: how much of the time is covered, and the longest gaps."""
    if not spans:
        return {"busy_fraction": None, "gaps": []}
    spans = sorted(spans)
    begin, covered, end = spans[0][0], 0.0, spans[0][0]
    gaps: list[tuple[float, str]] = []
    for start, stop, name in spans:
        if start > end:
            gaps.append((start - end, name))
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    gaps.sort(reverse=True)
    return {
        "update_seconds": round((end - begin) / EACH / 1e6, 5),
        "busy_fraction": round(covered / (end - begin), 4) if end > begin else None,
        "gaps_over_20_microseconds": sum(length > 20 for length, _ in gaps),
        "gaps": [{"microseconds": round(length, 1), "until": name[:80]} for length, name in gaps[:LONGEST]],
    }


def measure(case: str, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="memtop-waits-") as name:
        folder = Path(name)
        settings = cases(device, folder)[case]
        tokens, config = tokens_and_config(settings)
        accelerator = open_accelerator(settings, config)
        engine, position = open_engine(settings, accelerator, config, None)
        data = open_data(settings, tokens, level=settings.host_level)
        channel = Watching(device)
        trainer = Trainer(settings, engine, data.train, position, folder / "state", channel, tokens.pad)
        trainer.run(Control(channel, accelerator))
    return {"case": case, "split": [settings.batch, settings.accumulation], "seq_len": settings.seq_len, **channel.found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--case", choices=("causal", "sft", "lora", "t5"), help="measure in this process")
    given = parser.parse_args()
    if given.case:
        print("\n" + json.dumps(measure(given.case, given.device)), flush=True)
        return
    failed = 0
    for case in ("causal", "sft", "lora", "t5"):
        command = [sys.executable, "-m", "bench.waits", "--device", given.device, "--case", case]
        failed += subprocess.run(command, check=False).returncode != 0
    sys.exit(min(1, failed))


if __name__ == "__main__":
    main()
