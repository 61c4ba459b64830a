"""The agent as a guest: whatever the program or the machine does, the program continues and its
reports are readable.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from tests.forking import run as run_forked
from tests.forking import runs_torch

AGENT = Path(__file__).resolve().parents[2] / "train" / "agent"


def run(code: str, folder: Path, *, timeout: float = 60, socket: str = "") -> str:
    """Run a program with the agent and return its output. It must succeed and print nothing to
    stderr.
    """
    env = {
        **os.environ,
        "PYTHONPATH": str(AGENT / "site"),
        "MEMTOP_ATTEMPT_DIR": str(folder),
        "MEMTOP_ATTEMPT": "1",
        "MEMTOP_SOCKET": socket or str(folder / "missing.sock"),
    }
    start = run_forked if runs_torch(code) else subprocess.run
    done = start([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def reports(folder: Path) -> list[dict[str, Any]]:
    """The journal, decoded like the supervisor decodes it."""
    return [msgspec.json.decode(line) for line in (folder / "rank-0.jsonl").read_bytes().splitlines()]


def test_numbers_that_json_lacks_are_null_and_named(tmp_path: Path) -> None:
    run(
        "import memtop_agent as a; inf = float('inf')\n"
        "a.report('step', update=1, loss=float('nan'), gradient_norm=inf, parts={'head': -inf, 'body': [1.0, inf]})\n"
        "a.report('step', update=2, loss=1.5)",
        tmp_path,
    )
    _, first, second = reports(tmp_path)
    assert (first["update"], first["loss"], first["gradient_norm"]) == (1, None, None)
    assert first["parts"] == {"head": None, "body": [1.0, None]}
    assert first["not_finite"] == ["loss", "gradient_norm", "parts.head", "parts.body.1"]
    assert second["loss"] == 1.5
    assert "not_finite" not in second


def test_scalars_of_numpy_and_of_a_tensor_on_the_cpu_are_numbers(tmp_path: Path) -> None:
    code = """
import memtop_agent as a
class Tensor:
    def __init__(self, device): self.device = device
    def item(self):
        if self.device != "cpu": raise SystemExit("it waits for the device")
        return 0.5
class Many:
    def item(self): raise ValueError("more than one")
    def __str__(self): return "many"
a.report('step', update=1, loss=Tensor("cpu"), epoch=Tensor("cuda:0"), tokens=Many())
import numpy as np
a.report('step', update=np.int64(2), loss=np.float32(0.5), epoch=np.float64(2), dropped=np.array(3), batch=np.bool_(True))
a.report('step', update=np.uint8(3), loss=np.float32('nan'), parts={np.int64(4): np.float32('inf'), 5: np.int8(1)})
"""
    run(code, tmp_path)
    _, first, second, third = reports(tmp_path)
    assert (first["update"], first["loss"], first["tokens"]) == (1, 0.5, "many")
    assert first["epoch"].startswith("<")
    assert [second[name] for name in ("update", "loss", "epoch", "dropped", "batch")] == [2, 0.5, 2.0, 3, True]
    assert (third["update"], third["loss"], third["parts"]) == (3, None, {"4": None, "5": 1})
    assert third["not_finite"] == ["loss", "parts.4"]


def test_a_report_that_cannot_be_encoded_is_counted_and_does_not_block_others(tmp_path: Path) -> None:
    code = """
import memtop_agent as a
class Odd:
    def __str__(self): raise RuntimeError("no words for it")
ring = []; ring.append(ring)
a.report('step', update=1, value=Odd())
a.report('step', update=2, value=ring)
a.report('step', update=3)
a.flush()
print(a.dropped())
"""
    assert run(code, tmp_path) == "2\n"
    assert [report.get("update") for report in reports(tmp_path)] == [None, 3]


def test_a_line_that_a_full_disk_cut_is_completed(tmp_path: Path) -> None:
    code = """
import os, resource
import memtop_agent as a
a.report("step", update=1)
a.flush()
path = os.environ["MEMTOP_ATTEMPT_DIR"] + "/rank-0.jsonl"
a.report("step", update=2)
for cut in range(1, 200, 7):
    # The file may grow by so many bytes: less than a line, a line without its end, a bit of the next.
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + cut, -1))
    a.report("step", update=2 + cut)
    a.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    a.flush()
print(a.dropped())
"""
    assert run(code, tmp_path) == "0\n"
    assert [report.get("update") for report in reports(tmp_path)] == [None, 1, 2, *(2 + cut for cut in range(1, 200, 7))]


def test_a_line_that_a_killed_process_cut_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text('{"type": "step", "upd')
    run("import memtop_agent as a\na.report('step', update=1)", tmp_path)
    lines = (tmp_path / "rank-0.jsonl").read_bytes().splitlines()[1:]
    assert [msgspec.json.decode(line).get("update") for line in lines] == [None, 1]


TORCH = """
import sys, types
module = types.ModuleType("torch.optim.optimizer")
hooks = []
module.register_optimizer_step_post_hook = lambda hook: hooks.append(hook) or types.SimpleNamespace(remove=hooks.clear)
sys.modules["torch.optim.optimizer"] = module
class Optimizer:
    param_groups = [{"lr": 0.5}]
    def step(self):
        for hook in hooks:
            hook(self, (), {})
optimizer = Optimizer()
import memtop_agent
memtop_agent.wait_for_torch()
"""
"""The parts of torch that the agent uses."""


def test_a_program_may_clear_its_environment(tmp_path: Path) -> None:
    run(TORCH + "import os\nos.environ.clear()\noptimizer.step()\nos.chdir('/')\noptimizer.step()", tmp_path)
    assert [report.get("update") for report in reports(tmp_path)] == [None, 1, 2]


def test_a_step_that_cannot_be_followed_is_reported_once(tmp_path: Path) -> None:
    code = """
optimizer.step()
optimizer.param_groups = [{"lr": "as the schedule says"}]
optimizer.step()
optimizer.param_groups = [{"lr": 0.5}]
optimizer.step()
print(len(hooks))
"""
    # The hook stays registered: torch would fail if it were removed during its call.
    assert run(TORCH + code, tmp_path) == "1\n"
    _, step, warning = reports(tmp_path)
    assert step["update"] == 1
    assert warning["type"] == "warning"
    assert "as the schedule says" in warning["message"]


def test_torch_continues_when_a_step_cannot_be_followed(tmp_path: Path) -> None:
    code = """
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.5)
seen = []
register_optimizer_step_post_hook(lambda *_: seen.append(1))
for update in range(3):
    weight.sum().backward()
    if update == 1:
        optimizer.param_groups[0]["lr"] = torch.ones(2)
        optimizer.param_groups[0]["params"] = []
    optimizer.step()
print(len(seen))
"""
    assert run(code, tmp_path) == "3\n"
    assert [report["type"] for report in reports(tmp_path)] == ["hello", "step", "warning"]


def test_threads_that_cannot_start_do_not_disturb_the_program(tmp_path: Path) -> None:
    code = """
import threading
real = threading.Thread.start
def refuse(self):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
optimizer.step()
optimizer.step()
import os
print(os.path.getsize(os.environ["MEMTOP_ATTEMPT_DIR"] + "/rank-0.jsonl"))
threading.Thread.start = real
optimizer.step()
print(sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("memtop")))
"""
    assert run(TORCH + code, tmp_path) == "0\n['memtop-journal', 'memtop-link']\n"
    assert [report.get("update") for report in reports(tmp_path)] == [None, 1, 2, 3]


def test_without_any_thread_the_reports_are_written_at_the_end(tmp_path: Path) -> None:
    refuse = "import threading\ndef no(self): raise RuntimeError('no')\nthreading.Thread.start = no\noptimizer.step()\n"
    run(TORCH + refuse, tmp_path)
    assert [report.get("update") for report in reports(tmp_path)] == [None, 1]


SERVER = """
import json, os, socket, sys, threading, memtop_agent as a
server = socket.socket(socket.AF_UNIX)
server.bind(os.environ["MEMTOP_SOCKET"])
server.listen()
def send(commands):
    def serve():
        connection, _ = server.accept()
        connection.sendall(b"".join(json.dumps(command).encode() + b"\\n" for command in commands))
        connection.recv(1 << 20)
    threading.Thread(target=serve, daemon=True).start()
"""
"""A supervisor's end of the socket, inside the program: `send` gives the commands to the first
agent that connects.
"""


def test_no_command_is_lost_between_the_threads(tmp_path: Path) -> None:
    code = """
sys.setswitchinterval(1e-6)
COUNT = 50000
send({"type": "command", "id": number, "name": "checkpoint"} for number in range(COUNT))
a.offer("checkpoint")
taken = []
while len(taken) < COUNT:
    taken += a.take_commands()
print(taken == [(number, "checkpoint", {}) for number in range(COUNT)])
"""
    with tempfile.TemporaryDirectory(prefix="memtop-") as folder:
        assert run(SERVER + code, tmp_path, socket=f"{folder}/s") == "True\n"


def test_a_forked_child_that_exits_writes_none_of_its_parents_reports(tmp_path: Path) -> None:
    code = """
import os, sys, threading
import memtop_agent as a
a.report("step", update=0)
a.flush()
write, writing, written = os.write, threading.Event(), threading.Event()
def slow_write(descriptor, data):
    if threading.current_thread().name == "memtop-journal":
        written.clear()
        writing.set()
        written.wait()
    return write(descriptor, data)
os.write = slow_write
for update in range(1, 20):
    a.report("step", update=update)
    # The journal's thread is writing at the moment of the fork.
    writing.wait()
    if os.fork() == 0:
        a.report("step", update=1000)
        a.answer(1, True, "by the child")
        sys.exit()
    os.wait()
    written.set()
    writing.clear()
"""
    run(code, tmp_path, timeout=120)
    assert [report.get("update") for report in reports(tmp_path)] == [None, *range(20)]


CUDA = """
import sys, types
class Cuda:
    resets = 0
    allocated, reserved = [10], [20]
    peaks = {}
    others = {}
    def is_initialized(self): return True
    def device_count(self): return len(self.reserved)
    def current_device(self): return 0
    def memory_stats_as_nested_dict(self, device):
        allocated = {"current": self.allocated[device], "peak": 0 if self.resets else 15}
        reserved = dict(self.peaks, current=self.reserved[device])
        return dict(self.others, allocated_bytes={"all": allocated}, reserved_bytes={"all": reserved})
    def reset_peak_memory_stats(self, device): self.resets += 1
    def get_device_properties(self, device): return types.SimpleNamespace(uuid="of-card-%d" % device)
cuda = Cuda()
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
"""


def test_the_peak_of_an_external_command_is_read_but_not_reset(tmp_path: Path) -> None:
    code = "optimizer.step()\noptimizer.step()\nprint(cuda.resets)"
    assert run(CUDA + TORCH + code, tmp_path) == "0\n"
    assert [report["peak_bytes"] for report in reports(tmp_path)[1:]] == [15, 15]


def test_a_trainer_that_offers_commands_has_its_peak_reset_at_each_reading(tmp_path: Path) -> None:
    code = (
        "import memtop_agent as a\na.offer('stop')\n"
        "print([a.readings()['peak_bytes'] for _ in range(2)], a.readings()['reserved_bytes'], cuda.resets)"
    )
    assert run(CUDA + code, tmp_path) == "[15, 0] 20 3\n"


def test_a_command_carries_its_values(tmp_path: Path) -> None:
    code = """
all_values = ({"values": {"batch": 4}}, {}, {"values": "nonsense"})
send(dict(values, type="command", id=1, name="change") for values in all_values)
a.offer("change")
taken = []
while len(taken) < len(all_values):
    taken += a.take_commands()
print(taken)
"""
    with tempfile.TemporaryDirectory(prefix="memtop-") as folder:
        assert (
            run(SERVER + code, tmp_path, socket=f"{folder}/s")
            == "[(1, 'change', {'batch': 4}), (1, 'change', {}), (1, 'change', {})]\n"
        )
