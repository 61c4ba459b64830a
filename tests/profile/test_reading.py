"""A program's settings, read from its command and files, and the command with other settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memtop.presets.program_profiles import (
    ByArgparse,
    ByFile,
    ByFlag,
    ByPython,
    ByScript,
    CheckpointRule,
    Detect,
    KnobRule,
    ProgramProfile,
    Resume,
    Setting,
    load_profiles,
)
from memtop.supervisor.errors import UsageError
from memtop.supervisor.profile.detection import starter_of
from memtop.supervisor.profile.reading import Changed, ProgramFiles, changed, read
from memtop.supervisor.program import Knob


def profile(**values: object) -> ProgramProfile:
    first = {
        "batch": KnobRule(ways=(ByFlag(names=("--batch",)),)),
        "accumulation": KnobRule(ways=(ByFlag(names=("--accum",)),)),
        "resume": Resume(how="flag", words=("--resume", "{checkpoint}")),
        "checkpoint": CheckpointRule(paths=("out",)),
    }
    return ProgramProfile(name="a", title="a", detect=Detect(texts=("x",)), **{**first, **values})  # type: ignore[arg-type]


def change(folder: Path, profile: ProgramProfile, command: str, checkpoint: str | None = None, **knobs: int) -> Changed:
    words = tuple(command.split())
    program = ProgramFiles(words, str(folder), starter_of(profile, words))
    return changed(profile, program, knobs, Path("/new"), checkpoint=checkpoint)


def test_each_way_has_its_value_and_its_source(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("add_argument('--accum', type=int, default=2 * 3)\nlength = 512\nCONST = 4\n")
    (tmp_path / "c.yaml").write_text("data:\n  batch: 7\n")
    own = profile(
        batch=KnobRule(ways=(ByFile(flags=("--config",), kind="yaml", key="data.batch"),)),
        accumulation=KnobRule(ways=(ByFlag(names=("--accum",)), ByArgparse(names=("--accum",)))),
        seq_len=KnobRule(ways=(ByScript(name="length"),)),
        values={"out": Setting(default="here")},
    )
    words = ("python", "train.py", "--config", "c.yaml")
    found = read(own, ProgramFiles(words, str(tmp_path)))
    assert found.knobs.batch == Knob(value=7, name="data.batch", source="c.yaml")
    assert found.knobs.accumulation == Knob(value=6, name="accum", source="train.py")
    assert found.knobs.seq_len == Knob(value=512, name="length", source="train.py")
    assert found.values["out"] == "here"
    why = "memtop changes options of the command and configuration files, and this program takes it from neither"
    assert found.fixed == {"seq_len": f"{why}: train.py has length = 512 in its code"}
    given = read(own, ProgramFiles((*words, "--accum=9"), str(tmp_path)))
    assert given.knobs.accumulation == Knob(value=9, name="accum", source="command")


def test_a_copy_of_a_file_takes_its_place_in_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}'
    )
    command = "deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config=ds.json --x"
    own = load_profiles()["deepspeed"]
    made = change(tmp_path, own, command, batch=2, accumulation=8)
    assert made.words[4:] == ("--deepspeed", "--deepspeed_config=/new/ds.json", "--x")
    assert json.loads(made.files["ds.json"]) == {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
    }
    assert json.loads((tmp_path / "ds.json").read_text())["train_batch_size"] == 16


def test_a_module_is_imported_from_the_copy(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").touch()
    (tmp_path / "src/config.py").write_text("class Train:\n    batch: int = 8  # of one\n")
    own = profile(batch=KnobRule(ways=(ByPython(file="{script}/config.py", name="Train.batch", imported=True),)))
    made = change(tmp_path, own, "python src/train.py", batch=2)
    assert made.words == ("python", "src/train.py")
    assert made.files == {"config.py": "class Train:\n    batch: int = 2  # of one\n"}
    assert made.imports == {str(tmp_path / "src/config.py"): "/new/config.py"}


def test_a_python_file_that_the_command_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "small.py").write_text("batch = 8\n")
    own = profile(batch=KnobRule(ways=(ByPython(file="*.py", name="batch"),)))
    made = change(tmp_path, own, "python train.py small.py --x", batch=2)
    assert (made.words, made.files) == (("python", "train.py", "/new/small.py", "--x"), {"small.py": "batch = 2\n"})


def test_two_files_of_one_name_have_two_copies(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "c.json").write_text('{"n": 1}')
    own = profile(
        batch=KnobRule(ways=(ByFile(flags=("--a",), kind="json", key="n"),)),
        accumulation=KnobRule(ways=(ByFile(flags=("--b",), kind="json", key="n"),)),
    )
    made = change(tmp_path, own, "python train.py --a a/c.json --b b/c.json", batch=2, accumulation=3)
    assert made.words[2:] == ("--a", "/new/c.json", "--b", "/new/c-1.json")
    assert [json.loads(text)["n"] for text in made.files.values()] == [2, 3]


def test_the_words_that_resume_are_added_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    made = change(tmp_path, profile(), "python train.py --batch 8", "/run/step_5", batch=8)
    assert made.words == ("python", "train.py", "--batch", "8", "--resume", "/run/step_5")
    tune = load_profiles()["torchtune"]
    (tmp_path / "c.yaml").write_text("batch_size: 4\noutput_dir: out\n")
    made = change(tmp_path, tune, "tune run lora --config c.yaml batch_size=2", "/x", batch=1, accumulation=2)
    added = ("batch_size=1", "gradient_accumulation_steps=2", "resume_from_checkpoint=True")
    assert made.words == ("tune", "run", "lora", "--config", "c.yaml", *added)


def test_an_option_is_only_added_if_the_script_has_it(tmp_path: Path) -> None:
    own = profile(batch=KnobRule(ways=(ByFlag(names=("--batch", "--train_batch"), declared=True),)))
    (tmp_path / "train.py").write_text("p.add_argument('--train_batch')\n")
    assert change(tmp_path, own, "python train.py", batch=2).words[2:] == ("--train_batch", "2")
    (tmp_path / "train.py").write_text("p.add_argument('--other')\n")
    with pytest.raises(UsageError, match="batch: memtop changes options of the command and configuration files"):
        change(tmp_path, own, "python train.py", batch=2)


@pytest.mark.parametrize(
    ("command", "knobs", "says"),
    [
        ("python train.py", {"seq_len": 4}, "seq_len: the profile a has no such setting"),
        (
            "torchrun --nproc_per_node 4 train.py",
            {"accumulation": 6},
            "accumulation 6: the program divides it by its 4 processes",
        ),
        ("bash run.sh", {"batch": 4}, "its command has no Python script that memtop can find"),
    ],
)
def test_what_is_refused(tmp_path: Path, command: str, knobs: dict[str, int], says: str) -> None:
    (tmp_path / "train.py").touch()
    own = profile(accumulation=KnobRule(of="all", ways=(ByFlag(names=("--accum",)),)))
    with pytest.raises(UsageError) as raised:
        change(tmp_path, own, command, **knobs)
    assert str(raised.value).startswith(says)
