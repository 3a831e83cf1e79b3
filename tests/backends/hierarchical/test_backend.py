"""The hierarchical backend on real processes: conformance on pretended hosts, placing, equal bits, mismatches."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch

from asynccomm import CollectiveMismatchError, Comm, ReduceOp, new_comm
from asynccomm.backends.hierarchical.backend import HierarchicalBackend
from asynccomm.backends.shm import backend as shm_module
from asynccomm.core.work import Work
from asynccomm.testing import check_backend
from tests.pretended_hosts import HINTS, LAYOUTS, comm_on, pretend
from tests.sampling import amount

from ..conformance import MANY_RANKS  # noqa: TID252

SAMPLE = [  # of each way through the backend one or two: its parts have quick tests of their own
    "long_tensors_in_every_form",
    "views_that_overlap_on_one_rank",
    "tensors_of_inference_mode_in_every_form",
    "objects_of_every_kind_to_all",
    "everything_in_one_scope",
    "mixed_operations_in_flight",
    "wait_blocks_threads_but_never_the_loop",
    "messages_keep_their_order_and_tags",
    "receives_from_any_source",
    "objects_from_any_source",
    "queues_carry_items_beside_collectives",
    "queues_gather_items_in_the_order_of_each_writer",
    "tokens_to_their_experts_and_back",
    "abort_ends_everybody",
    "deadlines_name_who_is_missing",
]


async def conform(monkeypatch: pytest.MonkeyPatch, layout: str, only: list[str] | None = None) -> None:
    pretend(monkeypatch, LAYOUTS[layout])
    await check_backend(lambda name: new_comm("hierarchical", name=name, timeout=50, hints=HINTS), only=only)


@pytest.mark.ranks(4, timeout=240)
async def test_a_sample_of_the_conformance_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    await conform(monkeypatch, "mixed", SAMPLE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["2x2", "3+1", "mixed"])
@pytest.mark.ranks(4, timeout=400)
async def test_conformance(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    await conform(monkeypatch, layout)


@pytest.mark.exhaustive
@pytest.mark.ranks(3, timeout=400)
async def test_conformance_with_one_rank_on_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    await conform(monkeypatch, "1+1+1")


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.ranks(6, timeout=400)
async def test_conformance_on_six_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    await conform(monkeypatch, "2x3", MANY_RANKS)


def hierarchical(comm: Comm) -> HierarchicalBackend:
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, HierarchicalBackend)
    return backend


# -- choosing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "backend"), [("aabb", "hierarchical"), ("abab", "hierarchical"), ("abcd", "gloo"), ("aaaa", "shm")]
)
@pytest.mark.ranks(4)
async def test_auto_takes_it_where_a_host_of_several_has_several_ranks(
    monkeypatch: pytest.MonkeyPatch, hosts: str, backend: str
) -> None:
    async with comm_on(monkeypatch, hosts, "auto") as comm:
        assert comm.backend == backend
        tensor = torch.ones(2)
        await comm.all_reduce(tensor)
        assert tensor.tolist() == [4, 4]


@pytest.mark.ranks(4)
async def test_ranks_that_cannot_share_memory_are_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ["RANK"] == "3":
        monkeypatch.setattr(shm_module, "unsupported", lambda: "there is none")
    async with comm_on(monkeypatch, "aabb") as comm:
        assert hierarchical(comm).placement.hosts == ((0, 1), (2,), (3,))
        tensor = torch.arange(3.0)
        await comm.all_reduce(tensor)
        assert tensor.tolist() == [0, 4, 8]


@pytest.mark.ranks(2)
async def test_hints_of_both_engines_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="gloo_threads"):
        new_comm("hierarchical", hints={"gloo_threads": "none"})
    with pytest.raises(ValueError, match="whole_bytes"):
        new_comm("hierarchical", hints={"whole_bytes": "none"})
    async with comm_on(monkeypatch, "ab", hints={**HINTS, "gloo_threads": "1", "spin_us": "0"}) as comm:
        assert comm.options.hints == {**HINTS, "gloo_threads": "1", "spin_us": "0"}


@pytest.mark.parametrize(
    ("exclude", "backends"), [((3, 1), ["hierarchical", "gloo"]), ((2, 2), ["hierarchical", "shm"]), ((0, 1), None)]
)
@pytest.mark.ranks(4)
async def test_a_shrink_chooses_the_backend_of_the_hosts_that_are_left(
    monkeypatch: pytest.MonkeyPatch, exclude: tuple[int, int], backends: list[str] | None
) -> None:
    """From 2x2, one rank after the other goes; each comm works. The backend of a name stays that one."""
    async with comm_on(monkeypatch, LAYOUTS["2x2"]) as everybody:
        comm = await new_comm("hierarchical" if backends is None else "auto", name="large", timeout=50, hints=HINTS)
        comms, found = [comm], []
        for out in exclude:
            if comm.rank == out:
                break
            comm = await comm.shrink([out])
            comms.append(comm)
            found.append(comm.backend)
            tensor = torch.full((5,), float(comm.rank))
            await comm.all_reduce(tensor)
            assert tensor.tolist() == [sum(range(comm.size))] * 5
            following = comm.send(torch.tensor([comm.rank]), (comm.rank + 1) % comm.size)
            work = comm.recv(torch.zeros(1, dtype=torch.int64))
            assert (await work).item() == work.source == (comm.rank - 1) % comm.size
            await following
        assert found == (backends or ["hierarchical"] * 2)[: len(found)]
        await everybody.barrier()
        for each in reversed(comms):
            await each.aclose()


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["3+1", "mixed"])
@pytest.mark.ranks(4)
async def test_all_ranks_get_the_same_bits(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    async with comm_on(monkeypatch, LAYOUTS[layout]) as comm:
        generator = torch.Generator().manual_seed(comm.rank)
        for n in (3, 1 << 12, (1 << 18) + 5, (amount(5, 1) << 20) + 3):
            for dtype in (torch.float32, torch.bfloat16):
                tensor = torch.randn(n, generator=generator).to(dtype)
                exact = await comm.all_gather_object(tensor.double()) if n < 1 << 18 else None
                await comm.all_reduce(tensor, ReduceOp.AVG)
                first = tensor.clone()
                await comm.broadcast(first, 0)
                assert tensor.view(torch.uint8).equal(first.view(torch.uint8))
                if exact is not None:
                    wanted = torch.stack(list(exact)).mean(0)
                    torch.testing.assert_close(tensor.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.ranks(4)
async def test_many_operations_of_all_sizes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with comm_on(monkeypatch, LAYOUTS["2x2"]) as comm:
        tensors = [torch.full((n,), float(n)) for n in (1, 1 << 20, 5, 3 << 20, 7, 1 << 10)]
        works: list[Work[Any]] = [comm.all_reduce(tensor) for tensor in tensors]
        works += [comm.barrier(), comm.all_gather_object(comm.rank)]
        await asyncio.gather(*works)
        assert works[-1].result() == [0, 1, 2, 3]
        for tensor in tensors:
            assert tensor.min() == tensor.max() == 4 * tensor.numel()


# -- mismatches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [1, 3])
@pytest.mark.ranks(4)
async def test_ranks_that_call_something_else_are_named_on_all_ranks(monkeypatch: pytest.MonkeyPatch, odd: int) -> None:
    """The rank differs from the other one of its host, which has called the same as the other host."""
    async with comm_on(monkeypatch, LAYOUTS["2x2"]) as comm:
        with pytest.raises(CollectiveMismatchError) as raised:
            await comm.barrier()  # which some ranks may leave, and differ, before others do
            await comm.all_reduce(torch.ones(4) if comm.rank != odd else torch.ones(5, dtype=torch.int32))
        error = raised.value
        assert {error.op, error.other_op} == {"all_reduce(float32[4], SUM)", "all_reduce(int32[5], SUM)"}
        assert odd in (error.rank, error.other_rank)


@pytest.mark.parametrize("control", ["on", "off"])
@pytest.mark.ranks(4)
async def test_hosts_that_call_something_else_are_named(monkeypatch: pytest.MonkeyPatch, control: str) -> None:
    async with comm_on(monkeypatch, LAYOUTS["2x2"], hints={**HINTS, "control": control}) as comm:
        halves = comm.rank > 1  # which travel as floats
        error = None
        try:
            await comm.barrier()  # which some ranks may leave, and differ, before others do
            await comm.all_reduce(torch.ones(4, dtype=torch.float16 if halves else torch.float32))
        except Exception as exc:
            error = exc
        if control == "on" or comm.rank in (0, 2):  # without the channel, only the leaders learn the reason
            assert isinstance(error, CollectiveMismatchError)
            assert {error.op, error.other_op} == {"all_reduce(float32[4], SUM)", "all_reduce(float16[4], SUM)"}
            assert {error.rank, error.other_rank} == {0, 2}
        assert error is not None
