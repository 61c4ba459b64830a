"""A tiny model and a recording channel, for training in this process."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator

from memtop.presets import Settings, edit_settings
from memtop.train.agent.failures import describe, first_reported
from memtop.train.channel import Control, Unsupervised
from memtop.train.data import byte_document
from memtop.train.data.samples import PackedText
from memtop.train.data.tokens import PAD, VOCABULARY, ByteTokens, TokenStore
from memtop.train.model import model_config
from memtop.train.run import open_accelerator, open_engine
from memtop.train.state_files import newest_complete
from memtop.train.trainer import Trainer

TINY = Settings(
    recipe="tiny",
    preset="standard",
    batch=4,
    accumulation=2,
    seq_len=16,
    target_samples=80,
    save_every=3,
    learning_rate=5e-3,
    device="cpu",
    model={
        "config": {
            "model_type": "llama",
            "vocab_size": 260,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
    },
    data={"source": "python-stdlib", "max_bytes": 20_000},
)


class Recorder(Unsupervised):
    """Records all reports; delivers the commands that a test has queued for an update."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.answers: list[tuple[int, bool, str]] = []
        self.results: list[dict[str, Any]] = []
        self.commands: dict[int, list[tuple[int, str, dict[str, Any]]]] = {}

    def report(self, kind: str, **values: Any) -> None:
        self.reports.append({"type": kind, **values})

    def oom(self, error: BaseException, **values: Any) -> None:
        if first_reported(error):
            self.report("oom", **describe(error), **values)

    def take_commands(self) -> list[tuple[int, str, dict[str, Any]]]:
        return self.commands.pop(len(self.of("step")), [])

    def answer(self, number: int, ok: bool, message: str, result: dict[str, Any] | None = None) -> None:
        self.answers.append((number, ok, message))
        self.results.append(result or {})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [report for report in self.reports if report["type"] == kind]


def texts() -> list[bytes]:
    """Lines of different lengths, so that token weighting matters."""
    return [bytes(f"def function_{n}(x):\n    return x * {n}\n" * (1 + n % 3), "ascii") for n in range(40)]


def samples() -> PackedText:
    return PackedText(TokenStore.from_arrays(map(byte_document, texts()), VOCABULARY))


def tensors() -> list[torch.Tensor]:
    """All tensors of this process."""
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def held_out() -> PackedText:
    """The samples of an evaluation."""
    texts = [bytes(f"class Other{n}:\n    value = {n}\n" * (1 + n % 4), "ascii") for n in range(9)]
    return PackedText(TokenStore.from_arrays(map(byte_document, texts), VOCABULARY))


class Training:
    """One training in this process, resumed from the state folder if there is one."""

    def __init__(
        self,
        state_dir: Path,
        settings: Settings = TINY,
        channel: Recorder | None = None,
        evaluation: PackedText | None = None,
        **options: Any,
    ) -> None:
        self.channel = channel or Recorder()
        self.settings = settings
        self.samples = samples()
        config = model_config(settings, ByteTokens())
        accelerator = Accelerator(cpu=True) if settings.device == "cpu" else open_accelerator(settings, config)
        found = newest_complete(state_dir)
        engine, position = open_engine(settings, accelerator, config, found[:2] if found else None)
        self.engine: Any = engine
        self.model = engine.model
        self.optimizer: torch.optim.Optimizer = self.engine.bare_optimizer
        self.trainer = Trainer(
            settings, engine, self.samples, position, state_dir, self.channel, PAD, evaluation=evaluation, **options
        )
        self.control = Control(self.channel, accelerator)

    def run(self) -> str:
        return self.trainer.run(self.control)

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.channel.of("step")]

    @property
    def digests(self) -> list[str]:
        return [step["sample_digest"] for step in self.channel.of("step")]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def edited(**changes: Any) -> Settings:
    return msgspec.structs.replace(edit_settings(TINY), **changes)
