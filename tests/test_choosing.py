"""Which preset a run gets for which nobody names one: the estimate, and what it is made of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from memtop.presets import Settings, SettingsError, edit_settings, load_presets, load_recipes, resolve
from memtop.presets.choosing import CONTEXT_BYTES, Foresee, Taken, Under, choose_preset, need
from memtop.presets.gpu_support import Gpu, TorchBuild, why_no_kernels
from memtop.presets.parameters import ModelSize, model_size
from memtop.presets.schema import Lora, Preset, Zero
from memtop.presets.torch_build import installed_build, read_build
from memtop.supervisor import language
from tests.train.support import TINY, Training

GIB = 1 << 30
MILLION = ModelSize(all=10**6, trained=10**6)
FULL = replace(TINY, precision="auto")
LORA = replace(FULL, method="lora", lora=Lora(r=8, alpha=8), model={"path": "somewhere"})
ADAPTERS = ModelSize(all=10**9, trained=10**6, embedded=10**8)


def bytes_for(settings: Settings, size: ModelSize = MILLION) -> int:
    return need(settings, size) - CONTEXT_BYTES


def test_the_estimate_is_what_a_training_holds(tmp_path: Path) -> None:
    """In fp32: the bytes of weights, gradients and moments after the backward pass of a second
    update."""
    training = Training(tmp_path / "state", replace(TINY, target_samples=TINY.effective_batch))
    training.run()
    weights = list(training.model.parameters())
    moments = [
        tensor
        for state in training.optimizer.state.values()
        for tensor in state.values()
        if torch.is_tensor(tensor) and tensor.dim()
    ]
    held = 2 * sum(weight.nbytes for weight in weights) + sum(moment.nbytes for moment in moments)
    size = model_size(training.settings)
    assert size is not None
    assert bytes_for(training.settings, size) == held


@pytest.mark.parametrize(
    ("settings", "size", "expected"),
    [
        (FULL, MILLION, 18 * 10**6),
        (replace(FULL, precision="fp32"), MILLION, 16 * 10**6),
        (replace(FULL, optimizer="adamw_8bit"), MILLION, 12 * 10**6),
        (replace(FULL, optimizer="adafactor"), MILLION, 10 * 10**6),
        (LORA, ADAPTERS, 2 * 10**9 + 18 * 10**6),
        (replace(LORA, precision="fp32"), ADAPTERS, 4 * 10**9 + 16 * 10**6),
        (replace(LORA, method="qlora"), ADAPTERS, round(0.52 * 9 * 10**8) + 2 * 10**8 + 18 * 10**6),
        # On one process sharding saves nothing, and offloading does.
        (replace(FULL, zero=Zero(stage=2)), MILLION, 18 * 10**6),
        (replace(FULL, zero=Zero(stage=3)), MILLION, 18 * 10**6),
        (replace(FULL, zero=Zero(stage=2, offload_optimizer=True)), MILLION, 2 * 10**6),
        (replace(LORA, zero=Zero(stage=2, offload_optimizer=True)), ADAPTERS, 2 * 10**9 + 2 * 10**6),
        (replace(FULL, zero=Zero(stage=2), world_size=4), MILLION, 6 * 10**6),
        (replace(FULL, zero=Zero(stage=3), world_size=4), MILLION, 4_500_000),
    ],
    ids=lambda value: f"{value.method}, {value.zero}, {value.optimizer}" if isinstance(value, Settings) else "",
)
def test_bytes_by_precision_method_and_strategy(settings: Settings, size: ModelSize, expected: int) -> None:
    assert bytes_for(settings, size) == expected


def test_offloaded_parameters_leave_only_those_in_use() -> None:
    seven = ModelSize(all=7 * 10**9, trained=7 * 10**9)
    least = Zero(stage=3, offload_optimizer=True, offload_parameters=True)
    assert bytes_for(replace(FULL, zero=least), seven) == 2 * 10**8


def under(recipe: str, **assignments: str) -> Under:
    def found(preset: Preset) -> Settings:
        return edit_settings(resolve(load_recipes()[recipe], preset=preset, whole=False), assignments=assignments)

    return found


T5_3B = {"model.config.d_model": "2048", "model.config.d_ff": "8192", "model.config.num_layers": "24"}


def test_a_rung_that_cannot_work_is_passed_over() -> None:
    larger = {**T5_3B, "optimizer": "adafactor"}
    preset, reason = choose_preset(4 * GIB, "pretrain-t5", 1, under("pretrain-t5", **larger))
    assert preset.name == "standard"
    why = "optimizer adafactor: its state cannot be sharded by"
    ends = f"stage2_offload: {why} ZeRO-2 + optimizer offload; minimal: {why} ZeRO-3 + optimizer and parameters offload"
    assert reason.endswith(f": not below 85 % of the free memory; not possible: {ends}")
    assert english_in_chinese(reason) == []
    preset, _ = choose_preset(4 * GIB, "pretrain-t5", 1, under("pretrain-t5", **T5_3B))
    assert (preset.name, preset.zero and preset.zero.saves_memory(1)) == ("stage2_offload", True)
    with pytest.raises(SettingsError, match="batch 0"):
        choose_preset(4 * GIB, "pretrain-t5", 1, under("pretrain-t5", batch="0"))


def english_in_chinese(reason: str) -> list[str]:
    """Phrases of the reason that stay English on a Chinese screen."""
    language.use("zh")
    try:
        return re.findall(r"[a-z]+(?: [a-z]+){2,}", language.tr(f"memtop: {reason}; --preset NAME chooses another"))
    finally:
        language.use("en")


def peaks(
    each: float, *, base: float = 1.0, offloaded: float = 0.5, total: float = 8.0, others: float = 0.0, kept: float = 1.0
) -> Foresee:
    """A forecast in GiB: of each sample in a micro-batch, of which checkpointing keeps a part, and
    of all else."""

    def foresee(settings: Settings) -> Taken:
        part = kept if settings.gradient_checkpointing and not settings.zero.stage else 1.0
        size = each * part * settings.batch + (offloaded if settings.zero.offload_optimizer else base)
        return Taken(round(size * GIB), (size + others) / total)

    return foresee


# The batch of the recipe is 16 x 4. What it needs without activations is 1.02 GiB.
@pytest.mark.parametrize(
    ("gib", "foresee", "name", "batch", "words"),
    [
        (8.0, peaks(0.3), "standard", 16, ", estimated to peak at ~5.80 GiB"),
        (8.0, peaks(0.4), "standard", 8, ", estimated to peak at ~7.40 GiB; with batch 8 x 8 at ~4.20 GiB"),
        (8.0, peaks(3.0, kept=0.1), "standard", 1, "at ~49.00 GiB; with batch 1 x 64 at ~4.00 GiB"),
        (8.0, peaks(6.0, kept=0.05), "standard", 16, "at ~97.00 GiB; with gradient checkpointing at ~5.80 GiB"),
        (8.0, peaks(6.0, kept=0.1), "standard", 8, "; with batch 8 x 8 and gradient checkpointing at ~5.80 GiB"),
        (8.0, peaks(1.0, base=6.0), "stage2_offload", 2, "at ~22.00 GiB; with this offload ~2.50 GiB"),
        (8.0, peaks(4.0, base=6.0), "minimal", 1, "at ~70.00 GiB; with this offload ~4.50 GiB"),
        (8.0, peaks(9.0, offloaded=2.0), "standard", 1, "with batch 1 x 64 at ~10.00 GiB: not below 85 % of the free memory"),
        # What it needs without activations is more than there is, but the forecast knows better.
        (0.5, peaks(0.01, base=0.2, total=0.5), "standard", 16, ", estimated to peak at ~0.36 GiB"),
        # Other programs hold the rest: no preset could keep the GPU below 85 %.
        (1.0, peaks(0.11, base=0.05, others=7.0), "standard", 4, "at ~0.49 GiB: with other programs 94 % of the GPU"),
        (2.0, peaks(0.1, base=0.05, others=6.0), "standard", 4, "with batch 4 x 16 at ~0.45 GiB"),
    ],
)
def test_the_forecast_decides_where_there_is_one(gib: float, foresee: Foresee, name: str, batch: int, words: str) -> None:
    of = under("pretrain-causal")
    preset, reason = choose_preset(int(gib * GIB), "pretrain-causal", 1, of, foresee)
    settings = of(preset)
    assert (preset.name, settings.batch) == (name, batch), reason
    assert settings.effective_batch == 64
    assert reason.startswith(f"preset {name}: {gib:.2f} GiB of GPU memory free, ")
    assert reason.endswith(words)
    assert "\n" not in reason
    assert english_in_chinese(reason) == []


def test_a_batch_that_the_person_gave_stays() -> None:
    for given in ({"batch": "16", "accumulation": "4"}, {"batch": "16"}, {"accumulation": "4"}):
        of = under("pretrain-causal", **given)
        preset, _ = choose_preset(8 * GIB, "pretrain-causal", 1, of, peaks(0.4, offloaded=-3.0))
        assert preset.name == "stage2_offload"
        assert "batch" not in given or of(preset).batch == 16


def test_checkpointing_that_the_person_switched_off_stays_off() -> None:
    of = under("pretrain-causal", gradient_checkpointing="false")
    preset, _ = choose_preset(8 * GIB, "pretrain-causal", 1, of, peaks(6.0, kept=0.1, offloaded=0.0, base=6.0))
    assert preset.name == "minimal"
    assert not of(preset).gradient_checkpointing


def test_a_search_of_the_batch_needs_room_for_one_sample() -> None:
    of = under("pretrain-causal", auto_batch="true")
    preset, reason = choose_preset(8 * GIB, "pretrain-causal", 1, of, peaks(0.4))
    assert (preset.name, preset.max_batch) == ("standard", None)
    assert reason.endswith("estimated to peak at ~1.40 GiB with batch 1")
    assert not of(preset).gradient_checkpointing
    preset, reason = choose_preset(8 * GIB, "pretrain-causal", 1, of, peaks(8.0, kept=0.5))
    assert (preset.name, preset.max_batch, of(preset).gradient_checkpointing) == ("standard", None, True)
    assert reason.endswith("estimated to peak at ~5.00 GiB with batch 1 and gradient checkpointing")
    assert english_in_chinese(reason) == []
    preset, reason = choose_preset(8 * GIB, "pretrain-causal", 1, of, peaks(8.0))
    assert preset.name == "standard"
    assert "at ~9.00 GiB with batch 1: not below 85 % of the free memory. memtop cannot offload" in reason


@pytest.mark.parametrize(
    ("gib", "needs", "name", "reason"),
    [
        (12, {}, "deepspeed", "12.00 GiB of GPU memory free, meant for 12 GiB and more"),
        (
            12,
            {"deepspeed": 11, "stage2_offload": 10.3},
            "stage3",
            "12.00 GiB of GPU memory free; deepspeed, meant for 12 GiB and more, is estimated to peak at ~11.00 GiB, "
            "stage3 at ~1.00 GiB",
        ),
        # A larger preset than that of the guide is never taken, whatever is foreseen.
        (
            5,
            {"stage3": 7, "minimal": 6},
            "minimal",
            "5.00 GiB of GPU memory free; stage3, meant for 4 up to 6 GiB, is estimated to peak at ~7.00 GiB, "
            "minimal at ~6.00 GiB: not below 85 % of the free memory",
        ),
        (
            3,
            {"minimal": 4},
            "minimal",
            "3.00 GiB of GPU memory free, meant for less than 4 GiB, estimated to peak at ~4.00 GiB: "
            "not below 85 % of the free memory",
        ),
    ],
)
def test_of_several_processes_the_guides_preset_stays_unless_it_does_not_fit(
    gib: float, needs: dict[str, float], name: str, reason: str
) -> None:
    def foresee(settings: Settings) -> Taken:
        size = needs.get(settings.preset, 1)
        return Taken(round(size * GIB), size / gib)

    preset, why = choose_preset(int(gib * GIB), "pretrain-causal", 2, under("pretrain-causal"), foresee)
    assert (preset.name, why) == (name, f"preset {name}: {reason}")
    assert english_in_chinese(why) == []


def test_a_preset_that_other_programs_push_above_the_limit_is_named_in_both_languages() -> None:
    def foresee(settings: Settings) -> Taken:
        size = 7 if settings.preset == "stage3" else 4
        return Taken(size * GIB, 0.94 if size == 4 else 1.2)

    _, reason = choose_preset(5 * GIB, "pretrain-causal", 2, under("pretrain-causal"), foresee)
    assert reason.endswith("minimal at ~4.00 GiB: with other programs 94 % of the GPU")
    assert english_in_chinese(reason) == []


@pytest.mark.parametrize(("gib", "name"), [(3.0, "qlora-16g-min"), (11.9, "qlora-16g-min"), (80.0, "qlora-16g-safe")])
def test_a_recipe_with_presets_of_its_own_keeps_them(gib: float, name: str) -> None:
    assert choose_preset(int(gib * GIB), "sft-qlora", 1, under("sft-qlora"))[0].name == name


@pytest.mark.parametrize("name", load_presets())
def test_a_preset_of_any_family_says_whether_it_saves_memory_on_one_process(name: str) -> None:
    zero = load_presets()[name].zero
    assert zero is None or zero.saves_memory(1) == (name in ("stage2_offload", "minimal"))


# --- the size of a model that is not loaded -------------------------------------------------------


def save(folder: Path, kind: str) -> torch.nn.Module:
    """A small new model of this family, written to the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, num_key_value_heads=2, head_dim=8, **shape))
    model.save_pretrained(folder, max_shard_size="20KB")
    return model  # type: ignore[no-any-return]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Where Hugging Face keeps the files of a hub name that was downloaded."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def folder(name: str) -> Path:
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("abc123")
        return repository / "snapshots" / "abc123"

    return folder


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_size_of_a_downloaded_model_is_that_of_the_loaded_one(kind: str, hub: Callable[[str], Path]) -> None:
    """A family with a known formula, and one whose weight files are read."""
    from peft import LoraConfig, get_peft_model

    model: Any = save(hub("someone/small"), kind)
    whole = sum(parameter.numel() for parameter in model.parameters())
    full = replace(FULL, model={"path": "someone/small"})
    size = model_size(full)
    assert size is not None
    assert (size.all, size.trained) == (whole, whole)
    for targets in (Lora(r=4, alpha=4).targets, ("all-linear",)):
        wanted = "all-linear" if len(targets) == 1 else list(targets)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=wanted))
        trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
        model = adapted.unload()
        found = model_size(replace(full, method="lora", lora=Lora(r=4, alpha=4, targets=targets)))
        assert found is not None
        assert (found.all, found.trained) == (whole, trained)


def test_a_size_that_is_not_known_is_none(hub: Callable[[str], Path]) -> None:
    named = replace(FULL, model={"path": "someone/small"})
    assert model_size(named) is None, "not downloaded"
    folder = hub("someone/small")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert model_size(named) is None, "an unknown family without weight files"
    (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{broken}")
    assert model_size(named) is None
    (folder / "config.json").write_text("[")
    assert model_size(named) is None


# --- the installed torch --------------------------------------------------------------------------


def test_the_build_is_read_without_loading_torch() -> None:
    found = installed_build()
    assert found is not None
    assert (found.version, found.cuda, found.rocm) == (torch.__version__, torch.version.cuda, torch.version.hip is not None)


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("__version__ = '2.6.0+cu124'\ncuda = '12.4'\nhip = None\n", TorchBuild(version="2.6.0+cu124", cuda="12.4")),
        (
            "__version__ = '2.9.0+rocm6'\ncuda: Optional[str] = None\nhip = '6.4'\n",
            TorchBuild(version="2.9.0+rocm6", cuda=None, rocm=True),
        ),
        ("__version__ = '2.9.0'\n", None),
        ("cuda = '12.4'\n", None),
        ("", None),
    ],
)
def test_the_text_of_a_version_file(text: str, build: TorchBuild | None) -> None:
    assert read_build(text) == build


@pytest.mark.parametrize(
    ("version", "cuda", "capability", "advice"),
    [
        ("2.13.0+cu130", "13.0", (7, 0), "CUDA 12.6"),
        ("2.13.0a0+nv25", "13.0", (6, 1), "CUDA 12.6"),
        ("2.13.0+cu130", "13.0", (7, 5), None),
        ("2.13.0+cu130", "13.0", (12, 0), None),
        ("2.9.0+cu128", "12.8", (6, 1), "CUDA 12.6"),
        ("2.9.0+cu128", "12.8", (7, 0), None),
        ("2.9.0a0+own", "12.8", (6, 1), None),
        ("2.9.0+cu126", "12.6", (12, 0), "CUDA 12.8 or newer"),
        ("2.9.0+cu126", "12.6", (6, 0), None),
        ("2.9.0a0+own", "12.6", (12, 0), None),
    ],
)
def test_kernels_that_a_build_lacks_by_its_cuda_version(
    version: str, cuda: str, capability: tuple[int, int], advice: str | None
) -> None:
    found = why_no_kernels(TorchBuild(version=version, cuda=cuda), Gpu(name="card", capability=capability))
    if advice is None:
        assert found is None
        return
    assert found is not None
    assert found.found == f"torch {version} has no kernels for the card (compute capability {capability[0]}.{capability[1]})"
    assert found.advice == f"install a torch build for {advice}, see https://pytorch.org/get-started/locally/"
