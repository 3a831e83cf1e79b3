"""Memory in place of other memory."""

import itertools

import pytest
import torch

from asynccomm.backends.gloo.staging import (
    Occupied,
    adjoining,
    bytes_of,
    collected,
    movable,
    pack,
    room,
    spread,
    unpack,
)
from asynccomm.testing.conformance.data import DTYPES, sample, sentinel, strided

SHAPES: list[tuple[int, ...]] = [(), (3,), (0,), (2, 5)]


def test_what_lies_side_by_side_is_one() -> None:
    whole = torch.arange(10.0)
    found = adjoining([whole[2:4], whole[:0], whole[4:9].view(5, 1)])
    assert found is not None
    assert found.data_ptr() == whole[2:].data_ptr()
    assert found.view(torch.float32).tolist() == [2, 3, 4, 5, 6, 7, 8]
    mixed = adjoining([whole[:1].view(torch.int32), whole[1:3]])
    assert mixed is not None
    assert mixed.numel() == 12


def test_what_does_not_is_not() -> None:
    whole = torch.arange(10.0)
    assert adjoining([whole[:2], whole[3:]]) is None
    assert adjoining([whole[3:], whole[:3]]) is None
    assert adjoining([whole[::2]]) is None
    assert adjoining([whole[:2], torch.zeros(2)]) is None
    assert adjoining([torch.ones(2, dtype=torch.complex64).conj()]) is None
    nothing = adjoining([torch.zeros(0), whole[:0]])
    assert nothing is not None
    assert nothing.numel() == 0


def test_complex_numbers_move_as_reals() -> None:
    for shape in SHAPES:
        number = sample(1, shape, torch.complex64)
        for tensor in (number, strided(number), number.conj().resolve_conj().conj()):
            reals = movable(tensor)
            assert reals.dtype == torch.float32
            assert torch.equal(reals, torch.view_as_real(tensor.resolve_conj()).flatten())
    number = sample(1, (3,), torch.complex128)
    assert movable(number).data_ptr() == number.data_ptr()
    assert movable(sample(1, (3,), torch.complex32)).dtype == torch.uint8, "gloo has no halves"


def test_packs_hold_any_dtypes_and_layouts() -> None:
    tensors = [sample(i, shape, dtype) for i, (dtype, shape) in enumerate(itertools.product(DTYPES, SHAPES))]
    given = [strided(tensor) if i % 3 else tensor for i, tensor in enumerate(tensors)]
    memory = room(sum(tensor.nbytes for tensor in tensors))
    pack(memory, given)
    assert torch.equal(memory, torch.cat([bytes_of(tensor) for tensor in tensors]))
    targets = [sentinel(tensor.shape, tensor.dtype) for tensor in tensors]
    targets = [strided(target) if i % 2 else target for i, target in enumerate(targets)]
    unpack(memory, targets)
    assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(targets, tensors, strict=True))


def test_unpacking_writes_what_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        inferred = torch.zeros(3)
        memory = bytes_of(torch.ones(8))
        collected([inferred, inferred])
    targets = [torch.zeros(3), inferred, torch.zeros(4)[::2]]
    unpack(memory, targets)
    assert all(target.eq(1).all() for target in targets)
    with torch.inference_mode():
        assert not room(3).is_inference()


def test_collected_and_spread_use_what_is_there() -> None:
    whole = torch.zeros(6)
    parts = list(whole.split(2))
    assert collected(parts).data_ptr() == whole.data_ptr()
    memory, finish = spread(parts)
    assert memory.data_ptr() == whole.data_ptr()
    assert finish is None
    parts = [torch.zeros(2), torch.zeros(2, 2).t()]
    memory, finish = spread(parts)
    memory.view(torch.float32).copy_(torch.arange(6.0))
    assert finish is not None
    finish()
    assert [part.tolist() for part in parts] == [[0, 1], [[2, 3], [4, 5]]]
    assert collected(parts).view(torch.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_occupied_memory() -> None:
    memory = torch.zeros(100)
    occupied = Occupied([memory[10:20], memory[15:16], memory[40:60:5], memory[:0]])
    touched = [i for i in range(100) if occupied.touches(memory[i : i + 1])]
    assert touched == [*range(10, 20), *range(40, 56)]
    assert occupied.touches(memory[5:11])
    assert occupied.touches(memory[19:])
    assert not occupied.touches(memory[20:40])
    assert not occupied.touches(memory[12:12])
    assert not Occupied([]).touches(memory)


@pytest.mark.parametrize(("second", "twice"), [((0, 3), False), ((4, 9), False), ((0, 4), True), ((3, 4), True)])
def test_occupied_twice(second: tuple[int, int], twice: bool) -> None:
    memory = torch.zeros(10)
    assert Occupied([memory[3:4], memory[slice(*second)]]).twice is twice
