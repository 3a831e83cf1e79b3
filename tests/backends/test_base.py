"""What is common to all backends."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import pytest
import torch

from asynccomm.backends.base import Backend, BackendContext, RankInfo, Submission, device_of
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.ops import AllGather, AllReduce
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo
from asynccomm.store.memory import MemoryStore


class Least(Backend):
    """As little as a backend can be."""

    name = "least"
    devices = frozenset({"cpu"})

    @classmethod
    async def connect(cls, context: BackendContext) -> Self:
        return cls()

    def submit(self, batch: Sequence[Submission]) -> None:
        for submission in batch:
            submission.work.settle()

    async def aclose(self) -> None:
        pass

    def abort(self) -> None:
        pass


async def test_the_least_backend() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    group = CommInfo("g", 0, 1, torch.device("cpu"))
    context = BackendContext(group, [RankInfo(0, "host", 1)], MemoryStore(), mailbox, 1.0, lambda error: None)
    assert context.hints == {}
    backend = await Least.connect(context)
    Least.check_hints({})
    call = AllGather.of(group, None, torch.ones(2))
    work: Work[Any] = Work(call.op, 0, mailbox, value=call.result, timeout=1.0, on_settled=lambda work: None)
    submission = Submission(call, work)
    assert (submission.op, submission.work) == (call.op, work)
    assert [t.data_ptr() for t in submission.inputs] == [t.data_ptr() for t in call.inputs]
    assert [t.data_ptr() for t in submission.outputs] == [t.data_ptr() for t in call.outputs]
    assert backend.call_context() is None
    assert submission.call_context is None
    with pytest.raises(NotImplementedError, match=r"^backend 'least' cannot estimate how long operations take$"):
        backend.estimate([submission])
    backend.submit([submission])
    assert await work is call.result
    backend.abort()
    await backend.aclose()


def test_a_submission_keeps_the_memory_it_was_made_with() -> None:
    group = CommInfo("g", 0, 1, torch.device("cpu"))
    parameter = torch.nn.Parameter(torch.ones(3))
    work: Any = None
    submission = Submission(AllReduce.of(group, parameter, ReduceOp.SUM), work)
    assert submission.inputs is submission.outputs
    assert not submission.inputs[0].requires_grad
    parameter.data = torch.zeros(1)
    assert submission.inputs[0].tolist() == [1.0] * 3


@pytest.mark.parametrize("missing", ["connect", "submit", "aclose", "abort"])
def test_a_backend_must_have_everything(missing: str) -> None:
    incomplete: Any = type("Incomplete", (Least,), {missing: getattr(Backend, missing)})
    with pytest.raises(TypeError, match=missing):
        incomplete()


def test_members_are_frozen() -> None:
    member = RankInfo(0, "host", 1)
    assert member == RankInfo(rank=0, host="host", pid=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        member.rank = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("problems", "first"),
    [(["", "", ""], None), (["", "no memory", "2 left"], (1, "no memory")), (["2 left", "", "x"], (0, "2 left"))],
)
async def test_the_first_problem_reaches_all_ranks(problems: list[str], first: tuple[int, str] | None) -> None:
    store = MemoryStore()
    contexts = [
        BackendContext(
            group=CommInfo("t", rank, 3, torch.device("cpu")),
            members=[RankInfo(each, "host", each) for each in range(3)],
            store=store,
            mailbox=Mailbox(asyncio.get_running_loop()),
            timeout=5.0,
            on_error=lambda error: None,
        )
        for rank in range(3)
    ]
    asked = [context.first_problem(problem) for context, problem in zip(contexts, problems, strict=True)]
    assert await asyncio.gather(*asked) == [first] * 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [("cpu", torch.device("cpu")), ("cuda:1", torch.device("cuda", 1)), (torch.device("meta"), torch.device("meta"))],
)
def test_devices(value: Any, expected: torch.device) -> None:
    assert device_of(value) == expected


def test_cuda_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of("cuda") == torch.device("cuda", 3)
    assert device_of("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("cuda") == torch.device("cuda")


@pytest.mark.parametrize("value", ["gpu", "", "cpu:x", None, 1.5, ["cpu"]])
def test_what_is_no_device(value: Any) -> None:
    with pytest.raises(ValueError, match="device must name a torch device") as caught:
        device_of(value)
    assert repr(value) in str(caught.value)
