"""Checks of tokens that travel to the ranks of their experts, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.ops.routing import Routing
from asynccomm.testing.conformance.data import expect_equal, sample

EXPERTS = 5


def _routing(rank: int, tokens: int) -> Routing:
    """Two experts for each token, of which the second may be missing; weights are powers of two."""
    places = torch.arange(tokens)
    ids = torch.stack([(places + rank) % EXPERTS, (places * 3 + rank) % (EXPERTS + 1) - 1], 1)
    return Routing(ids, EXPERTS, torch.stack([places % 3 + 1, places % 2 + 1], 1).float())


def _expected(hidden: Tensor, routing: Routing) -> Tensor:
    """The result where the expert with id e multiplies by e + 1."""
    ids, weights = routing.experts, routing.weights
    assert weights is not None
    return hidden * ((ids + 1) * weights).sum(1, keepdim=True)


async def tokens_to_their_experts_and_back(comm: Comm) -> None:
    for most in (0, 5, 3001):
        tokens = most * (comm.rank + 1) // comm.size
        hidden = sample(comm.rank, (tokens, 6)) % 64
        routing = _routing(comm.rank, tokens)
        sent = await comm.dispatch(hidden, routing, [routing.experts])
        parts = zip(sent.experts, sent.hidden.split_with_sizes(sent.expert_counts), strict=True)
        rows = torch.cat([sent.hidden[:0], *[part * (expert + 1) for expert, part in parts]])
        expect_equal(await comm.combine(rows, sent), _expected(hidden, routing), f"{tokens} tokens from their experts")


async def tokens_to_all_ranks_and_back(comm: Comm) -> None:
    for most in (0, 5, 3001):
        counts = [most * (rank + 1) // comm.size for rank in range(comm.size)]
        hidden = sample(comm.rank, (counts[comm.rank], 6)) % 64
        for sizes in (None, counts):
            sent = await comm.dispatch(hidden, extras=[hidden[:, 0]], sizes=sizes)
            expected = torch.cat([sample(rank, (n, 6)) % 64 for rank, n in enumerate(counts)])
            expect_equal(sent.hidden, expected, f"all ranks' tokens, at most {most}, sizes {sizes}")
            expect_equal(sent.extras[0], expected[:, 0], f"their first elements, sizes {sizes}")
            expect_equal(await comm.combine(sent.hidden, sent), hidden * comm.size, f"sums of {most} tokens")


async def tokens_that_an_operation_in_flight_writes(comm: Comm) -> None:
    for tokens in (3, 3001):
        hidden = sample(comm.rank, (tokens, 6)) % 64
        total = sum([sample(rank, (tokens, 6)) % 64 for rank in range(comm.size)], torch.zeros(()))
        routing = _routing(comm.rank, tokens)
        assert routing.weights is not None
        works = [comm.all_reduce(hidden)]
        sending = comm.dispatch(hidden, routing)
        works.append(comm.all_reduce(hidden))
        sent = await sending
        rows = torch.zeros_like(sent.hidden)
        mine = [len(rows) if rank == comm.rank else 0 for rank in range(comm.size)]
        works.append(comm.all_to_all_v_single(rows, sent.hidden, mine, mine))
        combining = comm.combine(rows, sent)
        works.append(comm.all_to_all_v_single(rows, torch.zeros_like(rows), mine, mine))
        factors = (routing.weights * (routing.experts >= 0)).sum(1, keepdim=True)
        expect_equal(await combining, total * factors, f"{tokens} tokens that are being summed")
        for work in works:
            await work


async def routings_that_change_after_the_call(comm: Comm) -> None:
    for tokens in (3, 3001):
        hidden, routing, kept = (
            sample(comm.rank, (tokens, 6)) % 64,
            _routing(comm.rank, tokens),
            _routing(comm.rank, tokens),
        )
        assert routing.weights is not None
        async with comm.coalesce():
            sending = comm.dispatch(hidden, routing)
            routing.experts.fill_(-1)
            routing.weights.fill_(0)
        sent = await sending
        parts = zip(sent.experts, sent.hidden.split_with_sizes(sent.expert_counts), strict=True)
        rows = torch.cat([sent.hidden[:0], *[part * (expert + 1) for expert, part in parts]])
        expect_equal(
            await comm.combine(rows, sent), _expected(hidden, kept), f"{tokens} tokens by the routing of the call"
        )
