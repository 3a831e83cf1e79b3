"""Errors as news: what another rank makes of them."""

import json

import pytest
import torch

from asynccomm import (
    AbortedError,
    BackendError,
    BrokenError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)
from asynccomm.comm.wire_errors import decode_error, encode_error
from asynccomm.control.transport.framing import MESSAGE_BYTES, encode
from asynccomm.ops import AllReduce
from asynccomm.ops.reduce_op import ReduceOp
from tests.cases import cases


def heard(error: BrokenError) -> BrokenError | None:
    return decode_error({"rank": 2, "number": 0, **json.loads(json.dumps(encode_error(error)))})


@cases(
    "error",
    [
        AbortedError(2, "enough"),
        PeerLostError(1, "its process ended"),
        CollectiveMismatchError(3, 0, "barrier()", 1, "all_reduce(float32[2], SUM)"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_these_are_the_same_everywhere(error: BrokenError) -> None:
    again = heard(error)
    assert type(again) is type(error)
    assert again.args == error.args


def test_an_error_of_the_transport_names_the_reporting_rank() -> None:
    again = heard(BackendError("the cable is cut"))
    assert type(again) is BackendError
    assert str(again) == "rank 2 reports: BackendError: the cable is cut"


def test_a_deadline_is_an_abort_by_the_rank_that_had_it() -> None:
    op = AllReduce(torch.float32, 2, ReduceOp.SUM)
    again = heard(CollectiveTimeoutError(op, 7, "main", 2, 1.5, 1.0, (0,)))
    assert type(again) is AbortedError
    assert again.rank == 2
    assert again.reason.startswith("CollectiveTimeoutError: all_reduce(float32[2], SUM) #7 on comm 'main', rank 2")


def test_other_news_are_no_error() -> None:
    assert decode_error({"rank": 1, "number": 4, "kind": "roll call"}) is None


BAD = [
    {"kind": "abort"},
    {"kind": "abort", "reason": 5},
    {"kind": "lost", "reason": "x"},
    {"kind": "lost", "lost": "1", "reason": "x"},
    {"kind": "lost", "lost": True, "reason": "x"},
    {"kind": "lost", "lost": -1, "reason": "x"},
    {"kind": "lost", "lost": 1, "reason": None},
    {"kind": "mismatch"},
    {"kind": "mismatch", "sides": 7},
    {"kind": "mismatch", "sides": []},
    {"kind": "mismatch", "sides": ["3", 0, "a", 1, "b"]},
    {"kind": "mismatch", "sides": [3, 0, "a", 1]},
    {"kind": "mismatch", "sides": [3, 0, "a", 1, None]},
    {"kind": "mismatch", "sides": [3, 0, "a", 1, "b", "c", "d", "e"]},
    {"kind": "transport", "reason": {}},
]


@cases("item", BAD, ids=str)
def test_an_error_that_cannot_be_read_is_one_of_the_transport(item: dict[str, object]) -> None:
    found = decode_error({**item, "rank": 2})
    assert type(found) is BackendError
    assert str(found) == f"rank 2 reports an error that cannot be read, of the kind {item['kind']!r}"


@pytest.mark.parametrize("kind", [None, 5, ["abort"], {}])
def test_news_of_nothing_are_passed_over(kind: object, caplog: pytest.LogCaptureFixture) -> None:
    assert decode_error({"rank": 2, "kind": kind, "reason": "x"}) is None
    assert decode_error({"rank": 2}) is None
    assert "rank 2 sent a message without a kind" in caplog.text


def test_long_reasons_are_cut_off() -> None:
    found = decode_error({"rank": 2, "kind": "abort", "reason": "x" * (1 << 20)})
    assert len(str(found)) < 1 << 15


@cases(
    "error",
    [
        AbortedError(2, "x" * (5 << 20)),
        PeerLostError(1, "x" * (5 << 20)),
        CollectiveMismatchError(3, 0, "x" * (5 << 20), 1, "x" * (5 << 20), "x" * (5 << 20), "x" * (5 << 20)),
        BackendError("x" * (5 << 20)),
        BrokenError("x" * (5 << 20)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_message_about_an_error_with_long_texts_fits_into_a_frame(error: BrokenError) -> None:
    assert len(encode(encode_error(error))) < MESSAGE_BYTES // 8
    assert heard(error) is not None
