"""``asynccomm.wrap``, which makes torch.distributed's process groups and Works awaitable.

A comm over a group uses the store that the group was created with. If the group has no store, rank 0 hosts one, and
sends its address by a broadcast of the group. This happens once for a group; later comms use the same store.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Literal, NoReturn, TypedDict, Unpack, final, overload
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

ADDRESS_BYTES: Final = 1024  # size of the broadcast address, padded with zeros


class CommArguments(TypedDict, total=False):
    """Keyword arguments that ``wrap`` passes to ``new_comm``."""

    device: str | torch.device
    name: str
    timeout: float | timedelta | None
    hints: Mapping[str, str] | None
    abort_process_on_timeout_or_error: bool
    high_priority_stream: bool
    ordering: str
    max_ops: int
    max_bytes: int


@overload  # both are in the types of torch's functions; a call with them alone raises
def wrap(what: Literal[-100] | None, backend: str = "auto", **arguments: Unpack[CommArguments]) -> NoReturn: ...


@overload
def wrap(what: c10d.ProcessGroup, backend: str = "auto", **arguments: Unpack[CommArguments]) -> PendingComm[Comm]: ...


@overload
def wrap(what: dist.Work | distributed_c10d._CoalescingManager) -> WrappedWork: ...


def wrap(what: Any, backend: str = "auto", **arguments: Unpack[CommArguments]) -> PendingComm[Comm] | WrappedWork:
    """Make a Work of ``torch.distributed``, or the operations of a process group, awaitable.

    ::

        outputs = await asynccomm.wrap(dist.all_reduce(tensor, async_op=True))

        async with asynccomm.wrap(dist.group.WORLD) as comm:
            await comm.all_reduce(tensor)

    Of a Work, or of the manager of ``_coalescing_manager(async_ops=True)``: ``await`` returns the output tensors in a
    list as soon as the host may read them, and raises the Work's error. See ``WrappedWork``.

    Of a group: a new comm of the group's ranks; ``await`` it, or better ``async with`` it. Collective: all ranks of the
    group call ``wrap`` equally often, including failed calls. The group stays unchanged, and can be used at the same
    time: the comm has its own connections, and may outlive the group.

    Args:
        backend, name, timeout, hints, ...: of the comm, see ``new_comm``. ``name``: by default the group's name and a
            number.
        device: of the comm's tensors; by default the GPU that the group is bound to, or the current GPU if the group
            serves GPUs only, else the CPU.

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
    place = _place_of(group)
    number = place.next_number()  # also of a refused call, as the other ranks go on with the next one
    if unknown := arguments.keys() - CommArguments.__annotations__.keys():
        raise TypeError(f"wrap got unexpected arguments: {', '.join(sorted(unknown))}")
    given: CommArguments = {"device": _device_of(group), "name": f"{_name_of(group)}/{number}", **arguments}

    def comm(store: dist.Store) -> PendingComm[Comm]:
        room = dist.PrefixStore(f"asynccomm/wrap/{number}", store)
        return new_comm(backend, store=room, rank=group.rank(), size=group.size(), **given)

    store = store_of(group)
    if store is not None:
        return comm(store)
    comm(dist.HashStore())  # checks the arguments, and connects nothing

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
    except (AttributeError, RuntimeError):  # a Python group without a name
        return "group"


@final
class _TorchRendezvous:
    """The store for comms over a group without its own store, and the number of comms over the group so far."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._hosted: StoreServer | None = None  # held as long as the group exists
        self._store: dist.Store | None = None

    def next_number(self) -> int:
        return next(self._numbers)

    def meet(self, group: Any) -> dist.Store:
        """The store of ``group``; blocks. Collective over the group's ranks. Raises: RendezvousError."""
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
    """This host's address for other hosts; empty if the host's name resolves to no such address."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return "" if address.startswith("127.") else address


def _broadcast(group: Any, data: bytes) -> bytes:
    """Broadcast rank 0's ``data``, which must not contain zero bytes."""
    room = bytearray(data.ljust(ADDRESS_BYTES, b"\0"))
    tensor = torch.frombuffer(room, dtype=torch.uint8).to(_device_of(group))
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()
    return bytes(tensor.cpu().tolist()).rstrip(b"\0")


def _renew_locks() -> None:
    global _placing, _places
    _placing, _places = threading.Lock(), WeakKeyDictionary()  # a thread of the parent may have held the old lock


os.register_at_fork(after_in_child=_renew_locks)
