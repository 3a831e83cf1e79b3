"""How a difference between ranks is put into words."""

from typing import Any

import torch

from asynccomm import ReduceOp
from asynccomm.backends.base import Submission
from asynccomm.backends.differences import Issued, difference, issued, misfit
from asynccomm.ops import AllReduce, Barrier, Call, Op


def submission(op: Op, number: int = 0) -> Submission:
    class Numbered:
        seq = number

    work: Any = Numbered()
    return Submission(Call(op, (), (), None), work)


def batch(*ops: Op, first: int = 3) -> Issued:
    return issued([submission(op, first + i) for i, op in enumerate(ops)])


def total(n: int, layout: int = 0) -> AllReduce:
    return AllReduce(torch.float32, n, ReduceOp.SUM, layout=layout)


def test_the_first_that_differs_is_named() -> None:
    error = difference(0, batch(total(1), total(2), total(3)), 2, batch(total(1), total(5), Barrier()))
    assert error.args[:5] == (4, 0, "all_reduce(float32[2], SUM)", 2, "all_reduce(float32[5], SUM)")


def test_one_that_is_only_divided_otherwise() -> None:
    error = difference(0, batch(total(4, 7)), 1, batch(total(4, 8)))
    text = "all_reduce(float32[4] in pieces, SUM)"
    assert error.args[:5] == (3, 0, text, 1, f"{text}, of other sizes or dtypes")


def test_batches_of_other_lengths() -> None:
    error = difference(0, batch(Barrier(), Barrier()), 1, batch(Barrier()))
    sides = "a batch of 2 from barrier() on, with #4 barrier()", "barrier() alone"
    assert error.args[:5] == (3, 0, sides[0], 1, sides[1])


def test_the_first_that_only_the_longer_batch_has_is_named() -> None:
    error = difference(0, batch(total(1), total(2)), 1, batch(total(1), total(2), total(7), Barrier()))
    sides = (f"a batch of {n} from all_reduce(float32[1], SUM) on, with" for n in (2, 4))
    assert error.args[:5] == (3, 0, f"{next(sides)}out it", 1, f"{next(sides)} #5 all_reduce(float32[7], SUM)")


def test_what_was_merged_otherwise() -> None:
    merged = submission(total(3, 9), 3)
    merged.members, merged.numbers = (total(1), total(2)), (3, 4)
    error = difference(0, issued([merged]), 1, batch(total(1), total(2)))
    assert error.op.endswith("on, merged into all_reduce(float32[3] in pieces, SUM)")
    assert error.other_op.endswith("on, merged into all_reduce(float32[1], SUM), all_reduce(float32[2], SUM)")


def test_members_come_in_the_order_of_their_numbers() -> None:
    merged, other = submission(total(3, 9), 3), submission(Barrier(), 4)
    merged.members, merged.numbers = (total(1), total(2)), (3, 5)
    assert [(called.number, called.text) for called in issued([merged, other]).called] == [
        (3, "all_reduce(float32[1], SUM)"),
        (4, "barrier()"),
        (5, "all_reduce(float32[2], SUM)"),
    ]


def test_misfits() -> None:
    assert misfit([[0, 1], [2, 0]], [[0, 2], [1, 0]]) is None
    assert misfit([[0, 1], [2, 0]], [[0, 3], [1, 0]]) == (1, 0)
