"""Shell completion, as a shell asks for it, and in a real bash."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import Runs
from tests.terminal import Terminal
from tests.tui.test_runs import NOW, stored


def completed(runs: Runs, *words: str, shell: str = "bash") -> list[str]:
    """What memtop answers when the cursor stands in the last word."""
    asked = {"COMP_WORDS": " ".join(("memtop", *words)), "COMP_CWORD": str(len(words)), "_MEMTOP_COMPLETE": f"{shell}_complete"}
    done = runs.memtop(env=runs.environment | asked)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("tra",), ["plain,train"]),
        (("--lang", "zh", "tra"), ["plain,train"]),
        (("train", "--seq"), ["plain,--seq-len"]),
        (("train", "sft"), ["plain,sft-lora", "plain,sft-qlora"]),
        (("restart", "a", "--preset", "stage"), ["plain,stage2_offload", "plain,stage3"]),
        (("presets", "mini"), ["plain,minimal"]),
        (("train", "--", "python", "tr"), ["file,tr"]),
        (("diagnose", "lo"), ["file,lo"]),
        (("nothing", "x"), []),
    ],
)
def test_commands_options_recipes_presets_and_files(runs: Runs, words: tuple[str, ...], found: list[str]) -> None:
    assert completed(runs, *words) == found


def test_runs_are_completed_with_their_states_the_newest_first(runs: Runs, tmp_path: Path) -> None:
    stored(runs.path, "old", NOW)
    stored(runs.path, "new", NOW + 5)
    stored(tmp_path / "others", "other", NOW)
    assert completed(runs, "show", "") == ["plain,new", "plain,old", "plain,latest"]
    assert completed(runs, "stop", "o") == ["plain,old"]
    assert completed(runs, "show", "", shell="zsh")[:3] == ["plain", "new", "finished"]
    assert completed(runs, "show", "--runs-dir", str(tmp_path / "others"), "") == ["plain,other", "plain,latest"]
    (runs.path / "new" / "run.json").write_text("{")
    assert "unreadable" in completed(runs, "show", "new", shell="zsh")


def test_what_cannot_be_read_completes_to_nothing_and_creates_nothing(runs: Runs, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert completed(runs, "show", "--runs-dir", str(nowhere), "x") == ["dir,x"]
    assert not nowhere.exists()
    broken = tmp_path / "config" / "memtop"
    (broken / "recipes").mkdir(parents=True)
    (broken / "recipes" / "mine.toml").write_text("name = 3 =")
    changed = runs.environment | {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    asked = {"COMP_WORDS": "memtop train s", "COMP_CWORD": "2", "_MEMTOP_COMPLETE": "bash_complete"}
    done = runs.memtop(env=changed | asked)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(runs: Runs, shell: str) -> None:
    script = runs.memtop(env=runs.environment | {"_MEMTOP_COMPLETE": f"{shell}_source"}).stdout
    assert f"_MEMTOP_COMPLETE={shell}_complete" in script


def test_an_unknown_shell_is_said(runs: Runs) -> None:
    done = runs.memtop(env=runs.environment | {"_MEMTOP_COMPLETE": "tcsh_source"}, status=2)
    assert done.stderr == "memtop: _MEMTOP_COMPLETE=tcsh_source: unknown; give bash_source, zsh_source or fish_source\n"


def test_a_real_bash_completes_the_name_of_a_run(runs: Runs, tmp_path: Path) -> None:
    stored(runs.path, "qwen-sft", NOW)
    program = tmp_path / "bin" / "memtop"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memtop "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    bash = Terminal(
        ["bash", "--norc", "--noprofile", "-i"],
        columns=100,
        rows=20,
        cwd=str(runs.root),
        environment=runs.environment | {"PATH": path, "PS1": "$ "},
    )
    try:
        bash.wait_for("$ ")
        bash.keys('eval "$(_MEMTOP_COMPLETE=bash_source memtop)" && echo re""ady\r')
        bash.wait_for("ready")
        bash.keys("memtop sho\t")
        bash.wait_for("memtop show ")
        bash.keys("qw\t")
        bash.wait_for("memtop show qwen-sft")
    finally:
        bash.close()
