"""torch's ProcessGroupGloo: the only module that uses its private names and handles differences between versions.

- torch 2.13 renamed ``_allgather_base`` to ``all_gather_single`` and ``alltoall_base`` to ``all_to_all_single``; both
  names are tried, the new one first.
- ``ProcessGroupGloo.abort()`` does not wake a waiting operation. A receive that times out does: it makes gloo close
  every connection of the group ("Application timeout caused pair closure"), on this rank and, as a result, on the
  peers.
- A group with one thread runs one collective after the other, in order, and runs the callbacks of a collective's future
  before it starts the next collective.
- The ``is_completed`` of a point-to-point work turns true only inside ``wait()``, so polling is impossible.
- If a message in flight is dropped, the messages behind it get out of step: gloo continues with the next message of its
  tag, and ends the process if that message is shorter. All messages are therefore kept until they are done, or the
  group ends.
- The constructor first waits in the store for the addresses of all ranks, then connects, which only its own timeout
  ends; a connection may take five timeouts. Afterwards the timeout can be changed for collectives, but point-to-point
  works keep it, unless their ``wait()`` gets another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch import distributed as dist

from asynccomm.backends.gloo.groups import TransferGroups
from asynccomm.backends.gloo.reduction import is_native
from asynccomm.ops.reduce_op import RedOpType, ReduceOp

FOREVER = timedelta(days=30)  # gloo's own timeouts must never fire: the comm has deadlines
POISON_TAG = 2**31 - 1  # above MAX_TAG, so no message uses it
ALARM_TAG = 2**31 - 2  # above MAX_TAG, for alarms
GOODBYE_TAG = 2**31 - 3  # above MAX_TAG, for the messages of closing ranks

_OPS = {
    RedOpType.SUM: dist.ReduceOp.SUM,
    RedOpType.AVG: dist.ReduceOp.SUM,
    RedOpType.PREMUL_SUM: dist.ReduceOp.SUM,
    RedOpType.PRODUCT: dist.ReduceOp.PRODUCT,
    RedOpType.MIN: dist.ReduceOp.MIN,
    RedOpType.MAX: dist.ReduceOp.MAX,
    RedOpType.BAND: dist.ReduceOp.BAND,
    RedOpType.BOR: dist.ReduceOp.BOR,
    RedOpType.BXOR: dist.ReduceOp.BXOR,
}
# on 0 and 1: gloo has no bool
_BOOL_OPS = {
    **_OPS,
    RedOpType.SUM: dist.ReduceOp.MAX,
    RedOpType.PRODUCT: dist.ReduceOp.MIN,
}


@final
class GlooRequest:
    """A send or a receive in flight; ``held`` keeps it until it is done."""

    __slots__ = ("_held", "_tensor", "_work")

    def __init__(self, work: Any, tensor: Tensor, held: set[GlooRequest]) -> None:
        self._work = work
        self._tensor = tensor
        self._held = held
        held.add(self)

    def wait(self, seconds: float | None = None) -> None:
        """Block until it is done. Raises: RuntimeError, also after ``seconds``, which breaks the group."""
        self._work.wait(FOREVER if seconds is None else timedelta(seconds=seconds))
        self._held.discard(self)


class GlooGroup:
    """One gloo group, used directly: it is not registered with torch.distributed. Its methods return works unwaited.

    Args:
        store: the ranks exchange their addresses here; blocks the calling thread until all have connected.
        address: of the interface to use.
        threads: gloo threads that run collectives.
        timeout: seconds that a connection may take, once all addresses are there.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        address: str,
        threads: int,
        timeout: float,
    ) -> None:
        group: Any = dist.ProcessGroupGloo
        options = group._Options()
        options._threads = threads
        options._timeout = timedelta(seconds=timeout / 5)
        options._devices = [group.create_device(hostname=address)]
        self._pg: Any = group(store, rank, size, options)
        self._pg._set_default_timeout(FOREVER)
        self._size = size
        self._rank = rank
        self._messages: set[GlooRequest] = set()
        self._all_gather_single = getattr(self._pg, "all_gather_single", None) or self._pg._allgather_base
        self._all_to_all_single = getattr(self._pg, "all_to_all_single", None) or self._pg.alltoall_base

    def is_native(self, dtype: torch.dtype, reduction: ReduceOp) -> bool:
        """See ``groups.TransferGroup``."""
        return is_native(dtype, reduction)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, bools: bool = False) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = (_BOOL_OPS if bools else _OPS)[op.type]
        return self._pg.allreduce([tensor], options)

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp, *, bools: bool = False) -> Any:
        options = dist.ReduceOptions()
        options.rootRank = root
        options.reduceOp = (_BOOL_OPS if bools else _OPS)[op.type]
        return self._pg.reduce([tensor], options)

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._pg.broadcast([tensor], options)

    def all_gather(self, outputs: list[Tensor], input: Tensor) -> Any:
        return self._pg.allgather([outputs], [input])

    def all_gather_single(self, output: Tensor, input: Tensor) -> Any:
        return self._all_gather_single(output, input)

    def gather(self, outputs: list[Tensor], input: Tensor, root: int) -> Any:
        options = dist.GatherOptions()
        options.rootRank = root
        return self._pg.gather([outputs] if outputs else [], [input], options)

    def scatter(self, output: Tensor, inputs: list[Tensor], root: int) -> Any:
        options = dist.ScatterOptions()
        options.rootRank = root
        return self._pg.scatter([output], [inputs] if inputs else [], options)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, receives: Sequence[int] = (), sends: Sequence[int] = ()
    ) -> Any:
        """Exchange chunks; ``receives`` and ``sends`` are elements from and to each rank, if they are not all equal."""
        return self._all_to_all_single(output, input, list(receives), list(sends))

    def barrier(self) -> Any:
        return self._pg.barrier()

    def send(self, tensor: Tensor, dst: int, tag: int) -> GlooRequest:
        return GlooRequest(self._pg.send([tensor], dst, tag), tensor, self._messages)

    def recv(self, tensor: Tensor, src: int, tag: int) -> GlooRequest:
        return GlooRequest(self._pg.recv([tensor], src, tag), tensor, self._messages)

    def poison(self) -> None:
        """Make all operations in flight fail, on this rank and on the peers. Takes some milliseconds.

        A receive that times out closes all connections of the group; a receive on a closed connection fails at once and
        closes nothing. All peers are therefore tried.
        """
        never_sent = torch.empty(1, dtype=torch.uint8, device="cpu")
        for peer in range(self._size):
            if peer != self._rank:
                with contextlib.suppress(RuntimeError):
                    self._pg.recv([never_sent], peer, POISON_TAG).wait(timedelta(milliseconds=1))
                    raise AssertionError("a message arrived under the tag that nobody uses")

    def let_go(self) -> None:
        """Drop the messages in flight. The group must be unused, and poisoned if a message is in flight."""
        self._messages.clear()


class GlooGroups(NamedTuple):
    """The groups of one comm: for frames and for small transfers, with one thread each, and for large transfers."""

    frames: GlooGroup
    small: GlooGroup
    large: GlooGroup | None = None  #: None: streams move all data, or there is only one rank

    @property
    def made(self) -> list[GlooGroup]:
        """The groups that there are."""
        return [group for group in self if group is not None]

    @property
    def transfers(self) -> TransferGroups:
        """The groups that move data."""
        return TransferGroups(self.small, self.large or self.small)
