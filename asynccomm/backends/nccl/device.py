"""What the NCCL backend needs of a GPU: streams, events, and whether a stream is being captured.

The protocols are what the backend is written against, so that tests can put a device in its place that is none.
:class:`Cuda` is the real one, and this is the one file that knows ``torch.cuda`` and cuda-python.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor

from asynccomm.backends.nccl.poller import EventPool
from asynccomm.errors import BackendError

#: Held around every group of NCCL calls: NCCL is not safe to call from several threads for one device, not even on
#: different communicators.
ISSUING: Final = threading.RLock()

_FLOAT8: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_streams_lock = threading.Lock()
_streams: dict[tuple[torch.device, bool], list[torch.cuda.Stream]] = {}  # given back, by device and priority

Event = Any  #: a point in a stream; only its device knows what that is


class DeviceStream(Protocol):
    """What runs in order on a device. Everything here only queues; nothing waits on the host."""

    @property
    def handle(self) -> int:
        """For NCCL."""

    def record(self, *, captured: bool = False) -> Event:
        """A point behind all that is queued so far; to be given back by ``Device.release``, unless it is captured."""

    def wait(self, event: Event) -> None:
        """What is queued from now on comes after ``event``."""

    def run(self, step: Callable[[], object]) -> None:
        """Queue what torch operations in ``step`` launch."""


class Device(Protocol):
    """One GPU."""

    def current_stream(self) -> DeviceStream:
        """Where the calling thread queues its work."""

    def new_stream(self, *, high_priority: bool) -> DeviceStream:
        """A stream of our own, which nobody else uses; to be given back by ``end_stream``."""

    def end_stream(self, stream: DeviceStream) -> None:
        """Nothing is in flight on ``stream``, and nobody needs it any more."""

    def wrap(self, stream: Any) -> DeviceStream:
        """A stream of the user's, of torch's kind."""

    def capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured into a graph."""

    def capture_of(self, stream: DeviceStream) -> int:
        """Which capture into a graph ``stream`` is part of, by a number of its own; 0: none."""

    def here(self) -> contextlib.AbstractContextManager[object]:
        """Within, the device is the calling thread's current one."""

    def reduces(self, dtype: torch.dtype) -> bool:
        """Whether kernels that reduce ``dtype`` run here, if the library has them."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies here, and not on the host."""

    def allocating(self, stream: DeviceStream) -> contextlib.AbstractContextManager[object]:
        """Within, torch makes new tensors for use on ``stream``: their memory was last used there."""

    def empty(self, nbytes: int, stream: DeviceStream) -> Tensor:
        """New bytes, for use on ``stream``."""

    def lend(self, tensor: Tensor, stream: DeviceStream) -> None:
        """``tensor``, made for another stream, is used on ``stream`` from now on."""

    def query(self, event: Event) -> bool:
        """Whether ``event`` has passed. Raises: BackendError if the device failed."""

    def enter(self) -> None:
        """Make the calling thread one that may query while another captures a graph."""

    def looking(self) -> contextlib.AbstractContextManager[object]:
        """The same, but only within."""

    def release(self, event: Event) -> None:
        """Nobody needs ``event`` any more."""


@final
class _CudaStream:
    """A ``torch.cuda.Stream``."""

    def __init__(self, device: Cuda, stream: torch.cuda.Stream, *, high_priority: bool = False) -> None:
        self._device = device
        self.stream = stream
        self.high_priority = high_priority
        self.handle: int = stream.cuda_stream

    def record(self, *, captured: bool = False) -> Event:
        event = _new_event() if captured else self._device.events.take()  # a captured one is the graph's for good
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        self.stream.wait_event(event)

    def run(self, step: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            step()


@final
class Cuda:
    """One CUDA device.

    Raises: BackendError without a GPU or cuda-python, naming what is missing.
    """

    def __init__(self, device: torch.device) -> None:
        built = torch.version.cuda
        if built is None or not torch.cuda.is_available():
            why = "this torch is built without CUDA" if built is None else f"torch (CUDA {built}) finds no GPU here"
            raise BackendError(f"backend 'nccl' needs a GPU, but {why}; `asynccomm doctor` says more")
        try:
            self._driver: Any = import_module("cuda.bindings.driver")
        except ImportError as exc:
            major = built.partition(".")[0]
            raise BackendError(f"backend 'nccl' needs the package cuda-python: install asynccomm[cu{major}]") from exc
        # the newer one, where there are two: the other fails for graphs with data on their edges
        name = "cuStreamGetCaptureInfo"
        self._capture_info = getattr(self._driver, f"{name}_v3", None) or getattr(self._driver, name)
        self._device = device
        torch.cuda.init()  # type: ignore[no-untyped-call]
        error, number = self._driver.cuDeviceGet(device.index)
        self._check(error, "find the device")
        error, self._context = self._driver.cuDevicePrimaryCtxRetain(number)  # which is torch's; kept for good
        self._check(error, "make a context")
        self.events: EventPool[torch.cuda.Event] = EventPool(_new_event)

    def current_stream(self) -> DeviceStream:
        return _CudaStream(self, torch.cuda.current_stream(self._device))

    def new_stream(self, *, high_priority: bool) -> DeviceStream:
        # not torch's, which come from a pool of 32 that everybody shares: a transfer must not wait behind a collective
        with _streams_lock:
            free = _streams.setdefault((self._device, high_priority), [])
            if free:
                return _CudaStream(self, free.pop(), high_priority=high_priority)
        with torch.cuda.device(self._device):
            self._bind()
            error, least, greatest = self._driver.cuCtxGetStreamPriorityRange()
            self._check(error, "look up the priorities of streams")
            flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            error, made = self._driver.cuStreamCreateWithPriority(flags, greatest if high_priority else least)
            self._check(error, "make a stream")
        stream = torch.cuda.ExternalStream(int(made), self._device)  # type: ignore[no-untyped-call]
        return _CudaStream(self, stream, high_priority=high_priority)

    def _bind(self) -> None:
        """Give the calling thread the device's context: torch leaves a new thread without where that is device 0."""
        (error,) = self._driver.cuCtxSetCurrent(self._context)
        self._check(error, "use its context")

    def end_stream(self, stream: DeviceStream) -> None:
        # kept and not destroyed: memory that torch has cached for it would outlive it
        assert isinstance(stream, _CudaStream)
        with _streams_lock:
            _streams[self._device, stream.high_priority].append(stream.stream)

    def _check(self, error: Any, what: str) -> None:
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"CUDA could not {what} on {self._device}: {error.name}")

    def wrap(self, stream: Any) -> DeviceStream:
        return _CudaStream(self, stream)

    def capturing(self) -> bool:
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def capture_of(self, stream: DeviceStream) -> int:
        error, status, number, *_ = self._capture_info(stream.handle)
        if error == self._driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
            return 0  # the default stream, which never is, beside another that is
        self._check(error, "look up whether a stream is captured")
        if status == self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            return 0
        if status == self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            return int(number)
        return -1  # one that has failed, and has no number any more

    def here(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self._device)

    def reduces(self, dtype: torch.dtype) -> bool:
        return dtype not in _FLOAT8 or torch.cuda.get_device_capability(self._device) >= (9, 0)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def allocating(self, stream: DeviceStream) -> contextlib.AbstractContextManager[object]:
        assert isinstance(stream, _CudaStream)
        return torch.cuda.stream(stream.stream)

    def empty(self, nbytes: int, stream: DeviceStream) -> Tensor:
        with torch.inference_mode(False), self.allocating(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def lend(self, tensor: Tensor, stream: DeviceStream) -> None:
        assert isinstance(stream, _CudaStream)
        tensor.record_stream(stream.stream)

    def query(self, event: Event) -> bool:
        # by cuda-python, which lets the GIL go; torch's own query keeps it while it waits for the driver's lock
        (status,) = self._driver.cuEventQuery(event.cuda_event)
        if status == self._driver.CUresult.CUDA_SUCCESS:
            return True
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        raise BackendError(f"CUDA failed on {self._device}: {status.name}")

    def enter(self) -> None:
        torch.cuda.set_device(self._device)
        self._bind()
        self._exchange(self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        before = self._exchange(self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            yield
        finally:
            self._exchange(before)

    def _exchange(self, mode: Any) -> Any:
        """Say which captures the calling thread may spoil; returns what it might before."""
        # by the driver: the runtime's call may make a context where none is wanted
        error, before = self._driver.cuThreadExchangeStreamCaptureMode(mode)
        self._check(error, "change the capture mode of a thread")
        return before

    def release(self, event: Event) -> None:
        self.events.give(event)


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
