"""Tests of screens render the frames at which `settle` looks, and wait for no time: support.py."""

from __future__ import annotations

import asyncio

import pytest
from textual import app, pilot
from textual._compositor import Compositor
from textual.css.stylesheet import Stylesheet

from tests.tui.support import parse_once, render_later, run_in_executor, wait_for_idle


@pytest.fixture(autouse=True)
def rendered_when_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compositor, "render_update", render_later)
    monkeypatch.setattr(Stylesheet, "_parse_rules", parse_once)
    monkeypatch.setattr(asyncio.BaseEventLoop, "run_in_executor", run_in_executor)
    for module in (app, pilot):
        monkeypatch.setattr(module, "wait_for_idle", wait_for_idle)
