"""From a remedy to a change and to settings; what counts as tried."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.presets import SettingsError
from memtop.presets.schema import Zero
from memtop.supervisor.recovery.applying import (
    applicable,
    applied,
    change_for,
    changes_nothing,
    key,
    untried,
    with_allocator,
)
from memtop.supervisor.recovery.remedies import HostFacts, remedies
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import Change
from tests.recovery.support import GIB, LORA, S1, T5, died, ids


def remedy(**fields: object) -> Remedy:
    return Remedy(**{"id": "x", "title": "x", "keeps_math": True, "resumable": "resumes", **fields})  # type: ignore[arg-type]


def test_a_change_carries_what_a_restart_edits() -> None:
    made = change_for(remedy(assignments={"batch": "4", "accumulation": "8", "workers": "0"}), reason="gpu_oom at update 812")
    assert made == Change(assignments={"batch": "4", "accumulation": "8", "workers": "0"}, reason="gpu_oom at update 812")
    assert change_for(remedy(preset="minimal")) == Change(preset="minimal")
    assert change_for(remedy(assignments={"seq_len": "512"})) == Change(assignments={"seq_len": "512"})
    assert change_for(remedy(command="memtop strays")) == Change()
    assert changes_nothing(remedy(command="memtop strays"))


def test_the_change_and_the_settings_are_the_same_edit() -> None:
    from memtop.supervisor.run.change import edited

    for one in remedies(S1, replace(T5, eval_every=10), host=HostFacts(limit_bytes=64 * GIB, available_bytes=64 * GIB)):
        if one.resumable == "resumes":
            assert edited(T5, change_for(one), None) == applied(T5, one)


def test_a_refused_remedy_is_dropped_with_its_reason() -> None:
    odd = replace(T5, optimizer="adafactor")
    wanted = (
        remedy(title="offload", assignments={"zero.stage": "2"}),
        remedy(assignments={"batch": "16", "accumulation": "4"}),
    )
    kept, refused = applicable(wanted, odd)
    assert kept == wanted[1:]
    assert refused == (
        "offload: optimizer adafactor: its state cannot be sharded by ZeRO-2; take optimizer=adamw or zero.stage=0",
    )
    with pytest.raises(SettingsError):
        applied(odd, wanted[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulation": 9},
        {"learning_rate": 1.0},
        {"save_every": 2},
        {"preset": "low"},
        {"log_every": 3},
        {"target_samples": 5},
    ],
)
def test_what_shapes_no_memory_makes_no_other_configuration(changes: dict[str, object]) -> None:
    assert key(replace(T5, **changes)) == key(T5)


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"batch": 16},
            {"seq_len": 192},
            {"workers": 3},
            {"host_level": "low"},
            {"pin_memory": False},
            {"save_total_limit": 1},
        ),
        *(
            {"zero": Zero(stage=2)},
            {"gradient_checkpointing": True},
            {"allocator": "x:1"},
            {"world_size": 1},
            {"eval_every": 5},
        ),
    ],
)
def test_what_shapes_memory_or_disk_does(changes: dict[str, object]) -> None:
    assert key(replace(T5, **changes)) != key(T5)


def test_without_a_batch_of_its_own_the_evaluations_is_trainings() -> None:
    evaluating = replace(T5, eval_every=10)
    assert key(replace(evaluating, eval_batch=16)) != key(evaluating)
    assert key(replace(T5, eval_batch=16)) == key(T5), "nothing is evaluated"


def test_a_configuration_that_failed_is_never_tried_again() -> None:
    now = replace(T5, workers=2)
    found = remedies(S1, now)
    split = next(one for one in found if one.id == "smaller_batch")
    left = untried(found, [applied(now, split)], now)
    assert ids(left) == [one for one in ids(found) if one != "smaller_batch"]
    # Failing with it in mind, the ladder has another split at once.
    again = remedies(S1, now, failed=[applied(now, split)])
    assert "smaller_batch" in ids(untried(again, [applied(now, split)], now))
    assert untried([remedy(command="memtop strays")], [now], now), "a command to copy is nothing that was tried"
    assert untried([remedy(assignments={"zero.stage": "2"})], [], replace(now, optimizer="adafactor")) == ()


def test_always_taking_the_first_one_ends_without_a_repetition() -> None:
    """The whole descent of a run that always fails: no configuration twice, mathematics never changed by itself."""
    now, failed = replace(LORA, preset="deepspeed", zero=Zero(stage=2), eval_every=10, loss_chunk=0, batch=8), []
    host = HostFacts(limit_bytes=64 * GIB, available_bytes=64 * GIB)
    took: list[str] = []
    for _ in range(60):
        failed.append(now)
        ready = [
            one for one in remedies(died(), now, failed=failed, host=host) if not one.needs_consent and not changes_nothing(one)
        ]
        ready = list(untried(ready, failed, now))
        if not ready:
            break
        took.append(ready[0].id)
        now = applied(now, ready[0])
        assert now.effective_batch == 32
    assert len({key(one) for one in failed}) == len(failed)
    assert took[:5] == ["smaller_batch", "smaller_batch", "smaller_batch", "checkpointing", "chunked_loss"]
    assert len(took) < 20
    assert now.batch == 1


def test_one_more_option_beside_the_users_own() -> None:
    assert with_allocator("") == "expandable_segments:True"
    assert with_allocator("a:1") == "a:1,expandable_segments:True"
    assert with_allocator("a:1,expandable_segments:False") == "a:1,expandable_segments:False"
