"""Results that are decoded when somebody first asks for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asynccomm import Comm, PayloadError
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.errors import BackendError
from asynccomm.ops import Barrier, Call
from asynccomm.testing.local import loopback_world


def work_of(finish: Callable[[Any], Any], value: object = "raw") -> Work[Any]:
    mailbox = Mailbox(asyncio.get_running_loop())
    return Work(Barrier(), 0, mailbox, value=value, timeout=600, finish=finish, on_settled=lambda work: None)


class Decoder:
    """Counts how often it is asked, and by which thread."""

    def __init__(self, *errors: Exception | None) -> None:
        self.asked: list[object] = []
        self.threads: list[int] = []
        self._errors = list(errors)

    def __call__(self, value: object) -> list[object]:
        self.asked.append(value)
        self.threads.append(threading.get_ident())
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error
        return [value]


async def test_once_at_the_first_result() -> None:
    decoder = Decoder()
    work = work_of(decoder)
    work.settle()
    assert work.done()
    assert work.duration is not None
    assert decoder.asked == [], "nobody has asked for the value"
    assert work.exception() is None, "it can be decoded"
    first = await work
    assert first == ["raw"]
    assert await work is first
    assert work.result() is first
    assert await asyncio.to_thread(work.wait) is first
    assert decoder.asked == ["raw"]


async def test_not_before_it_is_done() -> None:
    decoder = Decoder()
    work = work_of(decoder)
    with pytest.raises(asyncio.InvalidStateError):
        work.result()
    waiters = [asyncio.ensure_future(_outcome(work)) for _ in range(5)]
    await asyncio.sleep(0)
    assert decoder.asked == []
    work.settle()
    results = await asyncio.gather(*waiters)
    assert all(result is results[0] for result in results)
    assert len(decoder.asked) == 1


async def _outcome(work: Work[Any]) -> Any:
    return await work


async def test_from_any_thread_and_only_one() -> None:
    decoder, gate = Decoder(), threading.Barrier(8)
    results = []

    def slow(value: object) -> object:
        threading.Event().wait(0.01)  # long enough for the others to come, too
        return decoder(value)

    work = work_of(slow)

    def ask() -> None:
        gate.wait()
        results.append(work.wait(20))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    work.settle()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    assert len(results) == 8
    assert all(result is results[0] for result in results)
    assert len(decoder.asked) == 1
    assert decoder.threads[0] != threading.get_ident()
    assert await work is results[0]


async def test_never_after_an_error() -> None:
    decoder = Decoder()
    work = work_of(decoder)
    work.settle(BackendError("cut"))
    for _ in range(2):
        with pytest.raises(BackendError, match="cut"):
            await work
    assert decoder.asked == []


async def test_other_errors_than_ours_are_raised_by_each_await() -> None:
    decoder = Decoder(ValueError("one"), ValueError("two"), ValueError("three"))
    work = work_of(decoder)
    work.settle()
    with pytest.raises(ValueError, match="one"):
        await work
    with pytest.raises(ValueError, match="two"):
        work.result()
    with pytest.raises(ValueError, match="three"):
        await asyncio.to_thread(work.wait)
    assert work.exception() is None
    assert await work == ["raw"]
    assert len(decoder.asked) == 4


async def test_what_is_not_needed_any_more_is_let_go() -> None:
    class Raw:
        gone = False

        def __del__(self) -> None:
            Raw.gone = True

    work = work_of(lambda value: "decoded", Raw())
    work.settle()
    assert not Raw.gone
    assert await work == "decoded"
    assert Raw.gone


async def test_none_is_a_result_like_any_other() -> None:
    asked = []
    work = work_of(asked.append)
    work.settle()
    assert await work is None
    assert await work is None
    assert asked == ["raw"]


async def test_a_decoder_may_ask_for_another_result() -> None:
    inner = work_of(lambda value: f"inner {value}")
    outer = work_of(lambda value: f"outer {inner.result()}")
    inner.settle()
    outer.settle()
    assert await outer == "outer inner raw"


def submitted(comm: Comm, finish: Callable[[Any], Any]) -> Work[Any]:
    return comm._submit(Call(Barrier(), (), (), "raw", finish), None, None)


async def test_the_comm_goes_on_when_decoding_fails() -> None:
    async with loopback_world(2) as (a, b):
        error = PayloadError("no")
        decoder = Decoder(error)
        work = submitted(a, decoder)
        assert (await submitted(b, Decoder())) == ["raw"]
        for _ in range(3):
            with pytest.raises(PayloadError) as caught:
                await work
            assert caught.value is error
        assert decoder.asked == ["raw"]
        assert "open" in repr(a)
        assert a.statistics()[:3] == (1, 0, 0)
        tensors = [torch.ones(2), torch.ones(2)]
        await asyncio.gather(a.all_reduce(tensors[0]), b.all_reduce(tensors[1]))
        assert tensors[0].tolist() == [2, 2]


async def test_what_nobody_asks_for_is_never_decoded() -> None:
    reports: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
    async with loopback_world(1) as (comm,):
        decoder = Decoder(ValueError("never"))
        submitted(comm, decoder)
        await comm.barrier()
    await asyncio.sleep(0)
    assert decoder.asked == []
    assert reports == []
