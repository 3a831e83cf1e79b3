"""A server's side of one trainer: their conversation, and the buckets that this trainer sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.errors import AsyncCommError
from asynccomm.weights.buckets import cut, total
from asynccomm.weights.conversation import Conversation, Done, Ending, Go, Ready, TrainerMessage
from asynccomm.weights.layout import Layout
from asynccomm.weights.meeting import Meeting
from asynccomm.weights.plan import BoxTransfer
from asynccomm.weights.transmission import receive

__all__ = ["TrainerLink"]


@final
class TrainerLink:
    """One trainer, as a server sees it.

    Args:
        trainer: the rank of the trainer.
        transfers: the part of this trainer in the server's plan.
        bucket_bytes: the limit of a message.
    """

    def __init__(
        self, meeting: Meeting, trainer: int, talk: Conversation, transfers: Sequence[BoxTransfer], bucket_bytes: int
    ) -> None:
        self.talk = talk
        self._meeting, self._trainer = meeting, trainer
        self._buckets = cut(transfers, bucket_bytes)
        self.nbytes = total(self._buckets)
        self._fan: tuple[int, Comm] | None = None  # its key, and the comm
        self._ready = False  # the trainer knows that the next version may come
        self._receiving = False  # whether broadcasts are posted, which only an abort ends

    def get_ready(self) -> None:
        """Tell the trainer that the next version may come, unless it knows."""
        if not self._ready:
            self._ready = True
            self.talk.say(Ready())

    async def receive(self, job: int, tensors: Mapping[str, Tensor], layout: Layout) -> Ending:
        """Receive this trainer's buckets of ``job``, in as many attempts as it makes; returns the trainer's last word.

        After a cancellation the link must be closed.

        Raises: FinishedError, BrokenError, PayloadError: the trainer is lost.
        """
        while True:
            order = await self.talk.hear(TrainerMessage, job)
            if not isinstance(order, Go):
                assert isinstance(order, Ending)
                return order
            self._ready = False
            self.talk.say(Done(job, order.attempt, await self._attempt(order, tensors, layout)))

    async def _attempt(self, order: Go, tensors: Mapping[str, Tensor], layout: Layout) -> str:
        """One attempt; returns the error, or an empty text."""
        error = ""
        self._receiving = True
        try:
            await receive(await self._in_fan(order), self._buckets, tensors, layout)
        except AsyncCommError as exc:  # the trainer may try again
            error = f"{type(exc).__name__}: {exc}"
            await self._leave_fan("the fan has failed")
        self._receiving = False
        return error

    async def _in_fan(self, order: Go) -> Comm:
        """The comm that ``order`` names; a new one is given up when the trainer gives another order."""
        fan = order.fan
        if self._fan is not None and self._fan[0] == fan.key:
            return self._fan[1]
        await self._leave_fan("")
        next_order = self.talk.wait_for(TrainerMessage, order.job)
        comm = await self._meeting.fan(
            self._trainer, fan.key, fan.rank, fan.size, [next_order], "the trainer did not wait for the fan"
        )
        self._fan = fan.key, comm
        return comm

    async def _leave_fan(self, reason: str) -> None:
        """Close the fan, if there is one; with a ``reason``: abort it."""
        if self._fan is not None:
            _, comm = self._fan
            self._fan = None
            if reason:
                comm.abort(reason)
            await comm.aclose()

    async def aclose(self, reason: str) -> None:
        """End the exchange; with a ``reason``: abort it."""
        await self._leave_fan(reason or ("the server has left" if self._receiving else ""))
        if reason:
            await self.talk.abort(reason)
        else:
            await self.talk.aclose()
