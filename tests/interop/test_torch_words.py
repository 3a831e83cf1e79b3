"""Errors in torch's words; those that need several ranks are in test_torch_collectives and test_torch_backend."""

from __future__ import annotations

from datetime import timedelta

import pytest

from asynccomm import MonitoredBarrierError
from asynccomm.interop.torch_words import check_split, monitored_barrier_failed

SECOND = timedelta(seconds=1)


def words(rank: int, missing: tuple[int, ...], limit: timedelta = SECOND, all_ranks: bool = False) -> str:
    error = MonitoredBarrierError("comm", 0, missing, 1.0)
    text = str(monitored_barrier_failed(error, rank, limit, all_ranks))
    return text.replace(str(error), "CAUSE")


@pytest.mark.parametrize(
    ("missing", "all_ranks", "text"),
    [
        ((1,), False, "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms\n Original exception: \nCAUSE"),
        ((1,), True, "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1000 ms"),
        ((1, 2), True, "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 1000 ms"),
        ((0,), False, "Rank 0 timed out in monitoredBarrier after 1000 ms.\n Original exception: \nCAUSE"),
    ],
)
def test_rank_0_names_the_ranks(missing: tuple[int, ...], all_ranks: bool, text: str) -> None:
    assert words(0, missing, all_ranks=all_ranks) == text


@pytest.mark.parametrize("missing", [(1,), (0,), (0, 1)])
def test_other_ranks_point_to_rank_0(missing: tuple[int, ...]) -> None:
    assert words(2, missing) == (
        "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
        "Please check rank 0 logs for faulty rank.\n Original exception: \nCAUSE"
    )


def test_no_time_at_all() -> None:
    assert words(0, (1,), timedelta(microseconds=1)) == (
        "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 0 ms\n Original exception: \n"
        "Rank 0 timed out in monitoredBarrier after 0 ms.\nCAUSE"
    )


def test_ranks_of_a_split() -> None:
    check_split([2, 0], 3)
    for ranks, match in (([], "cannot be empty"), ([1, 1], "duplicates"), ([3], "must be ranks"), ([-1], "must be")):
        with pytest.raises(RuntimeError, match=match):
            check_split(ranks, 3)
