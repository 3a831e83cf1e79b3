"""NCCL by nccl4py: the one file that knows that package, imported on first use by :func:`load`.

Everything goes through ``nccl.bindings.nccl``, whose calls take integers and let the GIL go: 0.2 us each, our share
included. ``nccl.core`` takes 4 to 8, and hides the communicators that these calls need. The bindings change between
minor versions, so only those that were tested are taken. They find the libnccl that torch has loaded; we bring none.

What a caller has to know of NCCL (2.28 to 2.32):

- A call that NCCL answers with "in progress" returns as one that succeeded. On a non-blocking communicator these are
  the calls that make, split or finalize it, every outermost ``group_end``, and every operation outside of a group: NCCL
  starts a thread for each. Until ``progress`` is True nothing else may be called on that communicator, and nothing may
  be queued on the stream that is to come after the operation.
- The child of a split or shrink is false until ``progress(parent)`` is True; ask the parent, not the child.
- Groups are per thread. When a call in a group fails, ``group_end`` must still be called. It starts what the group has,
  unless NCCL itself refused a call (then it may fail as well), so work out all arguments before ``group_start``.
- Communicators that block and those that do not cannot be in one group.
- A group that is ended by ``group_estimate`` still connects what it needs, so it may wait for the other ranks. It tells
  the time of one of its collectives only, unless they are alike: then NCCL takes them as one. Messages, and whatever is
  made of them, have none. On a non-blocking communicator the group would run, as it does at once with a single rank.
  NCCL keeps what was estimated in line and would launch it with the next group, had ``drop_queued`` not emptied that.
- One thread at a time may call NCCL for a device, also for different communicators. Only ``abort`` and ``progress``
  may come from elsewhere.
- The current CUDA device must be the communicator's in all calls that make one; that is the caller's business.
"""

from __future__ import annotations

import contextlib
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

REMOTE_ERROR: Final = 6  #: the code of an error that a peer's end, or the network's, is the usual reason of

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

_TESTED: Final = ((0, 6), (0, 7))  # nccl4py: from this minor version on, and below that one
_OLDEST: Final = 22800  # the first NCCL with all_to_all, gather and scatter of its own
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
    "revoke": "CommRevoke",
    "estimate": "GroupSimulateEnd",
}
_NO_COLOR: Final = -1
_MICROSECOND: Final = 1e-6  # NCCL's unit of estimates, which nccl4py passes on as it is, whatever its documents say
_NO_ROOT: Final = -1
_IN_PROGRESS: Final = 7
_DEPTH: Final = 16  # more groups within each other than anybody opens

P = ParamSpec("P")
T = TypeVar("T")


@final
class NcclError(BackendError):
    """NCCL refused a call, or an operation failed.

    Args:
        what: it could not do.
        code: NCCL's ``ncclResult_t``.
        text: NCCL's words for the code.
        detail: the last error that the library noted in this process, maybe an older one; or empty.
    """

    def __init__(self, what: str, code: int, text: str, detail: str) -> None:
        super().__init__(what, code, text, detail)
        self.what, self.code, self.text, self.detail = what, code, text, detail

    def __str__(self) -> str:
        return f"NCCL could not {self.what}: {self.text}" + (f" ({self.detail})" if self.detail else "")


class CommHandle(Protocol):
    """A communicator. It has no other life than its calls: ``destroy`` or ``abort`` it, and then forget it."""

    def __bool__(self) -> bool:
        """Whether there is one: not yet while a split or shrink is in progress, and never without a color."""

    def __int__(self) -> int:
        """Its address."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How a communicator is to be; None leaves it to NCCL and its environment variables."""

    blocking: bool = False  #: whether calls wait until they are done
    name: str | None = None  #: in NCCL's log and profiles
    min_ctas: int | None = None  #: thread blocks per kernel, at least
    max_ctas: int | None = None  #: and at most
    nvls_ctas: int | None = None  #: thread blocks for reductions in the switch
    cga_cluster_size: int | None = None  #: thread blocks per cluster, 0 to 8
    cta_policy: int | None = None  #: 0 default, 1 efficiency, 2 no thread blocks where it can
    net_name: str | None = None  #: which network module: "IB", "Socket", ...
    traffic_class: int | None = None  #: in the network's own meaning
    collnet_enable: bool | None = None  #: reductions in the network
    split_share: bool | None = None  #: a split's child uses the parent's resources
    shrink_share: bool | None = None  #: a shrink's child does


class Nccl(Protocol):
    """What the backend calls. Pointers are addresses, streams are handles, counts are of elements.

    Collectives and messages return when they are queued. ``count`` is of one rank's share where there are shares: of
    what is sent in all_gather and gather, of what is received in reduce_scatter and scatter, per pair in all_to_all.

    Raises, in all methods: NcclError.
    """

    @property
    def version(self) -> int:
        """Of the loaded library: 23007 is 2.30.7."""

    @property
    def dtypes(self) -> Mapping[torch.dtype, int]:
        """NCCL's numbers. bool, int16 and complex types have none."""

    @property
    def reductions(self) -> Mapping[RedOpType, int]:
        """NCCL's numbers."""

    @property
    def native(self) -> frozenset[str]:
        """Which of all_to_all, gather, scatter, shrink, revoke and estimate the library has."""

    def unique_id(self) -> bytes:
        """128 bytes, for all ranks of one new communicator; they meet in this process, so one of the ranks makes it."""

    def init(self, size: int, rank: int, unique_id: bytes, config: Config) -> CommHandle:
        """A new communicator. Not to be called within a group."""

    def split(self, comm: CommHandle, color: int | None, key: int, config: Config | None) -> CommHandle:
        """A communicator of those with the same ``color``, by ``key``; without a color, none. All ranks call it.

        ``config`` None is the parent's. Not to be called within a group.
        """

    def shrink(self, comm: CommHandle, excluded: Sequence[int], config: Config | None, *, abort: bool) -> CommHandle:
        """A communicator without ``excluded``, at least one, who do not call this. Not to be called within a group.

        ``abort`` ends what is in flight in the parent; without it nothing may be.
        """

    def finalize(self, comm: CommHandle) -> None:
        """Finish all operations, on all ranks; then ``destroy``. Not after ``revoke``."""

    def destroy(self, comm: CommHandle) -> None:
        """Free what this rank has of it. Waits until that is done, also if non-blocking."""

    def abort(self, *comms: CommHandle) -> None:
        """End all operations of these at once, and free them. Waits until that is done, also if non-blocking.

        Communicators that wait for each other end only together, so all of a process are given in one call. Each is
        gone after it, also when this raises.
        """

    def revoke(self, comm: CommHandle) -> None:
        """End all operations of ``comm`` and keep it, for ``shrink``, ``split`` or ``destroy``."""

    def progress(self, comm: CommHandle) -> bool:
        """Whether ``comm`` may be used again; False: still busy. Raises if what it did, or an operation, failed."""

    def group_start(self) -> None:
        """What this thread calls from now on is started at once, by ``group_end``."""

    def group_end(self) -> None: ...

    def group_estimate(self) -> float:
        """End a group without running it; returns the seconds that it would take, negative where NCCL cannot tell.

        To be followed by ``drop_queued``, whatever comes of it.
        """

    def drop_queued(self, comm: CommHandle, buf: int, stream: int) -> None:
        """Make ``comm`` forget what was only estimated. ``buf`` is a byte on the device, which stays as it is."""

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
        """The number of a sum with a factor, for operations on ``comm`` with ``dtype``.

        Args:
            scalar: where the factor is. Read now, or, ``on_device``, when the operations run.
        """

    def drop_reduction(self, op: int, comm: CommHandle) -> None:
        """Forget what ``pre_mul_sum`` gave. Allowed as soon as the calls that use it have returned."""


@cache
def load() -> Nccl:
    """The library. Raises: BackendError naming what is missing and what to install."""
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
    except Exception as exc:  # of nccl4py's and cuda-pathfinder's own kinds
        raise BackendError(
            f"libnccl.so.2 was not found ({_first_line(exc)}): torch brings it if that is built with CUDA, "
            f"and this is torch {torch.__version__}"
        ) from exc
    if number < _OLDEST:
        raise BackendError(
            f"NCCL {_dotted(number)} is too old: asynccomm needs {_dotted(_OLDEST)} or newer; install a newer torch"
        )
    missing = [f"nccl{name}" for name in _NEEDED if not inspect(f"__nccl{name}")]
    if missing:
        raise BackendError(f"the loaded libnccl, version {_dotted(number)}, has no {', '.join(missing)}")
    native = frozenset(name for name, symbol in _OPTIONAL.items() if inspect(f"__nccl{symbol}"))
    return _Loaded(bindings, number, native)


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
    """What to install for this torch. A wrong one would replace the libnccl that torch came with."""
    cuda = torch.version.cuda
    if cuda is None:
        return "asynccomm[cu12] or asynccomm[cu13], and a torch that is built with that CUDA"
    return f"asynccomm[cu{cuda.partition('.')[0]}]"


def _dotted(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0]


@final
class _Loaded:
    """:class:`Nccl`, by the bindings."""

    def __init__(self, bindings: ModuleType, version: int, native: frozenset[str]) -> None:
        self._nccl = bindings
        # A missing function is a RuntimeError of the bindings' own; the backend looks into ``native`` first.
        self._errors = (bindings.NCCLError, RuntimeError)
        # NCCL writes the address of a new communicator into the object that we return, later and from its own thread.
        # So we keep these objects until it has: by the address of the communicator that tells.
        self._awaited: dict[int, list[CommHandle]] = {}
        self.version = version
        self.dtypes = DTYPES
        self.reductions = REDUCTIONS
        self.native = native

    # -- what is rare

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
            except BackendError as exc:  # the others must be ended all the same
                failed.append(exc)
        for address in addresses:
            self._awaited.pop(address, None)
        if failed:
            raise failed[0]

    def revoke(self, comm: CommHandle) -> None:
        self._do("revoke a communicator", comm, self._nccl.comm_revoke, comm, 0)

    def progress(self, comm: CommHandle) -> bool:
        code: int = self._do("ask a communicator for its state", comm, self._nccl.comm_get_async_error, comm)
        if code == _IN_PROGRESS:
            return False
        if code:
            raise self._error("finish what was queued", code, comm)
        if self._awaited:
            self._awaited.pop(int(comm), None)
        return True

    def pre_mul_sum(self, scalar: int, dtype: int, comm: CommHandle, *, on_device: bool) -> int:
        call = self._nccl.red_op_create_pre_mul_sum
        number: int = self._do("make a reduction", comm, call, scalar, dtype, 0 if on_device else 1, comm)
        return number

    def drop_reduction(self, op: int, comm: CommHandle) -> None:
        self._do("drop a reduction", comm, self._nccl.red_op_destroy, op, comm)

    # -- what is frequent

    def group_start(self) -> None:
        self._do("start a group", None, self._nccl.group_start)

    def group_end(self) -> None:
        self._do("start the operations of a group", None, self._nccl.group_end)

    def group_estimate(self) -> float:
        info = self._do("estimate the time of a group", None, self._nccl.group_simulate_end)
        return float(info.estimated_time) * _MICROSECOND

    def drop_queued(self, comm: CommHandle, buf: int, stream: int) -> None:
        # no call does that, but NCCL does when a group fails: so here is one, of a call that is right and one that is
        # not, with a root that there never is
        self._do("start a group", None, self._nccl.group_start)
        for root in (0, _NO_ROOT):
            with contextlib.suppress(*self._errors):
                self._nccl.broadcast(buf, buf, 1, DTYPES[torch.uint8], root, comm, stream)
        try:
            self._nccl.group_end()
        except self._errors:
            return
        raise BackendError("NCCL took a call with a wrong root, and so may have run what was only to be estimated")

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

    # -- how

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
        """End the group that NCCL (2.30) leaves open when it fails early; later calls would wait in it for ever."""
        for _ in range(_DEPTH):
            try:
                self._nccl.group_end()
            except self._errors:  # there is none
                return

    def _struct(self, config: Config | None) -> object:
        if config is None:
            return 0
        struct = self._nccl.Config()
        for field, value in asdict(config).items():
            if value is not None:
                setattr(struct, "comm_name" if field == "name" else field, value)
        return struct
