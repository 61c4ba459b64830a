"""Optimizers and their moments: exact conversions are exact, lossy ones as close as possible."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import msgspec
import pytest
import torch

from memtop.presets.schema import Optimizer
from memtop.train import BadInputError
from memtop.train.optimizers import MOMENTS, build_optimizer, full_moments, read_moments, write_moments
from tests.train.support import TINY, Training, edited

# DeepSpeed compiles its Adam at the first use: minutes on a busy machine.
pytestmark = pytest.mark.timeout(1200)


def trained(kind: Optimizer, steps: int = 4) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    """A small model after some steps: one matrix large enough for 8-bit states (4096 elements), and
    a vector.
    """
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 80)
    optimizer = fresh(kind, model)
    for _ in range(steps):
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fresh(kind: Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(msgspec.structs.replace(TINY, optimizer=kind, learning_rate=1e-3), model.parameters())


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "cpu_adam"])
def test_restored_moments_equal_the_saved_ones(kind: Optimizer) -> None:
    model, optimizer = trained(kind)
    other = fresh(kind, model)
    for parameter in model.parameters():
        saved = read_moments(optimizer, parameter)
        assert float(saved["step"]) == 4
        write_moments(other, parameter, {name: tensor.clone() for name, tensor in saved.items()})
        again = read_moments(other, parameter)
        assert again.keys() == saved.keys()
        for name, tensor in saved.items():
            torch.testing.assert_close(again[name], tensor, rtol=1e-6, atol=1e-12, msg=name)


def test_a_save_allocates_nothing_for_moments_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained("adamw")
    unused = fresh("adamw", model)
    made: list[tuple[int, ...]] = []
    zeros = torch.zeros

    def noted(shape: torch.Size) -> torch.Tensor:
        made.append(tuple(shape))
        return zeros(shape)

    monkeypatch.setattr(torch, "zeros", noted)
    for given, expected in ((optimizer, []), (unused, [(80, 64)] * 2)):
        made.clear()
        assert read_moments(given, model.weight).keys() == {"step", *MOMENTS}
        assert made == expected


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "adafactor", "cpu_adam"])
def test_steps_after_a_reload_equal_uninterrupted_ones(kind: Optimizer) -> None:
    model, optimizer = trained(kind)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saved = [copy.deepcopy(read_moments(optimizer, parameter)) for parameter in model.parameters()]

    def three_steps(of: torch.optim.Optimizer) -> torch.Tensor:
        torch.manual_seed(2)
        for _ in range(3):
            model(torch.randn(16, 64)).square().mean().backward()
            of.step()
            of.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()

    expected = three_steps(optimizer)
    model.load_state_dict(weights)
    other = fresh(kind, model)
    for parameter, moments in zip(model.parameters(), saved, strict=True):
        write_moments(other, parameter, moments)
    torch.testing.assert_close(three_steps(other), expected, rtol=1e-5, atol=1e-7)


def test_an_8_bit_optimizer_only_rounds_the_moments() -> None:
    model, optimizer = trained("adamw")
    other = fresh("adamw_8bit", model)
    for parameter in model.parameters():
        saved = read_moments(optimizer, parameter)
        write_moments(other, parameter, saved)
        for name in MOMENTS:
            found = full_moments(read_moments(other, parameter), parameter.shape)[name]
            wanted = saved[name]
            # Dynamic 8-bit blocks: a few percent of the block's largest value at worst, much less
            # on average.
            assert float((found - wanted).abs().max()) < 0.05 * float(wanted.abs().max())
            assert float((found - wanted).norm() / wanted.norm()) < 0.03


def test_adafactor_keeps_the_rows_and_columns_of_the_second_moment() -> None:
    row, column = torch.rand(6) + 0.1, torch.rand(5) + 0.1
    second = row[:, None] * column[None, :]
    model = torch.nn.Linear(5, 6, bias=False)
    adafactor = fresh("adafactor", model)
    saved = {"step": torch.tensor(9.0), "exp_avg": torch.randn(6, 5), "exp_avg_sq": second}
    write_moments(adafactor, model.weight, saved)
    kept = read_moments(adafactor, model.weight)
    assert kept.keys() == {"step", "exp_avg_sq_row", "exp_avg_sq_col"}
    back = full_moments(kept, model.weight.shape)
    # A factored second moment can represent rank one; the first moment is not kept.
    torch.testing.assert_close(back["exp_avg_sq"], second)
    assert not back["exp_avg"].any()


@pytest.mark.parametrize(("before", "after"), [("adamw", "adamw_8bit"), ("adafactor", "adamw"), ("adamw_8bit", "cpu_adam")])
def test_a_run_resumes_with_another_optimizer(tmp_path: Path, before: Optimizer, after: Optimizer) -> None:
    state = tmp_path / "state"
    settings = edited(optimizer=before, learning_rate=2e-3)
    first = Training(state, settings)
    first.channel.commands[5] = [(1, "stop", {})]
    first.run()
    second = Training(state, msgspec.structs.replace(settings, optimizer=after))
    assert second.run() == "finished"
    assert len(second.losses) == 5
    assert second.losses[-1] < first.losses[-1]


def test_adamw_runs_as_one_kernel_and_goes_on_from_moments_of_the_other_one() -> None:
    model, fused = trained("adamw")
    assert all(group["fused"] for group in fused.param_groups)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loops = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=TINY.weight_decay, fused=False, foreach=False)
    there_and_back = fresh("adamw", model)
    for parameter in model.parameters():
        write_moments(loops, parameter, read_moments(fused, parameter))
        write_moments(there_and_back, parameter, read_moments(loops, parameter))
    results = []
    for optimizer in (fused, loops, there_and_back):
        model.load_state_dict(weights)
        torch.manual_seed(2)
        for _ in range(3):
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone())
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["MissingCUDAException", "CUDAMismatchException"])
def test_a_cuda_that_deepspeed_does_not_find_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = getattr(importlib.import_module("deepspeed.ops.op_builder.builder"), name)

    def built(*args: object, **options: object) -> None:
        raise problem("CUDA_HOME does not exist, unable to compile CUDA op(s)")

    monkeypatch.setattr("deepspeed.ops.adam.DeepSpeedCPUAdam", built)
    with pytest.raises(
        BadInputError, match=r"^optimizer cpu_adam: cannot be built here \(CUDA_HOME does not exist, .*optimizer=adamw$"
    ):
        fresh("cpu_adam", torch.nn.Linear(2, 2))
