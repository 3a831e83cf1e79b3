"""The plans of collectives of sizes that only the senders know: parcels, and the uneven all_to_all.

The parcels that go the same way travel as one parcel, a *bundle*: inside the host to their receivers and to the leader,
between leaders, and from a leader to the receivers on its host. They are delivered when all have come.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.computing import contribution, fill
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.hazards import separated
from asynccomm.backends.hierarchical.memory import room
from asynccomm.backends.hierarchical.movement import MEET
from asynccomm.backends.hierarchical.pipeline import Lane, Leg, OpPlan, PiecePlan
from asynccomm.backends.hierarchical.placement import HostPlacement
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import Call, Parcel, Parcels

_COUNT: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<IIIQ")  # source, destination, bytes of the head, bytes of the payload
ALL: Final = (1 << 32) - 1  #: as a destination: all ranks that receive


class Item(NamedTuple):
    """A parcel on its way."""

    source: int
    destination: int
    parcel: Parcel


def bundle(items: Iterable[Item]) -> Parcel:
    """``items`` as one parcel."""
    items = tuple(items)
    entries = [_ENTRY.pack(i.source, i.destination, len(i.parcel.head), i.parcel.nbytes) for i in items]
    head = b"".join([_COUNT.pack(len(items)), *entries, *[item.parcel.head for item in items]])
    return Parcel(head, tuple([tensor for item in items for tensor in item.parcel.tensors]))


def unbundled(sender: int, head: bytes, payload: Tensor) -> list[Item]:
    """The items of a bundle from ``sender``. Raises: BackendError for anything but a bundle."""
    try:
        (count,) = _COUNT.unpack_from(head)
        at = _COUNT.size + count * _ENTRY.size
        entries = list(_ENTRY.iter_unpack(head[_COUNT.size : at]))
        sizes = [nbytes for *_, nbytes in entries]
        if len(entries) != count or at + sum([length for _, _, length, _ in entries]) != len(head):
            raise ValueError("its head has another length")
        payloads = payload.split_with_sizes(sizes)
    except (struct.error, ValueError, RuntimeError) as exc:
        raise BackendError(f"rank {sender} sent a bundle that cannot be read: {exc}") from exc
    items = []
    for (source, destination, length, _), part in zip(entries, payloads, strict=True):
        items.append(Item(source, destination, Parcel(head[at : at + length], (part,))))
        at += length
    return items


@final
class _Router:
    """The items on one rank.

    Args:
        shared: whether all items are for all receiving ranks.
        giver, taker: the only rank that gives, or that receives; None: all ranks.
        own: the items of this rank.
    """

    def __init__(
        self, where: HostPlacement, method: str, shared: bool, giver: int | None, taker: int | None, own: Sequence[Item]
    ) -> None:
        self._where = where
        self._method = method
        self._shared = shared
        self._giver, self._taker = giver, taker
        self._own = own
        self._near: list[Item] = []  # from the other ranks of this host
        self._far: list[Item] = []  # from other hosts

    @property
    def items(self) -> dict[int, Parcel]:
        """The parcels for this rank, by source, in order."""
        me = self._where.rank
        found = {i.source: i.parcel for i in (*self._near, *self._far) if i.destination in (me, ALL) and i.source != me}
        return dict(sorted(found.items()))

    def steps(self) -> list[Leg]:
        """The steps on this rank."""
        where, giver, taker = self._where, self._giver, self._taker
        steps = []
        if not where.alone:
            given = giver is None or where.is_local(giver)
            steps.append(Leg(Lane.UP, self._up) if given else MEET)
        if where.leads:
            steps.append(Leg(Lane.ACROSS, self._across))
        comes = giver is None or not where.is_local(giver)
        goes_on = taker is None or (where.is_local(taker) and taker != where.local[0])
        if not where.alone and comes and goes_on:
            steps.append(Leg(Lane.DOWN, self._down))
        return steps

    def _up(self) -> Call:
        where, giver, taker = self._where, self._giver, self._taker
        leader = where.local[0]
        if self._shared:
            # a receiver that is not the leader gets the parcels of its host at once, and the leader needs none
            own = [bundle(self._own)]
        else:
            own = []
            for rank in where.local:
                mine = [i for i in self._own if i.destination == rank]
                if rank == leader:
                    mine += [i for i in self._own if not where.is_local(i.destination)]
                own.append(bundle(mine if rank != where.rank else ()))
        to = None if taker is None else where.position_of(taker) if where.is_local(taker) else 0
        return self._call(None if giver is None else where.position_of(giver), to, own, where.local, self._near)

    def _across(self) -> Call:
        where, giver, taker = self._where, self._giver, self._taker
        items = [*self._own, *self._near]
        if self._shared:
            bundles = [bundle(items)]
        else:
            hosts = range(len(where.hosts))
            away = [[i for i in items if i.destination != ALL and where.host_of(i.destination) == h] for h in hosts]
            bundles = [bundle(away[h] if h != where.host else ()) for h in hosts]
        home = None if giver is None else where.host_of(giver)
        to = None if taker is None else where.host_of(taker)
        return self._call(home, to, bundles, [host[0] for host in where.hosts], self._far)

    def _down(self) -> Call:
        where, taker = self._where, self._taker
        if self._shared:
            bundles = [bundle(self._far)]
        else:
            bundles = [bundle([i for i in self._far if i.destination == rank]) for rank in where.local]
        return self._call(0, None if taker is None else where.position_of(taker), bundles, where.local, self._far)

    def _call(
        self, giver: int | None, taker: int | None, bundles: Sequence[Parcel], ranks: Sequence[int], into: list[Item]
    ) -> Call:
        """The step between ``ranks``; the items that come are put ``into`` the list."""
        op = Parcels(self._method, shared=self._shared, giver=giver, taker=taker)
        gives = giver is None or ranks[giver] == self._where.rank
        return Call(op, (), (), None, parcels=tuple(bundles) if gives else (), place=_Inbox(ranks, into).place)


@final
class _Inbox:
    """Receives bundles; their items can be read when the step is over."""

    def __init__(self, ranks: Sequence[int], into: list[Item]) -> None:
        self._ranks = ranks
        self._into = into

    def place(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        memory = room(lengths[source])
        self._into.extend(unbundled(self._ranks[source], head, memory))
        return (memory,)


def parcels(where: HostPlacement, submission: Submission) -> OpPlan:
    """The plan of ``Parcels``."""
    op: Any = submission.op
    delivery = Delivery(submission)
    own: list[Item] = []
    if op.gives(where.rank) and submission.parcels:
        if op.shared:
            own = [Item(where.rank, ALL, submission.parcels[0])]
        else:
            others = [rank for rank in range(where.size) if rank != where.rank and op.takes(rank)]
            own = [Item(where.rank, rank, submission.parcels[rank]) for rank in others]
    router = _Router(where, op.method, op.shared, op.giver, op.taker, own)

    def finish() -> None:
        found = router.items if op.takes(where.rank) else {}
        lengths = {source: parcel.nbytes for source, parcel in found.items()}
        for source, parcel in found.items():
            tensors = delivery.accept(source, parcel.head, lengths)
            if tensors is not None:
                fill(tensors, parcel.tensors[0])
        delivery.finish()
        if isinstance(delivery.error, BrokenError):
            raise delivery.error
        submission.error = delivery.error

    return OpPlan([PiecePlan(router.steps())], finish)


def all_to_all(where: HostPlacement, submission: Submission) -> OpPlan:
    """The plan of an ``AllToAll``: the tensors as parcels. The head of each is the sender's call, for the error."""
    op: Any = submission.op
    buffers = separated(submission, where.rank)
    head, me = str(op).encode(), where.rank
    sent = [Parcel(head, (contribution(op, (tensor,)),)) for tensor in buffers.inputs]
    own = [Item(me, rank, parcel) for rank, parcel in enumerate(sent) if rank != me]
    router = _Router(where, op.kind, False, None, None, own)
    outputs = buffers.outputs

    def finish() -> None:
        for source, parcel in {**router.items, me: sent[me]}.items():
            if parcel.nbytes != outputs[source].nbytes:
                theirs = parcel.head.decode(errors="replace")
                raise CollectiveMismatchError(submission.work.seq, source, theirs, me, str(op))
            fill((outputs[source],), parcel.tensors[0])
        for land in buffers.lands:
            land()

    return OpPlan([PiecePlan(router.steps())], finish)
