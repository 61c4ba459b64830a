"""The dry run compared with published measurements on GPUs.

    python -m bench.predict [--only TEXT]
    python -m bench.predict --closed N [--seed N]

`a6000`: the README of vramcalc: RTX A6000, max_memory_allocated in units of 10^9 bytes, one sample
of 2048 tokens, torch's AdamW (foreach), gradients kept between updates, outputs kept during the
backward pass, LoRA of rank 16. Their transformers 4.57 made a mask for batches without padding,
too. `t4`: the archive of fitcheck: Tesla T4, MiB, fp16, LoRA of rank 32 with gradient
checkpointing; memory-efficient attention with repeated keys and values, or eager; 4-bit weights
without double quantization, the rest in fp32. Errors are signed, in percent of the measurement.

`--closed`: the estimate of `presets.estimate` compared with the dry run instead, over N trainings
drawn from a seed. Models have few layers, because both are linear in their number; widths and
vocabularies are those of real models. A row is printed as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from bench.common import report, versions
from memtop.presets import Settings
from memtop.presets.estimate import estimate
from memtop.presets.schema import ATTENTION_TARGETS, Lora, Zero
from memtop.train.dry_run.build import Training, training_of
from memtop.train.dry_run.run import Foresight, foresee

MIB = 1 << 20


def llama(hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        **more,
    }


CONFIGS = {
    "Llama-3.2-1B": llama(2048, 8192, 16, 32, 8, 128256),
    "Llama-3.2-3B": llama(3072, 8192, 28, 24, 8, 128256, head_dim=128),
    "Llama-3.1-8B": llama(4096, 14336, 32, 32, 8, 128256, tie_word_embeddings=False),
    "Llama-3.1-70B": llama(8192, 28672, 80, 64, 8, 128256, tie_word_embeddings=False),
    "Qwen2.5-1.5B": llama(1536, 8960, 28, 12, 2, 151936) | {"model_type": "qwen2"},
    "SmolLM2-135M": llama(576, 1536, 30, 9, 3, 49152),
    "SmolLM2-360M": llama(960, 2560, 32, 15, 5, 49152),
    "SmolLM2-1.7B": llama(2048, 8192, 24, 32, 32, 49152),
}

A6000 = (
    ("Llama-3.2-1B", "full", "pure", "", 17.51),
    ("Llama-3.2-1B", "full", "pure", "checkpointing", 13.76),
    ("Llama-3.2-1B", "full", "amp", "", 30.55),
    ("Llama-3.2-1B", "full", "amp", "checkpointing", 25.22),
    ("Llama-3.2-1B", "full", "pure", "eager", 30.26),
    ("Llama-3.2-3B", "full", "pure", "checkpointing", 32.15),
    ("Qwen2.5-1.5B", "full", "pure", "", 23.40),
    ("Llama-3.2-1B", "lora", "pure", "", 10.13),
    ("Llama-3.2-1B", "lora", "amp", "", 14.52),
    ("Llama-3.2-1B", "lora", "amp", "checkpointing", 9.51),
    ("Llama-3.2-3B", "lora", "pure", "", 18.98),
    ("Llama-3.1-8B", "lora", "pure", "checkpointing", 20.55),
    ("Qwen2.5-1.5B", "lora", "pure", "", 13.78),
)
"""Model, method, precision, what is special, and the measured peak."""

T4 = (
    ("Qwen2.5-1.5B", "lora", "eager", 2, 1024, 7405.81, 6223.84, 3735.79, 7910),
    ("Qwen2.5-1.5B", "lora", "efficient", 2, 1024, 7401.81, 6219.84, 3735.79, 7766),
    ("SmolLM2-1.7B", "lora", "eager", 4, 1024, 6536.75, 5784.81, 3936.47, 7734),
    ("SmolLM2-1.7B", "lora", "efficient", 4, 1024, 6528.75, 5776.81, 3936.47, 7094),
    ("SmolLM2-135M", "lora", "eager", 1, 4096, 3180.11, 2416.64, 736.18, 4476),
    ("SmolLM2-135M", "lora", "efficient", 1, 4096, 3148.11, 2384.64, 736.18, 3284),
    ("SmolLM2-135M", "lora", "eager", 2, 512, 1027.29, 836.44, 441.72, 1104),
    ("SmolLM2-135M", "lora", "efficient", 2, 512, 1026.92, 836.06, 441.72, 1070),
    ("SmolLM2-360M", "lora", "eager", 1, 4096, 4908.51, 3027.76, 1244.73, 7304),
    ("SmolLM2-360M", "lora", "efficient", 1, 4096, 3754.78, 2995.31, 1244.73, 3912),
    ("Qwen2.5-1.5B", "qlora", "eager", 2, 1024, 6838.54, 4474.57, 3007.02, 7548),
    ("Qwen2.5-1.5B", "qlora", "efficient", 2, 1024, 6827.67, 4463.70, 3005.15, 7400),
    ("SmolLM2-1.7B", "qlora", "eager", 4, 1024, 5297.27, 3793.33, 2336.75, 6996),
    ("SmolLM2-1.7B", "qlora", "efficient", 4, 1024, 5281.27, 3777.33, 2336.75, 5960),
    ("SmolLM2-135M", "qlora", "eager", 1, 4096, 3679.27, 2114.66, 1038.70, 5224),
    ("SmolLM2-135M", "qlora", "efficient", 1, 4096, 3576.75, 2049.78, 1037.83, 3784),
    ("SmolLM2-135M", "qlora", "eager", 2, 512, 1067.19, 685.46, 448.31, 1192),
    ("SmolLM2-135M", "qlora", "efficient", 2, 512, 1063.81, 682.08, 448.31, 1194),
    ("SmolLM2-360M", "qlora", "eager", 1, 4096, 5687.15, 2992.17, 1302.50, 8164),
    ("SmolLM2-360M", "qlora", "efficient", 1, 4096, 4017.84, 2496.87, 1296.79, 4518),
)
"""Model, method, attention, batch, length; allocated at most, in the forward pass, in the optimizer
step; reserved."""


def a6000_training(model: str, method: Any, precision: str, special: str) -> Training:
    return Training(
        config=CONFIGS[model],
        method=method,
        lora=Lora(r=16, alpha=32, targets=ATTENTION_TARGETS) if method == "lora" else None,
        weights="bf16" if precision == "pure" else "fp32",
        autocast="bf16" if precision == "amp" else None,
        batch=1,
        seq_len=2048,
        padded=True,
        gradient_checkpointing=special == "checkpointing",
        attention="eager" if special == "eager" else "sdpa",
        optimizer="adamw_foreach",
        loss="whole",
        outputs_until="backward",
        keep_gradients=True,
        generation=86,
    )


def t4_training(model: str, method: Any, attention: Any, batch: int, length: int) -> Training:
    return Training(
        config=CONFIGS[model],
        method=method,
        lora=Lora(r=32, alpha=64, targets=ATTENTION_TARGETS),
        double_quantization=False,
        kbit_prepared=method == "qlora",
        weights="fp16",
        batch=batch,
        seq_len=length,
        gradient_checkpointing=True,
        attention=attention,
        optimizer="adamw_foreach",
        loss="whole",
        outputs_until="step",
        generation=75,
    )


def a6000_rows(only: str) -> list[dict[str, Any]]:
    rows = []
    for *what, measured in A6000:
        name = " ".join(filter(None, what))
        if only in name:
            found = foresee(a6000_training(*what))
            rows.append(_row(name, found, allocated=(found.allocated, measured * 1e9)))
    return rows


def t4_rows(only: str) -> list[dict[str, Any]]:
    rows = []
    for model, method, attention, batch, length, *measured in T4:
        name = f"{model} {method} {attention} {batch}x{length}"
        if only in name:
            found = foresee(t4_training(model, method, attention, batch, length))
            by_phase = {peak.phase: peak.allocated for peak in found.phases}
            values = (found.allocated, by_phase["forward"], by_phase["optimizer"], found.reserved)
            kinds = ("allocated", "forward", "optimizer", "reserved")
            pairs = {kind: (value, size * MIB) for kind, value, size in zip(kinds, values, measured, strict=True)}
            rows.append(_row(name, found, **pairs))
    return rows


def speed_rows(only: str) -> list[dict[str, Any]]:
    """How long the built-in trainer's own step takes to foresee."""
    rows = []
    for model, length, zero in (
        ("Llama-3.2-1B", 2048, Zero()),
        ("Llama-3.1-8B", 4096, Zero()),
        ("Llama-3.1-8B", 4096, Zero(stage=2)),
        ("Llama-3.1-8B", 4096, Zero(stage=3)),
        ("Llama-3.1-70B", 4096, Zero()),
    ):
        name = f"{model} {zero} speed"
        if only in name:
            training = Training(
                config=CONFIGS[model],
                method="full",
                weights="bf16" if zero.stage else "fp32",
                autocast=None if zero.stage else "bf16",
                zero=zero,
                world_size=8 if zero.stage else 1,
                batch=1,
                seq_len=length,
                loss_chunk=1024,
                gradient_checkpointing=True,
                generation=90,
            )
            found = foresee(training)
            rows.append({"name": name, "seconds": round(found.seconds, 2), "gib": round(found.allocated / 2**30, 3)})
    return rows


def _row(name: str, found: Foresight, **pairs: tuple[float, float]) -> dict[str, Any]:
    errors = {kind: round(100 * (foreseen - measured) / measured, 3) for kind, (foreseen, measured) in pairs.items()}
    return {
        "name": name,
        "errors": errors,
        "allocated_mib": round(found.allocated / MIB, 2),
        "reserved_mib": found.reserved // MIB,
        "peak": f"{found.peak_phase}: {found.peak_operation}",
        "components_mib": {name: round(size / MIB, 2) for name, size in found.components.items()},
        "seconds": round(found.seconds, 2),
    }


# --- the estimate without torch -------------------------------------------------------------------

GIB = 1 << 30
_TARGETS: dict[str, tuple[tuple[str, ...], ...]] = {
    "t5": (("q", "v"), ("all-linear",)),
    "gpt2": (("c_attn",), ("all-linear",)),
    "phi3": (("qkv_proj", "o_proj"), ("all-linear",)),
}
_OTHER_OPTIMIZERS = ("adamw_8bit", "paged_adamw_8bit", "adafactor")
_KINDS = ("llama", "llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "gemma2", "gemma3_text", "gpt2", "t5", "t5")
_SIZES = (
    (576, 1536, 9, 3),
    (1024, 2816, 16, 4),
    (1536, 8960, 12, 2),
    (2048, 5632, 16, 16),
    (2048, 8192, 32, 8),
    (4096, 14336, 32, 8),
)
"""Width, width inside a layer, heads, and heads of keys."""


class Compared(msgspec.Struct, frozen=True):
    """A training of which the memory is estimated and foreseen."""

    settings: Settings
    config: dict[str, Any]
    generation: int
    capacity: int

    @property
    def from_folder(self) -> bool:
        """Whether its weights would be read, and so be in 16 bits if they are frozen."""
        return "path" in self.settings.model

    def foreseen(self) -> Foresight:
        if not self.from_folder:
            return foresee(training_of(self.settings, generation=self.generation, capacity=self.capacity))
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.config))
            settings = msgspec.structs.replace(self.settings, model={"path": folder})
            return foresee(training_of(settings, generation=self.generation, capacity=self.capacity))


def drawn(rng: random.Random, kind: str | None = None) -> Compared:
    """A training of any architecture, or of this one."""
    kind = kind or rng.choice(_KINDS)
    config = _config(rng, kind)
    method = rng.choice(("full", "full", "lora", "lora", "qlora"))
    targets = _TARGETS.get(kind, (ATTENTION_TARGETS, ("q_proj", "v_proj"), ("all-linear",)))
    lora = Lora(r=rng.choice((8, 16, 64)), alpha=16, dropout=rng.choice((0.0, 0.05)), targets=rng.choice(targets))
    generation = rng.choice((75, 80, 86, 90))
    precision = rng.choice(("bf16", "bf16", "bf16", "fp16", "fp32") if generation >= 80 else ("fp16", "fp32"))
    length, tokens = rng.choice((256, 512, 1024, 2048)), rng.choice((1024, 2048, 4096, 8192, 16384))
    if kind in ("gpt2", "t5", "gemma2") or generation == 75 or precision == "fp32":
        length = min(length, 1024)  # matrices of scores
    reads = method == "lora" and rng.random() < 0.6
    zero = _zero(rng, method) if rng.random() < 0.35 else Zero()
    settings = Settings(
        recipe="",
        preset="",
        save_every=1,
        learning_rate=1e-4,
        model={"path": "read"} if reads else {"config": config},
        task="seq2seq" if kind == "t5" else "causal",
        method=method,
        lora=None if method == "full" else lora,
        precision=precision,
        batch=max(1, tokens // length),
        seq_len=length,
        accumulation=rng.choice((1, 1, 4)),
        gradient_checkpointing=rng.random() < 0.4,
        loss_chunk=rng.choice((-1, -1, 0, 512, 1024, 4096)),
        optimizer="adamw" if zero.stage else rng.choice(("adamw", "adamw", "adamw", *_OTHER_OPTIMIZERS)),
        world_size=rng.choice((1, 2, 4, 8) if zero.stage else (1, 1, 2)),
        zero=zero,
        bf16_residual=rng.random() < 0.3,
        allocator=rng.choice(("", "expandable_segments:True")),
    )
    return Compared(settings, config, generation, rng.choice((24, 80)) * GIB)


def _zero(rng: random.Random, method: str) -> Zero:
    """A base in 4 bits cannot be sharded."""
    stage, offloads = rng.choice((1, 2) if method == "qlora" else (1, 2, 3, 3)), rng.random() < 0.4
    return Zero(stage=stage, offload_optimizer=offloads, offload_parameters=stage == 3 and offloads and rng.random() < 0.5)


def _config(rng: random.Random, kind: str) -> dict[str, Any]:
    layers, tied = rng.choice((2, 2, 2, 3, 3, 4)), rng.random() < 0.5
    if kind == "t5":
        width, inner, heads = rng.choice(((512, 2048, 8), (768, 3072, 12), (1024, 2816, 16)))
        return {
            "model_type": kind,
            "d_model": width,
            "d_ff": inner,
            "num_heads": heads,
            "d_kv": 64,
            "num_layers": layers,
            "num_decoder_layers": rng.choice((2, 3, 4)),
            "vocab_size": rng.choice((29298, 32128)),
            "feed_forward_proj": rng.choice(("relu", "gated-gelu")),
            "tie_word_embeddings": tied,
            "dropout_rate": rng.choice((0.0, 0.1)),
            "decoder_start_token_id": 0,
        }
    if kind == "gpt2":
        width = rng.choice((768, 1280))
        return {"model_type": kind, "n_embd": width, "n_head": width // 64, "n_layer": layers}
    hidden, inner, heads, key_heads = rng.choice(_SIZES)
    config = llama(hidden, inner, layers, heads, key_heads, rng.choice((32000, 50257, 128256, 151936)))
    config |= {"model_type": kind, "tie_word_embeddings": tied, "pad_token_id": 0}
    if kind.startswith("gemma"):
        config |= {"head_dim": rng.choice((64, 128, 256)), "vocab_size": rng.choice((32000, 256000))}
    if kind in ("mistral", "gemma3_text"):
        config["sliding_window"] = rng.choice((512, 4096))
    return config


def closed_row(one: Compared) -> dict[str, Any]:
    """The signed errors of the estimate, in percent of what the dry run foresees."""
    began = time.process_time()
    found = estimate(one.settings, one.config, generation=one.generation, capacity=one.capacity)
    took = time.process_time() - began
    foreseen = one.foreseen()
    phases = {peak.phase: peak.allocated for peak in foreseen.phases}
    pairs = {"allocated": (found.allocated, foreseen.allocated), "reserved": (found.reserved, foreseen.reserved)}
    pairs |= {phase: (size, phases[phase]) for phase, size in found.peaks.items()}
    chosen = ("method", "precision", "batch", "seq_len", "accumulation", "gradient_checkpointing", "loss_chunk", "optimizer")
    return {
        "model": one.config,
        "settings": {
            name: getattr(one.settings, name) for name in (*chosen, "bf16_residual", "allocator", "lora", "zero", "world_size")
        },
        "from_folder": one.from_folder,
        "generation": one.generation,
        "capacity_gib": one.capacity // GIB,
        "errors": {kind: round(100 * (size - exact) / exact, 2) for kind, (size, exact) in pairs.items()},
        "allocated_mib": round(foreseen.allocated / MIB),
        "reserved_mib": round(foreseen.reserved / MIB),
        "peak": f"{foreseen.peak_phase}: {foreseen.peak_operation}",
        "microseconds": round(1e6 * took),
    }


def closed_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    groups = {"all": rows} | {kind: [row for row in rows if row["model"]["model_type"] == kind] for kind in sorted({*_KINDS})}
    groups |= {f"ZeRO-{stage}": [row for row in rows if row["settings"]["zero"].stage == stage] for stage in range(4)}
    for name, chosen in groups.items():
        for kind in ("allocated", "reserved"):
            errors = [row["errors"][kind] for row in chosen]
            if errors:
                found.setdefault(name, {"rows": len(errors)})[kind] = {
                    "median": round(statistics.median(map(abs, errors)), 2),
                    "lowest": min(errors),
                    "highest": max(errors),
                }
    times = sorted(row["microseconds"] for row in rows)
    found["microseconds"] = {"median": times[len(times) // 2], "95 %": times[len(times) * 95 // 100]}
    return found


def closed(count: int, seed: int) -> None:
    rng, rows = random.Random(seed), list[dict[str, Any]]()
    try:
        while len(rows) < count:
            rows.append(closed_row(drawn(rng)))
            print(json.dumps(msgspec.to_builtins(rows[-1])), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"{len(rows)} of {count} trainings were compared", file=sys.stderr)
    packages = versions("torch", "transformers", "peft", "bitsandbytes")
    results = {"versions": packages, "seed": seed, "summary": closed_summary(rows), "rows": msgspec.to_builtins(rows)}
    report("estimate", results)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = {kind for row in rows for kind in row["errors"]}
    found = {}
    for kind in sorted(kinds):
        sizes = [abs(row["errors"][kind]) for row in rows if kind in row["errors"]]
        found[kind] = {"median": round(statistics.median(sizes), 3), "maximum": max(sizes), "rows": len(sizes)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose name contains this")
    parser.add_argument("--closed", type=int, default=0, metavar="N", help="compare N estimates with the dry run instead")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the trainings that are compared")
    options = parser.parse_args()
    if options.closed:
        closed(options.closed, options.seed)
        return
    only = options.only
    a6000, t4 = a6000_rows(only), t4_rows(only)
    results = {"summary": summary(a6000 + t4), "a6000": a6000, "t4": t4, "speed": speed_rows(only)}
    packages = versions("torch", "transformers", "peft", "bitsandbytes")
    report("predict", {"versions": packages, **msgspec.to_builtins(results)})


if __name__ == "__main__":
    main()
