"""Start and end: what a start loads, the screenshots of the documentation, and a terminal that is
closed."""

from __future__ import annotations

import os
import pty
import resource
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
from textual.drivers._writer_thread import MAX_QUEUED_WRITES, WriterThread

from memtop.cli.dashboard import remember, remembered
from memtop.tui.driver import WakingEvent, forget_output, wait_for_hangup
from tests.conftest import Runs
from tests.terminal import Terminal

HEAVY = ("torch", "transformers", "memtop.train", "memtop.supervisor.run.client", "pynvml")
RARE = ("memtop.tui.processes.kill", "memtop.tui.restart", "memtop.tui.presets", "memtop.tui.help")

RULES = ("memtop.supervisor.run.model", "memtop.supervisor.run.explain", "memtop.supervisor.run.rules")


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split())


def test_the_package_alone_does_not_load_textual() -> None:
    assert "textual" not in loaded_by("import memtop.tui")


def test_a_start_loads_nothing_that_can_wait() -> None:
    loaded = loaded_by("import memtop.tui.app, memtop.tui.feed")
    assert not loaded.intersection(HEAVY + RARE)
    # To read a run from its folder takes none of the rules that act on it.
    assert not loaded_by("import memtop.cli.watch").intersection(RULES)


@pytest.mark.long  # tests/tui/test_pictures.py draws the same screens
def test_the_screenshots_of_the_documentation_show_what_is_drawn_now(tmp_path: Path) -> None:
    """`python docs/make_screenshots.py` writes them again."""
    docs = Path(__file__).parents[2] / "docs"
    subprocess.run([sys.executable, str(docs / "make_screenshots.py"), str(tmp_path)], check=True, capture_output=True)
    made = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    # This one is recorded in a terminal, by bench/record_survival.py.
    kept = {path.name: path.read_text() for path in (docs / "screenshots").glob("*.svg") if path.stem != "survival"}
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == []


def test_the_recording_of_a_survival_plays_from_the_start_to_the_survival() -> None:
    """`python -m bench.record_survival` records it again."""
    recording = Path(__file__).parents[2] / "docs" / "screenshots" / "survival.svg"
    root = ElementTree.fromstring(recording.read_text())
    svg = "{http://www.w3.org/2000/svg}"
    (length,) = (float(one.attrib["dur"][:-1]) for one in root.iter(f"{svg}animate"))
    rows = [
        (
            float(begin.removeprefix("all.begin+").removesuffix("s")),
            " ".join(text.text or "" for text in group.iter(f"{svg}text")),
        )
        for group in root.iter(f"{svg}g")
        for begin in (one.attrib["begin"] for one in group.iter(f"{svg}set"))
    ]
    assert len({begin for begin, _ in rows}) > 20
    told = [
        min(begin for begin, words in rows if part in words) for part in ("importing torch", "Killed by", "the run went on")
    ]
    assert told == sorted(told)
    assert told[-1] < max(begin for begin, _ in rows) < length


def test_a_closed_terminal_is_distinguished_from_an_open_one() -> None:
    master, slave = pty.openpty()
    ended = WakingEvent()
    ended.set()
    assert not wait_for_hangup(slave, ended)
    ended.clear()
    os.close(master)
    assert wait_for_hangup(slave, ended)
    os.close(slave)


def ends_without_spinning(process: subprocess.Popen[bytes], master: int) -> None:
    """Close the terminal of a dashboard, which then ends and computes hardly anything until then.

    One that spins until it is killed needs a multiple of this processor time.
    """
    now, before = psutil.Process(process.pid).cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    os.close(master)
    # 1 if a write to the lost terminal failed first, 129 (a hang-up) if the app waited for its
    # writer.
    assert process.wait(120) in (0, 1, 129)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert whole - now.user - now.system < 2.0


def painted(environment: Mapping[str, str], term: str = "xterm-256color") -> dict[str, str]:
    return {**environment, "TERM": term, "COLUMNS": "100", "LINES": "30"}


def read_until(master: int, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        assert select.select([master], [], [], 120)[0], f"nothing was painted after {seen[-2000:]!r}"
        seen += os.read(master, 65536)


@contextmanager
def demo(folder: Path, term: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A painted dashboard of invented numbers, and the other end of its terminal."""
    master, slave = pty.openpty()
    # A session without a controlling terminal gets no signal.
    process = subprocess.Popen(
        [sys.executable, "-m", "memtop", "watch", "--demo"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        env=painted(os.environ, term),
        start_new_session=True,
    )
    os.close(slave)
    try:
        read_until(master, b"Help")
        yield process, master
    finally:
        process.kill()
        process.wait()


def test_the_dashboard_does_not_outlive_its_terminal(tmp_path: Path) -> None:
    with demo(tmp_path, "xterm-256color") as (process, master):
        ends_without_spinning(process, master)


def test_the_dashboard_of_a_live_run_does_not_outlive_its_terminal_and_the_run_does(runs: Runs) -> None:
    command = [sys.executable, "-m", "memtop", "train", "--name", "a", "--", "sleep", "600"]
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, cwd=runs.root, env=painted(runs.environment), start_new_session=True
    )
    os.close(slave)
    try:
        read_until(master, b"Help")
        runs.wait("a", lambda d: d["trainer_pid"] is not None)
        ends_without_spinning(process, master)
    finally:
        process.kill()
        process.wait()
    assert runs.show("a")["alive"]


@pytest.mark.parametrize("term", ["", "no-such-terminal", "../../etc/passwd", "x\x1b[31m" * 1000])
def test_a_term_that_names_no_terminal_does_not_stop_the_dashboard(tmp_path: Path, term: str) -> None:
    with demo(tmp_path, term) as (process, master):
        os.write(master, b"q")
        while select.select([master], [], [], 120)[0]:
            try:
                os.read(master, 65536)
            except OSError:
                break  # The program has closed the terminal.
        assert process.wait(120) == 0
        os.close(master)


def test_the_theme_comes_from_its_variable_textuals_or_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MEMTOP_THEME", "TEXTUAL_THEME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert "theme" not in remembered()[0]
    file = tmp_path / "memtop/config.toml"
    file.parent.mkdir()
    file.write_text('theme = "memtop-ligt"\n')
    assert remembered() == ({}, [f"{file}: theme 'memtop-ligt': unknown, and ignored; did you mean memtop-light?"])
    file.write_text('theme = "memtop-light"\n')
    assert remembered()[0]["theme"] == "memtop-light"
    monkeypatch.setenv("TEXTUAL_THEME", "nord")
    assert remembered()[0]["theme"] == "nord"
    monkeypatch.setenv("TEXTUAL_THEME", "textual-ligth")
    wrong = "TEXTUAL_THEME: theme 'textual-ligth': unknown, and ignored; did you mean textual-light?"
    assert remembered() == ({}, [wrong])
    monkeypatch.setenv("MEMTOP_THEME", "gruvbox")
    assert remembered()[0]["theme"] == "gruvbox"
    monkeypatch.setenv("MEMTOP_THEME", "grovbox")
    assert remembered() == ({}, ["MEMTOP_THEME: theme 'grovbox': unknown, and ignored; did you mean gruvbox?"])


def test_a_chosen_theme_is_the_next_one_unless_something_comes_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MEMTOP_THEME", "TEXTUAL_THEME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "memtop/config.toml"
    assert remember("theme", "nord") == (file, None)
    assert remembered()[0]["theme"] == "nord"
    monkeypatch.setenv("TEXTUAL_THEME", "gruvbox")
    assert remember("theme", "dracula") == (file, "TEXTUAL_THEME")
    assert remembered()[0]["theme"] == "gruvbox"


def test_a_waking_event_wakes_the_thread_that_waits_now() -> None:
    event = WakingEvent()
    event.set()
    for _ in range(2):
        with event.waking() as file:
            assert select.select([file], [], [], 0)[0] == []
            event.set()
            assert select.select([file], [], [], 0)[0] == [file]


def test_a_dashboard_that_was_suspended_takes_keys_again(tmp_path: Path) -> None:
    # Only a shell with a terminal of its own stops and continues programs.
    shell = ["setsid", "--wait", "--ctty", "bash", "--norc", "-i"]
    terminal = Terminal(shell, columns=100, rows=30, cwd=str(tmp_path), environment={**os.environ, "PS1": "ready> "})
    try:
        terminal.wait_for("ready>")
        terminal.keys(f"{shlex.quote(sys.executable)} -m memtop watch --demo\n")
        for stop in (signal.SIGTSTP, signal.SIGSTOP):
            terminal.wait_for("tiny-llama", "Help")
            below = psutil.Process(terminal.process.pid).children(recursive=True)
            (dashboard,) = (process for process in below if "--demo" in process.cmdline())
            terminal.clear()
            dashboard.send_signal(stop)
            terminal.wait_for("Stopped", "ready>")
            terminal.clear()
            terminal.keys("fg\n")
            terminal.wait_for("tiny-llama", "Help")
            terminal.clear()
            dashboard.send_signal(signal.SIGCONT)
            terminal.wait_for("tiny-llama", "Help")
        terminal.keys("?")
        terminal.wait_for("Keys and marks")
        terminal.leave("Keys and marks")
        terminal.keys("q")
        terminal.wait_for("ready>")
        terminal.keys("exit\n")
        assert terminal.wait() == 0
    finally:
        terminal.close()


def test_output_that_nobody_can_write_is_dropped(tmp_path: Path) -> None:
    """Otherwise a thread that writes blocks forever."""
    with (tmp_path / "read-only").open("w+") as file:
        writer = WriterThread(file)
        for _ in range(MAX_QUEUED_WRITES):
            writer.write("x")
        driver: Any = SimpleNamespace(_writer_thread=writer)
        forget_output(driver)
        writer.write("one more")
        writer.start()
        writer.stop()
        assert file.tell() == len("one more")
    forget_output(None)
