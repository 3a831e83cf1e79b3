"""What a comm is, and how its methods send."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from asynccomm.backends.base import Backend
from asynccomm.comm.in_flight import CommStatistics
from asynccomm.comm.session import Session
from asynccomm.core.handles import Handle
from asynccomm.core.work import Work
from asynccomm.errors import ClosedError
from asynccomm.ops import Call
from asynccomm.options import CommOptions


class CommBase(Handle):
    """Properties of a comm, and the one way in which everything is submitted."""

    _instead = "make a comm there, by asynccomm.new_comm() or comm.split()"

    def __init__(self, session: Session, backend_name: str) -> None:
        """Not for users: see ``asynccomm.new_comm``."""
        self._session = session
        self._group = session.group
        self._backend_name = backend_name

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's place in the comm, from 0."""
        return self._group.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._group.size

    @property
    def name(self) -> str:
        """The comm's name, the same on all ranks."""
        return self._group.name

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        return self._group.device

    @property
    def backend(self) -> str:
        """Name of the backend in use (never ``"auto"``)."""
        return self._backend_name

    @property
    def options(self) -> CommOptions:
        """What it was made with."""
        return self._session.options

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that its Works are awaited on."""
        return self._session.mailbox.loop

    def unsafe_get_backend(self) -> Backend:
        """The backend itself: an escape hatch, without promises of compatibility."""
        self._session.check_open()
        assert self._session.backend is not None
        return self._session.backend

    def statistics(self) -> CommStatistics:
        """How much is going on."""
        return self._session.statistics()

    def __repr__(self) -> str:
        error = self._session.error
        state = "open" if error is None else "closed" if isinstance(error, ClosedError) else "broken"
        return (
            f"<Comm {self.name!r} rank {self.rank} of {self.size}, {self._backend_name} on {self.device}, {state}, "
            f"{self.statistics().in_flight} in flight>"
        )

    def _submit(
        self,
        call: Call,
        timeout: float | timedelta | None,
        hints: Mapping[str, str] | None,
        tag: str | None = None,
    ) -> Work[Any]:
        if tag is not None:
            call = call.labelled(tag)
        return self._session.submit(call, timeout, hints)

    def _submit_together(
        self,
        calls: Sequence[Call],
        result: Any,
        timeout: float | timedelta | None,
        hints: Mapping[str, str] | None,
        tag: str | None = None,
    ) -> Work[Any]:
        """One Work for all ``calls``, of ``result``."""
        if tag is not None:
            calls = [call.labelled(tag) for call in calls]
        if len(calls) == 1:
            return self._session.submit(calls[0]._replace(result=result), timeout, hints)
        return self._session.submit_together(calls, result, timeout, hints)
