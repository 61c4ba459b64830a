"""JSON into Structs, safely in threads.

msgspec learns the fields of a Struct when it first meets it. If two threads meet it at one time,
one of them can use what the other has only half built, and the process dies.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()


@overload
def decoder_of(shape: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def decoder_of(shape: Any) -> msgspec.json.Decoder[Any]: ...
def decoder_of(shape: Any) -> msgspec.json.Decoder[Any]:
    """The decoder for values of this type. One thread makes it, once."""
    found = _decoders.get(shape)
    if found is None:
        with _making:
            found = _decoders.get(shape) or _decoders.setdefault(shape, msgspec.json.Decoder(shape))
    return found
