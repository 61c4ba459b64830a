"""The texts of screen and command line in Chinese: what the catalogue has, how it is looked up, and
what the reader sees."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import click
import msgspec
import pytest
from rich.cells import cell_len

from memtop.cli import run
from memtop.supervisor import language
from memtop.supervisor.language import Verbatim, language_of, wrapped_anywhere
from memtop.supervisor.language.catalogue import Catalogue, read_catalogue
from memtop.supervisor.run.record.ledger import Ledger
from tests.conftest import Runs
from tests.tui.test_runs import stored

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PART = re.compile(r"\{(\d+)[#!]?\}")
_WORDS = re.compile(r"[A-Za-z]{2}")


@pytest.fixture(autouse=True)
def in_english_again() -> Iterator[None]:
    yield
    language.use("en")


# --- the catalogue --------------------------------------------------------------------------------


def texts_of(path: Path) -> Iterator[str]:
    """All texts of a module, with `{0}`, `{1}`, … where they vary; also docstrings by paragraph."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
            yield from (" ".join(paragraph.split()) for paragraph in node.value.split("\n\n"))
            yield from node.value.split("\n")
        elif isinstance(node, ast.JoinedStr):
            parts = (one.value if isinstance(one, ast.Constant) else None for one in node.values)
            numbers = iter(range(99))
            yield "".join(str(one) if one is not None else f"{{{next(numbers)}}}" for one in parts)


def test_every_entry_translates_a_text_of_memtop() -> None:
    """An entry whose text was changed would be dead, and its text English again."""
    folders = [ROOT / folder for folder in ("memtop/cli", "presets", "supervisor", "train", "tui")]
    # click has texts of its own.
    modules = [*(path for folder in folders for path in folder.rglob("*.py")), *Path(click.__file__).parent.glob("*.py")]
    texts = {" ".join(text.split()) for path in modules for text in texts_of(path)}
    for path in (*(ROOT / "presets").rglob("*.toml"), ROOT / "supervisor/recovery/advice.toml"):
        texts |= {" ".join(text.split()) for text in strings_of(tomllib.loads(path.read_text(encoding="utf-8")))}
    texts |= {os.strerror(number) for number in errno.errorcode}
    texts |= {"Usage: ", "Options", "Options:", "Commands", "no ZeRO -> no ZeRO", *texts_of_msgspec()}
    known = "\n".join(text for text in texts if _WORDS.search(text))
    pieces = {piece for entry in read_catalogue("zh") for piece in literals(entry)} - texts
    assert [piece for piece in pieces if not is_put_together(piece, known)] == []


def texts_of_msgspec() -> Iterator[str]:
    """What it says of wrong values."""

    class Given(msgspec.Struct, forbid_unknown_fields=True):
        number: int
        word: Literal["a"] = "a"
        way: Literal["b"] | int = 0

    for value in ({}, {"number": 1, "x": 1}, {"number": "x"}, {"number": 1, "word": "x"}, {"number": 1, "way": "x"}):
        with pytest.raises(msgspec.ValidationError) as caught:
            msgspec.convert(value, Given)
        yield str(caught.value)


def is_put_together(text: str, known: str, *, parts: int = 3) -> bool:
    """Whether the text is a part of the known ones, or is joined from at most three parts of them:
    `best {0}`, ` at update {0}`."""
    if text in known:
        return True
    joints = [match.start() for match in re.finditer(r" |\b", text)] if parts > 1 else []
    return any(
        text[:at].rstrip() in known and is_put_together(text[at:].lstrip(), known, parts=parts - 1) for at in joints if at
    )


def strings_of(value: object) -> Iterator[str]:
    """All texts of a TOML file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from strings_of(one)


def literals(entry: str) -> list[str]:
    return [" ".join(part.split()) for part in PART.split(entry)[::2]]


def test_no_translation_asks_for_a_part_that_its_text_lacks() -> None:
    wrong = {
        english: translation
        for english, translation in read_catalogue("zh").items()
        if not set(PART.findall(translation)) <= set(PART.findall(english))
    }
    assert wrong == {}


# --- how it is looked up --------------------------------------------------------------------------

SMALL = Catalogue(
    {
        "training": "训练中",
        "killed by signal {0}": "被信号 {0} 终止",
        "update {0} of {1}": "共 {1} 步中的第 {0} 步",
        "{0} updates": "{0} 步",
        "saved": "已保存",
        "state": "状态",
        "the state is not complete: {0}": "状态不完整：{0}",
        "restart {0}": "重启 {0!}",
        "{0#} of {1#}": "{0} / {1}",
        "{0#} s": "{0} 秒",
        "{0} is too large": "{0}太大",
    }
)


@pytest.mark.parametrize(
    ("english", "shown"),
    [
        ("training", "训练中"),
        ("update 3 of 9", "共 9 步中的第 3 步"),
        ("  training ", "  训练中 "),
        ("✗ training", "✗ 训练中"),
        ("memtop: training", "memtop: 训练中"),
        ("killed by signal 9 (training)", "被信号 9 (训练中) 终止"),
        ("saved (3 updates)", "已保存 (3 步)"),
        ("training; saved, update 3 of 9", "训练中；已保存，共 9 步中的第 3 步"),
        ("the state is not complete: 3 updates", "状态不完整：3 步"),
        ("the state is not complete: no such file", "状态不完整：no such file"),
        ("training, my own words", "training, my own words"),
        ("qwen-sft; /data/run, a", "qwen-sft; /data/run, a"),
        ("16.6 / 20.0 GiB", "16.6 / 20.0 GiB"),
        ("training\nsaved", "训练中\n已保存"),
        ("restart training", "重启 training"),
        ("3.1 GiB of 1 520 GiB", "3.1 GiB / 1 520 GiB"),
        ("≥ 10 of –", "≥ 10 / –"),
        ("the end of training", "the end of training"),
        ("12 s", "12 秒"),
        ("– s", "– 秒"),
        ("1d 02:03:04 of 2d 00:00:00", "1d 02:03:04 / 2d 00:00:00"),
        ("? state is too large", "? 状态太大"),
        ("saved, 12 GiB, training", "已保存，12 GiB，训练中"),
    ],
)
def test_texts_are_found_whole_or_in_parts(english: str, shown: str) -> None:
    assert SMALL.translate(english) == shown


def test_what_is_not_memtops_is_never_translated() -> None:
    language.use("zh")
    assert language.tr("training") == "训练中"
    assert language.tr(Verbatim("training")) == "training"
    assert language.verbatim(None) is None
    assert language.tr(language.verbatim("training") or "") == "training"
    assert language.separator("; ") == "；"
    language.use("en")
    assert language.separator("; ") == "; "


def test_columns_keep_their_places() -> None:
    row = "name      state     training  x"
    shown = SMALL.translate(row)
    assert shown == "name      状态      训练中    x"
    assert [cell_len(shown[: shown.index(word)]) for word in ("状态", "训练中", "x")] == [
        row.index(w) for w in ("state", "tr", "x")
    ]


def test_chinese_is_wrapped_between_characters() -> None:
    text = "显存不足，请把 --batch 减半，再从检查点恢复。"
    lines = list(wrapped_anywhere(text, 16))
    assert all(cell_len(line) <= 16 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert not any(line.startswith(("，", "。")) for line in lines)
    assert any("--batch" in line for line in lines), "words stay whole"
    assert list(wrapped_anywhere("x" * 20, 16)) == ["x" * 16, "x" * 4]
    assert list(wrapped_anywhere("显存", 1)) == ["显", "存"], "a terminal may be narrower than one of them"


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": "C", "MEMTOP_LANG": "zh"}, "zh"),
    ],
)
def test_the_language_of_the_locale(environment: dict[str, str], found: str) -> None:
    assert language_of(environment) == found


# --- the command line -----------------------------------------------------------------------------


def test_lang_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ("--lang zh train --help", "train --lang=zh --help", "train --help --lang zh"):
        assert run(arguments.split()) == 0
        assert "选项" in capsys.readouterr().out
    assert run(["train", "--help"]) == 0
    assert "选项" not in capsys.readouterr().out, "the next command is in English again"
    assert run(["runs", "--lang", "xx"]) == 2
    assert capsys.readouterr().err == "memtop: --lang xx: unknown; there are en and zh\n"


def test_help_is_as_wide_as_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ([], ["train"], ["watch"], ["restart"]):
        assert run([*command, "--help", "--lang", "zh"]) == 0
        assert [line for line in capsys.readouterr().out.splitlines() if cell_len(line) > 80] == []


def test_documents_are_the_same_in_every_language(runs: Runs) -> None:
    runs.memtop("train", "--name", "a", "--headless", "--", "sh", "-c", "exit 3", status=1)
    runs.memtop("train", "--name", "b", "--headless", "--lang", "zh", "--", "sh", "-c", "exit 3", status=1)
    runs.wait("b", lambda document: document["supervisor_pid"] is None)
    commands = [("show", "a"), ("show", "b", "--metrics"), ("runs",), ("compare", "a", "b"), ("config",), ("presets",)]
    commands += [("presets", "low"), ("diagnose", "runs/a/attempts/0001/output.log")]
    for command in commands:
        shown = {lang: json.loads(runs.memtop(*command, "--json", "--lang", lang).stdout) for lang in ("en", "zh")}
        assert shown["en"] == shown["zh"], command
    # These have the time and the machine's memory in them.
    for command in (("doctor",), ("strays",), ("watch", "--once")):
        shown = {lang: runs.memtop(*command, "--json", "--lang", lang, status=None).stdout for lang in ("en", "zh")}
        assert not language.has_wide(shown["zh"]), command
        assert json.loads(shown["zh"]).__class__ is json.loads(shown["en"]).__class__
    assert "失败" in runs.memtop("show", "a", "--lang", "zh").stdout
    assert "失败" in runs.memtop("runs", "--lang", "zh").stdout
    assert "已失败" not in runs.memtop("runs").stdout


def test_the_configuration_and_the_terminal_choose_the_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "memtop").mkdir()
    (tmp_path / "memtop" / "config.toml").write_text('lang = "zh"\n')
    assert run(["--help"]) == 0
    assert "选项" in capsys.readouterr().out
    monkeypatch.setenv("MEMTOP_ASCII", "1")
    assert run(["--help"]) == 0
    assert "选项" not in capsys.readouterr().out, "a terminal that shows ASCII only"


# --- the README -----------------------------------------------------------------------------------


def test_the_chinese_readme_names_what_the_english_one_names() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    blocks = re.findall(r"```sh\n(.*?)```", chinese, re.DOTALL)
    assert len(blocks) == 3
    assert [block for block in blocks if block not in english] == []
    joined = " ".join(english.split())
    said = {code for code in re.findall(r"`([^`\n]+)`", chinese.replace("```", "")) if re.match(r"memtop |--", code)}
    assert len(said) > 30
    assert {code for code in said if code not in joined} == set()
    keys = [re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE) for section in (of_keys(english), of_keys(chinese))]
    assert keys[0] == keys[1]
    for link in re.findall(r"\]\((docs/[^)#]+)", chinese):
        assert (ROOT / link).exists(), link


def of_keys(readme: str) -> str:
    """The first table of keys."""
    return re.split(r"\n## ", readme[readme.index("| `f` |") :])[0].split("\n\n")[0]


def test_why_an_attempt_began_is_whole_in_chinese(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored(tmp_path, "tiny", 1_790_000_000.0)
    why = "spike of the loss at update 43: restart with leave_out 96-224, the state at update 38"
    with contextlib.closing(Ledger(folder.ledger_path)) as ledger:
        ledger.add_attempt(2, why, None, 1.0)
    assert run(["--lang", "zh", "show", "tiny", "--runs-dir", str(tmp_path)]) == 0
    assert "第 2 次尝试  第 43 步的损失突增：重启，用leave_out 96-224，第 38 步的状态：" in capsys.readouterr().out
