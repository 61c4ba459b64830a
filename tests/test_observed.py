"""Training programs that memtop did not start: `memtop watch` finds and reads them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from memtop.supervisor.monitor.processes.outputs import OutputFile, output_files
from memtop.supervisor.observed.checkpoints import folders_of, newest_checkpoint
from memtop.supervisor.observed.observer import Observer, Observers, Output, observer_of
from memtop.supervisor.observed.shown import lines_of, state_of
from memtop.supervisor.observed.values import Observed
from memtop.supervisor.run.output.tail import LAST_BYTES
from memtop.supervisor.wire import Phase
from tests.conftest import Runs

# What they do goes on until their input ends.
WITH_TORCH = """
import sys, torch
weight = torch.nn.Parameter(torch.tensor([5.0]))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(1, 21):
    optimizer.zero_grad()
    loss = (weight * weight).sum()
    loss.backward()
    optimizer.step()
    print(f"step {step}/4000 loss {loss.item():.6f} lr 1e-1", flush=True)
torch.save({"weight": weight}, "last.pt")
print("waits", flush=True)
sys.stdin.read()
"""
# The kernel lists the library among what this program has loaded.
AS_IF_WITH_TORCH = """
import mmap, sys
with open("libtorch_cpu.so", "w+b") as file:
    file.write(b"-" * 4096)
    file.flush()
    library = mmap.mmap(file.fileno(), 4096)
memory = b"-" * (80 << 20)
for step in (1, 2, 3):
    print(f"step {step}/9 loss {step / 8}", flush=True)
print("waits", flush=True)
sys.stdin.read()
"""


class Programs:
    """Starts programs, and ends them after the test."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack

    def start(self, text: str, *, output: str = "> out.log 2>&1", read: str = "out.log") -> int:
        """The pid of the shell whose child runs this program, once it has printed `waits`."""
        (self.folder / "train.py").write_text(text)
        command = f"{sys.executable} train.py {output}; true"
        process = subprocess.Popen(["sh", "-c", command], cwd=self.folder, stdin=subprocess.PIPE)
        self._stack.callback(self._end, process)
        if read:
            wait_for(lambda: "waits" in (self.folder / read).read_text() if (self.folder / read).exists() else False)
        return process.pid

    def end_all(self) -> None:
        self._stack.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with ExitStack() as stack:
        yield Programs(tmp_path, stack)


def observed(pid: int) -> tuple[Observer, Observed]:
    observer = observer_of(pid)
    assert observer is not None
    return observer, observer.look(time.time())


def test_a_program_that_memtop_did_not_start(programs: Programs, runs: Runs) -> None:
    shell = programs.start(WITH_TORCH)
    document = json.loads(runs.memtop("watch", "--once", "--json", "--pid", str(shell)).stdout)
    (found,) = document["observed"]
    assert (found["name"], found["folder"], found["alive"]) == ("train.py", str(programs.folder), True)
    assert found["command"] == [sys.executable, "train.py"]
    assert (found["updates"], found["total_updates"], found["learning_rate"]) == (20, 4000, 0.1)
    assert found["output"] == [str(programs.folder / "out.log")]
    assert found["checkpoint"]["path"] == str(programs.folder / "last.pt")
    assert found["checkpoint"]["complete"]
    (process,) = found["processes"]
    assert (process["pid"], process["role"], process["gpu_bytes"]) == (found["pid"], "process", None)
    assert found["rss_bytes"] > 64 << 20
    assert found["unknown"] == {}
    text = runs.memtop("watch", "--once", "--pid", str(found["pid"])).stdout
    assert "train.py  pid " in text
    assert "update 20 / 4 000" in text
    assert "not started by memtop" in text
    every = json.loads(runs.memtop("watch", "--once", "--json").stdout)["observed"]
    assert found["pid"] in [one["pid"] for one in every]


def test_a_refused_adoption_says_why_it_is_about_another_process(programs: Programs, runs: Runs) -> None:
    shell = programs.start(AS_IF_WITH_TORCH)
    observer, _ = observed(shell)
    training = observer.leader.pid
    assert training != shell
    for named, why in ((shell, f" (PID {shell} belongs to this training)"), (training, "")):
        error = runs.memtop("adopt", str(named), "--yes", status=1).stderr
        assert f"memtop: PID {training}: it has saved no complete checkpoint since its start" in error
        assert error.endswith(f"from its beginning{why}\n")


def test_a_pipe_into_tee_is_read_from_its_file(programs: Programs) -> None:
    shell = programs.start(AS_IF_WITH_TORCH, output="2> /dev/null | tee copy.log > /dev/null", read="copy.log")
    _, found = observed(shell)
    assert (found.updates, found.total_updates, found.loss) == (3, 9, 0.375)
    assert found.output == (str(programs.folder / "copy.log"),)


def test_what_is_not_known_has_a_reason(programs: Programs) -> None:
    shell = programs.start(AS_IF_WITH_TORCH, output="> /dev/null 2>&1", read="")
    wait_for(lambda: observer_of(shell) is not None)
    _, found = observed(shell)
    assert (found.updates, found.loss, found.checkpoint, found.output) == (None, None, None, ())
    assert found.unknown["updates"] == "its output goes to /dev/null, which cannot be read"
    assert set(found.unknown) == {"updates", "output", "checkpoint"}
    state = state_of(found, time.time())
    assert (state.state, state.observed, state.program and state.program.grip) == (Phase.STARTING, True, None)
    first, *more = lines_of(found)
    assert first.startswith(f"train.py  pid {found.pid}  progress not known")
    assert "  output      –: its output goes to /dev/null, which cannot be read" in more


def test_all_of_them_are_followed(programs: Programs) -> None:
    shell = programs.start(AS_IF_WITH_TORCH)
    observers = Observers()
    for _ in range(2):
        (found,) = [one for one in observers.look(time.time()) if one.folder == str(programs.folder)]
        assert found.updates == 3
    assert shell == found.processes[0].parent_pid
    programs.end_all()
    assert [one for one in observers.look(time.time()) if one.folder == str(programs.folder)] == []


def test_what_a_process_has_loaded_is_read_once(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = programs.start(AS_IF_WITH_TORCH)
    observer, found = observed(shell)
    opened: list[Path] = []
    before = Path.open

    def recorded(self: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(self)
        return before(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", recorded)
    again = observer.look(time.time())
    assert again.processes[0].pid == found.pid
    assert Path(f"/proc/{found.pid}/maps") not in opened


def test_an_output_whose_file_was_deleted_is_still_read(programs: Programs) -> None:
    shell = programs.start(AS_IF_WITH_TORCH)
    (programs.folder / "out.log").unlink()
    _, found = observed(shell)
    assert found.updates == 3


def test_it_is_followed_to_its_end(programs: Programs) -> None:
    more = AS_IF_WITH_TORCH.replace("sys.stdin.read()", 'sys.stdin.read(1)\nprint("step 4/9 loss 0.5", flush=True)')
    observer, found = observed(programs.start(more))
    assert (found.updates, [row.step for row in observer.take_rows()]) == (3, [1, 2, 3])
    assert state_of(found, time.time()).state is Phase.TRAINING
    programs.end_all()
    ended = observer.look(time.time())
    assert (ended.updates, ended.alive, ended.processes) == (4, False, ())
    assert state_of(ended, time.time()).state is Phase.STOPPED


def test_a_run_of_memtop_is_none_of_them(runs: Runs) -> None:
    Path(runs.root, "train.py").write_text(AS_IF_WITH_TORCH.replace("sys.stdin.read()", "import time; time.sleep(600)"))
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, "train.py")
    document = runs.wait("a", lambda document: document["updates"] == 3)
    pid = document["trainer_pid"]
    assert pid not in [process.pid for one in Observers().look(time.time()) for process in one.processes]
    assert observer_of(pid) is None
    assert json.loads(runs.memtop("watch", "--once", "--json", "--pid", str(pid)).stdout)["observed"] == []


def test_a_program_that_trains_nothing_is_none_of_them(programs: Programs) -> None:
    assert observer_of(programs.start("import sys\nprint('waits', flush=True)\nsys.stdin.read()")) is None


def test_its_settings_are_at_the_beginning_of_a_long_output(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    lines = "\n".join(f"{'.' * 90} iter {step}: loss 2.5" for step in range(100_000))
    path.write_text(f"max_iters = 200000\n{lines}\n")
    assert path.stat().st_size > 2 * LAST_BYTES
    output = Output()
    (file,) = [OutputFile(path, (path.stat().st_dev, path.stat().st_ino))]
    output.read([file], 1.0)
    assert output.learner.newest is not None
    assert (output.learner.newest.step, output.learner.newest.total) == (99_999, 200_000)
    assert output.read([file], 2.0) == []


def test_the_speed_of_lines_that_were_read_together_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    file = OutputFile(path, (0, 0))
    output = Output()
    path.write_text("".join(f"step {step} loss 2.5\n" for step in range(1, 101)))
    output.read([file], 100.0)
    assert output.learner.step_seconds is None
    for second in (1, 2):
        with path.open("a") as log:
            log.write(f"step {100 + second} loss 2.5\n")
        output.read([file], 100.0 + second)
    assert output.learner.step_seconds == 1.0


def test_output_that_nobody_can_read() -> None:
    assert output_files([1 << 22]) == "its processes have ended"


def test_only_whole_checkpoints_since_the_start_count(tmp_path: Path) -> None:
    def saved(name: str, content: bytes, at: float) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def whole(name: str) -> Path:
        path = tmp_path / name
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("data", "0")
        return path

    begun = time.time() - 60
    folders = folders_of(["python", "a.py", "--output_dir=out"], tmp_path)
    assert newest_checkpoint(folders, begun) is None
    first = whole("a.pt")
    saved("half.pt", first.read_bytes()[:40], 0)
    found = newest_checkpoint(folders, begun)
    assert found is not None
    assert (found.path, found.complete, found.updates) == (str(first), True, None)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    tensors = len(header).to_bytes(8, "little") + header
    saved("half.safetensors", tensors + b"123", 0)
    assert newest_checkpoint(folders, begun) == found
    (tmp_path / "out").mkdir()
    saved("out/checkpoint-30/trainer_state.json", b'{"global_step": 30}', 0)
    saved("out/checkpoint-30/optimizer.pt", b"0", 0)
    saved("out/checkpoint-40/optimizer.pt", b"0", 0)
    newest = newest_checkpoint(folders, begun)
    assert newest is not None
    assert (newest.path, newest.updates) == (str(tmp_path / "out/checkpoint-30"), 30)
    assert newest_checkpoint(folders, time.time() + 60) is None
    saved("whole.safetensors", tensors + b"1234", 0)
    assert newest_checkpoint([tmp_path], begun) is not None
