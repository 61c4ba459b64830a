"""Two ranks on one GPU: when memory runs out on one, it shrinks, and the other does not wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gpu.rank_worker import FAILURES
from tests.train.launching import two_ranks


def test_one_rank_shrinks_and_the_other_does_not_wait(tmp_path: Path, device: str, record_property: Any) -> None:
    first, second = two_ranks("tests.gpu.rank_worker", tmp_path, device, device=device)
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
