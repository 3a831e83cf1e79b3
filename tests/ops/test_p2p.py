"""send and recv: what they make of their arguments. What all share is in test_checks.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asynccomm.ops import Recv, Send
from asynccomm.ops.dtypes import REAL
from tests.comm.methods.argument_matrix import GROUP, RANK, fails, t

F = torch.float32


def test_send() -> None:
    tensor = torch.zeros(1).expand(2, 3)
    call = Send.of(GROUP, tensor, np.int64(2), np.int64(7))
    assert call.op == Send(F, 6, 2, 7)
    assert call.inputs[0] is call.result is tensor
    assert call.outputs == ()
    assert call.op.nbytes == 24


def test_recv() -> None:
    tensor = t(2, 3)
    call = Recv.of(GROUP, tensor, 2, 7)
    assert call.op == Recv(F, 6, 2, 7)
    assert call.outputs[0] is call.result is tensor
    assert call.inputs == ()


def test_to_oneself() -> None:
    assert Send.of(GROUP, t(1), RANK, 0).op == Send(F, 1, RANK, 0)
    assert Recv.of(GROUP, t(1), RANK, 0).op == Recv(F, 1, RANK, 0)


def test_a_receive_may_name_no_source() -> None:
    assert Recv.of(GROUP, t(4), None, 0).op == Recv(F, 4, None, 0)
    assert fails(TypeError, Send.of, GROUP, t(4), None, 0) == "dst must be a rank (an integer), got None"


@pytest.mark.parametrize("peer", [1, None])
def test_what_a_receive_takes(peer: int | None) -> None:
    recv = Recv(F, 7, peer, 5)
    assert recv.takes(Send(F, 7, 0, 5))
    assert not recv.takes(Send(F, 6, 0, 5))
    assert not recv.takes(Send(F, 8, 0, 5))
    assert not recv.takes(Send(torch.int32, 7, 0, 5))


@pytest.mark.parametrize("pair", REAL)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_complex_tensor_is_sent_and_received_as_reals(pair: torch.dtype) -> None:
    number, reals = t(3, dtype=pair), t(3, 2, dtype=REAL[pair])
    send, recv = Send.of(GROUP, number, 2, 0), Recv.of(GROUP, number, 2, 0)
    assert send.op == Send.of(GROUP, reals, 2, 0).op == Send(REAL[pair], 6, 2, 0)
    assert recv.op == Recv.of(GROUP, reals, 2, 0).op == Recv(REAL[pair], 6, 2, 0)
    assert send.inputs[0] is recv.outputs[0] is number
