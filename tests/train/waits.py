"""A stand-in for a GPU that counts how often the program waits for it.

Its tensors say that they are on torch's device "meta", which moves no data by itself, and hold
their numbers on the CPU. Only what a GPU does in its queue works without a wait.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CARD = torch.device("meta")
# Operations whose result has a size, or is a number, that the program must know.
_READING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "repeat_interleave")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
_COPYING = ("copy_", "_to_copy")


class OnCard(torch.Tensor):
    """A tensor on the card."""

    held: torch.Tensor
    """Its numbers."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnCard:
        made: OnCard = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=CARD
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} is used outside of the block that counts")


class Waits(TorchDispatchMode):
    """Inside the block, the device `CARD` works, and `found` names each wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_card = [leaf for leaf in given if isinstance(leaf, OnCard)]
        asked = kwargs.get("device")
        target = OnCard if (on_card if asked is None else torch.device(asked) == CARD) else torch.Tensor
        name = function.overloadpacket.__name__
        if on_card or target is OnCard:
            self._count(name, args, kwargs, given, target is OnCard)
        found = function(*tree_map(_held, args), **tree_map(_held, kwargs))
        same = {id(tensor.held): tensor for tensor in on_card}

        def placed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            known = same.get(id(value))
            if known is not None:
                return known
            return OnCard(value) if target is OnCard else value

        return tree_map(placed, found)

    def _count(self, name: str, args: Any, kwargs: Any, given: list[Any], stays: bool) -> None:
        """Note a wait. AssertionError for what a GPU refuses."""
        if name in _COPYING:
            source = args[1] if name == "copy_" else args[0]
            to_card = isinstance(args[0], OnCard) if name == "copy_" else stays
            blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            from_card = isinstance(source, OnCard)
            if from_card is not to_card and (from_card or (blocking and source.ndim)):
                self.found.append(f"{name} {'from' if from_card else 'to'} the card")
            return
        elsewhere = [tensor for tensor in given if tensor.ndim and not isinstance(tensor, OnCard)]
        assert not elsewhere, f"{name}: tensors on the card and on the CPU"
        masks = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, torch.Tensor)] if name in _INDEXING else []
        if name in _READING or any(mask.dtype == torch.bool for mask in masks):
            self.found.append(name)


def _held(value: Any) -> Any:
    if isinstance(value, OnCard):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) else value


class CardAccelerator(Accelerator):
    """An Accelerator whose device is the card. It moves no model by itself."""

    def __init__(self) -> None:
        super().__init__(cpu=True, device_placement=False)

    @property
    def device(self) -> torch.device:
        return CARD
