"""The lifecycle words: each rank writes its own, and reads those of the others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from asynccomm.backends.base import RankInfo
from asynccomm.backends.shm.layout import Layout, State, Word
from asynccomm.backends.shm.rank_words import RankWords

LAYOUT = Layout(3, 64 * 3, 4, 1024)


def ranks(words: memoryview, pids: Sequence[int] = (1, 2, 3)) -> list[RankWords]:
    members = [RankInfo(rank, "host", pid) for rank, pid in enumerate(pids)]
    return [RankWords(rank, LAYOUT, words, members) for rank in range(3)]


@pytest.fixture
def words() -> memoryview:
    return memoryview(bytearray(LAYOUT.total)).cast("Q")


@pytest.mark.parametrize("end", [State.LEFT, State.ABORTED])
def test_only_the_first_end_of_a_rank_counts(words: memoryview, end: State) -> None:
    one, other, _ = ranks(words)
    assert [other.state_of(rank) for rank in range(3)] == [State.HERE] * 3
    one.end(end)
    one.end(State.LEFT)
    one.end(State.ABORTED)
    assert [other.state_of(rank) for rank in range(3)] == [end, State.HERE, State.HERE]


def test_a_rank_withdraws_its_own_tensors(words: memoryview) -> None:
    ranks(words)[1].withdraw_tensors()
    assert [words[LAYOUT.word(rank, Word.WITHDRAWN)] for rank in range(3)] == [0, 1, 0]


def test_each_progress_thread_knows_the_cpus_of_the_others(words: memoryview) -> None:
    one, other, third = ranks(words)
    assert one.settle_on(0) == []
    assert other.settle_on(5) == [0]
    assert third.settle_on(7) == [0, 5]
    other.leave_cpu()
    assert one.settle_on(1) == [7]


def test_the_ranks_of_a_process_share_a_progress_thread(words: memoryview) -> None:
    one, other, third = ranks(words, pids=(1, 1, 3))
    assert (one.settle_on(4), other.settle_on(4)) == ([], [])
    assert third.settle_on(4) == [4, 4]
