"""The table of settings: what each field of `Settings` means for a run, for its memory and for
people.

Fields of nested structs have rows of their own with dotted names (`lora.r`, `zero.stage`). Every
other module asks this table which settings may change in a running program, which make another run,
which change training and which shape memory. `checks.py` refuses values that cannot work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import msgspec

from memtop.presets.schema import HostLevel, Settings

Memory = Literal["peak", "host", "disk"]
"""`peak`: the peak of device memory (on a CPU, of host memory); `host`: host memory only; `disk`:
the run's folder."""
Saves = Callable[[Any, Any], bool]
HOST_LEVELS: tuple[HostLevel, ...] = get_args(HostLevel)
"""From most to least host memory."""


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    label: str
    """The name in lists of changes."""
    unit: str = ""
    also: tuple[str, ...] = ()
    """Other names that people know it by; a refusal of one names the setting."""
    option: str = ""
    """Its own option on the command line, if it has one in addition to `--set`."""
    editable: bool = True
    """False: `--set` does not take it, because it has its own option or follows from other
    settings.
    """
    live: Literal["no", "without ZeRO", "always"] = "no"
    """Whether the built-in trainer can change it at an update boundary."""
    new_run: str = ""
    """Why a change makes another run; empty: the run's state goes on with it."""
    changes_training: bool = False
    """Whether a change alters what is learnt by more than rounding. Batch, accumulation and
    processes do so only by their product, the effective batch."""
    shapes: Memory | None = None
    """Which memory it shapes."""
    saves: Saves | None = None
    """Whether the first value asks for less memory than the second."""
    saves_much: bool = False
    """Whether that saving can make up for a larger micro-batch."""
    bounds: tuple[int, int] | None = None
    """The least and the largest allowed number."""


def _less(one: Any, other: Any) -> bool:
    return bool(one < other)


def _more(one: Any, other: Any) -> bool:
    return bool(one > other)


def _on(one: bool, other: bool) -> bool:
    return one and not other


def _differs(one: Any, other: Any) -> bool:
    return bool(one != other)


def _differs_from(costly: Any) -> Saves:
    return lambda one, other: one not in (other, costly)


def _lower_host_level(one: HostLevel, other: HostLevel) -> bool:
    return HOST_LEVELS.index(one) > HOST_LEVELS.index(other)


def _unpinned(one: bool | None, other: bool | None) -> bool:
    return one is False and other is not False


# Larger numbers are slips, or do not fit where they are stored: torch's seeds, the ledger, JSON.
MOST_SAMPLES = 1 << 20
_COUNT = (1 << 31) - 1
_TOTAL = 1 << 53
_WIDEST_ADAPTER = 1 << 16
MOST_UPDATES = _COUNT

FIELDS: dict[str, Field] = {
    "recipe": Field(label="recipe", editable=False),
    "preset": Field(label="preset", also=("preset",), option="--preset", editable=False),
    "batch": Field(
        label="batch",
        also=("bs", "batch_size", "micro_batch_size", "per_device_train_batch_size"),
        unit="samples per micro-batch and process",
        option="--batch",
        live="without ZeRO",
        shapes="peak",
        bounds=(1, MOST_SAMPLES),
    ),
    "accumulation": Field(
        label="accumulation",
        also=("accum", "grad_accum", "gradient_accumulation_steps"),
        unit="micro-batches per update",
        option="--accum",
        live="without ZeRO",
        bounds=(1, MOST_SAMPLES),
    ),
    "rank_splits": Field(
        label="split of each process",
        unit="BxA of each process",
        live="without ZeRO",
        shapes="peak",
        saves=_differs_from(()),
    ),
    "auto_batch": Field(label="batch search"),
    "world_size": Field(
        label="processes",
        editable=False,
        shapes="host",
        saves=_differs,
        saves_much=True,
        bounds=(1, 1 << 12),
    ),
    # It shapes the peak, but a run never has it: the keys of measured peaks stay what they were.
    "ddp": Field(label="DistributedDataParallel", editable=False),
    "gpus": Field(label="GPUs", also=("gpus", "cuda_visible_devices"), option="--gpus", editable=False, saves=_differs),
    "python": Field(label="Python"),
    "zero.stage": Field(label="ZeRO stage", also=("zero_stage",), shapes="peak", saves=_more, saves_much=True),
    "zero.offload_optimizer": Field(label="optimizer offload", shapes="peak", saves=_on, saves_much=True),
    "zero.offload_parameters": Field(label="parameter offload", shapes="peak", saves=_on, saves_much=True),
    "gradient_checkpointing": Field(
        label="gradient checkpointing",
        also=("checkpointing", "activation_checkpointing", "use_checkpointing"),
        live="without ZeRO",
        shapes="peak",
        saves=_on,
        saves_much=True,
    ),
    "workers": Field(
        label="workers",
        also=("num_workers", "dataloader_num_workers"),
        unit="loader processes per training process",
        live="always",
        shapes="host",
        saves=_less,
        bounds=(0, 1 << 10),
    ),
    "host_level": Field(label="host memory", shapes="host", saves=_lower_host_level),
    "allocator": Field(label="allocator", shapes="peak", saves=_differs),
    "pin_memory": Field(label="pinned buffers", shapes="host", saves=_unpinned),
    # Another kind of optimizer converts the moments: `compatibility` reports what is lost.
    "optimizer": Field(label="optimizer", also=("optim",), shapes="peak", saves=_differs_from("adamw"), saves_much=True),
    "loss_chunk": Field(
        label="loss_chunk",
        unit="tokens at one time",
        shapes="peak",
        saves=_differs_from(0),
        saves_much=True,
    ),
    "packing": Field(label="packing", shapes="peak", saves=_on),
    "compile": Field(label="torch.compile", also=("torch_compile",), shapes="peak"),
    "bf16_residual": Field(label="bf16 residual stream", shapes="peak", saves=_on),
    "device": Field(label="device", also=("accelerator",), shapes="peak"),
    "seq_len": Field(
        label="T",
        also=(
            "max_length",
            "max_seq_length",
            "max_seq_len",
            "block_size",
            "context_length",
            "sequence_length",
            "t",
            "cutoff_len",
        ),
        unit="tokens per sample",
        option="--seq-len",
        changes_training=True,
        shapes="peak",
        saves=_less,
        saves_much=True,
        bounds=(1, 1 << 24),
    ),
    "learning_rate": Field(label="learning rate", also=("lr",), unit="per update", changes_training=True),
    "epochs": Field(
        label="epochs", also=("num_epochs", "num_train_epochs"), unit="passes over the data", changes_training=True
    ),
    "target_samples": Field(
        label="samples in all",
        also=("max_steps", "max_iters", "num_steps", "max_updates"),
        unit="samples",
        editable=False,
        option="--max-updates",
        changes_training=True,
        bounds=(0, _TOTAL),
    ),
    "precision": Field(
        label="precision", also=("dtype", "bf16", "fp16", "mixed_precision"), changes_training=True, shapes="peak"
    ),
    "warmup_samples": Field(label="warm-up", unit="samples", changes_training=True, bounds=(0, _TOTAL)),
    "warmup_fraction": Field(label="warm-up share", also=("warmup", "warmup_ratio"), changes_training=True),
    "final_learning_rate_fraction": Field(label="last share of the learning rate", changes_training=True),
    "weight_decay": Field(label="weight decay", also=("wd", "decay"), changes_training=True),
    "clip_norm": Field(label="clip norm", also=("max_grad_norm", "grad_clip", "gradient_clipping"), changes_training=True),
    "method": Field(label="method", new_run="other weights are trained", changes_training=True, shapes="peak"),
    "task": Field(label="task", new_run="the training of another task", changes_training=True, shapes="peak"),
    "lora.r": Field(
        label="LoRA r",
        also=("rank", "lora_r", "lora_rank"),
        new_run="adapters of another shape",
        changes_training=True,
        shapes="peak",
        saves=_differs,
        saves_much=True,
        bounds=(1, _WIDEST_ADAPTER),
    ),
    "lora.alpha": Field(
        label="LoRA alpha",
        also=("lora_alpha", "alpha"),
        new_run="the scale alpha / r of the adapters jumps",
        changes_training=True,
        bounds=(1, _WIDEST_ADAPTER),
    ),
    "lora.dropout": Field(label="LoRA dropout", also=("lora_dropout",), changes_training=True, shapes="peak", saves=_differs),
    "lora.targets": Field(
        label="LoRA targets",
        also=("target_modules", "lora_target"),
        new_run="other layers have adapters",
        changes_training=True,
        shapes="peak",
        saves=_differs,
        saves_much=True,
    ),
    "model": Field(
        label="model",
        also=("model_name_or_path", "model_path", "base_model"),
        new_run="another model: its state does not fit",
        changes_training=True,
        shapes="peak",
        saves=_differs,
        saves_much=True,
    ),
    "data": Field(
        label="data",
        also=("dataset", "train_file", "data_path"),
        new_run="other data: the position in it means nothing there",
        changes_training=True,
        shapes="peak",
    ),
    "seed": Field(
        label="seed", also=("random_seed",), new_run="another order of the samples", changes_training=True, bounds=(0, _COUNT)
    ),
    "save_every": Field(label="save_every", also=("save_steps", "save_interval"), unit="updates", bounds=(1, _COUNT)),
    # An evaluation with the training's own batch adds nothing to the peak.
    "eval_every": Field(
        label="eval_every", also=("eval_steps", "eval_interval"), unit="updates", saves=_differs, bounds=(0, _COUNT)
    ),
    "eval_batch": Field(
        label="eval_batch",
        also=("per_device_eval_batch_size", "eval_batch_size"),
        unit="samples per micro-batch and process",
        live="always",
        shapes="peak",
        saves=_differs,
        bounds=(0, MOST_SAMPLES),
    ),
    "save_total_limit": Field(label="save_total_limit", unit="states", shapes="disk", bounds=(1, _COUNT)),
    "load_best_at_end": Field(label="load_best_at_end", also=("load_best_model_at_end",)),
    # A sampling frees its memory, and an OOM in it ends nothing.
    "sample.prompts": Field(label="prompts"),
    "sample.every": Field(label="sample.every", unit="updates", bounds=(0, _COUNT)),
    "sample.max_new_tokens": Field(label="sample.max_new_tokens", unit="tokens", bounds=(1, 1 << 16)),
    "sample.temperature": Field(label="sample.temperature"),
    "sample.seed": Field(label="sample.seed", bounds=(0, _COUNT)),
    "on_spike": Field(label="on a spike of the loss", option="--on-spike"),
    "leave_out": Field(label="left out", unit="positions in the order of the samples", changes_training=True),
    "log_every": Field(label="log_every", also=("logging_steps", "log_interval"), unit="updates", bounds=(1, _COUNT)),
    "trackers": Field(label="trackers", also=("report_to",)),
}

LIVE = tuple(name for name, field in FIELDS.items() if field.live != "no")
"""Settings that the built-in trainer can change at an update boundary."""
SPLIT = ("batch", "accumulation", "rank_splits")
"""The settings that say how the samples of an update are split."""
ZERO = tuple(name for name in FIELDS if name.startswith("zero."))
"""The rows of ZeRO's strategy."""
OPTIONS = {name: field.option for name, field in FIELDS.items() if field.option and field.editable}
OTHER_NAMES = {other: name for name, field in FIELDS.items() for other in field.also}


def value_of(settings: Settings, name: str) -> Any:
    """The value of a row; None for the rows of a nested struct that the settings do not have.

    The targets of LoRA are sorted: their order means nothing.
    """
    value: Any = settings
    for part in name.split("."):
        value = None if value is None else getattr(value, part)
    return tuple(sorted(set(value))) if name == "lora.targets" and value is not None else value


def row_of(key: str) -> str:
    """The row of a `--set` key: `lora.r` has its own row, `model.path` belongs to `model`."""
    return key if key in FIELDS else key.partition(".")[0]


def differing(before: Settings, after: Settings) -> list[str]:
    """The rows whose values differ, in the order of the table."""
    return [name for name in FIELDS if value_of(before, name) != value_of(after, name)]


def not_live(settings: Settings, names: Iterable[str]) -> list[str]:
    """Those of `names` that the program with these settings cannot change while it runs."""
    allowed = ("always",) if settings.zero.stage else ("always", "without ZeRO")
    return [name for name in names if FIELDS[name].live not in allowed]


def can_change_live(before: Settings, after: Settings) -> bool:
    """Whether a program with `before` can take up `after` while it runs."""
    return not not_live(before, differing(before, after))


def training_unchanged(before: Settings, after: Settings) -> bool:
    """Whether every update stays what it was, up to rounding."""
    names = differing(before, after)
    return before.effective_batch == after.effective_batch and not any(FIELDS[name].changes_training for name in names)


def memory_shape(settings: Settings, *shapes: Memory) -> dict[str, Any]:
    """The values that shape these kinds of memory; `eval_batch` counts only if the run
    evaluates.
    """
    values = {name: value_of(settings, name) for name, field in FIELDS.items() if field.shapes in shapes}
    if "rank_splits" in values:
        # How large the accumulation is shapes no memory.
        values["rank_splits"] = [batch for batch, _ in settings.rank_splits]
    if "eval_batch" in values and not settings.eval_every:
        values["eval_batch"] = 0
    return values


def saves_memory(after: Settings, before: Settings, *, much: bool = False) -> bool:
    """Whether a setting of `after` asks for less memory than in `before`.

    `much`: look only at the settings that save enough to make up for a larger micro-batch.
    """
    return any(
        field.saves(value_of(after, name), value_of(before, name))
        for name, field in FIELDS.items()
        if field.saves is not None and (field.saves_much or not much)
    )
