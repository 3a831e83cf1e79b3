"""Every exception that is ours.

AsyncCommError
 ├─ ClosedError               you closed the comm (or the store) and used it again
 ├─ WouldBlockError           a blocking call on a thread whose event loop is running
 ├─ NotSentError              the operation was held back by a scope and then dropped
 ├─ PayloadError              what a peer sent could not be taken; the comm goes on
 ├─ MonitoredBarrierError     ranks did not come to a monitored barrier in time; the comm goes on
 ├─ StoreError                the key-value store that ranks meet on
 │   ├─ StoreProtocolError    the server (or something else on that port) spoke nonsense
 │   ├─ StoreTimeoutError     a key did not appear in time
 │   └─ RendezvousError       the ranks could not find or accept each other
 ├─ LeftOutError              the other ranks go on without this one
 └─ BrokenError               the comm is beyond repair; every pending Work fails with it
     ├─ PeerLostError         a rank died
     ├─ CollectiveTimeoutError  an operation passed its deadline
     ├─ CollectiveMismatchError ranks issued different operations
     ├─ AbortedError          somebody called abort(), or left ``async with`` by an exception
     └─ BackendError          the transport below failed

A mistake in an argument is a ``TypeError`` or ``ValueError`` instead, raised by the call itself before anything is
sent. Errors carry data, render it in ``__str__`` and survive pickle: ``args`` are exactly the constructor's arguments.
"""

from __future__ import annotations

from typing import Protocol

__all__ = [
    "AsyncCommError",
    "ClosedError",
    "WouldBlockError",
    "NotSentError",
    "PayloadError",
    "MonitoredBarrierError",
    "LeftOutError",
    "StoreError",
    "StoreProtocolError",
    "StoreTimeoutError",
    "RendezvousError",
    "BrokenError",
    "PeerLostError",
    "CollectiveTimeoutError",
    "CollectiveMismatchError",
    "AbortedError",
    "BackendError",
]


class Labelled(Protocol):
    """An operation, as far as errors show it."""

    @property
    def label(self) -> str: ...


class AsyncCommError(RuntimeError):
    """Root of all errors of this package; RuntimeErrors, as those of torch.distributed are."""

    observed = False  # set once somebody has seen it through a Work: what nobody saw is reported


class ClosedError(AsyncCommError):
    """The comm or store was closed by its owner before this call."""


class WouldBlockError(AsyncCommError):
    """A blocking wait was asked for on a thread with a running event loop; use ``await`` there."""


class NotSentError(AsyncCommError):
    """The operation was held back by a scope, and never sent: the scope was left by an exception, or only estimates.

    Args:
        op: the operation.
        comm: name of the comm, which goes on.
        reason: what became of the scope.
    """

    def __init__(self, op: Labelled, comm: str, reason: str) -> None:
        super().__init__(op, comm, reason)
        self.op, self.comm, self.reason = op, comm, reason

    def __str__(self) -> str:
        return f"{self.op} on comm {self.comm!r} was never sent: {self.reason}"


class PayloadError(AsyncCommError):
    """What a peer sent does not fit what was asked for, or cannot be decoded: thrown away, and the comm goes on."""


class MonitoredBarrierError(AsyncCommError, TimeoutError):
    """Ranks did not come to a monitored barrier in time. All ranks raise the same one, and the comm goes on.

    Args:
        comm: name of the comm.
        rank: the rank that found it out.
        missing: ranks that did not come, as far as was waited for.
        elapsed: seconds since that rank came.
    """

    def __init__(self, comm: str, rank: int, missing: tuple[int, ...], elapsed: float) -> None:
        super().__init__(comm, rank, missing, elapsed)
        self.args = (comm, rank, missing, elapsed)  # OSError, which TimeoutError is, keeps two
        self.comm, self.rank, self.missing, self.elapsed = comm, rank, missing, elapsed

    def __str__(self) -> str:
        return (
            f"monitored_barrier on comm {self.comm!r}, rank {self.rank}: "
            f"ranks {list(self.missing)} did not come within {self.elapsed:.1f} s"
        )


class LeftOutError(AsyncCommError):
    """The other ranks of a comm go on as another one, without this rank.

    Args:
        comm: name of the comm.
        reason: why.
    """

    def __init__(self, comm: str, reason: str) -> None:
        super().__init__(comm, reason)
        self.comm, self.reason = comm, reason

    def __str__(self) -> str:
        return f"comm {self.comm!r} goes on without this rank: {self.reason}"


class StoreError(AsyncCommError):
    """The store failed: connection refused, lost, or a request it cannot take."""


class StoreProtocolError(StoreError):
    """Bytes arrived that are no answer to what was asked; the connection is dropped."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key did not appear within its timeout."""


class RendezvousError(StoreError):
    """The ranks could not find each other, or do not fit together."""


class BrokenError(AsyncCommError):
    """The comm cannot be used any more; later calls raise this at once."""


class PeerLostError(BrokenError):
    """A rank went away while others needed it.

    Args:
        rank: the rank that was lost.
        detail: what was seen of it.
    """

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(rank, detail)
        self.rank, self.detail = rank, detail

    def __str__(self) -> str:
        return f"rank {self.rank} was lost: {self.detail}"


class CollectiveTimeoutError(BrokenError, TimeoutError):
    """An operation did not finish before its deadline.

    Args:
        op: the operation.
        seq: its number on the comm (collectives and point-to-point are numbered apart); -1 if it was held back.
        comm: name of the comm.
        rank: the rank that reports.
        elapsed: seconds since the call.
        timeout: seconds that were allowed.
        missing: ranks that have not called it, or do not answer; those without a control channel are not asked.
        arrived: ranks known to have called it.
        doing: by missing rank, in order, what it did last and where, or why it does not say; may be empty.
        site: where it was called, if that is known.
    """

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
    """Two ranks issued operations that do not belong together.

    Args:
        seq: number of the operation on the comm; -1 if it was not numbered yet.
        rank, op: one side.
        other_rank, other_op: the other side.
        site, other_site: where each side called its operation, if that is known.
    """

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
        reason: what it gave as the reason.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank, self.reason = rank, reason

    def __str__(self) -> str:
        return f"aborted by rank {self.rank}: {self.reason}"


class BackendError(BrokenError):
    """The transport failed underneath; its own error is the cause."""
