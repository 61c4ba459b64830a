"""One rank of a training that resumes a saved state, compares it with the engine, and trains some
updates.

LAUNCHER -m tests.train.state_worker --settings FILE --state-dir FOLDER --updates N --report FILE

The report: {"strategy", "world_size", "source": updates at the start, "differences": {kind: largest
absolute difference between the saved state and model and optimizer}, "losses", "digests"}.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from memtop.train.channel import Control
from memtop.train.data.tokens import PAD, ByteTokens
from memtop.train.engine import Engine
from memtop.train.model import model_config
from memtop.train.run import open_accelerator, open_engine, read_settings
from memtop.train.state_files import ShardReader, newest_complete
from memtop.train.trainer import Trainer
from tests.train.support import Recorder, samples


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = read_settings(arguments.settings)
    config = model_config(settings, ByteTokens())
    accelerator = open_accelerator(settings, config)
    found = newest_complete(arguments.state_dir)
    engine, position = open_engine(settings, accelerator, config, found[:2] if found else None)
    differences = {} if found is None else compare(engine, ShardReader(found[0], found[1].files))
    source = position.updates
    channel = Recorder()
    if accelerator.is_main_process:
        channel.commands[arguments.updates] = [(1, "stop", {})]
    trainer = Trainer(settings, engine, samples(), position, arguments.state_dir, channel, PAD)
    trainer.run(Control(channel, accelerator))
    if accelerator.is_main_process:
        report = {
            "strategy": str(engine.strategy()),
            "world_size": accelerator.num_processes,
            "source": source,
            "differences": differences,
            "losses": [step["loss"] for step in channel.of("step")],
            "digests": [step["sample_digest"] for step in channel.of("step")],
        }
        arguments.report.write_text(json.dumps(report))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def compare(engine: Engine, saved: ShardReader) -> dict[str, float]:
    """The largest difference between a saved state and the engine, by kind of tensor.

    Only kinds that both have: moments in 8 bits have names of their own.
    """
    worst: dict[str, float] = {}
    for name, tensors in engine.saved_tensors():
        for kind, tensor in saved(name).items():
            if kind not in tensors:
                continue
            worst[kind] = max(worst.get(kind, 0.0), float((tensors[kind].cpu() - tensor).abs().max()))
    return worst


if __name__ == "__main__":
    main()
