"""Bagua's process groups: each makes its communicators when they are first asked for, and keeps them."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

import torch
from torch import distributed as dist

from asynccomm.comm.new_comm import new_comm
from asynccomm.compat.either import EitherComm, at_once, in_order
from asynccomm.core.handles import Handle
from asynccomm.interop.wrap import wrap
from asynccomm.ops.validation import as_index
from asynccomm.store.base import Store


@final
class BaguaSingleCommunicatorPy(Handle):
    """A communicator of some ranks; operations on one without this process return at once and do nothing.

    Args:
        comm: None: this process is not among its ranks.
        stream: of the operations, on a GPU; None: the current stream of the call.
    """

    _instead = "make a group there"

    def __init__(self, comm: EitherComm | None, stream: torch.cuda.Stream | None) -> None:
        """Not for users: see ``BaguaProcessGroup``."""
        self.either: EitherComm | None = comm
        self._stream = stream

    def rank(self) -> int:
        """This process's rank; -1 if it is not among the ranks."""
        return -1 if self.either is None else self.either.comm.rank

    def nranks(self) -> int:
        """The number of ranks; 0 if this process is not among them."""
        return 0 if self.either is None else self.either.comm.size

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Within it, operations are in the communicator's stream, after the work of the current one."""
        if self._stream is None or self.either is None or self.either.comm.device.type != "cuda":
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


@final
class BaguaProcessGroup:
    """A group of ranks, with a global communicator, and those within nodes and between nodes.

    Each is made at its first request, which is collective over its group, and then kept. In a coroutine, ``await
    group.get_global_communicator()``.

    Args:
        ranks: global ranks, in the order of the communicators' ranks.
        stream: of the operations; None: that of the default group.
        group_name: equal on all ranks.
    """

    def __init__(self, ranks: Sequence[int], stream: torch.cuda.Stream | None, group_name: str) -> None:
        self.ranks: list[int] = list(ranks)
        self.stream = stream
        self.group_name = group_name
        self._made: dict[str, BaguaSingleCommunicatorPy] = {}
        self._making = threading.RLock()
        self._awaited: dict[tuple[str, asyncio.AbstractEventLoop], asyncio.Future[BaguaSingleCommunicatorPy]] = {}
        self._connect: Callable[[Callable[[EitherComm | None], Any]], Any] = self._split_off

    def get_global_communicator(self) -> Any:
        """The communicator of all ranks of the group."""
        return self._kept("global", self._connect)

    def get_intra_node_communicator(self) -> Any:
        """The communicator of the ranks on this node."""
        return self._part("intra", lambda here: here.comm.intra_node(f"{self.group_name}/intra"))

    def get_inter_node_communicator(self) -> Any:
        """The communicator of the first rank of each node; the other ranks are not among its ranks."""
        return self._part("inter", lambda here: here.comm.inter_node(f"{self.group_name}/inter"))

    def communicators(self) -> list[EitherComm]:
        """The comms made so far that belong to this group, the last first. Not for users."""
        world = _known.world
        found = [each.either for each in reversed(self._made.values())]
        return [either for either in found if either is not None and either is not world]

    def _kept(self, kind: str, make: Callable[[Callable[[EitherComm | None], Any]], Any]) -> Any:
        if kind in self._made:
            return at_once(self._made[kind])

        def keep(comm: EitherComm | None) -> BaguaSingleCommunicatorPy:
            stream = _default_stream() if self.stream is None else self.stream
            return self._made.setdefault(kind, BaguaSingleCommunicatorPy(comm, stream))

        loop = asyncio._get_running_loop()
        if loop is None:
            with self._making:  # threads that ask at the same time get the same one
                return self._made[kind] if kind in self._made else make(keep)
        making = self._awaited.get((kind, loop))
        if making is None:
            making = self._awaited[kind, loop] = asyncio.ensure_future(make(keep))
            making.add_done_callback(lambda _: self._awaited.pop((kind, loop)))
        return asyncio.shield(making)

    def _part(self, kind: str, make: Callable[[EitherComm], Any]) -> Any:
        def derive(whole: BaguaSingleCommunicatorPy, then: Callable[[EitherComm | None], Any]) -> Any:
            here = whole.either
            return at_once(then(None)) if here is None else here.derive(lambda: make(here), then)

        def connect(then: Callable[[EitherComm | None], Any]) -> Any:
            whole = self.get_global_communicator()
            return derive(whole, then) if isinstance(whole, BaguaSingleCommunicatorPy) else _after(whole, derive, then)

        return self._kept(kind, connect)

    def _split_off(self, then: Callable[[EitherComm | None], Any]) -> Any:
        world = _world()
        if world.comm.rank not in self.ranks:
            return at_once(then(None))
        return world.derive(lambda: world.comm.split(self.ranks, f"{self.group_name}/global"), then)


async def _after(whole: Any, derive: Callable[..., Any], then: Callable[[EitherComm | None], Any]) -> Any:
    return await derive(await whole, then)


@final
class _Known:
    """The default group of this process, and all groups made since."""

    def __init__(self) -> None:
        self.world: EitherComm | None = None
        self.default: BaguaProcessGroup | None = None
        self.groups: list[BaguaProcessGroup] = []
        self.numbers: Iterator[int] = itertools.count(1)
        self.timeout: timedelta | None = None  # None: the default of comms
        self.weights_only = True
        self.lock = threading.Lock()


_known = _Known()


def init_process_group(
    store: dist.Store | Store | str | None = None,
    *,
    backend: str = "auto",
    device: str | torch.device = "cpu",
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> Any:
    """Connect all processes, and make the default group; in a coroutine, ``await`` the call.

    Args:
        store: None: from the environment that launchers set, as are rank and number of processes.
        backend, device, timeout: of the comm, see ``asynccomm.new_comm``. Other groups have the timeout, too.
        weights_only: whether objects are safe values only, or any that can be pickled.

    Raises: RuntimeError if there is a default group.
    """
    if _known.default is not None:
        raise RuntimeError("the default process group is initialized already")

    def keep(world: EitherComm | None) -> None:
        assert world is not None
        group = BaguaProcessGroup(range(world.comm.size), None, "bagua")
        group._made["global"] = BaguaSingleCommunicatorPy(world, None)
        _known.world, _known.default = world, group
        _known.timeout, _known.weights_only = timeout, weights_only
        _known.groups.append(group)

    return EitherComm.make(lambda: new_comm(backend, device, name="bagua", store=store, timeout=timeout), keep)


def is_initialized() -> bool:
    """Whether there is a default group."""
    return _known.default is not None


def destroy_process_group() -> Any:
    """Close the communicators of all groups; in a coroutine, ``await`` the call. Bagua has no such function."""
    global _known
    comms = [comm for group in reversed(_known.groups) for comm in group.communicators()]
    if _known.world is not None:
        comms.append(_known.world)
    _known = _Known()
    return in_order([comm.close for comm in comms], _nothing)


def new_group(ranks: Sequence[int] | None = None, stream: torch.cuda.Stream | None = None) -> BaguaProcessGroup:
    """A group of ``ranks``, sorted; None: of all. All processes call this, members or not, in the same order.

    Sends nothing: the communicators connect at their first request. A refused call counts as a call.

    Raises: ValueError for ranks that do not exist; TypeError.
    """
    size = _world().comm.size
    number = next(_known.numbers)  # also of a refused call, as the other processes go on with the next number
    if ranks is not None and (not isinstance(ranks, Sequence) or any(as_index(rank) is None for rank in ranks)):
        raise TypeError(f"ranks must be a list of ranks, got {ranks!r}")
    chosen = list(range(size)) if ranks is None else sorted(map(int, ranks))
    if len(set(chosen)) < len(chosen) or not all(0 <= rank < size for rank in chosen) or not chosen:
        raise ValueError(f"ranks must be different ones in [0, {size}), got {ranks}")
    return _remembered(BaguaProcessGroup(chosen, stream, f"group:{number}"))


def from_torch_group(group: Any, stream: torch.cuda.Stream | None = None) -> BaguaProcessGroup:
    """A group of the ranks of torch's ``group``, which meets over its store. All ranks of ``group`` call this.

    The communicators have the devices of ``group``, as comms of ``asynccomm.wrap``, and the timeout of
    ``init_process_group``, or without a default group asynccomm's.

    Raises: TypeError if ``group`` is no process group.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup, got {group!r}")
    ranks = dist.get_process_group_ranks(group)
    made = BaguaProcessGroup(ranks, stream, "torch")  # no number, as other processes do not call this
    made._connect = lambda then: EitherComm.make(lambda: wrap(group, timeout=_known.timeout), then)
    return _remembered(made)


def _remembered(group: BaguaProcessGroup) -> BaguaProcessGroup:
    with _known.lock:
        _known.groups.append(group)
    return group


def _world() -> EitherComm:
    if _known.world is None:
        raise RuntimeError("the default process group is not initialized: call init_process_group() first")
    return _known.world


def _default_stream() -> torch.cuda.Stream | None:
    return None if _known.default is None else _known.default.stream


def default_communicator() -> BaguaSingleCommunicatorPy:
    """The global communicator of the default group. Raises: RuntimeError without a default group."""
    _world()
    assert _known.default is not None
    return _known.default._made["global"]


def trusts_values_only() -> bool:
    """Whether objects are safe values only."""
    return _known.weights_only


def get_rank() -> int:
    """This process's global rank."""
    return _world().comm.rank


def get_world_size() -> int:
    """The number of processes."""
    return _world().comm.size


def get_local_rank() -> int:
    """This process's number on its host, from LOCAL_RANK; 0 without it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _nothing(_: object) -> None:
    """The result of closing."""
