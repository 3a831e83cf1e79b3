"""Parcels over two levels: bundled, delivered to the right ranks, refused without harm."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from asynccomm.backends.hierarchical.bundles import ALL, Item, bundle, unbundled
from asynccomm.errors import BackendError, CollectiveMismatchError, PayloadError
from asynccomm.ops import AllToAll, Call, Parcel, Parcels
from asynccomm.ops.validation import CommInfo
from tests.cases import cases

from .world import WORLDS, World

HOSTS = pytest.mark.parametrize("hosts", WORLDS)


class Mail:
    """The parcels that a rank receives."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[bytes, Tensor]] = {}
        self.lengths: Mapping[int, int] = {}

    def place(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        self.lengths = dict(lengths)
        memory = torch.empty(lengths[source], dtype=torch.uint8)
        self.found[source] = head, memory
        return [memory]


def parcel(source: int, destination: int) -> Parcel:
    length = 3 * source + destination
    tensors = (torch.full((length,), source, dtype=torch.uint8), torch.full((2,), destination, dtype=torch.uint8))
    return Parcel(json.dumps([source, destination]).encode(), tensors)


@HOSTS
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("end", [None, "giver", "taker"])
async def test_parcels_reach_their_receivers(hosts: str, shared: bool, end: str | None) -> None:
    world = World(WORLDS[hosts])
    size = world.size
    for root in range(size) if end else (None,):
        if end == "taker" and not shared:
            continue  # there is no such operation
        op = Parcels("test", shared=shared, **({} if end is None else {end: root}))
        mails = [Mail() for _ in range(size)]

        def make(group: CommInfo, op: Parcels = op, mails: list[Mail] = mails) -> Call:
            given: tuple[Parcel, ...] = ()
            if op.gives(group.rank):
                given = (parcel(group.rank, size),) if op.shared else tuple(parcel(group.rank, d) for d in range(size))
            return Call(op, (), (), None, parcels=given, place=mails[group.rank].place)

        world.run(make)
        for rank, mail in enumerate(mails):
            sources = [s for s in range(size) if s != rank and op.gives(s) and op.takes(rank)]
            assert list(mail.found) == sources
            assert sources == [] or list(mail.lengths) == sources
            for source in sources:
                wanted = parcel(source, size if shared else rank)
                head, payload = mail.found[source]
                assert (head, payload.tolist()) == (wanted.head, torch.cat(wanted.tensors).tolist())


async def test_a_refused_parcel_fails_its_receiver_only() -> None:
    world = World(WORLDS["2x2"])
    mails = [Mail() for _ in range(4)]

    def refuse(source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        raise PayloadError("too much")

    calls = [
        Call(
            Parcels("test"),
            (),
            (),
            None,
            parcels=(parcel(rank, 4),),
            place=refuse if rank == 3 else mails[rank].place,
        )
        for rank in range(4)
    ]
    works = world.submit(calls)
    assert [type(work.exception()) for work in works] == [type(None)] * 3 + [PayloadError]
    assert not world.errors
    assert list(mails[0].found) == [1, 2, 3]


@HOSTS
async def test_uneven_all_to_all(hosts: str) -> None:
    world = World(WORLDS[hosts])
    size = world.size
    sent = [[torch.full((s + d,), 10 * s + d) for d in range(size)] for s in range(size)]
    outputs = [[torch.empty(s + d, dtype=torch.int64) for s in range(size)] for d in range(size)]
    world.run(lambda group: AllToAll.of(group, outputs[group.rank], sent[group.rank]))
    for d, found in enumerate(outputs):
        assert all(part.equal(sent[s][d]) for s, part in enumerate(found))


async def test_sizes_that_do_not_fit_are_a_mismatch_of_the_two_calls() -> None:
    world = World(WORLDS["2x2"])
    sent = [[torch.ones(1) for _ in range(4)] for _ in range(4)]
    outputs = [[torch.ones(2 if (s, d) == (0, 3) else 1) for s in range(4)] for d in range(4)]
    world.submit([AllToAll.of(group, outputs[group.rank], sent[group.rank]) for group in world.groups])
    ((rank, error),) = world.errors
    assert rank == 3
    assert isinstance(error, CollectiveMismatchError)
    assert (error.rank, error.other_rank) == (0, 3)
    assert "receives [1, 1, 1, 1]" in error.op
    assert "receives [2, 1, 1, 1]" in error.other_op


def test_a_bundle_and_back() -> None:
    items = [Item(0, ALL, parcel(0, 4)), Item(1, 2, parcel(1, 2)), Item(5, 0, Parcel(b"", ()))]
    head, tensors = bundle(items)
    found = unbundled(7, head, torch.cat(tensors))
    assert [(i.source, i.destination, i.parcel.head) for i in found] == [
        (i.source, i.destination, i.parcel.head) for i in items
    ]
    assert [i.parcel.tensors[0].tolist() for i in found] == [
        torch.cat(i.parcel.tensors).tolist() if i.parcel.tensors else [] for i in items
    ]


@cases(
    "head",
    [
        b"",
        b"\1\0\0",
        struct.pack("<I", 3),
        struct.pack("<IIIIQ", 1, 0, 0, 5, 0),
        struct.pack("<IIIIQ", 1, 0, 0, 0, 99),
        struct.pack("<I", 0) + b"more",
    ],
)
def test_anything_but_a_bundle_is_an_error_that_names_the_sender(head: bytes) -> None:
    with pytest.raises(BackendError, match="rank 7 sent a bundle that cannot be read"):
        unbundled(7, head, torch.empty(4, dtype=torch.uint8))
