"""Panels of the dashboard that do more than draw the store."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from memtop.tui.line import Line
from memtop.tui.machine.gpu import draw_gpu, gpu_title
from memtop.tui.panel import LinePanel
from memtop.tui.store import Store


def gpu_panel(position: int) -> LinePanel:
    """The panel of the GPU at this position; empty if there are fewer GPUs."""

    def draw(store: Store, width: int, height: int) -> list[Line]:
        gpus = store.gpus
        return draw_gpu(store, gpus[position], width, height) if position < len(gpus) else []

    def title(store: Store) -> str:
        return gpu_title(store.gpus[position]) if position < len(store.gpus) else ""

    return LinePanel(draw, title=title, opens="gpu", id=f"gpu-{position}", classes="panel gpu")


class ProcessPanel(LinePanel, can_focus=True):
    """The short list of processes; Enter or a click opens the full one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", "Processes", show=False)]

    def action_open(self) -> None:
        self.post_message(self.Opened(self, 0))
