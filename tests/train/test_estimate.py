"""The estimate of the GPU memory without torch: what it refuses, how it changes with the settings,
and how far it is from the dry run."""

from __future__ import annotations

import itertools
import random
from difflib import SequenceMatcher
from typing import Any

import pytest
from msgspec.structs import replace
from transformers import AutoConfig

from bench.predict import MIB
from bench.trainings import DEEP, GIB, Compared, drawn
from memtop.presets import Settings, load_presets
from memtop.presets.architectures import shape_of
from memtop.presets.comparison import outlook
from memtop.presets.estimate import Estimate, _Run, estimate
from memtop.presets.parameters import linear_layers, model_parameters
from memtop.presets.schema import Lora, Zero
from memtop.presets.sequence import Phase
from memtop.presets.states import UnknownMemoryError
from memtop.train.dry_run.build import Training, config_of, meta_model, training_of
from memtop.train.dry_run.run import foresee, recorded
from tests.forking import LONG

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
T5: dict[str, Any] = {"model_type": "t5", "num_layers": 4, "d_model": 512, "num_heads": 8, "d_ff": 2048}
KINDS = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "gemma2", "gemma3_text", "gpt2", "t5")
ALL = Lora(r=16, alpha=16)


def settings(**values: Any) -> Settings:
    given: dict[str, Any] = {"precision": "bf16", "batch": 4, "accumulation": 1, "seq_len": 512, "loss_chunk": 512, **values}
    return Settings(recipe="", preset="", save_every=1, learning_rate=1e-4, **given)


def estimated(config: dict[str, Any] = LLAMA, generation: int = 80, capacity: int | None = None, **values: Any) -> Estimate:
    return estimate(settings(**values), config, generation=generation, capacity=capacity)


# --- against the dry run --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_is_near_the_dry_run_and_rather_above_it(kind: str) -> None:
    """`bench.predict --closed` draws hundreds of trainings."""
    rng = random.Random(kind)
    for _ in range(2 if LONG else 1):
        one = drawn(rng, kind)
        found = estimate(one.settings, one.config, generation=one.generation, capacity=one.capacity)
        exact = one.foreseen()
        assert -0.03 <= found.allocated / exact.allocated - 1 <= 0.15, one
        assert -0.2 <= found.reserved / exact.reserved - 1 <= 0.25, one


@pytest.mark.parametrize("task", ["causal", "seq2seq"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_every_preset_is_estimated_and_run_without_numbers_or_refused_by_name(method: Any, task: Any) -> None:
    """Within the bounds of docs/performance.md. Presets that lead to the same settings are one.
    `make test` compares those of causal language models with the dry run, and `make long` all."""
    config = T5 | {"num_layers": 1} if task == "seq2seq" else LLAMA | {"num_hidden_layers": 1}
    lora = None if method == "full" else Lora(r=16, alpha=16, targets=("q", "v") if task == "seq2seq" else ("q_proj", "v_proj"))
    base = settings(
        batch=2,
        accumulation=2,
        seq_len=128,
        method=method,
        task=task,
        lora=lora,
        model={"config": config},
        device="cuda",
        target_samples=320,
    )
    seen: list[Settings] = []
    for name, preset in load_presets().items():
        look = outlook(base, preset)
        if look.switch == "refused":
            assert method == "qlora", look.reason
            assert "stage 3" in look.reason or "ZeRO-3" in look.reason, name
            continue
        after = replace(look.kept, preset="", workers=0, host_level="standard", pin_memory=None)
        if after in seen:
            continue
        seen.append(after)
        found = estimate(after, config, generation=80)
        if task == "seq2seq" and not LONG:
            assert found.reserved >= found.allocated > 0, name
            continue
        exact = foresee(training_of(after, generation=80, capacity=None))
        assert -0.03 <= found.allocated / exact.allocated - 1 <= 0.12, (name, found.allocated, exact.allocated)
        assert -0.06 <= found.reserved / exact.reserved - 1 <= 0.2, (name, found.reserved, exact.reserved)
    assert len(seen) >= 5


@pytest.mark.parametrize("kind", [*KINDS, "mixtral", "qwen3_moe", "olmoe"])
def test_the_layers_that_can_get_adapters_are_those_of_the_model(kind: str) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = {"model_type": kind, "vocab_size": 99, "pad_token_id": 0, **({} if kind in ("t5", "gpt2") else small)}
    named = linear_layers(config)
    assert named is not None
    task: Any = "seq2seq" if kind == "t5" else "causal"

    def adapted(*targets: str) -> Any:
        lora = Lora(r=4, alpha=4, targets=targets)
        return meta_model(
            training := Training(config=config, task=task, method="lora", lora=lora, batch=1, seq_len=8, generation=80),
            config_of(training),
        )

    chosen, every = adapted(*named), adapted("all-linear")
    assert set(chosen.targeted_module_names) == set(every.targeted_module_names)
    # Of a mixture of experts, those of the experts are parameters, and one of all is the router.
    assert set(chosen.targeted_parameter_names) == {
        name for name in every.targeted_parameter_names if name.rpartition(".")[0].endswith("experts")
    }
    whole = {name.rpartition(".")[2] for name in chosen.targeted_module_names}
    assert whole == (set(named) if not chosen.targeted_parameter_names else {"q_proj", "k_proj", "v_proj", "o_proj"})


FULL: dict[str, Any] = {"method": "full"}
TARGETS = {"t5": ("q", "v"), "gpt2": ("c_attn",), "phi3": ("qkv_proj", "o_proj")}
SHARDED = {"world_size": 4, "precision": "bf16"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("SmolLM2-135M", FULL | {"batch": 8, "seq_len": 1024}),
        ("SmolLM2-360M", FULL | {"gradient_checkpointing": True, "precision": "fp16", "batch": 12}),
        ("Qwen2.5-0.5B", {"method": "qlora", "lora": ALL, "batch": 8, "gradient_checkpointing": True}),
        pytest.param(
            "Llama-3.1-8B",
            {"method": "lora", "lora": ALL, "batch": 2, "seq_len": 2048, "model": {"path": "read"}},
            marks=pytest.mark.long,
        ),
        pytest.param("GPT-2-355M", FULL | {"batch": 4, "optimizer": "adafactor", "precision": "fp32"}, marks=pytest.mark.long),
        pytest.param("T5-base", FULL | {"batch": 16, "task": "seq2seq", "accumulation": 4}, marks=pytest.mark.long),
        ("SmolLM2-135M", FULL | {"world_size": 2, "ddp": True, "batch": 1}),
        ("SmolLM2-135M", FULL | SHARDED | {"zero": Zero(stage=1), "batch": 8}),
        ("SmolLM2-135M", FULL | SHARDED | {"zero": Zero(stage=2, offload_optimizer=True), "batch": 8}),
        pytest.param(
            "SmolLM2-360M", FULL | SHARDED | {"zero": Zero(stage=3), "gradient_checkpointing": True}, marks=pytest.mark.long
        ),
        pytest.param(
            "Qwen2.5-0.5B",
            SHARDED | {"zero": Zero(stage=3), "method": "lora", "lora": ALL, "model": {"path": "read"}},
            marks=pytest.mark.long,
        ),
        (
            "Qwen2.5-0.5B",
            FULL | SHARDED | {"zero": Zero(stage=3, offload_optimizer=True, offload_parameters=True), "batch": 8},
        ),
        # Its layers are no linear ones, which ZeRO-3 would replace.
        pytest.param(
            "GPT-2-124M",
            {"zero": Zero(stage=3), "method": "lora", "lora": replace(ALL, targets=("all-linear",)), "model": {"path": "read"}},
            marks=pytest.mark.long,
        ),
        # All gradients are looked at for infinite ones.
        pytest.param("SmolLM2-135M", FULL | {"zero": Zero(stage=3), "precision": "fp16", "batch": 1}, marks=pytest.mark.long),
        # The encoder's result, and what a checkpoint computes last, are released.
        (
            "Flan-T5-small",
            FULL | {"precision": "fp16", "gradient_checkpointing": True, "batch": 16, "task": "seq2seq", "zero": Zero(stage=2)},
        ),
        pytest.param(
            "T5-small",
            FULL | {"precision": "fp32", "accumulation": 4, "batch": 16, "task": "seq2seq", "zero": Zero(stage=1)},
            marks=pytest.mark.long,
        ),
        # The module that calls another one holds what it gives it.
        pytest.param(
            "Llama-3.2-1B",
            {
                "method": "lora",
                "lora": replace(ALL, dropout=0.05),
                "precision": "fp16",
                "gradient_checkpointing": True,
                "batch": 16,
                "model": {"path": "read"},
            },
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_published_model_at_its_whole_depth_takes_what_the_dry_run_says(name: str, values: dict[str, Any]) -> None:
    config = DEEP[name][0]
    given = values if "path" in values.get("model", {}) else values | {"model": {"config": config}}
    one = Compared(settings(**given), config, 80, 79 * GIB)
    found, exact = estimate(one.settings, config, generation=80, capacity=one.capacity), one.foreseen()
    assert -0.03 <= found.allocated / exact.allocated - 1 <= 0.05
    assert -0.08 <= found.reserved / exact.reserved - 1 <= 0.15


@pytest.mark.parametrize(
    ("config", "values"),
    [
        pytest.param(
            LLAMA | {"num_hidden_layers": 2, "vocab_size": 150_000, "tie_word_embeddings": False},
            FULL
            | SHARDED
            | {"zero": Zero(stage=2, offload_optimizer=True), "accumulation": 4, "precision": "fp32", "batch": 16},
            id="large gradients stay until the backward pass of all but the last micro-batch ends",
        ),
        pytest.param(
            LLAMA | {"num_hidden_layers": 2, "vocab_size": 256_000, "tie_word_embeddings": False},
            FULL | {"zero": Zero(stage=3, offload_optimizer=True), "accumulation": 4, "batch": 2, "world_size": 2},
            id="the head's weights are released before its gradient is reduced",
        ),
        pytest.param(
            T5 | {"num_layers": 2, "num_decoder_layers": 2},
            {"method": "lora", "lora": replace(ALL, targets=("q", "v")), "task": "seq2seq", "batch": 1, "seq_len": 1024},
            id="the first layer's checkpoint makes the distances again",
        ),
        pytest.param(
            T5 | {"num_layers": 2, "num_decoder_layers": 4, "d_model": 1024, "num_heads": 16, "d_ff": 2816},
            FULL | SHARDED | {"zero": Zero(stage=3), "precision": "fp32", "task": "seq2seq", "batch": 2, "seq_len": 1024},
            id="the distances get a gradient only from the last layer on",
        ),
        pytest.param(
            LLAMA | {"model_type": "gemma", "num_hidden_layers": 4, "vocab_size": 256_000, "num_key_value_heads": 2},
            {
                "zero": Zero(stage=3, offload_optimizer=True, offload_parameters=True),
                "world_size": 2,
                "method": "lora",
                "lora": replace(ALL, r=8, targets=("all-linear",)),
                "precision": "fp32",
                "batch": 16,
            },
            id="the embeddings are gathered ahead, in the middle of the backward pass",
        ),
        pytest.param(
            LLAMA | {"num_hidden_layers": 2, "vocab_size": 50257, "tie_word_embeddings": False},
            FULL
            | {"zero": Zero(stage=3, offload_optimizer=True, offload_parameters=True), "accumulation": 4}
            | {"precision": "fp32", "batch": 1},
            id="the embeddings' weights stay until their gradient is reduced",
        ),
    ],
)
def test_the_backward_pass_of_few_layers_takes_what_the_dry_run_says(config: dict[str, Any], values: dict[str, Any]) -> None:
    one = Compared(settings(**{"gradient_checkpointing": True} | values, model={"config": config}), config, 86, 79 * GIB)
    found = estimate(one.settings, config, generation=86, capacity=one.capacity)
    exact = next(peak for peak in one.foreseen().phases if peak.phase == "backward")
    assert -0.02 <= found.peaks["backward"] / exact.allocated - 1 <= 0.02


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama", {"method": "lora", "lora": replace(ALL, targets=("all-linear",)), "gradient_checkpointing": True}),
        ("gemma3_text", FULL),
        pytest.param("gpt2", FULL | {"gradient_checkpointing": True}, marks=pytest.mark.long),
        pytest.param("t5", FULL | {"task": "seq2seq"}, marks=pytest.mark.long),
    ],
)
def test_zero_3_gathers_weights_in_deepspeeds_order(kind: str, values: dict[str, Any]) -> None:
    config = drawn(random.Random(kind), kind).config
    config |= {name: 2 for name in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers") if name in config}
    one = settings(**values, zero=Zero(stage=3), world_size=2, precision="fp32", model={"config": config})
    training = training_of(one, generation=80, capacity=79 * GIB)
    trace = recorded(training, config_of(training))[0]
    run = _Run(one, shape_of(config), 80, 79 * GIB)
    run.estimate()
    found = run.sequence

    def gathered(sizes: list[int], streams: list[int], events: list[int], phases: list[tuple[int, Phase]]) -> list[int]:
        """MiB of what begins on that stream in the last update."""
        start = max(start for start, phase in phases if phase == "forward")
        keys = [event for event in events[start:] if event >= 0 and streams[event] == 1]
        return [round(sizes[key] / MIB) for key in keys if sizes[key] >= MIB]

    sizes, streams = [one.size for one in trace.allocations], [one.stream for one in trace.allocations]
    exact = gathered(sizes, streams, trace.events, trace.phases)
    estimated = gathered(found.sizes, found.streams, found.events, found.phases)
    assert SequenceMatcher(None, exact, estimated, autojunk=False).ratio() > 0.95


def test_zero_2_reduces_a_full_bucket_in_the_middle_of_a_layer() -> None:
    config = LLAMA | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 2, "num_key_value_heads": 16}
    values = FULL | {"zero": Zero(stage=2), "precision": "fp16", "batch": 32, "seq_len": 256, "loss_chunk": -1}
    one = Compared(settings(**values, model={"config": config}), config, 75, 24 * GIB)
    found = estimate(one.settings, config, generation=75, capacity=one.capacity).peaks["backward"]
    exact = next(peak for peak in one.foreseen().phases if peak.phase == "backward")
    assert -0.02 <= found / exact.allocated - 1 <= 0.02


@pytest.mark.parametrize(
    ("kind", "generation", "values"),
    [
        pytest.param(kind, generation, values, marks=[] if case == number % 2 else [pytest.mark.long])
        for number, kind in enumerate(KINDS)
        for case, (generation, values) in enumerate(
            (
                (80, FULL),
                (75, {"method": "qlora", "lora": ALL, "gradient_checkpointing": True, "precision": "fp16"}),
                (86, {"method": "full", "precision": "fp32", "gradient_checkpointing": True}),
            )
        )
    ],
)
def test_layers_make_and_end_their_tensors_in_torchs_order(kind: str, generation: int, values: dict[str, Any]) -> None:
    """The order decides where a large tensor fits. If several have the same size, it matters which
    one is freed. The estimate has fewer pieces of the loss than the dry run."""
    config = drawn(random.Random(kind), kind).config
    config |= {name: 2 for name in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers") if name in config}
    task = "seq2seq" if kind == "t5" else "causal"
    if "lora" in values and kind in TARGETS:
        values = values | {"lora": replace(values["lora"], targets=TARGETS[kind])}
    one = settings(**values, batch=16, task=task, model={"config": config})
    training = training_of(one, generation=generation, capacity=79 * GIB)
    trace = recorded(training, config_of(training))[0]
    run = _Run(one, shape_of(config), generation, 79 * GIB)
    run.estimate()
    lined_up = run.sequence

    def passes(
        sizes: list[int], events: list[int], phases: list[tuple[int, Phase]]
    ) -> list[tuple[tuple[Phase, bool, int], int]]:
        """What begins and ends in the first forward and backward pass: whether it begins, its size,
        and which one it is."""
        found = []
        for (start, phase), (end, _) in itertools.pairwise(phases[1:4]):
            found += [((phase, event >= 0, sizes[key]), key) for event in events[start:end] for key in [max(event, ~event)]]
        return [row for row in found if row[0][2] > run.tokens * run.shape.hidden * run.numbers.compute // 2]

    exact = passes([one.size for one in trace.allocations], trace.events, trace.phases)
    found = passes(lined_up.sizes, lined_up.events, lined_up.phases)
    matcher = SequenceMatcher(None, [row for row, _ in exact], [row for row, _ in found], autojunk=False)
    assert matcher.ratio() > 0.94
    partners, same, others = dict[int, int](), 0, 0
    for at, other, length in matcher.get_matching_blocks():
        for ((_, begins, _), key), (_, own) in zip(exact[at : at + length], found[other : other + length], strict=True):
            if begins:
                partners[key] = own
            elif key in partners:
                same, others = same + (partners[key] == own), others + (partners[key] != own)
    assert others < 0.1 * same


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_configuration_leaves_out_is_as_in_transformers(kind: str) -> None:
    whole = AutoConfig.for_model(kind).to_dict()
    if kind == "t5":
        del whole["tie_word_embeddings"]  # T5Config itself always ties them
    assert shape_of({"model_type": kind}) == shape_of(whole)


def test_the_weights_are_those_that_are_counted_for_the_form() -> None:
    for config in (LLAMA, LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True}):
        parameters = model_parameters(config)
        assert parameters is not None
        assert estimated(config).components["weights"] == pytest.approx(4 * parameters, rel=0.01, abs=8 * MIB)


# --- how it changes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"gradient_checkpointing": True},
        {"loss_chunk": 0},
        {"loss_chunk": -1},
        {"batch": 1, "seq_len": 8},
        {"method": "qlora", "lora": ALL},
        {"optimizer": "adafactor", "batch": 1, "seq_len": 8},
    ],
)
def test_components_sum_to_the_peak_of_the_phase_that_has_it(values: dict[str, Any]) -> None:
    found = estimated(**values)
    assert sum(found.components.values()) == found.allocated == found.peaks[found.peak_phase] == max(found.peaks.values())
    assert found.reserved >= found.allocated
    assert min(found.components.values()) >= 0


def test_few_tokens_peak_where_the_embeddings_get_their_gradient_and_whole_logits_in_the_loss() -> None:
    assert estimated(batch=1, seq_len=8, optimizer="adafactor", loss_chunk=0).peak_phase == "optimizer"
    whole, pieces = (estimated(loss_chunk=chunk) for chunk in (0, 128))
    assert whole.components["logits"] == 12 * 4 * 512 * 32000
    assert pieces.components["logits"] < whole.components["logits"] / 10


@pytest.mark.parametrize("name", ["batch", "seq_len"])
@pytest.mark.parametrize("config", [LLAMA, T5, {"model_type": "gpt2"}, {"model_type": "gemma2", "num_hidden_layers": 2}])
def test_more_tokens_never_take_less(config: dict[str, Any], name: str) -> None:
    task = "seq2seq" if config is T5 else "causal"
    found = [estimated(config, task=task, **{name: size}).allocated for size in (1, 2, 16, 64, 256)]
    # Of a block that was not split, up to 1 MiB is the rest of a larger one.
    assert all(more > 0.99 * less for less, more in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"gradient_checkpointing": True}, {}),
        ({"method": "lora", "lora": ALL}, {}),
        ({"method": "qlora", "lora": ALL}, {"method": "lora", "lora": ALL}),
        ({"optimizer": "adamw_8bit"}, {"optimizer": "adamw"}),
        ({"optimizer": "paged_adamw_8bit"}, {"optimizer": "adamw_8bit"}),
        ({}, {"accumulation": 2}),
        ({"bf16_residual": True}, {}),
        ({"loss_chunk": 128}, {"loss_chunk": 0}),
        ({}, {"world_size": 2}),
        ({}, {"precision": "fp32"}),
        ({"method": "lora", "lora": ALL, "model": {"path": "x"}}, {"method": "lora", "lora": ALL}),
        ({"method": "lora", "lora": replace(ALL, targets=("q_proj",))}, {"method": "lora", "lora": ALL}),
    ],
)
def test_what_takes_less(less: dict[str, Any], more: dict[str, Any]) -> None:
    assert estimated(**less).allocated < estimated(**more).allocated


def test_the_pieces_of_the_loss_follow_the_capacity() -> None:
    small, large = (estimated(loss_chunk=-1, batch=16, capacity=size) for size in (3 * GIB, 80 * GIB))
    assert small.components["logits"] < large.components["logits"]
    assert estimated(loss_chunk=-1, batch=16) == large


def test_the_gpus_generation_decides_precision_attention_and_workspaces() -> None:
    found = {generation: estimated(generation=generation, precision="auto") for generation in (75, 80, 90)}
    assert [one.components["workspace"] for one in found.values()] == [17039360, 17039360, 64 * MIB]
    # Without flash attention for shared keys, a T4 has matrices of scores.
    assert found[75].allocated > found[80].allocated + 4 * 16 * 512 * 512 * 6


# --- ZeRO -----------------------------------------------------------------------------------------


def sharded(stage: Any, processes: int = 8, **values: Any) -> Estimate:
    return estimated(zero=Zero(stage=stage, **values), world_size=processes)


def test_zero_shards_what_its_stage_says() -> None:
    parameters = model_parameters(LLAMA)
    assert parameters is not None
    one, two, three = (sharded(stage) for stage in (1, 2, 3))
    for found in (one, two, three):
        assert found.components["master weights"] == pytest.approx(4 * parameters / 8, rel=0.01)
        assert found.components["optimizer"] == pytest.approx(8 * parameters / 8, rel=0.01)
    assert one.components["gradients"] >= 2 * parameters
    assert two.allocated < one.allocated
    assert two.components["weights"] == pytest.approx(2 * parameters, rel=0.01)
    assert three.components["weights"] < two.components["weights"] / 2
    fewer, more = (sharded(2, processes).allocated for processes in (2, 8))
    assert more < fewer


def test_an_offload_takes_the_optimizer_and_the_parameters_off_the_gpu() -> None:
    found = sharded(3, offload_optimizer=True)
    assert found.components["optimizer"] == 0
    both = sharded(3, offload_optimizer=True, offload_parameters=True)
    assert both.components["weights"] < found.components["weights"]
    assert sharded(2, 1, offload_optimizer=True).allocated < sharded(2, 1).allocated


def test_weights_leave_the_gpu_to_become_one_tensor_if_both_do_not_fit() -> None:
    zero = Zero(stage=2, offload_optimizer=True)
    roomy, tight = (estimated(zero=zero, world_size=8, capacity=size) for size in (80 * GIB, 600 * MIB))
    assert roomy.peaks["load"] > 1.9 * roomy.components["weights"]
    assert tight.peaks["load"] < 1.5 * tight.components["weights"]


# --- what cannot be estimated ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        ({}, {}, "model.config.model_type: missing"),
        ({"model_type": "mamba"}, {}, "model.config.model_type mamba: no estimate for this architecture; known are gemma"),
        (LLAMA | {"hidden_size": "wide"}, {}, 'model.config.hidden_size "wide": must be a whole number from 1 on'),
        (LLAMA | {"vocab_size": None}, {}, "model.config.vocab_size null: must be a whole number from 1 on"),
        (LLAMA | {"vocab_size": 0}, {}, "model.config.vocab_size 0: must be"),
        (LLAMA | {"num_hidden_layers": None}, {}, "model.config.num_hidden_layers null: must be"),
        (LLAMA | {"num_attention_heads": 15}, {}, "model.config.num_key_value_heads 4: does not divide num_attention_heads 15"),
        (LLAMA | {"hidden_size": 1000}, {}, "model.config.num_attention_heads 16: does not divide hidden_size 1000"),
        (LLAMA | {"hidden_act": "mish"}, {}, "model.config.hidden_act mish: no estimate for this function"),
        ({"model_type": "gpt2", "resid_pdrop": "0.1"}, {}, 'model.config.resid_pdrop "0.1": must be a number'),
        ({"model_type": "gpt2", "attn_pdrop": 2}, {}, "model.config.attn_pdrop 2: must be a number from 0 to 1"),
        ({"model_type": "gpt2", "add_cross_attention": True}, {}, "model.config.add_cross_attention true"),
        (LLAMA, {"task": "seq2seq"}, "task seq2seq: does not go together with model_type llama"),
        (T5, {}, "task causal: does not go together with model_type t5"),
        (LLAMA, {"method": "lora"}, "method lora: needs lora.r and lora.alpha"),
        (LLAMA, {"method": "lora", "lora": replace(ALL, targets=("query",))}, "lora.targets query: no such layers (there are "),
    ],
)
def test_a_refusal_says_what_is_wrong_or_missing(config: dict[str, Any], values: dict[str, Any], words: str) -> None:
    with pytest.raises(UnknownMemoryError) as refused:
        estimated(config, **values)
    assert str(refused.value).startswith(words)
