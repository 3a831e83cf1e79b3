"""NCCL, called by way of nccl4py; :func:`load` imports that package on first use.

No other module imports nccl4py. All calls go through ``nccl.bindings.nccl``. Its functions take integers and release
the GIL: 0.2 us per call, this module's share included. ``nccl.core`` takes 4 to 8 us, and hides the communicators that
these calls need. The bindings change between minor versions, so :func:`load` accepts tested versions only. The bindings
use the libnccl that torch has loaded; asynccomm ships none.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Final, ParamSpec, TypeVar, final

import torch

from asynccomm.backends.nccl.api import (
    DTYPES,
    REDUCTIONS,
    CommHandle,
    Config,
    Nccl,
    NcclError,
    NcclWindowHandle,
    dotted,
)
from asynccomm.errors import BackendError

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
