"""One step: from the first gradient that backward computes to the end of ``finish``.

When all gradients of a bucket are there, and all buckets before it are sent, the thread that has computed the last
gradient sends the bucket. The owner of a step holds a lock around all methods but ``receive``: hooks run on the thread
of backward.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, final

import torch

from asynccomm.comm.comm import Comm
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError
from asynccomm.gradients.bucket import GradientBucket, GradientBuckets
from asynccomm.ops.reduce_op import ReduceOp

Compress = Callable[[GradientBucket], Awaitable[Any]]

_sending: weakref.WeakKeyDictionary[Comm, weakref.ref[GradientStep]] = weakref.WeakKeyDictionary()  # the last step


@final
class GradientStep:
    """The progress of a step.

    Args:
        buckets: of the model.
        op: the reduction.
        compress: the dtype of gradients on their way, or a function that reduces a bucket; None: as they are.
    """

    def __init__(self, buckets: GradientBuckets, op: ReduceOp, compress: torch.dtype | Compress | None) -> None:
        self._buckets = buckets
        self._op = op
        self._compress = compress
        self._sent = 0  # buckets
        self._received = 0  # buckets
        self.recorded: list[int] = []  #: parameters in the order of their gradients
        self.works: list[Work[Any]] = []  #: of the buckets that were sent
        self.began = False  #: whether any gradient has been computed
        self.running = False  #: whether a backward pass has begun and not ended
        self.finishing = False  #: whether a call of ``finish`` is waiting
        self.order: Work[Any] | None = None  #: of the order that rank 0 has recorded, for the steps that follow
        self.error: Exception | None = None  #: the reason why the step cannot succeed
        self._over = False  # whether all gradients were received, or the step was given up

    def arrived(self, number: int, *, sync: bool) -> None:
        """Parameter ``number`` has its gradient, or a part of it if ``sync`` is False. Within a backward pass.

        Raises: RuntimeError if the gradient cannot be reduced; errors of a ``compress`` function. ``error`` is set.
        """
        self.began = True
        if self.error is not None:
            return  # finish() raises it
        bucket, slot = self._buckets.places[number]
        try:
            if slot in bucket.there or bucket.pending is not None:
                raise RuntimeError(
                    f"parameter {bucket.names[slot]!r} got another gradient while gradients of the last backward are "
                    f"on their way to the other ranks: call finish() after backward, and use `with "
                    f"reducer.no_sync():` for all backward passes of a step but the last"
                    + ("; if that backward has raised on all ranks, all of them call rebind()" if self.running else "")
                )
            if not sync:
                bucket.watch()
                return
            if not self.running:
                self._enter()
                self.running = True
                # autograd calls it at the end of the backward pass, and not if the pass raises
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._backward_ended)
            bucket.arrive(slot)
            self.recorded.append(number)
            while self._sent < len(self._buckets.all) and self._buckets.all[self._sent].full:
                self._send_next()
        except AsyncCommError as exc:
            self.error = exc  # for finish() to raise: backward goes on
        except Exception as exc:
            self.error = exc
            raise

    def _backward_ended(self) -> None:
        self.running = False

    def send_rest(self) -> None:
        """Send the buckets that are not sent, with zeros for parameters without a gradient."""
        while self._sent < len(self._buckets.all):
            self._send_next()

    def _enter(self) -> None:
        """Refuse a step during that of another reducer of the comm: other ranks may have the other order."""
        comm = self._buckets.all[0].comm
        last = _sending.get(comm)
        other = None if last is None else last()
        if other is not None and other is not self and not other._over:
            raise RuntimeError(
                f"another GradientReducer of comm {comm.name!r} is between its backward() and finish(): call finish() "
                f"first, or make each reducer with its own comm, from comm.dup()"
            )
        _sending[comm] = weakref.ref(self)

    def _send_next(self) -> None:
        self._enter()
        bucket = self._buckets.all[self._sent]
        bucket.seal()
        if callable(self._compress):
            bucket.send_flags(self._op)
            bucket.pending = self._compress(bucket)
            if not inspect.isawaitable(bucket.pending):
                raise TypeError(f"compress must return a Work or another awaitable, got {bucket.pending!r}")
        else:
            bucket.send(self._op, self._compress)
        bucket.watch()
        self._sent += 1
        if isinstance(bucket.pending, Work):
            self.works.append(bucket.pending)

    async def receive(self) -> Sequence[int]:
        """Wait for all buckets. Returns: the order that rank 0 has recorded; empty: none, or it was not sent.

        May be called again after it was cancelled.
        """
        for bucket in self._buckets.all[self._received :]:
            await bucket.receive()
            self._received += 1
        order: Sequence[int] | None = None if self.order is None else await self.order
        if self.error is not None:  # of a backward pass meanwhile, which has changed gradients on their way
            raise self.error
        for bucket in self._buckets.all:
            bucket.settle()
        self._over = True
        return order or ()

    def give_up(self) -> None:
        """Forget the step, which has failed or will not be finished. Operations in flight go on."""
        self._over = True
        for work in [*self.works, *([] if self.order is None else [self.order])]:
            if work.done():
                work.exception()  # retrieved: the error of the step stands for all
        for bucket in self._buckets.all:
            bucket.discard()
