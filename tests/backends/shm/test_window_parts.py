"""The layout of a window's segment, and the access to its parts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.backends.shm.layout import PAIR, WORD
from asynccomm.backends.shm.segment import Segment, create
from asynccomm.backends.shm.window_parts import PAGE, ShmPart, WindowLayout
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.ops import WindowInfo
from asynccomm.ops.validation import CommInfo


def layout_of(sizes: tuple[int, ...], signals: int) -> WindowLayout:
    return WindowLayout(WindowInfo(CommInfo("c", 0, len(sizes), torch.device("cpu")), 0, sizes, signals))


@given(sizes=st.lists(st.integers(0, 3 * PAGE), min_size=1, max_size=6).map(tuple), signals=st.integers(0, 300))
def test_regions_are_aligned_and_disjoint(sizes: tuple[int, ...], signals: int) -> None:
    layout, size = layout_of(sizes, signals), len(sizes)
    spans = []
    for rank in range(size):
        assert layout.memory(rank) % PAGE == 0
        assert layout.bell(rank, 0) * WORD % PAIR == 0  # type: ignore[arg-type]
        spans += [
            (layout.bell(rank, 0), layout.bell(rank, 0) + 2),  # type: ignore[arg-type]
            (layout.atomic(rank), layout.atomic(rank) + 1),
            (layout.memory_lock(rank), layout.memory_lock(rank) + 2 * size),
            (layout.signal_lock(rank), layout.signal_lock(rank) + 2 * size),
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


def test_all_ranks_lock_signals_if_one_has_no_atomic_instructions() -> None:
    layout = layout_of((0, 0), 1)
    segment = Segment(create(layout.total), layout.total)
    part = ShmPart(segment, layout, 0, 1, (-1, -1), lambda *arguments: None)
    segment.words[layout.atomic(0)] = 1
    part.decide()
    assert part.signal_lock is not None
