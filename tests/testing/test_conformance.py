"""The conformance suite must catch backends that do not keep their promises: here is one broken in each way."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from asynccomm import MemoryStore, new_comm
from asynccomm.backends import arithmetic, loopback
from asynccomm.backends.base import Submission
from asynccomm.backends.loopback import Hub, LoopbackBackend
from asynccomm.backends.matching import Matching
from asynccomm.ops import AllGather, AllToAllSingle, Broadcast, Gather, Recv, Reduce, ReduceScatterSingle, Scatter
from asynccomm.reduce_op import ReduceOp
from asynccomm.testing.conformance import CHECKS, check_backend

perform, widen, narrow, combine = loopback._perform, arithmetic.widen, arithmetic.narrow, arithmetic.combine
Patch = Callable[[pytest.MonkeyPatch], None]


async def run_suite(size: int = 3) -> None:
    store = MemoryStore()

    async def rank(r: int) -> None:
        await check_backend(lambda name: new_comm("loopback", name=name, store=store, rank=r, size=size, timeout=5))

    async with asyncio.TaskGroup() as group:
        for r in range(size):
            group.create_task(rank(r))


def patch_perform(change: Callable[[Sequence[Submission]], None]) -> Patch:
    """Do the right thing, then ``change`` it."""

    def perform_and_change(ranks: Sequence[Submission]) -> None:
        perform(ranks)
        change(ranks)

    return lambda monkeypatch: monkeypatch.setattr(loopback, "_perform", perform_and_change)


def swapped_chunks(ranks: Sequence[Submission]) -> None:
    if isinstance(ranks[0].op, AllToAllSingle) and ranks[0].outputs[0].is_contiguous():
        out = ranks[0].outputs[0]
        out.copy_(out.flatten().flip(0).view(out.shape))


def forgets_the_last_element(ranks: Sequence[Submission]) -> None:
    if isinstance(ranks[0].op, AllGather):
        out = ranks[-1].outputs[0]
        if out.dim() and out.numel():
            out.view(torch.uint8)[(-1,) * out.dim()] = 0


def clobbers_inputs(ranks: Sequence[Submission]) -> None:
    if isinstance(ranks[0].op, ReduceScatterSingle):
        ranks[0].inputs[0].zero_()


def reduces_everywhere(ranks: Sequence[Submission]) -> None:
    op = ranks[0].op
    if isinstance(op, Reduce):
        for s in ranks:
            if not s.outputs:
                s.inputs[0].zero_()


def ignores_the_root(ranks: Sequence[Submission]) -> None:
    if isinstance(ranks[0].op, (Broadcast, Scatter)):
        for s in ranks:
            for out in s.outputs:
                out.zero_()


def gathers_in_reverse(ranks: Sequence[Submission]) -> None:
    for s in ranks:
        if isinstance(s.op, Gather) and len(s.outputs) > 1:
            first = s.outputs[0].clone()
            s.outputs[0].copy_(s.outputs[-1])
            s.outputs[-1].copy_(first)


def accumulates_in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    def combine_rounded(rows: torch.Tensor, reduction: ReduceOp, *, bools: bool = False) -> torch.Tensor:
        if rows.dtype != torch.float32 or reduction != ReduceOp.SUM:
            return combine(rows, reduction, bools=bools)
        total = rows[0].to(torch.bfloat16)
        for row in rows[1:]:
            total += row.to(torch.bfloat16)
        return total.float()

    monkeypatch.setattr(arithmetic, "combine", combine_rounded)


def differs_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def narrow_inexactly(acc: torch.Tensor, out: torch.Tensor, reduction: ReduceOp, size: int) -> None:
        nonlocal calls
        calls += 1
        if acc.dtype == torch.float64 and calls % 2:
            acc *= 1 + 1e-16 * 3
        narrow(acc, out, reduction, size)

    monkeypatch.setattr(arithmetic, "narrow", narrow_inexactly)


def forgets_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "widen", lambda t, op: widen(t, ReduceOp.SUM if op.factor is not None else op))


def ignores_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    post, claim, keep = Matching.post, Matching.claim, Matching.keep
    monkeypatch.setattr(Matching, "post", lambda self, receive, source, tag: post(self, receive, source, 0))
    monkeypatch.setattr(Matching, "claim", lambda self, source, tag: claim(self, source, 0))
    monkeypatch.setattr(Matching, "keep", lambda self, message, source, tag: keep(self, message, source, 0))


def holds_on_to_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = LoopbackBackend.submit
    kept: list[Submission] = []

    def submit_and_keep(self: LoopbackBackend, batch: Sequence[Submission]) -> None:
        kept.extend(batch)
        submit(self, batch)

    monkeypatch.setattr(LoopbackBackend, "submit", submit_and_keep)


def loses_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Hub.submit

    def submit_or_drop(self: Hub, rank: int, submission: Submission) -> None:
        if not (isinstance(submission.op, Recv) and submission.op.tag == 7):
            submit(self, rank, submission)

    monkeypatch.setattr(Hub, "submit", submit_or_drop)


def forgets_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Hub._transfer

    def transfer_from_nobody(self: Hub, source: int, *rest: Any) -> None:
        transfer(self, -1, *rest)

    monkeypatch.setattr(Hub, "_transfer", transfer_from_nobody)


def prefers_receives_from_any_source(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Matching.claim

    def claim_from_anybody_first(self: Matching[Any, Any], source: int, tag: int) -> Any:
        posted = self._posted[-1].get(tag)
        if not posted:
            return claim(self, source, tag)
        receive = posted.popleft()[1]
        if not posted:
            del self._posted[-1][tag]
        return receive

    monkeypatch.setattr(Matching, "claim", claim_from_anybody_first)


def looks_memory_up_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccomm.backends.base._detached", lambda tensors: tensors)


def runs_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccomm.ops.check_numel", lambda *args: None)


BROKEN: dict[str, Patch] = {
    "swapped chunks": patch_perform(swapped_chunks),
    "an element missing": patch_perform(forgets_the_last_element),
    "inputs clobbered": patch_perform(clobbers_inputs),
    "reduce everywhere": patch_perform(reduces_everywhere),
    "root ignored": patch_perform(ignores_the_root),
    "gather reversed": patch_perform(gathers_in_reverse),
    "half accumulation": accumulates_in_half,
    "ranks differ": differs_between_ranks,
    "factors forgotten": forgets_factors,
    "tags ignored": ignores_tags,
    "tensors held": holds_on_to_tensors,
    "message lost": loses_a_message,
    "source forgotten": forgets_the_source,
    "any source preferred": prefers_receives_from_any_source,
    "memory looked up late": looks_memory_up_late,
    "unchecked sizes": runs_what_was_refused,
}


@pytest.mark.parametrize("broken", BROKEN)
async def test_catches(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[broken](monkeypatch)
    with pytest.raises(ExceptionGroup) as caught:
        await run_suite()
    notes = [note for exc in caught.value.exceptions for note in getattr(exc, "__notes__", [])]
    assert any(note.startswith("in check ") for note in notes)


def test_names_of_checks_are_checked() -> None:
    with pytest.raises(ValueError, match="there is no check 'nonsense'"):
        asyncio.run(check_backend(lambda name: None, only=["nonsense"]))  # type: ignore[arg-type,return-value]
    assert len(CHECKS) > 25
