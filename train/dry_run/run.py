"""Foresees the peaks of a training's GPU memory: `foresee`."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from memtop.presets.allocator import MIB, Allocator, CannotFit
from memtop.presets.checks import wrong_value
from memtop.presets.schema import Zero
from memtop.presets.sequence import Phase
from memtop.train import BadInputError, UnknownModelError, objective
from memtop.train.dry_run.build import (
    DTYPES,
    Training,
    build_on_host,
    config_of,
    empty,
    layers_of,
    make_fake,
    meta_model,
    with_layers,
)
from memtop.train.dry_run.cuda import allocating_like_cuda, backward, kernels
from memtop.train.dry_run.layers import SHALLOW, deepened
from memtop.train.dry_run.trace import Component, Recorded, Trace
from memtop.train.dry_run.zero import Memory, ZeroStage1InBf16
from memtop.train.dry_run.zero3 import FUNCTIONS, ZeroStage3
from memtop.train.dry_run.zero12 import ZeroStages1And2
from memtop.train.exchange import BUCKET_BYTES, RING, plan_buckets
from memtop.train.model import brief
from memtop.train.objective import Objective
from memtop.train.optimizers import build_optimizer

FreeBytes = Callable[[torch.device], int | None]
_PIECES = 4
_UPDATES = 2
"""The first update allocates the moments; later ones are like the second."""


class Peak(msgspec.Struct, frozen=True):
    """The most bytes of a phase, in any update."""

    phase: Phase
    allocated: int
    reserved: int


class HostMemory(msgspec.Struct, frozen=True):
    """The most bytes of tensors in host memory of one process: not of Python and its libraries,
    nor of data loaders."""

    allocated: int
    pinned: int
    """Of these, page-locked. torch rounds each block up to a power of two, and keeps blocks that
    nothing uses."""
    components: dict[Component, int]
    """The sum is `allocated`."""


class Foresight(msgspec.Struct, frozen=True, kw_only=True):
    """In bytes, as torch counts them: without the CUDA context and NCCL."""

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
    host: HostMemory | None
    """None without ZeRO: then only the GPU's memory is foreseen."""
    seconds: float


def foresee(training: Training) -> Foresight:
    """The memory of this training; BadInputError if it cannot be built or run."""
    began = time.perf_counter()
    if training.loss == "pieces" and training.loss_chunk < 0 and training.capacity is None:
        raise BadInputError("loss_chunk -1: is chosen by the GPU's memory; give a capacity, or the tokens of a piece")
    trace = _traced(training)
    capacity = training.capacity
    fits, lacking, retries = None, None, 0
    if capacity is not None:
        limited = Allocator(expandable=training.expandable_segments, capacity=capacity)
        try:
            phases, peak, components = _replayed(trace, limited)
            fits, retries = True, limited.retries
        except CannotFit as error:
            fits, lacking, retries, capacity = False, _lacking(trace, error, capacity), limited.retries, None
    if capacity is None:
        phases, peak, components = _replayed(trace, Allocator(expandable=training.expandable_segments))
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
        host=_host(trace) if training.zero.stage else None,
        seconds=time.perf_counter() - began,
    )


def needing_most(training: Training) -> Training:
    """The same in the process that needs the most memory. With ZeRO-1 and 2 that is the last one,
    if it has the gradient of a head with weights of its own: it keeps that from the beginning of
    the backward pass on."""
    config = config_of(training)
    has_head = training.method == "full" and not getattr(config, "tie_word_embeddings", True)
    last = training.zero.stage in (1, 2) and has_head
    return msgspec.structs.replace(training, rank=training.world_size - 1 if last else 0)


def _traced(training: Training) -> Recorded:
    config = config_of(training)
    layers = layers_of(config)
    if (
        training.loss == "pieces"
        and training.loss_chunk
        and _computes_whole_logits(training, config if layers is None else with_layers(config, 1))
    ):
        training = msgspec.structs.replace(training, loss_chunk=0)
    # DeepSpeed's buckets and gathered weights do not begin and end with a layer.
    if training.zero.stage or layers is None or layers <= sum(SHALLOW):
        return recorded(training, config)[0]
    live: list[int] | None = None
    if training.loss == "pieces" and training.loss_chunk < 0:
        # How much memory is free decides the pieces, so it must be that of the deep model.
        one, two = (recorded(training, with_layers(config, count))[1] for count in (1, 2))
        if len(one) != len(two):
            return recorded(training, config)[0]
        live = [more + (more - less) * (layers - 2) for less, more in zip(one, two, strict=True)]
    ring = ring_bytes(training, meta_model(training, config))
    shallow, deeper = (recorded(training, with_layers(config, count), live, ring)[0] for count in SHALLOW)
    return deepened(shallow, deeper, layers) or recorded(training, config)[0]


def _computes_whole_logits(training: Training, config: Any) -> bool:
    """Whether the logits are not what the head gives, which the loss in pieces needs."""
    plain = msgspec.structs.replace(training, method="full", gradient_checkpointing=False, zero=Zero())
    model, trace, mode = _to_run(plain, config)
    with _blaming_model(config), torch.random.fork_rng(devices=[]):
        with mode:
            make_fake(model, mode, trace, DTYPES[training.weights])
        with allocating_like_cuda(training.generation, training.attention):
            return Objective(model, seq2seq=training.task == "seq2seq", chunk=1).chunk == 0


def recorded(
    training: Training, config: Any, live: list[int] | None = None, ring: int | None = None
) -> tuple[Recorded, list[int]]:
    """The trace, and the bytes that were allocated each time that the loss asked for the free
    memory. `live`: those that count instead, each time. `ring`: the bytes of the buckets for
    gradients; None: those that this model needs. The logits are what the head gives, or
    `loss_chunk` is 0."""
    model, trace, mode = _to_run(training, config)
    if ring is None:
        ring = ring_bytes(training, model)
    asked: list[int] = []

    def free(device: torch.device) -> int | None:
        asked.append(trace.live_bytes)
        allocated = asked[-1] if live is None else live[len(asked) - 1]
        return None if training.capacity is None else max(0, training.capacity - allocated)

    with _blaming_model(config), _few_pieces(), torch.random.fork_rng(devices=[]), mode, trace:
        _load(training, model, mode, trace)
        # What exists at the end is released after the trace.
        kept = _train(training, model, mode, trace, free, ring)
    del kept
    return trace.recorded, asked


def _to_run(training: Training, config: Any) -> tuple[Any, Trace, FakeTensorMode]:
    model = meta_model(training, config)
    trace = Trace(kernels(training.generation), config.get_text_config().vocab_size)
    return model, trace, FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def _blaming_model(config: Any) -> Iterator[None]:
    """Say that a model cannot be foreseen if it cannot run on tensors without contents."""
    try:
        with _without_reports():
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _unforeseeable(config, "what it allocates depends on the numbers in its tensors") from error
    # A model can fail at anything, and so can a tensor without contents.
    except Exception as error:
        if (wrong := wrong_value(config.to_dict())) is not None:
            raise BadInputError(wrong) from error
        why = f"it fails in a dry run, perhaps only there: {type(error).__name__}: {brief(error)}"
        raise _unforeseeable(config, why) from error


def _unforeseeable(config: Any, why: str) -> UnknownModelError:
    what = f"the memory of a {config.model_type} model cannot be foreseen with these values"
    return UnknownModelError(f"model.config: {what}: {why}; a short run would measure it")


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


@contextmanager
def _few_pieces() -> Iterator[None]:
    """Leave out pieces of the loss that do what the one before did. With little memory there are
    thousands; the first, the second and the last one differ."""
    own = objective._pieces

    def pieces(count: int, chunk: int) -> list[slice]:
        found = own(count, chunk)
        return found if len(found) <= _PIECES else [*found[: _PIECES - 1], found[-1]]

    objective._pieces = pieces
    try:
        yield
    finally:
        objective._pieces = own


def _load(training: Training, model: Any, mode: FakeTensorMode, trace: Trace) -> None:
    """The model comes to the GPU."""
    if training.sharded_when_read:
        # Only its parts do.
        with trace.elsewhere():
            make_fake(model, mode, trace, DTYPES[training.weights])
        return
    on_host = build_on_host(model, mode, trace, DTYPES[training.built_in]) if training.zero.stage else []
    make_fake(model, mode, trace, DTYPES[training.weights])
    del on_host


def _train(training: Training, model: Any, mode: FakeTensorMode, trace: Trace, free: FreeBytes, ring: int) -> Any:
    """Do the updates; return what holds memory after them."""
    # What they look at in the beginning has numbers.
    with _disable_current_modes():
        step = _WholeLoss(training, model) if training.loss == "whole" else _LossInPieces(training, model, free)
    engine = _engine(training, step, model, mode, trace, free, ring)
    answers = FUNCTIONS if training.zero.stage == 3 else {}
    with allocating_like_cuda(training.generation, training.attention, answers):
        for update in range(_UPDATES):
            # In later micro-batches than the first, gradients exist.
            micro_batches = min(training.accumulation, 1 + update)
            for number in range(micro_batches):
                with trace.phase("forward"), _autocast(training):
                    engine.before_forward()
                    loss, outputs = step(_batch(training, mode, trace))
                with trace.phase("backward"):
                    loss = engine.scaled(loss)
                    engine.before_backward(last=number + 1 == micro_batches)
                    backward(loss)
                    engine.after_backward()
                    if training.outputs_until == "backward":
                        outputs = None
            with trace.phase("optimizer"):
                engine.step()
                if training.outputs_until != "next":
                    del loss, outputs
    return engine


class _Plain:
    """One process, or several with a whole model each that sum their gradients before the step."""

    def __init__(self, training: Training, model: Any, mode: FakeTensorMode, trace: Trace, ring: int) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(lambda parameter: trace.count(parameter.grad, "gradients"))
        self._ring = empty(mode, (ring,), torch.uint8)
        trace.count(self._ring, "buckets" if training.ddp else "workspace")
        with _disable_current_modes():
            self._optimizer = _optimizer(training, self._parameters, model.config, trace)
        self._takes_norm = training.loss == "pieces"
        self._keeps = training.keep_gradients

    def before_forward(self) -> None:
        """Do nothing."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def before_backward(self, *, last: bool) -> None:
        """Do nothing."""

    def after_backward(self) -> None:
        """Do nothing."""

    def step(self) -> None:
        if self._takes_norm:
            torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=not self._keeps)


def _engine(
    training: Training, step: Any, model: Any, mode: FakeTensorMode, trace: Trace, free: FreeBytes, ring: int
) -> _Plain | ZeroStage1InBf16 | ZeroStages1And2 | ZeroStage3:
    if not training.zero.stage:
        return _Plain(training, model, mode, trace, ring)
    memory = Memory(mode, trace, pins=training.pin_memory)

    def optimizer_of(parameters: list[torch.Tensor]) -> Any:
        with _disable_current_modes():
            return _optimizer(training, parameters, model.config, trace)

    if training.zero.stage == 3:
        return ZeroStage3(training, step.root, model, memory, optimizer_of)
    if training.zero.stage == 1 and training.weights == "bf16" and not training.zero.offload_optimizer:
        return ZeroStage1InBf16(training, model, memory, optimizer_of)
    return ZeroStages1And2(training, model, memory, optimizer_of, lambda: free(torch.device("cpu")))


def ring_bytes(training: Training, model: Any) -> int:
    """Of the buckets through which several processes sum their gradients without ZeRO; 0 with one
    process. Those of the built-in trainer hold only small gradients."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if training.world_size == 1:
        return 0
    if training.ddp:
        return sum(parameter.nbytes for parameter in parameters)
    sizes = [bucket.size_bytes for bucket in plan_buckets(parameters, BUCKET_BYTES)]
    return min(RING, len(sizes)) * max(sizes, default=0)


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
        self.root = Objective(
            model,
            seq2seq=training.task == "seq2seq",
            chunk=training.loss_chunk,
            free=free,
            plain=True,
        )

    def __call__(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        return self.root(**batch) / batch["labels"].numel(), None


class _WholeLoss:
    """The forward pass of Hugging Face's Trainer, or of a loop that keeps the model's outputs."""

    def __init__(self, training: Training, model: Any) -> None:
        self.root = model
        self._keeps = training.outputs_until != "loss"
        self._widens = training.autocast is not None and not self._keeps

    def __call__(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        outputs = self.root(**batch, use_cache=False)
        if self._widens:
            # accelerate's mixed precision gives outputs in fp32.
            outputs["logits"] = outputs["logits"].float()
        return outputs["loss"], outputs if self._keeps else None


def _optimizer(training: Training, parameters: list[Any], config: Any, trace: Trace) -> Any:
    if training.optimizer == "adamw_foreach":
        return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    optimizer: Any = build_optimizer(training.settings(config), parameters)
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


def _replayed(trace: Recorded, allocator: Allocator) -> tuple[tuple[Peak, ...], int, dict[Component, int]]:
    """The peaks of each phase, the event at which most is allocated, and what is allocated then."""
    blocks: dict[int, int] = {}
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
            found = trace.allocations[event]
            if found.place != "gpu":
                continue
            allocator.allocate(event, found.size, found.stream)
            blocks[event] = allocator.block_bytes(event)
            if allocator.allocated > highest:
                highest, at = allocator.allocated, place
        before = peaks.get(phase, Peak(phase, 0, 0))
        allocated, reserved = allocator.peak_allocated, allocator.peak_reserved
        peaks[phase] = Peak(phase, max(before.allocated, allocated), max(before.reserved, reserved))
    return tuple(peaks.values()), at, _components(trace, at, blocks)


def _components(trace: Recorded, peak: int, blocks: dict[int, int]) -> dict[Component, int]:
    """The blocks that are in use after this event, by what they are for."""
    alive: dict[int, None] = {}
    for event in trace.events[: peak + 1]:
        if event < 0:
            alive.pop(~event, None)
        else:
            alive[event] = None
    found: Counter[Component] = Counter()
    for number in alive:
        found[trace.allocations[number].component] += blocks.get(number, 0)
    return dict((+found).most_common())


def _host(trace: Recorded) -> HostMemory:
    """The most that exists in host memory at one time."""
    live: Counter[Component] = Counter()
    unused: Counter[int] = Counter()
    pinned = 0
    highest = HostMemory(0, 0, {})
    for event in trace.events:
        found = trace.allocations[event if event >= 0 else ~event]
        if found.place == "gpu" or not found.size:
            continue
        size = found.size if found.place == "host" else 1 << (found.size - 1).bit_length()
        if event < 0:
            live[found.component] -= size
        else:
            live[found.component] += size
        if found.place == "pinned":
            if event < 0 or unused[size]:
                unused[size] += 1 if event < 0 else -1
                live["cached"] += size if event < 0 else -size
            else:
                pinned += size
        if live.total() > highest.allocated:
            highest = HostMemory(live.total(), pinned, dict((+live).most_common()))
    return highest


def _lacking(trace: Recorded, error: CannotFit, capacity: int) -> str:
    phase = _phase_at(trace, trace.events.index(error.key))
    operation = trace.allocations[error.key].operation
    sizes = [round(size / MIB) for size in (error.size, error.allocated, capacity)]
    return f"{phase}: {operation} needs {sizes[0]} MiB, with {sizes[1]} MiB of {sizes[2]} MiB allocated"


def _phase_at(trace: Recorded, place: int) -> Phase:
    return next(phase for start, phase in reversed(trace.phases) if start <= place)
