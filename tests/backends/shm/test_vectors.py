"""Vectors in one place and in many."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.backends.arithmetic import plain
from asynccomm.backends.shm.iovec import SMALL
from asynccomm.backends.shm.vectors import (
    Scattered,
    copy,
    read,
    scattered,
    share_of,
    where,
    write,
)


def numbers(n: int) -> Tensor:
    return torch.arange(n).to(torch.uint8)


def pieces(sizes: list[int]) -> tuple[list[Tensor], Tensor]:
    """Tensors of so many bytes, with gaps between them, and their bytes as one."""
    memory = torch.randint(0, 256, (sum(sizes) + 3 * len(sizes),), dtype=torch.uint8)
    found, at = [], 0
    for n in sizes:
        found.append(memory[at : at + n])
        at += n + 3
    return found, torch.cat(found)


SIZES = st.lists(st.integers(0, 9), min_size=2, max_size=12)


@given(sizes=SIZES, data=st.data())
def test_any_range_of_a_scattered_vector(sizes: list[int], data: st.DataObject) -> None:
    tensors, whole = pieces(sizes)
    vector = scattered(tensors)
    start = data.draw(st.integers(0, len(whole)))
    n = data.draw(st.integers(0, len(whole) - start))
    found = torch.zeros(n, dtype=torch.uint8)
    read(vector, start, n, found.data_ptr())
    assert torch.equal(found, whole[start : start + n])
    new = numbers(n) + 100
    write(vector, start, n, new.data_ptr())
    whole[start : start + n] = new
    assert torch.equal(torch.cat(tensors), whole)


@given(sizes=SIZES, others=SIZES)
def test_copies_between_any_divisions(sizes: list[int], others: list[int]) -> None:
    source, whole = pieces(sizes)
    cut = [min(n, max(0, len(whole) - sum(others[:i]))) for i, n in enumerate(others)]
    cut.append(len(whole) - sum(cut))
    target, _ = pieces(cut)
    copy(scattered(source), scattered(target), len(whole))
    assert torch.equal(torch.cat(target), whole)
    for one in (numbers(len(whole)), whole):
        copy(one.data_ptr(), scattered(target), len(whole))
        assert torch.equal(torch.cat(target), one)
        flat = torch.zeros_like(whole)
        copy(scattered(target), flat.data_ptr(), len(whole))
        assert torch.equal(flat, one)


def test_large_pieces_and_small_ones() -> None:
    tensors, whole = pieces([SMALL + 1, 5, 3 * SMALL])
    found = torch.zeros_like(whole)
    read(scattered(tensors), 0, len(whole), found.data_ptr())
    assert torch.equal(found, whole)


def test_one_tensor_is_its_address_and_neighbours_are_one_piece() -> None:
    memory = numbers(20)
    assert share_of(3, [memory]) == (3, memory.data_ptr(), 20)
    rank, vector, nbytes = share_of(3, [memory[:5], memory[5:5], memory[5:9], memory[12:]])
    assert (rank, nbytes) == (3, 17)
    assert isinstance(vector, Scattered)
    assert (vector.addresses, vector.starts) == ([memory.data_ptr(), memory.data_ptr() + 12], [0, 9, 17])
    assert vector.nbytes == 17
    assert vector == scattered([memory[:9], memory[12:]])
    assert vector != scattered([memory[:9], memory[13:]])
    assert where(memory) == memory.data_ptr()
    assert where(vector) is vector


def test_nothing_in_pieces() -> None:
    vector = scattered([torch.empty(0), torch.empty(0, 3)])
    assert vector.nbytes == 0
    read(vector, 0, 0, 0)
    write(vector, 0, 0, 0)


def test_a_scattered_vector_keeps_its_tensors() -> None:
    vector = scattered([torch.full((1000,), 7.0), torch.full((1000,), 8.0)])
    found = torch.zeros(2000)
    torch.zeros(1000), torch.zeros(1000)  # would get the same memory
    vector.read(0, vector.nbytes, found.data_ptr())
    assert found.tolist() == [7.0] * 1000 + [8.0] * 1000


def test_plain_tensors_are_themselves_and_others_are_copied() -> None:
    tensor = torch.ones(2, 3)
    assert plain(tensor) is tensor
    assert plain(tensor.t()).tolist() == tensor.t().tolist()
    assert plain(tensor.t()).data_ptr() != tensor.data_ptr()
    conjugated = torch.tensor([1 + 2j]).conj()
    assert torch.view_as_real(plain(conjugated)).tolist() == [[1.0, -2.0]]
    wanted = torch.ones(3, requires_grad=True)
    assert plain(wanted).data_ptr() == wanted.data_ptr()
    assert not plain(wanted[::2]).requires_grad


M = numbers(100).data_ptr()
