"""The dashboard: reads a `Feed`, draws it, and sends the user's actions back.

It never imports torch or the trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtop.tui.app import DashboardApp, run_dashboard
    from memtop.tui.dashboard.result import DashboardResult
    from memtop.tui.demo import demo_feed
    from memtop.tui.feed import Feed, LocalFeed
    from memtop.tui.run_feed import RunFeed

__all__ = ["DashboardApp", "DashboardResult", "Feed", "LocalFeed", "RunFeed", "demo_feed", "run_dashboard"]

_HOMES = {
    "DashboardApp": "app",
    "DashboardResult": "dashboard.result",
    "run_dashboard": "app",
    "demo_feed": "demo",
    "Feed": "feed",
    "LocalFeed": "feed",
    "RunFeed": "run_feed",
}


def __getattr__(name: str) -> Any:
    # Importing Textual takes time: commands that do not open the dashboard must not pay for it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
