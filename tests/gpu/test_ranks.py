"""Two ranks on one GPU: one is out of memory and shrinks, and the other does not wait forever."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu.rank_worker import FAILURES
from tests.train.launching import ROOT, environment


def test_one_rank_out_of_memory_shrinks_and_the_other_does_not_wait(tmp_path: Path, device: str, record_property: Any) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.gpu.rank_worker")
    done = subprocess.run(
        [sys.executable, *torchrun, device, str(tmp_path)],
        env=environment(device),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    record_property("ranks", [first, second])
    assert first["device"].startswith(device)
    assert first["failures"] == []
    assert second["failures"] == [[failure.update, "backward" if failure.backward else "forward", True] for failure in FAILURES]
    for name in ("splits", "losses", "sum_of_weights"):
        assert first[name] == second[name], name
    found = [rank["searched"] for rank in (first, second)]
    assert found[0]["search"]["message"] == found[1]["search"]["message"]
    for rank in found:
        assert rank["search"]["samples_per_second"] > 0
        assert (rank["failures"], rank["samples"], rank["digests"]) == ([], [16], first["digests"])
    for rank in (first, second):
        assert rank["same_samples"]
        # On the CPU the same kernels give the same numbers; on a GPU some sums have no fixed order.
        assert rank["distance"] <= (1e-4 if device == "cuda" else 0.0)
