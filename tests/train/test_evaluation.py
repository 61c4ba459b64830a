"""Evaluation, the best state, and how many older states are kept."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from memtop.presets import Settings
from memtop.train.checkpoint import best_loss, best_state
from memtop.train.evaluation import Evaluation, Evaluator
from memtop.train.state_files import newest_complete, older_states, previous_of, read_manifest
from tests.train.support import Training, edited, held_out


def trained(state: Path, settings: Settings) -> Training:
    training = Training(state, settings, evaluation=held_out())
    assert training.run() == "finished"
    return training


def test_the_evaluation_loss_is_the_mean_over_all_predicted_tokens(tmp_path: Path) -> None:
    training = trained(tmp_path / "state", edited(eval_every=5, eval_batch=3))
    first, second = training.channel.of("evaluation")
    assert (first["update"], second["update"]) == (5, 10)
    data, table = held_out(), held_out().table(16)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for key in zip(table.ids.tolist(), table.lengths.tolist(), strict=True):
            ids = data[key][0][None]
            logits = training.model(input_ids=ids).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            tokens += ids.shape[1] - 1
    assert second["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert (second["samples"], second["tokens"]) == (len(table), tokens)


def test_evaluating_changes_nothing_in_the_training(tmp_path: Path) -> None:
    with_it = trained(tmp_path / "with", edited(eval_every=2))
    without = trained(tmp_path / "without", edited())
    assert with_it.losses == without.losses


def test_the_reports_tell_when_an_evaluation_and_the_last_save_begin_and_end(tmp_path: Path) -> None:
    training = trained(tmp_path / "state", edited(eval_every=5, save_every=3))
    told = [
        (report["type"], report.get("phase") or report.get("update"))
        for report in training.channel.reports
        if report["type"] in ("step", "phase", "evaluation")
    ]
    evaluated = [[("phase", "evaluation"), ("phase", "training"), ("evaluation", update)] for update in (5, 10)]
    updates = [("step", update) for update in range(1, 11)]
    saved = [("phase", "save"), ("phase", "training")]
    assert told == [*updates[:5], *evaluated[0], *updates[5:], *evaluated[1], *saved]


def test_the_time_of_an_evaluation_is_not_that_of_the_next_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hour, late = 3600.0, [0.0]
    real, evaluate = time.perf_counter, Evaluator.__call__

    def slowly(self: Evaluator, *arguments: Any) -> Evaluation | None:
        found = evaluate(self, *arguments)
        late[0] += hour
        return found

    monkeypatch.setattr(Evaluator, "__call__", slowly)
    monkeypatch.setattr("memtop.train.channel.time.perf_counter", lambda: real() + late[0])
    training = trained(tmp_path / "state", edited(eval_every=5))
    assert late[0] == 2 * hour
    assert all(step["step_seconds"] < hour for step in training.channel.of("step"))


def test_the_state_with_the_lowest_loss_is_kept(tmp_path: Path) -> None:
    # A rate far too high, and no fall at the end: the model gets worse after a while.
    settings = edited(eval_every=1, learning_rate=2.0, warmup_fraction=0.9, save_every=100, final_learning_rate_fraction=1.0)
    training = trained(tmp_path / "state", settings)
    losses = {report["update"]: report["loss"] for report in training.channel.of("evaluation")}
    best = min(losses, key=lambda update: losses[update])
    assert best < 10, "otherwise this test proves nothing"
    kept = read_manifest(best_state(tmp_path / "state"))
    assert (kept.updates, kept.evaluation_loss) == (best, losses[best])
    assert best_loss(tmp_path / "state") == losses[best]
    # The newest state is still the last one, and a resumed run knows the best loss so far.
    assert read_manifest(tmp_path / "state").updates == 10
    again = Training(tmp_path / "state", msgspec.structs.replace(settings, target_samples=96), evaluation=held_out())
    assert again.trainer.best_loss == losses[best]


def test_without_hard_links_the_best_state_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    trained(tmp_path / "state", edited(eval_every=5))
    kept = best_state(tmp_path / "state")
    assert read_manifest(kept).updates in (5, 10)
    assert all(file.stat().st_nlink == 1 for file in kept.iterdir())


@pytest.mark.parametrize(("limit", "kept"), [(1, [9]), (2, [9]), (3, [9, 6]), (4, [9, 6, 3])])
def test_the_requested_number_of_states_is_kept_and_at_least_two(tmp_path: Path, limit: int, kept: list[int]) -> None:
    state = tmp_path / "state"
    trained(state, edited(save_total_limit=limit))
    assert read_manifest(state).updates == 10
    found = [read_manifest(folder).updates for folder in (previous_of(state), *older_states(state))]
    assert found == kept


def test_an_older_state_is_found_when_both_newer_ones_are_damaged(tmp_path: Path) -> None:
    state = tmp_path / "state"
    trained(state, edited(save_total_limit=3))
    for folder in (state, previous_of(state)):
        (folder / "state-00001.safetensors").write_bytes(b"damaged")
    found = newest_complete(state)
    assert found is not None
    assert found[1].updates == 6
    assert found[2] is not None
    assert "state-00001.safetensors: size or checksum differs" in found[2]
