"""Memory in place of other memory."""

import itertools

import torch

from asynccomm.backends.gloo.staging import collected, movable, pack, room, spread, unpack
from asynccomm.backends.regions import bytes_of
from asynccomm.testing.conformance.data import DTYPES, sample, sentinel, strided

SHAPES: list[tuple[int, ...]] = [(), (3,), (0,), (2, 5)]


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
