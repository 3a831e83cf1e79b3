"""The contract between a comm and its backend.

A backend moves tensors for one comm. The comm checks every argument, numbers each operation and makes its Work; the
backend runs the operation and settles the Work.

A backend promises:

- ``submit`` returns without waiting for peers. The comm calls it under its lock, hence in sequence order, from any
  thread. If ``submit`` raises, no operation of the batch was started.
- Collectives take effect in the order of submission on every rank. Point-to-point operations are ordered per pair of
  ranks and tag; they never delay a collective, nor point-to-point operations of another pair or tag.
- All ranks submit the same collectives in the same batch, and no two operations of a batch share memory that one of
  them writes. The backend may therefore run the operations of a batch in any order, or all at once.
- Each submission is settled, from any thread, when its operation is over. The first outcome counts: settling again has
  no effect. The backend keeps references to the tensors of the submission until its operation is over, even if the Work
  failed earlier because the comm broke.
- A transport error goes to ``context.on_error``. The comm interprets the error and fails all pending operations.
- Payloads of parcels (``ops.Parcels``, ``ops.SendParcel``, ``ops.RecvParcel``) are received into the tensors that
  ``Submission.place`` returns. If ``place`` raises, the Work fails with that error and the comm stays usable.
  ``backends/delivery.py`` implements this part.
- The result of an operation does not depend on whether its tensors share memory, and the backend makes the submission's
  ``copies`` when the operation takes effect. ``backends/hazards.py`` implements both.
- The result of all_reduce is bitwise the same on all ranks. Half types accumulate in fp32. Inputs are never written,
  unless they are also outputs. A comm of one rank works, and still applies AVG and PREMUL_SUM.
- ``abort`` waits for no peer. It ends all operations in flight on this rank and, if the transport can, makes the
  operations of the peers fail.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol, Self, final

import torch
from torch import Tensor

from asynccomm.backends.claims import Claim
from asynccomm.core.callsite import CallSite
from asynccomm.core.handles import Handle
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.state import CallCounts, CallLog
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, BackendError, BrokenError
from asynccomm.ops import Begin, Call, Fill, Op, Parcel, PayloadAllocator, Several, WindowInfo
from asynccomm.ops.validation import CommInfo
from asynccomm.store.base import Store

__all__ = [
    "Backend",
    "BackendContext",
    "BackendWindow",
    "ConnectionEndedError",
    "DirectCalls",
    "FastCalls",
    "HeldCall",
    "RankInfo",
    "Submission",
    "UnsuitableError",
]

ANNOUNCE_SECONDS: Final = 0.5  # until a rank looks for the announcement in the store, too
SOON_SECONDS: Final = 0.02  # in which ranks usually connect; only slower ones use the store


class UnsuitableError(BackendError):
    """The backend cannot serve these ranks, where another backend may; no rank has connected.

    A backend raises this error from ``connect`` on all ranks or on none, so that all ranks try the same backend next.
    """


@final
class ConnectionEndedError(BackendError):
    """The connection with a rank has ended. The comm raises ``closed`` instead where that rank has closed the comm.

    Args:
        rank: the rank at the other end.
        reason: the way in which the connection ended.
        op: the operation that needs it; empty: unknown.
        message: whether ``op`` is a message, else a collective.
    """

    rank: int
    reason: str
    op: str
    message: bool

    def __init__(self, rank: int, reason: str, op: str = "", message: bool = False) -> None:
        super().__init__(rank, reason, op, message)
        self.rank, self.reason, self.op, self.message = rank, reason, op, message

    def __str__(self) -> str:
        return f"{self.op}: rank {self.rank}: {self.reason}" if self.op else f"rank {self.rank}: {self.reason}"

    @property
    def closed(self) -> BackendError:
        """The error where the rank has closed the comm in order."""
        need = f", and {self.op} needs it" if self.message else f" and takes no part in {self.op}"
        return BackendError(f"rank {self.rank} has closed the comm{need if self.op else ''}")


@final
class Submission:
    """One operation as the backend receives it: its description, its tensors, and the Work to settle.

    A submission keeps its tensors alive until the backend drops it. The tensors are detached when the submission is
    made: ``tensor.data = ...`` cannot free memory under an operation, and autograd does not record the operation. For
    an operation that works in place, ``inputs is outputs``.

    Args:
        detached: the tensors of ``call`` are detached already.
    """

    # class-level defaults: unset fields cost nothing per submission
    parcels: tuple[Parcel, ...] = ()
    place: PayloadAllocator | None = None
    begin: Begin | None = None
    keep: Callable[[], object] | None = None
    copies: tuple[tuple[Fill, Tensor], ...] = ()  #: functions and the tensors they copy: ``hazards.load``, once
    #: the result of ``Backend.call_context`` at the call, if the call came before the submission; for a fused operation
    #: a tuple of the results at its members' calls
    call_context: Any = None
    members: tuple[Op, ...] = ()  #: operations fused into this one, for errors
    numbers: tuple[int, ...] = ()  #: sequence numbers of ``members``
    error: AsyncCommError | None = None  #: the error that fails the Work while the comm stays usable
    whole: Any = None  #: for the comm: the CompositeWork that this operation is part of
    batch: Any = None  #: for the backend: the batch of the submission
    run: Any = None  #: for the backend: the run of the operation, if its fast path has made it
    claim: Claim | None = None  #: of a receive that other backends have, too
    owners: object = None  #: keeps the memory of ``run`` alive, where the submission has no tensors

    def __init__(self, call: Call, work: Work[Any], *, detached: bool = False) -> None:
        self.op: Op = call.op
        self.inputs: tuple[Tensor, ...]
        self.outputs: tuple[Tensor, ...]
        inputs, outputs = call.inputs, call.outputs
        if detached:
            self.inputs, self.outputs = inputs, outputs
        elif outputs is inputs and len(inputs) == 1:  # the usual case, on the path of every small operation
            self.inputs = self.outputs = (inputs[0].detach(),)
        else:
            self.inputs = held = tuple([tensor.detach() for tensor in inputs])
            self.outputs = held if outputs is inputs else tuple([tensor.detach() for tensor in outputs])
        self.nbytes: int = _nbytes(self.inputs)  #: bytes of the larger side, as far as the sizes are known
        if outputs is not inputs:
            self.nbytes = max(self.nbytes, _nbytes(self.outputs))
        self.work = work
        if call.place is not None:
            self.place = call.place
        if call.begin is not None:
            self.begin = call.begin
        if call.keep is not None:
            self.keep = call.keep
        if call.copies:
            self.copies = tuple([(fill, tensor.detach()) for fill, tensor in call.copies])
        if call.parcels or call.expected:
            self.parcels = call.parcels
            self.nbytes = max(call.expected, *[parcel.nbytes for parcel in call.parcels], 0)


def _nbytes(tensors: tuple[Tensor, ...]) -> int:
    if len(tensors) == 1:
        return tensors[0].nbytes
    return sum([tensor.nbytes for tensor in tensors])


@final
@dataclass(frozen=True, slots=True)
class RankInfo:
    """The identity that a rank sends to the others when it joins."""

    rank: int
    host: str  #: its name; a number is added where several hosts have one name
    pid: int
    network: str = ""  #: a number, equal for ranks that reach each other by loopback
    address: str = ""  #: that the ranks on other hosts reach; empty: they are all on one host
    number: int = 0  #: of the process in dumps and traces, see ``launchers.process_number``


class Announcements(Protocol):
    """A way beside the store, and faster, for one announcement of rank 0 to the other ranks."""

    def announce(self, text: str) -> None:
        """Send ``text`` to the other ranks."""

    async def announced(self) -> str:
        """Wait for the text."""


@final
@dataclass(frozen=True, slots=True)
class BackendContext:
    """Everything that a backend needs to connect and to report to its comm."""

    group: CommInfo
    members: Sequence[RankInfo]  #: in rank order
    store: Store  #: a store prefix that only this backend of this comm uses
    mailbox: Mailbox
    timeout: float  #: seconds allowed for connecting
    on_error: Callable[[BrokenError], object]  #: reports a failure of the transport; callable from any thread
    hints: Mapping[str, str] = field(default_factory=dict)  #: already checked; only keys of ``Backend.hints``
    high_priority_stream: bool = False  #: for GPU backends
    announcements: Announcements | None = None  #: None: there is only the store
    secret: bytes = field(default=b"", repr=False)  #: as secret as the tokens of the job; empty: there is none
    alternatives: bool = False  #: whether another backend is tried if this one raises UnsuitableError

    def announce(self, text: str) -> Coroutine[Any, Any, None]:
        """Send ``text`` to the other ranks; rank 0 calls this once, and awaits the result or cancels it when all came.

        The text goes to the store at once if there is no other way, and else for ranks that do not come soon.
        """
        if self.announcements is not None:
            self.announcements.announce(text)
        return self._store_announcement(text)

    async def _store_announcement(self, text: str) -> None:
        if self.announcements is not None:
            await asyncio.sleep(SOON_SECONDS)
        await self.store.set("address", text)

    async def announced(self) -> bytes:
        """The announcement of rank 0."""
        if self.announcements is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANNOUNCE_SECONDS):
                    return (await self.announcements.announced()).encode()
        return await self.store.get("address", math.inf)

    async def all_connected(self) -> None:
        """Wait until all ranks have called this: closing a comm earlier would break connections still being made.

        The ranks count themselves in the store. A collective of the transport could do the same, but would raise a
        transport error if a rank died in the meantime.
        """
        if await self.store.add("connected", 1) == self.group.size:
            await self.store.set("all connected", b"1")
        await self.store.wait(["all connected"], math.inf)

    async def first_problem(self, mine: str) -> tuple[int, str] | None:
        """The lowest rank that has a problem, and the problem; None if no rank has one. Collective, once.

        Rank 0 reads the problems of all ranks, so that the number of requests is proportional to the number of ranks.

        Args:
            mine: the problem of this rank; empty: it has none.
        """
        await self.store.set(f"problem/{self.group.rank}", mine)
        if self.group.rank == 0:
            posted = await self.store.multi_get([f"problem/{rank}" for rank in range(self.group.size)], math.inf)
            found = next(((rank, text) for rank, text in enumerate(posted) if text), (0, b""))
            await self.store.set("first problem", b"%d %b" % found)
        rank, _, text = (await self.store.get("first problem", math.inf)).partition(b" ")
        return (int(rank), text.decode(errors="replace")) if text else None


class HeldCall(Protocol):
    """A call that a backend's fast path holds, in place of a Submission: for a scope, or until the other rank comes."""

    @property
    def op(self) -> Op: ...

    @property
    def work(self) -> Work[Any]: ...

    @property
    def nbytes(self) -> int:
        """As of a Submission."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Those of ``DirectCalls.call`` from ``check`` on, with tuples in place of lists."""

    @property
    def run(self) -> object:
        """As of a Submission, if the operation has begun; else None."""

    @property
    def places(self) -> Sequence[tuple[torch.UntypedStorage, int, int, tuple[int, ...], torch.dtype]]:
        """Storage, offset in elements, address, shape and dtype of each tensor among the arguments, as at the call."""


class FastCalls(Protocol):
    """A backend's fast path."""

    def submit(self, timeout: Any, hints: Any, tag: Any, check: Callable[..., Any], /, *arguments: Any) -> Work[Any]:
        """Submit a call, as ``DirectCalls.call`` does, or hold it in the queue of the caller's scope."""

    def flush(self, items: list[Any], /) -> bool | None:
        """Send the operations of a queue if it has held all of them; None: the submitter has to. Under the lock."""


class DirectCalls(Protocol):
    """The part of a comm that a backend's fast path works for."""

    group: CommInfo
    mailbox: Mailbox
    counts: CallCounts
    recent: CallLog[Any]
    notes: deque[
        Any
    ]  #: calls that are done, as ``recent`` has them, for the watchers; if ``counts.noted_calls`` is not 0
    records_sites: bool
    queues: dict[object, Any]  #: of scopes, by the task or thread
    in_flight: Any

    @property
    def driver(self) -> Any:
        """The ``Driver`` of Works, for messages that the fast path posts; None: it posts none."""

    @property
    def posted(self) -> Callable[[HeldCall], Submission]:
        """Makes the submission of a message that the fast path has posted, and watches its deadline from then on.

        It refers to no backend. Raises: ValueError if memory of its tensor was freed.
        """

    @property
    def compares(self) -> bool:
        """Whether ``numbered`` compares calls with those of other ranks, which is one of ``counts.detours``."""

    def note(self) -> object:
        """Let the watchers have the ``notes``; called when there are ``counts.noted_calls`` of them."""

    @property
    def lock(self) -> Any:
        """An RLock, held while submitting."""

    def call(
        self, timeout: Any, hints: Any, tag: Any, check: Callable[..., Call | Several], *arguments: Any
    ) -> Work[Any]:
        """Submit ``check(group, *arguments)``."""

    def submit_made(self, made: Call | Several, timeout: Any, hints: Any, tag: Any) -> Work[Any]:
        """Submit calls that are checked already."""

    def adopt(
        self, run: object, arguments: Sequence[Any], result: object, site: CallSite | None, started: float
    ) -> Work[Any]:
        """Submit a call that has begun as ``run``, which then is ``Submission.run``.

        Args:
            arguments: those of ``call`` from ``check`` on, with tuples in place of lists.
            result: of awaiting the Work.
        """

    def number(self, call: Call, nbytes: int, site: CallSite | None, started: float) -> Work[Any]:
        """The Work of a collective that the backend has begun, and that it settles itself. Under the lock.

        Only for a call as the comm would number it at once: not closed, without scopes, and without detours but that of
        ``compares``.
        """

    def numbered(self, call: Call, work: Work[Any]) -> object:
        """Have the comm watch a Work of ``number``, once the backend has taken it. Under the lock."""

    def overdue(self, work: Work[Any]) -> object:
        """Break when a thread has waited for ``work`` past its deadline."""

    def fusion_kind(self, op: Op) -> int | None:
        """A number, equal for held operations that are sent as one; 0: ``op`` is sent alone; None: Python holds it."""

    @property
    def fused_limit(self) -> int:
        """``Backend.fused_limit``."""

    def fused(self, held: Sequence[HeldCall]) -> tuple[Call, Sequence[Any]]:
        """The one call that several held calls become, and the arguments of all of them, as at the calls."""

    def note_deadline(self, queue: Any, work: Work[Any]) -> object:
        """Have the comm look at the deadline of ``work``, which ``queue`` holds."""

    def adopt_held(self, left: Sequence[tuple[object, Op, Sequence[HeldCall]]]) -> object:
        """Submit the operations of held calls that ``FastCalls.flush`` has numbered; the first has begun.

        Args:
            left: of each operation its run, the operation, and the calls.
        """


class FastWindow(Protocol):
    """A backend's fast path for a window. A method returns None if the ordinary path has to take the call."""

    def put(self, tensor: Any, rank: Any, offset: Any, /) -> Work[Any] | None:
        """See ``Window.put``."""

    def get(self, tensor: Any, rank: Any, offset: Any, /) -> Work[Any] | None:
        """See ``Window.get``."""

    def signal(self, rank: Any, slot: Any, value: Any, add: Any, /) -> Work[Any] | None:
        """See ``Window.signal``."""

    def wait_signal(self, slot: Any, value: Any, cmp: Any, /) -> Work[Any] | None:
        """See ``Window.wait_signal``."""

    def fence(self, rank: Any, /) -> Work[Any] | None:
        """See ``Window.fence``."""


class BackendWindow(abc.ABC):
    """One rank's access to a window, which has memory and signals on each rank. A backend promises:

    - The operations of one rank on one target take effect in their order, so a rank that sees a signal sees the earlier
      puts of its origin. ``wait_signal`` is outside of this order: neither kind of operation waits for the other.
    - No operation needs the event loop of the target, nor any thread of the program.
    - A put is done when its tensor may be changed; a fence is done when the earlier operations have taken effect.
    - Accumulates to one rank are atomic among each other.
    - Views of the memory stay valid after the window has ended.

    A backend that reaches its peers by several transports makes a window of each, and routes by ``WindowOp.peer``.
    """

    def fast_path(self, calls: FastCalls | None) -> FastWindow | None:
        """The fast path of this window's operations on a comm with the fast path ``calls``; None: there is none."""
        return None

    @abc.abstractmethod
    def memory(self, rank: int) -> Tensor | None:
        """The memory of ``rank`` as a flat tensor of bytes; None if this process cannot map it."""

    @abc.abstractmethod
    def load(self, slot: int) -> int:
        """The value of a signal of this rank."""

    @abc.abstractmethod
    def submit(self, batch: Sequence[Submission]) -> None:
        """Start operations; see ``Backend.submit``. Under the comm's lock."""

    def before_await(self, work: Work[Any]) -> None:
        """See ``Backend.before_await``."""

    def before_block(self, work: Work[Any]) -> None:
        """See ``Backend.before_block``."""

    @abc.abstractmethod
    def end_waits(self, error: AsyncCommError) -> None:
        """Fail the pending waits for signals. From any thread."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Drop all operations. From any thread, more than once."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free all resources but the memory, which lives as long as its views. On the loop, more than once."""


class Backend(Handle, abc.ABC):
    """The transport of one comm; the module's docstring states the contract."""

    _instead = "make a comm there, by asynccomm.new_comm()"

    name: ClassVar[str]
    devices: ClassVar[frozenset[str]]  #: device types of the tensors that the backend moves
    hints: ClassVar[Mapping[str, str]] = {}  #: hints that the backend accepts, with their descriptions
    any_source: ClassVar[bool] = True  #: whether a receive may leave its source open
    compares: ClassVar[bool] = False  #: whether the backend itself detects that ranks issued different collectives
    uid: int = -1  #: identifies the connection, equal on all ranks; -1: no such number
    fusion_limit: ClassVar[int] = 1 << 20  #: size of the largest operation that gains from being fused with others
    fused_limit: ClassVar[int] = 1 << 62  #: size up to which operations that are fused gain from more of them

    @classmethod
    @abc.abstractmethod
    async def connect(cls, context: BackendContext) -> Self:
        """Connect to the other ranks. Collective; a cancelled call cleans up.

        A rank may close its backend as soon as ``connect`` returns; the other ranks still connect.

        Raises: ValueError for a hint's value, UnsuitableError on all ranks alike, BackendError.
        """

    @classmethod
    def check_hints(cls, hints: Mapping[str, str]) -> None:
        """Raise ``ValueError`` naming a hint whose value is invalid. Called before any connection is made."""

    @abc.abstractmethod
    def submit(self, batch: Sequence[Submission]) -> None:
        """Start the operations of ``batch`` in order; they belong together."""

    def fast_path(self, calls: DirectCalls) -> FastCalls | None:
        """The functions that submit and hold usual calls faster than ``calls``, in C; None: there are none.

        It counts calls and notes them in ``calls.recent`` as ``calls`` does. It may look out for late ranks for some
        microseconds; a call that is not done then goes on by ``calls.adopt``.
        """
        return None

    def call_context(self) -> Any:
        """The calling thread's context, such as its CUDA stream, for an operation called now and submitted later.

        The comm stores the result in ``Submission.call_context``. None: the backend needs no such context. The comm
        calls this method from any thread, with or without its lock.
        """
        return None

    def estimate(self, batch: Sequence[Submission]) -> Future[float]:
        """The estimated seconds that the collectives of ``batch`` will take; none of them runs, or is settled.

        The estimate is itself a collective, called like ``submit``: under the comm's lock and by all ranks at the same
        place in the sequence, since the backend may have to connect for it. Any thread may complete the future, which
        cannot be cancelled.

        Raises: ValueError for anything but a collective of tensors, RuntimeError in a capture, NotImplementedError.
        """
        raise NotImplementedError(f"backend {self.name!r} cannot estimate how long operations take")

    def shared_tensor(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor with any content that other ranks of the host can read without a copy. From any thread.

        Only for backends with ranks that read each other's tensors. Raises: MemoryError.
        """
        raise NotImplementedError(f"backend {self.name!r} shares no tensors")

    async def register(self, tensor: Tensor) -> None:
        """Register the memory of a tensor, so that collectives need no copy of it. Not collective; on the loop.

        The backend keeps the tensor until ``deregister``, or its end.

        Raises: ValueError for a tensor that cannot be registered, or is; NotImplementedError; RuntimeError;
            BackendError.
        """
        raise NotImplementedError(
            f"backend {self.name!r} registers no tensors: comm.empty() and comm.memory() make tensors that the ranks "
            "of a host read without a copy, where a backend can"
        )

    async def deregister(self, tensor: Tensor) -> None:
        """End a registration, once the collectives submitted so far are over. Raises: ValueError, BackendError."""
        raise ValueError(f"tensor must be registered, and backend {self.name!r} registers no tensors")

    async def window(self, window: WindowInfo) -> BackendWindow:
        """Make a window. Collective, without a timeout; a cancelled call cleans up.

        The backend closes its windows when it is closed or aborted.

        Raises: UnsuitableError on all ranks alike, PeerLostError, NotImplementedError.
        """
        raise NotImplementedError(f"backend {self.name!r} has no windows")

    def before_await(self, work: Work[Any]) -> None:
        """Settle ``work`` now if that takes no longer than a wake-up: a task on the event loop is about to await it."""

    def before_block(self, work: Work[Any]) -> None:
        """Complete ``work`` without the event loop: a thread is about to block on it, maybe the loop's own."""

    def advice(self) -> Sequence[str]:
        """Possible reasons why an operation that all ranks have called does not end."""
        return ()

    def withdraw_tensors(self) -> None:
        """Make other ranks fail that read this rank's tensors from now on, so that none uses the data.

        Called before the Work of a failed operation is settled: afterwards the program may change the tensors. From any
        thread, under the comm's lock for failures; returns at once. Only for backends with ranks that read each
        other's tensors.
        """

    def drain_before_failure(self) -> None:
        """Settle the operations that need no more data from peers: another rank failed, so the rest will fail.

        Called from any thread; returns within tens of milliseconds.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Free all resources. The comm calls this method when no operation is in flight."""

    @abc.abstractmethod
    def abort(self) -> None:
        """End all operations in flight at once. Callable from any thread, more than once."""

    def close_at_exit(self) -> None:
        """Stop all threads before the interpreter ends: the process exits with this backend open. May block briefly."""
        self.abort()


def own_hints(backend: type[Backend], hints: Mapping[str, str]) -> dict[str, str]:
    """The ``hints`` that ``backend`` accepts, for callers that may choose another backend instead."""
    return {key: value for key, value in hints.items() if key in backend.hints}


def device_of(value: str | torch.device) -> torch.device:
    """``value`` as a device; "cuda" means the current one. Raises ``ValueError`` naming the value."""
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as exc:
        raise ValueError(f"device must name a torch device such as 'cpu' or 'cuda:0', got {value!r}") from exc
    if device.type == "cpu":
        return torch.device("cpu")  # tensors report "cpu", never "cpu:0"
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
