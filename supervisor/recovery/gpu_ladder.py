"""The remedies for a full GPU, ordered by their cost: free ones, then speed, then host memory, then
a change of training.

Those that do not concern the GPU alone (batch, checkpointing, loss, evaluation, length, model)
serve `host_ladder`, too, for training on the CPU. A rung is a remedy, or the reason why it is left
out. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from memtop.presets.comparison import edits_text
from memtop.presets.files import load_presets
from memtop.presets.parameters import MOMENT_BYTES, TRAINED_BYTES, adapter_parameters, model_parameters, smaller_model
from memtop.presets.schema import Preset, Settings, capped, exact_splits
from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.monitor.values import EDGE_FROM
from memtop.supervisor.recovery.advice import advice, larger_than_device, refusals
from memtop.supervisor.recovery.configuration import applied, settings_key
from memtop.supervisor.recovery.peak_line import PeakLine
from memtop.supervisor.recovery.situation import Situation, to_do, train_command
from memtop.supervisor.recovery.values import Forecast, Remedy

Rung = Remedy | str | None
"""A remedy, the reason why it is left out, or None if it does not concern this run."""


def gpu_ladder(situation: Situation) -> Iterator[Rung]:
    """All rungs, the cheapest first."""
    diagnosis = situation.diagnosis
    phase = diagnosis.phase
    yield larger_than_device(diagnosis)
    yield from refusals(diagnosis)
    if diagnosis.kind is Kind.GPU_OOM_OTHER_PROCESS:
        yield strays(diagnosis)
    fragmented = is_fragmented(diagnosis)
    if fragmented:
        yield allocator(situation)
    if phase == "evaluation":
        yield eval_batch(situation)
    if phase == "optimizer":
        # In the optimizer step the activations are already freed: its state is what takes the
        # memory.
        yield from offload_rungs(situation)
    if phase == "load":
        yield "smaller batch, checkpointing: it failed while loading the model, before the first sample"
    else:
        yield smaller_split(situation)
        yield checkpointing(situation)
        yield chunked_loss(situation)
    if not fragmented:
        yield allocator(situation)
    if phase != "optimizer":
        yield from offload_rungs(situation)
    if phase in ("unknown", "forward"):
        yield eval_batch(situation)
    yield from rungs_that_change_training(situation)


# --- other processes and the allocator ----------------------------------------------------------


def strays(diagnosis: Diagnosis) -> Remedy:
    """End the other processes on the GPU. memtop can do that on NVIDIA's GPUs under Linux."""
    pids = f" (pid {', '.join(map(str, diagnosis.other_process_pids))})" if diagnosis.other_process_pids else ""
    held = units.size(diagnosis.other_process_bytes) if diagnosis.other_process_bytes is not None else "part of the GPU"
    for elsewhere in advice("others", diagnosis.environment):
        return replace(elsewhere, title=f"{elsewhere.title}: they hold {held}{pids}")
    return to_do(
        "strays",
        f"end the other processes on the GPU, or wait for them: they hold {held}{pids}",
        "they hold more than the run could free; memtop ends only the processes you choose, never another user's",
        "memtop strays",
    )


def is_fragmented(diagnosis: Diagnosis) -> bool:
    """Whether the allocator held enough memory for the request, in pieces."""
    if diagnosis.kind is Kind.GPU_OOM_FRAGMENTED:
        return True
    idle, requested = diagnosis.reserved_unallocated_bytes, diagnosis.requested_bytes
    return idle is not None and requested is not None and idle >= requested


ALLOCATOR = "allocator option expandable_segments: reserved memory can grow, which avoids fragmentation"
_EXPANDABLE = "expandable_segments"


def allocator(situation: Situation) -> Rung:
    present = situation.settings.allocator
    for where, options in (("the environment", situation.allocator), ("the settings", present)):
        if any(option.partition(":")[0] == _EXPANDABLE for option in options.split(",")):
            return f"allocator settings (PYTORCH_CUDA_ALLOC_CONF): {_EXPANDABLE} is already set in {where}"
    values = {"allocator": with_expandable_segments(present)}
    return situation.rung("allocator", why_allocator(situation.diagnosis), values, title=ALLOCATOR, speed=1.0)


def with_expandable_segments(options: str) -> str:
    """The allocator's options with expandable_segments:True, unless they set it already."""
    present = [option for option in options.split(",") if option]
    if any(option.partition(":")[0] == _EXPANDABLE for option in present):
        return options
    return ",".join([*present, f"{_EXPANDABLE}:True"])


def why_allocator(diagnosis: Diagnosis) -> str:
    free = "it costs no speed, and training is unchanged"
    idle, requested = diagnosis.reserved_unallocated_bytes, diagnosis.requested_bytes
    if not is_fragmented(diagnosis) or idle is None or requested is None:
        return f"less memory is lost to fragmentation; {free}"
    return (
        f"{units.size(idle)} were reserved but unused, in pieces too small for the request of {units.size(requested)}; {free}"
    )


# --- batch, activations, loss, evaluation -------------------------------------------------------

CHECKPOINTED = 0.7
"""The share of the activations that remains with checkpointing, to be careful: of many layers it
saves much more."""


def smaller_split(situation: Situation) -> Rung:
    """A smaller micro-batch with more accumulation; every update keeps its samples.

    It is the largest exact divisor that is forecast below 85 % of the device; without a forecast,
    the largest up to half of B.
    """
    settings = situation.settings
    if settings.batch == 1:
        return "smaller batch: the micro-batch is already 1"
    sizes = {b for batch, accumulation in settings.splits for b, _ in exact_splits(batch * accumulation) if b < settings.batch}
    smaller = [capped(settings, most) for most in sorted(sizes)]
    untried = {(one.batch, one.accumulation): one for one in smaller if not situation.tried(one)}
    if not untried:
        return "smaller batch: every smaller exact split has failed before"
    found = _first_that_fits(situation, [untried[split] for split in sorted(untried, reverse=True)])
    if isinstance(found, str):
        return found
    return situation.rung(
        "smaller_batch",
        _why_smaller(situation, found.batch),
        {"batch": found.batch_text, "accumulation": str(found.accumulation)},
        title=f"{edits_text(settings, found, ('batch', 'accumulation'))}: effective batch stays {settings.effective_batch}",
        speed=0.9,
    )


def _first_that_fits(situation: Situation, possible: list[Settings]) -> Settings | str:
    """`possible` with the largest B first."""
    now = situation.settings.batch
    half = next((one for one in possible if one.batch <= now // 2), possible[-1])
    forecasts = [(one, found) for one in possible if (found := _forecast_of(situation, one)) is not None]
    if len(forecasts) < len(possible):
        return half
    # A failure alone is a lower bound: it does not show that more than half of the failed batch
    # fits.
    most = now if situation.has_whole_peak else half.batch
    fits = next((one for one, found in forecasts if one.batch <= most and (found.fraction or 0) < EDGE_FROM), None)
    smallest, least = forecasts[-1]
    if fits is None and least.runs_out:
        return f"smaller batch: even B {smallest.batch} is forecast at {units.percent(least.fraction)}"
    return fits or smallest


def _forecast_of(situation: Situation, settings: Settings) -> Forecast | None:
    """The forecast as a part of the device; None if there is none."""
    found = situation.foresee(settings)
    return None if isinstance(found, str) or found.fraction is None else found


def _why_smaller(situation: Situation, batch: int) -> str:
    why = "the same samples in smaller pieces; 5 to 15 % slower"
    diagnosis = situation.diagnosis
    if diagnosis.requested_logits is not None and diagnosis.requested_bytes:
        requested = round(diagnosis.requested_bytes * batch / situation.settings.batch)
        why += f"; the logits that did not fit need {units.size(requested)} at B {batch}"
    if diagnosis.phase == "optimizer":
        why += "; it failed in the optimizer step, where no activations are held, so this may not help"
    return why


def checkpointing(situation: Situation) -> Rung:
    if situation.settings.gradient_checkpointing:
        return "gradient checkpointing: already on"
    if not situation.can_checkpoint:
        return "gradient checkpointing: this model cannot recompute its activations"
    line = situation.line()
    why = f"base + {units.percent(CHECKPOINTED, 0)} of the part that grows with the batch (checkpointing often saves more)"
    return situation.rung(
        "checkpointing",
        "activations are recomputed in the backward pass instead of kept; 20 to 30 % slower",
        {"gradient_checkpointing": "true"},
        title="gradient checkpointing on",
        speed=0.75,
        estimate=None if isinstance(line, str) else line.with_activations(CHECKPOINTED, why),
    )


def chunked_loss(situation: Situation) -> Rung:
    if situation.settings.loss_chunk != 0:
        return "chunked loss: already on"
    diagnosis = situation.diagnosis
    is_logits = diagnosis.requested_logits is not None
    request = f": the request that failed ({units.size(diagnosis.requested_bytes)}) was for them" if is_logits else ""
    return situation.rung(
        "chunked_loss",
        f"the logits of all tokens are never in memory at once{request}; this saves about three times their size",
        {"loss_chunk": "-1"},
        title="chunked loss: a few tokens at a time",
    )


def eval_batch(situation: Situation) -> Rung:
    settings = situation.settings
    if not settings.eval_every:
        return None
    present = settings.eval_batch or settings.batch
    if present == 1:
        return "evaluation batch: already 1"
    return situation.rung(
        "eval_batch",
        "the result of an evaluation does not depend on its batch size",
        {"eval_batch": str(present // 2)},
        title=f"evaluation batch {present} -> {present // 2}",
        speed=1.0,
        unforeseen="the peak of an evaluation is not measured separately",
    )


# --- offload and presets ------------------------------------------------------------------------


def offload_rungs(situation: Situation) -> Iterator[Rung]:
    """The optimizer state into host memory, then the next preset of the ladder."""
    if not situation.deepspeed:
        yield "optimizer offload, ZeRO: DeepSpeed is not installed"
        return
    yield _offload_optimizer(situation)
    yield from _next_preset(situation)


def _offload_optimizer(situation: Situation) -> Rung:
    zero, trained = situation.settings.zero, situation.trained
    if zero.offload_optimizer:
        return "optimizer offload: already on"
    refused = _host_refuses(situation)
    if refused:
        return f"optimizer offload: {refused}"
    values = {"zero.offload_optimizer": "true", **({} if zero.stage else {"zero.stage": "2"})}
    line, estimate = situation.line(), None
    if trained is not None and isinstance(line, PeakLine):
        saved = MOMENT_BYTES * trained // (situation.settings.world_size if zero.stage else 1)
        estimate = line.shifted(-saved, f"Adam's moments ({units.size(saved)}) leave the GPU")
    return situation.rung(
        "offload_optimizer",
        f"Adam's state is kept in host memory instead of on the GPU; {_host_words(situation)}",
        values,
        title="optimizer state in host memory (ZeRO-2 with offload)" if zero.stage < 2 else "optimizer state in host memory",
        estimate=estimate,
        consent=trained is None or situation.host.available_bytes is None,
    )


def offload_bytes(situation: Situation) -> int | None:
    """Host memory that an offloaded optimizer needs on the whole machine, in bytes; None if not
    known."""
    trained = situation.trained
    return None if trained is None else TRAINED_BYTES * trained


def _host_refuses(situation: Situation) -> str | None:
    """Why host memory is too small for an offload; None if it is large enough or not known."""
    host, needed = situation.host, offload_bytes(situation)
    if needed is None or host.available_bytes is None:
        return None
    spare = host.available_bytes - int((1 - EDGE_FROM) * (host.limit_bytes or host.available_bytes))
    if needed <= spare:
        return None
    return f"it needs {units.size(needed)} of host memory, of which {units.size(max(0, spare))} can be used safely"


def _host_words(situation: Situation) -> str:
    needed, available = offload_bytes(situation), situation.host.available_bytes
    if needed is None:
        return f"it needs {TRAINED_BYTES} bytes per trained parameter, whose number is not known"
    if available is None:
        return f"it needs {units.size(needed)}; how much is free is not known"
    return f"it needs {units.size(needed)} of the {units.size(available)} that are free"


def _next_preset(situation: Situation) -> Iterator[Rung]:
    """The first preset below the run's that needs less. On one process, sharding saves nothing and
    offloading does."""
    settings = situation.settings
    ladder = ladder_presets()
    names = [preset.name for preset in ladder]
    if settings.preset in names:
        below = ladder[names.index(settings.preset) + 1 :]
    else:
        below = ladder[-1:] if settings.zero.offload_optimizer and not settings.zero.offload_parameters else ()
    for preset in below:
        found = _preset_rung(situation, preset)
        yield found
        if isinstance(found, Remedy):
            return


def ladder_presets() -> tuple[Preset, ...]:
    """The presets of the ladder, the one that needs the most memory first."""
    rungs = [preset for preset in load_presets().values() if preset.family == "ladder" and preset.free_gib_from is not None]
    return tuple(sorted(rungs, key=lambda preset: -(preset.free_gib_from or 0)))


def _preset_rung(situation: Situation, preset: Preset) -> Rung:
    zero, now = preset.zero, situation.settings.zero
    if zero is not None and zero.stage and not zero.saves_memory(situation.settings.world_size):
        returns = "the optimizer returns to the GPU, and " if now.offload_optimizer else ""
        return f"preset {preset.name}: {returns}sharding saves nothing on one process"
    if zero is not None and zero.offload_optimizer and not now.offload_optimizer:
        refused = _host_refuses(situation)
        if refused:
            return f"preset {preset.name}: {refused}"
    title = f"preset {preset.name}: {preset.title}"
    found = situation.rung("next_preset", "the next preset, which needs less GPU memory", preset=preset.name, title=title)
    if isinstance(found, Remedy) and not _needs_less(situation.settings, applied(situation.settings, found)):
        return f"preset {preset.name}: changes nothing on the GPU"
    return found


def _needs_less(before: Settings, after: Settings) -> bool:
    return after.batch < before.batch or settings_key(after, on_gpu=True) != settings_key(before, on_gpu=True)


# --- what changes training ----------------------------------------------------------------------

LENGTHS = (8192, 4096, 3072, 2048, 1536, 1024, 768, 512, 384, 256, 192, 128, 64)
"""Usual sequence lengths in tokens. From above 512, none below 512 is offered: too much of the text
would be lost."""


def rungs_that_change_training(situation: Situation) -> Iterator[Rung]:
    """The last rungs, which are never applied without consent."""
    yield _shorter(situation)
    if situation.settings.lora is not None:
        yield _smaller_rank(situation)
    yield _other_model(situation)


def _shorter(situation: Situation) -> Rung:
    """The longest shorter length that is forecast to fit, or else the next one."""
    now = situation.settings.seq_len
    least = 512 if now > 512 else 1
    lengths = [length for length in LENGTHS if least <= length < now]
    if not lengths:
        return f"sequence length: {now} is the shortest usual one"
    length = next((one for one in lengths if _fits(situation, one)), lengths[0])
    return situation.rung(
        "seq_len",
        "everything that grows with T needs less, but the data change: text beyond T is cut off or moved",
        {"seq_len": str(length)},
        title=f"sequence length {now} -> {length}: the data are cut differently",
        estimate=_at_length(situation, length),
    )


def _at_length(situation: Situation, length: int) -> PeakLine | None:
    """Activations and logits grow at least in proportion to T, so the proportional line is on the
    safe side."""
    line, now = situation.line(), situation.settings.seq_len
    if isinstance(line, str):
        return None
    return line.with_activations(length / now, f"the part that grows with the batch shrinks with T, {now} -> {length}")


def _fits(situation: Situation, length: int) -> bool:
    found = situation.foresee(replace(situation.settings, seq_len=length), _at_length(situation, length))
    return not isinstance(found, str) and found.fraction is not None and found.fraction < EDGE_FROM


def _smaller_rank(situation: Situation) -> Rung:
    """Half the rank; alpha / r, which is the adapters' scale, stays."""
    lora = situation.settings.lora
    assert lora is not None
    r = lora.r // 2
    if r < 1 or lora.r % 2 or lora.alpha % 2:
        return f"LoRA r {lora.r}: cannot be halved with the same alpha / r ({lora.alpha} / {lora.r})"
    config = situation.model_config or situation.settings.model.get("config") or {}
    now, then = (adapter_parameters(config, each) for each in (lora, replace(lora, r=r)))
    return situation.rung(
        "lora_rank",
        f"smaller adapters{_fewer(now, then)}; the trained adapters do not fit the new shapes",
        {"lora.r": str(r), "lora.alpha": str(lora.alpha // 2)},
        title=f"LoRA r {lora.r} -> {r}, alpha {lora.alpha} -> {lora.alpha // 2}: a new run",
    )


def _other_model(situation: Situation) -> Rung:
    """A smaller model: a smaller configuration if the run creates the model, another path if it
    loads one."""
    settings = situation.settings
    config: Mapping[str, Any] | None = settings.model.get("config")
    values = None if config is None else smaller_model(config)
    if config is None or values is None:
        command = train_command(replace(settings, model={}), {"model.path": "SMALLER_MODEL"})
        other = to_do("smaller_model", "a smaller model: a new run", _SMALLER, command, keeps_math=False)
        return replace(other, resumable="new run", forecast_unknown="nothing was measured with another model")
    return situation.rung(
        "smaller_model",
        f"a smaller model{fewer_parameters(config, values)}",
        {f"model.config.{name}": str(value) for name, value in values.items()},
        title=f"a smaller model ({', '.join(f'{name} {value}' for name, value in values.items())}): a new run",
    )


_SMALLER = "for example 0.5 B instead of 1.8 B parameters; give its folder or hub name"


def fewer_parameters(config: Mapping[str, Any], values: Mapping[str, int]) -> str:
    """`: 196.6 -> 46.4 M parameters, 2.2 GiB less ...`; empty if the numbers are not known."""
    return _fewer(model_parameters(config), model_parameters({**config, **values}))


def _fewer(now: int | None, then: int | None) -> str:
    if now is None or then is None:
        return ""
    saved = units.size(TRAINED_BYTES * (now - then))
    return f": {now / 1e6:.1f} -> {then / 1e6:.1f} M parameters, {saved} less for weights, gradients and Adam in fp32"
