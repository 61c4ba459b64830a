"""Asking the driver about one GPU: one value, or the reason why there is none, and never twice what it cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes

NOT_TOLD = "the driver does not tell it"
_NO_TEXT = "the driver answered with bytes that are no text"
ALL_ONES = frozenset({2**32 - 1, 2**64 - 1})


class GpuGone(Exception):
    """Nothing of the GPU can be read with the present handle; `code` is NVML's reason."""

    def __init__(self, code: int) -> None:
        super().__init__(codes.words(code))
        self.code = code


class Untold(Exception):
    """The driver answered, but with something that is no value; the message says with what."""


def call_first(names: tuple[str, ...], *arguments: Any) -> Any:
    """What the first of these functions gives that bindings and driver have: the newest comes first.

    Raises NVMLError as the driver does, FUNCTION_NOT_FOUND where it has none of them, and Untold for a text that is none.
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
            raise Untold(_NO_TEXT) from error
    raise pynvml.NVMLError(codes.FUNCTION_NOT_FOUND)


class Asker:
    """Asks about one handle and keeps the reasons of what is unknown.

    What the driver says it does not support, or has no function for, is not asked again with this handle, unless it has told
    it before; after any other error the next ask tries anew.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._reasons: dict[str, str] = {}
        self._never: set[str] = set()
        self._told: set[str] = set()
        """What has been known with this handle: a driver in trouble says "not supported" of that, too."""
        self._copy: dict[str, str] | None = None

    def ask(
        self,
        fields: str | tuple[str, ...],
        call: str | tuple[str, ...],
        *arguments: Any,
        convert: Callable[[Any], Any] | None = None,
    ) -> Any:
        """The value of `call` (names of functions, the best first), or None with the reason noted under `fields`.

        `convert` may raise Untold. Raises GpuGone where the error means that the handle is of no use any more.
        """
        fields = (fields,) if isinstance(fields, str) else fields
        if fields[0] in self._never:
            return None
        names = (call,) if isinstance(call, str) else call
        try:
            value = call_first(names, self.handle, *arguments)
            if isinstance(value, int) and value in ALL_ONES:
                raise Untold(NOT_TOLD)
            value = value if convert is None else convert(value)
        except pynvml.NVMLError as error:
            self.failed(fields, error.value)
            return None
        except Untold as untold:
            self.note(fields, str(untold))
            return None
        except UnicodeDecodeError:
            self.note(fields, _NO_TEXT)
            return None
        self.told(fields)
        return value

    def failed(self, fields: tuple[str, ...], code: int) -> None:
        """Note NVML's error under the fields. Raises GpuGone for those that end the handle."""
        if code in codes.GPU_GONE:
            raise GpuGone(code)
        if code in codes.NEVER_AGAIN:
            self._never.update(field for field in fields if field not in self._told)
        self.note(fields, codes.words(code))

    def told(self, fields: tuple[str, ...]) -> None:
        """The driver has told these fields: they are known, and can be."""
        self._told.update(fields)
        self.clear(fields)

    def never(self, field: str) -> bool:
        """Whether the driver has said that it cannot tell this."""
        return field in self._never

    def note(self, fields: tuple[str, ...], reason: str) -> None:
        """These fields are unknown for this reason."""
        for field in fields:
            if self._reasons.get(field) != reason:
                self._reasons[field] = reason
                self._copy = None

    def clear(self, fields: tuple[str, ...]) -> None:
        """There is no reason any more why these fields should be unknown."""
        for field in fields:
            if self._reasons.pop(field, None) is not None:
                self._copy = None

    def reasons(self) -> dict[str, str]:
        """Reason by unknown field; the same object until something changes, never to be changed by the caller."""
        if self._copy is None:
            self._copy = dict(self._reasons)
        return self._copy
