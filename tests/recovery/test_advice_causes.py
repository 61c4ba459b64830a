"""The advice for each cause: a kill, a device that is not full, a budget of an engine."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.supervisor.diagnosis.environment import Place
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.advice import refusals
from memtop.supervisor.recovery.external import MEMORY_BUDGET, remedies_for_command
from tests.diagnosis import logs
from tests.recovery.support import GIB, T5, T5_OOM, climb, died, gib, ids, words

# --- the cause of a kill --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "command"),
    [
        ((), "dmesg"),
        ((Place.SLURM,), "sacct"),
        ((Place.PBS,), "tracejob"),
        ((Place.SGE,), "qacct"),
        ((Place.LSF,), "bhist"),
        ((Place.KUBERNETES,), "kubectl describe pod"),
        ((Place.DOCKER,), "docker inspect"),
        ((Place.WINDOWS,), None),
        ((Place.KAGGLE,), None),
    ],
)
def test_where_the_reason_of_a_kill_is_recorded(environment: tuple[Place, ...], command: str | None) -> None:
    suspected = died(Kind.HOST_OOM_KILLED, confidence=0.4, environment=environment)
    commands = [one.command for one in remedies_for_command(suspected) if one.command]
    assert (command is None and commands == []) or (command is not None and command in commands[0])


def test_a_limit_of_address_space_is_named_as_its_scheduler_does() -> None:
    limited = died(Kind.HOST_OOM_ALLOC, address_space_bytes=4 * GIB)
    for place, option in ((Place.SGE, "h_vmem=6G"), (Place.PBS, "vmem=6gb,pvmem=6gb"), (Place.SLURM, "ulimit -v unlimited")):
        said = words(remedies_for_command(replace(limited, environment=(place,))))
        assert option in said
        assert "fallocate" not in said


def test_words_about_memory_alone_are_to_be_measured_and_no_kill_is_looked_for() -> None:
    suspected = died(Kind.HOST_OOM_ALLOC, confidence=0.4, environment=())
    assert ids(remedies_for_command(suspected)) == ["watch"]


# --- a device that is not full --------------------------------------------------------------------


def full(**fields: object) -> Diagnosis:
    environment = (Place.CUDA, Place.PYTORCH)
    return died(
        **{"total_bytes": 24 * GIB, "requested_bytes": gib(2), "environment": environment, "phase": "forward", **fields}
    )


def test_a_request_larger_than_the_device_comes_first_and_half_the_batch_does_not_appear() -> None:
    found = remedies_for_command(full(requested_bytes=25 * GIB, free_bytes=23 * GIB))
    assert ids(found)[0] == "one_request"
    assert "25.00 GiB" in found[0].title
    assert "24.00 GiB" in found[0].title
    assert not {"smaller_batch", "refused", "allocator", "checkpointing"} & set(ids(found))
    assert "smaller_batch" in ids(remedies_for_command(full(requested_bytes=24 * GIB, free_bytes=GIB)))


@pytest.mark.parametrize(
    ("free_gib", "requested_gib", "fields", "first"),
    [
        # A share that the program sets itself; the batch still counts.
        (6.7, 2.0, {"allowed_bytes": gib(6.8)}, "memory_fraction"),
        (12.0, 4.0, {}, "refused"),
        (12.0, 4.0, {"environment": (Place.CUDA, Place.PYTORCH, Place.WSL)}, "refused"),
        # The allocator requests more than it prints, and memory can become free afterwards.
        (2.5, 2.0, {}, "smaller_batch"),
        (0.025, 0.02, {}, "smaller_batch"),
        (0.04, 0.001, {}, "smaller_batch"),
        (1.0, 2.0, {}, "smaller_batch"),
    ],
)
def test_free_memory_far_above_the_request_means_a_cap(
    free_gib: float, requested_gib: float, fields: dict[str, object], first: str
) -> None:
    known = {"free_bytes": gib(free_gib), "requested_bytes": gib(requested_gib), **fields}
    found = ids(remedies_for_command(full(**known)))
    assert found[0] == first
    assert ("smaller_batch" in found) is (first != "refused")


def test_the_cap_is_named() -> None:
    assert "6.80 GiB" in refusals(full(free_bytes=gib(6.7), allowed_bytes=gib(6.8)))[0].title
    room = {"free_bytes": gib(12)}
    for place, name in ((Place.WSL, ".wslconfig"), (Place.WINDOWS, "paging file"), (Place.XPU, "4 GiB")):
        (only,) = refusals(full(environment=(place,), **room))
        assert name in only.title
    for device, tool in ((Place.CUDA, "nvidia-smi"), (Place.ROCM, "rocm-smi"), (Place.NPU, "npu-smi"), (Place.TPU, None)):
        (unknown,) = refusals(full(environment=(device,), **room))
        assert "a smaller batch does not help" in unknown.why
        assert (unknown.command or "").partition(" ")[0] == (tool or "")


def test_the_built_in_trainer_names_the_cap_and_restarts_as_before() -> None:
    before = climb(replace(T5_OOM, free_bytes=gib(0.5)), T5)
    capped = climb(replace(T5_OOM, allowed_bytes=gib(19), free_bytes=gib(1.3)), T5)
    assert ids(capped)[0] == "memory_fraction"
    applied = [one.id for one in capped.remedies if not one.needs_consent]
    assert applied == [one.id for one in before.remedies if not one.needs_consent]


# --- budgets of engines ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "offered", "absent"),
    [
        ((Place.CUDA, Place.VLLM), ("--gpu-memory-utilization", "--max-model-len"), ("half the batch", "device_map")),
        ((Place.CUDA, Place.SGLANG), ("--mem-fraction-static", "--context-length"), ("half the batch", "vLLM")),
        ((Place.CUDA, Place.PYTORCH), ("load_in_4bit", "max_memory"), ("half the batch", "vLLM", "ALLOC_CONF")),
    ],
)
def test_a_refused_budget(environment: tuple[Place, ...], offered: tuple[str, ...], absent: tuple[str, ...]) -> None:
    said = words(remedies_for_command(died(reason=MEMORY_BUDGET, phase="load", environment=environment)))
    assert [part for part in offered if part not in said] == []
    assert [part for part in absent if part in said] == []


TAKEN = (
    "ValueError: Free memory on device (13.20/23.68 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 21.31 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
CACHE = (
    "ValueError: To serve at least one request with the models's max seq len (116160), (4.43 GiB KV cache is needed, which "
    "is larger than the available KV cache memory (3.48 GiB)."
)
BLOCKS = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing."
STATIC = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
DISPATCHED = (
    "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the quantized "
    'model.\n  File "/venv/site-packages/transformers/quantizers/quantizer_bnb_4bit.py", line 9, in validate_environment'
)


@pytest.mark.parametrize(
    ("text", "first", "command"),
    [
        (TAKEN, "strays", "--gpu-memory-utilization 0.55"),
        (CACHE, "gpu_memory_utilization", "--max-model-len"),
        (BLOCKS, "gpu_memory_utilization", "--gpu-memory-utilization 0.95"),
        (STATIC, "mem_fraction_static", "--mem-fraction-static 0.9"),
        (DISPATCHED, "quantised", "load_in_4bit"),
    ],
)
def test_the_words_of_a_refused_budget(text: str, first: str, command: str) -> None:
    found = remedies_for_command(logs.of(text))
    assert ids(found)[0] == first
    assert command in words(found)
    assert not {"smaller_batch", "allocator"} & set(ids(found))
