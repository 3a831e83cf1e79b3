"""The fields of a message's first frame: its tag, and two numbers for its form (``extra`` and ``length``).

The tag includes the channel, so a tensor never matches the receive of a parcel. A tensor's numbers are the code of its
dtype and its elements; a parcel's are the bytes of its head and of its payload.
"""

from __future__ import annotations

from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.shm.endpoint import Kept, Outgoing
from asynccomm.errors import BackendError
from asynccomm.ops import MessageSpace, PeerOp, PeerParcel, Send, SendParcel
from asynccomm.ops.dtypes import BY_CODE, CODES
from asynccomm.ops.parcels import MAX_HEAD
from asynccomm.ops.validation import MAX_TAG

assert MessageSpace.TENSORS.key(MAX_TAG) == MAX_TAG  # larger tags are those of parcels


def tag_of(op: PeerOp) -> int:
    """The tag in frames: an operation's tag and channel as one number."""
    assert not isinstance(op, PeerParcel) or op.channel is not MessageSpace.TENSORS, f"{op} would meet tensors"
    return op.key


def outgoing(submission: Submission) -> Outgoing:
    """The message of a send."""
    op = submission.op
    if isinstance(op, Send):
        return Outgoing(submission, op.tag, CODES[op.dtype], op.numel, submission.inputs, op.nbytes)
    assert isinstance(op, SendParcel)
    (parcel,) = submission.parcels
    head, payload = len(parcel.head), parcel.nbytes
    assert head <= MAX_HEAD, f"a head of {head} bytes, of which {MAX_HEAD} are taken"
    parts: tuple[Tensor | bytes, ...] = (parcel.head, *parcel.tensors)
    return Outgoing(submission, tag_of(op), head, payload, parts, head + payload)


def check_first(peer: int, tag: int, extra: int, length: int, nbytes: int | None = None) -> None:
    """Check the lengths in the first frame of a message. Raises BackendError.

    Args:
        nbytes: bytes of the content if the frame holds all of it.
    """
    if tag > MAX_TAG:
        if extra > MAX_HEAD:
            raise BackendError(f"rank {peer} sends a head of {extra} bytes, of which {MAX_HEAD} are taken")
        if nbytes is not None and extra + length != nbytes:
            raise BackendError(f"rank {peer} sent {nbytes} bytes for a parcel of {extra} and {length}")
    elif nbytes is not None:
        dtype = BY_CODE.get(extra)
        if dtype is not None and length * dtype.itemsize != nbytes:
            raise BackendError(f"rank {peer} sent {nbytes} bytes for {dtype}[{length}]")


def describe(source: int, tag: int, message: Kept) -> str:
    """An unexpected message in words."""
    space, number = MessageSpace.of_key(tag)
    content = "an item of a stream"
    if space is MessageSpace.TENSORS:
        content = f"{str(BY_CODE[message.extra]).removeprefix('torch.')}[{message.length}]"
    elif space is MessageSpace.OBJECTS:
        content = f"an object of {len(message.data)} bytes"
    elif space is MessageSpace.HEADERS:
        content = "a tensor"
    return f"{content} of rank {source}" + (f", tag={number}" if number else "")
