"""The conformance suite must catch backends that do not keep their promises: here is one broken in each way."""

import asyncio
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from asynccomm import MemoryStore, new_comm
from asynccomm.backends import arithmetic, hazards, loopback, windows
from asynccomm.backends.base import Submission
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.loopback import Hub, LoopbackBackend
from asynccomm.backends.matching import MatchQueues
from asynccomm.batching import plan
from asynccomm.comm.methods import groups, state_dict, tensor_dicts
from asynccomm.comm.monitored_barrier import MonitoredBarriers
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Broadcast,
    Gather,
    Parcel,
    PeerOp,
    PeerParcel,
    Recv,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
    WindowPut,
    dims,
    variable,
)
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.queues.reading import ReadingEnd
from asynccomm.serialization.objects import IncomingObject
from asynccomm.serialization.tensor_dicts import Schema, Slices
from asynccomm.testing.conformance import CHECKS, check_backend
from asynccomm.testing.conformance.data import expect_equal

perform, widen, narrow, combine = loopback._perform, arithmetic.widen, arithmetic.narrow, arithmetic.combine
Patch = Callable[[pytest.MonkeyPatch], None]


async def run_suite(only: Sequence[str], size: int = 4, timeout: float = 5.0) -> None:
    store = MemoryStore()

    async def rank(r: int) -> None:
        await check_backend(
            lambda name: new_comm("loopback", name=name, store=store, rank=r, size=size, timeout=timeout), only=only
        )

    # no rank ends because another has failed: a rank that was cancelled while it closes would not say why it does
    outcomes = await asyncio.gather(*map(rank, range(size)), return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if errors:
        raise ExceptionGroup("ranks that failed", errors)


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


def reads_what_was_sent_before() -> Patch:
    """A large broadcast gives the data of the one before: its root has changed the tensor too early."""
    before: dict[int, torch.Tensor] = {}

    def change(ranks: Sequence[Submission]) -> None:
        for place, s in enumerate(ranks):
            if isinstance(s.op, Broadcast) and s.outputs and s.outputs[0].numel() == 40000:
                now = s.outputs[0].clone()
                s.outputs[0].copy_(before.get(place, now))
                before[place] = now

    return patch_perform(change)


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
    post, claim, keep = MatchQueues.post, MatchQueues.claim, MatchQueues.keep
    monkeypatch.setattr(MatchQueues, "post", lambda self, receive, source, tag: post(self, receive, source, 0))
    monkeypatch.setattr(MatchQueues, "claim", lambda self, source, tag: claim(self, source, 0))
    monkeypatch.setattr(MatchQueues, "keep", lambda self, message, source, tag: keep(self, message, source, 0))


def holds_on_to_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = LoopbackBackend.submit
    kept: list[Submission] = []

    def submit_and_keep(self: LoopbackBackend, batch: Sequence[Submission]) -> None:
        kept.extend(batch)
        submit(self, batch)

    monkeypatch.setattr(LoopbackBackend, "submit", submit_and_keep)


def loses_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Hub.submit

    def submit_or_drop(self: Hub, rank: int, batch: Sequence[Submission]) -> None:
        submit(self, rank, [each for each in batch if not (isinstance(each.op, Recv) and each.op.tag == 7)])

    monkeypatch.setattr(Hub, "submit", submit_or_drop)


def forgets_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Hub._transfer

    def transfer_from_nobody(self: Hub, source: int, *rest: Any) -> None:
        transfer(self, -1, *rest)

    monkeypatch.setattr(Hub, "_transfer", transfer_from_nobody)


def prefers_receives_from_any_source(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = MatchQueues.claim

    def claim_from_anybody_first(self: MatchQueues[Any, Any], source: int, tag: int) -> Any:
        posted = self._posted[-1].get(tag)
        if not posted:
            return claim(self, source, tag)
        receive = posted.popleft()[1]
        if not posted:
            del self._posted[-1][tag]
        return receive

    monkeypatch.setattr(MatchQueues, "claim", claim_from_anybody_first)


def looks_memory_up_late(monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = Submission.__init__
    late = functools.partialmethod(original, detached=True)
    monkeypatch.setattr(Submission, "__init__", late)


def runs_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccomm.ops.movement.check_numel", lambda *args: None)


def writes_beside(ranks: Sequence[Submission]) -> None:
    out = ranks[0].outputs[0] if ranks[0].outputs else torch.empty(0)
    if isinstance(ranks[0].op, AllGather) and not out.is_contiguous():
        whole = torch.empty(0, dtype=out.dtype).set_(out.untyped_storage())
        whole[0] = 0


def reverses_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts_along = dims.parts_along
    monkeypatch.setattr(dims, "parts_along", lambda *args: parts_along(*args)[::-1])


def shifts_uneven_parts(ranks: Sequence[Submission]) -> None:
    for s in ranks:
        if isinstance(s.op, AllToAll) and len(set(s.op.receives)) > 1:
            data = torch.cat([out.flatten() for out in s.outputs]).roll(1)
            for out, part in zip(s.outputs, torch.split(data, list(s.op.receives)), strict=True):
                out.copy_(part.view(out.shape))


def forgets_counts(ranks: Sequence[Submission]) -> None:
    for s in ranks:
        if isinstance(s.op, ReduceScatter) and s.op.counts:
            s.outputs[0].copy_(ranks[0].outputs[0].flatten()[:1])


def forgets_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeroes(self: variable._Concatenated) -> None:
        if self._parts:
            for part in self._parts[self._rank]:
                part.zero_()

    monkeypatch.setattr(variable._Concatenated, "keep", zeroes)


def lets_the_first_output_stay(ranks: Sequence[Submission]) -> None:
    for s in ranks:
        if isinstance(s.op, AllGather) and len(s.outputs) == len(ranks):
            s.outputs[0].copy_(ranks[0].inputs[0].view(s.outputs[0].shape))


def takes_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, finish = Delivery.accept, Delivery.finish

    def accept_anything(self: Delivery, *args: Any) -> Any:
        tensors = accept(self, *args)
        self.error = None
        return tensors

    monkeypatch.setattr(Delivery, "accept", accept_anything)
    monkeypatch.setattr(Delivery, "finish", finish)


def forgets_the_last_of_several(ranks: Sequence[Submission]) -> None:
    for s in ranks:
        if isinstance(s.op, (AllReduce, Broadcast)) and len(s.outputs) > 1:
            s.outputs[-1].zero_()


def gathers_lists_tensor_by_tensor(ranks: Sequence[Submission]) -> None:
    for s in ranks:
        if isinstance(s.op, AllGather) and len(s.inputs) > 1:
            data = torch.cat([out.flatten().view(torch.uint8) for out in s.outputs[:: len(s.inputs)]])
            s.outputs[0].copy_(data[-s.outputs[0].nbytes :].view(s.outputs[0].dtype).view(s.outputs[0].shape))


def works_in_the_input(ranks: Sequence[Submission]) -> None:
    for s in ranks:
        if isinstance(s.op, (AllReduce, Reduce)) and s.outputs and s.outputs is not s.inputs:
            s.inputs[0].copy_(s.outputs[0].reshape(s.inputs[0].shape))


def clears_outputs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def clear_and_perform(ranks: Sequence[Submission]) -> None:
        for s in ranks:
            if isinstance(s.op, AllGatherSingle):
                s.outputs[0].zero_()
        perform(ranks)

    monkeypatch.setattr(loopback, "_perform", clear_and_perform)


def ignores_conjugation(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = arithmetic.resolved
    monkeypatch.setattr(arithmetic, "resolved", lambda t: resolved(t.conj() if t.is_conj() else t))


def ignores_negation(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = arithmetic.resolved
    monkeypatch.setattr(arithmetic, "resolved", lambda t: resolved(torch._neg_view(t) if t.is_neg() else t))


def turns_batches_round(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = LoopbackBackend.submit
    monkeypatch.setattr(LoopbackBackend, "submit", lambda self, batch: submit(self, batch[::-1]))


def errs_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def perform_most(ranks: Sequence[Submission]) -> None:
        nonlocal calls
        calls += 1
        perform(ranks)
        if calls % 100 == 0:
            for s in ranks:
                for out in s.outputs:
                    out.zero_()

    monkeypatch.setattr(loopback, "_perform", perform_most)


def swaps_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    parcels_for = loopback._parcels_for

    def parcels_of_others(*args: Any) -> dict[int, Parcel]:
        parcels = parcels_for(*args)
        return dict(zip(parcels, [*parcels.values()][::-1], strict=True))

    monkeypatch.setattr(loopback, "_parcels_for", parcels_of_others)


def lets_objects_meet_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerParcel, "key", PeerOp.key)


def trusts_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = IncomingObject.decode
    monkeypatch.setattr(IncomingObject, "decode", lambda self, *, weights_only: decode(self, weights_only=False))


def sorts_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Schema.build

    def build_sorted(self: Schema, *args: Any) -> dict[Any, Any]:
        return dict(sorted(build(self, *args).items(), key=str))

    monkeypatch.setattr(Schema, "build", build_sorted)


def ignores_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dict.StateReceiver, "__call__", lambda self, *args: self.tensors)


def sends_the_first_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_dicts, "Slices", lambda parts, part, *rest: Slices(parts, 0, *rest))
    monkeypatch.setattr(tensor_dicts._DictReceiver, "_check_share", lambda *args: None)


def sorts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    distinct = groups.distinct
    monkeypatch.setattr(groups, "distinct", lambda *args: sorted(distinct(*args)))


def monitors_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pass_through(self: MonitoredBarriers, *args: Any) -> None:
        pass

    monkeypatch.setattr(MonitoredBarriers, "pass_through", pass_through)


def merges_across_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_cuts_by_memory", plan._cuts_by_kind)


def reads_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Submission.__init__

    def read(self: Submission, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        hazards.load(self)

    monkeypatch.setattr(Submission, "__init__", read)


# What is broken, how, and the check that must see it.
def accumulates_by_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "accumulate", windows.put)


def signals_ahead_of_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    apply, late = windows.LocalPart.apply, []  # type: ignore[var-annotated]

    def apply_late(self: windows.LocalPart, submission: Submission) -> None:
        if isinstance(submission.op, WindowPut):
            late.append((self, submission))
            if len(late) > 4:
                apply(*late.pop(0))
        else:
            apply(self, submission)

    monkeypatch.setattr(windows.LocalPart, "apply", apply_late)


def loses_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ReadingEnd.next
    calls = itertools.count()

    def next_or_lost(end: ReadingEnd) -> tuple[Any] | None:
        found = kept(end)
        return kept(end) if found is not None and next(calls) % 7 == 6 else found

    monkeypatch.setattr(ReadingEnd, "next", next_or_lost)


BROKEN: dict[str, tuple[Patch, str]] = {
    "swapped chunks": (patch_perform(swapped_chunks), "all_to_all_single_in_and_out_of_place"),
    "an element missing": (patch_perform(forgets_the_last_element), "all_gather_list_and_single"),
    "inputs clobbered": (patch_perform(clobbers_inputs), "reduce_scatter_list_and_single"),
    "reduce everywhere": (patch_perform(reduces_everywhere), "reduce_every_root_leaves_others_alone"),
    "root ignored": (patch_perform(ignores_the_root), "broadcast_every_root_dtype_and_layout"),
    "read too late": (reads_what_was_sent_before(), "shared_tensors_change_between_operations"),
    "gather reversed": (patch_perform(gathers_in_reverse), "scatter_and_gather_every_root"),
    "half accumulation": (accumulates_in_half, "halves_accumulate_in_fp32"),
    "ranks differ": (differs_between_ranks, "all_reduce_is_bitwise_identical"),
    "factors forgotten": (forgets_factors, "premul_sum_uses_each_ranks_factor"),
    "tags ignored": (ignores_tags, "messages_keep_their_order_and_tags"),
    "tensors held": (holds_on_to_tensors, "works_let_go_of_tensors"),
    "message lost": (loses_a_message, "messages_keep_their_order_and_tags"),
    "source forgotten": (forgets_the_source, "messages_to_oneself_of_any_size_and_tag"),
    "any source preferred": (prefers_receives_from_any_source, "receives_from_any_source"),
    "memory looked up late": (looks_memory_up_late, "operations_keep_the_memory_they_were_given"),
    "unchecked sizes": (runs_what_was_refused, "bad_arguments_send_nothing"),
    "parts reversed": (reverses_parts, "all_gather_single_along_every_dim"),
    "memory beside an output": (patch_perform(writes_beside), "all_gather_single_along_every_dim"),
    "uneven parts shifted": (patch_perform(shifts_uneven_parts), "all_to_all_of_lists"),
    "sizes ignored": (patch_perform(forgets_counts), "reduce_scatter_v_with_and_without_sizes"),
    "own part missing": (forgets_its_own_part, "all_gather_v_with_and_without_sizes"),
    "first output stays": (patch_perform(lets_the_first_output_stay), "outputs_that_are_one"),
    "misfits taken": (takes_what_does_not_fit, "what_does_not_fit_is_refused"),
    "last of several missing": (patch_perform(forgets_the_last_of_several), "all_reduce_coalesced_every_dtype_and_op"),
    "lists mixed up": (patch_perform(gathers_lists_tensor_by_tensor), "all_gather_coalesced_every_dtype"),
    "ranks differ in lists": (differs_between_ranks, "all_reduce_coalesced_is_bitwise_identical"),
    "input used as scratch": (patch_perform(works_in_the_input), "all_reduce_into_another_tensor"),
    "outputs cleared first": (clears_outputs_first, "all_gather_in_place"),
    "conjugation ignored": (ignores_conjugation, "conjugated_tensors_in_every_form"),
    "negation ignored": (ignores_negation, "negated_tensors_in_every_form"),
    "batches turned round": (turns_batches_round, "a_batch_meets_single_sends_and_receives"),
    "errors now and then": (errs_now_and_then, "two_hundred_operations_of_all_kinds_in_flight"),
    "parcels swapped": (swaps_parcels, "objects_of_every_kind_to_all"),
    "objects meet tensors": (lets_objects_meet_tensors, "objects_keep_their_order_and_tags_beside_tensors"),
    "weights_only ignored": (trusts_everybody, "refused_objects_leave_the_comm_usable"),
    "keys sorted": (sorts_keys, "tensor_dicts_from_every_root"),
    "names ignored": (ignores_names, "states_from_every_root"),
    "shares mixed up": (sends_the_first_share, "shares_of_dicts_from_group_to_group"),
    "ranks sorted": (sorts_ranks, "groups_in_order_and_permuted"),
    "conflicts ignored": (merges_across_conflicts, "operations_on_the_same_tensors_in_one_scope"),
    "sums written": (accumulates_by_writing, "accumulates_of_all_ranks_add_up"),
    "puts behind signals": (signals_ahead_of_puts, "windows_carry_puts_behind_signals"),
    "tokens read at the call": (reads_at_the_call, "tokens_that_an_operation_in_flight_writes"),
    "item lost": (loses_an_item, "queues_carry_items_beside_collectives"),
    "nothing monitored": (monitors_nothing, "monitored_barriers_name_who_is_missing"),
}


@pytest.mark.parametrize("broken", BROKEN)
async def test_catches(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, check = BROKEN[broken]
    patch(monkeypatch)
    with pytest.raises(ExceptionGroup) as caught:
        await run_suite([check], timeout=1.0 if patch is loses_a_message else 5.0)  # nothing else ends that wait
    notes = [note for exc in caught.value.exceptions for note in getattr(exc, "__notes__", [])]
    assert any(note.startswith(f"in check {check!r}") for note in notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint16, torch.bool])
def test_elements_that_differ_are_shown_from_the_first_one_on(dtype: torch.dtype) -> None:
    expected = torch.zeros(4, 25, dtype=dtype)
    actual = expected.clone()
    actual[2, 0] = actual[3, 24] = 1
    values, zero = actual.flatten()[50:66].tolist(), expected[0, 0].item()
    with pytest.raises(AssertionError) as caught:
        expect_equal(actual, expected, "test")
    assert str(caught.value).splitlines() == [
        "test: 2 of 100 elements differ; from flat index 50 on:",
        f" got      {values}",
        f" expected {[zero] * 16}",
    ]
    assert values[0] != zero
    expect_equal(expected.clone(), expected, "test")


def test_every_module_of_checks_has_a_broken_backend() -> None:
    assert {CHECKS[check].__module__ for _, check in BROKEN.values()} == {c.__module__ for c in CHECKS.values()}


def test_names_of_checks_are_checked() -> None:
    with pytest.raises(ValueError, match="there is no check 'nonsense'"):
        asyncio.run(check_backend(lambda name: None, only=["nonsense"]))  # type: ignore[arg-type,return-value]
    assert len(CHECKS) > 100
