"""The phase of training that a traceback shows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memtop.supervisor.diagnosis.text import LogLine

_BACKWARD = re.compile(
    r"torch[/\\]autograd[/\\]|run_backward|_tensor\.py\", line \d+, in backward|[/\\]tensor\.py\","
    r" line \d+, in backward|(?:loss|engine|accelerator|scaler\.scale\(\w+\)|fabric|self)\.backward\("
    r"|_grad_\w{0,80}ops?\.cc|Gradient\w{0,80}Op|in backward\b|value_and_grad|tape\.gradient"
)
_OPTIMIZER = re.compile(
    r"torch[/\\]optim[/\\](?!lr_scheduler)|bitsandbytes[/\\]optim|apex[/\\]optimizers|ops[/\\]adam"
    r"|transformers[/\\]optimization\.py|optimizer\.step\(|optim\.step\("
    r"|_foreach_\w{1,80}\(|in _(?:multi|single)_tensor_\w+|in _init_group|scaler\.step\("
    r"|optimizer\.apply_gradients|optax|optimizers?[/\\]\w+\.py\", line \d+, in step"
)
_LOSS = re.compile(
    r"loss_utils\.py|in \w*(?:cross_entropy|nll_loss|CausalLMLoss|log_softmax|compute_loss_func)\b"
    r"|[/\\]nn[/\\]modules[/\\]loss\.py|F\.(?:cross_entropy|nll_loss|log_softmax)\("
    r"|cross_entropy_loss\(|logits\.float\(\)|logits = logits\.(?:float|to)\(|criterion\(|loss_fct\("
    r"|loss_fn\("
)
_SAVE = re.compile(
    r"\bsave_(?:checkpoint|pretrained|model|state|file|16bit\w*|total_limit)\b|in _?save\w*"
    r"|torch\.save\(|serialization\.py\", line \d+, in (?:save|_save|__exit__)"
    r"|_state_dict_utils\.py|_post_state_dict_hook|_full_post_state_dict|get_(?:model_)?state_dict"
    r"|serialize_file|in save\b|write_(?:checkpoint|shard)|dist_checkpointing|consolidated_16bit|in"
    r" state_dict\b"
)
_EVALUATION = re.compile(
    r"in (?:evaluation_loop|evaluate|validation_step|prediction_step|prediction_loop|nested_concat"
    r"|run_evaluation|_run_validation|validate|val_step|eval_step|run_eval|_evaluate|eval_epoch)\b"
    r"|[/\\]evaluation_loop\.py|trainer\.evaluate\(|self\.evaluate\(|eval_loop|in compute_metrics"
)
_LOADING = re.compile(
    r"torch[/\\]utils[/\\]data[/\\]|multiprocessing[/\\](?:reductions?|queues|resource_sharer"
    r"|shared_memory|heap)\.py|in pin memory thread|dataloader\.py|pin_memory\.py|in DataLoader worker"
    r"|datasets[/\\]\w+\.py|data_collator|in __getitem__"
)
_LOAD = re.compile(
    r"in (?:_?from_pretrained|load_state_dict|_load_\w+|load_checkpoint|load_model|load_file"
    r"|safe_load_file|load_shard\w*|_load_pretrained_model|from_config|load_pretrained\w*"
    r"|prepare_model|get_peft_model|dispatch_model)\b"
    r"|\.from_pretrained\(|_flat_param\.py|torch\.load\(|safe_open\(|serialization\.py\", line \d+, in"
    r" (?:load|_load|restore_location|_legacy_load)|load_state_dict\(|modeling_utils\.py"
    r"|call to target '[^']*[Mm]odel|\.to\((?:device|args\.device|\"cuda\w*\"|'cuda\w*'|torch\.device)"
    r"|model\.(?:to|cuda|half|float)\(|module\.py\", line \d+, in (?:to|_apply|convert|cuda)\b"
)
_FORWARD = re.compile(
    r"in (?:\w+\.)?(?:_conv_\w*)?forward\b|in \w*_forward\b|_call_impl|forward_call\("
    r"|nn[/\\]functional\.py|F\.linear\(|torch\.(?:embedding|matmul|bmm|baddbmm)\(|torch[/\\]_(?:refs"
    r"|decomp)[/\\]|flash_attn_func|scaled_dot_product_attention|in training_step\b"
)
_LONGEST = 1000
"""Characters of a line that are searched: a frame of a traceback is shorter."""
RULES = (
    ("save", _SAVE),
    ("data", _LOADING),
    ("optimizer", _OPTIMIZER),
    ("backward", _BACKWARD),
    ("loss", _LOSS),
    ("evaluation", _EVALUATION),
    ("load", _LOAD),
    ("forward", _FORWARD),
)
_IS_FRAME = re.compile(r"File \"|\.py:\d+|\.py in |line \d+, in |^\s*-+> ?\d+")
_LOGGED = (
    (
        "load",
        re.compile(
            r"(?i)loading (?:checkpoint )?shards?|loading (?:the )?(?:model|weights|checkpoint|pretrained)|샤드"
            r"|加载模型|modelo? laden|load_checkpoint"
        ),
    ),
    ("save", re.compile(r"(?i)sav(?:ing|e) (?:the )?(?:model|checkpoint|state|optimizer)|writing checkpoint")),
    ("evaluation", re.compile(r"(?i)\*{3,} running evaluation|evaluating|running validation|^eval(?:uation)?\b")),
)


def phase_of(context: Sequence[LogLine]) -> str:
    """The phase of training in which the message that ends `context` was raised, or `unknown`.

    The innermost known frame decides, except where an outer one says more: a forward pass inside
    backward is a recomputation, and one inside an evaluation belongs to the evaluation.
    """
    texts = [line.text for line in context]
    found = [name for name in map(_phase_of_line, reversed(texts)) if name is not None]
    if not found:
        return (
            "unknown" if any(_IS_FRAME.search(text) for text in texts[:-1]) else _logged([line.shown for line in context[-9:]])
        )
    innermost = found[0]
    if innermost in ("forward", "loss", "load"):
        for outer in ("backward", "evaluation"):
            if outer in found:
                return outer
    if innermost == "forward" and "load" in found:
        return "load"
    if innermost == "evaluation" and "save" in found:
        return "save"
    return innermost


def _phase_of_line(text: str) -> str | None:
    return next((name for name, pattern in RULES if pattern.search(text, 0, _LONGEST)), None)


def _logged(texts: Sequence[str]) -> str:
    for text in reversed(texts):
        for name, pattern in _LOGGED:
            if pattern.search(text):
                return name
    return "unknown"
