"""Refuses settings that cannot work: one line with the field, the value and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from memtop.presets.fields import FIELDS, MOST_SAMPLES, OTHER_NAMES, value_of
from memtop.presets.parameters import as_stored, language_part, linear_layers, stored_config, too_large
from memtop.presets.schema import TRACKERS, Lora, Preset, Sampling, Settings


class SettingsError(ValueError):
    """A value that cannot be used. `str()` gives one line: the field, the value and what to do."""

    def __init__(self, field: str, value: object, message: str) -> None:
        super().__init__(f"{field} {value}: {message}")
        self.field = field
        self.value = value
        self.message = message


_SIMILAR = 0.6


def did_you_mean(name: str, known: Iterable[str], similarity: float = _SIMILAR) -> str:
    """`; did you mean batch?`, or an empty text if no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)
    return f"; did you mean {near[0]}?" if near else ""


_AT_FIRST = {"model": "model.path", "data": "data.train"}
"""What is mostly meant by settings with parts."""


def setting_meant(key: str, names: Iterable[str]) -> str:
    """`; did you mean learning_rate?` for `lr`, for other usual names, and for what is misspelt.

    `names`: what `--set` takes.
    """
    known = {**OTHER_NAMES, **{name: name for name in names}}
    near = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1, cutoff=_SIMILAR)
    if not near:
        return ""
    name = known[near[0]]
    field = FIELDS.get(name)
    if field is not None and not field.editable:
        name = field.option
    return f"; did you mean {_AT_FIRST.get(name, name)}?"


def preset_meant(name: str, presets: Mapping[str, Preset]) -> str:
    """The presets of a ZeRO stage for `stage2`, or the one with a similar name; empty if there is
    none."""
    stage = re.fullmatch(r"(?:zero|stage)[-_ ]?([0-3])", name.lower())
    if stage is None:
        return did_you_mean(name, presets)
    same = [one.name for one in presets.values() if one.zero is not None and one.zero.stage == int(stage[1])]
    return f"; with ZeRO stage {stage[1]}: {', '.join(same)}" if same else ""


def wanted(kind: Any, text: str, choices: Sequence[str], error: str) -> str:
    """What a value of this type must be. An error that names more than the type stays."""
    if choices:
        return f"there are {', '.join(choices)}{did_you_mean(text, choices)}"
    kinds = {kind, *get_args(kind)}
    words = ((int, "must be a whole number"), (float, "must be a number"), (bool, "must be true or false"))
    fitting = [said for one, said in words if one in kinds]
    return fitting[0] if fitting and re.fullmatch(r"Expected `[\w |]+`, got `\w+`", error) else error


def unknown_key(meant: str, listed: str) -> str:
    """`meant`: `; did you mean batch?`, or empty."""
    return f"unknown key{meant} There are {listed}" if meant else f"unknown key; there are {listed}"


def check(settings: Settings) -> Settings:
    """Return the settings unchanged. Raise a SettingsError for the first value that cannot work."""
    _check_counts(settings)
    _check_rank_splits(settings)
    _check_shares(settings)
    _check_method(settings)
    _check_memory_strategy(settings)
    _check_sampling(settings.sample)
    _check_left_out(settings.leave_out)
    for name in settings.trackers:
        if name not in TRACKERS:
            raise SettingsError("trackers", name, f"unknown; choose from {', '.join(TRACKERS)}")
    if settings.python and not settings.python.startswith("/"):
        raise SettingsError("python", settings.python, "give its whole path, which begins with /")
    check_model(settings, stored_config(settings) or {}, is_new="config" in settings.model)
    return settings


TABLES = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "biogpt"), 1024),
    **dict.fromkeys(("gptj", "codegen", "gpt_neo", "opt"), 2048),
    "openai-gpt": 512,
    "ctrl": 256,
}
"""Architectures that look positions up in a table, so that they fail beyond its end, and how long
it is if the configuration does not say."""


ENCODER_DECODERS = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "t5gemma", "m2m_100", "fsmt", "led", "pegasus_x")
"""Architectures with an encoder and a decoder, of which transformers has no causal model."""
DECODERS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "gpt2", "mixtral", "qwen3_moe")
"""Architectures of which transformers has no model with an encoder."""


def check_model(settings: Settings, config: Mapping[str, Any], *, is_new: bool = False) -> None:
    """Check the model's architecture, its values and the sequence length; SettingsError if no such
    model can train.

    `is_new`: the weights are new, and the configuration limits the length. Otherwise only a table
    of positions does, and only in the task `causal`, where each sample has T tokens. In other
    tasks all samples may be shorter.
    """
    if (large := too_large(config)) is not None:
        name, value, most = large
        check_bounds(f"model.config.{name}", value, 1, most)
    part = language_part(config)
    kind, longest, theta = str(part.get("model_type")), _positions(config), part.get("rope_theta")
    _check_task(settings, kind)
    if kind in DECODERS and kind not in TABLES and theta is not None and (type(theta) not in (int, float) or not theta > 0):
        raise SettingsError("model.config.rope_theta", as_stored(theta), "must be a number above 0")
    names, missing = linear_layers(part) or (), _missing_targets(settings, part)
    if settings.lora is not None and missing and len(missing) == len(settings.lora.targets):
        usual = f"; peft's own default is {_OF_PEFT[kind]}" if kind in _OF_PEFT else ""
        why = f"{kind} has no such layers; all of its own: --set lora.targets={','.join(names)}{usual}"
        raise SettingsError("lora.targets", ", ".join(missing), why)
    fails = is_new or (kind in TABLES and settings.task == "causal")
    if fails and longest is not None and settings.seq_len > longest:
        raise SettingsError("seq_len", settings.seq_len, f"beyond the model's {longest} positions; give at most {longest}")


def _check_task(settings: Settings, kind: str) -> None:
    if settings.task == "seq2seq" and kind in DECODERS:
        why = "transformers has no model of this kind with an encoder and a decoder, as seq2seq needs"
        raise SettingsError("model_type", kind, why)
    if settings.task != "seq2seq" and kind in ENCODER_DECODERS:
        why = "it has an encoder and a decoder, and this recipe trains causal language models; take recipe pretrain-t5"
        raise SettingsError("model_type", kind, why)


_OF_PEFT = {"gpt2": "c_attn"}
"""The targets that peft takes if none are given, of architectures whose layers have other names
than those of Llama."""
_OUTER = ("lm_head", "embed_tokens", "shared", "wte", "wpe", "relative_attention_bias", "gate", "q_attn")
"""Others that can have an adapter, in some versions of transformers."""


def _missing_targets(settings: Settings, config: Mapping[str, Any]) -> list[str]:
    """The targets of LoRA that name no layer of the model, as far as that is known."""
    names, lora = linear_layers(config), settings.lora
    if names is None or lora is None or lora.targets == ("all-linear",):
        return []
    return [target for target in lora.targets if target.rpartition(".")[2] not in (*names, *_OUTER)]


def without_adapters(settings: Settings) -> str | None:
    """That some targets of LoRA name no layer of the model, and which layers it has; None if all
    do, or if that is not known."""
    config = language_part(stored_config(settings) or {})
    missing, names = _missing_targets(settings, config), linear_layers(config) or ()
    if settings.lora is None or not missing:
        return None
    there = ", ".join(target for target in settings.lora.targets if target not in missing)
    return (
        f"{config['model_type']} has no layers {', '.join(missing)}: adapters are only at {there}; "
        f"all of its linear layers: lora.targets={','.join(names)}"
    )


def longer_than_known(settings: Settings) -> str | None:
    """The warning that samples may be longer than the model is made for; None if T is not."""
    longest = _positions(stored_config(settings) or {})
    if longest is None or settings.seq_len <= longest:
        return None
    return (
        f"T {settings.seq_len} is longer than the {longest} tokens that the model is made for: "
        "longer samples may fail, or train it badly"
    )


def _positions(config: Mapping[str, Any]) -> int | None:
    """The longest sequence that the model is made for, in tokens; None if its configuration does
    not say."""
    config = language_part(config)
    kind = str(config.get("model_type"))
    # T5 has no use for its n_positions.
    names = ("n_positions", "max_position_embeddings") if kind in TABLES else ("max_position_embeddings",)
    known = (value for name in names if type(value := config.get(name)) is int and value > 0)
    return next(known, TABLES.get(kind))


_EFFECTIVE = 1 << 24
_MOST_BYTES = 1 << 53
_MOST_TOKENS = (1 << 31) - 1
_MOST_EPOCHS = 1_000_000
_HOTTEST = 100.0


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
        check_bounds("batch", batch, 1, MOST_SAMPLES)
        check_bounds("accumulation", accumulation, 1, MOST_SAMPLES)


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
        raise SettingsError("lora.dropout", lora.dropout, "must be 0 or more and below 1")
    if not lora.targets or not all(lora.targets):
        raise SettingsError("lora.targets", repr(",".join(lora.targets)), "name the layers, or all-linear")


def _check_sampling(sample: Sampling) -> None:
    if not 0 <= sample.temperature <= _HOTTEST:
        raise SettingsError("sample.temperature", sample.temperature, f"must lie between 0 and {_HOTTEST}")
    if sample.every and not sample.prompts:
        raise SettingsError("sample.every", sample.every, "there are no prompts; add --set sample.prompts=FILE")
    if sample.prompts and not sample.every:
        raise SettingsError("sample.prompts", sample.prompts, "nothing is sampled; add --set sample.every=N")


def _check_left_out(ranges: Sequence[tuple[int, int]]) -> None:
    before = 0
    for first, end in ranges:
        text = f"{first}-{end}"
        check_bounds("leave_out", end, 1, _MOST_BYTES)
        if not before <= first < end:
            raise SettingsError("leave_out", text, "must begin before it ends, and not overlap with another; write FIRST-END")
        before = end


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


def wrong_value(config: Mapping[str, Any]) -> str | None:
    """Why no model works with this configuration, as one line; None if that is not known."""
    # Most commands do without them.
    from memtop.presets.architectures import shape_of
    from memtop.presets.states import UnknownMemoryError, WrongValueError

    try:
        shape = shape_of(config)
    except WrongValueError as error:
        return str(error)
    except UnknownMemoryError:
        return None
    places = (config, config.get("rope_parameters"), config.get("rope_scaling"))
    rotates_part = any(isinstance(place, Mapping) and "partial_rotary_factor" in place for place in places)
    # Positions rotate pairs of numbers. torch repeats the number of a head of width 1.
    rotates_all = not (shape.positions or shape.buckets or shape.kind == "phi3" or rotates_part)
    if rotates_all and shape.width % 2 and shape.width > 1:
        return f"model.config.head_dim {shape.width}: must be even; without it, it is hidden_size / num_attention_heads"
    return None
