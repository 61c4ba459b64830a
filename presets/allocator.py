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
"""Addresses that an expandable segment can grow into: more than any GPU has bytes, whole pages."""


class CannotFit(Exception):
    """The capacity is too small, even after all unused segments were given back."""

    def __init__(self, key: int, size: int, allocated: int) -> None:
        super().__init__(f"{size} bytes do not fit, with {allocated} allocated")
        self.key, self.size, self.allocated = key, size, allocated


class _Block:
    """A part of a segment. Its neighbours there have the addresses before and after it."""

    __slots__ = ("address", "after", "before", "free", "mapped", "pool", "size")

    def __init__(self, pool: _Pool, address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.free, self.mapped = True, True
        self.before: _Block | None = None
        self.after: _Block | None = None


class _Pool:
    """The segments for small or for large requests."""

    __slots__ = ("free", "page", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        """An expandable segment grows by a multiple of it."""
        self.free: list[tuple[int, int]] = []
        """Size and address of the free blocks, ascending."""
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
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._blocks: dict[int, _Block] = {}
        self._used: dict[int, _Block] = {}
        self._next_address = _ADDRESSES

    def allocate(self, key: int, size: int, stream: int = 0) -> None:
        """Allocate `size` bytes under this key; CannotFit if the capacity is too small."""
        if size == 0:
            return
        size = rounded(size)
        small = size <= _SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(small)
        block = self._best_fit(pool, size) or self._new_block(pool, size)
        if block is None:
            self.retries += 1
            self.give_back_unused()
            block = self._new_block(pool, size)
            if block is None:
                raise CannotFit(key, size, self.allocated)
        rest = block.size - size
        if rest >= SMALLEST if pool.small or self.expandable else rest > _SMALL:
            self._cut(block, size)
            assert block.after is not None
            insort(pool.free, (rest, block.after.address))
        block.free = False
        self._used[key] = block
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated

    def release(self, key: int) -> None:
        """Release what was allocated under this key."""
        block = self._used.pop(key, None)
        if block is None:
            return
        self.allocated -= block.size
        block.free = True
        self._insert(block)

    def block_bytes(self, key: int) -> int:
        """The size of the block: the request, rounded, and what was not split off."""
        block = self._used.get(key)
        return 0 if block is None else block.size

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def give_back_unused(self) -> None:
        """Give back segments without a used block; of expandable segments, all unused pages."""
        for pool in self._pools.values():
            for size, address in list(pool.free):
                block = self._blocks[address]
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.free.remove((size, address))
                    del self._blocks[address]
                    self.reserved -= size

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """The smallest free block that is large enough; of equal ones the lowest address."""
        place = bisect_left(pool.free, (size, 0))
        if place == len(pool.free):
            return None
        if self.expandable:
            # A block that can grow counts with the size to which it can grow.
            while place + 1 < len(pool.free) and self._grown(pool.free[place + 1]) < self._grown(pool.free[place]):
                place += 1
        return self._blocks[pool.free.pop(place)[1]]

    def _grown(self, free: tuple[int, int]) -> int:
        after = self._blocks[free[1]].after
        return free[0] + (after.size if after is not None and not after.mapped else 0)

    def _new_block(self, pool: _Pool, size: int) -> _Block | None:
        if self.expandable:
            return self._expand(pool, size)
        block = _Block(pool, self._next_address, segment_bytes(size))
        if not self._reserve(block.size):
            return None
        # The gap keeps segments apart: their blocks never merge.
        self._next_address += block.size + _ROUND_SEGMENT
        self._blocks[block.address] = block
        return block

    def _reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _cut(self, block: _Block, size: int) -> None:
        """Shorten the block; what is left is a new block after it."""
        rest = _Block(block.pool, block.address + size, block.size - size)
        rest.mapped = block.mapped
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._blocks[rest.address] = rest

    def _insert(self, block: _Block) -> _Block:
        """Merge a free block with its free neighbours, and add it to its pool."""
        before, after = block.before, block.after
        if before is not None and before.free and before.mapped == block.mapped:
            self._withdraw(before)
            block = self._merge(before, block)
        if after is not None and after.free and after.mapped == block.mapped:
            self._withdraw(after)
            block = self._merge(block, after)
        if block.mapped:
            insort(block.pool.free, (block.size, block.address))
        else:
            insort(block.pool.unmapped, block.address)
        return block

    def _merge(self, first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self._blocks[second.address]
        return first

    def _withdraw(self, block: _Block) -> None:
        """Take a block out of its pool's list."""
        if block.mapped:
            del block.pool.free[bisect_left(block.pool.free, (block.size, block.address))]
        else:
            del block.pool.unmapped[bisect_left(block.pool.unmapped, block.address)]

    def _expand(self, pool: _Pool, size: int) -> _Block | None:
        """A free block that has grown by pages; None if there is not enough memory for them."""
        block = self._place_to_expand(pool, size)
        if not block.mapped:
            grown = self._map(block, min(block.size, size))
            if grown is None:
                return None
            block = grown
        while block.size < size:
            assert block.after is not None
            grown = self._map(block.after, min(block.after.size, size - block.size))
            if grown is None:
                return None
            block = grown
        self._withdraw(block)
        return block

    def _place_to_expand(self, pool: _Pool, size: int) -> _Block:
        """The lowest run of free and unmapped blocks with room for `size`."""
        for address in pool.unmapped:
            start = self._blocks[address]
            if start.before is not None and start.before.free:
                start = start.before
            room, block = 0, start
            while room < size and block is not None and block.free:
                room, block = room + block.size, block.after  # type: ignore[assignment]
            if room >= size:
                return start
        segment = _Block(pool, self._next_address, _ADDRESSES)
        segment.mapped = False
        self._next_address += 2 * _ADDRESSES
        self._blocks[segment.address] = segment
        insort(pool.unmapped, segment.address)
        return segment

    def _map(self, block: _Block, size: int) -> _Block | None:
        """Give an unmapped block's first pages memory; return the free block they belong to."""
        pages = -(-size // block.pool.page) * block.pool.page
        if not self._reserve(pages):
            return None
        self._withdraw(block)
        if pages < block.size:
            self._cut(block, pages)
            assert block.after is not None
            insort(block.pool.unmapped, block.after.address)
        block.mapped = True
        return self._insert(block)

    def _unmap(self, block: _Block) -> None:
        """Give back the whole pages of a free block."""
        page = block.pool.page
        first = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if first >= end:
            return
        self._withdraw(block)
        if first > block.address:
            self._cut(block, first - block.address)
            insort(block.pool.free, (block.size, block.address))
            assert block.after is not None
            block = block.after
        if end < block.address + block.size:
            self._cut(block, end - block.address)
            assert block.after is not None
            insort(block.pool.free, (block.after.size, block.after.address))
        block.mapped = False
        self.reserved -= block.size
        self._insert(block)


def rounded(size: int) -> int:
    """The size of the smallest block for a request."""
    return max(SMALLEST, -(-size // SMALLEST) * SMALLEST)


def segment_bytes(size: int) -> int:
    """What is reserved for a request, already rounded, that no free block can serve."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
