"""The trainer as real processes: bad input, signals, two ranks; and the agent in programs that do
not use it.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memtop.presets import Settings
from memtop.supervisor.run.explain import outcome
from memtop.supervisor.run.post_mortem.log_end import first_dead_rank, read_log_end
from memtop.supervisor.run.processes.attempt import launcher
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.wire import Phase
from tests.forking import Program, run, runs_torch
from tests.run.reported import reported
from tests.train.support import edited

ROOT = Path(__file__).resolve().parents[2]
AGENT = ROOT / "train" / "agent"
FOREIGN = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
for _ in range(5):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("done")
"""


def environment(folder: Path, **extra: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(AGENT / "site"),
        "MEMTOP_ATTEMPT_DIR": str(folder),
        "MEMTOP_ATTEMPT": "1",
        "MEMTOP_SOCKET": str(folder / "missing.sock"),
        **extra,
    }


def python(
    code: str, env: dict[str, str], *, cwd: Path | None = None, program: str = sys.executable, anew: bool = False
) -> str:
    """Run a program to its end; its output. One that imports torch is forked from a process that
    has it, unless it shall be started `anew`."""
    start = run if runs_torch(code) and not anew else subprocess.run
    done = start([program, "-c", code], env=env, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def reports(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines() if line]


def trainer(folder: Path, settings: Settings, *, start: tuple[str, ...] = (), agent: bool = True) -> subprocess.Popen[str]:
    (folder / "settings.json").write_bytes(msgspec.json.encode(settings))
    module = ("-m", "memtop.train", "--settings", str(folder / "settings.json"), "--state-dir", str(folder / "state"))
    return Program(
        [sys.executable, *start, *module],
        env=environment(folder) if agent else dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- the trainer
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (edited(batch=0), "batch 0: must be at least 1"),
        (edited(seq_len=65), "seq_len 65: beyond the model's 64 positions"),
        (edited(world_size=2), "world_size 2: 1 processes were started"),
        (edited(device="cuda"), "device cuda: torch sees no CUDA device"),
        (edited(model={"config": {"model_type": "no-such-model"}}), "model.config"),
    ],
)
def test_bad_settings_are_one_line_and_exit_status_2(tmp_path: Path, settings: Settings, message: str) -> None:
    process = trainer(tmp_path, settings)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2, out + err
    assert message in err
    assert len(err.splitlines()) == 1
    end = reports(tmp_path)[-1]
    assert (end["type"], end["outcome"]) == ("end", "failed")
    assert message in end["message"]


ENDS = """
import atexit, runpy, sys
import memtop.train.run as run

class Torn:
    def __del__(self):
        print("torn down")

def train(*given, **options):
    atexit.register(print, "flushed")
    return "finished"

torn, run.train = Torn(), train
sys.argv[1:] = ["--settings", "a", "--state-dir", "b", *sys.argv[1:]]
runpy.run_module("memtop.train", run_name="__main__", alter_sys=True)
"""


def test_a_trainer_that_succeeded_runs_its_exit_handlers_and_leaves_the_rest_to_the_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["memtop: finished", "flushed"]


def test_sigterm_saves_and_ends_with_status_0(tmp_path: Path) -> None:
    process = trainer(tmp_path, edited(target_samples=8 * 100_000, save_every=100_000))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("update 3 "):
            process.send_signal(signal.SIGTERM)
            break
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = reports(tmp_path)
    assert (found[-1]["type"], found[-1]["outcome"]) == ("end", "stopped")
    last = [report for report in found if report["type"] == "step"][-1]
    assert json.loads((tmp_path / "state" / "manifest.json").read_text())["updates"] == last["update"] >= 3


def test_two_ranks_train_like_one_rank(tmp_path: Path) -> None:
    alone, together = tmp_path / "1", tmp_path / "2"
    runs, evaluations = [], []
    for folder, settings, start in (
        (alone, edited(batch=4, accumulation=2, target_samples=36, eval_every=2), ()),
        (
            together,
            # The last update has 4 of 8 samples: one rank's share; the other rank masks its own.
            edited(batch=4, accumulation=1, world_size=2, target_samples=36, eval_every=2),
            ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        ),
    ):
        folder.mkdir()
        process = trainer(folder, settings, start=start)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
        runs.append([report for report in reports(folder) if report["type"] == "step"])
        evaluations.append([report["loss"] for report in reports(folder) if report["type"] == "evaluation"])
        stages = [report["stage"] for report in reports(folder) if report["type"] == "memory"]
        assert stages == ["before model load", "after model load", "after data load"]
    one, two = runs
    assert len(evaluations[0]) == 2
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-4)
    assert [step["sample_digest"] for step in two] == [step["sample_digest"] for step in one]
    assert [step["loss"] for step in two] == pytest.approx([step["loss"] for step in one], rel=1e-4)
    assert reports(together, 1)[0]["rank"] == 1
    # One rank resumes what two ranks saved.
    (together / "settings.json").unlink()
    process = trainer(together, edited(batch=8, accumulation=1, target_samples=44))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert "resumed from" in out


def test_a_rank_that_dies_ends_the_others_and_is_named(tmp_path: Path) -> None:
    settings = edited(batch=2, accumulation=2, world_size=2, target_samples=8 * 1_000_000, save_every=1_000_000)
    process = trainer(tmp_path, settings, start=launcher(settings))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("update 3 "):
            os.kill(reports(tmp_path, 1)[0]["pid"], signal.SIGKILL)
            break
    # torchrun gives the remaining ranks 30 s.
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    log = tmp_path / "output.log"
    log.write_text(out + err)
    assert first_dead_rank(log) == (1, -9)
    progress = Progress()
    for rank in (0, 1):
        for report in reports(tmp_path, rank):
            progress = progress.after(rank, reported(report))
    phase, reason, diagnosis = outcome(
        read_log_end(log), progress.end, 1, Phase.TRAINING, external=False, end_rank=progress.end_rank
    )
    assert phase is Phase.FAILED
    assert reason == "rank 1 died first, ended by signal 9 (SIGKILL)"
    assert diagnosis is not None
    assert any("SIGKILL" in line for line in diagnosis["evidence"])


# --- the agent
# --------------------------------------------------------------------------------------------------


def test_a_program_that_does_not_use_memtop_is_followed(tmp_path: Path) -> None:
    assert python(FOREIGN, environment(tmp_path), anew=True) == "done\n"
    hello, *steps = reports(tmp_path)
    assert (hello["type"], hello["rank"], hello["offers"]) == ("hello", 0, ["free_cache"])
    assert [step["update"] for step in steps] == [1, 2, 3, 4, 5]
    assert {step["learning_rate"] for step in steps} == {0.25}
    assert all(step["rss_bytes"] > 10_000_000 for step in steps)
    assert steps[0]["allocated_bytes"] is None, "unknown without CUDA, not 0"
    assert [line["seq"] for line in (hello, *steps)] == [1, 2, 3, 4, 5, 6]


def test_an_existing_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['THEIRS'] = 'ran'\n")
    env = environment(tmp_path)
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    assert python("import os, sys; print(os.environ['THEIRS'], 'memtop_agent' in sys.modules)", env) == "ran True\n"


def test_programs_outside_a_run_are_left_alone(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(AGENT / "site")}
    assert python("import sys; print('memtop_agent' in sys.modules, 'torch' in sys.modules)", env, anew=True) == "False False\n"
    # Started by memtop, but it does not train: torch is not loaded and no journal is opened.
    assert python("import sys; print('torch' in sys.modules)", environment(tmp_path), anew=True) == "False\n"
    assert list(tmp_path.iterdir()) == []


def test_loader_workers_and_forks_do_not_report_for_their_parent(tmp_path: Path) -> None:
    code = (
        FOREIGN
        + """
import os
if os.fork() == 0:
    optimizer.step()
    os._exit(0)
os.wait()
optimizer.step()
"""
    )
    python(code, environment(tmp_path))
    assert [report["update"] for report in reports(tmp_path)[1:]] == [1, 2, 3, 4, 5, 6]


def test_a_journal_that_cannot_be_written_does_not_disturb_the_program(tmp_path: Path) -> None:
    assert python(FOREIGN, environment(tmp_path, MEMTOP_ATTEMPT_DIR=str(tmp_path / "missing"))) == "done\n"


def test_a_full_queue_drops_the_oldest_and_counts_them(tmp_path: Path) -> None:
    code = """
import json, os, memtop_agent.journal as j
journal = j.JournalWriter(PATH + "/not/there", capacity=10)
for n in range(25):
    journal.put({"n": n})
journal.flush()
os.makedirs(PATH + "/not/there")
journal.flush()
lines = open(PATH + "/not/there/rank-0.jsonl").read().splitlines()
print(journal.dropped, [json.loads(line)["n"] for line in lines])
""".replace("PATH", repr(str(tmp_path)))
    assert python(code, environment(tmp_path)) == f"15 {list(range(15, 25))}\n"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with tempfile.TemporaryDirectory(prefix="memtop-") as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/s")
        server.listen()
        server.settimeout(120)
        yield server


def converse(server: socket.socket, *commands: dict[str, Any]) -> list[dict[str, Any]]:
    """Accept one connection and send the commands; return the greeting and one answer per
    command."""
    connection, _ = server.accept()
    with connection, connection.makefile("rwb") as stream:
        heard = [json.loads(stream.readline())]
        for command in commands:
            stream.write(json.dumps(command).encode() + b"\n")
            stream.flush()
        heard += [json.loads(stream.readline()) for _ in commands]
    return heard


def test_commands_are_executed_inside_the_process_and_the_link_reconnects(tmp_path: Path, listener: socket.socket) -> None:
    code = FOREIGN.replace("range(5)", "range(100000)").replace(
        "    optimizer.step()", "    optimizer.step(); time.sleep(0.01)"
    )
    process = Program(
        [sys.executable, "-c", "import time\n" + code], env=environment(tmp_path, MEMTOP_SOCKET=listener.getsockname())
    )
    try:
        greeting, refusal, freed = converse(
            listener,
            {"type": "command", "id": 1, "name": "fly"},
            {"type": "command", "id": 2, "name": "free_cache"},
        )
        assert (greeting["type"], greeting["rank"], greeting["attempt"], greeting["pid"]) == ("agent", 0, 1, process.pid)
        assert (refusal["id"], refusal["ok"]) == (1, False)
        assert (freed["id"], freed["ok"]) == (2, True)
        assert freed["result"]["returned_host_bytes"] >= 0
        assert freed["result"]["returned_device_bytes"] is None
        assert freed["result"]["before"]["rss_bytes"] > 0
        # The supervisor died; the agent finds the next one.
        assert converse(listener)[0]["pid"] == process.pid
    finally:
        process.kill()
        process.wait()


def agent_sources() -> list[Path]:
    found = sorted(AGENT.rglob("*.py"))
    assert len(found) >= 6
    return found


@pytest.mark.parametrize("path", agent_sources(), ids=lambda path: path.name)
def test_the_agent_is_python_3_8_and_standard_library_only(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
        assert all(name.split(".")[0] in sys.stdlib_module_names for name in names), names


def other_pythons() -> list[str]:
    """The interpreters of this machine that the agent must run in, the present one included."""
    # pyenv's shims exist for interpreters that are not switched on, too.
    homes = [path for word in os.environ.get("PATH", "").split(os.pathsep) if (path := Path(word)).name != "shims"]
    homes += (Path.home() / ".pyenv" / "versions").glob("3.*/bin")
    names = [f"python3.{minor}" for minor in range(8, 15)]
    return [sys.executable, *sorted(str(home / name) for home in set(homes) for name in names if (home / name).exists())]


@pytest.mark.parametrize("program", other_pythons(), ids=lambda p: Path(p).name)
def test_the_agent_runs_in_every_installed_python(tmp_path: Path, program: str) -> None:
    code = (
        "import memtop_agent as a; a.offer('stop'); a.report('step', update=1, **a.readings()); a.flush(); print(a.dropped())"
    )
    assert python(code, environment(tmp_path), program=program) == "0\n"
    hello, step = reports(tmp_path)
    assert (hello["offers"], step["update"]) == (["free_cache", "stop"], 1)
