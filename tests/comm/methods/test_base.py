"""How methods send: nothing when an argument is wrong, and with what all of them take."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypedDict

import pytest
import torch

from asynccomm import AbortedError, ClosedError, CollectiveTimeoutError, Comm
from asynccomm.comm.methods.base import MAX_BYTES, ObjectReceiver, ReceivePolicy
from asynccomm.comm.methods.collectives import Collectives
from asynccomm.comm.methods.lists import CoalescedCollectives
from asynccomm.comm.methods.p2p import P2P
from asynccomm.comm.methods.variable import VariableCollectives
from asynccomm.errors import PayloadError
from asynccomm.ops import GroupedOp
from asynccomm.serialization.objects import PayloadKind, encode
from asynccomm.testing.local import loopback_world
from tests.comm.methods.argument_matrix import GOOD, RANK, WRONG, good, t

THEMES = (Collectives, VariableCollectives, CoalescedCollectives, P2P)


def public(cls: type) -> list[str]:
    return [name for name in vars(cls) if inspect.isfunction(getattr(cls, name)) and not name.startswith("_")]


def test_every_method_is_among_those_that_are_tried() -> None:
    names = {name for theme in THEMES for name in public(theme)}
    assert names - {"batch_op_create", "sink", "stream"} == set(GOOD)
    assert {what.split(" ")[0].rstrip(",:") for what, *_ in WRONG} == set(GOOD) - {"barrier"} | {"batch"}


def test_every_method_takes_a_timeout_and_hints_by_keyword() -> None:
    for name in GOOD:
        parameters = inspect.signature(getattr(Comm, name)).parameters
        for keyword in ("timeout", "hints"):
            assert parameters[keyword].kind is inspect.Parameter.KEYWORD_ONLY
            assert parameters[keyword].default is None


async def works_still(comms: list[Comm]) -> None:
    tensors = [torch.full((2,), float(rank)) for rank in range(len(comms))]
    await asyncio.gather(*[comm.all_reduce(x) for comm, x in zip(comms, tensors, strict=True)])
    assert {x[0].item() for x in tensors} == {3.0}


@pytest.mark.parametrize("method", [*GOOD, "batch"])
async def test_nothing_is_sent_when_an_argument_is_wrong(comms: list[Comm], method: str) -> None:
    comm = comms[RANK]
    for what, error, name, call in WRONG:
        if what.split(" ")[0].rstrip(",:") == method:
            with pytest.raises(error, match=f"^{name.split('[')[0]}"):
                call(comm)
            assert comm.statistics()[:3] == (0, 0, 0), what
    await works_still(comms)
    assert comm.statistics()[:3] == (1, 0, 0)


BAD_KEYWORDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"timeout": "soon"}, TypeError, "timeout must be seconds or a timedelta, got 'soon'"),
    ({"timeout": True}, TypeError, "timeout must be seconds or a timedelta, got True"),
    ({"timeout": 0}, ValueError, "timeout must be positive, got 0"),
    ({"timeout": -1.5}, ValueError, "timeout must be positive, got -1.5"),
    ({"timeout": float("nan")}, ValueError, "timeout must be positive, got nan"),
    ({"timeout": timedelta(seconds=-1)}, ValueError, "timeout must be positive, got -1.0"),
    ({"hints": ["x"]}, TypeError, "hints must be a mapping of strings to strings, got ['x']"),
    ({"hints": "x"}, TypeError, "hints must be a mapping of strings to strings, got 'x'"),
]


@good
async def test_timeouts_and_hints_are_checked(comms: list[Comm], use: Callable[..., Any]) -> None:
    for keywords, error, text in BAD_KEYWORDS:
        with pytest.raises(error) as caught:
            use(comms[RANK], **keywords)
        assert str(caught.value) == text
        assert comms[RANK].statistics()[:3] == (0, 0, 0)


@good
async def test_a_timeout_and_hints_are_taken(comms: list[Comm], use: Callable[..., Any]) -> None:
    work = use(comms[RANK], timeout=timedelta(minutes=2), hints={"unknown": "ignored"})
    assert work.timeout == 120
    assert use(comms[RANK]).timeout == comms[RANK].options.timeout
    assert use(comms[RANK], timeout=float("inf")).timeout == float("inf")
    comms[RANK].abort()
    with pytest.raises(AbortedError):
        await work


@pytest.mark.parametrize("method", ["all_reduce", "all_gather_v", "all_reduce_coalesced", "recv"])
async def test_a_timeout_is_kept(comms: list[Comm], method: str) -> None:
    work = GOOD[method](comms[RANK], timeout=0.03)
    with pytest.raises(CollectiveTimeoutError) as caught:
        await work
    named = caught.value.op
    assert named == work.op or named in work.op.ops
    assert caught.value.timeout == 0.03


@good
async def test_a_closed_comm_accepts_no_calls(comms: list[Comm], use: Callable[..., Any]) -> None:
    await comms[RANK].aclose()
    with pytest.raises(ClosedError, match="comm 'test' is closed"):
        use(comms[RANK])
    assert comms[RANK].statistics()[:3] == (0, 0, 0)


@good
async def test_an_aborted_comm_raises_the_reason(comms: list[Comm], use: Callable[..., Any]) -> None:
    comms[RANK].abort("enough")
    with pytest.raises(AbortedError, match="enough"):
        use(comms[RANK])


@good
async def test_works_carry_numbers_and_descriptions(comms: list[Comm], use: Callable[..., Any]) -> None:
    comm = comms[RANK]
    work = use(comm)
    assert work.seq == 0
    parts = len(work.op.ops) if isinstance(work.op, GroupedOp) else 1
    assert comm.statistics().submitted == comm.statistics().in_flight == parts
    again = use(comm)
    assert again.seq == parts
    assert again.op == work.op
    assert str(work.op) in repr(work)
    comm.abort()
    for one in (work, again):
        with pytest.raises(AbortedError):
            await one


async def test_one_call_is_no_batch() -> None:
    async with loopback_world(1) as (comm,):
        work = comm.all_reduce_coalesced([t(2), t(3)])
        assert not isinstance(work.op, GroupedOp)
        work = comm.all_reduce_coalesced([t(2), t(3, dtype=torch.int8)])
        assert isinstance(work.op, GroupedOp)
        assert comm.statistics().submitted == 3
        await work


# -- on which terms objects are received -------------------------------------------------------------------------------


class TypedKeys(TypedDict):
    a: int


class Structural(Protocol):
    a: int


def test_terms_are_checked() -> None:
    assert ReceivePolicy.of(True, MAX_BYTES) == (True, 1 << 32, object)
    assert ReceivePolicy.of(False, 0, int) == (False, 0, int)
    for trust in (None, 0, 1, "no"):
        with pytest.raises(TypeError, match=f"weights_only must be True or False, got {trust!r}"):
            ReceivePolicy.of(trust, 1)
    for limit in (None, 1.5, True, "1"):
        with pytest.raises(TypeError, match=f"max_bytes must be an integer, got {limit!r}"):
            ReceivePolicy.of(True, limit)  # type: ignore[arg-type]
    for expect in (5, "int", list[int], int | str, Any, TypedKeys, Structural):
        with pytest.raises(TypeError, match="expect must be a class"):
            ReceivePolicy.of(True, 1, expect)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_bytes must not be negative, got -1"):
        ReceivePolicy.of(True, -1)


def test_the_limit_is_looked_at_before_anything_else() -> None:
    parcel = encode(PayloadKind.OBJECT, torch.ones(1000))
    size = len(parcel.head) + parcel.nbytes
    inbox = ObjectReceiver("recv_object", 0, [PayloadKind.OBJECT], ReceivePolicy(True, size - 1))
    with pytest.raises(PayloadError, match=f"rank 1 sent {size} bytes, but max_bytes is {size - 1}"):
        inbox(1, parcel.head, {1: parcel.nbytes})
    assert not inbox.incoming
    inbox = ObjectReceiver("recv_object", 0, [PayloadKind.OBJECT], ReceivePolicy(True, size))
    assert [t.nbytes for t in inbox(1, parcel.head, {1: parcel.nbytes})] == [4000]


def test_a_parcel_of_another_kind_is_reported() -> None:
    missed = []
    inbox = ObjectReceiver(
        "recv_object", 2, [PayloadKind.OBJECT], ReceivePolicy(True, 1000), lambda *args: missed.append(args)
    )
    head = encode(PayloadKind.OBJECT_LIST, [1]).head
    with pytest.raises(
        PayloadError, match=r"recv_object\(\) of rank 2 received the payload that rank 1 sent by send_object_list\(\)"
    ):
        inbox(1, head, {1: 0})
    assert missed == [(1, head)]


def test_own_and_others_in_rank_order() -> None:
    inbox = ObjectReceiver("all_gather_object", 1, [PayloadKind.OBJECT], ReceivePolicy(True, 1000))
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
