"""What other estimators say about a training of `bench.predict`'s tables, in bytes.

* accelerate: its own functions behind `accelerate estimate-memory`, for training with Adam in 16
  bits. It knows neither batch, length nor activations.
* DeepSpeed: its own `estimate_zero2_model_states_mem_needs`, for one GPU without an offload. It
  says what weights, gradients and optimizer take.
* textbook: 16 bytes for each parameter (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1),
  and for the activations s b h L (34 + 5 a s / h) bytes, or 2 s b h L with checkpointing
  (Korthikanti et al., arXiv 2205.05198, sections 4.1 and 5).
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from functools import cache
from typing import Any

import msgspec

from memtop.train.dry_run.build import Training, config_of, meta_model

NAMES = ("accelerate", "deepspeed", "textbook")
NO_ADAPTERS = "it knows no adapters"


@cache
def _sizes(config: bytes) -> tuple[int, int]:
    """The parameters, and accelerate's peak."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils.modeling import calculate_maximum_sizes

    training = Training(config=msgspec.json.decode(config), batch=1, seq_len=1, loss="whole", generation=80)
    model = meta_model(training, config_of(training))
    total, _ = calculate_maximum_sizes(model)
    return model.num_parameters(), max(estimate_training_usage(total, "bfloat16").values())


def baselines(training: Training) -> dict[str, int | None]:
    """None: the estimator has no answer, because of `NO_ADAPTERS`."""
    if training.method != "full":
        return dict.fromkeys(NAMES)
    with contextlib.redirect_stdout(sys.stderr):
        # It writes a warning on a machine without a GPU.
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    parameters, of_accelerate = _sizes(msgspec.json.encode(training.config))
    _, of_deepspeed = estimate_zero2_model_states_mem_needs(parameters, cpu_offload=False)
    return {
        "accelerate": of_accelerate,
        "deepspeed": of_deepspeed,
        "textbook": 16 * parameters + _activations(training),
    }


def _activations(training: Training) -> int:
    config = training.config
    width, layers, heads = (config[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    for_each = 2 if training.gradient_checkpointing else 34 + 5 * heads * training.seq_len / width
    return round(training.seq_len * training.batch * width * layers * for_each)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The errors of each estimator where it has an answer, and of the dry run there."""
    found = {}
    for name in NAMES:
        answered = [row for row in rows if row["baselines"][name] is not None]
        if answered:
            pairs = {name: [row["baselines"][name] for row in answered]}
            pairs["dry run"] = [row["errors"]["allocated"] for row in answered]
            found[name] = {
                "rows": len(answered),
                "of": len(rows),
                **{who: {"median": _median(errors), "maximum": max(map(abs, errors))} for who, errors in pairs.items()},
            }
    return found


def _median(errors: list[float]) -> float:
    return round(statistics.median(map(abs, errors)), 3)
