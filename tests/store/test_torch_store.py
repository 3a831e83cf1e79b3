"""torch's stores as ours, and ours as torch's; the shared behaviour is in test_base.py."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest
from torch import distributed as dist

from asynccomm.errors import StoreError, StoreTimeoutError
from asynccomm.store import base
from asynccomm.store.client import StoreClient
from asynccomm.store.memory import MemoryStore
from asynccomm.store.torch_store import TorchStore, TorchStoreView


class Lost(dist.Store):
    """A torch store whose server has gone."""

    def __init__(self) -> None:
        super().__init__()

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")


async def test_torchs_errors_become_ours() -> None:
    with pytest.raises(StoreError, match="Lost: Connection reset") as caught:
        await TorchStore(Lost()).check(["k"])
    assert isinstance(caught.value.__cause__, dist.DistNetworkError)


async def test_a_waiter_does_not_keep_others_from_the_store(server: dist.TCPStore) -> None:
    store = TorchStore(server)
    waiting = asyncio.create_task(store.get("late"))
    assert [await store.add("n", 1) for _ in range(20)] == list(range(1, 21))
    assert not waiting.done()
    await store.set("late", b"v")
    assert await waiting == b"v"


@pytest.mark.parametrize("method", ["check", "get"])
async def test_a_store_that_hangs_is_not_waited_for_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    class Hanging(dist.Store):
        def check(self, keys: list[str]) -> bool:
            return method != "check" or over.wait(20)

        def get(self, key: str) -> bytes:
            over.wait(20)
            return b""

    over = threading.Event()
    monkeypatch.setattr(base, "REPLY_SECONDS", 0.05)
    try:
        with pytest.raises(StoreTimeoutError, match="the Hanging did not answer in time"):
            async with asyncio.timeout(10):
                await TorchStore(Hanging()).get("k", 0.01)
    finally:
        over.set()


def use_from_torch(store: TorchStoreView) -> None:
    store.set("bytes", b"\x00\xff")
    store.set("text", "é")
    assert store.get("bytes") == b"\x00\xff"
    assert store.get("text") == "é".encode()
    assert store.add("n", 3) == 3
    assert store.check(["bytes", "n"])
    assert not store.check(["missing"])
    store.wait(["n"])
    store.wait(["n"], timedelta(seconds=1))
    with pytest.raises(StoreTimeoutError, match="missing"):
        store.wait(["missing"], timedelta(milliseconds=10))
    with pytest.raises(StoreTimeoutError, match="missing"):
        store.get("missing")
    assert store.delete_key("n")
    assert not store.delete_key("n")
    prefixed = dist.PrefixStore("p", store)  # C++ calls the Python methods
    prefixed.set("k", "v")
    assert prefixed.get("k") == b"v"
    assert store.get("p/k") == b"v"
    assert prefixed.add("n", 2) == 2
    assert prefixed.check(["k"])
    prefixed.wait(["k"], timedelta(seconds=5))


async def test_ours_serves_torch_code_in_another_thread() -> None:
    store = MemoryStore()
    view = TorchStoreView(store, asyncio.get_running_loop(), timeout=0.05)
    await asyncio.to_thread(use_from_torch, view)
    assert await store.get("p/k") == b"v"


async def test_our_client_serves_torch_code_in_another_thread(client: StoreClient) -> None:
    view = TorchStoreView(client, asyncio.get_running_loop(), timeout=0.05)
    await asyncio.to_thread(use_from_torch, view)
    assert await client.get("p/k") == b"v"


async def test_a_thread_waits_while_the_loop_goes_on(until: Callable[..., Awaitable[None]]) -> None:
    store = MemoryStore()
    view = TorchStoreView(store, asyncio.get_running_loop(), timeout=10)
    thread = asyncio.create_task(asyncio.to_thread(view.get, "late"))
    await until(lambda: store._waiters)
    await store.set("late", b"v")
    assert await thread == b"v"


async def test_a_limit_of_torchs_is_no_lower_than_ours() -> None:
    store = MemoryStore()
    view = TorchStoreView(store, asyncio.get_running_loop(), timeout=0.5)
    with pytest.raises(StoreTimeoutError, match=r"within 0.5 s"):
        await asyncio.to_thread(view.wait, ["missing"], timedelta(milliseconds=1))
    with pytest.raises(StoreTimeoutError, match=r"within 0.6 s"):
        await asyncio.to_thread(view.wait, ["missing"], timedelta(milliseconds=600))


async def test_who_waits_at_the_end_leaves(until: Callable[..., Awaitable[None]]) -> None:
    store = MemoryStore()
    view = TorchStoreView(store, asyncio.get_running_loop(), timeout=3600)
    thread = asyncio.create_task(asyncio.to_thread(view.get, "never"))
    await until(lambda: store._waiters)
    view.end()
    async with asyncio.timeout(20):
        with pytest.raises(StoreError, match="does not need this store any more"):
            await thread
    await until(lambda: not store._waiters)
    with pytest.raises(StoreError, match="does not need this store any more"):
        await asyncio.to_thread(view.set, "k", "v")
    assert not await store.check(["k"])


@pytest.mark.parametrize("cancelled", [True, False])
def test_who_waits_for_a_loop_that_closes_leaves(cancelled: bool) -> None:
    store = MemoryStore()
    loop = asyncio.new_event_loop()
    view = TorchStoreView(store, loop, timeout=3600)
    errors: list[StoreError] = []

    def wait() -> None:
        try:
            view.get("never")
        except StoreError as exc:
            errors.append(exc)

    async def main() -> None:
        thread.start()
        async with asyncio.timeout(20):
            while not store._waiters:
                await asyncio.sleep(0.001)
        if cancelled:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)

    thread = threading.Thread(target=wait, daemon=True)
    loop.set_exception_handler(lambda *_: None)  # of what is still pending
    loop.run_until_complete(main())
    loop.close()
    thread.join(20)
    assert not thread.is_alive()
    assert len(errors) == 1
    with pytest.raises(StoreError, match="event loop has closed"):
        view.check(["k"])
