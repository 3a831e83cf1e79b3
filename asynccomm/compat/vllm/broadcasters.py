"""Queues among the ranks of a GroupCoordinator's group."""

from __future__ import annotations

from typing import Any

from asynccomm.comm.comm import Comm
from asynccomm.compat.either import EitherComm
from asynccomm.compat.vllm.message_queue import CAPACITY, MessageQueue
from asynccomm.errors import AsyncCommError, BackendError
from asynccomm.ops.renamed import Renamed
from asynccomm.queues.attaching import attach_queue
from asynccomm.queues.queue import MessageQueue as AwaitableQueue


class GroupQueues:
    """Queues of objects: one writer to all other ranks, and every rank to one reader."""

    _weights_only: bool
    _queues: list[MessageQueue]

    def _on_cpu(self) -> EitherComm:
        raise NotImplementedError

    def create_mq_broadcaster(
        self, writer_rank: int = 0, external_writer_handle: str | None = None, blocking: bool = True
    ) -> Any:
        """A queue from rank ``writer_rank`` to all other ranks. All ranks call it.

        Args:
            external_writer_handle: at rank ``writer_rank``, the handle of another process's queue: all ranks, this one
                included, read from that.
            blocking: accepted. All ranks have attached when the call is done.

        Returns: a MessageQueue, which ``destroy`` closes.

        Raises: the errors of ``asynccomm.Comm.queue`` and ``asynccomm.attach_queue``; BackendError if another rank
            could not attach.
        """
        here = self._on_cpu()
        comm, weights_only = here.comm, self._weights_only

        async def make() -> MessageQueue:
            with Renamed({"root": "writer_rank"}):
                handle = comm.broadcast_object(external_writer_handle, writer_rank)
            external: Any = await handle
            if external is None:
                queue = await comm.queue(writer=writer_rank, capacity=CAPACITY, weights_only=weights_only)
            else:
                queue = await _attached(comm, external, weights_only)
            return self._keep(MessageQueue(queue, comm.loop, comm.size - 1))

        return here.awaited(make)

    def create_single_reader_mq_broadcasters(self, reader_rank_in_group: int = 0, blocking: bool = False) -> Any:
        """A queue from each rank to one reader, for which rank ``reader_rank_in_group`` gets the handles.

        The reader makes its ends by ``MessageQueue.create_from_handle``; it gets the objects that were put after it has
        attached, for which the writer's ``wait_until_ready`` waits.

        Args:
            blocking: wait for the reader here; but not on rank ``reader_rank_in_group``, which has to make the ends.

        Returns: this rank's MessageQueue, which ``destroy`` closes, and a list: at the reader the handles of all ranks,
            elsewhere empty.
        """
        here = self._on_cpu()
        comm, weights_only = here.comm, self._weights_only

        async def make() -> tuple[MessageQueue, list[str]]:
            address = await comm._address_for(range(comm.size))
            queue = await comm.queue(
                writer=comm.rank, readers=[], capacity=CAPACITY, address=address, weights_only=weights_only
            )
            mine = self._keep(MessageQueue(queue, comm.loop, 1))
            with Renamed({"root": "reader_rank_in_group"}):
                gathered = comm.gather_object(queue.handle, reader_rank_in_group)
            handles: Any = await gathered
            if blocking and comm.rank != reader_rank_in_group:
                await queue.wait_readers(1)
            return mine, list(handles or [])

        return here.awaited(make)

    def _keep(self, queue: MessageQueue) -> MessageQueue:
        self._queues.append(queue)
        return queue


async def _attached(comm: Comm, handle: Any, weights_only: bool) -> AwaitableQueue:
    """Attach to the queue of ``handle`` on all ranks. Raises: an error on all ranks, if one of them cannot attach."""
    queue, failure = None, None
    try:
        queue = await attach_queue(handle, weights_only=weights_only)
    except (AsyncCommError, OSError, TypeError, ValueError) as exc:
        failure = exc
    failures = await comm.all_gather_object(None if failure is None else str(failure))
    if queue is not None and all(each is None for each in failures):
        return queue
    if queue is not None:
        await queue.aclose()
    failed = next(rank for rank, each in enumerate(failures) if each is not None)
    raise failure or BackendError(f"rank {failed} could not attach to the queue: {failures[failed]}")
