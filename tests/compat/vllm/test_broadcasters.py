"""Queues of a GroupCoordinator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asynccomm import AbortedError, BackendError, Comm, blocking
from asynccomm.compat import vllm
from asynccomm.compat.vllm import GroupCoordinator, MessageQueue
from tests.compat.vllm.groups import group_of, without_a_loop


@pytest.mark.ranks(3, backend=["shm", "gloo"])
async def test_queues_without_a_loop(comm: Comm) -> None:
    def program() -> None:
        group = group_of([[2, 1, 0]])
        me = group.rank_in_group
        queue = group.create_mq_broadcaster(1)
        queue.wait_until_ready()
        if me == 1:
            queue.enqueue({"t": torch.arange(3)}, timeout=20)
        else:
            assert queue.dequeue(timeout=20)["t"].tolist() == [0, 1, 2]
        assert queue.broadcast_object("go" if me == 1 else None) == "go"
        mine, handles = group.create_single_reader_mq_broadcasters(2)
        assert (handles == []) == (me != 2)
        if me == 2:
            assert handles[2] == mine.export_handle()
            ends = [MessageQueue.create_from_handle(handle, 0) for handle in handles]
            mine.wait_until_ready()
            mine.enqueue("from 2")
            assert [end.dequeue(20) for end in ends] == ["from 0", "from 1", "from 2"]
            for end in ends:
                end.close()
        else:
            mine.wait_until_ready()  # else the reader could come after the item
            mine.enqueue(f"from {me}")
        group.barrier()
        group.destroy()

    await without_a_loop(comm, program)


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.ranks(2)
async def test_a_group_that_cannot_be_made_leaves_nothing_open(
    comm: Comm, awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a queue fails on one rank, both get an error, with and without a loop, and the comms are closed."""
    derived: list[Comm] = []
    join, create = GroupCoordinator._join, GroupCoordinator.create_mq_broadcaster

    def joined(group: GroupCoordinator, given: Any) -> None:
        derived.append(given.comm)
        join(group, given)

    def failing(group: GroupCoordinator, **options: Any) -> Any:
        if comm.rank == 0:
            raise OSError("no memory")
        return create(group, **options)

    monkeypatch.setattr(GroupCoordinator, "_join", joined)
    monkeypatch.setattr(GroupCoordinator, "create_mq_broadcaster", failing)
    expected: Any = OSError if comm.rank == 0 else AbortedError

    def program() -> None:
        with pytest.raises(expected, match="no memory"):
            group_of([[0, 1]], queue=True)

    if not awaited:
        await without_a_loop(comm, program)
    else:
        await vllm.init_distributed_environment(backend=comm.backend)
        with pytest.raises(expected, match="no memory"):
            await GroupCoordinator([[0, 1]], 0, "gloo", True, True)
        await vllm.destroy_distributed_environment()
    assert len(derived) == 1 or comm.rank == 1  # which may be told while it is still connecting
    assert all(group._session.closed for group in derived)


@pytest.mark.ranks(2)
async def test_queues_in_a_coroutine(comm: Comm) -> None:
    await vllm.init_distributed_environment(backend=comm.backend)
    group = await GroupCoordinator([[0, 1]], 0, "gloo", True, True)
    assert group.mq_broadcaster is not None
    assert await group.broadcast_object(comm.rank + 5) == 5
    queue = await group.create_mq_broadcaster(1)
    await queue.wait_until_ready()
    if comm.rank == 1:
        await queue.enqueue(7, timeout=20)
        assert await queue.broadcast_object(8) == 8
    else:
        assert [await queue.dequeue(), await queue.broadcast_object()] == [7, 8]
        with pytest.raises(TimeoutError):
            await queue.dequeue(timeout=0.01)
    reading: Any = None
    if comm.rank == 0:
        mine, handles = await group.create_single_reader_mq_broadcasters(blocking=True)
        reading = await MessageQueue.create_from_handle(handles[1])
        assert await reading.dequeue(20) == "answer"
        await reading.close()
    else:
        mine, handles = await group.create_single_reader_mq_broadcasters(blocking=True)
        await mine.enqueue("answer")
    await group.barrier()
    await group.destroy()
    await group.destroy()
    await vllm.destroy_distributed_environment()


@pytest.mark.ranks(2)
async def test_a_queue_of_another_process(comm: Comm) -> None:
    def program() -> None:
        group = group_of([[0, 1]])
        executor = blocking.new_comm("loopback", alone=True, name="executor")
        with executor, executor.queue(writer=0, readers=[]) as tasks:
            handle = tasks.handle if group.rank_in_group == 1 else None
            queue = group.create_mq_broadcaster(1, external_writer_handle=handle)
            if handle is not None:
                tasks.wait_readers(2)
                tasks.put("task")
            assert queue.dequeue(20) == "task"
            group.barrier()
        with pytest.raises(BackendError, match="attach"):  # the queue has ended
            group.create_mq_broadcaster(1, external_writer_handle=tasks.handle if group.rank_in_group == 1 else None)
        with pytest.raises(ValueError, match="handle"):
            group.create_mq_broadcaster(0, external_writer_handle="nonsense")
        group.destroy()

    await without_a_loop(comm, program)


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_objects_of_rank_0_take_the_queue(comm: Comm) -> None:
    def program() -> None:
        group = group_of([[0, 1]], queue=True)
        alone = group_of([[0], [1]], queue=True)
        assert alone.mq_broadcaster is None
        queue = group.mq_broadcaster
        assert queue is not None
        before = group.cpu_group.statistics()
        if group.is_first_rank:
            for number in range(20):  # does not wait for the other rank
                group.broadcast_object(number)
            assert queue.queue.statistics().items == 20
        else:
            assert [group.broadcast_object() for _ in range(20)] == list(range(20))
        assert group.cpu_group.statistics() == before
        assert group.broadcast_object("other" if group.is_last_rank else None, src=1) == "other"
        alone.destroy()
        group.destroy()

    await without_a_loop(comm, program)
