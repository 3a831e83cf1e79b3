"""On which terms objects are taken."""

import pytest
import torch

from asynccomm.comm.methods.parcels import MAX_BYTES, ObjectReceiver, ReceivePolicy
from asynccomm.errors import PayloadError
from asynccomm.serialization.objects import PayloadKind, encode


def test_terms_are_checked() -> None:
    assert ReceivePolicy.of(True, MAX_BYTES) == (True, 1 << 32)
    assert ReceivePolicy.of(False, 0) == (False, 0)
    for trust in (None, 0, 1, "no"):
        with pytest.raises(TypeError, match=f"weights_only must be True or False, got {trust!r}"):
            ReceivePolicy.of(trust, 1)
    for limit in (None, 1.5, True, "1"):
        with pytest.raises(TypeError, match=f"max_bytes must be an integer, got {limit!r}"):
            ReceivePolicy.of(True, limit)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_bytes must not be negative, got -1"):
        ReceivePolicy.of(True, -1)


def test_the_limit_is_looked_at_before_anything_else() -> None:
    parcel = encode(PayloadKind.OBJECT, torch.ones(1000))
    size = len(parcel.head) + parcel.nbytes
    inbox = ObjectReceiver("recv_object", 0, PayloadKind.OBJECT, ReceivePolicy(True, size - 1))
    with pytest.raises(PayloadError, match=f"rank 1 sent {size} bytes, but max_bytes is {size - 1}"):
        inbox(1, parcel.head, {1: parcel.nbytes})
    assert not inbox.incoming
    inbox = ObjectReceiver("recv_object", 0, PayloadKind.OBJECT, ReceivePolicy(True, size))
    assert [t.nbytes for t in inbox(1, parcel.head, {1: parcel.nbytes})] == [4000]


def test_another_kind_is_told_of() -> None:
    missed = []
    inbox = ObjectReceiver(
        "recv_object", 2, PayloadKind.OBJECT, ReceivePolicy(True, 1000), lambda *args: missed.append(args)
    )
    head = encode(PayloadKind.OBJECT_LIST, [1]).head
    with pytest.raises(PayloadError, match=r"recv_object\(\) of rank 2 got what rank 1 sent by send_object_list\(\)"):
        inbox(1, head, {1: 0})
    assert missed == [(1, head)]


def test_own_and_others_in_rank_order() -> None:
    inbox = ObjectReceiver("all_gather_object", 1, PayloadKind.OBJECT, ReceivePolicy(True, 1000))
    tensor = torch.zeros(2)
    parcel = encode(PayloadKind.OBJECT, tensor)
    tensor.fill_(3)  # by an operation before it
    inbox.begin(parcel, [parcel], ())
    tensor.fill_(5)
    for source in (2, 0):
        inbox(source, encode(PayloadKind.OBJECT, source).head, {source: 0})
    zero, own, two = inbox.all()
    assert (zero, two) == (0, 2)
    assert own.tolist() == [3, 3]
