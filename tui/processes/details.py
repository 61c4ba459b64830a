"""One process on one GPU: who it is, what it holds, and what it did while the dashboard watched."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from memtop.supervisor import units
from memtop.supervisor.monitor.values import GpuProcess
from memtop.tui.charts import trail
from memtop.tui.full import FullScreen
from memtop.tui.key_line import KeyLine
from memtop.tui.line import MUTED, STRONG, Line, fact, fit, join, join_fitting, line, spread, wrap
from memtop.tui.panel import LinePanel
from memtop.tui.processes.rows import Row, rows_of
from memtop.tui.processes.table import roles_in_words
from memtop.tui.report import report_lines
from memtop.tui.store import Store, holders
from memtop.tui.words import age

if TYPE_CHECKING:
    from memtop.tui.dashboard.screen import DashboardScreen

_LABEL = 12
_TWO_COLUMNS_FROM = 70
# Where the reason of a fact that is not known stands, if not under its own name.
_FIELDS = {"VRAM": "used_bytes", "bandwidth": "memory_bandwidth_fraction", "parent": "parent_pid"}


class ProcessScreen(FullScreen):
    """Stays on its process; says so when that has ended, with the last that was known."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,o", "leave", "Back", show=False),
        Binding("e", "environment", "Environment", tooltip="The environment variables that it was started with"),
        Binding("k", "end", "End…", tooltip="End it; asks first"),
    ]

    def __init__(self, dashboard: DashboardScreen, row: Row) -> None:
        super().__init__(id="process-screen")
        self.dashboard = dashboard
        self._row = row
        self._ended = False
        self._said: tuple[str, str] | None = None

    def compose(self) -> ComposeResult:
        yield LinePanel(self._draw_title, id="processes-title")
        yield LinePanel(self._draw_facts, title="Process", id="process-facts", classes="panel")
        yield LinePanel(self._draw_trails, title="While the dashboard watched", id="process-trails", classes="panel")
        yield LinePanel(self._draw_flash, id="processes-flash")
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.follow(self.dashboard, self._take)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return not (action == "end" and self.dashboard.store.read_only)

    def _take(self, store: Store) -> None:
        found = next((row for row in rows_of(store.machine) if row.key == self._row.key), None)
        self._ended = found is None
        self._row = found or self._row
        for panel in self.query(LinePanel):
            panel.show(store)

    @property
    def _process(self) -> GpuProcess:
        assert self._row.process is not None
        return self._row.process

    def _draw_title(self, store: Store, width: int, height: int) -> list[Line]:
        left = join((line((" memtop ", "accent")), line((f"process {self._process.pid}", STRONG))))
        if self._ended:
            left = join((left, line(("! it has ended or left the GPU: this is the last that was known", "edge"))))
        return [spread(left, line((f"{store.label or ''} ", "edge")), width)]

    def _draw_facts(self, store: Store, width: int, height: int) -> list[Line]:
        row, process = self._row, self._process
        started = units.UNKNOWN
        if process.started is not None:
            clock = time.strftime("%m-%d %H:%M", time.localtime(process.started))
            started = f"{age(row.now - process.started)} ago, {clock}"
        job = units.UNKNOWN if row.job is None else f"{row.job_name}: {roles_in_words(row.job)}"
        pairs = [
            ("user", process.user),
            ("GPU", row.where),
            ("VRAM", self._vram(store)),
            ("bandwidth", None if process.memory_bandwidth_fraction is None else _percent(process.memory_bandwidth_fraction)),
            ("kind", process.kind),
            ("started", started),
            ("parent", None if process.parent_pid is None else str(process.parent_pid)),
            ("job", job),
            ("role", process.role),
            ("run", process.run),
            ("container", process.container or "none"),
            ("stray", "yes" if process.stray else "no"),
        ]
        lines: list[Line] = []
        command = wrap(process.command or process.name or units.UNKNOWN, max(1, width - _LABEL), STRONG)
        most = max(1, height - len(pairs) // 2 - 1)
        if len(command) > most:
            command = [*command[: most - 1], fit((*command[most - 1], *command[most]), max(1, width - _LABEL))]
        for number, part in enumerate(command):
            lines.append((("command".ljust(_LABEL) if number == 0 else " " * _LABEL, MUTED), *part))
        if process.reason:
            lines.append(fit(line(("why".ljust(_LABEL), MUTED), (process.reason, "text")), width))
        if width < _TWO_COLUMNS_FROM:
            return [*lines, *(self._fact(name, value, process, width) for name, value in pairs)][:height]
        each = (width - 2) // 2
        facts = [self._fact(name, value, process, each) for name, value in pairs]
        half = (len(facts) + 1) // 2
        return [*lines, *(join(pair) for pair in zip(facts[:half], [*facts[half:], ()], strict=False))][:height]

    def _vram(self, store: Store) -> str | None:
        """How much it holds, and which share of the card (of its MIG instance) that is."""
        held = self._process.used_bytes
        gpu = next((gpu for gpu in store.gpus if (gpu.uuid or gpu.index) == self._row.key[3]), None)
        if held is None or gpu is None:
            return None if held is None else units.size(held)
        whole, word = gpu.total_bytes, "card"
        if self._row.mig_instance is not None:
            whole = next((one.total_bytes for one in gpu.mig if one.position == self._row.mig_instance), None)
            word = "instance"
        return f"{units.size(held)}, {units.percent(held / whole)} of {word}" if whole else units.size(held)

    def _fact(self, name: str, value: str | None, process: GpuProcess, width: int) -> Line:
        reason = process.unknown.get(_FIELDS.get(name, name), "")
        shown = line((value, STRONG)) if value else join((line((units.UNKNOWN, "unknown")), line((reason, MUTED))))
        return fit((*line((name.ljust(_LABEL), MUTED)), *shown), width)

    def _draw_trails(self, store: Store, width: int, height: int) -> list[Line]:
        series = (
            ("VRAM", "used_bytes", units.size),
            ("SM", "sm_fraction", _percent),
            ("host CPU", "host_cpu_fraction", _percent),
            ("RSS", "host_rss_bytes", units.size),
        )
        key = (self._row.key[1], self._row.key[2], self._row.key[3])
        each, across = (height // 2, (width - 2) // 2) if width >= 76 else (height // 4, width)
        charts = []
        for title, name, words in series:
            values = self.dashboard.trails.values(key, name)  # type: ignore[arg-type]
            top = 1.0 if name == "sm_fraction" else None
            newest = values[-1] if values else None
            reason = self._process.unknown.get(name, "") if newest is None else ""
            head = join_fitting([fact(title, words(newest)), line((reason, MUTED))], across)
            charts.append([fit(one, across) for one in (head, *trail(across, max(1, each - 1), values, words, top=top))])
        if width < 76:
            return [one for chart in charts for one in chart]
        return [join((left, right)) for pair in (charts[:2], charts[2:]) for left, right in zip(pair[0], pair[1], strict=False)]

    def _draw_flash(self, store: Store, width: int, height: int) -> list[Line]:
        return report_lines(*self._said, width) if self._said else [()]

    def say(self, text: str, kind: str = "note") -> None:
        """Tell the user something on the line above the keys."""
        self._said = (text, kind)
        if self.is_open:
            panel = self.query_one("#processes-flash", LinePanel)
            panel.styles.height = max(1, len(report_lines(text, kind, self.size.width - 2)))
            panel.show(self.dashboard.store)

    def action_leave(self) -> None:
        self.dismiss(None)

    @work(group="environment")
    async def action_environment(self) -> None:
        from memtop.tui.processes.environment import show_environment

        await show_environment(self.dashboard.dashboard_app, self._process, self.say)

    def action_end(self) -> None:
        if self._ended:
            self.say("it has ended already", "bad")
        elif not self._process.choosable:
            self.say(f"not to be ended: {self._process.reason or 'it is not yours'}", "bad")
        else:
            self._end()

    def _end(self) -> None:
        from memtop.tui.dashboard.actions import begin_ending

        process, store = self._process, self.dashboard.store
        chosen = [h for h in holders(store.machine) if (h.process.pid, h.process.started) == (process.pid, process.started)]
        if not all(holder.process.choosable for holder in chosen):
            self.say(f"not to be ended: {chosen[0].process.reason}", "bad")
        else:
            begin_ending(self.dashboard.dashboard_app, store, chosen, self, lambda yes: None)


def _percent(value: float | None) -> str:
    return units.percent(value, 0)
