"""Tags of collectives: every one takes, checks and shows it, and ranks that differ in it are told so."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asynccomm import CollectiveMismatchError, Comm
from asynccomm.ops import GroupedOp, Op
from tests.comm.methods.argument_matrix import COLLECTIVES, RANK, on_all, t

collectives = pytest.mark.parametrize("use", list(COLLECTIVES.values()), ids=list(COLLECTIVES))
TAG = "layer3.bias"

# They take hints, too, but are in no sequence with the collectives.
OTHERS = {"send", "recv", "send_object", "recv_object", "send_object_list", "recv_object_list"}
OTHERS |= {"send_tensor_dict", "recv_tensor_dict", "stream"}
OTHERS |= {"combine"}  # it needs the result of a dispatch: see test_experts.py
OTHERS |= {"split", "dup", "subgroups", "subgroups_by_enumeration", "intra_node", "inter_node"}


def ops_of(work: Any) -> list[Op]:
    return list(work.op.ops) if isinstance(work.op, GroupedOp) else [work.op]


def test_every_collective_takes_a_tag() -> None:
    methods = {name: method for name, method in inspect.getmembers(Comm, inspect.isfunction) if name[0] != "_"}
    parameters = {name: inspect.signature(method).parameters for name, method in methods.items()}
    assert {name for name, found in parameters.items() if "hints" in found} == {*COLLECTIVES, *OTHERS}
    for name in COLLECTIVES:
        *_, hints, tag = parameters[name].values()
        assert (hints.name, tag.name) == ("hints", "tag"), name
        assert tag.kind is inspect.Parameter.KEYWORD_ONLY, name
        assert (tag.default, tag.annotation) == (None, "str | None"), name


@collectives
async def test_a_tag_is_checked_before_anything_is_sent(comms: list[Comm], use: Callable[..., Any]) -> None:
    comm = comms[RANK]
    for tag, error in ((3, TypeError), (b"x", TypeError), ("", ValueError), ("x" * 1025, ValueError)):
        with pytest.raises(error, match=r"^tag must "):
            use(comm, tag=tag)
        assert comm.statistics()[:3] == (0, 0, 0)
    await on_all(comms, lambda c, rank: c.barrier())


@collectives
async def test_a_tag_is_shown(comms: list[Comm], use: Callable[..., Any]) -> None:
    works = [use(comm, tag=TAG) for comm in comms]
    await asyncio.gather(*works)
    for work in works:
        for op in ops_of(work):
            assert op.label == TAG
            assert str(op).endswith(f"tag='{TAG}')")
    works = [use(comm) for comm in comms]
    await asyncio.gather(*works)
    for work in works:
        for op in ops_of(work):
            assert op.label == ""
            assert "tag" not in str(op)


async def _fails(work: Any) -> CollectiveMismatchError:
    with pytest.raises(CollectiveMismatchError) as caught:
        await work
    return caught.value


@collectives
@pytest.mark.parametrize("theirs", ["layer4.bias", None])
async def test_ranks_that_differ_in_the_tag_get_an_error(
    comms: list[Comm], use: Callable[..., Any], theirs: str | None
) -> None:
    works = [use(comm, tag=theirs if comm.rank == 2 else TAG) for comm in comms]
    mine, other = [str(ops_of(works[rank])[0]) for rank in (0, 2)]
    assert f"tag='{TAG}'" in mine
    assert (f"tag='{theirs}'" in other) is (theirs is not None)
    for work in works:
        error = await _fails(work)
        assert (error.rank, error.op, error.other_rank, error.other_op) == (0, mine, 2, other)
        assert mine in str(error)
        assert other in str(error)


async def _two_tasks(comm: Comm, first: str, second: str) -> list[Any]:
    """Two tasks that share a comm, and happen to call in this order."""
    return [comm.all_reduce(t(4), tag=tag) for tag in (first, second)]


async def test_tasks_in_another_order_elsewhere_get_an_error(comms: list[Comm]) -> None:
    works = []
    for comm in comms:
        for tag in ("b", "a") if comm.rank == 1 else ("a", "b"):
            with contextlib.suppress(CollectiveMismatchError):  # known already
                works.append(comm.all_reduce(t(4), tag=tag))
    for work in works:
        error = await _fails(work)
        assert error.seq == 0
        assert {error.op, error.other_op} == {f"all_reduce(float32[4], SUM, tag='{tag}')" for tag in "ab"}


@pytest.mark.ranks(2, backend="shm")
async def test_the_same_between_processes(comm: Comm) -> None:
    async with comm.dup() as shared:
        await asyncio.gather(*await _two_tasks(shared, "a", "b"))  # so that both tags are known to both
        works = []
        for tag in "ab" if comm.rank == 0 else "ba":
            with contextlib.suppress(CollectiveMismatchError):  # known already
                works.append(shared.all_reduce(t(4), tag=tag))
        assert works
        for work in works:
            error = await _fails(work)
            assert error.seq == 2
            assert {error.op, error.other_op} == {f"all_reduce(float32[4], SUM, tag='{tag}')" for tag in "ab"}
    assert (await comm.all_reduce(torch.ones(1), tag="a")).item() == 2
