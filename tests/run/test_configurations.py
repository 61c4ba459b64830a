"""Configurations: when one ends and the next begins, what each needed, and how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from memtop.presets import load_presets, load_recipes, resolve
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.values import Forecast, Peak
from memtop.supervisor.run.explain import PhasePeak, phase_peaks, why_no_phases
from memtop.supervisor.run.record.configurations import Configurations, ConfigurationStart, before_the_present
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.record.outbox import Outbox
from memtop.supervisor.run.reports import Step
from memtop.supervisor.run.view import read_configurations

SETTINGS = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])
HALF = replace(SETTINGS, batch=SETTINGS.batch // 2, accumulation=SETTINGS.accumulation * 2)


def step(update: int, **more: Any) -> Step:
    return Step(**{"update": update, "samples_seen": update * 32, "step_seconds": 0.5, **more})


def test_a_stretch_has_its_reason_peak_speed_and_outcome() -> None:
    all_of_them = Configurations().begin_attempt(1, "start", SETTINGS, 5.0).resumed(0)
    for update in range(1, 5):
        for rank, peak in ((0, 100), (1, 300 + update)):
            seconds = 9 if update == 1 else 0.5
            report = step(update, peak_reserved_bytes=peak, step_seconds=seconds)
            all_of_them = all_of_them.note_step(rank, report, 50, "key", SETTINGS.batch)
    all_of_them = all_of_them.note_host(10**12, "key", SETTINGS.batch).end("gpu_oom", 4, 3, died_of_memory=True)
    (row,) = all_of_them.rows
    assert (row.number, row.reason, row.since_update, row.until_update, row.outcome) == (1, "start", 1, 4, "gpu_oom")
    assert row.peak is not None
    # The peak is that of the fullest rank, with its CUDA context. The peak of a run on GPUs is not
    # host memory.
    assert (row.peak.bytes, row.peak.batch, row.peak.updates, row.peak.failed) == (354, SETTINGS.batch, 4, True)
    assert row.peak.outside_bytes == 50
    # The first update warms up.
    assert row.samples_per_second == 64
    (record,) = all_of_them.to_save()
    assert (record.configuration, record.starts) == (row, (ConfigurationStart(attempt=1, saved_after=3),))
    assert all_of_them.saved().to_save() == ()


def test_the_largest_peak_of_each_phase_on_any_rank_stays_with_the_configuration() -> None:
    now = Configurations().begin_attempt(1, "start", SETTINGS, 5.0).resumed(0)
    phases = {"forward_peak_bytes": 60, "backward_peak_bytes": 90, "optimizer_peak_bytes": 40}
    now = now.note_step(0, step(1, peak_reserved_bytes=100, **phases), 50, "key", SETTINGS.batch)
    now = now.note_step(1, step(1, peak_reserved_bytes=90, **{**phases, "optimizer_peak_bytes": 70}), 50, "key", SETTINGS.batch)
    now = now.note_step(0, step(2, peak_reserved_bytes=120), 50, "key", SETTINGS.batch)
    (row,) = now.rows
    assert row.peak is not None
    assert (row.peak.bytes, row.peak.phases) == (170, {"forward": 60, "backward": 90, "optimizer": 70})
    assert why_no_phases(row) is None
    found = Forecast(peak_bytes=200, basis="estimate", phases={"forward": 50})
    assert phase_peaks(replace(row, foreseen=found))[0] == PhasePeak("forward", 50, 60)
    # The next settings begin without them.
    now = now.change(3, "asked", HALF, died=None, saved=None, changed_by=(1, 9.0))
    assert why_no_phases(now.rows[-1]) == "no update was measured"
    now = now.note_step(0, step(3, peak_reserved_bytes=80), 50, "key", HALF.batch)
    assert why_no_phases(now.rows[-1]) == "its trainer did not measure it"
    assert phase_peaks(now.rows[-1]) == []


def test_why_the_peaks_of_phases_are_not_known() -> None:
    begun = Configurations().begin_attempt(1, "start", SETTINGS, 5.0)
    key = settings_key(SETTINGS, on_gpu=False)
    on_cpu = begun.note_host(100, key, SETTINGS.batch).note_step(0, step(1), None, key, SETTINGS.batch)
    assert why_no_phases(on_cpu.rows[0]) == "on the CPU no allocator counts it"
    key = settings_key(SETTINGS, on_gpu=True)
    on_gpu = begun.note_step(0, step(1, peak_reserved_bytes=100), None, key, SETTINGS.batch)
    assert why_no_phases(on_gpu.rows[0]) == "its trainer did not measure it", "the context is not known, but it is a GPU"
    own = Configurations().begin_attempt(1, "start", None, 5.0)
    assert why_no_phases(own.rows[0]) == "only the built-in trainer measures it"


def test_what_a_process_holds_outside_the_allocator_is_not_known_or_is_added_when_it_is() -> None:
    now = Configurations().begin_attempt(1, "start", SETTINGS, 5.0)

    def after(*seen: tuple[int, int | None]) -> tuple[int, int | None]:
        configurations = now
        for update, (peak, base) in enumerate(seen, start=1):
            report = step(update, peak_reserved_bytes=peak)
            configurations = configurations.note_step(0, report, base, "key", SETTINGS.batch)
        (row,) = configurations.rows
        assert row.peak is not None
        return row.peak.bytes, row.peak.outside_bytes

    assert after((100, None)) == (100, None)
    assert after((100, None), (70, None)) == (100, None)
    assert after((100, None), (90, 50)) == (150, 50), "what the allocator held at the most stays"
    assert after((100, 50), (110, None)) == (160, 50)
    assert after((100, 50), (90, 55)) == (150, 50)
    assert after((100, 50), (90, 70)) == (160, 70)
    peak = Peak(batch=1, bytes=100, updates=1)
    assert peak.with_context(7) == replace(peak, bytes=107, outside_bytes=7)
    assert replace(peak, outside_bytes=0).with_context(7).bytes == 100


def test_the_peak_of_an_attempt_is_known_apart_from_that_of_the_attempts_before_it() -> None:
    now = Configurations().begin_attempt(1, "start", SETTINGS, 5.0)
    now = now.note_step(0, step(1, peak_reserved_bytes=100), 50, "key", SETTINGS.batch).end("failed", 1, None)
    now = now.begin_attempt(2, "restart", SETTINGS, 6.0)
    assert (now.records[0].attempt_peak, now.rows[0].peak is not None) == (None, True)
    now = now.note_step(0, step(2, peak_reserved_bytes=80), 40, "key", SETTINGS.batch)
    (record,) = now.end("gpu_oom", 2, None, died_of_memory=True).records
    assert record.configuration.peak is not None
    assert (record.configuration.peak.bytes, record.configuration.peak.updates) == (150, 2)
    assert record.attempt_peak is not None
    assert (record.attempt_peak.bytes, record.attempt_peak.updates, record.attempt_peak.failed) == (120, 1, True)


def test_the_same_settings_go_on_and_others_begin_anew() -> None:
    longer = replace(SETTINGS, target_samples=SETTINGS.target_samples * 2)
    all_of_them = Configurations().begin_attempt(1, "start", SETTINGS, 5.0).end("failed", 3, 2)
    all_of_them = all_of_them.begin_attempt(2, "restart", longer, 6.0)
    (row,) = all_of_them.rows
    assert (row.attempt, row.outcome, row.until_update) == (1, None, None)
    all_of_them = all_of_them.begin_attempt(3, "restart with batch", HALF, 7.0)
    assert [row.outcome for row in all_of_them.rows] == ["replaced", None]
    all_of_them = all_of_them.end("host_oom_killed", 9, 8, died_of_memory=True).begin_attempt(4, "restart", HALF, 8.0)
    assert len(all_of_them.rows) == 3, "what died of memory is another stretch when a person tries it again"
    before = before_the_present(all_of_them.rows)
    assert before is not None
    assert before.number == 1


def test_a_failure_survived_in_the_process_starts_a_new_configuration() -> None:
    all_of_them = Configurations().begin_attempt(1, "start", SETTINGS, 5.0).note_host(500, "key", SETTINGS.batch)
    for _ in range(2):  # the second time by a supervisor that reads the report again
        all_of_them = all_of_them.change(
            7, "allocation failure at update 7", HALF, died="host_oom_alloc", saved=5, changed_by=(1, 70.0)
        )
    first, second = all_of_them.rows
    assert (first.outcome, first.until_update, second.since_update, second.settings) == ("host_oom_alloc", 6, 7, HALF)
    assert first.peak is not None
    assert first.peak.failed
    assert [record.died_of_memory for record in all_of_them.to_save()] == [True, False]
    assert all_of_them.records[1].starts == (ConfigurationStart(attempt=1),)


def test_what_a_process_has_kept_is_no_peak_of_its_new_settings() -> None:
    """On the CPU, after a change in the running program."""
    began = Configurations().begin_attempt(1, "start", SETTINGS, 5.0).note_host(500, "key", SETTINGS.batch)
    changed = began.change(7, "batch 8 -> 4", HALF, died=None, saved=None, changed_by=(1, 70.0))
    kept = changed.note_host(500, "key", HALF.batch)
    assert kept.rows[1].peak is None
    more = kept.note_host(501, "key", HALF.batch).rows[1].peak
    assert more is not None
    assert (more.bytes, more.batch) == (501, HALF.batch)
    # A new process has kept nothing.
    restarted = kept.end("replaced", 9, 9).begin_attempt(2, "restart", HALF, 90.0).note_host(300, "key", HALF.batch)
    assert restarted.rows[-1].peak is not None
    assert restarted.rows[-1].peak.bytes == 300


def test_rows_that_could_not_be_written_are_written_later(tmp_path: Path) -> None:
    outbox = Outbox(Ledger(tmp_path / "ledger.sqlite"))
    first = Configurations().begin_attempt(1, "start", SETTINGS, 5.0)
    outbox.save_configurations(first.to_save())
    outbox.ledger.close()
    outbox.ledger = Ledger(tmp_path / "ledger.sqlite", read_only=True)
    outbox.save_configurations(first.saved().begin_attempt(2, "restart", HALF, 6.0).to_save())
    assert outbox.problem is not None
    outbox.ledger = Ledger(tmp_path / "ledger.sqlite")
    assert len(outbox.ledger.configurations()) == 1
    outbox.retry()
    assert outbox.problem is None
    assert [record.configuration.outcome for record in outbox.ledger.configurations()] == ["replaced", None]


def test_they_are_read_back_and_continue(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    first = Configurations()
    for attempt, settings in ((1, SETTINGS), (2, SETTINGS), (3, HALF)):
        first = first.begin_attempt(attempt, f"attempt {attempt}", settings, 5.0)
    for record in first.to_save():
        ledger.save_configuration(record)
    (tmp_path / "run.json").touch()
    assert read_configurations(tmp_path) == first.rows
    assert [(row.number, row.attempt, row.settings) for row in first.rows] == [(1, 1, SETTINGS), (2, 3, HALF)]
    following = Configurations(records=tuple(ledger.configurations())).begin_attempt(4, "restart", SETTINGS, 6.0)
    assert [record.configuration.number for record in following.to_save()] == [2, 3]
    ledger.close()
