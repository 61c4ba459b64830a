"""The dry run compared with published measurements on GPUs.

    python -m bench.predict [--only TEXT]
    python -m bench.predict --closed N [--seed N] [--shallow] [--sharded]
    python -m bench.predict --calibrated N [--seed N]
    python -m bench.predict --speed [--only TEXT]

* `a6000`: the README of vramcalc: RTX A6000, max_memory_allocated in units of 10^9 bytes, a sample
  of 2048 tokens, torch's AdamW (foreach), gradients kept between updates, outputs kept during the
  backward pass, LoRA of rank 16. Their transformers 4.57 made a mask for batches without padding,
  too.
* `t4`: the archive of fitcheck: Tesla T4, MiB, fp16, LoRA of rank 32 with gradient checkpointing;
  memory-efficient attention with repeated keys and values, or eager; 4-bit weights without double
  quantization, the rest in fp32.
* `wiki`: LLaMA-Factory's comparison of QLoRA by length on an A100 (Llama-2-7B, rank 8 on all
  layers, flash attention), in whole gigabytes of the process; the usual CUDA context is subtracted.
* `xmem`: the experiments of xMem: RTX 3060, T5-small in fp32 with Adam or AdamW, samples of at most
  128 tokens, bytes of the process. The CUDA context is not published; that of the T4 is subtracted.
  The same source publishes the answers of xMem, DNNMem and SchedTune, which are printed, too.
* `rtx4080`: the benchmark results of can-i-finetune-this
  (github.com/DaoyuanLi2816/can-i-finetune-this, commit 053ce9e, benchmarks/results): RTX 4080,
  torch 2.6, transformers 5.8, peft 0.19, bitsandbytes 0.49. GiB; bf16, LoRA of rank 16, paged 8-bit
  AdamW, all samples of the same length; 4-bit weights with double quantization, the rest in fp32.
  With checkpointing, but for one row.
* `a100`: the reference results of fms-acceleration
  (github.com/foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv without
  its own plugins, for which 4-bit weights count as none): A100, torch 2.4, transformers 4.48, peft
  0.13, trl 0.13, bitsandbytes 0.43, flash-attn 2.7. Mistral-7B, packed samples of 4096 tokens,
  checkpointing, Hugging Face's Trainer, torch's AdamW (foreach), LoRA of rank 16, nf4 with double
  quantization. That transformers copies the logits for the loss, today's does not; so each row is
  foreseen with both.

Errors are signed, in percent of the measurement. The other tables also have the errors of other
estimators for the allocated memory (`baselines.py`).

`--closed`: the estimate of `presets.estimate` compared with the dry run instead, over N trainings
drawn from a seed: published models on a card, with what somebody would try there (`trainings.py`).
With `--shallow` they have two to four layers and any batch, which is harder. A row is printed as
soon as it is known.

`--calibrated`: the same for an estimate that a known peak scales. The dry run of a training stands
for a measured peak; the scaled estimate is compared with the dry run of the same training with
another batch, length or other settings.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import msgspec

from bench.baselines import NO_ADAPTERS, baselines
from bench.baselines import summary as baselines_summary
from bench.common import report, versions
from bench.published import (
    A100,
    A6000,
    CONFIGS,
    RTX4080,
    T4,
    T4_CONTEXT_BYTES,
    WIKI,
    XMEM,
    a100_training,
    a6000_training,
    copying_logits,
    rtx4080_training,
    t4_training,
    wiki_training,
    xmem_training,
)
from bench.trainings import GIB, KINDS, Compared, drawn, drawn_deep
from memtop.presets import Settings, sequence
from memtop.presets.allocator import Allocator
from memtop.presets.choosing import CONTEXT_BYTES
from memtop.presets.estimate import estimate
from memtop.presets.schema import Lora, Zero
from memtop.train.dry_run.build import Training, training_of
from memtop.train.dry_run.run import Foresight, foresee, needing_most

MIB = 1 << 20


def a6000_rows(only: str) -> list[dict[str, Any]]:
    rows = []
    for *what, measured in A6000:
        name = " ".join(filter(None, what))
        if only in name:
            training = a6000_training(*what)
            rows.append(_row(name, training, foresee(training), allocated=measured * 1e9))
    return rows


def t4_rows(only: str) -> list[dict[str, Any]]:
    rows = []
    for model, method, attention, batch, length, *measured in T4:
        name = f"{model} {method} {attention} {batch}x{length}"
        if only in name:
            training = t4_training(model, method, attention, batch, length)
            kinds = ("allocated", "forward", "optimizer", "reserved")
            sizes = {kind: size * MIB for kind, size in zip(kinds, measured, strict=True)}
            rows.append(_row(name, training, foresee(training), **sizes))
    return rows


def wiki_rows(only: str) -> list[dict[str, Any]]:
    rows = []
    for length, measured in WIKI:
        name = f"Llama-2-7B qlora flash 1x{length}"
        if only in name:
            training = wiki_training(length)
            found = foresee(training)
            row = _row(name, training, found, reserved=measured * 1e9 - CONTEXT_BYTES)
            # They say whole gigabytes.
            row["rounded_by_percent"] = round(50 / measured, 1)
            rows.append(row)
    return rows


def xmem_rows(only: str) -> list[dict[str, Any]]:
    rows = []
    for batch, measured, *said in XMEM:
        name = f"T5-small full eager {batch}x128"
        if only in name:
            training = xmem_training(batch)
            estimators = zip(("xMem", "DNNMem", "SchedTune"), said, strict=True)
            errors = {estimator: _error(size, measured) for estimator, size in estimators}
            rows.append(_row(name, training, foresee(training), errors, reserved=measured - T4_CONTEXT_BYTES))
    return rows


def rtx4080_rows(only: str) -> list[dict[str, Any]]:
    rows = []
    for *what, allocated, reserved in RTX4080:
        model, method, special, batch, length = what
        name = " ".join(filter(None, [model, method, special, f"{batch}x{length}"]))
        if only in name:
            training = rtx4080_training(*what)
            rows.append(_row(name, training, foresee(training), allocated=allocated * GIB, reserved=reserved * GIB))
    return rows


def a100_rows(only: str) -> list[dict[str, Any]]:
    rows = []
    for *what, measured in A100:
        method, precision, batch = what
        name = f"Mistral-7B {method} {precision} {batch}x4096"
        if only in name:
            training = a100_training(*what)
            with copying_logits():
                row = _row(name, training, foresee(training), allocated=measured)
            row["error_with_the_installed_loss"] = _error(foresee(training).allocated, measured)
            rows.append(row)
    return rows


SPEEDS: tuple[tuple[str, Any, int, dict[str, Any]], ...] = (
    ("Llama-3.2-1B", "full", 80, {"seq_len": 2048}),
    ("Llama-3.1-8B", "full", 280, {}),
    ("Llama-3.1-8B", "qlora", 16, {}),
    ("Llama-3.1-8B", "qlora", 16, {"batch": 16}),
    ("Llama-3.1-8B", "full", 80, {"zero": Zero(stage=2), "world_size": 8}),
    ("Llama-3.1-8B", "full", 80, {"zero": Zero(stage=3), "world_size": 8}),
    ("Llama-3.1-70B", "full", 2000, {}),
    ("Llama-3.1-70B", "qlora", 80, {}),
)
"""Model, method, the GPU's memory in GiB, and settings."""


def _least_work(run: Callable[[], object]) -> dict[str, float]:
    """How often an estimate allocates and releases, and how long it takes to add up these sizes
    alone, without looking for places: no estimate in Python takes less."""
    events: list[tuple[int, int]] = []

    class Recording(Allocator):
        def allocate(self, key: int, size: int, stream: int = 0) -> None:
            events.append((key, size))
            super().allocate(key, size, stream)

        def release(self, key: int) -> None:
            events.append((key, 0))
            super().release(key)

    with mock.patch.object(sequence, "Allocator", Recording):
        run()
    sizes: dict[int, int] = {}
    now = most = 0
    began = time.process_time()
    for key, size in events:
        if size:
            sizes[key] = size
            now += size
        else:
            now -= sizes.pop(key, 0)
        most = max(most, now)
    return {"allocator_calls": len(events), "sum_milliseconds": round(1000 * (time.process_time() - began), 2)}


def speed_rows(only: str) -> list[dict[str, Any]]:
    """The processor time in which the built-in trainer's own step is foreseen, after imports."""
    rows: list[dict[str, Any]] = []
    foresee(a6000_training("SmolLM2-135M", "lora", "amp", ""))  # what torch and peft load at first use
    for model, method, gib, changes in SPEEDS:
        values = {"seq_len": 4096, "batch": 1, "gradient_checkpointing": True, **changes}
        name = " ".join([model, method, f"{gib} GiB", *(f"{key} {value}" for key, value in changes.items())])
        if only not in name:
            continue
        lora = None if method == "full" else Lora(r=16, alpha=16, targets=("all-linear",))
        settings = Settings(
            recipe="",
            preset="",
            save_every=1,
            learning_rate=1e-4,
            accumulation=1,
            model={"config": CONFIGS[model]},
            method=method,
            lora=lora,
            precision="bf16",
            **values,
        )
        began, walked = time.process_time(), time.perf_counter()
        found = foresee(needing_most(training_of(settings, generation=90, capacity=gib * GIB)))
        took, walked = time.process_time() - began, time.perf_counter() - walked
        began = time.process_time()
        estimated = partial(estimate, settings, CONFIGS[model], generation=90, capacity=gib * GIB)
        for _ in range(10):
            rough = estimated()
        rows.append(
            {
                "name": name,
                "processor_seconds": round(took, 2),
                "seconds": round(walked, 2),
                "estimate_milliseconds": round(100 * (time.process_time() - began), 2),
                **_least_work(estimated),
                "fits": found.fits,
                "allocated_gib": round(found.allocated / GIB, 3),
                "reserved_gib": round(found.reserved / GIB, 3),
                "estimate_errors": {
                    "allocated": _error(rough.allocated, found.allocated),
                    "reserved": _error(rough.reserved, found.reserved),
                },
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _row(
    name: str, training: Training, found: Foresight, others: dict[str, Any] | None = None, **measured: float
) -> dict[str, Any]:
    """`others`: the errors of other estimators; None: those of `baselines.py`."""
    by_phase = {str(peak.phase): peak.allocated for peak in found.phases}
    foreseen = {"allocated": found.allocated, "reserved": found.reserved, **by_phase}
    if others is None:
        others = {
            name: None if size is None or "allocated" not in measured else _error(size, measured["allocated"])
            for name, size in baselines(training).items()
        }
    return {
        "name": name,
        "errors": {kind: _error(foreseen[kind], size) for kind, size in measured.items()},
        "baselines": others,
        "without_baselines": NO_ADAPTERS if training.method != "full" else None,
        "allocated_mib": round(found.allocated / MIB, 2),
        "reserved_mib": found.reserved // MIB,
        "peak": f"{found.peak_phase}: {found.peak_operation}",
        "components_mib": {name: round(size / MIB, 2) for name, size in found.components.items()},
        "seconds": round(found.seconds, 2),
    }


def _error(foreseen: float, measured: float) -> float:
    return round(100 * (foreseen - measured) / measured, 3)


# --- the estimate without torch -------------------------------------------------------------------


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


def variants(settings: Settings) -> dict[str, Settings]:
    """The changes of a run whose peak was measured."""
    replace = msgspec.structs.replace
    offload = Zero(stage=2, offload_optimizer=True)
    found = {
        "batch x 2": replace(settings, batch=2 * settings.batch),
        "batch / 2": replace(settings, batch=max(1, settings.batch // 2)),
        "seq_len / 2": replace(settings, seq_len=settings.seq_len // 2),
        "checkpointing": replace(settings, gradient_checkpointing=not settings.gradient_checkpointing),
    }
    if settings.method == "full" and settings.optimizer == "adamw":
        found["ZeRO-2 + offload"] = replace(settings, zero=offload, optimizer="cpu_adam")
    return found


def calibrated_rows(one: Compared) -> list[dict[str, Any]]:
    """The signed errors of the scaled estimate of what torch reserves, in percent of the dry
    run."""

    def both(settings: Settings) -> tuple[int, int]:
        tried = msgspec.structs.replace(one, settings=settings, capacity=80 * GIB)
        rough = estimate(settings, one.config, generation=one.generation, capacity=tried.capacity)
        return rough.reserved, tried.foreseen().reserved

    rough, exact = both(one.settings)
    rows = []
    for change, settings in variants(one.settings).items():
        if settings != one.settings:
            size, known = both(settings)
            errors = {"plain": size / known, "scaled": size * exact / rough / known}
            row = {"change": change, "errors": {name: round(100 * (part - 1), 2) for name, part in errors.items()}}
            rows.append({"model_type": one.config["model_type"], "reserved_mib": round(known / MIB), **row})
    return rows


def calibrated_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for change in dict.fromkeys(row["change"] for row in rows):
        for kind in ("plain", "scaled"):
            errors = sorted(row["errors"][kind] for row in rows if row["change"] == change)
            median = round(statistics.median(map(abs, errors)), 2)
            values = {"rows": len(errors), "median": median, "lowest": errors[0], "highest": errors[-1]}
            found.setdefault(change, {})[kind] = values
    return found


def calibrated(count: int, seed: int) -> None:
    rng, rows = random.Random(seed), list[dict[str, Any]]()
    try:
        for _ in range(count):
            for row in calibrated_rows(drawn(rng)):
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"{len(rows)} changes were compared", file=sys.stderr)
    packages = versions("torch", "transformers", "peft", "bitsandbytes")
    report("calibrated", {"versions": packages, "seed": seed, "summary": calibrated_summary(rows), "rows": rows})


def closed_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    groups = {"all": rows} | {kind: [row for row in rows if row["model"]["model_type"] == kind] for kind in sorted({*KINDS})}
    groups |= {f"ZeRO-{stage}": [row for row in rows if row["settings"]["zero"].stage == stage] for stage in range(4)}
    for name, chosen in groups.items():
        for kind in ("allocated", "reserved"):
            errors = [row["errors"][kind] for row in chosen]
            if errors:
                found.setdefault(name, {"rows": len(errors)})[kind] = {
                    "median": round(statistics.median(map(abs, errors)), 2),
                    "lowest": min(errors),
                    "highest": max(errors),
                    "outside": sum(not -3 <= error <= 15 for error in errors),
                }
    ratios = sorted(row["reserved_mib"] / row["allocated_mib"] for row in rows)
    found["reserved_per_allocated"] = {"lowest": round(ratios[0], 3), "highest": round(ratios[-1], 3)}
    times = sorted(row["microseconds"] for row in rows)
    found["microseconds"] = {"median": times[len(times) // 2], "95 %": times[len(times) * 95 // 100]}
    return found


def closed(count: int, seed: int, draw: Callable[[random.Random], Compared], *, sharded: bool) -> None:
    rng, rows = random.Random(seed), list[dict[str, Any]]()
    try:
        while len(rows) < count:
            one = draw(rng)
            if sharded and not one.settings.zero.stage:
                continue
            rows.append(closed_row(one))
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
    parser.add_argument("--shallow", action="store_true", help="with --closed: of models with few layers, the harder set")
    parser.add_argument("--calibrated", type=int, default=0, metavar="N", help="scale N estimates by a known peak")
    parser.add_argument("--speed", action="store_true", help="measure how long it takes instead")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the trainings that are compared")
    parser.add_argument("--sharded", action="store_true", help="with --closed: only trainings with ZeRO")
    options = parser.parse_args()
    if options.speed:
        packages = versions("torch", "transformers", "peft", "bitsandbytes")
        report("predict_speed", {"versions": packages, "rows": speed_rows(options.only)})
        return
    if options.closed:
        closed(options.closed, options.seed, drawn if options.shallow else drawn_deep, sharded=options.sharded)
        return
    if options.calibrated:
        calibrated(options.calibrated, options.seed)
        return
    only = options.only
    a6000, t4, wiki, xmem = a6000_rows(only), t4_rows(only), wiki_rows(only), xmem_rows(only)
    rtx4080, a100 = rtx4080_rows(only), a100_rows(only)
    results = {
        "summary": summary(a6000 + t4),
        "summary_wiki": summary(wiki),
        "summary_xmem": summary(xmem),
        "summary_rtx4080": summary(rtx4080),
        "summary_a100": summary(a100),
        "baselines": baselines_summary(a6000 + t4),
        "a6000": a6000,
        "t4": t4,
        "wiki": wiki,
        "xmem": xmem,
        "rtx4080": rtx4080,
        "a100": a100,
    }
    packages = versions("torch", "transformers", "peft", "bitsandbytes", "accelerate", "deepspeed")
    report("predict", {"versions": packages, **msgspec.to_builtins(results)})


if __name__ == "__main__":
    main()
