"""Edits of a training that is running: which there are, and what the settings become by them."""

from __future__ import annotations

from typing import Any

from memtop.presets import Settings, SettingsError
from memtop.presets.assigning import assign
from memtop.presets.checking import check
from memtop.presets.fields import LIVE, differing, not_live


def edit_live(settings: Settings, values: dict[str, Any]) -> Settings:
    """The settings after the edit, checked; None among `values` leaves a setting as it is. A SettingsError says what cannot be.

    As with a restart, batch or accumulation alone leaves the other one as it is.
    """
    given = {name: _text(value) for name, value in values.items() if value is not None}
    if not given:
        raise SettingsError("change", "{}", f"names nothing; there are {', '.join(LIVE)}")
    for name, text in given.items():
        if name not in LIVE:
            raise SettingsError(name, text, f"cannot change in a running program, only {', '.join(LIVE)} can; restart with it")
    after = assign(settings, given)
    for name in not_live(settings, differing(settings, after)):
        raise SettingsError(name, _text(getattr(after, name)), f"is fixed while {settings.zero} runs; restart with it")
    return check(after)


def _text(value: Any) -> str:
    """The value as it is written after --set."""
    return str(value).lower() if isinstance(value, bool) else str(value)
