"""The advice for when no remedy fits."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.remedies import last_advice
from memtop.supervisor.recovery.situation import Situation, situation_of
from tests.recovery.support import LORA, T5, T5_OOM, died, gib, measured, peak


def situation(diagnosis: Diagnosis = T5_OOM, settings: Any = T5, **more: Any) -> Situation:
    return situation_of(diagnosis, settings, **more)


def test_the_last_advice_in_order_with_estimates() -> None:
    long = replace(T5, seq_len=2048, eval_every=100, load_best_at_end=True)
    lines = (peak(long, 1, 6.0), peak(long, 32, 19.73))
    crowded = replace(T5_OOM, other_process_bytes=gib(3), other_process_pids=(99,))
    others, model, shorter, evaluation = last_advice(situation(crowded, long, peaks=lines, run="night"))
    assert others == "end the other processes on the GPU (`memtop strays`): this frees 3.0 GiB (pid 99)"
    assert "196.6 -> 46.4 M parameters, 2.2 GiB less" in model
    assert "model.config.d_model=384" in model
    assert shorter.startswith("use sequences of 512 tokens instead of 2048: an estimated 10.6 GiB less, or more")
    assert shorter.endswith("`memtop restart night --seq-len 512`")
    assert "it failed in another phase (forward)" in evaluation
    assert evaluation.endswith("`memtop restart night --set eval_every=0 --set load_best_at_end=false`")


def test_advice_that_is_already_followed_is_marked() -> None:
    others, _, shorter, evaluation = last_advice(situation(replace(T5_OOM, other_process_bytes=0)))
    assert others == "no other process used the GPU: this run used all of it"
    assert shorter == "use sequences of at most 512 tokens: T is already 256"
    assert evaluation == "evaluation is already off"
    assert "is not known" in last_advice(situation(died()))[0]
    assert "it failed there" in last_advice(situation(died(phase="evaluation"), replace(T5, eval_every=5)))[3]


def test_a_model_by_path_gets_an_example() -> None:
    assert "0.5 B instead of 1.8 B" in last_advice(situation(died(), LORA))[1]


def test_other_failures_have_their_own_last_advice() -> None:
    shared = last_advice(situation(died(Kind.SHM_EXHAUSTED)))
    assert [line.partition(":")[0] for line in shared] == [
        "more shared memory",
        "more shared memory in the container (64 MiB by default)",
        "look at what is in /dev/shm",
    ]
    assert not any("your program" in line for line in last_advice(situation(died(Kind.HOST_OOM_KILLED))))
    assert last_advice(situation(died(Kind.NOT_MEMORY, reason="python_error"))) == ()


def test_the_measured_run_has_an_estimate_on_every_line() -> None:
    assert len(last_advice(situation(T5_OOM, T5, peaks=measured()))) == 4
