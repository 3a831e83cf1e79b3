"""What a GPU comm hears over its side channel: heads, answers to offers, and messages of the wrong size.

On simulated devices, which are strict where real ones would hang or write somewhere else.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
import torch

from asynccomm import BackendError, BrokenError, Comm
from asynccomm.backends.nccl.envelopes import HeaderReceiver, packed
from asynccomm.ops import Call, MessageSpace, Parcel, SendParcel
from asynccomm.ops.dtypes import CODES
from tests.cases import cases
from tests.sampling import amount

from ..backends.nccl.conftest import World, simulated, unexplained, world  # noqa: F401, TID252
from ..backends.nccl.test_transfers import Ends, ends  # noqa: F401, TID252
from .mutations import little_memory, mutated

BYTE = CODES[torch.uint8]


@cases("seed", range(amount(20, 8)))
def test_heads_that_are_almost_right(seed: int) -> None:
    choose = random.Random(seed)
    along = torch.ones(10, dtype=torch.uint8)
    right = packed(4, b"head", [(along, False), (torch.ones(8, dtype=torch.uint8), True)]).head
    with little_memory():
        for _ in range(300):
            inbox = HeaderReceiver()
            head = mutated(right, choose) if choose.random() < 0.8 else choose.randbytes(choose.randrange(60))
            try:
                (room,) = inbox(1, head, {1: 10})
            except BackendError:
                continue
            envelope = inbox.envelopes[1]
            assert len(room) == 10
            assert sum(nbytes for nbytes, on_device in envelope.segments if not on_device) == 10
            assert envelope.nbytes >= 10


def raw(comm: Comm, head: bytes, tensors: tuple[torch.Tensor, ...] = ()) -> None:
    call = Call(SendParcel("raw", 1, 0, MessageSpace.HEADERS), (), (), None, parcels=(Parcel(head, tensors),))
    backend: Any = comm._session.backend
    backend._side.submit(call, lambda error: None)


def head_of(numel: int, *segments: tuple[int, bool]) -> bytes:
    table = b"".join([struct.pack("<Q", nbytes << 1 | on_device) for nbytes, on_device in segments])
    return struct.pack("<QI", 0, len(segments)) + table + struct.pack("<IQQ", BYTE, numel, 0)


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize(
    ("head", "along"),
    [
        (head_of(8), 0),
        (head_of(8, (7, True)), 0),
        (head_of(8, (9, True)), 0),
        (head_of(8, (2**62, True)), 0),
        (head_of(8, (8, False)), 8),
        (head_of(8, (4, True), (4, True)), 0),
        (head_of(8, (8, True), (0, True)), 0),
        (head_of(0, (8, True)), 0),
    ],
    ids=["nothing", "less", "more", "much more", "from the host", "in two", "and nothing else", "for nothing"],
)
async def test_a_message_whose_segments_are_not_its_elements(world: World, head: bytes, along: int) -> None:  # noqa: F811
    """Both ends would call NCCL with different sizes, which it does not forgive."""
    async with world(2, timeout=20) as (giver, taker):
        raw(giver, head, (torch.ones(along, dtype=torch.uint8),) if along else ())
        numel = struct.unpack("<Q", head[-16:-8])[0]
        with pytest.raises(BackendError, match=r"rank 0 offers \d+ bytes in \d+ segments as send"):
            await taker.recv(torch.ones(numel, dtype=torch.uint8), 0)
        with pytest.raises(BrokenError):
            await giver.recv(torch.ones(1), 1)


@pytest.mark.parametrize("accepted", [False, True])
async def test_who_answers_must_be_who_was_asked(ends: Ends, accepted: bool) -> None:  # noqa: F811
    """It would get what is meant for another rank, or have it thrown away."""
    giver, _, _ = await ends(3)
    half = giver.give(1, [torch.ones(8, dtype=torch.uint8)])
    verdict = struct.pack("<Q?", half.number, accepted) + (b"x" * 128 if accepted else b"")
    with pytest.raises(BackendError, match="rank 2 sent a wrong answer to an offer"):
        giver.transfers._judge(2, verdict)
    assert not half.over
    giver.transfers._judge(1, struct.pack("<Q?", half.number, False))
    assert half.over


@pytest.mark.parametrize("seed", range(amount(20, 8)))
async def test_answers_that_are_almost_right(ends: Ends, seed: int) -> None:  # noqa: F811
    choose = random.Random(seed)
    giver, _ = await ends(2)
    for _ in range(50):
        half = giver.give(1, [torch.ones(8, dtype=torch.uint8)])
        verdict = mutated(struct.pack("<Q?", half.number, False), choose)
        if verdict[8:9] not in (b"", b"\0"):
            continue  # that accepts
        try:
            giver.transfers._judge(1, verdict)
        except BackendError as exc:
            assert "rank 1 sent a wrong answer to an offer" in str(exc)
