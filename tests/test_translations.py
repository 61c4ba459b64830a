"""Every sentence that reaches a person has a Chinese translation.

The sentences are collected from the source: all text constants with more than one word. Chinese
texts keep Latin words that are names (`torch`, `LoRA`, `--batch`); a word that no translation keeps
is one that was not translated.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from memtop.cli import COMMANDS, run
from memtop.supervisor import language
from memtop.supervisor.language import Catalogue, read_catalogue
from tests.conftest import Runs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = read_catalogue("zh")
CHINESE = Catalogue(ENTRIES)
FOLDERS = ("memtop/cli", "presets", "supervisor", "train")
DATA = ROOT / "tests/diagnosis/data"


@pytest.fixture(autouse=True)
def in_english_again() -> Iterator[None]:
    yield
    language.use("en")


# --- the words that stay --------------------------------------------------------------------------

CODE = re.compile(r"`[^`]*`|(?<!\w)--?[\w-]+(?:[= ][A-Z]+)?|\{\d+[!#]?\}|~?/[\w/.*-]+|\$\{?\w+")
"""What is typed, paths, and parts that vary."""
LATIN = re.compile(r"[A-Za-z][A-Za-z_.-]*[A-Za-z]")
NAMES = {word for translation in ENTRIES.values() for word in LATIN.findall(CODE.sub("", translation))}
ORDINARY = """a about after all an and any are as at be been before but by can cannot could does done end ends error failed
first for found from give had has have how if in is it its last least left less may memory more most must needs newest no not
of on one only or other out over present read run runs saved set settings since so some started state than that the their
there these they this to too until update updates used was were what when where which while who with without you your
""".split()


def untranslated(text: str) -> list[str]:
    """The English words in a text that is shown in Chinese."""
    return [word for word in LATIN.findall(CODE.sub("", text)) if word not in NAMES]


def test_no_translation_has_ordinary_english_words() -> None:
    assert sorted(NAMES & set(ORDINARY)) == []


# --- the sentences --------------------------------------------------------------------------------

PATTERNS = {
    f"supervisor/diagnosis/{name}.py"
    for name in "aftermath allocator figures finding kills log memory_patterns other_patterns phase shortage translations".split()
}
"""Modules whose texts are what other programs print."""
NOT_SHOWN_BY = {"execute", "executemany", "executescript", "compile", "sub", "search", "findall", "match", "fullmatch"}
"""Functions whose texts are SQL or patterns."""
NOT_TEXT = re.compile(
    r"\s*(?:SELECT|INSERT|UPDATE [a-z]+|DELETE|CREATE|PRAGMA|BEGIN|CASE|LEFT JOIN|metrics AS m|json_extract|\(last IS)\b"
    r"|\(\{0\} AND NOT"
    r"|.*(?:\(\?[:!]|\\[ds.]|\| None$|<[/a-z])|\n(?:import|:root)|import |dict\[|<",
    re.DOTALL,
)
"""SQL, HTML, CSS, patterns, types, Python."""
TYPED = re.compile(r"(?:memtop|pip|vllm|export|set|du|chmod) [\w-]+|(?:set|export) \{0\}|--set (?:lora|python)")
"""Commands."""
EXAMPLES = {
    "{0} after {1}": "torchrun started the workers again (restart 1 of 3) after rank 1 died: 7",
    "{0} after rank {1} died: {2}": "torchrun started the workers again (restart 1) after rank 1 died: 7",
    "{0} {1} stopped (SIGSTOP or Ctrl-Z): `kill -CONT {2}` lets {3} continue": (
        "the program (pid 7) and ranks of it (pids 8, 9) are stopped (SIGSTOP or Ctrl-Z): `kill -CONT 7 8 9` lets them continue"
    ),
    "{0} and {1}": "7 contains 7, 7 and 7",
    "{0} need {1} GiB": "weights, gradients and optimizer need 7 GiB",
    "{0} of {1}": "4.0 GiB of 8.0 GiB",
    "attempt {0} {1} of {2}": "attempt 7 resumes at update 3 of 9",
    "in {0}": "in /tmp/7",
    " for {0}": "The GPU ran out of memory: it requested 2.00 GiB for the logits (B 1 x T 2 x V 3, fp32).",
    " or ": "7: it has no 7 or 7: the save was interrupted, or is not one to resume from",
    " and ": "line through peaks at B 2 and B 4",
    "stopped at": "stopped at update 7, not saved: the quota is used up",
    "{0} update {1}, not saved: {2}": "finished update 7, not saved: the quota is used up",
    "{0} and {1} more": "pid 7 (7) and 2 more",
}
"""Texts that are only a part of a sentence, each in one."""
NOT_SHOWN = {
    *(
        "Apple GPU (MPS)",
        "Stable Diffusion web UI",
        "Google Colab",
        "LoRA dropout",
        "{0}: on-oom",
        "{0} PiB",
        "{0} kWh",
        "{0} Wh",
    ),  # names
    *("{0} mig {1}", "index {0}", "apptainer {0}", "lightning %s", "transformers %s", "torch's DataLoader"),
    "run {0}",  # the name of a job
    *("{0} of an epoch", "of an epoch", "bar of {0}", "and evaluation"),  # keys of the shapes of lines
    *("Max address space", "Root Cause (first observed failure):", "Traceback (most recent call last)"),  # of other programs
    *("device-side assert triggered", "not_examined ({0})"),
    *("a Change as JSON", "{0} cannot become {1}", "check_request refuses external commands", "start comes first"),  # internal
    *("no rule for {0}", "there was no command to answer", "an update under ZeRO is never repeated", "tokens 1"),
    *("calls of backward", "batches of an update", "checked with the settings", "compiled anew", "parquet rows", "json lines"),
    # Lines in the output of the program.
    "\n[memtop removed the output from here on, to save disk space: a log keeps its first {0} MiB and its last {1} MiB]\n",
    *("update {0}  loss {1}  lr {2}  {3} samples/s", "update {0}  evaluation loss {1} over {2} samples"),
    *(", GPU {0} allocated {1}GB", " reserved {0}GB", "[memory - {0}] host {1}GB / {2}GB ({3})"),
    *("the agent's files are missing in ", "memtop: no reports from this process: %r\n"),
    *("memtop: {0}: waiting until another process has compiled it in {1}", "checkpoint at update {0}: {1} MiB in {2}"),
}


def sentences() -> Iterator[tuple[str, str]]:
    """Each text with more than one word, and its place; parts that vary are `{0}`, `{1}`, …"""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name in PATTERNS:
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            # The help of metrics is the same in every language, as the metrics are.
            roots = (
                [node for node in ast.walk(tree) if isinstance(node, ast.Raise)] if name.endswith("prometheus.py") else [tree]
            )
            for root in roots:
                yield from ((f"{name}:{line}", text) for line, text in _texts(root) if is_sentence(text))
            if folder == "memtop/cli":
                yield from ((name, text) for text in _helps(tree))
    for row in tomllib.loads((ROOT / "supervisor/recovery/advice.toml").read_text(encoding="utf-8"))["advice"]:
        yield from (("advice.toml", row[key]) for key in ("title", "why", "file") if " " in row.get(key, ""))


def is_sentence(text: str) -> bool:
    bare = re.sub(r"\{\d+\}", " ", text)
    return " " in text and LATIN.search(bare) is not None and not NOT_TEXT.match(text) and not TYPED.match(text)


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.JoinedStr):
        numbers = iter(range(99))
        parts = (one.value if isinstance(one, ast.Constant) else f"{{{next(numbers)}}}" for one in node.values)
        yield node.lineno, "".join(map(str, parts))
        for one in node.values:
            if isinstance(one, ast.FormattedValue):
                yield from _texts(one.value)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.lineno, node.value
    elif not (isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in NOT_SHOWN_BY):
        for child in ast.iter_child_nodes(node):
            is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if (
                not is_docstring
                and child is not getattr(node, "annotation", None)
                and child is not getattr(node, "returns", None)
            ):
                yield from _texts(child)


def _helps(tree: ast.AST) -> Iterator[str]:
    """The paragraphs of the help of commands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("click.command" in ast.unparse(one) for one in node.decorator_list):
            yield from (" ".join(paragraph.split()) for paragraph in (ast.get_docstring(node) or "").split("\n\n"))


def with_values(text: str) -> str:
    """The text with numbers where it varies. A part that is joined to a word is often empty."""
    text = re.sub(r"(?<=\})\{\d+\}|(?<=[A-Za-z])\{\d+\}|\{\d+\}(?=[A-Za-z])", "", re.sub("%[srd]", "79", text))
    return re.sub(r"\{(\d*)\}", r"7\1", text).replace("{:.0f}", "7")


def test_every_sentence_has_a_translation() -> None:
    left = []
    for place, text in sentences():
        if text in NOT_SHOWN:
            continue
        shown = with_values(EXAMPLES.get(text, text))
        # A text may stand before or after a number.
        if all(untranslated(CHINESE.translate(one)) for one in (shown, f"{shown} 7", f"7 {shown.lstrip()}")):
            left.append(f"{place}: {text!r} -> {CHINESE.translate(shown)!r}")
    assert left == []


def test_the_sentences_are_found() -> None:
    """The collector itself: it sees f-strings, parts of conditions, help and advice."""
    found = {text for _, text in sentences()}
    assert len(found) > 2000
    assert "killed by signal {0} ({1})" in found
    assert " at update {0}" in found
    assert "The exit status is 1 if something that memtop needs is missing." in found
    assert "more memory for the Slurm job" in found
    assert found >= {text for text in EXAMPLES if len(text) > 5}
    assert {text for text in NOT_SHOWN if " " in text} - found == set(), "dead exceptions"
