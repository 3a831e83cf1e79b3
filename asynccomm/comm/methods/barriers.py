"""Barriers that do without the backend."""

from __future__ import annotations

from datetime import timedelta

from asynccomm.comm.methods.base import CommBase
from asynccomm.comm.monitored_barrier import MonitoredBarrier
from asynccomm.core.work import Work


class Barriers(CommBase):
    """Barriers that do without the backend."""

    def monitored_barrier(self, timeout: float | timedelta | None = None, wait_all_ranks: bool = False) -> Work[None]:
        """Done when every rank has called it; says who is missing otherwise, and the comm goes on.

        For finding out which rank hangs. It runs over the store, so it works where a collective would not, on every
        device, and takes longer than :meth:`barrier`. It stands outside of the sequence of collectives. Each rank's
        calls are counted: a rank that missed some fails at once, call by call, until it has caught up.

        Args:
            timeout: seconds or a timedelta from the call; None: the comm's.
            wait_all_ranks: name all ranks that are missing, instead of the first.

        Raises: from awaiting: MonitoredBarrierError on all ranks, at most about a second after ``timeout``;
            StoreError.
        """
        if not isinstance(wait_all_ranks, bool):
            raise TypeError(f"wait_all_ranks must be a bool, got {wait_all_ranks!r}")
        session = self._session
        return session.submit_aside(MonitoredBarrier(wait_all_ranks), session.barriers.pass_through, timeout)
