"""Sizes that travel with the data: what a rank gives, and where it has what comes put. Played by hand, rank 1 of 3."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm.errors import PayloadError
from asynccomm.ops import Call, Parcel, Parcels
from asynccomm.ops.dtypes import BY_NAME
from asynccomm.ops.validation import CommInfo
from asynccomm.ops.variable import (
    all_gather_v,
    all_gather_v_coalesced,
    all_to_all,
    all_to_all_v_single,
    gather_v,
    scatter_v,
)
from tests.cases import cases
from tests.comm.methods.argument_matrix import GROUP, RANK, SIZE, around, fails, several, t

F, D = torch.float32, torch.float64


def group(rank: int, size: int = SIZE) -> CommInfo:
    return CommInfo("grads", rank, size, torch.device("cpu"))


def bring(call: Call, parcels: dict[int, Parcel]) -> Any:
    """Do with ``parcels`` what a backend would; gives what awaiting would."""
    assert call.begin is not None
    call.begin(call.parcels, call.outputs)
    lengths = {source: parcel.nbytes for source, parcel in parcels.items()}
    for source, parcel in parcels.items():
        assert call.place is not None
        places = call.place(source, parcel.head, lengths)
        assert sum(place.nbytes for place in places) == parcel.nbytes
        for place, tensor in zip(places, parcel.tensors, strict=len(places) > 0):
            assert not place.requires_grad
            place.copy_(tensor.reshape(place.shape))
    if call.keep is not None:
        call.keep()
    return call.finish(call.result) if call.finish is not None else call.result


def everybody(calls: list[Call], rank: int = RANK) -> dict[int, Parcel]:
    op = calls[0].op
    assert isinstance(op, Parcels)
    givers = [r for r in range(len(calls)) if r != rank and op.gives(r)]
    return {r: calls[r].parcels[0 if op.shared else rank] for r in givers}


# -- all_gather_v


@cases("dim, given", product([0, 1, -1], [False, True]))
def test_all_gather_v(dim: int, given: bool) -> None:
    parts = [torch.arange(2.0 * n).view((n, 2) if dim == 0 else (2, n)) + 100 * n for n in (3, 1, 0)]
    expected = torch.cat(parts, dim)
    calls = [all_gather_v(group(r), None, part, dim) for r, part in enumerate(parts)]
    output = torch.empty_like(expected) if given else None
    mine = all_gather_v(GROUP, output, parts[RANK], dim)
    assert mine.op == Parcels("all_gather_v")
    assert mine.inputs == ()
    assert len(mine.outputs) == given
    result = bring(mine, everybody(calls))
    assert result.equal(expected)
    assert output is None or result is output


def test_all_gather_v_of_nothing_but_sizes() -> None:
    calls = [all_gather_v(group(r), None, t(n, 0), 0) for r, n in enumerate((3, 1, 2))]
    assert bring(calls[RANK], everybody(calls)).shape == (6, 0)
    output = t(6, 0)
    assert bring(all_gather_v(GROUP, output, t(1, 0), 0), everybody(calls)) is output
    mine = all_gather_v(GROUP, t(5, 0), t(1, 0), 0)
    for _ in range(2):
        with pytest.raises(PayloadError, match=r"output must have shape \(6, 0\) for all parts, got \(5, 0\)"):
            bring(mine, everybody(calls))


def test_all_gather_v_into_what_is_too_small_or_too_large() -> None:
    calls = [all_gather_v(group(r), None, t(n, 2), 0) for r, n in enumerate((3, 1, 2))]
    for rows in (1, 5, 7):
        mine = all_gather_v(GROUP, t(rows, 2), t(1, 2), 0)
        with pytest.raises(PayloadError, match=rf"output must have shape \(6, 2\) for all parts, got \({rows}, 2\)"):
            bring(mine, everybody(calls))


def test_what_is_wrong_with_an_output_whatever_comes() -> None:
    for wrong in (t(0, 2), t(9), t(9, 3), t(9, 2, 1), t()):
        text = fails(ValueError, all_gather_v, GROUP, wrong, t(1, 2), 0)
        assert text.startswith("output must have the shape of input, (1, 2), but along dim 0 ")
        assert text.endswith(f"got {tuple(wrong.shape)}")
    text = fails(ValueError, all_gather_v, GROUP, t(9, 2, dtype=D), t(1, 2), 0)
    assert text == "output has dtype torch.float64, but input has torch.float32"
    text = fails(ValueError, all_gather_v, GROUP, None, t(), 0)
    assert text == "input must have a dim 0, got a scalar"


def test_others_that_differ_are_refused() -> None:
    mine = all_gather_v(GROUP, None, t(1, 2), 0)
    for other in (t(1, 2, dtype=torch.int32), t(1, 3), t(1, 2, 1), t(1)):
        with pytest.raises(PayloadError, match=r"rank 2 sent a tensor that differs in dtype or .*: float32 \[n, 2\]"):
            bring(mine, everybody([mine, mine, all_gather_v(group(2), None, other, 0)]))


def test_heads_that_make_no_sense() -> None:
    mine = all_gather_v(GROUP, None, t(1, 2), 0)
    head = mine.parcels[0].head
    assert mine.place is not None
    with pytest.raises(PayloadError, match="rank 0 sent a head of 3 bytes, not 12"):
        mine.place(0, b"abc", {0: 8, 2: 8})
    with pytest.raises(PayloadError, match="rank 0 sent 9 bytes for an extent of 1"):
        mine.place(0, head, {0: 9, 2: 8})


def test_the_own_part_is_as_it_is_when_the_operation_takes_effect() -> None:
    source = torch.zeros(2)
    mine = all_gather_v(GROUP, None, source, 0)
    others = [all_gather_v(group(r), None, torch.full((n,), -1.0), 0) for r, n in enumerate((1, 2, 3))]
    shaped = gather_v(GROUP, None, source, RANK)
    source.fill_(7)  # as an operation does that was called earlier and is not over
    assert bring(mine, everybody(others)).tolist() == [-1, 7, 7, -1, -1, -1]
    assert shaped.begin is not None
    shaped.begin(shaped.parcels, ())
    source.fill_(9)
    parcels = everybody([gather_v(group(r), None, torch.ones(1), RANK) for r in range(SIZE)])
    lengths = {rank: parcel.nbytes for rank, parcel in parcels.items()}
    assert shaped.place is not None
    for rank, parcel in parcels.items():
        shaped.place(rank, parcel.head, lengths)
    assert shaped.finish is not None
    assert shaped.finish(shaped.result)[RANK].tolist() == [7, 7]


def test_outputs_have_stand_ins() -> None:
    """The parts go there; the result is what was given."""
    whole, stand_in = torch.zeros(6), torch.zeros(6)
    mine = all_gather_v(GROUP, whole, torch.ones(2), 0)
    others = everybody([all_gather_v(group(r), None, torch.full((n,), -1.0), 0) for r, n in enumerate((1, 2, 3))])
    replaced = mine._replace(begin=lambda parcels, _: mine.begin and mine.begin(parcels, (stand_in,)))
    assert bring(replaced, others) is whole
    assert stand_in.tolist() == [-1, 1, 1, -1, -1, -1]
    assert not whole.any()


@cases("given", [False, True])
def test_alone(given: bool) -> None:
    alone, source = group(0, 1), torch.arange(6.0, requires_grad=True).view(2, 3)
    output = t(2, 3) if given else None
    for call in (
        all_gather_v(alone, output, source, 1),
        all_to_all_v_single(alone, output, source, None),
    ):
        result = bring(call, {})
        assert result.equal(source)
        assert not result.requires_grad
        assert output is None or result is output
    assert [x.tolist() for x in bring(all_to_all(alone, [source]), {})] == [source.tolist()]
    assert [x.tolist() for x in bring(gather_v(alone, None, source, 0), {})] == [source.tolist()]
    assert bring(scatter_v(alone, output, [source], 0), {}).equal(source)
    assert bring(all_gather_v(alone, None, t(3, 0), 0), {}).shape == (3, 0)


def test_alone_an_output_is_known_to_be_wrong_at_the_call() -> None:
    text = fails(ValueError, all_gather_v, group(0, 1), t(3, 3), t(2, 3), 0)
    assert text.startswith("output must have the shape of input, (2, 3)")


@cases("given", [False, True])
def test_all_gather_v_of_several(given: bool) -> None:
    def parts(rank: int) -> list[Tensor]:
        n = [3, 1, 0][rank]
        return [torch.arange(2.0 * n).view(n, 2) + rank, torch.full((n,), rank), t(n, 0)]

    calls = [all_gather_v_coalesced(group(r), None, parts(r), 0) for r in range(SIZE)]
    expected = [torch.cat([parts(r)[i] for r in range(SIZE)]) for i in range(3)]
    outputs = [torch.empty_like(x) for x in expected] if given else None
    mine = all_gather_v_coalesced(GROUP, outputs, parts(RANK), 0)
    assert mine.op == Parcels("all_gather_v_coalesced")
    result = bring(mine, everybody(calls))
    assert all(a.equal(b) for a, b in zip(result, expected, strict=True))
    assert outputs is None or result is outputs


def test_several_are_checked() -> None:
    text = fails(ValueError, all_gather_v_coalesced, GROUP, [t(9, 2), t(9, 3)], [t(1, 2), t(1, 2)], 0)
    assert text.startswith("outputs[1] must have the shape of inputs[1], (1, 2), but along dim 0 ")
    text = fails(ValueError, all_gather_v_coalesced, GROUP, [t(9, 2)], [t(1, 2), t(1, 2)], 0)
    assert text == "outputs must have as many tensors as inputs, 2, got 1"
    text = fails(ValueError, all_gather_v_coalesced, GROUP, None, [t(1, 2), t(2, 2)], 0)
    assert text.startswith("inputs must all have one extent along the dimension: inputs[0] has 1, inputs[1] has 2")


# -- all_to_all_v_single


def test_all_to_all_v() -> None:
    inputs = [torch.arange(12.0).view(6, 2) + 100 * r for r in range(SIZE)]
    splits: list[Any] = [[1, 3, 2], None, (0, 0, 4)]
    calls = [all_to_all_v_single(group(r), None, inputs[r], splits[r]) for r in range(SIZE)]
    assert calls[RANK].op == Parcels("all_to_all_v_single", shared=False)
    expected = torch.cat([inputs[0][1:4], inputs[1][2:4], inputs[2][0:0]])
    assert bring(calls[RANK], everybody(calls)).equal(expected)
    output = torch.full((7, 2), -1.0)
    mine = all_to_all_v_single(GROUP, output, inputs[RANK], None)
    assert bring(mine, everybody(calls)) is output
    assert output[:5].equal(expected)
    assert output[5:].eq(-1).all(), "what is left over stays as it was"


def test_all_to_all_v_into_what_is_too_small() -> None:
    calls = [all_to_all_v_single(group(r), None, t(6, 2), None) for r in range(SIZE)]
    mine = all_to_all_v_single(GROUP, t(5, 2), t(6, 2), None)
    with pytest.raises(PayloadError, match=r"output must have at least shape \(6, 2\) for all parts, got \(5, 2\)"):
        bring(mine, everybody(calls))
    text = fails(ValueError, all_to_all_v_single, GROUP, t(1, 2), t(6, 2), None)
    assert text == "output must have at least 2 rows of shape (2,), got shape (1, 2)"


# -- any shapes and dtypes


def mixed(rank: int) -> list[Tensor]:
    return [
        torch.arange(3) + rank,
        torch.full((2, 2), 1j * rank),
        torch.ones(rank, 0, 4, dtype=torch.bool),
    ]


def shown(tensors: list[Tensor]) -> list[object]:
    return [(x.dtype, x.shape, x.tolist()) for x in tensors]


def test_all_to_all() -> None:
    calls = [all_to_all(group(r), mixed(r)) for r in range(SIZE)]
    assert calls[RANK].op == Parcels("all_to_all", shared=False)
    result = bring(calls[RANK], everybody(calls))
    assert shown(result) == shown([mixed(r)[RANK] for r in range(SIZE)])
    assert result[RANK].data_ptr() != mixed(RANK)[RANK].data_ptr()


def test_gather_v() -> None:
    calls = [gather_v(group(r), None, mixed(0)[r], RANK) for r in range(SIZE)]
    assert calls[RANK].op == Parcels("gather_v", taker=RANK)
    assert (calls[0].result, calls[0].finish, calls[0].place) == (None, None, None)
    assert shown(bring(calls[RANK], everybody(calls))) == shown(mixed(0))
    outputs = [torch.zeros_like(x).reshape(-1) for x in mixed(0)]
    mine = gather_v(GROUP, outputs, mixed(0)[RANK], RANK)
    assert bring(mine, everybody(calls)) is outputs
    assert [x.tolist() for x in outputs] == [x.reshape(-1).tolist() for x in mixed(0)]


def test_gather_v_into_what_does_not_fit() -> None:
    calls = [gather_v(group(r), None, t(4), RANK) for r in range(SIZE)]
    for wrong in (t(5), t(4, dtype=torch.int32)):
        mine = gather_v(GROUP, around(wrong, 2), t(4), RANK)
        with pytest.raises(PayloadError, match=r"rank 2 sent torch.float32 of shape \(4,\), which does not fit into"):
            bring(mine, everybody(calls))
    text = fails(ValueError, gather_v, GROUP, around(t(5), RANK), t(4), RANK)
    assert text == "output_list[1] must have 4 elements (as many as input), got 5 (shape (5,))"
    text = fails(ValueError, gather_v, GROUP, around(t(4, dtype=D), RANK), t(4), RANK)
    assert text == "output_list[1] has dtype torch.float64, but input has torch.float32"


def test_scatter_v() -> None:
    root = scatter_v(group(0), None, mixed(0), 0)
    assert root.op == Parcels("scatter_v", shared=False, giver=0)
    assert shown([bring(root, {})]) == shown([mixed(0)[0]])
    mine = scatter_v(GROUP, None, None, 0)
    assert mine.op == root.op
    assert mine.parcels == ()
    assert shown([bring(mine, {0: root.parcels[RANK]})]) == shown([mixed(0)[RANK]])
    output = torch.zeros(4, dtype=torch.complex64)
    mine = scatter_v(GROUP, output, (), 0)
    assert bring(mine, {0: root.parcels[RANK]}) is output
    assert mine.expected == output.nbytes
    for wrong in (torch.zeros(3, dtype=torch.complex64), t(4)):
        with pytest.raises(PayloadError, match=r"rank 0 sent torch.complex64 of shape \(2, 2\)"):
            bring(scatter_v(GROUP, wrong, None, 0), {0: root.parcels[RANK]})


def test_scatter_v_is_checked_on_the_root() -> None:
    text = fails(ValueError, scatter_v, GROUP, None, None, RANK)
    assert text == "input_list must be given on the root (rank 1), got None"
    text = fails(ValueError, scatter_v, GROUP, t(5), several(), RANK)
    assert text == "input_list[1] must have 5 elements (as many as output), got 4 (shape (4,))"
    text = fails(ValueError, scatter_v, GROUP, t(4, dtype=D), several(), RANK)
    assert text == "input_list[1] has dtype torch.float32, but output has torch.float64"


def test_lists_off_the_root() -> None:
    for empty in ([], (), None):
        assert gather_v(GROUP, empty, t(4), 0).result is None
        assert scatter_v(GROUP, None, empty, 0).parcels == ()
    for name, use in (
        ("output_list", lambda x: gather_v(GROUP, x, t(4), 2)),
        ("input_list", lambda x: scatter_v(GROUP, None, x, 2)),
    ):
        text = fails(ValueError, use, several())
        assert text == f"{name} must be None or empty off the root: this is rank 1, the root is 2, got 3 tensors"
        assert fails(TypeError, use, t(SIZE, 4)) == f"{name} must be a list or tuple of tensors, got Tensor"


@cases(
    "head",
    [
        b"",
        b"\xff",
        b"7",
        b"null",
        b'["float32"]',
        b'["torch.nonsense", 2]',
        b'["torch.float32", "2"]',
        b'["torch.float32", 2.5]',
        b'["torch.float32", [2]]',
        b'[["torch.float32"], 2]',
        b'["torch.float32", -2, -1]',
        b'["torch.float32", 3]',
        b'{"torch.float32": 2}',
        b"[" * 100_000,
    ],
    ids=lambda head: repr(head[:30]),
)
def test_descriptions_that_make_no_sense(head: bytes) -> None:
    mine = scatter_v(GROUP, None, None, 0)
    assert mine.place is not None
    with pytest.raises(PayloadError, match="rank 0 sent"):
        mine.place(0, head, {0: 8})


@pytest.mark.filterwarnings("ignore")  # some are experimental, some are on their way out
@cases("dtype", BY_NAME.values(), ids=str)
def test_every_dtype_has_a_name(dtype: torch.dtype) -> None:
    mine = scatter_v(GROUP, None, None, 0)
    assert mine.place is not None
    (place,) = mine.place(0, json.dumps([str(dtype), 2]).encode(), {0: 2 * dtype.itemsize})
    assert place.dtype == dtype


def test_payloads_are_data_without_a_graph() -> None:
    source = torch.ones(3, requires_grad=True)
    for call in (
        all_gather_v(GROUP, None, source, 0),
        all_to_all_v_single(GROUP, None, source, None),
        all_to_all(GROUP, [source] * SIZE),
        gather_v(GROUP, None, source, 0),
        scatter_v(GROUP, None, [source] * SIZE, RANK),
    ):
        assert call.parcels
        assert not any(x.requires_grad for parcel in call.parcels for x in parcel.tensors)
    assert all_gather_v(GROUP, None, source, 0).expected == 12
