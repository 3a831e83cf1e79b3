"""Our Works, as torch's.

A TorchWork stands for one or several Works, and is done when all of them are. It need not be waited for.

Its future is completed on a thread of its own, by a callback that raises if the Work failed: this is the only way for
an error to be one for torch's C++, too, which never calls ``wait`` on the gradients of a DistributedDataParallel and
reads the value of the future as the result. On a GPU the future is complete when the operation is in its stream, and
whoever waits for it has their stream wait. What a callback of a future calls comes in no order with what other threads
call meanwhile, as with every backend that works on the CPU: hooks of DistributedDataParallel that make calls in
callbacks (PowerSGD's) need all gradients in one bucket there.

torch's C++ may keep a Work whose Python half is gone: its ``wait`` then never returns, and its future has no value. So
the Python half of each is kept until many others have come after it; with its tensors if these are small, as are those
that torch so treats (the counts of ranks that still train, in DistributedDataParallel.join).
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

from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError
from asynccomm.interop.loop_thread import detached, on_a_thread
from asynccomm.interop.torch_version import uncompiled

KEPT: Final = 1024  # Works whose Python halves are kept
SMALL: Final = 4096  # bytes of tensors that are kept with one

_making = threading.RLock()
_kept: deque[TorchWork] = deque(maxlen=KEPT)


@final
@uncompiled
class TorchWork(dist.Work):
    """What torch gets for a call.

    Args:
        parts: what it stands for.
        result: what the future gives: the output tensors as torch has them in a list, or in a list of lists.
        finish: run once, when all parts are done and before anybody sees that; for what is put together from them.
    """

    def __init__(
        self, parts: Sequence[Work[Any]], result: list[Any], finish: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self.parts = parts
        self._result = result
        self.finish = finish
        self._future: torch.futures.Future[Any] | None = None
        if finish is not None:  # nobody need ask for it
            for part in parts:
                part.listen(lambda: on_a_thread(self.is_completed) if _done(parts) else None)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As ``Work.wait``: on the CPU block this thread, also if it runs a loop; on a GPU have the stream wait."""
        if timeout is not None and timeout <= timedelta(0):
            timeout = None  # torch's way to say so
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
                    raise RuntimeError(f"Timed out: {exc}") from None  # torch's users expect no other
        if self.finish is not None:
            self._put_together()

    def _put_together(self) -> None:
        with _making:
            if self.finish is not None:
                self.finish()
                self.finish = None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    # -- looking ------------------------------------------------------------------------------------------------------

    def is_completed(self) -> bool:
        if not _done(self.parts):
            return False
        if self.finish is not None and self.exception() is None:
            self._put_together()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error, if it has failed; None also as long as it is not done."""
        for part in self.parts:
            if part.done() and (error := part.exception()) is not None:
                return error
        return None

    def result(self) -> list[Tensor]:
        """The output tensors in one list, once it is done."""
        self.wait()
        return self.tensors()

    def tensors(self) -> list[Tensor]:
        """The same, done or not."""
        return [tensor for item in self._result for tensor in ([item] if isinstance(item, Tensor) else item)]

    def source_rank(self) -> int:
        """Of a receive from any rank: whose message came."""
        source = self.parts[0].source
        if source is None:
            raise RuntimeError("only a receive that is done has a source")
        return source

    def _source_rank(self) -> int:
        return self.source_rank()

    def _get_duration(self) -> float:
        """Milliseconds."""
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

        look(here=True)  # nobody has hung anything on it yet
        if not opened.locked():
            for part in self.parts:
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
        """Let go of what is done, and so of tensors; errors have none."""
        if self.finish is None and _done(parts := self.parts):
            self.parts = [part for part in parts if part.exception() is not None]


def _done(parts: Sequence[Work[Any]]) -> bool:
    return all(part.done() for part in parts)


def _ready(part: Work[Any]) -> bool:
    """Whether waiting for it blocks no thread."""
    return part.done() or (part.order is not None and part.order.issued)
