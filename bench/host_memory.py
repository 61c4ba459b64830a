"""The host memory that `presets.host_estimate` foresees, compared with that of real runs on a CPU.

    python -m bench.host_memory [--only TEXT] [--unseen]
    python -m bench.host_memory --again FILE

Each row is a whole run under its supervisor, a few updates long, with a save in between. Measured
is the highest PSS of the run's processes together, read about ten times a second by the function
with which the supervisor reads it once a second; `shown_mib` is what `memtop runs` shows then.
Errors are signed, in percent of the measurement. `unseen`: the row was not looked at while the
rules and their constants were made.

The PSS divides what is shared with other programs: run it with an environment of which no other
program has the libraries mapped. Two processes are started on scripted GPUs, and train on the CPU.
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
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
from msgspec.structs import replace

from bench.common import printed_by, report, versions
from memtop.presets import Settings
from memtop.presets.host_estimate import host_estimate
from memtop.presets.parameters import stored_config
from memtop.supervisor.run.processes.host_memory import process_memory
from tests.nvml_double.double import Script, build

MIB, GIB = 1 << 20, 1 << 30
_SECONDS = 0.1


class Row(NamedTuple):
    """A run: what `memtop train` gets, with {folder} for the folder of the inputs."""

    words: str
    unseen: bool = False
    processes: int = 1


_FROM_FILE = "--set model.path={folder}/MODEL --set data.train={folder}/pairs.jsonl --set data.tokenizer=bytes"
_PAIRS = "--set data.train={folder}/pairs.jsonl"
_ZERO_2 = "--set zero.stage=2 --set zero.offload_optimizer=true"
ROWS = (
    # Of each level.
    Row("first-run --preset standard"),
    Row("first-run --preset low"),
    Row("first-run --preset extreme"),
    Row("pretrain-causal --preset low --accum 1 --seq-len 128", unseen=True),
    Row("pretrain-causal --preset extreme --accum 2 --seq-len 256", unseen=True),
    # Batch and length.
    Row("pretrain-causal --preset standard --batch 4 --accum 1 --seq-len 128"),
    Row("pretrain-causal --preset standard --batch 4 --accum 2 --seq-len 256"),
    Row("pretrain-causal --preset standard --batch 2 --accum 2 --seq-len 512", unseen=True),
    Row("first-run --preset standard --batch 16 --accum 1 --seq-len 256"),
    Row("first-run --preset standard --batch 2 --accum 4 --seq-len 64 --set precision=bf16", unseen=True),
    Row("pretrain-causal --preset standard --batch 4 --accum 1 --seq-len 128 --set optimizer=adafactor", unseen=True),
    # Other models and methods.
    Row(f"pretrain-t5 --preset standard --batch 2 --accum 1 --seq-len 64 {_PAIRS}"),
    Row(
        f"pretrain-t5 --preset standard --batch 4 --accum 1 --seq-len 64 {_PAIRS} --set model.config.d_model=384 "
        "--set model.config.num_heads=6 --set model.config.d_ff=1536",
        unseen=True,
    ),
    Row(f"sft-lora --preset standard --batch 2 --accum 2 --seq-len 128 {_FROM_FILE}".replace("MODEL", "fp32")),
    Row(f"sft-lora --preset low --batch 4 --accum 1 --seq-len 192 {_FROM_FILE}".replace("MODEL", "bf16"), unseen=True),
    Row(f"sft-qlora --preset standard --batch 1 --accum 2 --seq-len 128 {_FROM_FILE}".replace("MODEL", "bf16"), unseen=True),
    Row(f"sft-lora --preset standard --batch 4 --accum 1 --seq-len 256 {_FROM_FILE}".replace("MODEL", "fp32"), unseen=True),
    Row("first-run --preset standard --batch 32 --accum 1 --seq-len 128 --set model.config.hidden_size=256", unseen=True),
    Row(
        "pretrain-causal --preset standard --batch 4 --accum 4 --seq-len 192 --set model.config.num_hidden_layers=5",
        unseen=True,
    ),
    Row("first-run --preset standard --batch 8 --accum 2 --set model.config.model_type=qwen2", unseen=True),
    # Processes.
    Row("first-run --preset standard --set workers=2"),
    Row("first-run --preset standard", processes=2),
    Row("pretrain-causal --preset standard --batch 2 --accum 1 --seq-len 128", processes=2, unseen=True),
    Row(f"pretrain-causal --preset standard --batch 2 --accum 1 --seq-len 128 {_ZERO_2}"),
    Row(f"pretrain-causal --preset standard --batch 2 --accum 1 --seq-len 128 {_ZERO_2}", processes=2, unseen=True),
)


_MODEL = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM

sizes = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
model.save_pretrained(sys.argv[1] + "/fp32")
model.bfloat16().save_pretrained(sys.argv[1] + "/bf16")
"""
"""75 million parameters, in 32 and in 16 bits. Not in this process, which would share torch's
libraries with what is measured."""


def make_inputs(folder: Path) -> None:
    pairs = ({"prompt": "what is a number? " * 4, "response": f"{number} is one. " * 12} for number in range(3000))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    printed_by("-c", _MODEL, str(folder))


def measured(row: Row, inputs: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="memtop-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o700)
        environment = {
            **os.environ,
            "MEMTOP_SOCKET_DIR": name,
            "MEMTOP_RUNS_DIR": str(folder / "runs"),
            "DS_ACCELERATOR": "cpu",
        }
        words = [*row.words.format(folder=inputs).split(), "--max-updates", "5", "--save-every", "2", "--set", "device=cpu"]
        if row.processes > 1:
            script = Script(folder / "script")
            for gpu in range(row.processes):
                script.gpu(gpu, name="GPU", uuid=f"GPU-{gpu}", total=24 * GIB, used=0)
            environment |= script.write().env(build(folder))
            words += ["--gpus", ",".join(map(str, range(row.processes)))]

        def memtop(*arguments: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "memtop", *arguments], env=environment, check=False, capture_output=True, text=True
            )
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-1000:]}")
            return done.stdout

        memtop("train", "--detach", "--name", "a", *words)
        highest, parts = _highest(psutil.Process(json.loads(memtop("show", "a", "--json"))["supervisor_pid"]))
        shown = json.loads(memtop("show", "a", "--json"))
        if shown["state"] != "finished":
            raise RuntimeError(f"{row.words}: is {shown['state']}: {memtop('diagnose', 'a')}")
        listed = json.loads(memtop("runs", "--json"))[0]["host_peak_bytes"]
        settings = msgspec.json.decode((folder / "runs/a/attempts/0001/settings.json").read_bytes(), type=Settings)
        config = stored_config(settings)
    return _row(
        row.words,
        row.processes,
        unseen=row.unseen,
        measured_mib=highest // MIB,
        measured_parts_mib={name: size // MIB for name, size in parts.items()},
        shown_mib=None if listed is None else listed // MIB,
        settings=json.loads(msgspec.json.encode(replace(settings, python="")).decode().replace(str(inputs), "{folder}")),
        config=config,
    )


def _row(run: str, processes: int, **measured: Any) -> dict[str, Any]:
    settings = msgspec.convert(measured["settings"], Settings)
    foreseen = host_estimate(settings, measured["config"], on_gpu=False)
    return {
        "run": run,
        "processes": processes,
        "level": settings.host_level,
        "batch": settings.batch,
        "accumulation": settings.accumulation,
        "seq_len": settings.seq_len,
        "error_percent": round(100 * (foreseen.with_files / MIB / measured["measured_mib"] - 1), 1),
        "foreseen_mib": foreseen.with_files // MIB,
        "foreseen_parts_mib": {name: size // MIB for name, size in foreseen.components.items()},
        **measured,
    }


def _highest(supervisor: psutil.Process) -> tuple[int, dict[str, int]]:
    """The highest PSS of all processes below the supervisor until the last one ends, and what it
    was by process."""
    highest, parts = 0, dict[str, int]()
    began = time.monotonic()
    while (below := _below(supervisor)) or (not highest and time.monotonic() - began < 60):
        now: Counter[str] = Counter()
        for process in below:
            try:
                memory = process_memory(process.pid)
            except ProcessLookupError:
                continue
            if memory is not None:
                now[f"process {below.index(process)}"] += memory.pss_bytes
        if now.total() > highest:
            highest, parts = now.total(), dict(now)
        time.sleep(_SECONDS)
    return highest, parts


def _below(supervisor: psutil.Process) -> list[psutil.Process]:
    try:
        return supervisor.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, chosen in (("all", rows), ("unseen", [row for row in rows if row["unseen"]])):
        errors = [row["error_percent"] for row in chosen]
        if errors:
            sizes = [abs(error) for error in errors]
            found[name] = {
                "rows": len(errors),
                "median_percent": round(statistics.median(sizes), 1),
                "largest_percent": max(sizes),
                "lowest_percent": min(errors),
                "highest_percent": max(errors),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this text")
    parser.add_argument("--again", type=Path, metavar="FILE", help="no runs: foresee again what this result has measured")
    parser.add_argument("--unseen", action="store_true", help="also the rows that no rule was fitted to")
    arguments = parser.parse_args()
    rows = []
    if arguments.again is not None:
        computed = ("level", "batch", "accumulation", "seq_len", "error_percent", "foreseen_mib", "foreseen_parts_mib")
        for row in json.loads(arguments.again.read_text())["rows"]:
            rows.append(_row(**{name: value for name, value in row.items() if name not in computed}))
    else:
        with tempfile.TemporaryDirectory(prefix="memtop-inputs-") as inputs:
            make_inputs(Path(inputs))
            chosen = [row for row in ROWS if arguments.only in row.words and (arguments.unseen or not row.unseen)]
            if any("zero" in row.words for row in chosen):
                # DeepSpeed compiles its extensions.
                measured(next(row for row in chosen if "zero" in row.words), Path(inputs))
            for one in chosen:
                rows.append(measured(one, Path(inputs)))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    libraries = versions("torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes")
    report("host_memory", {"versions": libraries, "summary": summary(rows), "rows": rows})


if __name__ == "__main__":
    main()
