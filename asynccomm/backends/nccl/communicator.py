"""One NCCL communicator: connecting it, issuing groups of calls on it, ending it."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

from torch import Tensor

from asynccomm.backends.nccl.api import CommHandle, Config, Nccl
from asynccomm.backends.nccl.device import ISSUING, Device, DeviceStream
from asynccomm.backends.nccl.plan import NcclCall
from asynccomm.errors import AsyncCommError, BackendError
from asynccomm.ops import Op
from asynccomm.ops.reduce_op import RedOpType

SPIN_SECONDS: Final = 200e-6  # spin before the first sleep: a launch by NCCL's own thread is faster than this
LOOK_SECONDS: Final = 1e-3  # longest sleep between two polls of a communicator that is not ready
LAUNCH_SECONDS: Final = 0.05  # for NCCL's own thread to launch a group before others are issued; it takes far less
LEAVE_SECONDS: Final = 1.0  # for other threads to return from NCCL before the communicator is ended
END_SECONDS: Final = 10.0  # for NCCL to end a communicator; after this, its thread is abandoned

T = TypeVar("T")
Prepared = tuple[Callable[..., None], tuple[Any, ...]]

_log = logging.getLogger("asynccomm")


@final
@dataclass(frozen=True, slots=True)
class DirectCall:
    """A collective of one tensor that is one NCCL call, without the memory: from :meth:`Communicator.direct_call`."""

    function: Callable[..., None]
    numbers: tuple[int, ...]  #: the arguments behind the memory: count, dtype, and reduction or root
    kinds: frozenset[tuple[object, ...]]  #: the properties that decide how NCCL connects


@final
class _SharedHandle:
    """A communicator's handle, and the number of threads that are in NCCL calls with it: a context for each call.

    ``with`` gives the handle, which :meth:`take` returns only after all contexts, or after LEAVE_SECONDS. Not a
    generator, which would take several times as long: the context is on the path of every call.
    """

    __slots__ = ("_handle", "_left", "_lock", "_over", "_users")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._handle: CommHandle | None = None
        self._users = 0
        self._over = False

    def __enter__(self) -> CommHandle:
        with self._lock:
            handle = self._handle
            if handle is None:
                raise BackendError("the NCCL communicator was ended")
            self._users += 1
        return handle

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._over:
                self._left.notify_all()

    def put(self, handle: CommHandle) -> bool:
        """Set the handle; False: :meth:`take` was called before."""
        with self._lock:
            if self._over:
                return False
            self._handle = handle
            return True

    def take(self) -> CommHandle | None:
        """The handle, for its end; later contexts raise BackendError."""
        with self._lock:
            self._over = True
            handle, self._handle = self._handle, None
            self._left.wait_for(lambda: not self._users, LEAVE_SECONDS)
        return handle


@final
class Communicator:
    """One rank of a communicator, and the stream it runs on.

    NCCL connects for the first call of each kind, and so may wait for other ranks. :meth:`knows` identifies such calls,
    which are not for a thread that must not block.
    """

    def __init__(self, nccl: Nccl, device: Device, stream: DeviceStream) -> None:
        self._nccl = nccl
        self._device = device
        self.stream = stream
        self._shared = _SharedHandle()
        self._blocking = True
        self._asking = threading.Lock()  # NCCL ends a finished group of a non-blocking communicator in ``progress``
        self._known: set[tuple[object, ...]] = set()

    def open(self, size: int, rank: int, unique_id: bytes, config: Config) -> None:
        """Connect to the other ranks. Blocks. Raises: BackendError."""
        self._blocking = config.blocking
        with self._device.here():
            handle = self._nccl.init(size, rank, unique_id, config)
            if not self._shared.put(handle):  # ended during init
                self._nccl.abort(handle)
            self._until_ready()

    def _until_ready(self, seconds: float = math.inf) -> bool:
        """Block until NCCL is ready; False if it is not after so many seconds. Raises: BackendError."""
        began = time.monotonic()
        while not self.ready():
            waited = time.monotonic() - began
            if waited > seconds:
                return False
            time.sleep(0.0 if waited < SPIN_SECONDS else min(LOOK_SECONDS, waited / 4))
        return True

    def ready(self) -> bool:
        """Whether the communicator has no call in progress. Raises: BackendError if a call or an operation failed."""
        with self._shared as handle, self._asking:
            return self._nccl.progress(handle)

    def direct_call(self, calls: Sequence[NcclCall], source: int, target: int) -> DirectCall | None:
        """The only one of ``calls``, if it goes from ``source`` to ``target`` and needs nothing made."""
        if len(calls) != 1 or calls[0].factor is not None:
            return None
        (call,) = calls
        if (_pointer(call.source), _pointer(call.target)) != (source, target):
            return None
        nccl = self._nccl
        numbers = [call.count, nccl.dtypes[call.dtype]]
        if call.reduction is not None:
            numbers.append(nccl.reductions[call.reduction])
        if call.peer >= 0:
            numbers.append(call.peer)
        return DirectCall(getattr(nccl, call.name), tuple(numbers), frozenset(_kinds(calls)))

    def knows_direct(self, call: DirectCall) -> bool:
        """As :meth:`knows`."""
        return self._blocking and call.kinds <= self._known

    def issue_direct(self, call: DirectCall, memory: tuple[int, int], op: Op) -> None:
        """Queue a call that the communicator knows, from an address to an address. Raises: as ``issue``."""
        with self._device.here(), self._shared as handle, ISSUING:
            arguments = (*memory, *call.numbers, handle, self.stream.handle)
            self._begin_group([(call.function, arguments)], lambda _: op)
            self._nccl.group_end()

    def knows(self, calls: Sequence[NcclCall]) -> bool:
        """Whether NCCL has issued calls of these kinds before, and so issues ``calls`` without blocking.

        False on a non-blocking communicator: there a thread of NCCL launches every group.
        """
        return self._blocking and self._known.issuperset(_kinds(calls))

    def issue(self, calls: Sequence[NcclCall], *, stream: DeviceStream | None = None, known: bool) -> None:
        """Queue ``calls`` as one group, on ``stream`` or else the communicator's own. Blocks unless all are ``known``.

        Other threads issue no groups meanwhile, except while the group may wait for other ranks.

        Raises: BackendError naming the operation whose call NCCL refused; then no call of the group runs.
        """
        nccl = self._nccl
        where = (self.stream if stream is None else stream).handle
        made: list[int] = []  # reductions
        waits = not known and not self._known.issuperset(_kinds(calls))  # other ranks may wait for another group here
        try:
            # on a non-blocking communicator, only NCCL's own thread waits
            with self._device.here(), contextlib.nullcontext() if waits and self._blocking else ISSUING:
                with self._shared as handle, contextlib.nullcontext() if self._blocking else self._asking:
                    self._start(calls, handle, where, made)
                    nccl.group_end()
                ready = known or (not waits and self._until_ready(LAUNCH_SECONDS))
                if ready:
                    self._drop(made)
            if not ready:
                with self._device.here():
                    self._until_ready()
        finally:
            self._drop(made)
        if not known:
            self._known |= _kinds(calls)

    def _drop(self, made: list[int]) -> None:
        while made:
            with self._shared as handle:
                self._nccl.drop_reduction(made.pop(0), handle)

    def run(self, call: Callable[[CommHandle, int], T]) -> T:
        """Make a call of NCCL outside of all groups, given the handle and the stream's. Blocks until NCCL is ready.

        For one thread at a time. Raises: BackendError.
        """
        with self._device.here(), self._shared as handle:
            result = call(handle, self.stream.handle)
            self._until_ready()
        return result

    def estimate(self, calls: Sequence[NcclCall], *, known: bool) -> float:
        """The seconds that ``calls`` take as one group, or a negative number if NCCL has no estimate. Nothing runs.

        Only for a blocking communicator of several ranks, and for calls that NCCL fuses, see ``estimates``. Blocks
        unless all are ``known``. Raises: BackendError.
        """
        nccl, stream = self._nccl, self.stream.handle
        made: list[int] = []  # reductions
        with self._device.here(), self._shared as handle, ISSUING if known else contextlib.nullcontext():
            try:
                self._start(calls, handle, stream, made)
                return nccl.group_estimate()
            finally:
                for reduction in made:
                    nccl.drop_reduction(reduction, handle)
                nccl.drop_queued(handle, _memory(calls[0]).data_ptr(), stream)

    def _start(self, calls: Sequence[NcclCall], handle: CommHandle, stream: int, made: list[int]) -> None:
        """Start a group of ``calls``; ends the group before raising. Adds new reductions to ``made``."""
        # all failures outside of NCCL happen here, before the group begins: half a group would hang
        prepared = [self._prepared(call, handle, stream, made) for call in calls]
        self._begin_group(prepared, lambda at: calls[at].op)

    def _begin_group(self, prepared: Sequence[Prepared], op_of: Callable[[int], Op | None]) -> None:
        """Start a group of calls; ends the group before raising an error, with the operation of the failed call."""
        nccl = self._nccl
        nccl.group_start()
        done = 0
        try:
            for function, arguments in prepared:
                function(*arguments)
                done += 1
        except BaseException as exc:
            with contextlib.suppress(AsyncCommError):
                nccl.group_end()  # raises as well, and runs nothing
            op = op_of(done)
            if op is None or not isinstance(exc, AsyncCommError):
                raise
            raise BackendError(f"nccl could not start {op}: {exc}") from exc

    def _prepared(self, call: NcclCall, handle: CommHandle, stream: int, made: list[int]) -> Prepared:
        nccl = self._nccl
        dtype = nccl.dtypes[call.dtype]
        function = getattr(nccl, call.name)
        if call.name == "send":
            return function, (_pointer(call.source), call.count, dtype, call.peer, handle, stream)
        if call.name == "recv":
            return function, (_pointer(call.target), call.count, dtype, call.peer, handle, stream)
        arguments = [_pointer(call.source), _pointer(call.target), call.count, dtype]
        if call.reduction is not None:
            if call.reduction is RedOpType.PREMUL_SUM:
                assert call.factor is not None
                made.append(nccl.pre_mul_sum(call.factor.data_ptr(), dtype, handle, on_device=True))
                arguments.append(made[-1])
            else:
                arguments.append(nccl.reductions[call.reduction])
        if call.peer >= 0:
            arguments.append(call.peer)
        return function, (*arguments, handle, stream)

    def take(self) -> CommHandle | None:
        """Take the handle in order to end it; later calls fail. From any thread; blocks for up to LEAVE_SECONDS."""
        return self._shared.take()


def _memory(call: NcclCall) -> Tensor:
    tensor = call.target if call.source is None else call.source
    assert tensor is not None
    return tensor


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _kinds(calls: Sequence[NcclCall]) -> set[tuple[object, ...]]:
    """The properties of ``calls`` that decide how NCCL connects, as far as known.

    Sizes are rounded to powers of two, for each call and for the sum of like calls.
    """
    kinds: set[tuple[object, ...]] = set()
    totals: defaultdict[tuple[object, ...], int] = defaultdict(int)
    for call in calls:
        nbytes = call.count * call.dtype.itemsize
        like = call.name, call.dtype, call.reduction
        kinds.add((*like, call.peer, nbytes.bit_length()))
        totals[like] += nbytes
    return kinds.union((*like, total.bit_length()) for like, total in totals.items())


def end_all(nccl: Nccl, device: Device, communicators: Sequence[Communicator], *, abort: bool) -> None:
    """Close, or ``abort``, communicators. Blocks as NCCL does, perhaps for ever.

    Communicators to be closed must have nothing in flight. Aborted communicators end together, since one may wait for
    another.
    """
    taken = [communicator.take() for communicator in communicators]
    handles = [handle for handle in taken if handle is not None]
    with device.here():
        if abort:
            _try(nccl.abort, *handles)
            return
        for handle in handles:
            _try(nccl.finalize, handle)
        for handle in handles:
            with contextlib.suppress(AsyncCommError):
                while not nccl.progress(handle):  # a non-blocking communicator must be ready before destroy
                    time.sleep(LOOK_SECONDS)
            _try(nccl.destroy, handle)


def _try(call: Callable[..., None], *handles: CommHandle) -> None:
    try:
        call(*handles)
    except AsyncCommError as exc:
        _log.warning("an NCCL communicator could not be ended: %s", exc)
