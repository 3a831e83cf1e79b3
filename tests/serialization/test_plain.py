"""Plain pickles: the data that they take, and the classes that they refuse."""

from __future__ import annotations

import pickle
from datetime import date

import pytest
import torch

from asynccomm.serialization.plain import NotPlainError, dump_plain, is_plain, load_plain, pickled


def test_plain_data_comes_back() -> None:
    tensor = torch.ones(2)
    obj = {"a": [1, 2.5, 1j, None], "t": [tensor, tensor]}
    buffer, tensors = pickled(obj)
    assert [t is tensor for t in tensors] == [True]
    back = load_plain(buffer.getvalue(), tensors)
    assert back["a"] == obj["a"]
    assert back["t"][0] is back["t"][1] is tensor
    assert load_plain(dump_plain(obj["a"])) == obj["a"]


def test_other_data_is_not_plain() -> None:
    for obj in (date(2024, 1, 1), [torch.ones(1), date(2024, 1, 1)], torch.float32, torch.ones(1, requires_grad=True)):
        with pytest.raises(NotPlainError):
            pickled(obj)
    with pytest.raises(NotPlainError, match="Tensor"):
        dump_plain([torch.ones(1)])
    assert is_plain(torch.ones(1))
    assert not is_plain(torch.nn.Parameter(torch.ones(1)))


def test_a_name_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"names datetime.date"):
        load_plain(pickle.dumps(date(2024, 1, 1)))
