"""Checks of the end of a comm. Each check gets its own comm and breaks it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch

from asynccomm.comm.comm import Comm
from asynccomm.core.work import Work
from asynccomm.errors import (
    AbortedError,
    AsyncCommError,
    BrokenError,
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
)
from asynccomm.ops.reduce_op import ReduceOp


async def bad_arguments_send_nothing(comm: Comm) -> None:
    before = comm.statistics()
    good = torch.ones(4)
    calls: list[tuple[str, Any]] = [
        ("tensor", lambda: comm.all_reduce([1.0])),  # type: ignore[arg-type]
        ("op", lambda: comm.all_reduce(good, "sum")),  # type: ignore[arg-type]
        ("root", lambda: comm.broadcast(good, comm.size)),
        ("root", lambda: comm.broadcast(good, -1)),
        ("root", lambda: comm.broadcast(good, True)),
        ("output", lambda: comm.all_gather_single(torch.ones(4 * comm.size + 1), good)),
        ("output", lambda: comm.all_gather_single(torch.ones(4 * comm.size, dtype=torch.int32), good)),
        ("tensor_list", lambda: comm.all_gather([good] * (comm.size + 1), good)),
        ("tensor_list", lambda: comm.all_gather(good, good)),  # type: ignore[arg-type]
        ("dst", lambda: comm.send(good, comm.size)),
        ("tag", lambda: comm.send(good, 0, -1)),
        ("timeout", lambda: comm.barrier(timeout=0)),
        ("tensor", lambda: comm.all_reduce(torch.ones(1).expand(4))),
        ("tensor", lambda: comm.all_reduce(torch.ones(4, device="meta"))),
    ]
    for name, call in calls:
        try:
            call()
        except (TypeError, ValueError) as exc:
            assert name in str(exc), f"the error must name {name!r}: {exc}"
        else:
            raise AssertionError(f"a bad {name} was accepted")
    assert comm.statistics() == before, "a refused call was sent"
    await comm.all_reduce(good)  # the ranks are still in step
    assert good[0] == comm.size


async def _all_are_past_the_barrier(comm: Comm, informed: int) -> None:
    """A barrier after which rank ``informed`` may break the comm: no other rank is still inside the barrier."""
    await comm.barrier()
    if comm.rank == informed:
        await _all_have_called(comm)
    else:
        with contextlib.suppress(AbortedError):  # the end of the message may come after the abort
            await comm.send(torch.ones(1), informed, 99)


async def _all_have_called(comm: Comm) -> None:
    for rank in range(comm.size):
        if rank != comm.rank:
            await comm.recv(torch.empty(1), rank, 99)


async def abort_ends_everybody(comm: Comm) -> None:
    await comm.barrier()
    if comm.size == 1:
        comm.abort("enough")
    elif comm.rank == 0:
        await _all_have_called(comm)
        reduces = [comm.all_reduce(torch.ones(1 << 16)) for _ in range(3)]  # some may finish before the abort
        pending = [comm.recv(torch.ones(3), 1, 9), comm.recv(torch.ones(3), 1, 10)]
        comm.abort("enough")
        assert all(work.done() for work in reduces), "abort must fail pending Works before it returns"
        assert all(work.done() for work in pending), "abort must fail pending Works before it returns"
        await _fails(pending, AbortedError, 0, "enough")
    else:
        reduces = [comm.all_reduce(torch.ones(1 << 16)) for _ in range(4)]  # the aborting rank has called three
        never = comm.recv(torch.ones(3), 0, 8)
        comm.send(torch.ones(1), 0, 99)  # from here on, a call may raise because the comm is aborted
        await _fails([never, reduces[3]], AbortedError, 0, "enough")
    try:
        comm.all_reduce(torch.ones(1))
    except BrokenError as exc:
        assert "enough" in str(exc)
    else:
        raise AssertionError("a call on an aborted comm was accepted")
    comm.abort("again")  # no effect


async def _fails(works: list[Work[Any]], kind: type[BrokenError], rank: int, text: str) -> None:
    for work in works:
        try:
            await work
        except kind as exc:
            assert text in str(exc)
            assert exc.rank == rank  # type: ignore[attr-defined]
            assert isinstance(work.exception(), kind)
        else:
            raise AssertionError(f"{work!r} did not fail")


async def deadlines_name_who_is_missing(comm: Comm) -> None:
    await comm.barrier()
    if comm.size == 1:
        return
    absent = comm.size - 1
    if comm.rank == absent:
        # absent until the other ranks' deadline has aborted this comm
        while True:
            try:
                await comm.ready()
                await asyncio.sleep(0.01)
            except BrokenError as exc:
                assert "all_reduce" in str(exc)
                return
    try:
        await comm.all_reduce(torch.ones(3), timeout=0.2)
    except CollectiveTimeoutError as exc:
        assert exc.missing == (absent,), f"missing must be ({absent},), got {exc.missing}"
        assert exc.elapsed >= 0.2
        assert "all_reduce(float32[3]" in str(exc)
    except AbortedError as exc:  # another rank's deadline came first
        assert "not arrived" in str(exc)
    else:
        raise AssertionError("an operation without its peer finished")


async def _differ(comm: Comm, *calls: Callable[[], Work[Any]], scope: bool = False) -> None:
    """Make the last of ``calls`` on the last rank, the first on all others, and close: all ranks raise a mismatch."""
    if comm.size == 1 or not comm.unsafe_get_backend().compares:
        return
    call = calls[-1 if comm.rank == comm.size - 1 else 0]
    others: list[Work[Any]] = []
    error: BaseException | None
    try:
        await comm.barrier()  # else some ranks could still be connecting when two have found the difference
        if scope:
            async with comm.coalesce():
                others = [comm.all_reduce(torch.ones(3)) for _ in range(2)]  # these may finish before the mismatch
                work = call()
        else:
            work = call()
    except CollectiveMismatchError as exc:  # two ranks have found the difference before this rank's call
        await comm.aclose()
        error = exc
    else:
        await comm.aclose()
        error = work.exception()
    assert isinstance(error, CollectiveMismatchError), f"the call failed with {error!r} on rank {comm.rank}"
    assert error.op != error.other_op, "the error must say how the ranks differ"
    for other in others:
        assert isinstance(other.exception(), (CollectiveMismatchError, NoneType)), f"{other!r} failed otherwise"


async def another_reduction_is_told(comm: Comm) -> None:
    tensor = torch.ones(700)
    await _differ(comm, lambda: comm.all_reduce(tensor), lambda: comm.all_reduce(tensor, ReduceOp.MAX))


async def another_dtype_is_told(comm: Comm) -> None:
    tensor = torch.ones(4)
    await _differ(comm, lambda: comm.all_reduce(tensor), lambda: comm.all_reduce(tensor.int()))


async def another_size_is_told(comm: Comm) -> None:
    for_all, more = torch.ones(400), torch.ones(500)
    await _differ(comm, lambda: comm.all_reduce(for_all), lambda: comm.all_reduce(more))


async def another_size_to_gather_is_told(comm: Comm) -> None:
    for_all, more = torch.ones(4), torch.ones(5000)
    await _differ(comm, lambda: comm.all_gather_single(None, for_all), lambda: comm.all_gather_single(None, more))


async def another_collective_is_told(comm: Comm) -> None:
    tensor = torch.ones(4)
    await _differ(comm, lambda: comm.all_reduce(tensor), comm.barrier)


async def objects_in_place_of_tensors_are_told(comm: Comm) -> None:
    tensor = torch.ones(4)
    await _differ(comm, lambda: comm.all_reduce(tensor), lambda: comm.all_gather_object("x" * 5000))


async def another_size_in_a_scope_is_told(comm: Comm) -> None:
    for_all, more = torch.ones(4), torch.ones(5)
    await _differ(comm, lambda: comm.all_reduce(for_all), lambda: comm.all_reduce(more), scope=True)


async def another_collective_in_a_scope_is_told(comm: Comm) -> None:
    tensor = torch.ones(400)
    await _differ(
        comm, lambda: comm.all_gather_single(None, tensor), lambda: comm.all_reduce(tensor, ReduceOp.MIN), scope=True
    )


async def leaving_by_an_exception_aborts(comm: Comm) -> None:
    await _all_are_past_the_barrier(comm, comm.size - 1)
    try:
        if comm.rank == comm.size - 1:
            await comm.__aexit__(ValueError, ValueError("my own problem"), None)
        else:
            await comm.all_reduce(torch.ones(2))
            raise AssertionError("an operation finished without its peer")
    except AbortedError as exc:
        assert exc.rank == comm.size - 1
        assert "ValueError: my own problem" in str(exc)


async def closed_comms_refuse(comm: Comm) -> None:
    tensor = torch.ones(3)
    work = comm.all_reduce(tensor)
    await comm.aclose()
    assert work.done(), "aclose must wait for what is in flight"
    assert tensor[0] == comm.size
    await comm.aclose()
    try:
        comm.barrier()
    except ClosedError as exc:
        assert comm.name in str(exc)
    except AsyncCommError as exc:
        raise AssertionError(f"a closed comm must raise ClosedError, got {exc!r}") from exc
    else:
        raise AssertionError("a closed comm accepted a call")
