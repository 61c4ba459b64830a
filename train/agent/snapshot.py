"""Keeps a snapshot of torch's CUDA allocator when an allocation has failed: `memtop diagnose` reads
it.

Only then is anything done. The snapshot has the allocator's blocks; with the history that a program
may record (`torch.cuda.memory._record_memory_history`) they have source lines. Without it, the
modules are searched whose weights, gradients and optimizer states the blocks hold.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import re
import sys
import time
from typing import Any, Iterator

from . import memory

LARGEST_BYTES = 64 << 20
"""Of the file."""
SEARCH_SECONDS = 2.0
MOST_TENSORS = 100_000
MOST_BLOCKS = 500_000
LONGEST_NAME = 1000
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_WRAPPERS = re.compile(r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Names that only belong to what a model is wrapped in."""
_PARTS = (("_parameters", "weights"), ("_buffers", "buffers"))
_NO_LINE = (None, None, None)


class _TooLarge(Exception):
    pass


def path_of(folder: str, number: int) -> str:
    """Where the snapshot of this rank is kept."""
    return os.path.join(folder, "rank-%d-memory.pickle" % number)


def keep(path: str, record: dict[str, Any]) -> str | None:
    """Write the snapshot, with the failure's report. Return why it is not kept, or None.

    None, too, if this process uses no CUDA.
    """
    cuda = memory.cuda_in_use()
    if cuda is None:
        return None
    try:
        segments = _segments(cuda)
        blocks = sum(len(segment["blocks"]) for segment in segments)
        if blocks > MOST_BLOCKS:
            return "it has %d blocks" % blocks
        names = _Names(sys.modules["torch"], time.monotonic() + SEARCH_SECONDS)
        with contextlib.suppress(Exception):
            # A library's modules may raise anything when they are read. The names so far are kept.
            names.search()
        _write(path, segments, _as_json(dict(names.found(), record=record)))
    except _TooLarge:
        return "it has more than %d MiB" % (LARGEST_BYTES >> 20)
    except Exception as error:  # noqa: BLE001 - the allocator may be another one, the disk full; the program must go on
        return repr(error)[:500]
    return None


def _segments(cuda: Any) -> Any:
    try:
        # Without the history, which may be long. Older versions have no such argument.
        return cuda.memory_snapshot(include_traces=False)
    except TypeError:
        return cuda.memory_snapshot()


def _as_json(values: dict[str, Any]) -> str:
    # The name of a file may have characters that no text has.
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")


def _write(path: str, segments: Any, names: str) -> None:
    """In one piece: what stands at `path` is whole."""
    new = "%s.%d.new" % (path, os.getpid())
    try:
        with open(new, "wb") as file:
            os.chmod(new, 0o600)
            # The names come first, because the file is read in one go.
            pickle.Pickler(_Limited(file), 4).dump({"memtop": names, "segments": segments, "device_traces": []})
        os.replace(new, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(new)


class _Limited:
    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = LARGEST_BYTES

    def write(self, data: Any) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise _TooLarge
        return int(self._file.write(data))


def address_of(tensor: Any) -> int | None:
    """Where its memory begins on a GPU; None if it is elsewhere, or has none."""
    return int(tensor.untyped_storage().data_ptr()) or None if tensor.device.type == "cuda" else None


class _Names:
    """Which module's weights, gradients and optimizer states lie at which addresses."""

    def __init__(self, torch: Any, deadline: float) -> None:
        self._torch = torch
        self._deadline = deadline
        self._at: dict[int, tuple[Any, ...]] = {}
        self._of_parameter: dict[int, tuple[Any, ...]] = {}
        """Module and line of each parameter, by its id."""
        self._complete = False

    def found(self) -> dict[str, Any]:
        """As JSON; see `supervisor/diagnosis/snapshot.py`."""
        numbers: dict[tuple[Any, ...], int] = {}
        tensors = [(address, numbers.setdefault(holder, len(numbers))) for address, holder in self._at.items()]
        return {"holders": list(numbers), "tensors": tensors, "complete": self._complete}

    def search(self) -> None:
        modules, optimizers = self._objects()
        inner = {id(child) for module in modules for child in _inside(module, "_modules").values()}
        for root in modules:
            if id(root) not in inner:
                for module, name, line in self._walk(root):
                    self._take_module(module, name, line)
        for optimizer in optimizers:
            self._take_optimizer(optimizer)
        self._complete = True

    def _objects(self) -> tuple[list[Any], list[Any]]:
        """All modules and optimizers of the process. Their classes are asked, never they
        themselves: an object may run code when it is looked at."""
        wanted = (self._torch.nn.Module, self._torch.optim.Optimizer)
        kinds: dict[type, int] = {}
        found: tuple[list[Any], list[Any]] = ([], [])
        for count, one in enumerate(gc.get_objects()):
            if count % 4096 == 0:
                self._check_time()
            kind = type(one)
            which = kinds.get(kind)
            if which is None:
                bases = type.__dict__["__mro__"].__get__(kind)
                which = kinds[kind] = next((index for index, base in enumerate(wanted) if base in bases), -1)
            if which >= 0:
                found[which].append(one)
        return found

    def _walk(self, root: Any) -> Iterator[tuple[Any, str, tuple[Any, ...]]]:
        """Each module inside, with its name and the line of the nearest one that is not torch's."""
        waiting: list[tuple[Any, str, tuple[Any, ...]]] = [(root, "", _NO_LINE)]
        seen = set()
        while waiting:
            self._check_time()
            module, name, line = waiting.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            line = _line_of(module) or line
            yield module, name, line
            for child_name, child in reversed(list(_inside(module, "_modules").items())):
                waiting.append((child, "%s.%s" % (name, child_name) if name else str(child_name), line))

    def _take_module(self, module: Any, name: str, line: tuple[Any, ...]) -> None:
        shown = _NUMBER.sub("*", _WRAPPERS.sub("", name + ".").rstrip("."))[:LONGEST_NAME] or type(module).__name__
        for part, what in _PARTS:
            for tensor in _inside(module, part).values():
                if tensor is None or id(tensor) in self._of_parameter:
                    # None, or tied to another module's.
                    continue
                self._take(tensor, (shown, what, *line))
                if part == "_parameters":
                    self._of_parameter[id(tensor)] = (shown, *line)
                    self._take(_gradient(tensor), (shown, "gradients", *line))

    def _take_optimizer(self, optimizer: Any) -> None:
        for group in _inside(optimizer, "param_groups") or []:
            for parameter in group["params"]:
                # Of a mixed-precision optimizer: the model has another copy.
                module, *line = self._owner(parameter, optimizer)
                self._take(parameter, (module, "weights", *line))
                self._take(_gradient(parameter), (module, "gradients", *line))
        for parameter, state in _inside(optimizer, "state").items():
            self._check_time()
            module, *line = self._owner(parameter, optimizer)
            for value in state.values() if isinstance(state, dict) else ():
                self._take(value, (module, "optimizer state", *line))

    def _owner(self, parameter: Any, optimizer: Any) -> tuple[Any, ...]:
        return self._of_parameter.get(id(parameter)) or (type(optimizer).__name__, *_NO_LINE)

    def _take(self, tensor: Any, holder: tuple[Any, ...]) -> None:
        if not isinstance(tensor, self._torch.Tensor):
            return
        if type(tensor).__name__ == "DTensor":
            # This process holds a part of it.
            tensor = tensor._local_tensor
        address = address_of(tensor)
        if address is None or len(self._at) >= MOST_TENSORS:
            return
        before = self._at.setdefault(address, holder)
        if before[0] != holder[0] and before[1] == holder[1]:
            # One piece of memory for the tensors of several modules.
            line = before[2:] if before[2:] == holder[2:] else _NO_LINE
            self._at[address] = (_common(before[0], holder[0]), holder[1], *line)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError


def _inside(one: Any, name: str) -> Any:
    """An attribute, without the code that a class may run for it."""
    return object.__getattribute__(one, "__dict__").get(name, {})


def _line_of(module: Any) -> tuple[Any, ...] | None:
    """File, line and name of the module's own `forward`; None if it is one of torch's."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    if code is None or re.search(r"[/\\]torch[/\\](?:nn|distributed|_)", code.co_filename):
        return None
    function = getattr(type(module).forward, "__qualname__", code.co_name)
    return code.co_filename[:LONGEST_NAME], code.co_firstlineno, function[:LONGEST_NAME]


def _common(one: str, other: str) -> str:
    """What both names begin with: `model.layers.*` of two layers' parts."""
    left, right = one.split("."), other.split(".")
    same = 0
    while left[same : same + 1] == right[same : same + 1] != []:
        same += 1
    return ".".join(left[:same]) or "several modules"


def _gradient(parameter: Any) -> Any:
    # Torch warns if that of another tensor is read.
    return parameter.grad if parameter.is_leaf else None
