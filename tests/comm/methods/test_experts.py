"""dispatch and combine against one process that has all tokens and all experts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm import AbortedError, CollectiveMismatchError, Comm, Dispatched, PayloadError, Routing, Work, experts
from asynccomm.experts import local_experts
from asynccomm.testing import loopback_world
from tests.sampling import examples


@dataclass(frozen=True)
class Case:
    """The tokens of all ranks, and their experts."""

    tokens: tuple[int, ...]  #: of each rank
    num_experts: int
    k: int
    placed: bool  #: at random, instead of in blocks
    weighted: bool
    concentrated: bool  #: all tokens to one expert
    seed: int
    dtype: torch.dtype = torch.float64

    def of(self, rank: int) -> tuple[Tensor, Tensor, Routing]:
        """Hidden states, an extra tensor and the routing of one rank."""
        make = torch.Generator().manual_seed(self.seed * 1000 + rank)
        count = self.tokens[rank]
        hidden = torch.randn(count, 3, generator=make, dtype=torch.float64).to(self.dtype)
        logits = torch.randint(100, (count, 2, 2), generator=make, dtype=torch.int16)
        ids = torch.randint(-1, self.num_experts, (count, self.k), generator=make)
        if self.concentrated:
            ids.fill_(self.seed % self.num_experts)
        weights = torch.rand(count, self.k, generator=make, dtype=self.dtype) if self.weighted else None
        return hidden, logits, Routing(ids.int(), self.num_experts, weights, self.placement)

    @property
    def placement(self) -> list[int] | None:
        if not self.placed:
            return None
        make = torch.Generator().manual_seed(self.seed)
        return torch.randint(len(self.tokens), (self.num_experts,), generator=make).tolist()


def expected_rows(case: Case, experts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(rank, token, slot) of each row, sorted by expert, rank, token and slot."""
    found = []
    for rank in range(len(case.tokens)):
        ids = case.of(rank)[2].experts.tolist()
        found += [
            (expert, rank, token, slot)
            for token, row in enumerate(ids)
            for slot, expert in enumerate(row)
            if expert in experts
        ]
    return [(rank, token, slot) for _, rank, token, slot in sorted(found)]


def compute(expert: int, rows: Tensor) -> Tensor:
    return rows * (expert + 1) + expert


def expected_result(case: Case, rank: int) -> Tensor:
    hidden, _, routing = case.of(rank)
    total = torch.zeros_like(hidden, dtype=torch.float64)
    for token, row in enumerate(routing.experts.tolist()):
        for slot, expert in enumerate(row):
            if expert >= 0:
                weight = 1.0 if routing.weights is None else routing.weights[token, slot].double()
                total[token] += weight * compute(expert, hidden[token]).double()
    return total


def check_received(case: Case, comm: Comm, sent: Dispatched) -> None:
    assert sent.experts == local_experts(comm, case.num_experts, case.placement)
    all_ranks = [case.of(rank) for rank in range(comm.size)]
    rows = expected_rows(case, sent.experts)
    ids = [int(all_ranks[rank][2].experts[token, slot]) for rank, token, slot in rows]
    assert sent.expert_counts == [ids.count(expert) for expert in sent.experts]
    assert len(sent.rank_counts) == comm.size
    assert sent.hidden.shape == (len(rows), 3)
    (logits,) = sent.extras
    for i, (rank, token, slot) in enumerate(rows):
        hidden, extra, routing = all_ranks[rank]
        assert sent.hidden[i].equal(hidden[token])
        assert logits[i].equal(extra[token])
        if routing.weights is not None:
            assert sent.weights is not None
            assert sent.weights[i] == routing.weights[token, slot]


async def check(case: Case, comm: Comm) -> None:
    hidden, logits, routing = case.of(comm.rank)
    sent = await comm.dispatch(hidden, routing, [logits])
    check_received(case, comm, sent)
    parts = zip(sent.experts, sent.hidden.split(sent.expert_counts) if sent.experts else (), strict=True)
    rows = torch.cat([sent.hidden[:0], *[compute(expert, part) for expert, part in parts]])
    total = await comm.combine(rows, sent)
    assert total.dtype == case.dtype
    torch.testing.assert_close(total.double(), expected_result(case, comm.rank), rtol=1e-12, atol=1e-12)
    assert (await comm.combine(rows, sent)).equal(total), "a dispatch may be combined again"
    wide = await comm.combine(rows[:, None, :1], sent)
    assert wide.shape == (len(hidden), 1, 1)
    torch.testing.assert_close(wide[:, 0, 0], total[:, 0])


CASES = st.builds(
    Case,
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    num_experts=st.integers(1, 7),
    k=st.integers(1, 4),
    placed=st.booleans(),
    weighted=st.booleans(),
    concentrated=st.booleans(),
    seed=st.integers(0, 1 << 16),
)


@given(CASES)
@examples(200, 20)
def test_dispatch_and_combine_equal_one_process(case: Case) -> None:
    async def main() -> None:
        async with loopback_world(len(case.tokens)) as comms:
            await asyncio.gather(*(check(case, comm) for comm in comms))

    asyncio.run(main())


@pytest.mark.ranks([2, 3], backend=["shm", "gloo"])
async def test_a_sample_on_processes(comm: Comm) -> None:
    for tokens in ([0, 0, 0], [5, 0, 9], [700, 31, 1000]):
        case = Case(tuple(tokens[: comm.size]), 5, 3, False, True, False, 7)
        for changed in (case, replace(case, placed=True, weighted=False), replace(case, concentrated=True, k=1)):
            if max(tokens) < 100:
                await check(changed, comm)
            else:
                await check_sums(changed, comm)


async def check_sums(case: Case, comm: Comm) -> None:
    """As ``check``, for many tokens."""
    hidden, _, routing = case.of(comm.rank)
    hidden = hidden.repeat(1, 50)
    sent = await comm.dispatch(hidden, routing)
    total = await comm.combine(sent.hidden, sent)
    weights = (routing.experts >= 0).double() if routing.weights is None else routing.weights * (routing.experts >= 0)
    torch.testing.assert_close(total, hidden * weights.sum(1, keepdim=True))


async def check_to_all(comm: Comm, sizes: list[int] | None, tokens: Sequence[int]) -> None:
    def of(rank: int) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(tokens[rank] * 4, dtype=torch.float32).view(-1, 4) + 100 * rank
        return numbers, numbers[:, 0].to(torch.int32)

    hidden, logits = of(comm.rank)
    sent = await comm.dispatch(hidden, extras=[logits], sizes=sizes)
    assert sent.hidden.equal(torch.cat([of(rank)[0] for rank in range(comm.size)]))
    assert sent.extras[0].equal(torch.cat([of(rank)[1] for rank in range(comm.size)]))
    assert sent.rank_counts == list(tokens)
    assert (sent.weights, sent.experts, sent.expert_counts) == (None, (), [])
    assert (await comm.combine(sent.hidden, sent)).equal(hidden * comm.size)


@pytest.mark.ranks([1, 2, 3], backend=["shm", "gloo"])
async def test_without_a_routing_all_ranks_get_all_tokens(comm: Comm) -> None:
    for tokens in ([4, 4, 4], [0, 7, 3], [0, 0, 0]):
        counts = tokens[: comm.size]
        for sizes in (None, counts):
            await check_to_all(comm, sizes, counts)


@pytest.mark.ranks([2, 3], backend=["shm", "gloo"])
async def test_both_calls_read_the_result_of_an_operation_in_flight(comm: Comm) -> None:
    for count in (3, 20_011):
        hidden, size = torch.full((count, 8), 1.0), comm.size
        works = [comm.all_reduce(hidden)]
        routing = Routing(torch.arange(count).view(-1, 1) % 4, 4)
        sending = comm.dispatch(hidden, routing)
        works.append(comm.all_reduce(hidden))
        sent = await sending
        assert sent.hidden.equal(torch.full((sum(sent.rank_counts), 8), float(size)))
        rows = sent.hidden
        works.append(comm.all_reduce(again := torch.ones(count, 8)))
        works.append(comm.dispatch(again, routing))
        total = comm.combine(rows, sent)
        assert (await total).equal(torch.full((count, 8), float(size)))
        for work in works:
            await work
        assert again.equal(torch.full((count, 8), float(size)))


@pytest.mark.ranks(2, backend=["shm", "gloo", "hierarchical"])
async def test_float8_is_summed_in_float32(comm: Comm) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        ids = torch.arange(64).view(1, 64)  # 32 experts on each rank
        routing = Routing(ids, 64, torch.full(ids.shape, 0.5).to(dtype))
        hidden = torch.full((1, 3), 2.0).to(dtype)
        sent = await comm.dispatch(hidden, routing)
        for call in (comm.combine, partial(experts.combine, comm)):
            result = await call(sent.hidden, sent)
            assert result.dtype == dtype
            assert result.float().tolist() == [[64.0] * 3]


@pytest.mark.ranks(4)
async def test_without_sequence_parallelism_tensor_parallel_ranks_share_their_tokens(comm: Comm) -> None:
    """Ranks 0, 1 and ranks 2, 3 have the same tokens; each rank holds one of four experts."""
    case = Case((5, 3), 4, 2, False, True, False, 3)
    async with (
        comm.split([comm.rank % 2, comm.rank % 2 + 2], f"data {comm.rank % 2}") as data,
        comm.split([comm.rank // 2 * 2, comm.rank // 2 * 2 + 1], f"tensor {comm.rank // 2}") as tensor,
    ):
        hidden, _, routing = case.of(data.rank)
        assert routing.weights is not None
        # each data-parallel group gathers; each rank computes its expert; sums over all four ranks
        sent = await data.dispatch(hidden, extras=[routing.experts, routing.weights])
        ids, weights = sent.extras
        mine = ((ids == comm.rank) * weights).sum(1, keepdim=True)
        total = await data.combine(compute(comm.rank, sent.hidden) * mine, sent)
        await tensor.all_reduce(total)
        torch.testing.assert_close(total, expected_result(case, data.rank))
        # with the routing: each rank sends its part of the tokens, and the parts are gathered
        part = slice(None, 2) if tensor.rank == 0 else slice(2, None)
        own = Routing(routing.experts[part], 4, routing.weights[part])
        sent = await comm.dispatch(hidden[part], own)
        result = await comm.combine(compute(comm.rank, sent.hidden), sent)
        torch.testing.assert_close(await tensor.all_gather_v(None, result), expected_result(case, data.rank))


async def test_ranks_that_differ_get_an_error_and_go_on() -> None:
    ids = torch.zeros(2, 1, dtype=torch.long)
    async with loopback_world(2) as (a, b):
        for mine, theirs in [
            (Routing(ids, 2), Routing(ids, 3)),
            (Routing(ids, 2), Routing(ids, 2, placement=[1, 0])),
            (Routing(ids, 2), Routing(ids, 2, torch.ones(2, 1))),
            (Routing(ids, 2), Routing(ids.int(), 2)),
            (Routing(ids, 2), Routing(ids.expand(2, 2), 2)),
        ]:
            for work in (a.dispatch(torch.ones(2, 3), mine), b.dispatch(torch.ones(2, 3), theirs)):
                with pytest.raises(PayloadError, match="or in its routing, from this rank's: float32"):
                    await work
        works = a.dispatch(torch.ones(2, 3), Routing(ids, 2)), b.dispatch(torch.ones(2, 3), Routing(ids, 2))
        assert [(await work).expert_counts for work in works] == [[4], [0]]


async def test_operations_are_shown_as_dispatch_and_combine() -> None:
    hidden, routing = torch.ones(2, 3), Routing(torch.tensor([[0], [1]]), 2)
    async with loopback_world(2) as comms:

        async def program(comm: Comm) -> list[str]:
            works: list[Work[Any]] = []
            for work in (
                comm.dispatch(hidden, routing),
                comm.dispatch(hidden),
                comm.dispatch(hidden, sizes=[2, 2]),
            ):
                sent = await work
                works += [work, comm.combine(sent.hidden, sent)]
                await works[-1]
            return [str(work.op) for work in works]

        for texts in await asyncio.gather(*map(program, comms)):
            assert texts == [
                "dispatch()",
                "combine(float32, sends [3, 3], receives [3, 3])",
                "dispatch(routing=None)",
                "combine(float32[6], SUM)",
                "dispatch(float32[6] in pieces)",
                "combine(float32[6], SUM)",
            ]


@pytest.mark.ranks(2, backend=["shm", "gloo", "hierarchical"])
async def test_ranks_that_differ_get_errors_that_name_dispatch_and_combine(comm: Comm) -> None:
    hidden, routing = torch.ones(2, 3), Routing(torch.tensor([[0], [1]]), 2)
    first = comm.rank == 0
    async with await comm.dup(name="routing") as own:
        with pytest.raises(CollectiveMismatchError) as caught:
            await own.dispatch(hidden, routing if first else None)
        assert "rank 0 has dispatch() at" in str(caught.value)
        assert "rank 1 has dispatch(routing=None) at" in str(caught.value)
    async with await comm.dup(name="method") as own:
        sent = await own.dispatch(hidden, routing)
        rows = sent.hidden
        with pytest.raises(CollectiveMismatchError) as caught:
            await (own.combine(rows, sent) if first else own.all_to_all_v_single(None, rows, [1, 1], [1, 1]))
        assert "rank 0 has combine(float32" in str(caught.value)
        assert "rank 1 has all_to_all(float32" in str(caught.value)
    async with await comm.dup(name="rows") as own:
        sent = await own.dispatch(hidden, routing)
        with pytest.raises(CollectiveMismatchError) as caught:
            await own.combine(torch.ones(2, 3 if first else 1), sent)
        assert str(caught.value).count(" has combine(float32, sends") == 2


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_a_rank_that_ends_is_an_error_of_both_calls(comm: Comm) -> None:
    hidden, routing = torch.ones(2, 3), Routing(torch.tensor([[0, 1], [1, 0]]), 2)
    for call in ("dispatch", "combine"):
        async with await comm.dup(name=call) as own:
            sent = await own.dispatch(hidden, routing)
            if comm.rank == 1:
                own.abort("enough")
                continue
            with pytest.raises(AbortedError, match="enough"):
                await (own.dispatch(hidden, routing) if call == "dispatch" else own.combine(sent.hidden, sent))
