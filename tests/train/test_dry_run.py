"""The memory of a training, foreseen without a GPU: against published measurements, and part by
part."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, masking_utils

from bench.predict import MIB
from bench.published import (
    A100,
    A6000,
    RTX4080,
    T4,
    T4_CONTEXT_BYTES,
    XMEM,
    a100_training,
    a6000_training,
    copying_logits,
    rtx4080_training,
    t4_training,
    xmem_training,
)
from bench.trainings import GIB
from memtop.presets import load_presets, load_recipes, resolve
from memtop.presets.allocator import Allocator
from memtop.presets.logits import ROWS
from memtop.presets.schema import Lora, Settings, Zero
from memtop.train import BadInputError
from memtop.train.dry_run import layers, results, run, trace
from memtop.train.dry_run.__main__ import Request, _Kept
from memtop.train.dry_run.build import Training, config_of, meta_model, training_of, with_layers
from memtop.train.dry_run.cuda import allocating_like_cuda, backward, kernels
from memtop.train.dry_run.layers import SHALLOW, deepened
from memtop.train.dry_run.run import Foresight, foresee, recorded, ring_bytes
from memtop.train.exchange import BUCKET_BYTES

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 16_000,
    "tie_word_embeddings": True,
}
EXPERTS = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
T5 = {
    "model_type": "t5",
    "vocab_size": 4096,
    "d_model": 256,
    "d_ff": 512,
    "d_kv": 64,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
}
QKVO = Lora(r=8, alpha=16)
PLAIN = Training(config=LLAMA, autocast="bf16", batch=2, seq_len=256, loss_chunk=128, generation=80)


def foreseen(**changes: Any) -> Foresight:
    return foresee(msgspec.structs.replace(PLAIN, **changes))


def weights_of(config: dict[str, Any]) -> int:
    """The parameters of a llama, tied."""
    h, f = config["hidden_size"], config["intermediate_size"]
    kv = h * config["num_key_value_heads"] // config["num_attention_heads"]
    layer = 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h
    return config["vocab_size"] * h + config["num_hidden_layers"] * layer + h


PARAMETERS = weights_of(LLAMA)
SMALL = 3 * (2 * 256 * 256 + 2 * 256 * 128)


def test_pieces_of_the_loss_that_repeat_are_left_out_without_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: tuple[dict[str, Any], ...] = ({}, {"method": "lora", "lora": QKVO, "accumulation": 2, "autocast": None})
    few = [foreseen(batch=4, loss_chunk=60, **one) for one in changes]
    monkeypatch.setattr(run, "_PIECES", 1000)
    for one, found in zip(changes, few, strict=True):
        every = foreseen(batch=4, loss_chunk=60, **one)
        assert msgspec.structs.replace(every, seconds=found.seconds) == found


@pytest.mark.parametrize(
    ("changes", "item", "in_32_bits"),
    [({}, 2, 2), ({"autocast": "fp16", "generation": 75}, 2, 1), ({"autocast": None}, 4, 0)],
)
def test_the_logits_of_one_piece_exist_at_a_time(changes: dict[str, Any], item: int, in_32_bits: int) -> None:
    """And of some rows in 32 bits, which log_softmax makes from bf16 in two steps."""
    found = foreseen(batch=8, loss_chunk=512, **changes)
    assert found.peak_phase == "forward"
    expected = 16_000 * (512 * item + in_32_bits * 4 * ROWS)
    assert expected * 0.95 < found.components["logits"] < expected + MIB


@pytest.mark.parametrize("row", [T4[6], T4[17]], ids=lambda row: "-".join(row[1:3]))
def test_a_row_measured_on_a_t4(row: Any) -> None:
    *what, allocated, forward, optimizer, reserved = row
    found = foresee(t4_training(*what))
    assert found.allocated == pytest.approx(allocated * MIB, rel=0.002)
    peaks = {peak.phase: peak.allocated for peak in found.phases}
    assert peaks["forward"] == pytest.approx(forward * MIB, rel=0.005)
    assert peaks["optimizer"] == pytest.approx(optimizer * MIB, rel=0.005)
    assert found.reserved == pytest.approx(reserved * MIB, rel=0.08)


def test_a_process_measured_with_t5_on_an_rtx_3060() -> None:
    batch, process, *_ = XMEM[2]
    reserved = process - T4_CONTEXT_BYTES
    assert foresee(xmem_training(batch)).reserved == pytest.approx(reserved, rel=0.03)


@pytest.mark.parametrize("row", [RTX4080[0], RTX4080[4]], ids=["lora", "qlora"])
def test_a_row_measured_on_an_rtx_4080(row: Any) -> None:
    """Where outputs that a variable keeps for too long, and weights in 16 bits from which those in
    fp32 are made, decide how many segments torch needs."""
    *what, allocated, reserved = row
    found = foresee(rtx4080_training(*what))
    assert found.allocated == pytest.approx(allocated * GIB, rel=0.001)
    assert found.reserved == pytest.approx(reserved * GIB, rel=0.03)


def test_a_row_measured_on_an_a100_with_an_older_loss() -> None:
    *what, allocated = A100[4]
    with copying_logits():
        assert foresee(a100_training(*what)).allocated == pytest.approx(allocated, rel=0.0001)
    assert foresee(a100_training(*what)).allocated < 0.95 * allocated


def test_a_row_measured_on_an_a6000() -> None:
    *what, allocated = A6000[0]
    assert foresee(a6000_training(*what)).allocated == pytest.approx(allocated * 1e9, rel=0.001)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": "whole", "outputs_until": "step"},
        {"gradient_checkpointing": True, "accumulation": 2},
        {"method": "lora", "lora": QKVO, "weights": "bf16"},
        {"config": T5, "task": "seq2seq", "padded": True},
        {"optimizer": "adamw_foreach", "weights": "bf16", "autocast": None, "batch": 1, "seq_len": 16},
        {"expandable_segments": True, "capacity": 2**34},
    ],
)
def test_the_components_sum_to_the_peak_of_the_phase_that_has_it(changes: dict[str, Any]) -> None:
    found = foreseen(**changes)
    assert sum(found.components.values()) == found.allocated
    peaks = {peak.phase: peak for peak in found.phases}
    assert [*peaks] == ["load", "forward", "backward", "optimizer"]
    assert max(peak.allocated for peak in found.phases) == peaks[found.peak_phase].allocated == found.allocated
    assert found.reserved == max(peak.reserved for peak in found.phases) >= found.allocated


def test_the_peak_of_few_tokens_is_in_the_step_and_of_whole_logits_in_the_backward_pass() -> None:
    untied = {**LLAMA, "tie_word_embeddings": False}
    pure = {"weights": "bf16", "autocast": None, "loss": "whole", "batch": 1, "seq_len": 16}
    step = foreseen(config=untied, optimizer="adamw_foreach", **pure)
    assert (step.peak_phase, step.peak_operation) == ("optimizer", "aten._foreach_sqrt.default")
    logits = foreseen(loss="whole")
    assert (logits.peak_phase, logits.peak_operation) == ("backward", "aten._log_softmax_backward_data.default")
    # The log-softmax, its gradient and that of the logits, in fp32.
    assert logits.components["logits"] == pytest.approx(12 * 512 * 16_000, rel=0.03)
    kept = foreseen(loss="whole", outputs_until="backward")
    assert kept.components["logits"] == pytest.approx(14 * 512 * 16_000, rel=0.03)
    # A variable that is only assigned has those of the update before, too.
    forward = [foreseen(loss="whole", outputs_until=until).phases[1].allocated for until in ("step", "next")]
    assert forward[1] - forward[0] == pytest.approx(2 * 512 * 16_000, rel=0.03)


def test_flash_attention_needs_no_mask_for_a_window() -> None:
    config = {**LLAMA, "model_type": "mistral"}
    whole, window = (foreseen(config={**config, "sliding_window": size}, attention="flash") for size in (None, 64))
    assert window.allocated == whole.allocated
    assert foreseen(config={**config, "sliding_window": 64}).allocated > whole.allocated


def test_pieces_of_the_loss_hold_few_logits() -> None:
    whole, pieces = (foreseen(loss_chunk=chunk).components["logits"] for chunk in (0, 128))
    assert pieces < whole / 2


def test_tied_weights_count_once() -> None:
    tied = foreseen().phases[0].allocated
    untied = foreseen(config={**LLAMA, "tie_word_embeddings": False}).phases[0].allocated
    assert tied == pytest.approx(4 * PARAMETERS, rel=0.02)
    assert untied - tied == pytest.approx(4 * 16_000 * 256, rel=0.03)


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_weight"),
    [
        ("adamw", 8),
        ("adamw_foreach", 8),
        # One scale of 4 bytes for 256 weights.
        ("adamw_8bit", 2 * (1 + 4 / 256)),
        # Moments of fewer than 100 000 weights are not paged.
        ("paged_adamw_8bit", 2 * (4 / 256 + SMALL / PARAMETERS)),
        ("adafactor", 0),
    ],
)
def test_every_optimizer_keeps_its_moments(optimizer: Any, bytes_per_weight: float) -> None:
    found = foreseen(optimizer=optimizer).components["optimizer"]
    # A block can have up to 1 MiB more than was asked for.
    assert found == pytest.approx(bytes_per_weight * PARAMETERS, rel=0.03, abs=MIB)


def test_gradients_exist_in_the_second_micro_batch() -> None:
    once, twice = foreseen(), foreseen(accumulation=3)
    before, after = ({peak.phase: peak.allocated for peak in found.phases}["forward"] for found in (once, twice))
    assert after - before == pytest.approx(4 * PARAMETERS, rel=0.02)
    assert once.components.get("gradients", 0) < twice.components["gradients"]


def test_kept_gradients_are_there_in_the_next_forward_pass() -> None:
    assert foreseen(keep_gradients=True).components["gradients"] == pytest.approx(4 * PARAMETERS, rel=0.02)


def test_checkpointing_keeps_fewer_activations() -> None:
    more, less = (foreseen(gradient_checkpointing=on, seq_len=2048).components["activations"] for on in (False, True))
    assert less < more / 2


@pytest.mark.parametrize("double", [False, True])
def test_weights_in_4_bits(double: bool) -> None:
    found = foreseen(method="qlora", lora=QKVO, weights="bf16", double_quantization=double)
    embedded = 16_000 * 256
    scale = 1 / 64 + 4 / (64 * 256) if double else 4 / 64
    adapters = 3 * 8 * 4 * (4 * 256 + 2 * (256 + 128) - 2 * 256 + 512 + 3 * (256 + 512))
    expected = 2 * embedded + (PARAMETERS - embedded) * (0.5 + scale) + adapters
    assert found.components["weights"] == pytest.approx(expected, rel=0.05)
    assert found.components["optimizer"] == pytest.approx(2 * adapters, rel=0.1)
    prepared = foreseen(method="qlora", lora=QKVO, weights="bf16", double_quantization=double, in_fp32="all")
    assert prepared.components["weights"] - found.components["weights"] == pytest.approx(2 * embedded, rel=0.05)
    # It was read in bf16, and is both for a moment.
    read = prepared.phases[0].allocated - prepared.components["weights"] + adapters
    assert read == pytest.approx(2 * embedded, rel=0.05)


@pytest.mark.parametrize(
    ("attention", "method"),
    [
        pytest.param("eager", "full", marks=pytest.mark.long),
        pytest.param("sdpa", "lora", marks=pytest.mark.long),
        ("eager", "qlora"),
        pytest.param("sdpa", "full", marks=pytest.mark.long),
        pytest.param("eager", "lora", marks=pytest.mark.long),
        pytest.param("sdpa", "qlora", marks=pytest.mark.long),
    ],
)
def test_t5(method: Any, attention: Any) -> None:
    lora = Lora(r=8, alpha=16, targets=("q", "v")) if method != "full" else None
    weights = "fp32" if method == "full" else "bf16"
    training = {"config": T5, "task": "seq2seq", "method": method, "lora": lora, "weights": weights, "attention": attention}
    found, padded = foreseen(**training), foreseen(**training, padded=True)
    assert found.components["activations"] > 0
    assert padded.allocated > found.allocated
    assert foreseen(**training, label_len=64).allocated < found.allocated


def test_a_capacity_is_kept_or_the_first_lack_named() -> None:
    free = foreseen()
    assert (free.fits, free.lacking, free.retries) == (None, None, 0)
    enough = foreseen(capacity=free.reserved)
    assert (enough.fits, enough.lacking, enough.reserved) == (True, None, free.reserved)
    small = foreseen(capacity=4 * PARAMETERS + 8 * MIB)
    assert (small.fits, small.reserved) == (False, free.reserved)
    assert small.lacking is not None
    assert small.lacking.startswith("forward: ")


def test_the_piece_of_the_loss_follows_the_capacity() -> None:
    assert foreseen(loss_chunk=-1, capacity=2**35).components["logits"] > foreseen(loss_chunk=128).components["logits"]


def test_the_gpus_generation_decides_attention_and_workspaces() -> None:
    found = {generation: foreseen(generation=generation, seq_len=1024).components for generation in (75, 80, 90)}
    # A block can have up to 1 MiB more than was asked for.
    assert [components["workspace"] / MIB for components in found.values()] == pytest.approx([16.25, 16.25, 64], abs=1)
    # A T4 has no flash attention, and its other kernel takes no shared key heads.
    assert found[75]["activations"] > found[80]["activations"] == pytest.approx(found[90]["activations"], rel=0.03)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("generation", "dtype", "width", "key_heads", "masked", "kernel"),
    [
        (80, torch.bfloat16, 64, 8, False, "flash"),
        (80, torch.bfloat16, 64, 2, False, "flash"),
        (80, torch.bfloat16, 64, 8, True, "efficient"),
        (80, torch.float32, 64, 8, False, "efficient"),
        (80, torch.bfloat16, 512, 8, False, "efficient"),
        (86, torch.bfloat16, 256, 8, False, "efficient"),
        (75, torch.float16, 64, 8, False, "efficient"),
        (75, torch.bfloat16, 64, 8, False, "math"),
        (75, torch.float16, 64, 2, False, "math"),
    ],
)
def test_attention_runs_the_kernel_that_cuda_chooses(
    generation: int, dtype: torch.dtype, width: int, key_heads: int, masked: bool, kernel: str
) -> None:
    with FakeTensorMode(), Operations() as operations, allocating_like_cuda(generation, "sdpa"):
        query = torch.empty(2, 8, 32, width, dtype=dtype, requires_grad=True)
        key = torch.empty(2, key_heads, 32, width, dtype=dtype)
        mask = torch.ones(2, 1, 32, 32, dtype=torch.bool) if masked else None
        found = F.scaled_dot_product_attention(query, key, key, mask, is_causal=not masked, enable_gqa=key_heads < 8)
    assert found.shape == query.shape
    names = [name for name in operations.names if "attention" in name] or ["math"]
    assert kernel in names[0]


def test_dropout_softmax_and_norms_are_those_of_cuda() -> None:
    with FakeTensorMode(), Operations() as operations, allocating_like_cuda(75, "eager"):
        half = torch.empty(4, 16, dtype=torch.float16)
        F.dropout(half, 0.1, training=True)
        assert F.dropout(half, 0.1, training=False) is half
        assert F.softmax(half, -1, dtype=torch.float32).dtype == torch.float32
        assert not half.is_cpu
        assert "_to_copy.default" not in operations.names
        assert F.layer_norm(half, (16,)).dtype == torch.float16
        with torch.autocast("cpu", torch.float16):
            assert torch.is_autocast_enabled()
            assert F.layer_norm(half, (16,)).dtype == torch.float32
            assert F.softmax(half, -1).dtype == torch.float32
    assert "native_dropout.default" in operations.names


def test_hidden_memory_of_kernels() -> None:
    after = kernels(80).after
    query, key = torch.empty(1, 8, 100, 64, dtype=torch.bfloat16), torch.empty(1, 2, 100, 64, dtype=torch.bfloat16)
    aten = torch.ops.aten
    rows = 8 * 128
    flash = after[aten._scaled_dot_product_flash_attention_backward.default]
    assert flash(query, query, query) == [4 * rows, 4 * rows * 64]
    assert flash(query, query, key)[2:] == [8 * 100 * 64 * 2] * 2
    assert after[aten._softmax_backward_data.default](query) == [query.nbytes]


def state() -> tuple[Any, ...]:
    functions = (masking_utils.find_packed_sequence_indices, masking_utils._ignore_bidirectional_mask_sdpa)
    own = (torch.is_autocast_enabled, F.scaled_dot_product_attention, F.dropout, torch.is_autocast_enabled("cpu"))
    return (
        *functions,
        *own,
        gc.isenabled(),
        torch.overrides._get_current_function_mode_stack(),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before_afterwards(fails: bool) -> None:
    before = state()
    if fails:
        with pytest.raises(BadInputError):
            foreseen(method="lora", lora=Lora(r=8, alpha=16, targets=("nothing",)))
        with pytest.raises(BadInputError):
            foreseen(config={**LLAMA, "num_key_value_heads": 3}, autocast=None)
    else:
        foreseen(method="lora", lora=Lora(r=8, alpha=16, dropout=0.1), gradient_checkpointing=True)
    assert state() == before


@pytest.mark.parametrize(("folder", "name"), [("presets", "allocator.py"), ("train", "objective.py"), ("dry_run", "run.py")])
def test_answers_that_were_kept_are_of_the_same_code(
    folder: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = resolve(load_recipes()["first-run"], preset=load_presets()["standard"], whole=False)
    question, read = Request(settings=settings, generation=80), Path.read_bytes
    _Kept(tmp_path).keep(question, b"{}")
    assert _Kept(tmp_path).find(question) == b"{}"

    def changed(path: Path) -> bytes:
        return read(path) + b"#" if (path.parent.name, path.name) == (folder, name) else read(path)

    monkeypatch.setattr(Path, "read_bytes", changed)
    assert _Kept(tmp_path).find(question) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"method": "lora", "lora": Lora(r=8, alpha=16, targets=("nothing",))}, "lora.targets nothing: "),
        (
            {"config": EXPERTS, "method": "lora", "lora": Lora(r=8, alpha=16, dropout=0.1, targets=("all-linear",))},
            "lora.dropout 0.1: adapters of the experts of this model can have no dropout; add --set lora.dropout=0",
        ),
        ({"method": "lora"}, "method lora: needs lora.r"),
        ({"loss_chunk": -1}, "loss_chunk -1: "),
        ({"config": {"hidden_size": 64}}, "model.config.model_type: missing"),
        ({"config": {"model_type": "nonsense"}}, "model.config.model_type: transformers "),
        ({"config": {**LLAMA, "num_attention_heads": 7}}, "model.config: "),
        (
            {"config": {**LLAMA, "num_key_value_heads": 3}},
            "model.config.num_key_value_heads 3: does not divide num_attention_heads 8",
        ),
        (
            {"config": {**LLAMA, "model_type": "olmo", "num_key_value_heads": 3}},
            "model.config: the memory of a olmo model cannot be foreseen with these values: it fails in a dry run, "
            "perhaps only there: RuntimeError: ",
        ),
        ({"config": {"model_type": "vit"}}, "model_type vit: transformers has no causal language model"),
        ({"config": {"model_type": "modernbert"}}, "model_type modernbert: transformers has no causal language model"),
        ({"config": {"model_type": "qwen2_5_vl"}}, "model_type qwen2_5_vl: it reads images, too"),
        ({"config": LLAMA, "task": "seq2seq"}, "model_type llama: transformers has no model of this kind with an encoder"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_line(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInputError) as caught:
        foreseen(**changes)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"gradient_checkpointing": True, "accumulation": 2}, marks=pytest.mark.long),
        pytest.param({"method": "lora", "lora": QKVO, "optimizer": "adamw_8bit"}, marks=pytest.mark.long),
        {"method": "qlora", "lora": QKVO, "weights": "bf16", "gradient_checkpointing": True},
        pytest.param({"optimizer": "adafactor", "loss": "whole"}, marks=pytest.mark.long),
        {"config": T5, "task": "seq2seq", "padded": True},
    ],
    ids=lambda changes: "-".join(map(str, changes)) or "plain",
)
def test_a_deep_model_allocates_what_two_shallow_ones_show(changes: dict[str, Any]) -> None:
    training = msgspec.structs.replace(PLAIN, **changes)
    config = config_of(training)
    whole = recorded(training, with_layers(config, 9))[0]
    found = deepened(*(recorded(training, with_layers(config, count))[0] for count in SHALLOW), 9)
    assert found is not None
    assert found.allocations == whole.allocations
    assert found.phases == whole.phases
    # Only the order of what is released together may differ.
    assert sorted(found.events) == sorted(whole.events)
    assert _replayed(found) == _replayed(whole)


def test_the_buckets_of_a_deep_model_grow_no_further_than_they_may() -> None:
    """Two shallow models have less than a bucket of gradients."""
    deep = {"config": LLAMA | {"num_hidden_layers": 30}, "method": "lora", "lora": Lora(r=128, alpha=16)}
    two, one = (foreseen(**deep, world_size=count).components["workspace"] for count in (2, 1))
    training = msgspec.structs.replace(PLAIN, **deep)
    assert two - one == ring_bytes(msgspec.structs.replace(training, world_size=2), meta_model(training, config_of(training)))
    assert 1.9 * BUCKET_BYTES < two - one <= 2 * BUCKET_BYTES


def test_distributed_data_parallel_has_the_gradients_once_more() -> None:
    """Beside the gradients themselves, which are no views of its buckets."""
    training = msgspec.structs.replace(PLAIN, world_size=2, ddp=True, config={**LLAMA, "num_hidden_layers": 12})
    model = meta_model(training, config_of(training)).to_empty(device="cpu")
    model.tie_weights()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            parallel = torch.nn.parallel.DistributedDataParallel(model)
        made = sum(event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")
        parallel(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
        assert all(parameter.grad._base is None for parameter in model.parameters())
    finally:
        torch.distributed.destroy_process_group()
    assert made == pytest.approx(ring_bytes(training, model), rel=1e-3)
    ours, ddp = (foresee(msgspec.structs.replace(training, ddp=ddp)) for ddp in (False, True))
    # The allocator does not split a block for less than 1 MiB.
    assert ddp.components["buckets"] == pytest.approx(ring_bytes(training, model), abs=MIB)
    assert "buckets" not in ours.components
    assert ddp.components["gradients"] == ours.components["gradients"]


def _replayed(trace: Any) -> list[int]:
    """The blocks' bytes after each allocation that follows a release."""
    allocator, found = Allocator(expandable=False), []
    for before, event in itertools.pairwise([0, *trace.events]):
        if event >= 0:
            if before < 0:
                found.append(allocator.allocated)
            allocator.allocate(event, trace.allocations[event].size)
        else:
            allocator.release(~event)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulation": 2, "gradient_checkpointing": True, "method": "lora", "lora": Lora(r=8, alpha=16, dropout=0.1)},
        pytest.param({"method": "qlora", "lora": QKVO, "weights": "bf16", "optimizer": "adamw_8bit"}, marks=pytest.mark.long),
        pytest.param(
            {"config": T5, "task": "seq2seq", "padded": True, "attention": "eager", "autocast": "fp16", "generation": 75},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"autocast": None, "weights": "bf16", "zero": Zero(stage=2, offload_optimizer=True), "world_size": 2},
            marks=pytest.mark.long,
        ),
        {"autocast": None, "weights": "bf16", "zero": Zero(stage=3), "world_size": 2},
    ],
)
def test_operations_that_were_there_before_need_not_be_derived_again(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = msgspec.structs.replace(PLAIN, **changes)
    found = recorded(training, config_of(training))[0]
    derived = Counter[Any]()

    def always(func: Any, args: Any, kwargs: Any) -> Any:
        derived[func] += 1
        return func(*args, **kwargs)

    monkeypatch.setattr(trace, "result", always)
    whole = recorded(training, config_of(training))[0]
    assert (found.allocations, found.phases) == (whole.allocations, whole.phases)
    assert layers._in_order(found.events) == layers._in_order(whole.events)
    assert derived.total() > 500


def test_results_are_made_as_they_were_derived() -> None:
    """New tensors, views, arguments and several results, with their memory."""
    aten = torch.ops.aten

    def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
        of_memory = one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        looks = ("shape", "dtype", "requires_grad", "device")
        same = all(getattr(one, name) == getattr(other, name) for name in looks)
        return same and of_memory and (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())

    with FakeTensorMode() as mode:
        one, other = torch.empty(4, 6), torch.empty(4, 6)
        total = torch.empty(())
    for times in range(2):
        known = len(results._known)
        with mode:
            assert results.result(aten.add_.Tensor, (one, other), {"alpha": 2}) is one
            assert results.result(aten.mul.out, (one, 2.0), {"out": other}) is other
            view = results.result(aten.slice.Tensor, (other, 1, 2, 5), {})
            assert view.untyped_storage() is other.untyped_storage()
            assert alike(view, other[:, 2:5])
            norm = results.result(aten.native_layer_norm.default, (one, [6], None, None, 1e-5), {})
            assert all(map(alike, norm, aten.native_layer_norm(one, [6], None, None, 1e-5)))
            pieces = results.result(aten.split.Tensor, (one, 3, 1), {})
            assert all(map(alike, pieces, one.split(3, 1)))
            assert {id(piece.untyped_storage()) for piece in pieces} == {id(one.untyped_storage())}
            assert results.result(aten.add.Tensor, (one, 1), {}).dtype == torch.float32
            assert results.result(aten.add.Tensor, (one, 1.0), {}).dtype == torch.float32
            # What a number would decide is asked each time.
            with pytest.raises(DataDependentOutputException):
                results.result(aten._local_scalar_dense.default, (total,), {})
        assert times == 0 or len(results._known) == known


def test_layers_that_differ_are_not_repeated() -> None:
    first, second = (recorded(PLAIN, with_layers(config_of(PLAIN), count))[0] for count in (2, 6))
    assert deepened(first, second, 9) is None


def test_a_deep_model_and_its_pieces_of_logits() -> None:
    """How much memory is free decides the pieces, so it must be that of the deep model."""
    training = msgspec.structs.replace(PLAIN, loss_chunk=-1, capacity=400 * MIB, config={**LLAMA, "num_hidden_layers": 14})
    found, (whole, _) = foresee(training), recorded(training, config_of(training))
    allocator = Allocator(expandable=False)
    for event in whole.events:
        allocator.allocate(event, whole.allocations[event].size) if event >= 0 else allocator.release(~event)
    assert found.allocated == allocator.peak_allocated


SETTINGS = Settings(
    recipe="", preset="", batch=2, accumulation=2, seq_len=64, save_every=1, learning_rate=1e-3, model={"config": LLAMA}
)


@pytest.mark.parametrize(
    ("changes", "generation", "weights", "autocast"),
    [
        ({}, 80, "fp32", None),
        ({"precision": "auto"}, 80, "fp32", "bf16"),
        ({"precision": "auto"}, 75, "fp32", "fp16"),
        ({"precision": "bf16", "method": "lora", "lora": QKVO}, 80, "fp32", "bf16"),
        ({"precision": "bf16", "method": "qlora", "lora": QKVO}, 80, "bf16", "bf16"),
    ],
)
def test_the_precisions_are_those_of_the_trainer(changes: Any, generation: int, weights: str, autocast: str | None) -> None:
    training = training_of(msgspec.structs.replace(SETTINGS, **changes), generation=generation, capacity=1 << 32)
    assert (training.weights, training.autocast) == (weights, autocast)
    assert foresee(training).fits


def test_a_frozen_base_from_files_is_in_16_bits(tmp_path: Path) -> None:
    LlamaConfig(**{name: value for name, value in LLAMA.items() if name != "model_type"}).save_pretrained(tmp_path)
    settings = msgspec.structs.replace(
        SETTINGS, model={"path": str(tmp_path)}, method="lora", lora=QKVO, precision="bf16", device="cuda"
    )
    training = training_of(settings, generation=80, capacity=1 << 32)
    assert training.weights == "bf16"
    assert foresee(training).components["weights"] < 2 * PARAMETERS + 4 * SMALL + MIB


MIXTURE = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 2, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("changes", "item"),
    [
        ({}, 4),
        ({"autocast": "fp16", "generation": 75}, 4),
        ({"autocast": None, "weights": "bf16"}, 2),
        ({"gradient_checkpointing": True, "accumulation": 2}, 4),
    ],
)
def test_a_mixture_of_experts_needs_the_same_however_its_tokens_are_routed(changes: dict[str, Any], item: int) -> None:
    found = foreseen(**({"config": MIXTURE} | changes))
    h, f = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    layer = 3 * h * h + 3 * 4 * h * f + 4 * h + 2 * h
    count = 2 * LLAMA["vocab_size"] * h + 2 * layer + h
    assert item * count <= found.components["weights"] < item * count + MIB
    # Every token of 2 x 256 goes to two experts.
    assert found.components["activations"] > 2 * 512 * f * 2


class Kept(torch.autograd.Function):
    """Something else has the gradient, too."""

    gradients: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Kept.gradients.append(gradient)
        return gradient


def _shared(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum's gradient is that of two inputs when another one is added to it."""
    first, second = one * 1.0, other * 1.0
    early = first * 3.0
    return (early + (first + second) * 2.0) * 1.5


def _residual(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    found = one * 1.0
    for _ in range(3):
        found = found + found @ other
    return found * 2.0


@pytest.mark.parametrize(
    "function",
    [
        _shared,
        _residual,
        lambda one, other: (one * 2.0 @ other) * (one @ other) * (one @ other),
        lambda one, other: (one.t() @ other + (one + 0.0) @ other) * 1.5,
        lambda one, other: (one.sum() + (one * other).sum() + one.sum()).expand(4, 4) * 1.0,
        lambda one, other: (one * 3.0 + Kept.apply(one * 1.0)) * 1.5,
    ],
)
def test_gradients_are_added_where_autograd_adds_them(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, if nothing else has the sum; a profiler sees what autograd does when nothing
    watches the tensors."""
    one, other = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    loss = function(one, other).sum() * 1.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    expected = Counter(event.name for event in profile.events() if event.name in ("aten::add", "aten::add_"))
    seen = Counter[str]()

    def noted(func: Any, args: Any, kwargs: Any) -> Any:
        seen[func.name().partition(".")[0]] += 1
        return results.result(func, args, kwargs)

    with FakeTensorMode(), trace.Trace(kernels(80), 100):
        one, other = (torch.empty(4, 4, requires_grad=True) for _ in range(2))
        loss = function(one, other).sum() * 1.0
        monkeypatch.setattr(trace, "result", noted)
        backward(loss)
    Kept.gradients.clear()
    assert {name: seen[name] for name in ("aten::add", "aten::add_")} == {
        name: expected[name] for name in ("aten::add", "aten::add_")
    }
    assert expected.total() > 0


def test_products_of_groups_are_as_large_as_their_gradients() -> None:
    with FakeTensorMode(), allocating_like_cuda(80, "sdpa"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            rows = torch.empty(24, 32, dtype=dtype, requires_grad=True)
            matrices = torch.empty(3, 32, 64, dtype=dtype, requires_grad=True)
            found = F.grouped_mm(rows, matrices, offs=torch.empty(3, dtype=torch.int32))
            assert (found.shape, found.dtype) == ((24, 64), dtype)
            backward((found * 1.0).sum())
            assert rows.grad is not None
            assert matrices.grad is not None
            assert (rows.grad.shape, matrices.grad.shape) == (rows.shape, matrices.shape)


def test_layers_whose_kinds_follow_their_number() -> None:
    config = {"model_type": "mamba", "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "vocab_size": 500}
    assert foreseen(config=config, seq_len=32).components["weights"] > 4 * 500 * 64


def test_several_processes_have_a_ring_of_buckets() -> None:
    alone, together = (foreseen(world_size=count) for count in (1, 4))
    # Two buckets of at most 16 MiB, each a multiple of 512 bytes.
    assert 0 < together.components["workspace"] - alone.components["workspace"] <= 2 * 16 * MIB
