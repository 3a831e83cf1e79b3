"""Scopes: blocks of code whose operations leave together, or are only estimated."""

from __future__ import annotations

from asynccomm.comm.methods.base import CommBase
from asynccomm.comm.scopes import Batch, Estimate


class Scopes(CommBase):
    """Blocks of code."""

    def coalesce(self, *, max_bytes: int | None = None, max_ops: int | None = None) -> Batch:
        """Have what this task calls in the scope leave as one batch, at its end. ``with`` or ``async with``.

        ::

            async with comm.coalesce() as batch:
                for parameter in model.parameters():
                    comm.all_reduce(parameter.grad)
            await batch

        Each call gives its own Work, as ever. All ranks open the scope around the same collectives; kinds, dtypes and
        reductions may be mixed. Operations that share memory take effect in their order, and do so on all ranks alike:
        a batch ends before one that depends on it. ``reduce``, ``gather``, ``scatter``, uneven operations and objects
        go in their place, but each by itself: there ranks cannot know of the others' memory.

        - Awaiting one of the Works in the scope sends what is held so far. Only the task that opened the scope, or one
          that it waits for there (``asyncio.gather``), should do so: all ranks must send at the same place.
        - It belongs to the task that opens it, in a thread without a task to the thread. What other tasks and threads
          call, those that were started inside included, is sent as ever.
        - A scope within one of the same comm is part of that, whose limits hold.
        - If the body raises, what is still held is not sent, and its Works fail with ``NotSentError``. What it called
          is sent on the other ranks all the same, unless they raise, too.
        - Deadlines count from the call.

        Args:
            max_bytes, max_ops: of collectives in a batch, counted as the program calls them: a batch leaves as soon as
                it is full, and the next one begins. None: no limit.
        """
        return Batch([self._session], max_bytes, max_ops)

    def time_estimator(self) -> Estimate:
        """Estimate how long the operations that are called in the scope would take; nothing of them is done.

        ::

            async with comm.time_estimator() as estimate:
                comm.all_reduce(gradient)
            print(estimate.seconds)

        All ranks do so for the same collectives of tensors, since the backend may have to connect for it. Their Works
        fail with ``NotSentError``; tensors are left alone.

        Raises: NotImplementedError for backends other than NCCL, which can simulate; and on leaving, for what NCCL has
            no estimate of (what it makes of messages: gather, scatter, all_to_all).
        """
        self._session.check_estimates()
        return Estimate(self._session)


def coalesce(*comms: Scopes, max_bytes: int | None = None, max_ops: int | None = None) -> Batch:
    """:meth:`Comm.coalesce` for several comms at once. Each sends one batch, in the order of the comms' names.

    So ranks that have several comms in common send in the same order, whatever the order in which they call.

    Args:
        max_bytes, max_ops: of one comm's batch.

    Raises: ValueError on leaving if operations of different comms share memory; nothing of theirs is sent then.
    """
    if not comms:
        raise ValueError("comms must be at least one Comm, got none")
    for i, comm in enumerate(comms):
        if not isinstance(comm, Scopes):
            raise TypeError(f"comms[{i}] must be a Comm, got {comm!r}")
    if len({id(comm) for comm in comms}) < len(comms):
        raise ValueError(f"comms must be different ones, got {[comm.name for comm in comms]}")
    return Batch([comm._session for comm in comms], max_bytes, max_ops)
