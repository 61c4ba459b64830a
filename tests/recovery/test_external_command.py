"""The remedies for an external command, and for a program of which only the log is known."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memtop.supervisor.diagnosis.environment import Place
from memtop.supervisor.diagnosis.values import Kind, Logits
from memtop.supervisor.recovery.configuration import change_for, changes_nothing
from memtop.supervisor.recovery.external import (
    ExternalCommand,
    half_batch,
    remedies_for_command,
    requested_at,
)
from memtop.supervisor.wire import Change
from tests.recovery.support import GIB, T5_OOM, died, gib, ids, named


def test_fragmentation_is_fixed_first_from_the_log_alone() -> None:
    first = remedies_for_command(T5_OOM)[0]
    assert (first.id, first.keeps_math, first.resumable) == ("allocator", True, "none")
    assert first.command == (
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    assert "3.2 GiB were reserved" in first.why


@pytest.mark.parametrize(("batch", "size"), [(32, 1.23), (24, 0.92), (20, 0.77), (16, 0.62)])
def test_the_failed_request_at_a_smaller_batch(batch: int, size: float) -> None:
    found = requested_at(T5_OOM, batch)
    assert found is not None
    assert round(found / GIB, 2) == size


@pytest.mark.parametrize(("batch", "length", "size"), [(2, 2048, 2.32), (1, 2048, 1.16), (1, 1024, 0.58), (1, 512, 0.29)])
def test_the_logits_of_a_request_at_other_batches_and_lengths(batch: int, length: int, size: float) -> None:
    failed = died(
        requested_bytes=2 * length * 151936 * 4,
        requested_logits=Logits(2, length, 151936, 4),
        phase="forward",
    )
    found = requested_at(failed, batch)
    assert found is not None
    assert round(found / GIB, 2) == size


def test_the_remedies_contain_the_numbers_of_the_log() -> None:
    split = named(remedies_for_command(T5_OOM), "smaller_batch")
    assert "1.23 GiB at B 32) need 0.92 GiB at B 24, 0.77 GiB at B 20, 0.62 GiB at B 16" in split.why
    assert split.title == "batch 32 -> 16, in your program's options", "whether it can accumulate is not known"
    assert "if the program can accumulate, the effective batch can stay" in split.why
    assert "(1.2 GiB)" in named(remedies_for_command(T5_OOM), "chunked_loss").why
    unnamed = remedies_for_command(replace(T5_OOM, requested_for=None, requested_logits=None))
    assert "logits that did not fit" not in named(unnamed, "smaller_batch").why
    assert requested_at(replace(T5_OOM, requested_for=None, requested_logits=None), 8) is None


def test_order_and_consent_from_the_log_alone() -> None:
    found = remedies_for_command(replace(T5_OOM, reserved_unallocated_bytes=gib(0.1)))
    assert ids(found) == [
        *("smaller_batch", "checkpointing", "chunked_loss", "allocator", "offload_optimizer", "seq_len"),
        "smaller_model",
    ]
    assert [one.id for one in found if not one.keeps_math] == ["seq_len", "smaller_model"]
    for remedy in found:
        assert remedy.resumable == "none"
        assert remedy.forecast is None
        assert remedy.forecast_unknown
        assert changes_nothing(remedy)


def test_phases_and_other_processes() -> None:
    assert ids(remedies_for_command(died(phase="evaluation")))[0] == "eval_batch"
    assert "smaller_batch" not in ids(remedies_for_command(died(phase="load")))
    other = died(Kind.GPU_OOM_OTHER_PROCESS, other_process_bytes=gib(12), other_process_pids=(7,))
    assert remedies_for_command(other)[0].command == "memtop strays"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Kind.HOST_OOM_KILLED, ["workers", "pin_memory", "host_level", "swap"]),
        (Kind.SHM_EXHAUSTED, ["workers", "shm", "shm_container", "shm_content"]),
        (Kind.PINNED_HOST_OOM, ["pin_memory", "host_memory", "memlock"]),
        (Kind.DISK_FULL, ["free_disk", "other_disk"]),
        (Kind.NOT_MEMORY, []),
    ],
)
def test_other_kinds_of_failure(kind: Kind, expected: list[str]) -> None:
    assert ids(remedies_for_command(died(kind))) == expected


def test_activations_that_do_not_fit_into_host_memory_mean_a_smaller_batch() -> None:
    words = ("python", "t.py", "--batch_size=4", "--gradient_accumulation_steps=2")
    command = ExternalCommand(run="mine", command=words)
    refused = died(Kind.HOST_OOM_ALLOC, phase="backward", environment=(Place.PYTORCH,))
    first = remedies_for_command(refused, command)[0]
    typed = "memtop train --name NEW -- python t.py --batch_size=2 --gradient_accumulation_steps=4"
    assert (first.id, first.command, first.resumable) == ("smaller_batch", typed, "none")
    for diagnosis, other in (
        (replace(refused, phase="load"), command),
        (replace(refused, environment=()), command),
        (refused, replace(command, on_gpu=True)),
    ):
        assert "smaller_batch" not in ids(remedies_for_command(diagnosis, other))


def test_tokens_are_spoken_of_where_the_program_has_them() -> None:
    refused = died(environment=(Place.PYTORCH,))
    command = ExternalCommand(run="mine", command=("python", "t.py"))
    assert "512 tokens" not in named(remedies_for_command(refused, command), "seq_len").title
    assert "512 tokens" in named(remedies_for_command(refused, replace(command, has_tokens=True)), "seq_len").title


def test_an_unproven_kill_is_to_be_investigated() -> None:
    found = remedies_for_command(died(Kind.HOST_OOM_KILLED, confidence=0.4))
    assert ids(found) == ["who_killed"]
    assert "oom-kill" in (found[0].command or "")


def test_only_the_allocator_can_be_set_for_an_external_command() -> None:
    found = remedies_for_command(T5_OOM, ExternalCommand(run="mine", command=("python", "t.py")))
    first = found[0]
    assert (first.id, first.resumable, first.needs_consent) == ("allocator", "resumes", False)
    assert change_for(first) == Change(assignments={"allocator": "expandable_segments:True"})
    assert first.command == "memtop restart mine --set allocator=expandable_segments:True"
    assert all(changes_nothing(remedy) for remedy in found[1:])
    assert "allocator" not in ids(remedies_for_command(T5_OOM, ExternalCommand(allocator="expandable_segments:True")))
    merged = remedies_for_command(T5_OOM, ExternalCommand(run="mine", allocator="max_split_size_mb:64"))[0]
    assert merged.assignments == {"allocator": "max_split_size_mb:64,expandable_segments:True"}


@pytest.mark.parametrize(
    ("command", "halved"),
    [
        # nanoGPT, HF Trainer scripts, accelerate scripts, hydra, lightning.
        ("python train.py --batch_size=12 --gradient_accumulation_steps=5", "--batch_size=6 --gradient_accumulation_steps=10"),
        (
            "python run_clm.py --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --per_device_eval_batch_size 8",
            "--per_device_train_batch_size 4 --gradient_accumulation_steps 8 --per_device_eval_batch_size 8",
        ),
        (
            "python t.py --per-device-train-batch-size 2 --gradient-accumulation-steps 8",
            "--per-device-train-batch-size 1 --gradient-accumulation-steps 16",
        ),
        (
            "python t.py data.batch_size=4 trainer.accumulate_grad_batches=2",
            "data.batch_size=2 trainer.accumulate_grad_batches=4",
        ),
        (
            "python t.py --batch_size 9 --batch_size 4 --accumulation_steps=1",
            "--batch_size 9 --batch_size 2 --accumulation_steps=2",
        ),
    ],
)
def test_a_command_with_both_options_is_rewritten(command: str, halved: str) -> None:
    found = half_batch(command.split())
    assert found is not None
    assert shlex.join(found).endswith(halved)
    typed = named(remedies_for_command(died(), ExternalCommand(command=tuple(command.split()))), "smaller_batch")
    assert typed.command == f"memtop train --name NEW -- {shlex.join(found)}"


@pytest.mark.parametrize(
    "command",
    [
        *("python t.py", "python t.py --batch_size 8", "python t.py --batch_size=7 --gradient_accumulation_steps=2"),
        "python t.py --batch_size auto --gradient_accumulation_steps 2",
        "python t.py batch_size --gradient_accumulation_steps",
    ],
)
def test_a_command_that_cannot_be_rewritten_exactly_is_left_alone(command: str) -> None:
    assert half_batch(command.split()) is None
    assert named(remedies_for_command(died(), ExternalCommand(command=tuple(command.split()))), "smaller_batch").command is None


@pytest.mark.parametrize(
    ("command", "accumulates"),
    [
        ("python t.py --batch_size 8", False),
        ("python t.py", False),
        ("python t.py --batch_size 7 --grad_accum_steps 1", True),
        ("python run_clm.py --per_device_train_batch_size 8", True),
    ],
)
def test_twice_the_accumulation_is_only_proposed_to_a_program_that_has_the_option(command: str, accumulates: bool) -> None:
    known = ExternalCommand(command=tuple(command.split()))
    for diagnosis, start in ((died(), "half the batch"), (T5_OOM, "batch 32 -> 16")):
        found = named(remedies_for_command(diagnosis, known), "smaller_batch")
        assert found.title.startswith(start)
        assert ("twice the accumulation: the effective batch stays" in found.title) is accumulates
        assert found.keeps_math is accumulates
        assert found.speed == (0.9 if accumulates else None)
        assert ("an update then has half the samples" in found.why) is not accumulates


def test_how_fast_a_smaller_batch_is_is_not_known_if_the_command_is_not() -> None:
    assert named(remedies_for_command(died()), "smaller_batch").speed is None


@given(st.lists(st.text(max_size=30), max_size=8))
def test_any_command_is_taken(words: list[str]) -> None:
    found = half_batch(words)
    assert found is None or len(found) == len(words)
