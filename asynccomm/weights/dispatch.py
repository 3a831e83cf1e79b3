"""A trainer's side of one server: their conversation, and the buckets that this trainer sends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.core.tasks import shielded
from asynccomm.errors import AsyncCommError
from asynccomm.store.base import within
from asynccomm.weights.buckets import Bucket, cut, total
from asynccomm.weights.conversation import Conversation, Done, Fan, FinishedError, Go, Ready
from asynccomm.weights.layout import Layout
from asynccomm.weights.meeting import Meeting
from asynccomm.weights.plan import BoxTransfer
from asynccomm.weights.transmission import send


@final
class ServerLink:
    """One server, as one trainer sees it.

    Args:
        number: identifies the server among those of the publisher.
        transfers: the part of this trainer in the server's plan.
        bucket_bytes: the limit of a message.
    """

    def __init__(self, number: int, talk: Conversation, transfers: Sequence[BoxTransfer], bucket_bytes: int) -> None:
        self.number = number
        self.talk = talk
        self.label = talk.label
        self.transfers = tuple(transfers)
        self.buckets: list[Bucket] = cut(transfers, bucket_bytes)
        self.nbytes = total(self.buckets)
        self._ready = False  # the server takes the next version
        self.version = 0  #: on the first trainer: the last version that the server has got

    async def wait_ready(self) -> None:
        """Wait until the server takes a version. Cancelling is safe. Raises: FinishedError, AsyncCommError."""
        if not self._ready:
            await self.talk.hear(Ready)
            self._ready = True

    def go(self, order: Go) -> None:
        """Let the server receive."""
        self._ready = False
        self.talk.say(order)


@final
@dataclass(slots=True)
class Shipment:
    """One version on its way from one trainer to servers."""

    job: int
    tensors: Mapping[str, Tensor]
    layout: Layout
    nbytes: int = 0  #: of tensors that were sent; once for each broadcast
    lost: dict[int, str] = field(default_factory=dict)  #: the reason for each server that was lost, by number


@final
class Dispatch:
    """Sends one version to several servers, over fans: comms for the buckets, beside the pairs.

    Servers that want the same of this trainer form one fan. A fan breaks when it loses a server; the others then get
    the version again, each over a fan of its own.

    Args:
        meeting: the store where fans meet.
        rank: of this trainer.
        seconds: for each step of a server, until the server counts as lost.
        shared: whether several servers may form a fan.
    """

    def __init__(self, meeting: Meeting, rank: int, seconds: float, *, shared: bool) -> None:
        self._meeting, self._rank, self._seconds, self._shared = meeting, rank, seconds, shared
        self._fans: dict[tuple[int, ...], tuple[int, Comm]] = {}  # by members: the key, and the comm
        self._last_key = 0

    async def run(self, task: Shipment, members: Sequence[ServerLink]) -> None:
        """Send to all ``members``, and record in ``task`` the servers that were lost.

        After a cancellation the servers wait for the end of the job.
        """
        groups: dict[tuple[BoxTransfer, ...] | int, list[ServerLink]] = {}
        for member in members:
            if member.buckets:
                groups.setdefault(member.transfers if self._shared else member.number, []).append(member)
        async with asyncio.TaskGroup() as tasks:
            for group in groups.values():
                tasks.create_task(self._serve(task, group))

    async def _serve(self, task: Shipment, group: Sequence[ServerLink]) -> None:
        """Send to servers that want the same."""
        ready = await self._each(task, group, lambda member: member.wait_ready())
        failed = await self._attempt(task, ready, 0) if ready else {}

        async def again(member: ServerLink) -> None:
            if errors := await self._attempt(task, [member], 1):
                task.lost.setdefault(member.number, errors[member])

        async with asyncio.TaskGroup() as tasks:
            for member in failed:
                tasks.create_task(again(member))

    async def _attempt(self, task: Shipment, group: Sequence[ServerLink], attempt: int) -> dict[ServerLink, str]:
        """Broadcast to ``group``; returns the servers that live and have not received everything, with the errors."""
        numbers = tuple(member.number for member in group)
        key, fan = self._fans.pop(numbers, (0, None))
        if fan is None:
            self._last_key = key = self._last_key + 1
        for rank, member in enumerate(group, 1):
            member.go(Go(task.job, attempt, Fan(key, rank, len(group) + 1)))
        failed: dict[ServerLink, str] = {}

        async def hear(member: ServerLink) -> None:
            if error := await _answer(member, task.job, attempt):
                failed[member] = error

        error = "the trainer has stopped"
        try:
            try:
                if fan is None:
                    fan = await self._new_fan(task.job, attempt, group, key)
                await send(fan, group[0].buckets, task.tensors, task.layout)
                task.nbytes += group[0].nbytes
            except AsyncCommError as exc:
                error = f"{type(exc).__name__}: {exc}"
            else:
                error = ""
            if fan is None:  # servers that still wait for it give up at the next order
                living = await self._each(task, group, _check_living)
                return dict.fromkeys(living, error)
            if len(await self._each(task, group, hear)) < len(group) or failed:
                error = error or "not all servers have received everything"
        finally:
            if fan is not None and not error:
                self._fans[numbers] = key, fan
            elif fan is not None:
                fan.abort(error)
                await shielded(fan.aclose())
        return failed

    async def _new_fan(self, job: int, attempt: int, group: Sequence[ServerLink], key: int) -> Comm:
        """A comm with the servers ``group``, in place of others that they are in.

        Raises: AsyncCommError, also as soon as one of them has left or has ended the attempt.
        """
        await self.forget(*(member.number for member in group))
        ends = [_answered(member, job, attempt) for member in group]
        return await self._meeting.fan(self._rank, key, 0, len(group) + 1, ends, "a server did not wait for the fan")

    async def _each(
        self,
        task: Shipment,
        members: Sequence[ServerLink],
        step: Callable[[ServerLink], Awaitable[object]],
    ) -> list[ServerLink]:
        """Run ``step`` for all ``members`` at once; returns those for which it succeeded."""
        kept: list[ServerLink] = []

        async def one(member: ServerLink) -> None:
            try:
                async with within(self._seconds):
                    await step(member)
            except TimeoutError as exc:
                silent = not isinstance(exc, AsyncCommError)
                task.lost[member.number] = f"no answer within {self._seconds:g} s" if silent else str(exc)
            except (AsyncCommError, FinishedError) as exc:
                task.lost[member.number] = f"{type(exc).__name__}: {exc}"
            else:
                kept.append(member)

        async with asyncio.TaskGroup() as tasks:
            for member in members:
                tasks.create_task(one(member))
        return sorted(kept, key=lambda member: member.number)

    async def forget(self, *numbers: int) -> None:
        """Close the fans with any of these servers."""
        for old in [old for old in self._fans if {*old} & {*numbers}]:
            _, comm = self._fans.pop(old)
            await comm.aclose()

    async def aclose(self) -> None:
        """Close the fans."""
        while self._fans:
            _, (_, comm) = self._fans.popitem()
            await comm.aclose()


async def _check_living(member: ServerLink) -> None:
    if member.talk.ended is not None:
        raise member.talk.ended


async def _answer(member: ServerLink, job: int, attempt: int) -> str:
    """The error with which ``member`` ended the attempt; empty: it has received everything."""
    await _answered(member, job, attempt)
    return (await member.talk.hear(Done, job)).error


async def _answered(member: ServerLink, job: int, attempt: int) -> None:
    """Wait until ``member`` has ended the attempt; drops the answers to earlier ones."""
    while (await member.talk.wait_for(Done, job)).attempt != attempt:
        await member.talk.hear(Done, job)
