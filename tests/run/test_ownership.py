"""Who may make memtop act: runs and links of other users, and a run within a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from memtop import cli
from memtop.cli import dashboard
from memtop.supervisor.errors import MemtopError, RunFolderError, UsageError
from memtop.supervisor.monitor.processes.proc import identify
from memtop.supervisor.run.client import ask
from memtop.supervisor.run.processes import shim
from memtop.supervisor.run.processes.attempt import ProcessFile
from memtop.supervisor.run.processes.environment import outside_any_run
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, create_run, find_run, list_runs, write_json
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.record.ownership import why_not_own
from memtop.supervisor.run.runs import run_folders
from memtop.supervisor.run.view import known_runs
from memtop.supervisor.wire import Stop
from tests.conftest import UNTIL_GO, Runs
from tests.run.planted import OTHER, killed_at_the_end, needs_root, planted


def give_away(part: str) -> Callable[[Path], object]:
    return lambda folder: os.chown(folder / part, OTHER, OTHER)


def open_up(part: str, bits: int) -> Callable[[Path], object]:
    return lambda folder: (folder / part).chmod((folder / part).stat().st_mode | bits)


def link_of_another(part: str) -> Callable[[Path], object]:
    def bend(folder: Path) -> None:
        (folder / part).rename(folder / "real")
        (folder / part).symlink_to(folder / "real")
        os.lchown(folder / part, OTHER, OTHER)

    return bend


PARTS = (".", "run.json", "state.json", "ledger.sqlite", "attempts", "attempts/0001", "attempts/0001/process.json")
BENT = [
    *(pytest.param(give_away(part), rf"{part.strip('.')} belongs to", id=f"owner {part}", marks=needs_root) for part in PARTS),
    *(pytest.param(open_up(part, 0o020), r"other users may write .* `chmod -R go-w ", id=f"group {part}") for part in PARTS),
    *(pytest.param(open_up(part, 0o002), r"other users may write .* `chmod -R go-w ", id=f"others {part}") for part in PARTS),
    *(pytest.param(link_of_another(part), rf"{part} belongs to", id=f"link {part}", marks=needs_root) for part in PARTS[1:]),
]
COMMANDS = (
    *(["watch", "--once", "a"], ["watch", "--json", "--follow", "--count", "1", "a"], ["stop", "a"], ["free", "a"]),
    *(["checkpoint", "a"], ["restart", "a", "--headless"], ["restart", "a", "--live", "--batch", "1"]),
    *(["advise", "a", "--try"], ["train", "--name", "a", "--fresh", "--detach", "--", "true"]),
)


@pytest.mark.parametrize(("bend", "words"), BENT)
def test_nothing_is_executed_for_a_run_that_others_can_write(
    here: Runs, capsys: pytest.CaptureFixture[str], bend: Callable[[Path], object], words: str
) -> None:
    folder = planted(here, here.path)
    bend(folder.path)
    before = sorted(folder.path.iterdir())
    for command in COMMANDS:
        assert cli.run(command) == 1, command
        printed = capsys.readouterr()
        assert printed.out == "", command
        assert len(printed.err.splitlines()) == 1
    # The list of all runs is printed, with the reason why this one gets no supervisor.
    assert cli.run(["watch", "--once"]) == 0
    assert re.search(words, capsys.readouterr().err)
    # No supervisor was started: it would have a log.
    assert sorted(folder.path.iterdir()) == before
    assert not (here.root / "mark").exists()
    with pytest.raises(MemtopError, match=words):
        ask(folder, lambda number: Stop(id=number))
    assert not known_runs(here.path)


@needs_root
def test_a_link_of_another_user_is_no_run(here: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    folder = planted(here, here.root / "elsewhere")
    here.path.mkdir()
    link = here.path / "a"
    link.symlink_to(folder.path)
    # Your own link may lead to a run on another disk.
    assert cli.run(["show", "a"]) == 0
    os.lchown(link, OTHER, OTHER)
    capsys.readouterr()
    for command in (["stop", "a"], ["stop", str(link)], ["watch", "--once", "a"]):
        assert cli.run(command) == 1
        assert f"{link} is a link of nobody: give the folder that it leads to, {folder.path}" in capsys.readouterr().err
    assert (run_folders(here.path), list_runs(here.path), known_runs(here.path)) == ([], [], [])
    assert cli.run(["stop", "latest"]) == 1
    assert "no runs in" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["there", "nowhere"])
def test_no_run_is_created_through_a_link(here: Runs, capsys: pytest.CaptureFixture[str], target: str) -> None:
    (here.root / "there").mkdir()
    here.path.mkdir()
    (here.path / "a").symlink_to(here.root / target)
    for fresh in ([], ["--fresh"]):
        assert cli.run(["train", "--name", "a", "--detach", *fresh, "--", "true"]) == 1
        assert "runs/a: is a link, and memtop creates no run there" in capsys.readouterr().err
    assert not (here.root / "nowhere").exists()
    assert not list((here.root / "there").iterdir())


def test_a_journal_that_root_has_written_blocks_nothing(here: Runs) -> None:
    """A program under sudo creates such a journal. The run's owner must still be able to stop the
    run."""
    folder = planted(here, here.path)
    journal = folder.attempt(1) / "rank-0.jsonl"
    journal.write_text("{}\n")
    journal.chmod(0o666)
    if os.getuid() == 0:
        os.chown(journal, OTHER, OTHER)
    assert why_not_own(folder.path) is None


@needs_root
def test_latest_is_your_newest_run(here: Runs) -> None:
    mine = planted(here, here.path)
    newer = here.path / "newer"
    shutil.copytree(mine.path, newer)
    (newer / "run.json").write_text((mine.spec_path).read_text().replace('"created": 1.0', '"created": 2.0'))
    assert find_run("latest", here.path).path == newer
    os.chown(newer, OTHER, OTHER)
    assert find_run("latest", here.path).path == mine.path
    # Root may look at the runs of a user.
    os.chown(mine.path, OTHER, OTHER)
    assert find_run("latest", here.path).path == newer


@needs_root
def test_another_users_run_can_be_looked_at(here: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    folder = planted(here, here.path)
    folder.ledger_path.unlink()
    for path in (folder.path, *folder.path.rglob("*")):
        os.chown(path, OTHER, OTHER)
    for command in (["runs"], ["show", "a"], ["watch", "--once", "--read-only"], ["watch", "--once", "--read-only", "a"]):
        assert cli.run(command) == 0, command
        assert capsys.readouterr().out
    os.mkfifo(folder.path / "ledger.sqlite")
    for path in (folder.state_path, folder.spec_path):
        # A pipe would make the reader wait for ever.
        path.unlink()
        os.mkfifo(path)
    folder.lock_path.unlink(missing_ok=True)
    os.mkfifo(folder.lock_path)
    assert cli.run(["runs"]) == 0
    assert "unreadable" in capsys.readouterr().out
    folder.state_path.unlink()


LOOKS = """
import sys
from memtop import cli
for command in sys.argv[1:]:
    print("status", cli.run(command.split()), flush=True)
"""


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) is not installed")
def test_a_user_without_rights_looks_or_is_told_in_one_line_who_can_give_them(here: Runs) -> None:
    """The reader is a real other user: of another uid than the files, and without root's right to
    read everything."""
    for name, bits in (("open", 0o755), ("closed", 0o700)):
        folder = planted(here, here.root / name)
        with closing(Ledger(folder.ledger_path)) as ledger:
            ledger.add_attempt(1, "start", None, 1.0)
        for path in (folder.path, *folder.path.rglob("*")):
            os.chown(path, OTHER, OTHER)
            path.chmod(bits if path.is_dir() else bits & 0o644)
    looks = ("show a", "show a --json --metrics", "watch --once --json --read-only a", "runs")
    without = "-dac_override,-dac_read_search"
    reader = ["setpriv", "--bounding-set", without, "--inh-caps", without, sys.executable, "-c", LOOKS]

    def look(runs_dir: Path, *commands: str) -> subprocess.CompletedProcess[str]:
        words = [f"{command} --runs-dir {runs_dir}" for command in commands]
        return subprocess.run([*reader, *words], env=here.environment, capture_output=True, text=True, check=True)

    done = look(here.root / "open", *looks)
    assert (done.stdout.count("status 0\n"), done.stderr) == (len(looks), "")
    done = look(here.root / "closed", *looks)
    folder = here.root / "closed" / "a"
    words = f"run.json: cannot be read: Permission denied; nobody owns it and can let others read it: `chmod -R go+rX {folder}`"
    lines = done.stderr.splitlines()
    assert [line.endswith(words) for line in lines] == [True] * 3
    assert done.stdout.count("status 1\n") == 3
    assert f"unreadable: {folder}/{words}" in done.stdout
    # The home folder is closed to others. The advice lets others pass through it, and read nothing
    # in it.
    home = here.root / "ho(me"
    planted(here, home / "runs")
    os.chown(home, OTHER, OTHER)
    home.chmod(0o700)
    assert f"{home} is closed: nobody can let others pass: `chmod go+x '{home}'`\n" in look(home / "runs", "show a").stderr
    refused = look(here.root / "open", "stop a", "restart a --headless", "watch a --once").stderr.splitlines()
    assert len(refused) == 3
    assert all("open/a belongs to nobody, and memtop acts only on your own runs" in line for line in refused)


def test_the_dashboard_opens_another_users_run_only_to_look(here: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = planted(here, here.path)
    living = identify(os.getpid())
    assert living is not None
    write_json(folder.attempt(1) / "process.json", ProcessFile(living.pid, living.started_ticks, 1, 1))
    folder.path.chmod(0o770)
    with pytest.raises(RunFolderError, match="other users may write"):
        dashboard.open_run(folder)
    opened: list[RunFolder] = []
    monkeypatch.setattr(dashboard, "open_run", lambda run, look, **_: opened.append(run) or 0)
    with pytest.raises(UsageError, match="needs a terminal"):
        # The machine, since no run may be opened.
        dashboard.open_dashboard(here.path, None, dashboard.WatchOptions())
    dashboard.open_dashboard(here.path, None, dashboard.WatchOptions(read_only=True))
    folder.path.chmod(0o700)
    dashboard.open_dashboard(here.path, None, dashboard.WatchOptions())
    assert [run.path for run in opened] == [folder.path, folder.path]


def test_a_folder_exchanged_after_the_check_executes_nothing(here: Runs) -> None:
    """Where others may write the folder of all runs, they may rename two runs at any moment."""
    folder = planted(here, here.path)
    folder.spec_path.chmod(0o646)
    with pytest.raises(RunFolderError, match=r"run\.json: is not yours alone"):
        folder.spec(own=True)
    attempt = folder.attempt(1)
    command = {"argv": ["touch", str(here.root / "mark")], "cwd": "/", "environment": {}}
    (attempt / "command.json").write_text(json.dumps(command))
    (attempt / "command.json").chmod(0o646)
    starts = [sys.executable, "-I", "-S", shim.__file__, str(attempt)]
    done = subprocess.run(starts, capture_output=True, text=True, check=False)
    assert (done.returncode, "command.json: is not yours alone" in done.stderr) == (1, True)
    assert not (here.root / "mark").exists()


def test_a_file_system_that_changes_owners_is_named(here: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec(name="a", created=1.0, settings=None, command=("true",), cwd="/", memtop_version="0")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4242)
        with pytest.raises(RunFolderError, match=r"owners or permissions: use .*`--runs-dir ~/memtop-runs`"):
            create_run(here.path, spec, fresh=False)
    assert not (here.path / "a").exists()


def test_your_own_run_restarts_and_nothing_in_its_folder_is_imported(here: Runs) -> None:
    folder = planted(here, here.path)
    shutil.rmtree(folder.attempt(1))
    mask = os.umask(0)
    try:
        # The folder that a supervisor starts in, and what PYTHONPATH names relative to it.
        here.memtop("watch", "--once", "a", env={**here.environment, "PYTHONPATH": "."})
    finally:
        os.umask(mask)
    here.wait("a", lambda d: d["state"] == "finished")
    assert (here.root / "mark").exists()
    assert not (here.root / "imported").exists()
    # The program has the umask of the user. No umask opens memtop's own files.
    assert stat.S_IMODE((here.root / "mark").stat().st_mode) == 0o666
    assert why_not_own(folder.path) is None
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


# --- a run within a run, a removed lock, a word of ours -------------------------------------------

STARTS_ANOTHER = f"""
import subprocess, sys
program = [sys.executable, "-c", {UNTIL_GO!r}]
subprocess.run([sys.executable, "-m", "memtop", "train", "--name", "inner", "--detach", "--", *program], check=True)
"""


def test_a_run_started_by_a_run_does_not_end_with_it(runs: Runs) -> None:
    runs.memtop("train", "--name", "outer", "--headless", "--", sys.executable, "-c", STARTS_ANOTHER)
    assert not runs.events("outer", "leftovers")
    inner = runs.show("inner")
    assert (inner["alive"], inner["supervisor_pid"] is not None) == (True, True)
    (runs.root / "go").touch()
    inner = runs.wait("inner", lambda d: d["state"] == "finished")
    assert inner["exit_status"] == 0


def test_a_supervisor_gets_the_variables_of_people_and_none_of_a_run() -> None:
    of_people = {"MEMTOP_RUNS_DIR": "/r", "MEMTOP_SOCKET_DIR": "/s", "MEMTOP_ASCII": "1", "PYTHONPATH": "/p:q", "HOME": "/h"}
    assert outside_any_run(of_people) == of_people
    site = Path(cli.__file__).resolve().parents[2] / "train/agent/site"
    of_a_run = {
        "MEMTOP_RUN": "/r/a",
        "MEMTOP_RUN_ID": "1f",
        "MEMTOP_ATTEMPT": "1",
        "MEMTOP_ATTEMPT_DIR": "/r/a/1",
        "MEMTOP_SOCKET": "/s/1",
    }
    inside = {**of_people, **of_a_run, "MEMTOP_ON_OOM": "stop", "PYTHONPATH": f"{site}:/p:q"}
    inside |= {"TORCHELASTIC_ERROR_FILE": "/r/a/1/error.json", "PET_LOG_DIR": "/r/a/1/ranks"}
    assert outside_any_run(inside) == of_people


def test_a_living_run_without_its_lock_is_not_moved_aside(here: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    folder = planted(here, here.path)
    with killed_at_the_end(subprocess.Popen(["sleep", "120"], env={}, text=True)) as program:
        found = identify(program.pid)
        assert found is not None
        write_json(folder.attempt(1) / "process.json", ProcessFile(found.pid, found.started_ticks, found.pid, 0))
        assert not folder.lock_path.exists()
        status = cli.run(["train", "--name", "a", "--fresh", "--detach", "--", "true"])
    assert status == 1
    assert "run 'a' is in use: `memtop stop a` first" in capsys.readouterr().err
    assert [run.name for run in list_runs(here.path)] == ["a"]


def test_latest_is_not_a_name(here: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--name", "latest", "--detach", "--", "true"]) == 2
    assert "--name latest: this word means the newest run; choose another name" in capsys.readouterr().err
    assert not here.path.exists()
