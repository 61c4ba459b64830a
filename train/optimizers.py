"""The learning rate, and the optimizers with their moments as they are saved, per parameter.

Saved for each parameter: `step` (scalar), and by the kind of optimizer

* `exp_avg` and `exp_avg_sq` (the parameter's shape, fp32);
* from an 8-bit optimizer, `*_q8` (uint8) and `*_absmax` (fp32, one per block of 256 elements), so
  that it resumes exactly;
* from Adafactor, `exp_avg_sq_row` and `exp_avg_sq_col` (means of exp_avg_sq over the last and the
  last but one dimension).

Another kind of optimizer gets the closest conversion: 8 bits round, a factored second moment
becomes the product of its rows and columns, and a first moment that was not kept starts at zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from memtop.presets import Settings
from memtop.train import BadInputError, first_line
from memtop.train.agent.failures import is_allocation_failure
from memtop.train.compile_lock import Enter, compiling, without_compiler

Moments = dict[str, torch.Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(
    settings: Settings, parameters: Iterable[torch.nn.Parameter], enter: Enter | None = None
) -> torch.optim.Optimizer:
    """The optimizer that the settings name; BadInputError if it cannot run here.

    `enter` is called with the phase `compiling` if the optimizer must be compiled first.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "adamw":
        # One pass over the memory, in one kernel, on the GPU and on the CPU. torch's default is a
        # loop over the parameters on the CPU, and takes temporary tensors of their whole size on
        # the GPU.
        return torch.optim.AdamW(trained, lr=rate, weight_decay=decay, fused=True)
    if settings.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(trained, lr=rate, weight_decay=decay, scale_parameter=False, relative_step=False, warmup_init=False)  # type: ignore[no-any-return]
    if settings.optimizer == "cpu_adam":
        return _cpu_adam(trained, rate, decay, enter)
    try:
        with without_compiler():
            import bitsandbytes
    except ImportError as error:
        raise BadInputError(
            f"optimizer {settings.optimizer}: needs bitsandbytes ({error}); give --set optimizer=adamw"
        ) from None
    kinds: Any = bitsandbytes.optim
    kind = kinds.PagedAdamW8bit if settings.optimizer.startswith("paged") else kinds.AdamW8bit
    optimizer: torch.optim.Optimizer = kind(trained, lr=rate, weight_decay=decay)
    return optimizer


def _cpu_adam(trained: list[torch.nn.Parameter], rate: float, decay: float, enter: Enter | None) -> torch.optim.Optimizer:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        with compiling("cpu_adam", what="optimizer cpu_adam", enter=enter):
            return DeepSpeedCPUAdam(trained, lr=rate, weight_decay=decay, adamw_mode=True)  # type: ignore[no-any-return]
    # DeepSpeed compiles it at its first use. Its own errors (a CUDA that is missing or of another
    # version) are derived from Exception only.
    except Exception as error:
        if is_allocation_failure(error):
            raise
        reason = first_line(error)
        raise BadInputError(f"optimizer cpu_adam: cannot be built here ({reason}); give --set optimizer=adamw") from None


def bytes_of_first_step(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that the next step allocates and keeps: the moments of parameters without any."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return sum(_moment_bytes(optimizer, parameter) for parameter in parameters if not optimizer.state.get(parameter))


def _moment_bytes(optimizer: Any, parameter: torch.Tensor) -> int:
    count = parameter.numel()
    if type(optimizer).__name__ == "Adafactor":
        second = count if parameter.dim() < 2 else count // parameter.shape[-1] + count // parameter.shape[-2]
        # It also keeps the parameter's size (RMS).
        return 4 * (second + 1)
    if hasattr(optimizer, "get_state_buffer"):
        # bitsandbytes keeps small parameters in fp32. Paged moments count too: they are on the GPU
        # as long as they fit.
        in_8_bits = count >= optimizer.args.min_8bit_size
        return 2 * (count + 4 * math.ceil(count / _BLOCK)) if in_8_bits else 2 * 4 * count
    # The fused step counter is on the parameter's device.
    return len(MOMENTS) * count * parameter.element_size() + 4


def read_moments(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Moments:
    """The moments of one parameter, on any device; zeros before the first update."""
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    if "state1" in state:
        found = _packed(state)
    elif "exp_avg_sq_row" in state:
        found = {name: state[name] for name in ("exp_avg_sq_row", "exp_avg_sq_col")}
    elif state:
        found = {name: state[name] for name in MOMENTS if name in state}
    else:
        found = {name: torch.zeros(parameter.shape) for name in MOMENTS}
    # Not read here: on a GPU that would wait for its queue, once for each parameter.
    step = torch.as_tensor(state.get("step", 0), dtype=torch.float32)
    return {"step": step.detach(), **{name: tensor.detach() for name, tensor in found.items()}}


def write_moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, saved: Moments) -> None:
    """Set the optimizer's moments of one parameter, converted to this kind of optimizer."""
    kind = type(optimizer).__name__
    step = saved["step"]
    if kind == "Adafactor":
        state: dict[str, Any] = {"step": int(step), "RMS": 0.0, **_factored(parameter, saved)}
    elif hasattr(optimizer, "get_state_buffer"):
        _write_8bit(optimizer, parameter, saved)
        return
    else:
        state = {"step": int(step) if kind == "DeepSpeedCPUAdam" else step.clone(), **full_moments(saved, parameter.shape)}
    if any(group.get("fused") for group in optimizer.param_groups):
        # The fused kernel keeps the step count on the parameter's device.
        state["step"] = step.to(parameter.device, copy=True)
    optimizer.state[parameter] = {
        # Copies: the saved tensors map the file, and would keep its disk space after it is deleted.
        name: value.to(parameter.device, copy=True) if torch.is_tensor(value) and value.dim() else value
        for name, value in state.items()
    }


def full_moments(saved: Moments, shape: torch.Size) -> Moments:
    """exp_avg and exp_avg_sq in fp32 and the parameter's shape, whichever optimizer saved them."""
    if "exp_avg_sq_row" in saved:
        row, column = saved["exp_avg_sq_row"], saved["exp_avg_sq_col"]
        scale = row.mean(dim=-1, keepdim=True).clamp_min(1e-30).unsqueeze(-1)
        second = row.unsqueeze(-1) * column.unsqueeze(-2) / scale
    else:
        second = _unpacked(saved, "exp_avg_sq")
    first = _unpacked(saved, "exp_avg")
    return {"exp_avg": torch.zeros(shape) if first is None else first, "exp_avg_sq": second.reshape(shape)}


def _factored(parameter: torch.Tensor, saved: Moments) -> Moments:
    if parameter.dim() < 2:
        return {"exp_avg_sq": full_moments(saved, parameter.shape)["exp_avg_sq"]}
    if "exp_avg_sq_row" in saved:
        return {name: saved[name] for name in ("exp_avg_sq_row", "exp_avg_sq_col")}
    second = full_moments(saved, parameter.shape)["exp_avg_sq"]
    return {"exp_avg_sq_row": second.mean(dim=-1), "exp_avg_sq_col": second.mean(dim=-2)}


_BLOCK = 256
"""Elements that share one scale in bitsandbytes."""


def _packed(state: dict[str, Any]) -> Moments:
    found: Moments = {}
    for number, name in enumerate(MOMENTS, start=1):
        tensor: torch.Tensor = state[f"state{number}"]
        if tensor.dtype == torch.uint8:
            found |= {f"{name}_q8": tensor, f"{name}_absmax": state[f"absmax{number}"]}
        else:
            # bitsandbytes keeps small parameters in fp32.
            found[name] = tensor
    return found


def _unpacked(saved: Moments, name: str) -> Any:
    if f"{name}_q8" not in saved:
        return saved.get(name)
    from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise

    make_code: Any = create_dynamic_map
    # The second moment is never negative, so its code is unsigned.
    code = make_code(signed=name == "exp_avg")
    return dequantize_blockwise(saved[f"{name}_q8"], absmax=saved[f"{name}_absmax"], code=code, blocksize=_BLOCK)


def _write_8bit(optimizer: Any, parameter: torch.nn.Parameter, saved: Moments) -> None:
    from bitsandbytes.functional import quantize_blockwise

    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    index = next(i for i, p in enumerate(group["params"]) if p is parameter)
    optimizer.init_state(group, parameter, optimizer.param_groups.index(group), index)
    state = optimizer.state[parameter]
    state["step"] = int(saved["step"])
    if "exp_avg_q8" in saved and state["state1"].dtype == torch.uint8:
        for number, name in enumerate(MOMENTS, start=1):
            state[f"state{number}"].copy_(saved[f"{name}_q8"])
            state[f"absmax{number}"].copy_(saved[f"{name}_absmax"])
        return
    for number, tensor in enumerate(full_moments(saved, parameter.shape).values(), start=1):
        target = state[f"state{number}"]
        value = tensor.to(target.device)
        if target.dtype == torch.uint8:
            packed, how = quantize_blockwise(value, code=state[f"qmap{number}"], blocksize=_BLOCK)
            target.copy_(packed.reshape(target.shape))
            state[f"absmax{number}"].copy_(how.absmax.reshape(state[f"absmax{number}"].shape))
        else:
            target.copy_(value)
