"""Values in the text of a Python program, found by its syntax tree. The program is not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

_LARGEST = 1 << 40
_OPERATIONS: dict[type[ast.operator], Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}


def tree_of(text: str) -> ast.Module | None:
    """None if the text is not Python that this interpreter understands."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def imports_of(tree: ast.Module) -> set[str]:
    """The modules and names that it imports anywhere: `torch.utils`, `transformers.Trainer`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return found


def _assigned(tree: ast.Module, name: str) -> ast.expr | None:
    """The value of the last assignment to a module's variable, or to a field of a class."""
    owner, _, field = name.rpartition(".")
    body: Sequence[ast.stmt] = tree.body
    if owner:
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
        body = classes[-1].body if classes else ()
    found: ast.expr | None = None
    for node in body:
        if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == field for one in node.targets):
            found = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == field:
            found = node.value or found
    return found


def variable(tree: ast.Module, name: str) -> str | int | None:
    """The value of `name` (`batch_size`, `TrainConfig.batch_size`); None if it has none that can be
    read without running the program."""
    node = _assigned(tree, name)
    return None if node is None else _constant(_default(node))


def _default(node: ast.expr) -> ast.expr:
    """Of a dataclass's `field(default=8)`: 8."""
    if isinstance(node, ast.Call):
        return next((word.value for word in node.keywords if word.arg == "default"), node)
    return node


def _constant(node: ast.expr) -> str | int | None:
    if isinstance(node, ast.Constant):
        value = node.value
        return value if isinstance(value, (str, int)) and not isinstance(value, bool) else None
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _constant(node.left), _constant(node.right)
        if isinstance(left, int) and isinstance(right, int) and max(abs(left), abs(right)) < _LARGEST:
            return None if isinstance(node.op, ast.FloorDiv) and not right else int(_OPERATIONS[type(node.op)](left, right))
    return None


def with_variable(text: str, name: str, value: str) -> str | None:
    """The text with another value for `name`, everything else unchanged; None if it has no such
    variable."""
    tree = tree_of(text)
    node = _assigned(tree, name) if tree is not None else None
    if node is None:
        return None
    node = _default(node)
    if node.end_lineno is None or node.end_col_offset is None:
        return None
    # The columns of the tree count bytes of UTF-8.
    lines = text.encode().splitlines(keepends=True)
    first, last = lines[node.lineno - 1], lines[node.end_lineno - 1]
    new = first[: node.col_offset] + value.encode() + last[node.end_col_offset :]
    return b"".join([*lines[: node.lineno - 1], new, *lines[node.end_lineno :]]).decode()


def option_default(tree: ast.Module, names: Sequence[str]) -> str | int | None:
    """The default of the first of these options that the program adds with argparse."""
    for call in _options(tree):
        written = {one.value for one in call.args if isinstance(one, ast.Constant)}
        if written & set(names):
            return next((_constant(word.value) for word in call.keywords if word.arg == "default"), None)
    return None


def declared(tree: ast.Module, names: Sequence[str]) -> str | None:
    """The first of these names that the program contains as a text, or as a field or variable."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    fields = {
        node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for name in names:
        plain = name.lstrip("-").replace("-", "_")
        if name in texts or plain in fields:
            return name
    return None


def _options(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and "add_argument" in (getattr(node.func, "attr", ""), getattr(node.func, "id", "")):
            yield node
