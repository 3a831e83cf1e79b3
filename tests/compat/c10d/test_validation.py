"""What is checked before anything is sent, and what a rank gets that is not in the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import asynccomm.compat.c10d as dist
from tests.compat.c10d.worlds import alone, run_ranks

ONE = torch.ones(1)
OUTSIDE: dict[str, Callable[[Any], Any]] = {
    "send": lambda g: dist.send(ONE, group=g),  # nothing else is checked: no rank is given
    "broadcast": lambda g: dist.broadcast(ONE, group=g),
    "all_reduce": lambda g: dist.all_reduce("no tensor", group=g),  # type: ignore[arg-type]
    "reduce": lambda g: dist.reduce(ONE, group=g),
    "all_gather": lambda g: dist.all_gather((), ONE, group=g),  # type: ignore[arg-type]
    "all_gather_into_tensor": lambda g: dist.all_gather_into_tensor(ONE, ONE, group=g),
    "gather": lambda g: dist.gather(ONE, group=g),
    "scatter": lambda g: dist.scatter(ONE, group=g),
    "reduce_scatter": lambda g: dist.reduce_scatter(ONE, [], group=g),
    "reduce_scatter_tensor": lambda g: dist.reduce_scatter_tensor(ONE, ONE, group=g),
    "all_to_all_single": lambda g: dist.all_to_all_single(ONE, ONE, group=g),
    "all_to_all": lambda g: dist.all_to_all([], [], group=g),
    "barrier": lambda g: dist.barrier(g),
    "monitored_barrier": lambda g: dist.monitored_barrier(g),
    "all_gather_object": lambda g: dist.all_gather_object([], 1, group=g),
    "gather_object": lambda g: dist.gather_object(1, group=g),
    "send_object_list": lambda g: dist.send_object_list([1], group=g),
    "broadcast_object_list": lambda g: dist.broadcast_object_list([1], group=g),
    "scatter_object_list": lambda g: dist.scatter_object_list([], group=g),
}
DEPRECATED = {
    "all_reduce_coalesced": lambda g, **more: dist.all_reduce_coalesced([ONE], group=g, **more),
    "all_gather_coalesced": lambda g, **more: dist.all_gather_coalesced([[ONE]], [ONE], group=g, **more),
}
HANDLES: dict[str, Callable[[Any], Any]] = {
    "isend": lambda g: dist.isend(ONE, group=g),
    "irecv": lambda g: dist.irecv(ONE, group=g),
    "all_reduce": lambda g: dist.all_reduce(ONE, group=g, async_op=True),
    "broadcast": lambda g: dist.broadcast(ONE, group=g, async_op=True),
    "reduce": lambda g: dist.reduce(ONE, group=g, async_op=True),
    "all_gather": lambda g: dist.all_gather([], ONE, group=g, async_op=True),
    "all_gather_into_tensor": lambda g: dist.all_gather_into_tensor(ONE, ONE, group=g, async_op=True),
    "gather": lambda g: dist.gather(ONE, group=g, async_op=True),
    "scatter": lambda g: dist.scatter(ONE, group=g, async_op=True),
    "reduce_scatter": lambda g: dist.reduce_scatter(ONE, [], group=g, async_op=True),
    "reduce_scatter_tensor": lambda g: dist.reduce_scatter_tensor(ONE, ONE, group=g, async_op=True),
    "all_to_all_single": lambda g: dist.all_to_all_single(ONE, ONE, group=g, async_op=True),
    "all_to_all": lambda g: dist.all_to_all([], [], group=g, async_op=True),
    "barrier": lambda g: dist.barrier(g, async_op=True),
}


@pytest.fixture
async def outside() -> Any:
    """What a rank has in place of a group that it is not in."""
    async with alone():
        yield dist.GroupMember.NON_GROUP_MEMBER


@pytest.mark.parametrize("name", OUTSIDE)
async def test_who_is_not_in_the_group_is_warned_first(outside: int, name: str) -> None:
    with pytest.warns(UserWarning, match=f"^{name} does nothing on global rank 0, which is not in the group") as seen:
        nothing = OUTSIDE[name](outside)
    assert await nothing is None
    assert seen[0].filename == __file__


@pytest.mark.parametrize("name", HANDLES)
async def test_there_is_no_handle_for_who_is_not_in_the_group(outside: int, name: str) -> None:
    with pytest.warns(UserWarning, match=f"^{name} does nothing") as seen:
        assert HANDLES[name](outside) is None
    assert seen[0].filename == __file__


@pytest.mark.parametrize("name", ["recv", "recv_object_list"])
async def test_there_is_no_sender_for_who_is_not_in_the_group(outside: int, name: str) -> None:
    with pytest.warns(UserWarning, match=f"^{name} does nothing"):
        nothing = getattr(dist, name)([ONE], group=outside)
    assert await nothing == -1


@pytest.mark.parametrize("name", DEPRECATED)
async def test_deprecated_ones_for_who_is_not_in_the_group(outside: int, name: str) -> None:
    with pytest.warns(match="") as seen:
        assert await DEPRECATED[name](outside) is None
    for warning, (category, message) in zip(
        seen, [(FutureWarning, f"{name} is deprecated"), (UserWarning, f"{name} does nothing")], strict=True
    ):
        assert warning.category is category
        assert str(warning.message).startswith(message)
        assert warning.filename == __file__
    with pytest.warns(FutureWarning), pytest.warns(UserWarning, match="does nothing"):
        assert DEPRECATED[name](outside, async_op=True) is None


async def test_a_batch_for_who_is_not_in_the_group(outside: int) -> None:
    op = dist.P2POp(dist.isend, ONE, 5, group=outside)
    assert "none of this rank" in repr(op)
    with pytest.warns(UserWarning, match="^batch_isend_irecv does nothing"):
        assert dist.batch_isend_irecv([op]) == []


async def test_none_is_the_default_group(outside: int) -> None:
    assert not dist._rank_not_in_group(None)
    assert dist._rank_not_in_group(outside)
    assert not dist._rank_not_in_group(dist.group.WORLD)
    await dist.all_reduce(torch.ones(1), group=None)
    with pytest.raises(TypeError, match="group must be a ProcessGroup, got 3"):
        dist.all_reduce(ONE, group=3)


async def test_a_group_made_by_others_does_not_leave_ranks_for_the_sentinel() -> None:
    async def body(rank: int) -> None:
        await dist.new_group([1])
        outside = await dist.new_group([1])
        if rank == 0:
            with pytest.warns(UserWarning, match="^send does nothing"):
                assert await dist.send(ONE, 1, group=outside) is None

    await run_ranks(2, body)


def test_one_tensor() -> None:
    dist._check_single_tensor(ONE, "tensor")
    with pytest.raises(TypeError, match=r"tensor must be a torch.Tensor, got 3 \(int\)"):
        dist._check_single_tensor(3, "tensor")


@pytest.mark.parametrize("tensors", [(ONE,), ONE, [ONE, 3], None])
def test_a_list_of_tensors(tensors: Any) -> None:
    dist._check_tensor_list([ONE], "tensors")
    with pytest.raises(TypeError, match=r"tensors must be a list of torch.Tensor"):
        dist._check_tensor_list(tensors, "tensors")


@pytest.mark.parametrize("pair", [(torch.complex64, torch.float32), (torch.complex128, torch.float64)])
def test_one_dtype(pair: tuple[torch.dtype, torch.dtype]) -> None:
    mixed = [torch.ones(1, dtype=dtype) for dtype in pair]
    dist._ensure_all_tensors_same_dtype(*mixed)
    dist._ensure_all_tensors_same_dtype(mixed, mixed[0], [mixed[1]])
    with pytest.raises(ValueError, match=r"all tensors must have one dtype, got torch.float\d\d and torch.int8"):
        dist._ensure_all_tensors_same_dtype(mixed, torch.ones(1, dtype=torch.int8))


def test_complex_of_another_size_is_another_dtype() -> None:
    with pytest.raises(ValueError, match="one dtype"):
        dist._ensure_all_tensors_same_dtype(torch.ones(1, dtype=torch.complex128), torch.ones(1))


async def test_not_to_oneself() -> None:
    async with alone():
        for call in (dist.send, dist.recv):
            with pytest.raises(ValueError, match="should not be the same as the rank of the current process"):
                call(ONE, 0)
        for call in (dist.send_object_list, dist.recv_object_list):
            with pytest.raises(ValueError, match="should not be the same as the rank of the current process"):
                call([1], 0)
        with pytest.raises(ValueError, match="dst should not be the same"):
            dist._check_not_self_rank(None, 0, "dst")


@pytest.mark.parametrize("rank", [-1, 2])
async def test_roots_that_there_are_not(rank: int) -> None:
    async with alone():
        for call in (dist.broadcast, dist.reduce, dist.isend, dist.irecv):
            with pytest.raises(ValueError, match=r"in \[0, 1\)"):
                call(torch.ones(1), rank)


async def test_wrong_types_are_refused_at_the_call() -> None:
    no = "no tensor"
    async with alone():
        for call in (
            lambda: dist.all_reduce(no),  # type: ignore[arg-type]
            lambda: dist.broadcast(no, 0),  # type: ignore[arg-type]
            lambda: dist.reduce(no, 0),  # type: ignore[arg-type]
            lambda: dist.isend(no, 0),  # type: ignore[arg-type]
            lambda: dist.irecv(no, 0),  # type: ignore[arg-type]
            lambda: dist.gather(no, [ONE], 0),  # type: ignore[arg-type]
            lambda: dist.scatter(ONE, (ONE,), 0),  # type: ignore[arg-type]
            lambda: dist.all_gather((ONE,), ONE),  # type: ignore[arg-type]
            lambda: dist.reduce_scatter(ONE, (ONE,)),  # type: ignore[arg-type]
            lambda: dist.all_to_all((ONE,), [ONE]),  # type: ignore[arg-type]
            lambda: dist.all_to_all_single(ONE, no),  # type: ignore[arg-type]
            lambda: dist.all_gather_into_tensor(ONE, no),  # type: ignore[arg-type]
            lambda: dist.reduce_scatter_tensor(no, ONE),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError, match=r"must be a (list of )?torch\.Tensor"):
                call()


def test_lists_on_the_root_alone() -> None:
    dist._validate_output_list_for_rank(0, 0, [ONE])
    dist._validate_output_list_for_rank(1, 0, [])
    for rank, given in ((0, None), (0, []), (1, [ONE])):
        with pytest.raises(ValueError, match="must be given on rank 0, and only there"):
            dist._validate_output_list_for_rank(rank, 0, given)
