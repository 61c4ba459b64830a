"""Injects faults into the built-in trainer: a `sitecustomize` that takes effect in that process only."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Runs

_TRAINER = """
import sys
if "memtop.train" in sys.orig_argv:
    import torch
"""
_SUPERVISOR = """
if "memtop.supervisor" in sys.orig_argv:
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


def inject(runs: Runs, fault: str, supervisor: str = "    pass") -> None:
    """From now on, trainers that these commands start have the fault, and supervisors the change."""
    folder = Path(runs.root) / "site"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_TRAINER + fault + _SUPERVISOR + supervisor)
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

PACED = """
    import time
    from torch.optim.optimizer import register_optimizer_step_post_hook
    register_optimizer_step_post_hook(lambda *_: time.sleep(0.05))
"""
"""A model so small that its run would be over before anybody could act on it takes 2 s for 40 updates, and next to no CPU."""
SOON_STALLED = """
    import memtop.supervisor.run.post_mortem.examine as stall
    stall.SECONDS = stall.FIRST_SECONDS = 3.0
    import functools
    from memtop.supervisor.run import supervisor
    from memtop.supervisor.run.stop_ladder import Waits
    short = Waits(graceful=4, interrupt=4, terminate=4)
    supervisor.Supervisor.__init__ = functools.partialmethod(supervisor.Supervisor.__init__, waits=short)
"""
"""A program that is silent after words of missing memory is ended after seconds, and has seconds to react to each signal."""

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
