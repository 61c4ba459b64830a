"""The presets of the guides: their values, what a switch keeps, and which one is chosen
automatically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memtop.presets import (
    PresetFileError,
    Settings,
    SettingsError,
    apply_preset,
    compatibility,
    edit_settings,
    load_presets,
    load_recipes,
    presets_for,
    resolve,
    take_whole,
)
from memtop.presets.checks import check
from memtop.presets.choosing import presets_by_memory
from memtop.presets.comparison import outlook
from memtop.presets.edits import find_preset
from memtop.presets.parameters import model_parameters
from memtop.presets.schema import ALL_TARGETS, ATTENTION_TARGETS, Lora, Zero

GIB = 1 << 30
PRESETS = load_presets()
RECIPES = load_recipes()
LORA = resolve(RECIPES["sft-lora"], preset=PRESETS["standard"], whole=False)
QLORA = resolve(RECIPES["sft-qlora"], preset=PRESETS["standard"], whole=False)
FIRST = resolve(RECIPES["first-run"], preset=PRESETS["standard"])

# name: B, A, T, stage, offloads (optimizer, parameters), r, alpha, targets, lr, warm-up, log, save,
# limit, best, workers, eval batch
LADDER = {
    "deepspeed": (4, 4, 2048, 2, False, False, 64, 16, ALL_TARGETS, 1e-4, 100, 10, 500, 3, True, 2, 4),
    "stage2_offload": (3, 6, 1792, 2, True, False, 48, 16, ALL_TARGETS, 1e-4, 100, 15, 500, 2, True, 2, 3),
    "stage3": (2, 8, 1536, 3, False, False, 32, 16, ALL_TARGETS, 1e-4, 100, 20, 500, 2, True, 1, 2),
    "minimal": (1, 16, 1024, 3, True, True, 16, 8, ATTENTION_TARGETS, 8e-5, 50, 50, 1000, 1, False, 0, 1),
}


@pytest.mark.parametrize("name", LADDER)
def test_a_ladder_preset_taken_whole_has_every_value_of_its_guide(name: str) -> None:
    s = resolve(RECIPES["sft-lora"], preset=PRESETS[name])
    assert s.lora is not None
    assert s.warmup_samples % s.effective_batch == 0
    found = (
        *(s.batch, s.accumulation, s.seq_len, s.zero.stage, s.zero.offload_optimizer, s.zero.offload_parameters),
        *(s.lora.r, s.lora.alpha, s.lora.targets, s.learning_rate, s.warmup_samples // s.effective_batch, s.log_every),
        *(s.save_every, s.save_total_limit, s.load_best_at_end, s.workers, s.eval_batch),
    )
    assert found == LADDER[name]
    assert s.eval_every == s.save_every
    assert s.precision == "auto"
    assert s.gradient_checkpointing == (name != "deepspeed")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("t5-balanced", (24, 2, 256, 48)),
        ("t5-conservative", (20, 2, 192, 40)),
        ("t5-aggressive", (24, 3, 256, 72)),
        ("qlora-16g-safe", (1, 16, 1024, 16)),
        ("qlora-16g-min", (1, 16, 512, 16)),
    ],
)
def test_the_other_families_with_their_batch_and_length(name: str, values: tuple[int, ...]) -> None:
    s = resolve(RECIPES[PRESETS[name].recipes[0]], preset=PRESETS[name])
    assert (s.batch, s.accumulation, s.seq_len, s.effective_batch) == values


@pytest.mark.parametrize(("name", "r", "alpha", "workers"), [("qlora-16g-safe", 32, 64, 2), ("qlora-16g-min", 16, 32, 1)])
def test_qlora_on_16_gb(name: str, r: int, alpha: int, workers: int) -> None:
    s = resolve(RECIPES["sft-qlora"], preset=PRESETS[name])
    assert s.lora is not None
    assert (s.lora.r, s.lora.alpha, s.workers, s.learning_rate, s.epochs, s.log_every, s.save_every) == (
        *(r, alpha, workers, 2e-4, 3.0, 10, 500),
    )
    assert s.gradient_checkpointing


def test_a_switch_keeps_model_data_and_learning_rate() -> None:
    for name in LADDER:
        after = apply_preset(LORA, PRESETS[name])
        assert after.effective_batch == 16
        for field in ("seq_len", "lora", "learning_rate", "warmup_samples", "epochs", "precision", "save_every", "data"):
            assert getattr(after, field) == getattr(LORA, field)
        assert after.zero == PRESETS[name].zero
    assert apply_preset(apply_preset(LORA, PRESETS["minimal"]), PRESETS["deepspeed"]).batch == 4
    assert apply_preset(apply_preset(LORA, PRESETS["minimal"]), PRESETS["standard"]) == LORA


def test_a_ceiling_never_raises_the_micro_batch_above_the_recipes() -> None:
    assert {apply_preset(QLORA, preset).batch for preset in PRESETS.values()} == {1}


def test_a_full_fine_tune_takes_no_adapters_from_a_guide() -> None:
    whole = take_whole(FIRST, PRESETS["stage3"])
    assert (whole.lora, whole.seq_len, whole.effective_batch) == (None, 1536, 16)
    with pytest.raises(SettingsError, match="seq_len 1536: beyond the model's 1024 positions"):
        check(whole)
    # The preset is not for this recipe: a new run takes only its memory strategy.
    kept = resolve(RECIPES["first-run"], preset=PRESETS["stage3"])
    assert (kept.seq_len, kept.effective_batch, kept.zero.stage) == (128, 32, 3)


def test_cpu_adam_becomes_adamw_without_offload() -> None:
    offloaded = replace(LORA, zero=Zero(stage=2, offload_optimizer=True), optimizer="cpu_adam")
    assert apply_preset(offloaded, PRESETS["standard"]).optimizer == "adamw"
    assert apply_preset(offloaded, PRESETS["minimal"]).optimizer == "cpu_adam"


@pytest.mark.parametrize(
    ("change", "fit", "words"),
    [
        ({}, "resumes", "same state"),
        ({"zero": Zero(stage=3), "batch": 1, "accumulation": 16}, "resumes", "same state"),
        ({"seq_len": 512}, "resumes", "T 1024 -> 512: other data"),
        ({"accumulation": 8}, "resumes", "effective batch 16 -> 32"),
        ({"lora": Lora(r=64, alpha=32)}, "new run", "lora.alpha 16 -> 32: the scale alpha / r of the adapters jumps"),
        ({"lora": Lora(r=64, alpha=16, targets=ALL_TARGETS[::-1])}, "resumes", "same state"),
        ({"optimizer": "adamw_8bit"}, "converts", "rounded to 8 bits"),
        ({"optimizer": "adafactor"}, "converts", "row and column means"),
        ({"optimizer": "cpu_adam"}, "resumes", "same state"),
        ({"method": "qlora"}, "new run", "method lora -> qlora"),
        ({"lora": Lora(r=32, alpha=16)}, "new run", "lora.r 64 -> 32"),
        ({"lora": Lora(r=64, alpha=16, targets=ATTENTION_TARGETS)}, "new run", "lora.targets"),
        ({"model": {"path": "other"}}, "new run", "another model"),
        ({"data": {"train": "other"}}, "new run", "other data"),
        ({"task": "causal"}, "new run", "task"),
        ({"seed": 1}, "new run", "another order"),
    ],
)
def test_the_effect_of_a_change_on_the_state(change: dict[str, Any], fit: str, words: str) -> None:
    found, reason = compatibility(LORA, replace(LORA, **change))
    assert found == fit
    assert words in reason


def test_every_change_of_the_optimizer_reports_what_happens_to_the_moments() -> None:
    kinds = ("adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "cpu_adam")
    for one in kinds:
        for other in kinds:
            fit, reason = compatibility(replace(LORA, optimizer=one), replace(LORA, optimizer=other))
            assert (fit == "converts") == ("moments" in reason)
            assert one != other or fit == "resumes"


def test_an_outlook_distinguishes_a_switch_from_a_new_run() -> None:
    look = outlook(LORA, PRESETS["stage2_offload"])
    assert (look.switch, look.switch_whole) == ("resumes", "new run")
    assert (look.kept.effective_batch, look.whole.effective_batch) == (16, 18)
    assert look.changes == [
        "split 4 x 4 x 1 -> 2 x 8 x 1",
        "no ZeRO -> ZeRO-2 + optimizer offload",
        "gradient checkpointing on",
        "workers 0 -> 2",
    ]
    assert outlook(QLORA, PRESETS["minimal"]).switch == "refused"
    assert outlook(FIRST, PRESETS["low"]).switch_whole == "resumes"


@pytest.mark.parametrize(
    ("gib", "name"),
    [
        *((0.0, "minimal"), (3.99, "minimal"), (4, "stage3"), (5.99, "stage3"), (6, "stage2_offload")),
        *((11.99, "stage2_offload"), (12, "deepspeed"), (12.01, "deepspeed"), (80, "deepspeed")),
    ],
)
def test_the_preset_by_free_memory(gib: float, name: str) -> None:
    assert presets_by_memory(int(gib * GIB), "first-run")[0][0].name == name


def test_the_reason_names_the_threshold() -> None:
    assert presets_by_memory(6 * GIB, "first-run")[1] == "meant for 6 up to 12 GiB"
    assert presets_by_memory(12 * GIB - 1, "first-run")[1] == "meant for 6 up to 12 GiB"
    assert presets_by_memory(3 * GIB, "first-run")[1] == "meant for less than 4 GiB"
    assert presets_by_memory(24 * GIB, "first-run")[1] == "meant for 12 GiB and more"


@pytest.mark.parametrize(("gib", "name"), [(3, "qlora-16g-min"), (11.9, "qlora-16g-min"), (12, "qlora-16g-safe")])
def test_a_4_bit_base_model_never_gets_stage_3(gib: float, name: str) -> None:
    preset = presets_by_memory(int(gib * GIB), "sft-qlora")[0][0]
    assert preset.name == name
    assert resolve(RECIPES["sft-qlora"], preset=preset, whole=False).effective_batch == 16


@pytest.mark.parametrize("recipe", [*RECIPES, "somebody's own"])
def test_keys_are_unique_among_the_presets_of_a_recipe(recipe: str) -> None:
    keys = [preset.key for preset in presets_for(recipe).values()]
    assert len(keys) == len(set(keys))
    assert keys[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert all(find_preset(str(preset.key), recipe) == preset for preset in presets_for(recipe).values())


def write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_the_users_families_extend_and_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "memtop/ladder", "minimal.toml", 'key = 4\ntitle = "mine"\ndescription = "d"\nmax_batch = 1\n')
    write(
        tmp_path, "memtop.toml", '[presets.t5-balanced]\nkey = 8\ntitle = "t"\ndescription = "d"\nrecipes = ["pretrain-t5"]\n'
    )
    found = load_presets()
    assert (found["minimal"].title, found["minimal"].family) == ("mine", "ladder")
    assert (found["t5-balanced"].title, found["t5-balanced"].family) == ("t", "t5")
    # Without a threshold, the preset above is the last that can be chosen.
    assert presets_by_memory(GIB, "first-run")[0][0].name == "stage3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("key = 2\n", r"mine.toml: key 2: preset \w+ has it already; give another or none"),
        ("key = 10\n", r"mine.toml: .*key"),
        ("max_batch = 0\n", r"mine.toml: .*max_batch"),
        ("[guide]\nbatch = 0\n", r"mine.toml: .*guide.batch"),
        ("[zero]\nstage = 4\n", r"mine.toml: Invalid enum value 4 - at `\$.zero.stage`"),
        ("[guide.lora]\nr = 4\n", r"mine.toml: .*`alpha`"),
    ],
)
def test_a_bad_value_is_one_line_with_file_and_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write(tmp_path / "memtop/qlora", "mine.toml", 'title = "t"\ndescription = "d"\nrecipes = ["sft-qlora"]\n' + text)
    with pytest.raises(PresetFileError, match=message) as refusal:
        load_presets()
    assert "\n" not in str(refusal.value)


def test_recipes_that_need_data_are_refused_without_it_and_the_others_run_anywhere() -> None:
    assert {name for name, recipe in RECIPES.items() if recipe.data.get("train") == ""} == {
        "pretrain-t5",
        "sft-lora",
        "sft-qlora",
    }
    for name, recipe in RECIPES.items():
        assert check(resolve(recipe, preset=PRESETS["standard"])).recipe == name
        assert (recipe.preset == "auto") == (name != "first-run")


@pytest.mark.parametrize(("name", "millions"), [("pretrain-t5", 196.6), ("pretrain-causal", 30.8)])
def test_the_models_have_their_documented_size(name: str, millions: float) -> None:
    count = model_parameters(RECIPES[name].model["config"])
    assert count is not None
    assert round(count / 1e6, 1) == millions


def test_dotted_keys_reach_into_model_data_lora_and_zero() -> None:
    edited = edit_settings(
        LORA,
        assignments={
            "data.train": "x.jsonl",
            "data.columns.prompt": "question",
            "model.path": "/models/qwen",
            "lora.r": "16",
            "lora.targets": "q_proj, v_proj",
            "zero.stage": "2",
            "zero.offload_optimizer": "true",
        },
    )
    assert edited.data == {"train": "x.jsonl", "columns": {"prompt": "question", "response": "response"}}
    assert edited.model == {"path": "/models/qwen"}
    assert edited.lora == Lora(r=16, alpha=16, dropout=0.05, targets=("q_proj", "v_proj"))
    # As a recipe writes it, also without the quotes, which a shell takes away.
    for text in ('["q_proj", "v_proj"]', "[q_proj,v_proj]"):
        assert edit_settings(LORA, assignments={"lora.targets": text}).lora.targets == ("q_proj", "v_proj")
    assert edited.zero == Zero(stage=2, offload_optimizer=True)


def test_a_configuration_has_typed_values_and_replaces_a_path() -> None:
    config = {"model.config.model_type": "llama", "model.config.hidden_size": "64", "model.config.tie_word_embeddings": "true"}
    assert edit_settings(LORA, assignments=config).model == {
        "config": {"model_type": "llama", "hidden_size": 64, "tie_word_embeddings": True}
    }
    assert edit_settings(FIRST, assignments={"model.config.hidden_size": "64"}).model["config"]["num_hidden_layers"] == 4
    assert edit_settings(FIRST, assignments={"data.train": "a.txt"}).data == {"train": "a.txt"}
    assert edit_settings(LORA, assignments={"data.source": "python-stdlib", "data.max_bytes": "9"}).data["max_bytes"] == 9


def test_the_last_of_two_exclusive_settings_wins() -> None:
    assert edit_settings(FIRST, assignments={"epochs": "2"}).target_samples == 0
    whole = take_whole(LORA, PRESETS["deepspeed"])
    assert whole.warmup_samples == 1600
    assert edit_settings(whole, assignments={"warmup_fraction": "0.1"}).warmup_samples == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("model.path", "x"), ("data.train", "x"), ("lora.r", "8"), ("method", "full"), ("task", "causal"), ("seed", "1")),
        ("data.columns.prompt", "q"),
    ],
)
def test_settings_that_make_a_new_run_are_refused_for_a_run_in_progress(key: str, value: str) -> None:
    with pytest.raises(SettingsError, match=r"makes a new run: memtop train sft-lora --name NEW .* or --fresh"):
        edit_settings(LORA, assignments={key: value}, updates_done=0)


def in_progress(settings: Settings, **assignments: str) -> Settings:
    return edit_settings(settings, assignments=assignments, updates_done=5, samples_seen=80)


def test_a_run_in_progress_can_change_all_other_settings() -> None:
    assert in_progress(LORA, seed=str(LORA.seed)) == LORA
    assert in_progress(LORA, optimizer="adafactor", workers="2").optimizer == "adafactor"


def test_the_allocators_segments_can_grow_under_every_preset() -> None:
    assert {preset.allocator for preset in load_presets().values()} == {"expandable_segments:True"}
