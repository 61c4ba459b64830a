"""Measures of the code base itself: size, import cycles, duplicated names, private accesses from
tests.

Run it at the top of a checkout. `--at FOLDER` measures another checkout, so that two versions can
be compared. A code line is a line that holds a token other than a comment or a docstring.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common import report

_PRODUCT = ("memtop", "presets", "supervisor", "train", "tui")
_LONG_FUNCTION = 50
_TEXT_COLUMNS = 100
_DOCUMENTED = {"_exit", "_getframe", "_asdict", "_field_defaults", "_fields", "_make", "_replace"}
"""Public API of the standard library despite the underscore."""
_PATCHES = ("monkeypatch.setattr", "setattr", "getattr")
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def python_files(root: Path, folders: tuple[str, ...]) -> list[Path]:
    """All Python files below these folders; the links inside `memtop/` are not followed."""
    found = [path for folder in folders for path in (root / folder).rglob("*.py")]
    return sorted(path for path in found if not any((root / part).is_symlink() for part in _parents(path, root)))


def _parents(path: Path, root: Path) -> list[Path]:
    return list(path.relative_to(root).parents)


def code_lines(source: str) -> int:
    """Lines with code on them: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(ast.parse(source)))


def _docstring_lines(tree: ast.AST) -> set[int]:
    """Lines of string expressions, which hold the docstrings of modules, classes, functions and
    fields."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def text_lines(source: str) -> Iterator[str]:
    """The lines that hold a comment or a docstring."""
    rows = source.splitlines()
    numbers = _docstring_lines(ast.parse(source))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            numbers.add(token.start[0])
    yield from (rows[number - 1] for number in sorted(numbers))


def module_name(path: Path, root: Path) -> str:
    """The import name: `supervisor/units.py` is `memtop.supervisor.units`."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[0] != "memtop":
        parts.insert(0, "memtop")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Each product module with those that it imports, also inside functions and under
    TYPE_CHECKING."""
    files = {module_name(path, root): path for path in python_files(root, _PRODUCT)}
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = _base(node, name, is_package=path.name == "__init__.py")
                found.update(child if (child := f"{base}.{alias.name}") in files else base for alias in node.names)
        graph[name] = {target for target in found if target in files and target != name}
    return graph


def _base(node: ast.ImportFrom, name: str, *, is_package: bool) -> str:
    """The absolute name of the module that a `from ... import` names."""
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*parts, node.module] if node.module else parts)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other (strongly connected components of two or more), by
    Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def measure_product(root: Path) -> dict[str, Any]:
    """Size and shape of the product's code."""
    sources = {path: path.read_text() for path in python_files(root, _PRODUCT)}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    classes = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    graph = import_graph(root)
    importers: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            importers[target].add(name)
    groups = cycles(graph)
    lines = [len(source.splitlines()) for source in sources.values()]
    return {
        "files": len(sources),
        "lines": sum(lines),
        "code_lines": sum(code_lines(source) for source in sources.values()),
        "median_file_lines": statistics.median(lines),
        "functions": len(functions),
        "functions_over_50_lines": sum(length > _LONG_FUNCTION for length in functions),
        "classes": sum(classes.values()),
        "class_names_used_more_than_once": {name: count for name, count in sorted(classes.items()) if count > 1},
        "import_cycles": len(groups),
        "modules_in_import_cycles": sum(map(len, groups)),
        "import_cycle_members": groups,
        "modules_with_one_importer": sum(len(names) == 1 for names in importers.values()),
        "text_lines_over_100_columns": sum(
            len(line) > _TEXT_COLUMNS for source in sources.values() for line in text_lines(source)
        ),
    }


def measure_tests(root: Path) -> dict[str, Any]:
    """Size of the tests, and how often they access private names.

    `private_accesses` counts private names that the product defines; `third_party` counts those of
    other libraries. Names that are documented as public despite their underscore do not count:
    `os._exit`, `sys._getframe`, and the methods of named tuples (`_replace`, `_asdict`, ...).
    Neither does a test's own state (`self._x`, `cls._x`).
    """
    defined = set().union(*(_private_names(ast.parse(path.read_text())) for path in python_files(root, _PRODUCT)))
    private = third_party = patches = lines = tests = 0
    files = python_files(root, ("tests",))
    for path in files:
        source = path.read_text()
        tree = ast.parse(source)
        lines += len(source.splitlines())
        foreign = _foreign_imports(tree)
        for node in ast.walk(tree):
            patches += isinstance(node, ast.Call) and ast.unparse(node.func) in _PATCHES
            tests += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            for name, owner in _private_accesses(node):
                own = name in defined and owner not in foreign
                private += own
                third_party += not own
    return {
        "files": len(files),
        "lines": lines,
        "test_functions": tests,
        "private_accesses": private,
        "third_party": third_party,
        "patches": patches,
    }


def _private_accesses(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The private names that this node accesses, each with the first name of the expression that it
    belongs to."""
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        if _is_private(node.attr) and owner not in ("self", "cls"):
            yield node.attr, owner.partition(".")[0]
    elif isinstance(node, ast.ImportFrom):
        yield from ((alias.name, alias.name) for alias in node.names if _is_private(alias.name))
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in _PATCHES:
        for argument in node.args[:2]:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                name = argument.value.rpartition(".")[2]
                if _is_private(name):
                    yield name, ast.unparse(node.args[0]).partition(".")[0]


def _private_names(tree: ast.AST) -> set[str]:
    """The private names that a module defines: functions, classes, variables and attributes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return {name for name in names if _is_private(name)}


def _foreign_imports(tree: ast.AST) -> set[str]:
    """The names that a module imports from other packages than memtop and its tests."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in ("memtop", "tests"):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
    return names


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _DOCUMENTED


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", type=Path, default=Path(), help="the checkout to measure (default: the current folder)")
    root = parser.parse_args().at.resolve()
    report("house", {"product": measure_product(root), "tests": measure_tests(root)})


if __name__ == "__main__":
    main()
