"""`memtop show` and `memtop rollback` on the folder of a failed run."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from memtop.cli import gpus as gpus_of
from memtop.cli import requests, run
from memtop.cli.common import proposal_lines
from memtop.cli.output import print_json
from memtop.cli.requests import before_spike_of, change_to, meant, planned, say_peak
from memtop.cli.runs import _configuration_line
from memtop.cli.wrapping import wrapped
from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.errors import UsageError
from memtop.supervisor.monitor.processes.proc import identify
from memtop.supervisor.monitor.values import Band, HostSample, MachineSnapshot
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.values import Forecast, Peak, Remedy
from memtop.supervisor.run.processes.attempt import ExitFile, ProcessFile
from memtop.supervisor.run.record.configurations import ConfigurationRecord, ConfigurationStart
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, StateFile, create_run, write_json
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import Step
from memtop.supervisor.run.view import read_configurations, read_state
from memtop.supervisor.wire import Change, Configuration, Event, Phase, Proposal, RunState
from memtop.tui.dashboard.training import draw_training
from memtop.tui.store import Store
from tests.conftest import Runs
from tests.run.test_rollback import state
from tests.tui.support import SETTINGS

GIB = 1 << 30
HALF = replace(SETTINGS, batch=4, accumulation=8)
DIED = Diagnosis(kind=Kind.HOST_OOM_ALLOC, confidence=0.95, summary="14 MiB was refused.", evidence=("Error code 12",))
SMALLER = Remedy(
    id="smaller_batch",
    title="batch 4 -> 2, accumulation 8 -> 16: effective batch stays 32",
    keeps_math=True,
    resumable="resumes",
    assignments={"batch": "2", "accumulation": "16"},
    forecast=Forecast(peak_bytes=2 * GIB, total_bytes=8 * GIB, fraction=0.25, band=Band.SAFE, basis="line through B 4 and B 8"),
    command="memtop restart a --batch 2 --accum 16",
)
SHORTER = Remedy(
    id="seq_len",
    title="sequence length 128 -> 64",
    keeps_math=False,
    needs_consent=True,
    resumable="resumes",
    assignments={"seq_len": "64"},
    forecast_unknown="one measured peak is known (B 4), two are needed",
    command="memtop restart a --seq-len 64",
)
PROPOSAL = Proposal(
    diagnosis=DIED,
    causes=("anonymous memory of rank 0 grew by 5.0 MiB per update",),
    remedies=(SMALLER, SHORTER),
    last_advice=("see who else holds the card",),
    waiting="--on-oom ask",
)


def configuration(number: int, settings: object, reason: str, outcome: str | None) -> Configuration:
    return Configuration(
        number=number,
        attempt=1,
        since_update=number,
        until_update=None if outcome is None else number,
        started=1.0,
        reason=reason,
        settings=settings,  # type: ignore[arg-type]
        peak=Peak(batch=8, bytes=474 << 20, updates=3, failed=outcome is not None and outcome.startswith("host_oom")),
        samples_per_second=1.5,
        outcome=outcome,
    )


_MANY_UPDATES = """
WITH RECURSIVE number(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM number WHERE n + 1 < ?)
INSERT INTO metrics (attempt, "update", time, loss, sample_digest, report, updates, least_loss, tier)
SELECT 1, n, n, 1.5, ?, '{}', 1, 1.5, 1 FROM number
"""
_MEASURED = """
import sys
from memtop.cli import gpus as gpus_of
from memtop.cli import requests, run
status = run(sys.argv[1:])
# Not getrusage, which begins with the peak of the process that started this one.
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak, file=sys.stderr)
sys.exit(status)
"""


def test_the_metrics_of_a_long_run_are_printed_in_bounded_memory(runs: Runs) -> None:
    """100,000 rows as objects take more than 50 MB."""
    peaks = []
    for name, count in (("short", 100), ("long", 100_000)):
        folder = create_run(
            runs.path, RunSpec(name=name, created=1.0, settings=SETTINGS, cwd="/", memtop_version="0"), fresh=False
        )
        with closing(Ledger(folder.ledger_path)) as ledger:
            ledger.add_attempt(1, "start", None, 1.0)
        with closing(sqlite3.connect(folder.ledger_path)) as database, database:
            database.execute(_MANY_UPDATES, (count, "a" * 64))
        with (runs.root / name).open("w") as out:
            done = subprocess.run(
                [sys.executable, "-c", _MEASURED, "show", name, "--json", "--metrics", "--runs-dir", str(runs.path)],
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                check=True,
            )
        rows = json.loads((runs.root / name).read_text())["metrics"]
        assert [rows[0]["update"], rows[-1]["update"], len(rows)] == [0, count - 1, count]
        peaks.append(int(done.stderr) << 10)
    assert peaks[1] - peaks[0] < 12e6, peaks


def test_no_part_of_a_document_is_printed_if_its_rows_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    def damaged() -> Iterator[int]:
        yield from ()
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        print_json({"name": "a"}, metrics=damaged())
    assert capsys.readouterr().out == ""
    print_json({"name": "a"}, metrics=iter([1, 2]))
    assert json.loads(capsys.readouterr().out) == {"name": "a", "metrics": [1, 2]}


@pytest.fixture
def dead(runs: Runs) -> RunFolder:
    """A run that ran out of memory at batch 8 and at batch 4, and was then returned to its first
    settings."""
    folder = create_run(
        runs.path, RunSpec(name="a", created=1.0, settings=SETTINGS, cwd=str(runs.root), memtop_version="0"), fresh=False
    )
    ledger = Ledger(folder.ledger_path)
    rows = (
        configuration(1, SETTINGS, "start", "host_oom_alloc"),
        configuration(2, HALF, "allocation failure at update 2: batch 8 -> 4", "replaced"),
        configuration(3, SETTINGS, "restart with the settings of configuration 1", "host_oom_killed"),
    )
    for row in rows:
        ledger.save_configuration(ConfigurationRecord(configuration=row, starts=(ConfigurationStart(attempt=row.attempt),)))
    ledger.close()
    state = RunState(
        name="a", folder=str(folder.path), state=Phase.FAILED, attempt=1, created=1.0, settings=SETTINGS, proposal=PROPOSAL
    )
    write_json(folder.state_path, StateFile(run=state, socket=str(Path(runs.root) / "no-socket")))
    return folder


def test_an_attempt_without_an_end_runs_only_if_its_program_does(dead: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Ledger(dead.ledger_path)) as ledger:
        ledger.add_attempt(1, "start", None, 1.0)
    assert run(["show", str(dead.path)]) == 0
    assert "  attempt 1   start: no end recorded\n" in capsys.readouterr().out
    program = identify(os.getpid())
    assert program is not None
    dead.attempt(1).mkdir(parents=True)
    write_json(dead.attempt(1) / "process.json", ProcessFile(program.pid, program.started_ticks, program.pid, 0))
    assert run(["show", str(dead.path)]) == 0
    assert "  attempt 1   start: running\n" in capsys.readouterr().out


@pytest.mark.parametrize(("at", "known"), [(None, True), (20, True), (10, False)])
def test_an_attempt_without_an_update_leaves_the_run_where_it_was(dead: RunFolder, at: int | None, known: bool) -> None:
    """`at`: where the second attempt has begun."""
    with closing(Ledger(dead.ledger_path)) as ledger:
        ledger.add_attempt(1, "start", None, 1.0)
        ledger.add_attempt(2, "restart", None, 2.0)
        ledger.add_reports(1, 0, [Step(update=n, loss=4 - n / 20, time=float(n), samples_seen=2 * n) for n in range(1, 21)], 1)
    state = RunState(name="a", folder=str(dead.path), state=Phase.FINISHED, attempt=2, created=1.0, updates=at)
    write_json(dead.state_path, StateFile(run=state, socket=""))
    found = read_state(dead)
    assert (found.updates, found.loss, found.samples_per_second) == ((20, 3.0, 2.0) if known else (10, None, None))


@pytest.mark.parametrize(
    ("number", "phase", "has_ended", "words"),
    [
        (1, Phase.TRAINING, True, "ending"),  # memtop clears what the program left behind
        (1, Phase.STARTING, True, "ending"),
        (1, Phase.STARTING, False, "running"),
        (1, Phase.RESTARTING, True, "ending"),
        (1, Phase.FAILED, True, "no end recorded"),
        (2, Phase.RESTARTING, True, "starting"),
    ],
)
def test_an_attempt_whose_supervisor_lives_has_no_end_yet(
    dead: RunFolder, capsys: pytest.CaptureFixture[str], number: int, phase: Phase, has_ended: bool, words: str
) -> None:
    with closing(Ledger(dead.ledger_path)) as ledger:
        ledger.add_attempt(number, "start", None, 1.0)
    dead.attempt(1).mkdir(parents=True)
    if has_ended:
        write_json(dead.attempt(1) / "exit.json", ExitFile(0, 1.0))
    state = RunState(name="a", folder=str(dead.path), state=phase, attempt=1, created=1.0, settings=SETTINGS)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        supervisor = identify(process.pid)
        assert supervisor is not None
        state = replace(state, supervisor_pid=supervisor.pid)
        write_json(dead.state_path, StateFile(run=state, socket="", supervisor_started_ticks=supervisor.started_ticks))
        try:
            assert run(["show", str(dead.path)]) == 0
        finally:
            process.communicate(b"\n")
            dead.state_path.unlink()
    assert f"  attempt {number}   start: {words}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "words"), [(1, "the only run"), (2, "all 2 runs")])
def test_latest_among_runs_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, words: str
) -> None:
    for number in range(count):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "run.json").write_text("{")
    assert run(["show", "latest", "--runs-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"memtop: {tmp_path}: {words} there cannot be read; `memtop runs` shows why\n"


@pytest.fixture
def read_only_disk(small_disk: Path) -> Iterator[Callable[[], None]]:
    """Makes the small disk read-only."""

    def mount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(small_disk)], check=True)

    yield lambda: mount("ro")
    mount("rw")


def test_a_found_batch_is_shown(dead: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    text = "batch auto: 4 fits (41 % of 24 GiB), 8 is forecast at 97 %: 4 x 2"
    state = RunState(name="a", folder=str(dead.path), state=Phase.FAILED, created=1.0, settings=SETTINGS, batch_search=text)
    write_json(dead.state_path, StateFile(run=state, socket="none"))
    assert run(["show", str(dead.path)]) == 0
    assert f"  search      {text}\n" in capsys.readouterr().out
    assert run(["show", str(dead.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch_search"] == text


def test_a_run_on_a_read_only_disk(runs: Runs, small_disk: Path, read_only_disk: Callable[[], None]) -> None:
    folder = create_run(
        small_disk / "runs", RunSpec(name="a", created=1.0, settings=None, cwd="/", memtop_version="0"), fresh=False
    )
    state = RunState(name="a", folder=str(folder.path), state=Phase.FINISHED, attempt=1, created=1.0)
    write_json(folder.state_path, StateFile(run=state, socket="none"))
    ledger = Ledger(folder.ledger_path)
    ledger.add_attempt(1, "start", None, 1.0)
    ledger.close()
    read_only_disk()
    assert runs.show(str(folder.path))["attempts"][0]["reason"] == "start"
    assert "a  " in runs.memtop("runs", "--runs-dir", str(folder.path.parent)).stdout


def test_a_ledger_on_a_read_only_disk_whose_writer_was_killed(small_disk: Path, read_only_disk: Callable[[], None]) -> None:
    ledger = Ledger(small_disk / "ledger.sqlite")
    ledger.add_attempt(1, "start", None, 1.0)
    # What a killed writer leaves: rows in the second file.
    for name in ("ledger.sqlite", "ledger.sqlite-wal"):
        shutil.copy(small_disk / name, small_disk / f"left-{name}")
    ledger.close()
    read_only_disk()
    with pytest.raises(
        sqlite3.OperationalError, match="its writer was killed, and its folder cannot be written; copy the run's"
    ):
        Ledger(small_disk / "left-ledger.sqlite", read_only=True)


@pytest.mark.parametrize(("resumes", "price"), [(True, "[training unchanged, resumes]"), (False, "[training unchanged]")])
def test_a_remedy_is_said_to_resume_only_if_that_is_known(resumes: bool, price: str) -> None:
    assert price in "\n".join(proposal_lines(PROPOSAL, resumes=resumes))


def test_show_lists_what_can_be_done(runs: Runs, dead: RunFolder) -> None:
    lines = [line.strip() for line in runs.memtop("show", "a").stdout.splitlines()]
    shown = lines[lines.index("what can be done") + 1 :]
    assert shown == [
        "out of host memory: 14 MiB was refused.",
        "evidence: Error code 12",
        "anonymous memory of rank 0 grew by 5.0 MiB per update",
        "memtop does nothing by itself: --on-oom ask; you can do one of these:",
        "1. batch 4 -> 2, accumulation 8 -> 16: effective batch stays 32 [training unchanged, resumes]",
        "predicted peak 2.0 GiB of 8.0 GiB (25.0 %, safe): line through B 4 and B 8",
        "memtop restart a --batch 2 --accum 16",
        "2. sequence length 128 -> 64 [changes training, resumes, needs your consent]",
        "peak not known: one measured peak is known (B 4), two are needed",
        "memtop restart a --seq-len 64",
        "- see who else holds the card",
    ]


def test_a_reason_that_several_remedies_share_is_said_once() -> None:
    other = replace(SHORTER, id="other", title="another", forecast_unknown="no look at it")
    lines = list(proposal_lines(replace(PROPOSAL, remedies=(SMALLER, SHORTER, replace(SHORTER, id="again"), other))))
    assert [line.strip() for line in lines if "not known" in line] == [
        "peaks not known where none is given: one measured peak is known (B 4), two are needed",
        "peak not known: no look at it",
    ]
    (last,) = (line for line in proposal_lines(replace(PROPOSAL, remedies=())) if "by itself" in line)
    assert last == "memtop does nothing by itself: --on-oom ask"


def test_show_lists_the_configurations(runs: Runs, dead: RunFolder) -> None:
    lines = [line.strip() for line in runs.memtop("show", "a").stdout.splitlines()]
    assert [line for line in lines if line.startswith("configuration")] == [
        "configuration 1  8 x 4, T 128, from update 1, peak ≥ 474 MiB, mean 1.5 samples/s, ran out of host memory (start)",
        "configuration 2  4 x 8, T 128, from update 2, peak 474 MiB, mean 1.5 samples/s, replaced "
        "(allocation failure at update 2: batch 8 -> 4)",
        "configuration 3  8 x 4, T 128, from update 3, peak ≥ 474 MiB, mean 1.5 samples/s, was killed for lack of host memory "
        "(restart with the settings of configuration 1)",
    ]


def test_a_peak_that_memory_of_earlier_settings_hides_has_a_bound() -> None:
    """A program keeps the host memory that it has freed."""
    failed = msgspec.to_builtins(configuration(1, SETTINGS, "start", "host_oom_alloc"))
    after = {
        **msgspec.to_builtins(configuration(2, HALF, "batch 8 -> 4", "finished")),
        "attempt": failed["attempt"],
        "peak": None,
    }
    assert ", peak ≤ 474 MiB, " in _configuration_line(after, [failed])
    assert "peak" not in _configuration_line({**after, "attempt": failed["attempt"] + 1}, [failed])
    assert "peak" not in _configuration_line(after, [{**failed, "outcome": "gpu_oom"}])


def test_a_configuration_without_an_update_shows_what_was_requested(
    dead: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        replace(configuration(1, None, "start", "replaced"), uses={"batch": 8, "accumulation": 1}),
        replace(configuration(2, None, "restart", "stopped"), knobs={"batch": "4", "accumulation": "2"}),
        replace(configuration(3, None, "restart", None), knobs={"batch": "4"}, uses={"batch": 2, "accumulation": 1}),
        configuration(4, None, "restart", None),
    ]
    with closing(Ledger(dead.ledger_path)) as ledger:
        for row in rows:
            ledger.save_configuration(ConfigurationRecord(configuration=row, starts=(ConfigurationStart(attempt=1),)))
    assert run(["show", str(dead.path)]) == 0
    shown = capsys.readouterr().out
    found = re.findall(r"configuration \d+  (.*?), from update", shown)
    assert found == ["batch 8, accumulation 1", "requested: batch 4, accumulation 2", "batch 2, accumulation 1", "own program"]


def test_the_speed_of_a_run_is_one_number(dead: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """In the dashboard, the list, `show`, `compare` and the report. That of a configuration is
    called mean."""
    run_state = replace(read_state(dead), samples_per_second=31.25, tokens_per_second=8200.0)
    write_json(dead.state_path, StateFile(run=run_state, socket="no-socket"))
    runs_dir = str(dead.path.parent)
    shown = {}
    for words in (["runs"], ["show", "a"], ["compare", "a", "a"], ["report", "a", "--markdown", "-"]):
        assert run([*words, "--runs-dir", runs_dir]) == 0
        shown[words[0]] = capsys.readouterr().out
    panel = "\n".join("".join(text for text, _ in row) for row in draw_training(Store(run=run_state), 90, 8))
    assert "31.2 samples/s" in panel
    assert "8 200 tok/s" in panel
    assert re.search(r"^a +failed .* 31\.2 ", shown["runs"], re.MULTILINE)
    assert "  speed       31.2 samples/s, 8 200 tok/s" in shown["show"]
    assert "| speed | 31.2 samples/s, 8 200 tok/s |" in shown["report"]
    assert "| ≥ 474 MiB |" in shown["report"]
    assert re.search(r"^samples/s +31\.2 +31\.2$", shown["compare"], re.MULTILINE)
    assert re.search(r"^tokens/s +8 200 +8 200$", shown["compare"], re.MULTILINE)


def test_show_has_what_the_comparison_has(dead: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Ledger(dead.ledger_path)) as ledger:
        ledger.add_event(Event(time=3.0, attempt=1, kind="evaluation", message="evaluation", data={"update": 2, "loss": 2.5}))
        ledger.add_reports(1, 0, [Step(update=900, loss=1.5, peak_bytes=3 * GIB, time=3.0)], 9)
    assert run(["show", str(dead.path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  loss        best 1.5000, evaluation 2.5000$", shown, re.MULTILINE), shown
    assert re.search(r"^  peak        GPU memory 3\.0 GiB", shown, re.MULTILINE), shown


def test_show_wraps_between_words_and_keeps_paths_whole() -> None:
    path = "/a" * 60
    rows = list(wrapped("  warning     " + "some words " * 12 + path, 80))
    assert {len(row) <= 80 for row in rows[:-1]} == {True}
    assert rows[1].startswith(" " * 14 + "some") or rows[1].startswith(" " * 14 + "words")
    assert rows[-1] == " " * 14 + path
    assert list(wrapped("  folder      " + path, None)) == ["  folder      " + path]


def test_a_rollback_to_the_present_settings_is_refused_in_one_line(runs: Runs, dead: RunFolder) -> None:
    again = "`memtop restart a` starts it again unchanged"
    present = runs.memtop("rollback", "a", "3", status=2)
    assert present.stderr == f"memtop: N 3: configuration 3 of run 'a' is the present one; {again}\n"
    with pytest.raises(UsageError, match="configuration 1 of run 'a' has the settings of the present one, 3; "):
        change_to(dead, 1, with_state=False)
    assert change_to(dead, 2, with_state=False) == change_to(dead, None, with_state=False) == Change(configuration=2)
    assert change_to(dead, 1, with_state=True) == Change(configuration=1, state_before=1)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "run 'a': no earlier configuration has other settings: it was never started"),
        ([SETTINGS], "run 'a': no earlier configuration has other settings: its first configuration is its only one"),
        ([SETTINGS, SETTINGS], "run 'a': no earlier configuration has other settings: it has 1 to 2"),
        ([None], requests._OWN),
    ],
)
def test_a_rollback_without_an_earlier_configuration_says_why(
    dead: RunFolder, monkeypatch: pytest.MonkeyPatch, rows: list[Settings | None], said: str
) -> None:
    kept = [replace(read_configurations(dead.path)[0], number=n, settings=one) for n, one in enumerate(rows, 1)]
    monkeypatch.setattr(requests, "read_configurations", lambda path: kept)
    with pytest.raises(UsageError) as caught:
        change_to(dead, None, with_state=False)
    assert str(caught.value) == said


def test_a_restart_with_settings_that_ran_out_of_memory_prints_a_warning(dead: RunFolder) -> None:
    def said(change: Change) -> list[str]:
        return list(meant(planned(dead, change), change))

    again = "the run has died of memory with batch 8: this is the same, and saves nothing more"
    assert said(Change()) == [again]
    assert "this is more than that (16)" in said(Change(assignments={"batch": "16", "accumulation": "2"}))[0]
    # A preset does not raise the batch.
    assert not said(Change(preset="low"))
    assert not said(Change(assignments={"batch": "4", "accumulation": "8"}))
    # The supervisor refuses invalid settings.
    assert not said(Change(assignments={"batch": "0"}))


def test_a_restart_says_what_peak_is_foreseen_or_why_none(
    dead: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = replace(SETTINGS, device="cpu")
    state = RunState(name="a", folder=str(dead.path), state=Phase.FAILED, attempt=1, created=1.0, settings=on_cpu)
    write_json(dead.state_path, StateFile(run=state, socket="none"))
    smaller = Change(assignments={"batch": "2"})

    told: list[int | None] = []

    def said(change: Change) -> str:
        told.append(say_peak(planned(dead, change)))
        return capsys.readouterr().err

    why = "nothing was measured with these settings yet; no estimate: model.config.model_type: missing"
    assert said(smaller).startswith(f"memtop: the peak of host memory cannot be foreseen: {why}")
    with closing(Ledger(dead.ledger_path)) as ledger:
        for number, batch in ((4, 4), (5, 8)):
            settings = replace(on_cpu, batch=batch, accumulation=64 // batch)
            peak = Peak(batch=batch, bytes=batch << 30, updates=9, settings_key=settings_key(settings))
            row = replace(configuration(number, settings, "restart", "replaced"), peak=peak)
            ledger.save_configuration(ConfigurationRecord(configuration=row, starts=()))
    share = r"of \S+ [GT]iB \(\S+ % with other processes, (safe|edge|danger)\)"
    others = r"other processes hold \S+ [GM]iB"
    line = rf"memtop: host memory is foreseen to peak at 2\.0 GiB {share}: line through peaks at B 4 and B 8; {others}\n"
    assert re.fullmatch(line, said(smaller))
    assert told == [None, 6], "--headless leaves out only a peak that was printed here"
    # As at a launch, with the split that would be safe.
    monkeypatch.setattr(gpus_of, "sample", lambda: MachineSnapshot(time=0.0, host=HostSample(total_bytes=8 << 30)))
    full, other = said(Change(assignments={"batch": "16", "accumulation": "2"})).splitlines()
    assert "16.0 GiB of 8.0 GiB (200.0 %, danger): line through peaks at B 4 and B 8" in full
    assert other == "memtop: --batch 4 --accum 8 keeps the effective batch, and peaks at about 4.0 GiB"
    assert said(Change()) == "", "nothing changes"
    assert said(Change(assignments={"batch": "0"})) == "", "the supervisor refuses it"
    write_json(dead.state_path, StateFile(run=replace(state, settings=None), socket="none"))
    assert said(smaller) == "", "a program of the user's own"


def test_rollback_before_a_spike_names_the_state_and_the_samples(dead: RunFolder) -> None:
    with pytest.raises(UsageError, match="the loss of run 'a' had no spike"):
        before_spike_of(dead)

    def spike(begin: int, end: int, state: int | None) -> None:
        data = {"begin": begin, "end": end, "state_update": state, "first_update": 4}
        with closing(Ledger(dead.ledger_path)) as ledger:
            ledger.add_event(Event(time=1.0, attempt=1, kind="spike", message="spike", data=data))
            ledger.add_event(Event(time=1.0, attempt=1, kind="plan", message="plan"))

    spike(0, 32, 1)
    spike(96, 224, 3)
    with pytest.raises(UsageError, match=r"the state of update 3 is not kept any more \(kept: none\)"):
        before_spike_of(dead)
    kept = state(dead.path / "train_latest_state.before_spike", 3)
    state(dead.latest_state, 9)
    assert before_spike_of(dead) == Change(assignments={"leave_out": "96-224"}, state_before=3)
    spike(96, 224, None)
    with pytest.raises(UsageError, match="no state from before update 4 was saved"):
        before_spike_of(dead)
    assert run(["rollback", "a", "2", "--before-spike", "--runs-dir", str(dead.path.parent)]) == 2
    assert run(["rollback", "a", "--accept-spike", "--before-spike", "--runs-dir", str(dead.path.parent)]) == 2
    assert kept.is_dir()


def test_only_the_newest_samplings_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtop.supervisor.run.record.ledger.SAMPLINGS_STORED", 3)
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        for number in range(6):
            for kind in ("sample", "plan"):
                ledger.add_event(Event(time=1.0, attempt=1, kind=kind, message=str(number)))
        assert [event.message for event in ledger.events(kind="sample")] == ["3", "4", "5"]
        assert len(ledger.events()) == 9
