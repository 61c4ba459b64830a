"""Workers that torchrun starts again within an attempt: the counts go back, one event says why, and
memtop does not recover a second time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from memtop.supervisor.run.effects import AddEvent, DropRows, FollowWorkers
from memtop.supervisor.run.events import StoodStill, WorkersStarted
from memtop.supervisor.run.post_mortem.log_end import DeadWorker, dead_worker, worker_restarts
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import Hello, Report, Step
from memtop.supervisor.run.rules.stopping import may_stand_still
from memtop.supervisor.run.state import run_state
from memtop.train.agent.journal import worker_restarts as restarts_of_this_worker
from tests.conftest import Runs
from tests.run.brain import OOM, SETTINGS, Brain
from tests.run.test_programs import own, step

DEAD = DeadWorker(pid=12, local_rank=0, exit_status=1, message="KeyError: 'labels'")


def hello(rank: int, restarts: int = 0) -> dict[str, Any]:
    return {"type": "hello", "rank": rank, "pid": 11 + rank + 10 * restarts, "restarts": restarts, "max_restarts": 3}


def two_ranks() -> Brain:
    brain = own(hello(0))
    brain.report(hello(1), rank=1)
    brain.report(*(step(update, loss=1.0) for update in range(1, 7)))
    return brain


def said(brain: Brain) -> list[str]:
    return [effect.event.message for effect in brain.asked(AddEvent) if effect.event.kind == "workers"]


def test_the_event_names_the_rank_that_died_first() -> None:
    brain = two_ranks()
    brain.tell(WorkersStarted(restarts=1, dead=DEAD))
    assert said(brain) == ["torchrun started the workers again (restart 1 of 3) after rank 1 died: KeyError: 'labels'"]
    brain.tell(WorkersStarted(restarts=2, dead=DeadWorker(pid=99, local_rank=0, exit_status=-9)))
    assert said(brain)[1].endswith("(restart 2 of 3) after rank 0 died: ended by signal 9 (SIGKILL)")
    brain.tell(WorkersStarted(restarts=2, dead=DEAD))
    assert len(said(brain)) == 2, "the same restart"


def test_memory_that_ran_out_is_named_and_not_held_against_the_next_workers() -> None:
    brain = two_ranks()
    brain.report({**OOM, "survived": False, "update": 7}, rank=1)
    brain.tell(WorkersStarted(restarts=1, dead=DEAD))
    assert said(brain)[0].endswith("after out of memory (rank 1, update 7): no memory")
    assert brain.model.progress.failures == ()


def test_the_counts_go_back_and_the_plan_of_the_new_workers_counts() -> None:
    brain = two_ranks()
    brain.tell(WorkersStarted(restarts=1, dead=DEAD))
    run = run_state(brain.model)
    assert (run.updates, run.ranks) == (None, ())
    assert brain.asked(FollowWorkers)
    brain.report(hello(0, restarts=1), step(5, loss=3.0))
    run = run_state(brain.model)
    assert (run.updates, run.loss, [rank.pid for rank in run.ranks]) == (5, 3.0, [21])
    assert brain.asked(DropRows)[-1].update == 5, "dashboards discard the rows after it"
    assert len(said(brain)) == 1


def test_a_launcher_with_a_log_folder_of_its_own_is_noticed_by_the_report() -> None:
    brain = two_ranks()
    brain.report(hello(1, restarts=1), rank=1)
    brain.report(hello(0, restarts=1), step(1))
    assert said(brain) == ["torchrun started the workers again (restart 1 of 3)"]
    assert [rank.pid for rank in run_state(brain.model).ranks] == [21, 22]
    assert run_state(brain.model).updates == 1


def test_workers_that_load_do_not_hang() -> None:
    """The words of the failure are in the output, and nothing is reported until their first
    update."""
    brain = two_ranks()
    brain.tell(WorkersStarted(restarts=1, dead=DEAD))
    assert not may_stand_still(brain.model)
    brain.tell(StoodStill("CUDA out of memory"))
    assert brain.model.ladder is None
    brain.report(hello(0, restarts=1))
    assert may_stand_still(brain.model)


def test_a_supervisor_that_takes_over_says_nothing_again() -> None:
    brain = two_ranks()
    brain.tell(WorkersStarted(restarts=1, dead=DEAD, known=True))
    assert (said(brain), run_state(brain.model).updates) == ([], None)


def test_the_ledger_goes_back_with_the_workers(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_attempt(1, "start", SETTINGS, 1.0)

    def add(*reports: Report) -> list[tuple[int, float | None]]:
        ledger.add_reports(1, 0, reports, 1)
        return [(row.update, row.loss) for row in ledger.metrics()]

    assert len(add(Hello(), *(Step(update=n, loss=1.0) for n in range(1, 7)))) == 6
    assert len(add(Hello(restarts=1))) == 6, "it is not known yet where they go on"
    assert add(Step(update=3), Step(update=4, loss=2.0)) == [(1, 1.0), (2, 1.0), (3, None), (4, 2.0)]
    assert add(Step(update=5, loss=2.0), Hello(restarts=2), Step(update=2, loss=3.0)) == [(1, 1.0), (2, 3.0)]


TORCHRUN = "E1123 05:08:25.461000 8520 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {}) "
TORCHRUN += "local_rank: {} (pid: {}) of binary: /env/bin/python3\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("step 1\nValueError: in a message\n", None),
        (
            "[rank1]: KeyError: 'labels'\n[rank0]: RuntimeError: Connection closed\n" + TORCHRUN.format(1, 1, 50),
            (1, "KeyError: 'labels'"),
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory.\n" + TORCHRUN.format(1, 0, 50),
            (0, "torch.OutOfMemoryError: CUDA out of memory."),
        ),
        ("[rank0]: RuntimeError: Connection closed\n" + TORCHRUN.format(-9, 1, 50), (1, None)),
        ("KeyError: 1\n" + TORCHRUN.format(1, 0, 40) + "step 2\n" + TORCHRUN.format(1, 1, 50), (1, None)),
    ],
)
def test_torchruns_line_names_the_worker(tmp_path: Path, text: str, found: tuple[int, str | None] | None) -> None:
    (tmp_path / "log").write_text(text)
    dead = dead_worker(tmp_path / "log")
    assert (dead and (dead.local_rank, dead.message)) == found
    assert dead is None or dead.pid == 50


def test_the_folders_of_torchrun_count_the_restarts(tmp_path: Path) -> None:
    assert worker_restarts(tmp_path) == 0
    for number in (0, 2, 10):
        (tmp_path / f"torchelastic/none_x/attempt_{number}/0").mkdir(parents=True)
    assert worker_restarts(tmp_path) == 10


def test_the_agent_reports_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "three")
    assert restarts_of_this_worker() == {}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert restarts_of_this_worker() == {"restarts": 1, "max_restarts": 3}


# Without a process group: gloo cannot always connect again on a busy machine.
PROGRAM = """
import os, pathlib, threading, torch
rank, again = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
weights = torch.nn.Parameter(torch.ones(100))
optimizer = torch.optim.SGD([weights], lr=0.01)
for update in range(4 * again + 1, 9):  # its checkpoint is of update 4
    loss = (weights * weights).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {update}/8 loss {loss.item():.3f} try {again}", flush=True)
    if again:
        threading.Event().wait(0.3)  # longer than the time between two looks at what is new
    if update == 6 and not again:
        ready = pathlib.Path("ready")
        ready.touch() if rank == 0 else None
        while rank == 0 or not ready.exists():  # torchrun ends the first rank
            threading.Event().wait(0.1)
        raise KeyError("labels")
"""


def test_torchrun_starts_two_workers_again(runs: Runs) -> None:
    (runs.root / "two.py").write_text(PROGRAM)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
    runs.memtop("train", "--headless", "--name", "a", "--on-oom", "auto", "--", sys.executable, *torchrun, "two.py")
    (event,) = runs.events("a", "workers")
    assert event.message == "torchrun started the workers again (restart 1 of 3) after rank 1 died: KeyError: 'labels'"
    shown = runs.show("a", metrics=True)
    assert (shown["state"], len(shown["attempts"]), shown["updates"], shown["total_updates"]) == ("finished", 1, 8, 8)
    assert [row["update"] for row in shown["metrics"]] == list(range(1, 9))
    assert all(row["loss"] is not None for row in shown["metrics"])
