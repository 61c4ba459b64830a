"""Whatever stands in a journal, each report is used or refused, and the run can be read and
restarted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtop.supervisor.run.effects import AddEvent, SaveConfigurations, UpdateAttempt
from memtop.supervisor.run.events import Reported
from memtop.supervisor.run.record.folder import StateFile
from memtop.supervisor.run.record.journal import JournalReader
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import Report, Step, Unknown, decode
from memtop.supervisor.run.state import state_file
from tests.run.brain import SETTINGS, Brain, row, taken_over, training

KINDS = {kind.__struct_config__.tag: kind for kind in Report.__args__}
FIELDS = sorted({field for kind in KINDS.values() for field in kind.__struct_fields__})
ODD = (
    *("null", "true", "0", "-1", "1.5", "1e308", "-1e308", "1e400", "1e-400", "18446744073709551616", "9223372036854775808"),
    *("-9223372036854775809", "1" + "0" * 400, '"1"', '""', '"\\u0000"', '"\\ud800"', "[]", "[1]", '["a", 1]', "{}"),
    *('{"batch": 0}', '{"batch": 1e300}', '{"batch": 18446744073709551615}', '{"seq_len": null}', '{"zero": {"stage": 9}}'),
    *('{"learning_rate": -5}', "[" * 2000 + "]" * 2000, '"' + "x" * 200_000 + '"'),
)


def give(ledger: Ledger, line: bytes, brain: Brain) -> None:
    """Let the rules act on a line, and store what they want stored, as the performer does."""
    report = decode(line)
    if report is None:
        return
    effects = brain.tell(Reported(rank=0, report=report)) + brain.tick()
    if isinstance(report, Step):
        ledger.add_reports(1, 0, [report], 1)
    for effect in effects:
        match effect:
            case AddEvent(event=event):
                ledger.add_event(event)
            case UpdateAttempt(number=number, values=values):
                ledger.update_attempt(number, **values)
            case SaveConfigurations(records=records):
                for record in records:
                    ledger.save_configuration(record)


def assert_readable(ledger: Ledger, brain: Brain) -> None:
    msgspec.json.decode(msgspec.json.encode(state_file(brain.model, "socket", 1)), type=StateFile)
    for record in brain.model.configurations.records:
        msgspec.json.decode(msgspec.json.encode(record), type=type(record))
    for read in (ledger.metrics, ledger.steps, ledger.events, ledger.attempts, ledger.configurations):
        read()


def ledger_of_one_attempt(folder: Path) -> Ledger:
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.add_attempt(1, "start", SETTINGS, 9.0)
    return ledger


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_of_any_field_breaks_the_run(kind: str, tmp_path: Path) -> None:
    needed = {"step": {"update": 8}, "phase": {"phase": "training"}, "settings": {"update": 8, "changes": {"batch": 2}}}
    ledger = ledger_of_one_attempt(tmp_path)
    for field in KINDS[kind].__struct_fields__:
        others = {name: value for name, value in needed.get(kind, {}).items() if name != field}
        for odd in ODD:
            brain = training()
            line = json.dumps({"type": kind, **others})[:-1] + f', "{field}": {odd}}}'
            give(ledger, line.encode(), brain)
            give(ledger, b'{"type": "step", "update": 9, "time": 991.0, "samples_seen": 300, "step_seconds": 1.0}', brain)
            assert_readable(ledger, brain)


NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([1 << 63, 1 << 64, 10**30, 1e308, -1, 0]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
REPORTS = st.builds(
    lambda kind, values: json.dumps({"type": kind, **values}).encode(),
    st.one_of(st.sampled_from(sorted(KINDS)), st.text(max_size=5)),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8),
)
LINES = st.one_of(REPORTS, st.binary(max_size=40), VALUES.map(lambda value: json.dumps(value).encode()))


@settings(max_examples=int(os.environ.get("MEMTOP_FUZZ_ROUNDS", "60")), deadline=None)
@given(lines=st.lists(LINES, max_size=30))
def test_random_lines_break_nothing(lines: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    ledger, brain = ledger_of_one_attempt(folder), training()
    journal = JournalReader(folder / "rank-0.jsonl")
    journal.path.write_bytes(b"\n".join(line.replace(b"\n", b" ") for line in lines) + b"\n")
    for line in lines:
        give(ledger, line, brain)
    assert_readable(ledger, brain)
    # The next supervisor reads the same lines.
    reports, end = journal.read(0)
    assert end == journal.path.stat().st_size
    again = taken_over(row())
    for report in reports:
        again.tell(Reported(rank=0, report=report, replayed=True))
    assert_readable(ledger, again)
    ledger.close()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"type": "step", "update": "1"}', "step: Expected `int`, got `str` - at `$.update`"),
        ('{"type": "step", "update": -1}', "step: Expected `int` >= 0 - at `$.update`"),
        ('{"type": "step", "update": 1e40}', "step: Expected `int`, got `float` - at `$.update`"),
        ('{"type": "step", "update": 1, "x": ' + "[" * 2000 + "]" * 2000 + "}", "unknown: its values are nested too deeply"),
        ('{"type": "step", "update": 1, "loss": 1e400}', "unknown: Number out of range - at `$.loss`"),
        ('{"type": "mine"}', "mine: Invalid value 'mine' - at `$.type`"),
    ],
)
def test_a_report_that_cannot_be_used_is_announced_once(line: str, problem: str) -> None:
    report = decode(line.encode())
    assert isinstance(report, Unknown)
    brain = training(update=7)
    for _ in range(3):
        brain.tell(Reported(rank=0, report=report))
    words = f"a report of rank 0 is not used ({problem}); later ones like it are not announced"
    assert brain.messages("warning") == [words]
    assert list(brain.model.warnings.values()) == [words]
    assert brain.model.progress.update == 7
    # The next supervisor warns again, but the event is in the ledger.
    again = taken_over(row())
    before = again.messages("warning")
    again.tell(Reported(rank=0, report=report, replayed=True))
    assert list(again.model.warnings.values()) == [words]
    assert again.messages("warning") == before


def test_a_line_of_any_length_hides_no_later_report(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(b'{"type": "step", "update": 1}\n"' + b"x" * (9 << 20) + b'"\n{"type": "step", "update": 2}\n')
    journal, found = JournalReader(path), list[Any]()
    while True:
        reports, end = journal.read_new()
        if end == journal.offset:
            break
        found += reports
        journal.offset = end
    assert [one.update for one in found if isinstance(one, Step)] == [1, 2]
    assert any(isinstance(one, Unknown) for one in found)
