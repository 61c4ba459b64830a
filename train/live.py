"""Edits of a training that is running: which there are, and what the settings become by them."""

from __future__ import annotations

from typing import Any

import msgspec

from memtop.presets import Settings, SettingsError
from memtop.presets.arithmetic import nearest_splits
from memtop.presets.assigning import assign
from memtop.presets.checking import check

LIVE = ("batch", "accumulation", "eval_batch", "gradient_checkpointing", "workers")
"""Settings that can change at an update boundary."""
_FIXED_UNDER_ZERO = ("batch", "accumulation", "gradient_checkpointing")


def edit_live(settings: Settings, values: dict[str, Any]) -> Settings:
    """The settings after the edit, checked; None among `values` leaves a setting as it is. A SettingsError says what cannot be.

    With batch or accumulation alone the other one follows, so that the effective batch stays exactly what it is; only both
    together can change it.
    """
    given = {name: _text(value) for name, value in values.items() if value is not None}
    if not given:
        raise SettingsError("change", "{}", f"names nothing; there are {', '.join(LIVE)}")
    for name, text in given.items():
        if name not in LIVE:
            raise SettingsError(name, text, f"cannot change in a running program, only {', '.join(LIVE)} can; restart with it")
    after = _hold_effective_batch(settings, assign(settings, given), given)
    for name in _FIXED_UNDER_ZERO:
        if settings.zero.stage and getattr(after, name) != getattr(settings, name):
            raise SettingsError(name, _text(getattr(after, name)), f"is fixed while {settings.zero} runs; restart with it")
    return check(after)


def _hold_effective_batch(before: Settings, after: Settings, given: dict[str, str]) -> Settings:
    share = before.effective_batch // before.world_size
    for name, other in (("batch", "accumulation"), ("accumulation", "batch")):
        if name in given and other not in given:
            value = getattr(after, name)
            if value < 1 or share % value:
                near = " or ".join(f"{b} x {a}" for b, a in nearest_splits(before.effective_batch, before.world_size, value))
                why = f"does not divide the effective batch {before.effective_batch}; take {near}, or give both"
                raise SettingsError(name, value, why)
            return msgspec.structs.replace(after, **{other: share // value})
    return after


def _text(value: Any) -> str:
    """The value as it is written after --set."""
    return str(value).lower() if isinstance(value, bool) else str(value)
