"""The report of a run: what is in it, and that it can be shared."""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from msgspec.structs import asdict, replace

from memtop.cli import run
from memtop.cli.runs import _attempt_lines
from memtop.supervisor.monitor.history import Bucket
from memtop.supervisor.monitor.values import GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, create_run
from memtop.supervisor.run.record.ledger import Attempt, Ledger
from memtop.supervisor.run.report.charts import curve_svg, memory_svg
from memtop.supervisor.run.report.facts import (
    POINTS,
    Curve,
    Facts,
    Source,
    _curves,
    _joules,
    _thinned,
    _with_gaps,
    environment_rows,
    read_facts,
)
from memtop.supervisor.run.report.page import html, markdown, write_report
from memtop.supervisor.run.view import read_state
from memtop.supervisor.units import GIB
from memtop.supervisor.wire import Configuration, Event, Metric, Phase, RunState, StateUpdate
from memtop.tui.dashboard.notice import notice
from memtop.tui.feed import Connected
from memtop.tui.store import Store, fold
from tests.conftest import Runs
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)
from tests.recovery.injected import TINY
from tests.tui.support import SETTINGS

NOW = 1_790_000_000.0
STATE = RunState(name="qwen", folder="/runs/qwen", state=Phase.FAILED, created=NOW, updates=1240, total_updates=5100, loss=1.84)
DIAGNOSIS = {
    "kind": "gpu_oom",
    "summary": "GPU 0 ran out of memory",
    "evidence": ["<script>alert(1)</script> | \x1b[31mred", "```"],
}
ATTEMPTS = (
    Attempt(number=1, reason="start", settings=None, started=NOW, ended=NOW + 60, outcome="restarted", start_updates=0),
    Attempt(
        number=2,
        reason="batch 8 -> 4",
        settings=None,
        started=NOW + 70,
        ended=NOW + 200,
        outcome="failed",
        exit_status=1,
        diagnosis=DIAGNOSIS,
        start_updates=500,
    ),
)
USED = Curve("GPU 0: memory in use", ((NOW, 0.5), (NOW + 10, 0.92), (NOW + 20, None), (NOW + 60, 0.6), (NOW + 200, 0.7)))
FACTS = Facts(
    written=NOW + 300,
    state=STATE,
    attempts=ATTEMPTS,
    configurations=(),
    events=(Event(id=1, time=NOW, attempt=1, kind="attempt", message="a | b <i>"),),
    sources=(Source("GPU 0", USED, 0.92, 7.2e6),),
    curves=(Curve("loss", tuple((float(n), 3.0 - n / 1000) for n in range(0, 1200, 100))),),
    version="0.1.0",
)


class Balanced(HTMLParser):
    """Checks that every element is closed, and collects what the page would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.loads: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_loads_nothing_and_runs_nothing() -> None:
    page = html(FACTS)
    found = Balanced(page)
    assert not found.open
    assert not found.loads
    assert "script" not in found.seen
    assert "http" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "\x1b" not in page
    for words in (
        "1 240 of 5 100",
        "GPU 0 ran out of memory",
        "batch 8 -&gt; 4",
        "ran out of GPU memory, exit status 1",
        "92.0 %",
    ):
        assert words in page
    assert "about 2.00 kWh" in page


def test_markdown_has_whole_tables_and_no_markup_of_others() -> None:
    text = markdown(FACTS)
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) <= 1, block
    assert "<i>" not in text
    assert text.count("```") == 2, "the evidence cannot end its block"
    assert "**Why it failed**: GPU 0 ran out of memory" in text


def test_a_run_that_has_not_failed_shows_no_diagnosis() -> None:
    fine = replace(ATTEMPTS[1], outcome="finished")
    assert "Why it failed" not in html(replace(FACTS, attempts=(ATTEMPTS[0], fine)))


def points_of(svg: str) -> list[list[tuple[float, float]]]:
    pieces = re.findall(r'points="([^"]*)"', svg)
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in piece.split())] for piece in pieces]


def test_a_curve_stays_inside_its_chart_and_keeps_its_gaps() -> None:
    for svg in (
        memory_svg(USED, str, marks=(NOW + 70,)),
        curve_svg(USED, str),
        curve_svg(Curve("flat", ((0, 2.0), (9, 2.0))), str),
    ):
        for piece in points_of(svg):
            assert all(0 <= x <= 860 and 0 <= y <= 170 for x, y in piece)
    first, second = points_of(memory_svg(USED, str))
    assert (len(first), len(second)) == (2, 2)
    assert first[0][1] > first[1][1], "more memory is higher up"
    assert memory_svg(USED, str, marks=(NOW + 70, NOW - 5)).count('class="mark"') == 1


def test_long_runs_are_thinned_and_peaks_survive() -> None:
    rows = [Metric(update=n, attempt=1, loss=1.0, peak_bytes=(9 if n == 7000 else 5) * GIB) for n in range(50_000)]
    loss, peak = _curves(rows)
    assert (loss.title, peak.title) == ("loss", "peak memory of an update, GiB")
    assert len(loss.points) <= POINTS
    assert max(value or 0 for _, value in peak.points) == 9
    buckets = [Bucket(NOW + 10 * n, 10, 0.1, 0.2, 0.9 if n == 1234 else 0.3) for n in range(5000)]
    thinned = _thinned(buckets)
    assert len(thinned) <= POINTS
    assert max(bucket.high for bucket in thinned) == 0.9
    assert None not in [value for _, value in _with_gaps(thinned)]
    assert None in [value for _, value in _with_gaps([buckets[0], buckets[9]])]
    assert _joules([Bucket(NOW, 10, 0, 200, 0), Bucket(NOW + 10, 10, 0, 100, 0)]) == 3000
    assert _joules([]) is None


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    spec = RunSpec(name="qwen", created=NOW, settings=None, cwd="/", command=("python", "t.py"), memtop_version="0")
    return create_run(tmp_path / "runs", spec, fresh=False)


def test_a_run_that_never_started_has_a_report(folder: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run(["report", str(folder.path), "--html", str(page)]) == 0
    assert capsys.readouterr().err == f"memtop: written to {page}\n"
    assert "python t.py" in page.read_text()
    assert run(["report", str(folder.path), "--markdown", "-"]) == 0
    printed = capsys.readouterr().out
    assert "| command | python t.py |" in printed
    page.unlink()
    summary = tmp_path / "summary.md"
    assert run(["report", str(folder.path), "--markdown", str(summary), "--html", str(page)]) == 0
    assert (summary.read_text(), page.exists()) == (printed, True)


def test_what_cannot_be_read_or_written_is_one_line(folder: RunFolder) -> None:
    (folder.path / "report.html").mkdir()
    assert write_report(folder) == "the report cannot be written: Is a directory"
    folder.ledger_path.write_bytes(b"no database, but long enough to be taken for one" * 40)
    assert "cannot be read" in str(write_report(folder))


def test_the_facts_of_a_ledger(folder: RunFolder) -> None:
    ledger = Ledger(folder.ledger_path)
    ledger.add_event(Event(time=NOW, attempt=1, kind="attempt", message="attempt 1"))
    ledger.close()
    facts = read_facts(folder)
    assert [event.kind for event in facts.events] == ["attempt"]
    assert (facts.attempts, facts.sources, facts.curves) == ((), (), ())


def test_an_evaluation_and_what_the_model_has_written_are_in_the_report(folder: RunFolder) -> None:
    ledger = Ledger(folder.ledger_path)
    for update in (1, 2):
        data = {"update": update, "loss": 3.0 - update}
        ledger.add_event(Event(time=NOW + update, attempt=1, kind="evaluation", message="evaluation", data=data))
    written = {"update": 2, "prompts": ["Once <b>"], "texts": ["upon\na time & more"]}
    ledger.add_event(Event(time=NOW + 3, attempt=1, kind="sample", message="samples at update 2", data=written))
    ledger.close()
    page = html(read_facts(folder))
    assert ("evaluation loss", "1") in read_facts(folder).rows
    assert Curve("evaluation loss", ((1.0, 2.0), (2.0, 1.0))) in read_facts(folder).curves
    assert "<b>Once &lt;b&gt;</b>\nupon\na time &amp; more</pre>" in page


def test_the_memory_of_gpu_and_host_is_drawn_over_its_bands(folder: RunFolder) -> None:
    ledger = Ledger(folder.ledger_path)
    for second in range(0, 60, 5):
        gpu = GpuSample(index=0, uuid="GPU-a", used_fraction=0.5)
        sample = MachineSnapshot(time=NOW + second, gpus=(gpu,), host=HostSample(used_fraction=0.8))
        ledger.recorder.add(sample, None)
        ledger.recorder.write(sample, 1)
    ledger.close()
    page = html(read_facts(folder))
    for source in ("GPU 0", "host"):
        (chart,) = re.findall(f"<figcaption>{source}: memory in use.*?</figure>", page)
        assert 'class="edge"' in chart
        assert 'class="danger"' in chart
        assert len(points_of(chart)[0]) > 1


def test_an_evaluation_that_was_taken_back_is_not_in_the_curve(folder: RunFolder) -> None:
    ledger = Ledger(folder.ledger_path)
    for attempt, begins in ((1, 0), (2, 5)):
        ledger.add_attempt(attempt, "start", None, NOW, start_updates=begins)
    # The second attempt goes back to update 5, and evaluates less often. Then its workers go back
    # to update 12, and evaluate again at 14.
    for attempt, update in ((1, 4), (1, 8), (1, 12), (2, 10), (2, 14), (2, 18), (2, 14)):
        data = {"update": update, "loss": float(attempt)}
        ledger.add_event(Event(time=NOW, attempt=attempt, kind="evaluation", message="evaluation", data=data))
    ledger.close()
    assert read_facts(folder).curves == (Curve("evaluation loss", ((4.0, 1.0), (10.0, 2.0), (14.0, 2.0))),)


def test_a_long_text_of_the_model_is_cut_with_a_mark() -> None:
    def page(text: str) -> str:
        data = {"update": 2, "prompts": ["Once"], "texts": [text]}
        return html(replace(FACTS, samples=(Event(time=NOW, attempt=1, kind="sample", message="samples", data=data),)))

    assert f"{'a' * 2000}</pre>" in page("a" * 2000)
    assert f"{'a' * 2000} …</pre>" in page("a" * 2001)


def test_the_bands_of_memory_and_the_changes_of_settings_are_in_the_page() -> None:
    changed = [
        Configuration(number=n, attempt=n, reason="start", started=NOW, settings=replace(SETTINGS, batch=batch))
        for n, batch in ((1, 8), (2, 4))
    ]
    page = html(replace(FACTS, configurations=tuple(changed)))
    assert 'class="edge"' in page
    assert 'class="danger"' in page
    assert "<h2>Settings</h2>" in page
    assert "batch 8 -&gt; 4" in page


def test_a_report_names_the_driver_the_system_and_what_memtop_has_set(runs: Runs, nvml_library: Path) -> None:  # noqa: F811
    script = Script(runs.root / "script").driver("550.54.15").gpu(0, total=GIB, used=GIB // 2, uuid="GPU-0").write()
    runs.environment |= script.env(nvml_library)
    # A program that says nothing about itself.
    runs.memtop("train", "--detach", "--name", "a", "--gpus", "0", "--", "/bin/sleep", "3")
    runs.wait("a", lambda run: run["state"] == "finished" and run["supervisor_pid"] is None)
    rows = environment_rows(read_facts(RunFolder(runs.path / "a")))
    assert dict(rows)["driver"] == "550.54.15"
    assert dict(rows)["system"] == platform.freedesktop_os_release()["PRETTY_NAME"]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in dict(rows)["variables set by memtop"]
    assert str(runs.path) not in dict(rows)["variables set by memtop"]
    assert "550.54.15" in (runs.path / "a/report.html").read_text()


ONLY_SAYS_SO = """
import sys
for step in range(1, 6):
    print(f"step {step}/100 loss {3 - step / 10:.3f}", flush=True)
sys.exit("CUDA out of memory. Tried to allocate 1.23 GiB. GPU 0 has a total capacity of 19.58 GiB of which 1.06 GiB is free.")
"""


def test_what_only_the_words_of_a_program_say_is_nowhere_said_as_proven(runs: Runs) -> None:
    told = runs.root / "told"
    runs.environment["MEMTOP_NOTIFY_COMMAND"] = f'echo "$MEMTOP_NOTICE_TEXT" > {told}'
    said, short = "The program says that GPU 0 ran out of memory", "ran out of GPU memory (only its words say so)"
    headless = runs.memtop("train", "--name", "a", "--headless", "--", sys.executable, "-c", ONLY_SAYS_SO, status=1)
    runs.wait("a", lambda run: run["supervisor_pid"] is None)
    shown, report = runs.memtop("show", "a").stdout, runs.memtop("report", "a", "--markdown", "-").stdout
    for text in (headless.stderr + headless.stdout, shown, report, told.read_text()):
        assert said in text
        assert "ran out" not in text.replace(said, "").replace(short, "")
    assert short in report
    assert "out of" not in runs.memtop("runs").stdout
    store = fold(fold(Store(), Connected()), StateUpdate(run=read_state(RunFolder(runs.path / "a"))))
    assert said[:30] in notice(store, 79)


def test_a_run_writes_its_report_at_each_end(runs: Runs) -> None:
    def report(name: str) -> str:
        page = (runs.path / name / "report.html").read_text()
        assert not Balanced(page).open
        return page

    def ended(name: str, state: str, word: str = "") -> str:
        runs.wait(name, lambda run: run["state"] == state and run["supervisor_pid"] is None)
        assert f"| state | {word or state}" in (runs.path / name / "report.md").read_text()
        return report(name)

    program = (sys.executable, "-c", "import sys, time; print('on', flush=True); time.sleep(float(sys.argv[1])); sys.exit(3)")
    runs.memtop("train", "--detach", "--name", "failed", "--", *program, "0")
    runs.memtop("train", "--detach", "--name", "stopped", "--", *program, "600")
    runs.memtop("train", "--detach", "--name", "killed", "--", *program, "600")
    runs.memtop("train", "--detach", "--name", "finished", *TINY, "--max-updates", "2")
    assert "exit status 3" in ended("failed", "failed")
    runs.wait("stopped", lambda run: run["trainer_pid"] is not None)
    runs.memtop("stop", "stopped")
    ended("stopped", "stopped")
    killed = runs.wait("killed", lambda run: run["trainer_pid"] is not None)
    os.kill(killed["trainer_pid"], signal.SIGKILL)
    assert "SIGKILL" in ended("killed", "failed", "killed")
    page = ended("finished", "finished")
    assert "<h2>Environment</h2>" in page
    assert f"torch {torch.__version__}" in page
    assert sys.executable in page
    assert "OMP_NUM_THREADS=" in page
    runs.memtop("restart", "finished", "--max-updates", "3", "--detach")
    runs.wait(
        "finished", lambda run: len(run["attempts"]) == 2 and run["state"] == "finished" and run["supervisor_pid"] is None
    )
    assert "3 of 3" in report("finished")


def test_a_kind_of_failure_is_written_out() -> None:
    again = replace(ATTEMPTS[1], reason="host_oom_alloc at update 2: restart with batch 4")
    facts = replace(FACTS, attempts=(*ATTEMPTS[:1], again))
    for text in (html(facts), markdown(facts), "\n".join(_attempt_lines(asdict(again), STATE))):
        assert "out of host memory at update 2: restart with batch 4" in text
        assert "host_oom_alloc" not in text


def test_the_snapshot_of_the_memory_is_named() -> None:
    failed = replace(ATTEMPTS[1], diagnosis={**DIAGNOSIS, "snapshot_file": "/r/rank-0-memory.pickle"})
    words = "Which layers held the memory: memtop diagnose /r/rank-0-memory.pickle"
    facts = replace(FACTS, attempts=(*ATTEMPTS[:1], failed))
    assert words in html(facts)
    assert words in markdown(facts)
    assert words in "\n".join(_attempt_lines(asdict(failed), STATE))
