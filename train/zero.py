"""DeepSpeed's ZeRO: configuration, engine, and its sharded state as tensors per parameter name."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from memtop.presets import Settings
from memtop.presets.parameters import LIVE_PARAMETERS, TRAINED_BYTES, model_size
from memtop.presets.schema import Zero
from memtop.train.compile_lock import Enter, compiling, without_compiler
from memtop.train.engine import ReadSaved, count_parameters, trained_parameters
from memtop.train.host_memory import agree_on_host_plan
from memtop.train.model import COMPUTE, accelerate_name
from memtop.train.objective import Objective
from memtop.train.optimizers import MOMENTS, full_moments
from memtop.train.state_files import LossScale, SavedTensors

# In elements. 12.5 million are 25 MB in 16 bits, the bucket of torch's DistributedDataParallel: one
# collective for a few layers, where a bucket of the width squared would mean one for each matrix.
# The largest one takes 100 MB.
_SMALLEST_BUCKET, _LARGEST_BUCKET = 12_500_000, 50_000_000


def width_of(config: Any) -> int:
    """The width of the language model: a model that reads images, too, has a configuration of its
    own for it."""
    return int(getattr(config, "hidden_size", None) or config.get_text_config().hidden_size)


def zero_config(settings: Settings, *, hidden_size: int, precision: str) -> dict[str, Any]:
    """DeepSpeed's JSON for these settings: integers and explicit sizes, no "auto".

    Buckets are counted in elements and follow the model's width. `train_batch_size` is left out
    because DeepSpeed derives it. There is no optimizer block: every strategy uses memtop's
    optimizer, so its state moves between them. Nothing is pinned until the ranks agree on it.
    """
    square = hidden_size * hidden_size
    bucket = min(max(square, _SMALLEST_BUCKET), _LARGEST_BUCKET)
    zero: dict[str, Any] = {
        "stage": settings.zero.stage,
        "contiguous_gradients": True,
        # ZeRO-3 gathers and reduces on streams of its own, with the same one bucket of memory.
        # Otherwise each gather of weights waits for all work on the GPU. ZeRO-1 and 2 would need a
        # second bucket.
        "overlap_comm": settings.zero.stage == 3,
        # DeepSpeed allocates this much at each update, in the gradients' dtype.
        "reduce_bucket_size": bucket,
        # Weights that are gathered together after a step (ZeRO-1 and 2).
        "allgather_bucket_size": bucket,
    }
    if settings.zero.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if settings.zero.stage == 3:
        if settings.zero.offload_parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": False}
        # With the parameters in host memory, the GPU is too small for more elements.
        most = LIVE_PARAMETERS if settings.zero.offload_parameters else 1_000_000_000
        zero |= {
            # Weights gathered ahead of the layer that needs them.
            "stage3_prefetch_bucket_size": int(0.9 * bucket),
            # Norms and biases stay on every rank: gathering them would cost more than they take.
            "stage3_param_persistence_threshold": 10 * hidden_size,
            # How many are kept for their next use.
            "stage3_max_live_parameters": most,
            "stage3_max_reuse_distance": most,
            # How many are in one optimizer step, which is done on the CPU if they are offloaded.
            "sub_group_size": most,
            "stage3_gather_16bit_weights_on_model_save": False,
        }
    return {
        "train_micro_batch_size_per_gpu": settings.batch,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": float(settings.clip_norm),
        "data_types": {"grad_accum_dtype": _accumulation_dtype(settings.zero, precision)},
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "loss_scale": 0, "initial_scale_power": 16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # Do not replace AdamW by DeepSpeed's own; `optimizer = "cpu_adam"` selects that.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }


def _accumulation_dtype(zero: Zero, precision: str) -> str:
    """The dtype in which the gradients of an update's micro-batches are summed.

    In 16 bits each addition loses what is below 1/256 (bf16) of the sum. But with the optimizer
    offloaded, ZeRO-1 and 2 would hold an fp32 sum on the GPU, twice the size of the weights there;
    in 16 bits they hold it in host memory. ZeRO-3 always holds it where the optimizer is.
    """
    return precision if zero.stage < 3 and zero.offload_optimizer else "fp32"


def ask_cuda_for_free_memory() -> None:
    """DeepSpeed would ask the driver about the GPU with the number that CUDA_VISIBLE_DEVICES has.
    It cannot read the variable if it has UUIDs."""
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    accelerator.available_memory = lambda index=None: torch.cuda.mem_get_info(index)[0]


def open_deepspeed(
    settings: Settings,
    config: Any,
    precision: str,
    on_gpu: bool,
    tracking: dict[str, Any],
    enter: Enter | None = None,
) -> Accelerator:
    """Accelerate with DeepSpeed for these settings. `precision`: fp32, bf16 or fp16.

    `enter` is called with the phase `compiling` if DeepSpeed must be compiled first.
    """
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        # `Accelerator(cpu=True)` would leave DeepSpeed out.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    else:
        ask_cuda_for_free_memory()
    # DeepSpeed uses deprecated names of torch; the user cannot do anything about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
    from transformers.integrations import unset_hf_deepspeed_config

    written = zero_config(settings, hidden_size=width_of(config), precision=precision)
    # A model from a file is sharded while it is read, because it may be larger than one GPU.
    sharded = settings.zero.stage == 3 and bool(settings.model.get("path"))
    plugin = DeepSpeedPlugin(hf_ds_config=written, zero3_init_flag=sharded)
    group = InitProcessGroupKwargs(backend="nccl" if on_gpu else "gloo")
    # DeepSpeed's CPU ranks communicate through an extension.
    extension: Any = (
        contextlib.nullcontext() if on_gpu else compiling("deepspeed_shm_comm", what="DeepSpeed on the CPU", enter=enter)
    )
    with extension:
        accelerator = Accelerator(
            mixed_precision=accelerate_name(precision),
            deepspeed_plugin=plugin,
            gradient_accumulation_steps=settings.accumulation,
            kwargs_handlers=[group],
            **tracking,
        )
    if settings.zero.offload_parameters:
        # Before the model is read: the parameters are moved to these buffers meanwhile.
        opened: Any = accelerator.state.deepspeed_plugin
        offload = opened.deepspeed_config["zero_optimization"]["offload_param"]
        taken = _offloaded_bytes(settings, precision)
        offload["pin_memory"] = agree_on_host_plan(settings, accelerator, taken=taken).pin_memory
        # transformers has a copy of the configuration.
        opened.set_deepspeed_weakref()
    if not sharded:
        # transformers would shard a new model while it is built, which draws other weights for the
        # same seed.
        unset_hf_deepspeed_config()
    return accelerator


def _offloaded_bytes(settings: Settings, precision: str) -> float:
    """The host memory of all ranks for offloaded parameters, and for an offloaded optimizer;
    infinite if the size of the model is not known before it is read."""
    size = model_size(settings)
    if size is None:
        return math.inf
    optimizer = TRAINED_BYTES * size.trained if settings.zero.offload_optimizer else 0
    return COMPUTE[accelerate_name(precision)].itemsize * size.all + optimizer


def _finish_config(accelerator: Accelerator, settings: Settings, model: torch.nn.Module) -> None:
    """Decide about pinned buffers of the optimizer, now that the size of the model is known; write
    the configuration to the attempt's folder."""
    config: dict[str, Any] = accelerator.state.deepspeed_plugin.deepspeed_config
    offload = config["zero_optimization"].get("offload_optimizer")
    if offload is not None:
        # Page-locked memory cannot be swapped out, so the rest of the machine must have enough.
        elements = count_parameters(trained_parameters(model).values())
        offload["pin_memory"] = agree_on_host_plan(settings, accelerator, taken=TRAINED_BYTES * elements).pin_memory
    folder = os.environ.get("MEMTOP_ATTEMPT_DIR")
    if folder and accelerator.is_main_process:
        (Path(folder) / "deepspeed.json").write_text(json.dumps(config, indent=1))


class ZeroEngine:
    """A DeepSpeed engine.

    The trainer marks the end of each update, because the last one of a run may be short.
    """

    sharded = True
    # ZeRO-2 and 3 reduce gradients during the backward pass, and ZeRO-3 gathers weights in every
    # layer. A rank that gives up leaves the others waiting and the engine's buffers half full, so
    # only a restart helps.
    retries = False

    def __init__(
        self, accelerator: Accelerator, objective: Objective, optimizer: torch.optim.Optimizer, settings: Settings
    ) -> None:
        self.accelerator = accelerator
        self._settings = settings
        self.model = objective.model
        self._base = optimizer
        _finish_config(accelerator, settings, objective.model)
        with without_compiler(), contextlib.suppress(ImportError):
            # DeepSpeed asks whether the optimizer is its Muon. Other versions may lack it.
            importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
        self._engine: Any = accelerator.prepare(objective, optimizer)[0]
        # Now the model is on its device, whose free memory decides.
        self.loss_chunk = objective.chunk
        self.objective: torch.nn.Module = self._engine
        self._zero: Any = self._engine.optimizer

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        # DeepSpeed divides by its accumulation steps and averages over the ranks; this undoes both.
        self._engine.backward(loss * (self._settings.accumulation * self.accelerator.num_processes))
        if not last:
            self._engine.step()

    def abandon(self) -> None:
        raise AssertionError("an update under ZeRO is never repeated")

    def missing_gradients(self) -> int:
        return 0

    def share_missing(self) -> None:
        """Do nothing: DeepSpeed reduces gradients itself."""

    def fill_missing(self) -> int:
        return 0

    def drop_gradients(self) -> None:
        raise AssertionError("an update under ZeRO is never repeated")

    def step(self, rate: float) -> torch.Tensor | float | None:
        for group in (*self._base.param_groups, *self._zero.param_groups):
            group["lr"] = rate
        self._engine.step()
        norm: torch.Tensor | float | None = self._engine.get_global_grad_norm()
        # DeepSpeed says -1 if a gradient is inf or nan.
        if torch.is_tensor(norm):
            return norm.masked_fill(norm < 0, math.nan)
        return math.nan if norm is not None and norm < 0 else norm

    def skipped(self, norm: float | None) -> bool:
        return not self._engine.was_step_applied()

    def saved_tensors(self) -> SavedTensors:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        step = torch.as_tensor(float(self._step_count()))
        for name, parameter in trained_parameters(self.model).items():
            found = {"weight": safe_get_full_fp32_param(parameter)}
            for kind in MOMENTS:
                found[kind] = safe_get_full_optimizer_state(parameter, kind)
            shape = getattr(parameter, "ds_shape", parameter.shape)
            yield name, {"step": step, **{kind: tensor.detach().reshape(shape) for kind, tensor in found.items()}}

    def load_moments(self, read: ReadSaved) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        ready = False
        for name, parameter in trained_parameters(self.model).items():
            saved = read(name)
            if not ready:
                self._make_optimizer_state(float(saved["step"]))
                ready = True
            device = self.accelerator.device
            # The 16-bit copy already has these weights, but rounded.
            safe_set_full_fp32_param(parameter, saved["weight"].to(device))
            shape = getattr(parameter, "ds_shape", parameter.shape)
            for kind, tensor in full_moments(saved, shape).items():
                safe_set_full_optimizer_state(parameter, tensor.to(device), kind)

    def _pieces(self) -> list[torch.Tensor]:
        """The flat fp32 tensors of this rank that the optimizer updates."""
        if self._settings.zero.stage == 3:
            return list(self._zero.fp32_partitioned_groups_flat)
        return [parameter for group in self._base.param_groups for parameter in group["params"]]

    def _make_optimizer_state(self, step: float) -> None:
        """Create the optimizer's state before its first step, with the saved step count."""
        whole = type(self._base).__name__ == "DeepSpeedCPUAdam"
        for piece in self._pieces():
            self._base.state[piece] = {
                # The fused kernel keeps the step count on the parameter's device.
                "step": int(step) if whole else torch.tensor(step, device=piece.device),
                **{kind: torch.zeros_like(piece) for kind in MOMENTS},
            }
        if self._settings.zero.stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()

    def _step_count(self) -> float:
        steps = [float(self._base.state[piece]["step"]) for piece in self._pieces() if piece in self._base.state]
        return max(steps, default=0.0)

    def gathered_bytes(self, module: torch.nn.Module) -> int:
        own = list(module.parameters(recurse=False))
        # With the module's weights, DeepSpeed gathers some of those that come next.
        elements = count_parameters(own) + int(self._engine.zero_prefetch_bucket_size())
        return min(elements, count_parameters(self.model.parameters())) * max((one.element_size() for one in own), default=0)

    def release_gathered(self) -> None:
        self._engine.empty_partition_cache()

    def strategy(self) -> Zero:
        return Zero(
            stage=self._engine.zero_optimization_stage(),
            offload_optimizer=_is_offloaded(self._engine.zero_offload_optimizer()),
            offload_parameters=_is_offloaded(self._engine.zero_offload_param()),
        )

    def loss_scale(self) -> LossScale | None:
        if not self._engine.fp16_enabled():
            return None
        scaler = self._zero.loss_scaler
        return LossScale(float(scaler.cur_scale), scaler.cur_iter - scaler.last_overflow_iter - 1, scaler.cur_hysteresis)

    def set_loss_scale(self, saved: LossScale) -> None:
        if not self._engine.fp16_enabled():
            return
        scaler = self._zero.loss_scaler
        scaler.cur_scale = saved.scale
        scaler.last_overflow_iter = scaler.cur_iter - 1 - saved.stable
        if saved.hysteresis is not None:
            scaler.cur_hysteresis = saved.hysteresis


def _is_offloaded(config: Any) -> bool:
    """Whether a part of DeepSpeed's configuration names host memory."""
    return config is not None and str(getattr(config.device, "value", config.device)) == "cpu"
