"""Injects faults into the built-in trainer, with a `sitecustomize` that affects only that
process."""

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
"""Each update leaks 8 MiB."""
TOO_LARGE = """
    plain = torch.nn.Embedding.forward
    def forward(self, ids):
        if len(ids) >= 10:
            torch.empty(1 << 46)
        return plain(self, ids)
    torch.nn.Embedding.forward = forward
"""
"""A micro-batch of ten or more requests more memory than the machine has."""

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TINY = [word for key, value in _SMALL.items() for word in ("--set", f"model.config.{key}={value}")]
"""Makes the model of the recipe first-run so small that its computing time is negligible."""


def inject(runs: Runs, fault: str, supervisor: str = "    pass") -> None:
    """Trainers that these runs start from now on have the fault, and supervisors the change."""
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
"""With a micro-batch of ten or more the optimizer step runs out of memory, which ends the
process."""

PACED = """
    import time
    from torch.optim.optimizer import register_optimizer_step_post_hook
    register_optimizer_step_post_hook(lambda *_: time.sleep(0.05))
"""
"""40 updates of a small model take 2 s and almost no CPU, so that a test can act before the end."""
BROKEN = """
    import os
    steps = [0]
    def break_weights(optimizer, *_):
        steps[0] += 1
        if steps[0] == 33 and os.environ["MEMTOP_ATTEMPT"] == "1":
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.add_(torch.randn_like(parameter))
    register_optimizer_step_post_hook(break_weights)
"""
"""After `PACED`: update 33 of the first attempt breaks the weights, so the loss jumps and stays
high."""
SOON_STALLED = """
    import memtop.supervisor.run.post_mortem.examine as stall
    stall.SECONDS = stall.FIRST_SECONDS = 1.5
    import functools
    from memtop.supervisor.run import supervisor
    from memtop.supervisor.run.stop_ladder import Waits
    short = Waits(graceful=1.5, interrupt=1.5, terminate=1.5)
    supervisor.Supervisor.__init__ = functools.partialmethod(supervisor.Supervisor.__init__, waits=short)
"""
"""A program that is silent after a message about memory is ended after seconds instead of
minutes."""

SLOW = """
    import time
    plain = torch.nn.Embedding.forward
    def forward(self, ids):
        if len(ids) >= 10:
            time.sleep(0.1)
        return plain(self, ids)
    torch.nn.Embedding.forward = forward
"""
"""A micro-batch of ten or more is so slow that a test can interrupt its trial."""
