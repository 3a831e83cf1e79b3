"""The GPU as the NCCL backend uses it: streams, events, and the state of stream captures.

The backend depends on the protocols only, so that tests can substitute a simulated device. :class:`Cuda` is the real
implementation; no other module uses ``torch.cuda`` or cuda-python.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor

from asynccomm.backends.nccl.api import FLOAT8
from asynccomm.backends.nccl.event_pool import EventPool
from asynccomm.errors import BackendError

#: Held around groups of NCCL calls, see ``Communicator.issue``: NCCL allows no concurrent calls for one device from
#: several threads, even on different communicators.
ISSUING: Final = threading.RLock()

_NOTHING: Final = contextlib.nullcontext()
STREAMS_KEPT: Final = 64  # torch's own pools have 32 streams each
_streams_lock = threading.Lock()
_streams: dict[tuple[torch.device, bool], list[torch.cuda.Stream]] = {}  # returned streams, by device and priority

Event = Any  #: a point in a stream, of a type that only the device knows


class DeviceStream(Protocol):
    """A stream of a device. All methods only queue work; none waits on the host."""

    @property
    def handle(self) -> int:
        """The handle that NCCL takes."""

    def record(self, *, captured: bool = False) -> Event:
        """An event behind all work queued so far, for ``Device.release`` to take back unless it is captured."""

    def wait(self, event: Event) -> None:
        """Make all work that is queued from now on follow ``event``."""

    def run(self, step: Callable[[], object]) -> None:
        """Queue the kernels and copies that the torch operations in ``step`` launch."""


class Device(Protocol):
    """One GPU."""

    def current_stream(self) -> DeviceStream:
        """The stream that the calling thread queues its work on."""

    def new_stream(self, *, high_priority: bool) -> DeviceStream:
        """A stream for the backend's exclusive use, for ``end_stream`` to take back."""

    def end_stream(self, stream: DeviceStream) -> None:
        """Take back ``stream``, which has no work in flight and no users."""

    def wrap(self, stream: Any) -> DeviceStream:
        """``stream``, a torch stream of the user's, as a :class:`DeviceStream`."""

    def capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured into a graph."""

    def capture_of(self, stream: DeviceStream) -> int:
        """The unique id of the graph capture that ``stream`` is part of; 0: none."""

    def here(self) -> contextlib.AbstractContextManager[object]:
        """A context that makes the device the calling thread's current one."""

    def reduces(self, dtype: torch.dtype) -> bool:
        """Whether the device can run reductions of ``dtype``, if the library has them."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is in this device's memory."""

    def allocating(self, stream: DeviceStream) -> contextlib.AbstractContextManager[object]:
        """A context in which torch allocates for use on ``stream``: it reuses only memory that was last used there."""

    def empty(self, nbytes: int, stream: DeviceStream) -> Tensor:
        """New bytes, for use on ``stream``."""

    def bytes_at(self, address: int, nbytes: int, owner: object) -> Tensor:
        """Memory of the device that ``owner`` frees, as bytes; their tensor, and its views, keep ``owner``."""

    def synchronize(self) -> None:
        """Block until all work on the device is done."""

    def lend(self, tensor: Tensor, stream: DeviceStream) -> None:
        """Declare that ``tensor``, made for another stream, is also used on ``stream`` from now on."""

    def query(self, event: Event) -> bool:
        """Whether ``event`` has passed. Raises: BackendError if the device failed."""

    def enter(self) -> None:
        """Allow the calling thread to query events while another thread captures a graph."""

    def looking(self) -> contextlib.AbstractContextManager[object]:
        """A context that allows the same as ``enter``, for its own duration."""

    def release(self, event: Event) -> None:
        """Take back ``event``, which has no users."""


@final
class _CudaStream:
    """A ``torch.cuda.Stream``."""

    def __init__(self, device: Cuda, stream: torch.cuda.Stream, *, high_priority: bool = False) -> None:
        self._device = device
        self.stream = stream
        self.high_priority = high_priority
        self.handle: int = stream.cuda_stream

    def record(self, *, captured: bool = False) -> Event:
        event = _new_event() if captured else self._device.events.take()  # the graph keeps a captured event for ever
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        self.stream.wait_event(event)

    def run(self, step: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            step()


@final
class _Owned:
    """Memory as torch takes it from other libraries: the tensor keeps this object."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 2,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }
        self.owner = owner


@final
class Cuda:
    """One CUDA device.

    Raises: BackendError without a GPU or cuda-python, naming the missing part.
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
        # prefer the newer function: the older fails for graphs with data on their edges
        name = "cuStreamGetCaptureInfo"
        self._capture_info = getattr(self._driver, f"{name}_v3", None) or getattr(self._driver, name)
        self._device = device
        torch.cuda.init()  # type: ignore[no-untyped-call]
        error, number = self._driver.cuDeviceGet(device.index)
        self._check(error, "find the device")
        error, self._context = self._driver.cuDevicePrimaryCtxRetain(number)  # torch's context; never released
        self._check(error, "make a context")
        self._current: dict[int, _CudaStream] = {}  # streams that were current, by handle
        self.events: EventPool[torch.cuda.Event] = EventPool(_new_event)

    def current_stream(self) -> DeviceStream:
        # looked up by its handle: torch takes 3 us to make a stream's object, and 0.1 us to give the handle
        stream = self._current.get(torch._C._cuda_getCurrentRawStream(self._device.index))
        if stream is None:
            stream = _CudaStream(self, torch.cuda.current_stream(self._device))
            if len(self._current) >= STREAMS_KEPT:
                self._current.clear()
            self._current[stream.handle] = stream
        return stream

    def new_stream(self, *, high_priority: bool) -> DeviceStream:
        # not torch's streams: its shared pool has only 32, and a transfer must not wait behind a collective
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
        """Make the device's context current in the calling thread: torch sets none for device 0 in a new thread."""
        (error,) = self._driver.cuCtxSetCurrent(self._context)
        self._check(error, "use its context")

    def end_stream(self, stream: DeviceStream) -> None:
        # kept for reuse, not destroyed: torch's memory cache for the stream would outlive it
        assert isinstance(stream, _CudaStream)
        with _streams_lock:
            _streams[self._device, stream.high_priority].append(stream.stream)

    def _check(self, error: Any, what: str) -> None:
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"CUDA could not {what} on {self._device}: {error.name}")

    def wrap(self, stream: Any) -> DeviceStream:
        return _CudaStream(self, stream)

    def capturing(self) -> bool:
        with self.here():
            return torch.cuda.is_current_stream_capturing()

    def capture_of(self, stream: DeviceStream) -> int:
        error, status, number, *_ = self._capture_info(stream.handle)
        if error == self._driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
            return 0  # the default stream, which is never captured, during another stream's capture
        self._check(error, "look up whether a stream is captured")
        if status == self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            return 0
        if status == self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            return int(number)
        return -1  # a failed capture, which has no id any more

    def here(self) -> contextlib.AbstractContextManager[object]:
        # a change of the device takes 3 us, a look 0.3 us
        return _NOTHING if torch.cuda.current_device() == self._device.index else torch.cuda.device(self._device)

    def reduces(self, dtype: torch.dtype) -> bool:
        return dtype not in FLOAT8 or torch.cuda.get_device_capability(self._device) >= (9, 0)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def allocating(self, stream: DeviceStream) -> contextlib.AbstractContextManager[object]:
        assert isinstance(stream, _CudaStream)
        return torch.cuda.stream(stream.stream)

    def empty(self, nbytes: int, stream: DeviceStream) -> Tensor:
        with torch.inference_mode(False), self.allocating(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def bytes_at(self, address: int, nbytes: int, owner: object) -> Tensor:
        with torch.inference_mode(False):
            return torch.as_tensor(_Owned(address, nbytes, owner), device=self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def lend(self, tensor: Tensor, stream: DeviceStream) -> None:
        assert isinstance(stream, _CudaStream)
        tensor.record_stream(stream.stream)

    def query(self, event: Event) -> bool:
        # by cuda-python, which releases the GIL; torch's query holds the GIL while it waits for the driver's lock
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
        """Set the calling thread's capture mode: the captures it may invalidate. Returns the previous mode."""
        # by the driver: the runtime's call may create an unwanted context
        error, before = self._driver.cuThreadExchangeStreamCaptureMode(mode)
        self._check(error, "change the capture mode of a thread")
        return before

    def release(self, event: Event) -> None:
        self.events.give(event)


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
