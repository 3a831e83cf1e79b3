"""The control messages between one trainer and one server, over their pair comm.

A job is one transfer of one version: a push, or the delivery of the newest version to a late server::

    trainer                          server
                              <-     Ready(), ahead of the job: the second copy of the weights is free
    Begin(job, version)       ->     (the first trainer sends it)
    Go(job, attempt, fan)     ->     receives the buckets over the fan, a comm of the trainer and some servers
                              <-     Done(job, attempt, error)
    Complete(job)               ->     the version is complete
    or Abandon(job, reason)   ->     the version before stays

All trainers of a server send the same end of a job.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final, TypeAlias, TypeVar, final

from asynccomm.comm.comm import Comm
from asynccomm.control.transport.schema import Message, TaggedMessage, dumps, loads
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, PayloadError
from asynccomm.weights.layout import Slice

__all__ = ["Conversation", "FinishedError"]

TRAINER, SERVER = 0, 1  # ranks in a pair comm
CLOSE_SECONDS: Final = 2.0  # for the other side to answer the last message


@final
class Fan(Message, frozen=True):
    """A comm of one trainer and one or more servers that want the same."""

    key: int  #: names the comm among those of the trainer
    rank: int  #: of the addressed server
    size: int


@final
class TrainerLayouts(TaggedMessage, frozen=True):
    trainers: list[dict[str, Slice]]  #: the layout of each
    bucket_bytes: int


@final
class LayoutOffer(TaggedMessage, frozen=True):
    """A server's answer to the welcome."""

    label: str
    layout: dict[str, Slice]
    strict: bool


@final
class Connected(TaggedMessage, frozen=True):
    """The server is connected with all trainers that it needs."""


class JobMessage(TaggedMessage, frozen=True):
    job: int


class TrainerMessage(JobMessage, frozen=True):
    """A message in the part of a job in which the trainer leads."""


class Ending(TrainerMessage, frozen=True):
    """The end of a job."""


@final
class Begin(JobMessage, frozen=True):
    version: int
    info: Any = None  #: any JSON value, from the caller of the push


@final
class Ready(TaggedMessage, frozen=True):
    """The server takes the next version; good for the attempts of one job."""


@final
class Go(TrainerMessage, frozen=True):
    attempt: int
    fan: Fan


@final
class Done(JobMessage, frozen=True):
    attempt: int
    error: str = ""  #: empty: everything has arrived


@final
class Complete(Ending, frozen=True):
    pass


@final
class Abandon(Ending, frozen=True):
    reason: str


AnyMessage: TypeAlias = TrainerLayouts | LayoutOffer | Connected | Begin | Ready | Go | Done | Complete | Abandon
M = TypeVar("M", bound=TaggedMessage)


@final
class FinishedError(Exception):
    """The other side has ended the conversation in order."""


@final
class Conversation:
    """The messages of one pair comm, which the conversation closes at its end."""

    def __init__(self, comm: Comm, peer: int, label: str) -> None:
        self.comm = comm
        self.label = label  #: of the other side, for errors
        self._sink = comm.sink(peer)
        self._heard: list[TaggedMessage] = []
        self._news = asyncio.Event()
        self._ended: Exception | None = None
        self._reading = asyncio.create_task(self._read(peer))

    @property
    def ended(self) -> Exception | None:
        """FinishedError, or the error that broke the comm."""
        return self._ended

    def say(self, message: AnyMessage) -> None:
        """Send ``message``; errors show in :meth:`hear`."""
        if self._ended is not None:
            return
        with suppress(AsyncCommError):
            self._sink.put(dumps(message)).add_done_callback(_observe)

    async def hear(self, kind: type[M], job: int | None = None) -> M:
        """The next message of ``kind``, of ``job`` alone; messages of earlier jobs are dropped.

        Raises: FinishedError, BrokenError, PayloadError.
        """
        message = await self.wait_for(kind, job)
        self._heard.remove(message)
        return message

    async def wait_for(self, kind: type[M], job: int | None = None) -> M:
        """As :meth:`hear`, which gives the same message afterwards."""
        while True:
            for message in list(self._heard):
                if isinstance(message, kind):
                    if job is None or (isinstance(message, JobMessage) and message.job == job):
                        return message
                    self._heard.remove(message)
            if self._ended is not None:
                raise self._ended
            self._news.clear()
            await self._news.wait()

    async def _read(self, peer: int) -> None:
        try:
            async for text in self.comm.stream(peer):
                self._heard.append(loads(AnyMessage, text))
                self._news.set()
            self._ended = FinishedError(f"{self.label} has ended the exchange of weights")
            with suppress(AsyncCommError):
                self._sink.close().add_done_callback(_observe)  # the answer, for which the other side waits
        except AsyncCommError as exc:
            self._ended = exc
        except Exception as exc:  # of any damaged message
            self._ended = PayloadError(f"a message of {self.label} cannot be read: {type(exc).__name__}: {exc}")
        finally:
            self._news.set()

    async def aclose(self) -> None:
        """End the conversation in order: the other side gets a FinishedError."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._sink.close()
                await asyncio.wait([self._reading])
        except TimeoutError:
            self.comm.abort(f"{self.label} did not answer when the exchange of weights was to end")
        except AsyncCommError:
            pass
        except asyncio.CancelledError:
            self.comm.abort("the end of the exchange of weights was cancelled")
            raise
        finally:
            await self._end()

    async def abort(self, reason: str) -> None:
        """End the conversation at once: the other side gets an AbortedError."""
        self.comm.abort(reason)
        await self._end()

    async def _end(self) -> None:
        try:
            await asyncio.wait([self._reading])  # it ends with the comm, at the latest
        finally:
            await self.comm.aclose()


def _observe(work: Work[Any]) -> None:
    work.exception()
