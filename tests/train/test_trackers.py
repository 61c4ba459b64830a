"""Metrics for accelerate's trackers: a tracker gets every number that the run reports."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.tracking import GeneralTracker, on_main_process

from memtop.presets import SettingsError
from memtop.train import BadInputError, TrainingError
from memtop.train.channel import Tracking
from tests.train.recipes import TINY_LLAMA, Train, documents, settings_of, trainer_in, write_rows


class Kept(GeneralTracker):  # type: ignore[misc]
    """A tracker as in accelerate's guide: name, requires_logging_directory, tracker and three
    methods.
    """

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.configuration: dict[str, Any] = {}
        self.rows: list[tuple[int | None, dict[str, Any]]] = []
        self.finished = 0

    @property
    def tracker(self) -> list[tuple[int | None, dict[str, Any]]]:
        return self.rows

    @on_main_process  # type: ignore[untyped-decorator]
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.configuration = values

    @on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.rows.append((step, values))

    @on_main_process  # type: ignore[untyped-decorator]
    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    yield from trainer_in(tmp_path, monkeypatch)


def small(folder: Path, **more: Any) -> Any:
    data = write_rows(folder / "data.jsonl", [{"text": text} for text in documents()])
    given = {"data__source": "", "data__train": data, "data__eval": data, "eval_every": 2, "seq_len": 32, "updates": 4}
    return settings_of("pretrain-causal", **(given | TINY_LLAMA | more))


def test_a_tracker_gets_what_the_run_reports(train: Train, tmp_path: Path) -> None:
    kept = Kept()
    done = train(small(tmp_path), trackers=[kept])
    updates = [(step, values) for step, values in kept.rows if "loss" in values]
    assert [step for step, _ in updates] == [1, 2, 3, 4]
    names = ("loss", "learning_rate", "gradient_norm", "samples_seen", "epoch")
    assert [values for _, values in updates] == [{name: step[name] for name in names} for step in done.steps]
    evaluations = [(step, values["evaluation_loss"]) for step, values in kept.rows if "evaluation_loss" in values]
    assert evaluations == [(report["update"], report["loss"]) for report in done.channel.of("evaluation")]
    assert len(evaluations) == 2
    assert kept.finished == 1
    assert (kept.configuration["seq_len"], kept.configuration["model.config.hidden_size"]) == (32, 32)
    assert all(isinstance(value, bool | int | float | str) for value in kept.configuration.values())


def test_an_unknown_gradient_norm_is_left_out() -> None:
    kept = Kept()
    accelerator: Any = SimpleNamespace(log=lambda values, step: kept.rows.append((step, values)))
    Tracking(accelerator).step(3, {"loss": 2.5, "learning_rate": 0.1, "gradient_norm": None})
    assert kept.rows == [(3, {"loss": 2.5, "learning_rate": 0.1})]


def test_a_failed_run_finishes_its_trackers(train: Train, tmp_path: Path) -> None:
    kept = Kept()
    with pytest.raises(TrainingError, match=r"^gradient norm is (nan|inf) at update"):
        train(small(tmp_path, learning_rate=9, clip_norm=0, weight_decay=1e30), trackers=[kept])
    assert kept.finished == 1


def test_a_tracker_that_cannot_start_is_one_line(train: Train, tmp_path: Path) -> None:
    class Refusing(Kept):
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            raise RuntimeError("no account\nmore about it")

    with pytest.raises(BadInputError, match=r"^trackers kept: cannot start: no account$"):
        train(small(tmp_path), trackers=[Refusing()])


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_refused_in_one_line(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = importlib.util.find_spec
    hidden = ("tensorboard", "tensorboardX", "wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda module, *rest: None if module in hidden else found(module, *rest))
    with pytest.raises(BadInputError) as caught:
        train(small(tmp_path, trackers=name))
    assert str(caught.value) == f"trackers {name}: not installed: {sys.executable} -m pip install {name}"


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^trackers aim: unknown; choose from tensorboard, wandb$"):
        small(tmp_path, trackers="aim")
