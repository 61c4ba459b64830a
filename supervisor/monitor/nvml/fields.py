"""Values that the driver gives as numbered fields, many in one call: HBM temperature, retired pages, recovery, NVLink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.ask import ALL_ONES, NOT_TOLD, Asker, GpuGone

_MEMORY_TEMPERATURE = 82
_RETIRED_SINGLE_BIT, _RETIRED_DOUBLE_BIT = 29, 30
_LINK_COUNT, _LINK_STATE = 91, 165
_LINK_SENT, _LINK_RECEIVED = 138, 139  # data counters in KiB, without the protocol's own
RECOVERY_ACTION = 230
_ALL_LINKS = 2**32 - 1  # the scope that asks for the sum over all links

_LINK_RATES = ("nvlink_sent_bytes_per_second", "nvlink_received_bytes_per_second")
_LINK_FIELDS = ("nvlink_links", *_LINK_RATES)
_RECOVERY_WORDS = {
    0: None,
    1: "reset the GPU: end its processes, then nvidia-smi --gpu-reset",
    2: "reboot the machine",
    3: "drain: let the peer-to-peer work end, and start none",
    4: "drain and reset: let the work end, then nvidia-smi --gpu-reset",
    5: "recover the IMEX domain (the group of machines joined by NVLink)",
    6: "reset the bus that the GPU sits on",
    7: "reboot the machine",
}
_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by NVML's value type

Key = tuple[int, int]


def recovery_words(action: int) -> str | None:
    """What the driver says the card needs; None where it needs nothing."""
    return _RECOVERY_WORDS.get(action, f"recovery action {action}, which memtop does not know: see nvidia-smi -q")


_SINGLE: dict[Key, tuple[str, Callable[[Any], Any]]] = {
    (_MEMORY_TEMPERATURE, 0): ("memory_temperature_celsius", float),
    (RECOVERY_ACTION, 0): ("recovery_action", recovery_words),
}


class FieldReader:
    """Reads the fields of one handle in one call; an entry that the driver does not support is left out from then on."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._wanted: list[Key] = [*_SINGLE, (_RETIRED_SINGLE_BIT, 0), (_RETIRED_DOUBLE_BIT, 0), (_LINK_COUNT, 0)]
        self._dropped: dict[Key, str] = {}
        """Why an entry is not asked for any more."""
        self._told: set[Key] = set()
        self._links: int | None = None
        self._before: tuple[float, int, int] | None = None

    def read(self, now: float) -> dict[str, Any]:
        """Values by name of GpuDetails' field; `now` is monotonic seconds. Raises GpuGone."""
        got = self._batch()
        values: dict[str, Any] = {}
        for key, (field, convert) in _SINGLE.items():
            if key in got:
                values[field] = convert(got[key])
        retired = [got.get((number, 0)) for number in (_RETIRED_SINGLE_BIT, _RETIRED_DOUBLE_BIT)]
        if None not in retired:
            values["retired_pages"] = sum(retired)
        return values | self._nvlink(now, got)

    def _batch(self) -> dict[Key, Any]:
        if not self._wanted:
            return {}
        answers = self._asker.ask("the driver's fields", "nvmlDeviceGetFieldValues", self._wanted)
        if answers is None:
            # Not a field of ours: the reason belongs to every value that would have come this way.
            reason = self._asker.reasons()["the driver's fields"]
            self._asker.clear(("the driver's fields",))
            self._asker.note((*(_field_of(key) for key in self._wanted),), reason)
            if self._asker.never("the driver's fields"):
                self._wanted = []
            return {}
        got, left = {}, []
        self._asker.clear(tuple({_field_of(key) for key in self._wanted}))
        for key, reason in self._dropped.items():
            self._asker.note((_field_of(key),), reason)  # several entries may make one value
        for key, answer in zip(self._wanted, answers, strict=True):
            code = answer.nvmlReturn
            if code in codes.GPU_GONE:
                raise GpuGone(code)
            # A field number that this driver has not heard of is an invalid argument to it.
            code = codes.FUNCTION_NOT_FOUND if code == codes.INVALID_ARGUMENT else code
            if code in codes.NEVER_AGAIN and key not in self._told:
                self._dropped[key] = codes.words(code)
            else:
                left.append(key)
            value = None if code else _value_of(answer)
            if value is None:
                self._asker.note((_field_of(key),), codes.words(code) if code else NOT_TOLD)
            else:
                got[key] = value
        self._told.update(got)
        self._wanted = left
        return got

    def _nvlink(self, now: float, got: dict[Key, Any]) -> dict[str, Any]:
        if self._links is None:
            self._find_links(got)
        if not self._links:
            return {}
        states = [got.get((_LINK_STATE, link)) for link in range(self._links)]
        values: dict[str, Any] = self._states_one_by_one() if None in states else {"nvlink_links": sum(map(bool, states))}
        sent, received = got.get((_LINK_SENT, _ALL_LINKS)), got.get((_LINK_RECEIVED, _ALL_LINKS))
        if sent is None or received is None:
            self._before = None
            reasons = self._asker.reasons()
            # Both are told or none: the one that could be read shares the other's reason.
            self._asker.note(_LINK_RATES, next(reasons[field] for field in _LINK_RATES if field in reasons))
            return values
        before, self._before = self._before, (now, sent, received)
        if before is None or now <= before[0]:
            self._asker.note(_LINK_RATES, "the rate is known from the second look on, 5 s later")
        elif sent < before[1] or received < before[2]:
            self._asker.note(_LINK_RATES, "the driver's counters began anew")
        else:
            self._asker.clear(_LINK_RATES)
            rates = ((now_ - then) * 1024 / (now - before[0]) for now_, then in ((sent, before[1]), (received, before[2])))
            values.update(zip(_LINK_RATES, rates, strict=True))
        return values

    def _find_links(self, got: dict[Key, Any]) -> None:
        count = got.get((_LINK_COUNT, 0))
        if count is None:
            if (_LINK_COUNT, 0) not in self._wanted:
                self._links = 0
            self._asker.note(_LINK_FIELDS, self._asker.reasons()["nvlink_links"])
            return
        self._links = min(int(count), pynvml.NVML_NVLINK_MAX_LINKS)
        self._wanted.remove((_LINK_COUNT, 0))
        if not self._links:
            self._asker.note(_LINK_FIELDS, "this GPU has no NVLink")
            return
        self._wanted += [(_LINK_STATE, link) for link in range(self._links)]
        self._wanted += [(_LINK_SENT, _ALL_LINKS), (_LINK_RECEIVED, _ALL_LINKS)]
        self._asker.note(_LINK_FIELDS, "the links are read at the next look, 5 s later")

    def _states_one_by_one(self) -> dict[str, Any]:
        """How many links are up, from a driver that does not have the states as fields."""
        if any((_LINK_STATE, link) in self._wanted for link in range(self._links or 0)):
            return {}  # not asked yet, or some failed for a passing reason
        states = [self._asker.ask("nvlink_links", "nvmlDeviceGetNvLinkState", link) for link in range(self._links or 0)]
        return {} if None in states else {"nvlink_links": sum(map(bool, states))}


def _value_of(answer: Any) -> int | float | None:
    """The number that the driver gave, None where it is one that stands for "unknown"."""
    name = _TYPES[answer.valueType] if answer.valueType < len(_TYPES) else "ullVal"
    # Older bindings do not know the newest types of numbers: an unsigned one is the lowest bytes of the largest.
    value = getattr(answer.value, name, None)
    value = answer.value.ullVal & 0xFFFF if value is None else value
    return None if value in ALL_ONES else value


def _field_of(key: Key) -> str:
    """The field of GpuDetails under which an error of this entry is noted."""
    if key in _SINGLE:
        return _SINGLE[key][0]
    names = {_RETIRED_SINGLE_BIT: "retired_pages", _RETIRED_DOUBLE_BIT: "retired_pages"}
    names |= {_LINK_SENT: _LINK_RATES[0], _LINK_RECEIVED: _LINK_RATES[1]}
    return names.get(key[0], "nvlink_links")
