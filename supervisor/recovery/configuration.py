"""The configuration that a remedy or a change leads to, which configurations have failed before,
and how many parameters a configured model has. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.presets import SettingsError, edit_settings
from memtop.presets.fields import LIVE, differing, memory_shape, not_live
from memtop.presets.schema import Lora, Settings
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.errors import UsageError
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import Change, Checkpoint, Configuration


def change_for(remedy: Remedy, *, reason: str = "") -> Change:
    """The edit of a restart (or a live edit) that applies the remedy. Empty if the remedy is only a
    command to copy."""
    return Change(preset=remedy.preset, assignments=dict(remedy.assignments), reason=reason)


def changes_nothing(remedy: Remedy) -> bool:
    """Whether no edit of the run applies the remedy: it is something for a person to do."""
    return not remedy.assignments and remedy.preset is None


def applied(settings: Settings, remedy: Remedy) -> Settings:
    """The settings after the remedy. Raises SettingsError if they are invalid."""
    return edit_settings(settings, preset=remedy.preset, assignments=dict(remedy.assignments))


def configuration_key(settings: Settings) -> str:
    """A key of all settings that shape memory or disk use. Two settings with one key count as the
    same configuration, which is never tried again once it has failed."""
    values = memory_shape(settings, "peak", "host", "disk")
    if settings.eval_every:
        values["eval_batch"] = settings.eval_batch or settings.batch
    return _digest(values, 12)


def settings_key(settings: Settings, *, on_gpu: bool | None = None) -> str:
    """A key of all settings that shape the peak, except the micro-batch: only peaks with one key
    lie on one line.

    `on_gpu`: whether the peak is of GPU memory; None: as the settings' device says. In host memory,
    loader workers count.
    """
    on_gpu = settings.device != "cpu" if on_gpu is None else on_gpu
    values = memory_shape(settings, "peak") if on_gpu else memory_shape(settings, "peak", "host")
    del values["batch"]
    # A sharded state depends on the number of processes; communication buffers only on whether
    # there are several.
    values["processes"] = settings.world_size if settings.zero.stage else min(2, settings.world_size)
    words = [f"T {settings.seq_len}", settings.precision, settings.method, str(settings.zero), settings.optimizer]
    if settings.gradient_checkpointing:
        words.append("checkpointing")
    return f"{', '.join(words)} #{_digest(values, 6)}"


def _digest(values: dict[str, Any], size: int) -> str:
    return hashlib.blake2b(msgspec.json.encode(values, order="deterministic"), digest_size=size).hexdigest()


# If other processes held the GPU, or /dev/shm was full, the settings were not the cause.
_NOT_BY_SETTINGS = (Kind.NOT_MEMORY, Kind.DISK_FULL, Kind.SHM_EXHAUSTED, Kind.GPU_OOM_OTHER_PROCESS)
_OUT_OF_MEMORY = frozenset(kind.value for kind in Kind if kind not in _NOT_BY_SETTINGS)


def failed_settings(rows: Iterable[Configuration]) -> tuple[Settings, ...]:
    """The settings that ran out of memory (the run ended, or went on with smaller ones), oldest
    first."""
    return tuple(row.settings for row in rows if row.settings is not None and row.outcome in _OUT_OF_MEMORY)


Config = Mapping[str, Any]

TRAINED_BYTES = 16
"""Bytes of one trained parameter in fp32 with Adam: weight 4, gradient 4, two moments 8. An offload
needs the same amount of host memory."""
MOMENT_BYTES = 8
"""Of these, the bytes that certainly leave the GPU with an offload."""


def model_parameters(config: Config) -> int | None:
    """All parameters of a model with this Hugging Face configuration; None for unknown families."""
    count = _FAMILIES.get(str(config.get("model_type")))
    try:
        return None if count is None else count(config)
    except KeyError:
        return None


def trained_parameters(settings: Settings, config: Config | None = None) -> int | None:
    """The parameters that the run trains: all, or the adapters'; None if not known.

    `config`: the model's configuration, if the settings name the model only by path.
    """
    known = config if config is not None else settings.model.get("config")
    if not known:
        return None
    return model_parameters(known) if settings.lora is None else adapter_parameters(known, settings.lora)


def adapter_parameters(config: Config, lora: Lora) -> int | None:
    """r x (inputs + outputs), summed over all layers with an adapter; None for unknown families or
    targets."""
    if config.get("model_type") not in _LLAMA_LIKE:
        return None
    shapes = _llama_shapes(config)
    targets = tuple(shapes) if lora.targets == ("all-linear",) else lora.targets
    if not all(target in shapes for target in targets):
        return None
    return int(config["num_hidden_layers"]) * sum(lora.r * sum(shapes[target]) for target in targets)


def smaller_model(config: Config) -> dict[str, int] | None:
    """The values for a model of about a quarter of the size; None if the family is not known.

    Width and number of heads are halved, so that heads x head width is still the model's width. For
    T5, the encoder also keeps only 4 of 10 layers; the decoder keeps all.
    """
    halves = {
        "t5": ("d_model", "d_ff", "num_heads"),
        **dict.fromkeys(_LLAMA_LIKE, ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")),
    }.get(str(config.get("model_type")), ())
    values = {name: config[name] for name in halves if name in config}
    if not values or any(not isinstance(value, int) or value < 2 or value % 2 for value in values.values()):
        return None
    smaller = {name: value // 2 for name, value in values.items()}
    layers = config.get("num_layers")
    if config.get("model_type") == "t5" and isinstance(layers, int) and layers > 1:
        smaller["num_layers"] = max(1, layers * 2 // 5)
        if "num_decoder_layers" not in config:
            # The default of num_decoder_layers is num_layers.
            smaller["num_decoder_layers"] = layers
    return smaller


def _t5(config: Config) -> int | None:
    if not config.get("tie_word_embeddings", True):
        # Whether the head then has separate weights depends on the version of transformers.
        return None
    width, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    attention = 4 * width * inner + width
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    forward = (3 if gated else 2) * width * config["d_ff"] + width
    buckets = config.get("relative_attention_num_buckets", 32) * config["num_heads"]
    encoder = config["num_layers"] * (attention + forward) + buckets + width
    decoder = config.get("num_decoder_layers", config["num_layers"]) * (2 * attention + forward) + buckets + width
    return int(config["vocab_size"] * width + encoder + decoder)


_LLAMA_LIKE = ("llama", "mistral", "qwen2")


def _llama_shapes(config: Config) -> dict[str, tuple[int, int]]:
    """Linear layer name to its numbers of inputs and outputs."""
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    keys = (config.get("num_key_value_heads") or heads) * head
    return {
        "q_proj": (width, heads * head),
        "k_proj": (width, keys),
        "v_proj": (width, keys),
        "o_proj": (heads * head, width),
        "gate_proj": (width, inner),
        "up_proj": (width, inner),
        "down_proj": (inner, width),
    }


def _llama(config: Config) -> int:
    shapes, width = _llama_shapes(config), config["hidden_size"]
    layer = sum(inputs * outputs for inputs, outputs in shapes.values()) + 2 * width
    if config["model_type"] == "qwen2":
        layer += sum(shapes[name][1] for name in ("q_proj", "k_proj", "v_proj"))
    embeddings = config["vocab_size"] * width * (1 if config.get("tie_word_embeddings", False) else 2)
    return int(embeddings + config["num_hidden_layers"] * layer + width)


_FAMILIES: dict[str, Callable[[Config], int | None]] = {"t5": _t5, **dict.fromkeys(_LLAMA_LIKE, _llama)}


def edited(
    settings: Settings | None, change: Change, checkpoint: Checkpoint | None, rows: Sequence[Configuration] = ()
) -> Settings | None:
    """The settings that a change gives, counted from that checkpoint if it is complete; UsageError
    if it cannot be.

    `rows`: the run's configurations, to one of which the change may go back.
    """
    if settings is None:
        if replace(change, assignments={}, reason="") != Change() or set(change.assignments) - {"allocator"}:
            raise UsageError("this run's program is your own: its settings are not memtop's to change (but for allocator)")
        return None
    done = checkpoint if checkpoint is not None and checkpoint.complete else None
    try:
        return edit_settings(
            _base(settings, change.configuration, rows),
            preset=change.preset,
            max_updates=change.max_updates,
            assignments=change.assignments,
            updates_done=(done.updates or 0) if done else 0,
            samples_seen=(done.samples_seen or 0) if done else 0,
            failed=failed_settings(rows),
        )
    except SettingsError as error:
        raise UsageError(str(error)) from None


def _base(settings: Settings, number: int | None, rows: Sequence[Configuration]) -> Settings:
    """What is edited: the present settings, or those of an earlier configuration with the run's
    present length.
    """
    if number is None:
        return settings
    earlier = next((row.settings for row in rows if row.number == number), None)
    if earlier is None:
        there = f"there are 1 to {rows[-1].number}" if rows else "there is none yet"
        raise UsageError(f"configuration {number}: this run has no such configuration; {there}")
    return replace(earlier, target_samples=settings.target_samples, epochs=settings.epochs)


_SPLIT = ("batch", "accumulation")


def live_values(before: Settings | None, after: Settings | None, also: Collection[str] = ()) -> dict[str, object]:
    """The values that the running program must set; UsageError, with the reason, if the change
    takes a restart.

    Batch and accumulation are always set together: the program may have changed its split itself.
    `also`: fields that are set even if `before` and `after` have the same value.
    """
    if before is None or after is None:
        raise UsageError("this program is your own: it cannot change while it runs; restart it")
    fields = differing(before, after)
    if fixed := not_live(before, fields):
        why = "cannot change while the program runs"
        if before.zero.stage and set(fixed) <= set(LIVE):
            why = f"cannot change while {before.zero} runs, whose engine is built for one split"
        raise UsageError(f"{', '.join(fixed)}: {why}; restart it instead")
    if fields:
        fields += [name for name in also if name in LIVE and name not in fields]
    if set(_SPLIT) & set(fields):
        fields = [*_SPLIT, *(name for name in fields if name not in _SPLIT)]
    return {name: getattr(after, name) for name in fields}
