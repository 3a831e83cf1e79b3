"""Batches for a backend, made of held operations: planned, with operations of one kind fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from asynccomm.backends.base import Backend, HeldCall, Submission
from asynccomm.batching.composite import FusedWork
from asynccomm.batching.fusion import fuse
from asynccomm.batching.plan import Item, item_of, plan
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import UNNUMBERED, Driver, Work
from asynccomm.ops import Call, Op
from asynccomm.ops.validation import check_unfreed, extent_of


class FusedOp(NamedTuple):
    """One operation for the backend."""

    submission: Submission
    #: the operations that it performs; the submission itself if only one
    members: Sequence[Submission | HeldCall]
    fused_work: FusedWork | None = None  #: settles the members, if there are several

    def prepare(self, driver: Driver) -> None:
        """Number the fused operation after its members, and make ``driver`` the driver of their Works."""
        if self.fused_work is None:
            self.submission.work.driver = driver
            return
        self.submission.numbers = numbers = tuple([member.work.seq for member in self.members])
        self.submission.work.seq = numbers[0]
        for member in self.members:
            member.work.driver = self.fused_work

    def sent(self) -> None:
        """Record that the operation was submitted."""
        if self.fused_work is not None:
            self.fused_work.sent()

    @property
    def most_urgent(self) -> Work[Any]:
        """The Work of the member with the earliest deadline."""
        return min([member.work for member in self.members], key=due) if self.fused_work else self.submission.work


class Batch(NamedTuple):
    """The operations that a backend gets in one call."""

    items: Sequence[Submission]  #: in the order of the calls
    fused_ops: Sequence[FusedOp]


def batches_of(held: Sequence[Submission], size: int, backend: Backend, mailbox: Mailbox) -> list[Batch]:
    """The batches of ``held``, the operations of a rank of ``size``, none of them numbered or submitted yet.

    Raises: ValueError if the operations cannot be submitted together, or memory of a tensor was freed since the call.
    """
    for submission in held:
        _check_memory(submission)
    batches = []
    items = [planned(submission) for submission in held]
    limits = backend.fusion_limit, backend.fused_limit
    for fused_ops in plan(items, fusion_limit=limits[0], fused_limit=limits[1]):
        made = [_fused([held[i] for i in fused], size, backend, mailbox) for fused in fused_ops]
        members = (
            held
            if len(held) == sum(map(len, fused_ops))
            else [held[i] for i in sorted([i for fused in fused_ops for i in fused])]
        )
        batches.append(Batch(members, made))
    return batches


def planned(submission: Submission) -> Item:
    """The planner's view of an operation."""
    return item_of(submission.op, submission.inputs, submission.outputs, _given(submission))


def _given(submission: Submission) -> Sequence[Tensor]:
    """The tensors of parcels, and those that inputs are copies of."""
    if not submission.parcels and not submission.copies:
        return ()
    given = [tensor for parcel in submission.parcels for tensor in parcel.tensors]
    return given + [tensor for _, tensor in submission.copies]


def _check_memory(submission: Submission) -> None:
    inputs, outputs = submission.inputs, submission.outputs
    for tensor in (*inputs, *(() if outputs is inputs else outputs), *_given(submission)):
        check_unfreed(tensor.untyped_storage(), extent_of(tensor), tensor.shape, tensor.dtype)


def _fused(members: Sequence[Submission], size: int, backend: Backend, mailbox: Mailbox) -> FusedOp:
    """The one operation for the backend that does the same as ``members``, of one :func:`fusion_key`."""
    if len(members) == 1:
        return FusedOp(members[0], members)
    call = fuse(size, members)
    fused_work = _fused_work(call.op, members, backend, mailbox)
    submission = Submission(call, fused_work.work, detached=True)
    submission.members = tuple([member.op for member in members])
    submission.call_context = _origins(members)
    return FusedOp(submission, members, fused_work)


def prepared_op(run: object, op: Op, members: Sequence[HeldCall], backend: Backend, mailbox: Mailbox) -> FusedOp:
    """The operation ``op`` that does the same as ``members``; the backend's fast path has made its ``run``."""
    fused_work = None if len(members) == 1 else _fused_work(op, members, backend, mailbox)
    work = members[0].work if fused_work is None else fused_work.work
    submission = Submission(Call(op, (), (), None), work, detached=True)
    submission.run, submission.owners = run, members
    submission.nbytes = sum([member.nbytes for member in members])
    return FusedOp(submission, members, fused_work)


def _fused_work(op: Op, members: Sequence[Submission | HeldCall], backend: Backend, mailbox: Mailbox) -> FusedWork:
    works = [member.work for member in members]
    fused_work = FusedWork(works, backend)
    limit = min(works, key=due).timeout
    fused_work.work = Work(
        op, UNNUMBERED, mailbox, value=None, timeout=limit, on_settled=fused_work.settled, driver=backend
    )
    return fused_work


def due(work: Work[Any]) -> float:
    """The deadline of a Work, on the clock of ``Work.started``."""
    return work.started + work.timeout


def _origins(members: Sequence[Submission]) -> Any:
    """The distinct call contexts of the members."""
    places = [member.call_context for member in members]
    return places[0] if len(set(places)) == 1 else tuple(dict.fromkeys(places))
