"""NCCL, called by way of nccl4py; :func:`load` imports that package on first use.

No other module imports nccl4py. All calls go through ``nccl.bindings.nccl``, whose functions take integers and release
the GIL: 0.2 us per call, this module's share included. ``nccl.core`` takes 4 to 8 us, and hides the communicators that
these calls need. The bindings change between minor versions, so :func:`load` accepts tested versions only. The bindings
use the libnccl that torch has loaded; asynccomm ships none.

Rules of NCCL (2.28 to 2.32) that callers must follow:

- A call that NCCL answers with "in progress" returns like a successful one. On a non-blocking communicator, these are
  the calls that make, split or finalize it, every outermost ``group_end``, and every operation outside a group: NCCL
  starts a thread for each. Until ``progress`` returns True, no other call may be made on that communicator, and no work
  that must follow the operation may be queued on its stream.
- The child of a split or shrink is false until ``progress(parent)`` is True; pass the parent to ``progress``, not the
  child.
- Groups are per thread. When a call in a group fails, ``group_end`` must still be called. ``group_end`` starts the
  group's calls, unless NCCL itself refused a call (then ``group_end`` may fail as well), so compute all arguments
  before ``group_start``.
- Blocking and non-blocking communicators cannot share a group.
- A group that ends with ``group_estimate`` still makes its connections, so ``group_estimate`` may wait for other ranks.
  NCCL estimates only one collective of the group, unless the collectives are alike: then NCCL fuses them. Messages, and
  calls built of messages, have no estimate. On a non-blocking communicator, or with a single rank, the group would run.
  NCCL keeps the estimated calls queued, and would launch them with the next group if ``drop_queued`` did not remove
  them.
- Only one thread at a time may call NCCL for a device, even for different communicators. Only ``abort`` and
  ``progress`` may be called from other threads.
- Calls that make a communicator need its CUDA device as the current device; the caller sets it.
- A communicator's first one-sided call, and the registration of a window, wait for all of its ranks (to 2.30), and the
  signals of one-sided calls are those of the communicator, not of a window. So each window has a communicator of its
  own, and all ranks make a one-sided call before one of them uses the window.
- A ``put_signal`` reads memory of a window, and the target sees its bytes only behind a ``wait_signal`` that counts its
  signal. A wait takes signals away: each is waited for once.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Final, ParamSpec, Protocol, TypeVar, final

import torch

from asynccomm.errors import BackendError
from asynccomm.ops.reduce_op import RedOpType

REMOTE_ERROR: Final = 6  #: an error code; its usual cause is the end of a peer, or of the network

DTYPES: Final[Mapping[torch.dtype, int]] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 10,
    torch.float8_e5m2: 11,
}
REDUCTIONS: Final[Mapping[RedOpType, int]] = {
    RedOpType.SUM: 0,
    RedOpType.PRODUCT: 1,
    RedOpType.MAX: 2,
    RedOpType.MIN: 3,
    RedOpType.AVG: 4,
}

_TESTED: Final = ((0, 6), (0, 7))  # minor versions of nccl4py: the first tested, the first untested
_OLDEST: Final = 22800  # the first NCCL with native all_to_all, gather and scatter
_NEEDED: Final = (
    *("GetVersion", "GetUniqueId", "GetErrorString", "GetLastError", "GroupStart", "GroupEnd"),
    *("CommInitRankConfig", "CommSplit", "CommFinalize", "CommDestroy", "CommAbort", "CommGetAsyncError"),
    *("AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "Send", "Recv"),
    *("RedOpCreatePreMulSum", "RedOpDestroy"),
)
_OPTIONAL: Final = {
    "all_to_all": "AlltoAll",
    "gather": "Gather",
    "scatter": "Scatter",
    "shrink": "CommShrink",
    "estimate": "GroupSimulateEnd",
}
_FEATURES: Final = {
    "windows": (
        "MemAlloc",
        "MemFree",
        "CommWindowRegister",
        "CommWindowDeregister",
        "PutSignal",
        "Signal",
        "WaitSignal",
    ),
    "register": ("CommRegister", "CommDeregister"),
}
_SYMMETRIC: Final = 1  # flag of a window: the same layout on all ranks, as one-sided calls need it
_WAIT: Final = struct.Struct("=4i")  # of a wait: signals, peer, number of the signal, context
_NO_COLOR: Final = -1
_MICROSECOND: Final = 1e-6  # NCCL's unit of estimates; nccl4py does not convert it, contrary to its documents
_NO_ROOT: Final = -1
_IN_PROGRESS: Final = 7
_DEPTH: Final = 16  # a bound on nested groups that no caller reaches

P = ParamSpec("P")
T = TypeVar("T")


@final
class NcclError(BackendError):
    """An error of NCCL: a refused call, or a failed operation.

    Args:
        action: the failed action.
        code: NCCL's ``ncclResult_t``.
        text: NCCL's words for the code.
        detail: the last error that the library noted in this process, maybe an older one; or empty.
    """

    def __init__(self, action: str, code: int, text: str, detail: str) -> None:
        super().__init__(action, code, text, detail)
        self.action, self.code, self.text, self.detail = action, code, text, detail

    def __str__(self) -> str:
        return f"NCCL could not {self.action}: {self.text}" + (f" ({self.detail})" if self.detail else "")


class CommHandle(Protocol):
    """A handle to an NCCL communicator, valid until the ``destroy`` or ``abort`` that frees the communicator."""

    def __bool__(self) -> bool:
        """Whether the communicator exists: false while a split or shrink is in progress, and always without a color."""

    def __int__(self) -> int:
        """The address of the communicator."""


class NcclWindowHandle(Protocol):
    """A handle to a window; false while its registration is in progress."""

    def __bool__(self) -> bool: ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of a new communicator. None leaves a setting to NCCL and its environment variables."""

    blocking: bool = False  #: whether calls return only once they are done
    name: str | None = None  #: name in NCCL's log and profiles
    min_ctas: int | None = None  #: least number of thread blocks per kernel
    max_ctas: int | None = None  #: greatest number of thread blocks per kernel
    nvls_ctas: int | None = None  #: number of thread blocks for reductions in the switch
    cga_cluster_size: int | None = None  #: number of thread blocks per cluster, 0 to 8
    cta_policy: int | None = None  #: 0 default, 1 efficiency, 2 no thread blocks where NCCL can do without
    net_name: str | None = None  #: name of the network module: "IB", "Socket", ...
    traffic_class: int | None = None  #: traffic class, in the network's own numbering
    collnet_enable: bool | None = None  #: whether the network may reduce
    split_share: bool | None = None  #: whether a split's child shares the parent's resources
    shrink_share: bool | None = None  #: whether a shrink's child shares the parent's resources


class Nccl(Protocol):
    """The calls of NCCL that the backend uses. Pointers are addresses, streams are handles, counts are of elements.

    Collectives and messages return when they are queued. ``count`` is one rank's share where a call has shares:
    elements sent in all_gather and gather, elements received in reduce_scatter and scatter, elements per pair in
    all_to_all.

    Raises, in all methods: NcclError.
    """

    @property
    def version(self) -> int:
        """The version of the loaded library: 23007 is 2.30.7."""

    @property
    def dtypes(self) -> Mapping[torch.dtype, int]:
        """NCCL's numbers of the dtypes. bool, int16 and complex types have none."""

    @property
    def reductions(self) -> Mapping[RedOpType, int]:
        """NCCL's numbers of the reductions."""

    @property
    def native(self) -> frozenset[str]:
        """The subset of all_to_all, gather, scatter, shrink, estimate, windows and register that the library has."""

    def unique_id(self) -> bytes:
        """128 bytes, the same for all ranks of one new communicator.

        One of these ranks makes the id: the others rendezvous with its process.
        """

    def init(self, size: int, rank: int, unique_id: bytes, config: Config) -> CommHandle:
        """Make a communicator. Not to be called within a group."""

    def split(self, comm: CommHandle, color: int | None, key: int, config: Config | None) -> CommHandle:
        """Split ``comm`` into one communicator per ``color``, with ranks ordered by ``key``. Collective.

        A rank without a color gets no communicator. ``config`` None is the parent's. Not to be called within a group.
        """

    def shrink(self, comm: CommHandle, excluded: Sequence[int], config: Config | None, *, abort: bool) -> CommHandle:
        """Make a communicator without the ranks ``excluded``, at least one, which do not call this. Not within a group.

        ``abort`` ends the operations in flight in the parent; without ``abort`` the parent must have none.
        """

    def finalize(self, comm: CommHandle) -> None:
        """Finish all operations on all ranks; ``destroy`` comes next."""

    def destroy(self, comm: CommHandle) -> None:
        """Free this rank's resources of ``comm``. Blocks until that is done, even if ``comm`` is non-blocking."""

    def abort(self, *comms: CommHandle) -> None:
        """End all operations of ``comms`` at once, and free them. Blocks until that is done, non-blocking or not.

        Communicators that wait for each other end only together, so one call takes all communicators of a process. All
        of ``comms`` are freed after the call, even if it raises.
        """

    def progress(self, comm: CommHandle) -> bool:
        """Whether ``comm`` is ready for the next call; False: busy. Raises if a call or an operation failed."""

    def group_start(self) -> None:
        """Start a group: ``group_end`` starts all later calls of this thread at once."""

    def group_end(self) -> None: ...

    def group_estimate(self) -> float:
        """End a group without running it. Returns its estimated seconds, or a negative number if NCCL has no estimate.

        The caller must then call ``drop_queued``, even if this raises.
        """

    def drop_queued(self, comm: CommHandle, buf: int, stream: int) -> None:
        """Remove the estimated calls from the queue of ``comm``. ``buf`` is a byte on the device; it is not changed."""

    def all_reduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: CommHandle, stream: int
    ) -> None: ...

    def broadcast(
        self, send: int, recv: int, count: int, dtype: int, root: int, comm: CommHandle, stream: int
    ) -> None: ...

    def reduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, root: int, comm: CommHandle, stream: int
    ) -> None: ...

    def all_gather(self, send: int, recv: int, count: int, dtype: int, comm: CommHandle, stream: int) -> None: ...

    def reduce_scatter(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: CommHandle, stream: int
    ) -> None: ...

    def all_to_all(self, send: int, recv: int, count: int, dtype: int, comm: CommHandle, stream: int) -> None: ...

    def gather(
        self, send: int, recv: int, count: int, dtype: int, root: int, comm: CommHandle, stream: int
    ) -> None: ...

    def scatter(
        self, send: int, recv: int, count: int, dtype: int, root: int, comm: CommHandle, stream: int
    ) -> None: ...

    def send(self, buf: int, count: int, dtype: int, peer: int, comm: CommHandle, stream: int) -> None: ...

    def recv(self, buf: int, count: int, dtype: int, peer: int, comm: CommHandle, stream: int) -> None: ...

    def pre_mul_sum(self, scalar: int, dtype: int, comm: CommHandle, *, on_device: bool) -> int:
        """The number of a new reduction: a sum with a factor, for operations on ``comm`` with ``dtype``.

        Args:
            scalar: address of the factor, which is read now, or, ``on_device``, when the operations run.
        """

    def drop_reduction(self, op: int, comm: CommHandle) -> None:
        """Free a reduction of ``pre_mul_sum``. Allowed as soon as the calls that use the reduction have returned."""

    def register(self, comm: CommHandle, buf: int, nbytes: int) -> int:
        """Register memory, so that NCCL may run collectives there without a copy; returns a handle. Not collective."""

    def deregister(self, comm: CommHandle, handle: int) -> None:
        """End a registration, which no operation in flight uses."""

    def mem_alloc(self, nbytes: int) -> int:
        """The address of new memory on the current device, fit for a window."""

    def mem_free(self, address: int) -> None:
        """Free memory of ``mem_alloc`` that nothing uses."""

    def window_register(self, comm: CommHandle, buf: int, nbytes: int) -> NcclWindowHandle:
        """Make memory a window, with the same ``nbytes`` on all ranks. Collective."""

    def window_deregister(self, comm: CommHandle, window: NcclWindowHandle) -> None:
        """End a window that nothing uses. Not collective."""

    def put_signal(
        self, buf: int, nbytes: int, peer: int, window: NcclWindowHandle, offset: int, comm: CommHandle, stream: int
    ) -> None:
        """Copy bytes of a window to byte ``offset`` of the window of ``peer``, and signal that.

        Args:
            window: this rank's handle.
        """

    def signal(self, peer: int, comm: CommHandle, stream: int) -> None:
        """Signal without a copy."""

    def wait_signal(self, counts: Mapping[int, int], comm: CommHandle, stream: int) -> None:
        """Make the stream wait for so many further signals of each peer, and for the copies before them."""


@cache
def load() -> Nccl:
    """The loaded library. Raises: BackendError naming the missing package or library, and how to install it."""
    try:
        bindings = import_module("nccl.bindings.nccl")
        inspect: Callable[[str], int] = import_module("nccl.bindings._internal.nccl")._inspect_function_pointer
    except ModuleNotFoundError as exc:
        if str(exc.name).partition(".")[0] == "nccl":
            raise BackendError(f"backend 'nccl' needs the package nccl4py: install {_extra()}") from exc
        raise BackendError(f"nccl4py cannot be imported ({exc}): install {_extra()} again") from exc
    except (ImportError, AttributeError) as exc:
        raise BackendError(f"nccl4py cannot be imported ({exc}): install {_extra()} again") from exc
    _check_bindings()
    try:
        number: int = bindings.get_version()
    except Exception as exc:  # nccl4py and cuda-pathfinder raise error classes of their own
        raise BackendError(
            f"libnccl.so.2 was not found ({_first_line(exc)}): torch brings it if that is built with CUDA, "
            f"and this is torch {torch.__version__}"
        ) from exc
    if number < _OLDEST:
        raise BackendError(
            f"NCCL {dotted(number)} is too old: asynccomm needs {dotted(_OLDEST)} or newer; install a newer torch"
        )
    missing = [f"nccl{name}" for name in _NEEDED if not inspect(f"__nccl{name}")]
    if missing:
        raise BackendError(f"the loaded libnccl, version {dotted(number)}, has no {', '.join(missing)}")
    native = {name for name, symbol in _OPTIONAL.items() if inspect(f"__nccl{symbol}")}
    native |= {name for name, symbols in _FEATURES.items() if all(inspect(f"__nccl{symbol}") for symbol in symbols)}
    return _Loaded(bindings, number, frozenset(native))


def _check_bindings() -> None:
    low, high = ("{}.{}".format(*minor) for minor in _TESTED)
    try:
        found = version("nccl4py")
    except PackageNotFoundError:
        found = "of unknown version"
    minor = tuple(int(part) if part.isdecimal() else -1 for part in found.split(".")[:2])
    if not _TESTED[0] <= minor < _TESTED[1]:
        raise BackendError(
            f"nccl4py {found} is not one that asynccomm was tested with: install 'nccl4py>={low},<{high}'"
        )


def _extra() -> str:
    """The extra to install for this torch. A wrong extra would replace the libnccl that torch came with."""
    cuda = torch.version.cuda
    if cuda is None:
        return "asynccomm[cu12] or asynccomm[cu13], and a torch that is built with that CUDA"
    return f"asynccomm[cu{cuda.partition('.')[0]}]"


def dotted(number: int) -> str:
    """The version of NCCL as its documents write it: 23007 is 2.30.7."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0]


@final
class _Loaded:
    """:class:`Nccl`, implemented by the bindings."""

    def __init__(self, bindings: ModuleType, version: int, native: frozenset[str]) -> None:
        self._nccl = bindings
        # The bindings raise a RuntimeError for a missing function; the backend checks ``native`` first.
        self._errors = (bindings.NCCLError, RuntimeError)
        # A thread of NCCL writes the address of a new communicator into the returned handle, after the call has
        # returned. So this dict keeps each handle until then: by the address of the communicator to pass to
        # ``progress``.
        self._awaited: dict[int, list[CommHandle]] = {}
        self.version = version
        self.dtypes = DTYPES
        self.reductions = REDUCTIONS
        self.native = native

    # -- rare calls

    def unique_id(self) -> bytes:
        return bytes(self._do("make a unique id", None, self._nccl.get_unique_id))

    def init(self, size: int, rank: int, unique_id: bytes, config: Config) -> CommHandle:
        identifier = self._nccl.UniqueId.from_buffer(unique_id)
        call = self._nccl.comm_init_rank_config
        return self._made(
            None, f"make a communicator of {size} ranks", call, size, identifier, rank, self._struct(config)
        )

    def split(self, comm: CommHandle, color: int | None, key: int, config: Config | None) -> CommHandle:
        chosen = _NO_COLOR if color is None else color
        return self._made(comm, "split a communicator", self._nccl.comm_split, comm, chosen, key, self._struct(config))

    def shrink(self, comm: CommHandle, excluded: Sequence[int], config: Config | None, *, abort: bool) -> CommHandle:
        ranks = list(excluded)
        call = self._nccl.comm_shrink
        return self._made(
            comm, "shrink a communicator", call, comm, ranks, len(ranks), self._struct(config), int(abort)
        )

    def finalize(self, comm: CommHandle) -> None:
        self._do("finalize a communicator", comm, self._nccl.comm_finalize, comm)

    def destroy(self, comm: CommHandle) -> None:
        address = int(comm)
        self._do("destroy a communicator", None, self._nccl.comm_destroy, comm)
        self._awaited.pop(address, None)

    def abort(self, *comms: CommHandle) -> None:
        failed: list[BackendError] = []
        addresses = [int(comm) for comm in comms]
        what = "abort a communicator"
        self._do(what, None, self._nccl.group_start)
        for call, args in [*((self._nccl.comm_abort, (comm,)) for comm in comms), (self._nccl.group_end, ())]:
            try:
                self._do(what, None, call, *args)
            except BackendError as exc:  # the other communicators must still be ended
                failed.append(exc)
        for address in addresses:
            self._awaited.pop(address, None)
        if failed:
            raise failed[0]

    def progress(self, comm: CommHandle) -> bool:
        code: int = self._do("ask a communicator for its state", comm, self._nccl.comm_get_async_error, comm)
        if code == _IN_PROGRESS:
            return False
        if code:
            raise self._error("finish the queued calls", code, comm)
        if self._awaited:
            self._awaited.pop(int(comm), None)
        return True

    def pre_mul_sum(self, scalar: int, dtype: int, comm: CommHandle, *, on_device: bool) -> int:
        call = self._nccl.red_op_create_pre_mul_sum
        number: int = self._do("make a reduction", comm, call, scalar, dtype, 0 if on_device else 1, comm)
        return number

    def drop_reduction(self, op: int, comm: CommHandle) -> None:
        self._do("drop a reduction", comm, self._nccl.red_op_destroy, op, comm)

    def register(self, comm: CommHandle, buf: int, nbytes: int) -> int:
        handle: int = self._do("register memory", comm, self._nccl.comm_register, comm, buf, nbytes)
        return handle

    def deregister(self, comm: CommHandle, handle: int) -> None:
        self._do("deregister memory", comm, self._nccl.comm_deregister, comm, handle)

    def mem_alloc(self, nbytes: int) -> int:
        address: int = self._do(f"allocate {nbytes} bytes of memory", None, self._nccl.mem_alloc, nbytes)
        return address

    def mem_free(self, address: int) -> None:
        self._do("free memory", None, self._nccl.mem_free, address)

    def window_register(self, comm: CommHandle, buf: int, nbytes: int) -> NcclWindowHandle:
        call = self._nccl.comm_window_register
        made: NcclWindowHandle = self._do("register a window", comm, call, comm, buf, nbytes, _SYMMETRIC)
        return made

    def window_deregister(self, comm: CommHandle, window: NcclWindowHandle) -> None:
        self._do("deregister a window", comm, self._nccl.comm_window_deregister, comm, window)

    # -- frequent calls

    def put_signal(
        self, buf: int, nbytes: int, peer: int, window: NcclWindowHandle, offset: int, comm: CommHandle, stream: int
    ) -> None:
        call, byte = self._nccl.put_signal, DTYPES[torch.uint8]
        self._do("start put", comm, call, buf, nbytes, byte, peer, window, offset, 0, 0, 0, comm, stream)

    def signal(self, peer: int, comm: CommHandle, stream: int) -> None:
        self._do("start signal", comm, self._nccl.signal, peer, 0, 0, 0, comm, stream)

    def wait_signal(self, counts: Mapping[int, int], comm: CommHandle, stream: int) -> None:
        waits = bytearray(b"".join([_WAIT.pack(count, peer, 0, 0) for peer, count in counts.items()]))
        self._do("start wait_signal", comm, self._nccl.wait_signal, len(counts), waits, comm, stream)

    def group_start(self) -> None:
        self._do("start a group", None, self._nccl.group_start)

    def group_end(self) -> None:
        self._do("start the operations of a group", None, self._nccl.group_end)

    def group_estimate(self) -> float:
        info = self._do("estimate the time of a group", None, self._nccl.group_simulate_end)
        return float(info.estimated_time) * _MICROSECOND

    def drop_queued(self, comm: CommHandle, buf: int, stream: int) -> None:
        # NCCL has no call for this, but a failing group clears the queue: this group has one valid call and one with a
        # root that never exists
        self._do("start a group", None, self._nccl.group_start)
        for root in (0, _NO_ROOT):
            with contextlib.suppress(*self._errors):
                self._nccl.broadcast(buf, buf, 1, DTYPES[torch.uint8], root, comm, stream)
        try:
            self._nccl.group_end()
        except self._errors:
            return
        raise BackendError("NCCL accepted an invalid root, and so may have run calls that were to be estimated")

    def all_reduce(self, send: int, recv: int, count: int, dtype: int, op: int, comm: CommHandle, stream: int) -> None:
        self._do("start all_reduce", comm, self._nccl.all_reduce, send, recv, count, dtype, op, comm, stream)

    def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, comm: CommHandle, stream: int) -> None:
        self._do("start broadcast", comm, self._nccl.broadcast, send, recv, count, dtype, root, comm, stream)

    def reduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, root: int, comm: CommHandle, stream: int
    ) -> None:
        self._do("start reduce", comm, self._nccl.reduce, send, recv, count, dtype, op, root, comm, stream)

    def all_gather(self, send: int, recv: int, count: int, dtype: int, comm: CommHandle, stream: int) -> None:
        self._do("start all_gather", comm, self._nccl.all_gather, send, recv, count, dtype, comm, stream)

    def reduce_scatter(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: CommHandle, stream: int
    ) -> None:
        self._do("start reduce_scatter", comm, self._nccl.reduce_scatter, send, recv, count, dtype, op, comm, stream)

    def all_to_all(self, send: int, recv: int, count: int, dtype: int, comm: CommHandle, stream: int) -> None:
        self._do("start all_to_all", comm, self._nccl.allto_all, send, recv, count, dtype, comm, stream)

    def gather(self, send: int, recv: int, count: int, dtype: int, root: int, comm: CommHandle, stream: int) -> None:
        self._do("start gather", comm, self._nccl.gather, send, recv, count, dtype, root, comm, stream)

    def scatter(self, send: int, recv: int, count: int, dtype: int, root: int, comm: CommHandle, stream: int) -> None:
        self._do("start scatter", comm, self._nccl.scatter, send, recv, count, dtype, root, comm, stream)

    def send(self, buf: int, count: int, dtype: int, peer: int, comm: CommHandle, stream: int) -> None:
        self._do("start send", comm, self._nccl.send, buf, count, dtype, peer, comm, stream)

    def recv(self, buf: int, count: int, dtype: int, peer: int, comm: CommHandle, stream: int) -> None:
        self._do("start recv", comm, self._nccl.recv, buf, count, dtype, peer, comm, stream)

    # -- helpers

    def _do(self, what: str, comm: CommHandle | None, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except self._errors as exc:
            if isinstance(exc, self._nccl.NCCLError):
                raise self._error(what, exc.status, comm) from exc
            raise BackendError(f"NCCL could not {what}: {exc}") from exc

    def _error(self, what: str, code: int, comm: CommHandle | None) -> NcclError:
        text = self._nccl.get_error_string(code)
        return NcclError(what, code, text, self._nccl.get_last_error(comm or self._nccl.Comm()))

    def _made(self, parent: CommHandle | None, what: str, call: Callable[..., CommHandle], *args: object) -> CommHandle:
        try:
            made = self._do(what, parent, call, *args)
        except BackendError:
            self._leave_groups()
            raise
        self._awaited.setdefault(int(parent or made), []).append(made)
        return made

    def _leave_groups(self) -> None:
        """End the group that NCCL (2.30) leaves open on an early failure; later calls would wait in it for ever."""
        for _ in range(_DEPTH):
            try:
                self._nccl.group_end()
            except self._errors:  # no open group
                return

    def _struct(self, config: Config | None) -> object:
        if config is None:
            return 0
        struct = self._nccl.Config()
        for field, value in asdict(config).items():
            if value is not None:
                setattr(struct, "comm_name" if field == "name" else field, value)
        return struct
