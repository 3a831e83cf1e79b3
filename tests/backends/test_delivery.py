"""Operations with parcels, on the side that takes them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.delivery import Delivery
from asynccomm.errors import PayloadError
from asynccomm.ops import Call, Parcel
from asynccomm.ops.validation import CommInfo
from asynccomm.ops.variable import all_gather_v, all_gather_v_coalesced, all_to_all_v_single, gather_v, scatter_v

SIZE = 3


def group(rank: int, size: int = SIZE) -> CommInfo:
    return CommInfo("grads", rank, size, torch.device("cpu"))


def submission(call: Call) -> Submission:
    return Submission(call, None)  # type: ignore[arg-type]


def deliver(call: Call, others: dict[int, Call], *, shared: bool = True) -> Any:
    """As a backend does, in the worst order: what comes is written before what goes is read."""
    mine = submission(call)
    delivery = Delivery(mine)
    parcels = {rank: other.parcels[0 if shared else 1] for rank, other in others.items()}
    lengths = {rank: parcel.nbytes for rank, parcel in parcels.items()}
    for rank, parcel in parcels.items():
        places = delivery.accept(rank, parcel.head, lengths)
        assert places is not None, delivery.error
        data = torch.cat([tensor.reshape(-1) for tensor in parcel.tensors])
        for place, part in zip(places, data.split([place.numel() for place in places]), strict=True):
            place.copy_(part.view(place.shape))
    delivery.finish()
    result = call.finish(call.result) if call.finish is not None else call.result
    return result, mine.parcels


def test_what_a_rank_gives_itself_may_share_memory() -> None:
    """With any other view of it, as in the list forms."""
    whole = torch.arange(9.0).view(3, 3)
    for target, source in (
        (whole[:2, :2], whole[:2, :2].t()),
        (whole[:, :2], whole[:2]),
        (whole[1:], whole[:2]),
        (whole[:2], whole[1:]),
        (torch.tensor([1j, 2.0]), None),
    ):
        given = target.conj() if source is None else source
        expected = given.clone().reshape(target.shape)
        before = whole.clone()
        result, _ = deliver(gather_v(group(0, 1), [target], given, 0), {})
        assert result[0] is target
        assert target.equal(expected)
        whole.copy_(before)


def test_the_memory_of_copies_is_kept() -> None:
    """On a device ``finish`` only queues them."""
    output = torch.zeros(4, 2)[:, 0]
    received = submission(scatter_v(group(0), output, None, 1))
    delivery = Delivery(received)
    places = delivery.accept(1, scatter_v(group(1), None, [torch.ones(4)] * SIZE, 1).parcels[0].head, {1: 16})
    assert places is not None, delivery.error
    (place,) = [weakref.ref(place.untyped_storage()) for place in places]
    assert places[0].data_ptr() != output.data_ptr()
    del places
    delivery.finish()
    assert place() is not None
    del delivery, received
    assert place() is None


def test_what_goes_is_what_was_there_before_anything_came() -> None:
    sizes = [2, 3, 4]
    for start in range(7):
        whole = torch.arange(9.0)
        part = whole[start : start + 3].clone()
        others = {r: all_gather_v(group(r), None, torch.full((sizes[r],), -1.0 - r), 0) for r in (0, 2)}
        result, given = deliver(all_gather_v(group(1), whole, whole[start : start + 3], 0), others)
        assert result is whole
        assert whole.tolist() == [-1.0] * 2 + part.tolist() + [-3.0] * 4
        assert given[0].tensors[0].equal(part)


def test_rows_exchanged_in_place() -> None:
    whole = torch.arange(6.0)
    others = {r: all_to_all_v_single(group(r), None, torch.full((6,), -1.0 - r), [2, 2, 2]) for r in (0, 2)}
    result, given = deliver(all_to_all_v_single(group(1), whole, whole, [1, 2, 3]), others, shared=False)
    assert result.tolist() == [-1, -1, 1, 2, -3, -3]
    assert [parcel.tensors[0].tolist() for parcel in given] == [[0], [1, 2], [3, 4, 5]]


def test_a_root_s_output_in_what_it_gives() -> None:
    whole = torch.arange(6.0)
    inputs = list(whole.split([1, 2, 3]))
    result, given = deliver(scatter_v(group(1), whole[4:], inputs, 1), {})
    assert result.tolist() == [1, 2]
    assert [parcel.tensors[0].tolist() for parcel in given] == [[0], [1, 2], [3, 4, 5]]


def test_the_last_of_outputs_that_share_memory_stays() -> None:
    def part(rank: int, value: float) -> list[Tensor]:
        return [torch.full((1,), value + rank), torch.full((1,), 10 * value + rank)]

    whole = torch.zeros(4)
    others = {r: all_gather_v_coalesced(group(r), None, part(r, 100.0), 0) for r in (0, 2)}
    outputs = [whole[:3], whole[1:]]
    result, _ = deliver(all_gather_v_coalesced(group(1), outputs, part(1, 100.0), 0), others)
    assert result is outputs
    assert whole.tolist() == [100, 1000, 1001, 1002]
    gathered = {r: gather_v(group(r), None, torch.full((4,), float(r)), 1) for r in (0, 2)}
    result, _ = deliver(gather_v(group(1), [whole] * SIZE, torch.full((4,), 1.0), 1), gathered)
    assert whole.tolist() == [2] * 4


def test_a_payload_that_is_refused() -> None:
    call = all_gather_v(group(1), torch.zeros(5), torch.zeros(2), 0)
    delivery = Delivery(submission(call))
    assert delivery.accept(0, b"?", {0: 8}) is None
    assert isinstance(delivery.error, PayloadError)
    delivery.finish()


def test_an_error_of_a_place_is_that_of_the_operation() -> None:
    def place(*_: object) -> Any:
        raise KeyError("elsewhere")

    call = all_gather_v(group(1), None, torch.zeros(2), 0)._replace(place=place)
    delivery = Delivery(submission(call))
    assert delivery.accept(0, b"", {0: 8}) is None
    assert "what rank 0 sent cannot be taken: KeyError: 'elsewhere'" in str(delivery.error)


def test_more_room_than_bytes() -> None:
    call = all_gather_v(group(1), None, torch.zeros(2), 0)._replace(place=lambda *_: [torch.zeros(3)])
    delivery = Delivery(submission(call))
    assert delivery.accept(0, b"", {0: 8}) is None
    assert "rank 0 sent 8 bytes where 12 fit" in str(delivery.error)


def test_nothing_to_begin() -> None:
    call = Call(all_gather_v(group(1), None, torch.zeros(2), 0).op, (), (), None, parcels=(Parcel(b"x", ()),))
    Delivery(submission(call)).finish()


def test_tensors_made_for_the_result_are_known() -> None:
    own = [torch.ones(2), torch.full((3,), 2.0), torch.zeros(1)]
    call = scatter_v(group(1), None, own, 1)
    delivery = Delivery(submission(call))
    assert call.finish is not None
    result = call.finish(call.result)
    assert result.tolist() == [2] * 3
    assert [made.data_ptr() for made in delivery.made] == [result.data_ptr()]
    assert Delivery(submission(scatter_v(group(1), torch.zeros(3), own, 1))).made == ()
    assert Delivery(submission(all_gather_v(group(1), None, torch.zeros(2), 0))).made == (), "not made yet"
    alone = all_gather_v(group(0, 1), None, torch.ones(2), 0)
    made = Delivery(submission(alone)).made
    assert alone.finish is not None
    assert [tensor.data_ptr() for tensor in made] == [alone.finish(alone.result).data_ptr()]
    given = torch.zeros(2)
    assert Delivery(submission(all_gather_v(group(0, 1), given, torch.ones(2), 0))).made == ()
