"""Shared fixtures: a folder for runs, the command line as a real process, and the end of all
processes that a test started."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pwd
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings

from memtop.cli import runs as runs_command
from memtop.supervisor.monitor.processes.proc import ProcessId, command_words, identify, is_alive
from memtop.supervisor.monitor.processes.signals import SignalRefused, signal_process
from memtop.supervisor.monitor.processes.table import all_pids, run_processes
from memtop.supervisor.run.record.folder import RunFolder, find_run
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.wire import Event
from tests.forking import LONG, Program, fork_workers
from tests.groups import MemoryGroup, memory_group

# `make test` tries the same examples every time. `make long` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None)
settings.load_profile("new" if LONG else "repeatable")

os.environ["HF_HUB_OFFLINE"] = "1"
# memtop refuses runs that others may write, and the tests write files of runs themselves.
os.umask(0o022)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script starts its background jobs with SIGINT ignored, and the programs that the tests start
    # would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Without stored bytecode, every program that a test starts would compile memtop's modules again,
# and every worker would compile all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Set this before anything imports torch. Models of these sizes take many times longer on two
# threads than on one as soon as other programs want the cores: the threads spin while they wait for
# each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# Those that wait most come first, then those that compute most, so that no worker is left with one
# of them at the end.
_SLOW_FILES = (
    "tests/test_end_to_end.py",
    "tests/test_survival.py",
    "tests/recovery/test_trial_live.py",
    "tests/run/test_supervisor.py",
    "tests/train/test_survive_processes.py",
    "tests/train/test_portable_state.py",
    "tests/recovery/test_bottleneck_live.py",
    "tests/train/test_agent_ranks.py",
    "tests/test_survival_chaos.py",
    "tests/recovery/test_trend_live.py",
    "tests/test_survival_commands.py",
    "tests/test_interpreters.py",
    "tests/test_full_disk.py",
    "tests/recovery/test_trend_restart.py",
    "tests/run/test_taking_over.py",
    "tests/train/test_exact_progress.py",
    "tests/train/test_processes.py",
    "tests/test_cli.py",
    "tests/test_surroundings.py",
    "tests/test_export_command.py",
    "tests/train/test_recipes.py",
    "tests/train/test_disk_wait.py",
    "tests/run/test_memory_failures.py",
    "tests/train/test_survive.py",
    "tests/tui/test_actions.py",
    "tests/tui/test_processes_screen.py",
    "tests/tui/test_screens.py",
    "tests/run/test_notices_live.py",
    "tests/run/test_spikes_live.py",
    "tests/run/test_energy.py",
    "tests/train/test_dry_run_zero.py",
    "tests/train/test_zero.py",
    "tests/train/test_dry_run.py",
    "tests/train/test_estimate.py",
    "tests/train/test_sampling.py",
    "tests/tui/test_chinese.py",
    "tests/tui/test_pictures.py",
    "tests/tui/test_ascii.py",
    "tests/tui/test_runs.py",
    "tests/test_safe_proposals.py",
    "tests/test_plan_command.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Only tests/gpu trains on a GPU, when it is named alone: elsewhere `device=auto` means the
    CPU."""
    named = [Path(word.partition("::")[0]).parts for word in config.args]
    if Path("/dev/nvidiactl").exists() and not all("gpu" in parts for parts in named):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Tests of a few files may need no torch."""
    if all(Path(word).is_dir() for word in config.args):
        fork_workers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if missing := [path for path in _SLOW_FILES if not (Path(__file__).parents[1] / path).exists()]:
        raise pytest.UsageError(f"tests/conftest.py: _SLOW_FILES names files that do not exist: {', '.join(missing)}")
    place = {path: number for number, path in enumerate(_SLOW_FILES)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def pytest_collection_finish() -> None:
    """Leave the modules of torch, transformers and others out of each garbage collection."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file again: files load further modules, and the dashboard ends the freeze. Without
    this, a collection takes up to a second in the end, and some tests collect many times."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


UNTIL_GO = """
import os, time
while not os.path.exists("go"):
    time.sleep(0.02)
"""
"""A program that waits until its folder has a file called `go`."""


class Runs:
    """A folder for runs, and `memtop` as a person would call it there."""

    def __init__(self, root: Path, sockets: Path) -> None:
        self.root = root
        self.path = root / "runs"
        self.environment = {
            **os.environ,
            "MEMTOP_RUNS_DIR": str(self.path),
            "MEMTOP_SOCKET_DIR": str(sockets),
            "XDG_CONFIG_HOME": str(root / "config"),
        }
        self.environment.pop("PYTHONPATH", None)

    def memtop(
        self, *arguments: str, status: int | None = 0, timeout: float = 120, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; `status` is what it must exit with (None: anything)."""
        with self.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
        if status is not None:
            assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *arguments: str, module: str = "memtop", **options: Any) -> Program:
        """Start a command."""
        given = {"cwd": self.root, "env": self.environment, "stdin": subprocess.DEVNULL, "text": True, **options}
        return Program([sys.executable, "-m", module, *arguments], **given)

    def show(self, name: str, *, metrics: bool = False) -> dict[str, Any]:
        extra = ["--metrics"] if metrics else []
        return dict(json.loads(self.memtop("show", name, "--json", *extra).stdout))

    def wait(self, name: str, condition: Callable[[dict[str, Any]], bool], seconds: float = 180) -> dict[str, Any]:
        """Look at what `show --json` tells until the condition holds; the document then.

        In this process: a command each time would take more of the machine than the run that is
        waited for.
        """
        folder, deadline = find_run(name, self.path), time.monotonic() + seconds
        while True:
            document = json.loads(msgspec.json.encode(runs_command.document(folder)))
            if condition(document):
                return document
            assert time.monotonic() < deadline, f"{name} after {seconds} s: {json.dumps(document, indent=1)}"
            time.sleep(0.1)

    def events(self, name: str, kind: str) -> list[Event]:
        """The run's events of that kind, oldest first."""
        with contextlib.closing(Ledger(find_run(name, self.path).ledger_path, read_only=True)) as ledger:
            return [event for event in ledger.events() if event.kind == kind]

    def kill(self, pid: int) -> None:
        """SIGKILL a process of a run under test."""
        identity = identify(pid)
        assert identity is not None
        signal_process(identity, signal.SIGKILL)

    def end_everything(self) -> None:
        """End the supervisors and programs of this folder's runs that a test left running."""
        for spec_path in self.path.glob("*/run.json"):
            folder = RunFolder(spec_path.parent)
            # Repeat until no process is left: one that is about to end may just have started
            # another.
            deadline = time.monotonic() + 120
            while doomed := self._living(folder):
                assert time.monotonic() < deadline, doomed
                for identity in doomed:
                    try:
                        signal_process(identity, signal.SIGKILL)
                    except SignalRefused as gone:
                        print(f"already gone: {gone}")
                time.sleep(0.05)

    def _living(self, folder: RunFolder) -> list[ProcessId]:
        """The processes of a run, its supervisors first."""
        state, wanted = folder.state(), {"memtop.supervisor", str(folder.path)}
        written = identify((state.run.supervisor_pid if state is not None else None) or 0)
        # state.json may be missing or damaged. A supervisor that a test forked has another command.
        found = [identify(pid) for pid in all_pids() if wanted <= set(command_words(pid) or ())]
        if written is not None and state is not None and written.started_ticks == state.supervisor_started_ticks:
            found.append(written)
        return [*{one for one in found if one is not None and is_alive(one)}, *run_processes(str(folder.path))]


def wait_for_file(path: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not exist after {seconds} s"
        time.sleep(0.02)


def make_runs(root: Path) -> Iterator[Runs]:
    # Sockets need a short path, which pytest's own folders are not.
    sockets = Path(tempfile.mkdtemp(prefix="memtop-"))
    place = Runs(root, sockets)
    yield place
    place.end_everything()
    shutil.rmtree(sockets)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    yield from make_runs(tmp_path)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME and without an entry in the password database, as containers have."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    yield from memory_group()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system can only be mounted as root: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def here(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Commands in this process use the folders of the test."""
    for name in ("MEMTOP_RUNS_DIR", "MEMTOP_SOCKET_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, runs.environment[name])
    monkeypatch.chdir(runs.root)
    return runs


@contextlib.contextmanager
def no_file_grows() -> Iterator[None]:
    """Every write to a file of this process fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
