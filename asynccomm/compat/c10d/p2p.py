"""Point-to-point sends and receives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, final

from torch import Tensor

from asynccomm.compat.c10d.logs import collective
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.ranks import canonical_rank
from asynccomm.compat.c10d.types import NON_GROUP_MEMBER
from asynccomm.compat.c10d.validation import check_not_self, check_tensor, member, member_of
from asynccomm.compat.c10d.work import NoopWork, ResultWork, Work
from asynccomm.compat.c10d.world import Group, group_or_default
from asynccomm.core import work as _ours


def isend(
    tensor: Tensor, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> Work | None:
    """Send to global rank ``dst``, or to ``group_dst`` in the group; this rank itself is allowed. See ``Comm.send``.

    Returns: a handle; None if this rank is not in the group.
    """
    pg = member_of(group, "isend", 3)
    if pg is None:
        return None
    check_tensor("tensor", tensor)
    to = canonical_rank(pg, dst, group_dst, name="dst")
    return Work(pg.comm(tensor.device).send(tensor, to, tag))


def irecv(
    tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> Work | None:
    """Receive from global rank ``src``, or from ``group_src`` in the group; without both, from any rank.

    Returns: a handle; its ``source_rank()`` is the sender's rank in the group. None if this rank is not in the group.
    """
    pg = member_of(group, "irecv", 3)
    if pg is None:
        return None
    check_tensor("tensor", tensor)
    return Work(pg.comm(tensor.device).recv(tensor, _source(pg, src, group_src), tag))


@collective()
def send(
    tensor: Tensor, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> Awaitable[Any]:
    """Send as by :func:`isend`, but not to this rank itself; ``await`` it."""
    pg = member(group)
    check_tensor("tensor", tensor)
    to = canonical_rank(pg, dst, group_dst, name="dst")
    check_not_self(pg, to, "dst")
    return pg.comm(tensor.device).send(tensor, to, tag)


@collective(outside=NoopWork(-1))
def recv(
    tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> Awaitable[int]:
    """Receive as by :func:`irecv`, but not from this rank itself.

    ``await`` it for the sender's global rank; -1 if this rank is not in the group.
    """
    pg = member(group)
    check_tensor("tensor", tensor)
    source = _source(pg, src, group_src)
    check_not_self(pg, source, "src")
    work = pg.comm(tensor.device).recv(tensor, source, tag)
    return ResultWork(work, lambda _: pg.global_ranks[sender_of(work, source)])


def sender_of(work: _ours.Work[Any], source: int | None) -> int:
    """The sender's rank in the group, of a completed receive from ``source``."""
    sender = source if work.source is None else work.source
    assert sender is not None, "a receive that is done knows its sender"
    return sender


def _source(pg: ProcessGroup, src: int | None, group_src: int | None) -> int | None:
    return None if src is None and group_src is None else canonical_rank(pg, src, group_src, name="src")


@final
class P2POp:
    """One send or receive for :func:`batch_isend_irecv`.

    Args:
        op: ``isend`` or ``irecv``.
        peer: the other rank's global rank; ``group_peer``: its rank in the group.
        tag: of the message.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise ValueError(f"op must be isend or irecv, got {op!r}")
        check_tensor("tensor", tensor)
        self.op = op
        self.tensor = tensor
        self.tag = tag
        self.group: ProcessGroup | int
        self.peer, self.group_peer = peer, group_peer
        if group == NON_GROUP_MEMBER:
            self.group = NON_GROUP_MEMBER
        else:
            self.group = pg = group_or_default(group)
            self.peer = canonical_rank(pg, peer, group_peer, return_global=True, name="peer")
            self.group_peer = canonical_rank(pg, peer, group_peer, name="peer")

    def __repr__(self) -> str:
        name, rank = "none of this rank", -1
        if isinstance(self.group, ProcessGroup):  # the group may have ended
            name, rank = self.group.group_name, self.group.rank()
        ends = rank, self.group_peer
        src, dst = ends if self.op is isend else ends[::-1]
        return (
            f"P2POp({self.op.__name__} pg={name}, group_src={src}, group_dst={dst}, {self.tensor.shape}, "
            f"{self.tensor.dtype})"
        )


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Start sends and receives of one group together: no order of the operations can deadlock.

    Any subset of ranks may take part, also in the first batch. ``await`` each returned handle.

    Returns: a list with one handle for all operations; an empty list if this rank is not in the group.

    Raises: ValueError unless the argument is a non-empty list of P2POp of one group.
    """
    check_p2p_ops(p2p_op_list)
    first = p2p_op_list[0]
    pg = member_of(first.group, "batch_isend_irecv", 3)
    if pg is None:
        return []
    batch = pg.comm(first.tensor.device).batch_op_create()
    for op in p2p_op_list:
        assert op.group_peer is not None, "it was found when the operation was made"
        if op.op is isend:
            batch.send(op.tensor, op.group_peer, op.tag)
        else:
            batch.recv(op.tensor, op.group_peer, op.tag)
    return [Work(batch.issue())]


def check_p2p_ops(ops: object) -> None:
    """Raise ValueError unless ``ops`` is a non-empty list of P2POp of one group."""
    if not isinstance(ops, list) or not all(isinstance(op, P2POp) for op in ops):
        raise ValueError(f"p2p_op_list must be a list of P2POp, got {ops!r}")
    if not ops:
        raise ValueError("p2p_op_list must have at least one P2POp")
    if any(op.group is not ops[0].group and op.group != ops[0].group for op in ops):
        raise ValueError("all P2POp of p2p_op_list must be of one group")
