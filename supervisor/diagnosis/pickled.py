"""Reads a pickle of plain values, opcode by opcode, without building what is in it.

A `Visitor` gets each dictionary when it is complete and keeps of it what it needs; the rest is
forgotten, so that memory stays bounded however long the file is. Nothing that the file names is
imported or called: an opcode that would do so is refused, as is every one that dictionaries, lists,
tuples, texts and numbers do not need.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from typing import Any, Protocol

BEGINNINGS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""Of a pickle that a program of today writes. No text begins like this."""

_CALLS = {
    "c": "GLOBAL",
    "i": "INST",
    "o": "OBJ",
    "R": "REDUCE",
    "b": "BUILD",
    "P": "PERSID",
    "Q": "BINPERSID",
    "\x81": "NEWOBJ",
    "\x82": "EXT1",
    "\x83": "EXT2",
    "\x84": "EXT4",
    "\x92": "NEWOBJ_EX",
    "\x93": "STACK_GLOBAL",
}
"""They import a name, call it, or change an object of a class."""
_MOST_STACK, _MOST_OPEN, _MOST_MARKS, _MOST_MEMO = 4 << 20, 100_000, 100, 64 << 20
_MOST_TEXTS, _MOST_CHARACTERS, _LONGEST_KEPT, _LONGEST = 1 << 20, 32 << 20, 4096, 32 << 20
_MOST_RUN_BYTES = 16 << 20
_CUT = "ends in the middle: it was not written to its end"
_ROOM = 300
"""The longest opcode with its argument, but for long texts."""
_WIDTHS = {0x6A: 5, 0x68: 2}
"""Of LONG_BINGET and BINGET, with the number of a value."""
_UINT32, _INT32, _UINT64 = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<Q")
_LONG_BINGET = struct.Struct("<xI")


class Refused(ValueError):
    """The file is damaged, or is no pickle of plain values. The text follows the file's name."""


class _Forgotten:
    """Stands for a value that is not kept."""


FORGOTTEN = _Forgotten()


class Items:
    """A list that is being read. Visitors derive from it."""

    __slots__ = ("is_new", "known", "slot")

    def __init__(self) -> None:
        self.slot = -1
        """Where the memo refers to it; -1: nowhere."""
        self.is_new = True
        self.known: object = None
        """Its result, if a list of the same items was read before."""

    def add(self, item: object) -> None:
        """The next item."""

    def extend(self, items: list[object]) -> None:
        """The next items, which were all read before."""
        for item in items:
            self.add(item)

    def result(self) -> object:
        """What is kept of the list."""
        return FORGOTTEN


class _Dict:
    __slots__ = ("slot",)

    def __init__(self) -> None:
        self.slot = -1


class Visitor(Protocol):
    KEPT: tuple[type, ...]
    """The types of results that later opcodes may refer to. Their values are hashable and small."""

    LISTS: type[Items]
    """Reads a list."""
    KEY: str
    """A text that follows this one is for `text`."""

    def dictionary(self, found: dict[str, Any]) -> object:
        """What is kept of a dictionary. Values that were not kept are FORGOTTEN."""

    def text(self, text: str) -> None:
        """The text that follows KEY."""


class _Memo:
    """The values that later opcodes refer to by number: equal ones are stored once."""

    def __init__(self) -> None:
        self.numbers = array("I")
        self.values: list[object] = [FORGOTTEN]
        self._known: dict[object, int] = {}
        self._characters = 0

    def number_of(self, value: Any) -> int:
        """The place of the value in `values`; 0 if there are too many."""
        number = self._known.get(value)
        if number is None:
            size = len(value) if type(value) is str else 100
            if len(self.values) > _MOST_TEXTS or size > _LONGEST_KEPT or self._characters + size > _MOST_CHARACTERS:
                return 0
            self._characters += size
            number = self._known[value] = len(self.values)
            self.values.append(value)
        return number

    def put(self, index: int, top: Any) -> None:
        """The opcodes of protocol 2 and 3 name the number, which is always the next one."""
        if index > len(self.numbers):
            raise Refused("is damaged: it numbers its values with gaps")
        number = 0
        if type(top) is str:
            number = self.number_of(top)
        elif isinstance(top, (Items, _Dict)):
            top.slot = index
        if index == len(self.numbers):
            self.numbers.append(number)
        else:
            self.numbers[index] = number


def read(chunks: Iterable[bytes], visitor: Visitor) -> None:
    """Read one pickle. Refused if it is damaged or has anything but plain values."""
    try:
        _Reader(chunks, visitor).read()
    except (IndexError, ValueError, struct.error) as error:
        if isinstance(error, Refused):
            raise
        # More was taken from the stack or the memo than was put there, or a text is none.
        raise Refused("is damaged: what it describes does not fit together") from None


def _leading(data: bytes, position: int) -> int:
    """How many opcodes like the one at `position` follow each other, at most 1024."""
    code = data[position : position + 1]
    width = _WIDTHS[code[0]]
    codes = data[position : position + 1024 * width : width]
    return len(codes) - len(codes.lstrip(code))


class _Reader:
    def __init__(self, chunks: Iterable[bytes], visitor: Visitor) -> None:
        self._source = iter(chunks)
        self._visitor = visitor
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo = _Memo()
        self._containers = frozenset({visitor.LISTS, _Dict})
        self._open = 0
        self._runs: dict[bytes, object] = {}
        """Results of lists that only refer to earlier values, by the opcodes of their items."""
        self._run_bytes = 0
        self._data = b""
        self._end: int | None = None
        """Where the file ends in `_data`."""

    def read(self) -> None:
        stack, marks, memo, numbers, values = self._stack, self._marks, self._memo, self._memo.numbers, self._memo.values
        uint32, lists = _UINT32.unpack_from, self._visitor.LISTS
        data, position, safe = b"", 0, 0
        while True:
            if position >= safe:
                position, safe = self._refill(position)
                data = self._data
            code = data[position]
            position += 1
            if code == 0x6A:  # LONG_BINGET
                stack.append(values[numbers[uint32(data, position)[0]]])
                position += 4
            elif code == 0x68:  # BINGET
                stack.append(values[numbers[data[position]]])
                position += 1
            elif code == 0x94:  # MEMOIZE
                top = stack[-1]
                kind = type(top)
                if kind is str:
                    numbers.append(memo.number_of(top))
                else:
                    if kind is lists or kind is _Dict:
                        top.slot = len(numbers)
                    numbers.append(0)
            elif code == 0x8A:  # LONG1
                length = data[position]
                if length > 16:
                    raise Refused(f"has a number of {length} bytes, which no snapshot has")
                position += 1 + length
                stack.append(int.from_bytes(data[position - length : position], "little", signed=True))
            elif code == 0x4A:  # BININT
                stack.append(_INT32.unpack_from(data, position)[0])
                position += 4
            elif code == 0x4B:  # BININT1
                stack.append(data[position])
                position += 1
            elif code == 0x4D:  # BININT2
                stack.append(data[position] | data[position + 1] << 8)
                position += 2
            elif code == 0x28:  # MARK
                marks.append(len(stack))
                if len(marks) > _MOST_MARKS:
                    raise Refused("is nested deeper than any snapshot")
                if data[position] in b"jh":
                    position = self._references(position)
            elif code == 0x75:  # SETITEMS
                self._set_items(marks.pop())
            elif code == 0x65:  # APPENDS
                self._append(marks.pop())
            elif code in (0x7D, 0x5D):  # EMPTY_DICT, EMPTY_LIST
                self._open += 1
                if self._open > _MOST_OPEN:
                    raise Refused("is nested deeper than any snapshot")
                stack.append(_Dict() if code == 0x7D else lists())
            elif code == 0x8C:  # SHORT_BINUNICODE
                length = data[position]
                position += 1 + length
                self._push_text(data[position - length : position])
            elif code == 0x86:  # TUPLE2
                self._drop(len(stack) - 2)
            elif code == 0x2E:  # STOP
                return
            else:
                position = self._rare(code, position)
                if self._data is not data:
                    # A long text was read. The next round reads on.
                    data, safe = self._data, position

    def _rare(self, code: int, position: int) -> int:
        """Carry out an opcode that is not in the list above; return the position after it."""
        stack, data = self._stack, self._data
        if code in (0x58, 0x8D):  # BINUNICODE, BINUNICODE8
            kind = _UINT32 if code == 0x58 else _UINT64
            (length,) = kind.unpack_from(data, position)
            return self._long_text(position + kind.size, length)
        if code == 0x95:  # FRAME
            return position + 8
        if code == 0x80:  # PROTO
            if not 2 <= data[position] <= 5:
                raise Refused(f"is a pickle of protocol {data[position]}; torch writes protocols 2 to 5")
            return position + 1
        if code in (0x4E, 0x88, 0x89):  # NONE, NEWTRUE, NEWFALSE
            stack.append({0x4E: None, 0x88: True, 0x89: False}[code])
            return position
        if code == 0x47:  # BINFLOAT
            stack.append(FORGOTTEN)
            return position + 8
        if code == 0x71:  # BINPUT
            self._memo.put(data[position], stack[-1])
            return position + 1
        if code == 0x72:  # LONG_BINPUT
            self._memo.put(_UINT32.unpack_from(data, position)[0], stack[-1])
            return position + 4
        if code in (0x29, 0x85, 0x87):  # EMPTY_TUPLE, TUPLE1, TUPLE3
            self._drop(len(stack) - {0x29: 0, 0x85: 1, 0x87: 3}[code])
        elif code == 0x74:  # TUPLE
            self._drop(self._marks.pop())
        elif code == 0x61:  # APPEND
            self._append(len(stack) - 1)
        elif code == 0x73:  # SETITEM
            self._set_items(len(stack) - 2)
        elif chr(code) in _CALLS:
            raise Refused(f"is a pickle that would run code when it is loaded ({_CALLS[chr(code)]}); memtop does not load it")
        else:
            raise Refused(f"is no memory snapshot: it has the opcode 0x{code:02x}, which no snapshot has")
        return position

    def _refill(self, position: int) -> tuple[int, int]:
        """Read on; the new position, and the one up to which every opcode is whole in `_data`."""
        if self._end is not None:
            if position >= self._end:
                raise Refused(_CUT)
            self._end -= position
        if len(self._stack) > _MOST_STACK or len(self._memo.numbers) > _MOST_MEMO:
            raise Refused("has more values than any snapshot")
        data = self._data[position:]
        while len(data) <= _ROOM and self._end is None:
            more = next(self._source, b"")
            data += more
            if not more:
                # Whatever is read beyond the end is found there.
                self._end = len(data)
                data += bytes(_ROOM)
        self._data = data
        return 0, len(data) - _ROOM if self._end is None else self._end

    def _references(self, position: int) -> int:
        """Read a list of earlier values, such as the frames of a stack, at once; the new
        position."""
        target, data = self._stack[-1] if self._stack else None, self._data
        if not isinstance(target, Items) or not target.is_new:
            return position
        end = position
        while end < len(data) and data[end] in b"jh":
            end += _leading(data, end) * _WIDTHS[data[end]]
        if end >= len(data) or data[end] != 0x65:
            return position
        run = data[position:end]
        known = self._runs.get(run)
        if known is None:
            target.extend(self._referred(run))
            known = target.result()
            if isinstance(known, self._visitor.KEPT):
                self._run_bytes += len(run)
                if self._run_bytes > _MOST_RUN_BYTES:
                    self._runs.clear()
                    self._run_bytes = len(run)
                self._runs[run] = known
        else:
            target.known = known
        target.is_new = False
        self._marks.pop()
        return end + 1

    def _referred(self, run: bytes) -> list[object]:
        numbers, values = self._memo.numbers, self._memo.values
        found: list[object] = []
        position = 0
        while position < len(run):
            code = run[position]
            end = position + _leading(run, position) * _WIDTHS[code]
            part = run[position:end]
            indices = part[1::2] if code == 0x68 else (index for (index,) in _LONG_BINGET.iter_unpack(part))
            found += [values[numbers[index]] for index in indices]
            position = end
        return found

    def _push_text(self, data: bytes) -> None:
        # Pickles keep half of a surrogate pair like this.
        text = data.decode("utf-8", "surrogatepass")
        if self._stack and self._stack[-1] == self._visitor.KEY:
            self._visitor.text(text)
        self._stack.append(text)

    def _long_text(self, position: int, length: int) -> int:
        if length > _LONGEST:
            raise Refused(f"has a text of {length} bytes, which no snapshot has")
        parts = [self._data[position : self._end]]
        held = len(parts[0])
        while held < length and self._end is None:
            more = next(self._source, b"")
            if not more:
                break
            parts.append(more)
            held += len(more)
        if held < length:
            raise Refused(_CUT)
        data = b"".join(parts)
        self._push_text(data[:length])
        if length > _LONGEST_KEPT:
            self._stack[-1] = FORGOTTEN
        self._data = data[length:]
        if self._end is not None:
            self._end = len(self._data)
            self._data += bytes(_ROOM)
        return 0

    def _append(self, start: int) -> None:
        """Put the values from `start` on into the list before them."""
        target = self._before(start)
        if not isinstance(target, Items):
            raise Refused("is damaged: it adds items to what is no list")
        for item in self._stack[start:]:
            target.add(self._closed(item))
        target.is_new = False
        del self._stack[start:]

    def _set_items(self, start: int) -> None:
        """Put the keys and values from `start` on into the dictionary before them, and keep what
        the visitor keeps of it. More of a dictionary of other keys is forgotten."""
        target = self._before(start)
        found = self._stack[start:]
        del self._stack[start:]
        for index, value in enumerate(found):
            if type(value) in self._containers:
                found[index] = self._closed(value)
        if isinstance(target, _Dict):
            try:
                pairs = dict(zip(found[::2], found[1::2], strict=True))
            except TypeError:
                raise Refused("is damaged: a list is the key of a dictionary") from None
            self._stack[-1] = self._visitor.dictionary(pairs)
            self._open -= 1
            self._remember(target.slot, self._stack[-1])
        elif target is not FORGOTTEN:
            raise Refused("is damaged: it sets items of what is no dictionary")

    def _before(self, start: int) -> Any:
        if start < 1:
            raise IndexError
        return self._stack[start - 1]

    def _closed(self, value: Any) -> Any:
        """What is kept of a value that is complete."""
        if isinstance(value, Items):
            self._open -= 1
            result = value.result() if value.known is None else value.known
            self._remember(value.slot, result)
            return result
        if isinstance(value, _Dict):
            self._open -= 1
            return FORGOTTEN
        return value

    def _remember(self, slot: int, result: object) -> None:
        if slot >= 0 and isinstance(result, self._visitor.KEPT):
            self._memo.numbers[slot] = self._memo.number_of(result)

    def _drop(self, start: int) -> None:
        """A tuple: no snapshot has one that is needed."""
        if start < 0:
            raise IndexError
        for value in self._stack[start:]:
            self._closed(value)
        self._stack[start:] = [FORGOTTEN]
