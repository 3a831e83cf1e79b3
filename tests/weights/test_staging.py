"""The second copy of the weights changes places with the first, or is copied."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from asynccomm.ops.validation import CommInfo
from asynccomm.weights.layout import State, collect
from asynccomm.weights.staging import Staging

OWN = CommInfo("test", 0, 1, torch.device("cpu"))


def staging(state: State, *, in_place: bool = False) -> Staging:
    read = partial(collect, state, OWN, written=True)
    return Staging(read, in_place=in_place)


def receive(copy: Staging, value: float) -> None:
    for tensor in copy.tensors.values():
        tensor.fill_(value)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(4, 2))
        self.part = nn.Parameter(self.fused.detach()[:2])
        self.head = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = nn.Parameter(self.head.weight.detach())  # another object in the same memory
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))


def test_tensors_of_a_module_change_places_and_stay_tied() -> None:
    model = Model()
    copy = staging(model)
    old, new = model.head.weight.data_ptr(), copy.tensors["head.weight"].data_ptr()
    assert "tied.weight" not in copy.tensors
    for value in (1, 2, 3):
        receive(copy, value)
        copy.apply()
        assert {parameter.data_ptr() for parameter in (model.head.weight, model.tied.weight)} == {
            new if value % 2 else old
        }
        assert {float(tensor.mean()) for tensor in model.state_dict().values() if tensor.is_floating_point()} == {value}
        assert model.step.item() == value
    assert isinstance(model.head.weight, nn.Parameter)
    model.head(torch.ones(3)).sum().backward()


def test_a_view_keeps_its_memory() -> None:
    model = Model()
    copy, address = staging(model), model.part.data_ptr()
    receive(copy, 1)
    copy.tensors["part"].fill_(7)
    copy.apply()
    assert model.part.data_ptr() == address
    assert model.part.eq(7).all()


def test_the_whole_of_a_view_keeps_its_memory_too() -> None:
    """Else the view would have the memory in which the next version arrives."""
    model = Model()
    copy, address = staging(model), model.fused.data_ptr()
    for value in (1, 2):
        receive(copy, value)
        copy.apply()
        receive(copy, 7)
        assert model.fused.data_ptr() == address
        assert model.fused.eq(value).all()
        assert model.part.eq(value).all()


def test_a_state_of_other_objects_in_the_memory_of_the_module() -> None:
    """A tensor that ``state_dict`` makes is gone after ``apply``: its memory must get the values."""
    model = Model()
    model._register_state_dict_hook(
        lambda module, found, *_: {
            name: tensor if name == "head.weight" else tensor.detach() for name, tensor in found.items()
        }
    )
    copy = staging(model)
    for value in (1, 2):
        receive(copy, value)
        copy.apply()
        assert {float(tensor.detach().double().mean()) for tensor in [*model.parameters(), model.step]} == {value}
        assert model.tied.weight.data_ptr() == model.head.weight.data_ptr()


def test_inference_tensors_change_places_with_inference_tensors_only() -> None:
    ordinary = nn.Linear(2, 2)
    with torch.inference_mode():
        inference = nn.Linear(2, 2)
        copy = staging(ordinary)
    assert not any(tensor.is_inference() for tensor in copy.tensors.values())
    assert all(tensor.is_inference() for tensor in staging(inference).tensors.values())


def test_values_of_a_mapping_are_copied_into() -> None:
    state = {"a": torch.zeros(3)}
    copy, address = staging(state), state["a"].data_ptr()
    receive(copy, 5)
    assert not state["a"].any()
    copy.apply()
    assert (state["a"].data_ptr(), state["a"].tolist()) == (address, [5, 5, 5])


def test_in_place_there_is_no_copy() -> None:
    state = {"a": torch.zeros(3)}
    copy = staging(state, in_place=True)
    assert copy.tensors["a"].data_ptr() == state["a"].data_ptr()


def test_other_tensors_than_at_the_start() -> None:
    state = {"a": torch.zeros(3), "b": torch.zeros(1)}
    copy = staging(state)
    state["a"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"these are others: \['a'\]"):
        copy.apply()
