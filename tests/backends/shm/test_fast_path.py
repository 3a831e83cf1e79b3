"""Small collectives in C: which calls take the fast path, and that nobody can tell but by the clock."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import ctypes
import gc
import itertools
import os
import random
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

import asynccomm
from asynccomm import (
    BrokenError,
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Comm,
    PeerLostError,
    RedOpType,
    ReduceOp,
    Work,
    new_comm,
)
from asynccomm.backends.shm.backend import ShmBackend
from asynccomm.backends.shm.endpoint import SHORT
from asynccomm.backends.shm.rings import HEADER, framed
from asynccomm.comm.direct_calls import SubmitterCalls
from asynccomm.core.callsite import CallSite, call_site, show
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.ops.dtypes import CODES
from tests.sampling import amount, some

from .paths import counted

pytestmark = pytest.mark.skipif(isinstance(load_core(), CoreUnavailable), reason="the executor in C was not built")

KINDS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather_single",
    "reduce_scatter",
    "all_reduce_coalesced",
    "messages",
    "barrier",
)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64]
)
async def test_results_are_right_call_by_call(dtype: torch.dtype) -> None:
    async with counted() as (comm, paths):
        rank = comm.rank
        for round in range(3):
            values = torch.tensor([rank + round, 1, 0, 1]).to(dtype)
            other = torch.tensor([1 - rank + round, 1, 0, 1]).to(dtype)
            if dtype not in (torch.float8_e4m3fn, torch.complex64, torch.bool):
                expected = values + other
                assert torch.equal(await comm.all_reduce(values.clone()), expected)
                out = torch.empty_like(values)
                assert await comm.all_reduce(values, out=out) is out
                assert torch.equal(out, expected)
                reduced = await comm.reduce(values.clone(), 1)
                assert reduced is None if rank == 0 else torch.equal(reduced, expected)
                scattered = torch.empty_like(values[:2])
                await comm.reduce_scatter_single(scattered, values)
                assert torch.equal(scattered, expected[2 * rank : 2 * rank + 2])
            pair = [values, other] if rank == 0 else [other, values]
            gathered = torch.empty(8, dtype=dtype)
            assert await comm.all_gather_single(gathered, values) is gathered
            assert torch.equal(gathered.view(torch.uint8), torch.cat(pair).view(torch.uint8))
            exchanged = torch.empty_like(values)
            await comm.all_to_all_single(exchanged, values)
            half = slice(2 * rank, 2 * rank + 2)
            assert torch.equal(exchanged.view(torch.uint8), torch.cat([pair[0][half], pair[1][half]]).view(torch.uint8))
            root = values.clone()
            await comm.broadcast(root, 1)
            assert torch.equal(root.view(torch.uint8), pair[1].view(torch.uint8))
            assert await comm.barrier() is None
        complex_ones = dtype.is_complex
        assert (paths.took() == "fast") != complex_ones, "complex numbers may be lazily conjugated"


@pytest.mark.ranks(1)
async def test_which_calls_are_fast() -> None:
    async with counted() as (comm, paths):

        async def path(work: Any) -> str:
            await work
            return paths.took()

        plain = torch.ones(2, 6)
        for _ in range(2):  # the first time, and when the kind of call is known
            assert await path(comm.all_reduce(plain)) == "fast"
            assert await path(comm.all_reduce(plain, ReduceOp.MAX)) == "fast"
            assert await path(comm.all_reduce(plain, torch.distributed.ReduceOp.MAX)) == "fast"
            assert await path(comm.all_reduce(plain, out=torch.empty(12))) == "fast"
            assert await path(comm.all_reduce(plain, out=plain)) == "fast"
            assert await path(comm.all_reduce(torch.nn.Parameter(torch.ones(3)))) == "fast"
            assert await path(comm.all_reduce(torch.ones(3, requires_grad=True))) == "fast"
            assert await path(comm.all_reduce(torch.ones(3, 3)[:, 1:2].t().contiguous())) == "fast"
            assert await path(comm.all_reduce(torch.ones(3, 1)[:, ::2])) == "fast", "contiguous as torch has it"
            with torch.inference_mode():
                assert await path(comm.all_reduce(torch.ones(3))) == "fast"
            assert await path(comm.all_reduce(torch.ones(1 << 21))) == "fast", "large"
            assert await path(comm.barrier()) == "fast"
            unusual = {
                "tag": lambda: comm.all_reduce(plain, tag="a"),
                "timeout": lambda: comm.all_reduce(plain, timeout=3),
                "hints": lambda: comm.all_reduce(plain, hints={}),
                "strides": lambda: comm.all_reduce(plain.t()),
                "gaps": lambda: comm.all_reduce(plain[:, :2]),
                "subclass": lambda: comm.all_reduce(plain.as_subclass(type("Mine", (torch.Tensor,), {}))),
                "negated": lambda: comm.all_reduce(torch.ones(1, dtype=torch.complex64).conj().imag),
                "conjugated": lambda: comm.all_reduce(torch.ones(2, dtype=torch.complex64).conj()),
                "empty": lambda: comm.all_reduce(torch.ones(0)),
                "a reduction of one's own": lambda: comm.all_reduce(plain, ReduceOp(RedOpType.SUM)),
                "factor": lambda: comm.all_reduce(plain, ReduceOp.PREMUL_SUM(2.0)),
                "widened": lambda: comm.all_reduce(torch.ones(3, dtype=torch.int16), ReduceOp.AVG),
                "allocated": lambda: comm.all_gather_single(None, plain),
                "overlap": lambda: comm.all_reduce(plain.view(-1)[:8], out=plain.view(-1)[2:10]),
                "dims": lambda: comm.all_gather_single(torch.ones((1,) * 10), torch.ones((1,) * 10)),
            }
            for name, call in unusual.items():
                assert await path(call()) == "ordinary", name
        async with comm.coalesce():
            work = comm.all_reduce(plain)
        assert await path(work) == "fast"
        comm.extend_timeout(5)
        assert comm.all_reduce(plain).timeout == 35
        assert paths.took() == "ordinary", "the first operation that is done ends the extension"
        assert comm.all_reduce(plain).timeout == 30
        assert paths.took() == "fast"
        comm.set_timeout(7)
        assert comm.all_reduce(plain).timeout == 7
        assert paths.took() == "fast"


@pytest.mark.ranks(3)
@pytest.mark.parametrize("seed", range(3))
async def test_ranks_on_different_paths(seed: int) -> None:
    """Random calls, of which each rank takes some on the ordinary path, and some before it awaits the last."""
    async with counted() as (comm, _):
        rank, size = comm.rank, comm.size
        same, own = random.Random(seed), random.Random(f"{seed} {rank}")
        works: list[tuple[Any, Tensor, Tensor]] = []
        for _ in range(300):
            kind, n, root = same.choice(KINDS), same.choice([1, 2, 5, 64, 1000]), same.randrange(size)
            dtype = same.choice([torch.float32, torch.int64, torch.uint8])
            mine = torch.arange(n, dtype=dtype) + rank
            each = [torch.arange(n, dtype=dtype) + r for r in range(size)]
            options: dict[str, Any] = {"hints": {}} if own.random() < 0.3 else {}
            target, expected = mine, mine
            match kind:
                case "all_reduce":
                    work, expected = comm.all_reduce(mine, **options), sum(each)
                case "reduce":
                    target = torch.zeros(n, dtype=dtype)
                    work = comm.reduce(mine, root, out=target, **options)
                    expected = sum(each) if rank == root else torch.zeros(n, dtype=dtype)
                case "broadcast":
                    work, expected = comm.broadcast(mine, root, **options), each[root]
                case "all_gather_single":
                    target = torch.empty(size * n, dtype=dtype)
                    work, expected = comm.all_gather_single(target, mine, **options), torch.cat(each)
                case "reduce_scatter":
                    target = torch.empty(n, dtype=dtype)
                    work = comm.reduce_scatter(target, [mine + r for r in range(size)], **options)
                    expected = sum(each) + size * rank
                case "all_reduce_coalesced":
                    work, expected = comm.all_reduce_coalesced([mine, mine.clone()], **options), sum(each)
                case "messages":
                    target = torch.empty(n, dtype=dtype)
                    work = comm.recv(target, (rank - 1) % size, n, **options)
                    await comm.send(mine, (rank + 1) % size, n)
                    expected = each[rank - 1]
                case _:
                    work = comm.barrier(**options)
            works.append((work, target, torch.as_tensor(expected, dtype=dtype)))
            if own.random() < 0.6:
                for work, got, wanted in works:
                    await work
                    assert torch.equal(got, wanted), f"{work.op} gave {got}, not {wanted}"
                works.clear()
        await asyncio.gather(*[work for work, _, _ in works])
        assert comm.statistics().in_flight == 0


@pytest.mark.ranks(1)
async def test_values_are_as_on_the_ordinary_path() -> None:
    async with counted() as (comm, _):
        for negated in (torch.tensor([1 + 2j]).conj().imag, torch.tensor([1 + 2j]).imag):
            expected = negated.clone()
            out = torch.zeros(1)
            for _ in range(2):
                await comm.all_reduce(negated, out=out)
                assert torch.equal(out, expected)
        values = torch.arange(10.0)
        await comm.all_reduce(values[:8], out=values[2:])
        assert values.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]
        wide = torch.arange(12.0).view(3, 4)
        await comm.all_reduce(wide[:, 1:3])
        assert torch.equal(wide, torch.arange(12.0).view(3, 4))


@pytest.mark.ranks(1)
async def test_errors_are_those_of_the_ordinary_path() -> None:
    async with counted() as (comm, paths):
        plain = torch.ones(4)
        for _ in range(2):
            with pytest.raises(TypeError, match=r"tensor must be a torch\.Tensor, got 3"):
                comm.all_reduce(3)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"op BAND cannot reduce torch\.float32"):
                comm.all_reduce(plain, ReduceOp.BAND)
            with pytest.raises(ValueError, match=r"root must be in \[0, 1\), got 2"):
                comm.broadcast(plain, 2)
            with pytest.raises(ValueError, match="root must be in"):
                comm.broadcast(plain, 1 << 70)
            with pytest.raises(ValueError, match="out must have 4 elements"):
                comm.all_reduce(plain, out=torch.ones(3))
            with pytest.raises(ValueError, match="tensor must be a dense tensor"):
                comm.all_reduce(torch.ones(2).to_sparse())
            with pytest.raises(ValueError, match="overlaps itself"):
                comm.all_reduce(torch.ones(1).expand(4))
            with pytest.raises(ValueError, match="tensor is on meta"):
                comm.all_reduce(torch.ones(1, device="meta"))
        assert comm.statistics().submitted == 0
        paths.took()
        await comm.all_reduce(plain)
        assert comm.statistics().submitted == 1
    with pytest.raises(ClosedError, match="comm 'counted' is closed"):
        comm.all_reduce(plain)


@pytest.mark.ranks(2)
async def test_calls_with_sizes_are_fast_once_they_repeat() -> None:
    async with counted() as (comm, paths):
        me = comm.rank
        data = [torch.arange(12.0).view(6, 2) + 100 * giver for giver in range(2)]

        async def exchange(mine: int, theirs: int) -> str:
            """``mine`` rows of rank 0 for rank 1, and ``theirs`` back; the others stay."""
            sends = [[6 - mine, mine], [theirs, 6 - theirs]]
            receives = [row[me] for row in sends]
            out = torch.empty(sum(receives), 2)
            assert await comm.all_to_all_v_single(out, data[me], receives, sends[me]) is out
            assert torch.equal(out, torch.cat([data[giver].split(sends[giver])[me] for giver in range(2)]))
            return paths.took()

        assert [await exchange(1, 2) for _ in range(4)] == ["ordinary", "fast", "fast", "fast"]
        assert [await exchange(k, 2) for k in (2, 3, 4)] == ["ordinary"] * 3, "sizes that differ each time"
        assert [await exchange(k, 2) for k in (4, 1)] == ["fast"] * 2

        numels = [[2, 3], [4, 5]]
        inputs = [torch.full((n,), 10.0 * me + reader) for reader, n in enumerate(numels[me])]
        for k in range(3):
            outputs = [torch.empty(row[me]) for row in numels]
            assert await comm.all_to_all(outputs, inputs) is outputs
            assert all(torch.equal(out, torch.full_like(out, 10.0 * g + me)) for g, out in enumerate(outputs))
            assert paths.took() == ("ordinary" if k == 0 else "fast")
        for k in range(3):
            gathered = torch.empty(3, 2)
            await comm.all_gather_v(gathered, data[me][: 2 - me], [2, 1])
            assert torch.equal(gathered, torch.cat([data[0][:2], data[1][:1]]))
            scattered = torch.empty(2 - me, 2)
            await comm.reduce_scatter_v(scattered, data[me][:3], [2, 1])
            assert torch.equal(scattered, (data[0] + data[1])[:3].split([2, 1])[me])
            assert paths.took() == ("ordinary" if k == 0 else "fast")
        for sizes in ((2, 1), torch.Size([2, 1])):
            await comm.all_gather_v(gathered, data[me][: 2 - me], sizes)
            assert torch.equal(gathered, torch.cat([data[0][:2], data[1][:1]]))
        for wrong in ([2, True], [2, torch.ones(1)], [2, 1 << 70]):
            with pytest.raises((TypeError, ValueError), match="sizes"):
                comm.all_gather_v(gathered, data[me][: 2 - me], wrong)


@pytest.mark.ranks(1)
async def test_many_calls_with_sizes_in_turns_become_fast() -> None:
    async with counted() as (comm, paths):
        for turn in range(3):
            for numel in range(1, 65):
                out = torch.zeros(numel)
                await comm.all_gather_v(out, torch.ones(numel), [numel])
                assert out.eq(1).all()
                assert paths.took() == ("fast" if turn else "ordinary"), (turn, numel)


@pytest.mark.ranks(3)
async def test_a_small_part_in_a_large_exchange_does_not_hold_up_the_loop() -> None:
    async with counted() as (comm, _):
        numel = [[1 << 22 if {giver, reader} == {0, 1} else 4 for reader in range(3)] for giver in range(3)]
        inputs = [torch.full((n,), 10.0 * comm.rank + reader) for reader, n in enumerate(numel[comm.rank])]
        outputs = [torch.empty(row[comm.rank]) for row in numel]
        for _ in range(5):
            work = comm.all_to_all(outputs, inputs)
            assert not work.done(), "16 MiB take longer than a call"
            await work
            assert all(bool(out.eq(10.0 * giver + comm.rank).all()) for giver, out in enumerate(outputs))
            await comm.barrier()


@pytest.mark.ranks(2)
async def test_ranks_with_other_sizes_get_an_error_on_the_fast_path() -> None:
    async with new_comm("shm", name="sizes", timeout=30) as comm:
        rows, out = torch.ones(4), torch.empty(4)
        for _ in range(3):
            await comm.all_to_all_v_single(out, rows, [2, 2], [2, 2])
        with pytest.raises(CollectiveMismatchError, match=r"sends [12] elements to rank"):
            for _ in range(2):
                sends = [2, 2] if comm.rank == 0 else [1, 3]
                await comm.all_to_all_v_single(out, rows, [2, 2] if comm.rank == 0 else [1, 3], sends)


def called_here(comm: Comm) -> Any:
    return comm.all_reduce(torch.ones(2))


@pytest.mark.ranks(1)
async def test_a_work_has_everything() -> None:
    async with counted() as (comm, paths):
        works = []
        before = time.monotonic()
        for _ in range(3):
            works.append(called_here(comm))
        assert paths.took() == "fast"
        assert [work.seq for work in works] == [0, 1, 2]
        for work in works:
            assert str(work.op) == "all_reduce(float32[2], SUM)"
            assert show(work.site).startswith(f"{Path(__file__)}:")
            assert show(work.site).endswith("in called_here")
            assert before <= work.started <= work.finished <= time.monotonic()
            assert work.duration == work.finished - work.started
            assert work.timeout == 30
            assert work.done()
            assert work.is_completed()
            assert work.exception() is None
            assert work.result() is await work
            assert (work.source, work.captured, work.order, work.driver) == (None, False, None, None)
            assert weakref.ref(work)() is work
        assert repr(works[1]) == "<Work #1 all_reduce(float32[2], SUM) done>"
        called: list[Any] = []
        works[0].add_done_callback(called.append)
        works[0].listen(lambda: called.append("listener"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert called == ["listener", works[0]]
        calls = list(comm._submitter.recent)
        assert [(str(op), site, seq) for op, site, seq, *_ in calls] == [
            ("all_reduce(float32[2], SUM)", work.site, work.seq) for work in works
        ]
        assert comm.statistics()[:4] == (3, 0, 0, 0)


@pytest.mark.ranks(1)
async def test_each_of_many_places_has_its_own_site() -> None:
    """More than the fast path remembers, in two functions whose instructions are alike."""
    places: dict[str, Any] = {}
    calls = "".join("    works.append(comm.barrier())\n" for _ in range(50))
    for name in ("first", "second"):
        exec(compile(f"async def {name}(comm, works):\n{calls}", f"/program/{name}.py", "exec"), places)
    async with counted() as (comm, _):
        for _ in range(3):
            for name in ("first", "second"):
                works: list[Work[None]] = []
                await places[name](comm, works)
                expected = [f"/program/{name}.py:{line} in {name}" for line in range(2, 52)]
                assert [show(work.site) for work in works] == expected
                for work in works:
                    await work


@pytest.mark.ranks(1)
async def test_calls_of_finalizers_do_not_disturb_the_places() -> None:
    """Making a place may run the garbage collector, and its finalizers call, too, from many places."""
    names: dict[str, Any] = {}
    calls = "".join("    comm.barrier()\n" + "    x = 1\n" * (i % 2) for i in range(60))
    exec(compile(f"def inner(comm):\n{calls}", "/program/inner.py", "exec"), names)
    calls = "".join("    prepare()\n    works.append(comm.barrier())\n" for _ in range(40))
    exec(compile(f"def outer(comm, prepare, works):\n{calls}", "/program/outer.py", "exec"), names)
    finalized, delays = 0, itertools.cycle(range(1, 12))
    taken: list[tuple[int, None]] = []
    async with counted() as (comm, _):

        class Finalized:
            def __init__(self) -> None:
                self.me = self

            def __del__(self) -> None:
                nonlocal finalized
                finalized += 1
                names["inner"](comm)

        def prepare() -> None:
            """Leave a cycle, and no free tuple, so that one of the next allocations collects."""
            gc.disable()
            gc.set_threshold(*thresholds)
            taken.clear()
            Finalized()
            taken.extend((i, None) for i in range(3000))
            gc.enable()
            gc.set_threshold(gc.get_count()[0] + next(delays), 1000, 1000)

        gc.collect()
        thresholds = gc.get_threshold()
        try:
            for _ in range(11):
                works: list[Work[None]] = []
                names["outer"](comm, prepare, works)
                assert [show(work.site) for work in works] == [
                    f"/program/outer.py:{line} in outer" for line in range(3, 83, 2)
                ]
                await asyncio.sleep(0)
        finally:
            gc.set_threshold(*thresholds)
    assert finalized > 100


@pytest.mark.ranks(1)
@pytest.mark.parametrize("inner", [Path(module.__file__).parent for module in (asynccomm, torch, asyncio.tasks)])
async def test_the_site_is_the_users_also_behind_other_frames(inner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walks = 0

    def counting(depth: int) -> CallSite | None:
        nonlocal walks
        walks += 1
        return call_site(depth + 1)

    monkeypatch.setattr("asynccomm.backends.shm.fast_path.call_site", counting)
    names: dict[str, Any] = {}
    source = "def within(call, depth):\n    return within(call, depth - 1) if depth else call()\n"
    exec(compile(source, str(inner / "inner.py"), "exec"), names)
    within: Callable[[Callable[[], Any], int], Any] = names["within"]
    async with counted() as (comm, paths):
        tensor = torch.ones(2)
        call = partial(comm.all_reduce, tensor)  # no frame of this file

        for depth, walked in ((0, True), (3, False), (60, True)):  # C knows the frames, and gives up after some
            walks = 0
            for _ in range(2):
                work = within(call, depth)
                assert paths.took() == "fast"
                assert show(work.site).endswith(" in test_the_site_is_the_users_also_behind_other_frames")
            assert (walks > 0) is walked

        sites: SimpleQueue[str] = SimpleQueue()

        def put(work: Any) -> None:
            sites.put(show(work.site))

        exec(compile("def alone(call, put):\n    put(call())\n", str(inner / "inner.py"), "exec"), names)
        _thread.start_new_thread(names["alone"], (call, put))
        assert sites.get(timeout=30) == ("" if inner.name == "asynccomm" else f"{inner / 'inner.py'}:2 in alone")


@pytest.mark.ranks(1)
async def test_a_streak_of_awaits_yields() -> None:
    async with counted() as (comm, _):
        tensor, ticks, stop = torch.ones(2), 0, False

        async def tick() -> None:
            nonlocal ticks
            while not stop:
                ticks += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(tick())
        for _ in range(64 * 5):
            await comm.all_reduce(tensor)
        stop = True
        await task
        assert ticks >= 5


@pytest.mark.ranks(2)
async def test_calls_that_differ_by_shared_memory_alone() -> None:
    async with counted() as (comm, paths):
        me = comm.rank
        for round in range(12):
            inputs = [torch.full((2,), float(me + 1)), torch.full((2,), 10.0 * (me + 1))]
            output = [torch.empty(2), inputs[me], inputs[1 - me], torch.empty(2)][round % 4]
            await comm.reduce_scatter(output, inputs)
            assert output.tolist() == [[3.0] * 2, [30.0] * 2][me]
            gathered = [torch.empty(2), torch.empty(2)]
            mine = gathered[me] if round % 3 else torch.empty(2)
            mine.fill_(me + 5.0)
            await comm.all_gather(gathered, mine)
            assert [tensor.tolist() for tensor in gathered] == [[5.0] * 2, [6.0] * 2]
            source = torch.full((4,), me + 1.0)
            target = source if round % 2 else torch.empty(4)
            await comm.all_reduce(source, out=target)
            assert target.tolist() == [3.0] * 4
        assert paths.ordinary <= 12, "the output is another rank's input in every fourth round"


@pytest.mark.ranks(2)
async def test_lists_are_right_wherever_their_tensors_lie() -> None:
    async with counted() as (comm, paths):
        for round in range(8):
            whole = torch.zeros(1 + 40 * 3)
            adjacent = list(whole[1:].split(3))
            apart = [torch.zeros(3) for _ in range(40)]
            mixed = [*adjacent[:5], *apart[5:17], *adjacent[17:]]
            for tensors in (adjacent, apart, mixed) if round % 2 else (mixed, apart, adjacent):
                for k, tensor in enumerate(tensors):
                    tensor.fill_(k + round + comm.rank)
                assert await comm.all_reduce_coalesced(tensors) is tensors
                assert [tensor.tolist() for tensor in tensors] == [[2 * (k + round) + 1.0] * 3 for k in range(40)]
                for tensor in tensors:
                    tensor += comm.rank
                assert await comm.broadcast_coalesced(tensors, 1) is tensors
                assert [tensor.tolist() for tensor in tensors] == [[2 * (k + round) + 2.0] * 3 for k in range(40)]
            assert whole[0] == 0
            adopted, took = paths.adopted, paths.took()  # C hands over the calls of a rank that waits for a late one
            assert took == ("fast" if round else "ordinary") or (round and adopted), "lists must come twice"
        assert comm.statistics().submitted == 8 * 3 * 2
        several = [torch.ones(2), torch.ones(3, dtype=torch.int64)]
        await comm.all_reduce_coalesced(several)
        assert paths.took() == "ordinary", "one operation for each dtype"
        many = [torch.full((1,), float(k)) for k in range(300)]
        await comm.all_reduce_coalesced(many)
        assert paths.took() == "ordinary", "more tensors than a key may name"
        assert [tensor.item() for tensor in many] == [2.0 * k for k in range(300)]
        assert several[1].tolist() == [2, 2, 2]


@pytest.mark.ranks(2)
async def test_a_list_of_a_late_rank_goes_on(comm: Comm) -> None:
    async with counted(hints={"spin_us": "0"}) as (own, _):
        for round in range(6):
            tensors = [torch.full((5,), float(own.rank + k)) for k in range(30)]
            late = own.rank != round % 2
            if late:
                await comm.barrier()
            work = own.all_reduce_coalesced(tensors)
            others = [own.barrier() for _ in range(20)]  # while the list goes on
            if not late:
                await comm.barrier()
            await asyncio.gather(work, *others)
            assert [tensor.tolist() for tensor in tensors] == [[2 * k + 1.0] * 5 for k in range(30)]


@pytest.mark.ranks(2)
async def test_messages_are_right_and_in_order() -> None:
    async with counted() as (comm, paths):
        me, other = comm.rank, 1 - comm.rank
        sizes = [1, 2, 7, 100, 4096, 16384, 3]  # more bytes than the ring has: frames wrap around
        for round in range(40):
            for numel in sizes:
                mine, theirs = torch.full((numel,), round + me * 0.5), torch.empty(numel)
                if me:
                    assert await comm.send(mine, other, tag=numel) is mine
                    work = comm.recv(theirs, other, tag=numel)
                else:
                    work = comm.recv(theirs, other, tag=numel)
                    await work
                    await comm.send(mine, other, tag=numel)
                assert await work is theirs
                assert work.source == other
                assert work.seq == 2 * (round * len(sizes) + sizes.index(numel)) + me
                assert str(work.op) == f"recv(float32[{numel}], src={other}, tag={numel})"
                assert torch.equal(theirs, torch.full((numel,), round + other * 0.5))
        assert comm.statistics()[:2] == (2 * 40 * len(sizes), 0)
        assert paths.ordinary < 40 * len(sizes), "most are fast; a rank that loses its core makes some ordinary"


@pytest.mark.ranks(2)
async def test_a_message_is_read_while_it_is_written(comm: Comm) -> None:
    """Rank 1 writes longer messages by hand, in two parts; some of them need padding in front."""
    async with new_comm("shm", name="parts", timeout=30) as own:
        backend = own.unsafe_get_backend()
        assert isinstance(backend, ShmBackend)
        for round in range(12):
            mine, nbytes, part = torch.arange(40_000.0) + round, 160_000, 100_000
            await (own.recv(torch.empty(40_000), 1) if comm.rank == 0 else own.send(mine, 0))  # known to C by then
            if comm.rank == 0:
                await comm.barrier()  # the first part is there
                got = torch.zeros(40_000)
                work = own.recv(got, 1)
                assert not work.done()
                assert torch.equal(got[: part // 4], mine[: part // 4])
                assert not got[part // 4 :].any()
                await comm.barrier()
                assert torch.equal(await work, mine)
            else:
                link = backend._engine._messages._links[0]
                ring = link._writer
                target = ring.reserve(nbytes)
                ctypes.memmove(target, mine.data_ptr(), part)
                struct.pack_into("=IIIIIxxxxQ", ring._raw, ring._at, nbytes, SHORT, 0, CODES[torch.float32], 0, 40_000)
                ring._words[ring._head_at + 1] = ring._end - framed(nbytes) + HEADER + part
                await comm.barrier()
                await comm.barrier()
                ctypes.memmove(target + part, mine.data_ptr() + part, nbytes - part)
                ring.publish(SHORT, 0, CODES[torch.float32], 0, 40_000)
                link.state.sent += framed(nbytes)


@pytest.mark.ranks(2)
async def test_fast_and_ordinary_messages_mix(comm: Comm) -> None:
    async with counted() as (own, _):
        other = 1 - own.rank
        for round in range(30):
            first, second, last = (torch.full((5,), 10.0 * round + k) for k in range(3))
            got = [torch.empty(5) for _ in range(3)]
            if own.rank == 0:
                await own.send(first, 1, tag=7)
                await own.send(second, 1, tag=8, timeout=20)
                await own.send(torch.ones(1 << 17), 1, tag=9)  # offered
                await own.send(last, 1, tag=7)
            else:
                await own.recv(got[1], 0, tag=8)  # which stands behind the first in the ring
                works = [own.recv(got[0], tag=7), own.recv(torch.empty(1 << 17), 0, tag=9)]
                await asyncio.gather(*works)
                await own.recv(got[2], 0, tag=7)
                for k in range(3):
                    assert got[k].tolist() == [10.0 * round + k] * 5
            await own.barrier()
        assert own.statistics().in_flight == 0
        await own.recv_object(other) if own.rank else await own.send_object("x", other)


@pytest.mark.ranks(2)
async def test_messages_that_do_not_fit_are_an_error() -> None:
    for received in (torch.empty(3), torch.empty(2, dtype=torch.int32)):
        async with new_comm("shm", name=f"unfit {received.dtype}", timeout=30) as comm:
            await comm.barrier()
            if comm.rank == 0:
                await comm.send(torch.ones(2), 1)
                with pytest.raises((CollectiveMismatchError, PeerLostError)):
                    await comm.recv(torch.empty(1), 1)
            else:
                with pytest.raises(CollectiveMismatchError, match=r"send\(float32\[2\]"):
                    await comm.recv(received, 0)


@pytest.mark.ranks(2)
async def test_a_sender_without_room_waits(comm: Comm) -> None:
    async with counted(hints={"message_bytes": "4096"}) as (own, _):
        if own.rank == 0:
            works = [own.send(torch.full((64,), float(k)), 1) for k in range(100)]
            assert not works[-1].done()
            await comm.barrier()
            await asyncio.gather(*works)
            await own.send(torch.full((64,), 100.0), 1)
        else:
            await comm.barrier()
            for k in range(101):
                tensor = torch.empty(64)
                await own.recv(tensor, 0)
                assert tensor.tolist() == [float(k)] * 64


@pytest.mark.ranks(2)
async def test_a_late_rank_is_waited_for_outside_of_the_call(comm: Comm) -> None:
    hints = {"spin_us": "0"}
    async with counted(hints=hints) as (own, paths):
        for round in range(20):
            values = torch.full((3,), own.rank + round + 1.0)
            if own.rank == round % 2:
                work = own.all_reduce(values)
                assert own.statistics().in_flight == 1
                del values
                gc.collect()
                assert not work.done()
                await comm.barrier()
            else:
                await comm.barrier()
                work = own.all_reduce(values)
            assert (await work).tolist() == [2 * round + 3.0] * 3
            assert work.seq == round
            assert own.statistics().in_flight == 0
        assert paths.adopted + paths.ordinary >= 10


@pytest.mark.ranks(2)
async def test_a_rank_that_will_not_spin_asks_for_a_ring_in_the_call(comm: Comm) -> None:
    at_once = []
    async with counted() as (own, _):
        for _ in range(10):
            values = torch.ones(3)
            if own.rank == 0:
                engine: Any = own.unsafe_get_backend()._engine  # type: ignore[attr-defined]
                engine._position.collective_wait = 1.0
                work = own.all_reduce(values)
                assert not work.done()
                at_once.append(not engine._position.arming)
                await comm.barrier()
            else:
                await comm.barrier()
                work = own.all_reduce(values)
            assert (await work).tolist() == [2.0] * 3
    # not at the first call of the kind, and not while another thread drives
    assert comm.rank == 1 or any(at_once)


@pytest.mark.ranks(2)
async def test_a_deadline_holds_for_a_call_that_goes_on(comm: Comm) -> None:
    if comm.rank == 0:
        async with new_comm("shm", name="late", timeout=30) as late:
            await late.all_reduce(torch.ones(2))
            late.set_timeout(0.2)
            with pytest.raises(
                CollectiveTimeoutError, match=r"all_reduce\(float32\[2\], SUM\) #1 .*not arrived: ranks \[1\]"
            ):
                await late.all_reduce(torch.ones(2))
        await comm.barrier()
    else:
        async with new_comm("shm", name="late", timeout=30) as late:
            await late.all_reduce(torch.ones(2))
            await comm.barrier()


@pytest.mark.ranks(2)
async def test_ranks_that_differ_get_an_error() -> None:
    async with new_comm("shm", name="differ", timeout=30) as comm:
        for _ in range(3):
            await comm.all_reduce(torch.ones(4))
        with pytest.raises(CollectiveMismatchError) as caught:
            for _ in range(2):
                await comm.all_reduce(torch.ones(4 if comm.rank else 5))
        error = caught.value
        mine, theirs = ("float32[5]", "float32[4]") if error.rank == 0 else ("float32[4]", "float32[5]")
        assert error.seq == 3
        assert mine in str(error.op)
        assert theirs in str(error.other_op)


@pytest.mark.ranks(2)
async def test_more_kinds_of_calls_than_the_table_holds() -> None:
    async with counted() as (comm, paths):
        for _ in range(2):
            for numel in range(1, 700):
                tensor = torch.full((numel,), float(comm.rank + numel))
                await comm.all_reduce(tensor)
                assert tensor[-1].item() == 2 * numel + 1
        assert paths.ordinary == 0


@pytest.mark.ranks(2)
async def test_any_thread_may_call(comm: Comm) -> None:
    async with counted() as (own, _):
        errors: list[BaseException] = []

        def work(rounds: int) -> None:
            try:
                for _ in range(rounds):
                    tensor = torch.ones(4)
                    own.all_reduce(tensor).wait()
                    assert tensor.tolist() == [2.0] * 4
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=work, args=(200,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            tensor = torch.ones(4)
            await own.all_reduce(tensor)
            assert tensor.tolist() == [2.0] * 4
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0)
        assert errors == []
        await comm.barrier()
        assert own.statistics()[:2] == (800, 0)


@pytest.mark.ranks(1)
async def test_another_loop_is_refused() -> None:
    async with counted() as (comm, _):
        await comm.all_reduce(torch.ones(2))
        caught: list[str] = []

        async def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                comm.all_reduce(torch.ones(2))
            caught.append("refused")

        thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0)
        assert caught == ["refused"]


@pytest.mark.ranks(1)
async def test_nothing_is_kept() -> None:
    async with counted() as (comm, _):
        for _ in range(3):
            tensor = torch.ones(5)
            work = comm.all_reduce(tensor)
            gone = [weakref.ref(tensor), weakref.ref(work)]
            await work
            del tensor, work
            assert [reference() for reference in gone] == [None, None]
    watched = weakref.ref(comm)
    gc.collect()
    gc.disable()
    try:
        del comm
        assert watched() is None, "a cycle keeps the comm"
    finally:
        gc.enable()


@pytest.mark.ranks(2)
async def test_with_a_rank_that_runs_the_executor_in_python() -> None:
    with pytest.MonkeyPatch.context() as patched:
        if os.environ["RANK"] == "1":
            patched.setenv("ASYNCCOMM_EXECUTOR", "reference")
        async with counted() as (comm, paths):
            for round in range(50):
                tensor = torch.full((4,), float(comm.rank + round))
                await comm.all_reduce(tensor)
                assert tensor.tolist() == [2.0 * round + 1] * 4
            assert (paths.took() == "fast") == (comm.rank == 0)


@pytest.mark.ranks(2)
async def test_a_list_that_another_thread_changes() -> None:
    async with counted() as (comm, _):
        given = torch.ones(40000)
        outputs = [torch.empty(40000) for _ in range(2)]
        stop = threading.Event()

        def change() -> None:
            while not stop.is_set():
                outputs[1] = torch.zeros(40000)

        thread = threading.Thread(target=change)
        thread.start()
        for _ in range(500):
            await comm.all_gather(outputs, given)
        stop.set()
        thread.join()
        assert outputs[0].tolist() == [1.0] * 40000


@pytest.mark.ranks(1)
@pytest.mark.parametrize("left", [0, 16])
@pytest.mark.parametrize("first", [0, 10])
async def test_views_of_a_storage_that_was_resized_are_left_to_the_ordinary_path(first: int, left: int) -> None:
    async with counted() as (comm, paths):
        for _ in range(3):
            await comm.all_reduce(torch.ones(10, 2))
        whole = torch.ones(100)
        view = whole[first : first + 20].view(10, 2)
        await comm.all_reduce(view)
        assert paths.took() == "fast"
        whole.untyped_storage().resize_(left)
        needed = 4 * (first + 20)
        with pytest.raises(ValueError, match=rf"tensor needs {needed} bytes of memory .* was resized to {left}"):
            await comm.all_reduce(view)
        assert paths.took() == "ordinary"


@pytest.mark.ranks(2)
async def test_an_exception_before_a_begun_operation_is_adopted_breaks_the_comm(comm: Comm) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if comm.rank == 0:

            def interrupted(*_: object) -> None:
                raise KeyboardInterrupt

            patched.setattr(SubmitterCalls, "adopt", interrupted)
        async with new_comm("shm", name="interrupted", timeout=30, hints={"spin_us": "0"}) as own:
            await own.barrier(timeout=30)
            backend = own.unsafe_get_backend()
            assert isinstance(backend, ShmBackend)
            while backend._engine._lock.locked():  # by the thread that has finished the barrier
                await asyncio.sleep(0)
            if comm.rank == 0:
                with pytest.raises(KeyboardInterrupt):
                    own.all_reduce(torch.ones(2))
                with pytest.raises(BrokenError, match="KeyboardInterrupt"):
                    await own.barrier()
                await comm.barrier()
            else:
                await comm.barrier()
                with pytest.raises(BrokenError):
                    await own.all_reduce(torch.ones(2))  # may be done: the other rank has filled its slot
                    await own.barrier()


@pytest.mark.ranks(1)
async def test_dtypes_that_look_alike_are_told_apart() -> None:
    async with counted() as (comm, _):
        tensor = torch.ones(7, dtype=torch.uint8)
        for _ in range(2):
            assert str(comm.broadcast(tensor, 0).op) == "broadcast(uint8[7], root=0)"
            assert str(comm.broadcast(tensor.view(torch.bits8), 0).op) == "broadcast(bits8[7], root=0)"


@pytest.mark.ranks(2)
async def test_lists_of_dtypes_that_look_alike_are_checked_to_their_ends() -> None:
    async with counted() as (comm, paths):
        for _ in range(3):
            many = [torch.full((4,), comm.rank + 1, dtype=torch.uint8) for _ in range(300)]  # more than a key may have
            assert {tensor.sum().item() for tensor in await comm.all_reduce_coalesced(many)} == {12}
        one = torch.zeros(2, dtype=torch.uint8)
        for other in (None, "x"):
            with pytest.raises(TypeError, match=r"^tensor_list\[1\] must be a torch.Tensor"):
                comm.all_gather([one, other], one)  # type: ignore[list-item]
        assert paths.took() == "ordinary"


@pytest.mark.ranks(2)
async def test_a_lazily_negated_tensor_is_sent_as_its_values() -> None:
    async with counted() as (comm, paths):
        root = torch.ones(3)
        for _ in range(2):
            await comm.broadcast(root, 0)
        paths.took()
        tensor = torch.full((3,), 2.0)._neg_view() if comm.rank == 0 else torch.zeros(3)
        assert torch.equal(await comm.broadcast(tensor, 0), torch.full((3,), -2.0))
        assert paths.took() == ("ordinary" if comm.rank == 0 else "fast")


@pytest.mark.ranks(1)
async def test_the_result_is_the_output_that_was_passed() -> None:
    async with counted() as (comm, paths):
        tensor = torch.ones(5)
        for _ in range(2):
            assert await comm.all_reduce(tensor, out=tensor) is tensor
            other = tensor.detach()
            assert await comm.all_reduce(tensor, out=other) is other
            assert await comm.reduce(tensor, 0, out=other) is other
        assert paths.took() == "fast"


@pytest.mark.ranks(1)
async def test_a_thread_without_python_frames_may_call() -> None:
    async with counted() as (comm, _):
        await comm.barrier()
        _thread.start_new_thread(comm.barrier, ())
        while comm.statistics().submitted < 2:
            await asyncio.sleep(0)
        assert comm.statistics()[:2] == (2, 0)
        call = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_void_p)
        method = call(("PyObject_CallMethodObjArgs", ctypes.pythonapi))
        _thread.start_new_thread(method, (comm, "barrier", None))  # as a program in C does
        while comm.statistics().submitted < 3:
            await asyncio.sleep(0)


def test_modules_that_were_chosen_at_different_times() -> None:
    program = """
import asyncio, os
import asynccomm.core.work
os.environ.pop("ASYNCCOMM_EXECUTOR")
import torch, asynccomm

async def main():
    async with asynccomm.new_comm("shm", store=asynccomm.MemoryStore(), rank=0, size=1) as comm:
        print((await comm.all_reduce(torch.ones(2))).tolist())

asyncio.run(main())
"""
    environment = os.environ | {"ASYNCCOMM_EXECUTOR": "reference"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("[1.0, 1.0]")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("part", some(range(4), 2))
async def test_a_peer_that_writes_nonsense_is_named(part: int) -> None:
    """Frames, heads and counters that no honest rank writes, in front of a receive in C."""
    choose = random.Random(part)
    numbers = [0, 1, 63, 64, 8, 100, 2**16, 2**20 - 64, 2**20, 2**20 + 64, 2**31, 2**32 - 1]
    for case in range(amount(10, 5)):
        numel = choose.choice([2, 4000])  # the longer one may be read while it is written
        honest = (4 * numel, SHORT, 0, CODES[torch.float32], 0)
        fields = [choose.choice(numbers) if choose.random() < 0.5 else number for number in honest]
        length = choose.choice([numel, numel, 0, 2**63, 2**64 - 1])
        step = choose.choice([*[framed(4 * numel)] * 3, 0, 0, 8, 2**20, 2**20 + 64, 2**40])
        begun = choose.choice([*numbers, HEADER + 8000, HEADER + 16001, 2**63, 2**64 - 1])
        async with new_comm("shm", name=f"nonsense {part} {case}", timeout=30) as comm:
            tensor = torch.zeros(numel)
            if comm.rank == 0:
                await comm.recv(tensor, 1)
                with contextlib.suppress(BrokenError):
                    await comm.barrier()  # after which the other rank waits for 0.1 s
                    comm.set_timeout(0.1)
                    await comm.recv(tensor, 1)
                    assert (*fields[:4], length) == (*honest[:4], numel)
                continue
            await comm.send(tensor, 0)
            await comm.barrier()
            comm.set_timeout(0.1)
            backend = comm.unsafe_get_backend()
            assert isinstance(backend, ShmBackend)
            link = backend._engine._messages._links[0]
            ring = link._writer
            struct.pack_into("=IIIIIxxxxQ", ring._raw, ring._start + link.state.head, *fields, length)
            ring._words[ring._head_at + 1] = (link.state.head + begun) % 2**64
            ring._words[ring._head_at] = (link.state.head + step) % 2**64
            with contextlib.suppress(BrokenError):
                await comm.recv(tensor, 0)
