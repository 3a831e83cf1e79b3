"""Collectives of long data over sockets of our own, moved in C (``_streams.c``) by a thread that does not need the GIL.

Each rank has a **share** of the data. It reduces the others' contributions to its share as they arrive, and passes the
result on: as many bytes as on a ring, in two steps in place of one for each rank. So is a broadcast: the root hands a
share to each rank, which passes it on. An all_reduce of more than two ranks goes round a **ring**: if ranks of one host
are neighbours, fewer bytes cross the network. That of halves does not, because a ring rounds at each rank.

A socket is opened by the first collective that needs it, through the port for messages (``endpoint.py``). Each rank
connects to those that it sends to, and sends on its own connections only: with data both ways on one connection, TCP
took packets that came out of order for lost ones, and stood still for a tenth of a second (cubic and BBR, two hosts of
namespaces).

A group carries out its collectives one after the other. When the group ends, or a socket does, all collectives in
progress fail.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor

from asynccomm.backends.gloo.endpoint import Endpoint
from asynccomm.backends.kernels import DTYPES, OPERATORS
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.core.native import CoreUnavailable, load
from asynccomm.ops.reduce_op import RedOpType, ReduceOp

MOST_RANKS: Final = 32  # each rank may have sockets to and from every other

_core: Final[Any] = load("asynccomm.backends.gloo._frames")
_SEGMENTS: Final = struct.Struct("<8Q")  # address and bytes of the four segments
_NOTHING: Final = 0, 0
_BOOLS: Final = {RedOpType.SUM: RedOpType.MAX, RedOpType.PRODUCT: RedOpType.MIN}  # on 0 and 1
_HALVES: Final = frozenset({torch.float16, torch.bfloat16})

Segment = tuple[int, int]  # address and bytes


def available() -> bool:
    """Whether this rank has the streams: the module in C."""
    return not isinstance(_core, CoreUnavailable)


@final
class StreamWork:
    """A collective of a group, and its future, as gloo's and torch's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callback: Callable[[StreamWork], object] | None = None
        self._over = False
        self._error: Exception | None = None

    def get_future(self) -> StreamWork:
        return self

    def value(self) -> None:
        """Raises: RuntimeError if the collective has failed."""
        if self._error is not None:
            raise self._error

    def add_done_callback(self, callback: Callable[[StreamWork], object]) -> None:
        """Have ``callback`` called at the end: on the thread of the group, or here if the collective is over."""
        with self._lock:
            if not self._over:
                self._callback = callback
                return
        callback(self)

    def end(self, error: Exception | None) -> None:
        """End the collective. Once."""
        with self._lock:
            self._over, self._error = True, error
            callback, self._callback = self._callback, None
        if callback is not None:
            callback(self)


class _Plan(Protocol):
    """A collective of one rank."""

    tensors: tuple[Tensor, ...]  #: kept until the end

    @property
    def sends_to(self) -> Sequence[int]:
        """The ranks that get data from this one."""
        ...

    @property
    def receives_from(self) -> Sequence[int]:
        """The ranks that send data to this one."""
        ...

    def carry_out(self, sinks: Mapping[int, int], sources: Mapping[int, int]) -> tuple[int, int]:
        """Move the data on the sockets to and from those ranks, by rank.

        Returns: an errno, or 0; and the rank at the other end of the socket that has failed.
        """
        ...


@final
class _Ring:
    """An all_reduce in place, on a ring; ``ends`` are those of the parts of all ranks, in bytes."""

    def __init__(self, rank: int, tensor: Tensor, ends: Sequence[int], kernel: tuple[int, int]) -> None:
        self.tensors: tuple[Tensor, ...] = (tensor,)
        self._rank = rank
        self._ends = struct.pack(f"<{len(ends)}Q", *ends)
        self._kernel = kernel
        self.sends_to: Sequence[int] = [(rank + 1) % len(ends)]
        self.receives_from: Sequence[int] = [(rank - 1) % len(ends)]

    def carry_out(self, sinks: Mapping[int, int], sources: Mapping[int, int]) -> tuple[int, int]:
        """See ``_Plan``."""
        (before,), (behind,) = self.receives_from, self.sends_to
        sides, address = (sources[before], sinks[behind]), self.tensors[0].data_ptr()
        error, side = _core.ring(*sides, address, self._ends, self._rank, *self._kernel)
        return error, behind if side else before


@final
class _Segments:
    """The segments of one rank in a collective, by peer.

    Args:
        tensors: kept until the end.
    """

    def __init__(self, rank: int, size: int, *tensors: Tensor) -> None:
        self.first_sends: list[Segment] = [_NOTHING] * size
        self.second_sends: list[Segment] = [_NOTHING] * size
        self.first_receives: list[Segment] = [_NOTHING] * size
        self.second_receives: list[Segment] = [_NOTHING] * size
        self.tensors = tensors
        self.copy: tuple[int, int, int] | None = None  # target, source and bytes on this rank
        self._rank = rank
        self._size = size
        self._share: tuple[int, ...] = (0, 0, 0, 0, -1, -1, 0)  # the last arguments of ``move``

    def reduces(self, share: Segment, kernel: tuple[int, int]) -> None:
        """Reduce the segments that are received first, and ``share`` in place."""
        address, nbytes = share
        self._share = (self._rank, address, nbytes, 0, -1, *kernel)

    def relays(self, giver: int) -> None:
        """Send, as the second segments, the first one from ``giver``."""
        self._share = (0, 0, 0, 0, giver - (giver > self._rank), -1, 0)

    def gives(self, nbytes: int) -> None:
        """Send second segments of ``nbytes`` that are there from the start."""
        self._share = (0, 0, 0, nbytes, -1, -1, 0)

    @property
    def sends_to(self) -> Sequence[int]:
        """See ``_Plan``."""
        return self._with_bytes(self.first_sends, self.second_sends)

    @property
    def receives_from(self) -> Sequence[int]:
        """See ``_Plan``."""
        return self._with_bytes(self.first_receives, self.second_receives)

    def _with_bytes(self, first: Sequence[Segment], second: Sequence[Segment]) -> list[int]:
        return [peer for peer in range(self._size) if peer != self._rank and (first[peer][1] or second[peer][1])]

    def carry_out(self, sinks: Mapping[int, int], sources: Mapping[int, int]) -> tuple[int, int]:
        """See ``_Plan``."""
        if self.copy is not None:
            ctypes.memmove(*self.copy)
        others = [peer for peer in range(self._size) if peer != self._rank]
        packed = [
            _SEGMENTS.pack(
                *self.first_sends[peer],
                *self.second_sends[peer],
                *self.first_receives[peer],
                *self.second_receives[peer],
            )
            for peer in others
        ]
        descriptors = ([each.get(peer, -1) for peer in others] for each in (sinks, sources))
        error, stream = _core.move(*descriptors, b"".join(packed), *self._share)
        return error, stream + (stream >= self._rank) if stream >= 0 else -1


@final
class StreamSockets:
    """The sockets to and from the other ranks, for one group.

    Args:
        channel: the number of the group.
    """

    def __init__(self, rank: int, size: int, endpoint: Endpoint, channel: int) -> None:
        self._rank = rank
        self._size = size
        self._endpoint = endpoint
        self._channel = channel
        self._sinks: dict[int, socket.socket] = {}  # by peer
        self._sources: dict[int, socket.socket] = {}
        self._changed = threading.Condition()  # guards the fields
        self._ended = False
        endpoint.channels[channel] = partial(self._adopt, self._sources)

    def descriptors(self, sinks: Sequence[int], sources: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Those of the sockets to the ranks ``sinks`` and from the ranks ``sources``, by rank.

        Blocks until they are connected. Raises: OSError.
        """
        new = [peer for peer in sinks if peer not in self._sinks and not self._ended]
        for peer in new:
            self._endpoint.connect_channel(peer, self._channel, partial(self._adopt, self._sinks, peer))
        for peer in new:
            sink = self._sinks.get(peer)  # none: the group has ended meanwhile
            admitted = sink is not None and sink.recv(1)  # the peer has found the token right
            if not admitted and not self._ended:
                raise ConnectionResetError(f"rank {peer} has refused a connection")
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._sources.keys() >= set(sources))
            if self._ended:  # the numbers may be those of other sockets soon
                raise ConnectionAbortedError("the group has ended")
            to, back = self._sinks, self._sources
            return {peer: to[peer].fileno() for peer in sinks}, {peer: back[peer].fileno() for peer in sources}

    def _adopt(self, sockets: dict[int, socket.socket], peer: int, sock: socket.socket) -> None:
        """Use ``sock``, which blocks, for ``peer``. From any thread."""
        with self._changed:
            if self._ended or peer in sockets:
                sock.close()
                return
            sockets[peer] = sock
            self._changed.notify_all()

    def end(self) -> None:
        """Have all calls fail, on this rank and on the others. From any thread, more than once."""
        with self._changed:
            self._ended = True
            for sock in self._all():
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the peer has closed it
            self._changed.notify_all()

    def close(self) -> None:
        """After ``end``, and after the last use: free the descriptors."""
        with self._changed:
            for sock in self._all():
                sock.close()
            self._sinks.clear()
            self._sources.clear()

    def _all(self) -> list[socket.socket]:
        return [*self._sinks.values(), *self._sources.values()]


@final
class StreamGroup:
    """``groups.TransferGroup`` over sockets of our own.

    Args:
        name: of the thread.
    """

    def __init__(self, rank: int, size: int, sockets: StreamSockets, name: str) -> None:
        self._rank = rank
        self._size = size
        self._sockets = sockets
        self._jobs = OrderedExecutor(name, 1)
        self._problem = ""  # the first failure: the data behind it is lost

    def is_native(self, dtype: torch.dtype, reduction: ReduceOp) -> bool:
        """See ``groups.TransferGroup``."""
        return dtype in DTYPES and reduction.type not in (RedOpType.AVG, RedOpType.PREMUL_SUM)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, bools: bool = False) -> StreamWork:
        if self._size > 2 and tensor.dtype not in _HALVES:
            ends = self._ends(tensor)[1:]
            return self._start(_Ring(self._rank, tensor, ends, _kernel(tensor.dtype, op, bools)))
        plan, parts = self._reduced(tensor, op, bools)
        for peer, part in enumerate(parts):
            if peer != self._rank:
                plan.second_sends[peer], plan.second_receives[peer] = parts[self._rank], part
        return self._start(plan)

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp, *, bools: bool = False) -> StreamWork:
        plan, parts = self._reduced(tensor, op, bools)
        if self._rank == root:
            plan.second_receives = [part if peer != root else _NOTHING for peer, part in enumerate(parts)]
        else:
            plan.second_sends[root] = parts[self._rank]
        return self._start(plan)

    def _reduced(self, tensor: Tensor, op: ReduceOp, bools: bool) -> tuple[_Segments, list[Segment]]:
        """A plan in which each rank reduces its part of ``tensor``, and all parts."""
        parts = self._parts(tensor)
        plan = _Segments(self._rank, self._size, tensor)
        mine = parts[self._rank]
        for peer, part in enumerate(parts):
            if peer != self._rank:
                plan.first_sends[peer], plan.first_receives[peer] = part, (0, mine[1])
        plan.reduces(mine, _kernel(tensor.dtype, op, bools))
        return plan, parts

    def _parts(self, tensor: Tensor) -> list[Segment]:
        """The parts of ``tensor``, one for each rank, which differ by an element at most."""
        address = tensor.data_ptr()
        return [(address + start, end - start) for start, end in pairwise(self._ends(tensor))]

    def _ends(self, tensor: Tensor) -> list[int]:
        """The ends of the parts in bytes, behind a 0."""
        n, item, size = tensor.numel(), tensor.itemsize, self._size
        return [n * k // size * item for k in range(size + 1)]

    def broadcast(self, tensor: Tensor, root: int) -> StreamWork:
        rank, parts = self._rank, self._parts(tensor)
        plan = _Segments(rank, self._size, tensor)
        if rank == root:
            plan.gives(parts[root][1])
            plan.first_sends = list(parts)
            plan.second_sends = [parts[root]] * self._size
            return self._start(plan)
        plan.relays(root)
        plan.first_receives[root], plan.second_receives[root] = parts[rank], parts[root]
        for peer, part in enumerate(parts):
            if peer not in (rank, root):
                plan.second_sends[peer], plan.second_receives[peer] = parts[rank], part
        return self._start(plan)

    def all_gather(self, outputs: list[Tensor], input: Tensor) -> StreamWork:
        return self._exchange([_segment(input)] * self._size, [_segment(output) for output in outputs], input, *outputs)

    def all_gather_single(self, output: Tensor, input: Tensor) -> StreamWork:
        return self._exchange([_segment(input)] * self._size, self._chunks(output), input, output)

    def gather(self, outputs: list[Tensor], input: Tensor, root: int) -> StreamWork:
        gives = self._at(root, _segment(input))
        return self._exchange(gives, [_segment(output) for output in outputs] or self._at(), input, *outputs)

    def scatter(self, output: Tensor, inputs: list[Tensor], root: int) -> StreamWork:
        gives = [_segment(input) for input in inputs] or self._at()
        return self._exchange(gives, self._at(root, _segment(output)), output, *inputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, receives: Sequence[int] = (), sends: Sequence[int] = ()
    ) -> StreamWork:
        return self._exchange(self._chunks(input, sends), self._chunks(output, receives), input, output)

    def barrier(self) -> StreamWork:
        data = torch.zeros(self._size + 1, dtype=torch.uint8, device="cpu")
        parts = self._chunks(data[: self._size])
        return self._exchange([(data.data_ptr() + self._size, 1)] * self._size, parts, data)

    def _at(self, peer: int = -1, segment: Segment = _NOTHING) -> list[Segment]:
        """``segment`` for ``peer``, and nothing for all others."""
        return [segment if each == peer else _NOTHING for each in range(self._size)]

    def _chunks(self, tensor: Tensor, numels: Sequence[int] = ()) -> list[Segment]:
        """The memory of ``tensor``, in chunks of ``numels`` elements, or in equal ones."""
        item, address = tensor.itemsize, tensor.data_ptr()
        chunks: list[Segment] = []
        for numel in numels or [tensor.numel() // self._size] * self._size:
            chunks.append((address, numel * item))
            address += numel * item
        return chunks

    def _exchange(self, gives: list[Segment], takes: list[Segment], *tensors: Tensor) -> StreamWork:
        """Send ``gives`` and receive ``takes``, by rank."""
        rank = self._rank
        plan = _Segments(rank, self._size, *tensors)
        plan.first_sends, plan.first_receives = gives, takes
        (source, _), (target, nbytes) = gives[rank], takes[rank]
        if source != target:
            plan.copy = target, source, nbytes
        return self._start(plan)

    def _start(self, plan: _Plan) -> StreamWork:
        work = StreamWork()
        self._jobs.put(0, partial(self._carry_out, plan, work))
        return work

    def _carry_out(self, plan: _Plan, work: StreamWork) -> None:
        """On the thread."""
        try:
            if not self._problem:
                error, peer = plan.carry_out(*self._sockets.descriptors(plan.sends_to, plan.receives_from))
                if error:
                    problem = f"rank {peer}: its connection ended" if peer >= 0 else "a wait failed"
                    self._problem = f"{problem}: {os.strerror(error)}"
        except Exception as exc:
            self._problem = str(exc) or type(exc).__name__
        plan.tensors = ()
        work.end(RuntimeError(self._problem) if self._problem else None)

    def abort(self) -> None:
        """Have all collectives fail, on this rank and on the others. From any thread, more than once."""
        self._sockets.end()

    def close(self, seconds: float) -> None:
        """End the group, at most after ``seconds`` for a collective in progress. Once."""
        self._sockets.end()
        self._jobs.end()
        if self._jobs.join(seconds):
            self._sockets.close()


def _kernel(dtype: torch.dtype, op: ReduceOp, bools: bool) -> tuple[int, int]:
    return DTYPES.index(dtype), OPERATORS[_BOOLS.get(op.type, op.type) if bools else op.type]


def _segment(tensor: Tensor) -> Segment:
    return tensor.data_ptr(), tensor.nbytes
