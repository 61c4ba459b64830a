"""The edit and the settings that a remedy leads to, and which configurations count as tried."""

from __future__ import annotations

import shlex
from typing import Any

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memtop.presets import Settings, SettingsError, compatibility
from memtop.presets.schema import Zero
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.configuration import applied, change_for, changes_nothing, configuration_key
from memtop.supervisor.recovery.gpu_ladder import with_expandable_segments
from memtop.supervisor.recovery.remedies import remedies
from memtop.supervisor.recovery.situation import situation_of
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import Change
from tests.recovery.support import CARD, FIRST, LORA, QLORA, ROOMY, T5, T5_OOM, climb, died, gib, peak


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


SETTINGS = st.sampled_from([T5, LORA, QLORA, FIRST])


@settings(max_examples=60, deadline=None)
@given(
    base=SETTINGS,
    batch=st.integers(1, 48),
    accumulation=st.integers(1, 24),
    world=st.integers(1, 4),
    kind=st.sampled_from(list(Kind)),
    phase=st.sampled_from(["load", "forward", "backward", "optimizer", "evaluation", "save", "data", "unknown"]),
    changes=st.fixed_dictionaries(
        {
            "gradient_checkpointing": st.booleans(),
            "loss_chunk": st.sampled_from([-1, 0, 64]),
            "eval_every": st.sampled_from([0, 50]),
            "workers": st.integers(0, 4),
            "pin_memory": st.sampled_from([None, True, False]),
            "save_total_limit": st.integers(1, 4),
        }
    ),
    sizes=st.lists(st.floats(1, 30), min_size=0, max_size=3),
)
def test_every_remedy_can_be_applied_and_its_flags_are_true(
    base: Settings,
    batch: int,
    accumulation: int,
    world: int,
    kind: Kind,
    phase: str,
    changes: dict[str, Any],
    sizes: list[float],
) -> None:
    now = replace(base, batch=batch, accumulation=accumulation, world_size=world, **changes)
    diagnosis: Diagnosis = died(kind, phase=phase, total_bytes=CARD, requested_bytes=gib(1))
    peaks = tuple(peak(now, 1 + 5 * place, size) for place, size in enumerate(sizes))
    found = climb(diagnosis, now, peaks=peaks, host=ROOMY)
    assert bool(found.remedies) or kind is Kind.NOT_MEMORY
    changed_already = False
    for remedy in found.remedies:
        assert (remedy.forecast is None) == (remedy.forecast_unknown is not None)
        if remedy.assignments or remedy.preset:
            after = applied(now, remedy)
            assert configuration_key(after) != configuration_key(now)
            assert_class(now, after, remedy)
            if remedy.keeps_math:
                assert after.effective_batch == now.effective_batch
                assert (after.seq_len, after.lora, after.model) == (now.seq_len, now.lora, now.model)
            else:
                assert remedy.needs_consent
        else:
            assert remedy.command
            assert remedy.needs_consent
        changed_already = changed_already or not remedy.keeps_math
        assert remedy.keeps_math != changed_already or remedy.resumable in ("none", "new run"), "training changes last"


def assert_class(now: Settings, after: Settings, remedy: Remedy) -> None:
    assert remedy.resumable == compatibility(now, after)[0]
    assert remedy.command is not None
    assert remedy.command.startswith("memtop train" if remedy.resumable == "new run" else "memtop restart RUN")


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("now", [T5, LORA, QLORA, replace(T5, zero=Zero(stage=2), preset="deepspeed", save_total_limit=5)])
def test_memtop_accepts_the_suggested_commands(kind: Kind, now: Settings) -> None:
    from memtop.cli import app

    busy = replace(now, workers=2, eval_every=50, loss_chunk=0, pin_memory=None, data={"train": "my data/rows.parquet"})
    seen = 0
    for remedy in climb(died(kind, phase="unknown"), busy, host=ROOMY).remedies:
        words = shlex.split(remedy.command or "")
        if words[0] == "memtop":
            # click refuses unknown options and values of the wrong type.
            command = app.get_command(click.Context(app), words[1])
            assert command is not None
            command.make_context(words[1], words[2:])
            seen += 1
    assert seen or kind is Kind.NOT_MEMORY
