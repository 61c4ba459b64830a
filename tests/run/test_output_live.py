"""Programs of the user's own, unchanged, whose numbers are in their output: real supervisors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from memtop.supervisor.run.processes.agent import AGENT_SITE
from memtop.supervisor.run.processes.environment import with_agent_in_front
from tests.conftest import Runs

# Gradient descent by hand: no torch, so no optimizer that the agent could count. It goes on until
# there is a file `go`.
BY_HAND = """
import itertools, pathlib, time
weight = 5.0
for step in itertools.count(1):
    weight -= 0.1 * weight
    print(f"step {step}/60000 loss: {weight * weight:.6f} lr: 1e-1", flush=True)
    if pathlib.Path("go").exists():
        break
    time.sleep(0.05)
"""
# The same with an optimizer of torch, as a program with a tiny model prints it.
WITH_TORCH = """
import itertools, pathlib, time, torch
weight = torch.nn.Parameter(torch.tensor([5.0]))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in itertools.count(0):
    optimizer.zero_grad()
    loss = (weight * weight).sum()
    loss.backward()
    optimizer.step()
    print(f"iter {step}: loss {loss.item():.4f}, time 50.00ms", flush=True)
    if pathlib.Path("go").exists():
        break
    time.sleep(0.05)
"""


def start(runs: Runs, program: str, *command: str, **environment: str) -> None:
    Path(runs.root, "program.py").write_text(program)
    given = {**runs.environment, **environment}
    runs.memtop("train", "--detach", "--name", "a", "--", *command, "program.py", env=given)


def finish(runs: Runs) -> dict[str, Any]:
    Path(runs.root, "go").touch()
    return runs.wait("a", lambda found: found["state"] == "finished")


def test_a_program_that_steps_no_optimizer_gets_its_curve(runs: Runs) -> None:
    start(runs, BY_HAND, sys.executable)
    live = runs.wait("a", lambda found: (found["updates"] or 0) >= 5 and found["eta_seconds"])
    assert live["state"] == "training"
    assert (live["total_updates"], live["learning_rate"]) == (60000, 0.1)
    assert live["program"]["grip"] == "output"
    assert live["program"]["why"].startswith("updates, total, loss, learning rate")
    assert "`step 2/60000 loss:" in live["program"]["why"]
    ended = finish(runs)
    assert ended["attempts"][0]["updates"] == ended["updates"]
    rows = runs.show("a", metrics=True)["metrics"]
    assert [row["update"] for row in rows] == list(range(1, ended["updates"] + 1))
    assert [round(row["loss"], 4) for row in rows[:2]] == [20.25, 16.4025]


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        (("-I",), "leave the option out"),
        pytest.param((), "append the old one (PYTHONPATH=.:$PYTHONPATH)", marks=pytest.mark.long),
    ],
)
def test_where_the_agent_cannot_enter_the_output_tells_and_a_warning_says_why(
    runs: Runs, option: tuple[str, ...], remedy: str
) -> None:
    # A shell replaces PYTHONPATH where memtop does not look into the command.
    command = (sys.executable, *option) if option else ("sh", "-c", f'PYTHONPATH=. exec {sys.executable} "$0"')
    start(runs, WITH_TORCH, *command)
    found = runs.wait("a", lambda found: found["updates"] and found["warnings"])
    assert "memtop is not inside the program: the step is read from its output" in found["warnings"][0]
    assert found["warnings"][0].endswith(remedy)
    assert found["program"]["grip"] == "output"
    finish(runs)


def test_env_in_the_command_keeps_the_agent(runs: Runs) -> None:
    start(runs, WITH_TORCH, "env", "PYTHONPATH=.", "NAME=1", sys.executable)
    found = runs.wait("a", lambda found: found["loss"] is not None and found["updates"] >= 5)
    assert found["program"]["why"].endswith("updates: counted by memtop's agent")
    assert found["ranks"][0]["rss_bytes"]
    finish(runs)
    rows = runs.show("a", metrics=True)["metrics"]
    both = [row for row in rows if row["loss"] is not None and row["learning_rate"] == 0.1]
    assert both[0]["update"] == 1
    assert both[0]["loss"] == 25.0


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("env", "PYTHONPATH=.", "python", "a.py"), ("env", f"PYTHONPATH={AGENT_SITE}{os.pathsep}.", "python", "a.py")),
        (("nice", "-n", "5", "/bin/env", "PYTHONPATH=x"), ("nice", "-n", "5", "/bin/env", f"PYTHONPATH={AGENT_SITE}:x")),
        (("env", "-u", "A", "PYTHONPATH=", "python"), ("env", "-u", "A", f"PYTHONPATH={AGENT_SITE}", "python")),
        (("env", "python", "a.py", "PYTHONPATH=."), ("env", "python", "a.py", "PYTHONPATH=.")),
        (("python", "a.py", "PYTHONPATH=."), ("python", "a.py", "PYTHONPATH=.")),
    ],
)  # fmt: skip
def test_the_commands_that_are_amended(command: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert with_agent_in_front(command) == expected


def test_a_pattern_of_the_users_own(runs: Runs) -> None:
    program = BY_HAND.replace('f"step {step}/60000 loss: {weight * weight:.6f} lr: 1e-1"', 'f"k={step} J={weight}"')
    start(runs, program, sys.executable, MEMTOP_STEP=r"k=(?P<step>\d+) J=(?P<loss>\S+)")
    found = runs.wait("a", lambda found: (found["updates"] or 0) >= 3)
    assert found["loss"] < 5
    finish(runs)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("k=(", "not a regular expression: missing ), unterminated subpattern at position 2"),
        (r"k=(\d+)", "it has no group (?P<step>...): the groups are step, total, loss, lr, epoch"),
        (r"(?P<step>\d) (?P<speed>\d)", "the group 'speed' is not known: the groups are step, total, loss, lr, epoch"),
    ],
)
def test_a_pattern_that_cannot_be_used(runs: Runs, pattern: str, says: str) -> None:
    environment = {**runs.environment, "MEMTOP_STEP": pattern}
    done = runs.memtop("train", "--name", "a", "--", "true", status=2, env=environment)
    assert done.stderr == f"memtop: MEMTOP_STEP={pattern!r}: {says}\n"
