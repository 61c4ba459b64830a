"""The energy of each attempt: from the drivers' counters, whoever reads them and whatever they
miss."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtop.cli import run as memtop
from memtop.cli.report import energy_price
from memtop.supervisor import units
from memtop.supervisor.errors import UsageError
from memtop.supervisor.monitor.values import GpuDetails, GpuProcess, GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.run.machine_watch import energy_counters
from memtop.supervisor.run.record.folder import create_run
from memtop.supervisor.run.record.ledger import Ledger, reading_ledger
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)
from tests.run.brain import spec

NOW = 1_790_000_000.0


def card(index: int, joules: float | None, *pids: int) -> GpuSample:
    rows = tuple(GpuProcess(pid=pid) for pid in pids)
    return GpuSample(index=index, uuid=f"GPU-{index}", processes=rows, details=GpuDetails(energy_joules=joules))


def test_only_the_cards_of_the_run_count() -> None:
    cards = (card(0, 10.0, 7), card(1, 20.0, 8), card(2, 30.0), card(3, None, 7))
    machine = MachineSnapshot(time=NOW, gpus=cards, host=HostSample())
    rank = RankMemory(rank=0, pid=99, device_uuid="GPU-2")
    assert energy_counters(machine, [rank], {7}) == {"GPU-0": 10.0, "GPU-2": 30.0, "GPU-3": None}
    assert energy_counters(machine, (), ()) == {}


def energies(path: Path, *readings: tuple[int, dict[str, float | None]]) -> list[float | None]:
    folder = create_run(path, spec("tiny", NOW), fresh=False)
    ledger = Ledger(folder.ledger_path)
    for number in {number for number, _ in readings}:
        ledger.add_attempt(number, "start", None, NOW + number)
    for place, (number, counters) in enumerate(readings):
        ledger.add_energy(number, counters)
        if place == 1:
            # Another supervisor goes on.
            ledger.close()
            ledger = Ledger(folder.ledger_path)
    ledger.close()
    with reading_ledger(folder) as stored:
        assert stored is not None
        return [attempt.energy_joules for attempt in stored.attempts()]


def test_an_attempt_has_what_its_cards_have_counted_since_it_began(tmp_path: Path) -> None:
    readings = (
        (1, {"GPU-0": 1000.0}),
        (1, {"GPU-0": 1500.0}),
        (1, {"GPU-0": 4000.0, "GPU-1": 70.0}),
        (1, {"GPU-1": 80.0}),
        (2, {"GPU-0": 9000.0}),
        (2, {"GPU-0": 9001.0}),
    )
    assert energies(tmp_path, *readings) == [3010.0, 1.0]


def test_a_counter_that_begins_at_zero_again_loses_nothing_but_the_time_between(tmp_path: Path) -> None:
    readings = ((1, {"GPU-0": 500.0}), (1, {"GPU-0": 900.0}), (1, {"GPU-0": 30.0}), (1, {"GPU-0": 50.0}))
    assert energies(tmp_path, *readings) == [450.0]


def test_a_driver_that_does_not_answer_for_a_while_loses_nothing(tmp_path: Path) -> None:
    assert energies(tmp_path, (1, {"GPU-0": 500.0}), (1, {"GPU-0": None}), (1, {"GPU-0": 900.0})) == [400.0]


def test_a_card_without_a_counter_makes_the_sum_unknown(tmp_path: Path) -> None:
    assert energies(tmp_path, (1, {"GPU-0": 500.0, "GPU-1": None}), (1, {"GPU-0": 900.0})) == [None]


def test_a_ledger_of_an_older_memtop_has_no_energy(tmp_path: Path) -> None:
    folder = create_run(tmp_path, spec("tiny", NOW), fresh=False)
    ledger = Ledger(folder.ledger_path)
    ledger.add_attempt(1, "start", None, NOW)
    with ledger.transaction():
        ledger._db.execute("DROP TABLE energy")
    ledger.close()
    with reading_ledger(folder) as stored:
        assert stored is not None
        assert [attempt.energy_joules for attempt in stored.attempts()] == [None]


@pytest.mark.parametrize(("joules", "words"), [(None, "–"), (3600 * 36, "36 Wh"), (3600 * 1240, "1.24 kWh"), (900, "0.25 Wh")])
def test_energy_in_words(joules: float | None, words: str) -> None:
    assert units.energy(joules) == words


def test_the_report_names_a_cost_only_with_a_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert energies(tmp_path, (1, {"GPU-0": 0.0}), (1, {"GPU-0": 7.2e6})) == [7.2e6]
    arguments = ["report", "tiny", "--markdown", "-", "--runs-dir", str(tmp_path)]
    assert memtop(arguments) == 0
    assert "| energy of the GPUs | 2.00 kWh |" in capsys.readouterr().out
    monkeypatch.setenv("MEMTOP_ENERGY_PRICE", "0.3 EUR")
    assert memtop(arguments) == 0
    assert "| 2.00 kWh; 0.60 EUR at 0.3 EUR per kWh |" in capsys.readouterr().out
    for wrong in ("cheap", "0.3", "-1 EUR", "nan EUR"):
        monkeypatch.setenv("MEMTOP_ENERGY_PRICE", wrong)
        with pytest.raises(UsageError, match=f"MEMTOP_ENERGY_PRICE: energy-price '{wrong}': give a price and a currency"):
            energy_price()
