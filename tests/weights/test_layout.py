"""Layouts of plain tensors, modules, hand-made shards and DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard

from asynccomm.control.transport.schema import MessageError, dumps, loads
from asynccomm.ops.validation import CommInfo
from asynccomm.weights.layout import Layout, Overlap, Region, Shard, Slice, Weights, collect
from tests.cases import cases
from tests.interop.world import world

OWN = CommInfo("test", 0, 1, torch.device("cpu"))


def read(state: Any, **options: Any) -> Weights:
    return collect(state, OWN, **options)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))


def test_parameters_buffers_and_ties_of_a_module() -> None:
    module = Tied()
    found = read(module)
    assert found.layout == {
        "step": Slice((), "torch.int64", (), ()),
        "embed.weight": Slice((4, 2), "torch.float32", (0, 0), (4, 2)),
        "head.weight": Slice((4, 2), "torch.float32", (0, 0), (4, 2), tied="embed.weight"),
    }
    assert found.owners["head.weight"] is module.embed.weight
    found.tensors["embed.weight"].fill_(3)  # detached, in the same memory
    assert module.head.weight.sum() == 24


def test_empty_tensors_are_not_tied() -> None:
    assert not any(part.tied for part in read({"a": torch.empty(0), "b": torch.empty(0)}).layout.values())


def test_tensors_that_share_memory_in_part() -> None:
    flat, other = torch.zeros(6), torch.zeros(6)
    state = {
        "right": flat[3:],
        "odd": other[1::2],
        "flat": flat,
        "tied": flat,
        "alone": torch.zeros(6),
        "even": other[::2],  # overlaps no other, though the memory of "odd" lies between its elements
        "empty": flat[:0],
        "bits": flat[:2].view(torch.int32),
    }
    layout = read(state).layout
    assert {name: part.overlap for name, part in layout.items() if part.overlap is not None} == {
        "right": Overlap("right", 0, (1,)),
        "flat": Overlap("right", -12, (1,)),
        "tied": Overlap("right", -12, (1,)),
        "bits": Overlap("right", -12, (1,)),
    }
    assert layout["tied"].tied == "flat"
    assert loads(dict[str, Slice], dumps(layout)) == layout
    square = torch.zeros(2, 2)
    turned = read({"a": square, "b": square.t(), "c": square.to(torch.cfloat), "d": torch.zeros(4)}).layout
    unit = read({"a": flat, "b": flat.view(1, 6)[:, ::3], "c": flat.view(1, 1, 6)[..., 1:]}).layout
    assert unit["b"].overlap == Overlap("a", 0, (0, 3))
    assert unit["c"].overlap == Overlap("a", 4, (0, 0, 1))
    assert [turned[name].overlap for name in "abcd"] == [Overlap("a", 0, (2, 1)), Overlap("a", 0, (1, 2)), None, None]


def test_parts_that_the_caller_names() -> None:
    state = {"columns": torch.ones(4, 3), "rows": torch.ones(2, 3), "region": torch.ones(1, 2), "whole": torch.ones(2)}
    shards = {"columns": Shard(-1, 1, 2), "rows": Shard(0, 2, 3), "region": Region((4, 4), (3, 1))}
    layout = read(state, shards=shards).layout
    assert layout == {
        "columns": Slice((4, 6), "torch.float32", (0, 3), (4, 3)),
        "rows": Slice((6, 3), "torch.float32", (4, 0), (2, 3)),
        "region": Slice((4, 4), "torch.float32", (3, 1), (1, 2)),
        "whole": Slice((2,), "torch.float32", (0,), (2,)),
    }
    assert loads(dict[str, Slice], dumps(layout)) == layout


def test_names_are_shared_ones() -> None:
    state = {"model.a": torch.ones(1), "model.b": torch.ones(1), "optimizer": torch.ones(1)}
    found = read(state, rename=lambda name: name.removeprefix("model.") if name.startswith("model.") else None)
    assert list(found.layout) == list(found.tensors) == ["a", "b"]


ONE, TWO = {"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a state of another type": ([1], {}, "state must be a torch.nn.Module or a mapping"),
    "a value": ({"a": 3}, {}, r"state\['a'\] must be a torch.Tensor, got int"),
    "a name": ({1: torch.ones(1)}, {}, "state must have strings for names, got 1"),
    "a sparse tensor": ({"a": torch.ones(1).to_sparse()}, {}, r"state\['a'\] must be a dense tensor"),
    "another device": ({"a": torch.ones(1, device="meta")}, {}, r"state\['a'\] is on meta"),
    "a lazy module": (nn.LazyLinear(2), {}, "has no values yet"),
    "an unknown shard": (
        {"a": torch.ones(1)},
        {"shards": {"b": Shard(0, 0, 1)}},
        r"names of tensors in state, got \['b'\]",
    ),
    "a dimension": ({"a": torch.ones(1)}, {"shards": {"a": Shard(1, 0, 1)}}, r"shards\['a'\] must name a dimension"),
    "a region": ({"a": torch.ones(2)}, {"shards": {"a": Region((2,), (1,))}}, r"shards\['a'\] must contain a tensor"),
    "no mapping of shards": ({"a": torch.ones(1)}, {"shards": [("a", 3)]}, r"shards must be a mapping .*, got \[\('a'"),
    "another shard": ({"a": torch.ones(1)}, {"shards": {"a": 3}}, r"shards\['a'\] must be a Shard or Region, got 3"),
    "two names": (
        {"a": torch.ones(1), "b": torch.ones(1)},
        {"rename": lambda _: "c"},
        "got 'c' a second time, for 'b'",
    ),
    "no function of names": ({"a": torch.ones(1)}, {"rename": 3}, "rename must be a function of a name, got 3"),
    "no name": ({"a": torch.ones(1)}, {"rename": lambda _: 1}, "rename must return a str or None, got 1 for 'a'"),
    "overlapping": ({"a": torch.ones(1).expand(3)}, {"written": True}, "overlaps itself"),
}


@cases("name", BAD)
def test_bad_states_are_named(name: str) -> None:
    state, options, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=message):
        read(state, **options)


def test_bad_values_of_other_processes_are_refused() -> None:
    good = {"shape": [2], "dtype": "torch.float32", "offsets": [1], "sizes": [1]}
    assert loads(Slice, dumps(good)) == Slice((2,), "torch.float32", (1,), (1,))
    for change in ({"dtype": "torch.nn"}, {"offsets": [0, 0]}, {"sizes": [2]}, {"offsets": [-1]}, {"sizes": [-1]}):
        with pytest.raises(MessageError):
            loads(Slice, dumps(good | change))
    with pytest.raises(ValueError, match=r"index must be in \[0, 2\), got 2"):
        Shard(0, 2, 2)


def test_parts_are_described_by_integers() -> None:
    number: Any = torch.tensor(1)
    assert Shard(number, number, 2) == Shard(1, 1, 2)
    assert Region(torch.Size([2]), [number]) == Region((2,), (1,))
    for name, arguments in (("dim", ("0", 0, 1)), ("index", (0, None, 1)), ("of", (0, 0, 1.5))):
        with pytest.raises(TypeError, match=f"{name} must be an integer, got"):
            Shard(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="shape must be a list or tuple of integers, got 3"):
        Region(3, (0,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="offsets must be integers, got"):
        Region((2,), (0.5,))  # type: ignore[arg-type]


@pytest.mark.ranks(2)
async def test_parts_of_dtensors() -> None:
    with world("gloo", "layouts") as group:
        me = dist.get_rank()
        mesh = init_device_mesh("cpu", (2,))
        full = torch.arange(15.0).reshape(5, 3)
        state = {
            "rows": distribute_tensor(full, mesh, [TorchShard(0)]),
            "few": distribute_tensor(full[:1], mesh, [TorchShard(0)]),
            "copies": distribute_tensor(full, mesh, [Replicate()]),
        }
        found = read(state)
        float32 = "torch.float32"
        expected: Layout = {
            "rows": Slice((5, 3), float32, (3 * me, 0), (3 - me, 3)),
            "few": Slice((1, 3), float32, (me, 0), (1 - me, 3)),
            "copies": Slice((5, 3), float32, (0, 0), (5, 3)),
        }
        assert found.layout == expected
        assert torch.equal(found.tensors["rows"], full[3 * me : 3 * me + 3])
        found.tensors["rows"].zero_()
        assert not state["rows"].to_local().any()
        with pytest.raises(ValueError, match="hold sums to be made"):
            read({"sum": DTensor.from_local(full, mesh, [Partial()])})
        with pytest.raises(ValueError, match="the part of a DTensor follows from its placements"):
            read(state, shards={"rows": Shard(0, 0, 2)})
    del group
