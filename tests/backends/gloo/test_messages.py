"""Headers of messages; those that no sender writes are in ``tests/security/test_gloo_headers.py``."""

from __future__ import annotations

import pytest
import torch

from asynccomm.backends.gloo.messages import OFFERED, SHORT, Header, Kind, check, describe
from asynccomm.ops import MessageSpace
from asynccomm.ops.dtypes import CODES

FLOAT = CODES[torch.float32]


def test_a_header_survives_the_wire() -> None:
    header = Header(Kind.PARCEL_OFFER, MessageSpace.STREAMS.key(7), 2**63, 2**40, -5)
    assert Header.unpack_from(memoryview(b"x" + header.pack()), 1) == header


def test_the_kinds_of_offers() -> None:
    assert Kind.PARCEL + OFFERED == Kind.PARCEL_OFFER
    assert [kind for kind in range(1, 8) if Header(kind).offered] == [Kind.TENSOR_OFFER, Kind.PARCEL_OFFER]


@pytest.mark.parametrize(
    ("header", "nbytes", "text"),
    [
        (Header(Kind.TENSOR, 0, 0, 3, FLOAT), 12, "float32[3] of rank 1"),
        (Header(Kind.TENSOR_OFFER, 5, 9, SHORT, FLOAT), 4 * SHORT, f"float32[{SHORT}] of rank 1, tag=5"),
        (Header(Kind.PARCEL, MessageSpace.OBJECTS.key(2), 0, 10, 20), 30, "an object of 30 bytes of rank 1, tag=2"),
        (Header(Kind.PARCEL, MessageSpace.STREAMS.key(0), 0, 0, 0), 0, "an item of a stream of rank 1"),
        (Header(Kind.PARCEL, MessageSpace.HEADERS.key(4), 0, 5, 0), 5, "a tensor of rank 1, tag=4"),
    ],
    ids=str,
)
def test_bytes_and_words(header: Header, nbytes: int, text: str) -> None:
    assert check(1, header) == nbytes
    assert describe(1, header) == text
