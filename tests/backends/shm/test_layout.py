"""Where things lie in a segment."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.backends.shm.layout import HEADER, LINE, PAIR, RECORD, WORD, Layout, RecordWord, State, Word, rounded_up

BLOCK = 512
layouts = st.builds(
    Layout,
    size=st.integers(1, 64),
    chunk=st.integers(16, 1 << 14).map(lambda lines: lines * LINE),
    banks=st.integers(1, 9),
    ring=st.integers(1, 1 << 14).map(lambda lines: lines * LINE),
)


def regions(layout: Layout) -> list[tuple[int, int]]:
    """Start and bytes of everything."""
    ranks, banks = range(layout.size), range(layout.banks)
    found = [(layout.word(rank, 0) * WORD, BLOCK) for rank in ranks]
    found += [(layout.record(bank, rank) * WORD, RECORD * WORD) for bank in banks for rank in ranks]
    found += [(layout.header(bank, rank, 0) * WORD, layout.size * HEADER * WORD) for bank in banks for rank in ranks]
    found += [(layout.slot(bank, rank), layout.chunk) for bank in banks for rank in ranks]
    found += [(layout.result(bank, rank), layout.piece) for bank in banks for rank in ranks]
    found += [(layout.ring_start(a, b), 2 * LINE + layout.ring) for a in ranks for b in ranks]
    return found


@given(layouts)
def test_regions_are_apart_aligned_and_inside(layout: Layout) -> None:
    found = sorted(regions(layout))
    assert found[0][0] == 0
    for (start, nbytes), (following, _) in pairwise(found):
        assert start + nbytes <= following
    headers = {layout.header(bank, rank, 0) * WORD for bank in range(layout.banks) for rank in range(layout.size)}
    assert all(start % LINE == 0 for start, _ in found if start not in headers)
    start, nbytes = found[-1]
    assert start + nbytes == layout.total
    assert layout.total % WORD == 0


@given(layouts)
def test_slots_and_results_of_a_bank_are_at_one_stride(layout: Layout) -> None:
    for bank in range(layout.banks):
        for place, stride in ((layout.slot, layout.chunk), (layout.result, layout.piece)):
            starts = [place(bank, rank) for rank in range(layout.size)]
            assert all(b - a == stride for a, b in pairwise(starts))


@given(layouts)
def test_words_of_a_rank_are_apart_and_in_its_block(layout: Layout) -> None:
    for rank in range(layout.size):
        named = [layout.word(rank, word) for word in Word]
        numbers = [*named, layout.word(rank, Word.SLEEPING) + 1]
        assert len(set(numbers)) == len(numbers)
        assert all(rank * BLOCK <= number * WORD < (rank + 1) * BLOCK for number in numbers)


@given(layouts)
def test_a_record_is_one_pair_of_lines(layout: Layout) -> None:
    for rank in range(layout.size):
        start = layout.record(0, rank) * WORD
        assert start % PAIR == 0
        assert RecordWord.INLINE * WORD + layout.inline == RECORD * WORD == PAIR


@given(layouts, st.sampled_from([1, 2, 4, 8, 16]))
def test_a_result_has_room_for_any_ranks_part(layout: Layout, itemsize: int) -> None:
    elements = layout.chunk // itemsize
    assert -(-elements // layout.size) * itemsize <= layout.piece


def test_what_others_write_has_a_line_of_its_own() -> None:
    lines = [word * WORD // PAIR for word in (Word.REDUCED, Word.FINISHED, Word.SLEEPING, Word.STATE)]
    assert len(set(lines)) == len(lines)
    assert State.HERE == 0, "a new segment is zero"


@pytest.mark.parametrize(("nbytes", "to", "expected"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128)])
def test_rounded_up(nbytes: int, to: int, expected: int) -> None:
    assert rounded_up(nbytes, to) == expected
