"""Paints only what has changed.

For each frame Textual renders every widget that shares a line with a changed one, and the
containers below them. On the dashboard a few lines of a few panels change each second, so that
would take most of the processor time.
"""

from __future__ import annotations

from rich.console import Console
from rich.control import Control
from textual._compositor import ChopsUpdate, Compositor, CompositorUpdate
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget


class Rows(CompositorUpdate):
    """Pieces of lines at their places."""

    def __init__(self, rows: list[tuple[int, int, Strip]]) -> None:
        """`rows`: (line, first column, what is there)."""
        self.rows = rows

    def render_segments(self, console: Console) -> str:
        return "".join(f"{Control.move_to(x, y).segment.text}{strip.render(console)}" for y, x, strip in self.rows)


class ChangesCompositor(Compositor):
    """Renders only the widgets in which something has changed."""

    def render_partial_update(self) -> ChopsUpdate | Rows | None:  # type: ignore[override]
        changed = self._changed_in_front()
        if changed is None:
            return super().render_partial_update()
        self._dirty_regions.clear()
        rows = []
        for widget, regions in changed.items():
            place = self.visible_widgets[widget][0]
            area = Region.from_union(regions)
            strips = widget.render_lines(area.translate(-place.offset))
            for region in regions:
                columns = (region.x - area.x, region.right - area.x)
                rows += [(y, region.x, strips[y - area.y].crop(*columns)) for y in region.line_range]
        return Rows(rows) if rows else None

    def _changed_in_front(self) -> dict[Widget, list[Region]] | None:
        """The changed regions by the widget that fills them; None if a region has more than one."""
        found: dict[Widget, list[Region]] = {}
        screen = self.size.region
        for dirty in self._dirty_regions:
            region = dirty.intersection(screen)
            if not region:
                continue
            # From front to back: what is behind the first one is hidden.
            for widget, (place, clip) in self.visible_widgets.items():
                shown = place.intersection(clip).intersection(region)
                if shown:
                    if shown != region:
                        return None
                    found.setdefault(widget, []).append(region)
                    break
            else:
                return None
        return found
