"""The tree of errors: each carries data, says it, and survives pickle."""

from __future__ import annotations

import asyncio
import copy
import pickle

import torch

from asynccomm import errors
from asynccomm.errors import (
    AbortedError,
    AsyncCommError,
    BackendError,
    BrokenError,
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    LeftOutError,
    MonitoredBarrierError,
    NotSentError,
    PayloadError,
    PayloadTypeError,
    PeerLostError,
    QuorumError,
    RendezvousError,
    StoreError,
    StoreProtocolError,
    StoreTimeoutError,
    WouldBlockError,
    describe_exception,
)
from asynccomm.ops import AllReduce
from asynccomm.ops.reduce_op import ReduceOp
from tests.cases import cases

OP = AllReduce(torch.float32, 7, ReduceOp.PREMUL_SUM(0.5))
TAGGED = AllReduce(torch.float32, 7, ReduceOp.SUM, label="x")
EXAMPLES: list[tuple[AsyncCommError, list[str]]] = [
    (AsyncCommError("something"), ["something"]),
    (ClosedError("comm 'a' is closed"), ["comm 'a' is closed"]),
    (WouldBlockError("use await"), ["use await"]),
    (
        NotSentError(OP, "grads", "it was only estimated"),
        ["all_reduce", "'grads'", "never sent: it was only estimated"],
    ),
    (PayloadError("rank 2 sent 7 bytes where 8 fit"), ["rank 2 sent 7 bytes"]),
    (PayloadTypeError("rank 2 sent a dict"), ["rank 2 sent a dict"]),
    (LeftOutError("grads", "it did not come in time"), ["'grads'", "without this rank", "did not come in time"]),
    (QuorumError("grads", 1, 3, "min_size is 2"), ["'grads'", "1 of its 3 ranks are left", "min_size is 2"]),
    (MonitoredBarrierError("grads", 1, (0, 3), 2.04), ["monitored_barrier", "'grads'", "rank 1", "[0, 3]", "2.0 s"]),
    (StoreError("refused"), ["refused"]),
    (StoreProtocolError("got b'HTTP'"), ["got b'HTTP'"]),
    (StoreTimeoutError("key 'k' after 3 s"), ["key 'k' after 3 s"]),
    (RendezvousError("rank 3 twice"), ["rank 3 twice"]),
    (BrokenError("broken"), ["broken"]),
    (PeerLostError(3, "connection reset"), ["rank 3", "connection reset"]),
    (
        CollectiveTimeoutError(OP, 12, "grads", 1, 30.04, 30.0, (2, 5)),
        ["all_reduce", "float32[7]", "PREMUL_SUM(0.5)", "#12", "'grads'", "rank 1", "30.0 s", "timeout 30 s", "[2, 5]"],
    ),
    (CollectiveTimeoutError(OP, 12, "grads", 1, 0.26, 0.25), ["0.3 s", "timeout 0.25 s"]),
    (
        CollectiveTimeoutError(
            OP, 12, "g", 1, 0.26, 0.25, (2, 5), (0, 1), ("called last barrier() #3", "is gone"), "train.py:7 in step"
        ),
        [
            ", timeout 0.25 s, called at train.py:7 in step; not arrived: ranks [2, 5]; arrived: ranks [0, 1]\n",
            "\n  rank 2: called last barrier() #3\n  rank 5: is gone",
        ],
    ),
    (CollectiveTimeoutError(OP, -1, "grads", 1, 0.26, 0.25, (1,)), ["still held back here", "coalesce()"]),
    (CollectiveTimeoutError(OP, -1, "grads", 1, 0.26, 0.25, (2,)), ["; rank 2 has not issued it"]),
    (CollectiveTimeoutError(TAGGED, -1, "grads", 1, 0.26, 0.25, (2, 3)), ["; ranks [2, 3] have not issued 'x'"]),
    (
        CollectiveMismatchError(4, 0, "barrier()", 6, "broadcast(int8[1], root=0)"),
        ["#4", "rank 0", "barrier()", "rank 6", "broadcast(int8[1], root=0)"],
    ),
    (
        CollectiveMismatchError(-1, 0, "barrier()", 6, "barrier(tag='x')"),
        ["an operation differs: rank 0 has barrier()"],
    ),
    (
        CollectiveMismatchError(4, 0, "barrier()", 6, "broadcast(int8[1], root=0)", "a.py:1 in f", "b.py:2 in g"),
        ["rank 0 has barrier() at a.py:1 in f, rank 6 has broadcast(int8[1], root=0) at b.py:2 in g"],
    ),
    (AbortedError(2, "ValueError: no"), ["rank 2", "ValueError: no"]),
    (BackendError("gloo: pair closed"), ["gloo: pair closed"]),
]
examples = cases("error, words", EXAMPLES, ids=[type(e).__name__ for e, _ in EXAMPLES])


def test_examples_cover_every_error() -> None:
    assert {type(e).__name__ for e, _ in EXAMPLES} == set(errors.__all__)


@examples
def test_text_names_everything(error: AsyncCommError, words: list[str]) -> None:
    for word in words:
        assert word in str(error)


@examples
def test_args_are_the_constructors(error: AsyncCommError, words: list[str]) -> None:
    again = type(error)(*error.args)
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)


@examples
@cases("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_survives_pickle(error: AsyncCommError, words: list[str], protocol: int) -> None:
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is type(error)
    assert again.args == error.args
    assert vars(again) == vars(error)
    assert str(again) == str(error)


@examples
def test_survives_copy(error: AsyncCommError, words: list[str]) -> None:
    for again in (copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)


def test_keywords_make_the_same_error() -> None:
    by_name = CollectiveTimeoutError(op=OP, seq=12, comm="g", rank=1, elapsed=2.0, timeout=1.0, missing=(3,))
    assert by_name.args == (OP, 12, "g", 1, 2.0, 1.0, (3,), (), (), "")
    assert (by_name.op, by_name.seq, by_name.comm, by_name.rank) == (OP, 12, "g", 1)
    assert (by_name.elapsed, by_name.timeout, by_name.missing) == (2.0, 1.0, (3,))
    assert (by_name.arrived, by_name.doing, by_name.site) == ((), (), "")
    lost = PeerLostError(rank=1, detail="gone")
    assert (lost.rank, lost.detail) == (1, "gone")
    aborted = AbortedError(rank=1, reason="enough")
    assert (aborted.rank, aborted.reason) == (1, "enough")
    differs = CollectiveMismatchError(seq=1, rank=0, op="a", other_rank=2, other_op="b")
    assert (differs.seq, differs.rank, differs.op, differs.other_rank, differs.other_op) == (1, 0, "a", 2, "b")
    assert (differs.site, differs.other_site) == ("", "")


@cases(
    "child, parents",
    [
        (AsyncCommError, (RuntimeError,)),
        (ClosedError, (AsyncCommError,)),
        (WouldBlockError, (AsyncCommError,)),
        (StoreError, (AsyncCommError,)),
        (StoreProtocolError, (StoreError,)),
        (StoreTimeoutError, (StoreError, TimeoutError)),
        (RendezvousError, (StoreError,)),
        (BrokenError, (AsyncCommError,)),
        (PeerLostError, (BrokenError,)),
        (CollectiveTimeoutError, (BrokenError, TimeoutError)),
        (CollectiveMismatchError, (BrokenError,)),
        (AbortedError, (BrokenError,)),
        (BackendError, (BrokenError,)),
    ],
)
def test_tree(child: type[Exception], parents: tuple[type[Exception], ...]) -> None:
    assert child.__bases__ == parents
    assert child.__name__ in (errors.__doc__ or "")


def test_timeout_without_missing_ranks_does_not_speak_of_them() -> None:
    assert "arrived" not in str(CollectiveTimeoutError(OP, 0, "g", 0, 1.0, 1.0))


def test_observed_belongs_to_one_error() -> None:
    seen, other = BackendError("a"), BackendError("b")
    seen.observed = True
    assert not other.observed
    assert not BackendError.observed


class Unreadable(Exception):
    def __str__(self) -> str:
        raise TypeError("a mistake in an error's text")


def test_the_description_of_an_error() -> None:
    assert describe_exception(ValueError("x")) == "ValueError: x"
    assert describe_exception(ValueError()) == "ValueError"
    assert describe_exception(asyncio.CancelledError()) == "CancelledError: it was cancelled"
    assert describe_exception(asyncio.CancelledError("SIGTERM")) == "CancelledError: SIGTERM"
    assert describe_exception(Unreadable()) == "Unreadable: <exception str() failed>"
