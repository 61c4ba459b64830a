"""Text from outside cannot control the terminal: nothing raw reaches it from any command."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memtop.cli import run
from memtop.cli.output import json_text, print_lines, print_message
from memtop.supervisor.clean import LONGEST, clean
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, StateFile, create_run, write_json
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.wire import Phase, RunState
from tests.conftest import Runs
from tests.forking import Program
from tests.tui.support import DIAGNOSIS, PROPOSAL, SMALLER

RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What must never reach a terminal; a line feed may."""
HOSTILE = (
    "\x1b]52;c;UFdORUQ=\x07\x1b[2J\x9b31m\x1b]0;title\x1b\\\x1bPq\x9c\u202eright\u2066\u200f\u061c\u2028\x07\r\x7f"
    "\nforged row\x1b]0;open"
)
OUTSIDE = st.text(
    st.sampled_from(
        "ab[];?0m\\ \t\r\n\x00\x07\x08\x1b\x7f\x84\x85\x90\x98\x9b\x9c\x9d\x9f\u061c\u200e\u200f\u202e\u2028\u2069\ud800é日"
    )
    | st.characters(),
    max_size=200,
)


@given(OUTSIDE)
def test_any_text_becomes_one_harmless_line(text: str) -> None:
    shown = clean(text)
    assert not RAW.search(shown)
    assert "\n" not in shown
    assert clean(shown) == shown
    shown.encode()


@given(st.text(st.characters(categories=("L", "N", "P", "S", "M")), max_size=200))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert clean(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mError\x1b[0m", "Error"),
        ("\x9b31mError\x9b0m", "Error"),
        ("\x1b]0;title\x07a\x1b]52;c;eA==\x1b\\b\x9d0;t\x9cc\x1bP1$q\x9cd", "abcd"),
        ("\x1b]0;the rest of the line stays", "0;the rest of the line stays"),
        ("\x1b\x1b[2J[2Jnothing new is formed", "[2Jnothing new is formed"),
        ("\x1b(B\x1bc\x1b#8text", "text"),
        ("one\r\ntwo\x85three\u2028four\tfive", "one two three four    five"),
        ("user\u202etxt.exe", "usertxt.exe"),
        ("\udcff\udcfe.toml", "\ufffd\ufffd.toml"),
        ("می\u200cخواهم 👩\u200d🚀", "می\u200cخواهم 👩\u200d🚀"),
        ("x" * (LONGEST + 1), "x" * LONGEST + "…"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert clean(text) == shown


@pytest.mark.parametrize("text", ["\x1b]" * 50_000, "\x1b[" + "0;" * 50_000, "\x9d" + "a" * 100_000, "\x1b[" * 50_000])
def test_long_texts_of_open_sequences(text: str) -> None:
    assert not RAW.search(clean(text))


@given(OUTSIDE)
def test_json_is_exact_data_without_control_characters(text: str) -> None:
    document = json_text({"text": text})
    assert json.loads(document) == {"text": text}
    assert document.isascii()
    assert document.isprintable()


# --- commands on a terminal -----------------------------------------------------------------------


class Screen:
    """A pseudo-terminal that changes nothing, in place of stdout and stderr."""

    def __init__(self, encoding: str) -> None:
        self._master, slave = pty.openpty()
        tty.setraw(slave)
        self.out = os.fdopen(slave, "w", encoding=encoding)

    def read(self) -> bytes:
        """Everything that was written since the last call."""
        self.out.flush()
        found = b""
        while select.select([self._master], [], [], 0)[0]:
            found += os.read(self._master, 65536)
        return found

    def close(self) -> None:
        self.out.close()
        os.close(self._master)


@contextlib.contextmanager
def terminal(encoding: str = "utf-8") -> Iterator[Screen]:
    screen = Screen(encoding)
    with contextlib.redirect_stdout(screen.out), contextlib.redirect_stderr(screen.out):
        try:
            yield screen
        finally:
            screen.close()


@given(st.lists(OUTSIDE, max_size=4))
def test_whatever_is_printed_reaches_the_terminal_as_that_many_harmless_lines(texts: list[str]) -> None:
    with terminal() as screen:
        print_lines(*texts)
        print_message(*texts)
        shown = screen.read().decode()
    assert not RAW.search(shown)
    assert shown.count("\n") == 2 * len(texts)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run whose every text comes from an attacker, and the place of the commands."""
    runs_dir = tmp_path / "runs\x1b[31m\x9b2J\u202e"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMTOP_RUNS_DIR", str(runs_dir))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    command = ("python", HOSTILE)
    spec = RunSpec(name="a", created=1.0, settings=None, command=command, cwd=HOSTILE, memtop_version="0")
    folder = create_run(runs_dir, spec, fresh=False)
    diagnosis = replace(DIAGNOSIS, summary=HOSTILE, evidence=(HOSTILE, "b"))
    ledger = Ledger(folder.ledger_path)
    ledger.add_attempt(1, HOSTILE, None, 1.0)
    ledger.update_attempt(1, ended=2.0, exit_status=1, outcome="failed", diagnosis={"summary": HOSTILE})
    ledger.close()
    state = RunState(
        name="a",
        folder="x",
        state=Phase.FAILED,
        attempt=1,
        created=1.0,
        command=command,
        reason=HOSTILE,
        warnings=(HOSTILE,),
        proposal=replace(
            PROPOSAL,
            diagnosis=diagnosis,
            causes=(HOSTILE,),
            waiting=HOSTILE,
            remedies=(replace(SMALLER, title=HOSTILE, command=f"{HOSTILE}\nsecond"),),
            last_advice=(HOSTILE,),
        ),
    )
    write_json(folder.state_path, StateFile(run=state, socket="none"))
    (tmp_path / "log\x1b[31m\x9b2J.txt").write_text(f"x\n{HOSTILE}\nRuntimeError: {HOSTILE}\nMemoryError: {HOSTILE}")
    preset = f"title = {json_text(HOSTILE)}\ndescription = {json_text(HOSTILE)}"
    (tmp_path / "memtop.toml").write_text(f"[presets.hostile]\n{preset}\n")
    return folder


def test_no_command_lets_it_through(hostile: RunFolder) -> None:
    words = [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()", HOSTILE]
    with Program(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other, terminal() as screen:
        assert other.stdout is not None
        other.stdout.readline()
        _check_commands(screen, str(other.pid))
        other.stdin.close()


def _check_commands(screen: Screen, pid: str) -> None:
    for status, *arguments in (
        (0, "show", "a"),
        (0, "runs"),
        (0, "presets"),
        (0, "presets", "hostile"),
        (0, "watch", "a", "--once", "--read-only"),
        (0, "watch", "--once", "--read-only", "--pid", pid),
        (0, "watch", "a", "--csv", "--read-only"),
        (0, "diagnose", "log\x1b[31m\x9b2J.txt"),
        (0, "show", "a", "--json"),
        (0, "watch", "--once", "--json", "--read-only", "--pid", pid),
        (1, "advise", "a"),
        (2, "diagnose", HOSTILE),
        (2, "show", HOSTILE),
        (2, "train", HOSTILE),
        (2, "train", "--set", f"data.train={HOSTILE}"),
        (2, "train", "--name", HOSTILE, "--", "true"),
        (2, "show", "a", f"--{HOSTILE}"),
        (2, HOSTILE),
        (2, "watch", "--interval", HOSTILE),
        (2, "show", "b", "--runs-dir", HOSTILE),
    ):
        assert run([str(word) for word in arguments]) == status, (arguments, screen.read())
        shown = screen.read()
        text = shown.decode()
        assert text, arguments
        assert not RAW.search(text), (arguments, text)
        assert "\nforged" not in text, arguments
        assert status == 0 or text.count("\n") == 1, (arguments, text)


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--headless", "--", "true", "\udcff"),
        ("train", "--headless", "--runs-dir", "\udcff\n", "--", "true"),
        ("train", "--headless", "--set", "model.config.x=\udcff\n"),
        ("restart", "a", "--set", "x=\udcff"),
    ],
)
def test_bytes_that_are_not_utf_8_are_refused_in_one_line(
    hostile: RunFolder, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    there = sorted(hostile.path.parent.iterdir())
    assert run(list(arguments)) == 2
    printed = capsys.readouterr().err
    assert "\\udcff" in printed
    assert "has bytes that are not UTF-8; rename it, or use another folder" in printed
    assert printed.count("\n") == 1
    assert sorted(hostile.path.parent.iterdir()) == there


HOSTILE_PROGRAM = f"""
import sys, memtop_agent
HOSTILE = {HOSTILE!r}
out = sys.stdout.buffer
out.write(HOSTILE.encode() + b"\\xff\\xfe\\xc3(\\n" + b"A" * 1_000_000 + b"\\n10%\\r20%\\r\\x1b[K30%\\r\\n")
out.flush()
memtop_agent.report("phase", phase=HOSTILE)
memtop_agent.report("warning", message=HOSTILE)
memtop_agent.report("warning", message="W" * 1_000_000)
memtop_agent.report("step", update=1, loss=1.0, sample_digest=HOSTILE)
memtop_agent.report("settings", update=1, changes={{HOSTILE: HOSTILE}}, reason=HOSTILE, total_updates=3)
memtop_agent.report("oom", update=1, phase=HOSTILE, error=HOSTILE, message="CUDA out of memory " + HOSTILE, survived=False)
raise RuntimeError("CUDA out of memory. " + HOSTILE + "E" * 1_000_000)
"""
"""It prints and reports text that must not reach a terminal, and fails with that text."""


def test_what_a_trained_program_prints_and_reports_never_reaches_the_terminal_raw(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    (runs.root / "hostile.py").write_text(HOSTILE_PROGRAM)
    arguments = ("train", "--headless", "--name", "a", "--", sys.executable, "hostile.py", HOSTILE)
    with runs.start(*arguments, text=False, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        printed = command.communicate(timeout=120)
    assert command.returncode == 1
    assert b"forged row" in printed[1], "the reports arrived"
    assert b"later ones like it are not announced" in printed[1], "one was too long"
    log = runs.path / "a/attempts/0001/output.log"
    assert log.stat().st_size > 2_000_000
    monkeypatch.setenv("MEMTOP_RUNS_DIR", str(runs.path))
    for words in ("show a", "runs", "watch a --once", "watch a --csv", f"diagnose {log}", "show a --json", "runs --json"):
        assert run(words.split()) == 0, words
        printed += capsysbinary.readouterr()
    for refused in ("advise a", "export a out", "restart a --set x=y"):
        assert run(refused.split()) in (1, 2)
        printed += capsysbinary.readouterr()
    for shown in (part.decode() for part in printed):
        assert not RAW.search(shown), shown
        assert "\nforged" not in shown
        assert max(map(len, shown.splitlines()), default=0) <= LONGEST + 100 or shown.startswith("{")


def test_the_doctor_works_in_any_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--runs-dir", str(tmp_path / "\udcff\x1b[2J\n")]) == 0
    assert "control socket" in capsys.readouterr().out


def test_a_message_that_a_full_disk_cannot_take_changes_no_exit_status() -> None:
    with Path("/dev/full").open("w") as full, Program([sys.executable, "-m", "memtop", "nonsense"], stderr=full) as command:
        assert command.wait(120) == 2


def test_a_terminal_of_another_encoding_gets_question_marks() -> None:
    with terminal("ascii") as screen:
        print_message("é\udcff…")
        assert screen.read() == b"???\n"
