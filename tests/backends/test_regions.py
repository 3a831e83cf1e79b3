"""The memory of tensors."""

import random
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.backends import regions as module
from asynccomm.backends.regions import AccessSet, Region, RegionSet, adjoining, disjoint, overlap, region, regions


def test_what_lies_side_by_side_is_one() -> None:
    whole = torch.arange(10.0)
    found = adjoining([whole[2:4], whole[:0], whole[4:9].view(5, 1)])
    assert found is not None
    assert found.data_ptr() == whole[2:].data_ptr()
    assert found.view(torch.float32).tolist() == [2, 3, 4, 5, 6, 7, 8]
    mixed = adjoining([whole[:1].view(torch.int32), whole[1:3]])
    assert mixed is not None
    assert mixed.numel() == 12


def test_what_does_not_is_not() -> None:
    whole = torch.arange(10.0)
    assert adjoining([whole[:2], whole[3:]]) is None
    assert adjoining([whole[3:], whole[:3]]) is None
    assert adjoining([whole[::2]]) is None
    assert adjoining([whole[:2], torch.zeros(2)]) is None
    assert adjoining([torch.ones(2, dtype=torch.complex64).conj()]) is None
    nothing = adjoining([torch.zeros(0), whole[:0]])
    assert nothing is not None
    assert nothing.numel() == 0


def test_the_region_of_a_tensor() -> None:
    memory = torch.zeros(100)
    start = memory.data_ptr()
    assert region(memory) == (start, start + 400, ())
    assert region(memory[10:60:5]) == (start + 40, start + 224, ((20, 10), (1, 4))), "with the gaps"
    assert region(memory[3].expand(7)) == (start + 12, start + 16, ((1, 4),))
    assert region(memory.view(10, 10).t()) == (start, start + 400, ()), "all of it, in another order"
    assert regions([memory[:0], memory[:1]]) == [(start, start + 4, ())]


STORAGE = 48  # bytes
DTYPES = [torch.uint8, torch.int16, torch.float32, torch.float64]


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.dtype, int, list[int], list[int]]:
    """Dtype, offset, shape and strides, in elements, of a view of ``STORAGE`` bytes."""
    dtype = draw(st.sampled_from(DTYPES))
    room = STORAGE // dtype.itemsize
    offset = draw(st.integers(0, room - 1))
    left, shape, strides = room - 1 - offset, [], []
    for _ in range(draw(st.integers(0, 3))):
        stride = draw(st.integers(0, 7))
        n = draw(st.integers(1, 4))
        if (n - 1) * stride <= left:
            left -= (n - 1) * stride
            shape.append(n)
            strides.append(stride)
    return dtype, offset, shape, strides


def bytes_in(view: tuple[torch.dtype, int, list[int], list[int]]) -> set[int]:
    dtype, offset, shape, strides = view
    found = set()
    for index in product(*map(range, shape)):
        start = dtype.itemsize * (offset + sum(i * stride for i, stride in zip(index, strides, strict=True)))
        found |= set(range(start, start + dtype.itemsize))
    return found


def tensor_of(memory: Tensor, view: tuple[torch.dtype, int, list[int], list[int]]) -> Tensor:
    dtype, offset, shape, strides = view
    return memory.view(dtype).as_strided(shape, strides, offset)


@given(one=views(), other=views())
def test_two_overlap_if_they_share_a_byte(
    one: tuple[torch.dtype, int, list[int], list[int]], other: tuple[torch.dtype, int, list[int], list[int]]
) -> None:
    memory = torch.zeros(STORAGE, dtype=torch.uint8)
    mine, theirs = region(tensor_of(memory, one)), region(tensor_of(memory, other))
    shared = bool(bytes_in(one) & bytes_in(other))
    assert overlap(mine, theirs) == overlap(theirs, mine) == shared


def test_views_of_large_tensors_that_interleave() -> None:
    rows = torch.empty(1000, 64, 1024, device="meta").as_strided((1000, 64, 1024), (65536, 1024, 1))
    memory = torch.zeros(1 << 16)
    columns = memory.view(256, 256).chunk(8, 1)
    for i, one in enumerate(columns):
        for j, other in enumerate(columns):
            assert overlap(region(one), region(other)) == (i == j)
    assert overlap(region(columns[0]), region(memory[255 * 256 + 31 :]))
    assert not overlap(region(columns[0]), region(memory[255 * 256 + 32 :]))
    assert overlap(region(rows[:, :, :512]), region(rows[:, :, 511:]))
    assert not overlap(region(rows[:, :, :512]), region(rows[:, :, 512:]))
    assert not overlap(region(rows[:, 1::2]), region(rows[:, ::2, 3:]))


def test_what_is_too_hard_to_tell_counts_as_overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(40_000)
    one, other = memory[::30][:1000], memory[1::42][:900]  # apart, as 30 and 42 are even
    monkeypatch.setattr(module, "MOST_TRIES", 10**9)
    assert not overlap(region(one), region(other))
    monkeypatch.setattr(module, "MOST_TRIES", 5)
    assert overlap(region(one), region(other))
    assert not overlap(region(one), region(torch.zeros(7)))


@pytest.mark.parametrize(
    ("reads", "writes", "expected"),
    [
        ([(0, 4), (2, 6)], [(6, 9)], True),
        ([(0, 4)], [(3, 6)], False),
        ([(0, 40)], [(3, 6)], False),
        ([(4, 5)], [(3, 6)], False),
        ([], [(0, 4), (3, 6)], False),
        ([], [(0, 4), (0, 4)], False),
        ([], [(4, 6), (0, 4)], True),
        ([], [], True),
    ],
)
def test_disjoint(reads: list[tuple[int, int]], writes: list[tuple[int, int]], expected: bool) -> None:
    read = [(start, end, ()) for start, end in reads]
    assert disjoint(read, [(start, end, ()) for start, end in writes]) is expected


def dense(*spans: tuple[int, int]) -> list[Region]:
    return [(start, end, ()) for start, end in spans]


def test_regions_come_and_go() -> None:
    there = RegionSet()
    assert not there.overlaps(dense((0, 100)))
    there.add(dense((10, 20), (30, 40)))
    found = [there.overlaps(dense(one)) for one in [(0, 10), (0, 11), (19, 20), (20, 30), (25, 31), (40, 50), (0, 50)]]
    assert found == [False, True, True, False, True, False, True]
    assert there.overlaps(dense((0, 5), (39, 45)))
    assert not there.overlaps([])
    there.remove(dense((10, 20)))
    assert not there.overlaps(dense((0, 30)))
    assert there.overlaps(dense((30, 31)))
    with pytest.raises(KeyError):
        there.remove(dense((30, 41)))


def test_a_region_may_be_there_several_times() -> None:
    there = RegionSet()
    there.add(dense((10, 20), (10, 20), (15, 30)))
    for _ in range(2):
        assert there.overlaps(dense((12, 13)))
        there.remove(dense((10, 20)))
    assert not there.overlaps(dense((12, 13)))
    assert there.overlaps(dense((15, 16)))
    there.remove(dense((15, 30)))
    assert not there.overlaps(dense((0, 100)))


def test_what_is_there_is_what_was_added_and_not_removed() -> None:
    chance = random.Random(5)
    memory = torch.zeros(400, dtype=torch.uint8)
    there, kept = RegionSet(), list[Region]()
    for _ in range(3000):
        if kept and chance.random() < 0.5:
            gone = [kept.pop(chance.randrange(len(kept))) for _ in range(min(len(kept), chance.randrange(1, 4)))]
            there.remove(gone)
        else:
            starts = [chance.randrange(200) for _ in range(chance.randrange(1, 4))]
            new = [
                region(memory[start :: chance.choice([1, 3, 7])][: chance.choice([1, 2, 5, 60])]) for start in starts
            ]
            there.add(new)
            kept += new
        start = chance.randrange(260)
        one = region(memory[start :: chance.choice([1, 3])][: chance.randrange(1, 5)])
        assert there.overlaps([one]) == any(overlap(one, other) for other in kept)


@pytest.mark.parametrize(
    ("reads", "writes", "expected"),
    [
        ([(0, 4)], [], False),  # both read
        ([(6, 9)], [], True),  # reads what is written
        ([], [(3, 5)], True),  # writes what is read
        ([], [(8, 9)], True),  # writes what is written
        ([(4, 5)], [(5, 6)], False),
    ],
)
def test_operations_conflict_where_one_writes(
    reads: list[tuple[int, int]], writes: list[tuple[int, int]], expected: bool
) -> None:
    accesses = AccessSet()
    for _ in range(2):
        accesses.add(dense((0, 4)), dense((6, 9)))
    assert accesses.conflicts(dense(*reads), dense(*writes)) is expected
    accesses.remove(dense((0, 4)), dense((6, 9)))
    assert accesses.conflicts(dense(*reads), dense(*writes)) is expected
    accesses.remove(dense((0, 4)), dense((6, 9)))
    assert not accesses.conflicts(dense(*reads), dense(*writes))
