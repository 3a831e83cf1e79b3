"""The stream and the communicator of a window."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, final

from asynccomm.backends.nccl.api import Config, NcclWindowHandle, dotted
from asynccomm.backends.nccl.communicator import Communicator, end_all
from asynccomm.backends.nccl.device import Event
from asynccomm.backends.nccl.shared import DeviceRuntime
from asynccomm.backends.nccl.stream_order import StreamPosition
from asynccomm.backends.nccl.window_memory import WindowMemory
from asynccomm.errors import AsyncCommError, BackendError, BrokenError

LOOK_SECONDS: Final = 0.1  # between two looks whether the window has ended


@final
class WindowStream:
    """The one-sided calls of one rank, and a stream that runs them in order.

    ``put``, ``wait`` and ``when_passed`` are called with ``lock`` held, as are the copies that belong to a put.

    Args:
        on_error: called with errors of events.
    """

    def __init__(
        self, runtime: DeviceRuntime, *, high_priority: bool, on_error: Callable[[BrokenError], object]
    ) -> None:
        self._nccl, self._device, self._poller = runtime.nccl, runtime.device, runtime.poller
        self._on_error = on_error
        self.communicator: Communicator = Communicator(
            runtime.nccl, runtime.device, runtime.device.new_stream(high_priority=high_priority)
        )
        self.lock: threading.Lock = threading.Lock()
        self._handle: NcclWindowHandle | None = None
        self._last: StreamPosition | None = None
        self._over = False

    def open(self, size: int, rank: int, unique_id: bytes, config: Config, memory: WindowMemory) -> None:
        """Connect the communicator and register ``memory``, which is zero then. Blocks until all ranks have."""
        nccl, communicator = self._nccl, self.communicator
        # not blocking: an abort must be able to end it while it waits for a rank that is lost
        communicator.open(size, rank, unique_id, replace(config, blocking=False))
        communicator.stream.run(memory.tensors(self._device)[0].zero_)
        self._handle = communicator.run(lambda comm, _: nccl.window_register(comm, memory.address, memory.nbytes))
        if not self._handle:
            raise BackendError(f"NCCL {dotted(nccl.version)} has no windows between these GPUs")
        if size > 1:  # the first one-sided calls wait for all ranks
            right, left = (rank + 1) % size, (rank - 1) % size
            communicator.run(lambda comm, stream: nccl.signal(right, comm, stream))
            communicator.run(lambda comm, stream: nccl.wait_signal({left: 1}, comm, stream))
        self.passed(communicator.stream.record())

    def put(self, address: int, nbytes: int, peer: int, offset: int) -> None:
        """Copy bytes of the window to byte ``offset`` of the window of ``peer``, and signal that."""
        nccl, handle = self._nccl, self._handle
        assert handle is not None
        self.communicator.run(lambda comm, stream: nccl.put_signal(address, nbytes, peer, handle, offset, comm, stream))

    def wait(self, counts: Mapping[int, int]) -> None:
        """Wait for so many puts of each peer."""
        nccl = self._nccl
        self.communicator.run(lambda comm, stream: nccl.wait_signal(counts, comm, stream))

    def when_passed(self, position: StreamPosition, act: Callable[[], object], *kept: object) -> None:
        """Call ``act`` when the work in the stream has passed; ``kept`` is kept until then."""
        stream = self.communicator.stream
        event = stream.record()
        position.issue(event)
        self._last = position

        def passed(error: BrokenError | None, kept: object = kept) -> None:
            if error is not None:
                self._on_error(error)
            else:
                act()
            position.pass_()

        self._poller.watch(stream.handle, event, passed)

    def passed(self, ready: Event) -> bool:
        """Block until an event of any stream has passed, and release it; False if the window has ended before."""
        errors: list[BrokenError] = []
        if not self._device.query(ready):
            passed = threading.Event()

            def over(error: BrokenError | None) -> None:
                if error is not None:
                    errors.append(error)
                passed.set()

            self._poller.watch(passed, ready, over)  # a line of its own: the events of several threads have no order
            while not passed.wait(LOOK_SECONDS):
                if self._over:
                    return False
        self._device.release(ready)
        if errors:
            raise errors[0]
        return not self._over

    def end(self) -> None:
        """End the communicator without the other ranks. Blocks, as NCCL may."""
        self._over = True
        nccl, handle = self._nccl, self._handle
        if handle:
            with contextlib.suppress(AsyncCommError):  # the communicator has failed, or was ended by the backend
                self.communicator.run(lambda comm, _: nccl.window_deregister(comm, handle))
        end_all(nccl, self._device, [self.communicator], abort=True)

    def give_back(self) -> None:
        """Give the stream back, if it has no work in flight."""
        if self._last is None or self._last.over:
            self._device.end_stream(self.communicator.stream)
