"""Connecting a session: a backend that suits, the ranks that do not come, and the error of a failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace

from asynccomm.backends.base import SOON_SECONDS, Backend, BackendContext, UnsuitableError, own_hints
from asynccomm.comm.reporter import Reporter
from asynccomm.comm.session import EXPLAIN_SECONDS, Session
from asynccomm.errors import AsyncCommError, BackendError, BrokenError, PeerLostError, StoreError
from asynccomm.store.base import within

ABSENT_SECONDS = 2.0  # for the store to list the ranks that came
CONNECT_SECONDS = 0.5  # to wait for the reason of an error; short, as ranks that saw this one leave wait for it, too
CLOSED_SECONDS = 2.0  # that a rank goes on connecting after a member has closed the comm that is split

_log = logging.getLogger("asynccomm")


async def connect_session(
    session: Session,
    backends: Mapping[str, type[Backend]],
    timeout: float,
    parent: Session | None = None,
) -> None:
    """Connect the first of ``backends`` that suits, and accept calls. Any failure ends the session.

    Args:
        backends: by name, in the order to try them.
        timeout: seconds.
        parent: the comm that is split; its failure fails this session while it connects, as ranks may be missing.
    """
    if parent is not None:
        parent.children.add(session)
    may_connect = parent is None or parent.error is None
    try:
        async with within(timeout) as session.connecting:
            if isinstance(session.error, BrokenError):  # broken before connecting began
                raise session.error
            if parent is not None:
                parent.submitter.check_open()
            loop = session.mailbox.loop
            beside: list[asyncio.Task[None]] = []

            def connects_slowly() -> None:
                beside.append(loop.create_task(_note_presence(session)))
                if parent is not None and parent.reporter is not None:
                    beside.append(loop.create_task(_miss_members(session, parent.group.name, parent.reporter)))

            soon = loop.call_later(min(SOON_SECONDS, timeout / 4), connects_slowly)
            try:
                await _connect_first(session, backends, timeout)
            finally:
                soon.cancel()
                for task in beside:
                    task.cancel()
        session.connecting = None
        if session.options.ordering == "agreed":
            session.resources.push_async_callback(session.submitter.start_ordering().aclose)
        if isinstance(session.error, BrokenError):  # broken while connecting
            session.submitter.abort()
            raise session.error
    except BaseException as exc:
        session.connecting = None
        reason = exc
        try:
            if may_connect:  # else the parent's error is the reason
                reason = await _connect_error(session, exc, split=parent is not None)
        finally:
            # other ranks may still wait for this one; an unsuitable backend fails on all ranks by itself
            session.fail(session.gave_up(reason), notify=not isinstance(reason, UnsuitableError))
            session.identity.free_name()  # now: closing goes on after a cancellation, and a retry may use the name
            await session.aclose()
        if reason is exc:
            raise
        # a rank that failed shows here as a timeout or as lost: no cause, and many lines of traceback
        raise reason from None if isinstance(exc, (TimeoutError, PeerLostError)) else exc
    finally:
        if parent is not None:
            parent.children.discard(session)


async def _note_presence(session: Session) -> None:
    """Write to the store that this rank came, for the errors of other ranks."""
    with contextlib.suppress(AsyncCommError):  # connecting reports an error of the store that matters
        await session.identity.room.set(f"here/{session.group.rank}", b"1")


async def _miss_members(session: Session, parent: str, reporter: Reporter) -> None:
    """Fail when a member has closed the comm that is split, and so can no longer come.

    A member may close that comm as soon as it has connected, and this rank has soon connected then, too.
    """
    rank = await reporter.closed_by(session.identity.parent_ranks)
    await asyncio.sleep(CLOSED_SECONDS)
    session.fail(BackendError(f"rank {rank} has closed comm {parent!r}, and takes no part in splitting it"))


async def _connect_first(session: Session, backends: Mapping[str, type[Backend]], timeout: float) -> None:
    session.candidates = backends
    last = list(backends)[-1]
    for name, backend in backends.items():
        session.backend_name = name
        hints = own_hints(backend, session.options.hints)
        context = BackendContext(
            group=session.group,
            members=session.identity.members,
            store=session.identity.room.prefix(name),
            mailbox=session.mailbox,
            timeout=timeout,
            on_error=session.transport_failed,
            hints=hints,
            high_priority_stream=session.options.high_priority_stream,
            announcements=session.reporter,
            secret=session.identity.job.secret,
            alternatives=name != last,
        )
        try:
            connected = session.submitter.backend = await backend.connect(context)
        except UnsuitableError as exc:
            if name == last:
                raise
            _log.info("backend %r does not suit, so another is tried: %s", name, exc)
        else:
            session.resources.push_async_callback(connected.aclose)
            if session.reporter is not None and not backend.compares:
                session.submitter.compare(session.reporter.compare)
            if hints != session.options.hints:
                session.options = replace(session.options, hints=hints)
            return


async def _connect_error(session: Session, exc: BaseException, *, split: bool) -> BaseException:
    """The error to raise for ``exc``, which ended connecting; waits for a message with its cause."""
    seconds = 0.0
    if isinstance(exc, PeerLostError):
        seconds = EXPLAIN_SECONDS
    elif isinstance(exc, (BackendError, StoreError)) and not isinstance(exc, UnsuitableError):
        seconds = CONNECT_SECONDS
    if seconds and session.error is None and session.reporter is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds) as session.connecting:
                await session.mailbox.loop.create_future()  # until _end_waits() or the timeout
        session.connecting = None
    late = isinstance(exc, TimeoutError) and not isinstance(exc, AsyncCommError)
    if isinstance(session.error, BrokenError) and (late or seconds):
        return session.error
    if not late:
        return exc
    group = session.group
    limit = session.options.timeout
    error = f"{session.backend_name} did not connect rank {group.rank} of comm {group.name!r} within {limit:g} s"
    with contextlib.suppress(TimeoutError, AsyncCommError):
        async with asyncio.timeout(ABSENT_SECONDS):
            ranks = range(group.size)
            came = await asyncio.gather(*(session.identity.room.check([f"here/{rank}"]) for rank in ranks))
            if absent := [rank for rank in ranks if not came[rank]]:
                # ranks that pass another list meet elsewhere, even if it has the same ranks in another order
                error += f"; ranks {absent} did not come{', or pass another list of ranks' if split else ''}"
    return BackendError(error)
