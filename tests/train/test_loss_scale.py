"""The state contains the scale of fp16 losses and when it changes next."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator

from memtop.train import TrainingError
from memtop.train.state_files import LossScale
from memtop.train.zero import ZeroEngine
from tests.train.support import TINY, Training, edited

STOP = 6


@pytest.fixture(autouse=True)
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate creates a scaler only on a GPU; torch's also works on the CPU."""

    def with_scaler(**options: Any) -> Accelerator:
        accelerator = Accelerator(**options)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
        accelerator.scaler = scaler
        return accelerator

    monkeypatch.setattr("tests.train.support.Accelerator", with_scaler)


def stopped(state: Path) -> None:
    training = Training(state, edited(clip_norm=0.0))
    training.channel.commands[STOP] = [(1, "stop", {})]
    assert training.run() == "stopped"
    assert training.engine.loss_scale() == LossScale(512.0, 2)


def test_a_resumed_run_has_the_loss_scale_of_an_uninterrupted_one(tmp_path: Path) -> None:
    undisturbed = Training(tmp_path / "undisturbed", edited(clip_norm=0.0))
    undisturbed.run()
    stopped(tmp_path / "state")
    second = Training(tmp_path / "state", edited(clip_norm=0.0))
    assert second.engine.loss_scale() == LossScale(512.0, 2)
    second.run()
    # After ten updates it has grown twice, the last time two updates ago.
    assert second.engine.loss_scale() == undisturbed.engine.loss_scale() == LossScale(1024.0, 2)
    assert undisturbed.losses[STOP:] == second.losses
    for name, weight in undisturbed.weights().items():
        assert torch.equal(second.weights()[name], weight), name


def test_an_overflow_leaves_out_the_step_and_the_training_goes_on(tmp_path: Path) -> None:
    training = Training(tmp_path / "state", edited(clip_norm=1.0, save_every=1))
    parameter = next(iter(training.model.parameters()))
    parameter.register_hook(lambda gradient: gradient * (math.inf if training.trainer.position.updates == 2 else 1))
    assert training.run() == "finished"
    norms = [step["gradient_norm"] for step in training.channel.of("step")]
    assert [math.isfinite(norm) for norm in norms] == [True, True, False, *[True] * 7]
    assert all(weight.isfinite().all() for weight in training.weights().values())
    assert training.channel.of("warning") == []


def test_a_training_that_finds_no_scale_ends(tmp_path: Path) -> None:
    training = Training(tmp_path / "state", edited(target_samples=200))
    next(iter(training.model.parameters())).register_hook(lambda gradient: gradient * math.inf)
    # After eight updates the scale is 1, and seven updates later 1/128.
    with pytest.raises(TrainingError, match=r"^gradient norm is (nan|inf) at update 16 \(8 updates in a row\); "):
        training.run()
    assert [report["message"][:9] for report in training.channel.of("warning")] == ["update 9:"]


def test_weights_that_are_not_finite_end_a_training_while_the_scale_is_found(tmp_path: Path) -> None:
    training = Training(tmp_path / "state", edited(target_samples=80, save_every=1))
    with torch.no_grad():
        next(iter(training.model.parameters())).fill_(math.inf)
    with pytest.raises(TrainingError, match=r"^loss is nan at update 8 \(8 updates in a row\); "):
        training.run()
    assert training.channel.of("checkpoint") == []


@pytest.mark.parametrize("told", [-1.0, torch.tensor(-1.0)])
def test_deepspeeds_sign_for_a_gradient_that_is_not_finite_is_no_norm(told: Any) -> None:
    engine, _ = under_zero()
    engine.objective.step = lambda: None
    engine.objective.get_global_grad_norm = lambda: told
    engine.objective.optimizer.param_groups = []
    assert math.isnan(float(engine.step(1e-3)))


def under_zero() -> tuple[Any, Any]:
    """A ZeroEngine of which only the loss scale works, and its scaler, which is DeepSpeed's."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(init_scale=65536.0, scale_window=5, min_scale=1.0, delayed_shift=2, consecutive_hysteresis=False)
    prepared = SimpleNamespace(fp16_enabled=lambda: True, optimizer=SimpleNamespace(loss_scaler=scaler))
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {}})
    state = SimpleNamespace(deepspeed_plugin=plugin)
    accelerator: Any = SimpleNamespace(prepare=lambda *arguments: [prepared], state=state, is_main_process=True)
    objective: Any = SimpleNamespace(model=torch.nn.Linear(1, 1), chunk=0)
    return ZeroEngine(accelerator, objective, torch.optim.SGD([torch.zeros(1)]), TINY), scaler


@pytest.mark.parametrize("at", range(1, 20))
def test_deepspeeds_scale_continues_as_if_never_stopped(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", lambda: 0)
    overflows = {2, 9, 10}
    (whole, whole_scaler), (part, part_scaler) = under_zero(), under_zero()
    scales = []
    for update in range(24):
        if update == at:
            # Encoded and decoded, as in a saved state.
            saved = msgspec.json.decode(msgspec.json.encode(part.loss_scale()), type=LossScale)
            part, part_scaler = under_zero()
            part.set_loss_scale(saved)
        for scaler in (whole_scaler, part_scaler):
            scaler.update_scale(update in overflows)
        scales.append(whole.loss_scale().scale)
        assert part.loss_scale().scale == scales[-1], update
    assert len(set(scales)) > 2, "otherwise this test proves nothing"


def test_the_scale_grows_from_a_deepspeed_count_beyond_torchs_interval(tmp_path: Path) -> None:
    training = Training(tmp_path / "state", edited(clip_norm=0.0, target_samples=8))
    training.engine.set_loss_scale(LossScale(128.0, 1003, 1))
    training.run()
    assert training.engine.loss_scale() == LossScale(256.0, 0)
