"""The output of an attempt, from its file to the ledger."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from memtop.supervisor.run.output.intake import OutputIntake
from memtop.supervisor.run.output.tail import Tail
from memtop.supervisor.run.output.values import Seen
from memtop.supervisor.run.record.journal import Intake
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.record.outbox import Outbox
from memtop.supervisor.run.reports import Step


class Attempt:
    """An attempt whose program prints."""

    def __init__(self, folder: Path, number: int = 1) -> None:
        self.folder, self.number = folder, number
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.outbox = Outbox(self.ledger)
        self.sent: list[Step] = []
        self.own: list[bool] = []
        self.back: list[int] = []
        self.intake = self.next_supervisor()

    def next_supervisor(self) -> OutputIntake:
        def send(number: int, steps: list[Step]) -> None:
            self.sent += steps

        self.intake = OutputIntake(
            self.folder, self.number, self.outbox, on_steps=send, on_own_counter=self.own.append, on_back=self.back.append
        )
        return self.intake

    def print(self, *lines: str) -> None:
        with (self.folder / "output.log").open("a") as log:
            log.writelines(f"{line}\n" for line in lines)

    def read(self, updates: int | None = None, **values: Any) -> Seen | None:
        values = {"step_seconds": None, "has_loss": False, **values}
        return self.intake.read(time.time(), updates=updates, **values)

    @property
    def rows(self) -> list[tuple[int, float | None]]:
        return [(row.update, row.loss) for row in self.ledger.metrics()]


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


def steps(first: int, last: int) -> list[str]:
    return [f"step {number}/90 loss {number / 8}" for number in range(first, last + 1)]


def test_a_program_without_the_agent_gets_its_curve(attempt: Attempt) -> None:
    attempt.print("loading", *steps(1, 3))
    seen = attempt.read()
    assert seen is not None
    assert (seen.update, seen.total_updates, seen.loss, seen.agrees) == (3, 90, 0.375, None)
    assert attempt.rows == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert [step.update for step in attempt.sent] == [1, 2, 3]
    assert attempt.read() is None


def test_where_a_program_prints_nothing_its_own_log_is_read(attempt: Attempt) -> None:
    logs = attempt.folder / "logs"
    logs.mkdir()
    # It has trained before, on the same day.
    today = logs / "trainer-20261123.log"
    today.write_text("\n".join(steps(60, 90)) + "\n")
    pattern = f"{logs}/trainer-*.log"
    assert attempt.read(own_log=pattern) is None
    with today.open("a") as log:
        log.write("\n".join(["loading", *steps(1, 3)]) + "\n")
    attempt.print("loading")
    later = {"own_log": pattern, "to_the_end": True}
    seen = attempt.read(**later)
    assert seen is not None
    assert (seen.update, seen.loss, seen.log) == (3, 0.375, str(today))
    assert attempt.rows == [(1, 0.125), (2, 0.25), (3, 0.375)]
    # What it prints later does not count twice, and the next supervisor goes on from there.
    attempt.print(*steps(1, 5))
    attempt.next_supervisor()
    with (logs / "trainer-20261124.log").open("w") as log:
        log.write("\n".join(steps(4, 6)) + "\n")
    seen = attempt.read(**later)
    assert seen is not None
    assert (seen.update, seen.log) == (6, str(logs / "trainer-20261124.log"))
    assert [update for update, _ in attempt.rows] == [1, 2, 3, 4, 5, 6]


def test_the_own_log_of_a_program_that_prints_is_not_read(attempt: Attempt) -> None:
    attempt.print(*steps(1, 3))
    (attempt.folder / "own.log").write_text("")
    assert attempt.read(own_log=f"{attempt.folder}/own.log") is not None
    (attempt.folder / "own.log").write_text("\n".join(steps(50, 60)) + "\n")
    attempt.print(*steps(4, 4))
    seen = attempt.read(own_log=f"{attempt.folder}/own.log", to_the_end=True)
    assert seen is not None
    assert (seen.update, seen.log) == (4, None)


def test_a_line_counts_when_it_is_whole(attempt: Attempt) -> None:
    attempt.print(*steps(1, 2))
    with (attempt.folder / "output.log").open("a") as log:
        log.write("step 3/90 loss 0.3")
    attempt.read()
    assert attempt.rows[-1] == (2, 0.25)
    seen = attempt.read(to_the_end=True)
    assert seen is not None
    assert (seen.step, seen.loss) == (3, 0.3)


def test_the_next_supervisor_goes_on(attempt: Attempt) -> None:
    attempt.print(*steps(1, 3))
    attempt.read()
    attempt.next_supervisor()
    again = attempt.read()
    assert again is not None
    assert (again.step, again.again) == (3, True)
    attempt.print(*steps(4, 4))
    seen = attempt.read()
    assert seen is not None
    assert (seen.step, seen.again) == (4, False)
    assert [update for update, _ in attempt.rows] == [1, 2, 3, 4]


def test_without_what_was_learned_the_output_is_read_again(attempt: Attempt) -> None:
    attempt.print(*steps(1, 3))
    attempt.read()
    (attempt.folder / "output.json").write_bytes(b"{")
    attempt.next_supervisor()
    attempt.read()
    assert attempt.rows == [(1, 0.125), (2, 0.25), (3, 0.375)]


def test_an_output_that_somebody_empties_is_read_from_its_beginning(attempt: Attempt) -> None:
    attempt.print(*steps(1, 3))
    attempt.read()
    (attempt.folder / "output.log").write_text("")
    attempt.print(*steps(4, 4))
    seen = attempt.read()
    assert seen is not None
    assert seen.step == 4


@pytest.mark.parametrize("agent_first", [True, False])
def test_the_loss_joins_the_update_that_the_agent_counts(attempt: Attempt, agent_first: bool) -> None:
    counted = [Step(time=1.0, update=number, step_seconds=0.5, peak_bytes=7) for number in range(1, 5)]
    attempt.print(*steps(1, 4))
    if agent_first:
        attempt.ledger.add_reports(1, 0, counted, 10)
    attempt.read(1)
    attempt.print(*steps(5, 6))
    attempt.read(5)
    if not agent_first:
        attempt.ledger.add_reports(1, 0, counted, 10)
    rows = attempt.ledger.metrics()
    assert [(row.update, row.loss, row.peak_bytes) for row in rows[:2]] == [(1, 0.125, 7), (2, 0.25, 7)]


def test_micro_batches_are_not_updates(attempt: Attempt) -> None:
    for update in range(1, 11):
        attempt.print(f"step {update * 8}/160 loss 1.5")
        seen = attempt.read(update)
    assert seen is not None
    assert (seen.step, seen.update, seen.total_updates, seen.steps_per_update) == (80, 10, 20, 8)
    assert [update for update, _ in attempt.rows] == list(range(1, 11))


def test_a_program_that_has_resumed_counts_better_than_the_agent(attempt: Attempt) -> None:
    for update in range(1, 15):
        attempt.print(f"step {500 + update}/900 loss 1.5")
        seen = attempt.read(update)
    assert seen is not None
    assert (seen.agrees, seen.update, seen.total_updates) == (False, 514, 900)
    assert attempt.own == [True]
    assert [update for update, _ in attempt.rows] == list(range(501, 515))
    attempt.next_supervisor()
    assert attempt.own == [True, False], "the next supervisor knows it, and keeps the rows"


@pytest.mark.parametrize("second", [((2, ()),), ()], ids=["prints nothing", "has no output"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_program_that_has_resumed_counts_its_epochs_as_before(
    tmp_path: Path, first: int, second: tuple[tuple[int, tuple[int, ...]], ...]
) -> None:
    """`Epoch [5]` is the sixth one of a program that began with `Epoch [0]`."""
    seen = None
    for number, epochs in ((1, (first, first + 1)), *second, (3, (first + 5, first + 6))):
        folder = tmp_path / f"{number:04d}"
        folder.mkdir()
        attempt = Attempt(folder, number)
        attempt.print("loading", *(f"Epoch: [{epoch}][{i}/100] Loss 1.5" for epoch in epochs for i in (50, 100)))
        seen = attempt.read(to_the_end=True)
    assert seen is not None
    assert seen.update == 700


def test_updates_that_do_not_count_are_not_stored(attempt: Attempt) -> None:
    journal = attempt.folder / "rank-0.jsonl"
    journal.write_text('{"type": "step", "update": 1}\n')
    intake = Intake(attempt.folder, 1, attempt.outbox, lambda number, steps: None)
    intake.counts = False
    intake.read(lambda rank, report: None)
    assert attempt.rows == []


def test_what_the_ledger_cannot_take_now_waits(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt.print(*steps(1, 3))
    monkeypatch.setattr(Outbox, "due", property(lambda box: False))
    assert attempt.read() is not None
    assert attempt.rows == []
    monkeypatch.undo()
    attempt.read()
    assert len(attempt.rows) == 3


def test_of_very_many_lines_some_are_read(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_text("".join(f"step {number} loss 1.5\n" for number in range(200_000)))
    tail, lines = Tail(log), 0
    while found := tail.read():
        lines += len(found)
        last = found[-1]
    assert tail.offset == log.stat().st_size
    assert lines < 2_000
    assert last == "step 199999 loss 1.5"


def test_a_line_without_an_end_is_not_kept_for_ever(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_bytes(b"x" * (3 << 20))
    tail = Tail(log)
    for _ in range(3):
        assert tail.read() == []
    assert tail.offset == log.stat().st_size


@pytest.mark.parametrize("known", [True, False])
def test_workers_that_begin_again_are_followed_by_their_output(attempt: Attempt, known: bool) -> None:
    """torchrun has started them again; their agents count from 1, whatever they resume from."""
    attempt.print(*steps(1, 6))
    attempt.read(updates=6 if known else None, to_the_end=True)
    attempt.intake.begin_again()
    assert attempt.own == [False]
    for _ in ("the same supervisor", "the next one"):
        attempt.print(*steps(5, 5))
        seen = attempt.read(updates=1)
        attempt.next_supervisor()
    assert seen is None or seen.update == 5
    assert attempt.back == [5]
    assert [update for update, _ in attempt.rows] == [1, 2, 3, 4, 5]
    attempt.print(*steps(6, 8))
    seen = attempt.read(updates=4)
    assert seen is not None
    assert (seen.update, seen.agrees) == (8, False), "shown in place of the agent's count"
    assert attempt.rows[-1] == (8, 1.0)
    assert attempt.own == [False, False, False]


def test_workers_that_begin_again_before_anything_was_learned_are_learned_anew(attempt: Attempt) -> None:
    attempt.print(*steps(1, 1))
    attempt.read(updates=1)
    attempt.intake.begin_again()
    attempt.print(*steps(1, 4))
    attempt.read(updates=4)
    attempt.print(*steps(5, 6))
    seen = attempt.read(updates=6)
    assert seen is not None
    assert (seen.update, seen.agrees, attempt.own) == (6, True, [])


def test_what_the_end_of_a_short_program_decides_is_told(attempt: Attempt) -> None:
    """Its last lines may be read before its end."""
    attempt.print(*steps(1, 6))
    seen = attempt.read(updates=6)
    assert seen is not None
    assert seen.agrees is None
    seen = attempt.read(updates=6, to_the_end=True)
    assert seen is not None
    assert (seen.agrees, seen.total_updates) == (True, 90)
