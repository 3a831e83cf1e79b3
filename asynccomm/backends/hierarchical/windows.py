"""Windows on several hosts: a rank's memory is shared with the ranks of its host, and served to the others by gloo.

Each host has a window in shared memory. The gloo comm of all ranks serves the same memory and the same signals to the
other hosts: its threads act as one more contender for the locks of the part (``GuestPart``), so accumulates and signals
by either way are atomic among each other. All operations of one rank on one target take the same way, which keeps their
order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from asynccomm.backends.base import BackendContext, BackendWindow, Submission, UnsuitableError
from asynccomm.backends.gloo.backend import GlooBackend
from asynccomm.backends.gloo.windows import GlooWindow, WindowService
from asynccomm.backends.hierarchical.placement import HostPlacement
from asynccomm.backends.hierarchical.translation import translated
from asynccomm.backends.latch import Latch
from asynccomm.backends.shm.backend import ShmBackend
from asynccomm.backends.shm.windows import ShmWindow
from asynccomm.backends.windows import LocalPart
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, BrokenError
from asynccomm.ops import Call, WindowFence, WindowInfo, WindowOp, WindowWait


@final
class HierarchicalWindow(BackendWindow):
    """One rank's access to a window on several hosts; the rank shares its host with others.

    Args:
        inside: the window of this host, with numbers of ranks of its own.
        between: reaches the ranks of other hosts.
    """

    def __init__(
        self, where: HostPlacement, number: int, mailbox: Mailbox, inside: ShmWindow, between: WindowService
    ) -> None:
        self._where = where
        self._number = number
        self._mailbox = mailbox
        self._inside = inside
        self._between = between
        self._elsewhere = [rank for rank in range(where.size) if not where.is_local(rank)]

    def memory(self, rank: int) -> Tensor | None:
        return self._inside.memory(self._where.position_of(rank)) if self._where.is_local(rank) else None

    def load(self, slot: int) -> int:
        return self._inside.load(slot)

    def submit(self, batch: Sequence[Submission]) -> None:
        for submission in batch:
            op = submission.op
            assert isinstance(op, WindowOp), op
            if isinstance(op, WindowWait):
                self._inside.submit((submission,))
            elif op.peer is None:
                assert isinstance(op, WindowFence), op
                self._fence(op, submission)
            elif self._where.is_local(op.peer):
                self._inside.submit((self._numbered_inside(op, op.peer, submission),))
            else:
                self._between.submit(op, submission, [op.peer])

    def _numbered_inside(self, op: Any, peer: int, submission: Submission) -> Submission:
        """``submission`` with the number that its target has on this host."""
        inside = copy.copy(submission)
        inside.op = replace(op, peer=self._where.position_of(peer))
        return inside

    def _fence(self, op: WindowFence, submission: Submission) -> None:
        """A fence for all ranks is one on each way."""
        over = Latch(2, submission.work.settle)

        def part() -> Submission:
            work: Work[Any] = Work(
                op,
                submission.work.seq,
                self._mailbox,
                value=None,
                timeout=math.inf,
                on_settled=lambda work: over(work.take_error()),
            )
            return Submission(Call(op, (), (), None), work)

        self._inside.submit((part(),))
        self._between.submit(op, part(), self._elsewhere)

    def before_await(self, work: Work[Any]) -> None:
        self._inside.before_await(work)

    def before_block(self, work: Work[Any]) -> None:
        self._inside.before_block(work)

    def end_waits(self, error: AsyncCommError) -> None:
        self._inside.end_waits(error)

    def abort(self) -> None:
        self._inside.abort()

    def close(self) -> None:
        self._between.forget(self._number)
        self._inside.close()


async def make_window(
    context: BackendContext, where: HostPlacement, window: WindowInfo, inside: ShmBackend | None, between: GlooBackend
) -> BackendWindow:
    """Make a window of ranks on several hosts. Collective, without a timeout; a cancelled call cleans up.

    Args:
        inside: None: this rank has no host with others.

    Raises: UnsuitableError on all ranks, if those of one host have no memory; PeerLostError.
    """
    context = replace(context, store=context.store.prefix(f"window {window.number}"))
    made, problem = None, ""
    if inside is not None:
        try:
            made = await inside.window(_within_host(where, window), guests=1)
        except UnsuitableError as exc:
            problem = str(translated(exc, where.local))
        except BrokenError as exc:
            raise translated(exc, where.local) from exc
    try:
        if found := await context.first_problem(problem):
            numbers = ", ".join(map(str, where.hosts[where.host_of(found[0])]))
            raise UnsuitableError(f"on the host of ranks {numbers}: {found[1]}")
        if made is None:
            part = LocalPart(window, where.rank)
            return GlooWindow(await between.serve(window, part), window, part)
        service = await between.serve(window, made.guest())
    except BaseException:
        if made is not None:
            made.close()
        raise
    return HierarchicalWindow(where, window.number, context.mailbox, made, service)


def _within_host(where: HostPlacement, window: WindowInfo) -> WindowInfo:
    """The window that the ranks of this rank's host have among them."""
    local = where.local
    group = replace(window.group, rank=where.position, size=len(local))
    return replace(window, group=group, sizes=tuple([window.sizes[rank] for rank in local]))
