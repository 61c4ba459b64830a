"""Any strategy resumes from any other: in `make long` each is source and target once;
`bench/state_matrix.py` runs all pairs.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.train.launching import STRATEGIES, train_on
from tests.train.support import Training, edited

# (strategy, processes) in turn: a change from and to every strategy and both numbers of processes.
CHAIN = (
    ("plain", 1),
    ("zero2", 2),
    ("zero3-offload", 1),
    ("plain", 2),
    ("zero3", 2),
    ("zero2-offload", 1),
    ("zero3", 1),
)
SHORT = (("plain", 1), ("zero3", 2), ("zero2-offload", 1))
"""A state of whole tensors becomes one of parts, of two processes, and then one of one process."""
EACH = 3


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chain", [SHORT, pytest.param(CHAIN, marks=pytest.mark.long)], ids=["short", "whole"])
def test_changing_the_strategy_at_every_restart_does_not_change_training(
    chain: tuple[tuple[str, int], ...], tmp_path: Path
) -> None:
    whole = edited(batch=2, accumulation=4, target_samples=8 * EACH * len(chain), save_every=1000)
    undisturbed = Training(tmp_path / "undisturbed_state", whole)
    assert undisturbed.run() == "finished"
    losses, digests = [], []
    state = tmp_path / "train_latest_state"
    for number, (strategy, processes) in enumerate(chain):
        settings = msgspec.structs.replace(
            whole,
            zero=STRATEGIES[strategy],
            world_size=processes,
            accumulation=4 // processes,
            # In chunks here, whole in the run that it is compared with.
            loss_chunk=16,
        )
        report = train_on(tmp_path / str(number), state, settings, EACH)
        assert (report["strategy"], report["world_size"]) == (str(STRATEGIES[strategy]), processes)
        assert report["source"] == number * EACH
        # fp32 tensors are only moved, so nothing may change.
        assert report["differences"] == ({} if number == 0 else dict.fromkeys(("weight", "exp_avg", "exp_avg_sq", "step"), 0.0))
        losses += report["losses"]
        digests += report["digests"]
    assert digests == undisturbed.digests
    # Micro-batches and ranks are summed in another order: fp32 rounding, grown over 21 updates.
    assert losses == pytest.approx(undisturbed.losses, rel=1e-4)
