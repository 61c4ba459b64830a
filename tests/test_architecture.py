"""The rules of the code base, checked in fresh interpreters: which module may load which."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("memtop", "tui", "supervisor", "train", "presets")
HEAVY = ("torch", "transformers", "accelerate", "deepspeed", "textual", "numpy", "pydantic")


def loaded_after(code: str, runs_dir: Path) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after this code."""
    script = f"{code}\nimport json, sys\nprint('\\n' + json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "HOME": str(runs_dir), "MEMTOP_RUNS_DIR": str(runs_dir)},
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "from memtop.cli import run; run(['--help'])",
        "from memtop.cli import run; run(['train', '--help'])",
        "from memtop.cli import run; assert run(['watch', '--once']) == 0",
        "from memtop.cli import run; assert run(['watch', '--once', '--json']) == 0",
        "from memtop.cli import run; assert run(['runs']) == 0",
        "from memtop.cli import run; assert run(['presets']) == 0",
        "from memtop.cli import run; assert run(['doctor']) == 0",
        "import memtop.supervisor.__main__",
        "import memtop.supervisor.run.client",
        "import memtop.cli.foreground",
    ],
)
def test_commands_and_supervisor_load_neither_torch_nor_textual(code: str, tmp_path: Path) -> None:
    assert loaded_after(code, tmp_path).isdisjoint(HEAVY)


def test_the_dashboard_loads_no_torch(tmp_path: Path) -> None:
    found = loaded_after("import memtop.tui.app, memtop.tui.feed, memtop.tui.demo", tmp_path)
    assert "textual" in found
    assert found.isdisjoint({"torch", "transformers", "accelerate", "numpy"})


def test_help_loads_little(tmp_path: Path) -> None:
    found = loaded_after("from memtop.cli import run; run(['--help'])", tmp_path)
    assert found.isdisjoint({"pynvml", "psutil", "sqlite3", "msgspec"})
    found = loaded_after("from memtop.cli import run; run(['train', '--help'])", tmp_path)
    assert found.isdisjoint({"pynvml", "psutil", "sqlite3", "asyncio"})


@pytest.mark.long  # imports torch in a new process
def test_only_runs_on_parquet_files_load_arrow(tmp_path: Path) -> None:
    """It is slow to load."""
    assert loaded_after("import memtop.train.data.rows, memtop.train.batches", tmp_path).isdisjoint({"pyarrow"})


def test_help_loads_no_command(tmp_path: Path) -> None:
    helps = "('memtop.cli.output', 'memtop.cli.language')"
    found = f"[name for name in sys.modules if name.startswith('memtop.cli.') and name not in {helps}]"
    code = f"from memtop.cli import run; run(['--help']); import sys; assert not {found}, {found}"
    assert "click" in loaded_after(code, tmp_path)


def test_the_front_door_has_its_four_links() -> None:
    for name in ("tui", "supervisor", "train", "presets"):
        link = ROOT / "memtop" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"


def test_no_file_outgrows_its_room() -> None:
    """A file of more than 500 lines usually has more than one purpose."""
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    }
    assert sizes
    assert {path: lines for path, lines in sizes.items() if lines > 500} == {}


def test_no_module_imports_itself_through_others() -> None:
    """Counts imports inside functions and under TYPE_CHECKING, too: two modules that need each
    other are one module."""
    imports = imported_modules()
    assert len(imports) > 100
    assert {module for module in imports if module in reachable(module, imports)} == set()


def imported_modules() -> dict[str, set[str]]:
    """The modules of ours that each of our modules imports."""
    files = {}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if not any(parent.is_symlink() for parent in path.parents):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names = parts if parts[0] == "memtop" else ("memtop", *parts)
            files[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return {module: imported_by(module, path, files.keys()) for module, path in files.items()}


def imported_by(module: str, path: Path, known: Collection[str]) -> set[str]:
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
            found.update(name if name in known else source for name in names)
    return found.intersection(known) - {module}


def reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [*imports[start]]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imports[module]
    return found
