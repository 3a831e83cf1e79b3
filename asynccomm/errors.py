"""The exceptions of this package.

AsyncCommError
 ├─ ClosedError               you closed the comm (or the store) and used it again
 ├─ WouldBlockError           a blocking call on a thread whose event loop is running
 ├─ NotSentError              the operation was held back by a scope and then dropped
 ├─ PayloadError              a peer's message could not be read or did not fit; the comm goes on
 │   └─ PayloadTypeError      an object is not of the type that the receive expects
 ├─ MonitoredBarrierError     ranks did not come to a monitored barrier in time; the comm goes on
 ├─ StoreError                the key-value store that ranks meet on
 │   ├─ StoreProtocolError    the server (or another service on that port) broke the protocol
 │   ├─ StoreTimeoutError     a key did not appear in time
 │   └─ RendezvousError       the ranks could not find or accept each other
 ├─ LeftOutError              the other ranks go on without this one
 └─ BrokenError               the comm is beyond repair; every pending Work fails with it
     ├─ PeerLostError         a rank died
     ├─ CollectiveTimeoutError  an operation passed its deadline
     ├─ CollectiveMismatchError ranks issued different operations
     ├─ AbortedError          a rank called abort(), or left ``async with`` by an exception
     └─ BackendError          the transport below failed

A mistake in an argument is a ``TypeError`` or ``ValueError`` instead, raised by the call itself before anything is
sent. Errors carry data, render it in ``__str__`` and survive pickle: ``args`` are exactly the constructor's arguments.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = [
    "AsyncCommError",
    "ClosedError",
    "WouldBlockError",
    "NotSentError",
    "PayloadError",
    "PayloadTypeError",
    "MonitoredBarrierError",
    "LeftOutError",
    "StoreError",
    "StoreProtocolError",
    "StoreTimeoutError",
    "RendezvousError",
    "BrokenError",
    "PeerLostError",
    "QuorumError",
    "CollectiveTimeoutError",
    "CollectiveMismatchError",
    "AbortedError",
    "BackendError",
]


class Labelled(Protocol):
    """The part of an operation that errors show."""

    @property
    def label(self) -> str: ...


class AsyncCommError(RuntimeError):
    """Root of all errors of this package; a RuntimeError, as the errors of torch.distributed are."""

    observed = False  # set once a Work has delivered the error; unobserved errors are reported


class ClosedError(AsyncCommError):
    """The comm or store was closed by its owner before this call."""


class WouldBlockError(AsyncCommError):
    """A blocking wait was called on a thread with a running event loop; use ``await`` there."""


class NotSentError(AsyncCommError):
    """The operation was held back by a scope, and never sent: the scope was left by an exception, or only estimates.

    Args:
        op: the operation.
        comm: name of the comm, which goes on.
        reason: the end of the scope.
    """

    op: Labelled
    comm: str
    reason: str

    def __init__(self, op: Labelled, comm: str, reason: str) -> None:
        super().__init__(op, comm, reason)
        self.op, self.comm, self.reason = op, comm, reason

    def __str__(self) -> str:
        return f"{self.op} on comm {self.comm!r} was never sent: {self.reason}"


class PayloadError(AsyncCommError):
    """A peer's message does not fit the receive, or cannot be decoded; it is discarded, and the comm goes on."""


class PayloadTypeError(PayloadError, TypeError):
    """A received object is not of the class that the receive has as ``expect``; the comm goes on."""


class MonitoredBarrierError(AsyncCommError, TimeoutError):
    """Ranks did not come to a monitored barrier in time. All ranks raise the same error, and the comm goes on.

    Args:
        comm: name of the comm.
        rank: the rank that detected it.
        missing: ranks that had not come when the wait ended.
        elapsed: seconds since that rank came.
    """

    args: tuple[Any, ...]
    comm: str
    rank: int
    missing: tuple[int, ...]
    elapsed: float

    def __init__(self, comm: str, rank: int, missing: tuple[int, ...], elapsed: float) -> None:
        super().__init__(comm, rank, missing, elapsed)
        self.args = (comm, rank, missing, elapsed)  # OSError, a base of TimeoutError, keeps only two
        self.comm, self.rank, self.missing, self.elapsed = comm, rank, missing, elapsed

    def __str__(self) -> str:
        return (
            f"monitored_barrier on comm {self.comm!r}, rank {self.rank}: "
            f"ranks {list(self.missing)} did not come within {self.elapsed:.1f} s"
        )


class LeftOutError(AsyncCommError):
    """The other ranks go on in another comm, without this rank.

    Args:
        comm: name of the comm.
        reason: why this rank was left out.
    """

    comm: str
    reason: str

    def __init__(self, comm: str, reason: str) -> None:
        super().__init__(comm, reason)
        self.comm, self.reason = comm, reason

    def __str__(self) -> str:
        return f"comm {self.comm!r} goes on without this rank: {self.reason}"


class QuorumError(AsyncCommError):
    """Too few ranks of a comm are left to go on.

    Args:
        comm: name of the comm.
        left: number of ranks that would go on.
        size: of the comm.
        rule: the argument that they do not satisfy.
    """

    comm: str
    left: int
    size: int
    rule: str

    def __init__(self, comm: str, left: int, size: int, rule: str) -> None:
        super().__init__(comm, left, size, rule)
        self.comm, self.left, self.size, self.rule = comm, left, size, rule

    def __str__(self) -> str:
        return f"comm {self.comm!r} does not go on: {self.left} of its {self.size} ranks are left, and {self.rule}"


class StoreError(AsyncCommError):
    """The store failed: the connection was refused or lost, or the store rejected the request."""


class StoreProtocolError(StoreError):
    """The received bytes do not answer the request; the connection is dropped."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key did not appear within its timeout, or the store did not answer."""


class RendezvousError(StoreError):
    """The ranks could not find each other, or their settings differ."""


class BrokenError(AsyncCommError):
    """The comm cannot be used any more; later calls raise this at once."""


class PeerLostError(BrokenError):
    """A rank was lost while other ranks needed it.

    Args:
        rank: the rank that was lost.
        detail: the evidence; the exit code or signal, if the launcher on this host knows it.
        comm: name of the comm that numbers the ranks so; may be empty.
        host: of the lost process.
        pid: of the lost process; 0: unknown.
    """

    rank: int
    detail: str
    comm: str
    host: str
    pid: int

    def __init__(self, rank: int, detail: str, comm: str = "", host: str = "", pid: int = 0) -> None:
        super().__init__(rank, detail, comm, host, pid)
        self.rank, self.detail, self.comm, self.host, self.pid = rank, detail, comm, host, pid

    def __str__(self) -> str:
        process = f", process {self.pid} on {self.host}" if self.pid else ""
        place = f" (comm {self.comm!r}{process})" if self.comm else ""
        return f"rank {self.rank} was lost: {self.detail}{place}"


class CollectiveTimeoutError(BrokenError, TimeoutError):
    """An operation did not finish before its deadline.

    Args:
        op: the operation.
        seq: its number on the comm (collectives and point-to-point are numbered apart); -1 if it was held back.
        comm: name of the comm.
        rank: the rank that reports.
        elapsed: seconds since the call.
        timeout: seconds that were allowed.
        missing: ranks that have not called it, or do not answer; not asked are ranks without a control channel, and
            ranks to which a rank that does not answer would pass the question on.
        arrived: ranks known to have called it.
        doing: for each missing rank, in order, its last call and where, or why it does not answer; may be empty.
        site: call site of the operation, if known.
    """

    op: Labelled
    seq: int
    comm: str
    rank: int
    elapsed: float
    timeout: float
    missing: tuple[int, ...]
    arrived: tuple[int, ...]
    doing: tuple[str, ...]
    site: str

    def __init__(
        self,
        op: Labelled,
        seq: int,
        comm: str,
        rank: int,
        elapsed: float,
        timeout: float,
        missing: tuple[int, ...] = (),
        arrived: tuple[int, ...] = (),
        doing: tuple[str, ...] = (),
        site: str = "",
    ) -> None:
        super().__init__(op, seq, comm, rank, elapsed, timeout, missing, arrived, doing, site)
        self.op, self.seq, self.comm, self.rank = op, seq, comm, rank
        self.elapsed, self.timeout = elapsed, timeout
        self.missing, self.arrived, self.doing, self.site = missing, arrived, doing, site

    def __str__(self) -> str:
        text = (
            f"{self.op}{f' #{self.seq}' if self.seq >= 0 else ''} on comm {self.comm!r}, rank {self.rank}: "
            f"not finished after {self.elapsed:.1f} s, timeout {self.timeout:g} s"
        )
        if self.site:
            text += f", called at {self.site}"
        if self.seq < 0 and self.missing == (self.rank,):
            return text + "; it is still held back here: a scope of coalesce() has not been left"
        if self.seq < 0 and self.missing:
            ranks = f"rank {self.missing[0]} has" if len(self.missing) == 1 else f"ranks {list(self.missing)} have"
            text += f"; {ranks} not issued {repr(self.op.label) if self.op.label else 'it'}"
        elif self.missing:
            text += f"; not arrived: ranks {list(self.missing)}"
        if self.arrived:
            text += f"; arrived: ranks {list(self.arrived)}"
        return "\n".join([text, *(f"  rank {r}: {what}" for r, what in zip(self.missing, self.doing, strict=False))])


class CollectiveMismatchError(BrokenError):
    """Two ranks issued operations that do not match.

    Args:
        seq: number of the operation on the comm; -1 if it was not numbered yet.
        rank, op: one side.
        other_rank, other_op: the other side.
        site, other_site: call site of each side's operation, if known.
    """

    seq: int
    rank: int
    op: str
    other_rank: int
    other_op: str
    site: str
    other_site: str

    def __init__(
        self, seq: int, rank: int, op: str, other_rank: int, other_op: str, site: str = "", other_site: str = ""
    ) -> None:
        super().__init__(seq, rank, op, other_rank, other_op, site, other_site)
        self.seq, self.rank, self.op, self.other_rank, self.other_op = seq, rank, op, other_rank, other_op
        self.site, self.other_site = site, other_site

    def __str__(self) -> str:
        what = f"operation #{self.seq}" if self.seq >= 0 else "an operation"
        mine, theirs = (f" at {site}" if site else "" for site in (self.site, self.other_site))
        return (
            f"{what} differs: rank {self.rank} has {self.op}{mine}, rank {self.other_rank} has {self.other_op}{theirs}"
        )


class AbortedError(BrokenError):
    """The comm was aborted.

    Args:
        rank: the rank that aborted.
        reason: that rank's reason.
    """

    rank: int
    reason: str

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank, self.reason = rank, reason

    def __str__(self) -> str:
        return f"aborted by rank {self.rank}: {self.reason}"


class BackendError(BrokenError):
    """The transport failed; its own error is the cause."""


def describe_exception(exc: BaseException) -> str:
    """The text that describes ``exc``, of any class, in other errors and to other ranks."""
    try:
        text = str(exc)
    except Exception:  # an error in a user's class, which must not replace ``exc``
        text = "<exception str() failed>"  # as in Python's tracebacks
    if not text and type(exc).__name__ == "CancelledError":  # by name, as the import of asyncio takes long
        text = "it was cancelled"
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__
