"""Settings that ran out of memory before: presets avoid them, and a person who types them is
warned."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memtop.presets import Settings, apply_preset, load_presets
from memtop.presets.comparison import outlook, risk
from memtop.presets.schema import Zero
from memtop.supervisor.recovery.configuration import edited, failed_settings
from memtop.supervisor.run import explain
from memtop.supervisor.wire import Change, Configuration
from memtop.tui.restart_plan import restart_plan
from tests.tui.support import SETTINGS

PRESETS = load_presets()
# As in every run with a preset: another allocator could save memory.
ALLOCATOR = PRESETS["standard"].allocator
TWO = replace(SETTINGS, batch=2, accumulation=2, preset="standard", allocator=ALLOCATOR)
ONE = replace(TWO, batch=1, accumulation=4)
SAVING = replace(ONE, gradient_checkpointing=True)


def rows(*outcomes: str | None) -> tuple[Configuration, ...]:
    """The configurations of a run that died at 2 x 2 and at 1 x 4 and goes on with
    checkpointing."""
    settings = (TWO, ONE, SAVING)
    return tuple(
        Configuration(number=number, attempt=1, started=0.0, reason="start", settings=settings[number - 1], outcome=outcome)
        for number, outcome in enumerate(outcomes, start=1)
    )


DIED = rows("host_oom_alloc", "host_oom_alloc", None)


@pytest.mark.parametrize("name", ["low", "standard", "extreme", "t5-balanced"])
def test_a_preset_takes_back_nothing_that_deaths_have_taught(name: str) -> None:
    after = edited(SAVING, Change(preset=name), None, DIED)
    assert after is not None
    assert (after.batch, after.accumulation, after.gradient_checkpointing) == (1, 4, True)
    assert after.preset == name
    # The form and the table foresee the same.
    assert outlook(SAVING, PRESETS[name], failed_settings(DIED)).kept == after
    form = restart_plan(SAVING, {"batch": "1", "accumulation": "4", "seq_len": "128"}, name, failed_settings(DIED))
    assert form.after == after
    assert explain.risk_of(after, DIED) == ""


def test_where_nothing_has_died_a_preset_is_what_it_always_was() -> None:
    for outcomes in (("replaced", "stopped", None), ("disk_full", "replaced", None)):
        after = edited(SAVING, Change(preset="standard"), None, rows(*outcomes))
        assert after == apply_preset(SAVING, PRESETS["standard"])
        assert (after.batch, after.gradient_checkpointing) == (4, False)


def test_the_numbers_that_a_person_gives_with_it_are_taken_and_warned_of() -> None:
    change = Change(preset="low", assignments={"batch": "4", "accumulation": "1", "gradient_checkpointing": "false"})
    after = edited(SAVING, change, None, DIED)
    assert after is not None
    assert (after.batch, after.accumulation, after.gradient_checkpointing) == (4, 1, False)
    words = "; ! the run has died of memory with batch 1: this is more than that (4), and saves nothing more"
    assert explain.risk_of(after, DIED) == words


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, True),
        ({"batch": 2}, True),
        ({"gradient_checkpointing": True}, False),
        ({"batch": 8, "gradient_checkpointing": True}, False),
        ({"seq_len": 64}, False),
        ({"zero": Zero(stage=2, offload_optimizer=True)}, False),
        ({"workers": 2}, True),
        # Fewer read-ahead pieces may save a run with the same batch, but not one with a larger.
        ({"host_level": "low"}, False),
        ({"batch": 2, "host_level": "low"}, True),
        ({"learning_rate": 1e-5, "accumulation": 16}, True),
    ],
    ids=str,
)
def test_less_than_what_has_died_is_no_risk(changes: dict[str, Any], warned: bool) -> None:
    failed: tuple[Settings, ...] = failed_settings(rows("gpu_oom", "gpu_oom"))
    assert (risk(replace(ONE, **changes), failed) is not None) is warned
    assert risk(replace(ONE, **changes), ()) is None


def test_smaller_than_one_death_and_larger_than_another() -> None:
    assert risk(TWO, failed_settings(rows("gpu_oom", "replaced"))) is not None
    assert risk(ONE, failed_settings(rows("gpu_oom", "replaced"))) is None
    # The micro-batch had no part in these.
    assert failed_settings(rows("shm_exhausted", "gpu_oom_other_process", "disk_full")) == ()
    again = "the run has died of memory with batch 1: this is the same, and saves nothing more"
    assert risk(ONE, failed_settings(rows("gpu_oom", "gpu_oom"))) == again
