"""The host memory of a run that is foreseen: its parts, how they change with the settings, and how
far it is from the dry run and from a real run."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from memtop.presets import Settings, load_presets, load_recipes, resolve
from memtop.presets.host_estimate import HostEstimate, host_estimate, page_locked
from memtop.presets.schema import Lora, Zero
from memtop.presets.states import UnknownMemoryError
from memtop.train.dry_run.build import training_of
from memtop.train.dry_run.run import foresee
from tests.conftest import Runs

MIB, GIB = 1 << 20, 1 << 30
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8000,
    "tie_word_embeddings": True,
}
PARAMETERS = 8000 * 512 + 4 * (4 * 512 * 512 + 3 * 512 * 1536 + 2 * 512) + 512


def settings(**values: Any) -> Settings:
    given: dict[str, Any] = {"batch": 2, "accumulation": 1, "seq_len": 128, "model": {"config": LLAMA}, **values}
    return Settings(recipe="", preset="", save_every=1, learning_rate=1e-4, **given)


def estimated(*, on_gpu: bool = False, available: int | None = None, **values: Any) -> HostEstimate:
    return host_estimate(settings(**values), LLAMA, on_gpu=on_gpu, available=available)


# --- on a CPU -------------------------------------------------------------------------------------


def test_on_a_cpu_everything_is_in_host_memory() -> None:
    found = estimated()
    parts = found.components
    assert sum(parts.values()) == found.peak
    assert found.least < found.peak < found.most
    assert parts["weights"] == pytest.approx(4 * PARAMETERS, rel=0.01)
    assert parts["optimizer"] == pytest.approx(8 * PARAMETERS, rel=0.01)
    assert parts["copy for saving"] == pytest.approx(12 * PARAMETERS, rel=0.02)
    # What each of the layers keeps of 256 tokens, at least: its result, queries, keys and values.
    # Gradients need the memory later, but the C library keeps the most.
    assert parts["unused heap"] > 4 * 256 * 4 * 512 * 4


def test_the_levels_take_less_and_less() -> None:
    recipe = load_recipes()["pretrain-causal"]
    config = recipe.model["config"]
    peaks = [
        host_estimate(resolve(recipe, preset=load_presets()[name], whole=False), config, on_gpu=False).peak
        for name in ("standard", "low", "extreme")
    ]
    assert peaks[0] > peaks[1] > peaks[2]


def test_more_samples_take_more_and_checkpointing_takes_less() -> None:
    one, two = estimated(batch=1), estimated(batch=2)
    assert 1.5 < two.components["unused heap"] / one.components["unused heap"] < 2.1
    assert estimated(gradient_checkpointing=True).peak < two.peak


def test_the_c_library_keeps_only_small_blocks() -> None:
    small, large = estimated(batch=1), estimated(batch=256)
    assert small.components["unused heap"] > 10 * MIB
    assert "unused heap" not in large.components


def test_each_process_has_its_own_memory_and_all_share_the_libraries() -> None:
    one, two = estimated().components, estimated(world_size=2).components
    assert two["libraries"] == one["libraries"]
    assert two["weights"] == 2 * one["weights"]
    assert two["copy for saving"] == one["copy for saving"], "only the first rank saves"
    assert "launcher" not in one
    assert two["launcher"] > 100 * MIB
    assert two["exchange"] > 0


def test_loader_workers_count_as_many_as_the_free_memory_allows() -> None:
    two = estimated(workers=2).components["loader workers"]
    assert two == 2 * estimated(workers=1).components["loader workers"]
    assert estimated(workers=4, available=11 * GIB).components["loader workers"] == two
    assert "loader workers" not in estimated(workers=4, available=6 * GIB).components


def test_the_state_is_copied_only_if_as_much_again_stays_free() -> None:
    whole = estimated()
    copy = whole.components["copy for saving"]
    without = whole.peak - copy
    needed = without + copy + max(512 * MIB, copy)
    assert estimated(available=needed).peak == whole.peak
    assert estimated(available=needed - 1).peak == without


def test_frozen_weights_of_a_file_stay_in_its_mapping(tmp_path: Any) -> None:
    lora = Lora(r=8, alpha=16)
    read = {"method": "lora", "lora": lora, "model": {"path": str(tmp_path)}}
    same = estimated(**read).components
    assert same["mapped weights"] == pytest.approx(4 * PARAMETERS, rel=0.01)
    assert same["weights"] < 0.1 * same["mapped weights"]
    # Every update reads them, so they are needed.
    assert estimated(**read).with_files == estimated(**read).peak
    # In another precision they are converted.
    config = {**LLAMA, "dtype": "bfloat16"}
    converted = host_estimate(settings(**read), config, on_gpu=False).components
    assert converted["weights"] > 4 * PARAMETERS


def test_what_cannot_be_estimated_has_a_reason() -> None:
    with pytest.raises(UnknownMemoryError, match="mamba"):
        host_estimate(settings(), {"model_type": "mamba"}, on_gpu=False)


# --- with a GPU -----------------------------------------------------------------------------------


def test_with_a_gpu_the_model_is_there_and_what_python_takes_is_uncertain() -> None:
    found = estimated(on_gpu=True, precision="bf16")
    assert not {"activations", "gradients", "optimizer", "unused heap"} & found.components.keys()
    assert found.most - found.least == 1536 * MIB


def test_page_locked_blocks_are_powers_of_two() -> None:
    assert [page_locked(size) for size in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]
    assert page_locked(9 * GIB // 4) == 4 * GIB


def test_the_preset_minimal_says_what_the_host_needs_of_each_trained_parameter() -> None:
    preset = load_presets()["minimal"]
    parts = estimated(on_gpu=True, precision="bf16", zero=preset.zero, pin_memory=False).components
    least = (parts["optimizer"] + parts["gradients"] + 2 * PARAMETERS) / PARAMETERS
    assert f"at least {least:.0f} bytes of host memory per trained parameter" in preset.description
    assert parts["weights"] >= 2 * PARAMETERS, "a page-locked block is rounded up"


@pytest.mark.parametrize(
    ("zero", "accumulation", "world", "pins"),
    [
        pytest.param(*case, pins, marks=[] if pins is bool(number % 2) else [pytest.mark.long])
        for number, case in enumerate(
            (
                (Zero(stage=1, offload_optimizer=True), 4, 2),
                (Zero(stage=2, offload_optimizer=True), 1, 1),
                (Zero(stage=2, offload_optimizer=True), 4, 2),
                (Zero(stage=3, offload_optimizer=True), 4, 2),
                (Zero(stage=3, offload_optimizer=True, offload_parameters=True), 1, 1),
            )
        )
        for pins in (False, True)
    ],
)
def test_what_is_offloaded_is_as_in_the_dry_run(zero: Zero, accumulation: int, world: int, pins: bool) -> None:
    """Which the tests of the dry run compare with the real DeepSpeed."""
    own = settings(
        zero=zero,
        accumulation=accumulation,
        world_size=world,
        pin_memory=pins,
        precision="bf16",
        loss_chunk=128,
        optimizer="cpu_adam",
    )
    exact = foresee(training_of(own, generation=80, capacity=GIB)).host
    assert exact is not None
    parts = host_estimate(own, LLAMA, on_gpu=True).components
    found = sum(parts.get(name, 0) for name in ("weights", "gradients", "optimizer")) / world  # type: ignore[call-overload]
    assert found == pytest.approx(exact.allocated, rel=0.06)


# --- against a real run ---------------------------------------------------------------------------


def test_a_real_run_takes_about_what_was_foreseen(runs: Runs) -> None:
    """`bench.host_memory` measures how exact it is, with the PSS. Here other programs may share the
    libraries with the run, so the rank's own resident bytes count, which it reports after each
    update."""
    sizes = ("--set", "model.config.hidden_size=512", "--set", "model.config.num_hidden_layers=9")
    words = ("--max-updates", "3", "--save-every", "1", "--accum", "1", "--set", "device=cpu", *sizes)
    runs.memtop("train", "first-run", "--headless", "--name", "a", *words)
    own = msgspec.convert(runs.show("a")["settings"], Settings)
    foreseen = host_estimate(own, own.model["config"], on_gpu=False)
    journal = (runs.path / "a" / "attempts" / "0001" / "rank-0.jsonl").read_text().splitlines()
    resident = max(json.loads(line).get("rss_bytes") or 0 for line in journal)
    without_copy = foreseen.peak - foreseen.components["copy for saving"]
    assert 0.7 * without_copy < resident < 1.25 * foreseen.peak
