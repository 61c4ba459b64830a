"""Trains every recipe with every preset that it can use, for some updates, with the real launch
command; prints JSON lines.

    python -m bench.recipes_and_presets [--device cpu|cuda] [--updates N] [--only RECIPE]
                                        [--at-once N] [--skip RECIPE/PRESET]

On the CPU the models are tiny, on a GPU larger (in both cases with random weights, and text from
the machine). Each line has the strategy that the trainer reports, the split, the first and last
loss, samples per second, and the peak in bytes if known. `refused`: memtop refused the pair before
the start. `failed`: the last line of its output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec

from bench.common import MIDDLE_LLAMA, machine
from memtop.presets import Settings, SettingsError, edit_settings, load_recipes, presets_for, resolve
from memtop.presets.schema import Preset
from memtop.supervisor.run.processes.attempt import launcher
from tests.train.recipes import TINY_LLAMA, TINY_T5, pairs, write_llama, write_rows

SITE = Path(__file__).resolve().parents[1] / "train" / "agent" / "site"
Change = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--only")
    parser.add_argument("--at-once", type=int, default=1, help="pairs that train at the same time")
    parser.add_argument("--skip", action="append", default=[], metavar="RECIPE/PRESET", help="may be repeated")
    arguments = parser.parse_args()
    print(json.dumps({"bench": "recipes_and_presets", "date": time.strftime("%Y-%m-%d"), "machine": machine()}), flush=True)
    with tempfile.TemporaryDirectory(prefix="memtop-recipes-") as name, ThreadPoolExecutor(arguments.at_once) as pool:
        folder = Path(name)
        data = write_rows(folder / "pairs.parquet", pairs(400))
        llama = write_llama(folder / "llama")
        waiting = []
        for recipe in load_recipes() if arguments.only is None else [arguments.only]:
            given = _overrides(recipe, arguments.device, data, llama) | {"max_updates": arguments.updates}
            presets = [preset for preset in presets_for(recipe).values() if f"{recipe}/{preset.name}" not in arguments.skip]
            waiting += [pool.submit(_pair, folder, recipe, preset, given) for preset in presets]
        for done in as_completed(waiting):
            print(json.dumps(done.result()), flush=True)


def _pair(folder: Path, recipe: str, preset: Preset, given: Change) -> Change:
    """The result of a recipe with a preset."""
    row = {"recipe": recipe, "preset": preset.name}
    assignments = {key: str(value) for key, value in given.items() if key != "max_updates"}
    try:
        settings = resolve(load_recipes()[recipe], preset=preset)
        settings = edit_settings(settings, max_updates=given["max_updates"], assignments=assignments)
    except SettingsError as error:
        return {**row, "refused": str(error)}
    try:
        return row | _train(folder / f"{recipe}-{preset.name}", settings)
    except subprocess.TimeoutExpired as error:
        return {**row, "failed": f"not finished after {error.timeout:.0f} s"}


def _overrides(recipe: str, device: str, data: Path, llama: Path) -> Change:
    """Settings that replace the data and models a recipe needs, and make models small enough."""
    common: Change = {"device": device, "save_every": 1000}
    if recipe == "first-run":
        return common
    if recipe == "pretrain-causal":
        return common | (TINY_LLAMA if device == "cpu" else MIDDLE_LLAMA)
    common |= {"data.train": data}
    if recipe == "pretrain-t5":
        return common | (TINY_T5 if device == "cpu" else {})
    return common | {"model.path": llama, "seq_len": 256}


def _train(folder: Path, settings: Settings) -> Change:
    folder.mkdir()
    (folder / "settings.json").write_bytes(msgspec.json.encode(settings))
    trainer = ("-m", "memtop.train", "--settings", str(folder / "settings.json"), "--state-dir", str(folder / "state"))
    surroundings = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "MEMTOP_ATTEMPT_DIR": str(folder),
        "MEMTOP_SOCKET": str(folder / "none"),
        "PYTHONPATH": os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")]),
        **({"DS_ACCELERATOR": "cpu"} if settings.device == "cpu" else {}),
    }
    command = [sys.executable, *launcher(settings), *trainer]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=900, check=False)
    about = {"split": [settings.batch, settings.accumulation, settings.world_size], "asked": str(settings.zero)}
    if done.returncode != 0:
        return {**about, "failed": (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}
    reports = [json.loads(line) for line in (folder / "rank-0.jsonl").read_text().splitlines() if line]
    (plan,) = [report for report in reports if report["type"] == "plan"]
    steps = [report for report in reports if report["type"] == "step"]
    peaks = [step["peak_bytes"] for step in steps if step.get("peak_bytes") is not None]
    seconds = statistics.median(step["step_seconds"] for step in steps[1:] or steps)
    return {
        **about,
        "strategy": plan["strategy"],
        "parameters": plan["parameters"],
        "trained_parameters": plan["trained_parameters"],
        "first_loss": round(steps[0]["loss"], 4),
        "last_loss": round(steps[-1]["loss"], 4),
        "samples_per_second": round(settings.effective_batch / seconds, 2),
        "peak_bytes": max(peaks) if peaks else None,
        "rss_bytes": max(step["rss_bytes"] for step in steps),
    }


if __name__ == "__main__":
    main()
