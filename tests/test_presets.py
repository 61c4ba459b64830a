"""Presets, recipes, the table of settings and the splits of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memtop.presets import (
    PresetFileError,
    SettingsError,
    apply_preset,
    edit_settings,
    load_presets,
    load_recipes,
    resolve,
)
from memtop.presets.checks import longer_than_known
from memtop.presets.comparison import changes, describe_cut, describe_split, outlook, pace
from memtop.presets.edits import assign, find_preset
from memtop.presets.fields import FIELDS, can_change_live, training_unchanged
from memtop.presets.files import parse
from memtop.presets.keys import LISTS, choices, keys
from memtop.presets.schema import Lora, Settings, Zero, exact_splits, nearest_splits, split_below

RECIPE = load_recipes()["first-run"]
BASE = resolve(RECIPE, preset=load_presets()["standard"])


@given(st.integers(1, 512), st.integers(1, 8))
def test_every_split_holds_the_effective_batch(effective: int, world: int) -> None:
    splits = exact_splits(effective, world)
    assert all(batch * accumulation * world == effective for batch, accumulation in splits)
    assert bool(splits) == (effective % world == 0)
    assert [batch for batch, _ in splits] == sorted({batch for batch, _ in splits}, reverse=True)


def test_splits_of_the_guides() -> None:
    assert split_below(192, 3, 26) == (16, 4)
    assert split_below(384, 3, 26) == (16, 8)
    assert split_below(32, 1, 4) == (4, 8)
    assert split_below(10, 3, 4) is None
    assert nearest_splits(64, 1, 24) == [(16, 4), (32, 2)]


def test_first_run_has_its_documented_values() -> None:
    assert (BASE.batch, BASE.accumulation, BASE.effective_batch) == (8, 4, 32)
    assert BASE.target_samples == RECIPE.max_updates * 32


@pytest.mark.parametrize("name", list(load_presets()))
def test_a_preset_never_changes_the_effective_batch(name: str) -> None:
    for batch, accumulation in exact_splits(48):
        settings = edit_settings(BASE, assignments={"batch": str(batch), "accumulation": str(accumulation)})
        assert apply_preset(settings, find_preset(name)).effective_batch == 48


@pytest.mark.parametrize("name", list(load_presets()))
def test_the_standard_preset_reverts_the_others(name: str) -> None:
    extreme = apply_preset(BASE, find_preset("extreme"))
    assert (extreme.batch, extreme.accumulation, extreme.gradient_checkpointing) == (1, 32, True)
    assert apply_preset(apply_preset(BASE, find_preset(name)), find_preset("5")) == BASE
    assert apply_preset(apply_preset(extreme, find_preset(name)), find_preset("5")) == BASE


def test_a_preset_that_says_nothing_of_workers_keeps_those_that_a_person_chose() -> None:
    mine = edit_settings(BASE, preset="deepspeed", assignments={"workers": "3", "pin_memory": "true"})
    assert apply_preset(mine, find_preset("standard")) == replace(BASE, workers=3, pin_memory=True)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"assignments": {"batch": "0"}}, "batch 0: must be at least 1"),
        ({"assignments": {"accumulation": "-1"}}, "accumulation -1: must be at least 1"),
        ({"assignments": {"python": "env/bin/python"}}, "python env/bin/python: give its whole path, which begins with /"),
        ({"assignments": {"seq_len": "1"}}, "seq_len 1: must be at least 2"),
        ({"assignments": {"seq_len": "2000"}}, "seq_len 2000: beyond the model's 1024 positions; give at most 1024"),
        ({"preset": "extrem"}, "; did you mean extreme?"),
        ({"max_updates": 0}, "max_updates 0: must be at least 1"),
        *(
            ({"assignments": {key: "1"}}, f"unknown key; did you mean {meant}? There are batch, ")
            for key, meant in {
                "lerning_rate": "learning_rate",
                "lr": "learning_rate",
                "Learning-Rate": "learning_rate",
                "bs": "batch",
                "batchsize": "batch",
                "epoch": "epochs",
                "num_workers": "workers",
                "max_steps": "--max-updates",
                "gpus": "--gpus",
                "rank": "lora.r",
                "model_path": "model.path",
                "dataset": "data.train",
            }.items()
        ),
        ({"preset": "stage2"}, "qlora-16g-min; with ZeRO stage 2: deepspeed, stage2_offload"),
        ({"preset": "ZeRO-3"}, "; with ZeRO stage 3: stage3, minimal"),
        ({"preset": "zero1"}, "t5-aggressive, qlora-16g-safe, qlora-16g-min"),
        ({"assignments": {"model": "x"}}, "--set model: has parts; there are model.path, model.config.KEY"),
        ({"assignments": {"model.pth": "x"}}, "--set model.pth: unknown key; did you mean model.path? There are model.path"),
        ({"assignments": {"data.trian": "x"}}, "; did you mean data.train?"),
        ({"assignments": {"data.columns.promt": "x"}}, "; did you mean prompt?"),
        ({"assignments": {"data.max_bytes": "x"}}, "data.max_bytes 'x': must be a whole number"),
        (
            {"assignments": {"lora.r": "16"}},
            "--set lora.r: the recipe has no [lora] table; add --set lora.alpha=N --set method=lora",
        ),
        (
            {"assignments": {"lora.dropout": "0.1", "method": "lora"}},
            "--set lora.dropout: the recipe has no [lora] table; add --set lora.r=N --set lora.alpha=N",
        ),
        ({"assignments": {"lora.rank": "16"}}, "--set lora.rank: unknown key"),
        ({"assignments": {"lora.r": "16", "lora.alpha": "8"}}, "lora.r 16: method full trains no adapters"),
        ({"assignments": {"method": "lora"}}, "method lora: no adapters are described"),
        ({"assignments": {"zero.stage": "5"}}, "zero.stage '5': there are 0, 1, 2, 3"),
        ({"assignments": {"zero.stage.x": "5"}}, "--set zero.stage.x: unknown key"),
        ({"assignments": {"zero": "2"}}, "--set zero: has parts; there are zero.stage"),
        ({"assignments": {"batch.x": "5"}}, "--set batch.x: unknown key; batch has no parts"),
        ({"assignments": {"target_samples": "5"}}, "--set target_samples: unknown key"),
        ({"assignments": {"zero.offload_optimizer": "true"}}, "zero.offload_optimizer true: needs a ZeRO stage"),
        ({"assignments": {"zero.offload_parameters": "true", "zero.stage": "2"}}, "needs stage 3"),
        ({"assignments": {"optimizer": "adafactor", "zero.stage": "2"}}, "optimizer adafactor: its state cannot be sharded"),
        ({"assignments": {"optimizer": "cpu_adam"}}, "optimizer cpu_adam: needs its state in host memory"),
        ({"assignments": {"optimizer": "adamw8bit"}}, "; did you mean adamw_8bit?"),
        ({"assignments": {"load_best_at_end": "true"}}, "load_best_at_end true: nothing is evaluated"),
        ({"assignments": {"epochs": "0"}}, "epochs 0: the run has no end"),
        ({"assignments": {"eval_every": "-1"}}, "eval_every -1: must be 0 or more"),
        ({"assignments": {"seed": "x"}}, "seed 'x': must be a whole number"),
        ({"assignments": {"seed": "-1"}}, "seed -1: must be 0 or more"),
        ({"assignments": {"seed": "4294967296"}}, "seed 4294967296: must be at most 2147483647"),
        ({"assignments": {"batch": str(10**30)}}, f"batch {10**30}: must be at most 1048576"),
        ({"assignments": {"accumulation": str(1 << 40)}}, "accumulation 1099511627776: must be at most 1048576"),
        (
            {"assignments": {"batch": str(1 << 20), "accumulation": str(1 << 20)}},
            f"effective batch {1 << 40}: must be at most 16777216",
        ),
        ({"assignments": {"seq_len": str(10**30)}}, f"seq_len {10**30}: must be at most 16777216"),
        ({"assignments": {"save_every": str(10**10)}}, "save_every 10000000000: must be at most 2147483647"),
        ({"max_updates": 10**10}, "max_updates 10000000000: must be at most 2147483647"),
        ({"assignments": {"workers": "5000"}}, "workers 5000: must be at most 1024"),
        ({"assignments": {"epochs": "1e300"}}, "epochs 1e+300: must lie between 0 and 1000000"),
        ({"assignments": {"data.max_bytes": "0"}}, "data.max_bytes 0: must be at least 1"),
        ({"assignments": {"model.config.hidden_size": "9" * 30}}, f"model.config.hidden_size {'9' * 30}: is too large"),
        ({"assignments": {"model.config.hidden_size": "abc"}}, "model.config.hidden_size 'abc': give a whole number from 1"),
        ({"assignments": {"model.config.hidden_size": "-3"}}, "model.config.hidden_size -3: give a whole number from 1"),
        ({"assignments": {"model.config.hidden_size": "1.5"}}, "model.config.hidden_size 1.5: give a whole number from 1"),
        ({"assignments": {"model.config.hidden_size": "true"}}, "model.config.hidden_size True: give a whole number from 1"),
        ({"assignments": {"model.config.hidden_size": "0.0"}}, "model.config.hidden_size 0: give a whole number from 1"),
        ({"assignments": {"model.config.tie_word_embeddings": "1"}}, "tie_word_embeddings 1: give true or false"),
        ({"assignments": {"model.config.attention_dropout": "x"}}, "model.config.attention_dropout 'x': give a number"),
        ({"assignments": {"model.config.x": "[1, [1e999]]"}}, "model.config.x inf: is too large a number"),
        ({"assignments": {"learning_rate": "nan"}}, "learning_rate nan: must lie between 0 and 10"),
        ({"assignments": {"clip_norm": "-1"}}, "clip_norm -1.0: must be 0 or more"),
        ({"assignments": {"precision": "int8"}}, "precision 'int8'"),
    ],
)
def test_wrong_values_are_refused_in_one_line_with_field_and_value(edit: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        edit_settings(BASE, **edit)  # type: ignore[arg-type]
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "edit", "message"),
    [
        ({"model_type": "gpt2", "n_positions": 512}, {"seq_len": "513"}, "seq_len 513: beyond the model's 512 positions"),
        ({"model_type": "gpt2"}, {"seq_len": "1025"}, "seq_len 1025: beyond the model's 1024 positions; give at most 1024"),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, {}, "model.config.num_hidden_layers 1000000000: must be at most"),
        (
            {"model_type": "gemma3", "text_config": {"hidden_size": 10**12}},
            {},
            "model.config.text_config.hidden_size 1000000000000: must be at most 16777216",
        ),
        ({"model_type": "gpt2", "n_positions": 512}, {"seq_len": "512"}, ""),
        # Its samples may all be shorter.
        ({"model_type": "gpt2", "n_positions": 512}, {"seq_len": "513", "task": "sft"}, ""),
        ({"model_type": "gpt2", "n_positions": 0}, {"seq_len": "1024"}, ""),
        ({"model_type": ["gpt2"]}, {"seq_len": "1024"}, ""),
        ({"model_type": "t5", "n_positions": 512}, {"seq_len": "1024", "task": "seq2seq"}, ""),
        ({"model_type": "llama", "max_position_embeddings": 512}, {"seq_len": "1024"}, ""),
    ],
)
def test_values_of_a_model_that_is_read_are_refused_as_those_of_a_new_one(
    config: dict[str, object], edit: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    for path in (str(tmp_path), "~"):
        assert refusal_of_edit({"model.path": path, **edit}).startswith(message)
        assert message or not refusal_of_edit({"model.path": path, **edit})


def refusal_of_edit(assignments: dict[str, str]) -> str:
    try:
        edit_settings(BASE, assignments=assignments)
    except SettingsError as error:
        return str(error)
    return ""


def test_longer_samples_than_a_model_is_made_for_are_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"model_type": "llama", "max_position_embeddings": 512}))
    before = edit_settings(BASE, assignments={"model.path": str(tmp_path), "seq_len": "512"})
    assert longer_than_known(before) is None
    longer = replace(before, seq_len=513)
    assert (
        longer_than_known(longer)
        == "T 513 is longer than the 512 tokens that the model is made for: longer samples may fail, or train it badly"
    )
    assert describe_cut(before, longer).endswith(f"nothing repeats; {longer_than_known(longer)}")


def test_a_searched_batch_keeps_the_effective_batch_and_ends_with_a_given_one() -> None:
    searched = edit_settings(BASE, assignments={"auto_batch": "true"})
    assert (searched.auto_batch, searched.effective_batch) == (True, BASE.effective_batch)
    assert edit_settings(searched, assignments={"workers": "2"}).auto_batch
    assert not edit_settings(searched, assignments={"batch": "4", "accumulation": "8"}).auto_batch
    for remedy in ({"preset": "4"}, {"assignments": {"zero.stage": "2"}}):
        assert not edit_settings(searched, **remedy).auto_batch  # type: ignore[arg-type]
    for refused, words in (({"zero.stage": "2"}, "ZeRO-2 cannot change"), ({"device": "cpu"}, "the search is for GPUs")):
        with pytest.raises(SettingsError, match=rf"^--batch auto: .*{words}"):
            edit_settings(searched, assignments={"auto_batch": "true", **refused})


TWO = replace(BASE, batch=8, accumulation=4, world_size=2)


@pytest.mark.parametrize(
    ("assignments", "splits", "shown"),
    [
        ({"batch": "12,4"}, ((12, 4), (4, 4)), "12+4 x 4 = 64"),
        ({"batch": "3, 1", "accumulation": "16"}, ((3, 16), (1, 16)), "3+1 x 16 = 64"),
        ({"batch": "2x24,1x16"}, ((2, 24), (1, 16)), "2 x 24 + 1 x 16 = 64"),
        ({"rank_splits": "2x24,1x16"}, ((2, 24), (1, 16)), "2 x 24 + 1 x 16 = 64"),
        ({"batch": "8,8"}, ((8, 4), (8, 4)), "8 x 4 x 2 = 64"),
    ],
)
def test_each_process_may_have_its_own_batch(
    assignments: dict[str, str], splits: tuple[tuple[int, int], ...], shown: str
) -> None:
    after = edit_settings(TWO, assignments=assignments)
    assert (after.splits, f"{after.split_text} = {after.effective_batch}") == (splits, shown)
    assert (after.batch, after.accumulation) == (max(b for b, _ in splits), max(a for _, a in splits))
    given = {"batch": after.batch_text, "accumulation": str(after.accumulation)}
    assert edit_settings(TWO, assignments=given) == after, "what is shown can be given"
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(after)), Settings) == after


def test_later_edits_of_a_split_with_batches_of_their_own() -> None:
    uneven = edit_settings(TWO, assignments={"batch": "3,1", "accumulation": "16"})
    assert edit_settings(uneven, assignments={"workers": "2"}).splits == uneven.splits
    assert edit_settings(uneven, assignments={"accumulation": "8"}).splits == ((3, 8), (1, 8))
    assert edit_settings(uneven, assignments={"batch": "2"}).splits == ((2, 16), (2, 16))
    assert edit_settings(uneven, assignments={"auto_batch": "true"}).splits == ((2, 16), (2, 16))
    odd = edit_settings(TWO, assignments={"batch": "2,1", "accumulation": "1"})
    with pytest.raises(SettingsError, match=r"^--batch auto: 2 processes do not divide the effective batch 3; give --batch"):
        edit_settings(odd, assignments={"auto_batch": "true"})


@pytest.mark.parametrize(
    ("settings", "assignments", "message"),
    [
        (BASE, {"batch": "3,1"}, "batch 3,1: gives 2 sizes, the run has 1 process; give one for each, or one for all"),
        (TWO, {"batch": "3,2,1"}, "batch 3,2,1: gives 3 sizes, the run has 2 processes; give one for each"),
        (TWO, {"batch": "4,4,4"}, "batch 4,4,4: gives 3 sizes, the run has 2 processes; give one for each"),
        (TWO, {"batch": "2x8"}, "batch 2x8: gives 1 size, the run has 2 processes; give one for each"),
        (
            TWO,
            {"batch": "3x8,1x16", "accumulation": "4"},
            "accumulation 4: 3x8,1x16 gives it already; leave it out, or give 16",
        ),
        (TWO, {"rank_splits": "2x3,1x4", "batch": "8"}, "batch 8: 2x3,1x4 gives it already; leave it out, or give 2"),
        (TWO, {"batch": "3,"}, "batch '3,': must be a whole number, or one size for each process: B,B or BxA,BxA"),
        (BASE, {"batch": "8x"}, "batch '8x': must be a whole number, or one size for each process"),
        (TWO, {"batch": "2x3,1"}, "batch '2x3,1': must be a whole number, or one size for each process"),
        (TWO, {"rank_splits": "7"}, "rank_splits '7': gives no size for each process"),
        (TWO, {"batch": "3,0"}, "batch 0: must be at least 1"),
        (TWO, {"batch": "3,1", "zero.stage": "2"}, "batch 3,1: ZeRO-2 needs the same micro-batch and as many of them on all"),
    ],
)
def test_sizes_that_no_run_can_take_are_refused(settings: Settings, assignments: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        edit_settings(settings, assignments=assignments)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_accumulation_alone_does_not_say_what_processes_with_different_ones_do() -> None:
    shrunk = edit_settings(TWO, assignments={"batch": "8x4,2x16"})
    with pytest.raises(SettingsError, match=r"^accumulation 8: the processes have .* 8 x 4 \+ 2 x 16; give --batch"):
        edit_settings(shrunk, assignments={"accumulation": "8"})


def test_presets_keep_the_share_of_each_process_or_the_effective_batch() -> None:
    uneven = edit_settings(TWO, assignments={"batch": "12,4"})
    low = next(p for p in load_presets().values() if p.max_batch == 1 and not (p.zero or Zero()).stage)
    assert apply_preset(uneven, low).splits == ((1, 48), (1, 16))
    sharded = edit_settings(uneven, preset=next(p.name for p in load_presets().values() if p.zero and p.zero.stage == 2))
    assert (sharded.rank_splits, sharded.effective_batch) == ((), uneven.effective_batch)


def test_set_takes_any_other_setting_with_its_type() -> None:
    edited = edit_settings(BASE, assignments={"learning_rate": "1e-4", "workers": "2", "gradient_checkpointing": "true"})
    assert (edited.learning_rate, edited.workers, edited.gradient_checkpointing) == (1e-4, 2, True)


@pytest.mark.parametrize("name", ["first-run", "pretrain-t5", "sft-lora", "sft-qlora"])
def test_every_key_and_value_that_the_shell_offers_is_taken(name: str) -> None:
    recipe = load_recipes()[name]
    # Parts of LoRA are only for runs that have one.
    before = replace(BASE, recipe=name, model=recipe.model, data=recipe.data, lora=recipe.lora or Lora(r=8, alpha=16))
    found = keys(recipe.model, recipe.data, new_run=True)
    assert len(found) == len(set(found)) > 50
    for key in found:
        for text in (*choices(key), *LISTS.get(key, ())):
            assign(before, {key: text})
        if not key.endswith("."):
            assert "unknown key" not in refusal(before, {key: "no value at all"})
    assert set(keys({}, {}, new_run=False)) < set(found)


def refusal(before: Settings, assignments: dict[str, str]) -> str:
    """Why they are refused; empty if they are not."""
    try:
        assign(before, assignments)
    except SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("zero.stage", ["0", "1", "2", "3"]),
        ("host_level", ["standard", "low", "extreme"]),
        ("compile", ["true", "false"]),
        ("pin_memory", ["true", "false", "null"]),
        ("data.source", ["python-stdlib"]),
        ("batch", []),
        ("lora", []),
        ("lora.nothing", []),
        ("nothing", []),
    ],
)
def test_a_setting_offers_its_values(key: str, values: list[str]) -> None:
    assert choices(key) == values


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("pad_token_id", "0", 0),
        ("eos_token_id", "[1, 2]", [1, 2]),
        ("bad_words_ids", "[[3]]", [[3]]),
        ("hidden_size", "1e3", 1000),
        ("hidden_size", "64.0", 64),
        ("attention_dropout", "0", 0),
    ],
)
def test_a_valid_value_of_the_model_is_taken(key: str, text: str, value: object) -> None:
    known = {"pad_token_id": 258, "eos_token_id": 257, "bad_words_ids": 1, "hidden_size": 64, "attention_dropout": 0.1}
    before = replace(BASE, model={"config": known})
    taken = edit_settings(before, assignments={f"model.config.{key}": text}).model["config"][key]
    assert (taken, type(taken)) == (value, type(value))


def test_max_updates_includes_the_updates_done() -> None:
    edited = edit_settings(
        BASE, assignments={"batch": "4", "accumulation": "4"}, max_updates=50, updates_done=10, samples_seen=320
    )
    assert edited.target_samples == 320 + 40 * 16
    with pytest.raises(SettingsError, match="10 updates are done already"):
        edit_settings(BASE, max_updates=5, updates_done=10, samples_seen=320)


def test_a_split_that_changes_the_effective_batch_names_the_nearest_exact_ones() -> None:
    after = edit_settings(BASE, assignments={"batch": "3"})
    assert (
        describe_split(BASE, after)
        == "effective batch 32 -> 12 (-62.5 %): changes training; to keep 32: 2 x 16, 4 x 8 (batch x accumulation)"
    )
    assert describe_split(BASE, BASE) == "effective batch 32 -> 32: training is unchanged"


def test_several_processes_keep_the_recipes_effective_batch_or_are_refused() -> None:
    two = resolve(RECIPE, preset=load_presets()["standard"], world_size=2)
    assert (two.batch, two.accumulation, two.effective_batch) == (8, 2, 32)
    with pytest.raises(SettingsError, match="3 processes do not divide the effective batch 32"):
        resolve(RECIPE, preset=load_presets()["standard"], world_size=3)


def test_other_gpus_have_one_process_each_and_keep_the_effective_batch() -> None:
    base = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])
    two = edit_settings(base, gpus="0,GPU-1", updates_done=3)
    assert (two.gpus, two.world_size, two.split_text) == ("0,GPU-1", 2, "8 x 2 x 2")
    assert changes(base, two) == ["split 8 x 4 x 1 -> 8 x 2 x 2", "GPUs default -> 0,GPU-1"]
    uneven = edit_settings(two, assignments={"batch": "3,1", "accumulation": "8"})
    assert edit_settings(uneven, gpus=uneven.gpus).split_text == "3+1 x 8"
    assert edit_settings(uneven, gpus="2,3").split_text == "2 x 8 x 2", "other GPUs may not have the same sizes"
    assert edit_settings(uneven, gpus="2", assignments={"accumulation": "4"}).split_text == "2 x 4 x 1"
    assert edit_settings(uneven, gpus="2").split_text == "2 x 16 x 1"
    assert edit_settings(base, gpus="0,1,2", assignments={"batch": "3", "accumulation": "4"}).effective_batch == 36
    assert edit_settings(base, gpus="0,1", assignments={"batch": "6,2"}).split_text == "6+2 x 4"
    with pytest.raises(SettingsError, match=r"^--gpus 3: 3 processes do not divide the effective batch 32; give --batch and"):
        edit_settings(base, gpus="0,1,2")
    with pytest.raises(SettingsError, match="gpus"):
        edit_settings(base, assignments={"gpus": "1"})


def test_the_users_files_extend_and_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    levels = tmp_path / "memtop" / "levels"
    levels.mkdir(parents=True)
    (levels / "low.toml").write_text('key = 6\ntitle = "mine"\ndescription = "d"\nmax_batch = 2\n')
    Path("memtop.toml").write_text('[levels.tiny]\ntitle = "t"\ndescription = "d"\nmax_batch = 1\n')
    found = load_presets()
    assert [name for name in found if found[name].family == "level"] == ["standard", "low", "extreme", "tiny"]
    assert found["low"].title == "mine"


@pytest.mark.usefixtures("homeless")
def test_a_file_is_read_anew_for_each_caller(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[one]\nvalues = [1]\n")
    parse(path)["one"]["values"].append(2)
    assert parse(path) == {"one": {"values": [1]}}
    path.write_text("\ufeff[one]\nvalues = [3]\n", encoding="utf-8")
    assert parse(path) == {"one": {"values": [3]}}, "as an editor on Windows writes it"


def test_a_user_without_a_home_folder_has_the_built_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "standard" in load_presets()
    assert "first-run" in load_recipes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("key = [", "not valid TOML"),
        ("key = " + "[" * 5000 + "]" * 5000, "not valid TOML: its values are nested too deeply"),
        ('key = "x"\n', r"Expected `int \| null`, got `str` - at `\$.key`"),
        ("colour = 1\n", "unknown field `colour`"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    levels = tmp_path / "memtop" / "levels"
    levels.mkdir(parents=True)
    (levels / "mine.toml").write_text('title = "t"\ndescription = "d"\n' + text)
    with pytest.raises(PresetFileError, match=message) as refusal:
        load_presets()
    assert "mine.toml" in str(refusal.value)


def leaves(shape: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """The fields of a struct; those of a nested struct have dotted names."""
    for name, kind in get_type_hints(shape).items():
        nested = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, msgspec.Struct)]
        if nested:
            yield from leaves(nested[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_setting_has_a_row_in_the_table() -> None:
    assert sorted(FIELDS) == sorted(leaves(Settings))
    assert {"zero.stage", "lora.r", "model"} <= set(FIELDS)
    for name, field in FIELDS.items():
        assert field.label, name
        # A running program cannot take changes that make another run or change training.
        assert field.live == "no" or not (field.new_run or field.changes_training), name


@pytest.mark.parametrize(
    ("changes", "live", "live_under_zero", "trains_the_same"),
    [
        ({}, True, True, True),
        ({"batch": 4, "accumulation": 8}, True, False, True),
        ({"batch": 4}, True, False, False),
        ({"workers": 2, "eval_batch": 3}, True, True, True),
        ({"gradient_checkpointing": True}, True, False, True),
        ({"zero": Zero(stage=2, offload_optimizer=True)}, False, False, True),
        ({"seq_len": 64}, False, False, False),
        ({"clip_norm": 2.0}, False, False, False),
        ({"lora": Lora(r=8, alpha=16)}, False, False, False),
        ({"allocator": "expandable_segments:True", "loss_chunk": 64}, False, False, True),
    ],
    ids=str,
)
def test_the_table_decides_what_is_live_and_what_changes_training(
    changes: dict[str, object], live: bool, live_under_zero: bool, trains_the_same: bool
) -> None:
    assert can_change_live(BASE, replace(BASE, **changes)) is live
    sharded = replace(BASE, zero=Zero(stage=1))
    assert can_change_live(sharded, replace(sharded, **changes)) is live_under_zero
    assert training_unchanged(BASE, replace(BASE, **changes)) is trains_the_same


@pytest.mark.parametrize(
    ("after", "speed", "why"),
    [
        ({}, "about the same", "nothing that it depends on"),
        ({"gradient_checkpointing": True}, "slower", "20 to 30 %"),
        ({"batch": 4, "accumulation": 8}, "slower", "5 to 15 %"),
        ({"batch": 16, "accumulation": 2}, "about the same", "little faster, if at all"),
        ({"batch": 16, "gradient_checkpointing": True}, "slower", "computed twice"),
        ({"zero": Zero(stage=2, offload_optimizer=True)}, "slower", "host memory"),
        ({"zero": Zero(stage=3, offload_optimizer=True, offload_parameters=True)}, "much slower", "all weights"),
        ({"zero": Zero(stage=3)}, "about the same", "nothing that it depends on"),
        ({"zero": Zero(stage=3), "world_size": 2}, None, "another processes is not known"),
        ({"seq_len": 64}, "faster", "shorter"),
        ({"seq_len": 64, "gradient_checkpointing": True}, None, "others slower"),
        ({"precision": "bf16"}, None, "another precision is not known"),
        ({"workers": 2}, None, "whether the data still come in time"),
        ({"workers": 2, "gradient_checkpointing": True}, "slower", "computed twice"),
        ({"save_every": 7}, "about the same", "nothing"),
    ],
)
def test_how_fast_other_settings_train_follows_from_what_differs(after: dict[str, object], speed: str | None, why: str) -> None:
    found = pace(BASE, replace(BASE, **after))
    assert found.speed == speed
    assert why in "; ".join(found.basis)


def test_sharded_weights_are_gathered_by_several_processes() -> None:
    two = replace(BASE, world_size=2)
    assert pace(two, replace(two, zero=Zero(stage=3))).speed == "slower"
    assert pace(replace(two, zero=Zero(stage=3)), two).speed == "faster"
    assert pace(two, replace(two, zero=Zero(stage=2))).speed == "about the same"


@pytest.mark.parametrize("recipe", load_recipes())
def test_the_order_of_the_ladder_in_speed_is_that_of_the_guide(recipe: str) -> None:
    """The guide's table: from `fast` for the first rung to `slow` for the last."""
    base = resolve(load_recipes()[recipe], preset=load_presets()["standard"], whole=False)
    found = [outlook(base, load_presets()[name]).pace for name in ("stage2_offload", "minimal")]
    assert [one.speed for one in found] == ["slower", "much slower"]
    assert all(one.basis for one in found)
