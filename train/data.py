"""Opens the data that a recipe names, and puts samples together into batches."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memtop.train.errors import BadInputError
from memtop.train.objective import IGNORED
from memtop.train.packed import PackedText, Sample

# Byte-level tokens: 0-255 are bytes, 256 begins a text, 257 ends it, 258 pads.
BEGIN, END, PAD = 256, 257, 258
VOCABULARY = 259
# Not the library proper: tests, bundled copies and what the user installed.
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}

Batch = dict[str, torch.Tensor]


def load_samples(data: dict[str, Any]) -> PackedText:
    """The data set that a recipe's `data` table names."""
    source = data.get("source")
    if source != "python-stdlib":
        raise BadInputError(f"data.source {source!r}: unknown; there is python-stdlib")
    texts = list(_stdlib_sources(int(data.get("max_bytes", 4_000_000))))
    if not texts:
        raise BadInputError(f"data.source python-stdlib: no sources found in {sysconfig.get_path('stdlib')}")
    return PackedText.of([byte_document(text) for text in texts])


def byte_document(text: bytes) -> np.ndarray:
    """A text as byte-level tokens, with its beginning and end marked."""
    return np.concatenate(([BEGIN], np.frombuffer(text, np.uint8), [END])).astype(np.int16)


def _stdlib_sources(max_bytes: int) -> Iterable[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    left = max_bytes
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT.intersection(path.relative_to(root).parts):
            continue
        if left <= 0:
            return
        text = path.read_bytes()[:left]
        left -= len(text)
        if text:
            yield text


def collate(samples: list[Sample], *, pad: int = PAD) -> Batch:
    """Pad to the longest: input_ids and attention_mask [b, t], labels [b, u] with IGNORED where there is only padding."""
    sequences = torch.nn.utils.rnn.pad_sequence
    ids = sequences([sample[0] for sample in samples], batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(sample[0]) for sample in samples])
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).long(),
        "labels": sequences([sample[1] for sample in samples], batch_first=True, padding_value=IGNORED),
    }
