"""What holds a GPU's memory, from a snapshot of torch's allocator.

It reads what `torch.cuda.memory._dump_snapshot` of torch 2.6 to 2.13 writes, and the file that
memtop's agent keeps when an allocation fails. The agent's file has one key more, `memtop`, at its
beginning: JSON with the failure, and with the modules whose weights, gradients and optimizer states
lie at which addresses. The file is read in bounded memory, whatever is in it (`pickled.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from memtop.presets.decoding import decoder_of
from memtop.supervisor.diagnosis.diagnose import diagnose
from memtop.supervisor.diagnosis.environment import Place
from memtop.supervisor.diagnosis.pickled import BEGINNINGS, FORGOTTEN, Items, Refused, read
from memtop.supervisor.diagnosis.stack_line import Frame, Line, frame_of, line_of
from memtop.supervisor.diagnosis.values import PROVEN, Diagnosis, Evidence, Kind, OomRecord, size, summary

SHOWN = 5
"""The largest holders that a diagnosis names."""
_MOST_HOLDERS, _MOST_FRAMES, _MOST_DEVICES = 1 << 16, 1024, 1024
_LARGEST = 1 << 53

Word = Annotated[str, Meta(max_length=1000)]
Count = Annotated[int, Meta(ge=0, le=_LARGEST)]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one layer, or one line of the source, holds."""

    held_bytes: int
    blocks: int
    """Of the allocator."""
    module: str | None = None
    """Its path in the model, as far as the agent knew it. Layers that only differ by a number are
    one holder: `model.layers.*.mlp.down_proj`."""
    what: str | None = None
    """weights | gradients | optimizer state | buffers | activations and temporary memory; None if
    only the line is known."""
    source: str | None = None
    """The file of the line; None if there is none."""
    line: int | None = None
    function: str | None = None
    phase: str = "unknown"
    """When it was allocated, if the line shows that: load | forward | backward | optimizer."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The allocator's memory of one device. The holders, the others and what is unknown are
    together exactly what is allocated."""

    device_index: int
    allocated_bytes: int
    """In blocks that tensors use."""
    reserved_bytes: int
    inactive_bytes: int
    """Reserved, and free for the next allocation that fits into a block."""
    awaiting_free_bytes: int
    """Freed by the program, and still used by another stream."""
    largest_free_block_bytes: int
    holders: tuple[Holder, ...]
    """The largest ones, by size."""
    other_holders: int
    other_holders_bytes: int
    unknown_bytes: int
    """Of blocks without a recorded line or a module."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    devices: tuple[DeviceMemory, ...]
    """Those with memory. The one on which an allocation failed is the first; then by what is
    allocated."""
    unknown_reason: str | None = None
    """Why memory is unknown, and how a next snapshot says more."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent writes into a snapshot that it keeps (`train/agent/snapshot.py`)."""

    record: OomRecord | None = None
    holders: Annotated[tuple[tuple[Word, Word, Word | None, Count | None, Word | None], ...], Meta(max_length=200_000)] = ()
    """Module, what of it, and file, line and name of the function that computes it."""
    tensors: Annotated[tuple[tuple[int, Count], ...], Meta(max_length=200_000)] = ()
    """Address of the memory, and the holder's place in `holders`."""
    complete: bool = False
    """Whether all modules and optimizers were read in the time for it."""


class _Named(NamedTuple):
    module: str | None
    what: str
    file: str | None = None
    line: int | None = None
    function: str | None = None


class _Failed(NamedTuple):
    """An allocation that failed, from the trace of a device."""

    requested_bytes: int
    free_bytes: int | None
    line: Line | None


_UNKNOWN = _Named(None, "unknown")
_REST = _Named(None, "activations and temporary memory")
_OTHERS = _Named(None, "others")


class _Block(NamedTuple):
    state: str
    size: int
    holder: Line | _Named


class _Blocks:
    """The sum of several blocks."""

    def __init__(self) -> None:
        self.held: Counter[Line | _Named] = Counter()
        self.counts: Counter[Line | _Named] = Counter()
        self.inactive = self.awaiting = self.largest_free = self.reserved = 0

    def add(self, block: _Block) -> None:
        if block.state == "active_allocated":
            self._hold(block.holder, block.size, 1)
        elif block.state == "inactive":
            self.inactive += block.size
            self.largest_free = max(self.largest_free, block.size)
        else:
            # active_pending_free, or active_awaiting_free as torch's documentation calls it.
            self.awaiting += block.size

    def take(self, others: _Blocks, reserved: int) -> None:
        for holder, held in others.held.items():
            self._hold(holder, held, others.counts[holder])
        self.inactive += others.inactive
        self.awaiting += others.awaiting
        self.largest_free = max(self.largest_free, others.largest_free)
        self.reserved += reserved

    def _hold(self, holder: Line | _Named, held: int, blocks: int) -> None:
        if holder not in self.held and len(self.held) >= _MOST_HOLDERS:
            holder = _OTHERS
        self.held[holder] += held
        self.counts[holder] += blocks

    def memory(self, index: int) -> DeviceMemory:
        held, unknown, more = self.held.copy(), self.held[_UNKNOWN], self.held[_OTHERS]
        del held[_UNKNOWN], held[_OTHERS]
        ranked = sorted(held, key=lambda holder: (-held[holder], tuple(map(str, holder))))
        return DeviceMemory(
            device_index=index,
            allocated_bytes=self.held.total(),
            reserved_bytes=self.reserved,
            inactive_bytes=self.inactive,
            awaiting_free_bytes=self.awaiting,
            largest_free_block_bytes=self.largest_free,
            holders=tuple(_holder(one, held[one], self.counts[one]) for one in ranked[:SHOWN]),
            other_holders=len(ranked[SHOWN:]) + self.counts[_OTHERS],
            other_holders_bytes=sum(held[one] for one in ranked[SHOWN:]) + more,
            unknown_bytes=unknown,
        )


def _holder(found: Line | _Named, held: int, blocks: int) -> Holder:
    holder = Holder(held_bytes=held, blocks=blocks, source=found.file, line=found.line, function=found.function)
    if isinstance(found, Line):
        return msgspec.structs.replace(holder, phase=found.phase)
    return msgspec.structs.replace(holder, module=found.module, what=found.what)


class _Trace(NamedTuple):
    """The history of one device: its newest failure."""

    failed: _Failed | None


class _List(Items):
    """A list of frames, blocks, trace entries or traces; of others nothing is kept."""

    __slots__ = ("blocks", "failed", "frames", "traces")

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self.blocks: _Blocks | None = None
        self.failed: _Failed | None = None
        self.traces: list[_Failed | None] = []

    def add(self, item: object) -> None:
        kind = type(item)
        if kind is Frame:
            if len(self.frames) < _MOST_FRAMES:
                self.frames.append(item)  # type: ignore[arg-type]
        elif kind is _Block:
            self.blocks = self.blocks or _Blocks()
            self.blocks.add(item)  # type: ignore[arg-type]
        elif kind is _Failed:
            self.failed = item  # type: ignore[assignment]
        elif kind is _Trace and len(self.traces) < _MOST_DEVICES:
            self.traces.append(item.failed)  # type: ignore[attr-defined]

    def extend(self, items: list[object]) -> None:
        if {type(item) for item in items} == {Frame}:
            self.frames += items[: _MOST_FRAMES - len(self.frames)]  # type: ignore[arg-type]
        else:
            super().extend(items)

    def result(self) -> object:
        if self.frames:
            return line_of(self.frames) or FORGOTTEN
        if self.blocks is not None:
            return self.blocks
        # A trace without a failure counts as well: its position is the device.
        return self.traces or _Trace(self.failed)


class _Visitor:
    """Adds up the blocks of a snapshot while it is read."""

    KEPT: tuple[type, ...] = (Frame, Line)
    LISTS: type[Items] = _List
    KEY = "memtop"

    def __init__(self) -> None:
        self.devices: dict[int, _Blocks] = {}
        self.failed: dict[int, _Failed] = {}
        self.kept: Kept | None = None
        self._names: dict[int, _Named] = {}
        self._unnamed = _UNKNOWN

    def text(self, text: str) -> None:
        if self.kept is None:
            try:
                self.kept = decoder_of(Kept).decode(text)
            except msgspec.DecodeError as error:
                raise Refused(f"is damaged: what memtop has written into it cannot be read: {error}") from None
            holders = [_Named(*holder) for holder in self.kept.holders]
            self._names = {address: holders[number] for address, number in self.kept.tensors if number < len(holders)}
            if self.kept.complete:
                self._unnamed = _REST

    def dictionary(self, found: dict[str, Any]) -> object:
        # The keys say what it is. Frames are the most frequent, by far.
        if "filename" in found:
            file, line, function = found["filename"], found.get("line"), found.get("name")
            if type(file) is str and type(function) is str:
                return frame_of(file, line if type(line) is int else 0, function)
        elif "action" in found:
            if found["action"] == "oom":
                line = found.get("frames")
                free = found.get("device_free")
                known = free if type(free) is int and 0 <= free <= _LARGEST else None
                return _Failed(_bytes(found, "size"), known, line if isinstance(line, Line) else None)
        elif "state" in found:
            return self._block(found)
        elif "blocks" in found:
            self._segment(found)
        elif "device_traces" in found:
            self._take_traces(found["device_traces"])
        return FORGOTTEN

    def _block(self, found: dict[str, Any]) -> _Block:
        line = found.get("frames")
        address = found.get("address")
        named = self._names.get(address) if type(address) is int else None
        return _Block(str(found["state"]), _bytes(found, "size"), named or (line if isinstance(line, Line) else self._unnamed))

    def _segment(self, found: dict[str, Any]) -> None:
        index, blocks = found.get("device", 0), found["blocks"]
        if type(index) is not int or not 0 <= index < _MOST_DEVICES:
            raise Refused("is damaged: a segment is on no device")
        totals = self.devices.setdefault(index, _Blocks())
        totals.take(blocks if isinstance(blocks, _Blocks) else _Blocks(), _bytes(found, "total_size"))

    def _take_traces(self, traces: object) -> None:
        if isinstance(traces, list):
            self.failed = {index: failed for index, failed in enumerate(traces) if failed is not None}


def _bytes(found: dict[str, Any], key: str) -> int:
    value = found.get(key)
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise Refused(f"is damaged: a {key} in it is no number of bytes")
    return value


def is_snapshot(beginning: bytes) -> bool:
    """Whether a file that begins with these bytes is a pickle, and so no log."""
    return beginning.startswith(BEGINNINGS)


def read_snapshot(chunks: Iterable[bytes]) -> tuple[Snapshot, Diagnosis]:
    """What holds the memory, and what failed. Refused if it is no snapshot; its text follows the
    file's name."""
    visitor = _Visitor()
    read(chunks, visitor)
    if not visitor.devices:
        raise Refused("is a pickle, but no snapshot of CUDA memory: it has no segments")
    failed = dict(visitor.failed)
    found = sorted(
        (blocks.memory(index) for index, blocks in visitor.devices.items()),
        key=lambda memory: (memory.device_index not in failed, -memory.allocated_bytes, memory.device_index),
    )
    record = None if visitor.kept is None else visitor.kept.record
    diagnosis = _diagnosis(found[0], failed) if record is None else _diagnosis_of_record(record, found)
    if record is not None:
        found.sort(key=lambda memory: memory.device_index != diagnosis.device_index)
    return Snapshot(devices=tuple(found), unknown_reason=_why_unknown(visitor)), diagnosis


def _diagnosis_of_record(record: OomRecord, found: list[DeviceMemory]) -> Diagnosis:
    # Whether the program could do without the thread that failed does not matter here.
    diagnosis = diagnose((), Evidence(records=(msgspec.structs.replace(record, survived=False),)))
    memory = next((memory for memory in found if memory.device_index == diagnosis.device_index), found[0])
    return msgspec.structs.replace(
        diagnosis,
        device_index=memory.device_index,
        allocated_bytes=memory.allocated_bytes,
        reserved_unallocated_bytes=memory.reserved_bytes - memory.allocated_bytes,
        environment=(Place.CUDA, Place.PYTORCH),
    )


def _diagnosis(memory: DeviceMemory, failures: dict[int, _Failed]) -> Diagnosis:
    failed = failures.get(memory.device_index)
    spare = memory.reserved_bytes - memory.allocated_bytes
    found = Diagnosis(
        kind=Kind.NOT_MEMORY,
        reason="no_evidence",
        confidence=0.1,
        summary="The snapshot has no failed allocation: it shows what holds the memory, not why the program ended.",
        device_index=memory.device_index,
        allocated_bytes=memory.allocated_bytes,
        reserved_unallocated_bytes=spare,
        source="snapshot",
        environment=(Place.CUDA, Place.PYTORCH),
    )
    if failed is None:
        return found
    line = failed.line
    found = msgspec.structs.replace(
        found,
        kind=Kind.GPU_OOM_FRAGMENTED if spare >= failed.requested_bytes else Kind.GPU_OOM,
        reason=None,
        confidence=PROVEN,
        phase="unknown" if line is None else line.phase,
        requested_bytes=failed.requested_bytes,
        free_bytes=failed.free_bytes,
        evidence=(_request(failed),),
    )
    return msgspec.structs.replace(found, summary=summary(found))


def _request(failed: _Failed) -> str:
    line = failed.line
    if line is None or line.file is None:
        return f"an allocation of {size(failed.requested_bytes)} failed"
    return f"an allocation of {size(failed.requested_bytes)} failed at {line.file}:{line.line} {line.function}"


def _why_unknown(visitor: _Visitor) -> str | None:
    holders = {holder for blocks in visitor.devices.values() for holder in blocks.held}
    if holders.isdisjoint((_UNKNOWN, _REST)):
        return None
    if any(isinstance(holder, Line) for holder in holders):
        return "Memory without a source line was allocated before the program recorded its history, or outside Python."
    return (
        "The program recorded no history, so the snapshot has no source lines of activations. To get them, call "
        "torch.cuda.memory._record_memory_history(max_entries=100000) at its beginning; this costs some time."
    )
