"""Queries one value from the driver, or the reason why it is unknown.

A value that the driver cannot report is queried once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes

NOT_REPORTED = "the driver does not report it"
_NOT_TEXT = "the driver returned bytes that are not valid text"
ALL_ONES = frozenset({2**32 - 1, 2**64 - 1})
"""What the driver returns for a value that it does not know."""


class GpuGone(Exception):
    """Nothing can be read from the GPU with the present handle. `code` is NVML's error code."""

    def __init__(self, code: int) -> None:
        super().__init__(codes.words(code))
        self.code = code


class NoValue(Exception):
    """The driver returned something that is not a value. The message gives the reason."""


def call_first(names: tuple[str, ...], *arguments: Any) -> Any:
    """The result of the first of these functions that both the bindings and the driver have.

    List the newest one first.

    Raises NVMLError as the driver does, with FUNCTION_NOT_FOUND if none of the functions exists,
    and NoValue for text that cannot be decoded.
    """
    for name in names:
        call = getattr(pynvml, name, None)
        if call is None:
            continue
        try:
            return call(*arguments)
        except pynvml.NVMLError as error:
            if error.value != codes.FUNCTION_NOT_FOUND:
                raise
        except UnicodeDecodeError as error:
            raise NoValue(_NOT_TEXT) from error
    raise pynvml.NVMLError(codes.FUNCTION_NOT_FOUND)


class Query:
    """Queries values with one handle and keeps the reasons for the unknown ones.

    A value that the driver does not support is not queried again with this handle, unless the
    driver has reported it before. After any other error the next query tries again.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._reasons: dict[str, str] = {}
        self._unsupported: set[str] = set()
        self._reported: set[str] = set()
        """Fields that were known with this handle. A driver in trouble reports even these as not
        supported."""
        self._copy: dict[str, str] | None = None

    def ask(
        self,
        fields: str | tuple[str, ...],
        call: str | tuple[str, ...],
        *arguments: Any,
        convert: Callable[[Any], Any] | None = None,
    ) -> Any:
        """The value of `call` (names of functions, the best first).

        None if it is unknown; `fields` then get the reason.

        `convert` may raise NoValue. Raises GpuGone if the error means that the handle cannot be
        used any more.
        """
        fields = (fields,) if isinstance(fields, str) else fields
        if fields[0] in self._unsupported:
            return None
        names = (call,) if isinstance(call, str) else call
        try:
            value = call_first(names, self.handle, *arguments)
            if isinstance(value, int) and value in ALL_ONES:
                raise NoValue(NOT_REPORTED)
            value = value if convert is None else convert(value)
        except pynvml.NVMLError as error:
            self.failed(fields, error.value)
            return None
        except NoValue as reason:
            self.note(fields, str(reason))
            return None
        except UnicodeDecodeError:
            self.note(fields, _NOT_TEXT)
            return None
        self.reported(fields)
        return value

    def failed(self, fields: tuple[str, ...], code: int) -> None:
        """Note NVML's error as the reason for these fields.

        Raises GpuGone if the error ends the handle.
        """
        if code in codes.GPU_GONE:
            raise GpuGone(code)
        if code in codes.NEVER_AGAIN:
            self._unsupported.update(field for field in fields if field not in self._reported)
        self.note(fields, codes.words(code))

    def reported(self, fields: tuple[str, ...]) -> None:
        """The driver has reported these fields."""
        self._reported.update(fields)
        self.clear(fields)

    def is_unsupported(self, field: str) -> bool:
        """Whether the driver has said that it cannot report this field."""
        return field in self._unsupported

    def note(self, fields: tuple[str, ...], reason: str) -> None:
        """These fields are unknown for this reason."""
        for field in fields:
            if self._reasons.get(field) != reason:
                self._reasons[field] = reason
                self._copy = None

    def clear(self, fields: tuple[str, ...]) -> None:
        """These fields are not unknown any more."""
        for field in fields:
            if self._reasons.pop(field, None) is not None:
                self._copy = None

    def reasons(self) -> dict[str, str]:
        """The reason for each unknown field.

        The same object until something changes; the caller must not change it.
        """
        if self._copy is None:
            self._copy = dict(self._reasons)
        return self._copy
