"""The layout of a window's segment, and the access to its parts."""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.backends.shm.layout import PAIR, WORD
from asynccomm.backends.shm.segment import Segment, create
from asynccomm.backends.shm.window_parts import LARGE, PAGE, GuestPart, ShmPart, WindowLayout
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.ops import WindowInfo
from asynccomm.ops.validation import CommInfo


def layout_of(sizes: tuple[int, ...], signals: int, guests: int = 0) -> WindowLayout:
    return WindowLayout(WindowInfo(CommInfo("c", 0, len(sizes), torch.device("cpu")), 0, sizes, signals), guests)


@given(
    sizes=st.lists(st.integers(0, 3 * PAGE), min_size=1, max_size=6).map(tuple),
    signals=st.integers(0, 300),
    guests=st.integers(0, 2),
)
def test_regions_are_aligned_and_disjoint(sizes: tuple[int, ...], signals: int, guests: int) -> None:
    layout, size = layout_of(sizes, signals, guests), len(sizes)
    spans = []
    for rank in range(size):
        assert layout.memory(rank) % PAGE == 0
        assert layout.bell(rank, 0) * WORD % PAIR == 0  # type: ignore[arg-type]
        spans += [
            (layout.bell(rank, 0), layout.bell(rank, 0) + 2),  # type: ignore[arg-type]
            (layout.atomic(rank), layout.atomic(rank) + 1),
            (layout.memory_lock(rank), layout.memory_lock(rank) + 2 * (size + guests)),
            (layout.signal_lock(rank), layout.signal_lock(rank) + 2 * (size + guests)),
            (layout.signals(rank), layout.signals(rank) + signals),
        ]
    spans = [(WORD * start, WORD * end) for start, end in spans]
    spans += [(layout.memory(rank), layout.memory(rank) + sizes[rank]) for rank in range(size)]
    assert all(one[1] <= other[0] for one, other in pairwise(sorted(spans)))
    assert max(end for _, end in spans) <= layout.total


@pytest.mark.parametrize("native", [True, False])
def test_signals_are_set_added_and_wrap(native: bool) -> None:
    core = load_core()
    if native and isinstance(core, CoreUnavailable):
        pytest.skip("the executor in C was not built")
    layout = layout_of((8, 16), 3)
    segment = Segment(create(layout.total), layout.total)
    part = ShmPart(segment, layout, 0, 1, (-1, -1), core.signal if native else None)
    for rank in range(2):
        segment.words[layout.atomic(rank)] = native
    part.decide()
    assert (part.signal_lock is None) is native
    part.signal(2, 2**64 - 1, add=False)
    part.signal(2, 3, add=True)
    part.signal(0, 5, add=True)
    assert [part.load(slot) for slot in range(3)] == [5, 0, 2]
    assert part.memory.numel() == 16


@pytest.mark.parametrize("native", [True, False])
def test_a_large_copy_is_right_at_any_place_also_where_it_overlaps(native: bool) -> None:
    core = load_core()
    if native and isinstance(core, CoreUnavailable):
        pytest.skip("the executor in C was not built")
    size = 2 * LARGE
    layout = layout_of((size, 0), 1)
    segment = Segment(create(layout.total), layout.total)
    large = Mock(side_effect=core.copy) if native else None
    part = ShmPart(segment, layout, 0, 0, (-1, -1), None, large)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    for nbytes, source, target in [
        (LARGE + 77, 3, 5),
        (LARGE, 0, 4096),
        (LARGE - 1, 1, 0),
        (LARGE + 4096, 1000, LARGE - 5000),
        (LARGE, 0, LARGE),
    ]:
        part.memory.copy_(data)
        start = part.memory.data_ptr()
        outside = torch.empty(nbytes + 9, dtype=torch.uint8)
        part.copy(outside.data_ptr() + 9, start + source, nbytes)
        part.copy(start + target, start + source, nbytes)
        expected = data.clone()
        expected[target : target + nbytes] = data[source : source + nbytes]
        assert torch.equal(outside[9:], data[source : source + nbytes])
        assert torch.equal(part.memory, expected)
    if large is not None:
        assert large.call_count == 8, "one of the sizes is not large"
        with pytest.raises(TypeError):
            core.copy(1)


def test_all_ranks_lock_signals_if_one_has_no_atomic_instructions() -> None:
    layout = layout_of((0, 0), 1)
    segment = Segment(create(layout.total), layout.total)
    part = ShmPart(segment, layout, 0, 1, (-1, -1), lambda *arguments: None)
    segment.words[layout.atomic(0)] = 1
    part.decide()
    assert part.signal_lock is not None


def guest_and_parts(native: bool) -> tuple[GuestPart, list[ShmPart], tuple[int, int]]:
    """The guest part of rank 0 of two, the part of rank 0 as the two ranks reach it, and the bells of rank 0."""
    core = load_core()
    if native and isinstance(core, CoreUnavailable):
        pytest.skip("the executor in C was not built")
    layout = layout_of((64, 0), 2, guests=1)
    segment = Segment(create(layout.total), layout.total)
    for rank in range(2):
        segment.words[layout.atomic(rank)] = native
    bells = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
    store = core.signal if native else None
    parts = [ShmPart(segment, layout, origin, 0, bells, store) for origin in (0, 1, 2, 2)]
    for part in parts:
        part.decide()
    segment.words[layout.bell(0, 0)] = 1  # type: ignore[arg-type]
    return GuestPart(parts[2], parts[3], 2), parts[:2], bells


@pytest.mark.parametrize("native", [True, False])
def test_a_guest_and_the_ranks_use_one_memory_and_one_set_of_signals(native: bool) -> None:
    guest, (own, other), bells = guest_and_parts(native)
    turns = 200

    def by_guest() -> None:
        for _ in range(turns):
            guest.accumulate(8, torch.ones(4))
            guest.signal(1, 2, add=True)

    def by_rank(part: ShmPart) -> None:
        for _ in range(turns):
            for lock in (part.memory_lock, part.signal_lock):
                if lock is not None:
                    lock.take()
                    assert lock.wait(lambda: False)
                if lock is part.memory_lock:
                    part.memory[8:24].view(torch.float32).add_(1)
                else:
                    part.signal(1, 1, add=True)
                if lock is not None:
                    lock.leave()

    threads = [threading.Thread(target=by_guest) for _ in range(2)]
    threads += [threading.Thread(target=by_rank, args=(part,)) for part in (own, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert own.memory[8:24].view(torch.float32).tolist() == [4.0 * turns] * 4
    assert own.load(1) == other.load(1) == 6 * turns
    assert os.eventfd_read(bells[0]) == 1  # the rank was asleep once
    for bell in bells:
        os.close(bell)


@pytest.mark.parametrize("native", [True, False])
def test_a_guest_part_that_has_ended_waits_for_no_lock_and_changes_nothing(native: bool) -> None:
    guest, (own, _), bells = guest_and_parts(native)
    own.memory_lock.take()
    own._signal_lock.take()
    threads = [threading.Thread(target=guest.accumulate, args=(0, torch.ones(1)))]
    if not native:
        threads.append(threading.Thread(target=guest.signal, args=(0, 1), kwargs={"add": False}))
    for thread in threads:
        thread.start()
    guest.close()
    for thread in threads:
        thread.join()
    guest.signal(1, 1, add=False)
    guest.accumulate(0, torch.ones(1))
    assert not own.memory.count_nonzero()
    assert [own.load(slot) for slot in range(2)] == [0, 0]
    for bell in bells:
        os.close(bell)
