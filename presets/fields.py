"""The table of settings: what each field of `Settings` means for a run, for its memory and for
people.

Fields of nested structs have rows of their own with dotted names (`lora.r`, `zero.stage`). Every
other module asks this table which settings may change in a running program, which make another run,
which change training and which shape memory. `check` refuses settings that cannot work; the
error is one line that names the field and the value.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import msgspec

from memtop.presets.schema import HostLevel, Lora, Settings

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
_SAMPLES = 1 << 20
_COUNT = (1 << 31) - 1
_TOTAL = 1 << 53
_WIDEST_ADAPTER = 1 << 16
MOST_UPDATES = _COUNT

FIELDS: dict[str, Field] = {
    "recipe": Field(label="recipe", editable=False),
    "preset": Field(label="preset", editable=False),
    "batch": Field(
        label="batch",
        unit="samples per micro-batch and process",
        option="--batch",
        live="without ZeRO",
        shapes="peak",
        bounds=(1, _SAMPLES),
    ),
    "accumulation": Field(
        label="accumulation",
        unit="micro-batches per update",
        option="--accum",
        live="without ZeRO",
        bounds=(1, _SAMPLES),
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
    "gpus": Field(label="GPUs", option="--gpus", editable=False, saves=_differs),
    "zero.stage": Field(label="ZeRO stage", shapes="peak", saves=_more, saves_much=True),
    "zero.offload_optimizer": Field(label="optimizer offload", shapes="peak", saves=_on, saves_much=True),
    "zero.offload_parameters": Field(label="parameter offload", shapes="peak", saves=_on, saves_much=True),
    "gradient_checkpointing": Field(
        label="checkpointing",
        live="without ZeRO",
        shapes="peak",
        saves=_on,
        saves_much=True,
    ),
    "workers": Field(
        label="workers",
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
    "optimizer": Field(label="optimizer", shapes="peak", saves=_differs_from("adamw"), saves_much=True),
    "loss_chunk": Field(
        label="loss_chunk",
        unit="tokens at one time",
        shapes="peak",
        saves=_differs_from(0),
        saves_much=True,
    ),
    "packing": Field(label="packing", shapes="peak", saves=_on),
    "compile": Field(label="torch.compile", shapes="peak"),
    "bf16_residual": Field(label="bf16 residual stream", shapes="peak", saves=_on),
    "device": Field(label="device", shapes="peak"),
    "seq_len": Field(
        label="T",
        unit="tokens per sample",
        option="--seq-len",
        changes_training=True,
        shapes="peak",
        saves=_less,
        saves_much=True,
        bounds=(1, 1 << 24),
    ),
    "learning_rate": Field(label="learning rate", unit="per update", changes_training=True),
    "epochs": Field(label="epochs", unit="passes over the data", changes_training=True),
    "target_samples": Field(label="length", unit="samples", editable=False, changes_training=True, bounds=(0, _TOTAL)),
    "precision": Field(label="precision", changes_training=True, shapes="peak"),
    "warmup_samples": Field(label="warm-up", unit="samples", changes_training=True, bounds=(0, _TOTAL)),
    "warmup_fraction": Field(label="warm-up share", changes_training=True),
    "final_learning_rate_fraction": Field(label="last share of the learning rate", changes_training=True),
    "weight_decay": Field(label="weight decay", changes_training=True),
    "clip_norm": Field(label="clip norm", changes_training=True),
    "method": Field(label="method", new_run="other weights are trained", changes_training=True, shapes="peak"),
    "task": Field(label="task", new_run="the training of another task", changes_training=True, shapes="peak"),
    "lora.r": Field(
        label="LoRA r",
        new_run="adapters of another shape",
        changes_training=True,
        shapes="peak",
        saves=_differs,
        saves_much=True,
        bounds=(1, _WIDEST_ADAPTER),
    ),
    "lora.alpha": Field(
        label="LoRA alpha",
        new_run="the scale alpha / r of the adapters jumps",
        changes_training=True,
        bounds=(1, _WIDEST_ADAPTER),
    ),
    "lora.dropout": Field(label="LoRA dropout", changes_training=True, shapes="peak", saves=_differs),
    "lora.targets": Field(
        label="LoRA targets",
        new_run="other layers have adapters",
        changes_training=True,
        shapes="peak",
        saves=_differs,
        saves_much=True,
    ),
    "model": Field(
        label="model",
        new_run="another model: its state does not fit",
        changes_training=True,
        shapes="peak",
        saves=_differs,
        saves_much=True,
    ),
    "data": Field(
        label="data",
        new_run="other data: the position in it means nothing there",
        changes_training=True,
        shapes="peak",
    ),
    "seed": Field(label="seed", new_run="another order of the samples", changes_training=True, bounds=(0, _COUNT)),
    "save_every": Field(label="save_every", unit="updates", bounds=(1, _COUNT)),
    # An evaluation with the training's own batch adds nothing to the peak.
    "eval_every": Field(label="eval_every", unit="updates", saves=_differs, bounds=(0, _COUNT)),
    "eval_batch": Field(
        label="eval_batch",
        unit="samples per micro-batch and process",
        live="always",
        shapes="peak",
        saves=_differs,
        bounds=(0, _SAMPLES),
    ),
    "save_total_limit": Field(label="save_total_limit", unit="states", shapes="disk", bounds=(1, _COUNT)),
    "load_best_at_end": Field(label="load_best_at_end"),
    "log_every": Field(label="log_every", unit="updates", bounds=(1, _COUNT)),
    "trackers": Field(label="trackers"),
}

LIVE = tuple(name for name, field in FIELDS.items() if field.live != "no")
"""Settings that the built-in trainer can change at an update boundary."""
SPLIT = ("batch", "accumulation", "rank_splits")
"""The settings that say how the samples of an update are split."""
OPTIONS = {name: field.option for name, field in FIELDS.items() if field.option}


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
        # Accumulation shapes no memory.
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


class SettingsError(ValueError):
    """A value that cannot be used. `str()` gives one line: the field, the value and what to do."""

    def __init__(self, field: str, value: object, message: str) -> None:
        super().__init__(f"{field} {value}: {message}")
        self.field = field
        self.value = value
        self.message = message


def did_you_mean(name: str, known: Iterable[str], similarity: float = 0.6) -> str:
    """` (did you mean batch?)`, or an empty text if no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)
    return f" (did you mean {near[0]}?)" if near else ""


def check(settings: Settings) -> Settings:
    """Return the settings unchanged. Raise a SettingsError for the first value that cannot work."""
    _check_counts(settings)
    _check_rank_splits(settings)
    _check_shares(settings)
    _check_method(settings)
    _check_memory_strategy(settings)
    longest = max_seq_len(settings)
    if longest is not None and settings.seq_len > longest:
        raise SettingsError("seq_len", settings.seq_len, f"beyond the model's {longest} positions; give at most {longest}")
    return settings


def max_seq_len(settings: Settings) -> int | None:
    """The longest sequence that the model's configuration allows, in tokens; None if it sets no
    limit."""
    config = settings.model.get("config", {})
    value = config.get("max_position_embeddings") or config.get("n_positions")
    return value if isinstance(value, int) else None


_EFFECTIVE = 1 << 24
_MOST_BYTES = 1 << 53
_MOST_TOKENS = (1 << 31) - 1
_MOST_EPOCHS = 1_000_000


def check_bounds(field: str, value: int, least: int, most: int) -> None:
    """Raise a SettingsError for a value outside its bounds, both included."""
    if value < least:
        raise SettingsError(field, value, f"must be at least {least}" if least else "must be 0 or more")
    if value > most:
        raise SettingsError(field, value, f"must be at most {most}")


def _check_counts(settings: Settings) -> None:
    for name, field in FIELDS.items():
        if field.bounds is not None and (value := value_of(settings, name)) is not None:
            check_bounds(name, value, *field.bounds)
    if settings.effective_batch > _EFFECTIVE:
        raise SettingsError(
            "effective batch", settings.effective_batch, f"must be at most {_EFFECTIVE}; take a smaller --accum"
        )
    if settings.seq_len < 2:
        raise SettingsError("seq_len", settings.seq_len, "must be at least 2: a token is predicted from earlier ones")
    if isinstance(size := settings.data.get("max_bytes"), int):
        check_bounds("data.max_bytes", size, 1, _MOST_BYTES)
    if not 0 <= settings.epochs <= _MOST_EPOCHS:
        raise SettingsError("epochs", settings.epochs, f"must lie between 0 and {_MOST_EPOCHS}")
    if not settings.target_samples and not settings.epochs:
        raise SettingsError("epochs", 0, "the run has no end; give --max-updates N or --set epochs=E")
    if settings.load_best_at_end and not settings.eval_every:
        raise SettingsError("load_best_at_end", "true", "nothing is evaluated; add --set eval_every=N")
    if not -1 <= settings.loss_chunk <= _MOST_TOKENS:
        raise SettingsError(
            "loss_chunk",
            settings.loss_chunk,
            f"must be a number of tokens up to {_MOST_TOKENS}, 0 (all at once) or -1 (chosen)",
        )


def check_one_for_each(text: str, sizes: int, processes: int) -> None:
    """SettingsError if this batch, with one size for each process, does not fit the processes."""
    if sizes != processes:
        has = "1 process" if processes == 1 else f"{processes} processes"
        gives = "1 size" if sizes == 1 else f"{sizes} sizes"
        raise SettingsError("batch", text, f"gives {gives}, the run has {has}; give one for each, or one for all")


def _check_rank_splits(settings: Settings) -> None:
    splits = settings.rank_splits
    if not splits:
        return
    text = settings.batch_text
    check_one_for_each(text, len(splits), settings.world_size)
    if settings.zero.stage:
        why = "needs the same micro-batch and as many of them on all processes; give one size, or --preset standard"
        raise SettingsError("batch", text, f"{settings.zero} {why}")
    for batch, accumulation in splits:
        check_bounds("batch", batch, 1, _SAMPLES)
        check_bounds("accumulation", accumulation, 1, _SAMPLES)


def _check_shares(settings: Settings) -> None:
    if not 0 < settings.learning_rate < 10:
        raise SettingsError("learning_rate", settings.learning_rate, "must lie between 0 and 10")
    for field in ("warmup_fraction", "final_learning_rate_fraction"):
        value = getattr(settings, field)
        if not 0 <= value <= 1:
            raise SettingsError(field, value, "must lie between 0 and 1")
    for field in ("weight_decay", "clip_norm"):
        value = getattr(settings, field)
        if not 0 <= value < float("inf"):
            raise SettingsError(field, value, "must be 0 or more")


def _check_method(settings: Settings) -> None:
    if settings.lora is None:
        if settings.method != "full":
            hint = "--set lora.r=16 --set lora.alpha=32"
            raise SettingsError("method", settings.method, f"no adapters are described; add {hint}")
        return
    if settings.method == "full":
        raise SettingsError("lora.r", settings.lora.r, "method full trains no adapters; add --set method=lora")
    _check_lora(settings.lora)


def _check_lora(lora: Lora) -> None:
    if not 0 <= lora.dropout < 1:
        raise SettingsError("lora.dropout", lora.dropout, "must be at least 0 and below 1")
    if not lora.targets or not all(lora.targets):
        raise SettingsError("lora.targets", repr(",".join(lora.targets)), "name the layers, or all-linear")


def _check_search(settings: Settings) -> None:
    if settings.zero.stage:
        raise SettingsError(
            "--batch", "auto", f"{settings.zero} cannot change its batch while it runs; give a number, or --preset standard"
        )
    if settings.device == "cpu":
        raise SettingsError("--batch", "auto", "the search is for GPUs; on the CPU give a number")


def _check_memory_strategy(settings: Settings) -> None:
    zero, optimizer = settings.zero, settings.optimizer
    if settings.auto_batch:
        _check_search(settings)
    if zero.offload_parameters and zero.stage != 3:
        raise SettingsError(
            "zero.offload_parameters", "true", f"needs stage 3, where parameters are sharded; the stage is {zero.stage}"
        )
    if zero.offload_optimizer and not zero.stage:
        raise SettingsError("zero.offload_optimizer", "true", "needs a ZeRO stage; add --set zero.stage=2")
    if settings.method == "qlora" and zero.stage == 3:
        raise SettingsError("zero.stage", 3, "a 4-bit base cannot be sharded; take stage 2 or a qlora preset")
    if zero.stage and optimizer in ("adafactor", "adamw_8bit", "paged_adamw_8bit"):
        raise SettingsError(
            "optimizer", optimizer, f"its state cannot be sharded by {zero}; take optimizer=adamw or zero.stage=0"
        )
    if optimizer == "cpu_adam" and not zero.offload_optimizer:
        raise SettingsError(
            "optimizer", optimizer, "needs its state in host memory: add --set zero.offload_optimizer=true (stages 1-3)"
        )
