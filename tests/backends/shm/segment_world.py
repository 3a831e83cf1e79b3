"""Ranks of one process that bootstrap a shared segment."""

import asyncio
import json
import os
import select
import socket
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any

import torch

from asynccomm import MemoryStore, Store
from asynccomm.backends.base import BackendContext, RankInfo
from asynccomm.backends.shm import handshake
from asynccomm.backends.shm.bootstrap import PeerMapping, bootstrap_segment
from asynccomm.backends.shm.layout import Layout
from asynccomm.core.mailbox import Mailbox
from asynccomm.ops.validation import CommInfo

SETTINGS = {"chunk_bytes": 4096, "message_bytes": 1024}


def layout_of(size: int) -> Layout:
    return Layout(size, 4096, 2, 1024)


def context_of(store: Store, rank: int, size: int, *, hosts: Sequence[str] = ()) -> BackendContext:
    return BackendContext(
        group=CommInfo("test", rank, size, torch.device("cpu")),
        members=[RankInfo(r, hosts[r] if hosts else "here", 1000 + r) for r in range(size)],
        store=store,
        mailbox=Mailbox(asyncio.get_running_loop()),
        timeout=20,
        on_error=lambda error: None,
    )


class World:
    """Ranks in this process, with bells."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = MemoryStore()
        self.bells = [(os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)) for _ in range(size)]

    def rank(self, rank: int, **settings: int) -> Awaitable[PeerMapping]:
        context = context_of(self.store, rank, self.size)
        return bootstrap_segment(context, {**SETTINGS, **settings}, layout_of(self.size), self.bells[rank])

    def trusting(self, store: Store | None = None) -> list[BackendContext]:
        """The contexts of ranks that share a secret."""
        room = (store or self.store).prefix("room")
        return [replace(context_of(room, rank, self.size), secret=b"secret" * 5) for rank in range(self.size)]

    def joining(self, context: BackendContext) -> Awaitable[PeerMapping]:
        rank = context.group.rank
        return bootstrap_segment(context, SETTINGS, layout_of(self.size), self.bells[rank])

    async def all(self) -> list[PeerMapping]:
        return await asyncio.gather(*(self.rank(rank) for rank in range(self.size)))

    async def outcomes(self) -> list[PeerMapping | BaseException]:
        return await asyncio.gather(*(self.rank(rank) for rank in range(self.size)), return_exceptions=True)

    def close(self) -> None:
        for bells in self.bells:
            for fd in bells:
                os.close(fd)

    async def address(self) -> dict[str, Any]:
        """The announcement of rank 0."""
        return dict(json.loads(await self.store.get("address", 20)))

    def stranger(self, address: dict[str, Any]) -> socket.socket:
        """A connection to rank 0."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(f"\0{address['name']}")
        return sock

    def hello(self, address: dict[str, Any], rank: int) -> bytes:
        return handshake.HELLO.pack(bytes.fromhex(address["ask"]), rank)


def ended(liveness_fd: int) -> bool:
    return bool(select.select([liveness_fd], [], [], 0)[0]) and os.read(liveness_fd, 1) == b""


def check_mappings(mappings: Sequence[PeerMapping], bells: Sequence[tuple[int, int]]) -> None:
    size = len(mappings)
    for rank, mapping in enumerate(mappings):
        mapping.segment.words[rank] = rank + 1
        assert mapping.bells[rank] == bells[rank], "the own bells are passed on as they are"
        assert (len(mapping.bells), len(mapping.liveness_fds)) == (size, size)
        assert [other for other in range(size) if mapping.liveness_fds[other] == -1] == [rank]
        received = [fd for r in range(size) if r != rank for fd in (*mapping.bells[r], mapping.liveness_fds[r])]
        assert not any(os.get_inheritable(fd) for fd in (*received, mapping.liveness_fd))
    for mapping in mappings:
        assert mapping.segment.words[:size].tolist() == list(range(1, size + 1))
        for rank in range(size):
            for which in range(2):
                os.eventfd_write(mapping.bells[rank][which], 1)
    for pair in bells:
        assert [os.eventfd_read(fd) for fd in pair] == [size, size]
    for rank, mapping in enumerate(mappings):
        mapping.close()
        mapping.close()
        for later in mappings[rank + 1 :]:
            assert [ended(later.liveness_fds[r]) for r in range(size) if r <= rank] == [True] * (rank + 1)
            assert not any(ended(later.liveness_fds[r]) for r in range(rank + 1, size) if later.liveness_fds[r] != -1)
