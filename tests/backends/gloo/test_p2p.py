"""Messages over gloo: what does not fit is named, and a waiting receive holds up nothing else."""

import asyncio

import pytest
import torch

from asynccomm import BrokenError, CollectiveMismatchError, Comm


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(("sent", "expected"), [(3, 5), (5, 3), (0, 2), (2, 0)])
async def test_sizes_that_differ_are_named_on_the_receiver(comm: Comm, sent: int, expected: int) -> None:
    if comm.rank == 0:
        with pytest.raises(BrokenError, match=rf"send\(float32\[{sent}\].*recv\(float32\[{expected}\]|closed|reset"):
            work = comm.send(torch.ones(sent), 1)
            await work
            await comm.barrier()
    else:
        with pytest.raises(CollectiveMismatchError, match=rf"send\(float32\[{sent}\].*recv\(float32\[{expected}\]"):
            await comm.recv(torch.ones(expected), 0)


@pytest.mark.ranks(2, backend="gloo")
async def test_dtypes_that_differ_are_named(comm: Comm) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(3, dtype=torch.int32), 1)
        with pytest.raises(BrokenError):
            await comm.barrier()
    else:
        with pytest.raises(CollectiveMismatchError, match=r"send\(int32\[3\].*recv\(float32\[3\]"):
            await comm.recv(torch.ones(3), 0)


@pytest.mark.ranks(2, backend="gloo")
async def test_a_mismatch_with_oneself(comm: Comm) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(3), 0)
        with pytest.raises(CollectiveMismatchError, match=r"send\(float32\[3\].*recv\(float32\[4\]"):
            await comm.recv(torch.ones(4), 0)
    else:
        with pytest.raises(BrokenError):
            await comm.recv(torch.ones(1), 0)


@pytest.mark.ranks(3, backend="gloo")
async def test_a_receive_that_waits_holds_up_no_other_lane(comm: Comm) -> None:
    if comm.rank == 0:
        late = comm.recv(torch.ones(1), 1, 1)  # rank 1 sends it only after all the rest
        other_tag = comm.recv(torch.ones(1), 1, 2)
        other_peer = comm.recv(torch.ones(1), 2, 1)
        await asyncio.gather(comm.send(torch.ones(1), 1), comm.send(torch.ones(1), 2))
        await asyncio.gather(other_tag, other_peer)
        await comm.send(torch.ones(1), 1, 3)
        await late
    elif comm.rank == 1:
        await comm.recv(torch.ones(1), 0)
        await comm.send(torch.ones(1), 0, 2)
        await comm.recv(torch.ones(1), 0, 3)
        await comm.send(torch.ones(1), 0, 1)
    else:
        await comm.recv(torch.ones(1), 0)
        await comm.send(torch.ones(1), 0, 1)


@pytest.mark.ranks(2, backend="gloo")
async def test_receiving_from_any_source_is_refused_at_the_call(comm: Comm) -> None:
    with pytest.raises(ValueError, match="backend 'gloo' cannot receive from any source; name one"):
        comm.recv(torch.ones(1))
    work = comm.recv(torch.ones(1), 1 - comm.rank)
    assert work.seq == 0, "a refused call takes no number"
    await comm.send(torch.ones(1), 1 - comm.rank)
    await work
    assert work.source == 1 - comm.rank


@pytest.mark.ranks(2, backend="gloo", hints={"p2p_threads": "2"})
async def test_more_lanes_than_threads_are_worked_off(comm: Comm) -> None:
    tags = range(20)
    if comm.rank == 0:
        await asyncio.gather(*(comm.send(torch.full((2,), float(tag)), 1, tag) for tag in tags))
    else:
        tensors = [torch.zeros(2) for _ in tags]
        await asyncio.gather(*(comm.recv(tensor, 0, tag) for tag, tensor in zip(tags, tensors, strict=True)))
        assert [tensor[0].item() for tensor in tensors] == list(tags)
