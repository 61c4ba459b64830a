"""The remedies for a lack of host memory, shared memory, pinned memory and disk space."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from memtop.presets.schema import Zero, with_splits
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.plan import Card
from memtop.supervisor.recovery.advice import table
from memtop.supervisor.recovery.configuration import applied
from memtop.supervisor.recovery.forecast import Estimates
from memtop.supervisor.recovery.host_forecast import HostEstimates
from memtop.supervisor.recovery.situation import HostFacts, KeptState
from tests.recovery.support import CARD, FIRST, GIB, LORA, T5, climb, died, forecast_of, gib, ids, named, peak, why_not

GPU_RUN = replace(T5, workers=4, device="cuda")
CPU_RUN = replace(FIRST, workers=2, device="cpu", loss_chunk=0)
KILLED = died(Kind.HOST_OOM_KILLED, phase="unknown")
REFUSED = died(Kind.HOST_OOM_ALLOC, phase="forward")


@pytest.mark.parametrize("diagnosis", [KILLED, REFUSED])
def test_in_training_on_a_gpu_a_smaller_micro_batch_saves_no_host_memory(diagnosis: Diagnosis) -> None:
    found = climb(diagnosis, GPU_RUN)
    assert ids(found) == ["workers", "pin_memory", "host_level", "processes", "swap"]
    assert why_not(found, "a smaller micro-batch: it saves GPU memory")
    for remedy in found.remedies:
        assert remedy.keeps_math
        assert "batch" not in remedy.assignments


def test_in_training_on_the_cpu_a_smaller_micro_batch_saves_host_memory() -> None:
    found = climb(REFUSED, CPU_RUN)
    assert ids(found) == [
        *("smaller_batch", "checkpointing", "chunked_loss", "workers", "host_level", "seq_len", "smaller_model", "swap"),
    ]
    assert named(found, "smaller_batch").assignments == {"batch": "4", "accumulation": "8"}


def test_where_the_address_space_is_limited_its_limit_comes_first() -> None:
    limited = replace(REFUSED, address_space_bytes=4 * GIB)
    found = ids(climb(limited, CPU_RUN))
    assert found[:2] == ["address_space", "smaller_batch"]
    assert found.count("address_space") == 1
    assert "swap" not in found


def test_on_the_cpu_peaks_of_host_memory_are_forecast_against_its_limit() -> None:
    key = {"on_gpu": False}
    peaks = (peak(CPU_RUN, 2, 4.0, **key), peak(CPU_RUN, 4, 7.0, **key))
    found = climb(REFUSED, CPU_RUN, peaks=peaks, host=HostFacts(limit_bytes=8 * GIB))
    split = named(found, "smaller_batch")
    assert split.assignments["batch"] == "2", "4 is at 87.5 %"
    assert split.forecast is not None
    assert (split.forecast.total_bytes, split.forecast.fraction) == (8 * GIB, 0.5)


def test_on_the_cpu_remedies_have_the_estimate_of_host_memory() -> None:
    host = HostFacts(limit_bytes=2 * GIB)
    without, others = climb(REFUSED, CPU_RUN, host=host), GIB // 2
    assert named(without, "smaller_batch").forecast is None
    estimates = HostEstimates(total_bytes=None, others_bytes=None)
    found = climb(REFUSED, CPU_RUN, host=host, host_estimates=estimates, others_bytes=others)
    for id, after in (
        ("smaller_batch", replace(CPU_RUN, batch=4, accumulation=8)),
        ("checkpointing", replace(CPU_RUN, gradient_checkpointing=True)),
        ("chunked_loss", replace(CPU_RUN, loss_chunk=-1)),
    ):
        seen = forecast_of(found, id)
        assert seen == replace(estimates, total_bytes=2 * GIB, others_bytes=others).forecast(after)
        assert seen.basis == "estimate; other processes hold 512 MiB"
        assert seen.taken_bytes == pytest.approx(seen.peak_bytes + others, abs=1)
    assert named(found, "host_level").forecast is None, "the estimate does not know what it saves"
    # What the failed process held shows that the estimate is too low.
    dead = replace(REFUSED, process_bytes=2 * GIB)
    raised = forecast_of(climb(dead, CPU_RUN, host=host, host_estimates=estimates), "smaller_batch")
    assert raised.basis == "estimate; raised, because the run has needed more than foreseen"
    assert raised.peak_bytes > forecast_of(found, "smaller_batch").peak_bytes
    # It decides nothing: here it says that not even the smallest batch fits.
    little = climb(REFUSED, CPU_RUN, host=HostFacts(limit_bytes=GIB // 4), host_estimates=estimates)
    assert forecast_of(little, "smaller_batch").runs_out
    assert [(one.id, one.assignments) for one in little.remedies] == [(one.id, one.assignments) for one in without.remedies]


def test_the_memory_of_the_failed_process_is_a_failed_peak() -> None:
    limited = died(Kind.HOST_OOM_ALLOC, phase="forward", process_bytes=gib(6), requested_bytes=gib(1), allowed_bytes=gib(6.5))
    found = climb(limited, CPU_RUN, base_bytes=gib(1), host=HostFacts(limit_bytes=gib(6.5)))
    split = named(found, "smaller_batch")
    assert split.forecast is not None
    assert split.forecast.peak_bytes == gib(4), "1 + (6 + 1 - 1) / 2"
    assert "at least" in split.forecast.basis
    assert "memory_limit" in ids(found)


def test_a_failure_while_reading_data_is_not_about_the_batch() -> None:
    found = climb(died(Kind.HOST_OOM_ALLOC, phase="data"), CPU_RUN)
    assert ids(found)[:2] == ["workers", "host_level"]


def test_an_unproven_kill_makes_nothing_smaller() -> None:
    found = climb(replace(KILLED, confidence=0.4), GPU_RUN)
    assert ids(found) == ["who_killed"]
    assert found.remedies[0].resumable == "none"
    assert found.remedies[0].assignments == {}
    assert why_not(found, "not proven")
    assert ids(climb(replace(REFUSED, confidence=0.49), CPU_RUN)) == ["who_killed"]


def test_all_workers_of_all_ranks_are_removed() -> None:
    found = named(climb(KILLED, replace(GPU_RUN, workers=6)), "workers")
    assert found.why.startswith("18 worker processes less")
    assert found.title == "loader workers 6 -> 0 in each of 3 ranks"
    assert found.forecast is None
    assert (found.resumable, found.assignments) == ("resumes", {"workers": "0"})
    assert named(climb(KILLED, GPU_RUN, alive=True), "workers").resumable == "live"


def test_levels_one_after_the_other() -> None:
    assert named(climb(KILLED, GPU_RUN), "host_level").assignments == {"host_level": "low"}
    assert named(climb(KILLED, replace(GPU_RUN, host_level="low")), "host_level").assignments == {"host_level": "extreme"}
    last = climb(KILLED, replace(GPU_RUN, host_level="extreme", workers=0, pin_memory=False, world_size=1))
    assert ids(last) == ["swap"]
    assert len(last.left_out) == 4


def test_processes_with_batches_of_their_own_are_not_halved() -> None:
    uneven = with_splits(replace(GPU_RUN, world_size=2), [(3, 2), (1, 2)])
    found = climb(KILLED, uneven)
    assert "processes" not in ids(found)
    assert why_not(found, "fewer processes") == "fewer processes: each has a batch of its own, which names its GPU"


def test_half_the_processes_keep_the_effective_batch() -> None:
    for world, fewer, accumulation in ((2, 1, 4), (4, 2, 4), (3, 1, 6)):
        found = named(climb(KILLED, replace(GPU_RUN, world_size=world)), "processes")
        assert f"processes {world} -> {fewer}, accumulation 2 -> {accumulation}" in found.title
        assert (found.resumable, found.needs_consent) == ("none", True)
        assert found.command == f"memtop restart RUN --gpus free:{fewer} --accum {accumulation}"
        assert 32 * accumulation * fewer == 32 * 2 * world
    on_its_own = named(climb(KILLED, replace(GPU_RUN, world_size=4, gpus="4,5,6,7")), "processes")
    assert on_its_own.command == "memtop restart RUN --gpus 4,5 --accum 4"


OFFLOADED = replace(LORA, method="full", lora=None, model=T5.model, task="seq2seq", zero=Zero(stage=2, offload_optimizer=True))


def test_an_offload_returns_to_a_gpu_that_has_room() -> None:
    room = (peak(OFFLOADED, 2, 6.0), peak(OFFLOADED, 4, 8.0))
    found = climb(KILLED, OFFLOADED, peaks=room, total_bytes=CARD)
    back = named(found, "offload_off")
    assert back.forecast is not None
    assert back.forecast.peak_bytes == pytest.approx(gib(8.0) + 16 * 196_648_704, abs=4)
    assert not applied(OFFLOADED, back).zero.offload_optimizer
    assert ids(found).index("offload_off") > ids(found).index("host_level")
    full = climb(KILLED, OFFLOADED, peaks=(peak(OFFLOADED, 2, 13.0), peak(OFFLOADED, 4, 15.0)), total_bytes=CARD)
    assert "offload_off" not in ids(full)
    assert why_not(full, "optimizer back on the GPU: it would be 91.6 % full")
    assert why_not(climb(KILLED, OFFLOADED), "whether it fits is not known")
    # The estimate needs no measured line, and knows what returns better than the line does.
    estimates = Estimates(card=Card(total_bytes=CARD, generation=86))
    roomy = climb(KILLED, replace(OFFLOADED, batch=2), total_bytes=CARD, estimates=estimates, on_gpu=True)
    assert forecast_of(roomy, "offload_off").basis == "estimate"
    small = climb(KILLED, replace(OFFLOADED, batch=2), total_bytes=gib(4), estimates=estimates, on_gpu=True)
    assert why_not(small, "optimizer back on the GPU: it would be ")


@pytest.mark.parametrize(
    ("world", "zero", "then"),
    [
        (3, Zero(stage=2, offload_optimizer=True), Zero(stage=2)),
        (1, Zero(stage=2, offload_optimizer=True), Zero()),
        (1, Zero(stage=3, offload_optimizer=True, offload_parameters=True), Zero(stage=3, offload_parameters=True)),
    ],
)
def test_on_one_process_an_offload_that_returns_ends_zero(world: int, zero: Zero, then: Zero) -> None:
    now = replace(OFFLOADED, world_size=world, zero=zero)
    back = named(climb(KILLED, now, peaks=(peak(now, 2, 2.0), peak(now, 4, 3.0)), total_bytes=CARD), "offload_off")
    assert applied(now, back).zero == then


def test_an_offload_that_returns_uses_the_optimizer_of_torch() -> None:
    room = replace(OFFLOADED, optimizer="cpu_adam")
    back = named(climb(KILLED, room, peaks=(peak(room, 2, 6.0), peak(room, 4, 8.0)), total_bytes=CARD), "offload_off")
    after = applied(room, back)
    assert (after.optimizer, back.resumable, back.keeps_math) == ("adamw", "resumes", True)


def test_offload_is_never_a_remedy_for_host_memory() -> None:
    for kind in (Kind.HOST_OOM_KILLED, Kind.HOST_OOM_ALLOC, Kind.PINNED_HOST_OOM, Kind.SHM_EXHAUSTED):
        found = climb(died(kind), replace(GPU_RUN, preset="deepspeed"))
        assert not {"offload_optimizer", "next_preset"} & set(ids(found))


def test_shared_memory() -> None:
    found = climb(died(Kind.SHM_EXHAUSTED, phase="data"), GPU_RUN)
    assert ids(found) == ["workers", "shm", "shm_container", "shm_content"]
    assert found.remedies[1].command == "sudo mount -o remount,size=8G /dev/shm"
    assert found.remedies[2].command is not None
    assert "docker run --shm-size=8g" in found.remedies[2].command


def test_pinned_memory() -> None:
    found = climb(died(Kind.PINNED_HOST_OOM), replace(OFFLOADED, pin_memory=True))
    assert ids(found) == ["pin_memory", "host_memory", "memlock"]
    assert found.remedies[0].assignments == {"pin_memory": "false"}
    assert (found.remedies[2].command or "").splitlines()[0] == "ulimit -l unlimited"
    off = climb(died(Kind.PINNED_HOST_OOM), replace(OFFLOADED, pin_memory=False))
    assert ids(off) == ["host_memory", "memlock"]


def test_on_a_full_disk_nothing_is_deleted_and_the_saved_states_are_listed() -> None:
    sizes = [5, 4, 3, 2]
    states = tuple(KeptState(path=f"/r/x/state{n}", size_bytes=n * GIB) for n in sizes)
    host = HostFacts(disk_free_bytes=200 << 20, states=states)
    found = climb(died(Kind.DISK_FULL, phase="save"), replace(T5, save_total_limit=8), host=host)
    assert ids(found) == ["save_total_limit", "free_disk", "runs_dir"]
    fewer, room, elsewhere = found.remedies
    assert fewer.assignments == {"save_total_limit": "2"}
    assert fewer.keeps_math
    assert room.why.startswith("200 MiB are free; this run's saved states are /r/x/state5 5.0 GiB, /r/x/state4 4.0 GiB")
    assert not re.search(r"\brm\b|-delete|unlink", " ".join(remedy.command or "" for remedy in found.remedies))
    assert elsewhere.command is not None
    assert "--runs-dir /PATH/WITH/ROOM" in elsewhere.command
    two = climb(died(Kind.DISK_FULL), T5)
    assert "save_total_limit" not in ids(two)
    assert why_not(two, "fewer saved states")


def test_fewer_states_free_the_sum_of_those_that_are_deleted() -> None:
    sizes = [2, 4, 5, 3]
    states = tuple(KeptState(path=f"/r/x/state{n}", size_bytes=n * GIB) for n in sizes)
    found = climb(died(Kind.DISK_FULL), replace(T5, save_total_limit=8), host=HostFacts(states=states))
    # The newest two stay, whatever their size.
    assert ": 8.0 GiB less on disk" in found.remedies[0].why


def test_swap_is_suggested_only_for_host_memory() -> None:
    swap = named(climb(KILLED, GPU_RUN), "swap")
    assert (swap.resumable, swap.needs_consent) == ("none", True)
    assert (swap.command or "").splitlines() == [
        "sudo swapon --show",
        "sudo fallocate -l 8G /swapfile",
        "sudo chmod 600 /swapfile",
        "sudo mkswap /swapfile",
        "sudo swapon /swapfile",
    ]
    assert "never helps a GPU" in swap.why
    for kind in Kind:
        if kind not in (Kind.HOST_OOM_ALLOC, Kind.HOST_OOM_KILLED):
            assert "swap" not in ids(climb(died(kind), GPU_RUN))


def test_a_memory_limit_is_suggested_only_inside_a_cgroup() -> None:
    assert "memory_limit" not in ids(climb(KILLED, GPU_RUN))
    inside = climb(KILLED, GPU_RUN, host=HostFacts(in_cgroup=True))
    assert "docker update --memory" in (named(inside, "memory_limit").command or "")


def test_suggested_commands_are_data_and_recovery_can_start_no_program() -> None:
    from pathlib import Path

    from memtop.supervisor import recovery

    known = {one.id for one in table()}
    assert known >= {"swap", "shm", "shm_container", "memlock", "memory_limit", "address_space", "who_killed"}
    modules = list(Path(str(recovery.__path__[0])).glob("*.py"))
    assert len(modules) > 10
    for path in modules:
        assert not re.search(r"\bsubprocess\b|\bos\.|\bpsutil\b|\bsignal\b|\bPopen\b|\bsystem\(", path.read_text()), path.name
