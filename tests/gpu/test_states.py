"""States on a GPU: plain, ZeRO with and without offload, and 8 bits resume from each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.train.launching import STRATEGIES, train_on
from tests.train.support import edited

# Strategy and optimizer in turn; on one process, because there is one GPU.
CHAIN = (
    ("plain", "adamw"),
    ("zero2", "adamw"),
    ("zero3-offload", "adamw"),
    ("plain", "adamw_8bit"),
    ("zero3", "adamw"),
    ("zero2-offload", "adamw"),
    ("plain", "paged_adamw_8bit"),
    ("plain", "adamw"),
)
EACH = 3
EXACT = ("weight", "exp_avg", "exp_avg_sq", "step")
Note = Any


@pytest.mark.timeout(900)
def test_every_strategy_resumes_from_the_one_before(tmp_path: Path, device: str, record_property: Note) -> None:
    settings = edited(
        batch=2, accumulation=4, target_samples=8 * EACH * len(CHAIN), save_every=1000, device=device, learning_rate=1e-3
    )
    state, rows, before = tmp_path / "train_latest_state", [], "adamw"
    for number, (strategy, optimizer) in enumerate(CHAIN):
        changed = msgspec.structs.replace(settings, zero=STRATEGIES[strategy], optimizer=optimizer)
        report = train_on(tmp_path / str(number), state, changed, EACH)
        rows.append({"strategy": report["strategy"], "optimizer": optimizer, **report})
        assert (report["strategy"], report["source"]) == (str(STRATEGIES[strategy]), number * EACH)
        if number and optimizer == before == "adamw":
            # fp32 tensors are only moved, so nothing may change.
            assert report["differences"] == dict.fromkeys(EXACT, 0.0)
        before = optimizer
    record_property("rows", rows)
    whole = train_on(tmp_path / "whole", tmp_path / "whole_state", settings, EACH * len(CHAIN))
    losses = [loss for row in rows for loss in row["losses"]]
    record_property("losses_of_one_run", whole["losses"])
    assert [digest for row in rows for digest in row["digests"]] == whole["digests"]
    # 8 bits round the moments; until then it is another order of sums.
    assert losses[: 3 * EACH] == pytest.approx(whole["losses"][: 3 * EACH], rel=1e-3)
    assert losses == pytest.approx(whole["losses"], rel=0.03)


@pytest.mark.parametrize("strategy", ["zero2", "zero2-offload", "zero3", "zero3-offload"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_zero_trains_in_half_precision(
    tmp_path: Path, device: str, strategy: str, precision: str, record_property: Note
) -> None:
    if device == "cpu" and precision == "fp16":
        pytest.skip("fp16 needs a GPU")
    if device == "cpu" and strategy != "zero2":
        pytest.skip("one is enough for a rehearsal")
    settings = edited(target_samples=8 * 12, precision=precision, device=device, zero=STRATEGIES[strategy], save_every=1000)
    losses = train_on(tmp_path / "run", tmp_path / "train_latest_state", settings, 12)["losses"]
    record_property("losses", losses)
    assert sum(losses[-3:]) < sum(losses[:3])
