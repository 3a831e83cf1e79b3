"""Checks of tensor dicts and of state dicts."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import torch
from torch import Tensor, nn

from asynccomm.comm.comm import Comm
from asynccomm.errors import PayloadError
from asynccomm.testing.conformance.data import DTYPES, sample, sentinel, strided
from asynccomm.testing.conformance.objects import CustomObject, expect_same


def _dicts(rank: int) -> list[dict[Any, Any]]:
    """Dicts of one rank, of various structures."""
    return [
        {},
        {"b": sample(rank, (3,)), "a": sample(rank, (2, 2), torch.int64), "c": sample(rank, (), torch.bool)},
        {str(dtype): sample(rank, (2, 3), dtype) for dtype in DTYPES},
        {"empty": torch.zeros(0, 3), "none": None, "int": rank, "str": "x" * rank, "empty too": torch.zeros(2, 0)},
        {
            "nested": {"deep": {"er": sample(rank, (5,)), 1: "one"}, "list": [sample(rank, (1,)), (rank, None)]},
            "strided": strided(sample(rank, (4, 3))),
            "conj": sample(rank, (3,), torch.complex64).conj(),
        },
        {"large": sample(rank, (120_001,)), "small": sample(rank, (1,), salt=1), "last": sample(rank, (50_000,))},
        {"values": [1.5, "two", b"\x03", {rank}], 7: sample(rank, (7,))},
    ]


async def tensor_dicts_from_every_root(comm: Comm) -> None:
    for root in range(comm.size):
        for i, tensor_dict in enumerate(_dicts(root)):
            for _ in range(2):  # the second time, its schema is cached
                mine = tensor_dict if comm.rank == root else None
                got = await comm.broadcast_tensor_dict(mine, root)
                assert comm.rank != root or got is mine, "broadcast_tensor_dict gives the root its own dict"
                expect_same(got, tensor_dict, f"broadcast_tensor_dict {i} from {root}")


async def tensor_dicts_from_rank_to_rank(comm: Comm) -> None:
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine, expected = _dicts(comm.rank), _dicts(previous)
    for early in (True, False):  # whether the receives are posted first
        for tag in (0, 9):
            receives = [comm.recv_tensor_dict(previous, tag) for _ in expected] if early else []
            sends = [comm.send_tensor_dict(tensor_dict, following, tag) for tensor_dict in mine]
            if not early:
                await comm.barrier()
                receives = [comm.recv_tensor_dict(previous, tag) for _ in expected]
            for i, (work, tensor_dict) in enumerate(zip(receives, expected, strict=True)):
                expect_same(await work, tensor_dict, f"dict {i} from {previous} under tag {tag}")
            await asyncio.gather(*sends)


async def forms_of_dicts_that_change_and_come_back(comm: Comm) -> None:
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for i in range(60):  # more schemas than the cache holds, some of them many times
        form = (i % 3, i % 20, 25)[i % 3]

        def tensor_dict(rank: int, form: int = form, i: int = i) -> dict[Any, Any]:
            return {f"key {form}": sample(rank, (form, 2), salt=i), "number": rank + i}

        received, sent = comm.recv_tensor_dict(previous), comm.send_tensor_dict(tensor_dict(comm.rank), following)
        expect_same(await received, tensor_dict(previous), f"dict {i} of form {form}")
        await sent
        root = i % comm.size
        got = await comm.broadcast_tensor_dict(tensor_dict(root) if comm.rank == root else None, root)
        expect_same(got, tensor_dict(root), f"broadcast dict {i} of form {form}")


async def refused_dicts_leave_the_comm_usable(comm: Comm) -> None:
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    good = {"a": sample(1, (3,)), "b": 1}
    bad = {"a": sample(1, (3,)), "b": CustomObject(1)}
    sends = [comm.send_tensor_dict(d, following, weights_only=False) for d in (bad, good, bad, good)]
    for tensor_dict in (bad, good):
        try:
            expect_same(await comm.recv_tensor_dict(previous), good, "a dict after one that was refused")
        except PayloadError:
            assert tensor_dict is bad, "a good dict was refused"
        else:
            assert tensor_dict is good, "a class was taken without weights_only=False"
    got = await comm.recv_tensor_dict(previous, weights_only=False)
    assert got["b"] == CustomObject(1), f"a dict with a class, without weights_only: {got}"
    expect_same(await comm.recv_tensor_dict(previous), good, "a dict after others")
    await asyncio.gather(*sends)


async def shares_of_dicts_from_group_to_group(comm: Comm) -> None:
    """Each rank of the first half has the same dict, and sends a share of it to one rank of the second half."""
    half = max(1, comm.size // 2)
    groups = [list(range(half)), list(range(half, 2 * half))] if comm.size > 1 else [[0]]
    mine = next((ranks for ranks in groups if comm.rank in ranks), [])
    shapes = [(half, 3), (2 * half,), (half * 20_000,), (2 * half + 1,), (), (0, 3)]  # some cannot be divided

    def tensor_dict(rank: int) -> dict[Any, Any]:
        same: dict[Any, Any] = {f"same {i}": sample(1, shape, salt=i) for i, shape in enumerate(shapes)}
        own = {"own": sample(rank, (2 * half,)), "more": {"own": [sample(rank, (half,), torch.int64)]}}
        return {**same, **own, "rank": rank}

    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(comm.split(mine, "shares"))
        if group is None:
            return
        sends = []
        for _ in range(2):
            if mine is groups[0]:
                off = {"own": False, "more": False}
                destination = comm.rank + half if comm.size > 1 else 0
                own = tensor_dict(comm.rank)
                sends.append(comm.send_tensor_dict(own, destination, 4, all_gather_group=group, all_gather_tensors=off))
            if mine is groups[-1]:
                source = comm.rank - half if comm.size > 1 else 0
                got = await comm.recv_tensor_dict(source, 4, all_gather_group=group)
                expect_same(got, tensor_dict(source), f"dict whose shares come from {groups[0]}")
        await asyncio.gather(*sends)


async def refused_shares_leave_the_group_usable(comm: Comm) -> None:
    """Each rank sends a share to the next; the last rank refuses its share, for a different reason each time."""
    size, following, previous, last = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, comm.size - 1
    same = {"t": sample(1, (size, 2)), "u": sample(1, (3 * size,), torch.int64)}
    wider, unreadable = {**same, "t": sample(1, (size, 3))}, {**same, "c": CustomObject(1)}
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(comm.dup("receivers"))
        senders = await stack.enter_async_context(comm.split([(r - 1) % size for r in range(size)], "senders"))
        alone = await stack.enter_async_context(comm.split([comm.rank], "alone"))

        async def exchange(sent: dict[Any, Any], by: Comm | None, **terms: Any) -> dict[Any, Any]:
            mine = sent if following == last else same
            send = comm.send_tensor_dict(mine, following, all_gather_group=by, weights_only=False)
            own = terms if comm.rank == last else {}
            try:
                return await comm.recv_tensor_dict(previous, all_gather_group=group, timeout=10, **own)
            finally:
                await send

        to_last = following == last
        cases: list[tuple[str, bool, dict[Any, Any], Comm | None, dict[str, Any]]] = [
            ("too large", True, same, senders, {"max_bytes": 10}),
            ("of other tensors", True, wider, senders, {}),
            ("of another group", True, same, alone if to_last else senders, {}),
            ("whole", True, same, None if to_last else senders, {}),
            ("of a class", False, unreadable, senders, {}),
        ]
        for what, everywhere, sent, by, terms in cases if size > 1 else ():
            try:
                got = await exchange(sent, by, **terms)
            except PayloadError:
                assert everywhere or comm.rank == last, f"a dict was refused where it is good ({what})"
            else:
                assert not everywhere, f"rank {comm.rank} has a dict whose shares cannot be put together ({what})"
                assert comm.rank != last, f"the last rank took a dict that it cannot take ({what})"
                expect_same(got, same, f"a dict beside one that is {what}")
            expect_same(await exchange(same, senders), same, f"a dict after one that was {what}")
        expect_same(await exchange(same, senders), same, "a dict of shares")
        await group.barrier()


def _module(seed: int) -> nn.Module:
    torch_state = torch.get_rng_state()
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5, bias=False), nn.Linear(5, 7))
    torch.set_rng_state(torch_state)
    module.register_buffer("steps", torch.tensor(seed))
    module.register_buffer("means", torch.full((3,), float(seed), dtype=torch.bfloat16))
    module[3].weight = module[0].weight  # tied weights
    return module


async def states_from_every_root(comm: Comm) -> None:
    for root in range(comm.size):
        module = _module(comm.rank + 1)
        parameters = list(module.parameters())
        assert await comm.broadcast_state(module, root) is module
        expect_same(dict(module.state_dict()), dict(_module(root + 1).state_dict()), f"state of a module from {root}")
        assert [*map(id, module.parameters())] == [*map(id, parameters)], "broadcast_state replaced parameters"
        assert all(parameter.requires_grad for parameter in parameters)
        mine, theirs = _state(comm.rank, comm.rank == root), _state(root, True)
        assert await comm.broadcast_state(mine, root) is mine
        expect_same({name: mine[name] for name in theirs}, theirs, f"state from {root}")


def _state(rank: int, filled: bool) -> dict[str, Tensor]:
    """A state dict of every dtype, with a different order of names and a different memory layout on each rank."""
    names = {f"{i}.{dtype}": dtype for i, dtype in enumerate(DTYPES)}
    order = [*list(names)[rank:], *list(names)[:rank]]
    state: dict[str, Tensor] = {}
    for name in order:
        values = sample(rank, (2, 3), names[name]) if filled else sentinel((2, 3), names[name])
        state[name] = strided(values) if rank % 2 else values
    state["large"] = sample(rank, (70_001,)) if filled else sentinel((70_001,))
    state["empty"] = torch.zeros(0, 3)
    return state


async def states_that_do_not_fit_are_refused(comm: Comm) -> None:
    size, rank, last = comm.size, comm.rank, comm.size - 1
    whole = {"a": sample(rank, (3,)), "b": sample(rank, (2, 2)), "c": sample(rank, (4,), torch.int64)}
    wrong: list[dict[str, Tensor]] = [
        {**whole, "b": sample(rank, (4,))},
        {**whole, "c": sample(rank, (4,))},
        {name: whole[name] for name in ("a", "b")},
        {**whole, "d": sample(rank, (1,))},
        {**whole, "x": whole["a"]},
    ]
    for other in wrong:
        mine = other if rank == last and size > 1 else whole
        mine = {name: tensor.clone() for name, tensor in mine.items()}
        if "x" in other and "x" in mine:
            mine["x"] = mine["a"]
        before = {name: tensor.clone() for name, tensor in mine.items()}
        try:
            await comm.broadcast_state(mine, 0)
        except PayloadError:
            assert mine.keys() == other.keys(), "a state was refused where it fits"
            expect_same(mine, before, "a state that was refused")
        else:
            assert rank != last or size == 1, "a state was taken where it does not fit"
            expected = {"a": sample(0, (3,)), "b": sample(0, (2, 2)), "c": sample(0, (4,), torch.int64)}
            expect_same(mine, expected, "a state that fits")
    expect_same(await comm.all_gather_object(rank), list(range(size)), "objects after states that were refused")
