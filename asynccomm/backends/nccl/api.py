"""The calls of NCCL that the backend uses, their errors, and the values that they take; ``bindings`` makes the calls.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

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
FLOAT8: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
REDUCTIONS: Final[Mapping[RedOpType, int]] = {
    RedOpType.SUM: 0,
    RedOpType.PRODUCT: 1,
    RedOpType.MAX: 2,
    RedOpType.MIN: 3,
    RedOpType.AVG: 4,
}


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


def dotted(number: int) -> str:
    """The version of NCCL as its documents write it: 23007 is 2.30.7."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
