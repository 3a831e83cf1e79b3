"""The board: what a rank may do when, and what it sees."""

import pytest
import torch

from asynccomm import ops
from asynccomm.backends.shm.board import CACHED_VIEWS, LARGEST, Board
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import Layout
from asynccomm.backends.shm.programs import Space
from asynccomm.errors import CollectiveMismatchError
from asynccomm.ops.reduce_op import ReduceOp

from .world import boards

BARRIER = ops.Barrier()


def test_a_slot_is_free_until_banks_are_full_and_again_when_all_have_finished() -> None:
    mine, theirs = boards(2, banks=2)
    assert mine.free(0)
    assert mine.free(1)
    assert not mine.free(2)
    mine.finish(0)
    assert not mine.free(2)
    theirs.finish(0)
    assert mine.free(2)
    assert not mine.free(3)


def test_posted_is_all_that_are_asked_for() -> None:
    first, second, third = boards(3)
    second.begin(0, BARRIER, 1)
    third.begin(0, BARRIER, 1)
    first.begin(0, BARRIER, 1)
    first.post(0)
    assert first.posted(0, [])
    assert not first.posted(0, [1, 2])
    second.post(0)
    assert first.posted(0, [1])
    assert not first.posted(0, [2])
    assert not first.posted(0, [1, 2])
    third.post(0)
    assert first.posted(0, [1, 2])
    assert not first.posted(1, [1, 2])


def test_results_are_seen_apart_from_posts() -> None:
    mine, theirs = boards(2)
    theirs.post(0)
    assert not mine.results_posted(0)
    theirs.post_result(0)
    assert mine.results_posted(0)


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_another_collective_is_a_mismatch(ranks: list[int]) -> None:
    mine, theirs = boards(2)
    mine.begin(4, BARRIER, 1)
    theirs.begin(4, ops.AllReduce(torch.int64, 3, ReduceOp.SUM), 1)
    mine.post(0)
    theirs.post(0)
    with pytest.raises(CollectiveMismatchError, match="operation #4 differs: rank 0 has barrier") as caught:
        mine.posted(0, ranks)
    assert caught.value.other_op == "all_reduce(int64[3], SUM)"


def test_a_difference_before_is_told_apart() -> None:
    """A rank that gives does not wait for the others, so it may notice the difference later."""
    mine, theirs = boards(2)
    for board, n in ((mine, 3), (theirs, 4)):
        board.begin(0, ops.Gather(torch.float32, n, 0), 1)
        assert board.begin(1, BARRIER, 1) == 1
        board.post(1)
    with pytest.raises(CollectiveMismatchError, match="and the ranks differed in a collective before it") as caught:
        mine.posted(1, [1])
    assert (caught.value.seq, caught.value.op) == (1, "barrier()")


def test_behind_is_who_has_not_come_to_the_end() -> None:
    mine, theirs = boards(2)
    mine.begin(0, BARRIER, 2)
    assert mine.behind(1)
    theirs.post(0)
    assert mine.behind(1)
    theirs.post(1)
    assert not mine.behind(1)


def test_a_collective_is_extended_while_it_is_under_way() -> None:
    mine, theirs = boards(2)
    assert mine.begin(0, BARRIER, 1) == 0
    theirs.post(0)
    assert not mine.behind(1)
    mine.extend(2)
    assert mine.behind(1)
    theirs.post(1)
    theirs.post(2)
    assert not mine.behind(1)
    assert mine.begin(1, BARRIER, 1) == 3


def test_headers() -> None:
    mine, theirs = boards(2, chunk=256)
    theirs.put(5, 1, (7, LARGEST, 3))
    assert mine.get(5, 1, 1) == (7, LARGEST, 3)
    assert mine.get(1, 1, 1) == (7, LARGEST, 3)  # the same bank
    assert mine.get(5, 1, 0) == mine.get(5, 0, 1) == mine.get(6, 1, 1) == (0, 0, 0)


def test_own_mismatch_has_the_whole_operation() -> None:
    mine, _ = boards(2)
    op = ops.AllToAll(torch.float32, (1, 2), (1, 3))
    mine.begin(3, op, 1)
    error = mine.mismatch(1, "something else")
    assert (error.seq, error.rank, error.op, error.other_rank, error.other_op) == (3, 0, str(op), 1, "something else")


def test_memory_of_the_segment_is_the_same_on_all_ranks() -> None:
    mine, theirs = boards(2, chunk=256)
    for space in (Space.SLOT, Space.RESULT, Space.RECORD):
        mine.elements(space, torch.float32, 1, 0, 0, 12).copy_(torch.tensor([1.0, 2.0, 3.0]))
        assert theirs.elements(space, torch.float32, 1, 0, 4, 8).tolist() == [2, 3]
        assert theirs.elements(space, torch.float32, 1 + 4, 0, 0, 12).tolist() == [1, 2, 3]  # the same bank again
        assert theirs.elements(space, torch.float32, 2, 0, 0, 12).tolist() == [0, 0, 0]
        found = theirs.elements(space, torch.float32, 1, 0, 4, 8).data_ptr()
        assert theirs.address(space, 1, 0) + 4 == found


def test_cached_views_are_bounded() -> None:
    board = boards(1, chunk=8192)[0]
    for n in range(2 * CACHED_VIEWS):
        assert board.elements(Space.SLOT, torch.uint8, 0, 0, n % 7, n % 8192).numel() == n % 8192
    assert len(board._elements) <= CACHED_VIEWS


def test_others_hear_of_what_is_posted_and_finished() -> None:
    told: list[int] = []
    layout = Layout(1, 64, 4, 64)
    memory = bytearray(layout.total)
    words, data = memoryview(memory).cast("Q"), torch.frombuffer(memory, dtype=torch.uint8)
    board = Board(0, layout, words, data, Fence(), lambda: told.append(1))
    board.post(0)
    board.post_result(0)
    board.finish(0)
    assert len(told) == 3
