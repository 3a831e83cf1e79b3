"""Coalescing managers, which submit several collectives in one batch, and time estimators.

Inside a manager without a device, calls of ``all_reduce``, ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` on
its group are only recorded; the end of the block submits them in one batch. All other calls are submitted at once. A
manager with a device defers all operations on that device's comm, as ``comm.coalesce()`` does.

Recorded calls belong to the calling task: other tasks that use the group meanwhile are unaffected.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NoReturn, Self, final

import torch

from asynccomm.comm.comm import Comm, coalesce
from asynccomm.comm.scopes import CoalesceScope, Estimate
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.validation import member_of
from asynccomm.compat.c10d.work import NOTHING, Work
from asynccomm.compat.c10d.world import Group, group_or_default, world
from asynccomm.core import work as _ours
from asynccomm.core.handles import Handle


@final
class CollOp:
    """One recorded call of a collective."""

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: torch.Tensor,
        dst_tensor: torch.Tensor | None = None,
        redop: object = None,
        root: int | None = None,
    ) -> None:
        self.op = op
        self.tensor = tensor
        self.dst_tensor = dst_tensor
        self.redop = redop
        self.root = root


@final
class IllegalWork(Work):
    """Handle of a recorded collective with ``async_op=True``; all methods raise, as no operation was submitted yet."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError("a collective in a coalescing manager was not sent yet: wait for the manager instead")

    wait = synchronize = _refuse  # type: ignore[assignment]
    result = exception = is_success = is_completed = get_future = _refuse
    source_rank = _source_rank = __await__ = _refuse

    def __repr__(self) -> str:
        return "<Work of a coalescing manager, not sent yet>"


@final
class RecordedCalls:
    """Collectives that one task has recorded on a group.

    Args:
        recording: False: calls are not recorded, but submitted into the open coalescing scope.
    """

    def __init__(self, recording: bool) -> None:
        self.recording = recording
        self.ops: list[CollOp] = []
        self._sends: list[tuple[Comm, Callable[[], _ours.Work[Any]]]] = []

    def record(self, op: CollOp, comm: Comm, send: Callable[[], _ours.Work[Any]], async_op: bool) -> Any:
        """Record ``op``, which ``send`` submits on ``comm``.

        Raises: ValueError unless all recorded calls are of one collective and one reduction, as torch merges them.
        """
        if self.ops:
            first = self.ops[0]
            if first.op is not op.op:
                raise ValueError(f"{op.op.__name__} cannot be coalesced with {first.op.__name__}")
            if first.redop is not op.redop and first.redop != op.redop:
                raise ValueError(f"a reduction by {op.redop} cannot be coalesced with one by {first.redop}")
        self.ops.append(op)
        self._sends.append((comm, send))
        return IllegalWork() if async_op else NOTHING

    def send(self) -> list[_ours.Work[Any]]:
        """Submit the recorded calls, in one batch for each comm."""
        if not self._sends:
            return []
        comms = list({id(comm): comm for comm, _ in self._sends}.values())
        with coalesce(*comms) as batch:
            for _, send in self._sends:
                send()
        return batch.works


def recording(pg: ProcessGroup) -> RecordedCalls | None:
    """The recorded calls of this task on the group; None if the task is not recording."""
    state = world().pg_coalesce_state
    if not state:
        return None
    found: RecordedCalls | None = state.get(pg, {}).get(_owner())
    return found if found is not None and found.recording else None


def _owner() -> object:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident() if task is None else task


@final
class CoalescingManager(Handle):
    """Handles of the operations that one coalescing block has submitted."""

    _instead = "make one there"

    def __init__(self) -> None:
        self.works: list[Any] = []

    def append(self, work: Any = None) -> None:
        """Add a handle, unless it is None."""
        if work:
            self.works.append(work)

    async def wait(self) -> None:
        """Wait for all operations."""
        for work in self.works:
            await work


@final
class CoalescingScope(Handle):
    """Context manager returned by :func:`coalescing_manager`."""

    _instead = "make one there"

    def __init__(self, pg: ProcessGroup | None, device: torch.device | None, async_ops: bool) -> None:
        self._pg = pg
        self._device = device
        self._async_ops = async_ops
        self._manager: Final = CoalescingManager()
        self._recording: RecordedCalls | None = None
        self._owner: object = None
        self._batch: CoalesceScope | None = None

    def __enter__(self) -> CoalescingManager:
        if not self._async_ops:
            raise RuntimeError("use `async with`, which waits for the operations, or async_ops=True")
        return self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(kind, exc, traceback)

    async def __aenter__(self) -> CoalescingManager:
        return self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(kind, exc, traceback)
        if exc is None and not self._async_ops:
            works, self._manager.works = self._manager.works, []
            for work in works:
                await work

    def _enter(self) -> CoalescingManager:
        if self._pg is None:
            return self._manager
        mine = world().pg_coalesce_state.setdefault(self._pg, {})
        self._owner = _owner()
        if self._owner in mine:
            raise ValueError(f"{self._pg!r} is in a coalescing manager of this task already")
        if self._device is not None:
            self._batch = self._pg.comm(self._device).coalesce()
            self._batch.__enter__()
        self._recording = mine[self._owner] = RecordedCalls(self._device is None)
        return self._manager

    def _leave(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._recording is None or self._pg is None:
            return
        state = world().pg_coalesce_state
        mine = state.get(self._pg, {})
        mine.pop(self._owner, None)
        if not mine:
            state.pop(self._pg, None)
        if self._batch is not None:
            self._batch.__exit__(kind, exc, traceback)
        if exc is not None:
            return
        works = self._recording.send() if self._batch is None else self._batch.works
        for work in works:
            self._manager.append(Work(work))


def coalescing_manager(
    group: Group = None, device: torch.device | None = None, async_ops: bool = False
) -> CoalescingScope:
    """Defer the collectives called inside, and submit them together at the end of the block.

    ::

        async with _coalescing_manager():
            for tensor in tensors:
                all_reduce(tensor)

    Args:
        device: None: only record calls of ``all_reduce``, ``all_gather_into_tensor`` and ``reduce_scatter_tensor``; all
            recorded calls must be of one of these, with one reduction. Given: defer any operations on this device.
        async_ops: the end of the block does not wait; ``await manager.wait()`` does. Plain ``with`` then works, too.

    If the body raises, the recorded calls are dropped.

    Raises: ValueError on entering inside another manager of this task for the group.
    """
    return CoalescingScope(member_of(group, "_coalescing_manager", 3), device, async_ops)


@final
class TimeEstimator(Handle):
    """Context manager returned by :func:`time_estimator`.

    Attributes:
        estimated_time: duration of the collectives inside, in microseconds, as in torch; None before the block ends.
    """

    _instead = "send its estimated_time"

    def __init__(self, estimate: Estimate) -> None:
        self.estimated_time: float | None = None
        self._estimate = estimate

    async def __aenter__(self) -> Self:
        await self._estimate.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._estimate.__aexit__(kind, exc, traceback)
        if exc is None:
            self.estimated_time = self._estimate.seconds * 1e6


def time_estimator(group: Group = None, device: torch.device | None = None) -> TimeEstimator:
    """Estimate the time of the collectives called inside, which are not run. See ``comm.time_estimator()``.

    Raises: NotImplementedError for all backends except NCCL.
    """
    return TimeEstimator(group_or_default(group).comm(device).time_estimator())
