"""The recipes as users get them, with small models and data, trained in this process."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest
import torch
from accelerate.state import AcceleratorState

from memtop.presets import Settings, edit_settings, load_recipes
from memtop.presets.edits import find_preset, resolve
from memtop.train import run
from tests.train.data.support import build_tokenizer
from tests.train.support import Recorder

TINY_LLAMA = {
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 64,
    "model.config.num_hidden_layers": 2,
    "model.config.num_attention_heads": 2,
    "model.config.num_key_value_heads": 2,
}
TINY_T5 = {
    "model.config.vocab_size": 260,
    "model.config.d_model": 32,
    "model.config.d_ff": 64,
    "model.config.d_kv": 16,
    "model.config.num_heads": 2,
    "model.config.num_layers": 2,
    "model.config.num_decoder_layers": 2,
}


def settings_of(recipe: str, *, updates: int | None = None, **assignments: Any) -> Settings:
    """The recipe's settings, small and on the CPU. Keys have `__` for a dot."""
    given = {"device": "cpu", "batch": 4, "accumulation": 2, "warmup_fraction": 0.1, "learning_rate": 5e-3}
    given |= {key.replace("__", "."): value for key, value in assignments.items()}
    settings = resolve(load_recipes()[recipe], preset=find_preset("standard"))
    return edit_settings(settings, max_updates=updates, assignments={key: str(value) for key, value in given.items()})


def documents(count: int = 60) -> list[str]:
    return [f"line {n}: the quick brown fox jumps over the lazy dog\n" * (1 + n % 3) for n in range(count)]


def pairs(count: int = 60) -> list[dict[str, str]]:
    """Short questions, one long one, and answers."""
    return [
        {"prompt": f"What is {n} plus {n}?" if n % 20 else "Why? " * 60, "response": f"It is {2 * n}."} for n in range(count)
    ]


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    """The rows as parquet, jsonl or text, by the file's suffix."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=16)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text("".join(row["text"] for row in rows))
    return path


def write_llama(folder: Path, *, vocabulary: int = 128, tokenizer: bool = True) -> Path:
    """A new llama of two layers, and a tokenizer with a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(str(folder))
    if tokenizer:
        build_tokenizer(folder, chat=True)
    return folder


class Trained:
    """One call of the trainer: its reports and its state folder."""

    def __init__(self, settings: Settings, state_dir: Path, channel: Recorder, outcome: str) -> None:
        self.settings, self.state_dir, self.channel, self.outcome = settings, state_dir, channel, outcome

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.channel.of("step")

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def plan(self) -> dict[str, Any]:
        return self.channel.of("plan")[0]


Train = Callable[..., Trained]


def trainer_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """`train(settings, name=..., stop_after=...)`: train.run.train() here, with caches and states
    under the folder.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    # A process has a fixed precision; tests need several.
    AcceleratorState._reset_state(reset_partial_state=True)

    def train(settings: Settings, *, name: str = "run", stop_after: int | None = None, **options: Any) -> Trained:
        place = folder / name
        place.mkdir(exist_ok=True)
        (place / "settings.json").write_bytes(msgspec.json.encode(settings))
        channel = Recorder()
        if stop_after is not None:
            channel.commands[stop_after] = [(1, "stop", {})]
        with monkeypatch.context() as patch:
            patch.setattr(run, "open_channel", lambda: channel)
            outcome = run.train(place / "settings.json", place / "train_latest_state", resume=True, **options)
        return Trained(settings, place / "train_latest_state", channel, outcome)

    yield train
    for number, handler in handlers.items():
        signal.signal(number, handler)
    AcceleratorState._reset_state(reset_partial_state=True)
