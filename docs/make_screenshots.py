"""Writes docs/screenshots/*.svg from the scripted demo run: the same pictures every time, on any machine.

python docs/make_screenshots.py [FOLDER]
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from memtop.tui.app import DashboardApp
from memtop.tui.demo import DemoFeed

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Picture:
    """One screenshot: terminal size, number of GPUs, the scene played and the keys pressed before it is taken."""

    name: str
    size: tuple[int, int]
    gpus: int = 2
    keys: tuple[str, ...] = ()
    scene: str | None = None


PICTURES = (
    Picture("dashboard", (160, 50)),
    Picture("dashboard-80x24", (80, 24)),
    Picture("no-gpu", (120, 40), gpus=0),
    Picture("eight-gpus", (160, 50), gpus=8),
    Picture("restart", (120, 40), keys=("r", "backspace", "6")),
    Picture("presets", (120, 40), keys=("2",)),
    Picture("processes", (120, 40), keys=("o", "down", "down")),
    Picture("process", (120, 40), keys=("o", "down", "enter")),
    Picture("gpu", (120, 50), keys=("g",)),
    Picture("history", (120, 40), gpus=4, keys=("h", "u")),
    Picture("kill-strays", (120, 40), keys=("k", "space")),
    Picture("way-out", (120, 40), scene="oom"),
    Picture("configurations", (120, 40), keys=("u",)),
    Picture("faster", (120, 40), keys=("b",)),
    Picture("help", (120, 40), keys=("question_mark",)),
)


async def take(picture: Picture) -> str:
    """The screen as SVG, with ids that do not depend on chance."""
    feed = DemoFeed(interval=0, gpus=picture.gpus, ticks=2 if picture.scene else 0)
    if picture.scene is not None:
        feed.play(picture.scene)
    app = DashboardApp(feed)
    async with app.run_test(size=picture.size) as pilot:
        for _ in range(10):
            await pilot.pause()
        for key in picture.keys:
            await pilot.press(key)
            for _ in range(4):
                await pilot.pause()
        # A blinking cursor would make the picture depend on the moment.
        app.screen.set_focus(app.focused, scroll_visible=False)
        for cursor in app.screen.query("Input"):
            cursor.cursor_blink = False  # type: ignore[attr-defined]
        await pilot.pause()
        svg = app.export_screenshot(title="memtop")
    return re.sub(r"terminal-\d+", f"memtop-{picture.name}", svg)


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TZ"] = "UTC"
    time.tzset()
    for picture in PICTURES:
        path = folder / f"{picture.name}.svg"
        path.write_text(asyncio.run(take(picture)), encoding="utf-8")
        print(path, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
