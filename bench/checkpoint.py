"""Saving and loading a state of 31 M parameters: memtop's `train_latest_state` compared with
accelerate's save_state.

    python -m bench.checkpoint [--rounds N] [--recipe pretrain-causal] [--folder FOLDER]

All use the same model and AdamW after one update. Each measurement runs in a separate process, in
turns A B C D D C B A. `pause_seconds` is how long training stops for a save: for `memtop` the copy
of the state to host memory, for the others the whole save. `first_pause_seconds` is that of the
first save. memtop gets the memory for its copy from the system during the update before it.
`memtop_at_once` saves without a copy, as memtop does at the end of a training and where host memory
is short.

Memory is the peak minus what was held before; `moments_mib` is what every load needs (8 bytes per
parameter). memtop writes a temporary folder and renames it, calls fsync on every file, and stores
checksums that it compares at a load; accelerate does none of that. So `accelerate_synced` is
accelerate followed by an fsync of each file. After a load, every moment is written to once, as the
next update does, because memory-mapped tensors cost only then.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.common import Peak, printed_by, ratios, report, spread, versions
from memtop.presets import edit_settings, load_presets, load_recipes, resolve
from memtop.train import checkpoint
from memtop.train.channel import Unsupervised
from memtop.train.data.tokens import ByteTokens
from memtop.train.engine import PlainEngine, count_parameters
from memtop.train.exchange import Ranks
from memtop.train.model import model_config
from memtop.train.run import open_accelerator, open_engine
from memtop.train.state_files import Cut, ShardReader, newest_complete, sync
from memtop.train.state_saver import DiskWait, StateSaver

ARMS = ("memtop", "memtop_at_once", "accelerate", "accelerate_synced")
LOADS = ("memtop", "accelerate")
SAVES = 3


def prepared(recipe: str) -> tuple[PlainEngine, Any]:
    settings = edit_settings(
        resolve(load_recipes()[recipe], preset=load_presets()["standard"], whole=False),
        assignments={"device": "cpu", "precision": "fp32"},
    )
    config = model_config(settings, ByteTokens())
    engine, _ = open_engine(settings, open_accelerator(settings, config), config, None)
    assert isinstance(engine, PlainEngine)
    return engine, settings


def one_update(engine: PlainEngine) -> None:
    """One update, which creates the moments."""
    ids = torch.arange(8).reshape(1, 8)
    engine.backward(engine.objective(ids, ids), last=True)
    engine.step(1e-3)


def measure_save(arm: str, recipe: str, folder: Path) -> dict[str, Any]:
    engine, settings = prepared(recipe)
    # Later updates take no more memory than the second one.
    one_update(engine)
    one_update(engine)
    progress = checkpoint.SavedProgress(
        updates=1, samples_seen=1, epoch=0.0, cuts=(Cut(0, settings.seq_len),), target_samples=settings.target_samples
    )

    ranks = Ranks(engine.accelerator)
    saver = StateSaver(folder / "state", engine, Unsupervised(), ranks, DiskWait(), 0, pin_memory=False)

    def save() -> None:
        if arm.startswith("memtop"):
            saver.begin(progress, settings, background=arm == "memtop")
            return
        engine.accelerator.save_state(str(folder / "state"))
        if arm == "accelerate_synced":
            for path in (folder / "state").iterdir():
                sync(path)

    peak = Peak("cpu")
    if arm == "memtop":
        # As in a training: one update before the save.
        saver.prepare()
    one_update(engine)
    peak.start()
    pauses, seconds = [], []
    for _ in range(SAVES):
        pauses.append(seconds_of(save))
        seconds.append(pauses[-1] + seconds_of(saver.finish))
    size = sum(path.stat().st_size for path in (folder / "state").iterdir())
    return {
        "pause_seconds": sorted(pauses)[SAVES // 2],
        "first_pause_seconds": pauses[0],
        "seconds": sorted(seconds)[SAVES // 2],
        "peak_growth_mib": peak.growth() / 2**20,
        "state_mib": size / 2**20,
        "parameters": count_parameters(engine.model.parameters()),
    }


def measure_load(arm: str, recipe: str, folder: Path) -> dict[str, Any]:
    engine, _ = prepared(recipe)

    def load() -> None:
        if arm == "memtop":
            # As in train/run.py.
            found = newest_complete(folder / "state")
            assert found is not None
            place, written, _ = found
            read = ShardReader(place, written.files)
            checkpoint.load_weights(read, engine.model, place)
            engine.load_moments(read)
        else:
            engine.accelerator.load_state(str(folder / "state"))
        for state in engine.bare_optimizer.state.values():
            state["exp_avg"].mul_(1)
            state["exp_avg_sq"].mul_(1)

    peak = Peak("cpu")
    peak.start()
    seconds = seconds_of(load)
    assert all("exp_avg_sq" in engine.bare_optimizer.state[parameter] for parameter in engine.model.parameters())
    return {"seconds": seconds, "peak_growth_mib": peak.growth() / 2**20}


def seconds_of(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_child(arm: str, what: str, recipe: str, folder: Path) -> dict[str, Any]:
    arguments = ["--arm", arm, "--what", what, "--recipe", recipe, "--folder", str(folder)]
    found: dict[str, Any] = json.loads(printed_by("-m", "bench.checkpoint", *arguments).splitlines()[-1])
    pause = f", pause {found['pause_seconds']:.3f} s" if "pause_seconds" in found else ""
    print(f"{what} {arm}: {found['seconds']:.2f} s{pause}, {found['peak_growth_mib']:.0f} MiB", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2, help="each is A B C D D C B A")
    parser.add_argument("--recipe", default="pretrain-causal")
    parser.add_argument("--folder", type=Path, help="where the states are written; default: the folder for temporary files")
    parser.add_argument("--arm", choices=ARMS, help="measure one arm in this process")
    parser.add_argument("--what", choices=("save", "load"))
    given = parser.parse_args()
    if given.arm:
        torch.set_num_threads(1)
        measure = measure_save if given.what == "save" else measure_load
        print("\n" + json.dumps(measure(given.arm, given.recipe, given.folder)))
        return
    found: dict[str, dict[str, list[dict[str, Any]]]] = {what: {arm: [] for arm in ARMS} for what in ("save", "load")}
    for _ in range(given.rounds):
        for arm in (*ARMS, *reversed(ARMS)):
            with tempfile.TemporaryDirectory(prefix="memtop-bench-", dir=given.folder) as name:
                found["save"][arm].append(in_child(arm, "save", given.recipe, Path(name)))
                if arm in LOADS:
                    found["load"][arm].append(in_child(arm, "load", given.recipe, Path(name)))
    parameters = found["save"]["memtop"][0]["parameters"]
    report(
        "checkpoint",
        {
            "parameters": parameters,
            "moments_mib": round(parameters * 8 / 2**20, 1),
            "state_mib": {arm: round(runs[0]["state_mib"], 1) for arm, runs in found["save"].items()},
            "versions": versions("torch", "accelerate", "safetensors"),
            **{what: summary(runs) for what, runs in found.items()},
        },
    )


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    known = ("pause_seconds", "first_pause_seconds", "seconds", "peak_growth_mib")
    names = [name for name in known if name in runs["memtop"][0]]
    values = {arm: {name: [run[name] for run in own] for name in names} for arm, own in runs.items() if own}
    return {
        **{arm: {name: spread(own[name]) for name in names} for arm, own in values.items()},
        # accelerate's save needs hardly any memory, so a ratio of growth would say nothing.
        **{
            f"memtop_over_{arm}": {
                name: ratios(values["memtop"][name], own[name]) for name in names if name != "peak_growth_mib"
            }
            for arm, own in values.items()
            if arm != "memtop"
        },
    }


if __name__ == "__main__":
    main()
