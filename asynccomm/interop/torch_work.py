"""Adapter from our Works to torch's Work.

A TorchWork stands for one or several Works, and is done when all its Works are. Programs need not wait for a TorchWork.

A separate thread completes the TorchWork's future, through a callback that raises if a Work failed. Only so does
torch's C++ get the error: it never calls ``wait`` for the gradients of a DistributedDataParallel, and reads the value
of the future as the result. On a GPU the future completes when the operation is in its stream, and waiting for the
future makes the current stream wait. As in all backends on the CPU, calls made in a future's callback have no defined
order relative to calls of other threads: hooks of DistributedDataParallel with calls in callbacks (PowerSGD's)
therefore need all gradients in one bucket.

torch's C++ may keep a Work after its Python object was collected: ``wait`` then never returns, and the future has no
value. So this module holds the last ``KEPT`` collected Python objects, with their tensors if these are small. The Works
that torch keeps in this way have small tensors (the counts of active ranks in DistributedDataParallel.join).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, final

import torch
from torch import Tensor
from torch import distributed as dist

from asynccomm.blocking.loop_thread import detached, on_a_thread
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError
from asynccomm.interop.torch_version import uncompiled

KEPT: Final = 1024  # number of Works with Python objects that are held
SMALL: Final = 4096  # limit on bytes of tensors held with a Work

_making = threading.RLock()
_kept: deque[TorchWork] = deque(maxlen=KEPT)


@final
@uncompiled
class TorchWork(dist.Work):
    """torch's Work for one call.

    Args:
        parts: our Works of the call.
        result: the future's value: torch's list of output tensors, or list of lists.
        finish: function that assembles the result; called once, after all parts and before the TorchWork is done. The
            attribute is None from then on.
    """

    def __init__(
        self, parts: Sequence[Work[Any]], result: list[Any], finish: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self.parts: Sequence[Work[Any]] = parts
        self._result = result
        self.finish = finish
        self._failure: Exception | None = None  # of ``finish``
        self._future: torch.futures.Future[Any] | None = None
        if finish is not None:  # so finish also runs if no thread waits
            for part in parts:
                part.listen(lambda: on_a_thread(self.is_completed) if _done(parts) else None)

    @classmethod
    def joined(cls, works: Sequence[TorchWork]) -> TorchWork:
        """One TorchWork that is done when all ``works`` are."""
        parts = [part for work in works for part in work.parts]
        result = [tensor for work in works for tensor in work.tensors()]
        assembled = [work for work in works if work.finish is not None or work._failure is not None]

        def finish() -> None:
            for work in assembled:  # all of them, also after one that fails
                work._put_together()
            for work in assembled:
                work.wait()

        return cls(parts, result, finish if assembled else None)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait: on a GPU in the current stream, else by blocking the thread, also one with a running loop."""
        if timeout is not None and timeout <= timedelta(0):
            timeout = None  # in torch, no timeout
        if asyncio._get_running_loop() is None:
            self._wait(timeout)
        else:
            with detached():
                self._wait(timeout)
        return True

    def _wait(self, timeout: timedelta | None) -> None:
        if timeout is None:
            for part in self.parts:
                part.wait()
        else:
            end = time.monotonic() + timeout.total_seconds()
            for part in self.parts:
                try:
                    part.wait(max(0.0, end - time.monotonic()))
                except TimeoutError as exc:
                    if isinstance(exc, AsyncCommError):
                        raise
                    raise RuntimeError(f"Timed out: {exc}") from None  # the error that programs expect of torch
        self._put_together()
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # the traceback has frames with this Work, and would grow

    def _put_together(self) -> None:
        if self.finish is None:
            return
        with _making:
            if self.finish is not None:
                try:
                    self.finish()
                except Exception as exc:
                    self._failure = exc.with_traceback(None)
                self.finish = None  # only now, as other threads take this for the end

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    # -- state --------------------------------------------------------------------------------------------------------

    def is_completed(self) -> bool:
        if not _done(self.parts):
            return False
        if self.finish is not None and self.exception() is None:
            self._put_together()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error, if a part has failed, or the end of the call; else None."""
        for part in self.parts:
            if part.done() and (error := part.exception()) is not None:
                return error
        return self._failure

    def result(self) -> list[Tensor]:
        """Wait, and return the output tensors in one list."""
        self.wait()
        return self.tensors()

    def tensors(self) -> list[Tensor]:
        """The output tensors in one list, without waiting."""
        return [tensor for item in self._result for tensor in ([item] if isinstance(item, Tensor) else item)]

    def source_rank(self) -> int:
        """The sender's rank, of a completed receive from any rank."""
        source = self.parts[0].source
        if source is None:
            raise RuntimeError("only a receive that is done has a source")
        return source

    def _source_rank(self) -> int:
        return self.source_rank()

    def _get_duration(self) -> float:
        """Duration in milliseconds."""
        return 1000 * max([part.duration or 0.0 for part in self.parts], default=0.0)

    def _get_sequence_number(self) -> int:
        return max(0, self.parts[0].seq) if self.parts else 0

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=min([part.timeout for part in self.parts], default=0.0))

    # -- futures ------------------------------------------------------------------------------------------------------

    def get_future(self) -> torch.futures.Future[Any]:
        with _making:
            if self._future is None:
                self._future = self._made()
            return self._future

    def _made(self) -> torch.futures.Future[Any]:
        devices = sorted({part.device for part in self.tensors() if part.is_cuda}, key=str)
        gate: torch.futures.Future[Any] = torch.futures.Future(devices=devices or None)  # type: ignore[arg-type]
        future = gate.then(self._outcome)
        opened = threading.Lock()

        def look(here: bool = False) -> None:
            if all(_ready(part) for part in self.parts) and opened.acquire(blocking=False):
                if here:
                    gate.set_result(None)
                else:
                    on_a_thread(lambda: gate.set_result(None))

        look(here=True)  # on this thread, as the future has no callbacks yet
        if not opened.locked():
            for part in self.parts:
                part._send()  # a scope may hold it back
                part.listen(look)
                if part.order is not None:
                    part.order.listen(look)
        return future

    def _outcome(self, _: torch.futures.Future[Any]) -> list[Any]:
        self.wait()
        return self._result

    def __del__(self) -> None:
        if getattr(self, "_result", None) is None:
            return
        self._future = None
        if sum([tensor.untyped_storage().nbytes() for tensor in self.tensors() if not tensor.is_sparse]) > SMALL:
            self._result = []
        _kept.append(self)
        for part in self.parts:
            part.listen(self._shed)

    def _shed(self) -> None:
        """Release completed parts, and so their tensors; failed parts hold none and stay, for their errors."""
        if self.finish is None and _done(parts := self.parts):
            self.parts = [part for part in parts if part.exception() is not None]


def _done(parts: Sequence[Work[Any]]) -> bool:
    return all(part.done() for part in parts)


def _ready(part: Work[Any]) -> bool:
    """Whether a wait would not block the thread."""
    return part.done() or (part.order is not None and part.order.issued)
