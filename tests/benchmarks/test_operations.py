"""The operations, by asynccomm and by torch.distributed."""

import torch

from asynccomm.benchmarks.operations import NO_FUTURE, OPS, floats, one_way
from asynccomm.benchmarks.rows import OPERATIONS


def test_names() -> None:
    assert all(op.name == name for name, op in OPS.items())
    assert set(OPERATIONS) <= OPS.keys()
    assert OPS.keys() >= NO_FUTURE


def test_tensors_have_the_sizes_of_the_operation() -> None:
    output, source = OPS["reduce_scatter_single"].tensors(8, 0, 4)
    assert (output.shape, source.shape) == (torch.Size([2]), torch.Size([8]))
    output, source = OPS["all_gather_single"].tensors(8, 0, 4)
    assert (output.shape, source.shape) == (torch.Size([32]), torch.Size([8]))
    assert OPS["gather"].tensors(8, 1, 4)[0] is None
    assert floats(3) == 1
    assert floats(64) == 16


def test_a_ping_pong_is_two_messages() -> None:
    assert one_way("send_recv", 8.0) == 4.0
    assert one_way("all_reduce", 8.0) == 8.0
