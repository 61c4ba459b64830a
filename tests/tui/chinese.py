"""What the tests of the screens in Chinese share."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec
from rich.cells import cell_len

from memtop.presets import load_presets
from memtop.supervisor.language import tr
from memtop.supervisor.wire import Phase, Stage
from memtop.tui.app import DashboardApp
from memtop.tui.feed import LogLines
from tests.tui.support import screen_text

NAMES = re.compile(
    r"memtop|GPUs?|CPU|CUDA|cuda|MIG|UUID|ECC|PCIe|NVLink|NVIDIA|RTX|Xid|SM|BAR|k?Wh|MHz|[KMGT]?iB|B/s|ZeRO|LoRA|QLoRA"
    r"|RSS|OSC|DeepSpeed|Ctrl|shm|tmpfs|cgroup|pid|rank|tok|token|bf16|hub|Hugging|Face|HTML|SIG[A-Z]+|torch|torchrun|FILE|DIR|RUN|NAME"
    r"|Enter|Esc|Tab|PgUp|PgDn|Home|End|batch|accumulation|seq_len"
)
"""Names of things, units (a dialog may cut the first letter), keys, and the settings in a program's
own spelling."""
PHRASES = re.compile(
    r"`[^`]*`|--[a-z][\w.-]*(?:[ =][\w./]+)?|memtop [a-z]+(?: --[a-z-]+)*(?: [A-Za-z0-9]+)?|sample\.(?:prompts|every)\S*"
    r"|/dev/shm|docs/[a-z]+\.md|memory\.high|train_latest_state|expa\w*(?::\w*)?|ZeRO-\d(?: ?\+\w+)*|GPU-[\w-]+|[a-z]+:\w*"
    r"|vram>2g|-word|-job:old|\{name\}"
)
"""Options, commands and settings."""
PRESETS = tuple(load_presets())


@cache
def left_in_english(text: str, *names: str) -> list[str]:
    """The English words that a Chinese text still has."""
    for name in sorted((*PRESETS, *names), key=len, reverse=True):
        text = text.replace(name, " ")
    words = re.findall(r"[A-Za-z][A-Za-z_]+", PHRASES.sub(" ", text))
    return [word for word in words if NAMES.fullmatch(word) is None]


SIZES = ((160, 50), (80, 24))
FOREIGN = ("command", "job", "evidence", "name", "user", "device_name", "assignments")
"""Fields with names of other programs, and with quotes."""
STAND_IN = "监督进程的句子"


def readable(value: Any, field: str = "") -> Any:
    """The value with a stand-in for every sentence of the supervisor that has no translation, and
    for program output: other tests look at those."""
    if isinstance(value, msgspec.Struct):
        parts = {name: (getattr(value, name), readable(getattr(value, name), name)) for name in value.__struct_fields__}
        changed = {name: after for name, (before, after) in parts.items() if after is not before}
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        after = tuple(readable(one, field) for one in value)
        return after if any(a is not b for a, b in zip(after, value, strict=True)) else value
    if isinstance(value, dict):
        return {key: readable(one, field or key) for key, one in value.items()}
    if isinstance(value, LogLines):
        return LogLines(("一行",) * len(value.rows))
    if not isinstance(value, str) or isinstance(value, Phase | Stage) or " " not in value:
        return value
    if field in FOREIGN and not value.startswith("NVIDIA"):
        return "x1"
    if field in ("texts", "prompts"):
        return value
    return STAND_IN if left_in_english(tr(value)) else value


def check(app: DashboardApp, *names: str) -> None:
    """Nothing is in English, and every row is as wide as the terminal."""
    rows = screen_text(app).splitlines()  # type: ignore[arg-type]
    assert [row for row in rows if cell_len(row) != app.size.width] == []
    known = ("tiny-llama", "tiny", "ada", "root", "1g.10gb", "plan", *names)
    left = {row.strip(): words for row in rows if (words := left_in_english(row, *known))}
    assert left == {}, left


def columns_of(text: str) -> list[str]:
    """The character in each cell; empty in the second cell of a wide one."""
    return [part for character in text for part in (character, *[""] * (cell_len(character) - 1))]
