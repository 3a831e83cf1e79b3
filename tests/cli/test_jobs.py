"""Finding and sorting the sockets of jobs, and queries there."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from asynccomm.cli.jobs import ProcessSocket, ProcessTree, doors_here, doors_in, jobs_of, listen
from asynccomm.control.channel import ControlChannel
from asynccomm.control.transport.connection import Look, Tokens
from asynccomm.control.transport.framing import MESSAGE_BYTES
from asynccomm.control.transport.sockets import ListeningSockets, run_name

# -- finding and sorting ----------------------------------------------------------------------------------------------


def test_sockets_are_found_among_all() -> None:
    text = "\n".join(
        [
            "Num       RefCount Protocol Flags    Type St Inode Path",
            "0000000000000000: 00000002 00000000 00010000 0001 01 15761 @asynccomm/my run/3/123/abc",
            "0000000000000000: 00000003 00000000 00000000 0001 03 15762 @asynccomm/my run/3/123/abc",  # a connection
            "ffff888000000000: 00000002 00000000 00010000 0001 01     7 @asynccomm//0/77/def",
            "0000000000000000: 00000002 00000000 00010000 0001 01 15763 @asynccomm/run/x/123/abc",
            "0000000000000000: 00000002 00000000 00010000 0001 01 15764 @asynccomm/run/1/123",
            "0000000000000000: 00000002 00000000 00010000 0001 01 15765 /run/asynccomm/run/1/123/abc",
            "0000000000000000: 00000002 00000000 00010000 0001 01 15766",
            "a line of a name nonsense 0001 with @asynccomm/run/1/1/1",
            "",
        ]
    )
    first = ProcessSocket("asynccomm/my run/3/123/abc", "my run", 3, 123)
    assert doors_in(text) == [first, ProcessSocket("asynccomm//0/77/def", "", 0, 77)]


@pytest.mark.parametrize("run", ["plain", "a b/c", "é" * 50, "line\nline\x1b"])
def test_a_run_is_found_by_what_it_was_called(run: str) -> None:
    doors = ListeningSockets(3, run)
    try:
        found = [door for door in doors_here() if door.name == doors.contact.local]
        assert found == [ProcessSocket(doors.contact.local, run_name(run), 3, os.getpid())]
    finally:
        doors.close()


def door(run: str, rank: int, pid: int, number: int = 0) -> ProcessSocket:
    return ProcessSocket(f"asynccomm/{run}/{rank}/{pid}/{number}", run, rank, pid)


def sorted_by(knocks: dict[ProcessSocket, list[ProcessSocket] | None]) -> list[set[ProcessSocket]]:
    names = {each: None if family is None else [one.name for one in family] for each, family in knocks.items()}
    return [set(job.doors) for job in jobs_of(names)]


def test_families_are_kept_apart_unless_they_share_a_process() -> None:
    a, b = [door("run", rank, 10 + rank) for rank in (0, 1)], [door("run", rank, 20 + rank) for rank in (0, 1)]
    knocks: dict[ProcessSocket, list[ProcessSocket] | None] = {a[0]: a, a[1]: a, b[0]: b, b[1]: b}
    assert sorted_by(knocks) == [set(a), set(b)]
    both = [door("run", 0, 11, 1), door("run", 1, 20, 1)]  # another comm, of one process of each
    assert sorted_by(knocks | dict.fromkeys(both, both)) == [{*a, *b, *both}]


def test_who_does_not_open_is_where_the_others_say() -> None:
    a = [door("run", rank, 10 + rank) for rank in range(3)]
    (job,) = jobs_of({a[0]: None, a[1]: [one.name for one in a], a[2]: [one.name for one in a]})
    (family,) = job.families
    assert family.doors == tuple(a)
    assert family.opened == (a[1], a[2])


def test_who_is_in_no_family_that_opens() -> None:
    a, b = [door("run", 0, 10)], [door("run", 0, 20)]
    lone, own = door("run", 1, 30), door("run", 0, 10, 5)
    assert sorted_by({a[0]: a, own: None}) == [{a[0], own}]  # its process tells
    assert sorted_by({a[0]: a, lone: None}) == [{a[0], lone}]  # nothing else has that name
    assert sorted_by({a[0]: a, b[0]: b, lone: None}) == [{*a}, {*b}, {lone}]
    more = door("run", 2, 31)
    assert sorted_by({a[0]: a, b[0]: b, lone: None, more: None}) == [{*a}, {*b}, {lone, more}]
    assert sorted_by({lone: None, more: None, door("other", 0, 1): None}) == [{door("other", 0, 1)}, {lone, more}]
    nameless = [door("", rank, 40 + rank) for rank in range(3)]
    first, second, third = nameless  # without an id, they need not have anything to do with each other
    assert sorted_by({first: [first, second], second: None, third: None}) == [{first, second}, {third}]


# -- the other end ----------------------------------------------------------------------------------------------------


class Talker:
    """A member that says more than fits into a message if it is asked for stacks."""

    def __init__(self) -> None:
        self.lost: list[int] = []

    def on_news(self, rank: int, item: dict[str, Any]) -> None: ...

    def on_departure(self, rank: int, how: str) -> None:
        self.lost.append(rank)

    def on_request(self, question: dict[str, Any]) -> dict[str, Any]:
        return {"comm": "world", "size": 2} | ({"stacks": "x" * MESSAGE_BYTES} if question.get("stacks") else {})

    def prints(self) -> tuple[int, list[Any]]:
        return 2, []


async def test_stacks_that_are_too_long_are_left_out() -> None:
    """Else whoever asks would cost the rank its connection."""
    doors = [ListeningSockets(rank, f"talks-{os.getpid()}") for rank in range(2)]
    contacts, tokens = [each.contact for each in doors], Tokens.random()
    channels = await asyncio.gather(*(ControlChannel.open(rank, contacts, tokens, doors[rank]) for rank in range(2)))
    members = [Talker(), Talker()]
    try:
        for one, member in zip(channels, members, strict=True):
            assert one is not None
            one.subscribe("key", member)
        found = ProcessSocket.of_name(contacts[0].local)
        assert found is not None
        said = await listen(ProcessTree((found,), (found,)), Look(True))
        assert said.answers == {rank: {"key": {"comm": "world", "size": 2}} for rank in range(2)}
        assert not any(member.lost for member in members)
    finally:
        for one in channels:
            assert one is not None
            await one.aclose()
