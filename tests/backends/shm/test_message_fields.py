"""The fields of first frames: those of a send, and those that no rank can have sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asynccomm.backends.base import Submission
from asynccomm.backends.shm.endpoint import Kept
from asynccomm.backends.shm.message_fields import check_first, describe, outgoing, tag_of
from asynccomm.errors import BackendError
from asynccomm.ops import Call, MessageSpace, Parcel, Recv, Send, SendParcel
from asynccomm.ops.dtypes import CODES
from asynccomm.ops.parcels import MAX_HEAD
from asynccomm.ops.validation import CommInfo

GROUP = CommInfo("test", 0, 2, torch.device("cpu"))
OBJECTS, STREAMS = MessageSpace.OBJECTS.key(3), MessageSpace.STREAMS.key(3)
WORK: Any = None


def test_a_tensor_and_its_receive_have_one_tag() -> None:
    tensor = torch.arange(6, dtype=torch.int16)
    send = Submission(Send.of(GROUP, tensor, 1, 3), WORK)
    message = outgoing(send)
    assert (message.submission, message.tag, message.nbytes) == (send, 3, 12)
    assert (message.extra, message.length) == (CODES[torch.int16], 6)
    assert message.parts[0].data_ptr() == tensor.data_ptr()  # type: ignore[union-attr]
    receive = Recv.of(GROUP, tensor, None, 3).op
    assert isinstance(receive, Recv)
    assert tag_of(receive) == 3


def test_a_parcel_has_a_tag_of_its_channel() -> None:
    op = SendParcel("send_object", 1, 3, MessageSpace.OBJECTS)
    parcel = Parcel(b"head", (torch.ones(2), torch.ones(1)))
    message = outgoing(Submission(Call(op, (), (), None, parcels=(parcel,)), WORK))
    assert (message.tag, message.extra, message.length, message.nbytes) == (OBJECTS, 4, 12, 16)
    assert message.parts[0] == b"head"
    assert OBJECTS not in (3, STREAMS)


@pytest.mark.parametrize(
    ("tag", "extra", "length", "nbytes", "error"),
    [
        (3, CODES[torch.float32], 2, 4, r"rank 1 sent 4 bytes for torch.float32\[2\]"),
        (OBJECTS, 4, 12, 15, "rank 1 sent 15 bytes for a parcel of 4 and 12"),
        (OBJECTS, MAX_HEAD + 1, 0, None, f"rank 1 sends a head of {MAX_HEAD + 1} bytes"),
    ],
)
def test_lengths_that_contradict_each_other(tag: int, extra: int, length: int, nbytes: int | None, error: str) -> None:
    with pytest.raises(BackendError, match=error):
        check_first(1, tag, extra, length, nbytes)


def test_lengths_that_fit() -> None:
    check_first(1, 3, CODES[torch.float32], 2, 8)
    check_first(1, 3, CODES[torch.float32], 1 << 40)
    check_first(1, 3, 250, 2, 8)  # an unknown dtype is named when the message is matched
    check_first(1, OBJECTS, 4, 12, 16)
    check_first(1, OBJECTS, MAX_HEAD, 1 << 40)


@pytest.mark.parametrize(
    ("tag", "kept", "text"),
    [
        (0, Kept(CODES[torch.float32], 2, bytes(8)), "float32[2] of rank 1"),
        (3, Kept(CODES[torch.int64], 1, bytes(8)), "int64[1] of rank 1, tag=3"),
        (OBJECTS, Kept(4, 5, bytes(9)), "an object of 9 bytes of rank 1, tag=3"),
        (STREAMS, Kept(4, 5, bytes(9)), "an item of a stream of rank 1, tag=3"),
    ],
)
def test_an_unexpected_message_in_words(tag: int, kept: Kept, text: str) -> None:
    assert describe(1, tag, kept) == text
