"""The peak of what the allocator held, as the agent reports it."""

from __future__ import annotations

from pathlib import Path

from tests.train.test_agent import CUDA, TORCH, reports, run

HELD = "Cuda.max_memory_reserved = lambda self: 20 if self.resets else 33\n"


def test_the_peak_of_what_was_reserved_is_reported_before_it_is_reset(tmp_path: Path) -> None:
    code = "import memtop_agent as a\na.offer('stop')\nprint([a.readings()['peak_reserved_bytes'] for _ in range(2)])"
    assert run(CUDA + HELD + code, tmp_path) == "[33, 20]\n"


def test_a_program_of_ones_own_reports_it_with_each_step(tmp_path: Path) -> None:
    run(CUDA + HELD + TORCH + "optimizer.step()", tmp_path)
    assert [report["peak_reserved_bytes"] for report in reports(tmp_path)[1:]] == [33]


def test_a_torch_that_cannot_tell_leaves_it_unknown(tmp_path: Path) -> None:
    run(CUDA + TORCH + "optimizer.step()", tmp_path)
    assert [report["peak_reserved_bytes"] for report in reports(tmp_path)[1:]] == [None]
