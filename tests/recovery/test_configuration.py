"""The edit and the settings that a remedy leads to, and which configurations count as tried."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.presets import SettingsError
from memtop.presets.schema import Zero
from memtop.supervisor.recovery.configuration import applied, change_for, changes_nothing, configuration_key
from memtop.supervisor.recovery.gpu_ladder import with_expandable_segments
from memtop.supervisor.recovery.remedies import remedies
from memtop.supervisor.recovery.situation import HostFacts, situation_of
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import Change
from tests.recovery.support import GIB, LORA, T5, T5_OOM, died

ROOMY = HostFacts(limit_bytes=64 * GIB, available_bytes=64 * GIB)


def remedy(**fields: object) -> Remedy:
    return Remedy(**{"id": "x", "title": "x", "keeps_math": True, "resumable": "resumes", **fields})  # type: ignore[arg-type]


def test_a_change_carries_what_a_restart_edits() -> None:
    made = change_for(remedy(assignments={"batch": "4", "accumulation": "8", "workers": "0"}), reason="gpu_oom at update 812")
    assert made == Change(assignments={"batch": "4", "accumulation": "8", "workers": "0"}, reason="gpu_oom at update 812")
    assert change_for(remedy(preset="minimal")) == Change(preset="minimal")
    assert change_for(remedy(assignments={"seq_len": "512"})) == Change(assignments={"seq_len": "512"})
    assert change_for(remedy(command="memtop strays")) == Change()
    assert changes_nothing(remedy(command="memtop strays"))


def test_a_restart_makes_the_same_settings_as_the_remedy() -> None:
    from memtop.supervisor.recovery.configuration import edited

    for one in remedies(situation_of(T5_OOM, replace(T5, eval_every=10), host=ROOMY)):
        if one.resumable == "resumes":
            assert edited(T5, change_for(one), None) == applied(T5, one)


def test_settings_that_refuse_a_remedy_raise_the_reason() -> None:
    with pytest.raises(SettingsError, match="its state cannot be sharded by ZeRO-2"):
        applied(replace(T5, optimizer="adafactor"), remedy(assignments={"zero.stage": "2"}))


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
def test_settings_that_shape_no_memory_keep_the_configuration(changes: dict[str, object]) -> None:
    assert configuration_key(replace(T5, **changes)) == configuration_key(T5)


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
def test_settings_that_shape_memory_or_disk_make_another_configuration(changes: dict[str, object]) -> None:
    assert configuration_key(replace(T5, **changes)) != configuration_key(T5)


def test_an_evaluation_without_its_own_batch_uses_trainings() -> None:
    evaluating = replace(T5, eval_every=10)
    assert configuration_key(replace(evaluating, eval_batch=16)) != configuration_key(evaluating)
    assert configuration_key(replace(T5, eval_batch=16)) == configuration_key(T5), "nothing is evaluated"


def test_a_ladder_never_leads_to_a_configuration_that_failed() -> None:
    """A run that always fails and always applies the first remedy: no configuration twice, training
    unchanged."""
    now, failed = replace(LORA, preset="deepspeed", zero=Zero(stage=2), eval_every=10, loss_chunk=0, batch=8), []
    took: list[str] = []
    for _ in range(60):
        failed.append(now)
        found = remedies(situation_of(died(), now, failed=tuple(failed), host=ROOMY))
        ready = [one for one in found if not one.needs_consent and not changes_nothing(one)]
        if not ready:
            break
        took.append(ready[0].id)
        now = applied(now, ready[0])
        assert now.effective_batch == 32
    assert len({configuration_key(one) for one in failed}) == len(failed)
    assert took[:5] == ["smaller_batch", "smaller_batch", "smaller_batch", "checkpointing", "chunked_loss"]
    assert len(took) < 20
    assert now.batch == 1


def test_an_allocator_option_is_added_to_the_users() -> None:
    assert with_expandable_segments("") == "expandable_segments:True"
    assert with_expandable_segments("a:1") == "a:1,expandable_segments:True"
    assert with_expandable_segments("a:1,expandable_segments:False") == "a:1,expandable_segments:False"
