"""In which precision the model's parts are kept and computed, and what torch.compile gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from memtop.presets import Settings
from memtop.train import BadInputError
from memtop.train.engine import trained_parameters
from memtop.train.model import build_model, compile_layers, tokens_and_config
from memtop.train.objective import Objective
from tests.train.recipes import pairs, settings_of, write_llama, write_rows
from tests.train.support import TINY, edited

KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "llama")


def fine_tuning(recipe: str, llama: Path) -> Settings:
    data = write_rows(llama.parent / "rows.jsonl", pairs())
    return settings_of(recipe, data__train=data, model__path=llama, lora__r=4, lora__dropout=0)


def built(recipe: str, llama: Path, precision: str) -> Any:
    settings = fine_tuning(recipe, llama)
    return build_model(settings, tokens_and_config(settings)[1], mixed=precision)


def loss_of(model: torch.nn.Module, kind: torch.dtype | None) -> torch.Tensor:
    ids = torch.arange(3, 43).reshape(2, 20)
    with torch.autocast("cpu", kind, enabled=kind is not None):
        found: torch.Tensor = Objective(model)(ids, ids)
    return found


class Casts(TorchDispatchMode):
    """The shapes of all results of casts inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            self.shapes.add(result.shape)
        return result


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_frozen_base_is_in_the_compute_precision_and_never_copied(llama: Path, precision: str) -> None:
    model = built("sft-lora", llama, precision)
    trained = trained_parameters(model)
    frozen = {name: p for name, p in model.named_parameters() if name not in trained}
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    assert {parameter.dtype for parameter in frozen.values()} == {KINDS[precision]}
    with Casts() as casts:
        loss_of(model, KINDS[precision]).backward()
    assert not casts.shapes & {parameter.shape for parameter in frozen.values() if parameter.dim() == 2}


def test_in_fp16_the_layers_add_to_a_sum_in_fp32(llama: Path) -> None:
    model = built("sft-lora", llama, "fp16")
    with torch.no_grad():
        # Alone they are numbers of fp16; their sum over the layers is not.
        for layer in model.get_base_model().model.layers:
            layer.mlp.down_proj.base_layer.weight.mul_(0)
            layer.mlp.register_forward_hook(lambda module, inputs, output: output + 40_000)
    with torch.autocast("cpu", torch.float16):
        found = model(input_ids=torch.arange(3, 43).reshape(2, 20), output_hidden_states=True, use_cache=False)
    assert {state.dtype for state in found.hidden_states[:-1]} == {torch.float32}
    assert torch.isfinite(found.logits).all()


@pytest.mark.parametrize("recipe", ["sft-lora", "sft-qlora"])
@pytest.mark.parametrize("part", ["model.embed_tokens", "model.layers.1.mlp.up_proj"])
def test_a_weight_that_fp16_cannot_hold_is_named(llama: Path, tmp_path: Path, recipe: str, part: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        base.get_submodule(part).weight[1, 1] = 1e5
    base.save_pretrained(str(tmp_path))
    settings = msgspec.structs.replace(fine_tuning(recipe, llama), model={"path": str(tmp_path)})
    config = tokens_and_config(fine_tuning(recipe, llama))[1]
    with pytest.raises(BadInputError, match=rf"{part}.weight has numbers that fp16 cannot hold; give --set precision=bf16"):
        build_model(settings, config, mixed="fp16")
    assert torch.isfinite(next(build_model(settings, config, mixed="bf16").parameters())).all()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_qlora_keeps_embeddings_and_head_in_the_compute_precision(llama: Path, precision: str) -> None:
    model = built("sft-qlora", llama, precision)
    base = model.get_base_model()
    assert {base.get_input_embeddings().weight.dtype, base.lm_head.weight.dtype} == {KINDS[precision]}
    norms = {p.dtype for name, p in base.named_parameters() if "norm" in name}
    assert norms == {parameter.dtype for parameter in trained_parameters(model).values()} == {torch.float32}
    loss = loss_of(model, KINDS[precision])
    assert float(loss.detach()) == pytest.approx(float(loss_of(built("sft-qlora", llama, "no"), None).detach()), rel=0.02)


def deep(**changes: Any) -> torch.nn.Module:
    """A model of eight layers for bf16."""
    values = TINY.model["config"] | {"num_hidden_layers": 8}
    settings = edited(model={"config": values}, **changes)
    return build_model(settings, AutoConfig.for_model(**values), mixed="bf16")


def gradients_and_bytes(model: Any, kind: torch.dtype | None) -> tuple[torch.Tensor, int]:
    """All gradients, and the bytes that autograd keeps for them, each storage once."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model, kind)
    loss.backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return found, sum(kept.values())


def test_a_bf16_residual_stream_keeps_less_and_changes_only_rounding() -> None:
    """The gradients are as far from those in fp32 as without it, within a factor of two: bf16
    products have rounded them before. What is trained stays in fp32, under the same names."""
    plain, narrow = deep(), deep(bf16_residual=True)
    assert plain.state_dict().keys() == narrow.state_dict().keys()
    assert {tensor.dtype for tensor in narrow.state_dict().values()} == {torch.float32}
    exact, _ = gradients_and_bytes(plain, None)
    wide, bytes_wide = gradients_and_bytes(plain, torch.bfloat16)
    found, bytes_found = gradients_and_bytes(narrow, torch.bfloat16)
    assert (found - exact).norm() <= 2 * (wide - exact).norm() <= 0.05 * exact.norm()
    assert bytes_found <= 0.9 * bytes_wide
    # Without autocast, as in an export, nothing is rounded.
    assert torch.equal(gradients_and_bytes(narrow, None)[0], exact)


def test_layers_are_compiled_once_and_use_flash_attention() -> None:
    model = deep()
    names = list(model.state_dict())
    objective, ids = Objective(model), torch.arange(3, 43).reshape(2, 20)
    expected = float(objective(ids, ids).detach())
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compile_layers(model, backend=backend)
    loss = objective(ids, ids)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert list(model.state_dict()) == names
    # One graph for eight layers.
    assert len(graphs) == 1
    calls = [node for node in graphs[0].graph.nodes if "scaled_dot_product_attention" in str(node.target)]
    assert [(node.kwargs["attn_mask"], node.kwargs["is_causal"]) for node in calls] == [(None, True)]
