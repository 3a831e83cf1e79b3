"""The memory of tensors."""

import pytest
import torch

from asynccomm.backends.regions import Occupied, adjoining


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
