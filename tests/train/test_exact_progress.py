"""Real trainings, killed at a random update and taken up again, over an epoch boundary: every split sees the same samples."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from memtop.presets import Settings
from memtop.supervisor.run.launch import launcher
from memtop.train.corpus import ByteTokens
from memtop.train.data import open_data
from memtop.train.manifest import Cut, newest_complete
from memtop.train.order import SampleOrder, plan_updates, sample_digest
from tests.train.support import edited
from tests.train.test_processes import reports, trainer

UPDATES, SAVE_EVERY = 20, 3


def order_of(settings: Settings) -> SampleOrder:
    return SampleOrder(open_data(settings, ByteTokens()).train, settings.seed, [Cut(0, settings.seq_len)])


def settings_of(batch: int, accumulation: int, world_size: int) -> Settings:
    """An epoch that ends inside an update, whatever this Python's sources are, and a run that goes on beyond it."""
    data = {"source": "python-stdlib", "max_bytes": 6_000}
    for seq_len in range(64, 48, -1):
        settings = edited(
            batch=batch,
            accumulation=accumulation,
            world_size=world_size,
            seq_len=seq_len,
            target_samples=8 * UPDATES,
            save_every=SAVE_EVERY,
            data=data,
        )
        if order_of(settings).end_of(1.0) % 8:
            assert order_of(settings).epoch_at(8 * UPDATES) > 1.2
            return settings
    raise AssertionError("no such length")


def expected(settings: Settings) -> list[str]:
    """The digests by the definition, without any training."""
    plans = plan_updates(order_of(settings), updates=0, position=0, target=8 * UPDATES, effective_batch=8)
    return [sample_digest(plan.ids) for plan in plans]


@pytest.mark.parametrize("split", [(8, 1, 1), (4, 2, 1), (2, 4, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2)])
def test_samples_per_update_are_the_same_for_every_split_across_a_kill(tmp_path: Path, split: tuple[int, int, int]) -> None:
    settings = settings_of(*split)
    at = random.randrange(4, UPDATES - 2)
    process = trainer(tmp_path, settings, start=launcher(settings))
    kill_everything_at(process, at, tmp_path, settings.world_size)
    saved = newest_complete(tmp_path / "state")
    assert saved is not None
    assert saved[1].updates % SAVE_EVERY == 0
    again = trainer(tmp_path, settings, start=launcher(settings))
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, f"killed at {at}: {out}{err}"
    assert f"at update {saved[1].updates}, {saved[1].samples_seen} samples" in out
    told = reports(tmp_path)
    second_start = [i for i, report in enumerate(told) if report["type"] == "plan"][1]
    before, after = ([r for r in part if r["type"] == "step"] for part in (told[:second_start], told[second_start:]))
    # What was done after the last save is done again, with the very same samples.
    assert [step["update"] for step in after] == list(range(saved[1].updates + 1, UPDATES + 1))
    assert before[-1]["update"] >= saved[1].updates
    digests = expected(settings)
    assert [step["sample_digest"] for step in before + after] == [digests[step["update"] - 1] for step in before + after]


def kill_everything_at(process: subprocess.Popen[str], update: int, folder: Path, world: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"update {update} "):
            break
    # The launcher first: nobody shall end the ranks in an orderly way.
    os.kill(process.pid, signal.SIGKILL)
    if world > 1:
        for rank in range(world):
            os.kill(reports(folder, rank)[0]["pid"], signal.SIGKILL)
    process.wait(timeout=60)
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()
