"""The state of a module, from one rank to all."""

from typing import Any

import pytest
import torch
from torch import nn

from asynccomm import Comm, PayloadError
from asynccomm.ops import Call, Parcel, Parcels
from asynccomm.serialization.objects import PayloadKind, encode, pack_value
from asynccomm.testing.local import loopback_world


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].running_mean.fill_(seed)  # type: ignore[union-attr, operator]
    return model


def equal(a: nn.Module, b: nn.Module) -> bool:
    theirs = b.state_dict()
    return all(tensor.equal(theirs[name]) for name, tensor in a.state_dict().items())


async def test_modules() -> None:
    async with loopback_world(3) as comms:
        models = [net(rank) for rank in range(3)]
        before = [p.data_ptr() for p in models[0].parameters()]
        works = [comm.broadcast_state(model, 1) for comm, model in zip(comms, models, strict=True)]
        for work, model in zip(works, models, strict=True):
            assert await work is model
            assert equal(model, net(1))
        assert [p.data_ptr() for p in models[0].parameters()] == before
        assert all(p.requires_grad and p.is_leaf for p in models[0].parameters())


async def test_mappings_in_another_order() -> None:
    async with loopback_world(2) as (a, b):
        source = {"x": torch.arange(3), "y": torch.tensor(2.5), "e": torch.empty(0, 2)}
        backing = torch.zeros(2, 3, dtype=torch.int64)
        target = {"e": torch.empty(0, 2), "y": torch.tensor(0.0), "x": backing[1]}
        sent, work = a.broadcast_state(source, 0), b.broadcast_state(target, 0)
        assert await sent is source
        assert await work is target
        assert backing.tolist() == [[0, 0, 0], [0, 1, 2]]
        assert target["y"].item() == 2.5


async def test_strided_tensors_are_written_where_they_are() -> None:
    async with loopback_world(2) as (a, b):
        backing = torch.zeros(4, 2)
        a.broadcast_state({"w": torch.arange(8.0).view(2, 4)}, 0)
        await b.broadcast_state({"w": backing.t()}, 0)
        assert backing.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


async def test_other_memory_given_meanwhile_is_left_alone() -> None:
    async with loopback_world(2) as (a, b):
        target, memory = nn.Parameter(torch.zeros(2)), torch.zeros(2)
        old = target.data
        b.broadcast_state({"x": target}, 0)
        target.data = memory
        a.broadcast_state({"x": torch.ones(2)}, 0)
        assert (old.tolist(), memory.tolist()) == ([1, 1], [0, 0])
        source = nn.Parameter(torch.ones(2))
        a.broadcast_state({"x": source}, 0)
        source.data = torch.full((2,), 9.0)
        await b.broadcast_state({"x": memory}, 0)
        assert memory.tolist() == [1, 1]


async def test_tensors_without_elements_are_never_tied() -> None:
    async with loopback_world(2) as (a, b):
        empty = torch.empty(0)
        a.broadcast_state({"x": empty, "y": empty}, 0)
        await b.broadcast_state({"x": torch.empty(0), "y": torch.empty(0)}, 0)


async def test_an_empty_state() -> None:
    async with loopback_world(2) as (a, b):
        a.broadcast_state({}, 0)
        assert await b.broadcast_state(nn.ReLU(), 0) is not None


async def test_a_module_that_gives_copies_cannot_receive() -> None:
    async with loopback_world(2) as (a, b):
        copying = net(0)
        copying._register_state_dict_hook(lambda _, state, *rest: {name: t.clone() for name, t in state.items()})
        with pytest.raises(
            ValueError, match=r"state must give its tensors themselves, but gives new copies of these: \["
        ):
            b.broadcast_state(copying, 0)
        target = net(1)
        a.broadcast_state(copying, 0)  # it can be sent
        await b.broadcast_state(target, 0)
        assert equal(target, copying)


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False)
        self.two = nn.Linear(4, 4, bias=False)
        if tied:
            self.two.weight = self.one.weight


async def test_tied_weights_are_sent_once() -> None:
    async with loopback_world(2) as (a, b):
        source, target = Tied(), Tied()
        a.broadcast_state(source, 0)
        assert a.statistics().bytes_in_flight == 64
        b.broadcast_state(target.state_dict(), 0)
        assert equal(source, target)
        assert target.one.weight is target.two.weight


@pytest.mark.parametrize("there", [True, False])
async def test_tied_tensors_must_be_tied_on_all_ranks(there: bool) -> None:
    async with loopback_world(2) as (a, b):
        target = Tied(not there)
        before = target.one.weight.tolist()
        a.broadcast_state(Tied(there), 0)
        with pytest.raises(PayloadError, match=r"tied to others on one of them only: two.weight"):
            await b.broadcast_state(target, 0)
        assert target.one.weight.tolist() == before


async def test_the_bytes_are_counted_on_both_sides() -> None:
    async with loopback_world(2) as (a, b):
        works = [b.broadcast_state({"x": torch.ones(10), "y": torch.ones(5, dtype=torch.int64)}, 0)]
        assert b.statistics().bytes_in_flight == 80
        works.append(a.broadcast_state({"x": torch.ones(10), "y": torch.ones(5, dtype=torch.int64)}, 0))
        for work in works:
            await work


async def test_differences_are_listed_and_no_tensor_is_changed() -> None:
    async with loopback_world(3) as comms:
        source = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2), "d": torch.ones(1), "same": torch.ones(1)}
        wrong = {"a": torch.zeros(3), "b": torch.zeros(3).half(), "x": torch.zeros(1), "same": torch.zeros(1)}
        good = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
        comms[0].broadcast_state(source, 0)
        bad = comms[1].broadcast_state(wrong, 0)
        await comms[2].broadcast_state(good, 0)
        assert good["b"].tolist() == [1, 1, 1]
        with pytest.raises(PayloadError) as info:
            await bad
        assert str(info.value) == (
            "the state of rank 0 does not fit that of rank 1: missing there: x; missing here: c, d; "
            "other shapes: a ((2,), here (3,)); other dtypes: b (torch.float32, here torch.float16)"
        )
        assert all(not tensor.any() for tensor in wrong.values())
        for comm in comms:
            last = comm.barrier()
        await last


async def test_only_the_first_differences_are_listed() -> None:
    async with loopback_world(2) as (a, b):
        a.broadcast_state({f"n{i}": torch.ones(1) for i in range(10)}, 0)
        with pytest.raises(PayloadError, match=r"missing here: n0, n1, n2, n3 and 6 more$"):
            await b.broadcast_state({}, 0)


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 5

    def set_extra_state(self, state: int) -> None:
        pass


async def test_arguments_are_checked_at_the_call() -> None:
    async with loopback_world(2) as (a, b):
        cast: Any = a.broadcast_state
        for error, text, state in (
            (TypeError, "state must be a torch.nn.Module or a mapping", [torch.ones(1)]),
            (TypeError, r"state\['_extra_state'\] must be a torch.Tensor, got 5", Extra(1, 1)),
            (TypeError, r"state\['x'\] must be a torch.Tensor", {"x": 1.5}),
            (TypeError, "state must have strings for names, got 3", {3: torch.ones(1)}),
            (ValueError, r"state\['x'\] is on meta", {"x": torch.ones(1, device="meta")}),
            (ValueError, r"state\['x'\] must be a dense tensor", {"x": torch.eye(2).to_sparse()}),
            (ValueError, r"state\['weight'\] has no values yet", nn.LazyLinear(3)),
        ):
            for root in (0, 1):
                with pytest.raises(error, match=text):
                    cast(state, root)
        with pytest.raises(ValueError, match=r"state\['x'\] overlaps itself"):
            cast({"x": torch.ones(1).expand(3)}, 1)
        with pytest.raises(ValueError, match="root must be in"):
            cast({}, 2)
        with pytest.raises(TypeError, match="hints"):
            cast({}, 0, hints=[])
        assert a.statistics().submitted == b.statistics().submitted == 0


def give(comm: Comm, head: bytes, *tensors: torch.Tensor) -> None:
    op = Parcels("broadcast_state", giver=comm.rank)
    comm._submit(Call(op, (), (), None, parcels=(Parcel(head, tensors),)), None, None)


@pytest.mark.parametrize(
    "value",
    [
        None,
        ([], [], [(8, (2,))]),
        (["x"], [0], []),
        (["x", "x"], [0, 0], [(8, (2,))]),
        ([1], [0], [(8, (2,))]),
        (["x"], ["0"], [(8, (2,))]),
        (["x"], [1], [(8, (2,))]),
        (["x"], [0], [(99, (2,))]),
        (["x"], [0], [(-1, (2,))]),
        (["x"], [0], [(8, 2)]),
        (["x"], [0], [8]),
    ],
    ids=repr,
)
async def test_garbage_is_a_payload_error(value: object) -> None:
    async with loopback_world(2) as (a, b):
        target = torch.zeros(2)
        give(a, pack_value(PayloadKind.STATE, value), torch.ones(2))
        with pytest.raises(PayloadError, match="rank 0"):
            await b.broadcast_state({"x": target}, 0)
        assert target.tolist() == [0, 0]
        a.barrier()
        await b.barrier()


async def test_other_kinds_are_refused() -> None:
    async with loopback_world(2) as (a, b):
        give(a, encode(PayloadKind.OBJECT, 1).head)
        with pytest.raises(PayloadError, match="sent by send_object"):
            await b.broadcast_state({}, 0)


async def test_a_payload_of_another_length() -> None:
    async with loopback_world(2) as (a, b):
        target = torch.zeros(2)
        give(a, pack_value(PayloadKind.STATE, (["x"], [0], [(8, (2,))])), torch.ones(3))
        with pytest.raises(PayloadError, match="rank 0 sent 12 bytes where 8 fit"):
            await b.broadcast_state({"x": target}, 0)
        assert target.tolist() == [0, 0]
