"""The DeepSpeed configuration of a strategy: integers and explicit sizes, nothing that a version may read another way."""

from __future__ import annotations

from typing import Any

from memtop.presets import Settings

_SMALLEST_BUCKET, _LARGEST_BUCKET = 100_000, 50_000_000


def zero_config(settings: Settings, *, hidden_size: int, precision: str, pin_memory: bool) -> dict[str, Any]:
    """DeepSpeed's JSON for these settings. Buckets are counted in elements and follow the model's width.

    `train_batch_size` is left out: DeepSpeed derives it, so nothing can contradict. There is no optimizer block: the optimizer
    is ours, the same under every strategy, and its state moves between them.
    """
    square = hidden_size * hidden_size
    bucket = min(max(square, _SMALLEST_BUCKET), _LARGEST_BUCKET)
    zero: dict[str, Any] = {
        "stage": settings.zero.stage,
        "contiguous_gradients": True,
        # Overlapping keeps several buckets alive: memory is what these strategies are for.
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if settings.zero.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin_memory}
    if settings.zero.stage == 3:
        if settings.zero.offload_parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": pin_memory}
        zero |= {
            "stage3_prefetch_bucket_size": int(0.9 * bucket),
            "stage3_param_persistence_threshold": 10 * hidden_size,
            "stage3_max_live_parameters": 100_000_000 if settings.zero.offload_parameters else 1_000_000_000,
            "stage3_max_reuse_distance": 100_000_000 if settings.zero.offload_parameters else 1_000_000_000,
            "sub_group_size": 100_000_000 if settings.zero.offload_parameters else 1_000_000_000,
            "stage3_gather_16bit_weights_on_model_save": False,
        }
    return {
        "train_micro_batch_size_per_gpu": settings.batch,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": float(settings.clip_norm),
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "loss_scale": 0, "initial_scale_power": 16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # One AdamW for every strategy; DeepSpeed's own is a choice (optimizer = "cpu_adam"), not a surprise.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }
