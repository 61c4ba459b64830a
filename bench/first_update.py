"""How long it takes until the first update: `memtop train`, a restart of a run in progress, and a
bare script with Hugging Face's `Trainer`.

    python -m bench.first_update [--device cpu|cuda] [--rounds N]

All three train the model of the recipe first-run on the sources of the Python standard library,
with the same split. The times are from the start of the command to the end of its first update; a
restart (stop after the update, save, start) is timed from `memtop restart`. Each round measures all
three one after the other; the ratios are of one round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import one_gpu, printed_by, ratios, report, spread, user_environment
from memtop.presets import Settings, load_presets, load_recipes, resolve

PROMISED = {"first_update": 1.15, "restart": 1.25}
"""The largest ratio to the bare script."""
PATIENCE_SECONDS = 300
BARE = """
import json, sys, sysconfig, time
from pathlib import Path
import torch, transformers

given = json.loads(sys.argv[1])
config = dict(given["config"])
torch.manual_seed(1)
kind = config.pop("model_type")
model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config))
text, length = bytearray(), given["seq_len"]
for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
    if len(text) >= given["max_bytes"]:
        break
    text += path.read_bytes()
ids = torch.frombuffer(text, dtype=torch.uint8).long()
rows = [{"input_ids": piece, "labels": piece} for piece in ids[: len(ids) // length * length].split(length)]

class First(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print("first update", time.time(), flush=True)
        control.should_training_stop = True

arguments = transformers.TrainingArguments(
    output_dir=given["folder"],
    max_steps=10,
    per_device_train_batch_size=given["batch"],
    gradient_accumulation_steps=given["accumulation"],
    use_cpu=given["device"] == "cpu",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[First()]).train()
"""


def bare_seconds(settings: Settings, device: str, folder: Path) -> float:
    given = {
        "config": settings.model["config"],
        "seq_len": settings.seq_len,
        "max_bytes": settings.data["max_bytes"],
        "batch": settings.batch,
        "accumulation": settings.accumulation,
        "device": device,
        "folder": str(folder),
    }
    started = time.time()
    printed = printed_by("-c", BARE, json.dumps(given), environment=user_environment() | one_gpu())
    line = next(line for line in printed.splitlines() if line.startswith("first update"))
    return float(line.split()[-1]) - started


class Memtop:
    """Runs in a folder of their own."""

    def __init__(self, folder: Path, device: str) -> None:
        self._run = folder / "a"
        self._device = device
        self._environment = user_environment() | one_gpu() | {"MEMTOP_RUNS_DIR": str(folder), "HF_HUB_OFFLINE": "1"}

    def start_seconds(self) -> float:
        started = time.time()
        more = ("--set", f"device={self._device}", "--set", "save_every=1000000", "--max-updates", "1000000")
        self._call("train", "first-run", "--name", "a", "--preset", "standard", "--detach", *more)
        return self._first_update(1) - started

    def restart_seconds(self) -> float:
        self._wait(lambda: len(self._updates(1)) >= 5)
        started = time.time()
        self._call("restart", "a", "--detach")
        return self._first_update(2) - started

    def stop(self) -> None:
        self._call("stop", "a")

    def _call(self, *words: str) -> None:
        printed_by("-m", "memtop", *words, environment=self._environment)

    def _first_update(self, attempt: int) -> float:
        self._wait(lambda: bool(self._updates(attempt)))
        return float(self._updates(attempt)[0]["time"])

    def _updates(self, attempt: int) -> list[dict[str, Any]]:
        """The reports of updates that an attempt has written so far."""
        journal = self._run / "attempts" / f"{attempt:04}" / "rank-0.jsonl"
        lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in whole if row["type"] == "step"]

    @staticmethod
    def _wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no update within {PATIENCE_SECONDS} s")
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    settings = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])
    seconds: dict[str, list[float]] = {"bare": [], "first_update": [], "restart": []}
    with tempfile.TemporaryDirectory() as name:
        # Afterwards the libraries are in the page cache for all three.
        bare_seconds(settings, given.device, Path(name))
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory(prefix="memtop-start-", ignore_cleanup_errors=True) as name:
            seconds["bare"].append(bare_seconds(settings, given.device, Path(name) / "bare"))
            program = Memtop(Path(name) / "runs", given.device)
            try:
                seconds["first_update"].append(program.start_seconds())
                seconds["restart"].append(program.restart_seconds())
            finally:
                program.stop()
        print({kind: round(values[-1], 2) for kind, values in seconds.items()}, file=sys.stderr, flush=True)
    to_bare = {kind: ratios(seconds[kind], seconds["bare"]) for kind in PROMISED}
    report(
        "first_update",
        {
            "device": given.device,
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "seconds": {kind: spread(values) for kind, values in seconds.items()},
            "ratio_to_bare": to_bare,
            "verdict": {kind: to_bare[kind]["median"] <= most for kind, most in PROMISED.items()},
        },
    )


if __name__ == "__main__":
    main()
