"""The host memory of a whole run before it starts, estimated in about a millisecond and without
torch.

It is the PSS of the run's processes together, which the supervisor measures (`run_memory.py`) and
shows as the run's host memory: the ranks, their loader workers, torchrun and memtop's shim, but
neither the supervisor nor dashboards. Files that a process has mapped count as far as they are
resident: `mapped weights` and `libraries`. Other files that the kernel keeps (the page cache of the
data) do not count. A model's file that is read once is only in `with_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from memtop.presets.architectures import CPU, shape_of
from memtop.presets.estimate import Estimate, estimate
from memtop.presets.host_memory import host_plan
from memtop.presets.logits import CHUNK_BYTES
from memtop.presets.parameters import TRAINED_BYTES
from memtop.presets.schema import Settings, Zero

HostComponent = Literal[
    "programs",
    "libraries",
    "launcher",
    "loader workers",
    "data",
    "weights",
    "mapped weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "temporary",
    "exchange",
    "copy for saving",
    "unused heap",
]
_MIB = 1 << 20

# Measured with `bench/host_memory.py` on Linux x86-64: Python 3.11, torch 2.13 (CPU build),
# transformers 5.23, accelerate 1.15, peft 0.21, DeepSpeed 0.19, glibc 2.36. Private memory after
# the imports and after the first micro-batch of the smallest model.
_PROGRAM = 260 * _MIB
_LIBRARIES = 89 * _MIB
"""Mapped files of torch and the others, which all ranks share."""
_ARROW = 33 * _MIB
"""Those of Arrow, for parquet files. The data itself is in the page cache."""
_SHIM = 4 * _MIB
_TORCHRUN = 170 * _MIB
_PEFT = 55 * _MIB
_DEEPSPEED = 60 * _MIB
_WORKER = 18 * _MIB
"""A forked loader worker: the pages of the rank that it or the rank has written to since."""
_PROGRAM_CUDA = 1792 * _MIB
"""Private memory of a process of a CUDA build with its context. An assumption in the middle of what
is published: it was not measured."""
_CUDA_BETWEEN = (1024 * _MIB, 2560 * _MIB)
_SURE = (0.88, 1.12)
"""On a CPU, the true peak divided by the estimate, at the least and at the most."""
_LARGEST_BLOCK = 32 * _MIB
"""On a CPU, the C library keeps freed blocks up to this size: see train/agent/memory.py."""
_FEWER_GAPS = 0.75
"""Between 0.5 and 0.85 in the runs that were measured."""
_STDLIB_BYTES = 11_000_000
"""The sources of the standard library without tests."""


class HostEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """In bytes, of all processes of a run on this machine."""

    peak: int
    least: int
    """The true peak is hardly below it, and hardly above `most`."""
    most: int
    components: dict[HostComponent, int]
    """What there is at the peak; the sum is `peak`."""
    with_files: int
    """The most that is measured: also the pages of the model's file while it is read, which the
    kernel drops if memory is short."""
    parameters: int
    """Of the model, without adapters."""
    trained: int
    """Of these, or of the adapters."""


def host_estimate(settings: Settings, config: Mapping[str, Any], *, on_gpu: bool, available: int | None = None) -> HostEstimate:
    """The host memory of a run of the built-in trainer; UnknownMemoryError, with the reason as one
    line, if it cannot be estimated.

    `config`: the values of the model's Hugging Face configuration, with `model_type`. `available`:
    bytes of host memory that are free before the start, which decide how the trainer uses it
    (`host_memory.py`) and whether it copies the state for saving; None: enough for all.
    """
    return _Run(settings, config, on_gpu=on_gpu).estimate(available)


class _Run:
    def __init__(self, settings: Settings, config: Mapping[str, Any], *, on_gpu: bool) -> None:
        self.config = config
        self.on_gpu = on_gpu
        self.shape = shape_of(config)
        if settings.precision == "auto":
            settings = replace(settings, precision="bf16" if on_gpu else "fp32")
        if settings.rank_splits:
            # Every process like the one with the largest micro-batch.
            settings = replace(settings, rank_splits=())
        self.settings = settings
        plain = replace(settings, zero=Zero(), optimizer="adamw", world_size=1)
        # AdamW has two fp32 moments for each trained number.
        adapted = self._of(plain)
        self.trained = adapted.components["optimizer"] // 8
        whole = replace(plain, method="full", lora=None, precision="fp32")
        full = self._of(whole)
        self.all = full.components["weights"] // 4
        self.counts = full.numbers, adapted.trained

    def estimate(self, available: int | None) -> HostEstimate:
        settings, processes = self.settings, self.settings.world_size
        at_start = self._together(self._loading(), 0)
        workers, pins = settings.workers, settings.pin_memory is not False
        if available is not None:
            # As train/run.py and train/zero.py: after the model is loaded, less what is offloaded.
            workers = host_plan(settings, max(0, available - _kept(at_start)), on_gpu=self.on_gpu).workers
            pins = host_plan(settings, max(0, available - TRAINED_BYTES * self.trained), on_gpu=self.on_gpu).pin_memory
        in_training = self._together(self._training(pins=pins and self.on_gpu), workers)
        # In blocks: see train/host_copy.py. As much again stays free.
        copy = 12 * self.trained + _MIB
        copy += -copy % (64 * _MIB) if self.on_gpu else 0
        left = None if available is None else available - _kept(in_training)
        if left is None or left >= copy + max(512 * _MIB, copy):
            in_training["copy for saving"] = copy
        with_files = max(sum(at_start.values()), sum(in_training.values()))
        at_start.pop("mapped weights", None)
        top = max(at_start, in_training, key=lambda parts: sum(parts.values()))
        components: dict[HostComponent, int] = {name: size for name, size in top.items() if size}
        peak = sum(components.values())
        if self.on_gpu:
            least, most = (peak + processes * (size - _PROGRAM_CUDA) for size in _CUDA_BETWEEN)
        else:
            least, most = (round(peak * part) for part in _SURE)
        return HostEstimate(
            peak=peak,
            least=least,
            most=most,
            components=components,
            with_files=with_files,
            parameters=self.counts[0],
            trained=self.counts[1],
        )

    # --- the parts

    def _together(self, of_rank: dict[HostComponent, int], workers: int) -> dict[HostComponent, int]:
        """Those of all processes, with what there is once. `workers`: of each loader."""
        processes = self.settings.world_size
        found: dict[HostComponent, int] = {name: processes * size for name, size in of_rank.items()}
        if "mapped weights" in found:
            # Of one file, which all ranks map.
            found["mapped weights"] //= processes
        found["programs"] = processes * self._program() + _SHIM
        found["libraries"] = _LIBRARIES + (_ARROW if str(self.settings.data.get("train")).endswith(".parquet") else 0)
        found["launcher"] = _TORCHRUN if processes > 1 or self.settings.zero.stage else 0
        found["data"] = processes * self._data()
        found["loader workers"] = processes * workers * _WORKER
        return found

    def _program(self) -> int:
        size = _PROGRAM_CUDA if self.on_gpu else _PROGRAM
        size += _PEFT if self.settings.lora is not None else 0
        return size + (_DEEPSPEED if self.settings.zero.stage else 0)

    def _data(self) -> int:
        """Texts of the standard library are in memory, in 16 bits, and were there twice while they
        were put together. Files are mapped: the page cache has them."""
        if self.settings.data.get("train"):
            return 0
        return 4 * min(int(self.settings.data.get("max_bytes", _STDLIB_BYTES)), _STDLIB_BYTES)

    def _loading(self) -> dict[HostComponent, int]:
        """While the model is read or made, before the first update."""
        stored = self._file_bytes()
        made = 4 if self.settings.method == "full" or not stored else self._compute_bytes()
        if stored and self.settings.method == "qlora":
            return {"mapped weights": stored, "weights": 0 if self.on_gpu else self.all * 9 // 16}
        if stored == made * self.all:
            return {"mapped weights": stored}
        return {"mapped weights": stored, "weights": made * self.all}

    def _file_bytes(self) -> int:
        """Of the model's files; 0: it is new."""
        if not self.settings.model.get("path"):
            return 0
        kind = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32")
        return self.all * (2 if kind.endswith("16") else 4)

    def _compute_bytes(self) -> int:
        return 4 if self.settings.precision == "fp32" else 2

    def _training(self, *, pins: bool) -> dict[HostComponent, int]:
        parts = self._offloaded(pins=pins)
        if self.on_gpu:
            return parts
        settings = self.settings
        found = self._of(replace(settings, loss_chunk=self._chunk()))
        own = found.components
        for name in ("weights", "gradients", "optimizer", "activations", "logits", "temporary"):
            parts[name] = parts.get(name, 0) + own[name]
        parts["exchange"] = own["workspace"]
        if settings.method == "lora" and self._file_bytes() == self._compute_bytes() * self.all:
            # What is not changed stays in the mapped file.
            parts["mapped weights"] = self._file_bytes()
            parts["weights"] -= parts["mapped weights"]
        # The heap does not shrink, and gradients use only a part of what activations leave there.
        resident = 4 * self.trained if settings.accumulation > 1 or settings.zero.stage else 0
        fixed = own["weights"] + own["optimizer"] + own["workspace"]
        most = max(own["activations"], found.peaks["forward"] - fixed - resident - own["logits"])
        parts["unused heap"] = self._kept_by_heap(most)
        if (
            own["logits"]
            and settings.batch * settings.seq_len * self.shape.vocabulary * self._compute_bytes() <= _LARGEST_BLOCK
        ):
            parts["unused heap"] += own["logits"]
        return parts

    def _chunk(self) -> int:
        """Tokens whose logits exist at one time; 0: all. See train/objective.py."""
        settings = self.settings
        chunk = settings.loss_chunk if settings.loss_chunk >= 0 else max(1, CHUNK_BYTES // (4 * self.shape.vocabulary))
        return 0 if chunk >= settings.batch * settings.seq_len else chunk

    def _kept_by_heap(self, activations: int) -> int:
        """How much larger the heap is than so many bytes of activations in it.

        The C library keeps small blocks, but uses an aligned block again for a smaller one only
        (glibc 2.38 and newer do better). So what is temporary leaves gaps, and the heap grows by
        about the activations once more. Without adapters, which make more that is temporary, and
        without gradients of an earlier micro-batch in between, it grows less.
        """
        shape, settings, item = self.shape, self.settings, self._compute_bytes()
        tokens, layers = settings.batch * settings.seq_len, shape.layers + shape.decoder_layers
        if item * tokens * shape.hidden > _LARGEST_BLOCK:
            return 0
        # How often a layer keeps a tensor of this many numbers for each token.
        wide = [(4 if shape.gated else 3, shape.inner)]
        if shape.buckets or shape.attention_dropout:
            wide.append((4, shape.heads * settings.seq_len))
        layers = 1 if settings.gradient_checkpointing else layers
        large = sum(times * width for times, width in wide if item * tokens * width > _LARGEST_BLOCK)
        small = max(0, activations - large * item * tokens * layers)
        return round(_FEWER_GAPS * small) if settings.method == "full" and settings.accumulation == 1 else small

    def _offloaded(self, *, pins: bool) -> dict[HostComponent, int]:
        """What the optimizer and DeepSpeed move to the host memory of one rank. `pins`: buffers are
        page-locked.

        See train/dry_run/zero12.py and zero3.py, with which a test compares it.
        """
        settings, zero, shape = self.settings, self.settings.zero, self.shape
        parts: dict[HostComponent, int] = {}
        if settings.optimizer == "paged_adamw_8bit" and self.on_gpu:
            # On the GPU as long as there is room: here is what the host must hold if there is not.
            parts["optimizer"] = self.trained * 2 + self.trained * 8 // 256
        if not (zero.offload_optimizer or zero.offload_parameters):
            return parts
        item, part = self._compute_bytes(), -(-self.trained // settings.world_size)
        if zero.offload_optimizer:
            moments, master = 8 * part, 4 * part
            sums = page_locked(4 * part) if pins else 4 * part
            if zero.stage == 3:
                parts["optimizer"], parts["gradients"] = moments + master, 2 * sums
            else:
                lora = settings.lora
                largest = shape.vocabulary * shape.hidden if lora is None else lora.r * max(shape.hidden, shape.inner)
                earlier = item * part if settings.accumulation > 1 and zero.stage == 2 else 0
                sizes = (item * part, item * largest)
                updated, one = map(page_locked, sizes) if pins else sizes
                parts["optimizer"] = moments + (page_locked(master) if pins else master)
                parts["gradients"], parts["weights"] = sums + one + earlier, updated
        if zero.offload_parameters:
            # Those that are trained are in one page-locked buffer, always.
            frozen = max(0, self.all - (0 if settings.lora else self.trained))
            parts["weights"] = page_locked(item * part) + item * frozen // settings.world_size
            if pins:
                # torch keeps the page-locked blocks of the single weights.
                parts["weights"] += item * part
        return parts

    def _of(self, settings: Settings) -> Estimate:
        return estimate(settings, self.config, generation=80 if self.on_gpu else CPU)


def _kept(parts: Mapping[HostComponent, int]) -> int:
    """Without mapped pages, which count as available."""
    return sum(parts.values()) - parts.get("mapped weights", 0)


def page_locked(size: int) -> int:
    """torch rounds a page-locked block up to a power of two."""
    return 1 << (size - 1).bit_length() if size else 0
