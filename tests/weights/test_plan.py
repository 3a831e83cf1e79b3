"""Plans fill a server: each element once, from a trainer that holds it, whatever the shardings."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.ops.validation import CommInfo
from asynccomm.weights.errors import LayoutError
from asynccomm.weights.layout import Layout, Slice, collect
from asynccomm.weights.plan import Box, intersection, plan, remainder


def part(shape: tuple[int, ...], box: Box | None = None, dtype: torch.dtype = torch.float32, tied: str = "") -> Slice:
    offsets, sizes = ((0,) * len(shape), shape) if box is None else box
    return Slice(shape, str(dtype), offsets, sizes, tied)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, start + size) for start, size in zip(*box, strict=True))))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple(first for first, _ in ends), tuple(last - first for first, last in ends)


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> list[Box]:
    """Boxes that cover a tensor: cut along a dimension into uneven, perhaps empty parts; copies; overlaps."""
    whole = (0,) * len(shape), shape
    if not shape or draw(st.booleans()):
        covering = draw(st.integers(0, ranks - 1))
        return [whole if rank == covering else draw(boxes(shape)) for rank in range(ranks)]
    dim = draw(st.integers(0, len(shape) - 1))
    parts = draw(st.integers(1, ranks))
    cuts = [0, *sorted(draw(st.integers(0, shape[dim])) for _ in range(parts - 1)), shape[dim]]
    found = []
    for rank in range(ranks):
        offsets, sizes = list(whole[0]), list(whole[1])
        offsets[dim], sizes[dim] = cuts[rank % parts], cuts[rank % parts + 1] - cuts[rank % parts]
        found.append((tuple(offsets), tuple(sizes)))
    return found


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Layout], Layout]:
    """Trainers that hold all of some tensors, and a server that wants parts of them."""
    ranks = draw(st.integers(1, 4))
    trainers: list[Layout] = [{} for _ in range(ranks)]
    server: Layout = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
        for layout, box in zip(trainers, draw(shardings(shape, ranks)), strict=True):
            layout[f"t{number}"] = part(shape, box, dtype)
        server[f"t{number}"] = part(shape, draw(boxes(shape)), dtype)
    return trainers, server


@given(worlds())
def test_every_element_is_sent_once_by_a_trainer_that_holds_it(world: tuple[list[Layout], Layout]) -> None:
    trainers, server = world
    sent: dict[str, list[tuple[int, ...]]] = {name: [] for name in server}
    for layout, transfers in zip(trainers, plan(trainers, server), strict=True):
        for transfer in transfers:
            box = transfer.offsets, transfer.sizes
            held = layout[transfer.source]
            assert elements(box) <= elements((held.offsets, held.sizes))
            assert transfer.dtype == server[transfer.name].torch_dtype
            sent[transfer.name].extend(elements(box))
    for name, target in server.items():
        assert len(sent[name]) == math.prod(target.sizes)
        assert set(sent[name]) == elements((target.offsets, target.sizes))


@given(st.data())
def test_boxes_are_sets_of_elements(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    both = intersection(a, b)
    assert (set() if both is None else elements(both)) == elements(a) & elements(b)
    if both is not None:
        rest = [elements(box) for box in remainder(a, both)]
        assert sum(map(len, rest)) == len(set().union(*rest))
        assert set().union(*rest) == elements(a) - elements(b)


def test_replicated_tensors_are_shared_out_among_their_holders() -> None:
    sizes = [5, 3, 3, 2, 2, 1]
    layout = {f"t{i}": part((size, 10)) for i, size in enumerate(sizes)}
    loads = [sum(transfer.nbytes for transfer in transfers) for transfers in plan([layout] * 2, layout)]
    assert loads == [8 * 40, 8 * 40]


def test_hybrid_shards_are_sent_by_different_replicas() -> None:
    halves = [((0, 0), (2, 4)), ((2, 0), (2, 4))]
    trainers: list[Layout] = [{name: part((4, 4), halves[rank % 2]) for name in "ab"} for rank in range(4)]
    loads = [len(transfers) for transfers in plan(trainers, {name: part((4, 4)) for name in "ab"})]
    assert loads == [1, 1, 1, 1]


def test_equal_servers_have_equal_plans_in_their_order() -> None:
    server = {"b": part((4,)), "a": part((400,))}
    trainers: list[Layout] = [{"a": part((400,)), "b": part((4,))}]
    (transfers,) = plan(trainers, server)
    assert [transfer.name for transfer in transfers] == ["b", "a"]
    assert plan(trainers, dict(server)) == [transfers]


def test_a_tied_tensor_is_sent_once() -> None:
    tied = {"embed": part((4, 2)), "head": part((4, 2), tied="embed")}
    (transfers,) = plan([tied], tied)
    assert [(transfer.source, transfer.name) for transfer in transfers] == [("embed", "embed")]
    # one of the names is enough; a server where the tensors are apart gets both
    (transfers,) = plan([{"head": part((4, 2))}], tied)
    assert [(transfer.source, transfer.name) for transfer in transfers] == [("head", "embed")]
    (transfers,) = plan([tied], {"embed": part((4, 2)), "head": part((4, 2))})
    assert [transfer.name for transfer in transfers] == ["embed", "head"]


def test_values_are_sent_in_the_dtype_of_the_server() -> None:
    (transfers,) = plan([{"a": part((3,))}], {"a": part((3,), dtype=torch.bfloat16)})
    assert transfers[0].nbytes == 6


def test_differences_are_named_with_both_sides() -> None:
    trainers: list[Layout] = [
        {"shape": part((2, 3)), "dtype": part((2,), dtype=torch.int64), "fp8": part((2,)), "extra": part((1,))},
        {"half": part((4,), ((0,), (2,))), "mixed": part((2,))},
        {"mixed": part((3,))},
    ]
    trainers[0] |= {"x": part((2,)), "y": part((2,))}
    server = {
        "shape": part((3, 2)),
        "dtype": part((2,)),
        "fp8": part((2,), dtype=torch.float8_e4m3fn),
        "half": part((4,)),
        "absent": part((1,)),
        "mixed": part((2,)),
        "x": part((2,)),
        "y": part((2,), tied="x"),
    }
    with pytest.raises(LayoutError) as caught:
        plan(trainers, server, "s1")
    problems = caught.value.problems
    assert problems == {
        "different among the trainers": ["mixed"],
        "missing at the trainers": ["absent"],
        "missing at the server": ["extra"],
        "other shapes": ["shape ((3, 2), at the trainers (2, 3))"],
        "other dtypes": [
            "dtype (torch.float32, at the trainers torch.int64)",
            "fp8 (torch.float8_e4m3fn, at the trainers torch.float32)",
        ],
        "tied at the server only": ["x = y"],
        "in part held by no trainer": ["half (from (2,), sizes (2,))"],
    }
    assert "server 's1'" in str(caught.value)


def views(names: str = "xyz", *, dtype: torch.dtype = torch.float32, start: int = 0) -> Layout:
    """The layout of a base ``x`` with a view ``y``, and of ``z`` in memory of its own."""
    base = torch.zeros(4, dtype=dtype)
    state = {"x": base, "y": base[start : start + 2], "z": torch.zeros(2, dtype=dtype)}
    return collect({name: state[name] for name in names}, CommInfo("test", 0, 1, torch.device("cpu"))).layout


def test_tensors_that_overlap_at_the_server_overlap_alike_at_all_trainers() -> None:
    square = torch.zeros(2, 2)
    own = CommInfo("test", 0, 1, torch.device("cpu"))
    apart = {**views("xz"), "y": views("y")["y"]}
    turned = collect({"x": square, "y": square.t()}, own).layout
    bits = collect({"x": square, "y": square.view(torch.int32)}, own).layout
    part_of_y = {**views("xz"), "y": part((2,), ((0,), (1,)))}
    refused = {
        "separate": ([apart], views()),
        "separate at one": ([views(), apart], views()),
        "in one part": ([views(), part_of_y], views()),
        "on different trainers": ([{"x": apart["x"], "z": apart["z"]}, {"y": apart["y"]}], views()),
        "elsewhere": ([views(start=1)], views()),
        "as one": ([collect({"x": square, "y": square}, own).layout], turned),
        "other strides": ([collect({"x": square.clone(), "y": square}, own).layout], turned),
        "as other bytes": ([collect({"x": square, "y": torch.zeros(2, 2, dtype=torch.int32)}, own).layout], bits),
    }
    for case, (trainers, server) in refused.items():
        with pytest.raises(LayoutError, match=r"overlapping at the server, and not so at the trainers: x and y$"):
            pytest.fail(f"{case}: {plan(trainers, server)}")
    accepted = [
        ([views()], views(), True),
        ([views(), views("zyx")], views("yxz"), True),  # in another order
        ([views()], views(dtype=torch.bfloat16), True),
        ([views(), {"z": part((2,))}], views(), True),  # a trainer without them
        ([views("xyz")], views("yz"), False),
        ([apart], apart, True),
        ([views()], apart, True),
        ([turned], turned, True),
        ([bits], bits, True),
    ]
    for trainers, server, strict in accepted:
        sent = [transfer.name for transfers in plan(trainers, server, strict=strict) for transfer in transfers]
        assert sorted(sent) == sorted(server)


def test_a_server_may_leave_tensors_out() -> None:
    trainers: list[Layout] = [{"a": part((1,)), "b": part((1,))}]
    (transfers,) = plan(trainers, {"a": part((1,))}, strict=False)
    assert [transfer.name for transfer in transfers] == ["a"]
