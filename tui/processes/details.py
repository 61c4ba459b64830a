"""One process on one GPU: its facts, its curves since the dashboard started, and its
environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Button, Static

from memtop.supervisor import units
from memtop.supervisor.clean import clean
from memtop.supervisor.errors import RefusedError
from memtop.supervisor.language import Verbatim, tr, verbatim
from memtop.supervisor.monitor.values import GpuProcess
from memtop.supervisor.run.processes.environment import is_secret
from memtop.tui.charts import trail
from memtop.tui.line import MUTED, STRONG, Line, cell, fact, fit, join, join_fitting, line, wrap
from memtop.tui.panel import LinePanel
from memtop.tui.processes.kill import begin_ending
from memtop.tui.processes.rows import ProcessRow, rows_of
from memtop.tui.processes.table import roles_in_words
from memtop.tui.screen import Dashboard, Dialog, FullScreen, KeyLine, named
from memtop.tui.store import Store, holders
from memtop.tui.words import age

_LABEL = 12
_TWO_COLUMNS_FROM = 70
# The names of the sample's fields, if they differ from the labels.
_FIELDS = {"VRAM": "used_bytes", "bandwidth": "memory_bandwidth_fraction", "parent": "parent_pid"}


class ProcessScreen(FullScreen):
    """Stays on its process.

    After the process has ended it keeps the last known values and says so.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,o", "leave", "Back", show=False),
        Binding("e", "environment", "Environment", tooltip="The environment variables that it was started with"),
        Binding("k", "end", "End…", tooltip="End it; asks first"),
    ]

    def __init__(self, dashboard: Dashboard, row: ProcessRow) -> None:
        super().__init__(dashboard, id="process-screen")
        self._row = row
        self._ended = False

    def compose(self) -> ComposeResult:
        yield self.title_panel()
        yield LinePanel(self._draw_facts, title="Process", id="process-facts", classes="panel")
        yield LinePanel(self._draw_trails, title="Since the dashboard started", id="process-trails", classes="panel")
        yield self.message_panel()
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.follow(self.dashboard, self._take)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return not (action == "end" and self.dashboard.store.read_only)

    def _take(self, store: Store) -> None:
        found = next((row for row in rows_of(store.machine) if row.key == self._row.key), None)
        self._ended = found is None
        self._row = found or self._row
        self.show_panels(store)

    @property
    def _process(self) -> GpuProcess:
        assert self._row.process is not None
        return self._row.process

    def headline(self, store: Store) -> Line:
        ended = line(("! it has ended or left the GPU: these are its last known values", "edge")) if self._ended else ()
        return join((named(f"process {self._process.pid}"), ended))

    def _draw_facts(self, store: Store, width: int, height: int) -> list[Line]:
        row, process = self._row, self._process
        started = units.UNKNOWN
        if process.started is not None:
            clock = time.strftime("%m-%d %H:%M", time.localtime(process.started))
            started = f"{age(row.now - process.started)} ago, {clock}"
        job = units.UNKNOWN if row.job is None else Verbatim(f"{row.job_name}: {tr(roles_in_words(row.job))}")
        pairs = [
            ("user", verbatim(process.user)),
            ("GPU", row.where),
            ("VRAM", self._vram(store)),
            ("bandwidth", None if process.memory_bandwidth_fraction is None else _percent(process.memory_bandwidth_fraction)),
            ("kind", process.kind),
            ("started", started),
            ("parent", None if process.parent_pid is None else str(process.parent_pid)),
            ("job", job),
            ("role", process.role),
            ("run", verbatim(process.run)),
            ("container", verbatim(process.container) or "none"),
            ("stray", "yes" if process.stray else "no"),
        ]
        lines: list[Line] = []
        command = wrap(Verbatim(process.command or process.name or units.UNKNOWN), max(1, width - _LABEL), STRONG)
        most = max(1, height - len(pairs) // 2 - 1)
        if len(command) > most:
            command = [*command[: most - 1], fit((*command[most - 1], *command[most]), max(1, width - _LABEL))]
        for number, part in enumerate(command):
            lines.append(((cell("command" if number == 0 else "", _LABEL), MUTED), *part))
        if process.reason:
            lines.append(fit(line((cell("why", _LABEL), MUTED), (process.reason, "text")), width))
        if width < _TWO_COLUMNS_FROM:
            return [*lines, *(self._fact(name, value, process, width) for name, value in pairs)][:height]
        each = (width - 2) // 2
        facts = [self._fact(name, value, process, each) for name, value in pairs]
        half = (len(facts) + 1) // 2
        return [*lines, *(join(pair) for pair in zip(facts[:half], [*facts[half:], ()], strict=False))][:height]

    def _vram(self, store: Store) -> str | None:
        """The memory it uses, and its share of the card or of its MIG instance."""
        held = self._process.used_bytes
        gpu = next((gpu for gpu in store.gpus if (gpu.uuid or gpu.index) == self._row.key[3]), None)
        if held is None or gpu is None:
            return None if held is None else units.size(held)
        whole, position = gpu.total_bytes, self._row.mig_instance
        if position is not None:
            whole = next((one.total_bytes for one in gpu.mig if one.position == position), None)
        if not whole:
            return units.size(held)
        size, share = units.size(held), units.percent(held / whole)
        return f"{size}, {share} of card" if position is None else f"{size}, {share} of instance"

    def _fact(self, name: str, value: str | None, process: GpuProcess, width: int) -> Line:
        reason = process.unknown.get(_FIELDS.get(name, name), "")
        shown = line((value, STRONG)) if value else join((line((units.UNKNOWN, "unknown")), line((reason, MUTED))))
        return fit((*line((cell(name, _LABEL), MUTED)), *shown), width)

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

    @work(group="environment")
    async def action_environment(self) -> None:
        from memtop.tui.processes.details import show_environment

        await show_environment(self.dashboard, self._process, self.say)

    def action_end(self) -> None:
        if self._ended:
            self.say("it has already ended")
        elif not self._process.choosable:
            self.say(f"cannot be ended: {self._process.reason or 'it is not yours'}", "bad")
        else:
            self._end()

    def _end(self) -> None:
        process, store = self._process, self.dashboard.store
        chosen = [h for h in holders(store.machine) if (h.process.pid, h.process.started) == (process.pid, process.started)]
        if not all(holder.process.choosable for holder in chosen):
            self.say(f"cannot be ended: {chosen[0].process.reason}", "bad")
        else:
            begin_ending(self.dashboard, store, chosen, self, lambda yes: None)


def _percent(value: float | None) -> str:
    return units.percent(value, 0)


async def show_environment(dashboard: Dashboard, process: GpuProcess, say: Callable[[str, str], None]) -> None:
    """Read a process's environment and show it, or show why it cannot be read."""
    if dashboard.only_shown:
        say("read-only: the environment may contain secrets, so it is not shown in a browser", "bad")
        return
    try:
        variables = await dashboard.process_actions.environment_of(process)
    except RefusedError as refusal:
        say(str(refusal), "bad")
        return
    await dashboard.app.push_screen_wait(EnvironmentDialog(process, variables))


class EnvironmentDialog(Dialog[None]):
    """The environment of one process, to read and close.

    What looks like a secret is hidden until the user asks for it.
    """

    AUTO_FOCUS = "VerticalScroll"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "reveal", "Reveal", show=False),
        Binding("q,e,enter", "cancel", "Close", show=False),
    ]

    def __init__(self, process: GpuProcess, variables: Mapping[str, str]) -> None:
        super().__init__()
        self._process = process
        self._variables = variables
        self._revealed = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog help") as box:
            box.border_title = tr(f"Environment of process {self._process.pid}")
            yield Static(self._text(), id="variables")
            with Horizontal(classes="buttons"):
                if any(is_secret(name, value) for name, value in self._variables.items()):
                    yield Button(tr("Show hidden (v)"), id="reveal", compact=True)
                yield Button(tr("Close"), id="cancel", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "reveal":
            self.action_reveal()

    def action_reveal(self) -> None:
        self._revealed = not self._revealed
        self.query_one("#variables", Static).update(self._text())

    def _text(self) -> Text:
        text = Text(overflow="fold")
        for name, value in sorted(self._variables.items()):
            hidden = is_secret(name, value) and not self._revealed
            text.append(f"{clean(name)}=", "bold")
            text.append(f"{tr('hidden') if hidden else clean(value)}\n", "italic" if hidden else "")
        return text if self._variables else Text(tr("the process has no environment variables"))
