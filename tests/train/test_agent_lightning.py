"""Lightning's Trainer, unchanged, with the agent: what it reports and obeys, and that it trains as
without the agent.

Each test runs with `lightning_double.py`, and with Lightning where it is installed: in the
environment of the tests, or in that of the Python which MEMTOP_LIGHTNING_PYTHON names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Runs, wait_for_file
from tests.forking import run as run_forked
from tests.train import lightning_double
from tests.train.test_agent_ranks import journals, updates
from tests.train.test_agent_trainers import of_kind
from tests.train.test_processes import environment

SCRIPT = """
import hashlib, importlib, json, os, sys, torch
pl = importlib.import_module(os.environ["LIGHTNING"])
ModelCheckpoint = importlib.import_module(os.environ["LIGHTNING"] + ".callbacks").ModelCheckpoint

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 22
    def __getitem__(self, at): return torch.full((4,), float(at % 5)) / 5, torch.tensor([float(at % 3)])

class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.losses = []
    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1]))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(1)
model = Small()
loader = torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=True)
validation = torch.utils.data.DataLoader(Rows(), batch_size=4)
def trainer(**given):
    values = dict(max_epochs=2, accumulate_grad_batches=2, accelerator="cpu", enable_progress_bar=False, logger=False)
    return pl.Trainer(**dict(values, **given))
def digest():
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()

"""
FIT = """
trainer(callbacks=[ModelCheckpoint(every_n_train_steps=4)]).fit(model, loader, validation)
with open("after.json", "w") as file:
    json.dump([model.losses, digest()], file)
"""


class Installed(NamedTuple):
    """Where Lightning is."""

    python: str
    name: str
    env: dict[str, str]

    def run(self, folder: Path, code: str, *arguments: str, agent: bool = True, **extra: str) -> list[dict[str, Any]]:
        """Run a program; its first rank's reports."""
        folder.mkdir(exist_ok=True)
        path = folder / "program.py"
        path.write_text(code)
        env = environment(folder, LIGHTNING=self.name, **extra)
        if not agent:
            env = {name: value for name, value in env.items() if not name.startswith(("MEMTOP_", "PYTHONPATH"))}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), self.env.get("PYTHONPATH"))))
        start = run_forked if self.python == sys.executable else subprocess.run
        command = [self.python, str(path), *arguments]
        done = start(command, env=env, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return journals(folder).get(0, [])


@pytest.fixture(params=["double", "lightning.pytorch", "pytorch_lightning"])
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> Installed:
    if request.param == "double":
        lightning_double.install(tmp_path / "packages")
        return Installed(sys.executable, "lightning.pytorch", {"PYTHONPATH": str(tmp_path / "packages")})
    named = os.environ.get("MEMTOP_LIGHTNING_PYTHON")
    if named is None and importlib.util.find_spec(request.param.partition(".")[0]) is None:
        pytest.skip("Lightning is not installed; MEMTOP_LIGHTNING_PYTHON may name a Python that has it")
    return Installed(named or sys.executable, request.param, {})


def test_what_lightning_reports(installed: Installed, tmp_path: Path) -> None:
    place = tmp_path / "run"
    reports = installed.run(place, SCRIPT + FIT)
    losses, _ = json.loads((place / "after.json").read_text())
    (plan,) = of_kind(reports, "plan")
    assert (plan["updates"], plan["total_updates"], plan["resumed"], plan["effective_batch"]) == (0, 12, False, 4)
    assert plan["framework"].startswith("lightning ")
    assert plan["knobs"] == {
        "batch": {"value": 2, "name": "batch_size", "source": "DataLoader"},
        "accumulation": {"value": 2, "name": "accumulate_grad_batches", "source": "Trainer"},
    }
    steps = of_kind(reports, "step")
    assert updates(reports) == list(range(1, 13)), "each update once"
    # An epoch has 11 batches, so that its last update has one.
    assert [step["samples_seen"] for step in steps] == [4, 8, 12, 16, 20, 22, 26, 30, 34, 38, 42, 44]
    of_updates = [losses[at : at + 2] if at % 11 < 10 else losses[at : at + 1] for at in (*range(0, 11, 2), *range(11, 22, 2))]
    assert [step["loss"] for step in steps] == pytest.approx([sum(some) / len(some) for some in of_updates], rel=1e-5)
    assert {(step["learning_rate"], step["batch"], step["accumulation"], step["logged"]) for step in steps} == {
        (0.1, 2, 2, True)
    }
    assert [step["epoch"] for step in steps[4:7]] == pytest.approx([10 / 11, 1.0, 1 + 2 / 11])
    assert [(report["update"], report["loss"] > 0) for report in of_kind(reports, "evaluation")] == [(6, True), (12, True)]
    saved = of_kind(reports, "checkpoint")
    assert [(report["updates"], report["samples_seen"]) for report in saved] == [(4, 16), (8, 30), (12, 44)]
    assert [Path(report["path"]).name for report in saved] == [f"epoch={at // 7}-step={at}.ckpt" for at in (4, 8, 12)]
    assert [report["outcome"] for report in of_kind(reports, "end")] == ["finished"]


EVENTS = (
    "add",
    "train_start",
    "train_batch_start",
    "train_batch_end",
    "validation_start",
    "validation_end",
    "saved",
    "train_end",
)
FAULTS = """
if sys.argv[1:]:
    import memtop_agent.lightning as agent
    def fail(*_): raise ValueError("made to fail")
    setattr(agent.Callbacks if sys.argv[1] == "add" else agent.LightningTraining, sys.argv[1], fail)
"""


def test_a_fault_in_any_event_changes_nothing_but_the_reports(installed: Installed, tmp_path: Path) -> None:
    installed.run(tmp_path / "without", SCRIPT + FIT, agent=False)
    wanted = (tmp_path / "without" / "after.json").read_text()
    is_double = bool(installed.env)
    for fault in ("", *EVENTS) if is_double else ("", "train_batch_end"):
        place = tmp_path / f"with-{fault}"
        reports = installed.run(place, SCRIPT + FAULTS + FIT, *filter(None, [fault]))
        assert (place / "after.json").read_text() == wanted, fault
        warnings = [report["message"] for report in of_kind(reports, "warning")]
        assert len(warnings) == bool(fault), warnings
        assert all("made to fail" in message for message in warnings)
        numbers = updates(reports)
        # The optimizer hook counts on from the update after the fault.
        assert numbers[-1] == 12, fault
        assert sorted(set(numbers)) == numbers
        assert len(numbers) >= 11


def test_it_saves_and_stops_on_request_and_resumes_from_there(installed: Installed, tmp_path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    place = tmp_path / "run"
    place.mkdir()
    server.bind(str(tmp_path / "s"))
    server.listen()
    answers: list[dict[str, Any]] = []

    def serve() -> None:
        with server:
            connection = server.accept()[0]
            stream = connection.makefile("rb")
            stream.readline()  # the greeting
            wait_for_file(place / "third")
            for number, name in enumerate(("checkpoint", "stop")):
                connection.sendall(json.dumps({"type": "command", "id": number, "name": name}).encode() + b"\n")
                answers.append(json.loads(stream.readline()))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    third = """
class Third(pl.Callback):
    def on_train_batch_end(self, trainer, *others):
        if trainer.global_step == 3:
            open("third", "w").close()
one = trainer(max_epochs=10000, callbacks=[Third(), ModelCheckpoint()])
one.fit(model, loader)
trainer().fit(model, loader)
"""
    reports = installed.run(place, SCRIPT + third, MEMTOP_SOCKET=str(tmp_path / "s"))
    thread.join(60)
    saved = [report for report in of_kind(reports, "checkpoint") if Path(report["path"]).name.startswith("memtop")]
    assert [Path(report["path"]).name for report in saved] == [f"memtop-step={report['updates']}.ckpt" for report in saved]
    assert [answer["ok"] for answer in answers] == [True, True]
    assert [answer["message"] for answer in answers] == [f"saved at update {one['updates']}: {one['path']}" for one in saved]
    last = saved[-1]["updates"]
    # Lightning saves once more at the end of this epoch, and would resume in the next one.
    files = sorted(place.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    assert any(path.name.endswith(f"-step={last}.ckpt") and path.name.startswith("epoch") for path in files)
    assert files[-1].stat().st_mtime_ns > files[-2].stat().st_mtime_ns
    assert str(files[-1]) == saved[-1]["path"] == of_kind(reports, "checkpoint")[-1]["path"]
    assert updates(reports) == list(range(1, last + 1))
    assert [report["outcome"] for report in of_kind(reports, "end")] == ["stopped", "stopped"], "the second one, too"
    again = SCRIPT + f"trainer(max_epochs=10000, max_steps={last + 3}).fit(model, loader, ckpt_path=sys.argv[1])"
    reports = installed.run(tmp_path / "again", again, saved[-1]["path"])
    (plan,) = of_kind(reports, "plan")
    assert (plan["updates"], plan["total_updates"], plan["resumed"]) == (last, last + 3, True)
    assert updates(reports) == [last + 1, last + 2, last + 3]


def test_a_supervised_lightning_program_shows_its_numbers(installed: Installed, runs: Runs) -> None:
    (runs.root / "mine.py").write_text(SCRIPT + FIT)
    added = [f"{name}={value}" for name, value in {**installed.env, "LIGHTNING": installed.name}.items()]
    runs.memtop("train", "--detach", "--name", "own", "--", "env", *added, installed.python, "mine.py")
    run = runs.wait("own", lambda run: run["state"] == "finished")
    assert (run["updates"], run["total_updates"], run["effective_batch"], run["samples_seen"]) == (12, 12, 4, 44)
    assert run["loss"] is not None
    assert run["program"]["grip"] == "hooks"
    assert run["program"]["checkpoint"]["complete"]
    assert Path(run["checkpoint"]["path"]).name == "epoch=1-step=12.ckpt"
    Path(run["checkpoint"]["path"]).write_bytes(b"PK")
    assert not runs.show("own")["program"]["checkpoint"]["complete"]
