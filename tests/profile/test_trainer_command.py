"""What a command with Hugging Face's Trainer would train, for `memtop plan -- COMMAND`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memtop.supervisor.errors import UsageError
from memtop.supervisor.profile.trainer_command import TrainerCommand, trainer_command

CLM = "run_clm.py --model_name_or_path gpt2 --block_size 512"


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path) -> None:
    for name in ("run_clm.py", "sft.py", "train.py"):
        (tmp_path / name).touch()


def read(text: str, cwd: Path) -> TrainerCommand:
    return trainer_command(tuple(text.split()), str(cwd))


def test_the_options_of_a_script_and_its_launcher(tmp_path: Path) -> None:
    found = read(f"torchrun --nproc_per_node 2 {CLM} --bf16 --optim=adafactor --gradient_checkpointing False", tmp_path)
    assert (found.model, found.method, found.processes) == ("gpt2", "full", 2)
    assert found.ddp
    assert found.assumed[-1] == "DistributedDataParallel sums the gradients, with buckets as large as all of them"
    assert not read(f"python {CLM}", tmp_path).ddp
    assert found.values == {
        "batch": "8",
        "accumulation": "1",
        "seq_len": "512",
        "gradient_checkpointing": "false",
        "loss_chunk": "0",
        "precision": "bf16",
        "optimizer": "adafactor",
    }
    assert "a batch of 8, the default of TrainingArguments" in found.assumed
    # The last one counts; a folder of the working directory gets its whole path.
    (tmp_path / "gpt2").mkdir()
    assert read(f"python {CLM} --block_size 64", tmp_path).values["seq_len"] == "64"
    assert read(f"python {CLM}", tmp_path).model == str(tmp_path / "gpt2")


def test_a_model_from_scratch_is_that_of_its_configuration(tmp_path: Path) -> None:
    assert read("python run_clm.py --config_name c --block_size 8", tmp_path).model == "c"
    assert read(f"python {CLM} --config_name c", tmp_path).model == "gpt2"


def test_an_option_that_is_misspelt_is_named(tmp_path: Path) -> None:
    options = "--per_device_train_batch_sze 4 --per_device_eval_batch_size 2 --gradient_accumulation_steps 2"
    assumed = read(f"python {CLM} {options} --gradient_checkpointing_kwargs {{}} --max_lenght 9", tmp_path).assumed
    assert [words for words in assumed if "did you mean" in words] == [
        "memtop does not read --per_device_train_batch_sze (did you mean --per_device_train_batch_size?)",
        "memtop does not read --max_lenght (did you mean --max_length?)",
    ]


ADAPTERS = {"lora.r": "16", "lora.alpha": "32", "lora.dropout": "0.1", "lora.targets": "q_proj,v_proj"}


def test_adapters_on_a_base_in_4_bits(tmp_path: Path) -> None:
    options = "--use_peft --load_in_4bit --lora_r 16 --lora_alpha 32 --lora_dropout 0.1 --lora_target_modules q_proj v_proj"
    found = read(f"sft.py --model_name_or_path m --max_length 99 --bf16 True {options}", tmp_path)
    assert found.method == "qlora"
    assert {name: found.values[name] for name in ADAPTERS} == ADAPTERS
    assert found.assumed[2:] == (
        "the program uses Hugging Face's Trainer, which its script does not name",
        "a batch of 8, the default of TrainingArguments",
        "no gradient checkpointing, the default of TrainingArguments",
        "the base is in bf16",
        "the norms of the base are in fp32, as peft prepares a base in 4 bits",
    )
    assert (
        read("sft.py --model_name_or_path m --max_length 9 --fp16 --use_peft --lora_r 4 --dtype float16", tmp_path).method
        == "lora"
    )


def test_a_script_that_does_not_name_the_trainer_is_an_assumption(tmp_path: Path) -> None:
    script = tmp_path / "run_clm.py"
    words = "the program uses Hugging Face's Trainer, which its script does not name"
    script.write_text("import torch\n")
    assert words in read(f"python {CLM}", tmp_path).assumed
    script.write_text("from transformers import Trainer\n")
    assert words not in read(f"python {CLM}", tmp_path).assumed
    assert words not in read("trl sft --model_name_or_path m", tmp_path).assumed


@pytest.mark.parametrize("start", ["trl sft", "python -m trl.scripts.sft", "own.py"])
def test_the_defaults_of_trl(start: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from trl import SFTConfig, SFTTrainer")
    given = "--model_name_or_path m --use_peft --load_in_4bit"
    found = read(f"{start} {given} --dtype bfloat16", tmp_path)
    chosen = ("seq_len", "gradient_checkpointing", "precision", "bf16_residual", "lora.r", "lora.alpha", "lora.dropout")
    assert [found.values[name] for name in chosen] == ["1024", "true", "bf16", "true", "16", "32", "0.05"]
    assert "gradient checkpointing, the default of TRL" in found.assumed
    other = read(f"{start} {given} --dtype float16 --fp16 --gradient_checkpointing False", tmp_path)
    assert (other.values["gradient_checkpointing"], other.values["precision"]) == ("false", "fp16")
    assert (
        read(f"{start} {given} --dtype float16 --no_gradient_checkpointing", tmp_path).values["gradient_checkpointing"]
        == "false"
    )
    if start != "own.py":
        with pytest.raises(UsageError, match="TRL keeps the base in fp32 without --dtype bfloat16"):
            read(f"{start} {given}", tmp_path)


def test_the_defaults_of_llama_factory(tmp_path: Path) -> None:
    given = "--model_name_or_path m --bf16 --quantization_bit 4"
    found = read(f"llamafactory-cli train {given}", tmp_path)
    chosen = ("seq_len", "gradient_checkpointing", "bf16_residual", "lora.r", "lora.alpha", "lora.dropout")
    assert [found.values[name] for name in chosen] == ["2048", "true", "true", "8", "16", "0"]
    assert found.values["lora.targets"] == "all-linear"
    (tmp_path / "a.yaml").write_text("model_name_or_path: m\nbf16: true\nper_device_train_batch_size: 1\n")
    assert read("llamafactory-cli train a.yaml per_device_train_batch_size=3", tmp_path).values["batch"] == "3"
    other = read(f"train.py {given} --finetuning_type lora --disable_gradient_checkpointing --upcast_layernorm", tmp_path)
    assert other.values["gradient_checkpointing"] == "false"
    assert "bf16_residual" not in other.values
    assert read(f"train.py {given} --finetuning_type full --disable_gradient_checkpointing false", tmp_path).method == "qlora"


@pytest.mark.parametrize("start", ["llamafactory-cli train {}", "train.py {}", "sft.py --config {}"])
@pytest.mark.parametrize("kind", ["json", "yaml"])
def test_the_options_of_a_file(start: str, kind: str, tmp_path: Path) -> None:
    options = {
        "model_name_or_path": "m",
        "finetuning_type": "lora",
        "lora_rank": 16,
        "lora_alpha": 32,
        "lora_dropout": "0.1",
        "lora_target": "q_proj,v_proj",
        "quantization_bit": 4,
        "cutoff_len": 2048,
        "per_device_train_batch_size": 1,
        "bf16": True,
        "gradient_checkpointing": True,
    }
    lines = (f"{name}: {json.dumps(value)}" for name, value in options.items())
    (tmp_path / f"a.{kind}").write_text(json.dumps(options) if kind == "json" else "\n".join(lines))
    found = read(start.format(f"a.{kind}") + " --per_device_train_batch_size 3", tmp_path)
    assert found.method == "qlora"
    assert {name: found.values[name] for name in ADAPTERS} == ADAPTERS
    # The command's own options come first.
    assert (found.values["batch"], found.values["seq_len"]) == ("3", "2048")
    assert found.values["gradient_checkpointing"] == "true"
    (tmp_path / f"a.{kind}").write_text(json.dumps({**options, "lora_target": ["q_proj"]}))
    if kind == "json":
        with pytest.raises(UsageError, match="is a list in the file"):
            read(start.format("a.json"), tmp_path)


def test_the_strategy_of_deepspeed(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    found = read(f"deepspeed --num_gpus 4 {CLM} --deepspeed ds.json --bf16", tmp_path)
    assert found.processes == 4
    assert {name: text for name, text in found.values.items() if name.startswith("zero.")} == {
        "zero.stage": "3",
        "zero.offload_optimizer": "true",
        "zero.offload_parameters": "false",
    }
    for text, words in (
        ("[]", "is no configuration"),
        ("{", "is no configuration"),
        ('{"zero_optimization": 3}', "is no config"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UsageError, match=f"--deepspeed bad.json: {words}"):
            read(f"python {CLM} --deepspeed bad.json", tmp_path)
    zero["offload_param"] = {"device": "nvme"}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    with pytest.raises(UsageError, match=r"--deepspeed ds\.json: the memory"):
        read(f"python {CLM} --deepspeed ds.json", tmp_path)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("make train", "-- COMMAND: memtop can read only a Python script"),
        ("python /tmp", "leave out the command and give --model NAME.PATH --method full.lora.qlora"),
        ("python -c x", "-- COMMAND: memtop can read only a Python script"),
        ("python -m run_clm --block_size 8", "it names no model"),
        ("python run_clm.py --block_size 8", "it names no model"),
        ("python nope.py --model_name_or_path m", "COMMAND python nope.py: no such file; looked for "),
        ("python run_clm.py --model_name_or_path m", "does not say how long a sample is"),
        (f"python {CLM} --fsdp full_shard", "--fsdp full_shard: the memory of a program with it"),
        (f"python {CLM} --torch_compile", "--torch_compile true: the memory"),
        (f"python {CLM} --optim galore_adamw", "--optim galore_adamw: the memory"),
        (f"python {CLM} --torch_dtype bfloat16 --bf16", "--torch_dtype bfloat16: the memory"),
        (f"python {CLM} --finetuning_type freeze", "--finetuning_type freeze: the memory"),
        (f"python {CLM} --quantization_bit 8", "--quantization_bit 8: the memory"),
        (f"python {CLM} --use_peft --lora_r 8", "the memory of lora without --bf16 or --fp16"),
        (f"python {CLM} --use_peft --bf16", "does not say the rank"),
        (f"python {CLM} --per_device_train_batch_size auto", "must be a whole number above 0"),
        ("python run_clm.py --model_name_or_path m --max_length 0", "--max_length 0: must be"),
        (f"accelerate launch --use_fsdp {CLM}", "--use_fsdp true: the memory"),
        (f"accelerate launch --use_deepspeed --zero_stage 3 {CLM}", "--use_deepspeed true: the memory"),
        (f"torchrun --nproc_per_node gpu {CLM}", "does not say how many processes"),
        (f"python {CLM} --deepspeed gone.json", "--deepspeed gone.json: cannot be read: No such file"),
    ],
)
def test_what_cannot_be_foreseen_is_named(command: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read(command, tmp_path)


def test_the_file_of_accelerate(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    assert read(f"accelerate launch --config_file a.yaml {CLM}", tmp_path).processes == 4
    assert read(f"accelerate launch --config_file a.yaml --num_processes 2 {CLM}", tmp_path).processes == 2
    (tmp_path / "a.yaml").write_text("distributed_type: FSDP\nnum_processes: 4\n")
    with pytest.raises(UsageError, match=r"--config_file a\.yaml: the memory of a program with distributed_type FSDP"):
        read(f"accelerate launch --config_file=a.yaml {CLM}", tmp_path)
    with pytest.raises(UsageError, match=r"--config_file b\.yaml: cannot be read"):
        read(f"accelerate launch --config_file b.yaml {CLM}", tmp_path)


def test_what_a_command_does_not_say_can_be_given(tmp_path: Path) -> None:
    words = ("torchrun", "--nproc_per_node", "gpu", "train.py")
    found = trainer_command(words, str(tmp_path), model="m", seq_len=128, processes=3)
    assert (found.model, found.values["seq_len"], found.processes) == ("m", "128", 3)
    assert "a batch of 8, the default of TrainingArguments" in found.assumed
    found = trainer_command(words, str(tmp_path), model="m", batch=4, seq_len=128, processes=3)
    assert found.values["batch"] == "4"
    assert not any("batch" in words for words in found.assumed), "what was given is not assumed"


def test_for_a_missing_script_only_scripts_are_proposed(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(UsageError) as caught:
            trainer_command(("python", "trian.py"), str(folder), model="m", seq_len=8)
        return str(caught.value)

    assert refused(tmp_path).endswith("/trian.py; did you mean train.py?")
    folder = tmp_path / "others"
    (folder / "trains.py").mkdir(parents=True)
    for name in (".train.py", "train.pyc"):
        (folder / name).touch()
    assert refused(folder).endswith("/trian.py")
