"""A report as HTML and as Markdown."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Sequence
from html import escape

from memtop.supervisor import language, units
from memtop.supervisor.clean import clean
from memtop.supervisor.diagnosis.values import in_words, layers_command
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.language import Verbatim, tr
from memtop.supervisor.run.explain import phase_peaks, why_no_phases
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.report.charts import curve_svg, memory_svg
from memtop.supervisor.run.report.facts import (
    Facts,
    configuration_words,
    environment_rows,
    outcome_words,
    read_facts,
)
from memtop.supervisor.wire import Event

_NEWEST_EVENTS = 15
"""In Markdown."""
_LONGEST_TEXT = 2000
"""Characters of a prompt or of what the model has written."""
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --paper: #fff; --quiet: #5d6b7a; --line: #d8dee6; --curve: #2f6fb3;
  --edge: #f2d45c; --danger: #e0564d }
@media (prefers-color-scheme: dark) { :root { --ink: #cdd9e5; --paper: #12171d; --quiet: #8896a5; --line: #2d3742;
  --curve: #6cb6ff } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 900px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-size: 14px }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere }
th { color: var(--quiet); font-weight: 500 } figure { margin: 1rem 0 } figcaption { color: var(--quiet) }
svg { width: 100%; height: auto } text { fill: var(--quiet); font-size: 11px } .y { text-anchor: end }
polyline { fill: none; stroke: var(--curve); stroke-width: 1.6 } .grid { stroke: var(--line) }
.mark { stroke: var(--quiet); stroke-dasharray: 3 3 } .edge { fill: var(--edge); opacity: .25 }
.danger { fill: var(--danger); opacity: .25 } pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px }
"""


def html(facts: Facts) -> str:
    """One page without links to anything else."""
    state = facts.state
    parts = [f"<h1>{_safe(state.name)}</h1>", _table([], facts.rows)]
    diagnosis = _diagnosis(facts)
    if diagnosis:
        summary, evidence = diagnosis
        parts += [
            _title("Why it failed"),
            f"<p>{_safe(tr(summary))}</p>",
            f"<pre>{_safe_lines(evidence)}</pre>" if evidence else "",
        ]
    starts = [attempt.started for attempt in facts.attempts[1:]]
    memory = [memory_svg(source.used, _clock, marks=starts) for source in facts.sources if len(source.used.points) > 1]
    parts += [_title("Memory"), *memory] if memory else []
    begun = [float(attempt.start_updates) for attempt in facts.attempts[1:] if attempt.start_updates is not None]
    curves = [curve_svg(curve, lambda x: tr(f"update {units.count(x)}"), marks=begun) for curve in facts.curves]
    parts += [_title("Training"), *curves] if curves else []
    parts += [_title("Attempts"), _table(("", "began", "lasted", "energy", "why", "end"), _attempts(facts))]
    if facts.configurations:
        parts += [
            _title("Settings"),
            _table(_COLUMNS, _configurations(facts)),
        ]
    if phases := list(_phases(facts)):
        parts += [_title("Memory of each phase"), _table(_PHASE_COLUMNS, phases)]
    if facts.events:
        rows = [(_clock(event.time), str(event.attempt), event.word, in_words(event.message)) for event in facts.events]
        parts += [_title("Events"), _table(("", "attempt", "event", ""), rows)]
    if facts.samples:
        parts += [_title("Samples"), *(_sample(event) for event in facts.samples)]
    if environment := environment_rows(facts):
        parts += [_title("Environment"), _table([], environment)]
    written = f"Written {_clock(facts.written)} by memtop. Dashed lines: a new attempt began."
    parts.append(f"<p>{_safe(tr(written))}</p>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_safe(state.name)}</title>'
    return (
        f"<!doctype html>\n<html><head>{head}<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def markdown(facts: Facts) -> str:
    """A summary for an issue or a chat."""
    lines = [f"## {_cell(Verbatim(facts.state.name))}", "", *_markdown_table(("", ""), facts.rows)]
    diagnosis = _diagnosis(facts)
    if diagnosis:
        summary, evidence = diagnosis
        lines += ["", f"**{tr('Why it failed')}**: {clean(tr(summary))}"]
        lines += ["", "```", *(clean(line).replace("```", "'''") for line in evidence), "```"] if evidence else []
    lines += [
        "",
        f"**{tr('Attempts')}**",
        "",
        *_markdown_table(("", "began", "lasted", "energy", "why", "end"), _attempts(facts)),
    ]
    if len(facts.configurations) > 1:
        lines += ["", f"**{tr('Settings')}**", ""]
        lines += _markdown_table(_COLUMNS, _configurations(facts))
    if phases := list(_phases(facts)):
        lines += ["", f"**{tr('Memory of each phase')}**", "", *_markdown_table(_PHASE_COLUMNS, phases)]
    if environment := environment_rows(facts):
        lines += ["", f"**{tr('Environment')}**", "", *_markdown_table(("", ""), environment)]
    if facts.events:
        newest: Sequence[Event] = facts.events[-_NEWEST_EVENTS:]
        rows = [(_clock(event.time), event.word, in_words(event.message)) for event in newest]
        lines += ["", f"**{tr('Newest events')}**", "", *_markdown_table(("", "", ""), rows)]
    return "\n".join(lines) + "\n"


def _sample(event: Event) -> str:
    """What the model has written at one update."""
    prompts, texts = event.data.get("prompts", ()), event.data.get("texts", ())
    pairs = (f"<b>{_text(prompt)}</b>\n{_text(text)}" for prompt, text in zip(prompts, texts, strict=False))
    return f"<p>{_safe(tr(event.message))}</p>{''.join(f'<pre>{pair}</pre>' for pair in pairs)}"


def _text(text: str) -> str:
    mark = " …" if len(text) > _LONGEST_TEXT else ""
    return _safe_lines(text[:_LONGEST_TEXT].splitlines()) + mark


def write_report(folder: RunFolder) -> str | None:
    """Write `report.html` and `report.md` into the run's folder, in the language that the
    environment names; why not, in one line, if that is impossible."""
    before = language.current()
    language.use(language.language_of(os.environ))
    try:
        facts = read_facts(folder)
        for name, text in (("report.html", html(facts)), ("report.md", markdown(facts))):
            new = folder.path / f".{name}"
            new.write_text(text, encoding="utf-8", errors="replace")
            new.replace(folder.path / name)
    except OSError as error:
        return f"the report cannot be written: {error.strerror}"
    except (MemtopError, sqlite3.Error) as error:
        return f"the report cannot be written: {error}"
    finally:
        language.use(before)
    return None


def _diagnosis(facts: Facts) -> tuple[str, Sequence[str]] | None:
    """Of the newest attempt that failed, if the run has failed."""
    newest = facts.attempts[-1] if facts.attempts else None
    found = newest.diagnosis if newest is not None and newest.outcome == "failed" else None
    if not found:
        return None
    command = layers_command(found.get("snapshot_file"))
    more = [] if command is None else [tr(command)]
    return str(found.get("summary", "")), [*map(str, found.get("evidence", ())), *more]


def _attempts(facts: Facts) -> Iterable[tuple[str, ...]]:
    for attempt in facts.attempts:
        lasted = "" if attempt.ended is None else units.duration(attempt.ended - attempt.started)
        used = units.energy(attempt.energy_joules)
        yield str(attempt.number), _clock(attempt.started), lasted, used, in_words(attempt.reason), outcome_words(attempt)


_COLUMNS = ("", "from update", "settings", "foreseen peak", "peak", "why")


def _configurations(facts: Facts) -> Iterable[tuple[str, ...]]:
    for row, words in configuration_words(facts.configurations):
        since = units.UNKNOWN if row.since_update is None else units.count(row.since_update)
        peak = units.UNKNOWN if row.peak is None else row.peak.words
        foreseen = units.UNKNOWN if row.foreseen is None else f"~{units.size(row.foreseen.peak_bytes)}"
        yield str(row.number), since, words, foreseen, peak, in_words(row.reason)


_PHASE_COLUMNS = ("", "phase", "foreseen", "measured", "")


def _phases(facts: Facts) -> Iterable[tuple[str, ...]]:
    """What torch allocates in each phase of an update, by configuration."""
    for row in facts.configurations:
        for peak in phase_peaks(row):
            foreseen = units.UNKNOWN if peak.foreseen is None else f"~{units.size(peak.foreseen)}"
            yield str(row.number), peak.phase, foreseen, units.size(peak.measured), why_no_phases(row) or "allocated"


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _title(text: str) -> str:
    return f"<h2>{_safe(tr(text))}</h2>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = f"<tr>{''.join(f'<th>{_safe(tr(word))}</th>' for word in heads)}</tr>" if heads else ""
    body = "".join(
        f"<tr><th>{_safe(tr(row[0]))}</th>{''.join(f'<td>{_safe(tr(cell))}</td>' for cell in row[1:])}</tr>" for row in rows
    )
    return f"<table>{head}{body}</table>"


def _markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield f"| {' | '.join(map(tr, heads))} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(text: str) -> str:
    return escape(clean(tr(text)), quote=False).replace("|", "\\|")


def _safe(text: str) -> str:
    return escape(clean(text))


def _safe_lines(lines: Iterable[str]) -> str:
    return "\n".join(map(_safe, lines))
