"""The machine's history in the ledger: thinned with age, and nothing is counted twice."""

from __future__ import annotations

import math
import sqlite3
import time
from array import array
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from memtop.supervisor.monitor.history import HOST, History
from memtop.supervisor.monitor.values import GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.recovery.values import Peak
from memtop.supervisor.run.record import tiers
from memtop.supervisor.run.record.configurations import ConfigurationRecord, ConfigurationStart
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import Step
from memtop.supervisor.run.server import ControlServer, Publisher
from memtop.supervisor.run_memory import HostMemory
from memtop.supervisor.wire import Configuration, HistoryRows, Phase, RunState
from tests.conftest import no_file_grows

DAY = 86_400
# A multiple of ten minutes.
START = 1_760_000_400


def snapshot(moment: float, used: int | None = 100, *, host: float | None = 0.5) -> MachineSnapshot:
    gpu = GpuSample(index=0, uuid="GPU-a", name="RTX A4500", used_bytes=used, power_watts=200.0)
    return MachineSnapshot(time=moment, gpus=(gpu,), host=HostSample(used_fraction=host))


def record(ledger: Ledger, *snapshots: MachineSnapshot, write_every: int = 1) -> None:
    for number, one in enumerate(snapshots):
        ledger.recorder.add(one, 7)
        if number % write_every == 0:
            ledger.recorder.write(one, 1)


def rows(path: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    """What a reader of the ledger's file sees."""
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query, values).fetchall()


def test_least_mean_and_most_of_every_stretch(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    record(ledger, *(snapshot(START + s, 1000 if s == 13 else s, host=None if s < 10 else 0.25) for s in range(30)))
    ledger.recorder.flush()
    buckets = ledger.history("GPU-a", START, START + 30)["used_bytes"]
    assert [(b.time - START, b.seconds, b.low, b.high) for b in buckets] == [
        (0, 10, 0, 9),
        (10, 10, 10, 1000),
        (20, 10, 20, 29),
    ]
    assert [b.mean for b in buckets] == pytest.approx([4.5, (145 - 13 + 1000) / 10, 24.5])
    host = ledger.history(HOST, START, START + 30)
    assert [b.time - START for b in host["used_fraction"]] == [10, 20]
    assert {b.mean for b in host["run_rss_bytes"]} == {7}
    assert host["cpu_fraction"] == []
    assert ledger.sources() == {HOST: None, "GPU-a": 0}


@pytest.mark.parametrize(("device_bytes", "highest"), [(None, 12), (1, 9)])
def test_the_highest_host_memory_is_not_below_that_of_a_configuration(
    tmp_path: Path, device_bytes: int | None, highest: int
) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.recorder.add(snapshot(START), 10, 9)
    ledger.recorder.flush()
    ledger.add_attempt(1, "start", None, START)
    ledger.add_reports(1, 0, [Step(update=1, peak_bytes=device_bytes, time=START)], 1)
    assert ledger.host_peak() == HostMemory(9, "PSS"), "no configuration has a peak"
    for number, taken in enumerate((5, 12), start=1):
        peak = Peak(batch=1, bytes=taken, updates=1)
        shown = Configuration(number=number, attempt=1, started=START, reason="start", peak=peak)
        ledger.save_configuration(ConfigurationRecord(configuration=shown, starts=(ConfigurationStart(attempt=1),)))
    assert ledger.host_peak() == HostMemory(highest, "PSS")


def test_a_ledger_from_before_the_last_series_is_read_and_goes_on(tmp_path: Path) -> None:
    """An older memtop recorded only the resident bytes."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    record(ledger, *(snapshot(START + s) for s in range(5)))
    ledger.recorder.flush()
    assert ledger.host_peak() == HostMemory(7, "RSS")
    ledger.close()
    with closing(sqlite3.connect(path)) as database:
        source = "(SELECT id FROM sources WHERE key = 'host')"
        for seconds, moment, numbers in database.execute(
            f"SELECT seconds, time, numbers FROM history WHERE source = {source}"
        ).fetchall():
            values = array("f", numbers)
            each = len(values) // 4
            older = array("f", [value for n, value in enumerate(values) if n % each != each - 1])
            database.execute(
                f"UPDATE history SET numbers = ? WHERE seconds = ? AND time = ? AND source = {source}",
                (older.tobytes(), seconds, moment),
            )
        database.commit()
    ledger = Ledger(path)
    assert ledger.host_peak() == HostMemory(7, "RSS")
    for second in range(1205, 1225):
        ledger.recorder.add(snapshot(START + second), 9, 4)
    ledger.recorder.flush()
    assert ledger.host_peak() == HostMemory(9, "RSS"), "the highest PSS may have been before"
    for second in range(5, 25):
        ledger.recorder.add(snapshot(START + second), 9, 4 + (second == 9))
    ledger.recorder.flush()
    assert ledger.host_peak() == HostMemory(5, "PSS")
    host = ledger.history(HOST, START, START + 30)
    assert [[b.high for b in host[f"run_{name}_bytes"]] for name in ("pss", "rss")] == [[5, 4, 4], [9, 9, 9]]


def test_the_next_supervisor_adds_to_the_stretch_that_was_not_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    for seconds, used in ((range(4), 10), (range(4, 10), 60)):
        ledger = Ledger(path)
        record(ledger, *(snapshot(START + s, used) for s in seconds))
        ledger.close()
    tiers_written = rows(path, "SELECT seconds FROM history JOIN sources ON source = id WHERE key = 'GPU-a'")
    assert sorted(tiers_written) == [(10,), (60,), (600,)]
    (bucket,) = Ledger(path, read_only=True).history("GPU-a", START, START + 10)["used_bytes"]
    assert (bucket.low, bucket.mean, bucket.high) == (10, 40, 60)


def test_the_older_the_coarser_and_no_full_snapshots_beyond_an_hour(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    # One sample every 10 min for 9 days, then one every 5 s for two hours; a peak in the first
    # night.
    early = range(0, 9 * DAY, 600)
    late = range(9 * DAY, 9 * DAY + 7200, 5)
    record(ledger, *(snapshot(START + s, 999 if s == 6000 else 100) for s in (*early, *late)))
    ledger.recorder.flush()
    end = START + late[-1]
    assert rows(path, "SELECT count(*) FROM samples") == [(tiers.SNAPSHOTS_KEPT,)]
    assert ledger.snapshot(end + 3, end - 5) == snapshot(end)
    assert ledger.snapshot(START + 10, START) is None
    for seconds, kept in tiers.TIERS[:2]:
        ((first,),) = rows(path, "SELECT min(time) FROM history WHERE seconds = ?", seconds)
        assert end - kept - 1200 < first <= end - kept
    whole = ledger.history("GPU-a", START, end)["used_bytes"]
    assert [b.time for b in whole if b.high == 999] == [START + 6000]
    assert len(whole) < 2200
    times = [(b.time, b.time + b.seconds) for b in whole]
    assert all(over <= begun for (_, over), (begun, _) in pairwise(times))
    assert {b.seconds for b in ledger.history("GPU-a", end - 1800, end)["used_bytes"]} == {10}
    # A day ago the finest tier is gone; the next one stands in.
    assert {b.seconds for b in ledger.history("GPU-a", end - DAY - 3600, end - DAY)["used_bytes"]} == {60}
    assert ledger.extent() == (START, START + 9 * DAY + 7200)


def test_the_beginning_of_a_run_is_not_drawn_before_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    record(ledger, *(snapshot(START + 570 + s) for s in range(120)))
    ledger.recorder.flush()
    assert {b.seconds for b in ledger.history("GPU-a", START, START + 1000)["used_bytes"]} == {10}
    assert ledger.history("GPU-a", START, START + 1000)["used_bytes"][0].time == START + 570


def test_the_hour_comes_back_into_memory_with_its_peaks(tmp_path: Path) -> None:
    path, now = tmp_path / "ledger.sqlite", int(time.time()) // 10 * 10
    ledger = Ledger(path)
    record(ledger, *(snapshot(now - 600 + s, 5000 if s == 123 else 100, host=None) for s in range(600)), write_every=5)
    ledger.close()
    history = Ledger(path).recorder.history
    rows = history.series("GPU-a", "used_bytes")
    assert rows[0] == (now - 600, 100)
    assert [t for t, value in rows if value == 5000] == [now - 600 + 125]
    assert len(rows) == 120
    assert {value for _, value in history.series(HOST, "used_fraction")} == {None}
    assert history.gpu_index("GPU-a") == 0


def test_a_full_disk_delays_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    record(ledger, snapshot(START))
    with no_file_grows():
        for second in range(1, 60):
            ledger.recorder.add(snapshot(START + second, second), None)
            with pytest.raises(sqlite3.OperationalError, match="disk"):
                ledger.recorder.write(snapshot(START + second), 1)
    record(ledger, snapshot(START + 60))
    buckets = ledger.history("GPU-a", START, START + 60)["used_bytes"]
    assert [b.high for b in buckets] == [100, 19, 29, 39, 49, 59]
    assert rows(path, "SELECT count(*) FROM history WHERE seconds = 60") == [(2,)]


async def test_a_new_subscriber_gets_the_hour_unless_it_wants_no_rows(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for second in range(5):
        ledger.recorder.add(snapshot(START + second, second), None)
    server = ControlServer(tmp_path / "s", on_request=AsyncMock(), on_agent=Mock(), on_gone=Mock())
    state = RunState(name="a", folder="a", state=Phase.TRAINING, created=1.0)
    sent = {}
    for rows in (10, 0):
        peer = Mock()
        Publisher(ledger, server).greet(peer, rows, state, None)
        sent[rows] = [call.args[0] for call in peer.send.call_args_list if isinstance(call.args[0], HistoryRows)]
    assert sent[0] == []
    history = History()
    for message in sent[10]:
        back = msgspec.json.decode(msgspec.json.encode(message), type=HistoryRows)
        history.load(back.key, back.gpu_index, back.times, back.columns)
    assert history.series("GPU-a", "used_bytes") == [(START + s, s) for s in range(5)]
    assert math.isclose(history.series(HOST, "used_fraction")[0][1] or 0, 0.5)
