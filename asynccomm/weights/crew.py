"""The task in which each trainer carries out the orders of the first one: admit a server, send a version, end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, final

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.control.transport.schema import dumps, loads
from asynccomm.errors import ClosedError
from asynccomm.weights.conversation import Abandon, Begin, Complete
from asynccomm.weights.dispatch import Dispatch, ServerLink, Shipment
from asynccomm.weights.errors import LayoutError, PushAbandonedError
from asynccomm.weights.layout import Layout, Weights
from asynccomm.weights.orders import Admit, AnyOrder, Deliver, End, Report, Start, Verdict, verdict
from asynccomm.weights.reception import Reception
from asynccomm.weights.transmission import aside

__all__ = ["Crew", "PushRequest", "PushResult"]

FIRST: Final = 0  # the trainer that gives orders


@final
@dataclass(frozen=True, slots=True)
class PushResult:
    """The result of a push."""

    version: int
    servers: tuple[str, ...]  #: labels of the servers that have the version
    lost: Mapping[str, str]  #: the reason for each server that was lost meanwhile, by label
    nbytes: int  #: of tensors sent by all trainers; once for servers that got one broadcast
    seconds: float  #: from the call, on this trainer


@final
@dataclass(eq=False, slots=True)
class PushRequest:
    """One call of ``push``."""

    version: int | None
    info: object
    result: asyncio.Future[PushResult]
    released: asyncio.Event = field(default_factory=asyncio.Event)  #: set once the state is not read any more
    start: float = field(default_factory=perf_counter)
    stopped: bool = False
    sending: asyncio.Task[Any] | None = None

    def stop(self) -> None:
        """End the push, as far as it has not ended."""
        self.stopped = True
        if self.sending is None:
            self.released.set()
        else:
            self.sending.cancel()

    def settle(self, outcome: PushResult | BaseException) -> None:
        self.released.set()
        if self.result.done():
            return
        if isinstance(outcome, PushResult):
            self.result.set_result(outcome)
        else:
            self.result.set_exception(outcome)
            self.result.exception()  # a push that was cancelled has no reader


@final
class Crew:
    """One trainer's part in carrying out orders.

    Args:
        group: a comm of all trainers, for orders alone.
        read: reads the weights of this trainer. Raises: ValueError, TypeError.
        layout: of this trainer, as all trainers and servers know it.
        retain: whether to keep a copy of the newest version, and to send from it.
    """

    def __init__(
        self,
        group: Comm,
        reception: Reception,
        dispatch: Dispatch,
        read: Callable[[], Weights],
        layout: Layout,
        *,
        retain: bool,
    ) -> None:
        self._group, self._reception, self._dispatch = group, reception, dispatch
        self._read, self._layout, self._retain = read, layout, retain
        self.version = 0  #: the newest version that was pushed; 0: none
        self._copy: dict[str, Tensor] = {}
        self._copied = 0  # the version in the copy; 0: none
        self._info: object = None  # of the newest version
        self._job = 0
        self._calls: asyncio.Queue[PushRequest] = asyncio.Queue()  # of this trainer
        self._orders: asyncio.Queue[Start | Admit | int | PushRequest | End] = asyncio.Queue()  # on the first trainer
        self._requests: set[PushRequest] = set()  # not settled
        self.error: BaseException = ClosedError("the publisher is closed")
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running = asyncio.create_task(self._run())

    @property
    def first(self) -> bool:
        """Whether this trainer gives the orders."""
        return self._group.rank == FIRST

    def order(self, order: Start | Admit | int | End) -> None:
        """On the first trainer: give an order. A number: send the newest version to this late server."""
        self._orders.put_nowait(order)

    def push(self, version: int | None, info: object) -> PushRequest:
        """Request a push. Raises: the error that ended the crew."""
        if self.running.done():
            raise self.error
        request = PushRequest(version, info, asyncio.get_running_loop().create_future())
        self._requests.add(request)
        (self._orders if self.first else self._calls).put_nowait(request)
        return request

    def refuse(self, error: LayoutError) -> None:
        """A server that the publisher waits for does not fit."""
        if not self.started.done():
            self.started.set_exception(error)

    # -- the task -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                order, request = await self._next()
                match order:
                    case Start():
                        if not self.started.done():
                            self.started.set_result(None)
                    case Admit():
                        self._reception.admit(order)
                    case Deliver():
                        await self._deliver(order, request)
                    case End():
                        return
        except Exception as exc:
            self.error = exc
        finally:
            for waiting in self._requests:
                waiting.settle(self.error)
            if not self.started.done():
                self.started.set_exception(self.error)
                self.started.exception()  # its reader may be gone

    async def _next(self) -> tuple[AnyOrder, PushRequest | None]:
        """The next order, and this trainer's request if the order is a push."""
        text, mine = None, None
        if self.first:
            while (order := self._made(given := await self._orders.get())) is None:
                pass
            text = dumps(order)
            mine = given if isinstance(given, PushRequest) else None
        received: Any = await self._group.broadcast_object(text, FIRST, timeout=math.inf)
        found: AnyOrder = loads(AnyOrder, received)
        if isinstance(found, Deliver) and found.push and mine is None:
            mine = await self._calls.get()
        return found, mine

    def _made(self, given: Start | Admit | int | PushRequest | End) -> AnyOrder | None:
        """On the first trainer: the order for all; None if there is nothing to do any more."""
        if isinstance(given, (Start, Admit, End)):
            return given
        gone = self._reception.gone()
        self._job += 1
        if isinstance(given, PushRequest):
            version = self.version + 1 if given.version is None else given.version
            return Deliver(self._job, version, True, self._reception.admitted(), gone)
        member = self._reception.connected.get(given)
        if member is None or not self._copied or member.version == self._copied:
            return None if not gone else Deliver(self._job, self._copied, False, [], gone)
        return Deliver(self._job, self._copied, False, [given], gone)

    async def _deliver(self, order: Deliver, request: PushRequest | None) -> None:
        for number in order.gone:
            await self._drop(number, "the server has left")
        if order.push:
            await self._group.barrier(timeout=math.inf)  # all trainers have called: till here, each may still cancel
        members, lost = await self._reception.members(order.servers)
        labels = self._reception.labels(order.servers)
        if self.first:
            info = self._info if request is None else request.info
            for member in members:
                member.talk.say(Begin(order.job, order.version, info))
        task = Shipment(order.job, self._copy, self._layout, lost=lost)
        stopped, error = await self._send(order, request, task, members)
        report = dumps(Report(task.nbytes, stopped, task.lost, self._copied))
        texts: Any = await self._group.all_gather_object(report, timeout=math.inf)
        outcome = verdict([loads(Report, text) for text in texts])
        for member in members:
            if member.number not in outcome.lost:
                member.talk.say(Abandon(order.job, outcome.reason) if outcome.reason else Complete(order.job))
                member.version = member.version if outcome.reason else order.version
        for number, reason in outcome.lost.items():
            await self._drop(number, reason)
        if request is not None:
            self._finish(order, request, outcome, labels, error)

    async def _drop(self, number: int, reason: str) -> None:
        await self._dispatch.forget(number)
        await self._reception.drop(number, reason)

    def _finish(
        self,
        order: Deliver,
        request: PushRequest,
        outcome: Verdict,
        labels: Mapping[int, str],
        error: Exception | None,
    ) -> None:
        """Settle a push."""
        self._requests.discard(request)
        if outcome.reason:
            self._copied = outcome.copied
            request.settle(error or PushAbandonedError(order.version, outcome.reason))
            return
        self.version, self._info = order.version, request.info
        self._copied = order.version if self._retain else 0
        served = tuple(label for number, label in labels.items() if number not in outcome.lost)
        lost = {labels[number]: reason for number, reason in outcome.lost.items()}
        request.settle(PushResult(order.version, served, lost, outcome.nbytes, perf_counter() - request.start))

    # -- sending ------------------------------------------------------------------------------------------------------

    async def _send(
        self, order: Deliver, request: PushRequest | None, task: Shipment, members: Sequence[ServerLink]
    ) -> tuple[str, Exception | None]:
        """Send this trainer's part.

        Returns: the reason why this trainer stopped, if it did; its own error, if there is one.
        """
        if request is None:
            await self._dispatch.run(task, members)
            return "", None
        try:
            self._check(order, request)
            request.sending = asyncio.create_task(self._push(request, task, members))
            await asyncio.wait([request.sending])
            request.sending.result()
        except asyncio.CancelledError:
            if not request.stopped:
                raise
            return "cancelled it", None
        except (ValueError, TypeError) as exc:
            return f"could not take part: {exc}", exc
        finally:
            request.released.set()
        return "", None

    def _check(self, order: Deliver, request: PushRequest) -> None:
        if request.stopped:
            raise asyncio.CancelledError
        if request.version is not None and request.version != order.version:
            raise ValueError(
                f"version must be the same on all trainers, got {request.version}, and {order.version} on trainer 0"
            )
        if order.version <= self.version:
            raise ValueError(f"version must be above {self.version}, got {order.version}")

    async def _push(self, request: PushRequest, task: Shipment, members: Sequence[ServerLink]) -> None:
        weights = self._read()
        if weights.layout != self._layout:
            names = [*weights.layout, *self._layout]
            other = sorted({name for name in names if weights.layout.get(name) != self._layout.get(name)})
            raise ValueError(f"state must have the tensors of its publisher's making, but these are others: {other}")
        if self._retain:
            self._copied = 0
            await self._make_copy(weights)
            request.released.set()
        task.tensors = self._copy if self._retain else weights.tensors
        await self._dispatch.run(task, members)

    async def _make_copy(self, weights: Weights) -> None:
        own = [name for name, part in weights.layout.items() if not part.tied]
        for name in own:
            if name not in self._copy:
                tensor = weights.tensors[name]
                with torch.inference_mode(False):  # threads write it, and later pushes may be outside of the mode
                    self._copy[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for name, part in weights.layout.items():
            self._copy[name] = self._copy[part.tied or name]

        def copy() -> None:
            for name in own:
                self._copy[name].copy_(weights.tensors[name])

        await aside(copy, sum(weights.tensors[name].nbytes for name in own), self._group.device)
