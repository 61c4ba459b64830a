"""PyTorch's caching allocator for CUDA, without memory: what it would allocate and reserve.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default options, or with
`expandable_segments:True`. Each stream has pools of its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIB = 1 << 20
SMALLEST = 512
"""Every block has a multiple of it."""
_SMALL = MIB
"""The largest request that the small pool serves."""
_SMALL_SEGMENT, _LARGE_SEGMENT, _ROUND_SEGMENT = 2 * MIB, 20 * MIB, 2 * MIB
_OWN_SEGMENT = 10 * MIB
"""From this size on, a request gets a segment of its own size, rounded to _ROUND_SEGMENT."""
_ADDRESSES = _LARGE_SEGMENT << 22
"""Addresses that an expandable segment can grow into: more than any GPU has bytes, whole pages. A
larger request gets a segment as large as itself."""
_ADDRESS_BITS = 80
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class CannotFit(Exception):
    """The capacity is too small, even after all unused segments were given back."""

    def __init__(self, key: int, size: int, allocated: int) -> None:
        super().__init__(f"{size} bytes do not fit, with {allocated} allocated")
        self.key, self.size, self.allocated = key, size, allocated


class _Pool:
    """The segments for small or for large requests."""

    __slots__ = ("free", "least_rest", "page", "unmapped")

    def __init__(self, small: bool, expandable: bool) -> None:
        self.page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        """An expandable segment grows by a multiple of it."""
        self.least_rest = SMALLEST if small or expandable else _SMALL + 1
        """From this size on, what a request leaves of a block becomes a block of its own."""
        self.free: list[int] = []
        """The free blocks, ascending by size, then by address: size << _ADDRESS_BITS | address."""
        self.unmapped: list[int] = []
        """Addresses of the parts of expandable segments that have no memory, ascending."""


class Allocator:
    """All sizes are bytes. `allocated` counts whole blocks, as `torch.cuda.memory_allocated`."""

    def __init__(self, *, expandable: bool = False, capacity: int | None = None) -> None:
        self.expandable = expandable
        self.capacity = capacity
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        """How often all unused segments were given back because memory ran out."""
        self._pools: dict[int, _Pool] = {}
        self._used: dict[int, tuple[int, int, _Pool]] = {}
        """Address and size of each block in use."""
        self._sizes: dict[int, int] = {}
        """Of the free blocks, by address. Segments have gaps between them, so a block that begins
        or ends where another one ends or begins is its neighbour."""
        self._starts: dict[int, int] = {}
        """Where a free block begins, by where it ends."""
        self._unmapped: dict[int, int] = {}
        """Sizes of the parts of expandable segments without memory, by address."""
        self._segments: dict[int, int] = {}
        """Sizes of the other segments, by address."""
        self._next_address = _ADDRESSES

    def allocate(self, key: int, size: int, stream: int = 0) -> None:
        """Allocate `size` bytes under this key; CannotFit if the capacity is too small."""
        if size == 0:
            return
        size = -(-size // SMALLEST) * SMALLEST
        pool = self._pools.get(2 * stream + (size <= _SMALL))
        if pool is None:
            pool = self._pools[2 * stream + (size <= _SMALL)] = _Pool(size <= _SMALL, self.expandable)
        free = pool.free
        place = bisect_left(free, size << _ADDRESS_BITS)
        if self.expandable:
            # A block that can grow counts with the size to which it can grow.
            while place + 1 < len(free) and self._grown(free[place + 1]) < self._grown(free[place]):
                place += 1
        if place < len(free):
            found = free.pop(place)
            address, block = found & _ADDRESS, found >> _ADDRESS_BITS
            del self._sizes[address]
        else:
            address, block = self._new_block(pool, size) or self._after_giving_back(pool, key, size)
        rest = block - size
        if rest >= pool.least_rest:
            self._sizes[address + size] = rest
            self._starts[address + block] = address + size
            insort(free, rest << _ADDRESS_BITS | address + size)
            block = size
        else:
            self._starts.pop(address + block, None)
        self._used[key] = (address, block, pool)
        self.allocated += block
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated

    def release(self, key: int) -> None:
        """Release what was allocated under this key."""
        found = self._used.pop(key, None)
        if found is not None:
            self.allocated -= found[1]
            self._insert(*found)

    def block_bytes(self, key: int) -> int:
        """The size of the block: the request, rounded, and what was not split off."""
        return self._used[key][1] if key in self._used else 0

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def give_back_unused(self) -> None:
        """Give back segments without a used block; of expandable segments, all unused pages."""
        for pool in self._pools.values():
            for found in list(pool.free):
                address, size = found & _ADDRESS, found >> _ADDRESS_BITS
                if self.expandable:
                    self._unmap(pool, address, size)
                elif self._segments.get(address) == size:
                    self._withdraw(pool, address)
                    del self._segments[address]
                    self.reserved -= size

    def _grown(self, found: int) -> int:
        size = found >> _ADDRESS_BITS
        return size + self._unmapped.get((found & _ADDRESS) + size, 0)

    def _after_giving_back(self, pool: _Pool, key: int, size: int) -> tuple[int, int]:
        self.retries += 1
        self.give_back_unused()
        found = self._new_block(pool, size)
        if found is None:
            raise CannotFit(key, size, self.allocated)
        return found

    def _new_block(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """Address and size of a block that is in no list; None if there is not enough memory."""
        if self.expandable:
            return self._expand(pool, size)
        address, size = self._next_address, segment_bytes(size)
        if not self._reserve(size):
            return None
        # The gap keeps segments apart: their blocks never merge.
        self._next_address += size + _ROUND_SEGMENT
        self._segments[address] = size
        return address, size

    def _reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        return True

    def _insert(self, address: int, size: int, pool: _Pool) -> int:
        """Add a free block to its pool, merged with its free neighbours; return its address."""
        sizes, starts, free = self._sizes, self._starts, pool.free
        before = starts.pop(address, None)
        if before is not None:
            del free[bisect_left(free, (address - before) << _ADDRESS_BITS | before)]
            size += address - before
            address = before
        after = sizes.pop(address + size, None)
        if after is not None:
            del free[bisect_left(free, after << _ADDRESS_BITS | address + size)]
            size += after
        sizes[address] = size
        starts[address + size] = address
        insort(free, size << _ADDRESS_BITS | address)
        return address

    def _withdraw(self, pool: _Pool, address: int) -> int:
        """Take a free block out of its pool's list; return its size."""
        size = self._sizes.pop(address)
        del self._starts[address + size]
        del pool.free[bisect_left(pool.free, size << _ADDRESS_BITS | address)]
        return size

    def _expand(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """A free block that has grown by pages; None if there is not enough memory for them."""
        address = self._place_to_expand(pool, size)
        while True:
            have = self._sizes.get(address, 0)
            if have >= size:
                return address, self._withdraw(pool, address)
            after = self._unmapped[address + have]
            if not self._map(pool, address + have, min(after, size - have)):
                return None

    def _place_to_expand(self, pool: _Pool, size: int) -> int:
        """The lowest run of free and unmapped blocks with room for `size`."""
        for address in pool.unmapped:
            start = self._starts.get(address, address)
            end = start
            while end - start < size:
                length = self._sizes.get(end) or self._unmapped.get(end)
                if length is None:
                    break
                end += length
            else:
                return start
        address, room = self._next_address, max(_ADDRESSES, -(-size // pool.page) * pool.page)
        self._next_address += room + _ADDRESSES
        self._unmapped[address] = room
        insort(pool.unmapped, address)
        return address

    def _map(self, pool: _Pool, address: int, size: int) -> bool:
        """Give the first pages of an unmapped part memory; False if there is not enough."""
        pages = -(-size // pool.page) * pool.page
        if not self._reserve(pages):
            return False
        rest = self._unmapped.pop(address) - pages
        place = bisect_left(pool.unmapped, address)
        if rest > 0:
            self._unmapped[address + pages] = rest
            pool.unmapped[place] = address + pages
        else:
            del pool.unmapped[place]
        self._insert(address, pages, pool)
        return True

    def _unmap(self, pool: _Pool, address: int, size: int) -> None:
        """Give back the whole pages of a free block."""
        page = pool.page
        first = -(-address // page) * page
        end = (address + size) // page * page
        if first >= end:
            return
        self._withdraw(pool, address)
        if first > address:
            self._insert(address, first - address, pool)
        if end < address + size:
            self._insert(end, address + size - end, pool)
        self.reserved -= end - first
        after = self._unmapped.pop(end, None)
        if after is not None:
            pool.unmapped.remove(end)
        for start in pool.unmapped:
            if start + self._unmapped[start] == first:
                self._unmapped[start] = (end if after is None else end + after) - start
                return
        self._unmapped[first] = (end if after is None else end + after) - first
        insort(pool.unmapped, first)


def rounded(size: int) -> int:
    """The size of the smallest block for a request."""
    return max(SMALLEST, -(-size // SMALLEST) * SMALLEST)


def segment_bytes(size: int) -> int:
    """What is reserved for a request, already rounded, that no free block can serve."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
