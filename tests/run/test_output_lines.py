"""What one line of a program's output says."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from memtop.supervisor.run.output.lines import declared_by, read_line

BAR = "|██▏  | 10/1000 [00:05<08:20,  2.00it/s"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step 100/300 loss: 0.37", {"step": 100, "total": 300, "loss": 0.37}),
        ("Step [100/200], Loss: 2.3", {"step": 100, "total": 200, "loss": 2.3}),
        ("iter 150: loss 2.8412, time 35.50ms, mfu 3.2%", {"step": 150, "loss": 2.8412, "step_seconds": 0.0355}),
        ("iter_dt 12.00ms; iter 200: train loss 2.8", {"step": 200, "loss": 2.8, "step_seconds": 0.012}),
        (f"  1%{BAR}]", {"step": 10, "total": 1000, "loss": None, "step_seconds": 0.5}),
        (f"Epoch 3:  1%{BAR}, loss=0.37, v_num=0]", {"step": 10, "total": 1000, "loss": 0.37, "epoch": 3.0}),
        (f"Epoch 0:  1%{BAR}, v_num=0, train_loss=0.37, val_loss=0.5]", {"step": 10, "loss": 0.37, "evaluated": False}),
        (f"train Epoch  30:  1%{BAR}, loss/train/total=2.9341]", {"step": 10, "loss": 2.9341, "epoch": 30.0}),
        (f"1|120|Loss: 1.23:  1%{BAR}]", {"step": 10, "total": 1000, "loss": 1.23}),
        (
            "{'loss': 2.3, 'grad_norm': 1.1, 'learning_rate': 5e-05, 'epoch': 0.02}",
            {"loss": 2.3, "learning_rate": 5e-5, "epoch": 0.02},
        ),
        ("{'loss': '2.3', 'learning_rate': '5e-05', 'epoch': '0.02'}", {"step": None, "loss": 2.3, "learning_rate": 5e-5}),
        (
            "Epoch:[1/2](100/300), loss: 2.5, logits_loss: 2.4, aux_loss: 0.0, lr: 0.00050000, epoch_time: 3.0min",
            {"step": 100, "total": 300, "loss": 2.5, "learning_rate": 5e-4, "epoch": 1.0, "epochs": 2, "step_seconds": None},
        ),
        ('{"step": 3, "loss": 2.1, "train/lr": 3e-4}', {"step": 3, "loss": 2.1, "learning_rate": 3e-4}),
        ("epoch 3 | step 120 | loss 2.31 | lr 3.0e-4", {"step": 120, "loss": 2.31, "learning_rate": 3e-4, "epoch": 3.0}),
        ("120/300 [===>......] - ETA: 51s - loss: 0.4", {"step": 120, "total": 300, "loss": 0.4}),
        ("120/300 ━━━━━━━ 5s 20ms/step - accuracy: 0.9 - loss: 0.4", {"step": 120, "loss": 0.4, "step_seconds": 0.02}),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.3", {"step": 640, "total": 60000, "loss": 2.3, "epoch": 1.0}),
        ("| epoch   1 |   200/ 2983 batches | lr 20.00 | loss  7.62 | ppl  2041.7", {"step": 200, "total": 2983, "loss": 7.62}),
        ("Epoch: [14]  [ 420/1251]  eta: 0:09:41  loss: 6.9 (7.0)  max mem: 30412", {"step": 420, "total": 1251, "loss": 6.9}),
        (
            " iteration       10/     100 | consumed samples: 640 | elapsed time per iteration (ms): 123.0"
            " | learning rate: 1.0E-04 | global batch size:    64 | lm loss: 9.1E+00 | loss scale: 1.0",
            {"step": 10, "total": 100, "loss": 9.1, "learning_rate": 1e-4},
        ),
        (
            "2024-05-06 10:20:44 | INFO | epoch 002:   1200 / 8110 loss=6.114, wps=31250",
            {"step": 1200, "total": 8110, "loss": 6.114},
        ),
        ("[Rank 0] step=10, skipped=0, lr=[0.0001], mom=[(0.9, 0.95)]", {"step": 10, "loss": None, "learning_rate": 1e-4}),
        ("step 1,200 loss -1.0e+00", {"step": 1200, "loss": -1.0}),
        ("loss is 2.3 at step 7", {"step": 7, "loss": 2.3}),
        ("update 10: loss=tensor(2.31, device='cuda:0')", {"step": 10, "loss": 2.31}),
        ("step 8000/20000 | loss 2.1 | 12.3k tok/s", {"tokens_per_second": 12300.0}),
        ("\x1b[1mstep\x1b[0m 7 \x1b[32mloss\x1b[0m \x1b[1;31m2.5\x1b[0m", {"step": 7, "loss": 2.5}),
        ("step 7 loss inf", {"step": 7, "loss": math.inf}),
        (
            "memtop: step=120 total=300 loss=2.31 lr=3e-4",
            {"step": 120, "total": 300, "loss": 2.31, "learning_rate": 3e-4, "certain": True},
        ),
        ("100it [00:10, 9.8it/s]", {"step": 100, "total": None, "step_seconds": 1 / 9.8, "is_bar": True}),
        ("train: 1,200it [1:00:10, 1.50s/it, loss=2.5]", {"step": 1200, "loss": 2.5, "step_seconds": 1.5}),
        ("Train: 2 [  55/100 ( 56%)]  Loss: 1.47 (1.16)", {"step": 55, "total": 100, "epoch": 2.0, "epochs": None}),
        ("Train: [3/300][10/1251]  eta 0:50:00  loss 6.9 (7.0)", {"step": 10, "total": 1251, "epoch": 3.0, "epochs": 300}),
        ("INFO - [4][  50/7330]  lr: 1.9e-03  loss: 2.2", {"step": 50, "total": 7330, "epoch": 4.0}),
        ("[1,  2000] loss: 2.173", {"step": 2000, "epoch": 1.0, "loss": 2.173, "is_bar": False}),
        ('{"current_steps": 20, "total_steps": 100, "loss": 4.8, "lr": 5e-05}', {"step": 20, "total": 100, "loss": 4.8}),
        ("step:9/90 train_loss:4.8 train_time:900ms", {"step": 9, "total": 90, "loss": 4.8, "step_seconds": None}),
        ("epoch 3/10: train_loss 2.1, val_loss 2.3", {"epoch": 3.0, "loss": 2.1, "evaluated": True, "trained": True}),
        ("[default3]:iter 7: loss 2.5", {"step": 7, "loss": 2.5}),
        ("  Num Epochs = 3", {"declared_epochs": 3, "epoch": None}),
        ("Overriding: max_iters = 100", {"declared": 100, "step": None}),
        ("  Total optimization steps = 1,200", {"declared": 1200, "step": None}),
    ],
)
def test_the_numbers_of_a_line(text: str, expected: dict[str, Any]) -> None:
    line = read_line(text)
    assert line is not None
    assert {name: getattr(line, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("command", "steps", "epochs"),
    [
        ("python train.py --epochs 90", None, 90),
        ("train.py --num_train_epochs=3", None, 3),
        ("train.py trainer.max_epochs=10", None, 10),
        ("train.py --max-steps 500 --epochs 3", 500, None),
        ("train.py --max_steps -1 --epochs 4", None, 4),
        ("train.py --train-iters 100", 100, None),
        ("train.py --num-steps 128 --start-epoch 3 --warmup-epochs 5 --epochs-per-save 2", None, None),
        ("train.py --epochs", None, None),
    ],
)
def test_the_length_that_a_command_names(command: str, steps: int | None, epochs: int | None) -> None:
    assert declared_by(command.split()) == (steps, epochs)


def test_a_loss_may_be_nan() -> None:
    line = read_line("iter 3: loss nan, time 3ms")
    assert line is not None
    assert line.loss is not None
    assert math.isnan(line.loss)


@pytest.mark.parametrize(
    "text",
    [
        "step 250: train loss 2.4, val loss 2.5",
        "validation at step 100: loss 2.3",
        f"Evaluating:  1%{BAR}]",
        "{'eval_step': 3, 'eval_loss': 2.3}",
    ],
)
def test_an_evaluation_is_no_training(text: str) -> None:
    line = read_line(text)
    assert line is None or line.evaluated


@pytest.mark.parametrize("text", ["validation at step 100: loss 2.3", "evaluating: step 3 loss 2 val_loss 3"])
def test_a_loss_of_an_evaluation_is_none_of_the_training(text: str) -> None:
    line = read_line(text)
    assert line is not None
    assert not line.trained


def test_the_lines_of_each_rank_have_a_shape_of_their_own() -> None:
    texts = [f"{rank}step 7 loss 2.5" for rank in ("[rank0]: ", "[rank1]: ", "[default0]:", "")]
    assert len({line.shape for text in texts if (line := read_line(text)) is not None}) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loading shard 3/5",
        "{'eval_loss': 2.3, 'eval_runtime': 1.1}",
        "{'train_runtime': 81.2, 'train_loss': 1.8, 'epoch': 1.0}",
        "Map: 100%|██████████| 1000/1000 [00:00<00:00, 12345.67 examples/s]",
        "torch 2.1.3 step 2.0.1",
        "2024/05/06 10:20:44 started",
        "gradient accumulation steps: 4",
        "saving every 100 steps",
        "warmup steps: 10, save_steps=500, lr_decay_iters = 7",
        "loss scale: 65536",
        "block: [3,0,0], nll_loss2d_forward_kernel",
    ],
)
def test_what_is_no_step_and_no_loss(text: str) -> None:
    assert read_line(text) is None


def test_a_pattern_of_the_users_own() -> None:
    pattern = re.compile(r"k=(?P<step>\d+) of (?P<total>\d+), J=(?P<loss>\S+)")
    line = read_line("[a] k=30 of 90, J=1.5e-1", pattern)
    assert line is not None
    assert (line.step, line.total, line.loss, line.certain) == (30, 90, 0.15, True)
