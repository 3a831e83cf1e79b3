"""Errors of the faces name the arguments of the faces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torchs

import asynccomm.compat.c10d as dist
from asynccomm import Comm
from asynccomm.compat import bagua, torchcomms
from asynccomm.ops.renamed import Renamed
from tests.compat.bagua import programs
from tests.compat.c10d.worlds import run_ranks
from tests.compat.vllm.groups import group_of, without_a_loop
from tests.interop.world import world

Calls = list[tuple[str, Callable[[], Any]]]  # with the start of the error's text
TWO = torch.ones(2)
THREE = torch.ones(3)
INT = torch.ones(2, dtype=torch.int32)
gathered_by_torch = getattr(torchs, "all_gather_single", None) or torchs.all_gather_into_tensor


def check(calls: Calls) -> None:
    for text, call in calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert str(caught.value)[: len(text)] == text


@pytest.mark.parametrize(
    ("text", "renamed"),
    [
        ("tensor must be a dense tensor, got tensor([1])", "input_ must be a dense tensor, got tensor([1])"),
        ("out must have 2 elements (as many as tensor), got 3", "out must have 2 elements (as many as input_), got 3"),
        ("tensor_list[0] must be a torch.Tensor, got 5 (int)", "tensor_list[0] must be a torch.Tensor, got 5 (int)"),
        (
            "items must be None off the root: the root is 0, got 1",
            "items must be None off the root: the root is 0, got 1",
        ),
        ("extras[0] has dtype a, but extras[1] has b", "logits has dtype a, but extras[1] has b"),
        ("tensor[0] and root", "input_[0] and src"),
        ("root must fit: there are 2 on root 0", "src must fit: there are 2 on root 0"),
    ],
)
def test_names_are_replaced_and_nouns_and_values_are_not(text: str, renamed: str) -> None:
    names = Renamed({"tensor": "input_", "root": "src", "extras[0]": "logits"})
    error = ValueError(text)
    with pytest.raises(ValueError) as caught, names:
        raise error
    assert caught.value is error
    assert str(error) == renamed


def test_other_errors_stay_as_they_are() -> None:
    names = Renamed({"tensor": "input_"})
    for error in (RuntimeError("tensor"), ValueError("tensor", "tensor"), TypeError(5), TypeError()):
        args = error.args
        names.rename(error)
        assert error.args == args
    names.rename(None)
    same = ValueError("tensor")
    Renamed({}).rename(same)
    assert str(same) == "tensor"


@pytest.mark.ranks(2)
async def test_vllm(comm: Comm) -> None:
    def program() -> None:
        group = group_of([[0, 1]])
        five: Any = 5
        check(
            [
                ("src must be in [0, 2), got 9", lambda: group.broadcast(TWO, 9)),
                ("dst must be in [0, 2), got 9", lambda: group.gather(TWO, 9)),
                ("src must be in [0, 2), got 9", lambda: group.broadcast_object(1, 9)),
                ("src must be in [0, 2), got 9", lambda: group.broadcast_object_list([1], 9)),
                ("obj_list must be a list", lambda: group.broadcast_object_list(five)),
                ("src must be in [0, 2), got 9", lambda: group.broadcast_tensor_dict({}, 9)),
                ("input_ must be a torch.Tensor", lambda: group.broadcast(five)),
                ("input_ must divide evenly among 2 ranks along dim 0 for", lambda: group.reduce_scatter(THREE, 0)),
                ("input_[1] must be a torch.Tensor", lambda: group.all_gatherv([TWO, five])),
                ("hidden_states must be a torch.Tensor", lambda: group.dispatch(five, TWO)),
                ("router_logits must have a row", lambda: group.dispatch(THREE, TWO)),
                ("extra_tensors[1] must have a row", lambda: group.dispatch(TWO, TWO, extra_tensors=[TWO, THREE])),
                ("writer_rank must be in [0, 2), got 9", lambda: group.create_mq_broadcaster(9)),
                (
                    "reader_rank_in_group must be in [0, 2), got 9",
                    lambda: group.create_single_reader_mq_broadcasters(9),
                ),
            ]
        )
        group.dispatch(TWO, TWO)
        check([("hidden_states must be a torch.Tensor", lambda: group.combine(five))])
        group.destroy()

    await without_a_loop(comm, program)


@pytest.mark.ranks(2)
async def test_bagua(comm: Comm) -> None:
    def program() -> None:
        five: Any = 5
        check(
            [
                ("src must be in [0, 2), got 9", lambda: bagua.broadcast(TWO, 9)),
                ("src must be in [0, 2), got 9", lambda: bagua.broadcast_object(1, 9)),
                ("dst must be in [0, 2), got 9", lambda: bagua.reduce(TWO, TWO.clone(), 9)),
                ("dst must be in [0, 2), got 9", lambda: bagua.reduce_inplace(TWO.clone(), 9)),
                ("dst must be in [0, 2), got 9", lambda: bagua.gather(TWO, TWO, 9)),
                ("src must be in [0, 2), got 9", lambda: bagua.scatter(TWO, TWO, 9)),
                ("send_tensor must be a torch.Tensor", lambda: bagua.allreduce(five, TWO)),
                ("recv_tensor must have 2 elements (as many as send_tensor)", lambda: bagua.allreduce(TWO, THREE)),
                ("recv_tensor must have 4 elements", lambda: bagua.allgather(TWO, THREE)),
                ("send_tensor must have", lambda: bagua.reduce_scatter(TWO, THREE)),
                ("send_tensor must", lambda: bagua.alltoall(THREE, THREE)),
                ("tensor must", lambda: bagua.alltoall_inplace(THREE)),
            ]
        )

    await programs.without_a_loop(comm, program)


@pytest.mark.ranks(2)
async def test_torch_backend() -> None:
    with world():
        check(
            [
                ("group_src must be in [0, 2), got -1", lambda: torchs.broadcast(TWO, group_src=-1)),
                ("group_dst must be in [0, 2), got -1", lambda: torchs.reduce(TWO, group_dst=-1)),
                ("gather_list must have one tensor for each", lambda: torchs.gather(TWO, [TWO], torchs.get_rank())),
                ("scatter_list must have one tensor for", lambda: torchs.scatter(TWO, [TWO], torchs.get_rank())),
                (
                    "output_tensor must have 4 elements (2 (ranks) x 2 (input_tensor))",
                    lambda: gathered_by_torch(THREE, TWO),
                ),
                ("output_tensor_list must have one", lambda: torchs.all_to_all([TWO], [TWO, TWO])),
            ]
        )


async def test_c10d() -> None:
    async def body(rank: int) -> None:
        check(
            [
                ("output_tensor must have 4 elements (2 (ranks) x 2 (input_tensor))", lambda: gathered(THREE, TWO)),
                ("gather_list[1] must have", lambda: dist.gather(TWO, [TWO, THREE], rank)),
                ("gather_tensor must have", lambda: dist.gather_single(TWO, THREE, rank)),
                ("scatter_list[0] must have", lambda: dist.scatter(TWO, [THREE, TWO], rank)),
                ("output_tensor_list must have one", lambda: dist.all_to_all([TWO], [TWO, TWO])),
                ("input_tensor_list must have one", lambda: dist.all_to_all([TWO, TWO], [TWO])),
                (
                    "scatter_object_input_list must have one object",
                    lambda: dist.scatter_object_list([None], [1], rank),
                ),
            ]
        )
        with pytest.warns(FutureWarning):
            check([("output_tensor_lists must have one list", lambda: dist.all_gather_coalesced([[TWO]], [TWO]))])

    gathered = dist.all_gather_into_tensor
    await run_ranks(2, body)


@pytest.mark.ranks(2)
async def test_torchcomms(comm: Comm) -> None:
    def program() -> None:
        face = torchcomms.new_comm(comm.backend, torch.device("cpu"), "renamed", timeout=timedelta(seconds=40))
        rank = face.get_rank()
        window = face.window_allocate(8, signal_size=2)
        absent: Any = None
        equal = torchcomms.SignalCmpOp.EQ
        check(
            [
                ("output_tensor_list[1] must have", lambda: face.gather([TWO, THREE], TWO, rank, False)),
                ("input_tensor must be a torch.Tensor", lambda: face.gather([TWO, TWO], [], rank, False)),
                ("input_tensor_list[1] must have", lambda: face.scatter(TWO, [TWO, THREE], rank, False)),
                ("output_tensor_list must have one", lambda: face.all_to_all([TWO], [TWO, TWO], False)),
                (
                    "scatter_object_input_list must have one object",
                    lambda: torchcomms.objcol.scatter_object_list(face, rank, [None], [1]),
                ),
                ("window_size must be in [0, 2**62), got -1", lambda: face.window_allocate(-1)),
                ("window_size must be an integer, got None", lambda: face.window_allocate(absent)),
                ("signal_size must be in", lambda: face.window_allocate(8, signal_size=-1)),
                ("dst_rank must be in [0, 2), got 9", lambda: window.put(TWO, 9, 0, False)),
                ("target_disp must leave room", lambda: window.put(TWO, 0, 99, False)),
                ("dst_rank must be in [0, 2), got 9", lambda: window.signal(0, 1, 9, False)),
                ("signal_disp must be in [0, 2)", lambda: window.signal(7, 1, 0, False)),
                ("signal_val must be in [0, 2**64), got -5", lambda: window.signal(0, -5, 0, False)),
                ("signal_disp must be in [0, 2)", lambda: window.wait_signal(7, 1, equal, False)),
                ("signal_val must be in [0, 2**64), got -5", lambda: window.wait_signal(0, -5, equal, False)),
                ("cmp_op must be a SignalCmpOp, got None", lambda: window.wait_signal(0, 1, absent, False)),
                ("rank must be in [0, 2), got 9", lambda: window.get_tensor(9, (1,), TWO.dtype, 0)),
                ("sizes must not be negative", lambda: window.get_tensor(0, (-1,), TWO.dtype, 0)),
            ]
        )
        face.finalize()

    await asyncio.to_thread(program)
