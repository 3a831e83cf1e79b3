"""Hooks around the calls of a TorchComm."""

import asyncio
from typing import Any

import pytest
import torch

from asynccomm import Comm
from asynccomm.compat import torchcomms
from asynccomm.compat.torchcomms import ReduceOp
from asynccomm.compat.torchcomms.registration import Hooks


def test_each_registration_of_a_function_ends_by_itself() -> None:
    calls: list[int] = []
    hooks: list[Any] = []
    first, second = (Hooks.register(hooks, calls.append) for _ in range(2))
    first.remove()
    first.remove()
    for hook in hooks:
        hook(1)
    assert calls == [1]
    second.remove()
    assert not hooks


@pytest.mark.ranks(2)
async def test_hooks_see_each_call_once(comm: Comm) -> None:
    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "hooks")
        seen: list[Any] = []
        first = main.register_pre_hook(lambda name, number, given: seen.append((name, number, given)))
        last = main.register_post_hook(lambda number, given: seen.append((number, given)))
        tensor = torch.ones(1)
        work = main.all_reduce(tensor, ReduceOp.SUM, True)
        (name, number, given), (same, after) = seen
        assert (name, same) == ("all_reduce", number)
        assert given.arguments == (tensor, ReduceOp.SUM)
        assert (given.async_op, given.work, after.work) == (True, None, work)
        batch = main.batch_op_create()
        batch.send(tensor, 1 - main.get_rank())
        batch.recv(torch.zeros(1), 1 - main.get_rank())
        batch.issue(False)
        assert [entry[0] for entry in seen[2::2]] == ["batch_op_issue"]
        assert seen[2][1] > number
        first.remove()
        last.remove()
        main.barrier(False)
        assert len(seen) == 4

        def refuse(name: str, _: int, given: object) -> None:
            raise ZeroDivisionError(name)

        refusing = main.register_pre_hook(refuse)
        with pytest.raises(ZeroDivisionError, match="all_reduce"):
            main.all_reduce(tensor, ReduceOp.SUM, False)
        refusing.remove()
        assert main.all_reduce(torch.ones(1), ReduceOp.SUM, False).is_completed()
        with pytest.raises(TypeError, match="hook must be a function"):
            main.register_post_hook(None)  # type: ignore[arg-type]
        main.finalize()

    await asyncio.to_thread(program)
