"""What a backend must promise.

A backend moves tensors for one comm. The comm has checked every argument, numbered the operation and made its Work; the
backend runs it and settles it.

A backend promises:

- ``submit`` returns without waiting for peers. It is called under the comm's lock, so in sequence order, from any
  thread. An exception out of it means that nothing of the batch was handed on.
- Collectives take effect in the order of submission on every rank. Point-to-point operations are ordered per pair and
  tag, and never hold up a collective, nor each other across pairs or tags.
- A batch is the same on all ranks as far as its collectives go, and no two of its operations touch memory that one of
  them writes: so they may run in any order, or all at once.
- Each submission is settled exactly once when the operation is over, from any thread, and references to its tensors
  are kept until then, also when the Work failed early because the comm broke.
- A transport error goes to ``context.on_error``; the comm decides what it means and fails what is pending.
- Parcels (``ops.Parcels``, ``ops.SendParcel``, ``ops.RecvParcel``) go to where ``Submission.place`` says; an error out
  of that settles the Work with it, and the comm goes on. See ``backends/delivery.py``.
- An operation gives the result that it would give if no two of its tensors shared memory, and its ``copies`` are made
  when it takes effect: see ``backends/hazards.py``.
- all_reduce is bitwise the same on all ranks; half types accumulate in fp32; inputs are untouched unless they are
  outputs too; a world of one rank works and still applies AVG and PREMUL_SUM.
- ``abort`` waits for nobody, ends everything in flight here and makes the peers' operations fail, if it can.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from asynccomm.core.handles import Handle
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, BackendError, BrokenError
from asynccomm.ops import Begin, Call, Op, Parcel, PayloadAllocator
from asynccomm.ops.validation import CommInfo
from asynccomm.store.base import Store

__all__ = ["Backend", "BackendContext", "RankInfo", "Submission", "UnsuitableError"]


class UnsuitableError(BackendError):
    """The backend cannot serve these ranks, where another may; no rank has connected.

    A backend raises it from ``connect`` on all ranks or on none, so that all go on to the same next one.
    """


@final
class Submission:
    """One operation in the hands of a backend: what to do, with which tensors, and whom to tell.

    It owns the tensors until the backend lets go of it, with the memory that they had when it was made: they are
    detached, so ``tensor.data = ...`` frees nothing under an operation, and autograd sees nothing of it. Where an
    operation works in place, ``inputs`` is ``outputs``.

    Args:
        detached: its tensors are so already.
    """

    # most have these: what is not assigned takes no time
    parcels: tuple[Parcel, ...] = ()
    place: PayloadAllocator | None = None
    begin: Begin | None = None
    copies: tuple[tuple[Tensor, Tensor], ...] = ()  #: to be made by ``hazards.load``; none once they are
    #: what ``Backend.origin`` said at the call, if that was some time ago; of collectives of tensors that were merged
    #: into one, a tuple of what it said at each
    origin: Any = None
    members: tuple[Op, ...] = ()  #: what it was merged from, for errors
    numbers: tuple[int, ...] = ()  #: and how they are numbered
    error: AsyncCommError | None = None  #: what the Work is to fail with, while the comm goes on
    whole: Any = None  #: for the comm: what it is a part of
    batch: Any = None  #: for the backend: what it was submitted with

    def __init__(self, call: Call, work: Work[Any], *, detached: bool = False) -> None:
        self.op: Op = call.op
        inputs, outputs = call.inputs, call.outputs
        if detached:
            self.inputs, self.outputs = inputs, outputs
        elif outputs is inputs and len(inputs) == 1:  # the usual case, and this is on the way of every small operation
            self.inputs = self.outputs = (inputs[0].detach(),)
        else:
            self.inputs = held = tuple([tensor.detach() for tensor in inputs])
            self.outputs = held if outputs is inputs else tuple([tensor.detach() for tensor in outputs])
        self.nbytes = _nbytes(self.inputs)  #: of the larger side, as far as that is known
        if outputs is not inputs:
            self.nbytes = max(self.nbytes, _nbytes(self.outputs))
        self.work = work
        if call.place is not None:
            self.place = call.place
        if call.begin is not None:
            self.begin = call.begin
        if call.copies:
            self.copies = tuple([(memory, tensor.detach()) for memory, tensor in call.copies])
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
    """What a rank told the others when it joined."""

    rank: int
    host: str
    pid: int


@final
@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a backend gets to build itself from."""

    group: CommInfo
    members: Sequence[RankInfo]  #: in rank order
    store: Store  #: keys here are this comm's and this backend's alone
    mailbox: Mailbox
    timeout: float  #: seconds allowed for connecting
    on_error: Callable[[BrokenError], object]  #: tell it that the transport failed; from any thread
    hints: Mapping[str, str] = field(default_factory=dict)  #: checked; only keys of ``Backend.hints``
    high_priority_stream: bool = False  #: for GPUs

    async def all_connected(self) -> None:
        """Wait until all ranks have called this: a comm that is closed at once would break connections being made.

        The ranks count themselves in the store. A collective of the transport would fail with an error of the transport
        if a rank died meanwhile.
        """
        if await self.store.add("connected", 1) == self.group.size:
            await self.store.set("all connected", b"1")
        await self.store.wait(["all connected"], math.inf)


class Backend(Handle, abc.ABC):
    """Moves tensors for one comm; see the module's docstring for what it promises."""

    _instead = "make a comm there, by asynccomm.new_comm()"

    name: ClassVar[str]
    devices: ClassVar[frozenset[str]]  #: device types whose tensors it takes
    hints: ClassVar[Mapping[str, str]] = {}  #: hints it understands, with what they mean
    any_source: ClassVar[bool] = True  #: whether a receive may leave its source open
    compares: ClassVar[bool] = False  #: whether it sees itself when ranks issue different collectives
    uid: int = -1  #: tells its connection from others, the same on all ranks; -1: it has no such number
    merged_bytes: ClassVar[int] = 1 << 20  #: of one operation up to which it gains by being merged with others

    @classmethod
    @abc.abstractmethod
    async def connect(cls, context: BackendContext) -> Self:
        """Meet the other ranks. Collective; cancelling it cleans up.

        What it returns may be closed at once, and the others connect all the same.

        Raises: ValueError for a hint's value, UnsuitableError on all ranks alike, BackendError.
        """

    @classmethod
    def check_hints(cls, hints: Mapping[str, str]) -> None:
        """Raise ``ValueError`` naming the hint whose value is no good. Called before anybody is met."""

    @abc.abstractmethod
    def submit(self, batch: Sequence[Submission]) -> None:
        """Start the operations of ``batch``, which belong together, in order."""

    def origin(self) -> Any:
        """Where the calling thread's tensors come from at this moment, for what is called now and submitted later.

        It goes into ``Submission.origin``. None: the backend does not care. From any thread, with or without the lock.
        """
        return None

    def estimate(self, batch: Sequence[Submission]) -> Future[float]:
        """How many seconds the collectives of ``batch`` will probably take; none of them runs, or is settled.

        A collective itself, called like ``submit``: under the comm's lock and by all ranks in the same place, since the
        backend may have to connect for it. It cannot be cancelled, and may be done by any thread.

        Raises: ValueError for what is no collective of tensors, RuntimeError in a capture, NotImplementedError.
        """
        raise NotImplementedError(f"backend {self.name!r} cannot estimate how long operations take")

    def hurry(self, work: Work[Any]) -> None:
        """A task on the loop is about to suspend: settle ``work`` now if that takes no longer than a wake-up would."""

    def relieve(self, work: Work[Any]) -> None:
        """A thread is about to block, maybe the one that should run the loop: do not rely on the loop for ``work``."""

    def catch_up(self) -> None:
        """Another rank has failed, and what is pending is about to: settle first what needs nobody else any more.

        From any thread; takes no longer than a moment.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Free everything. Nothing is in flight any more."""

    @abc.abstractmethod
    def abort(self) -> None:
        """End everything in flight at once; from any thread, more than once."""

    def abandon(self) -> None:
        """The process is ending with this open: leave nothing running that could not take it. May block a little."""
        self.abort()


def own_hints(backend: type[Backend], hints: Mapping[str, str]) -> dict[str, str]:
    """Those of ``hints`` that are for ``backend``, where others may be chosen in its place."""
    return {key: value for key, value in hints.items() if key in backend.hints}


def device_of(value: str | torch.device) -> torch.device:
    """``value`` as a device; "cuda" is the current one. Raises ``ValueError`` naming it."""
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as exc:
        raise ValueError(f"device must name a torch device such as 'cpu' or 'cuda:0', got {value!r}") from exc
    if device.type == "cpu":
        return torch.device("cpu")  # tensors are on "cpu", never on "cpu:0"
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
