"""What ranks tell each other once they have seen that they differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from asynccomm import BackendError, CollectiveMismatchError, ReduceOp
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo import disputes
from asynccomm.backends.gloo.disputes import Dispute
from asynccomm.ops import AllReduce, AllToAll, Barrier, Call, Op
from tests.backends.gloo.network import Network


def submission(op: Op, number: int = 7) -> Submission:
    class Numbered:
        seq = number

    work: Any = Numbered()
    return Submission(Call(op, (), (), None), work)


def errors_of(submissions: Sequence[Submission], sides: tuple[int, int] | None) -> list[Exception]:
    size = len(submissions)
    network = Network()
    errors: SimpleQueue[tuple[int, Exception]] = SimpleQueue()
    for rank in range(size):

        def end(error: Exception, rank: int = rank) -> None:
            errors.put((rank, error))

        Dispute(network.of(rank), rank, size, submissions[rank], sides, end).begin("dispute")
    return [error for _, error in sorted([errors.get(timeout=20) for _ in range(size)], key=itemgetter(0))]


def test_all_come_to_the_same_error() -> None:
    total = AllReduce(torch.float32, 3, ReduceOp.SUM)
    for error in errors_of([submission(op) for op in (total, total, Barrier(label="x" * 500))], (0, 2)):
        assert isinstance(error, CollectiveMismatchError)
        assert error.args[:5] == (7, 0, str(total), 2, str(Barrier(label="x" * 500)))


def test_a_batch_is_described_as_it_was_called() -> None:
    batch = [submission(Barrier(), 7), submission(AllReduce(torch.float32, 3, ReduceOp.SUM), 8)]
    batch[0].batch = batch, 0
    for error in errors_of([batch[0], submission(Barrier())], (0, 1)):
        assert isinstance(error, CollectiveMismatchError)
        longer = "a batch of 2 from barrier() on, with #8 all_reduce(float32[3], SUM)"
        assert error.args[:5] == (7, 0, longer, 1, "barrier() alone")


def test_the_pair_that_does_not_fit_is_named() -> None:
    ops = [
        AllToAll(torch.float32, (0, 1, 2), (0, 1, 1)),
        AllToAll(torch.float32, (1, 0, 3), (1, 0, 4)),
        AllToAll(torch.float32, (1, 4, 0), (2, 9, 0)),
    ]
    for error in errors_of([submission(op) for op in ops], None):
        assert isinstance(error, CollectiveMismatchError)
        assert error.args[:5] == (7, 1, str(ops[1]), 2, str(ops[2]))


def test_ranks_that_fit_after_all() -> None:
    ops = [AllToAll(torch.float32, (0, 1), (0, 1)), AllToAll(torch.float32, (1, 0), (1, 0))]
    for error in errors_of([submission(op) for op in ops], None):
        assert isinstance(error, BackendError)
        assert "have announced others" in str(error)
    for error in errors_of([submission(op) for op in (ops[0], Barrier())], None):
        assert isinstance(error, BackendError)
        assert "not all ranks have named theirs" in str(error)


CALLED = [[0, "barrier()", [0, 0]]]


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[",
        b"\xff" * 9,
        json.dumps([]).encode(),
        json.dumps([[], [], "", [], []]).encode(),
        json.dumps([CALLED, [], "", ["x"], []]).encode(),
        json.dumps([[["x", "barrier()", [0, 0]]], [], "", [], []]).encode(),
        json.dumps([CALLED, 3, "", [], []]).encode(),
        b"[" * 100_000,
    ],
)
def test_what_is_no_description_is_refused(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter([said or b"x", json.dumps([CALLED, [], "", [], []]).encode()])
    monkeypatch.setattr(disputes, "_said", lambda submission: next(texts))
    for error in errors_of([submission(Barrier())] * 2, (0, 1)):
        assert isinstance(error, BackendError)
        assert "its description is corrupt" in str(error)


def test_long_descriptions_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disputes, "MOST", 200)
    batch = [submission(Barrier(), number) for number in range(100)]
    batch[0].batch = batch, 0
    assert len(disputes._said(batch[0])) <= 200
