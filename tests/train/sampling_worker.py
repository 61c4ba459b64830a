"""One of two ranks with sharded parameters that write samples while memory runs out on one of them.

    torchrun --nproc-per-node 2 -m tests.train.sampling_worker FOLDER SETTINGS PLACES

PLACES: for each sampling in turn the rank that fails (-1: none, 2: both) and the place: `layer`,
`gathering`, `input` or `end`, as JSON. Writes `rank-R.json`: losses, samples, and a digest of the
weights.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from memtop.train.channel import Control
from memtop.train.data.tokens import PAD, ByteTokens
from memtop.train.model import model_config
from memtop.train.order import Position
from memtop.train.run import open_accelerator, open_engine, read_settings
from memtop.train.sampling import Sampler
from memtop.train.state_files import Cut
from memtop.train.trainer import Trainer
from tests.train.failing import TOO_MUCH
from tests.train.support import Recorder, samples


class Failing:
    """Allocates too much memory at the chosen place, in the third pass of a sampling."""

    def __init__(self, engine: Any, sampler: Sampler, places: list[tuple[int, str]], rank: int) -> None:
        self._places = iter(places)
        self._rank = rank
        self._place = ""
        self._passes = 0
        model = engine.model
        # The outermost module sees each pass once.
        engine.objective.register_forward_pre_hook(self._begins)
        model.base_model.layers[1].register_forward_hook(self._in_layer)
        bytes_of, write, write_all = engine.gathered_bytes, sampler._write._next, sampler._write_all
        engine.gathered_bytes = lambda module: TOO_MUCH if self._due("gathering") else bytes_of(module)

        def next_token(*arguments: Any) -> int:
            if self._due("input", passes=2):
                torch.empty(TOO_MUCH)
            return write(*arguments)

        def all_prompts(*arguments: Any) -> None:
            rank, place = next(self._places, (-1, ""))
            self._place, self._passes = place if rank in (self._rank, 2) else "", 0
            write_all(*arguments)
            if self._place == "end":
                torch.empty(TOO_MUCH)

        sampler._write._next = next_token  # type: ignore[method-assign]
        sampler._write_all = all_prompts  # type: ignore[method-assign]

    def _due(self, place: str, passes: int = 3) -> bool:
        return self._place == place and self._passes == passes

    def _begins(self, module: torch.nn.Module, inputs: Any) -> None:
        self._passes += 1

    def _in_layer(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() and self._due("layer"):
            torch.empty(TOO_MUCH)


def main() -> None:
    folder, places = Path(sys.argv[1]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    settings = read_settings(Path(sys.argv[2]))
    config = model_config(settings, ByteTokens())
    accelerator = open_accelerator(settings, config)
    engine, _ = open_engine(settings, accelerator, config, None)
    channel, rank = Recorder(), accelerator.process_index
    position = Position(cuts=(Cut(0, settings.seq_len),))
    trainer = Trainer(settings, engine, samples(), position, folder / "state", channel, PAD, tokens=ByteTokens())
    if trainer._sampler is not None:
        Failing(engine, trainer._sampler, [(who, place) for who, place in places], rank)
    ended = trainer.run(Control(channel, accelerator))
    digest = hashlib.sha256()
    for name, tensors in engine.saved_tensors():
        digest.update(name.encode())
        for kind in sorted(tensors):
            digest.update(tensors[kind].cpu().float().numpy().tobytes())
    found = {
        "ended": ended,
        "losses": [step["loss"] for step in channel.of("step")],
        "samples": channel.of("sample"),
        "weights": digest.hexdigest(),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
