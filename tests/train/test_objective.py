"""The loss in chunks equals the whole loss, for every kind of head and for models that change their
logits after it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from memtop.train.objective import IGNORED, Objective, counted_positions

SMALL = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
T5 = {"vocab_size": 260, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16, "decoder_start_token_id": 0}


def model_of(kind: str, values: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **values)
    model: torch.nn.Module = (AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM).from_config(config)
    return model


def batch(*, seq2seq: bool) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 200, (3, 17))
    labels = torch.randint(0, 200, (3, 11)) if seq2seq else ids.clone()
    labels[0, :5] = IGNORED
    return ids, labels


def loss_and_gradients(
    model: torch.nn.Module, chunk: int, *, seq2seq: bool, sparse: bool = False
) -> tuple[float, dict[str, torch.Tensor], int]:
    model.zero_grad()
    objective = Objective(model, seq2seq=seq2seq, chunk=chunk).eval()
    ids, labels = batch(seq2seq=seq2seq)
    loss = objective(ids, labels, counted=counted_positions(labels, seq2seq=seq2seq) if sparse else None)
    (loss / 7).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients, objective.chunk


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama", SMALL),
        ("llama", {**SMALL, "tie_word_embeddings": True}),
        ("qwen2", SMALL),
        ("gpt2", {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}),
        ("t5", T5),
        ("t5", {**T5, "tie_word_embeddings": False}),
    ],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_loss_and_gradients_in_chunks_equal_those_of_the_whole(kind: str, values: dict[str, Any], sparse: bool) -> None:
    model = model_of(kind, values)
    whole, expected, _ = loss_and_gradients(model, 0, seq2seq=kind == "t5")
    pieces, found, chunk = loss_and_gradients(model, 7, seq2seq=kind == "t5", sparse=sparse)
    assert chunk == 7, "this architecture's head must be chunked"
    assert pieces == pytest.approx(whole, rel=1e-6)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_the_loss_is_the_one_that_the_model_computes() -> None:
    model = model_of("llama", SMALL).eval()
    ids, labels = batch(seq2seq=False)
    expected = model(input_ids=ids, labels=labels).loss * (labels[:, 1:] != IGNORED).sum()
    assert float(Objective(model, chunk=5)(ids, labels).detach()) == pytest.approx(float(expected), rel=1e-6)


def test_capped_logits_are_detected_and_computed_whole() -> None:
    model = model_of("gemma2", {**SMALL, "head_dim": 16})
    assert Objective(model, chunk=5).chunk == 0


def test_a_head_that_is_more_than_a_matrix_runs_its_own_forward() -> None:
    from peft import LoraConfig, get_peft_model

    whole = get_peft_model(model_of("llama", SMALL), LoraConfig(r=4, target_modules=["lm_head", "q_proj"]))  # type: ignore[arg-type]
    for name, parameter in whole.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    expected_loss, expected, _ = loss_and_gradients(whole, 0, seq2seq=False)
    loss, found, chunk = loss_and_gradients(whole, 7, seq2seq=False)
    assert chunk == 7
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert any("lm_head" in name for name in found)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_no_tensor_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that autograd keeps and every result of an operation is smaller than the
    logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if torch.is_tensor(tensor):
                    largest = max(largest, tensor.numel())
            return result

    model = model_of("llama", {**SMALL, "vocab_size": 6000})
    ids, labels = batch(seq2seq=False)
    # The head's own gradient is as large as the head.
    head = 6000 * 32
    for chunk in (0, 4):
        largest = 0
        objective = Objective(model, chunk=chunk)
        with Watch():
            objective(ids, labels).backward()
        if chunk:
            assert largest <= head
        else:
            assert largest >= 3 * 17 * 6000
