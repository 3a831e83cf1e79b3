"""Gradients combined over the ranks, bucket by bucket, while backward computes the rest.

Rules that keep the ranks together:

- All ranks have the same buckets and send them in the same order. A bucket that is complete early waits for its
  predecessors.
- The buckets change once: after the first step, the order in which rank 0 computed its gradients becomes the order of
  all ranks.
- Every rank sends every bucket in every step, with zeros in place of gradients that it does not have.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self, SupportsIndex, final

import torch
from torch import Tensor, nn

from asynccomm.comm.comm import Comm, check_comm
from asynccomm.core.handles import Handle
from asynccomm.core.work import Work
from asynccomm.gradients.agreement import agree, describe_model
from asynccomm.gradients.bucket import GradientBuckets
from asynccomm.gradients.checks import (
    bucket_bytes,
    check_reduction,
    check_root,
    check_unchanged,
    trained_parameters,
)
from asynccomm.gradients.planning import GradientLayout, complete_order, plan_buckets
from asynccomm.gradients.step import Compress, GradientStep
from asynccomm.ops.reduce_op import ReduceOp, ReduceOpLike

BUCKET_MB: Final = 25.0  # MiB, as in DistributedDataParallel
_COMPRESSED: Final = (torch.bfloat16, torch.float16)


@final
class ArrivalHook:
    """Notifies a reducer that the gradient of a parameter was computed. Does not keep the reducer alive."""

    __slots__ = ("_number", "reducer")

    def __init__(self, reducer: GradientReducer, number: int) -> None:
        self.reducer = weakref.ref(reducer)
        self._number = number

    def __call__(self, parameter: Tensor) -> None:
        reducer = self.reducer()
        if reducer is not None:
            reducer._arrived(self._number)


@final
class GradientReducer(Handle):
    """Averages the gradients of a model over all ranks, while backward computes the rest.

    ::

        async with asynccomm.GradientReducer(model, comm) as reducer:
            for batch in batches:
                optimizer.zero_grad()
                loss = model(batch).mean()
                await asyncio.to_thread(loss.backward)
                await reducer.finish()  # each gradient is now the ranks' average
                optimizer.step()

    Awaiting the reducer, or entering ``async with``, compares the models of all ranks and copies parameters and buffers
    of rank 0 to the others. A backward before that raises ``RuntimeError``. Leaving ``async with``, and :meth:`close`,
    remove the hooks.

    - ``backward()`` may run on the event loop's thread or on any other. In a thread of its own, communication overlaps
      with it, and the event loop stays free.
    - The reducer's collectives have their place in the order of the comm. From the begin of a backward pass until
      ``finish()`` returns, the program calls no other collective on the comm, and uses no other reducer of the comm;
      ``comm.dup()`` gives each its own comm.
    - After ``finish()`` each gradient is a view into memory of the reducer. ``zero_grad()`` with and without
      ``set_to_none``, clipping, scaling and optimizers work as usual.
    - A parameter without gradient on this rank counts as zeros. One without gradient on all ranks keeps ``grad`` None.
    - Gradients that the program does not zero after ``finish()`` take part in the next reduction again: AVG keeps them,
      SUM multiplies them by the number of ranks.
    - Gradients from ``torch.autograd.grad()`` are not reduced.
    - On a GPU, backward and ``finish()`` use the same current stream.

    Args:
        model: its parameters that require a gradient are reduced; they are dense tensors on the comm's device. All
            ranks have the same parameters and buffers in the same order.
        comm: the comm of all ranks that train the model.
        bucket_mb: MiB of gradients that are sent together, at most; the same on all ranks. The first bucket of a dtype
            has at most 1 MiB. A larger parameter has a bucket of its own.
        op: ReduceOp.AVG or ReduceOp.SUM.
        compress: ``torch.bfloat16`` or ``torch.float16``: wider floating-point gradients travel in this dtype.
            Or a function that reduces a ``GradientBucket`` itself. It is called in the order of the buckets on the
            thread of backward, and sends all its operations on ``bucket.comm`` before it returns. It returns a Work, or
            another awaitable, of None (the results are in ``bucket.tensor``) or of a tensor of as many elements, which
            is copied there. ``finish()`` awaits one after the other.

    Raises: TypeError, ValueError naming the argument; from awaiting: ValueError on all ranks, naming the first
        parameter or setting that differs, and errors of the comm.
    """

    _instead = "make one there"

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        *,
        bucket_mb: float = BUCKET_MB,
        op: ReduceOpLike = ReduceOp.AVG,
        compress: torch.dtype | Compress | None = None,
    ) -> None:
        check_comm(comm)
        self._limit = bucket_bytes(bucket_mb)
        self._op = check_reduction(op)
        if compress is not None and compress not in _COMPRESSED and not callable(compress):
            raise ValueError(f"compress must be torch.bfloat16, torch.float16 or a function, got {compress!r}")
        self._compress = compress
        trained = trained_parameters(model, comm, self._op)
        _check_without_reducer(trained)
        self._model, self._comm = model, comm
        self._names, self._parameters = tuple(trained), tuple(trained.values())
        self._layouts = [GradientLayout.of(parameter) for parameter in self._parameters]
        self._lock = threading.Lock()
        self._sync = True
        self._closed = False
        self._plan: list[list[int]] = []  # the numbers of the parameters of each bucket
        self._learned = False  # whether the plan follows rank 0's order
        self._buckets: GradientBuckets | None = None
        self._step: GradientStep | None = None  # None: before the begin, and after an error
        self._error: Exception | None = None  # of the last step; None: it has succeeded, or there was none
        handles = [
            parameter.register_post_accumulate_grad_hook(ArrivalHook(self, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self._parameters)
        ]
        self._remove_hooks = weakref.finalize(self, _remove_all, handles)

    @property
    def comm(self) -> Comm:
        """The comm that carries the gradients."""
        return self._comm

    @property
    def works(self) -> Sequence[Work[Any]]:
        """The Works of the buckets that this step has sent, in their order; empty after ``finish``. From any thread.

        Other awaitables of a ``compress`` function are not among them.
        """
        step = self._step
        return () if step is None else tuple(step.works)

    # -- begin and end ------------------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, Self]:
        return self._begin().__await__()

    async def _begin(self) -> Self:
        if self._step is None and self._error is None:
            await self.rebind(self._comm)
        return self

    async def __aenter__(self) -> Self:
        return await self._begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def rebind(self, comm: Comm, root: SupportsIndex = 0) -> None:
        """Go on with another comm, or after an error. Collective; while no backward runs.

        The models are compared again, and parameters and buffers of rank ``root`` are copied to the others. Every
        gradient is None afterwards, and a step that had begun is forgotten. A new reducer may begin by it, too. After a
        call that was cancelled or has raised on any rank, all ranks call again.

        Args:
            comm: the result of ``shrink`` or ``reconfigure``, for example; on the device of the model.
            root: a rank of ``comm``.

        Raises: as awaiting the reducer.
        """
        self._check_open()
        check_comm(comm)
        if comm.device != self._comm.device:
            raise ValueError(f"comm {comm.name!r} is on {comm.device}, but the model is on {self._comm.device}")
        giver = check_root(comm, root)
        check_unchanged(self._model, self._names, self._parameters)
        with self._lock:
            self._forget_step()
            self._error, self._comm = None, comm
        compress = "a function" if callable(self._compress) else self._compress
        settings = [f"bucket_mb={self._limit / 2**20:.15g}", f"op={self._op}", f"compress={compress}"]
        agreed: Any = await agree(comm, giver, [*settings, *describe_model(self._model)], [self._learned, self._plan])
        learned, plan = agreed
        await self.broadcast_parameters(giver)
        with self._lock:
            self._learned = learned
            self._build(plan or self._divide(()))

    async def broadcast_parameters(self, root: SupportsIndex = 0) -> None:
        """Copy all parameters and buffers of rank ``root`` to the other ranks. Collective; between steps.

        Awaiting the reducer does this for rank 0. Buffers, such as BatchNorm's statistics, are not copied in each step.
        """
        tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        await self._comm.broadcast_state({name: tensor.detach() for name, tensor in tensors.items()}, root)

    def close(self) -> None:
        """Remove the hooks: later gradients stay local. Idempotent; the gradients keep their values."""
        self._closed = True
        self._remove_hooks()
        with self._lock:
            if self._step is not None and not self._step.finishing:
                self._step.give_up()

    # -- a step -------------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in the ``with`` block add to the gradients of this rank alone, and send nothing.

        All backward passes of a step but the last belong into it. Where the last one does, too, ``finish()`` sends
        everything.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    async def finish(self) -> None:
        """Wait until every gradient is combined over all ranks. Collective: once per step, after its last backward.

        Buckets that are not sent yet are sent now, with zeros for parameters without a gradient here. Cancelling is
        safe: the operations go on, and ``finish`` may be called again.

        Raises:
            RuntimeError: there was no backward since the last ``finish``; a backward still runs, or has raised; the
                parameters of the model have changed. Nothing changes then.
            BrokenError: a rank was lost, for example. This and any other error of a step makes every gradient None, and
                later calls raise it again until :meth:`rebind`.
        """
        step = self._begin_finish()
        check_unchanged(self._model, self._names, self._parameters)
        step.finishing = True
        try:
            order = await step.receive()
        except Exception as exc:
            with self._lock:
                if step is self._step:  # and not forgotten by a rebind() meanwhile
                    self._error = exc
                    self._forget_step()
            raise
        finally:
            step.finishing = False
        with self._lock:
            if step is self._step:
                self._end_step(order)

    def _begin_finish(self) -> GradientStep:
        """Send the remaining buckets. Without any wait, so the order of calls on the comm is that of the program."""
        self._check_open()
        with self._lock:
            step, error = self._step, self._error
            if error is not None:
                raise error
            if step is None or not step.began:
                raise RuntimeError("finish() without backward(): no gradient was computed since the last finish()")
            if step.finishing:
                raise RuntimeError("finish() of this GradientReducer waits in another task already")
            if step.running and step.error is None:
                raise RuntimeError(
                    "finish() before the end of backward(): it runs in another thread, or has raised; if it has "
                    "raised on all ranks, all of them call rebind()"
                )
            try:
                if step.error is not None:
                    raise step.error
                step.send_rest()
                if not self._learned and step.order is None:
                    recorded = step.recorded if self._comm.rank == 0 else None
                    step.order = self._comm.broadcast_object(recorded, root=0)
            except Exception as exc:
                self._error = exc
                self._forget_step()
                raise
        return step

    def _arrived(self, number: int) -> None:
        """The gradient of a parameter was computed. On the thread of backward."""
        with self._lock:
            if self._step is not None:
                self._step.arrived(number, sync=self._sync)
            elif self._error is None:  # else finish() raises it
                raise RuntimeError(
                    "the GradientReducer has not begun: `await` it, or use `async with`, before backward"
                )

    def _end_step(self, order: Sequence[int]) -> None:
        if order:
            self._learned = True
            plan = self._divide(order)
            if [set(numbers) for numbers in plan] != [set(numbers) for numbers in self._plan]:
                self._build(plan)
                return
        self._step = self._new_step()

    # -- buckets ------------------------------------------------------------------------------------------------------

    def _divide(self, recorded: Sequence[int]) -> list[list[int]]:
        return plan_buckets(self._layouts, complete_order(recorded, len(self._layouts)), self._limit)

    def _build(self, plan: list[list[int]]) -> None:
        """Put the gradients into the buckets of ``plan``, of new memory, and begin a step."""
        self._plan = plan
        self._buckets = GradientBuckets(self._comm, self._parameters, self._names, self._layouts, plan)
        self._buckets.take_gradients()
        self._step = self._new_step()

    def _new_step(self) -> GradientStep:
        assert self._buckets is not None
        return GradientStep(self._buckets, self._op, self._compress)

    def _forget_step(self) -> None:
        """Let go of gradients and their memory, which operations in flight may still change."""
        if self._step is not None:
            self._step.give_up()
        self._buckets = self._step = None
        for parameter in self._parameters:
            parameter.grad = None

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this GradientReducer was closed")


def _check_without_reducer(parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            if isinstance(hook, ArrivalHook) and hook.reducer() is not None:
                raise ValueError(f"parameter {name!r} of model has another GradientReducer: close() that one first")


def _remove_all(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
