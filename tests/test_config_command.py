"""The configuration: which value counts, where it comes from, and what is said about a wrong
one."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from memtop.cli import run
from memtop.cli.configuration import KEYS, configured, default_runs_dir, variable_of, write_user_key
from memtop.presets import load_presets
from memtop.supervisor.errors import UsageError
from tests.conftest import Runs


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory two folders below the project's; the user's file is in `config`."""
    for key in KEYS:
        monkeypatch.delenv(variable_of(key), raising=False)
    monkeypatch.delenv("MEMTOP_RUN", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    inside = tmp_path / "project/src/deep"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["config", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_each_source_overrides_the_one_before(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found() -> tuple[Any, ...]:
        value = shown(capsys)["values"]["on-oom"]
        return value["value"], value["source"], value["where"]

    assert found() == (None, "default", None)
    user = write(place / "config/memtop/config.toml", 'on-oom = "ask"\n')
    assert found() == ("ask", "user", str(user))
    project = write(place / "project/pyproject.toml", '[tool.memtop]\non-oom = "stop"\n')
    assert found() == ("stop", "project", f"{project} [tool.memtop]")
    nearer = write(place / "project/src/memtop.toml", 'on-oom = "auto"\n')
    assert found() == ("auto", "project", str(nearer)), "the nearest file alone"
    monkeypatch.setenv("MEMTOP_ON_OOM", "ask")
    assert found() == ("ask", "environment", "MEMTOP_ON_OOM")
    monkeypatch.setenv("MEMTOP_RUN", "/runs/a")
    assert found() == ("auto", "project", str(nearer)), "a run sets this variable for its program"
    files = [(file["source"], file["path"]) for file in shown(capsys)["files"]]
    assert files == [("user", str(user)), ("project", str(nearer))]


def test_paths_belong_to_the_file_that_names_them(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_runs_dir() == Path("runs")
    monkeypatch.setenv("HOME", str(place / "home"))
    write(place / "config/memtop/config.toml", 'runs-dir = "~/runs"\npython = "python3.12"\n')
    assert default_runs_dir() == place / "home/runs"
    assert configured("python").value == "python3.12", "a word that is on PATH"
    write(place / "project/memtop.toml", 'runs-dir = "../runs"\npython = "env/bin/python"\n')
    assert default_runs_dir() == place / "project/../runs"
    assert configured("python").value == str(place / "project/env/bin/python")
    monkeypatch.setenv("MEMTOP_RUNS_DIR", "elsewhere")
    assert default_runs_dir() == Path("elsewhere")


def test_an_unknown_key_is_one_line_and_the_command_goes_on(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user = write(place / "config/memtop/config.toml", 'run-dir = "x"\ncolour = 1\n')
    lines = [
        f"memtop: {user}: run-dir: unknown, and ignored; did you mean runs-dir?",
        f"memtop: {user}: colour: unknown, and ignored; there are {', '.join(KEYS)}",
    ]
    for command in (["config"], ["doctor"]):
        assert run(command) == 0
        assert capsys.readouterr().err.splitlines() == lines
    assert shown(capsys)["unknown"] == [line.removeprefix("memtop: ") for line in lines]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("runs-dir = 3", "config.toml: runs-dir 3: give text in quotes"),
        ('runs-dir = ""', "config.toml: runs-dir '': give text in quotes"),
        ("save-every = 0.5", "config.toml: save-every 0.5: give a whole number"),
        ("gpus = [true]", "config.toml: gpus [True]: give text in quotes"),
        ("runs-dir = ", "config.toml: not valid TOML: Invalid value"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line(place: Path, text: str, problem: str) -> None:
    write(place / "config/memtop/config.toml", text)
    with pytest.raises(UsageError) as caught:
        configured(text.partition(" ")[0])
    assert problem in str(caught.value)


def test_numbers_and_lists_are_taken_as_their_options_take_them(place: Path) -> None:
    write(place / "project/memtop.toml", "save-every = 50\ngpus = [0, 2]\n")
    assert (configured("save-every").value, configured("gpus").value) == ("50", "0,2")


def test_another_projects_file_and_a_damaged_one_are_left_alone(place: Path) -> None:
    write(place / "project/src/pyproject.toml", "[project\n")
    write(place / "project/src/deep/pyproject.toml", '[project]\nname = "uses-memtop"\n')
    write(place / "project/memtop.toml", 'preset = "low"\n')
    assert configured("preset").value == "low"


def test_presets_of_the_project_are_found_from_its_folders(place: Path) -> None:
    preset = 'title = "t"\ndescription = "d"\nmax_batch = 1\n'
    write(place / "project/pyproject.toml", f"[tool.memtop.presets.tiny]\n{preset}")
    assert load_presets()["tiny"].max_batch == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_that_another_user_left_above_does_not_count(place: Path) -> None:
    """In a folder such as /tmp. It could name the program that memtop starts."""
    file = write(place / "memtop.toml", 'python = "/evil/python"\n')
    assert configured("python").value == "/evil/python"
    os.chown(file, 12345, 12345)
    assert configured("python").value is None


def test_a_run_takes_its_options_from_the_configuration(runs: Runs) -> None:
    write(runs.root / "config/memtop/config.toml", 'on-oom = "ask"\nsave-every = 7\npreset = "low"\n')
    runs.memtop("train", "--name", "a", "--headless", "--", "true")
    spec = json.loads((runs.path / "a/run.json").read_bytes())
    assert (spec["on_oom"], spec["settings"]) == ("ask", None), "the preset is for recipes"
    runs.memtop(
        "train",
        "--name",
        "b",
        "--headless",
        "--on-oom",
        "stop",
        "--max-updates",
        "1",
        "--set",
        "model.config.pad_token_id=999999",
        status=2,
    )
    spec = json.loads((runs.path / "b/run.json").read_bytes())
    assert spec["on_oom"] == "stop", "the option overrides the file"
    assert (spec["settings"]["preset"], spec["settings"]["save_every"]) == ("low", 7)
    write(runs.root / "config/memtop/config.toml", 'on-oom = "maybe"\n')
    refused = runs.memtop("train", "--name", "c", "--headless", "--", "true", status=2).stderr
    assert refused.startswith(f"memtop: {runs.root}/config/memtop/config.toml: on-oom maybe: give auto ")


# --- what memtop writes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", 'theme = "nord"\n'),
        ('lang = "zh"', 'lang = "zh"\ntheme = "nord"\n'),
        ("# mine\n  theme='x' # dark\nlang = \"en\"\n", '# mine\n  theme="nord" # dark\nlang = "en"\n'),
        ('"theme" = 3\r\nlang = "en"\r\n', '"theme" = "nord"\r\nlang = "en"\r\n'),
        (
            'lang = "en"\r\n\r\n# mine\r\n[presets.a]\r\ntheme = "x"\r\n',
            'lang = "en"\r\ntheme = "nord"\r\n\r\n# mine\r\n[presets.a]\r\ntheme = "x"\r\n',
        ),
        (
            'notify-on = [\n"end"\n,\n]\nlang = """\ntheme = "x"\n[a]\n"""\n[b]\n',
            'notify-on = [\n"end"\n,\n]\nlang = """\ntheme = "x"\n[a]\n"""\ntheme = "nord"\n[b]\n',
        ),
    ],
)
def test_a_written_key_leaves_everything_else_as_it_was(place: Path, before: str, after: str) -> None:
    real = place / "dotfiles/memtop.toml"
    real.parent.mkdir()
    real.write_bytes(before.encode())
    real.chmod(0o640)
    link = place / "config/memtop/config.toml"
    link.parent.mkdir(parents=True)
    link.symlink_to(real)
    for _ in range(2):
        assert write_user_key("theme", "nord") == link
        assert real.read_bytes().decode() == after
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in real.parent.iterdir()] == [real.name]


@pytest.mark.parametrize("before", ["", 'metrics-smoothing = "8"\n', "metrics-smoothing = 8\n"])
def test_a_number_is_written_without_quotes(place: Path, before: str) -> None:
    path = write(place / "config/memtop/config.toml", before)
    write_user_key("metrics-smoothing", "32")
    assert path.read_text() == "metrics-smoothing = 32\n"
    assert configured("metrics-smoothing").value == "32"


def test_a_change_of_another_process_is_not_lost(place: Path) -> None:
    path = write(place / "config/memtop/config.toml", 'theme = "memtop"\n')
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        writer = threading.Thread(target=write_user_key, args=("theme", "nord"))
        writer.start()
        writer.join(0.5)
        assert writer.is_alive(), "it waits"
        path.write_text('lang = "zh"\ntheme = "memtop"\n')
    finally:
        os.close(folder)
    writer.join()
    assert path.read_text() == 'lang = "zh"\ntheme = "nord"\n'


def test_the_first_written_key_makes_the_file(place: Path) -> None:
    path = write_user_key("theme", "memtop-light")
    assert path == place / "config/memtop/config.toml"
    assert configured("theme").value == "memtop-light"


@pytest.mark.parametrize("text", ["theme = [\n1]\n", "not TOML"])
def test_a_file_that_cannot_be_edited_is_left_alone(place: Path, text: str) -> None:
    path = write(place / "config/memtop/config.toml", text)
    with pytest.raises(UsageError, match='write theme = "nord" into it yourself'):
        write_user_key("theme", "nord")
    assert path.read_text() == text


def test_a_folder_that_cannot_be_made_is_one_line(place: Path) -> None:
    (place / "config").write_text("a file, and no folder")
    with pytest.raises(UsageError, match=r"config\.toml: cannot be written: Not a directory"):
        write_user_key("theme", "nord")


def test_a_full_disk_leaves_the_file_and_nothing_beside_it(place: Path) -> None:
    path = write(place / "config/memtop/config.toml", "# mine\n" * 9000)
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "from memtop.cli.configuration import write_user_key; write_user_key('theme', 'nord')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "config.toml: cannot be written: File too large" in done.stderr
    assert path.read_text() == "# mine\n" * 9000
    assert [file.name for file in path.parent.iterdir()] == ["config.toml"]


def test_long_values_do_not_move_the_columns(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMTOP_RUNS_DIR", "/data/" + "a" * 60)
    user = write(place / "config/memtop/config.toml", 'on-oom = "ask"\n')
    assert run(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    texts = [KEYS[key].what for key in KEYS]
    columns = {line.index(what) for line in lines for what in texts if what in line}
    assert len(columns) == 1, "what a value means is in one column"
    assert any(line.rstrip().endswith("a" * 60) for line in lines)
    assert len(str(user)) > 28, "it does not fit into its column"
    assert any(line.rstrip().endswith(str(user)) for line in lines)
