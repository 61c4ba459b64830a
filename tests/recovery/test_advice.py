"""What is left when nothing fits, and what a slow run may do. Rows are those of the seeds' checklist."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memtop.presets.schema import Zero
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.advice import last_advice, system_commands, when_slow
from memtop.supervisor.recovery.remedies import HostFacts, Situation, situation_of
from memtop.supervisor.recovery.values import Remedy
from tests.recovery.support import CARD, GIB, LORA, S1, T5, died, gib, measured, peak


def situation(diagnosis: Diagnosis = S1, settings: Any = T5, **more: Any) -> Situation:
    return situation_of(diagnosis, settings, **more)


def test_3_1_row_16_the_guides_last_advice_in_its_order_with_estimates() -> None:
    long = replace(T5, seq_len=2048, eval_every=100, load_best_at_end=True)
    lines = (peak(long, 1, 6.0), peak(long, 32, 19.73))
    crowded = replace(S1, other_process_bytes=gib(3), other_process_pids=(99,))
    others, model, shorter, evaluation = last_advice(situation(crowded, long, peaks=lines, run="night"))
    assert others == "see who else holds the card (`memtop strays`): 3.0 GiB by pid 99 would come back"
    assert "196.6 -> 46.4 M parameters: 2.2 GiB less" in model
    assert "model.config.d_model=384" in model
    assert shorter.startswith("sequences of 512 tokens instead of 2048: at least 10.6 GiB less by estimate")
    assert shorter.endswith("`memtop restart night --seq-len 512`")
    assert "it failed in forward" in evaluation
    assert evaluation.endswith("`memtop restart night --set eval_every=0 --set load_best_at_end=false`")


def test_what_is_done_already_is_said() -> None:
    others, _, shorter, evaluation = last_advice(situation(replace(S1, other_process_bytes=0)))
    assert others == "nobody else holds the card: all of it was this run's"
    assert shorter == "sequences of at most 512 tokens: T is 256 already"
    assert evaluation == "evaluation is off already"
    assert "is not known" in last_advice(situation(died()))[0]
    assert "that is where it failed" in last_advice(situation(died(phase="evaluation"), replace(T5, eval_every=5)))[3]


def test_a_model_by_path_has_the_guides_example() -> None:
    assert "0.5 B instead of 1.8 B" in last_advice(situation(died(), LORA))[1]


def test_other_deaths_have_their_own_last_advice() -> None:
    shared = last_advice(situation(died(Kind.SHM_EXHAUSTED)))
    assert [line.partition(":")[0] for line in shared] == [
        "more shared memory",
        "more shared memory in the container (64 MiB by default)",
    ]
    assert not any("your program" in line for line in last_advice(situation(died(Kind.HOST_OOM_KILLED))))
    assert last_advice(situation(died(Kind.NOT_MEMORY, reason="python_error"))) == ()


OFFLOADED = replace(T5, batch=8, accumulation=8, zero=Zero(stage=2, offload_optimizer=True), world_size=1)


def slow(settings: Any, *sizes: tuple[int, float], **more: Any) -> tuple[Remedy | str, ...]:
    peaks = tuple(peak(settings, batch, size) for batch, size in sizes)
    return when_slow(situation(died(phase="unknown"), settings, peaks=peaks, total_bytes=CARD, **more))


def titles(found: tuple[Remedy | str, ...]) -> list[str]:
    return [one if isinstance(one, str) else one.title for one in found]


def test_3_1_row_17_offload_goes_before_sharding_and_accumulation_buys_nothing() -> None:
    found = slow(OFFLOADED, (4, 5.0), (8, 8.0))
    offload, sharding, batch, accumulation = found
    assert isinstance(offload, Remedy)
    assert offload.id == "offload_off"
    assert sharding == "sharding off: the offload goes first, it costs more time"
    assert isinstance(batch, Remedy)
    assert batch.assignments == {"batch": "16", "accumulation": "4"}
    assert batch.keeps_math
    assert isinstance(accumulation, str)
    assert "no sample is faster, and the peak stays as it is" in accumulation
    plain = slow(replace(OFFLOADED, zero=Zero(stage=2)), (4, 5.0), (8, 8.0))
    assert isinstance(plain[0], Remedy)
    assert (plain[0].id, plain[0].keeps_math) == ("sharding_off", True)


def test_3_3_row_4_nothing_is_given_back_that_does_not_fit() -> None:
    before = replace(T5, batch=16, accumulation=4)
    found = titles(slow(before, (16, 11.49), (32, 19.73)))
    assert "batch 16 -> 32: forecast at 100.8 %" in found
    full = titles(slow(OFFLOADED, (4, 12.0), (8, 15.5)))
    assert full[0] == "optimizer back onto the card: it would be 94.1 % full"
    assert "batch 8 -> 16: forecast at 114.9 %" in full
    checked = titles(slow(replace(T5, gradient_checkpointing=True, batch=8), (4, 6.0), (8, 10.0)))
    assert checked[0] == "checkpointing off: forecast at 91.9 %"


def test_checkpointing_off_where_there_is_room() -> None:
    found = slow(replace(T5, gradient_checkpointing=True, batch=8, accumulation=8), (4, 3.0), (8, 4.0))
    off = found[0]
    assert isinstance(off, Remedy)
    assert off.assignments == {"gradient_checkpointing": "false"}
    assert off.speed is not None
    assert off.speed > 1
    assert off.forecast is not None
    assert off.forecast.peak_bytes == gib(6.0)
    assert off.forecast.basis.startswith("estimate: ")


def test_unknown_peaks_give_no_larger_batch() -> None:
    assert "a larger micro-batch: its peak is not known (nothing was measured yet under these settings)" in titles(
        when_slow(situation(died(phase="unknown"), replace(T5, batch=8, accumulation=8)))
    )
    whole = titles(slow(replace(T5, batch=8, accumulation=1)))
    assert "a larger micro-batch: the whole update is one already" in whole


def test_what_an_offload_would_take_of_host_memory() -> None:
    found = titles(slow(replace(T5, batch=8), (4, 5.0), (8, 8.0), host=HostFacts(available_bytes=5 * GIB)))
    assert found[-1] == "an optimizer offload would need 2.9 GiB of host memory (free: 5.0 GiB) and make updates slower"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        *((Kind.HOST_OOM_KILLED, ("swap",)), (Kind.HOST_OOM_ALLOC, ("swap",)), (Kind.PINNED_HOST_OOM, ("memlock",))),
        *((Kind.SHM_EXHAUSTED, ("shm", "shm_container")), (Kind.GPU_OOM, ()), (Kind.DISK_FULL, ()), (Kind.NOT_MEMORY, ())),
    ],
)
def test_which_commands_belong_to_which_death(kind: Kind, names: tuple[str, ...]) -> None:
    assert system_commands(died(kind)) == names
    limited = system_commands(died(kind), HostFacts(in_cgroup=True))
    assert limited == (("memory_limit", *names) if "swap" in names else names)


def test_the_measured_run_has_estimates_everywhere() -> None:
    assert len(last_advice(situation(S1, T5, peaks=measured()))) == 4
