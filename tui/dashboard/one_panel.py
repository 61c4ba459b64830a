"""One panel of the dashboard on the whole screen."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, NamedTuple

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from memtop.supervisor.monitor.values import GpuSample
from memtop.tui.dashboard.events import draw_events
from memtop.tui.dashboard.overview import draw_processes
from memtop.tui.dashboard.training import draw_loss, draw_training
from memtop.tui.line import Line, fact, line
from memtop.tui.machine.gpu import draw_gpu, draw_gpu_note, gpu_title
from memtop.tui.machine.host import draw_host
from memtop.tui.panel import Draw, LinePanel
from memtop.tui.screen import Dashboard, FullScreen, KeyLine, named
from memtop.tui.store import Store


class Shown(NamedTuple):
    """A panel that can have the whole screen."""

    title: str
    draw: Draw


def panels(store: Store) -> list[Shown]:
    """The panels of this dashboard: of the run, then of the machine."""
    of_run = [Shown("Loss", draw_loss), Shown("Training", draw_training), Shown("Events", draw_events)]
    gpus = [Shown(gpu_title(gpu), partial(_draw_gpu, gpu)) for gpu in store.gpus] or [Shown("GPU", draw_gpu_note)]
    of_machine = [*gpus, Shown("Host memory", draw_host), Shown("GPU processes", draw_processes)]
    return [*(of_run if store.run is not None else []), *of_machine]


def _draw_gpu(gpu: GpuSample, store: Store, width: int, height: int) -> list[Line]:
    return draw_gpu(store, gpu, width, height)


class PanelScreen(FullScreen):
    """Shows one panel; the same key goes to the next one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", "Back", show=False),
        Binding("z,right,tab", "turn(1)", "Next panel", key_display="z →"),
        Binding("left,shift+tab", "turn(-1)", "Panel before", key_display="←"),
    ]

    def __init__(self, dashboard: Dashboard) -> None:
        super().__init__(dashboard)
        self._position = 0

    def compose(self) -> ComposeResult:
        yield self.title_panel()
        yield LinePanel(self._draw, id="one-panel")
        yield self.message_panel()
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.follow(self.dashboard, self.show_panels)

    def headline(self, store: Store) -> Line:
        return named(self._shown(store).title)

    def headline_right(self, store: Store) -> Line:
        shown = panels(store)
        return (*fact("panel", f"{self._position % len(shown) + 1} of {len(shown)}  "), *super().headline_right(store))

    def hint(self, store: Store, width: int) -> Line:
        return line(("z shows the next panel", "muted"))

    def _shown(self, store: Store) -> Shown:
        shown = panels(store)
        return shown[self._position % len(shown)]

    def _draw(self, store: Store, width: int, height: int) -> list[Line]:
        return list(self._shown(store).draw(store, width, height))

    def action_turn(self, step: int) -> None:
        self._position += step
        self.show_panels(self.dashboard.store)
