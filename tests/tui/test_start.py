"""What a start may load, and that the pictures in the documentation can be made again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "transformers", "memtop.train", "memtop.supervisor.run.client", "pynvml")
RARE = ("memtop.tui.processes.kill", "memtop.tui.restart", "memtop.tui.presets", "memtop.tui.help")


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split())


def test_the_package_alone_does_not_load_textual() -> None:
    assert "textual" not in loaded_by("import memtop.tui")


def test_a_start_loads_nothing_that_can_wait() -> None:
    loaded = loaded_by("import memtop.tui.app, memtop.tui.feed")
    assert not loaded.intersection(HEAVY + RARE)


def test_every_screenshot_can_be_made(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "docs" / "make_screenshots.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    pictures = {path.stem for path in tmp_path.glob("*.svg")}
    assert {"dashboard", "dashboard-80x24", "no-gpu"} <= pictures
    assert "tiny-llama" in (tmp_path / "dashboard.svg").read_text()
