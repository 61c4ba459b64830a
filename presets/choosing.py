"""The preset of a run for which nobody names one, and the estimate that decides it.

On one process it is the recipe's own values (`standard`): sharding saves nothing there, and ZeRO
switches off in-process survival and live edits. If the model does not fit, it is the first preset
of the ladder that offloads and fits. Several processes take the ladder's preset for the free
memory, as its guide says.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
MOST_OF_FREE = 0.85
"""What the estimate may take of the free memory. The rest is for activations, which a smaller
micro-batch and checkpointing reduce."""

Under = Callable[[Preset], Settings]
"""The settings of the run under a preset; SettingsError if the two do not go together."""

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
    """Whether it leaves room for activations."""
    return needed <= MOST_OF_FREE * free_bytes


def choose_preset(free_bytes: int | None, recipe: str, processes: int, under: Under) -> tuple[Preset, str]:
    """The preset for this much free memory on each GPU, and the reason in one line; None: not
    known.

    A recipe with a family of its own (QLoRA) has the presets of that family: they shard nothing.
    """
    plain = load_presets()["standard"]
    if free_bytes is None:
        return choose_by_memory(None)
    if processes == 1 and _rungs(recipe)[0][1].family == "ladder":
        return _for_one_process(free_bytes, plain, under)
    preset, reason = choose_by_memory(free_bytes, recipe)
    wish = _not_under_zero(under, plain) if preset.zero and preset.zero.stage else None
    if wish is None:
        return preset, reason
    return plain, f"preset standard: {wish} is not possible under ZeRO; {_free(free_bytes)}"


def _for_one_process(free_bytes: int, plain: Preset, under: Under) -> tuple[Preset, str]:
    """`standard` if the model fits, otherwise the first preset of the ladder that offloads and
    fits."""
    settings = under(plain)
    size = model_size(settings)
    free = f"preset standard: {_free(free_bytes)}"
    if size is None:
        return plain, f"{free}; what the model needs is not known before it is loaded"
    needed = need(settings, size)
    what = "base, adapters and optimizer" if settings.lora is not None else "weights, gradients and optimizer"
    words = f"{what} need {needed / _GIB:.2f} GiB"
    if fits(needed, free_bytes):
        return plain, f"{free}, {words}"
    if settings.auto_batch:
        advice = "memtop cannot offload with --batch auto; to offload, give --batch a number"
        return plain, f"{free}, {words}: too little. {advice}"
    possible: list[tuple[Preset, int]] = []
    refused: list[str] = []
    for _, preset in _rungs():
        if preset.zero is None or not preset.zero.saves_memory(1):
            continue
        try:
            possible.append((preset, need(under(preset), size)))
        except SettingsError as error:
            # What to do instead is said after the semicolon: too long for a list.
            refused.append(f"{preset.name}: {str(error).partition(';')[0]}")
    if not possible:
        why = "; ".join(refused) or "no preset of the ladder offloads"
        return plain, f"{free}, {words}: too little, but {why}"
    preset, less = next((one for one in possible if fits(one[1], free_bytes)), possible[-1])
    still = "" if fits(less, free_bytes) else f", still more than {MOST_OF_FREE:.0%} of it"
    after = f"with this offload {less / _GIB:.2f} GiB{still}"
    return preset, f"preset {preset.name}: {_free(free_bytes)}, {words}; {after}"


def _not_under_zero(under: Under, plain: Preset) -> str | None:
    """What the person asks for that ZeRO cannot do; None: nothing, or another value is wrong."""
    try:
        settings = under(plain)
    except SettingsError:
        return None  # the settings under the chosen preset are checked next
    if settings.auto_batch:
        return "--batch auto"
    return f"--batch {settings.batch_text}" if settings.rank_splits else None


def choose_by_memory(free_bytes: int | None, recipe: str = "") -> tuple[Preset, str]:
    """The preset of the ladder for this much free memory on the fullest GPU, and the reason; None:
    not known.

    Presets of the recipe's own family (QLoRA) are chosen before those of the ladder. A threshold
    belongs to the larger preset: 12 GiB and more, 6 up to 12, 4 up to 6, below 4.
    """
    if free_bytes is None:
        return load_presets()["standard"], "preset standard: the free GPU memory is not known"
    rungs = _rungs(recipe)
    at = next((n for n, (border, _) in enumerate(rungs) if free_bytes >= border * _GIB), len(rungs) - 1)
    border, preset = rungs[at]
    where = f"from {border:g} GiB on" if border > 0 else "the smallest of them"
    if at > 0:
        above = rungs[at - 1][0]
        where = f"from {border:g} up to {above:g} GiB" if border > 0 else f"below {above:g} GiB"
    return preset, f"preset {preset.name}: {_free(free_bytes)}, {where}"


def _rungs(recipe: str = "") -> list[tuple[float, Preset]]:
    """Free GiB and the preset from there on, the largest first: those of the recipe's own family,
    or the ladder."""
    known = [(preset.free_gib_from, preset) for preset in load_presets().values() if preset.free_gib_from is not None]
    own = [rung for rung in known if rung[1].family != "ladder" and recipe in rung[1].recipes]
    return sorted(own or [rung for rung in known if rung[1].family == "ladder"], key=lambda rung: -rung[0])


def _free(size: int) -> str:
    # Rounded down: 11.999 GiB is not 12.
    return f"{math.floor(size / _GIB * 100) / 100:.2f} GiB of GPU memory free"
