"""The plans of the collectives that move tensors of sizes known to all ranks.

The leaders exchange the data that their hosts have for each other, so there is one message from host to
host. Large gathers, and all_to_alls on hosts of equal size, go on all rails instead, with the same bytes on each. Data
is flat bytes, in the operation's own memory where that lies as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.computing import contribution, fill, perform
from asynccomm.backends.hazards import Buffers, separated
from asynccomm.backends.hierarchical.memory import cut, landing, room
from asynccomm.backends.hierarchical.pipeline import Lane, Leg, OpPlan, PiecePlan
from asynccomm.backends.hierarchical.placement import HostPlacement
from asynccomm.backends.regions import adjoining
from asynccomm.ops import (
    AllGather,
    AllToAll,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Call,
    Gather,
    MessageSpace,
    Parcel,
    RecvParcel,
    Scatter,
    SendParcel,
    layout_of,
)

SMALL: Final = 128 << 10  # bytes up to which the leaders move the data of their hosts
PIECE: Final = 8 << 20  # bytes of a piece of a large broadcast
_BYTE: Final = torch.uint8

#: inside a host, when nothing is to be moved there yet: so that its ranks notice if they differ
MEET: Final = Leg(Lane.UP, lambda: Call(Barrier(), (), (), None))


def barrier(where: HostPlacement, submission: Submission) -> OpPlan:
    """The plan of a ``Barrier``."""
    lanes = [] if where.alone else [Lane.UP]
    if where.leads:
        lanes.append(Lane.ACROSS)
    if not where.alone:
        lanes.append(Lane.DOWN)
    return OpPlan([PiecePlan([Leg(lane, lambda: Call(Barrier(), (), (), None)) for lane in lanes])])


def broadcast(where: HostPlacement, submission: Submission) -> OpPlan:
    """The plan of a ``Broadcast``: in the root's host, between hosts, in the other hosts."""
    op: Any = submission.op
    buffers = separated(submission, where.rank)  # a leader forwards its outputs, which must not overlap
    if op.nbytes > SMALL:
        return _broadcast_on_rails(where, op, buffers)
    tensors, is_root = buffers.inputs or buffers.outputs, where.rank == op.root
    home = where.host_of(op.root)

    def part(lane: Lane, root: int, *, gives: bool) -> Leg:
        inside = Broadcast(op.dtype, op.numel, root, layout=op.layout)
        return Leg(lane, lambda: Call(inside, tensors if gives else (), () if gives else tensors, None))

    steps = []
    if not where.alone:
        steps.append(part(Lane.UP, where.position_of(op.root), gives=is_root) if home == where.host else MEET)
    if where.leads:
        steps.append(part(Lane.ACROSS, home, gives=home == where.host))
    if not where.alone and home != where.host:
        steps.append(part(Lane.DOWN, 0, gives=where.leads))
    return OpPlan([PiecePlan(steps)], _after(None, buffers))


def _broadcast_on_rails(where: HostPlacement, op: Any, buffers: Buffers) -> OpPlan:
    """In pieces: each rail carries a part of a piece to the other hosts, where the ranks gather the parts."""
    fill_outputs = None
    if where.rank == op.root:
        data = contribution(op, buffers.inputs)
    else:
        data, fill_outputs = landing(buffers.outputs)
    parts = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    return OpPlan([_broadcast_piece(where, op.root, part) for part in parts], _after(fill_outputs, buffers))


def _broadcast_piece(where: HostPlacement, root: int, data: Tensor) -> PiecePlan:
    home, is_root = where.host_of(root), where.rank == root
    counts = cut(len(data), where.rails) + [0] * (len(where.local) - where.rails)
    parts = data.split_with_sizes(counts)
    mine = parts[where.position]

    def moved(source: int, tensor: Tensor, *, gives: bool) -> Call:
        return Call(Broadcast(_BYTE, len(tensor), source), (tensor,) if gives else (), () if gives else (tensor,), None)

    steps = []
    if not where.alone:
        inside = partial(moved, where.position_of(root), data, gives=is_root)
        steps.append(Leg(Lane.UP, inside) if home == where.host else MEET)
    if len(mine):
        steps.append(Leg(Lane.ACROSS, partial(moved, home, mine, gives=home == where.host)))
    if not where.alone and home != where.host:
        gather = AllGather.of_counts(_BYTE, counts)
        steps.append(Leg(Lane.DOWN, lambda: Call(gather, (mine,), tuple(parts), None)))
    return PiecePlan(steps)


def all_gather(where: HostPlacement, submission: Submission) -> OpPlan:
    """The plan of an ``AllGather`` or ``AllGatherSingle``."""
    op: Any = submission.op
    buffers = separated(submission, where.rank)
    sizes = [n * op.dtype.itemsize for n in getattr(op, "counts", ()) or [op.numel] * where.size]
    mine = contribution(op, buffers.inputs)
    data, finish = _gathered(where, op, buffers, sizes)
    ours = dict(zip(where.order, data.split_with_sizes([sizes[rank] for rank in where.order]), strict=True))
    if where.even and sum(sizes) > SMALL:
        return OpPlan([_gather_on_rails(where, sizes, mine, ours)], finish)
    return OpPlan([_gather_by_leaders(where, sizes, mine, data, ours)], finish)


def _gathered(
    where: HostPlacement, op: Any, buffers: Buffers, sizes: Sequence[int]
) -> tuple[Tensor, Callable[[], object]]:
    """Memory for all contributions, host by host, and the function that then fills the outputs."""
    outputs, lands = buffers.outputs, buffers.lands
    if where.in_order and not lands and not any(output.is_inference() for output in outputs):
        own = adjoining(outputs)
        if own is not None:
            return own, lambda: None
    memory = room(sum(sizes))

    def finish() -> None:
        parts = memory.split_with_sizes([sizes[rank] for rank in where.order])
        by_rank = dict(zip(where.order, parts, strict=True))
        perform([op] * where.size, [by_rank[rank] for rank in range(where.size)], {where.rank: outputs})
        for land in lands:
            land()

    return memory, finish


def _gather_on_rails(where: HostPlacement, sizes: Sequence[int], mine: Tensor, parts: dict[int, Tensor]) -> PiecePlan:
    """Each rank gathers the contributions of its rail, which the ranks of a host then gather."""
    rails = list(zip(*where.hosts, strict=True))
    rail = rails[where.position]

    def across() -> Call:
        return Call(
            AllGather.of_counts(_BYTE, [sizes[r] for r in rail]), (mine,), tuple([parts[r] for r in rail]), None
        )

    def inside() -> Call:
        each = [[sizes[rank] for rank in ranks] for ranks in rails]
        op = AllGather.of_counts(_BYTE, [sum(lengths) for lengths in each])
        op = AllGather(_BYTE, op.numel, layout=layout_of([n for lengths in each for n in lengths]), counts=op.counts)
        outputs = tuple([parts[rank] for ranks in rails for rank in ranks])
        return Call(op, tuple([parts[rank] for rank in rail]), outputs, None)

    return PiecePlan([MEET, Leg(Lane.ACROSS, across), Leg(Lane.DOWN, inside)])


def _gather_by_leaders(
    where: HostPlacement, sizes: Sequence[int], mine: Tensor, data: Tensor, parts: dict[int, Tensor]
) -> PiecePlan:
    """Inside the host, between leaders, and the data of the other hosts to the ranks of the host."""
    by_host = [sum([sizes[rank] for rank in host]) for host in where.hosts]
    blocks = data.split_with_sizes(by_host)
    ours = blocks[where.host]
    others = tuple([block for host, block in enumerate(blocks) if host != where.host])

    def up() -> Call:
        op = AllGather.of_counts(_BYTE, [sizes[rank] for rank in where.local])
        return Call(op, (mine,), tuple([parts[rank] for rank in where.local]), None)

    def across() -> Call:
        return Call(AllGather.of_counts(_BYTE, by_host), (mine if where.alone else ours,), tuple(blocks), None)

    def down() -> Call:
        op = Broadcast(_BYTE, sum([len(block) for block in others]), 0, layout=layout_of([len(b) for b in others]))
        return Call(op, others if where.leads else (), () if where.leads else others, None)

    steps = [] if where.alone else [Leg(Lane.UP, up)]
    if where.leads:
        steps.append(Leg(Lane.ACROSS, across))
    if not where.alone:
        steps.append(Leg(Lane.DOWN, down))
    return PiecePlan(steps)


def gather(where: HostPlacement, submission: Submission) -> OpPlan:
    """The plan of a ``Gather``: to the leaders, to the leader of the root's host, to the root."""
    op: Any = submission.op
    buffers = separated(submission, where.rank)
    mine, is_root = contribution(op, buffers.inputs), where.rank == op.root
    home, each = where.host_of(op.root), op.nbytes
    here = home == where.host
    data, finish = room(each * where.size if here and where.leads else 0), None
    if is_root:
        data, finish = _gathered(where, op, buffers, [each] * where.size)
    by_host = [each * len(host) for host in where.hosts]
    ours = room(by_host[where.host] if where.leads else 0)

    def up() -> Call:
        outputs = ours.split_with_sizes([each] * len(where.local)) if where.leads else ()
        return Call(Gather(_BYTE, each, 0), (mine,), tuple(outputs), None)

    def across() -> Call:
        sends = [0] * len(by_host)
        sends[home] = by_host[where.host]
        receives = by_host if here else [0] * len(by_host)
        target = data if here else room(0)
        source = mine if where.alone else ours
        return _exchange(sends, source.split_with_sizes(sends), receives, target.split_with_sizes(receives))

    steps = [] if where.alone else [Leg(Lane.UP, up)]
    if where.leads:
        steps.append(Leg(Lane.ACROSS, across))
    if here and op.root != where.local[0] and (is_root or where.leads):
        steps.append(Leg(Lane.DOWN, partial(between, where, op.root, data)))
    return OpPlan([PiecePlan(steps)], finish)


def between(where: HostPlacement, root: int, data: Tensor, *, back: bool = False) -> Call:
    """Move ``data``, of any dtype, from the leader to the root on its host, or ``back``.

    The message is a parcel of a space of its own: users' messages within the host may have any tag.
    """
    gives = (where.rank == root) is back
    peer = 0 if where.rank == root else where.position_of(root)
    if gives:
        send = SendParcel("move", peer, 0, MessageSpace.INTERNAL)
        return Call(send, (), (), None, parcels=(Parcel(b"", (data,)),))
    receive = RecvParcel("move", peer, 0, MessageSpace.INTERNAL)
    return Call(receive, (), (), None, place=lambda *_: (data,), expected=data.nbytes)


def _exchange(
    sends: Sequence[int], inputs: Sequence[Tensor], receives: Sequence[int], outputs: Sequence[Tensor]
) -> Call:
    return Call(AllToAll(_BYTE, tuple(sends), tuple(receives)), tuple(inputs), tuple(outputs), None)


def scatter(where: HostPlacement, submission: Submission) -> OpPlan:
    """The plan of a ``Scatter``: to the leader, to the leaders of all hosts, to their ranks."""
    op: Any = submission.op
    buffers = separated(submission, where.rank)
    is_root, home, each = where.rank == op.root, where.host_of(op.root), op.nbytes
    here = home == where.host
    whole = room(each * where.size if here and where.leads and not is_root else 0)
    if is_root:
        parts = contribution(op, buffers.inputs).split_with_sizes([each] * where.size)
        whole = torch.cat([parts[rank] for rank in where.order])
    by_host = [each * len(host) for host in where.hosts]
    result, fill_outputs = landing(buffers.outputs)
    ours = result if where.alone else room(by_host[where.host] if where.leads else 0)

    def across() -> Call:
        sends = by_host if here else [0] * len(by_host)
        source = whole if here else room(0)
        receives = [0] * len(by_host)
        receives[home] = by_host[where.host]
        return _exchange(sends, source.split_with_sizes(sends), receives, ours.split_with_sizes(receives))

    def down() -> Call:
        inputs = ours.split_with_sizes([each] * len(where.local)) if where.leads else ()
        return Call(Scatter(_BYTE, each, 0), tuple(inputs), (result,), None)

    steps = [] if where.alone else [MEET]
    if here and op.root != where.local[0] and (is_root or where.leads):
        steps.append(Leg(Lane.UP, partial(between, where, op.root, whole, back=True)))
    if where.leads:
        steps.append(Leg(Lane.ACROSS, across))
    if not where.alone:
        steps.append(Leg(Lane.DOWN, down))
    return OpPlan([PiecePlan(steps)], _after(fill_outputs, buffers))


def _after(fill_outputs: Callable[[], object] | None, buffers: Buffers) -> Callable[[], object]:
    def finish() -> None:
        if fill_outputs is not None:
            fill_outputs()
        for land in buffers.lands:
            land()

    return finish


def all_to_all_single(where: HostPlacement, submission: Submission) -> OpPlan:
    """The plan of an ``AllToAllSingle``."""
    op: Any = submission.op
    buffers = separated(submission, where.rank)
    chunks = contribution(op, buffers.inputs).split_with_sizes([op.part_nbytes(where.size)] * where.size)
    plan, received = (_all_to_all_on_rails if where.even else _all_to_all_by_leaders)(where, chunks)

    def finish() -> None:
        by_rank = received()
        fill(buffers.outputs, torch.cat([by_rank[rank] for rank in range(where.size)]))
        for land in buffers.lands:
            land()

    return OpPlan([plan], finish)


Received = Callable[[], dict[int, Tensor]]  # by source


def _all_to_all_on_rails(where: HostPlacement, chunks: Sequence[Tensor]) -> tuple[PiecePlan, Received]:
    """Inside the host each rank gets the chunks for its rail; the ranks of the rail then exchange them."""
    hosts, positions, each = len(where.hosts), len(where.local), len(chunks[0])
    inside, result = room(each * where.size), room(each * where.size)

    def up() -> Call:
        source = torch.cat([chunks[host[at]] for at in range(positions) for host in where.hosts])
        return Call(AllToAllSingle(_BYTE, len(source)), (source,), (inside,), None)

    def across() -> Call:
        source = inside.view(positions, hosts, each).transpose(0, 1).reshape(-1)  # by host, then by its source here
        return Call(AllToAllSingle(_BYTE, len(source)), (source,), (result,), None)

    def received() -> dict[int, Tensor]:
        return dict(zip(where.order, result.split_with_sizes([each] * where.size), strict=True))

    return PiecePlan([Leg(Lane.UP, up), Leg(Lane.ACROSS, across)]), received


def _all_to_all_by_leaders(where: HostPlacement, chunks: Sequence[Tensor]) -> tuple[PiecePlan, Received]:
    """The leader gets all chunks that leave its host, and gives its ranks all that came."""
    each, here, local = len(chunks[0]), where.local, len(where.local)
    away = [rank for rank in where.order if not where.is_local(rank)]
    n = len(away)  # from each rank of this host, and to each
    inbound = room(each * local * n if where.leads else 0)
    far = room(each * n)
    arrived: list[Tensor] = []  # from each rank of this host: its chunk for this rank, then its chunks that leave

    def up() -> Call:
        remote = torch.cat([chunks[rank] for rank in away])
        inputs = [chunks[rank] for rank in here]
        inputs[0] = torch.cat([inputs[0], remote])
        beside = room(each * (1 + n) * local if where.leads else each * local)
        receives = [len(beside) // local] * local
        outputs = beside.split_with_sizes(receives)
        arrived.extend(outputs)
        return _exchange([len(part) for part in inputs], inputs, receives, outputs)

    def across() -> Call:
        rows = torch.cat([part[each:] for part in arrived] or [chunks[rank] for rank in away]).view(local, n, each)
        sends, receives, inputs, start = [], [], [], 0
        for host, ranks in enumerate(where.hosts):
            count = 0 if host == where.host else len(ranks)
            inputs.append(rows[:, start : start + count].reshape(-1))
            start += count
            sends.append(each * local * count)
            receives.append(each * local * count)
        return _exchange(sends, inputs, receives, inbound.split_with_sizes(receives))

    def down() -> Call:
        sends, source = [0] * local, inbound
        if where.leads:
            sends = [each * n] * local
            source = inbound.view(n, local, each).transpose(0, 1).reshape(-1)  # by its destination here, then by source
        receives = [len(far), *[0] * (local - 1)]
        return _exchange(sends, source.split_with_sizes(sends), receives, far.split_with_sizes(receives))

    def received() -> dict[int, Tensor]:
        found = dict(zip(away, (inbound if where.alone else far).split_with_sizes([each] * n), strict=True))
        if where.alone:
            return found | {where.rank: chunks[where.rank].clone()}
        return found | {rank: part[:each] for rank, part in zip(here, arrived, strict=True)}

    steps = [] if where.alone else [Leg(Lane.UP, up)]
    if where.leads:
        steps.append(Leg(Lane.ACROSS, across))
    if not where.alone:
        steps.append(Leg(Lane.DOWN, down))
    return PiecePlan(steps), received
