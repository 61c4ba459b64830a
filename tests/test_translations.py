"""Every sentence that reaches a person has a Chinese translation.

The sentences are collected from the source: all text constants with more than one word. Chinese
texts keep Latin words that are names (`torch`, `LoRA`, `--batch`); a word that no translation keeps
is one that was not translated.
"""

from __future__ import annotations

import ast
import html
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from memtop.cli import COMMANDS, run
from memtop.cli import diagnose as diagnose_command
from memtop.presets import load_presets, load_recipes, resolve
from memtop.presets.comparison import pace
from memtop.supervisor import language, units
from memtop.supervisor.diagnosis.diagnose import diagnose
from memtop.supervisor.diagnosis.values import Evidence, Kind
from memtop.supervisor.language import Verbatim
from memtop.supervisor.language.catalogue import Catalogue, read_catalogue
from memtop.supervisor.recovery.external import remedies_for_command
from memtop.supervisor.run.processes.host_memory import ROLES
from memtop.supervisor.run_memory import RoleMemory
from tests.conftest import Runs
from tests.recovery.injected import PACED, TINY, TOO_LARGE, inject

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

CODE = re.compile(r"`[^`]*`|(?<!\w)--?[\w-]+(?:[= ][A-Z]+)?|\{\d+[!#]?\}|~?/[\w/.*-]+|\b[a-z]+[:>]\w+|\$\{?\w+")
"""What is typed, paths, and parts that vary."""
LATIN = re.compile(r"[A-Za-z][A-Za-z_.-]*[A-Za-z]")
NAMES = {word for translation in ENTRIES.values() for word in LATIN.findall(CODE.sub("", translation))}
ORDINARY = re.findall(
    r"\w+",
    """
    a about after all an and any are as at be been before but by can cannot could does done end ends error
    failed first for found from give had has have how if in is it its last least left less may memory more
    most must needs newest no not of on one only or other out over present read run runs saved set settings
    since so some started state than that the their there these they this to too until update updates used was
    were what when where which while who with without you your
    """,
)


def untranslated(text: str) -> list[str]:
    """The English words in a text that is shown in Chinese."""
    return [word for word in LATIN.findall(CODE.sub("", text)) if word not in NAMES]


def test_no_translation_has_ordinary_english_words() -> None:
    assert sorted(NAMES & set(ORDINARY)) == []


# --- the sentences --------------------------------------------------------------------------------

PATTERNS = {
    f"supervisor/diagnosis/{name}.py"
    for name in re.findall(
        r"\w+", "aftermath allocator figures finding kills log memory_patterns other_patterns phase shortage translations"
    )
}
"""Modules whose texts are what other programs print."""
NOT_SHOWN_BY = {"execute", "executemany", "executescript", "compile", "sub", "search", "findall", "match", "fullmatch"}
"""Functions whose texts are SQL or patterns."""
NOT_TEXT = re.compile(
    r"\s*(?:SELECT|INSERT|UPDATE [a-z]+|DELETE|CREATE|PRAGMA|BEGIN|CASE|LEFT JOIN|metrics AS m|json_extract|\(last IS)\b"
    r"|\(\{0\} AND NOT|(?:#compdef |function )?%\((?:complete_func|prog_name)\)s"
    r"|.*(?:\(\?[:!]|\\[ds.]|\| None$|<[/a-z])|\n(?:import|:root)|import |dict\[|<|new MutationObserver|default-src",
    re.DOTALL,
)
"""SQL, scripts of shells, HTML, CSS, patterns, types, Python."""
TYPED = re.compile(r"(?:memtop|pip|vllm|export|set|du|chmod) [\w-]+|(?:set|export) \{0\}|--set (?:lora|python)")
"""Commands."""
EXAMPLES = {
    "{0} after {1}": "torchrun started the workers again (restart 1 of 3) after rank 1 died: 7",
    "{0} after rank {1} died: {2}": "torchrun started the workers again (restart 1) after rank 1 died: 7",
    "{0} {1} stopped (SIGSTOP or Ctrl-Z): `kill -CONT {2}` lets {3} continue": (
        "the program (pid 7) and ranks of it (pids 8, 9) are stopped (SIGSTOP or Ctrl-Z): `kill -CONT 7 8 9` lets them continue"
    ),
    "{0} and {1}": "7 contains 7, 7 and 7",
    "{0} need {1}": "weights, gradients and optimizer need 7 GiB",
    "{0} of {1}": "4.0 GiB of 8.0 GiB",
    "attempt {0} {1} of {2}": "attempt 7 resumes at update 3 of 9",
    "{0} N is the number of a configuration.": "N is the number of a configuration.",
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
    *("llamafactory-cli train", "trl sft"),
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
    "wait for the end of the program, then conclude the run",  # internal
    *("a Change as JSON", "{0} cannot become {1}", "check_request refuses external commands", "start comes first"),  # internal
    *("no rule for {0}", "there was no command to answer", "an update under ZeRO is never repeated", "tokens 1"),
    *("calls of backward", "batches of an update", "checked with the settings", "compiled anew", "parquet rows", "json lines"),
    # Lines in the output of the program.
    "\n[memtop removed the output from here on, to save disk space: a log keeps its first {0} MiB and its last {1} MiB]\n",
    *("update {0}  loss {1}  lr {2}  {3} samples/s", "update {0}  evaluation loss {1} over {2} samples"),
    *(", GPU {0} allocated {1} GiB", ", reserved {0} GiB", "[memory - {0}] host {1} / {2} GiB ({3})"),
    *("the agent's files are missing in ", "memtop: no reports from this process: %r\n"),
    *("memtop: {0}: waiting until another process has compiled it in {1}", "checkpoint at update {0}: {1} in {2}"),
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


def test_a_wrong_setting_is_refused_in_chinese_as_a_whole() -> None:
    """The field and its value stand before the sentence, which may have several clauses."""
    texts = []
    for path in sorted((ROOT / "presets").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "SettingsError" and len(node.args) == 3:
                texts += [text for _, text in list(_texts(node.args[2]))[:1] if is_sentence(text)]
    assert len(texts) > 30
    shown = [CHINESE.translate(f"zero.stage 'x': {with_values(text)}") for text in texts]
    assert [text for text in shown if untranslated(text)] == []
    assert CHINESE.translate("precision 'b16': Invalid enum value 'b16'; there are auto, bf16 (did you mean bf16?)") == (
        "precision 'b16'：无效的值 'b16'；可用 auto, bf16（是不是 bf16？）"
    )


def test_labels_of_settings_in_a_sentence_are_translated_and_listed_as_words() -> None:
    before = resolve(load_recipes()["first-run"], preset=load_presets()["standard"], whole=False)
    both = replace(before, workers=before.workers + 1, host_level="low" if before.host_level != "low" else "extreme")
    (slow,), (chunk,) = (pace(before, after).basis for after in (both, replace(before, loss_chunk=7)))
    assert CHINESE.translate(slow) == "不知道改变工作进程、主机内存后数据是否仍来得及"
    assert CHINESE.translate(chunk) == "不知道换损失分块后的速度"


def test_amounts_of_memory_are_in_gib_and_only_cards_are_named_in_gb() -> None:
    texts = [*ENTRIES, *ENTRIES.values(), *(path.read_text("utf-8") for path in (ROOT / "presets").rglob("*.toml"))]
    named = [line for text in texts for line in text.splitlines() if re.search(r"\bGB\b", line)]
    assert any("T5 on 20 GB GPUs" in line for line in named), "the texts are read"
    assert [line for line in named if re.search(r"\d+ ?GB(?! GPU)|(?<!\d )GB\b", line)] == []


def test_the_sentences_are_found() -> None:
    """The collector itself: it sees f-strings, parts of conditions, help and advice."""
    found = {text for _, text in sentences()}
    assert len(found) > 2000
    assert "ended by signal {0} ({1})" in found
    assert " at update {0}" in found
    assert "The exit status is 1 if something that memtop needs is missing." in found
    assert "more memory for the Slurm job" in found
    assert found >= {text for text in EXAMPLES if len(text) > 5}
    assert {text for text in NOT_SHOWN if " " in text} - found == set(), "dead exceptions"


COMPOSED = {
    "asked to finish the update, save and exit; SIGTERM follows in 108 s (it has been silent for up to 24 s)": (
        "已要求完成当前一步，保存并退出；108 秒后发送 SIGTERM（它最长有 24 秒没有动静）"
    ),
    "The program says that the GPU ran out of memory: it requested 2.00 GiB. The process has reported no GPU: only the words "
    "of its error name one.": "程序称 GPU 内存耗尽：请求 2.00 GiB。该进程没有报告任何 GPU：只有错误信息的文字提到 GPU。",
    "rank 0, update 3, in the forward pass": "rank 0，第 3 步，前向传播时",
    "out of memory (rank 0, in the forward pass with batch 8 x 2): CUDA out of memory. Tried to allocate 2 GiB; "
    "the same samples are done again in smaller pieces": (
        "内存耗尽（rank 0，前向传播时，批 8 x 2）：CUDA out of memory. Tried to allocate 2 GiB；同样的样本分成更小的块重做"
    ),
    "run f: killed (ended by signal 9 (SIGKILL)); memtop show f": "运行 f：被终止 (被信号 9 结束（SIGKILL）)；memtop show f",
    "failed: exit status 1: EOFError: EOF when reading a line; under memtop the input of a program is empty": (
        "已失败：退出状态 1：EOFError: EOF when reading a line；在 memtop 下程序的输入是空的"
    ),
    "failed: exit status 1: KeyError: 'labels'": "已失败：退出状态 1：KeyError: 'labels'",
    "The program raised an exception: ValueError: bad row.": "程序抛出了异常：ValueError: bad row。",
    "GPU 0 ran out of memory in the loss: it requested 1.23 GiB, 1.06 GiB was free of 8.00 GiB; the process held 6.50 GiB "
    "(81.2 %). This is a guess: no known message says it.": (
        "GPU 0 计算损失时内存耗尽：请求 1.23 GiB，空闲 1.06 GiB，共 8.00 GiB；进程占用 6.50 GiB (81.2 %)。"
        "这是猜测：没有已知的消息说明这一点。"
    ),
    "attempt 2: restart with batch 4, accumulation 8, max_updates 9; training is unchanged": (
        "第 2 次尝试：重启，用批大小 4，累积 8，max_updates 9；训练不变"
    ),
    "attempt 3: restart with the settings of configuration 1; training is unchanged": (
        "第 3 次尝试：重启，用配置 1 的设置；训练不变"
    ),
    "restarting from the program's checkpoint at update 7, or a newer one; 3 updates since update 7 are done again; "
    "batch 8 x 4 -> 4 x 8: the effective batch stays 32, and so do order and learning rate": (
        "正在从程序第 7 步的检查点或更新的检查点重启；第 7 步之后的 3 步要重做；"
        "批 8 x 4 -> 4 x 8：有效批大小保持 32，顺序和学习率也不变"
    ),
    "checkpoint at update 8: 15 MiB in 0.3 s, training stopped for 0.1 s": (
        "检查点（第 8 步）：15 MiB，用时 0.3 秒，训练停顿 0.1 秒"
    ),
    "checkpoint at update 8: 15 MiB in < 0.1 s, training stopped for < 0.1 s": (
        "检查点（第 8 步）：15 MiB，用时 < 0.1 秒，训练停顿 < 0.1 秒"
    ),
    "SIGINT sent to pid 12 (python), pid 13 (sh); SIGTERM follows in 30 s": (
        "已发送 SIGINT：pid 12（python），pid 13（sh）；30 秒后发送 SIGTERM"
    ),
    "memtop is not inside the program: the step is read from its output, and more is not known: "
    "memtop sees no Python process of it; one in a container or on another machine cannot report": (
        "memtop 不在程序之内：训练步从输出读取，其他未知：memtop 看不到它的 Python 进程；容器里或另一台机器上的进程不能报告"
    ),
    "preset standard: 13.20 GiB of GPU memory free, weights, gradients and optimizer need 3.10 GiB": (
        "预设 standard：空闲显存 13.20 GiB，权重、梯度和优化器需要 3.10 GiB"
    ),
    "GPU 0 allocated by rank 0 grows by 3.0 MiB per update (1.0 MiB/s), without a fall for 40 updates: "
    "GPU 0 is full in 12 min, at update 500": (
        "rank 0 在 GPU 0 上分配的显存 增长：每步 3.0 MiB（每秒 1.0 MiB），40 步内没有下降：GPU 0 将在 12 分后满，在第 500 步"
    ),
    "predicted peak 3.0 GiB of 20.0 GiB (15.0 %, safe): line through peaks at B 2 and B 4": (
        "预测峰值 3.0 GiB / 20.0 GiB（15.0 %，安全）：过以下峰值的直线：B 2、B 4"
    ),
    "Go back to the state of update 38, without the 32 samples of the updates 40 to 43.": (
        "回到第 38 步的状态，不含第 40 到 43 步的 32 个样本。"
    ),
    "update 43: the loss rose from 2 to 9 at update 41 and stayed high; the run goes back to the state of update 38, "
    "without the 32 samples of the updates 40 to 43": (
        "第 43 步：损失在第 41 步从 2 升到 9，之后居高不下；运行回到第 38 步的状态，不含第 40 到 43 步的 32 个样本"
    ),
    "  1. more memory for the Slurm job": "  1. 给 Slurm 作业更多内存",
    "the state of memtop": "the state of memtop",
}
"""Sentences that code puts together from several texts."""


@pytest.mark.parametrize("english", COMPOSED)
def test_composed_sentences(english: str) -> None:
    assert CHINESE.translate(english) == COMPOSED[english]


# --- what a person sees ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_in_chinese(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*([command] if command else []), "--help", "--lang", "zh"]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall("[\u4e00-\u9fff]", shown)) > 30
    # Without what is typed: options, arguments, names of commands.
    lines = [
        re.sub(r"^  (?:-|[a-z0-9_-]+  |memtop ).*?(?:  |$)", "", line)
        for line in shown.splitlines()
        if not line.startswith("用法")
    ]
    assert {
        line: left for line in lines if (left := [w for w in untranslated(line) if not w.isupper() and w not in COMMANDS])
    } == {}


OUT_OF_MEMORY = """
import sys
for step in range(1, 6):
    print(f"step {step}/100 loss {3 - step / 10:.3f}", flush=True)
sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.23 GiB. GPU 0 has a total capacity of 19.58 GiB of "
         "which 1.06 GiB is free. Including non-PyTorch memory, this process has 18.50 GiB memory in use.")
"""
SLOW = "import time\nfor n in range(1, 9999): print(f'step {n}/9999 loss {9 / n:.4f}', flush=True); time.sleep(0.1)"
SHOWN_AS_IT_IS = re.compile(
    r"证据|程序  |目录  |训练用|\.pid|pid \d|torch\.OutOfMemoryError|gpu_oom|enforce fail|^exit status|memtop report|```"
    r"|^\| (命令|系统|软件包|环境变量|memtop 设置的环境变量) \|"
)
"""Lines with texts of programs, paths, or names of settings."""


def test_runs_are_shown_in_chinese(runs: Runs) -> None:
    """A run that fails, one that runs out of memory, one that is restarted with another split, one
    that survives a lack of memory and is stopped, and a program that is stopped."""
    (runs.root / "oom.py").write_text(OUT_OF_MEMORY)
    told = runs.root / "told"
    runs.environment["MEMTOP_NOTIFY_COMMAND"] = f'echo "$MEMTOP_NOTICE_TEXT" >> {told}'
    shown = [runs.memtop("train", "--name", "a", "--headless", "--lang", "zh", "--", "sh", "-c", "exit 3", status=1)]
    oom = ("--name", "o", "--headless", "--lang", "zh", "--", sys.executable, "oom.py")
    shown.append(runs.memtop("train", *oom, status=1))
    shown.append(runs.memtop("restart", "o", "--headless", "--lang", "zh", status=1))
    small = ("first-run", "--name", "f", "--headless", "--max-updates", "2", *TINY)
    shown.append(runs.memtop("train", *small, "--lang", "zh"))
    split = ("--batch", "4", "--accum", "8", "--max-updates", "3")
    shown.append(runs.memtop("restart", "f", *split, "--headless", "--lang", "zh"))
    runs.memtop("train", "--name", "p", "--detach", "--", sys.executable, "-c", SLOW)
    runs.wait("p", lambda run: run["updates"])
    shown.append(runs.memtop("stop", "p", "--lang", "zh"))
    inject(runs, TOO_LARGE + PACED)
    lasting = (*TINY, "--name", "s", "--detach", "--set", "batch=16", "--max-updates", "200000")
    shown.append(runs.memtop("train", "first-run", *lasting, "--lang", "zh"))
    runs.wait("s", lambda run: (run["updates"] or 0) >= 3)
    shown.append(runs.memtop("restart", "s", "--set", "learning_rate=0.001", "--detach", "--lang", "zh"))
    runs.wait("s", lambda run: len(run["attempts"]) == 2 and run["state"] == "training")
    shown.append(runs.memtop("stop", "s", "--lang", "zh"))
    for command in (
        *(("show", name) for name in "aofps"),
        *(("report", name, "--markdown", "-") for name in "aofps"),
        ("compare", "f", "s"),
        ("compare", "o", "p"),
        ("runs",),
    ):
        shown.append(runs.memtop(*command, "--lang", "zh"))
    lines = [
        line for one in shown for line in html.unescape(one.stdout + one.stderr).splitlines() if not SHOWN_AS_IT_IS.search(line)
    ]
    assert len(lines) > 80
    named = {*"aofps", "sh", "oom.py", "first-run", "python", *COMMANDS}
    # Levels of host memory, on a machine with little of it.
    named |= {"standard", "low", "extreme"}
    # Names of settings have a dot or an underscore.
    allowed = re.compile(r"\w+[._][\w.]+")
    words = {line: [one for one in untranslated(line) if one not in named and not allowed.fullmatch(one)] for line in lines}
    assert {line: left for line, left in words.items() if left} == {}
    # Records are the same in every language; the report that the run wrote is in that of the run.
    assert not language.has_wide(runs.memtop("show", "o", "--json", "--lang", "zh").stdout)
    assert not any(language.has_wide(event.message) for event in runs.events("o", "failed"))
    assert "退出状态 3" in told.read_text(encoding="utf-8"), "notifications are in the language of the run, too"
    assert "失败的原因" in (runs.path / "o" / "report.md").read_text(encoding="utf-8")


def test_diagnoses_are_in_chinese() -> None:
    """Every log of the tests: the lines of memtop, without what the program printed."""
    language.use("zh")
    own, left = 0, {}
    for record in map(json.loads, (DATA / "failure_logs.jsonl").read_text(encoding="utf-8").splitlines()):
        diagnosis = diagnose([record["text"].encode()], Evidence(exit_status=record["exit_code"]))
        for line in diagnose_command._text(diagnosis, remedies_for_command(diagnosis)):
            if isinstance(line, Verbatim) or diagnosis.kind is Kind.NOT_MEMORY or line.startswith("Environment:"):
                continue
            own += 1
            words = [word for word in untranslated(language.tr(line)) if word not in ("TiB", "PiB")]
            left |= {line: words} if words else {}
    assert own > 1000
    assert left == {}


def test_the_memory_of_each_role_is_in_chinese() -> None:
    roles = [RoleMemory(role=role, processes=number, pss_bytes=5 << 20) for role in ROLES for number in (1, 2)]
    parts = ", ".join(f"{role.words} {units.size(role.pss_bytes)}" for role in roles)
    shown = CHINESE.translate(f"memory      50.0 MiB RAM: {parts}")
    assert shown.startswith("内存        50.0 MiB 内存：1 个启动器 5 MiB，2 个启动器 5 MiB，1 个 rank 5 MiB，")
    assert shown.endswith("，2 个其他进程 5 MiB，1 个 memtop 进程 5 MiB，2 个 memtop 进程 5 MiB")
    assert CHINESE.translate("2 other") == "2 个其他进程"
    assert [CHINESE.translate(units.processes(number)) for number in (1, 3)] == ["1 个进程", "3 个进程"]
