"""Windows over gloo: requests, and requests that are damaged."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm import BackendError, new_comm
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.windows import MOST_SENT, SHORT, RequestKind, WindowRequest, WindowService
from asynccomm.backends.windows import LocalPart
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.ops import WindowInfo, WindowPut, WindowSignal
from asynccomm.ops.dtypes import CODES
from asynccomm.ops.validation import CommInfo
from tests.waiting import until

GROUP = CommInfo("c", 0, 1, torch.device("cpu"))
UNUSED: Any = None
WORD = st.integers(-(2**63), 2**63 - 1)


def service() -> WindowService:
    made = WindowService(UNUSED, GROUP, "test", lambda error: None)
    made.serve(3, LocalPart(WindowInfo(GROUP, 3, (64,), 2), 0))
    return made


@given(numbers=st.tuples(*[WORD] * 6, st.integers(0, 2**64 - 1), WORD))
def test_a_request_arrives_as_it_was_sent(numbers: tuple[int, ...]) -> None:
    request = WindowRequest(*numbers)
    assert WindowRequest.of(request.message(torch.ones(5, dtype=torch.uint8))) == request


@given(
    kind=st.one_of(
        st.sampled_from([RequestKind.PUT, RequestKind.ACCUMULATE, RequestKind.SIGNAL, RequestKind.GOODBYE]), WORD
    ),
    window=st.one_of(st.sampled_from([3, 3, 3, 4]), WORD),
    start=st.one_of(st.integers(-8, 80), WORD),
    nbytes=st.one_of(st.integers(-8, 80), WORD),
    dtype=st.one_of(st.sampled_from([CODES[torch.float32], CODES[torch.uint8]]), WORD),
    slot=st.one_of(st.integers(-1, 3), WORD),
)
def test_a_damaged_request_is_an_error_or_stays_in_its_window(
    kind: int, window: int, start: int, nbytes: int, dtype: int, slot: int
) -> None:
    request = WindowRequest(kind, window, start, nbytes, dtype, slot, 1, 1)
    fits = window == 3 and 0 <= start <= start + nbytes <= 64
    if fits and kind in (RequestKind.GET, RequestKind.FENCE):
        return  # these reply
    made = service()
    memory = made._parts[3].memory
    try:
        made._carry_out(0, request, torch.ones(SHORT, dtype=torch.uint8))
    except (BackendError, RuntimeError):  # torch refuses bytes that are no whole number of elements
        assert not memory.count_nonzero()
        return
    assert fits
    inside = torch.zeros(64, dtype=torch.bool)
    inside[start : start + nbytes] = True
    assert not memory[~inside].count_nonzero()


@pytest.mark.ranks(2)
async def test_an_operation_on_a_rank_that_has_closed_the_comm_is_an_error() -> None:
    comm = await new_comm("gloo", name="gone", timeout=20)
    window = await comm.window(8)
    await comm.barrier()
    if comm.rank == 0:
        await comm.aclose()
        return
    with pytest.raises(BackendError):
        while True:
            await window.put(torch.ones(1), 0)
    await comm.aclose()


class Sent:
    """A gloo group that only sends: ``waited`` counts the sends that were waited for."""

    def __init__(self) -> None:
        self.sent = self.waited = 0
        self.over = threading.Event()

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        self.sent += 1
        return SimpleNamespace(wait=self._wait)

    def _wait(self) -> None:
        self.waited += 1

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
        return SimpleNamespace(wait=self._never)

    def _never(self) -> None:
        self.over.wait(60)
        raise RuntimeError("over")


async def test_short_requests_are_done_in_the_call_and_do_not_pile_up() -> None:
    gloo: Any = Sent()
    group = CommInfo("c", 0, 2, torch.device("cpu"))
    made, mailbox = WindowService(gloo, group, "test", lambda error: None), Mailbox(asyncio.get_running_loop())
    info = WindowInfo(group, 3, (64, 64), 2)
    for number in range(1, 2 * MOST_SENT + 1):
        call = WindowSignal.of(info, 1, 0, 1, False) if number % 2 else WindowPut.of(info, torch.ones(2), 1, 0)
        work: Work[Any] = Work(call.op, number, mailbox, value=None, timeout=20, on_settled=lambda _: None)
        assert isinstance(call.op, (WindowSignal, WindowPut))
        made.submit(call.op, Submission(call, work))
        assert gloo.sent == number
        if number % MOST_SENT:
            assert work.done()
            assert gloo.waited == number // MOST_SENT * MOST_SENT
        await asyncio.wait_for(work, 20)
        if not number % MOST_SENT:
            assert gloo.waited == number
    made.abort()
    gloo.over.set()
    made.join(20)
    made.end()


@pytest.mark.ranks(2)
async def test_earlier_operations_are_done_before_a_fence_is() -> None:
    async with new_comm("gloo") as comm, await comm.window(4 * SHORT) as window:
        if comm.rank == 0:
            service = window._backend._service  # type: ignore[attr-defined]
            gates = [threading.Event(), threading.Event()]
            for lane, gate in zip(("send", "reply"), gates, strict=True):
                service._lanes.put((lane, 1), gate.wait)  # their threads are late
            out = torch.zeros(2)
            put, get, fence = window.put(torch.ones(SHORT), 1), window.get(out, 1), window.fence()
            later = window.fence()
            await until(lambda: "fence" not in service._lanes._lanes)  # all replies have come
            assert not fence.done()
            assert not later.done()
            for gate in gates:
                gate.set()
            await fence
            assert put.done()
            assert get.done()
            assert out.tolist() == [1.0, 1.0]
            await later
        await comm.barrier()
