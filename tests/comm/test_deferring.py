"""Queues of deferred calls on a submitter alone; whole scopes are in ``test_scopes`` and ``test_coalesce``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asynccomm import BackendError, NotSentError, ReduceOp
from asynccomm.batching.plan import BatchLimiter
from asynccomm.batching.queue import DeferredQueue
from asynccomm.comm.deferring import DeferredCalls
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.ops import AllReduce
from asynccomm.testing.local import loopback_world


def deferred(comm: Any) -> DeferredCalls:
    calls = comm._session.deferred
    assert isinstance(calls, DeferredCalls)
    return calls


def called(comm: Any) -> Work[Any]:
    work: Work[Any] = comm.all_reduce(torch.ones(2))
    return work


async def test_scopes_of_one_caller_share_a_queue_until_the_last_is_left() -> None:
    async with loopback_world(1) as (comm,):
        calls = deferred(comm)
        outer = calls.open_queue(BatchLimiter())
        inner = calls.open_queue(BatchLimiter())
        assert inner is outer
        assert outer.depth == 2
        calls.close_queue(inner)
        held = called(comm)
        assert held.seq == UNNUMBERED
        calls.flush(outer)
        calls.close_queue(outer)
        assert not calls.submitter.queues
        await held
        assert called(comm).seq == held.seq + 1


async def test_looking_at_operations_leaves_them_and_taking_removes_them() -> None:
    async with loopback_world(1) as (comm,):
        calls = deferred(comm)
        queue = calls.open_queue(BatchLimiter())
        works = [called(comm), called(comm)]
        assert [item.work for item in calls.submissions(queue)] == works
        assert [item.work for item in calls.submissions(queue)] == works
        assert [item.work for item in calls.take(queue, 1)] == works[1:]
        calls.submitter.drop(calls.take(queue), "a test says so")
        assert calls.submissions(queue) == []
        calls.close_queue(queue)
        assert isinstance(works[0].exception(), NotSentError)
        assert not works[1].done()  # was taken, and not dropped
        works[1].settle(BackendError("ends here"))


async def test_sending_all_fails_what_cannot_be_sent() -> None:
    def refuses(queue: DeferredQueue) -> None:
        raise RuntimeError("never sent")

    async with loopback_world(1) as (comm,):
        calls = deferred(comm)
        queue = calls.open_queue(BatchLimiter(), refuses)
        work = called(comm)
        calls.flush_all()
        calls.close_queue(queue)
        with pytest.raises(NotSentError, match="the comm was closed"):
            await work


async def test_a_backend_without_estimates_is_named() -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(NotImplementedError, match="loopback"):
            deferred(comm).check_estimates()


async def test_operations_that_cannot_be_sent_together_fail_and_the_queue_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with loopback_world(1) as (comm,):
        calls = deferred(comm)
        queue = calls.open_queue(BatchLimiter())

        def refuses(held: object) -> None:
            raise ValueError("not these")

        with monkeypatch.context() as patched:
            patched.setattr(calls.submitter, "send_planned", refuses)
            work = called(comm)
            with pytest.raises(ValueError, match="not these"):
                calls.flush(queue)
        assert isinstance(work.exception(), NotSentError)
        again = calls.submitter.submit(AllReduce.of(comm._group, torch.ones(2), ReduceOp.SUM), None, None)
        calls.flush(queue)
        calls.close_queue(queue)
        assert torch.equal(await again, torch.ones(2))
