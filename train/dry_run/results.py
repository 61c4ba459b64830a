"""Answers operations on fake tensors as they were answered before.

FakeTensorMode, which derives what each operation gives, takes most of the time of a dry run. The
layers of a model repeat the same operations with the same sizes, so `result` asks it once for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

_CPU = torch.device("cpu")
_SEQUENCES = (tuple, list, torch.Size)
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class _Argument(NamedTuple):
    """The result is an argument, as of an operation in place."""

    number: int


class _View(NamedTuple):
    """The result is a view of an argument."""

    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _New(NamedTuple):
    """The result has memory of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Number(NamedTuple):
    """The result is no tensor."""

    value: int | float | None


class _Several(NamedTuple):
    kind: type[Any]
    parts: tuple[Any, ...]


_Known = _Argument | _View | _New | _Number | _Several
_known: dict[tuple[Any, ...], _Known] = {}


def result(func: Any, args: Any, kwargs: Any) -> Any:
    """What the operation gives in the FakeTensorMode that is entered."""
    tensors: list[FakeTensor] = []
    # Numbers and tensors together can have the default precision.
    key: list[Any] = [func, torch.get_default_dtype()]
    if not (_add(args, key, tensors) and (not kwargs or _add(kwargs.items(), key, tensors)) and tensors):
        return func(*args, **kwargs)
    asked = tuple(key)
    known = _known.get(asked)
    if known is not None:
        return _made(known, tensors)
    before = [(_looks(tensor), tensor.untyped_storage()) for tensor in tensors]
    found = func(*args, **kwargs)
    if all(
        _looks(one) == look and one.untyped_storage() is storage for one, (look, storage) in zip(tensors, before, strict=True)
    ):
        known = _described(found, tensors)
        if known is not None:
            _known[asked] = known
    return found


def _add(values: Iterable[Any], key: list[Any], tensors: list[FakeTensor]) -> bool:
    """Add to the key what decides how a result looks, and to `tensors` all tensors; False if these
    are not fake ones on the CPU, with numbers that nobody knows."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.fake_device != _CPU:
                return False
            tensors.append(value)
            key.append(_looks(value))
        elif kind in _PLAIN:
            # 1, 1.0 and True are equal keys.
            key += (kind, value)
        elif kind in _SEQUENCES:
            key += (kind, len(value))
            if not _add(value, key, tensors):
                return False
        else:
            return False
    return True


def _looks(tensor: FakeTensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.requires_grad


def _described(found: Any, tensors: list[FakeTensor]) -> _Known | None:
    """How to make this result from these tensors; None if it is not of a usual kind."""
    if type(found) in (tuple, list):
        parts = tuple(_described(part, tensors) for part in found)
        owned = [id(part.untyped_storage()) for part, how in zip(found, parts, strict=True) if isinstance(how, _New)]
        # Several parts of one new tensor are not new tensors.
        return None if None in parts or len({*owned}) < len(owned) else _Several(type(found), parts)
    if found is None or type(found) in (int, float):
        return _Number(found)
    if type(found) is not FakeTensor or found.requires_grad or found.constant is not None or found.fake_device != _CPU:
        return None
    if found.layout != torch.strided or found.is_conj() or found.is_neg():
        return None
    same = [number for number, tensor in enumerate(tensors) if tensor is found]
    if same:
        return _Argument(same[0]) if len(same) == 1 else None
    storage, offset = found.untyped_storage(), int(found.storage_offset())
    owners = [number for number, tensor in enumerate(tensors) if tensor.untyped_storage() is storage]
    if owners:
        return _View(owners[0], found.shape, found.stride(), offset, found.dtype) if len(owners) == 1 else None
    known = _New(found.shape, found.stride(), found.dtype)
    return known if offset == 0 and storage.nbytes() == _made(known, tensors).untyped_storage().nbytes() else None


def _made(known: _Known, tensors: list[FakeTensor]) -> Any:
    if isinstance(known, _New):
        with no_dispatch():
            meta = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
        return fake(meta, tensors[0].fake_mode)
    if isinstance(known, _View):
        of = tensors[known.number]
        with no_dispatch():
            meta = torch.empty(0, dtype=known.dtype, device="meta")
            meta.set_(of.untyped_storage(), known.offset, known.shape, known.stride)
        return fake(meta, of.fake_mode)
    if isinstance(known, _Argument):
        return tensors[known.number]
    if isinstance(known, _Number):
        return known.value
    return known.kind(_made(part, tensors) for part in known.parts)


_state: dict[str, Any] = {}
"""The attributes of a fake tensor of the newest mode of which nothing else is known."""


def fake(meta: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    """`FakeTensor(mode, meta, _CPU)`, of which most of the time is for attributes that are always
    the same."""
    if _state.get("fake_mode") is not mode:
        _state.clear()
        _state.update(vars(FakeTensor(mode, meta, _CPU)))
    found = torch.Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=_CPU)
    torch._C._set_throw_on_mutable_data_ptr(found)
    vars(found).update(_state)
    return found
