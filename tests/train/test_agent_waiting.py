"""What the agent reports of a program after the greeting: later offers, and its waits for data."""

from __future__ import annotations

from pathlib import Path

from tests.train.test_agent import reports, run


def test_offers_after_the_greeting_are_reported(tmp_path: Path) -> None:
    """A trainer reports that it is loading long before it offers commands."""
    code = "import memtop_agent as a\na.report('phase', phase='loading')\na.flush()\na.offer('stop', 'change')"
    run(code, tmp_path)
    told = [report for report in reports(tmp_path) if "offers" in report]
    assert [(report["type"], report["offers"]) for report in told] == [
        ("hello", ["free_cache"]),
        ("offers", ["free_cache", "stop", "change"]),
    ]


def test_immediate_offers_are_in_the_greeting(tmp_path: Path) -> None:
    run("import memtop_agent as a\na.offer('stop')", tmp_path)
    (hello,) = [report for report in reports(tmp_path) if "offers" in report]
    assert hello["offers"] == ["free_cache", "stop"]


# A real loader whose batches take 30 ms, and one that another thread reads during the training.
LOADER = """
import threading, time, torch
from torch.utils.data import DataLoader
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 3
    def __getitem__(self, at): time.sleep(0.03); return torch.ones(1)
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
def train(batches):
    for batch in batches:
        (weight * batch).sum().backward()
        optimizer.step()
"""


def test_the_time_inside_a_data_loader_is_reported_with_each_step(tmp_path: Path) -> None:
    run(LOADER + "train(DataLoader(Slow()))", tmp_path)
    steps = [report for report in reports(tmp_path) if report["type"] == "step"]
    assert len(steps) == 3
    for step in steps[1:]:
        assert 0.03 <= step["data_wait_seconds"] <= step["step_seconds"]


def test_a_program_without_a_loader_has_no_data_wait(tmp_path: Path) -> None:
    run(LOADER + "train([torch.ones(1)] * 3)", tmp_path)
    steps = [report for report in reports(tmp_path) if report["type"] == "step"]
    assert [step["data_wait_seconds"] for step in steps] == [None, None, None]


def test_a_prefetching_thread_is_not_a_data_wait(tmp_path: Path) -> None:
    ahead = """
batches = []
fetcher = threading.Thread(target=lambda: batches.extend(DataLoader(Slow())))
fetcher.start(); fetcher.join()
train(batches)
"""
    run(LOADER + ahead, tmp_path)
    steps = [report for report in reports(tmp_path) if report["type"] == "step"]
    assert [step["data_wait_seconds"] for step in steps] == [None, None, None]


def test_a_failing_loader_fails_as_without_the_agent(tmp_path: Path) -> None:
    failing = """
class Broken(Slow):
    def __getitem__(self, at): raise KeyError("row 7")
try:
    train(DataLoader(Broken()))
except KeyError as error:
    print(error)
"""
    assert run(LOADER + failing, tmp_path) == "'row 7'\n"
