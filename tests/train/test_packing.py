"""Samples that share a row do not see each other, and train a model as rows of their own would.

Samples of an update are shared out by length, so that little is padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen as torch_varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from memtop.presets import Settings
from memtop.presets.host_memory import host_plan
from memtop.train import packing
from memtop.train.batches import Batches, collated, completed
from memtop.train.data.samples import Sample, in_one_row
from memtop.train.model import set_checkpointing
from memtop.train.objective import IGNORED, Objective
from memtop.train.order import Key, Position, SampleOrder, grouped
from memtop.train.packing import is_prepared, packed_row, use_packing, varlen, varlen_fits
from memtop.train.state_files import Cut
from tests.train.support import TINY, Training, edited, samples
from tests.train.waits import CARD, CardAccelerator, Waits

PAD = 0
COMMON = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


def model_of(kind: str = "llama", **values: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    given = GPT2 if kind == "gpt2" else COMMON
    model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**given, **values}))
    return model


def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    adapted: torch.nn.Module = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))  # type: ignore[arg-type]
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


def dialogues(*lengths: int) -> list[Sample]:
    """Random samples; the first third of each is a prompt."""
    torch.manual_seed(1)
    found = []
    for length in lengths:
        ids = torch.randint(3, 260, (length,))
        labels = ids.clone()
        labels[: length // 3] = IGNORED
        found.append((ids, labels))
    return found


def gradients(
    model: torch.nn.Module, batch: list[Sample], *, packed: bool, chunk: int = 7, precision: str = "fp32"
) -> tuple[float, dict[str, torch.Tensor]]:
    objective = Objective(model, chunk=chunk).train()
    model.zero_grad()
    inputs, _ = completed(collated(batch, PAD, packed=packed), "sft", masked=False, pin=False)
    assert ("sample_lengths" in inputs) == packed
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = objective(**inputs)
    loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("chunk", [0, 7])
def test_packed_samples_give_the_gradients_of_padded_ones(kind: str, chunk: int) -> None:
    model = model_of(kind)
    batch = dialogues(5, 17, 2, 9)
    loss, expected = gradients(model, batch, packed=False, chunk=chunk)
    assert use_packing(TINY, model, Accelerator(cpu=True)) is None
    packed_loss, found = gradients(model, batch, packed=True, chunk=chunk)
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("fits", [True, False])
def test_a_model_that_is_still_on_the_cpu_is_tested_on_the_device_of_the_run(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is under ZeRO. A model that is too large for the device is tested where it is."""
    model: Any = model_of()
    ran_on: list[torch.device] = []

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        ran_on.append(inputs[0].device)
        if inputs[0].device == CARD and not fits:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.lm_head.register_forward_pre_hook(note)
    # torch knows no autocast for the stand-in's device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    with Waits():
        assert use_packing(TINY, model, CardAccelerator()) is None
    cpu = torch.device("cpu")
    assert ran_on == ([CARD] * 3 if fits else [CARD, cpu, cpu, cpu])
    assert {parameter.device for parameter in model.parameters()} == {cpu}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_so_it_is_with_adapters_checkpointing_and_in_16_bits(lora: bool, precision: str) -> None:
    model = with_lora(model_of("qwen2")) if lora else model_of("qwen2")
    batch = dialogues(5, 17, 2, 9)
    loss, expected = gradients(model, batch, packed=False, precision=precision)
    assert use_packing(TINY, model, Accelerator(cpu=True)) is None
    set_checkpointing(model, on=True)
    packed_loss, found = gradients(model, batch, packed=True, precision=precision)
    exact = precision == "fp32"
    assert packed_loss == pytest.approx(loss, rel=1e-6 if exact else 1e-3)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm() / gradient.norm())
        assert error < (1e-5 if exact else 0.02), name


def test_a_sample_changes_nothing_in_the_others_of_its_row() -> None:
    model = model_of().eval()
    assert use_packing(TINY, model, Accelerator(cpu=True)) is None
    row = packed_row((6, 4, 5))
    ids = torch.arange(3, 18).unsqueeze(0)
    logits = model(input_ids=ids, use_cache=False, **row).logits
    for place in (2, 8, 14):
        other = ids.clone()
        other[0, place] = 99
        changed = (model(input_ids=other, use_cache=False, **row).logits != logits).any(-1)[0].nonzero().flatten().tolist()
        start, end = next((start, end) for start, end in ((0, 6), (6, 10), (10, 15)) if start <= place < end)
        assert changed == list(range(place, end)), f"place {place} of the sample from {start} on"


def test_no_sample_predicts_the_beginning_of_the_next_one() -> None:
    ids = torch.tensor([5, 6, 7])
    row = in_one_row([(ids, ids), (ids[:2], ids[:2]), (ids, ids)])
    assert row["labels"].tolist() == [[5, 6, 7, IGNORED, 6, IGNORED, 6, 7]]
    assert row["lengths"].tolist() == [3, 2, 3]
    _, tokens = completed(row, "sft", masked=False, pin=False)
    assert tokens == 5
    assert packed_row([3, 2])["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert packed_row([3, 2])["sample_starts"].tolist() == [0, 3, 5]


def test_a_row_is_packed_only_where_that_saves_something() -> None:
    assert "lengths" not in collated(dialogues(9, 9), PAD, packed=True)
    assert "lengths" not in collated(dialogues(99, 98, 97), PAD, packed=True)
    assert "lengths" in collated(dialogues(9, 5), PAD, packed=True)
    assert "lengths" not in collated(dialogues(9, 5), PAD, packed=False)


@pytest.mark.parametrize(
    ("kind", "values", "settings", "words"),
    [
        ("mistral", {"sliding_window": 8}, TINY, "8 tokens back, less than T 16"),
        ("gemma2", {"head_dim": 16}, TINY, "cannot be replaced"),
        ("falcon", {}, TINY, "would change the others"),
        ("llama", {}, edited(compile=True), "torch.compile"),
        ("llama", {}, edited(task="seq2seq"), "encoder"),
    ],
)
def test_a_model_that_would_mix_samples_is_left_as_it_is(
    kind: str, values: dict[str, Any], settings: Settings, words: str
) -> None:
    model: Any = model_of(kind, **values)
    reason = use_packing(settings, model, Accelerator(cpu=True))
    assert reason is not None
    assert words in reason
    assert not is_prepared(model)


def test_a_window_as_long_as_t_is_none() -> None:
    assert use_packing(TINY, model_of("mistral", sliding_window=16), Accelerator(cpu=True)) is None


# The kernel of a GPU.


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """What the kernel computes. [n, heads, d]; numbers beyond a sample stay out of it."""
    found = []
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        part = [tensor[start:end].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
        found.append(scaled_dot_product_attention(*part, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(found)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A stand-in for torch's kernel on the CPU, which rejects what the real one rejects."""
    calls: list[dict[str, Any]] = []
    known = inspect.signature(torch_varlen.varlen_attn)

    def stand_in(*args: Any, **options: Any) -> torch.Tensor:
        given = known.bind(*args, **options)
        given.apply_defaults()
        query, key, value = (given.arguments[name] for name in ("query", "key", "value"))
        starts, longest = given.arguments["cu_seq_q"], given.arguments["max_q"]
        assert given.arguments["cu_seq_k"] is starts
        assert given.arguments["max_k"] == longest
        assert query.dtype == key.dtype == value.dtype == torch.bfloat16, "the kernel takes 16 bits only"
        assert query.dim() == key.dim() == value.dim() == 3
        assert all(tensor.stride(-1) == 1 for tensor in (query, key, value)), "the last dimension must be contiguous"
        assert starts.dtype == torch.int32
        assert starts[-1] == len(query)
        assert isinstance(longest, int)
        assert longest == int(starts.diff().max())
        assert given.arguments["window_size"] == (-1, 0), "causal"
        assert given.arguments["enable_gqa"] or query.shape[1] == key.shape[1]
        calls.append(dict(given.arguments))
        return reference(query, key, value, starts, given.arguments["scale"])

    stand_in.__signature__ = known  # type: ignore[attr-defined]
    packing.varlen_kernel.cache_clear()
    monkeypatch.setattr(torch_varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(packing, "varlen_fits", lambda query, key, value: query.dtype == torch.bfloat16)
    yield calls
    packing.varlen_kernel.cache_clear()


def test_the_kernel_gets_what_it_takes_and_gives_the_same(kernel: list[dict[str, Any]]) -> None:
    model = model_of("qwen2")
    batch = dialogues(5, 17, 2, 9)
    loss, expected = gradients(model, batch, packed=False, precision="bf16")
    assert use_packing(TINY, model, Accelerator(cpu=True)) is None
    assert kernel == [], "in fp32 the kernel does not fit"
    packed_loss, found = gradients(model, batch, packed=True, precision="bf16")
    assert len(kernel) == 2, "once in each layer"
    assert packed_loss == pytest.approx(loss, rel=1e-3)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 0.02, name


def test_torchs_own_kernel_accepts_the_call_and_has_a_backward_pass() -> None:
    rows = [torch.empty(12, heads, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (4, 2, 2)]
    found = varlen(rows, torch.empty(4, dtype=torch.int32, device="meta"), 5, 0.25)
    assert found.shape == (12, 4, 16)
    found.sum().backward()
    for row in rows:
        assert row.grad is not None
        assert row.grad.shape == row.shape


def test_which_tensors_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def fits(size: int, *, values: int | None = None, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> bool:
        with FakeTensorMode():
            sizes = ((4, size), (2, size), (2, values or size))
            return varlen_fits(*(torch.empty(1, heads, 12, d, dtype=dtype, device=device) for heads, d in sizes))

    assert fits(64)
    assert fits(192, dtype=torch.float16)
    assert not fits(64, dtype=torch.float32)
    assert not fits(64, values=72), "another size of the values"
    assert not fits(20), "no multiple of 8"
    assert not fits(256), "no backward pass on some cards"
    assert not fits(64, device="cpu")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert not fits(64), "torch was built without flash attention"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert not fits(64), "no flash attention on Turing"


# Which samples share a micro-batch.


def shared_out(lengths: list[int], sizes: list[int], *, balanced: bool) -> list[list[int]]:
    keys: list[Key] = [(number, 0) for number in range(len(lengths))]
    return [[number for number, _ in group] for group in grouped(keys, lengths, sizes, balanced=balanced)]


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("sizes", [[4, 4, 4, 4], [4, 4, 3, 0], [1, 5, 2], [16]])
def test_every_sample_is_in_one_group_and_groups_keep_their_sizes(sizes: list[int], balanced: bool) -> None:
    lengths = np.random.default_rng(sum(sizes)).integers(1, 100, sum(sizes)).tolist()
    groups = shared_out(lengths, sizes, balanced=balanced)
    assert [len(group) for group in groups] == sizes
    assert sorted(number for group in groups for number in group) == list(range(len(lengths)))
    assert groups == shared_out(lengths, sizes, balanced=balanced)


def test_groups_are_alike_in_length_or_in_tokens() -> None:
    lengths = [90, 3, 80, 5, 70, 7, 4, 60]
    assert shared_out(lengths, [4, 4], balanced=False) == [[0, 2, 4, 7], [5, 3, 6, 1]]
    tokens = [sum(lengths[number] for number in group) for group in shared_out(lengths, [4, 4], balanced=True)]
    assert max(tokens) - min(tokens) <= 3


def test_samples_of_one_length_keep_their_order() -> None:
    assert shared_out([16] * 5, [2, 2, 1], balanced=True) == [[0, 1], [2, 3], [4]]


# Training.


def run(tmp_path: Path, name: str, **changes: Any) -> Training:
    settings = edited(**{"target_samples": 44, "eval_every": 3, **changes})
    training = Training(tmp_path / name, settings, evaluation=samples())
    training.run()
    return training


def padding(training: Training) -> float:
    return float(np.mean([step["padding_fraction"] for step in training.channel.of("step")]))


@pytest.mark.parametrize("task", ["causal", "sft"])
def test_training_learns_the_same_and_pads_less(tmp_path: Path, task: str) -> None:
    plain, packed = (run(tmp_path, str(on), packing=on, task=task, seq_len=64) for on in (False, True))
    grouping = run(tmp_path, "grouped", seq_len=64, model={"config": {**TINY.model["config"], "model_type": "falcon"}})
    assert [is_prepared(one.model) for one in (packed, plain, grouping)] == [True, False, False]
    # The last update is short: its second micro-batch has no sample.
    assert len(packed.losses) == 6
    assert packed.digests == plain.digests == grouping.digests
    assert packed.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, weight in plain.weights().items():
        # Adam makes a whole step also of a gradient that is rounding alone.
        same = torch.isclose(packed.weights()[name], weight, rtol=1e-4, atol=1e-5)
        assert same.float().mean() > 0.99, name
    evaluated = [[one["loss"] for one in training.channel.of("evaluation")] for training in (plain, packed)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)
    assert 0 <= padding(packed) < padding(grouping) < padding(plain) < 1
    assert padding(packed) < padding(plain) / 3


def test_another_split_after_a_restart_changes_nothing(tmp_path: Path) -> None:
    # The learning rate would depend on the target.
    same: dict[str, Any] = {"seq_len": 64, "warmup_fraction": 0.0, "final_learning_rate_fraction": 1.0}
    whole = run(tmp_path, "whole", **same)
    run(tmp_path, "parts", **same, target_samples=24)
    rest = run(tmp_path, "parts", **same, batch=2, accumulation=4)
    assert rest.digests == whole.digests[3:]
    for name, weight in whole.weights().items():
        torch.testing.assert_close(rest.weights()[name], weight, rtol=1e-3, atol=1e-4, msg=name)


def test_all_ranks_together_have_each_sample_once() -> None:
    settings = msgspec.structs.replace(edited(target_samples=25, seq_len=64), world_size=3, batch=2, accumulation=2)
    position = Position(cuts=(Cut(0, 64),))
    host = host_plan(settings, None, on_gpu=False)
    of_all = []
    for rank in range(3):
        batches = Batches(samples(), SampleOrder(samples(), 1, position.cuts), PAD, rank, packed=True)
        batches.start(settings, host, position, 25)
        of_all.append([(batches.next_update(), batches.fetch()) for _ in range(3)])
        batches.close()
    for number, lengths in enumerate([12, 12, 1]):
        plan = of_all[0][number][0]
        assert plan is not None
        assert len(plan.keys) == lengths
        whole = sum(length for _, length in plan.keys)
        assert sum(made.filled for _, made in (rank[number] for rank in of_all)) == whole
        # Each sample predicts all its tokens but the first.
        assert sum(made.tokens for _, made in (rank[number] for rank in of_all)) == whole - lengths
        assert len({len(rank[number][1].batches) for rank in of_all}) == 1, "ranks stay in step"
