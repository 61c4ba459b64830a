"""Evaluation, the best state, and how many older states are kept."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
import torch
from accelerate import Accelerator

from memtop.presets import Settings
from memtop.supervisor.run.record.checkpoints import read_checkpoint
from memtop.train import BadInputError
from memtop.train.checkpoint import (
    best_loss,
    best_state,
    keep_before_spike,
    keep_best,
    make_room,
    take_newest,
    write_state,
)
from memtop.train.evaluation import Evaluation, Evaluator
from memtop.train.export import held_state
from memtop.train.run import find_state
from memtop.train.state_files import (
    BrokenStateError,
    ShardReader,
    newest_complete,
    older_states,
    previous_of,
    read_manifest,
    stored,
)
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
    assert list(found[2]) == [state, previous_of(state)]
    assert "state-00001.safetensors: size or checksum differs" in found[2][state]


class Killed(BaseException):
    """The trainer is killed here."""


def killed_at(monkeypatch: pytest.MonkeyPatch, number: int, work: Callable[[], object]) -> bool:
    """Whether the work was killed before its rename of that number."""
    renames = itertools.count(1)
    rename = Path.rename

    def counted(path: Path, target: Path) -> Path:
        if next(renames) == number:
            raise Killed
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", counted)
        try:
            work()
        except Killed:
            return True
    return False


def save(state: Path, updates: int) -> None:
    """Save the newest state once more, as that of this update."""
    manifest = read_manifest(state)
    read = ShardReader(state, manifest.files)
    tensors = [(name, {kind: stored(tensor) for kind, tensor in read(name).items()}) for name in sorted(read.names)]
    make_room(state, 0)
    write_state(state, tensors, msgspec.structs.replace(manifest, updates=updates), keep=2, needed=0)


def damage(state: Path) -> None:
    weights = state / "state-00001.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)


def test_no_kill_between_a_resume_from_an_older_state_and_the_end_of_two_saves_leaves_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    trained(tmp_path / "whole" / "state", edited())
    damage(tmp_path / "whole" / "state")

    def resume_and_save(state: Path) -> None:
        assert take_newest(state) is not None
        save(state, 11)
        save(state, 12)

    for number in itertools.count(1):
        state = tmp_path / f"killed{number}" / "state"
        shutil.copytree(tmp_path / "whole", state.parent)
        killed = killed_at(monkeypatch, number, lambda state=state: resume_and_save(state))  # type: ignore[misc]
        found = newest_complete(state)
        assert found is not None, number
        assert found[1].updates >= 9
        # The next resume gets along with what the kill has left.
        assert take_newest(state) == (found[1], None if not found[2] else ANY)
        save(state, 20)
        assert read_manifest(state).updates == 20
        if not killed:
            break
    assert number == 7, "two renames of the resume, and two of each save"


def test_a_damaged_state_moves_aside_and_is_never_the_previous_one(tmp_path: Path) -> None:
    state = tmp_path / "state"
    trained(state, edited())
    damage(state)
    taken = take_newest(state)
    assert taken is not None
    manifest, problem = taken
    weights = state / "state-00001.safetensors"
    assert manifest.updates == 9
    assert problem == f"{weights}: size or checksum differs from the manifest; this state is now damaged_state"
    save(state, 11)
    assert read_manifest(previous_of(state)).updates == 9
    assert not older_states(state)
    with pytest.raises(BrokenStateError):
        read_manifest(tmp_path / "damaged_state")


@pytest.mark.parametrize("name", ["manifest.json", "state-00001.safetensors"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_state_that_cannot_be_read_for_the_moment_ends_the_start_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    state = tmp_path / "state"
    channel = trained(state, edited()).channel
    before = sorted(tmp_path.rglob("*"))
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **more: Any) -> Any:
        if path == state / name:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(BadInputError) as refused:
            find_state(state, Accelerator(cpu=True), channel)
    assert str(refused.value) == (
        f"{state / name}: cannot be read: {os.strerror(number)}; it stays in its place: start again when it can be read, "
        "or move its folder aside"
    )
    assert sorted(tmp_path.rglob("*")) == before
    taken = take_newest(state)
    assert taken is not None
    assert (taken[0].updates, taken[1]) == (10, None)


@pytest.mark.parametrize("older", [True, False])
def test_a_state_of_another_format_ends_the_start_and_is_neither_moved_nor_marked(tmp_path: Path, older: bool) -> None:
    state = tmp_path / "state"
    channel = trained(state, edited()).channel
    if not older:
        shutil.rmtree(previous_of(state))
    (state / "manifest.json").write_text('{"format": 3, "updates": {"whole": 10}}')
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadInputError) as refused:
        find_state(state, Accelerator(cpu=True), channel)
    assert str(refused.value) == (
        f"{state}/manifest.json: format 3, this memtop reads format 2; it stays in its place: start again when it can be "
        "read, or move its folder aside"
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_first_save_that_was_killed_before_its_rename_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = edited(save_every=100)
    assert killed_at(monkeypatch, 1, lambda: Training(tmp_path / "state", settings).run())
    (half,) = tmp_path.glob("state.tmp-*")
    (tmp_path / "state.tmp-0").mkdir()
    taken = take_newest(tmp_path / "state")
    assert taken is not None
    assert (taken[0].updates, taken[1], half.exists()) == (10, None, False)


def test_states_that_are_all_damaged_stay_and_say_so(tmp_path: Path) -> None:
    state = tmp_path / "state"
    trained(state, edited())
    whole = (state / "state-00001.safetensors").read_bytes()
    for folder in (state, previous_of(state)):
        damage(folder)
    with pytest.raises(BrokenStateError, match=r"state-00001.safetensors: size or checksum differs"):
        take_newest(state)
    for folder in (state, previous_of(state)):
        found = read_checkpoint(folder)
        assert found is not None
        assert not found.complete
        assert found.problem is not None
        assert found.problem.startswith(f"the trainer found it damaged: {folder}/state-00001.safetensors: size or checksum")
    # Someone has a copy of the file.
    (state / "state-00001.safetensors").write_bytes(whole)
    assert take_newest(state) is not None
    found = read_checkpoint(state)
    assert found is not None
    assert found.complete


@pytest.mark.parametrize("name", ["best_state", "state.before_spike"])
def test_no_kill_while_a_state_is_kept_loses_the_former_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    trained(whole / "state", edited(eval_every=5))

    def keep(state: Path) -> None:
        if name == "best_state":
            keep_best(state)
        else:
            keep_before_spike(state, state)

    keep(whole / "state")
    save(whole / "state", 12)
    for number in (1, 2, 3):
        state = tmp_path / f"killed{number}" / "state"
        shutil.copytree(whole, state.parent)
        assert killed_at(monkeypatch, number, lambda state=state: keep(state)) is (number < 3)  # type: ignore[misc]
        if name == "best_state":
            with held_state(state, best=True) as held:
                assert held.found.name.startswith(name), number
        assert take_newest(state) is not None
        assert read_manifest(state.parent / name).updates == {1: 10, 2: 12, 3: 12}[number]


def test_a_resume_leaves_no_half_of_a_kept_state(tmp_path: Path) -> None:
    """It would be put back after the state from before a spike was deleted."""
    state = tmp_path / "state"
    trained(state, edited(eval_every=5))
    keep_before_spike(state, state)
    kept = tmp_path / "state.before_spike"
    for name in ("state.before_spike.tmp-7", "state.before_spike.tmp-8.former"):
        shutil.copytree(kept, tmp_path / name)
    (tmp_path / "best_state.tmp-7").mkdir()
    assert take_newest(state) is not None
    assert sorted(path.name for path in tmp_path.iterdir() if "before_spike" in path.name or "best" in path.name) == [
        "best_state",
        "state.before_spike",
    ]


def test_a_state_that_cannot_be_moved_ends_the_resume_in_one_line(tmp_path: Path) -> None:
    state = tmp_path / "state"
    channel = trained(state, edited()).channel
    damage(state)
    (tmp_path / "damaged_state").touch()  # A folder cannot take its place.
    why = f"{state}: cannot be made ready: Not a directory; start again when that is possible"
    with pytest.raises(BadInputError, match=f"^{re.escape(why)}$"):
        find_state(state, Accelerator(cpu=True), channel)
    assert state.is_dir()


def test_a_training_without_a_best_state_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "state", edited())
    with held_state(tmp_path / "state", best=True) as held:
        assert held.found == tmp_path / "state"
    assert capsys.readouterr().err == f"memtop: no best state was kept; using {tmp_path / 'state'} instead\n"
