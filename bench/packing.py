"""Tokens per second on short samples: padded, shared out by length, and packed into rows.

python -m bench.packing [--device cpu|cuda] [--precision fp32|bf16|fp16] [--case NAME] [--rounds N]

All arms run forward and backward over the same updates with the same weights, in one process, in
turns. Their gradients are compared, because all must do the same training. `padding_fraction` is
the share of padding among the tokens that the model computes. Ratios compare
each arm with the padded one of the same turn.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import msgspec
import numpy as np
import torch
from accelerate import Accelerator

from bench.common import MIDDLE_LLAMA, device_options, ratios, report, spread, versions
from memtop.presets import Settings, edit_settings, load_presets, load_recipes, resolve
from memtop.presets.host_memory import host_plan
from memtop.train.batches import Batches, MicroBatches, to_device
from memtop.train.data.samples import PackedText
from memtop.train.data.tokens import ByteTokens, TokenStore
from memtop.train.model import build_model, model_config
from memtop.train.objective import Objective
from memtop.train.order import Position, SampleOrder
from memtop.train.packing import use_packing
from memtop.train.run import open_accelerator
from memtop.train.state_files import Cut

# Per arm: whether samples are shared out by length, and whether rows have several.
ARMS = {"padded": (False, False), "grouped": (True, False), "packed": (True, True)}
CASES: dict[str, dict[str, Any]] = {
    "small": {"batch": 8, "accumulation": 4, "seq_len": 128},
    # For a GPU.
    "middle": {"batch": 16, "accumulation": 4, "seq_len": 1024, **MIDDLE_LLAMA},
}
UPDATES = 2


def settings_of(case: str, given: argparse.Namespace) -> Settings:
    base = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])
    values = {**CASES[case], "device": given.device, "precision": given.precision}
    longest = {"model.config.max_position_embeddings": str(CASES[case]["seq_len"])}
    return edit_settings(
        base, assignments={name: str(value) for name, value in {**values, **longest}.items()}, max_updates=UPDATES
    )


def samples_of(settings: Settings) -> PackedText:
    """Samples as in chat data: most are far shorter than T."""
    generator = np.random.default_rng(1)
    lengths = np.exp(generator.normal(np.log(settings.seq_len / 5), 0.8, settings.target_samples))
    documents = [generator.integers(0, 256, size) for size in lengths.clip(8, settings.seq_len).astype(int)]
    return PackedText(TokenStore.from_arrays(documents, ByteTokens.vocabulary))


def updates_of(settings: Settings, *, grouped: bool, packed: bool) -> list[MicroBatches]:
    samples, position = samples_of(settings), Position(cuts=(Cut(0, settings.seq_len),))
    order = SampleOrder(samples, settings.seed, position.cuts)
    batches = Batches(samples, order, ByteTokens.pad, 0, packed=packed)
    host = host_plan(settings, None, on_gpu=False)
    batches.start(msgspec.structs.replace(settings, packing=grouped), host, position, settings.target_samples)
    try:
        return [batches.fetch() for _ in range(UPDATES)]
    finally:
        batches.close()


class Arm:
    """One way to train on the same updates."""

    def __init__(self, settings: Settings, accelerator: Accelerator, name: str) -> None:
        grouped, packed = ARMS[name]
        self.updates = updates_of(settings, grouped=grouped, packed=packed)
        model = build_model(settings, model_config(settings, ByteTokens()), mixed=accelerator.mixed_precision)
        self._objective = Objective(model).to(accelerator.device)
        if packed and (reason := use_packing(settings, model, accelerator)) is not None:
            raise RuntimeError(f"not packed: {reason}")
        self._accelerator = accelerator

    @property
    def padding(self) -> float:
        return 1 - sum(update.filled for update in self.updates) / sum(update.places for update in self.updates)

    def seconds(self) -> float:
        """Run all updates; the gradients of all are added up."""
        self._objective.zero_grad()
        device = self._accelerator.device
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for update in self.updates:
            for batch in update.batches:
                with self._accelerator.autocast():
                    loss = self._objective(**to_device(batch, device)) / update.tokens
                loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def gradient(self) -> torch.Tensor:
        found = [parameter.grad.flatten() for parameter in self._objective.parameters() if parameter.grad is not None]
        return torch.cat(found).double()


def measure(case: str, given: argparse.Namespace) -> dict[str, Any]:
    settings = settings_of(case, given)
    accelerator = open_accelerator(settings, None)
    arms = {name: Arm(settings, accelerator, name) for name in ARMS}
    tokens = sum(update.filled for update in arms["padded"].updates)
    for arm in arms.values():
        arm.seconds()
    expected = arms["padded"].gradient()
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(given.rounds):
        # There and back: a change in the machine's speed affects all arms alike.
        for name in (*arms, *reversed(arms)):
            taken[name].append(arms[name].seconds())
    return {
        "batch": settings.batch,
        "accumulation": settings.accumulation,
        "seq_len": settings.seq_len,
        "mean_length": tokens / settings.target_samples,
        **{
            name: {
                "tokens_per_second": spread([tokens / seconds for seconds in taken[name]]),
                "over_padded": ratios(taken["padded"], taken[name]),
                "padding_fraction": round(arm.padding, 4),
                "gradient_difference": float(f"{float((arm.gradient() - expected).norm() / expected.norm()):.2g}"),
            }
            for name, arm in arms.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    device_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: small")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    results = {case: measure(case, given) for case in given.case or ["small"]}
    found = {"device": given.device, "precision": given.precision, "versions": versions("torch", "transformers", "accelerate")}
    report("packing", {**found, **results})


if __name__ == "__main__":
    main()
