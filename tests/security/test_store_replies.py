"""What a server of the store writes: bytes of any kind, to the codec and to a client that waits for answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from itertools import product
from typing import Any

import pytest

from asynccomm.errors import StoreError, StoreProtocolError
from asynccomm.store.client import StoreClient
from asynccomm.store.codec import Codec
from tests.cases import cases
from tests.sampling import amount

from .mutations import little_memory, mutated

ASKS: list[tuple[Any, bytes]] = [  # a request, and a right answer to it
    (lambda codec: codec.ping(7), struct.pack("=I", 7)),
    (lambda codec: codec.get("key"), struct.pack("=Q", 5) + b"value"),
    (lambda codec: codec.compare_set("key", b"", b"new"), struct.pack("=Q", 3) + b"new"),
    (lambda codec: codec.add("key", 3), struct.pack("=q", 3)),
    (lambda codec: codec.num_keys(), struct.pack("=q", 12)),
    (lambda codec: codec.check(["a", "b"]), b"\0"),
    (lambda codec: codec.delete("key"), struct.pack("=q", 1)),
    (lambda codec: codec.multi_get(["a", "b"]), struct.pack("=Q", 1) + b"1" + struct.pack("=Q", 2) + b"22"),
    (lambda codec: codec.list_keys(), struct.pack("=qQ", 1, 4) + b"/key"),
]
ENDS: list[tuple[Any, bytes]] = [  # which nothing may follow
    (lambda codec: codec.wait(["key"]), b"\0"),
    (lambda codec: codec.wait(["key"]) and codec.cancel_wait(), b"\1"),
    (lambda codec: codec.wait(["key"]) and codec.cancel_wait(), b"\0\1"),
    (lambda codec: codec.barrier("key", 2), b"\0"),
]


def feed(codec: Codec, data: bytes, choose: random.Random) -> None:
    """In pieces, until it has enough. Whatever it says after that, it goes on saying it."""
    while data:
        n = choose.choice([1, 3, 8, len(data)])
        piece, data = data[:n], data[n:]
        try:
            codec.receive_data(piece)
        except StoreProtocolError:
            for more in (b"", b"\0", piece):
                with pytest.raises(StoreProtocolError):
                    codec.receive_data(more)
            return


@cases("seed", range(amount(20, 8)))
def test_answers_that_are_almost_right(seed: int) -> None:
    choose = random.Random(seed)
    with little_memory():
        for _ in range(200):
            asked = choose.choices(ASKS, k=choose.randrange(6))
            if choose.random() < 0.3:
                asked = [choose.choice(ENDS)]
            codec = Codec()
            for ask, _ in asked:
                ask(codec)
            feed(codec, mutated(b"".join([answer for _, answer in asked]), choose), choose)


@cases("seed", range(amount(10, 5)))
def test_any_bytes(seed: int) -> None:
    choose = random.Random(seed)
    with little_memory():
        for _ in range(200):
            codec = Codec()
            for ask, _ in choose.choices([*ASKS, *ENDS], k=choose.randrange(1, 5)):
                ask(codec)
            feed(codec, choose.randbytes(choose.choice([1, 8, 40, 300])), choose)


@cases("length, count", product([2**30 + 1, 2**40, 2**60, 2**63, 2**64 - 1], [1, 3]))
def test_a_length_takes_no_memory(length: int, count: int) -> None:
    with little_memory(64 << 20):
        codec = Codec()
        codec.multi_get(["key"] * count)
        with pytest.raises(StoreProtocolError):
            codec.receive_data(struct.pack("=Q", length))
    with little_memory(64 << 20):
        codec = Codec()
        codec.multi_get(["key"] * count)
        assert codec.receive_data(struct.pack("=Q", 1 << 30)) == []  # may come; it takes no more than what came


class Server:
    """Greets as a store does, then answers with what it is told, however it is asked."""

    def __init__(self, answers: random.Random) -> None:
        self.choose = answers
        self.greeted = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await reader.readexactly(10)
            writer.write(hello[6:])
            self.greeted += 1
            if self.greeted == 2:  # it is asked for a key that is not there
                await reader.read(1000)
                writer.write(bytes(8))
            while await reader.read(10_000):
                _, answer = self.choose.choice([*ASKS, *ENDS])
                writer.write(mutated(answer, self.choose))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.mark.parametrize("seed", range(amount(30, 10)))
async def test_a_client_of_a_server_that_speaks_nonsense(seed: int) -> None:
    choose = random.Random(seed)
    server = Server(choose)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listening, asyncio.timeout(20):
        client = await StoreClient.connect(
            "127.0.0.1", listening.sockets[0].getsockname()[1], timeout=0.2, connect_timeout=10.0
        )
        for _ in range(10):
            calls: list[Any] = [client.get("a", 0.05), client.wait(["b", "c"], 0.05), client.multi_get(["d"], 0.05)]
            with contextlib.suppress(StoreError):
                calls += [client.add("e", 1), client.check(["f"]), client.delete("g"), client.list_keys()]
            outcomes = await asyncio.gather(*[asyncio.wait_for(call, 0.5) for call in calls], return_exceptions=True)
            for outcome in outcomes:
                # a server that answers with less leaves its client waiting, as one does that is gone
                good = isinstance(outcome, (StoreError, bytes, int, bool, list, TimeoutError)) or outcome is None
                assert good, repr(outcome)
            if any(isinstance(outcome, StoreProtocolError) for outcome in outcomes):
                break
        await client.aclose()
