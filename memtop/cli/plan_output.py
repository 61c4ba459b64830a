"""What `memtop plan` prints: as text and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.cells import cell_len

from memtop.cli.output import print_json, print_lines, row
from memtop.cli.plan_host import PlannedHost, share_text
from memtop.cli.plan_proposals import Instead, Largest, Proposal
from memtop.cli.wrapping import for_terminal, wraps_on_terminal
from memtop.presets import Settings
from memtop.presets.architectures import DEFAULTS, OTHER_NAMES
from memtop.presets.checks import without_adapters
from memtop.presets.comparison import Pace, speed_words
from memtop.presets.fields import OPTIONS
from memtop.presets.measured import Measured
from memtop.presets.parameters import model_size, stored_config
from memtop.supervisor import units
from memtop.supervisor.language import separator, tr
from memtop.supervisor.monitor.values import Band, band_of, mark
from memtop.supervisor.plan import Bound, Card, Need, PlannedPeak, Way, peak_of
from memtop.supervisor.profile.trainer_command import TrainerCommand


class PresetRow(NamedTuple):
    """What `--preset NAME` would give."""

    name: str
    settings: Settings | None
    """None: they are refused."""
    need: Need | Bound | None
    why: str
    """Why it is refused, or what it needs is not known; else empty."""
    pace: Pace | None = None
    """Compared with the settings that were asked for; None: they are refused."""


def document(
    settings: Settings,
    own: TrainerCommand | None,
    gpu: dict[str, Any],
    host: PlannedHost,
    best: Largest | None,
    found: Sequence[Proposal],
) -> dict[str, Any]:
    config, counted = stored_config(settings) or {}, model_size(settings)
    size, trained = (None, None) if counted is None else (counted.all, counted.trained)
    if counted is None and host.foreseen is not None:
        size, trained = host.foreseen.parameters, host.foreseen.trained
    return {
        "model": {
            "model_type": config.get("model_type"),
            "parameters": size,
            "trained_parameters": trained,
        },
        "settings": _settings_row(settings, own),
        "gpu": gpu,
        "host": host.row,
        "effective_batch": settings.effective_batch,
        "tokens_per_update": settings.tokens_per_update,
        "max_safe_batch": None if best is None else best.settings.batch,
        "max_safe_accumulation": None if best is None else best.settings.accumulation,
        "max_safe_options": None if best is None else best.options,
        "alternatives": [_way_row(one, own) for one in found],
    }


def _settings_row(settings: Settings, own: TrainerCommand | None) -> dict[str, Any]:
    """Of a program of the user's own, what is not known of it is None."""
    row: dict[str, Any] = msgspec.to_builtins(settings)
    if own is None:
        return row
    # Without an option for DeepSpeed, the Trainer has no ZeRO.
    known = {"model", "method", "world_size", "lora", "zero", *(("ddp",) if own.ddp else ()), *own.values}
    return {name: value if name in known else None for name, value in row.items()}


_DECISIVE = (
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "n_embd",
        "n_layer",
        "n_head",
    ),
    *("d_model", "d_ff", "d_kv", "num_layers", "num_heads"),
)


def of_model(settings: Settings, config: Mapping[str, Any], transformers: str) -> list[str]:
    """What is assumed of the model, or is not what one expects of it. `transformers`: the version
    that would train it; empty: not known."""
    found = left_out(config)
    if (words := without_adapters(settings)) is not None:
        found.append(words)
    kind, major = config.get("model_type"), transformers.partition(".")[0]
    if settings.method == "qlora" and kind in ONE_TENSOR and (not major.isdecimal() or int(major) >= _ONE_TENSOR_FROM):
        which = transformers or _ONE_TENSOR_FROM
        found.append(
            f"the experts of {kind} stay in 16 bits: transformers {which} keeps those of a layer in one tensor, "
            "which bitsandbytes does not quantize"
        )
    return found


ONE_TENSOR = ("mixtral", "qwen3_moe", "olmoe")
"""Architectures whose experts are one tensor for all of a layer, from this version of transformers
on."""
_ONE_TENSOR_FROM = 5


def left_out(config: Mapping[str, Any]) -> list[str]:
    """What is assumed of the values that decide how large a model is, if the configuration does not
    give them all."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        return []
    given = {OTHER_NAMES.get(kind, {}).get(name, name) for name in config}
    missing = [f"{name} {value}" for name, value in DEFAULTS[kind].items() if name in _DECISIVE and name not in given]
    listed = ", ".join(missing)
    return [f"what the model's configuration leaves out, as in transformers: {listed}"] if missing else []


def of_unknown_gpu(precision: str) -> list[str]:
    """What is assumed of a GPU that is not here: in fp32 all are the same."""
    if precision == "fp32":
        return []
    if precision == "fp16":
        return ["the GPU has flash attention, as those of compute capability 8.0 and above"]
    return ["the GPU has bf16 and flash attention, as those of compute capability 8.0 and above"]


def peak_row(peak: PlannedPeak) -> dict[str, Any]:
    return {
        "peak_bytes": peak.bytes,
        "least_bytes": peak.least,
        "most_bytes": peak.most,
        "fraction": peak.fraction,
        "band": peak.band.value,
        "basis": peak.basis,
        "calibrated": peak.calibrated,
    }


def measured_row(seen: Measured, settings: Settings, alone: Need, card: Card) -> dict[str, Any]:
    return {
        "run": seen.run,
        "is_whole": seen.is_whole_for(settings),
        "peak_bytes": seen.reserved_bytes + card.outside_bytes,
        "of_foreseen": seen.reserved_bytes / alone.reserved,
    }


def measured_text(seen: Measured | None, settings: Settings, alone: Need, card: Card) -> str | None:
    """What an earlier run with these settings has measured, and how far off the foresight is
    without it."""
    if seen is None:
        return None
    if not seen.is_whole_for(settings):
        size = units.size(seen.reserved_bytes + card.outside_bytes)
        return f"{size} in {Path(seen.run).name}, an earlier run with these settings; longer samples may need more"
    size, off = units.size(seen.reserved_bytes + card.outside_bytes), seen.reserved_bytes / alone.reserved - 1
    name, much = Path(seen.run).name, units.percent(abs(off))
    if off < 0:
        return f"{size} in {name}, an earlier run with these settings: {much} less than the {alone.basis} alone foresees"
    return f"{size} in {name}, an earlier run with these settings: {much} more than the {alone.basis} alone foresees"


def bound_row(bound: Bound, card: Card) -> dict[str, Any]:
    return {
        "peak_bytes": None,
        "least_bytes": bound.bytes,
        "most_bytes": None,
        "fraction": None,
        "band": (Band.DANGER if bound.is_too_much(card) else Band.UNKNOWN).value,
        "basis": "bound",
        "fits": False if bound.is_too_much(card) else None,
        "components": dict(bound.components),
        "counted": bound.counted,
    }


def _strategy_row(settings: Settings) -> dict[str, Any]:
    return {
        "method": settings.method,
        "lora_r": None if settings.lora is None else settings.lora.r,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "zero": msgspec.to_builtins(settings.zero),
        "optimizer": settings.optimizer,
    }


def _way_row(one: Proposal, own: TrainerCommand | None) -> dict[str, Any]:
    way, settings = one.way, one.way.settings
    return {
        "preset": settings.preset if own is None else None,
        "batch": settings.batch,
        "accumulation": settings.accumulation,
        "seq_len": settings.seq_len,
        "effective_batch": settings.effective_batch,
        **_strategy_row(settings),
        "changes": way.changes,
        "options": one.options,
        "training_unchanged": way.unchanged,
        "speed_class": way.pace.speed,
        "speed_basis": way.pace.basis,
        **peak_row(way.peak),
        "host": one.host.row,
    }


@wraps_on_terminal
def plan_text(
    settings: Settings,
    own: TrainerCommand | None,
    assumed: list[str],
    peak: PlannedPeak,
    card: Card,
    best: Largest | None,
    least: tuple[Settings, PlannedPeak] | None,
    found: Sequence[Proposal],
    measured: str | None,
) -> Iterator[str]:
    yield from heading(settings, own, assumed)
    yield f"GPU memory  {_share(peak, card)}{_at_most(peak, card)}"
    yield f"by          {peak.calibrated or peak.basis}: between {units.size(peak.least)} and {units.size(peak.most)}"
    if measured is not None:
        yield f"measured    {measured}"
    yield f"peak        in the {peak.phase} phase"
    yield _parts(peak.components, measured_context=card.context_measured)
    if card.total_bytes is None:
        return
    if best is None:
        yield "fits        no: each batch that keeps the effective batch needs 85 % of the GPU or more with these settings"
        if least is not None:
            yield f"smallest    {least[0].split_text}: ~{_share(least[1], card)}"
    else:
        size = units.size(peak_of(best.need, card).bytes)
        yield f"largest     {best.settings.split_text}: {size}, safe, and keeps the effective batch"
        yield from _added(best.options)
    for one in found:
        yield f"or          {_way_text(one.way, own)}{_host_words(one.host)}"
        yield from _added(one.options)


def _added(options: Sequence[str] | None) -> Iterator[str]:
    if options:
        yield f"add         {shlex.join(options)}"


@wraps_on_terminal
def bound_text(bound: Bound, card: Card) -> Iterator[str]:
    size, total = units.size(bound.bytes), card.total_bytes
    yield f"GPU memory  at least {size}" if total is None else f"GPU memory  at least {size} of {units.size(total)}"
    yield f"by          bound: {bound.counted}; activations come on top"
    yield _parts(bound.components)
    if total is not None and bound.is_too_much(card):
        yield "fits        no: this alone is more than there is"
    elif total is not None:
        yield "fits        not known: the peak is higher"


@wraps_on_terminal
def instead_text(instead: Instead | None, tried: Sequence[str]) -> Iterator[str]:
    """What to do where none of the settings that were tried fits."""
    listed = separator(", ").join(map(tr, tried))
    yield f"tried       {listed}: nothing of it fits this GPU and host with this method"
    if instead is None:
        yield "instead     take a smaller model"
        return
    after, on_gpu, of_host = instead.settings, units.size(instead.peak.bytes), units.size(instead.host_bytes)
    options, shape = shlex.join(instead.options), f"{after.split_text}{separator(', ')}T {after.seq_len}"
    if after.method == "qlora":
        yield (
            f"instead     {options} trains adapters on a base in 4 bits, {shape}: "
            f"~{on_gpu} of GPU memory, ~{of_host} of host memory"
        )
    else:
        yield f"instead     {options} trains adapters, {shape}: ~{on_gpu} of GPU memory, ~{of_host} of host memory"


def instead_row(instead: Instead | None) -> dict[str, Any] | None:
    if instead is None:
        return None
    settings = instead.settings
    names = ("preset", "batch", "accumulation", "seq_len")
    return {
        **_strategy_row(settings),
        **{name: getattr(settings, name) for name in names},
        "options": instead.options,
        **peak_row(instead.peak),
        "host_peak_bytes": instead.host_bytes,
    }


def _parts(components: Mapping[str, int], *, measured_context: bool = False) -> str:
    parts = sorted(components.items(), key=lambda one: -one[1])
    names = {"context": "measured context"} if measured_context else {}
    texts = [f"{tr(names.get(name, name))} {units.size(size)}" for name, size in parts if size]
    return f"parts       {separator(', ').join(texts)}"


@wraps_on_terminal
def heading(settings: Settings, own: TrainerCommand | None, assumed: list[str]) -> Iterator[str]:
    comma = separator(", ")
    method = "" if settings.lora is None else f"{comma}{settings.method} r {settings.lora.r}"
    checkpointing = f"{comma}{tr('gradient checkpointing')}" if settings.gradient_checkpointing else ""
    what = f"{settings.split_text} = {settings.effective_batch}{comma}T {settings.seq_len}{method}{checkpointing}"
    if own is None:
        yield f"recipe {settings.recipe}, preset {settings.preset}: {what}"
    else:
        yield f"your program: {what}"
    if assumed:
        yield f"assumed     {separator('; ').join(map(tr, assumed))}"


def _share(peak: PlannedPeak, card: Card) -> str:
    """`8.5 / 16.0 GiB, 53.1 % · safe`"""
    if card.total_bytes is None:
        return units.size(peak.bytes)
    share = f"{units.percent(peak.fraction)} {_band(peak.band)}"
    return share_text(peak.bytes, card.total_bytes, card.others_bytes, share)


def _at_most(peak: PlannedPeak, card: Card) -> str:
    """The largest share that the true peak may take, if that is in a worse band; else empty."""
    fraction = card.fraction(peak.most)
    band = band_of(fraction)
    if peak.band not in (Band.SAFE, Band.EDGE) or band is peak.band:
        return ""
    return separator("; ") + tr(f"at most {units.percent(fraction)} {_band(band)}")


def train_command(settings: Settings, model: str, preset: str | None, values: Mapping[str, str]) -> str:
    """The command that trains what is planned. FILE: the data, which a plan does not need."""
    words = ["memtop train", settings.recipe, f"--set {shlex.quote(f'model.path={model}')}"]
    if not settings.data.get("train"):
        words.append("--set data.train=FILE")
    if preset is not None:
        words.append(f"--preset {preset}")
    for name, value in values.items():
        words.append(f"{OPTIONS[name]} {value}" if name in OPTIONS else f"--set {shlex.quote(f'{name}={value}')}")
    if settings.world_size > 1:
        words.append(f"--gpus free:{settings.world_size}")
    return " ".join(words)


def _band(band: Band) -> str:
    return f"{mark(band)} {tr(band.value)}"


def _way_text(way: Way, own: TrainerCommand | None) -> str:
    same = "training is unchanged" if way.unchanged else "changes training"
    if way.nearly:
        same = "training is not exactly the same"
    head = way.settings.split_text if own is not None else f"{way.settings.split_text}{separator(', ')}{_named(way)}"
    changes = separator("; ").join(map(tr, way.changes))
    size, least, most = map(units.size, (way.peak.bytes, way.peak.least, way.peak.most))
    size = f"~{size}" if way.peak.basis == "estimate" else size
    speed = speed_words(way.pace.speed)
    if changes:
        return tr(f"{head} ({changes}): {size}, between {least} and {most}; {same}; {speed}")
    return tr(f"{head}: {size}, between {least} and {most}; {same}; {speed}")


def _host_words(host: PlannedHost) -> str:
    """Of the host's memory, if it is too little for this; else empty."""
    band = band_of(host.fraction)
    if host.foreseen is None or band in (Band.SAFE, Band.UNKNOWN):
        return ""
    return separator("; ") + tr(f"needs {units.size(host.foreseen.peak)} of host memory {_band(band)}")


def _named(way: Way) -> str:
    return tr(f"preset {way.settings.preset}")


def print_all(rows: list[PresetRow], hosts: list[PlannedHost], card: Card, *, as_json: bool) -> None:
    if as_json:
        print_json([{**_preset_row(row, card), "host": host.row} for row, host in zip(rows, hosts, strict=True)])
        return
    known = {
        place: _cells(row.name, row.settings, row.pace, peak_of(row.need, card), host)
        for place, (row, host) in enumerate(zip(rows, hosts, strict=True))
        if isinstance(row.need, Need) and row.settings is not None and row.pace is not None
    }
    widths = [max(cell_len(tr(cell)) for cell in column) for column in zip(*known.values(), strict=True)]
    for place, (name, settings, need, why, _) in enumerate(rows):
        if place in known:
            cells = enumerate(zip(known[place], widths, strict=True))
            padded = ((cell, -width if at in _NUMBERS else width) for at, (cell, width) in cells)
            print_lines(*for_terminal([row(*padded, between="  ")]))
        elif isinstance(need, Bound) and settings is not None:
            print_lines(f"{name:16} {settings.split_text:12} bound: at least {units.size(need.bytes)}: {why}")
        else:
            print_lines(f"{name:16} {units.UNKNOWN}: {why}")


_NUMBERS = (3, 4)
"""The cells that are aligned to the right."""


def _cells(name: str, settings: Settings, pace: Pace, peak: PlannedPeak, host: PlannedHost) -> tuple[str, ...]:
    size, rank = units.size(peak.bytes), "" if settings.lora is None else f" r {settings.lora.r}"
    share = ("", "") if peak.fraction is None else (units.percent(peak.fraction), _band(peak.band))
    of_host = units.size(None if host.foreseen is None else host.foreseen.peak)
    band = band_of(host.fraction)
    seen = "" if band is Band.UNKNOWN else _band(band)
    values = f"T {settings.seq_len}{rank}"
    return (name, settings.split_text, values, size, *share, peak.basis, f"RAM {of_host}", seen, speed_words(pace.speed))


def _preset_row(one: PresetRow, card: Card) -> dict[str, Any]:
    settings, need = one.settings, one.need
    row: dict[str, Any] = {"peak_bytes": None, "band": band_of(None).value, "reason": one.why}
    if isinstance(need, Need):
        row = peak_row(peak_of(need, card))
    elif need is not None:
        row = bound_row(need, card) | {"reason": one.why}
    return {
        "preset": one.name,
        "batch": None if settings is None else settings.batch,
        "accumulation": None if settings is None else settings.accumulation,
        "seq_len": None if settings is None else settings.seq_len,
        "speed_class": None if one.pace is None else one.pace.speed,
        "speed_basis": [one.why] if one.pace is None else one.pace.basis,
        "options": ["--preset", one.name],
        **({} if settings is None else _strategy_row(settings)),
        **row,
    }
