"""Writes what a run's model says to a prompt, or to each prompt of a file.

python -m memtop.train.write --settings FILE --state-dir FOLDER --prompt TEXT|--prompts FILE ...

It reads the newest complete state and prints the text to stdout and everything else to stderr. For
a file it prints each prompt, with its text indented below. Exit status: 0 done, 1 memory ran out, 2
wrong usage or bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from transformers.utils import logging as transformers_logging

from memtop.presets import Settings
from memtop.presets.schema import Sampling, Zero
from memtop.train import TrainingError, first_line
from memtop.train.agent.failures import is_lack_of_memory
from memtop.train.checkpoint import load_weights
from memtop.train.devices import choose_device
from memtop.train.export import held_state
from memtop.train.model import build_model, tokens_and_config
from memtop.train.objective import Objective
from memtop.train.run import read_settings
from memtop.train.sampling import Writer, used_prompts, varied
from memtop.train.state_files import ShardReader


def main() -> int:
    parser = argparse.ArgumentParser(prog="memtop.train.write")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt")
    what.add_argument("--prompts")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    given = parser.parse_args()
    if given.device == "cpu":
        # transformers loads DeepSpeed, which would look for a GPU and warn that there is none.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    sample = Sampling(max_new_tokens=given.max_new_tokens, temperature=given.temperature, seed=given.seed)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            settings = msgspec.structs.replace(read_settings(given.settings), device=given.device)
            prompts = [given.prompt] if given.prompts is None else used_prompts(given.prompts)
            texts = written(settings, given.state_dir, prompts, sample)
    except TrainingError as error:
        print(f"memtop: {error}", file=sys.stderr)
        return error.exit_status
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        print(f"memtop: memory ran out: {first_line(error)}; --gpu cpu computes on the CPU", file=sys.stderr)
        return 1
    if given.prompts is None:
        print(*texts, flush=True)
        return 0
    for prompt, text in zip(prompts, texts, strict=True):
        print(prompt)
        for line in text.splitlines() or ("",):
            print(f"  {line}")
    sys.stdout.flush()
    return 0


def written(settings: Settings, state_dir: Path, prompts: Sequence[str], sample: Sampling) -> list[str]:
    """What the model of the newest complete state writes for each prompt, on the device of the
    settings: cpu or cuda. TrainingError if the user can solve the problem."""
    settings = msgspec.structs.replace(settings, zero=Zero(), gradient_checkpointing=False, compile=False)
    device = torch.device("cuda" if choose_device(settings).on_gpu else "cpu")
    with held_state(state_dir, best=False) as source:
        tokens, config = tokens_and_config(settings)
        model = build_model(settings, config)
        load_weights(ShardReader(source.links, source.manifest.files), model, source.found)
        # A base in 4 bits is there already, and its adapters with it.
        if settings.method != "qlora":
            model.to(device)
        print(f"memtop: update {source.manifest.updates} ({source.found.name})", file=sys.stderr)
    objective = Objective(model, seq2seq=settings.task == "seq2seq", chunk=0).eval()
    write = Writer(objective, tokens, settings, config, device)
    with torch.no_grad():
        return [tokens.decode(write(prompt, varied(sample, number))) for number, prompt in enumerate(prompts)]


if __name__ == "__main__":
    sys.exit(main())
