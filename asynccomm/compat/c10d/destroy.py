"""How groups end, and how long their operations may take.

An operation whose time is over ends its group: whoever waits for it is told, by ``await`` or ``wait()``, and what is
called later raises at once, so that nobody goes on with broken data. No process ends, unless the group was made with
``pg_options=CommOptions(abort_process_on_timeout_or_error=True)``. That is so on all backends, and aborting works at
any time: the variables by which torch chooses for NCCL (TORCH_NCCL_ASYNC_ERROR_HANDLING, TORCH_NCCL_BLOCKING_WAIT) are
not looked at.
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

__all__ = [
    "abort_process_group",
    "add_ephemeral_timeout",
    "destroy_process_group",
    "set_pg_timeout",
]


async def destroy_process_group(group: Group = None) -> None:
    """End a group once what is in flight is done; the default one (None) with all others. Not collective.

    With the default group names begin anew, the store is left, and so is ``sys.excepthook``. A rank that hosts the
    store stays some seconds for the others. NON_GROUP_MEMBER: nothing is done.

    Raises: AssertionError before ``init_process_group``; ValueError for a group that was destroyed.

    What is cancelled goes on in the background.
    """
    await _end(group, abort=False)


async def abort_process_group(group: Group = None) -> None:
    """End a group at once, whatever is in flight: that fails. The same otherwise."""
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
    groups = list(reversed(known.pg_map))  # made last, ended first
    endings = known.endings
    known.clear()
    update_default_pg(None)
    # of a group that is broken some may never leave
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


def set_pg_timeout(timeout: timedelta, group: Group = None) -> None:
    """Change what a group allows for operations that are called from now on, on this rank.

    Raises: ValueError if this rank is not in the group; TypeError; AssertionError for what is no group.
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
    """Give what is called from now on, in any group, more time, until the first of it in a group is done; here only."""
    check_valid_timeout(timeout)
    for pg in world().pg_map:
        for comm in pg.comms:
            comm.extend_timeout(timeout)
