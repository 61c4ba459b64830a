"""The model of PyTorch's allocator, against values derived by hand from its rules."""

from __future__ import annotations

import random

import pytest

from memtop.presets.allocator import MIB, Allocator, CannotFit


def test_a_request_is_rounded_to_512_bytes_and_small_ones_share_a_segment() -> None:
    allocator = Allocator()
    allocator.allocate(1, 1)
    allocator.allocate(2, 513)
    assert (allocator.allocated, allocator.reserved) == (512 + 1024, 2 * MIB)
    # The rest of the segment is too small for the third.
    allocator.allocate(3, MIB)
    allocator.allocate(4, MIB)
    assert (allocator.allocated, allocator.reserved) == (512 + 1024 + 2 * MIB, 4 * MIB)


def test_nothing_is_allocated_for_an_empty_tensor() -> None:
    allocator = Allocator()
    allocator.allocate(1, 0)
    allocator.release(1)
    assert (allocator.allocated, allocator.reserved, allocator.block_bytes(1)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (25 * MIB, 26 * MIB),
    ],
)
def test_a_new_segment_has_the_size_of_its_pool_or_of_a_large_request(size: int, segment: int) -> None:
    allocator = Allocator()
    allocator.allocate(1, size)
    assert allocator.reserved == segment


def test_a_large_block_is_split_only_if_more_than_1_mib_is_left() -> None:
    allocator = Allocator()
    allocator.allocate(1, 11 * MIB)
    # 12 MiB are reserved; the last one cannot be split off, and counts as allocated.
    assert (allocator.allocated, allocator.block_bytes(1)) == (12 * MIB, 12 * MIB)
    allocator.allocate(2, 2 * MIB)
    assert allocator.block_bytes(2) == 2 * MIB
    allocator.allocate(3, 17 * MIB)
    # 18 MiB of the second segment are free, and a request of 17 MiB takes them whole.
    assert (allocator.block_bytes(3), allocator.reserved) == (18 * MIB, 32 * MIB)


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest() -> None:
    allocator = Allocator()
    for key, size in enumerate((30, 12, 12, 20)):
        allocator.allocate(key, size * MIB)
    for key in (0, 2, 1, 3):
        allocator.release(key)
    allocator.allocate(4, 12 * MIB)
    allocator.allocate(5, 12 * MIB)
    assert allocator.reserved == 74 * MIB
    # Both blocks of 12 MiB are taken: those of 20 and 30 are whole.
    allocator.allocate(6, 20 * MIB)
    allocator.allocate(7, 30 * MIB)
    assert allocator.reserved == 74 * MIB


def test_free_neighbours_merge_but_segments_do_not() -> None:
    allocator = Allocator()
    for key in range(4):
        allocator.allocate(key, 5 * MIB)
    assert allocator.reserved == 20 * MIB
    for key in (0, 2, 1):
        allocator.release(key)
    allocator.allocate(5, 15 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(6, 10 * MIB)
    allocator.release(5)
    allocator.release(3)
    allocator.release(6)
    allocator.allocate(7, 30 * MIB)
    assert allocator.reserved == (20 + 10 + 30) * MIB


def test_peaks_stay_until_they_are_reset() -> None:
    allocator = Allocator()
    allocator.allocate(1, 20 * MIB)
    allocator.release(1)
    assert (allocator.allocated, allocator.peak_allocated) == (0, 20 * MIB)
    allocator.reset_peaks()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (0, 20 * MIB)


def test_unused_segments_are_given_back_before_it_fails() -> None:
    allocator = Allocator(capacity=50 * MIB)
    allocator.allocate(1, 20 * MIB)
    allocator.allocate(2, 20 * MIB)
    allocator.release(1)
    allocator.allocate(3, 30 * MIB)
    assert (allocator.reserved, allocator.retries) == (50 * MIB, 1)
    with pytest.raises(CannotFit) as caught:
        allocator.allocate(4, 2 * MIB)
    assert (caught.value.key, caught.value.size, caught.value.allocated) == (4, 2 * MIB, 50 * MIB)


def test_a_segment_with_a_used_part_is_not_given_back() -> None:
    allocator = Allocator(capacity=40 * MIB)
    allocator.allocate(1, 2 * MIB)
    allocator.allocate(2, 16 * MIB)
    allocator.release(2)
    with pytest.raises(CannotFit):
        allocator.allocate(3, 30 * MIB)
    assert allocator.reserved == 20 * MIB


def test_an_expandable_segment_grows_by_pages_and_has_no_rest() -> None:
    allocator = Allocator(expandable=True)
    allocator.allocate(1, 11 * MIB)
    assert (allocator.allocated, allocator.reserved) == (11 * MIB, 20 * MIB)
    allocator.allocate(2, 30 * MIB)
    # 9 MiB were free: two more pages.
    assert (allocator.allocated, allocator.reserved) == (41 * MIB, 60 * MIB)
    allocator.allocate(3, 512)
    assert (allocator.allocated, allocator.reserved) == (41 * MIB + 512, 62 * MIB)
    allocator.release(1)
    allocator.release(2)
    allocator.allocate(4, 60 * MIB)
    assert allocator.reserved == 62 * MIB


def test_a_request_larger_than_all_addresses_of_a_segment_has_one_of_its_size() -> None:
    """A batch of a million samples asks for hundreds of tebibytes."""
    allocator = Allocator(expandable=True)
    sizes = (MIB << 20, MIB << 27, MIB << 40, 40 * MIB)
    for key, size in enumerate(sizes):
        allocator.allocate(key, size)
    assert allocator.allocated == sum(sizes)
    for key in range(len(sizes)):
        allocator.release(key)
    allocator.give_back_unused()
    assert allocator.allocated == allocator.reserved == 0


def test_a_block_that_can_grow_is_taken_last() -> None:
    allocator = Allocator(expandable=True)
    for key, size in enumerate((15, 4, 15)):
        allocator.allocate(key, size * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.release(0)
    # The 6 MiB at the end would fit better than the 15 at the beginning, but can grow.
    allocator.allocate(4, 5 * MIB)
    allocator.allocate(5, 6 * MIB)
    allocator.allocate(6, 4 * MIB)
    assert allocator.reserved == 40 * MIB


def test_whole_pages_inside_an_expandable_segment_are_given_back() -> None:
    allocator = Allocator(expandable=True, capacity=80 * MIB)
    for key in range(2):
        allocator.allocate(key, 30 * MIB)
    allocator.allocate(2, 20 * MIB)
    assert allocator.reserved == 80 * MIB
    allocator.release(0)
    allocator.release(2)
    # Two pages are given back, at the beginning and at the end; half of another one stays.
    allocator.allocate(3, 35 * MIB)
    assert (allocator.reserved, allocator.retries, allocator.allocated) == (80 * MIB, 1, 65 * MIB)
    allocator.allocate(4, 10 * MIB)
    assert (allocator.reserved, allocator.retries) == (80 * MIB, 1)


@pytest.mark.parametrize("expandable", [False, True])
def test_after_any_sequence_everything_can_be_given_back(expandable: bool) -> None:
    numbers = random.Random(7)
    allocator = Allocator(expandable=expandable, capacity=600 * MIB)
    used: dict[int, int] = {}
    for key in range(4000):
        if used and numbers.random() < 0.5:
            gone = numbers.choice(list(used))
            allocator.release(gone)
            del used[gone]
        size = numbers.choice((700, 40_000, 900_000, 3 * MIB, 9 * MIB, 14 * MIB + 3, 33 * MIB))
        try:
            allocator.allocate(key, size)
        except CannotFit:
            continue
        used[key] = size
        assert allocator.block_bytes(key) >= size
        assert allocator.allocated == sum(map(allocator.block_bytes, used))
        assert allocator.allocated <= allocator.reserved <= 600 * MIB
    assert allocator.retries > 0
    for key in used:
        allocator.release(key)
    allocator.give_back_unused()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_a_stream_does_not_get_the_unused_memory_of_another() -> None:
    allocator = Allocator()
    allocator.allocate(1, 30 * MIB, stream=1)
    allocator.release(1)
    allocator.allocate(2, 30 * MIB)
    assert allocator.reserved == 60 * MIB
    allocator.allocate(3, 30 * MIB, stream=1)
    assert allocator.reserved == 60 * MIB
