"""The sizes of a ring and its frames."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from asynccomm.queues.layout import (
    DATA,
    LEAST,
    LINE,
    SLOTS,
    TAIL,
    framed,
    largest_payload,
    map_ring,
    ring_bytes,
    slot_word,
)
from tests.queues.rings import new_segment


@given(st.integers(1, 1 << 40))
def test_two_frames_and_their_padding_fit_every_ring(capacity: int) -> None:
    ring = ring_bytes(capacity)
    assert ring >= max(capacity, LEAST)
    assert ring % (4 * LINE) == 0
    assert framed(largest_payload(ring)) <= ring // 4


def test_slots_are_apart_and_before_the_ring() -> None:
    words = [slot_word(slot) + TAIL for slot in range(SLOTS)]
    assert all(b - a >= LINE // 8 for a, b in pairwise(words))
    assert slot_word(SLOTS) * 8 <= DATA


def test_the_memory_has_the_whole_ring() -> None:
    assert len(new_segment(4096).raw) == DATA + 4096
    assert map_ring.__doc__
