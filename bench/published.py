"""Peaks of GPU memory that others have measured and published, and the trainings they are of: see
`predict.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from transformers.loss import loss_utils

from memtop.presets.schema import ATTENTION_TARGETS, Lora
from memtop.train.dry_run.build import Training


def llama(hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        **more,
    }


CONFIGS = {
    "Llama-3.2-1B": llama(2048, 8192, 16, 32, 8, 128256),
    "Llama-3.2-3B": llama(3072, 8192, 28, 24, 8, 128256, head_dim=128),
    "Llama-3.1-8B": llama(4096, 14336, 32, 32, 8, 128256, tie_word_embeddings=False),
    "Llama-3.1-70B": llama(8192, 28672, 80, 64, 8, 128256, tie_word_embeddings=False),
    "Qwen2.5-0.5B": llama(896, 4864, 24, 14, 2, 151936) | {"model_type": "qwen2"},
    "Qwen2.5-1.5B": llama(1536, 8960, 28, 12, 2, 151936) | {"model_type": "qwen2"},
    "Qwen2.5-3B": llama(2048, 11008, 36, 16, 2, 151936) | {"model_type": "qwen2"},
    "Qwen2.5-7B": llama(3584, 18944, 28, 28, 4, 152064, tie_word_embeddings=False) | {"model_type": "qwen2"},
    "Mistral-7B": llama(4096, 14336, 32, 32, 8, 32000, tie_word_embeddings=False)
    | {"model_type": "mistral", "sliding_window": 4096},
    "SmolLM2-135M": llama(576, 1536, 30, 9, 3, 49152),
    "SmolLM2-360M": llama(960, 2560, 32, 15, 5, 49152),
    "SmolLM2-1.7B": llama(2048, 8192, 24, 32, 32, 49152),
}

A6000 = (
    ("Llama-3.2-1B", "full", "pure", "", 17.51),
    ("Llama-3.2-1B", "full", "pure", "checkpointing", 13.76),
    ("Llama-3.2-1B", "full", "amp", "", 30.55),
    ("Llama-3.2-1B", "full", "amp", "checkpointing", 25.22),
    ("Llama-3.2-1B", "full", "pure", "eager", 30.26),
    ("Llama-3.2-3B", "full", "pure", "checkpointing", 32.15),
    ("Qwen2.5-1.5B", "full", "pure", "", 23.40),
    ("Llama-3.2-1B", "lora", "pure", "", 10.13),
    ("Llama-3.2-1B", "lora", "amp", "", 14.52),
    ("Llama-3.2-1B", "lora", "amp", "checkpointing", 9.51),
    ("Llama-3.2-3B", "lora", "pure", "", 18.98),
    ("Llama-3.1-8B", "lora", "pure", "checkpointing", 20.55),
    ("Qwen2.5-1.5B", "lora", "pure", "", 13.78),
)
"""Model, method, precision, what is special, and the measured peak."""

T4 = (
    ("Qwen2.5-1.5B", "lora", "eager", 2, 1024, 7405.81, 6223.84, 3735.79, 7910),
    ("Qwen2.5-1.5B", "lora", "efficient", 2, 1024, 7401.81, 6219.84, 3735.79, 7766),
    ("SmolLM2-1.7B", "lora", "eager", 4, 1024, 6536.75, 5784.81, 3936.47, 7734),
    ("SmolLM2-1.7B", "lora", "efficient", 4, 1024, 6528.75, 5776.81, 3936.47, 7094),
    ("SmolLM2-135M", "lora", "eager", 1, 4096, 3180.11, 2416.64, 736.18, 4476),
    ("SmolLM2-135M", "lora", "efficient", 1, 4096, 3148.11, 2384.64, 736.18, 3284),
    ("SmolLM2-135M", "lora", "eager", 2, 512, 1027.29, 836.44, 441.72, 1104),
    ("SmolLM2-135M", "lora", "efficient", 2, 512, 1026.92, 836.06, 441.72, 1070),
    ("SmolLM2-360M", "lora", "eager", 1, 4096, 4908.51, 3027.76, 1244.73, 7304),
    ("SmolLM2-360M", "lora", "efficient", 1, 4096, 3754.78, 2995.31, 1244.73, 3912),
    ("Qwen2.5-1.5B", "qlora", "eager", 2, 1024, 6838.54, 4474.57, 3007.02, 7548),
    ("Qwen2.5-1.5B", "qlora", "efficient", 2, 1024, 6827.67, 4463.70, 3005.15, 7400),
    ("SmolLM2-1.7B", "qlora", "eager", 4, 1024, 5297.27, 3793.33, 2336.75, 6996),
    ("SmolLM2-1.7B", "qlora", "efficient", 4, 1024, 5281.27, 3777.33, 2336.75, 5960),
    ("SmolLM2-135M", "qlora", "eager", 1, 4096, 3679.27, 2114.66, 1038.70, 5224),
    ("SmolLM2-135M", "qlora", "efficient", 1, 4096, 3576.75, 2049.78, 1037.83, 3784),
    ("SmolLM2-135M", "qlora", "eager", 2, 512, 1067.19, 685.46, 448.31, 1192),
    ("SmolLM2-135M", "qlora", "efficient", 2, 512, 1063.81, 682.08, 448.31, 1194),
    ("SmolLM2-360M", "qlora", "eager", 1, 4096, 5687.15, 2992.17, 1302.50, 8164),
    ("SmolLM2-360M", "qlora", "efficient", 1, 4096, 4017.84, 2496.87, 1296.79, 4518),
)
"""Model, method, attention, batch, length; allocated at most, in the forward pass, in the optimizer
step; reserved."""

WIKI = ((1024, 6), (2048, 7), (4096, 9), (8192, 12), (16384, 19), (32768, 32))
"""Length, and the process's memory in 10^9 bytes."""

XMEM = (
    (5, 1944059904, 1954545664, 1587544064, 2544138977),
    (10, 2766143488, 2835349504, 2799697920, 2544138977),
    (20, 4622123008, 4611637248, 5182062592, 2544138977),
    (30, 6517948416, 6417285120, 8638169088, 2544138977),
    (35, 7302283264, 7172259840, 9405726720, 2544138977),
    (45, 9191817216, 8908701696, 11574181888, 2544138977),
    (55, 10932453376, 10619977728, 12759072768, 2544138977),
)
"""Batch, the bytes of the process, and what xMem, DNNMem and SchedTune said of it."""

RTX4080 = (
    ("Qwen2.5-0.5B", "lora", "", 1, 1024, 3.0324, 3.7949),
    ("Qwen2.5-0.5B", "qlora", "", 1, 1024, 3.1158, 3.3027),
    ("Qwen2.5-0.5B", "qlora", "", 1, 2048, 5.5220, 6.2812),
    ("Qwen2.5-1.5B", "qlora", "", 1, 512, 2.7943, 2.9062),
    ("Qwen2.5-1.5B", "qlora", "", 1, 1024, 4.0413, 4.3574),
    ("Qwen2.5-1.5B", "qlora", "", 1, 2048, 6.5324, 7.0977),
    ("Qwen2.5-1.5B", "qlora", "", 1, 4096, 11.5068, 13.5566),
    ("Qwen2.5-1.5B", "qlora", "", 2, 1024, 6.5311, 6.8809),
    ("Qwen2.5-1.5B", "qlora", "all activations", 1, 1024, 9.3413, 9.5527),
    ("Qwen2.5-3B", "qlora", "", 1, 1024, 5.1719, 5.5371),
    ("Qwen2.5-7B", "qlora", "", 1, 1024, 10.0023, 11.2324),
)
"""Model, method, what is special, batch, length; allocated and reserved at most, in GiB."""

A100 = (
    ("full", "pure", 4, 72434837504),
    ("full", "pure", 8, 72435230720),
    ("lora", "pure", 4, 26704571904),
    ("lora", "pure", 8, 38742912512),
    ("qlora", "amp", 4, 16373838336),
    ("qlora", "amp", 8, 28412178944),
    ("qlora", "amp, norms in fp32", 4, 20669338112),
    ("qlora", "amp, norms in fp32", 8, 37002646016),
)
"""Method, precision, batch, and the bytes allocated at most."""

T4_CONTEXT_BYTES = round(140.9 * (1 << 20))
"""The CUDA context of the T4's processes: what they held in addition to torch's reserved memory."""


def a6000_training(model: str, method: Any, precision: str, special: str) -> Training:
    return Training(
        config=CONFIGS[model],
        method=method,
        lora=Lora(r=16, alpha=32, targets=ATTENTION_TARGETS) if method == "lora" else None,
        weights="bf16" if precision == "pure" else "fp32",
        autocast="bf16" if precision == "amp" else None,
        batch=1,
        seq_len=2048,
        padded=True,
        gradient_checkpointing=special == "checkpointing",
        attention="eager" if special == "eager" else "sdpa",
        optimizer="adamw_foreach",
        loss="whole",
        outputs_until="backward",
        keep_gradients=True,
        generation=86,
    )


def t4_training(model: str, method: Any, attention: Any, batch: int, length: int) -> Training:
    return Training(
        config=CONFIGS[model],
        method=method,
        lora=Lora(r=32, alpha=64, targets=ATTENTION_TARGETS),
        double_quantization=False,
        in_fp32="all",
        weights="fp16",
        batch=batch,
        seq_len=length,
        gradient_checkpointing=True,
        attention=attention,
        optimizer="adamw_foreach",
        loss="whole",
        outputs_until="step",
        generation=75,
    )


def rtx4080_training(model: str, method: Any, special: str, batch: int, length: int) -> Training:
    return Training(
        config=CONFIGS[model],
        method=method,
        lora=Lora(r=16, alpha=16, targets=ATTENTION_TARGETS),
        in_fp32="all",
        weights="bf16",
        batch=batch,
        seq_len=length,
        gradient_checkpointing=special != "all activations",
        optimizer="paged_adamw_8bit",
        loss="whole",
        outputs_until="next",
        generation=89,
    )


def a100_training(method: Any, precision: str, batch: int) -> Training:
    return Training(
        config=CONFIGS["Mistral-7B"],
        method=method,
        lora=None if method == "full" else Lora(r=16, alpha=16, dropout=0.1, targets=ATTENTION_TARGETS),
        in_fp32="vectors" if "norms" in precision else "nothing",
        weights="bf16",
        autocast=None if precision == "pure" else "bf16",
        batch=batch,
        seq_len=4096,
        gradient_checkpointing=True,
        attention="flash",
        optimizer="adamw_foreach",
        loss="whole",
        generation=80,
    )


@contextmanager
def copying_logits() -> Iterator[None]:
    """Let models compute their loss as with the transformers of the A100's rows, 4.48: of a copy of
    the logits in fp32 without those of the last token."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **options: Any) -> torch.Tensor:
        wide = logits.float()
        copied = wide[:, :-1].contiguous().view(-1, vocab_size)
        return F.cross_entropy(copied, labels[:, 1:].reshape(-1))

    with mock.patch.dict(loss_utils.LOSS_MAPPING, ForCausalLM=loss):
        yield


def xmem_training(batch: int) -> Training:
    return Training(
        config={
            "model_type": "t5",
            "d_model": 512,
            "d_ff": 2048,
            "d_kv": 64,
            "num_layers": 6,
            "num_decoder_layers": 6,
            "num_heads": 8,
            "vocab_size": 32128,
        },
        task="seq2seq",
        batch=batch,
        seq_len=128,
        padded=True,
        attention="eager",
        optimizer="adamw_foreach",
        loss="whole",
        outputs_until="step",
        generation=86,
    )


def wiki_training(length: int) -> Training:
    return Training(
        config=llama(4096, 11008, 32, 32, 32, 32000, tie_word_embeddings=False),
        method="qlora",
        lora=Lora(r=8, alpha=16, targets=("all-linear",)),
        weights="bf16",
        autocast="bf16",
        # LLaMA-Factory leaves the norms of the base in bf16.
        in_fp32="nothing",
        batch=1,
        seq_len=length,
        gradient_checkpointing=True,
        attention="flash",
        optimizer="adamw_foreach",
        loss="whole",
        generation=80,
    )
