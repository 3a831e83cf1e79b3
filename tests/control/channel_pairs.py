"""Channels of several ranks in one process, on real sockets; hosts are made up, and TCP goes over 127.0.0.1."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from asynccomm.control import channel as channel_module
from asynccomm.control.channel import ControlChannel
from asynccomm.control.fingerprints import Fingerprint
from asynccomm.control.transport import thread as thread_module
from asynccomm.control.transport.connection import Tokens
from asynccomm.control.transport.schema import JsonObject
from asynccomm.control.transport.sockets import ListeningSockets
from asynccomm.control.transport.thread import ControlThread

from .unauthenticated import descriptors, names, until


class Member:
    """A comm, on one rank."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, JsonObject]] = []
        self.lost: list[tuple[int, str]] = []
        self.threads: set[str] = set()
        self.issued: list[Fingerprint] = []
        self.size = 2

    def on_news(self, rank: int, item: JsonObject) -> None:
        self.threads.add(threading.current_thread().name)
        if "bad" in item:
            raise ZeroDivisionError(item["bad"])
        self.heard.append((rank, item))

    def on_departure(self, rank: int, how: str) -> None:
        self.lost.append((rank, how))

    def on_request(self, question: JsonObject) -> JsonObject:
        if "bad" in question:
            raise ZeroDivisionError(question["bad"])
        return {"asked": question, "on": threading.current_thread().name}

    def take_fingerprints(self) -> tuple[int, Sequence[Fingerprint]]:
        found, self.issued = self.issued, []
        return self.size, found


async def two_threads(monkeypatch: pytest.MonkeyPatch) -> tuple[ControlChannel, ControlChannel, ControlThread]:
    """Two channels on one host, the second on a thread of its own."""
    own = ControlThread()

    def thread_of_its_own() -> ControlThread:
        own.acquire()
        return own

    doors = doors_of("aa")
    contacts, tokens = [one.contact for one in doors], Tokens.random()
    zero = await ControlChannel.open(0, contacts, tokens, doors[0])
    with monkeypatch.context() as patch:
        patch.setattr(channel_module, "control_thread", thread_of_its_own)
        one = await ControlChannel.open(1, contacts, tokens, doors[1])
    assert zero is not None
    assert one is not None
    return zero, one, own


class Job:
    """Its channels, by rank, and a member of comm "main" on each."""

    def __init__(self, channels: list[ControlChannel]) -> None:
        self.channels = channels
        self.members = [Member() for _ in channels]
        for channel, member in zip(channels, self.members, strict=True):
            channel.subscribe("main", member)

    async def kill(self, rank: int) -> None:
        """Its connections end, without a word."""
        channel = self.channels[rank]
        channel._thread.call(channel._begin_closing)
        await until(lambda: channel._closed, "its end")

    async def lost(self, rank: int, of: Sequence[int]) -> None:
        for one in of:
            await until(lambda one=one: rank in dict(self.members[one].lost), f"rank {one} to miss rank {rank}")


def doors_of(hosts: str) -> list[ListeningSockets]:
    found = []
    for rank, host in enumerate(hosts):
        doors = ListeningSockets(rank, "a run")
        if len(set(hosts)) > 1:
            doors.open_tcp("127.0.0.1", host)
        doors.contact = replace(doors.contact, host=host)
        found.append(doors)
    return found


@asynccontextmanager
async def job(hosts: str) -> AsyncIterator[Job]:
    held = descriptors()
    doors = doors_of(hosts)
    contacts = [one.contact for one in doors]
    tokens = Tokens.random()
    opened = await asyncio.gather(*(ControlChannel.open(rank, contacts, tokens, one) for rank, one in enumerate(doors)))
    found = Job([channel for channel in opened if channel is not None])
    assert len(found.channels) == len(hosts)
    try:
        yield found
    finally:
        await asyncio.gather(*(channel.aclose() for channel in found.channels))
    await until(lambda: thread_module._thread is None, "the thread to be forgotten")
    await until(lambda: not any(t.name == "asynccomm control" for t in threading.enumerate()), "the thread's end")
    await until(lambda: descriptors() <= held, "all descriptors closed")
    assert names() == set()


HOSTS = pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abab"])
