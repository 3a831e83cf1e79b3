"""Awaiting the Works of torch, whichever backend they are of, without blocking the event loop.

There are three ways to learn that a Work is done, and the first that it offers is taken:

- A TorchWork stands for Works of ours, which call back.
- Most Works have a future, which calls back on a thread of their backend. On a GPU it is complete as soon as the
  operation is in its stream; a thread then waits for that.
- Some have none: all sends and receives of gloo, and its reduce_scatter_tensor. These are done when somebody waits for
  them and not before, so a thread does: one for each, as two that wait for one receive would wait for two messages.
  It is a daemon, as nothing can end such a wait but the other rank.

All who await one Work share what was found out about it. Nothing waits for a Work as long as nobody awaits it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, Final, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch import distributed as dist

from asynccomm.core.handles import Handle
from asynccomm.interop.loop_thread import on_a_thread
from asynccomm.interop.torch_work import TorchWork

MOST_AWAITS: Final = 64  # of finished Works in a row, before one lets the loop turn

_sharing = threading.Lock()
_shared: WeakValueDictionary[int, _Awaited] = WeakValueDictionary()  # by the id of a Work, which they keep alive


@final
class _Streak(threading.local):
    """How many finished Works this thread's loop has awaited in a row. It must not go on like that for ever."""

    awaits = 0


_streak = _Streak()


@final
class WrappedWork(Handle):
    """One Work of torch, or several; ``await`` it for the output tensors; from :func:`asynccomm.wrap`.

    Any number of tasks may await it, on any loops, any number of times. Cancelling an await is safe and leaves the
    operation running. The tensors come in one list, whatever lists torch has them in. It is empty for Works that do not
    say what their outputs are: gloo's sends, receives, and reduce_scatter_tensor.

    Do not call ``wait`` of such a Work while it is awaited: one message would be waited for twice.
    """

    _instead = "await it here, and send its output there"
    __slots__ = ("_parts",)

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._parts = [_awaited(work) for work in works]

    def done(self) -> bool:
        """Whether awaiting would not suspend. Sends and receives of gloo are not done before they are awaited."""
        return all(part.look() for part in self._parts)

    def __await__(self) -> Generator[Any, None, list[Tensor]]:
        outputs = []
        for part in self._parts:
            outputs += yield from part.outcome()
        return outputs


def _awaited(work: dist.Work) -> _Awaited:
    with _sharing:
        found = _shared.get(id(work))
        if found is None:
            found = _shared[id(work)] = _Awaited(work)
        return found


@final
class _Awaited:
    """What is known of one Work, and who waits for it."""

    def __init__(self, work: dist.Work) -> None:
        self._work: Any = work
        self._future = None if isinstance(work, TorchWork) else _future_of(work)
        self._gpus = [torch.device("cuda", torch.cuda.current_device())] if _uses_gpus() else []
        self._lock = threading.Lock()
        self._started = False
        self._done = False
        self._outputs: list[Tensor] = []
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def look(self) -> bool:
        """Whether it is done."""
        if self._done:
            return True
        if isinstance(self._work, TorchWork):
            self._take_ours(self._work)
        elif self._future is not None:
            if self._future.done():
                self._take_future(wait=False)
        elif not self._started and self._work.is_completed():
            self._settle([], _failure(self._work))
        return self._done

    def outcome(self) -> Generator[Any, None, list[Tensor]]:
        """Suspend until it is done; its outputs."""
        if self.look():
            _streak.awaits = (_streak.awaits + 1) % MOST_AWAITS
            if _streak.awaits == 0:
                yield
        else:
            _streak.awaits = 0
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            with self._lock:
                if self._done:
                    waiter.set_result(None)
                else:
                    self._waiters.append(waiter)
            self._start()
            try:
                yield from waiter
            finally:
                with self._lock:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)
        if self._error is not None:
            # as it was when the Work failed: each raise would otherwise grow it for all who await
            raise self._error.with_traceback(self._traceback)
        return list(self._outputs)

    def _start(self) -> None:
        """Have somebody tell, once."""
        with self._lock:
            if self._started:
                return
            self._started = True
        if isinstance(self._work, TorchWork):
            work = self._work
            # a listener must be quick; what is to be put together may not be
            listener = self.look if work.finish is None else (lambda: on_a_thread(self.look))
            for part in work.parts:
                part.listen(listener)
        elif self._future is not None:
            self._future.add_done_callback(lambda _: self._take_future(wait=True))
        else:
            self._wait_on_a_thread([], self._gpus)

    def _take_ours(self, work: TorchWork) -> None:
        try:
            if not work.is_completed():
                return
            for part in work.parts:
                part.result()
        except Exception as exc:
            self._settle([], exc)
        else:
            self._settle(work.tensors())

    def _take_future(self, *, wait: bool) -> None:
        """The future is done: take what it has; if it is for the GPU, then only if that is done, or else ``wait``."""
        assert self._future is not None
        try:
            outputs = _flat(self._future.value())
        except Exception as exc:
            self._settle([], exc)
            return
        gpus = {tensor.device for tensor in outputs if tensor.is_cuda}
        if not gpus:
            self._settle(outputs)
        elif self._work.is_completed():
            self._settle(outputs, _failure(self._work))
        elif wait:
            self._wait_on_a_thread(outputs, sorted(gpus, key=str))

    def _wait_on_a_thread(self, outputs: list[Tensor], gpus: Sequence[torch.device]) -> None:
        threading.Thread(target=self._wait, args=(outputs, gpus), name="asynccomm wait", daemon=True).start()

    def _wait(self, outputs: list[Tensor], gpus: Sequence[torch.device]) -> None:
        """Block until the host may read."""
        try:
            with contextlib.ExitStack() as streams:
                for gpu in gpus:  # of its own, so as not to wait for what the program has in its streams
                    streams.enter_context(torch.cuda.stream(torch.cuda.Stream(gpu)))  # type: ignore[no-untyped-call]
                self._work.wait()
                for gpu in gpus:
                    torch.cuda.current_stream(gpu).synchronize()
            error = _failure(self._work) if gpus else None
        except Exception as exc:
            error = exc
        self._settle(outputs, error)

    def _settle(self, outputs: list[Tensor], error: BaseException | None = None) -> None:
        """From any thread; the first to say so decides."""
        with self._lock:
            if self._done:
                return
            self._error = error
            if error is None:
                self._outputs = outputs
            else:
                self._traceback = error.__traceback__
            self._done = True
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody left to tell
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _future_of(work: Any) -> torch._C.Future[Any] | None:
    try:
        future = work.get_future()
    except (RuntimeError, NotImplementedError):
        return None
    return future if isinstance(future, torch._C.Future) else None  # not torch.futures.Future, if it is of C++


def _failure(work: Any) -> BaseException | None:
    """The error of a Work that is done and has not been heard of otherwise. torch calls these methods deprecated."""
    try:
        if work.is_success():
            return None
        error = work.exception()
    except (AttributeError, RuntimeError, TypeError):  # torch 2.11 cannot say which one
        error = None
    return error if isinstance(error, BaseException) else RuntimeError(f"{work!r} has failed")


def _uses_gpus() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _flat(item)]
    return []


def _renew_lock() -> None:
    global _sharing
    _sharing = threading.Lock()  # a thread that is not in the child may have held the old one


os.register_at_fork(after_in_child=_renew_lock)
