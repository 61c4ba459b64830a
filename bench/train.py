"""memtop's trainer compared with Hugging Face's `Trainer`: samples per second and peak memory on
the same work.

python -m bench.train [--device cpu|cuda] [--precision fp32|bf16|fp16] [--accumulation A]
                      [--rounds N] [--updates N] [--case NAME] [--set KEY=VALUE] [--only memtop]

Both arms use the same weights, the same samples in the same order, AdamW with the same constant
rate, clipping at 1, and the same kernels for attention, optimizer and matrix products; no
checkpoint, no evaluation, a log line every 4 updates. Each arm runs in a separate process. On a CPU
the two processes take turns, update by update (A B B A), while the other one waits: the speed of a
machine changes by several percent within seconds. On a GPU a turn is a whole process. A pair is one
turn of each arm. Their losses are compared, because both must do the same training. Memory is the
peak after the warm-up, minus what was held once model and data were loaded. `verdict` compares the
medians with what memtop promises.

The cases `half_billion` have the shape of Qwen2.5-0.5B (494 M parameters), for a GPU. `--set`
changes a setting of memtop alone, and `--only memtop` measures nothing else, to compare settings.
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
from collections.abc import Generator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench.common import Peak, device_options, one_gpu, ratios, report, spread, versions
from memtop.presets import Settings, edit_settings, load_presets, load_recipes, resolve
from memtop.train.agent.memory import readings
from memtop.train.channel import Control, Unsupervised
from memtop.train.data.samples import PackedText
from memtop.train.data.tokens import ByteTokens, TokenStore
from memtop.train.model import accelerate_name, build_model, model_config
from memtop.train.order import SampleOrder
from memtop.train.run import open_accelerator, open_engine
from memtop.train.state_files import Cut
from memtop.train.trainer import Trainer

ARMS = ("memtop", "hugging_face")
MEASURED = ("samples_per_second", "samples_per_cpu_second", "peak_growth_mib", "peak_mib")
WARM_UP = 3
LOG_EVERY = 4
TURN = "turn"
"""An arm prints this line when it waits for its turn."""
_HALF_BILLION = {
    "batch": "8",
    "accumulation": "1",
    "seq_len": "1024",
    "model.config.model_type": "qwen2",
    "model.config.vocab_size": "151936",
    "model.config.hidden_size": "896",
    "model.config.intermediate_size": "4864",
    "model.config.num_hidden_layers": "24",
    "model.config.num_attention_heads": "14",
    "model.config.num_key_value_heads": "2",
    "model.config.max_position_embeddings": "32768",
    "model.config.tie_word_embeddings": "true",
}
CASES: dict[str, tuple[int, dict[str, str]]] = {
    # Measured updates, and what differs from the recipe first-run (8 x 4, T 128, 260 tokens, 1.3 M
    # parameters).
    "small_vocabulary": (13, {}),
    "large_vocabulary": (
        5,
        {
            "batch": "8",
            "accumulation": "1",
            "seq_len": "256",
            "model.config.vocab_size": "50304",
            "model.config.hidden_size": "128",
            "model.config.intermediate_size": "384",
            "model.config.num_hidden_layers": "2",
            "model.config.num_attention_heads": "4",
            "model.config.num_key_value_heads": "4",
        },
    ),
    # For the rehearsal of the cases for a GPU.
    "small_lora": (13, {"method": "lora", "lora.r": "4", "lora.alpha": "8"}),
    "half_billion": (13, _HALF_BILLION),
    "half_billion_lora": (13, _HALF_BILLION | {"method": "lora", "lora.r": "16", "lora.alpha": "32"}),
}
ON_CPU = ("small_vocabulary", "large_vocabulary")
PROMISED: dict[str, tuple[float, float | None]] = {
    # The least samples per second and the largest peak growth, both divided by Hugging Face's.
    "small_vocabulary": (1.0, None),
    "large_vocabulary": (1.14, 0.7),
    "small_lora": (1.0, None),
    "half_billion": (1.0, 0.7),
    "half_billion_lora": (1.0, 0.7),
}


def settings_of(case: str, given: argparse.Namespace) -> Settings:
    """The settings of both arms."""
    updates, assignments = CASES[case]
    base = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])
    assignments = {
        **assignments,
        "device": given.device,
        "precision": given.precision,
        "warmup_fraction": "0",
        "final_learning_rate_fraction": "1",
        "learning_rate": "1e-3",
        "weight_decay": "0",
        "save_every": "1000000",
        "log_every": str(LOG_EVERY),
    }
    if given.accumulation:
        assignments["accumulation"] = str(given.accumulation)
    settings = edit_settings(base, assignments=assignments, max_updates=WARM_UP + (given.updates or updates))
    return edit_settings(settings, assignments={"model.path": given.model}) if given.model else settings


def write_base(settings: Settings, folder: str) -> None:
    """Write the model to files, from which both arms read their frozen base in the compute
    precision."""
    whole = msgspec.structs.replace(settings, method="full", lora=None)
    model: Any = build_model(whole, model_config(whole, ByteTokens()))
    model.to(torch.bfloat16 if settings.precision == "bf16" else torch.float32).save_pretrained(folder)


def samples_of(settings: Settings, vocabulary: int) -> PackedText:
    """All samples of the run, at full length, of varied tokens; the same in every process."""
    generator = np.random.default_rng(1)
    documents = [np.sort(generator.integers(0, vocabulary, settings.seq_len)) for _ in range(settings.target_samples)]
    return PackedText(TokenStore.from_arrays(documents, vocabulary))


class Meter:
    """Measures from the end of the warm-up to the last update; `update_done` is called after
    each.

    With `in_turns` each measured update waits for a line on stdin, and "turn" is printed before.
    """

    def __init__(self, settings: Settings, device: str, *, in_turns: bool) -> None:
        self._samples = settings.effective_batch
        self._in_turns = in_turns
        self._on_gpu = device == "cuda"
        self._last = settings.target_samples // settings.effective_batch
        self._peak, self._most = Peak(device), 0
        self._began = (0, 0.0, 0.0)
        self.found: dict[str, Any] = {"samples_per_second": [], "samples_per_cpu_second": []}

    def update_done(self, number: int, allocated: int = 0) -> None:
        """`allocated`: the most of the update, in bytes, if the trainer measures it: then it resets
        torch's own peak."""
        if number > WARM_UP:
            self._most = max(self._most, allocated)
        if number < WARM_UP or not (self._in_turns or number in (WARM_UP, self._last)):
            return
        if self._on_gpu:
            torch.cuda.synchronize()
        now = (number, time.perf_counter(), time.process_time())
        if number == WARM_UP:
            self._peak.start()
        else:
            updates, seconds, cpu_seconds = (end - start for start, end in zip(self._began, now, strict=True))
            self.found["samples_per_second"].append(updates * self._samples / seconds)
            self.found["samples_per_cpu_second"].append(updates * self._samples / cpu_seconds)
        if number == self._last:
            growth = max(self._peak.growth(), self._most - self._peak.base)
            self.found |= {
                "peak_growth_mib": growth / 2**20,
                "peak_mib": (self._peak.base + growth) / 2**20,
                "peak_is_exact": self._peak.exact,
            }
        elif self._in_turns:
            print(f"\n{TURN}", flush=True)
            sys.stdin.readline()
        self._began = (number, time.perf_counter(), time.process_time())


class Listening(Unsupervised):
    """Takes the trainer's reports: one `step` for each update."""

    def __init__(self) -> None:
        self.meter: Meter | None = None
        self.losses: list[float] = []

    def report(self, kind: str, **values: Any) -> None:
        if kind == "step":
            self.losses.append(values["loss"])
            assert self.meter is not None
            self.meter.update_done(values["update"], values.get("peak_bytes") or 0)

    def readings(self) -> dict[str, int | None]:
        return readings()


def measure_memtop(settings: Settings, device: str, *, in_turns: bool) -> dict[str, Any]:
    config = model_config(settings, ByteTokens())
    accelerator = open_accelerator(settings, config)
    channel = Listening()
    with tempfile.TemporaryDirectory(prefix="memtop-bench-") as folder:
        engine, position = open_engine(settings, accelerator, config, None)
        trainer = Trainer(
            settings, engine, samples_of(settings, config.vocab_size), position, Path(folder) / "state", channel, pad=0
        )
        channel.meter = Meter(settings, device, in_turns=in_turns)
        # The save at the end is not measured: it comes after the last update.
        trainer.run(Control(channel, accelerator))
    return {**channel.meter.found, "losses": channel.losses}


def measure_hugging_face(settings: Settings, device: str, *, in_turns: bool) -> dict[str, Any]:
    import transformers

    config = model_config(settings, ByteTokens())
    model = build_model(settings, config, mixed=accelerate_name(settings.precision))
    data = samples_of(settings, config.vocab_size)
    keys = SampleOrder(data, settings.seed, (Cut(0, settings.seq_len),)).take(0, settings.target_samples)
    rows = [{"input_ids": data[key][0], "labels": data[key][1]} for key in keys]

    class Watching(transformers.TrainerCallback):  # type: ignore[misc]
        meter: Meter

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.meter.update_done(state.global_step)

    with tempfile.TemporaryDirectory(prefix="memtop-bench-") as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=settings.target_samples // settings.effective_batch,
            per_device_train_batch_size=settings.batch,
            gradient_accumulation_steps=settings.accumulation,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.clip_norm,
            optim="adamw_torch_fused",
            bf16=settings.precision == "bf16",
            fp16=settings.precision == "fp16",
            gradient_checkpointing=settings.gradient_checkpointing,
            # As in memtop: products of fp32 matrices in TF32 where the GPU has it.
            tf32=True if device == "cuda" and settings.precision == "fp32" else None,
            use_cpu=device == "cpu",
            train_sampling_strategy="sequential",
            dataloader_num_workers=settings.workers,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=settings.seed,
        )
        watching = Watching()
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[watching])
        watching.meter = Meter(settings, device, in_turns=in_turns)
        trainer.train()
    history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {**watching.meter.found, "logged_losses": history}


def run_arm(arm: str, case: str, options: list[str]) -> Generator[None, None, dict[str, Any]]:
    """Measure one arm in a separate process; yield after each of its turns but the last."""
    command = [sys.executable, "-m", "bench.train", "--arm", arm, "--case", case, *options]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | one_gpu()
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        line = ""
        for line in child.stdout:
            if line.strip() == TURN:
                yield
                child.stdin.write("\n")
                child.stdin.flush()
        if child.wait() != 0:
            errors.seek(0)
            raise RuntimeError(f"{arm}, {case}: {errors.read()[-4000:]}")
    found: dict[str, Any] = json.loads(line)
    speed, growth = statistics.median(found["samples_per_second"]), found["peak_growth_mib"]
    print(f"{case} {arm}: {speed:.1f} samples/s, {growth:.0f} MiB", file=sys.stderr)
    return found


def in_turns(arms: Sequence[Generator[None, None, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of the arms, which go on alternately: A B B A A B ..."""
    order, found = list(enumerate(arms)), dict[int, dict[str, Any]]()
    while len(found) < len(arms):
        for number, arm in order:
            try:
                next(arm)
            except StopIteration as end:
                found[number] = end.value
        order.reverse()
    return [found[number] for number in range(len(arms))]


def compare(case: str, settings: Settings, given: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    arms = (given.only,) if given.only else ARMS
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory(prefix="memtop-bench-") as folder:
        if settings.method != "full":
            write_base(settings, folder)
            options = [*options, "--model", folder]
        for order in (arms, arms[::-1]) * given.rounds:
            runs = in_turns([run_arm(arm, case, options) for arm in order])
            for arm, run in zip(order, runs, strict=True):
                found[arm].append(run)
    return {
        "batch": settings.batch,
        "accumulation": settings.accumulation,
        "seq_len": settings.seq_len,
        "method": settings.method,
        "vocabulary": settings.model["config"]["vocab_size"],
        "updates_measured": settings.target_samples // settings.effective_batch - WARM_UP,
        **{
            arm: {name: spread(list(chain.from_iterable(values_of(run, name) for run in runs))) for name in MEASURED}
            for arm, runs in found.items()
        },
        **({} if given.only else over_hugging_face(case, list(zip(found["memtop"], found["hugging_face"], strict=True)))),
        "peak_is_exact": all(run["peak_is_exact"] for runs in found.values() for run in runs),
    }


def over_hugging_face(case: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """memtop divided by Hugging Face, from pairs of neighbours."""
    found = {
        name: ratios(
            list(chain.from_iterable(values_of(mine, name) for mine, _ in pairs)),
            list(chain.from_iterable(values_of(other, name) for _, other in pairs)),
        )
        for name in MEASURED
    }
    least, most = PROMISED[case]
    speed, growth = (found[name]["median"] for name in ("samples_per_second", "peak_growth_mib"))
    return {
        "memtop_over_hugging_face": found,
        "verdict": {
            "samples_per_second_ratio": speed,
            "at_least": least,
            "peak_growth_ratio": growth,
            "at_most": most,
            "kept": speed >= least and (most is None or growth <= most),
        },
        "largest_loss_difference": max(loss_difference(mine["losses"], other["logged_losses"]) for mine, other in pairs),
    }


def values_of(run: dict[str, Any], name: str) -> list[float]:
    """What a run has measured: one value for each turn, or for all of them."""
    found = run[name]
    return found if isinstance(found, list) else [found]


def loss_difference(losses: list[float], logged: list[float]) -> float | None:
    """The largest relative difference of means over LOG_EVERY updates, which Hugging Face logs.

    None if there were fewer updates.
    """
    means = [statistics.fmean(losses[at : at + LOG_EVERY]) for at in range(0, len(losses), LOG_EVERY)]
    whole = len(losses) // LOG_EVERY
    found = [abs(mine - other) / other for mine, other in zip(means[:whole], logged[:whole], strict=True)]
    return float(f"{max(found):.2g}") if found else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    device_options(parser)
    parser.add_argument("--accumulation", type=int, default=0, help="0: the case's own")
    parser.add_argument("--updates", type=int, default=0, help="measured updates; 0: the case's own")
    parser.add_argument("--rounds", type=int, default=2, help="each is two processes of each arm")
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: those for a CPU")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="a setting of memtop alone")
    parser.add_argument("--model", help="a folder with the model, for one arm")
    parser.add_argument("--only", choices=("memtop",), help="measure this arm alone")
    parser.add_argument("--arm", choices=ARMS, help="measure one arm in this process")
    parser.add_argument("--in-turns", action="store_true", help="with --arm: each update waits for a line on stdin")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    cases = given.case or list(ON_CPU)
    settings = {case: settings_of(case, given) for case in cases}
    if given.arm:
        torch.set_num_threads(given.threads)
        mine = settings[cases[0]]
        if given.arm == "memtop":
            mine = edit_settings(mine, assignments=dict(pair.split("=", 1) for pair in given.set))
        measure = {"memtop": measure_memtop, "hugging_face": measure_hugging_face}[given.arm]
        print("\n" + json.dumps(measure(mine, given.device, in_turns=given.in_turns)))
        return
    names = ("device", "precision", "accumulation", "updates", "threads")
    options = [word for name in names for word in (f"--{name}", str(getattr(given, name)))]
    options += [word for pair in given.set for word in ("--set", pair)]
    if given.device == "cpu" and not given.only:
        options.append("--in-turns")
    results = {case: compare(case, settings[case], given, options) for case in cases}
    given_values = {name: getattr(given, name) for name in (*names, "set")}
    report("train", {**given_values, "versions": versions("torch", "transformers", "accelerate"), **results})


if __name__ == "__main__":
    main()
