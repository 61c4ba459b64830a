"""Chooses the preset of a run if the user has not named one.

The forecast of the peak decides. If the peak cannot be foreseen, the least that the model needs
decides.

One process takes the recipe's own values (`standard`), if necessary with a smaller micro-batch, or
with gradient checkpointing, which computes the same with less memory. ZeRO would not help: on one
process it shards nothing, and it switches off in-process survival and live edits. If no micro-batch
fits, the run takes the first preset of the ladder that offloads and fits. Several processes take
the preset that the ladder's guide names for the free memory, or the next smaller one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from msgspec.structs import replace

from memtop.presets.checks import SettingsError
from memtop.presets.files import load_presets
from memtop.presets.parameters import LIVE_PARAMETERS, MOMENT_BYTES, ModelSize, model_size
from memtop.presets.schema import Preset, Settings

_GIB = 1 << 30
CONTEXT_BYTES = _GIB // 2
"""The CUDA context with its libraries, on each process."""
COMMUNICATION_BYTES = _GIB // 2
"""What NCCL takes on each of several processes, beside torch's memory. It has buffers of 4 MiB
(NCCL_BUFFSIZE in its documentation) for each channel and connection, and 2 to 32 channels: some ten
MiB over PCIe, up to 1 GiB with NVLink. Not measured."""
MOST = 0.85
"""What is safe stays below this part of the memory."""


class Taken(NamedTuple):
    """What one process of a run takes of its GPU."""

    size: int
    """Bytes."""
    share: float
    """With what other programs hold; or of the free memory."""


Under = Callable[[Preset], Settings]
"""The settings of the run under a preset; SettingsError if the two do not go together."""
Foresee = Callable[[Settings], Taken | None]
"""The peak; None: it cannot be foreseen."""

_MOMENTS = {"adamw_8bit": 2, "paged_adamw_8bit": 2, "adafactor": 0}
"""Bytes of moments per trained parameter. Adafactor keeps sums of rows and columns."""
_IN_4_BITS = 0.52
"""NF4 with double quantization: half a byte, and scales."""


def need(settings: Settings, size: ModelSize) -> int:
    """The bytes that the run needs on each GPU whatever its micro-batch is, with the CUDA context.

    Of a trained parameter: 4 bytes for the weight, 4 for the gradient, 8 for Adam's moments, and 2
    for the copy in bf16 or fp16. A frozen base has the precision of the computation, or 4 bits.
    ZeRO divides by the number of processes: the moments and the fp32 weights (stage 1), gradients
    too (2), the working weights too (3). What is offloaded counts as 0.
    """
    zero, world = settings.zero, settings.world_size
    compute = 4 if settings.precision == "fp32" else 2
    base = 0 if settings.lora is None else size.all
    if settings.method == "qlora":
        frozen = math.ceil(_IN_4_BITS * (base - size.embedded)) + compute * size.embedded
    else:
        # Weights of a path are loaded in the precision of the computation, new ones are in fp32.
        frozen = base * (compute if settings.model.get("path") or zero.stage else 4)
    copies = compute * size.trained if zero.stage or compute < 4 else 0
    if zero.offload_parameters:
        copies, frozen = min(copies, compute * LIVE_PARAMETERS), min(frozen, compute * LIVE_PARAMETERS)
    elif zero.stage == 3:
        copies, frozen = copies // world, frozen // world
    sharded = world if zero.stage else 1
    master, moments = 4 * size.trained // sharded, _MOMENTS.get(settings.optimizer, MOMENT_BYTES) * size.trained // sharded
    gradients = 4 * size.trained // (world if zero.stage >= 2 else 1)
    if zero.offload_optimizer:
        master = moments = gradients = 0
    return master + copies + frozen + gradients + moments + CONTEXT_BYTES


def need_to_read(settings: Settings) -> int | None:
    """The bytes that the model of a run needs on a GPU to compute without training, in fp32, with
    the CUDA context; None if its size is not known before it is loaded."""
    size = model_size(settings)
    if size is None:
        return None
    adapters = 0 if settings.lora is None else 4 * size.trained
    base = 4 * size.all
    if settings.method == "qlora":
        base = math.ceil(_IN_4_BITS * (size.all - size.embedded)) + 4 * size.embedded
    return base + adapters + CONTEXT_BYTES


def fits(needed: int, free_bytes: int) -> bool:
    """Whether it leaves enough of the free memory."""
    return needed < MOST * free_bytes


def choose_preset(
    free_bytes: int | None, recipe: str, processes: int, under: Under, foresee: Foresee = lambda _: None
) -> tuple[Preset, str]:
    """The preset for this much free memory on each GPU, and the reason in one line; None: not
    known.

    A recipe with a family of its own (QLoRA) has the presets of that family: they shard nothing.
    """
    plain = load_presets()["standard"]
    if free_bytes is None:
        return plain, "preset standard: the free GPU memory is not known"
    if processes == 1 and _rungs(recipe)[0][1].family == "ladder":
        return _for_one_process(free_bytes, plain, under, foresee)
    presets, where = presets_by_memory(free_bytes, recipe)
    wish = _not_under_zero(under, plain) if presets[0].zero and presets[0].zero.stage else None
    if wish is not None:
        return plain, f"preset standard: {wish} is not possible under ZeRO; {_free(free_bytes)}"
    return _for_several(free_bytes, presets, where, under, foresee)


def _for_one_process(free_bytes: int, plain: Preset, under: Under, foresee: Foresee) -> tuple[Preset, str]:
    """`standard` if the run fits, if need be with a smaller micro-batch or gradient checkpointing;
    otherwise the first preset of the ladder that offloads and fits."""
    settings, checkpointed = under(plain), replace(plain, gradient_checkpointing=True)
    without_offload = [[preset, *_with_smaller_batches(preset, under)] for preset in (plain, checkpointed)]
    first = foresee(settings)
    is_foreseen = first is not None
    if first is None:
        size = model_size(settings)
        if size is None:
            return plain, f"preset standard: {_free(free_bytes)}; what the model needs cannot be estimated"

        def foresee(of: Settings) -> Taken:
            needed = need(of, size)
            return Taken(needed, needed / max(1, free_bytes))

        first, without_offload = foresee(settings), [[plain]]  # neither of them changes this
        what = "base, adapters and optimizer" if settings.lora is not None else "weights, gradients and optimizer"
        words = f"{what} need {_gib(first)}"
    else:
        words = f"estimated to peak at {_gib(first)}"
    reason = f"{_free(free_bytes)}, {words}"
    if first.share < MOST:
        return plain, f"preset standard: {reason}"
    if settings.auto_batch:
        # The search ends with the smallest batch, if need be.
        ends, _ = _taken((presets[-1] for presets in without_offload), under, foresee)
        end, least = _best(ends or [(plain, first)], free_bytes)
        batch = under(end).batch
        if end.gradient_checkpointing:
            reason = f"{_free(free_bytes)}, estimated to peak at {_gib(least)} with batch {batch} and gradient checkpointing"
        elif is_foreseen:
            reason = f"{_free(free_bytes)}, estimated to peak at {_gib(least)} with batch {batch}"
        reason = f"preset standard: {reason}{_above(least, free_bytes)}"
        advice = "memtop cannot offload with --batch auto; to offload, give --batch a number"
        chosen = checkpointed if end.gradient_checkpointing else plain
        return chosen, reason if fits(least.size, free_bytes) else f"{reason}. {advice}"
    offload = [preset for _, preset in _rungs() if preset.zero is not None and preset.zero.saves_memory(1)]
    possible, refused = _taken([*chain(*without_offload), *offload], under, foresee)
    preset, found = _best(possible, free_bytes)
    if preset in offload:
        reason += f"; with this offload {_gib(found)}"
    elif preset is not plain:
        after = under(preset)
        if not preset.gradient_checkpointing:
            reason += f"; with batch {after.batch} x {after.accumulation} at {_gib(found)}"
        elif after.batch == settings.batch:
            reason += f"; with gradient checkpointing at {_gib(found)}"
        else:
            reason += f"; with batch {after.batch} x {after.accumulation} and gradient checkpointing at {_gib(found)}"
    reason = f"preset {preset.name}: {reason}{_above(found, free_bytes)}"
    return preset, reason if fits(found.size, free_bytes) or not refused else f"{reason}; not possible: {'; '.join(refused)}"


def _for_several(free_bytes: int, presets: list[Preset], where: str, under: Under, foresee: Foresee) -> tuple[Preset, str]:
    """The first of these presets, or the next one that fits; `where`: for how much memory the first
    one is."""
    first, free = presets[0], _free(free_bytes)
    possible, _ = _taken(presets, under, foresee)
    if not possible or possible[0][0] is not first or possible[0][1].share < MOST:
        return first, f"preset {first.name}: {free}, {where}"
    preset, found = _best(possible, free_bytes)
    above = _above(found, free_bytes)
    if preset is first:
        return first, f"preset {first.name}: {free}, {where}, estimated to peak at {_gib(found)}{above}"
    words = f"{first.name}, {where}, is estimated to peak at {_gib(possible[0][1])}, {preset.name} at {_gib(found)}"
    return preset, f"preset {preset.name}: {free}; {words}{above}"


def _with_smaller_batches(plain: Preset, under: Under) -> Iterator[Preset]:
    """The preset with each smaller micro-batch that keeps the effective batch, the largest first;
    none if the person gave B or A."""
    before = under(plain)
    while before.batch > 1:
        preset = replace(plain, max_batch=before.batch - 1)
        after = under(preset)
        if after.batch >= before.batch or after.effective_batch != before.effective_batch:
            return
        yield preset
        before = after


def _taken(presets: Iterable[Preset], under: Under, foresee: Foresee) -> tuple[list[tuple[Preset, Taken]], list[str]]:
    """What each of them takes, without those of which it is not known; and why others are not
    possible."""
    possible: list[tuple[Preset, Taken]] = []
    refused: list[str] = []
    for preset in presets:
        try:
            found = foresee(under(preset))
        except SettingsError as error:
            # What to do instead is said after the semicolon: too long for a list.
            refused.append(f"{preset.name}: {str(error).partition(';')[0]}")
            continue
        if found is not None:
            possible.append((preset, found))
    return possible, refused


def _best(possible: list[tuple[Preset, Taken]], free_bytes: int) -> tuple[Preset, Taken]:
    """The first that is safe. If other programs hold so much that none is, the first that fits in
    what they leave; otherwise the smallest."""
    safe = (one for one in possible if one[1].share < MOST)
    fitting = (one for one in possible if fits(one[1].size, free_bytes))
    return next(safe, None) or next(fitting, None) or min(possible, key=lambda one: one[1].size)


def _above(found: Taken, free_bytes: int) -> str:
    """That it is not safe; empty if it is."""
    if not fits(found.size, free_bytes):
        return f": not below {100 * MOST:.0f} % of the free memory"
    return f": with other programs {100 * found.share:.0f} % of the GPU" if found.share >= MOST else ""


def _not_under_zero(under: Under, plain: Preset) -> str | None:
    """What the person asks for that ZeRO cannot do; None: nothing, or another value is wrong."""
    try:
        settings = under(plain)
    except SettingsError:
        return None  # the settings under the chosen preset are checked next
    if settings.auto_batch:
        return "--batch auto"
    return f"--batch {settings.batch_text}" if settings.rank_splits else None


def presets_by_memory(free_bytes: int, recipe: str) -> tuple[list[Preset], str]:
    """The preset for this much free memory and the smaller ones; and for how much memory it is.

    A threshold belongs to the larger preset: 12 GiB and more, 6 up to 12, 4 up to 6, below 4.
    """
    rungs = _rungs(recipe)
    at = next((n for n, (border, _) in enumerate(rungs) if free_bytes >= border * _GIB), len(rungs) - 1)
    border = rungs[at][0]
    where = f"meant for {border:g} GiB and more" if border > 0 else "the smallest of them"
    if at > 0:
        above = rungs[at - 1][0]
        where = f"meant for {border:g} up to {above:g} GiB" if border > 0 else f"meant for less than {above:g} GiB"
    return [preset for _, preset in rungs[at:]], where


def _rungs(recipe: str = "") -> list[tuple[float, Preset]]:
    """Free GiB and the preset from there on, the largest first: those of the recipe's own family,
    or the ladder."""
    known = [(preset.free_gib_from, preset) for preset in load_presets().values() if preset.free_gib_from is not None]
    own = [rung for rung in known if rung[1].family != "ladder" and recipe in rung[1].recipes]
    return sorted(own or [rung for rung in known if rung[1].family == "ladder"], key=lambda rung: -rung[0])


def _free(size: int) -> str:
    # Rounded down: 11.999 GiB is not 12.
    return f"{math.floor(size / _GIB * 100) / 100:.2f} GiB of GPU memory free"


def _gib(found: Taken) -> str:
    # It is foreseen by an estimate, also where a dry run follows.
    return f"~{found.size / _GIB:.2f} GiB"
