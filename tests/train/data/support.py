"""Small data files, and a tokenizer to read them with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.forking import Program

PAIR = ["prompt", "response"]
MEASURE_READING = """
import json, random, re, sys
from memtop.train.data.rows import open_rows
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
# What the libraries take once is not the file's.
open_rows(sys.argv[3], ["prompt", "response"]).row(0)
before = resident()
rows = open_rows(sys.argv[1], ["prompt", "response"], level=sys.argv[2])
peak, read = 0, 0
for index in random.Random(1).choices(range(len(rows)), k=1000):
    read += len(rows.row(index)["response"])
    peak = max(peak, resident())
print(json.dumps({"growth": peak - before, "read": read, "groups": getattr(rows, "groups_read", 0)}))
"""
# Line breaks as values: the library's templates drop one after a tag.
CHAT = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{{ ('</s>' if message['role'] == 'assistant' else '') + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def pair(number: int) -> dict[str, str]:
    """Row `number` of `write_pairs`."""
    return {"prompt": f"question {number}", "response": f"answer {number}"}


def write_lines(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


def write_pairs(path: Path, count: int, *, group: int, **columns: list[Any]) -> Path:
    """Rows "question N" and "answer N" in row groups of `group`."""
    values: dict[str, list[Any]] = {
        "prompt": [f"question {n}" for n in range(count)],
        "number": list(range(count)),
        "response": [f"answer {n}" for n in range(count)],
    }
    pq.write_table(pa.table(values | columns), path, row_group_size=group)
    return path


def write_long(path: Path, rows: int, length: int, group: int) -> Path:
    """Rows of random letters, which hardly compress: about rows x length bytes."""
    letters = np.random.default_rng(1).integers(97, 123, (rows, length), dtype=np.uint8)
    schema = pa.schema([("prompt", pa.string()), ("response", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, group):
            texts = [row.tobytes().decode() for row in letters[start : start + group]]
            prompts = [f"question {start + n}" for n in range(len(texts))]
            writer.write_table(pa.table({"prompt": prompts, "response": texts}), row_group_size=group)
    return path


def build_tokenizer(folder: Path, *, chat: bool = False, begin: bool = False, pad: bool = True) -> Path:
    """A tokenizer of single characters: <s> 0, </s> 1, <pad> 2, then printable ASCII and line
    breaks.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3}
    for character in ["\n", *map(chr, range(32, 127))]:
        vocabulary[character] = len(vocabulary)
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    if begin:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | ({"pad_token": "<pad>"} if pad else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    if chat:
        tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(str(folder))
    return folder


def at_once(code: str, *arguments: str) -> list[list[str]]:
    """Run code in two processes, which go on from their first `readline` together; the lines that
    each has printed."""
    command = [sys.executable, "-c", code, *arguments]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [Program(command, cwd=Path(__file__).parents[3], **streams) for _ in range(2)]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    found = [process.communicate(timeout=120)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    return found
