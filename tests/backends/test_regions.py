"""The memory of tensors."""

import random

import pytest
import torch

from asynccomm.backends.regions import Occupied, Span, Spans, adjoining, span


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


def test_the_span_of_a_tensor() -> None:
    memory = torch.zeros(100)
    start = memory.data_ptr()
    assert span(memory) == (start, start + 400)
    assert span(memory[10:60:5]) == (start + 40, start + 224), "from the first element to the last, with the gaps"
    assert span(memory[3].expand(7)) == (start + 12, start + 16)


def test_memory_in_use() -> None:
    spans = Spans()
    assert not spans.touch([(0, 100)])
    spans.add([(10, 20), (30, 40)])
    assert [spans.touch([there]) for there in [(0, 10), (0, 11), (19, 20), (20, 30), (25, 31), (40, 50), (0, 50)]] == [
        *(False, True, True, False, True, False, True)
    ]
    assert spans.touch([(0, 5), (39, 45)])
    assert not spans.touch([])
    spans.remove([(10, 20)])
    assert not spans.touch([(0, 30)])
    assert spans.touch([(30, 31)])
    with pytest.raises(KeyError):
        spans.remove([(30, 41)])


def test_memory_in_use_several_times() -> None:
    spans = Spans()
    spans.add([(10, 20), (10, 20), (15, 30)])
    for _ in range(2):
        assert spans.touch([(12, 13)])
        spans.remove([(10, 20)])
    assert not spans.touch([(12, 13)])
    assert spans.touch([(15, 16)])
    spans.remove([(15, 30)])
    assert not spans.touch([(0, 100)])


def test_memory_in_use_is_what_was_added_and_not_removed() -> None:
    chance = random.Random(5)
    spans, kept = Spans(), list[Span]()
    for _ in range(3000):
        if kept and chance.random() < 0.5:
            gone = [kept.pop(chance.randrange(len(kept))) for _ in range(min(len(kept), chance.randrange(1, 4)))]
            spans.remove(gone)
        else:
            starts = [chance.randrange(200) for _ in range(chance.randrange(1, 4))]
            new = [(start, start + chance.choice([1, 2, 5, 60])) for start in starts]
            spans.add(new)
            kept += new
        start = chance.randrange(260)
        there = start, start + chance.randrange(1, 5)
        assert spans.touch([there]) == any(a < there[1] and there[0] < b for a, b in kept)
