"""Every strategy resumes from every other: all pairs of plain, ZeRO-2 and 3, with and without
offload, on 1 and 2 processes.

    python -m bench.state_matrix [--precision bf16]

Each source trains 6 updates and saves. Each target resumes that state, is compared with it tensor
by tensor, and trains 10 more updates. `loss_difference` is the largest relative difference of those
10 losses from an uninterrupted run.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.common import report
from tests.train.launching import STRATEGIES, train_on
from tests.train.support import edited

BEFORE, AFTER = 6, 10
KINDS = ("weight", "exp_avg", "exp_avg_sq", "step")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="fp32")
    precision = parser.parse_args().precision
    base = edited(batch=2, accumulation=4, target_samples=8 * (BEFORE + AFTER), save_every=1000, precision=precision)
    configurations = list(itertools.product(STRATEGIES, (1, 2)))
    with tempfile.TemporaryDirectory(prefix="memtop-matrix-") as name:
        folder = Path(name)
        reference = train_on(folder / "reference", folder / "reference_state", base, BEFORE + AFTER)["losses"][BEFORE:]
        rows = []
        for source in configurations:
            state = folder / "-".join(map(str, source))
            train_on(folder / "source", state, of(base, *source), BEFORE)
            rows += [resume(folder, state, base, source, target, reference) for target in configurations]
    worst = {kind: max(row["differences"][kind] for row in rows) for kind in KINDS}
    report(
        "state_matrix",
        {
            "precision": precision,
            "pairs": len(rows),
            "largest_tensor_difference": worst,
            "largest_loss_difference": max(row["loss_difference"] for row in rows),
            "rows": rows,
        },
    )


def resume(folder: Path, state: Path, base: Any, source: Any, target: Any, reference: list[float]) -> dict[str, Any]:
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(state, copy)
    found = train_on(folder / "target", copy, of(base, *target), AFTER)
    difference = max(abs(a - b) / b for a, b in zip(found["losses"], reference, strict=True))
    print(f"{source} -> {target}: {difference:.2g} {found['differences']}", file=sys.stderr, flush=True)
    return {
        "from": f"{source[0]} x {source[1]}",
        "to": f"{target[0]} x {target[1]}",
        "differences": found["differences"],
        "loss_difference": float(f"{difference:.3g}"),
    }


def of(base: Any, strategy: str, processes: int) -> Any:
    return msgspec.structs.replace(base, zero=STRATEGIES[strategy], world_size=processes, accumulation=4 // processes)


if __name__ == "__main__":
    main()
