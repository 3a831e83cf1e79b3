"""Ranks that call different collectives: all are told, and nothing of it reaches gloo. And orders of memory."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, CollectiveMismatchError, Comm, ReduceOp, Work, new_comm
from asynccomm.backends.gloo.groups import LARGE
from tests.sampling import some
from tests.waiting import until

Calls = Callable[[Comm, int], Work[Any]]


def ones(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


def in_scope(comm: Comm, *calls: Callable[[], Work[Any]]) -> Work[Any]:
    """The last of ``calls``, which leave as one batch."""
    with comm.coalesce():
        works = [call() for call in calls]
    return works[-1]


# by what differs: what all but the last rank call, and what the last one does; with about n elements
CASES: dict[str, tuple[Calls, Calls]] = {
    "reduction": (lambda c, n: c.all_reduce(ones(n)), lambda c, n: c.all_reduce(ones(n), ReduceOp.MAX)),
    "dtype": (lambda c, n: c.all_reduce(ones(n)), lambda c, n: c.all_reduce(ones(n, torch.int32))),
    "dtype of as many bytes": (
        lambda c, n: c.broadcast(ones(2 * n), 0),
        lambda c, n: c.broadcast(ones(n, torch.float64), 0),
    ),
    "fewer": (lambda c, n: c.all_reduce(ones(2 * n)), lambda c, n: c.all_reduce(ones(n))),
    "more": (lambda c, n: c.all_reduce(ones(n)), lambda c, n: c.all_reduce(ones(2 * n))),
    "far more": (lambda c, n: c.all_reduce(ones(n)), lambda c, n: c.all_reduce(ones(LARGE))),
    "tag": (lambda c, n: c.all_reduce(ones(n), tag="a"), lambda c, n: c.all_reduce(ones(n), tag="b")),
    "root": (lambda c, n: c.broadcast(ones(n), 0), lambda c, n: c.broadcast(ones(n), c.size - 1)),
    "root of a reduction": (lambda c, n: c.reduce(ones(n), 0), lambda c, n: c.reduce(ones(n), c.size - 1)),
    "room for less": (lambda c, n: c.broadcast(ones(2 * n), 0), lambda c, n: c.broadcast(ones(n), 0)),
    "room for more": (lambda c, n: c.broadcast(ones(n), 0), lambda c, n: c.broadcast(ones(2 * n), 0)),
    "reduce": (lambda c, n: c.reduce(ones(n), 0), lambda c, n: c.reduce(ones(n + 1), 0)),
    "all_gather": (
        lambda c, n: c.all_gather([ones(n) for _ in range(c.size)], ones(n)),
        lambda c, n: c.all_gather([ones(2 * n) for _ in range(c.size)], ones(2 * n)),
    ),
    "all_gather_single": (
        lambda c, n: c.all_gather_single(None, ones(2 * n)),
        lambda c, n: c.all_gather_single(None, ones(n)),
    ),
    "reduce_scatter": (
        lambda c, n: c.reduce_scatter_single(None, ones(2 * n * c.size)),
        lambda c, n: c.reduce_scatter_single(None, ones(n * c.size)),
    ),
    "all_to_all_single": (
        lambda c, n: c.all_to_all_single(None, ones(2 * n * c.size)),
        lambda c, n: c.all_to_all_single(None, ones(n * c.size)),
    ),
    "gather": (
        lambda c, n: c.gather([ones(n) for _ in range(c.size)] if c.rank == 0 else None, ones(n), 0),
        lambda c, n: c.gather(None, ones(2 * n), 0),
    ),
    "scatter": (
        lambda c, n: c.scatter(ones(2 * n), [ones(2 * n) for _ in range(c.size)] if c.rank == 0 else None, 0),
        lambda c, n: c.scatter(ones(n), None, 0),
    ),
    "all_to_all": (
        lambda c, n: c.all_to_all([ones(n) for _ in range(c.size)], [ones(n) for _ in range(c.size)]),
        lambda c, n: c.all_to_all(
            [ones(n) for _ in range(c.size)], [ones(n if r == c.rank else n + 1) for r in range(c.size)]
        ),
    ),
    "all_to_all that takes less": (
        lambda c, n: c.all_to_all([ones(n) for _ in range(c.size)], [ones(n) for _ in range(c.size)]),
        lambda c, n: c.all_to_all(
            [ones(n if r == c.rank else 1) for r in range(c.size)], [ones(n) for _ in range(c.size)]
        ),
    ),
    "sizes along a dimension": (
        lambda c, n: c.all_gather_v(None, ones(n), [n] * (c.size - 1) + [n + 1]),
        lambda c, n: c.all_gather_v(None, ones(n + 2), [n] * (c.size - 1) + [n + 2]),
    ),
    "pieces": (
        lambda c, n: c.all_reduce_coalesced([ones(n), ones(2 * n)]),
        lambda c, n: c.all_reduce_coalesced([ones(2 * n), ones(n)]),
    ),
    "kind": (lambda c, n: c.all_reduce(ones(n)), lambda c, n: c.broadcast(ones(n), 0)),
    "barrier": (lambda c, n: c.all_reduce(ones(n)), lambda c, n: c.barrier()),
    "objects": (lambda c, n: c.all_reduce(ones(n)), lambda c, n: c.all_gather_object("x" * n)),
    "one who gives objects": (lambda c, n: c.barrier(), lambda c, n: c.broadcast_object("x" * n, c.size - 1)),
    "sorts of objects": (lambda c, n: c.all_gather_object("x" * n), lambda c, n: c.broadcast_object("x", c.size - 1)),
    "in a scope": (
        lambda c, n: in_scope(c, lambda: c.barrier(), lambda: c.all_reduce(ones(n))),
        lambda c, n: in_scope(c, lambda: c.barrier(), lambda: c.all_reduce(ones(2 * n))),
    ),
    "merged": (
        lambda c, n: in_scope(c, *[lambda: c.broadcast(ones(n), 0)] * 3),
        lambda c, n: in_scope(c, *[lambda: c.broadcast(ones(n), 0)] * 2, lambda: c.broadcast(ones(n + 1), 0)),
    ),
    "merged in another order": (
        lambda c, n: in_scope(c, lambda: c.all_reduce(ones(n)), lambda: c.all_reduce(ones(2 * n))),
        lambda c, n: in_scope(c, lambda: c.all_reduce(ones(2 * n)), lambda: c.all_reduce(ones(n))),
    ),
    "lengths of batches": (
        lambda c, n: in_scope(c, lambda: c.all_reduce(ones(n)), lambda: c.barrier()),
        lambda c, n: c.all_reduce(ones(n)),
    ),
}


def said(error: BaseException | None) -> list[Any]:
    assert isinstance(error, CollectiveMismatchError), repr(error)
    return list(error.args[:5])


@pytest.mark.parametrize(("case", "n", "control"), some(list(itertools.product(CASES, [8, 3000], ["on", "off"])), 16))
@pytest.mark.ranks(2, backend="gloo", timeout=60)
async def test_a_difference_is_told_to_all_though_all_close_at_once(
    comm: Comm, case: str, n: int, control: str
) -> None:
    first, last = CASES[case]
    async with new_comm("gloo", name="other", timeout=30, hints={"control": control}) as other:
        await comm.barrier()
        work = (last if other.rank == other.size - 1 else first)(other, n)
    mine = said(work.exception())
    assert all(said == mine for said in await comm.all_gather_object(mine)), "all are told the same"
    seq, rank, op, other_rank, other_op = mine
    assert seq == {"in a scope": 1, "merged": 2}.get(case, 0)
    assert rank != other_rank
    assert op != other_op


@pytest.mark.parametrize("case", some(list(CASES), 8))
@pytest.mark.ranks(some([3, 4], 1), backend="gloo", timeout=60)
async def test_a_difference_is_told_to_many(comm: Comm, case: str) -> None:
    first, last = CASES[case]
    async with new_comm("gloo", name="other", timeout=30) as other:
        await comm.barrier()
        before = other.all_reduce(ones(LARGE))  # is under way
        calls = [partial(last if other.rank == other.size - 1 else first, other, 1000)]
        calls.append(partial(other.all_reduce, ones(5)))
        works: list[Work[Any]] = []
        raised: list[BaseException | None] = []
        for call in calls:
            try:
                works.append(call())
            except CollectiveMismatchError as exc:  # the other ranks differed before this call
                raised.append(exc)
    mine, second = [said(error) for error in [work.exception() for work in works] + raised]
    assert second == mine
    assert before.exception() is None or said(before.exception()) == mine, "it may have been done before"
    assert all(said == mine for said in await comm.all_gather_object(mine))


@pytest.mark.ranks(3, backend="gloo", timeout=60)
async def test_a_difference_is_told_where_the_ranks_agree_on_the_order(comm: Comm) -> None:
    async with new_comm("gloo", name="agreed", timeout=30, ordering="agreed") as other:
        await comm.barrier()  # a rank that is still connecting would raise the difference there
        error: BaseException | None = None
        try:
            work = other.all_reduce(ones(3000 if other.rank == 1 else 4000), tag="x")
        except CollectiveMismatchError as exc:  # the other two have differed before this call
            error = exc
    assert isinstance(error or work.exception(), CollectiveMismatchError)


@pytest.mark.ranks(2, backend="gloo", timeout=60)
async def test_the_lines_of_both_calls_are_named(comm: Comm) -> None:
    async with new_comm("gloo", name="lines", timeout=30) as other:
        await comm.barrier()
        one = other.all_reduce(ones(3)) if other.rank == 0 else None
        work = one or other.all_reduce(ones(4))
    error = work.exception()
    assert isinstance(error, CollectiveMismatchError)
    assert __file__ in error.site
    assert __file__ in error.other_site
    assert error.site != error.other_site


@pytest.mark.ranks(some([3, 2], 1), backend="gloo", timeout=60)
async def test_parcels_are_made_of_what_earlier_collectives_have_written(comm: Comm) -> None:
    n = LARGE // 3
    for _ in range(3):
        tensor = torch.ones(n)
        reduced = comm.all_reduce(tensor)
        gathered = comm.all_gather_v(None, tensor)
        again = comm.all_reduce(tensor)  # writes what is gathered
        found = await gathered
        assert found.eq(comm.size).all()
        await reduced
        await again
        assert tensor.eq(comm.size**2).all()


@pytest.mark.ranks(some([3, 2], 1), backend="gloo", timeout=60)
async def test_a_barrier_is_over_after_all_collectives_before_it(comm: Comm) -> None:
    tensors = [torch.ones(n) for n in (LARGE // 2, 3, 3000, LARGE)]
    works = [comm.all_reduce(tensor) for tensor in tensors]
    await comm.barrier()
    assert all(work.done() for work in works)
    assert all(tensor.eq(comm.size).all() for tensor in tensors)


@pytest.mark.ranks([1, 2, 3], backend="gloo", timeout=60)
@pytest.mark.parametrize("n", [0, 4, 1000, 1020, 1025, 5000])
async def test_objects_and_parcels_of_any_length(comm: Comm, n: int) -> None:
    """Those that fit in frames on all ranks, on one, and on none."""
    value = "x" * n if comm.rank else "y"
    others = ["y", *["x" * n] * (comm.size - 1)]
    assert await comm.all_gather_object(value) == others
    assert await comm.broadcast_object(value, comm.size - 1) == others[-1]
    mine = torch.full((n // 4 + comm.rank,), float(comm.rank))
    found = await comm.all_gather_v(None, mine)
    assert found.tolist() == [float(r) for r in range(comm.size) for _ in range(n // 4 + r)]
    parts = await comm.gather_v(None, mine, root=0)
    if comm.rank == 0:
        assert [part.tolist() for part in parts] == [[float(r)] * (n // 4 + r) for r in range(comm.size)]
    moved = await comm.all_to_all(None, [mine + 10 * peer for peer in range(comm.size)])
    assert [len(part) for part in moved] == [n // 4 + r for r in range(comm.size)]


@pytest.mark.ranks(2, backend="gloo", timeout=60)
async def test_abort_wakes_those_who_wait_for_frames(comm: Comm) -> None:
    async with new_comm("gloo", name="aborted", timeout=30) as other:
        works: list[Work[Any]] = []
        if other.rank == 0:
            works += [other.all_reduce(ones(n)) for n in (3, 3000)] + [other.all_gather_object("x")]
        else:
            works.append(other.recv(ones(1), 0))
        await comm.barrier()  # both wait
        if other.rank == 0:
            other.abort("enough")
        for work in works:
            with pytest.raises(AbortedError, match="enough"):
                await work


class Memory(bytearray):
    """Memory of a tensor, of which one can see when it is given up."""


@pytest.mark.ranks(2, backend="gloo", timeout=60)
async def test_what_was_sent_together_lets_go_of_its_tensors(comm: Comm) -> None:
    """Without the help of the garbage collector."""
    gc.disable()
    try:
        references = []
        async with comm.coalesce():
            for op in (ReduceOp.SUM, ReduceOp.MAX):
                memory = Memory(5000)
                references.append(weakref.ref(memory))
                comm.all_reduce(torch.frombuffer(memory, dtype=torch.float32), op)
                del memory
            comm.barrier()
        await comm.barrier()
        await until(lambda: not any(reference() for reference in references))
    finally:
        gc.enable()
