"""What memtop learns from the lines of a program: which counter is the step of its training."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memtop.supervisor.run.output.learning import Learner, Row
from memtop.supervisor.run.output.relation import Relation
from tests.diagnosis.logs import DATA


def read(text: str, *, updates: Callable[[int], int] | None = None, pattern: str | None = None) -> tuple[Learner, list[Row]]:
    """All rows of an output, a line a second."""
    learner, rows = Learner(), []
    for number, line in enumerate(text.replace("\r", "\n").split("\n")):
        counted = None if updates is None else updates(number)
        rows += learner.take([line], float(number), updates=counted, pattern=re.compile(pattern) if pattern else None)
    return learner, rows


def points(text: str) -> list[tuple[int, int | None, float | None]]:
    return [(row.step, row.total, row.loss) for row in read(text)[1]]


def bar(count: int, total: int, words: str = "") -> str:
    return f"\r{count * 100 // total:3}%|█▏  | {count}/{total} [00:05<08:20,  2.00it/s{words}]"


def test_nothing_is_learned_from_one_line() -> None:
    learner, rows = read("step 3 loss 2.0")
    assert (learner.counts, rows) == (None, [])


def test_the_lines_before_it_is_learned_count_too() -> None:
    learner, rows = read("step 3/9 loss 2.0\nstep 4/9 loss 1.0")
    assert [(row.step, row.total, row.loss) for row in rows] == [(3, 9, 2.0), (4, 9, 1.0)]
    assert learner.example == "step 4/9 loss 1.0"


def test_a_counter_that_repeats_is_no_step() -> None:
    assert points("batch 8 loss 2.0\nbatch 8 loss 1.9\nbatch 8 loss 1.8") == []


def test_evaluations_between_the_steps() -> None:
    text = "step 0: train loss 4.2, val loss 4.3\niter 0: loss 3.0, time 9ms\niter 10: loss 2.0, time 8ms\n"
    assert points(f"{text}step 10: train loss 2.0, val loss 2.1\niter 20: loss 1.0, time 8ms") == [
        (0, None, 3.0),
        (10, None, 2.0),
        (20, None, 1.0),
    ]


def trainer_output() -> str:
    """Bars and dictionaries as Hugging Face's Trainer prints them, with evaluations."""
    text = "Map: 100%|███| 1000/1000 [00:00<00:00, 1234.00 examples/s]\n" + bar(0, 100)
    for step in range(1, 31):
        text += bar(step, 100)
        if step % 5 == 0:
            text += (
                f"\r{' ' * 40}\r{{'loss': {5 - step / 10}, 'learning_rate': 5e-05, 'epoch': {step / 100}}}\n{bar(step, 100)}"
            )
        if step % 10 == 0:
            text += (
                "".join(bar(batch, 7) for batch in range(1, 8)) + "\r{'eval_loss': 2.0, 'eval_runtime': 1.0, 'epoch': 0.1}\n"
            )
    return text + "{'train_runtime': 81.2, 'train_loss': 1.8, 'epoch': 1.0}\n"


def test_the_bar_that_moves_with_the_losses_is_that_of_the_training() -> None:
    learner, rows = read(trainer_output())
    losses = [(row.step, row.total, row.loss) for row in rows if row.loss is not None]
    assert losses == [(step, 100, 5 - step / 10) for step in range(5, 31, 5)]
    assert learner.newest is not None
    assert (learner.newest.step, learner.newest.loss) == (30, 2.0)


def test_losses_that_come_together_out_of_a_buffer_are_apart_by_their_epochs() -> None:
    learner, rows = Learner(), []
    for end in (50, 100):
        lines = [bar(end, 150), *(f"{{'loss': {n / 8}, 'epoch': {n / 200}}}" for n in range(end - 40, end + 1, 10))]
        rows += learner.take("".join(f"{line}\n" for line in lines).splitlines(), 1.0)
    assert [(row.step, row.loss) for row in rows if row.loss is not None] == [(n, n / 8) for n in range(10, 101, 10)]


@pytest.mark.parametrize(
    ("line", "epochs", "total"),
    [
        ("Epoch:[{e}/2]({i}/300), loss: {loss}, lr: 0.0005, epoch_time: 3.0min", (1, 2), 600),
        ("epoch {e} | step {i} | loss {loss} | lr 3.0e-4", (1, 2), None),
        ("Epoch {e}: {i}%|█ | {i}/300 [00:10<00:20,  9.87it/s, loss={loss}]", (0, 1), None),
        ("Epoch {e}/2\n{i}/300 [==>...] - loss: {loss}", (1, 2), 600),
        ("{i}/300 [==>...] - loss: {loss}", (1, 2), None),
    ],
)
def test_a_counter_that_begins_again_in_each_epoch(line: str, epochs: tuple[int, int], total: int | None) -> None:
    text = "\n".join(line.format(e=e, i=i, loss=i / 100) for e in epochs for i in (100, 200, 300))
    found = points(text)
    assert [step for step, _, _ in found] == [100, 200, 300, 400, 500, 600]
    if total is not None:
        assert {end for _, end, _ in found} == {total}


def test_a_counter_that_goes_on_in_the_next_epoch() -> None:
    text = "\n".join(f"epoch {step // 300} | step {step} | loss 1.5" for step in range(100, 900, 100))
    assert [step for step, _, _ in points(text)] == list(range(100, 900, 100))


def test_epochs_are_the_steps_of_a_program_that_counts_nothing_else() -> None:
    assert points("Epoch 1/10 loss 2.1\nEpoch 2/10 loss 1.1") == [(1, 10, 2.1), (2, 10, 1.1)]


def test_a_bar_without_any_loss_moves_as_the_updates_do() -> None:
    text = "".join(bar(count, 300) for count in range(1, 40))
    assert read(text)[1] == []
    assert read(text, updates=lambda number: 7)[1] == []
    learner, rows = read(text, updates=lambda number: number)
    assert learner.newest is not None
    assert (learner.newest.step, learner.newest.total) == (39, 300)
    assert rows


def test_the_settings_that_a_program_prints_name_the_end() -> None:
    assert points("max_iters = 90\niter 1: loss 2.0\niter 2: loss 1.0")[-1] == (2, 90, 1.0)
    assert points("max_iters = 90\niter 200: loss 2.0\niter 201: loss 1.0")[-1] == (201, None, 1.0)


def test_a_loss_that_is_not_finite_is_said_and_not_stored() -> None:
    rows = read("step 1 loss 2.0\nstep 2 loss nan\nstep 3 loss inf")[1]
    assert [(row.loss, row.not_finite) for row in rows] == [(2.0, False), (None, True), (None, True)]


def test_the_documented_line_counts_at_once_and_always() -> None:
    text = "step 1 loss 9.0\nstep 2 loss 8.0\nmemtop: step=50 total=90 loss=2.5\nstep 3 loss 7.0"
    assert points(text) == [(1, None, 9.0), (2, None, 8.0), (50, 90, 2.5)]


def test_the_users_pattern_counts_and_the_loss_may_be_in_another_line() -> None:
    text = "\n".join(f"k={k}\nloss: {k / 2}" for k in (3, 4, 5))
    rows = read(text, pattern=r"k=(?P<step>\d+)")[1]
    assert [(row.step, row.loss) for row in rows if row.loss is not None] == [(3, 1.5), (4, 2.0), (5, 2.5)]


def test_lines_of_other_ranks_count_once() -> None:
    text = "\n".join(f"[rank {rank}] step {step} loss 1.5" for step in (1, 2, 3) for rank in (0, 1))
    assert [step for step, _, _ in points(text)] == [1, 2, 3]


def test_a_second_part_of_the_program_takes_over() -> None:
    first = "\n".join(f"warm step {n} loss 5.0" for n in range(3))
    second = "\n".join(f"iteration {n} loss 2.0" for n in range(20))
    assert read(f"{first}\n{second}")[0].counts == "iteration loss"


def test_the_second_part_goes_on_from_the_end_of_the_first() -> None:
    first = "\n".join(f"warm step {n}/10 loss 5.0" for n in range(1, 11))
    second = "\n".join(f"iteration {n}/20 loss 2.0" for n in range(1, 21))
    found = points(f"{first}\n{second}")
    assert [step for step, _, _ in found] == list(range(1, 31))
    assert found[-1] == (30, 30, 2.0)


def test_the_same_counter_again_and_again() -> None:
    text = "\n".join(f"step {n} loss 2.0" for _ in range(3) for n in range(5))
    assert [step for step, _, _ in points(text)] == list(range(15))


def named_bar(name: str, count: int, total: int, loss: float) -> str:
    return f"\r{name}{count * 100 // total:3}%|█▏  | {count}/{total} [00:05<08:20,  2.00it/s, loss={loss}]"


@pytest.mark.parametrize("name", ["", "dev: ", "Epochs: "])
@pytest.mark.parametrize("others", [4, 60, 300])
def test_the_bar_of_something_else_with_a_loss_adds_no_steps(name: str, others: int) -> None:
    text = ""
    for epoch in range(3):
        text += "".join(named_bar("", count, 100, 4 - epoch) for count in range(1, 101))
        text += "".join(named_bar(name, count, others, 9.0) for count in range(1, others + 1))
    learner, rows = read(text)
    assert learner.newest is not None
    assert learner.newest.step == 300
    # A long one looks like a second part of the program, until the first one goes on.
    lasting = [row for row in rows if row.loss != 9.0]
    assert [row.step for row in lasting] == list(range(1, 301))
    with_agent = read(text, updates=lambda number: min(100, number % (100 + others)) + 100 * (number // (100 + others)))
    assert [row.loss for row in with_agent[1]] == [4] * 100 + [3] * 100 + [2] * 100


def test_any_number_of_other_bars_may_come_first() -> None:
    others = "".join(bar(count, total) for total in range(2, 200) for count in range(total - 1, total + 1))
    found = points(others + "\n" + "".join(named_bar("", count, 300, 2.0) for count in (1, 2, 3)))
    assert found == [(1, 300, 2.0), (2, 300, 2.0), (3, 300, 2.0)]


def test_many_kinds_of_losses_between_two_steps() -> None:
    lines = ["step 1"] + [f"{letter}{other}_loss: 2.0" for letter in "abcdefghij" for other in "abcdefghij"]
    text = "\n".join(line for count in (1, 2, 3) for line in (bar(count, 9), "loss: 3.0", *lines))
    learner = Learner()
    learner.take(text.replace("\r", "\n").split("\n"), 1.0)
    assert learner.take(["step 2 loss 2.0", "step 3 loss 1.0"], 2.0)


def test_lines_with_both_losses_count_until_there_are_others() -> None:
    epochs = "\n".join(f"Epoch {e}/9 train_loss: {e / 2} val_loss: 7.0" for e in (1, 2, 3))
    assert points(epochs) == [(1, 9, 0.5), (2, 9, 1.0), (3, 9, 1.5)]
    both = "step 0: train loss 4.0, val loss 4.1\nstep 10: train loss 3.0, val loss 3.1\n"
    steps = "iter 11: loss 2.9\niter 12: loss 2.8\nstep 20: train loss 2.0, val loss 2.1\niter 21: loss 2.7"
    assert points(both + steps) == [(0, None, 4.0), (10, None, 3.0), (11, None, 2.9), (12, None, 2.8), (21, None, 2.7)]


def test_of_several_ranks_one_counts() -> None:
    text = "\n".join(f"[default{rank}]:step {step} loss {step}.{rank}" for step in (1, 2, 3) for rank in (1, 0))
    assert points(text) == [(1, None, 1.1), (2, None, 2.1), (3, None, 3.1)]


def test_a_step_with_a_learning_rate_counts_without_a_loss() -> None:
    text = "\n".join(f"[INFO] [Rank 0] step={step}, skipped=0, lr=[5e-05, 5e-05], mom=[(0.9, 0.95)]" for step in (10, 20, 30))
    assert [(row.step, row.learning_rate) for row in read(text)[1]] == [(20, 5e-5), (30, 5e-5)]


@pytest.mark.parametrize("words", ["", "training: "])
def test_a_bar_without_an_end(words: str) -> None:
    text = "".join(f"\r{words}{n}it [00:{n // 10:02}, 9.81it/s, loss={n / 8}]" for n in range(30))
    assert points(text) == [(n, None, n / 8) for n in range(30)]


def test_the_epochs_that_a_program_prints_name_the_end() -> None:
    text = "max_epochs = 3\n" + "".join(named_bar(f"Epoch {e}: ", i, 100, 2.0) for e in range(3) for i in (50, 100))
    assert points(text)[-1] == (300, 300, 2.0)


def test_the_epochs_of_the_command_name_the_end() -> None:
    lines = [f"Train: {e} [{i:4}/100 ({i}%)]  Loss: 1.5 (1.6)" for e in range(2) for i in (25, 50)]
    assert [(row.step, row.total) for row in Learner().take(lines, 1.0)] == [(25, None), (50, None), (125, None), (150, None)]
    learner = Learner.of(["python", "train.py", "--epochs", "3"])
    assert [(row.step, row.total) for row in learner.take(lines, 1.0)] == [(25, 300), (50, 300), (125, 300), (150, 300)]


def test_what_was_learned_can_be_stored() -> None:
    lines = trainer_output().replace("\r", "\n").split("\n")
    whole = Learner().take(lines, 1.0)
    first, rows = Learner(), []
    rows += first.take(lines[:60], 1.0)
    second = msgspec.json.decode(msgspec.json.encode(first), type=Learner)
    assert rows + second.take(lines[60:], 1.0) == whole


def noise() -> list[str]:
    """Lines of the failure logs without those that report a training."""
    texts = [json.loads(line)["text"] for path in sorted(DATA.glob("*.jsonl")) for line in path.open()]
    lines = [line for text in texts for line in text.replace("\r", "\n").split("\n")]
    training = re.compile(r"(?i)\bloss\b.{0,5}\d|'loss'|loss/train|loss=|\bloss\b: nan")
    return [line for line in lines if line.strip() and not training.search(line)]


def test_noise_is_never_learned() -> None:
    learner = Learner()
    assert learner.take(noise(), 1.0) == []
    assert learner.counts is None


@given(st.lists(st.sampled_from(noise()), max_size=60), st.integers(0, 1 << 30))
def test_noise_in_any_order_is_never_learned(lines: list[str], updates: int) -> None:
    assert Learner().take(lines, 1.0, updates=updates) == []


@given(st.lists(st.sampled_from(noise()), max_size=60), st.randoms(use_true_random=False))
def test_noise_between_the_steps_changes_nothing(lines: list[str], random: object) -> None:
    steps = [f"step {number}/90 loss {number / 8}" for number in range(1, 20)]
    mixed = list(steps)
    for line in lines:
        mixed.insert(random.randrange(len(mixed)), line)  # type: ignore[attr-defined]
    found = [(row.step, row.total, row.loss) for row in Learner().take(mixed, 1.0)]
    assert found == [(number, 90, number / 8) for number in range(1, 20)]


@given(st.text(alphabet="steploi /:=[]()0123456789.,'\"%|\x1b\r\n-", max_size=300))
def test_any_text_can_be_read(text: str) -> None:
    for row in Learner().take(text.split("\n"), 1.0):
        assert row.step >= 0
        assert row.total is None or row.total >= row.step


PIECES = (
    *("step 3", "step 40/90", "loss 2.5", "loss nan", "epoch 1/3", "epoch 0.3", "epoch 2", "12/300", "100it [00:10, 9.8it/s]"),
    *(" 3%|# | 3/300 [00:01<00:02, 2.0it/s]", "val_loss 2", "train_loss: 3", "lr 1e-4", "[rank1]:", "max_iters = 30", "eval"),
    *(
        "{'loss': 2.0, 'epoch': 0.1}",
        "[1, 20] loss: 3",
        "aux_loss 2",
        "batch 7/9",
        "\x1b[1m",
        "step 99999999999",
        "total_steps 40",
    ),
)


@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(" ".join), max_size=40))
@example(lines=["12/300 loss 2.5 epoch 0.3", "40/300 loss 2.5 epoch 0.3"])
def test_any_pieces_of_lines_can_be_read(lines: list[str]) -> None:
    learner = Learner()
    for number, line in enumerate(lines):
        for row in learner.take([line], float(number)):
            assert row.step >= 0
            assert row.total is None or row.total >= row.step


@pytest.mark.parametrize(
    ("pairs", "agrees", "at"),
    [
        ([(1, 1), (2, 2)], True, (10, 10)),
        ([(0, 1), (10, 11)], True, (20, 21)),
        ([(8 * update, update) for update in range(1, 12)], True, (800, 100)),
        ([(epoch, 30 * epoch) for epoch in (1, 2)], True, (10, 300)),
        ([(500 + update, update) for update in range(1, 12)], False, None),
        ([(5, None)], None, None),
        ([(5, 5)], None, None),
    ],
)
def test_steps_in_the_output_and_the_agents_updates(
    pairs: list[tuple[int, int | None]], agrees: bool | None, at: tuple[int, int] | None
) -> None:
    relation = Relation()
    for step, updates in pairs:
        relation = relation.after(step, updates, begins_at=pairs[0][0])
    assert relation.agrees is agrees
    if at is not None:
        assert relation.update(at[0]) == at[1]


@pytest.mark.parametrize(
    ("begins_at", "step", "updates", "agrees"), [(1, 40, 40, True), (8, 80, 10, True), (501, 540, 40, False)]
)
def test_at_the_end_what_is_known_must_do(begins_at: int, step: int, updates: int, agrees: bool) -> None:
    assert Relation().after(step, updates, begins_at=begins_at, last=True).agrees is agrees


def test_updates_that_are_on_their_way_do_not_matter() -> None:
    relation = Relation()
    for step in range(1, 200, 10):
        relation = relation.after(step, step + 15, begins_at=1, lag=20.0)
    assert (relation.agrees, relation.update(50)) == (True, 50)
