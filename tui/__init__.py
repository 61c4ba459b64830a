"""The dashboard: reads a `Feed`, draws it, and sends the user's actions back. Knows nothing of torch or the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtop.tui.app import DashboardApp, run_dashboard
    from memtop.tui.dashboard.screen import DashboardResult
    from memtop.tui.demo import DemoFeed
    from memtop.tui.feed import Feed, LocalFeed, RunFeed

__all__ = ["DashboardApp", "DashboardResult", "DemoFeed", "Feed", "LocalFeed", "RunFeed", "run_dashboard"]

_HOMES = {
    "DashboardApp": "app",
    "DashboardResult": "dashboard.screen",
    "run_dashboard": "app",
    "DemoFeed": "demo",
    "Feed": "feed",
    "LocalFeed": "feed",
    "RunFeed": "feed",
}


def __getattr__(name: str) -> Any:
    # Textual takes a noticeable time to import: commands that only pass through here must not pay for it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
