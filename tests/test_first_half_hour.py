"""The script for the first half hour on a GPU, and the wheels that it takes along: what can be
checked without one. `python -m bench.first_half_hour --device cpu` rehearses all parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from bench import first_half_hour, wheels
from bench.first_half_hour import Part, Results, checks, parts, run_part, without
from bench.train import in_turns, loss_difference, over_hugging_face, values_of
from bench.waits import idle
from tests.forking import Program, run
from tests.train.launching import ROOT, environment, printed_by

LONG = 500
"""Seconds after which something hangs. A busy machine takes a fraction of it."""
pytestmark = pytest.mark.timeout(2 * LONG)
COMMON = {"device": "cpu", "versions": {"torch": "1"}}
LINES = "import json; print('log'); print(json.dumps({'a': 1})); print(json.dumps({'a': 2}))"
DOCUMENT = "import json; print(json.dumps({'b': [1, 2]}, indent=2))"


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a part are forks, which have imported torch already."""
    stand_in = SimpleNamespace(Popen=Program, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(first_half_hour, "subprocess", stand_in)


def rows(file: Path) -> list[dict[str, Any]]:
    return list(Results(file, {}).rows())


def part(*code: str) -> Part:
    return Part("machine", 1, "about", tuple(("-c", one) for one in code))


def test_every_json_line_and_document_of_a_part_is_a_result(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert run_part(part(LINES, DOCUMENT), file, COMMON, LONG) == "done"
    found = rows(file)
    assert [row.get("a", row.get("b")) for row in found] == [1, 2, None, [1, 2], None, None]
    assert [row["exit_status"] for row in found if "command" in row] == [0, 0]
    assert all(row["versions"] == {"torch": "1"} and row["part"] == "machine" and row["time"] for row in found)
    assert (found[-1]["ended"], found[-1]["exit_statuses"]) == ("done", [0, 0])
    assert Results(file, {}).ended("cpu") == {"machine"}
    assert Results(file, {}).ended("cuda") == set()


def test_a_result_is_in_the_file_at_once_and_a_part_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.jsonl"

    class Limit(threading.Timer):
        """Is reached when the first result is in the file."""

        def run(self) -> None:
            while '"a": 1' not in file.read_text():
                assert not self.finished.wait(0.02), "the part ended before its limit"
            self.function(*self.args)

    monkeypatch.setattr(first_half_hour.threading, "Timer", Limit)
    # It ends only when it is interrupted, and writes once more when it is.
    code = (
        "import signal\ntry:\n    print('{\"a\": 1}', flush=True)\n    signal.pause()\n"
        "except KeyboardInterrupt:\n    print('{\"a\": 2}', flush=True)\n"
    )
    file.touch()
    assert run_part(part(code), file, COMMON, LONG) == "limit"
    found = rows(file)
    assert [row.get("a") for row in found] == [1, 2, None]
    assert (found[-1]["ended"], found[-1]["exit_statuses"]) == ("limit", [None])
    assert Results(file, {}).ended("cpu") == set(), "it is repeated at the next call"


def test_results_are_whole_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    Results(file, COMMON).append({"part": "machine", "ended": "done"})
    with file.open("a") as cut:
        cut.write(json.dumps({"part": "waits", "device": "cpu", "ended": "done"})[:-3])
    assert Results(file, {}).ended("cpu") == {"machine"}


def test_a_failure_is_recorded_with_the_end_of_its_log(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert run_part(part("import sys; sys.exit('no such thing')", LINES), file, COMMON, LONG) == "failed"
    last = rows(file)[-1]
    assert (last["ended"], last["exit_statuses"]) == ("failed", [1, 0])
    assert "no such thing" in last["end_of_log"]


@pytest.mark.usefixtures("forked")
def test_tests_are_results_and_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to load
    file = tmp_path / "results.jsonl"
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\ndef test_one(record_property):\n    record_property('bytes', 5)\n"
        "def test_two():\n    assert 1 == 2\ndef test_three():\n    pytest.skip('no CUDA device')\n"
    )
    # pytest finds its root by the first file.
    command = ("-m", "pytest", "-q", "-p", "bench.first_half_hour", f"--rootdir={tmp_path}", "-c", os.devnull, str(tests))
    some = Part("trainer", 1, "about", (command,))
    assert run_part(some, file, COMMON, LONG) == "failed"
    one, two, three, counted, _, _ = rows(file)
    assert (one["outcome"], one["bytes"], two["outcome"]) == ("passed", 5, "failed")
    assert "assert 1 == 2" in two["reason"]
    assert (three["outcome"], three["reason"]) == ("skipped", "no CUDA device")
    assert counted["tests"] == {"passed": 1, "failed": 1, "skipped": 1}
    # As if the machine had been taken away before the last test.
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]))
    assert run_part(some, file, COMMON, LONG) == "done"
    assert [row["test"] for row in rows(file) if "test" in row] == [one["test"], two["test"], three["test"]]
    # A part that has ended is repeated as a whole.
    assert Results(file, {}).unfinished("trainer", "cpu") == []


def test_an_interrupted_part_goes_on_with_what_has_no_result(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    run_part(part(LINES, DOCUMENT), file, COMMON, LONG)
    lines = file.read_text().splitlines(keepends=True)
    # The second command was under way.
    file.write_text("".join(lines[:3]))
    assert run_part(part(LINES, DOCUMENT), file, COMMON, LONG) == "done"
    assert [row.get("a", row.get("b")) for row in rows(file)] == [1, 2, None, [1, 2], None, None]
    before = [{"recipe": "first-run", "preset": "low"}, {"test": "a"}]
    assert without(("-m", "bench.recipes_and_presets"), before) == ["--skip", "first-run/low"]
    assert without(("-m", "pytest"), before) == ["--deselect", "a"]


def test_a_part_with_results_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    for name in (part.name for part in parts("cpu")):
        Results(file, {"part": name, **COMMON}).append({"ended": "done"})
    command = [sys.executable, "-m", "bench.first_half_hour", "--device", "cpu", "--results", str(file)]
    before = file.read_text()
    done = run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(": has results") == len(parts("cpu"))
    assert file.read_text() == before


def test_every_command_of_every_part_exists() -> None:
    for device in ("cpu", "cuda"):
        for each in parts(device):
            for command in each.commands:
                for word in command:
                    assert not word.startswith("tests") or (ROOT / word).exists(), word
                if command[1].startswith("bench."):
                    assert (ROOT / f"{command[1].replace('.', '/')}.py").exists()


def test_idle_time_is_what_no_kernel_covers() -> None:
    found = idle([(50.0, 100.0, "c"), (0.0, 10.0, "a"), (5.0, 20.0, "b")])
    assert found["busy_fraction"] == 0.7
    assert found["gaps"] == [{"microseconds": 30.0, "until": "c"}]
    assert found["gaps_over_20_microseconds"] == 1
    assert idle([]) == {"busy_fraction": None, "gaps": []}


# --- the parts themselves, with tiny models -------------------------------------------------------


def test_both_arms_of_the_comparison_do_the_same_training() -> None:
    case = ("--case", "small_vocabulary", "--updates", "1", "--accumulation", "1")
    mine, other = (printed_by("-m", "bench.train", "--arm", arm, *case) for arm in ("memtop", "hugging_face"))
    assert len(mine["losses"]) == 4
    assert loss_difference(mine["losses"], other["logged_losses"]) == pytest.approx(0, abs=1e-5)
    for name in ("samples_per_second", "samples_per_cpu_second", "peak_growth_mib", "peak_mib"):
        assert all(value > 0 for run in (mine, other) for value in values_of(run, name))


def test_the_arms_take_turns() -> None:
    done = []

    def arm(name: str) -> Generator[None, None, dict[str, Any]]:
        for number in range(3):
            done.append(f"{name}{number}")
            yield
        done.append(f"{name}3")
        return {"arm": name}

    assert in_turns([arm("a"), arm("b")]) == [{"arm": "a"}, {"arm": "b"}]
    assert done == ["a0", "b0", "b1", "a1", "a2", "b2", "b3", "a3"]


def test_the_verdict_compares_medians_with_what_is_promised() -> None:
    def pair(speed: float, growth: float) -> tuple[dict[str, Any], dict[str, Any]]:
        values = {"samples_per_cpu_second": 1.0, "peak_mib": 1.0, "losses": [2.0] * 4, "logged_losses": [2.0]}
        mine = {**values, "samples_per_second": speed, "peak_growth_mib": growth}
        return mine, {**values, "samples_per_second": 1.0, "peak_growth_mib": 1.0}

    for speed, growth, kept in ((1.2, 0.5, True), (1.1, 0.5, False), (1.2, 0.8, False)):
        found = over_hugging_face("large_vocabulary", [pair(speed, growth), pair(speed, growth)])
        assert found["verdict"]["kept"] is kept
        assert found["largest_loss_difference"] == 0


def test_waits_are_counted_and_the_updates_profiled() -> None:
    found = printed_by("-m", "bench.waits", "--device", "cpu", "--case", "causal")
    assert found["calls"]["aten::_local_scalar_dense"] >= 1
    assert 0 < found["busy_fraction"] <= 1
    assert found["update_seconds"] > 0


@pytest.mark.usefixtures("forked")
def test_the_tests_for_a_gpu_run_in_the_rehearsal(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    some = ("tests/gpu/test_trainer.py", "-k", "shrinks and not bf16")
    assert run_part(Part("trainer", 1, "about", (checks(*some),)), file, COMMON, LONG) == "done"
    assert [(row["outcome"], row.get("reason")) for row in rows(file) if "test" in row] == [
        ("skipped", "fp16 needs a GPU"),
        ("passed", None),
    ]
    (passed,) = [row for row in rows(file) if row.get("outcome") == "passed"]
    assert passed["weight_distance"]["small"] < 1e-3


# --- wheels ---------------------------------------------------------------------------------------


def test_what_the_machine_has_is_left_out_and_extras_are_not(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("Package Version\n------- ---\ntextual 8.2\nMarkdown_It.Py==4.0\n")
    have = wheels.names_in(tmp_path / "list")
    assert {"textual", "markdown-it-py"} <= have
    whole = wheels.closure([Requirement("textual")], "3.12")
    assert {"textual", "rich", "markdown-it-py", "linkify-it-py"} <= whole.keys()
    rest = wheels.closure([Requirement("markdown-it-py[linkify]"), Requirement("tomli; python_version < '3.11'")], "3.12", have)
    assert "linkify-it-py" in rest
    assert not {"markdown-it-py", "textual", "tomli"} & rest.keys()


def test_the_stripped_wheel_keeps_one_library_for_gpus(tmp_path: Path) -> None:
    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    libraries = ["cpu", "cuda126", "cuda130", "rocm70"]
    record = "bitsandbytes-1.dist-info/RECORD"
    names = [f"bitsandbytes/libbitsandbytes_{name}.so" for name in libraries]
    with zipfile.ZipFile(wheel, "w") as file:
        for name in names:
            file.writestr(name, name)
        file.writestr(record, "".join(f"{name},sha256=x,1\n" for name in names))
    wheels.strip(wheel, "130")
    with zipfile.ZipFile(wheel) as file:
        assert file.namelist() == [names[0], names[2], record]
        assert [line.split(",")[0] for line in file.read(record).decode().splitlines()] == [names[0], names[2]]
    with pytest.raises(SystemExit, match=r"--cuda 999: .* has .*cuda130"):
        wheels.strip(wheel, "999")
