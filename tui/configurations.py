"""The screen with all configurations of the run, their peaks and speeds; Enter returns to one of
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from memtop.presets.comparison import changes, describe_split
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Kind, in_words
from memtop.supervisor.errors import UsageError
from memtop.supervisor.language import Verbatim, separator, tr
from memtop.supervisor.recovery.configuration import edited, kept_length
from memtop.supervisor.recovery.values import Peak
from memtop.supervisor.run.explain import length_change, phase_peaks, phases_scale, why_no_phases
from memtop.supervisor.wire import Change, Configuration, RunState
from memtop.tui.keymap import no_changes, restart_in_progress
from memtop.tui.line import MUTED, STRONG, Heading, Line, cell, fact, fit, foreign, join, join_fitting, line, wrap
from memtop.tui.line_list import Entry, LineList, ListContent
from memtop.tui.panel import LinePanel
from memtop.tui.restart_own import where_own_resumes, why_not_back
from memtop.tui.restart_plan import nothing_left_with, where_it_goes_on, where_it_resumes
from memtop.tui.screen import ConfirmDialog, Dashboard, FullScreen, KeyLine, named
from memtop.tui.store import Store
from memtop.tui.words import OUTCOMES


class ConfigurationsScreen(FullScreen):
    """Opens on the previous configuration.

    `chosen` is the confirmed change when the screen closes, if any.
    """

    AUTO_FOCUS = "LineList"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", "Back", show=False),
        Binding(
            "e",
            "back(False)",
            "Go back",
            key_display="Enter",
            tooltip="Restart with these settings, at the run's current update",
        ),
        Binding("c", "back(True)", "with its checkpoint", tooltip="The same, from the newest checkpoint kept from that time"),
        Binding("u", "undo", "Undo", tooltip="Restart with the previous settings"),
    ]

    def __init__(self, dashboard: Dashboard) -> None:
        super().__init__(dashboard, id="configurations-screen")
        self.chosen: Change | None = None

    def compose(self) -> ComposeResult:
        yield self.title_panel()
        yield LineList(self._draw_page, id="configurations-table")
        yield LinePanel(self._draw_facts, id="configurations-facts")
        yield self.message_panel()
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.follow(self.dashboard, self._take)
        before = undone(self._rows)
        if before is not None:
            self.query_one(LineList).move_to(before.number)

    @property
    def _rows(self) -> tuple[Configuration, ...]:
        return self.dashboard.store.configurations

    def _take(self, store: Store) -> None:
        self.query_one(LineList).redraw()
        self.show_panels(store)

    # --- what it shows ----------------------------------------------------------------------------

    def _draw_page(self, width: int) -> ListContent:
        names, columns = heading(width)
        now = present_of(self._rows)
        # Newest first, because the newest are the ones to go back to.
        entries = [Entry(one.number, [row(one, width, present=one is now)]) for one in reversed(self._rows)]
        return ListContent(entries, names, columns)

    def headline(self, store: Store) -> Line:
        return named("Configurations of {name}", store.run.name if store.run is not None else "")

    def hint(self, store: Store, width: int) -> Line:
        return line(("peaks and speeds are measured; ● is the current one", MUTED))

    def _draw_facts(self, store: Store, width: int, height: int) -> list[Line]:
        chosen = self._row()
        return [] if chosen is None else facts(chosen, present_of(self._rows), width)[:height]

    def _row(self) -> Configuration | None:
        key = self.query_one(LineList).cursor
        return next((one for one in self._rows if one.number == key), None)

    @on(LineList.Moved)
    def _moved(self) -> None:
        self.clear_message()
        self.show_panels(self.dashboard.store)

    # --- keys -------------------------------------------------------------------------------------

    @on(LineList.Chosen)
    def _entered(self) -> None:
        self.action_back(False)

    def action_back(self, with_state: bool) -> None:
        chosen = self._row()
        if chosen is not None:
            self._go_back(chosen, with_state)

    def action_undo(self) -> None:
        before = undone(self._rows)
        if before is None:
            self.say("there is no previous configuration")
        else:
            self._go_back(before, False)

    @work(group="actions", exclusive=True)
    async def _go_back(self, wanted: Configuration, with_state: bool) -> None:
        store = self.dashboard.store
        problem = no_changes(store) or restart_in_progress(store)
        if problem is None and store.run is not None and not with_state:
            problem = nothing_left_with(store.run, wanted.settings) or why_not_back(
                store.run, wanted, present_of(store.configurations)
            )
        change = rollback(wanted, self._rows, with_state=with_state) if problem is None else problem
        if isinstance(change, str):
            self.say(change)
            return
        lines = consequences(wanted, store, with_state=with_state)
        if await self.app.push_screen_wait(ConfirmDialog("Roll back", lines, confirm="Roll back")):
            self.chosen = change
            self.dismiss(None)


PRESENT = "current"
_BAD = frozenset(("failed", *(kind.value for kind in Kind)))
_WORDS = {kind.value: words for kind, words in OUTCOMES.items()}


class ConfigurationColumn(NamedTuple):
    """One column. It is shown on terminals of at least `shown_from` columns."""

    id: str
    title: str
    width: int
    number: bool = True
    shown_from: int = 0


COLUMNS = (
    ConfigurationColumn("number", "#", 3),
    ConfigurationColumn("attempt", "att", 3),
    ConfigurationColumn("since", "since", 7),
    ConfigurationColumn("split", "B x A x W", 11, number=False),
    ConfigurationColumn("seq_len", "T", 5),
    ConfigurationColumn("preset", "preset", 15, number=False, shown_from=110),
    ConfigurationColumn("peak", "peak", 10),
    ConfigurationColumn("speed", "samp/s", 7),
    ConfigurationColumn("outcome", "outcome", 12, number=False),
)


def columns_for(width: int) -> list[ConfigurationColumn]:
    """The shown columns; the reason uses the remaining width."""
    return [column for column in COLUMNS if width >= column.shown_from]


def heading(width: int) -> tuple[Line, list[Heading]]:
    """The line of column names, and the cells of each name."""
    places, parts, start = [], [], 2
    for column in columns_for(width):
        parts.append(cell(column.title, column.width, right=column.number))
        places.append(Heading(column.id, start, start + column.width))
        start += column.width + 1
    return fit(line((f"  {' '.join(parts)} ", "heading"), ("reason", "heading")), width), places


def row(of: Configuration, width: int, *, present: bool) -> Line:
    """One configuration; unknown values are dashes. The current one has a dot."""
    words = {
        "number": str(of.number),
        "attempt": str(of.attempt),
        "since": units.count(of.since_update),
        "split": _own_split({**of.uses, **of.knobs}) if of.uses or of.knobs else split_words(of.settings),
        "seq_len": str({**of.uses, **of.knobs}.get("seq_len", units.UNKNOWN))
        if of.settings is None
        else str(of.settings.seq_len),
        "preset": units.UNKNOWN if of.settings is None else Verbatim(of.settings.preset),
        "peak": peak_words(of.peak),
        "speed": units.UNKNOWN if of.samples_per_second is None else units.rate(of.samples_per_second),
        "outcome": outcome_words(of, present=present),
    }
    parts: list[tuple[str, str]] = [("● " if present else "  ", "good")]
    for column in columns_for(width):
        role = _outcome_role(of, present=present) if column.id == "outcome" else STRONG if present else "text"
        parts.append((f"{cell(words[column.id], column.width, right=column.number)} ", role))
    return fit((*foreign(*parts), *line((in_words(of.reason), MUTED))), width)


def went_badly(outcome: str | None) -> bool:
    """Whether this outcome is a failure."""
    return outcome in _BAD


def _outcome_role(of: Configuration, *, present: bool) -> str:
    if went_badly(of.outcome):
        return "bad"
    return "good" if of.outcome == "finished" or (present and of.outcome is None) else MUTED


def split_words(settings: Settings | None) -> str:
    return units.UNKNOWN if settings is None else settings.split_text


def _own_split(knobs: Mapping[str, object]) -> str:
    """The split of the user's own program, as far as it is known."""
    return f"{knobs.get('batch', units.UNKNOWN)} x {knobs.get('accumulation', units.UNKNOWN)}"


def peak_words(peak: Peak | None) -> str:
    return units.UNKNOWN if peak is None else peak.words


def outcome_words(of: Configuration, *, present: bool) -> str:
    """`replaced`, or the failure: `out of VRAM`."""
    if of.by_words and of.outcome in _WORDS:
        return f"{tr(_WORDS[of.outcome])}?"
    return _WORDS.get(of.outcome or "", of.word) or (PRESENT if present else units.UNKNOWN)


def facts(of: Configuration, now: Configuration | None, width: int) -> list[Line]:
    """The configuration under the cursor: its first and last update, its full reason, and what
    returning to it changes.
    """
    until = f"update {units.count(of.until_update)}"
    if of.until_update is None:
        until = "now" if of.outcome is None else "its end"
    updates: Line = ()
    if of.peak is not None and of.peak.updates > 0:
        updates = fact("peak measured over", f"{units.count(of.peak.updates)} update{'' if of.peak.updates == 1 else 's'}")
    if of.foreseen is not None:
        updates = join([part for part in (fact("foreseen peak", f"~{units.size(of.foreseen.peak_bytes)}"), updates) if part])
    preset = () if of.settings is None else fact("preset", Verbatim(of.settings.preset))
    span = [fact(f"configuration {of.number}, from update", units.count(of.since_update)), fact("to", until)]
    if of.until_update is not None and of.until_update < (of.since_update or 0):
        span = [fact(f"configuration {of.number},", "no update was done")]
    head = [*span, updates, preset]
    lines = [join_fitting([part for part in head if part], width), *_phases(of, width)]
    lines += wrap(f"why: {tr(in_words(of.reason))}", width)
    return [*lines, *wrap(f"to go back: {'; '.join(differences(of, now))}", width, MUTED)]


def _phases(of: Configuration, width: int) -> list[Line]:
    """`GiB allocated  forward ~4.9/5.0  backward ~7.1/7.0  optimizer ~4.1/4.0`, or why it is not
    known."""
    peaks, why = phase_peaks(of), why_no_phases(of)
    if not peaks:
        return [fit(fact("allocated by phase", f"{units.UNKNOWN} {tr(why or '')}", MUTED), width)]
    scale = phases_scale(peaks)
    parts = [
        line((f"{peak.phase} ", MUTED), (peak.before(scale), "predicted"), ("/", MUTED), (scale.number(peak.measured), STRONG))
        for peak in peaks
    ]
    legend = line(("foreseen", "predicted"), ("/", MUTED), ("measured", STRONG))
    return [join_fitting([line((f"{scale.unit} allocated", MUTED)), *parts, legend, line((why or "", MUTED))], width)]


def differences(of: Configuration, now: Configuration | None) -> list[str]:
    """What returning to this configuration changes."""
    if now is None or now.number == of.number:
        return ["it is the current one"]
    if of.settings is None or now.settings is None:
        if of.knobs or now.knobs:
            before, after = _own_settings(now), _own_settings(of)
            return [f"{name} {before.get(name, 'of its own')} -> {after.get(name, 'of its own')}" for name in _knobs(of, now)]
        return ["the differences are not known: this program's settings are unknown"]
    return changes(now.settings, of.settings) or ["the same settings as now"]


def _own_settings(of: Configuration) -> dict[str, str]:
    """The settings of the user's own program, as far as they are known."""
    uses = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in of.uses.items()}
    return uses | of.knobs


def _knobs(of: Configuration, now: Configuration) -> list[str]:
    """The settings that memtop gave to the user's own program in one of the two only, or with
    another value."""
    return [name for name in {**now.knobs, **of.knobs} if now.knobs.get(name) != of.knobs.get(name)]


def present_of(rows: Sequence[Configuration]) -> Configuration | None:
    """The current configuration; for a run that is over, the last one."""
    return rows[-1] if rows else None


def undone(rows: Sequence[Configuration]) -> Configuration | None:
    """The previous configuration."""
    return rows[-2] if len(rows) > 1 else None


def rollback(row: Configuration, rows: Sequence[Configuration], *, with_state: bool) -> Change | str:
    """The change that returns to this configuration, or why that is not possible."""
    if row is present_of(rows):
        return f"configuration {row.number} is the current one"
    if not with_state:
        return Change(configuration=row.number)
    if row.until_update is None:
        return f"the update at which configuration {row.number} ended is not known: its checkpoint cannot be identified"
    return Change(configuration=row.number, state_before=row.until_update)


def consequences(row: Configuration, store: Store, *, with_state: bool) -> list[str]:
    """The text of the question before a rollback."""
    run, now = store.run, present_of(store.configurations)
    name = run.name if run is not None else "the run"
    lines = [f"Restart {name} with the settings of configuration {row.number}?", ""]
    lines.append(f"Changes: {'; '.join(differences(row, now))}.")
    if row.settings is not None and now is not None and now.settings is not None:
        lines.append(_sentence(describe_split(now.settings, row.settings)))
    if row.peak is not None:
        lines.append(f"Its peak was {peak_words(row.peak)} (measured).")
    if went_badly(row.outcome):
        lines.append(f"! It ended: {in_words(row.word or '')}. That may happen again.")
    elif row.peak is not None and row.peak.failed:
        lines.append("! It ran out of memory then: that may happen again.")
    if with_state:
        lines.append(
            f"Returns to the newest checkpoint kept at or before update {units.count(row.until_update)}: later updates are "
            "trained again, their state is moved aside, not deleted."
        )
        if _length_of(row.settings) != _length_of(now.settings if now is not None else None):
            lines.append("The run gets the length of that time again, unless nothing would be left to train.")
    elif run is not None:
        lines.append(_sentence(where_own_resumes(run) if run.settings is None else where_it_resumes(run)))
        if (length := _length_without_state(row, store, run)) is not None:
            lines.append(_sentence(length))
    return lines


def _length_of(settings: Settings | None) -> tuple[int, float] | None:
    return None if settings is None else (settings.target_samples, settings.epochs)


def _length_without_state(row: Configuration, store: Store, run: RunState) -> str | None:
    """What a return to these settings does to the length of the run."""
    reached, change = where_it_goes_on(run), Change(configuration=row.number)
    try:
        after = edited(run.settings, change, reached, store.configurations)
    except UsageError:
        return None  # the supervisor refuses it and says why
    moved = length_change(run.settings, after, reached, run.total_updates)
    return moved or kept_length(change, after, store.configurations)


def _sentence(words: str) -> str:
    """The words with a capital letter and a full stop, in the reader's language."""
    shown = tr(words)
    return f"{shown[0].upper()}{shown[1:]}{separator('. ').rstrip()}"
