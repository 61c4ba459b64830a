"""Runs under the supervisor on a GPU, with the commands that people use."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from memtop.supervisor.recovery.peak_line import line_through
from memtop.supervisor.run.record.folder import find_run
from memtop.supervisor.run.view import read_configurations, read_state
from tests.conftest import Runs
from tests.recovery.injected import TINY
from tests.test_survival import assert_whole

Note = Any


def start(runs: Runs, device: str, *more: str) -> None:
    options = ("--name", "a", "--detach", "--preset", "standard", "--set", f"device={device}")
    runs.memtop("train", "first-run", *options, *(TINY if device == "cpu" else ()), *more)


def split(document: dict[str, Any]) -> tuple[int, int]:
    return document["settings"]["batch"], document["settings"]["accumulation"]


def test_kill_9_and_a_restart_repeat_and_skip_nothing(runs: Runs, device: str) -> None:
    start(runs, device, "--save-every", "5", "--max-updates", "100000", "--on-oom", "stop")
    running = runs.wait("a", lambda d: (d["updates"] or 0) >= 12 and d["checkpoint"] is not None)
    runs.kill(running["trainer_pid"])
    failed = runs.wait("a", lambda d: d["state"] == "failed")
    end = failed["updates"] + 20
    runs.memtop("restart", "a", "--headless", "--max-updates", str(end))
    document = runs.show("a", metrics=True)
    assert_whole(document, end, 32)
    assert len(document["attempts"]) == 2
    assert document["attempts"][1]["start_updates"] > 0


def test_free_reports_what_it_freed(runs: Runs, device: str, record_property: Note) -> None:
    start(runs, device, "--max-updates", "100000")
    runs.wait("a", lambda d: (d["updates"] or 0) >= 5)
    freed = runs.memtop("free", "a").stdout
    record_property("words", freed)
    assert "freed" in freed
    updates = runs.show("a")["updates"]
    runs.wait("a", lambda d: d["updates"] > updates + 5)
    runs.memtop("stop", "a")


def test_a_live_restart_changes_the_split_in_the_same_process(runs: Runs, device: str) -> None:
    start(runs, device, "--max-updates", "100000")
    runs.wait("a", lambda d: (d["updates"] or 0) >= 3)
    runs.memtop("restart", "a", "--live", "--batch", "4", "--accum", "8")
    document = runs.wait("a", lambda d: split(d) == (4, 8))
    assert len(document["attempts"]) == 1
    runs.memtop("stop", "a")


def test_advise_tries_a_larger_batch(runs: Runs, device: str, record_property: Note) -> None:
    start(runs, device, "--batch", "8", "--accum", "5", "--save-every", "1000", "--max-updates", "1000000")

    def proposed(_: Any) -> bool:
        advice = read_state(find_run("a", runs.path)).advice
        return advice is not None and any(remedy.id == "larger_batch" for remedy in advice.proposals)

    runs.wait("a", proposed)
    record_property("advice", json.loads(runs.memtop("advise", "a", "--json").stdout))
    trial = json.loads(runs.memtop("advise", "a", "--try", "--json").stdout)
    record_property("trial", trial)
    assert trial["state"] in ("kept", "undone")
    batch = trial["change"]["assignments"]["batch"] if trial["state"] == "kept" else "8"
    document = runs.wait("a", lambda d: str(d["settings"]["batch"]) == batch)
    assert document["effective_batch"] == 40
    runs.memtop("stop", "a")


def test_the_forecast_is_near_the_measured_peak(runs: Runs, device: str, record_property: Note) -> None:
    """The line through the peaks at B 2 and B 4 gives those at 8 and 16."""
    start(runs, device, "--batch", "2", "--accum", "8", "--seq-len", "512", "--max-updates", "1000000")
    for batch in (4, 8, 16):
        wait_for_peak(runs)
        runs.memtop("restart", "a", "--live", "--batch", str(batch), "--accum", str(16 // batch))
        runs.wait("a", lambda d, batch=batch: split(d)[0] == batch)
    wait_for_peak(runs)
    runs.memtop("stop", "a")
    peaks = [row.peak for row in read_configurations(find_run("a", runs.path).path) if row.peak is not None]
    measured = {peak.batch: peak.bytes for peak in peaks}
    assert sorted(measured) == [2, 4, 8, 16]
    line = line_through([peak for peak in peaks if peak.batch <= 4])
    foretold = {} if isinstance(line, str) else {batch: line.at(batch) for batch in (8, 16)}
    record_property("measured_bytes", measured)
    record_property("forecast_bytes", foretold or line)
    if device == "cuda":
        # On the CPU the peaks of a tiny model are those of the libraries.
        for batch, size in foretold.items():
            assert size == pytest.approx(measured[batch], rel=0.1)
        assert foretold


def wait_for_peak(runs: Runs) -> None:
    """The present configuration has trained for some updates."""

    def known(document: dict[str, Any]) -> bool:
        peak = document["configurations"][-1]["peak"]
        return peak is not None and peak["updates"] >= 5

    runs.wait("a", known)


_MODEL = """
import torch
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(256, 1024)
    def forward(self, x):
        return self.up(x) @ torch.empty(1 << 23, 1 << 23, device=x.device)
model = torch.nn.Sequential(Block(), Block()).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(4, 256, device=DEVICE))
"""


def test_the_layers_that_held_the_memory_are_named(runs: Runs, device: str, record_property: Note) -> None:
    """A real failure under the supervisor; on the CPU there is no allocator to ask."""
    (runs.root / "own.py").write_text(f"DEVICE = {device!r}\n{_MODEL}")
    runs.memtop("train", "--name", "a", "--headless", "--on-oom", "stop", "--", sys.executable, "own.py", status=1)
    file = runs.show("a")["attempts"][0]["diagnosis"]["snapshot_file"]
    if device == "cpu":
        assert file is None
        return
    found = json.loads(runs.memtop("diagnose", file, "--json").stdout)
    record_property("snapshot", found["snapshot"])
    memory = found["snapshot"]["devices"][0]
    shown = sum(one["held_bytes"] for one in memory["holders"])
    assert shown + memory["other_holders_bytes"] + memory["unknown_bytes"] == memory["allocated_bytes"] > 0
    assert ("*.up", "weights") in {(one["module"], one["what"]) for one in memory["holders"]}


def test_each_phase_has_its_peak_and_the_next_run_knows_it(runs: Runs, device: str, record_property: Note) -> None:
    runs.environment["XDG_CACHE_HOME"] = str(runs.root / "cache")
    options = ("--headless", "--preset", "standard", "--max-updates", "40", "--set", f"device={device}")
    words = ("train", "first-run", *options, *(TINY if device == "cpu" else ()))
    runs.memtop(*words, "--name", "a")
    (first,) = runs.show("a")["configurations"]
    if device == "cpu":
        assert (first["peak"]["phases"], first["phases_unknown"]) == ({}, "on the CPU no allocator counts it")
        return
    peak, foreseen = first["peak"], first["foreseen"]
    record_property("phases", {"foreseen": foreseen["phases"], "measured": peak["phases"]})
    assert peak["phases"].keys() == foreseen["phases"].keys() == {"forward", "backward", "optimizer"}
    assert 0 < max(peak["phases"].values()) <= peak["bytes"] - (peak["outside_bytes"] or 0)
    runs.memtop(*words, "--name", "b")
    (second,) = runs.show("b")["configurations"]
    found = second["foreseen"]
    record_property("foreseen", {"first": foreseen, "second": found, "measured": second["peak"]})
    assert found["basis"].startswith("estimate, calibrated by 1 earlier run with these settings")
    # A short run may end before what it holds outside torch is known.
    assert second["peak"]["bytes"] - (second["peak"]["outside_bytes"] or 0) < found["most_bytes"]
