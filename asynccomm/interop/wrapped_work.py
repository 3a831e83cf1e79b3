"""Awaiting the Works of any torch backend without blocking the event loop.

There are three ways to detect that a Work is done; the first available one is used:

- A TorchWork stands for our Works, which run callbacks.
- Most Works have a future, which runs callbacks on a thread of the backend. On a GPU the future completes as soon as
  the operation is in its stream; a thread then waits for the stream.
- Some Works have no future: all sends and receives of gloo, and its reduce_scatter_tensor. These complete only in
  ``wait``, so a thread calls it: one thread for each Work, as two waits for one receive would wait for two messages.
  The thread is a daemon, as only the other rank can end such a wait.

All tasks that await one Work share its outcome. No thread waits for a Work before a task awaits it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import traceback
from collections.abc import Generator, Sequence
from typing import Any, final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch import distributed as dist

from asynccomm.blocking.loop_thread import on_a_thread
from asynccomm.core import outcome
from asynccomm.core.handles import Handle
from asynccomm.core.outcome import Outcome, wake
from asynccomm.core.state import Streak
from asynccomm.interop.torch_work import TorchWork

_sharing = threading.Lock()
_shared: WeakValueDictionary[int, _Awaited] = WeakValueDictionary()  # by id of the Work; the value holds the Work
_waited: WeakKeyDictionary[dist.Work, _Awaited] = WeakKeyDictionary()  # a second ``wait`` would wait for a message more


@final
class _PerThread(threading.local):
    def __init__(self) -> None:
        self.streak = Streak()


_this_thread = _PerThread()


@final
class WrappedWork(Handle):
    """One or several Works of torch, returned by :func:`asynccomm.wrap`; ``await`` it for the output tensors.

    Any number of tasks may await a WrappedWork, on any loops, any number of times. Cancelling an await is safe and
    leaves the operation running. The tensors are in one flat list. The list is empty for Works that do not give their
    outputs: gloo's sends, receives, and reduce_scatter_tensor.

    Do not call ``wait`` of a gloo Work without outputs while a task awaits it: two waits would wait for two messages.
    """

    _instead = "await it here, and send its output there"
    __slots__ = ("_parts",)

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._parts = [_awaited(work) for work in works]

    def done(self) -> bool:
        """Whether ``await`` would not suspend. Sends and receives of gloo are done only after an await."""
        return all(part.look() for part in self._parts)

    def __await__(self) -> Generator[Any, None, list[Tensor]]:
        outputs = []
        for part in self._parts:
            outputs += yield from part.outcome()
        return outputs


def _awaited(work: dist.Work) -> _Awaited:
    with _sharing:
        found = _waited.get(work) or _shared.get(id(work))
        if found is None:
            found = _shared[id(work)] = _Awaited(work)
        return found


@final
class _Awaited(Outcome):
    """Outcome of one Work: its tensors. The tasks that await it may be on several loops."""

    def __init__(self, work: dist.Work) -> None:
        self._value: list[Tensor] = []
        self._error, self._traceback, self._done = None, None, False
        self._waiters = []
        self._work: Any = work
        self._future = None if isinstance(work, TorchWork) else _future_of(work)
        self._gpus = [torch.device("cuda", torch.cuda.current_device())] if _uses_gpus() else []
        self._started = False

    def look(self) -> bool:
        """Poll the Work; return whether it is done."""
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
        """Suspend until the Work is done, and return its outputs."""
        if self.look():
            if _this_thread.streak.should_yield():
                yield
        else:
            _this_thread.streak.reset_streak()
            self._start()
            yield from self._suspend(asyncio.get_running_loop())
        return list(self._result())

    def _start(self) -> None:
        """Arrange for a callback or a thread to report the outcome, once. Raises: ClosedError in a forked child."""
        if isinstance(self._work, TorchWork):
            for part in self._work.parts:
                part.check_process()
        with outcome.deciding:
            if self._started:
                return
            self._started = True
        if isinstance(self._work, TorchWork):
            work = self._work
            # a listener must be quick, but finish may be slow
            listener = self.look if work.finish is None else (lambda: on_a_thread(self.look))
            for part in work.parts:
                part.listen(listener)
        elif self._future is not None:
            self._future.add_done_callback(lambda _: self._take_future(wait=True))
        else:
            self._wait_on_a_thread([], self._gpus)

    def _take_ours(self, work: TorchWork) -> None:
        if work.is_completed():
            self._settle(work.tensors(), work.exception())

    def _take_future(self, *, wait: bool) -> None:
        """Settle from the completed future. For GPU tensors the Work must be done; else a thread waits, if ``wait``."""
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
        """Block until the host may read the outputs."""
        try:
            with contextlib.ExitStack() as streams:
                for gpu in gpus:  # a new stream, so as not to wait for the program's streams
                    streams.enter_context(torch.cuda.stream(torch.cuda.Stream(gpu)))  # type: ignore[no-untyped-call]
                self._work.wait()
                for gpu in gpus:
                    torch.cuda.current_stream(gpu).synchronize()
            error = _failure(self._work) if gpus else None
        except Exception as exc:
            traceback.clear_frames(exc.__traceback__)  # their locals would keep the Work alive
            error = exc
        with _sharing:
            if self._future is None:
                _shared.pop(id(self._work), None)
                _waited[self._work], self._work = self, None  # the dictionary must not keep its key alive
        self._settle(outputs, error)

    def _settle(self, outputs: list[Tensor], error: BaseException | None = None) -> None:
        """Store the outcome, and wake the waiters. From any thread; only the first call counts."""
        with outcome.deciding:
            if self._done:
                return
            self._error = error
            if error is None:
                self._value = outputs
            else:
                self._traceback = error.__traceback__
            self._done = True
        waiters, self._waiters = self._waiters, []
        for waiter in tuple(waiters):  # a copy, as a cancelled task may remove its own
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks are gone
                waiter.get_loop().call_soon_threadsafe(wake, waiter)


def _future_of(work: Any) -> torch._C.Future[Any] | None:
    try:
        future = work.get_future()
    except (RuntimeError, NotImplementedError):
        return None
    return future if isinstance(future, torch._C.Future) else None  # a C++ future is no torch.futures.Future


def _failure(work: Any) -> BaseException | None:
    """The error of a completed Work that was not raised elsewhere. In torch these methods are deprecated."""
    try:
        if work.is_success():
            return None
        error = work.exception()
    except (AttributeError, RuntimeError, TypeError):  # torch 2.11 does not give the error
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
    _sharing = threading.Lock()  # a thread of the parent may have held the old lock


os.register_at_fork(after_in_child=_renew_lock)
