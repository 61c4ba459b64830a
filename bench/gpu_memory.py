"""The dry run and the estimate compared with measurements of the built-in trainer on this GPU.

    python -m bench.gpu_memory [--device cuda|cpu] [--results FILE] [--only TEXT]

Each row is a training of three updates with random weights and tokens, in a process of its own.
Its JSON line is appended to the file at once; the next call leaves out the rows that the file has.
`allocated` and `reserved` are torch's highest values, also by phase (allocated); `process` is what
the GPU lacks while the process lives: with its CUDA context. Errors are signed, in percent of the
measurement. `fits` are the verdicts at the capacities of usual cards: whether `process` is below
85 %, and whether it was foreseen to be. The first rows are the smallest.

`--device cpu` is the rehearsal: three small rows, without a measurement.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.common import machine, versions
from bench.published import CONFIGS, llama
from bench.train import Listening, samples_of, write_base
from memtop.presets import Settings, edit_settings, load_presets, load_recipes, resolve
from memtop.presets.choosing import CONTEXT_BYTES
from memtop.presets.estimate import estimate
from memtop.presets.schema import ATTENTION_TARGETS
from memtop.supervisor.recovery.values import UPDATE_PHASES
from memtop.train.channel import Control
from memtop.train.data import open_data
from memtop.train.data.tokens import ByteTokens
from memtop.train.dry_run.build import training_of
from memtop.train.dry_run.run import foresee
from memtop.train.model import model_config
from memtop.train.run import open_accelerator, open_engine
from memtop.train.trainer import Trainer


def t5(width: int, inner: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    sizes = {"d_model": width, "d_ff": inner, "d_kv": 64, "num_heads": heads, "num_layers": layers, "vocab_size": vocabulary}
    tokens = {"pad_token_id": 258, "eos_token_id": 257, "decoder_start_token_id": 258}
    return {"model_type": "t5", **sizes, "num_decoder_layers": layers, **tokens}


UPDATES = 3
GIB = 1 << 30
CARDS = (8, 12, 16, 24, 40, 48, 80, 141)
SAFE = 0.85
ROW_SECONDS = 240
EVERY_LAYER = (*ATTENTION_TARGETS, "gate_proj", "up_proj", "down_proj")

SHAPES = {
    **{name: CONFIGS[name] for name in ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen2.5-1.5B", "SmolLM2-135M")},
    "GPT2-124M": {"model_type": "gpt2"},
    "Qwen3-4B": llama(2560, 9728, 36, 32, 8, 151936, head_dim=128) | {"model_type": "qwen3"},
    "Mistral-7B": llama(4096, 14336, 32, 32, 8, 32768, tie_word_embeddings=False) | {"model_type": "mistral"},
    "T5-0.2B": t5(768, 3072, 10, 12, 40960),
    "T5-0.8B": t5(1024, 2816, 24, 16, 32128) | {"feed_forward_proj": "gated-gelu"},
    "tiny T5": t5(64, 128, 2, 4, 300),
    "tiny": {**CONFIGS["SmolLM2-135M"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
}
GRID: tuple[tuple[str, str, int, int, str, str], ...] = (
    ("GPT2-124M", "full", 16, 1024, "bf16", ""),
    ("GPT2-124M", "full", 8, 1024, "fp32", ""),
    ("GPT2-124M", "full", 16, 1024, "fp16", ""),
    ("T5-0.2B", "full", 16, 256, "bf16", ""),
    ("T5-0.2B", "full", 16, 256, "fp32", ""),
    ("T5-0.2B", "full", 64, 512, "bf16", "checkpointing"),
    ("T5-0.8B", "full", 8, 512, "bf16", "adafactor"),
    ("T5-0.8B", "lora", 16, 512, "bf16", ""),
    ("T5-0.8B", "qlora", 16, 512, "bf16", "checkpointing"),
    ("SmolLM2-135M", "full", 8, 2048, "bf16", "checkpointing"),
    ("SmolLM2-135M", "lora", 8, 2048, "bf16", ""),
    ("Llama-3.2-1B", "full", 4, 1024, "bf16", ""),
    ("Llama-3.2-1B", "full", 16, 2048, "bf16", "checkpointing"),
    ("Llama-3.2-1B", "full", 4, 1024, "bf16", "checkpointing accumulation"),
    ("Llama-3.2-1B", "full", 4, 1024, "bf16", "whole_loss"),
    ("Llama-3.2-1B", "lora", 8, 1024, "bf16", ""),
    ("Llama-3.2-1B", "lora", 8, 1024, "bf16", "checkpointing"),
    ("Llama-3.2-1B", "full", 4, 1024, "bf16", "zero2"),
    ("Llama-3.2-1B", "full", 4, 1024, "bf16", "zero3 checkpointing"),
    ("Llama-3.2-1B", "full", 4, 1024, "bf16", "zero2 offload"),
    ("Qwen2.5-1.5B", "full", 4, 1024, "bf16", "adamw_8bit"),
    ("Qwen2.5-1.5B", "full", 2, 4096, "bf16", "checkpointing adafactor"),
    ("Qwen2.5-1.5B", "lora", 8, 2048, "bf16", "checkpointing"),
    ("Qwen2.5-1.5B", "qlora", 8, 2048, "bf16", "checkpointing paged_adamw_8bit"),
    ("Qwen2.5-1.5B", "qlora", 4, 1024, "bf16", "expandable"),
    ("Llama-3.2-3B", "full", 2, 2048, "bf16", "checkpointing"),
    ("Llama-3.2-3B", "lora", 4, 2048, "bf16", ""),
    ("Llama-3.2-3B", "qlora", 4, 2048, "bf16", ""),
    ("Qwen3-4B", "lora", 4, 2048, "bf16", "checkpointing"),
    ("Mistral-7B", "qlora", 4, 4096, "bf16", "checkpointing"),
    ("Llama-3.1-8B", "qlora", 1, 1024, "bf16", "checkpointing"),
    ("Llama-3.1-8B", "qlora", 4, 2048, "bf16", "checkpointing paged_adamw_8bit"),
    ("Llama-3.1-8B", "lora", 2, 2048, "bf16", ""),
    ("Llama-3.1-8B", "lora", 4, 4096, "bf16", "checkpointing"),
    ("Llama-3.1-8B", "lora", 1, 16384, "bf16", "checkpointing"),
)
"""Model, method, batch, sequence length, precision, and what else."""
REHEARSED = (
    ("tiny", "full", 2, 64, "fp32", ""),
    ("tiny", "lora", 2, 64, "fp32", "checkpointing accumulation"),
    ("tiny T5", "full", 2, 64, "fp32", ""),
)
Row = tuple[str, str, int, int, str, str]


def name_of(row: Row) -> str:
    return " ".join(map(str, row)).strip()


def settings_of(row: Row, device: str, folder: str) -> Settings:
    """The run of a row. Frozen weights are read from files in `folder`, as a user's are."""
    model, method, batch, seq_len, precision, more = row
    words = set(more.split())
    values = {"batch": str(batch), "accumulation": "4" if "accumulation" in words else "1", "seq_len": str(seq_len)}
    values |= {"precision": precision, "device": device, "save_every": "1000000"}
    values["gradient_checkpointing"] = str("checkpointing" in words).lower()
    if SHAPES[model]["model_type"] == "t5":
        values |= {"task": "seq2seq", "data.train": str(Path(folder) / "pairs.jsonl")}
    if method != "full":
        targets = ("q", "k", "v", "o", "wi_0", "wi_1", "wo") if "task" in values else EVERY_LAYER
        values |= {"method": method, "lora.r": "16", "lora.alpha": "32", "lora.targets": ",".join(targets)}
    for optimizer in ("adamw_8bit", "paged_adamw_8bit", "adafactor"):
        if optimizer in words:
            values["optimizer"] = optimizer
    if "whole_loss" in words:
        values["loss_chunk"] = "0"
    if "expandable" in words:
        values["allocator"] = "expandable_segments:True"
    for stage in ("2", "3"):
        if f"zero{stage}" in words:
            values |= {"zero.stage": stage, "zero.offload_optimizer": str("offload" in words).lower()}
    recipe = msgspec.structs.replace(load_recipes()["first-run"], model={"config": SHAPES[model]})
    base = resolve(recipe, preset=load_presets()["standard"])
    settings = edit_settings(base, assignments=values, max_updates=UPDATES)
    return settings if method == "full" else edit_settings(settings, assignments={"model.path": folder})


def measure(row: Row, device: str) -> dict[str, int] | None:
    """Train the row in this process; the highest values in bytes, None without a GPU."""
    with tempfile.TemporaryDirectory(prefix="memtop-bench-") as folder:
        settings = settings_of(row, device, folder)
        if row[1] != "full":
            write_base(settings_of((row[0], "full", *row[2:]), device, folder), folder)
        config = model_config(settings, ByteTokens())
        accelerator = open_accelerator(settings, config)
        engine, position = open_engine(settings, accelerator, config, None)
        channel = Peaks(device)
        samples: Any = samples_of(settings, config.vocab_size)
        if settings.task == "seq2seq":
            pair = json.dumps({"prompt": "a" * row[3], "response": "b" * row[3]})
            Path(settings.data["train"]).write_text(f"{pair}\n" * settings.target_samples)
            samples = open_data(settings, ByteTokens()).train
        trainer = Trainer(settings, engine, samples, position, Path(folder) / "state", channel, pad=0)
        trainer.run(Control(channel, accelerator))
    return channel.found


class Peaks(Listening):
    """The highest values that the trainer reports of its updates, before the state is saved."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._on_gpu = device == "cuda"
        self._most: dict[str, int] = {}
        self.found: dict[str, int] | None = None

    def report(self, kind: str, **values: Any) -> None:
        if kind != "step" or not self._on_gpu:
            return
        for name, size in values.items():
            if name.endswith(("peak_bytes", "peak_reserved_bytes")) and size is not None:
                self._most[name] = max(size, self._most.get(name, 0))
        if values["update"] != UPDATES:
            return
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        self.found = {
            "allocated": self._most["peak_bytes"],
            "reserved": self._most["peak_reserved_bytes"],
            **{phase: self._most[f"{phase}_peak_bytes"] for phase in UPDATE_PHASES},
            "device_used": total - free,
            "reserved_now": torch.cuda.memory_reserved(),
            "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        }


def foreseen(row: Row, generation: int, capacity: int) -> dict[str, Any]:
    """What the dry run and the estimate say of the row."""
    with tempfile.TemporaryDirectory(prefix="memtop-bench-") as folder:
        # Only its configuration is read.
        Path(folder, "config.json").write_text(json.dumps(SHAPES[row[0]]))
        settings = settings_of(row, "cuda", folder)
        began = time.perf_counter()
        dry = foresee(training_of(settings, generation=generation, capacity=capacity))
        seconds = time.perf_counter() - began
        quick = estimate(settings, SHAPES[row[0]], generation=generation, capacity=capacity)
        of_phases = {str(peak.phase): peak.allocated for peak in dry.phases}
    return {
        "dry_run": {"allocated": dry.allocated, "reserved": dry.reserved, **of_phases, "seconds": round(seconds, 2)},
        "estimate": {"allocated": quick.allocated, "reserved": quick.reserved, **quick.peaks},
    }


def compared(predicted: dict[str, Any], measured: dict[str, int] | None, idle_bytes: int | None) -> dict[str, Any]:
    """Signed errors in percent, and the verdicts; empty without a measurement."""
    if measured is None:
        return {}
    context = measured["device_used"] - measured["reserved_now"] - (idle_bytes or 0)
    process = measured["reserved"] + context
    errors = {
        f"{how}_{what}": round(100 * (predicted[how][what] / measured[what] - 1), 2)
        for how in ("dry_run", "estimate")
        for what in ("allocated", "reserved", *UPDATE_PHASES)
    }
    own = predicted["dry_run"]["reserved"] + CONTEXT_BYTES
    errors["dry_run_process"] = round(100 * (own / process - 1), 2)
    fits = {str(card): [process < SAFE * card * GIB, own < SAFE * card * GIB] for card in CARDS}
    return {"context": context, "process": process, "errors": errors, "fits": fits}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and the worst errors of all measured rows, and the verdicts that were unsafe."""
    found: dict[str, Any] = {"rows": len(rows)}
    for name in rows[0]["errors"] if rows else ():
        values = [row["errors"][name] for row in rows]
        sizes = [abs(value) for value in values]
        found[name] = {"median": statistics.median(sizes), "most": max(sizes), "lowest": min(values)}
    found["unsafe"] = [
        f"{row['row']} on {card}" for row in rows for card, (is_safe, said) in row["fits"].items() if said > is_safe
    ]
    return found


def gpu() -> tuple[int, int, int | None]:
    """Its compute capability without the point, its memory, and what is used of it now."""
    from memtop.supervisor.monitor.sampler import Sampler

    (first, *_) = Sampler().sample().gpus
    capability = (first.details.compute_capability or "8.0").replace(".", "")
    return int(capability), first.total_bytes or 80 * GIB, first.used_bytes


def in_a_process(number: int, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.gpu_memory", "--row", str(number), "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ROW_SECONDS)
    except subprocess.TimeoutExpired:
        return {"problem": f"not done after {ROW_SECONDS} s"}
    if done.returncode:
        return {"problem": done.stderr.strip().rpartition("\n")[2]}
    return {"measured": json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=Path(f"bench/results/{time.strftime('%Y-%m-%d')}-gpu_memory.jsonl"))
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    grid: tuple[Row, ...] = GRID if given.device == "cuda" else REHEARSED
    if given.row is not None:
        print(json.dumps(measure(grid[given.row], given.device)))
        return
    generation, total, _ = gpu() if given.device == "cuda" else (80, 80 * GIB, None)
    about = {**machine(), "versions": versions("torch", "transformers", "peft", "bitsandbytes", "deepspeed")}
    known = [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    for number, row in enumerate(grid):
        name = name_of(row)
        if given.only not in name or any(one["row"] == name for one in known):
            continue
        idle = gpu()[2] if given.device == "cuda" else None
        predicted = foreseen(row, generation, total)
        found = in_a_process(number, given.device)
        line = {"row": name, "device": given.device, **predicted, **found, **compared(predicted, found.get("measured"), idle)}
        known.append(line)
        with given.results.open("a") as file:
            file.write(json.dumps(line | about) + "\n")
        print(json.dumps(line), flush=True)
    print(json.dumps(summary([line for line in known if "errors" in line])))


if __name__ == "__main__":
    main()
