"""What can be done about a full card, by what it costs the user: nothing, speed, host memory, and last what is learnt. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memtop.presets.files import load_presets
from memtop.presets.schema import Preset, Settings
from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.monitor.bands import EDGE_FROM
from memtop.supervisor.recovery.applying import applied, with_allocator
from memtop.supervisor.recovery.forecast import Line, settings_key
from memtop.supervisor.recovery.learning import learning_rungs
from memtop.supervisor.recovery.parameters import MOMENT_BYTES, TRAINED_BYTES
from memtop.supervisor.recovery.situation import Situation, to_do
from memtop.supervisor.recovery.splits import smaller_split
from memtop.supervisor.recovery.values import Remedy

Rung = Remedy | str | None
"""A remedy, why it is left out, or nothing to say."""

_EXPANDABLE = "expandable_segments"
CHECKPOINTED = 0.7
"""What checkpointing leaves of the activations: the guides say it saves 30 to 50 % of them, so at least 30 is counted on."""


def gpu_ladder(situation: Situation) -> Iterator[Rung]:
    """All rungs, the cheapest first."""
    of = situation.diagnosis
    if of.kind is Kind.GPU_OOM_OTHER_PROCESS:
        yield strays(of)
    fragmented = is_fragmented(of)
    if fragmented:
        yield allocator(situation)
    if of.phase == "evaluation":
        yield eval_batch(situation)
    yield from _same_mathematics(situation)
    if not fragmented:
        yield allocator(situation)
    if of.phase != "optimizer":
        yield from offload_rungs(situation)
    if of.phase in ("unknown", "forward"):
        yield eval_batch(situation)
    yield from learning_rungs(situation)


def _same_mathematics(situation: Situation) -> Iterator[Rung]:
    phase = situation.diagnosis.phase
    if phase == "load":
        # Nothing has been computed yet: the weights themselves do not fit.
        yield "smaller batch, checkpointing: it failed while loading, before any sample was there"
        return
    if phase == "optimizer":
        # Activations are gone in the optimizer's step: what it keeps is what is too much.
        yield from offload_rungs(situation)
    rungs: tuple[Callable[[Situation], Rung], ...] = (smaller_split, checkpointing, chunked_loss)
    yield from (rung(situation) for rung in rungs)


def is_fragmented(of: Diagnosis) -> bool:
    """The allocator held enough for the request, in pieces."""
    if of.kind is Kind.GPU_OOM_FRAGMENTED:
        return True
    idle, asked = of.reserved_unallocated_bytes, of.requested_bytes
    return idle is not None and asked is not None and idle >= asked


def strays(of: Diagnosis) -> Remedy:
    pids = f" (pid {', '.join(map(str, of.other_process_pids))})" if of.other_process_pids else ""
    held = units.size(of.other_process_bytes) if of.other_process_bytes is not None else "part of the card"
    return to_do(
        "strays",
        f"end or wait for who else holds the card: {held}{pids}",
        "nothing that the run gives up is as much; memtop ends only what you choose, never another user's process",
        "memtop strays",
    )


def allocator(situation: Situation) -> Rung:
    present = situation.settings.allocator
    for where, options in (("the environment", situation.allocator), ("the settings", present)):
        if any(option.partition(":")[0] == _EXPANDABLE for option in options.split(",")):
            return f"allocator: {_EXPANDABLE} is set in {where} already"
    values = {"allocator": with_allocator(present)}
    return situation.rung("allocator", why_allocator(situation.diagnosis), values, title=ALLOCATOR, speed=1.0)


ALLOCATOR = "allocator expandable_segments: reserved memory can grow instead of breaking into pieces"


def why_allocator(of: Diagnosis) -> str:
    free = "costs neither speed nor mathematics"
    if not is_fragmented(of) or of.reserved_unallocated_bytes is None or of.requested_bytes is None:
        return f"less is lost in pieces between tensors; {free}"
    held, asked = units.size(of.reserved_unallocated_bytes), units.size(of.requested_bytes)
    return f"{held} were reserved but not in use, in pieces too small for the {asked} that were asked for; {free}"


def checkpointing(situation: Situation) -> Rung:
    if situation.settings.gradient_checkpointing:
        return "gradient checkpointing: already on, gains nothing"
    if not situation.can_checkpoint:
        return "gradient checkpointing: this model cannot recompute its activations"
    line = situation.line()
    share = f"base + {CHECKPOINTED:.0%} of what grows with the batch (the guides: 30 to 50 % less)"
    return situation.rung(
        "checkpointing",
        "activations are computed again in the backward pass instead of kept; the guides: 20 to 30 % slower",
        {"gradient_checkpointing": "true"},
        title="gradient checkpointing on",
        speed=0.75,
        estimate=None if isinstance(line, str) else line.with_activations(CHECKPOINTED, share),
    )


def chunked_loss(situation: Situation) -> Rung:
    if situation.settings.loss_chunk != 0:
        return "loss in pieces: already on"
    of = situation.diagnosis
    logits = of.requested_for is not None and of.requested_for.startswith("the logits")
    named = f": they are what could not be had ({units.size(of.requested_bytes)})" if logits else ""
    return situation.rung(
        "chunked_loss",
        f"the logits never exist as a whole{named}; about three times their size is saved",
        {"loss_chunk": "-1"},
        title="loss over a few tokens at a time",
    )


def eval_batch(situation: Situation) -> Rung:
    settings = situation.settings
    if not settings.eval_every:
        return None
    present = settings.eval_batch or settings.batch
    if present == 1:
        return "evaluation batch: 1 already"
    return situation.rung(
        "eval_batch",
        "an evaluation's result does not depend on how many samples it takes at a time",
        {"eval_batch": str(present // 2)},
        title=f"evaluation batch {present} -> {present // 2}",
        speed=1.0,
        unforeseen="an evaluation's peak is not measured apart from training's",
    )


def offload_rungs(situation: Situation) -> Iterator[Rung]:
    """The optimizer into host memory, then the next preset of the ladder."""
    if not situation.deepspeed:
        yield "optimizer offload, ZeRO: DeepSpeed is not installed"
        return
    yield _offload_optimizer(situation)
    yield from _next_rung(situation)


def _offload_optimizer(situation: Situation) -> Rung:
    zero, trained = situation.settings.zero, situation.trained
    if zero.offload_optimizer:
        return "optimizer offload: already on"
    refused = _host_refuses(situation)
    if refused:
        return f"optimizer offload: {refused}"
    values = {"zero.offload_optimizer": "true", **({} if zero.stage else {"zero.stage": "2"})}
    line, estimate = situation.line(), None
    if trained is not None and isinstance(line, Line):
        saved = MOMENT_BYTES * trained // _shards(situation)
        estimate = line.shifted(-saved, f"Adam's moments ({units.size(saved)}) leave the card")
    return situation.rung(
        "offload_optimizer",
        f"Adam's state lies in host memory instead of on the card; {_host_words(situation)}",
        values,
        title="optimizer state in host memory (ZeRO-2 with offload)" if zero.stage < 2 else "optimizer state in host memory",
        estimate=estimate,
        consent=trained is None or situation.host.available_bytes is None,
    )


def _shards(situation: Situation) -> int:
    return situation.settings.world_size if situation.settings.zero.stage else 1


def offload_bytes(situation: Situation) -> int | None:
    """Host memory that the optimizer's state takes there, on the whole machine."""
    trained = situation.trained
    return None if trained is None else TRAINED_BYTES * trained


def _host_refuses(situation: Situation) -> str | None:
    """Why host memory does not allow an offload; None where it does, or is not known."""
    host, needed = situation.host, offload_bytes(situation)
    if needed is None or host.available_bytes is None:
        return None
    spare = host.available_bytes - int((1 - EDGE_FROM) * (host.limit_bytes or host.available_bytes))
    if needed <= spare:
        return None
    return f"needs {units.size(needed)} of host memory, {units.size(max(0, spare))} can be given without leaving the safe band"


def _host_words(situation: Situation) -> str:
    needed, available = offload_bytes(situation), situation.host.available_bytes
    if needed is None:
        return f"takes {TRAINED_BYTES} bytes of it per trained parameter, whose number is not known here"
    if available is None:
        return f"takes {units.size(needed)} of it; how much is free is not known"
    return f"takes {units.size(needed)} of the {units.size(available)} that are free there"


def _next_rung(situation: Situation) -> Iterator[Rung]:
    """The first rung below the run's own that really needs less: on one process sharding saves nothing, offloading does."""
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
    """The rungs by free memory, the one for the most first."""
    rungs = [preset for preset in load_presets().values() if preset.family == "ladder" and preset.free_gib_from is not None]
    return tuple(sorted(rungs, key=lambda preset: -(preset.free_gib_from or 0)))


def _preset_rung(situation: Situation, preset: Preset) -> Rung:
    zero, now = preset.zero, situation.settings.zero
    if zero is not None and now.offload_optimizer and not zero.offload_optimizer and situation.settings.world_size == 1:
        return f"preset {preset.name}: takes the optimizer back onto the card, and sharding saves nothing on one process"
    if zero is not None and zero.offload_optimizer and not now.offload_optimizer:
        refused = _host_refuses(situation)
        if refused:
            return f"preset {preset.name}: {refused}"
    title = f"preset {preset.name}: {preset.title}"
    found = situation.rung("next_preset", "the next rung of the ladder", preset=preset.name, title=title)
    if isinstance(found, Remedy) and not _needs_less(situation.settings, applied(situation.settings, found)):
        return f"preset {preset.name}: changes nothing on the card"
    return found


def _needs_less(before: Settings, after: Settings) -> bool:
    return after.batch < before.batch or settings_key(after, on_gpu=True) != settings_key(before, on_gpu=True)
