"""The comms of one torch group: a CPU comm, and a GPU comm once an operation needs it.

The CPU comm is connected when the group is made. The GPU comm is connected by the first operation on a GPU, as in other
backends of torch, because only this operation selects this rank's GPU; all ranks of the group must take part in the
operation. A group bound to a device connects its GPU comm at once.

The CPU comm of a part of another group is split off the other group's, if that is in shared memory and works: the ranks
know each other and need no rendezvous in the store. All ranks decide alike, or learn it from the failure of the split.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Self, final

import torch
from anyio.from_thread import BlockingPortal
from torch import Tensor
from torch import distributed as dist

from asynccomm.blocking.loop_thread import EXIT_SECONDS, at_exit, detached, lease, loop_of, loops, on_a_thread
from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.comm.session import handle_dump_signal
from asynccomm.errors import BrokenError, ClosedError
from asynccomm.interop.torch_version import uncompiled
from asynccomm.interop.torch_words import check_split


@final
class GroupComms:
    """Comms of one group by type of device, connected on first use and closed together.

    Args:
        name: equal on all ranks.
        store: for the rendezvous; this group owns all its keys. None: all comms are in ``given``.
        rank, size: this rank, and the number of ranks.
        timeout: of operations, and of connecting.
        given: existing comms; their creator closes them.
        whole: comms of a group that this group is a part of, and the ranks of the part there; None: of no group.
    """

    def __init__(
        self,
        name: str,
        store: dist.Store | None,
        rank: int,
        size: int,
        timeout: timedelta,
        given: Iterable[Comm] = (),
        whole: tuple[GroupComms, Sequence[int]] | None = None,
    ) -> None:
        self.name: str = name
        self.store: dist.Store | None = store
        self.rank: int = rank
        self.size: int = size
        self.timeout: timedelta = timeout
        self._comms = {comm.device.type: comm for comm in given}
        self._given = frozenset(self._comms.values())
        self._whole = whole
        self._connecting = threading.Lock()
        self._portal: BlockingPortal | None = None
        self._attempt: Future[Comm] | None = None  # to connect
        self._closed = False
        self._process = os.getpid()
        at_exit(self)

    @classmethod
    def opened(
        cls,
        name: str,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        whole: tuple[GroupComms, Sequence[int]] | None = None,
    ) -> Self:
        """Create comms, with the CPU comm connected. Blocks until all ranks have connected."""
        comms = cls(name, store, rank, size, timeout, whole=whole)
        try:
            with detached():
                comms.connect(torch.device("cpu"))
        except BaseException:
            comms.close()
            raise
        return comms

    def part(self, ranks: list[int], timeout: timedelta | None, name: str) -> GroupComms | None:
        """The comms of some ranks, connected; None on other ranks. Raises: torch's errors."""
        if self.store is None:
            raise RuntimeError(f"group {self.name!r} was made over comms, and cannot be split: split these")
        check_split(ranks, self.size)
        if self.rank not in ranks:
            return None
        store = dist.PrefixStore(f"{name}/", self.store)
        limit = self.timeout if timeout is None else timeout
        return GroupComms.opened(name, store, ranks.index(self.rank), len(ranks), limit, (self, ranks))

    def connect(self, device: torch.device) -> Comm:
        """The comm of a device; a first call for a type of device blocks until all ranks have connected.

        Raises: the errors of ``new_comm``; ClosedError.
        """
        with self._connecting:
            comm = self._comms.get(device.type)
            if comm is not None:
                return comm
            if self._closed or self.store is None:
                raise ClosedError(
                    f"group {self.name!r} was closed" if self._closed else f"group {self.name!r} has no {device} comm"
                )
            if self._portal is None:
                handle_dump_signal()  # here, as the loop's thread cannot install a handler
                self._portal = lease()
            loop = loop_of(self._portal)
            # the portal's own call would wait until the task has started
            self._attempt = asyncio.run_coroutine_threadsafe(self._connected(device), loop)
            try:
                comm = self._comms[device.type] = self._attempt.result()
            except BaseException:  # Ctrl-C leaves the attempt running, and the loop's thread would wait for it
                self._attempt.cancel()
                raise
            finally:
                self._attempt = None
            return comm

    async def _connected(self, device: torch.device) -> Comm:
        assert self.store is not None
        gpu = device.type == "cuda"
        comm = None if gpu or self._whole is None else await self._split_off(*self._whole)
        return comm or await new_comm(
            "nccl" if gpu else "auto",
            device,
            hints={} if gpu else {"yield_us": "0"},  # no event loop of the program needs the core
            name=f"{self.name}/{device.type}",
            timeout=self.timeout,
            store=dist.PrefixStore(device.type, self.store),
            rank=self.rank,
            size=self.size,
        )

    async def _split_off(self, whole: GroupComms, ranks: Sequence[int]) -> Comm | None:
        """The CPU comm of ``ranks`` of ``whole``; None if it cannot be split off the other CPU comm."""
        parent = whole.splittable
        if parent is None:
            return None
        try:
            return await parent._split(ranks, f"{self.name}/cpu", None, self.timeout, f"{self.name}/cpu")
        except (BrokenError, ClosedError):
            if parent is whole.splittable:
                raise
            return None  # the other comm is broken: the other ranks do not split it, either

    @property
    def splittable(self) -> Comm | None:
        """The CPU comm, if it was connected here, is in shared memory and works."""
        comm = self._comms.get("cpu")
        usable = comm is not None and self._portal is not None and comm.backend == "shm" and not comm._session.error
        return comm if usable else None

    def of(self, tensor: Tensor) -> Comm:
        """The comm for ``tensor``."""
        comm = self._comms.get(tensor.device.type)
        return self.connect(tensor.device) if comm is None else comm

    def any(self) -> Comm:
        """Any of the comms, for operations without tensors."""
        for comm in self._comms.values():
            return comm
        return self.connect(torch.device("cpu"))

    def all(self) -> list[Comm]:
        """The connected comms."""
        return list(self._comms.values())

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations."""
        self.timeout = timeout
        for comm in self.all():
            comm.set_timeout(timeout)

    def extend_timeout(self, extra: timedelta) -> None:
        for comm in self.all():
            comm.extend_timeout(extra)

    # -- ending -------------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Abort all operations on all ranks, without waiting for other ranks."""
        for comm in self.all():
            comm.abort(reason)
        on_a_thread(self.close)

    def close(self) -> None:
        """Wait for operations in flight, and close all comms but the given ones. Idempotent."""
        self._close(None)

    def end_of_process(self) -> None:
        """Close within ``EXIT_SECONDS``; an attempt to connect is cancelled."""
        attempt = self._attempt
        if attempt is not None:  # on a daemon thread
            attempt.cancel()
        self._close(EXIT_SECONDS)

    def _close(self, limit: float | None) -> None:
        if not self._connecting.acquire(timeout=-1 if limit is None else limit):
            return
        try:
            if self._closed:
                return
            self._closed = True
            portal, self._portal = self._portal, None
        finally:
            self._connecting.release()
        if portal is None or self._process != os.getpid():  # a forked child lacks the loop's thread
            return
        try:
            portal.call(self._closing, limit)
        finally:
            loops().__exit__(None, None, None)

    async def _closing(self, limit: float | None) -> None:
        for comm in self.all():
            if comm not in self._given:
                with contextlib.suppress(TimeoutError):  # the cancelled aclose() aborts the comm
                    async with asyncio.timeout(limit):
                        await comm.aclose()


@uncompiled
class SplittableGroup:
    """Mixin for torch's ``ProcessGroup`` over GroupComms: splitting, with names and errors as in torch's groups."""

    comms: GroupComms
    splits = 0  # number of splits without a description

    def split_group(
        self: Any,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> Any:
        if group_desc is None:
            self.splits += 1
            group_desc = f"{self.group_desc}:split:{self.splits - 1}"
        if timeout is None and opts is not None:
            timeout = opts._timeout
        name = part_name(self.group_name, new_ranks) if group_name is None else group_name
        comms = self.comms.part(new_ranks, timeout, name)
        if comms is None:
            return None
        made = type(self)(comms)
        made.bound_device_id = self.bound_device_id
        name_group(made, name, group_desc)
        return made


def part_name(name: str, ranks: list[int]) -> str:
    """torch's name for a part of the group ``name``."""
    return f"{name}:split:{list(ranks)}"


def name_group(group: Any, name: str, description: str) -> None:
    """Give a torch group a name and a description."""
    group._set_group_name(name)
    group._set_group_desc(description)
