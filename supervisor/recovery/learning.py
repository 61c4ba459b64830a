"""The last rungs, never taken without consent: they change what is learnt. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from memtop.supervisor import units
from memtop.supervisor.monitor.bands import EDGE_FROM
from memtop.supervisor.recovery.forecast import Line
from memtop.supervisor.recovery.parameters import TRAINED_BYTES, adapter_parameters, model_parameters, smaller_model
from memtop.supervisor.recovery.situation import Situation, to_do, train_command
from memtop.supervisor.recovery.values import Remedy

LENGTHS = (8192, 4096, 3072, 2048, 1536, 1024, 768, 512, 384, 256, 192, 128, 64)
"""Usual sequence lengths. From above 512 none below is offered first: shorter samples lose more and more of the text."""


def learning_rungs(situation: Situation) -> Iterator[Remedy | str]:
    yield shorter(situation)
    if situation.settings.lora is not None:
        yield smaller_rank(situation)
    yield other_model(situation)


def shorter(situation: Situation) -> Remedy | str:
    """The next usual length, or the first below it that is forecast to fit; at least 512 while T is longer than that."""
    now = situation.settings.seq_len
    least = 512 if now > 512 else 1
    lengths = [length for length in LENGTHS if least <= length < now]
    if not lengths:
        return f"sequence length: {now} is the shortest usual one"
    length = next((one for one in lengths if _fits(situation, one)), lengths[0])
    return situation.rung(
        "seq_len",
        "shorter samples: less of everything that grows with T, but other data (text beyond it is cut off or moves)",
        {"seq_len": str(length)},
        title=f"sequence length {now} -> {length}: the data are cut otherwise",
        estimate=_at_length(situation, length),
    )


def _at_length(situation: Situation, length: int) -> Line | None:
    """Activations and logits grow at least in proportion to T: the proportional line is on the safe side."""
    line, now = situation.line(), situation.settings.seq_len
    if isinstance(line, str):
        return None
    return line.with_activations(length / now, f"what grows with the batch shrinks at least with T, {now} -> {length}")


def _fits(situation: Situation, length: int) -> bool:
    found = situation.foresee(replace(situation.settings, seq_len=length), _at_length(situation, length))
    return not isinstance(found, str) and found.fraction is not None and found.fraction < EDGE_FROM


def smaller_rank(situation: Situation) -> Remedy | str:
    """Half the rank with alpha / r as it is, since that is the adapters' scale."""
    lora = situation.settings.lora
    assert lora is not None
    r = lora.r // 2
    if r < 1 or lora.r % 2 or lora.alpha % 2:
        return f"LoRA r {lora.r}: cannot be halved with alpha / r held ({lora.alpha} / {lora.r})"
    saved = _adapter_bytes(situation, r)
    return situation.rung(
        "lora_rank",
        f"smaller adapters{saved}; other shapes, so a new run: what was trained does not fit",
        {"lora.r": str(r), "lora.alpha": str(lora.alpha // 2)},
        title=f"LoRA r {lora.r} -> {r}, alpha {lora.alpha} -> {lora.alpha // 2}: a new run",
    )


def _adapter_bytes(situation: Situation, r: int) -> str:
    settings = situation.settings
    config = situation.model_config or settings.model.get("config")
    if not config or settings.lora is None:
        return ""
    now, then = (adapter_parameters(config, lora) for lora in (settings.lora, replace(settings.lora, r=r)))
    if now is None or then is None:
        return ""
    return (
        f": {now / 1e6:.1f} -> {then / 1e6:.1f} M parameters, {units.size(TRAINED_BYTES * (now - then))} less with Adam in fp32"
    )


def other_model(situation: Situation) -> Remedy | str:
    """A smaller model: by its configuration where that is drawn, by another path where it is read."""
    settings = situation.settings
    config: Mapping[str, Any] | None = settings.model.get("config")
    values = None if config is None else smaller_model(config)
    if config is None or values is None:
        command = train_command(replace(settings, model={}), {"model.path": "SMALLER_MODEL"})
        other = to_do("smaller_model", "a smaller model: a new run", _OTHER, command, keeps_math=False)
        return replace(other, resumable="new run", forecast_unknown="another model: nothing was measured of it")
    return situation.rung(
        "smaller_model",
        f"{model_words(config, values)}; a new run",
        {f"model.config.{name}": str(value) for name, value in values.items()},
        title=f"a smaller model ({', '.join(f'{name} {value}' for name, value in values.items())}): a new run",
    )


_OTHER = "for example 0.5 B parameters instead of 1.8 B; give its folder or hub name"


def model_words(config: Mapping[str, Any], values: Mapping[str, int]) -> str:
    """`196.6 -> 46.4 M parameters: 2.2 GiB less with Adam in fp32`."""
    now, then = model_parameters(config), model_parameters({**config, **values})
    if now is None or then is None:
        return "fewer parameters"
    saved = units.size(TRAINED_BYTES * (now - then))
    return f"{now / 1e6:.1f} -> {then / 1e6:.1f} M parameters: {saved} less for weights, gradients and Adam in fp32"
