"""Which Python trains a recipe: the order of those that come into question, what each must have,
and a run in an environment without memtop, started from one without torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from memtop.cli import installing, interpreters, run
from memtop.presets import load_presets, load_recipes
from memtop.presets.edits import draft
from memtop.supervisor.errors import UsageError
from memtop.supervisor.interpreters import (
    Candidate,
    Interpreter,
    Named,
    Proof,
    candidates,
    find,
    least_versions,
    missing_in,
    prove,
    why_unsafe,
)
from tests.conftest import Runs
from tests.environments import LIBRARIES, ROOT, add_module, make_environment, make_tool_environment, packages_of
from tests.recovery.injected import TINY

FAKE_TORCH = "__version__ = '9.9'\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "MEMTOP_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def without_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """memtop's own Python does not count."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone/python"))
    monkeypatch.setattr("memtop.supervisor.interpreters.is_own", lambda path: False)


def test_the_order_of_the_candidates(tmp_path: Path) -> None:
    near = tmp_path / "project/src"
    near.mkdir(parents=True)
    dot = program(tmp_path / "project/.venv/bin/python")
    program(tmp_path / ".venv/bin/python")
    on_path = program(tmp_path / "bin/python")
    environment = {
        "VIRTUAL_ENV": "/active",
        "CONDA_PREFIX": "/conda",
        "CONDA_DEFAULT_ENV": "train",
        "PATH": str(tmp_path / "bin"),
    }
    found = list(candidates(None, environment, near))
    assert found == [
        Candidate(sys.executable, "memtop's own"),
        Candidate("/active/bin/python", "VIRTUAL_ENV"),
        Candidate("/conda/bin/python", "CONDA_PREFIX"),
        Candidate(str(dot), f".venv in {tmp_path / 'project'}", chosen=False),
        Candidate(str(on_path), "python on PATH", chosen=False),
    ]
    base = [one.why for one in candidates(None, {**environment, "CONDA_DEFAULT_ENV": "base"}, near)]
    assert "CONDA_PREFIX" not in base, "active in every shell"
    same = {"VIRTUAL_ENV": str(Path(sys.executable).parents[1]), "PATH": ""}
    assert [one.path for one in candidates(None, same, Path("/"))].count(sys.executable) == 1
    (tmp_path / "bin/python3").symlink_to("python")
    both = candidates(None, {"PATH": str(tmp_path / "bin")}, Path("/"))
    assert [one.why for one in both] == ["memtop's own", "python3 on PATH"], "one Python with two names"
    dot.unlink()
    dot.symlink_to("gone")
    assert f".venv in {tmp_path / 'project'}" in [one.why for one in candidates(None, {"PATH": ""}, near)], "it is named"


@pytest.mark.parametrize("given", ["env", "env/bin/python", "python-of-mine", "bin/../env"])
def test_a_named_one_is_the_only_candidate(tmp_path: Path, given: str) -> None:
    python = program(tmp_path / "env/bin/python")
    word = program(tmp_path / "bin/python-of-mine")
    (found,) = candidates(Named(given, "--python"), {"PATH": str(tmp_path / "bin"), "VIRTUAL_ENV": "/active"}, tmp_path)
    assert found == Candidate(str(word if given == word.name else python), "--python", named=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("place", [".venv", ".venv/bin", ".venv/bin/python"])
def test_a_python_of_another_user_is_started_only_if_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """In a folder such as /tmp, or in another user's project."""
    without_own(tmp_path, monkeypatch)
    started = tmp_path / "started"
    python = program(tmp_path / ".venv/bin/python", f"#!/bin/sh\ntouch {started}\n")
    os.chown(tmp_path / place, 12345, 12345)
    result = find(None, {"PATH": str(python.parent)}, tmp_path)
    (reason,) = {proof.why_not() for one, proof in result.refused if not one.chosen}
    other = f"{tmp_path / place} belongs to another user (uid 12345)"
    assert reason == f"memtop does not start it by itself: {other}; --python {python} takes it"
    find(Named(str(python), "memtop.toml", by_project=True), {}, tmp_path)
    assert not started.exists()
    find(Named(str(python), "--python"), {}, tmp_path)
    assert started.exists()


def test_a_python_that_everybody_may_exchange_is_not_started_unnamed(tmp_path: Path) -> None:
    python = program(tmp_path / "env/bin/python")
    assert why_unsafe(str(python)) is None
    python.parent.chmod(0o777)
    assert why_unsafe(str(python)) == f"every user may write to {python.parent}"
    python.parent.chmod(0o1777)
    assert why_unsafe(str(python)) is None, "in a sticky folder, your file stays yours"
    python.chmod(0o757)
    assert why_unsafe(str(python)) == f"every user may write to {python}"
    python.unlink()
    python.symlink_to("/bin/sh")
    assert why_unsafe(str(python)) is None, "a link has no permissions of its own"


def test_a_torch_that_cannot_be_imported_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`module load cuda` changes a variable, and no file."""
    python = str(make_environment(tmp_path / "env"))
    add_module(tmp_path / "env", "torch", "import os; __version__ = os.environ['CUDA_HOME_OF_TEST']\n")
    assert prove(python).why_not() == "KeyError: 'CUDA_HOME_OF_TEST'"
    monkeypatch.setenv("CUDA_HOME_OF_TEST", "1.0")
    assert prove(python).why_not() is None


def test_the_first_one_with_torch_is_taken_and_the_others_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = make_environment(tmp_path / "bare")
    good = make_environment(tmp_path / ".venv")
    add_module(tmp_path / ".venv", "torch", FAKE_TORCH)
    environment = {"VIRTUAL_ENV": str(tmp_path / "bare"), "CONDA_PREFIX": "/nowhere", "PATH": ""}
    result = find(Named("bare", "MEMTOP_PYTHON"), environment, tmp_path)
    assert result.found is None, "a named one is not replaced by another"
    assert result.reasons() == f"MEMTOP_PYTHON ({bare}): it has no torch"
    without_own(tmp_path, monkeypatch)
    result = find(None, environment, tmp_path)
    assert result.found is not None
    assert "VIRTUAL_ENV" in (interpreters.said_at_start(result.found) or ""), "the active one was not taken"
    assert result.found.text().startswith(f"{good} (.venv in {tmp_path}; Python 3.")
    assert result.found.text().endswith(", torch 9.9)")
    assert result.reasons() == (
        f"memtop's own ({tmp_path}/gone/python): there is no such file; VIRTUAL_ENV ({bare}): it has no torch; "
        "CONDA_PREFIX (/nowhere/bin/python): there is no such file"
    )


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            "raise OSError('libtorch_cuda.so: cannot open shared object file\\nmore')",
            "OSError: libtorch_cuda.so: cannot open shared object file",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "it ended with signal 11"),
        ("import sys; sys.exit()", "SystemExit: no reason given"),
        ("print('noise'); __version__ = '1'; import atexit; atexit.register(print, 'bye')", None),
    ],
)
def test_torch_is_imported_to_prove_it(tmp_path: Path, code: str, why: str | None) -> None:
    python = make_environment(tmp_path / "env")
    add_module(tmp_path / "env", "torch", code)
    assert prove(str(python)).why_not() == why


def test_a_broken_interpreter_is_one_line(tmp_path: Path) -> None:
    broken = program(tmp_path / "broken", "#!/bin/sh\necho first >&2; echo 'no interpreter here' >&2; exit 3\n")
    plain = tmp_path / "plain"
    plain.write_text("")
    machine_code = program(tmp_path / "code", "\x7fnot a program")
    for path, why in {
        broken: "it ended with status 3: no interpreter here",
        plain: "you may not start it",
        machine_code: "it cannot be started: Exec format error",
        tmp_path / "none": "there is no such file",
    }.items():
        with pytest.raises(UsageError) as caught:
            interpreters.python_for("RECIPE first-run: the built-in trainer", str(path))
        assert str(caught.value) == f"--python {path}: {why}; give a Python that has torch"


def test_the_answer_is_kept_until_a_package_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = make_environment(tmp_path / "env")
    starts = tmp_path / "starts"
    (packages_of(tmp_path / "env") / "count.pth").write_text(f"import sys; open({str(starts)!r}, 'a').write('x')\n")
    asked: list[str] = []
    assert prove(str(python), asked.append).why_not() == "it has no torch"
    assert asked == [str(python)]
    once = starts.read_text()
    assert once, "a .pth file runs at each start"
    assert prove(str(python), asked.append).why_not() == "it has no torch"
    assert (starts.read_text(), len(asked)) == (once, 1)
    add_module(tmp_path / "env", "torch", FAKE_TORCH)
    assert prove(str(python)).why_not() is None
    assert starts.read_text() == 2 * once
    (tmp_path / "more/peft").mkdir(parents=True)
    (tmp_path / "more/peft/__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "more"))
    assert "peft" in prove(str(python)).packages
    (tmp_path / "cache/memtop/pythons.json").write_text("{")
    assert prove(str(python)).packages["torch"] == "9.9"


def test_what_a_shim_starts_is_remembered_and_not_the_shim(tmp_path: Path) -> None:
    """pyenv's shims start another Python in another folder."""
    python = make_environment(tmp_path / "env")
    add_module(tmp_path / "env", "torch", FAKE_TORCH)
    script = program(tmp_path / "shims/python", f'#!/bin/sh\nexec "{python}" "$@"\n')
    found = find(Named(str(script), "--python"), {}, tmp_path).found
    assert found is not None
    assert found.path == str(python)
    other = program(tmp_path / "bin/python-with-variables", f'#!/bin/sh\nLIBRARIES=x exec "{python}" "$@"\n')
    found = find(Named(str(other), "--python"), {}, tmp_path).found
    assert found is not None
    assert found.path == str(other), "its interpreter may need what the script sets"


def test_what_is_missing_there_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = make_environment(tmp_path / "env")
    program(tmp_path / "bin/uv")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    who = "RECIPE first-run: the built-in trainer"
    rest = "transformers accelerate safetensors numpy msgspec platformdirs psutil nvidia-ml-py"
    with pytest.raises(UsageError) as caught:
        interpreters.python_for(who, "env")
    older = "" if sys.version_info >= (3, 11) else " tomli"
    assert str(caught.value) == f"--python {python}: it has no torch; uv pip install --python {python} torch {rest}{older}"
    add_module(tmp_path / "env", "torch", FAKE_TORCH)
    add_module(tmp_path / "env", "pip")
    with pytest.raises(UsageError) as caught:
        interpreters.python_for(who, "env")
    names = ", ".join((rest + older).split())
    assert str(caught.value) == (
        f"{who} needs {names}, which {python} (--python) lacks: {python} -m pip install {rest}{older}; "
        "your own program, given after `--`, does not need it"
    )


def test_a_package_that_is_too_old_is_missing_too(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    for name, version in {"torch": "2.13.0+cpu", "transformers": "4.9.2", "accelerate": "1.10"}.items():
        add_module(tmp_path / "env", name, f"__version__ = {version!r}")
        metadata = packages_of(tmp_path / "env") / f"{name}-{version}.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Name: {name}\nVersion: {version}\n")
    least = least_versions()["transformers"]
    assert missing_in(prove(str(python)), ("torch", "transformers", "accelerate", "peft")) == [f"transformers>={least}", "peft"]


def test_another_active_environment_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    own = interpreters.python_for("RECIPE first-run: the built-in trainer")
    assert own.path == sys.executable
    assert interpreters.said_at_start(own) is None
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert interpreters.said_at_start(own) is None
    monkeypatch.setenv("VIRTUAL_ENV", "/other")
    said = interpreters.said_at_start(own)
    assert said is not None
    assert said.startswith(f"trains with {sys.executable} (memtop's own; Python 3.")
    assert said.endswith("; --python /other chooses the active environment")


class Apart:
    """`memtop` in an environment without torch, beside one with torch and without memtop."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.tool = make_tool_environment(runs.root / "tool")
        self.folder = runs.root / ".venv"
        self.python = make_environment(self.folder, LIBRARIES)

    def memtop(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {**self.runs.environment, "PATH": str(self.runs.root / "nothing")}
        command, cwd = [str(self.tool), "-m", "memtop", *words], self.runs.root
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == status, done.stderr
        return done

    def train(self) -> str:
        """Train two updates; what the command says."""
        words = ("train", "--headless", "--name", "a", "--max-updates", "2", "--set", "device=cpu")
        return self.memtop(*words, *TINY).stderr

    def shown(self) -> tuple[str, int, str]:
        shown = json.loads(self.memtop("show", "a", "--json").stdout)
        return shown["state"], shown["updates"], shown["settings"]["python"]


@pytest.fixture
def apart(runs: Runs) -> Apart:
    return Apart(runs)


def test_a_recipe_trains_in_an_environment_without_memtop(runs: Runs, apart: Apart) -> None:
    """Started from an environment without torch: the run uses the other one, and gets none of
    memtop's packages. Without that environment, one line says so."""
    python = apart.python
    assert subprocess.run([str(python), "-c", "import memtop"], capture_output=True).returncode == 1
    assert f"memtop: trains with {python} (.venv in {runs.root}; Python 3." in apart.train()
    assert apart.shown() == ("finished", 2, str(python))
    command = json.loads((runs.path / "a/attempts/0001/command.json").read_bytes())
    assert command["argv"][0] == str(python)
    paths = command["environment"]["PYTHONPATH"].split(os.pathsep)
    assert not any("site-packages" in path for path in paths)
    assert [[one.name for one in Path(path).iterdir()] for path in paths if path.endswith("/path")] == [["memtop"]]
    checks = {check["check"]: check for check in json.loads(apart.memtop("doctor", "--json").stdout)}
    assert str(python) in checks["trains with"]["found"]
    assert f"memtop's own ({apart.tool}): it has no torch" in checks["trains with"]["found"]
    apart.folder.rename(runs.root / "moved")
    gone = f"the Python of this run, {python}: there is no such file; `memtop restart a --set python=PATH` trains with another"
    assert apart.memtop("export", "a", "again", status=2).stderr == f"memtop: {gone}\n"
    assert gone in apart.memtop("restart", "a", "--headless", "--max-updates", "3", status=2).stderr


@pytest.mark.long
def test_a_run_is_exported_by_its_own_python_and_goes_on_with_another(runs: Runs, apart: Apart) -> None:
    apart.train()
    assert apart.memtop("export", "a", "model").stdout == f"{runs.root / 'model'}\n"
    apart.folder.rename(runs.root / "moved")
    apart.memtop("restart", "a", "--headless", "--max-updates", "3", "--set", "python=moved")
    assert apart.shown() == ("finished", 3, str(runs.root / "moved/bin/python"))


def test_the_doctor_says_how_to_get_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_environment(tmp_path / "env")
    monkeypatch.setenv("MEMTOP_PYTHON", str(tmp_path / "env"))
    assert run(["doctor", "--json", "--runs-dir", str(tmp_path)]) == 0
    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)}
    assert (
        checks["trains with"]["found"]
        == f"no Python with torch was found: MEMTOP_PYTHON ({tmp_path}/env/bin/python): it has no torch"
    )
    assert checks["trains with"]["advice"] == f"{installing.install_extra('train')} (not needed for your own programs)"


def test_without_pip_and_uv_the_command_brings_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installing.install("/e v/python", ["peft"], has_pip=False) == (
        "'/e v/python' -m ensurepip && '/e v/python' -m pip install peft"
    )
    program(tmp_path / "uv")
    assert installing.install("/e v/python", ["peft"], has_pip=False) == "uv pip install --python '/e v/python' peft"
    assert installing.install("/e v/python", ["peft"], has_pip=True) == "'/e v/python' -m pip install peft"


def test_hints_name_where_this_copy_came_from(tmp_path: Path) -> None:
    assert f"'{ROOT}[train]'" in installing.install_extra("train")
    wheel = tmp_path / "memtop 0.1.whl"
    origin = {"url": wheel.as_uri(), "archive_info": {}}
    assert installing.place_of(origin) is None, "the wheel is gone"
    wheel.touch()
    assert installing.place_of(origin) == str(wheel)
    repository = {"url": "https://example.org/memtop", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    assert installing.place_of(repository) == "memtop @ git+https://example.org/memtop@abc"


def test_no_hint_installs_the_project_of_that_name_on_the_package_index() -> None:
    files = [
        path for name in ("memtop/cli", "tui", "supervisor", "train", "presets", "docs") for path in (ROOT / name).rglob("*")
    ]
    texts = {path: path.read_text() for path in (*files, ROOT / "README.md") if path.suffix in (".py", ".md", ".toml")}
    assert len(texts) > 100
    index = re.compile(r"""(pip|pipx|uv tool|uv add|conda) (install )?(-\S+ )*['"]?memtop""")
    assert {str(path): found[0] for path, text in texts.items() if (found := index.search(text))} == {}


def test_a_proof_is_read_from_what_an_old_python_answers() -> None:
    assert msgspec.convert({"version": [3, 8, 1], "packages": {"torch": "1.9"}}, type(prove(sys.executable))).why_not() == (
        "it is Python 3.8, and the trainer needs 3.10 or newer"
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("rope_theta=0", "rope_theta 0: must be a number above 0"),
        ("hidden_size=17", "hidden_size 17: must be a multiple of num_attention_heads 4, says transformers {}"),
        (
            "model_type=lama",
            "model_type lama: transformers {} does not know this architecture; a newer one may; did you mean llama?",
        ),
        ("model_type=9", "model_type 9: transformers {} does not know this architecture; a newer one may"),
        ("num_key_value_heads=3", "num_key_value_heads 3: does not divide num_attention_heads 4"),
        ("head_dim=5", "head_dim 5: must be even; without it, it is hidden_size / num_attention_heads"),
        ("hidden_size=12", "head_dim 3: must be even; without it, it is hidden_size / num_attention_heads"),
        ("hidden_act=Silu", 'hidden_act "Silu": transformers {} has no such function; did you mean silu?'),
    ],
)
def test_a_model_that_no_trainer_takes_is_refused_before_a_run_is_created(runs: Runs, value: str, said: str) -> None:
    line = f"memtop: model.config.{said.format(importlib.metadata.version('transformers'))}\n"
    for command in ("train", "plan"):
        done = runs.memtop(command, "--set", f"model.config.{value}", status=2)
        assert (done.stdout, done.stderr) == ("", line)
    assert not runs.path.exists() or not list(runs.path.iterdir())


def test_what_no_trainer_takes_is_refused_in_a_folder_of_a_model_too(runs: Runs) -> None:
    (runs.root / "base").mkdir()
    config = AutoConfig.for_model("llama", num_hidden_layers=1, hidden_size=16, num_attention_heads=4, vocab_size=256).to_dict()
    wrong = {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}
    for values, said in (
        (wrong, "rope_parameters.rope_theta -1.0: must be a number above 0"),
        ({"head_dim": 3}, "head_dim 3: "),
    ):
        (runs.root / "base/config.json").write_text(json.dumps({**config, **values}))
        done = runs.memtop("plan", "sft-lora", "--set", "model.path=base", "--set", "data.train=x", status=2)
        assert done.stderr.startswith(f"memtop: model.config.{said}")


MAY_WORK: tuple[dict[str, object], ...] = (
    {"head_dim": 1},
    {"rope_theta": 1},
    {"hidden_act": "relu2"},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 0.5}},
    {"hidden_activation": "nothing"},
    {"model_type": "gemma2", "hidden_act": "nothing", "hidden_size": 12},
    {"model_type": "gpt2", "hidden_act": "nothing", "n_embd": 12, "n_head": 4, "rope_parameters": {"rope_theta": 0}},
    {
        "model_type": "phi3",
        "pad_token_id": 0,
        "head_dim": 7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 9.0, "partial_rotary_factor": 0.5},
    },
)


@pytest.mark.parametrize("values", MAY_WORK)
def test_a_model_that_trains_is_not_refused(values: dict[str, object]) -> None:
    first_run = draft(load_recipes()["first-run"], preset=load_presets()["standard"])
    config = {**first_run.model["config"], **values}
    if "n_embd" in values:
        config.pop("hidden_size")
    interpreters.refuse_wrong_model(
        interpreters.python_for("a test", sys.executable), replace(first_run, model={"config": config})
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tokens = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(one.grad.isfinite().all() for one in model.parameters() if one.grad is not None)


def test_what_a_model_may_be_follows_from_the_transformers_that_trains_it(tmp_path: Path) -> None:
    models = tmp_path / "transformers/models"
    (models / "auto").mkdir(parents=True)
    (models.parent / "__init__.py").touch()
    proof = Proof(version=(3, 11, 0), packages={"transformers": "4.56.0"}, paths=(str(tmp_path / "none"), str(tmp_path)))
    python = Interpreter(path=str(tmp_path / "bin/python"), why="--python", proof=proof)
    first_run = draft(load_recipes()["first-run"], preset=load_presets()["standard"])

    def refuse(**values: object) -> None:
        interpreters.refuse_wrong_model(python, replace(first_run, model={"config": {**first_run.model["config"], **values}}))

    # Its files are not as expected: the trainer finds out.
    refuse(model_type="of-tomorrow")
    (models / "auto/configuration_auto.py").write_text('X = [("llama", "LlamaConfig"), ("of-tomorrow", "OfTomorrowConfig")]')
    refuse(model_type="of-tomorrow", hidden_size=17)
    refuse(hidden_size=17)
    refuse(rope_parameters={"rope_theta": 0}, hidden_act="nothing")
    with pytest.raises(
        UsageError,
        match=r"^model.config.model_type qwen3: transformers 4.56.0 does not know this architecture; a newer one may$",
    ):
        refuse(model_type="qwen3")
    (models / "llama").mkdir()
    refuses, source = "        if self.hidden_size % self.num_attention_heads != 0:\n", models / "llama/configuration_llama.py"
    source.write_text(f"\nclass TextConfig:\n    pass\n\nclass ImageConfig:\n{refuses}")
    refuse(hidden_size=17)
    source.write_text(f"\nclass LlamaConfig:\n{refuses}")
    with pytest.raises(UsageError, match=r"^model.config.hidden_size 17: must be a multiple of num_attention_heads 4, says"):
        refuse(hidden_size=17)
