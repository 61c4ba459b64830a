"""Commands of training programs, taken apart and changed."""

from __future__ import annotations

import shlex

import pytest

from memtop.presets.program_profiles import ByFlag
from memtop.supervisor.profile.command import last, parsed, shell_text, simple, started_by, with_option, with_words

BATCH = ByFlag(names=("--batch_size", "-b"), shortened=True)


@pytest.mark.parametrize(
    ("command", "script", "module", "own", "processes"),
    [
        ("python train.py --x 1", "train.py", None, "--x 1", 1),
        ("env A=B nice -n 5 python3.11 -u -X dev src/train.py", "src/train.py", None, "", 1),
        ("torchrun --standalone --nproc_per_node=4 train.py -x", "train.py", None, "-x", 4),
        ("torchrun --nproc-per-node 2 --nnodes 3 -m a.train 7", None, "a.train", "7", 6),
        ("torchrun --nproc_per_node gpu train.py", "train.py", None, "", None),
        ("accelerate launch --config_file c.yaml --num_processes 2 train.py --lr 1", "train.py", None, "--lr 1", 2),
        ("deepspeed --num_gpus=8 train.py --deepspeed ds.json", "train.py", None, "--deepspeed ds.json", 8),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py", "train.py", None, "", 2),
        ("python -m package.train --x", None, "package.train", "--x", 1),
        ("uv run train.py --x", "train.py", None, "--x", 1),
    ],
)
def test_the_script_and_its_own_words(
    command: str, script: str | None, module: str | None, own: str, processes: int | None
) -> None:
    found = parsed(shlex.split(command))
    assert found is not None
    assert (found.script, found.module, found.processes) == (script, module, processes)
    assert list(found.arguments) == own.split()


@pytest.mark.parametrize("command", ["python -c 'import train.py'", "bash run.sh", "./a.out --x"])
def test_a_program_without_a_script_of_python(command: str) -> None:
    assert parsed(shlex.split(command)) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python train.py --lr=3e-4 --name 'my run'", ("python", "train.py", "--lr=3e-4", "--name", "my run")),
        ("exec python3 -m package.train", ("python3", "-m", "package.train")),
        ("cd src && python train.py", None),
        ("python train.py | tee log", None),
        ("python train.py > log", None),
        ("python train.py; echo done", None),
        ("python train.py --out $HOME/out", None),
        ("python train.py *.json", None),
        ("python train.py ~/data", None),
        ("WORLD_SIZE=1 python train.py", None),
        ("python train.py\necho done", None),
        ("python train.py 'missing", None),
        ("", None),
    ],
)
def test_a_shell_is_left_out_where_it_does_nothing(text: str, words: tuple[str, ...] | None) -> None:
    assert shell_text(("/bin/bash", "-c", text)) == text
    assert simple(text) == words


def test_what_is_no_text_for_a_shell() -> None:
    for words in (("python", "-c", "1"), ("sh", "-c", "exec $0", "python"), ("sh", "train.sh")):
        assert shell_text(words) is None


def test_a_program_with_words_of_its_own_in_front() -> None:
    command = "env A=B /opt/bin/tune run --nproc_per_node 2 lora --config a.yaml x=1"
    found = started_by(shlex.split(command), "tune run")
    assert found is not None
    assert (found.arguments[-3:], found.processes) == (("--config", "a.yaml", "x=1"), 2)
    assert started_by(["tune", "ls"], "tune run") is None


@pytest.mark.parametrize(
    ("given", "after"),
    [
        ("--batch_size 8", "--batch_size 4"),
        ("--batch_size=8", "--batch_size=4"),
        ("--batch-size 8", "--batch-size 4"),
        ("-b 8", "-b 4"),
        ("-b8", "-b4"),
        ("-b=8", "-b=4"),
        ("--batch 8", "--batch 4"),
        ("--batch_size 2 --x --batch_size 8 --y", "--batch_size 2 --x --batch_size 4 --y"),
        ("--lr 1", "--lr 1 --batch_size 4"),
        ("--batch_size_of_evaluation 3", "--batch_size_of_evaluation 3 --batch_size 4"),
        ("--a -- --batch_size 8", "--a --batch_size 4 -- --batch_size 8"),
    ],
)
def test_an_option_gets_its_value_in_the_spelling_that_is_there(given: str, after: str) -> None:
    command = parsed(["python", "t.py", *given.split()])
    assert command is not None
    assert " ".join(with_option(command, BATCH, "4").arguments) == after
    if "8" in given and "--a" not in given:
        found = last(command.words, BATCH, command.begins)
        assert found is not None
        assert found.value == "8"


def test_what_looks_like_a_shortened_option_is_not_one_if_the_script_has_it() -> None:
    words = ["t.py", "--batch", "3"]
    assert last(words, BATCH, 1) is not None
    assert last(words, BATCH, 1, literals="parser.add_argument('--batch')") is None


def test_words_with_dots_and_with_plus_signs() -> None:
    way = ByFlag(names=("optimizer.params.batch",))
    command = parsed(["python", "t.py", "+optimizer.params.batch=2"])
    assert command is not None
    assert with_option(command, way, "1").arguments == ("+optimizer.params.batch=1",)
    command = parsed(["python", "t.py"])
    assert command is not None
    assert with_option(command, way, "1").arguments == ("optimizer.params.batch=1",)


def test_an_option_behind_a_file_that_overrides_it_comes_last() -> None:
    command = parsed(["python", "t.py", "--batch_size=8", "config.py"])
    assert command is not None
    way = ByFlag(names=("--batch_size",), form="equals")
    assert with_option(command, way, "4", after=3).arguments == ("--batch_size=8", "config.py", "--batch_size=4")


@pytest.mark.parametrize(
    ("given", "words", "after"),
    [
        ("", ("--init_from=resume",), "--init_from=resume"),
        ("--init_from=scratch -x", ("--init_from=resume",), "--init_from=resume -x"),
        ("--resume old", ("--resume", "/new"), "--resume /new"),
        ("-x", ("--resume", "/new"), "-x --resume /new"),
        ("-x", ("--resume",), "-x --resume"),
        ("--resume", ("--resume",), "--resume"),
        ("resume=False", ("resume=True",), "resume=True"),
    ],
)
def test_the_words_that_make_a_program_resume(given: str, words: tuple[str, ...], after: str) -> None:
    command = parsed(["python", "t.py", *given.split()])
    assert command is not None
    assert " ".join(with_words(command, words).arguments) == after
