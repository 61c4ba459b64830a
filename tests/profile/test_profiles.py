"""The shipped profiles, profiles of users, and which one fits a program."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import msgspec
import pytest
import torch

from memtop.presets import PresetFileError
from memtop.presets.program_profiles import Position, ProgramProfile, load_profiles
from memtop.supervisor.profile.detection import propose
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.record.profile_checkpoints import Place, newest_of, place_of

DOCS = Path(__file__).resolve().parents[2] / "docs/profiles.md"
GLOBALS = "gradient_accumulation_steps = 4\ninit_from = 'scratch'\nexec(open('configurator.py').read())\n"
ACCELERATE = (
    "from accelerate import Accelerator\nparser.add_argument('--resume_from_checkpoint')\n"
    "accelerator.save_state(f'step_{n}')\naccelerator.load_state(path)\n"
)
SCRIPTS = {
    "nanogpt": GLOBALS,
    "accelerate": ACCELERATE,
    "minimind": "lm_checkpoint(a)\nadd_argument('--from_resume')\nadd_argument('--accumulation_steps')\n",
    "lightning": "import lightning as L\nadd_argument('--ckpt_path')\n",
    "deepspeed": "import deepspeed\ndeepspeed.initialize(a)\nengine.load_checkpoint(d)\nengine.save_checkpoint(d)\n",
}


def proposed(folder: Path, *command: str) -> tuple[str, str] | None:
    found = propose(load_profiles().values(), command, str(folder))
    return None if found is None else (found.profile.name, found.why)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    "launcher", ["python", "env A=B python -u", "torchrun --nproc_per_node 2", "accelerate launch", "deepspeed"]
)
def test_a_script_is_recognised_whatever_starts_it(tmp_path: Path, name: str, launcher: str) -> None:
    (tmp_path / "train_it.py").write_text(SCRIPTS[name])
    found = proposed(tmp_path, *launcher.split(), "train_it.py", "--x")
    assert found is not None
    assert found[0] == name
    assert found[1].startswith("train_it.py ")


def test_the_reason_names_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GLOBALS)
    assert proposed(tmp_path, "python", "train.py") == (
        "nanogpt",
        "train.py contains configurator.py, gradient_accumulation_steps and init_from",
    )


@pytest.mark.parametrize(
    "text",
    ["print(1)\n", "from transformers import Trainer\n" + ACCELERATE, "import accelerate\n", "this is no Python: save_state("],
)
def test_other_scripts_have_no_profile(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").write_text(text)
    assert proposed(tmp_path, "python", "train.py") is None


def test_programs_without_a_script_have_no_profile(tmp_path: Path) -> None:
    assert proposed(tmp_path, "bash", "run.sh") is None
    assert proposed(tmp_path, "python", "missing.py") is None


def test_a_recipe_of_torchtune_is_recognised_by_its_command(tmp_path: Path) -> None:
    found = proposed(tmp_path, "tune", "run", "lora", "--config", "a.yaml")
    assert found == ("torchtune", "`tune run` starts it")


def test_the_files_beside_a_script_count(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import fire\nfrom model.trainer import ChatTrainer\n")
    assert proposed(tmp_path, "python", "train.py", "train") is None
    (tmp_path / "config.py").write_text("class TrainConfig:\n    batch_size_per_gpu = 1\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/trainer.py").write_text("def train(is_keep_training): ...\n")
    found = proposed(tmp_path, "python", "train.py", "train")
    assert found is not None
    assert found[0] == "chatlm"


def test_a_checkpoint_of_deepspeed_is_complete_as_soon_as_it_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "ck/global_step20"
    folder.mkdir(parents=True)
    grip = Grip(profile=load_profiles()["deepspeed"], cwd=str(tmp_path), values={"folder": "ck"}, batch=4, accumulation=4)
    place = place_of(grip)
    assert place is not None
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        with zipfile.ZipFile(folder / name, "w") as file:
            file.writestr("archive/data.pkl", b"")
        found = newest_of(place)
        assert found is not None
        assert (found.complete, found.updates) == (True, 20)
    with (folder / name).open("r+b") as file:
        file.truncate(10)
    found = newest_of(place)
    assert found is not None
    assert not found.complete


def test_the_example_of_the_documentation_is_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.search(r'```toml\n(title = "our.*?)```', DOCS.read_text(), re.DOTALL)
    assert example is not None
    folder = tmp_path / "memtop/programs"
    folder.mkdir(parents=True)
    (folder / "ours.toml").write_text(example[1])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    profile = load_profiles()["ours"]
    assert msgspec.convert(msgspec.to_builtins(profile), ProgramProfile) == profile


def test_the_step_in_a_name_is_read_as_the_documentation_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.search(r"```toml\n(\[checkpoint\]\npaths = .*?)```", DOCS.read_text(), re.DOTALL)
    assert example is not None
    (tmp_path / "memtop.toml").write_text(
        'programs.ours.title = "ours"\nprograms.ours.detect = { texts = ["x"] }\n'
        'programs.ours.resume = { how = "automatic" }\nprograms.ours.values.out_dir = { default = "out" }\n'
        + example[1].replace("[checkpoint]", "[programs.ours.checkpoint]")
    )
    monkeypatch.chdir(tmp_path)
    rule = load_profiles()["ours"].checkpoint
    assert rule is not None
    assert rule.step is not None
    (tmp_path / "out").mkdir()
    torch.save({"weights": torch.ones(3)}, tmp_path / "out/epoch2-step1200.pt")
    place = Place(
        paths=(str(tmp_path / "out/epoch*-step*.pt"),), rule=rule, position=Position(counts="micro_batches", per_epoch=True)
    )
    found = newest_of(place)
    assert found is not None
    assert (found.complete, found.step, found.epoch) == (True, 1200, 2)
    torch.save({"weights": torch.ones(3)}, tmp_path / "out/epoch2-steplast.pt")
    os.utime(tmp_path / "out/epoch2-steplast.pt", (4e9, 4e9))
    found = newest_of(place)
    assert found is not None
    assert (found.complete, found.step) == (True, None)


def test_a_profile_of_the_project_replaces_one_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = '[programs.nanogpt]\ntitle = "ours"\nresume = { how = "never", why = "it cannot" }\ndetect = { texts = ["x"] }\n'
    Path("memtop.toml").write_text(table)
    assert load_profiles()["nanogpt"].title == "ours"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("colour = 1\n", "Object contains unknown field `colour`"),
        ("[batch]\nways = [{ by = 'flags', names = ['-b'] }]\n", "Invalid value 'flags' - at `$.batch.ways["),
        ("[position]\ncounts = 'steps'\n", "Invalid enum value 'steps' - at `$.position.counts`"),
        (
            "[checkpoint]\npaths = ['{nowhere}/a']\n",
            "checkpoint.paths: {nowhere} is neither a knob nor in [values]; there are ",
        ),
        ("[output]\nstep = 'a(?P<loss>b)'\n", "output.step: 'a(?P<loss>b)' has no group (?P<step>...)"),
        ("[output]\nstep = '('\n", "output.step: '(' is not a regular expression"),
        ("[stop]\nasks = 'save?'\n", "stop.answer: say what is typed when the program asks"),
    ],
)
def test_a_mistake_in_a_profile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, says: str) -> None:
    folder = tmp_path / "memtop/programs"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    text = 'title = "a"\nresume = { how = "never", why = "it cannot" }\ndetect = { texts = ["x"] }\n'
    (folder / "mine.toml").write_text(text + change)
    with pytest.raises(PresetFileError) as raised:
        load_profiles()
    assert str(raised.value).startswith(f"{folder / 'mine.toml'}: {says}")


@pytest.mark.parametrize(
    ("resume", "says"),
    [
        ('how = "flag"', "resume.words: give the words that make it resume"),
        ('how = "never"', "resume.why: say in words why it cannot resume its position"),
        ('how = "automatic"', "checkpoint: say where the program saves, since it resumes"),
    ],
)
def test_how_it_resumes_must_be_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("memtop.toml").write_text(f'[programs.a]\ntitle = "a"\ndetect.texts = ["x"]\nresume = {{ {resume} }}\n')
    with pytest.raises(PresetFileError) as raised:
        load_profiles()
    assert str(raised.value).startswith(f"memtop.toml [programs.a]: {says}")
