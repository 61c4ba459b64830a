"""`memtop compare`: values side by side, the settings that differ, and wrong usage."""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memtop.cli import run
from memtop.cli.compare import ComparedRun, _read, _table, differences
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.program import Knob, Knobs, Program
from memtop.supervisor.run.record.configurations import ConfigurationRecord, ConfigurationStart
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, StateFile, create_run, find_run, write_json
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import Step
from memtop.supervisor.run.view import read_state
from memtop.supervisor.wire import Configuration, Phase, RunState
from tests.conftest import Runs, wait_for_file
from tests.run.brain import SETTINGS


def made(runs_dir: Path, name: str, updates: int, loss: float, **changed: object) -> None:
    settings = replace(SETTINGS, **changed)
    folder = create_run(runs_dir, RunSpec(name=name, created=1.0, settings=settings, cwd="/", memtop_version="0"), fresh=False)
    ledger = Ledger(folder.ledger_path)
    ledger.add_attempt(1, "start", settings, 100.0)
    steps = [
        Step(update=n, loss=loss + 1 / n, samples_seen=8 * n, step_seconds=0.5, peak_bytes=n << 20, time=100.0 + n)
        for n in range(1, updates + 1)
    ]
    ledger.add_reports(1, 0, steps, 1)
    ledger.update_attempt(1, ended=161.0, outcome="finished", updates=updates)
    ledger.save_configuration(period(1, settings, samples=160, seconds=10.0))
    ledger.close()


def period(number: int, settings: Settings | None, **measured: Any) -> ConfigurationRecord:
    shown = Configuration(number=number, attempt=1, started=100.0, reason="start", settings=settings)
    return ConfigurationRecord(configuration=shown, starts=(ConfigurationStart(attempt=1),), **measured)


def test_the_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, "first", 20, 1.0, learning_rate=1e-3)
    made(tmp_path, "second", 40, 2.0, learning_rate=5e-4)
    assert run(["compare", "first", "second", "--runs-dir", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["first", "second"]
    assert ["updates", "20", "40"] in lines
    assert ["mean", "samples/s", "16.0", "16.0"] in lines
    assert ["split", "8", "x", "4", "x", "1", "8", "x", "4", "x", "1"] in lines
    assert ["effective", "batch", "32", "32"] in lines
    assert ["time", "of", "all", "attempts", "00:01:01", "00:01:01"] in lines
    assert ["mean", "loss", "of", "updates", "11", "to", "20", "1.0669", "2.0669"] in lines
    assert ["learning", "rate", "0.001", "0.0005"] in lines
    assert not any(line[:1] == ["batch"] for line in lines), "the same in both"
    assert run(["compare", "first", "second", "--json", "--runs-dir", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["common_update"] == 20
    assert document["differing_settings"] == ["learning_rate"]
    expected = sum(1 / n for n in range(11, 21)) / 10
    assert [one["loss_at_common_update"] for one in document["runs"]] == pytest.approx([1 + expected, 2 + expected])
    assert [one["peak_bytes"] for one in document["runs"]] == [20 << 20, 40 << 20]


def test_a_long_cell_is_shortened_where_the_terminal_has_no_room(tmp_path: Path) -> None:
    made(tmp_path, "first", 20, 1.0, data={"source": "stdlib"}, target_samples=100)
    made(tmp_path, "second", 20, 1.0, data={"train": "/a/long/path/" * 6 + "end.jsonl"}, target_samples=200)
    compared = [_read(RunFolder(tmp_path / name)) for name in ("first", "second")]
    lines = list(_table(compared, None, differences(compared), 80))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "end.jsonl" in "\n".join(_table(compared, None, differences(compared)))
    assert re.search(r"…\S*end.jsonl", text)
    assert re.search(r"^updates +20 +20$", text, re.MULTILINE)
    assert re.search(r"^samples in all +100 +200$", text, re.MULTILINE)


def test_the_updates_of_earlier_attempts_count_where_the_newest_had_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, "first", 20, 1.0)
    made(tmp_path, "second", 0, 1.0)
    for name in ("first", "second"):
        ledger = Ledger(tmp_path / name / "ledger.sqlite")
        ledger.add_attempt(2, "restart", SETTINGS, 200.0)
        ledger.update_attempt(2, ended=201.0, outcome="finished")
        ledger.close()
    assert run(["compare", "first", "second", "--runs-dir", str(tmp_path)]) == 0
    assert ["updates", "20", "–"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert run(["compare", "second", "second", "--runs-dir", str(tmp_path)]) == 0
    assert "loss at update" not in capsys.readouterr().out


def test_settings_that_changed_in_a_run_are_shown_in_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if the other run has the same ones at its end."""
    changed = [replace(SETTINGS, batch=batch, accumulation=8, workers=workers) for batch, workers in ((8, 2), (4, 2), (4, 0))]
    for name in ("first", "second"):
        made(tmp_path, name, 4, 1.0, batch=4, accumulation=8, workers=0)
    with closing(Ledger(tmp_path / "first" / "ledger.sqlite")) as ledger:
        for number, settings in enumerate(changed, 1):
            ledger.save_configuration(period(number, settings))
    assert run(["compare", "first", "second", "--runs-dir", str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "split 8 x 8 x 1 -> 4 x 8 x 1 4 x 8 x 1" in lines
    assert "effective batch 64 -> 32 32" in lines
    assert "workers 2 -> 0 0" in lines
    assert not any(line.startswith(("batch ", "accumulation ")) for line in lines), "the split says them"
    assert run(["compare", "first", "second", "--json", "--runs-dir", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["differing_settings"] == ["batch", "workers"]
    assert [one["changed"].get("effective_batch") for one in document["runs"]] == [[64, 32], None]
    assert [one["effective_batch"] for one in document["runs"]] == [32, 32]


def test_the_speed_and_the_split_of_a_loop_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It counts no samples: what the dashboard shows is in the state of the run."""
    program = Program(grip="optimizer", knobs=Knobs(batch=Knob(value=16), accumulation=Knob(value=2)))
    for name in ("first", "second"):
        spec = RunSpec(name=name, created=1.0, settings=None, command=("python", "a.py"), cwd="/", memtop_version="0")
        folder = create_run(tmp_path, spec, fresh=False)
        state = RunState(name=name, folder=str(folder.path), state=Phase.FINISHED, attempt=1, created=1.0, command=spec.command)
        state = replace(state, program=program, effective_batch=64, samples_per_second=300.9)
        write_json(folder.state_path, StateFile(run=state, socket="no-socket"))
    assert run(["compare", "first", "second", "--runs-dir", str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "samples/s 300.9 300.9" in lines
    assert "split 16 x 2 x 2 16 x 2 x 2" in lines
    assert "effective batch 64 64" in lines
    with closing(Ledger(tmp_path / "first" / "ledger.sqlite")) as ledger:
        for number, batch in ((1, 32), (2, 16)):
            one = period(number, None)
            uses = {"batch": batch, "accumulation": 2}
            ledger.save_configuration(replace(one, configuration=replace(one.configuration, uses=uses)))
    assert run(["compare", "first", "second", "--runs-dir", str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "split 32 x 2 x 2 -> 16 x 2 x 2 16 x 2 x 2" in lines
    assert "effective batch 128 -> 64 64" in lines
    assert run(["show", "first", "--runs-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "configuration 1  batch 32, accumulation 2, " in shown
    assert "configuration 2  batch 16, accumulation 2, " in shown
    assert run(["report", "first", "--markdown", "-", "--runs-dir", str(tmp_path)]) == 0
    assert "| batch 32, accumulation 2 |" in capsys.readouterr().out
    # It has ended before memtop knew its accumulation.
    state = read_state(RunFolder(tmp_path / "first"))
    state = replace(state, program=Program(knobs=Knobs(batch=Knob(value=16))), effective_batch=None)
    write_json(tmp_path / "first" / "state.json", StateFile(run=state, socket="no-socket"))
    assert run(["compare", "first", "first", "--runs-dir", str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "batch 32 -> 16 32 -> 16" in lines
    assert not any(line.startswith("accumulation") for line in lines), "unknown is no change"


def test_the_time_between_attempts_is_not_that_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, "first", 4, 1.0)
    with closing(Ledger(tmp_path / "first" / "ledger.sqlite")) as ledger:
        ledger.add_attempt(2, "restart", SETTINGS, 4000.0)
        ledger.update_attempt(2, ended=4010.0, outcome="finished")
    assert run(["compare", "first", "first", "--runs-dir", str(tmp_path)]) == 0
    assert "time of all attempts  00:01:11  00:01:11" in re.sub("  +", "  ", capsys.readouterr().out)
    assert run(["report", "first", "--markdown", "-", "--runs-dir", str(tmp_path)]) == 0
    assert "| time of all attempts | 00:01:11 |" in capsys.readouterr().out
    assert read_state(RunFolder(tmp_path / "first")).earlier_seconds == 61.0


def test_one_run_is_not_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, "first", 2, 1.0)
    assert run(["compare", "first", "--runs-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "memtop: RUN: give two runs or more, e.g. `memtop compare first second`\n"
    assert run(["compare", "first", "missing", "--runs-dir", str(tmp_path)]) == 2


def host_peak(runs: Runs, name: str) -> int | None:
    with closing(Ledger(find_run(name, runs.path).ledger_path, read_only=True)) as ledger:
        return ledger.host_peak().size


def test_without_a_gpu_the_peak_is_that_of_the_host_memory(runs: Runs) -> None:
    """In the list, the comparison and the report; an allocator's peak stays unknown."""
    wait = "import time; from pathlib import Path\nwhile not Path('measured').exists(): time.sleep(0.1)"
    program = f"held = bytes(200 << 20) + b'x'; {wait}"
    for name in ("first", "second"):
        (runs.root / "measured").unlink(missing_ok=True)
        with runs.start("train", "--headless", "--name", name, "--", sys.executable, "-c", program) as process:
            wait_for_file(runs.path / name / "state.json")
            runs.wait(name, lambda document: (host_peak(runs, document["name"]) or 0) > 200 << 20)
            (runs.root / "measured").touch()
            assert process.wait(timeout=120) == 0
    row, _ = json.loads(runs.memtop("runs", "--json").stdout)
    assert row["peak_bytes"] is None
    assert 200 << 20 <= row["host_peak_bytes"] < 600 << 20
    words = units.size(row["host_peak_bytes"])
    assert f" {words} RAM " in runs.memtop("runs").stdout
    compared = runs.memtop("compare", "first", "second").stdout
    assert re.search(rf"^peak RAM +{words} ", compared, re.MULTILINE)
    assert re.search("^peak GPU memory +– +–$", compared, re.MULTILINE)
    assert f"| highest host memory of this run | {words} RAM |" in runs.memtop("report", "first", "--markdown", "-").stdout


def compared(name: str, **settings: object) -> ComparedRun:
    return ComparedRun(
        name=name,
        state="finished",
        ended_by=None,
        attempts=1,
        updates=4,
        samples_seen=None,
        loss=None,
        best_loss=None,
        evaluation_loss=None,
        samples_per_second=None,
        peak_bytes=None,
        host_peak_bytes=None,
        host_measure=None,
        seconds=None,
        settings=settings,
    )


def test_a_large_number_is_written_alike_in_all_rows_and_a_setting_is_never_rounded() -> None:
    runs = [replace(compared(name, target_samples=size), samples_seen=1536) for name, size in (("a", 1536), ("b", 1234567))]
    rows = [line.split("  ") for line in _table(runs, None, ["target_samples"])]
    assert ["1 536", "1 536"] in [[cell.strip() for cell in row if cell.strip()][1:] for row in rows]
    assert ["1 536", "1 234 567"] in [[cell.strip() for cell in row if cell.strip()][1:] for row in rows]


def test_many_settings_that_only_one_run_has_are_counted() -> None:
    """For example of a recipe and of a program whose settings memtop does not know."""
    recipe = compared("recipe", batch=8, **{f"setting.{n}": n for n in range(50)})
    own = compared("own", batch=4, seq_len=16)
    names = differences([recipe, own])
    lines = list(_table([recipe, own], 4, names))
    assert lines[-1] == "50 settings only of recipe: --json lists them"
    assert not any("setting.7" in line for line in lines)
    assert [line.split() for line in lines if line.startswith(("batch", "T "))] == [
        ["batch", "8", "4"],
        ["T", "–", "16"],
    ]


@pytest.mark.parametrize(
    ("common", "words"),
    [
        (40, "mean loss of updates 31 to 40"),
        (3, "mean loss of updates 1 to 3"),
        (1, "loss of update 1"),
    ],
)
def test_a_mean_of_updates_says_which(common: int, words: str) -> None:
    assert any(line.startswith(words) for line in _table([compared("a"), compared("b")], common, ()))
