"""Destruction of groups, and timeouts of their operations.

An operation that exceeds its timeout breaks its group: ``await`` and ``wait()`` of the operation raise, and later calls
raise at once, so no task continues with broken data. No process ends, unless the group was made with
``pg_options=CommOptions(abort_process_on_timeout_or_error=True)``. All backends behave so, and a group can be aborted
at any time: the variables by which torch selects NCCL's behaviour (TORCH_NCCL_ASYNC_ERROR_HANDLING,
TORCH_NCCL_BLOCKING_WAIT) are ignored.
"""

from __future__ import annotations

import warnings
from datetime import timedelta

from asynccomm.compat.c10d.create import end_groups
from asynccomm.compat.c10d.init import run_endings, update_default_pg
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.types import NON_GROUP_MEMBER, check_valid_timeout
from asynccomm.compat.c10d.world import Group, group_or_default, world
from asynccomm.core.tasks import shielded
from asynccomm.errors import ClosedError


async def destroy_process_group(group: Group = None) -> None:
    """Destroy a group after its operations in flight; None: the default group and all others. Not collective.

    Destroying the default group also resets the names of groups, leaves the store and restores ``sys.excepthook``. The
    rank that hosts the store waits up to ``LEAVE_SECONDS`` for the other ranks. With NON_GROUP_MEMBER nothing happens.

    Raises: AssertionError before ``init_process_group``; ValueError for a group that was destroyed.

    After a cancellation the destruction continues in the background.
    """
    await _end(group, abort=False)


async def abort_process_group(group: Group = None) -> None:
    """Destroy a group at once: operations in flight fail. Otherwise like :func:`destroy_process_group`."""
    await _end(group, abort=True)


async def _end(group: Group, abort: bool) -> None:
    known = world()
    if group is not None and not isinstance(group, ProcessGroup) and group == NON_GROUP_MEMBER:
        return
    if known.default_pg is None:
        raise AssertionError("there is no process group: init_process_group was not called")
    pg = group_or_default(group)
    if pg not in known.pg_map:
        raise ValueError(f"{pg!r} is not registered: it was destroyed, or is of another world")
    if pg is not known.default_pg:
        if known.pg_coalesce_state.get(pg):
            warnings.warn(f"{pg!r} ends with recorded collectives that were never sent", stacklevel=4)
        known.remove(pg)
        await shielded(end_groups([pg], abort))
        return
    groups = list(reversed(known.pg_map))  # the newest group ends first
    endings = known.endings
    known.clear()
    update_default_pg(None)
    # ranks of a broken group may never leave
    waits_for = 1 if abort or any(_is_broken(each) for each in groups) else pg.size()

    async def end() -> None:
        try:
            await end_groups(groups, abort)
        finally:
            await run_endings(endings, waits_for)

    await shielded(end())


def _is_broken(pg: ProcessGroup) -> bool:
    errors = [comm._session.error for comm in pg.comms]
    return any(error is not None and not isinstance(error, ClosedError) for error in errors)


def set_timeout(timeout: timedelta, group: Group = None) -> None:
    """Change the timeout of a group's later operations, on this rank.

    Raises: ValueError if this rank is not in the group; TypeError; AssertionError if ``group`` is not a group.
    """
    check_valid_timeout(timeout)
    if group is not None and not isinstance(group, ProcessGroup) and group != NON_GROUP_MEMBER:
        raise AssertionError(f"group must be a ProcessGroup, got {group!r} ({type(group).__name__})")
    pg = group_or_default(group)
    if not pg.comms:
        warnings.warn(f"{pg!r} has no backend whose timeout could be set", stacklevel=2)
    for comm in pg.comms:
        comm.set_timeout(timeout)
    pg.timeout = timeout


def add_ephemeral_timeout(timeout: timedelta) -> None:
    """Extend the timeout of each group's later operations on this rank, until the first operation of these is done."""
    check_valid_timeout(timeout)
    for pg in world().pg_map:
        for comm in pg.comms:
            comm.extend_timeout(timeout)
