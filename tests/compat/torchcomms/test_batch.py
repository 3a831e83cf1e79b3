"""Batches of messages."""

import asyncio
from datetime import timedelta

import pytest
import torch

from asynccomm import Comm
from asynccomm.compat import torchcomms
from asynccomm.compat.torchcomms import BatchP2POptions, P2POp, P2POpType


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_a_batch_is_one_operation(comm: Comm) -> None:
    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "batch")
        other = 1 - main.get_rank()
        batch = main.batch_op_create()
        with pytest.raises(RuntimeError, match="nothing was recorded"):
            batch.issue(False)
        mine, theirs = torch.full((2,), float(main.get_rank())), torch.zeros(2)
        batch.send(mine, other)
        batch.recv(theirs, other)
        first, second = batch.ops
        assert (first.type, first.tensor, first.peer) == (P2POpType.SEND, mine, other)
        assert (second.type, second.tensor, second.peer) == (P2POpType.RECV, theirs, other)
        options = BatchP2POptions()
        options.timeout = timedelta(seconds=30)
        options.hints = {}
        batch.issue(False, options)
        assert theirs.tolist() == [other, other]
        with pytest.raises(RuntimeError, match="was issued"):
            batch.issue(True)
        with pytest.raises(RuntimeError, match="dst must be in"):
            main.batch_op_create().send(mine, 7)
        main.finalize()

    await asyncio.to_thread(program)


def test_a_message_has_torchcomms_arguments() -> None:
    tensor = torch.ones(1)
    op = P2POp(P2POpType.RECV, tensor, 3)
    assert (op.type, op.tensor, op.peer) == (P2POpType.RECV, tensor, 3)
