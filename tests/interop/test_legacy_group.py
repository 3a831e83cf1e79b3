"""A torch group that is all in Python: only old versions of torch need it, but all can make it over a comm."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import torch

from asynccomm import Comm
from asynccomm.interop.group_comms import GroupComms
from asynccomm.interop.legacy_group import LegacyGroup


def over(comm: Comm) -> LegacyGroup:
    return LegacyGroup(GroupComms("dp", None, comm.rank, comm.size, timedelta(seconds=30), [comm]))


@pytest.mark.ranks(2)
async def test_operations_return_the_works_of_the_comm(comm: Comm) -> None:
    group = over(comm)
    tensor = torch.tensor([comm.rank + 1.0])
    work = group.allreduce([tensor])
    await asyncio.to_thread(work.wait)
    assert tensor == 3.0
    group._start_coalescing(torch.device("cpu"))
    group.allreduce([tensor])
    group.broadcast([tensor], 0)
    await asyncio.to_thread(group._end_coalescing(torch.device("cpu")).wait)
    assert tensor == 6.0


@pytest.mark.ranks(2)
async def test_the_group_is_its_own_backend(comm: Comm) -> None:
    group = over(comm)
    assert (group.rank(), group.size()) == (comm.rank, 2)
    assert group._get_backend(torch.device("cpu")) is group
    assert group._get_backend_name() == "asynccomm"
    assert group._device_types == [torch.device("cpu"), torch.device("cuda")]
    assert group.options._timeout == timedelta(seconds=30)
    assert group.supports_splitting
    assert not group.supports_coalescing
    assert not group._has_hooks()
    with pytest.raises(RuntimeError, match="asynccomm does not support _wait_for_pending_works"):
        group._wait_for_pending_works()


@pytest.mark.ranks(2)
async def test_names(comm: Comm) -> None:
    group = over(comm)
    assert (group.group_name, group.group_desc) == ("dp", "undefined")
    group._set_group_name("tp")
    group.setGroupDesc("tensor parallel")
    assert (group.getGroupName(), group.getGroupDesc()) == ("tp", "tensor parallel")


@pytest.mark.ranks(2)
async def test_a_group_over_a_comm_is_not_split(comm: Comm) -> None:
    group = over(comm)
    assert group.get_group_store() is None
    with pytest.raises(RuntimeError, match="'dp' was made over comms, and cannot be split"):
        group.split_group([0])
