"""GroupCoordinator: its ranks, objects, dicts of tensors and end."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from asynccomm import Comm, PayloadError
from asynccomm.compat import operators, vllm
from asynccomm.compat.vllm import GroupCoordinator
from tests.compat.vllm.groups import group_of, without_a_loop


@pytest.mark.ranks(4, backend=["shm", "gloo"])
async def test_ranks_are_global_and_in_the_order_of_the_lists(comm: Comm) -> None:
    def program() -> None:
        tp = group_of([[2, 0], [1, 3]], "tp")
        pp = vllm.GroupCoordinator([[3, 2, 1, 0]], comm.rank, "gloo", False, True)
        mine = [2, 0] if comm.rank in (0, 2) else [1, 3]
        assert (tp.rank, tp.ranks, tp.world_size) == (comm.rank, mine, 2)
        assert tp.rank_in_group == mine.index(comm.rank) == tp.device_group.rank
        assert (tp.first_rank, tp.last_rank) == (mine[0], mine[1])
        assert (tp.is_first_rank, tp.is_last_rank) == (comm.rank in (2, 1), comm.rank in (0, 3))
        assert tp.next_rank == tp.prev_rank == mine[1 - tp.rank_in_group]
        assert (pp.next_rank, pp.prev_rank) == ((comm.rank - 1) % 4, (comm.rank + 1) % 4)
        assert (pp.local_rank, pp.device, pp.cpu_group) == (comm.rank, torch.device("cpu"), pp.device_group)
        again = group_of([[0, 2], [1, 3]], "tp")
        assert (tp.unique_name.split(":")[0], again.unique_name.split(":")[0]) == ("tp", "tp")
        assert int(again.unique_name.split(":")[1]) == int(tp.unique_name.split(":")[1]) + 1
        assert pp.unique_name.startswith("anonymous:")
        assert operators.group_called(tp.unique_name) is tp
        again.barrier()
        for group in (again, pp, tp):
            group.destroy()
            group.destroy()
        with pytest.raises(ValueError, match="group_name must be of a group that exists"):
            operators.group_called(tp.unique_name)
        with pytest.raises(RuntimeError, match="was destroyed"):
            tp.all_reduce(torch.ones(1))

    await without_a_loop(comm, program)


@pytest.mark.ranks(2)
async def test_lists_that_are_no_groups(comm: Comm) -> None:
    def program() -> None:
        for lists in ([[0, 1], [1]], [[0, 5]], [[1 - comm.rank]]):
            with pytest.raises(ValueError, match="group_ranks must"):
                group_of(lists)
        with pytest.raises(ValueError, match="needs init_distributed_environment"):
            vllm.GroupCoordinator([[0, 1]], 0, "nccl", True)

    await without_a_loop(comm, program)


@pytest.mark.ranks(2)
async def test_a_refused_group_counts(comm: Comm) -> None:
    def program() -> None:
        if comm.rank == 0:
            with pytest.raises(ValueError, match="group_ranks must"):
                group_of([[1]], "tp")
            with pytest.raises(ValueError, match="needs init_distributed_environment"):
                vllm.GroupCoordinator([[0, 1]], 0, "nccl", True, group_name="tp")
        else:
            for _ in range(2):
                group_of([[0], [1]], "tp").destroy()
        group = group_of([[0, 1]], "tp")
        assert group.cpu_group.name.endswith("/tp:2")
        assert group.all_reduce(torch.ones(1)).item() == 2
        group.destroy()

    await without_a_loop(comm, program)


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_objects(comm: Comm) -> None:
    def program() -> None:
        group = group_of([[1, 0]])
        me = group.rank_in_group
        assert group.broadcast_object({"a": me} if me == 1 else None, src=1) == {"a": 1}
        items: list[Any] = [1, "two"] if me == 0 else [None, None]
        assert group.broadcast_object_list(items) is items
        assert items == [1, "two"]
        alone = group_of([[0], [1]])
        own: list[Any] = [me]
        assert group.broadcast_object_list(own, group=alone) == [me]
        if me == 0:
            assert group.send_object([3], dst=1) is None
        else:
            assert group.recv_object(src=0) == [3]
        with pytest.raises(ValueError, match="dst must be another rank"):
            group.send_object(1, me)
        with pytest.raises(ValueError, match="src must be another rank"):
            group.recv_object(me)
        assert alone.broadcast_object(7) == 7
        assert group.barrier() is None
        alone.destroy()
        group.destroy()

    await without_a_loop(comm, program)


class Odd:
    """An object that only a pickle can carry."""


@pytest.mark.ranks(2)
async def test_objects_of_any_class_if_they_are_trusted(comm: Comm) -> None:
    def program() -> None:
        group = group_of([[0, 1]])
        assert isinstance(group.broadcast_object(Odd() if group.is_first_rank else None), Odd)
        group.destroy()

    await without_a_loop(comm, program, weights_only=False)


@pytest.mark.ranks(4, backend=["shm", "gloo"])
async def test_dicts_of_tensors_to_the_next_stage_in_shares(comm: Comm) -> None:
    def program() -> None:
        tp, pp = group_of([[0, 1], [2, 3]], "tp"), group_of([[0, 2], [1, 3]], "pp")
        whole = {"hidden": torch.arange(8.0).view(2, 4), "residual": torch.full((2,), float(tp.rank_in_group)), "n": 3}
        keep_apart = {"residual": False}
        if pp.is_first_rank:
            assert pp.send_tensor_dict(whole, all_gather_group=tp, all_gather_tensors=keep_apart) is None
        else:
            got = pp.recv_tensor_dict(all_gather_group=tp, all_gather_tensors=keep_apart)
            assert list(got) == ["hidden", "residual", "n"]
            assert got["hidden"].equal(whole["hidden"])
            assert got["residual"].tolist() == [tp.rank_in_group] * 2
        everyone = tp.broadcast_tensor_dict(whole if tp.is_first_rank else None)
        assert everyone["residual"].tolist() == [0, 0]
        assert pp.broadcast_tensor_dict(whole if tp.is_last_rank else None, src=1, group=tp)["n"] == 3
        one = group_of([[0], [1], [2], [3]])
        assert one.broadcast_tensor_dict(whole) is whole
        assert one.send_tensor_dict(whole) is whole
        assert one.recv_tensor_dict() is None
        with pytest.raises(TypeError, match="tensor_dict must be a dict"):
            pp.send_tensor_dict([1])  # type: ignore[arg-type]
        for wrong in (5, tp.device_group):
            with pytest.raises(TypeError, match="all_gather_group must be a GroupCoordinator, got"):
                pp.send_tensor_dict({}, all_gather_group=wrong)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="all_gather_group must be a GroupCoordinator, got"):
                pp.recv_tensor_dict(all_gather_group=wrong)  # type: ignore[arg-type]
        for group in (one, pp, tp):
            group.destroy()

    await without_a_loop(comm, program)


@pytest.mark.ranks(4)
async def test_a_receiver_that_refuses_fails_alone(comm: Comm) -> None:
    def program() -> None:
        tp, pp = group_of([[0, 1], [2, 3]], "tp"), group_of([[0, 2], [1, 3]], "pp")
        trusted = {"t": torch.arange(4.0), "odd": Odd()}
        plain = {"t": torch.arange(4.0), "odd": 1}
        if pp.is_first_rank:
            pp._weights_only = comm.rank == 0  # rank 1 sends a pickle
            pp.send_tensor_dict(plain if comm.rank == 0 else trusted, all_gather_group=tp)
        elif comm.rank == 2:
            assert pp.recv_tensor_dict(all_gather_group=tp)["t"].tolist() == [0, 1, 2, 3]
        else:
            with pytest.raises(PayloadError):
                pp.recv_tensor_dict(all_gather_group=tp)
        assert tp.all_reduce(torch.ones(1)).item() == 2
        assert pp.all_reduce(torch.ones(1)).item() == 2
        pp.destroy()
        tp.destroy()

    await without_a_loop(comm, program)


@pytest.mark.ranks(2)
async def test_a_group_in_a_coroutine(comm: Comm) -> None:
    await vllm.init_distributed_environment(backend=comm.backend)
    group = await GroupCoordinator([[0, 1]], 0, "gloo", True)
    assert await group is group
    assert (await group.all_reduce(torch.ones(2))).tolist() == [2, 2]
    assert await group.broadcast_object("x" if comm.rank == 0 else None) == "x"
    await group.barrier()
    if comm.rank == 0:
        await group.send_tensor_dict({"t": torch.ones(2)}, all_gather_group=group)
    else:
        with pytest.raises(PayloadError):  # the only receiver has one share of two
            await group.recv_tensor_dict()
        await group.send(torch.ones(1))
    if comm.rank == 0:
        assert (await group.recv((1,), torch.float32)).item() == 1
    alone = await GroupCoordinator([[0], [1]], 0, "gloo", True)
    tensor = torch.ones(1)
    assert await alone.all_reduce(tensor) is tensor
    await alone.destroy()
    await group.destroy()
    await vllm.destroy_distributed_environment()


@pytest.mark.ranks(1)
async def test_a_forgotten_group_is_not_found(comm: Comm) -> None:
    def program() -> None:
        group = group_of([[0]], "forgotten")
        name = group.unique_name
        with pytest.raises(RuntimeError, match="needs a GPU"), group.graph_capture():
            pass
        assert "forgotten" in repr(group)
        with pytest.warns(ResourceWarning):
            del group
            gc.collect()
        with pytest.raises(ValueError, match=name):
            operators.group_called(name)

    await without_a_loop(comm, program)
