"""Foresees the peaks of a training's GPU memory: `foresee`."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes

from memtop.train import BadInputError
from memtop.train.dry_run.allocator import MIB, Allocator, CannotFit
from memtop.train.dry_run.build import DTYPES, Training, config_of, empty, layers_of, make_fake, meta_model, with_layers
from memtop.train.dry_run.cuda import allocating_like_cuda, backward, kernels
from memtop.train.dry_run.layers import SHALLOW, deepened
from memtop.train.dry_run.trace import Component, Phase, Recorded, Trace
from memtop.train.exchange import BUCKET_BYTES, RING, plan_buckets
from memtop.train.model import brief
from memtop.train.objective import Objective
from memtop.train.optimizers import build_optimizer

FreeBytes = Callable[[torch.device], int | None]
_UPDATES = 2
"""The first update allocates the moments; later ones are like the second."""


class Peak(msgspec.Struct, frozen=True):
    """The most bytes of a phase, in any update."""

    phase: Phase
    allocated: int
    reserved: int


class Foresight(msgspec.Struct, frozen=True, kw_only=True):
    """In bytes, as torch counts them: without the CUDA context."""

    allocated: int
    reserved: int
    phases: tuple[Peak, ...]
    peak_phase: Phase
    peak_operation: str
    """What allocated last before the peak."""
    components: dict[Component, int]
    """What is allocated at the peak; the sum is `allocated`."""
    fits: bool | None
    """Whether the training runs in the given capacity; None: no capacity was given."""
    lacking: str | None
    """Where it does not fit, as one line."""
    retries: int
    """How often the allocator has to give back unused memory to stay below the capacity: slow."""
    seconds: float


def foresee(training: Training) -> Foresight:
    """The memory of this training; BadInputError if it cannot be built or run."""
    began = time.perf_counter()
    trace = _traced(training)
    capacity = training.capacity
    fits, lacking, retries = None, None, 0
    if capacity is not None:
        limited = Allocator(expandable=training.expandable_segments, capacity=capacity)
        try:
            phases, peak = _replayed(trace, limited)
            fits, retries = True, limited.retries
        except CannotFit as error:
            fits, lacking, retries, capacity = False, _lacking(trace, error, capacity), limited.retries, None
    if capacity is None:
        phases, peak = _replayed(trace, Allocator(expandable=training.expandable_segments))
    components = _components(trace, peak, Allocator(expandable=training.expandable_segments, capacity=capacity))
    return Foresight(
        allocated=sum(components.values()),
        reserved=max(found.reserved for found in phases),
        phases=phases,
        peak_phase=_phase_at(trace, peak),
        peak_operation=trace.allocations[trace.events[peak]].operation,
        components=components,
        fits=fits,
        lacking=lacking,
        retries=retries,
        seconds=time.perf_counter() - began,
    )


def _traced(training: Training) -> Recorded:
    config = config_of(training)
    layers = layers_of(config)
    if layers is None or layers <= sum(SHALLOW):
        return recorded(training, config)[0]
    live: list[int] | None = None
    if training.loss == "pieces" and training.loss_chunk < 0:
        # How much memory is free decides the pieces, so it must be that of the deep model.
        one, two = (recorded(training, with_layers(config, count))[1] for count in (1, 2))
        if len(one) != len(two):
            return recorded(training, config)[0]
        live = [more + (more - less) * (layers - 2) for less, more in zip(one, two, strict=True)]
    shallow, deeper = (recorded(training, with_layers(config, count), live)[0] for count in SHALLOW)
    return deepened(shallow, deeper, layers) or recorded(training, config)[0]


def recorded(training: Training, config: Any, live: list[int] | None = None) -> tuple[Recorded, list[int]]:
    """The trace, and the bytes that were allocated each time that the loss asked for the free
    memory. `live`: those that count instead, each time."""
    model = meta_model(training, config)
    trace = Trace(kernels(training.generation), config.get_text_config().vocab_size)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    asked: list[int] = []

    def free(device: torch.device) -> int | None:
        asked.append(trace.live_bytes)
        allocated = asked[-1] if live is None else live[len(asked) - 1]
        return None if training.capacity is None else max(0, training.capacity - allocated)

    try:
        with _without_reports(), torch.random.fork_rng(devices=[]), mode, trace:
            make_fake(model, mode, trace, DTYPES[training.weights])
            _train(training, model, mode, trace, free)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _unforeseeable(config, "what it allocates depends on the numbers in its tensors", error) from error
    # A model can fail at anything, and so can a tensor without contents.
    except Exception as error:
        raise _unforeseeable(config, type(error).__name__, error) from error
    return trace.recorded, asked


def _unforeseeable(config: Any, why: str, error: Exception) -> BadInputError:
    return BadInputError(
        f"model.config: the memory of a {config.model_type} model cannot be foreseen with these values: {why}: {brief(error)}"
    )


@contextmanager
def _without_reports() -> Iterator[None]:
    """Let torch not log operations that fail with fake tensors: the error says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = was


def _train(training: Training, model: Any, mode: FakeTensorMode, trace: Trace, free: FreeBytes) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda parameter: trace.count(parameter.grad, "gradients"))
    ring = _ring(training, parameters, mode, trace)
    # What they look at in the beginning has numbers.
    with _disable_current_modes():
        optimizer = _optimizer(training, model, trace)
        step = _WholeLoss(training, model) if training.loss == "whole" else _LossInPieces(training, model, free)
    with allocating_like_cuda(training.generation, training.attention):
        for update in range(_UPDATES):
            # In later micro-batches than the first, gradients exist.
            for _ in range(min(training.accumulation, 1 + update)):
                with trace.phase("forward"), _autocast(training):
                    loss, outputs = step(_batch(training, mode, trace))
                with trace.phase("backward"):
                    backward(loss)
                    if training.outputs_until == "backward":
                        outputs = None
            with trace.phase("optimizer"):
                if training.loss == "pieces":
                    torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
                optimizer.step()
                optimizer.zero_grad(set_to_none=not training.keep_gradients)
                del loss, outputs
    del ring


def _ring(training: Training, parameters: Sequence[torch.Tensor], mode: FakeTensorMode, trace: Trace) -> torch.Tensor | None:
    """The buckets through which several processes sum their small gradients."""
    if training.world_size == 1:
        return None
    sizes = [bucket.size_bytes for bucket in plan_buckets(parameters, BUCKET_BYTES)]
    ring = empty(mode, (min(RING, len(sizes)), max(sizes, default=0)), torch.uint8)
    trace.count(ring, "workspace")
    return ring


def _autocast(training: Training) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", DTYPES[training.autocast]) if training.autocast else nullcontext()


def _batch(training: Training, mode: FakeTensorMode, trace: Trace) -> dict[str, torch.Tensor]:
    inputs = (training.batch, training.seq_len)
    labels = (training.batch, (training.label_len or training.seq_len) if training.task == "seq2seq" else training.seq_len)
    # The built-in trainer leaves the mask out where causal attention does not see the padding.
    masked = training.padded and (training.task == "seq2seq" or training.loss == "whole")
    shapes = {"input_ids": inputs, "labels": labels, **({"attention_mask": inputs} if masked else {})}
    found = {name: empty(mode, shape, torch.long) for name, shape in shapes.items()}
    for tensor in found.values():
        trace.count(tensor, "activations")
    return found


class _LossInPieces:
    """The forward pass of the built-in trainer."""

    def __init__(self, training: Training, model: Any, free: FreeBytes) -> None:
        self._objective = Objective(
            model,
            seq2seq=training.task == "seq2seq",
            chunk=training.loss_chunk,
            free=free,
        )

    def __call__(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        return self._objective(**batch) / batch["labels"].numel(), None


class _WholeLoss:
    """The forward pass of Hugging Face's Trainer, or of a loop that keeps the model's outputs."""

    def __init__(self, training: Training, model: Any) -> None:
        self._model = model
        self._keeps = training.outputs_until != "loss"
        self._widens = training.autocast is not None and not self._keeps

    def __call__(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        outputs = self._model(**batch, use_cache=False)
        if self._widens:
            # accelerate's mixed precision gives outputs in fp32.
            outputs["logits"] = outputs["logits"].float()
        return outputs["loss"], outputs if self._keeps else None


def _optimizer(training: Training, model: Any, trace: Trace) -> Any:
    if training.optimizer == "adamw_foreach":
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, foreach=True)
    optimizer: Any = build_optimizer(training.settings(model.config), model.parameters())
    if hasattr(optimizer, "get_state_buffer"):
        optimizer.fill_qmap()
    if getattr(optimizer, "is_paged", False):
        optimizer.is_paged = False
        own = optimizer.get_state_buffer

        def get_state_buffer(parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            # bitsandbytes' own limit. Paged memory is CUDA's, not torch's, and moves to the host.
            if parameter.numel() < 1e5:
                return own(parameter, dtype=dtype)  # type: ignore[no-any-return]
            with trace.elsewhere():
                return own(parameter, dtype=dtype)  # type: ignore[no-any-return]

        optimizer.get_state_buffer = get_state_buffer
    return optimizer


def _replayed(trace: Recorded, allocator: Allocator) -> tuple[tuple[Peak, ...], int]:
    """The peaks of each phase, and the event at which most is allocated."""
    peaks: dict[Phase, Peak] = {}
    highest = at = 0
    ends = [start for start, _ in trace.phases[1:]] + [len(trace.events)]
    for (start, phase), end in zip(trace.phases, ends, strict=True):
        allocator.reset_peaks()
        for place in range(start, end):
            event = trace.events[place]
            if event < 0:
                allocator.release(~event)
                continue
            allocator.allocate(event, trace.allocations[event].size)
            if allocator.allocated > highest:
                highest, at = allocator.allocated, place
        before = peaks.get(phase, Peak(phase, 0, 0))
        allocated, reserved = allocator.peak_allocated, allocator.peak_reserved
        peaks[phase] = Peak(phase, max(before.allocated, allocated), max(before.reserved, reserved))
    return tuple(peaks.values()), at


def _components(trace: Recorded, peak: int, allocator: Allocator) -> dict[Component, int]:
    """The blocks that are in use after this event, by what they are for."""
    alive: dict[int, None] = {}
    for event in trace.events[: peak + 1]:
        if event < 0:
            allocator.release(~event)
            del alive[~event]
        else:
            allocator.allocate(event, trace.allocations[event].size)
            alive[event] = None
    found: Counter[Component] = Counter()
    for number in alive:
        found[trace.allocations[number].component] += allocator.block_bytes(number)
    return dict(found.most_common())


def _lacking(trace: Recorded, error: CannotFit, capacity: int) -> str:
    phase = _phase_at(trace, trace.events.index(error.key))
    operation = trace.allocations[error.key].operation
    sizes = [round(size / MIB) for size in (error.size, error.allocated, capacity)]
    return f"{phase}: {operation} needs {sizes[0]} MiB, with {sizes[1]} MiB of {sizes[2]} MiB allocated"


def _phase_at(trace: Recorded, place: int) -> Phase:
    return next(phase for start, phase in reversed(trace.phases) if start <= place)
