"""What ranks tell each other about their bundles, and what an error makes of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm import ops
from asynccomm.backends.base import Submission
from asynccomm.backends.shm.manifest import ROW, ManifestEntry, ManifestRow, difference, listing, read_listing
from asynccomm.ops import Call, Op
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.signature import signature

F = torch.float32


def one(op: Op, seq: int, *members: tuple[int, Op]) -> Submission:
    work: Any = SimpleNamespace(seq=seq)
    submission = Submission(Call(op, (), (), None), work)
    submission.members, submission.numbers = tuple(op for _, op in members), tuple(number for number, _ in members)
    return submission


def reduced(n: int, dtype: torch.dtype = F, layout: int = 0) -> Op:
    return ops.AllReduce(dtype, n, ReduceOp.SUM, layout=layout)


def written(submissions: list[Submission], room: int = 1 << 20) -> list[int]:
    return listing(submissions, [signature(submission.op) for submission in submissions], room).tolist()


ISSUED = st.lists(
    st.one_of(
        st.builds(reduced, st.integers(0, 1 << 40), st.sampled_from([F, torch.int8]), st.integers(0, 0xFFFFFF)),
        st.builds(ops.Broadcast, st.just(F), st.integers(0, 9), st.integers(0, 99)),
        st.just(ops.Barrier()),
        st.just(ops.AllToAll(F, (1,), (1,))),
        st.just(ops.Parcels("gather_object", taker=3)),
    ),
    min_size=1,
    max_size=30,
)


@given(issued=ISSUED, merged=st.booleans())
def test_a_list_is_read_as_it_was_written(issued: list[Op], merged: bool) -> None:
    """In the order of the program, whatever was merged with what."""
    expected = [ManifestRow(number, signature(op)) for number, op in enumerate(issued)]
    if not merged:
        found = read_listing(written([one(op, number) for number, op in enumerate(issued)]))
        assert found == expected
        return
    by_kind: dict[type[Op], list[tuple[int, Op]]] = {}
    rest = []
    for number, op in enumerate(issued):
        root = getattr(op, "root", None)
        if isinstance(op, ops.AllReduce) or (
            isinstance(op, ops.Broadcast) and root == getattr(issued[0], "root", None)
        ):
            by_kind.setdefault(type(op), []).append((number, op))
        else:
            rest.append(one(op, number))
    several = [one(reduced(1, layout=5), members[0][0], *members) for members in by_kind.values()]
    assert read_listing(written([*rest, *several])) == expected


def test_merged_operations_are_listed_one_by_one_if_there_is_room() -> None:
    merged = reduced(5, layout=7)
    submissions = [one(merged, 3, (3, reduced(1)), (5, reduced(4))), one(ops.Barrier(), 4)]
    everything = [
        ManifestRow(3, signature(reduced(1))),
        ManifestRow(4, signature(ops.Barrier())),
        ManifestRow(5, signature(reduced(4))),
    ]
    words = written(submissions)
    assert read_listing(words) == everything
    assert read_listing(written(submissions, 8 * len(words))) == everything
    rows = written(submissions, 8 * len(words) - 1)
    assert read_listing(rows) == [ManifestRow(3, signature(merged)), ManifestRow(4, signature(ops.Barrier()))]
    assert 8 * len(rows) == 2 * ROW


def test_barriers_that_were_merged_are_listed_as_one() -> None:
    merged = one(ops.Barrier(), 3, (3, ops.Barrier()), (4, ops.Barrier()))
    assert read_listing(written([merged])) == [ManifestRow(3, signature(ops.Barrier()))]


def issued(total: int, *described: Op) -> ManifestEntry:
    return ManifestEntry(total, [ManifestRow(7 + i, signature(op)) for i, op in enumerate(described)])


A, B, C, D = reduced(1), reduced(2), ops.Barrier(), reduced(2, layout=5)


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (issued(3, A, B, C), issued(3, A, C, C), (8, "all_reduce(float32[2], SUM)", "barrier()")),
        (issued(3, A, B, C), issued(2, A, C), (8, "all_reduce(float32[2], SUM)", "barrier()")),
        (
            issued(2, A, B),
            issued(2, A, D),
            (8, "all_reduce(float32[2], SUM)", "all_reduce(float32[2] in pieces, SUM), divided otherwise"),
        ),
        (
            issued(3, A, B, C),
            issued(2, A, B),
            (7, "a batch of 3 from all_reduce(float32[1], SUM) on", "a batch of 2 from all_reduce(float32[1], SUM) on"),
        ),
        (
            issued(3, A, B, C),
            issued(1, A),
            (7, "a batch of 3 from all_reduce(float32[1], SUM) on", "all_reduce(float32[1], SUM) alone"),
        ),
        (issued(1, C), issued(2, B, C), (7, "barrier() alone", "a batch of 2 from all_reduce(float32[2], SUM) on")),
        (
            issued(3, C, C),
            issued(3, C, C),
            (7, "a batch of 3 from barrier() on", "a batch of 3 from barrier() on, divided otherwise"),
        ),
    ],
)
def test_differences(mine: ManifestEntry, theirs: ManifestEntry, expected: tuple[int, str, str]) -> None:
    assert difference(mine, theirs) == expected


def test_what_is_known_better_than_by_its_words_is_named_so() -> None:
    uneven = ops.AllGather(F, 4, layout=9, counts=(1, 4))
    mine = ManifestEntry(2, [ManifestRow(3, signature(uneven)), ManifestRow(4, signature(C))], (uneven, C))
    number, own, _ = difference(mine, issued(2, A, C))
    assert (number, own) == (3, "all_gather(float32[1, 4])")
