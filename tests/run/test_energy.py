"""The energy of each attempt: from the drivers' counters, whoever reads them and whatever they
miss."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from memtop.cli import run as memtop
from memtop.cli.report import energy_price
from memtop.supervisor import units
from memtop.supervisor.errors import UsageError
from memtop.supervisor.monitor.values import GpuDetails, GpuProcess, GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.run.machine_watch import energy_counters
from memtop.supervisor.run.record.folder import create_run, find_run
from memtop.supervisor.run.record.ledger import Ledger, reading_ledger
from tests.conftest import UNTIL_GO, Runs
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)
from tests.recovery.injected import inject
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


OFTEN = """
    import memtop.supervisor.monitor.nvml.device as device
    import memtop.supervisor.run.machine_watch as machine_watch
    device.SENSOR_SECONDS = device.PROCESS_SECONDS = machine_watch.SAMPLE_SECONDS = 0.1
"""
"""A supervisor that looks at the counter and at the processes not only every few seconds."""


def newest_counter(runs: Runs) -> float | None:
    """Of the first card, in the newest sample that the supervisor has stored, in joules."""
    with reading_ledger(find_run("a", runs.path)) as ledger:
        assert ledger is not None
        newest = ledger.snapshot(time.time(), 0)
    assert newest is not None
    return newest.gpus[0].details.energy_joules


def test_a_supervisor_counts_the_energy_of_each_attempt_from_the_drivers_counter(
    runs: Runs,
    tmp_path: Path,
    nvml_library: Path,  # noqa: F811
) -> None:
    kwh, before = 3_600_000_000, 77_000_000  # in the driver's millijoules
    script = Script(tmp_path / "nvml")

    def count(pid: int, energy: int) -> None:
        script.clear().gpu(0, total=20 << 30, used=2 << 30, uuid="GPU-0", energy=energy)
        script.gpu(1, total=20 << 30, used=0, uuid="GPU-1", energy=9 * energy)
        script.process(0, pid=pid, used=2 << 30).write()

    count(1, before)
    runs.environment |= script.env(nvml_library)
    inject(runs, "    pass", supervisor=OFTEN)
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, "-c", UNTIL_GO)

    def trains(number: int, energy: int, used: int, *, before: int | None = None) -> int:
        """The attempt uses so much, by the counter of the card that the program is on. Its process
        is another one than `before`."""
        newest = runs.wait(
            "a", lambda run: len(run["attempts"]) == number and run["trainer_pid"] not in (None, before) and run["alive"]
        )
        count(newest["trainer_pid"], energy)
        runs.wait("a", lambda run: run["attempts"][-1]["energy_joules"] == 0)
        count(newest["trainer_pid"], energy + used)
        runs.wait("a", lambda run: run["attempts"][-1]["energy_joules"] == used / 1000)
        return int(newest["trainer_pid"])

    first = trains(1, before, kwh)
    # What the card uses for others between two attempts is not the run's.
    runs.memtop("restart", "a", "--detach", "--set", "allocator=expandable_segments:True")
    # The supervisor must know the new value of the counter before the program is on the card.
    count(1, before + 5 * kwh)
    runs.wait("a", lambda _: newest_counter(runs) == (before + 5 * kwh) / 1000)
    trains(2, before + 5 * kwh, kwh // 4, before=first)
    (runs.root / "go").touch()
    runs.wait("a", lambda run: run["state"] == "finished" and run["supervisor_pid"] is None)
    assert [attempt["energy_joules"] for attempt in runs.show("a")["attempts"]] == [3.6e6, 0.9e6]
    (row,) = json.loads(runs.memtop("runs", "--json").stdout)
    assert row["energy_joules"] == 4.5e6
    shown = [line for line in runs.memtop("show", "a").stdout.splitlines() if line.startswith("  attempt ")]
    assert [line.rpartition(", ")[2] for line in shown] == ["1.00 kWh", "250 Wh"]
    assert "| energy of the GPUs | 1.25 kWh |" in runs.memtop("report", "a", "--markdown", "-").stdout
