"""What torch.distributed has already, awaited: ``asynccomm.wrap`` of a process group, and of a Work.

The ranks of a group meet for a comm over the store that the group itself was made with. Where it has none, rank 0 hosts
one, and says where by a broadcast of the group. That happens once for a group, whose further comms meet there, too.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, TypedDict, Unpack, final, overload
from weakref import WeakKeyDictionary

import anyio.to_thread
import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.comm.pending import PendingComm
from asynccomm.errors import RendezvousError
from asynccomm.interop.torch_registry import store_of
from asynccomm.interop.wrapped_work import WrappedWork
from asynccomm.store.server import StoreServer, listen, serve

ADDRESS_BYTES: Final = 1024  # of what is broadcast; the rest is zeros


class CommArguments(TypedDict, total=False):
    """What ``new_comm`` takes, too."""

    device: str | torch.device
    name: str
    timeout: float | timedelta | None
    hints: Mapping[str, str] | None
    abort_process_on_timeout_or_error: bool
    high_priority_stream: bool
    ordering: str
    max_ops: int
    max_bytes: int


@overload
def wrap(what: c10d.ProcessGroup, backend: str = "auto", **arguments: Unpack[CommArguments]) -> PendingComm[Comm]: ...


@overload
def wrap(what: dist.Work | distributed_c10d._CoalescingManager) -> WrappedWork: ...


def wrap(what: Any, backend: str = "auto", **arguments: Unpack[CommArguments]) -> PendingComm[Comm] | WrappedWork:
    """Await what ``torch.distributed`` has: a Work, or the operations of a process group.

    ::

        outputs = await asynccomm.wrap(dist.all_reduce(tensor, async_op=True))

        async with asynccomm.wrap(dist.group.WORLD) as comm:
            await comm.all_reduce(tensor)

    Of a Work, or of what ``_coalescing_manager(async_ops=True)`` gives: ``await`` returns the output tensors in a list
    as soon as the host may read them, and raises the Work's error. See ``WrappedWork``.

    Of a group: a new comm of its ranks; ``await`` it, or better ``async with`` it. Collective: all ranks of the group
    do so, and as often as each other; also one that fails counts. The group itself stays as it is, and may be used at
    the same time: the comm has its own connections, and may outlive it.

    Args:
        backend, name, timeout, hints, ...: of the comm, see ``new_comm``. ``name``: None given, the group's name and a
            number.
        device: where the comm's tensors live; none given: the GPU that the group is bound to, or the current one if the
            group serves GPUs only; else the CPU.

    Raises:
        ValueError, TypeError: at the call; also if this rank is not in the group.
        RendezvousError, BackendError: from awaiting, as by ``new_comm``.
    """
    if isinstance(what, c10d.ProcessGroup):
        return _comm_over(what, backend, arguments)
    works = what.works if isinstance(what, distributed_c10d._CoalescingManager) else [what]
    if isinstance(what, int) and what == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group, so it has no part in a comm of it")
    if not all(isinstance(work, dist.Work) for work in works):
        hint = "; without async_op=True, torch gives None" if what is None else ""
        raise TypeError(f"wrap takes a process group or a Work of torch, got {what!r}{hint}")
    if any(isinstance(work, distributed_c10d._IllegalWork) for work in works):
        raise ValueError("within a _coalescing_manager, single calls have no Work: wrap the manager after its block")
    if not works:
        raise ValueError(
            "this _coalescing_manager has no Work: make it with async_ops=True, and wrap it after its block"
        )
    if arguments or backend != "auto":
        raise TypeError(f"a Work takes no arguments, got {', '.join(arguments) or 'backend'}")
    return WrappedWork(works)


def _comm_over(group: Any, backend: str, arguments: CommArguments) -> PendingComm[Comm]:
    if group.rank() < 0:
        raise ValueError("this rank is not a member of the group, so it has no part in a comm of it")
    if unknown := arguments.keys() - CommArguments.__annotations__.keys():
        raise TypeError(f"wrap got unexpected arguments: {', '.join(sorted(unknown))}")
    place = _place_of(group)
    number = place.next_number()
    given: CommArguments = {"device": _device_of(group), "name": f"{_name_of(group)}/{number}", **arguments}

    def comm(store: dist.Store) -> PendingComm[Comm]:
        room = dist.PrefixStore(f"asynccomm/wrap/{number}", store)
        return new_comm(backend, store=room, rank=group.rank(), size=group.size(), **given)

    store = store_of(group)
    if store is not None:
        return comm(store)
    comm(dist.HashStore())  # raises what is wrong with the arguments, and connects nothing

    async def connect() -> Comm:
        return await comm(await anyio.to_thread.run_sync(place.meet, group, abandon_on_cancel=True))

    return PendingComm(connect)


def _device_of(group: Any) -> torch.device:
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    if bound is not None:
        return bound
    if {device.type for device in group._device_types} == {"cuda"}:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _name_of(group: Any) -> str:
    try:
        return str(group.group_name) or "group"
    except (AttributeError, RuntimeError):  # a group in Python that was never given one
        return "group"


@final
class _TorchRendezvous:
    """Where the ranks of a group meet, if it has no store; and how often they have been asked to."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._hosted: StoreServer | None = None  # as long as the group is there
        self._store: dist.Store | None = None

    def next_number(self) -> int:
        return next(self._numbers)

    def meet(self, group: Any) -> dist.Store:
        """The store of all ranks of ``group``, which all ask for it; blocks. Raises: RendezvousError."""
        with self._lock:
            if self._store is None:
                self._store = self._met(group)
            return self._store

    def _met(self, group: Any) -> dist.Store:
        problem = said = ""
        if group.rank() == 0:
            try:
                self._hosted = serve("", listen("", 0))
                said = json.dumps([socket.gethostname(), _own_address(), self._hosted.port])
            except RendezvousError as exc:
                problem = str(exc)
        text = _broadcast(group, said.encode())
        if not text:
            raise RendezvousError(problem or "rank 0 of the group could not host a store")
        name, address, port = json.loads(text)
        host = "127.0.0.1" if name == socket.gethostname() else address or name
        try:
            return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
        except RuntimeError as exc:
            raise RendezvousError(f"cannot reach the store of rank 0 at {host}:{port}: {exc}") from exc


_places: WeakKeyDictionary[Any, _TorchRendezvous] = WeakKeyDictionary()
_placing = threading.Lock()


def _place_of(group: Any) -> _TorchRendezvous:
    with _placing:
        return _places.setdefault(group, _TorchRendezvous())


def _own_address() -> str:
    """Where other hosts reach this one; empty if only its name may tell."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return "" if address.startswith("127.") else address


def _broadcast(group: Any, data: bytes) -> bytes:
    """What rank 0 has in ``data``, which has no zero bytes."""
    room = bytearray(data.ljust(ADDRESS_BYTES, b"\0"))
    tensor = torch.frombuffer(room, dtype=torch.uint8).to(_device_of(group))
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()
    return bytes(tensor.cpu().tolist()).rstrip(b"\0")


def _renew_locks() -> None:
    global _placing, _places
    _placing, _places = threading.Lock(), WeakKeyDictionary()  # others, not in the child, may have held the old one


os.register_at_fork(after_in_child=_renew_locks)
