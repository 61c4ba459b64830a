"""The loss in chunks equals the whole loss, for every kind of head and for models that change their
logits after it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, masking_utils

from memtop.presets.logits import tokens_at_once
from memtop.train import objective
from memtop.train.batches import completed
from memtop.train.data.samples import collate
from memtop.train.devices import free_bytes
from memtop.train.objective import IGNORED, Objective, counted_positions
from tests.train.card import put_in

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
    loss_of = Objective(model, seq2seq=seq2seq, chunk=chunk).eval()
    ids, labels = batch(seq2seq=seq2seq)
    loss = loss_of(ids, labels, counted=counted_positions(labels, seq2seq=seq2seq) if sparse else None)
    (loss / 7).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients, loss_of.chunk


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


class Watch(TorchDispatchMode):
    """The operations inside the block, the dtypes of their results, and the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.largest_bytes = 0
        self.calls: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        found = [x for x in (result if isinstance(result, (tuple, list)) else [result]) if torch.is_tensor(x)]
        if not function.is_view:
            self.largest = max([self.largest, *(tensor.numel() for tensor in found)])
            self.largest_bytes = max([self.largest_bytes, *(tensor.numel() * tensor.itemsize for tensor in found)])
        self.calls.append((str(function), tuple(tensor.dtype for tensor in found)))
        return result

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.calls}


WAITS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default"}
"""Operations that read a value from the device, and so wait for everything before."""


def test_no_tensor_holds_all_logits() -> None:
    """Every tensor that autograd keeps and every result of an operation is smaller than the
    logits."""
    model = model_of("llama", {**SMALL, "vocab_size": 6000})
    ids, labels = batch(seq2seq=False)
    # The head's own gradient is as large as the head.
    head = 6000 * 32
    for chunk in (0, 4):
        loss_of = Objective(model, chunk=chunk)
        with Watch() as seen:
            loss_of(ids, labels).backward()
        if chunk:
            assert seen.largest <= head
        else:
            assert seen.largest >= 3 * 17 * 6000


def test_an_evaluation_computes_no_gradient() -> None:
    """Evaluations are in pieces, too."""
    model = model_of("llama", {**SMALL, "vocab_size": 6000})
    expected = float(Objective(model, chunk=0)(*batch(seq2seq=False)).detach())
    loss_of = Objective(model, chunk=4)
    with Watch() as seen, torch.no_grad():
        loss = float(loss_of(*batch(seq2seq=False)))
    assert loss == pytest.approx(expected, rel=1e-6)
    # A gradient of the head would be the largest tensor.
    assert seen.largest < 6000 * 32


def head_gradient(model: Any, chunk: int, factor: float, repeated: int = 1) -> torch.Tensor:
    model.zero_grad()
    ids, labels = (tensor.repeat(repeated, 1) for tensor in batch(seq2seq=False))
    (Objective(model, chunk=chunk)(ids, labels) * factor).backward()
    found: torch.Tensor = model.lm_head.weight.grad
    return found.double()


def test_gradients_of_a_head_in_16_bits_are_summed_in_32() -> None:
    """DeepSpeed's weights are in 16 bits, without autocast."""
    model = model_of("llama", SMALL).to(torch.bfloat16).eval()
    whole, pieces = head_gradient(model, 0, 1 / 50), head_gradient(model, 2, 1 / 50)
    # 714 tokens, of which 600 are one piece.
    large = head_gradient(model, 600, 1 / 50, repeated=14)
    exact = head_gradient(model.double(), 0, 1 / 50)
    assert (pieces - exact).norm() <= 1.05 * (whole - exact).norm()
    assert (large / 14 - exact).norm() <= 1.05 * (whole - exact).norm()


def test_a_gradient_of_the_sum_that_fp16_cannot_hold_becomes_one_of_the_mean() -> None:
    model: Any = model_of("llama", SMALL).eval()
    with torch.no_grad():
        model.model.norm.weight.fill_(20000.0)
        model.lm_head.weight.mul_(3e-4)
    exact = head_gradient(model, 0, 1 / 50)
    assert (exact * 50).abs().max() > torch.finfo(torch.float16).max
    found = head_gradient(model.half(), 7, 1 / 50)
    assert (found - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize(("kind", "values"), [("llama", SMALL), ("qwen2", SMALL), ("t5", T5)])
def test_the_loss_does_not_wait_for_the_device(kind: str, values: dict[str, Any]) -> None:
    loss_of = Objective(model_of(kind, values), seq2seq=kind == "t5", chunk=7)
    ids, labels = batch(seq2seq=kind == "t5")
    with Watch() as seen:
        loss_of(ids, labels).backward()
    assert not seen.names & WAITS


def test_transformers_own_check_for_packed_samples_stays_in_place() -> None:
    own = masking_utils.find_packed_sequence_indices
    loss_of = Objective(model_of("llama", SMALL), chunk=7)
    ids, labels = batch(seq2seq=False)
    loss_of(ids, labels)
    assert masking_utils.find_packed_sequence_indices is own
    with pytest.raises(IndexError):
        loss_of(ids + 1000, labels)
    assert masking_utils.find_packed_sequence_indices is own


class ShardedWeight:
    """A weight that exists only between the hooks of its module, as under ZeRO-3."""

    def __init__(self, module: Any) -> None:
        self.gathered = 0
        self._weight, self._whole = module.weight, module.weight.data
        self._weight.ds_id = 0
        module.register_forward_pre_hook(lambda *_: self._gather())
        module.register_forward_hook(lambda _, inputs, output: self._forward_ends(output))
        module.weight.register_post_accumulate_grad_hook(lambda _: self._release())
        self._release()

    def _gather(self) -> None:
        self.gathered += 1
        self._weight.data = self._whole

    def _release(self) -> None:
        self._weight.data = torch.empty(0)

    def _forward_ends(self, output: torch.Tensor) -> torch.Tensor:
        self._release()
        output.register_hook(lambda _: self._gather())
        return output


def test_a_sharded_head_is_gathered_once_forward_and_once_backward() -> None:
    model: Any = model_of("llama", SMALL)
    whole, expected, _ = loss_and_gradients(model, 0, seq2seq=False)
    head = ShardedWeight(model.lm_head)
    loss, found, chunk = loss_and_gradients(model, 7, seq2seq=False)
    assert (chunk, head.gathered) == (7, 2)
    assert loss == pytest.approx(whole, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "vocabulary", "tokens", "dtype", "expected"),
    [
        # An 80 GB card: the largest pieces. Two of them are equally large.
        (70 * GIB, 152_000, 8192, torch.bfloat16, 4096),
        (70 * GIB, 152_000, 5000, torch.bfloat16, 2560),
        (70 * GIB, 152_000, 900, torch.bfloat16, 1024),
        # A small card, another precision, or memory that is nearly full.
        (3 * GIB, 152_000, 8192, torch.bfloat16, 1024),
        (6 * GIB, 152_000, 8192, torch.float32, 2048),
        (6 * GIB, 32_000, 8192, torch.bfloat16, 4096),
        (2 * GIB, 152_000, 8192, torch.float16, 512),
        (GIB, 152_000, 8192, torch.float16, 128),
        (0, 152_000, 8192, torch.bfloat16, 128),
        # A CPU: the same bytes for every vocabulary.
        (None, 50_304, 2048, torch.float32, 333),
        (None, 1 << 30, 2048, torch.float32, 1),
    ],
)
def test_pieces_follow_the_free_memory(
    free: int | None, vocabulary: int, tokens: int, dtype: torch.dtype, expected: int
) -> None:
    assert tokens_at_once(free, vocabulary, tokens, dtype.itemsize) == expected


def test_free_bytes_are_those_that_torch_may_still_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    card = put_in(monkeypatch)
    card.take(300)
    assert free_bytes(torch.device("cuda:0")) == card.total - card.held
    # Half of the card is allowed, of which 300 bytes are reserved and 100 in use.
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    assert free_bytes(torch.device("cuda:0")) == 500 - card.held
    assert free_bytes(torch.device("cpu")) is None


def test_on_a_gpu_products_of_16_bits_give_the_weights_gradient_in_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors that have no numbers: to read one would raise an error."""
    monkeypatch.setattr(objective, "free_bytes", lambda device: 2 * GIB)
    with torch.device("meta"):
        model: Any = model_of("llama", {**SMALL, "vocab_size": 152_000}).to(torch.bfloat16)
        # As under DeepSpeed, the model is not run before its first batch.
        model.lm_head.weight.ds_id = 0
        ids = torch.zeros((8, 256), dtype=torch.int64)
        with Watch() as seen:
            Objective(model)(ids, ids).backward()
    products = {name: [d for n, d in seen.calls if n == name] for name in ("aten.mm.dtype", "aten.addmm.dtype_out")}
    # 2 GiB / 4 hold the logits of 512 tokens. All pieces add to one gradient of the weight.
    assert products == {"aten.mm.dtype": [(torch.float32,)] * 5, "aten.addmm.dtype_out": [(torch.float32,)] * 3}
    assert seen.largest == 152_000 * 512
    # The softmax in 32 bits exists for a part of them.
    assert seen.largest_bytes == 152_000 * 512 * 2
    assert model.lm_head.weight.grad.dtype == torch.bfloat16
    with torch.device("meta"), torch.no_grad(), Watch() as seen:
        Objective(model)(ids, ids)
    # An evaluation has the logits in 32 bits, too.
    assert seen.largest_bytes == 152_000 * 128 * 4


def test_pieces_leave_room_for_the_gradient_of_the_heads_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "free_bytes", lambda device: 2 * GIB)
    with torch.device("meta"):
        model: Any = model_of("llama", {**SMALL, "hidden_size": 896, "vocab_size": 152_000}).to(torch.bfloat16)
        model.lm_head.weight.ds_id = 0
        of_trained = Objective(model).chunk
        model.lm_head.weight.requires_grad_(False)
        assert (of_trained, Objective(model).chunk) == (256, 512)


def with_bias(model: Any) -> torch.nn.Module:
    head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features, device=model.device, dtype=model.dtype)
    head.weight = model.lm_head.weight
    model.lm_head = head
    found: torch.nn.Module = model
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_head_with_a_trained_bias(dtype: torch.dtype) -> None:
    model = with_bias(model_of("llama", SMALL)).to(dtype)
    _, found, _ = loss_and_gradients(model, 7, seq2seq=False)
    _, expected, _ = loss_and_gradients(model.double(), 0, seq2seq=False)
    assert "lm_head.bias" in found
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for name, gradient in expected.items():
        assert (found[name].double() - gradient).norm() <= tolerance * gradient.norm(), name


def test_the_gradient_of_a_bias_takes_no_logits_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "free_bytes", lambda device: 2 * GIB)
    with torch.device("meta"):
        model: Any = with_bias(model_of("llama", {**SMALL, "vocab_size": 152_000}).to(torch.bfloat16))
        model.lm_head.weight.ds_id = 0
        ids = torch.zeros((4, 256), dtype=torch.int64)
        with Watch() as seen:
            Objective(model)(ids, ids).backward()
    assert seen.largest_bytes == 152_000 * 512 * 2
    assert model.lm_head.bias.grad.shape == (152_000,)


def test_fp16_holds_the_gradients_behind_a_head_of_large_weights() -> None:
    model: Any = model_of("llama", SMALL).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(60 / model.lm_head.weight.std())
    ids, labels = batch(seq2seq=False)

    def gradient_of(model: Any, chunk: int) -> torch.Tensor:
        model.zero_grad()
        (Objective(model, chunk=chunk)(ids, labels) / 50).backward()
        found: torch.Tensor = model.model.norm.weight.grad
        return found.double()

    found = gradient_of(model.half(), 7)
    exact = gradient_of(model.double(), 0)
    assert (found - exact).norm() <= 0.02 * exact.norm()


def test_the_loss_of_a_padded_batch_is_the_sum_of_its_samples() -> None:
    """Whether there is padding is decided with the batch, and transformers does not look again."""
    objective = Objective(model_of("t5", T5), seq2seq=True, chunk=0).eval()
    samples = [(torch.randint(3, 200, (length,)), torch.randint(3, 200, (5,))) for length in (4, 9, 9)]

    def loss_of(chosen: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, bool]:
        found, tokens = completed(collate(chosen, pad=0), "seq2seq", masked=False, pin=False)
        assert tokens == 5 * len(chosen)
        with torch.no_grad():
            return float(objective(**found)), "attention_mask" in found

    together, masked = loss_of(samples)
    alone = [loss_of([sample]) for sample in samples]
    assert masked
    assert [with_mask for _, with_mask in alone] == [False, False, False]
    assert together == pytest.approx(sum(loss for loss, _ in alone), rel=1e-5)


def test_a_decoder_starts_with_the_padding_id_if_the_model_does_not_say_it() -> None:
    model: Any = model_of("t5", T5)
    ids, labels = torch.randint(3, 200, (2, 9)), torch.randint(3, 200, (2, 5))
    expected = Objective(model, seq2seq=True, chunk=0).eval()(ids, labels)
    assert model.config.decoder_start_token_id == model.config.pad_token_id == 0
    del model.config.decoder_start_token_id
    assert torch.equal(Objective(model, seq2seq=True, chunk=0).eval()(ids, labels), expected)


def test_a_model_that_adds_to_its_logits_computes_them_whole() -> None:
    values = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = AutoConfig.for_model("bart", vocab_size=260, d_model=32, **values, **heads)
    model = AutoModelForSeq2SeqLM.from_config(config)
    whole, pieces = (loss_and_gradients(model, chunk, seq2seq=True) for chunk in (0, 5))
    assert pieces[0] == whole[0]
    assert pieces[2] == 0


def test_a_base_in_16_bits_with_norms_in_32_is_accepted() -> None:
    """As QLoRA has it."""
    model = model_of("t5", T5).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = parameter.data.float()
    assert Objective(model, seq2seq=True, chunk=5).chunk == 5


def test_the_pieces_follow_the_memory_that_the_caller_names() -> None:
    model = model_of("llama", SMALL)
    sizes = [Objective(model, free=lambda device, free=free: free).chunk for free in (1 << 20, 1 << 30)]  # type: ignore[misc]
    assert sizes == [128, 4096]
