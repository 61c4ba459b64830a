"""Injects faults into the built-in trainer: a `sitecustomize` that takes effect in that process only."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Runs

_TRAINER = """
import sys
if "memtop.train" in sys.orig_argv:
    import torch
"""
LEAK = """
    from torch.optim.optimizer import register_optimizer_step_post_hook
    kept = []
    register_optimizer_step_post_hook(lambda *_: kept.append(bytearray(b"x") * (8 << 20)))
"""
"""8 MiB more after each update."""
TOO_LARGE = """
    plain = torch.nn.Embedding.forward
    def forward(self, ids):
        if len(ids) >= 10:
            torch.empty(1 << 46)
        return plain(self, ids)
    torch.nn.Embedding.forward = forward
"""
"""A micro-batch of ten and more asks for more memory than there is."""

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TINY = [word for key, value in _SMALL.items() for word in ("--set", f"model.config.{key}={value}")]
"""The first run's model so small that an update takes little more than its bookkeeping."""


def inject(runs: Runs, fault: str) -> None:
    """From now on, trainers that these commands start have the fault."""
    folder = Path(runs.root) / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_TRAINER + fault)
    runs.environment["PYTHONPATH"] = str(folder)


FATAL = """
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    plain, seen = torch.nn.Embedding.forward, [0]
    def forward(self, ids):
        seen[0] = len(ids)
        return plain(self, ids)
    torch.nn.Embedding.forward = forward
    register_optimizer_step_pre_hook(lambda *_: torch.empty(1 << 46) if seen[0] >= 10 else None)
"""
"""With a micro-batch of ten and more the optimizer's step asks for too much: nothing to be survived in the process."""

SLOW = """
    import time
    plain = torch.nn.Embedding.forward
    def forward(self, ids):
        if len(ids) >= 10:
            time.sleep(0.1)
        return plain(self, ids)
    torch.nn.Embedding.forward = forward
"""
"""A micro-batch of ten and more takes so long that a trial of it can be disturbed before it is over."""
