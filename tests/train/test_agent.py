"""The agent as a guest: whatever the program or the machine does to it, the program goes on and its reports are readable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

AGENT = Path(__file__).resolve().parents[2] / "train" / "agent"


def run(code: str, folder: Path, *, timeout: float = 60) -> str:
    """Run a program with the agent in it; its output. It must end well and say nothing on stderr."""
    env = {
        **os.environ,
        "PYTHONPATH": str(AGENT / "site"),
        "MEMTOP_ATTEMPT_DIR": str(folder),
        "MEMTOP_ATTEMPT": "1",
        "MEMTOP_SOCKET": str(folder / "nobody.sock"),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def reports(folder: Path) -> list[dict[str, Any]]:
    """What the supervisor's own decoder makes of the journal."""
    return [msgspec.json.decode(line) for line in (folder / "rank-0.jsonl").read_bytes().splitlines()]


def test_numbers_that_json_does_not_know_are_null_and_named(tmp_path: Path) -> None:
    run(
        "import memtop_agent as a; inf = float('inf')\n"
        "a.report('step', update=1, loss=float('nan'), gradient_norm=inf, parts={'head': -inf, 'body': [1.0, inf]})\n"
        "a.report('step', update=2, loss=1.5)",
        tmp_path,
    )
    _, first, second = reports(tmp_path)
    assert (first["update"], first["loss"], first["gradient_norm"]) == (1, None, None)
    assert first["parts"] == {"head": None, "body": [1.0, None]}
    assert first["not_finite"] == ["loss", "gradient_norm", "parts.head", "parts.body.1"]
    assert second["loss"] == 1.5
    assert "not_finite" not in second


def test_a_report_that_cannot_be_written_is_counted_and_holds_up_no_other(tmp_path: Path) -> None:
    code = """
import memtop_agent as a
class Odd:
    def __str__(self): raise RuntimeError("no words for it")
ring = []; ring.append(ring)
a.report('step', update=1, value=Odd())
a.report('step', update=2, value=ring)
a.report('step', update=3)
a.flush()
print(a.dropped())
"""
    assert run(code, tmp_path) == "2\n"
    assert [report.get("update") for report in reports(tmp_path)] == [None, 3]
