"""A real training, killed at random updates and resumed with another split each time, across an
epoch boundary: every split sees the same samples."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from memtop.presets import Settings
from memtop.supervisor.run.processes.attempt import launcher
from memtop.train.data import open_data
from memtop.train.data.tokens import ByteTokens
from memtop.train.order import SampleOrder, plan_updates, sample_digest
from memtop.train.state_files import Cut, newest_complete, newest_update
from tests.train.support import edited
from tests.train.test_processes import reports, trainer

# Two processes after one and one after two, and all splits of an effective batch of 8.
SPLITS = [(8, 1, 1), (4, 1, 2), (4, 2, 1), (2, 2, 2), (1, 4, 2), (2, 4, 1)]
SAVE_EVERY = 3
# Each split is killed after at most this many updates; the last one does this many.
EACH = 8
# More than a training does before it is killed, however busy the machine is.
FAR = 1000


def order_of(settings: Settings) -> SampleOrder:
    return SampleOrder(open_data(settings, ByteTokens()).train, settings.seed, [Cut(0, settings.seq_len)])


def settings_of(batch: int, accumulation: int, world_size: int, *, updates: int = FAR) -> Settings:
    """An epoch of about twelve updates that ends inside one, with the sources of any Python."""
    data = {"source": "python-stdlib", "max_bytes": 6_000}
    for seq_len in range(64, 48, -1):
        settings = edited(
            batch=batch,
            accumulation=accumulation,
            world_size=world_size,
            seq_len=seq_len,
            target_samples=8 * updates,
            save_every=SAVE_EVERY,
            data=data,
        )
        if order_of(settings).end_of(1.0) % 8:
            return settings
    raise AssertionError("no such length")


def expected(settings: Settings) -> list[str]:
    """The digests by definition, without training."""
    target = settings.target_samples
    plans = plan_updates(order_of(settings), updates=0, position=0, target=target, effective_batch=8)
    return [sample_digest(plan.ids) for plan in plans]


@pytest.mark.timeout(900)  # six trainings start, one after the other
def test_samples_per_update_are_the_same_for_every_split_across_kills(tmp_path: Path) -> None:
    saved = 0
    for split in SPLITS[:-1]:
        settings = settings_of(*split)
        process = trainer(tmp_path, settings, start=launcher(settings))
        # After at least one more save, and usually between two.
        update = random.randrange(saved + SAVE_EVERY + 1, saved + EACH)
        kill_everything_at(process, update, tmp_path, settings.world_size, saved)
        found = newest_complete(tmp_path / "state")
        assert found is not None
        assert found[1].updates % SAVE_EVERY == 0
        assert found[1].updates > saved
        saved = found[1].updates
    settings = settings_of(*SPLITS[-1], updates=saved + EACH)
    assert order_of(settings).epoch_at(settings.target_samples) > 1.2
    last = trainer(tmp_path, settings, start=launcher(settings))
    out, err = last.communicate(timeout=120)
    assert last.returncode == 0, out + err
    assert f"at update {saved}, {8 * saved} samples" in out

    sent = [report for report in reports(tmp_path) if report["type"] in ("plan", "step")]
    starts = [i for i, report in enumerate(sent) if report["type"] == "plan"]
    assert len(starts) == len(SPLITS)
    digests, order = expected(settings), order_of(settings)
    done = 0
    for split, start, end in zip(SPLITS, starts, [*starts[1:], len(sent)], strict=True):
        steps = sent[start + 1 : end]
        # The updates after the last save are repeated with the same samples.
        first = sent[start]["updates"] + 1
        assert first <= done + 1, split
        assert [step["update"] for step in steps] == list(range(first, first + len(steps))), split
        assert [step["sample_digest"] for step in steps] == [digests[step["update"] - 1] for step in steps], split
        assert [step["epoch"] for step in steps] == [order.epoch_at(8 * step["update"]) for step in steps], split
        done = steps[-1]["update"]
    assert done == saved + EACH


def kill_everything_at(process: subprocess.Popen[str], update: int, folder: Path, world: int, saved: int) -> None:
    """Kill a training at this update, or at the first one after it with a state newer than
    `saved`: a state is written while the training goes on.
    """
    assert process.stdout is not None
    reached = False
    for line in process.stdout:
        reached = reached or line.startswith(f"update {update} ")
        if reached and (newest_update(folder / "state") or 0) > saved:
            break
    # The launcher first, so that it cannot end the ranks in an orderly way.
    os.kill(process.pid, signal.SIGKILL)
    if world > 1:
        for rank in range(world):
            os.kill([report["pid"] for report in reports(folder, rank) if "pid" in report][-1], signal.SIGKILL)
    process.wait(timeout=120)
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()
