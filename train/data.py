"""Text that every machine has, as byte-level tokens cut into samples.

Token ids: 0-255 are bytes, 256 begins a file, 257 ends it, 258 pads. A sample is a stretch of at most T tokens of one file;
the tail of a file is shorter, so samples differ in length and losses must be weighted by tokens.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from memtop.train.errors import BadInputError

BEGIN, END, PAD = 256, 257, 258
VOCABULARY = 259
IGNORED = -100
"""Label of positions that do not count, as torch's cross entropy has it."""
# Not the library proper: tests, bundled copies and what the user installed.
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


class ByteSamples(Dataset[torch.Tensor]):
    """Samples of up to `seq_len` tokens; item i is a tensor of shape [length_i], dtype int64."""

    def __init__(self, files: Iterable[bytes], seq_len: int) -> None:
        self.seq_len = seq_len
        pieces = [np.concatenate(([BEGIN], np.frombuffer(text, np.uint8), [END])).astype(np.int16) for text in files]
        starts, lengths, base = [], [], 0
        for piece in pieces:
            # A sample of one token predicts nothing.
            offsets = np.arange(0, len(piece) - 1, seq_len)
            starts.append(base + offsets)
            lengths.append(np.minimum(seq_len, len(piece) - offsets))
            base += len(piece)
        self._tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int16)
        self._starts = np.concatenate(starts) if starts else np.empty(0, np.int64)
        self._lengths = np.concatenate(lengths) if lengths else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = self._starts[index]
        return torch.from_numpy(self._tokens[start : start + self._lengths[index]].astype(np.int64))

    def label_tokens(self, indices: Sequence[int]) -> int:
        """How many tokens of these samples are predicted (each but the first), known without reading them."""
        return int(self._lengths[np.asarray(indices, dtype=np.int64)].sum()) - len(indices)


def load_samples(data: dict[str, Any], seq_len: int) -> ByteSamples:
    """The samples that a recipe's `data` table names."""
    source = data.get("source")
    if source != "python-stdlib":
        raise BadInputError(f"data.source {source!r}: unknown; there is python-stdlib")
    samples = ByteSamples(_stdlib_sources(int(data.get("max_bytes", 4_000_000))), seq_len)
    if not len(samples):
        raise BadInputError(f"data.source python-stdlib: no sources found in {sysconfig.get_path('stdlib')}")
    return samples


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


def collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad to the longest: tokens [b, t] and labels [b, t], where labels of padding are IGNORED."""
    tokens = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PAD)
    labels = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=IGNORED)
    return tokens, labels
