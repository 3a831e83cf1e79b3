"""What only a store in memory can show; the shared behaviour is in test_base.py."""

from __future__ import annotations

import asyncio

import pytest

from asynccomm.errors import StoreError, StoreTimeoutError
from asynccomm.store.memory import MemoryStore


async def test_all_waiters_of_a_key_are_woken() -> None:
    store = MemoryStore()
    tasks = [asyncio.create_task(store.get("k")) for _ in range(50)]
    await asyncio.sleep(0)
    await store.set("k", b"v")
    assert await asyncio.gather(*tasks) == [b"v"] * 50


async def test_a_key_deleted_before_its_waiter_ran_is_waited_for_again() -> None:
    store = MemoryStore()
    task = asyncio.create_task(store.get("k"))
    await asyncio.sleep(0)
    await store.set("k", b"old")
    await store.delete("k")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    await store.set("k", b"new")
    assert await task == b"new"


async def test_the_timeout_names_only_what_is_missing() -> None:
    store = MemoryStore(timeout=0.01)
    await store.set("there", b"")
    with pytest.raises(StoreTimeoutError, match=r"keys \['missing'\] did not appear within 0\.01 s"):
        await store.wait(["there", "missing"])


async def test_cancelled_waiters_are_forgotten() -> None:
    store = MemoryStore()
    tasks = [asyncio.create_task(store.wait([f"k{i}"])) for i in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    await store.multi_set({f"k{i}": b"" for i in range(3)})
    await asyncio.gather(tasks[0], tasks[2])
    assert store._waiters == {}


async def test_adding_to_text_names_the_key() -> None:
    store = MemoryStore()
    await store.set("k", "hello")
    with pytest.raises(StoreError, match=r"'k' does not hold a number but b'hello'"):
        await store.add("k", 1)
