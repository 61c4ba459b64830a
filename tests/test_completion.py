"""Shell completion, as a shell asks for it, and in real shells."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from contextlib import closing
from pathlib import Path
from subprocess import PIPE

import pytest
from msgspec.structs import replace

from memtop.cli.shells import rejoined
from memtop.supervisor.program import Knob, Knobs, Program
from memtop.supervisor.run.record.configurations import ConfigurationRecord, ConfigurationStart
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.units import GIB
from memtop.supervisor.wire import Configuration
from tests import forking
from tests.conftest import Runs
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)
from tests.terminal import Terminal
from tests.tui.support import SETTINGS
from tests.tui.test_runs import NOW, stored

PATIENT = """
import sys
from memtop.__main__ import main
from memtop.cli import completion

completion._GPU_SECONDS = 120.0
sys.exit(main())
"""
"""memtop that waits longer for the driver: the machine may stand still meanwhile."""


def completed(runs: Runs, *words: str, shell: str = "bash") -> list[str]:
    """What memtop answers when the cursor stands in the last word."""
    asked = {"COMP_WORDS": " ".join(("memtop", *words)), "COMP_CWORD": str(len(words)), "_MEMTOP_COMPLETE": f"{shell}_complete"}
    command, environment = [sys.executable, "-c", PATIENT], runs.environment | asked
    with forking.Program(command, cwd=runs.root, env=environment, text=True, stdout=PIPE, stderr=PIPE) as process:
        out, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
    return out.splitlines()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("tra",), ["plain,train"]),
        (("--lang", "zh", "tra"), ["plain,train"]),
        (("--lang", ""), ["plain,en", "plain,zh"]),
        (("--lang", "=", "z"), ["plain,zh"]),
        (("train", "--lang", "z"), ["plain,zh"]),
        (("train", "--lang", "zh", "sft"), ["plain,sft-lora", "plain,sft-qlora"]),
        (("train", "--lang", "xx", "--seq"), ["plain,--seq-len"]),
        (("train", "--program-profile", "nano"), ["plain,nanogpt"]),
        (("train", "--program-profile", "a"), ["plain,accelerate", "plain,auto"]),
        (("train", "--python", ".ve"), ["file,.ve"]),
        (("train", "--seq"), ["plain,--seq-len"]),
        (("train", "sft"), ["plain,sft-lora", "plain,sft-qlora"]),
        (("restart", "a", "--preset", "stage"), ["plain,stage2_offload", "plain,stage3"]),
        (("presets", "mini"), ["plain,minimal"]),
        (("train", "--notify", "n"), ["plain,ntfy:"]),
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


@pytest.fixture
def two_gpus(runs: Runs, tmp_path: Path, nvml_library: Path) -> None:  # noqa: F811
    script = Script(tmp_path / "script")
    for index in (0, 1):
        script.gpu(index, name="RTX-A4500", uuid=f"GPU-{index}", total=20 * GIB, used=index * GIB)
    runs.environment |= script.write().env(nvml_library)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("train", "--gpus", ""), ["0", "1", "free:1", "free:2"]),
        (("train", "--gpus", "1,"), ["1,0"]),
        (("restart", "a", "--gpus", "free", ":"), ["1", "2"]),
        (("restart", "a", "--gpus", "free", ":", "2"), ["2"]),
        (("watch", "--gpus", ""), ["0", "1", "visible"]),
        (("watch", "--gpus=", "0", ","), []),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_completed_one_after_the_other(runs: Runs, words: tuple[str, ...], found: list[str]) -> None:
    assert completed(runs, *words) == [f"plain,{value}" for value in found]


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_named_with_their_free_memory(runs: Runs) -> None:
    assert completed(runs, "train", "--gpus", "1", shell="zsh") == ["plain", "1", "RTX-A4500, 19.0 GiB free"]


def test_without_a_gpu_there_is_none_to_complete(runs: Runs, tmp_path: Path, nvml_library: Path) -> None:  # noqa: F811
    runs.environment |= Script(tmp_path / "script").write().env(nvml_library)
    assert completed(runs, "train", "--gpus", "") == []


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("train", "--set", "prec"), ["precision="]),
        (("train", "--set", "precision", "="), ["auto", "fp32", "bf16", "fp16"]),
        (("train", "--set", "precision", "=", "b"), ["bf16"]),
        (("train", "--set", "=", "precision", "=", "b"), ["bf16"]),
        (("train", "--set", "packing", "="), ["true", "false"]),
        (("train", "--set", "learning_rate", "="), []),
        (("train", "--set", "nothing", "="), []),
        (("train", "--set", "lora.targets", "=", "q_proj,k"), ["q_proj,k_proj"]),
        (("train", "--set", "model.config.hidden"), ["model.config.hidden_size="]),
        (("train", "sft-lora", "--set", "data.columns.p"), ["data.columns.prompt="]),
        (("restart", "a", "--set", "model"), []),  # only a new run may have another one
        (("train", "--on-spike", ""), ["ask", "back", "stop"]),
    ],
)
def test_settings_are_completed_and_then_their_values(runs: Runs, words: tuple[str, ...], found: list[str]) -> None:
    assert completed(runs, *words) == [f"plain,{value}" for value in found]


def test_a_key_says_what_it_is_and_a_file_begins_after_its_key(runs: Runs) -> None:
    meaning = "loss_chunk, tokens at one time"
    assert completed(runs, "train", "--set", "loss_ch", shell="zsh") == ["plain", "loss_chunk=", meaning]
    assert completed(runs, "train", "--set", "data.train=pa", shell="zsh") == ["file", "data.train=", "_"]
    assert completed(runs, "train", "--set", "data.train", "=", "pa") == ["file,data.train=pa"]


def test_a_program_of_the_user_has_few_settings(runs: Runs) -> None:
    knobs = Knobs(batch=Knob(value=8, name="--batch_size", source="command"))
    for grip in ("profile", "optimizer"):
        program = Program(grip=grip, knobs=knobs)
        stored(runs.path, grip, NOW, settings=None, command=("python", "t.py"), program=program)
    assert completed(runs, "restart", "profile", "--set", "") == ["plain,batch=", "plain,allocator=", "plain,position="]
    assert completed(runs, "restart", "profile", "--set", "position", "=") == ["plain,lost"]
    assert completed(runs, "restart", "optimizer", "--set", "") == ["plain,allocator="]


def test_the_configurations_of_the_run_are_completed(runs: Runs) -> None:
    two_configurations(runs)
    assert completed(runs, "rollback", "qwen-sft", "") == ["plain,1"]
    assert completed(runs, "rollback", "nothing", "") == []


def two_configurations(runs: Runs) -> None:
    folder = stored(runs.path, "qwen-sft", NOW)
    with closing(Ledger(folder.ledger_path)) as ledger:
        for number, batch in ((1, 8), (2, 4)):
            settings = replace(SETTINGS, batch=batch, accumulation=32 // batch)
            one = Configuration(number=number, attempt=1, started=1.0, reason="start", settings=settings)
            ledger.save_configuration(ConfigurationRecord(configuration=one, starts=(ConfigurationStart(attempt=1),)))


@pytest.mark.parametrize(
    ("words", "before", "incomplete", "kept"),
    [
        (["train", ""], ["train"], "", ""),
        (["--set", "a", "="], ["--set"], "a=", "a="),
        (["--set", "a", "=", "b"], ["--set"], "a=b", "a="),
        (["--set", "a", "=", "b", ""], ["--set", "a=b"], "", ""),
        (["--set", "=", "a", "=", "b"], [], "--set=a=b", "--set=a="),
        (["--gpus", "free", ":"], ["--gpus"], "free:", "free:"),
        (["--set", "a=b"], ["--set"], "a=b", ""),  # a bash whose COMP_WORDBREAKS lacks it
    ],
)
def test_what_bash_splits_is_one_word_again(words: list[str], before: list[str], incomplete: str, kept: str) -> None:
    assert rejoined(words) == (before, incomplete, kept)


START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "--private", "-i"],
}
WITH_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
"""Starts a shell that the terminal belongs to, as fish demands."""
LOAD = {
    "bash": 'eval "$(_MEMTOP_COMPLETE=bash_source memtop)"',
    "zsh": 'autoload -Uz compinit && compinit -D -u && eval "$(_MEMTOP_COMPLETE=zsh_source memtop)"',
    "fish": "_MEMTOP_COMPLETE=fish_source memtop | source",
}
TYPED = {
    "memtop sho": "memtop show |",
    "memtop show qw": "memtop show qwen-sft |",
    "memtop train sft-l": "memtop train sft-lora |",
    "memtop restart qwen-sft --preset stage2": "memtop restart qwen-sft --preset stage2_offload |",
    "memtop train --preset=stage2": "memtop train --preset=stage2_offload |",
    "memtop train --set loss_c": "memtop train --set loss_chunk=|",
    "memtop train --set precision=b": "memtop train --set precision=bf16 |",
    "memtop train --set=precision=b": "memtop train --set=precision=bf16 |",
    "memtop train --set lora.targets=q_proj,k": "memtop train --set lora.targets=q_proj,k_proj |",
    "memtop train --set data.train=pai": "memtop train --set data.train=pairs.jsonl |",
    "memtop train --gpus 1,": "memtop train --gpus 1,0 |",
    "memtop train --gpus free:2": "memtop train --gpus free:2 |",
    "memtop watch --gpus vis": "memtop watch --gpus visible |",
    "memtop rollback qwen-sft ": "memtop rollback qwen-sft 1 |",
    "memtop diagnose pai": "memtop diagnose pairs.jsonl |",
    "memtop train -- cat pai": "memtop train -- cat pairs.jsonl |",
}
"""What is typed before the tab, and the line after it with the cursor."""


@pytest.mark.parametrize(
    "shell", ["bash", pytest.param("zsh", marks=pytest.mark.long), pytest.param("fish", marks=pytest.mark.long)]
)
@pytest.mark.usefixtures("two_gpus")
def test_a_real_shell_completes_the_line(runs: Runs, tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    two_configurations(runs)
    (runs.root / "pairs.jsonl").touch()
    program = tmp_path / "bin" / "memtop"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c {shlex.quote(PATIENT)} "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    terminal = Terminal(
        [sys.executable, "-c", WITH_TERMINAL, *START[shell]],
        columns=100,
        rows=40,
        cwd=str(runs.root),
        environment=runs.environment | {"PATH": path, "PS1": "$ ", "PROMPT": "$ ", "HOME": str(runs.root)},
    )
    try:
        terminal.keys(f'{LOAD[shell]}; echo re""ady\r')
        terminal.wait_for("ready")
        for typed, line in TYPED.items():
            terminal.keys(f"{typed}\t")
            terminal.wait_for(line.rstrip("|").rstrip())
            # A mark where the cursor is: a shell may show more than is on the line.
            terminal.keys("#")
            terminal.wait_for(line.replace("|", "#"))
            terminal.keys("\x15")
    finally:
        terminal.close()
