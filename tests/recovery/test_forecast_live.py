"""A real run: its peak is foreseen before its first update, and stands beside what is measured."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Runs
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)
from tests.recovery.injected import TINY, inject

GIB = 1 << 30
_ON_A_GPU = """
    import memtop.train.devices
    memtop.train.devices.device_uuid = lambda device: "GPU-0"
"""
"""The trainer computes on the CPU and says that it is the GPU of the scripted driver."""


def test_the_foreseen_peak_is_in_the_ledger_and_in_every_view(
    runs: Runs,
    tmp_path: Path,
    nvml_library: Path,  # noqa: F811
) -> None:
    script = Script(tmp_path / "script").gpu(0, total=20 * GIB, used=GIB, uuid="GPU-0", name="A4500")
    runs.environment |= script.write().env(nvml_library)
    inject(runs, _ON_A_GPU)
    runs.memtop("train", *TINY, "--headless", "--name", "a", "--max-updates", "3", "--preset", "standard")
    (row,) = runs.show("a")["configurations"]
    found = row["foreseen"]
    basis = "estimate; other processes hold 1.0 GiB"
    assert (found["basis"], found["total_bytes"], found["band"]) == (basis, 20 * GIB, "safe")
    # With the context, and with what other programs held when it began.
    assert GIB // 2 < found["peak_bytes"] < GIB
    assert found["fraction"] > found["peak_bytes"] / (20 * GIB) + 0.04
    (event,) = runs.events("a", "foreseen")
    assert event.message.startswith("GPU memory is foreseen to peak at ")
    assert event.data["peak_bytes"] == found["peak_bytes"]
    assert ", foreseen " in runs.memtop("show", "a").stdout
    page = tmp_path / "report.html"
    runs.memtop("report", "a", "--html", str(page))
    assert "foreseen peak" in page.read_text(encoding="utf-8")
